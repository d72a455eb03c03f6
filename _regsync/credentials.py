"""Where the credential for one registry comes from.

Owns: the order of the sources, the credential files of container clients, `Credential`. May not know:
challenges, tokens, sockets; files and variables come in as arguments. Invariant: a credential is taken
for exactly one host; a source that is named or broken is an error, never a reason to try another one or
to go anonymous; secrets are in no `repr` and no message. Follows design.md section 3 ("Kind"),
protocol-facts.md section 3 and section 9.2 (R8, R9, R19).
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from _regsync.errors import AuthError, clean

if TYPE_CHECKING:
    from _regsync.config import Registry

__all__ = ["Credential", "find_credential", "is_loopback"]


@dataclass(frozen=True, slots=True)
class Credential:
    """What proves who we are at one registry; `origin` tells the user where it was found.

    Hashable, and equal only when the secrets are: a fit key for what must not be mixed.
    """

    identity: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    identity_token: str | None = field(default=None, repr=False)
    registry_token: str | None = field(default=None, repr=False)
    origin: str = "the configuration"

    @property
    def basic(self) -> str | None:
        """The Authorization header of the Basic scheme, None where there is no such pair."""
        secret = self.password or self.identity_token
        if not self.username or not secret:
            return None
        return "Basic " + base64.b64encode(f"{self.username}:{secret}".encode()).decode("ascii")

    def redact(self, text: str) -> str:
        """Take the secrets out of a text that a server sent."""
        for secret in (self.password, self.identity_token, self.registry_token, (self.basic or "")[6:]):
            text = text.replace(secret, "***") if secret else text
        return text


def is_loopback(host: str) -> bool:
    """Say whether a host names this machine."""
    return host in ("localhost", "::1") or re.fullmatch(r"127(?:\.[0-9]{1,3}){3}", host) is not None


def find_credential(
    registry: Registry,
    *,
    environ: Mapping[str, str],
    home: str | None,
    read: Callable[[str], bytes | None],
    repository: str | None = None,
) -> tuple[Credential | None, list[str]]:
    """Find what to log in with (None: anonymous), and the places that were looked at.

    `repository` matters only to podman's files, whose keys may name repositories. Raise AuthError when
    a source that the configuration names yields nothing, or a file cannot be used.
    """
    method, where = registry.auth_type, f"registry {registry.alias!r}"
    if method == "anonymous":
        return None, []
    if method == "basic":
        name = registry.username or ""
        return Credential(f"{where} {name}", name, registry.password, origin=f"credentials of {where}"), []
    if method == "static_token":
        return Credential(f"{where} token", registry_token=registry.token, origin=f"token of {where}"), []
    if method in ("ecr", "gar", "gcr", "acr"):
        hint = "use auth_type: basic with a user name and a token from the cloud's own command line"
        raise AuthError(f"{where}: auth_type {method} is not in this version", hint=hint, fatal=True)
    looked: list[str] = []
    if method == "ghcr" or (method is None and registry.kind == "ghcr"):
        looked.append("the environment variable GITHUB_TOKEN")
        if token := environ.get("GITHUB_TOKEN"):
            if registry.scheme != "https" and not is_loopback(registry.host):
                raise AuthError(f"{where}: GITHUB_TOKEN is not sent over plain http", fatal=True)
            # Any user name goes with a token (protocol-facts.md section 7.1); Actions sets the real one.
            name = environ.get("GITHUB_ACTOR") or "regsync"
            return Credential("GITHUB_TOKEN", name, token, origin="GITHUB_TOKEN"), looked
    if method != "ghcr":
        for place, text in _files(environ, home, read):
            looked.append(place)
            found = None if text is None else _look_up(place, text, registry, repository)
            if found is not None:
                return found, looked
    if method is None:
        return None, looked
    message = f"{where}: no credentials for {registry.authority}; looked at {', '.join(looked)}"
    hint = "log in with a container client, or use auth_type: basic with credentials"
    raise AuthError(message, hint=hint, fatal=True)


def _files(
    environ: Mapping[str, str], home: str | None, read: Callable[[str], bytes | None]
) -> Iterator[tuple[str, bytes | None]]:
    """Yield the places of protocol-facts.md section 3.1 with what they hold, docker's before podman's."""

    def below(directory: str | None, *names: str) -> str | None:
        return os.path.join(directory, *names) if directory else None

    inline = environ.get("DOCKER_AUTH_CONFIG")
    yield "the environment variable DOCKER_AUTH_CONFIG", inline.encode() if inline else None
    # Only this directory has no `containers` below it.
    alone = f"/run/containers/{getattr(os, 'getuid', int)()}/auth.json"
    for path in (
        environ.get("REGISTRY_AUTH_FILE"),
        below(environ.get("DOCKER_CONFIG") or below(home, ".docker"), "config.json"),
        below(environ.get("XDG_RUNTIME_DIR"), "containers", "auth.json") or alone,
        below(environ.get("XDG_CONFIG_HOME") or below(home, ".config"), "containers", "auth.json"),
        below(home, ".dockercfg"),
    ):
        if path:
            try:
                yield path, read(path)
            except OSError as error:
                raise AuthError(f"{path} cannot be read: {error.strerror}", fatal=True) from error


def _look_up(place: str, text: bytes, registry: Registry, repository: str | None) -> Credential | None:
    """Find a registry in one credential file (protocol-facts.md sections 3.2 to 3.4)."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        # Without the parser's own error, which carries the whole document.
        raise AuthError(f"{place} is not valid JSON", hint="correct or remove it", fatal=True) from None
    legacy = place.endswith(".dockercfg")
    document = {"auths": document} if legacy else document
    parts = (
        [document.get(name) or {} for name in ("auths", "credHelpers")] if isinstance(document, dict) else []
    )
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise AuthError(f"{place} is not a container client's credential file", fatal=True)
    auths, programs = parts
    names = [registry.authority, f"{registry.host}:{registry.port}"]
    if registry.host == "docker.io":
        names = ["https://index.docker.io/v1/", *names, "index.docker.io", "registry-1.docker.io"]
    for name in names:
        if programs.get(name):
            raise _delegated(place, "credHelpers", programs[name], registry)
    path = (repository or "").split("/")
    scoped = [f"{name}/{'/'.join(path[:end])}" for end in range(len(path), 0, -1) for name in names]
    keys = [key for key in (*scoped, *names) if key in auths]
    keys += [key for key in auths if key not in keys and _plain(key, legacy) in names]
    for key in keys:
        if (found := _read_entry(place, auths[key], registry)) is not None:
            return found
    # `docker login` leaves an empty entry for what it gave to the store. With no entry at all the store
    # has nothing for this host, and an open registry stays usable (docker/cli, nativeStore.Store).
    if document.get("credsStore") and (keys or registry.auth_type is not None):
        raise _delegated(place, "credsStore", document["credsStore"], registry)
    return None


