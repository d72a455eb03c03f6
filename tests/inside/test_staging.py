"""Staging: each blob pulled once, whole or not at all, and nothing left behind."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

import anyio
import anyio.abc
import pytest

from _regsync.crypto import new_hash
from _regsync.errors import ContentError
from _regsync.files import LONGEST_THREAD_CALL, hash_rest
from _regsync.net.http1 import PIECE, Pieces
from _regsync.oci import Descriptor, digest_of
from _regsync.sync import staging as sync_staging
from _regsync.sync.staging import SMALL_BLOB, MemoryBudget, NoRoom, Staging, StagingFailed

pytestmark = pytest.mark.anyio

SMALL = b"small" * 1000
LARGE = bytes(range(256)) * 5000  # more than SMALL_BLOB, and no multiple of PIECE


def described(body: bytes) -> Descriptor:
    return Descriptor("application/octet-stream", digest_of(body), len(body))


class Source:
    """A reader that gives one body in pieces, counts how often it is asked, and can be held up or
    break.
    """

    def __init__(self, body: bytes, breaks_after: int | None = None) -> None:
        self.body, self.breaks_after = body, breaks_after
        self.reads = 0
        self.half_way, self.may_go_on = anyio.Event(), anyio.Event()
        self.may_go_on.set()

    async def __call__(self, sink: Callable[[memoryview], Awaitable[None]]) -> None:
        self.reads += 1
        buffer = bytearray(PIECE)
        for start in range(0, len(self.body), PIECE):
            if self.breaks_after is not None and start >= self.breaks_after:
                raise ContentError("the source broke")
            piece = self.body[start : start + PIECE]
            buffer[: len(piece)] = piece
            await sink(memoryview(buffer)[: len(piece)])
            # As the relay does: a piece is valid until the next one is asked for.
            buffer[:] = bytes(PIECE)
            self.half_way.set()
            await self.may_go_on.wait()


async def bring(staging: Staging, blob: Descriptor, source: Source, *, disk: bool = True) -> None:
    """Have a blob staged, and use it no further."""
    async with staging.ensuring_staged(blob, source, may_use_disk=disk):
        pass


async def content(pieces: Pieces | None) -> bytes:
    assert pieces is not None
    found = await content_of_rest(pieces)
    assert len(found) == pieces.length
    return found


async def content_of_rest(pieces: Pieces) -> bytes:
    found = b""
    while piece := bytes(await pieces.next()):
        found += piece
    return found


def files(directory: Path) -> list[str]:
    return sorted(
        str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()
    )


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    made = Staging(str(tmp_path))
    yield made
    made.close()


@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["in memory", "in a file"])
async def test_many_askers_pull_a_blob_once_and_each_reads_it_whole(
    staging: Staging, body: bytes
) -> None:
    source, blob = Source(body), described(body)
    found: list[bytes] = []

    async def ask() -> None:
        async with staging.ensuring_staged(blob, source):
            with staging.opened(blob) as pieces:
                found.append(await content(pieces))

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(ask)
    assert source.reads == 1
    assert found == [body] * 8


@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["in memory", "in a file"])
async def test_a_body_is_given_from_where_a_target_lacks_it(staging: Staging, body: bytes) -> None:
    await bring(staging, described(body), Source(body))
    for offset in (0, 1, len(body) - 1, len(body)):
        with staging.opened(described(body), offset) as pieces:
            assert pieces is not None
            assert pieces.length == len(body) - offset
            assert await content(pieces) == body[offset:]
            assert pieces.complete


async def test_small_blobs_never_touch_the_disk(staging: Staging, tmp_path: Path) -> None:
    body = bytes(SMALL_BLOB)
    await bring(staging, described(body), Source(body))
    assert os.listdir(tmp_path) == []


@pytest.mark.rule("R16")
async def test_a_file_is_named_by_digest_and_private(staging: Staging, tmp_path: Path) -> None:
    await bring(staging, described(LARGE), Source(LARGE))
    path = tmp_path / "staged" / "sha256" / described(LARGE).digest.partition(":")[2]
    assert path.read_bytes() == LARGE
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0


async def test_nothing_is_visible_under_the_digest_before_the_last_piece(
    staging: Staging, tmp_path: Path
) -> None:
    source, blob = Source(LARGE), described(LARGE)
    source.may_go_on = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(bring, staging, blob, source)
        await source.half_way.wait()
        (partial,) = files(tmp_path)
        with staging.opened(blob) as pieces:
            assert pieces is None
        source.may_go_on.set()
    assert partial.endswith(".partial")
    assert files(tmp_path) == [f"staged/sha256/{blob.digest.partition(':')[2]}"]


@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["in memory", "in a file"])
async def test_one_askers_failure_is_its_own(staging: Staging, tmp_path: Path, body: bytes) -> None:
    blob, good = described(body), Source(body)
    with pytest.raises(ContentError, match="the source broke"):
        await bring(
            staging, blob, Source(body, breaks_after=len(body) // 2 if body is LARGE else 0)
        )
    assert files(tmp_path) == []
    await bring(staging, blob, good)
    with staging.opened(blob) as pieces:
        assert await content(pieces) == body
    assert good.reads == 1


@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["in memory", "in a file"])
async def test_a_cancelled_asker_lets_the_next_one_pull(
    staging: Staging, tmp_path: Path, body: bytes
) -> None:
    held, good, blob = Source(body), Source(body), described(body)
    held.may_go_on = anyio.Event()
    scope = anyio.CancelScope()

    async def give_up() -> None:
        with scope:
            await bring(staging, blob, held)

    async with anyio.create_task_group() as group:
        group.start_soon(give_up)
        await held.half_way.wait()
        group.start_soon(bring, staging, blob, good)
        await anyio.wait_all_tasks_blocked()
        assert good.reads == 0, "the second asker waits for the first one's pull"
        scope.cancel()
    assert good.reads == 1
    assert not [name for name in files(tmp_path) if name.endswith(".partial")]
    with staging.opened(blob) as pieces:
        assert await content(pieces) == body


async def test_memory_alone_keeps_what_was_used_last_and_what_is_still_to_be_read(
    staging: Staging,
) -> None:
    staging.memory.size = 2500
    sources = [Source(bytes([number]) * 1000) for number in range(4)]
    blobs = [described(bytes([number]) * 1000) for number in range(4)]

    async def use(number: int) -> None:
        async with staging.ensuring_staged(blobs[number], sources[number], may_use_disk=False):
            with staging.opened(blobs[number]) as pieces:
                assert await content(pieces) == bytes([number]) * 1000

    for number in (0, 1, 0, 2, 0, 1):
        await use(number)
    assert [source.reads for source in sources] == [1, 2, 1, 0]
    # What somebody uses stays, and what has no place beside it is left to the asker.
    async with AsyncExitStack() as users:
        for number in (2, 3):
            keeping = staging.ensuring_staged(blobs[number], sources[number], may_use_disk=False)
            await users.enter_async_context(keeping)
        with pytest.raises(NoRoom):
            await use(0)
        for number in (2, 3):
            await use(number)
    assert [source.reads for source in sources] == [1, 2, 2, 1]


async def test_who_asked_in_vain_keeps_nothing_in_memory(staging: Staging) -> None:
    """A source that broke, and was asked again, is over with its second answer: others have that
    room.
    """
    staging.memory.size = 1500
    bodies = [bytes([number]) * 1000 for number in range(2)]
    with pytest.raises(ContentError):
        await bring(staging, described(bodies[0]), Source(bodies[0], breaks_after=0), disk=False)
    for body in bodies:
        await bring(staging, described(body), Source(body), disk=False)
        with staging.opened(described(body)) as pieces:
            assert await content(pieces) == body


async def test_what_parts_of_others_take_of_the_memory_small_blobs_have_not(tmp_path: Path) -> None:
    """What is kept for later makes way for them; what somebody uses stays."""
    staging = Staging(str(tmp_path))
    kept, used, late = (described(bytes([n]) * SMALL_BLOB) for n in range(3))
    await bring(staging, kept, Source(bytes(SMALL_BLOB)), disk=False)
    async with staging.ensuring_staged(used, Source(bytes([1]) * SMALL_BLOB), may_use_disk=False):
        staging.memory.reserved = staging.memory.size - SMALL_BLOB
        staging.make_room_for_chunks()
        with pytest.raises(NoRoom):
            await bring(staging, described(b"x"), Source(b"x"), disk=False)
        with pytest.raises(NoRoom):
            await bring(staging, late, Source(bytes([2]) * SMALL_BLOB), disk=False)
        again = Source(bytes(SMALL_BLOB))
        with pytest.raises(NoRoom):
            await bring(staging, kept, again, disk=False)
        assert again.reads == 0
        with staging.opened(used) as pieces:
            assert await content(pieces) == bytes([1]) * SMALL_BLOB
    await bring(staging, late, Source(bytes([2]) * SMALL_BLOB), disk=False)
    assert files(tmp_path) == []
    staging.close()


async def test_what_is_held_for_one_sender_is_read_nowhere_and_given_back(
    tmp_path: Path, staging: Staging
) -> None:
    staging.memory.size = 2500
    bodies = [bytes([number]) * 1000 for number in range(2)]
    blobs = [described(body) for body in bodies]
    for _ in range(5):  # each time all of the room comes back
        for blob, body in zip(blobs, bodies, strict=True):
            assert staging.retain(blob, memoryview(body))
            assert staging.retain(blob, memoryview(body)), "for another sender too"
        source = Source(bodies[0])
        async with staging.ensuring_staged(blobs[0], source, may_use_disk=False):
            staging.release(blobs[0])
            assert staging.retain(blobs[0], memoryview(bodies[0])), "the other sender has it in use"
            with staging.opened(blobs[0]) as pieces:
                assert await content(pieces) == bodies[0]
        assert source.reads == 0
        for blob in blobs:
            staging.release(blob)
    staging.memory.reserved = 2000
    assert not staging.retain(blobs[0], memoryview(bodies[0])), "chunks have the room"
    assert files(tmp_path) == []


async def test_what_somebody_reads_from_its_source_is_not_held_twice(staging: Staging) -> None:
    """The room would be taken twice, and given back once."""
    staging.memory.size = len(SMALL)
    source = Source(SMALL)
    source.may_go_on = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: bring(staging, described(SMALL), source, disk=False))
        await source.half_way.wait()
        assert staging.retain(described(SMALL), memoryview(SMALL))
        source.may_go_on.set()
    staging.release(described(SMALL))
    other = bytes(len(SMALL))
    assert staging.retain(described(other), memoryview(other))


async def test_memory_is_reserved_by_rank_and_never_beyond_the_budget() -> None:
    memory, order = MemoryBudget(3), list[float]()

    async def use(size: int, rank: float) -> None:
        async with memory.reserving(size, rank):
            assert memory.reserved <= memory.size
            order.append(rank)
            await anyio.sleep(0.001)

    async with anyio.create_task_group() as group, memory.reserving(3, 0):
        for size, rank in ((1, 4), (3, 2), (1, 3), (2, 1)):
            group.start_soon(use, size, rank)
            await anyio.wait_all_tasks_blocked()
        assert order == []
        # Who needs none waits for nobody.
        await use(0, 9)
    # A small one does not overtake a large one that waits: that would never have its turn.
    assert order == [9, 1, 2, 3, 4]
    assert memory.reserved == 0


@pytest.mark.parametrize("is_served", [False, True])
async def test_who_gives_up_waiting_for_memory_holds_none_of_it(is_served: bool) -> None:
    memory, served = MemoryBudget(3), list[str]()

    async def use(name: str) -> None:
        async with memory.reserving(2, 0):
            served.append(name)

    async with anyio.create_task_group() as group, anyio.create_task_group() as leaving:
        async with memory.reserving(3, 0):
            leaving.start_soon(use, "one that leaves")
            await anyio.wait_all_tasks_blocked()
            group.start_soon(use, "one that stays")
            await anyio.wait_all_tasks_blocked()
            if not is_served:
                leaving.cancel_scope.cancel()
                await anyio.wait_all_tasks_blocked()
        # Else it is its turn in the moment in which it is cancelled.
        leaving.cancel_scope.cancel()
    assert served[-1] == "one that stays"
    assert is_served or len(served) == 1
    assert memory.reserved == 0


async def test_what_memory_has_no_room_for_is_staged_on_disk_and_read_once(
    tmp_path: Path, staging: Staging
) -> None:
    staging.memory.size = 2500
    bodies = [bytes([number]) * 1000 for number in range(4)]
    sources = [Source(body) for body in bodies]
    for _ in range(2):
        for body, each in zip(bodies, sources, strict=True):
            await bring(staging, described(body), each)
    assert [each.reads for each in sources] == [1] * 4
    assert len(files(tmp_path)) == 2
    for body in bodies:
        with staging.opened(described(body)) as pieces:
            assert await content(pieces) == body


@pytest.mark.parametrize("configured", [True, False], ids=["cache_dir", "no cache_dir"])
async def test_nothing_is_left_when_staging_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configured: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    staging = Staging(str(tmp_path / "cache") if configured else None)
    await bring(staging, described(LARGE), Source(LARGE))
    await bring(staging, described(SMALL), Source(SMALL))
    assert len(files(tmp_path)) == 1
    staging.close()
    staging.close()
    assert files(tmp_path) == []
    assert configured or os.listdir(tmp_path) == []


@pytest.mark.rule("R16")
async def test_no_link_that_waits_in_the_directory_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who can write there must not make us write elsewhere."""
    victim, folder = tmp_path / "victim", tmp_path / "cache" / "staged" / "sha256"
    victim.write_bytes(b"precious")
    folder.mkdir(parents=True)
    blob = described(LARGE)
    name = blob.digest.partition(":")[2]
    monkeypatch.setattr(os, "urandom", bytes)
    for each in (name, f"{name}.partial", f"{name}.{bytes(6).hex()}.partial"):
        (folder / each).symlink_to(victim)
    staging = Staging(str(tmp_path / "cache"))
    with pytest.raises(StagingFailed):
        await bring(staging, blob, Source(LARGE))
    assert victim.read_bytes() == b"precious"

    (folder / f"{name}.{bytes(6).hex()}.partial").unlink()
    staging = Staging(str(tmp_path / "cache"))
    await bring(staging, blob, Source(LARGE))
    assert (folder / name).read_bytes() == LARGE
    assert not (folder / name).is_symlink()
    staging.close()
    assert victim.read_bytes() == b"precious"


