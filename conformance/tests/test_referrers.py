"""What the harness has about referrers: registries of every kind, families to put there, the walk
that compares.

The walk is what the program is judged by, so it is shown to see each thing that may be wrong.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from conformance.http import Site
from conformance.images import Image, Seed
from conformance.messages import Response
from conformance.personas import LATE, PERSONAS, Provider, imitate
from conformance.registry import App
from conformance.storage import OCI_INDEX
from conformance.walks import (
    FAMILIES,
    Client,
    Family,
    Graph,
    equal,
    fallback_lists,
    family,
    has_api,
    list_referrers,
    plain,
    referrers_tag,
    walk,
)

KINDS = [name for name in PERSONAS if name.startswith(("referrers-", "unknown-"))] + [
    "strict",
    "distribution",
    "old",
]
WITH_API = {name for name in KINDS if name.startswith("referrers-")} | {"strict"}


@pytest.fixture
def seed() -> Seed:
    return Seed(41)


# What each kind answers.


def test_a_provider_says_whether_it_has_the_api() -> None:
    assert {name for name in KINDS if has_api(imitate(name))} == WITH_API
    assert len(KINDS) - len(WITH_API) == 5


def referrers(app: App, digest: str, query: str = "") -> Response:
    return app.request("GET", f"/v2/app/referrers/{digest}{query}")


@pytest.mark.parametrize(
    ("name", "status", "kind", "said"),
    [
        ("unknown-404", 404, "application/json", b"UNSUPPORTED"),
        ("distribution", 404, "text/plain; charset=utf-8", b"404 page not found"),
        ("unknown-200-in-html", 200, "text/html; charset=utf-8", b"<title>Registry"),
        ("unknown-referrers-announced", 404, "application/json", b"UNSUPPORTED"),
        ("old", 404, "application/json", b"UNSUPPORTED"),
    ],
)
def test_without_the_api_there_is_an_error_or_a_page(
    name: str, status: int, kind: str, said: bytes, seed: Seed
) -> None:
    app = imitate(name)
    image = seed.image().load_into(app, "app", tag="v1")
    answer = referrers(app, image.top)
    assert (answer.status, answer.header("Content-Type")) == (status, kind)
    assert said in answer.data
    app.journal.check()


@pytest.mark.parametrize("name", KINDS)
def test_a_subject_is_announced_where_the_row_says_so(name: str, seed: Seed) -> None:
    app = imitate(name)
    image = seed.image().load_into(app, "app", tag="v1")
    artifact = seed.artifact(image)
    artifact.load_into(app, "app")
    headers = [("Content-Type", artifact.media_type)]
    answer = app.request("PUT", f"/v2/app/manifests/{artifact.top}", headers, artifact.body)
    assert answer.status == 201
    announced = name == "unknown-referrers-announced" or name in WITH_API
    assert answer.header("OCI-Subject") == (image.top if announced else "")


def test_pages_are_linked_and_filtered(seed: Seed) -> None:
    app = imitate("referrers-in-pages")
    sample = plain(seed).load_into(app, "app", "v1")
    first = referrers(app, sample.image.top)
    assert len(first.json()["manifests"]) == 2
    assert 'rel="next"' in first.header("Link")
    only = referrers(app, sample.image.top, "?artifactType=application/spdx%2Bjson")
    assert [each["artifactType"] for each in only.json()["manifests"]] == ["application/spdx+json"]
    assert only.header("OCI-Filters-Applied") == "artifactType"


def test_a_filter_may_not_be_applied(seed: Seed) -> None:
    app = imitate("referrers-unfiltered")
    sample = plain(seed).load_into(app, "app", "v1")
    whole = referrers(app, sample.image.top, "?artifactType=application/spdx%2Bjson")
    assert len(whole.json()["manifests"]) == 3
    assert whole.header("OCI-Filters-Applied") == ""


def test_a_referrer_is_listed_late(seed: Seed) -> None:
    now = [1000.0]
    app = imitate("referrers-late", now=lambda: now[0])
    image = seed.image().load_into(app, "app", tag="v1")
    seed.artifact(image).load_into(app, "app")  # long ago
    artifact = seed.artifact(image)
    for digest, data in artifact.blobs.items():
        app.add_blob("app", data, digest)
    put = app.request(
        "PUT",
        f"/v2/app/manifests/{artifact.top}",
        [("Content-Type", artifact.media_type)],
        artifact.body,
    )
    assert put.header("OCI-Subject") == image.top
    for seconds, count in ((0.0, 1), (LATE - 1, 1), (1.0, 2)):
        now[0] += seconds
        assert len(referrers(app, image.top).json()["manifests"]) == count
    assert app.manifest("app", artifact.top) is not None


# Families.


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_family_hangs_together_at_every_kind(kind: str, name: str) -> None:
    made = family(name)
    app = imitate(kind)
    made.load_into(app)
    graph = walk(app, "app", [made.image.top])
    assert graph.contents.keys() == {
        digest
        for part in (made.image, *made.sample.attached, *made.sample.tagged.values())
        for digest in part.contents()
    }
    assert graph.tags == {
        tag: image.top for tag, image in made.sample.tagged.items() if not tag.endswith("0" * 64)
    }
    subjects = {each.document["subject"]["digest"] for each in made.sample.attached}
    assert graph.referrers.keys() == subjects
    assert bool(graph.lists) == (kind not in WITH_API and bool(subjects))


def test_families_are_the_same_in_every_run() -> None:
    for name in FAMILIES:
        assert family(name).sample.fingerprint() == family(name).sample.fingerprint(), name


def test_the_filtered_family_says_what_it_loses() -> None:
    made = family("filtered")
    children = [entry["digest"] for entry in made.image.document["manifests"]]
    assert set(made.kept) < set(children)
    dropped = {made.image.top, *children} - set(made.kept)
    gone = {*dropped}
    for each in made.sample.attached:
        if each.document["subject"]["digest"] in gone:
            gone.add(each.top)
    assert gone - dropped == made.lost
    assert len(made.lost) == 3
    assert len(made.travelling) == 3


@pytest.mark.parametrize("name", ["everything", "index", "bare"])
def test_a_family_hangs_together_at_a_real_registry(name: str, docker_registry: str) -> None:
    made = family(name).push(docker_registry)
    graph = walk(docker_registry, "app", made.kept)
    app = App()
    made.load_into(app)
    assert equal(walk(app, "app", made.kept), graph)
    assert graph.lists.keys() == fallback_lists(made.sample.attached).keys()


def test_sha512_is_cut_in_the_fallback_tag() -> None:
    assert referrers_tag("sha512:" + "ab" * 64) == "sha512-" + "ab" * 32
    assert referrers_tag("sha256:" + "ab" * 32) == "sha256-" + "ab" * 32


# The walk sees what is wrong.


def at(kind: str, made: Family) -> Provider:
    app = imitate(kind)
    made.load_into(app)
    return app


def whole(app: Site, made: Family) -> Graph:
    return walk(app, "app", made.kept)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "nothing"])
def test_a_walk_sees_each_that_is_missing(name: str) -> None:
    made = family(name)
    right = whole(at("strict", made), made)
    for left_out in made.travelling:
        app = at("strict", made)
        held = app.repositories["app"]
        del held.manifests[left_out.top]
        held.tags = {tag: digest for tag, digest in held.tags.items() if digest != left_out.top}
        with pytest.raises(AssertionError, match="only on the first side"):
            equal(right, whole(app, made))


def test_a_walk_sees_one_that_is_invented(seed: Seed) -> None:
    made = family("single")
    right = whole(at("strict", made), made)
    app = at("strict", made)
    seed.artifact(made.image).load_into(app, "app")
    with pytest.raises(AssertionError, match="only on the second side"):
        equal(right, whole(app, made))


def test_a_walk_sees_a_cosign_tag_that_names_another_or_is_missing() -> None:
    made = family("cosign-tags")
    right = whole(at("strict", made), made)
    sig, att = (made.image.top.replace(":", "-") + suffix for suffix in (".sig", ".att"))
    app = at("strict", made)
    tags = app.repositories["app"].tags
    tags[sig], tags[att] = tags[att], tags[sig]
    with pytest.raises(AssertionError, match="cosign's tags"):
        equal(right, whole(app, made))


def test_two_kinds_are_equal_when_all_is_there() -> None:
    for name in FAMILIES:
        made = family(name)
        assert equal(
            whole(at("referrers-in-pages", made), made),
            whole(at("unknown-200-in-html", made), made),
        )


def twice(entries: list[Any]) -> None:
    entries.append(entries[0])


def changed(**fields: Any) -> Callable[[list[Any]], None]:
    return lambda entries: entries[0].update(fields)


def lacking(field: str) -> Callable[[list[Any]], None]:
    return lambda entries: entries[0].pop(field)


WRONG: Mapping[str, tuple[Callable[[list[Any]], None], str]] = {
    "twice": (twice, "listed twice"),
    "another size": (changed(size=1), "size of"),
    "another type": (changed(artifactType="a/b"), "artifactType of"),
    "no type": (lacking("artifactType"), "artifactType of"),
    "another media type": (changed(mediaType=OCI_INDEX), "mediaType of"),
    "no annotations": (lacking("annotations"), "annotations of"),
    "more annotations": (changed(annotations={"x": "y"}), "annotations of"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_walk_sees_a_list_that_describes_wrongly(name: str) -> None:
    change, told = WRONG[name]
    made = family("single")
    app = at("unknown-404", made)
    [(tag, kept)] = fallback_lists(made.sample.attached).items()
    document = kept.document
    change(document["manifests"])
    app.add_manifest("app", json.dumps(document).encode(), OCI_INDEX, tag)
    with pytest.raises(AssertionError, match=told):
        whole(app, made)


def test_a_walk_sees_a_list_of_another_subject(seed: Seed) -> None:
    made = family("single")
    app = at("unknown-404", made)
    stranger = seed.artifact(seed.image().load_into(app, "app"))
    stranger.load_into(app, "app")
    [(tag, _)] = fallback_lists(made.sample.attached).items()
    mixed: list[Image] = [*made.sample.attached, stranger]
    seed.fallback_index(mixed).load_into(app, "app", tag)
    with pytest.raises(AssertionError, match="refers to"):
        whole(app, made)


def test_a_walk_sees_a_page_that_fails() -> None:
    made = family("single")
    app = at("referrers-in-pages", made)
    app.faults.on("GET", "referrers").nth(2).status(500)
    with contextlib.closing(Client(app)) as client, pytest.raises(AssertionError, match="500"):
        list_referrers(client, "app", made.image.top)
