"""The lock: the digest of each selected tag, for review, with one line of JSON for each image.

Owns: the lines of a lock, how they are read and ordered, how two locks differ.
May not know: registries, files, clocks.
Invariants: two locks with equal content have equal bytes, so that the change of one image is the
change of one line. An invalid line is an error, and is never skipped.
Follows: docs/design.md section 12 ("Lock").
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple

from _regsync.config import ArtifactRule, MappingRule
from _regsync.crypto import hash_hex
from _regsync.errors import ConfigError, ContentError, Problem
from _regsync.oci import check_digest, is_tag, parse_platform, split_full_name
from _regsync.state import RepositoryKey, SeenKey
from _regsync.tags import TagRule
from _regsync.text import parse_time, printable, time_text

# The version of the format. The first line has this version and not that of the program, because a
# new version of the program does not change the lock.
_VERSION = 1

# The field of the first line, and the fields of other lines.
_VERSION_FIELD = "lock"
_MAPPING_FIELDS = frozenset({"mapping", "platforms", "rules", "artifacts"})
_IMAGE_FIELDS = frozenset({"source", "platforms", "digest", "pushed", "artifacts", "first_seen"})
_ARTIFACT_FIELDS = frozenset({"digest", "type", "subject", "tag"})

# The beginnings of the lines with which git marks the conflicts of a merge.
_CONFLICT_MARKS = (b"<<<<<<<", b"|||||||", b"=======", b">>>>>>>")

# Invalid lines that one error names.
_MOST_PROBLEMS = 50

_REMEDY = "run `regsync lock`"

# A tuple of strings, or of tuples of strings.
_SortKey = tuple[Any, ...]

# A sorted platform filter. None if all platforms are copied.
Platforms = tuple[str, ...] | None


class SourceKey(NamedTuple):
    """A source repository with a platform filter.

    Each filter has its own lines in a lock, because an index that is trimmed with another filter
    has another digest.
    """

    # `HOST/REPOSITORY`, as in reports. On Docker Hub it includes `library/`.
    repository: str
    platforms: Platforms

    def __str__(self) -> str:
        if self.platforms is None:
            return self.repository
        return f"{self.repository} ({', '.join(self.platforms)})"

    def sort_key(self) -> _SortKey:
        return self.repository, self.platforms or ()

    def seen_key(self, digest: str) -> SeenKey:
        """Return the key of the time when a digest was first seen in this repository."""
        return SeenKey(RepositoryKey(*split_full_name(self.repository)), digest)


class LockedMapping(NamedTuple):
    """The line of a mapping: its source, and hashes of the rules that select tags and artifacts."""

    source: SourceKey
    # The SHA-256 of the mapping's `tags` and `artifacts`, in hex. `--locked` refuses a mapping with
    # another hash.
    rules_hash: str
    # The SHA-256 of `artifacts` alone, in hex. None if they have their defaults. If it is
    # unchanged, a new lock takes the artifacts of unchanged images from the old lock, without a
    # request.
    artifacts_hash: str | None = None


class LockedArtifact(NamedTuple):
    """One artifact of an image, or of another artifact."""

    digest: str
    # The digest of the manifest that the artifact refers to.
    subject: str
    # The artifact type. For a cosign tag, the media types of config and layers. Empty if unknown.
    types: tuple[str, ...] = ()
    # The cosign tag of the artifact. None for an artifact from a referrers list.
    tag: str | None = None


class LockedImage(NamedTuple):
    """The line of an image: the digests of a tag when the lock was made."""

    source: SourceKey
    tag: str
    # The digest at the source.
    digest: str
    # The digest at the targets if the index is trimmed to its platforms. None if it is not trimmed.
    pushed: str | None
    # Each artifact comes after its subject.
    artifacts: tuple[LockedArtifact, ...]
    # When the digest was first seen in the repository, in seconds since 1970.
    first_seen: int

    @property
    def name(self) -> str:
        """The image's full reference at the source."""
        return f"{self.source.repository}:{self.tag}"

    @property
    def digest_at_target(self) -> str:
        return self.pushed or self.digest

    def sort_key(self) -> _SortKey:
        return self.source.sort_key(), self.tag

    def __str__(self) -> str:
        if self.source.platforms is None:
            return self.name
        return f"{self.name} ({', '.join(self.source.platforms)})"


