"""."""

from __future__ import annotations

import json
import math
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import anyio

from _regsync.addresses import is_loopback
from _regsync.auth.credentials import Credential, _Read, find_credential
from _regsync.config.model import Registry
from _regsync.errors import AuthError, ConfigError, SyncError

Answer = tuple[int, Mapping[str, str], bytes]  # status, lower-case headers, body


# (method, url, headers, body, seconds for all of it: none) -> answer: no redirect, no permit, a
# bounded body.
_Fetch = Callable[..., Awaitable[Answer]]


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
        """Return what logs in to a registry (None: anonymous) in docs/design.md section 3's order;
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
        # (docs/protocol-facts.md 4.3).
        place = {"google": "", "aws": registry.host.partition(".")[2]}.get(
            cloud or "", registry.authority
        )
        key = cloud, place, registry.cloud_profile, native
        return self._chains.setdefault(key, Chain(self, str(cloud), registry, not native))
