"""Read which blobs the far side, to which a layout will be carried, already holds.

Owns: how receipts are read, and layouts that were carried to the far side before.
May not know: which images are copied, which of these blobs are left out of the layout.
Invariants: an input that cannot be read is an error. If a blob were left out by mistake, that would
    be noticed only at the far side, where the blob cannot be obtained.
Follows: docs/design.md section 13 ("Thin").
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from _regsync.errors import ConfigError, SyncError
from _regsync.files import open_safely
from _regsync.layout.directory import Layout
from _regsync.layout.index import LARGEST_INDEX, Entry, read_lines
from _regsync.oci.manifest import Manifest, parse_manifest
from _regsync.oci.reference import LAYOUT_SCHEME, begins_with_host, split_full_name
from _regsync.text import printable, reason_of


def read_assumed(paths: Iterable[str], log: Callable[..., None]) -> dict[str, str]:
    """Read the blobs that receipts and layouts name. Returns a repository for each digest.

    Each path leads to a receipt or to the directory of a layout. If two paths name a digest, the
    repository is from the first path. Raises ConfigError if a path cannot be read.
    """
    repositories = dict[str, str]()
    for path in paths:
        try:
            if os.path.isdir(path):
                assumed = _repository_by_blob(Layout(path, log))
            else:
                assumed = _read_receipt_file(path)
        except OSError as error:
            why = reason_of(error)
            raise ConfigError(f"assume: {printable(path)} cannot be read: {why}") from error
        except SyncError as error:
            raise ConfigError(f"assume: {printable(path)}: {error.message}") from error
        repositories = {**assumed, **repositories}
    return repositories


def _read_receipt_file(path: str) -> dict[str, str]:
    with open(path, "rb", opener=open_safely) as stream:
        text = stream.read(LARGEST_INDEX + 1)
    if len(text) > LARGEST_INDEX:
        raise ConfigError(f"assume: {printable(path)} has more than {LARGEST_INDEX} bytes")
    return read_receipt(text.decode("utf-8", "replace"))


def read_receipt(text: str) -> dict[str, str]:
    """Parse the lines of a receipt. Returns the repository of each digest.

    A line is `DIGEST HOST/REPO`, as an audit writes it, or `DIGEST REPO`. The host is removed,
    because the registry may have another name at the far side. Raises ContentError, which names the
    line, if a line is invalid.
    """
    return read_lines(text, _without_host)


def _without_host(name: str) -> str:
    """Return the repository in `HOST/REPO`, `oci-layout:PATH//REPO` or `REPO`."""
    if not (name.startswith(f"{LAYOUT_SCHEME}:") or begins_with_host(name)):
        return name
    _, repository = split_full_name(name)
    return repository


def _repository_by_blob(layout: Layout) -> dict[str, str]:
    """Return a repository for each blob of a layout, and for each blob that was left out of it.

    Blobs of entries whose repository is unknown are omitted.
    """
    index = layout.index()
    by_blob = dict(index.left_out)
    # The repositories of images, and then of artifacts, which have the repository of their subject.
    by_manifest = {entry.descriptor.digest: entry.repository for entry in index if entry.repository}
    artifacts_last = sorted(index, key=lambda entry: bool(entry.subject))
    for entry in artifacts_last:
        repository = entry.repository or by_manifest.get(entry.subject)
        if repository is None:
            continue
        by_manifest.setdefault(entry.descriptor.digest, repository)
        for manifest in _manifests_below(layout, entry):
            for blob in manifest.blobs:
                if layout.size_of(blob.digest) == blob.size:
                    by_blob.setdefault(blob.digest, repository)
    return by_blob


def _manifests_below(layout: Layout, entry: Entry) -> list[Manifest]:
    """Return the manifest of an entry and all nested manifests, except those not in the layout."""
    manifests = list[Manifest]()
    pending = [entry.descriptor]
    seen = {entry.descriptor.digest}  # the digests in `pending`
    for descriptor in pending:  # the list grows by the children of each index
        body = layout.read_manifest(descriptor.digest)
        if body is None:
            continue
        manifest = parse_manifest(body, content_type=None, expected=descriptor)
        manifests.append(manifest)
        pending += [child for child in manifest.children if child.digest not in seen]
        seen.update(child.digest for child in manifest.children)
    return manifests
