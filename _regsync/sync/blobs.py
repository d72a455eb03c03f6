"""Bring a blob from its source to a repository.

A blob is an async iterator of pieces, whatever holds its bytes: its source (`Reading.pieces`), memory
(`in_memory`) or a file (`in_file`). `Body` is what one request sends of it. `BlobCopy.run` tells how a
blob comes to a repository: an attempt finds it there, mounts it, or opens a session and sends the
pieces; `Tries` says how long to wait before the next attempt, or that there is none.

May not know: which image is next, or why a blob is wanted.
Invariants: the last piece of a blob is held back until size and digest agree (I3); a body is repeated
here and in no lower layer (I7); both ends of a stream are admitted in one step, and nobody waits while
holding a permit (I8). With one target, no byte is written to disk.
Follows: docs/specification.md section 1.1, docs/design.md section 6 (rules 11, 13, 14 and 16).
"""

from __future__ import annotations

import errno
import math
import os
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    nullcontext,
)
from functools import cache, partial
from io import FileIO
from weakref import WeakValueDictionary

import anyio
import anyio.lowlevel

from _regsync import edge
from _regsync.crypto import hash_hex, new_hash
from _regsync.errors import (
    Disconnected,
    ProtocolBroken,
    RegistryError,
    Side,
    SyncError,
    WireError,
    WrongBytes,
)
from _regsync.files import free_bytes, is_link_free, open_safely, remove_if_possible, replacing
from _regsync.net.wire import Pieces
from _regsync.oci import Descriptor, split_digest
from _regsync.providers import CHUNK
from _regsync.registry.limits import LARGE_BODY, Retry, Turn, is_outage, turn_of
from _regsync.registry.repository import BlobBody, Repository
from _regsync.registry.runs import Transport
from _regsync.state import ABSENT_IS_202, MOUNTS, PRESENT_IS_201, Knowledge, RepositoryKey
from _regsync.sync.image import BlobResult
from _regsync.text import reason_of

# Bytes that are read from a source at once, and that are sent at once. The latter are fewer, because
# a request whose first piece is at hand is repeated if a reused connection turns out to be dead.
_READ_PIECE = 512 * 1024
_SEND_PIECE = 256 * 1024

# Bytes up to which a blob is read into memory as a whole, and bytes of all such blobs.
SMALL_BLOB = 1024 * 1024
_MEMORY = 24 * 1024 * 1024

# Chunks that are in memory at the same time, for registries that accept no larger body.
_CHUNKS_IN_MEMORY = 3

# Uploads of large blobs that are open at the same time from one source to one target. They wait for
# their streams with nothing in hand but a session.
_OPEN_SESSIONS = 16

# Seconds for which a broken source may be waited for while a request to the target stays open.
_SOURCE_GRACE = 20.0

# Seconds before each HEAD for a blob whose answer was lost.
_LOST_ANSWER_PAUSES = (0.0, 1.0, 3.0)

# Registries that accept a body of this size, or any body, only in chunks (docs/protocol-facts.md
# section 7.9) answer so, or reset the connection each time.
_PUT_REFUSED = (405, 411, 413, 416, 501)
_PUT_REFUSED_CODES = {"UNSUPPORTED", "BLOB_UPLOAD_INVALID"}
_MOST_RESETS = 2

# Statuses of a registry that accepts no request to mount. Any other error may be about one blob, or
# about this moment.
_MOUNTS_REFUSED = (400, 401, 403, 404, 405, 501)

# Why an ECR registry does not mount a blob that it has (docs/protocol-facts.md section 4.9).
_ECR_MOUNTS = (
    "a blob was not mounted, and is uploaded: ECR mounts between repositories of one encryption, in"
    " an account whose setting BLOB_MOUNTING is ENABLED"
)

Stream = AsyncGenerator[memoryview, None]


class Body(Pieces):
    """What one request sends: `length` bytes of a stream."""

    def __init__(self, stream: Stream, length: int, count_sent: Callable[[int], None]) -> None:
        self.length = length
        self.left = length  # bytes that the request has not taken yet
        self.on_taken = lambda: None
        self._stream = stream
        self._count_sent = count_sent
        self._taken = 0  # pieces

    @property
    def has_begun(self) -> bool:
        return self._taken > 0

    async def next(self) -> memoryview:
        if self._taken >= 2:
            self.on_taken()
        piece = await anext(self._stream, memoryview(b""))
        self._taken += 1
        self.left -= len(piece)
        self._count_sent(len(piece))
        return piece


