"""The fields of the configuration: one table, the grammars of their values, and its JSON Schema.

Owns: the names, types, defaults and descriptions of all fields. The reader, the schema and the
documentation's reference use the same table. Durations, sizes, registry addresses.
May not know: YAML, places, the model.
Invariants: a grammar returns a value, or raises a ValueError that has a remedy and no secret. The
schema accepts every document that `validate` accepts.
Follows: JSON Schema 2020-12.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from _regsync.addresses import DEFAULT_PORTS, is_loopback
from _regsync.errors import ConfigError
from _regsync.net.proxy import proxy_for
from _regsync.oci import LAYOUT_SCHEME, is_repository, parse_platform
from _regsync.providers import canonical_host
from _regsync.tags import compile_glob, parse_range
from _regsync.text import mask_unless_word

# The number of seconds in each unit of a duration.
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

# The exponent of 1000 or 1024 for each prefix of a size.
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}

_TRUTH_VALUES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}

# Characters of a registry's address. A host name has 253 at most.
_MAX_URL = 300

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_URL = (
    r"(?:(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://)?"
    rf"(?P<host>\[[0-9A-Fa-f:.]+\]|{_LABEL}(?:\.{_LABEL})*)"
    r"(?::(?P<port>[0-9]{1,5}))?"
)

# The largest value of a field of the type "count".
_MAX_COUNT = 999_999_999

# Seconds.
_MAX_AGE = 3650 * 86400


def parse_duration(text: str) -> float:
    """Parse a duration such as 90 or 1h30m.

    Returns seconds. Raises ValueError if it is malformed.
    """
    if not re.fullmatch("[0-9]{1,9}|(?:[0-9]{1,9}[smhd])+", text):
        raise ValueError(
            f"{text!r} is not a duration: write 0, seconds (90), or numbers with s, m, h, d (1h30m)"
        )
    numbers_with_units = re.findall(r"([0-9]+)([smhd]?)", text)
    return float(sum(int(number) * _SECONDS[unit] for number, unit in numbers_with_units))


def parse_age(text: str) -> float:
    """Parse a duration of at most ten years.

    Returns seconds. Raises ValueError if it is invalid.
    """
    seconds = parse_duration(text)
    if seconds > _MAX_AGE:
        raise ValueError(f"{text!r} is too long: write 3650d at most")
    return seconds


def parse_size(text: str) -> int:
    """Parse a size such as 20 GB. Returns bytes. Raises ValueError if the text is malformed."""
    match = re.fullmatch(r"0|([0-9]{1,15}(?:\.[0-9]{1,15})?) *([kmgt]i?|)b", text.strip().lower())
    if match is None:
        raise ValueError(
            f"{text!r} is not a size: write 0, or a number with B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
        )
    number, prefix = match.groups("")  # such as "31.5" and "mi"; both are empty for the text 0
    base = 1024 if prefix.endswith("i") else 1000
    bytes_in_unit: int = base ** _POWERS[prefix[:1]]
    return round(float(number or 0) * bytes_in_unit)


class RegistryAddress(NamedTuple):
    """The address of a registry or of an image layout."""

    scheme: Literal["https", "http", "oci-layout"]
    host: str  # canonical, without brackets; of an image layout: the path of its directory
    port: int  # 0 of an image layout


def parse_registry_url(text: str) -> RegistryAddress:
    """Parse `[SCHEME://]HOST[:PORT]` or `oci-layout:PATH`. Raises ValueError if it is malformed."""
    if text.startswith(f"{LAYOUT_SCHEME}:"):
        return _parse_layout_address(text)
    if "@" in text:
        # The message does not show the text, because the part before the @ is a secret.
        raise ValueError("a user or password cannot stand here: use auth_type and credentials")
    match = re.fullmatch(_URL, text) if len(text) <= _MAX_URL else None
    if match is None:
        remedy = "write HOST, HOST:PORT or http://HOST"
        if re.search("[/?]", text.rpartition("://")[2]):
            remedy = "remove what follows the host and port"
        without_query = text.partition("?")[0]  # a query may hold a secret
        raise ValueError(f"{without_query!r} is not a registry address: {remedy}")

    written_scheme = (match["scheme"] or "").lower()
    if written_scheme not in ("", "http", "https"):
        raise ValueError(f"scheme {written_scheme!r} is not supported: use https:// or http://")

    host = canonical_host(_compress_ipv6(match["host"]))
    # Without a scheme, loopback addresses use plain HTTP, as in other container clients.
    is_plain = written_scheme == "http" or (not written_scheme and is_loopback(host))
    scheme: Literal["https", "http"] = "http" if is_plain else "https"
    port = int(match["port"] or DEFAULT_PORTS[scheme])
    if not 0 < port < 65536:
        raise ValueError(f"port {port} does not exist: use 1 to 65535")
    return RegistryAddress(scheme, host, port)


def _parse_layout_address(text: str) -> RegistryAddress:
    directory = text.partition(":")[2]
    if not directory or "//" in directory:  # `//` separates a path from a repository
        raise ValueError(f"{text!r} names no directory: write oci-layout:PATH")
    return RegistryAddress(LAYOUT_SCHEME, directory, 0)


def _compress_ipv6(host: str) -> str:
    """Return the compressed form of an IPv6 address in brackets. Other hosts are unchanged."""
    if not host.startswith("["):
        return host
    try:
        return ipaddress.IPv6Address(host[1:-1]).compressed
    except ValueError:
        raise ValueError(
            f"{host} is not a registry address: write an IPv6 address inside the brackets"
        ) from None


def _check_source_repository(text: str) -> None:
    """Raise ValueError unless a text is the name of a repository.

    If it has a digest, the error recommends `regsync copy`. Other errors are those of
    `_check_repository`.
    """
    _, _, digest = text.partition("@")
    if ":" in digest:
        remedy = "name only the repository here; `regsync copy` copies an image by digest"
        raise ValueError(f"{text!r} has a digest: {remedy}")
    _check_repository(text)


def _check_repository(text: str) -> None:
    """Raise ValueError unless a text is the name of a repository. The error has a remedy."""
    if is_repository(text):
        return
    if "@" in text or ":" in text.rpartition("/")[2]:
        remedy = "name only the repository here, and its tags under `tags`"
        raise ValueError(f"{text!r} has a tag or digest: {remedy}")
    if is_repository(text.lower()):
        remedy = f"write {text.lower()!r}"
        raise ValueError(f"{text!r} has capitals, which registries refuse: {remedy}")
    raise ValueError(
        f"{text!r} is not a repository: write a path such as team/app, without the host"
    )


def _check_proxy(text: str) -> None:
    try:
        proxy_for("https", "registry", 443, {}, text)
    except ConfigError as error:
        raise ValueError(f"{error.message}: {error.hint}") from None


def _refuse(pattern: str, message: str) -> Callable[[str], None]:
    """Return a check that raises ValueError with `message` if a text contains the pattern."""

    def check(text: str) -> None:
        if re.search(pattern, text):
            raise ValueError(message)

    return check


FieldType = Literal[
    "text",
    "texts",  # a list of texts
    "one_or_texts",  # one text, or a list
    "all_or_texts",  # the word `all`, or a list
    "flag",
    "count",
    "amount",  # a text that may be an unquoted number
    "path",
    "alias",  # of a registry
    "targets",  # the name of a group, an alias, or a list of aliases
    "section",  # a mapping whose keys are the fields of a section
    "list",  # a list of mappings, each with the fields of a section
    "names",  # a mapping whose keys are names that users choose
]


class Field(NamedTuple):
    """One field of the configuration, as the reader, the schema and the documentation see it."""

    name: str
    type: FieldType
    meaning: str  # the description in the schema and in the documentation
    default: str = ""  # as written in YAML; "": no default
    required: bool = False
    section: str = ""  # the section of this field, of each list item or of each named value
    choices: tuple[str, ...] = ()  # the only valid texts, if there are any
    parse: Callable[[str], object] | None = None  # returns the value of a text; raises ValueError
    check: Callable[[str], object] | None = None  # raises ValueError; the text itself is the value
    minimum: int = 0  # the smallest valid count
    if_empty: str = ""  # the remedy for an empty list; "": an empty list is valid
    auth_type: str = ""  # the only `auth_type` with which the field is valid; "": any
    secret: bool = False
    example: str = ""  # as written in YAML

    def is_secret(self, text: str) -> bool:
        """Report whether `text` is secret as a value of this field.

        The URL of a proxy is secret only if it has a user name.
        """
        return self.secret and (self.name != "proxy" or "@" in text)

    def parse_text(self, text: str) -> Any:
        """Return the value of a text: a bool, an int, the result of `parse`, or the text itself.

        Raises ValueError if the text is invalid.
        """
        if not text:
            raise ValueError("must not be empty")
        if not text.isprintable():  # such characters could end a line, a header or a path
            raise ValueError("has a line break or another control character: remove it")
        if self.choices and text not in self.choices:
            raise ValueError(f"{mask_unless_word(text)!r} is not one of {', '.join(self.choices)}")
        if self.check:
            self.check(text)

        if self.type == "flag":
            return self._parse_flag(text)
        if self.type == "count":
            return self._parse_count(text)
        return self.parse(text) if self.parse else text

    def _parse_flag(self, text: str) -> bool:
        if text.lower() not in _TRUTH_VALUES:
            raise ValueError("must be true or false")
        return _TRUTH_VALUES[text.lower()]

    def _parse_count(self, text: str) -> int:
        if not re.fullmatch("0|[1-9][0-9]{0,8}", text) or int(text) < self.minimum:
            raise ValueError(f"must be a whole number from {self.minimum} to {_MAX_COUNT}")
        return int(text)


_AUTH_TYPES = (
    "ecr",
    "gar",
    "gcr",
    "acr",
    "ghcr",
    "anonymous",
    "basic",
    "static_token",
    "docker_config",
)


# The fields that mappings inherit from `defaults`.
_INHERITED = (
    Field(
        "source",
        "alias",
        "the registry to copy from, an alias; required here or in `defaults`",
        example="hub",
    ),
    Field(
        "targets",
        "targets",
        "the registries to copy to: a group or alias, or a list of aliases; required here or in "
        "`defaults`",
        if_empty="name at least one registry",
        example='["mine"]',
    ),
    Field("tags", "section", "which tags to copy; absent: all", section="tags"),
    Field(
        "min_age",
        "amount",
        "copy a digest only if regsync first saw it at least this long ago; `0` undoes a default",
        parse=parse_age,
        default="0",
        example="7d",
    ),
    Field(
        "platforms",
        "all_or_texts",
        "copy only these platforms of an index, each `os/arch[/variant]`; `all` undoes a default. "
        "Signatures of the whole index then stay behind",
        parse=parse_platform,
        check=_refuse("^all$", "'all' is not a platform: omit the field to copy every platform"),
        if_empty="omit it to copy all platforms",
        example='["linux/amd64", "linux/arm/v7"]',
    ),
    Field(
        "artifacts",
        "section",
        "which signatures, SBOMs and attestations to copy with an image",
        section="artifacts",
    ),
)


# The fields of each section, by the section's name. "config" is the document. Fields are read in
# this order, so that names are defined before they are used.
SECTIONS: Mapping[str, tuple[Field, ...]] = {
    "config": (
        Field(
            "registries",
            "names",
            "the registries, each under the alias by which mappings name it",
            section="registry",
            default="{}",
        ),
        Field(
            "target_groups",
            "names",
            "lists of registries, each under a name for `targets`",
            default="{}",
            if_empty="name at least one registry",
            example='{"all": ["mine"]}',
        ),
        Field(
            "defaults",
            "section",
            "what applies to each mapping that does not set it itself",
            section="defaults",
        ),
        Field(
            "mappings",
            "list",
            "what to copy: each mapping copies one repository to its targets",
            section="mapping",
            required=True,
        ),
        Field("global", "section", "settings of the whole run", section="global"),
    ),
    "registry": (
        Field(
            "url",
            "text",
            "`[http://|https://]HOST[:PORT]`; without a scheme https, but http for localhost and "
            "loopback addresses. Or `oci-layout:PATH`, a directory of images",
            parse=parse_registry_url,
            required=True,
            example="registry.example.com:5000",
        ),
        Field(
            "auth_type",
            "text",
            "how to log in; absent: by the host, with the credentials that are found",
            choices=_AUTH_TYPES,
        ),
        Field(
            "credentials",
            "section",
            "user name and password, for `auth_type: basic`",
            section="credentials",
            auth_type="basic",
        ),
        Field(
            "token",
            "text",
            "bearer token, for `auth_type: static_token`",
            secret=True,
            auth_type="static_token",
            check=_refuse(
                "[^!-~]", "has a blank or a character outside ASCII, which a token cannot have"
            ),
            example="${REGISTRY_TOKEN}",
        ),
        Field(
            "cloud_profile",
            "text",
            "the AWS profile to log in with; only with `auth_type: ecr`",
            auth_type="ecr",
        ),
        Field("aws_profile", "text", "another name for `cloud_profile`", auth_type="ecr"),
        Field(
            "head_first",
            "flag",
            "for a source, in runs without a state: compare digests by HEAD, and GET a manifest only if "
            "a target differs (Docker Hub counts only GETs)",
            default="false",
        ),
        Field(
            "max_concurrent",
            "count",
            "how many requests one process sends to this registry at the same time, at most",
            minimum=1,
            default="50",
        ),
        Field(
            "ca_file",
            "path",
            "PEM file of certificate authorities to trust besides the system's",
            example="ca.pem",
        ),
        Field("client_cert", "path", "PEM file of the client certificate", example="client.pem"),
        Field("client_key", "path", "PEM file of its private key, if that is not in `client_cert`"),
        Field(
            "proxy",
            "text",
            "proxy URL; absent: what `HTTPS_PROXY` and the like say",
            check=_check_proxy,
            secret=True,
            example="http://proxy.example.com:3128",
        ),
        Field(
            "assume",
            "one_or_texts",
            "for an `oci-layout` as target: paths of receipts (`audit --receipt`). "
            "The far side has the blobs that they name, so that these are left out",
            if_empty="omit it to leave nothing out",
            example='["far.txt"]',
        ),
    ),
    "credentials": (
        Field(
            "username",
            "text",
            "user name",
            required=True,
            example="mirror",
            check=_refuse(":", "has a colon, which HTTP Basic cannot carry in a user name"),
        ),
        Field(
            "password",
            "text",
            "password or access token",
            required=True,
            secret=True,
            example="${MIRROR_PASSWORD}",
        ),
    ),
    "defaults": _INHERITED,
    "mapping": (
        Field(
            "from",
            "text",
            "the source repository, without the host",
            check=_check_source_repository,
            required=True,
            example="library/alpine",
        ),
        Field(
            "to",
            "text",
            "the target repository, without the host; absent: the same as `from`",
            check=_check_repository,
            example="base/alpine",
        ),
        *_INHERITED,
    ),
    "tags": (
        Field(
            "glob",
            "one_or_texts",
            "keep only tags that match one of the patterns",
            check=compile_glob,
            default="*",
            if_empty="omit it to take every tag",
            example='["3.*.*", "latest"]',
        ),
        Field(
            "exclude",
            "one_or_texts",
            "drop tags that match one of the patterns",
            check=compile_glob,
            example='["*[-_]*"]',
        ),
        Field(
            "semver",
            "text",
            "keep only versions in this range",
            check=parse_range,
            example=">=1.2,<2",
        ),
        Field(
            "semver_prerelease",
            "text",
            "keep pre-releases, drop them, or keep only them; absent: `exclude` if `semver` is "
            "set, else `include`",
            choices=("include", "exclude", "only"),
        ),
        Field("sort", "text", "order the tags, highest first", choices=("semver", "alpha")),
        Field(
            "latest",
            "count",
            "keep only the N highest; needs `sort` or `semver`",
            minimum=1,
            example="5",
        ),
        Field(
            "min_tags",
            "count",
            "if fewer than N tags are left, bring back tags that `latest` or `semver` removed;"
            " still fewer is a warning",
            example="3",
        ),
        Field(
            "immutable_tags",
            "text",
            "tags that never move: one that the target already lists is skipped without a request",
            check=compile_glob,
            example="v*.*.*",
        ),
    ),
    "artifacts": (
        Field("enabled", "flag", "copy artifacts with their image", default="true"),
        Field(
            "include",
            "texts",
            "artifact types to copy; empty: all",
            default="[]",
            example='["application/spdx+json"]',
        ),
        Field("exclude", "texts", "artifact types not to copy", default="[]"),
        Field("require_artifacts", "flag", "fail images without artifacts", default="false"),
    ),
    "global": (
        Field(
            "max_concurrent_transfers",
            "count",
            "how many images are copied at the same time, at most (a registry's `max_concurrent` counts requests)",
            minimum=1,
            default="50",
        ),
        Field(
            "cache_ttl",
            "amount",
            "how long a run believes what earlier runs learned about targets; `0` means for ever",
            parse=parse_duration,
            default="12h",
            example="1h30m",
        ),
        Field(
            "cache_dir",
            "path",
            "directory for the state and for staged blobs, relative to the configuration file; runs write to it",
            default=".regsync",
        ),
        Field(
            "staging_size_limit",
            "amount",
            "disk space for blobs that several targets need. `0`: none, the targets are written at "
            "the pace of the slowest; absent: no limit",
            parse=parse_size,
            example="20 GB",
        ),
    ),
}


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the document.

    The schema does not check conditions that involve several fields. `validate` checks them.
    """
    sections = {name: _section_schema(fields) for name, fields in SECTIONS.items()}
    document = sections.pop("config")
    document["patternProperties"] = {"^x-": {}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "regsync configuration",
        **document,
        "$defs": sections,
    }


