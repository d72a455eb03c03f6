"""The logins that clouds give to this machine's identity.

Owns: which registries a cloud's identity logs in to, when a login is renewed, who waits for it.
May not know: how a cloud logs in (see aws, google, azure), challenges, tokens, sockets.
Invariants: a cloud is asked when the first registry needs a login, and once for all registries that
share this login. An identity that is named, or broken, is never passed over for another one (R8).
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
from _regsync.auth.credentials import Credential, Pair, ReadFile, find_credential
from _regsync.config.model import Registry
from _regsync.errors import AuthError, ConfigError, SyncError


class Answer(NamedTuple):
    """The answer of a login service. Names of headers are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def __repr__(self) -> str:
        return f"<Answer {self.status}>"  # it holds secrets


class Fetch(Protocol):
    """One exchange with a login service; WireError where there is no answer.

    No redirect is followed, and the answer's body is bounded. `seconds` is for all of it. `confirm`
    is called after each wait, before anything is sent, and may refuse by raising a SyncError.
    """

    def __call__(
        self,
        method: str,
        url: str,
        headers: list[Pair],
        body: bytes,
        seconds: float | None = None,
        confirm: Callable[[], None] | None = None,
    ) -> Awaitable[Answer]: ...


class Login(NamedTuple):
    """A credential of a cloud, and its end."""

    credential: Credential
    expires: float  # seconds since 1970; math.inf where it is unknown


class CloudEnvironment(NamedTuple):
    """What a cloud's login takes from the machine that it runs on."""

    environ: Mapping[str, str]
    home: str | None
    read: ReadFile
    wall: Callable[[], float]  # seconds since 1970
    fetch: Fetch

    def __repr__(self) -> str:
        return "<CloudEnvironment>"  # it holds secrets


class CloudModule(Protocol):
    """What aws, google and azure have in common."""

    def is_configured(self, machine: CloudEnvironment) -> bool:
        """Return whether a variable or a file names an identity. No request is made.

        AuthError or ConfigError for a file that is there and broken.
        """

    async def log_in(
        self, machine: CloudEnvironment, registry: Registry, *, probing_metadata: bool
    ) -> Login | None:
        """Log in by the first identity that there is; AuthError where there is none.

        With `probing_metadata`, only the metadata service is asked; None where it does not answer.
        """


def jwt_lifetime(token: str, now: float) -> float | None:
    """Return for how many seconds a JWT serves; None where it does not say.

    Both ends are by the clock that issued it, as ours may be wrong. `now` stands in for a missing
    moment of issue.
    """
    try:
        # The middle one of three parts. Its base64 has no padding; too much padding does no harm.
        claims = json.loads(b64decode(token.split(".")[1] + "==", "-_"))
        return float(claims["exp"]) - float(claims.get("iat", now))
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return None


# By kind of registry. All but ecr_public are an `auth_type` as well.
_CLOUD_OF_KIND = {
    "ecr": "aws",
    "ecr_public": "aws",
    "gar": "google",
    "gcr": "google",
    "acr": "azure",
}

# How long before its end a login is renewed: this share of its life, and at least this many
# seconds.
_EARLY_SHARE = 0.1
_EARLY_SECONDS = 60.0

# Seconds after which a failed renewal is tried again, while the old login still serves.
_RETRY_SECONDS = 60.0


class CloudLogin:
    """The login of one identity at one cloud, renewed before its end.

    With `probing_metadata`, nothing here names an identity: only the metadata service is asked,
    until it has given a login.
    """

    def __init__(
        self, clouds: Clouds, cloud: str, registry: Registry, probing_metadata: bool
    ) -> None:
        self._clouds = clouds
        self._cloud = cloud
        self._registry = registry
        self.machine = clouds.machine
        self._probing_metadata = probing_metadata

        # The login in use; None: nobody has logged in yet, or no cloud answers.
        self._credential: Credential | None = None
        self.expires = math.inf  # seconds since 1970, by the wall clock
        # By the clock of the event loop: when to renew the login, and until when it serves.
        self._renew_at = -math.inf
        self._valid_until = -math.inf

        # One task renews the login, and all that come meanwhile wait for it at the lock. They see by
        # the count that it was renewed, and get its error where that failed. All who probe one
        # cloud's metadata service wait for one answer.
        self._lock = clouds.probe_lock(cloud) if probing_metadata else anyio.Lock()
        self._renewals = 0
        self._error: SyncError | None = None  # of the last renewal

    async def credential(self, refused: Credential | None = None) -> Credential | None:
        """Return what to log in with, renewed where it is due; None where no cloud answers. SyncError
        where the renewal failed.

        `refused` is what a registry has refused: if it is still in use, it is renewed at once. All who
        wait share one renewal.
        """
        renewals_before = self._renewals
        if refused and refused == self._credential:
            self._renew_at = -math.inf
            self._valid_until = -math.inf
        is_due = anyio.current_time() >= self._renew_at
        if not is_due:
            return self._credential

        async with self._lock:
            # Another caller may have renewed it while this one waited.
            if self._renewals == renewals_before:
                await self._renew()
        if self._error is not None:
            raise self._error.without_place()
        return self._credential

    async def _renew(self) -> None:
        """Log in anew. Where that fails, the old login stays as long as it serves; after that `_error`
        says why there is none.
        """
        began = anyio.current_time()
        self._error = None
        try:
            login = await self._log_in()
            if login is not None:
                self._set_login(login, began)
            else:
                # All logins that only probe this cloud take that for an answer.
                self._clouds.absent.add(self._cloud)
        except (ConfigError, SyncError) as error:
            still_serves = began < self._valid_until
            if still_serves:
                self._renew_at = began + _RETRY_SECONDS
            elif isinstance(error, ConfigError):
                # What is wrong with the host's settings will not pass by itself.
                self._error = AuthError(error.message, hint=error.hint, fatal=True)
            else:
                self._error = error

        # Whoever waits sees that there was an answer, whether or not it was a login.
        self._renewals += 1

    async def _log_in(self) -> Login | None:
        """Ask the cloud for a login; None where only the metadata service is probed, and does not
        answer.
        """
        # A cloud that has given a login once is there: after that, no answer is an error.
        probing = self._probing_metadata and self._credential is None
        if probing and self._cloud in self._clouds.absent:
            return None
        module = self._clouds.module(self._cloud)
        return await module.log_in(self.machine, self._registry, probing_metadata=probing)

    def _set_login(self, login: Login, began: float) -> None:
        """Take a login that was asked for at `began`, and decide when to renew it."""
        self._credential = login.credential
        self.expires = login.expires
        life = login.expires - self.machine.wall()
        if life <= 0:
            # By our clock the login has ended already. The clock may be wrong: a 401 will tell.
            life = math.inf
        # Of a short life, `_EARLY_SECONDS` may be more than there is: half of it is left then.
        time_in_use = min(life * (1 - _EARLY_SHARE), life - _EARLY_SECONDS)
        self._renew_at = began + max(time_in_use, life / 2)
        self._valid_until = began + life


