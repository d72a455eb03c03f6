"""Registry logins with this machine's cloud identity: who asks for them, how long they serve.

A cloud is first asked when a registry wants a login, and once for all registries that share it. A
broken source of an identity is an error: no other source is used instead (R8). Each cloud has a
module of its own (aws, azure, google), which is a list of sources in their order.
Follows: docs/design.md section 3, docs/protocol-facts.md section 4.3.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64decode
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import anyio

from _regsync import edge
from _regsync.addresses import is_loopback
from _regsync.auth.credentials import Credential, Pair, ReadFile, find_credential
from _regsync.config import Registry
from _regsync.errors import AuthError, ConfigError, SyncError, WireError
from _regsync.net.wire import Response, parse_retry_after
from _regsync.text import clean_beginning, printable

Found = TypeVar("Found")


# A function that sends one request to a login service, and follows no redirects. Its arguments are
# method, URL, headers, body, and the seconds of the whole exchange (None: only the connection's
# time-outs). Returns the answer, whose body has been read. Raises SyncError if there is none.
Fetch = Callable[..., Awaitable[Response]]


class Login(NamedTuple):
    """A credential that a cloud has issued for a registry."""

    credential: Credential
    expires: float  # seconds since 1970; math.inf if unknown


class Access(NamedTuple):
    """How the logins of clouds read files, and ask services."""

    read: ReadFile
    fetch: Fetch


class CloudModule(Protocol):
    """What the modules aws, azure and google have in common."""

    def is_configured(self, access: Access) -> bool:
        """Report whether an environment variable or a file configures an identity.

        No request is sent. Raises AuthError or ConfigError if a file is broken.
        """

    async def log_in(self, access: Access, registry: Registry, *, probing_metadata: bool) -> Login:
        """Log in to a registry with the first identity that this machine has.

        Raises AuthError if there is none, or if the login is refused. If `probing_metadata` is
        true, only the cloud's metadata service is asked.
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


# Asking the services of a cloud.

ATTEMPTS = 3  # the largest number of attempts for one request
_PAUSES = (1.0, 2.0)  # seconds before the second and the third attempt
_LONGEST_WAIT = 60.0  # seconds; a longer Retry-After is not waited for in full

# Matches the reasons in an error body: JSON of the clouds' services, XML of AWS's STS. A reason
# ends where its first line does, because Azure's later lines name tenants and users.
_REASONS = (
    r'(?:"(?:__type|error|code|status|error_description|message)" *: *"|<(?:code|message)>)'
    r'((?:(?! Trace ID)[^"\\<])+)'
)

_MOST_SEARCHED = 4000  # the number of characters of an error body that are searched for reasons

# Matches reasons after which the same request may succeed.
_BUSY = "Throttl|TooMany|IDPComm"

# What a metadata service may answer while it is not ready, shortly after a container's start.
_NOT_READY = (403, 404)


class Request(NamedTuple):
    """A request to a login service, and what an error about it says."""

    method: str
    url: str
    headers: list[Pair]
    body: bytes = b""
    source: str = ""  # the source of the identity: a variable, a file, a profile, a service
    hint: str = ""  # what the user can do if the service refuses
    seconds: float | None = None  # for the whole exchange; only set for a metadata service

    def __repr__(self) -> str:
        return "<Request>"


async def ask(
    access: Access,
    request: Request,
    read: Callable[[Response], Found | None],
    attempts: int = ATTEMPTS,
) -> Found:
    """Send a request to a login service, and return what `read` finds in an answer of status 200.

    A failure that may pass is repeated. Raises a fatal AuthError, which names the source of the
    identity, the service and the reason.
    """
    host = shown_host(request.url)
    place = request.source if host in request.source else f"{request.source} at {host}"
    pauses = [*_PAUSES[: attempts - 1]]
    while True:
        wait = 0.0  # seconds, by the service's Retry-After
        remedy: str | None = request.hint
        try:
            answer = await access.fetch(
                request.method, request.url, request.headers, request.body, request.seconds
            )
        except SyncError as error:
            text, code = error.message, error.code
            is_temporary = error.retryable
            if request.seconds is None:
                # It is about name servers and proxies, which metadata services do without.
                remedy = error.hint
        else:
            found = read(answer) if answer.status == 200 else None
            if found is not None:
                return found
            text = _refusal(answer)
            is_busy = answer.status == 429 or answer.status >= 500
            code = WireError.code if is_busy else AuthError.code
            is_temporary = is_busy or _may_pass(answer.status, text, request)
            wait = (
                parse_retry_after(answer.headers.get("retry-after"), edge.current().wall()) or 0.0
            )
        if not (pauses and is_temporary):
            raise AuthError(f"{place}: {text}", hint=remedy, fatal=True, code=code)
        await anyio.sleep(max(pauses.pop(0), min(wait, _LONGEST_WAIT)))


