"""One blob on its way into a repository: an upload session, as the specification has it.

Owns: the session's requests (POST, PATCH, PUT, GET, DELETE), its Location, how much it has kept.
May not know: where the bytes come from; whether to upload, or to go on after an error.
Invariants: a Location on another origin gets no credentials (I6); a body is sent once (I7).
Follows: OCI distribution-spec 1.1 ("Pushing blobs"), docs/specification.md section 8.2,
docs/protocol-facts.md sections 1.6 to 1.9 and 7.9 (its numbers are cited below).

The state of an upload is what `session` and `broken_session` hold:

    session   broken    state
    --------  --------  ------------------------------------------------------------------------
    ""        ""        none: `start` opens a session, or finds that the blob is there
    a path    ""        open: it takes a body from `offset` on (`send`), or ends (`cancel_upload`)
    ""        a path    broken: a body did not get its answer; `resume` asks what was kept
    a path    a path    broken in a chunk: `resume` asks, and the session stays open

    none    start: 202                         -> open at 0
    none    start: 201                         -> none, the blob is there
    open    send: the request begins           -> broken where asking may help, else none
    broken  send: an answer to the last body   -> none, the blob is there unless it is refused
    broken  send: an answer to an earlier part -> open, behind that part
    broken  send: 429                          -> open, where it was: the body is sent again
    broken  send: no answer                    -> broken
    broken  resume: something was kept         -> open behind it; chunks: wherever it is
    broken  resume: nothing was, or forgotten  -> none

The caller may set either to "", to forget it: the next step is `start` then.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Protocol

from _regsync.auth.tokens import LoginRefusals
from _regsync.errors import AuthError, LoginExpired, ProtocolBroken, RegistryError, SyncError
from _regsync.net.http1 import Header, Pieces, Response
from _regsync.net.pool import Lease
from _regsync.oci.manifest import Descriptor
from _regsync.providers import Product, UploadStyle
from _regsync.registry.host import RegistryClient
from _regsync.registry.redirects import check_foreign, resolve_location
from _regsync.registry.transport import ERROR_BODY, Body, Call, Transport
from _regsync.text import printable

_MIB = 1024 * 1024

_OCTETS = ("Content-Type", "application/octet-stream")
_ANY_STATUS = range(600)

# By which a registry says that a session does not take this body.
_SESSION_GONE = (400, 404, 416)


class Place(Protocol):
    """What an upload needs of its repository: how requests are worded, how answers are judged."""

    host: RegistryClient
    product: Product
    api_name: str

    def build_call(
        self, action: str, method: str, path: str, *headers: Header, body: bytes = b""
    ) -> Call: ...

    def check_stored_digest(self, answer: Response, digest: str) -> None: ...


class Upload:
    """The upload of one blob, all over one `lease`: a PUT goes over the connection of its POST."""

    hash = None  # no session of an earlier run is known

    def __init__(
        self, repository: Place, transport: Transport, lease: Lease, blob: Descriptor
    ) -> None:
        self.repository = repository
        self.lease = lease
        self.blob = blob
        self._transport = transport

        # The session: its origin, and its path in one of the two states (see above).
        self._origin = repository.host.origin
        self.session = ""
        self.broken_session = ""

        self.offset = 0  # bytes that it holds
        self._end = 0  # bytes that it will hold when the body that was begun last has arrived

        self.style: UploadStyle = "put"  # the dialect in which the body goes

        # The registry has refused a start that names no blob: it would refuse any other blob's.
        self.is_start_refused = False

        self.has_begun = False  # a body was sent from the blob's first byte
        self._throttled_session = ""  # whose body was refused with 429
        self._login_refusals = LoginRefusals()  # of its bodies

    @property
    def _is_at_home(self) -> bool:
        return self._origin == self.repository.host.origin

    async def start(self, mount_from: str | None = None) -> bool:
        """Open a session, or mount the blob; return whether it is in the repository now.

        `mount_from` names the repository to mount it from ("" at Google's: any). The answer to a
        refused mount is 202 and an open session like any other (section 1.8). A mount that fails
        for good is followed by a plain POST: the other repository may be closed to us while this
        one is open.
        """
        if mount_from is not None:
            try:
                return await self._mount(self.blob.digest, mount_from)
            except AuthError as error:
                if error.fatal:
                    raise
            except RegistryError as error:
                if error.retryable and error.status != 500:
                    raise
        call = self.repository.build_call("upload_start", "POST", "blobs/uploads/")
        try:
            return await self._post(call, self.blob.digest, ok=(202,))
        except RegistryError as error:
            self.is_start_refused = not error.retryable
            raise

    async def try_mount(self, digest: str, mount_from: str) -> bool:
        """Ask for any blob by a start that would mount it; where that does not say that the blob is in
        the repository, a session is open.
        """
        return await self._mount(digest, mount_from)

    async def _mount(self, digest: str, mount_from: str) -> bool:
        query = f"?mount={digest}"
        if mount_from:
            query += f"&from={mount_from}"
        call = self.repository.build_call("upload_start", "POST", f"blobs/uploads/{query}")
        if mount_from and mount_from != self.repository.api_name:
            call = call._replace(also=((mount_from, "pull"),))
        return await self._post(call, digest, ok=(201, 202))

    async def _post(self, call: Call, digest: str, ok: tuple[int, ...]) -> bool:
        """Return whether the blob is there (201); if not, a session is open (202)."""
        host = self.repository.host
        self.has_begun = False
        async with await self._transport.exchange(host, call, ok, lease=self.lease) as response:
            if response.status == 202:
                self._open(call, response, 0)
                return False
            self.repository.check_stored_digest(response, digest)
            return True

    async def send(self, pieces: Pieces, *, last: bool = True) -> bool:
        """Send a part of the blob by PATCH, or the `last` part by PUT with the digest.

        Return whether it has arrived; if not, the registry answered before all of it was sent, and
        only a HEAD tells. Raises what `pieces` raises, RegistryError when the registry refuses,
        WireError when the connection breaks.
        """
        host = self.repository.host
        session = self.session
        self._end = self.offset + pieces.length
        call = self._body_call(pieces.length, last=last)
        body = Body(pieces, self._seconds_for_answer(), self._on_begin, self._transport)
        turn = await self._transport.exchange(host, call, _ANY_STATUS, lease=self.lease, body=body)
        async with turn as response:
            if not response.early or response.status < 500:
                self.broken_session = ""  # the session has had its answer, it is not broken
            if response.status == 429:
                # A limit refuses before anybody has looked at the session: it takes the body later.
                self.session = session
                self._throttled_session = session
            elif response.status in _SESSION_GONE and session == self._throttled_session:
                raise await self._ended_by_throttling(response)
            elif response.status == 401 and self._is_at_home:
                await response.read(ERROR_BODY)
                await self._transport.refresh_login(
                    host, call, body.authorization, response, self._login_refusals
                )
                raise LoginExpired("the login expired during the upload")  # it begins again

            ok = (201, 204) if last else (201, 202, 204)
            await self._transport.raise_unless(host, response, ok)
            self.session = ""
            if last:
                self.repository.check_stored_digest(response, self.blob.digest)
            elif not response.early:
                self._open(call, response, self._end)
            return not response.early

    def _seconds_for_answer(self) -> float:
        """Return how long the answer to a body may take: a registry may hash or copy the whole blob
        first.
        """
        timeouts = self._transport.machine.timeouts
        return min(timeouts.finish + self.blob.size / _MIB, timeouts.longest_finish)

    async def _ended_by_throttling(self, response: Response) -> RegistryError:
        """Return the error for a session that takes no body after a 429: the registry ended the upload
        when it refused that body, and has forgotten the session.
        """
        self.session = ""
        await response.read(ERROR_BODY)
        error = self._transport.error_from(self.repository.host, response)
        error.is_session_gone = True
        return error

    def _body_call(self, length: int, *, last: bool) -> Call:
        """Return the request that carries `length` bytes."""
        headers = [_OCTETS]
        is_ranged = self.offset > 0 or (self.style == "chunks" and not last)
        if length and is_ranged:
            headers.append(("Content-Range", f"{self.offset}-{self._end - 1}"))
        action = "upload_body" if length or not last else "upload_finish"
        if not last:
            return self._session_call(action, "PATCH", "", *headers)
        separator = "&" if "?" in self.session else "?"
        return self._session_call(action, "PUT", f"{separator}digest={self.blob.digest}", *headers)

    def _on_begin(self) -> None:
        """Note that a body goes out: the session is broken until its answer comes.

        It takes no other body, whatever happens to this one, except in chunks.
        """
        may_ask = self.repository.host.can_resume and self._is_at_home and self.style != "patch"
        self.broken_session = self.session if may_ask else ""
        self.has_begun = self.has_begun or self.offset == 0
        if self.style != "chunks":
            self.session = ""

    async def resume(self) -> None:
        """Ask how much the session of a broken body has kept (section 1.9).

        If it has kept something, or takes chunks, it is open again. A host that has forgotten a
        session is not asked again (docs/design.md section 6, rule 16).
        """
        host = self.repository.host
        call = self.repository.build_call("upload_start", "GET", "")._replace(
            path=self.broken_session
        )
        try:
            async with await self._transport.exchange(
                host, call, (204,), lease=self.lease
            ) as response:
                self.broken_session = ""
                kept = self._kept(response)
                if kept or self.style == "chunks":
                    self._open(call, response, kept)
        except RegistryError as error:
            if error.is_session_gone:
                self.session = ""  # by any other answer a chunk may go again to where it went
            elif error.retryable:
                raise
            host.can_resume = False
            self.broken_session = ""

    def _kept(self, response: Response) -> int:
        """Return how many bytes a session holds; in chunks at least what was acknowledged."""
        kept = self.offset if self.style == "chunks" else 0
        range_held = re.fullmatch("0-([0-9]{1,18})", response.headers.get("range") or "")
        # `0-0` says nothing: distribution answers so for no byte and for one.
        if range_held and 0 < int(range_held[1]) < self._end:
            kept = max(kept, int(range_held[1]) + 1)
        return kept

    async def cancel_upload(self) -> None:
        """End a session that gets no body (section 1.9): one request, whatever its answer."""
        host = self.repository.host
        call = self._session_call("upload_finish", "DELETE", "")
        with suppress(SyncError):
            async with await self._transport.exchange(host, call, _ANY_STATUS, lease=self.lease):
                self.session = ""

    def _session_call(
        self, action: str, method: str, query: str, *headers: tuple[str, str]
    ) -> Call:
        call = self.repository.build_call(action, method, "", *headers)
        return call._replace(path=self.session + query, origin=self._origin)

    def _open(self, call: Call, response: Response, offset: int) -> None:
        """Take over the session at an answer's Location, which holds `offset` bytes.

        Raises ProtocolBroken for a Location that no session may have; nothing is sent there, not
        even to cancel it.
        """
        home = self.repository.host.origin
        location = response.headers.get("location")
        if location is None:
            raise ProtocolBroken("the upload was accepted without a Location")
        base = call.origin or home
        origin, path = resolve_location(base, call.path, location)
        check_foreign(home, origin)

        # Only a session's first Location may lead elsewhere, and not at all kinds of registry (R1).
        may_move = base == home and self.repository.product.allows_foreign_uploads
        if origin != base and not may_move:
            raise ProtocolBroken(
                f"the registry moves the upload to another host ({printable(origin.host, 100)}): not followed"
            )
        self._origin = origin
        self.session = path
        self.broken_session = ""
        self.offset = offset
        self.repository.host.authenticator.treat_as_secret(path)
