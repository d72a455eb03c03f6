"""Manifests and indexes: what they name, and what a platform filter leaves of them.

Owns: what a readable manifest is, descriptors, platforms, trimmed indexes, fallback lists of
referrers.
May not know: registries, configuration, HTTP.
Invariants: a manifest's bytes are never changed, but for an index that `trim_index` trims or
`extend_referrers_list` extends; no digest or media type leaves unchecked, as each may become part of a
URL, header or file name (docs/protocol-facts.md section 9.2, R11 to R14).
Follows: docs/protocol-facts.md section 1, docs/design.md sections 2 and 4.
"""

from __future__ import annotations

import binascii
import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeVar

from _regsync.errors import ContentError, WrongBytes
from _regsync.oci.reference import check_digest, digest_of, split_digest
from _regsync.text import clean_beginning, printable

_T = TypeVar("_T")

# docs/protocol-facts.md section 1.3.
_OCI_INDEX = "application/vnd.oci.image.index.v1+json"
_OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
_DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_INDEX_TYPES = (_OCI_INDEX, _DOCKER_LIST)
_IMAGE_TYPES = (_OCI_MANIFEST, _DOCKER_MANIFEST)
_DOCKER_SCHEMA_1 = "application/vnd.docker.distribution.manifest.v1+"

IMAGE_CONFIGS = (
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
)

# A type missing here makes `distribution` answer 404, or the linux/amd64 child in place of a list.
ACCEPT_MANIFESTS = ", ".join(_INDEX_TYPES + _IMAGE_TYPES)

# Sent by servers that do not know what they hold; the document decides then.
_GENERIC_TYPES = ("", "application/json", "application/octet-stream", "text/plain")

# Layers that are not to be pushed (docs/protocol-facts.md section 1.6): by media type, never by the
# presence of `urls`.
_FOREIGN_LAYERS = (
    "application/vnd.oci.image.layer.nondistributable.",
    "application/vnd.docker.image.rootfs.foreign.",
)

# What an index of BuildKit's older cache names in place of manifests. Entries of any other type are
# manifests, as other tools take them.
_BLOB_TYPES = (
    "application/vnd.oci.image.layer.",
    "application/vnd.docker.image.rootfs.",
    "application/vnd.buildkit.cacheconfig.",
)

# Descriptors of one document: 4 MiB have room for about 30,000, but nobody has seen 10,000.
_MAX_DESCRIPTORS = 10_000

# JSON values of one document: 4 MiB of empty lists take seconds, and 100 MB.
_MAX_VALUES = 30 * _MAX_DESCRIPTORS

# Levels of JSON in an index that is changed (docs/design.md section 4).
_MAX_JSON_DEPTH = 64

# Sizes are int64 (image-spec descriptor.md).
_SIZE_LIMIT = 2**63

# Digits of a number; sizes have 19 at most.
_MAX_DIGITS = 40

# Indexes within indexes, the top one counted (docs/protocol-facts.md section 1.5).
MAX_INDEX_DEPTH = 4

# Part of the key under which the state keeps trimmed indexes. A change of how they are trimmed
# needs another number.
TRIM_RULE = "1"

# RFC 6838 section 4.2. A parameter is forgiven: some push files as `text/plain; charset=utf-8`.
_TYPE_NAME = r"[a-zA-Z0-9][a-zA-Z0-9!#$&^_.+-]{0,126}"
_MEDIA_TYPE = rf"{_TYPE_NAME}/{_TYPE_NAME}(?: ?;[ -~]{{0,99}})?"

_PLATFORM_PART = r"[a-z0-9][a-z0-9._-]{0,63}"

# What an entry without a variant means (docs/design.md section 4).
_USUAL_VARIANTS = {"arm64": "v8", "arm": "v7"}

_JSON_KINDS: Mapping[type, str] = {str: "a string", list: "a list", dict: "an object"}


# Platforms and descriptors.


class Platform(NamedTuple):
    """Where an image runs; `unknown/unknown` marks BuildKit's attestations."""

    os: str
    architecture: str
    variant: str | None = None

    def __str__(self) -> str:
        return "/".join(filter(None, (self.os, self.architecture, self.variant)))


