"""One blob on its way into a repository: an upload session, as the specification has it.

Owns: the session's requests (POST, PATCH, PUT, GET, DELETE), its Location, what it has kept.
May not know: where the bytes come from; whether an upload is worth it, or goes on after an error.
Invariants: I6 (a Location elsewhere gets no credentials), I7 (a body is sent once).
Follows: OCI distribution-spec 1.1 ("Pushing blobs"), docs/specification.md section 8.2,
docs/protocol-facts.md sections 1.6 to 1.9 and 7.9 (numbers below).

What `session` and `broken` hold says in which state an upload is:

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
    broken  send: no answer                    -> broken
    broken  resume: something was kept         -> open behind it; chunks: wherever it is
    broken  resume: nothing was, or forgotten  -> none

Who copies the blob may forget a session, or what broke (""): the next step is `start` then.
"""

from __future__ import annotations

import re
from contextlib import suppress

from _regsync.errors import AuthError, LoginExpired, ProtocolBroken, RegistryError, SyncError
from _regsync.net.http1 import Pieces, Response
from _regsync.net.pool import Lease
from _regsync.oci.manifest import Descriptor
from _regsync.providers import UploadStyle
from _regsync.registry.redirects import check_foreign, resolve_location
from _regsync.registry.repository import Repository
from _regsync.registry.transport import ERROR_BODY, Body, Call, Transport
from _regsync.text import printable

_OCTETS = ("Content-Type", "application/octet-stream")
_ANY_STATUS = range(600)


