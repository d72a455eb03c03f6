"""Bring blobs and manifests of one image to one target, or say what that would cost. Owns: the way
of one blob (look up, mount, upload, relay, check, repetition) and of an image's manifests. May not
know: which image is next. Invariants: I1, I2 (children first, awaited), I3 (the last piece is
withheld until count and hash agree), I7, I8 (all of a transfer is admitted in one step; pauses hold
nothing). Follows design.md sections 6, 7, 9."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import anyio.lowlevel

from _regsync import oci, pacing
from _regsync.discover import together
from _regsync.errors import ContentError, Disconnected, RegistryError, Side, SyncError, WireError
from _regsync.fips import hash_hex, new_hash
from _regsync.http1 import PIECE
from _regsync.plan import Step, Tree, Work
from _regsync.registry import Repository, Upload
from _regsync.state import Knowledge, RepositoryKey
from _regsync.store import (
    SMALL_BLOB,
    FilePieces,
    MemoryPieces,
    NoRoom,
    Reader,
    Staging,
    StagingFailed,
    read_whole,
)
from _regsync.transport import Transport

# design.md section 6 rule 16: a blob starts again at most twice; when a lost answer is asked for;
# how long a source is waited for in all, which a target's own time-outs allow; how far apart the
# states of a hash are kept.
_BLOB_STARTS = 3
_LOST_ANSWER_PAUSES = (0.0, 1.0, 3.0)
_SOURCE_GRACE = 20.0
_CHECKPOINT = 16 * 1024 * 1024
# Where the gate counts the memory of parts, which is no registry's; codes that may mean "not in
# this way".
_PARTS = ""
_NOT_SO = {"UNSUPPORTED", "BLOB_UPLOAD_INVALID"}
_WHOLE_BLOB = (
    64 * 1024
)  # rule 12: up to this a blob goes in one request where the registry takes it so
_Brought = Literal["uploaded", "mounted", "there"]  # how a blob came to its place
Keep = (
    Literal["disk", "memory"] | None
)  # where others who need a blob find it: small ones in memory, or nowhere


class Relay:
    """A blob on its way out of its source: counted, hashed, its last piece withheld until both
    agree. A broken one goes on by Range, so that the target's PUT stays open (rule 16)."""

    def __init__(self, source: Repository, blob: oci.Descriptor, transport: Transport) -> None:
        self.source = source
        self.complete = False
        self._blob = blob
        self._transport = transport
        algorithm, self._expected = oci.split_digest(blob.digest)
        self._checkpoints = [
            (0, new_hash(algorithm))
        ]  # whence a target that lost what followed may be served again
        # What is left of the waits for this source, in seconds; its attempts are counted anew above
        # `_renewed` bytes.
        self._grace = _SOURCE_GRACE
        self._patience = pacing.Patience(pacing.ATTEMPTS)
        self._renewed = 0
        self._stack = AsyncExitStack()

    @asynccontextmanager
    async def opened(self, offset: int = 0) -> AsyncIterator[Relay]:
        """Give what follows `offset`, which the target has: read and hashed on from the checkpoint
        before it.
        """
        while self._checkpoints[-1][0] > offset:
            self._checkpoints.pop()
        self._count, running = self._checkpoints[-1]
        self._hash = running.copy()
        self._skip = offset
        self.length = self._blob.size - offset
        self._until = self._blob.size + 1  # no piece reaches farther
        self.complete = self.complete and not self.length
        self._buffer = memoryview(bytearray(min(PIECE, self._blob.size + 1)))
        async with self._stack:
            if not self.complete:
                await self._open()
            yield self

    async def _open(self) -> None:
        await self._stack.aclose()
        self._response = await self._stack.enter_async_context(
            self.source.open_blob(self._blob, self._count)
        )

    async def next(self) -> memoryview:
        """Return the next verified piece; ContentError when the source lies, WireError when it
        breaks for good.
        """
        piece = memoryview(b"")
        with self.source.located("fetch blob", self.source.reference(self._blob.digest)):
            while not (piece or self.complete):
                piece = await self._read()
        return piece

    async def part(self, end: int, room: bytearray) -> memoryview:
        """Put what comes before an offset into `room`: all that is left is verified before a byte
        of it goes on.
        """
        held = 0
        self._until = end
        while self._count < end:
            piece = await self.next()
            room[held : held + len(piece)] = piece
            held += len(piece)
        return memoryview(room)[:held]

    async def _read(self) -> memoryview:
        """Take in one more piece, or open the rest of a body that broke; return what the target
        lacks of it.
        """
        size = self._blob.size
        began = self._count
        try:
            count = await self._response.read_into(self._buffer[: self._until - began])
            if not count and began < size:
                raise Disconnected(f"the blob ended after {began} of {size} bytes")
        except WireError as broken:
            await self._resume(broken)
            return memoryview(b"")
        self._hash.update(self._buffer[:count])
        self._count += count
        if self._count > size:
            raise ContentError(f"the blob is longer than the {size} bytes of its descriptor")
        if self._count == size and self._hash.hexdigest() != self._expected:
            raise ContentError("the blob's bytes do not match its digest")
        self.complete = self._count == size
        if self._count - self._checkpoints[-1][0] >= _CHECKPOINT:
            self._checkpoints.append((self._count, self._hash.copy()))
        self._transport.moved = anyio.current_time()
        self._transport.bytes = self._transport.bytes + count
        return self._buffer[max(0, self._skip - began) : count]

    async def _resume(self, broken: SyncError) -> None:
        began = anyio.current_time()
        error = broken
        if self._count >= self._renewed:
            self._patience = pacing.Patience(pacing.ATTEMPTS)
            self._renewed = self._count + pacing.LARGE_BODY
        try:
            with anyio.move_on_after(self._grace):
                while True:
                    await anyio.sleep(
                        self._transport.pause_after(error, self._patience, self.source.host)
                    )
                    try:
                        return await self._open()
                    except SyncError as caught:
                        error = caught
                    if not error.retryable:
                        break  # to begin again is what is left
            raise broken
        finally:
            self._grace -= anyio.current_time() - began


