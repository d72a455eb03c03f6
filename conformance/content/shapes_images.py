"""Shapes of valid images and indexes in both formats: platforms, layers, forms of JSON.

Owns: these shapes.
May not know: registries, clients.
Invariants: a strict registry accepts all of them, and a copy has the same bytes.
Follows: the OCI image specification 1.1 and Docker's schema 2.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

from ..registry.storage import MANIFEST_LIMIT, OCI_MANIFEST
from .images import TYPES, Image, Part, Seed, compose, compose_index, encode
from .samples import Shape

__all__ = ["IMAGES", "base", "layer_of", "rewritten"]

MANIFEST = "image-spec manifest.md"
INDEX = "image-spec image-index.md"
DESCRIPTOR = "image-spec descriptor.md"
LAYER = "image-spec layer.md"
DOCKER = "distribution manifest-v2-2.md"
CONFIG_TYPE = TYPES["oci"]["config"]
LAYER_TYPE = TYPES["oci"]["layer"]
TAR = "application/vnd.oci.image.layer.v1.tar"


def base(seed: Seed) -> tuple[Part, list[Part]]:
    """Return the config and the two layers of an ordinary image."""
    config = Part(
        CONFIG_TYPE, encode({"architecture": "amd64", "os": "linux", "x-seed": seed.blob(8).hex()})
    )
    return config, [Part(LAYER_TYPE, seed.layer(size)) for size in (600, 900)]


def layer_of(
    seed: Seed, media_type: str = LAYER_TYPE, data: bytes | None = None, **more: Any
) -> Image:
    """Build an image with an ordinary layer and a second layer of another kind."""
    config, (first, second) = base(seed)
    return compose(
        config, [first, second._replace(media_type=media_type, data=data or second.data, more=more)]
    )


def rewritten(image: Image, write: Callable[[dict[str, Any]], bytes]) -> Image:
    """Return an image whose manifest is encoded by `write`."""
    return image.with_manifest(write(image.document), image.media_type)


def _padded(document: Mapping[str, Any], size: int) -> bytes:
    """Encode a document with an annotation that makes it exactly `size` bytes long."""
    empty = len(encode({**document, "annotations": {"fill": ""}}))
    return encode({**document, "annotations": {"fill": "x" * (size - empty)}})


def _arms(seed: Seed, **options: Any) -> Image:
    platforms = ("linux/arm/v5", "linux/arm/v6", "linux/arm/v7", "linux/arm/v8", "linux/arm64/v8")
    return seed.index(
        platforms=(*platforms, "linux/arm64", "linux/arm", "linux/amd64/v3"), **options
    )


def _windows(seed: Seed, format: Any) -> Image:
    versions = ("10.0.17763.6414", "10.0.20348.2700", "10.0.26100.1742")
    return seed.index(
        [
            seed.image(
                format=format, os="windows", os_version=version, os_features=features, sizes=(400,)
            )
            for version, features in zip(
                versions, ((), ("win32k",), ("win32k", "x-y")), strict=True
            )
        ]
        + [seed.image(format=format)],
        format=format,
    )


def _deep(seed: Seed, depth: int) -> Image:
    image = seed.image()
    for _ in range(depth):
        image = seed.index([image, seed.image(sizes=(100,))])
    return image


def _wide(seed: Seed, count: int) -> Image:
    """Build an index of `count` small images that share one layer."""
    shared = seed.layer(100)
    children = [
        seed.image(layers=[shared], architecture=f"arch{number}") for number in range(count)
    ]
    return seed.index(children)


def _twice(seed: Seed) -> Image:
    """Build an index that lists one child for two platforms, and two children for one."""
    one = seed.image()
    other = seed.image()
    amd64 = {"platform": {"os": "linux", "architecture": "amd64"}}
    arm64 = {"platform": {"os": "linux", "architecture": "arm64"}}
    return compose_index([(one, amd64), (one, arm64), (other, amd64)])


def _odd_platforms(seed: Seed) -> Image:
    return compose_index(
        [
            (seed.image(), {"platform": {"os": "", "architecture": ""}}),
            (
                seed.image(),
                {"platform": {"os": "linux", "architecture": "amd64", "features": ["sse4"]}},
            ),
            (
                seed.image(),
                {"platform": {"os": "darwin", "architecture": "arm64", "os.version": "macOS 14"}},
            ),
            (
                seed.image(),
                {"platform": {"os": "linux", "architecture": "mips64le", "x-unknown": {"a": 1}}},
            ),
            (
                seed.image(),
                {"platform": {"os": "wasip1", "architecture": "wasm"}, "annotations": {"k": "v"}},
            ),
        ]
    )


def _repeated(seed: Seed) -> Image:
    """Build an image with one layer five times, and with the config's bytes as a layer."""
    config, (first, second) = base(seed)
    return compose(
        config, [first, second, first, first, first, first, Part(TAR, config.data), second]
    )


