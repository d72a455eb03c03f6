"""`regsync auth check`: what the registries of a configuration let us do.

Owns: what is asked of each repository, and how the answer is told.
May not know: how a login is made.
Invariants: no manifest is read or written and no repository is created: an upload is begun, and
ended at once, only in a repository that exists. What was not tried is not among the rights.
Follows: docs/design.md section 2 ("auth check").
"""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import anyio

from _regsync.app.console import Console
from _regsync.app.environment import connect
from _regsync.config.model import Config, Registry
from _regsync.errors import AuthError, RegistryError, Side, SyncError
from _regsync.oci.manifest import Descriptor
from _regsync.registry.host import RegistryClient
from _regsync.registry.remote import RemoteRepository
from _regsync.registry.transport import Transport
from _regsync.registry.upload import Upload
from _regsync.state.knowledge import Knowledge
from _regsync.sync.discovery import Discovery
from _regsync.sync.once import Once, gather
from _regsync.sync.report import error_json
from _regsync.text import printable, time_text

if TYPE_CHECKING:
    from _regsync.auth.aws import EcrAccount

LARGEST_TAG_PAGE = 8 * 1024 * 1024  # bytes; some registries ignore `n=1`
MOUNTING = {True: "enabled", False: "disabled", None: "unknown"}
LATEST_TIME = 1e11  # seconds since 1970; the end of a login that is later is shown as unknown


async def check_access(config: Config, console: Console) -> int:
    """Ask every repository in use, tell what works and what is missing; return the exit status."""
    with closing(connect(console)) as transport:
        places = places_in_use(config)
        for registry, _ in places:
            transport.prepare(registry)
        discovery = Discovery(transport, Knowledge())
        repositories = [discovery.open_remote(*place, side) for place, side in places.items()]
        access_check = AccessCheck(transport)

        async def check_one(repository: RemoteRepository) -> Access:
            access = await access_check.try_repository(repository)
            print_access(access, console)
            return access

        accesses = await gather([partial(check_one, repository) for repository in repositories])
    if console.writes_json:
        rows = [access.as_json() for access in accesses]
        rows.sort(key=lambda row: str(row["repository"]))
        console.print_document({"schema": 1, "access": rows})
    return AuthError.exit_status if any(access.error for access in accesses) else 0


def places_in_use(config: Config) -> dict[tuple[Registry, str], Side]:
    """Return each repository once; one that is source and target of mappings is a target. Those of
    image layouts are left out: nobody logs in to a directory.
    """
    places = dict[tuple[Registry, str], Side]()
    for mapping in config.mappings:
        if not mapping.source.is_layout:
            places.setdefault((mapping.source, mapping.source_repository), Side.SOURCE)
        for target in mapping.targets:
            if not target.is_layout:
                places[target, mapping.target_repository] = Side.TARGET
    return places


@dataclass
class Access:
    """What one repository let us do."""

    repository: RemoteRepository
    rights: list[str] = field(default_factory=list)  # "pull" and "push", as far as they worked
    upload: str | None = None  # at a target: "opened", or "absent" without the repository
    error: SyncError | None = None
    asks_for_login: bool = True  # whether the registry asks for a login at all
    account: EcrAccount | None = None  # only at a target in ECR

    @property
    def source(self) -> str | None:
        """Where the credential that the registry took was found; None where it took none."""
        login = self.repository.host.authenticator
        is_taken = login.is_proven and not login.is_anonymous and self.asks_for_login
        if not is_taken:
            return None
        return login.credential.found_at

    @property
    def expires(self) -> str | None:
        """The end of a cloud's login in UTC; None where it is unknown or beyond `LATEST_TIME`."""
        cloud_login = self.repository.host.authenticator.cloud_login
        expires = cloud_login.expires if cloud_login else math.inf
        if not 0 <= expires < LATEST_TIME:
            return None
        return time_text(expires)

    def as_json(self) -> dict[str, object]:
        """Return the row of the JSON document."""
        registry = self.repository.host.registry
        return {
            "registry": registry.alias,
            "repository": str(self.repository),
            "rights": ",".join(self.rights),
            "method": registry.auth_type or "detected",
            "source": self.source,
            "expires": self.expires,
            "upload": self.upload,
            "mounting": None if self.account is None else MOUNTING[self.account.mounts],
            "error": error_json(self.error),
        }


def print_access(access: Access, console: Console) -> None:
    """Print a line about a repository, or log its error; `--json` prints all of them at the end."""
    error = access.error
    if error is not None:
        message = f"{error.code}: {error}"
        console.log("error", "check_failed", message, code=error.code, hint=error.hint)
        return
    if console.writes_json:
        return
    rights = ",".join(access.rights) or "-"
    console.print_line(f"ok  {access.repository}  {rights}  ({', '.join(remarks_on(access))})")


def remarks_on(access: Access) -> list[str]:
    """Say where a login comes from, how long it lasts, and what keeps a push from being tried."""
    login = access.repository.host.authenticator
    remarks = [access.source or "anonymous"]
    if access.source is None and not login.is_anonymous:
        remarks.append(f"no login needed, found: {login.credential.found_at}")
    if access.expires:
        remarks.append(f"until {access.expires}")
    if access.upload == "absent":
        remarks.append("the repository does not exist yet, so no push was tried")

    account = access.account
    if account is not None:
        template = account.template_for(access.repository.name)
        if access.upload == "absent" and template is not None:
            remarks.append(f"the creation template {printable(template)!r} lets a push create it")
        remarks.append(mounting_remark(account))
    return remarks


