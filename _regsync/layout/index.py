"""Parse and write the `index.json` of an image layout.

Owns: the names of images in layouts of this program and of other tools, the entries of artifacts, the
    lines of blobs that were left out, the order of entries and lines.
May not know: files, what is copied.
Invariants: equal content gives equal bytes. Fields that another tool wrote to an entry are kept.
Follows: OCI image-spec 1.1 image-layout.md, docs/design.md section 13.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from _regsync.crypto import DIGEST_HEX_LENGTHS
from _regsync.errors import ConfigError, ContentError
from _regsync.oci import (
    Descriptor,
    Manifest,
    begins_with_host,
    check_digest,
    is_repository,
    is_tag,
    load_json,
    parse_reference,
    read_descriptor,
    referrers_tag,
)

# Bytes of an `index.json`, written or read.
LARGEST_INDEX = 64 * 1024 * 1024

# JSON values in an `index.json`. The limit allows 100,000 entries of this program.
_MOST_VALUES = 1_000_000

_INDEX_TYPE = "application/vnd.oci.image.index.v1+json"

# Annotations of an entry.
_NAME = "org.opencontainers.image.ref.name"  # `REPO:TAG`; other tools use other forms
_FULL_NAME = "io.containerd.image.name"  # the image's reference at its source, with the host
_SUBJECT = "dev.regsync.subject"  # the digest of an artifact's subject
_REPOSITORY = "dev.regsync.repository"  # the repository of an image without a tag
# The annotations that this module gives a meaning to.
_OWN_KEYS = (_NAME, _FULL_NAME, _SUBJECT, _REPOSITORY)

# The beginnings of fallback tags: `sha256-` and `sha512-`.
_LIST_TAG_PREFIXES = tuple(f"{algorithm}-" for algorithm in DIGEST_HEX_LENGTHS)

# An annotation of the index, with a line `DIGEST REPO` for each blob that was left out.
_LEFT_OUT = "dev.regsync.left-out"


@dataclass(frozen=True, eq=False)
class Entry:
    """One entry of `index.json`."""

    descriptor: Descriptor
    # The JSON object of the entry, including fields of other tools.
    document: Mapping[str, Any]

    @cached_property
    def text(self) -> str:
        """The entry as JSON. All but ASCII is escaped, because a lone surrogate has no encoding."""
        return json.dumps(self.document, separators=(",", ":"))

    @property
    def name(self) -> str:
        return self.descriptor.annotations.get(_NAME, "")

    @property
    def full_name(self) -> str:
        return self.descriptor.annotations.get(_FULL_NAME, "")

    @property
    def subject(self) -> str:
        return self.descriptor.annotations.get(_SUBJECT, "")

    @property
    def has_name(self) -> bool:
        """Whether the entry is an image with a name of any tool. Artifacts have no names."""
        annotations = self.descriptor.annotations
        return any(key in annotations for key in (_NAME, _FULL_NAME, _REPOSITORY))

    @property
    def referrer(self) -> Descriptor:
        """The artifact's entry in a referrers list, without the annotations of a layout."""
        return self.descriptor._replace(annotations=_without_own(self.descriptor.annotations))


def image_entry(manifest: Manifest, repository: str, tag: str, full_name: str) -> Entry:
    """Return the entry of an image with a tag. `full_name` is its reference at its source, or ""."""
    annotations = {_NAME: f"{repository}:{tag}"}
    if full_name:
        annotations[_FULL_NAME] = full_name
    return _entry(manifest, annotations)


def unnamed_entry(manifest: Manifest, repository: str) -> Entry:
    """Return the entry of an artifact, or of an image without a tag."""
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
    # The descriptor is parsed from the document, so that the two agree.
    return _read_entry(document, "manifests")


def _without_own(annotations: Mapping[str, str]) -> dict[str, str]:
    """Return the annotations that have no meaning to this module.

    The manifest of an artifact may have annotations that would give its entry a name.
    """
    return {key: value for key, value in annotations.items() if key not in _OWN_KEYS}


