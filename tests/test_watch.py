"""Watch mode (docs/design.md section 10): cycle after cycle with the same clients, told only what
changes; a new configuration; what probes are told.
"""

from __future__ import annotations

import gc
import json
import signal
import socket
import subprocess
import urllib.request
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import pytest
from trustme import CA

from conformance.images import Image, Seed
from conformance.messages import Answer, Request
from conformance.tokens import TokenService
from tests.ends import Virtual, document, held, only, run_regsync, tags
from tests.program import started
from tests.watching import INTERVAL, Scene, Step, lines, probe

V1 = {"from": "app", "tags": tags("v1")}
ALL = {"from": "app", "tags": tags("v*")}
# What a cycle costs that finds nothing new, of one tag and of three that are listed.
QUIET = ({"HEAD manifest": 1}, {"HEAD manifest": 1})
QUIET_3 = ({"GET tag_list": 1, "HEAD manifest": 3}, {"HEAD manifest": 3})
LOGIN = {"auth_type": "basic", "credentials": {"username": "u", "password": "p"}}
URLS = {end: {"url": f"http://{end}.test", **LOGIN} for end in ("source", "target")}


def with_tokens(
    world: Virtual, directory: Path, *, users: tuple[str, ...] = ("u",), **options: Any
) -> tuple[Scene, TokenService, TokenService]:
    """Return a scene whose ends want tokens, and the services of both."""
    source, target = (
        TokenService(dict.fromkeys(users, "p"), now=anyio.current_time, **options) for _ in range(2)
    )
    return (
        Scene(world, directory, of={"source": {"auth": source}, "target": {"auth": target}}),
        source,
        target,
    )


@pytest.fixture
def single(stage: Scene) -> Scene:
    """A mirror of one tag."""
    stage.load("v1")
    stage.write(V1)
    return stage


# What a cycle costs, and what it says.


async def test_a_cycle_without_news_costs_the_warm_bound_and_says_nothing(world, tmp_path):
    day = {"expires_in": 86400, "lifetime": 86400}
    stage, *services = with_tokens(world, tmp_path, anonymous=False, **day)
    for n in range(5):
        stage.load(f"v{n}")
    stage.write(ALL, registries=URLS)
    tokens: list[int] = []

    def count() -> None:
        tokens.append(sum(each.requests for each in services))

    ran = await stage.watch(count, count, count)
    # The signal ends the wait.
    assert (ran.status, ran.seconds) == (0, pytest.approx(3.5 * INTERVAL, abs=1))
    assert stage.asked[1:] == [({"GET tag_list": 1, "HEAD manifest": 5}, {"HEAD manifest": 5})] * 3
    assert tokens == [2, 2, 2]
    assert ran.out.count("\n") == ran.out.count("synced ") == 5
    # Of the listener, of passwords that travel over http, and of the first cycle.
    assert len(lines(ran)) == 4
    assert lines(ran, "info: cycle 1: Images: 5 synced, 0 skipped, 0 failed; Layers: ")


@pytest.mark.parametrize(("interval", "is_kept"), [(30, True), (60, False)])
async def test_connections_are_used_again_unless_they_would_not_live_so_long(
    single, interval, is_kept
):
    seen: list[tuple[int, int]] = []

    def count() -> None:
        ends = (single.source, single.target)
        seen.append((sum(e._connections for e in ends), sum(e.open_connections() for e in ends)))

    await single.watch(count, count, count, interval=interval)
    opened, left = zip(*seen, strict=True)
    assert (opened[0] == opened[1] == opened[2]) is is_kept
    assert is_kept or left == (0, 0, 0)
    assert single.asked[1:] == [QUIET] * 3


async def test_a_tag_that_moves_is_told_with_a_summary(single):
    moved: list[Image] = []
    ran = await single.watch(None, lambda: moved.append(single.load("v1")), None)
    assert ran.out.count("synced source.test/app:v1 -> target.test/app:v1") == 2
    assert [line.partition(",")[0] for line in lines(ran, "info: cycle")] == [
        "info: cycle 1: Images: 1 synced",
        "info: cycle 3: Images: 1 synced",
    ]
    assert held(single.target, "app", moved[0])


