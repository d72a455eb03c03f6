"""Moved to `conformance/storage.py`."""

from ..storage import (
    DOCKER_LIST,
    DOCKER_MANIFEST,
    INDEXES,
    MANIFEST_LIMIT,
    OCI_INDEX,
    OCI_MANIFEST,
    Invalid,
    Repository,
    Stored,
    Upload,
    is_foreign,
    read_manifest,
)

__all__ = [
    "DOCKER_LIST",
    "DOCKER_MANIFEST",
    "INDEXES",
    "MANIFEST_LIMIT",
    "OCI_INDEX",
    "OCI_MANIFEST",
    "Invalid",
    "Repository",
    "Stored",
    "Upload",
    "is_foreign",
    "read_manifest",
]
