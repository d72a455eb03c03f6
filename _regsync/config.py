"""The configuration: a YAML file becomes immutable records, or one error with all its problems.

`DOCUMENT`, at the end, is the table of all keys: for each the function that reads it. `Reader` walks
the nodes of the YAML document by that table. Then the functions that build records check what
concerns several keys.

Owns: the records that the rest of the program works with, the grammars of their values, the places of
problems, environment variables in values, what an expanded configuration may show.
May not know: files, the process environment (but for what `~` is), how a value is used.
Invariants: any input yields either a `Config` or a `ConfigError` with all problems. A node that YAML
aliases repeat is read once. The value of a variable never changes the document's structure. No
message contains a secret.
Follows: docs/design.md sections 3 and 4. config.schema.json tells editors the same, and
tests/unit/test_schema.py holds it against the table.
"""

from __future__ import annotations

import ipaddress
import json
import os
import posixpath
import re
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from _regsync.addresses import DEFAULT_PORTS, format_authority, is_loopback
from _regsync.errors import ConfigError, Problem
from _regsync.net.proxies import proxy_for
from _regsync.oci import LAYOUT_SCHEME, Platform, full_name, is_repository, parse_platform
from _regsync.providers import Kind, api_repository, canonical_host, kind_of
from _regsync.tags import TagRule, compile_glob, literal_tag, parse_range, select
from _regsync.text import json_text, keep_secret, mask_unless_word, printable, strip_userinfo

# Records.


# As `from` of a mapping, stands for all repositories of an image layout.
ALL_REPOSITORIES = "*"


