"""A directory of images in OCI's image-layout form, as the source or target of a copy.

`Index` says which names and artifacts `index.json` has, `Layout` reads and writes the directory, and
`LayoutRepository` has the interface `registry.repository.Repository`. What is written goes to a file
beside its place, `NAME.partial`. `Layout.save` syncs these files and renames them, then replaces
`index.json`.

May not know: requests, which images are copied when.
Invariants: a directory is read as if a stranger had written it: only regular files inside of it, of
the size that their descriptor says, and no links. A file has its name only if it is complete and
synced, and `index.json` names only what is there, at whatever moment a run is killed or the power is
cut (I1, I2, I11). A manifest that is returned has the requested digest (I3). Equal content gives
equal bytes; what another tool wrote into an entry stays.
Follows: OCI image-spec 1.1 image-layout.md, docs/design.md section 13.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, suppress
from io import BufferedWriter, FileIO
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from _regsync import edge
from _regsync.config import Registry
from _regsync.crypto import DIGEST_HEX_LENGTHS
from _regsync.errors import (
    ConfigError,
    ContentError,
    RegistryError,
    Side,
    SyncError,
    WrongBytes,
    adding_context,
)
from _regsync.files import (
    PARTIAL_SUFFIX,
    WRITE_FLAGS,
    free_bytes,
    is_link_free,
    lock,
    open_safely,
    remove_if_possible,
    sync_folder,
)
from _regsync.net.wire import Pieces, Timeouts
from _regsync.oci import (
    LAYOUT_SCHEME,
    Descriptor,
    Manifest,
    begins_with_host,
    check_digest,
    descriptor_json,
    image_name,
    is_digest,
    is_repository,
    is_tag,
    load_json,
    most_values_in,
    parse_manifest,
    parse_reference,
    read_descriptor,
    referrers_tag,
    split_digest,
    split_full_name,
)
from _regsync.providers import Dialect
from _regsync.registry.limits import HostLimits, Need, Turn
from _regsync.registry.repository import BlobBody, Locked
from _regsync.state import RepositoryKey
from _regsync.text import printable, reason_of, size_text

if TYPE_CHECKING:
    from _regsync.registry.runs import Transport

# Bytes of the largest files that are read: `index.json` or a receipt, and a manifest.
_LARGEST_INDEX = 64 * 1024 * 1024
_LARGEST_MANIFEST = 4 * 1024 * 1024

_MOST_VALUES = 1_000_000  # JSON values of an index; enough for 100,000 entries of this program
_CONCURRENCY = 64  # permits of a layout; the large streams in each direction follow from it
_MANY_FILES = 32  # from so many files on, `os.sync` first makes syncing them one by one faster

_VERSION = b'{"imageLayoutVersion":"1.0.0"}\n'
_NEW_INDEX = b'{"manifests":[]}'
_INDEX_TYPE = "application/vnd.oci.image.index.v1+json"

# Annotations of an entry of `index.json`.
_NAME = "org.opencontainers.image.ref.name"  # `REPO:TAG`; other tools use other forms
_FULL_NAME = "io.containerd.image.name"  # of other tools: the image's reference, with the host
_SUBJECT = "dev.regsync.subject"  # the digest that an artifact refers to
_OWN_KEYS = {_NAME, _FULL_NAME, _SUBJECT}

# An annotation of the index: a line `DIGEST REPO` for each blob that was left out.
_LEFT_OUT = "dev.regsync.left-out"

# Hints for errors of the system.
_REMEDIES = {
    errno.EACCES: "let this user read there (and write, if it is a target), or name another directory",
    errno.EFBIG: "FAT32 holds no file above 4 GiB: format the device with exFAT, ext4 or NTFS",
    errno.ENOENT: "mount the disk, or make the directory above it",
    errno.EIO: "check the device, and whether it is still there; then run again",
    errno.ENOSPC: "free space on the device, or copy to a larger one",
    errno.EDQUOT: "free space, or let this user have more of the device",
    errno.EROFS: "mount the device for writing, or copy to another one",
}

# The properties of a layout, in the form of the dialect of a registry (docs/design.md section 13).
_DIALECT = Dialect(None, limits=(), probe=None, listing_has_digests=True)


# The names in `index.json`.


class Entry(NamedTuple):
    """One entry of `index.json`."""

    descriptor: Descriptor
    document: Mapping[str, Any]  # the JSON object, with the fields of other tools

    def label(self, key: str) -> str:
        return self.descriptor.annotations.get(key, "")

    @property
    def own_name(self) -> tuple[str, str] | None:
        """The repository and the tag, if the name has the form `REPO:TAG`."""
        repository, _, tag = self.label(_NAME).rpartition(":")
        return (repository, tag) if is_repository(repository) and is_tag(tag) else None

    @property
    def other_name(self) -> tuple[str, str] | None:
        """The repository and the tag of a full name, without its host. A tag alone is one of the
        repository "".
        """
        name = self.label(_NAME)
        if self.own_name and not begins_with_host(name):  # `ghcr.io/app:v1` may be of either form
            return None
        full_name = name if ":" in name else self.label(_FULL_NAME)
        if not full_name:
            return ("", name) if is_tag(name) else None
        try:
            reference = parse_reference(full_name)
        except ConfigError:
            return None
        return (reference.repository, reference.tag) if reference.tag else None


def new_entry(manifest: Manifest, repository: str, tag: str = "") -> Entry:
    """Return the entry of an image with a tag, of an artifact, or of an image without a tag.

    Type and annotations of an artifact are in its manifest alone: its author may have written so
    many that nobody could read the index.
    """
    annotations = {}
    if tag:
        annotations[_NAME] = f"{repository}:{tag}"
    elif manifest.subject is not None:
        annotations[_SUBJECT] = manifest.subject.digest
    descriptor = Descriptor(
        manifest.media_type, manifest.digest, manifest.size, annotations=annotations
    )
    return Entry(descriptor, descriptor_json(descriptor))


class Index:
    """The entries of a layout, by all that they are looked up by.

    Tools write the names of images in three forms: `REPO:TAG` (own), `HOST/REPO:TAG` (full) and `TAG`
    (bare). An own name outweighs a full one. Bare names count only where no entry has a longer name:
    such a layout is one repository, of whatever name is asked for.
    """

    def __init__(self, body: bytes | None = None) -> None:
        """Read the bytes of an `index.json`. None: a new layout. Raises ContentError."""
        self.body = body  # of the file, as it was last read or written
        # Whether `index.json` is missing, and `index.json.partial` was read: its rename was lost.
        self.is_rename_lost = False
        # By the own name, or by the entry's JSON if it has none.
        self.entries = dict[str, Entry]()
        self.unnamed = dict[str, Entry]()  # those without a name, by digest
        # By repository and tag. Bare names are those of the repository "".
        self._tags = defaultdict[str, dict[str, Entry]](dict)
        # Artifacts, by the digest of their subject and their own.
        self.artifacts = defaultdict[str, dict[str, Entry]](dict)
        # What may be an artifact of another tool, by digest: its manifest names the subject, and its
        # entry does not.
        self.unread = dict[str, Entry]()

        document = load_json(
            _NEW_INDEX if body is None else body,
            "index.json of the layout",
            most_values=_MOST_VALUES,
            must_round_trip=True,  # it is written again, with what other tools wrote into it
        )
        if not isinstance(document.get("manifests"), list):
            raise ContentError("index.json has no list of manifests")
        annotations = document.get("annotations")
        self._annotations = annotations if isinstance(annotations, dict) else {}
        # The blobs that are not here because the far side has them: a repository there by digest.
        self.left_out = read_lines(str(self._annotations.pop(_LEFT_OUT, "")))
        entries = [
            Entry(read_descriptor(each, f"index.json: manifests[{number}]"), each)
            for number, each in enumerate(document["manifests"])
        ]
        for entry in entries:
            self._add_name(entry, entry.other_name)
        for entry in entries:  # own names last
            self.add(entry)

    def tags(self, repository: str) -> Mapping[str, Entry]:
        """Return the entries of a repository by their tag."""
        has_long_names = any(name for name in self._tags)
        return self._tags.get(repository if has_long_names else "", {})

    def _add_name(self, entry: Entry, name: tuple[str, str] | None) -> None:
        if name is not None:
            repository, tag = name
            self._tags[repository][tag] = entry

    def add(self, entry: Entry) -> None:
        """Add an entry, in place of the one with the same own name."""
        digest = entry.descriptor.digest
        # All but ASCII is escaped in JSON, because a lone surrogate has no encoding.
        key = entry.label(_NAME) if entry.own_name else json.dumps(entry.document)
        self.entries[key] = entry
        if not entry.label(_NAME):
            self.unnamed[digest] = entry
        self._add_name(entry, entry.own_name)
        if entry.label(_SUBJECT):
            self.artifacts[entry.label(_SUBJECT)][digest] = entry
        if _OWN_KEYS.isdisjoint(entry.descriptor.annotations):
            self.unread[digest] = entry

    def dump(self) -> bytes:
        """Return the bytes of `index.json`, in an order that depends on its content alone. Raises
        ContentError if there are too many.
        """
        annotations = dict(self._annotations)
        if self.left_out:
            lines = [f"{digest} {name}" for digest, name in sorted(self.left_out.items())]
            annotations[_LEFT_OUT] = "\n".join(lines)
        document: dict[str, Any] = {"schemaVersion": 2, "mediaType": _INDEX_TYPE}
        document["manifests"] = [entry.document for _, entry in sorted(self.entries.items())]
        if annotations:
            document["annotations"] = annotations
        body = json.dumps(document, separators=(",", ":")).encode()
        if len(body) > _LARGEST_INDEX or most_values_in(body) > _MOST_VALUES:
            limits = f"{_LARGEST_INDEX} bytes, or {_MOST_VALUES} values"
            raise ContentError(f"index.json would have more than {limits}")
        return body


# Lines about blobs at the far side, to which a layout is carried.


def without_host(name: str) -> str:
    """Return the repository in `HOST/REPO`, `oci-layout:PATH//REPO` or `REPO`."""
    has_host = name.startswith(f"{LAYOUT_SCHEME}:") or begins_with_host(name)
    return split_full_name(name)[1] if has_host else name


def read_lines(text: str, repository_of: Callable[[str], str] = str) -> dict[str, str]:
    """Parse lines `DIGEST REPO`. Returns the repository of each digest; the first line counts.

    `repository_of` makes a repository of the second field. Empty lines and comments (`#`) are
    skipped. Raises ContentError, which names the line, if a line is invalid.
    """
    repositories = dict[str, str]()
    for number, line in enumerate(text.splitlines(), 1):
        digest, _, name = line.strip().partition(" ")
        if not digest or line.startswith("#"):
            continue
        try:
            check_digest(digest)
        except ContentError as error:
            raise ContentError(f"line {number}: {error.message}") from error
        repository = repository_of(name)
        if not is_repository(repository):
            raise ContentError(f"line {number}: expected DIGEST REPO")
        repositories.setdefault(digest, repository)
    return repositories


# Files.


@contextmanager
def _disk_errors(path: str) -> Iterator[None]:
    """Convert OSErrors to SyncErrors with a hint. `path` is named if an error has no path."""
    try:
        yield
    except OSError as error:
        name = printable(str(error.filename or path))
        hint = _REMEDIES.get(error.errno or 0)
        raise SyncError(f"{name}: {reason_of(error)}", hint=hint) from error


def _open_regular(path: str) -> FileIO | None:
    """Open a file to read it. None: it does not exist. Raises OSError and SyncError: for a link, a
    pipe, a device or a folder too.
    """
    try:
        file = FileIO(path, opener=open_safely)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise SyncError(f"{printable(path)} is not a regular file")
    return file


def _size_of(file: FileIO) -> int:
    return os.fstat(file.fileno()).st_size


def _read_all(file: FileIO, largest: int) -> bytes:
    """Return all bytes, and close the file. Raises ContentError if there are too many."""
    with file:
        size = _size_of(file)
        if size > largest:
            raise ContentError(f"the file has {size} bytes, more than {largest}")
        return file.readall()


def _read_file(path: str, largest: int) -> bytes | None:
    """Return the bytes of a file. None: it does not exist."""
    with _disk_errors(path):
        file = _open_regular(path)
        return _read_all(file, largest) if file else None


def _read_index(path: str, *, may_be_new: bool = False) -> Index:
    """Read the index of the layout in a directory. Raises SyncError if it cannot be read.

    Where `index.json` is missing, a complete `index.json.partial` is read: a power cut has taken the
    new name with the old one. If it `may_be_new`, a directory without either is an empty layout.
    """
    place = os.path.join(path, "index.json")
    try:
        body = _read_file(place, _LARGEST_INDEX)
        if body is not None:
            return Index(body)
        new_body = _read_file(place + PARTIAL_SUFFIX, _LARGEST_INDEX)
        with suppress(ContentError):  # there is none, or it is not complete
            index = Index(new_body or b"")
            index.is_rename_lost = True
            return index
        if may_be_new:
            return Index()
        raise SyncError(f"{printable(path)} is not an image layout: it has no index.json")
    except SyncError as error:
        # A damaged index is none of the damages to one image that an audit finds.
        is_damaged = isinstance(error, ContentError)
        text = f"{printable(place)}: {error.message}" if is_damaged else error.message
        hint = "check the path, and whether the disk is mounted; else copy the layout again"
        raise SyncError(text, hint=error.hint or hint) from error


def _create_file(path: str) -> FileIO:
    """Create a file. What was at the path is removed."""
    remove_if_possible(path)
    # O_EXCL, because another process may put a link there at this moment.
    return FileIO(os.open(path, WRITE_FLAGS | os.O_EXCL, 0o666), "w")


def _write_file(path: str, body: bytes) -> None:
    """Create a file with these bytes, which a power cut may take."""
    with BufferedWriter(_create_file(path)) as file:
        file.write(body)


def _sync_file(path: str) -> None:
    with FileIO(path, "r+", opener=open_safely) as file:  # Windows syncs what it may write to
        os.fsync(file.fileno())


def _put_in_place(path: str) -> None:
    """Sync `path.partial`, and rename it to `path`."""
    _sync_file(path + PARTIAL_SUFFIX)
    os.replace(path + PARTIAL_SUFFIX, path)
    sync_folder(os.path.dirname(path))


def _make_folder(path: str) -> None:
    """Create a folder unless it exists. Its parent has to be there: if it is not, a disk is probably
    not mounted.
    """
    with suppress(FileExistsError):
        os.mkdir(path)
        sync_folder(os.path.dirname(path))


# The directory.


class Layout:
    """One directory. It is the host of its repositories, which share one store of blobs."""

    can_resume = True
    stop_error = None

    def __init__(
        self,
        registry: Registry,
        transport: Transport,
        *,
        must_be_whole: bool,
        must_exist: bool = False,
    ) -> None:
        """Prepare to use a directory. Nothing is read or written yet.

        If `must_be_whole`, a target holds an image only if it holds all parts of it. If it
        `must_exist`, a target without `index.json` is an error.
        """
        self.registry = registry
        self.key = registry.authority
        self.path = registry.host
        self.must_be_whole = must_be_whole
        self.must_exist = must_exist
        self._log = transport.machine.log
        self.limits = HostLimits(
            self.key,
            transport.gate,
            chance=edge.current().chance,
            log=self._log,
            timeouts=Timeouts(),
            cap=_CONCURRENCY,
        )

        # What the far side is assumed to have, so that it is left out: a repository there by digest.
        self.assumed = dict[str, str]()
        self.uploads = set[_Upload]()  # under way; they are promised the bytes that they lack

        self._index: Index | None = None  # None until `index.json` is read
        self._is_writing = False
        self._lock: int | None = None  # a descriptor of the directory
        self._unnamed = set[str]()  # blobs and manifests that are complete and have no name yet
        self._is_changed = False  # since the last `save`
        self.error: SyncError | None = None  # of a `save`; it has ended all writing

    def read_receipts(self) -> None:
        """Read which blobs the far side holds. Of several lines for a blob the first counts.

        A line is `DIGEST HOST/REPO`, as an audit writes it, or `DIGEST REPO`. The host is left out:
        the registry may have another name at the far side. Raises ConfigError if a receipt cannot
        be read, because a blob that is left out by mistake is missed only there.
        """
        for path in self.registry.assume:
            try:
                body = _read_file(path, _LARGEST_INDEX)
                if body is None:
                    raise SyncError("does not exist")
                receipt = read_lines(body.decode("utf-8", "replace"), without_host)
            except SyncError as error:
                raise ConfigError(
                    f"assume: {printable(path)}: {error.message}",
                    hint="`regsync audit --receipt FILE` writes a receipt of a target; name FILE here",
                ) from error
            self.assumed = {**receipt, **self.assumed}

    # Reading.

    def index(self, *, may_be_new: bool = False) -> Index:
        """Return the entries of `index.json`, with those that were added since it was read.

        If it `may_be_new`, a directory without a layout is an empty one. Raises SyncError if the
        layout cannot be read.
        """
        if self._index is None:
            self._index = _read_index(self.path, may_be_new=may_be_new)
        return self._index

    def _place(self, *names: str) -> str:
        return os.path.join(self.path, *names)

    def path_of(self, digest: str) -> str:
        """Return the path of a blob or manifest. Raises SyncError if a link leads there."""
        algorithm, encoded = split_digest(digest)
        folder = self._place("blobs", algorithm)
        if not is_link_free(folder):
            raise SyncError(f"{printable(folder)} is not a directory")
        return os.path.join(folder, encoded)

    def open(self, digest: str) -> FileIO | None:
        """Open a blob or manifest. None: it is not there."""
        path = self.path_of(digest)
        with _disk_errors(self.path):
            is_named = digest not in self._unnamed
            file = None if is_named else _open_regular(path + PARTIAL_SUFFIX)
            return file or _open_regular(path)  # it may have got its name at this moment

    def size_of(self, digest: str) -> int | None:
        """Return how many bytes a blob or manifest has here. None: it is not there."""
        file = self.open(digest)
        if file is None:
            return None
        with _disk_errors(self.path), file:
            return _size_of(file)

    def holds(self, part: Descriptor) -> bool:
        return self.size_of(part.digest) == part.size

    def _read_body(self, digest: str) -> bytes | None:
        """Read the bytes of a manifest. None: it is not there."""
        file = self.open(digest)
        with _disk_errors(self.path):
            return _read_all(file, _LARGEST_MANIFEST) if file else None

    def read_manifest(self, digest: str, expected: Descriptor | None) -> Manifest:
        """Read and verify a manifest. Raises RegistryError with status 404 if it is not there."""
        body = self._read_body(digest)
        try:
            if body is None:
                raise RegistryError("the layout does not hold this manifest", status=404)
            return parse_manifest(body, content_type=None, digest=digest, expected=expected)
        except (RegistryError, WrongBytes) as error:
            error.hint = "run `sync --recheck` where the layout was made"
            raise

    def read_subjects(self) -> None:
        """Read what the artifacts of other tools refer to, once.

        Those that cannot be read are counted in a warning. They may refer to any image, so that an
        error would fail all images.
        """
        index = self.index()
        failures = list[str]()
        while index.unread:
            digest, entry = index.unread.popitem()
            try:
                manifest = self.read_manifest(digest, entry.descriptor)
            except SyncError as error:
                failures.append(f"{digest}: {error.message}")
                continue
            if manifest.subject is not None:
                index.artifacts[manifest.subject.digest][digest] = entry
        if failures:
            text = (
                f"{len(failures)} entries cannot be read, and artifacts among them are not copied"
            )
            first = f"such as {min(failures)}"
            self._log("warning", "layout_entry", f"{printable(self.path)}: {text}, {first}")

    # Writing.

    def begin_writing(self) -> None:
        """Lock the directory and make it a layout, once.

        Raises SyncError if that fails, or if another process writes, and the error of a `save` that
        has failed.
        """
        if self.error is not None:
            raise self.error.copy_without_context()
        if self._is_writing:
            return
        with _disk_errors(self.path):
            _make_folder(self.path)
            if self._lock is None:
                self._lock_directory()
            for folder in ("blobs", *(f"blobs/{algorithm}" for algorithm in DIGEST_HEX_LENGTHS)):
                _make_folder(self._place(folder))
            # Another process may have written until now. Earlier look-ups are then out of date: at
            # worst an image is copied again.
            self._index = None
            self.index(may_be_new=True)
            if not os.path.lexists(self._place("oci-layout")):
                _write_file(self._place("oci-layout") + PARTIAL_SUFFIX, _VERSION)
                _put_in_place(self._place("oci-layout"))
            if self.index().is_rename_lost:
                _put_in_place(self._place("index.json"))
                self.index().is_rename_lost = False
        self._is_writing = True

    def _lock_directory(self) -> None:
        """Lock the directory itself, because a file for it would stay on the disk."""
        try:
            self._lock = os.open(self.path, os.O_RDONLY)  # not on Windows
            lock(self._lock)
        except BlockingIOError as error:
            self.close()
            raise SyncError(
                f"another process is writing {printable(self.path)}",
                hint="wait until it has ended, or copy to another directory",
            ) from error
        except OSError:
            text = "its file system has no locks: let only one process write to it"
            self._log("info", "layout_lock", f"{printable(self.path)}: {text}")

    def close(self) -> None:
        """Unlock the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._is_writing = False

    def check_room(self, needed: int) -> None:
        """Raise SyncError unless `needed` bytes are free, beside those promised to uploads and a
        second index, which is written while the present one is there.
        """
        with _disk_errors(self.path):
            free = free_bytes(self.path)
        promised = sum(upload.blob.size - upload.offset for upload in self.uploads)
        room = max(free - promised - len(self.index().body or b""), 0)
        if needed > room:
            text = f"has room for {size_text(room)}, the blob needs {size_text(needed)}"
            raise SyncError(f"{printable(self.path)} {text}", hint=_REMEDIES[errno.ENOSPC])

    def is_unnamed(self, digest: str) -> bool:
        return digest in self._unnamed

    def add_part(self, digest: str) -> None:
        """Take over a complete blob or manifest, which the next `save` gives its name."""
        self._unnamed.add(digest)
        self.index().left_out.pop(digest, None)  # by an earlier run
        self._is_changed = True

    def put(self, manifest: Manifest, entry: Entry | None, left_out: Mapping[str, str]) -> None:
        """Write a manifest, with its entry unless it is the child of an index, and with the lines
        of its blobs that are left out.
        """
        self.begin_writing()
        digest = manifest.digest
        if self.size_of(digest) != manifest.size or self._read_body(digest) != manifest.body:
            with _disk_errors(self.path):
                _write_file(self.path_of(digest) + PARTIAL_SUFFIX, manifest.body)
            self.add_part(digest)
        if entry is not None:
            self.index().add(entry)
        self.index().left_out.update(left_out)
        self._is_changed = True

    async def save(self) -> None:
        """Give all that was added its names, then replace `index.json`. One `save` at a time.

        An error is kept in `error`, which all further writing raises: nothing more gets a name.
        """
        if not self._is_changed or self.error is not None:
            return
        self._is_changed = False
        digests = [*self._unnamed]
        try:
            body = self.index().dump()
            # A signal does not end it half-way.
            with _disk_errors(self.path), anyio.CancelScope(shield=True):
                await edge.current().in_thread(self._write_names, digests, body)
            self._unnamed.difference_update(digests)
        except SyncError as error:
            error.drop_frames()
            hint = "run again when the cause is removed; the layout's tags are unchanged"
            error.hint = error.hint or hint
            self.error = error

    def _write_names(self, digests: list[str], body: bytes) -> None:
        """Give parts their names, then write `index.json`. Runs in a worker thread.

        A file is synced before it gets its name, and has it before the index names it. Raises
        OSError and SyncError.
        """
        paths = [self.path_of(digest) for digest in digests]
        if len(paths) > _MANY_FILES and hasattr(os, "sync"):
            os.sync()
        for path in paths:
            _sync_file(path + PARTIAL_SUFFIX)
        for path in paths:
            os.replace(path + PARTIAL_SUFFIX, path)
        # All of them: an earlier run may have been killed before it synced what it had renamed.
        for algorithm in DIGEST_HEX_LENGTHS:
            sync_folder(self._place("blobs", algorithm))
        if body != self.index().body:
            path = self._place("index.json")
            _write_file(path + PARTIAL_SUFFIX, body)
            _put_in_place(path)
            self.index().body = body


