"""The fields of the configuration: one table, the grammars of their values, and the table as JSON
Schema. Owns: names, types, defaults and meaning of all fields (reader, schema and the README's
reference use the same rows), durations, sizes, registry addresses. May not know: YAML, places, the
model. Invariant: a grammar gives a value, or a ValueError with the remedy and no secret; the schema
takes whatever `validate` takes. Follows JSON Schema 2020-12."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from _regsync.addresses import DEFAULT_PORTS, is_loopback
from _regsync.errors import ConfigError
from _regsync.oci.manifest import parse_platform
from _regsync.oci.reference import is_repository
from _regsync.providers import canonical_host
from _regsync.semver import parse_range
from _regsync.tags import check_glob
from _regsync.text import plain

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"


_URL = rf"(?:([A-Za-z][A-Za-z0-9+.-]*)://)?(\[[0-9A-Fa-f:.]+\]|{_LABEL}(?:\.{_LABEL})*)(?::([0-9]{{1,5}}))?"


def parse_duration(text: str) -> float:
    """Return seconds; ValueError shows the grammar."""
    if not re.fullmatch("[0-9]{1,9}|(?:[0-9]{1,9}[smhd])+", text):
        raise ValueError(
            f"{text!r} is no duration: write 0, seconds (90), or numbers with s, m, h, d (1h30m)"
        )
    return float(sum(int(n) * _SECONDS[unit] for n, unit in re.findall(r"([0-9]+)([smhd]?)", text)))


def parse_size(text: str) -> int:
    """Return bytes; ValueError shows the grammar."""
    match = re.fullmatch(r"0|([0-9]{1,15}(?:\.[0-9]{1,15})?) *([kmgt]i?|)b", text.strip().lower())
    if match is None:
        raise ValueError(
            f"{text!r} is no size: write 0, or a number with B, KB, MB, GB, TB or KiB, MiB, GiB, TiB"
        )
    number, prefix = match.groups("")
    factor: int = (1024 if "i" in prefix else 1000) ** " kmgt".index(prefix[:1] or " ")
    return round(float(number or 0) * factor)


def parse_registry_url(text: str) -> tuple[Literal["https", "http"], str, int]:
    """Return scheme, canonical host and port of `[SCHEME://]HOST[:PORT]`; ValueError says the
    remedy.
    """
    if "@" in text:
        # Not shown: what stands before the @ is a secret.
        raise ValueError("no user or password here: use auth_type and credentials")
    match = re.fullmatch(_URL, text) if len(text) <= 300 else None
    if match is None:
        path = re.search("[/?]", text.rpartition("://")[2])
        why = "remove the path and query" if path else "write HOST, HOST:PORT or http://HOST"
        raise ValueError(f"{text.partition('?')[0]!r} is no registry address: {why}")
    given = match[1] and match[1].lower()
    host = match[2]
    digits = match[3]
    if given not in (None, "http", "https"):
        raise ValueError(f"scheme {given!r} is not supported: use https:// or http://")
    if host.startswith("["):
        import ipaddress

        try:
            host = ipaddress.IPv6Address(host[1:-1]).compressed
        except ValueError:
            raise ValueError(
                f"{host} is no registry address: IPv6 is missing in the brackets"
            ) from None
    host = canonical_host(host)
    # Plain HTTP on loopback without being asked, as the container clients do.
    scheme: Literal["https", "http"] = (
        "http" if given == "http" or (not given and is_loopback(host)) else "https"
    )
    port = int(digits or DEFAULT_PORTS[scheme])
    if not 0 < port < 65536:
        raise ValueError(f"port {port} does not exist: use 1 to 65535")
    return scheme, host, port


class Field(NamedTuple):
    """One field as users write it; what `schema`, the reference in the README and the reader need.
    `type` is text, texts, one_or_texts, flag, count, amount (text that may be an unquoted number),
    path, alias, targets, section, list or names; `of` names the section of one, of a list's items
    and of the values of names. `parse` gives a value, `check` lets the text be; both raise
    ValueError. `refuses` is a pattern of what cannot be in a text, and why. `empty` is the remedy
    for an empty list, `auth` the one `auth_type` that has the field."""

    name: str
    type: str
    meaning: str
    default: str = ""
    required: bool = False
    of: str = ""
    choices: tuple[str, ...] = ()
    parse: Callable[[str], object] | None = None
    check: Callable[[str], object] | None = None
    refuses: tuple[str, str] | None = None
    least: int = 0
    empty: str = ""
    auth: str = ""
    needs: tuple[str, ...] = ()
    secret: bool = False
    example: str = ""

    def hides(self, text: str) -> bool:
        """Say whether a text is a secret here; a proxy's URL is one where it names a user."""
        return self.secret and (self.name != "proxy" or "@" in text)

    def parsed(self, text: str) -> Any:
        """Return what a text means here; ValueError says what is wrong with it."""
        if not text:
            raise ValueError("must not be empty")
        if not text.isprintable():  # it would break a line, a header or a path
            raise ValueError("has a line break or another control character: remove it")
        if self.choices and text not in self.choices:
            raise ValueError(f"{plain(text)!r} is none of {', '.join(self.choices)}")
        if self.refuses and re.search(self.refuses[0], text):
            raise ValueError(self.refuses[1])
        if self.check:
            self.check(text)
        if self.type == "flag":
            if text.lower() not in _TRUTH:
                raise ValueError("true or false is needed")
            return _TRUTH[text.lower()]
        if self.type == "count":
            if not re.fullmatch("0|[1-9][0-9]{0,8}", text) or int(text) < self.least:
                raise ValueError(f"a whole number from {self.least} to 999999999 is needed")
            return int(text)
        return self.parse(text) if self.parse else text