def _read_entry(document: Any, where: str) -> Entry:
    return Entry(read_descriptor(document, where), document)


class Index:
    """The entries of one layout.

    Tools write the names of images in three forms:

        own    `REPO:TAG`, written by this program
        full   `HOST/REPO:TAG`
        bare   `TAG`

    If two entries have the same repository and tag, the own form takes precedence over the full
    form. Bare names count only in a layout without other names. Such a layout is one repository
    that answers to every name.
    """

    def __init__(self, annotations: Mapping[str, str] | None = None) -> None:
        # Entries with own names, by repository and tag.
        self._own_names = defaultdict[str, dict[str, Entry]](dict)
        # Entries with full names, by repository and tag. The repository is with and without the
        # host.
        self._full_names = defaultdict[str, dict[str, Entry]](dict)
        # Entries with bare names, by tag.
        self._bare_names = dict[str, Entry]()

        # All entries, by digest.
        self._entries_by_digest = defaultdict[str, list[Entry]](list)
        # Artifacts, by the digest of their subject.
        self._artifacts_by_subject = defaultdict[str, list[Entry]](list)
        # Whether `_artifacts_by_subject` includes the artifacts of other tools. Their entries do
        # not have the subject, so their manifests must be read (`add_subjects`).
        self.knows_all_subjects = False
        # Referrers lists, by their fallback tag, of all repositories.
        self._referrers_lists = defaultdict[str, list[Entry]](list)

        annotations = dict(annotations or {})
        # The blobs that were left out of the layout because the far side (the registry to which it
        # is carried) has them. By digest, a repository of the far side.
        self.left_out = read_lines(annotations.pop(_LEFT_OUT, ""))
        # The annotations of other tools.
        self._annotations = annotations

    def __iter__(self) -> Iterator[Entry]:
        return chain.from_iterable(self._entries_by_digest.values())

    # Queries.

    def find(self, repository: str, tag: str) -> Entry | None:
        """Return the entry of a tag in a repository. Returns None if there is no such tag."""
        for names in (self._own_names, self._full_names):
            if tag in names.get(repository, {}):
                return names[repository][tag]
        return self._valid_bare_names().get(tag)

    def tags(self, repository: str) -> dict[str, str]:
        """Return the tags of a repository, each with its digest."""
        # Later items take precedence.
        entries = {
            **self._valid_bare_names(),
            **self._full_names.get(repository, {}),
            **self._own_names.get(repository, {}),
        }
        return {tag: entry.descriptor.digest for tag, entry in entries.items()}

    def entries_of(self, digest: str) -> list[Entry]:
        return self._entries_by_digest.get(digest, [])

    def referrers(self, digest: str) -> list[Entry]:
        """Return the entries of artifacts whose subject is known to be this digest."""
        return self._artifacts_by_subject.get(digest, [])

    def unnamed_entries(self) -> list[Entry]:
        """Return the entries without a name and a subject. They may be artifacts of other tools."""
        return [entry for entry in self if not (entry.has_name or entry.subject)]

    def add_subjects(self, subjects: Iterable[tuple[Entry, str]]) -> None:
        """Record the artifacts of other tools, with the digests of their subjects."""
        for entry, digest in subjects:
            self._artifacts_by_subject[digest].append(entry)
        self.knows_all_subjects = True

    def fallback_lists(self, digest: str) -> list[Entry]:
        """Return the entries under the fallback tag of a digest, in all repositories."""
        return self._referrers_lists.get(referrers_tag(digest), [])

    def _valid_bare_names(self) -> Mapping[str, Entry]:
        return {} if self._own_names or self._full_names else self._bare_names

    # Changes.

    def put(self, entry: Entry) -> None:
        """Add an entry in place of the entry with the same `REPO:TAG`.

        An entry is not added a second time, because other tools would list both.
        """
        name = _split_name(entry.name)
        if name is not None:
            old = self._own_names.get(name.repository, {}).get(name.tag)
            if old is not None:
                self._remove(old)
        present = self.entries_of(entry.descriptor.digest)
        if entry.text not in [same_digest.text for same_digest in present]:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        """Add an entry, and remove no other. Its names now find this entry."""
        self._entries_by_digest[entry.descriptor.digest].append(entry)
        if entry.subject:
            self._artifacts_by_subject[entry.subject].append(entry)

        names = _names_of(entry)
        if names.own_repository:
            self._own_names[names.own_repository][names.tag] = entry
        for repository in names.full_repositories:
            self._full_names[repository][names.tag] = entry
        if names.is_bare:
            self._bare_names[names.tag] = entry
        if names.tag.startswith(_LIST_TAG_PREFIXES):
            self._referrers_lists[names.tag].append(entry)

    def _remove(self, entry: Entry) -> None:
        """Remove an image with an own name. Its full names may belong to a later entry by now."""
        self._entries_by_digest[entry.descriptor.digest].remove(entry)
        names = _names_of(entry)
        if names.tag.startswith(_LIST_TAG_PREFIXES):
            self._referrers_lists[names.tag].remove(entry)
        del self._own_names[names.own_repository][names.tag]
        for repository in names.full_repositories:
            if self._full_names[repository].get(names.tag) is entry:
                del self._full_names[repository][names.tag]

    def dump(self) -> bytes:
        """Return the bytes of `index.json`, with one entry in each line.

        Raises ContentError if there are more than LARGEST_INDEX bytes.
        """
        # Another tool may have written equal entries. They are written once.
        entries = {entry.text: entry for entry in self}.values()
        # A fixed order, so that the bytes do not depend on the order in which entries were added.
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
    """Parse the bytes of an `index.json`. Raises ContentError if they are invalid."""
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


