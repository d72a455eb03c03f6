"""Watch mode: cycle after cycle with the same clients, told only what changes (docs/design.md
section 10).
"""

from __future__ import annotations

import gc
import json
import signal
from collections import Counter
from functools import partial
from typing import Any
from unittest import mock

import anyio
import pytest

from conformance.content.images import Image
from conformance.faults.rules import Rule
from conformance.registry.app import App
from conformance.registry.tokens import TokenService
from tests.ends import Virtual, held, tags
from tests.states import entries
from tests.watching import INTERVAL, Scene, Step, lines

# What a cycle costs, and what it says.


async def test_a_cycle_without_news_costs_the_warm_bound_and_says_nothing(world, tmp_path):
    def auth() -> TokenService:
        made = TokenService(
            {"u": "p"}, expires_in=86400, lifetime=86400, anonymous=False, now=anyio.current_time
        )
        services.append(made)
        return made

    services: list[TokenService] = []
    stage = Scene(world, tmp_path, auth=auth)
    for n in range(5):
        stage.load(f"v{n}")
    who = {"auth_type": "basic", "credentials": {"username": "u", "password": "p"}}
    stage.write(
        {"from": "app", "tags": tags("v*")},
        registries={end: {"url": f"http://{end}.test", **who} for end in ("source", "target")},
    )
    tokens: list[int] = []

    def count() -> None:
        tokens.append(sum(each.requests for each in services))

    ran = await stage.watch(count, count, count)
    assert (ran.status, ran.seconds) == (0, pytest.approx(3.5 * INTERVAL, abs=1)), (
        "the signal ends the wait"
    )
    assert stage.asked[1:] == [({"GET tag_list": 1, "HEAD manifest": 5}, {"HEAD manifest": 5})] * 3
    assert tokens == [2, 2, 2]
    assert ran.out.count("\n") == ran.out.count("synced ") == 5
    assert len(lines(ran)) == 4, (
        "of the listener, of passwords that travel over http, and of the first cycle"
    )
    assert lines(ran, "info: cycle 1: Images: 5 synced, 0 skipped, 0 failed; Layers: ")


async def test_connections_that_live_are_used_again(stage):
    stage.load("v1")
    stage.write({"from": "app", "tags": tags("v1")})
    opened: list[int] = []

    def count() -> None:
        opened.append(stage.source._connections + stage.target._connections)

    await stage.watch(count, count, count)
    assert opened[0] == opened[1] == opened[2]
    assert stage.asked[1:] == [({"HEAD manifest": 1}, {"HEAD manifest": 1})] * 3


async def test_a_long_wait_keeps_no_connection_open(stage):
    stage.load("v1")
    stage.write({"from": "app", "tags": tags("v1")})
    left: list[int] = []

    def count() -> None:
        left.append(stage.source.open_connections() + stage.target.open_connections())

    await stage.watch(count, count, interval=60)
    assert left == [0, 0]


async def test_a_tag_that_moves_is_told_with_a_summary(stage):
    stage.load("v1")
    stage.write({"from": "app", "tags": tags("v1")})
    moved: list[Image] = []
    ran = await stage.watch(None, lambda: moved.append(stage.load("v1")), None)
    assert ran.out.count("synced source.test/app:v1 -> target.test/app:v1") == 2
    assert [line.partition(",")[0] for line in lines(ran, "info: cycle")] == [
        "info: cycle 1: Images: 1 synced",
        "info: cycle 3: Images: 1 synced",
    ]
    assert held(stage.target, "app", moved[0])


async def test_json_is_a_document_a_cycle_that_counts_that_cycle_only(stage):
    stage.load("v1")
    stage.write({"from": "app", "tags": tags("v1")})
    ran = await stage.watch(None, None, more=("--json",))
    first, second, third = map(json.loads, ran.out.splitlines())
    assert first["totals"]["images"]["synced"] == 1
    for cycle in (second, third):
        assert cycle["totals"]["images"] == {"synced": 0, "skipped": 1, "failed": 0}
        ends = ("source.test", "target.test")
        assert cycle["totals"]["requests"] == {end: {"manifest_head": 1} for end in ends}
    assert len({cycle["run_id"] for cycle in (first, second, third)}) == 3


async def test_a_later_failure_comes_with_its_hint_again(stage):
    stage.write({"from": "app", "tags": tags("v1")})

    def add() -> None:
        stage.write({"from": "app", "tags": tags("v1")}, {"from": "other", "tags": tags("v1")})

    ran = await stage.watch(None, add, None)
    failed = [
        line.partition(" ")[0]
        for line in ran.err.splitlines()
        if line.startswith(("failed ", "hint: "))
    ]
    assert failed == ["failed", "hint:"] * 2


