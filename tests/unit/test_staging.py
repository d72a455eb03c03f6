"""Blobs that are kept for several uploads: what is read once, what has room, what a disk refuses."""

from __future__ import annotations

import errno
import shutil
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from _regsync import edge
from _regsync.app.process import process_edge
from _regsync.oci import Descriptor, digest_of
from _regsync.sync import blobs
from _regsync.sync.blobs import SMALL_BLOB, NoRoom, Staging, Stream

pytestmark = pytest.mark.anyio

LARGE = SMALL_BLOB + 1


@pytest.fixture(autouse=True)
async def world() -> AsyncGenerator[None, None]:
    with edge.using(process_edge()):
        yield


class Source:
    """A blob that counts how often it is read."""

    def __init__(self, size: int, letter: bytes = b"x") -> None:
        self.body = letter * size
        self.blob = Descriptor("application/octet-stream", digest_of(self.body), size)
        self.reads = 0

    async def read(self) -> Stream:
        self.reads += 1
        for start in range(0, len(self.body), 300_000):
            await anyio.lowlevel.checkpoint()
            yield memoryview(self.body)[start : start + 300_000]

    async def held(self, staging: Staging, *, is_shared: bool = True, start: int = 0) -> bytes:
        async with staging.holding(self.blob, self.read, is_shared=is_shared) as stream:
            return b"".join([bytes(piece) async for piece in stream(start)])


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("size", [900, LARGE])
async def test_a_shared_blob_is_read_once_and_given_from_any_byte(
    tmp_path: Path, size: int
) -> None:
    source, staging = Source(size), Staging(str(tmp_path / "staged"), None)
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(source.held, staging)
    assert await source.held(staging, start=size - 7) == source.body[-7:]
    assert source.reads == 1
    assert files(tmp_path) == ([] if size < SMALL_BLOB else [source.blob.digest.partition(":")[2]])
    staging.close()
    assert files(tmp_path) == []


async def test_what_nobody_else_needs_is_never_on_disk(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path), None)
    with pytest.raises(NoRoom):
        await Source(LARGE).held(staging, is_shared=False)
    small = Source(900)
    assert await small.held(staging, is_shared=False) == small.body
    assert await small.held(staging, is_shared=False) == small.body
    assert small.reads == 2
    assert files(tmp_path) == []


async def test_memory_has_a_bound_and_gives_room_again(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path / "staged"), 0)
    sources = [Source(SMALL_BLOB, bytes([letter])) for letter in range(30)]
    for source in sources:
        await source.held(staging)
    await sources[-1].held(staging)
    await sources[0].held(staging)
    assert (sources[-1].reads, sources[0].reads) == (1, 2)


async def test_a_limit_makes_the_least_recently_used_file_go_that_nobody_reads(
    tmp_path: Path,
) -> None:
    staging = Staging(str(tmp_path / "staged"), 2 * LARGE)
    first, second, third = (Source(LARGE, letter) for letter in (b"1", b"2", b"3"))
    async with staging.holding(first.blob, first.read, is_shared=True):
        await second.held(staging)
        await third.held(staging)
        with pytest.raises(NoRoom) as caught:
            async with staging.holding(third.blob, third.read, is_shared=True):
                await Source(LARGE, b"4").held(staging)
    assert caught.value.level == "debug", "it is the user's own limit"
    await first.held(staging)
    assert first.reads == 1
    await second.held(staging)
    assert second.reads == 2


async def test_a_file_that_does_not_fit_the_free_space_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what is promised to others: two of three would fit."""
    free = shutil.disk_usage(tmp_path)._replace(free=2 * LARGE + 5)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    staging = Staging(str(tmp_path / "staged"), None)
    refused: list[NoRoom] = []

    async def hold(source: Source) -> None:
        try:
            await source.held(staging)
        except NoRoom as error:
            refused.append(error)

    async with anyio.create_task_group() as tasks:
        for letter in (b"1", b"2", b"3"):
            tasks.start_soon(hold, Source(LARGE, letter))
    assert len(refused) == 1
    assert refused[0].level == "warning"
    await hold(Source(LARGE, b"4"))
    assert len(refused) == 1, "that blob alone was left out"


async def test_a_full_disk_ends_the_staging_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(blobs.FileIO):
        def write(self, _: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(blobs, "FileIO", Full)
    staging = Staging(str(tmp_path / "staged"), None)
    with pytest.raises(NoRoom, match="No space left") as caught:
        await Source(LARGE).held(staging)
    assert caught.value.level == "warning"
    monkeypatch.undo()
    with pytest.raises(NoRoom):
        await Source(LARGE).held(staging)
    assert files(tmp_path) == []


def behind_a_link(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "mine").write_text("mine")
    (folder / "staged").symlink_to(folder / "elsewhere")


def a_file(folder: Path) -> None:
    (folder / "staged").write_text("mine")


@pytest.mark.parametrize("make", [behind_a_link, a_file])
async def test_what_somebody_else_has_put_there_is_not_removed(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path)
    before = files(tmp_path)
    staging = Staging(str(tmp_path / "staged"), None)
    source = Source(LARGE)
    with pytest.raises(NoRoom):
        await source.held(staging)
    staging.close()
    assert files(tmp_path) == before


async def test_a_file_that_somebody_has_removed_gives_room_too(tmp_path: Path) -> None:
    first, second = Source(LARGE), Source(LARGE, b"y")
    staging = Staging(str(tmp_path), LARGE)
    await first.held(staging)
    shutil.rmtree(tmp_path / "sha256")
    assert await second.held(staging) == second.body