def _split_name(name: str) -> _Name | None:
    """Split `REPO:TAG`. Returns None if the name has another form."""
    repository, colon, tag = name.rpartition(":")
    if colon and is_repository(repository) and is_tag(tag):
        return _Name(repository, tag)
    return None


class _Names(NamedTuple):
    """The names of an entry, in the forms that `Index` describes. All have the same tag."""

    tag: str = ""  # empty if the entry has no name
    own_repository: str = ""  # empty if the entry has no own name
    # The repository of the full name without the host and, if that is valid, with the host.
    full_repositories: tuple[str, ...] = ()

    @property
    def is_bare(self) -> bool:
        return bool(self.tag) and not self.own_repository and not self.full_repositories


def _names_of(entry: Entry) -> _Names:
    """Return the names under which an entry is found, from its two annotations for names."""
    own = _split_name(entry.name)
    if own is not None and not begins_with_host(own.repository):
        return _Names(own.tag, own.repository)

    # Some tools write the full name to the annotation in which this program writes `REPO:TAG`. A
    # name like `ghcr.io/app:v1` may be of either form, so it counts as both.
    full_name = entry.name if ":" in entry.name else entry.full_name
    if not full_name:
        return _Names(entry.name) if is_tag(entry.name) else _Names()
    names = _parse_full_name(full_name)
    return names if own is None else names._replace(tag=own.tag, own_repository=own.repository)


def _parse_full_name(text: str) -> _Names:
    """Parse `HOST/REPO:TAG`. A text without a tag, or of another form, is no name."""
    try:
        reference = parse_reference(text)
    except ConfigError:
        return _Names()
    if reference.tag is None:
        return _Names()
    host = reference.registry.rpartition("://")[2]
    with_host = f"{host}/{reference.repository}"
    repositories = [reference.repository, with_host]
    return _Names(reference.tag, full_repositories=tuple(filter(is_repository, repositories)))


# Lines about blobs.


def read_lines(
    text: str, repository_of: Callable[[str], str] = lambda name: name
) -> dict[str, str]:
    """Parse lines of the form `DIGEST REPO`. Returns the repository of each digest.

    `repository_of` converts the second field to the name of a repository. Empty lines and comments
    (`#`) are skipped. If several lines have the same digest, the first counts. Raises ContentError,
    which names the line, if a line is invalid.
    """
    repositories = dict[str, str]()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        digest, _, second_field = line.strip().partition(" ")
        repository = repository_of(second_field)
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
