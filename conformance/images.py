"""Seeded images, indexes and artifacts, fleets of images that share layers, blobs of any length.

Invariants: equal seeds and calls give equal bytes, in every run and with every version of Python.
So nothing uses `random` or zlib's compressor, whose output differs between versions. Two fleets
that differ only in `left_out` or `moved` have all other tags in common, byte for byte, so that one
can be an older state of the other.
Follows: the OCI image specification 1.1 and docs/protocol-facts.md sections 1.3 to 1.6.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import struct
import tarfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .messages import Content, digest_of
from .storage import DOCKER_LIST, DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST

if TYPE_CHECKING:
    from .registry import App

__all__ = [
    "EMPTY",
    "EMPTY_CONFIG",
    "EMPTY_TYPE",
    "LARGE",
    "OCI_INDEX",
    "PLATFORMS",
    "TYPES",
    "Fleet",
    "Image",
    "Part",
    "Seed",
    "Stream",
    "assemble",
    "compose",
    "compose_index",
    "encode",
    "without_none",
]

Format = Literal["oci", "docker"]
Spacing = Literal["plain", "indent", "odd"]
Document = dict[str, Any]

EMPTY_CONFIG = b"{}"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
# Media types, by format and by kind of content.
TYPES: Mapping[Format, Mapping[str, str]] = {
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
COMMON = ("linux/amd64", "linux/arm64/v8", "linux/arm/v7", "linux/arm/v6")  # of an index
PLATFORMS = ("linux/amd64", "linux/arm64/v8", "linux/arm/v7", "linux/s390x")  # of a fleet
LARGE = 4 << 20  # bytes; a layer of at least this size is better a Stream than bytes

_PIECE = 1 << 20  # bytes of a Stream that begin with a stamp
_STAMP = 32  # bytes of a stamp


# Blobs.


class Stream(Content):
    """`size` seeded bytes that are generated when they are read, and need almost no memory.

    The bytes depend only on seed, number and size. Each piece is a stamp and a view of bytes that
    all pieces share. The stamps differ, so that a missing, repeated or exchanged piece changes the
    digest.
    """

    def __init__(self, seed: int, number: int, size: int) -> None:
        super().__init__()
        self.size = size
        self._seed = seed
        self._number = number
        self._digests: dict[str, str] = {}

    def feed(self, data: bytes) -> None:
        """Raise TypeError, because a stream does not change."""
        raise TypeError("nothing can be put into a Stream")

    def digest(self, algorithm: str = "sha256") -> str:
        """Return the digest. The stream is generated and hashed once for each algorithm."""
        if algorithm not in self._digests:
            hasher = hashlib.new(algorithm)
            for piece in self.pieces():
                hasher.update(piece)
            self._digests[algorithm] = f"{algorithm}:{hasher.hexdigest()}"
        return self._digests[algorithm]

    def pieces(self, start: int = 0, stop: int | None = None) -> list[memoryview]:
        """Return views of the bytes from `start` to `stop`. They take about 600 bytes a MiB."""
        stop = self.size if stop is None else min(stop, self.size)
        filling = memoryview(_filling(self._seed))
        views: list[memoryview] = []
        for piece_start in range(start - start % _PIECE, stop, _PIECE):
            stamp = hashlib.sha256(b"%d/%d/%d" % (self._seed, self._number, piece_start)).digest()
            parts = ((piece_start, memoryview(stamp)), (piece_start + _STAMP, filling))
            for part_start, part in parts:
                view = part[max(start - part_start, 0) : max(stop - part_start, 0)]
                if view:
                    views.append(view)
        return views


@functools.lru_cache(maxsize=4)
def _filling(seed: int) -> bytes:
    """Return the bytes behind each stamp in all streams of a seed."""
    return hashlib.shake_128(b"stream %d" % seed).digest(_PIECE - _STAMP)


class Part(NamedTuple):
    """A blob of a manifest, with its descriptor."""

    media_type: str
    data: bytes | Stream
    more: Mapping[str, Any] = {}  # fields of the descriptor, which replace the right ones
    algorithm: str = "sha256"
    held: bool = True  # False: the manifest names the blob, but no registry has it

    @property
    def digest(self) -> str:
        if isinstance(self.data, Stream):
            return self.data.digest(self.algorithm)
        return digest_of(self.data, self.algorithm)

    def descriptor(self) -> Document:
        """Return the descriptor of the blob. It is wrong if `more` replaces right fields."""
        size = self.data.size if isinstance(self.data, Stream) else len(self.data)
        described = {"mediaType": self.media_type, "digest": self.digest, "size": size}
        return without_none({**described, **self.more})

    def inlined(self) -> Part:
        """Return this part with its bytes in its descriptor's `data` too."""
        data = base64.b64encode(bytes(self.data)).decode()
        return self._replace(more={**self.more, "data": data})