@pytest.mark.rule("R16")
async def test_a_link_that_takes_the_place_of_what_was_verified_is_not_sent(tmp_path: Path) -> None:
    victim, blob = tmp_path / "victim", described(LARGE)
    victim.write_bytes(b"precious" * 1_000_000)
    staging = Staging(str(tmp_path / "cache"))
    await bring(staging, blob, Source(LARGE))
    place = tmp_path / "cache" / "staged" / "sha256" / blob.digest[7:]
    place.unlink()
    place.symlink_to(victim)
    with pytest.raises(StagingFailed, match="staged"), staging.opened(blob):
        pass
    staging.close()
    assert victim.exists()


async def test_a_store_of_images_loses_nothing_where_it_is_taken_for_a_cache(
    tmp_path: Path,
) -> None:
    """OCI layouts and container engines keep what is theirs as blobs/ALGORITHM/HEX."""
    precious = tmp_path / "blobs" / "sha256" / described(LARGE).digest[7:]
    precious.parent.mkdir(parents=True)
    precious.write_bytes(b"precious")
    staging = Staging(str(tmp_path))
    await bring(staging, described(LARGE), Source(LARGE))
    staging.close()
    assert precious.read_bytes() == b"precious"
    assert files(tmp_path) == [str(precious.relative_to(tmp_path))]


