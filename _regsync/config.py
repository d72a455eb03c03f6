"""The configuration: YAML bytes and the environment in, frozen values out. Owns: reading by the
table of fields, places of problems, inheritance, the model, what may be shown of it, doubts. May
not know: files, the process environment, how a value is used. Invariant: any input gives a `Config`
or a `ConfigError` with every problem, aliases are read once, no message shows a secret; a doubt
speaks only where no registry's content could prove it wrong, but for tags that move by custom and
ranges without an end. Follows design.md sections 3 and 4."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from _regsync import oci, providers
from _regsync.document import Node, Unreadable, compose, dump, masked, substitute, variables
from _regsync.errors import ConfigError, Problem, clean, plain, without_logins
from _regsync.fields import DEFAULT_PORTS, SECTIONS, Field, is_loopback, parse_registry_url
from _regsync.tags import TagRule, Version, admits, check_glob, compile_glob, parse_range, select


class Registry(NamedTuple):
    """One named registry. `host` has no brackets and is Docker Hub's canonical name where it is
    that.
    """

    alias: str
    scheme: Literal["https", "http"]
    host: str
    port: int
    kind: providers.Kind
    auth_type: str | None = None
    username: str | None = None
    password: str | None = None
    token: str | None = None
    cloud_profile: str | None = None
    head_first: bool = False
    max_concurrent: int | None = None
    ca_file: str | None = None
    client_cert: str | None = None
    client_key: str | None = None
    proxy: str | None = None

    def place(self, repository: str) -> object:
        """Return what names a repository there, the same under all its names."""
        return self.origin, providers.api_repository(self.host, repository)

    def __repr__(self) -> str:
        # no secret, whatever prints it
        return f"<Registry {self.alias}: {self.scheme}://{self.authority}>"

    @property
    def origin(self) -> tuple[str, int]:
        """What limits and knowledge are keyed by: aliases of one host and port share them."""
        return self.host, self.port

    @property
    def authority(self) -> str:
        """`host` or `host:port` as reports show it: without the scheme's own port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


class ArtifactRule(NamedTuple):
    """Which referrers travel with their image."""

    enabled: bool = True
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    require_artifacts: bool = False


class MappingRule(NamedTuple):
    """One entry of `mappings` after inheritance; `platforms` None copies all."""

    index: int  # type: ignore[assignment]
    source: Registry
    source_repository: str
    targets: tuple[Registry, ...]
    target_repository: str
    tags: TagRule
    platforms: tuple[oci.Platform, ...] | None
    artifacts: ArtifactRule

    @property
    def content(self) -> object:
        """What it takes: mappings of one content never contend for a target's tag."""
        return self.source.place(self.source_repository), self.platforms and frozenset(
            self.platforms
        )

    @property
    def places(self) -> list[object]:
        return [target.place(self.target_repository) for target in self.targets]


class Config(NamedTuple):
    """A valid configuration. `cache_ttl` 0 means that entries never expire; `cache_dir` None: no
    state.
    """

    registries: Mapping[str, Registry]
    mappings: tuple[MappingRule, ...]
    max_concurrent_transfers: int = 50
    cache_dir: str | None = None
    cache_ttl: float = 12 * 3600.0
    staging_size_limit: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def in_use(self) -> tuple[Registry, ...]:
        return tuple(
            dict.fromkeys(each for rule in self.mappings for each in (rule.source, *rule.targets))
        )


# What scalars of a type may be in YAML, and what their users call them; all others are text.
_SCALARS = {
    "flag": (("bool",), "true or false without quotes"),
    "count": (("int",), "a whole number without quotes"),
    "amount": (("str", "int", "float"), "text"),
}
# Fields that stand in no section: the document itself, and items of lists and of named things.
_DOCUMENT, _MAPPING, _REGISTRY = (
    Field("", "section", "", of=of) for of in ("config", "mapping", "registry")
)
_ALIAS = Field("", "alias", "", empty="name one registry at least")
_MASK = "********"
_MOST_EXPANDED = 1_000_000  # values; aliases could fill the memory
_SIMPLE = r"[A-Za-z0-9._*-]+"  # one such glob can be matched against the text of another
# Tags that move by custom: names, and versions that leave something out.
_MOVING = (
    r"(?:latest|current|stable|lts|mainline|main|master|trunk|head|edge|nightly|canary|rolling|snapshot"
    r"|dev|develop|testing|unstable|next|v?[0-9]{1,3}(?:\.[0-9]{1,3})?)(?:-[a-z]+)*"
)


