"""What hangs on an image arrives whole (docs/design.md section 6, rule 15): from registries of every
kind at registries of every kind, whatever fails on the way, and whoever else has to do with it.

The walks of conformance.walks, by the referrers API or the fallback tag and over cosign's tags,
find the same on both sides; nothing is put before its subject; a second run writes nothing. When an
image that is there is looked at again is in test_late_signatures.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

from conformance.faults import Rule
from conformance.images import (
    EMPTY_CONFIG,
    EMPTY_TYPE,
    OCI_INDEX,
    Image,
    Part,
    Seed,
    compose,
    encode,
)
from conformance.messages import Answer, Request, Response
from conformance.personas import LATE, PERSONAS, imitate
from conformance.shapes import Sample, shapes
from conformance.walks import (
    FAMILIES,
    SBOM,
    SIGNED,
    Family,
    equal,
    fallback_lists,
    family,
    has_api,
    plain,
    referrers_tag,
    walk,
)
from tests.attached import MOVES, Scene
from tests.ends import Virtual, document, only, run_regsync, tags
from tests.mirrors import SIGNATURE, Mirror, SignedMirror
from tests.thinning import thinned

HOUR = 3600.0
WITH_AND_WITHOUT = ("strict", "distribution")  # the referrers API
KINDS = [name for name in PERSONAS if name.startswith(("referrers-", "unknown-"))]
KINDS += ["strict", "distribution", "old"]


# Registries of every kind.


CELLS = [
    *thinned(itertools.product(WITH_AND_WITHOUT, WITH_AND_WITHOUT, FAMILIES)),
    *((kind, "distribution", "everything") for kind in KINDS if kind not in WITH_AND_WITHOUT),
    *(("strict", kind, "everything") for kind in KINDS if kind not in WITH_AND_WITHOUT),
]


@pytest.mark.parametrize(("source", "target", "name"), CELLS)
async def test_a_family_arrives_whole(world, tmp_path, source, target, name):
    scene = Scene(world, tmp_path, family(name), source, target)
    ran = await scene.succeed()
    scene.check_order()
    if target == "referrers-late":
        await anyio.sleep(LATE)
    scene.check()
    told = only(ran.images)["artifacts"]
    assert (told["synced"], told["failed"]) == (len(scene.made.travelling), 0)
    assert told["stripped"] == 0, "only a dry run looks for them"
    await scene.settle()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("strict", "index"),
        ("strict", "filtered"),
        ("distribution", "cosign-recursive"),
        ("distribution", "everything"),
    ],
)
async def test_a_tag_that_is_named_needs_no_listing(world, tmp_path, source, name):
    """Without the API one listing may stand for the tags of several digests, of which each would be
    asked for.
    """
    scene = Scene(world, tmp_path, family(name), source, listed=False)
    await scene.succeed()
    scene.source.journal.matching("GET", "tag_list").at_most(0 if source == "strict" else 1)
    scene.check()
    await scene.settle()


@pytest.mark.parametrize("target", WITH_AND_WITHOUT)
@pytest.mark.parametrize("name", ["nested", "index"])
async def test_copy_does_the_same(world, tmp_path, target, name):
    scene = Scene(world, tmp_path, family(name), target=target)
    ran = await scene.run("copy", "source.test/app:v1", "target.test/app:v1")
    assert (ran.status, ran.failed) == (0, []), ran.err
    scene.check_order()
    scene.check()


@pytest.mark.provokes("manifest_fetched_twice")
async def test_artifacts_are_found_when_manifests_do_not_stay_in_memory(mirror):
    """32 MiB of them do. An evicted index was taken for a trimmed one, which the source does not
    have.
    """
    signatures = list[Image]()
    for tag in ("v1", "v2"):
        large = {"large": f"{tag}{'x' * 4_100_000}"}
        children = [mirror.seed.image(architecture=each, annotations=large) for each in "abcde"]
        index = mirror.push(tag, mirror.seed.index(children))
        signatures += [mirror.attach(each) for each in (index, *children)]
    ran = await mirror.sync({"from": "app", "tags": tags("v*")})
    assert (ran.status, ran.failed) == (0, []), ran.err
    assert all(mirror.holds(each) for each in signatures)


@pytest.mark.slow
def test_from_a_real_registry_to_the_api_and_to_another(serve, docker_registries, tmp_path):
    """Debian's docker-registry, a process of its own without the API."""
    made = family("everything")
    source, other, target = docker_registries(), docker_registries(), serve()
    made.push(source)
    file = tmp_path / "mirror.yaml"
    ends = {"source": source, "api": target.address, "other": other}
    file.write_text(document(ends, {"from": "app", "tags": tags("v*")}, defaults={"artifacts": {}}))
    for status in ("synced", "skipped"):
        ran = run_regsync("sync", "--json", "-q", "-c", str(file))
        assert (ran.status, ran.statuses()) == (0, [status] * 2), ran.err
        for end in (target.address, other):
            assert equal(walk(source, "app", made.kept), walk(end, "app", made.kept))
            asked = ran.totals["requests"][end].keys()
            assert status == "synced" or asked <= {"tag_list", "manifest_head"}
    assert has_api(target.app)
    tagged = target.app.tags("app")
    assert not [tag for tag in tagged if tag.startswith("sha256-") and "." not in tag]


