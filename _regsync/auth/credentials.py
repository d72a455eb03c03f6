"""Credentials for registries, and where they are found.

Owns: credentials, the order of their sources, the grammar of container clients' files.
May not know: challenges, clouds, sockets. Files and variables are arguments.
Invariants: a source that is named, or broken, is never passed over for another one (R8). The repr
of a credential shows no secret.
Follows: docs/protocol-facts.md sections 3.1 to 3.4 and 7.1.
"""

from __future__ import annotations

import os
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from _regsync.addresses import is_loopback
from _regsync.config.model import Registry
from _regsync.errors import AuthError, ConfigError
from _regsync.providers import DOCKER_HUB_HOSTS
from _regsync.text import json_object, printable

# Returns the bytes of the file at a path, None where there is none; ConfigError for a file that
# cannot be read.
ReadFile = Callable[[str], bytes | None]

# A name and a value: of a header, of a field in a form or query.
Pair = tuple[str, str]

_DOCKER_HUB_KEY = "https://index.docker.io/v1/"

# `KIND PROGRAM` for each credential helper of a cloud. The cloud's own login does the same, and is
# asked after the files (docs/protocol-facts.md section 3.4).
_CLOUD_HELPERS = "ecr(_public)? ecr-login|g[ac]r (gcloud|gcr)|acr acr-(env|linux)"


class Credential(NamedTuple):
    """A login to one registry. Missing parts are empty."""

    username: str = ""
    password: str = ""
    identity_token: str = ""
    registry_token: str = ""
    found_at: str = "the configuration"  # in words

    def __repr__(self) -> str:
        return f"Credential(username={self.username!r}, found_at={self.found_at!r})"

    @property
    def basic(self) -> str | None:
        """The Authorization header of the Basic scheme; None without user name or secret."""
        pair = self._basic_pair
        return f"Basic {pair}" if pair else None

    @property
    def secrets(self) -> tuple[str, ...]:
        """All that no text may show. Some are empty."""
        return self.password, self.identity_token, self.registry_token, self._basic_pair

    @property
    def _basic_pair(self) -> str:
        secret = self.password or self.identity_token
        if not (self.username and secret):
            return ""
        pair = f"{self.username}:{secret}".encode("utf-8", "surrogatepass")
        return b64encode(pair).decode("ascii")


def find_credential(
    registry: Registry,
    environ: Mapping[str, str],
    home: str | None,
    read: ReadFile,
    repository: str | None = None,
) -> Credential | None:
    """Return the credential for a registry, None where no source has one.

    AuthError for a source that cannot be used, and where `auth_type` names a kind of source that
    has none.
    """
    method = registry.auth_type
    if method == "anonymous":
        return None
    if method in ("basic", "static_token"):
        return _configured_credential(registry)

    looked_at: list[str] = []
    takes_github_token = (method or registry.kind) == "ghcr"
    if takes_github_token:
        looked_at.append("the environment variable GITHUB_TOKEN")
        credential = _github_credential(registry, environ)
        if credential is not None:
            return credential
    takes_files = method != "ghcr"  # where it is configured, nothing else is meant
    if takes_files:
        for place, text in _credential_files(environ, home, read):
            looked_at.append(place)
            credential = _look_up(place, text, registry, repository)
            if credential is not None:
                return credential
    if method is None:
        return None  # nobody has asked for a login
    raise AuthError(
        f"registry {registry.alias!r}: no credentials for {registry.authority}; looked at {', '.join(looked_at)}",
        hint="log in with a container client, or use auth_type: basic with credentials",
        fatal=True,
    )


def _configured_credential(registry: Registry) -> Credential:
    """Return the credential that the configuration itself holds."""
    where = f"registry {registry.alias!r}"
    if registry.auth_type == "static_token":
        return Credential(registry_token=registry.token or "", found_at=f"token of {where}")
    return Credential(
        registry.username or "", registry.password or "", found_at=f"credentials of {where}"
    )


