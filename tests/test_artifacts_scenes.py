"""Artifacts where more than one thing happens at once: targets of two kinds, tags of one digest,
logins, lost state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.client.attachments import Family, family, plain
from conformance.client.graphs import equal, walk
from conformance.content.images import Seed
from conformance.content.samples import Sample
from conformance.providers.personas import imitate
from conformance.registry.app import App
from conformance.registry.tokens import TokenService
from tests.attached import MOVES, Scene
from tests.ends import Ran, Virtual, document, only, tags

KINDS = ("strict", "distribution")
DAY = 86_400


async def sync(
    world: Virtual, directory: Path, registries: dict[str, Any], *mappings: Any, **top: Any
) -> Ran:
    file = directory / "mirror.yaml"
    file.write_text(document(registries, *mappings, defaults={"artifacts": {}}, **top))
    return await world.run("sync", "--json", "-q", "-c", str(file))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["everything", "index", "filtered", "shared"])
async def test_targets_of_two_kinds_are_served_by_one_reading(world, name, kind, tmp_path):
    made = family(name)
    source, one, other = imitate(kind), imitate("strict"), imitate("distribution")
    made.load_into(source)
    ends = {"source": source, "one": one, "other": other}
    for each, site in ends.items():
        world.listen(site, f"{each}.test")
    mapping = {
        "from": "app",
        "tags": tags("v*"),
        **({"platforms": [*made.platforms]} if made.platforms else {}),
    }
    registries = {each: {"url": f"http://{each}.test"} for each in ends}
    ran = await sync(world, tmp_path, registries, mapping)
    assert (ran.status, ran.failed) == (0, []), ran.err
    fetched = [entry.reference for entry in source.journal.matching("GET", "blob")]
    assert len(fetched) == len(set(fetched))
    asked = [entry.target for entry in source.journal.matching("GET", "referrers")]
    assert len(asked) == len(set(asked))
    for target in (one, other):
        assert equal(walk(source, "app", made.kept), walk(target, "app", made.kept))
        target.journal.clear()
    assert (await sync(world, tmp_path, registries, mapping)).status == 0
    for target in (one, other):
        target.journal.matching(MOVES).none()


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
async def test_tags_of_one_digest_share_what_hangs_on_it(world, source, target, tmp_path):
    made = family("everything")
    scene = Scene(world, tmp_path, made, source, target)
    for tag in ("v1.2", "v1.2.3"):
        made.image.load_into(scene.source, "app", tag)
    ran = await scene.succeed()
    assert sorted(each["status"] for each in ran.images) == ["synced"] * 3
    asked = [entry.target for entry in scene.source.journal.matching("GET", "referrers")]
    assert len(asked) == len(set(asked))
    puts = [entry.reference for entry in scene.target.journal.matching("PUT", "manifest")]
    assert len(puts) == len(set(puts))
    assert equal(walk(scene.source, "app", made.kept), walk(scene.target, "app", made.kept))
    await scene.succeed()
    scene.moved().none()


@pytest.mark.parametrize("name", ["everything", "index", "filtered", "index-typed", "deep"])
@pytest.mark.parametrize("target", KINDS)
async def test_a_lost_state_costs_looks_and_no_write(world, name, target, tmp_path):
    scene = Scene(world, tmp_path, family(name), "strict", target)
    await scene.succeed()
    for file in (tmp_path / ".regsync").iterdir():
        file.unlink()
    ran = await scene.settle()
    told = only(ran.images)["artifacts"]
    assert (told["synced"], told["failed"]) == (0, 0)
    scene.check()
    await scene.settle()


@pytest.mark.parametrize("name", ["everything", "index", "filtered"])
@pytest.mark.parametrize("api", [True, False])
async def test_logins_are_good_for_artifacts_too(world, name, api, tmp_path):
    made = family(name)
    apps: dict[str, App] = {}
    for end in ("source", "target"):
        auth = TokenService({"u": "p"}, expires_in=DAY, lifetime=DAY, anonymous=False)
        apps[end] = App(auth=auth, referrers_api=api)
        world.listen(apps[end], f"{end}.test")
    made.sample.load_into(apps["source"], "app", "v1")
    if not api:
        made.load_into(apps["source"])
    who = {"auth_type": "basic", "credentials": {"username": "u", "password": "p"}}
    registries = {end: {"url": f"http://{end}.test", **who} for end in apps}
    mapping = {
        "from": "app",
        "tags": tags("v*"),
        **({"platforms": [*made.platforms]} if made.platforms else {}),
    }
    ran = await sync(world, tmp_path, registries, mapping)
    assert (ran.status, ran.failed) == (0, []), ran.err
    clean = {end: App(referrers_api=api) for end in apps}
    for end, app in apps.items():
        clean[end].repositories = app.repositories
    assert equal(walk(clean["source"], "app", made.kept), walk(clean["target"], "app", made.kept))


@pytest.mark.parametrize("target", KINDS)
async def test_several_images_bring_their_own(world, target, tmp_path):
    """What they have in common is uploaded once: a layer, the empty config, a blob of two
    artifacts.
    """
    seed = Seed(91)
    layer = seed.layer(500)
    images = [seed.image(layers=[layer, seed.layer(20)]) for _ in range(5)]
    whole = [plain(seed, each) for each in images]
    scene = Scene(world, tmp_path, Family(whole[0], kept=(images[0].top,)), "distribution", target)
    for number, sample in enumerate(whole[1:], 2):
        Family(sample).load_into(scene.source, tag=f"v{number}")
    ran = await scene.succeed()
    assert [each["artifacts"]["synced"] for each in ran.images] == [3] * 5
    scene.source.journal.matching("GET", "referrers").exactly(1)
    kept = [each.top for each in images]
    assert equal(walk(scene.source, "app", kept), walk(scene.target, "app", kept))
    await scene.succeed()
    scene.moved().none()


@pytest.mark.parametrize(
    "source", ["strict", "referrers-or-unknown", "distribution", "unknown-200-in-html"]
)
async def test_an_image_without_is_refused_where_artifacts_are_required(world, source, tmp_path):
    scene = Scene(world, tmp_path, family("nothing"), source, require_artifacts=True)
    ran = await scene.run()
    assert only(ran.images)["status"] == "failed"
    assert "require_artifacts" in ran.err
    scene.moved().none()
    full = Family(
        Sample(scene.made.image, plain(Seed(92), scene.made.image).attached), kept=scene.made.kept
    )
    full.load_into(scene.source)
    scene.made = full
    await scene.succeed()
    scene.check()
    await scene.settle()


@pytest.mark.parametrize("source", KINDS)
async def test_a_dry_run_asks_and_changes_nothing(world, source, tmp_path):
    scene = Scene(world, tmp_path, family("filtered"), source, "distribution")
    file = tmp_path / "mirror.yaml"
    registries = {end: {"url": f"http://{end}.test"} for end in ("source", "target")}
    file.write_text(document(registries, scene.mapping, defaults={"artifacts": {}}))
    ran = await world.run("sync", "--dry-run", "-c", str(file))
    assert ran.status == 0, ran.err
    for site in (scene.source, scene.target):
        site.journal.matching(MOVES).none()
    for each in scene.made.travelling:
        assert each.top in ran.out
    top, *_ = (each for each in scene.made.sample.attached if each.top in scene.made.lost)
    assert f"strip {top.top}" in ran.out
    await scene.succeed()
    scene.check()


@pytest.mark.parametrize("target", KINDS)
async def test_what_somebody_attached_at_the_target_stays(world, target, tmp_path):
    """A signature of the mirror's own is nobody's to delete, and our list keeps its entry."""
    made = family("single")
    scene = Scene(world, tmp_path, made, "strict", target)
    await scene.succeed()
    own = Seed(93).artifact(made.image, "application/vnd.example.own")
    attached = (*made.sample.attached, own)
    Family(Sample(made.image, attached)).load_into(scene.target)
    late = Seed(94).artifact(made.image, "application/vnd.example.late")
    late.load_into(scene.source, "app")
    for file in (tmp_path / ".regsync").iterdir():
        file.unlink()
    await scene.succeed()
    there = walk(scene.target, "app", made.kept).referrers[made.image.top]
    assert there.keys() == {each.top for each in (*attached, late)}