# What is wanted: exact types, applied by us whatever the registry does with a filter.


SIMPLE = "application/vnd.dev.cosign.simplesigning.v1+json"
OTHERS = ["referrers-in-pages", "referrers-unfiltered", "distribution"]


@pytest.mark.parametrize(
    ("source", "rule", "wanted"),
    [
        ("strict", {"include": ["application/spdx"]}, set()),
        ("strict", {"include": [SIMPLE]}, {".sig"}),
        ("strict", {"exclude": [SBOM]}, {SIGNED, ".sig", ".att", ".sbom"}),
        ("strict", {"exclude": [SIMPLE, "text/spdx+json"]}, {SBOM, SIGNED, ".att"}),
        ("strict", {"include": [SBOM, SIGNED], "exclude": [SIGNED]}, {SBOM}),
        *((source, {"exclude": [SBOM, SIMPLE]}, {SIGNED, ".att", ".sbom"}) for source in OTHERS),
    ],
)
async def test_types_are_wanted_or_not(world, tmp_path, source, rule, wanted):
    tagged = family("cosign-tags").sample
    sample = plain(Seed(81), tagged.image)
    made = Family(Sample(sample.image, sample.attached, tagged.tagged), kept=(sample.image.top,))
    attached = [each for each in sample.attached if each.document["artifactType"] in wanted]
    kept = {
        tag: each for tag, each in tagged.tagged.items() if "." + tag.rpartition(".")[2] in wanted
    }
    expected = imitate("strict")
    Family(Sample(sample.image, tuple(attached), kept)).load_into(expected)
    scene = Scene(world, tmp_path, made, source, "distribution", **rule)
    ran = await scene.succeed()
    there = walk(scene.target, "app", made.kept)
    assert equal(walk(expected, "app", made.kept), there)
    scene.check_nothing_else(there)
    assert only(ran.images)["artifacts"]["synced"] == len(attached) + len(kept)
    await scene.settle()


BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"


@pytest.mark.parametrize(
    ("source", "rule", "is_wanted"),
    [
        ("strict", {}, True),
        ("strict", {"include": [EMPTY_TYPE]}, True),
        ("strict", {"exclude": [BUNDLE]}, False),
        ("distribution", {"include": [BUNDLE]}, True),
    ],
)
async def test_where_a_list_has_the_type_of_an_empty_config_the_layers_tell_it(
    world, tmp_path, source, rule, is_wanted
):
    """cosign 3 writes the type of its bundles into the config's descriptor."""
    seed = Seed(83)
    image = seed.image()
    config = Part(EMPTY_TYPE, EMPTY_CONFIG, {"artifactType": BUNDLE})
    bundle = compose(config, [Part(BUNDLE, seed.blob(900))], subject=image.descriptor())
    scene = Scene(world, tmp_path, Family(Sample(image, (bundle,))), source, **rule)
    await scene.succeed()
    assert (bundle.top in scene.target.repositories["app"].manifests) is is_wanted
    read = scene.source.journal.matching("GET", "manifest", reference=bundle.top)
    read.exactly(1 if rule or is_wanted else 0)
    await scene.settle()


@pytest.mark.parametrize("source", ["strict", "unknown-200-in-html"])
async def test_an_image_without_is_refused_where_artifacts_are_required(world, tmp_path, source):
    scene = Scene(world, tmp_path, family("nothing"), source, require_artifacts=True)
    ran = await scene.run()
    assert only(ran.images)["status"] == "failed"
    assert "require_artifacts" in ran.err
    scene.moved().none()
    image = scene.made.image
    scene.made = Family(Sample(image, plain(Seed(92), image).attached), kept=(image.top,))
    scene.made.load_into(scene.source)
    await scene.succeed()
    scene.check()
    await scene.settle()