def mounting_remark(account: EcrAccount) -> str:
    """Say whether blobs are mounted between the repositories of an account in ECR."""
    if account.mounts is None:
        return f"cannot tell whether blobs are mounted between repositories: {account.reason}"
    if account.mounts:
        return "blobs are mounted between repositories"
    return "blobs are not mounted between repositories: the account setting BLOB_MOUNTING is off"


class AccessCheck:
    """Tries repositories, and the credential of each registry."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        # By registry that was shown the credential: whether it asks for a login at all.
        self._asks_for_login = dict[RegistryClient, Once[bool]]()

        self._accounts: dict[RegistryClient, EcrAccount] = {}  # by registry in ECR
        # By registry: held while it is asked for its account.
        self._account_locks = defaultdict[RegistryClient, anyio.Lock](anyio.Lock)

    async def try_repository(self, repository: RemoteRepository) -> Access:
        """Try what a run would do in a repository, and the credential it would do it with."""
        access = Access(repository)
        try:
            with repository.adding_place("check", str(repository)):
                await self._try_rights_and_credential(access)
        except SyncError as error:
            access.error = error
            is_missing = isinstance(error, RegistryError) and error.status == 404
            if is_missing and access.account and access.account.created_on_push is None:
                # The usual hint ends with a command, so the other remedy goes in front.
                template = "add a repository creation template for CREATE_ON_PUSH"
                error.hint = f"{template}, or {error.hint}"

        return access

    async def _try_rights_and_credential(self, access: Access) -> None:
        repository = access.repository
        try:
            await self._try_rights(access)
        except RegistryError as error:
            # A registry may say 404 before it asks for a login. Where the login is refused, that is
            # the error to tell.
            if error.status == 404:
                await self._prove_credential(repository.host, repository)
            raise
        access.asks_for_login = await self._prove_credential(repository.host, repository)

    async def _try_rights(self, access: Access) -> None:
        """Read, and at a target open an upload; SyncError where access is refused."""
        await self._try_pull(access)
        is_target = access.repository.side is Side.TARGET
        if is_target and access.upload != "absent":
            await self._try_push(access)

    async def _try_pull(self, access: Access) -> None:
        """List tags; SyncError where that is refused and a push cannot be tried either."""
        repository = access.repository
        call = repository.build_call("tag_list", "GET", "tags/list?n=1")
        try:
            await self._transport.request(repository.host, call, ok=(200,), limit=LARGEST_TAG_PAGE)
        except RegistryError as error:
            # Whoever may not list a repository may be allowed to push to it.
            may_take_pushes = repository.side is Side.TARGET and error.status in (401, 403, 404)
            if not may_take_pushes:
                raise
            if error.status == 404:
                if not await self._may_be_created(access):
                    raise
                access.upload = "absent"
        else:
            access.rights.append("pull")

    async def _may_be_created(self, access: Access) -> bool:
        """Say whether a push may create a repository that does not exist."""
        host = access.repository.host
        if host.registry.kind == "ecr_public":
            return False
        if host.registry.kind == "ecr":
            access.account = await self._account_of(host)
            return access.account.template_for(access.repository.name) is not None
        return True

    async def _try_push(self, access: Access) -> None:
        """Open an upload and cancel it; SyncError where that is refused."""
        repository = access.repository
        host = repository.host
        async with self._transport.pool.lease(host.origin) as lease:
            # An upload begins without the blob's digest, and this one has no blob.
            no_blob = Descriptor("", "", 0)
            upload = Upload(repository, self._transport, lease, no_blob)
            await upload.start()
            await upload.cancel_upload()
        access.rights.append("push")
        access.upload = "opened"
        if host.registry.kind == "ecr":
            access.account = await self._account_of(host)

    async def _account_of(self, host: RegistryClient) -> EcrAccount:
        """Return what ECR tells of a registry's account; it is asked once."""
        from _regsync.auth.aws import EcrAccount, read_account

        login = host.authenticator.cloud_login
        if login is None:
            return EcrAccount(reason="only AWS's own credentials can read the account's settings")
        async with self._account_locks[host]:
            if host not in self._accounts:
                self._accounts[host] = await read_account(login.machine, host.registry)
        return self._accounts[host]

    async def _prove_credential(self, host: RegistryClient, repository: RemoteRepository) -> bool:
        """Show the credential, once, to a registry that has let in requests without it: a push may need
        it later, and a wrong one is to be known now.

        Returns whether the registry asks for a login at all. A refusal is raised for each repository.
        """
        if host not in self._asks_for_login:
            if host.authenticator.is_proven:
                return True
            self._asks_for_login[host] = Once()
        try:
            show = partial(self._show_credential, host, repository)
            return await self._asks_for_login[host].get(show)
        except SyncError as error:
            raise error.without_place() from error.__cause__

    async def _show_credential(self, host: RegistryClient, repository: RemoteRepository) -> bool:
        """Ask `/v2/`, and return whether the registry asks for a login; RegistryError where it refuses
        the credential. A registry that wants logins anywhere wants one there.
        """
        login = host.authenticator
        if login.is_anonymous and login.cloud_login is None:
            return False
        ping = repository.build_call("tag_list", "GET", "")._replace(path="/v2/")
        try:
            answer = await self._transport.request(host, ping, ok=(200,))
        except RegistryError as error:
            if error.status in (401, 403):
                raise
            return False  # without this endpoint, there is nowhere to show the credential
        if login.is_proven:
            return True

        # A registry that answers 200 may send challenges all the same, as zot does. Without
        # challenges it may look at no login, so that a second 200 proves nothing.
        challenges = answer.headers.all("www-authenticate")
        if not await login.offer(challenges, repository.api_name, repository.rights):
            return False
        await self._transport.request(host, ping, ok=(200,))
        return bool(challenges)
