"""The logins that clouds give to this machine's identity, each asked for once and renewed.

Owns: which registries a cloud's identity logs in to, when a login is renewed, who waits for whom.
May not know: how a cloud does it (aws, google, azure), challenges, tokens, sockets.
Invariants: a cloud is asked when somebody has to log in, once for all registries that the login
holds for. An identity that is named or broken is an error, never a reason to try another (R8).
Follows: docs/design.md section 3, docs/protocol-facts.md section 4.3.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol

import anyio

from _regsync.addresses import is_loopback
from _regsync.auth.credentials import Credential, ReadFile, find_credential
from _regsync.config.model import Registry
from _regsync.errors import AuthError, ConfigError, SyncError


class Answer(NamedTuple):
    """What a login service answers; names of headers are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def __repr__(self) -> str:
        return f"<Answer {self.status}>"  # it holds secrets


# (method, url, headers, body, seconds for all of it: None) -> answer: no redirect, no permit, a
# bounded body; WireError where there is none.
Fetch = Callable[..., Awaitable[Answer]]


class Login(NamedTuple):
    """What a cloud's identity gives; `expires` in seconds since 1970, math.inf where nobody says."""

    credential: Credential
    expires: float


class CloudEnvironment(NamedTuple):
    """What a cloud's login may take from the machine it runs on."""

    environ: Mapping[str, str]
    home: str | None
    read: ReadFile
    wall: Callable[[], float]  # seconds since 1970
    fetch: Fetch

    def __repr__(self) -> str:
        return "<Machine>"  # it holds secrets


class CloudModule(Protocol):
    """What aws, google and azure have in common."""

    def is_configured(self, machine: CloudEnvironment) -> bool:
        """Ask, without a request, whether something of this machine names an identity; AuthError
        or ConfigError for a file that is there and broken.
        """

    async def log_in(
        self, machine: CloudEnvironment, registry: Registry, *, probing_metadata: bool
    ) -> Login | None:
        """Log in by the first identity there is; AuthError where there is none.

        `probing_metadata`: only by the metadata service, and None where it does not answer.
        """


def life_of(token: str, now: float) -> float | None:
    """Return a JWT's seconds, by its issuer's clock where it tells, as ours may be wrong; None
    where it does not.
    """
    try:
        claims = json.loads(b64decode(token.split(".")[1] + "==", "-_"))
        return float(claims["exp"]) - float(claims.get("iat", now))
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return None


# By kind, which is an `auth_type` too but for ecr_public.
_CLOUD_OF_KIND = {
    "ecr": "aws",
    "ecr_public": "aws",
    "gar": "google",
    "gcr": "google",
    "acr": "azure",
}

# A login is renewed so much of its life, and at least so many seconds, before its end.
_EARLY_SHARE = 0.1
_EARLY_SECONDS = 60.0

# Seconds after which a renewal that failed is tried again, while the old login lives.
_RETRY_SECONDS = 60.0


class CloudLogin:
    """One identity at one cloud: its login, renewed before its end.

    `probing_metadata`: nothing names an identity, and only the metadata service is asked until it
    has given one. `expires` is by the wall clock.
    """

    def __init__(
        self, clouds: Clouds, cloud: str, registry: Registry, probing_metadata: bool
    ) -> None:
        self._clouds = clouds
        self._cloud = cloud
        self._registry = registry
        self._probing_metadata = probing_metadata
        self._login: Credential | None = None
        self._error: SyncError | None = None
        self._renewals = 0
        self.expires = math.inf
        # By the clock of the event loop: when to ask next, and how long the login serves.
        self._renew_at = -math.inf
        self._valid_until = -math.inf
        # All who probe one cloud's metadata service wait for one answer.
        self._lock = clouds.probe_lock(cloud) if probing_metadata else anyio.Lock()

    async def credential(self, refused: Credential | None = None) -> Credential | None:
        """Return what to log in with, another than `refused`; None: nothing has answered.

        All who wait ask once. SyncError, for each of them, where that failed.
        """
        renewals = self._renewals
        if refused and refused == self._login:
            self._renew_at = -math.inf
        if anyio.current_time() >= self._renew_at:
            async with self._lock:
                if renewals == self._renewals:
                    await self._renew(may_keep_login=refused is None)
            if self._error is not None:
                raise self._error.without_place()
        return self._login

    async def _renew(self, *, may_keep_login: bool) -> None:
        began = anyio.current_time()
        self._error = None
        try:
            login = await self._ask()
        except ConfigError as error:
            failure = AuthError(error.message, hint=error.hint, fatal=True)
            self._on_failure(failure, began, may_keep_login)
        except SyncError as error:
            self._on_failure(error, began, may_keep_login)
        else:
            if login is None:
                self._clouds.absent.add(self._cloud)
            else:
                self._use(login, began)
        self._renewals += 1

    async def _ask(self) -> Login | None:
        probing = self._probing_metadata and self._login is None
        if probing and self._cloud in self._clouds.absent:
            return None
        module = self._clouds.module(self._cloud)
        return await module.log_in(self._clouds.machine, self._registry, probing_metadata=probing)

    def _on_failure(self, error: SyncError, began: float, may_keep_login: bool) -> None:
        was_refused = self._renew_at == -math.inf
        if may_keep_login and began < self._valid_until and not was_refused:
            self._renew_at = began + _RETRY_SECONDS
        else:
            self._error = error

    def _use(self, login: Login, began: float) -> None:
        self._login = login.credential
        self.expires = login.expires
        life = login.expires - self._clouds.machine.wall()
        if life <= 0:
            # It has ended already by a clock that is wrong: a 401 will tell.
            life = math.inf
        self._valid_until = began + life
        early = min(life * (1 - _EARLY_SHARE), life - _EARLY_SECONDS)
        # A short one serves half its life.
        self._renew_at = began + max(early, life / 2)