@pytest.mark.parametrize("depth", [8, 9])
async def test_artifacts_on_artifacts_are_copied_if_they_are_eight_deep(mirror, depth):
    """The last one is under a tag of cosign's, which counts as one that refers does."""
    image = top = mirror.push("v1")
    for _ in range(depth - 1):
        top = mirror.attach(top)
    top = mirror.push(f"{referrers_tag(top.top)}.sig")
    ran = await mirror.sync({"from": "app", "tags": tags("v*")})
    if depth == 8:
        assert ran.statuses() == ["synced"], ran.err
        assert only(ran.images)["artifacts"]["synced"] == 8
        assert mirror.holds(top)
        return
    told = only(ran.images)["error"]
    assert (told["code"], told["side"]) == ("CONTENT_ERROR", "source")
    assert "more than 8 deep" in told["message"]
    assert image.top not in mirror.target.app.repositories["app"].manifests
    mirror.target.journal.matching("PUT POST").none()


# What is asked.


@pytest.mark.parametrize(
    ("source", "manifests", "questions"),
    [
        # The image's referrers, those of each, and no fallback tag.
        ("strict", 4, 4),
        ("referrers-in-pages", 4, 5),
        # "No such API" once, then the one fallback tag that the listing shows.
        ("distribution", 5, 1),
        ("unknown-200-in-html", 5, 1),
    ],
)
async def test_what_a_source_is_asked(world, tmp_path, source, manifests, questions):
    scene = Scene(world, tmp_path, family("single"), source)
    await scene.succeed()
    assert scene.source.journal.summary() == {
        "GET tag_list": 1,
        "GET manifest": manifests,
        "GET referrers": questions,
        "GET blob": 6,
    }
    await scene.settle()
    assert scene.source.journal.summary() == {"GET tag_list": 1, "HEAD manifest": 1}
    assert scene.target.journal.summary() == {"HEAD manifest": 1}


async def test_what_a_target_without_the_api_is_asked_and_told(world, tmp_path):
    """Four manifests and one list, which is read and read back; the API is asked for once."""
    scene = Scene(world, tmp_path, family("single"), target="distribution")
    await scene.succeed()
    journal, tag = scene.target.journal, referrers_tag(scene.made.image.top)
    journal.matching("GET", "referrers").exactly(1)
    journal.matching("PUT", "manifest").exactly(5)
    journal.matching("GET HEAD", "manifest", reference=tag).at_most(2)
    journal.matching("PUT", "manifest", reference=tag).exactly(1).before(
        journal.matching("GET HEAD", "manifest", reference=tag, status=200)
    )


async def test_no_artifacts_of_a_trimmed_index_are_asked_for_at_the_source(world, tmp_path):
    scene = Scene(world, tmp_path, family("filtered"))
    await scene.run()
    asked = {each.reference for each in scene.source.journal.matching("GET", "referrers")}
    assert asked
    assert asked <= scene.source.repositories["app"].manifests.keys()


async def test_a_dry_run_asks_and_changes_nothing(world, tmp_path):
    scene = Scene(world, tmp_path, family("filtered"), "distribution", "distribution")
    scene.write()
    ran = await world.run("sync", "--dry-run", "-c", str(scene.file))
    assert ran.status == 0, ran.err
    for site in (scene.source, scene.target):
        site.journal.matching(MOVES).none()
    assert all(each.top in ran.out for each in scene.made.travelling)
    top, *_ = (each for each in scene.made.sample.attached if each.top in scene.made.lost)
    assert f"strip {top.top}" in ran.out
    await scene.succeed()
    scene.check()


# Each step of the copy fails: once, and for good.
#
# Once: the run ends with all of it there. For good: the image counts as failed and a line says why,
# what the target holds is true (no list names what is absent, nothing lacks its subject), and the
# next run, undisturbed, completes it; the one behind that writes nothing.


FALLBACK = "unknown-404"


def signed() -> Family:
    """An image with three referrers, one of them signed, and cosign's signature."""
    seed = Seed(77)
    tagged = shapes()["cosign-tags"].build()
    sample = plain(seed, tagged.image)
    signature = seed.artifact(sample.attached[0], SIGNATURE)
    tag = f"{referrers_tag(sample.image.top)}.sig"
    attached = (*sample.attached, signature)
    return Family(
        Sample(sample.image, attached, {tag: tagged.tagged[tag]}), kept=(sample.image.top,)
    )


MADE = signed()
TOP, TAG = MADE.image.top, referrers_tag(MADE.image.top)
BILL, ARTIFACT, _, NESTED = MADE.sample.attached


class Step(NamedTuple):
    """One exchange of the copy: which request to whom, of which kind the other registry is."""

    side: str
    kind: str
    methods: str
    kinds: str
    which: dict[str, Any]
    nth: int = 1  # of those that match; the tag is read before and behind its put