# A repository.


class LayoutRepository(Locked):
    """One repository of a layout, as the source or target of a copy. See `Repository`."""

    dialect = _DIALECT
    probe_from = None
    is_local = True
    unannounced: Collection[str] = ()

    def __init__(self, layout: Layout, name: str, side: Side) -> None:
        self.host = layout
        self.name = name
        self.api_name = name
        self.side = side
        self.key = RepositoryKey(layout.key, name)
        self.store_key = RepositoryKey(layout.key, "")  # all repositories share it

    def __str__(self) -> str:
        return f"{self.host.key}//{self.name}"

    def name_of(self, reference: str) -> str:
        """Return the name of a tag or digest in error messages."""
        return image_name(str(self), reference)

    def adding_context(self, operation: str, reference: str) -> AbstractContextManager[None]:
        return adding_context(self.side, operation, reference)

    def reading_needs(self, size: int) -> tuple[Need, ...]:
        return (self.host.limits.reading,)

    def writing_needs(self, size: int, *, in_chunks: bool = False) -> tuple[Need, ...]:
        return (self.host.limits.writing,)

    def _index(self) -> Index:
        is_target = self.side is Side.TARGET
        index = self.host.index(may_be_new=is_target and not self.host.must_exist)
        if not (is_target and index.is_rename_lost):
            return index
        # Other programs find nothing there. To write an entry again brings `index.json` back.
        if self.host.must_exist:
            text = f"{printable(self.host.path)} has no index.json, whose rename was lost"
            raise SyncError(text, hint="run `sync`, which brings it back")
        return Index()

    # Tags and manifests.

    async def list_tags(self) -> dict[str, str | None] | None:
        """Return each tag with its digest; of a target only those that it holds. None: there is none.

        A tag of a source whose manifest is lost fails when it is looked up. One of a target that
        cannot be looked at is left out, so that nobody skips it: it fails when it is written.
        """
        with self.adding_context("list tags of", str(self)):
            listing = dict[str, str | None]()
            for tag, entry in self._index().tags(self.name).items():
                with suppress(SyncError):
                    if self.side is Side.SOURCE or self._is_present(entry):
                        listing[tag] = entry.descriptor.digest
            return listing or None

    def _find(self, reference: str) -> Entry | None:
        """Return the entry of a tag, or that of a digest without a tag: an artifact needs one of its
        own, by which it is found.
        """
        index = self._index()
        if is_digest(reference):
            return index.unnamed.get(reference)
        return index.tags(self.name).get(reference)

    def _is_present(self, entry: Entry) -> bool:
        """Report whether the layout holds the manifest of an entry; at a target that must be whole,
        also whether it holds all other parts.
        """
        if not self.host.holds(entry.descriptor):
            return False
        need_not_be_whole = self.side is Side.SOURCE or not self.host.must_be_whole
        return need_not_be_whole or self._is_whole(entry.descriptor)

    def _is_whole(self, top: Descriptor) -> bool:
        """Report whether the layout, which holds a manifest, holds all parts below it, but for blobs
        that `assume` names now: the far side may have removed what was left out earlier.
        """
        seen = set[str]()
        waiting = [top]
        while waiting:
            part = waiting.pop()
            if part.digest in seen:
                continue
            seen.add(part.digest)
            try:
                manifest = self.host.read_manifest(part.digest, part)
            except WrongBytes:
                return False  # `Layout.put` writes it again
            needed = [each for each in manifest.dependencies if not self._may_leave_out(each)]
            if not all(self.host.holds(each) for each in needed):
                return False
            waiting += manifest.children
        return True

    async def head_manifest(self, reference: str) -> str | None:
        """Return the digest of a manifest. None: it is not there.

        At a source, what an index names is there too. At a target it is not, because a run may have
        been killed before it wrote the index.
        """
        with self.adding_context("look up", self.name_of(reference)):
            entry = self._find(reference)
            if entry is not None and self._is_present(entry):
                return entry.descriptor.digest
            if self.side is Side.TARGET or not is_digest(reference):
                return None
            return None if self.host.size_of(check_digest(reference)) is None else reference

    async def get_manifest(self, reference: str, *, expected: Descriptor | None = None) -> Manifest:
        """Return the manifest of a tag or digest, verified.

        Raises RegistryError with status 404 if it is not there, WrongBytes if its digest is wrong,
        and ContentError if it is invalid.
        """
        with self.adding_context("fetch manifest", self.name_of(reference)):
            entry = self._find(reference)
            if entry is not None:
                expected = expected or entry.descriptor
                return self.host.read_manifest(entry.descriptor.digest, expected)
            if not is_digest(reference):
                raise RegistryError("no such tag or manifest", status=404)
            return self.host.read_manifest(reference, expected)  # the child of an index

    async def put_child(self, manifest: Manifest) -> None:
        """Write a manifest without an entry. An index that names it follows."""
        self._put(manifest.digest, manifest, None)

    async def put_manifest(self, reference: str, manifest: Manifest) -> None:
        """Write a manifest under a tag or digest."""
        tag = "" if is_digest(reference) else reference
        self._put(reference, manifest, new_entry(manifest, self.name, tag))

    def _put(self, reference: str, manifest: Manifest, entry: Entry | None) -> None:
        """Write a manifest. Raises RegistryError if a part is missing that is not left out (I1)."""
        with self.adding_context("write manifest", self.name_of(reference)):
            left_out = dict[str, str]()
            for part in manifest.dependencies:
                if self.host.holds(part):
                    continue
                if not self._may_leave_out(part):
                    # A registry answers so too. The copy then writes the parts again.
                    text = f"{part.digest}, which it names, is not there"
                    raise RegistryError(text, status=404, codes=("MANIFEST_BLOB_UNKNOWN",))
                left_out[part.digest] = self.host.assumed[part.digest]
            self.host.put(manifest, entry, left_out)

    async def list_referrers(self, digest: str) -> tuple[Descriptor, ...]:
        """Return what refers to a digest, in all repositories of the layout."""
        with self.adding_context("list referrers of", self.name_of(digest)):
            index = self._index()
            self.host.read_subjects()
            referrers = dict[str, Descriptor]()
            # Other tools may have written a list under the fallback tag.
            tag = referrers_tag(digest)
            if tag in index.tags(self.name):
                tag_list = await self.get_manifest(tag)
                referrers |= {child.digest: child for child in tag_list.children}
            artifacts = index.artifacts.get(digest, {})
            referrers |= {each: entry.descriptor for each, entry in artifacts.items()}
            return tuple(referrers.values())

    # Blobs.

    async def has_blob(self, blob: Descriptor, *, with_retries: bool = False) -> bool:
        """Report whether a blob need not be written: it is there, or is left out."""
        with self.adding_context("look up blob", self.name_of(blob.digest)):
            return self.host.holds(blob) or self._may_leave_out(blob)

    def _may_leave_out(self, part: Descriptor) -> bool:
        """Report whether a target need not have a blob, because `assume` names it. Manifests and
        configs, which are JSON as few layers are, are always written.
        """
        if self.side is Side.SOURCE or part.media_type.endswith("json"):
            return False
        return part.digest in self.host.assumed

    def far_repository(self, digest: str) -> str | None:
        """Return a repository at the far side for a blob that was left out here. None: it was not."""
        return self._index().left_out.get(digest)

    async def open_blob(
        self, blob: Descriptor, start: int = 0, *, is_fresh: bool = False, turn: Turn | None = None
    ) -> AbstractAsyncContextManager[BlobBody]:
        """Open a blob at byte `start`. Returns a context that yields its bytes.

        Raises RegistryError with status 404 if it is not there, and WrongBytes if it has another
        size.
        """
        with self.adding_context("read blob", self.name_of(blob.digest)):
            file = self.host.open(blob.digest)
            if file is None:
                raise self._absent()
            with _disk_errors(self.host.path):
                size = _size_of(file)
            if size != blob.size:
                file.close()
                raise WrongBytes(f"the blob has {size} bytes, its descriptor says {blob.size}")
        file.seek(start)
        return _Body(file)

    def _absent(self) -> RegistryError:
        error = RegistryError("neither the layout nor the target holds it", status=404)
        error.hint = (
            "run `sync --recheck` where the layout was made; if the blob was left out of it, without"
            " `assume` or with a newer receipt"
        )
        return error

    def begin_upload(self, blob: Descriptor) -> _Upload:
        """Return an upload of a blob. No file is created yet."""
        return _Upload(self, blob)


