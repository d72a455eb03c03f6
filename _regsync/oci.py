"""Names, digests, manifests and indexes of the OCI specifications, and trimming by platform.

Invariants: every name, digest and media type that leaves this module is valid, because each may
become part of a URL, header or file name (docs/protocol-facts.md section 9.2, R11 to R14). The bytes
of a manifest are never changed, except for an index that `trim_index` trims or
`extend_referrers_list` extends. A document of any content is read in bounded time and memory, or
refused with ContentError.
Follows: docs/protocol-facts.md section 1, docs/design.md sections 2 and 4.
"""

from __future__ import annotations

import binascii
import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

from _regsync.crypto import DIGEST_HEX_LENGTHS, hash_hex
from _regsync.errors import ConfigError, ContentError, WrongBytes
from _regsync.text import clean_beginning, printable

_T = TypeVar("_T")


# Names and digests.

_NAME_PART = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_REPOSITORY = rf"{_NAME_PART}(?:/{_NAME_PART})*"
_MAX_REPOSITORY = 255  # characters
_TAG = r"[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}"
_REFERRER_TAG = r"sha(?:256|512)-[a-f0-9]{64}(?:\.(?:sig|att|sbom))?"

# A digest of any algorithm. The grammar of algorithms is narrower; it only matters for messages.
_DIGEST = r"[a-z0-9][a-z0-9+._-]*:[a-zA-Z0-9=_-]+"

# The scheme of the address of an image layout: `oci-layout:PATH` takes the place of a host.
LAYOUT_SCHEME: Final = "oci-layout"


def is_repository(text: str) -> bool:
    return len(text) <= _MAX_REPOSITORY and re.fullmatch(_REPOSITORY, text) is not None


def is_tag(text: str) -> bool:
    return re.fullmatch(_TAG, text) is not None


def is_referrer_tag(tag: str) -> bool:
    """Report whether a tag is a fallback tag or one of cosign's tags (docs/design.md section 5)."""
    return re.fullmatch(_REFERRER_TAG, tag) is not None


def is_digest(reference: str) -> bool:
    """Report whether a tag or digest is a digest. Tags contain no colon."""
    return ":" in reference


def check_digest(text: str) -> str:
    """Return `text` unchanged. Raises ContentError unless it is a sha256 or sha512 digest."""
    algorithm, encoded = split_digest(text)
    length = DIGEST_HEX_LENGTHS.get(algorithm)  # None for an algorithm that is not supported
    if length and re.fullmatch(f"[a-f0-9]{{{length}}}", encoded):
        return text
    if length is None and re.fullmatch(_DIGEST, text):
        name = printable(algorithm, 40)
        raise ContentError(f"digests of {name} cannot be verified here, only sha256 and sha512 can")
    raise ContentError(
        f"{printable(text, 140)!r} is not a digest (sha256: and 64 lower-case hex digits)"
    )


def split_digest(digest: str) -> tuple[str, str]:
    """Return the algorithm and the hexadecimal part of a valid digest."""
    algorithm, _, encoded = digest.partition(":")
    return algorithm, encoded


def digest_of(body: bytes, algorithm: str = "sha256") -> str:
    return f"{algorithm}:{hash_hex(algorithm, body)}"


def referrers_tag(digest: str) -> str:
    """Return the fallback tag that holds the list of a digest's referrers.

    Both parts of the digest are truncated to 64 characters (docs/protocol-facts.md section 1.10).
    """
    algorithm, encoded = split_digest(digest)
    return f"{algorithm[:64]}-{encoded[:64]}"


def full_name(host: str, repository: str) -> str:
    """Join a host or an image layout (`oci-layout:PATH`) and a repository."""
    separator = "//" if host.startswith(f"{LAYOUT_SCHEME}:") else "/"
    return f"{host}{separator}{repository}"


def split_full_name(name: str) -> tuple[str, str]:
    """Split a name made by `full_name` into the host or layout and the repository.

    If the name ends in a tag or digest, the second result ends in it too.
    """
    if name.startswith(f"{LAYOUT_SCHEME}:"):
        layout, _, rest = name.rpartition("//")  # a path may have `//` too
        return layout, rest
    host, _, rest = name.partition("/")
    return host, rest


def begins_with_host(name: str) -> bool:
    """Report whether a name begins with a host: a part with a dot or a port, or `localhost`."""
    first, slash, _ = name.partition("/")
    return bool(slash) and ("." in first or ":" in first or first == "localhost")