def _repository(text: str) -> None:
    if not is_repository(text):
        if "@" in text or ":" in text.rpartition("/")[2]:
            raise ValueError(
                f"{text!r} has a tag or digest: name the repository only, and tags under `tags`"
            )
        if is_repository(text.lower()):
            raise ValueError(
                f"{text!r} has capitals, which registries refuse: write {text.lower()!r}"
            )
        raise ValueError(f"{text!r} is no repository: write a path such as team/app, without host")


def _proxy(text: str) -> None:
    from _regsync.net.proxy import proxy_for

    try:
        proxy_for("https", "registry", 443, {}, text)
    except ConfigError as error:
        raise ValueError(f"{error.message}: {error.hint}") from None


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


_F = Field


# fmt: off
_INHERITED = (
    _F("source", "alias", "source registry; required here or in `defaults`", example="hub"),
    _F("targets", "targets", "a group or alias, or a list of aliases; required here or in `defaults`",
       empty="name one registry at least", example='["mine"]'),
    _F("tags", "section", "which tags", of="tags"),
    _F("platforms", "texts", "only these platforms of an index, each `os/arch[/variant]`", parse=parse_platform,
       refuses=("^all$", "'all' is no platform: omit the field to copy every platform"),
       empty="omit it to copy all platforms", example='["linux/amd64", "linux/arm/v7"]'),
    _F("artifacts", "section", "what happens to referrers: signatures, SBOMs, attestations", of="artifacts"),
)