async def test_a_failure_is_said_once_and_its_end_too(stage):
    stage.load("v1")
    stage.write({"from": "app", "tags": tags("v1", "v2")}, {"from": "none", "tags": tags("*")})
    ran = await stage.watch(None, None, lambda: stage.load("v2") and None, None)
    assert ran.err.count("failed source.test/app:v2") == 1
    assert ran.err.count("failed source.test/none:*") == 1
    assert ran.err.count("hint: ") == 2
    assert lines(ran, "info: no longer failing") == [
        "info: no longer failing: source.test/app -> target.test/app (1)"
    ]
    assert [line[12:13] for line in lines(ran, "info: cycle")] == ["1", "4"]


async def test_the_ends_of_two_failures_are_both_said(stage):
    """One after the other they read alike, and are two events."""
    for n in range(3):
        stage.load(f"v{n}")
    stage.write({"from": "app", "tags": tags("v*")})
    rules = [
        stage.source.app.faults.on("GET HEAD", "manifest", reference=tag).status(403).optional()
        for tag in ("v1", "v2")
    ]

    def well() -> None:
        stage.source.app.faults.rules.remove(rules.pop())

    ran = await stage.watch(well, well, None)
    told = "info: no longer failing: source.test/app -> target.test/app (1)"
    assert lines(ran, "no longer failing") == [told] * 2


async def test_images_that_fail_are_not_well_because_their_repository_cannot_be_listed(stage):
    for n in range(3):
        stage.load(f"v{n}")
    stage.write({"from": "app", "tags": tags("v*")})
    faults, rules = stage.source.app.faults, list[Rule]()
    faults.on("GET HEAD", "manifest", reference="v[12]").status(403)

    def refuse() -> None:
        rules.append(faults.on("GET", "tag_list").status(403))

    ran = await stage.watch(
        refuse, None, lambda: faults.rules.remove(rules[0]), None, faults.clear, None
    )
    failed = [line.split()[1].rpartition(":")[2] for line in lines(ran, "failed source")]
    assert (sorted(failed[:2]), failed[2:]) == (["v1", "v2"], ["*"])
    told = "info: no longer failing: source.test/app -> target.test/app"
    assert lines(ran, "no longer failing") == [f"{told} (1)", f"{told} (2)"], (
        "the listing, then the images"
    )


async def test_an_outcome_that_comes_back_or_changes_is_said_again(stage):
    stage.load("v1")
    stage.write({"from": "app", "tags": tags("v1")})
    faults = stage.source.app.faults

    def fail(status: int) -> Step:
        def again() -> None:
            faults.clear()
            faults.on("HEAD GET", "manifest").status(status)

        return again

    ran = await stage.watch(
        fail(404), None, fail(405), None, fail(403), faults.clear, fail(403), None
    )
    assert [line.partition(": ")[2][:14] for line in lines(ran, "failed ")] == [
        "SOURCE_ERROR: ",
        "SOURCE_ERROR: ",
        "AUTH_ERROR: fe",
        "AUTH_ERROR: fe",
    ]
    assert len(lines(ran, "no longer failing")) == 1


async def test_a_warning_that_repeats_is_said_once_until_it_was_gone(stage):
    stage.load("x1")
    stage.write({"from": "app", "tags": tags("v*")})
    repository = stage.source.app.repositories["app"]

    def drop() -> None:
        del repository.tags["v1"]

    ran = await stage.watch(None, lambda: stage.load("v1") and None, None, drop, None)
    assert len(lines(ran, "warning: source.test/app: the mapping selects no tag")) == 2


# Registries that are ill.


async def test_a_stopped_registry_is_tried_once_a_cycle_and_the_others_go_on(stage):
    other = stage.world.registry("other.test")
    for n in range(4):
        stage.load(f"v{n}")
        stage.seed.image().load_into(other.app, "app", tag=f"w{n}")
    stage.write(
        {"from": "app", "tags": tags("v0", "v1", "v2", "v3")},
        {"from": "app", "source": "other", "to": "other", "tags": tags("w0", "w1", "w2", "w3")},
        registries={"other": "http://other.test"},
    )
    tries: list[int] = []
    connect = stage.world.connect

    async def counted(host: str, port: int) -> Any:
        tries.append(host == "source.test")
        return await connect(host, port)

    stage.world.connect = counted  # type: ignore[method-assign]
    counts: list[int] = []

    def count() -> None:
        counts.append(sum(tries))
        tries.clear()

    ran = await stage.watch(
        lambda: stage.source.fail("refused"),
        count,
        count,
        count,
        lambda: stage.source.recover(),
        None,
        interval=600,
    )
    assert counts[0] >= 3, "it takes three to know, and some probes"
    assert counts[1:] == [1, 1]
    for asked in stage.asked[2:5]:
        assert asked == ({}, {"HEAD manifest": 8}), "both ends are asked at the same time"
    assert stage.asked[-1] == ({"HEAD manifest": 4}, {"HEAD manifest": 8})
    assert len(lines(ran, "failed source.test/app:")) == 4
    assert lines(ran, "no longer failing: source.test/app -> target.test/app (4)")


