"""The lock: the digest of each selected tag and of its artifacts, for review.

The file has one line of JSON for each image. A run from a lock sees each source as a `PinnedSource`:
a repository that lists the locked tags with their digests, and that names the locked artifacts.
Everything else, such as the look-ups at targets and the copies by digest, is as in any run.
Invariants: two locks with equal content have equal bytes, so that the change of one image is the
change of one line. An invalid line is an error, and is never skipped. A pinned source is asked for
manifests and blobs by digest, and for nothing else.
Follows: docs/design.md section 12 ("Lock").
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from _regsync.config import ArtifactRule, MappingRule
from _regsync.crypto import hash_hex
from _regsync.errors import ConfigError, ContentError, RegistryError, SyncError
from _regsync.oci import EMPTY_CONFIG, Descriptor, Manifest, check_digest, is_digest, is_tag
from _regsync.registry.repository import Locked, LockedParts, Repository
from _regsync.tags import TagRule
from _regsync.text import printable

# The first line has the version of the format. It is not that of the program, because a new version
# of the program does not change the lock.
_HEAD = '{"lock": 1}'

_REMEDY = "run `regsync lock`"
# Without `--recheck` a new lock reuses the line of an image whose digest has not changed.
_REMEDY_FOR_LINE = "run `regsync lock --recheck`, and review what has changed"


class SourceKey(NamedTuple):
    """A source repository with a platform filter.

    Each filter has its own lines in a lock, because an index that is trimmed with another filter
    has another digest.
    """

    # `HOST/REPOSITORY`, as in reports. On Docker Hub it includes `library/`.
    repository: str
    # Sorted. Empty if all platforms are copied.
    platforms: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.platforms:
            return self.repository
        return f"{self.repository} ({', '.join(self.platforms)})"


class LockedMapping(NamedTuple):
    """The line of a mapping: its source, and hashes of the rules that select tags and artifacts."""

    source: SourceKey
    # The SHA-256 of the mapping's `tags` and `artifacts`, in hex. `--locked` refuses a mapping with
    # another hash.
    rules_hash: str
    # The SHA-256 of `artifacts` alone, in hex. Empty if they have their defaults. If it is
    # unchanged, a new lock takes the artifacts of unchanged images from the old lock, without a
    # request.
    artifacts_hash: str = ""


class LockedArtifact(NamedTuple):
    """One artifact of an image, or of another artifact."""

    digest: str
    # The digest of the manifest that the artifact refers to.
    subject: str
    # The artifact type. For a cosign tag, the media types of config and layers. Empty if unknown.
    types: tuple[str, ...] = ()
    # The cosign tag of the artifact. Empty for an artifact from a referrers list.
    tag: str = ""


class LockedImage(NamedTuple):
    """The line of an image: the digests of a tag when the lock was made."""

    source: SourceKey
    tag: str
    # The digest at the source.
    digest: str
    # The digest at the targets if the index is trimmed to its platforms. Empty if it is not.
    pushed: str = ""
    # Each artifact comes after its subject.
    artifacts: tuple[LockedArtifact, ...] = ()

    @property
    def name(self) -> str:
        """The image's full reference at the source."""
        return f"{self.source.repository}:{self.tag}"

    @property
    def digest_at_target(self) -> str:
        return self.pushed or self.digest

    def __str__(self) -> str:
        return str(self.source._replace(repository=self.name))


class Lock:
    """The mappings and images of a lock."""

    def __init__(
        self, mappings: Iterable[LockedMapping] = (), images: Iterable[LockedImage] = ()
    ) -> None:
        """Of several images with the same source and tag, the last one counts."""
        self.mappings = frozenset(mappings)
        self._images = defaultdict[SourceKey, dict[str, LockedImage]](dict)
        for image in images:
            self._images[image.source][image.tag] = image

    def __len__(self) -> int:
        return sum(map(len, self._images.values()))

    def __iter__(self) -> Iterator[LockedImage]:
        """Yield the images in the order of their lines."""
        for _, images in sorted(self._images.items()):
            for _, image in sorted(images.items()):
                yield image

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lock):
            return NotImplemented
        return self.mappings == other.mappings and self._images == other._images

    def images_of(self, source: SourceKey) -> Mapping[str, LockedImage]:
        """Return the images of a source by their tags."""
        return self._images.get(source, {})

    def pin(self, rule: MappingRule, source: Repository) -> Repository:
        """Return the source of a mapping as this lock has it."""
        return cast(Repository, PinnedSource(source, self.images_of(source_key(rule))))

    def check(self, mappings: Iterable[MappingRule]) -> None:
        """Raise ConfigError if a mapping is not in the lock, or has other rules in the lock."""
        for rule in mappings:
            mapping = locked_mapping(rule)
            if mapping not in self.mappings:
                raise ConfigError(
                    f"mappings[{rule.index}], from {mapping.source}, is not in the lock as it is now",
                    hint=f"{_REMEDY} with this configuration",
                )


