"""Shapes that must not be copied: old formats, ambiguous documents, bytes of another digest.

Owns: these shapes, each with the reason.
May not know: registries, clients.
Invariants: each shape is a valid image with exactly one defect. There is no index that contains
itself, because its digest would depend on itself.
Follows: docs/protocol-facts.md sections 1.3 to 1.6 and 9.2 (R11 to R14).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..registry.storage import DOCKER_MANIFEST, MANIFEST_LIMIT, OCI_INDEX, OCI_MANIFEST
from .images import Image, Part, Seed, compose, compose_index, encode, without_none
from .samples import Found, Shape
from .shapes_images import CONFIG_TYPE, LAYER_TYPE, base, rewritten

__all__ = ["REFUSED"]

SCHEMA_1 = "application/vnd.docker.distribution.manifest.v1+json"
SIGNED = "application/vnd.docker.distribution.manifest.v1+prettyjws"
NOWHERE = "sha256:" + "0" * 64
WRONG_TYPE = "docs/protocol-facts.md 1.3 (c), (d)"
LIMITS = "docs/protocol-facts.md 9.2 R14"
DESCRIPTOR = "image-spec descriptor.md"
Edit = Callable[[dict[str, Any]], Any]


def _schema_1(seed: Seed, *, signed: bool, media_type: str) -> Image:
    image = seed.image()
    history = json.dumps({"id": seed.blob(32).hex(), "os": "linux"})
    document: dict[str, Any] = {
        "schemaVersion": 1,
        "name": "a/b",
        "tag": "v1",
        "architecture": "amd64",
        "fsLayers": [{"blobSum": list(image.blobs)[-1]}],
        "history": [{"v1Compatibility": history}],
    }
    if signed:
        protected = (
            base64.urlsafe_b64encode(b'{"formatLength":1,"formatTail":"fQ"}').decode().rstrip("=")
        )
        header = {"jwk": {"crv": "P-256", "kty": "EC"}, "alg": "ES256"}
        document["signatures"] = [{"header": header, "signature": "c2ln", "protected": protected}]

    return image.with_manifest(json.dumps(document, indent=3).encode(), media_type)


def _edited(
    name: str, sentence: str, reference: str, reason: str, edit: Edit, found: Found = "document"
) -> Shape:
    """Return a shape: an ordinary image whose manifest is changed by `edit`."""

    def build(seed: Seed) -> Image:
        image = seed.image()
        document = image.document
        edit(document)
        return image.with_manifest(encode(document), image.media_type)

    return Shape(name, sentence, reference, build, reason, found)


def _written(name: str, sentence: str, reason: str, write: Callable[[bytes], bytes]) -> Shape:
    """Return a shape: an ordinary image whose manifest's bytes are changed by `write`."""

    def build(seed: Seed) -> Image:
        image = seed.image()
        return image.with_manifest(write(image.body), image.media_type)

    return Shape(name, sentence, "RFC 8259", build, reason)


def _layer(**fields: Any) -> Edit:
    """Return an edit that changes fields of the first layer's descriptor. None removes a field."""

    def edit(document: dict[str, Any]) -> None:
        document["layers"][0] = without_none({**document["layers"][0], **fields})

    return edit


def _served_as(image: Image, media_type: str) -> Image:
    """Return an image that is stored with another media type than its document's."""
    return image.with_manifest(image.body, media_type)


def _other_bytes(image: Image, which: int, change: Callable[[bytes], bytes]) -> Image:
    """Return an image with other bytes under a blob's digest.

    `which` is 0 for the config, and 1 for the first layer.
    """
    digest = list(image.blobs)[which]
    return replace(image, blobs={**image.blobs, digest: change(image.blobs[digest])})


def _without_blob(image: Image, which: int) -> Image:
    digest = list(image.blobs)[which]
    return replace(image, blobs={key: data for key, data in image.blobs.items() if key != digest})


