"""Images with their attachments, pushed to a registry as clients push them.

Owns: families (an image, its referrers, cosign's tags, and the parts that a copy with `platforms`
keeps); the index that a client keeps under the fallback tag.
May not know: the task of a copying program.
Invariants: the subject of every referrer is in the family. A referrer is `lost` if a copy does not
keep its subject, or if its subject is lost.
Follows: docs/protocol-facts.md section 1.10 and the shapes of shapes_artifacts.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..content.images import EMPTY, Image, Part, Seed, compose
from ..content.samples import Sample
from ..content.shapes import shapes
from ..messages import Request
from ..registry.storage import OCI_INDEX
from .copies import push_http

if TYPE_CHECKING:
    from ..registry.app import App

__all__ = [
    "FAMILIES",
    "SBOM",
    "SIGNED",
    "Family",
    "fallback_lists",
    "family",
    "has_api",
    "plain",
    "referrers_tag",
]

SBOM = "application/spdx+json"
SIGNED = "application/vnd.cncf.notary.signature"


@dataclass(frozen=True)
class Family:
    """An image and its attachments."""

    sample: Sample
    # The platforms that a copy selects. Empty: all.
    platforms: tuple[str, ...] = ()
    # Digests of the roots from which walks over source and target must be equal.
    kept: tuple[str, ...] = ()
    # Digests of the referrers that are not copied.
    lost: frozenset[str] = frozenset()

    @property
    def image(self) -> Image:
        return self.sample.image

    @property
    def travelling(self) -> list[Image]:
        """The attachments that are copied with the image, referrers first."""
        attachments = [*self.sample.attached, *self.sample.tagged.values()]
        return [image for image in attachments if image.top not in self.lost]

    def load_into(self, app: App, repository: str = "app", tag: str = "v1") -> Family:
        """Store the family in a registry of the harness.

        Adds fallback tags if it has no referrers API.
        """
        self.sample.load_into(app, repository, tag)
        if not has_api(app):
            for name, index in fallback_lists(self.sample.attached).items():
                index.load_into(app, repository, name)
        return self

    def push(self, address: str, repository: str = "app", tag: str = "v1") -> Family:
        """Push the family to any registry over HTTP, with fallback tags."""
        push_http(self.image, address, repository, tag)
        for image in self.sample.attached:
            push_http(image, address, repository)
        for name, image in self.sample.tagged.items():
            push_http(image, address, repository, name)
        for name, index in fallback_lists(self.sample.attached).items():
            push_http(index, address, repository, name)
        return self


def referrers_tag(digest: str) -> str:
    """Return the fallback tag of a digest.

    Its parts are cut to 32 and 64 characters (section 1.10).
    """
    algorithm, _, encoded = digest.partition(":")
    return f"{algorithm[:32]}-{encoded[:64]}"


def fallback_lists(attached: Iterable[Image]) -> dict[str, Image]:
    """Return the index of referrers that a client keeps for each subject, by fallback tag."""
    by_subject: dict[str, list[Image]] = {}
    for referrer in attached:
        by_subject.setdefault(referrer.document["subject"]["digest"], []).append(referrer)
    return {
        referrers_tag(subject): Seed().fallback_index(referrers)
        for subject, referrers in by_subject.items()
    }


def has_api(app: App) -> bool:
    """Report whether a registry has the referrers API, by the same request as a client's."""
    absent = "sha256:" + "0" * 64
    request = Request("GET", f"/v2/nothing/referrers/{absent}", [("host", "registry.test")])
    answer: Any = app.start(request)
    if answer.status == 404 and answer.header("Content-Type") == "application/json":
        return bool(answer.codes == ["MANIFEST_UNKNOWN"])
    return bool(answer.status == 200 and answer.header("Content-Type") == OCI_INDEX)


# Families.


def plain(seed: Seed, image: Image | None = None) -> Sample:
    """Return an image with an SBOM and two signatures.

    One signature has annotations in two scripts.
    """
    image = image or seed.image(sizes=(300, 600))
    notes = {"org.example.name": "Prüfsumme 校验", "org.example.empty": ""}
    attached = (
        seed.artifact(
            image, SBOM, annotations={"org.opencontainers.image.created": "2026-01-01T00:00:00Z"}
        ),
        seed.artifact(image, SIGNED, annotations=notes, spacing="odd"),
        seed.artifact(image, SIGNED, size=100),
    )
    return Sample(image, attached)


