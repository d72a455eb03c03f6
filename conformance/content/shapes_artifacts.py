"""Shapes that are not images: artifacts, referrers, attestations, content of other tools.

Owns: these shapes.
May not know: registries, clients.
Invariants: as in shapes_images.py. The subject of a referrer is in the same sample, unless the
shape is about an absent subject.
Follows: the OCI image specification 1.1 ("Guidelines for Artifact Usage"), docs/protocol-facts.md
sections 1.3 and 1.10, and the documents of the named tools.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

from .images import EMPTY, TYPES, Image, Part, Seed, compose, compose_index, encode, single
from .samples import Sample, Shape

__all__ = ["ARTIFACTS"]

ARTIFACT = "image-spec manifest.md, artifact usage"
REFERRERS = "docs/protocol-facts.md 1.10"
COSIGN = "cosign specs/SIGNATURE_SPEC.md"
BUILDKIT = "buildkit docs/attestations/attestation-storage.md"
NOTARY = "application/vnd.cncf.notary.signature"
UNKNOWN = {"platform": {"architecture": "unknown", "os": "unknown"}}


def _referring(
    seed: Seed, subject: Image, artifact_type: str, *layers: Part, **fields: Any
) -> Image:
    """Build an artifact of OCI 1.1, with a type, the empty config and a subject."""
    if not layers:
        layers = (Part("application/octet-stream", seed.blob(200)),)
    return compose(
        EMPTY, layers, artifactType=artifact_type, subject=subject.descriptor(), **fields
    )


def _signature_payload(image: Image) -> bytes:
    critical = {
        "type": "cosign container image signature",
        "image": {"docker-manifest-digest": image.top},
    }
    return encode(
        {"critical": {**critical, "identity": {"docker-reference": ""}}, "optional": None}
    )


def _signed_layer(seed: Seed, image: Image) -> Part:
    signature = base64.b64encode(seed.blob(70)).decode()
    more = {
        "annotations": {
            "dev.cosignproject.cosign/signature": signature,
            "dev.sigstore.cosign/bundle": "{}",
        }
    }
    return Part("application/vnd.dev.cosign.simplesigning.v1+json", _signature_payload(image), more)


def _cosign(seed: Seed, image: Image, kind: str) -> Image:
    """Build the image under one of cosign's tags."""
    config = Part(
        TYPES["oci"]["config"], encode({"architecture": "", "os": "", "of": image.top + kind})
    )
    if kind == "sig":
        return compose(config, [_signed_layer(seed, image), _signed_layer(seed, image)])
    if kind == "att":
        more = {
            "annotations": {
                "dev.cosignproject.cosign/signature": "",
                "predicateType": "https://slsa.dev/x",
            }
        }
        return compose(
            config, [Part("application/vnd.dsse.envelope.v1+json", seed.blob(500), more)]
        )

    return compose(
        config, [Part("text/spdx+json", encode({"spdxVersion": "SPDX-2.3", "of": image.top}))]
    )


def _tag_of(image: Image, suffix: str = "") -> str:
    return image.top.replace(":", "-") + suffix


def _cosign_tags(seed: Seed, image: Image) -> Sample:
    kinds = ("sig", "att", "sbom")
    return Sample(
        image, tagged={_tag_of(image, f".{kind}"): _cosign(seed, image, kind) for kind in kinds}
    )


def _cosign_children(seed: Seed) -> Sample:
    """Sign an index and each of its children, as `cosign sign --recursive` does."""
    children = [seed.image(), seed.image(architecture="arm64")]
    index = seed.index(children)
    images = (index, *children)
    tagged = {_tag_of(image, ".sig"): _cosign(seed, image, "sig") for image in images}
    return Sample(index, tagged=tagged)


def _image_attached(seed: Seed) -> Sample:
    """Build an image with a whole image as referrer, whose type is that of its config."""
    image = seed.image()
    return Sample(image, (seed.image(subject=image, annotations={"soci": "v2"}),))


def _fallback(seed: Seed) -> Sample:
    """Build an image with two referrers and their index under the fallback tag."""
    image = seed.image()
    attached = (seed.artifact(image, annotations={"made": "by hand"}), seed.artifact(image, NOTARY))
    return Sample(image, attached, {_tag_of(image): seed.fallback_index(attached)})


def _chain(seed: Seed) -> Sample:
    """Build an image with an SBOM, a signature of the SBOM, and a time stamp of the signature."""
    image = seed.image()
    bill = _referring(
        seed, image, "application/spdx+json", annotations={"org.opencontainers.image.title": "b"}
    )
    signature = _referring(seed, bill, NOTARY)
    stamp = _referring(seed, signature, "application/vnd.example.timestamp")
    return Sample(image, (bill, signature, stamp))


def _referrer(seed: Seed) -> Sample:
    image = seed.image()
    return Sample(image, (seed.artifact(image),))


