"""What the far side of a layout holds already, so that the layout is made without it.

Owns: the reading of receipts, and of the layouts that were carried there before.
May not know: what is copied, what is left out in the end.
Invariants: what cannot be read is an error: a layout that is made without what the far side lacks
    is found out too late.
Follows: docs/design.md section 13 ("Thin").
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from _regsync.errors import ConfigError, SyncError
from _regsync.files import open_safely
from _regsync.layout.directory import Layout
from _regsync.layout.index import LARGEST_INDEX, Entry, read_receipt
from _regsync.oci.manifest import Manifest, parse_manifest
from _regsync.text import printable

_MANIFEST_LIMIT = 4 * 1024 * 1024


def read_assumed(paths: Iterable[str], log: Callable[..., None]) -> dict[str, str]:
    """Return a repository for each digest that receipts and layouts name; ConfigError where one of
    them cannot be read.
    """
    repositories = dict[str, str]()
    for path in paths:
        try:
            if os.path.isdir(path):
                held = _held_by(Layout(path, log))
            else:
                held = _read_receipt(path)
        except OSError as error:
            why = printable(error.strerror or str(error))
            raise ConfigError(f"assume: {printable(path)} cannot be read: {why}") from error
        except SyncError as error:
            raise ConfigError(f"assume: {printable(path)}: {error.message}") from error
        for digest, repository in held.items():
            repositories.setdefault(digest, repository)
    return repositories


def _read_receipt(path: str) -> dict[str, str]:
    with open(path, "rb", opener=open_safely) as stream:
        text = stream.read(LARGEST_INDEX + 1)
    if len(text) > LARGEST_INDEX:
        raise ConfigError(f"assume: {printable(path)} has more than {LARGEST_INDEX} bytes")
    return read_receipt(text.decode("utf-8", "replace"))


def _held_by(layout: Layout) -> dict[str, str]:
    """Return the blobs of a layout, with those that were left out of it."""
    index = layout.index()
    repositories = dict(index.left_out)
    # By digest of a manifest; artifacts have the repository of what they refer to.
    homes = {entry.descriptor.digest: entry.repository for entry in index if entry.repository}
    for entry in sorted(index, key=lambda entry: bool(entry.subject)):
        home = entry.repository or homes.get(entry.subject)
        if home is None:
            continue
        homes.setdefault(entry.descriptor.digest, home)
        for manifest in _manifests_below(layout, entry):
            for blob in manifest.blobs:
                if layout.size_of(blob.digest) == blob.size:
                    repositories.setdefault(blob.digest, home)
    return repositories


def _manifests_below(layout: Layout, entry: Entry) -> list[Manifest]:
    """Return the manifests of an image that are there, at any depth."""
    manifests = list[Manifest]()
    pending = [entry.descriptor]
    seen = {entry.descriptor.digest}
    for descriptor in pending:  # the list grows by the children of each index
        body = layout.read(descriptor.digest, _MANIFEST_LIMIT)
        if body is None:
            continue
        manifest = parse_manifest(body, content_type=None, expected=descriptor)
        manifests.append(manifest)
        pending += [child for child in manifest.children if child.digest not in seen]
        seen.update(child.digest for child in manifest.children)
    return manifests
