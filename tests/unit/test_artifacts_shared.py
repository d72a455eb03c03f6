"""Artifacts that several tags, mappings and runs have to do with: each image is judged by what its
target holds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from _regsync.oci import referrers_tag
from conformance.client.graphs import equal, walk
from conformance.content.images import Seed
from tests.ends import Virtual, document, only, tags
from tests.mirrors import SIGNATURE, SignedMirror


@pytest.fixture
def mirror(world: Virtual, tmp_path: Path) -> SignedMirror:
    return SignedMirror(world, tmp_path)


def puts(mirror: SignedMirror) -> list[str | None]:
    return [
        each.reference for each in mirror.target.journal.matching("PUT", "manifest", status=201)
    ]


async def test_a_signature_by_tag_is_a_level_too(mirror):
    top = mirror.images[0]
    for _ in range(8):
        top = mirror.load(mirror.seed.artifact(top, SIGNATURE))
    mirror.load(mirror.seed.image(), f"{referrers_tag(top.top)}.sig")
    ran = await mirror.sync({"from": "app", "tags": tags("v*")})
    assert "more than 8 deep" in only(ran.images)["error"]["message"]
    mirror.target.journal.matching("PUT POST").none()


@pytest.mark.parametrize("referrers_api", [True, False])
async def test_an_artifact_that_is_a_child_too_is_put_once(world, referrers_api, tmp_path):
    """An index names an image, and a signature of the image; the source lists the signature, too."""
    mirror = SignedMirror(world, tmp_path, images=0)
    mirror.target.app.referrers_api = referrers_api
    image = mirror.seed.image()
    signature = mirror.load(mirror.seed.artifact(image, SIGNATURE))
    index = mirror.load(mirror.seed.index([image, signature]), "v0")
    ran = await mirror.sync({"from": "app", "tags": tags("v*")})
    assert (ran.status, ran.statuses()) == (0, ["synced"]), ran.err
    lists = [] if referrers_api else [referrers_tag(image.top)]
    assert sorted(puts(mirror)) == sorted([image.top, signature.top, "v0", *lists])
    assert only(ran.images)["artifacts"]["synced"] == 1
    assert equal(
        walk(mirror.source.app, "app", [index.top]), walk(mirror.target.app, "app", [index.top])
    )


async def test_a_signature_that_two_sources_have_is_asked_for_once_at_the_target(world, tmp_path):
    """Both sign one image by cosign's tag, and both copy it to one repository."""
    target = world.registry("target.example")
    sources = [world.registry("one.example"), world.registry("two.example")]
    seed = Seed(5)
    image = seed.image()
    signature = seed.image(sizes=(100,))
    tag = f"{referrers_tag(image.top)}.sig"
    for number, place in enumerate(sources):
        image.load_into(place.app, "app", f"v{number}")
        signature.load_into(place.app, "app", tag)
    mappings = [
        {"from": "app", "source": name, "tags": tags("v*"), "artifacts": {"enabled": True}}
        for name in ("one", "two")
    ]
    registries = {"one": sources[0], "two": sources[1], "target": target}
    file = tmp_path / "mirror.yaml"
    file.write_text(
        document(registries, *mappings, defaults={"source": "one", "targets": ["target"]})
    )
    first = await world.run("sync", "--json", "-q", "-c", str(file))
    assert first.statuses() == ["synced"] * 2, first.err
    target.journal.clear()
    again = await world.run("sync", "--recheck", "--json", "-q", "-c", str(file))
    assert again.statuses() == ["skipped"] * 2, again.err
    assert target.journal.summary() == {"HEAD manifest": 3}
    target.journal.matching("HEAD", "manifest", reference=tag).exactly(1)
