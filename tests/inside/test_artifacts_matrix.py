"""What hangs on an image arrives whole, from registries of every kind at registries of every kind.

Each cell is a kind of source, a kind of target and a family of artifacts; an ordinary run has every
pair of these. The walks of conformance.client.graphs, by the referrers API or the fallback tag and over
cosign's tags, find the same on both sides, nothing is put before its subject, and a second run
writes nothing.
"""

from __future__ import annotations

import pytest

from _regsync.sync import discovery
from conformance.client.attachments import FAMILIES, family
from tests.attached import Scene

# Wire counts: what three referrers add to the copy of an image (docs/design.md section 6, rule 15).


@pytest.mark.provokes("manifest_fetched_twice")
@pytest.mark.parametrize("name", FAMILIES)
async def test_artifacts_are_found_when_manifests_do_not_stay_in_memory(
    world, name, tmp_path, monkeypatch
):
    """An evicted index was taken for a trimmed one, which the source does not have."""
    monkeypatch.setattr(discovery, "_MANIFEST_BUDGET", 1)
    scene = Scene(world, tmp_path, family(name))
    await scene.succeed()
    scene.check()