def _other_child(seed: Seed, change: Callable[[bytes], bytes]) -> Image:
    """Build an index with other bytes under the digest of its second child."""
    index = seed.index([seed.image(), seed.image(architecture="arm64")])
    digest = list(index.manifests)[1]
    media_type, body = index.manifests[digest]
    return replace(index, manifests={**index.manifests, digest: (media_type, change(body))})


def _entry(seed: Seed, **more: Any) -> Image:
    """Build an index whose entry for its second child has the wrong fields `more`."""
    return compose_index([(seed.image(), {}), (seed.image(), more)])


def _flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def _lost_child(seed: Seed) -> Image:
    kept_child = seed.image()
    lost = seed.image(architecture="arm64")
    index = seed.index([kept_child, lost])
    manifests = {key: value for key, value in index.manifests.items() if key != lost.top}
    return replace(index, manifests=manifests)


def _deep(seed: Seed, depth: int) -> Image:
    image = seed.image()
    for _ in range(depth):
        image = seed.index([image])
    return image


def _nested_json(document: dict[str, Any]) -> None:
    value: Any = "end"
    for _ in range(100):
        value = [value]
    document["x-deep"] = value


def _lying_data(seed: Seed) -> Image:
    config, layers = base(seed)
    wrong = base64.b64encode(_flipped(layers[0].data)).decode()
    return compose(config, [layers[0]._replace(more={"data": wrong}), layers[1]])


def _two_sizes(seed: Seed) -> Image:
    config, (first, second) = base(seed)
    return compose(config, [first, second, first._replace(more={"size": len(first.data) + 1})])


def _as_both(document: dict[str, Any]) -> None:
    document["manifests"] = [{"mediaType": OCI_MANIFEST, "digest": NOWHERE, "size": 2}]


def _set(**fields: Any) -> Edit:
    return lambda document: document.update(fields)


def _drop(key: str) -> Edit:
    return lambda document: document.pop(key)


