"""Run `regsync auth check`: try which rights the credentials have in each repository.

Owns: the requests that try each right, and the output of the command.
May not know: how a credential is obtained.
Invariants: no manifest is read or written and no repository is created. An upload is started, and
cancelled at once, only in a repository that exists. A right that was not tried is not reported.
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

LARGEST_TAG_PAGE = 8 * 1024 * 1024  # bytes; some registries ignore `n=1` and list all tags
MOUNTING = {True: "enabled", False: "disabled", None: "unknown"}  # by `EcrAccount.mounts`
LATEST_TIME = 1e11  # seconds since 1970; a credential that expires later is not shown as expiring


async def check_access(config: Config, console: Console) -> int:
    """Try the rights in every repository of the mappings, and show them. Returns the exit status."""
    with closing(connect(console)) as transport:
        places = places_in_use(config)
        for registry, _ in places:
            transport.prepare(registry)
        discovery = Discovery(transport, Knowledge())
        repositories = [
            discovery.open_remote(registry, name, side) for (registry, name), side in places.items()
        ]
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
    """Return the repositories of the mappings, each once, without those in image layouts.

    A repository that is both a source and a target is returned as a target.
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
    """The rights that were found in one repository."""

    repository: RemoteRepository
    rights: list[str] = field(default_factory=list)  # of "pull" and "push", those that worked
    # "opened" if an upload could be started, "absent" if the target repository does not exist, or
    # None if no upload was tried
    upload: str | None = None
    error: SyncError | None = None
    asks_for_login: bool = True  # False if the registry never asks for credentials
    account: EcrAccount | None = None  # None if the repository is not a target in ECR

    @property
    def source(self) -> str | None:
        """Where the accepted credential was found. None if the registry accepted no credential."""
        login = self.repository.host.authenticator
        is_accepted = login.is_proven and not login.is_anonymous and self.asks_for_login
        if not is_accepted:
            return None
        return login.credential.found_at

    @property
    def expires(self) -> str | None:
        """When a cloud login expires, in UTC. None if this is unknown or later than LATEST_TIME."""
        cloud_login = self.repository.host.authenticator.cloud_login
        expires = cloud_login.expires if cloud_login else math.inf
        if not 0 <= expires < LATEST_TIME:
            return None
        return time_text(expires)

    def as_json(self) -> dict[str, object]:
        """Return the entry in `access` of the JSON document."""
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
    """Print a line about a repository, or log its error.

    With `--json` only errors are logged, because the document lists all repositories.
    """
    error = access.error
    if error is not None:
        message = f"{error.code}: {error}"
        console.log("error", "check_failed", message, code=error.code, hint=error.hint)
        return
    if console.writes_json:
        return
    rights = ",".join(access.rights) or "-"
    console.print_line(f"ok  {access.repository}  {rights}  ({', '.join(list_remarks(access))})")


def list_remarks(access: Access) -> list[str]:
    """Return the remarks of a line: the credential, its expiry, and why no push was tried."""
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
        remarks.append(describe_mounting(account))
    return remarks


def describe_mounting(account: EcrAccount) -> str:
    """Describe whether an ECR account mounts blobs between its repositories."""
    if account.mounts is None:
        return f"cannot tell whether blobs are mounted between repositories: {account.reason}"
    if account.mounts:
        return "blobs are mounted between repositories"
    return "blobs are not mounted between repositories: the account setting BLOB_MOUNTING is off"