def image_name(repository: str, reference: str) -> str:
    """Join a repository and a tag or digest."""
    separator = "@" if is_digest(reference) else ":"
    return f"{repository}{separator}{reference}"


# References.


class Reference(NamedTuple):
    """A parsed reference to an image or a repository."""

    registry: str  # `[SCHEME://]HOST[:PORT]` or `oci-layout:PATH`
    repository: str  # may be empty in an image layout
    tag: str | None = None
    digest: str | None = None

    @property
    def is_in_layout(self) -> bool:
        return self.registry.startswith(f"{LAYOUT_SCHEME}:")

    def __str__(self) -> str:
        name = full_name(self.registry, self.repository)
        reference = self.digest or self.tag
        return image_name(name, reference) if reference else name


def parse_reference(text: str) -> Reference:
    """Parse a reference to an image or repository.

    The forms are `[[https://|http://]HOST[:PORT]/]REPO[:TAG|@DIGEST]`, where the default host is
    docker.io, and `oci-layout:PATH[//REPO[:TAG|@DIGEST]]`. Raises ConfigError if the reference is
    invalid.
    """
    try:
        if text.startswith(f"{LAYOUT_SCHEME}:"):
            return _parse_in_layout(text)
        return _parse_in_registry(text)
    except (ContentError, ValueError) as error:
        raise ConfigError(f"reference {printable(text, 300)!r}: {printable(str(error))}") from error


def _parse_in_layout(text: str) -> Reference:
    """Parse a reference into an image layout. The path of the layout ends at the last `//`."""
    layout, separator, name = text.rpartition("//")
    if not separator:
        layout, name = text, ""
    if layout == f"{LAYOUT_SCHEME}:":
        raise ValueError(f"names no directory; write {LAYOUT_SCHEME}:PATH//REPO:TAG")
    if not name:
        return Reference(layout, "")
    # The name has the form REPO[:TAG|@DIGEST], as after any host.
    return _parse_in_registry(f"any.host/{name}")._replace(registry=layout)


def _parse_in_registry(text: str) -> Reference:
    """Parse a reference to a registry.

    Raises ValueError, ContentError or ConfigError if it is invalid.
    """
    name, at, digest = text.partition("@")
    # In `USER:PASSWORD@HOST/REPO`, the `@` follows a password, which no message may show.
    is_like_digest = digest.startswith(("sha256:", "sha512:"))
    if at and ("/" in digest or (":" in name and not is_like_digest)):
        raise ConfigError(
            "a reference cannot hold a user name or password: put them into the configuration; "
            "a digest begins with sha256:"
        )

    registry, name = _split_registry(name)
    repository, colon, tag = name.partition(":")
    if not is_repository(repository):
        grammar = "lower case and digits, '.', '_' or '-' between, parts joined by '/'"
        raise ValueError(
            f"{repository!r} is not a repository ({grammar}); write HOST/REPOSITORY[:TAG]"
        )
    if colon and not is_tag(tag):
        shown = tag[:140]  # longer than any valid tag
        raise ValueError(
            f"{shown!r} is not a tag: 1 to 128 of letters, digits, '_', and '.-' inside"
        )
    if at and tag:
        raise ValueError("has a tag and a digest; leave out the tag, the digest says what to copy")
    return Reference(registry, repository, tag or None, check_digest(digest) if at else None)


def _split_registry(text: str) -> tuple[str, str]:
    """Split a reference into its registry and the name after it. The default is docker.io.

    As in docker, the first part of the text is a host if it contains a dot or a port or is
    `localhost`. After a scheme the first part is always a host, which is not checked. Raises ValueError
    if the scheme is neither https nor http.
    """
    before, separator, after = text.partition("://")
    scheme, rest = (before.lower() + separator, after) if separator else ("", text)
    if scheme not in ("", "https://", "http://"):
        raise ValueError(f"leave out {before + separator!r}, write HOST/REPOSITORY[:TAG]")

    first, slash, name = rest.partition("/")
    label, colon, _ = first.partition(":")
    has_port = slash and colon  # without a slash, the text after the colon is a tag
    if not (scheme or has_port or "." in label or label.lower() == "localhost"):
        return "docker.io", rest
    return scheme + first.lower(), name


# Platforms and descriptors.