EMPTY = Part(EMPTY_TYPE, EMPTY_CONFIG).inlined()


# Graphs.


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
        manifests = {**others, digest: (media_type, body)}
        return replace(self, top=digest, media_type=media_type, manifests=manifests)


def encode(document: Document, spacing: Spacing = "plain") -> bytes:
    """Encode a document as JSON in one of the forms that occur in registries."""
    if spacing == "plain":
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text = json.dumps(document, indent=3, ensure_ascii=False)
    if spacing == "odd":
        text = "\r\n" + text.replace(": ", " :\t").replace("/", "\\/") + "\n \n"
    return text.encode()


def without_none(document: Mapping[str, Any]) -> Document:
    """Return a document without the fields that are None."""
    return {key: value for key, value in document.items() if value is not None}


def assemble(
    body: bytes, media_type: str, parts: Iterable[Part] = (), children: Iterable[Image] = ()
) -> Image:
    """Return the graph of a manifest, which names blobs or other manifests."""
    top = digest_of(body)
    manifests: dict[str, tuple[str, bytes]] = {}
    blobs: dict[str, bytes] = {}
    streams: dict[str, Stream] = {}
    absent: set[str] = set()
    for part in parts:
        if not part.held:
            absent.add(part.digest)
        elif isinstance(part.data, Stream):
            streams[part.digest] = part.data
        else:
            blobs[part.digest] = part.data
    for child in children:
        manifests.update(child.manifests)
        blobs.update(child.blobs)
        streams.update(child.streams)
        absent |= child.absent

    manifests[top] = (media_type, body)
    return Image(top, media_type, manifests, blobs, frozenset(absent), streams)


def compose(
    config: Part,
    layers: Sequence[Part],
    media_type: str = OCI_MANIFEST,
    *,
    spacing: Spacing = "plain",
    **fields: Any,
) -> Image:
    """Build a manifest of any parts. `fields` replace its fields. None removes a field."""
    document = {
        "schemaVersion": 2,
        "mediaType": media_type,
        "artifactType": None,
        "config": config.descriptor(),
        "layers": [layer.descriptor() for layer in layers],
        **fields,
    }
    body = encode(without_none(document), spacing)
    return assemble(body, media_type, parts=[config, *layers])