_UNKNOWN_PLATFORM = Platform("unknown", "unknown")


def parse_platform(text: str) -> Platform:
    """Read `os/arch[/variant]`, lower-casing it; ValueError when it is something else."""
    if not re.fullmatch(rf"{_PLATFORM_PART}(?:/{_PLATFORM_PART}){{1,2}}", text.lower()):
        raise ValueError(f"{printable(text, 100)!r} is not OS/ARCH[/VARIANT], as in linux/arm64")
    return Platform(*text.lower().split("/"))


def platform_matches(wanted: Platform, have: Platform) -> bool:
    """Return whether the platform of an index entry is the one wanted, which takes any variant unless
    it names one (docs/design.md section 4).
    """
    if wanted.os != have.os or wanted.architecture != have.architecture:
        return False
    variant = have.variant or _USUAL_VARIANTS.get(have.architecture)
    return wanted.variant is None or wanted.variant == variant


class Descriptor(NamedTuple):
    """What a document says of a blob or manifest."""

    media_type: str
    digest: str
    size: int  # bytes
    platform: Platform | None = None
    annotations: Mapping[str, str] = MappingProxyType({})
    artifact_type: str | None = None
    data: bytes | None = None  # embedded content, not compared with the digest yet

    @property
    def is_foreign(self) -> bool:
        return self.media_type.startswith(_FOREIGN_LAYERS)

    @property
    def is_index(self) -> bool:
        return self.media_type in _INDEX_TYPES

    @property
    def is_blob(self) -> bool:
        return self.media_type.startswith(_BLOB_TYPES) or self.media_type in IMAGE_CONFIGS

    @property
    def attested_digest(self) -> str | None:
        """The digest of the sibling that this entry is BuildKit's attestation of."""
        if self.platform != _UNKNOWN_PLATFORM:
            return None
        return self.annotations.get("vnd.docker.reference.digest")


class Manifest(NamedTuple):
    """A manifest or index, and what it says that a copy needs."""

    media_type: str
    digest: str  # by the algorithm that it was asked for with, else sha256
    body: bytes
    is_index: bool = False
    config: Descriptor | None = None
    layers: tuple[Descriptor, ...] = ()
    children: tuple[Descriptor, ...] = ()
    subject: Descriptor | None = None
    artifact_type: str | None = None
    annotations: Mapping[str, str] = MappingProxyType({})

    @property
    def size(self) -> int:
        return len(self.body)

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        """The blobs that a target needs before this manifest: config, then layers, each once."""
        unique: dict[str, Descriptor] = {}
        for blob in (self.config, *self.layers):
            if blob and not blob.is_foreign:
                unique.setdefault(blob.digest, blob)
        return tuple(unique.values())

    @property
    def dependencies(self) -> tuple[Descriptor, ...]:
        """All that has to be in a repository before this manifest: its blobs and children."""
        return (*self.blobs, *self.children)


# Reading.