async def test_json_is_a_document_a_cycle_that_counts_that_cycle_only(single):
    ran = await single.watch(None, None, more=("--json",))
    first, *others = map(json.loads, ran.out.splitlines())
    assert first["totals"]["images"]["synced"] == 1
    assert len(others) == 2
    for cycle in others:
        assert cycle["totals"]["images"] == {"synced": 0, "skipped": 1, "failed": 0}
        ends = ("source.test", "target.test")
        assert cycle["totals"]["requests"] == {end: {"manifest_head": 1} for end in ends}
    assert len({cycle["run_id"] for cycle in (first, *others)}) == 3


# What fails is told once.


async def test_an_outcome_that_comes_back_or_changes_is_said_again(single):
    faults = single.source.app.faults

    def fail(status: int) -> Step:
        def again() -> None:
            faults.clear()
            faults.on("HEAD GET", "manifest").status(status)

        return again

    ran = await single.watch(
        fail(404), None, fail(405), None, fail(403), faults.clear, fail(403), None
    )
    codes = [line.partition(": ")[2].partition(":")[0] for line in lines(ran, "failed ")]
    assert codes == ["SOURCE_ERROR", "SOURCE_ERROR", "AUTH_ERROR", "AUTH_ERROR"]


async def test_a_warning_that_repeats_is_said_once_until_it_was_gone(stage):
    stage.load("x1")
    stage.write(ALL)
    drop = partial(stage.source.app.repositories["app"].tags.pop, "v1")
    ran = await stage.watch(None, lambda: stage.load("v1"), None, drop, None)
    assert len(lines(ran, "warning: source.test/app: no tag is selected")) == 2


# Registries that are ill.


async def test_a_stopped_registry_is_tried_once_a_cycle_and_the_others_go_on(stage, world):
    other = world.registry("other.test")
    for n in range(4):
        stage.load(f"v{n}")
        stage.seed.image().load_into(other.app, "app", f"w{n}")
    stage.write(
        {"from": "app", "tags": tags("v0", "v1", "v2", "v3")},
        {"from": "app", "source": "other", "to": "other", "tags": tags("w0", "w1", "w2", "w3")},
        registries={"other": other},
    )
    tries: list[str] = []
    counts: list[int] = []
    connect = world.connect

    async def counted(host: str, port: int) -> Any:
        tries.append(host)
        return await connect(host, port)

    def count() -> None:
        counts.append(tries.count("source.test"))
        tries.clear()

    world.connect = counted
    fail, recover = partial(stage.source.fail, "refused"), stage.source.recover
    ran = await stage.watch(fail, count, count, count, recover, None, interval=600)
    assert counts[0] >= 3, "it takes three to know, and some probes"
    assert counts[1:] == [1, 1]
    assert stage.asked[2:5] == [({}, {"HEAD manifest": 8})] * 3, "both ends are asked at once"
    assert stage.asked[-1] == ({"HEAD manifest": 4}, {"HEAD manifest": 8})
    assert len(lines(ran, "failed source.test/app:")) == 4


async def test_what_fails_at_the_end_of_a_cycle_ends_no_later_one(stage):
    """Nobody waits for a session that could not be given up, and the next cycle is an interval later."""
    image = stage.load("v1")
    stage.write(V1)
    stage.source.app.faults.on("GET", "blob").first(3).status(404)
    stage.target.app.faults.on("DELETE", "upload").drop()
    ran = await stage.watch(None, interval=600)
    assert "404" in only(lines(ran, "failed "))
    assert held(stage.target, "app", image)


async def test_a_blob_that_was_not_given_ends_no_later_cycle_at_its_first_lost_answer(stage):
    """Nothing came after it that could have shown whether its registry was away."""
    image = stage.load("v1")
    stage.write(V1)
    faults = stage.source.app.faults
    faults.on("GET", "blob", reference=[*image.blobs][-1]).status(503)

    def recover() -> None:
        faults.clear()
        faults.on(kind="manifest").first().drop()

    ran = await stage.watch(recover, interval=600)
    assert "waited for 2m00s" in only(lines(ran, "failed "))
    assert held(stage.target, "app", image)


async def test_a_refused_login_costs_one_question_a_cycle(world, tmp_path):
    stage, service, _ = with_tokens(world, tmp_path, anonymous=False)
    for n in range(3):
        stage.load(f"v{n}")
    stage.write({"from": "app", "tags": tags("v0", "v1", "v2")}, registries=URLS)
    asked: list[int] = []

    def count() -> None:
        asked.append(service.requests)

    service.users["u"] = "q"
    ran = await stage.watch(count, count, count, partial(service.users.update, u="p"), None)
    assert asked == [1, 2, 3]
    assert len(lines(ran, "failed ", "AUTH_ERROR")) == 3
    assert ran.out.count("synced ") == 3