STEPS = {
    "query of a referrer": Step("source", "strict", "GET", "referrers", {"reference": BILL.top}),
    "second page": Step(
        "source",
        "referrers-in-pages",
        "GET",
        "referrers",
        {"reference": TOP, "query": {"last": "*"}},
    ),
    "query without the api": Step("source", FALLBACK, "GET", "referrers", {}),
    "fallback tag": Step("source", FALLBACK, "GET", "manifest", {"reference": TAG}),
    "cosign tag": Step("source", "strict", "GET", "manifest", {"reference": f"{TAG}.sig"}),
    "artifact": Step("source", "strict", "GET", "manifest", {"reference": ARTIFACT.top}),
    "nested artifact": Step("source", "strict", "GET", "manifest", {"reference": NESTED.top}),
    "put": Step("target", FALLBACK, "PUT", "manifest", {"reference": ARTIFACT.top}),
    "put at the api": Step("target", "strict", "PUT", "manifest", {"reference": ARTIFACT.top}),
    "put of cosign's tag": Step("target", FALLBACK, "PUT", "manifest", {"reference": f"{TAG}.sig"}),
    "query at the target": Step("target", FALLBACK, "GET", "referrers", {}),
    "list read": Step("target", FALLBACK, "GET", "manifest", {"reference": TAG}),
    "list put": Step("target", FALLBACK, "PUT", "manifest", {"reference": TAG}),
    "list read back": Step("target", FALLBACK, "GET HEAD", "manifest", {"reference": TAG}, nth=2),
}
ONCE: dict[str, Callable[[Rule], Rule]] = {
    "drop of the answer": lambda rule: rule.drop(at="answer"),
    "stall": lambda rule: rule.stall(),
}
HTML = {"body": b"<html>", "headers": {"Content-Type": "text/html"}}
FOR_GOOD: dict[str, Callable[[Rule], Rule]] = {
    "500": lambda rule: rule.status(500),
    "403": lambda rule: rule.status(403),
    "corrupted": lambda rule: rule.corrupt(whole=True),
    "truncated": lambda rule: rule.truncate(20),
    "a page": lambda rule: rule.status(200, **HTML),
}


def disturb(scene: Scene, step: Step) -> tuple[Rule, Any]:
    site = scene.source if step.side == "source" else scene.target
    return site.faults.on(step.methods, step.kinds, **step.which), site.faults


def scene_of(step: Step, world: Virtual, directory: Path) -> Scene:
    return Scene(world, directory, MADE, **{step.side: step.kind})


@pytest.mark.parametrize(("name", "told"), [*itertools.product(STEPS, ONCE)])
async def test_a_step_fails_once(world, tmp_path, name, told):
    step = STEPS[name]
    scene = scene_of(step, world, tmp_path)
    rule, faults = disturb(scene, step)
    ONCE[told](rule.nth(step.nth))
    ran = await scene.run()
    faults.check()
    faults.clear()
    assert (ran.status, ran.failed) == (0, []), ran.err
    assert only(ran.images)["artifacts"]["synced"] == len(MADE.travelling)
    scene.check_order()
    scene.check()
    await scene.settle()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        *itertools.product(STEPS, ("500", "403")),
        *itertools.product(("second page", "fallback tag", "artifact"), ("corrupted", "truncated")),
        # Of an API that has not answered yet a page says that there is none.
        ("query of a referrer", "a page"),
        ("second page", "a page"),
    ],
)
async def test_a_step_fails_for_good(world, tmp_path, name, told):
    step = STEPS[name]
    scene = scene_of(step, world, tmp_path)
    rule, faults = disturb(scene, step)
    FOR_GOOD[told](rule.since(step.nth))
    ran = await scene.run()
    faults.check()
    faults.clear()
    failed = only(ran.images)
    assert failed["status"] == "failed", ran.out
    assert ran.status == (4 if failed["error"]["status"] == 403 else 2)
    assert failed["error"]["message"]
    assert "INTERNAL_ERROR" not in ran.out + ran.err, ran.err
    assert len(ran.failed) == 1, ran.err
    scene.check_nothing_wrong()

    await scene.succeed()
    scene.check(replaced=True)
    await scene.settle()


# Other writers, and lists that are none (docs/protocol-facts.md section 1.10).


