"""The configuration: YAML bytes and the environment in, frozen values out.

Owns: reading by the table of fields, places of problems, inheritance, building the model.
May not know: files, the process environment, how a value is used.
Invariants: any input gives a `Config`, or a `ConfigError` with every problem; a node that aliases
repeat is read once; no message shows a secret.
Follows: docs/design.md sections 3 and 4.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from _regsync.addresses import is_loopback
from _regsync.config.fields import SECTIONS, Field
from _regsync.config.lint import (
    Doubt,
    doubts_of_age,
    doubts_of_artifacts,
    doubts_of_repositories,
    doubts_of_tags,
    tags_never_old_enough,
    unused_logins,
)
from _regsync.config.model import ArtifactRule, Config, MappingRule, Registry
from _regsync.config.yaml import Node, Unreadable, compose, substitute, variable_names
from _regsync.errors import ConfigError, Problem
from _regsync.oci.reference import LAYOUT_SCHEME
from _regsync.providers import kind_of
from _regsync.tags import TagRule
from _regsync.text import mask_unless_word, printable, strip_userinfo


class _ScalarForm(NamedTuple):
    """How a scalar may be written."""

    tags: tuple[str, ...]
    wanted: str  # what messages ask for


_TEXT = _ScalarForm(("str",), "text")

# By the type of the field; all others are text.
_SCALAR_FORMS = {
    "flag": _ScalarForm(("bool",), "true or false without quotes"),
    "count": _ScalarForm(("int",), "a whole number without quotes"),
    "amount": _ScalarForm(("str", "int", "float"), "text"),
}

# A scalar that is one variable and nothing else: its value may have any type.
_LONE_VARIABLE = r"\$\{[^{}]*\}"

# Fields that stand in no section: the document itself, and the items of lists and named things.
DOCUMENT = Field("", "section", "", section="config")
MAPPING = Field("", "section", "", section="mapping")
REGISTRY = Field("", "section", "", section="registry")
_ALIAS = Field("", "alias", "", if_empty="name at least one registry")

# Values of `auth_type` that need fields of their own.
_LOGINS_WITH_FIELDS = ("basic", "static_token")

# Values of the variable CI outside of CI jobs.
_NOT_SET = ("", "0", "false")

# Characters of a registry's name that a path shows.
_SHOWN_NAME = 64

# Tags that a remedy repeats, and how many of them.
_SHORT_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,23}"
_MAX_NAMES_SHOWN = 3

# Problems after which no similar name is looked for any more.
_MAX_COMPARISONS = 100

# Known names among which a similar one is looked for.
_MAX_COMPARED_NAMES = 500


class ConfigFile(NamedTuple):
    """A configuration as it was written, and what its variables and paths refer to."""

    text: bytes
    name: str  # what messages call it
    environ: Mapping[str, str]
    base_dir: str | None  # its absolute directory; None for standard input
    home: str | None


def load(file: ConfigFile, *, lint: bool = False) -> Config:
    """Read a configuration; `lint` warns also of what can hardly be meant.

    ConfigError carries every problem, in the order of the file.
    """
    reader = Reader(file, lint=lint)
    document = reader.read()

    settings: dict[str, Any] = {}
    if "global" in document.values:
        settings = dict(document.values["global"].values)
    named_dir = settings.pop("cache_dir", None)
    cache_dir = _cache_dir(reader, named_dir)
    # A CI job's checkout is gone with the job, and all that is written beside the file with it.
    is_in_ci = file.environ.get("CI", "") not in _NOT_SET
    will_last = named_dir is not None or not is_in_ci

    return Config(
        registries={alias: entry for alias, entry in reader.registries.items() if entry},
        mappings=tuple(document.values["mappings"]),
        warnings=tuple(str(warning) for warning in _in_file_order(reader.warnings)),
        cache_dir=cache_dir,
        seen_dir=cache_dir if will_last else None,
        **settings,
    )


def _cache_dir(reader: Reader, named_dir: str | None) -> str | None:
    """Return the directory of the state: the named one, or else one beside the configuration.

    None for a configuration from standard input, which is in no directory, unless it names an
    absolute path.
    """
    if reader.file.base_dir is not None:
        return named_dir or reader.absolute_path(".regsync")
    return named_dir if named_dir and _is_absolute(named_dir) else None


def _in_file_order(problems: Iterable[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda problem: (problem.line, problem.column))


def _is_absolute(path: str) -> bool:
    """Return whether a path is absolute, on whatever system."""
    return path.startswith(("/", "\\")) or path[1:3] in (":/", ":\\")


def _example_of_tags(node: Node) -> str:
    """Return how to write a section `tags` for which `node`, one name or a list of names, was written.

    It repeats the names where they are few and short.
    """
    is_list = node.tag == "seq"
    names = node.items if is_list else [node]
    are_short = all(re.fullmatch(_SHORT_TAG, name.text) for name in names)
    if are_short and 0 < len(names) <= _MAX_NAMES_SHOWN:
        # What YAML takes for a number or a truth value, as 1.20 and on, needs quotes to be a name.
        texts = [name.text if name.tag == "str" else f'"{name.text}"' for name in names]
    else:
        texts = ["..."]
    glob = f"[{', '.join(texts)}]" if is_list else texts[0]
    return f"`tags: {{glob: {glob}}}`"


class Section(NamedTuple):
    """The fields of one YAML mapping."""

    node: Node
    path: str
    nodes: dict[str, Node]  # of the fields that are set, by name
    values: dict[str, Any]  # of those of them that are valid

    @property
    def is_valid(self) -> bool:
        return len(self.values) == len(self.nodes)


class Reader:
    """Reads nodes by the table of fields.

    A wrong value is noted as a problem and read as None. Reading goes on, so that one run shows all
    problems; `read` raises them at its end. A method that returns None has noted why.
    """

    def __init__(self, file: ConfigFile, *, lint: bool) -> None:
        self.file = file
        self.lint = lint

        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []

        # What sections have named so far. None stands for one that is wrong: its uses are no further
        # problems.
        self.registries: dict[str, Registry | None] = {}  # by alias
        self.groups: dict[str, tuple[Registry, ...] | None] = {}  # by name
        self.defaults = Section(Node("map", 0, 0), "", {}, {})

        # Variables that are part of a secret somewhere.
        self.secret_variables: set[str] = set()

        # What nodes mean, by the identities of the node and of its field: YAML aliases may repeat one
        # node thousands of times, and it is read once.
        self.values_read: dict[tuple[int, int], object] = {}

    def read(self) -> Section:
        """Read the document, and return it; ConfigError with all problems if there are any."""
        document: Section | None = None
        try:
            root = compose(self.file.text, self.note)
            if root is None or root.tag == "null":
                empty = "the document is empty: `mappings` is required, and may be []"
                raise Unreadable(1, 1, empty)
            document = self.value(root, DOCUMENT, "")
        except Unreadable as error:
            place = Node("", error.line, error.column)
            self.note(place, "", error.message)

        if self.problems or document is None:
            problems = tuple(_in_file_order(self.problems))
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise ConfigError(f"{problems[0]}{more}", problems=problems)
        if self.lint:
            self.warn_of_unused_logins(document)
        return document

    # Problems and warnings.

    def problem(self, node: Node, path: str, message: str) -> Problem:
        """Return a problem that is safe to print."""
        text = printable(strip_userinfo(message))
        return Problem(self.file.name, node.line, node.column, printable(path, 200), text)

    def note(self, node: Node, path: str, message: str) -> None:
        self.problems.append(self.problem(node, path, message))

    def warn(self, node: Node, path: str, message: str) -> None:
        self.warnings.append(self.problem(node, path, message))

    def note_field(self, section: Section, name: str, message: str) -> None:
        self.note(section.nodes[name], f"{section.path}.{name}", message)

    def warn_of_field(self, section: Section, name: str, message: str) -> None:
        self.warn(section.nodes[name], f"{section.path}.{name}", message)

    def warn_of_doubts(self, section: Section, doubts: Iterable[Doubt]) -> None:
        for doubt in doubts:
            self.warn_of_field(section, doubt.field, doubt.message)

    def warn_of_unused_logins(self, document: Section) -> None:
        registries = [known for known in self.registries.values() if known]
        for alias in unused_logins(registries, document.values["mappings"]):
            key = document.nodes["registries"].entries[alias].key
            path = f"registries.{alias[:_SHOWN_NAME]}"
            self.warn(key, path, "its credentials are never used: no mapping names it")

    def did_you_mean(self, text: str, known: list[str]) -> str:
        """Return the end of a message, which asks whether a similar known name was meant; "" where none
        is similar.
        """
        if len(self.problems) > _MAX_COMPARISONS:  # each comparison takes milliseconds
            return ""
        import difflib  # for errors alone

        names = difflib.get_close_matches(text[:64], known[:_MAX_COMPARED_NAMES], n=1)
        return f": did you mean {names[0]!r}?" if names else ""

    # Reading by the type of a field.

    def value(self, node: Node, field: Field, path: str) -> Any:
        """Return what a node means as a field; None where it is wrong. `read_value` is called once for
        each node.
        """
        key = (id(node), id(field))
        if key not in self.values_read:
            self.values_read[key] = self.read_value(node, field, path)
        return self.values_read[key]

    def read_value(self, node: Node, field: Field, path: str) -> Any:
        """Read a node as the type of a field wants it. Registries and groups go into the reader itself,
        where their uses look them up.
        """
        match field.type:
            case "section":
                return self.read_section(node, field.section, path)
            case "list":
                return self.read_mappings(node, path)
            case "names" if field.section == "registry":
                self.read_registries(node, path)
                return None
            case "names":
                self.read_groups(node, path)
                return None
            case "all_or_texts" if node.is_scalar and self.is_all(node):
                return ()  # no filter
            case "texts" | "one_or_texts" | "all_or_texts":
                return self.read_texts(node, field, path)
            case "targets":
                return self.read_targets(node, field, path)
            case _:
                return self.read_scalar(node, field, path)

    def require(self, node: Node, tag: str, path: str, remedy: str = "") -> bool:
        """Return whether a node is the mapping or list that `tag` requires; note if it is not."""
        if node.tag != tag:
            wanted = "a mapping" if tag == "map" else "a list"
            self.note(node, path, f"must be {wanted}, not {node.kind}{remedy}")
        return node.tag == tag

    def is_all(self, node: Node) -> bool:
        """Ask whether a text is the word `all`, as it is or as the value of a variable."""
        try:
            return substitute(node.text, self.file.environ) == "all"
        except ValueError:  # noted when the text is read
            return False

    def read_section(self, node: Node, section_name: str, path: str) -> Any:
        """Read the fields of a section, and return what `build` makes of them."""
        remedy = ""
        if section_name == "tags" and node.tag != "map":
            remedy = f": write {_example_of_tags(node)}"
        if not self.require(node, "map", path, remedy):
            return None

        prefix = f"{path}." if path else ""
        section = Section(node, path, self.present_fields(node, section_name, prefix), {})
        for field in SECTIONS[section_name]:  # the table has names before their uses
            field_node = section.nodes.get(field.name)
            if field_node is None:
                if field.required:
                    self.note(node, f"{prefix}{field.name}", f"required: {field.meaning}")
                continue
            value = self.value(field_node, field, f"{prefix}{field.name}")
            if value is not None:
                section.values[field.name] = value
            if field.needs_one_of and section.nodes.keys().isdisjoint(field.needs_one_of):
                self.note_field(section, field.name, f"needs `{'` or `'.join(field.needs_one_of)}`")
        return self.build(section_name, section)

    def present_fields(self, node: Node, section_name: str, prefix: str) -> dict[str, Node]:
        """Return the nodes of a section's fields, without those that are null, which counts as not
        set; note unknown keys.
        """
        known = [field.name for field in SECTIONS[section_name]]
        nodes: dict[str, Node] = {}
        for name, entry in node.entries.items():
            if section_name == "config" and name.startswith("x-"):
                continue  # a place for anchors, as in compose files
            if name not in known:
                message = f"unknown key{self.did_you_mean(name, known)}"
                self.note(entry.key, f"{prefix}{mask_unless_word(name)}", message)
            elif entry.value.tag != "null":
                nodes[name] = entry.value
        return nodes

    def read_mappings(self, node: Node, path: str) -> list[MappingRule]:
        if not self.require(node, "seq", path):
            return []
        rules: list[MappingRule] = []
        for index, item in enumerate(node.items):
            rule = self.value(item, MAPPING, f"{path}[{index}]")
            if rule is not None:
                # An item that YAML aliases repeat is read once, and stands at several indexes.
                rules.append(rule._replace(index=index))
        return rules

    def read_registries(self, node: Node, path: str) -> None:
        for name, entry in self.named_entries(node, path):
            registry = self.value(entry, REGISTRY, f"{path}.{name[:_SHOWN_NAME]}")
            self.registries[name] = registry and registry._replace(alias=name)

    def read_groups(self, node: Node, path: str) -> None:
        for name, entry in self.named_entries(node, path):
            self.groups[name] = self.read_texts(entry, _ALIAS, f"{path}.{name[:_SHOWN_NAME]}")

    def named_entries(self, node: Node, path: str) -> list[tuple[str, Node]]:
        """Return the entries of a mapping with their names; note each entry without a proper name."""
        if not self.require(node, "map", path):
            return []
        named: list[tuple[str, Node]] = []
        for name, entry in node.entries.items():
            is_proper_name = entry.key.tag == "str" and name and name.isprintable()
            if is_proper_name:
                named.append((name, entry.value))
            else:
                message = f"must be a name, not {entry.key.kind}: put it in quotes"
                self.note(entry.key, f"{path}.{name[:_SHOWN_NAME]}", message)
        return named

    def read_texts(self, node: Node, field: Field, path: str) -> tuple[Any, ...] | None:
        """Return the values of a list, each once. A field of the type `one_or_texts` takes a single
        text for a list of one.
        """
        if field.type == "one_or_texts" and node.tag != "seq":
            value = self.read_scalar(node, field, path)
            return None if value is None else (value,)
        if not self.require(node, "seq", path):
            return None
        may_be_empty = not field.if_empty
        if not node.items and not may_be_empty:
            self.note(node, path, f"the list is empty: {field.if_empty}")
            return None
        values = [
            self.read_scalar(item, field, f"{path}[{index}]")
            for index, item in enumerate(node.items)
        ]
        return None if None in values else tuple(dict.fromkeys(values))

    def read_targets(self, node: Node, field: Field, path: str) -> tuple[Registry, ...] | None:
        """Return the registries of a list of aliases, or of one name of a group or registry."""
        if node.tag == "seq":
            return self.read_texts(node, _ALIAS, path)
        targets: tuple[Registry, ...] | None = self.read_scalar(node, field, path)
        return targets

    def read_scalar(self, node: Node, field: Field, path: str) -> Any:
        """Return what a scalar, with its variables replaced, means as a field."""
        try:
            self.check_form(node, field)
            text = substitute(node.text, self.file.environ)
            if field.is_secret(text):
                self.record_secret(node, path)
            return self.meaning(text, field)
        except ValueError as error:
            self.note(node, path, str(error))
            return None

    def check_form(self, node: Node, field: Field) -> None:
        """Raise ValueError where a node is not of a YAML type in which its field may be written."""
        form = _SCALAR_FORMS.get(field.type, _TEXT)
        is_lone_variable = node.tag == "str" and re.fullmatch(_LONE_VARIABLE, node.text) is not None
        if node.tag in form.tags or is_lone_variable:
            return
        remedy = ""
        if "str" in form.tags and node.is_scalar and node.tag != "null":
            remedy = ": put it in quotes"
        raise ValueError(f"must be {form.wanted}, not {node.kind}{remedy}")

    def record_secret(self, node: Node, path: str) -> None:
        """Remember which variables give a secret; warn of one that stands in the file itself."""
        names = variable_names(node.text)
        self.secret_variables |= names
        if self.lint and not names:
            remedy = "write ${NAME}, and set NAME in the environment"
            self.warn(node, path, f"the secret stands here in plain text: {remedy}")

    def meaning(self, text: str, field: Field) -> Any:
        """Return what a text, in which variables are replaced, means as a field; ValueError says
        what is wrong.
        """
        parsed = field.parse_text(text)
        match field.type:
            case "alias":
                return self.registry_named(parsed)
            case "targets":
                return self.targets_named(parsed)
            case "path":
                return self.absolute_path(parsed)
            case _:
                return parsed

    def targets_named(self, text: str) -> tuple[Registry, ...] | None:
        """Return the registries of a group, or one by its alias; None where they are wrong."""
        if text in self.groups and text in self.registries:
            raise ValueError(
                f"{text!r} is both a group and a registry: rename one, or write a list"
            )
        if text in self.groups:
            return self.groups[text]
        registry = self.registry_named(text)
        return None if registry is None else (registry,)

    def registry_named(self, text: str) -> Registry | None:
        if text in self.registries:
            return self.registries[text]
        if text in self.groups:
            raise ValueError(
                f"{text!r} is a group, which can only be the whole of `targets`: name a registry"
            )
        question = self.did_you_mean(text, [*self.registries, *self.groups])
        raise ValueError(f"no registry or group is named {text!r}{question}")

    def absolute_path(self, text: str) -> str:
        """Return a path with `~` replaced, and absolute where the file has a directory."""
        if text == "~" or text.startswith(("~/", "~\\")):
            home = self.file.home
            if home and home != "~":
                return home + text[1:]
            raise ValueError(
                f"{text!r}: no home directory is known: set HOME, or write the whole path"
            )
        if self.file.base_dir is None or _is_absolute(text):
            return text
        return f"{self.file.base_dir.rstrip('/')}/{text}"

    # Building of sections.

    def build(self, name: str, section: Section) -> Any:
        """Return the value of a section; of most it is the section itself.

        `defaults` go into the reader itself, where each mapping takes them.
        """
        if self.lint and "min_age" in section.values:
            self.warn_of_doubts(section, doubts_of_age(section.values["min_age"]))
        match name:
            case "defaults":
                is_all_platforms = section.values.get("platforms") == ()
                if is_all_platforms:
                    message = (
                        "'all' undoes a default and means nothing in `defaults`: omit the field"
                    )
                    self.note_field(section, "platforms", message)
                self.defaults = section
                return None
            case "registry":
                return self.build_registry(section)
            case "mapping":
                return self.build_mapping(section)
            case "tags":
                return self.build_tags(section)
            case "artifacts":
                return self.build_artifacts(section)
            case _:
                return section

    def build_tags(self, section: Section) -> TagRule:
        rule = TagRule(**section.values)
        if self.lint and section.is_valid:
            self.warn_of_doubts(section, doubts_of_tags(rule))
        return rule

    def build_artifacts(self, section: Section) -> ArtifactRule:
        """Return a rule for artifacts; warn where it leaves them all behind."""
        rule = ArtifactRule(**section.values)
        if not rule.enabled:
            if rule.require_artifacts:
                message = "contradicts `enabled: false`: remove one of them"
                self.note_field(section, "require_artifacts", message)
            message = "is false: signatures and SBOMs are stripped at targets"
            self.warn_of_field(section, "enabled", message)
        if self.lint:
            self.warn_of_doubts(section, doubts_of_artifacts(rule))
        return rule

    def build_registry(self, section: Section) -> Registry | None:
        """Return a registry or an image layout; `read_registries` gives it its alias."""
        self.check_login_fields(section)
        if {"cloud_profile", "aws_profile"} <= section.nodes.keys():
            message = "is the same field as `cloud_profile`: remove one of them"
            self.note_field(section, "aws_profile", message)
        values = dict(section.values)
        if "url" not in values:
            return None
        address = values.pop("url")
        if address.scheme == LAYOUT_SCHEME:
            return self.build_layout(section, address.host)

        if "assume" in section.nodes:
            self.note_field(section, "assume", "is only valid with `url: oci-layout:PATH`")
        if "aws_profile" in values:
            values["cloud_profile"] = values.pop("aws_profile")
        if "credentials" in values:
            values |= values.pop("credentials").values  # user name and password
        auth_type = values.get("auth_type")
        kind = kind_of(address.host, auth_type)
        registry = Registry(alias="", **address._asdict(), kind=kind, **values)

        has_login = auth_type not in (None, "anonymous")
        if registry.scheme == "http" and has_login and not is_loopback(registry.host):
            where = registry.authority
            message = (
                f"credentials are sent unencrypted to {where}: write https:// if it supports that"
            )
            self.warn_of_field(section, "url", message)
        return registry

    def build_layout(self, section: Section, written_path: str) -> Registry | None:
        """Return an image layout as a registry, which has no login, no connection and no rates."""
        for name in section.nodes:
            if name not in ("url", "assume"):
                self.note_field(section, name, "means nothing for an image layout: remove it")
        try:
            path = posixpath.normpath(self.absolute_path(written_path))
            written_receipts = section.values.get("assume", ())
            assume = tuple(self.absolute_path(written) for written in written_receipts)
        except ValueError as error:
            self.note_field(section, "url", str(error))
            return None
        return Registry(
            alias="",
            scheme=LAYOUT_SCHEME,
            host=path,
            port=0,
            kind="unknown",
            written_path=written_path,
            assume=assume,
        )

    def check_login_fields(self, section: Section) -> None:
        """Note the fields that `auth_type` lacks, and those that go with another value of it."""
        auth_type = section.values.get("auth_type")
        is_wrong = "auth_type" in section.nodes and auth_type is None
        if is_wrong:
            return
        for field in SECTIONS["registry"]:
            if not field.auth_type:
                continue  # goes with every login
            is_there = field.name in section.nodes
            is_of_this_login = field.auth_type == auth_type
            if is_there and not is_of_this_login:
                message = f"is only valid with `auth_type: {field.auth_type}`"
                self.note_field(section, field.name, message)
            is_needed = is_of_this_login and auth_type in _LOGINS_WITH_FIELDS
            if is_needed and not is_there:
                self.note_field(section, "auth_type", f"{auth_type} needs `{field.name}`")

    def build_mapping(self, section: Section) -> MappingRule | None:
        """Return a mapping, with what it takes from `defaults`; `read_mappings` gives it its index."""
        values = self.defaults.values | section.values
        for name in ("source", "targets"):
            if name not in section.nodes and name not in self.defaults.nodes:
                self.note(
                    section.node,
                    f"{section.path}.{name}",
                    "is missing: set it here or in `defaults`",
                )
        if not section.is_valid or not {"from", "source", "targets"} <= values.keys():
            return None

        rule = MappingRule(
            index=0,
            source=values["source"],
            source_repository=values["from"],
            targets=values["targets"],
            target_repository=values.get("to", values["from"]),
            tags=values.get("tags", TagRule()),
            platforms=values.get("platforms") or None,
            artifacts=values.get("artifacts", ArtifactRule()),
            min_age=self.min_age_of(section, values),
        )
        if self.lint:
            self.warn_of_doubts(section, doubts_of_repositories(rule))
            for doubt in tags_never_old_enough(rule):
                # The field may stand in `defaults`.
                node = section.nodes.get(doubt.field, section.node)
                self.warn(node, f"{section.path}.{doubt.field}", doubt.message)
        stays_in_registry = any(target.address == rule.source.address for target in rule.targets)
        if stays_in_registry:
            self.check_copy_within_registry(section, rule)
        return rule

    def min_age_of(self, section: Section, values: dict[str, Any]) -> float:
        """Return a mapping's `min_age`; note one whose source is an image layout."""
        age: float = values.get("min_age", 0.0)
        if age and values["source"].is_layout:
            message = "images in an image layout have no age: write `min_age: 0`"
            node = section.nodes.get("min_age", section.node)
            self.note(node, f"{section.path}.min_age", message)
        return age

    def check_copy_within_registry(self, section: Section, rule: MappingRule) -> None:
        """Note the errors of a mapping whose source registry is one of its targets: both ends are
        one repository, or the registry's limit allows one request only.
        """
        source = rule.source
        host = source.authority
        source_key = source.repository_key(rule.source_repository)
        target_key = source.repository_key(rule.target_repository)
        if source_key == target_key:
            name = "to" if "to" in section.nodes else "from"
            message = f"source and target are the same repository of {host}: give another `to`"
            self.note_field(section, name, message)

        # A copy reserves a read slot and a write slot in one step (docs/design.md I8: nothing is
        # held while waiting). In one registry these are two requests at a time, which a limit of 1
        # would never admit. All aliases of this host share the smallest limit.
        aliases = [
            alias for alias in self.registries.values() if alias and alias.address == source.address
        ]
        if any(alias.max_concurrent == 1 for alias in aliases):
            message = (
                f"reads and writes {host} at once, whose max_concurrent is 1: set it to 2 or more"
            )
            self.note(section.node, section.path, message)
