"""The catalogue of content: what a registry may hold, and what must never be copied, by name.

Invariants: the bytes of a shape depend only on its name and its builder. A strict registry accepts
all valid shapes. Each refused shape has exactly one defect. (None is an index that contains itself,
because its digest would depend on itself.)
Follows: the OCI image specification 1.1, Docker's schema 2, docs/protocol-facts.md sections 1.3 to
1.6, 1.10 and 9.2, cosign's specs/SIGNATURE_SPEC.md.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .images import TYPES, Image, Part, Seed, assemble, compose, compose_index, encode, without_none
from .messages import digest_of
from .storage import DOCKER_MANIFEST, MANIFEST_LIMIT, OCI_INDEX, OCI_MANIFEST

if TYPE_CHECKING:
    from .registry import App

__all__ = ["Sample", "Shape", "shapes"]

# When a copier can detect that a shape cannot be copied: from its documents, before it sends
# anything; from the bytes of its blobs, so that blobs may have been pushed, but no manifest; or
# only from the refusal of a strict target.
Found = Literal["document", "content", "target"]

CONFIG = TYPES["oci"]["config"]
LAYER = TYPES["oci"]["layer"]
FOREIGN = TYPES["oci"]["foreign"]
TAR = "application/vnd.oci.image.layer.v1.tar"
SCHEMA_1 = "application/vnd.docker.distribution.manifest.v1+json"
SIGNED_SCHEMA_1 = "application/vnd.docker.distribution.manifest.v1+prettyjws"
URLS = {"urls": ["https://mirror.invalid/layer"]}
NOWHERE = "sha256:" + "0" * 64


@dataclass(frozen=True)
class Sample:
    """An image with its referrers and the tags that are derived from its digest."""

    image: Image
    # Referrers, in an order in which they can be pushed. They have no tags.
    attached: tuple[Image, ...] = ()
    # Images by tag: cosign's tags.
    tagged: Mapping[str, Image] = field(default_factory=dict)

    def load_into(self, app: App, repository: str, tag: str) -> Sample:
        """Store the sample in a registry of the harness. Returns self."""
        self.image.load_into(app, repository, tag)
        for image in self.attached:
            image.load_into(app, repository)
        for name, image in self.tagged.items():
            image.load_into(app, repository, name)
        return self

    def parts(self) -> dict[str, Image]:
        """Return the image by "", its referrers by digest, and the tagged images by tag."""
        return {"": self.image, **{image.top: image for image in self.attached}, **self.tagged}

    def fingerprint(self) -> str:
        """Return a hash of all bytes and names of the sample."""
        lines = []
        for name, image in self.parts().items():
            lines.append(f"{name} {image.top} {image.media_type}")
            lines += [
                f"{key} {kind} {digest_of(body)}" for key, (kind, body) in image.manifests.items()
            ]
            lines += [f"{key} {digest_of(data)}" for key, data in image.blobs.items()]
            lines += sorted(image.absent)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


Builder = Callable[[Seed], "Image | Sample"]


class Shape(NamedTuple):
    """An entry of the catalogue."""

    name: str
    builder: Builder
    found: Found | None = None  # None if it must be copied

    @property
    def refused(self) -> bool:
        return self.found is not None

    @property
    def options(self) -> Mapping[str, bool]:
        """The options of App that a registry needs to accept the shape."""
        return {"any_manifest_type": True} if self.name in UNKNOWN_TYPES else {}

    def build(self) -> Sample:
        """Build the sample. It is the same in every run and with every version of Python."""
        built = self.builder(Seed(zlib.crc32(self.name.encode())))
        return built if isinstance(built, Sample) else Sample(built)


def shapes() -> dict[str, Shape]:
    """Return the catalogue by name: what must be copied, then what must be refused."""
    found = {name: Shape(name, builder) for name, builder in VALID.items()}
    for when, builders in REFUSED.items():
        found |= {name: Shape(name, builder, when) for name, builder in builders.items()}
    return found


# Builders that the parts of the catalogue share.


def _edited(edit: Callable[[dict[str, Any]], Any]) -> Builder:
    """Return a builder of an ordinary image whose manifest is changed by `edit`."""

    def build(seed: Seed) -> Image:
        image = seed.image()
        document = image.document
        edit(document)
        return image.with_manifest(encode(document), image.media_type)

    return build


def _written(write: Callable[[bytes], bytes]) -> Builder:
    """Return a builder of an ordinary image whose manifest's bytes are changed by `write`."""

    def build(seed: Seed) -> Image:
        image = seed.image()
        return image.with_manifest(write(image.body), image.media_type)

    return build


