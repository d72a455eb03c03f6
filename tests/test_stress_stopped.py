"""Syncs at random that are stopped at any instant, and watches through whatever comes and goes, on
a clock that jumps.

The scenes are tests/stressing.py's, half of their registries behind tokens that expire in
the middle. A run that gets a signal ends in the time that it may take, says what it did, leaves
nothing half at a target, and the next one that is left alone completes it. A watch whose registries
fail and recover, whose tags move and whose configuration changes converges once all is well, at the
cost of a cycle without news. Whatever happened, no connection is open when a program has ended.

    STOPS=1000:500 pytest tests/test_stress_stopped.py      five hundred other seeds
"""

from __future__ import annotations

import io
import json
import signal
import sys
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
from trio._core import _run

from conformance.audit.mistakes import audit, latest, report
from conformance.content.images import Image, Seed
from conformance.messages import Answer, Request, error
from conformance.registry.tokens import TokenService
from conformance.server.memory import Place
from tests.ends import Ran, Virtual, held, stopped_at, virtual
from tests.stressing import (
    NOT_YET,
    PATIENCE,
    Ill,
    Wanted,
    check_hung_up,
    ill_scene,
    places_of,
    pool,
    scene_of,
)
from tests.thinning import seeds

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time, pytest.mark.slow]

# How long a run goes on with what it has begun, after a signal.
DRAIN_SECONDS = 25.0

NUMBERS = pytest.mark.parametrize("number", seeds("STOPS", 2, 12))


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let what is ready at once go in an order of this test's number."""
    monkeypatch.setattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    _run._r.seed(number)


def lock_up(places: list[Place], random: Random) -> None:
    """Put half of the registries behind tokens that end early, and do not always say so."""
    for place in places:
        if random.random() < 0.5:
            life = random.choice([60.0, 300.0])
            told = int(life) if random.random() < 0.5 else None
            place.app.auth = TokenService(
                grants=lambda user, access: True,
                expires_in=told,
                lifetime=life,
                now=anyio.current_time,
            )


def check_outcomes(ran: Ran, places: list[Place], wanted: Wanted) -> None:
    """Every image has one end at most, and no tag at a target names what is not whole."""
    outcomes, tags = (
        [each["target"] for each in ran.images],
        sum(":" not in tag for _, _, tag in wanted),
    )
    assert len({*outcomes}) == len(outcomes), "no image has two outcomes"
    assert "INTERNAL_ERROR" not in {each["error"]["code"] for each in ran.images if each["error"]}
    assert "Traceback" not in ran.err
    assert (
        ran.report["interrupted"]
        or len(outcomes) == tags
        or any(each.endswith(":*") for each in outcomes)
    )
    for (n, to, tag), image in wanted.items():
        there = places[n].app.repositories.get(to)
        assert there is None or tag not in there.tags or held(places[n], to, image)


# In a run that completes what a stopped one has left.
@pytest.mark.provokes(*NOT_YET, "own_manifest_asked", "token_twice")
@NUMBERS
async def test_a_run_that_is_stopped_ends_in_time_and_the_next_completes_it(number, tmp_path):
    random = Random(number)
    share = random.choice([0, 0.1, 0.3])
    async with virtual(chance=random.random()) as world:
        places, wanted, file, ills = ill_scene(world, random, number, share, tmp_path, lock_up)

        async def run() -> Ran:
            with anyio.fail_after(PATIENCE):
                return await world.run("sync", "--json", "-q", "-c", str(file))

        for _ in range(random.randint(1, 3)):
            which, at = (
                random.choice([signal.SIGINT, signal.SIGTERM]),
                10 ** random.uniform(-1.5, 1.7),
            )
            again = [at + random.choice([0.1, 1, 20]) * random.uniform(0.01, 1)] * (
                random.random() < 0.3
            )
            async with stopped_at(at, *again, number=which):
                ran = await run()
            await check_hung_up(places)
            check_outcomes(ran, places, wanted)
            assert not ran.report["interrupted"] or ran.status == 128 + which
            assert ran.report["interrupted"] or ran.status in (0, 1, 2)
            if ran.seconds > at:
                assert ran.seconds < (again[0] + 0.01 if again else at + DRAIN_SECONDS + 2)
        for each in ills:
            each.on = False
        ran = await run()
        check_outcomes(ran, places, wanted)
        assert (ran.status, ran.failed) == (0, [])
        assert all(held(places[n], to, image) for (n, to, _), image in wanted.items())
        assert {*(await run()).statuses()} <= {"skipped"}
        await check_hung_up(places)