def _github_credential(registry: Registry, environ: Mapping[str, str]) -> Credential | None:
    """Return the credential that a job of GitHub's has, None outside of such a job."""
    token = environ.get("GITHUB_TOKEN")
    if not token:
        return None
    if registry.scheme != "https" and not is_loopback(registry.host):
        where = f"registry {registry.alias!r}"
        raise AuthError(
            f"{where}: GITHUB_TOKEN is not sent over plain HTTP",
            hint="write https:// in its url",
            fatal=True,
        )
    # Any user name goes with a token (docs/protocol-facts.md section 7.1); Actions sets the real
    # one.
    username = environ.get("GITHUB_ACTOR") or "regsync"
    return Credential(username, token, found_at="GITHUB_TOKEN")


def _credential_files(
    environ: Mapping[str, str], home: str | None, read: ReadFile
) -> Iterator[tuple[str, bytes | None]]:
    """Yield each place where docker, then podman, keeps credentials (docs/protocol-facts.md section
    3.1), with what is there; None where nothing is.
    """
    inline = environ.get("DOCKER_AUTH_CONFIG", "").encode("utf-8", "surrogateescape")
    yield "the environment variable DOCKER_AUTH_CONFIG", inline or None

    docker_directory = environ.get("DOCKER_CONFIG") or _path_below(home, ".docker")
    config_directory = environ.get("XDG_CONFIG_HOME") or _path_below(home, ".config")
    session_directory = environ.get("XDG_RUNTIME_DIR")
    user_number = os.getuid() if hasattr(os, "getuid") else 0  # Windows has no user numbers
    session_file = f"/run/containers/{user_number}/auth.json"
    paths = (
        environ.get("REGISTRY_AUTH_FILE"),
        _path_below(docker_directory, "config.json"),
        _path_below(session_directory, "containers", "auth.json") or session_file,
        _path_below(config_directory, "containers", "auth.json"),
        _path_below(home, ".dockercfg"),
    )
    for path in filter(None, paths):
        try:
            text = read(path)
        except ConfigError as error:
            raise AuthError(error.message, fatal=True) from error
        yield path, text


def _path_below(directory: str | None, *names: str) -> str | None:
    return os.path.join(directory, *names) if directory else None


class _CredentialFile(NamedTuple):
    """What a file of docker's or podman's says of registries."""

    place: str  # for messages
    is_legacy: bool  # `.dockercfg`, which is `auths` alone
    auths: dict[str, object]
    helpers: dict[str, object]  # by registry
    store: object  # the helper for all other registries

    def __repr__(self) -> str:
        return f"_CredentialFile({self.place!r})"  # it holds secrets


def _parse_file(place: str, text: bytes) -> _CredentialFile:
    """Read a credential file (docs/protocol-facts.md section 3.2); AuthError for anything else."""
    broken = AuthError(
        f"{place} is not a credential file of docker or podman",
        hint="correct it, or remove it and log in again",
        fatal=True,
    )
    document = json_object(text)
    if document is None:
        raise broken
    is_legacy = place.endswith(".dockercfg")
    if is_legacy:
        document = {"auths": document}
    auths = document.get("auths") or {}
    helpers = document.get("credHelpers") or {}
    if not (isinstance(auths, dict) and isinstance(helpers, dict)):
        raise broken
    return _CredentialFile(place, is_legacy, auths, helpers, document.get("credsStore"))


