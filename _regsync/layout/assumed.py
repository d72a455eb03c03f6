"""What the far side of a layout holds already, so that the layout is made without it.

Owns: the reading of receipts, and of the layouts that were carried there before.
May not know: what is copied, what is left out in the end.
Invariants: what cannot be read is an error. A layout that leaves out a blob which the far side lacks
    is found out there, where nobody can mend it.
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
from _regsync.oci.reference import LAYOUT_SCHEME
from _regsync.text import printable, reason_of

_MANIFEST_LIMIT = 4 * 1024 * 1024


def read_assumed(paths: Iterable[str], log: Callable[..., None]) -> dict[str, str]:
    """Read receipts, and directories with layouts. Return the digests that they name, each with a
    repository that holds it; ConfigError where one of the paths cannot be read.
    """
    repositories = dict[str, str]()
    for path in paths:
        try:
            if os.path.isdir(path):
                held = _blobs_of(Layout(path, log))
            else:
                held = _read_receipt_file(path)
        except OSError as error:
            why = reason_of(error)
            raise ConfigError(f"assume: {printable(path)} cannot be read: {why}") from error
        except SyncError as error:
            raise ConfigError(f"assume: {printable(path)}: {error.message}") from error
        # Of two paths that name a digest the first one counts.
        repositories = {**held, **repositories}
    return repositories


def _read_receipt_file(path: str) -> dict[str, str]:
    with open(path, "rb", opener=open_safely) as stream:
        text = stream.read(LARGEST_INDEX + 1)
    if len(text) > LARGEST_INDEX:
        raise ConfigError(f"assume: {printable(path)} has more than {LARGEST_INDEX} bytes")
    return read_receipt(text.decode("utf-8", "replace"))


def read_receipt(text: str) -> dict[str, str]:
    """Read lines `DIGEST HOST/REPO`, as an audit writes them, or `DIGEST REPO`; return the repository
    of each digest. ContentError names a line that is neither.

    The host is dropped, because it may have another name where the layout is read.
    """
    return read_lines(text, _without_host)


def _without_host(place: str) -> str:
    """Return the repository of `HOST/REPO`, `oci-layout:PATH//REPO` or `REPO`."""
    if place.startswith(f"{LAYOUT_SCHEME}:"):
        return place.rpartition("//")[2]
    first, slash, rest = place.partition("/")
    is_host = slash and ("." in first or ":" in first or first == "localhost")
    return rest if is_host else place


def _blobs_of(layout: Layout) -> dict[str, str]:
    """Return the blobs that the far side holds by a layout which was carried there, each with a
    repository: those of its images and artifacts, and those that were left out of it.
    """
    index = layout.index()
    repositories = dict(index.left_out)
    # By digest of an image or artifact.
    repository_of = {
        entry.descriptor.digest: entry.repository for entry in index if entry.repository
    }
    # An artifact is in the repository of its subject, so subjects come first.
    for entry in sorted(index, key=lambda entry: bool(entry.subject)):
        repository = entry.repository or repository_of.get(entry.subject)
        if repository is None:
            continue
        repository_of.setdefault(entry.descriptor.digest, repository)
        for manifest in _manifests_below(layout, entry):
            for blob in manifest.blobs:
                if layout.size_of(blob.digest) == blob.size:
                    repositories.setdefault(blob.digest, repository)
    return repositories


def _manifests_below(layout: Layout, entry: Entry) -> list[Manifest]:
    """Return the manifests of an entry that are in the layout: its own, and at any depth below."""
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