# docs/protocol-facts.md section 1.3.
_OCI_INDEX = "application/vnd.oci.image.index.v1+json"
_OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"

# The media type of an empty config. Registries list it as the artifact type of cosign 3's bundles,
# which set their type elsewhere. So it does not identify the type of an artifact
# (docs/protocol-facts.md section 1.10).
EMPTY_CONFIG = "application/vnd.oci.empty.v1+json"
_INDEX_TYPES = (_OCI_INDEX, "application/vnd.docker.distribution.manifest.list.v2+json")
_IMAGE_TYPES = (_OCI_MANIFEST, "application/vnd.docker.distribution.manifest.v2+json")
_DOCKER_SCHEMA_1 = "application/vnd.docker.distribution.manifest.v1+"

IMAGE_CONFIGS = (
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
)

# The Accept header of requests for manifests. If a type is missing, `distribution` answers 404, or
# it answers the linux/amd64 child instead of the manifest list.
ACCEPT_MANIFESTS = ", ".join(_INDEX_TYPES + _IMAGE_TYPES)

# The prefixes of the media types of layers that must not be pushed (docs/protocol-facts.md section
# 1.6). The presence of `urls` does not make a layer foreign.
_FOREIGN_LAYERS = (
    "application/vnd.oci.image.layer.nondistributable.",
    "application/vnd.docker.image.rootfs.foreign.",
)

# The prefixes of the media types of blobs that an index may list under `manifests`, as indexes of
# BuildKit's older cache format do. Entries of all other types are manifests, as in other tools.
_BLOB_TYPES = (
    "application/vnd.oci.image.layer.",
    "application/vnd.docker.image.rootfs.",
    "application/vnd.buildkit.cacheconfig.",
    *IMAGE_CONFIGS,
)

# RFC 6838 section 4.2. A parameter is accepted because some tools push files as
# `text/plain; charset=utf-8`.
_TYPE_NAME = r"[a-zA-Z0-9][a-zA-Z0-9!#$&^_.+-]{0,126}"
_MEDIA_TYPE = rf"{_TYPE_NAME}/{_TYPE_NAME}(?: ?;[ -~]{{0,99}})?"

_PLATFORM_PART = r"[a-z0-9][a-z0-9._-]{0,63}"

# By architecture: the variant of an index entry that names none (docs/design.md section 4).
_DEFAULT_VARIANTS = {"arm64": "v8", "arm": "v7"}

# The names of JSON types in messages.
_JSON_KINDS: Mapping[type, str] = {str: "a string", list: "a list", dict: "an object"}

# Sizes are int64 (image-spec descriptor.md).
_SIZE_LIMIT = 2**63

# Levels of nested indexes, including the top index (docs/protocol-facts.md section 1.5).
MAX_INDEX_DEPTH = 4


class Platform(NamedTuple):
    """A platform that an image runs on. BuildKit marks attestations with `unknown/unknown`."""

    os: str
    architecture: str
    variant: str | None = None

    def __str__(self) -> str:
        return "/".join(filter(None, self))


_UNKNOWN_PLATFORM = Platform("unknown", "unknown")


def parse_platform(text: str) -> Platform:
    """Parse `os/arch[/variant]` and convert it to lower case.

    Raises ValueError if it is malformed.
    """
    if not re.fullmatch(rf"{_PLATFORM_PART}(?:/{_PLATFORM_PART}){{1,2}}", text.lower()):
        raise ValueError(f"{printable(text, 100)!r} is not OS/ARCH[/VARIANT], as in linux/arm64")
    return Platform(*text.lower().split("/"))


def platform_matches(wanted: Platform, have: Platform) -> bool:
    """Report whether an index entry with the platform `have` satisfies a platform filter.

    A filter without a variant matches every variant (docs/design.md section 4).
    """
    variant = have.variant or _DEFAULT_VARIANTS.get(have.architecture)
    return wanted[:2] == have[:2] and wanted.variant in (None, variant)