async def test_a_right_that_was_given_counts_in_the_next_cycle(world, tmp_path):
    """A token without it would live for another hour."""
    stage, _, service = with_tokens(world, tmp_path, anonymous=False, expires_in=3600)
    image = stage.load("v1")
    stage.write(V1, registries=URLS)
    rights = {"pull"}
    service.grants = lambda user, access: access.action in rights
    await stage.watch(None, partial(rights.add, "push"), None)
    assert held(stage.target, "app", image)


async def test_a_registry_that_asks_to_wait_longer_than_an_interval_is_left_alone(stage):
    image = stage.load("v1")
    stage.write(V1)
    stage.target.app.faults.on("POST", "upload_start").first().status(429, retry_after=1000)
    ran = await stage.watch(None, None, None, None, interval=400)
    # The first start of a repository finds out alone whether it accepts any.
    assert [target.get("POST upload_start", 0) for _, target in stage.asked] == [1, 0, 0, 3, 0]
    assert len(lines(ran, "failed ")) == 1
    assert held(stage.target, "app", image)


# State, and what a process of months keeps.


async def test_a_restart_finds_what_the_last_process_left(single):
    await single.watch(None)
    single.clear()
    await single.watch()
    assert single.asked[-1] == QUIET


async def test_without_a_directory_the_state_lives_in_the_process(stage, tmp_path):
    for n in range(3):
        stage.load(f"v{n}")
    (tmp_path / "file").touch()
    stage.write(ALL, **{"global": {"cache_dir": str(tmp_path / "file" / "x")}})
    ran = await stage.watch(None, None, None)
    assert stage.asked[1:] == [QUIET_3] * 3
    assert len(lines(ran, "warning: no state")) == 1
    assert len(lines(ran, "hint: set `cache_dir`")) == 1


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
    stage.write(ALL)
    away = partial(wrong.__setitem__, 0, days * 86400.0)
    back = partial(wrong.__setitem__, 0, 0.0)
    with mock.patch.object(stage.world, "wall", wall):
        await stage.watch(None, away, None, None, back, None, None)
    assert [stage.asked[cycle] for cycle in (1, 4, 7)] == [QUIET_3] * 3


async def test_what_always_fails_leaves_no_staged_blobs_behind(stage, world, tmp_path):
    stage.write(
        {"from": "app", "tags": tags("*")},
        {"from": "none", "tags": tags("v1")},
        registries={"other": world.registry("other.test")},
        defaults={"targets": ["target", "other"]},
    )
    made = [stage.seed.image(sizes=(1_500_000,)) for _ in range(3)]

    def load() -> None:
        stage.push(f"v{len(made)}", made.pop())

    load()
    ran = await stage.watch(load, load, None)
    assert ran.out.count("synced ") == 6
    assert len(lines(ran, "failed source.test/none:v1")) == 2
    assert [each.name for each in (tmp_path / ".regsync" / "staged").rglob("*")] == []


def count_objects() -> Counter[str]:
    """Count the program's objects by their classes, and `items` of what they hold."""
    gc.collect()
    ours = [each for each in gc.get_objects() if type(each).__module__.startswith("_regsync")]
    inside = [value for each in ours for value in getattr(each, "__dict__", {}).values()]
    counts = Counter(type(each).__qualname__ for each in ours)
    counts["items"] = sum(
        len(each) for each in inside if isinstance(each, (dict, list, set, tuple))
    )
    return counts


def check_growth(early: Counter[str], late: Counter[str]) -> None:
    """How many connections there are is the schedule's: not one for each cycle."""
    grown = {kind: late[kind] - early[kind] for kind in late}
    assert grown.pop("items") < 100
    assert max(grown.values()) <= 5, grown


