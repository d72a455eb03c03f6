"""What undisturbed runs cost, held against the least that they could (tests/least.py).

Registries are the harness's, on a clock that jumps; nothing fails. Scenes are a table, and random ones.
Each is run cold, again, after the source has changed, and again; and with its state lost between
runs. Where the program knowingly spends more, a row says how much and a comment says why.

    COSTS=1000:200 pytest tests/test_costs.py      two hundred other random scenes
    pytest --as-budget tests/test_costs.py         for a program that may be cheaper
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from conformance.images import Image, Seed
from conformance.walks import fallback_lists
from tests.costs import BYTES, asked, costs
from tests.ends import Virtual, held, tags
from tests.least import Costs, Repository, Tally, Terms, least
from tests.mirrors import SIGNATURE, Mirror
from tests.thinning import seeds

pytestmark = pytest.mark.anyio

Images = Mapping[str, Mapping[str, Image]]  # by repository and tag


class Spent(NamedTuple):
    """What is spent besides the least, or may be."""

    target: Mapping[str, int] = MappingProxyType({})  # each of them
    source: Mapping[str, int] = MappingProxyType({})


NOTHING = Spent()

# Where the program knowingly spends more than the least.
#
# In a repository that holds images of others somebody may have left any blob. One question for a blob that
# is known to be there shows that the POST of an upload tells of those that are (design, rule 11).
# Without a state a tag may be looked up before its neighbour has told what is there: then a HEAD asks.
QUESTION = Spent({"there": 1})
ONE_HEAD = Spent({"HEAD blob": 1})


def unknown(blobs: int) -> Spent:
    """Where no manifest is at hand that names a blob which is there, each is asked for, in either way.

    Then digests were asked for first, or tags never move, or the only tag has moved since the state was
    lost.
    """
    return Spent({"there": blobs, "HEAD blob": blobs})


@dataclass(frozen=True)
class Scene:
    """What a source has, one state after the other, and how that is copied."""

    states: Sequence[Images]
    targets: Sequence[str] = ("target",)
    # Artifacts of the first state; None where they are not copied.
    attached: Sequence[Image] | None = None
    source_has_api: bool = True
    target_has_api: bool = True
    is_listed: bool = True
    head_first: bool = False
    is_immutable: bool = False
    # What single targets hold before the first run.
    given: Mapping[str, Images] = field(default_factory=dict)
    # Where each repository is copied to, if not to one of the same name.
    to: Sequence[str] = ()
    is_locked: bool = False
    target_mounts: bool = True
    # What a run after a change spends besides: with a state, and without, there also at the source.
    kept: Spent = NOTHING
    lost: Spent = NOTHING
    # What these and a cold run may spend, but need not.
    lost_at_most: Spent = NOTHING
    cold_at_most: Spent = NOTHING


class Stage:
    """A scene's registries, and what its targets hold."""

    def __init__(self, world: Virtual, directory: Path, scene: Scene) -> None:
        able = {"referrers_api": scene.target_has_api, "mounts": scene.target_mounts}
        options = {
            **dict.fromkeys(scene.targets, able),
            "source": {"referrers_api": scene.source_has_api},
        }
        self.mirror = Mirror(world, directory, *scene.targets, of=options)
        self.scene = scene
        # By target and repository: what tags name, and all that was ever there.
        self.before: dict[str, dict[str, Mapping[str, Image]]] = {}
        self.ever: dict[str, dict[str, list[Image]]] = {}
        for name, place in self.mirror.targets.items():
            self.before[name] = {**scene.given.get(name, {})}
            self.ever[name] = {repo: [*each.values()] for repo, each in self.before[name].items()}
            for repository, tagged in self.before[name].items():
                for tag, image in tagged.items():
                    image.load_into(place.app, repository, tag)
        self.is_stateful = False

    def load(self, images: Images) -> None:
        app = self.mirror.source.app
        for repository, tagged in images.items():
            for tag, image in tagged.items():
                image.load_into(app, repository, tag)
            attached = self.attached(tagged)
            for artifact in attached:
                artifact.load_into(app, repository)
            if not self.scene.source_has_api:
                for tag, listed in fallback_lists(attached).items():
                    listed.load_into(app, repository, tag)

    def attached(self, tagged: Mapping[str, Image]) -> list[Image]:
        """Return the artifacts that hang on images of a repository."""
        return repository_of(tagged, self.scene.attached).hung_on(
            digest for image in tagged.values() for digest in image.manifests
        )

    def repositories(self, images: Images) -> list[Repository]:
        """Say what a run finds."""
        found = []
        for name, tagged in images.items():
            for to in self.scene.to or (name,):
                found.append(
                    replace(
                        repository_of(tagged, None),
                        name=to,
                        source=name,
                        attached=self.attached(tagged) if self.scene.attached is not None else None,
                        before=[each.get(to, {}) for each in self.before.values()],
                        others=[each.get(to, []) for each in self.ever.values()],
                        is_listed=self.scene.is_listed,
                        is_immutable=self.scene.is_immutable,
                    )
                )
        return found

    def mappings(self, images: Images) -> list[dict[str, Any]]:
        never = {"immutable_tags": "*"} if self.scene.is_immutable else {}
        return [
            {
                "from": name,
                "to": to,
                "tags": tags(*(["v*"] if self.scene.is_listed else tagged), **never),
                "artifacts": {"enabled": self.scene.attached is not None},
            }
            for name, tagged in images.items()
            for to in self.scene.to or (name,)
        ]

    def forget(self) -> None:
        """Lose the state."""
        shutil.rmtree(self.mirror.cache)
        self.is_stateful = False

    async def run(self, images: Images, more: Spent = NOTHING, at_most: Spent = NOTHING) -> None:
        """Run once, and hold it against the least."""
        self.check(await self.sync(images), more, at_most)

    def check(self, bound: Costs, more: Spent = NOTHING, at_most: Spent = NOTHING) -> None:
        costs(self.mirror.source, bound.source, more.source, at_most.source)
        for place, tally in zip(self.mirror.targets.values(), bound.targets, strict=True):
            costs(place, tally, more.target, at_most.target)

    async def sync(self, images: Images) -> Costs:
        """Run once, see that all is there, and return the least."""
        self.load(images)
        scene = self.scene
        source = {"url": self.mirror.source.url, "head_first": scene.head_first}
        self.mirror.write(*self.mappings(images), registries={"source": source})
        if scene.is_locked:
            assert (await self.mirror.run("lock")).status == 0
        ran = await self.mirror.run("sync", *(["--locked"] if scene.is_locked else []))
        assert (ran.status, ran.failed) == (0, []), ran.err

        terms = Terms(
            self.is_stateful,
            scene.is_locked,
            scene.head_first,
            scene.source_has_api,
            scene.target_has_api,
            scene.target_mounts,
        )
        repositories = self.repositories(images)
        here = {each.name for each in repositories}
        elsewhere = [
            image
            for name, images_there in self.ever[scene.targets[0]].items()
            # Only a state knows of repositories that this run has nothing to do with.
            if self.is_stateful and name not in here
            for image in images_there
        ]
        self.note(repositories)
        self.last = repositories, terms
        return least(repositories, terms, elsewhere)

    def note(self, repositories: Sequence[Repository]) -> None:
        """Check that the targets hold what they should, and remember it."""
        for each in repositories:
            hung = each.hung_on(
                digest for image in each.wanted().values() for digest in image.manifests
            )
            for place in self.mirror.targets.values():
                assert all(
                    held(place, each.name, image) for image in (*each.wanted().values(), *hung)
                )
                named = place.app.repositories[each.name].tags
                assert {tag: named[tag] for tag in each.now} == {
                    tag: image.top for tag, image in each.wanted().items()
                }
            for name in self.scene.targets:
                ever = self.ever[name].get(each.name, [])
                self.ever[name][each.name] = [*ever, *each.wanted().values(), *hung]
                self.before[name][each.name] = each.wanted()
        self.is_stateful = True