def _retyped(seed: Seed, media_type: str) -> Image:
    """Build an image that lists its first layer twice, first with another media type."""
    config, (first, second) = base(seed)
    return compose(config, [first._replace(media_type=media_type), second, first])


def _foreign(seed: Seed, media_type: str, *, held: bool, urls: bool = True) -> Image:
    more = {"urls": ["https://mirror.invalid/layer"]} if urls else {}
    config, layers = base(seed)
    return compose(config, [*layers, Part(media_type, seed.blob(500), more, held=held)])


def _sharing(seed: Seed) -> Image:
    shared = seed.image()
    return seed.index([seed.index([shared, seed.image()]), seed.index([shared]), shared])


def _inline(seed: Seed) -> Image:
    config, layers = base(seed)
    config, *layers = [
        part._replace(more={"data": base64.b64encode(part.data).decode()})
        for part in (config, *layers)
    ]
    return compose(config, layers)


def _unknown_fields(seed: Seed) -> Image:
    config, (first, second) = base(seed)
    odd: dict[str, Any] = {"x-list": [1, -2.5, 10**30, None, True, {"deep": [[]]}], "x-empty": {}}
    second = second._replace(
        more={"x-in-a-descriptor": odd, "artifactType": "application/x", "annotations": {}}
    )
    fields: dict[str, Any] = {"x-top": odd, "annotations": {}}
    return compose(config, [first, second], **fields)


def _sha512(seed: Seed) -> Image:
    config, layers = base(seed)
    return compose(
        config._replace(algorithm="sha512"),
        [layer._replace(algorithm="sha512") for layer in layers],
    )


def _sha512_child(seed: Seed) -> Image:
    child = seed.image()
    return compose_index(
        [(child.with_manifest(child.body, OCI_MANIFEST, "sha512"), {}), (seed.image(), {})]
    )