async def test_a_refused_login_costs_one_question_a_cycle(world, tmp_path):
    services: list[TokenService] = []

    def auth() -> TokenService:
        services.append(TokenService({"u": "p"}, anonymous=False, now=anyio.current_time))
        return services[-1]

    stage = Scene(world, tmp_path, auth=auth)
    for n in range(3):
        stage.load(f"v{n}")
    who = {"auth_type": "basic", "credentials": {"username": "u", "password": "p"}}
    urls = {end: {"url": f"http://{end}.test", **who} for end in ("source", "target")}
    stage.write({"from": "app", "tags": tags("v0", "v1", "v2")}, registries=urls)
    services[0].users["u"] = "q"
    asked: list[int] = []

    def count() -> None:
        asked.append(services[0].requests)

    def mend() -> None:
        services[0].users["u"] = "p"

    ran = await stage.watch(count, count, count, mend, None)
    assert asked == [1, 2, 3]
    assert len(lines(ran, "failed ", "AUTH_ERROR")) == 3
    assert ran.out.count("synced ") == 3


async def test_a_registry_that_asks_to_wait_longer_than_an_interval_is_left_alone(stage):
    image = stage.load("v1")
    stage.write({"from": "app", "tags": tags("v1")})
    stage.target.app.faults.on("POST", "upload_start").first().status(429, retry_after=1000)
    ran = await stage.watch(None, None, None, None, interval=400)
    first, second, third, fourth, fifth = [
        target.get("POST upload_start", 0) for _, target in stage.asked
    ]
    # The first start of a repository finds out alone whether it accepts any.
    assert (first, second, third, fourth, fifth) == (1, 0, 0, 3, 0)
    assert len(lines(ran, "failed ")) == 1
    assert held(stage.target, "app", image)


@pytest.mark.provokes("refused_as_wrong")
async def test_a_login_that_moved_is_found_again(world, tmp_path):
    services: list[TokenService] = []

    def auth() -> TokenService:
        services.append(
            TokenService({"u": "p"}, expires_in=60, lifetime=60, now=anyio.current_time)
        )
        return services[-1]

    stage = Scene(world, tmp_path, auth=auth)
    services[0].grants = services[1].grants = lambda user, access: True
    stage.load("v1")
    stage.write({"from": "app", "tags": tags("v1")})

    def move() -> None:
        services[0].path = "/elsewhere"

    ran = await stage.watch(None, move, None, interval=100)
    assert not lines(ran, "failed source")
    assert stage.asked[-1][0]["HEAD manifest"] >= 1
    stage.source.journal.violations.clear()


# State.


async def test_a_restart_finds_what_the_last_process_left(stage):
    stage.load("v1")
    stage.write({"from": "app", "tags": tags("v1")})
    await stage.watch(None)
    stage.source.journal.clear()
    stage.target.journal.clear()
    await stage.watch()
    assert stage.asked[-1] == ({"HEAD manifest": 1}, {"HEAD manifest": 1})


async def test_without_a_directory_the_state_lives_in_the_process(stage, tmp_path):
    for n in range(3):
        stage.load(f"v{n}")
    (tmp_path / "file").touch()
    stage.write(
        {"from": "app", "tags": tags("v*")},
        **{"global": {"cache_dir": str(tmp_path / "file" / "x")}},
    )
    ran = await stage.watch(None, None, None)
    assert stage.asked[1:] == [({"GET tag_list": 1, "HEAD manifest": 3}, {"HEAD manifest": 3})] * 3
    assert len(lines(ran, "warning: no state")) == 1


