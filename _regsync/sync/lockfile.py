"""The lock: which digest each selected tag has, one line of JSON an image, for review.

Owns: the lines of a lock, how they are read and ordered, how two locks differ.
May not know: registries, files, clocks.
Invariants: two locks of equal content have equal bytes, so that a change of one image is a change of
one line. A line that is not understood is an error, never left out.
Follows: docs/design.md section 12 ("Lock").
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from _regsync.config.model import ArtifactRule, MappingRule
from _regsync.crypto import hash_hex
from _regsync.errors import ConfigError, ContentError, Problem
from _regsync.oci.manifest import parse_platform
from _regsync.oci.reference import check_digest, is_tag, split_full_name
from _regsync.state.archive import RepositoryKey
from _regsync.state.seen import SeenKey
from _regsync.tags import TagRule
from _regsync.text import parse_time, printable, time_text

# The version of the format, in the first line. The program's version is not there: a new program
# is no change.
_VERSION = 1

_VERSION_FIELD = "lock"
_MAPPING_FIELDS = frozenset({"mapping", "platforms", "rules", "artifacts"})
_IMAGE_FIELDS = frozenset({"source", "platforms", "digest", "pushed", "artifacts", "first_seen"})
_ARTIFACT_FIELDS = frozenset({"digest", "type", "subject", "tag"})

# How git marks what a merge could not decide.
_CONFLICT_MARKS = (b"<<<<<<<", b"|||||||", b"=======", b">>>>>>>")

# Wrong lines that one error names.
_MOST_PROBLEMS = 50

_REMEDY = "run `regsync lock`"

# Texts, and tuples of texts.
_SortKey = tuple[Any, ...]

# A platform filter in a fixed order; None copies all platforms.
Platforms = tuple[str, ...] | None


class SourceKey(NamedTuple):
    """A source repository, and the platforms that are taken from it: another filter trims an index to
    another digest, so each filter has its own lines.
    """

    # As reports name it, `HOST/REPOSITORY`; on Docker Hub with `library/`.
    repository: str
    platforms: Platforms

    def __str__(self) -> str:
        if self.platforms is None:
            return self.repository
        return f"{self.repository} ({', '.join(self.platforms)})"

    def sort_key(self) -> _SortKey:
        return self.repository, self.platforms or ()

    def seen_key(self, digest: str) -> SeenKey:
        """Return the key of one of its digests among first-seen times."""
        return SeenKey(RepositoryKey(*split_full_name(self.repository)), digest)


class LockedMapping(NamedTuple):
    """A mapping, as far as its rules decide what a lock has of it."""

    source: SourceKey
    # The SHA-256 of the `tags` and `artifacts` of the mapping. `--locked` refuses another one.
    rules: str
    # The SHA-256 of `artifacts` alone; None where it has its defaults. Where it is that of the old
    # lock, a new lock takes over the artifacts of images that have not moved, without a request.
    artifacts: str | None = None


class LockedArtifact(NamedTuple):
    """One artifact of an image, or of another artifact."""

    digest: str
    # The digest that it refers to.
    subject: str
    # Its artifact type; of a tag of cosign's, the media types of config and layers. Empty where
    # they are not known.
    types: tuple[str, ...] = ()
    # The tag that cosign gave it.
    tag: str | None = None


class LockedImage(NamedTuple):
    """What a tag named when the lock was made."""

    source: SourceKey
    tag: str
    # At the source.
    digest: str
    # The digest that targets are to hold, where the index is trimmed to its platforms.
    pushed: str | None
    # An artifact stands behind the one that it refers to.
    artifacts: tuple[LockedArtifact, ...]
    # When the digest was first seen in the repository, in seconds since 1970.
    first_seen: int

    @property
    def name(self) -> str:
        """The image's full reference at its source."""
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
    """The mappings of a lock, and its images by source and tag."""

    def __init__(
        self, mappings: Iterable[LockedMapping] = (), images: Iterable[LockedImage] = ()
    ) -> None:
        self.mappings = frozenset(mappings)
        self._images: dict[SourceKey, dict[str, LockedImage]] = {}
        for image in images:
            self._images.setdefault(image.source, {})[image.tag] = image

    def __len__(self) -> int:
        return sum(map(len, self._images.values()))

    def __iter__(self) -> Iterator[LockedImage]:
        """Give the images in the order of their lines."""
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
        """Return when each digest was first seen, in seconds since 1970."""
        times = dict[SeenKey, int]()
        for image in self:
            key = image.source.seen_key(image.digest)
            times[key] = min(image.first_seen, times.get(key, image.first_seen))
        return times

    def check(self, mappings: Iterable[MappingRule]) -> None:
        """Raise ConfigError unless the lock was made under the rules of all these mappings."""
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
    """Return the source repository and platforms that a mapping's images are locked under."""
    platforms: Platforms = None
    if rule.platforms is not None:
        platforms = tuple(sorted({str(platform) for platform in rule.platforms}))
    return SourceKey(rule.source.lock_name(rule.source_repository), platforms)