class _Section(NamedTuple):
    """A mapping as read: `nodes` of the fields that are given, `values` of those that are also
    right.
    """

    node: Node
    path: str
    nodes: dict[str, Node]
    values: dict[str, Any]


class _Reader:
    """Reads nodes by the table. A value that is wrong is noted and read as None; reading goes on.
    Methods are found by name: `read_` and a type of fields, `find_` and a type of scalars, `build_`
    and a section with its fields read."""

    def __init__(
        self,
        name: str,
        environ: Mapping[str, str],
        base_dir: str | None,
        home: str | None,
        lint: bool,
    ) -> None:
        self.name = name
        self.environ = environ
        self.base_dir = base_dir
        self.home = home
        self.lint = lint
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []
        self.registries: dict[
            str, Registry | None
        ] = {}  # None: there is one by that name, but it is wrong
        self.groups: dict[str, tuple[Registry, ...] | None] = {}
        self.defaults = _Section(Node("map", {}, 0, 0), "", {}, {})
        self.secret_names: set[str] = set()  # variables that gave a secret
        self.read_before: dict[tuple[int, int], Any] = {}

    def read(self, text: bytes) -> _Section:
        """Return the document, free of problems; ConfigError otherwise."""
        try:
            root = compose(text, self.note)
            if root is None or root.tag == "null":
                raise Unreadable(
                    1, 1, "the document is empty: `mappings` is required, and may be []"
                )
            document: _Section = self.value(root, _DOCUMENT, "")
        except Unreadable as error:
            line, column, message = error.args
            self.note(Node("", "", line, column), "", message)
        if self.problems:
            problems = tuple(sorted(self.problems, key=lambda problem: problem[1:3]))
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise ConfigError(f"{problems[0]}{more}", problems=problems)
        if self.lint:
            self.doubt(document)
        return document

    def doubt(self, document: _Section) -> None:
        rules = document.values["mappings"]
        earlier = dict[object, list[MappingRule]]()
        for index, rule in enumerate(rules):
            before = [earlier.setdefault((rule.content, place), []) for place in rule.places]
            owners = [
                next((each for each in found if _leaves_nothing(each.tags, rule.tags)), None)
                for found in before
            ]
            if owners[0] is not None and None not in owners:
                message = f"copies nothing: mappings[{owners[0].index}] copies all of it to the same place"
                self.note(
                    document.nodes["mappings"].value[index],
                    f"mappings[{index}]",
                    message,
                    self.warnings,
                )
            for found in before:
                if len(found) < 50:  # lists of thousands of mappings stay linear
                    found.append(rule)
        used = {registry.alias for rule in rules for registry in (rule.source, *rule.targets)}
        for name, registry in self.registries.items() if rules else ():
            if name not in used and registry and (registry.password or registry.token):
                self.note(
                    document.nodes["registries"].value[name][0],
                    f"registries.{name[:64]}",
                    "its credentials are never used: no mapping names it",
                    self.warnings,
                )

    def note(self, node: Node, path: str, message: str, into: list[Problem] | None = None) -> None:
        problem = Problem(
            self.name, node.line, node.column, clean(path, 200), clean(without_logins(message))
        )
        (self.problems if into is None else into).append(problem)

    def refuse(
        self, section: _Section, name: str, message: str, into: list[Problem] | None = None
    ) -> None:
        self.note(section.nodes[name], f"{section.path}.{name}", message, into)

    def value(self, node: Node, field: Field, path: str) -> Any:
        known = (id(node), id(field))
        if known not in self.read_before:
            self.read_before[known] = getattr(self, f"read_{field.type}", self.scalar)(
                node, field, path
            )
        return self.read_before[known]

    def is_a(self, node: Node, tag: str, path: str) -> bool:
        if node.tag != tag:
            self.note(
                node,
                path,
                f"{'a mapping' if tag == 'map' else 'a list'} is needed, not {node.kind}",
            )
        return node.tag == tag

    def read_section(self, node: Node, field: Field, path: str) -> Any:
        if not self.is_a(node, "map", path):
            return None
        names = [known.name for known in SECTIONS[field.of]]
        nodes = {
            name: value
            for name, (_, value) in node.value.items()
            if name in names and value.tag != "null"
        }
        section = _Section(node, path, nodes, {})
        inner = f"{path}." if path else ""
        for name, (key, _) in node.value.items():
            if name not in names:
                self.note(key, f"{inner}{plain(name)}", f"unknown key{self.nearest(name, names)}")
        for known in SECTIONS[field.of]:  # in their order names come before their uses
            if known.name in nodes:
                if (
                    read := self.value(nodes[known.name], known, f"{inner}{known.name}")
                ) is not None:
                    section.values[known.name] = read
                if known.needs and nodes.keys().isdisjoint(known.needs):
                    self.refuse(section, known.name, f"needs `{'` or `'.join(known.needs)}`")
            elif known.required:
                self.note(node, f"{inner}{known.name}", f"required: {known.meaning}")
        build = getattr(self, f"build_{field.of}", None)
        return build(section) if build else section

    def read_list(self, node: Node, field: Field, path: str) -> list[MappingRule]:
        items = enumerate(node.value) if self.is_a(node, "seq", path) else ()
        rules = [(index, self.value(item, _MAPPING, f"{path}[{index}]")) for index, item in items]
        return [rule._replace(index=index) for index, rule in rules if rule]

    def read_names(self, node: Node, field: Field, path: str) -> None:
        """Read `registries` or `target_groups` into the reader itself, where uses look them up."""
        for name, (key, value) in node.value.items() if self.is_a(node, "map", path) else ():
            inner = f"{path}.{name[:64]}"
            if key.tag != "str" or not name or not name.isprintable():
                self.note(key, inner, f"a name is needed, not {key.kind}: put it in quotes")
            elif field.of == "registry":
                registry = self.value(value, _REGISTRY, inner)
                self.registries[name] = registry and registry._replace(alias=name)
            else:
                self.groups[name] = self.read_texts(value, _ALIAS, inner)

    def read_texts(self, node: Node, field: Field, path: str) -> tuple[Any, ...] | None:
        if node.tag != "seq" and field.type in ("one_or_texts", "targets"):
            one = self.scalar(node, field, path)
            return one if one is None or field.type == "targets" else (one,)
        if not self.is_a(node, "seq", path):
            return None
        field = _ALIAS if field.type == "targets" else field
        if not node.value and field.empty:
            self.note(node, path, f"an empty list: {field.empty}")
            return None
        found = [
            self.scalar(item, field, f"{path}[{index}]") for index, item in enumerate(node.value)
        ]
        return None if None in found else tuple(dict.fromkeys(found))

    read_one_or_texts = read_targets = read_texts

    def scalar(self, node: Node, field: Field, path: str) -> Any:
        tags, wanted = _SCALARS.get(field.type, (("str",), "text"))
        try:
            # What is one variable wholly may become anything.
            if node.tag not in tags and not (
                node.tag == "str" and re.fullmatch(r"\$\{[^{}]*\}", node.value)
            ):
                remedy = (
                    ": put it in quotes"
                    if "str" in tags and node.tag not in ("map", "seq", "null")
                    else ""
                )
                raise ValueError(f"{wanted} is needed, not {node.kind}{remedy}")
            text = substitute(node.value, self.environ)
            if field.hides(text):
                self.secret_names |= (names := variables(node.value))
                if self.lint and not names:
                    message = (
                        "a secret is written out: write ${NAME}, and set NAME in the environment"
                    )
                    self.note(node, path, message, self.warnings)
            return self.meaning(text, field)
        except ValueError as error:
            self.note(node, path, str(error))
            return None

    def meaning(self, text: str, field: Field) -> Any:
        find = getattr(self, f"find_{field.type}", None)
        return find(field.parsed(text)) if find else field.parsed(text)

    def find_targets(self, text: str) -> tuple[Registry, ...] | None:
        if text in self.groups and text in self.registries:
            raise ValueError(
                f"{text!r} is both a group and a registry: rename one, or write a list"
            )
        if text in self.groups:
            return self.groups[text]
        registry = self.find_alias(text)
        return registry and (registry,)

    def find_alias(self, text: str) -> Registry | None:
        if text in self.groups and text not in self.registries:
            raise ValueError(
                f"{text!r} is a group, which stands alone and in `targets`: name a registry"
            )
        if text not in self.registries:
            near = self.nearest(text, [*self.registries, *self.groups])
            raise ValueError(f"no registry or group is named {text!r}{near}")
        return self.registries[text]

    def find_path(self, text: str) -> str:
        if text == "~" or text.startswith(("~/", "~\\")):
            if self.home and self.home != "~":
                return self.home + text[1:]
            raise ValueError(f"{text!r}: no home directory is known: set HOME, or write it out")
        if self.base_dir is None or text.startswith(("/", "\\")) or text[1:3] in (":/", ":\\"):
            return text
        return f"{self.base_dir.rstrip('/')}/{text}"

    def nearest(self, text: str, known: list[str]) -> str:
        if len(self.problems) > 100:  # comparing is slow
            return ""
        import difflib

        near = difflib.get_close_matches(text[:64], known[:500], n=1)
        return f": did you mean {near[0]!r}?" if near else ""

    # Where one field is wrong the whole configuration is: builders only look for what fields say
    # against each other.
    def build_defaults(self, section: _Section) -> None:
        self.defaults = section

    def build_tags(self, section: _Section) -> TagRule:
        rule = TagRule(**section.values)
        for name, message in (
            _doubts_of(rule) if self.lint and len(section.values) == len(section.nodes) else ()
        ):
            self.refuse(section, name, message, self.warnings)
        return rule

    def build_artifacts(self, section: _Section) -> ArtifactRule:
        rule = ArtifactRule(**section.values)
        if not rule.enabled:
            if rule.require_artifacts:
                self.refuse(
                    section, "require_artifacts", "contradicts `enabled: false`: remove one of them"
                )
            self.refuse(
                section,
                "enabled",
                "is false: signatures and SBOMs are stripped at targets",
                self.warnings,
            )
        if self.lint and rule.include and set(rule.include) <= set(rule.exclude):
            self.refuse(section, "exclude", "drops every type that `include` takes", self.warnings)
        return rule

    def build_registry(self, section: _Section) -> Registry | None:
        nodes = section.nodes
        values = {
            "cloud_profile" if name == "aws_profile" else name: value
            for name, value in section.values.items()
        }
        auth = values.get("auth_type")
        for field in SECTIONS["registry"] if auth or "auth_type" not in nodes else ():
            if field.auth != auth and field.auth and field.name in nodes:
                self.refuse(section, field.name, f"goes with `auth_type: {field.auth}` only")
            elif field.auth == auth not in (None, "ecr") and field.name not in nodes:
                self.refuse(section, "auth_type", f"{auth} needs `{field.name}`")
        if "cloud_profile" in nodes and "aws_profile" in nodes:
            self.refuse(
                section, "aws_profile", "is the same field as `cloud_profile`: remove one of them"
            )
        if "url" not in values:
            return None
        scheme, host, port = values.pop("url")
        if "credentials" in values:
            values |= values.pop("credentials").values
        found = Registry("", scheme, host, port, providers.kind_of(host, auth), **values)
        if scheme == "http" and auth not in (None, "anonymous") and not is_loopback(host):
            message = (
                f"credentials travel over plain HTTP to {found.authority}: use https:// if it can"
            )
            self.refuse(section, "url", message, self.warnings)
        return found

    def build_mapping(self, section: _Section) -> MappingRule | None:
        values: dict[str, Any] = {"platforms": None, "tags": TagRule(), "artifacts": ArtifactRule()}
        values |= self.defaults.values | section.values
        for name in ("source", "targets"):
            if name not in section.nodes and name not in self.defaults.nodes:
                self.note(section.node, f"{section.path}.{name}", "required, here or in `defaults`")
        if (
            len(section.values) < len(section.nodes)
            or not {"from", "source", "targets"} <= values.keys()
        ):
            return None
        order = ("source", "from", "targets", "to", "tags", "platforms", "artifacts")
        rule = MappingRule(0, *({"to": values["from"], **values}[name] for name in order))
        source = rule.source
        where = rule.source.authority
        if all(target.origin != source.origin for target in rule.targets):
            return rule
        if source.place(rule.source_repository) == source.place(rule.target_repository):
            name = "to" if "to" in section.nodes else "from"
            self.refuse(
                section,
                name,
                f"source and target are the same repository of {where}: give another `to`",
            )
        # A copy needs a reading and a writing request there at a time (design.md I8).
        if any(
            one.max_concurrent == 1
            for one in self.registries.values()
            if one and one.origin == source.origin
        ):
            message = f"reads and writes {where}, whose max_concurrent is 1: allow 2 at least"
            self.note(section.node, section.path, message)
        return rule