def parse_manifest(
    body: bytes,
    *,
    content_type: str | None,
    digest: str | None = None,
    expected: Descriptor | None = None,
) -> Manifest:
    """Verify and read a manifest or index; ContentError says what is wrong with it, WrongBytes that
    it is not what was asked for.

    `content_type` is the answer's header. `digest` or the index entry `expected` is what was asked
    for; neither is given for a tag.
    """
    answered_type = (content_type or "").partition(";")[0].strip().lower()
    received = _description(body, answered_type)
    wanted_digest = expected.digest if expected else digest
    actual_digest = _digest_like(wanted_digest, body)
    has_wanted_digest = not wanted_digest or wanted_digest == actual_digest
    # Bytes of the wanted digest stay as they are. Of others, the next reading may bring better ones.
    unreadable = ContentError if has_wanted_digest else WrongBytes

    if expected and len(body) != expected.size:
        raise unreadable(
            f"the manifest has {len(body)} bytes, the index says {expected.size}; {received}"
        )
    try:
        document = load_json(body, received)
    except ContentError as error:
        hint = "check whether a proxy or a login page answers in place of the registry"
        raise unreadable(error.message, hint=hint) from error
    own_type = _field(document, "mediaType", str).lower()

    # Schema 1 is refused before digests are compared: its digest leaves out the signatures, and is
    # never that of the body.
    is_schema_1 = document.get("schemaVersion") == 1 or any(
        media_type.startswith(_DOCKER_SCHEMA_1) for media_type in (answered_type, own_type)
    )
    if is_schema_1:
        raise ContentError(
            "a Docker schema 1 manifest, which cannot be copied unchanged",
            hint="push the image again with a current tool, as schema 2 or OCI",
        )
    if not has_wanted_digest:
        raise WrongBytes(f"asked for {wanted_digest}, got {actual_digest}; {received}")

    named_types = [own_type]
    if answered_type not in _GENERIC_TYPES:
        named_types.append(answered_type)
    if expected:
        named_types.append(expected.media_type)
    media_type = _settle_type(document, [name for name in named_types if name], received)
    return _read_manifest(document, media_type, actual_digest, body)


def _description(body: bytes, answered_type: str) -> str:
    """Describe an answer for messages: its type and how its body begins."""
    beginning = f"beginning {clean_beginning(body, 60)!r}" if body else "no body"
    return f"received {printable(answered_type, 80) or 'no content type'}, {beginning}"


def _digest_like(wanted: str | None, body: bytes) -> str:
    """Return the digest of a body, by the algorithm of the digest that was `wanted`."""
    if not wanted:
        return digest_of(body)
    algorithm, _ = split_digest(check_digest(wanted))
    return digest_of(body, algorithm)


def _settle_type(document: Mapping[str, object], names: Sequence[str], received: str) -> str:
    """Return the media type of a document. ContentError where the `names` that the document itself, the
    header and the index entry give it differ, or its fields are of another type (R13: a document that
    readers take for two things is refused).
    """
    if len(set(names)) > 1:
        text = ", ".join(printable(name, 100) for name in names)
        raise ContentError(
            f"document, header and index entry name different types ({text}); {received}"
        )
    has_manifests = document.get("manifests") is not None
    has_image_fields = _has_image_fields(document)
    if has_manifests and has_image_fields:
        raise ContentError(
            "the document is both a manifest and an index, which is refused (CVE-2021-41190)"
        )

    if names:
        media_type = names[0]
    elif has_manifests:
        media_type = _OCI_INDEX
    elif has_image_fields:
        media_type = _OCI_MANIFEST
    else:
        media_type = ""
    if not (media_type.startswith("application/") and re.fullmatch(_MEDIA_TYPE, media_type)):
        raise ContentError(f"neither a manifest nor an index; {received}")
    if not _has_fields_of(media_type, document):
        raise ContentError(f"the document does not have the fields of {media_type}; {received}")
    return media_type


def _has_image_fields(document: Mapping[str, object]) -> bool:
    return any(document.get(key) is not None for key in ("config", "layers"))


def _has_fields_of(media_type: str, document: Mapping[str, object]) -> bool:
    if media_type in _INDEX_TYPES:
        # `"manifests": null` is an empty index, as Go reads it.
        return "manifests" in document and not _has_image_fields(document)
    if media_type in _IMAGE_TYPES:
        return document.get("config") is not None
    return True  # nobody knows which fields another type needs


def _read_manifest(
    document: Mapping[str, object], media_type: str, digest: str, body: bytes
) -> Manifest:
    """Return what a copy needs of a document; ContentError where a descriptor in it is wrong."""
    _check_count(document)
    config = _descriptor_in(document, "config")
    subject = _descriptor_in(document, "subject")
    listed_layers = _descriptors_in(document, "layers")
    blobs = _descriptors_in(document, "blobs")  # the layers of the old ORAS artifact manifest
    entries = _descriptors_in(document, "manifests")
    single = [descriptor for descriptor in (config, subject) if descriptor is not None]
    _check_sizes([*single, *listed_layers, *blobs, *entries])

    # An index of BuildKit's older cache names blobs among its manifests.
    children = tuple(entry for entry in entries if not entry.is_blob)
    layers = (*listed_layers, *blobs, *(entry for entry in entries if entry.is_blob))
    artifact_type = _field(document, "artifactType", str)
    if not artifact_type and config:
        artifact_type = config.media_type
    return Manifest(
        media_type=media_type,
        digest=digest,
        body=body,
        is_index=media_type in _INDEX_TYPES or bool(children),
        config=config,
        layers=layers,
        children=children,
        subject=subject,
        artifact_type=artifact_type or None,
        annotations=_annotations(document),
    )


