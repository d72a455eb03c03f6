"""How promoted images share slots, blobs and the end of a run, with a mover that only takes time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.abc
import pytest

from _regsync.errors import RegistryError
from _regsync.oci.manifest import Descriptor, Manifest
from _regsync.registry.repository import Repository
from _regsync.state import Knowledge, RepositoryKey
from _regsync.sync import schedule
from _regsync.sync.claims import Claims, ImageClaims, Step
from _regsync.sync.image import BlobResult, Image, ImageCopy, Tree
from _regsync.sync.schedule import Scheduler

pytestmark = pytest.mark.virtual_time


class At(Repository):
    """A repository at the one target. It has nothing to say but what it is called."""

    host: Any = SimpleNamespace(key="target.test", registry=SimpleNamespace(kind="generic"))
    name = ""
    key = RepositoryKey("", "")
    store_key = RepositoryKey("", "")

    def __init__(self, name: str) -> None:
        self.name = name
        self.key = self.store_key = RepositoryKey(self.host.key, name)

    def name_of(self, reference: str) -> str:
        return f"{self.host.key}/{self.name}:{reference}"


class Stage:
    """A scheduler whose mover sleeps for as long as a blob has bytes, and notes what it did."""

    def __init__(self, slots: int = 3) -> None:
        self.knowledge = Knowledge()
        # What was copied and put, and what is being copied now.
        self.trace: list[str] = []
        self.copying = Counter[str]()
        self.most_copying = Counter[str]()
        self.most_images = 0
        # Digests whose first copy fails, and how images ended.
        self.broken: set[str] = set()
        self.ended: dict[str, ImageCopy] = {}
        self._slots = slots
        self._tasks: anyio.abc.TaskGroup | None = None
        self.scheduler: Scheduler

    async def run(
        self, *images: Image, during: Callable[[], Coroutine[Any, Any, None]] | None = None
    ) -> None:
        """Let the images come to their ends; fails when they do not."""
        with anyio.fail_after(10_000):
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                self.scheduler = Scheduler(
                    self,  # type: ignore[arg-type]
                    self.knowledge,
                    SimpleNamespace(),  # type: ignore[arg-type]
                    slots=self._slots,
                    start=tasks.start_soon,
                    queue_lookup=lambda source, item: tasks.start_soon(item),  # type: ignore[arg-type]
                    lists=None,
                    on_end=self._end,
                    transport=SimpleNamespace(),  # type: ignore[arg-type]
                )
                for image in images:
                    self.scheduler.add_image(image)
                self.scheduler.advance()
                if during is not None:
                    await during()

    def _end(self, delivery: ImageCopy) -> None:
        self.ended[delivery.reference] = delivery

    async def copy_blob(self, step: Step, source: Any, target: Any, bytes_from: object) -> str:
        """Stand for `BlobTransfer.copy_blob`."""
        _, name = step.claims.where
        self.copying[name] += 1
        self.most_copying[name] = max(self.most_copying[name], self.copying[name])
        self.most_images = max(self.most_images, len(self.scheduler.images))
        await anyio.sleep(step.blob.size)
        self.copying[name] -= 1
        if step.blob.digest in self.broken:
            self.broken.remove(step.blob.digest)
            raise RegistryError("refused", status=400)
        if step.mount_from is not None:
            self.knowledge.record_mount(target.host.key)
        self.trace.append(f"{name} {step.blob.digest}{' mounted' if step.mount_from else ''}")
        return BlobResult.UPLOADED if step.mount_from is None else BlobResult.MOUNTED

    async def put_manifests(
        self, image: Image, own_manifests: frozenset[str], on_put: Callable[[Manifest], None]
    ) -> None:
        """Stand for `BlobTransfer.put_manifests`."""
        for child in image.tree.children:
            if child.digest in own_manifests:
                on_put(child)
        self.trace.append(f"{image.reference} put")


def image(
    name: str, *blobs: tuple[str, int], into: str = "", then: tuple[Image, ...] = ()
) -> Image:
    """Return an image whose blobs take so many seconds each; its tag is its name, and so is its
    repository if `into` names none.
    """
    layers = tuple(
        Descriptor("application/octet-stream", digest(blob), size) for blob, size in blobs
    )
    root = Manifest("image", digest(f"root of {name}"), b"", layers=layers)
    source, target = At(into or name), At(into or name)
    delivery = ImageCopy(source, target, name, name, root.digest, root.digest, 0.0, False, None)
    delivery.unfinished_images += len(then)
    for each in then:
        each.copy = delivery
    return Image(delivery, Tree(root, (), root.digest), name, b"", list(then))


def digest(name: str) -> str:
    """Return a name that can be read, in a digest's form."""
    return f"sha256:{name.encode().hex():0>64}"


async def test_sixteen_blobs_of_an_image_are_copied_at_the_same_time():
    stage = Stage()
    await stage.run(image("a", *((f"blob {number}", 1) for number in range(40))))
    assert stage.most_copying == {"a": 16}
    assert len(stage.trace) == 41
    assert stage.trace[-1] == "a put"
    assert stage.ended["a"].error is None


async def test_an_image_that_waits_for_another_one_holds_no_slot():
    """I8: of two slots the second one goes from the follower to a third image."""
    stage = Stage(slots=2)
    images = [
        image("a", ("shared", 100)),
        image("b", ("shared", 100), ("own", 1)),
        image("c", ("another", 10)),
    ]
    await stage.run(*images)
    shared, own, another = digest("shared"), digest("own"), digest("another")
    assert stage.trace == [
        f"b {own}",
        f"c {another}",
        "c put",
        f"a {shared}",
        "a put",
        f"b {shared} mounted",
        "b put",
    ]