class Lock:
    """The mappings and images of a lock."""

    def __init__(
        self, mappings: Iterable[LockedMapping] = (), images: Iterable[LockedImage] = ()
    ) -> None:
        self.mappings = frozenset(mappings)
        # The images by source and tag.
        self._images: dict[SourceKey, dict[str, LockedImage]] = {}
        for image in images:
            self._images.setdefault(image.source, {})[image.tag] = image

    def __len__(self) -> int:
        return sum(map(len, self._images.values()))

    def __iter__(self) -> Iterator[LockedImage]:
        """Yield the images in the order of their lines."""
        images = (image for by_tag in self._images.values() for image in by_tag.values())
        return iter(sorted(images, key=LockedImage.sort_key))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lock):
            return NotImplemented
        return self.mappings == other.mappings and self._images == other._images

    def images_of(self, source: SourceKey) -> Mapping[str, LockedImage]:
        """Return the images of a source by their tags."""
        return self._images.get(source, {})

    def first_seen_times(self) -> dict[SeenKey, int]:
        """Return the time when each digest was first seen, in seconds since 1970."""
        times = dict[SeenKey, int]()
        for image in self:
            key = image.source.seen_key(image.digest)
            times[key] = min(image.first_seen, times.get(key, image.first_seen))
        return times

    def check(self, mappings: Iterable[MappingRule]) -> None:
        """Raise ConfigError if a mapping is not in the lock, or has other rules in the lock."""
        locked_sources = {mapping.source for mapping in self.mappings}
        problems = list[str]()
        for rule in mappings:
            mapping = locked_mapping(rule)
            if mapping in self.mappings:
                continue
            problem = "is not in the lock"
            if mapping.source in locked_sources:
                problem = "has changed since the lock was written"
            problems.append(f"mappings[{rule.index}], from {mapping.source}, {problem}")

        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise ConfigError(f"{problems[0]}{more}", hint=f"{_REMEDY} with this configuration")


def source_key(rule: MappingRule) -> SourceKey:
    """Return the source repository and platform filter of a mapping."""
    platforms: Platforms = None
    if rule.platforms is not None:
        platforms = tuple(sorted({str(platform) for platform in rule.platforms}))
    return SourceKey(rule.source.lock_name(rule.source_repository), platforms)


def locked_mapping(rule: MappingRule) -> LockedMapping:
    """Return the line of a mapping in a lock."""
    rules = {"tags": _set_fields(rule.tags), "artifacts": _set_fields(rule.artifacts)}
    artifacts = artifact_rule(rule)
    artifacts_hash = None
    if artifacts != ArtifactRule():
        artifacts_hash = _hash(_set_fields(artifacts))
    return LockedMapping(source_key(rule), rules_hash=_hash(rules), artifacts_hash=artifacts_hash)


def artifact_rule(rule: MappingRule) -> ArtifactRule:
    """Return a mapping's artifact rule, with only the fields that select artifacts."""
    return rule.artifacts._replace(require_artifacts=False)


def _set_fields(rule: TagRule | ArtifactRule) -> dict[str, object]:
    """Return the fields of a rule that differ from their defaults."""
    # Defaults are left out so that a field of a later version does not change the hash of a rule
    # without this field.
    defaults = rule._field_defaults
    return {name: value for name, value in rule._asdict().items() if value != defaults[name]}


def _hash(fields: Mapping[str, object]) -> str:
    return hash_hex("sha256", json.dumps(fields, sort_keys=True).encode())


# Writing.


