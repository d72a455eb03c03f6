"""Moved to `conformance/manifests.py` and `conformance/registry`."""

from ..manifests import (
    DOCKER_LIST,
    DOCKER_MANIFEST,
    INDEXES,
    MANIFEST_LIMIT,
    OCI_INDEX,
    OCI_MANIFEST,
    Invalid,
    Stored,
    is_foreign,
    read_manifest,
)
from . import Repository, Upload

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
