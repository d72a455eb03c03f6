"""Where the credential for one registry comes from.
Owns: the order of the sources, the files of container clients. May not know: challenges, sockets; files are arguments.
Invariant: a credential is for one host; a source that is named or broken is an error, never a reason to try another or
go anonymous; no `repr`, no message shows a secret. Follows design.md 3, protocol-facts.md 3 and 9.2 (R8, R9, R19)."""
from __future__ import annotations
import json, os, re
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote
from _regsync.config import Registry
from _regsync.errors import AuthError, ConfigError, clean
from _regsync.fields import is_loopback
Read = Callable[[str], bytes | None]
Pair = tuple[str, str]
Answer = tuple[int, Mapping[str, str], bytes]  # status, lower-case headers, body
# (method, url, headers, body, seconds for all of it: none) -> answer: no redirect, no permit, a bounded body.
Fetch = Callable[..., Awaitable[Answer]]
class Credential(NamedTuple):
    """What proves who we are at one registry, found at `origin`; equal only when the secrets are."""
    username: str = ""
    password: str = ""
    identity_token: str = ""
    registry_token: str = ""
    origin: str = "the configuration"
    def __repr__(self) -> str: return f"Credential(username={self.username!r}, origin={self.origin!r})"
    @property
    def basic(self) -> str | None:
        """The Authorization header of the Basic scheme, None where there is no such pair."""
        secret = self.password or self.identity_token
        pair = b64encode(f"{self.username}:{secret}".encode("utf-8", "surrogatepass")).decode("ascii")
        return f"Basic {pair}" if self.username and secret else None
    @property
    def secrets(self) -> tuple[str, ...]:
        return self.password, self.identity_token, self.registry_token, (self.basic or "")[6:]
class Login(NamedTuple):
    """What a cloud's identity gives; `expires` in seconds since 1970, math.inf where nobody says."""
    credential: Credential
    expires: float
class Machine(NamedTuple):
    """What a cloud's chain of credentials may take from the host; `read` gives None for a file that is not there."""
    environ: Mapping[str, str]
    home: str | None
    read: Read
    wall: Callable[[], float]
    fetch: Fetch
    def __repr__(self) -> str: return "<Machine>"  # it holds secrets
def hide(text: str, *secrets: str) -> str:
    """Take secrets out of a text that a server sent, however it writes them, and what a cut has left of them."""
    text = clean(unquote(unquote(text.replace("\\/", "/"))), len(text) + 1)
    for secret in filter(None, secrets):
        for form in map(unquote, (secret, json.dumps(secret)[1:-1], secret.lower())):
            at = text.find(form[:8])
            while at >= 0:
                end = at + len(os.path.commonprefix([form, text[at : at + len(form)]]))  # noqa: RUF071  characters
                if end == at + len(form) or text[end : end + 1] in "…\ufffd'\"%\\": text = f"{text[:at]}***{text[end:]}"
                at = text.find(form[:8], at + 1)
    return text
