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

# Annotations of an entry.
_NAME = "org.opencontainers.image.ref.name"  # `REPO:TAG`; other tools write something else
_FULL_NAME = "io.containerd.image.name"  # what the image is called at its source, with the host
_SUBJECT = "dev.regsync.subject"  # of an artifact: the digest that it refers to
_REPOSITORY = "dev.regsync.repository"  # of an image without a tag
_OWN_KEYS = (_NAME, _FULL_NAME, _SUBJECT, _REPOSITORY)

# What the fallback tag of a list of referrers begins with: `sha256-` and so on.
_LIST_TAG_PREFIXES = tuple(f"{algorithm}-" for algorithm in DIGEST_HEX_LENGTHS)

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
        """Whether it is an image with some name, of this program or another: artifacts have none."""
        annotations = self.descriptor.annotations
        return any(key in annotations for key in (_NAME, _FULL_NAME, _REPOSITORY))

    @property
    def referrer(self) -> Descriptor:
        """The artifact's entry in a list of referrers, without annotations that only a layout has."""
        return self.descriptor._replace(annotations=_without_own(self.descriptor.annotations))


def image_entry(manifest: Manifest, repository: str, tag: str, full_name: str) -> Entry:
    """Return the entry of an image under a tag; `full_name` is what it is called at its source."""
    annotations = {_NAME: f"{repository}:{tag}"}
    if full_name:
        annotations[_FULL_NAME] = full_name
    return _entry(manifest, annotations)


def unnamed_entry(manifest: Manifest, repository: str) -> Entry:
    """Return the entry of an artifact, or of an image that was copied by its digest alone."""
    if manifest.subject is None:
        return _entry(manifest, {_REPOSITORY: repository})
    annotations = _without_own(manifest.annotations)
    annotations[_SUBJECT] = manifest.subject.digest
    return _entry(manifest, annotations, manifest.artifact_type)


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
    # Read as any entry of an index is, so that its descriptor agrees with what is written.
    return _read_entry(document, "manifests")


def _without_own(annotations: Mapping[str, str]) -> dict[str, str]:
    """Return annotations without those that a layout reads. An artifact's manifest may have some of
    its own, which would name its entry.
    """
    return {key: value for key, value in annotations.items() if key not in _OWN_KEYS}


def _read_entry(document: Any, where: str) -> Entry:
    return Entry(read_descriptor(document, where), document)


class Index:
    """The entries of one layout, found by the names that images have in it.

    Tools write names in three forms: `REPO:TAG` (this program), a full name with the host, a tag
    alone. Where one image is called the same in two forms, the earlier form counts. Tags alone count
    only in a layout without longer names: it is one repository, of whatever name is asked for.
    """

    def __init__(self, annotations: Mapping[str, str] | None = None) -> None:
        # Images by repository and tag, in the first two forms of names; by tag, in the third.
        self._named = defaultdict[str, dict[str, Entry]](dict)
        self._full_named = defaultdict[str, dict[str, Entry]](dict)
        self._bare = dict[str, Entry]()

        self._by_digest = defaultdict[str, list[Entry]](list)
        # Artifacts by the digest that they refer to.
        self._by_subject = defaultdict[str, list[Entry]](list)
        # Whether the artifacts of other tools are among these, whose entries do not name the subject.
        self.knows_all_subjects = False
        # Lists of referrers by their fallback tag, of all repositories.
        self._lists = defaultdict[str, list[Entry]](list)

        annotations = dict(annotations or {})
        # Blobs that the layout lacks because the far side has them: a repository there, by digest.
        self.left_out = read_lines(annotations.pop(_LEFT_OUT, ""))
        self._annotations = annotations

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._by_digest.values())

    def __iter__(self) -> Iterator[Entry]:
        return chain.from_iterable(self._by_digest.values())

    # What there is.

    def find(self, repository: str, tag: str) -> Entry | None:
        """Return what a tag names in a repository; None where it names nothing."""
        # In the order in which the forms of names count.
        for names in (self._named, self._full_named):
            if tag in names.get(repository, {}):
                return names[repository][tag]
        return self._bare_if_alone().get(tag)

    def tags(self, repository: str) -> dict[str, str]:
        """Return the tags of a repository, each with its digest."""
        # A form of names that counts more replaces the entries of the others.
        entries = {
            **self._bare_if_alone(),
            **self._full_named.get(repository, {}),
            **self._named.get(repository, {}),
        }
        return {tag: entry.descriptor.digest for tag, entry in entries.items()}

    def repositories(self) -> list[str]:
        """Return the repositories that have a name."""
        return sorted({*self._named, *self._full_named})

    def entries_of(self, digest: str) -> list[Entry]:
        return self._by_digest.get(digest, [])

    def referrers(self, digest: str) -> list[Entry]:
        """Return the entries of artifacts that refer to a digest, as far as that is known."""
        return self._by_subject.get(digest, [])

    def unnamed_entries(self) -> list[Entry]:
        """Return the entries with neither a name nor a subject: other tools write artifacts so."""
        return [entry for entry in self if not (entry.is_named or entry.subject)]

    def add_subject(self, entry: Entry, digest: str) -> None:
        """Note what an artifact refers to, which only its manifest says."""
        self._by_subject[digest].append(entry)

    def fallback_lists(self, digest: str) -> list[Entry]:
        """Return what the fallback tag of a digest names in each repository."""
        return self._lists.get(referrers_tag(digest), [])

    def _bare_if_alone(self) -> Mapping[str, Entry]:
        return {} if self._named or self._full_named else self._bare

    # Changes.

    def put(self, entry: Entry) -> None:
        """Add an entry; a tag that named something else is moved."""
        name = _split_name(entry.name)
        if name is not None:
            old = self._named.get(name.repository, {}).get(name.tag)
            if old is not None:
                self._drop(old)
        # The same entry twice would be listed twice by other tools.
        is_there = any(entry.text == same.text for same in self.entries_of(entry.descriptor.digest))
        if not is_there:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        """Add an entry as it was read. Of two with one name the later one is found by it."""
        self._by_digest[entry.descriptor.digest].append(entry)
        if entry.subject:
            self._by_subject[entry.subject].append(entry)

        names = _names_of(entry)
        if names.own is not None:
            self._named[names.own.repository][names.own.tag] = entry
        for name in names.full:
            self._full_named[name.repository][name.tag] = entry
        if names.bare:
            self._bare[names.bare] = entry
        for tag in names.tags():
            if tag.startswith(_LIST_TAG_PREFIXES):
                self._lists[tag].append(entry)

    def _drop(self, entry: Entry) -> None:
        """Remove an entry, and those of its names that no later entry has taken."""
        self._by_digest[entry.descriptor.digest].remove(entry)
        names = _names_of(entry)
        for tag in names.tags():
            if entry in self._lists.get(tag, ()):
                self._lists[tag].remove(entry)

        if names.own is not None:
            _remove_name(self._named, names.own, entry)
        for name in names.full:
            _remove_name(self._full_named, name, entry)

    def dump(self) -> bytes:
        """Return the bytes of `index.json`, an entry a line; ContentError where they are too many."""
        # Equal entries are written once: another tool may have written one twice.
        entries = {entry.text: entry for entry in self}.values()
        ordered = sorted(
            entries, key=lambda entry: (entry.name, entry.descriptor.digest, entry.text)
        )
        lines = ",\n".join(entry.text for entry in ordered)

        annotations = dict(self._annotations)
        if self.left_out:
            annotations[_LEFT_OUT] = "\n".join(dump_lines(self.left_out))

        members = [
            '"schemaVersion":2',
            f'"mediaType":"{_INDEX_TYPE}"',
            f'"manifests":[\n{lines}\n]',
        ]
        if annotations:
            text = json.dumps(dict(sorted(annotations.items())), separators=(",", ":"))
            members.append(f'\n"annotations":{text}')
        body = f"{{{','.join(members)}}}\n".encode()
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
        index.add(_read_entry(entry, f"index.json: manifests[{number}]"))
    return index