def compose_index(
    entries: Sequence[tuple[Image, Mapping[str, Any]]],
    media_type: str = OCI_INDEX,
    *,
    spacing: Spacing = "plain",
    **fields: Any,
) -> Image:
    """Build an index of children. `fields` replace its fields. None removes a field.

    The fields beside a child replace fields of its entry in the same way.
    """
    document = {
        "schemaVersion": 2,
        "mediaType": media_type,
        "artifactType": None,
        "manifests": [without_none(child.descriptor(**more)) for child, more in entries],
        **fields,
    }
    body = encode(without_none(document), spacing)
    return assemble(body, media_type, children=[child for child, _ in entries])


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
        member = tarfile.TarInfo(f"file-{self._drawn}")
        member.size = size
        padding = bytes(-size % tarfile.BLOCKSIZE + 2 * tarfile.BLOCKSIZE)
        return _gzip(member.tobuf(tarfile.USTAR_FORMAT) + self.blob(size) + padding)

    def image(
        self,
        *,
        format: Format = "oci",
        layers: Sequence[bytes | Stream] | None = None,
        sizes: Sequence[int] = (900, 2000),
        os: str = "linux",
        architecture: str = "amd64",
        variant: str | None = None,
        foreign: Sequence[str] = (),
        inline_config: bool = False,
        subject: Image | None = None,
        annotations: Mapping[str, str] | None = None,
        spacing: Spacing = "plain",
    ) -> Image:
        """Build an image manifest.

        `layers` has the bytes or streams of the layers. Without it, a new layer is made for each of
        `sizes`. `foreign` adds a non-distributable layer for each URL. `inline_config` adds the
        config to its descriptor as `data`.
        """
        types = TYPES[format]
        if layers is None:
            layers = [self.layer(size) for size in sizes]

        settings = {
            "created": "1970-01-01T00:00:00Z",
            "architecture": architecture,
            "os": os,
            "config": {"Labels": {"seed": f"{self._number}/{self._drawn}"}},
            "rootfs": {"type": "layers", "diff_ids": [_diff_id(layer) for layer in layers]},
            "history": [
                {"created": "1970-01-01T00:00:00Z", "created_by": f"layer {n}"}
                for n in range(len(layers))
            ],
            "variant": variant,
        }
        config = Part(types["config"], encode(without_none(settings)))
        if inline_config:
            config = config.inlined()
        parts = [Part(types["layer"], layer) for layer in layers]
        parts += [
            Part(types["foreign"], self.blob(300), {"urls": [url]}, held=False) for url in foreign
        ]
        about = _about(subject, annotations)
        return compose(config, parts, types["manifest"], spacing=spacing, **about)

    def platform_image(
        self,
        platform: str,
        *,
        format: Format = "oci",
        layers: Sequence[bytes | Stream] | None = None,
    ) -> Image:
        """Build an image for a platform, as in `linux/arm64/v8`, with two new layers or `layers`."""
        os, architecture, *variant = platform.split("/")
        return self.image(
            format=format,
            layers=layers,
            sizes=(500, 700),
            os=os,
            architecture=architecture,
            variant=variant[0] if variant else None,
        )

    def artifact(
        self,
        subject: Image | None = None,
        artifact_type: str | None = "application/vnd.example.sbom.v1",
        *,
        size: int = 400,
        config_type: str | None = None,
        annotations: Mapping[str, str] | None = None,
        spacing: Spacing = "plain",
    ) -> Image:
        """Build an artifact manifest.

        `config_type` sets the config's type, as in OCI 1.0 artifacts.
        """
        layer = Part("application/octet-stream", self.blob(size))
        config = EMPTY if config_type is None else Part(config_type, self.blob(20))
        about = _about(subject, annotations)
        return compose(config, [layer], spacing=spacing, artifactType=artifact_type, **about)

    def index(
        self,
        children: Sequence[Image] | None = None,
        *,
        format: Format = "oci",
        platforms: Iterable[str] = COMMON,
        attestations: bool = False,
        subject: Image | None = None,
        artifact_type: str | None = None,
        annotations: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
        spacing: Spacing = "plain",
        with_platforms: bool = True,
    ) -> Image:
        """Build an index of `children`, or without them of a new image for each platform.

        Children may be images or indexes. `attestations` adds an entry for each image as buildkit
        does: platform unknown/unknown with the annotation `vnd.docker.reference.digest`. `extra`
        adds fields that are not in the specification.
        """
        if children is None:
            children = [self.platform_image(platform, format=format) for platform in platforms]

        entries: list[tuple[Image, Mapping[str, Any]]] = [
            (child, {"platform": _platform(child) if with_platforms else None})
            for child in children
        ]
        for child in children if attestations else ():
            notes = {
                "vnd.docker.reference.digest": child.top,
                "vnd.docker.reference.type": "attestation-manifest",
            }
            unknown = {"architecture": "unknown", "os": "unknown"}
            entries.append((_attestation(child), {"annotations": notes, "platform": unknown}))

        fields = {"artifactType": artifact_type, **_about(subject, annotations), **(extra or {})}
        return compose_index(entries, TYPES[format]["index"], spacing=spacing, **fields)

    def fallback_index(self, referrers: Iterable[Image]) -> Image:
        """Build the index under a fallback tag (docs/protocol-facts.md section 1.10)."""
        entries = []
        for referrer in referrers:
            document = referrer.document
            kind = document.get("artifactType") or document.get("config", {}).get("mediaType")
            more = {"artifactType": kind or None, "annotations": document.get("annotations")}
            entries.append(without_none(referrer.descriptor(**more)))
        return compose_index([], manifests=entries)