async def in_memory(body: bytes | memoryview, offset: int = 0) -> Stream:
    for start in range(offset, len(body), _SEND_PIECE):
        yield memoryview(body)[start : start + _SEND_PIECE]


async def in_file(path: str, offset: int = 0) -> Stream:
    """Yield the bytes of a staged file. Raises NoRoom if the disk does not give them."""
    buffer = memoryview(bytearray(_SEND_PIECE))
    in_thread = edge.current().in_thread
    try:
        with FileIO(path, opener=open_safely) as file:
            file.seek(offset)
            while True:
                await anyio.lowlevel.checkpoint()
                count = _read_cached(file, buffer) or await in_thread(file.readinto, buffer)
                if not count:
                    return
                yield buffer[:count]
    except OSError as error:
        raise NoRoom(f"a staged blob cannot be read: {reason_of(error)}") from error


def _read_cached(file: FileIO, buffer: memoryview) -> int:
    """Read what the system has in memory, which is cheaper than to ask a thread. Returns how many
    bytes; 0: none, or it cannot tell.
    """
    try:
        count = os.preadv(file.fileno(), [buffer], file.tell(), os.RWF_NOWAIT)
    except (AttributeError, OSError):  # only Linux has it, and not for each file system
        return 0
    file.seek(count, os.SEEK_CUR)
    return count


async def in_chunks(stream: Stream, buffer: bytearray) -> Stream:
    """Yield the bytes of a stream in chunks that fill `buffer`. The last one may be shorter. An empty
    buffer takes nothing.
    """
    if not buffer:
        return
    filled = 0
    async for piece in stream:
        while piece:
            count = min(len(piece), len(buffer) - filled)
            buffer[filled : filled + count] = piece[:count]
            piece = piece[count:]
            filled += count
            if filled == len(buffer):
                yield memoryview(buffer)
                filled = 0
    if filled:
        yield memoryview(buffer)[:filled]


class Tries:
    """The attempts at one piece of work."""

    def __init__(self, transport: Transport, *repositories: Repository) -> None:
        self._log = transport.machine.log
        self._hosts = [repository.host.limits for repository in repositories]
        self._retry = Retry(edge.current().chance)
        self._renewed_at = 0  # bytes of the blob

    def record_progress(self, offset: int) -> None:
        """Renew the attempts if the blob has come LARGE_BODY further than ever before. (A registry
        that forgets each session is not tried without end.)
        """
        if offset >= self._renewed_at + LARGE_BODY:
            self._renewed_at = offset
            self._retry = Retry(edge.current().chance)

    async def wait(self, error: SyncError, *, longest: float = math.inf) -> None:
        """Wait before the next attempt. Raises `error` if there is none, or if the pause would be
        longer than `longest` seconds.
        """
        self._log("debug", "retry", f"{error}; it goes on")
        error.drop_frames()  # the frames hold buffers of the body
        await self._retry.pause(error, *self._hosts, longest=longest)


