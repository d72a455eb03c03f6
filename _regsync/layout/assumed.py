"""Read which blobs the far side, to which a layout will be carried, already holds.

Owns: how receipts are read.
May not know: which images are copied, which of these blobs are left out of the layout.
Invariants: an input that cannot be read is an error. If a blob were left out by mistake, that would
    be noticed only at the far side, where the blob cannot be obtained.
Follows: docs/design.md section 13 ("Thin").
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from _regsync.errors import ConfigError, SyncError
from _regsync.files import open_safely
from _regsync.layout.index import LARGEST_INDEX, read_lines
from _regsync.oci import LAYOUT_SCHEME, begins_with_host, split_full_name
from _regsync.text import printable, reason_of


def read_assumed(paths: Iterable[str]) -> dict[str, str]:
    """Read the blobs that receipts name. Returns a repository for each digest.

    If two receipts name a digest, the repository is from the first one. Raises ConfigError if a
    receipt cannot be read.
    """
    repositories = dict[str, str]()
    for path in paths:
        if os.path.isdir(path):
            raise ConfigError(
                f"assume: {printable(path)} is a directory, not a receipt",
                hint="make a receipt of it where it is a target: `regsync audit --receipt FILE`; name FILE here",
            )
        try:
            receipt = _read_receipt_file(path)
        except OSError as error:
            why = reason_of(error)
            raise ConfigError(f"assume: {printable(path)} cannot be read: {why}") from error
        except SyncError as error:
            raise ConfigError(f"assume: {printable(path)}: {error.message}") from error
        repositories = {**receipt, **repositories}
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
