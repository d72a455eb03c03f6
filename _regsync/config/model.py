"""The model of a valid configuration, as immutable records.

Owns: the properties of a registry, a mapping and the whole configuration, after inheritance.
May not know: YAML, the environment, the YAML form of a value.
Follows: docs/design.md section 3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from _regsync.addresses import DEFAULT_PORTS, format_authority
from _regsync.config.fields import RegistryAddress, parse_registry_url
from _regsync.errors import ConfigError
from _regsync.oci import LAYOUT_SCHEME, Platform, full_name
from _regsync.providers import Kind, api_repository, kind_of
from _regsync.tags import TagRule


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
    # The directory for first-seen times, which all shards share. None: no directory is persistent.
    seen_dir: str | None = None
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

    registries = config.registries.values()
    matching = (registry for registry in registries if _has_address(registry, written, address))
    registry = next(matching, None)
    if registry is None:
        return Registry(alias=written, **address._asdict(), kind=kind_of(address.host))
    if "://" in written and registry.scheme != address.scheme:
        raise ConfigError(
            f"{written!r}: the configuration says {registry.scheme}:// for registry {registry.alias!r}",
            hint="leave the scheme out here, or change it there",
        )
    return registry


def _has_address(registry: Registry, written: str, address: RegistryAddress) -> bool:
    """Report whether a registry has an address, regardless of the scheme.

    `address` is the result of parsing `written`.
    """
    if registry.is_layout or address.scheme == LAYOUT_SCHEME:
        return registry.authority == written  # never equal for a layout and a registry
    # A host alone means the default port of the registry's own scheme.
    names_port = "://" in written or re.search(r":[0-9]+$", written) is not None
    port = address.port if names_port else DEFAULT_PORTS[registry.scheme]
    return registry.host == address.host and registry.port == port
