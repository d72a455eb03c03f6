"""`regsync auth check`: what the registries of a configuration let us do.

Owns: what is asked of each repository, and how the answer is told.
May not know: how a login is made.
Invariants: no manifest is read or written and no repository is created: an upload is begun, and
ended at once, only in a repository that exists.
Follows: docs/design.md section 2.
"""

from __future__ import annotations

import math
import time
from contextlib import closing
from typing import Any

from _regsync.app.console import Console
from _regsync.app.process import connect
from _regsync.config.model import Config, Registry
from _regsync.errors import AuthError, RegistryError, Side, SyncError
from _regsync.oci.manifest import Descriptor
from _regsync.registry.repository import Repository
from _regsync.registry.transport import Transport
from _regsync.registry.upload import Upload
from _regsync.state.knowledge import Knowledge
from _regsync.sync.discovery import Discovery, gather
from _regsync.sync.report import Outcome

CONCURRENT_CHECKS = 16
LARGEST_TAG_PAGE = 8 * 1024 * 1024  # bytes; some registries ignore `n=1`
LATEST_TIME = 1e11  # seconds since 1970; a later end of a login is none that a calendar has


async def check(config: Config, console: Console) -> int:
    """Ask every repository in use, tell what works and what is missing; return the exit status."""
    transport = connect(console)
    rows = list[dict[str, Any]]()
    with closing(transport):
        places = places_in_use(config)
        for registry, _ in places:
            transport.prepare(registry)
        discovery = Discovery(transport, Knowledge())
        repositories = iter([discovery.repository(*place, side) for place, side in places.items()])

        async def work() -> None:
            for repository in repositories:
                rows.append(await check_repository(transport, repository, console))

        await gather([work] * CONCURRENT_CHECKS)
    if console.as_json:
        rows.sort(key=lambda row: str(row["repository"]))
        console.document({"schema": 1, "access": rows})
    return AuthError.exit_status if any(row["error"] for row in rows) else 0


def places_in_use(config: Config) -> dict[tuple[Registry, str], Side]:
    """Return each repository once; one that is source and target of mappings is a target."""
    places = dict[tuple[Registry, str], Side]()
    for mapping in config.mappings:
        places.setdefault((mapping.source, mapping.source_repository), Side.SOURCE)
        for target in mapping.targets:
            places[target, mapping.target_repository] = Side.TARGET
    return places


async def check_repository(
    transport: Transport, repository: Repository, console: Console
) -> dict[str, Any]:
    """Try one repository, tell the result in a line, and return its row of the JSON document."""
    login = repository.host.authenticator
    upload = None
    error = None
    try:
        with repository.adding_place("check", str(repository)):
            upload = await try_access(transport, repository)
    except SyncError as failure:
        error = failure
        message = f"{error.code}: {error}"
        console.log("error", "check_failed", message, code=error.code, hint=error.hint)

    # Credentials that were never asked for prove nothing.
    was_used = not login.is_anonymous and login.is_proven
    source = login.credential.origin if was_used else None
    expires = end_of_login(login.cloud_login.expires if login.cloud_login else math.inf)
    if error is None and not console.as_json:
        remarks = [source or "anonymous"]
        if expires:
            remarks.append(f"until {expires}")
        if upload == "absent":
            remarks.append("not there yet, so no push was tried")
        console.line(f"ok  {repository}  {repository.rights}  ({', '.join(remarks)})")
    return {
        "registry": repository.host.registry.alias,
        "repository": str(repository),
        "rights": repository.rights,
        "method": repository.host.registry.auth_type or "detected",
        "source": source,
        "expires": expires,
        "upload": upload,
        "error": Outcome("", "", "", error=error).as_json()["error"],
    }


def end_of_login(expires: float) -> str | None:
    """Write the end of a login in UTC; None where nobody says, or no calendar has it."""
    if not 0 <= expires < LATEST_TIME:
        return None
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expires))


async def try_access(transport: Transport, repository: Repository) -> str | None:
    """Read, and at a target open an upload.

    Return "opened" for an upload that was opened, "absent" for a target that is not there yet and
    may be created by a push, None for a source; SyncError where access is refused.
    """
    host = repository.host
    is_target = repository.side is Side.TARGET
    call = repository.call("tag_list", "GET", "tags/list?n=1")
    try:
        await transport.request(host, call, ok=(200,), limit=LARGEST_TAG_PAGE)
    except RegistryError as error:
        # A registry that hides a repository may let us push to it all the same.
        if not is_target or error.status not in (401, 403, 404):
            raise
        is_ecr = host.registry.kind.startswith("ecr")
        if error.status == 404 and is_ecr:  # ECR creates no repository on a push
            raise
        if error.status == 404:
            return "absent"
    if not is_target:
        return None

    async with transport.pool.lease(host.origin) as lease:
        upload = Upload(repository, transport, lease, Descriptor("", "", 0))
        await upload.start()
        await upload.cancel_upload()
    return "opened"