class Upload:
    """The upload of one blob, all over one `lease`: a PUT goes where its POST was answered."""

    def __init__(
        self, repository: Repository, transport: Transport, lease: Lease, blob: Descriptor
    ) -> None:
        self.repository = repository
        self.lease = lease
        self.blob = blob
        self._transport = transport

        # The session: its origin and path (see above), how many bytes it holds, and how many it
        # will hold when the body that was begun last has arrived.
        self._origin = repository.host.origin
        self.session = ""
        self.broken_session = ""
        self.offset = 0
        self.sent = 0

        self.style: UploadStyle = "put"  # the dialect in which the body goes

        # What was learnt on the way: a start that names no blob was refused for good, as that of
        # any other blob would be; the body has begun with its first byte; a 401 to the body has
        # renewed the login.
        self.refused = False
        self.has_begun = False
        self._has_renewed_login = False

    @property
    def _is_at_home(self) -> bool:
        """Whether the session is at the registry itself, not at another origin."""
        return self._origin == self.repository.host.origin

    async def start(self, mount_from: str | None = None) -> bool:
        """Open a session; True when the blob is there instead.

        `mount_from` names the repository to mount it from (empty: any, at Google's). A mount that is
        refused by 202 opens a session like any other (section 1.8). One that fails for good is
        followed by a plain POST: the other repository may be closed to us while this one is open.
        """
        if mount_from is not None:
            try:
                return await self._mount(mount_from)
            except AuthError as error:
                if error.fatal:
                    raise
            except RegistryError as error:
                if error.retryable and error.status != 500:
                    raise
        call = self.repository.call("upload_start", "POST", "blobs/uploads/")
        try:
            return await self._post(call, ok=(202,))
        except RegistryError as error:
            self.refused = not error.retryable
            raise

    async def _mount(self, mount_from: str) -> bool:
        query = f"?mount={self.blob.digest}"
        if mount_from:
            query += f"&from={mount_from}"
        call = self.repository.call("upload_start", "POST", f"blobs/uploads/{query}")
        if mount_from and mount_from != self.repository.api_name:
            call = call._replace(also=((mount_from, "pull"),))
        return await self._post(call, ok=(201, 202))

    async def _post(self, call: Call, ok: tuple[int, ...]) -> bool:
        """Return whether the answer is that the blob is there (201); else it opens a session."""
        host = self.repository.host
        self.has_begun = False
        async with self._transport.exchange(host, call, ok, lease=self.lease) as response:
            if response.status == 202:
                self._open(call, response, 0)
                return False
            self.repository.check_stored_digest(response, self.blob.digest)
            return True

    async def send(self, pieces: Pieces, *, last: bool = True) -> bool:
        """Send a part of the blob: PATCH, or for the `last` part PUT with the digest.

        False when the registry answered before the whole part was sent: the caller must ask with
        HEAD. Raises what `pieces` raises, RegistryError when it is refused, WireError when the line
        broke.
        """
        host = self.repository.host
        self.sent = self.offset + pieces.length
        call = self._body_call(pieces.length, last=last)
        timeouts = self._transport.machine.timeouts
        seconds = timeouts.finish + self.blob.size / timeouts.finish_bytes_per_second
        body = Body(pieces, seconds, self._on_begin)
        opened = self._transport.exchange(host, call, _ANY_STATUS, lease=self.lease, body=body)
        async with opened as response:
            if not response.early or response.status < 500:
                self.broken_session = ""  # that session has got its answer
            if response.status == 401 and self._is_at_home and not self._has_renewed_login:
                self._has_renewed_login = True
                await response.read(ERROR_BODY)
                await self._transport.refresh_login(host, call, body.authorization, response)
                raise LoginExpired("the login expired during the upload")  # it begins again

            ok = (201, 204) if last else (201, 202, 204)
            await self._transport.raise_unless(host, response, ok)
            self.session = ""
            if last:
                self.repository.check_stored_digest(response, self.blob.digest)
            elif not response.early:
                self._open(call, response, self.sent)
            return not response.early

    def _body_call(self, length: int, *, last: bool) -> Call:
        """Word the request that carries `length` bytes."""
        headers = [_OCTETS]
        is_ranged = self.offset > 0 or (self.style == "chunks" and not last)
        if length and is_ranged:
            headers.append(("Content-Range", f"{self.offset}-{self.sent - 1}"))
        action = "upload_body" if length or not last else "upload_finish"
        if not last:
            return self._session_call(action, "PATCH", "", *headers)
        separator = "&" if "?" in self.session else "?"
        return self._session_call(action, "PUT", f"{separator}digest={self.blob.digest}", *headers)

    def _on_begin(self) -> None:
        """A body goes out. Whatever happens to it, its session takes no other, but that of chunks."""
        may_ask = self.repository.host.resumes and self._is_at_home and self.style != "patch"
        self.broken_session = self.session if may_ask else ""
        self.has_begun = self.has_begun or self.offset == 0
        if self.style != "chunks":
            self.session = ""

    async def resume(self) -> None:
        """Ask what the session of a broken body has kept (section 1.9). Where that is something, or
        in chunks, it is open again. A host that has forgotten one is not asked again
        (docs/design.md section 6, rule 16).
        """
        host = self.repository.host
        call = self.repository.call("upload_start", "GET", "")._replace(path=self.broken_session)
        try:
            async with self._transport.exchange(host, call, (204,), lease=self.lease) as response:
                self.broken_session = ""
                kept = self._kept(response)
                if kept or self.style == "chunks":
                    self._open(call, response, kept)
        except RegistryError as error:
            if error.forgot_session:
                self.session = ""  # else a chunk may go again to where it went
            elif error.retryable:
                raise
            host.resumes = False
            self.broken_session = ""

    def _kept(self, response: Response) -> int:
        """Return how many bytes a session holds. Of chunks those count that were acknowledged."""
        kept = self.offset if self.style == "chunks" else 0
        held = re.fullmatch("0-([0-9]{1,18})", response.headers.get("range") or "")
        # `0-0` says nothing: distribution answers so for no byte and for one.
        if held and 0 < int(held[1]) < self.sent:
            kept = max(kept, int(held[1]) + 1)
        return kept

    async def cancel_upload(self) -> None:
        """End a session that gets no body (section 1.9): one request, whose answer says nothing."""
        host = self.repository.host
        call = self._session_call("upload_finish", "DELETE", "")
        with suppress(SyncError):
            async with self._transport.exchange(host, call, _ANY_STATUS, lease=self.lease):
                self.session = ""

    def _session_call(
        self, action: str, method: str, query: str, *headers: tuple[str, str]
    ) -> Call:
        call = self.repository.call(action, method, "", *headers)
        return call._replace(path=self.session + query, origin=self._origin)

    def _open(self, call: Call, response: Response, offset: int) -> None:
        """Take over the session at the answer's Location; ProtocolBroken where that is no place for
        it. A session that is refused so is not cancelled either.
        """
        home = self.repository.host.origin
        location = response.headers.get("location")
        if location is None:
            raise ProtocolBroken("the upload was accepted without a Location")
        base = call.origin or home
        origin, path = resolve_location(base, call.path, location)
        check_foreign(home, origin)

        # Only its first Location may lead elsewhere, and not at every kind of registry (R1).
        may_move = base == home and self.repository.row.foreign_uploads
        if origin != base and not may_move:
            raise ProtocolBroken(
                f"the registry sends the upload to another host ({printable(origin.host, 100)}), refused"
            )
        self._origin = origin
        self.session = path
        self.broken_session = ""
        self.offset = offset
        self.repository.host.authenticator.treat_as_secret(path)
