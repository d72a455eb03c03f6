"""The vocabulary of the OCI specifications: names, references, digests, descriptors, manifests,
platforms. Owns: the grammar of a registry's nouns, what a readable manifest is, which entries of an
index a platform filter keeps. May not know: registries, configuration, HTTP. Invariant:
`trim_index` alone changes a manifest's bytes; no digest, tag, name or media type leaves unchecked:
each may become part of a URL, header or file name (docs/protocol-facts.md section 9.2, R11 to R14).
Follows docs/protocol-facts.md section 1, docs/design.md sections 2, 4."""

from __future__ import annotations

import binascii
import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeVar

from _regsync.errors import ContentError
from _regsync.oci.reference import check_digest, digest_of, split_digest
from _regsync.text import clean, clean_beginning

_T = TypeVar("_T")


_KINDS: Mapping[type, str] = {str: "a string", list: "a list", dict: "an object"}


# docs/protocol-facts.md section 1.3: OCI's, then Docker's.
_INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)


_IMAGE_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)


_SCHEMA_1 = "application/vnd.docker.distribution.manifest.v1+"


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
_FOREIGN = (
    "application/vnd.oci.image.layer.nondistributable.",
    "application/vnd.docker.image.rootfs.foreign.",
)


# What an index of BuildKit's older cache names in place of manifests; other tools take the rest for
# manifests too.
_BLOBS = (
    "application/vnd.oci.image.layer.",
    "application/vnd.docker.image.rootfs.",
    "application/vnd.buildkit.cacheconfig.",
)


_MAX_DESCRIPTORS = 10_000  # 4 MiB hold about 30,000; so many have not been seen


_MAX_JSON_DEPTH = 64  # docs/design.md section 4


# indexes within indexes, the top one counted (docs/protocol-facts.md section 1.5)
MAX_INDEX_DEPTH = 4


TRIM_RULE = (
    "1"  # part of the key of what the state keeps of trimmed indexes: another rule, another number
)


# RFC 6838 section 4.2; a parameter is forgiven: some push files as `text/plain; charset=utf-8`.
_TYPE_NAME = r"[a-zA-Z0-9][a-zA-Z0-9!#$&^_.+-]{0,126}"


_MEDIA_TYPE = rf"{_TYPE_NAME}/{_TYPE_NAME}(?: ?;[ -~]{{0,99}})?"


def list_referrers(held: Manifest | None, more: Sequence[Descriptor]) -> Manifest:
    """Return a fallback index that names `more` behind what it `held` (docs/protocol-facts.md
    section 1.10).
    """
    start: dict[str, Any] = {"schemaVersion": 2, "mediaType": _INDEX_TYPES[0], "manifests": []}
    document = (
        _load(held.body, "the list of referrers cannot be extended", _refuse) if held else start
    )
    for each in more:
        entry = {
            "mediaType": each.media_type,
            "digest": each.digest,
            "size": each.size,
            "artifactType": each.artifact_type,
            "annotations": dict(each.annotations),
        }
        document["manifests"].append({key: value for key, value in entry.items() if value})
    return parse_manifest(_written(document), content_type=None)


class Platform(NamedTuple):
    os: str
    architecture: str
    variant: str | None = None

    def __str__(self) -> str:
        return "/".join(filter(None, (self.os, self.architecture, self.variant)))


def parse_platform(text: str) -> Platform:
    """Read `os/arch[/variant]`, lower-casing it; ValueError when it is something else."""
    if not re.fullmatch(
        r"[a-z0-9][a-z0-9._-]{0,63}(?:/[a-z0-9][a-z0-9._-]{0,63}){1,2}", text.lower()
    ):
        raise ValueError(f"{clean(text, 100)!r} is not OS/ARCH[/VARIANT], as in linux/arm64")
    return Platform(*text.lower().split("/"))


def platform_matches(wanted: Platform, have: Platform) -> bool:
    """Tell whether an index entry's platform is the one asked for (docs/design.md section 4)."""
    variant = have.variant or {"arm64": "v8", "arm": "v7"}.get(have.architecture)
    return wanted[:2] == have[:2] and wanted.variant in (None, variant)