class Descriptor(NamedTuple):
    """A descriptor of the OCI image specification: the type, digest and size of a blob or manifest."""

    media_type: str  # "" if only the digest is known
    digest: str
    size: int  # bytes
    platform: Platform | None = None
    annotations: Mapping[str, str] = MappingProxyType({})
    artifact_type: str | None = None
    data: bytes | None = None  # embedded content; not yet compared with the digest

    @property
    def is_foreign(self) -> bool:
        return self.media_type.startswith(_FOREIGN_LAYERS)

    @property
    def is_index(self) -> bool:
        return self.media_type in _INDEX_TYPES

    @property
    def is_blob(self) -> bool:
        return self.media_type.startswith(_BLOB_TYPES)

    @property
    def attested_digest(self) -> str | None:
        """The digest of the image that BuildKit's attestation describes; None for other entries."""
        if self.platform != _UNKNOWN_PLATFORM:
            return None
        return self.annotations.get("vnd.docker.reference.digest")


def read_descriptor(value: object, where: str) -> Descriptor:
    """Read and validate a descriptor of a JSON document. Raises ContentError if it is invalid.

    `where` is the descriptor's place in the document, for error messages.
    """
    try:
        if not isinstance(value, dict):
            raise ContentError("not an object")
        media_type = _read_field(value, "mediaType", str)
        if not re.fullmatch(_MEDIA_TYPE, media_type):
            raise ContentError(f"{printable(media_type, 100)!r} is not a media type")
        size = value.get("size")
        # In Python, bool is a subclass of int.
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < _SIZE_LIMIT:
            raise ContentError(f"{printable(repr(size), 40)} is not a size")
        return Descriptor(
            media_type=media_type.lower(),
            size=size,
            digest=check_digest(_read_field(value, "digest", str)),
            platform=_read_platform(value),
            annotations=_read_annotations(value),
            artifact_type=_read_field(value, "artifactType", str) or None,
            data=_read_data(value),
        )
    except ContentError as error:
        raise ContentError(f"{where}: {error.message}") from error


def _read_platform(descriptor: Mapping[str, object]) -> Platform | None:
    """Return the platform of a descriptor.

    Returns None if the descriptor has no platform, or if no platform filter can match the platform,
    for example because `os` is empty.
    """
    platform = _read_field(descriptor, "platform", dict)
    if not platform:
        return None
    parts = [_read_field(platform, key, str) for key in ("os", "architecture", "variant")]
    try:
        # A part that is absent is empty. Without a variant, the joined text ends in a slash.
        return parse_platform("/".join(parts).rstrip("/"))
    except ValueError:
        return None


def _read_data(descriptor: Mapping[str, object]) -> bytes | None:
    """Return a descriptor's embedded content. Returns None if it is empty or not valid base64."""
    text = _read_field(descriptor, "data", str)
    try:
        return binascii.a2b_base64(text) or None
    except ValueError:
        return None


def _read_annotations(document: Mapping[str, object]) -> dict[str, str]:
    """Return the annotations whose value is a string. Some documents have null values, too."""
    annotations = _read_field(document, "annotations", dict)
    return {key: value for key, value in annotations.items() if isinstance(value, str)}


def _read_field(document: Mapping[str, object], key: str, kind: type[_T]) -> _T:
    """Return the value of a field. Raises ContentError if its type is not `kind`.

    An absent or null field has the empty value of its type, as in Go.
    """
    value = document.get(key)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ContentError(f"{key!r} is not {_JSON_KINDS[kind]}")
    return value


# Manifests.

# Content types of servers that do not know the type of the document. The document's own fields
# determine the type then.
_GENERIC_TYPES = ("application/json", "application/octet-stream", "text/plain")

# Descriptors in one document. A document of 4 MiB could have about 30,000. No known document has
# 10,000.
_MAX_DESCRIPTORS = 10_000


class Manifest(NamedTuple):
    """The body of a manifest or index, and the fields of it that a copy needs."""

    media_type: str
    digest: str  # in the algorithm of the requested digest; sha256 if none was requested
    body: bytes
    is_index: bool = False
    config: Descriptor | None = None
    layers: tuple[Descriptor, ...] = ()  # of an index: entries that are blobs
    children: tuple[Descriptor, ...] = ()  # of an index: entries that are manifests
    subject: Descriptor | None = None
    artifact_type: str | None = None
    annotations: Mapping[str, str] = MappingProxyType({})
    is_trimmed: bool = False  # whether `trim_index` created it, so that no source has it

    @property
    def size(self) -> int:
        return len(self.body)

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        """The config and the layers, without foreign layers and without duplicates.

        Of a digest with two sizes both stay, because a copy refuses that.
        """
        unique: dict[tuple[str, int], Descriptor] = {}
        for blob in (self.config, *self.layers):
            if blob and not blob.is_foreign:
                unique.setdefault((blob.digest, blob.size), blob)
        return tuple(unique.values())

    @property
    def dependencies(self) -> tuple[Descriptor, ...]:
        """The blobs and children that a repository must have before this manifest is pushed."""
        return (*self.blobs, *self.children)