def _bare(seed: Seed) -> Sample:
    """Return an image with minimal artifacts and with artifacts of older kinds."""
    image = seed.image(sizes=(200,))
    empty = compose(
        EMPTY, [], artifactType="application/vnd.example.mark", subject=image.descriptor()
    )
    annotated = compose(
        EMPTY, [EMPTY], artifactType="a/b", subject=image.descriptor(), annotations={"k": "v"}
    )
    older = seed.artifact(image, None, config_type="application/vnd.example.config.v1+json")
    untyped = seed.artifact(image, None)
    return Sample(image, (empty, annotated, older, untyped))


def _deep(seed: Seed) -> Sample:
    image = seed.image(sizes=(200,))
    chain = [image]
    for number in range(6):
        chain.append(seed.artifact(chain[-1], f"application/vnd.example.level.{number}", size=50))
    return Sample(image, tuple(chain[1:]))


def _index(seed: Seed) -> Sample:
    children = [seed.image(sizes=(200,)), seed.image(sizes=(300,), architecture="arm64")]
    top = seed.index(children, attestations=True)
    return Sample(
        top,
        tuple(
            seed.artifact(subject, kind) for subject in (top, *children) for kind in (SBOM, SIGNED)
        ),
    )


def _shared(seed: Seed) -> Sample:
    """Return an image with two referrers that share a blob, which is also a layer of the image."""
    layer = seed.layer(700)
    image = seed.image(layers=[layer, seed.layer(100)])
    part = Part("application/octet-stream", layer)
    kinds = (SBOM, SIGNED)
    return Sample(
        image,
        tuple(
            compose(EMPTY, [part], artifactType=kind, subject=image.descriptor()) for kind in kinds
        ),
    )


def _everything(seed: Seed) -> Sample:
    """Return an image with referrers, cosign's tags, and signatures of both."""
    tagged = shapes()["cosign-tags"].build()
    image = tagged.image
    bill = seed.artifact(image, SBOM)
    signature = seed.artifact(bill, SIGNED)
    index = seed.index(
        [seed.artifact()], subject=image, artifact_type="application/vnd.example.index"
    )
    return Sample(image, (bill, signature, index), tagged.tagged)


def _filtered(seed: Seed) -> Family:
    """Return an attested and signed index of three platforms, of which a copy selects two."""
    systems = ("amd64", "arm64", "s390x")
    children = [
        seed.image(sizes=(200 + number,), architecture=system)
        for number, system in enumerate(systems)
    ]
    top = seed.index(children, attestations=True)
    on_top = seed.artifact(top, SIGNED)
    dropped = seed.artifact(children[2], SBOM)
    of_dropped = seed.artifact(dropped, SIGNED)
    bills = [seed.artifact(child, SBOM) for child in children[:2]]
    signature = seed.artifact(bills[0], SIGNED)
    attached = (on_top, dropped, of_dropped, *bills, signature)
    # The entries of the index: the three children, then the attestation of each.
    entries = [entry["digest"] for entry in top.document["manifests"]]
    digests = (*entries[:2], *entries[3:5])
    lost = frozenset(image.top for image in (on_top, dropped, of_dropped))
    return Family(Sample(top, attached), ("linux/amd64", "linux/arm64"), digests, lost)


def _shape(name: str) -> Callable[[Seed], Sample]:
    return lambda seed: shapes()[name].build()


_BUILDERS: Mapping[str, Callable[[Seed], Sample | Family]] = {
    "single": plain,
    "bare": _bare,
    "index": _index,
    "filtered": _filtered,
    "nested": _shape("referrers-of-referrers"),
    "deep": _deep,
    "index-typed": _shape("referrer-index"),
    "image-typed": _shape("referrer-image"),
    "index-of-index": _shape("referrers-of-children"),
    "cosign-tags": _shape("cosign-tags"),
    "cosign-recursive": _shape("cosign-recursive"),
    "shared": _shared,
    "everything": _everything,
    "nothing": lambda seed: Sample(seed.image(sizes=(100,))),
}
FAMILIES = tuple(_BUILDERS)


def family(name: str) -> Family:
    """Build a family. It is the same in every run and with every version of Python."""
    built = _BUILDERS[name](Seed(zlib.crc32(name.encode())))
    return built if isinstance(built, Family) else Family(built, kept=(built.image.top,))
