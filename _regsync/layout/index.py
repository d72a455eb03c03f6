"""What `index.json` of an image layout names, and how it is written.

Owns: the names of images in layouts of this program and of others, the entries of artifacts, the
    lines of blobs that were left out, the order of it all.
May not know: files, what is copied.
Invariants: equal content gives equal bytes; what another tool wrote into an entry stays as it is.
Follows: OCI image-spec 1.1 image-layout.md, docs/design.md section 13.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from _regsync.crypto import DIGEST_HEX_LENGTHS
from _regsync.errors import ConfigError, ContentError
from _regsync.oci.manifest import Descriptor, Manifest, load_json, read_descriptor
from _regsync.oci.reference import (
    LAYOUT_SCHEME,
    check_digest,
    is_repository,
    is_tag,
    parse_reference,
    referrers_tag,
)

# Bytes of an `index.json`, written or read.
LARGEST_INDEX = 64 * 1024 * 1024

# JSON values in it: 100,000 entries of ours.
_MOST_VALUES = 1_000_000

_INDEX_TYPE = "application/vnd.oci.image.index.v1+json"

# Annotations of entries: `REPO:TAG`; the name that the image has at its source, with host; of an
# artifact, the digest that it refers to; of an image without a tag, its repository.
_NAME = "org.opencontainers.image.ref.name"
_FULL_NAME = "io.containerd.image.name"
_SUBJECT = "dev.regsync.subject"
_REPOSITORY = "dev.regsync.repository"
_OWN_KEYS = (_NAME, _FULL_NAME, _SUBJECT, _REPOSITORY)

# What fallback tags begin with, as `oci.reference.referrers_tag` makes them.
_LIST_TAGS = tuple(f"{algorithm}-" for algorithm in DIGEST_HEX_LENGTHS)

# An annotation of the index: a line `DIGEST REPO` for each blob that was left out.
_LEFT_OUT = "dev.regsync.left-out"


@dataclass(frozen=True, eq=False)
class Entry:
    """One entry of `index.json`."""

    descriptor: Descriptor
    # The JSON object that is written, with what other tools wrote into it.
    document: Mapping[str, Any]

    @cached_property
    def text(self) -> str:
        """The object as it is written. Half a character (a lone surrogate) stays escaped."""
        return json.dumps(self.document, separators=(",", ":"))

    @property
    def name(self) -> str:
        return self.descriptor.annotations.get(_NAME, "")

    @property
    def full_name(self) -> str:
        return self.descriptor.annotations.get(_FULL_NAME, "")

    @property
    def repository(self) -> str:
        """The repository of an image by a name of ours, or of one without a tag."""
        named = _split_name(self.name)
        if named is not None:
            return named.repository
        return self.descriptor.annotations.get(_REPOSITORY, "")

    @property
    def subject(self) -> str:
        return self.descriptor.annotations.get(_SUBJECT, "")

    @property
    def is_named(self) -> bool:
        """Say whether it is an image by some name, of this program or another."""
        annotations = self.descriptor.annotations
        return any(key in annotations for key in (_NAME, _FULL_NAME, _REPOSITORY))

    @property
    def referrer(self) -> Descriptor:
        """Return what a list of referrers says of an artifact."""
        return self.descriptor._replace(annotations=_without_own(self.descriptor.annotations))


def image_entry(manifest: Manifest, repository: str, tag: str, full_name: str) -> Entry:
    """Return the entry of an image under a tag; `full_name` is what it is called at its source."""
    annotations = {_NAME: f"{repository}:{tag}"}
    if full_name:
        annotations[_FULL_NAME] = full_name
    return _entry(manifest, annotations)


def loose_entry(manifest: Manifest, repository: str) -> Entry:
    """Return the entry of an artifact, or of an image that has no tag."""
    if manifest.subject is not None:
        own = {_SUBJECT: manifest.subject.digest}
        return _entry(
            manifest, {**_without_own(manifest.annotations), **own}, manifest.artifact_type
        )
    return _entry(manifest, {_REPOSITORY: repository})


def _entry(
    manifest: Manifest, annotations: Mapping[str, str], artifact_type: str | None = None
) -> Entry:
    document: dict[str, Any] = {
        "mediaType": manifest.media_type,
        "digest": manifest.digest,
        "size": manifest.size,
    }
    if artifact_type:
        document["artifactType"] = artifact_type
    document["annotations"] = dict(sorted(annotations.items()))
    return _read_entry(document, "manifests")


def _without_own(annotations: Mapping[str, str]) -> dict[str, str]:
    """Return annotations without those that would name an entry, which an artifact may have too."""
    return {key: value for key, value in annotations.items() if key not in _OWN_KEYS}


def _read_entry(document: Any, where: str) -> Entry:
    return Entry(read_descriptor(document, where), document)


class Index:
    """The entries of one layout, found by the names that images have in it.

    An entry has its names by the first of these that it follows: `REPO:TAG`, a full name, a tag
    alone. A layout of tags alone is one repository, of whatever name is asked for.
    """

    def __init__(self, annotations: Mapping[str, str] | None = None) -> None:
        # By repository and tag.
        self._named = defaultdict[str, dict[str, Entry]](dict)
        self._called = defaultdict[str, dict[str, Entry]](dict)
        # By tag.
        self._bare = dict[str, Entry]()
        # By digest.
        self._by_digest = defaultdict[str, list[Entry]](list)
        self._by_subject = defaultdict[str, list[Entry]](list)
        # By fallback tag, in whatever repository.
        self._lists = defaultdict[str, list[Entry]](list)

        annotations = dict(annotations or {})
        # By digest, a repository at the far side that holds the blob.
        self.left_out = read_lines(annotations.pop(_LEFT_OUT, ""))
        self._annotations = annotations

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._by_digest.values())

    def __iter__(self) -> Iterator[Entry]:
        return chain.from_iterable(self._by_digest.values())

    # What there is.

    def find(self, repository: str, tag: str) -> Entry | None:
        """Return what a tag names in a repository; None where it names nothing."""
        for names in (self._named, self._called):
            if tag in names.get(repository, {}):
                return names[repository][tag]
        return self._bare_tags().get(tag)

    def tags(self, repository: str) -> dict[str, str]:
        """Return the tags of a repository, each with its digest."""
        entries = {
            **self._bare_tags(),
            **self._called.get(repository, {}),
            **self._named.get(repository, {}),
        }
        return {tag: entry.descriptor.digest for tag, entry in entries.items()}

    def repositories(self) -> list[str]:
        """Return the repositories that have a name."""
        return sorted({*self._named, *self._called})

    def entries_of(self, digest: str) -> list[Entry]:
        return self._by_digest.get(digest, [])

    def referrers(self, digest: str) -> list[Entry]:
        """Return the entries of artifacts that say that they refer to a digest."""
        return self._by_subject.get(digest, [])

    def loose_entries(self) -> list[Entry]:
        """Return the entries that have no name and do not say what they refer to: artifacts of other
        tools are among them.
        """
        return [entry for entry in self if not (entry.is_named or entry.subject)]

    def add_subject(self, entry: Entry, digest: str) -> None:
        """Note what an entry refers to, which only its manifest says."""
        self._by_subject[digest].append(entry)

    def fallback_lists(self, digest: str) -> list[Entry]:
        """Return what the fallback tag of a digest names, in any repository."""
        return self._lists.get(referrers_tag(digest), [])

    def _bare_tags(self) -> Mapping[str, Entry]:
        return {} if self._named or self._called else self._bare

    # Changes.

    def put(self, entry: Entry) -> None:
        """Add an entry; a tag that named something else is moved."""
        named = _split_name(entry.name)
        if named is not None:
            old = self._named.get(named.repository, {}).get(named.tag)
            if old is not None:
                self._drop(old)
        if all(entry.text != other.text for other in self.entries_of(entry.descriptor.digest)):
            self._add(entry)

    def _add(self, entry: Entry) -> None:
        self._by_digest[entry.descriptor.digest].append(entry)
        if entry.subject:
            self._by_subject[entry.subject].append(entry)

        names = _names_of(entry)
        if names.own is not None:
            self._named[names.own.repository][names.own.tag] = entry
        for name in names.full:
            self._called[name.repository][name.tag] = entry
        if names.bare:
            self._bare[names.bare] = entry
        for tag in names.tags():
            if tag.startswith(_LIST_TAGS):
                self._lists[tag].append(entry)

    def _drop(self, entry: Entry) -> None:
        self._by_digest[entry.descriptor.digest].remove(entry)
        names = _names_of(entry)
        for tag in names.tags():
            if entry in self._lists.get(tag, ()):
                self._lists[tag].remove(entry)
        own = [] if names.own is None else [names.own]
        for table, table_names in ((self._named, own), (self._called, names.full)):
            for name in table_names:
                if table.get(name.repository, {}).get(name.tag) is entry:
                    del table[name.repository][name.tag]

    def dump(self) -> bytes:
        """Return the bytes of `index.json`, an entry a line; ContentError where they are too many."""
        entries = {entry.text: entry for entry in self}.values()
        ordered = sorted(
            entries, key=lambda entry: (entry.name, entry.descriptor.digest, entry.text)
        )
        lines = ",\n".join(entry.text for entry in ordered)
        annotations = dict(self._annotations)
        if self.left_out:
            annotations[_LEFT_OUT] = "\n".join(dump_lines(self.left_out))

        head = json.dumps({"schemaVersion": 2, "mediaType": _INDEX_TYPE}, separators=(",", ":"))
        tail = ""
        if annotations:
            text = json.dumps(dict(sorted(annotations.items())), separators=(",", ":"))
            tail = f',\n"annotations":{text}'
        body = f'{head[:-1]},"manifests":[\n{lines}\n]{tail}}}\n'.encode()
        if len(body) > LARGEST_INDEX:
            raise ContentError(f"index.json would have more than {LARGEST_INDEX} bytes")
        return body


def parse_index(body: bytes) -> Index:
    """Read an `index.json`; ContentError says what is wrong with it."""
    document = load_json(body, "index.json of the layout", most_values=_MOST_VALUES)
    entries = document.get("manifests")
    annotations = document.get("annotations")
    if not isinstance(entries, list):
        raise ContentError("index.json has no list of manifests")
    if not isinstance(annotations, dict):
        annotations = {}

    index = Index({key: text for key, text in annotations.items() if isinstance(text, str)})
    for number, entry in enumerate(entries):
        index._add(_read_entry(entry, f"index.json: manifests[{number}]"))
    return index


# Names.


class _Name(NamedTuple):
    repository: str
    tag: str


def _split_name(name: str) -> _Name | None:
    """Read `REPO:TAG`; None for anything else."""
    repository, colon, tag = name.rpartition(":")
    if colon and is_repository(repository) and is_tag(tag):
        return _Name(repository, tag)
    return None


class _Names(NamedTuple):
    """What an entry is called."""

    # `REPO:TAG`, as this program writes it.
    own: _Name | None
    # By other tools, with the host and without.
    full: list[_Name]
    # A tag alone, or nothing.
    bare: str

    def tags(self) -> set[str]:
        names = [*self.full, self.own] if self.own is not None else self.full
        return {*(name.tag for name in names), self.bare} - {""}


def _names_of(entry: Entry) -> _Names:
    """Return the names of an entry. Other tools put a full name where this one puts `REPO:TAG`."""
    own = _split_name(entry.name)
    if own is not None and not _begins_with_host(own.repository):
        return _Names(own, [], "")
    full = _full_names(entry.name if ":" in entry.name else entry.full_name)
    is_bare = not entry.full_name and is_tag(entry.name)
    return _Names(own, full, entry.name if is_bare else "")


def _full_names(text: str) -> list[_Name]:
    """Read a full name: with its host, and without."""
    if not text:
        return []
    try:
        reference = parse_reference(text)
    except ConfigError:
        return []
    if reference.tag is None:
        return []
    names = [_Name(reference.repository, reference.tag)]
    with_host = f"{reference.host}/{reference.repository}"
    if is_repository(with_host):
        names.append(_Name(with_host, reference.tag))
    return names


def _begins_with_host(repository: str) -> bool:
    first, slash, _ = repository.partition("/")
    return bool(slash) and ("." in first or first == "localhost")


# Lines of receipts, and of what was left out.


def read_receipt(text: str) -> dict[str, str]:
    """Read lines `DIGEST HOST/REPO`, as an audit writes them, or `DIGEST REPO`; return the repository
    of each digest. The host may have another name where the layout is read. ContentError names the
    line that is none.
    """
    return _read_lines(text, _without_host)


def read_lines(text: str) -> dict[str, str]:
    """Read lines `DIGEST REPO`, as `dump_lines` writes them; ContentError names the line that is none."""
    return _read_lines(text, str)


def dump_lines(repositories: Mapping[str, str]) -> list[str]:
    return [f"{digest} {repository}" for digest, repository in sorted(repositories.items())]


def _read_lines(text: str, repository_of: Callable[[str], str]) -> dict[str, str]:
    repositories = dict[str, str]()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        digest, _, place = line.strip().partition(" ")
        repository = repository_of(place)
        try:
            check_digest(digest)
        except ContentError as error:
            raise ContentError(f"line {number}: {error.message}") from error
        if not is_repository(repository):
            raise ContentError(f"line {number}: expected DIGEST REPO")
        repositories.setdefault(digest, repository)
    return repositories


def _without_host(place: str) -> str:
    if place.startswith(f"{LAYOUT_SCHEME}:"):
        return place.rpartition("//")[2]
    first, slash, rest = place.partition("/")
    is_host = slash and ("." in first or ":" in first or first == "localhost")
    return rest if is_host else place
