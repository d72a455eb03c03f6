"""The configuration: YAML bytes and the environment in, frozen values out. Owns: reading by the
table of fields, places of problems, inheritance, the model, what may be shown of it, doubts. May
not know: files, the process environment, how a value is used. Invariant: any input gives a `Config`
or a `ConfigError` with every problem, aliases are read once, no message shows a secret; a doubt
speaks only where no registry's content could prove it wrong, but for tags that move by custom and
ranges without an end. Follows docs/design.md sections 3 and 4."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from _regsync.addresses import is_loopback
from _regsync.config.fields import SECTIONS, Field
from _regsync.config.lint import _doubts_of, _leaves_nothing
from _regsync.config.model import ArtifactRule, Config, MappingRule, Registry
from _regsync.config.yaml import Node, Unreadable, compose, dump, masked, substitute, variables
from _regsync.errors import ConfigError, Problem
from _regsync.providers import kind_of
from _regsync.tags import TagRule
from _regsync.text import clean, plain, without_logins

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
        found = Registry("", scheme, host, port, kind_of(host, auth), **values)
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
        # A copy needs a reading and a writing request there at a time (docs/design.md I8).
        if any(
            one.max_concurrent == 1
            for one in self.registries.values()
            if one and one.origin == source.origin
        ):
            message = f"reads and writes {where}, whose max_concurrent is 1: allow 2 at least"
            self.note(section.node, section.path, message)
        return rule


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
