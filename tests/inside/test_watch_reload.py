"""Watch mode: a new configuration, and what probes are told (docs/design.md section 10)."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import partial

import anyio

from _regsync.config import Registry
from _regsync.registry.runs import Transport
from conformance.registry.tokens import TokenService
from tests.ends import tags
from tests.watching import Scene, lines

# A new configuration.


async def test_logins_that_have_been_replaced_are_not_kept(world, tmp_path, clean_env, monkeypatch):
    """A rotated password makes a client of its own; months of them would be kept with their
    secrets.
    """
    users = {f"user{number}": "p" for number in range(6)}
    kept, begin = list[int](), Transport.begin_run

    def counted(self: Transport, registries: Collection[Registry]) -> None:
        begin(self, registries)
        kept.append(len(self._clients))

    def log_in(user: str) -> None:
        (clean_env / ".docker").mkdir(exist_ok=True)
        logins = {
            f"{end}.test": {"username": user, "password": "p"} for end in ("source", "target")
        }
        (clean_env / ".docker" / "config.json").write_text(json.dumps({"auths": logins}))

    monkeypatch.setattr(Transport, "begin_run", counted)
    auth = partial(TokenService, users, anonymous=False, now=anyio.current_time)
    stage = Scene(world, tmp_path, auth=auth)
    stage.load("v1")
    stage.write({"from": "app", "tags": tags("v1")})
    log_in("user0")
    ran = await stage.watch(*(partial(log_in, user) for user in [*users][1:]), None, None, None)
    assert not lines(ran, "failed ", "AUTH_ERROR")
    assert kept[-1] == 2
    assert max(kept) <= 4