class Shared(Scene):
    """A target without the API whose list of the image somebody else writes, too."""

    def __init__(self, world: Virtual, directory: Path, target: str = FALLBACK) -> None:
        super().__init__(world, directory, MADE, target=target)
        self.seed = Seed(78)

    def theirs(self) -> Image:
        """Let the target hold an artifact of theirs."""
        made = self.seed.artifact(MADE.image, "application/vnd.example.theirs")
        return made.load_into(self.target, "app")

    def put_list(self, *listed: Image) -> None:
        for image in listed:
            image.load_into(self.target, "app")
        Seed().fallback_index(listed).load_into(self.target, "app", TAG)

    def write_after(self, method: str, write: Callable[[int], object], times: int = 1) -> list[int]:
        """Let the other one write whenever the target has answered so about the list, so often."""
        written = list[int]()

        def amend(request: Request, answer: Answer) -> Answer:
            is_it = (request.method, request.reference) == (method, TAG)
            if is_it and answer.status in (201, 404) and len(written) < times:
                written.append(len(written) + 1)
                write(written[-1])
            return answer

        self.target.amend = amend
        return written

    def of_list(self) -> list[tuple[str, int | None]]:
        """Return what the target was asked about the list, and what it answered."""
        asked = self.target.journal.matching(kind="manifest", reference=TAG)
        return [(entry.method, entry.status) for entry in asked]

    def listed(self) -> list[str]:
        found = self.target.manifest("app", TAG)
        assert found is not None
        return [part["digest"] for part in found.children]


@pytest.fixture
def shared(world: Virtual, tmp_path: Path) -> Shared:
    return Shared(world, tmp_path)


OURS = [each.top for each in MADE.sample.attached[:3]]


async def test_another_writer_of_the_list_is_not_lost(shared):
    """Between our put and our look somebody wrote the list without ours: it is merged once more."""
    theirs = shared.theirs()
    written = shared.write_after("PUT", lambda number: shared.put_list(theirs))
    await shared.succeed()
    assert written == [1]
    assert sorted(shared.listed()) == sorted([theirs.top, *OURS])
    theirs.load_into(shared.source, "app")  # so that both sides have to be the same
    shared.check(replaced=True)


@pytest.mark.parametrize("target", WITH_AND_WITHOUT)
async def test_what_somebody_attached_at_the_target_stays(world, tmp_path, target):
    """A signature of the mirror's own is nobody's to delete, and our list keeps its entry."""
    made = family("single")
    scene = Scene(world, tmp_path, made, "strict", target)
    await scene.succeed()
    own = Seed(93).artifact(made.image, "application/vnd.example.own")
    Family(Sample(made.image, (*made.sample.attached, own))).load_into(scene.target)
    late = Seed(94).artifact(made.image, "application/vnd.example.late")
    late.load_into(scene.source, "app")
    for file in (tmp_path / ".regsync").iterdir():
        file.unlink()
    await scene.succeed()
    there = walk(scene.target, "app", made.kept).referrers[made.image.top]
    assert there.keys() == {each.top for each in (*made.sample.attached, own, late)}


async def test_a_list_that_may_not_be_put_again_is_found_by_the_next_run(shared):
    """The answer to our own put was lost, and the registry moves no tag: the list is there."""
    shared.target.immutable_tags = True
    shared.target.faults.on("PUT", "manifest", reference=TAG).drop(at="answer").nth(1)
    assert "TAG_INVALID" in only((await shared.run()).images)["error"]["message"]
    shared.target.faults.check()
    shared.target.faults.clear()
    assert shared.of_list()[-1:] == [("PUT", 400)]
    await shared.succeed()
    shared.check()
    await shared.settle()


async def test_a_list_without_ours_that_may_not_be_put_again_is_an_error(shared):
    shared.target.immutable_tags = True
    theirs = Seed(78).artifact(MADE.image, "application/vnd.example.theirs")
    shared.write_after("GET", lambda number: shared.put_list(theirs, BILL))
    told = only((await shared.run()).images)["error"]
    assert (told["code"], told["status"]) == ("TARGET_ERROR", 400)
    assert "TAG_INVALID" in told["message"]
    assert shared.of_list() == [("GET", 404), ("PUT", 400)]


async def test_a_signature_that_another_writer_put_for_good_counts_as_there(world, tmp_path):
    """The other writer signs the image as soon as the image is there."""
    scene = Scene(world, tmp_path, MADE)
    scene.target.immutable_tags = True
    name = f"{TAG}.sig"

    def write(request: Request, answer: Answer) -> Answer:
        if (request.method, request.kind, answer.status) == ("PUT", "manifest", 201):
            MADE.sample.tagged[name].load_into(scene.target, "app", name)
        return answer

    scene.target.amend = write
    told = only((await scene.succeed()).images)["artifacts"]
    puts = scene.target.journal.matching("PUT", "manifest", reference=name)
    assert [entry.status for entry in puts] == [400]
    assert (told["synced"], told["skipped"]) == (len(MADE.travelling) - 1, 1)
    scene.check()
    await scene.settle()