def json_object(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object that a text is, None for anything else."""
    try: found = json.loads(text)
    except (ValueError, RecursionError): return None
    return found if isinstance(found, dict) else None
def life_of(token: str, now: float) -> float | None:
    """Return a JWT's seconds, by its issuer's clock where it tells, as ours may be wrong; None where it does not."""
    try:
        claims = json.loads(b64decode(token.split(".")[1] + "==", "-_"))
        return float(claims["exp"]) - float(claims.get("iat", now))
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError): return None
def find_credential(registry: Registry, environ: Mapping[str, str], home: str | None, read: Read,
        repository: str | None = None) -> Credential | None:
    """Find what to log in with (None: anonymous); AuthError for a source that cannot be used, and where it looked."""
    method, where, looked = registry.auth_type, f"registry {registry.alias!r}", list[str]()
    if method == "anonymous": return None
    if method == "basic":
        return Credential(registry.username or "", registry.password or "", origin=f"credentials of {where}")
    if method == "static_token": return Credential(registry_token=registry.token or "", origin=f"token of {where}")
    if (method or registry.kind) == "ghcr":
        looked.append("the environment variable GITHUB_TOKEN")
        if token := environ.get("GITHUB_TOKEN"):
            if registry.scheme != "https" and not is_loopback(registry.host):
                raise AuthError(f"{where}: GITHUB_TOKEN is not sent over plain http", fatal=True)
            # Any user name goes with a token (protocol-facts.md section 7.1); Actions sets the real one.
            return Credential(environ.get("GITHUB_ACTOR") or "regsync", token, origin="GITHUB_TOKEN")
    for place, text in _files(environ, home, read) if method != "ghcr" else ():
        looked.append(place)
        if text is not None and (found := _look_up(place, text, registry, repository)) is not None: return found
    if method is None: return None
    hint, places = "log in with a container client, or use auth_type: basic with credentials", ", ".join(looked)
    raise AuthError(f"{where}: no credentials for {registry.authority}; looked at {places}", hint=hint, fatal=True)
def _files(environ: Mapping[str, str], home: str | None, read: Read) -> Iterator[tuple[str, bytes | None]]:
    """Yield the places of protocol-facts.md section 3.1 with what they hold, docker's before podman's."""
    def below(directory: str | None, *names: str) -> str | None:
        return os.path.join(directory, *names) if directory else None
    given = environ.get("DOCKER_AUTH_CONFIG", "").encode("utf-8", "surrogateescape")
    yield "the environment variable DOCKER_AUTH_CONFIG", given or None
    alone = f"/run/containers/{getattr(os, 'getuid', int)()}/auth.json"  # no further `containers` below it
    for path in (environ.get("REGISTRY_AUTH_FILE"),
            below(environ.get("DOCKER_CONFIG") or below(home, ".docker"), "config.json"),
            below(environ.get("XDG_RUNTIME_DIR"), "containers", "auth.json") or alone,
            below(environ.get("XDG_CONFIG_HOME") or below(home, ".config"), "containers", "auth.json"),
            below(home, ".dockercfg")):
        try:
            if path: yield path, read(path)
        except ConfigError as error: raise AuthError(error.message, fatal=True) from error
def _look_up(place: str, text: bytes, registry: Registry, repository: str | None) -> Credential | None:
    """Find a registry in one credential file (protocol-facts.md sections 3.2 to 3.4)."""
    legacy = place.endswith(".dockercfg")
    found = json_object(text)
    document = {"auths": found} if legacy else found or {}
    auths, programs = document.get("auths") or {}, document.get("credHelpers") or {}
    if found is None or not isinstance(auths, dict) or not isinstance(programs, dict):
        raise AuthError(f"{place} is not a container client's credential file", fatal=True)
    names = [registry.authority, f"{registry.host}:{registry.port}"]
    if registry.host == "docker.io":
        names = ["https://index.docker.io/v1/", *names, "index.docker.io", "registry-1.docker.io"]
    section, program = "credHelpers", next(filter(None, map(programs.get, names)), None)
    if not program:
        path = (repository or "").split("/")
        scoped = [f"{name}/{'/'.join(path[:end])}" for end in range(len(path), 0, -1) for name in names]
        keys = [key for key in (*scoped, *names) if key in auths]
        # Keys may be URLs, in the legacy file without a scheme; elsewhere a path means more than the host.
        url = r"(?:https?://)?([^/]*).*" if legacy else r"https?://([^/]*).*"
        keys += [key for key in auths if key not in keys and re.sub(url, r"\1", key.lower(), count=1) in names]
        for key in keys:
            if (credential := _read_entry(place, auths[key], registry)) is not None: return credential
        # `docker login` leaves an empty entry for what the store has; without one, it has nothing (nativeStore.Store).
        section, program = "credsStore", document.get("credsStore")
        if not program or not (keys or registry.auth_type is not None): return None
    # What a cloud's helper does, its kind's own chain does, which comes next (protocol-facts.md section 3.4).
    own = "ecr(_public)? ecr-login|g[ac]r (gcloud|gcr)|acr acr-(env|linux)"
    if registry.auth_type is None and re.fullmatch(own, f"{registry.kind} {program}"): return None
    helper = f"credential helper docker-credential-{clean(str(program), 40)} ({section})"
    raise AuthError(
        f"{place} delegates {registry.authority} to the {helper}, and this program starts no other programs",
        hint="use auth_type: basic with credentials, or write an auths entry to a separate file and point "
        "DOCKER_CONFIG at its directory; for public images use auth_type: anonymous", fatal=True)
def _read_entry(place: str, entry: object, registry: Registry) -> Credential | None:
    """Read one `auths` entry; None for the empty one that a credential store leaves behind."""
    broken = AuthError(f"{place}: the entry for {registry.authority} does not parse", fatal=True)
    names = ("auth", "username", "password", "identitytoken", "registrytoken")
    if not isinstance(entry, dict) or not all(isinstance(entry.get(name) or "", str) for name in names): raise broken
    auth, username, password, identity_token, registry_token = (entry.get(name) or "" for name in names)
    if auth:
        try: username, password = b64decode(auth, validate=True).decode().rstrip("\0").split(":", 1)  # old dockers pad
        except ValueError: raise broken from None
        if not username: raise broken
    identity_token = identity_token or (password if username == "<token>" else "")
    if not (registry_token or identity_token or (username and password)): return None
    return Credential(username, "" if identity_token else password, identity_token, registry_token, place)