def _base(seed: Seed) -> tuple[Part, list[Part]]:
    """Return the config and the two layers of an ordinary image."""
    settings = {"architecture": "amd64", "os": "linux", "x-seed": seed.blob(8).hex()}
    return Part(CONFIG, encode(settings)), [Part(LAYER, seed.layer(size)) for size in (600, 900)]


def _layers(arrange: Callable[[Part, Part], list[Part]]) -> Builder:
    """Return a builder of an image whose layers are arranged from two."""

    def build(seed: Seed) -> Image:
        config, (first, second) = _base(seed)
        return compose(config, arrange(first, second))

    return build


def _untyped_index(seed: Seed) -> Image:
    return compose_index([(seed.image(), {}), (seed.image(), {})], mediaType=None)


def _deep(seed: Seed, depth: int) -> Image:
    image = seed.image()
    for _ in range(depth):
        image = seed.index([image, seed.image(sizes=(100,))])
    return image


# Builders of valid shapes.


def _sharing(seed: Seed) -> Image:
    shared = seed.image()
    return seed.index([seed.index([shared, seed.image()]), seed.index([shared]), shared])


def _twice(seed: Seed) -> Image:
    """Build an index that lists one child for two platforms, and two children for one."""
    one = seed.image()
    amd64 = {"platform": {"os": "linux", "architecture": "amd64"}}
    arm64 = {"platform": {"os": "linux", "architecture": "arm64"}}
    return compose_index([(one, amd64), (one, arm64), (seed.image(), amd64)])


def _null_fields(seed: Seed) -> Image:
    index = compose_index([(seed.image(), {})])
    body = encode({**index.document, "annotations": None, "subject": None})
    return index.with_manifest(body, OCI_INDEX)


def _odd_platforms(seed: Seed) -> Image:
    platforms: tuple[Mapping[str, Any], ...] = (
        {"os": "", "architecture": ""},
        {"os": "linux", "architecture": "amd64", "features": ["sse4"]},
        {"os": "windows", "architecture": "amd64", "os.version": "10.0", "os.features": ["x-y"]},
        {"os": "linux", "architecture": "mips64le", "x-unknown": {"a": 1}},
        {"os": "wasip1", "architecture": "wasm"},
    )
    return compose_index([(seed.image(), {"platform": platform}) for platform in platforms])


def _repeated(seed: Seed) -> Image:
    """Build an image that has one layer five times, and its config among its layers."""
    config, (first, second) = _base(seed)
    same = config._replace(media_type=TAR)
    return compose(config, [first, second, first, first, first, first, same, second])


def _inline(seed: Seed) -> Image:
    config, layers = _base(seed)
    return compose(config.inlined(), [layer.inlined() for layer in layers])


def _unknown_fields(seed: Seed) -> Image:
    """Build an image with fields of every JSON type that no specification knows."""
    odd: dict[str, Any] = {"x-list": [1, -2.5, 10**30, None, True, {"deep": [[]]}], "x-empty": {}}
    config, (first, second) = _base(seed)
    more = {"x-in-a-descriptor": odd, "artifactType": "application/x", "annotations": {}}
    fields: dict[str, Any] = {"x-top": odd, "annotations": {}}
    return compose(config, [first, second._replace(more=more)], **fields)


def _sha512(seed: Seed) -> Image:
    config, layers = _base(seed)
    config, *layers = (part._replace(algorithm="sha512") for part in (config, *layers))
    return compose(config, layers)