@pytest.mark.parametrize(
    ("times", "status", "text", "last"),
    [
        (4, 400, "TAG_INVALID", [("HEAD", 200), ("GET", 200), ("PUT", 400)]),
        (5, 409, "does not show", [("GET", 200), ("PUT", 201), ("HEAD", 200)]),
    ],
)
async def test_a_list_that_another_writer_keeps_replacing_is_an_error(
    shared, times, status, text, last
):
    """Another writer replaces the list so many times, and its tag is immutable from then on."""

    def overwrite(number: int) -> None:
        shared.put_list(shared.theirs())
        shared.target.immutable_tags = number == times

    written = shared.write_after("PUT", overwrite, times=99)
    told = only((await shared.run()).images)["error"]
    assert (told["code"], told["status"]) == ("TARGET_ERROR", status)
    assert text in told["message"]
    assert shared.of_list()[-3:] == last
    assert shared.of_list().count(("PUT", 201)) == len(written) == times


async def test_what_is_no_list_is_not_overwritten(shared):
    stranger = Seed(79).image().load_into(shared.target, "app", tag=TAG)
    ran = await shared.run()
    assert (ran.status, only(ran.images)["status"]) == (2, "failed")
    assert TAG in ran.err
    found = shared.target.manifest("app", TAG)
    assert found is not None
    assert found.digest == stranger.top


async def test_a_list_that_goes_in_a_circle_ends(world, tmp_path):
    """A fallback tag may name anything: here an SBOM's list names the image, and the image's list
    itself.
    """
    scene = Scene(world, tmp_path, MADE, source=FALLBACK)
    of_bill = Seed().fallback_index([MADE.image, BILL, NESTED])
    of_bill.load_into(scene.source, "app", referrers_tag(BILL.top))
    Seed().fallback_index([*MADE.sample.attached[:3], MADE.image]).load_into(
        scene.source, "app", TAG
    )
    await scene.run()
    for tag, listed in fallback_lists(MADE.sample.attached).items():
        listed.load_into(scene.source, "app", tag)
    await scene.succeed()
    scene.check()


async def test_what_a_list_names_and_refers_to_another_image_stays(world, tmp_path):
    scene = Scene(world, tmp_path, MADE, source=FALLBACK)
    seed = Seed(79)
    other = seed.image().load_into(scene.source, "app")
    stranger = seed.artifact(other).load_into(scene.source, "app")
    listed = Seed().fallback_index([*MADE.sample.attached[:3], stranger])
    listed.load_into(scene.source, "app", TAG)
    await scene.succeed()
    assert scene.target.manifest("app", OURS[0]) is not None
    assert scene.target.manifest("app", stranger.top) is None


# Several targets, tags, mappings and sources: each image is judged by what its target holds.


@pytest.mark.parametrize(("name", "kind"), [("everything", "distribution"), ("filtered", "strict")])
async def test_targets_of_two_kinds_are_served_by_one_reading(world, tmp_path, name, kind):
    made = family(name)
    scene = Scene(world, tmp_path, made, kind)
    other = imitate("distribution")
    world.listen(other, "other.test")
    scene.registries["other"] = "http://other.test"
    ran = await scene.succeed()
    fetched = [entry.reference for entry in scene.source.journal.matching("GET", "blob")]
    assert len(fetched) == len(set(fetched))
    asked = [entry.target for entry in scene.source.journal.matching("GET", "referrers")]
    assert len(asked) == len(set(asked))
    for target in (scene.target, other):
        assert equal(walk(scene.source, "app", made.kept), walk(target, "app", made.kept))
    other.journal.clear()
    ran = await scene.succeed()
    assert ran.statuses() == ["skipped"] * 2
    scene.moved().none()
    other.journal.matching(MOVES).none()


@pytest.mark.parametrize(("source", "target"), [WITH_AND_WITHOUT, WITH_AND_WITHOUT[::-1]])
async def test_tags_of_one_digest_share_what_hangs_on_it(world, tmp_path, source, target):
    made = family("everything")
    scene = Scene(world, tmp_path, made, source, target)
    for tag in ("v1.2", "v1.2.3"):
        made.image.load_into(scene.source, "app", tag)
    ran = await scene.succeed()
    assert ran.statuses() == ["synced"] * 3
    asked = [entry.target for entry in scene.source.journal.matching("GET", "referrers")]
    assert len(asked) == len(set(asked))
    puts = [entry.reference for entry in scene.target.journal.matching("PUT", "manifest")]
    assert len(puts) == len(set(puts))
    assert equal(walk(scene.source, "app", made.kept), walk(scene.target, "app", made.kept))
    await scene.succeed()
    scene.moved().none()