OLD = "schema 1 has no digest that its bytes have"
NO_DIGEST = "what cannot be verified must not be asked for, nor become part of a URL"
NO_SIZE = "a size is a whole number from 0 to 2**63 - 1"
NO_DESCRIPTOR = "a descriptor is an object with mediaType, digest and size"
OTHER_BYTES = "the bytes do not have the digest under which they were asked for"
OTHER_SIZE = "a size that differs means content that is not to be trusted"
ABSENT = "the source does not hold what it names"
NOT_JSON = "two readers could see two documents"
REFUSED: tuple[Shape, ...] = (
    # Formats.
    Shape(
        "schema-1",
        "Docker's first format.",
        "docs/protocol-facts.md 1.3 (a)",
        lambda s: _schema_1(s, signed=False, media_type=SCHEMA_1),
        OLD,
    ),
    Shape(
        "schema-1-signed",
        "The same with signatures.",
        "docs/protocol-facts.md 1.3 (a)",
        lambda s: _schema_1(s, signed=True, media_type=SIGNED),
        OLD,
    ),
    Shape(
        "schema-1-as-json",
        "The same, served as application/json.",
        "docs/protocol-facts.md 1.3 (b)",
        lambda s: _schema_1(s, signed=True, media_type="application/json"),
        OLD,
    ),
    Shape(
        "schema-1-child",
        "An index of it.",
        "docs/protocol-facts.md 1.3 (a)",
        lambda s: compose_index(
            [(s.image(), {}), (_schema_1(s, signed=True, media_type=SIGNED), {})]
        ),
        OLD,
    ),
    _edited(
        "manifest-and-index",
        "Both layers and manifests.",
        "CVE-2021-41190",
        "one reader takes it for an image, the other for an index",
        _as_both,
    ),
    Shape(
        "index-as-manifest",
        "An index, served as a manifest.",
        WRONG_TYPE,
        lambda s: _served_as(compose_index([(s.image(), {})], mediaType=None), OCI_MANIFEST),
        "header and document disagree",
    ),
    Shape(
        "manifest-as-index",
        "A manifest, served as an index.",
        WRONG_TYPE,
        lambda s: _served_as(compose(*base(s), mediaType=None), OCI_INDEX),
        "header and document disagree",
    ),
    Shape(
        "other-content-type",
        "An OCI manifest, served as Docker's.",
        WRONG_TYPE,
        lambda s: _served_as(s.image(), DOCKER_MANIFEST),
        "header and document disagree",
    ),
    Shape(
        "child-of-other-kind",
        "A child without mediaType that the index calls a manifest and is an index.",
        WRONG_TYPE,
        lambda s: compose_index(
            [(compose_index([(s.image(), {})], mediaType=None), {"mediaType": OCI_MANIFEST})]
        ),
        "index and child disagree",
    ),
    Shape(
        "other-child-type",
        "A child that the index calls by another type.",
        WRONG_TYPE,
        lambda s: _entry(s, mediaType=DOCKER_MANIFEST),
        "index and child disagree",
    ),
    _edited(
        "other-inner-type",
        "mediaType names an index in a manifest.",
        WRONG_TYPE,
        "header and document disagree",
        _set(mediaType=OCI_INDEX),
    ),
    _edited(
        "schema-version-3",
        "A schemaVersion that is not 2.",
        "image-spec manifest.md",
        "no specification says what this means",
        _set(schemaVersion=3),
        "target",
    ),
    Shape(
        "docker-untyped",
        "A Docker manifest without mediaType.",
        "distribution manifest-v2-2.md",
        lambda s: compose(*base(s), DOCKER_MANIFEST, mediaType=None),
        "schema 2 demands it",
        "target",
    ),
    # Documents.
    _written("empty-manifest", "No bytes at all.", "this is no document", lambda body: b""),
    _written(
        "cut-manifest",
        "A manifest that ends in the middle.",
        "this is no document",
        lambda body: body[:99],
    ),
    _written(
        "json-list", "A list of manifests.", "this is no document", lambda body: b"[" + body + b"]"
    ),
    _written(
        "html",
        "A page that says that something is wrong.",
        "this is no document",
        lambda body: b"<html><body>502 Bad Gateway</body></html>",
    ),
    _written(
        "byte-order-mark",
        "UTF-8 with a mark.",
        "RFC 8259 section 8.1 forbids it",
        lambda body: b"\xef\xbb\xbf" + body,
    ),
    _written(
        "utf-16",
        "UTF-16.",
        "RFC 8259 section 8.1 forbids it",
        lambda body: body.decode().encode("utf-16"),
    ),
    _written(
        "broken-utf-8",
        "A byte that is no UTF-8.",
        "RFC 8259 section 8.1 forbids it",
        lambda body: body[:-1] + b',"x":"\xff"}',
    ),
    _written(
        "keys-twice", "Two lists of layers.", NOT_JSON, lambda body: body[:-1] + b',"layers":[]}'
    ),
    _written(
        "not-a-number", "NaN, which is no JSON.", NOT_JSON, lambda body: body[:-1] + b',"x":NaN}'
    ),
    _written(
        "two-documents", "A second document behind the first.", NOT_JSON, lambda body: body + body
    ),
    _edited(
        "deep-json",
        "A hundred lists in one another.",
        LIMITS,
        "a reader may be made to overflow",
        _nested_json,
    ),
    # Limits.
    Shape(
        "above-4-mib",
        "A manifest of 4 MiB and one byte.",
        LIMITS,
        lambda s: rewritten(
            s.image(), lambda d: encode(d) + b" " * (MANIFEST_LIMIT + 1 - len(encode(d)))
        ),
        "registries refuse it",
    ),
    Shape(
        "nested-5-deep",
        "Indexes five deep.",
        LIMITS,
        lambda s: _deep(s, 5),
        "a graph has to have an end",
    ),
    _edited(
        "20000-layers",
        "More descriptors than any image has.",
        LIMITS,
        "work has to have an end",
        lambda d: d["layers"].extend(d["layers"] * 10_000),
    ),
    # Descriptors.
    _edited(
        "no-config",
        "A manifest without config.",
        "image-spec manifest.md",
        "config is required",
        _drop("config"),
    ),
    _edited(
        "no-layers-field",
        "A manifest without layers.",
        "image-spec manifest.md",
        "layers is required",
        _drop("layers"),
        "target",
    ),
    _edited(
        "null-layers",
        "Layers that are null, as Go writes an empty list.",
        "image-spec manifest.md",
        "layers is a list",
        _set(layers=None),
        "target",
    ),
    _edited(
        "layers-object",
        "Layers that are no list.",
        "image-spec manifest.md",
        "layers is a list",
        _set(layers={}),
    ),
    _edited(
        "layer-text", "A layer that is a text.", DESCRIPTOR, NO_DESCRIPTOR, _set(layers=[NOWHERE])
    ),
    _edited(
        "no-media-type",
        "A descriptor without mediaType.",
        DESCRIPTOR,
        NO_DESCRIPTOR,
        _layer(mediaType=None),
    ),
    _edited(
        "media-type-header",
        "A mediaType with a line break.",
        "docs/protocol-facts.md 9.2 R11",
        "it could become part of a header",
        _layer(mediaType="a/b\r\nX-Evil: 1"),
    ),
    _edited(
        "media-type-newline",
        "A mediaType with a newline at its end.",
        "docs/protocol-facts.md 9.2 R11",
        "it could become part of a header",
        _layer(mediaType=LAYER_TYPE + "\n"),
    ),
    _edited(
        "digest-newline",
        "A digest with a newline at its end.",
        "docs/protocol-facts.md 9.2 R11",
        NO_DIGEST,
        _layer(digest="sha256:" + "a" * 64 + "\n"),
    ),
    _edited(
        "null-layer",
        "A layer that is null.",
        DESCRIPTOR,
        NO_DESCRIPTOR,
        lambda d: d["layers"].append(None),
    ),
    _edited(
        "no-digest", "A descriptor without digest.", DESCRIPTOR, NO_DESCRIPTOR, _layer(digest=None)
    ),
    _edited(
        "short-digest",
        "A digest that is too short.",
        DESCRIPTOR,
        NO_DIGEST,
        _layer(digest="sha256:ab12"),
    ),
    _edited(
        "upper-digest",
        "A digest in upper case.",
        DESCRIPTOR,
        NO_DIGEST,
        _layer(digest="sha256:" + "A" * 64),
    ),
    _edited(
        "md5-digest",
        "A digest of a broken algorithm.",
        DESCRIPTOR,
        NO_DIGEST,
        _layer(digest="md5:" + "a" * 32),
    ),
    _edited(
        "blake3-digest",
        "A digest that cannot be verified.",
        DESCRIPTOR,
        NO_DIGEST,
        _layer(digest="blake3:" + "a" * 64),
    ),
    _edited(
        "path-digest",
        "A digest that is a path.",
        "docs/protocol-facts.md 9.2 R11",
        NO_DIGEST,
        _layer(digest="sha256:../../../../etc/passwd"),
    ),
    _edited("no-size", "A descriptor without size.", DESCRIPTOR, NO_DESCRIPTOR, _layer(size=None)),
    _edited("negative-size", "A negative size.", DESCRIPTOR, NO_SIZE, _layer(size=-1)),
    _edited("text-size", "A size that is a text.", DESCRIPTOR, NO_SIZE, _layer(size="900")),
    _edited("fraction-size", "A size with a fraction.", DESCRIPTOR, NO_SIZE, _layer(size=900.5)),
    _edited("true-size", "A size that is true.", DESCRIPTOR, NO_SIZE, _layer(size=True)),
    _edited("endless-size", "A size of 2**63.", DESCRIPTOR, NO_SIZE, _layer(size=2**63)),
    _written(
        "size-of-5000-digits",
        "A size that takes long to read.",
        NO_SIZE,
        lambda body: body.replace(b'"size":', b'"size":' + b"9" * 5000, 1),
    ),
    _edited(
        "odd-subject",
        "A subject that is no descriptor.",
        DESCRIPTOR,
        NO_DESCRIPTOR,
        _set(subject="v1"),
    ),
    Shape(
        "odd-platform",
        "A platform that is a text.",
        "image-spec image-index.md",
        lambda s: _entry(s, platform="linux/amd64"),
        "platform is an object",
    ),
    Shape("two-sizes", "One digest with two sizes.", DESCRIPTOR, _two_sizes, OTHER_SIZE),
    Shape(
        "lying-data",
        "Data that is not the content.",
        DESCRIPTOR,
        _lying_data,
        "who trusts it sees another image",
        "target",
    ),
    # Content.
    Shape(
        "other-layer",
        "A layer with one bit flipped.",
        DESCRIPTOR,
        lambda s: _other_bytes(s.image(), 1, _flipped),
        OTHER_BYTES,
        "content",
    ),
    Shape(
        "other-config",
        "A config with one bit flipped.",
        DESCRIPTOR,
        lambda s: _other_bytes(s.image(), 0, _flipped),
        OTHER_BYTES,
        "content",
    ),
    Shape(
        "cut-layer",
        "A layer without its last byte.",
        DESCRIPTOR,
        lambda s: _other_bytes(s.image(), 2, lambda data: data[:-1]),
        OTHER_SIZE,
        "content",
    ),
    Shape(
        "longer-layer",
        "A layer with a byte more.",
        DESCRIPTOR,
        lambda s: _other_bytes(s.image(), 2, lambda data: data + b"x"),
        OTHER_SIZE,
        "content",
    ),
    Shape(
        "empty-layer",
        "A layer of which nothing is left.",
        DESCRIPTOR,
        lambda s: _other_bytes(s.image(), 1, lambda data: b""),
        OTHER_SIZE,
        "content",
    ),
    _edited(
        "size-too-small",
        "A layer that is larger than its size.",
        DESCRIPTOR,
        OTHER_SIZE,
        lambda d: d["layers"][1].update(size=d["layers"][1]["size"] - 1),
        "content",
    ),
    _edited(
        "size-too-large",
        "A layer that is smaller than its size.",
        DESCRIPTOR,
        OTHER_SIZE,
        lambda d: d["layers"][1].update(size=d["layers"][1]["size"] + 1),
        "content",
    ),
    _edited(
        "config-size",
        "A config that is larger than its size.",
        DESCRIPTOR,
        OTHER_SIZE,
        lambda d: d["config"].update(size=1),
        "content",
    ),
    Shape(
        "layer-in-index",
        "A flipped layer in the second child of an index.",
        DESCRIPTOR,
        lambda s: _other_bytes(s.index([s.image(), s.image()]), 4, _flipped),
        OTHER_BYTES,
        "content",
    ),
    Shape(
        "other-child",
        "A child with other bytes.",
        DESCRIPTOR,
        lambda s: _other_child(s, lambda body: body.replace(b"1970", b"1971") + b" "),
        OTHER_BYTES,
    ),
    Shape(
        "same-size-child",
        "A child with other bytes, as many as before.",
        DESCRIPTOR,
        lambda s: _other_child(s, lambda body: body.replace(b"sha256", b"sha255", 1)),
        OTHER_BYTES,
    ),
    Shape(
        "child-size",
        "A child that is larger than its size.",
        DESCRIPTOR,
        lambda s: _entry(s, size=10),
        OTHER_SIZE,
    ),
    Shape(
        "lost-layer",
        "A layer that the source lost.",
        DESCRIPTOR,
        lambda s: _without_blob(s.image(), 1),
        ABSENT,
        "content",
    ),
    Shape(
        "lost-config",
        "A config that the source lost.",
        DESCRIPTOR,
        lambda s: _without_blob(s.image(), 0),
        ABSENT,
        "content",
    ),
    Shape("lost-child", "A child that the source lost.", DESCRIPTOR, _lost_child, ABSENT),
    Shape(
        "lost-urls-layer",
        "A layer that only its urls have; its type is not foreign.",
        "docs/protocol-facts.md 1.6",
        lambda s: compose(
            Part(CONFIG_TYPE, b"{ }"),
            [Part(LAYER_TYPE, s.blob(99), {"urls": ["https://mirror.invalid/x"]}, held=False)],
        ),
        "urls do not make a layer foreign, and are never followed",
        "content",
    ),
)