def _sha512_child(seed: Seed) -> Image:
    child = seed.image()
    named = child.with_manifest(child.body, OCI_MANIFEST, "sha512")
    return compose_index([(named, {}), (seed.image(), {})])


def _cache(seed: Seed) -> Image:
    """Build the older form of buildkit's cache, an index whose entries are blobs."""
    parts = [Part(LAYER, seed.layer(size)) for size in (200, 300)]
    config = encode({"layers": [], "seed": seed.blob(4).hex()})
    parts.append(Part("application/vnd.buildkit.cacheconfig.v0", config))
    index = compose_index([], manifests=[part.descriptor() for part in parts])
    return assemble(index.body, OCI_INDEX, parts)


def _unknown_child(seed: Seed) -> Image:
    """Build an index of an image and a manifest of an unknown type."""
    body = encode({"anything": ["at", "all"], "seed": seed.blob(4).hex()})
    unknown = assemble(body, "application/vnd.example.manifest.v7+json")
    return compose_index([(seed.image(), {}), (unknown, {})])


def _oras(seed: Seed) -> Image:
    """Build the artifact manifest of ORAS, which lists blobs, without config and layers."""
    kind = "application/vnd.cncf.oras.artifact.manifest.v1+json"
    blob = Part("application/octet-stream", seed.blob(300))
    document = {"mediaType": kind, "artifactType": "a/b", "blobs": [blob.descriptor()]}
    return assemble(encode(document), kind, [blob])


def _of_children(seed: Seed) -> Sample:
    """Build an index with referrers of itself, of a child, and of a child's child."""
    leaf = seed.image()
    nested = seed.index([leaf, seed.image(architecture="arm64")])
    top = seed.index([nested, seed.image(os="windows")])
    return Sample(top, tuple(seed.artifact(subject) for subject in (top, nested, leaf)))


def _cosign(seed: Seed, image: Image, kind: str) -> dict[str, Image]:
    """Return the image under one of cosign's tags, by that tag."""
    payload = {
        "critical": {
            "type": "cosign container image signature",
            "image": {"docker-manifest-digest": image.top},
            "identity": {"docker-reference": ""},
        },
        "optional": None,
    }
    signature = base64.b64encode(seed.blob(70)).decode()
    notes = {"annotations": {"dev.cosignproject.cosign/signature": signature}}
    layers = {
        "sig": Part("application/vnd.dev.cosign.simplesigning.v1+json", encode(payload), notes),
        "att": Part("application/vnd.dsse.envelope.v1+json", seed.blob(500), notes),
        "sbom": Part("text/spdx+json", encode({"spdxVersion": "SPDX-2.3", "of": image.top})),
    }
    config = Part(CONFIG, encode({"architecture": "", "os": "", "of": image.top + kind}))
    return {f"{image.top.replace(':', '-')}.{kind}": compose(config, [layers[kind]])}


def _cosign_tags(seed: Seed) -> Sample:
    image = seed.image()
    tagged = [_cosign(seed, image, kind) for kind in ("sig", "att", "sbom")]
    return Sample(image, tagged={**tagged[0], **tagged[1], **tagged[2]})


def _cosign_children(seed: Seed) -> Sample:
    """Sign an index and each of its children, as `cosign sign --recursive` does."""
    children = [seed.image(), seed.image(architecture="arm64")]
    index = seed.index(children)
    tagged: dict[str, Image] = {}
    for image in (index, *children):
        tagged |= _cosign(seed, image, "sig")
    return Sample(index, tagged=tagged)


