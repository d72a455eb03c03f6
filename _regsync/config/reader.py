"""The configuration reader: turns the bytes of a YAML file into a `Config`.

Owns: the conversion of YAML nodes to values by the table of fields, the line and column of each
problem, inheritance from `defaults`, the construction of the model.
May not know: files, the process environment, how a value is used.
Invariants: any input yields either a `Config` or a `ConfigError` with all problems. A node that YAML
aliases repeat is read once. No message contains a secret.
Follows: docs/design.md sections 3 and 4.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from _regsync.addresses import is_loopback
from _regsync.config.fields import SECTIONS, Field
from _regsync.config.model import ArtifactRule, Config, MappingRule, Registry
from _regsync.config.yaml import DocumentError, Node, compose, substitute, variable_names
from _regsync.errors import ConfigError, Problem
from _regsync.oci import LAYOUT_SCHEME
from _regsync.providers import canonical_host, kind_of
from _regsync.tags import TagRule, literal_tag, select
from _regsync.text import mask_unless_word, printable, strip_userinfo

_T = TypeVar("_T")


class _ScalarForm(NamedTuple):
    """The YAML types in which a scalar field may be written."""

    tags: tuple[str, ...]  # of `Node.tag`
    wanted: str  # the name of the type in error messages


_TEXT = _ScalarForm(("str",), "text")

# By the type of the field. Fields of all other scalar types are written as text.
_SCALAR_FORMS = {
    "flag": _ScalarForm(("bool",), "true or false without quotes"),
    "count": _ScalarForm(("int",), "a whole number without quotes"),
    "amount": _ScalarForm(("str", "int", "float"), "text"),
}

# A scalar that consists of a single variable. The variable's value may be of any type.
_LONE_VARIABLE = r"\$\{[^{}]*\}"

# Fields for nodes that are not a field of any section: the document, an item of `mappings`, an
# entry of `registries`, an item of a list of aliases.
DOCUMENT = Field("", "section", "", section="config")
MAPPING = Field("", "section", "", section="mapping")
REGISTRY = Field("", "section", "", section="registry")
_ALIAS = Field("", "alias", "", if_empty="name at least one registry")

# Values of `auth_type` that require other fields.
_LOGINS_WITH_FIELDS = ("basic", "static_token")

# Values of the environment variable CI that mean that the program does not run in a CI job.
_NOT_IN_CI = ("", "0", "false")

# A path in a message shows at most this many characters of a registry's or group's name.
_MAX_NAME_IN_PATH = 64

# An error message repeats tags only if there are few of them and each matches this pattern.
_SHORT_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,23}"
_MAX_TAGS_SHOWN = 3

# Messages suggest no similar name after this many problems, because each search takes milliseconds.
_MAX_PROBLEMS_WITH_SUGGESTION = 100

# A similar name is searched among this many names at most, and for this many characters of the
# unknown name, because the time of a search grows with both.
_MAX_NAMES_SEARCHED = 500
_MAX_CHARACTERS_SEARCHED = 64

# The state directory if the configuration sets none.
_DEFAULT_CACHE_DIR = ".regsync"


class ConfigFile(NamedTuple):
    """The bytes of a configuration file, and the values that its variables and paths depend on."""

    text: bytes
    name: str  # the file's name in messages
    environ: Mapping[str, str]
    base_dir: str | None  # absolute directory of the file; None for standard input
    home: str | None  # the directory that `~` stands for; None if it is unknown

    def absolute_path(self, path: str) -> str:
        """Replace `~` in a path, and make the path absolute.

        A relative path is relative to the configuration file. It is returned unchanged if the
        configuration comes from standard input. Raises ValueError if the home directory is unknown.
        """
        if path == "~" or path.startswith(("~/", "~\\")):
            # `os.path.expanduser` leaves `~` if there is no home directory.
            if self.home in (None, "", "~"):
                remedy = "set HOME, or write the whole path"
                raise ValueError(f"{path!r}: no home directory is known: {remedy}")
            return f"{self.home}{path[1:]}"
        if self.base_dir is None or _is_absolute(path):
            return path
        return f"{self.base_dir.rstrip('/')}/{path}"


def load(file: ConfigFile) -> Config:
    """Read and validate a configuration.

    Raises ConfigError with all problems, in the order of the file.
    """
    reader = Reader(file)
    document = reader.read_document()

    # The values of `global`. Except for `cache_dir`, they are fields of Config with the same names.
    settings = dict(document.values["global"].values) if "global" in document.values else {}
    configured_dir = settings.pop("cache_dir", None)
    cache_dir = _cache_dir(file, configured_dir)
    # A CI job deletes its checkout, and with it everything that is written beside the file.
    is_in_ci = file.environ.get("CI", "") not in _NOT_IN_CI
    is_persistent = configured_dir is not None or not is_in_ci

    return Config(
        # Since there are no problems, none of these registries is None.
        registries={alias: entry for alias, entry in reader.registries.items() if entry},
        mappings=tuple(document.values["mappings"]),
        warnings=tuple(str(warning) for warning in _in_file_order(reader.diagnostics.warnings)),
        cache_dir=cache_dir,
        seen_dir=cache_dir if is_persistent else None,
        **settings,
    )


def _cache_dir(file: ConfigFile, configured_dir: str | None) -> str | None:
    """Return the state directory: the configured directory, or else a directory beside the file.

    Standard input has no directory. There it is None unless the configured directory is absolute.
    """
    if file.base_dir is not None:
        return configured_dir or file.absolute_path(_DEFAULT_CACHE_DIR)
    is_absolute = configured_dir is not None and _is_absolute(configured_dir)
    return configured_dir if is_absolute else None


def _in_file_order(problems: Iterable[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda problem: (problem.line, problem.column))


def _is_absolute(path: str) -> bool:
    """Report whether a path is absolute on POSIX or on Windows."""
    return path.startswith(("/", "\\")) or path[1:3] in (":/", ":\\")


def _tags_example(node: Node) -> str:
    """Return an example of a `tags` section, for a message about a `node` that is not a mapping.

    If the node is a tag or a short list of tags, the example repeats the tags.
    """
    is_list = node.tag == "seq"
    scalars = node.items if is_list else [node]
    are_short_tags = all(re.fullmatch(_SHORT_TAG, scalar.text) for scalar in scalars)
    if are_short_tags and 0 < len(scalars) <= _MAX_TAGS_SHOWN:
        tags = [_quote_unless_text(scalar) for scalar in scalars]
    else:
        tags = ["..."]
    glob = f"[{', '.join(tags)}]" if is_list else tags[0]
    return f"`tags: {{glob: {glob}}}`"


def _quote_unless_text(scalar: Node) -> str:
    """Quote a tag that YAML reads as a number or as a truth value, such as 1.20 or on."""
    return scalar.text if scalar.tag == "str" else f'"{scalar.text}"'


def _check_form(node: Node, field: Field) -> None:
    """Raise ValueError if a node has a YAML type that its field does not accept."""
    form = _SCALAR_FORMS.get(field.type, _TEXT)
    is_lone_variable = node.tag == "str" and re.fullmatch(_LONE_VARIABLE, node.text) is not None
    if node.tag in form.tags or is_lone_variable:
        return
    accepts_text = "str" in form.tags
    has_text = node.is_scalar and node.tag != "null"
    remedy = ": put it in quotes" if accepts_text and has_text else ""
    raise ValueError(f"must be {form.wanted}, not {node.kind}{remedy}")


def _join_path(path: str, key: str) -> str:
    """Return the path of the value under a key of the mapping at `path`."""
    return f"{path}.{key}" if path else key


class Diagnostics:
    """The problems and warnings of one file, in the order in which they are found."""

    def __init__(self, file_name: str) -> None:
        self.file_name = file_name
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []

    def add_problem(self, node: Node, path: str, message: str) -> None:
        self.problems.append(self._problem_at(node, path, message))

    def add_warning(self, node: Node, path: str, message: str) -> None:
        self.warnings.append(self._problem_at(node, path, message))

    def error(self) -> ConfigError:
        """Return the error for all problems. There must be at least one."""
        problems = tuple(_in_file_order(self.problems))
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return ConfigError(f"{problems[0]}{more}", problems=problems)

    def _problem_at(self, node: Node, path: str, message: str) -> Problem:
        """Return a problem at the place of a node. Its path and message are safe to print."""
        text = printable(strip_userinfo(message))
        return Problem(self.file_name, node.line, node.column, printable(path, 200), text)


class Section(NamedTuple):
    """A YAML mapping whose keys are the fields of one section of the table."""

    node: Node
    path: str  # of keys, for messages; "" for the document
    nodes: dict[str, Node]  # by field name: the fields that are set and not null
    values: dict[str, Any]  # by field name: the converted values of the valid fields
    diagnostics: Diagnostics

    @property
    def is_valid(self) -> bool:
        return len(self.values) == len(self.nodes)

    def add_problem(self, name: str, message: str) -> None:
        """Add a problem of a field. Its place is the section if the field is not set there."""
        node = self.nodes.get(name, self.node)
        self.diagnostics.add_problem(node, _join_path(self.path, name), message)

    def add_warning(self, name: str, message: str) -> None:
        """Add a warning about a field. Its place is the section if the field is not set there."""
        node = self.nodes.get(name, self.node)
        self.diagnostics.add_warning(node, _join_path(self.path, name), message)


class Reader:
    """Converts the nodes of one configuration file to values.

    A method that finds an invalid node adds a problem and returns None. Reading then goes on, so
    that `read_document` can raise one ConfigError with all problems. A node's `path` of keys, such
    as `mappings[0].tags`, is used only in messages.
    """

    def __init__(self, file: ConfigFile) -> None:
        self.file = file
        self.diagnostics = Diagnostics(file.name)

        # The registries by alias and the groups by name that have been read so far. The value of an
        # invalid entry is None, so that a reference to the entry adds no second problem.
        self.registries: dict[str, Registry | None] = {}
        self.groups: dict[str, tuple[Registry, ...] | None] = {}

        # The section `defaults`. Empty if the document has none.
        self.defaults = Section(Node("map", 0, 0), "", {}, {}, self.diagnostics)

        # Names of the environment variables that are used in a secret field.
        self.secret_variables: set[str] = set()

        # The results of `convert`, by id(node) and id(field). YAML aliases may repeat a node
        # thousands of times.
        self.converted: dict[tuple[int, int], object] = {}

    def read_document(self) -> Section:
        """Read the whole document, and return its outermost section, "config".

        Afterwards the reader's fields have the registries, groups and defaults of the document.
        Raises ConfigError with all problems if there are any.
        """
        try:
            root = compose(self.file.text, self.diagnostics.add_problem)
            if root is None or root.tag == "null":
                empty = "the document is empty: `mappings` is required, and may be []"
                raise DocumentError(1, 1, empty)
        except DocumentError as error:
            node = Node("", error.line, error.column)
            self.diagnostics.add_problem(node, "", error.message)
            raise self.diagnostics.error() from None

        document: Section = self.convert(root, DOCUMENT, "")
        if self.diagnostics.problems:
            raise self.diagnostics.error()
        return document

    def suggest_name(self, unknown: str, names: list[str]) -> str:
        """Return ": did you mean 'NAME'?", the end of a message about an unknown name.

        NAME is the most similar of the valid `names`. Returns an empty string if no name is
        similar, or if there are too many problems to search names for each.
        """
        if len(self.diagnostics.problems) > _MAX_PROBLEMS_WITH_SUGGESTION:
            return ""
        import difflib  # needed only for error messages

        similar = difflib.get_close_matches(
            unknown[:_MAX_CHARACTERS_SEARCHED], names[:_MAX_NAMES_SEARCHED], n=1
        )
        return f": did you mean {similar[0]!r}?" if similar else ""

    # Conversion by the type of a field.

    def convert(self, node: Node, field: Field, path: str) -> Any:
        """Return the value of a node for a field, or None if the value is invalid.

        The field's type determines the Python type of the value. Each pair of a node and a field is
        converted once, so that its problems are reported once.
        """
        key = (id(node), id(field))
        if key not in self.converted:
            self.converted[key] = self.convert_once(node, field, path)
        return self.converted[key]

    def convert_once(self, node: Node, field: Field, path: str) -> Any:
        """Convert a node without looking for an earlier result in `converted`."""
        match field.type:
            case "section":
                return self.read_section(node, field.section, path)
            case "list":
                return self.read_mappings(node, path)
            case "names" if field.section == "registry":
                return self.read_registries(node, path)
            case "names":
                return self.read_groups(node, path)
            case "all_or_texts" if node.is_scalar:
                return self.read_all(node, path)
            case "texts" | "one_or_texts" | "all_or_texts":
                return self.read_texts(node, field, path)
            case "targets" if node.tag == "seq":
                return self.read_texts(node, _ALIAS, path)
            case _:
                return self.read_scalar(node, field, path)

    def expect_tag(self, node: Node, tag: str, path: str, remedy: str = "") -> bool:
        """Return True if the node has the tag "map" or "seq" that is expected here.

        Otherwise add a problem, whose message ends in `remedy`, and return False.
        """
        if node.tag == tag:
            return True
        wanted = "a mapping" if tag == "map" else "a list"
        self.diagnostics.add_problem(node, path, f"must be {wanted}, not {node.kind}{remedy}")
        return False

    def read_all(self, node: Node, path: str) -> tuple[Any, ...] | None:
        """Return an empty filter if a scalar is `all` after its variables have been replaced.

        Otherwise add a problem, and return None.
        """
        try:
            if substitute(node.text, self.file.environ) == "all":
                return ()
        except ValueError as error:
            self.diagnostics.add_problem(node, path, str(error))
        else:
            self.expect_tag(node, "seq", path)
        return None

    def read_section(self, node: Node, section_name: str, path: str) -> Any:
        """Read the fields of a section. Returns the value that `build_section` makes of them."""
        remedy = f": write {_tags_example(node)}" if section_name == "tags" else ""
        if not self.expect_tag(node, "map", path, remedy):
            return None

        nodes = self.read_keys(node, section_name, path)
        values: dict[str, Any] = {}
        section = Section(node, path, nodes, values, self.diagnostics)
        # In this order registries and groups are read before the fields that refer to them.
        for field in SECTIONS[section_name]:
            if field.name in nodes:
                value = self.convert(nodes[field.name], field, _join_path(path, field.name))
                if value is not None:
                    values[field.name] = value
            elif field.required:
                section.add_problem(field.name, f"required: {field.meaning}")
        return self.build_section(section_name, section)

    def read_keys(self, node: Node, section_name: str, path: str) -> dict[str, Node]:
        """Return the node of each field that a section sets, by the field's name.

        A field with the value null is omitted because null means that the field is not set. Adds a
        problem for each unknown key.
        """
        field_names = [field.name for field in SECTIONS[section_name]]
        nodes: dict[str, Node] = {}
        for key, entry in node.entries.items():
            is_extension = section_name == "config" and key.startswith("x-")
            if is_extension:
                continue  # reserved for anchors, as in compose files
            if key not in field_names:
                message = f"unknown key{self.suggest_name(key, field_names)}"
                key_path = _join_path(path, mask_unless_word(key))
                self.diagnostics.add_problem(entry.key, key_path, message)
            elif entry.value.tag != "null":
                nodes[key] = entry.value
        return nodes

    def read_mappings(self, node: Node, path: str) -> list[MappingRule]:
        if not self.expect_tag(node, "seq", path):
            return []
        rules: list[MappingRule] = []
        for index, item in enumerate(node.items):
            rule = self.convert(item, MAPPING, f"{path}[{index}]")
            if rule is not None:
                # If a YAML alias repeats an item, `convert` returns the same rule for each index.
                rules.append(rule._replace(index=index))
        return rules

    def read_registries(self, node: Node, path: str) -> dict[str, Registry | None]:
        for name, value_node, value_path in self.read_names(node, path):
            registry = self.convert(value_node, REGISTRY, value_path)
            self.registries[name] = None if registry is None else registry._replace(alias=name)
        return self.registries

    def read_groups(self, node: Node, path: str) -> dict[str, tuple[Registry, ...] | None]:
        for name, value_node, value_path in self.read_names(node, path):
            self.groups[name] = self.read_texts(value_node, _ALIAS, value_path)
        return self.groups

    def read_names(self, node: Node, path: str) -> list[tuple[str, Node, str]]:
        """Return each key of `registries` or `target_groups` with its value's node and path.

        Adds a problem for each key that is not a valid name.
        """
        if not self.expect_tag(node, "map", path):
            return []
        names: list[tuple[str, Node, str]] = []
        for name, (key, value) in node.entries.items():
            value_path = f"{path}.{name[:_MAX_NAME_IN_PATH]}"
            if key.tag == "str" and name != "" and name.isprintable():
                names.append((name, value, value_path))
            else:
                message = f"must be a name, not {key.kind}: put it in quotes"
                self.diagnostics.add_problem(key, value_path, message)
        return names

    def read_texts(self, node: Node, field: Field, path: str) -> tuple[Any, ...] | None:
        """Return the values of a list without duplicates.

        For a field of the type `one_or_texts` the node may also be a single scalar. Returns None if
        the node is not a list, if any value is invalid, or if the list is empty although
        `field.if_empty` is set.
        """
        if field.type == "one_or_texts" and node.tag != "seq":
            value = self.read_scalar(node, field, path)
            return None if value is None else (value,)
        if not self.expect_tag(node, "seq", path):
            return None
        if field.if_empty and not node.items:
            self.diagnostics.add_problem(node, path, f"the list is empty: {field.if_empty}")
            return None
        values = [
            self.read_scalar(item, field, f"{path}[{index}]")
            for index, item in enumerate(node.items)
        ]
        return None if None in values else tuple(dict.fromkeys(values))

    def read_scalar(self, node: Node, field: Field, path: str) -> Any:
        """Return the value of a scalar, after its variables have been replaced.

        Records the variables of a secret. Returns None if the scalar is invalid, or if it refers to
        an invalid registry or group.
        """
        try:
            _check_form(node, field)
            text = substitute(node.text, self.file.environ)
            if field.is_secret(text):
                self.secret_variables |= variable_names(node.text)
            return self.parse_text(text, field)
        except ValueError as error:
            self.diagnostics.add_problem(node, path, str(error))
            return None

    def parse_text(self, text: str, field: Field) -> Any:
        """Return the value of a scalar's text. All variables in the text must have been replaced.

        Aliases become registries, and paths become absolute. Raises ValueError if the text is
        invalid. Returns None if the text names a registry or group whose own definition is invalid.
        """
        parsed = field.parse_text(text)
        match field.type:
            case "alias":
                return self.find_registry(parsed)
            case "targets":
                return self.find_targets(parsed)
            case "path":
                return self.file.absolute_path(parsed)
            case _:
                return parsed

    def find_targets(self, name: str) -> tuple[Registry, ...] | None:
        """Return the registries of the group `name`, or the one registry whose alias is `name`.

        Returns None if the group or registry is defined but invalid. Raises ValueError if there is
        neither a group nor a registry of this name, or if there are both.
        """
        if name in self.groups and name in self.registries:
            raise ValueError(
                f"{name!r} is both a group and a registry: rename one, or write a list"
            )
        if name in self.groups:
            return self.groups[name]
        registry = self.find_registry(name)
        return None if registry is None else (registry,)

    def find_registry(self, alias: str) -> Registry | None:
        """Return the registry with an alias.

        Returns None if the registry is defined but invalid. Raises ValueError if the alias is
        unknown.
        """
        if alias in self.registries:
            return self.registries[alias]
        if alias in self.groups:
            raise ValueError(
                f"{alias!r} is a group, which can only be the whole of `targets`: name a registry"
            )
        suggestion = self.suggest_name(alias, [*self.registries, *self.groups])
        raise ValueError(f"no registry or group is named {alias!r}{suggestion}")

    def build_section(self, name: str, section: Section) -> Any:
        """Return the record of the model for a section, or the section if the model has no record.

        Returns None for an invalid registry or mapping.
        """
        match name:
            case "registry":
                return _build_registry(section, self.file)
            case "mapping":
                return self.build_mapping(section)
            case "tags":
                return _build_tags(section)
            case "artifacts":
                return _build_artifacts(section)
            case "defaults":
                self.store_defaults(section)
        return section

    def store_defaults(self, section: Section) -> None:
        """Store `defaults` for `build_mapping`. Adds a problem if they contain `platforms: all`."""
        if section.values.get("platforms") == ():
            message = "'all' undoes a default and means nothing in `defaults`: omit the field"
            section.add_problem("platforms", message)
        self.defaults = section

    def build_mapping(self, section: Section) -> MappingRule | None:
        """Return a mapping with the values that it inherits from `defaults`.

        Returns None if a field is invalid or missing. `read_mappings` sets the index.
        """
        for name in ("source", "targets"):
            if name not in section.nodes and name not in self.defaults.nodes:
                section.add_problem(name, "is missing: set it here or in `defaults`")
        values = self.defaults.values | section.values
        # An inherited value may be missing because `defaults` has an invalid value.
        has_required_values = {"from", "source", "targets"} <= values.keys()
        if not section.is_valid or not has_required_values:
            return None

        rule = MappingRule(
            index=0,
            source=values["source"],
            source_repository=values["from"],
            targets=values["targets"],
            target_repository=values.get("to", values["from"]),
            tags=values.get("tags", TagRule()),
            platforms=values.get("platforms") or None,  # `all` is an empty tuple
            artifacts=values.get("artifacts", ArtifactRule()),
            min_age=values.get("min_age", 0.0),
        )
        first, _, rest = rule.source_repository.partition("/")
        # A name without a dot, such as `harbor`, may also be the name of a team.
        if "." in first and rest and canonical_host(first) == rule.source.host:
            trouble = "begins with the registry's own host, which does not belong here"
            section.add_warning("from", f"{rule.source_repository!r} {trouble}: write {rest!r}")
        if rule.min_age and rule.source.is_layout:
            message = "images in an image layout have no age: write `min_age: 0`"
            section.add_problem("min_age", message)
        if any(target.address == rule.source.address for target in rule.targets):
            self.check_copy_within_registry(section, rule)
        return rule

    def check_copy_within_registry(self, section: Section, rule: MappingRule) -> None:
        """Check a mapping whose source registry is also one of its target registries.

        Adds a problem if source and target are the same repository, and a problem if the registry's
        limit allows only one request at a time.
        """
        source = rule.source
        host = source.authority
        source_key = source.repository_key(rule.source_repository)
        target_key = source.repository_key(rule.target_repository)
        if source_key == target_key:
            name = "to" if "to" in section.nodes else "from"
            message = f"source and target are the same repository of {host}: give another `to`"
            section.add_problem(name, message)

        # A copy reserves a read slot and a write slot in one step (docs/design.md I8). If both
        # slots belong to the same registry, a limit of 1 would never admit the copy. All aliases of
        # a host share the smallest of their limits.
        limits = [
            registry.max_concurrent
            for registry in self.registries.values()
            if registry is not None and registry.address == source.address
        ]
        if 1 in limits:
            message = (
                f"reads and writes {host} at once, whose max_concurrent is 1: set it to 2 or more"
            )
            self.diagnostics.add_problem(section.node, section.path, message)


# Construction of the model.


def _build_tags(section: Section) -> TagRule:
    if "latest" in section.nodes and section.nodes.keys().isdisjoint({"sort", "semver"}):
        section.add_problem("latest", "needs `sort` or `semver`")
    rule = TagRule(**section.values)
    literal_tags = [tag for tag in map(literal_tag, rule.glob) if tag is not None]
    for tag in select(literal_tags, TagRule(glob=rule.glob, exclude=rule.exclude)).dropped:
        section.add_warning("glob", f"{tag!r} is never copied: the exclude rule drops it")
    return rule


def _build_artifacts(section: Section) -> ArtifactRule:
    """Return the rule for artifacts.

    If the rule copies no artifacts, adds a warning, and a problem if it also requires artifacts.
    """
    rule = ArtifactRule(**section.values)
    if not rule.enabled:
        if rule.require_artifacts:
            message = "contradicts `enabled: false`: remove one of them"
            section.add_problem("require_artifacts", message)
        section.add_warning("enabled", "is false: signatures and SBOMs are stripped at targets")
    return rule


def _build_registry(section: Section, file: ConfigFile) -> Registry | None:
    """Return a registry or an image layout without its alias, which `read_registries` sets.

    Returns None if `url` is missing or invalid.
    """
    if "client_key" in section.nodes and "client_cert" not in section.nodes:
        section.add_problem("client_key", "needs `client_cert`")
    _check_login_fields(section)
    if {"cloud_profile", "aws_profile"} <= section.nodes.keys():
        message = "is the same field as `cloud_profile`: remove one of them"
        section.add_problem("aws_profile", message)
    if "url" not in section.values:
        return None
    address = section.values["url"]
    if address.scheme == LAYOUT_SCHEME:
        return _build_layout(section, file, written_path=address.host)

    if "assume" in section.nodes:
        section.add_problem("assume", "is only valid with `url: oci-layout:PATH`")
    # The arguments of Registry have the names of the section's fields, except for these three.
    values = dict(section.values)
    del values["url"]
    if "aws_profile" in values:
        values["cloud_profile"] = values.pop("aws_profile")
    if "credentials" in values:
        values |= values.pop("credentials").values  # user name and password
    kind = kind_of(address.host, values.get("auth_type"))
    registry = Registry(alias="", **address._asdict(), kind=kind, **values)

    has_login = registry.auth_type not in (None, "anonymous")
    if registry.scheme == "http" and has_login and not is_loopback(registry.host):
        trouble = f"credentials are sent unencrypted to {registry.authority}"
        section.add_warning("url", f"{trouble}: write https:// if it supports that")
    return registry


def _check_login_fields(section: Section) -> None:
    """Add a problem for each field that `auth_type` requires or does not allow."""
    auth_type = section.values.get("auth_type")
    if "auth_type" in section.nodes and auth_type is None:
        return  # it is invalid
    for field in SECTIONS["registry"]:
        if not field.auth_type:
            continue  # allowed with every `auth_type`
        is_set = field.name in section.nodes
        if field.auth_type != auth_type:
            if is_set:
                message = f"is only valid with `auth_type: {field.auth_type}`"
                section.add_problem(field.name, message)
        elif auth_type in _LOGINS_WITH_FIELDS and not is_set:
            section.add_problem("auth_type", f"{auth_type} needs `{field.name}`")


def _build_layout(section: Section, file: ConfigFile, *, written_path: str) -> Registry | None:
    """Return an image layout without its alias.

    Adds a problem for each field that does not apply to a layout, and for each path that begins
    with `~` if the home directory is unknown. Returns None if that is the path of the layout.
    """
    for name in section.nodes:
        if name not in ("url", "assume"):
            section.add_problem(name, "means nothing for an image layout: remove it")
    assume: tuple[str, ...] = ()
    try:
        assume = tuple(map(file.absolute_path, section.values.get("assume", ())))
    except ValueError as error:
        section.add_problem("assume", str(error))
    try:
        path = posixpath.normpath(file.absolute_path(written_path))
    except ValueError as error:
        section.add_problem("url", str(error))
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
