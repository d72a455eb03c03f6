"""What hangs on an image arrives whole, from registries of every kind at registries of every kind.

Each cell is a kind of source, a kind of target and a family of artifacts; an ordinary run has every
pair of these. The walks of conformance.client.graphs, by the referrers API or the fallback tag and over
cosign's tags, find the same on both sides, nothing is put before its subject, and a second run
writes nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from conformance.client.attachments import FAMILIES, Family, family, has_api, plain, referrers_tag
from conformance.client.graphs import equal, walk
from conformance.content.images import EMPTY_CONFIG, EMPTY_TYPE, Part, Seed, compose
from conformance.content.samples import Sample
from conformance.programs import skopeo
from conformance.providers.personas import PERSONAS, imitate
from conformance.providers.referrers import LATE
from conformance.registry.app import App
from tests.attached import Scene
from tests.ends import Ran, document, only, run_regsync, tags
from tests.thinning import thinned, thorough

KINDS = [name for name in PERSONAS if name.startswith(("referrers-", "unknown-"))] + [
    "strict",
    "distribution",
    "old",
]
# Those that differ in what a copier does are met in every cell; the others with one family that has
# all.
SOURCES = ("strict", "referrers-in-pages", "distribution")
TARGETS = ("strict", "distribution", "unknown-referrers-announced")


def cells() -> list[tuple[str, str, str]]:
    whole = [*itertools.product(SOURCES, TARGETS, FAMILIES)]
    others = [
        (kind, target, "everything") for kind in KINDS for target in ("strict", "distribution")
    ]
    others += [
        (source, kind, "everything") for kind in KINDS for source in ("strict", "distribution")
    ]
    return list(dict.fromkeys([*whole, *others]))


@pytest.mark.parametrize(("source", "target", "name"), thinned(cells()))
async def test_a_cell(world, source, target, name, tmp_path):
    scene = Scene(world, tmp_path, family(name), source, target)
    ran = await scene.succeed()
    scene.check_order()
    if target == "referrers-late":
        await anyio.sleep(LATE)
    scene.check()
    told = only(ran.images)["artifacts"]
    assert (told["synced"], told["failed"]) == (len(scene.made.travelling), 0)
    assert told["stripped"] == (1 if scene.made.lost else 0)
    await scene.settle()


UNLISTED = [
    name for name in FAMILIES if name not in ("cosign-tags", "cosign-recursive", "everything")
]


@pytest.mark.parametrize(
    ("source", "target", "name"),
    thinned(itertools.product(("strict", "distribution"), ("strict", "distribution"), UNLISTED)),
)
async def test_a_tag_that_is_named_needs_no_listing(world, source, target, name, tmp_path):
    """Without the API one listing may stand for the tags of several digests, of which each would be
    asked for.
    """
    scene = Scene(world, tmp_path, family(name), source, target, listed=False)
    await scene.succeed()
    scene.source.journal.matching("GET", "tag_list").at_most(0 if source == "strict" else 1)
    scene.check()
    await scene.settle()


@pytest.mark.parametrize("name", ["cosign-tags", "cosign-recursive", "everything"])
async def test_cosigns_tags_are_probed_where_there_is_no_api_and_no_listing(world, name, tmp_path):
    scene = Scene(world, tmp_path, family(name), "distribution", "strict", listed=False)
    await scene.succeed()
    scene.source.journal.matching("GET", "tag_list").at_most(1)
    scene.check()
    await scene.settle()


# Filters: exact types, applied by us whatever the registry does with a filter.

SBOM, SIGNED = "application/spdx+json", "application/vnd.cncf.notary.signature"
SIMPLE = "application/vnd.dev.cosign.simplesigning.v1+json"


@pytest.mark.parametrize(
    "source", ["strict", "referrers-in-pages", "referrers-unfiltered", "distribution"]
)
@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        ({"include": [SBOM]}, {SBOM}),
        ({"include": [SBOM, SIGNED]}, {SBOM, SIGNED}),
        ({"include": ["application/spdx"]}, set()),
        ({"include": [SIMPLE]}, {".sig"}),
        ({"exclude": [SBOM]}, {SIGNED, ".sig", ".att", ".sbom"}),
        ({"exclude": [SIMPLE, "text/spdx+json"]}, {SBOM, SIGNED, ".att"}),
        ({"include": [SBOM, SIGNED], "exclude": [SIGNED]}, {SBOM}),
    ],
)
async def test_types_are_wanted_or_not(world, rule, wanted, source, tmp_path):
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


@pytest.mark.parametrize("source", ["strict", "referrers-in-pages", "distribution"])
@pytest.mark.parametrize(
    ("rule", "is_wanted"),
    [
        ({}, True),
        ({"include": [BUNDLE]}, True),
        ({"include": [EMPTY_TYPE]}, True),
        ({"include": [SBOM]}, False),
        ({"exclude": [BUNDLE]}, False),
    ],
)
async def test_where_a_list_has_the_type_of_an_empty_config_the_layers_tell_it(
    world, rule, is_wanted, source, tmp_path
):
    """cosign 3 writes the type of its bundles into the config's descriptor."""
    seed = Seed(83)
    image = seed.image()
    config = Part(EMPTY_TYPE, EMPTY_CONFIG, {"artifactType": BUNDLE})
    bundle = compose(config, [Part(BUNDLE, seed.blob(900))], subject=image.descriptor())
    scene = Scene(world, tmp_path, Family(Sample(image, (bundle,))), source, "strict", **rule)
    await scene.succeed()
    assert (bundle.top in scene.target.repositories["app"].manifests) is is_wanted
    scene.source.journal.matching("GET", "manifest", reference=bundle.top).exactly(
        1 if rule or is_wanted else 0
    )
    await scene.settle()