UNKNOWN_TYPES = ("unknown-child", "oras-manifest")
VALID: Mapping[str, Builder] = {
    # Formats and indexes.
    "oci-image": lambda s: s.image(),
    "docker-image": lambda s: s.image(format="docker"),
    "oci-index": lambda s: s.index(),
    "docker-list": lambda s: s.index(format="docker"),
    "oci-index-of-both": lambda s: s.index([s.image(format="docker"), s.image()]),
    "oci-untyped": lambda s: compose(*_base(s), mediaType=None),  # as podman wrote them
    "oci-index-untyped": _untyped_index,
    "nested-index": lambda s: s.index([s.index(), s.image()]),
    "nested-4-deep": lambda s: _deep(s, 4),  # the deepest that has to be taken
    "nested-shared": _sharing,
    "empty-index": lambda s: s.index([]),
    "index-of-1000": lambda s: s.index([s.image(sizes=()) for _ in range(1000)]),
    "index-without-platforms": lambda s: s.index(with_platforms=False),
    "index-repeats": _twice,
    "index-null-fields": _null_fields,  # as some Go programs write optional fields
    "odd-platforms": _odd_platforms,
    # Layers.
    "no-layers": lambda s: s.image(layers=[]),
    "zero-byte-layer": lambda s: s.image(layers=[b"", s.layer(300)]),
    "repeated-layers": _repeated,
    "large-layer": lambda s: s.image(layers=[s.blob((5 << 20) + 1)]),
    "1000-layers": lambda s: s.image(sizes=(16,) * 1000),  # more than docker could run
    "layer-of-two-types": _layers(lambda one, two: [one._replace(media_type=TAR), two, one]),
    "typed-with-parameter": _layers(lambda one, two: [one._replace(media_type="a/b; c=d"), two]),
    # Its media type makes a layer foreign, and urls do not. One that is also an ordinary layer is
    # needed.
    "docker-foreign": lambda s: s.image(format="docker", foreign=["https://mirror.invalid/1"]),
    "oci-foreign": lambda s: s.image(foreign=["https://mirror.invalid/1"]),
    "foreign-without-urls": _layers(
        lambda one, two: [one, two._replace(media_type=FOREIGN, held=False)]
    ),
    "foreign-and-ordinary": _layers(lambda one, two: [one._replace(media_type=FOREIGN), two, one]),
    "urls-on-a-layer": _layers(lambda one, two: [one, two._replace(more=URLS)]),
    # Fields, and JSON as it is written.
    "inline-everything": _inline,
    "unknown-fields": _unknown_fields,
    "image-with-subject": lambda s: s.image(subject=s.image()),  # a subject that nobody holds
    "sha512-blobs": _sha512,
    "sha512-child": _sha512_child,
    "odd-spacing": lambda s: s.image(spacing="odd"),
    "4-mib-manifest": _written(lambda body: body.ljust(MANIFEST_LIMIT)),  # the largest
    # Artifacts.
    "artifact": lambda s: s.artifact(),
    "artifact-in-index": lambda s: compose_index(
        [(s.image(), {}), (s.artifact(), {"artifactType": "a/b"})]
    ),
    "buildkit-cache-index": _cache,
    "unknown-child": _unknown_child,
    "oras-manifest": _oras,
    "referrers-of-children": _of_children,
    "cosign-tags": _cosign_tags,
    "cosign-recursive": _cosign_children,
}


# Builders of shapes with a defect.


def _layer(**fields: Any) -> Builder:
    """Return a builder of an image with other fields of its first layer. None removes a field."""

    def edit(document: dict[str, Any]) -> None:
        document["layers"][0] = without_none({**document["layers"][0], **fields})

    return _edited(edit)


def _entry(**more: Any) -> Builder:
    """Return a builder of an index whose entry for its second child has the wrong fields `more`."""
    return lambda seed: compose_index([(seed.image(), {}), (seed.image(), more)])


def _blob(which: int, change: Callable[[bytes], bytes] | None) -> Builder:
    """Return a builder of an image with other bytes under a blob's digest, or without that blob.

    `which` is 0 for the config, and 1 for the first layer. No `change` removes the blob.
    """
    return lambda seed: _damaged(seed.image(), which, change)


def _damaged(image: Image, which: int, change: Callable[[bytes], bytes] | None) -> Image:
    blobs = dict(image.blobs)
    digest = list(blobs)[which]
    if change is None:
        del blobs[digest]
    else:
        blobs[digest] = change(blobs[digest])
    return replace(image, blobs=blobs)