@lru_cache(256)  # large configurations repeat a few rules
def _doubts_of(rule: TagRule) -> Sequence[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    immutable = rule.immutable_tags or ""
    for field, patterns in (
        ("glob", rule.glob),
        ("exclude", rule.exclude),
        ("immutable_tags", [immutable]),
    ):
        why = "matches no tag: tags are letters, digits, _ . - and begin with no . or -"
        found += [
            (field, f"{pattern!r} {why}") for pattern in patterns if _matches_nothing(pattern)
        ]
    literals = [tag for pattern in rule.glob if (tag := check_glob(pattern)) is not None]
    if literals and (rule.exclude or rule.chooses_versions):
        dropped = select(literals, rule._replace(latest=None, min_tags=None)).dropped.items()
        lost = [
            (tag, reason) for tag, reason in dropped if reason == "exclude" or not rule.min_tags
        ]
        found += [
            ("glob", f"{tag!r} is never copied: the {reason} rule drops it") for tag, reason in lost
        ]
    for pattern in rule.glob or ("*",):
        if check_glob(pattern) is None and any(_covers(wide, pattern) for wide in rule.exclude):
            found.append(("exclude", f"drops every tag that the glob {pattern!r} takes: narrow it"))
    if rule.semver is not None:
        versions = parse_range(rule.semver)
        # Where anything is admitted, then something at a bound or right after it.
        bounds = {bound for one in versions for each in one for bound in each[:2]}
        releases = {
            (major, minor, patch + more) for (major, minor, patch), *_ in bounds for more in (0, 1)
        }
        near = {bound for bound in bounds if bound.is_prerelease} | {
            Version(each) for each in releases | {(0, 0, 0)}
        }
        if not any(admits(versions, version, "include") for version in near):
            found.append(
                ("semver", f"{rule.semver!r} admits no version: its comparators exclude each other")
            )
        elif (
            rule.latest is None
            and set(rule.glob) <= {"*", "v*"}
            and admits(versions, Version((10**9, 0, 0)))
        ):
            remedy = "add `latest`, or an upper bound such as '<2'"
            found.append(
                (
                    "semver",
                    f"{rule.semver!r} has no end, so that all versions are copied for ever: {remedy}",
                )
            )
    if immutable:
        single = check_glob(immutable)
        moving = [tag for tag in ([single] if single else literals) if re.fullmatch(_MOVING, tag)]
        why = "moves as a rule, and would never be copied again: leave it out"
        found += [
            ("immutable_tags", f"{tag!r} {why}") for tag in filter(compile_glob(immutable), moving)
        ]
    return found


def _matches_nothing(pattern: str) -> bool:
    """Say whether a pattern asks for a character that tags cannot have, outside of braces and sets."""
    bare = re.sub(r"\{.*\}|\[(?:\\.|[^\]\\])*\]", "*", pattern, flags=re.DOTALL).replace("\\", "")
    return re.fullmatch(r"(?:[A-Za-z0-9_*?][A-Za-z0-9_.*?-]*)?", bare) is None


def _covers(wide: str, narrow: str) -> bool:
    if wide in (narrow, "*"):
        return not narrow.startswith(("sha256-", "sha512-")) or wide == narrow
    return bool(re.fullmatch(_SIMPLE, wide) and re.fullmatch(_SIMPLE, narrow)) and compile_glob(
        wide
    )(narrow)


def _leaves_nothing(first: TagRule, rule: TagRule) -> bool:
    wide = first._replace(immutable_tags=None)
    narrow = rule._replace(immutable_tags=None)
    return wide == narrow or (
        wide.latest is None
        and not narrow.min_tags
        and all(any(_covers(a, b) for a in wide.glob or ("*",)) for b in narrow.glob or ("*",))
        and set(wide.exclude) <= set(narrow.exclude)
        and (wide.semver, wide.semver_prerelease)
        in ((None, None), (narrow.semver, narrow.semver_prerelease))
    )


class _Expansion(_Reader):
    """Makes plain values of nodes that were read without a problem."""

    expanded = 0
    show_secrets = False

    def plain(self, node: Node, field: Field) -> Any:
        self.expanded += 1
        if self.expanded > _MOST_EXPANDED:
            raise ConfigError(
                f"the configuration has over {_MOST_EXPANDED:,} values when it is expanded"
            )
        if field.type in ("alias", "targets"):
            read = self.value(node, field, "")
            return (
                read.alias if isinstance(read, Registry) else [registry.alias for registry in read]
            )
        if field.type == "section":
            return self.plain_section(node, field)
        if field.type == "names":
            return {name: self.plain(value, _REGISTRY) for name, (_, value) in node.value.items()}
        if node.tag == "seq":
            return [
                self.plain(item, _MAPPING if field.type == "list" else field) for item in node.value
            ]
        return self.plain_scalar(node, field)

    def plain_section(self, node: Node, field: Field) -> dict[str, Any]:
        nodes = {name: value for name, (_, value) in node.value.items() if value.tag != "null"}
        rows = [row for row in SECTIONS[field.of] if row.name not in ("target_groups", "defaults")]
        if field.of == "mapping":
            nodes = {"to": nodes["from"], **self.defaults.nodes, **nodes}
        elif field.of == "config":
            nodes = {"global": Node("map", {}, 0, 0), **nodes}
        elif field.of == "global":
            # Standard input has no state.
            usual = [
                row for row in rows if row.default and (self.base_dir or row.name != "cache_dir")
            ]
            nodes = {row.name: Node("str", row.default, 0, 0) for row in usual} | nodes
        return {row.name: self.plain(nodes[row.name], row) for row in rows if row.name in nodes}

    def plain_scalar(self, node: Node, field: Field) -> Any:
        written = node.value
        text = substitute(node.value, self.environ)
        secret = field.hides(text)
        if not self.show_secrets and (secret or variables(written) & self.secret_names):
            if not secret or field.name != "proxy":
                return masked(written, _MASK if secret else "")
            # Only who uses a proxy is a secret, where that can be told.
            scheme = match[0] if (match := re.match(r"\w+://", written)) else ""
            _, user, host = masked(written, "").rpartition("@")
            return scheme + (f"{_MASK}@{host}" if user else masked(written[len(scheme) :], _MASK))
        value = self.meaning(text, field) if field.type in ("flag", "count", "path") else text
        return value.replace("$", "$$") if isinstance(value, str) else value


def load(
    text: bytes,
    *,
    name: str,
    environ: Mapping[str, str],
    base_dir: str | None,
    home: str | None,
    lint: bool = False,
) -> Config:
    """Read a configuration, which messages call `name`; ConfigError carries every problem, in the
    order of the file. `base_dir` is its absolute directory, None for standard input. `lint` warns
    also of what can hardly be meant."""
    reader = _Reader(name, environ, base_dir, home, lint)
    document = reader.read(text)
    settings = document.values["global"].values if "global" in document.values else {}
    # Standard input has no directory of its own, and no state.
    where = None if base_dir is None else settings.get("cache_dir") or reader.find_path(".regsync")
    return Config(
        registries={k: v for k, v in reader.registries.items() if v is not None},
        mappings=tuple(document.values["mappings"]),
        warnings=tuple(map(str, sorted(reader.warnings, key=lambda problem: problem[1:3]))),
        **{**settings, "cache_dir": where},
    )


def expand(
    text: bytes,
    *,
    name: str,
    environ: Mapping[str, str],
    base_dir: str | None,
    home: str | None,
    show_secrets: bool = False,
) -> str:
    """Return a configuration as YAML that loads again, without variables, groups and `defaults`;
    ConfigError as `load`. Unless shown, secrets stay variables or become asterisks; so does all
    else from variables that give secrets too."""
    reader = _Expansion(name, environ, base_dir, home, lint=False)
    reader.show_secrets = show_secrets
    return dump(reader.plain(reader.read(text).node, _DOCUMENT))


def registry_for(host: str, config: Config | None) -> Registry:
    """Return the first configured registry for `HOST[:PORT]`, PORT being the scheme's own, else an
    unconfigured one.
    """
    try:
        scheme, name, port = parse_registry_url(host)
    except ValueError as error:
        raise ConfigError(f"{host!r}: {error}") from error
    explicit = re.search(r":[0-9]+$", host)
    for registry in config.registries.values() if config is not None else ():
        if registry.host == name and registry.port == (
            port if explicit else DEFAULT_PORTS[registry.scheme]
        ):
            return registry
    return Registry(alias=host, scheme=scheme, host=name, port=port, kind=providers.kind_of(name))
