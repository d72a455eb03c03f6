"""Registry logins with this machine's cloud identity, and their renewal.

Owns: the choice of a cloud for a registry, the sharing of logins, the time of renewal.
May not know: the login procedures of the clouds (see aws, google, azure), challenges, sockets.
Invariants: a cloud is first contacted when a registry needs a login, and once for all registries
that share the login. If a configured identity is broken, no other identity is used instead (R8).
Follows: docs/design.md section 3, docs/protocol-facts.md section 4.3.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol

import anyio

from _regsync.addresses import is_loopback
from _regsync.auth.credentials import Credential, Pair, ReadFile, find_credential
from _regsync.config import Registry
from _regsync.errors import AuthError, ConfigError, SyncError


class Answer(NamedTuple):
    """The answer of a login service."""

    status: int
    headers: Mapping[str, str]  # names are lower case
    body: bytes

    def __repr__(self) -> str:
        return f"<Answer {self.status}>"  # the body may contain secrets


class Fetch(Protocol):
    """A function that sends one request to a login service and returns the answer.

    It follows no redirects, and limits the size of the answer's body. `seconds` limits the time of
    the whole exchange. `check_may_send` is called after each wait, before the request is sent. If
    it raises a SyncError, the request is not sent. Raises WireError if there is no answer.
    """

    def __call__(
        self,
        method: str,
        url: str,
        headers: list[Pair],
        body: bytes,
        seconds: float | None = None,
        check_may_send: Callable[[], None] | None = None,
    ) -> Awaitable[Answer]: ...


class Login(NamedTuple):
    """A credential that a cloud has issued for a registry."""

    credential: Credential  # its fields are empty for anonymous access
    expires: float  # seconds since 1970; math.inf if unknown


# The login of a cloud identity without rights, if the configuration does not require a login. The
# registry may allow anonymous reads.
ANONYMOUS_LOGIN = Login(Credential(), math.inf)


class CloudEnvironment(NamedTuple):
    """The parts of this machine that the cloud logins depend on."""

    environ: Mapping[str, str]
    home: str | None  # the user's home directory
    read: ReadFile
    wall: Callable[[], float]  # returns seconds since 1970
    fetch: Fetch

    def __repr__(self) -> str:
        return "<CloudEnvironment>"  # the environment variables may contain secrets


class CloudModule(Protocol):
    """The common interface of the modules aws, google and azure."""

    def is_configured(self, machine: CloudEnvironment) -> bool:
        """Report whether an environment variable or a file configures an identity.

        No request is sent. Raises AuthError or ConfigError if a file is broken.
        """

    async def log_in(
        self, machine: CloudEnvironment, registry: Registry, *, probing_metadata: bool
    ) -> Login | None:
        """Log in to a registry with the first identity that is available on this machine.

        Raises AuthError if there is no identity, or if the login is refused. If `probing_metadata`
        is true, only the cloud's metadata service is used, and the method returns None if the
        service does not answer. This is the case if nothing on this machine configures an identity.
        """


def jwt_lifetime(token: str, now: float) -> float | None:
    """Return the lifetime of a JWT in seconds. Returns None if the token has no readable `exp`.

    The lifetime is `exp` minus `iat`, which does not depend on this machine's clock. If `iat` is
    missing, `now` is used instead.
    """
    try:
        # The claims are the second of three parts. They have no padding; surplus padding is
        # ignored.
        claims = json.loads(b64decode(token.split(".")[1] + "==", "-_"))
        return float(claims["exp"]) - float(claims.get("iat", now))
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return None


# The cloud module by a registry's `kind` or `auth_type`. (`ecr_public` is only a kind.)
_CLOUD_OF_KIND = {
    "ecr": "aws",
    "ecr_public": "aws",
    "gar": "google",
    "gcr": "google",
    "acr": "azure",
}

# A login is renewed this long before it expires: the larger of a fraction of its lifetime and a
# number of seconds.
_EARLY_SHARE = 0.1
_EARLY_SECONDS = 60.0

# Seconds until a failed renewal is repeated, while the old login is still valid.
_RETRY_SECONDS = 60.0


class CloudLogin:
    """A registry login with a cloud identity. It is renewed before it expires.

    `probing_metadata` is true if nothing on this machine configures an identity. In this case only
    the metadata service is used, and the absence of a login is no error until the service has
    issued one.
    """

    def __init__(
        self, clouds: Clouds, cloud: str, registry: Registry, *, probing_metadata: bool
    ) -> None:
        self._clouds = clouds
        self._cloud = cloud  # "aws", "google" or "azure"
        self._registry = registry
        self._machine = clouds.machine
        self._probing_metadata = probing_metadata

        # The current credential, which may have expired. None before the first login, or if a
        # probed cloud does not answer.
        self._credential: Credential | None = None
        self.expires = math.inf  # of the credential: seconds since 1970, by the wall clock
        # The times of the next renewal and of the credential's end, by the event loop's clock.
        self._renew_at = -math.inf
        self._valid_until = -math.inf

        # One task holds the lock and renews the login. Other tasks wait for the lock, and see by
        # `_renewals` that the login was renewed meanwhile. All logins that probe the same metadata
        # service share one lock, so that only one of them probes it.
        self._lock = clouds.probe_locks[cloud] if probing_metadata else anyio.Lock()
        self._renewals = 0  # the number of renewals, successful or not
        # The error of the last renewal, if the old credential has expired. None otherwise.
        self._error: SyncError | None = None

    async def credential(self, refused: Credential | None = None) -> Credential | None:
        """Return the current credential. Renew it first if it is due for renewal.

        Returns None if the cloud does not answer and no login is required. Raises SyncError if the
        renewal failed and the old credential has expired. Concurrent callers share one renewal.

        `refused` is a credential that a registry has refused. If it is the current credential, it
        is renewed immediately.
        """
        renewals_before = self._renewals
        if refused is not None and refused == self._credential:
            # Treat the credential as expired.
            self._renew_at = -math.inf
            self._valid_until = -math.inf
        is_due = anyio.current_time() >= self._renew_at
        if not is_due:
            return self._credential

        async with self._lock:
            # Another task may have renewed the login while this task waited for the lock.
            if self._renewals == renewals_before:
                await self._renew()
        if self._error is not None:
            raise self._error.copy_without_context()
        return self._credential

    async def _renew(self) -> None:
        """Log in again, and set `_credential` or `_error`.

        If the login fails, the old credential is kept until it expires, and the login is repeated
        after `_RETRY_SECONDS`. If a probed metadata service does not answer, nothing is set.
        """
        began = anyio.current_time()
        self._error = None
        try:
            login = await self._log_in()
            if login is not None:
                self._set_login(login, began)
        except SyncError as error:
            if began < self._valid_until:
                self._renew_at = began + _RETRY_SECONDS
            else:
                self._error = error

        # A failure counts too, so that the waiting tasks do not repeat it.
        self._renewals += 1

    async def _log_in(self) -> Login | None:
        """Request a login from the cloud.

        Returns None if a probed metadata service does not answer. It is not probed again.
        """
        # Once the metadata service has issued a login, a missing answer is an error.
        is_probe = self._probing_metadata and self._credential is None
        if is_probe and self._cloud in self._clouds.without_metadata:
            return None
        module = self._clouds.load_module(self._cloud)
        try:
            login = await module.log_in(self._machine, self._registry, probing_metadata=is_probe)
        except ConfigError as error:
            # Fatal, because a wrong setting of this machine is not a temporary failure.
            raise AuthError(error.message, hint=error.hint, fatal=True) from None
        if login is None:
            self._clouds.without_metadata.add(self._cloud)
        return login

    def _set_login(self, login: Login, began: float) -> None:
        """Store a login that was requested at time `began`, and set its renewal time."""
        self._credential = login.credential
        self.expires = login.expires
        life = login.expires - self._machine.wall()
        if math.isnan(life) or life <= 0:
            # This machine's clock may be wrong. Use the login until a registry refuses it.
            life = math.inf
        # If the lifetime is short, use the login for at least half of it.
        time_in_use = min(life * (1 - _EARLY_SHARE), life - _EARLY_SECONDS)
        self._renew_at = began + max(time_in_use, life / 2)
        self._valid_until = began + life


class Clouds:
    """All cloud logins of a run. Registries with the same login share one `CloudLogin`."""

    def __init__(self, machine: CloudEnvironment, module: Callable[[str], CloudModule]) -> None:
        self.machine = machine
        self.load_module = module  # returns the module of a cloud: "aws", "google" or "azure"
        self.without_metadata: set[str] = set()  # clouds whose metadata service did not answer
        self._configured: dict[str, bool] = {}  # cloud -> whether its identity is configured here
        # By cloud: the lock of all logins that probe its metadata service.
        self.probe_locks = defaultdict[str, anyio.Lock](anyio.Lock)
        # Keys: (cloud, _login_key(...), cloud_profile, probing_metadata).
        self._logins: dict[tuple[object, ...], CloudLogin] = {}

    def reload(self) -> None:
        """Search for identities again, because a file or a metadata service may have appeared."""
        self.without_metadata.clear()
        self._configured.clear()

    def find(
        self, registry: Registry, repository: str | None, read: ReadFile
    ) -> Credential | CloudLogin | None:
        """Return the credential or the cloud login for a registry, without sending a request.

        The sources are searched in the order of docs/design.md section 3. Returns None if no source
        has a credential; then requests are sent anonymously. Raises AuthError if a source is
        unusable. `repository` is used as in `find_credential`. `read` reads a credential file.
        """
        cloud = _cloud_for(registry)
        if cloud is None:
            return self._find_credential(registry, repository, read)

        # True if neither `auth_type` nor this machine's settings select an identity. The machine may
        # still have an identity from its cloud, but a container client's credential comes first.
        probing_metadata = registry.auth_type is None and not self._is_configured(cloud)
        if probing_metadata:
            credential = self._find_credential(registry, repository, read)
            if credential is not None:
                return credential
        key = (cloud, _login_key(cloud, registry), registry.cloud_profile, probing_metadata)
        if key not in self._logins:
            self._logins[key] = CloudLogin(self, cloud, registry, probing_metadata=probing_metadata)
        return self._logins[key]

    def _is_configured(self, cloud: str) -> bool:
        if cloud not in self._configured:
            try:
                self._configured[cloud] = self.load_module(cloud).is_configured(self.machine)
            except (AuthError, ConfigError):
                # A broken file counts as an identity. The login will then report what is wrong.
                self._configured[cloud] = True
        return self._configured[cloud]

    def _find_credential(
        self, registry: Registry, repository: str | None, read: ReadFile
    ) -> Credential | None:
        return find_credential(registry, self.machine.environ, self.machine.home, read, repository)


def _cloud_for(registry: Registry) -> str | None:
    """Return the cloud ("aws", "google" or "azure") whose login a registry accepts.

    Returns None if it is not a cloud's registry. Returns None as well if it is reached over plain
    HTTP, unless it is on this machine: a login would be readable on the way. Raises AuthError if the
    configuration requires a cloud login there.
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
    """Return a key that is equal for all registries that can share a login
    (docs/protocol-facts.md section 4.3).
    """
    if cloud == "google":
        return ""  # a login is valid for all of Google's registries
    if cloud == "aws":
        # A login is valid for all accounts of a region. The account is the host's first label.
        return registry.host.partition(".")[2]
    return registry.authority  # Azure: a login is valid for one registry