class Reading:
    """A blob that is read from its source: how much of it has been verified, and the attempts."""

    def __init__(self, transport: Transport, source: Repository, blob: Descriptor) -> None:
        self.source = source
        self.blob = blob
        self._transport = transport
        self._tries = Tries(transport, source)
        self.is_fresh = False
        self.start_again(is_fresh=False)

    def start_again(self, *, is_fresh: bool = True) -> None:
        """Forget what was read. `is_fresh`: over new connections, because the bytes were wrong."""
        algorithm, self._expected = split_digest(self.blob.digest)
        self._hash = new_hash(algorithm)
        self._hashed = 0  # bytes
        self.is_fresh = is_fresh

    async def alone(self) -> Stream:
        """Read the blob while no request waits for its bytes, so that its source may take its time."""
        self.start_again(is_fresh=self.is_fresh)  # all bytes are read anew, and so they are hashed
        needs = self.source.reading_needs(self.blob.size)
        async with (
            self._transport.gate.admitted(*needs) as given,
            aclosing(self.pieces(0, turn_of(given), grace=math.inf)) as stream,
        ):
            async for piece in stream:
                yield piece

    async def pieces(
        self, start: int, turn: Turn | None, *, grace: float = _SOURCE_GRACE
    ) -> Stream:
        """Read from byte `start` on. The last piece comes when the blob is verified (I3). `turn` was
        taken for the first request already.

        A body that breaks is read on by Range, for `grace` seconds each time: a request to the target
        may be open meanwhile. Raises WrongBytes and the errors of the source.
        """
        size = self.blob.size
        yielded = start  # the next byte to yield
        buffer = memoryview(bytearray(min(_READ_PIECE, size + 1)))
        with self.source.adding_context("fetch blob", self.source.name_of(self.blob.digest)):
            if start == size:
                self._verify(buffer[:0], size)  # an empty blob, or the end of one
                return
            opened, position = await self._open(start, turn)
            while yielded < size:
                try:
                    async with opened as response:
                        while position < size:
                            count = await response.read_into(buffer[: size + 1 - position])
                            if not count:
                                text = f"the blob ended after {position} of {size} bytes"
                                raise Disconnected(text)
                            self._transport.count_read(count)
                            self._verify(buffer[:count], position)
                            piece = buffer[max(0, yielded - position) : count]
                            position += count
                            if piece:
                                yielded = position
                                yield piece
                except SyncError as broken:
                    if yielded == start:
                        raise  # of what was never read, the whole attempt is repeated
                    opened, position = await self._go_on(broken, yielded, grace)

    async def _go_on(
        self, broken: SyncError, start: int, grace: float
    ) -> tuple[AbstractAsyncContextManager[BlobBody], int]:
        """Open a blob that has broken at byte `start` again. Raises the last error if no attempt is
        left, or if it takes more than `grace` seconds.
        """
        self._tries.record_progress(start)
        with anyio.CancelScope(deadline=anyio.current_time() + grace):
            while True:
                await self._tries.wait(broken, longest=grace)
                try:
                    return await self._open(start)
                except SyncError as error:
                    broken = error
        raise broken

    async def _open(
        self, start: int, turn: Turn | None = None
    ) -> tuple[AbstractAsyncContextManager[BlobBody], int]:
        """Open the blob at byte `start`, or at its first byte if the source has no ranges."""
        open_blob = partial(self.source.open_blob, self.blob, is_fresh=self.is_fresh)
        try:
            return await open_blob(start, turn=turn), start
        except (ProtocolBroken, RegistryError) as error:
            is_range_refused = isinstance(error, ProtocolBroken) or error.status == 416
            if not start or not is_range_refused:
                raise
        return await open_blob(0), 0

    def _verify(self, piece: memoryview, position: int) -> None:
        """Hash a piece that begins at byte `position`. Raises WrongBytes."""
        new = piece[max(0, self._hashed - position) :]
        self._hash.update(new)
        self._hashed += len(new)
        if self._hashed > self.blob.size:
            raise WrongBytes(
                f"the blob is longer than the {self.blob.size} bytes of its descriptor"
            )
        is_complete = self._hashed == self.blob.size
        if is_complete and self._hash.hexdigest() != self._expected:
            raise WrongBytes("the blob's bytes do not match its digest")


class NoRoom(SyncError):
    """A blob cannot be kept for several targets: each reads it from its source."""

    level = "warning"


class _Kept:
    """A blob whose bytes are in memory or in a file."""

    def __init__(self, size: int, content: bytes | str) -> None:
        self.size = size
        self.content = content  # the bytes, or the path of the file
        self.users = 0

    def stream(self, offset: int) -> Stream:
        if isinstance(self.content, str):
            return in_file(self.content, offset)
        return in_memory(self.content, offset)


class _Shelf:
    """Blobs that are kept in one place, the least recently used first."""

    def __init__(self, limit: float) -> None:
        self.limit = limit  # bytes
        self.used = 0  # bytes, with those that are being read
        self.kept = dict[str, _Kept]()

    def find(self, digest: str) -> _Kept | None:
        kept = self.kept.pop(digest, None)
        if kept is not None:
            self.kept[digest] = kept  # now the most recently used
        return kept

    def reserve(self, size: int) -> bool:
        """Promise `size` bytes. Drops blobs that nobody uses, if need be. False: no room."""
        if size > self.limit:
            return False
        for digest, kept in [*self.kept.items()]:
            if self.used + size <= self.limit:
                break
            if not kept.users:
                self.drop(digest)
        if self.used + size > self.limit:
            return False
        self.used += size
        return True

    def drop(self, digest: str) -> None:
        kept = self.kept.pop(digest)
        self.used -= kept.size
        if isinstance(kept.content, str):
            remove_if_possible(kept.content)  # somebody else may have removed it