class Descriptor(NamedTuple):
    """What a document says of a blob or manifest; `data` is said to be its content
    (`transfer.known_body` looks).
    """

    media_type: str
    digest: str
    size: int
    platform: Platform | None = None
    annotations: Mapping[str, str] = MappingProxyType({})
    artifact_type: str | None = None
    data: bytes | None = None

    @property
    def is_foreign(self) -> bool:
        return self.media_type.startswith(_FOREIGN)

    @property
    def is_index(self) -> bool:
        return self.media_type in _INDEX_TYPES

    @property
    def is_blob(self) -> bool:
        return self.media_type.startswith(_BLOBS) or self.media_type in IMAGE_CONFIGS

    @property
    def attests(self) -> str | None:
        """The digest of the sibling that this entry is BuildKit's attestation of."""
        unknown = self.platform == Platform("unknown", "unknown")
        return self.annotations.get("vnd.docker.reference.digest") if unknown else None


class Manifest(NamedTuple):
    """A manifest or index, and what of its bytes matters for a copy; `digest` is the one asked for,
    else the sha256.
    """

    media_type: str
    digest: str
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
        """The blobs that a target needs before this manifest: config, then layers, each digest
        once.
        """
        unique: dict[str, Descriptor] = {}
        for blob in (self.config, *self.layers):
            if blob and not blob.is_foreign:
                unique.setdefault(blob.digest, blob)
        return tuple(unique.values())

    @property
    def names(self) -> tuple[Descriptor, ...]:
        """Everything that has to be in a repository before this manifest: its blobs and children."""
        return (*self.blobs, *self.children)


def parse_manifest(
    body: bytes,
    *,
    content_type: str | None,
    digest: str | None = None,
    expected: Descriptor | None = None,
) -> Manifest:
    """Verify and read a manifest or index, asked for by `digest` or the index entry `expected`;
    else ContentError.
    """
    stated = (content_type or "").partition(";")[0].strip().lower()
    beginning = f"beginning {clean_beginning(body, 60)!r}" if body else "no body"
    received = f"received {clean(stated, 80) or 'no content type'}, {beginning}"
    if expected and len(body) != expected.size:
        raise ContentError(f"{len(body)} bytes, the index says {expected.size}; {received}")
    document = _load(body, received)
    inside = _field(document, "mediaType", str).lower()
    # Before the digest, which in schema 1 leaves out the signatures: nobody can copy that
    # unchanged.
    if document.get("schemaVersion") == 1 or any(
        text.startswith(_SCHEMA_1) for text in (stated, inside)
    ):
        hint = "push the image again with a current tool, as schema 2 or OCI"
        raise ContentError(
            "a Docker schema 1 manifest, which cannot be copied unchanged", hint=hint
        )
    wanted = expected.digest if expected else digest
    found = digest_of(body, split_digest(check_digest(wanted))[0] if wanted else "sha256")
    if wanted and found != wanted:
        raise ContentError(f"asked for {wanted}, got {found}; {received}")
    told = (
        inside,
        "" if stated in _GENERIC_TYPES else stated,
        expected.media_type if expected else "",
    )
    return _collect(
        document, _settle_type(document, list(filter(None, told)), received), found, body
    )


def _settle_type(document: dict[str, Any], names: Sequence[str], received: str) -> str:
    """Decide what a document is; refuse one about which names and shape disagree (R13)."""
    if len(set(names)) > 1:
        text = ", ".join(clean(name, 100) for name in names)
        raise ContentError(
            f"document, header and index entry name different types ({text}); {received}"
        )
    is_index = document.get("manifests") is not None
    is_image = document.get("config") is not None or document.get("layers") is not None
    if is_index and is_image:
        raise ContentError(
            "the document is both a manifest and an index, which is refused (CVE-2021-41190)"
        )
    media_type = (
        names[0] if names else _INDEX_TYPES[0] if is_index else _IMAGE_TYPES[0] if is_image else ""
    )
    if not (media_type.startswith("application/") and re.fullmatch(_MEDIA_TYPE, media_type)):
        raise ContentError(f"neither a manifest nor an index; {received}")
    no_index = is_image or "manifests" not in document  # null is an empty list to Go
    no_image = is_index or document.get("config") is None
    if (media_type in _INDEX_TYPES and no_index) or (media_type in _IMAGE_TYPES and no_image):
        raise ContentError(f"the document does not have the fields of {media_type}; {received}")
    return media_type


