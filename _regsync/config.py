"""The configuration: YAML bytes and the environment in, frozen values out.

Owns: the table of fields, where each problem is (line, column, key path), the environment's expansion,
inheritance, the model that the rest of the program reads. May not know: files, the process environment,
how a value is used. Invariant: any input gives a `Config` or one `ConfigError` with every problem found,
in time linear in the input, and no message shows a secret or a URL that holds one.
Follows the specification's section 2 and design.md sections 3 and 4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from _regsync import providers
from _regsync.document import Node, Notes, Unreadable, compose, expand
from _regsync.errors import ConfigError, Problem
from _regsync.fields import (
    DEFAULT_CACHE_DIR,
    DEFAULT_CACHE_TTL,
    DEFAULT_PORTS,
    DEFAULT_TRANSFERS,
    SECTIONS,
    Field,
    is_loopback,
    parse_duration,
    parse_registry_url,
    parse_size,
)
from _regsync.oci import Platform
from _regsync.tags import LATEST_NEEDS_ORDER, TagRule

__all__ = [
    "ArtifactRule",
    "Config",
    "MappingRule",
    "Registry",
    "load",
    "parse_duration",
    "parse_registry_url",
    "parse_size",
    "registry_for",
]

# --- the model ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """One named registry. `host` has no brackets and is Docker Hub's canonical name where it is that."""

    alias: str
    scheme: Literal["https", "http"]
    host: str
    port: int
    kind: providers.Kind
    auth_type: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    cloud_profile: str | None = None
    head_first: bool = False
    max_concurrent: int | None = None
    ca_file: str | None = None
    client_cert: str | None = None
    client_key: str | None = None
    proxy: str | None = field(default=None, repr=False)

    @property
    def origin(self) -> tuple[str, int]:
        """What limits and knowledge are keyed by: aliases of one host and port share them."""
        return self.host, self.port

    @property
    def authority(self) -> str:
        """`host` or `host:port` as reports show it: without the scheme's own port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRule:
    """Which referrers travel with their image."""

    enabled: bool = True
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    require_artifacts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingRule:
    """One entry of `mappings` after inheritance; `platforms` None copies all."""

    index: int
    source: Registry
    source_repository: str
    targets: tuple[Registry, ...]
    target_repository: str
    tags: TagRule
    platforms: tuple[Platform, ...] | None
    artifacts: ArtifactRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A valid configuration. `cache_ttl` 0 means that entries never expire; `cache_dir` None: no state."""

    registries: Mapping[str, Registry]
    mappings: tuple[MappingRule, ...]
    max_concurrent_transfers: int = DEFAULT_TRANSFERS
    cache_dir: str | None = None
    cache_ttl: float = DEFAULT_CACHE_TTL
    staging_size_limit: int | None = None
    warnings: tuple[str, ...] = ()


# --- nodes to values ---------------------------------------------------------------------------