def _of_children(seed: Seed) -> Sample:
    """Build an index with referrers of itself, of each child, and of a child's child."""
    leaf = seed.image()
    nested = seed.index([leaf, seed.image(architecture="arm64")])
    top = seed.index([nested, seed.image(os="windows")])
    subjects = (top, nested, leaf)
    kind = "application/spdx+json"
    return Sample(top, tuple(_referring(seed, subject, kind) for subject in subjects))


def _many(seed: Seed) -> Sample:
    image = seed.image()
    kinds = ("application/spdx+json", NOTARY, "application/vnd.in-toto+json")
    return Sample(image, tuple(_referring(seed, image, kinds[number % 3]) for number in range(60)))


def _index_attached(seed: Seed) -> Sample:
    image = seed.image()
    typed = seed.index(
        [seed.artifact(), seed.artifact()], subject=image, artifact_type="application/vnd.example"
    )
    return Sample(image, (typed, seed.index([seed.artifact()], subject=image)))


def _cache(seed: Seed) -> Image:
    """Build the older form of buildkit's cache, an index whose entries are blobs."""
    layers = [Part(TYPES["oci"]["layer"], seed.layer(size)) for size in (200, 300)]
    config = encode({"layers": [], "seed": seed.blob(4).hex()})
    parts = [*layers, Part("application/vnd.buildkit.cacheconfig.v0", config)]
    index = compose_index([], manifests=[part.descriptor() for part in parts])
    return replace(index, blobs={part.digest: part.data for part in parts})


def _other_child(seed: Seed) -> Image:
    """Build an index of an image and a manifest of an unknown type."""
    kind = "application/vnd.example.manifest.v7+json"
    body = encode({"anything": ["at", "all"], "seed": seed.blob(4).hex()})
    return compose_index([(seed.image(), {}), (single(body, kind, {}), {})])


def _oras(seed: Seed, kind: str) -> Image:
    """Build a manifest that lists blobs, without config and layers."""
    blob = Part("application/octet-stream", seed.blob(300))
    body = encode(
        {"mediaType": kind, "artifactType": "application/vnd.example", "blobs": [blob.descriptor()]}
    )
    return single(body, kind, {blob.digest: blob.data})


ARTIFACTS: tuple[Shape, ...] = (
    # Artifacts.
    Shape("artifact", "An artifact with the empty config.", ARTIFACT, lambda s: s.artifact()),
    Shape(
        "artifact-empty",
        "An artifact that is nothing but annotations: config and layer are empty.",
        ARTIFACT,
        lambda s: compose(
            EMPTY, [EMPTY], artifactType="application/vnd.example", annotations={"k": "v"}
        ),
    ),
    Shape(
        "artifact-in-index",
        "An index with an artifact beside an image.",
        "image-spec image-index.md",
        lambda s: compose_index(
            [(s.image(), {}), (s.artifact(), {"artifactType": "application/vnd.a"})]
        ),
    ),
    Shape(
        "buildkit-cache-index",
        "A cache as an index of blobs.",
        "buildkit cache image-manifest=false",
        _cache,
    ),
    Shape(
        "unknown-child",
        "An index with a manifest of an unknown type.",
        "docs/protocol-facts.md 1.5",
        _other_child,
        options={"any_manifest_type": True},
    ),
    Shape(
        "oras-manifest",
        "The artifact manifest of ORAS.",
        "docs/protocol-facts.md 1.3",
        lambda s: _oras(s, "application/vnd.cncf.oras.artifact.manifest.v1+json"),
        options={"any_manifest_type": True},
    ),
    # Attestations.
    Shape(
        "attestations",
        "An attestation of buildkit for each platform.",
        BUILDKIT,
        lambda s: s.index(attestations=True),
    ),
    # Referrers.
    Shape("referrer", "An SBOM of an image.", REFERRERS, _referrer),
    Shape(
        "referrers-of-referrers",
        "A signature of an SBOM of an image, and its time stamp.",
        REFERRERS,
        _chain,
    ),
    Shape(
        "referrers-of-children",
        "Referrers of an index, of its child and of its child's child.",
        REFERRERS,
        _of_children,
    ),
    Shape("referrers-many", "Sixty referrers of three types.", REFERRERS, _many),
    Shape(
        "referrer-index",
        "Indexes that refer to an image, with a type and without.",
        REFERRERS,
        _index_attached,
    ),
    Shape("referrer-image", "An image that refers to an image.", REFERRERS, _image_attached),
    Shape("fallback-tag", "Referrers and the index under the fallback tag.", REFERRERS, _fallback),
    Shape(
        "cosign-tags",
        "Signature, attestation and SBOM under cosign's tags.",
        COSIGN,
        lambda s: _cosign_tags(s, s.image()),
    ),
    Shape("cosign-recursive", "An index whose children are signed too.", COSIGN, _cosign_children),
)
