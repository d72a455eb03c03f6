"""Seeded images, with the same bytes in every run and with every version of Python.

Owns: building image graphs of all shapes that a registry may hold.
May not know: the network, the clock, `random` (whose numbers may differ between versions of
Python).
Invariants: equal seeds and calls give equal bytes. Gzip members have no time and are stored
uncompressed, because versions of zlib compress differently.
Follows: the OCI image specification 1.1 and docs/protocol-facts.md sections 1.3 to 1.6.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..messages import digest_of
from ..registry.storage import DOCKER_LIST, DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST
from .streams import Stream

if TYPE_CHECKING:
    from ..registry.app import App

__all__ = [
    "EMPTY",
    "EMPTY_CONFIG",
    "EMPTY_TYPE",
    "TYPES",
    "Image",
    "Part",
    "Seed",
    "compose",
    "compose_index",
    "encode",
    "single",
    "store_gzip",
    "store_tar",
    "without_none",
]

Format = Literal["oci", "docker"]
Document = dict[str, Any]

EMPTY_CONFIG = b"{}"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
# Media types, by format and by kind of content.
TYPES: Mapping[str, Mapping[str, str]] = {
    "oci": {
        "manifest": OCI_MANIFEST,
        "index": OCI_INDEX,
        "config": "application/vnd.oci.image.config.v1+json",
        "layer": "application/vnd.oci.image.layer.v1.tar+gzip",
        "foreign": "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
    },
    "docker": {
        "manifest": DOCKER_MANIFEST,
        "index": DOCKER_LIST,
        "config": "application/vnd.docker.container.image.v1+json",
        "layer": "application/vnd.docker.image.rootfs.diff.tar.gzip",
        "foreign": "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
    },
}


@dataclass(frozen=True)
class Image:
    """A graph: the manifest that a tag names, with all manifests and blobs below it."""

    top: str  # the digest of that manifest
    media_type: str  # of that manifest
    # Media type and bytes, by digest. The order is one in which they can be pushed: children first,
    # subjects before referrers.
    manifests: Mapping[str, tuple[str, bytes]]
    blobs: Mapping[str, bytes]  # by digest
    # Digests that the graph names but does not hold: foreign layers and external subjects.
    absent: frozenset[str] = field(default_factory=frozenset)
    # Blobs that are generated when they are read, by digest. `contents` does not include them.
    streams: Mapping[str, Stream] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        _, body = self.manifests[self.top]
        return body

    @property
    def document(self) -> Document:
        parsed = json.loads(self.body)
        assert isinstance(parsed, dict)
        return parsed

    @property
    def size(self) -> int:
        """The size of all blobs in bytes. Each blob counts once."""
        streamed = sum(stream.size for stream in self.streams.values())
        return sum(map(len, self.blobs.values())) + streamed

    def contents(self) -> dict[str, bytes]:
        """Return the bytes of all blobs and manifests, by digest, in the form of `fetch_http`."""
        return {**self.blobs, **{digest: body for digest, (_, body) in self.manifests.items()}}

    def descriptor(self, **more: Any) -> Document:
        """Return the descriptor of the top manifest, with further fields."""
        return {"mediaType": self.media_type, "digest": self.top, "size": len(self.body), **more}

    def load_into(self, app: App, repository: str, *tags: str, tag: str | None = None) -> Image:
        """Store the whole graph in a registry of the harness. Returns self."""
        for digest, data in self.blobs.items():
            app.add_blob(repository, data, digest)
        app.repositories[repository].blobs.update(self.streams)
        for digest, (media_type, body) in self.manifests.items():
            app.add_manifest(repository, body, media_type, digest=digest)
        app.add_manifest(
            repository, self.body, self.media_type, *tags, *([tag] if tag else ()), digest=self.top
        )
        return self

    def with_manifest(self, body: bytes, media_type: str, algorithm: str = "sha256") -> Image:
        """Return this graph with another top manifest in place of its own."""
        digest = digest_of(body, algorithm)
        others = {key: value for key, value in self.manifests.items() if key != self.top}
        return replace(
            self,
            top=digest,
            media_type=media_type,
            manifests={**others, digest: (media_type, body)},
        )


def encode(document: Document, spacing: Literal["plain", "indent", "odd"] = "plain") -> bytes:
    """Encode a document as JSON in one of the forms that occur in registries."""
    if spacing == "plain":
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text = json.dumps(document, indent=3, ensure_ascii=False)
    if spacing == "odd":
        text = "\r\n" + text.replace(": ", " :\t").replace("/", "\\/") + "\n \n"
    return text.encode()


def store_gzip(data: bytes) -> bytes:
    """Return a gzip member with `data` in stored blocks and without a time."""
    out = bytearray(b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff")
    blocks = [data[start : start + 0xFFFF] for start in range(0, len(data), 0xFFFF)] or [b""]
    for position, block in enumerate(blocks):
        last = 1 if position == len(blocks) - 1 else 0
        out += struct.pack("<BHH", last, len(block), len(block) ^ 0xFFFF) + block
    return bytes(out) + struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)


def store_tar(files: Mapping[str, bytes]) -> bytes:
    """Return a ustar archive of regular files, by name, that belong to root and have time 0."""
    out = bytearray()
    for name, data in files.items():
        header = bytearray(512)
        fields = (
            (0, name.encode()[:100]),
            (100, b"0000644\0"),  # mode
            (108, b"0000000\0"),  # owner
            (116, b"0000000\0"),  # group
            (124, b"%011o\0" % len(data)),
            (136, b"%011o\0" % 0),  # time
            (148, b"        "),  # checksum, which is computed with spaces in its place
            (156, b"0"),  # a regular file
            (257, b"ustar\x0000"),
        )
        for offset, value in fields:
            header[offset : offset + len(value)] = value

        header[148:156] = b"%06o\0 " % sum(header)
        out += header + data + bytes(-len(data) % 512)

    return bytes(out) + bytes(1024)


class Seed:
    """Builds content. Each call uses the next bytes of the seed, so the order of calls matters."""

    def __init__(self, number: int = 0) -> None:
        self._number = number
        self._drawn = 0

    def blob(self, size: int) -> bytes:
        """Return `size` incompressible bytes."""
        self._drawn += 1
        return hashlib.shake_128(b"%d/%d" % (self._number, self._drawn)).digest(size)

    def layer(self, size: int) -> bytes:
        """Return a gzipped tar archive with one file of `size` bytes."""
        return store_gzip(store_tar({f"file-{self._drawn}": self.blob(size)}))

    def image(
        self,
        *,
        format: Format = "oci",
        layers: Sequence[bytes | Stream] | None = None,
        sizes: Sequence[int] = (900, 2000),
        os: str = "linux",
        architecture: str = "amd64",
        variant: str | None = None,
        os_version: str | None = None,
        os_features: Sequence[str] = (),
        foreign: Sequence[str] = (),
        inline_config: bool = False,
        subject: Image | None = None,
        annotations: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
        spacing: Literal["plain", "indent", "odd"] = "plain",
    ) -> Image:
        """Build an image manifest.

        `layers` has the bytes or streams of the layers. Without it, a new layer is made for each of
        `sizes`. `foreign` adds a non-distributable layer for each URL. `inline_config` adds the
        config to its descriptor as `data`. `extra` adds fields that are not in the specification.
        """
        types = TYPES[format]
        if layers is None:
            layers = [self.layer(size) for size in sizes]

        config_document: Document = {
            "created": "1970-01-01T00:00:00Z",
            "architecture": architecture,
            "os": os,
            "config": {"Labels": {"seed": f"{self._number}/{self._drawn}"}},
            "rootfs": {"type": "layers", "diff_ids": [_diff_id(layer) for layer in layers]},
            "history": [
                {"created": "1970-01-01T00:00:00Z", "created_by": f"layer {n}"}
                for n in range(len(layers))
            ],
        }
        if variant:
            config_document["variant"] = variant
        if os_version:
            config_document["os.version"] = os_version
        if os_features:
            config_document["os.features"] = list(os_features)

        config = encode(config_document)
        described = [_describe(types["layer"], layer) for layer in layers]
        absent = set()
        for url in foreign:
            data = self.blob(300)
            described.append({**_describe(types["foreign"], data), "urls": [url]})
            absent.add(digest_of(data))

        document: Document = {
            "schemaVersion": 2,
            "mediaType": types["manifest"],
            "config": _describe(types["config"], config),
            "layers": described,
        }
        if inline_config:
            document["config"]["data"] = base64.b64encode(config).decode()

        _decorate(document, subject, annotations, extra)
        stored = [config, *(layer for layer in layers if isinstance(layer, bytes))]
        streams = {layer.digest(): layer for layer in layers if isinstance(layer, Stream)}
        image = single(encode(document, spacing), types["manifest"], _by_digest(stored), absent)
        return replace(image, streams=streams)

    def artifact(
        self,
        subject: Image | None = None,
        artifact_type: str | None = "application/vnd.example.sbom.v1",
        *,
        size: int = 400,
        config_type: str | None = None,
        annotations: Mapping[str, str] | None = None,
        spacing: Literal["plain", "indent", "odd"] = "plain",
    ) -> Image:
        """Build an artifact manifest.

        `config_type` sets the config's type, as in OCI 1.0 artifacts.
        """
        data = self.blob(size)
        config = EMPTY_CONFIG if config_type is None else self.blob(20)
        document: Document = {"schemaVersion": 2, "mediaType": OCI_MANIFEST}
        if artifact_type is not None:
            document["artifactType"] = artifact_type

        document["config"] = _describe(config_type or EMPTY_TYPE, config)
        if config_type is None:
            document["config"]["data"] = base64.b64encode(config).decode()

        document["layers"] = [_describe("application/octet-stream", data)]
        _decorate(document, subject, annotations, None)
        return single(encode(document, spacing), OCI_MANIFEST, _by_digest([config, data]))

    def index(
        self,
        children: Sequence[Image] | None = None,
        *,
        format: Format = "oci",
        platforms: Iterable[str] = (
            "linux/amd64",
            "linux/arm64/v8",
            "linux/arm/v7",
            "linux/arm/v6",
        ),
        attestations: bool = False,
        subject: Image | None = None,
        artifact_type: str | None = None,
        annotations: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
        spacing: Literal["plain", "indent", "odd"] = "plain",
        with_platforms: bool = True,
    ) -> Image:
        """Build an index of `children`, or without them of a new image for each platform.

        Children may be images or indexes. `attestations` adds an entry for each image as buildkit
        does: platform unknown/unknown with the annotation `vnd.docker.reference.digest`.
        """
        if children is None:
            children = [self.platform_image(platform, format=format) for platform in platforms]

        parts = list(children)
        platforms_of = [_platform(child) if with_platforms else None for child in children]
        entries = [
            without_none(child.descriptor(platform=platform))
            for child, platform in zip(children, platforms_of, strict=True)
        ]
        if attestations:
            for child in children:
                proof = self.attestation(child)
                parts.append(proof)
                entries.append(
                    proof.descriptor(
                        annotations={
                            "vnd.docker.reference.digest": child.top,
                            "vnd.docker.reference.type": "attestation-manifest",
                        },
                        platform={"architecture": "unknown", "os": "unknown"},
                    )
                )

        media_type = TYPES[format]["index"]
        document: Document = {"schemaVersion": 2, "mediaType": media_type}
        if artifact_type is not None:
            document["artifactType"] = artifact_type

        document["manifests"] = entries
        _decorate(document, subject, annotations, extra)
        return _graph_of_index(parts, encode(document, spacing), media_type)

    def platform_image(
        self,
        platform: str,
        *,
        format: Format = "oci",
        layers: Sequence[bytes | Stream] | None = None,
    ) -> Image:
        """Build an image for a platform, as in `linux/arm64/v8`, with two new layers or `layers`."""
        system, architecture, *variant = platform.split("/")
        return self.image(
            format=format,
            layers=layers,
            sizes=(500, 700),
            os=system,
            architecture=architecture,
            variant=variant[0] if variant else None,
        )

    def attestation(self, child: Image) -> Image:
        """Build the manifest that buildkit attaches to an image inside an index."""
        statement = encode({"_type": "https://in-toto.io/Statement/v0.1", "subject": [child.top]})
        config = encode(
            {
                "architecture": "unknown",
                "os": "unknown",
                "rootfs": {"type": "layers"},
                "for": child.top,
            }
        )
        return compose(
            Part(TYPES["oci"]["config"], config), [Part("application/vnd.in-toto+json", statement)]
        )

    def fallback_index(self, referrers: Iterable[Image]) -> Image:
        """Build the index under a fallback tag (docs/protocol-facts.md section 1.10)."""
        entries = []
        for referrer in referrers:
            document = referrer.document
            kind = document.get("artifactType") or document.get("config", {}).get("mediaType")
            described = referrer.descriptor(**({"artifactType": kind} if kind else {}))
            if "annotations" in document:
                described["annotations"] = document["annotations"]
            entries.append(described)
        return compose_index([], manifests=entries)


class Part(NamedTuple):
    """A blob with its descriptor."""

    media_type: str
    data: bytes
    more: Mapping[str, Any] = {}  # fields of the descriptor, which replace the right ones
    algorithm: str = "sha256"
    held: bool = True  # False: the manifest names the blob, but no registry has it

    @property
    def digest(self) -> str:
        return digest_of(self.data, self.algorithm)

    def descriptor(self) -> Document:
        """Return the descriptor of the blob. It is wrong if `more` replaces right fields."""
        described = {"mediaType": self.media_type, "digest": self.digest, "size": len(self.data)}
        return without_none({**described, **self.more})


# The descriptor of `{}`, with its data.
EMPTY = Part(EMPTY_TYPE, EMPTY_CONFIG, {"data": "e30="})


def compose(
    config: Part, layers: Sequence[Part], media_type: str = OCI_MANIFEST, **fields: Any
) -> Image:
    """Build a manifest of any parts. `fields` replace its fields. None removes a field."""
    document: Document = {
        "schemaVersion": 2,
        "mediaType": media_type,
        "config": config.descriptor(),
        "layers": [layer.descriptor() for layer in layers],
    }
    body = encode(without_none({**document, **fields}))
    parts = [config, *layers]
    blobs = {part.digest: part.data for part in parts if part.held}
    return single(body, media_type, blobs, [part.digest for part in parts if not part.held])


def compose_index(
    entries: Sequence[tuple[Image, Mapping[str, Any]]], media_type: str = OCI_INDEX, **fields: Any
) -> Image:
    """Build an index of children.

    The fields beside a child replace fields of its entry. None removes a field.
    """
    descriptors = [without_none(child.descriptor(**more)) for child, more in entries]
    document = {"schemaVersion": 2, "mediaType": media_type, "manifests": descriptors, **fields}
    return _graph_of_index(
        [child for child, _ in entries], encode(without_none(document)), media_type
    )


def without_none(document: Mapping[str, Any]) -> Document:
    """Return a document without the fields that are None."""
    return {key: value for key, value in document.items() if value is not None}


def _graph_of_index(parts: Iterable[Image], body: bytes, media_type: str) -> Image:
    """Return the graph of an index and its children."""
    top = digest_of(body)
    manifests: dict[str, tuple[str, bytes]] = {}
    blobs: dict[str, bytes] = {}
    streams: dict[str, Stream] = {}
    absent: set[str] = set()
    for part in parts:
        manifests.update(part.manifests)
        blobs.update(part.blobs)
        streams.update(part.streams)
        absent |= part.absent
    return Image(
        top, media_type, {**manifests, top: (media_type, body)}, blobs, frozenset(absent), streams
    )


def _describe(media_type: str, data: bytes | Stream) -> Document:
    if isinstance(data, Stream):
        return {"mediaType": media_type, "digest": data.digest(), "size": data.size}
    return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}


def _diff_id(layer: bytes | Stream) -> str:
    """Return the digest of a layer's tar archive, or of its bytes if they are not gzip."""
    if isinstance(layer, Stream):
        return layer.digest()
    try:
        return digest_of(zlib.decompress(layer, 31))
    except zlib.error:
        return digest_of(layer)


def _platform(child: Image) -> Document | None:
    """Return the platform in an image's config, or None."""
    config = child.document.get("config")
    if not config or config["digest"] not in child.blobs:
        return None
    try:
        settings = json.loads(child.blobs[config["digest"]])
    except ValueError:
        return None
    fields = ("architecture", "os", "os.version", "os.features", "variant")
    return {key: settings[key] for key in fields if settings.get(key)} or None


def _decorate(
    document: Document,
    subject: Image | None,
    annotations: Mapping[str, str] | None,
    extra: Mapping[str, Any] | None,
) -> None:
    if subject is not None:
        document["subject"] = subject.descriptor()
    if annotations:
        document["annotations"] = dict(annotations)
    document.update(extra or {})


def _by_digest(blobs: Iterable[bytes]) -> dict[str, bytes]:
    return {digest_of(data): data for data in blobs}


def single(
    body: bytes, media_type: str, blobs: Mapping[str, bytes], absent: Iterable[str] = ()
) -> Image:
    """Return the graph of one manifest, with its blobs by digest and the digests of absent ones."""
    digest = digest_of(body)
    return Image(digest, media_type, {digest: (media_type, body)}, blobs, frozenset(absent))