def lines_of(lock: Lock) -> Iterator[str]:
    """Yield the lines of a lock, without line ends."""
    yield _json_line({_VERSION_FIELD: _VERSION})

    def order(mapping: LockedMapping) -> _SortKey:
        return mapping.source.sort_key(), mapping.rules_hash

    for mapping in sorted(lock.mappings, key=order):
        fields = {
            "mapping": mapping.source.repository,
            **_platforms_field(mapping.source.platforms),
            "rules": mapping.rules_hash,
        }
        if mapping.artifacts_hash is not None:
            fields["artifacts"] = mapping.artifacts_hash
        yield _json_line(fields)
    for image in lock:
        yield _json_line(image_fields(image))


def image_fields(image: LockedImage) -> dict[str, object]:
    """Return the JSON fields of an image's line."""
    fields: dict[str, object] = {
        "source": image.name,
        **_platforms_field(image.source.platforms),
        "digest": image.digest,
    }
    if image.pushed is not None:
        fields["pushed"] = image.pushed
    if image.artifacts:
        fields["artifacts"] = [_artifact_fields(artifact) for artifact in image.artifacts]
    fields["first_seen"] = time_text(image.first_seen)
    return fields


def _artifact_fields(artifact: LockedArtifact) -> dict[str, object]:
    fields: dict[str, object] = {"digest": artifact.digest}
    if len(artifact.types) == 1:
        fields["type"] = artifact.types[0]
    elif artifact.types:
        fields["type"] = list(artifact.types)
    fields["subject"] = artifact.subject
    if artifact.tag is not None:
        fields["tag"] = artifact.tag
    return fields


def _platforms_field(platforms: Platforms) -> dict[str, object]:
    return {} if platforms is None else {"platforms": list(platforms)}


def _json_line(fields: Mapping[str, object]) -> str:
    return json.dumps(fields)


# Reading.


def read_lock(lines: Iterable[bytes], name: str) -> Lock:
    """Parse the lines of a lock. `name` is the name of its file, for errors.

    Raises ConfigError, which names each invalid line.
    """
    reader = _LockReader()
    # If a line is invalid, it may be the line of a mapping that seems to be missing.
    problems = reader.read(lines) or list(islice(reader.images_without_mapping(), _MOST_PROBLEMS))
    if problems:
        raise ConfigError(
            f"{printable(name)} is not a lock",
            problems=tuple(Problem(name, line, 1, "", printable(text)) for line, text in problems),
            hint=f"restore the file as it was committed, or remove it; then {_REMEDY}",
        )
    return Lock(reader.mappings, reader.images)


class _Problem(NamedTuple):
    line: int  # the number of the line, from 1; 0 for the whole file
    text: str


class _WrongLine(ValueError):
    """A line is not valid in a lock."""


class _Unreadable(_WrongLine):
    """A line is not valid, and the lines after it cannot be read either."""


