"""Graphs of artifacts that nobody thought of, between registries of any kind.

Grown at random from a seed: artifacts on images, on artifacts and on children of indexes, indexes
and images that refer to others, cosign's tags on any of them and on what such a tag names (`cosign
sign --attachment sbom`). Whatever it is, all that can be reached at the source is reached at the
target, and a second run writes nothing. Nothing refers by `subject` to what a cosign tag names: for
that every signature would have to be asked about.
"""

from __future__ import annotations

import random

import pytest

from conformance.client.attachments import SBOM, SIGNED, Family, referrers_tag
from conformance.content.images import Image, Seed
from conformance.content.samples import Sample
from conformance.providers.personas import PERSONAS
from tests.attached import Scene
from tests.thinning import thorough

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

KINDS = [
    name
    for name in PERSONAS
    if name.startswith(("referrers-", "unknown-")) and name != "referrers-late"
]
KINDS += ["strict", "distribution", "old"]
TYPES = (SBOM, SIGNED, "application/vnd.example.a", "application/vnd.example.b")


def grown(number: int) -> Family:
    """Grow a graph: the same for the same number on every Python."""
    dice, seed = random.Random(number), Seed(number)
    children: list[Image] = []
    if dice.random() < 0.5:
        children = [
            seed.image(sizes=(50 + n,), architecture=each)
            for n, each in enumerate(("amd64", "arm64"))
        ]
        image = seed.index(children, attestations=dice.random() < 0.5)
    else:
        image = seed.image(sizes=(100,))
    nodes, attached, tagged = [image, *children], list[Image](), dict[str, Image]()
    depth = dict.fromkeys((each.top for each in nodes), 0)
    for _ in range(dice.randrange(3, 9)):
        subject = dice.choice([each for each in nodes if depth[each.top] < 5])
        draw = 1.0 if subject in tagged.values() else dice.random()
        if draw < 0.5:
            made = seed.artifact(subject, dice.choice((*TYPES, None)), size=dice.randrange(1, 90))
        elif draw < 0.65:
            parts = [seed.artifact(size=20) for _ in range(dice.randrange(1, 3))]
            made = seed.index(parts, subject=subject, artifact_type=dice.choice((None, SBOM)))
            nodes += parts
            depth.update((each.top, depth[subject.top] + 2) for each in parts)
        elif draw < 0.75:
            made = seed.image(sizes=(30,), subject=subject)
        else:
            tag = referrers_tag(subject.top) + dice.choice((".sig", ".att", ".sbom"))
            if tag not in tagged:
                tagged[tag] = seed.artifact(
                    None, None, config_type="application/vnd.oci.image.config.v1+json"
                )
                nodes.append(tagged[tag])
                depth[tagged[tag].top] = depth[subject.top] + 1
            continue
        nodes.append(made)
        attached.append(made)
        depth[made.top] = depth[subject.top] + 1
    return Family(Sample(image, tuple(attached), tagged), kept=(image.top,))


@pytest.mark.parametrize(
    "number", [*range(20), *(thorough(pytest.param(number)) for number in range(20, 40))]
)
async def test_whatever_hangs_there_arrives(world, number, tmp_path):
    dice = random.Random(f"kinds {number}")
    source, target = dice.choice(KINDS), dice.choice(KINDS)
    scene = Scene(world, tmp_path, grown(number), source, target)
    await scene.succeed()
    scene.check_order()
    scene.check()
    await scene.settle()