class Staging:
    """Blobs that are read once and sent several times: small ones in memory, others in files.

    `directory` holds the files; None: a temporary one, made when it is needed. `limit` bounds the
    bytes of files; None means no limit.
    """

    def __init__(self, directory: str | None, limit: int | None) -> None:
        self._directory = directory
        self._memory = _Shelf(_MEMORY)
        self._disk = _Shelf(math.inf if limit is None else limit)
        self._promised = 0  # bytes of the files that are being written
        # A lock takes 1 KiB, so it goes with its last user.
        self._locks = WeakValueDictionary[str, anyio.Lock]()
        self.clear()  # what a killed run has left

    @asynccontextmanager
    async def holding(
        self, blob: Descriptor, read: Callable[[], Stream], *, is_shared: bool
    ) -> AsyncIterator[Callable[[int], Stream]]:
        """Keep a blob while the block runs, and longer if it `is_shared`: then it may be in a file.
        The first who needs it reads it; the others wait.

        Yields a function that returns the blob's stream from an offset on. Raises NoRoom, and the
        errors of `read`.
        """
        shelves = [self._memory] if blob.size <= SMALL_BLOB else []
        if is_shared:
            shelves.append(self._disk)
        async with self._locks.setdefault(blob.digest, anyio.Lock()):
            found = (shelf.find(blob.digest) for shelf in shelves)
            kept = next(filter(None, found), None)
            if kept is None:
                kept = await self._pull(blob, read, shelves)
            kept.users += 1
        try:
            yield kept.stream
        finally:
            kept.users -= 1
            if not is_shared and not kept.users:
                self._memory.drop(blob.digest)

    async def _pull(
        self, blob: Descriptor, read: Callable[[], Stream], shelves: list[_Shelf]
    ) -> _Kept:
        shelf = next((shelf for shelf in shelves if shelf.reserve(blob.size)), None)
        if shelf is None:
            error = NoRoom("the limit leaves no room to stage a blob")
            error.level = "debug"  # the user has set it
            raise error
        try:
            async with aclosing(read()) as stream:
                if shelf is self._memory:
                    content: bytes | str = b"".join([bytes(piece) async for piece in stream])
                else:
                    content = await self._write(blob, stream)
        except BaseException:
            shelf.used -= blob.size
            raise
        kept = shelf.kept[blob.digest] = _Kept(blob.size, content)
        return kept

    async def _write(self, blob: Descriptor, stream: Stream) -> str:
        """Write a blob to a file, and return its path. Raises NoRoom if the disk refuses it."""
        try:
            path = self._path_of(blob)
            if free_bytes(os.path.dirname(path)) < self._promised + blob.size:
                raise NoRoom("the disk has no room to stage a blob")
            self._promised += blob.size
            try:
                with replacing(path) as descriptor, FileIO(descriptor, "w") as file:
                    async for piece in stream:
                        while piece:
                            piece = piece[await edge.current().in_thread(file.write, piece) :]
            finally:
                self._promised -= blob.size
        except OSError as error:
            self._disk.limit = 0  # the disk is full or cannot be used: it is not tried again
            raise NoRoom(f"blobs cannot be staged: {reason_of(error)}") from error
        return path

    def _path_of(self, blob: Descriptor) -> str:
        if self._directory is None:
            import tempfile

            self._directory = tempfile.mkdtemp(prefix="regsync-")
        algorithm, encoded = split_digest(blob.digest)
        folder = os.path.join(self._directory, algorithm)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if not is_link_free(folder):
            raise OSError(errno.ELOOP, "a link stands where a directory should be")
        return os.path.join(folder, encoded)

    def clear(self) -> None:
        """Remove all files."""
        if self._directory is not None and os.path.isdir(self._directory):
            import shutil

            shutil.rmtree(self._directory, ignore_errors=True)