# Names.


class _Name(NamedTuple):
    repository: str
    tag: str


def _remove_name(images: Mapping[str, dict[str, Entry]], name: _Name, entry: Entry) -> None:
    """Remove a name from a table by repository and tag, where it is still this entry's."""
    tags = images.get(name.repository, {})
    if tags.get(name.tag) is entry:
        del tags[name.tag]


def _split_name(name: str) -> _Name | None:
    """Read `REPO:TAG`; None for anything else."""
    repository, colon, tag = name.rpartition(":")
    if colon and is_repository(repository) and is_tag(tag):
        return _Name(repository, tag)
    return None


class _Names(NamedTuple):
    """What an entry is called, in each of the three forms that `Index` describes."""

    # `REPO:TAG`, as this program writes it.
    own: _Name | None
    # A full name, `HOST/REPO:TAG`: once with the host as a part of the repository, once without it.
    full: list[_Name]
    # A tag alone; "" where the entry has another name, or none.
    bare: str

    def tags(self) -> set[str]:
        tags = {name.tag for name in self.full}
        if self.own is not None:
            tags.add(self.own.tag)
        if self.bare:
            tags.add(self.bare)
        return tags


def _names_of(entry: Entry) -> _Names:
    """Return the names of an entry in each form."""
    own = _split_name(entry.name)
    if own is not None and not _begins_with_host(own.repository):
        return _Names(own, full=[], bare="")

    # Some tools write the full name where this program writes `REPO:TAG`. `ghcr.io/app:v1` may be
    # either, and is found by both.
    full = _full_names(entry.name if ":" in entry.name else entry.full_name)
    is_bare_tag = is_tag(entry.name) and not entry.full_name
    return _Names(own, full, bare=entry.name if is_bare_tag else "")


def _full_names(text: str) -> list[_Name]:
    """Read a full name: once with its host in the repository, and once without."""
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


# Lines about blobs.


def read_lines(
    text: str, repository_of: Callable[[str], str] = lambda place: place
) -> dict[str, str]:
    """Read lines `DIGEST REPO`, as `dump_lines` writes them; return the repository of each digest.

    `repository_of` turns what stands behind the digest into a repository. Empty lines and comments
    (`#`) are skipped; ContentError names any other line that is wrong.
    """
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


def dump_lines(repositories: Mapping[str, str]) -> list[str]:
    return [f"{digest} {repository}" for digest, repository in sorted(repositories.items())]
