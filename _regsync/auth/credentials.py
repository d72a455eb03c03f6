"""Credentials for registries, and the search for them in files and environment variables.

Owns: credentials, the order of their sources, the format of container clients' files.
May not know: challenges, clouds, sockets.
Invariants: if a configured source is broken, no other source is used instead (R8). The repr of a
credential shows no secret.
Follows: docs/protocol-facts.md sections 3.1 to 3.4 and 7.1.
"""

from __future__ import annotations

import os
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from _regsync import edge
from _regsync.addresses import is_loopback
from _regsync.config import Registry
from _regsync.errors import AuthError, ConfigError
from _regsync.providers import DOCKER_HUB_HOSTS
from _regsync.text import json_object, printable

# A function that returns the content of the file at a path, or None if there is no file. It raises
# ConfigError if the file cannot be read.
ReadFile = Callable[[str], bytes | None]

# The name and the value of a header, of a form field or of a query parameter.
Pair = tuple[str, str]

# The key of Docker Hub in docker's configuration file.
_DOCKER_HUB_KEY = "https://index.docker.io/v1/"

# Matches `KIND PROGRAM` if PROGRAM is the credential helper of the cloud with registries of this
# KIND. regsync replaces such a helper by its own login to the cloud (docs/protocol-facts.md section
# 3.4).
_CLOUD_HELPERS = "ecr(_public)? ecr-login|g[ac]r (gcloud|gcr)|acr acr-(env|linux)"

_BROKEN_HINT = "correct it, or remove it and log in again"


class Credential(NamedTuple):
    """A login to one registry. Missing parts are empty."""

    username: str = ""
    password: str = ""
    identity_token: str = ""  # an OAuth2 refresh token for the registry's token service
    registry_token: str = ""  # a bearer token that is sent to the registry unchanged
    found_at: str = "the configuration"  # the source of the credential, for messages

    def __repr__(self) -> str:
        return f"Credential(username={self.username!r}, found_at={self.found_at!r})"

    @property
    def basic(self) -> str | None:
        """The Authorization header of the Basic scheme. None without a user name or a secret."""
        pair = self._basic_pair
        return f"Basic {pair}" if pair else None

    @property
    def secrets(self) -> tuple[str, ...]:
        """The texts that must be masked in messages. Some are empty."""
        return self.password, self.identity_token, self.registry_token, self._basic_pair

    @property
    def _basic_pair(self) -> str:
        """The base64 of USERNAME:SECRET, as the Basic scheme sends it.

        Empty if a part is missing.
        """
        secret = self.password or self.identity_token
        if not (self.username and secret):
            return ""
        pair = f"{self.username}:{secret}".encode("utf-8", "surrogatepass")
        return b64encode(pair).decode("ascii")


def find_credential(
    registry: Registry, read: ReadFile, repository: str | None = None
) -> Credential | None:
    """Find the credential for a registry. Returns None if no source has a credential.

    `repository` selects among entries of a credential file that apply to single repositories.
    Raises AuthError if a source is unusable, or if `auth_type` requires a credential and there is
    none.
    """
    auth_type = registry.auth_type  # None if the configuration permits all sources
    if auth_type == "anonymous":
        return None
    if auth_type in ("basic", "static_token"):
        return _configured_credential(registry)

    tried_sources: list[str] = []
    uses_github_token = (auth_type or registry.kind) == "ghcr"
    if uses_github_token:
        tried_sources.append("the environment variable GITHUB_TOKEN")
        credential = _github_credential(registry)
        if credential is not None:
            return credential
    uses_files = auth_type != "ghcr"  # this type permits only the token in GITHUB_TOKEN
    if uses_files:
        for file_name, text in _credential_files(read):
            tried_sources.append(file_name)
            if text is None or not text.strip():  # for docker an empty file is none either
                continue
            credential = _look_up(file_name, text, registry, repository)
            if credential is not None:
                return credential
    if auth_type is None:
        return None  # the configuration does not require a login
    remedy = "log in with a container client" if uses_files else "set GITHUB_TOKEN"
    raise AuthError(
        f"registry {registry.alias!r}: no credentials for {registry.authority}; looked at {', '.join(tried_sources)}",
        hint=f"{remedy}, or use auth_type: basic with credentials",
        fatal=True,
    )