class _Body(AbstractAsyncContextManager["_Body"]):
    """The bytes of a blob that is read. Its context closes the file."""

    def __init__(self, file: FileIO) -> None:
        self._file = file

    async def __aexit__(self, *_: object) -> None:
        self._file.close()

    async def read_into(self, buffer: memoryview) -> int:
        """Read bytes into `buffer`. Returns how many, or 0 at the end of the blob."""
        with _disk_errors(str(self._file.name)):
            count: int = await edge.current().in_thread(self._file.readinto, buffer)
            return count


class _Upload:
    """A blob on its way into a layout: see `BlobUpload`.

    The session is the partial file, and its bytes are what the session has received. So it never
    breaks: whatever fails, writing goes on at `offset`.
    """

    is_broken = False
    in_chunks = False
    mount_status = 0

    def __init__(self, repository: LayoutRepository, blob: Descriptor) -> None:
        self.blob = blob
        self.session = ""  # the path of the file while it is open
        self.offset = 0  # bytes in the file
        self._repository = repository
        self._layout = repository.host
        self._file: FileIO

    def _adding_context(self) -> AbstractContextManager[None]:
        name = self._repository.name_of(self.blob.digest)
        return self._repository.adding_context("write blob", name)

    async def start(self, mount_from: str | None = None) -> bool:
        """Create the file. Returns False, because the blob has to be sent."""
        layout = self._layout
        with self._adding_context():
            layout.begin_writing()
            if layout.is_unnamed(self.blob.digest):  # complete, under the path of this upload
                raise ContentError("the bytes of this digest are here, and have another size")
            path = layout.path_of(self.blob.digest) + PARTIAL_SUFFIX
            remove_if_possible(path)  # what a killed run has left takes room
            layout.check_room(self.blob.size)
            with _disk_errors(layout.path):
                self._file = _create_file(path)
        self.session = path
        self.offset = 0
        layout.uploads.add(self)
        return False

    async def try_mount(self, digest: str, mount_from: str) -> bool:
        """Create the file: all repositories share their blobs, so there is nothing to mount."""
        return await self.start()

    async def send(self, pieces: Pieces, *, is_last: bool = True, turn: Turn | None = None) -> bool:
        """Write the rest of the blob, and add the blob to the layout. Returns True.

        `pieces` must verify the bytes. After an error the file stays until the upload is cancelled.
        """
        while piece := await pieces.next():
            await self._write(piece)
        size = self.blob.size
        if self.offset != size:  # a descriptor that lies, or a staged file that was cut
            raise WrongBytes(f"the blob has {self.offset} bytes, its descriptor says {size}")
        with self._adding_context():
            if self._close():
                self._layout.add_part(self.blob.digest)
        return True

    async def _write(self, piece: memoryview) -> None:
        with self._adding_context(), _disk_errors(self.session):
            while piece:
                count = await edge.current().in_thread(self._file.write, piece)
                piece = piece[count:]
                self.offset += count

    async def resume(self) -> None:
        """Do nothing: a session does not break."""

    async def cancel_upload(self) -> None:
        """Remove the file."""
        path = self.session
        is_ours = True
        with suppress(SyncError):  # what has failed before says why
            is_ours = self._close()
        if is_ours:
            remove_if_possible(path)

    def _close(self) -> bool:
        """Close the file, which has no claim to room any more. Returns False if a manifest with the
        same bytes has taken its place meanwhile.
        """
        path = self.session
        self.session = ""
        self._layout.uploads.discard(self)
        is_ours = False
        try:
            with _disk_errors(path), self._file:
                is_ours = os.fstat(self._file.fileno()).st_nlink > 0
        except SyncError:  # a network disk may say only now that it is full
            if is_ours:
                remove_if_possible(path)
            raise
        return is_ours


def list_repositories(path: str) -> list[str]:
    """Return the names of all repositories of a layout, sorted. Raises SyncError if it cannot be read.

    Repositories without a name, in a layout of another tool, are left out.
    """
    names = [entry.own_name or entry.other_name for entry in _read_index(path).entries.values()]
    return sorted({name[0] for name in names if name})
