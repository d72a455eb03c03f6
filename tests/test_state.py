"""A state that says more than is true: the run that finds out makes it good (docs/design.md section 7,
I5), and nobody is harmed by what others put where it is kept (R12, R16).

Targets lose what the state says they hold. Whoever may write into `cache_dir` may put there what he
likes: pipes and links. It costs requests, and no image is wrong.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from conformance.images import Image, Seed
from conformance.messages import Answer, Request, Response
from tests.ends import Ran, Virtual, drop_state, held, tags
from tests.mirrors import Mirror, asked
from tests.states import entries

# What a target says when it refuses a manifest: all that it lacks, the first of it, or no more than
# that it does not like it.
SAYS = pytest.mark.parametrize("says", ["all", "the first", "nothing"])
LOST = pytest.mark.provokes("manifest_names_absent")


class Holding(Mirror):
    """A mirror without artifacts, of images by tag."""

    def __init__(self, world: Virtual, directory: Path) -> None:
        super().__init__(world, directory)
        self.app = self.target.app

    def hold(self, repository: str = "app", **images: Image) -> dict[str, Image]:
        for tag, image in images.items():
            image.load_into(self.source.app, repository, tag)
        return images

    async def copy(self, *names: str, **top: Any) -> Ran:
        """Copy these tags."""
        mapping = {"from": "app", "tags": tags(*names), "artifacts": {"enabled": False}}
        return await self.sync(mapping, **top)

    async def heal(self, *names: str, says: str = "all", **top: Any) -> Counted:
        """Copy tags that share with others what the target has lost."""
        self.app.amend = refusing(says)
        ran = await self.copy(*names, **top)
        assert (ran.status, ran.statuses()) == (0, ["synced"] * len(names)), ran.err
        return Counted(self)


class Counted:
    """What a run has put and fetched."""

    def __init__(self, mirror: Mirror) -> None:
        puts = mirror.target.journal.matching
        self.refused = len(puts("PUT", "manifest", status=400))
        self.put = len(puts("PUT", "manifest", status=201))
        self._mirror = mirror

    def fetched(self, *digests: str, kind: str = "blob") -> list[int]:
        count = self._mirror.source.journal.count
        return [count("GET", kind, reference=digest) for digest in digests]


def refusing(says: str) -> Callable[[Request, Answer], Answer]:
    """Let a registry that refuses a manifest say so much of what it lacks."""

    def amend(request: Request, answer: Answer) -> Answer:
        is_refused = isinstance(answer, Response) and answer.status == 400
        if not is_refused or (request.method, request.kind) != ("PUT", "manifest"):
            return answer
        errors = json.loads(answer.body)["errors"]
        said = {"all": errors, "the first": errors[:1], "nothing": [{"code": "MANIFEST_INVALID"}]}
        return Response(400, [], json.dumps({"errors": said[says]}).encode())

    return amend


@pytest.fixture
def mirror(world: Virtual, tmp_path: Path) -> Holding:
    return Holding(world, tmp_path)


def layers_of(image: Image) -> list[str]:
    return [layer["digest"] for layer in image.document["layers"]]


def sharing(seed: Seed, count: int, shared: int = 1) -> dict[str, Image]:
    """Make images v0, v1 and so on, whose first layers are the same."""
    base = [seed.layer(900 + number) for number in range(shared)]
    return {f"v{n}": seed.image(layers=[*base, seed.layer(900)]) for n in range(count)}


# What a target has lost of an image that another one shares.


@LOST
@SAYS
@pytest.mark.parametrize("head", [200, 403, 405])
async def test_lost_blobs_are_brought_again_in_the_same_run(mirror, says, head):
    """Also where the target refuses to say what it holds."""
    images = mirror.hold(**sharing(mirror.seed, 2, shared=4))
    await mirror.copy("v0")
    lost = layers_of(images["v0"])[:4]
    for digest in lost:
        del mirror.app.repositories["app"].blobs[digest]
    if head != 200:
        mirror.app.faults.on("HEAD", "blob").status(head)
    run = await mirror.heal("v1", says=says)
    assert held(mirror.target, "app", images["v1"])
    # The first refusal brings what it names; the second one all that the state was believed of.
    assert (run.refused, run.put) == (1, 1)
    assert run.fetched(*lost) == [1] * 4
    for digest in lost:
        mirror.target.journal.matching("PUT", "upload", query={"digest": digest}).exactly(1)


@LOST
@SAYS
async def test_another_tag_of_an_image_brings_what_was_lost_below_it(mirror, says):
    """The state vouches for its manifest, and so for all that it names."""
    image = sharing(mirror.seed, 1)["v0"]
    mirror.hold(v0=image, v1=image)
    await mirror.copy("v0")
    lost = layers_of(image)[0]
    del mirror.app.repositories["app"].blobs[lost]
    run = await mirror.heal("v1", says=says)
    assert held(mirror.target, "app", image)
    assert (run.refused, run.put, run.fetched(lost)) == (1, 1, [1])


def indexes(seed: Seed) -> tuple[Image, dict[str, Image]]:
    """Make indexes v0, v1 and v2, which share their first child; return that, too."""
    platforms = ("amd64", "arm64", "s390x", "riscv64")
    shared, *others = (seed.image(architecture=name) for name in platforms)
    return shared, {f"v{n}": seed.index([shared, other]) for n, other in enumerate(others)}


@LOST
@SAYS
async def test_a_lost_child_is_brought_again_with_what_it_names(mirror, says):
    lost, images = indexes(mirror.seed)
    mirror.hold(**images)
    await mirror.copy("v0")
    there = mirror.app.repositories["app"]
    del there.manifests[lost.top], there.blobs[layers_of(lost)[0]]
    await mirror.heal("v1", says=says)
    assert held(mirror.target, "app", images["v1"])
    for reference in (lost.top, "v1"):
        put = mirror.target.journal.matching("PUT", "manifest", reference=reference, status=201)
        put.exactly(1)


@LOST
async def test_a_lost_child_is_fetched_once_for_all_images_that_name_it(mirror):
    """The second image was looked up while the child was believed to be there."""
    lost, images = indexes(mirror.seed)
    mirror.hold(**images)
    one_at_a_time = {"global": {"max_concurrent_transfers": 1}}
    await mirror.copy("v0", **one_at_a_time)
    del mirror.app.repositories["app"].manifests[lost.top]
    run = await mirror.heal("v1", "v2", **one_at_a_time)
    assert all(held(mirror.target, "app", index) for index in images.values())
    assert (run.refused, run.fetched(lost.top, kind="manifest")) == (1, [1])
    mirror.target.journal.matching("PUT", "manifest", reference=lost.top, status=201).exactly(1)


@LOST
async def test_a_lost_child_that_the_source_no_longer_has_fails_its_image(mirror):
    lost, images = indexes(mirror.seed)
    mirror.hold(**images)
    await mirror.copy("v0")
    del mirror.app.repositories["app"].manifests[lost.top]
    gone = mirror.source.app.faults.on("GET", "manifest", reference=lost.top)
    gone.status(404, "MANIFEST_UNKNOWN")
    ran = await mirror.copy("v1")
    assert ran.statuses() == ["failed"]
    assert ran.images[0]["error"]["code"] == "SOURCE_ERROR"
    assert lost.top in ran.images[0]["error"]["message"] + ran.err
    mirror.target.journal.matching("PUT", "manifest", reference="v1").exactly(1)


@pytest.mark.parametrize("rule", [{}, {"immutable_tags": "*"}], ids=["", "immutable"])
@pytest.mark.parametrize("glob", ["v0", "*"])
@pytest.mark.parametrize("moved", [False, True], ids=["", "moved"])
async def test_a_target_that_lost_everything_is_brought_everything(mirror, rule, glob, moved):
    """What the state says of it is then as false as if somebody had made it up."""
    image = mirror.hold(v0=mirror.seed.image(sizes=(50, 70_000)))["v0"]
    mapping = {"from": "app", "tags": tags(glob, **rule), "artifacts": {"enabled": False}}
    assert (await mirror.sync(mapping)).statuses() == ["synced"]
    mirror.app.repositories.clear()
    if moved:
        image = mirror.hold(v0=mirror.seed.image(sizes=(50, 70_000)))["v0"]
    ran = await mirror.sync(mapping)
    assert (ran.status, ran.statuses()) == (0, ["synced"])
    assert held(mirror.target, "app", image)
    mirror.target.journal.matching("PUT", "manifest", status=400).none()


async def test_a_listing_without_tags_makes_the_state_of_its_repository_weak(mirror):
    images = mirror.hold(**sharing(mirror.seed, 3))
    await mirror.copy("v0")
    del mirror.app.repositories["app"]
    run = await mirror.heal("v1", "v2")
    assert all(held(mirror.target, "app", images[tag]) for tag in ("v1", "v2"))
    # The base is asked for by the POST that would start its upload, not believed: no manifest is
    # refused.
    assert (run.refused, run.put) == (0, 2)
    mirror.target.journal.matching("GET", "tag_list", status=404).exactly(1)
    mirror.target.journal.matching("HEAD", "manifest").none()
    mirror.target.journal.matching("PUT", "upload").exactly(5)


@LOST
@pytest.mark.parametrize("to", ["app", "beside"])
async def test_a_registry_that_has_lost_what_its_manifest_names_is_healed_without_a_state(
    mirror, tmp_path, to
):
    """In its own repository the manifest is refused, beside it the mount is: both are made good."""
    images = sharing(mirror.seed, 2)
    mirror.hold("app", v0=images["v0"])
    mirror.hold("new", v1=images["v1"])
    await mirror.copy("v0")
    drop_state(tmp_path)
    lost = layers_of(images["v0"])[0]
    del mirror.app.repositories["app"].blobs[lost]
    plain = {"artifacts": {"enabled": False}}
    ran = await mirror.sync(
        {"from": "app", "tags": tags("v0"), **plain},
        {"from": "new", "tags": tags("v1"), "to": to, **plain},
    )
    assert (ran.status, sorted(ran.statuses())) == (0, ["skipped", "synced"]), ran.err
    assert held(mirror.target, to, images["v1"])
    run = Counted(mirror)
    assert (run.refused, run.put) == (1 if to == "app" else 0, 1)
    mirror.source.journal.matching("GET", "blob").exactly(3)
    mount = {"mount": lost, "from": "app"}
    mirror.target.journal.matching("POST", "upload_start", status=202, query=mount).exactly(1)
    mirror.target.journal.matching("PUT", "upload", status=201).exactly(3)


@pytest.mark.parametrize(("status", "exit_status"), [(403, 4), (413, 2)])
async def test_a_manifest_that_is_refused_for_itself_makes_nothing_of_the_state_doubtful(
    mirror, status, exit_status
):
    """Who may not push, or pushes too much, hears nothing of blobs that are gone."""
    images = mirror.hold(**sharing(mirror.seed, 2))
    await mirror.copy("v0")
    mirror.app.faults.on("PUT", "manifest").status(status)
    ran = await mirror.copy("v1")
    assert (ran.status, ran.statuses()) == (exit_status, ["failed"]), ran.err
    assert str(status) in ran.failed[0]
    mirror.target.journal.matching("PUT", "manifest").exactly(1)
    # The shared layer, of which only the state knows, is neither asked for nor brought again.
    assert asked(mirror.source) == {"GET manifest": 1, "GET blob": 2}
    shared = layers_of(images["v0"])[0]
    assert not [each for each in mirror.target.journal.entries if shared in each.target]


@pytest.mark.parametrize("status", [413, 429, 500])
async def test_a_manifest_that_is_never_taken_starts_no_search_for_its_parts(mirror, status):
    mirror.hold(v0=mirror.seed.image())
    mirror.app.faults.on("PUT", "manifest").status(status)
    assert (await mirror.copy("v0")).status == 2
    mirror.target.journal.matching("HEAD", "blob").none()


async def test_what_a_long_run_learns_late_is_kept_too(mirror):
    """Its state is written as it goes."""
    images = mirror.hold(**sharing(mirror.seed, 3))

    async def intercept(request: Request) -> Answer | None:
        await anyio.sleep(2.0 if request.method == "PUT" else 0.0)
        return None

    mirror.app.intercept = intercept
    alone = {"global": {"max_concurrent_transfers": 1}}
    ran = await mirror.copy(*images, **alone)
    assert (ran.statuses(), ran.err) == (["synced"] * 3, "")
    assert ran.seconds > 10
    await mirror.copy(*images, **alone)
    assert asked(mirror.source) == asked(mirror.target) == {"HEAD manifest": 3}


# What others put where the state is kept.


@pytest.mark.parametrize("name", ["state.db", "state.lock", "state.db-journal"])
@pytest.mark.parametrize("what", ["pipe", "link", "other name", "directory", "dangling link"])
async def test_what_stands_where_the_state_belongs_is_waited_for_and_written_to_by_nobody(
    mirror, tmp_path, name, what
):
    """A command that does not write the state leaves it there."""
    mirror.hold(v0=mirror.seed.image())
    await mirror.copy("v0")
    victim, place = tmp_path / "victim", mirror.cache / name
    victim.write_bytes((mirror.cache / "state.db").read_bytes())
    victim.chmod(0o644)
    place.unlink(missing_ok=True)
    makes: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(place),
        "link": lambda: place.symlink_to(victim),
        "other name": lambda: place.hardlink_to(victim),
        "directory": place.mkdir,
        "dangling link": lambda: place.symlink_to(tmp_path / "made"),
    }
    makes[what]()
    before = victim.read_bytes()
    assert (await mirror.run("audit")).status == 0
    assert name in os.listdir(mirror.cache)

    mirror.hold(v1=mirror.seed.image())
    ran = await mirror.copy("v1")
    assert (ran.status, ran.statuses()) == (0, ["synced"])
    assert "Traceback" not in ran.err
    assert victim.read_bytes() == before
    assert stat.S_IMODE(victim.stat().st_mode) == 0o644
    assert not (tmp_path / "made").exists()
    if what in ("pipe", "link", "other name") and name != "state.lock":
        state = mirror.cache / "state.db"
        assert (state.stat().st_nlink, state.is_symlink()) == (1, False), "it is begun anew"
        assert entries(mirror.cache)


async def test_what_a_run_makes_is_its_users_alone_whatever_the_umask(mirror, tmp_path):
    mirror.hold(v0=mirror.seed.image())
    before = os.umask(0)
    try:
        assert (await mirror.copy("v0", **{"global": {"cache_dir": "a/b/cache"}})).status == 0
    finally:
        os.umask(before)
    made = [path for path in tmp_path.rglob("*") if path.relative_to(tmp_path).parts[0] == "a"]
    names = {str(path.relative_to(tmp_path)) for path in made}
    assert names >= {"a", "a/b", "a/b/cache", "a/b/cache/state.db"}
    assert [path for path in made if path.lstat().st_mode & 0o077] == []
