"""."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from _regsync.addresses import DEFAULT_PORTS
from _regsync.config.fields import parse_registry_url
from _regsync.errors import ConfigError
from _regsync.oci.manifest import Platform
from _regsync.providers import Kind, api_repository, kind_of
from _regsync.tags import TagRule


class Registry(NamedTuple):
    """One named registry. `host` has no brackets and is Docker Hub's canonical name where it is
    that.
    """

    alias: str
    scheme: Literal["https", "http"]
    host: str
    port: int
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

    def place(self, repository: str) -> object:
        """Return what names a repository there, the same under all its names."""
        return self.origin, api_repository(self.host, repository)

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
    platforms: tuple[Platform, ...] | None
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
    return Registry(alias=host, scheme=scheme, host=name, port=port, kind=kind_of(name))
