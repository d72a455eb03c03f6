"""."""

from __future__ import annotations

import os
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from _regsync.addresses import is_loopback
from _regsync.config.model import Registry
from _regsync.errors import AuthError, ConfigError
from _regsync.text import clean, json_object

_Read = Callable[[str], bytes | None]


Pair = tuple[str, str]


class Credential(NamedTuple):
    """What proves who we are at one registry, found at `origin`; equal only when the secrets are."""

    username: str = ""
    password: str = ""
    identity_token: str = ""
    registry_token: str = ""
    origin: str = "the configuration"

    def __repr__(self) -> str:
        return f"Credential(username={self.username!r}, origin={self.origin!r})"

    @property
    def basic(self) -> str | None:
        """The Authorization header of the Basic scheme, None where there is no such pair."""
        secret = self.password or self.identity_token
        pair = b64encode(f"{self.username}:{secret}".encode("utf-8", "surrogatepass")).decode(
            "ascii"
        )
        return f"Basic {pair}" if self.username and secret else None

    @property
    def secrets(self) -> tuple[str, ...]:
        return self.password, self.identity_token, self.registry_token, (self.basic or "")[6:]


def find_credential(
    registry: Registry,
    environ: Mapping[str, str],
    home: str | None,
    read: _Read,
    repository: str | None = None,
) -> Credential | None:
    """Find what to log in with (None: anonymous); AuthError for a source that cannot be used, and
    where it looked.
    """
    method = registry.auth_type
    where = f"registry {registry.alias!r}"
    looked = list[str]()
    if method == "anonymous":
        return None
    if method == "basic":
        return Credential(
            registry.username or "", registry.password or "", origin=f"credentials of {where}"
        )
    if method == "static_token":
        return Credential(registry_token=registry.token or "", origin=f"token of {where}")
    if (method or registry.kind) == "ghcr":
        looked.append("the environment variable GITHUB_TOKEN")
        if token := environ.get("GITHUB_TOKEN"):
            if registry.scheme != "https" and not is_loopback(registry.host):
                raise AuthError(f"{where}: GITHUB_TOKEN is not sent over plain http", fatal=True)
            # Any user name goes with a token (docs/protocol-facts.md section 7.1); Actions sets the
            # real one.
            return Credential(
                environ.get("GITHUB_ACTOR") or "regsync", token, origin="GITHUB_TOKEN"
            )
    for place, text in _files(environ, home, read) if method != "ghcr" else ():
        looked.append(place)
        if text is not None and (found := _look_up(place, text, registry, repository)) is not None:
            return found
    if method is None:
        return None
    hint = "log in with a container client, or use auth_type: basic with credentials"
    places = ", ".join(looked)
    raise AuthError(
        f"{where}: no credentials for {registry.authority}; looked at {places}",
        hint=hint,
        fatal=True,
    )


def _files(
    environ: Mapping[str, str], home: str | None, read: _Read
) -> Iterator[tuple[str, bytes | None]]:
    """Yield the places of docs/protocol-facts.md section 3.1 with what they hold, docker's before
    podman's.
    """

    def below(directory: str | None, *names: str) -> str | None:
        return os.path.join(directory, *names) if directory else None

    given = environ.get("DOCKER_AUTH_CONFIG", "").encode("utf-8", "surrogateescape")
    yield "the environment variable DOCKER_AUTH_CONFIG", given or None
    # no further `containers` below it
    alone = f"/run/containers/{getattr(os, 'getuid', int)()}/auth.json"
    for path in (
        environ.get("REGISTRY_AUTH_FILE"),
        below(environ.get("DOCKER_CONFIG") or below(home, ".docker"), "config.json"),
        below(environ.get("XDG_RUNTIME_DIR"), "containers", "auth.json") or alone,
        below(environ.get("XDG_CONFIG_HOME") or below(home, ".config"), "containers", "auth.json"),
        below(home, ".dockercfg"),
    ):
        try:
            if path:
                yield path, read(path)
        except ConfigError as error:
            raise AuthError(error.message, fatal=True) from error


def _look_up(
    place: str, text: bytes, registry: Registry, repository: str | None
) -> Credential | None:
    """Find a registry in one credential file (docs/protocol-facts.md sections 3.2 to 3.4)."""
    legacy = place.endswith(".dockercfg")
    found = json_object(text)
    document = {"auths": found} if legacy else found or {}
    auths = document.get("auths") or {}
    programs = document.get("credHelpers") or {}
    if found is None or not isinstance(auths, dict) or not isinstance(programs, dict):
        raise AuthError(f"{place} is not a container client's credential file", fatal=True)
    names = [registry.authority, f"{registry.host}:{registry.port}"]
    if registry.host == "docker.io":
        names = ["https://index.docker.io/v1/", *names, "index.docker.io", "registry-1.docker.io"]
    section = "credHelpers"
    program = next(filter(None, map(programs.get, names)), None)
    if not program:
        path = (repository or "").split("/")
        scoped = [
            f"{name}/{'/'.join(path[:end])}" for end in range(len(path), 0, -1) for name in names
        ]
        keys = [key for key in (*scoped, *names) if key in auths]
        # Keys may be URLs, in the legacy file without a scheme; elsewhere a path means more than
        # the host.
        url = r"(?:https?://)?([^/]*).*" if legacy else r"https?://([^/]*).*"
        keys += [
            key
            for key in auths
            if key not in keys and re.sub(url, r"\1", key.lower(), count=1) in names
        ]
        for key in keys:
            if (credential := _read_entry(place, auths[key], registry)) is not None:
                return credential
        # `docker login` leaves an empty entry for what the store has; without one, it has nothing
        # (nativeStore.Store).
        section = "credsStore"
        program = document.get("credsStore")
        if not program or not (keys or registry.auth_type is not None):
            return None
    # What a cloud's helper does, its kind's own chain does, which comes next
    # (docs/protocol-facts.md section 3.4).
    own = "ecr(_public)? ecr-login|g[ac]r (gcloud|gcr)|acr acr-(env|linux)"
    if registry.auth_type is None and re.fullmatch(own, f"{registry.kind} {program}"):
        return None
    helper = f"credential helper docker-credential-{clean(str(program), 40)} ({section})"
    raise AuthError(
        f"{place} delegates {registry.authority} to the {helper}, and this program starts no other programs",
        hint="use auth_type: basic with credentials, or write an auths entry to a separate file and point "
        "DOCKER_CONFIG at its directory; for public images use auth_type: anonymous",
        fatal=True,
    )


def _read_entry(place: str, entry: object, registry: Registry) -> Credential | None:
    """Read one `auths` entry; None for the empty one that a credential store leaves behind."""
    broken = AuthError(f"{place}: the entry for {registry.authority} does not parse", fatal=True)
    names = ("auth", "username", "password", "identitytoken", "registrytoken")
    if not isinstance(entry, dict) or not all(
        isinstance(entry.get(name) or "", str) for name in names
    ):
        raise broken
    auth, username, password, identity_token, registry_token = (
        entry.get(name) or "" for name in names
    )
    if auth:
        try:
            username, password = (
                b64decode(auth, validate=True).decode().rstrip("\0").split(":", 1)
            )  # old dockers pad
        except ValueError:
            raise broken from None
        if not username:
            raise broken
    identity_token = identity_token or (password if username == "<token>" else "")
    if not (registry_token or identity_token or (username and password)):
        return None
    return Credential(
        username, "" if identity_token else password, identity_token, registry_token, place
    )