def _collect(document: dict[str, Any], media_type: str, digest: str, body: bytes) -> Manifest:
    entries = [
        (key, document[key]) for key in ("config", "subject") if document.get(key) is not None
    ]
    for key in ("layers", "blobs", "manifests"):
        entries += [
            (f"{key}[{number}]", each) for number, each in enumerate(_field(document, key, list))
        ]
    if len(entries) > _MAX_DESCRIPTORS:
        raise ContentError(f"the document names more than {_MAX_DESCRIPTORS} blobs or manifests")
    read = {where: _descriptor(value, where) for where, value in entries}
    sizes: dict[str, int] = {}
    for entry in read.values():
        if sizes.setdefault(entry.digest, entry.size) != entry.size:
            raise ContentError(f"the document gives two sizes for {entry.digest}")
    config = read.get("config")
    named = [(where, entry) for where, entry in read.items() if "[" in where]
    children = tuple(
        entry for where, entry in named if where.startswith("manifests") and not entry.is_blob
    )
    # `blobs` are the layers of the old ORAS artifact manifest.
    layers = tuple(
        entry for where, entry in named if entry.is_blob or not where.startswith("manifests")
    )
    return Manifest(
        media_type,
        digest,
        body,
        media_type in _INDEX_TYPES or bool(children),
        config,
        layers,
        children,
        read.get("subject"),
        _field(document, "artifactType", str) or (config.media_type if config else None),
        _annotations(document),
    )


def _descriptor(value: object, where: str) -> Descriptor:
    try:
        if not isinstance(value, dict):
            raise ContentError("not an object")
        media_type = _field(value, "mediaType", str)
        if not re.fullmatch(_MEDIA_TYPE, media_type):
            raise ContentError(f"{clean(media_type, 100)!r} is not a media type")
        size = value.get("size")
        if (
            not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 2**63
        ):  # int64; a bool is an int
            raise ContentError(f"{clean(repr(size), 40)} is not a size")
        digest = check_digest(_field(value, "digest", str))
        platform = None
        data = None
        parts = [
            _field(_field(value, "platform", dict), key, str)
            for key in ("os", "architecture", "variant")
        ]
        # One that nobody could ask for (an empty `os`, say) is none.
        with contextlib.suppress(ValueError):
            platform = parse_platform("/".join(parts).rstrip("/"))
        annotations = _annotations(value)
        artifact_type = _field(value, "artifactType", str) or None
        with contextlib.suppress(ValueError):
            data = binascii.a2b_base64(_field(value, "data", str)) or None
        return Descriptor(
            media_type.lower(), digest, size, platform, annotations, artifact_type, data
        )
    except ContentError as error:
        raise ContentError(f"{where}: {error.message}") from error


def _annotations(document: dict[str, Any]) -> dict[str, str]:
    # Nulls occur, and mean nothing to a copy.
    return {
        key: value
        for key, value in _field(document, "annotations", dict).items()
        if isinstance(value, str)
    }


def _field(document: dict[str, Any], key: str, kind: type[_T]) -> _T:
    """Return a field of the type that it must have; absent and null are an empty one, as they are
    in Go.
    """
    value = document.get(key)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ContentError(f"{key!r} is not {_KINDS[kind]}")
    return value