IMAGES: tuple[Shape, ...] = (
    # Formats and indexes.
    Shape("oci-image", "An OCI image with two layers.", MANIFEST, lambda s: s.image()),
    Shape("docker-image", "A Docker schema 2 image.", DOCKER, lambda s: s.image(format="docker")),
    Shape("oci-index", "An OCI index of four platforms.", INDEX, lambda s: s.index()),
    Shape(
        "docker-list",
        "A Docker manifest list of four platforms.",
        DOCKER,
        lambda s: s.index(format="docker"),
    ),
    Shape(
        "oci-index-of-both",
        "An OCI index with a Docker and an OCI child.",
        INDEX,
        lambda s: s.index([s.image(format="docker"), s.image()]),
    ),
    Shape(
        "oci-untyped",
        "An OCI manifest without mediaType, as podman wrote them.",
        MANIFEST,
        lambda s: compose(*base(s), mediaType=None),
    ),
    Shape(
        "oci-index-untyped",
        "An OCI index without mediaType.",
        INDEX,
        lambda s: compose_index([(s.image(), {}), (s.image(), {})], mediaType=None),
    ),
    Shape(
        "nested-index",
        "An index of an index and an image.",
        "docs/protocol-facts.md 1.5",
        lambda s: s.index([s.index(), s.image()]),
    ),
    Shape(
        "nested-4-deep",
        "Indexes four deep, the deepest that has to be taken.",
        "docs/protocol-facts.md 1.5",
        lambda s: _deep(s, 4),
    ),
    Shape(
        "nested-shared",
        "Two nested indexes that share a child.",
        "docs/protocol-facts.md 1.5",
        _sharing,
    ),
    Shape("empty-index", "An index without entries.", INDEX, lambda s: s.index([])),
    Shape(
        "index-of-1000",
        "An index with a thousand entries.",
        "docs/protocol-facts.md 9.2 R14",
        lambda s: _wide(s, 1000),
    ),
    Shape(
        "index-without-platforms",
        "An index whose entries have no platform.",
        INDEX,
        lambda s: s.index(with_platforms=False),
    ),
    Shape("index-repeats", "One child for two platforms, two children for one.", INDEX, _twice),
    Shape(
        "index-with-subject",
        "An index that is a referrer by its subject.",
        INDEX,
        lambda s: s.index(
            [s.image()], subject=s.image(), artifact_type="application/vnd.example.set"
        ),
    ),
    Shape(
        "index-null-fields",
        "Optional fields as null, as some Go programs write them.",
        INDEX,
        lambda s: rewritten(
            compose_index([(s.image(), {})]),
            lambda d: encode({**d, "annotations": None, "subject": None}),
        ),
    ),
    # Platforms.
    Shape(
        "arm-variants",
        "Every variant of arm; arm64 with v8 and without.",
        "docs/protocol-facts.md 1.5",
        _arms,
    ),
    Shape(
        "windows", "Windows by os.version, with os.features.", INDEX, lambda s: _windows(s, "oci")
    ),
    Shape("odd-platforms", "Empty, unknown and strange platforms.", INDEX, _odd_platforms),
    # Layers.
    Shape("no-layers", "An image without layers.", MANIFEST, lambda s: s.image(layers=[])),
    Shape(
        "zero-byte-layer",
        "A layer of no bytes.",
        DESCRIPTOR,
        lambda s: s.image(layers=[b"", s.layer(300)]),
    ),
    Shape(
        "repeated-layers",
        "One digest many times, the config's among the layers.",
        MANIFEST,
        _repeated,
    ),
    Shape(
        "large-layer",
        "A layer of 5 MiB and one byte.",
        LAYER,
        lambda s: s.image(layers=[s.blob((5 << 20) + 1)]),
    ),
    Shape(
        "1000-layers",
        "More layers than docker could run.",
        MANIFEST,
        lambda s: s.image(sizes=(16,) * 1000),
    ),
    Shape(
        "layer-of-two-types",
        "One digest under two media types.",
        DESCRIPTOR,
        lambda s: _retyped(s, TAR),
    ),
    Shape(
        "typed-with-parameter",
        "A media type with a parameter.",
        "RFC 6838 section 4.3",
        lambda s: layer_of(s, "text/plain; charset=utf-8", b"hello"),
    ),
    Shape(
        "docker-foreign",
        "A foreign layer that nobody holds.",
        "docs/protocol-facts.md 1.6",
        lambda s: s.image(
            format="docker", foreign=["https://mirror.invalid/1", "https://mirror.invalid/2"]
        ),
    ),
    Shape(
        "oci-foreign",
        "A non-distributable layer that nobody holds.",
        "docs/protocol-facts.md 1.6",
        lambda s: s.image(foreign=["https://mirror.invalid/1"]),
    ),
    Shape(
        "foreign-without-urls",
        "A foreign layer that does not say where it is.",
        "docs/protocol-facts.md 1.6",
        lambda s: _foreign(s, TYPES["oci"]["foreign"], held=False, urls=False),
    ),
    Shape(
        "foreign-and-ordinary",
        "One digest as a foreign layer and as an ordinary one: it is needed.",
        "docs/protocol-facts.md 1.6",
        lambda s: _retyped(s, TYPES["oci"]["foreign"]),
    ),
    Shape(
        "urls-on-a-layer",
        "An ordinary layer with urls: they do not make it foreign.",
        "docs/protocol-facts.md 1.6",
        lambda s: _foreign(s, LAYER_TYPE, held=True),
    ),
    # Fields.
    Shape("inline-everything", "Every blob in its descriptor's data too.", DESCRIPTOR, _inline),
    Shape(
        "unknown-fields",
        "Fields that no specification knows, of every JSON type.",
        MANIFEST,
        _unknown_fields,
    ),
    Shape(
        "image-with-subject",
        "An image with a subject that nobody holds.",
        "docs/protocol-facts.md 1.5",
        lambda s: s.image(subject=s.image()),
    ),
    Shape(
        "sha512-blobs", "Config and layers by sha512.", "image-spec descriptor.md, digests", _sha512
    ),
    Shape(
        "sha512-child",
        "An index whose child is named by sha512.",
        "image-spec descriptor.md, digests",
        _sha512_child,
    ),
    # JSON as it is written.
    Shape(
        "indented",
        "Indented by three spaces, as docker writes.",
        DOCKER,
        lambda s: s.image(format="docker", spacing="indent"),
    ),
    Shape(
        "odd-spacing",
        "Tabs, CRLF, escaped slashes, space before and behind.",
        "RFC 8259",
        lambda s: s.image(spacing="odd"),
    ),
    Shape(
        "4-mib-manifest",
        "A manifest of exactly 4 MiB.",
        "docs/protocol-facts.md 1.4",
        lambda s: rewritten(s.image(), lambda d: _padded(d, MANIFEST_LIMIT)),
    ),
)