def _configured_credential(registry: Registry) -> Credential:
    """Return the credential in the registry's own configuration."""
    label = f"registry {registry.alias!r}"
    if registry.auth_type == "static_token":
        return Credential(registry_token=registry.token or "", found_at=f"token of {label}")
    return Credential(
        registry.username or "", registry.password or "", found_at=f"credentials of {label}"
    )


def _github_credential(registry: Registry) -> Credential | None:
    """Return the credential in GITHUB_TOKEN, or None if the variable is not set.

    Raises AuthError if the token would be sent over plain HTTP.
    """
    token = edge.variable("GITHUB_TOKEN")
    if not token:
        return None
    if registry.scheme != "https" and not is_loopback(registry.host):
        label = f"registry {registry.alias!r}"
        raise AuthError(
            f"{label}: GITHUB_TOKEN is not sent over plain HTTP",
            hint="write https:// in its url",
            fatal=True,
        )
    # ghcr.io accepts any user name with a token (docs/protocol-facts.md section 7.1).
    username = edge.variable("GITHUB_ACTOR") or "regsync"
    return Credential(username, token, found_at="GITHUB_TOKEN")


def _credential_files(read: ReadFile) -> Iterator[tuple[str, bytes | None]]:
    """Yield the name and the content of each credential file of docker and podman.

    The content is None or empty if there is none. The order is the order of precedence
    (docs/protocol-facts.md section 3.1). Raises AuthError if a file cannot be read.
    """
    inline = (edge.variable("DOCKER_AUTH_CONFIG") or "").encode("utf-8", "surrogateescape")
    yield "the environment variable DOCKER_AUTH_CONFIG", inline

    home = edge.home()
    docker_directory = edge.variable("DOCKER_CONFIG") or _path_below(home, ".docker")
    config_directory = edge.variable("XDG_CONFIG_HOME") or _path_below(home, ".config")
    session_directory = edge.variable("XDG_RUNTIME_DIR")
    user_id = os.getuid() if hasattr(os, "getuid") else 0  # Windows has no numeric user IDs
    session_file = f"/run/containers/{user_id}/auth.json"
    paths = (
        edge.variable("REGISTRY_AUTH_FILE"),
        _path_below(docker_directory, "config.json"),
        _path_below(session_directory, "containers", "auth.json") or session_file,
        _path_below(config_directory, "containers", "auth.json"),
    )
    for path in filter(None, paths):
        try:
            text = read(path)
        except ConfigError as error:
            raise AuthError(error.message, fatal=True) from error
        yield path, text


def _path_below(directory: str | None, *names: str) -> str | None:
    return os.path.join(directory, *names) if directory else None


def _look_up(
    file_name: str, text: bytes, registry: Registry, repository: str | None
) -> Credential | None:
    """Look up the credential for a registry in the content of one credential file.

    Returns None if the file has no credential (docs/protocol-facts.md sections 3.2 to 3.4), or if
    regsync's own cloud login replaces the file's credential helper. Raises AuthError for any other
    credential helper, because regsync starts no other programs, and for a malformed file.
    """
    document = json_object(text)
    fields = document or {}
    entries = fields.get("auths") or {}  # by registry, by repository or by URL
    helpers = fields.get("credHelpers") or {}  # names of credential helpers, by registry
    store = fields.get("credsStore")  # the name of the helper for all other registries
    if document is None or not (isinstance(entries, dict) and isinstance(helpers, dict)):
        raise AuthError(
            f"{file_name} is not a credential file of docker or podman",
            hint=_BROKEN_HINT,
            fatal=True,
        )

    names = _names_in_files(registry)
    helper = next(filter(None, map(helpers.get, names)), None)  # the registry's own helper
    if helper:
        if not _is_replaced(helper, registry):
            raise _delegation_error(file_name, helper, registry, section="credHelpers")
        return None

    keys = _matching_keys(entries, names, repository)
    for key in keys:
        credential = _read_entry(file_name, entries[key], registry)
        if credential is not None:
            return credential
    # `docker login` writes an empty entry for each login that it puts in the store
    # (nativeStore.Store of docker/cli). Without such an entry, only an `auth_type` suggests that
    # the store has a login.
    may_be_in_store = bool(keys) or registry.auth_type is not None
    if store and may_be_in_store and not _is_replaced(store, registry):
        raise _delegation_error(file_name, store, registry, section="credsStore")
    return None


