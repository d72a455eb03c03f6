"""Who we are at one registry, and what has to be sent to it so that it lets us in. Owns: where a
credential comes from (configuration, a cloud's own identity, container clients' files), challenges,
realms, tokens. May not know: sockets, permits, how a cloud does it; files are arguments.
Invariants: a secret goes to its own registry and to a realm that `check_realm` let pass, into no
message or log (I6); a source that is named or broken is an error, never a reason to try another; a
cloud is asked when somebody has to log in, once for all. Follows design.md 3, 6, 9,
protocol-facts.md 2, 3, 4.3, 9.2 (R2, R8, R9, R18, R19)."""

from __future__ import annotations

import json
import math
import os
import re
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import unquote, urlencode, urlsplit

import anyio

from _regsync.config import Registry
from _regsync.errors import AuthError, ConfigError, RegistryError, SyncError, clean
from _regsync.fields import is_loopback
from _regsync.pacing import parse_retry_after
from _regsync.streams import Origin

_Read = Callable[[str], bytes | None]
Pair = tuple[str, str]
Answer = tuple[int, Mapping[str, str], bytes]  # status, lower-case headers, body
# (method, url, headers, body, seconds for all of it: none) -> answer: no redirect, no permit, a
# bounded body.
_Fetch = Callable[..., Awaitable[Answer]]


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


class Login(NamedTuple):
    """What a cloud's identity gives; `expires` in seconds since 1970, math.inf where nobody says."""

    credential: Credential
    expires: float


class Machine(NamedTuple):
    """What a cloud's chain of credentials may take from the host; `read` gives None for a file that
    is not there.
    """

    environ: Mapping[str, str]
    home: str | None
    read: _Read
    wall: Callable[[], float]
    fetch: _Fetch

    def __repr__(self) -> str:
        return "<Machine>"  # it holds secrets


def hide(text: str, *secrets: str) -> str:
    """Take secrets out of a text that a server sent, however it writes them, and what a cut has
    left of them.
    """
    text = clean(unquote(unquote(text.replace("\\/", "/"))), len(text) + 1)
    for secret in filter(None, secrets):
        for form in dict.fromkeys(
            map(unquote, (secret, unquote(secret), json.dumps(secret)[1:-1], secret.lower()))
        ):
            at = text.find(
                begin := form[:8]
            )  # in linear time: what has its beginning again goes wherever it begins
            while at >= 0:
                end = at + len(os.path.commonprefix([form, text[at : at + len(form)]]))  # noqa: RUF071  characters
                if (
                    begin in form[1:]
                    or end == at + len(form)
                    or text[end : end + 1] in "…\ufffd'\"%\\"
                ):
                    text = f"{text[:at]}***{text[end:]}"
                    end = at
                at = text.find(begin, max(at + 1, end - 7))
    return text