class _ConfiguredClouds:
    """At which clouds something of this machine names an identity: found out once a run."""

    def __init__(self, machine: CloudEnvironment, module: Callable[[str], CloudModule]) -> None:
        self._machine = machine
        self._module = module
        self._answers: dict[str, bool] = {}

    def get(self, cloud: str) -> bool:
        """Ask whether there is an identity at a cloud."""
        if cloud not in self._answers:
            try:
                self._answers[cloud] = self._module(cloud).is_configured(self._machine)
            except (AuthError, ConfigError):
                # A file that is there and broken is an identity: logging in will say what is wrong.
                self._answers[cloud] = True
        return self._answers[cloud]

    def reload(self) -> None:
        """Look again when somebody asks."""
        self._answers.clear()


class Clouds:
    """The logins of a run at clouds, each for all registries that it holds for."""

    def __init__(self, machine: CloudEnvironment, module: Callable[[str], CloudModule]) -> None:
        self.machine = machine
        self.module = module
        self.absent: set[str] = set()  # clouds whose metadata service does not answer here
        self._configured = _ConfiguredClouds(machine, module)
        self._probe_locks: dict[str, anyio.Lock] = {}
        self._chains: dict[object, CloudLogin] = {}

    def reload(self) -> None:
        """Let another run look again: files change, a metadata service may come later than a pod."""
        self.absent.clear()
        self._configured.reload()

    def probe_lock(self, cloud: str) -> anyio.Lock:
        """Return the lock of all who ask one cloud's metadata service."""
        return self._probe_locks.setdefault(cloud, anyio.Lock())

    def find(
        self, registry: Registry, repository: str | None, read: ReadFile
    ) -> Credential | CloudLogin | None:
        """Return what logs in to a registry (None: anonymous), in docs/design.md section 3's order.

        Nothing is asked yet. AuthError for a source that cannot be used.
        """
        cloud = _cloud_for(registry)
        if cloud is None:
            return self._find_credential(registry, repository, read)

        has_identity = registry.auth_type is not None or self._configured.get(cloud)
        if not has_identity:
            credential = self._find_credential(registry, repository, read)
            if credential is not None:
                return credential
        probing = not has_identity
        key = (cloud, _realm_of_login(cloud, registry), registry.cloud_profile, probing)
        if key not in self._chains:
            self._chains[key] = CloudLogin(self, cloud, registry, probing)
        return self._chains[key]

    def _find_credential(
        self, registry: Registry, repository: str | None, read: ReadFile
    ) -> Credential | None:
        return find_credential(registry, self.machine.environ, self.machine.home, read, repository)


def _cloud_for(registry: Registry) -> str | None:
    """Return the cloud whose identity logs in to a registry; AuthError where it must not be sent."""
    cloud = _CLOUD_OF_KIND.get(registry.auth_type or registry.kind)
    is_safe = registry.scheme == "https" or is_loopback(registry.host)
    if cloud is None or is_safe:
        return cloud
    if registry.auth_type is not None:
        raise AuthError(
            f"{registry.alias}: a cloud's login is not sent over plain http", fatal=True
        )
    return None


def _realm_of_login(cloud: str, registry: Registry) -> str:
    """Return what all registries with the same login have in common (docs/protocol-facts.md
    section 4.3).
    """
    if cloud == "google":
        return ""
    if cloud == "aws":
        # All accounts of a region: their number is in front of the first dot.
        return registry.host.partition(".")[2]
    return registry.authority