class Registry(NamedTuple):
    """One entry of `registries`: a registry or an image layout."""

    alias: str
    scheme: Literal["https", "http", "oci-layout"]
    # Without brackets. All names of Docker Hub are replaced by the canonical name. Of an image
    # layout: the absolute path of its directory.
    host: str
    port: int  # 0 of an image layout
    kind: Kind
    auth_type: str | None = None  # None: credentials are used if any are found
    username: str | None = None
    password: str | None = None
    token: str | None = None
    cloud_profile: str | None = None  # of AWS
    head_first: bool = False  # whether tags of a source are compared by HEAD before any GET
    max_concurrent: int | None = None  # requests at the same time; None: the default
    ca_file: str | None = None  # absolute path, like the next two
    client_cert: str | None = None
    client_key: str | None = None
    proxy: str | None = None  # URL; None: the proxy follows from the environment
    written_path: str = ""  # of an image layout: the path as written in the configuration
    # Paths of receipts. The far side of this layout is assumed to have their blobs.
    assume: tuple[str, ...] = ()

    @property
    def is_layout(self) -> bool:
        """Whether this is a directory of images and not a registry on the network."""
        return self.scheme == LAYOUT_SCHEME

    def repository_key(self, repository: str) -> object:
        """Return a key that is equal for all names of the same repository."""
        return self.address, api_repository(self.host, repository)

    def name_of(self, repository: str) -> str:
        """Return the full name of a repository in reports."""
        return full_name(self.authority, repository)

    def lock_name(self, repository: str) -> str:
        """Return the full name of a repository in a lock file.

        For an image layout it contains the path as written in the configuration, so that the name
        is the same on every machine.
        """
        authority = self.authority
        if self.is_layout and self.written_path:
            authority = f"{LAYOUT_SCHEME}:{self.written_path}"
        return full_name(authority, api_repository(self.host, repository))

    def __repr__(self) -> str:
        # Without the password and token, which the default __repr__ would show.
        scheme = "" if self.is_layout else f"{self.scheme}://"
        return f"<Registry {self.alias}: {scheme}{self.authority}>"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port. Aliases with the same address share their limits and their state."""
        return self.host, self.port

    @property
    def authority(self) -> str:
        """`host` or `host:port`; of an image layout `oci-layout:PATH`.

        Reports contain this form.
        """
        if self.is_layout:
            return f"{LAYOUT_SCHEME}:{self.host}"
        return format_authority(self.scheme, self.host, self.port)


class ArtifactRule(NamedTuple):
    """The rule that selects the artifacts to copy with an image."""

    enabled: bool = True
    include: tuple[str, ...] = ()  # artifact types; () includes every type
    exclude: tuple[str, ...] = ()  # artifact types
    require_artifacts: bool = False


class MappingRule(NamedTuple):
    """One entry of `mappings` after inheritance."""

    index: int  # type: ignore[assignment]  # position in the file, from 0; hides tuple.index
    source: Registry
    source_repository: str
    targets: tuple[Registry, ...]
    target_repository: str
    tags: TagRule
    platforms: tuple[Platform, ...] | None  # None: all platforms
    artifacts: ArtifactRule
    # Seconds. A digest is copied only if it was first seen at least this long ago.
    min_age: float = 0.0

    @property
    def source_key(self) -> object:
        """A key for the source repository and the platforms.

        Mappings with equal keys copy a tag as the same manifest, so they can share target tags.
        """
        platforms = self.platforms and frozenset(self.platforms)
        return self.source.repository_key(self.source_repository), platforms

    @property
    def target_keys(self) -> list[object]:
        """The keys of the target repositories, in the order of `targets`."""
        return [target.repository_key(self.target_repository) for target in self.targets]


class Config(NamedTuple):
    """A valid configuration."""

    registries: Mapping[str, Registry]  # by alias
    mappings: tuple[MappingRule, ...]
    max_concurrent_transfers: int = 50
    cache_dir: str | None = None  # directory of the state; None: no state is kept
    cache_ttl: float = 12 * 3600.0  # seconds; 0: entries never expire
    staging_size_limit: int | None = None  # bytes; None: no limit
    warnings: tuple[str, ...] = ()

    @property
    def registries_in_use(self) -> tuple[Registry, ...]:
        """The registries that mappings refer to, in the order of their first use, without
        duplicates.
        """
        ends = [registry for rule in self.mappings for registry in (rule.source, *rule.targets)]
        return tuple(dict.fromkeys(ends))

    @property
    def has_ages(self) -> bool:
        """Whether a mapping has `min_age`."""
        return any(rule.min_age for rule in self.mappings)


def registry_for(written: str, config: Config) -> Registry:
    """Return the first configured registry with the address `written`.

    The address is `[SCHEME://]HOST[:PORT]` or `oci-layout:PATH`. Returns a registry with default
    settings if no configured registry has the address. Raises ConfigError if the address is
    invalid, or if its scheme differs from the scheme of the configured registry.
    """
    try:
        address = parse_registry_url(written)
    except ValueError as error:
        raise ConfigError(f"{written!r}: {error}") from error
    named = Registry(alias=written, **address._asdict(), kind=kind_of(address.host))
    for alias, registry in config.registries.items():
        # A host alone is that of any scheme, at the default port of that.
        is_host_alone = not re.search("://|:[0-9]+$", written)
        differs = attrgetter("authority" if is_host_alone else "address")
        if differs(registry) != differs(named):
            continue
        if "://" in written and registry.scheme != named.scheme:
            raise ConfigError(
                f"{written!r}: the configuration says {registry.scheme}:// for registry {alias!r}",
                hint="leave the scheme out here, or change it there",
            )
        return registry
    return named


# Values. Each function returns the value of a text, or raises ValueError with a remedy.

# The number of seconds in each unit of a duration.
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

# The exponent of 1000 or 1024 for each prefix of a size.
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}

_TRUTH_VALUES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}

# Characters of a registry's address. A host name has 253 at most.
_MAX_URL = 300

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_URL = (
    r"(?:(?P<scheme>(?i:https?))://)?"
    rf"(?P<host>\[[0-9A-Fa-f:.]+\]|{_LABEL}(?:\.{_LABEL})*)"
    r"(?::(?P<port>[0-9]{1,5}))?"
)


def parse_duration(text: str) -> float:
    """Parse a duration such as 90 or 1h30m. Returns seconds."""
    if not re.fullmatch("[0-9]{1,9}|(?:[0-9]{1,9}[smhd])+", text):
        raise ValueError(
            f"{text!r} is not a duration: write 0, seconds (90), or numbers with s, m, h, d (1h30m)"
        )
    numbers_with_units = re.findall(r"([0-9]+)([smhd]?)", text)
    return float(sum(int(number) * _SECONDS[unit] for number, unit in numbers_with_units))


def parse_size(text: str) -> int:
    """Parse a size such as 20 GB. Returns bytes."""
    match = re.fullmatch(r"0|([0-9]{1,15}(?:\.[0-9]{1,15})?) *([kmgt]i?|)b", text.strip().lower())
    if match is None:
        raise ValueError(
            f"{text!r} is not a size: write 0, or a number with B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
        )
    number, prefix = match.groups("")  # such as "31.5" and "mi"; both are empty for the text 0
    base = 1024 if prefix.endswith("i") else 1000
    bytes_in_unit: int = base ** _POWERS[prefix[:1]]
    return round(float(number or 0) * bytes_in_unit)


def parse_flag(text: str) -> bool:
    if text.lower() not in _TRUTH_VALUES:
        raise ValueError("must be true or false")
    return _TRUTH_VALUES[text.lower()]


def parse_count(text: str, minimum: int = 0) -> int:
    if not re.fullmatch("0|[1-9][0-9]{0,8}", text) or int(text) < minimum:
        raise ValueError(f"must be a whole number from {minimum} to 999999999")
    return int(text)


def parse_positive(text: str) -> int:
    return parse_count(text, minimum=1)


class RegistryAddress(NamedTuple):
    """The address of a registry or of an image layout."""

    scheme: Literal["https", "http", "oci-layout"]
    host: str  # canonical, without brackets; of an image layout: the path of its directory
    port: int  # 0 of an image layout


def parse_registry_url(text: str) -> RegistryAddress:
    """Parse `[SCHEME://]HOST[:PORT]` or `oci-layout:PATH`."""
    if text.startswith(f"{LAYOUT_SCHEME}:"):
        directory = text.partition(":")[2]
        if not directory or "//" in directory:  # `//` separates a path from a repository
            raise ValueError(f"{text!r} names no directory: write oci-layout:PATH")
        return RegistryAddress(LAYOUT_SCHEME, directory, 0)

    if "@" in text:
        # The message does not show the text, because the part before the @ is a secret.
        raise ValueError("a user or password cannot stand here: use auth_type and credentials")
    without_query = text.partition("?")[0]  # a query may hold a secret
    problem = ValueError(
        f"{without_query!r} is not a registry address: write HOST, HOST:PORT, [IPV6]:PORT or"
        " http://HOST, and nothing behind it, or oci-layout:PATH"
    )
    match = re.fullmatch(_URL, text) if len(text) <= _MAX_URL else None
    if match is None:
        raise problem
    host = match["host"]
    if host.startswith("["):
        try:
            host = ipaddress.IPv6Address(host[1:-1]).compressed
        except ValueError:
            raise problem from None
    host = canonical_host(host)
    # Without a scheme, loopback addresses use plain HTTP, as in other container clients.
    written_scheme = (match["scheme"] or "").lower()
    is_plain = written_scheme == "http" or (not written_scheme and is_loopback(host))
    scheme: Literal["https", "http"] = "http" if is_plain else "https"
    port = int(match["port"] or DEFAULT_PORTS[scheme])
    if not 0 < port < 65536:
        raise problem
    return RegistryAddress(scheme, host, port)


def parse_repository(text: str) -> str:
    """Return the text if it is the name of a repository."""
    if not is_repository(text):
        raise ValueError(
            f"{text!r} is not a repository: write a path in lower case such as team/app, without a"
            " host, tag or digest (tags stand under `tags`; `regsync copy` copies a digest)"
        )
    return text


def parse_source_repository(text: str) -> str:
    """Return the text if it is the name of a repository, or stands for all of an image layout."""
    return text if text == ALL_REPOSITORIES else parse_repository(text)


def parse_proxy(text: str) -> str:
    try:
        proxy_for("https", "registry", 443, {}, text)
    except ConfigError as error:
        raise ValueError(f"{error.message}: {error.hint}") from None
    return text


def parse_token(text: str) -> str:
    if re.search("[^!-~]", text):
        raise ValueError("has a blank or a character outside ASCII, which a token cannot have")
    return text


def parse_username(text: str) -> str:
    if ":" in text:
        raise ValueError("has a colon, which HTTP Basic cannot carry in a user name")
    return text


def parse_pattern(text: str) -> str:
    compile_glob(text)
    return text


def parse_version_range(text: str) -> str:
    parse_range(text)
    return text


def parse_artifact_type(text: str) -> str:
    if "*" in text:  # no type has one, and a filter that nothing passes strips all signatures
        raise ValueError(f"{text!r} is not an artifact type: write it whole, without patterns")
    return text


def parse_listed_platform(text: str) -> Platform:
    if text == "all":
        raise ValueError("'all' is not a platform: omit the field to copy every platform")
    return parse_platform(text)


# Environment variables in values.

# Either `$$`, or `${NAME}` with an optional operator and its argument. If a `${` is malformed, only
# the two characters `${` match, and `name` is None. Matching takes linear time.
_VARIABLE = (
    r"\$\$"
    r"|\$\{(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"(?::(?P<operator>[-?])(?P<argument>(?:[^$}]|\$(?!\{))*))?\})?"
)


def substitute(text: str, environ: Mapping[str, str]) -> str:
    """Replace each variable in a text by its value. Variables inside a value are not replaced.

    Raises ValueError if a variable is malformed or has no value.
    """

    def value_of(variable: re.Match[str]) -> str:
        if variable[0] == "$$":
            return "$"
        name, operator, argument = variable.group("name", "operator", "argument")
        if name is None:
            forms = "${NAME}, ${NAME:-default} or ${NAME:?message}"
            raise ValueError(f"malformed '${{': write {forms}, not nested, and $$ for a single $")

        # As in a shell, the operators `:-` and `:?` treat an empty variable as not set.
        value = environ.get(name)
        if operator == "-":
            return value or argument.replace("$$", "$")
        if value is None or (operator == "?" and not value):
            remedy = argument or "set it, or give a default"
            raise ValueError(f"environment variable {name} is not set: {remedy}")
        return value

    return re.sub(_VARIABLE, value_of, text)


# Reading.

Node = Any  # a node of PyYAML; an alias is the same object as its anchor
Entries = dict[str, tuple[Node, Node]]  # the keys and values of a mapping, by the key's text

# The kinds of nodes in messages. A scalar is its text, as it was written: 1.20 has two decimals.
_KINDS = {
    "mapping": "a mapping",
    "sequence": "a list",
    "scalar": "text",
    "null": "empty",
    "!": "something with a YAML tag of its own",
}

# The tag that PyYAML gives to a node without a tag of its own.
_PLAIN_TAGS = {"mapping": "map", "sequence": "seq", "scalar": "str"}

# A scalar that is written so, and without quotes, is no value.
_NO_VALUES = ("", "~", "null", "Null", "NULL")

_IN_FILE_ORDER = attrgetter("line", "column")  # a key for sorting problems


class ConfigFile(NamedTuple):
    """The bytes of a configuration file, and the values that its variables and paths depend on."""

    text: bytes
    name: str  # the file's name in messages
    environ: Mapping[str, str]
    base_dir: str  # absolute directory of the file; "" for standard input

    def absolute_path(self, path: str) -> str:
        """Replace `~` in a path, and make the path absolute.

        A relative path is relative to the configuration file. It stays relative if the
        configuration comes from standard input.
        """
        return os.path.join(self.base_dir, os.path.expanduser(path))


class Section(NamedTuple):
    """A YAML mapping whose keys are those of one section of the table."""

    reader: Reader
    node: Node
    path: str  # of keys, for messages; "" for the document
    nodes: dict[str, Node]  # by key: the values that are set and not null
    values: dict[str, Any]  # by key: the valid ones of these, as they were read

    def add_problem(self, key: str, message: str) -> None:
        """Add a problem of a key."""
        self.reader.problems.append(self._problem(key, message))

    def add_warning(self, key: str, message: str) -> None:
        """Add a warning about a key."""
        self.reader.warnings.append(self._problem(key, message))

    def _problem(self, key: str, message: str) -> Problem:
        # Its place is the section if the key is not set there.
        place = _place_of(self.nodes.get(key, self.node))
        return self.reader.problem_at(place, _join_path(self.path, key), message)


class Reader:
    """Reads the nodes of one configuration file by the table of keys.

    `read` returns the value of a node. If the node is invalid, it adds a problem and returns None.
    Reading then goes on, so that `read_document` can raise one ConfigError with all problems. A
    node's `path` of keys, such as `mappings[0].tags`, is used only in messages.
    """

    def __init__(self, file: ConfigFile) -> None:
        self.file = file
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []

        # The registries by alias and the groups by name that have been read so far. The value of an
        # invalid entry is None, so that a reference to the entry adds no second problem.
        self.registries: dict[str, Registry | None] = {}
        self.groups: dict[str, tuple[Registry, ...] | None] = {}

        # What `defaults` sets: mappings have these nodes too. Each is read once, whoever has it.
        self.default_nodes: dict[str, Node] = {}

        # The results of `read` by id(node) and id(field), and of `entries_of` by id(node). YAML
        # aliases may repeat a node thousands of times.
        self.results: dict[tuple[int, int], object] = {}
        self.entries: dict[int, Entries] = {}

    def read_document(self) -> dict[str, Any]:
        """Read the whole document. Returns its values by key.

        Afterwards the reader has its registries, groups and defaults. Raises ConfigError with all
        problems if there are any.
        """
        root = self.compose()
        document: dict[str, Any] | None = None
        try:
            document = self.read(root, DOCUMENT, "")
        except RecursionError:  # a long chain of `<<`
            self.add_problem(root, "", "nested too deep")
        if self.problems or document is None:
            raise self.error()
        return document

    def compose(self) -> Node:
        """Return the root node of the document. Raises ConfigError if the file is not YAML."""
        import yaml

        place = (1, 1)
        try:
            root = yaml.BaseLoader(self.file.text).get_single_node()  # takes each scalar as text
        # PyYAML does not catch the errors of chr() and int() for "\UFFFFFFFF" or for a %YAML
        # version with very many digits.
        except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
            problem = getattr(error, "problem", None) or error
            if isinstance(error, yaml.composer.ComposerError) or "tag handle" in str(problem):
                # PyYAML's own message repeats a name that may be a password with a `*`, `&` or `!`.
                problem = (
                    "a second document, an unknown tag (!), or an anchor (&) that is missing or not the"
                    " only one: quote text that begins with *, & or !"
                )
            message = f"malformed YAML: {problem}"
            mark = getattr(error, "problem_mark", None)
            place = (mark.line + 1, mark.column + 1) if mark else place
        else:
            if root is not None and _kind_of(root) != "null":
                return root
            message = "the document is empty: `mappings` is required, and may be []"
        self.problems.append(self.problem_at(place, "", message))
        raise self.error()

    def error(self) -> ConfigError:
        """Return the error for all problems. There must be at least one."""
        problems = tuple(sorted(self.problems, key=_IN_FILE_ORDER))
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return ConfigError(f"{problems[0]}{more}", problems=problems)

    def add_problem(self, node: Node, path: str, message: str) -> None:
        self.problems.append(self.problem_at(_place_of(node), path, message))

    def problem_at(self, place: tuple[int, int], path: str, message: str) -> Problem:
        """Return a problem at a line and column. Its path and message are safe to print."""
        text = printable(strip_userinfo(message))
        return Problem(self.file.name, *place, printable(path, 200), text)

    def read(self, node: Node, field: Field, path: str) -> Any:
        """Return the value of a node, or None if it is invalid.

        Each pair of a node and a field is read once, so that its problems are reported once.
        """
        key = (id(node), id(field))
        if key not in self.results:
            read = self.scalar
            if field.keys:
                read = self.section
            elif field.item:
                read = self.items
            elif field.named:
                read = self.names
            self.results[key] = read(node, field, path)
        return self.results[key]

    def expect(self, kind: str, node: Node, path: str, remedy: str = "") -> bool:
        """Return True if a node is of the kind "mapping" or "sequence" that is expected here.

        Otherwise add a problem, whose message ends in `remedy`, and return False.
        """
        found = _kind_of(node)
        if found != kind:
            message = f"must be {_KINDS[kind]}, not {_KINDS[found]}{remedy}"
            self.add_problem(node, path, message)
        return found == kind

    # Single values.

    def scalar(self, node: Node, field: Field, path: str) -> Any:
        """Return the value of a scalar, after its variables have been replaced.

        Also returns None if the scalar refers to a registry or group that is invalid.
        """
        try:
            kind = _kind_of(node)
            if kind != "scalar":
                raise ValueError(f"must be a single value, not {_KINDS[kind]}")
            text = substitute(node.value, self.file.environ)
            # The URL of a proxy is secret only if it has a user name.
            if field.secret and (field.parse is not parse_proxy or "@" in text):
                keep_secret(text)
            value = field.parse_text(text)
            return field.resolve(self, value) if field.resolve else value
        except ValueError as error:
            self.add_problem(node, path, str(error))
            return None

    def find_registry(self, alias: str) -> Registry | None:
        """Return the registry with an alias.

        Returns None if the registry is defined but invalid. Raises ValueError if the alias is
        unknown.
        """
        if alias not in self.registries:
            remedy = "name one of `registries` (a group can only be the whole of `targets`)"
            raise ValueError(f"no registry is named {alias!r}: {remedy}")
        return self.registries[alias]

    def find_targets(self, name: str) -> tuple[Registry, ...] | None:
        """Return the registries of the group `name`, or the one registry whose alias is `name`.

        Returns None if the group or registry is defined but invalid. Raises ValueError if there is
        neither.
        """
        if name in self.groups:
            return self.groups[name]
        registry = self.find_registry(name)
        return None if registry is None else (registry,)

    def locate(self, address: RegistryAddress) -> dict[str, Any]:
        """Return the fields of Registry that say where it is."""
        place = address._asdict()
        if address.scheme == LAYOUT_SCHEME:
            place["written_path"] = address.host
            place["host"] = posixpath.normpath(self.file.absolute_path(address.host))
        return place

    # Lists.

    def items(self, node: Node, field: Field, path: str) -> Any:
        """Return the values of a list, or what `field.alone` makes of a scalar.

        Returns None if any value is invalid, or if the list is empty although `field.if_empty` is
        set.
        """
        if node.id == "scalar" and field.alone:
            value = self.read(node, field.alone, path)
            return (value,) if isinstance(value, str) else value
        remedy = f": {field.if_empty}" if field.if_empty else ""
        if not self.expect("sequence", node, path, remedy):
            return None
        if field.if_empty and not node.value:
            self.add_problem(node, path, f"the list is empty{remedy}")
            return None
        assert field.item is not None
        values = [
            self.read(item, field.item, f"{path}[{index}]") for index, item in enumerate(node.value)
        ]
        return None if None in values else tuple(values)

    # Mappings.

    def section(self, node: Node, field: Field, path: str) -> Any:
        """Read the keys of a section. Returns what `field.build` makes of their values."""
        if not self.expect("mapping", node, path):
            return None
        nodes = self.known_keys(node, field.keys, path)
        if field is MAPPING:
            nodes = self.default_nodes | nodes
        section = Section(self, node, path, nodes, {})
        # In the order of the table registries and groups are read before what refers to them.
        for key, inner in field.keys.items():
            if key in nodes:
                value = self.read(nodes[key], inner, _join_path(path, key))
                if value is not None:
                    section.values[key] = value
            elif inner.required:
                section.add_problem(key, f"required: {inner.required}")
        return field.build(section)

    def known_keys(self, node: Node, known: Mapping[str, Field], path: str) -> dict[str, Node]:
        """Return the nodes that a mapping sets, by key. Adds a problem for each unknown key.

        A key with the value null is omitted because null means that it is not set.
        """
        nodes: dict[str, Node] = {}
        for key, (key_node, value) in self.entries_of(node, path).items():
            is_extension = known is DOCUMENT.keys and key.startswith("x-")
            if is_extension:
                continue  # reserved for anchors, as in compose files
            if key not in known:
                message = f"unknown key: write one of {', '.join(known)}"
                self.add_problem(key_node, _join_path(path, mask_unless_word(key)), message)
            elif _kind_of(value) != "null":
                nodes[key] = value
        return nodes

    def entries_of(self, node: Node, path: str) -> Entries:
        """Return the keys and values of a mapping by the key's text, including those that `<<`
        merges.

        The mapping's own entries take precedence over merged entries, regardless of their order.
        """
        if id(node) in self.entries:
            return self.entries[id(node)]
        entries = self.entries[id(node)] = {}  # also what a mapping that merges itself gets
        sources: list[Node] = []  # the nodes that `<<` refers to, in order
        for key, value in node.value:
            if key.id != "scalar":
                self.add_problem(key, path, f"{_KINDS[key.id]} cannot be a key")
            elif key.value == "<<":
                sources += value.value if value.id == "sequence" else [value]
            elif key.value in entries:
                first_line, _ = _place_of(entries[key.value][0])
                message = f"duplicate key: it is on line {first_line} already"
                self.add_problem(key, _join_path(path, key.value), message)
            else:
                entries[key.value] = key, value

        for source in sources:
            if source.id != "mapping":
                self.add_problem(source, path, "'<<' takes a mapping or a list of mappings")
                continue
            for name, entry in self.entries_of(source, path).items():
                entries.setdefault(name, entry)
        return entries

    def names(self, node: Node, field: Field, path: str) -> Any:
        """Read the value of each name of `registries` or `target_groups`.

        Adds a problem for each key that is not a valid name.
        """
        values: dict[str, Any] = self.groups if path == "target_groups" else self.registries
        if not self.expect("mapping", node, path):
            return None
        assert field.named is not None
        for name, (key, value) in self.entries_of(node, path).items():
            value_path = _join_path(path, name)
            if _kind_of(key) != "scalar" or name == "" or not name.isprintable():
                self.add_problem(key, value_path, "must be a name")
                continue
            read = self.read(value, field.named, value_path)
            values[name] = read._replace(alias=name) if isinstance(read, Registry) else read
        return values


def _kind_of(node: Node) -> str:
    """Return a key of `_KINDS`."""
    if node.tag != f"tag:yaml.org,2002:{_PLAIN_TAGS[node.id]}":
        return "!"
    if node.id == "scalar" and node.style is None and node.value in _NO_VALUES:
        return "null"
    return str(node.id)


def _place_of(node: Node) -> tuple[int, int]:
    """Return the line and column of a node, from 1. PyYAML counts from 0."""
    return node.start_mark.line + 1, node.start_mark.column + 1


def _join_path(path: str, key: str) -> str:
    """Return the path of the value under a key of the mapping at `path`."""
    return f"{path}.{key}" if path else key


# Building of records, and what concerns several keys.


def values_of(section: Section) -> dict[str, Any]:
    return section.values


def build_defaults(section: Section) -> dict[str, Any]:
    section.reader.default_nodes = section.nodes
    return section.values


def build_tags(section: Section) -> TagRule:
    if "latest" in section.nodes and section.nodes.keys().isdisjoint({"sort", "semver"}):
        section.add_problem("latest", "needs `sort` or `semver`")
    rule = TagRule(**section.values)
    literal_tags = [tag for tag in map(literal_tag, rule.glob) if tag is not None]
    for tag in select(literal_tags, TagRule(glob=rule.glob, exclude=rule.exclude)).dropped:
        section.add_warning("glob", f"{tag!r} is never copied: the exclude rule drops it")
    return rule


def build_artifacts(section: Section) -> ArtifactRule:
    rule = ArtifactRule(**section.values)
    if not rule.enabled:
        if rule.require_artifacts:
            message = "contradicts `enabled: false`: remove one of them"
            section.add_problem("require_artifacts", message)
        section.add_warning("enabled", "is false: signatures and SBOMs are stripped at targets")
    return rule


def build_registry(section: Section) -> Registry | None:
    """Return a registry or an image layout without its alias, which `Reader.names` sets.

    Returns None if `url` is missing or invalid.
    """
    if "client_key" in section.nodes and "client_cert" not in section.nodes:
        section.add_problem("client_key", "needs `client_cert`")
    _check_login(section)
    if {"cloud_profile", "aws_profile"} <= section.nodes.keys():
        message = "is the same field as `cloud_profile`: remove one of them"
        section.add_problem("aws_profile", message)
    # The arguments of Registry have the names of the section's keys, except for these.
    values = dict(section.values)
    if "url" not in values:
        return None
    values |= values.pop("url")  # scheme, host and port
    is_layout = values["scheme"] == LAYOUT_SCHEME
    for key in section.nodes:
        if is_layout and key not in ("url", "assume"):
            section.add_problem(key, "means nothing for an image layout: remove it")
        if not is_layout and key == "assume":
            section.add_problem(key, "is only valid with `url: oci-layout:PATH`")
    if "aws_profile" in values:
        values["cloud_profile"] = values.pop("aws_profile")
    if "credentials" in values:
        values |= values.pop("credentials")  # user name and password
    kind = "unknown" if is_layout else kind_of(values["host"], values.get("auth_type"))
    registry = Registry(alias="", kind=kind, **values)

    has_login = registry.auth_type not in (None, "anonymous")
    if registry.scheme == "http" and has_login and not is_loopback(registry.host):
        trouble = f"credentials are sent unencrypted to {registry.authority}"
        section.add_warning("url", f"{trouble}: write https:// if it supports that")
    return registry


def _check_login(section: Section) -> None:
    """Add a problem for each key that `auth_type` requires or does not allow."""
    auth_type = section.values.get("auth_type")
    if "auth_type" in section.nodes and auth_type is None:
        return  # it is invalid
    for key, needed in _LOGIN_KEYS.items():
        is_set = key in section.nodes
        if is_set and needed != auth_type:
            section.add_problem(key, f"is only valid with `auth_type: {needed}`")
        if not is_set and needed == auth_type and auth_type in ("basic", "static_token"):
            section.add_problem("auth_type", f"{auth_type} needs `{key}`")


def build_mapping(section: Section) -> MappingRule | None:
    """Return a mapping. Returns None if a value is invalid or missing. `load` sets the index."""
    for key in ("source", "targets"):
        if key not in section.nodes:
            section.add_problem(key, "is missing: set it here or in `defaults`")
    values = section.values
    if values.keys() != section.nodes.keys() | {"from", "source", "targets"}:
        return None

    rule = MappingRule(
        index=0,
        source=values["source"],
        source_repository=values["from"],
        targets=tuple(dict.fromkeys(values["targets"])),
        target_repository=values.get("to", values["from"]),
        tags=values.get("tags", TagRule()),
        platforms=values.get("platforms"),
        artifacts=values.get("artifacts", ArtifactRule()),
        min_age=values.get("min_age", 0.0),
    )
    first, _, rest = rule.source_repository.partition("/")
    # A name without a dot, such as `harbor`, may also be the name of a team.
    if "." in first and rest and canonical_host(first) == rule.source.host:
        trouble = "begins with the registry's own host, which does not belong here"
        section.add_warning("from", f"{rule.source_repository!r} {trouble}: write {rest!r}")
    if rule.source_repository == ALL_REPOSITORIES:
        if not rule.source.is_layout:
            message = "only a source that is an `oci-layout` can be copied whole: name a repository"
            section.add_problem("from", message)
        if "to" in section.nodes:
            message = 'cannot be set where `from` is "*": each repository keeps its name'
            section.add_problem("to", message)
    if rule.min_age and rule.source.is_layout:
        message = "images in an image layout have no age: write `min_age: 0`"
        section.add_problem("min_age", message)
    if any(target.address == rule.source.address for target in rule.targets):
        _check_copy_within_registry(section, rule)
    return rule


def _check_copy_within_registry(section: Section, rule: MappingRule) -> None:
    """Check a mapping whose source registry is also one of its target registries.

    Adds a problem if source and target are the same repository, and a problem if the registry's
    limit allows only one request at a time.
    """
    source = rule.source
    host = source.authority
    source_key = source.repository_key(rule.source_repository)
    target_key = source.repository_key(rule.target_repository)
    if source_key == target_key:
        key = "to" if "to" in section.nodes else "from"
        message = f"source and target are the same repository of {host}: give another `to`"
        section.add_problem(key, message)

    # A copy reserves a read slot and a write slot in one step (docs/design.md I8). If both slots
    # belong to the same registry, a limit of 1 would never admit the copy. All aliases of a host
    # share the smallest of their limits.
    limits = [
        registry.max_concurrent
        for registry in section.reader.registries.values()
        if registry is not None and registry.address == source.address
    ]
    if 1 in limits:
        message = f"reads and writes {host} at once, whose max_concurrent is 1: set it to 2 or more"
        section.reader.add_problem(section.node, section.path, message)


# The table of keys.


class Field(NamedTuple):
    """How the value of a key is read: as a scalar, if it has neither `keys` nor `item` nor `named`."""

    parse: Callable[[str], Any] = str  # returns the value of a text; raises ValueError
    # Returns what a parsed text refers to, or None if that is invalid. Raises ValueError.
    resolve: Callable[[Reader, Any], Any] | None = None
    choices: tuple[str, ...] = ()  # the only valid texts, if there are any
    required: str = ""  # what to write, for the message; "": the key may be left out
    secret: bool = False
    item: Field | None = None  # of each item of a list
    # Of a scalar in place of a list; its value is a tuple, or a text that is the only item.
    alone: Field | None = None
    if_empty: str = ""  # the remedy for no list or an empty one; "": an empty list is valid
    named: Field | None = None  # of the value of each key, where the user chooses the keys
    keys: Mapping[str, Field] = MappingProxyType({})  # of a section
    build: Callable[[Section], Any] = values_of  # returns what a section stands for, or None

    def parse_text(self, text: str) -> Any:
        """Return the value of a text. Raises ValueError if the text is invalid."""
        if not text:
            raise ValueError("must not be empty")
        if not text.isprintable():  # such characters could end a line, a header or a path
            raise ValueError("has a line break or another control character: remove it")
        if self.choices and text not in self.choices:
            raise ValueError(f"{mask_unless_word(text)!r} is not one of {', '.join(self.choices)}")
        return self.parse(text)


PATH = Field(resolve=lambda reader, path: reader.file.absolute_path(path))
PATTERN = Field(parse_pattern)
ALIAS = Field(resolve=Reader.find_registry)
ALIASES = Field(item=ALIAS, if_empty="name at least one registry")
ARTIFACT_TYPES = Field(item=Field(parse_artifact_type))

# The keys of a registry that are valid with one `auth_type` only.
_LOGIN_KEYS = {
    "credentials": "basic",
    "token": "static_token",
    "cloud_profile": "ecr",
    "aws_profile": "ecr",
}

CREDENTIALS = Field(
    keys={
        "username": Field(parse_username, required="user name"),
        "password": Field(
            secret=True, required="password or access token, such as ${MIRROR_PASSWORD}"
        ),
    }
)

REGISTRY = Field(
    build=build_registry,
    keys={
        "url": Field(
            parse_registry_url,
            resolve=Reader.locate,
            required="`[http://|https://]HOST[:PORT]`, or `oci-layout:PATH` for a directory of images",
        ),
        "auth_type": Field(
            choices=(
                *("ecr", "gar", "gcr", "acr", "ghcr"),
                *("anonymous", "basic", "static_token", "docker_config"),
            )
        ),
        "credentials": CREDENTIALS,
        "token": Field(parse_token, secret=True),
        "cloud_profile": Field(),
        "aws_profile": Field(),
        "head_first": Field(parse_flag),
        "max_concurrent": Field(parse_positive),
        "ca_file": PATH,
        "client_cert": PATH,
        "client_key": PATH,
        "proxy": Field(parse_proxy, secret=True),
        "assume": Field(item=PATH, alone=PATH, if_empty="omit it to leave nothing out"),
    },
)

TAGS = Field(
    build=build_tags,
    keys={
        "glob": Field(item=PATTERN, alone=PATTERN, if_empty="omit it to take every tag"),
        "exclude": Field(item=PATTERN, alone=PATTERN),
        "semver": Field(parse_version_range),
        "semver_prerelease": Field(choices=("include", "exclude", "only")),
        "sort": Field(choices=("semver", "alpha")),
        "latest": Field(parse_positive),
        "min_tags": Field(parse_count),
        "immutable_tags": PATTERN,
    },
)

ARTIFACTS = Field(
    build=build_artifacts,
    keys={
        "enabled": Field(parse_flag),
        "include": ARTIFACT_TYPES,
        "exclude": ARTIFACT_TYPES,
        "require_artifacts": Field(parse_flag),
    },
)

# The keys of `defaults`, which mappings inherit.
_INHERITED = {
    "source": ALIAS,
    "targets": ALIASES._replace(alone=Field(resolve=Reader.find_targets)),
    "tags": TAGS,
    "min_age": Field(parse_duration),
    "platforms": Field(
        item=Field(parse_listed_platform),
        if_empty="write [OS/ARCH], or omit it to copy all platforms",
    ),
    "artifacts": ARTIFACTS,
}

DEFAULTS = Field(build=build_defaults, keys=_INHERITED)

MAPPING = Field(
    build=build_mapping,
    keys={
        "from": Field(parse_source_repository, required="the source repository, without the host"),
        "to": Field(parse_repository),
        **_INHERITED,
    },
)

GLOBAL = Field(
    keys={
        "max_concurrent_transfers": Field(parse_positive),
        "cache_ttl": Field(parse_duration),
        "cache_dir": PATH,
        "staging_size_limit": Field(parse_size),
    }
)

DOCUMENT = Field(
    keys={
        "registries": Field(named=REGISTRY),
        "target_groups": Field(named=ALIASES),
        "defaults": DEFAULTS,
        "mappings": Field(item=MAPPING, required="what to copy; it may be []"),
        "global": GLOBAL,
    }
)


# What the program does with a configuration file.

# The state directory if the configuration sets none.
_DEFAULT_CACHE_DIR = ".regsync"


def load(file: ConfigFile) -> Config:
    """Read and validate a configuration.

    Raises ConfigError with all problems, in the order of the file.
    """
    reader = Reader(file)
    document = reader.read_document()

    # The values of `global`. Except for `cache_dir`, they are fields of Config with the same names.
    settings = dict(document.get("global", {}))
    cache_dir = settings.pop("cache_dir", None) or file.absolute_path(_DEFAULT_CACHE_DIR)
    # Standard input has no directory to which it could be relative.
    if not os.path.isabs(cache_dir):
        cache_dir = None

    return Config(
        # Since there are no problems, none of these registries is None.
        registries={alias: entry for alias, entry in reader.registries.items() if entry},
        mappings=tuple(
            rule._replace(index=index) for index, rule in enumerate(document["mappings"])
        ),
        warnings=tuple(map(str, sorted(reader.warnings, key=_IN_FILE_ORDER))),
        cache_dir=cache_dir,
        **settings,
    )


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the document. It knows no conditions that involve several keys."""
    import pkgutil  # no run needs it

    data = pkgutil.get_data("_regsync", "config.schema.json")
    assert data is not None
    document: dict[str, Any] = json.loads(data)
    return document


# The expansion.


def expand(file: ConfigFile) -> str:
    """Return as YAML what was understood of a configuration: what differs from defaults.

    Secrets are hidden, also where another value repeats one of at least four characters. Raises
    ConfigError as `load` does.
    """
    import yaml

    shown = json.loads(json_text(_plain(load(file))))
    return yaml.safe_dump(
        shown, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
    )


def _plain(value: Any) -> Any:
    """Return a record as a dict of the fields that differ from their defaults, and all inside it.

    A mapping names its registries by their aliases. Login secrets are hidden, however short.
    """
    if isinstance(value, Platform):
        return str(value)
    if hasattr(value, "_asdict"):
        defaults = value._field_defaults
        fields = {
            key: each
            for key, each in value._asdict().items()
            if key not in defaults or each != defaults[key]
        }
        fields |= dict.fromkeys(fields.keys() & {"password", "token"}, "***")
        if isinstance(value, MappingRule):
            aliases = [target.alias for target in value.targets]
            fields |= {"source": value.source.alias, "targets": aliases}
        value = fields
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
