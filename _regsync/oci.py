"""The vocabulary of the OCI specifications: names, references, digests, descriptors, manifests, platforms.

Owns: every grammar of a registry's nouns, what counts as a readable manifest, which entries of an index a
platform filter keeps. May not know: registries, configuration, HTTP; bytes come in, values go out.
Invariant: a manifest's bytes are kept as they came; new bytes are written by `trim_index` alone, and only
when an entry drops. No digest, tag, name or media type leaves this module unchecked, so that they may
become part of a URL, a header or a file name (protocol-facts.md section 9.2, R11 to R14).
Follows image-spec 1.1 and distribution-spec 1.1.1 by protocol-facts.md section 1, and design.md sections 2
("References") and 4 ("Platform").
"""

from __future__ import annotations

import binascii
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

from _regsync import fips
from _regsync.errors import ConfigError, ContentError, clean

__all__ = [
    "ACCEPT_MANIFESTS",
    "DOCKER_HUB",
    "DOCKER_HUB_NAMES",
    "EMPTY_CONFIG_BODY",
    "EMPTY_CONFIG_DIGEST",
    "IMAGE_CONFIG_TYPES",
    "INDEX_TYPES",
    "MAX_INDEX_DEPTH",
    "MAX_MANIFEST",
    "TRIM_RULE",
    "Descriptor",
    "Manifest",
    "Platform",
    "Reference",
    "Trimmed",
    "check_digest",
    "digest_of",
    "is_referrer_tag",
    "is_repository",
    "is_tag",
    "nested_indexes",
    "parse_manifest",
    "parse_platform",
    "parse_reference",
    "platform_matches",
    "referrers_tag",
    "split_digest",
    "trim_index",
]

# protocol-facts.md section 1.3.
_OCI_INDEX = "application/vnd.oci.image.index.v1+json"
_OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
_DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_SCHEMA_1 = "application/vnd.docker.distribution.manifest.v1+"
INDEX_TYPES = frozenset({_OCI_INDEX, _DOCKER_LIST})
_IMAGE_TYPES = frozenset({_OCI_MANIFEST, _DOCKER_MANIFEST})
IMAGE_CONFIG_TYPES = frozenset(
    {"application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json"}
)
# Without a type of this list `distribution` answers 404, or the linux/amd64 child instead of the list.
ACCEPT_MANIFESTS = ", ".join((_OCI_INDEX, _DOCKER_LIST, _OCI_MANIFEST, _DOCKER_MANIFEST))
# What servers send that do not know what they hold; the document decides then.
_GENERIC_TYPES = frozenset({"", "application/json", "application/octet-stream", "text/plain"})
# protocol-facts.md section 1.6: by media type, never by the presence of `urls`.
_FOREIGN = (
    "application/vnd.oci.image.layer.nondistributable.",
    "application/vnd.docker.image.rootfs.foreign.",
)

EMPTY_CONFIG_BODY = b"{}"
EMPTY_CONFIG_DIGEST = "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"

# `distribution` and c/image stop at the same size (protocol-facts.md section 1.4).
MAX_MANIFEST = 4 * 1024 * 1024
# 4 MiB hold about 30,000 descriptors; no index of that many entries has been seen.
_MAX_DESCRIPTORS = 10_000
# Below Python's recursion limit with room for the callers' frames; what has to be re-written may nest less.
_MAX_DEPTH = 256
_MAX_DEPTH_REWRITTEN = 64
# Indexes within indexes, the top one counted (protocol-facts.md section 1.5).
MAX_INDEX_DEPTH = 4
_MAX_SIZE = 2**63 - 1

# protocol-facts.md section 1.1. `_` and `__` are written as one alternative: the grammar stays linear.
_NAME_PART = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_NAME_PART}(?:/{_NAME_PART})*")
_MAX_NAME = 255
_TAG = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}")
_DIGEST = re.compile(r"([a-z0-9]+(?:[+._-][a-z0-9]+)*):([a-zA-Z0-9=_-]+)")
_HEX = re.compile(r"[a-f0-9]+")
_REFERRER_TAG = re.compile(r"sha256-[a-f0-9]{64}(?:\.(?:sig|att|sbom))?")
# RFC 6838 section 4.2; parameters are forgiven, since nothing but this program's headers depends on them.
_MEDIA_TYPE = re.compile(
    r"[A-Za-z0-9][\w!#$&^.+-]{0,126}/[A-Za-z0-9][\w!#$&^.+-]{0,126}(?: ?;[ -~]{0,99})?", re.A
)
_HOST_LABEL = r"[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?"
_HOST = re.compile(rf"{_HOST_LABEL}(?:\.{_HOST_LABEL})*")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