class Blobs:
    """Copies blobs. It has what copies to one registry share."""

    def __init__(self, transport: Transport, knowledge: Knowledge, staging: Staging) -> None:
        self.transport = transport
        self.knowledge = knowledge
        self.staging = staging
        self.chunk_memory = anyio.Semaphore(_CHUNKS_IN_MEMORY)
        self.log_once = cache(transport.machine.log)
        # By target repository: set when its first upload of this run was accepted, refused, or has
        # failed; and the refusal of any upload there, after which none is begun (rule 14).
        self.answered = dict[RepositoryKey, anyio.Event]()
        self.refusals = dict[RepositoryKey, SyncError]()
        # By source and target: how many uploads of large blobs may be open.
        self.sessions = defaultdict[tuple[str, str], anyio.Semaphore](
            lambda: anyio.Semaphore(_OPEN_SESSIONS)
        )
        # By area, held while one task finds out what a probing POST is answered.
        self.testing = defaultdict[str, anyio.Lock](anyio.Lock)

    async def copy(
        self,
        blob: Descriptor,
        source: Repository,
        target: Repository,
        *,
        mount_from: str | None = None,
        is_shared: bool = False,
        present: str | None = None,
    ) -> BlobResult:
        """Copy a blob, and return how it got there. `is_shared`: other uploads need it too.
        `present` is a blob that the target seems to have.

        Raises SyncError, with side and reference, if all attempts have failed.
        """
        copy = BlobCopy(self, blob, source, target, mount_from, present, is_shared=is_shared)
        return await copy.run()


