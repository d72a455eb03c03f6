"""Copy one blob to one repository, and put the manifests of an image.

Owns: how a blob gets into its repository (it is present already, is mounted, or is uploaded from
    its source, from memory or from disk); repeating failed attempts; checking whether a blob has
    arrived if the answer to its upload was lost; the order of manifests.
May not know: which image is next, or why a blob is wanted.
Invariants: children are put before their index, the root last (I2); a body that cannot be replayed
    is repeated here and in no lower layer (I7); both ends of a transfer are admitted in one step,
    and no task waits while it holds a permit (I8).
Follows: docs/design.md section 6 (rules 10 to 14 and 16) and section 9.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial

import anyio

from _regsync.crypto import hash_hex
from _regsync.errors import Disconnected, RegistryError, Side, SyncError, WireError, WrongBytes
from _regsync.oci.manifest import Descriptor, Manifest
from _regsync.oci.reference import split_digest
from _regsync.providers import UploadStyle
from _regsync.registry.outage import is_outage
from _regsync.registry.repository import BlobUpload, Repository
from _regsync.registry.throttle import ATTEMPTS, LARGE_BODY, Demand, RetryBudget
from _regsync.registry.transport import Transport
from _regsync.state import Knowledge, RepositoryKey
from _regsync.sync.claims import Step
from _regsync.sync.feed import FeedBody, Feeds, LeftBehind, Part, Subscriber, copy_error
from _regsync.sync.image import BlobResult, Image
from _regsync.sync.once import Once, gather
from _regsync.sync.relay import SOURCE_GRACE, Relay
from _regsync.sync.staging import (
    SMALL_BLOB,
    FilePieces,
    MemoryPieces,
    NoRoom,
    Sink,
    Staging,
    StagingFailed,
)
from _regsync.text import redacting

# How many times the body of a blob may be started from its first byte (docs/design.md section 6,
# rule 16).
_BLOB_STARTS = 3

# Seconds to wait before each HEAD for a blob whose upload got no answer (the same rule).
_LOST_ANSWER_PAUSES = (0.0, 1.0, 3.0)

# Seconds to wait before a blob is sent again to a target that was too slow for a shared reading.
# The target must first notice that the old request has ended, or it refuses to resume the session.
_LEFT_BEHIND_PAUSE = 5.0

# A registry that does not support an upload style answers with one of these statuses, or with 400
# and one of these error codes (docs/protocol-facts.md section 7.9).
_UNSUPPORTED_STATUSES = (405, 411, 501)
_UNSUPPORTED_CODES = {"UNSUPPORTED", "BLOB_UPLOAD_INVALID"}

# A registry that refuses a body because of its size answers with one of these statuses (the same
# section).
_TOO_LARGE_STATUSES = (413, 416)

# Why an ECR registry does not mount a blob that it has (docs/protocol-facts.md section 4.9).
_ECR_MOUNTS = (
    "a blob was not mounted, and is uploaded: ECR mounts between repositories of one encryption, in"
    " an account whose setting BLOB_MOUNTING is ENABLED"
)

# What can be sent as the body of an upload.
Body = Relay | FeedBody | MemoryPieces | FilePieces


class BytesFrom(enum.Enum):
    """Where an upload gets the bytes of its blob. It may change after a failed attempt.

    from      to        when
    DISK      SHARED    the blob cannot be staged
    SHARED    SOURCE    the target is too slow for the other targets
    SOURCE    MEMORY    the next attempt sends a small blob from memory
    MEMORY    SOURCE    memory has no room
    """

    # Staged for several uploads: a small blob in memory while there is room, any other on disk.
    DISK = enum.auto()
    # Staged for several uploads, in memory only.
    MEMORY = enum.auto()
    # One reading of the source that several targets share (`feed`).
    SHARED = enum.auto()
    # A reading of its own.
    SOURCE = enum.auto()


class _AnswerLost(SyncError):
    """All bytes of a blob may have arrived, but the registry's answer does not say so.

    Either the answer to the complete body was lost, or the registry reported success before the
    last byte was sent. A HEAD has to find out (docs/design.md section 6, rule 16). `error` is the
    error to report if the blob is absent.
    """

    def __init__(self, error: SyncError) -> None:
        super().__init__(error.message)
        self.error = error


@contextmanager
def _detecting_lost_answer(body: Body) -> Iterator[None]:
    """Raise _AnswerLost in place of an error after which all of `body` may have arrived."""
    try:
        yield
    except (WireError, RegistryError) as error:
        is_inconclusive = isinstance(error, WireError) or error.status >= 500
        if body.complete and is_inconclusive and error.side is not Side.SOURCE:
            raise _AnswerLost(error) from error
        raise


class _FirstStart:
    """The outcome of the first attempt to upload to a repository in this run.

    The other uploads to the repository wait for this outcome (docs/design.md section 6, rule 14).
    """

    def __init__(self) -> None:
        # Set when the repository has accepted the start of that upload, or the attempt has failed.
        self.decided = anyio.Event()
        # Whether the repository has accepted the start of any upload in this run.
        self.is_accepted = False
        # The error with which the repository refuses every upload. None: it refuses none.
        self.refusal: SyncError | None = None


class _Job:
    """One blob to be copied to one repository: its state over all attempts."""

    def __init__(
        self,
        step: Step,
        target: Repository,
        relay: Relay,
        upload: BlobUpload,
        bytes_from: BytesFrom,
        subscriber: Subscriber | None,
    ) -> None:
        self.blob = step.blob
        # The claims of the image for which the blob is copied.
        self.claims = step.claims
        # Waiting requests are admitted by rank, lowest first. So the blobs of the image that was
        # promoted first come first.
        self.rank = float(step.claims.order)
        self.target = target
        # Reads the blob from its source.
        self.relay = relay
        # The upload at the target. `upload.session` is the path of its open session, and
        # `upload.broken_session` the path of a session whose body got no answer. "" means that
        # there is no such session. Setting one of them to "" discards the session.
        self.upload = upload
        self.bytes_from = bytes_from
        # Subscribes to readings of the blob that several targets share. None if the job begins
        # with MEMORY or SOURCE.
        self.subscriber = subscriber

        # The repository to mount the blob from, if the scheduler has chosen one. None: each attempt
        # looks for a repository that is known to hold the blob.
        self.chosen_mount = step.mount_from
        # False after a failure that the mount may have caused: then the blob is uploaded.
        self.may_mount = True
        # Whether an attempt has failed. A mount is tried again after a first failure that looks
        # like the beginning of an outage.
        self.has_failed_before = False

        # Whether a HEAD has shown that the target lacks the blob.
        self.is_known_absent = False
        # Whether the answer to a complete body was lost, and no HEAD has been answered since.
        self.may_have_arrived = False
        # Whether the open session was opened by a probe for another blob (`_probe_present_blob`).
        # The session accepts this blob too, but nobody has asked yet whether the target has it. So
        # a HEAD comes first.
        self.has_probe_session = False
        # Whether this job has switched between the usual and the fallback upload style of the
        # registry. A job switches once.
        self.has_switched_style = False

        # Whether the next attempt takes the blob from memory. Staging retains it there until the job
        # ends.
        self.is_retained = False

        # How many bodies broke off, and the attempts that are left. `renew_attempts` resets both.
        self.broken_bodies = 0
        self.retries = RetryBudget(ATTEMPTS)
        # Whether an outage has interrupted this job since `renew_attempts` last reset them.
        self.has_met_outage = False
        # How many bytes the target must have before `renew_attempts` resets them again.
        self.renew_attempts_at = LARGE_BODY

        # Bytes of memory for one chunk; 0 if the registry accepts bodies of any size.
        self.chunk_size = min(step.blob.size, target.dialect.put_limit or 0)

        # The permits that reading the blob takes at the source and writing it takes at the target.
        # Their rate limits (`meters`) count only when a body follows, and are added then.
        is_large = step.blob.size >= LARGE_BODY
        self.reading = Demand(relay.source.host.key, body="read", is_large=is_large)
        self.writing = Demand(self.target.host.key, body="write", is_large=is_large)

    def record_failure(self, error: SyncError) -> None:
        """Record a failed attempt."""
        if error.unreachable_peer is not None:  # an outage is not a failure of the upload
            self.has_met_outage = True
            return
        # The mount may have caused the failure, and the blob can be uploaded without it. A first
        # failure that looks like the beginning of an outage says nothing about the mount.
        if self.has_failed_before or not is_outage(error):
            self.may_mount = False
        self.has_failed_before = True

        is_body_broken = isinstance(error, WireError) or _is_session_gone(error)
        if self.upload.has_begun and is_body_broken:
            self.broken_bodies += 1

    def can_test_host(self, error: SyncError) -> bool:
        """Report whether the next attempt may find out that an unreachable host is available again.

        Only one request at a time is sent to a host in an outage. All others wait for its answer.
        """
        if error.unreachable_peer is self.target.host.peer:
            # A body cannot do it, because it cannot be repeated. If a session is open and not
            # broken, the attempt begins with the body.
            return not self.upload.session or bool(self.upload.broken_session)
        # A shared reading of the source cannot do it, because it waits for the other targets, which
        # wait for the source.
        return self.bytes_from is not BytesFrom.SHARED

    def renew_attempts(self) -> None:
        """Reset the attempts if an outage has broken the session that is now resumed.

        The target must have received LARGE_BODY more bytes since the attempts were last renewed.
        Otherwise a job could repeat without end.
        """
        if self.has_met_outage and self.upload.offset >= self.renew_attempts_at:
            self.has_met_outage = False
            self.renew_attempts_at = self.upload.offset + LARGE_BODY
            self.retries = RetryBudget(ATTEMPTS)
            self.broken_bodies = 0


class BlobTransfer:
    """Copies blobs and manifests to their repositories, and records in `knowledge` what it learns.

    How a blob is copied:

        _copy_with_retries   make attempts until one succeeds
        _attempt             make one attempt, and choose where the bytes are read
        _find_or_start       find the blob at the target, mount it, or open an upload session
        _send_body           send the bytes to the session

    A probing POST asks to mount a blob from the target repository itself. Many registries answer
    201 if the repository has the blob; otherwise they answer 202 and open a session. Such a POST
    saves a HEAD (docs/design.md section 6, rule 11).
    """

    def __init__(self, transport: Transport, knowledge: Knowledge, staging: Staging) -> None:
        self._transport = transport
        self._knowledge = knowledge
        self._staging = staging
        self._admitted = transport.gate.admitted
        self._feeds = Feeds(transport.gate, staging)

        # Whether a blob could not be written to disk. No later blob of this run is staged there
        # then.
        self._has_disk_failed = False

        # By target repository, the first upload of the run. The others wait for it.
        self._first_starts = dict[RepositoryKey, _FirstStart]()

        # By area (RepositoryKey.area), the test whether probing POSTs can replace HEADs there.
        self._probe_tests = defaultdict[str, Once[None]](Once)
        # The areas where a HEAD has asked for a blob.
        self._searched_areas = set[str]()

        # By source repository and digest, the errors of the readings that returned wrong bytes.
        self._wrong_readings = defaultdict[tuple[RepositoryKey, str], list[WrongBytes]](list)

    async def copy_blob(
        self, step: Step, source: Repository, target: Repository, bytes_from: BytesFrom
    ) -> BlobResult:
        """Copy a blob from `source` to `target`, and return how it got there.

        Raises SyncError, with side and reference, if all attempts have failed.
        """
        blob = step.blob
        async with self._transport.pool.lease(target.host.origin) as lease:
            upload = target.begin_upload(blob, lease)
            relay = Relay(source, blob, self._transport)
            subscriber = None
            if bytes_from is BytesFrom.DISK:
                # Other targets need the blob too. If it cannot be staged, they share one reading.
                subscriber = self._feeds.subscribe(source.key, blob.digest)
                if self._has_disk_failed:
                    bytes_from = BytesFrom.SHARED
            job = _Job(step, target, relay, upload, bytes_from, subscriber)
            try:
                return await self._copy_with_retries(job)
            finally:
                self._unsubscribe(job)
                if job.is_retained:
                    self._staging.release(blob)
                if upload.session:
                    # The job has failed, and an open session takes memory at the registry. The time
                    # to wait for the answer is short. A cancelled run does not wait at all.
                    with anyio.move_on_after(self._transport.machine.timeouts.head):
                        await upload.cancel_upload()

    async def _copy_with_retries(self, job: _Job) -> BlobResult:
        """Make attempts until one succeeds (docs/design.md section 9).

        Raises SyncError if the job has failed for good.
        """
        upload = job.upload
        while True:
            upload.has_begun = False  # set when a body is sent from the first byte of the blob
            try:
                with self._transport.recovery.attempt(), redacting(job.target.host.secrets):
                    async with self._after_first_start(job.target.store_key):
                        return await self._attempt(job)
            except _AnswerLost as lost:
                error = lost.error
                await upload.lease.release()
                if await self._check_arrival(job):
                    upload.session = ""  # the registry closed it when the body was complete
                    return BlobResult.UPLOADED
            except SyncError as failure:
                # A failure to read the blob does not count as a failed attempt, as long as there is
                # another way to read it: the target has not refused anything.
                if await self._can_read_otherwise(job, failure):
                    continue
                error = failure

            pause = self._prepare_next_attempt(job, error)
            is_resumed = bool(upload.broken_session or upload.session)
            next_attempt = "it goes on" if is_resumed else "it begins again"
            self._transport.machine.log("debug", "retry", f"{error}; {next_attempt}")
            error.drop_frames()  # the frames hold buffers of the body
            await upload.lease.release()
            await self._transport.wait_to_retry(error, pause, can_repeat=job.can_test_host(error))

    async def _attempt(self, job: _Job) -> BlobResult:
        """Find the blob in its repository, mount it, or upload it. Nothing is repeated.

        If the body of an earlier attempt broke off, the upload continues there, provided that the
        target has kept the session. Raises _AnswerLost if a HEAD has to find out whether the blob
        has arrived.
        """
        upload = job.upload
        short_request = (Demand(job.target.host.key),)
        if upload.broken_session:
            async with self._admitted(short_request, job.rank):
                await upload.resume()  # sets `upload.session` and `upload.offset`
            job.renew_attempts()
        await self._test_probing(job)  # may open a session that the blob can use

        body = known_body(job.blob)
        if body is None and job.bytes_from is BytesFrom.SOURCE:
            # One permit at each side covers the POST, the GET and the PUT.
            return await self._stream_from_source(job)

        # Otherwise the POST is admitted by itself, and the PUT too. Between them the job may wait for
        # the staging of the blob or for other targets, and must not hold a permit meanwhile (I8).
        async with self._admitted(short_request, job.rank, upload.lease):
            result = await self._find_or_start(job)
        if result is not None:
            return result
        if body is not None:
            async with self._admitted_to_write(job):
                return await self._send_body(job, MemoryPieces(body, upload.offset))
        if job.bytes_from is BytesFrom.SHARED:
            return await self._send_shared(job)
        return await self._send_staged(job)

    async def _stream_from_source(self, job: _Job) -> BlobResult:
        """Make an attempt that sends the bytes to the target while it reads them from the source.

        Both ends are admitted in one step, because a job that held one permit could wait forever
        for the other. The memory for a chunk is reserved first, so that no job waits for memory
        while it holds a permit (I8).
        """
        upload = job.upload
        async with (
            self._staging.memory.reserving(job.chunk_size, job.rank),
            self._admitted((job.reading, job.writing), job.rank, upload.lease) as permit,
        ):
            result = await self._find_or_start(job)
            if result is not None:
                return result

            # The blob is absent, so a GET and a PUT follow. Extend the permit by the share that
            # they take of the rate limits of both registries.
            self._replace_relay_after_wrong_bytes(job)
            get = job.relay.source.demand_of_reading()
            put = job.target.demand_of_writing()
            await self._transport.gate.reserve(permit, get, put, lease=upload.lease)
            self._staging.make_room_for_chunks()
            if upload.hash is not None:  # an earlier run has sent the first bytes
                job.relay.continue_from(upload.offset, upload.hash)
            async with job.relay.opened(upload.offset):
                try:
                    return await self._send_body(job, job.relay)
                except SyncError as error:
                    self._retain_for_next_attempt(job, error)
                    raise

    def _retain_for_next_attempt(self, job: _Job, error: SyncError) -> None:
        """Let the next attempt send a small blob from memory, so that its source is not read again."""
        if job.relay.source.is_local or job.blob.size > SMALL_BLOB:
            return
        body = job.relay.whole_body()
        if body is not None:
            job.is_retained = self._staging.retain(job.blob, body)
        else:
            # A registry may answer 429 several times before the body has been read to its end. The
            # next attempt reads the whole blob into memory before it sends the first byte.
            job.is_retained = isinstance(error, RegistryError) and error.status == 429
        if job.is_retained:
            job.bytes_from = BytesFrom.MEMORY

    async def _send_staged(self, job: _Job) -> BlobResult:
        """Send a blob from staging. The first job that needs the blob reads it from its source."""
        read = partial(self._read_into_staging, job)
        may_use_disk = job.bytes_from is BytesFrom.DISK
        while True:
            async with (
                self._staging.ensuring_staged(job.blob, read, may_use_disk=may_use_disk),
                self._admitted_to_write(job),
            ):
                self._unsubscribe(job)
                with self._staging.opened(job.blob, job.upload.offset) as body:
                    if body is None:
                        continue  # the blob was evicted meanwhile: read it again
                    return await self._send_body(job, body)

    def _admitted_to_write(self, job: _Job) -> AbstractAsyncContextManager[object]:
        """Return a context manager that holds a permit to write a body in memory or on disk."""
        writing = job.writing._replace(meters=job.target.demand_of_writing().meters)
        return self._admitted((writing,), job.rank, job.upload.lease)

    async def _read_into_staging(self, job: _Job, sink: Sink) -> None:
        """Read the blob from its source, and pass each piece to `sink`."""
        self._unsubscribe(job)
        self._replace_relay_after_wrong_bytes(job)
        offset = 0

        async def read_rest() -> None:
            # An outage interrupts the reading. The next call continues at `offset`.
            nonlocal offset
            async with self._admitted((job.reading,), job.rank), job.relay.opened(offset):
                while not job.relay.complete:
                    piece = await job.relay.next()
                    await sink(piece)
                    offset += len(piece)

        await self._transport.recovery.retry_over_outages(read_rest)

    async def _send_shared(self, job: _Job) -> BlobResult:
        """Send a blob that is not staged from a reading that it shares with other targets."""
        assert job.subscriber is not None
        self._replace_relay_after_wrong_bytes(job)
        part = Part(
            relay=job.relay,
            offset=job.upload.offset,
            reading=job.reading._replace(meters=job.relay.source.demand_of_reading().meters),
            writing=job.writing._replace(meters=job.target.demand_of_writing().meters),
            chunk_size=job.chunk_size,
            rank=job.rank,
            lease=job.upload.lease,
            secrets=job.target.host.secrets,
            send=partial(self._send_body, job),
        )
        return await self._feeds.send(job.subscriber, part)

    def _unsubscribe(self, job: _Job) -> None:
        """Remove the job from shared readings, so that no reading waits for it."""
        if job.subscriber is not None:
            self._feeds.unsubscribe(job.subscriber)

    # Before the body: find the blob, mount it, or open a session.

    @asynccontextmanager
    async def _after_first_start(self, where: RepositoryKey) -> AsyncIterator[None]:
        """Run an attempt after the first upload to its repository was accepted or has failed.

        So no blob is read for a repository that refuses every upload (docs/design.md section 6,
        rule 14). In this case the error of the first attempt is raised for every other attempt. The
        attempts hold no permit while they wait. They do not wait for a second attempt: if the
        target does not answer, each blob would wait for another time-out.
        """
        first_start = self._first_starts.get(where)
        if first_start is None:  # this attempt is the first
            first_start = self._first_starts[where] = _FirstStart()
        else:
            await first_start.decided.wait()
        if first_start.refusal is not None:
            raise first_start.refusal.copy_without_context()
        try:
            yield
        finally:
            first_start.decided.set()

    async def _find_or_start(self, job: _Job) -> BlobResult | None:
        """Find the blob at the target, mount it, or open a session for its bytes.

        Returns how the blob got to the target, or None if a session is open, so that the bytes have
        to be sent. Also records whether the repository accepts uploads (`_FirstStart`).
        """
        first_start = self._first_starts[job.target.store_key]  # added by `_after_first_start`
        # If a session of an earlier attempt is open, that attempt has looked for the blob.
        has_looked = bool(job.upload.session) and not job.has_probe_session
        try:
            if has_looked:
                result = None
            elif job.may_have_arrived:  # the mount was refused before the body was sent
                result = await self._check_and_start(job)
            elif mount_from := self._choose_mount_source(job):
                result = await self._mount_or_start(job, mount_from)
            else:
                result = await self._check_and_start(job)
        except SyncError as error:
            if job.upload.is_start_refused and not first_start.is_accepted:
                # The repository refuses every upload. `_after_first_start` raises this error for
                # all other blobs.
                first_start.refusal = error.copy_without_context()
            raise
        first_start.is_accepted = True
        first_start.decided.set()
        return result

    def _choose_mount_source(self, job: _Job) -> str | None:
        """Return the repository to mount from, or None if the blob has to be uploaded."""
        if not job.may_mount:
            return None
        if job.chosen_mount is not None:
            return job.chosen_mount
        return self._knowledge.mount_source(job.target.store_key, job.blob.digest)

    async def _mount_or_start(self, job: _Job, mount_from: str) -> BlobResult | None:
        """Mount the blob from another repository of the host, or open a session for its bytes.

        A registry that refuses the mount opens a session in the same answer (docs/design.md
        section 6, rule 10). Returns MOUNTED if the registry has mounted the blob, PRESENT if the
        mount was refused and a HEAD shows that the target has the blob, and None otherwise.
        """
        digest = job.blob.digest
        host = job.target.host.key
        is_mounted = await job.upload.start(mount_from)
        if is_mounted:
            self._knowledge.record_mount(host)
            return BlobResult.MOUNTED

        holder = RepositoryKey(host, mount_from)
        is_confirmed = self._knowledge.is_confirmed(holder, digest)
        is_first = self._knowledge.supports_mounts(host) is None
        if is_confirmed and is_first and job.target.host.registry.kind == "ecr":
            self._transport.machine.log("info", "mount", f"{host}: {_ECR_MOUNTS}")
        self._knowledge.record_refused_mount(
            job.target.store_key, mount_from, is_source_confirmed=is_confirmed
        )
        if is_confirmed:
            # An answer of this run has shown that `holder` has the blob, so the state is right and
            # the host has refused the mount for another reason.
            return None

        # Only an earlier run believed that `holder` has the blob, perhaps wrongly. The state of the
        # target may be wrong as well, so ask the target by HEAD (docs/specification.md section 7).
        self._knowledge.forget(holder, digest)
        return BlobResult.PRESENT if await job.target.has_blob(job.blob) else None

    async def _check_and_start(self, job: _Job) -> BlobResult | None:
        """Find the blob at the target, or open a session for it. Returns PRESENT if the target has
        the blob, BELIEVED if only the answer to a probe says so, and None if a session is open.

        A probe is a POST that asks the target to mount the blob from the repository that it is
        uploaded to. It is answered by 201 if the blob is present. If the blob is absent, the answer
        is 202 and opens a session. Where these answers can be relied on, a probe takes the place of
        a HEAD and a POST (docs/design.md section 6, rule 11).
        """
        target = job.target
        where = target.store_key
        can_probe = target.probe_from is not None
        is_unsure = job.may_have_arrived or self._knowledge.needs_head(where, job.blob.digest)
        needs_head = is_unsure or not can_probe
        if needs_head:
            self._searched_areas.add(where.area)
            if await self._head_blob(job):
                return BlobResult.PRESENT
        if job.has_probe_session:
            # `_test_probing` has opened this session. The blob is absent, so it is sent there.
            job.has_probe_session = False
            return None
        if can_probe and self._knowledge.probe_answers(where).are_useful:
            return await self._start_by_probe(job, is_absent=needs_head)

        # A registry opens a session. A layout may have got the blob from another task meanwhile.
        is_present = await job.upload.start()
        return BlobResult.PRESENT if is_present else None

    async def _start_by_probe(self, job: _Job, *, is_absent: bool) -> BlobResult | None:
        """Find the blob or open a session by a probe, and record how the registry answers probes.

        `is_absent` means that a HEAD has just found the blob absent. Returns a result like
        `_check_and_start`.
        """
        target = job.target
        where = target.store_key
        answers = self._knowledge.probe_answers(where)
        is_201 = await job.upload.start(target.probe_from)
        if job.upload.has_mount_failed:  # a plain POST has opened the session
            if job.upload.is_mount_refused:  # any other probe would be refused as well
                self._knowledge.record_probe_answer(where, is_201_if_present=False)
            return None
        if not is_201:
            if is_absent or answers.is_201_if_present:
                self._knowledge.record_probe_answer(where, is_202_if_absent=True)
            return None
        if answers.is_202_if_absent and not is_absent:
            return BlobResult.BELIEVED

        # The registry may answer 201 whether the blob is present or not.
        if await target.has_blob(job.blob):
            self._knowledge.record_probe_answer(where, is_201_if_present=True)
            return BlobResult.PRESENT
        self._knowledge.record_probe_answer(where, is_202_if_absent=False)
        await job.upload.start()  # the 201 has opened no session
        return None

    async def _test_probing(self, job: _Job) -> None:
        """Find out whether the target's registry answers a probing POST for a present blob by 201.

        If it does, such POSTs replace HEADs (docs/design.md section 6, rule 11). The test asks for
        a blob that is known to be present. It is made once in an area, which is a host and the
        first part of the repository's name. Other jobs wait for its answer without a permit.
        """
        target = job.target
        where = target.store_key
        is_answer_known = self._knowledge.probe_answers(where).is_201_if_present is not None
        if is_answer_known or target.probe_from is None:
            return
        # The test is worth a POST only if this blob, and at least one more, would need a HEAD.
        if job.upload.session or not self._knowledge.needs_head(where, job.blob.digest):
            return
        if self._choose_mount_source(job):
            return
        if job.claims.own_blob_count < 2 and where.area not in self._searched_areas:
            return
        present_digest = self._choose_present_blob(job)
        if present_digest is not None:
            ask = partial(self._probe_present_blob, job, present_digest, target.probe_from)
            await self._probe_tests[where.area].get(ask)

    def _choose_present_blob(self, job: _Job) -> str | None:
        """Choose a blob that the target is known to have, if possible one of the same image.

        Returns its digest, or None if no such blob is known.
        """
        where = job.target.store_key
        for digest in job.claims.blobs:
            if digest != job.blob.digest and self._knowledge.is_blob_believed(where, digest):
                return digest
        return self._knowledge.choose_present_blob(where)

    async def _probe_present_blob(self, job: _Job, present_digest: str, probe_from: str) -> None:
        """Ask the target to mount a present blob from itself, and record whether it answers 201.

        Any answer but 201 means that HEADs are needed to find present blobs. If the POST has opened
        a session, the job uses that session for its own blob.
        """
        where = job.target.store_key
        try:
            async with self._admitted((Demand(job.target.host.key),), job.rank, job.upload.lease):
                is_present = await job.upload.try_mount(present_digest, probe_from)
        except SyncError:
            # After any other error `_test_probing` does not ask again in this run.
            if job.upload.is_mount_refused:
                self._knowledge.record_probe_answer(where, is_201_if_present=False)
        else:
            self._knowledge.record_probe_answer(where, is_201_if_present=is_present)
            job.has_probe_session = not is_present

    async def _head_blob(self, job: _Job) -> bool:
        """Ask the target by HEAD whether it has the blob, unless it is already known to be absent."""
        if not job.is_known_absent:
            job.is_known_absent = not await job.target.has_blob(job.blob)
            if job.is_known_absent:
                self._knowledge.record_absent_blob(job.target.store_key, job.blob.digest)
        return not job.is_known_absent

    # The body.

    async def _send_body(self, job: _Job, body: Body) -> BlobResult:
        """Send the blob, or the part that the target lacks, to the open session.

        Raises _AnswerLost if all bytes were sent and the answer does not show that they have
        arrived.
        """
        upload = job.upload
        upload.style = self._style_for(job)
        try:
            closing_body = await self._send_by_patches(job, body)
            with _detecting_lost_answer(closing_body):
                if await upload.send(closing_body):
                    return BlobResult.UPLOADED
        except RegistryError as error:
            # A session that was resumed, or that chunks were sent to, has bytes already.
            had_earlier_bytes = upload.offset > 0 and upload.style != "patch"
            if not had_earlier_bytes or error.retryable or error.status in (401, 403):
                raise  # a failed login or a busy registry does not mean that the session is lost
            # The session holds a different number of bytes than the registry reported. The blob is
            # sent from its first byte, and no later upload to this host resumes a broken session.
            job.target.host.can_resume = False
            upload.session = ""
            message = f"the rest of a broken upload was refused: {error.message}"
            raise Disconnected(message) from error
        raise _AnswerLost(WireError("the registry answered before the blob was sent"))

    async def _send_by_patches(self, job: _Job, body: Body) -> Body:
        """Send the body by PATCH if the upload style is "patch" or "chunks".

        Returns the body of the PUT that closes the session. It is empty after a PATCH, and
        otherwise the whole blob.
        """
        if job.upload.style == "patch":  # one PATCH for the whole body
            await self._send_part(job, body)
            return MemoryPieces(b"")
        if job.upload.style == "chunks":
            assert not isinstance(body, MemoryPieces)  # no body in memory exceeds `put_limit`
            await self._send_in_chunks(job, body)
            return MemoryPieces(b"")

        # A registry with a limit for PUT gets a smaller blob in one PUT. Like a chunk, the blob is
        # read into memory and verified before its first byte is sent (docs/design.md section 9).
        if isinstance(body, Relay | FeedBody) and job.target.dialect.put_limit:
            buffer = bytearray(job.blob.size - job.upload.offset)
            return MemoryPieces(await body.read_until(job.blob.size, buffer))
        return body

    def _style_for(self, job: _Job) -> UploadStyle:
        """Return the upload style for the job: one PUT, one PATCH, or one PATCH for each chunk.

        Each kind of registry has a usual style. If the registry has refused uploads of this size
        (`_switch_style`), the kind's fallback style is used.
        """
        dialect = job.target.dialect
        size = job.blob.size
        if dialect.put_limit and size > dialect.put_limit:
            return "chunks"
        fallback_size = self._knowledge.fallback_size(job.target.host.key)
        is_fallback_due = fallback_size is not None and size >= fallback_size
        if dialect.fallback_style and is_fallback_due:
            return dialect.fallback_style
        return dialect.upload_style

    async def _send_in_chunks(self, job: _Job, body: Relay | FeedBody | FilePieces) -> None:
        """Send the body with one PATCH for each chunk (docs/specification.md section 8.2).

        A chunk that breaks is sent again from the offset that the target reports. For that, bytes
        from the source are held in memory. A staged file is read again.
        """
        # All chunks from the source use this memory, one after the other.
        buffer = bytearray(0 if isinstance(body, FilePieces) else job.chunk_size)
        chunk_from: Callable[[int], MemoryPieces | FilePieces]
        for start in range(job.upload.offset, job.blob.size, job.chunk_size):
            end = min(start + job.chunk_size, job.blob.size)
            if isinstance(body, FilePieces):
                chunk_from = partial(body.part, end=end)
            else:
                chunk = await body.read_until(end, buffer)
                chunk_from = partial(body.chunk_body, chunk, start)
            await self._send_chunk(job, chunk_from)

    async def _send_chunk(
        self, job: _Job, chunk_from: Callable[[int], MemoryPieces | FilePieces]
    ) -> None:
        """Send one chunk by PATCH. After a failure, send again what has not arrived.

        `chunk_from(offset)` returns the bytes of the chunk from byte `offset` of the blob.
        """
        upload = job.upload
        while True:
            try:
                if upload.broken_session:
                    await upload.resume()
                if not upload.session:
                    raise Disconnected("the registry has forgotten the upload")
                await self._send_part(job, chunk_from(upload.offset))
                return
            except SyncError as error:
                await self._pause_before_chunk(job, error)

    async def _send_part(self, job: _Job, part: Body) -> None:
        """Send a part by PATCH, unless it is empty."""
        if part.length and not await job.upload.send(part, is_last=False):
            raise Disconnected("the registry answered before what was sent had arrived")
        job.retries = RetryBudget(ATTEMPTS)  # each part has all attempts

    async def _pause_before_chunk(self, job: _Job, error: SyncError) -> None:
        """Wait before a chunk is sent again, or raise `error` to leave it to the next attempt.

        That is done if the session is gone, if a host is in an outage, or if the pause would be
        long: the job holds the permits of both ends meanwhile.
        """
        upload = job.upload
        if _is_session_gone(error):
            upload.session = ""
        if not upload.session or error.unreachable_peer is not None:
            raise error
        # `pause_after` raises `error` if it is permanent or if no attempt is left.
        pause = self._transport.pause_after(error, job.retries, job.target.host)
        retry_after = (error.retry_after or 0.0) if isinstance(error, RegistryError) else 0.0
        is_too_long = max(pause, retry_after) > SOURCE_GRACE
        if is_too_long:
            raise error
        self._transport.machine.log("debug", "retry", f"{error}; the chunk goes again")
        await anyio.sleep(pause)

    # After a failure.

    async def _check_arrival(self, job: _Job) -> bool:
        """Ask by HEAD, up to three times, whether a blob whose answer was lost has arrived."""
        ask = partial(job.target.has_blob, job.blob)
        job.is_known_absent = False  # what an earlier HEAD has shown may have changed
        job.may_have_arrived = True
        for pause in _LOST_ANSWER_PAUSES:
            await anyio.sleep(pause)
            try:
                has_arrived = await self._transport.recovery.retry_over_outages(ask)
            except SyncError as error:
                if not error.retryable:
                    raise
                continue  # the registry has just lost an answer, and may still be failing
            job.is_known_absent = not has_arrived
            job.may_have_arrived = False
            if has_arrived:
                return True
        return False

    async def _can_read_otherwise(self, job: _Job, error: SyncError) -> bool:
        """If another way to read the blob is left after this error, prepare it, and return True."""
        if isinstance(error, StagingFailed):
            self._stop_staging(job, error)
            return True
        if isinstance(error, LeftBehind):
            await self._leave_shared_reading(job, error)
            return True
        return isinstance(error, WrongBytes) and await self._prepare_second_reading(job, error)

    def _stop_staging(self, job: _Job, error: StagingFailed) -> None:
        """Let the next attempt read the blob from its source, and log why it was not staged.

        No image fails for this reason: the targets share one reading (docs/design.md section 8).
        """
        is_shared = job.bytes_from is BytesFrom.DISK
        job.bytes_from = BytesFrom.SHARED if is_shared else BytesFrom.SOURCE
        # Do not resume the session: its bytes came from a file that may have been changed.
        job.upload.broken_session = ""
        is_first_disk_failure = not self._has_disk_failed and not isinstance(error, NoRoom)
        if is_first_disk_failure:
            self._has_disk_failed = True
        level = "warning" if is_first_disk_failure else "debug"
        text = f"{error}; the targets share one download instead, at the pace of the slowest"
        self._transport.machine.log(level, "staging", text)

    async def _leave_shared_reading(self, job: _Job, error: LeftBehind) -> None:
        """Let the next attempt read the blob by itself: its target was too slow for the others."""
        self._transport.machine.log("debug", "retry", f"{job.target}: {error}")
        self._unsubscribe(job)
        job.bytes_from = BytesFrom.SOURCE
        await anyio.sleep(_LEFT_BEHIND_PAUSE)

    async def _prepare_second_reading(self, job: _Job, error: WrongBytes) -> bool:
        """Prepare to read a blob again from its first byte after its source returned wrong bytes.

        A cache between here and the source may have been wrong once. Returns False, and prepares
        nothing, if both readings of the blob were wrong, by this job or by another job.
        """
        upload = job.upload
        wrong_readings = self._wrong_readings[job.relay.source.key, job.blob.digest]
        # Jobs of several targets may make the first reading at the same time. It counts once.
        is_second_reading = job.relay.uses_fresh_connections
        if not wrong_readings or is_second_reading:
            wrong_readings.append(error)
        if len(wrong_readings) > 1:
            return False
        self._transport.machine.log("debug", "retry", f"{error}; it is read once more")
        error.drop_frames()  # the frames hold buffers of the body

        await upload.lease.release()
        if upload.session and (upload.has_begun or upload.offset):
            await upload.cancel_upload()  # the session holds some of the wrong bytes
        upload.broken_session = ""
        return True

    def _replace_relay_after_wrong_bytes(self, job: _Job) -> None:
        """If the source has returned wrong bytes, read the blob over a fresh connection.

        Raises the error of the second reading if that reading was wrong too.
        """
        wrong_readings = self._wrong_readings.get((job.relay.source.key, job.blob.digest), [])
        if len(wrong_readings) > 1:
            raise copy_error(wrong_readings[-1])
        if wrong_readings and not job.relay.uses_fresh_connections:
            source = job.relay.source
            job.relay = Relay(source, job.blob, self._transport, uses_fresh_connections=True)

    def _prepare_next_attempt(self, job: _Job, error: SyncError) -> float:
        """Record a failed attempt, and return the seconds to wait before the next attempt.

        Raises `error` if there is no next attempt.
        """
        target = job.target
        error.add_context(Side.TARGET, "push blob", target.name_of(job.blob.digest))
        error.message = target.host.redact(error.message)

        job.record_failure(error)
        if self._switch_style(job, error):
            pause = 0.0
        else:
            # `pause_after` raises `error` if it is permanent or if no attempt is left.
            hosts = (job.relay.source.host, target.host)
            pause = self._transport.pause_after(error, job.retries, *hosts)
        if job.broken_bodies == _BLOB_STARTS:
            raise error
        return pause

    def _switch_style(self, job: _Job, error: SyncError) -> bool:
        """Switch between the usual and the fallback upload style if the error requires it.

        The switch is recorded for all later uploads to the host. Returns whether the style was
        switched. A job switches once.
        """
        upload = job.upload
        fallback_style = job.target.dialect.fallback_style
        if fallback_style is None or job.has_switched_style or not upload.has_begun:
            return False
        refused_size = _refused_size(job, error)
        if refused_size is None:
            return False

        # From this size on, blobs are sent to the host in the fallback style. None: no blob is.
        host = job.target.host.key
        old_size = self._knowledge.fallback_size(host)
        new_size: int | None = refused_size if old_size is None else min(old_size, refused_size)
        if upload.style == fallback_style:
            new_size = None  # the fallback style has just failed
        self._knowledge.record_fallback_size(host, new_size)
        job.has_switched_style = True
        upload.broken_session = ""  # the blob is sent from its first byte
        return True

    # Manifests.

    async def put_manifests(
        self, image: Image, own_manifests: frozenset[str], on_put: Callable[[Manifest], None]
    ) -> None:
        """Put the children in `own_manifests`, each before its index, and then the root (I2).

        `own_manifests` has digests. `on_put` is called with each child after the child was put.
        """

        async def put_child(child: Manifest) -> None:
            await image.target.put_child(child)
            on_put(child)

        for level in image.tree.levels(own_manifests):
            await gather(partial(put_child, child) for child in level)

        full_name = image.source.full_name(image.source_reference)
        await image.target.put_manifest(image.reference, image.tree.root, full_name=full_name)


def known_body(blob: Descriptor) -> bytes | None:
    """Return the bytes of a blob that needs no request to its source.

    Such a blob is embedded in its descriptor, is empty, or is the empty JSON object
    (docs/design.md section 6, rule 13). Returns None for any other blob.
    """
    algorithm, encoded = split_digest(blob.digest)
    for body in (blob.data, b"{}", b""):
        if body is not None and len(body) == blob.size and hash_hex(algorithm, body) == encoded:
            return body
    return None


def _refused_size(job: _Job, error: SyncError) -> int | None:
    """Return from which size on the registry seems to refuse blobs in the style of an upload.

    Returns None if the error has nothing to do with the style (docs/protocol-facts.md section 7.9).
    """
    if _is_session_gone(error):
        return None
    if _is_style_refused(error):
        return 0
    is_too_large = isinstance(error, RegistryError) and error.status in _TOO_LARGE_STATUSES
    is_broken = isinstance(error, Disconnected) and error.side is Side.TARGET
    is_last_attempt = job.broken_bodies == _BLOB_STARTS - 1
    if is_too_large or (is_broken and is_last_attempt):
        return job.blob.size
    return None


def _is_session_gone(error: SyncError) -> bool:
    return isinstance(error, RegistryError) and error.is_session_gone


def _is_style_refused(error: SyncError) -> bool:
    """Report whether a registry refuses an upload style for bodies of any size."""
    if not isinstance(error, RegistryError):
        return False
    has_code = not _UNSUPPORTED_CODES.isdisjoint(error.codes)
    return error.status in _UNSUPPORTED_STATUSES or (error.status == 400 and has_code)
