"""One upload session: a blob on its way into a repository at a registry.

A session takes the blob from byte `offset` on. A body that got no answer leaves it broken: `resume`
asks how much arrived. The requests are POST, PATCH, PUT, GET and DELETE.

May not know: the source of the bytes; whether to upload a blob, or to continue after an error.
Invariants: a Location on another origin gets no credentials (I6); a body is sent once (I7).
Follows: OCI distribution-spec 1.1 ("Pushing blobs"), docs/specification.md section 8.2,
docs/protocol-facts.md sections 1.6 to 1.9 and 7.9 (its numbers are cited below).
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any, NoReturn, Protocol

from _regsync.addresses import check_foreign, resolve_location
from _regsync.auth.tokens import says_login_ended
from _regsync.errors import (
    AuthError,
    ContentError,
    LoginExpired,
    ProtocolBroken,
    RegistryError,
    SyncError,
)
from _regsync.net.wire import SESSION_GONE, Header, Pieces, Response
from _regsync.oci import Descriptor
from _regsync.providers import Dialect
from _regsync.registry.client import ERROR_BODY, Call, Exchange, RegistryClient, mask_signature
from _regsync.registry.limits import Turn
from _regsync.text import printable

_MIB = 1024 * 1024

_OCTETS: Header = ("Content-Type", "application/octet-stream")
_ANY_STATUS = range(600)

# How often a blob goes on with a new login after one of its bodies was refused.
_MOST_LOGINS = 5


class UploadTarget(Protocol):
    """The parts of a repository that an upload uses."""

    host: RegistryClient
    dialect: Dialect
    api_name: str

    def build_call(
        self, action: str, method: str, path: str, *headers: Header, **options: Any
    ) -> Call: ...


class Upload:
    """The upload of one blob."""

    def __init__(self, repository: UploadTarget, blob: Descriptor) -> None:
        self.repository = repository
        self.blob = blob
        self._host = repository.host
        self._origin = self._host.origin  # of the session

        self.session = ""  # the path of the session, or "" if there is none
        self.offset = 0  # bytes that it has received, as far as is known
        self.is_broken = False  # whether its last body got no answer, and `resume` may help
        self.in_chunks = False  # whether the body is sent in several requests
        self.mount_status = 0  # of the answer to the last request to mount; 0: none
        self._end = 0  # the offset after the body that is being sent
        self._was_throttled = False  # whether the session's last body was refused with 429
        self._login_refusals = 0  # of requests with a body

    async def start(self, mount_from: str | None = None) -> bool:
        """Mount the blob, or open a session. Returns True if the repository has the blob now, and
        False if a session is open.

        `mount_from` names the repository to mount the blob from ("" at Google's registries: any
        repository). If it is None, no mount is tried. A mount that is not performed is answered by
        202, which opens a session (section 1.8). A mount that fails permanently is followed by a
        plain POST, because we may lack access to the other repository only.
        """
        self.mount_status = 0
        if mount_from is not None:
            try:
                return await self.try_mount(self.blob.digest, mount_from)
            except AuthError as error:
                if error.fatal:
                    raise
            except RegistryError as error:
                may_be_temporary = error.retryable and error.status != 500
                if may_be_temporary:
                    raise
        await self._post("blobs/uploads/", self.blob.digest, ok=(202,))
        return False

    async def try_mount(self, digest: str, mount_from: str) -> bool:
        """Try to mount any blob from the repository `mount_from` ("": from any repository). Returns
        True if the repository has the blob now, and False if a session was opened instead.
        """
        path = f"blobs/uploads/?mount={digest}"
        others: tuple[tuple[str, str], ...] = ()
        if mount_from:
            path += f"&from={mount_from}"
            if mount_from != self.repository.api_name:
                others = ((mount_from, "pull"),)  # the token must cover both
        try:
            self.mount_status = await self._post(path, digest, ok=(201, 202), other_rights=others)
        except RegistryError as error:
            self.mount_status = error.status
            raise
        return self.mount_status == 201

    async def _post(self, path: str, digest: str, ok: tuple[int, ...], **options: Any) -> int:
        """Send a POST, and return its status: 201 if the blob exists, 202 if a session was opened."""
        call = self.repository.build_call("upload_start", "POST", path, **options)
        async with await self._host.exchange(call, ok) as response:
            if response.status == 202:
                self._open(call, response, 0)
            else:
                check_stored_digest(response, digest)
            return response.status

    async def send(self, pieces: Pieces, *, is_last: bool = True, turn: Turn | None = None) -> bool:
        """Send a part of the blob with PATCH, or the last part with PUT and the digest. `turn` was
        taken for the request already.

        Returns True if the body was received completely. Returns False if the registry answered
        with success before all of it was sent: only a HEAD can show whether the blob exists.

        Raises LoginExpired if the body may be sent again with a new login, RegistryError if the
        registry refuses the body, WireError if the connection breaks, and all errors of `pieces`.
        """
        self._end = self.offset + pieces.length
        call = self._body_call(pieces.length, is_last=is_last)
        try:
            exchange = await self._host.exchange(call, _ANY_STATUS, body=pieces, turn=turn)
        except BaseException:
            if pieces.has_begun:
                self._leave_broken()
            raise
        async with exchange as response:
            if response.status not in ((201, 204) if is_last else (201, 202, 204)):
                await self._raise_refusal(exchange)
            self.session = ""  # it has ended, or continues at the Location of the response
            if is_last:
                check_stored_digest(response, self.blob.digest)
            elif not response.is_early:
                self._open(call, response, self._end)
            return not response.is_early

    def _body_call(self, length: int, *, is_last: bool) -> Call:
        """Build the request that carries the next `length` bytes: a PATCH, or the last PUT, which
        may carry none.
        """
        headers = [_OCTETS]
        is_part = self.offset > 0 or (not is_last and length < self.blob.size)
        if is_part and length:
            headers.append(("Content-Range", f"{self.offset}-{self.offset + length - 1}"))
        method, path = "PATCH", self.session
        if is_last:
            method = "PUT"
            path += f"{'&' if '?' in path else '?'}digest={self.blob.digest}"
        action = "upload_body" if length or not is_last else "upload_finish"
        # The registry may hash or copy the whole blob before it answers.
        timeouts = self._host.timeouts
        seconds = min(timeouts.finish + self.blob.size / _MIB, timeouts.longest_finish)
        return self.repository.build_call(
            action, method, path, *headers, origin=self._origin, seconds=seconds
        )

    def _leave_broken(self) -> None:
        """Record that some bytes of a body may have arrived. The session is broken; where it cannot
        be asked how much it has, only one for chunks accepts the same body again.
        """
        self.is_broken = self._host.can_resume and self._origin == self._host.origin
        if not self.is_broken and not self.in_chunks:
            self.session = ""

    async def _raise_refusal(self, exchange: Exchange) -> NoReturn:
        """Raise the error for an answer that refuses a body."""
        response = exchange.response
        await response.read(ERROR_BODY)
        # A rate limit applies before the session is looked up, so the session accepts the body
        # later, unless it ends meanwhile. The caller then starts again.
        is_gone = self._was_throttled and response.status in SESSION_GONE
        self._was_throttled = response.status == 429
        if response.is_early and response.status >= 500:
            self._leave_broken()  # the answer does not say what became of the body
        elif is_gone or not (self.in_chunks or self._was_throttled):
            self.session = ""
        is_login_over = says_login_ended(response)
        if is_login_over and self._origin == self._host.origin:
            may_repeat = self._login_refusals < _MOST_LOGINS
            self._login_refusals += 1
            self._host.refresh_login(exchange, may_repeat=may_repeat)
            raise LoginExpired("the login expired during the upload")
        error = self._host.refusal(exchange)
        if is_gone:
            error.is_session_gone = error.retryable = True
        raise error

    async def resume(self) -> None:
        """Ask how many bytes a broken session has received (section 1.9).

        If it has received any, or takes chunks, it goes on at `offset`. Otherwise, or if it says that
        it has more than was sent, it is given up, and `start` has to open a new one. A registry that
        refuses to say is not asked again in this run (docs/design.md section 6, rule 16). Raises
        SyncError if the failure is temporary.
        """
        call = self.repository.build_call("upload_start", "GET", self.session)
        try:
            async with await self._host.exchange(call, (204,)) as response:
                received = self._received_bytes(response)
                self.session = ""
                is_of_use = received <= self._end and (received or self.in_chunks)
                if is_of_use and response.headers.get("location"):
                    self._open(call, response, received)
        except RegistryError as error:
            if error.retryable and not error.is_session_gone:
                raise
            self._host.can_resume = False
            if error.is_session_gone or not self.in_chunks:
                self.session = ""
        self.is_broken = False

    def _received_bytes(self, response: Response) -> int:
        """Return how many bytes a session has received, by the Range header of its answer.

        If the Range is missing or malformed, these are the chunks that were acknowledged, or no byte
        if the body is not sent in chunks.
        """
        acknowledged = self.offset if self.in_chunks else 0
        match = re.fullmatch("0-([0-9]{1,18})", response.headers.get("range") or "")
        # `0-0` is ambiguous: distribution reports it for no byte and for one byte.
        received = int(match[1]) + 1 if match and match[1] != "0" else 0
        return max(acknowledged, received)

    async def cancel_upload(self) -> None:
        """Delete a session that gets no body (section 1.9). Errors are ignored, and no other login is
        asked for: many registries want a right to delete, which nobody gets.
        """
        call = self.repository.build_call(
            "upload_finish", "DELETE", self.session, origin=self._origin
        )
        self.session = ""
        with suppress(SyncError):
            async with await self._host.exchange(call, _ANY_STATUS):
                pass

    def _open(self, call: Call, response: Response, offset: int) -> None:
        """Use the session at the Location of the answer to `call`. The session has received
        `offset` bytes.

        Raises ProtocolBroken if the Location is missing or not allowed. No request is sent there,
        not even to cancel the session.
        """
        home = self._host.origin
        location = response.headers.get("location")
        if not location:
            raise ProtocolBroken("the upload was accepted without a Location")
        base = call.origin or home  # the origin that has answered
        origin, path = resolve_location(base, call.path, location)
        check_foreign(home, origin)

        # Only the first Location of a session may be on another origin, and only at some kinds of
        # registry (R1).
        may_move = base == home and self.repository.dialect.allows_foreign_uploads
        if origin != base and not may_move:
            where = printable(origin.host, 100)
            text = f"the registry moves the upload to another host ({where}): not followed"
            raise ProtocolBroken(text)
        self._origin = origin
        self.session, self.offset = path, offset
        self.is_broken = self._was_throttled = False
        mask_signature(path, f"{self.repository.api_name} {self.blob.digest}")


def check_stored_digest(answer: Response, digest: str) -> None:
    """Raise ContentError if an answer to a push names another digest than the pushed one."""
    stored = answer.headers.get("docker-content-digest")
    if not stored or stored == digest:
        return
    # Digests of different algorithms cannot be compared (section 1.4).
    if stored.partition(":")[0] == digest.partition(":")[0]:
        shown = printable(stored, 100)
        raise ContentError(f"the registry says that it stored {shown} instead of {digest}")