def shown_host(url: str) -> str:
    """Return the host of a URL, or of one without a scheme, for messages: a variable of the
    environment may have a login in it.
    """
    return printable(re.sub("^([^:/?#]*://)?([^/?#]*@)?|[/?#].*", "", url), 100)


def _may_pass(status: int, refusal: str, request: Request) -> bool:
    """Report whether another attempt may succeed although the status is no sign of overload."""
    if request.seconds is not None and status in _NOT_READY:
        return True
    is_incomplete = status == 200  # the body may have been cut off
    return is_incomplete or re.search(_BUSY, refusal) is not None


def _refusal(answer: Response) -> str:
    """Return the status of a useless answer, and the first two reasons that it gives."""
    text = clean_beginning(answer.body, _MOST_SEARCHED)
    name = answer.headers.get("x-amzn-errortype", "")  # AWS may name the error in a header
    reasons = [name, *re.findall(_REASONS, text, re.IGNORECASE)[:2]]
    if not any(reasons):
        # The body of a 200 is not shown, because it may hold a token in an unknown field.
        reasons = ["no usable answer" if answer.status == 200 else text]
    return printable(": ".join((f"status {answer.status}", *filter(None, reasons))), 300)


async def first_found(
    sources: Sequence[Callable[[], Awaitable[Found | str]]],
    registry: Registry,
    *,
    missing: str,
    hint: str,
) -> Found:
    """Return what the first source has that has anything.

    A source that has nothing returns the name of the place where it looked. If no source has
    anything, raises AuthError, which names what is `missing`, and all these places.
    """
    places: list[str] = []
    for source in sources:
        found = await source()
        if not isinstance(found, str):
            return found
        places.append(found)
    text = f"no {missing} for {registry.authority}; looked at {', '.join(places)}"
    raise AuthError(f"registry {registry.alias!r}: {text}", hint=hint, fatal=True)


# The logins of registries.

# The cloud of a registry's `kind` or `auth_type`. (`ecr_public` is only a kind.)
_CLOUD_OF_KIND = {
    "ecr": "aws",
    "ecr_public": "aws",
    "gar": "google",
    "gcr": "google",
    "acr": "azure",
}

# The fraction of a login's lifetime after which it is renewed.
_RENEW_AT = 0.9

# Seconds until a failed renewal is repeated, while the old login is still valid.
_RETRY_SECONDS = 60.0