def repository_of(tagged: Mapping[str, Image], attached: Sequence[Image] | None) -> Repository:
    return Repository("", tagged, [{}], attached=attached)


# Scenes.

BIG = 70_000  # bytes of a layer


def single() -> Images:
    return {"app": {"v1": Seed(5).image(sizes=(BIG, BIG))}}


def aliases() -> Images:
    image = Seed(5).image(sizes=(BIG,))
    return {"app": {"v1.0": image, "v1": image, "v": image}}


def repeated() -> Images:
    """Return an image that names a layer three times, and one that has it too."""
    seed = Seed(5)
    layer = seed.layer(BIG)
    three, one = seed.image(layers=[layer, layer, layer]), seed.image(layers=[layer])
    return {"app": {"v1": three, "v2": one}}


def empty_layer() -> Images:
    return {"app": {"v1": Seed(5).image(layers=[b"", b"{}", Seed(6).layer(50)])}}


def indexes(*architectures: str) -> Images:
    seed = Seed(5)
    base = seed.layer(BIG)
    images = [
        seed.image(layers=[base, seed.layer(BIG)], architecture=name) for name in architectures
    ]
    return {"app": {"v1": seed.index(images)}}


def several_tags(count: int = 4, repositories: int = 1) -> Images:
    """Return repositories of tags, all on one base."""
    seed = Seed(5)
    base = [seed.layer(BIG), seed.layer(900)]
    return {
        f"team/app{place}": {
            f"v{tag}": seed.image(layers=[*base, seed.layer(500 + tag)]) for tag in range(count)
        }
        for place in range(repositories)
    }