def _child(change: Callable[[bytes], bytes] | None) -> Builder:
    """Return a builder of an index with other bytes under its second child's digest, or none."""

    def build(seed: Seed) -> Image:
        index = seed.index([seed.image(), seed.image(architecture="arm64")])
        manifests = dict(index.manifests)
        digest = list(manifests)[1]
        kind, body = manifests[digest]
        if change is None:
            del manifests[digest]
        else:
            manifests[digest] = (kind, change(body))
        return replace(index, manifests=manifests)

    return build


def _schema_1(seed: Seed, media_type: str) -> Image:
    image = seed.image()
    history = {"id": seed.blob(32).hex(), "os": "linux"}
    document: dict[str, Any] = {
        "schemaVersion": 1,
        "name": "a/b",
        "tag": "v1",
        "architecture": "amd64",
        "fsLayers": [{"blobSum": list(image.blobs)[-1]}],
        "history": [{"v1Compatibility": json.dumps(history)}],
    }
    if media_type != SCHEMA_1:
        header = {"jwk": {"crv": "P-256", "kty": "EC"}, "alg": "ES256"}
        protected = base64.urlsafe_b64encode(b'{"formatLength":1,"formatTail":"fQ"}').decode()
        signature = {"header": header, "signature": "c2ln", "protected": protected.rstrip("=")}
        document["signatures"] = [signature]
    return image.with_manifest(json.dumps(document, indent=3).encode(), media_type)


def _served_as(image: Image, media_type: str) -> Image:
    """Return an image that is stored with another media type than its document's."""
    return image.with_manifest(image.body, media_type)


def _nested_json(document: dict[str, Any]) -> None:
    value: Any = "end"
    for _ in range(100):
        value = [value]
    document["x-deep"] = value


def _lying_data(seed: Seed) -> Image:
    config, (first, second) = _base(seed)
    lie = first._replace(data=_flipped(bytes(first.data))).inlined().more
    return compose(config, [first._replace(more=lie), second])


def _lost_urls_layer(seed: Seed) -> Image:
    return compose(Part(CONFIG, b"{ }"), [Part(LAYER, seed.blob(99), URLS, held=False)])


def _flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


