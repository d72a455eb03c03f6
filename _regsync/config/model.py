"""A valid configuration as frozen values.

Owns: what a registry, a mapping and the whole configuration are, after inheritance.
May not know: YAML, the environment, how values were written.
Follows: docs/design.md section 3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from _regsync.addresses import DEFAULT_PORTS, format_authority
from _regsync.config.fields import RegistryAddress, parse_registry_url
from _regsync.errors import ConfigError
from _regsync.oci.manifest import Platform
from _regsync.oci.reference import LAYOUT_SCHEME, full_name
from _regsync.providers import Kind, api_repository, kind_of
from _regsync.tags import TagRule


class Registry(NamedTuple):
    """One named registry."""

    alias: str
    scheme: Literal["https", "http", "oci-layout"]
    # Without brackets, and Docker Hub's canonical name for all of its names; of an image layout the
    # absolute path of its directory.
    host: str
    port: int  # 0 of an image layout
    kind: Kind
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
    written_path: str = ""  # of an image layout, as the configuration has it
    assume: tuple[str, ...] = ()  # receipts and layouts of what the far side of a layout holds

    @property
    def is_layout(self) -> bool:
        """Whether it is a directory of images, which is asked nothing over the network."""
        return self.scheme == LAYOUT_SCHEME

    def repository_key(self, repository: str) -> object:
        """Return a key of a repository in this registry, the same under all names of both."""
        return self.address, api_repository(self.host, repository)

    def name_of(self, repository: str) -> str:
        """Return a repository's full name, as reports show it."""
        return full_name(self.authority, repository)

    def lock_name(self, repository: str) -> str:
        """Return how a lock names a repository, the same on every machine: one in an image layout by
        the path as it is written.
        """
        place = self.authority
        if self.is_layout and self.written_path:
            place = f"{LAYOUT_SCHEME}:{self.written_path}"
        return full_name(place, api_repository(self.host, repository))

    def __repr__(self) -> str:
        # A password or token must not be shown by whatever prints a registry.
        scheme = "" if self.is_layout else f"{self.scheme}://"
        return f"<Registry {self.alias}: {scheme}{self.authority}>"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, by which limits and knowledge are kept: aliases of one address share them."""
        return self.host, self.port

    @property
    def authority(self) -> str:
        """`host` or `host:port` as reports show it; of an image layout `oci-layout:PATH`."""
        if self.is_layout:
            return f"{LAYOUT_SCHEME}:{self.host}"
        return format_authority(self.scheme, self.host, self.port)


class ArtifactRule(NamedTuple):
    """Which referrers are copied with their image; an empty `include` takes every type."""

    enabled: bool = True
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    require_artifacts: bool = False


class MappingRule(NamedTuple):
    """One entry of `mappings` after inheritance."""

    index: int  # type: ignore[assignment]  # in the file, from 0; hides a method of tuples
    source: Registry
    source_repository: str
    targets: tuple[Registry, ...]
    target_repository: str
    tags: TagRule
    platforms: tuple[Platform, ...] | None  # None copies all
    artifacts: ArtifactRule
    # Seconds since a digest was first seen, before a target that lacks it gets it; 0: none.
    min_age: float = 0.0

    @property
    def source_key(self) -> object:
        """What it copies: two mappings of the same content never contend for a target's tag."""
        platforms = self.platforms and frozenset(self.platforms)
        return self.source.repository_key(self.source_repository), platforms

    @property
    def target_keys(self) -> list[object]:
        """The repositories that it writes to, in the order of `targets`."""
        return [target.repository_key(self.target_repository) for target in self.targets]


class Config(NamedTuple):
    """A valid configuration."""

    registries: Mapping[str, Registry]
    mappings: tuple[MappingRule, ...]
    max_concurrent_transfers: int = 50
    cache_dir: str | None = None  # None: no state
    # Where first-seen times are kept, for all shards together; None: nowhere that lasts.
    seen_dir: str | None = None
    cache_ttl: float = 12 * 3600.0  # seconds; 0: entries never expire
    staging_size_limit: int | None = None  # bytes; None: no limit
    warnings: tuple[str, ...] = ()

    @property
    def in_use(self) -> tuple[Registry, ...]:
        """The registries that mappings name, each once, in the order of their first use."""
        named = [registry for rule in self.mappings for registry in (rule.source, *rule.targets)]
        return tuple(dict.fromkeys(named))


def registry_for(written: str, config: Config | None) -> Registry:
    """Return the first configured registry that is at `[SCHEME://]HOST[:PORT]`, else one without
    settings.

    ConfigError where `written` is no address, or has another scheme than its registry.
    """
    try:
        address = parse_registry_url(written)
    except ValueError as error:
        raise ConfigError(f"{written!r}: {error}") from error

    names_scheme = "://" in written
    registries = config.registries.values() if config is not None else ()
    for registry in registries:
        if not _is_at(registry, written, address):
            continue
        if names_scheme and registry.scheme != address.scheme:
            raise ConfigError(
                f"{written!r}: the configuration says {registry.scheme}:// for registry {registry.alias!r}",
                hint="leave the scheme out here, or change it there",
            )
        return registry
    return Registry(
        alias=written,
        scheme=address.scheme,
        host=address.host,
        port=address.port,
        kind=kind_of(address.host),
    )


def _is_at(registry: Registry, written: str, address: RegistryAddress) -> bool:
    """Return whether an address, which was `written` so, is that of a registry, whatever its scheme."""
    if registry.is_layout or address.scheme == LAYOUT_SCHEME:
        return registry.authority == written
    # A host alone is at the usual port of the scheme that the configuration gives it.
    says_port = "://" in written or re.search(r":[0-9]+$", written) is not None
    port = address.port if says_port else DEFAULT_PORTS[registry.scheme]
    return registry.host == address.host and registry.port == port
