"""Read and replace the `index.json` of an image layout on a disk.

Owns: the files `oci-layout`, `index.json` and `index.json.partial`.
May not know: blobs, registries, which images are copied.
Invariants: only regular files of a limited size are read, never links. A new index is complete and
    synced to the disk before it replaces the old one.
Follows: OCI image-spec 1.1 image-layout.md, docs/design.md section 13.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from io import FileIO

from _regsync.errors import ContentError
from _regsync.files import PARTIAL_SUFFIX, Stamp, open_safely, stamp_of
from _regsync.layout.disk import LayoutError, disk_errors, lstat_or_none, put_in_place, replace_file
from _regsync.layout.index import LARGEST_INDEX, Index, parse_index
from _regsync.oci import load_json
from _regsync.text import printable

_VERSION_FILE = "oci-layout"
_INDEX_FILE = "index.json"
_NEW_INDEX_FILE = _INDEX_FILE + PARTIAL_SUFFIX
# Earlier versions kept the old index under this name on file systems without hard links.
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
        # Whether `index.json` is missing, and a new index that an interrupted run wrote was read.
        self.is_rename_lost = False

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
            self.is_rename_lost = False
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

        if self._read_file(_VERSION_FILE, _LARGEST_VERSION_FILE) is None:
            replace_file(os.path.join(self._path, _VERSION_FILE), _VERSION, suffix)
        if self.is_rename_lost:
            new_path = os.path.join(self._path, _NEW_INDEX_FILE)
            put_in_place(new_path, os.path.join(self._path, _INDEX_FILE))
            self.is_rename_lost = False

    def replace(self, body: bytes, suffix: str) -> None:
        """Replace `index.json` unless it has these bytes already."""
        if body == self._bytes:
            return
        replace_file(os.path.join(self._path, _INDEX_FILE), body, suffix)
        self._bytes = body

    def _read_index(self, *, may_be_new: bool) -> tuple[Index, bytes]:
        """Read `index.json`, or the new index if its rename was lost. Also returns its bytes.

        If the directory has neither file, returns an empty index with `may_be_new` and raises
        LayoutError without. Also raises LayoutError if the directory has an index but is not marked
        as a layout, and ContentError if its index is damaged or its version is not supported.
        """
        version = self._read_file(_VERSION_FILE, _LARGEST_VERSION_FILE)
        if version is not None:
            _check_version(version)
        body = self._read_file(_INDEX_FILE, LARGEST_INDEX)
        if body is None and version is not None:
            new_index = self._read_new_index()
            if new_index is not None:
                return new_index
        if body is None and os.path.lexists(os.path.join(self._path, _OLD_INDEX_FILE)):
            raise LayoutError(
                f"{self._display_path} has no index.json, but index.json.old of an earlier version",
                hint="rename index.json.old to index.json",
            )
        if may_be_new and body is None:
            # A new folder, or a layout whose first run was killed before its first commit.
            return Index(), b""
        if version is None:
            raise LayoutError(
                f"{self._display_path} is not an image layout: it has no file oci-layout",
                hint="check the path, and whether the disk is mounted",
            )
        if body is None:
            raise LayoutError(
                f"{self._display_path} is an incomplete image layout: it has no index.json",
                hint=_COPY_AGAIN,
            )

        try:
            return parse_index(body), body
        except ContentError as error:
            error.hint = _COPY_AGAIN
            raise

    def _read_new_index(self) -> tuple[Index, bytes] | None:
        """Read the new index that an interrupted run wrote and did not rename to `index.json`.

        A power cut may also have removed the old name without adding the new one, where the file
        system does not replace files atomically. Returns None if there is no complete new index.
        """
        body = self._read_file(_NEW_INDEX_FILE, LARGEST_INDEX)
        try:
            index = parse_index(body or b"")
        except ContentError:
            return None  # the run was interrupted while it wrote the file
        text = f"{self._display_path}: index.json is missing, {_NEW_INDEX_FILE} is used instead"
        self._log("warning", "layout_index", text)
        self.is_rename_lost = True
        return index, body or b""

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