def _check_count(document: Mapping[str, object]) -> None:
    """Raise ContentError for a document with too many descriptors, before any of them is read."""
    single = [key for key in ("config", "subject") if document.get(key) is not None]
    listed = [len(_field(document, key, list)) for key in ("layers", "blobs", "manifests")]
    if len(single) + sum(listed) > _MAX_DESCRIPTORS:
        raise ContentError(f"the document names more than {_MAX_DESCRIPTORS} blobs or manifests")


def _descriptor_in(document: Mapping[str, object], key: str) -> Descriptor | None:
    value = document.get(key)
    return None if value is None else read_descriptor(value, key)


def _descriptors_in(document: Mapping[str, object], key: str) -> list[Descriptor]:
    values = _field(document, key, list)
    return [read_descriptor(value, f"{key}[{number}]") for number, value in enumerate(values)]


def _check_sizes(descriptors: Sequence[Descriptor]) -> None:
    """Raise ContentError where two descriptors give one digest two sizes."""
    sizes: dict[str, int] = {}
    for descriptor in descriptors:
        if sizes.setdefault(descriptor.digest, descriptor.size) != descriptor.size:
            raise ContentError(f"the document gives two sizes for {descriptor.digest}")


def read_descriptor(value: object, where: str) -> Descriptor:
    """Read the descriptor at `where` in a document; ContentError says what is wrong with it."""
    try:
        if not isinstance(value, dict):
            raise ContentError("not an object")
        media_type = _field(value, "mediaType", str)
        if not re.fullmatch(_MEDIA_TYPE, media_type):
            raise ContentError(f"{printable(media_type, 100)!r} is not a media type")
        return Descriptor(
            media_type=media_type.lower(),
            size=_size(value),
            digest=check_digest(_field(value, "digest", str)),
            platform=_platform(value),
            annotations=_annotations(value),
            artifact_type=_field(value, "artifactType", str) or None,
            data=_data(value),
        )
    except ContentError as error:
        raise ContentError(f"{where}: {error.message}") from error


def _size(descriptor: Mapping[str, object]) -> int:
    size = descriptor.get("size")
    # A bool is an int to Python.
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < _SIZE_LIMIT:
        raise ContentError(f"{printable(repr(size), 40)} is not a size")
    return size


def _platform(descriptor: Mapping[str, object]) -> Platform | None:
    """Return a descriptor's platform. None where it names none, or one that no platform filter can
    name, as with an empty `os`.
    """
    platform = _field(descriptor, "platform", dict)
    if not platform:
        return None
    parts = [_field(platform, key, str) for key in ("os", "architecture", "variant")]
    try:
        return parse_platform("/".join(parts).rstrip("/"))
    except ValueError:
        return None


def _data(descriptor: Mapping[str, object]) -> bytes | None:
    """Return a descriptor's embedded content; None where it is empty or no base64."""
    text = _field(descriptor, "data", str)
    try:
        return binascii.a2b_base64(text) or None
    except ValueError:
        return None


def _annotations(document: Mapping[str, object]) -> dict[str, str]:
    """Return annotations without nulls, which occur, and mean nothing to a copy."""
    annotations = _field(document, "annotations", dict)
    return {key: value for key, value in annotations.items() if isinstance(value, str)}


def _field(document: Mapping[str, object], key: str, kind: type[_T]) -> _T:
    """Return the value of a field; ContentError unless it is of type `kind`.

    An absent or null field has the empty value of its type, as in Go.
    """
    value = document.get(key)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ContentError(f"{key!r} is not {_JSON_KINDS[kind]}")
    return value