# 100 and 510 minutes: no look at artifacts is due in the last cycle.
@pytest.mark.parametrize("cycles", [200, pytest.param(1020, marks=pytest.mark.thorough)])
async def test_a_thousand_cycles_leave_nothing_behind(stage, cycles):
    gc.freeze()  # what other tests have left is not counted
    stage.load("v1")
    stage.load("v2")
    stage.write(ALL, {"from": "none", "tags": tags("v*")})
    counts: list[Counter[str]] = []
    steps: list[Step | None] = [None] * cycles
    steps[60] = steps[-1] = lambda: counts.append(count_objects())
    ran = await stage.watch(*steps, forgets=True)
    assert stage.asked == [({"GET tag_list": 2, "HEAD manifest": 2}, {"HEAD manifest": 2})]
    assert len(lines(ran)) == 3 + len(lines(ran, "info: cycle ")), ran.err
    check_growth(*counts)


def log_in(home: Path, user: str, password: str) -> None:
    """Write docker's login file."""
    login = {"username": user, "password": password}
    (home / ".docker").mkdir(exist_ok=True)
    auths = {f"{end}.test": login for end in ("source", "target")}
    (home / ".docker" / "config.json").write_text(json.dumps({"auths": auths}))


async def test_logins_that_have_been_replaced_are_not_kept(world, tmp_path, clean_env):
    """A rotated password makes a client of its own; months of them would be kept with their
    secrets.
    """
    gc.freeze()
    users = tuple(f"user{n}" for n in range(30))
    stage, *_ = with_tokens(world, tmp_path, users=users, anonymous=False)
    stage.load("v1")
    stage.write(V1)
    counts: list[Counter[str]] = []

    def rotate(user: str) -> None:
        counts.append(count_objects())
        log_in(clean_env, user, "p")

    log_in(clean_env, users[0], "p")
    ran = await stage.watch(*(partial(rotate, user) for user in users[1:]))
    assert not lines(ran, "failed ", "AUTH_ERROR")
    check_growth(counts[9], counts[-1])


# A new configuration.


async def test_a_changed_file_is_taken_before_the_next_cycle(stage, world):
    for name in ("one", "two"):
        stage.load("v1", name)
    world.registry("third.test")
    one, two = ({"from": name, "tags": tags("v1")} for name in ("one", "two"))
    stage.write(one)

    def change() -> None:
        third = {"third": "http://third.test"}
        stage.write(two, {**one, "to": "1"}, registries=third, **{"global": {"cache_ttl": "1h"}})

    def again() -> None:
        stage.write({"from": "two", "tags": tags("v1", "v2")})

    ran = await stage.watch(change, again, None)
    told = [f"info: now in force: {count} mappings" for count in (2, 1)]
    assert lines(ran, "now in force") == told
    assert {*stage.target.app.repositories} == {"one", "two", "1"}


async def test_clients_of_registries_that_stay_the_same_are_kept(single):
    opened: list[tuple[int, int]] = []

    def count() -> None:
        opened.append((single.source._connections, single.target._connections))

    def change() -> None:
        count()
        single.write(V1, registries={"target": {"url": "http://target.test", "max_concurrent": 7}})

    await single.watch(change, count, count)
    (source, target), *rest = opened
    assert rest == [(source, target + 1)] * 2, "the changed one has a new connection, once"


async def test_a_changed_limit_holds_from_the_next_cycle_on(single):
    at_once = most = 0

    async def intercept(request: Request) -> Answer | None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await anyio.sleep(0.1)
        at_once -= 1
        return None

    def change() -> None:
        for number in range(2, 6):
            single.load(f"v{number}")
        single.write(ALL, registries={"target": {"url": "http://target.test", "max_concurrent": 3}})
        single.target.app.intercept = intercept

    single.write(ALL, registries={"target": {"url": "http://target.test", "max_concurrent": 1}})
    await single.watch(change)
    assert most == 3
    single.target.journal.matching("PUT", "manifest").exactly(5)


async def test_a_shard_of_a_new_file_is_that_of_the_new_file(stage, tmp_path):
    for name in "abcd":
        stage.load("v1", name)
    rules = [{"from": name, "tags": tags("v1")} for name in "abcd"]
    stage.write(*rules[:2])
    ran = await stage.watch(lambda: stage.write(*rules), None, more=("--shard", "1/2"))
    assert ran.status == 0
    assert {*stage.target.app.repositories} == {"b", "d"}
    told = [line.partition(": ")[2] for line in lines(ran, ": shard ")]
    assert told == ["shard 1 of 2: 1 of 2 mappings", "shard 1 of 2: 2 of 4 mappings"]
    assert (tmp_path / ".regsync" / "shard-1-of-2" / "state.db").exists()