class _Unanswered(Exception):
    """A whole body was sent, or a success came too early: a HEAD decides (rule 16), else the
    argument is raised.
    """


@contextmanager
def _answered(body: Relay | MemoryPieces | FilePieces | None = None) -> Iterator[None]:
    """Raise _Unanswered instead of what failed where `body` (None: one that is sent at once) may
    have arrived.
    """
    try:
        yield
    except (WireError, RegistryError) as error:
        lost = error.side is not Side.SOURCE and (
            isinstance(error, WireError) or error.status >= 500
        )
        if lost and (body is None or body.complete):
            raise _Unanswered(error) from error
        raise


class Mover:
    """Moves blobs and manifests; what it learns goes into `knowledge`."""

    def __init__(self, transport: Transport, knowledge: Knowledge, staging: Staging) -> None:
        self._transport = transport
        self._knowledge = knowledge
        self._staging = staging
        self._admitted = transport.gate.admitted
        self._disk_works = True
        transport.gate.limits[_PARTS] = staging.parts
        # Where an upload was accepted, and hosts that answered one in one request: unset while the
        # first is under way.
        self._accepted: dict[RepositoryKey, anyio.Event] = {}
        self._refused: dict[
            RepositoryKey, SyncError
        ] = {}  # where none was, and why none will be in this run
        self._tried: dict[str, anyio.Event] = {}

    async def bring(
        self, step: Step, source: Repository, target: Repository, keep: Keep
    ) -> _Brought | None:
        """Bring a blob; one that others need too is pulled once and kept. None: it was dropped;
        errors are located.
        """
        with anyio.CancelScope() as dropped:
            async with self._transport.pool.lease(target.host.origin) as lease:
                self._transport.streams[dropped] = lease
                upload = Upload(target, self._transport, lease, step.blob)
                try:
                    relay = Relay(source, step.blob, self._transport)
                    return await self._bring(
                        upload, step, relay, keep if self._disk_works else None
                    )
                finally:
                    del self._transport.streams[dropped]
                    # and no body follows: the source has refused it, or a HEAD has found it there
                    if upload.session:
                        with anyio.move_on_after(self._transport.edge.timeouts.head):
                            await upload.cancel_upload()
        return None

    async def _bring(self, upload: Upload, step: Step, relay: Relay, keep: Keep) -> _Brought:
        broken = 0
        log = self._transport.edge.log
        target = upload.repository
        blob = upload.blob
        while True:
            try:
                upload.begun = False
                return await self._bring_once(upload, step, relay, keep)
            except _Unanswered as lost:
                await upload.lease.settle()
                error: SyncError = lost.args[0]
                if await self._arrived(upload):
                    upload.session = ""  # it has ended with that
                    return "uploaded"
            except (
                StagingFailed
            ) as caught:  # a full disk fails nothing: each target reads for itself (design.md 8)
                news = self._disk_works and not isinstance(caught, NoRoom)
                keep = None
                upload.broken = ""  # what the target has of it may have been changed on disk
                log(
                    "warning" if news else "debug",
                    "staging",
                    f"{caught}; each target reads for itself",
                )
                self._disk_works = self._disk_works and not news
                continue
            except SyncError as caught:
                error = caught
            error.located(Side.TARGET, "push blob", target.reference(blob.digest))
            error.message = target.host.authenticator.redact(error.message)
            if upload.refused and not self._accepted.get(target.key, anyio.Event()).is_set():
                self._refused[target.key] = error.again()
            step = step._replace(
                mount_from=""
            )  # whatever went wrong with it, an upload does not depend on it
            broken += upload.begun and (
                isinstance(error, WireError) or getattr(error, "forgot_session", False)
            )
            pause = (
                0.0
                if self._turned(upload, error, broken)
                else self._transport.pause_after(
                    error, upload.patience, relay.source.host, target.host
                )
            )
            if broken == _BLOB_STARTS:
                raise error
            log(
                "debug",
                "retry",
                f"{error}; it {'goes on' if upload.broken or upload.session else 'begins again'}",
            )
            error.shed()  # its frames hold a part of the blob
            await upload.lease.settle()
            await anyio.sleep(pause)

    async def _arrived(self, upload: Upload) -> bool:
        """Ask, with nothing held in between, whether a blob whose answer was lost has arrived."""
        for pause in _LOST_ANSWER_PAUSES:
            await anyio.sleep(pause)
            try:
                upload.absent = not await upload.repository.has_blob(upload.blob)
                if not upload.absent:
                    return True
            except (
                SyncError
            ) as error:  # a registry that has just dropped an answer may not be well yet
                if not error.retryable:
                    raise
        return False

    async def _bring_once(self, upload: Upload, step: Step, relay: Relay, keep: Keep) -> _Brought:
        blob = upload.blob
        host = upload.repository.host.key
        rank = float(step.work.order)
        large = blob.size >= pacing.LARGE_BODY
        known = known_body(blob)
        reading = pacing.Want(relay.source.host.key, "read", large)
        write = pacing.Want(host, "write", large)
        draws = self._transport.want(relay.source.host, relay.source.call("blob_get", "GET", ""))
        put = self._transport.want(
            upload.repository.host, upload.repository.call("upload_body", "PUT", "")
        )

        async def read(_: oci.Descriptor, sink: Callable[[memoryview], Awaitable[None]]) -> None:
            meter = self._transport.gate.limits[draws.host].meters[draws.meters[0]]
            if meter.paused > anyio.current_time() and host in self._tried:
                self._tried[host].set()  # nobody else is to wait for this source
            async with self._admitted((reading,), rank), relay.opened():
                while not relay.complete:
                    await sink(await relay.next())

        if upload.broken:
            async with self._admitted((pacing.Want(host),), rank):
                await upload.resume()
        if not upload.session and await self._goes_whole(upload, step, known):
            try:
                return await self._bring_whole(upload, known, read, rank, keep)
            finally:
                if host in self._tried:
                    self._tried[host].set()
        self._accepted.setdefault(upload.repository.key, anyio.Event())
        if known is None and keep is None:
            parts = -(-min(blob.size, upload.repository.row.put_limit or 0) // SMALL_BLOB)
            async with self._admitted(
                (reading, write, *parts * (pacing.Want(_PARTS),)), rank, upload.lease
            ) as permit:
                if begun := await self._begin(upload, step):
                    return begun
                await self._transport.gate.take(permit, draws, put, lease=upload.lease)
                self._staging.make_way()
                async with relay.opened(upload.offset):
                    return await self._send(upload, relay)
        async with self._admitted((pacing.Want(host),), rank, upload.lease):
            begun = await self._begin(upload, step)
        while begun is None:
            if known is None:
                await self._staging.ensure(blob, read, disk=keep == "disk")
            async with self._admitted((write._replace(meters=put.meters),), rank, upload.lease):
                memory = None if known is None else nullcontext(MemoryPieces(known, upload.offset))
                with memory or self._staging.opened(blob, upload.offset) as body:
                    begun = await self._send(upload, body) if body else None
        return begun

    async def _goes_whole(self, upload: Upload, step: Step, known: bytes | None) -> bool:
        """Say whether a small blob goes in one request (rule 12); the first config at a host finds
        out, others wait.
        """
        target = upload.repository
        blob = upload.blob
        host = upload.repository.host.key
        takes = partial(self._knowledge.fact, f"whole {host}")
        # Elsewhere the POST that asks and starts costs no more than a HEAD, and may save the bytes.
        probes = self._knowledge.may_probe(target.key, target.row.probe is not None)
        asks = probes and not self._knowledge.is_empty(target.key)
        small = not step.mount_from and blob.size <= _WHOLE_BLOB
        if (
            not small
            or asks
            or takes() is False
            or (known is None and not await self._accepts(target.key))
        ):
            return False
        if blob.media_type not in oci.IMAGE_CONFIGS:
            await (
                anyio.lowlevel.checkpoint()
            )  # a config that waited for the same acceptance finds out
        elif takes() is None and host not in self._tried:
            self._tried[host] = anyio.Event()
            return True
        if host in self._tried:
            await self._tried[host].wait()
        return takes() is True

    async def _bring_whole(
        self, upload: Upload, body: bytes | None, read: Reader, rank: float, keep: Keep
    ) -> _Brought:
        """Upload a small blob in one request, or as the registry answers that (rule 12)."""
        blob = upload.blob
        host = upload.repository.host.key
        if not self._knowledge.is_empty(upload.repository.key):
            async with self._admitted((pacing.Want(host),), rank):
                if await self._is_there(upload):
                    return "there"
        while body is None and keep is not None:
            await self._staging.ensure(blob, read, disk=keep == "disk")
            with self._staging.opened(blob) as pieces:
                body = (
                    None if pieces is None else bytes(await pieces.next())
                )  # of this size it is one piece
        body = await read_whole(blob, read) if body is None else body
        upload.blob = blob._replace(data=body)  # what is sent again is not read again
        rank = (
            -1.0 if self._knowledge.fact(f"whole {host}") is None else rank
        )  # others wait for this answer
        async with self._admitted((pacing.Want(host, "write"),), rank, upload.lease):
            self._check_open(upload.repository.key)
            with _answered():
                done = await upload.whole(body)
            if not done and not upload.session:
                await upload.start()
            self._knowledge.learn(f"whole {host}", done)
            return "uploaded" if done else await self._send(upload, MemoryPieces(body))

    async def _accepts(self, where: RepositoryKey) -> bool:
        """Say whether a repository has accepted an upload; wait for the one that finds out (rule
        14).
        """
        if self._knowledge.was_used(where) and not self._knowledge.is_empty(where):
            return True
        await (
            anyio.lowlevel.checkpoint()
        )  # the image's large blobs, which cannot go in one request, find out first
        while (accepted := self._accepted.get(where)) is not None and not accepted.is_set():
            await accepted.wait()
        return accepted is not None

    def _check_open(self, where: RepositoryKey) -> None:
        if where in self._refused:
            raise self._refused[where].again()

    async def _begin(self, upload: Upload, step: Step) -> _Brought | None:
        """Find the blob there, mount it, or open an upload session (then None) unless one is open."""
        where = upload.repository.key
        accepted = self._accepted.setdefault(where, anyio.Event())
        try:
            if upload.session:
                return None  # it was accepted, whatever became of another one's start meanwhile
            self._check_open(where)
            # None: nobody had it when this was decided; somebody may have put it while this waited
            # for its turn.
            holder = (
                self._knowledge.mount_source(where, upload.blob.digest)
                if step.mount_from is None
                else ""
            )
            mount_from = step.mount_from or holder
            begun = await (self._mounted(upload, mount_from) if mount_from else self._there(upload))
            self._refused.pop(where, None)
            return begun
        except SyncError:
            if not accepted.is_set():
                del self._accepted[where]
            raise
        finally:
            accepted.set()

    async def _mounted(self, upload: Upload, mount_from: str) -> _Brought | None:
        digest = upload.blob.digest
        where = upload.repository.key
        knowledge = self._knowledge
        if await upload.start(mount_from):
            knowledge.accept_mount(where[0])
            return "mounted"
        knowledge.refuse_mount(where, mount_from)
        holder = (where[0], mount_from)
        if knowledge.is_confirmed(holder, digest):
            return None
        knowledge.forget(
            holder, digest
        )  # it rested on an earlier run: specification section 7 wants a fresh HEAD
        return "there" if await upload.repository.has_blob(upload.blob) else None

    async def _there(self, upload: Upload) -> _Brought | None:
        target = upload.repository
        knowledge = self._knowledge
        absent = not knowledge.may_probe(target.key, target.row.probe is not None)
        if absent and await self._is_there(upload):
            return "there"
        if not await upload.start(
            {"from": target.api_name, "bare": ""}.get(target.row.probe or "")
        ):
            knowledge.learn_probe(target.key, absent=absent)
            return None
        if not knowledge.probed(target.key)[
            1
        ]:  # who answers 201 to anything must not make us skip (rule 11)
            if absent or not await target.has_blob(upload.blob):
                await upload.start()
                return None
            knowledge.learn_probe(target.key, present=True)
        return "there"

    async def _is_there(self, upload: Upload) -> bool:
        if upload.absent:
            return False
        upload.absent = not await upload.repository.has_blob(upload.blob)
        if upload.absent:
            self._knowledge.miss(upload.repository.key, upload.blob.digest)
        return not upload.absent

    def _turned(self, upload: Upload, error: SyncError, broken: int) -> bool:
        """Turn once to the other dialect: a body was refused as protocol-facts.md section 7.9 says,
        or broke in all attempts but the last. A limit of size says nothing of smaller bodies."""
        other = upload.repository.row.fallback
        size = upload.blob.size
        fact = f"patch {upload.repository.host.key}"
        status = getattr(error, "status", 0)
        codes = getattr(error, "codes", ())
        wrong = status in (405, 411, 501) or (status == 400 and _NOT_SO.intersection(codes))
        reset = (
            broken == _BLOB_STARTS - 1
            and isinstance(error, Disconnected)
            and error.side is Side.TARGET
        )
        turns = bool(
            other
            and upload.begun
            and not upload.turned
            and (wrong or reset or status in (413, 416))
        )
        if turns:
            least = min(0 if wrong else size, self._knowledge.fact(fact) or size)
            self._knowledge.learn(fact, None if upload.style == other else least)
            upload.turned = True
            upload.broken = ""
        return turns

    async def _send(self, upload: Upload, body: Relay | MemoryPieces | FilePieces) -> _Brought:
        """Stream the body, or its rest; _Unanswered when only asking can tell whether a whole body
        arrived.
        """
        row = upload.repository.row
        host = upload.repository.host
        size = upload.blob.size
        last = body
        least = self._knowledge.fact(
            f"patch {host.key}"
        )  # the dialect follows the kind, and what was learnt
        upload.style = (
            row.fallback
            if row.fallback and isinstance(least, int) and size >= least
            else row.upload
        )
        if row.put_limit and size > row.put_limit:
            upload.style = "chunks"
        try:
            if upload.style != "put":
                last = await self._send_parts(upload, body)
            elif row.put_limit and isinstance(body, Relay):
                last = MemoryPieces(await body.part(size, bytearray(size - upload.offset)))
            with _answered(last):
                if await upload.send(last):
                    return "uploaded"
        except RegistryError as error:
            if (
                error.retryable
                or not upload.offset
                or upload.style == "patch"
                or error.status in (401, 403)
            ):
                raise
            # It had more, or less, than it said: the blob begins again.
            host.resumes = False
            upload.session = ""
            raise Disconnected(
                f"the rest of a broken upload was refused: {error.message}"
            ) from error
        raise _Unanswered(WireError("the registry answered before the blob was sent"))

    async def _send_parts(
        self, upload: Upload, body: Relay | MemoryPieces | FilePieces
    ) -> MemoryPieces:
        """Send what the session lacks by PATCH, whole or in chunks (specification section 8.2);
        return what is left. A chunk that breaks goes again, from memory or disk, unless what was
        admitted would be held for too long."""
        limit = upload.repository.row.put_limit
        end = 0
        part = body
        room = bytearray(
            min(limit or 0, upload.blob.size) * isinstance(body, Relay)
        )  # one, for all chunks
        while upload.offset < upload.blob.size:
            if limit and upload.offset >= end:
                start = upload.offset
                end = min(upload.offset + limit, upload.blob.size)
                if isinstance(body, Relay):
                    held = await body.part(end, room)
            try:
                if upload.broken:
                    await upload.resume()
                if not upload.session:
                    raise Disconnected("the registry has forgotten the upload")
                if isinstance(body, FilePieces) and limit:
                    part = body.cover(upload.offset, end)
                elif limit:
                    part = MemoryPieces(held, upload.offset - start)
                if part.length and not await upload.send(part, last=False):
                    raise Disconnected("the registry answered before what was sent had arrived")
                upload.patience = pacing.Patience(pacing.ATTEMPTS)
            except SyncError as error:
                if getattr(error, "forgot_session", False):
                    upload.session = ""
                if not upload.session:
                    raise
                pause = self._transport.pause_after(error, upload.patience, upload.repository.host)
                if max(pause, getattr(error, "retry_after", None) or 0.0) > _SOURCE_GRACE:
                    raise
                self._transport.edge.log("debug", "retry", f"{error}; the chunk goes again")
                await anyio.sleep(pause)
        return MemoryPieces(b"")

    async def put(
        self,
        tree: Tree,
        work: Work,
        target: Repository,
        reference: str,
        arrived: Callable[[oci.Manifest], None],
    ) -> None:
        """Put an image's manifests: the children that it has to bring, level by level, the root
        last (I2).
        """

        async def put(child: oci.Manifest) -> None:
            await target.put_manifest(child.digest, child)
            arrived(child)

        waiting = {
            child.digest: child for child in tree.children if child.digest in work.own_children
        }
        while waiting:
            level = [
                each
                for each in waiting.values()
                if not any(entry.digest in waiting for entry in each.children)
            ]
            await together(partial(put, child) for child in level)
            for child in level:
                del waiting[child.digest]
        await target.put_manifest(reference, tree.root)


class Rehearsal(Mover):
    """Stands where the mover stands in a dry run, by GET and HEAD alone, and counts what `analyze`
    shows. Its requests and bytes are those of a run that gets the same answers (design.md sections
    6 and 10, "Dry run")."""

    def __init__(self, transport: Transport, knowledge: Knowledge, staging: Staging) -> None:
        super().__init__(transport, knowledge, staging)
        # By host and action, beside what is asked here; HEADs that the upload starts of a run spare
        # count below zero.
        self._expected = defaultdict[str, Counter[str]](Counter)
        self._read = set[tuple[str, str]]()
        self._to_move = Counter[str]()
        # Of all images that were looked at: blobs' sizes, in how many images, and where they go.
        self._sizes = dict[str, int]()
        self._images = dict[str, tuple[str, int]]()
        self._uses = Counter[str]()
        self._places = defaultdict[str, set[RepositoryKey]](set)
        self._plain = 0

    def look_at(self, name: str, tree: Tree, where: RepositoryKey) -> None:
        """Take in one image, or artifact (no name), on its way to one repository, also one that is
        there already.
        """
        blobs = {
            blob.digest: blob.size for each in (tree.root, *tree.children) for blob in each.blobs
        }
        self._sizes.update(blobs)
        if tree.root.digest not in self._images:
            self._uses.update(blobs.keys())
        self._images.setdefault(tree.root.digest, (name, sum(blobs.values())))
        self._plain += sum(blobs.values())
        for digest in blobs:
            self._places[digest].add(where)

    async def bring(
        self, step: Step, source: Repository, target: Repository, keep: Keep
    ) -> _Brought:
        """Say how a blob would come to its place; a repository that may hold it is asked."""
        blob = step.blob
        host = target.host.key
        if step.mount_from is not None:
            self._knowledge.accept_mount(host)
            self._expected[host]["upload_start"] += 1
            return "mounted"
        if not self._knowledge.is_empty(target.key):
            present = await target.has_blob(blob)
            probes = self._knowledge.may_probe(target.key, target.row.probe is not None)
            self._expected[host]["blob_head"] -= probes
            if present:
                self._expected[host]["upload_start"] += probes
                return "there"
        read = (source.host.key, blob.digest)
        if known_body(blob) is None and not (keep and read in self._read):
            self._expected[source.host.key]["blob_get"] += 1
        self._read.add(read)
        self._expected[host].update({"upload_start": 1, "upload_body": 1})
        self._to_move[host] += blob.size
        return "uploaded"

    async def put(
        self,
        tree: Tree,
        work: Work,
        target: Repository,
        reference: str,
        arrived: Callable[[oci.Manifest], None],
    ) -> None:
        own = [child for child in tree.children if child.digest in work.own_children]
        self._expected[target.host.key]["manifest_put"] += len(own) + 1
        for child in own:
            arrived(child)

    def analysis(self) -> dict[str, Any]:
        """Return what `analyze --json` shows; sizes in bytes, requests of a run like this one by
        host and action.
        """
        counted = {host: Counter(actions) for host, actions in self._transport.requests.items()}
        for host, actions in self._expected.items():
            counted.setdefault(host, Counter()).update(actions)
        requests = {
            host: dict(sorted((+actions).items())) for host, actions in sorted(counted.items())
        }
        shared = [digest for digest, uses in self._uses.items() if uses > 1]
        targets: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for digest, places in self._places.items():
            for host, repositories in Counter(host for host, _ in places).items():
                targets[host].update(bytes=self._sizes[digest], mounts_possible=repositories - 1)
        named = [each for each in self._images.values() if each[0]]
        layers, images = (
            sorted(found, key=lambda each: (-each[1], each[0]))[:10]
            for found in (self._sizes.items(), named)
        )
        return {
            "schema": 1,
            "images": len(named),
            "blobs": {
                "unique": len(self._sizes),
                "unique_bytes": sum(self._sizes.values()),
                "shared": len(shared),
                "shared_bytes": sum(self._sizes[digest] for digest in shared),
            },
            "bytes": {
                "image_by_image": self._plain,
                "each_blob_once": sum(each["bytes"] for each in targets.values()),
            },
            "targets": {
                host: {**each, "to_move": self._to_move[host]}
                for host, each in sorted(targets.items())
            },
            "requests": requests,
            "largest_images": [{"image": name, "bytes": size} for name, size in images],
            "largest_layers": [
                {"digest": digest, "bytes": size, "images": self._uses[digest]}
                for digest, size in layers
            ],
        }


def known_body(blob: oci.Descriptor) -> bytes | None:
    """Return the body where no source has to be asked for it (rule 13)."""
    algorithm, encoded = oci.split_digest(blob.digest)
    likely = (
        body for body in (blob.data, b"{}", b"") if body is not None and len(body) == blob.size
    )
    return next((body for body in likely if hash_hex(algorithm, body) == encoded), None)
