"""Read and replace the `index.json` of an image layout on a disk.

Owns: the files `oci-layout`, `index.json` and `index.json.old`.
May not know: blobs, registries, which images are copied.
Invariants: only regular files of a limited size are read, never links. At any moment one of
    `index.json` and `index.json.old` is complete.
Follows: OCI image-spec 1.1 image-layout.md, docs/design.md section 13.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from io import FileIO

from _regsync.errors import ContentError
from _regsync.files import Stamp, open_safely, stamp_of
from _regsync.layout.disk import (
    LayoutError,
    disk_errors,
    lstat_or_none,
    replace_file,
    supports_hard_links,
)
from _regsync.layout.index import LARGEST_INDEX, Index, parse_index
from _regsync.oci.manifest import load_json
from _regsync.text import printable

_VERSION_FILE = "oci-layout"
_INDEX_FILE = "index.json"
_OLD_INDEX_FILE = "index.json.old"

_VERSION = b'{"imageLayoutVersion":"1.0.0"}\n'
_LARGEST_VERSION_FILE = 64 * 1024  # bytes

# The hint for a damaged layout.
_COPY_AGAIN = "copy the layout again, or name another directory"


class SavedIndex:
    """The `index.json` of a layout, and `oci-layout`, which marks a directory as a layout."""

    def __init__(self, path: str, log: Callable[..., None]) -> None:
        self._path = path  # of the layout's directory
        self._display_path = printable(path)
        self._log = log
        # The entries of `index.json`, with additions since. None until it has been read.
        self._index: Index | None = None
        # The stamp of the file when it was read, which shows whether another process has replaced
        # it since. None if it has not been read or did not exist.
        self._stamp: Stamp | None = None
        # The bytes of the file when it was last read or written. Empty if it did not exist or was
        # damaged: then the next commit replaces it.
        self._bytes = b""
        # Whether the file system replaces files atomically. Set by `prepare_to_write`.
        self._replaces_atomically = True

    @property
    def size(self) -> int:
        """The bytes of the file when it was last read or written."""
        return len(self._bytes)

    def read(self, *, may_be_new: bool) -> Index:
        """Return the entries. The file is read by the first call.

        With `may_be_new` a directory without a layout counts as an empty layout. Raises LayoutError
        or ContentError if the layout cannot be read.
        """
        if self._index is None:
            self._stamp = self._present_stamp()
            self._index, self._bytes = self._read_index(may_be_new=may_be_new)
        return self._index

    def prepare_to_write(self, suffix: str) -> None:
        """Read the index and create `oci-layout`. The directory must have been locked.

        `suffix` is that of the names of partial files.
        """
        # Another process may have replaced `index.json` before this process locked the directory.
        # Earlier look-ups are then out of date, but at worst an image is copied again.
        if self._index is not None and self._stamp != self._present_stamp():
            self._index = None  # the next line reads it again
        self.read(may_be_new=True)

        version_path = os.path.join(self._path, _VERSION_FILE)
        if self._read_file(_VERSION_FILE, _LARGEST_VERSION_FILE) is None:
            replace_file(version_path, _VERSION, suffix)
        self._replaces_atomically = supports_hard_links(version_path)

    def replace(self, body: bytes, suffix: str) -> None:
        """Replace `index.json` unless it has these bytes already."""
        if body == self._bytes:
            return
        old_path = None
        if not self._replaces_atomically:
            old_path = os.path.join(self._path, _OLD_INDEX_FILE)
        replace_file(os.path.join(self._path, _INDEX_FILE), body, suffix, old_path=old_path)
        self._bytes = body

    def _read_index(self, *, may_be_new: bool) -> tuple[Index, bytes]:
        """Read `index.json`, or `index.json.old` if a commit was cut short. Also returns its bytes.

        If the directory has neither file, returns an empty index with `may_be_new` and raises
        LayoutError without. Also raises LayoutError if the directory has an index but is not marked
        as a layout, and ContentError if its index is damaged or its version is not supported.
        """
        version = self._read_file(_VERSION_FILE, _LARGEST_VERSION_FILE)
        body = self._read_file(_INDEX_FILE, LARGEST_INDEX)
        has_old_index = os.path.lexists(os.path.join(self._path, _OLD_INDEX_FILE))
        has_index = body is not None or has_old_index

        if version is not None:
            _check_version(version)
        if may_be_new and not has_index:
            # A new folder, or a layout whose first run was killed before its first commit.
            return Index(), b""
        if version is None:
            raise LayoutError(
                f"{self._display_path} is not an image layout: it has no file oci-layout",
                hint="check the path, and whether the disk is mounted",
            )
        if not has_index:
            raise LayoutError(
                f"{self._display_path} is an incomplete image layout: it has no index.json",
                hint=_COPY_AGAIN,
            )

        try:
            return self._parse_index(body, has_old_index=has_old_index)
        except ContentError as error:
            error.hint = _COPY_AGAIN
            raise

    def _parse_index(self, body: bytes | None, *, has_old_index: bool) -> tuple[Index, bytes]:
        """Parse `body`, the bytes of `index.json`.

        If the disk was removed during a commit, `index.json` may be missing (`body` is None) or
        damaged. Then `index.json.old` is parsed, with a warning, and b"" is returned for its bytes.
        """
        if body is not None:
            try:
                return parse_index(body), body
            except ContentError:
                if not has_old_index:
                    raise

        old_index = parse_index(self._read_file(_OLD_INDEX_FILE, LARGEST_INDEX) or b"")
        text = f"{self._display_path}: index.json cannot be read, index.json.old is used instead"
        self._log("warning", "layout_index", text)
        return old_index, b""

    def _read_file(self, name: str, limit: int) -> bytes | None:
        """Return the bytes of a file at the top of the layout. Returns None if it does not exist.

        Raises LayoutError if it is not a regular file, and ContentError if it has more than `limit`
        bytes.
        """
        path = os.path.join(self._path, name)
        with disk_errors(self._path):
            status = lstat_or_none(path)
            if status is None:
                return None
            if not stat.S_ISREG(status.st_mode):
                raise LayoutError(f"{printable(path)} is not a regular file")
            with FileIO(path, opener=open_safely) as stream:
                size = os.fstat(stream.fileno()).st_size
                if size > limit:
                    raise ContentError(f"{printable(path)} has {size} bytes, more than {limit}")
                return stream.readall()

    def _present_stamp(self) -> Stamp | None:
        try:
            return stamp_of(os.path.join(self._path, _INDEX_FILE))
        except OSError:
            return None


def _check_version(body: bytes) -> None:
    version = load_json(body, "oci-layout").get("imageLayoutVersion")
    if not isinstance(version, str) or version.partition(".")[0] != "1":
        shown = printable(str(version), 40)
        raise ContentError(f"the image layout has version {shown}, which is not supported")