def changed(
    images: Images, new: Mapping[str, Image], repository: str = "team/app0"
) -> list[Images]:
    """Return two states, where tags of one repository come or move."""
    return [images, {**images, repository: {**images[repository], **new}}]


def layers_of(image: Image) -> list[bytes]:
    return [image.blobs[each["digest"]] for each in image.document["layers"]]


def moved_tag() -> list[Images]:
    """Let a tag move twice to an image on the same base."""
    images = several_tags()
    base = layers_of(images["team/app0"]["v2"])[:2]
    once, again = (
        changed(images, {"v2": Seed(9).image(layers=[*base, Seed(8).layer(size)])})
        for size in (300, 400)
    )
    return [*once, again[1]]


def one_blob_moved() -> list[Images]:
    """Let a tag move to an image that has nothing new but its config."""
    images = several_tags(1)
    return changed(images, {"v0": Seed(9).image(layers=layers_of(images["team/app0"]["v0"])[:2])})


def new_tags() -> list[Images]:
    images = several_tags()
    base = layers_of(images["team/app0"]["v2"])[:2]
    return changed(
        images, {f"v1{n}": Seed(n).image(layers=[*base, Seed(n).layer(9)]) for n in (0, 1)}
    )


def uneven() -> Scene:
    """Give one target all of the tags, one most of them, and one none."""
    images = several_tags(12)
    most = {"team/app0": dict(list(images["team/app0"].items())[:10])}
    return Scene(
        [images],
        ("all", "most", "none"),
        given={"all": images, "most": most},
        is_immutable=True,
        cold_at_most=unknown(8),
    )


def moved_together() -> list[Images]:
    new = Seed(9).image(sizes=(BIG,))
    return changed(several_tags(), {"v0": new, "v1": new, "v2": new})


def moved_back() -> list[Images]:
    """Let a tag move to what another tag names."""
    images = several_tags()
    return changed(images, {"v3": images["team/app0"]["v0"]})


def grown_index() -> list[Images]:
    """Let an index move that keeps a child."""
    seed = Seed(5)
    kept, old, new = (seed.image(architecture=name) for name in ("amd64", "arm64", "arm64"))
    return [{"app": {"v1": seed.index([kept, old])}}, {"app": {"v1": seed.index([kept, new])}}]


def grown_beside() -> list[Images]:
    """Let a tag come beside an index; it has its child."""
    seed = Seed(5)
    child, other = (seed.image(architecture=name) for name in ("amd64", "arm64"))
    old, grown = seed.index([child]), seed.index([child, other])
    return [{"app": {"v1": old}}, {"app": {"v1": old, "v2": grown}}]


def another_repository() -> list[Images]:
    """Let a repository come that needs what another has."""
    first = several_tags(2, repositories=2)
    return [{"team/app0": first["team/app0"]}, {"team/app1": first["team/app1"]}]


SIGNED = Seed(7)
SIGNED_INDEX = SIGNED.index([SIGNED.image(architecture=each) for each in ("amd64", "arm64")])
SIGNED_IMAGES: Images = {
    "app": {"v0": SIGNED.image(), "v1": SIGNED_INDEX, "v2": SIGNED.image(sizes=(30,))},
    "other": {"v0": SIGNED.image(), "v1": SIGNED.image()},
}