def _section_schema(fields: tuple[Field, ...]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {field.name: _field_schema(field) for field in fields},
        "required": [field.name for field in fields if field.required],
        "additionalProperties": False,
    }


def _field_schema(field: Field) -> dict[str, Any]:
    """Return the schema of one field: its description, default, example and valid values."""
    schema: dict[str, Any] = {"description": field.meaning}
    if field.default:
        schema["default"] = json_value(field.default)
    if field.example:
        schema["examples"] = [json_value(field.example)]

    alternatives = _alternatives(field)
    if not field.required:
        alternatives.append({"type": "null"})  # means that the field is not set
    if len(alternatives) == 1:
        schema.update(alternatives[0])
    else:
        schema["anyOf"] = alternatives
    return schema


def _alternatives(field: Field) -> list[dict[str, Any]]:
    """Return one schema for each form in which the field may be written."""
    if field.choices:
        # After its variables have been replaced, a text may be one of the choices.
        text_with_variable = {"type": "string", "pattern": r"\$\{"}
        return [{"enum": list(field.choices)}, text_with_variable]

    text = {"type": "string", "minLength": 1}
    texts: dict[str, Any] = {"type": "array", "items": text}
    if field.if_empty:
        texts["minItems"] = 1
    section = {"$ref": f"#/$defs/{field.section}"}
    lone_variable = {"type": "string", "pattern": r"^\$\{[^{}]*\}$"}  # the value may have any type
    match field.type:
        case "flag":
            return [{"type": "boolean"}, lone_variable]
        case "count":
            count = {"type": "integer", "minimum": field.minimum, "maximum": _MAX_COUNT}
            return [count, lone_variable]
        case "amount":
            return [text, {"type": "number", "minimum": 0}]
        case "texts":
            return [texts]
        case "all_or_texts":
            return [{"const": "all"}, lone_variable, texts]
        case "one_or_texts" | "targets":
            return [text, texts]
        case "section":
            return [section]
        case "list":
            return [{"type": "array", "items": section}]
        case "names":
            named_value = section if field.section else texts  # a registry, or a group's aliases
            return [{"type": "object", "additionalProperties": named_value}]
        case _:
            return [text]


def json_value(written: str) -> Any:
    """Convert a default or an example of the table to JSON. A text that is not JSON is a string."""
    try:
        return json.loads(written)
    except ValueError:
        return written
