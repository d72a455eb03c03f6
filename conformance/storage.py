"""What a registry holds: manifests, and which of them are valid; blobs; tags; upload sessions.

HTTP is unknown here. Follows the OCI image specification 1.1 and docs/protocol-facts.md sections 1.3 to 1.7.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import Any

from .messages import Content, digest_of, is_digest

__all__ = [
    "DOCKER_LIST",
    "DOCKER_MANIFEST",
    "INDEXES",
    "MANIFEST_LIMIT",
    "OCI_INDEX",
    "OCI_MANIFEST",
    "Invalid",
    "Mislabelled",
    "Repository",
    "Stored",
    "Upload",
    "is_foreign",
    "read_manifest",
]

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
INDEXES = frozenset({OCI_INDEX, DOCKER_LIST})
_IMAGES = frozenset({OCI_MANIFEST, DOCKER_MANIFEST})

# Maximum size of a manifest in bytes, as at distribution, c/image and ACR (section 1.4).
MANIFEST_LIMIT = 4 << 20


class Invalid(Exception):
    """A document is not valid for its media type."""


class Mislabelled(Invalid):
    """A document's `mediaType` differs from the Content-Type of the request."""


def is_foreign(media_type: str) -> bool:
    """Report whether a media type is that of a foreign layer (section 1.6).

    Only the media type counts, never `urls`.
    """
    return ".nondistributable." in media_type or ".foreign." in media_type


@dataclass(frozen=True)
class Stored:
    """A manifest in the bytes in which it was put, with the descriptors that it contains."""

    media_type: str
    body: bytes
    digest: str
    document: Any = field(repr=False)  # the parsed JSON
    blobs: tuple[dict[str, Any], ...] = ()  # descriptors of config and layers
    children: tuple[dict[str, Any], ...] = ()  # descriptors of an index's manifests
    subject: str | None = None  # digest

    def descriptor(self) -> dict[str, Any]:
        """Return the descriptor of this manifest for a referrers list.

        Its `artifactType` is the manifest's, or else the media type of its config (section 1.10).
        """
        config = self.document.get("config")
        config_type = config.get("mediaType") if isinstance(config, dict) else None
        optional = {
            "artifactType": self.document.get("artifactType") or config_type,
            "annotations": self.document.get("annotations"),
        }
        return {
            "mediaType": self.media_type,
            "digest": self.digest,
            "size": len(self.body),
            **{name: value for name, value in optional.items() if value},
        }


def read_manifest(body: bytes, media_type: str, digest: str, *, any_type: bool = False) -> Stored:
    """Parse a manifest that was sent with a Content-Type of `media_type`.

    With `any_type`, unknown media types are accepted too. Raises Invalid if the manifest is not
    valid.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as problem:
        raise Invalid(f"not JSON: {problem}") from None

    if not isinstance(document, dict):
        raise Invalid("not a JSON object")
    if "mediaType" in document and document["mediaType"] != media_type:
        raise Mislabelled(f"mediaType is {document['mediaType']!r}, Content-Type is {media_type!r}")
    if media_type not in INDEXES | _IMAGES:
        if any_type:
            return Stored(media_type, body, digest, document)
        raise Invalid(f"media type {media_type!r} is not one of this registry's")
    if document.get("schemaVersion") != 2:
        raise Invalid("schemaVersion is not 2")
    if "mediaType" not in document and media_type in (DOCKER_LIST, DOCKER_MANIFEST):
        raise Invalid("a docker document has to carry its mediaType")
    # A client could take such a document for either one (CVE-2021-41190).
    if "manifests" in document and ("layers" in document or "config" in document):
        raise Invalid("both an index and a manifest")

    subject = None
    if document.get("subject") is not None:
        subject = _check_descriptor(document["subject"], "subject")["digest"]
    if media_type in INDEXES:
        children = _descriptors(document, "manifests")
        return Stored(media_type, body, digest, document, children=children, subject=subject)

    config = _check_descriptor(document.get("config"), "config")
    blobs = (config, *_descriptors(document, "layers"))
    return Stored(media_type, body, digest, document, blobs=blobs, subject=subject)


def _descriptors(document: dict[str, Any], key: str) -> tuple[dict[str, Any], ...]:
    values = document.get(key)
    if not isinstance(values, list):
        raise Invalid(f"{key} is not a list")
    return tuple(_check_descriptor(value, f"{key}[{i}]") for i, value in enumerate(values))


def _check_descriptor(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Invalid(f"{where} is not a descriptor")
    if not isinstance(value.get("mediaType"), str) or not value["mediaType"]:
        raise Invalid(f"{where} has no mediaType")
    digest = value.get("digest")
    if not isinstance(digest, str) or not is_digest(digest):
        raise Invalid(f"{where} has no valid digest")
    size = value.get("size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise Invalid(f"{where} has no valid size")

    if "data" in value:
        try:
            data = base64.b64decode(value["data"], validate=True)
        except (TypeError, ValueError):
            raise Invalid(f"{where} has data that is not base64") from None
        if len(data) != size or digest_of(data, digest.partition(":")[0]) != digest:
            raise Invalid(f"{where} has data that is not its content")
    return value


@dataclass
class Upload:
    """An upload session."""

    identity: str  # the last path segment of its Locations
    content: Content
    # Part of each Location. It increases with every answer, so that an old Location is detected.
    sequence: int = 0
    is_busy: bool = False  # whether a body is being received


@dataclass
class Repository:
    """The content of one repository."""

    manifests: dict[str, Stored] = field(default_factory=dict)  # by digest
    blobs: dict[str, Content] = field(default_factory=dict)  # by digest
    tags: dict[str, str] = field(default_factory=dict)  # digests, by tag
    uploads: dict[str, Upload] = field(default_factory=dict)  # open sessions, by identity
    # Whether a manifest has ever been put. Without one, `tags/list` answers 404.
    is_founded: bool = False

    def find(self, reference: str) -> Stored | None:
        """Return the manifest with this tag or digest, or None."""
        return self.manifests.get(reference if ":" in reference else self.tags.get(reference, ""))

    def size_of(self, digest: str) -> int | None:
        """Return the size of the manifest or blob with this digest, or None if it is absent."""
        manifest = self.manifests.get(digest)
        return self.size_of_blob(digest) if manifest is None else len(manifest.body)

    def size_of_blob(self, digest: str) -> int | None:
        """Return the size of the blob with this digest, or None if it is absent."""
        blob = self.blobs.get(digest)
        return None if blob is None else blob.size

    def naming(self, blob: str) -> list[str]:
        """Return the digests of the manifests that name a blob."""
        return [
            digest
            for digest, manifest in self.manifests.items()
            if any(part["digest"] == blob for part in manifest.blobs)
        ]

    def referrers(self, subject: str) -> list[Stored]:
        """Return the manifests with this subject, sorted by digest."""
        return [m for _, m in sorted(self.manifests.items()) if m.subject == subject]