class _LockReader:
    """The mappings and images in the lines of a lock that have been read so far."""

    def __init__(self) -> None:
        self.mappings = set[LockedMapping]()
        self.images = list[LockedImage]()

        # The number of the line of each mapping and image, to detect duplicates. The key is a
        # LockedMapping, or the source and tag of an image.
        self._line_numbers = dict[object, int]()
        # Sources by their repository and platforms as written in a line. The images of a source
        # share one SourceKey, which saves memory in a lock of 100,000 images.
        self._sources = dict[tuple[str, str], SourceKey]()

    def read(self, lines: Iterable[bytes]) -> list[_Problem]:
        """Read all lines, and return their problems. Empty lines are skipped.

        Reading stops after _MOST_PROBLEMS problems, and after an invalid first line. If a line
        shows that the file cannot be read at all, its problem is the only one that is returned.
        """
        problems = list[_Problem]()
        is_lock = False  # True after the first line, whose version shows it
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                fields = _parse_line(line)
                if is_lock:
                    self._add_line(fields, number)
                else:
                    _check_version_line(fields)
                    is_lock = True
            except _Unreadable as error:
                return [_Problem(number, str(error))]
            except (ContentError, ValueError) as error:
                problems.append(_Problem(number, str(error)))
                if not is_lock or len(problems) == _MOST_PROBLEMS:
                    return problems
        return problems if is_lock else [_Problem(line=0, text="the file is empty")]

    def _add_line(self, fields: Mapping[str, Any], number: int) -> None:
        """Add the mapping or image of a line. Raises ValueError or ContentError if it is invalid."""
        if "mapping" in fields:
            mapping = self._parse_mapping(fields)
            self._record_line(mapping, number)
            self.mappings.add(mapping)
        elif "source" in fields:
            image = self._parse_image(fields)
            self._record_line((image.source, image.tag), number)
            self.images.append(image)
        else:
            raise _WrongLine("the line has neither `source` nor `mapping`")

    def _record_line(self, key: object, number: int) -> None:
        """Record the line of a mapping or image, whose key in `_line_numbers` is `key`.

        Raises `_WrongLine` if an earlier line has the same mapping or image.
        """
        first = self._line_numbers.setdefault(key, number)
        if first != number:
            raise _WrongLine(f"the same as line {first}")

    def _parse_mapping(self, fields: Mapping[str, Any]) -> LockedMapping:
        _check_names(fields, _MAPPING_FIELDS)
        source = self._parse_source(_text(fields, "mapping"), fields)
        artifacts = _checked_hash(fields, "artifacts") if "artifacts" in fields else None
        return LockedMapping(source, _checked_hash(fields, "rules"), artifacts)

    def _parse_image(self, fields: Mapping[str, Any]) -> LockedImage:
        _check_names(fields, _IMAGE_FIELDS)
        repository, _, tag = _text(fields, "source").rpartition(":")
        if not is_tag(tag):
            raise _WrongLine("`source` does not end with a tag")

        artifacts = fields.get("artifacts", ())
        if not isinstance(artifacts, (list, tuple)):
            raise _WrongLine("`artifacts` is not a list")
        pushed = check_digest(_text(fields, "pushed")) if "pushed" in fields else None
        return LockedImage(
            source=self._parse_source(repository, fields),
            tag=tag,
            digest=check_digest(_text(fields, "digest")),
            pushed=pushed,
            artifacts=tuple(_parse_artifact(artifact) for artifact in artifacts),
            first_seen=parse_time(_text(fields, "first_seen")),
        )

    def _parse_source(self, repository: str, fields: Mapping[str, Any]) -> SourceKey:
        """Return the source of a line. Lines with the same text share the result."""
        source_text = (repository, str(fields.get("platforms")))
        if source_text not in self._sources:
            self._sources[source_text] = SourceKey(repository, _parse_platforms(fields))
        return self._sources[source_text]

    def images_without_mapping(self) -> Iterator[_Problem]:
        """Yield a problem for each image without a mapping.

        The mapping's line was probably lost in a merge.
        """
        sources = {mapping.source for mapping in self.mappings}
        for image in self.images:
            if image.source not in sources:
                number = self._line_numbers[image.source, image.tag]
                yield _Problem(number, f"{image}: the lock has no such mapping")


