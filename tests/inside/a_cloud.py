"""A cloud of one function, in place of AWS, Azure and Google: which login is asked for, and how often."""

from __future__ import annotations

import math

import anyio
import pytest

from _regsync.auth.cloud import CloudEnvironment, Login
from _regsync.auth.credentials import Credential
from _regsync.config import Registry
from _regsync.errors import ConfigError, SyncError
from _regsync.registry import runs

ECR = "123456789012.dkr.ecr.eu-west-1.amazonaws.com"


class Cloud:
    """A cloud's module: logins `p1`, `p2`, ... that last `life` seconds, or `given` in turn; each
    is written down.
    """

    def __init__(
        self,
        *given: Login | SyncError | ConfigError | None,
        present: bool = True,
        life: float = math.inf,
    ):
        self.given, self.here, self.life = list(given), present, life
        self.asked: list[tuple[str, bool]] = []
        self.takes = 0.0
        self.looked = 0
        self.broken: SyncError | ConfigError | None = None

    def is_configured(self, machine: CloudEnvironment) -> bool:
        self.looked += 1
        if self.broken:
            raise self.broken
        return self.here

    async def log_in(
        self, machine: CloudEnvironment, registry: Registry, *, probing_metadata: bool
    ) -> Login | None:
        self.asked.append((registry.authority, probing_metadata))
        await anyio.sleep(self.takes)
        if self.given:
            found = self.given.pop(0)
            if isinstance(found, (SyncError, ConfigError)):
                raise found
            return found
        return Login(self.credential(len(self.asked)), machine.wall() + self.life)

    @staticmethod
    def credential(number: int) -> Credential:
        return Credential("AWS", f"p{number}", found_at="a cloud of the tests")


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Cloud:
    made = Cloud()
    monkeypatch.setattr(runs, "_cloud", lambda name: made)  # in whole runs
    return made