def _gzip(data: bytes) -> bytes:
    """Return a gzip member with `data` in stored blocks and without a time."""
    out = bytearray(b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff")
    for start in range(0, len(data), 0xFFFF):
        block = data[start : start + 0xFFFF]
        last = start + len(block) == len(data)
        out += struct.pack("<BHH", last, len(block), len(block) ^ 0xFFFF) + block
    return bytes(out) + struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)


def _diff_id(layer: bytes | Stream) -> str:
    """Return the digest of a layer's tar archive, or of its bytes if they are not gzip."""
    if isinstance(layer, Stream):
        return layer.digest()
    try:
        return digest_of(zlib.decompress(layer, 31))
    except zlib.error:
        return digest_of(layer)


def _about(subject: Image | None, annotations: Mapping[str, str] | None) -> Document:
    """Return the last fields of a manifest."""
    return {
        "subject": subject.descriptor() if subject else None,
        "annotations": annotations or None,
    }


def _platform(child: Image) -> Document | None:
    """Return the platform in an image's config. None if this is no image, or lacks its config."""
    config = child.document.get("config", {})
    is_image = config.get("mediaType") in (TYPES["oci"]["config"], TYPES["docker"]["config"])
    if not is_image or config["digest"] not in child.blobs:
        return None
    settings = json.loads(child.blobs[config["digest"]])
    return {key: settings[key] for key in ("architecture", "os", "variant") if settings.get(key)}


def _attestation(child: Image) -> Image:
    """Build the manifest that buildkit attaches to an image inside an index."""
    config = {
        "architecture": "unknown",
        "os": "unknown",
        "rootfs": {"type": "layers"},
        "for": child.top,
    }
    statement = {"_type": "https://in-toto.io/Statement/v0.1", "subject": [child.top]}
    return compose(
        Part(TYPES["oci"]["config"], encode(config)),
        [Part("application/vnd.in-toto+json", encode(statement))],
    )


# Fleets.


@dataclass(frozen=True)
class Fleet:
    """Images in several repositories. Each image has layers of a base and layers of its own."""

    seed: int = 0
    repositories: int = 10
    tags: int = 10  # of each repository
    shared: int = 5  # number of layers of a base
    own: int = 3  # number of layers that an image does not share
    size: int = 2000  # bytes of a layer
    bases: int = 1  # number of bases; repository n is built on base n % bases
    # If not empty, each tag is an index with an image for each platform, and each platform has its
    # own bases.
    platforms: tuple[str, ...] = ()
    left_out: int = 0  # how many of the newest tags are missing
    # Percentage of tags that name another image, with the same base and other layers of its own.
    moved: int = 0

    def images(self) -> dict[str, dict[str, Image]]:
        """Return the images, by repository and tag."""
        places = [(repo, tag) for tag in range(self.tags) for repo in range(self.repositories)]
        moved_count = len(places) * self.moved // 100
        # Evenly distributed.
        moved = {places[number * len(places) // moved_count] for number in range(moved_count)}
        kinds = self.platforms or ("",)
        bases = [
            [self._layers(self._seed("base", base, kind), self.shared) for kind in kinds]
            for base in range(min(self.bases, self.repositories))
        ]
        images: dict[str, dict[str, Image]] = {
            f"fleet/app-{repo}": {} for repo in range(self.repositories)
        }
        for repo, tag in places[: len(places) - self.left_out]:
            seed = self._seed("own", repo, tag, int((repo, tag) in moved))
            children = [
                seed.platform_image(
                    kind or "linux/amd64", layers=[*base, *self._layers(seed, self.own)]
                )
                for kind, base in zip(kinds, bases[repo % self.bases], strict=True)
            ]
            image = seed.index(children) if self.platforms else children[0]
            images[f"fleet/app-{repo}"][f"1.{tag}.0"] = image
        return images

    def load_into(self, app: App) -> Fleet:
        """Store the fleet in a registry of the harness. Returns self."""
        for repository, tagged in self.images().items():
            for tag, image in tagged.items():
                image.load_into(app, repository, tag)
        return self

    def _seed(self, *parts: object) -> Seed:
        return Seed(zlib.crc32(repr((self.seed, *parts)).encode()))

    def _layers(self, seed: Seed, count: int) -> list[bytes]:
        return [seed.layer(self.size) for _ in range(count)]
