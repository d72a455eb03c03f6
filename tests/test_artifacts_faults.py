"""Each step of copying artifacts fails: once, and for good.

Once: the run ends with all of it there. For good: the image counts as failed and a line says why,
what the target holds is true (no list names what is absent, nothing lacks its subject), and the
next run, undisturbed, completes it; the one behind that writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from conformance.client.attachments import Family, fallback_lists, plain, referrers_tag
from conformance.content.images import Image, Seed
from conformance.content.samples import Sample
from conformance.content.shapes import shapes
from conformance.faults.rules import Rule
from conformance.messages import Answer, Request
from conformance.providers.personas import Provider
from tests.attached import Scene
from tests.ends import only
from tests.thinning import Cell, thinned

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

Verb = Callable[[Rule], Rule]
FALLBACK = "unknown-404"


def signed() -> Family:
    """An image with three referrers, one of them signed, and cosign's signature."""
    seed = Seed(77)
    tagged = shapes()["cosign-tags"].build()
    sample = plain(seed, tagged.image)
    signature = seed.artifact(sample.attached[0], "application/vnd.example.signature")
    tag = f"{referrers_tag(sample.image.top)}.sig"
    return Family(
        Sample(sample.image, (*sample.attached, signature), {tag: tagged.tagged[tag]}),
        kept=(sample.image.top,),
    )


MADE = signed()
TOP, TAG = MADE.image.top, referrers_tag(MADE.image.top)
ARTIFACT = MADE.sample.attached[1]
BLOB = next(digest for digest, data in ARTIFACT.blobs.items() if data != b"{}")
NESTED = MADE.sample.attached[3]


class Step(NamedTuple):
    """One exchange of the copy: at which kinds of registries, on which side, which request."""

    source: str
    target: str
    side: str
    which: dict[str, Any]
    methods: str
    kinds: str
    # The how many-th of those that match; the tag is read before and behind its put.
    nth: int = 1


def at_source(methods: str, kinds: str, source: str = "strict", **which: Any) -> Step:
    return Step(source, "strict", "source", which, methods, kinds)


def at_target(methods: str, kinds: str, target: str = FALLBACK, nth: int = 1, **which: Any) -> Step:
    return Step("strict", target, "target", which, methods, kinds, nth)


STEPS = {
    "query": at_source("GET", "referrers", reference=TOP),
    "query of a referrer": at_source("GET", "referrers", reference=MADE.sample.attached[0].top),
    "second page": at_source(
        "GET", "referrers", "referrers-in-pages", reference=TOP, query={"last": "*"}
    ),
    "query without the api": at_source("GET", "referrers", FALLBACK),
    "fallback tag": at_source("GET", "manifest", FALLBACK, reference=TAG),
    "cosign tag": at_source("GET", "manifest", reference=f"{TAG}.sig"),
    "artifact manifest": at_source("GET", "manifest", reference=ARTIFACT.top),
    "nested manifest": at_source("GET", "manifest", reference=NESTED.top),
    "artifact blob": at_source("GET", "blob", reference=BLOB),
    "blob sent": at_target("PUT POST", "upload upload_start", query={"digest": BLOB}),
    "manifest put": at_target("PUT", "manifest", reference=ARTIFACT.top),
    "manifest put at the api": at_target("PUT", "manifest", "strict", reference=ARTIFACT.top),
    "cosign tag put": at_target("PUT", "manifest", reference=f"{TAG}.sig"),
    "query at the target": at_target("GET", "referrers"),
    "list read": at_target("GET", "manifest", reference=TAG),
    "list put": at_target("PUT", "manifest", reference=TAG),
    "list read back": at_target("GET HEAD", "manifest", reference=TAG, nth=2),
}

ONCE: dict[str, Verb] = {
    "500": lambda rule: rule.status(500),
    "503 behind the answer": lambda rule: rule.status(503, at="answer"),
    "429": lambda rule: rule.status(429, retry_after=20),
    "408 in html": lambda rule: rule.status(
        408, body=b"<html>", headers={"Content-Type": "text/html"}
    ),
    "drop": lambda rule: rule.drop(),
    "drop of the answer": lambda rule: rule.drop(at="answer"),
    "stall": lambda rule: rule.stall(),
}
ONCE_READ: dict[str, Verb] = {"cut": lambda rule: rule.drop(20, of="response")}
FOR_GOOD: dict[str, Verb] = {
    "500": lambda rule: rule.status(500),
    "403": lambda rule: rule.status(403),
    "429": lambda rule: rule.status(429),
    "drop": lambda rule: rule.drop(),
}
FOR_GOOD_READ: dict[str, Verb] = {
    "corrupted": lambda rule: rule.corrupt(whole=True),
    "truncated": lambda rule: rule.truncate(20),
    # Where the API has answered, it is an outage; where it has not, it says that there is none.
    "a page": lambda rule: rule.status(200, body=b"<html>", headers={"Content-Type": "text/html"}),
}