# The rules of a mapping.


def source_key(rule: MappingRule) -> SourceKey:
    """Return the source repository and platform filter of a mapping."""
    platforms = sorted({*map(str, rule.platforms or ())})
    return SourceKey(rule.source.lock_name(rule.source_repository), tuple(platforms))


def locked_mapping(rule: MappingRule) -> LockedMapping:
    """Return the line of a mapping in a lock."""
    rules = {"tags": _set_fields(rule.tags), "artifacts": _set_fields(rule.artifacts)}
    artifacts = artifact_rule(rule)
    artifacts_hash = "" if artifacts == ArtifactRule() else _hash(_set_fields(artifacts))
    return LockedMapping(source_key(rule), _hash(rules), artifacts_hash)


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
    yield _HEAD
    yield from map(_line_of, sorted(lock.mappings))
    yield from map(_line_of, lock)


def _line_of(locked: LockedMapping | LockedImage) -> str:
    platforms = locked.source.platforms
    if isinstance(locked, LockedMapping):
        rules = {"rules": locked.rules_hash, "artifacts": locked.artifacts_hash}
        return _json_line({"mapping": locked.source.repository, "platforms": platforms, **rules})
    artifacts = [
        _without_empty(
            {
                "digest": artifact.digest,
                "type": artifact.types[0] if len(artifact.types) == 1 else artifact.types,
                "subject": artifact.subject,
                "tag": artifact.tag,
            }
        )
        for artifact in locked.artifacts
    ]
    return _json_line(
        {
            "source": locked.name,
            "platforms": platforms,
            "digest": locked.digest,
            "pushed": locked.pushed,
            "artifacts": artifacts,
        }
    )


def _json_line(fields: Mapping[str, object]) -> str:
    return json.dumps(_without_empty(fields))


def _without_empty(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value}


# Reading.


def read_lock(lines: Iterable[bytes], name: str) -> Lock:
    """Parse the lines of a lock. `name` is the name of its file, for errors.

    Blank lines are skipped. Raises ConfigError, which names the first invalid line.
    """
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    number, head = next(numbered, (1, b""))
    if head.strip() != _HEAD.encode():
        raise _no_lock(name, number, f"the first line of a lock must be {_HEAD}")

    mappings = list[LockedMapping]()
    images = dict[tuple[SourceKey, str], LockedImage]()
    for number, line in numbered:
        locked = _read_line(line)
        if locked is None:
            raise _no_lock(name, number, "not a line that `regsync lock` writes")
        if isinstance(locked, LockedMapping):
            mappings.append(locked)
            continue
        key = (locked.source, locked.tag)
        if key in images:
            raise _no_lock(name, number, f"a second line for {locked}")
        images[key] = locked
    return Lock(mappings, images.values())


def _no_lock(name: str, number: int, text: str) -> ConfigError:
    """Return the error for a file that is no lock because of the line with this number."""
    return ConfigError(
        f"{printable(name)}:{number}: {printable(text)}",
        hint=f"restore the file as it was committed, or remove it; then {_REMEDY}",
    )