def referrer_entry(manifest: Manifest) -> Descriptor:
    """Return the descriptor of a manifest for a list of referrers."""
    return Descriptor(
        manifest.media_type,
        manifest.digest,
        manifest.size,
        artifact_type=manifest.artifact_type,
        annotations=manifest.annotations,
    )


class _Received(NamedTuple):
    """A response, whose text for error messages is made only where there is one."""

    media_type: str
    body: bytes

    def __str__(self) -> str:
        beginning = f"beginning {clean_beginning(self.body, 60)!r}" if self.body else "no body"
        return f"received {printable(self.media_type, 80) or 'no content type'}, {beginning}"


def parse_manifest(
    body: bytes,
    *,
    content_type: str | None,
    digest: str | None = None,
    expected: Descriptor | None = None,
) -> Manifest:
    """Verify and parse the body of a manifest or index.

    `content_type` is the header of the response. `expected` is the descriptor whose manifest was
    requested, for example an index entry. Without a descriptor, `digest` is the requested digest,
    or None if a tag was requested. Raises WrongBytes if the body does not have the requested
    digest, and ContentError if the body is not an acceptable manifest.
    """
    response_type = (content_type or "").partition(";")[0].strip().lower()
    received = _Received(response_type, body)

    wanted_digest = expected.digest if expected else digest
    algorithm = split_digest(check_digest(wanted_digest))[0] if wanted_digest else "sha256"
    actual_digest = digest_of(body, algorithm)
    has_wanted_digest = not wanted_digest or wanted_digest == actual_digest
    # A body with the wanted digest is final: another response would have the same bytes. After
    # WrongBytes, the caller may repeat the request.
    error_type = ContentError if has_wanted_digest else WrongBytes
    if expected and len(body) != expected.size:
        raise error_type(
            f"the manifest has {len(body)} bytes, the index says {expected.size}; {received}"
        )
    try:
        document = load_json(body, received)
    except ContentError as error:
        hint = "check whether a proxy or a login page answers in place of the registry"
        raise error_type(error.message, hint=hint) from error

    # Schema 1 is refused before digests are compared, because the digest of a schema 1 manifest
    # excludes the signatures and therefore never matches the body.
    own_type = _read_field(document, "mediaType", str).lower()
    names_schema_1 = any(each.startswith(_DOCKER_SCHEMA_1) for each in (own_type, response_type))
    if names_schema_1 or document.get("schemaVersion") == 1:
        raise ContentError(
            "a Docker schema 1 manifest, which cannot be copied unchanged",
            hint="push the image again with a current tool, as schema 2 or OCI",
        )
    if not has_wanted_digest:
        raise WrongBytes(f"asked for {wanted_digest}, got {actual_digest}; {received}")

    header_type = "" if response_type in _GENERIC_TYPES else response_type
    entry_type = expected.media_type if expected else ""
    stated_types = [stated for stated in (own_type, header_type, entry_type) if stated]
    media_type = _determine_type(document, stated_types, received)
    return _read_manifest(document, media_type, actual_digest, body)


def _determine_type(
    document: Mapping[str, object], stated_types: Sequence[str], received: _Received
) -> str:
    """Return the media type of a document.

    `stated_types` are the types in the document, the response header and the index entry, as far as
    they are present. If none is present, the type follows from the document's fields. Raises
    ContentError if the stated types differ, if the fields do not fit the type, or if the type is
    neither stated nor follows. Two readers could otherwise take the document for two different
    things (R13). `received` describes the response in error messages.
    """
    if len(set(stated_types)) > 1:
        text = ", ".join(printable(stated, 100) for stated in stated_types)
        raise ContentError(
            f"document, header and index entry name different types ({text}); {received}"
        )
    has_manifests = document.get("manifests") is not None
    has_image_fields = any(document.get(key) is not None for key in ("config", "layers"))
    if has_manifests and has_image_fields:
        raise ContentError(
            "the document is both a manifest and an index, which is refused (CVE-2021-41190)"
        )

    implied_type = _OCI_INDEX if has_manifests else _OCI_MANIFEST if has_image_fields else ""
    media_type = stated_types[0] if stated_types else implied_type
    if not (re.fullmatch(_MEDIA_TYPE, media_type) and media_type.startswith("application/")):
        raise ContentError(f"neither a manifest nor an index; {received}")
    # `"manifests": null` is an empty index, as in Go's JSON decoder. The required fields of other
    # types are unknown.
    is_no_index = media_type in _INDEX_TYPES and (has_image_fields or "manifests" not in document)
    is_no_image = media_type in _IMAGE_TYPES and document.get("config") is None
    if is_no_index or is_no_image:
        raise ContentError(f"the document does not have the fields of {media_type}; {received}")
    return media_type