def json_object(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object that a text is, None for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def life_of(token: str, now: float) -> float | None:
    """Return a JWT's seconds, by its issuer's clock where it tells, as ours may be wrong; None
    where it does not.
    """
    try:
        claims = json.loads(b64decode(token.split(".")[1] + "==", "-_"))
        return float(claims["exp"]) - float(claims.get("iat", now))
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return None


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
            # Any user name goes with a token (protocol-facts.md section 7.1); Actions sets the real
            # one.
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
    """Yield the places of protocol-facts.md section 3.1 with what they hold, docker's before
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
    """Find a registry in one credential file (protocol-facts.md sections 3.2 to 3.4)."""
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
    # What a cloud's helper does, its kind's own chain does, which comes next (protocol-facts.md
    # section 3.4).
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


_Scopes = Mapping[
    str, str
]  # repository -> actions ("pull" or "pull,push"), the one needed now first
# design.md section 6, rule 2. Eight scopes of the longest names stay below any server's limit on a
# URL.
_MOST_REPOSITORIES = 8
_UNKNOWN_LIFE_BEFORE_BODY = 60.0
_REFRESH_AT = 0.9
# the token specification's minimum, as which shorter ones are read (protocol-facts.md 2.5)
_SHORTEST_LIFE = 60.0
# By kind, which is an `auth_type` too but for ecr_public.
_CLOUDS = {"ecr": "aws", "ecr_public": "aws", "gar": "google", "gcr": "google", "acr": "azure"}
# renewed so much of its life, and at least so many seconds, before its end
_EARLY = 0.1
_SOONEST = 60.0


class Chain:
    """One identity at one cloud; `guessed`: only its metadata service, which may have none.
    `expires`: wall clock.
    """

    def __init__(self, clouds: Clouds, cloud: str, registry: Registry, guessed: bool) -> None:
        self._clouds = clouds
        self._cloud = cloud
        self._registry = registry
        self._guessed = guessed
        self._login: Credential | None = None
        self._error: SyncError | None = None
        self._asked = 0
        self.expires = math.inf
        self._due = -math.inf
        self._end = -math.inf
        # All who guess at one cloud wait for one.
        self._lock = clouds.guesses.setdefault(cloud, anyio.Lock()) if guessed else anyio.Lock()

    async def credential(self, refused: Credential | None = None) -> Credential | None:
        """Return what to log in with, another than `refused`; None: nothing has answered. All who
        wait ask once.
        """
        asked = self._asked
        if refused and refused == self._login:
            self._due = -math.inf
        if anyio.current_time() >= self._due:
            async with self._lock:
                if asked == self._asked:
                    await self._renew(serves=refused is None)
            if self._error is not None:
                raise self._error.again()
        return self._login

    async def _renew(self, *, serves: bool) -> None:
        machine = self._clouds.machine
        began = anyio.current_time()
        guessed = self._guessed and self._login is None
        found = None
        self._error = None
        try:
            if not (guessed and self._cloud in self._clouds.absent):
                found = await self._clouds.module(self._cloud).log_in(
                    machine, self._registry, guessed=guessed
                )
        except ConfigError as error:
            self._error = AuthError(error.message, hint=error.hint, fatal=True)
        except SyncError as error:
            self._error = error
        if self._error is not None:
            if serves and began < self._end and self._due > -math.inf:
                self._error = None
                self._due = began + _SOONEST
        elif found is None:
            self._clouds.absent.add(self._cloud)
        else:
            self._login, self.expires = found
            # One that has ended already is by a clock that is wrong: a 401 will tell. A short one
            # serves half its life.
            life = self.expires - machine.wall() if self.expires > machine.wall() else math.inf
            self._end = began + life
            self._due = began + max(min(life * (1 - _EARLY), life - _SOONEST), life / 2)
        self._asked += 1


class Clouds:
    """The logins of a run at clouds, each for all registries that it holds for."""

    def __init__(self, machine: Machine, module: Callable[[str], Any]) -> None:
        self.machine = machine
        self.module = module
        self.guesses = dict[str, anyio.Lock]()
        self.absent = set[str]()
        self._chains = dict[object, Chain]()
        self._present = cache(lambda cloud: module(cloud).present(machine))

    def find(
        self, registry: Registry, repository: str | None, read: _Read
    ) -> Credential | Chain | None:
        """Return what logs in to a registry (None: anonymous) in design.md section 3's order;
        nothing is asked yet.
        """
        cloud = _CLOUDS.get(registry.auth_type or registry.kind)
        given = registry.auth_type is not None
        if cloud and registry.scheme != "https" and not is_loopback(registry.host):
            if given:
                raise AuthError(
                    f"{registry.alias}: a cloud's login is not sent over plain http", fatal=True
                )
            cloud = None
        # A file that is there and broken is an identity, of which the chain will say what is wrong.
        try:
            native = cloud is not None and (given or self._present(cloud))
        except (AuthError, ConfigError):
            native = True
        if not native:
            credential = find_credential(
                registry, self.machine.environ, self.machine.home, read, repository
            )
            if credential is not None or cloud is None:
                return credential
        # One login holds for all of Google's hosts, and for all of AWS's accounts in a region
        # (protocol-facts.md 4.3).
        place = {"google": "", "aws": registry.host.partition(".")[2]}.get(
            cloud or "", registry.authority
        )
        key = cloud, place, registry.cloud_profile, native
        return self._chains.setdefault(key, Chain(self, str(cloud), registry, not native))


class Challenge(NamedTuple):
    """One way in that a 401 offers; `scheme` is lower case, what is missing is empty."""

    scheme: str
    realm: str = ""
    service: str = ""
    scope: str = ""
    error: str = ""


# A word, and its value when `=` follows: quoted (the closing quote may be missing) or bare.
_WORD = (
    r"""(?s)([!#$%&'*+.^_`|~0-9A-Za-z-]+)(?:[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"?|([^\s,"]*)))?"""
)


def parse_challenges(values: Iterable[str]) -> list[Challenge]:
    """Read WWW-Authenticate lines as seen in the wild (protocol-facts.md 2.1): a word without `=`
    opens a challenge.
    """
    found: list[dict[str, str]] = []
    for value in values:
        inside: dict[str, str] = {}
        for word in re.finditer(_WORD, value):
            name = word.group(1).lower()
            quoted = word.group(2)
            bare = word.group(3)
            if quoted is None and bare is None:
                found.append(inside := {"scheme": name})
            else:
                inside.setdefault(
                    name, bare if quoted is None else re.sub(r"(?s)\\(.)", r"\1", quoted)
                )
    return [Challenge(*(given.get(name, "") for name in Challenge._fields)) for given in found]


# Parents below which strangers have names (protocol-facts.md section 2.7), and ends of addresses.
# Not the public suffix list; what it protects is already at the mercy of the registry that names
# the realm.
_SHARED = r"""(?x)(?:.*\.)?(?:
    amazonaws\.(?:com(?:\.cn)?|eu) | on\.aws | awsapprunner\.com | cloudfront\.net | azurecr\.(?:io|cn|us) | azure\.com
    | azurewebsites\.net | windows\.net | cloudapp\.net | (?:pkg|pages|workers|r2|fly)\.dev | googleapis\.com
    | github\.(?:io|dev) | (?:gcr|gitlab|ngrok|ocir|jfrog|nip|sslip)\.io | appspot\.com | digitaloceanspaces\.com
    | (?:run|web|vercel|netlify|ngrok|ngrok-free|railway|ondigitalocean)\.app | herokuapp\.com | onrender\.com
    | aliyuncs\.com | myqcloud\.com | oraclecloud\.com | scw\.cloud | duckdns\.org | dyndns\.org | ts\.net
    ) |  (?:ac|co|com|edu|go|gob|gov|ltd|me|mil|ne|net|nhs|nom|or|org|plc|sch)\.[a-z]{2} | [0-9.]+"""


def is_private(host: str) -> bool:
    """Say whether a host is an address, or a name for one, that a stranger must not send us to."""
    from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

    host = host.rstrip(".").lower()
    try:
        address = ip_address(host)
    except ValueError:
        # `127.1`, `2130706433` and `0x7f.1` are addresses to the resolver, whatever they name.
        return bool(
            re.fullmatch(
                r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*|localhost)|metadata\.google\.internal", host
            )
        )
    if isinstance(address, IPv6Address):
        # The IPv4 address inside: mapped, 6to4, or behind a NAT64 gateway (RFC 6052 section 2.1).
        nat64 = (
            IPv4Address(int(address) & 0xFFFFFFFF)
            if address in IPv6Network("64:ff9b::/96")
            else None
        )
        address = address.ipv4_mapped or address.sixtofour or nat64 or address
    return not address.is_global or address.is_multicast


def check_realm(realm: str, scheme: str, registry: str, has_credentials: bool) -> None:
    """Raise AuthError unless the host `registry` may send us to `realm` (protocol-facts.md section
    2.7).
    """
    hint = None
    parent = registry.partition(".")[2]
    # A realm of the same owner is below the registry's own name, or below that name's unshared
    # parent.
    kin = [registry] if re.fullmatch(_SHARED, parent) else [registry, parent]
    try:
        parts = urlsplit(realm)
        host = (parts.hostname or "").rstrip(".")
        _ = parts.port
    except ValueError:
        host = ""
    if not host or not realm.isascii() or not realm.isprintable() or " " in realm:
        trouble = "which is not a URL"
    elif "@" in parts.netloc or "#" in realm:
        trouble = "with user info or a fragment, refused"
    elif parts.scheme not in ("https", scheme):
        trouble = "which is not https"
        hint = "the registry's operator has to correct its realm"
    elif host == registry or (is_loopback(host) and is_loopback(registry)):
        return  # one machine with several ports, as in a test set-up, has several names for itself
    elif is_private(host):
        trouble = "a private address, refused"
    elif has_credentials and not any(
        "." in name and f".{host}".endswith(f".{name}") for name in kin
    ):
        trouble = "a host that may have another owner: the credentials are not sent"
        hint = "use auth_type: anonymous if the images are public"
    else:
        return
    shown = clean(realm.partition("?")[0].rpartition("@")[2], 100)
    raise AuthError(f"{registry} asks for a login at {shown!r}, {trouble}", hint=hint)


class _Token:
    def __init__(self, scopes: _Scopes, wide: bool, born: float) -> None:
        # asked for when; wide: for more than one request needed
        self.scopes = scopes
        self.wide = wide
        self.born = born
        self.value = ""
        self.done = anyio.Event()
        self.expires: float | None = None
        self.error: SyncError | None = None


def _union(*actions: str) -> str:
    # Sorted is `pull,push`: registries compare literally (protocol-facts.md section 2.2).
    return ",".join(sorted({action for text in actions for action in text.split(",")}))


def words(body: bytes) -> tuple[tuple[str, ...], str]:
    """Return an error's codes and words, in any shape of protocol-facts.md section 1.12; a page for
    people has none.
    """
    if (document := json_object(body)) is None:
        return (), "" if b"<" in body[:2000] else clean(body.decode("utf-8", "replace"), 2000)
    entries = document.get("errors")
    shapes = ("message", "error_description", "details", "error")
    told = (
        [(each.get("code"), each.get("message")) for each in entries if isinstance(each, dict)]
        if isinstance(entries, list)
        else []
    )
    told = told or [
        (
            None,
            next(
                (each for each in map(document.get, shapes) if isinstance(each, str) and each), None
            ),
        )
    ]
    said = (" ".join(text for text in pair if isinstance(text, str) and text) for pair in told)
    return tuple(code for code, _ in told if isinstance(code, str)), "; ".join(
        dict.fromkeys(filter(None, said))
    )


class Authenticator:
    """What is sent to one registry with one credential; its methods may run at once, and be
    cancelled.
    """

    def __init__(
        self,
        *,
        origin: Origin,
        credential: Credential | Chain | None,
        fetch: _Fetch,
        now: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._scheme = origin.scheme
        self._host = origin.host
        self._name = origin.authority
        self._fetch = fetch
        self._now = now
        self._wall = wall
        # How credentials get here, and what may help where the registry does not let us do what we
        # ask.
        cloud = "set auth_type (ecr, gar, acr) to see why no cloud logs in, or " * isinstance(
            credential, Chain
        )
        self.login = f"{cloud}log in with a container client (docker login {self._name}), or configure auth_type: basic"
        self.chain = credential if isinstance(credential, Chain) else None
        self._shown = deque[Credential](maxlen=512)
        self._take(
            None if isinstance(credential, Chain) else credential
        )  # `proven`: it has let a request in
        self._challenge: Challenge | None = None
        self._seen = False  # in this run; a challenge from the state may be out of date
        self._one_scope = False  # whether each request needs a token for exactly itself
        self._declared: dict[str, str] = {}
        self._worded: dict[
            Pair | None, str
        ] = {}  # the registry's words for a scope where ours fail; None: for all
        self._tokens: dict[frozenset[Pair], _Token] = {}
        self._pending: list[_Token] = []

    def _take(self, credential: Credential | None) -> None:
        self.anonymous = credential is None
        self.credential = credential or Credential()
        self.proven = False
        self._shown.append(self.credential)
        self._refresh_token = self.credential.identity_token
        self.advice = (
            f"no credentials are in use: {self.login}; or check the name, absent may look private"
            if self.anonymous
            else f"check what the credentials ({self.credential.origin}) are allowed to do there"
        )

    async def _log_in(self, refused: Credential | None = None) -> bool:
        """Hold a login that lives, another than one `refused` that was good; say whether it is
        another than before.
        """
        if self.chain is None or (refused == self.credential and not self.proven):
            return False
        before = refused or self.credential
        found = await self.chain.credential(refused)
        if (found or Credential()) != self.credential:
            self._take(found)
        return self.credential != before

    def begin(self) -> None:
        """Let another run begin: what it uses is declared anew, and the way to log in may have
        changed.
        """
        self._declared = {}
        self._seen = False

    @property
    def learnt(self) -> list[Any]:
        """What the state keeps (JSON): the challenge, and whether a token may cover one request
        only.
        """
        words = [*(self._challenge or ())]
        return [
            None if not words or "***" in self.redact(" ".join(words)) else words,
            self._one_scope,
        ]

    def recall(self, learnt: Any) -> None:
        """Take back `learnt` of an earlier run, which saves the bare request. The realm is checked
        at use.
        """
        match learnt:
            case [None | [str(), str(), str(), str(), str()] as words, bool(one_scope)]:
                # Basic over http only after this run was asked for it (protocol-facts.md section
                # 2.6).
                if words and (words[0] == "bearer" or self._scheme == "https"):
                    self._challenge = self._challenge or Challenge(*words)
                self._one_scope = self._one_scope or one_scope

    def redact(self, text: str) -> str:
        shown = (secret for each in (self.credential, *self._shown) for secret in each.secrets)
        return hide(
            text, self._refresh_token, *(token.value for token in self._tokens.values()), *shown
        )

    def conceal(self, target: str) -> None:
        """Hide what signs a URL that the registry gives us as if it were a secret of ours."""
        self._shown.extend(
            Credential(registry_token=each) for each in re.findall("=([^&]{8,2048})", target)
        )

    def declare(self, repository: str, actions: str) -> None:
        """Say that this run uses a repository; tokens will cover it as far as rule 2 allows."""
        self._declared[repository] = _union(self._declared.get(repository, actions), actions)

    async def authorization(
        self, repository: str, actions: str, extra: Iterable[Pair] = (), before_body: bool = False
    ) -> str | None:
        """Return a request's Authorization header, None: none; SyncError for no token. It touches
        `extra` as well.
        """
        challenge = self._challenge
        fixed = self.credential.registry_token
        if fixed and (challenge is not None or self._scheme == "https"):
            return f"Bearer {fixed}"
        if challenge is None:
            return None
        if challenge.scheme == "basic":
            await self._log_in()
            return self.credential.basic
        needed = {repository: actions}
        for name, rights in extra:
            needed[name] = _union(needed.get(name, rights), rights)
        try:
            return f"Bearer {await self._token(needed, before_body)}"
        except (AuthError, RegistryError) as error:
            if error.retryable or self._seen or getattr(error, "fatal", False):
                raise  # a refused password is not tried twice: accounts get locked
        self._challenge = (
            None  # the state led to a place that no longer serves: be told the way again
        )
        return None

    async def refused(
        self, challenges: Iterable[str], used: str | None, repository: str, actions: str
    ) -> bool:
        """Take in a 401 to a request that carried `used`: whether to repeat it once, AuthError if
        no use.
        """
        offered = parse_challenges(challenges)
        known = self._challenge if used is not None else None
        # Who has asked this run for tokens gets no password: a stray Basic would be repeated with
        # every request.
        settled = self._seen and known is not None and known.scheme == "bearer"
        usable = [
            each
            for each in offered
            if (each.scheme == "basic" and not settled) or (each.scheme == "bearer" and each.realm)
        ]
        # Bearer first: its tokens are narrow and short-lived, a password is neither (Quay offers
        # both).
        chosen = max(usable, key=lambda each: each.scheme == "bearer", default=known)
        if chosen is None:
            if not offered:
                return False
            schemes = clean(", ".join(each.scheme for each in offered), 60)
            raise AuthError(f"{self._name} asks for a login by {schemes}, which is not supported")
        if self.credential.registry_token:
            if used is not None:
                raise self._refusal(self._name, fatal=False)
        elif chosen.scheme == "basic":
            await self._log_in()
            if self.credential.basic is None:
                lack = (
                    "none are configured or found"
                    if self.anonymous
                    else f"{self.credential.origin} has none"
                )
                message = f"{self._name} asks for user name and password, {lack}"
                raise AuthError(message, hint=self.login, fatal=not self.anonymous)
            if used == self.credential.basic and not await self._log_in(self.credential):
                raise self._refusal(self._name)
        else:
            check_realm(chosen.realm, self._scheme, self._host, not self.anonymous)
            self._learn(chosen, used, repository, actions)
        self._challenge = chosen._replace(scope="", error="")
        self._seen = True
        return True

    def forbidden(self, used: str | None) -> bool:
        """Take in a 403 to a request that carried `used`; say whether an exact token may do better."""
        if not (used or "").startswith("Bearer ") or self.credential.registry_token:
            return False
        held = self._held_as(used)
        self._one_scope = self._one_scope or (held is not None and held.wide)
        return (
            held is None or held.wide
        )  # one no longer held was replaced because of another request's answer

    def _refusal(self, who: str, *, fatal: bool = True) -> AuthError:
        hint = "check the user name, and whether the password or token has expired or is too narrow"
        return AuthError(
            f"{who} refused the credentials ({self.credential.origin})", hint=hint, fatal=fatal
        )

    def _learn(self, given: Challenge, used: str | None, repository: str, actions: str) -> None:
        """Forget the one token that was refused, and how not to word a scope (protocol-facts.md
        2.2, 2.3).
        """
        held = self._held_as(used)
        scope = given.scope
        lacking = given.error == "insufficient_scope" and used is not None
        alien = ":" in scope and f" repository:{repository}:" not in f" {scope}"
        if scope and ":" not in scope:
            self._worded[None] = scope  # ECR Public: `aws`, whatever the repository
        elif scope and (alien or lacking):
            self._worded[repository, actions] = scope
        if held is not None:
            # Nor is an older one tried, which has ended before it: after a second 401 a request has
            # failed.
            for key, each in [*self._tokens.items()]:
                if each is held or (
                    each.born <= held.born and self._serves(each, {repository: actions})
                ):
                    self._shown.append(
                        Credential(registry_token=self._tokens.pop(key).value)
                    )  # answers may repeat it
            # "Some registries only look at the first scope": refused before its time, and not as
            # invalid.
            early = self._is_live(held, True) and given.error != "invalid_token"
            alien = alien or (held.wide and (lacking or early))
        self._one_scope = self._one_scope or alien

    def _held_as(self, used: str | None) -> _Token | None:
        return next(
            (token for token in self._tokens.values() if used == f"Bearer {token.value}"), None
        )

    def _is_live(self, token: _Token, before_body: bool) -> bool:
        if token.expires is not None:
            return self._now() < token.expires
        return not before_body or self._now() - token.born < _UNKNOWN_LIFE_BEFORE_BODY

    def _serves(self, token: _Token, needed: _Scopes) -> bool:
        held = token.scopes
        if self._one_scope:
            return held == needed
        covers = (
            name in held and _union(held[name], actions) == held[name]
            for name, actions in needed.items()
        )
        return None in self._worded or all(covers)

    async def _token(self, needed: _Scopes, before_body: bool) -> str:
        while True:
            # With one scope each there may be thousands, and only the exact one can serve.
            keys = [frozenset(needed.items())] if self._one_scope else [*self._tokens]
            held = [self._tokens[key] for key in keys if key in self._tokens] + self._pending
            able = [
                each
                for each in held
                if self._serves(each, needed) and self._is_live(each, before_body)
            ]
            youngest = max(able, key=lambda each: (bool(each.value), each.born), default=None)
            token = youngest or await self._ask(needed, before_body)
            if token.value:
                return token.value
            if not token.done.is_set():
                await token.done.wait()
            # Without value and error its asker was cancelled, or it covered too much: the first to
            # look again asks.
            if token.error is not None and self._serves(token, needed):
                raise token.error.again() from token.error

    async def _ask(self, needed: _Scopes, before_body: bool) -> _Token:
        """Ask for a token, for all who wait for it, that covers what is needed, then what this run
        will need next.
        """
        chosen = {**needed}
        if not self._one_scope and None not in self._worded:
            chosen = {
                name: _union(held, self._declared.get(name, held)) for name, held in needed.items()
            }
            live = [
                token
                for token in (*self._tokens.values(), *self._pending)
                if self._is_live(token, before_body)
            ]
            covered = {pair for token in live for pair in token.scopes.items()}
            for pair in self._declared.items():
                if len(chosen) < _MOST_REPOSITORIES and pair not in covered:
                    chosen.setdefault(*pair)
        self._pending.append(token := _Token(chosen, chosen != needed, self._now()))
        try:
            await self._log_in()
            used = self.credential
            answer = await self._exchange(token.scopes)
            if answer[0] == 401 and await self._log_in(used):
                answer = await self._exchange(token.scopes)
            # One repository may spoil it for all (ghcr: 403). Not again after a 401 to a password:
            # accounts get locked.
            spoilt = answer[0] in (400, 403, 404, 413, 414, 431) or (
                answer[0] == 401 and self.anonymous
            )
            if spoilt and token.wide:
                self._one_scope = True
            else:
                self._read(answer, token)
                kept = {
                    key: held for key, held in self._tokens.items() if self._is_live(held, False)
                }
                self._tokens = kept | {frozenset(token.scopes.items()): token}
        except SyncError as error:
            token.error = error
        finally:
            self._pending.remove(token)
            token.done.set()
        return token

    async def _exchange(self, scopes: _Scopes) -> Answer:
        """Do one token request; protocol-facts.md sections 2.3 (GET) and 2.4 (POST, identity
        tokens).
        """
        challenge = self._challenge or Challenge("bearer")
        basic = self.credential.basic
        realm = challenge.realm
        query = [("service", challenge.service)] if challenge.service else []
        check_realm(realm, self._scheme, self._host, not self.anonymous)
        worded = [
            self._worded.get(pair) or f"repository:{pair[0]}:{pair[1]}" for pair in scopes.items()
        ]
        scope = self._worded.get(None) or " ".join(worded)
        if self._refresh_token:
            form = [
                ("grant_type", "refresh_token"),
                *query,
                ("client_id", "regsync"),
                ("scope", scope),
            ]
            form.append(("refresh_token", self._refresh_token))
            kind = [("Content-Type", "application/x-www-form-urlencoded")]
            answer = await self._fetch(
                "POST", realm, kind, urlencode(form, errors="surrogatepass").encode()
            )
            # Where the POST flow is missing or half there (Artifactory 401, ACR 400), GET may do.
            if answer[0] not in (400, 401, 404, 405) or basic is None:
                return answer
        query += [("scope", word) for word in dict.fromkeys(scope.split())]
        query += [("account", self.credential.username)] if basic else []
        url = f"{realm}{'&' if '?' in realm else '?'}{urlencode(query, errors='surrogatepass')}"
        answer = await self._fetch("GET", url, [("Authorization", basic)] if basic else [], b"")
        if answer[0] == 200:
            self._refresh_token = ""  # it did: no more POSTs
        return answer

    def _read(self, answer: Answer, token: _Token) -> None:
        status, headers, body = answer
        who = f"the token service of {self._name}"
        document = json_object(body) or {}
        said = words(body)[1]
        said = clean(self.redact(clean(f": {said}" if said else "", 4**6)), 200)
        if status == 401 and not self.anonymous:
            raise self._refusal(who)
        if status in (408, 429) or status >= 500:
            wait = parse_retry_after(headers.get("retry-after"), self._wall())
            raise RegistryError(f"{who} answered {status}{said}", status=status, retry_after=wait)
        if not 200 <= status < 300:
            asked = ", ".join(
                f"{name} ({actions})" for name, actions in [*token.scopes.items()][:2]
            )
            login = (
                "without credentials"
                if self.anonymous
                else f"to the credentials from {self.credential.origin}"
            )
            message = f"{who} gives no token for {asked} {login}: status {status}{said}"
            raise AuthError(message, hint=self.advice)
        value = document.get("token") or document.get("access_token")
        if not isinstance(value, str) or not re.fullmatch(r"[\x21-\x7e]{1,65536}", value):
            raise AuthError(f"{who} answered without a usable token")
        renewed = document.get("refresh_token")
        if self._refresh_token and isinstance(renewed, str) and renewed:
            self._refresh_token = renewed
            self._shown.append(Credential(identity_token=renewed))
        life = (
            life_of(value, self._wall()) if (told := document.get("expires_in")) is None else told
        )
        try:
            token.expires = token.born + max(_SHORTEST_LIFE, float(str(life))) * _REFRESH_AT
        except ValueError:
            pass  # neither the answer nor the token says
        token.value = value