async def test_two_runs_in_one_directory_do_not_spoil_each_others_blobs(tmp_path: Path) -> None:
    one, two = Staging(str(tmp_path)), Staging(str(tmp_path))
    slow, blob = Source(LARGE), described(LARGE)
    slow.may_go_on = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(bring, one, blob, slow)
        await slow.half_way.wait()
        await bring(two, blob, Source(LARGE))
        slow.may_go_on.set()
    with one.opened(blob) as pieces:
        assert await content(pieces) == LARGE
    one.close()
    with two.opened(blob) as pieces:
        assert pieces is None, "it went with the other run"
    again = Source(LARGE)
    await bring(two, blob, again)
    assert again.reads == 1
    two.close()


async def test_only_partial_files_of_killed_runs_are_swept(tmp_path: Path) -> None:
    folder = tmp_path / "staged" / "sha256"
    folder.mkdir(parents=True)
    old = time.time() - 2 * 24 * 3600
    for name, when in (("dead.partial", old), ("alive.partial", None), ("not-ours", old)):
        (folder / name).write_bytes(b"x")
        if when is not None:
            os.utime(folder / name, (when, when))
    staging = Staging(str(tmp_path))
    await bring(staging, described(LARGE), Source(LARGE))
    staging.close()
    assert files(folder) == ["alive.partial", "not-ours"]