def attached() -> list[Image]:
    """Return an SBOM that is signed, and signatures of an index, of its child, of another image."""
    child = SIGNED_INDEX.document["manifests"][0]["digest"]
    below = replace(SIGNED_INDEX, top=child, media_type=SIGNED_INDEX.manifests[child][0])
    bill = SIGNED.artifact(SIGNED_IMAGES["app"]["v0"])
    on = (bill, SIGNED_INDEX, below, SIGNED_IMAGES["other"]["v1"])
    return [bill, *(SIGNED.artifact(each, SIGNATURE) for each in on)]


ATTACHED = attached()
FALLBACK = {"source_has_api": False, "target_has_api": False}
# Without a state the child is fetched again, to know what it names, and each of its blobs is asked for.
AGAIN = {BYTES: 557}
CHILD_AGAIN = Spent({"PUT manifest": 1, **AGAIN}, {"GET manifest": 1, **AGAIN})
# Three repositories may each be sent the two layers of the base before the registry has refused a mount.
SENT_AGAIN = Spent({}, {"GET blob": 6, BYTES: 3 * 77_000})
ASKED = {"kept": QUESTION, "lost": QUESTION}
SIGNED_SCENE = Scene([SIGNED_IMAGES], attached=ATTACHED)

SCENES: Mapping[str, Scene] = {
    "single": Scene([single()]),
    "aliases": Scene([aliases()]),
    "repeated": Scene([repeated()]),
    "empty layer": Scene([empty_layer()]),
    "index": Scene([indexes("amd64", "arm64", "s390x")]),
    "repositories": Scene([several_tags(2, repositories=4)]),
    "repositories, literal tags": Scene([several_tags(2, repositories=4)], is_listed=False),
    "three targets": Scene([several_tags(2, repositories=4)], ("a", "b", "c")),
    "several names": Scene([several_tags()], to=("one", "two", "three")),
    "moved": Scene(moved_tag(), **ASKED),
    "moved, three targets": Scene(moved_tag(), ("a", "b", "c"), **ASKED),
    "moved, head first": Scene(
        moved_tag(), head_first=True, kept=QUESTION, lost_at_most=unknown(4)
    ),
    "moved, one blob": Scene(one_blob_moved(), kept=QUESTION, lost_at_most=unknown(3)),
    "moved together": Scene(moved_together(), **ASKED, lost_at_most=ONE_HEAD),
    "moved back": Scene(moved_back()),
    "new": Scene(new_tags(), **ASKED),
    "new, literal tags": Scene(new_tags(), is_listed=False, **ASKED),
    "immutable, of which targets lack some": uneven(),
    "new among immutable": Scene(
        new_tags(), is_immutable=True, kept=QUESTION, lost_at_most=unknown(8)
    ),
    "index that keeps a child": Scene(
        grown_index(), kept=QUESTION, lost=CHILD_AGAIN, lost_at_most=unknown(6)
    ),
    "index beside one that has its child": Scene(
        grown_beside(), kept=QUESTION, lost_at_most=Spent(unknown(3).target, CHILD_AGAIN.source)
    ),
    "another repository": Scene(another_repository()),
    "head first": Scene([several_tags(2, repositories=4)], head_first=True),
    "locked": Scene([several_tags(2, repositories=4)], is_locked=True),
    "locked, moved": Scene(moved_tag(), is_locked=True, kept=QUESTION, lost_at_most=unknown(4)),
    "no mounts": Scene(
        [several_tags(2, repositories=4)], target_mounts=False, cold_at_most=SENT_AGAIN
    ),
    "signed": SIGNED_SCENE,
    "signed, three targets": replace(SIGNED_SCENE, targets=("a", "b", "c")),
    "signed, head first": replace(SIGNED_SCENE, head_first=True),
    "signed, fallback": replace(SIGNED_SCENE, **FALLBACK),
    "signed, fallback at the source": replace(SIGNED_SCENE, source_has_api=False),
    "signed, fallback at the target": replace(SIGNED_SCENE, target_has_api=False),
    "signed, fallback, head first": replace(SIGNED_SCENE, head_first=True, **FALLBACK),
}


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
async def test_runs_cost_the_least_with_the_state_of_those_before(world, tmp_path, scene):
    """And where nothing has changed also without."""
    stage = Stage(world, tmp_path, scene)
    first, *later = scene.states
    await stage.run(first, at_most=scene.cold_at_most)
    await stage.run(first)
    for number, images in enumerate(later):
        # What was asked in one run is known to the next one.
        await stage.run(images, scene.kept if not number else NOTHING)
        await stage.run(images)
    stage.forget()
    await stage.run(scene.states[-1])


