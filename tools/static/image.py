"""The image: the static executables for both architectures, FROM scratch, in OCI's image layout as a tar.

    layer 1    etc/passwd, etc/group, etc/ssl/cert.pem, tmp/, home/    the same for both
    layer 2    usr/bin/regsync

It runs as user 65532. SSL_CERT_FILE is not set: whoever mounts another bundle over /etc/ssl/cert.pem or
sets the variable is understood.

Owns: what is in the image, how its layout is written.
May not know: how executables are made.
Invariants: the same executables give the same bytes.
Follows: the OCI image specification 1.1 (image-layout.md, config.md, layer.md).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.build_zipapp import LICENCE, Wheel, fetch, our_version
from tools.static.program import PACKER, run_in

__all__ = ["CERTIFICATES", "write_image"]

# Mozilla's certificate authorities, as a package that everybody can compare.
CERTIFICATES = Wheel(
    "certifi",
    "2026.10.18",
    "certifi-2026.10.18-py3-none-any.whl",
    "73191c47aaa79da394e8fee2dbc2ec827432cab56311122c9e47abf79e390f62",
    "MPL-2.0",
)

USER = 65532
USERS = f"nonroot:x:{USER}:{USER}:nonroot:/home:/sbin/nologin\n".encode()
GROUPS = f"nonroot:x:{USER}:\n".encode()
GO_NAMES = {"x86_64": "amd64", "aarch64": "arm64"}  # as platforms of images are named

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"

EPOCH = "1980-01-01T00:00:00Z"

Descriptor = dict[str, object]


@dataclass(frozen=True)
class Entry:
    """One file of a layer, a directory where there is no data."""

    path: str
    mode: int
    data: bytes | None = None


@dataclass(frozen=True)
class Layer:
    """A layer that is in the layout, and its digest without compression."""

    descriptor: Descriptor
    diff_id: str


class Blobs:
    """The blobs of a layout; a runtime compresses the layers (program.py)."""

    def __init__(self, runtime: Path) -> None:
        self.runtime = runtime
        self.by_digest: dict[str, bytes] = {}

    def add(self, media_type: str, data: bytes) -> Descriptor:
        """Keep a blob and return its descriptor."""
        digest = digest_of(data)
        self.by_digest[digest] = data
        return {"mediaType": media_type, "digest": digest, "size": len(data)}

    def add_document(self, media_type: str, document: Mapping[str, object]) -> Descriptor:
        """Keep a JSON document and return its descriptor."""
        return self.add(media_type, as_json(document))

    def add_layer(self, entries: Sequence[Entry]) -> Layer:
        """Pack a layer, keep it, and return what the configuration and the manifest name of it."""
        unpacked = tar_of(entries)
        packed = run_in(self.runtime, PACKER, unpacked)
        return Layer(self.add(LAYER, packed), digest_of(unpacked))


def write_image(path: Path, executables: Mapping[str, Path], runtime: Path, cache: str) -> Path:
    """Write the image of the executables, given by architecture; return `path`.

    `runtime` can be run here. `cache` has the wheel of certificate authorities, or gets it.
    """
    with zipfile.ZipFile(fetch(CERTIFICATES, cache)) as wheel:
        authorities = wheel.read("certifi/cacert.pem")

    blobs = Blobs(runtime)
    base = blobs.add_layer(
        [
            Entry("etc/", 0o755),
            Entry("etc/group", 0o644, GROUPS),
            Entry("etc/passwd", 0o644, USERS),
            Entry("etc/ssl/", 0o755),
            Entry("etc/ssl/cert.pem", 0o644, authorities),
            Entry("home/", 0o755),
            Entry("tmp/", 0o1777),
        ]
    )
    manifests = [
        add_platform(blobs, GO_NAMES[arch], base, executable.read_bytes())
        for arch, executable in executables.items()
    ]
    index = blobs.add_document(
        INDEX, {"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}
    )
    index["annotations"] = {"org.opencontainers.image.ref.name": our_version()}

    files = [
        Entry("oci-layout", 0o644, as_json({"imageLayoutVersion": "1.0.0"})),
        Entry("index.json", 0o644, as_json({"schemaVersion": 2, "manifests": [index]})),
        Entry("blobs/", 0o755),
        Entry("blobs/sha256/", 0o755),
    ]
    for digest, data in sorted(blobs.by_digest.items()):
        files.append(Entry(f"blobs/{digest.replace(':', '/')}", 0o644, data))
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_bytes(tar_of(files))
    os.replace(unfinished, path)
    return path


def add_platform(blobs: Blobs, architecture: str, base: Layer, executable: bytes) -> Descriptor:
    """Add the image of one platform and return the descriptor of its manifest."""
    own = blobs.add_layer(
        [
            Entry("usr/", 0o755),
            Entry("usr/bin/", 0o755),
            Entry("usr/bin/regsync", 0o755, executable),
        ]
    )
    layers = [base, own]
    config = {
        "created": EPOCH,
        "architecture": architecture,
        "os": "linux",
        "config": {
            "User": f"{USER}:{USER}",
            "Env": ["PATH=/usr/bin", "HOME=/home"],
            "Entrypoint": ["/usr/bin/regsync"],
            "Labels": {
                "org.opencontainers.image.title": "regsync",
                "org.opencontainers.image.version": our_version(),
                "org.opencontainers.image.licenses": LICENCE,
            },
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": [
            {"created": EPOCH, "created_by": "users, certificate authorities"},
            {"created": EPOCH, "created_by": "regsync"},
        ],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": blobs.add_document(CONFIG, config),
        "layers": [layer.descriptor for layer in layers],
    }
    described = blobs.add_document(MANIFEST, manifest)
    described["platform"] = {"architecture": architecture, "os": "linux"}
    return described


def tar_of(entries: Sequence[Entry]) -> bytes:
    """Return a tar with root's files and no times."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for entry in entries:
            info = tarfile.TarInfo(entry.path)
            info.mode = entry.mode
            if entry.data is None:
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            else:
                info.size = len(entry.data)
                tar.addfile(info, io.BytesIO(entry.data))
    return buffer.getvalue()


def digest_of(data: bytes) -> str:
    """Return the digest by which a blob is named."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def as_json(document: Mapping[str, object]) -> bytes:
    """Write a document with nothing that could differ."""
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()
