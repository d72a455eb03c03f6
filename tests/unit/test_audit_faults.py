"""`regsync audit` where registries are of many kinds, refuse, throttle, go away or are slow; where
signals come, disks are full and nobody reads; and between two real registries.
"""

from __future__ import annotations

from _regsync.text import size_text
from conformance.content.images import Seed
from tests.ends import document, run_regsync, tags
from tests.mirrors import lose_blob

# The process.


def test_an_audit_that_finds_nothing_says_nothing_and_findings_are_lines(source, target):
    image = Seed(1).image().load_into(source.app, "app", tag="v1")
    image.load_into(target.app, "app", tag="v1")
    rule = {"from": "app", "tags": tags("v1"), "artifacts": {}}
    config = document({"source": source, "target": target}, rule, defaults={"artifacts": {}})
    ran = run_regsync("audit", "-c", "-", stdin=config)
    assert (ran.status, ran.out, ran.err) == (0, "", "")

    lost = next(iter(image.blobs))
    size = len(image.blobs[lost])
    lose_blob(target.app, lost)
    ran = run_regsync("audit", "-c", "-", stdin=config)
    names = f"{source.address}/app:v1 -> {target.address}/app:v1"
    assert ran.status == 1
    assert ran.out.splitlines()[:3] == [
        f"incomplete {names}: blob {lost} ({size_text(size)}) is missing",
        "Images: 0 whole, 1 with findings, 0 not checked completely",
        f"Present: 1 manifests, {len(image.blobs) - 1} blobs, 0 artifacts",
    ]
    assert ran.err == ""
