"""The walk by which the program is judged sees each thing that may be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from conformance.http import Site
from conformance.images import Seed
from conformance.personas import Provider, imitate
from conformance.registry import App
from conformance.storage import OCI_INDEX
from conformance.walks import (
    FAMILIES,
    Family,
    Graph,
    equal,
    fallback_lists,
    family,
    fetch_http,
    identical,
    referrers_tag,
    walk,
)


def at(kind: str, made: Family) -> Provider:
    app = imitate(kind)
    made.load_into(app)
    return app


def whole(app: Site | str, made: Family) -> Graph:
    return walk(app, "app", made.kept)


def refer(made: Family) -> set[str]:
    return {each.document["subject"]["digest"] for each in made.sample.attached}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_hangs_together_at_every_kind(name: str) -> None:
    made = family(name)
    assert made.sample.fingerprint() == family(name).sample.fingerprint()
    walks = []
    for kind in ("strict", "referrers-in-pages", "unknown-404", "unknown-200-in-html"):
        app = at(kind, made)
        graph = walk(app, "app", [made.image.top])
        parts = made.sample.parts().values()
        assert graph.contents.keys() == {digest for part in parts for digest in part.contents()}
        assert graph.tags == {tag: image.top for tag, image in made.sample.tagged.items()}
        assert graph.referrers.keys() == refer(made)
        assert bool(graph.lists) == (kind.startswith("unknown") and bool(refer(made)))
        walks.append(whole(app, made))
    assert all(equal(walks[0], other) for other in walks[1:])


@pytest.mark.parametrize("name", ["everything", "bare"])
def test_a_family_hangs_together_at_a_real_registry(name: str, docker_registry: str) -> None:
    made = family(name).push(docker_registry)
    assert equal(whole(at("strict", made), made), whole(docker_registry, made))


def test_the_filtered_family_says_what_it_loses() -> None:
    made = family("filtered")
    children = {entry["digest"] for entry in made.image.document["manifests"]}
    dropped = {made.image.top, *children} - {*made.kept}
    gone = {*dropped}
    for each in made.sample.attached:
        if each.document["subject"]["digest"] in gone:
            gone.add(each.top)
    assert gone - dropped == made.lost
    assert (len(made.lost), len(made.travelling)) == (3, 3)


def test_sha512_is_cut_in_the_fallback_tag() -> None:
    assert referrers_tag("sha512:" + "ab" * 64) == "sha512-" + "ab" * 32
    assert referrers_tag("sha256:" + "ab" * 32) == "sha256-" + "ab" * 32


# What is missing, or too much.


def test_identical_says_what_differs() -> None:
    assert identical({"a": b"1"}, {"a": b"1"})
    for other, said in (
        ({}, "first"),
        ({"a": b"1", "b": b""}, "second"),
        ({"a": b"2"}, "other bytes"),
    ):
        with pytest.raises(AssertionError, match=said):
            identical({"a": b"1"}, other)


@pytest.mark.parametrize("kind", ["layer", "manifest"])
def test_a_fetch_sees_bytes_that_are_not_the_digest(app: App, seed: Seed, kind: str) -> None:
    image = seed.image().load_into(app, "a/b", tag="v1")
    if kind == "layer":
        app.add_blob("a/b", b"other", [*image.blobs][-1])
    else:
        app.add_manifest("a/b", image.body + b" ", image.media_type, digest=image.top)
    with pytest.raises(AssertionError, match="other bytes"):
        fetch_http(app, "a/b", image.top)


@pytest.mark.parametrize("name", ["filtered", "everything", "deep", "cosign-recursive"])
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


def test_a_walk_sees_a_cosign_tag_that_names_another() -> None:
    made = family("cosign-tags")
    right = whole(at("strict", made), made)
    app = at("strict", made)
    tags = app.repositories["app"].tags
    one, other = (made.image.top.replace(":", "-") + suffix for suffix in (".sig", ".att"))
    tags[one], tags[other] = tags[other], tags[one]
    with pytest.raises(AssertionError, match="cosign's tags"):
        equal(right, whole(app, made))


# Lists of referrers.


def changed(**fields: Any) -> Callable[[list[Any]], None]:
    """Return a change of the first entry of a list; a value of ... leaves the field out."""

    def change(entries: list[Any]) -> None:
        entry = {**entries[0], **fields}
        entries[0] = {key: value for key, value in entry.items() if value is not ...}

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda entries: entries.append(entries[0]), "listed twice"),
        (changed(size=1), "size of"),
        (changed(artifactType="a/b"), "artifactType of"),
        (changed(artifactType=...), "artifactType of"),
        (changed(mediaType=OCI_INDEX), "mediaType of"),
        (changed(annotations=...), "annotations of"),
    ],
)
def test_a_walk_sees_a_list_that_describes_wrongly(
    change: Callable[[list[Any]], None], told: str
) -> None:
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
    stranger = seed.artifact(seed.image().load_into(app, "app")).load_into(app, "app")
    [(tag, _)] = fallback_lists(made.sample.attached).items()
    seed.fallback_index([*made.sample.attached, stranger]).load_into(app, "app", tag)
    with pytest.raises(AssertionError, match="refers to"):
        whole(app, made)


def test_a_walk_sees_a_page_that_fails() -> None:
    made = family("single")
    app = at("referrers-in-pages", made)
    app.faults.on("GET", "referrers").nth(2).status(500)
    with pytest.raises(AssertionError, match="500"):
        whole(app, made)