REFUSED: Mapping[Found, Mapping[str, Builder]] = {
    "document": {
        # Schema 1 has no digest that its bytes have.
        "schema-1": lambda s: _schema_1(s, SCHEMA_1),
        "schema-1-signed": lambda s: _schema_1(s, SIGNED_SCHEMA_1),
        "schema-1-as-json": lambda s: _schema_1(s, "application/json"),
        "schema-1-child": lambda s: s.index([s.image(), _schema_1(s, SIGNED_SCHEMA_1)]),
        # One reader takes it for an image, the other for an index (CVE-2021-41190).
        "manifest-and-index": _edited(
            lambda d: d.update(
                manifests=[{"mediaType": OCI_MANIFEST, "digest": NOWHERE, "size": 2}]
            )
        ),
        # Header, document and index disagree about a type.
        "index-as-manifest": lambda s: _served_as(_untyped_index(s), OCI_MANIFEST),
        "manifest-as-index": lambda s: _served_as(compose(*_base(s), mediaType=None), OCI_INDEX),
        "other-content-type": lambda s: _served_as(s.image(), DOCKER_MANIFEST),
        "other-inner-type": _edited(lambda d: d.update(mediaType=OCI_INDEX)),
        "other-child-type": _entry(mediaType=DOCKER_MANIFEST),
        "child-of-other-kind": lambda s: compose_index(
            [(_untyped_index(s), {"mediaType": OCI_MANIFEST})]
        ),
        # This is no document, or one that two readers could understand differently (RFC 8259).
        "empty-manifest": _written(lambda body: b""),
        "cut-manifest": _written(lambda body: body[:99]),
        "json-list": _written(lambda body: b"[" + body + b"]"),
        "html": _written(lambda body: b"<html><body>502 Bad Gateway</body></html>"),
        "byte-order-mark": _written(lambda body: b"\xef\xbb\xbf" + body),
        "utf-16": _written(lambda body: body.decode().encode("utf-16")),
        "broken-utf-8": _written(lambda body: body[:-1] + b',"x":"\xff"}'),
        "keys-twice": _written(lambda body: body[:-1] + b',"layers":[]}'),
        "not-a-number": _written(lambda body: body[:-1] + b',"x":NaN}'),
        "two-documents": _written(lambda body: body + body),
        # Work has to have an end (docs/protocol-facts.md section 9.2, R14).
        "deep-json": _edited(_nested_json),
        "above-4-mib": _written(lambda body: body.ljust(MANIFEST_LIMIT + 1)),
        "nested-5-deep": lambda s: _deep(s, 5),
        "20000-layers": _edited(lambda d: d["layers"].extend(d["layers"] * 10_000)),
        # Required fields.
        "no-config": _edited(lambda d: d.pop("config")),
        "layers-object": _edited(lambda d: d.update(layers={})),
        "layer-text": _edited(lambda d: d.update(layers=[NOWHERE])),
        "null-layer": _edited(lambda d: d["layers"].append(None)),
        "odd-subject": _edited(lambda d: d.update(subject="v1")),
        "odd-platform": _entry(platform="linux/amd64"),
        "no-media-type": _layer(mediaType=None),
        "no-digest": _layer(digest=None),
        "no-size": _layer(size=None),
        # It could become part of a header or of a URL, or cannot be verified (R11).
        "media-type-header": _layer(mediaType="a/b\r\nX-Evil: 1"),
        "media-type-newline": _layer(mediaType=LAYER + "\n"),
        "digest-newline": _layer(digest="sha256:" + "a" * 64 + "\n"),
        "path-digest": _layer(digest="sha256:../../../../etc/passwd"),
        "short-digest": _layer(digest="sha256:ab12"),
        "upper-digest": _layer(digest="sha256:" + "A" * 64),
        "md5-digest": _layer(digest="md5:" + "a" * 32),
        "blake3-digest": _layer(digest="blake3:" + "a" * 64),
        # A size is a whole number from 0 to 2**63 - 1, and content has one size.
        "negative-size": _layer(size=-1),
        "text-size": _layer(size="900"),
        "fraction-size": _layer(size=900.5),
        "true-size": _layer(size=True),
        "endless-size": _layer(size=2**63),
        "size-of-5000-digits": _written(
            lambda body: body.replace(b'"size":', b'"size":' + b"9" * 5000, 1)
        ),
        "two-sizes": _layers(lambda one, two: [one, two, one._replace(more={"size": 1})]),
        "child-size": _entry(size=10),
        # Children that are not what the index names, or that the source lost.
        "other-child": _child(lambda body: body + b" "),
        "same-size-child": _child(lambda body: body.replace(b"sha256", b"sha255", 1)),
        "lost-child": _child(None),
    },
    "content": {
        # The bytes do not have the digest or the size under which they were asked for.
        "other-config": _blob(0, _flipped),
        "other-layer": _blob(1, _flipped),
        "layer-in-index": lambda s: _damaged(s.index([s.image(), s.image()]), 4, _flipped),
        "cut-layer": _blob(2, lambda data: data[:-1]),
        "longer-layer": _blob(2, lambda data: data + b"x"),
        "empty-layer": _blob(1, lambda data: b""),
        "size-too-small": _edited(lambda d: d["layers"][1].update(size=d["layers"][1]["size"] - 1)),
        "size-too-large": _edited(lambda d: d["layers"][1].update(size=d["layers"][1]["size"] + 1)),
        "config-size": _edited(lambda d: d["config"].update(size=1)),
        # The source does not hold what it names, and urls are never followed.
        "lost-config": _blob(0, None),
        "lost-layer": _blob(1, None),
        "lost-urls-layer": _lost_urls_layer,
    },
    # What a copy does not need to read: the target judges it.
    "target": {
        "schema-version-3": _edited(lambda d: d.update(schemaVersion=3)),
        "docker-untyped": lambda s: compose(*_base(s), DOCKER_MANIFEST, mediaType=None),
        "no-layers-field": _edited(lambda d: d.pop("layers")),
        "null-layers": _edited(lambda d: d.update(layers=None)),
        "lying-data": _lying_data,
    },
}