# "config" stands in the order in which it is read: names before their uses.
SECTIONS: Mapping[str, tuple[Field, ...]] = {
    "config": (
        _F("registries", "names", "named registries", of="registry", default="{}"),
        _F("target_groups", "names", "named lists of registries", default="{}", empty="name one registry at least",
           example='{"all": ["mine"]}'),
        _F("defaults", "section", "what a mapping takes over where it says nothing itself", of="defaults"),
        _F("mappings", "list", "what is copied", of="mapping", required=True),
        _F("global", "section", "settings of the whole run", of="global"),
    ),
    "registry": (
        _F("url", "text", "`[http://|https://]HOST[:PORT]`; loopback addresses alone mean http",
           parse=parse_registry_url, required=True, example="registry.example.com:5000"),
        _F("auth_type", "text", "authentication; absent: detected", choices=_AUTH_TYPES),
        _F("credentials", "section", "for `auth_type: basic`", of="credentials", auth="basic"),
        _F("token", "text", "bearer token, for `auth_type: static_token`", secret=True, auth="static_token",
           refuses=("[^!-~]", "has a blank or a character outside ASCII, which no token has"),
           example="${REGISTRY_TOKEN}"),
        _F("cloud_profile", "text", "named profile, with explicit `auth_type: ecr`", auth="ecr"),
        _F("aws_profile", "text", "another name of `cloud_profile`", auth="ecr"),
        _F("head_first", "flag", "HEAD all targets before the source GET", default="false"),
        _F("max_concurrent", "count", "requests in flight at most", least=1, default="50"),
        _F("ca_file", "path", "PEM bundle added to the system's trust", example="ca.pem"),
        _F("client_cert", "path", "PEM client certificate", example="client.pem"),
        _F("client_key", "path", "PEM key of `client_cert`, where not in that file", needs=("client_cert",)),
        _F("proxy", "text", "proxy URL; absent: the environment's", check=_proxy, secret=True,
           example="http://proxy.example.com:3128"),
    ),
    "credentials": (
        _F("username", "text", "user name", required=True, example="mirror",
           refuses=(":", "has a colon, which HTTP Basic cannot carry in a user name")),
        _F("password", "text", "password or access token", required=True, secret=True, example="${MIRROR_PASSWORD}"),
    ),
    "defaults": _INHERITED,
    "mapping": (
        _F("from", "text", "source repository", check=_repository, required=True, example="library/alpine"),
        _F("to", "text", "target repository; absent: as `from`", check=_repository, example="base/alpine"),
        *_INHERITED,
    ),
    "tags": (
        _F("glob", "one_or_texts", "tags that match any pattern", check=check_glob, default="*",
           empty="omit it to take every tag", example='["3.*", "latest"]'),
        _F("exclude", "one_or_texts", "tags that are never wanted", check=check_glob, example='["*-rc*"]'),
        _F("semver", "text", "version range", check=parse_range, example=">=1.2,<2"),
        _F("semver_prerelease", "text", "what becomes of pre-releases", choices=("include", "exclude", "only"),
           default="exclude"),
        _F("sort", "text", "order, highest first", choices=("semver", "alpha")),
        _F("latest", "count", "the N highest; needs sort or semver", least=1, needs=("sort", "semver"), example="5"),
        _F("min_tags", "count", "keep at least N, whatever `semver` and `latest` drop", example="3"),
        _F("immutable_tags", "text", "skip these where the target's listing shows them", check=check_glob,
           example="v*.*.*"),
    ),
    "artifacts": (
        _F("enabled", "flag", "copy referrers with their image", default="true"),
        _F("include", "texts", "artifact types wanted; empty: all", default="[]", example='["application/spdx+json"]'),
        _F("exclude", "texts", "artifact types not wanted", default="[]"),
        _F("require_artifacts", "flag", "fail images without referrers", default="false"),
    ),
    "global": (
        _F("max_concurrent_transfers", "count", "images at a time", least=1, default="50"),
        _F("cache_ttl", "amount", "age at which facts expire; 0: never", parse=parse_duration, default="12h",
           example="1h30m"),
        _F("cache_dir", "path", "state and staging; relative to the file", default=".regsync"),
        _F("staging_size_limit", "amount", "disk for blobs of several targets; 0: none; absent: no limit",
           parse=parse_size, example="20 GB"),
    ),
}


# fmt: on
def schema() -> dict[str, Any]:
    """Return the JSON Schema of the document; what fields say against each other is for `validate`
    alone.
    """
    sections = {
        name: {
            "type": "object",
            "properties": {row.name: _property(row) for row in rows},
            "required": [row.name for row in rows if row.required],
            "additionalProperties": False,
        }
        for name, rows in SECTIONS.items()
    }
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "regsync configuration",
    }
    return {**head, **sections.pop("config"), "$defs": sections}


def _property(row: Field) -> dict[str, Any]:
    text = {"type": "string", "minLength": 1}
    section = {"$ref": f"#/$defs/{row.of}"}
    variable = {"type": "string", "pattern": r"^\$\{[^{}]*\}$"}  # may become anything
    texts: dict[str, Any] = {
        "type": "array",
        "items": text,
        **({"minItems": 1} if row.empty else {}),
    }
    shapes: dict[str, list[dict[str, Any]]] = {
        "flag": [{"type": "boolean"}, variable],
        "count": [{"type": "integer", "minimum": row.least, "maximum": 999_999_999}, variable],
        "amount": [text, {"type": "number", "minimum": 0}],
        "texts": [texts],
        "one_or_texts": [text, texts],
        "targets": [text, texts],
        "section": [section],
        "list": [{"type": "array", "items": section}],
        "names": [{"type": "object", "additionalProperties": section if row.of else texts}],
    }
    choices: list[dict[str, Any]] = [
        {"enum": list(row.choices)},
        {"type": "string", "pattern": r"\$\{"},
    ]
    taken = (choices if row.choices else shapes.get(row.type, [text])) + (
        [] if row.required else [{"type": "null"}]
    )
    shown: dict[str, Any] = {"anyOf": taken} if len(taken) > 1 else taken[0]
    default = {"default": value_of(row.default)} if row.default else {}
    examples = {"examples": [value_of(row.example)]} if row.example else {}
    return {"description": row.meaning, **default, **examples, **shown}


def value_of(written: str) -> Any:
    """Return what a default or an example of the table is as JSON: most are texts."""
    import json

    try:
        return json.loads(written)
    except ValueError:
        return written