DOCKER_HUB = "docker.io"
# protocol-facts.md section 7.2.
DOCKER_HUB_NAMES = frozenset({DOCKER_HUB, "index.docker.io", "registry-1.docker.io"})


# --- names and digests -------------------------------------------------------------------------------


def is_repository(text: str) -> bool:
    """Tell whether `text` is a repository name."""
    return len(text) <= _MAX_NAME and _REPOSITORY.fullmatch(text) is not None


def is_tag(text: str) -> bool:
    """Tell whether `text` is a tag."""
    return _TAG.fullmatch(text) is not None


def check_digest(text: str) -> str:
    """Return `text` when it is a digest that this program can verify; ContentError otherwise."""
    match = _DIGEST.fullmatch(text)
    if match is None:
        raise ContentError(f"{clean(text, 100)!r} is not a digest (sha256: and 64 hexadecimal characters)")
    algorithm, encoded = match.groups()
    length = fips.DIGEST_HEX_LENGTHS.get(algorithm)
    if length is None:
        known = " and ".join(fips.DIGEST_HEX_LENGTHS)
        raise ContentError(f"digests of {clean(algorithm, 40)} cannot be verified here, only {known} can")
    if len(encoded) != length or not _HEX.fullmatch(encoded):
        raise ContentError(
            f"{clean(text, 100)!r} is not a digest: {algorithm} has {length} lower-case hexadecimal characters"
        )
    return text


def split_digest(digest: str) -> tuple[str, str]:
    """Return the algorithm and the hexadecimal part of a checked digest."""
    algorithm, _, encoded = digest.partition(":")
    return algorithm, encoded


def digest_of(body: bytes, algorithm: str = "sha256") -> str:
    """Compute the digest of `body`."""
    return f"{algorithm}:{fips.hash_hex(algorithm, body)}"


def referrers_tag(digest: str) -> str:
    """Return the fallback tag under which a digest's referrers are listed (protocol-facts.md section 1.10)."""
    algorithm, encoded = split_digest(digest)
    return f"{algorithm[:32]}-{encoded[:64]}"


def is_referrer_tag(tag: str) -> bool:
    """Tell whether a tag names referrers or cosign's attachments instead of an image (design.md section 5)."""
    return _REFERRER_TAG.fullmatch(tag) is not None


# --- references --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reference:
    """An image by host (with its port; one name for Docker Hub), repository, and tag or digest or neither."""

    host: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    @property
    def name(self) -> str:
        return f"{self.host}/{self.repository}"

    def __str__(self) -> str:
        if self.digest:
            return f"{self.name}@{self.digest}"
        return f"{self.name}:{self.tag}" if self.tag else self.name


def parse_reference(text: str, *, default_host: str = DOCKER_HUB) -> Reference:
    """Read `HOST[:PORT]/REPO[:TAG|@DIGEST]`; no tag is implied. ConfigError, with the remedy, otherwise.

    A first segment without `.`, `:` and other than `localhost` belongs to `default_host`.
    """
    name, at, digest = text.partition("@")
    if "/" in digest:
        # Not shown: what stands before the @ may be a password.
        raise ConfigError(
            "a reference holds no user name or password; put credentials into the configuration"
        )
    try:
        return _parse_reference(name, digest if at else None, default_host)
    except (ContentError, ValueError) as error:
        raise ConfigError(f"reference {clean(text, 300)!r}: {error}") from error