class _Times:
    """A watch in good and bad times: what its registries and its operator do."""

    def __init__(
        self, places: list[Place], random: Random, file: Path, text: str, wanted: Wanted
    ) -> None:
        self.places, self.wanted, self._random, self._file = places, wanted, random, file
        self._whole: dict[str, Any] = json.loads(text)
        self._left = Counter[Place]()

    def strict(self, request: Request) -> Answer | None:
        """Now and then ask for a pause that no run waits for."""
        if self._random.random() > 0.01:
            return None
        wait = [("Retry-After", str(self._random.choice([40, 200, 600])))]
        return error(self._random.choice([429, 503]), "TOOMANYREQUESTS", "later", headers=wait)

    def fail(self) -> None:
        self._random.choice(self.places).fail(self._random.choice(["refused", "silent"]))

    def recover(self) -> None:
        for place in self.places:
            place.recover()

    def cut(self) -> None:
        self._random.choice(self.places).reset_connections()

    def revoke(self) -> None:
        for place in self.places:
            if isinstance(auth := place.app.auth, TokenService):
                auth.revoke()

    def move(self, image: Image) -> None:
        """Let a tag name another image."""
        rule = self._random.choice(self._whole["mappings"])
        name, number = rule["from"], int(rule["source"][1:])
        app = self.places[number].app
        tag = self._random.choice(
            [tag for tag in app.repositories[name].tags if tag.startswith("t")]
        )
        image.load_into(app, name, tag=tag)
        for each in self._whole["mappings"]:
            if (each["from"], each["source"]) == (name, rule["source"]):
                self.wanted.update(
                    {(int(alias[1:]), each["to"], tag): image for alias in each["targets"]}
                )

    def write(self, *, whole: bool = False) -> None:
        """Write the configuration, or one that has only some of the mappings and other limits."""
        rules = self._whole["mappings"]
        rules = rules if whole else self._random.sample(rules, self._random.randint(0, len(rules)))
        ends = {alias: dict(each) for alias, each in self._whole["registries"].items()}
        if not whole:
            ends[self._random.choice([*ends])]["max_concurrent"] = self._random.choice([2, 5])
        self._file.write_text(json.dumps({**self._whole, "mappings": rules, "registries": ends}))

    def warm(self) -> dict[str, int]:
        """Return what a cycle without news asks for."""
        heads = 0
        read, listed = set[tuple[str, str]](), set[tuple[str, str]]()
        for rule in self._whole["mappings"]:
            source = (rule["source"], rule["from"])
            names = self.places[int(rule["source"][1:])].app.repositories[rule["from"]].tags
            selected = sum(name.startswith("t") for name in names)
            # The source is asked for each of its tags once, whichever mappings want it.
            heads += selected * len(rule["targets"]) + (0 if source in read else selected)
            read.add(source)
            if rule["tags"]["glob"] == "*":
                listed.add(source)
        return {"HEAD manifest": heads, **({"GET tag_list": len(listed)} if listed else {})}


def asked(places: list[Place]) -> Counter[str]:
    """Count what was asked so far, but for logins: a token that does not say when it ends is used
    until a 401.
    """
    entries = [each for place in places for each in place.journal.entries]
    return Counter(
        f"{each.method} {each.kind}"
        for each in entries
        if each.kind != "token" and each.status != 401
    )


def last_cycle_began() -> datetime:
    """Return when the cycle began that was the last to end: each ends with a line."""
    assert isinstance(sys.stdout, io.StringIO)
    *_, last = ["", *sys.stdout.getvalue().splitlines()]
    if not last:
        return datetime.min.replace(tzinfo=timezone.utc)
    return datetime.fromisoformat(json.loads(last)["started_at"].replace("Z", "+00:00"))


def check_cut(world: Virtual) -> None:
    """Judge what came while lines were cut: who cannot have heard an answer asks again."""
    sites = world._sites()
    findings = audit(sites, since=world._since, kinds=("protocol", "safety"), remembered=True)
    assert not findings, report(findings)
    world._since = latest(sites)


@pytest.mark.provokes(*NOT_YET)
@NUMBERS
async def test_a_watch_converges_when_all_is_well(number, tmp_path):
    random = Random(number)
    share, seed = random.choice([0, 0.1, 0.3]), Seed(number)
    images = pool(random, seed)
    async with virtual(chance=random.random()) as world:
        places, names = places_of(world, random)
        lock_up(places, random)
        text, wanted = scene_of(random, images, places, names, seed)
        # When artifacts are looked at again is the schedule's, and no part of what a cycle costs at
        # least.
        text = json.dumps({**json.loads(text), "defaults": {"artifacts": {"enabled": False}}})
        wanted = {key: image for key, image in wanted.items() if ":" not in key[2]}
        file = tmp_path / "mirror.yaml"
        file.write_text(text)
        times = _Times(places, random, file, text, wanted)
        ills = [
            Ill(place, Random(random.random()), share, random.choice([1, 3, 8])) for place in places
        ]
        for place, ill in zip(places, ills, strict=True):
            place.app.intercept = _both(times, ill)

        async def cycle() -> None:
            """Let one more cycle begin and end."""
            began = datetime.fromtimestamp(world.wall(), timezone.utc)
            with anyio.fail_after(PATIENCE):
                while last_cycle_began() < began:  # noqa: ASYNC110  (standard output sets no event)
                    await anyio.sleep(1)

        async def play() -> None:
            for _ in range(random.randint(3, 10)):
                await anyio.sleep(random.choice([0.05, 1, 10, 200]) * random.random())
                steps = [
                    times.fail,
                    times.recover,
                    times.recover,
                    times.cut,
                    times.revoke,
                    times.write,
                ]
                random.choice([*steps, lambda: times.move(random.choice(images))])()
                if random.random() < 0.3:
                    signal.raise_signal(signal.SIGHUP)
            times.recover()
            times.write(whole=True)
            for each in ills:
                each.on = False
            await anyio.sleep(600)
            await cycle()
            check_cut(world)
            await cycle()
            world.check_so_far(1)
            lacking = [
                key for key, image in wanted.items() if not held(places[key[0]], key[1], image)
            ]
            assert not lacking
            before = asked(places)
            await cycle()
            assert asked(places) - before == times.warm()
            signal.raise_signal(signal.SIGTERM)

        arguments = ("watch", "-c", str(file), "--interval", "300", "--health-port", "0", "--json")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(play)
            ran = await world.run(*arguments)
            tasks.cancel_scope.cancel()
        await check_hung_up(places)
        assert ran.status == 0
        assert "Traceback" not in ran.err
        *_, last = map(json.loads, ran.out.splitlines())
        assert {each["status"] for each in last["images"]} <= {"skipped"}


def _both(times: _Times, ill: Ill) -> Any:
    async def intercept(request: Request) -> Answer | None:
        return (times.strict(request) if ill.on else None) or await ill._intercept(request)

    return intercept