class AccessCheck:
    """Tries the rights in repositories, and the credential of each registry."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        # The check of the credential, for each registry that has not asked for it yet. The result is
        # whether the registry ever asks for a login.
        self._credential_checks = dict[RegistryClient, Once[bool]]()

        self._accounts: dict[RegistryClient, EcrAccount] = {}  # settings, for each registry in ECR
        # For each registry in ECR, held while its settings are requested.
        self._account_locks = defaultdict[RegistryClient, anyio.Lock](anyio.Lock)

    async def try_repository(self, repository: RemoteRepository) -> Access:
        """Try the rights that a run needs in a repository. An error is returned in the result."""
        access = Access(repository)
        try:
            with repository.adding_place("check", str(repository)):
                await self._try_rights_and_credential(access)
        except SyncError as error:
            access.error = error
            is_missing = isinstance(error, RegistryError) and error.status == 404
            if is_missing and access.account and access.account.created_on_push is None:
                # The usual hint ends with a command, so this advice is put in front of it.
                template = "add a repository creation template for CREATE_ON_PUSH"
                error.hint = f"{template}, or {error.hint}"

        return access

    async def _try_rights_and_credential(self, access: Access) -> None:
        repository = access.repository
        try:
            await self._try_rights(access)
        except RegistryError as error:
            # The registry may have answered 404 without asking for a login. If it refuses the
            # credential, report that error instead of the 404.
            if error.status == 404:
                await self._check_credential(repository.host, repository)
            raise
        access.asks_for_login = await self._check_credential(repository.host, repository)

    async def _try_rights(self, access: Access) -> None:
        """Try to pull, and at a target to push. Raises SyncError if a right is missing."""
        await self._try_pull(access)
        is_target = access.repository.side is Side.TARGET
        if is_target and access.upload != "absent":
            await self._try_push(access)

    async def _try_pull(self, access: Access) -> None:
        """List one page of tags. Sets `access.upload` to "absent" if a push would create the repository.

        Raises SyncError if the listing is refused, unless this is a target that may still allow pushes.
        """
        repository = access.repository
        call = repository.build_call("tag_list", "GET", "tags/list?n=1")
        try:
            await self._transport.request(repository.host, call, ok=(200,), limit=LARGEST_TAG_PAGE)
        except RegistryError as error:
            # A credential that may not list tags may still be allowed to push.
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
        """Report whether a push can create the repository, which does not exist."""
        host = access.repository.host
        if host.registry.kind == "ecr_public":
            return False
        if host.registry.kind == "ecr":
            access.account = await self._account_of(host)
            return access.account.template_for(access.repository.name) is not None
        return True

    async def _try_push(self, access: Access) -> None:
        """Start an upload and cancel it. Raises SyncError if the registry refuses it."""
        repository = access.repository
        host = repository.host
        async with self._transport.pool.lease(host.origin) as lease:
            # The digest is only sent at the end of an upload, and this upload is cancelled before.
            no_blob = Descriptor("", "", 0)
            upload = Upload(repository, self._transport, lease, no_blob)
            await upload.start()
            await upload.cancel_upload()
        access.rights.append("push")
        access.upload = "opened"
        if host.registry.kind == "ecr":
            access.account = await self._account_of(host)

    async def _account_of(self, host: RegistryClient) -> EcrAccount:
        """Return the settings of a registry's AWS account. They are requested once per registry."""
        from _regsync.auth.aws import EcrAccount, read_account

        login = host.authenticator.cloud_login
        if login is None:
            return EcrAccount(reason="only AWS's own credentials can read the account's settings")
        async with self._account_locks[host]:
            if host not in self._accounts:
                self._accounts[host] = await read_account(login.machine, host.registry)
        return self._accounts[host]

    async def _check_credential(self, host: RegistryClient, repository: RemoteRepository) -> bool:
        """Check the credential with a registry. Returns False if the registry never asks for a login.

        If the registry has already accepted the credential, no request is sent. Otherwise the check is
        made once per registry, because a push may need the credential later. If the registry refuses
        the credential, RegistryError is raised for each of its repositories.
        """
        if host not in self._credential_checks:
            if host.authenticator.is_proven:
                return True
            self._credential_checks[host] = Once()
        try:
            send = partial(self._send_credential, host, repository)
            return await self._credential_checks[host].get(send)
        except SyncError as error:
            # The error may be that of a check for another repository, and names it.
            raise error.without_place() from error.__cause__

    async def _send_credential(self, host: RegistryClient, repository: RemoteRepository) -> bool:
        """Request `/v2/` with the credential. Returns whether the registry asks for a login.

        A registry that asks for logins in any repository asks for one here. Raises RegistryError if the
        credential is refused.
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
            return False  # the registry lacks this endpoint, so the credential cannot be checked
        if login.is_proven:
            return True

        # The registry has answered without asking for a login, so offer the credential in a second
        # request. If the first answer had challenges, as zot's has, a second 200 means that the
        # credential is valid. Without challenges the registry may have ignored it.
        challenges = answer.headers.all("www-authenticate")
        if not await login.log_in_unasked(challenges, repository.api_name, repository.rights):
            return False
        await self._transport.request(host, ping, ok=(200,))
        return bool(challenges)