CHANGES = {name: scene for name, scene in SCENES.items() if len(scene.states) > 1}


@pytest.mark.parametrize("scene", CHANGES.values(), ids=CHANGES)
async def test_runs_after_a_change_cost_the_least_without_a_state(world, tmp_path, scene):
    stage = Stage(world, tmp_path, scene)
    first, *later = scene.states
    await stage.run(first, at_most=scene.cold_at_most)
    for images in later:
        stage.forget()
        await stage.run(images, scene.lost, scene.lost_at_most)


# One image, layouts.


@pytest.mark.parametrize("is_signed", [False, True])
async def test_a_copy_of_one_image_costs_the_least(mirror, is_signed):
    """With artifacts a source that is not listed is asked for cosign's three tags of the image."""
    image = mirror.push("v1")
    attached = [mirror.attach(image)] if is_signed else None
    mirror.write()
    names = [f"http://{name}.test/app:v1" for name in ("source", "target")]
    options = [] if is_signed else ["--no-artifacts"]
    wanted = Repository("app", {"v1": image}, [{}], attached=attached, is_listed=False)
    assert (await mirror.run("copy", *names, *options)).statuses() == ["synced"]
    bound = least([wanted], Terms())
    costs(mirror.source, bound.source, {"HEAD manifest": 3 * is_signed})
    costs(mirror.target, bound.targets[0])

    if is_signed:
        return  # one that is copied by hand is looked at again
    assert (await mirror.run("copy", *names, *options)).statuses() == ["skipped"]
    bound = least([replace(wanted, before=[{"v1": image}])], Terms(is_stateful=True))
    costs(mirror.source, bound.source)
    costs(mirror.target, bound.targets[0])


async def test_a_layout_costs_its_registry_what_another_registry_would(mirror, tmp_path):
    """As a target: what it has is not asked for again. As a source: it is read as often as it likes."""
    images = several_tags(2)["team/app0"]
    for tag, image in images.items():
        mirror.push(tag, image)
    layout = f"oci-layout:{tmp_path / 'disk'}"
    mapping = {"from": "app", "tags": tags("v*"), "artifacts": {"enabled": False}}
    wanted = Repository("app", images, [{}])
    for is_stateful in (False, True):
        ran = await mirror.sync(mapping, registries={"target": {"url": layout}})
        assert (ran.status, ran.failed) == (0, []), ran.err
        costs(mirror.source, least([wanted], Terms(is_stateful=is_stateful)).source)
        wanted = replace(wanted, before=[images])

    ran = await mirror.sync(mapping, registries={"source": {"url": layout}})
    assert (ran.status, ran.failed) == (0, []), ran.err
    costs(mirror.target, least([replace(wanted, before=[{}])], Terms()).targets[0])


# The ruler itself.


@pytest.mark.parametrize("as_budget", [False, True])
async def test_less_is_allowed_by_a_budget_alone_and_more_by_none(mirror, monkeypatch, as_budget):
    monkeypatch.setattr("tests.costs.as_budget", as_budget)
    mirror.push("v1")
    assert (await mirror.sync({"from": "app", "tags": tags("v1")})).status == 0
    spent = asked(mirror.source)
    less = Tally(spent.requests - Counter(["GET manifest"]), spent.bytes)
    more = Tally(spent.requests + Counter(["GET tag_list"]), spent.bytes + 1)
    costs(mirror.source, spent)
    costs(mirror.source, less, {"GET manifest": 1})
    costs(mirror.source, less, at_most={"GET manifest": 2})
    with pytest.raises(AssertionError, match="1 GET manifest, not 0"):
        costs(mirror.source, less)
    refused = pytest.raises(AssertionError, match=r"0 GET tag_list, not 1; .* bytes, not")
    with nullcontext() if as_budget else refused:
        costs(mirror.source, more)


# Random scenes.