NO_REFERRERS = encode({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []})


async def test_where_the_api_lists_nothing_that_it_did_not_announce_the_fallback_list_does(
    world, tmp_path
):
    """The target is asked once for each image."""
    mirror = SignedMirror(world, tmp_path, images=3)
    for image in mirror.images:
        mirror.attach(image)

    def forget(request: Request, answer: Answer) -> Answer:
        if request.kind == "referrers":
            return Response(200, [("Content-Type", OCI_INDEX)], NO_REFERRERS)
        assert isinstance(answer, Response)
        answer.headers = [each for each in answer.headers if each[0] != "OCI-Subject"]
        return answer

    mirror.target.app.amend = forget
    assert (await mirror.look()).statuses() == ["synced"] * 3
    mirror.target.journal.matching("GET", "referrers").exactly(3)
    held = mirror.target.app.repositories["app"].tags
    assert {*held} == {"v0", "v1", "v2", *(referrers_tag(each.top) for each in mirror.images)}


ALL = {"from": "app", "tags": tags("v*")}


async def test_a_source_that_shows_no_artifacts_of_any_image_is_told_once(world, tmp_path):
    mirror = SignedMirror(world, tmp_path, images=3, referrers_api=False)
    mirror.write(ALL)
    ran = await world.run("sync", "-v", "-c", str(mirror.file))
    assert ran.status == 0
    assert ran.err.count("no artifacts found (no referrers API, no fallback tag)") == 1


class Chain(SignedMirror):
    """An image under v0, an SBOM of it, and a signature of that."""

    def __init__(self, world: Virtual, directory: Path) -> None:
        super().__init__(world, directory)
        self.image = self.images[0]
        self.sbom = self.load(self.seed.artifact(self.image, SBOM, size=400_000))
        self.signature = self.load(self.seed.artifact(self.sbom, SIGNATURE))

    def puts(self) -> list[str]:
        puts = self.target.journal.matching("PUT", "manifest", status=201)
        return [each.reference for each in puts]


@pytest.fixture
def chain(world: Virtual, tmp_path: Path) -> Chain:
    return Chain(world, tmp_path)


async def test_a_filter_of_another_mapping_brings_no_referrer_before_its_subject(chain):
    """Two tags of one image: one takes the SBOM alone, the other what hangs on it too."""
    chain.load(chain.image, "w0")
    ran = await chain.sync(
        {**ALL, "artifacts": {"include": [SBOM]}}, {"from": "app", "tags": tags("w*")}
    )
    assert ran.status == 0, ran.err
    order = chain.puts()
    assert order.count(chain.sbom.top) == order.count(chain.signature.top) == 1
    assert order.index(chain.sbom.top) < order.index(chain.signature.top)
    assert sum(each["artifacts"]["synced"] for each in ran.images) == 2
    assert sum(each["artifacts"]["skipped"] for each in ran.images) == 1


@pytest.mark.parametrize("refused", ["v0", "v1"])
async def test_a_tag_that_fails_keeps_nothing_from_another_tag_of_its_image(chain, refused):
    chain.load(chain.image, "v1")
    chain.target.app.faults.on("PUT", "manifest", reference=refused).status(403)
    ran = await chain.sync(ALL)
    assert sorted(ran.statuses()) == ["failed", "synced"]
    top = [chain.image.top]
    assert equal(walk(chain.source.app, "app", top), walk(chain.target.app, "app", top))
    assert chain.holds(chain.signature)


async def test_an_artifact_that_fails_fails_every_tag_of_its_image(chain):
    chain.load(chain.image, "v1")
    chain.target.app.faults.on("PUT", "manifest", reference=chain.sbom.top).status(403)
    ran = await chain.sync(ALL)
    assert ran.statuses() == ["failed"] * 2
    assert [each["artifacts"]["failed"] for each in ran.images] == [2, 2]
    assert not chain.holds(chain.signature)


@pytest.mark.parametrize("is_index", [False, True])
async def test_what_cannot_be_looked_up_at_the_target_gets_nothing_hung_on_it(
    world, tmp_path, is_index
):
    """An image that is there already: its SBOM's HEAD fails, the signature of the SBOM, or of a
    child of it, waits for the next run.
    """
    mirror = SignedMirror(world, tmp_path)
    image = mirror.images[0].load_into(mirror.target.app, "app", "v0")
    child = mirror.seed.image()
    sbom = mirror.seed.artifact(image, SBOM)
    if is_index:
        sbom = mirror.seed.index([child], subject=image, artifact_type=SBOM)
    mirror.load(sbom)
    signature = mirror.load(mirror.seed.artifact(child if is_index else sbom, SIGNATURE))
    mirror.target.app.faults.on("HEAD", "manifest", reference=sbom.top).status(500)
    ran = await mirror.sync(ALL)
    assert ran.statuses() == ["failed"]
    assert ran.images[0]["artifacts"] == {"synced": 0, "skipped": 0, "failed": 2, "stripped": 0}
    assert not mirror.holds(signature)
    mirror.target.app.faults.clear()
    await mirror.sync(ALL)
    assert mirror.holds(sbom)
    assert mirror.holds(signature)