class Clouds:
    """The logins of a run at clouds. Registries that share a login share its `CloudLogin`."""

    def __init__(self, machine: CloudEnvironment, module: Callable[[str], CloudModule]) -> None:
        self.machine = machine
        self.module = module
        self.absent: set[str] = set()  # clouds whose metadata service does not answer here
        self._configured: dict[str, bool] = {}  # by cloud: whether something here names an identity
        self._probe_locks: dict[str, anyio.Lock] = {}
        # By cloud, `_login_key`, profile, and whether metadata is only probed.
        self._logins: dict[tuple[object, ...], CloudLogin] = {}

    def reload(self) -> None:
        """Forget what was not found: files change, a metadata service may start after a pod."""
        self.absent.clear()
        self._configured.clear()

    def probe_lock(self, cloud: str) -> anyio.Lock:
        """Return the lock that all logins share that probe one cloud's metadata service."""
        return self._probe_locks.setdefault(cloud, anyio.Lock())

    def find(
        self, registry: Registry, repository: str | None, read: ReadFile
    ) -> Credential | CloudLogin | None:
        """Return what logs in to a registry: the first source in the order of docs/design.md section 3.
        None where there is none: requests go without a login. Nothing is asked over the network.

        AuthError for a source that cannot be used.
        """
        cloud = _cloud_for(registry)
        if cloud is None:
            return self._find_credential(registry, repository, read)

        has_identity = registry.auth_type is not None or self._is_configured(cloud)
        if not has_identity:
            credential = self._find_credential(registry, repository, read)
            if credential is not None:
                return credential
        # Where nothing names an identity, the cloud may have given one to this machine all the same.
        probing_metadata = not has_identity
        key = (cloud, _login_key(cloud, registry), registry.cloud_profile, probing_metadata)
        if key not in self._logins:
            self._logins[key] = CloudLogin(self, cloud, registry, probing_metadata)
        return self._logins[key]

    def _is_configured(self, cloud: str) -> bool:
        if cloud not in self._configured:
            try:
                self._configured[cloud] = self.module(cloud).is_configured(self.machine)
            except (AuthError, ConfigError):
                # A file that is there and broken is an identity: logging in will say what is wrong.
                self._configured[cloud] = True
        return self._configured[cloud]

    def _find_credential(
        self, registry: Registry, repository: str | None, read: ReadFile
    ) -> Credential | None:
        return find_credential(registry, self.machine.environ, self.machine.home, read, repository)


def _cloud_for(registry: Registry) -> str | None:
    """Return the cloud whose login a registry takes, None where it takes no cloud's. AuthError where the
    configuration wants a cloud's login to be sent over plain HTTP.
    """
    cloud = _CLOUD_OF_KIND.get(registry.auth_type or registry.kind)
    is_safe = registry.scheme == "https" or is_loopback(registry.host)
    if is_safe:
        return cloud
    if cloud is not None and registry.auth_type is not None:
        raise AuthError(
            f"registry {registry.alias!r}: a cloud login is not sent over plain HTTP",
            hint="write https:// in its url",
            fatal=True,
        )
    return None


def _login_key(cloud: str, registry: Registry) -> str:
    """Return a text that is the same for all registries of one login, and differs between logins
    (docs/protocol-facts.md section 4.3).
    """
    if cloud == "google":
        return ""
    if cloud == "aws":
        # A login holds for all accounts of a region, whose number stands in front of the first dot.
        return registry.host.partition(".")[2]
    return registry.authority