# JSON within bounds.


def load_json(
    body: bytes,
    context: str,
    parse_float: Callable[[str], object] | None = None,
    *,
    most_values: int = _MAX_VALUES,
) -> dict[str, Any]:
    """Parse the JSON object in a body; ContentError when it is too large, too deep or no object.

    `context` is the last part of each message. `parse_float` converts numbers with a fraction or an
    exponent, as in `json.loads`.
    """
    # Each value but the outermost follows one of these characters. Their count, strings included,
    # is an upper bound that needs no parsing.
    values = body.count(b"{") + body.count(b"[") + body.count(b",")
    if values > most_values:
        raise ContentError(f"the document holds more than {most_values} values; {context}")

    too_deep = f"the document nests deeper than {_MAX_JSON_DEPTH}; {context}"
    try:
        document = json.loads(
            body.decode(),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=parse_float,
            parse_constant=_refuse_number,
        )
    except ValueError as error:
        raise ContentError(f"not JSON ({printable(str(error), 80)}); {context}") from error
    except RecursionError as error:
        raise ContentError(too_deep) from error

    if _is_deeper_than(_MAX_JSON_DEPTH, document):
        raise ContentError(too_deep)
    if not isinstance(document, dict):
        raise ContentError(f"JSON, but not an object; {context}")
    return document


def _is_deeper_than(levels: int, value: object) -> bool:
    """Return whether there is an object or a list so many levels below a value."""
    nested = _nested_in([value])
    for _ in range(levels):
        if not nested:
            return False
        nested = [inner for outer in nested for inner in _nested_in(outer)]
    return bool(nested)