_FIELDS = MappingProxyType({name: {f.name: f for f in fields} for name, fields in SECTIONS.items()})
_TRUTH = MappingProxyType({"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False})
_WHOLLY_EXPANDED = re.compile(r"\$\{[^{}]*\}")
# Fields that stand in no section: the document itself, items, and what names are looked up.
_DOCUMENT = Field("", "section", "", of="config")
_MAPPING = Field("", "section", "", of="mapping")
_REGISTRY = Field("", "section", "", of="registry")
_ALIASES = Field("", "alias", "", empty="name one registry at least")
_ANY_NAME = Field("", "text", "")
_WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(slots=True)
class _Section:
    """A mapping as read: `nodes` of the fields that are given, `values` of those that are also right."""

    node: Node
    path: str
    nodes: dict[str, Node]
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Targets:
    registries: tuple[Registry, ...]
    origins: frozenset[tuple[str, int]]


class _Reader:
    """Reads the nodes by the table. What an alias repeats is read once: no document can multiply work."""

    def __init__(
        self, notes: Notes, environ: Mapping[str, str], base_dir: str | None, home: str | None
    ) -> None:
        self.notes = notes
        self.note = notes.note
        self.environ = environ
        self.base_dir = base_dir
        self.home = home
        self.warnings: list[str] = []
        self.registries: dict[str, Registry | None] = {}
        self.groups: dict[str, _Targets | None] = {}
        # What mappings use, each target list once (the sections keep them alive, so ids stay theirs);
        # and the mappings that read and write one registry.
        self.used: dict[int, tuple[Registry, ...]] = {}
        self.self_copies: list[tuple[Registry, _Section]] = []
        self.read_before: dict[tuple[int, Field], Any] = {}

    def value(self, node: Node, field: Field, path: str) -> Any:
        """Return the value by the method that the field's type names; None when it is wrong (and noted)."""
        read = _READERS[field.type]
        if not node.shared:
            return read(self, node, field, path)
        known = (id(node), field)
        if known not in self.read_before:
            self.read_before[known] = read(self, node, field, path)
        return self.read_before[known]

    def is_a(self, node: Node, tag: str, path: str) -> bool:
        if node.tag != tag:
            wanted = "a mapping" if tag == "map" else "a list"
            self.note(node, path, f"{wanted} is needed, not {node.kind}")
        return node.tag == tag

    def section(self, node: Node, field: Field, path: str) -> Any:
        if not self.is_a(node, "map", path):
            return None
        fields = _FIELDS[field.of]
        section = _Section(node, path, {}, {})
        pairs = node.value
        if field is _DOCUMENT:
            rank = {name: place for place, name in enumerate(fields)}
            pairs = sorted(pairs, key=lambda pair: rank.get(pair[0].value, 0))
        for key, value in pairs:
            inner = f"{path}.{key.value}" if path else key.value
            found = fields.get(key.value)
            if found is None:
                self.note(key, inner, f"unknown key{self.nearest(key.value, fields)}")
            elif value.tag != "null":
                section.nodes[found.name] = value
                read = self.value(value, found, inner)
                if read is not None:
                    section.values[found.name] = read
        for wanted in fields.values():
            if wanted.required and wanted.name not in section.nodes:
                self.note(node, f"{path}.{wanted.name}".removeprefix("."), f"required: {wanted.meaning}")
        build = _BUILDERS.get(field.of)
        return section if build is None else build(self, section)

    def sections(self, node: Node, field: Field, path: str) -> list[_Section | None] | None:
        if not self.is_a(node, "seq", path):
            return None
        return [self.value(item, _MAPPING, f"{path}[{index}]") for index, item in enumerate(node.value)]

    def names(self, node: Node, field: Field, path: str) -> None:
        """Read `registries` or `target_groups` into the reader itself, where uses look them up."""
        for key, value in node.value if self.is_a(node, "map", path) else ():
            inner = f"{path}.{key.value}"
            if key.tag != "str":
                self.note(key, inner, f"the name is {key.kind}: put it in quotes")
            elif not key.value or not key.value.isprintable():
                self.note(key, inner, "the name is empty or has a control character: give another")
            elif field.of == "registry":
                registry = self.value(value, _REGISTRY, inner)
                self.registries[key.value] = registry and replace(registry, alias=key.value)
            else:
                self.groups[key.value] = self.alias_list(value, inner)

    def expanded(self, node: Node, path: str) -> str | None:
        try:
            return expand(node.value, self.environ) if "$" in node.value else node.value
        except ValueError as error:
            self.note(node, path, str(error))
            return None

    def text(self, node: Node, field: Field, path: str) -> Any:
        if node.tag != "str" and not (field.number_too and node.tag in ("int", "float")):
            remedy = ""
            if node.tag not in ("map", "seq", "null"):
                remedy = ": put it in quotes" + ("" if field.secret else f", '{node.value}'")
            self.note(node, path, f"text is needed, not {node.kind}{remedy}")
            return None
        text = self.expanded(node, path)
        if text is None:
            return None
        try:
            return self.checked(text, field)
        except ValueError as error:
            self.note(node, path, str(error))
            return None

    def checked(self, text: str, field: Field) -> Any:
        if not text:
            raise ValueError("must not be empty")
        if not text.isprintable():
            # Such text would break a line, a header or a path; a trailing line break is a common slip.
            raise ValueError("has a line break or another control character: remove it")
        if field.choices and text not in field.choices:
            raise ValueError(f"{text!r} is none of {', '.join(field.choices)}")
        if field.type == "alias" and text not in self.registries:
            near = ": name a group alone, without a list" if text in self.groups else ""
            raise ValueError(f"no registry is named {text!r}{near or self.nearest(text, self.registries)}")
        if field.type == "path":
            return self.absolute(text)
        if field.check:
            field.check(text)
        return field.parse(text) if field.parse else text

    def texts(self, node: Node, field: Field, path: str) -> tuple[Any, ...] | None:
        if field.type == "one_or_texts" and node.tag != "seq":
            one = self.text(node, field, path)
            return None if one is None else (one,)
        if not self.is_a(node, "seq", path):
            return None
        if not node.value and field.empty:
            self.note(node, path, f"an empty list: {field.empty}")
            return None
        found = [self.text(item, field, f"{path}[{index}]") for index, item in enumerate(node.value)]
        return None if None in found else tuple(dict.fromkeys(found))

    def flag(self, node: Node, field: Field, path: str) -> bool | None:
        text = self.plain(node, "bool", path)
        truth = None if text is None else _TRUTH.get(text.lower())
        if truth is None and text is not None:
            self.note(node, path, f"true or false is needed, not {node.kind}")
        return truth

    def count(self, node: Node, field: Field, path: str) -> int | None:
        text = self.plain(node, "int", path)
        if text is None:
            return None
        if not _WHOLE_NUMBER.fullmatch(text):
            quoted = node.tag == "str" and _WHOLE_NUMBER.fullmatch(node.value)
            remedy = ": remove the quotes" if quoted else ""
            self.note(node, path, f"a whole number from {field.least} to 999999999 is needed{remedy}")
        elif int(text) < field.least:
            self.note(node, path, f"must be at least {field.least}")
        else:
            return int(text)
        return None

    def plain(self, node: Node, tag: str, path: str) -> str | None:
        """Return a scalar's text when it has that type, or is one `${…}` and so may have it; else ""."""
        if node.tag == "str" and _WHOLLY_EXPANDED.fullmatch(node.value):
            return self.expanded(node, path)
        return str(node.value) if node.tag == tag else ""

    def targets(self, node: Node, field: Field, path: str) -> _Targets | None:
        if node.tag == "seq":
            return self.alias_list(node, path)
        name = self.text(node, _ANY_NAME, path)
        if name in self.groups and name in self.registries:
            self.note(node, path, f"{name!r} is both a group and a registry: rename one, or write a list")
        elif name in self.groups:
            return self.groups[name]
        elif name in self.registries:
            return self.resolved([name])
        elif name is not None:
            near = self.nearest(name, [*self.groups, *self.registries])
            self.note(node, path, f"no group or registry is named {name!r}{near}")
        return None

    def alias_list(self, node: Node, path: str) -> _Targets | None:
        names = self.texts(node, _ALIASES, path)
        return None if names is None else self.resolved(names)

    def resolved(self, names: Sequence[str]) -> _Targets | None:
        """Return the registries of known aliases; None when one of them is wrong itself (noted there)."""
        found = [registry for registry in (self.registries[name] for name in names) if registry is not None]
        if len(found) < len(names):
            return None
        return _Targets(tuple(found), frozenset(registry.origin for registry in found))

    def absolute(self, text: str) -> str:
        """Return a path relative to the file; as it is where there is no file."""
        if text == "~" or text.startswith(("~/", "~\\")):
            return text if self.home is None else self.home + text[1:]
        if self.base_dir is None or text.startswith(("/", "\\")) or re.match(r"[A-Za-z]:[\\/]", text):
            return text
        return f"{self.base_dir.rstrip('/')}/{text}"

    def nearest(self, text: str, known: Iterable[str]) -> str:
        # Bounded, because comparing is slow: a file that is wrong all over needs no more suggestions.
        if len(self.notes.problems) > 100:
            return ""
        import difflib

        near = difflib.get_close_matches(text[:64], list(known)[:500], n=1)
        return f": did you mean {near[0]!r}?" if near else ""

    def warn(self, node: Node, path: str, message: str) -> None:
        self.warnings.append(str(Problem(self.notes.name, node.line, node.column, path, message)))

    # The builders: a section whose fields are read becomes what the model holds.

    def credentials(self, section: _Section) -> tuple[str, str] | None:
        username, password = section.values.get("username"), section.values.get("password")
        return None if username is None or password is None else (username, password)

    def tag_rule(self, section: _Section) -> TagRule | None:
        values = section.values
        if "latest" in section.nodes and not {"sort", "semver"} & set(section.nodes):
            self.note(section.nodes["latest"], f"{section.path}.latest", LATEST_NEEDS_ORDER)
            return None
        return TagRule(**values) if len(values) == len(section.nodes) else None

    def artifact_rule(self, section: _Section) -> ArtifactRule | None:
        if section.values.get("enabled") is False:
            if section.values.get("require_artifacts"):
                place, path = section.nodes["require_artifacts"], f"{section.path}.require_artifacts"
                self.note(place, path, "contradicts `enabled: false` beside it: remove one of them")
            place = section.nodes["enabled"]
            self.warn(place, f"{section.path}.enabled", "false: signatures and SBOMs are stripped at targets")
        return ArtifactRule(**section.values) if len(section.values) == len(section.nodes) else None

    def registry(self, section: _Section) -> Registry | None:
        self.check_registry(section)
        values = dict(section.values)
        if len(values) < len(section.nodes) or "url" not in values:
            return None
        scheme, host, port = values.pop("url")
        values["cloud_profile"] = values.pop("aws_profile", None) or values.get("cloud_profile")
        values["username"], values["password"] = values.pop("credentials", (None, None))
        auth = values.get("auth_type")
        kind = providers.kind_of(host, auth)
        found = Registry(alias="", scheme=scheme, host=host, port=port, kind=kind, **values)
        if scheme == "http" and auth not in (None, "anonymous") and not is_loopback(host):
            message = f"credentials travel over plain HTTP to {found.authority}"
            self.warn(section.nodes["url"], f"{section.path}.url", message)
        return found

    def check_registry(self, section: _Section) -> None:
        """Note what the fields of a registry say against each other."""
        nodes = section.nodes

        def refuse(name: str, message: str) -> None:
            self.note(nodes[name], f"{section.path}.{name}", message)

        auth = section.values.get("auth_type")
        if "auth_type" not in nodes or auth is not None:
            for name, method in (("credentials", "basic"), ("token", "static_token")):
                if auth == method and name not in nodes:
                    refuse("auth_type", f"{method} needs `{name}`")
                elif auth != method and name in nodes:
                    refuse(name, f"goes with `auth_type: {method}` only")
            for name in ("cloud_profile", "aws_profile"):
                if name in nodes and auth != "ecr":
                    refuse(name, "goes with explicit `auth_type: ecr` only")
        if "cloud_profile" in nodes and "aws_profile" in nodes:
            refuse("aws_profile", "is the same field as `cloud_profile`: remove one of them")
        if "client_key" in nodes and "client_cert" not in nodes:
            refuse("client_key", "needs `client_cert`")


# fmt: off
_BUILDERS: Mapping[str, Callable[[_Reader, _Section], Any]] = MappingProxyType({
    "registry": _Reader.registry, "credentials": _Reader.credentials, "tags": _Reader.tag_rule,
    "artifacts": _Reader.artifact_rule,
})
_READERS: Mapping[str, Callable[[_Reader, Node, Field, str], Any]] = MappingProxyType({
    "section": _Reader.section, "list": _Reader.sections, "names": _Reader.names, "targets": _Reader.targets,
    "texts": _Reader.texts, "one_or_texts": _Reader.texts, "flag": _Reader.flag, "count": _Reader.count,
    "text": _Reader.text, "alias": _Reader.text, "path": _Reader.text,
})
# fmt: on

# --- the whole ---------------------------------------------------------------------------------


def load(
    text: bytes, *, name: str, environ: Mapping[str, str], base_dir: str | None, home: str | None
) -> Config:
    """Read a configuration; ConfigError carries every problem in it, in the order of the file.

    `name` is what messages call the file; `base_dir` is its absolute directory, None for standard input.
    """
    notes = Notes(name)
    reader = _Reader(notes, environ, base_dir, home)
    try:
        root = compose(text, notes)
        if root is None or root.tag == "null":
            raise notes.unreadable(1, 1, "the document is empty: `mappings` is required, and may be []")
        config = _config(reader, root)
    except Unreadable:
        config = None
    if config is None or notes.problems:
        problems = tuple(sorted(notes.problems, key=lambda problem: (problem.line, problem.column)))
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(f"{problems[0]}{more}", problems=problems)
    return config


def _config(reader: _Reader, root: Node) -> Config | None:
    document = reader.section(root, _DOCUMENT, "")
    if document is None:
        return None
    defaults = document.values.get("defaults")
    mappings = [
        _mapping(reader, index, section, defaults)
        for index, section in enumerate(document.values.get("mappings") or ())
        if section is not None
    ]
    _check_shared_limits(reader)
    settings = document.values.get("global")
    values = dict(settings.values) if settings is not None else {}
    if reader.base_dir is None:
        values["cache_dir"] = None
    else:
        values.setdefault("cache_dir", reader.absolute(DEFAULT_CACHE_DIR))
    return Config(
        registries=MappingProxyType({k: v for k, v in reader.registries.items() if v is not None}),
        mappings=tuple(mapping for mapping in mappings if mapping is not None),
        warnings=tuple(reader.warnings),
        **values,
    )


def _mapping(reader: _Reader, index: int, section: _Section, defaults: _Section | None) -> MappingRule | None:
    """Resolve one mapping: what it does not say itself comes from the defaults, field by whole field."""

    def inherited(name: str, otherwise: Any = None) -> Any:
        for giver in (section, defaults):
            if giver is not None and name in giver.nodes:
                return giver.values.get(name)
        return otherwise

    for name in ("source", "targets"):
        if name not in section.nodes and (defaults is None or name not in defaults.nodes):
            reader.note(section.node, f"{section.path}.{name}", "required, here or in `defaults`")
    source = reader.registries.get(inherited("source", ""))
    targets: _Targets | None = inherited("targets")
    tags, artifacts = inherited("tags", TagRule()), inherited("artifacts", ArtifactRule())
    origin = section.values.get("from")
    destination = section.values.get("to") if "to" in section.nodes else origin
    if source is None or targets is None or tags is None or artifacts is None:
        return None
    if origin is None or destination is None:
        return None
    reader.used[id(source)] = (source,)
    reader.used[id(targets)] = targets.registries
    if source.origin in targets.origins:
        reader.self_copies.append((source, section))
        asked = providers.api_repository(source.host, origin)
        if asked == providers.api_repository(source.host, destination):
            message = f"source and target are the same repository of {source.authority}: give another `to`"
            reader.note(section.nodes.get("to", section.nodes["from"]), section.path, message)
    return MappingRule(
        index=index,
        source=source,
        source_repository=origin,
        targets=targets.registries,
        target_repository=destination,
        tags=tags,
        platforms=inherited("platforms"),
        artifacts=artifacts,
    )


def _check_shared_limits(reader: _Reader) -> None:
    """Refuse one request at a time where a copy needs a reading and a writing one (design.md I8)."""
    tight = {
        registry.origin
        for registries in reader.used.values()
        for registry in registries
        if registry.max_concurrent == 1
    }
    for registry, section in reader.self_copies:
        if registry.origin in tight:
            message = f"reads and writes {registry.authority}, whose max_concurrent is 1: allow 2 at least"
            reader.note(section.node, section.path, message)


def registry_for(host: str, config: Config | None) -> Registry:
    """Return the first configured registry for `HOST[:PORT]` of a reference, else an unconfigured one.

    A host without port means what the scheme says: 443, or 80 where `http://` is configured for it.
    ValueError when `host` is no registry address.
    """
    scheme, name, port = parse_registry_url(host)
    explicit = re.search(r":[0-9]+$", host) is not None
    for registry in config.registries.values() if config is not None else ():
        usual = DEFAULT_PORTS[registry.scheme]
        if registry.host == name and registry.port == (port if explicit else usual):
            return registry
    return Registry(alias=host, scheme=scheme, host=name, port=port, kind=providers.kind_of(name))