def _parse_reference(name: str, digest: str | None, default_host: str) -> Reference:
    """Do `parse_reference`'s work; a ValueError holds the problem and its remedy."""
    scheme = _SCHEME.match(name)
    if scheme:
        raise ValueError(f"leave out {scheme[0]!r} and write HOST/REPOSITORY")
    first, slash, rest = name.partition("/")
    label = first.partition(":")[0]
    if "." in label or label == "localhost" or first.startswith("[") or (slash and ":" in first):
        if not rest:
            raise ValueError(f"no repository after the host; write {first}/REPOSITORY[:TAG]")
        host = _parse_host(first)
    else:
        host, rest = default_host, name
    if ":" in rest:
        repository, _, tag = rest.partition(":")
        if not is_tag(tag):
            raise ValueError(
                f"{clean(tag, 140)!r} is not a tag: 1 to 128 letters, digits, '_', '.' and '-', no '.' or '-' first"
            )
        if digest is not None:
            raise ValueError("has both a tag and a digest; leave out the tag, the digest says what to copy")
    else:
        repository, tag = rest, ""
    _check_repository(host, repository)
    return Reference(host, repository, tag or None, None if digest is None else check_digest(digest))


def _parse_host(text: str) -> str:
    """Return `HOST[:PORT]` in lower case, IPv6 addresses in brackets and shortest form."""
    host, colon, port = text.lower().rpartition(":")
    if not colon or "]" in port:
        host, colon, port = text.lower(), "", ""
    if colon and not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536 and len(port) < 6):
        raise ValueError(f"{clean(port, 20)!r} is not a port (1 to 65535)")
    if host.startswith("["):
        import ipaddress

        if not host.endswith("]") or "%" in host:
            raise ValueError("an IPv6 host is written [ADDRESS]:PORT")
        host = f"[{ipaddress.IPv6Address(host[1:-1])}]"
    elif ":" in host:
        raise ValueError("put brackets around an IPv6 host: [ADDRESS]:PORT")
    elif len(host) > 253 or not _HOST.fullmatch(host):
        raise ValueError(f"{clean(host, 100)!r} is not a host name")
    if host in DOCKER_HUB_NAMES and port in ("", "443"):
        return DOCKER_HUB
    return f"{host}:{int(port)}" if port else host


def _check_repository(host: str, repository: str) -> None:
    if is_repository(repository) and len(host) + 1 + len(repository) <= _MAX_NAME:
        return
    if len(host) + 1 + len(repository) > _MAX_NAME:
        raise ValueError(f"host and repository are longer than {_MAX_NAME} characters")
    if not repository:
        raise ValueError("the repository is missing; write HOST/REPOSITORY[:TAG]")
    if "" in repository.split("/"):
        raise ValueError("the repository has an empty part; remove the extra '/'")
    if is_repository(repository.lower()):
        raise ValueError(f"repository names are lower case; write {repository.lower()!r}")
    raise ValueError(
        f"{clean(repository, 100)!r} is not a repository name: lower-case letters and digits, single '.', '_' or "
        "'-' between them, parts joined by '/'"
    )


# --- platforms ---------------------------------------------------------------------------------------

_PLATFORM_PART = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Platform:
    """An operating system and architecture, with a variant when one is named."""

    os: str
    architecture: str
    variant: str | None = None

    def __str__(self) -> str:
        return "/".join(filter(None, (self.os, self.architecture, self.variant)))


def parse_platform(text: str) -> Platform:
    """Read `os/arch[/variant]`, lower-casing it; ValueError when it is something else."""
    parts = text.lower().split("/")
    if len(parts) not in (2, 3) or not all(_PLATFORM_PART.fullmatch(part) for part in parts):
        raise ValueError(
            f"{clean(text, 100)!r} is not a platform; write OS/ARCH or OS/ARCH/VARIANT, as in linux/arm64"
        )
    return Platform(*parts)


def platform_matches(wanted: Platform, have: Platform) -> bool:
    """Tell whether an index entry's platform is one that was asked for (design.md section 4)."""
    if (wanted.os, wanted.architecture) != (have.os, have.architecture):
        return False
    implied = {"arm64": "v8", "arm": "v7"}.get(have.architecture)
    return wanted.variant is None or wanted.variant == (have.variant or implied)