def _read_manifest(
    document: Mapping[str, object], media_type: str, digest: str, body: bytes
) -> Manifest:
    """Build the Manifest for a document. Raises ContentError if a descriptor in it is invalid."""
    # An old ORAS artifact manifest has its layers in `blobs`.
    lists = {key: _read_field(document, key, list) for key in ("layers", "blobs", "manifests")}
    if sum(map(len, lists.values())) > _MAX_DESCRIPTORS:
        raise ContentError(f"the document names more than {_MAX_DESCRIPTORS} blobs or manifests")
    single = {
        key: read_descriptor(document[key], key)
        for key in ("config", "subject")
        if document.get(key) is not None
    }
    listed = {
        key: [read_descriptor(value, f"{key}[{number}]") for number, value in enumerate(values)]
        for key, values in lists.items()
    }

    config = single.get("config")
    # An index of BuildKit's older cache format lists blobs under `manifests`.
    blobs_in_index = [entry for entry in listed["manifests"] if entry.is_blob]
    children = [entry for entry in listed["manifests"] if not entry.is_blob]
    # The image specification gives an artifact without a type the type of its config.
    config_type = config.media_type if config else None
    return Manifest(
        media_type=media_type,
        digest=digest,
        body=body,
        # A document of another type that has children is copied as an index.
        is_index=media_type in _INDEX_TYPES or bool(children),
        config=config,
        layers=(*listed["layers"], *listed["blobs"], *blobs_in_index),
        children=tuple(children),
        subject=single.get("subject"),
        artifact_type=_read_field(document, "artifactType", str) or config_type,
        annotations=_read_annotations(document),
    )


# JSON with limits.

# JSON values in one document. Parsing 4 MiB of empty lists takes seconds and 100 MB.
_MAX_VALUES = 30 * _MAX_DESCRIPTORS

# Levels of nested JSON objects and lists (docs/design.md section 4).
_MAX_JSON_DEPTH = 64


def most_values_in(body: bytes) -> int:
    """Return a number of values that a JSON text does not exceed, without parsing it."""
    # Every value except the outermost follows one of these characters. Some are inside strings.
    return body.count(b"{") + body.count(b"[") + body.count(b",")


def load_json(
    body: bytes, context: object, *, most_values: int = _MAX_VALUES, must_round_trip: bool = False
) -> dict[str, Any]:
    """Parse a JSON object.

    The text of `context` ends each error message. If `must_round_trip` is set, numbers with a
    fraction or an exponent are refused, because serializing them again could change them. Raises
    ContentError if the body is not a JSON object, has more than `most_values` values, or is nested
    too deeply.
    """
    if most_values_in(body) > most_values:
        raise ContentError(f"the document holds more than {most_values} values; {context}")

    try:
        document = json.loads(
            body.decode(),
            object_pairs_hook=_build_object,
            parse_float=_refuse_number if must_round_trip else None,
            parse_constant=_refuse_number,
        )
        if _is_deeper_than(_MAX_JSON_DEPTH, document):
            raise RecursionError
    except ValueError as error:  # also of an integer with thousands of digits
        raise ContentError(f"not JSON ({printable(str(error), 80)}); {context}") from error
    except RecursionError as error:
        text = f"the document nests deeper than {_MAX_JSON_DEPTH}"
        raise ContentError(f"{text}; {context}") from error
    if not isinstance(document, dict):
        raise ContentError(f"JSON, but not an object; {context}")
    return document


def _is_deeper_than(levels: int, value: object) -> bool:
    """Report whether objects and lists are nested more than `levels` levels deep in a value.

    The value itself is the first level.
    """
    if not isinstance(value, dict | list):
        return False
    inner_values = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper_than(levels - 1, inner) for inner in inner_values)