def _plain(key: str, legacy: bool) -> str:
    bare = re.sub(r"^https?://", "", key.lower())
    return bare.partition("/")[0] if legacy or bare != key.lower() else bare


def _delegated(place: str, section: str, suffix: object, registry: Registry) -> AuthError:
    program = f"docker-credential-{clean(str(suffix), 40)}"
    return AuthError(
        f"{place} delegates {registry.authority} to the credential helper {program} ({section}), and this "
        "program starts no other programs",
        hint="use auth_type: basic with credentials, or write an auths entry to a separate file and point "
        "DOCKER_CONFIG at its directory; for public images use auth_type: anonymous",
        fatal=True,
    )


def _read_entry(place: str, entry: object, registry: Registry) -> Credential | None:
    """Read one `auths` entry; None for the empty one that a credential store leaves behind."""
    broken = AuthError(f"{place}: the entry for {registry.authority} does not parse", fatal=True)
    if not isinstance(entry, dict):
        raise broken
    names = ("auth", "username", "password", "identitytoken", "registrytoken")
    texts = [entry.get(name) or "" for name in names]
    if not all(isinstance(text, str) for text in texts):
        raise broken
    auth, username, password, identity_token, registry_token = texts
    if auth:
        try:
            username, colon, password = base64.b64decode(auth, validate=True).decode().partition(":")
        except ValueError:
            raise broken from None
        if not username or not colon:
            raise broken
        # docker trims what old versions padded with.
        password = password.rstrip("\0")
    if username == "<token>":
        identity_token = identity_token or password
    if not registry_token and not identity_token and not (username and password):
        return None
    return Credential(
        f"{place} {registry.authority} {username}",
        username or None,
        None if identity_token else password or None,
        identity_token or None,
        registry_token or None,
        origin=place,
    )