async def test_only_so_many_images_are_promoted_and_the_others_come_in_their_turn(monkeypatch):
    """Those that wait count too."""
    monkeypatch.setattr(schedule, "_MAX_PROMOTED", 3)
    stage = Stage(slots=5)
    await stage.run(*(image(name, ("shared", 10)) for name in "abcdefgh"))
    assert stage.most_images == 3
    assert set(stage.ended) == set("abcdefgh")
    assert [text for text in stage.trace if "mounted" not in text][:2] == [
        f"a {digest('shared')}",
        "a put",
    ]


async def test_the_blobs_of_a_failed_image_that_are_on_their_way_go_on():
    stage = Stage()
    stage.broken.add(digest("broken"))
    await stage.run(image("a", ("broken", 1), ("slow", 50)), image("b", ("slow", 50)))
    slow = digest("slow")
    assert stage.trace == [f"a {slow}", f"b {slow}", "b put"]
    assert stage.ended["a"].error is not None
    assert stage.ended["b"].error is None


async def test_an_image_that_waited_for_a_failed_one_copies_what_that_owned():
    stage = Stage(slots=1)
    stage.broken.add(digest("broken"))
    await stage.run(image("a", ("broken", 1)), image("second", ("broken", 1), into="a"))
    assert stage.trace == [f"a {digest('broken')}", "second put"]
    assert stage.ended["a"].error is not None
    assert stage.ended["second"].error is None
    assert not stage.scheduler.images


async def test_artifacts_follow_their_subject_before_other_images():
    stage = Stage(slots=1)
    await stage.run(image("a", ("one", 1), then=(image("signature"),)), image("b", ("two", 1)))
    puts = [text for text in stage.trace if text.endswith("put")]
    assert puts == ["a put", "signature put", "b put"]


async def test_artifacts_of_a_failed_image_are_not_put():
    stage = Stage()
    stage.broken.add(digest("one"))
    signature = image("signature")
    signature.artifact = "a signature"
    await stage.run(image("a", ("one", 1), then=(signature,)))
    assert stage.trace == []
    assert stage.ended["a"].artifacts_failed == 1
    assert stage.ended["a"].unfinished_images == 0


async def test_a_drain_lets_end_what_has_begun_and_leaves_the_rest():
    """The follower waits for an image that ends, the third one has no slot yet."""
    stage = Stage(slots=2)

    async def drain() -> None:
        await anyio.sleep(5)
        stage.scheduler.drain()

    images = [
        image("a", ("shared", 100)),
        image("b", ("shared", 100), ("own", 10)),
        image("c", ("late", 1)),
    ]
    await stage.run(*images, during=drain)
    assert [text for text in stage.trace if text.endswith("put")] == ["a put", "b put"]
    assert "c" not in stage.ended
    assert len(stage.scheduler.pending) == 1


async def test_a_drain_does_not_wait_for_an_image_whose_blob_will_not_come():
    """`a` commits what `b` is to mount; `b` had not begun, so it is left, and `c`, which had begun
    and waits for the same blob in the same repository, with it.
    """
    stage = Stage(slots=2)

    async def drain() -> None:
        await anyio.sleep(5)
        stage.scheduler.drain()

    images = [
        image("a", ("shared", 20)),
        image("b", ("shared", 20)),
        image("c", ("shared", 20), ("own", 1), into="b"),
    ]
    began = anyio.current_time()
    await stage.run(*images, during=drain)
    assert stage.trace == [f"b {digest('own')}", f"a {digest('shared')}", "a put"]
    assert [each.reference for each in stage.scheduler.images] == ["b", "c"]
    assert anyio.current_time() - began == 20


async def test_images_that_nobody_would_ever_serve_do_not_keep_a_run_from_ending(monkeypatch):
    """It cannot happen while rule 9 holds; if it does, the run says so (I9)."""

    def promote(claims: Claims, work: ImageClaims) -> list[Step]:
        work.missing = 1
        return []

    monkeypatch.setattr(Claims, "promote", promote)
    stage = Stage()
    await stage.run(image("a", ("one", 1)))
    assert [each.reference for each in stage.scheduler.images] == ["a"]
    assert stage.ended == {}


async def test_the_blob_that_most_images_want_goes_first(monkeypatch):
    monkeypatch.setattr(schedule, "_MAX_BLOB_TASKS", 1)
    stage = Stage()

    async def expect() -> None:
        wanted = {digest("a"): 2, digest("b"): 3, digest("c"): 1}
        stage.scheduler.manifests_by_blob.update(wanted)

    await stage.run(image("x", ("a", 1), ("c", 1), ("b", 1)), during=expect)
    assert stage.trace == [f"x {digest('b')}", f"x {digest('a')}", f"x {digest('c')}", "x put"]


async def test_of_images_that_want_a_slot_the_oldest_gets_it():
    stage = Stage(slots=2)
    stage.knowledge.record_mount("target.test")
    followers = [image(name, ("shared", 5)) for name in ("b", "c", "d")]
    await stage.run(image("a", ("shared", 5)), *followers, image("e", ("long", 1000)))
    assert stage.trace[2:-2] == [
        line
        for name in ("b", "c", "d")
        for line in (f"{name} {digest('shared')} mounted", f"{name} put")
    ]