def _distinct_fields(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Convert a JSON object to a dict. Raises `_WrongLine` if a field appears twice."""
    # `json` would use the second value, and a reviewer may have seen only the first.
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise _WrongLine("a field appears twice")
    return fields


_DECODER = json.JSONDecoder(object_pairs_hook=_distinct_fields)


def _parse_line(line: bytes) -> Mapping[str, Any]:
    if line.startswith(_CONFLICT_MARKS):
        raise _Unreadable("conflict marks of a merge: take one side of each conflict")
    try:
        fields = _DECODER.decode(line.decode())
    except json.JSONDecodeError as error:
        raise _WrongLine(f"not JSON: {error.msg}, at column {error.colno}") from error
    except RecursionError as error:
        raise _WrongLine("not JSON that a lock can hold") from error
    if not isinstance(fields, dict):
        raise _WrongLine("not a JSON object")
    return fields


def _check_version_line(fields: Mapping[str, Any]) -> None:
    """Raise `_Unreadable` unless the first line has the version of this module."""
    version = fields.get(_VERSION_FIELD)
    is_number = isinstance(version, int) and not isinstance(version, bool)  # `true` is an int too
    if not is_number:
        raise _Unreadable(
            f"the first line of a lock must be {_json_line({_VERSION_FIELD: _VERSION})}"
        )
    if version != _VERSION:
        raise _Unreadable(
            f"the lock has version {version}, and this regsync reads only version {_VERSION}:"
            " use the one that wrote it"
        )


def _check_names(fields: Mapping[str, Any], names: frozenset[str]) -> None:
    if not fields.keys() <= names:
        unknown = min(fields.keys() - names)
        raise _WrongLine(f"unknown field {unknown!r}")


def _text(fields: Mapping[str, Any], name: str) -> str:
    text = fields.get(name)
    if not isinstance(text, str):
        raise _WrongLine(f"`{name}` is missing, or is not text")
    return text


def _checked_hash(fields: Mapping[str, Any], name: str) -> str:
    text = _text(fields, name)
    check_digest(f"sha256:{text}")  # raises unless the text is 64 hex digits
    return text


def _parse_artifact(fields: object) -> LockedArtifact:
    if not isinstance(fields, dict):
        raise _WrongLine("an artifact is not a JSON object")
    _check_names(fields, _ARTIFACT_FIELDS)

    types = fields.get("type", [])
    if isinstance(types, str):  # `_artifact_fields` writes a single type without a list
        types = [types]
    if not (isinstance(types, list) and all(isinstance(text, str) for text in types)):
        raise _WrongLine("`type` of an artifact is neither a text nor a list of texts")

    tag = _text(fields, "tag") if "tag" in fields else None
    if tag is not None and not is_tag(tag):
        raise _WrongLine(f"{tag!r} is not a tag")
    return LockedArtifact(
        digest=check_digest(_text(fields, "digest")),
        subject=check_digest(_text(fields, "subject")),
        types=tuple(sorted(types)),
        tag=tag,
    )


def _parse_platforms(fields: Mapping[str, Any]) -> Platforms:
    if "platforms" not in fields:
        return None
    platforms = fields["platforms"]
    if not (isinstance(platforms, list) and platforms):
        raise _WrongLine("`platforms` is not a list of platforms")
    return tuple(sorted({str(parse_platform(str(platform))) for platform in platforms}))


# Comparing.


class Change(NamedTuple):
    """An image that differs between two locks."""

    # None if the old lock does not have the image.
    before: LockedImage | None
    # None if the new lock does not have the image.
    after: LockedImage | None

    @property
    def kind(self) -> str:
        """`came`, `gone`, `moved` or `changed`.

        A moved image has another digest. A changed image has other artifacts or another trimmed
        index.
        """
        if self.before is None:
            return "came"
        if self.after is None:
            return "gone"
        return "changed" if self.before.digest == self.after.digest else "moved"

    @property
    def image(self) -> LockedImage:
        image = self.after or self.before
        assert image is not None
        return image


def compare(before: Lock, after: Lock) -> list[Change]:
    """Return the differences between two locks, sorted like their lines.

    The times when digests were first seen are not compared.
    """
    # Each image of either lock once.
    images = {(image.source, image.tag): image for image in chain(before, after)}
    changes = list[Change]()
    for image in sorted(images.values(), key=LockedImage.sort_key):
        change = Change(
            before=before.images_of(image.source).get(image.tag),
            after=after.images_of(image.source).get(image.tag),
        )
        if _content_of(change.before) != _content_of(change.after):
            changes.append(change)
    return changes


def _content_of(image: LockedImage | None) -> object:
    """Return the fields of an image that `compare` compares, or None if there is no image.

    The time when the digest was first seen and the order of artifacts are left out.
    """
    if image is None:
        return None
    return image.digest, image.pushed, frozenset(image.artifacts)