# --- disks that do not play along
# ---------------------------------------------------------------------


async def fails_with_one_line(staging: Staging, *words: str) -> None:
    source = Source(LARGE)
    with pytest.raises(StagingFailed) as caught:
        await bring(staging, described(LARGE), source)
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words), text
    assert caught.value.code == "CONFIG_ERROR"
    assert "global.cache_dir" in (caught.value.hint or "")
    reads = source.reads
    with pytest.raises(StagingFailed) as again:
        await bring(staging, described(LARGE), source)
    assert source.reads == reads, "no other blob is read for a disk that failed"
    assert str(again.value) == text
    # What needs no disk still works.
    await bring(staging, described(SMALL), Source(SMALL))


async def test_a_directory_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"a file, not a directory")
    await fails_with_one_line(Staging(str(tmp_path / "cache")), "cache", "Not a directory")


async def test_a_directory_without_permission_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, *_: Any, **__: Any) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "makedirs", refuse)
    await fails_with_one_line(Staging(str(tmp_path)), str(tmp_path), "Permission denied")


async def test_a_full_disk_is_one_clear_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(FileIO):
        def write(self, piece: Any) -> int:
            if self.tell() >= 2 * PIECE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(piece)

    monkeypatch.setattr(sync_staging, "FileIO", Full)
    await fails_with_one_line(Staging(str(tmp_path)), "No space left on device")
    assert files(tmp_path) == []