def _load(
    body: bytes, received: str, fraction: Callable[[str], Any] | None = None
) -> dict[str, Any]:
    if (
        sum(map(body.count, (b"{", b"[", b","))) > 30 * _MAX_DESCRIPTORS
    ):  # 4 MiB of lists are seconds, and 100 MB
        raise ContentError(
            f"the document holds more than {30 * _MAX_DESCRIPTORS} values; {received}"
        )
    try:
        document = json.loads(
            body.decode(),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=fraction,
            parse_constant=_refuse,
        )
        if _nests_deeper(document, _MAX_JSON_DEPTH):
            raise RecursionError
    except ValueError as error:
        raise ContentError(f"not JSON ({clean(str(error), 80)}); {received}") from error
    except RecursionError as error:
        raise ContentError(
            f"the document nests deeper than {_MAX_JSON_DEPTH}; {received}"
        ) from error
    if not isinstance(document, dict):
        raise ContentError(f"JSON, but not an object; {received}")
    return document


def _nests_deeper(value: object, most: int) -> bool:
    inside = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    )
    return inside is not None and (
        most == 0 or any(_nests_deeper(each, most - 1) for each in inside)
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Two readers could take two values for one key, and see two images (the lesson of
    # CVE-2021-41190).
    built: dict[str, Any] = {}
    for key, value in pairs:
        if key in built:
            raise ContentError(f"the document has the key {clean(key, 60)!r} twice")
        built[key] = value
    return built


def _integer(text: str) -> int:
    # int() takes quadratic time on long texts, which newer Pythons refuse in words of their own.
    return int(text) if len(text) <= 40 else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise ContentError(
        f"the document holds the number {clean(text, 40)}, which cannot be kept as it is"
    )


class _Trimmed(NamedTuple):
    """What a platform filter leaves: nothing if `matched` is empty; `nested`: the indexes below, by
    original digest.
    """

    manifest: Manifest
    nested: Mapping[str, _Trimmed]
    matched: frozenset[Platform]
    available: tuple[str, ...]


def trim_index(
    index: Manifest,
    wanted: Sequence[Platform],
    nested: Mapping[str, Manifest],
    done: dict[str, _Trimmed] | None = None,
) -> _Trimmed:
    """Keep what `wanted` asks for (docs/design.md section 4), `nested` being all indexes below;
    ContentError if unable.
    """
    done = {} if done is None else done  # each nested index once
    kept = list[Descriptor | None]()
    matched = set[Platform]()
    available = dict[str, None]()
    for child in index.children:
        keep = child
        hits = frozenset[Platform]()
        if child.is_index:
            if child.digest not in done:
                done[child.digest] = trim_index(nested[child.digest], wanted, nested, done)
            below = done[child.digest]
            hits = below.matched
            available |= dict.fromkeys(below.available)
            keep = child._replace(digest=below.manifest.digest, size=below.manifest.size)
        elif child.platform and not child.attests:
            hits = frozenset(each for each in wanted if platform_matches(each, child.platform))
            available[str(child.platform)] = None
        matched |= hits
        kept.append(keep if hits else None)
    held = {child.digest for child, keep in zip(index.children, kept, strict=True) if keep}
    kept = [
        child if child.attests in held else keep
        for child, keep in zip(index.children, kept, strict=True)
    ]
    changed = [each and each.digest for each in kept] != [each.digest for each in index.children]
    manifest = _rewritten(index, kept) if changed and matched else index
    below_it = {digest: trimmed for digest, trimmed in done.items() if trimmed.matched}
    return _Trimmed(manifest, below_it, frozenset(matched), tuple(available))


def _rewritten(index: Manifest, chosen: Sequence[Descriptor | None]) -> Manifest:
    document = _load(index.body, "the index cannot be trimmed", _refuse)
    entries = [
        entry for entry in document["manifests"] if not _descriptor(entry, "manifests").is_blob
    ]
    kept = [(entry, keep) for entry, keep in zip(entries, chosen, strict=True) if keep]
    for entry, keep in kept:
        if keep.digest != entry["digest"]:
            entry.update(digest=keep.digest, size=keep.size)
            entry.pop("data", None)  # the content of the untrimmed index
    document["manifests"] = [entry for entry, _ in kept]
    body = _written(document)
    return index._replace(
        body=body, digest=digest_of(body), layers=(), children=tuple(filter(None, chosen))
    )


def _written(document: dict[str, Any]) -> bytes:
    try:
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ContentError(
            "an index with half a character (a lone surrogate) cannot be changed"
        ) from error