def _nested_in(outer: Any) -> list[Any]:
    """Return the objects and lists in an object or list."""
    values = outer.values() if isinstance(outer, dict) else outer
    return [value for value in values if isinstance(value, dict | list)]


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build an object whose keys are all different.

    Two readers could take two values for one key, and see two images (as in CVE-2021-41190).
    """
    built: dict[str, object] = {}
    for key, value in pairs:
        if key in built:
            raise ContentError(f"the document has the key {printable(key, 60)!r} twice")
        built[key] = value
    return built


def _integer(text: str) -> int:
    # int() takes quadratic time on long texts, which newer Pythons refuse in words of their own.
    if len(text) > _MAX_DIGITS:
        _refuse_number(text)
    return int(text)


def _refuse_number(text: str) -> NoReturn:
    raise ContentError(
        f"the document holds the number {printable(text, 40)}, which cannot be kept as it is"
    )


def _dump(document: Mapping[str, object]) -> bytes:
    """Return a changed index as it is pushed (docs/design.md section 4)."""
    try:
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ContentError(
            "an index with half a character (a lone surrogate) cannot be changed"
        ) from error


# Changed indexes.


class Trimmed(NamedTuple):
    """What a platform filter leaves of an index.

    Where `matched` is empty it leaves nothing, and `manifest` is the index as it was.
    """

    manifest: Manifest
    nested: Mapping[str, Trimmed]  # the indexes below that have a match, by digest before trimming
    matched: frozenset[Platform]  # the wanted platforms that the index has
    available: tuple[str, ...]  # all platforms that the index has


def trim_index(
    index: Manifest, wanted: Sequence[Platform], nested: Mapping[str, Manifest]
) -> Trimmed:
    """Keep the entries that `wanted` asks for (docs/design.md section 4).

    `nested` holds all indexes below, by digest. ContentError where the index cannot be changed.
    """
    return _trim(index, wanted, nested, {})


def _trim(
    index: Manifest,
    wanted: Sequence[Platform],
    nested: Mapping[str, Manifest],
    trimmed: dict[str, Trimmed],
) -> Trimmed:
    """Trim an index, its nested indexes first. `trimmed` collects the results for nested indexes,
    by digest before trimming.
    """
    # For each child what stands in its place: the child itself, a trimmed index, or None.
    chosen: list[Descriptor | None] = []
    matched: set[Platform] = set()
    available: dict[str, None] = {}  # a set in the order of the index
    for child in index.children:
        entry: Descriptor | None = None
        if child.is_index:
            if child.digest not in trimmed:
                trimmed[child.digest] = _trim(nested[child.digest], wanted, nested, trimmed)
            result = trimmed[child.digest]
            matched |= result.matched
            available |= dict.fromkeys(result.available)
            if result.matched:
                left = result.manifest
                entry = child._replace(digest=left.digest, size=left.size)
        elif child.platform and not child.attested_digest:
            matches = [want for want in wanted if platform_matches(want, child.platform)]
            matched.update(matches)
            available[str(child.platform)] = None
            if matches:
                entry = child
        chosen.append(entry)

    chosen = _with_attestations(index.children, chosen)
    digests_chosen = [entry and entry.digest for entry in chosen]
    is_changed = digests_chosen != [child.digest for child in index.children]
    manifest = _rewritten(index, chosen) if is_changed and matched else index
    nested_with_match = {digest: result for digest, result in trimmed.items() if result.matched}
    return Trimmed(manifest, nested_with_match, frozenset(matched), tuple(available))


def _with_attestations(
    children: Sequence[Descriptor], chosen: Sequence[Descriptor | None]
) -> list[Descriptor | None]:
    """Return the chosen entries, and among them the attestations of each image that stays."""
    pairs = list(zip(children, chosen, strict=True))
    chosen_digests = {child.digest for child, entry in pairs if entry}
    return [child if child.attested_digest in chosen_digests else entry for child, entry in pairs]


def _rewritten(index: Manifest, chosen: Sequence[Descriptor | None]) -> Manifest:
    """Return an index with only the chosen children, and without the entries that name blobs.

    `chosen` has an element for each child, in the index's order: None to drop it, or its descriptor,
    which is a new one for a nested index that was trimmed.
    """
    document = load_json(index.body, "the index cannot be trimmed", _refuse_number)
    child_entries = [
        entry for entry in document["manifests"] if not read_descriptor(entry, "manifests").is_blob
    ]
    kept: list[dict[str, Any]] = []
    for entry, descriptor in zip(child_entries, chosen, strict=True):
        if descriptor is None:
            continue
        if descriptor.digest != entry["digest"]:
            entry.update(digest=descriptor.digest, size=descriptor.size)
            # Embedded content is that of the nested index before it was trimmed.
            entry.pop("data", None)
        kept.append(entry)
    document["manifests"] = kept

    body = _dump(document)
    children = tuple(descriptor for descriptor in chosen if descriptor)
    # The layers of an index are its entries that name blobs.
    return index._replace(body=body, digest=digest_of(body), layers=(), children=children)


def referrer_entry(manifest: Manifest) -> Descriptor:
    """Return the entry of a manifest in a list of referrers."""
    return Descriptor(
        manifest.media_type,
        manifest.digest,
        manifest.size,
        artifact_type=manifest.artifact_type,
        annotations=manifest.annotations,
    )


def by_digest_alone(digest: str) -> Descriptor:
    """Return what stands for an entry of which only the digest is known: it has no media type."""
    return Descriptor("", digest, 0)


def extend_referrers_list(existing: Manifest | None, more: Sequence[Descriptor]) -> Manifest:
    """Return a fallback list of referrers: the entries of `existing`, and `more` behind them.

    docs/protocol-facts.md section 1.10 has its form. ContentError where `existing` cannot be
    changed.
    """
    document: dict[str, Any] = {"schemaVersion": 2, "mediaType": _OCI_INDEX, "manifests": []}
    if existing:
        document = load_json(
            existing.body, "the list of referrers cannot be extended", _refuse_number
        )
    for referrer in more:
        entry = {
            "mediaType": referrer.media_type,
            "digest": referrer.digest,
            "size": referrer.size,
            "artifactType": referrer.artifact_type,
            "annotations": dict(referrer.annotations),
        }
        document["manifests"].append({key: value for key, value in entry.items() if value})
    return parse_manifest(_dump(document), content_type=None)