# What is attached later.


def attach(scene: Scene, made: Family) -> None:
    """Put an artifact at the source as a client does, while nothing is copied."""
    [artifact] = made.sample.attached
    for digest, data in artifact.blobs.items():
        scene.source.add_blob("app", data, digest)
    headers = [("Content-Type", artifact.media_type)]
    put = scene.source.request("PUT", f"/v2/app/manifests/{artifact.top}", headers, artifact.body)
    assert put.status == 201


@pytest.mark.parametrize("target", ["strict", "distribution"])
@pytest.mark.parametrize("chance", [1.0])
async def test_what_the_api_lists_late_is_found_when_a_look_is_due(world, target, tmp_path):
    """An hour after the first copy the image is looked at again (docs/design.md section 8), where
    the dice allow it.
    """
    made = family("single")
    late = Family(Sample(made.image, (Seed(82).artifact(made.image, SIGNED),)))
    scene = Scene(world, tmp_path, made, "referrers-late", target)
    attach(scene, late)
    await scene.succeed()
    held = scene.target.repositories["app"]
    assert late.sample.attached[0].top not in held.manifests, "it was not listed yet"
    await anyio.sleep(LATE)
    await scene.settle()
    scene.source.journal.matching("GET", "referrers").none()
    await anyio.sleep(3 * 3600)
    await scene.succeed()
    assert late.sample.attached[0].top in held.manifests
    there = walk(scene.target, "app", made.kept)
    assert equal(walk(scene.source, "app", made.kept), there)
    await scene.settle()


@pytest.mark.parametrize("target", ["strict", "distribution"])
async def test_a_new_tag_in_the_listing_is_a_late_signature(world, target, tmp_path):
    """The listing that is made anyway shows it at once: cosign's tag, or the fallback tag."""
    bare, full = family("nothing"), family("nothing")
    image = bare.image
    tagged = {f"{referrers_tag(image.top)}.sig": Seed(83).artifact()}
    full = Family(Sample(image, plain(Seed(84), image).attached, tagged), kept=(image.top,))
    scene = Scene(world, tmp_path, bare, "distribution", target)
    await scene.succeed()
    await scene.settle()
    quiet = scene.source.journal.summary()
    await scene.settle()
    assert scene.source.journal.summary() == quiet == {"GET tag_list": 1, "HEAD manifest": 1}
    full.load_into(scene.source)
    scene.made = full
    await scene.succeed()
    scene.check()
    await scene.settle()


# Debian's docker-registry, a process of its own without the API.

REAL = (
    "single",
    "bare",
    "index",
    "filtered",
    "index-typed",
    "cosign-recursive",
    "deep",
    "everything",
)


def sync(directory: Path, source: str, target: str, made: Family) -> Ran:
    mapping = {
        "from": "app",
        "tags": tags("v*"),
        **({"platforms": list(made.platforms)} if made.platforms else {}),
    }
    file = directory / "mirror.yaml"
    file.write_text(
        document({"source": source, "target": target}, mapping, defaults={"artifacts": {}})
    )
    return run_regsync("sync", "--json", "-q", "-c", str(file))