def _look_up(
    place: str, text: bytes | None, registry: Registry, repository: str | None
) -> Credential | None:
    """Return the credential that one file has for a registry, None where it has none
    (docs/protocol-facts.md sections 3.2 to 3.4). AuthError where another program has it.
    """
    if text is None:
        return None
    file = _parse_file(place, text)
    names = _names_in_files(registry)
    helper = next(filter(None, map(file.helpers.get, names)), None)
    if helper:
        _refuse_credential_program(place, helper, "credHelpers", registry)
        return None

    keys = _keys_of_entries(file, names, repository)
    for key in keys:
        credential = _read_entry(place, file.auths[key], registry)
        if credential is not None:
            return credential
    # `docker login` leaves an empty entry for each login that is in the store (nativeStore.Store of
    # docker/cli). Without an entry the store has nothing, unless the configuration knows better.
    may_be_in_store = keys or registry.auth_type is not None
    if file.store and may_be_in_store:
        _refuse_credential_program(place, file.store, "credsStore", registry)
    return None


def _names_in_files(registry: Registry) -> list[str]:
    names = [registry.authority, f"{registry.host}:{registry.port}"]
    if registry.host == "docker.io":
        return list(dict.fromkeys((_DOCKER_HUB_KEY, *names, *DOCKER_HUB_HOSTS)))
    return names


def _keys_of_entries(file: _CredentialFile, names: list[str], repository: str | None) -> list[str]:
    """Return the keys of `auths` that apply to a repository, the closest first: those of the
    repository, of the paths above it, of the registry (by one of its `names`), then URLs.
    """
    parts = (repository or "").split("/")
    paths = ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]  # `a/b`, then `a`
    names_with_path = [f"{name}/{path}" for path in paths for name in names]
    keys = [key for key in (*names_with_path, *names) if key in file.auths]
    # Older keys are URLs, of which only the host counts. The legacy file leaves out their scheme;
    # elsewhere a key without one may name a repository.
    url = r"(?:https?://)?([^/]*).*" if file.is_legacy else r"https?://([^/]*).*"
    for key in file.auths:
        host = re.sub(url, r"\1", key.lower(), count=1)
        if key not in keys and host in names:
            keys.append(key)
    return keys


def _refuse_credential_program(
    place: str, program: object, section: str, registry: Registry
) -> None:
    """Raise AuthError for a credential helper, unless the cloud's own login can stand in for it."""
    is_clouds_own = re.fullmatch(_CLOUD_HELPERS, f"{registry.kind} {program}") is not None
    if is_clouds_own and registry.auth_type is None:
        return
    helper = f"credential helper docker-credential-{printable(str(program), 40)} ({section})"
    raise AuthError(
        f"{place} delegates {registry.authority} to the {helper}, and regsync starts no other programs",
        hint="use auth_type: basic with credentials, or write an auths entry to a separate file and point "
        "DOCKER_CONFIG at its directory; for public images use auth_type: anonymous",
        fatal=True,
    )


def _read_entry(place: str, entry: object, registry: Registry) -> Credential | None:
    """Return the credential in an entry of `auths` (docs/protocol-facts.md section 3.2). None for an
    entry without a secret: docker leaves such a one where a credential helper has the login.

    AuthError for an entry that cannot be read.
    """
    broken = AuthError(f"{place}: the entry for {registry.authority} cannot be read", fatal=True)
    if not isinstance(entry, dict):
        raise broken
    names = ("auth", "username", "password", "identitytoken", "registrytoken")
    values = [entry.get(name) or "" for name in names]
    if not all(isinstance(value, str) for value in values):
        raise broken

    auth, username, password, identity_token, registry_token = values
    if auth:  # the base64 of USER:PASSWORD goes before the two fields
        try:
            # Old versions of docker fill the text up with NUL bytes.
            pair = b64decode(auth, validate=True).decode().rstrip("\0")
            username, password = pair.split(":", 1)
        except ValueError:
            raise broken from None
        if not username:
            raise broken

    # By this user name docker's programs say that the password is an identity token.
    if username == "<token>" and not identity_token:
        identity_token = password
    if identity_token:
        password = ""  # without a password, the token goes in its place
    has_secret = registry_token or identity_token or (username and password)
    if not has_secret:
        return None
    return Credential(username, password, identity_token, registry_token, found_at=place)
