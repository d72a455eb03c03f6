"""Upload one blob to a repository in an upload session of the distribution specification.

Owns: the session's requests (POST, PATCH, PUT, GET, DELETE), its Location, how many bytes it has
received.
May not know: the source of the bytes; whether to upload a blob, or to continue after an error.
Invariants: a Location on another origin gets no credentials (I6); a body is sent once (I7).
Follows: OCI distribution-spec 1.1 ("Pushing blobs"), docs/specification.md section 8.2,
docs/protocol-facts.md sections 1.6 to 1.9 and 7.9 (its numbers are cited below).

The state of an upload is given by `session` and `broken_session`:

    session   broken    state
    --------  --------  ------------------------------------------------------------------------
    ""        ""        none: `start` opens a session, or finds that the blob exists
    a path    ""        open: `send` continues at `offset`, `cancel_upload` ends the session
    ""        a path    broken: a body was not answered; `resume` asks how much was received
    a path    a path    broken in a chunk: as broken, but the session stays open

    none    start: 202                         -> open at 0
    none    start: 201                         -> none, the blob exists
    open    send: the body begins              -> broken if `resume` may help, else none
    broken  send: an answer to the last body   -> none, the blob exists unless it is refused
    broken  send: an answer to an earlier part -> open, after that part
    broken  send: 429                          -> open at the same offset, to send the body again
    broken  send: no answer                    -> broken
    broken  resume: bytes were received        -> open after them; with chunks: at any offset
    broken  resume: no bytes, or no session    -> none

The caller may set either to "", to abandon that session: `start` is the next step then.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import NoReturn, Protocol

from _regsync.auth.tokens import says_login_ended
from _regsync.errors import AuthError, LoginExpired, ProtocolBroken, RegistryError, SyncError
from _regsync.net.wire import SESSION_GONE, Header, Pieces, Response
from _regsync.oci import Descriptor
from _regsync.providers import Dialect
from _regsync.registry.host import RegistryClient
from _regsync.registry.limits import Turn
from _regsync.registry.redirects import check_foreign, mask_signature, resolve_location
from _regsync.registry.transport import ERROR_BODY, Body, Call, Exchange, Transport
from _regsync.text import printable

_MIB = 1024 * 1024

_OCTETS: Header = ("Content-Type", "application/octet-stream")
_ANY_STATUS = range(600)

# Statuses of a registry that accepts no request to mount. Any other error may be about one blob, or
# about this moment.
_MOUNTS_REFUSED = (400, 401, 403, 404, 405, 501)


class UploadTarget(Protocol):
    """The parts of a repository that an upload uses."""

    host: RegistryClient
    dialect: Dialect
    api_name: str

    def build_call(
        self, action: str, method: str, path: str, *headers: Header, body: bytes = b""
    ) -> Call: ...

    def check_stored_digest(self, answer: Response, digest: str) -> None: ...


class Upload:
    """The upload of one blob."""

    hash = None  # sessions of earlier runs are not resumed

    def __init__(self, repository: UploadTarget, transport: Transport, blob: Descriptor) -> None:
        self.repository = repository
        self.blob = blob
        self._transport = transport

        # The origin of the session, and its path. One of the two paths is set, depending on the
        # state (see above).
        self._origin = repository.host.origin
        self.session = ""
        self.broken_session = ""

        self.offset = 0  # bytes that the session has received
        self._end = 0  # the offset after the body that is being sent

        self.in_chunks = False  # whether the body is sent in several requests

        # Whether the registry has refused to begin an upload. The request names no blob, so the
        # upload of any other blob would be refused too.
        self.is_start_refused = False

        # Whether the registry has answered the last request to mount by an error that all other
        # requests to mount from the same repository would get too.
        self.is_mount_refused = False

        # Whether the last request to mount has got any other answer than 201 and 202, or none.
        self.has_mount_failed = False

        self.has_begun = False  # whether the blob's first byte was sent
        self._throttled_session = ""  # the session whose last body was refused with 429
        self._login_refusals: list[bool] = []  # of the requests with a body

    @property
    def _is_at_registry(self) -> bool:
        """Report whether the session is at the registry's own origin."""
        return self._origin == self.repository.host.origin

    async def start(self, mount_from: str | None = None) -> bool:
        """Mount the blob, or open a session. Returns True if the repository has the blob now, and
        False if a session is open.

        `mount_from` names the repository to mount the blob from ("" at Google's registries: any
        repository). If it is None, no mount is tried. A mount that is not performed is answered by
        202, which opens a session (section 1.8). A mount that fails permanently is followed by a
        plain POST, because we may lack access to the other repository only.
        """
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
        call = self.repository.build_call("upload_start", "POST", "blobs/uploads/")
        try:
            return await self._post(call, self.blob.digest, ok=(202,))
        except RegistryError as error:
            self.is_start_refused = not error.retryable  # a permanent refusal
            raise

    async def try_mount(self, digest: str, mount_from: str) -> bool:
        """Try to mount any blob from the repository `mount_from` ("": from any repository). Returns
        True if the repository has the blob now, and False if a session was opened instead.
        """
        query = f"?mount={digest}"
        if mount_from:
            query += f"&from={mount_from}"
        call = self.repository.build_call("upload_start", "POST", f"blobs/uploads/{query}")
        if mount_from and mount_from != self.repository.api_name:
            call = call._replace(other_rights=((mount_from, "pull"),))  # the token must cover both
        self.is_mount_refused = False
        self.has_mount_failed = True
        try:
            is_mounted = await self._post(call, digest, ok=(201, 202))
        except RegistryError as error:
            self.is_mount_refused = error.status in _MOUNTS_REFUSED
            raise
        self.has_mount_failed = False
        return is_mounted

    async def _post(self, call: Call, digest: str, ok: tuple[int, ...]) -> bool:
        """Send a POST. Returns True if the blob exists (201), or False if a session was opened
        (202).
        """
        host = self.repository.host
        self.has_begun = False
        async with await self._transport.exchange(host, call, ok) as response:
            if response.status == 202:
                self._open(call, response, 0)
                return False
            self.repository.check_stored_digest(response, digest)
            return True

    async def send(self, pieces: Pieces, *, is_last: bool = True, turn: Turn | None = None) -> bool:
        """Send a part of the blob with PATCH, or the last part with PUT and the digest. `turn` was
        taken for the request already.

        Returns True if the body was received completely. Returns False if the registry answered
        with success before all of it was sent: only a HEAD can show whether the blob exists.

        Raises LoginExpired if the body may be sent again with a new login, RegistryError if the
        registry refuses the body, WireError if the connection breaks, and all errors of `pieces`.
        """
        host = self.repository.host
        session = self.session  # `_record_begin` may set `self.session` to ""
        self._end = self.offset + pieces.length
        call = self._body_call(pieces.length, is_last=is_last)
        body = Body(pieces, self._record_begin, self._transport)
        exchange = await self._transport.exchange(host, call, _ANY_STATUS, body=body, turn=turn)
        async with exchange as response:
            # An early 5xx does not say what became of the body, so the session stays broken.
            if not response.is_early or response.status < 500:
                self.broken_session = ""
            ok = (201, 204) if is_last else (201, 202, 204)
            if response.status not in ok:
                await self._raise_refusal(call, body, session, exchange)
            self.session = ""  # it has ended, or continues at the Location of the response
            if is_last:
                self.repository.check_stored_digest(response, self.blob.digest)
            elif not response.is_early:
                self._open(call, response, self._end)
            return not response.is_early

    async def _raise_refusal(
        self, call: Call, body: Body, session: str, exchange: Exchange
    ) -> NoReturn:
        """Raise the error for an answer that refuses a body which was sent to `session`."""
        response = exchange.response
        if response.status == 429:
            # A rate limit applies before the session is looked up, so the session accepts the body
            # later.
            self.session = session
            self._throttled_session = session
        # The registry may have ended the session since it refused a body with 429. The caller then
        # starts again.
        is_gone = response.status in SESSION_GONE and session == self._throttled_session
        if is_gone:
            self.session = ""
        host = self.repository.host
        await response.read(ERROR_BODY)
        if says_login_ended(response.status, response.body) and self._is_at_registry:
            self._transport.refresh_login(
                host, call, body.authorization, exchange, self._login_refusals
            )
            raise LoginExpired("the login expired during the upload")
        error = self._transport.refusal(host, call, exchange)
        error.is_session_gone = error.is_session_gone or is_gone
        raise error

    def _seconds_for_answer(self) -> float:
        """Return how long the answer to a body may take. The registry may hash or copy the whole
        blob before it answers.
        """
        timeouts = self._transport.machine.timeouts
        return min(timeouts.finish + self.blob.size / _MIB, timeouts.longest_finish)

    def _body_call(self, length: int, *, is_last: bool) -> Call:
        """Build the request that carries the next `length` bytes: a PATCH, or the last PUT, which
        may carry none.
        """
        headers = [_OCTETS]
        is_part = self.offset > 0 or (not is_last and length < self.blob.size)
        if is_part and length:
            headers.append(("Content-Range", f"{self.offset}-{self.offset + length - 1}"))
        action = "upload_body"
        method = "PATCH"
        path = self.session
        if is_last:
            action = "upload_body" if length else "upload_finish"
            method = "PUT"
            separator = "&" if "?" in path else "?"
            path += f"{separator}digest={self.blob.digest}"
        call = self.repository.build_call(action, method, "", *headers)
        return call._replace(path=path, origin=self._origin, seconds=self._seconds_for_answer())

    def _record_begin(self) -> None:
        """Record that the body begins. Until its answer arrives, the session is broken. `resume`
        may help, except at another origin, or after the registry has refused it.

        Only a session for chunks accepts another body afterwards, so it stays open too.
        """
        may_resume = self.repository.host.can_resume and self._is_at_registry
        self.broken_session = self.session if may_resume else ""
        if self.offset == 0:
            self.has_begun = True
        if not self.in_chunks:
            self.session = ""

    async def resume(self) -> None:
        """Ask how many bytes a broken session has received (section 1.9).

        If the session has received any, or takes chunks, it is open again. Otherwise `start` has to
        open a new session. If the registry refuses to resume the session, it is not asked again in
        this run (docs/design.md section 6, rule 16). Raises RegistryError if the failure is
        temporary.
        """
        host = self.repository.host
        call = self.repository.build_call("upload_start", "GET", "")._replace(
            path=self.broken_session
        )
        try:
            async with await self._transport.exchange(host, call, (204,)) as response:
                self.broken_session = ""
                received = self._received_bytes(response)
                if received or self.in_chunks:
                    self._open(call, response, received)
        except RegistryError as error:
            # A session that takes chunks stays open, unless the registry reports that it has ended.
            if error.is_session_gone:
                self.session = ""
            elif error.retryable:
                raise
            host.can_resume = False
            self.broken_session = ""

    def _received_bytes(self, response: Response) -> int:
        """Return how many bytes a session has received, by the Range header of its answer.

        If the Range is missing or cannot be right, these are the chunks that were acknowledged, or
        no byte if the body is not sent in chunks.
        """
        acknowledged = self.offset if self.in_chunks else 0
        range_match = re.fullmatch("0-([0-9]{1,18})", response.headers.get("range") or "")
        if range_match is None:
            return acknowledged
        received = int(range_match[1]) + 1  # the Range names the last byte
        # `0-0` is ambiguous: distribution reports it for no byte and for one byte.
        is_plausible = 1 < received <= self._end
        return max(acknowledged, received) if is_plausible else acknowledged

    async def cancel_upload(self) -> None:
        """Delete an open session that gets no body (section 1.9). Errors are ignored."""
        host = self.repository.host
        call = self.repository.build_call("upload_finish", "DELETE", "")
        call = call._replace(path=self.session, origin=self._origin)
        self.session = ""
        with suppress(SyncError):
            async with await self._transport.exchange(host, call, (202, 204)):
                pass

    def _open(self, call: Call, response: Response, offset: int) -> None:
        """Use the session at the Location of the answer to `call`. The session has received
        `offset` bytes.

        Raises ProtocolBroken if the Location is missing or not allowed. No request is sent there,
        not even to cancel the session.
        """
        home = self.repository.host.origin
        location = response.headers.get("location")
        if location is None:
            raise ProtocolBroken("the upload was accepted without a Location")
        base = call.origin or home  # the origin that has answered
        origin, path = resolve_location(base, call.path, location)
        check_foreign(home, origin)

        # Only the first Location of a session may be on another origin, and only at some kinds of
        # registry (R1).
        may_move = base == home and self.repository.dialect.allows_foreign_uploads
        if origin != base and not may_move:
            raise ProtocolBroken(
                f"the registry moves the upload to another host ({printable(origin.host, 100)}): not followed"
            )
        self._origin = origin
        self.session = path
        self.broken_session = ""
        self.offset = offset
        mask_signature(path)
