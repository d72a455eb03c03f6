"""Which cloud logs in where, and for how long.
Owns: the order of a cloud's own identity, the files of container clients and the metadata service; who shares a login
and when it is renewed. May not know: how any cloud does it, challenges. Invariants: nothing is asked before somebody
needs to log in; one login serves all who wait for it. Follows design.md section 3, protocol-facts.md 4.3, 5.2, 6.1."""
from __future__ import annotations
import math
from functools import cache
from typing import Any
import anyio
from _regsync.config import Registry
from _regsync.credentials import Credential, Machine, Read, find_credential
from _regsync.errors import AuthError, ConfigError, SyncError
from _regsync.fields import is_loopback
# By kind, which is an `auth_type` too but for ecr_public.
_CLOUDS = {"ecr": "aws", "ecr_public": "aws", "gar": "google", "gcr": "google", "acr": "azure"}
_EARLY, _SOONEST = 0.1, 60.0  # renewed so much of its life, and at least so many seconds, before its end
def _module(cloud: str) -> Any:
    from _regsync import aws, azure, google  # only for those who use a registry of a cloud
    return {"aws": aws, "azure": azure, "google": google}[cloud]
class Chain:
    """One identity at one cloud; `guessed`: only its metadata service, which may have none. `expires`: wall clock."""
    def __init__(self, clouds: Clouds, cloud: str, registry: Registry, guessed: bool) -> None:
        self._clouds, self._cloud, self._registry, self._guessed = clouds, cloud, registry, guessed
        self._login: Credential | None = None
        self._error: SyncError | None = None
        self._asked, self.expires, self._due, self._end = 0, math.inf, -math.inf, -math.inf
        # All who guess at one cloud wait for one.
        self._lock = clouds.guesses.setdefault(cloud, anyio.Lock()) if guessed else anyio.Lock()
    async def credential(self, refused: Credential | None = None) -> Credential | None:
        """Return what to log in with, another than `refused`; None: nothing has answered. All who wait ask once."""
        asked = self._asked
        if refused and refused == self._login: self._due = -math.inf
        if anyio.current_time() >= self._due:
            async with self._lock:
                if asked == self._asked: await self._renew(serves=refused is None)
            if self._error is not None: raise self._error.again()
        return self._login
    async def _renew(self, *, serves: bool) -> None:
        machine, began, guessed = self._clouds.machine, anyio.current_time(), self._guessed and self._login is None
        found, self._error = None, None
        try:
            if not (guessed and self._cloud in self._clouds.absent):
                found = await _module(self._cloud).log_in(machine, self._registry, guessed=guessed)
        except ConfigError as error: self._error = AuthError(error.message, hint=error.hint, fatal=True)
        except SyncError as error: self._error = error
        if self._error is not None:
            if serves and began < self._end and self._due > -math.inf: self._error, self._due = None, began + _SOONEST
        elif found is None: self._clouds.absent.add(self._cloud)
        else:
            self._login, self.expires = found
            # One that has ended already is by a clock that is wrong: a 401 will tell. A short one serves half its life.
            life = self.expires - machine.wall() if self.expires > machine.wall() else math.inf
            self._end, self._due = began + life, began + max(min(life * (1 - _EARLY), life - _SOONEST), life / 2)
        self._asked += 1
class Clouds:
    """The logins of a run at clouds, each for all registries that it holds for."""
    def __init__(self, machine: Machine) -> None:
        self.machine, self.guesses, self.absent = machine, dict[str, anyio.Lock](), set[str]()
        self._chains = dict[object, Chain]()
        self._present = cache(lambda cloud: _module(cloud).present(machine))
    def find(self, registry: Registry, repository: str | None, read: Read) -> Credential | Chain | None:
        """Return what logs in to a registry (None: anonymous) in design.md section 3's order; nothing is asked yet."""
        cloud, given = _CLOUDS.get(registry.auth_type or registry.kind), registry.auth_type is not None
        if cloud and registry.scheme != "https" and not is_loopback(registry.host):
            if given: raise AuthError(f"{registry.alias}: a cloud's login is not sent over plain http", fatal=True)
            cloud = None
        # A file that is there and broken is an identity, of which the chain will say what is wrong.
        try: native = cloud is not None and (given or self._present(cloud))
        except (AuthError, ConfigError): native = True
        if not native:
            credential = find_credential(registry, self.machine.environ, self.machine.home, read, repository)
            if credential is not None or cloud is None: return credential
        # One login holds for all of Google's hosts, and for all of AWS's accounts in a region (protocol-facts.md 4.3).
        place = {"google": "", "aws": registry.host.partition(".")[2]}.get(cloud or "", registry.authority)
        key = cloud, place, registry.cloud_profile, native
        return self._chains.setdefault(key, Chain(self, str(cloud), registry, not native))