def _build_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build a dict from the pairs of a JSON object. Raises ContentError for a repeated key.

    If a key is repeated, two readers could use different values and see different images (as in
    CVE-2021-41190).
    """
    built: dict[str, object] = {}
    for key, value in pairs:
        if key in built:
            raise ContentError(f"the document has the key {printable(key, 60)!r} twice")
        built[key] = value
    return built


def _refuse_number(text: str) -> NoReturn:
    raise ContentError(
        f"the document holds the number {printable(text, 40)}, which cannot be kept as it is"
    )


# Changed indexes.

# Part of the key under which the state keeps trimmed indexes. It must be incremented whenever the
# result of trimming changes.
TRIM_RULE = "1"


class TrimmedIndex(NamedTuple):
    """The result of trimming an index to the wanted platforms.

    If no platform matched, `matched` is empty and `manifest` is the unchanged index.
    """

    manifest: Manifest
    matched: frozenset[Platform]  # the wanted platforms that the index has
    available: tuple[Platform, ...]  # all platforms that the index has


def trim_index(index: Manifest, wanted: Sequence[Platform]) -> TrimmedIndex:
    """Remove the entries of an index whose platform is not wanted (docs/design.md section 4).

    An attestation stays with its image. All other entries are removed: blobs, and manifests without
    a platform. Raises ContentError if an entry is itself an index, or if the index cannot be changed.
    """
    if any(child.is_index for child in index.children):
        text = "one of its entries is itself an index, which `platforms` cannot filter"
        raise ContentError(text, hint="leave out `platforms` for this image, to copy all of it")

    def is_wanted(entry: Descriptor) -> bool:
        if entry.platform is None or entry.attested_digest:
            return False
        return any(platform_matches(want, entry.platform) for want in wanted)

    wanted_digests = {child.digest for child in index.children if is_wanted(child)}

    def is_kept(entry: Descriptor) -> bool:
        is_attestation = entry.attested_digest in wanted_digests
        return not entry.is_blob and (is_wanted(entry) or is_attestation)

    # Without duplicates, in the order of the index.
    available = dict.fromkeys(
        child.platform for child in index.children if child.platform and not child.attested_digest
    )
    matched = frozenset(
        want for want in wanted if any(platform_matches(want, have) for have in available)
    )
    kept = tuple(child for child in index.children if is_kept(child))
    if not kept or len(kept) == len(index.children):
        return TrimmedIndex(index, matched, tuple(available))

    document = load_json(index.body, "the index cannot be trimmed", must_round_trip=True)
    document["manifests"] = [
        entry for entry in document["manifests"] if is_kept(read_descriptor(entry, "manifests"))
    ]
    body = _serialize(document)
    trimmed = index._replace(
        body=body, digest=digest_of(body), layers=(), children=kept, is_trimmed=True
    )
    return TrimmedIndex(trimmed, matched, tuple(available))


def descriptor_json(descriptor: Descriptor) -> dict[str, Any]:
    """Return the JSON object of a descriptor for a list of referrers, or for a layout."""
    document = {
        "mediaType": descriptor.media_type,
        "digest": descriptor.digest,
        "size": descriptor.size,
        "artifactType": descriptor.artifact_type,
        "annotations": dict(descriptor.annotations),
    }
    return {key: value for key, value in document.items() if value}


def extend_referrers_list(existing: Manifest | None, more: Sequence[Descriptor]) -> Manifest:
    """Return a fallback list of referrers with the entries of `existing`, followed by `more`.

    Its form is described in docs/protocol-facts.md section 1.10. Raises ContentError if `existing`
    cannot be changed.
    """
    document: dict[str, Any] = {"schemaVersion": 2, "mediaType": _OCI_INDEX, "manifests": []}
    if existing:
        context = "the list of referrers cannot be extended"
        document = load_json(existing.body, context, must_round_trip=True)
    # Go's tools write an empty list as null.
    document["manifests"] = [*(document["manifests"] or ()), *map(descriptor_json, more)]
    return parse_manifest(_serialize(document), content_type=None)


def _serialize(document: Mapping[str, object]) -> bytes:
    """Serialize a changed index for the push (docs/design.md section 4)."""
    try:
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ContentError(
            "an index with half a character (a lone surrogate) cannot be changed"
        ) from error