async def test_a_record_of_a_target_that_lost_everything_is_void_while_it_is_filled_again(
    world, tmp_path
):
    """The second run is ended between the tag and its signature."""
    mirror = SignedMirror(world, tmp_path)
    signature = mirror.attach(mirror.images[0])
    await mirror.look()
    mirror.target.app.repositories.clear()
    await anyio.sleep(HOUR / 2)
    mirror.target.app.faults.on("PUT", "manifest", reference=signature.top).status(503)
    with anyio.move_on_after(1) as ended:
        await mirror.look()
    assert ended.cancelled_caught
    assert "v0" in mirror.target.app.repositories["app"].tags
    assert not mirror.holds(signature)
    mirror.target.app.faults.clear()
    assert (await mirror.look()).statuses() == ["synced"]
    assert mirror.holds(signature)


async def test_an_image_that_comes_back_has_its_signature_looked_for(world, tmp_path):
    """A tag moved on and back; meanwhile the target dropped the older image with what hung on it."""
    mirror = SignedMirror(world, tmp_path)
    first = mirror.images[0]
    signature = mirror.attach(first)
    await mirror.look()
    mirror.push("v0")
    await mirror.look()
    for each in (first, signature):
        del mirror.target.app.repositories["app"].manifests[each.top]
    mirror.load(first, "v0")
    assert (await mirror.look()).statuses() == ["synced"]
    assert mirror.holds(signature)


@pytest.mark.parametrize("api", [True, False])
async def test_an_artifact_that_is_a_child_too_is_put_once(world, tmp_path, api):
    """An index names an image, and a signature of the image; the source lists the signature, too."""
    mirror = Mirror(world, tmp_path, of={"target": {"referrers_api": api}})
    image = mirror.seed.image()
    signature = mirror.attach(image)
    index = mirror.push("v0", mirror.seed.index([image, signature]))
    ran = await mirror.sync(ALL)
    assert (ran.status, ran.statuses()) == (0, ["synced"]), ran.err
    puts = [each.reference for each in mirror.target.journal.matching("PUT", "manifest")]
    lists = [] if api else [referrers_tag(image.top)]
    assert sorted(puts) == sorted([image.top, signature.top, "v0", *lists])
    assert only(ran.images)["artifacts"]["synced"] == 1
    top = [index.top]
    assert equal(walk(mirror.source.app, "app", top), walk(mirror.target.app, "app", top))


async def test_a_signature_that_two_sources_have_is_asked_for_once_at_the_target(mirror):
    """Both sign one image by cosign's tag, and both copy it to one repository."""
    other = mirror.world.registry("other.test")
    image, signature = mirror.push("v0"), mirror.seed.image()
    tag = f"{referrers_tag(image.top)}.sig"
    image.load_into(other.app, "app", "v1")
    for place in (mirror.source, other):
        signature.load_into(place.app, "app", tag)
    mappings = [{**ALL, "source": name, "targets": ["target"]} for name in ("source", "other")]
    mirror.write(*mappings, registries={"other": other})
    assert (await mirror.run("sync")).statuses() == ["synced"] * 2
    assert (await mirror.run("sync", "--recheck")).statuses() == ["skipped"] * 2
    assert mirror.target.journal.summary() == {"HEAD manifest": 3}
    mirror.target.journal.matching("HEAD", "manifest", reference=tag).exactly(1)


async def test_a_registry_that_shows_the_subject_under_its_fallback_tag_is_not_asked_again(
    world, tmp_path
):
    """It resolves the tag as the digest in its name (docs/protocol-facts.md section 1.10)."""
    mirror = Mirror(world, tmp_path, of={"target": {"referrers_api": False}})
    image = mirror.push("v1")
    mirror.attach(image)
    tag = referrers_tag(image.top)
    image.load_into(mirror.target.app, "app", tag)
    mirror.target.app.faults.on("PUT", "manifest", reference=tag).status(201)
    ran = await mirror.sync({"from": "app", "tags": tags("v1")})
    assert "does not show" in only(ran.failed)
    mirror.target.journal.matching("PUT", "manifest", reference=tag).exactly(1)
