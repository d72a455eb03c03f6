"""Copy one blob to one repository, and put the manifests of an image.

Owns: how a blob comes to its repository (it is there already, is mounted, or is uploaded from its
    source, from memory or from disk), its repetition, the check whether it has arrived when the
    answer was lost; the order of manifests.
May not know: which image is next, or why a blob is wanted.
Invariants: children are put before their index, the root last (I2); a body that cannot be replayed
    is repeated here and nowhere below (I7); both ends of a transfer are admitted in one step, and
    nobody waits while holding a permit (I8).
Follows: docs/design.md section 6 (rules 10 to 14 and 16) and section 9.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from functools import partial
from typing import Literal

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
from _regsync.state.archive import RepositoryKey
from _regsync.state.knowledge import Knowledge
from _regsync.sync.claims import Step
from _regsync.sync.feed import FeedBody, Feeds, LeftBehind, Needs, Subscriber, copy_error
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

# How often the body of a blob is begun (docs/design.md section 6, rule 16).
_BLOB_STARTS = 3

# Seconds before each HEAD for a blob whose upload got no answer (the same rule).
_LOST_ANSWER_PAUSES = (0.0, 1.0, 3.0)

# Seconds until a target that was left behind is served: it has to notice first that its request has
# ended, or it would refuse to go on with it.
_LEFT_BEHIND_PAUSE = 5.0

# How registries refuse a way to upload (docs/protocol-facts.md section 7.9): by one of these
# statuses, or by 400 with one of these codes.
_UNSUPPORTED_STATUSES = (405, 411, 501)
_UNSUPPORTED_CODES = {"UNSUPPORTED", "BLOB_UPLOAD_INVALID"}

# How they refuse a body for its size (the same section).
_TOO_LARGE_STATUSES = (413, 416)

# Where a blob is kept for other repositories that need it: on disk (a small one in memory while
# there is room), in memory only, or nowhere.
StageIn = Literal["disk", "memory"] | None

Body = Relay | FeedBody | MemoryPieces | FilePieces


class _AnswerLost(SyncError):
    """Only a HEAD can tell whether a blob has arrived: the answer to its whole body was lost, or a
    success came before its last byte was sent (rule 16).

    `error` is raised when the blob has not arrived.
    """

    def __init__(self, error: SyncError) -> None:
        super().__init__(error.message)
        self.error = error


@contextmanager
def _noticing_a_lost_answer(body: Body) -> Iterator[None]:
    """Raise _AnswerLost in place of an error after which all of `body` may have arrived."""
    try:
        yield
    except (WireError, RegistryError) as error:
        says_nothing = isinstance(error, WireError) or error.status >= 500
        if body.complete and says_nothing and error.side is not Side.SOURCE:
            raise _AnswerLost(error) from error
        raise


class _FirstStart:
    """How the first attempt to upload to a repository went (rule 14)."""

    def __init__(self) -> None:
        # Set when that attempt's start was accepted or has failed; the other uploads wait for it.
        self.is_over = anyio.Event()
        # Whether the repository has accepted the start of any upload in this run.
        self.is_accepted = False
        # Set when the repository refuses every upload.
        self.refusal: SyncError | None = None


class _Job:
    """One blob on its way to one repository, over all attempts."""

    def __init__(
        self,
        step: Step,
        target: Repository,
        relay: Relay,
        upload: BlobUpload,
        stage_in: StageIn,
        subscriber: Subscriber | None,
    ) -> None:
        self.blob = step.blob
        self.claims = step.claims
        # The lowest rank is admitted first: blobs of the image that was promoted first.
        self.rank = float(step.claims.order)
        self.relay = relay
        self.upload = upload
        self.target = target
        self.stage_in = stage_in
        # This copy's part in one reading of the source that several targets share (`feed`). It is used
        # where the blob is not kept. None: this copy reads the source by itself.
        self.subscriber = subscriber

        # The repository to mount from, by the scheduler's choice. None: it has chosen none, and any
        # repository is taken that is known to hold the blob when an attempt begins.
        self.chosen_mount = step.mount_from
        # False after a failure that may be the mount's: the blob is uploaded then.
        self.may_mount = True
        # Whether an attempt has failed before. A first failure may come from a host that is going
        # away rather than from the mount, so the mount is tried once more after it.
        self.has_failed_before = False

        # Whether a HEAD has shown that the target lacks the blob.
        self.is_absent = False
        # Whether the open session came from the POST that asked for another blob
        # (`_learn_to_probe`). It takes this blob, but a HEAD for this blob has to come first.
        self.has_probe_session = False
        # Whether this copy has changed its way to upload, which it does once (`_switch_style`).
        self.has_switched_style = False

        # Whether its bytes are in memory for its next attempt alone.
        self.is_held = False

        # Bodies that broke off, since attempts were last counted from 0.
        self.broken_bodies = 0
        self.retries = RetryBudget(ATTEMPTS)
        # A large upload may meet many outages (`renew_attempts`): whether one has broken its body since
        # then, and how many bytes the target has to have before attempts are renewed again.
        self.has_met_outage = False
        self.renew_attempts_at = LARGE_BODY

        # Bytes of memory for one chunk; 0 where the registry takes bodies of any size.
        self.chunk_size = min(step.blob.size, target.product.put_limit or 0)

        # What a permit for its body has to cover, at the source and at the target.
        is_large = step.blob.size >= LARGE_BODY
        self.reading = Demand(relay.source.host.key, "read", is_large)
        self.writing = Demand(self.target.host.key, "write", is_large)

    def can_probe(self, error: SyncError) -> bool:
        """Say whether the attempt after an error may be the one that shows whether a registry which is
        away has come back; all others wait for that one.
        """
        if error.unreachable_peer is self.target.host.peer:
            # A body cannot be the probe, because it is sent once; what comes before a body can.
            return not self.upload.session or bool(self.upload.broken_session)
        # Nor can a shared reading: it waits for the other targets, who wait for the source too.
        return self.subscriber is None or self.stage_in is not None

    def renew_attempts(self) -> None:
        """Count attempts from 0 again, if the session that goes on now was broken by an outage: the
        upload itself had not failed. It has to have moved since the last time, or it would never end.
        """
        if self.has_met_outage and self.upload.offset >= self.renew_attempts_at:
            self.has_met_outage = False
            self.renew_attempts_at = self.upload.offset + LARGE_BODY
            self.retries = RetryBudget(ATTEMPTS)
            self.broken_bodies = 0


class BlobTransfer:
    """Copies blobs and manifests to their repositories, and notes in `knowledge` what it learns.

    How a blob is copied:

        _retry            attempt it, and after a failure attempt it again
        _attempt          one attempt, from whichever place its bytes come
        _find_or_start    is it at the target, can it be mounted? else open a session
        _send             send the bytes to the session
    """

    def __init__(self, transport: Transport, knowledge: Knowledge, staging: Staging) -> None:
        self._transport = transport
        self._knowledge = knowledge
        self._staging = staging
        self._admitted = transport.gate.admitted
        self._feeds = Feeds(transport.gate, staging)

        # False once a blob could not be staged: the disk is not tried again in this run.
        self._disk_works = True

        # By target, the first upload of the run, for which the others wait.
        self._first_starts = dict[RepositoryKey, _FirstStart]()

        # By area, the POST that asks for a blob which is known to be there. Its answer shows whether a
        # POST finds such blobs, so that no HEAD is needed (rule 11).
        self._probes = defaultdict[str, Once[None]](Once)

        # The areas where a blob was looked for by HEAD.
        self._searched = set[str]()

        # By source repository and digest, the errors of the readings that gave wrong bytes.
        self._wrong_readings = defaultdict[tuple[RepositoryKey, str], list[WrongBytes]](list)

    async def copy_blob(
        self, step: Step, source: Repository, target: Repository, stage_in: StageIn
    ) -> BlobResult:
        """Copy a blob from `source` to `target`. `keep` says where its bytes are kept for later uploads.

        Raises SyncError, with side and reference, when all attempts have failed.
        """
        blob = step.blob
        async with self._transport.pool.lease(target.host.origin) as lease:
            upload = target.begin_upload(blob, lease)
            relay = Relay(source, blob, self._transport)
            subscriber = None
            if stage_in == "disk":
                # Other targets need the blob too. If it cannot be staged, all share one reading.
                subscriber = self._feeds.subscribe(source.key, blob.digest, blob.size)
            if not self._disk_works:
                stage_in = None
            job = _Job(step, target, relay, upload, stage_in, subscriber)
            try:
                return await self._retry(job)
            finally:
                self._unsubscribe(job)
                if job.is_held:
                    self._staging.release(blob)
                if upload.session:
                    # The copy has failed, and an open session costs the registry memory. Its answer
                    # is not waited for long; a run that is cancelled does not wait for it at all.
                    with anyio.move_on_after(self._transport.machine.timeouts.head):
                        await upload.cancel_upload()

    async def _retry(self, job: _Job) -> BlobResult:
        """Attempt a copy until it succeeds or fails for good (docs/design.md section 9)."""
        upload = job.upload
        while True:
            upload.has_begun = False
            try:
                with self._transport.recovery.attempt(), redacting(job.target.host.secrets):
                    async with self._after_first_start(job.target.pool):
                        return await self._attempt(job)
            except _AnswerLost as lost:
                error = lost.error
                await upload.lease.settle()
                if await self._has_arrived(job):
                    upload.session = ""  # it ended with the body
                    return BlobResult.UPLOADED
            except StagingFailed as failure:
                self._note_staging_failure(failure)
                job.stage_in = None  # from now on the blob comes from its source
                # The bytes in the session came from a file that may have been changed.
                upload.broken_session = ""
                continue
            except LeftBehind as failure:
                # The targets that share a reading went on without this one.
                self._transport.machine.log("debug", "retry", f"{job.target}: {failure}")
                self._unsubscribe(job)
                job.subscriber = None
                await anyio.sleep(_LEFT_BEHIND_PAUSE)
                continue
            except WrongBytes as failure:
                if await self._prepare_second_reading(job, failure):
                    continue
                error = failure
            except SyncError as failure:
                error = failure

            pause = self._pause_before_next(job, error)
            is_resumed = upload.broken_session or upload.session
            next_attempt = "it goes on" if is_resumed else "it begins again"
            self._transport.machine.log("debug", "retry", f"{error}; {next_attempt}")
            error.drop_frames()  # its frames hold a part of the blob
            await upload.lease.settle()
            await self._transport.rest(error, pause, can_repeat=job.can_probe(error))

    async def _attempt(self, job: _Job) -> BlobResult:
        """Find the blob in its repository, mount it there, or upload it; nothing is repeated.

        An upload goes on from what a broken body left at the target. Its bytes come from one of four
        places: from the descriptor (`known_body`), straight from the source (`_stream`), from one
        reading that several targets share (`_send_shared`), or from memory or disk, where they are
        kept for others (`_send_staged`). Raises _AnswerLost where only a HEAD can tell whether they
        have arrived.
        """
        upload = job.upload
        short_request = (Demand(job.target.host.key),)
        if upload.broken_session:
            async with self._admitted(short_request, job.rank):
                await upload.resume()
            job.renew_attempts()
        await self._learn_to_probe(job)

        body = known_body(job.blob)
        if body is None and job.stage_in is None and job.subscriber is None:
            # One permit of each side covers the POST, the GET and the PUT.
            return await self._stream(job)

        # The others wait for something between POST and PUT, and hold no permit meanwhile (I8).
        async with self._admitted(short_request, job.rank, upload.lease):
            result = await self._find_or_start(job)
        if result is not None:
            return result
        if body is not None:
            async with self._admitted_to_write(job):
                return await self._send(job, MemoryPieces(body, upload.offset))
        if job.stage_in is None and job.subscriber is not None:
            return await self._send_shared(job, job.subscriber)
        return await self._send_staged(job)

    async def _stream(self, job: _Job) -> BlobResult:
        """Make an attempt whose bytes go from the source straight to the target.

        Both ends are admitted in one step: with one permit held, a wait for the other could be for
        ever (I8). So the memory for a chunk is reserved before.
        """
        upload = job.upload
        async with (
            self._staging.memory.reserving(job.chunk_size, job.rank),
            self._admitted((job.reading, job.writing), job.rank, upload.lease) as permit,
        ):
            result = await self._find_or_start(job)
            if result is not None:
                return result

            # The blob is absent, so a GET and a PUT follow. The permit is extended by their share of the
            # registries' rates.
            self._check_reading(job)
            get = job.relay.source.demand_of_reading()
            put = job.target.demand_of_writing()
            await self._transport.gate.reserve(permit, get, put, lease=upload.lease)
            self._staging.make_room_for_chunks()
            if upload.hash is not None:  # an earlier run has sent the first bytes
                job.relay.continue_from(upload.offset, upload.hash)
            async with job.relay.opened(upload.offset):
                try:
                    return await self._send(job, job.relay)
                except SyncError as error:
                    self._keep_for_next_attempt(job, error)
                    raise

    def _keep_for_next_attempt(self, job: _Job, error: SyncError) -> None:
        """Have the next attempt send a small blob from memory, because this one has failed: its source
        is not read again.
        """
        if job.relay.source.is_local or job.blob.size > SMALL_BLOB:
            return
        body = job.relay.whole_body()
        if body is not None:
            job.is_held = self._staging.retain(job.blob, body)
        else:
            # A limit may refuse again and again what had not even been read: it is read to its end once.
            job.is_held = isinstance(error, RegistryError) and error.status == 429
        if job.is_held:
            job.stage_in = "memory"

    async def _send_staged(self, job: _Job) -> BlobResult:
        """Send a blob that others need too; the first who needs it reads it from its source."""
        read = partial(self._read, job)
        on_disk = job.stage_in == "disk"
        while True:
            async with (
                self._staging.keeping(job.blob, read, disk=on_disk),
                self._admitted_to_write(job),
            ):
                self._unsubscribe(job)
                with self._staging.opened(job.blob, job.upload.offset) as body:
                    if body is None:
                        continue  # it had to make way for another blob meanwhile: it is read again
                    return await self._send(job, body)

    def _admitted_to_write(self, job: _Job) -> AbstractAsyncContextManager[object]:
        """Return a block that holds a permit of the target alone, for a body that is at hand."""
        put = job.target.demand_of_writing()
        writing = job.writing._replace(meters=put.meters)
        return self._admitted((writing,), job.rank, job.upload.lease)

    async def _read(self, job: _Job, sink: Sink) -> None:
        """Read the blob from its source into staging: `sink` takes each piece."""
        self._unsubscribe(job)
        self._check_reading(job)
        offset = 0

        async def read_on() -> None:
            """Read what is left, after an outage from where the blob broke off."""
            nonlocal offset
            async with self._admitted((job.reading,), job.rank), job.relay.opened(offset):
                while not job.relay.complete:
                    piece = await job.relay.next()
                    await sink(piece)
                    offset += len(piece)

        await self._transport.recovery.retry_over_outages(read_on)

    async def _send_shared(self, job: _Job, subscriber: Subscriber) -> BlobResult:
        """Send a blob that others need too and that is not kept, from one reading for all."""
        self._check_reading(job)
        get = job.relay.source.demand_of_reading()
        put = job.target.demand_of_writing()
        needs = Needs(
            relay=job.relay,
            offset=job.upload.offset,
            reading=job.reading._replace(meters=get.meters),
            writing=job.writing._replace(meters=put.meters),
            chunk=job.chunk_size,
            rank=job.rank,
            lease=job.upload.lease,
            secrets=job.target.host.secrets,
            send=partial(self._send, job),
        )
        return await self._feeds.send(subscriber, needs)

    def _unsubscribe(self, job: _Job) -> None:
        """Let no shared reading wait for a copy that has ended, or that is sent in another way."""
        if job.subscriber is not None:
            self._feeds.unsubscribe(job.subscriber)

    # The start: there already, mounted, or a session.

    @asynccontextmanager
    async def _after_first_start(self, where: RepositoryKey) -> AsyncIterator[None]:
        """Hold an attempt back until the repository's first one has shown whether it accepts
        uploads (rule 14): then no blob is read for a repository that accepts none.

        The others wait, without any permit, until that attempt has had its start accepted or has
        failed. They wait for one attempt only: a target that does not answer would take its
        time-out for every blob in turn. Raises the refusal that holds for every upload.
        """
        first = self._first_starts.get(where)
        if first is None:  # this attempt is the first
            first = self._first_starts[where] = _FirstStart()
        else:
            await first.is_over.wait()
        if first.refusal is not None:
            raise first.refusal.without_place()
        try:
            yield
        finally:
            first.is_over.set()

    async def _find_or_start(self, job: _Job) -> BlobResult | None:
        """Find the blob at the target or mount it; None when a session is open for its bytes."""
        result = None
        first = self._first_starts[job.target.pool]
        # An open session is left of an earlier attempt, which has looked for the blob.
        was_looked_for = bool(job.upload.session) and not job.has_probe_session
        try:
            if not was_looked_for:
                if mount_from := self._mount_from(job):
                    result = await self._mount_or_start(job, mount_from)
                else:
                    result = await self._check_and_start(job)
        except SyncError as error:
            if job.upload.is_start_refused and not first.is_accepted:
                # The repository refuses every upload: no other blob is tried (rule 14).
                first.refusal = error.without_place()
            raise
        first.is_accepted = True
        first.is_over.set()
        return result

    def _mount_from(self, job: _Job) -> str | None:
        """Return the repository to mount from; None when the blob has to be uploaded."""
        if not job.may_mount:
            return None
        if job.chosen_mount is not None:
            return job.chosen_mount
        return self._knowledge.mount_source(job.target.pool, job.blob.digest)

    async def _mount_or_start(self, job: _Job, mount_from: str) -> BlobResult | None:
        """Mount the blob from another repository of the host; None when it has to be sent. A registry
        that refuses to mount opens a session in the same answer, and the blob is sent in that one
        (rule 10).
        """
        digest = job.blob.digest
        host = job.target.host.key
        is_mounted = await job.upload.start(mount_from)
        if is_mounted:
            self._knowledge.record_mount(host)
            return BlobResult.MOUNTED

        self._knowledge.record_refused_mount(job.target.pool, mount_from)
        holder = RepositoryKey(host, mount_from)
        if self._knowledge.is_confirmed(holder, digest):
            # An answer of this run has shown the blob there, so the host refuses the mount itself.
            return None

        # An earlier run believed that the blob is there, perhaps wrongly. What it believed of this
        # target may be wrong as well, so a HEAD asks the target (docs/specification.md section 7).
        self._knowledge.forget(holder, digest)
        if await job.target.has_blob(job.blob):
            return BlobResult.PRESENT
        return None

    async def _check_and_start(self, job: _Job) -> BlobResult | None:
        """Find the blob at the target; None when it is absent, and a session is open for it.

        One probing POST can do both (rule 11). It asks to mount the blob from a repository that need
        not have it: a registry that looks into the target repository first answers 201 where the blob
        is there, else it opens a session by 202. Where the answers are not known to be true, a HEAD
        goes before.
        """
        target = job.target
        where = target.pool
        upload = job.upload
        probe_from = target.probe_from
        needs_head = probe_from is None or self._knowledge.needs_head(where, job.blob.digest)
        if needs_head:
            self._searched.add(where.area)
            if await self._is_present(job):
                return BlobResult.PRESENT
        if job.has_probe_session:
            job.has_probe_session = False  # the blob is absent, so the session is used for it
            return None

        answers = self._knowledge.probe_answers(where)
        if False in answers:
            probe_from = None  # this registry's answers say nothing: the POST only opens a session
        says_present = await upload.start(probe_from)
        if not says_present:
            # The blob is absent: a HEAD has shown that, or the registry is known to answer 201 for a
            # blob that it has. So its answer for an absent blob is known now.
            if probe_from is not None and (needs_head or answers.present):
                self._knowledge.record_probe_answer(where, absent=True)
            return None

        if answers.absent and not needs_head:
            # The registry answers 202 for absent blobs, so its 201 is believed.
            return BlobResult.BELIEVED
        if await target.has_blob(job.blob):
            self._knowledge.record_probe_answer(where, present=True)
            return BlobResult.PRESENT
        # It answers 201 for absent blobs too. That has opened no session.
        self._knowledge.record_probe_answer(where, absent=False)
        await upload.start()
        return None

    async def _learn_to_probe(self, job: _Job) -> None:
        """Learn whether a probing POST finds a blob that the repository holds (rule 11): then no later
        blob needs a HEAD.

        The POST asks for a blob that is known to be there. It is sent once an area, and only where
        two or more blobs would need a HEAD. Other copies wait for its answer without any permit.
        """
        target = job.target
        where = target.pool
        probe = self._probes[where.area]
        if probe.answer or job.upload.session or target.probe_from is None:
            return
        is_known = self._knowledge.probe_answers(where).present is not None
        if is_known or not self._knowledge.needs_head(where, job.blob.digest):
            return
        if self._mount_from(job):
            return  # this blob is mounted, so it needs no HEAD

        # For one blob alone the HEAD costs no more than the POST.
        is_one_of_several = job.claims.own_blobs > 1 or where.area in self._searched
        present = self._known_blob(job)
        if is_one_of_several and present is not None:
            await probe.get(partial(self._ask_for_known, job, present, target.probe_from))

    def _known_blob(self, job: _Job) -> str | None:
        """Return a blob that is known to be in the repository: first one of the same image."""
        where = job.target.pool
        for digest in job.claims.blobs:
            if digest != job.blob.digest and self._knowledge.is_blob_believed(where, digest):
                return digest
        return self._knowledge.choose_present_blob(where)

    async def _ask_for_known(self, job: _Job, present: str, probe_from: str) -> None:
        """Ask by POST for `present`, a blob that is known to be there. Any answer but 201 means that the
        registry does not look there, so that HEADs are needed. If the POST has opened a session, the
        copy uses it for its own blob.
        """
        where = job.target.pool
        try:
            async with self._admitted((Demand(job.target.host.key),), job.rank, job.upload.lease):
                is_present = await job.upload.try_mount(present, probe_from)
        except RegistryError as error:
            if not error.retryable:
                self._knowledge.record_probe_answer(where, present=False)
        except SyncError:
            pass  # nothing is learnt, and nobody asks again in this run
        else:
            self._knowledge.record_probe_answer(where, present=is_present)
            job.has_probe_session = not is_present

    async def _is_present(self, job: _Job) -> bool:
        """Ask whether the target has the blob, unless an earlier HEAD has shown that it has not."""
        if not job.is_absent:
            job.is_absent = not await job.target.has_blob(job.blob)
            if job.is_absent:
                self._knowledge.record_absent_blob(job.target.pool, job.blob.digest)
        return not job.is_absent

    # The body.

    async def _send(self, job: _Job, body: Body) -> BlobResult:
        """Send the blob, or what the target lacks of it, to the open session.

        Raises _AnswerLost where all of it was sent and the answer does not tell that it has arrived.
        """
        upload = job.upload
        upload.style = self._style_for(job)
        try:
            closing_body = await self._send_by_patches(job, body)
            with _noticing_a_lost_answer(closing_body):
                if await upload.send(closing_body):
                    return BlobResult.UPLOADED
        except RegistryError as error:
            is_refused_rest = upload.offset and upload.style != "patch"
            if not is_refused_rest or error.retryable or error.status in (401, 403):
                raise  # a login or a busy registry says nothing of the session
            # The session held more, or less, than it said: the blob begins again, and no later upload
            # to this host goes on where it broke.
            job.target.host.can_resume = False
            upload.session = ""
            message = f"the rest of a broken upload was refused: {error.message}"
            raise Disconnected(message) from error
        raise _AnswerLost(WireError("the registry answered before the blob was sent"))

    async def _send_by_patches(self, job: _Job, body: Body) -> Body:
        """Send the body by PATCH if this upload does so. Return the body of the PUT that closes the
        session: nothing after a PATCH, else the whole blob.
        """
        if job.upload.style == "patch":  # one for all
            await self._send_part(job, body)
            return MemoryPieces(b"")
        if job.upload.style == "chunks":
            await self._send_in_chunks(job, body)
            return MemoryPieces(b"")

        # A registry of chunks gets a blob that is no larger than one in a PUT. As a chunk, it is read
        # into memory and verified before its first byte goes (docs/design.md section 9).
        if isinstance(body, Relay | FeedBody) and job.target.product.put_limit:
            room = bytearray(job.blob.size - job.upload.offset)
            return MemoryPieces(await body.read_until(job.blob.size, room))
        return body

    def _style_for(self, job: _Job) -> UploadStyle:
        """Return the way to upload: the one that is usual for the registry's kind, or the other one, if
        uploads of this size have been refused (`_switch_style`).
        """
        product = job.target.product
        size = job.blob.size
        if product.put_limit and size > product.put_limit:
            return "chunks"
        smallest = self._knowledge.host(job.target.host.key).smallest_patch
        if product.fallback and smallest is not None and size >= smallest:
            return product.fallback
        return product.upload

    async def _send_in_chunks(self, job: _Job, body: Body) -> None:
        """Send the body by a PATCH for each chunk (docs/specification.md section 8.2).

        A chunk that breaks goes again from where the target says it stands: what comes from the source
        is held in memory for that, a file is read again.
        """
        upload = job.upload
        size = job.blob.size
        limit = job.target.product.put_limit or size
        if not isinstance(body, Relay | FeedBody):
            while upload.offset < size:
                end = min(upload.offset + limit, size)
                await self._send_chunk(job, end, partial(body.part, end=end))
            return

        room = bytearray(limit)  # the same for all chunks
        while upload.offset < size:
            start = upload.offset
            end = min(start + limit, size)
            chunk = await body.read_until(end, room)
            await self._send_chunk(job, end, partial(body.chunk, chunk, start))

    async def _send_chunk(
        self, job: _Job, end: int, body_from: Callable[[int], MemoryPieces | FilePieces]
    ) -> None:
        """Send the blob up to byte `end`, in several parts if it breaks; `body_from` gives the body from
        a byte on.
        """
        upload = job.upload
        while upload.offset < end:
            try:
                if upload.broken_session:
                    await upload.resume()
                if not upload.session:
                    raise Disconnected("the registry has forgotten the upload")
                await self._send_part(job, body_from(upload.offset))
            except SyncError as error:
                await self._pause_before_chunk(job, error)

    async def _send_part(self, job: _Job, part: Body) -> None:
        """Send a part by PATCH, unless the target has all of it."""
        if part.length and not await job.upload.send(part, last=False):
            raise Disconnected("the registry answered before what was sent had arrived")
        job.retries = RetryBudget(ATTEMPTS)  # each part has all attempts

    async def _pause_before_chunk(self, job: _Job, error: SyncError) -> None:
        """Wait before a chunk goes again. Raises `error` where it cannot, or where the registry asks for a
        long pause: the permits of both ends are held meanwhile.
        """
        upload = job.upload
        if isinstance(error, RegistryError) and error.is_session_gone:
            upload.session = ""
        if not upload.session or error.unreachable_peer is not None:
            raise error
        pause = self._transport.pause_after(error, job.retries, job.target.host)
        asked = (error.retry_after or 0.0) if isinstance(error, RegistryError) else 0.0
        if max(pause, asked) > SOURCE_GRACE:
            raise error
        self._transport.machine.log("debug", "retry", f"{error}; the chunk goes again")
        await anyio.sleep(pause)

    # After a failure.

    async def _has_arrived(self, job: _Job) -> bool:
        """Ask, a few times, whether a blob whose answer was lost has arrived."""
        for pause in _LOST_ANSWER_PAUSES:
            await anyio.sleep(pause)
            ask = partial(job.target.has_blob, job.blob)
            try:
                job.is_absent = not await self._transport.recovery.retry_over_outages(ask)
            except SyncError as error:
                # The registry has just lost an answer and may still be failing: the next HEAD may do.
                if not error.retryable:
                    raise
            else:
                if not job.is_absent:
                    return True
        return False

    def _note_staging_failure(self, error: StagingFailed) -> None:
        """Log why a blob was not staged: a warning for the first failure of the disk. No image fails
        for it: targets share a reading instead (docs/design.md section 8).
        """
        is_first_failure = self._disk_works and not isinstance(error, NoRoom)
        if is_first_failure:
            self._disk_works = False
        level = "warning" if is_first_failure else "debug"
        text = f"{error}; the targets share one download instead, at the pace of the slowest"
        self._transport.machine.log(level, "staging", text)

    async def _prepare_second_reading(self, job: _Job, error: WrongBytes) -> bool:
        """Have a blob read again from its first byte: a cache on the way may have been wrong once.
        Return False when that was tried before, for whichever target.
        """
        upload = job.upload
        wrong = self._wrong_readings[job.relay.source.key, job.blob.digest]
        # Another target's copy may have read the same wrong bytes at the same time: that is no second
        # reading.
        if not wrong or job.relay.is_fresh:
            wrong.append(error)
        if len(wrong) > 1:
            return False
        self._transport.machine.log("debug", "retry", f"{error}; it is read once more")
        error.drop_frames()  # they hold a part of the blob

        await upload.lease.settle()
        if upload.session and (upload.has_begun or upload.offset):
            await upload.cancel_upload()  # it holds some of the wrong bytes
            upload.session = ""
        upload.broken_session = ""
        return True

    def _check_reading(self, job: _Job) -> None:
        """Have a blob that came wrong once read over a fresh connection, from its first byte. Raises the
        error of the second reading if that came wrong too.
        """
        wrong = self._wrong_readings.get((job.relay.source.key, job.blob.digest), [])
        if len(wrong) > 1:
            raise copy_error(wrong[-1])
        if wrong and not job.relay.is_fresh:
            job.relay = Relay(job.relay.source, job.blob, self._transport, is_fresh=True)

    def _pause_before_next(self, job: _Job, error: SyncError) -> float:
        """Draw the consequences of a failed attempt; return the seconds to wait before the next one.
        Raises `error` when there is no next attempt.
        """
        upload = job.upload
        target = job.target
        error.with_place(Side.TARGET, "push blob", target.reference(job.blob.digest))
        error.message = target.host.redact(error.message)

        job.has_met_outage = job.has_met_outage or error.unreachable_peer is not None
        if error.unreachable_peer is None:
            # The mount may be the reason, and the blob can be uploaded without it. Only a first failure
            # that looks like the beginning of an outage says nothing about the mount.
            if job.has_failed_before or not is_outage(error):
                job.may_mount = False
            job.has_failed_before = True

            is_session_gone = isinstance(error, RegistryError) and error.is_session_gone
            if upload.has_begun and (isinstance(error, WireError) or is_session_gone):
                job.broken_bodies += 1

        if self._switch_style(job, error):
            pause = 0.0
        else:
            hosts = (job.relay.source.host, target.host)
            pause = self._transport.pause_after(error, job.retries, *hosts)
        if job.broken_bodies == _BLOB_STARTS:
            raise error
        return pause

    def _switch_style(self, job: _Job, error: SyncError) -> bool:
        """Switch to the registry's other way to upload, by PUT or by PATCH, if the error calls for it; say
        whether.

        It does when a body was refused, or broke in all attempts but the last
        (docs/protocol-facts.md section 7.9). A copy switches once.
        """
        upload = job.upload
        other = job.target.product.fallback
        if other is None or job.has_switched_style or not upload.has_begun:
            return False
        if isinstance(error, RegistryError) and error.is_session_gone:
            return False  # that says nothing of the way

        is_too_large = isinstance(error, RegistryError) and error.status in _TOO_LARGE_STATUSES
        is_broken = isinstance(error, Disconnected) and error.side is Side.TARGET
        breaks_always = is_broken and job.broken_bodies == _BLOB_STARTS - 1
        if _refuses_the_way(error):
            size = 0
        elif is_too_large or breaks_always:
            size = job.blob.size  # smaller bodies may still be accepted in the usual way
        else:
            return False

        # Blobs from this size on go to this host in the other way; None: none does.
        host = job.target.host.key
        smallest = self._knowledge.host(host).smallest_patch
        if upload.style == other:
            smallest = None  # the other way has just failed too
        else:
            smallest = size if smallest is None else min(size, smallest)
        self._knowledge.learn_smallest_patch(host, smallest)
        job.has_switched_style = True
        upload.broken_session = ""
        return True

    # Manifests.

    def reserving(self, image: Image, blobs: Iterable[Descriptor]) -> AbstractContextManager[None]:
        """Return a block in which the target keeps room for these blobs, and for the manifests."""
        manifests = (image.tree.root, *image.tree.children)
        return image.target.reserving(image.reference, blobs, manifests)

    async def put_manifests(
        self, image: Image, own_children: frozenset[str], on_put: Callable[[Manifest], None]
    ) -> None:
        """Put `own_children` level by level, each before its index, and the root last (I2).

        `on_put` is called with each child that was put.
        """

        async def put_child(child: Manifest) -> None:
            await image.target.put_child(child)
            on_put(child)

        for level in image.tree.levels(own_children):
            await gather(partial(put_child, child) for child in level)

        full_name = image.source.full_name(image.source_reference)
        await image.target.put_manifest(image.reference, image.tree.root, full_name=full_name)


def known_body(blob: Descriptor) -> bytes | None:
    """Return the body of a blob for which no source has to be asked (rule 13)."""
    algorithm, encoded = split_digest(blob.digest)
    for body in (blob.data, b"{}", b""):
        if body is not None and len(body) == blob.size and hash_hex(algorithm, body) == encoded:
            return body
    return None


def _refuses_the_way(error: SyncError) -> bool:
    """Say whether a registry refused how a body was sent, whatever its size."""
    if not isinstance(error, RegistryError):
        return False
    has_code = not _UNSUPPORTED_CODES.isdisjoint(error.codes)
    return error.status in _UNSUPPORTED_STATUSES or (error.status == 400 and has_code)
