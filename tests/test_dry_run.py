"""`sync --dry-run`: nothing is changed, and what it foretells is what a run then does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import anyio
import pytest

from conformance.tokens import TokenService
from conformance.walks import referrers_tag
from tests.ends import Ran, tags
from tests.mirrors import SBOM, WRITES, Mirror, asked
from tests.published import check

V1 = {"from": "app", "tags": tags("v1")}
NO_ARTIFACTS = {"artifacts": {"enabled": False}}


class Foretold(Mirror):
    """Three repositories of images over one base, and an index."""

    def load_family(self) -> list[dict[str, Any]]:
        """Load them; return mappings for them."""
        base = [self.seed.layer(70_000), self.seed.layer(900)]
        for name in ("one", "two", "three"):
            for tag in ("v1", "v2"):
                self.push(tag, self.seed.image(layers=[*base, self.seed.layer(500)]), name)
        self.push("v1", self.seed.index(attestations=True), "many")
        both = [{"from": name, "tags": tags("v1", "v2")} for name in ("one", "two", "three")]
        return [*both, {"from": "many", "tags": tags("v1")}]

    async def foretell(self, *mappings, text: bool = False, **top) -> Ran:
        """Run dry, which changes nothing and ends well; for people, or in JSON."""
        self.write(*mappings, **top)
        self.clear()
        form = [] if text else ["--json"]
        ran = await self.world.run("sync", "--dry-run", "-q", *form, "-c", str(self.file))
        assert ran.status == 0, ran.err
        if not text:
            check("report", ran.report)
        for place in (self.source, self.target):
            place.journal.matching(WRITES).none()
        return ran


@pytest.fixture
def mirror(world, tmp_path) -> Foretold:
    return Foretold(world, tmp_path)


async def test_a_dry_run_foretells_what_the_run_then_does(mirror):
    mappings = mirror.load_family()
    foretold = await mirror.foretell(*mappings)
    assert not mirror.cache.exists()
    assert foretold.report["dry_run"] is True
    assert Counter(foretold.statuses()) == {"would_sync": 7}
    done = await mirror.sync(*mappings)
    for key in ("bytes", "layers", "saved"):
        assert foretold.totals[key] == done.totals[key], key
    assert foretold.totals["images"] == {"synced": 0, "skipped": 0, "failed": 0, "would_sync": 7}
    assert done.totals["images"] == {"synced": 7, "skipped": 0, "failed": 0}

    again = await mirror.foretell(*mappings)
    assert Counter(again.statuses()) == {"skipped": 7}
    assert asked(mirror.source) == asked(mirror.target) == {"HEAD manifest": 7}


async def test_a_dry_run_says_per_mapping_and_image_what_would_happen(mirror):
    mirror.load_family()
    mapping = {"tags": {"glob": "v*", "exclude": "v1"}}
    named = [{**mapping, "from": "one"}, {**mapping, "from": "two"}]
    ran = await mirror.foretell(*named, text=True, defaults=NO_ARTIFACTS)
    assert ran.out.splitlines() == [
        "select source.test/one -> one: 1 tags (dropped: 1 exclude)",
        "select source.test/two -> two: 1 tags (dropped: 1 exclude)",
        "would sync source.test/one:v2 -> target.test/one:v2 (4 blobs, 76.9 KB, 0 mounted, 0 there)",
        "would sync source.test/two:v2 -> target.test/two:v2 (2 blobs, 2.6 KB, 2 mounted, 0 there)",
        "Images: 2 would be synced, 0 skipped, 0 failed",
        "Layers: 6 to transfer, 2 to mount",
        "Data: 79.5 KB of 153.8 KB to transfer",
    ]


async def test_a_dry_run_asks_for_no_more_than_pull_and_for_no_blob_by_post(world, tmp_path):
    service = TokenService({}, now=anyio.current_time)
    mirror = Foretold(world, tmp_path, of={"target": {"auth": service}})
    await mirror.foretell(*mirror.load_family())
    scopes = [entry.target for entry in mirror.target.journal.entries if "scope=" in entry.target]
    assert scopes
    assert not any("push" in scope for scope in scopes)


async def test_a_dry_run_finds_what_the_target_has(mirror):
    base = mirror.seed.layer(50_000)
    old = mirror.seed.image(layers=[base, mirror.seed.layer(900)])
    mirror.push("v1", mirror.seed.image(layers=[base, mirror.seed.layer(900)]))
    old.load_into(mirror.target.app, "app", "v0")
    foretold = await mirror.foretell(V1)
    assert [each["blobs"]["skipped"] for each in foretold.images] == [1]
    mirror.target.journal.matching("HEAD", "blob").exactly(3)
    done = await mirror.sync(V1)
    assert foretold.totals["bytes"] == done.totals["bytes"] > 0
    assert foretold.totals["saved"] == done.totals["saved"]

    # The state knows now that a POST would tell what is there (rule 11); a dry run sends none.
    mirror.push("v1", mirror.seed.image(sizes=(900,) * 4))
    await mirror.foretell(V1)
    mirror.target.journal.matching("HEAD", "blob").exactly(5)


# Artifacts that stay behind.


@pytest.mark.parametrize(
    ("rule", "copied"),
    [
        ({"artifacts": {"enabled": False}}, set()),
        ({"platforms": ["linux/amd64"]}, {"amd64", "amd64 bill", "amd64 signed bill"}),
        ({"artifacts": {"include": [SBOM]}}, {"amd64 bill", "arm64 bill"}),
        ({"artifacts": {"exclude": [SBOM]}}, {"index", "amd64", "arm64"}),
        ({}, None),
    ],
    ids=["disabled", "platforms", "included", "excluded", "all"],
)
async def test_a_dry_run_names_all_artifacts_that_stay_behind(mirror, rule, copied):
    """An index of two platforms is signed as a whole, and each platform, which has an SBOM that is signed
    too. Whether the images are there already or not.
    """
    platforms = {name: mirror.seed.image(architecture=name) for name in ("amd64", "arm64")}
    index = mirror.push("v1", mirror.seed.index([*platforms.values()]))
    made = {"index": mirror.attach(index).top}
    for name, platform in platforms.items():
        made[name] = mirror.attach(platform).top
        bill = mirror.attach(platform, SBOM)
        made |= {f"{name} bill": bill.top, f"{name} signed bill": mirror.attach(bill).top}
    copied = made.keys() if copied is None else copied
    left = made.keys() - copied
    names = {digest: name for name, digest in made.items()}

    for is_there in (False, True):
        told = (await mirror.foretell({**V1, **rule}, text=True)).out
        lines = [line.split() for line in told.splitlines() if line.strip().startswith("- would ")]
        verbs = {(words[2], names[words[3]]) for words in lines}
        carried = {("carry", name) for name in copied}
        assert verbs == {("strip", name) for name in left} | (set() if is_there else carried)
        assert ("would skip" in told) is is_there
        if is_there:
            assert asked(mirror.target) == {"HEAD manifest": 1}
            assert left or asked(mirror.source) == {"HEAD manifest": 1}, "nothing can stay behind"
        report = await mirror.foretell({**V1, **rule})
        assert report.images[0]["artifacts"]["stripped"] == len(left)
        await mirror.sync({**V1, **rule})


async def test_whoever_filters_is_told_the_types_of_what_stays_behind(mirror):
    """Of an image under a tag of cosign's those of its config and layers, which have been read."""
    signed = mirror.push("v1")
    signature = mirror.push(f"{referrers_tag(signed.top)}.sig")
    rule = {"from": "app", "tags": tags("v*"), "artifacts": {"include": [SBOM]}}
    told = (await mirror.foretell(rule, text=True)).out
    config, layers = (signature.document[key] for key in ("config", "layers"))
    types = ", ".join(sorted({config["mediaType"], *(each["mediaType"] for each in layers)}))
    assert f"- would strip {referrers_tag(signed.top)}.sig ({types}) of {signed.top}" in told
    mirror.source.journal.matching("GET", "manifest").exactly(2)  # the image, its signature