def locked_mapping(rule: MappingRule) -> LockedMapping:
    """Return the line of a mapping."""
    rules = {"tags": _set_fields(rule.tags), "artifacts": _set_fields(rule.artifacts)}
    artifacts = artifact_rule(rule)
    artifacts_hash = None
    if artifacts != ArtifactRule():
        artifacts_hash = _hash(_set_fields(artifacts))
    return LockedMapping(source_key(rule), rules=_hash(rules), artifacts=artifacts_hash)


def artifact_rule(rule: MappingRule) -> ArtifactRule:
    """Return a mapping's rule of artifacts without what does not decide which ones it takes."""
    return rule.artifacts._replace(require_artifacts=False)


def _set_fields(rule: TagRule | ArtifactRule) -> dict[str, object]:
    """Return the fields of a rule that differ from their defaults."""
    # So a field that a later version adds does not change the hash of a rule that does not use it.
    defaults = rule._field_defaults
    return {name: value for name, value in rule._asdict().items() if value != defaults[name]}


def _hash(fields: Mapping[str, object]) -> str:
    return hash_hex("sha256", json.dumps(fields, sort_keys=True).encode())


# Writing.


def lines_of(lock: Lock) -> Iterator[str]:
    """Give the lines of a lock, without their ends."""
    yield _json_line({_VERSION_FIELD: _VERSION})

    def order(mapping: LockedMapping) -> _SortKey:
        return mapping.source.sort_key(), mapping.rules

    for mapping in sorted(lock.mappings, key=order):
        fields = {
            "mapping": mapping.source.repository,
            **_platforms_field(mapping.source.platforms),
            "rules": mapping.rules,
        }
        if mapping.artifacts is not None:
            fields["artifacts"] = mapping.artifacts
        yield _json_line(fields)
    for image in lock:
        yield _json_line(image_fields(image))


def image_fields(image: LockedImage) -> dict[str, object]:
    """Return the fields of an image's line."""
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
    """Read the lines of the lock in file `name`; ConfigError names each line that is wrong."""
    reading = _Reading()
    problems = reading.read(lines)
    # Where lines are wrong, a mapping may be lacking only because its line is.
    if not problems:
        problems = list(islice(reading.images_without_mapping(), _MOST_PROBLEMS))
    if not problems and not reading.has_head:
        problems = [_Problem(0, "the file is empty")]

    if problems:
        raise ConfigError(
            f"{printable(name)} is not a lock",
            problems=tuple(Problem(name, line, 1, "", printable(text)) for line, text in problems),
            hint=f"restore the file as it was committed, or remove it; then {_REMEDY}",
        )
    return Lock(reading.mappings, reading.images)


class _Problem(NamedTuple):
    line: int
    text: str


class _WrongLine(ValueError):
    """A line is not as a lock has it."""


class _Unreadable(_WrongLine):
    """The lines after this one would be wrong for the same reason."""