# --- descriptors and manifests -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """What a document says of a blob or manifest. `data` is set only when it is that content, verified."""

    media_type: str
    digest: str
    size: int
    platform: Platform | None = None
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)
    artifact_type: str | None = None
    data: bytes | None = field(default=None, repr=False)

    @property
    def is_foreign(self) -> bool:
        """Whether this is a layer that must not be pushed (protocol-facts.md section 1.6)."""
        return self.media_type.lower().startswith(_FOREIGN)

    @property
    def is_index(self) -> bool:
        return self.media_type in INDEX_TYPES

    @property
    def attests(self) -> str | None:
        """The digest of the sibling that this entry is BuildKit's attestation of."""
        if self.platform != Platform("unknown", "unknown"):
            return None
        return self.annotations.get("vnd.docker.reference.digest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A manifest or index: its bytes as they came, and what of them matters for a copy.

    `digest` is the one that was asked for, else the sha256. `artifact_type` falls back to the config's type.
    """

    media_type: str
    digest: str
    body: bytes = field(repr=False)
    is_index: bool = False
    config: Descriptor | None = None
    layers: tuple[Descriptor, ...] = ()
    children: tuple[Descriptor, ...] = ()
    subject: Descriptor | None = None
    artifact_type: str | None = None
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def size(self) -> int:
        return len(self.body)

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        """The blobs that a target needs before this manifest: config, then layers, each digest once."""
        named = (self.config, *self.layers) if self.config else self.layers
        unique: dict[str, Descriptor] = {}
        for blob in named:
            if not blob.is_foreign:
                unique.setdefault(blob.digest, blob)
        return tuple(unique.values())


def parse_manifest(
    body: bytes,
    *,
    content_type: str | None,
    digest: str | None = None,
    expected: Descriptor | None = None,
    reference: str = "",
) -> Manifest:
    """Verify and read a manifest or index; ContentError, which names `reference`, for anything else.

    `digest` is what was asked for, `expected` the descriptor that led here: both are compared with the bytes.
    Unknown media types are read for the fields that they share with the known ones.
    """
    stated = (content_type or "").partition(";")[0].strip().lower()
    try:
        return _read_manifest(body, stated, digest, expected)
    except ContentError as error:
        error.reference = error.reference or reference or None
        raise


def _read_manifest(body: bytes, stated: str, digest: str | None, expected: Descriptor | None) -> Manifest:
    received = f"received {clean(stated, 80) or 'no content type'}"
    if stated.startswith(_SCHEMA_1):
        _refuse_schema_1()
    if len(body) > MAX_MANIFEST:
        raise ContentError(f"the manifest is larger than {MAX_MANIFEST} bytes")
    if expected and len(body) != expected.size:
        raise ContentError(
            f"the manifest has {len(body)} bytes, its descriptor says {expected.size}; {received}"
        )
    shown = clean(body[:80].decode("utf-8", "replace"), 60)
    received = f"{received}, beginning {shown!r}" if body else f"{received} and an empty body"
    for wanted in filter(None, (digest, expected.digest if expected else None)):
        found = digest_of(body, split_digest(check_digest(wanted))[0])
        if found != wanted:
            raise ContentError(f"asked for {wanted}, but the bytes are {found}; {received}")
    try:
        document = _load(body)
    except ValueError as error:
        raise ContentError(f"not a manifest but {clean(str(error), 100)}; {received}") from error
    media_type = _media_type(document, stated, received)
    if expected and expected.media_type.lower() != media_type.lower():
        raise ContentError(f"the index says {expected.media_type}, the manifest is {media_type}")
    own = digest or (expected.digest if expected else digest_of(body))
    return _collect(document, media_type, own, body)


def _refuse_schema_1() -> NoReturn:
    # Its digest leaves out the signatures, so the bytes cannot be copied and keep it (section 1.3).
    raise ContentError(
        "this is a Docker schema 1 manifest, which cannot be copied unchanged",
        hint="push the image again with a current tool; Docker gave the format up in 2019",
    )


def _media_type(document: dict[str, Any], stated: str, received: str) -> str:
    """Decide what a document is; refuse it when header and document disagree (R13)."""
    if document.get("schemaVersion") == 1:
        _refuse_schema_1()
    inside = _field(document, "mediaType", str, "")
    if inside and not _MEDIA_TYPE.fullmatch(inside):
        raise ContentError(f"'mediaType' is not a media type: {clean(inside, 100)!r}")
    if inside.lower().startswith(_SCHEMA_1):
        _refuse_schema_1()
    if stated not in _GENERIC_TYPES and inside and inside.lower() != stated:
        raise ContentError(f"the registry says {clean(stated, 100)}, the document says {inside}")
    is_index = document.get("manifests") is not None
    is_image = any(document.get(key) is not None for key in ("config", "layers"))
    if is_index and is_image:
        raise ContentError("the document is both a manifest and an index, which is refused (CVE-2021-41190)")
    media_type = inside or ("" if stated in _GENERIC_TYPES else stated)
    if not media_type:
        if not is_index and not is_image:
            raise ContentError(f"neither a manifest nor an index; {received}")
        return _OCI_INDEX if is_index else _OCI_MANIFEST
    if not media_type.startswith("application/") or not _MEDIA_TYPE.fullmatch(media_type):
        raise ContentError(f"not a manifest; {received}")
    known, needed = media_type.lower(), None
    if known in INDEX_TYPES and (is_image or "manifests" not in document):
        needed = "manifests"
    elif known in _IMAGE_TYPES and (is_index or "config" not in document):
        needed = "config"
    if needed:
        raise ContentError(
            f"the document does not have the fields of its type {media_type}; {needed!r} is needed"
        )
    if known in INDEX_TYPES | _IMAGE_TYPES and document.get("schemaVersion", 2) != 2:
        raise ContentError(f"schemaVersion {clean(repr(document['schemaVersion']), 40)} is unknown")
    return media_type


def _collect(document: dict[str, Any], media_type: str, digest: str, body: bytes) -> Manifest:
    """Read the descriptors of a document whose type is settled."""
    lists = {key: _field(document, key, list, []) for key in ("layers", "blobs", "manifests")}
    if sum(map(len, lists.values())) > _MAX_DESCRIPTORS:
        raise ContentError(f"the document names more than {_MAX_DESCRIPTORS} blobs or manifests")
    read = {
        key: tuple(_descriptor(entry, f"{key}[{position}]") for position, entry in enumerate(entries))
        for key, entries in lists.items()
    }
    config, subject = (
        None if document.get(key) is None else _descriptor(document[key], key)
        for key in ("config", "subject")
    )
    # `blobs` is what the old ORAS artifact manifest calls its layers.
    layers, children = read["layers"] + read["blobs"], read["manifests"]
    sizes: dict[str, int] = {}
    for entry in (*layers, *children, *((config,) if config else ())):
        if sizes.setdefault(entry.digest, entry.size) != entry.size:
            raise ContentError(f"the document gives two sizes for {entry.digest}")
    artifact_type = _field(document, "artifactType", str, "") or (config.media_type if config else None)
    return Manifest(
        media_type=media_type,
        digest=digest,
        body=body,
        is_index=media_type.lower() in INDEX_TYPES or bool(children),
        config=config,
        layers=layers,
        children=children,
        subject=subject,
        artifact_type=artifact_type,
        annotations=_annotations(document),
    )


def _descriptor(value: object, where: str) -> Descriptor:
    if not isinstance(value, dict):
        raise ContentError(f"{where} is not an object")
    try:
        media_type = _field(value, "mediaType", str, "")
        if not _MEDIA_TYPE.fullmatch(media_type):
            raise ContentError(f"'mediaType' is not a media type: {clean(media_type, 100)!r}")
        digest = check_digest(_field(value, "digest", str, ""))
        size = value.get("size")
        # bool is an int in Python.
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _MAX_SIZE:
            raise ContentError(f"'size' is not a number of bytes: {clean(repr(size), 40)}")
        return Descriptor(
            media_type=media_type,
            digest=digest,
            size=size,
            platform=_platform(_field(value, "platform", dict, {})),
            annotations=_annotations(value),
            artifact_type=_field(value, "artifactType", str, "") or None,
            data=_data(value.get("data"), digest, size),
        )
    except ContentError as error:
        raise ContentError(f"{where}: {error.message}") from error


def _platform(value: dict[str, Any]) -> Platform | None:
    """Read an entry's platform; one that nobody could ask for (`os` empty, say) is none."""
    parts = [_field(value, key, str, "") for key in ("os", "architecture", "variant")]
    try:
        return parse_platform("/".join(parts if parts[2] else parts[:2]))
    except ValueError:
        return None


def _annotations(document: dict[str, Any]) -> dict[str, str]:
    """Return the annotations that are text; nulls occur and are nobody's business here."""
    found = _field(document, "annotations", dict, {})
    return {key: value for key, value in found.items() if isinstance(value, str)}


def _data(value: object, digest: str, size: int) -> bytes | None:
    """Return embedded content when it is what the descriptor says, else None: it is fetched then.

    a2b_base64 skips foreign characters; the digest decides (protocol-facts.md section 1.5).
    """
    if not isinstance(value, str):
        return None
    try:
        content = binascii.a2b_base64(value)
    except ValueError:
        return None
    good = len(content) == size and digest_of(content, split_digest(digest)[0]) == digest
    return content if good else None


# --- JSON --------------------------------------------------------------------------------------------

# A second value for one of these would make two readers see two documents (the lesson of CVE-2021-41190).
# fmt: off
_DECISIVE = frozenset({
    "schemaVersion", "mediaType", "manifests", "config", "layers", "blobs", "subject", "artifactType",
    "digest", "size", "platform", "os", "architecture", "variant", "vnd.docker.reference.digest",
})
# fmt: on
_KINDS: Mapping[type, str] = {str: "a string", list: "a list", dict: "an object"}
_BRACKETS = bytes.maketrans(b"[{]}", b"(())")
_NO_BRACKETS = bytes(sorted(set(range(256)) - set(b"[{]}")))
_T = TypeVar("_T")


def _field(document: dict[str, Any], key: str, kind: type[_T], absent: _T) -> _T:
    """Return a field of the type that it must have; null is absent, as in Go."""
    value = document.get(key)
    if value is None:
        return absent
    if not isinstance(value, kind):
        raise ContentError(f"{key!r} is not {_KINDS[kind]}")
    return value


def _load(body: bytes, *, rewritten: bool = False) -> dict[str, Any]:
    """Parse a JSON object; ValueError says what it is instead. `rewritten` refuses what cannot be kept."""
    deepest = _MAX_DEPTH_REWRITTEN if rewritten else _MAX_DEPTH
    if not _depth_within(body, deepest):
        raise ValueError(f"JSON nested deeper than {deepest}")
    text = body.decode("utf-8")
    extra: dict[str, Any] = {"parse_float": _refuse_float} if rewritten else {}
    document = json.loads(
        text,
        object_pairs_hook=_pairs(rewritten),
        parse_int=_integer,
        parse_constant=_refuse_constant,
        **extra,
    )
    if not isinstance(document, dict):
        raise ContentError("JSON that is not an object")
    return document


def _depth_within(body: bytes, deepest: int) -> bool:
    """Tell whether brackets nest at most `deepest` deep, before a recursive parser sees them.

    Each pass takes away the innermost pairs, at the speed of `bytes.replace`.
    """
    outside = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    left = outside.translate(_BRACKETS, _NO_BRACKETS)
    for depth in range(deepest + 1):
        fewer = left.replace(b"()", b"")
        if len(fewer) == len(left):
            return depth + left.count(b"(") <= deepest
        left = fewer
    return False


def _pairs(strict: bool) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built: dict[str, Any] = {}
        for key, value in pairs:
            if key in built and (strict or key in _DECISIVE):
                raise ContentError(f"the document has the key {clean(key, 60)!r} twice")
            built[key] = value
        return built

    return build


def _integer(text: str) -> int:
    # int() takes quadratic time on long texts, and newer Pythons refuse them in words of their own.
    if len(text) > 40:
        raise ContentError("the document holds a number of more than 40 digits")
    return int(text)


def _refuse_constant(text: str) -> NoReturn:
    raise ContentError(f"the document holds {text}, which is not JSON")


def _refuse_float(text: str) -> NoReturn:
    raise ContentError(
        f"an index with the fraction {clean(text, 30)} cannot be trimmed: it would not stay the same"
    )


# --- trimming an index to platforms ------------------------------------------------------------------

# Part of the key under which trimmed digests are remembered: a change of the rules below raises it.
TRIM_RULE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trimmed:
    """An index as a platform filter leaves it.

    `manifest` is the source's own object when nothing drops. When `matched` is empty nothing may be pushed:
    `kept` is empty and `manifest` is still the source's. `kept` are the children to copy, nested indexes
    with their new digests; `nested` says by original digest what those became. `available` lists the
    platforms that the source has.
    """

    manifest: Manifest
    kept: tuple[Descriptor, ...]
    changed: bool
    nested: Mapping[str, Trimmed]
    matched: frozenset[Platform]
    available: tuple[str, ...]


def nested_indexes(index: Manifest) -> tuple[Descriptor, ...]:
    """Return the children that are indexes, each digest once; `trim_index` needs them, and theirs, read."""
    return tuple({child.digest: child for child in index.children if child.is_index}.values())


def trim_index(index: Manifest, wanted: Sequence[Platform], nested: Mapping[str, Manifest]) -> Trimmed:
    """Keep the entries of `index` that `wanted` asks for, by the rules of design.md section 4.

    `nested` holds every index below, by digest. ContentError when bytes must be re-written that would not
    survive it: fractions, a key given twice, nesting above 64.
    """
    return _trim(index, wanted, nested, {}, 1)


def _trim(
    index: Manifest,
    wanted: Sequence[Platform],
    nested: Mapping[str, Manifest],
    done: dict[str, Trimmed],
    depth: int,
) -> Trimmed:
    if depth > MAX_INDEX_DEPTH:
        raise ContentError(f"indexes are nested more than {MAX_INDEX_DEPTH} deep")
    for child in nested_indexes(index):
        if child.digest not in done:
            done[child.digest] = _trim(nested[child.digest], wanted, nested, done, depth + 1)
    matched: set[Platform] = set()
    available: dict[str, None] = {}
    chosen: list[Descriptor | None] = []
    for child in index.children:
        keep = None
        if child.is_index:
            below = done[child.digest]
            matched |= below.matched
            available.update(dict.fromkeys(below.available))
            if below.matched:
                keep = _replaced(child, below)
        elif child.platform and not child.attests:
            hits = {platform for platform in wanted if platform_matches(platform, child.platform)}
            matched |= hits
            available[str(child.platform)] = None
            keep = child if hits else None
        chosen.append(keep)
    held = {child.digest for child, keep in zip(index.children, chosen, strict=True) if keep}
    chosen = [child if child.attests in held else keep for child, keep in zip(index.children, chosen, strict=True)]
    kept = tuple(filter(None, chosen))
    changed = kept != index.children
    return Trimmed(
        manifest=_rewrite(index, chosen) if changed and kept else index,
        kept=kept,
        changed=changed,
        nested={child.digest: done[child.digest] for child in nested_indexes(index)},
        matched=frozenset(matched),
        available=tuple(available),
    )


def _replaced(child: Descriptor, below: Trimmed) -> Descriptor:
    if not below.changed:
        return child
    return replace(child, digest=below.manifest.digest, size=below.manifest.size, data=None)


def _rewrite(index: Manifest, chosen: Sequence[Descriptor | None]) -> Manifest:
    """Write the index anew with the chosen entries; field order and all other fields stay."""
    try:
        document = _load(index.body, rewritten=True)
        entries = []
        for entry, keep in zip(document["manifests"], chosen, strict=True):
            if keep and keep.digest != entry["digest"]:
                entry.update(digest=keep.digest, size=keep.size)
                # It is the content of the untrimmed index.
                entry.pop("data", None)
            if keep:
                entries.append(entry)
        document["manifests"] = entries
        # A lone surrogate cannot be encoded; UnicodeEncodeError is a ValueError.
        body = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except ValueError as error:
        raise ContentError(f"the index cannot be trimmed: {clean(str(error), 100)}") from error
    return replace(index, body=body, digest=digest_of(body), children=tuple(filter(None, chosen)))