def random_scene(random: Random, seed: Seed) -> Scene:
    """Make repositories whose images share layers and children, and let some of their tags move."""
    bases = [[seed.layer(700 + 10 * base + place) for place in range(3)] for base in range(2)]

    def image(architecture: str = "amd64") -> Image:
        own = [seed.layer(random.randrange(50, 900)) for _ in range(random.randrange(1, 3))]
        base = random.choice(bases)[: random.randrange(4)]
        return seed.image(layers=[*base, *own], architecture=architecture)

    def any_image() -> Image:
        if random.random() < 0.7:
            return image()
        return seed.index(
            [image(name) for name in ("amd64", "arm64", "s390x")[random.randrange(3) :]]
        )

    pool = [any_image() for _ in range(8)]
    first = {
        f"team/app{place}": {
            f"v{tag}": random.choice(pool) for tag in range(random.randrange(1, 5))
        }
        for place in range(random.randrange(1, 4))
    }
    is_immutable = random.random() < 0.2
    states = [first]
    for _ in range(2):
        tagged = {name: dict(images) for name, images in states[-1].items()}
        for images in tagged.values():
            for tag in images:
                if not is_immutable and random.random() < 0.3:
                    images[tag] = random.choice([*pool, any_image()])
            if random.random() < 0.5:
                images[f"v{len(images)}"] = any_image()
        states.append(tagged)
    attached = [
        seed.artifact(each)
        for each in {
            each.top: each
            for state in states
            for images in state.values()
            for each in images.values()
        }.values()
        if random.random() < 0.3
    ]
    attached += [seed.artifact(each, SIGNATURE) for each in attached if random.random() < 0.5]
    source_has_api = random.random() < 0.7
    return Scene(
        states,
        ["a", "b", "c"][: random.choice([1, 1, 2, 3])],
        attached if random.random() < 0.5 else None,
        source_has_api=source_has_api,
        target_has_api=random.random() < 0.7,
        # Without the API the source may be listed for its fallback tags.
        is_listed=random.random() < 0.6 or not source_has_api,
        head_first=random.random() < 0.3,
        is_immutable=is_immutable,
    )


# Without a state a blob that was found in a repository may be mounted from there, while the manifest that
# names it is under way.
@pytest.mark.provokes("mount_uncommitted")
@pytest.mark.parametrize("number", seeds("COSTS", 16, 300))
async def test_a_random_scene_costs_the_least(world, tmp_path, number):
    random = Random(number)
    scene = random_scene(random, Seed(number))
    stage = Stage(world, tmp_path, scene)
    first, second, third = scene.states
    await stage.run(first)
    await stage.run(first)
    bound = await stage.sync(second)
    new = max(tally.requests["POST upload"] for tally in bound.targets)
    heads = new if scene.is_immutable else 1
    stage.check(bound, at_most=Spent({**QUESTION.target, "HEAD blob": heads}))
    await stage.run(second)

    stage.forget()
    await stage.run(second)
    if scene.attached is None:
        stage.forget()
        await stage.sync(third)
        check_blind(stage)


def check_blind(stage: Stage) -> None:
    """Hold a run that has lost its state against a least that knows nothing but the tops of tags.

    What other programs would not know either it may find out, by one request for each blob: it may ask
    by HEAD, or by the POST of an upload, or mount what it could have found where it goes.
    """
    repositories, terms = stage.last
    knowing, blind = (
        least(repositories, terms),
        least([blinded(each) for each in repositories], terms),
    )
    for place, low, high in zip(
        (stage.mirror.source, *stage.mirror.targets.values()),
        (knowing.source, *knowing.targets),
        (blind.source, *blind.targets),
        strict=True,
    ):
        blobs = high.requests["POST upload"] + high.requests["mount"]
        found_out = {"there": blobs, "HEAD blob": blobs, "mount": blobs}
        low.requests["mount"] = 0
        more = Counter(high.requests)
        more.subtract(low.requests)
        costs(place, low, at_most={**more, BYTES: high.bytes - low.bytes, **found_out})


def blinded(each: Repository) -> Repository:
    """Return the same where targets hold no more than the tops of their tags."""
    before = [
        {
            tag: replace(image, manifests={image.top: image.manifests[image.top]}, blobs={})
            for tag, image in tagged.items()
        }
        for tagged in each.before
    ]
    return replace(each, before=before, others=[])
