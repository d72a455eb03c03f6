"""Copies of the families and of the large layers that benchmarks use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conformance.content.fleets import LARGE, Fleet
from conformance.content.images import Seed
from conformance.content.streams import Stream
from conformance.registry.measuring import Measured, MeasuringApp
from tests.ends import Start, copy, held, sync, tags

SMALL = Fleet(repositories=3, tags=4, shared=2, own=1, size=50, bases=2)


@pytest.mark.slow
def test_the_program_brings_a_family_and_then_what_changed(serve: Start) -> None:
    source, target = serve(), serve()
    mapping = [{"from": name, "tags": tags("*")} for name in SMALL.images()]
    for fleet, fresh in (
        (replace(SMALL, left_out=1), 11),
        (SMALL, 1),
        (replace(SMALL, moved=25), 3),
        (SMALL, 3),
    ):
        fleet.load_into(source.app)
        ran = sync({"source": source, "target": target}, *mapping)
        assert ran.status == 0, ran.err
        assert ran.statuses().count("synced") == fresh
        for name, tagged in fleet.images().items():
            assert all(held(target, name, image) for image in tagged.values())
            assert target.app.tags(name) == source.app.tags(name)


@pytest.mark.slow
def test_large_layers_are_served_copied_and_verified_without_being_held(serve: Start) -> None:
    """Both ends keep next to nothing, and a byte that differed would be refused."""
    size = LARGE + 12345
    image = Seed(1).image(layers=[Stream(1, number, size) for number in range(3)])
    source, target = serve(), serve(MeasuringApp())
    image.load_into(source.app, "app", "v1")
    assert image.size > 3 * size
    ran = copy(source, target)
    assert ran.status == 0, ran.err
    kept = target.app.repositories["app"].blobs
    for digest, stream in image.streams.items():
        assert isinstance(kept[digest], Measured)
        assert kept[digest].size == stream.size
    assert target.app.tags("app") == {"v1": image.top}
