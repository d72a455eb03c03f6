"""`sync --dry-run`: nothing is changed, and what it foretells is what a run then does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from conformance.content.images import Seed
from conformance.server.sockets import Server
from tests.ends import Ran, Start, document, run_regsync, tags


def command(
    directory: Path,
    what: str,
    registries: Mapping[str, Any],
    *mappings: Mapping[str, Any],
    more: str = "--json",
) -> Ran:
    file = directory / "mirror.yaml"
    file.write_text(document(registries, *mappings))
    words = {"dry": ["sync", "--dry-run"], "sync": ["sync"]}[what]
    return run_regsync(*words, more, "-c", str(file))


def shared_base(source: Server) -> list[dict[str, Any]]:
    """Load three repositories of images over one base, and an index; return mappings for them."""
    made = Seed(3)
    base = [made.layer(70_000), made.layer(900)]
    for name in ("one", "two", "three"):
        for tag in ("v1", "v2"):
            made.image(layers=[*base, made.layer(500)]).load_into(source.app, name, tag=tag)
    made.index(attestations=True).load_into(source.app, "many", tag="v1")
    return [
        *({"from": name, "tags": tags("v1", "v2")} for name in ("one", "two", "three")),
        {"from": "many", "tags": tags("v1")},
    ]


def changed_nothing(*servers: Server) -> bool:
    return all(
        not server.journal.matching(method)
        for server in servers
        for method in ("POST", "PUT", "PATCH")
    )


def test_a_dry_run_foretells_what_the_run_then_does(tmp_path: Path, serve: Start) -> None:
    source, target = serve(), serve()
    mappings, ends = shared_base(source), {"source": source, "target": target}
    foretold = command(tmp_path, "dry", ends, *mappings)
    assert foretold.status == 0, foretold.err
    assert changed_nothing(source, target)
    assert not (tmp_path / ".regsync").exists()
    assert foretold.report["dry_run"] is True
    assert Counter(foretold.statuses()) == {"would_sync": 7}
    done = command(tmp_path, "sync", ends, *mappings)
    for key in ("bytes", "layers", "saved"):
        assert foretold.totals[key] == done.totals[key], key
    assert foretold.totals["images"] == {"synced": 0, "skipped": 0, "failed": 0, "would_sync": 7}
    assert done.totals["images"] == {"synced": 7, "skipped": 0, "failed": 0}


def test_a_dry_run_over_a_finished_one_skips_everything(tmp_path: Path, serve: Start) -> None:
    source, target = serve(), serve()
    mappings, ends = shared_base(source), {"source": source, "target": target}
    mappings = [{**mapping, "artifacts": {}} for mapping in mappings]  # none stay behind
    command(tmp_path, "sync", ends, *mappings)
    source.journal.clear()
    target.journal.clear()
    again = command(tmp_path, "dry", ends, *mappings)
    assert Counter(again.statuses()) == {"skipped": 7}
    assert source.journal.summary() == target.journal.summary() == {"HEAD manifest": 7}


def test_a_dry_run_says_per_mapping_and_image_what_would_happen(
    tmp_path: Path, serve: Start
) -> None:
    source, target = serve(), serve()
    shared_base(source)
    ends = {"source": source, "target": target}
    mapping = {"from": "one", "tags": {"glob": "v*", "exclude": "v1"}}
    told = command(tmp_path, "dry", ends, mapping, more="-q").out.splitlines()
    assert told == [
        f"select {source.address}/one -> one: 1 tags (dropped: 1 exclude)",
        f"would sync {source.address}/one:v2 -> {target.address}/one:v2 ({told[1].partition('(')[2]}",
        "Images: 1 would be synced, 0 skipped, 0 failed",
        "Layers: 4 to transfer, 0 to mount",
        told[4],
    ]
    assert "4 blobs, 7" in told[1]
    assert told[1].endswith("0 mounted, 0 there)")
    size = told[1].partition(" blobs, ")[2].partition(",")[0]
    assert told[4] == f"Data: {size} of {size} to transfer"


def test_a_dry_run_asks_for_no_more_than_pull(tmp_path: Path, serve: Start) -> None:
    from conformance.registry.tokens import TokenService

    source, target = serve(), serve(auth=TokenService({}))
    mappings = shared_base(source)
    command(tmp_path, "dry", {"source": source, "target": target}, *mappings)
    scopes = [entry.target for entry in target.journal.entries if "scope=" in entry.target]
    assert scopes
    assert not any("push" in scope for scope in scopes)


# Artifacts that stay behind.

SIGNATURE = "application/vnd.example.signature"
SBOM = "application/vnd.example.sbom"


class Attached:
    """An index of two platforms at a source: signed as a whole, each platform signed and with an
    SBOM that is signed too.
    """

    def __init__(self, source: Server) -> None:
        made = Seed(9)
        self.platforms = [made.image(architecture=each) for each in ("amd64", "arm64")]
        self.index = made.index(self.platforms).load_into(source.app, "app", tag="v1")
        self.signatures = list[str]()
        self.sboms = list[str]()
        self.signed_sboms = list[str]()
        for platform in self.platforms:
            signature = made.artifact(platform, SIGNATURE)
            sbom = made.artifact(platform, SBOM)
            on_sbom = made.artifact(sbom, SIGNATURE)
            for artifact in (signature, sbom, on_sbom):
                artifact.load_into(source.app, "app")
            self.signatures.append(signature.top)
            self.sboms.append(sbom.top)
            self.signed_sboms.append(on_sbom.top)
        self.whole = made.artifact(self.index, SIGNATURE).load_into(source.app, "app").top
        self.all = {self.whole, *self.signatures, *self.sboms, *self.signed_sboms}


def named(ran: Ran, verb: str) -> set[str]:
    """Return the digests of which a dry run says that it would `carry` or `strip` them."""
    lines = [line.strip() for line in ran.out.splitlines()]
    return {line.split()[3] for line in lines if line.startswith(f"- would {verb} ")}


@pytest.mark.parametrize("is_there", [False, True], ids=["to be copied", "there already"])
@pytest.mark.parametrize("case", ["disabled", "platforms", "included", "excluded", "all", "both"])
def test_a_dry_run_names_all_artifacts_that_stay_behind(
    tmp_path: Path, serve: Start, case: str, is_there: bool
) -> None:
    source, target = serve(), serve()
    made = Attached(source)
    amd64 = {made.signatures[0], made.sboms[0], made.signed_sboms[0]}
    sboms = {*made.sboms}
    rules: dict[str, tuple[dict[str, Any], set[str]]] = {
        "disabled": ({"artifacts": {"enabled": False}}, set()),
        "platforms": ({"artifacts": {}, "platforms": ["linux/amd64"]}, amd64),
        "included": ({"artifacts": {"include": [SBOM]}}, sboms),
        "excluded": ({"artifacts": {"exclude": [SBOM]}}, {made.whole, *made.signatures}),
        "all": ({"artifacts": {}}, made.all),
        "both": (
            {"artifacts": {"include": [SIGNATURE]}, "platforms": ["linux/amd64"]},
            {made.signatures[0]},
        ),
    }
    rule, copied = rules[case]
    mapping = {"from": "app", "tags": tags("v1"), **rule}
    ends = {"source": source, "target": target}
    if is_there:
        done = command(tmp_path, "sync", ends, mapping)
        assert done.images[0]["artifacts"]["synced"] == len(copied)
    source.journal.clear()
    target.journal.clear()

    ran = command(tmp_path, "dry", ends, mapping, more="-q")
    assert ran.status == 0, ran.err
    assert named(ran, "strip") == made.all - copied
    assert named(ran, "carry") == (set() if is_there else copied)
    assert ("would skip" in ran.out) is is_there
    assert changed_nothing(source, target)
    if is_there:
        assert target.journal.summary() == {"HEAD manifest": 1}
        if case == "all":
            assert source.journal.summary() == {"HEAD manifest": 1}, "nothing can stay behind"

    report = command(tmp_path, "dry", ends, mapping)
    assert report.images[0]["artifacts"]["stripped"] == len(made.all - copied)


def test_a_dry_run_finds_what_the_target_has(tmp_path: Path, serve: Start) -> None:
    source, target = serve(), serve()
    seed = Seed(92)
    base = seed.layer(50_000)
    old, new = (seed.image(layers=[base, seed.layer(900)]) for _ in range(2))
    old.load_into(target.app, "app", tag="v1")
    new.load_into(source.app, "app", tag="v2")
    ends = {"source": source, "target": target}
    foretold = command(tmp_path, "dry", ends, {"from": "app", "tags": {"glob": "v*"}})
    assert [each["blobs"]["skipped"] for each in foretold.images] == [1]
    done = command(tmp_path, "sync", ends, {"from": "app", "tags": {"glob": "v*"}})
    assert foretold.totals["bytes"] == done.totals["bytes"] > 0
    assert foretold.totals["saved"] == done.totals["saved"]
