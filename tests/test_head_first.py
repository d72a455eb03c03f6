"""A tag that its target holds costs no manifest where digests are asked for first.

What that costs in undisturbed runs is in test_costs.
"""

from __future__ import annotations

import anyio
import pytest

from tests.ends import document, held, tags
from tests.mirrors import Mirror, asked

NAMES = tuple(f"v{number}" for number in range(5))
FIRST = {"source": {"url": "http://source.test", "head_first": True}}


def hold(mirror, *names, image=None, at_target=True):
    image = image or mirror.seed.index()
    for place in (mirror.source, mirror.target)[: 1 + at_target]:
        image.load_into(place.app, "app", *names)
    return image


def signed_index(mirror):
    children = [mirror.seed.image(architecture=each) for each in ("amd64", "arm64")]
    index = hold(mirror, "v0", image=mirror.seed.index(children), at_target=False)
    return index, hold(mirror, image=mirror.seed.artifact(children[1]), at_target=False)


async def look(mirror, *names, **top):
    """Run once; return the outcomes and what each end was asked, digests apart from tags."""
    ran = await mirror.sync({"from": "app", "tags": tags(*names)}, registries=FIRST, **top)
    digests = sum(
        ":" in each.reference for each in mirror.source.journal.matching("GET", "manifest")
    )
    return ran.statuses(), asked(mirror.source), asked(mirror.target), digests


async def test_without_the_api_one_listing_takes_the_place_of_all_fallback_tags(world, tmp_path):
    mirror = Mirror(world, tmp_path, referrers_api=False)
    for name in NAMES:
        hold(mirror, name)
    asked_first = {"HEAD manifest": 5, "GET referrers": 1, "GET tag_list": 1}
    outcome, source, _, digests = await look(mirror, *NAMES)
    assert (outcome, source, digests) == (["skipped"] * 5, asked_first, 0)
    outcome, source, *_ = await look(mirror, *NAMES)
    assert (outcome, source) == (["skipped"] * 5, {"HEAD manifest": 5})


async def test_docker_hub_needs_no_field_for_tags_that_the_target_lists(mirror, world):
    hub = world.persona("dockerhub")
    for name in NAMES:
        mirror.seed.index().load_into(hub, "library/alpine", name).load_into(
            mirror.target.app, "alpine", name
        )
    mapping = {"from": "alpine", "tags": tags(*NAMES), "artifacts": {"enabled": True}}
    mirror.file.write_text(document({"source": "docker.io", "target": mirror.target}, mapping))
    assert (await mirror.run("sync")).statuses() == ["skipped"] * 5
    hub.journal.matching("HEAD", "manifest", status=200).exactly(5)
    hub.journal.matching("GET", "manifest").none()


async def test_a_signature_that_the_target_holds_is_not_fetched_and_a_new_one_is(mirror):
    image = hold(mirror, "v0")
    hold(mirror, image=mirror.seed.artifact(image))
    there = {"HEAD manifest": 2, "GET referrers": 1}
    assert await look(mirror, "v0") == (
        ["skipped"],
        {"HEAD manifest": 1, "GET referrers": 2},
        there,
        0,
    )
    late = hold(mirror, image=mirror.seed.artifact(image), at_target=False)
    await anyio.sleep(7200)
    outcome, *_, digests = await look(mirror, "v0")
    assert (outcome, digests, mirror.holds(late)) == (["synced"], 1, True)


async def test_what_is_copied_is_looked_at_whole(mirror):
    index, signature = signed_index(mirror)
    outcome, source, _, digests = await look(mirror, "v0")
    assert (outcome, source["HEAD manifest"], digests, source["GET referrers"]) == (
        ["synced"],
        1,
        4,
        4,
    )
    assert held(mirror.target, "app", index)
    assert held(mirror.target, "app", signature)


@pytest.mark.parametrize("how", ["refused", "not wanted"])
async def test_artifacts_that_an_earlier_run_left_out_are_looked_for_at_all_depths(mirror, how):
    _, signature = signed_index(mirror)
    top = {"global": {"cache_ttl": "1h"}}
    if how == "refused":
        mirror.target.app.faults.on("PUT", "manifest", reference=signature.top).status(
            403
        ).optional()
        assert (await look(mirror, "v0", **top))[0] == ["failed"]
        mirror.target.app.faults.rules.clear()
        await anyio.sleep(7200)
    else:
        await look(mirror, "v0", defaults={"artifacts": {"enabled": False}})
    assert (await look(mirror, "v0", **top))[0] == ["synced"]
    assert held(mirror.target, "app", signature)