async def test_a_blob_that_could_not_be_named_is_not_there(
    staging: Staging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: str) -> NoReturn:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StagingFailed, match="quota"):
        await bring(staging, described(LARGE), Source(LARGE))
    assert files(tmp_path) == []
    assert described(LARGE).digest not in staging._files


async def test_a_disk_that_takes_a_piece_in_parts_gets_all_of_it(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(FileIO):
        def write(self, piece: Any) -> int:
            return super().write(piece[:100_000])

    with monkeypatch.context() as patched:
        patched.setattr(sync_staging, "FileIO", Slow)
        await bring(staging, described(LARGE), Source(LARGE))
    with staging.opened(described(LARGE)) as pieces:
        assert await content(pieces) == LARGE


async def test_a_worker_thread_writes_the_piece_after_a_slow_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop waits for a slow disk once, and takes no way to a thread for a quick one."""
    now = 0.0
    seconds = iter([0.0, 0.0, 3.0, 3.0, 0.0, 0.0])
    writers: list[str] = []

    class Disk(FileIO):
        def write(self, piece: Any) -> int:
            nonlocal now
            now += next(seconds)
            return super().write(piece)

    async def run_sync(function: Any, *given: Any) -> Any:
        writers[-1] = "thread"
        return function(*given)

    class Reading(Source):
        async def __call__(self, sink: Any) -> None:
            async def sink_and_note(piece: memoryview) -> None:
                writers.append("loop")
                await sink(piece)

            await super().__call__(sink_and_note)

    body = bytes(6 * PIECE)
    staging = Staging(str(tmp_path))
    monkeypatch.setattr(sync_staging, "FileIO", Disk)
    monkeypatch.setattr(anyio, "current_time", lambda: now)
    monkeypatch.setattr(anyio.to_thread, "run_sync", run_sync)
    await bring(staging, described(body), Reading(body))
    staging.close()
    assert writers == ["loop", "loop", "loop", "thread", "thread", "loop"]


@pytest.mark.parametrize(
    ("is_replaced", "error"), [(True, None), (False, errno.EAGAIN)], ids=["hashed", "on disk"]
)
async def test_bytes_that_have_to_be_read_are_not_sent_by_the_system(
    staging: Staging, monkeypatch: pytest.MonkeyPatch, is_replaced: bool, error: int | None
) -> None:
    """The event loop would wait for the disk, or nobody would notice that the file is another one."""
    blob = described(LARGE)
    await bring(staging, blob, Source(LARGE))
    if is_replaced:
        os.utime(staging._files[blob.digest].path)

    def refuse(*_: object) -> NoReturn:
        raise OSError(error, "not without waiting")

    with staging.opened(blob) as pieces:
        assert pieces is not None
        first = bytes(await pieces.next())
        if error is not None:
            monkeypatch.setattr(os, "preadv", refuse)
        assert pieces.write_to(-1) == 0
        assert first + await content_of_rest(pieces) == LARGE


async def test_where_the_system_cannot_tell_the_speed_of_the_last_piece_does(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tmpfs has all in memory and does not say so."""
    now = 0.0
    seconds_of_a_send = 0.0
    threads = list[str]()
    plain = anyio.to_thread.run_sync

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    def send(*_: object) -> int:
        nonlocal now
        now += seconds_of_a_send
        return 1000

    async def run_sync(*arguments: Any, **options: Any) -> Any:
        threads.append("thread")
        return await plain(*arguments, **options)

    await bring(staging, described(LARGE), Source(LARGE))
    monkeypatch.setattr(os, "preadv", refuse)
    monkeypatch.setattr(os, "sendfile", send)
    monkeypatch.setattr(anyio, "current_time", lambda: now)
    monkeypatch.setattr(anyio.to_thread, "run_sync", run_sync)
    with staging.opened(described(LARGE)) as pieces:
        assert pieces is not None
        assert await pieces.next() == LARGE[: sync_staging._READ_AT_ENDS]
        assert pieces.write_to(-1) == 1000
        assert not threads

        seconds_of_a_send = 0.1
        assert pieces.write_to(-1) == 1000
        assert pieces.write_to(-1) == 0
        await pieces.next()
        assert threads == ["thread"]
        # That was quick: the event loop may do the next one.
        assert pieces.write_to(-1) == 1000


async def test_a_disk_that_breaks_while_the_system_sends_is_no_broken_connection(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    await bring(staging, described(LARGE), Source(LARGE))
    monkeypatch.setattr(os, "sendfile", fail)
    with staging.opened(described(LARGE)) as pieces:
        assert pieces is not None
        number = errno.EIO
        with pytest.raises(StagingFailed, match="Input/output error"):
            pieces.write_to(-1)
        number = errno.EPIPE
        with pytest.raises(BrokenPipeError):
            pieces.write_to(-1)


async def test_a_disk_that_cannot_be_read_is_one_clear_line(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(FileIO):
        def readinto(self, _: Any) -> NoReturn:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def read_without_waiting(*_: object) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    await bring(staging, described(LARGE), Source(LARGE))
    monkeypatch.setattr(os, "preadv", read_without_waiting)
    monkeypatch.setattr(sync_staging, "FileIO", Broken)
    with staging.opened(described(LARGE)) as pieces:
        assert pieces is not None
        with pytest.raises(StagingFailed, match="Input/output error"):
            await pieces.next()


async def test_whoever_hashes_a_file_is_stopped_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker thread cannot be stopped, so it is given back now and then."""
    visits = 0
    plain = anyio.to_thread.run_sync
    clock = itertools.count(step=LONGEST_THREAD_CALL / 2)

    async def run_sync(*arguments: Any, **options: Any) -> Any:
        nonlocal visits
        visits += 1
        if visits == 3:
            scope.cancel()
        return await plain(*arguments, **options)

    (tmp_path / "large").write_bytes(bytes(20 * PIECE))
    with FileIO(str(tmp_path / "large")) as file:
        monkeypatch.setattr(time, "monotonic", lambda: next(clock))
        monkeypatch.setattr(anyio.to_thread, "run_sync", run_sync)
        with anyio.CancelScope() as scope:
            await hash_rest(file, new_hash("sha256"))
        assert scope.cancelled_caught
        assert file.tell() == 2 * 2 * PIECE

        rest = new_hash("sha256")
        assert await hash_rest(file, rest) == 16 * PIECE
        assert rest.hexdigest() == new_hash("sha256", bytes(16 * PIECE)).hexdigest()


@pytest.mark.rule("R18")
async def test_a_name_from_the_system_cannot_write_on_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "a\x1b[2Jb").write_bytes(b"")
    with pytest.raises(StagingFailed) as caught:
        await bring(Staging(str(tmp_path / "a\x1b[2Jb")), described(LARGE), Source(LARGE))
    assert "\x1b" not in str(caught.value)


async def test_the_limit_lets_go_of_what_was_used_longest_ago(tmp_path: Path) -> None:
    bodies = [bytes([number]) * (SMALL_BLOB + 1 + number) for number in range(3)]
    staging = Staging(str(tmp_path), 2 * SMALL_BLOB + 10)
    first, second, third = (described(body) for body in bodies)
    for blob, body in zip((first, second), bodies, strict=False):
        await bring(staging, blob, Source(body))
    with staging.opened(first) as pieces:
        assert await content(pieces) == bodies[0]
    again = Source(bodies[1])
    await bring(staging, third, Source(bodies[2]))
    assert sorted(files(tmp_path)) == sorted(
        f"staged/sha256/{b.digest[7:]}" for b in (first, third)
    )
    await bring(staging, second, again)
    assert again.reads == 1
    staging.close()
    assert files(tmp_path) == []


async def test_a_blob_that_is_being_read_is_not_let_go_of(tmp_path: Path) -> None:
    bodies = [bytes([number]) * (SMALL_BLOB + 1) for number in range(2)]
    staging = Staging(str(tmp_path), SMALL_BLOB + 10)
    first, second = (described(body) for body in bodies)
    await bring(staging, first, Source(bodies[0]))
    with staging.opened(first) as pieces:
        source = Source(bodies[1])
        with pytest.raises(NoRoom):
            await bring(staging, second, source)
        assert source.reads == 0
        assert await content(pieces) == bodies[0]
    await bring(staging, second, Source(bodies[1]))
    staging.close()


async def test_blobs_that_are_being_pulled_count_towards_the_limit(tmp_path: Path) -> None:
    bodies = [bytes([number]) * (SMALL_BLOB + 1) for number in range(2)]
    staging, slow = Staging(str(tmp_path), SMALL_BLOB + 10), Source(bodies[0])
    slow.may_go_on = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(bring, staging, described(bodies[0]), slow)
        await slow.half_way.wait()
        with pytest.raises(NoRoom):
            await bring(staging, described(bodies[1]), Source(bodies[1]))
        slow.may_go_on.set()
    await bring(staging, described(bodies[1]), Source(bodies[1]))
    assert files(tmp_path) == [f"staged/sha256/{described(bodies[1]).digest[7:]}"]
    staging.close()


async def test_a_failed_pull_gives_its_room_back(tmp_path: Path) -> None:
    staging, body = Staging(str(tmp_path), SMALL_BLOB + 10), bytes(SMALL_BLOB + 1)
    for _ in range(3):
        with pytest.raises(ContentError):
            await bring(staging, described(body), Source(body, breaks_after=0))
    await bring(staging, described(body), Source(body))
    staging.close()


async def test_what_another_run_has_removed_is_no_failure_of_the_disk(tmp_path: Path) -> None:
    bodies = [bytes([number]) * (SMALL_BLOB + 1) for number in range(3)]
    staging = Staging(str(tmp_path), 2 * SMALL_BLOB + 10)
    for body in bodies[:2]:
        await bring(staging, described(body), Source(body))
    folder = tmp_path / "staged" / "sha256"
    (folder / described(bodies[0]).digest[7:]).unlink()
    await bring(staging, described(bodies[2]), Source(bodies[2]))
    staging.close()
    assert files(tmp_path) == []


async def test_a_file_that_cannot_be_removed_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [bytes([number]) * (SMALL_BLOB + 1) for number in range(3)]
    staging, unlink = Staging(str(tmp_path)), os.unlink
    for body in bodies:
        await bring(staging, described(body), Source(body))
    stuck = sorted(
        files(tmp_path),
        key=[f"staged/sha256/{each}" for each in os.listdir(tmp_path / "staged/sha256")].index,
    )[0]

    def refuse(path: str) -> None:
        if path.endswith(stuck):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", refuse)
    staging.close()
    assert files(tmp_path) == [stuck]


@pytest.mark.parametrize("limit", [0, SMALL_BLOB])
async def test_what_is_above_the_limit_is_not_staged(tmp_path: Path, limit: int) -> None:
    staging, source = Staging(str(tmp_path), limit), Source(LARGE)
    with pytest.raises(NoRoom):
        await bring(staging, described(LARGE), source)
    assert source.reads == 0
    await bring(staging, described(SMALL), Source(SMALL))
    staging.close()
    assert files(tmp_path) == []


async def test_a_failed_runs_blobs_serve_the_next_one_when_they_verify(tmp_path: Path) -> None:
    failed = Staging(str(tmp_path))
    await bring(failed, described(LARGE), Source(LARGE))
    other = b"x" * (SMALL_BLOB + 5)
    await bring(failed, described(other), Source(other))
    failed.close(remove_files=False)
    spoilt = tmp_path / "staged" / "sha256" / described(other).digest[7:]
    spoilt.write_bytes(b"y" * len(other))
    following, kept, lost = Staging(str(tmp_path)), Source(LARGE), Source(other)
    await bring(following, described(LARGE), kept)
    await bring(following, described(other), lost)
    assert (kept.reads, lost.reads) == (0, 1)
    for body in (LARGE, other):
        with following.opened(described(body)) as pieces:
            assert await content(pieces) == body
    following.close()
    assert files(tmp_path) == []


async def test_what_is_kept_for_one_target_only_never_goes_to_disk(
    staging: Staging, tmp_path: Path
) -> None:
    staging.memory.size = len(SMALL) - 1
    source = Source(SMALL)
    with pytest.raises(NoRoom):
        await bring(staging, described(SMALL), source, disk=False)
    assert (source.reads, files(tmp_path)) == (0, [])


async def test_what_a_failed_run_left_goes_with_the_next_one_that_ends_well(tmp_path: Path) -> None:
    failed = Staging(str(tmp_path))
    await bring(failed, described(LARGE), Source(LARGE))
    failed.close(remove_files=False)
    (left,) = files(tmp_path)
    for options in ({"remove_files": False}, {"remove_leftovers": False}):
        Staging(str(tmp_path)).close(**options)
        assert files(tmp_path) == [left]
    Staging(str(tmp_path)).close()
    assert files(tmp_path) == []


async def test_a_failed_run_leaves_only_what_it_could_not_send(
    staging: Staging, tmp_path: Path
) -> None:
    sent, broken = (bytes([n]) * (SMALL_BLOB + 1) for n in range(2))
    async with staging.ensuring_staged(described(sent), Source(sent)):
        with staging.opened(described(sent)) as pieces:
            assert await content(pieces) == sent
    with pytest.raises(ZeroDivisionError):
        async with staging.ensuring_staged(described(broken), Source(broken)):
            raise ZeroDivisionError
    staging.close(has_run_failed=True)
    assert files(tmp_path) == [f"staged/sha256/{described(broken).digest[7:]}"]


async def test_without_the_lock_only_what_this_run_staged_goes(tmp_path: Path) -> None:
    other, own = b"x" * (SMALL_BLOB + 5), Staging(str(tmp_path))
    another = Staging(str(tmp_path))
    await bring(another, described(other), Source(other))
    await bring(own, described(LARGE), Source(LARGE))
    own.close(remove_leftovers=False)
    assert files(tmp_path) == [f"staged/sha256/{described(other).digest[7:]}"]
    another.close()
