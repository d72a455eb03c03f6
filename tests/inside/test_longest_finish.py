"""The answer to a body is waited for 15 minutes at most, however large the blob is.

A blob for which that is the bound has 840 MiB, so that a small one gets a longer first minute here.
"""

from __future__ import annotations

from functools import partial

import pytest

from _regsync.app import environment
from _regsync.net.wire import Timeouts
from _regsync.registry.client import Machine
from conformance.content.images import Seed
from tests.ends import held


@pytest.mark.parametrize(("seconds", "asks"), [(899.5, 0), (900.5, 1)], ids=["in time", "late"])
async def test_the_answer_to_a_body_is_waited_for_at_most_15_minutes(
    world, monkeypatch, seconds, asks
):
    monkeypatch.setattr(environment, "Machine", partial(Machine, timeouts=Timeouts(finish=899.0)))
    source, target = world.registry("source.test"), world.registry("target.test")
    image = Seed(7).image(sizes=(4 << 20,)).load_into(source.app, "app", tag="v1")
    digest = image.document["layers"][0]["digest"]
    late = target.app.faults.on("PUT", "upload", query={"digest": digest})
    late.first().delay(seconds, at="answer")
    ran = await world.copy(source, target)
    assert (ran.status, ran.failed) == (0, [])
    assert held(target, "app", image)
    assert target.journal.count("HEAD", "blob", reference=digest, status=200) == asks
    assert ran.seconds == pytest.approx(min(seconds, 900), abs=0.1)