def unmoved(ran: Ran, target: str) -> None:
    assert only(ran.images)["status"] == "skipped", ran.out
    assert not {
        action
        for action in ran.totals["requests"][target]
        if action not in ("tag_list", "manifest_head")
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_at_a_real_registry_clients_find_the_same(name, source, docker_registry, tmp_path):
    made = family(name)
    made.load_into(source.app)
    ran = sync(tmp_path, source.address, docker_registry, made)
    assert (ran.status, ran.failed) == (0, []), ran.err
    assert equal(walk(source.address, "app", made.kept), walk(docker_registry, "app", made.kept))
    source.journal.clear()
    again = sync(tmp_path, source.address, docker_registry, made)
    assert again.status == 0, again.err
    unmoved(again, docker_registry)
    at = f"docker://{docker_registry}/app"
    for subject in {each.document["subject"]["digest"] for each in made.sample.attached} - {
        made.image.top
    }:
        if subject in made.kept:
            raw = skopeo(
                "inspect",
                "--raw",
                "--tls-verify=false",
                f"{at}:{referrers_tag(subject)}",
                home=tmp_path,
            )
            assert b'"manifests"' in raw


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if n % 2 else thorough(pytest.param(name)) for n, name in enumerate(REAL)]
)
def test_from_a_real_registry_to_the_api_and_to_another(name, serve, docker_registries, tmp_path):
    made = family(name)
    source, other, target = docker_registries(), docker_registries(), serve()
    made.push(source)
    for number, end in enumerate((target.address, other)):
        (tmp_path / str(number)).mkdir()
        ran = sync(tmp_path / str(number), source, end, made)
        assert (ran.status, ran.failed) == (0, []), ran.err
        assert equal(walk(source, "app", made.kept), walk(end, "app", made.kept))
        unmoved(sync(tmp_path / str(number), source, end, made), end)
    app = target.app
    assert isinstance(app, App)
    assert has_api(app)
    assert not [tag for tag in app.tags("app") if tag.startswith("sha256-") and "." not in tag]


# The other command.


@pytest.mark.process
@pytest.mark.parametrize(("kind", "options"), [("api", {}), ("fallback", {"referrers_api": False})])
@pytest.mark.parametrize("name", ["single", "nested", "index", "index-typed"])
def test_copy_does_the_same(name, kind, options, source, serve):
    made, target = family(name), serve(**options)
    made.load_into(source.app)
    ran = run_regsync(
        "copy", "--json", f"{source.address}/app:v1", f"{target.address}/mirror/app:v1"
    )
    assert (ran.status, ran.failed) == (0, []), ran.err
    assert equal(
        walk(source.address, "app", made.kept), walk(target.address, "mirror/app", made.kept)
    )


# Wire counts: what three referrers add to the copy of an image (docs/design.md section 6, rule 15).


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        # The image's referrers, those of each, and no fallback tag.
        ("strict", {"GET tag_list": 1, "GET manifest": 4, "GET referrers": 4, "GET blob": 6}),
        (
            "referrers-in-pages",
            {"GET tag_list": 1, "GET manifest": 4, "GET referrers": 5, "GET blob": 6},
        ),
        # "No such API" once, then the one fallback tag that the listing shows.
        ("distribution", {"GET tag_list": 1, "GET manifest": 5, "GET referrers": 1, "GET blob": 6}),
        (
            "unknown-200-in-html",
            {"GET tag_list": 1, "GET manifest": 5, "GET referrers": 1, "GET blob": 6},
        ),
    ],
)
async def test_what_a_source_is_asked(world, source, counts, tmp_path):
    scene = Scene(world, tmp_path, family("single"), source)
    await scene.succeed()
    assert scene.source.journal.summary() == counts
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
    journal.matching("PUT", "manifest", reference=tag).exactly(1)
    journal.matching("GET HEAD", "manifest", reference=tag).at_most(2)
    journal.matching("PUT", "manifest", reference=tag).before(
        journal.matching("GET HEAD", "manifest", reference=tag, status=200)
    )


async def test_no_artifacts_of_a_trimmed_index_are_asked_for_at_the_source(world, tmp_path):
    whole = family("index-of-index")
    scene = Scene(world, tmp_path, replace(whole, platforms=("linux/amd64",)))
    await scene.run()
    queries = scene.source.journal.matching("GET", "referrers")
    assert queries
    assert {query.reference for query in queries} <= scene.source.repositories[
        "app"
    ].manifests.keys()