def cases(always: dict[str, Verb], reading: dict[str, Verb], often: str) -> Iterator[Any]:
    for name, step in STEPS.items():
        for told in (*always, *(reading if step.methods == "GET" else ())):
            # A 404 has no list that could be cut, and an error is an error, whatever is in it.
            absent = name in ("query without the api", "query at the target", "list read")
            page = told == "a page" and name not in ("query of a referrer", "second page")
            if not page and not (absent and told in (*ONCE_READ, *FOR_GOOD_READ)):
                yield pytest.param(name, told, often, id=f"{name}-{told}")


def parts(cell: Cell) -> Cell:
    """The dimensions of an ordinary run: which request of whom, what goes wrong, how often."""
    name, told, often = cell
    step = STEPS[str(name)]
    return step.side, step.methods, step.kinds, step.source, step.target, told, often


CASES = thinned(
    [*cases(ONCE, ONCE_READ, "once"), *cases(FOR_GOOD, FOR_GOOD_READ, "for good")],
    parts,
    lambda cell: (
        cell[0],
        str(cell[1])[0].isdigit(),
        cell[2],
    ),  # every step: refused and broken, both ways
)


def disturb(scene: Scene, step: Step) -> Rule:
    place: Provider = scene.source if step.side == "source" else scene.target
    return place.faults.on(step.methods, step.kinds, **step.which)


@pytest.mark.parametrize(
    ("name", "told", "often"), [case for case in CASES if case.values[2] == "once"]
)
async def test_a_step_fails_once(world, name, told, often, tmp_path):
    step, verb = STEPS[name], {**ONCE, **ONCE_READ}[told]
    scene = Scene(world, tmp_path, MADE, step.source, step.target)
    verb(disturb(scene, step).nth(step.nth))
    ran = await scene.run()
    place = scene.source if step.side == "source" else scene.target
    place.faults.check()
    place.faults.clear()
    assert (ran.status, ran.failed) == (0, []), ran.err
    assert only(ran.images)["artifacts"]["synced"] == len(MADE.travelling)
    scene.check_order()
    scene.check()
    await scene.settle()


@pytest.mark.parametrize(
    ("name", "told", "often"), [case for case in CASES if case.values[2] == "for good"]
)
async def test_a_step_fails_for_good(world, name, told, often, tmp_path):
    step, verb = STEPS[name], {**FOR_GOOD, **FOR_GOOD_READ}[told]
    scene = Scene(world, tmp_path, MADE, step.source, step.target)
    verb(disturb(scene, step).since(step.nth))
    ran = await scene.run()
    place = scene.source if step.side == "source" else scene.target
    place.faults.check()
    place.faults.clear()
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


async def test_another_writer_of_the_list_is_not_lost(world, tmp_path):
    """Between our put and our look somebody wrote the list without ours: it is merged once more."""
    scene = Scene(world, tmp_path, MADE, target=FALLBACK)
    theirs = Seed(78).artifact(MADE.image, "application/vnd.example.theirs")
    written = 0

    def overwrite(request: Any, answer: Any) -> Any:
        nonlocal written
        if (request.method, request.reference, answer.status) == ("PUT", TAG, 201) and not written:
            written += 1
            theirs.load_into(scene.target, "app")
            Seed().fallback_index([theirs]).load_into(scene.target, "app", TAG)
        return answer

    scene.target.amend = overwrite
    await scene.succeed()
    assert written == 1
    theirs.load_into(scene.source, "app")  # so that both sides have to be the same
    scene.target.repositories["app"].manifests = {
        digest: stored
        for digest, stored in scene.target.repositories["app"].manifests.items()
        if digest in (*scene.target.repositories["app"].tags.values(), TOP) or stored.subject
    }
    scene.check()


def of_list(scene: Scene) -> list[tuple[str, int]]:
    """Return what the target was asked about the list of the image, and what it answered."""
    return [
        (entry.method, entry.status)
        for entry in scene.target.journal.matching(kind="manifest", reference=TAG)
    ]


def write_once_looked_for(scene: Scene, *listed: Image) -> None:
    """Let another writer put a list as soon as the target has said that there is none."""
    written = False

    def write(request: Request, answer: Answer) -> Answer:
        nonlocal written
        if request.method == "GET" and request.reference == TAG and not written:
            written = True
            for image in listed:
                image.load_into(scene.target, "app")
            Seed().fallback_index(listed).load_into(scene.target, "app", TAG)
        return answer

    scene.target.amend = write


async def test_a_list_that_may_not_be_put_again_is_read(world, tmp_path):
    """The answer to our own put was lost, and the registry moves no tag: the list is there."""
    scene = Scene(world, tmp_path, MADE, target=FALLBACK)
    scene.target.immutable_tags = True
    scene.target.faults.on("PUT", "manifest", reference=TAG).drop(at="answer").nth(1)
    ran = await scene.succeed()
    scene.target.faults.check()
    scene.target.faults.clear()
    assert of_list(scene)[-2:] == [("PUT", 400), ("GET", 200)]
    assert only(ran.images)["artifacts"]["synced"] == len(MADE.travelling)
    scene.check()
    await scene.settle()


