"""Run `regsync auth check`: try which rights the credentials have in each repository.

Invariants: no manifest is read or written and no repository is created. An upload is started, and
cancelled at once, only in a repository that exists. A right that was not tried is not reported.
Follows: docs/design.md section 2 ("auth check").
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

from _regsync.app.console import Console
from _regsync.app.environment import connected
from _regsync.config import Config, Registry
from _regsync.errors import AuthError, RegistryError, Side, SyncError
from _regsync.oci import Descriptor
from _regsync.registry.client import RegistryClient
from _regsync.registry.endpoints import RemoteRepository
from _regsync.registry.upload import Upload
from _regsync.state import Knowledge
from _regsync.sync.discovery import Discovery
from _regsync.sync.once import Once, gather
from _regsync.sync.report import error_json
from _regsync.text import time_text

LARGEST_TAG_PAGE = 8 * 1024 * 1024  # bytes; some registries ignore `n=1` and list all tags
LATEST_TIME = 1e11  # seconds since 1970; a credential that expires later is not shown as expiring


async def check_access(config: Config, console: Console) -> int:
    """Try the rights in every repository of the mappings, and show them.

    Returns the exit status.
    """
    sides = repositories_in_use(config)
    async with connected(console, config.registries_in_use) as transport:
        discovery = Discovery(transport, Knowledge())
        # All are opened before the first request, so that one token is for several of them.
        repositories = [
            discovery.open_remote(registry, name, side) for (registry, name), side in sides.items()
        ]
        # Whether each registry ever asks for a login.
        logins = defaultdict[RegistryClient, Once[bool]](Once)
        rows = await gather(
            partial(check_repository, repository, logins[repository.host], console)
            for repository in repositories
        )
    if console.writes_json:
        rows = sorted(rows, key=lambda row: str(row["repository"]))
        console.print_document({"schema": 1, "access": rows})
    return AuthError.exit_status if any(row["error"] for row in rows) else 0


def repositories_in_use(config: Config) -> dict[tuple[Registry, str], Side]:
    """Return the side of each repository of the mappings by (registry, name), without layouts.

    The side of a repository that is both a source and a target is TARGET.
    """
    sides = dict[tuple[Registry, str], Side]()
    for mapping in config.mappings:
        # Do not replace TARGET, which an earlier mapping may have set.
        sides.setdefault((mapping.source, mapping.source_repository), Side.SOURCE)
        for target in mapping.targets:
            sides[target, mapping.target_repository] = Side.TARGET
    return {key: side for key, side in sides.items() if not key[0].is_layout}


async def check_repository(
    repository: RemoteRepository, login: Once[bool], console: Console
) -> dict[str, Any]:
    """Try the rights that a run needs in a repository: pull at a source, push at a target.

    They are shown at once, because other checks may take long. Returns the entry in `access` of the
    JSON document. `login` is whether the registry ever asks for one.
    """
    rights = list[str]()  # "pull" and "push", as far as they worked
    asks_for_login = True
    error: SyncError | None = None
    try:
        with repository.adding_context("check", str(repository)):
            try:
                await _try_rights(repository, rights)
            finally:
                # Also after an error, such as a 404 that a registry may give to anybody: then a refused
                # credential is reported instead.
                asks_for_login = await _get_login(login, repository)
    except SyncError as failure:
        error = failure

    authenticator = repository.host.authenticator
    cloud_login = authenticator.cloud_login
    expires = cloud_login.expires if cloud_login is not None else -1.0
    is_accepted = authenticator.was_accepted and not authenticator.is_anonymous and asks_for_login
    row: dict[str, Any] = {
        "repository": str(repository),
        "rights": ",".join(rights),
        "source": authenticator.credential.found_at if is_accepted else None,
        "expires": time_text(expires) if 0 <= expires < LATEST_TIME else None,
        "error": error_json(error),
    }
    if error is not None:
        message = f"{error.code}: {error}"
        console.log("error", "check_failed", message, code=error.code, hint=error.hint)
    elif not console.writes_json:
        remarks = [row["source"] or "anonymous"]
        if not (is_accepted or authenticator.is_anonymous):
            remarks.append(f"no login needed, found: {authenticator.credential.found_at}")
        if repository.side is Side.TARGET and "push" not in rights:
            remarks.append("the repository does not exist yet, so no push was tried")
        console.print_line(f"ok  {repository}  {row['rights'] or '-'}  ({', '.join(remarks)})")
    return row


async def _try_rights(repository: RemoteRepository, rights: list[str]) -> None:
    """List a page of one tag and, at a target that exists, start an upload and cancel it.

    Adds what works to `rights`. Raises SyncError if a source refuses the listing, if a target
    refuses the upload, or if a target does not exist and a push would not create it.
    """
    try:
        call = repository.build_call("tag_list", "GET", "tags/list?n=1")
        await repository.host.request(call, ok=(200,), limit=LARGEST_TAG_PAGE)
        rights.append("pull")
    except RegistryError as error:
        # A push needs no list of tags.
        if repository.side is Side.SOURCE or error.status not in (401, 403, 404):
            raise
        if error.status == 404:
            # In ECR only a creation template lets a push create a repository. Most other
            # registries create repositories when they are pushed to.
            if repository.host.registry.kind in ("ecr", "ecr_public"):
                raise
            return

    if repository.side is Side.TARGET:
        # The digest is only sent at the end of an upload, and this upload is cancelled before.
        upload = Upload(repository, Descriptor("", "", 0))
        await upload.start()
        await upload.cancel_upload()
        rights.append("push")


async def _get_login(login: Once[bool], repository: RemoteRepository) -> bool:
    """Return the answer of `_asks_for_login`, which is asked once for each registry."""
    try:
        return await login.get(partial(_asks_for_login, repository))
    except SyncError as error:
        # Each repository adds its own name to a copy of the shared error.
        raise error.copy_without_context() from None


async def _asks_for_login(repository: RemoteRepository) -> bool:
    """Request `/v2/` with the credential. Returns whether the registry ever asks for a login.

    A registry that asks for logins in any repository asks for one here. Returns False too if this
    cannot be found out. Raises RegistryError if the credential is refused.
    """
    host = repository.host
    login = host.authenticator
    has_asked_before = login.was_accepted  # so far it was sent only if the registry asked
    if has_asked_before:
        return True
    # A cloud login is anonymous until its first request.
    if login.is_anonymous and login.cloud_login is None:
        return False
    ping = repository.build_call("tag_list", "GET", "/v2/")
    try:
        answer = await host.request(ping, ok=(200,))
    except RegistryError as error:
        if error.status in (401, 403):
            raise
        return False  # the registry does not serve `/v2/`
    if login.was_accepted:  # the transport has sent the credential in response to a 401
        return True

    # The registry has answered without asking for a login, so offer the credential in a second
    # request. If the first answer had challenges, as zot's has, a second 200 means that the
    # credential is valid. Without challenges the registry may have ignored it.
    challenges = answer.headers.all("www-authenticate")
    if not await login.log_in_unasked(challenges):
        return False
    await host.request(ping, ok=(200,))
    return bool(challenges)