class BlobCopy:
    """One blob on its way to one repository, over all attempts."""

    def __init__(
        self,
        shared: Blobs,
        blob: Descriptor,
        source: Repository,
        target: Repository,
        mount_from: str | None,
        present: str | None,
        *,
        is_shared: bool,
    ) -> None:
        self._shared = shared
        self._transport = shared.transport
        self._known = shared.knowledge
        self.blob = blob
        self.target = target
        self.where = target.store_key
        self.upload = target.begin_upload(blob)
        self.reading = Reading(shared.transport, source, blob)
        self.tries = Tries(shared.transport, source, target)
        self.mount_from = mount_from
        self.may_mount = True
        self.has_failed = False
        self.present = present  # to learn how probing POSTs are answered

        # Whether the blob is read as a whole before it is sent, and whether it is kept for others;
        # when its bytes are known, the function that returns them from an offset on.
        self.is_kept = (is_shared or blob.size <= SMALL_BLOB) and not source.is_local
        self.is_shared = is_shared
        self.stream_from: Callable[[int], Stream] | None = None
        body = known_body(blob)
        if body is not None:
            self.stream_from = partial(in_memory, body)
        self.stack = AsyncExitStack()  # what holds the blob

        self.is_known_absent = False
        # The body of this attempt that ends the upload. None: none was sent.
        self.last_body: Body | None = None
        self.resets = 0  # connections that the target broke in a PUT of the whole blob
        self.takes_chunks = target.dialect.takes_chunks

    async def run(self) -> BlobResult:
        """Copy the blob. No more uploads of large blobs are open than there may be."""
        shared, size, upload = self._shared, self.blob.size, self.upload
        hosts = self.reading.source.host.key, self.target.host.key
        sessions = shared.sessions[hosts] if size >= LARGE_BODY else nullcontext()
        try:
            async with sessions, self.stack:
                return await self._copy()
        finally:
            if upload.session and not upload.is_broken:  # it takes memory at the registry
                with anyio.move_on_after(self._transport.machine.timeouts.head):
                    await upload.cancel_upload()

    async def _copy(self) -> BlobResult:
        """Make attempts until the blob is there. The first one in a repository goes alone."""
        is_first = self.where not in self._shared.answered
        answered = self._shared.answered.setdefault(self.where, anyio.Event())
        if not is_first:
            await answered.wait()  # with nothing in hand
        while True:
            # Decided once an attempt: another blob may teach it while this one waits, and a chunk that
            # enters its lane while it holds the turn of a whole body waits for itself (I8).
            limit = self._put_limit()
            is_buffered = limit > 0 and self.blob.size > SMALL_BLOB
            try:
                async with self._shared.chunk_memory if is_buffered else nullcontext():
                    return await self._attempt(limit)
            except NoRoom as error:
                text = f"{error}; each target reads it from the source"
                self._shared.log_once(error.level, "staging", text)
                self.is_kept = False
                self.stream_from = None
                # What the source gives now is hashed anew.
                self.reading.start_again(is_fresh=self.reading.is_fresh)
                await self._drop_bytes()
                continue
            except SyncError as error:
                failure = error
            finally:
                answered.set()
            if await self._has_arrived(failure):
                self._give_up()
                return BlobResult.UPLOADED
            await self._prepare_next(failure)

    async def _attempt(self, limit: int) -> BlobResult:
        """Find the blob at its target, mount it, or send it. `limit` is that of one request, or 0."""
        upload = self.upload
        self.last_body = None
        if upload.is_broken:
            await upload.resume()  # sets `session` and `offset`
        self.tries.record_progress(upload.offset)
        result = await self._find_or_start()
        if result is not None:
            return result
        self._shared.answered[self.where].set()
        if self.is_kept and self.stream_from is None:
            staging, read = self._shared.staging, self.reading.alone
            holding = staging.holding(self.blob, read, is_shared=self.is_shared)
            self.stream_from = await self.stack.enter_async_context(holding)
        upload.in_chunks = limit > 0 and self.blob.size > self.target.dialect.put_limit
        put = self.target.writing_needs(self.blob.size, in_chunks=upload.in_chunks)
        # Bytes that are sent while they are read need both ends, which are admitted in one step (I8).
        reading, stream_from = self.reading, self.stream_from
        # Where nothing is left to read, the source's turn might be the probe of a host that is away, for
        # which the end of the upload would wait.
        is_read = stream_from is None and upload.offset < self.blob.size
        get = reading.source.reading_needs(self.blob.size) if is_read else ()
        async with self._transport.gate.admitted(*get, *put) as given:
            if stream_from is not None:
                stream = stream_from(upload.offset)
            else:
                stream = reading.pieces(upload.offset, turn_of(given[: len(get)]))
            return await self._send(stream, limit, turn_of(given[len(get) :]))

    def _put_limit(self) -> int:
        """Return the most bytes that one request to the target may carry, or 0 for no limit."""
        if self.target.dialect.put_limit:
            return self.target.dialect.put_limit
        refused_size = self._refused_size() if self.takes_chunks else None
        return CHUNK if refused_size is not None and self.blob.size >= refused_size else 0

    def _refused_size(self) -> int | None:
        """Return the size from which on the target refuses to take a blob in one request."""
        size = self._known.host_note(self.where.host, "smallest_patch")
        return size if isinstance(size, int) else None

    # Before the body.

    async def _find_or_start(self) -> BlobResult | None:
        """Find the blob at the target, mount it, or open a session for it: then None.

        A probing POST asks to mount the blob from the target itself. Where its answer can be relied
        on, it takes the place of a HEAD and a POST.
        """
        upload, target = self.upload, self.target
        where, known = self.where, self._known
        if upload.session:  # of an earlier attempt, which has looked for the blob
            return None
        if where in self._shared.refusals:
            raise self._shared.refusals[where].copy_without_context()
        holder = self.mount_from or known.mount_source(where, self.blob.digest)
        if holder and self.may_mount:
            return await self._mount(holder)

        is_asked = not self.is_known_absent and await self._needs_head()
        if is_asked:
            if await target.has_blob(self.blob):
                return BlobResult.PRESENT
            self.is_known_absent = True
            known.forget(where, self.blob.digest)
        if self.upload.session:  # of `_needs_head`
            return None
        return await self._start(is_absence_new=is_asked)

    async def _start(self, *, is_absence_new: bool) -> BlobResult | None:
        """Open a session, or learn by a probing POST that the blob is there. `is_absence_new`: a
        HEAD has just shown that it is absent, so that the answer tells how such a POST is answered.
        """
        upload, target = self.upload, self.target
        where, known = self.where, self._known
        answers = [known.fact(where.area, name) for name in (ABSENT_IS_202, PRESENT_IS_201)]
        is_absent = is_absence_new or known.fact(where.area, PRESENT_IS_201)  # if answered by 202
        probe_from = None if False in answers else target.probe_from
        is_present = await self._begin(probe_from)
        if not is_present or target.is_local:
            if upload.mount_status in _MOUNTS_REFUSED:
                known.learn(where.area, PRESENT_IS_201, False)
            elif is_absent and upload.mount_status == 202:
                known.learn(where.area, ABSENT_IS_202, True)
            return BlobResult.PRESENT if is_present else None
        async with self._shared.testing[where.area]:
            if known.fact(where.area, ABSENT_IS_202) and not self.is_known_absent:
                return BlobResult.BELIEVED
            # It may give a 201 to any digest.
            is_right = await target.has_blob(self.blob) is True
            known.learn(where.area, ABSENT_IS_202, is_right)
        if not is_right:
            await upload.start()
        return BlobResult.PRESENT if is_right else None

    async def _begin(self, mount_from: str | None) -> bool:
        """Begin the upload, as `BlobUpload.start` does."""
        try:
            return await self.upload.start(mount_from)
        except RegistryError as error:
            if not error.retryable:  # it names no blob, so any other would be refused too
                self._shared.refusals[self.where] = error.copy_without_context()
            raise

    async def _mount(self, holder: str) -> BlobResult | None:
        """Mount the blob, or use the session that a refused mount opens."""
        where, known = self.where, self._known
        if await self._begin(holder):
            known.learn(where.host, MOUNTS, True)
            return BlobResult.MOUNTED
        source = RepositoryKey(where.host, holder)
        is_of_this_run = known.is_confirmed(source, self.blob.digest)
        is_first = known.supports_mounts(where.host) is None
        if is_of_this_run and is_first and self.target.host.registry.kind == "ecr":
            self._transport.machine.log("info", "mount", f"{where.host}: {_ECR_MOUNTS}")
        known.record_refused_mount(where, holder, is_source_confirmed=is_of_this_run)
        if is_of_this_run:
            return None
        # The state may be wrong about the holder, and about this repository too.
        known.forget(source, self.blob.digest, is_absent=False)
        return BlobResult.PRESENT if await self.target.has_blob(self.blob) else None

    async def _needs_head(self) -> bool:
        """Report whether a HEAD has to ask for the blob, because a probing POST would not tell.

        Finds out, once in an area, whether such a POST for a present blob is answered by 201. If it is
        not, it has opened a session that this blob can use.
        """
        where, known = self.where, self._known
        probe_from = self.target.probe_from
        if probe_from is None:
            return True
        if not known.needs_head(where):
            return False
        if known.fact(where.area, ABSENT_IS_202) is False:
            return True
        async with self._shared.testing[where.area]:
            present = self.present or known.choose_present_blob(where)
            is_known = known.fact(where.area, PRESENT_IS_201) is not None
            if present is not None and not is_known:
                try:
                    is_201 = await self.upload.try_mount(present, probe_from)
                except RegistryError as error:
                    if error.is_temporary:
                        raise
                    is_201 = False
                known.learn(where.area, PRESENT_IS_201, is_201)
        return known.needs_head(where)

    # The body.

    async def _send(self, stream: Stream, limit: int, turn: Turn | None) -> BlobResult:
        """Send the bytes that the target lacks to the open session. `limit` is that of one request, or
        0; `turn` was taken for a request with all of them.
        """
        upload, size = self.upload, self.blob.size
        left = size - upload.offset
        buffer = bytearray(min(left, limit))
        async with aclosing(stream), aclosing(in_chunks(stream, buffer)) as chunks:
            try:
                if upload.in_chunks:
                    async for chunk in chunks:
                        await self._send_chunk(chunk)
                    self.last_body = self._body(stream, 0)
                else:
                    # A registry with a limit gets a body that is in memory and verified.
                    self.last_body = self._body(chunks if limit else stream, left)
                if await upload.send(self.last_body, turn=turn):
                    return BlobResult.UPLOADED
            except RegistryError as error:
                is_rest = left < size and not upload.in_chunks and error.side is not Side.SOURCE
                if not is_rest or error.retryable or error.status in (401, 403):
                    raise
                self.target.host.can_resume = False  # it holds other bytes than it has said
                upload.session = ""
                raise Disconnected(f"the rest of a broken upload was refused: {error}") from error
        self.last_body.left = 0  # a HEAD has to find out
        raise WireError("the registry answered before the blob was sent")

    def _body(self, stream: Stream, length: int) -> Body:
        return Body(stream, length, self._transport.count_sent)

    async def _send_chunk(self, chunk: memoryview) -> None:
        """Send a chunk by PATCH, and again what has not arrived of it, for which the source need not be
        read again. A longer pause is for the next attempt, which holds nothing meanwhile (I8).
        """
        upload = self.upload
        start = upload.offset
        while True:
            try:
                if upload.is_broken:
                    await upload.resume()
                if not upload.session:
                    raise Disconnected("the registry has forgotten the upload")
                rest = chunk[upload.offset - start :]
                async with aclosing(in_memory(rest)) as pieces:
                    if rest and not await upload.send(self._body(pieces, len(rest)), is_last=False):
                        raise WireError("the registry answered before the chunk was sent")
                self.tries.record_progress(upload.offset)
                return
            except SyncError as error:
                if is_session_gone(error) or not upload.session or error.away is not None:
                    raise
                await self.tries.wait(error, longest=_SOURCE_GRACE)

    # After a failure.

    async def _has_arrived(self, failure: SyncError) -> bool:
        """Ask by HEAD, up to three times, for a blob that was sent and got no final answer."""
        is_refused = isinstance(failure, RegistryError) and failure.status < 500
        was_sent = self.last_body is not None and not self.last_body.left
        is_of_target = (
            isinstance(failure, RegistryError | WireError) and failure.side is not Side.SOURCE
        )
        if not was_sent or is_refused or not is_of_target:
            return False
        for pause in _LOST_ANSWER_PAUSES:
            await anyio.sleep(pause)
            if await self.target.has_blob(self.blob, with_retries=True):
                return True
        self.is_known_absent = True
        return False

    async def _prepare_next(self, error: SyncError) -> None:
        """Wait before the next attempt. Raises `error` if there is none."""
        source = self.reading.source
        is_within_host = source.host.limits is self.target.host.limits
        if error.away is source.host.limits and not is_within_host:
            error.add_context(Side.SOURCE, "fetch blob", source.name_of(self.blob.digest))
        error.add_context(Side.TARGET, "push blob", self.target.name_of(self.blob.digest))
        if isinstance(error, WrongBytes) and not self.reading.is_fresh:
            self.reading.start_again()  # a cache may have been wrong
            await self._drop_bytes()
            return
        if is_session_gone(error):
            self._give_up()
        if error.away is None:
            # The mount may have caused it, unless the registry was away for a moment.
            self.may_mount = is_outage(error) and not self.has_failed
            self.has_failed = True
        if self._needs_chunks(error):
            is_refused = isinstance(error, RegistryError) and error.status != 413
            size = 0 if is_refused else min(self.blob.size, self._refused_size() or self.blob.size)
            self._known.learn(self.where.host, "smallest_patch", size)
            self._give_up()
            return
        may_be_of_chunks = isinstance(error, RegistryError) and not (
            error.is_temporary or error.is_session_gone or error.status in (401, 403, 413)
        )
        is_first = self.upload.in_chunks and not self.upload.offset
        if may_be_of_chunks and is_first and self.takes_chunks and error.side is Side.TARGET:
            # What taught us to send chunks may have been the network's doing.
            self._known.learn(self.where.host, "smallest_patch", None)
            self.takes_chunks = False
            self._give_up()
            return
        await self.tries.wait(error)

    def _needs_chunks(self, error: SyncError) -> bool:
        """Report whether a PUT was refused in a way that chunks may help against."""
        upload = self.upload
        has_begun = self.last_body is not None and self.last_body.has_begun and not upload.offset
        is_put = has_begun and not upload.in_chunks and self.takes_chunks
        if not is_put or is_session_gone(error):
            return False
        if isinstance(error, RegistryError):
            has_code = error.status == 400 and not _PUT_REFUSED_CODES.isdisjoint(error.codes)
            return error.status in _PUT_REFUSED or has_code
        if isinstance(error, Disconnected) and error.side is Side.TARGET:
            self.resets += 1
        return self.resets == _MOST_RESETS

    async def _drop_bytes(self) -> None:
        """Give up a session that holds bytes which are not to be there."""
        if self.upload.is_broken:
            self._give_up()
        elif self.upload.session and self.upload.offset:
            await self.upload.cancel_upload()

    def _give_up(self) -> None:
        """Let the next attempt begin a new session."""
        self.upload.session = ""
        self.upload.is_broken = False


def known_body(blob: Descriptor) -> bytes | None:
    """Return the bytes of a blob that is embedded, empty, or the empty JSON object."""
    algorithm, encoded = split_digest(blob.digest)
    for body in (blob.data, b"{}", b""):
        if body is not None and len(body) == blob.size and hash_hex(algorithm, body) == encoded:
            return body
    return None


def is_session_gone(error: SyncError) -> bool:
    return isinstance(error, RegistryError) and error.is_session_gone
