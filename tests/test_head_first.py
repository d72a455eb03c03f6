"""A tag that its target holds costs no manifest where digests are asked for first, also when no
earlier run has left anything (docs/design.md section 6, rule 4).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest

from conformance.content.images import Image, Seed
from conformance.messages import Answer, Request, error
from tests.ends import Ran, Virtual, document, held, tags

HOUR = 3600
NAMES = tuple(f"v{number}" for number in range(5))


class Stage:
    """A source whose digests are asked for first, a target, and what both hold of an image."""

    def __init__(self, world: Virtual, directory: Path, **options: Any) -> None:
        self.world = world
        self.directory = directory
        self.seed = Seed(8)
        self.source = world.registry("source.test", **options)
        self.target = world.registry("target.test", **options)

    async def run(self, *names: str, **top: Any) -> Ran:
        """Run one mapping of these tags, with artifacts and a state."""
        for place in (self.source, self.target):
            place.journal.clear()
        ends = {"source": {"url": self.source.url, "head_first": True}, "target": self.target}
        rule = {"from": "app", "tags": tags(*names), "artifacts": {"enabled": True}}
        file = self.directory / "mirror.yaml"
        file.write_text(document(ends, rule, **top))
        return await self.world.run("sync", "--json", "-q", "-c", str(file))

    def load(self, image: Image, *names: str, at_target: bool = True) -> Image:
        for place in (self.source, self.target) if at_target else (self.source,):
            image.load_into(place.app, "app", *names)
        return image

    def asked(self) -> Counter[str]:
        """Count what the source was asked for, manifests by tag and by digest."""
        return Counter(
            f"{entry.method} {entry.kind}"
            + (" by digest" if entry.kind == "manifest" and ":" in entry.reference else "")
            for entry in self.source.journal.entries
        )


@pytest.mark.parametrize("rule", [("v*",), NAMES], ids=["glob", "literal"])
async def test_unchanged_tags_cost_a_head_and_their_referrers(world, tmp_path, rule):
    stage = Stage(world, tmp_path)
    for name in NAMES[:3]:
        stage.load(stage.seed.index(), name)
    for name in NAMES[3:]:
        stage.load(stage.seed.image(), name)
    ran = await stage.run(*rule)
    assert ran.statuses() == ["skipped"] * 5
    listing = {"GET tag_list": 1} if rule == ("v*",) else {}
    assert stage.asked() == {"HEAD manifest": 5, "GET referrers": 5, **listing}
    assert stage.target.journal.summary() == {"GET tag_list": 1, "HEAD manifest": 5}

    # The look was a whole one, as far as later runs know.
    ran = await stage.run(*rule)
    assert ran.statuses() == ["skipped"] * 5
    assert stage.asked() == {"HEAD manifest": 5, **listing}


async def test_without_the_api_one_listing_takes_the_place_of_all_fallback_tags(world, tmp_path):
    stage = Stage(world, tmp_path, referrers_api=False)
    for name in NAMES:
        stage.load(stage.seed.index(), name)
    assert (await stage.run(*NAMES)).statuses() == ["skipped"] * 5
    assert stage.asked() == {"HEAD manifest": 5, "GET referrers": 1, "GET tag_list": 1}


async def test_docker_hub_needs_no_field_for_tags_that_the_target_lists(world, tmp_path):
    hub, target = world.persona("dockerhub"), world.registry("target.test")
    seed = Seed(9)
    for name in NAMES:
        image = seed.index()
        image.load_into(hub, "library/alpine", tag=name)
        image.load_into(target.app, "alpine", tag=name)
    mapping = {"from": "alpine", "tags": tags(*NAMES), "artifacts": {"enabled": True}}
    file = tmp_path / "mirror.yaml"
    file.write_text(document({"source": "docker.io", "target": target}, mapping))
    ran = await world.run("sync", "--json", "-q", "-c", str(file))
    assert ran.statuses() == ["skipped"] * 5
    hub.journal.matching("HEAD", "manifest", status=200).exactly(5)
    hub.journal.matching("GET", "manifest").none()


async def test_a_signature_that_the_target_holds_is_not_fetched_and_a_new_one_is(world, tmp_path):
    stage = Stage(world, tmp_path)
    image = stage.load(stage.seed.index(), "v0")
    stage.load(stage.seed.artifact(image))
    assert (await stage.run("v0")).statuses() == ["skipped"]
    # Of the image and of its signature.
    assert stage.asked() == {"HEAD manifest": 1, "GET referrers": 2}
    # The target is asked once whether it needs a list of them.
    assert stage.target.journal.summary() == {"HEAD manifest": 2, "GET referrers": 1}

    late = stage.load(stage.seed.artifact(image), at_target=False)
    await anyio.sleep(2 * HOUR)
    assert (await stage.run("v0")).statuses() == ["synced"]
    assert stage.asked()["GET manifest by digest"] == 1
    assert held(stage.target, "app", late)


async def test_what_is_copied_is_looked_at_whole(world, tmp_path):
    stage = Stage(world, tmp_path)
    children = [stage.seed.image(architecture=each) for each in ("amd64", "arm64")]
    image = stage.load(stage.seed.index(children), "v0", at_target=False)
    signature = stage.load(stage.seed.artifact(children[1]), at_target=False)
    assert (await stage.run("v0")).statuses() == ["synced"]
    # The index, its children, the signature; all four are asked about.
    assert stage.asked()["HEAD manifest"] == 1
    assert stage.asked()["GET manifest by digest"] == 4
    assert stage.asked()["GET referrers"] == 4
    assert held(stage.target, "app", image)
    assert held(stage.target, "app", signature)


async def test_what_a_failed_run_left_out_below_the_top_is_not_forgotten(world, tmp_path):
    """The snapshot has expired, and the target holds the image: that artifacts are lacking is known
    by the look at them alone, which does not expire.
    """
    stage = Stage(world, tmp_path)
    children = [stage.seed.image(architecture=each) for each in ("amd64", "arm64")]
    stage.load(stage.seed.index(children), "v0", at_target=False)
    signature = stage.load(stage.seed.artifact(children[1]), at_target=False)

    def intercept(request: Request) -> Answer | None:
        if request.method == "PUT" and request.reference == signature.top:
            return error(403, "DENIED", "not now")
        return None

    stage.target.app.intercept = intercept
    short = {"cache_ttl": "1h"}
    assert (await stage.run("v0", **{"global": short})).statuses() == ["failed"]
    stage.target.app.intercept = None
    await anyio.sleep(2 * HOUR)
    assert (await stage.run("v0", **{"global": short})).statuses() == ["synced"]
    assert held(stage.target, "app", signature)


async def test_artifacts_that_are_wanted_from_now_on_are_looked_for_at_all_depths(world, tmp_path):
    """This program has copied the image and has never asked for its artifacts."""
    stage = Stage(world, tmp_path)
    children = [stage.seed.image(architecture=each) for each in ("amd64", "arm64")]
    stage.load(stage.seed.index(children), "v0", at_target=False)
    signature = stage.load(stage.seed.artifact(children[1]), at_target=False)
    ends = {"source": stage.source, "target": stage.target}
    file = tmp_path / "mirror.yaml"
    file.write_text(document(ends, {"from": "app", "tags": tags("v0")}))
    ran = await world.run("sync", "--json", "-q", "-c", str(file))
    assert ran.statuses() == ["synced"]
    assert (await stage.run("v0")).statuses() == ["synced"]
    assert held(stage.target, "app", signature)