class CloudLogin:
    """A registry login with a cloud identity. It is renewed before it expires.

    `probing_metadata` is true if nothing on this machine configures an identity. In this case only
    the metadata service is asked, and the absence of a login is no error until the service has
    issued one: the images may be public.
    """

    def __init__(self, log_in: Callable[..., Awaitable[Login]], *, probing_metadata: bool) -> None:
        self._log_in = log_in  # see `CloudModule`; access and registry are set
        self._probing_metadata = probing_metadata

        self.lack = ""  # why there is no login, although that is no error, and what may help
        # The current credential, which may have expired. None if there is none.
        self._credential: Credential | None = None
        self.expires = math.inf  # of the credential: seconds since 1970, by the wall clock
        # The times of the next renewal and of the credential's end, by the event loop's clock.
        self.renew_at = -math.inf
        self._valid_until = -math.inf

        # One task holds the lock and renews the login. Other tasks wait for the lock, and see by
        # `_renewals` (the number of renewals, successful or not) that they need not repeat it.
        self._lock = anyio.Lock()
        self._renewals = 0
        # The error of the last renewal, if the old credential has expired. None otherwise.
        self._error: SyncError | None = None

    async def credential(self, refused: Credential | None = None) -> Credential | None:
        """Return the current credential. Renew it first if it is due for renewal.

        Returns None if the cloud gives no login and none is required. Raises SyncError if the
        renewal failed and the old credential has expired. Concurrent callers share one renewal.

        `refused` is a credential that a registry has refused. If it is the current credential, it
        has ended.
        """
        renewals_before = self._renewals
        if refused is not None and refused == self._credential:
            self.renew_at = -math.inf
            self._valid_until = -math.inf
        if anyio.current_time() < self.renew_at:
            return self._credential

        async with self._lock:
            if self._renewals == renewals_before:
                await self._renew()
        if self._error is not None:
            raise self._error.copy_without_context()
        return self._credential

    async def _renew(self) -> None:
        """Log in again. If that fails, the old credential is kept until it expires."""
        began = anyio.current_time()
        self._error = None
        # Once the metadata service has issued a login, a missing answer is an error.
        is_probe = self._probing_metadata and self._credential is None
        try:
            self._accept(await self._log_in(probing_metadata=is_probe), began)
        except (SyncError, ConfigError) as error:
            if is_probe and error.code == AuthError.code:  # not: a service does not work
                self.lack = "; ".join(filter(None, (error.message, error.hint)))
                self.renew_at = math.inf  # until `look_again`
            elif began < self._valid_until:
                self.renew_at = began + _RETRY_SECONDS
            elif isinstance(error, ConfigError):  # a file that cannot be read
                self._error = AuthError(error.message, hint=error.hint, fatal=True)
            else:
                self._error = error
        self._renewals += 1

    def _accept(self, login: Login, began: float) -> None:
        """Store a login that was requested at time `began`, and set its renewal time."""
        self._credential = login.credential
        self.expires = login.expires
        life = login.expires - edge.current().wall()
        if not life > 0:  # or not a number
            # This machine's clock may be wrong. Use the login until a registry refuses it.
            life = math.inf
        self.renew_at = began + life * _RENEW_AT
        self._valid_until = began + life

    def look_again(self) -> None:
        """Ask the metadata service again if it has issued no login: it may have appeared."""
        if self._credential is None:
            self.renew_at = -math.inf


class Clouds:
    """All cloud logins of a run. Registries with the same login share one `CloudLogin`."""

    def __init__(self, access: Access, load_module: Callable[[str], CloudModule]) -> None:
        self._access = access
        self._load_module = load_module  # returns the module of a cloud: "aws", "azure", "google"
        self._configured: dict[str, bool] = {}  # cloud -> whether its identity is configured here
        # Keys: (cloud, _login_key(...), cloud_profile, probing_metadata).
        self._logins: dict[tuple[object, ...], CloudLogin] = {}

    def reload(self) -> None:
        """Search for identities again, because a file or a metadata service may have appeared."""
        self._configured.clear()
        for login in self._logins.values():
            login.look_again()

    def find(
        self, registry: Registry, repository: str | None, read: ReadFile
    ) -> Credential | CloudLogin | None:
        """Return the credential or the cloud login for a registry, without sending a request.

        The sources are searched in the order of docs/design.md section 3. Returns None if no source
        has a credential; then requests are sent anonymously. Raises AuthError if a source is
        unusable. `repository` is used as in `find_credential`. `read` reads a credential file.
        """
        cloud = _cloud_for(registry)
        # Without an `auth_type`, and with nothing here that configures an identity, a container
        # client's credential comes first, and then only the metadata service.
        probing_metadata = (
            cloud is not None and registry.auth_type is None and not self._is_configured(cloud)
        )
        if cloud is None or probing_metadata:
            credential = find_credential(registry, read, repository)
            if cloud is None or credential is not None:
                return credential
        key = (cloud, _login_key(cloud, registry), registry.cloud_profile, probing_metadata)
        if key not in self._logins:
            log_in = partial(self._load_module(cloud).log_in, self._access, registry)
            self._logins[key] = CloudLogin(log_in, probing_metadata=probing_metadata)
        return self._logins[key]

    def _is_configured(self, cloud: str) -> bool:
        if cloud not in self._configured:
            try:
                self._configured[cloud] = self._load_module(cloud).is_configured(self._access)
            except (AuthError, ConfigError):
                # A broken file counts as an identity. The login will then report what is wrong.
                self._configured[cloud] = True
        return self._configured[cloud]


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