# Three cycles count as one: the last one's look at artifacts is a second question.
async def test_a_hang_up_in_a_cycle_lets_the_next_follow_at_once(single):
    single.source.app.faults.on("GET", "manifest").first().delay(50)

    async def hang_up() -> None:
        signal.raise_signal(signal.SIGHUP)
        await anyio.sleep(40)
        single.source.journal.matching("HEAD", "manifest").exactly(1)  # of the second cycle

    await single.watch(hang_up, interval=60)


async def test_a_mounted_configuration_is_swapped_by_its_link(stage, tmp_path):
    """As Kubernetes does it: the file is a link into a directory that is a link, which is replaced."""
    stage.load("v1", "one")
    image = stage.load("v1", "two")
    for name in ("one", "two"):
        (tmp_path / f"..{name}").mkdir()
        text = stage.text({"from": name, "tags": tags("v1")})
        (tmp_path / f"..{name}" / "mirror.yaml").write_text(text)
    (tmp_path / "..data").symlink_to("..one")
    stage.file.symlink_to("..data/mirror.yaml")

    def swap() -> None:
        (tmp_path / "..new").symlink_to("..two")
        (tmp_path / "..new").rename(tmp_path / "..data")

    ran = await stage.watch(swap, None)
    assert held(stage.target, "two", image)
    assert len(lines(ran, "now in force")) == 1
    assert (tmp_path / ".regsync" / "state.db").exists()


def contents(file: Path, texts: list[str | None], errors: list[str | None]) -> list[Step]:
    """Return steps that ask for the error of the last reload, and give a file its next text; None:
    it is gone.
    """

    def replace(text: str | None) -> None:
        status, body = probe("/readyz")
        assert (status, body["status"]) == (200, "ready")
        errors.append(body["reload_error"])
        if text is None:
            file.unlink()
        else:
            file.write_text(text)

    return [partial(replace, text) for text in texts]


async def test_a_file_that_cannot_be_used_leaves_the_last_good_one_in_force(single):
    good = single.file.read_text()
    bad = "mappings: []\ndefaults:\n  sorce: x\nregistres: {}\n"
    errors: list[str | None] = []
    ran = await single.watch(*contents(single.file, [bad, bad, None, good, good], errors))
    assert single.asked[1:] == [QUIET] * 5
    assert len(lines(ran, "error: CONFIG_ERROR: ", "mirror.yaml:3:3", "stays in force")) == 1
    assert len(lines(ran, "mirror.yaml:4:1")) == 1
    assert len(lines(ran, "mirror.yaml", "No such file")) == 1
    assert len(lines(ran, "now in force")) == 1
    # The second one also where nothing has changed.
    words = (None, "mirror.yaml:3:3", "mirror.yaml:3:3", "No such file", None)
    for error, word in zip(errors, words, strict=True):
        assert error is None if word is None else word in str(error)


async def test_an_empty_file_after_a_wrong_one_is_told(single):
    steps = contents(single.file, ["- x\n", ""], [])
    ran = await single.watch(*steps, more=("--log-format", "json"))
    told = map(json.loads, ran.err.splitlines())
    wrong = [each for each in told if each["event"] == "reload_failed"]
    assert len(wrong) == len({each["message"] for each in wrong}) == 2
    assert all(each["code"] == "CONFIG_ERROR" and "hint" in each for each in wrong)