class _Reading:
    """The lines of a lock read so far."""

    def __init__(self) -> None:
        # Whether the first line was read, which says that this is a lock.
        self.has_head = False
        self.mappings = set[LockedMapping]()
        self.images = list[LockedImage]()

        # Where each mapping, or source and tag of an image, was read: a second line is an error.
        self._number_of_line = dict[object, int]()
        # Each source once, by its repository and platforms as they are written: 100,000 images of a
        # few sources share these.
        self._sources = dict[tuple[str, str], SourceKey]()

    def read(self, lines: Iterable[bytes]) -> list[_Problem]:
        """Read all lines; return what is wrong with them, of a long list the beginning."""
        problems = list[_Problem]()
        for number, line in enumerate(lines, 1):
            try:
                self.add(number, line)
            except _Unreadable as error:
                return [_Problem(number, str(error))]
            except (ContentError, ValueError) as error:
                problems.append(_Problem(number, str(error)))
                # Without a head this is no lock, and every other line is wrong too.
                if not self.has_head or len(problems) == _MOST_PROBLEMS:
                    break
        return problems

    def add(self, number: int, line: bytes) -> None:
        """Read one line. ValueError or ContentError says what is wrong with it."""
        if line.startswith(_CONFLICT_MARKS):
            raise _Unreadable("conflict marks of a merge: take one side of each conflict")
        if not line.strip():
            return
        fields = _parse_line(line)

        if not self.has_head:
            _check_head(fields)
            self.has_head = True
        elif "mapping" in fields:
            mapping = self._parse_mapping(fields)
            self._check_new(mapping, number)
            self.mappings.add(mapping)
        elif "source" in fields:
            image = self._parse_image(fields)
            self._check_new((image.source, image.tag), number)
            self.images.append(image)
        else:
            raise _WrongLine("the line has neither `source` nor `mapping`")

    def _check_new(self, key: object, number: int) -> None:
        """Raise `_WrongLine` where an earlier line is about the same mapping or image."""
        first = self._number_of_line.setdefault(key, number)
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
            artifacts=tuple(_parse_artifact(each) for each in artifacts),
            first_seen=parse_time(_text(fields, "first_seen")),
        )

    def _parse_source(self, repository: str, fields: Mapping[str, Any]) -> SourceKey:
        """Return the source of a line, made once for all lines that write it in the same way."""
        written = (repository, str(fields.get("platforms")))
        if written not in self._sources:
            self._sources[written] = SourceKey(repository, _parse_platforms(fields))
        return self._sources[written]

    def images_without_mapping(self) -> Iterator[_Problem]:
        """Give the images whose source no mapping of the lock has: lines were lost in a merge."""
        sources = {mapping.source for mapping in self.mappings}
        for image in self.images:
            if image.source not in sources:
                number = self._number_of_line[image.source, image.tag]
                yield _Problem(number, f"{image}: the lock has no such mapping")


def _distinct_fields(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object's fields; `_WrongLine` where one appears twice."""
    # `json` alone would take the last of two, and a reviewer may have seen the first.
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise _WrongLine("a field appears twice")
    return fields


_DECODER = json.JSONDecoder(object_pairs_hook=_distinct_fields)


def _parse_line(line: bytes) -> Mapping[str, Any]:
    try:
        fields = _DECODER.decode(line.decode())
    except json.JSONDecodeError as error:
        raise _WrongLine(f"not JSON: {error.msg}, at column {error.colno}") from error
    except RecursionError as error:
        raise _WrongLine("not JSON that a lock can hold") from error
    if not isinstance(fields, dict):
        raise _WrongLine("not a JSON object")
    return fields


def _check_head(fields: Mapping[str, Any]) -> None:
    """Raise `_Unreadable` unless the first line says that this is a lock of the version we read."""
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
    check_digest(f"sha256:{text}")  # a hash of 64 digits
    return text


def _parse_artifact(fields: object) -> LockedArtifact:
    if not isinstance(fields, dict):
        raise _WrongLine("an artifact is not a JSON object")
    _check_names(fields, _ARTIFACT_FIELDS)

    types = fields.get("type", [])
    if isinstance(types, str):  # the usual case, of one type
        types = [types]
    if not (isinstance(types, list) and all(isinstance(each, str) for each in types)):
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
    """How one image differs between two locks: None where a lock does not have it."""

    before: LockedImage | None
    after: LockedImage | None

    @property
    def kind(self) -> str:
        """`came`, `gone`, `moved` to another digest, or `changed`: other artifacts or platforms."""
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
    """Return the images that differ in more than the time when they were first seen, in the order of
    their lines.
    """
    images = {(image.source, image.tag): image for lock in (before, after) for image in lock}
    changes = list[Change]()
    for image in sorted(images.values(), key=LockedImage.sort_key):
        change = Change(
            before.images_of(image.source).get(image.tag),
            after.images_of(image.source).get(image.tag),
        )
        if _content_of(change.before) != _content_of(change.after):
            changes.append(change)
    return changes


def _content_of(image: LockedImage | None) -> object:
    """Return what makes two lines of one image differ: not the time, and not the artifacts' order."""
    if image is None:
        return None
    return image.digest, image.pushed, frozenset(image.artifacts)
