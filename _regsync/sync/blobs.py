"""Bring a blob from its source to a repository, and put the manifests of an image.

A blob is an async iterator of pieces, whatever holds its bytes: its source (`Reading.pieces`), memory
(`in_memory`) or a file (`in_file`). `Body` is what one request sends of it. `Blobs.copy` tells how a
blob comes to a repository: an attempt finds it there, mounts it, or opens a session and sends the
pieces; `Tries` says how long to wait before the next attempt, or that there is none.

May not know: which image is next, or why a blob is wanted.
Invariants: children before their index, the root last (I2); the last piece of a blob is held back
until size and digest agree, unless the target verifies it (I3); a body is repeated here and in no
lower layer (I7); both ends of a stream are admitted in one step, and nobody waits while holding a
permit (I8). With one target, no byte is written to disk.
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
from functools import partial
from io import FileIO
from typing import TYPE_CHECKING, Any

import anyio

from _regsync import edge
from _regsync.crypto import hash_hex, new_hash
from _regsync.errors import (
    Disconnected,
    ProtocolBroken,
    RegistryError,
    Side,
    SyncError,
    TimedOut,
    WireError,
    WrongBytes,
)
from _regsync.files import is_link_free, open_safely, replacing
from _regsync.net.wire import Pieces
from _regsync.oci import Descriptor, Manifest, split_digest
from _regsync.providers import CHUNK
from _regsync.registry.limits import LARGE_BODY, Need, Retry, Turn, is_outage
from _regsync.registry.repository import BlobBody, BlobUpload, Repository
from _regsync.registry.runs import Transport
from _regsync.state import ABSENT_IS_202, MOUNTS, PRESENT_IS_201, Knowledge, RepositoryKey
from _regsync.sync.image import BlobResult, Image
from _regsync.sync.once import gather
from _regsync.text import reason_of

if TYPE_CHECKING:
    import tempfile

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

    def __init__(self, stream: Stream, length: int) -> None:
        self.length = length
        self.left = length  # bytes that the request has not taken yet
        self._stream = stream
        self._first: memoryview | None = None

    @property
    def has_begun(self) -> bool:
        return self.left < self.length

    async def begin(self) -> None:
        """Read the first piece, so that a source that fails at once costs no request."""
        self._first = await anext(self._stream, memoryview(b""))

    async def next(self) -> memoryview:
        piece, self._first = self._first, None
        if piece is None:
            piece = await anext(self._stream, memoryview(b""))
        self.left -= len(piece)
        return piece


async def in_memory(body: bytes | memoryview, offset: int = 0) -> Stream:
    for start in range(offset, len(body), _SEND_PIECE):
        yield memoryview(body)[start : start + _SEND_PIECE]


async def in_file(path: str, offset: int = 0) -> Stream:
    """Yield the bytes of a staged file. Raises NoRoom if the disk does not give them."""
    buffer = memoryview(bytearray(_SEND_PIECE))
    read = edge.current().in_thread
    try:
        with FileIO(path, opener=open_safely) as file:
            file.seek(offset)
            while count := await read(file.readinto, buffer):
                yield buffer[:count]
    except OSError as error:
        raise NoRoom(f"a staged blob cannot be read: {reason_of(error)}") from error


async def in_chunks(stream: Stream, buffer: bytearray) -> Stream:
    """Yield the bytes of a stream in chunks that fill `buffer`. The last one may be shorter."""
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
        self._machine = transport.machine
        self._hosts = [repository.host.limits for repository in repositories]
        self._retry = Retry(self._machine.chance)
        self._renewed_at = 0  # bytes of the blob

    def record_progress(self, offset: int) -> bool:
        """Renew the attempts if the blob has come LARGE_BODY further than ever before. Returns
        whether it has. (A registry that forgets each session is not tried without end.)
        """
        if offset < self._renewed_at + LARGE_BODY:
            return False
        self._renewed_at = offset
        self._retry = Retry(self._machine.chance)
        return True

    async def wait(self, error: SyncError, *, longest: float = math.inf) -> None:
        """Wait before the next attempt. Raises `error` if there is none, or if the pause would be
        longer than `longest` seconds.
        """
        asked = error.retry_after if isinstance(error, RegistryError) else None
        if (asked or 0.0) > longest:
            raise error
        self._machine.log("debug", "retry", f"{error}; it goes on")
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
        self._is_verified_here = True
        self.is_fresh = is_fresh

    def prepare(self, upload: BlobUpload) -> None:
        """Begin at the upload's offset if the bytes before it are of an earlier run: then the target
        verifies the blob as a whole.
        """
        self._is_verified_here = not upload.verifies
        if upload.verifies:
            self._hashed = max(upload.offset, self._hashed)

    async def pieces(self, start: int, turn: Turn | None) -> Stream:
        """Read from byte `start` on. The last piece comes when the blob is verified (I3). `turn` was
        taken for the first request already.

        A body that breaks is read on by Range, for _SOURCE_GRACE seconds in all, because a request
        to the target may be open meanwhile. Raises WrongBytes and the errors of the source.
        """
        size = self.blob.size
        yielded = start  # the next byte to yield
        has_opened = False
        grace = _SOURCE_GRACE  # seconds
        buffer = memoryview(bytearray(min(_READ_PIECE, size + 1)))
        with self.source.adding_context("fetch blob", self.source.name_of(self.blob.digest)):
            while yielded < size:
                try:
                    seconds = grace if has_opened else math.inf
                    opened, position = await self._open(yielded, seconds, turn)
                    turn, has_opened = None, True
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
                    if not has_opened or not broken.retryable:
                        raise
                    grace -= await self._wait_to_go_on(broken, yielded, grace)

    async def _wait_to_go_on(self, broken: SyncError, offset: int, seconds: float) -> float:
        """Wait before the rest is asked for. Returns the seconds that it took. Raises `broken` if
        it would take longer than `seconds`, or if no attempt is left.
        """
        self._tries.record_progress(offset)
        began = anyio.current_time()
        with anyio.move_on_after(seconds) as limit:
            await self._tries.wait(broken, longest=seconds)
        if limit.cancelled_caught:
            raise broken
        return anyio.current_time() - began

    async def _open(
        self, start: int, seconds: float, turn: Turn | None
    ) -> tuple[AbstractAsyncContextManager[BlobBody], int]:
        """Open the blob at byte `start`, or at its first byte if the source has no ranges."""
        open_blob = partial(self.source.open_blob, self.blob, is_fresh=self.is_fresh)
        with anyio.move_on_after(seconds) as limit:
            try:
                return await open_blob(start, turn=turn), start
            except (ProtocolBroken, RegistryError) as error:
                is_range_refused = isinstance(error, ProtocolBroken) or error.status == 416
                if not start or not is_range_refused:
                    raise
            return await open_blob(0), 0
        assert limit.cancelled_caught
        raise TimedOut(f"the source did not go on within {seconds:.0f} s")

    def _verify(self, piece: memoryview, position: int) -> None:
        """Hash a piece that begins at byte `position`. Raises WrongBytes."""
        new = piece[max(0, self._hashed - position) :]
        self._hash.update(new)
        self._hashed += len(new)
        if self._hashed > self.blob.size:
            raise WrongBytes(
                f"the blob is longer than the {self.blob.size} bytes of its descriptor"
            )
        is_complete = self._hashed == self.blob.size and self._is_verified_here
        if is_complete and self._hash.hexdigest() != self._expected:
            raise WrongBytes("the blob's bytes do not match its digest")


class NoRoom(SyncError):
    """A blob cannot be kept for several targets: each reads it from its source."""

    is_worth_a_warning = True


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
        self._used = 0  # bytes, with those that are being read
        self._kept = dict[str, _Kept]()

    def find(self, digest: str) -> _Kept | None:
        kept = self._kept.pop(digest, None)
        if kept is not None:
            self._kept[digest] = kept  # now the most recently used
        return kept

    def reserve(self, size: int) -> bool:
        """Promise `size` bytes. Drops blobs that nobody uses, if need be. False: no room."""
        if size > self.limit:
            return False
        for digest, kept in [*self._kept.items()]:
            if self._used + size <= self.limit:
                break
            if not kept.users:
                self.drop(digest)
        if self._used + size > self.limit:
            return False
        self._used += size
        return True

    def give_back(self, size: int) -> None:
        self._used -= size

    def add(self, digest: str, kept: _Kept) -> None:
        self._kept[digest] = kept

    def drop(self, digest: str) -> None:
        kept = self._kept.pop(digest)
        self._used -= kept.size
        if isinstance(kept.content, str):
            os.unlink(kept.content)


class Staging:
    """Blobs that are read once and sent several times: small ones in memory, others in files.

    `directory` holds the files; None: a temporary one, made when it is needed. `limit` bounds the
    bytes of files; None means no limit.
    """

    def __init__(self, directory: str | None, limit: int | None) -> None:
        self._directory = directory
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._memory = _Shelf(_MEMORY)
        self._disk = _Shelf(math.inf if limit is None else limit)
        self._unwritten = 0  # bytes that were promised to files and are not in them yet
        self._locks = defaultdict[str, anyio.Lock](anyio.Lock)
        self._remove()  # what a killed run has left

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
        async with self._locks[blob.digest]:
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
            error = NoRoom(f"there is no room to stage {blob.size} bytes")
            error.is_worth_a_warning = False  # the user has set the limit
            raise error
        is_kept = False
        try:
            async with aclosing(read()) as stream:
                if shelf is self._memory:
                    content: bytes | str = b"".join([bytes(piece) async for piece in stream])
                else:
                    content = await self._write(blob, stream)
            kept = _Kept(blob.size, content)
            shelf.add(blob.digest, kept)
            is_kept = True
            return kept
        finally:
            if not is_kept:
                shelf.give_back(blob.size)

    async def _write(self, blob: Descriptor, stream: Stream) -> str:
        """Write a blob to a file, and return its path. Raises NoRoom if the disk refuses it."""
        left = blob.size
        import shutil  # most runs stage nothing

        try:
            path = self._path_of(blob)
            if shutil.disk_usage(os.path.dirname(path)).free < self._unwritten + blob.size:
                raise NoRoom(f"there is no room to stage {blob.size} bytes")
            self._unwritten += left
            try:
                with replacing(path) as descriptor, FileIO(descriptor, "w") as file:
                    async for piece in stream:
                        while piece:
                            count = await edge.current().in_thread(file.write, piece)
                            piece = piece[count:]
                            left -= count
                            self._unwritten -= count
            finally:
                self._unwritten -= left
        except OSError as error:
            self._disk.limit = 0  # the disk is full or cannot be used: it is not tried again
            raise NoRoom(f"blobs cannot be staged: {reason_of(error)}") from error
        return path

    def _path_of(self, blob: Descriptor) -> str:
        if self._directory is None:
            import tempfile

            self._temporary = tempfile.TemporaryDirectory(prefix="regsync-")
            self._directory = self._temporary.name
        algorithm, encoded = split_digest(blob.digest)
        folder = os.path.join(self._directory, algorithm)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if not is_link_free(folder):
            raise OSError(errno.ELOOP, "a link stands where a directory should be")
        return os.path.join(folder, encoded)

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()
        else:
            self._remove()

    def _remove(self) -> None:
        if self._directory is not None and os.path.isdir(self._directory):
            import shutil

            shutil.rmtree(self._directory, ignore_errors=True)


class _Job:
    """One blob that is copied to one repository, over all attempts."""

    def __init__(
        self,
        reading: Reading,
        target: Repository,
        upload: BlobUpload,
        tries: Tries,
        mount_from: str | None,
        present: str | None,
    ) -> None:
        self.reading = reading
        self.blob = reading.blob
        self.target = target
        self.upload = upload
        self.tries = tries
        self.mount_from = mount_from
        self.may_mount = True
        self.has_failed = False
        # A blob that the target is known to have, to learn how probing POSTs are answered.
        self.present = present

        # Whether the blob is read as a whole before it is sent, and whether it is kept longer than
        # this job; when it has been read, the function that returns its bytes from an offset on.
        self.is_kept = False
        self.is_shared = False
        self.stream_from: Callable[[int], Stream] | None = None
        self.stack = AsyncExitStack()  # what holds the blob

        # Whether all bytes may have arrived although no answer says so: a HEAD comes first.
        self.may_have_arrived = False
        self.is_known_absent = False
        # The body of this attempt that ends the upload. None: none was sent.
        self.last_body: Body | None = None
        self.resets = 0  # connections that the target broke in a PUT, since there was progress


class Blobs:
    """Copies blobs and puts manifests."""

    def __init__(self, transport: Transport, knowledge: Knowledge, staging: Staging) -> None:
        self._transport = transport
        self._knowledge = knowledge
        self._staging = staging
        self._gate = transport.gate
        self._chunk_memory = anyio.Semaphore(_CHUNKS_IN_MEMORY)
        self._has_warned_of_staging = False
        # By target repository: set when its first upload of this run was accepted, refused, or has
        # failed; and the refusal of any upload there, after which none is begun (rule 14).
        self._answered = dict[RepositoryKey, anyio.Event]()
        self._refusals = dict[RepositoryKey, SyncError]()
        # By source and target: how many uploads of large blobs may be open.
        self._sessions = defaultdict[tuple[str, str], anyio.Semaphore](
            lambda: anyio.Semaphore(_OPEN_SESSIONS)
        )
        # By area, held while one task finds out what a probing POST is answered.
        self._testing = defaultdict[str, anyio.Lock](anyio.Lock)

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
        upload = target.begin_upload(blob)
        tries = Tries(self._transport, source, target)
        reading = Reading(self._transport, source, blob)
        job = _Job(reading, target, upload, tries, mount_from, present)
        job.is_shared = is_shared
        job.is_kept = (is_shared or blob.size <= SMALL_BLOB) and not source.is_local
        is_large = blob.size >= LARGE_BODY
        sessions = self._sessions[source.host.key, target.host.key] if is_large else nullcontext()
        try:
            async with sessions, self._limiting_chunks(job), job.stack:
                return await self._copy(job)
        finally:
            if upload.session and not upload.is_broken:  # it takes memory at the registry
                with anyio.move_on_after(self._transport.machine.timeouts.head):
                    await upload.cancel_upload()

    async def _copy(self, job: _Job) -> BlobResult:
        """Make attempts until the blob is there. The first one in a repository goes alone."""
        where = job.target.store_key
        is_first = where not in self._answered
        answered = self._answered.setdefault(where, anyio.Event())
        if not is_first:
            await answered.wait()  # with nothing in hand
        while True:
            try:
                return await self._attempt(job)
            except NoRoom as error:
                self._tell_of_staging(error)
                job.is_kept = False
                job.stream_from = None
                if job.upload.is_broken:  # by a body of that file
                    _give_up(job.upload)
                continue
            except SyncError as error:
                failure = error
            finally:
                answered.set()
            if await self._has_arrived(job, failure):
                _give_up(job.upload)
                return BlobResult.UPLOADED
            await self._prepare_next(job, failure)

    async def _attempt(self, job: _Job) -> BlobResult:
        """Find the blob at its target, mount it, or send it."""
        upload = job.upload
        job.last_body = None
        if upload.is_broken:
            await upload.resume()  # sets `session` and `offset`
        if job.tries.record_progress(upload.offset):
            job.resets = 0
        result = await self._find_or_start(job)
        if result is not None:
            return result
        body = known_body(job.blob)
        if body is not None:
            job.stream_from = partial(in_memory, body)
        elif job.is_kept and job.stream_from is None:
            read = partial(self._read_alone, job)
            holding = self._staging.holding(job.blob, read, is_shared=job.is_shared)
            job.stream_from = await job.stack.enter_async_context(holding)
        # Decided once: another blob may teach it while this one waits, and a chunk that enters its lane
        # while it holds the turn of a whole body waits for itself (I8).
        upload.in_chunks = self._goes_in_chunks(job)
        put = job.target.writing_needs(job.blob.size, in_chunks=upload.in_chunks)
        if job.stream_from is not None:
            async with self._gate.admitted(*put) as given:
                turn = _turn_of(given, put)
                return await self._send(job, job.stream_from(upload.offset), turn)
        # The bytes are sent while they are read: both ends are admitted in one step (I8).
        reading = job.reading
        get = reading.source.reading_needs(job.blob.size)
        async with self._gate.admitted(*get, *put) as given:
            reading.prepare(upload)
            stream = reading.pieces(upload.offset, _turn_of(given, get))
            return await self._send(job, stream, _turn_of(given, put))

    async def _read_alone(self, job: _Job) -> Stream:
        """Read a blob for the staging, under a permit of its own, and go on after an outage."""
        offset = 0
        while True:
            try:
                needs = job.reading.source.reading_needs(job.blob.size)
                async with (
                    self._gate.admitted(*needs) as given,
                    aclosing(job.reading.pieces(offset, _turn_of(given, needs))) as stream,
                ):
                    async for piece in stream:
                        offset += len(piece)
                        yield piece
                return
            except SyncError as error:
                if error.away is None or not error.retryable:
                    raise
                failure = error
            await Tries(self._transport, job.reading.source).wait(failure)

    def _limiting_chunks(self, job: _Job) -> AbstractAsyncContextManager[object]:
        is_in_chunks = self._chunk_size(job) > 0 and job.blob.size > SMALL_BLOB
        return self._chunk_memory if is_in_chunks else nullcontext()

    def _chunk_size(self, job: _Job) -> int:
        """Return the most bytes that one request to the target may carry, or 0 for no limit."""
        if job.target.dialect.put_limit:
            return job.target.dialect.put_limit
        refused_size = self._refused_size(job.target)
        return CHUNK if refused_size is not None and job.blob.size >= refused_size else 0

    def _goes_in_chunks(self, job: _Job) -> bool:
        limit = self._chunk_size(job)
        return limit > 0 and job.blob.size > job.target.dialect.put_limit

    def _refused_size(self, target: Repository) -> int | None:
        """Return the size from which on a registry refuses to take a blob in one request."""
        size = self._knowledge.host_note(target.host.key, "smallest_patch")
        return size if isinstance(size, int) else None

    # Before the body.

    async def _find_or_start(self, job: _Job) -> BlobResult | None:
        """Find the blob at the target, mount it, or open a session for it: then None.

        A probing POST asks to mount the blob from the target itself. Where its answer can be relied
        on, it takes the place of a HEAD and a POST.
        """
        upload, target = job.upload, job.target
        where, known = target.store_key, self._knowledge
        if upload.session:  # of an earlier attempt, which has looked for the blob
            return None
        if where in self._refusals:
            raise self._refusals[where].copy_without_context()
        holder = job.mount_from or known.mount_source(where, job.blob.digest)
        if holder and job.may_mount and not job.may_have_arrived:
            return await self._mount(job, holder)

        may_ask = not job.is_known_absent
        needs_head = may_ask and known.needs_head(where, job.blob.digest)
        if needs_head and await self._can_probe(job):
            needs_head = False
        has_no_probe = job.may_have_arrived or target.probe_from is None
        if may_ask and (needs_head or has_no_probe):
            if await target.has_blob(job.blob):
                return BlobResult.PRESENT
            job.is_known_absent = True
            known.forget(where, job.blob.digest)
        if job.upload.session:  # of `_can_probe`
            return None
        return await self._start(job, is_absence_new=needs_head)

    async def _start(self, job: _Job, *, is_absence_new: bool) -> BlobResult | None:
        """Open a session, or learn by a probing POST that the blob is there. `is_absence_new`: a
        HEAD has just shown that it is absent, so that the answer tells how such a POST is answered.
        """
        upload, target = job.upload, job.target
        where, known = target.store_key, self._knowledge
        answers = [known.fact(where.area, name) for name in (ABSENT_IS_202, PRESENT_IS_201)]
        is_absent = is_absence_new or known.fact(where.area, PRESENT_IS_201)  # if answered by 202
        probe_from = None if False in answers else target.probe_from
        try:
            is_present = await upload.start(probe_from)
        except RegistryError as error:
            if not error.retryable:  # it names no blob, so any other would be refused too
                self._refusals[where] = error.copy_without_context()
            raise
        self._answered[where].set()
        if not is_present or target.is_local:
            if upload.mount_status in _MOUNTS_REFUSED:
                known.learn(where.area, PRESENT_IS_201, False)
            elif is_absent and upload.mount_status == 202:
                known.learn(where.area, ABSENT_IS_202, True)
            return BlobResult.PRESENT if is_present else None
        async with self._testing[where.area]:
            is_trusted = known.fact(where.area, ABSENT_IS_202) and not job.is_known_absent
            if is_trusted:
                return BlobResult.BELIEVED
            is_right = await target.has_blob(job.blob)  # it may give a 201 to any digest
            known.learn(where.area, ABSENT_IS_202, is_right)
        if not is_right:
            await upload.start()
        return BlobResult.PRESENT if is_right else None

    async def _mount(self, job: _Job, holder: str) -> BlobResult | None:
        """Mount the blob, or use the session that a refused mount opens."""
        where, known = job.target.store_key, self._knowledge
        if await job.upload.start(holder):
            known.learn(where.host, MOUNTS, True)
            return BlobResult.MOUNTED
        source = RepositoryKey(where.host, holder)
        is_of_this_run = known.is_confirmed(source, job.blob.digest)
        is_first = known.supports_mounts(where.host) is None
        if is_of_this_run and is_first and job.target.host.registry.kind == "ecr":
            self._transport.machine.log("info", "mount", f"{where.host}: {_ECR_MOUNTS}")
        known.record_refused_mount(where, holder, is_source_confirmed=is_of_this_run)
        if is_of_this_run:
            return None
        # The state may be wrong about the holder, and about this repository too.
        known.forget(source, job.blob.digest)
        return BlobResult.PRESENT if await job.target.has_blob(job.blob) else None

    async def _can_probe(self, job: _Job) -> bool:
        """Find out, once in an area, whether a probing POST for a present blob is answered by 201.

        If it is not, it has opened a session that this blob can use.
        """
        where, known = job.target.store_key, self._knowledge
        probe_from = job.target.probe_from
        if probe_from is None or known.fact(where.area, ABSENT_IS_202) is False:
            return False
        async with self._testing[where.area]:
            present = job.present or known.choose_present_blob(where)
            is_known = known.fact(where.area, PRESENT_IS_201) is not None
            if present is not None and not is_known:
                try:
                    is_201 = await job.upload.try_mount(present, probe_from)
                except RegistryError as error:
                    if error.retryable:
                        raise
                    is_201 = False
                known.learn(where.area, PRESENT_IS_201, is_201)
        return not known.needs_head(where, job.blob.digest)

    # The body.

    async def _send(self, job: _Job, stream: Stream, turn: Turn | None) -> BlobResult:
        """Send the bytes that the target lacks to the open session. `turn` was taken for a request
        with all of them.
        """
        upload, size = job.upload, job.blob.size
        left = size - upload.offset
        limit = self._chunk_size(job)
        buffer = bytearray(min(left, limit))
        async with aclosing(stream), aclosing(in_chunks(stream, buffer)) as chunks:
            try:
                if upload.in_chunks:
                    async for chunk in chunks:
                        await self._send_chunk(job, chunk)
                    job.last_body = Body(stream, 0)
                else:
                    # A registry with a limit gets a body that is in memory and verified.
                    job.last_body = Body(chunks if limit else stream, left)
                    await job.last_body.begin()
                if await upload.send(job.last_body, turn=turn):
                    return BlobResult.UPLOADED
            except RegistryError as error:
                is_rest = left < size and not upload.in_chunks
                if not is_rest or error.retryable or error.status in (401, 403):
                    raise
                job.target.host.can_resume = False  # it holds other bytes than it has said
                upload.session = ""
                raise Disconnected(f"the rest of a broken upload was refused: {error}") from error
        job.last_body.left = 0  # a HEAD has to find out
        raise WireError("the registry answered before the blob was sent")

    async def _send_chunk(self, job: _Job, chunk: memoryview) -> None:
        """Send a chunk by PATCH, and again what has not arrived of it."""
        upload = job.upload
        start = upload.offset
        while True:
            try:
                if upload.is_broken:
                    await upload.resume()
                if not upload.session:
                    raise Disconnected("the registry has forgotten the upload")
                rest = chunk[upload.offset - start :]
                async with aclosing(in_memory(rest)) as stream:
                    if rest and not await upload.send(Body(stream, len(rest)), is_last=False):
                        raise WireError("the registry answered before the chunk was sent")
                job.tries.record_progress(upload.offset)
                return
            except SyncError as error:
                if is_session_gone(error):
                    _give_up(upload)
                if not upload.session or error.away is not None:
                    raise
                await job.tries.wait(error, longest=_SOURCE_GRACE)

    # After a failure.

    async def _has_arrived(self, job: _Job, failure: SyncError) -> bool:
        """Ask by HEAD, up to three times, for a blob that was sent and got no final answer."""
        is_refused = isinstance(failure, RegistryError) and failure.status < 500
        was_sent = job.last_body is not None and not job.last_body.left
        if not was_sent or is_refused or failure.side is Side.SOURCE:
            return False
        if not isinstance(failure, RegistryError | WireError):
            return False
        ask = partial(job.target.has_blob, job.blob)
        job.is_known_absent, job.may_have_arrived = False, True
        for pause in _LOST_ANSWER_PAUSES:
            await anyio.sleep(pause)
            try:
                has_arrived = await ask(with_retries=job.target.host.limits.is_away)
            except SyncError as error:
                if not error.retryable:
                    raise
                continue
            job.is_known_absent, job.may_have_arrived = not has_arrived, False
            if has_arrived:
                return True
        return False

    async def _prepare_next(self, job: _Job, error: SyncError) -> None:
        """Wait before the next attempt. Raises `error` if there is none."""
        upload, host = job.upload, job.target.host
        error.add_context(Side.TARGET, "push blob", job.target.name_of(job.blob.digest))
        if isinstance(error, WrongBytes) and not job.reading.is_fresh:
            job.reading.start_again()  # a cache may have been wrong
            if upload.is_broken:
                _give_up(upload)
            elif upload.session and upload.offset:
                await upload.cancel_upload()  # the session holds some of the wrong bytes
            return
        if error.away is None:
            # The mount may have caused it, unless the registry was away for a moment.
            job.may_mount = is_outage(error) and not job.has_failed
            job.has_failed = True
        if self._needs_chunks(job, error):
            is_refused = isinstance(error, RegistryError) and error.status != 413
            size = (
                0 if is_refused else min(job.blob.size, self._refused_size(job.target) or math.inf)
            )
            self._knowledge.learn(host.key, "smallest_patch", int(size))
            _give_up(upload)
            return
        await job.tries.wait(error)

    def _needs_chunks(self, job: _Job, error: SyncError) -> bool:
        """Report whether a PUT was refused in a way that chunks may help against."""
        upload = job.upload
        has_begun = job.last_body is not None and job.last_body.has_begun and not upload.offset
        is_put = has_begun and not upload.in_chunks and job.target.dialect.takes_chunks
        if not is_put or is_session_gone(error):
            return False
        if isinstance(error, RegistryError):
            has_code = error.status == 400 and not _PUT_REFUSED_CODES.isdisjoint(error.codes)
            return error.status in _PUT_REFUSED or has_code
        if isinstance(error, Disconnected) and error.side is Side.TARGET:
            job.resets += 1
        return job.resets == _MOST_RESETS

    def _tell_of_staging(self, error: NoRoom) -> None:
        is_warning = error.is_worth_a_warning and not self._has_warned_of_staging
        self._has_warned_of_staging |= is_warning
        text = f"{error}; each target reads it from the source"
        self._transport.machine.log("warning" if is_warning else "debug", "staging", text)

    # Manifests.

    async def put_manifests(
        self, image: Image, own_manifests: frozenset[str], on_put: Callable[[Manifest], None]
    ) -> None:
        """Put the children in `own_manifests`, each before its index, and then the root (I2)."""

        async def put_child(child: Manifest) -> None:
            await image.target.put_child(child)
            on_put(child)

        for level in image.tree.levels(own_manifests):
            await gather(partial(put_child, child) for child in level)
        full_name = image.source.full_name(image.source_reference)
        await image.target.put_manifest(image.reference, image.tree.root, full_name=full_name)


def _give_up(upload: BlobUpload) -> None:
    """Let the next attempt begin a new session."""
    upload.session = ""
    upload.is_broken = False


def _turn_of(given: dict[Need, Any], needs: tuple[Need, ...]) -> Turn | None:
    """Return the turn that was given for the lane among `needs`, if there is one."""
    turns = (given[need] for need in needs if isinstance(given[need], Turn))
    return next(turns, None)


def known_body(blob: Descriptor) -> bytes | None:
    """Return the bytes of a blob that is embedded, empty, or the empty JSON object."""
    algorithm, encoded = split_digest(blob.digest)
    for body in (blob.data, b"{}", b""):
        if body is not None and len(body) == blob.size and hash_hex(algorithm, body) == encoded:
            return body
    return None


def is_session_gone(error: SyncError) -> bool:
    return isinstance(error, RegistryError) and error.is_session_gone