async def test_a_named_file_that_is_gone_is_as_if_it_were_there(stage, world, tmp_path):
    """It is told once, and so is the shard."""
    stage.load("v1")
    authority = tmp_path / "ca.pem"
    CA().cert_pem.write_to_path(str(authority))
    world.listen(stage.source.app, "source.test", scheme="https")
    secure = {"url": "https://source.test", "ca_file": str(authority)}
    stage.write(V1, registries={"source": secure})
    errors: list[str | None] = []
    texts = [None, authority.read_text(), authority.read_text()]
    ran = await stage.watch(*contents(authority, texts, errors), more=("--shard", "0/1"))
    assert (ran.status, ran.out.count("synced "), lines(ran, "failed ")) == (0, 1, [])
    assert len(lines(ran, "error: CONFIG_ERROR: ", "ca.pem", "stays in force")) == 1
    assert len(lines(ran, "info: shard 0 of 1: ")) <= 2
    assert [error is None for error in errors] == [True, False, True]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "the following arguments are required: -c/--config"),
        ("-c /nowhere/mirror.yaml", "No such file"),
        ("-c FILE --interval 0", "above 0"),
        ("-c FILE --interval often", "--interval: 'often'"),
        ("-c FILE --health-port http", "argument --health-port: invalid int value: 'http'"),
        ("-c FILE --health-port 70000", "127.0.0.1 port 70000: the highest port is 65535"),
        ("-c FILE --health-port TAKEN", "127.0.0.1 port TAKEN: address "),
        ("-c FILE --health-bind 192.0.2.1", "192.0.2.1 port 8080"),
        ("-c FILE --shard 2/2", "--shard 2/2"),
        ("-c WRONG", "wrong.yaml:1:11"),
    ],
)
def test_what_is_wrong_from_the_start_is_an_error(tmp_path, arguments, words):
    (tmp_path / "mirror.yaml").write_text("mappings: []")
    (tmp_path / "wrong.yaml").write_text("mappings: {}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        names = {"FILE": tmp_path / "mirror.yaml", "WRONG": tmp_path / "wrong.yaml", "TAKEN": port}
        ran = run_regsync("watch", *(str(names.get(word, word)) for word in arguments.split()))
    assert (ran.status, ran.out) == (3, "")
    assert words.replace("TAKEN", port) in ran.err.splitlines()[0]
    assert ran.err.startswith("error: CONFIG_ERROR: ")
    assert not (tmp_path / ".regsync").exists()


# What probes are told.


@pytest.mark.parametrize(
    ("there", "first"),
    [([], (503, "starting", 2)), (["v2"], (200, "ready", 1))],
    ids=["all fail", "one fails"],
)
async def test_a_first_cycle_in_which_not_all_fails_makes_ready(stage, there, first):
    for tag in there:
        stage.load(tag)
    stage.write({"from": "app", "tags": tags("v1", "v2")})
    seen: list[tuple[int, str, int]] = []

    def look() -> None:
        ready, body = probe("/readyz")
        assert probe("/healthz")[1] == body
        assert body.keys() == {"status", "version", "cycle", "reload_error"}
        assert body["cycle"]["number"] == len(seen) + 1
        seen.append((ready, body["status"], body["cycle"]["exit_status"]))
        for tag in ("v1", "v2"):
            stage.load(tag)

    await stage.watch(look, look)
    assert seen == [first, (200, "ready", 0)]


async def test_a_watch_that_was_told_to_stop_is_not_ready(single):
    answers: list[tuple[int, dict[str, Any]]] = []

    async def stop() -> None:
        single.load("v1")
        single.target.app.faults.on("PUT", "manifest").first().delay(10)
        await anyio.sleep(INTERVAL / 2 + 5)  # into the next cycle
        signal.raise_signal(signal.SIGTERM)
        await anyio.sleep(1)
        answers.append(probe("/readyz"))

    await single.watch(stop)
    ((status, body),) = answers
    assert (status, body["status"]) == (503, "stopping")


@pytest.mark.process
def test_a_process_takes_a_new_file_at_a_hang_up_and_ends_well(source, target, tmp_path):
    images = {name: Seed(n).image() for n, name in enumerate(("one", "two"))}
    file = tmp_path / "mirror.yaml"

    def write(name: str) -> None:
        images[name].load_into(source.app, name, "v1")
        rule = {"from": name, "tags": tags("v1")}
        file.write_text(document({"source": source, "target": target}, rule))

    write("one")
    words = ["watch", "-c", str(file), "--interval", "1h", "--health-port", "0"]
    with started(*words, stderr=subprocess.STDOUT) as process:

        def until(word: str) -> str:
            assert process.stdout is not None
            while word not in (line := process.stdout.readline()):
                assert line, f"it ended without {word}"
            return line

        try:
            port = until("health probes at").split()[-1]
            until("info: cycle 1: ")
            assert held(target, "one", images["one"])
            for path in ("healthz", "readyz"):
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}") as answer:
                    assert answer.status == 200
            write("two")
            process.send_signal(signal.SIGHUP)
            until("now in force: 1 mappings")
            until("info: cycle 2: ")
            assert held(target, "two", images["two"])
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=40) == 0
        finally:
            process.kill()