def _names_in_files(registry: Registry) -> list[str]:
    """Return the names under which credential files may list a registry, preferred names first."""
    names = [registry.authority, f"{registry.host}:{registry.port}"]
    if registry.host == "docker.io":
        return list(dict.fromkeys((_DOCKER_HUB_KEY, *names, *DOCKER_HUB_HOSTS)))
    return names


def _matching_keys(
    entries: Mapping[str, object], names: list[str], repository: str | None
) -> list[str]:
    """Return the keys of `entries` that apply to a repository, most specific first.

    The order is: the repository, its parent paths, the registry itself, URLs of the registry.
    `names` are the names of the registry.
    """
    parts = (repository or "").split("/")
    paths = ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]  # for `a/b`: `a/b`, `a`
    names_with_path = [f"{name}/{path}" for path in paths for name in names]
    keys = [key for key in (*names_with_path, *names) if key in entries]

    # Older keys are URLs, of which only the host is compared. A key without a scheme may be a
    # repository.
    for key in entries:
        host = re.sub(r"^https?://([^/]*).*", r"\1", key.lower()).rstrip("/")
        if key not in keys and host in names:
            keys.append(key)
    return keys


def _is_replaced(helper: object, registry: Registry) -> bool:
    """Report whether regsync's own login to the registry's cloud replaces a credential helper.

    `helper` is the helper's name without `docker-credential-`, if the file is well-formed. With an
    `auth_type`, only the source that it names is used, so that nothing is replaced.
    """
    is_helper_of_cloud = re.fullmatch(_CLOUD_HELPERS, f"{registry.kind} {helper}") is not None
    return is_helper_of_cloud and registry.auth_type is None


def _delegation_error(
    file_name: str, helper: object, registry: Registry, *, section: str
) -> AuthError:
    """Return the error for a file that names a credential helper under the key `section`."""
    shown = f"credential helper docker-credential-{printable(str(helper), 40)} ({section})"
    return AuthError(
        f"{file_name} delegates {registry.authority} to the {shown}, and regsync starts no other programs",
        hint="use auth_type: basic with credentials, or write an auths entry to a separate file and point "
        "DOCKER_CONFIG at its directory; for public images use auth_type: anonymous",
        fatal=True,
    )


def _read_entry(file_name: str, entry: object, registry: Registry) -> Credential | None:
    """Return the credential in an entry of `auths` (docs/protocol-facts.md section 3.2).

    Returns None if the entry has no secret, because docker has put the secret in a credential
    store. Raises AuthError if the entry is malformed.
    """
    # Raised for each defect alike, because the entry may contain secrets.
    broken = AuthError(
        f"{file_name}: the entry for {registry.authority} cannot be read",
        hint=_BROKEN_HINT,
        fatal=True,
    )
    if not isinstance(entry, dict):
        raise broken
    names = ("auth", "username", "password", "identitytoken", "registrytoken")
    values = [entry.get(name) or "" for name in names]
    if not all(isinstance(value, str) for value in values):
        raise broken

    auth, username, password, identity_token, registry_token = values
    if auth:  # takes precedence over the separate fields
        try:
            username, password = _decode_login("".join(auth.split()))  # `base64` breaks lines
        except ValueError:
            raise broken from None

    # Docker uses this user name if the password is an identity token.
    if username == "<token>" and not identity_token:
        identity_token = password
    if identity_token:
        password = ""  # `Credential.basic` then uses the identity token as the password
    has_secret = registry_token or identity_token or (username and password)
    if not has_secret:
        return None
    return Credential(
        username=username,
        password=password,
        identity_token=identity_token,
        registry_token=registry_token,
        found_at=file_name,
    )


def _decode_login(auth: str) -> tuple[str, str]:
    """Decode the base64 of USER:PASSWORD. Raises ValueError if it is malformed."""
    # Old versions of docker pad the text with NUL bytes.
    username, password = b64decode(auth, validate=True).decode().rstrip("\0").split(":", 1)
    if not username:
        raise ValueError("no user name")
    return username, password