def _read_line(line: bytes) -> LockedMapping | LockedImage | None:
    """Read the line of a mapping or an image.

    Returns None unless the line is what `lines_of` yields for the result. So no field can be
    missing, unknown or there twice, and none has another type.
    """
    try:
        text = line.decode().strip()
        fields = json.loads(text)
        locked = _read_mapping(fields) if "mapping" in fields else _read_image(fields)
        return locked if _line_of(locked) == text else None
    except (ContentError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _read_mapping(fields: Mapping[str, Any]) -> LockedMapping:
    source = SourceKey(str(fields["mapping"]), _texts(fields.get("platforms", ())))
    mapping = LockedMapping(source, str(fields["rules"]), str(fields.get("artifacts", "")))
    for hex_digits in filter(None, mapping[1:]):
        check_digest(f"sha256:{hex_digits}")
    return mapping


def _read_image(fields: Mapping[str, Any]) -> LockedImage:
    repository, _, tag = fields["source"].rpartition(":")
    artifacts = list[LockedArtifact]()
    for each in fields.get("artifacts", ()):
        types = each.get("type", ())
        types = (types,) if isinstance(types, str) else _texts(types)
        artifacts.append(
            LockedArtifact(each["digest"], each["subject"], types, each.get("tag", ""))
        )
    image = LockedImage(
        SourceKey(repository, _texts(fields.get("platforms", ()))),
        tag,
        digest=fields["digest"],
        pushed=fields.get("pushed", ""),
        artifacts=tuple(artifacts),
    )
    for digest in (image.digest, image.digest_at_target):
        check_digest(digest)
    for artifact in artifacts:
        check_digest(artifact.digest)
        check_digest(artifact.subject)
    for name in (tag, *(artifact.tag for artifact in artifacts if artifact.tag)):
        if not is_tag(name):
            raise ValueError(f"{name!r} is not a tag")
    return image


def _texts(values: Iterable[object]) -> tuple[str, ...]:
    return tuple(map(str, values))


# Comparing.


class Change(NamedTuple):
    """An image that differs between two locks."""

    # `came`, `gone`, `moved` to another digest, or `changed`: it has other artifacts or another
    # trimmed index.
    kind: str
    # The new line, or the old line of an image that is gone.
    image: LockedImage
    # The digests at the source. None if the old lock, or the new lock, does not have the image.
    before: str | None
    after: str | None


def compare(before: Lock, after: Lock) -> list[Change]:
    """Return the differences between two locks, sorted like their lines."""
    changes = list[Change]()
    for image in Lock(images=(*before, *after)):  # each image of either lock once
        old = before.images_of(image.source).get(image.tag)
        new = after.images_of(image.source).get(image.tag)
        if old == new:
            continue
        digest_before = old.digest if old else None
        digest_after = new.digest if new else None
        kind = "changed" if digest_before == digest_after else "moved"
        if old is None:
            kind = "came"
        elif new is None:
            kind = "gone"
        changes.append(Change(kind, image, digest_before, digest_after))
    return changes


# The source of a run from a lock.


class PinnedSource(Locked):
    """A source repository whose tags and artifacts are those of a lock.

    Everything that is not defined here is an attribute of the repository itself.
    """

    known_tags: Mapping[str, str]

    def __init__(self, source: Repository, images: Mapping[str, LockedImage]) -> None:
        """`images` are the lines of the source by their tags."""
        self._source = source
        self._images = images
        artifacts = [artifact for image in images.values() for artifact in image.artifacts]
        tags = {artifact.tag: artifact.digest for artifact in artifacts if artifact.tag}
        self.known_tags = {**tags, **{tag: image.digest for tag, image in images.items()}}
        self._types = {artifact.digest: frozenset(artifact.types) for artifact in artifacts}
        # By subject, the artifacts in its referrers list. Each once, by its digest.
        self._referrers = defaultdict[str, dict[str, LockedArtifact]](dict)
        for artifact in artifacts:
            if not artifact.tag:
                self._referrers[artifact.subject][artifact.digest] = artifact

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __str__(self) -> str:
        return str(self._source)

    def locked_parts(self, reference: str) -> LockedParts | None:
        image = self._images.get(reference)
        if image is None:
            return None
        artifacts = dict.fromkeys(artifact.digest for artifact in image.artifacts)
        subjects = dict.fromkeys(artifact.subject for artifact in image.artifacts)
        own_subjects = [subject for subject in subjects if subject not in artifacts]
        return LockedParts(image.digest_at_target, list(artifacts), own_subjects)

    def locked_types(self, digest: str) -> frozenset[str]:
        return self._types.get(digest, frozenset())

    # The methods of a repository.

    async def head_manifest(self, reference: str) -> str | None:
        """Return the digest of a tag. The lock vouches for what a digest names."""
        return reference if is_digest(reference) else self.known_tags.get(reference)

    async def list_referrers(self, digest: str) -> tuple[Descriptor, ...]:
        """Return the artifacts of the lock. An entry has no media type and no size."""
        return tuple(
            Descriptor("", each.digest, 0, artifact_type=next(iter(each.types), EMPTY_CONFIG))
            for each in self._referrers.get(digest, {}).values()
        )

    async def get_manifest(self, reference: str, *, expected: Descriptor | None = None) -> Manifest:
        """Fetch a manifest by its digest. Raises SyncError if the source has it no longer."""
        digest = await self.head_manifest(reference)
        if digest is None:
            error = RegistryError("the lock has no such tag", status=404)
            raise error.add_context(self._source.side, "look up", self._source.name_of(reference))
        try:
            return await self._source.get_manifest(digest, expected=expected)
        except RegistryError as error:
            if error.status != 404:
                raise
            # No caller may take it for absence: what the tag names now was not reviewed.
            hint = f"{_REMEDY_FOR_LINE}: the source has removed what the lock names"
            gone = SyncError(error.message, hint=hint)
            operation, name = error.operation or "", error.reference or ""
            raise gone.add_context(error.side, operation, name) from error