@pytest.mark.parametrize("rule", [NO_ARTIFACTS, {"platforms": ["linux/amd64"]}])
async def test_a_dry_run_fails_for_nothing_that_the_run_does_not_ask(mirror, rule):
    index = mirror.push("v1", mirror.seed.index())
    faults = mirror.source.app.faults
    faults.on("GET", "referrers", reference=index.top).status(403, "DENIED")
    mirror.write({**V1, **rule})
    foretold = await mirror.world.run("sync", "--dry-run", "-c", str(mirror.file))
    assert (foretold.status, foretold.err.count("what stays behind is not known")) == (0, 1)
    assert "would sync" in foretold.out
    assert (await mirror.sync({**V1, **rule})).statuses() == ["synced"]


async def test_no_artifacts_are_told_below_another_image(mirror):
    """What fails has its line among the errors."""
    for tag in ("v1", "v2"):
        mirror.attach(mirror.push(tag))
    mirror.seed.image().load_into(mirror.target.app, "app", "v2")
    mirror.target.app.faults.on("HEAD", "manifest", reference="v2").status(405)
    mirror.write({"from": "app", "tags": tags("v1", "v2"), **NO_ARTIFACTS})
    ran = await mirror.world.run("sync", "--dry-run", "-q", "-c", str(mirror.file))
    assert (ran.status, ran.out.count("- would strip")) == (1, 1)