@pytest.mark.parametrize("days", [400, -400])
async def test_a_clock_that_is_wrong_for_a_while_costs_some_cycles_only(stage, days):
    """What is confirmed at another time than the state's replaces that, be it the wrong time or the
    right one.
    """
    wrong = [0.0]

    def wall() -> float:
        return Virtual.wall() + wrong[0]

    for n in range(3):
        stage.load(f"v{n}")
    stage.write({"from": "app", "tags": tags("v*")})
    with mock.patch.object(stage.world, "wall", wall):
        away, back = (
            partial(wrong.__setitem__, 0, days * 86400.0),
            partial(wrong.__setitem__, 0, 0.0),
        )
        await stage.watch(None, away, None, None, back, None, None)
    warm = {"GET tag_list": 1, "HEAD manifest": 3}, {"HEAD manifest": 3}
    assert [stage.asked[cycle] for cycle in (1, 4, 7)] == [warm] * 3


async def test_what_always_fails_leaves_no_staged_blobs_behind(stage, tmp_path):
    stage.world.listen(App(), "other.test")
    stage.write(
        {"from": "app", "tags": tags("*")},
        {"from": "none", "tags": tags("v1")},
        registries={"other": "http://other.test"},
        defaults={"targets": ["target", "other"]},
    )

    def load() -> None:
        tag = f"v{len(stage.source.app.tags('app'))}"
        stage.seed.image(sizes=(1_500_000,)).load_into(stage.source.app, "app", tag=tag)

    load()
    ran = await stage.watch(load, load, None)
    assert ran.out.count("synced ") == 6
    assert len(lines(ran, "failed source.test/none:v1")) == 2
    assert [each.name for each in (tmp_path / ".regsync" / "staged").rglob("*")] == []


# 100 and 510 minutes: no look at artifacts is due in the last cycle.
@pytest.mark.parametrize("cycles", [200, pytest.param(1020, marks=pytest.mark.thorough)])
async def test_a_thousand_cycles_leave_nothing_behind(stage, cycles):
    gc.freeze()  # what other tests have left is not counted
    stage.load("v1")
    stage.load("v2")
    stage.write({"from": "app", "tags": tags("v*")}, {"from": "none", "tags": tags("v*")})
    counts: list[Counter[str]] = []

    def count() -> None:
        gc.collect()
        ours = [each for each in gc.get_objects() if type(each).__module__.startswith("_regsync")]
        counts.append(Counter(type(each).__qualname__ for each in ours))
        inside = [value for each in ours for value in getattr(each, "__dict__", {}).values()]
        counts[-1]["items"] = sum(
            len(each) for each in inside if isinstance(each, (dict, list, set, tuple))
        )

    steps: list[Step | None] = [None] * cycles
    steps[60] = steps[-1] = count
    ran = await stage.watch(*steps, forgets=True)
    assert stage.asked == [({"GET tag_list": 2, "HEAD manifest": 2}, {"HEAD manifest": 2})]
    assert len(lines(ran)) == 4, ran.err
    early, late = counts
    # How many connections there are is the schedule's: not one for each of 140 cycles.
    growing = late.keys() - {"items"}
    assert all(late[kind] - early[kind] <= 5 for kind in growing), late - early
    assert late["items"] - early["items"] < 100
    assert (late["Transport"], late["Run"], late["Knowledge"]) == (1, 0, 0)


# Signals.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize(
    ("method", "kind", "seconds"),
    [("GET", "tag_list", 0), ("HEAD", "manifest", 0), ("PUT", "manifest", 25)],
)
async def test_a_signal_in_a_cycle_drains_it(stage, number, method, kind, seconds):
    stage.load("v1")
    stage.write({"from": "app", "tags": tags("v*")})
    for place in (stage.source, stage.target):
        place.app.faults.on(method, kind).stall().optional()

    async def stop() -> None:
        await anyio.sleep(10)
        signal.raise_signal(number)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop)
        ran = await stage.world.run("watch", "-c", str(stage.file), "--health-port", "0", "--json")
    assert ran.status == 0
    assert ran.seconds == pytest.approx(10 + seconds, abs=0.1)
    assert ran.report["interrupted"] is True
    assert not lines(ran, "failed source")
    assert "Traceback" not in ran.err


async def test_a_second_signal_ends_a_drain_and_saves_the_state(stage, tmp_path):
    stage.load("v1")
    stage.write({"from": "app", "tags": tags("v*")})
    stage.target.app.faults.on("PUT", "manifest").stall()

    async def stop() -> None:
        for _ in range(2):
            await anyio.sleep(10)
            signal.raise_signal(signal.SIGTERM)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop)
        ran = await stage.world.run("watch", "-c", str(stage.file), "--health-port", "0", "--json")
    assert (ran.status, ran.seconds) == (0, pytest.approx(20, abs=0.1))
    assert (ran.report["interrupted"], ran.images) == (True, []), (
        "also a cycle that is cut off has its line"
    )
    assert entries(tmp_path / ".regsync") > 0