async def test_a_list_that_another_writer_put_for_good_is_read(world, tmp_path):
    scene = Scene(world, tmp_path, MADE, target=FALLBACK)
    scene.target.immutable_tags = True
    write_once_looked_for(scene, *MADE.sample.attached[:3])
    await scene.succeed()
    assert of_list(scene) == [("GET", 404), ("PUT", 400), ("GET", 200)]
    scene.check()
    await scene.settle()


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
    ran = await scene.succeed()
    puts = scene.target.journal.matching("PUT", "manifest", reference=name)
    assert [entry.status for entry in puts] == [400]
    artifacts = only(ran.images)["artifacts"]
    assert (artifacts["synced"], artifacts["skipped"]) == (len(MADE.travelling) - 1, 1)
    scene.check()
    await scene.settle()


async def test_a_list_without_ours_that_may_not_be_put_again_is_an_error(world, tmp_path):
    scene = Scene(world, tmp_path, MADE, target=FALLBACK)
    scene.target.immutable_tags = True
    theirs = Seed(78).artifact(MADE.image, "application/vnd.example.theirs")
    write_once_looked_for(scene, theirs, MADE.sample.attached[0])
    ran = await scene.run()
    failed = only(ran.images)
    assert failed["status"] == "failed"
    assert (failed["error"]["code"], failed["error"]["status"]) == ("TARGET_ERROR", 400)
    assert "TAG_INVALID" in failed["error"]["message"]
    assert of_list(scene) == [("GET", 404), ("PUT", 400), ("GET", 200)]


@pytest.mark.parametrize(
    ("times", "status", "text", "last"),
    [
        (4, 400, "TAG_INVALID", [("GET", 200), ("PUT", 400), ("GET", 200)]),
        (5, 409, "keeps replacing", [("GET", 200), ("PUT", 201), ("HEAD", 200)]),
    ],
)
async def test_a_list_that_another_writer_keeps_replacing_is_an_error(
    world, times, status, text, last, tmp_path
):
    """Another writer replaces the list so many times, and its tag is immutable from then on."""
    scene = Scene(world, tmp_path, MADE, target=FALLBACK)
    written = 0

    def overwrite(request: Request, answer: Answer) -> Answer:
        nonlocal written
        if (request.method, request.reference, answer.status) == ("PUT", TAG, 201):
            written += 1
            theirs = Seed(78 + written).artifact(MADE.image, "application/vnd.example.theirs")
            theirs.load_into(scene.target, "app")
            Seed().fallback_index([theirs]).load_into(scene.target, "app", TAG)
            scene.target.immutable_tags = written == times
        return answer

    scene.target.amend = overwrite
    ran = await scene.run()
    error = only(ran.images)["error"]
    assert (error["code"], error["status"]) == ("TARGET_ERROR", status)
    assert text in error["message"]
    assert of_list(scene)[-3:] == last
    assert of_list(scene).count(("PUT", 201)) == written == times


async def test_what_the_list_names_already_stays(world, tmp_path):
    scene = Scene(world, tmp_path, MADE, target=FALLBACK)
    theirs = Seed(78).artifact(MADE.image, "application/vnd.example.theirs")
    theirs.load_into(scene.target, "app")
    Seed().fallback_index([theirs]).load_into(scene.target, "app", TAG)
    await scene.succeed()
    found = scene.target.manifest("app", TAG)
    assert found is not None
    listed = [part["digest"] for part in found.children]
    assert listed[0] == theirs.top
    assert sorted(listed) == sorted([theirs.top, *(each.top for each in MADE.sample.attached[:3])])


async def test_what_is_no_list_is_not_overwritten(world, tmp_path):
    """Protocol-facts.md section 1.10: anything that is not an OCI index is reported, never
    replaced.
    """
    scene = Scene(world, tmp_path, MADE, target=FALLBACK)
    stranger = Seed(79).image().load_into(scene.target, "app", tag=TAG)
    ran = await scene.run()
    assert (ran.status, only(ran.images)["status"]) == (2, "failed")
    assert TAG in ran.err
    found = scene.target.manifest("app", TAG)
    assert found is not None
    assert found.digest == stranger.top


async def test_a_list_that_goes_in_a_circle_ends(world, tmp_path):
    """A fallback tag may name anything: here an SBOM's list names the image, and the image's list
    itself.
    """
    scene = Scene(world, tmp_path, MADE, source=FALLBACK)
    bill = MADE.sample.attached[0]
    kept = fallback_lists(MADE.sample.attached)
    Seed().fallback_index([MADE.image, bill, NESTED]).load_into(
        scene.source, "app", referrers_tag(bill.top)
    )
    Seed().fallback_index([*MADE.sample.attached[:3], MADE.image]).load_into(
        scene.source, "app", TAG
    )
    await scene.run()
    for tag, listed in kept.items():
        listed.load_into(scene.source, "app", tag)
    await scene.succeed()
    scene.check()
