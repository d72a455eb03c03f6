"""."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

from _regsync.errors import AuthError, LoginExpired, ProtocolBroken, RegistryError, SyncError
from _regsync.net.http1 import Pieces, Response
from _regsync.net.pool import Lease
from _regsync.oci.manifest import Descriptor
from _regsync.providers import UploadStyle
from _regsync.registry.repository import Repository
from _regsync.registry.throttle import ATTEMPTS, LARGE_BODY, Patience
from _regsync.registry.transport import ERROR_BODY, Call, Transport, check_foreign, resolve_location
from _regsync.text import clean

_OCTETS = ("Content-Type", "application/octet-stream")


class _Counted:
    """A body that tells when the target has taken so much of it that it is well under way."""

    def __init__(self, pieces: Pieces, under_way: Callable[[], None]) -> None:
        self.length = pieces.length
        self._pieces = pieces
        self._under_way = under_way
        self._given = 0

    async def next(self) -> memoryview:
        if self._given >= LARGE_BODY:
            self._under_way()
        piece = await self._pieces.next()
        self._given += len(piece)
        return piece


class Upload:
    """One blob on its way into a repository: `start`, then `send` unless that is unnecessary, all
    over one `lease`. The open session's path is `session`, what it holds already `offset`, the path
    of one whose body broke `broken`."""

    def __init__(
        self, repository: Repository, transport: Transport, lease: Lease, blob: Descriptor
    ) -> None:
        self.repository = repository
        self._transport = transport
        self.lease = lease
        self.blob = blob
        self._origin = repository.host.origin
        self.session = ""
        self.broken = ""
        self.offset = 0
        self.sent = 0
        # Whether a HEAD said so; whether a body began with the first byte; whether a 401 renewed
        # the login; whether a start that names no blob was refused for good, as that of any other
        # would be.
        self.absent = False
        self.begun = False
        self._renewed = False
        self.refused = False
        self.style: UploadStyle = "put"
        # its dialect; anew with each chunk
        self.turned = False
        self.patience = Patience(ATTEMPTS)

    async def start(self, mount_from: str | None = None) -> bool:
        """Open an upload session, or mount from another repository (empty: any, at Google's): True
        when now present. A refused mount is a session (202) like any other (section 1.8); an error
        not passing leads to a plain POST."""
        if mount_from is not None:
            query = f"?mount={self.blob.digest}" + (f"&from={mount_from}" if mount_from else "")
            try:
                return await self._post(
                    query, reads="" if mount_from == self.repository.api_name else mount_from
                )
            except (
                AuthError,
                RegistryError,
            ) as error:  # the other one may be closed to us while this one is open
                fatal = (
                    error.fatal
                    if isinstance(error, AuthError)
                    else error.retryable and error.status != 500
                )
                if fatal:
                    raise
        try:
            return await self._post("")
        except RegistryError as error:
            self.refused = not error.retryable
            raise

    async def whole(self, body: bytes) -> bool:
        """Upload in one POST (section 1.7, D): True when taken; else a session may be open
        (`session`).
        """
        try:
            return await self._post(f"?digest={self.blob.digest}", _OCTETS, body=body)
        except RegistryError as error:
            if error.retryable or error.status in (401, 403):
                raise
            return False

    async def _post(
        self, query: str, *headers: tuple[str, str], body: bytes = b"", reads: str = ""
    ) -> bool:
        """Say whether the answer is that the blob is there; else it opens a session."""
        repository = self.repository
        self.begun = bool(body)
        call = repository.call(
            "upload_start", "POST", f"blobs/uploads/{query}", *headers, body=body
        )
        call = call._replace(also=((reads, "pull"),) if reads else ())
        ok = (201, 202) if query else (202,)
        async with self._transport.opened(repository.host, call, ok, lease=self.lease) as response:
            if response.status == 202:
                self._opened(call, response, 0)
            else:
                repository.compare(response, self.blob.digest)
            return response.status == 201

    def _opened(self, call: Call, response: Response, offset: int) -> None:
        own = self.repository.host.origin
        location = response.headers.get("location")
        if location is None:
            raise ProtocolBroken("the upload was accepted without a Location")
        origin, path = resolve_location(base := call.origin or own, call.path, location)
        check_foreign(own, origin)
        if origin != base and (
            base != own or not self.repository.row.foreign_uploads
        ):  # once abroad it stays (R1)
            raise ProtocolBroken(
                f"the registry sends the upload to another host ({clean(origin.host, 100)}), refused"
            )
        # Only now: a session that is refused is not cancelled either.
        self._origin = origin
        self.session = path
        self.broken = ""
        self.offset = offset
        self.repository.host.authenticator.conceal(path)

    async def resume(self) -> None:
        """Ask for what the session of a broken body has kept (section 1.9); with any of it, or in
        chunks, it is open again. A host that has forgotten one is not asked again (docs/design.md
        section 6, rule 16)."""
        repository = self.repository
        call = self.repository.call("upload_start", "GET", "")._replace(path=self.broken)
        chunks = self.style == "chunks"
        try:
            async with self._transport.opened(
                repository.host, call, (204,), lease=self.lease
            ) as response:
                self.broken = ""
                end = re.fullmatch("0-([0-9]{1,18})", response.headers.get("range") or "")
                # `0-0` says nothing: distribution answers so for no byte and for one. What was
                # acknowledged counts.
                kept = max(
                    int(end[1]) + 1 if end and 0 < int(end[1]) < self.sent else 0,
                    self.offset * chunks,
                )
                if kept or chunks:
                    self._opened(call, response, kept)
        except RegistryError as error:
            if error.retryable and not error.forgot_session:
                raise
            if error.forgot_session:
                self.session = ""  # a chunk may go again to where it went, else
            repository.host.resumes = False
            self.broken = ""

    async def send(self, pieces: Pieces, *, last: bool = True) -> bool:
        """Stream the blob, or a part before the `last`, which closes the session; False when only
        asking tells whether it arrived. Raises what the source raises, RegistryError when refused,
        WireError when the line broke."""
        host = self.repository.host
        repository = self.repository
        own = self._origin == self.repository.host.origin
        self.sent = self.offset + pieces.length
        sized = self.offset or (self.style == "chunks" and not last)
        span = (
            (("Content-Range", f"{self.offset}-{self.sent - 1}"),)
            if pieces.length and sized
            else ()
        )
        digest = f"{'&' if '?' in self.session else '?'}digest={self.blob.digest}" if last else ""
        action = "upload_body" if pieces.length or not last else "upload_finish"
        call = self._call(action, "PUT" if last else "PATCH", digest, _OCTETS, *span)
        timeouts = self._transport.edge.timeouts
        seconds = timeouts.finish + self.blob.size / timeouts.finish_bytes_per_second
        used = await self._transport.login(host, call, before_body=True)
        self.broken = self.session if host.resumes and own and self.style != "patch" else ""
        self.begun = self.begun or not self.offset
        async with (
            self._transport.metered(host, call, self.lease) as hear,
            self._transport.kept(host, self._origin, self.lease) as lease,
        ):
            if self.style != "chunks":
                self.session = ""  # whatever happens to a body, its session takes no other
            self._transport.count(host.origin, call.action)
            response = await lease.exchange(call.request(used), seconds, _Counted(pieces, hear))
            hear(response)
            self._transport.trace(call, lease, response)
            if not response.early or response.status < 500:
                self.broken = ""  # that session has got its answer
            if response.status == 401 and own and not self._renewed:
                self._renewed = True
                await response.read(ERROR_BODY)
                await self._transport.relearn(host, call, used, response)
                raise LoginExpired(
                    "the login expired during the upload"
                )  # what was sent begins again
            await self._transport.expect(host, response, (201, 204) if last else (201, 202, 204))
            self.session = ""
            if last:
                repository.compare(response, self.blob.digest)
            elif not response.early:
                self._opened(call, response, self.sent)
            return not response.early

    async def cancel_upload(self) -> None:
        """End the session, which gets no body (section 1.9): one request, whose answer says
        nothing.
        """
        host = self.repository.host
        call = self._call("upload_finish", "DELETE", "")
        with suppress(SyncError):
            async with self._transport.opened(host, call, range(600), lease=self.lease):
                self.session = ""

    def _call(self, action: str, method: str, query: str, *headers: tuple[str, str]) -> Call:
        call = self.repository.call(action, method, "", *headers)
        return call._replace(path=self.session + query, origin=self._origin)
