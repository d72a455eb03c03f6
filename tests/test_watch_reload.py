"""Watch mode: a new configuration, and what probes are told (docs/design.md section 10)."""

from __future__ import annotations

import json
import signal
from typing import Any

import anyio
from trustme import CA

from conformance.registry.tokens import TokenService
from tests.ends import held, tags
from tests.watching import INTERVAL, Scene, Step, lines, probe

# A new configuration.


async def test_a_changed_file_is_taken_before_the_next_cycle(stage):
    for name in ("one", "two"):
        stage.load("v1", name)
    stage.world.registry("third.test")
    stage.write({"from": "one", "tags": tags("v1")})

    def change() -> None:
        third = {"third": "http://third.test"}
        rules = [
            {"from": "two", "tags": tags("v1")},
            {"from": "one", "to": "1", "tags": tags("v1")},
        ]
        stage.write(*rules, registries=third, **{"global": {"cache_ttl": "1h"}})

    def again() -> None:
        stage.write({"from": "two", "tags": tags("v1", "v2")})

    ran = await stage.watch(change, again, None)
    assert lines(ran, "now in force") == [
        "info: now in force: 2 mappings",
        "info: now in force: 1 mappings",
    ]
    assert {*stage.target.app.repositories} == {"one", "two", "1"}


async def test_clients_of_registries_that_stay_the_same_are_kept(stage):
    stage.load("v1")
    rule = {"from": "app", "tags": tags("v1")}
    stage.write(rule)
    opened: list[tuple[int, int]] = []

    def count() -> None:
        opened.append((stage.source._connections, stage.target._connections))

    def change() -> None:
        count()
        stage.write(rule, registries={"target": {"url": "http://target.test", "max_concurrent": 7}})

    await stage.watch(change, count, count)
    (source, target), *rest = opened
    assert rest == [(source, target + 1)] * 2, "the changed one has a new connection, once"


async def test_a_shard_of_a_new_file_is_that_of_the_new_file(stage, tmp_path):
    for name in "abcd":
        stage.load("v1", name)
    rules = [{"from": name, "tags": tags("v1")} for name in "abcd"]
    stage.write(*rules[:2])
    ran = await stage.watch(lambda: stage.write(*rules), None, more=("--shard", "1/2"))
    assert ran.status == 0
    assert {*stage.target.app.repositories} == {"b", "d"}
    told = [line.partition(": ")[2] for line in ran.err.splitlines() if ": shard " in line]
    assert told == ["shard 1 of 2: 1 of 2 mappings", "shard 1 of 2: 2 of 4 mappings"]
    assert (tmp_path / ".regsync" / "shard-1-of-2" / "state.db").exists()


async def test_a_shard_is_not_told_in_each_cycle_in_which_a_named_file_is_gone(stage, tmp_path):
    stage.load("v1")
    authority = tmp_path / "ca.pem"
    stage.world.listen(stage.source.app, "source.test", scheme="https")
    CA().cert_pem.write_to_path(str(authority))
    secure = {"url": "https://source.test", "ca_file": str(authority)}
    stage.write({"from": "app", "tags": tags("v1")}, registries={"source": secure})
    ran = await stage.watch(authority.unlink, None, None, None, None, more=("--shard", "0/1"))
    assert len(lines(ran, "error: CONFIG_ERROR: ", "ca.pem")) == 1
    assert len(lines(ran, "info: shard 0 of 1: ")) <= 2


async def test_a_hang_up_begins_a_cycle_with_the_new_file(stage):
    image = stage.load("v1", "two")
    stage.write({"from": "one", "tags": tags("x*")})

    async def hang_up() -> None:
        stage.write({"from": "two", "tags": tags("v1")})
        signal.raise_signal(signal.SIGHUP)
        await anyio.sleep(1)
        assert held(stage.target, "two", image)

    ran = await stage.watch(hang_up, interval=250)
    assert ran.status == 0
    assert stage.target.journal.count("PUT", "manifest") == 1


# Three cycles count as one: the last one's look at artifacts is a second question.
async def test_a_hang_up_in_a_cycle_lets_the_next_follow_at_once(stage):
    stage.load("v1")
    stage.write({"from": "app", "tags": tags("v1")})
    stage.source.app.faults.on("GET", "manifest").first().delay(50)

    async def hang_up() -> None:
        signal.raise_signal(signal.SIGHUP)
        await anyio.sleep(40)
        assert stage.source.journal.count("HEAD", "manifest") == 1, (
            "the second cycle, which follows the first"
        )

    await stage.watch(hang_up, interval=60)


async def test_a_mounted_configuration_is_swapped_by_its_link(stage, tmp_path):
    """As Kubernetes does it: the file is a link into a directory that is a link, which is replaced."""
    stage.load("v1", "one")
    image = stage.load("v1", "two")
    real = stage.file
    for name in ("one", "two"):
        stage.file = tmp_path / f"..{name}" / "mirror.yaml"
        stage.file.parent.mkdir()
        stage.write({"from": name, "tags": tags("v1")})
    (tmp_path / "..data").symlink_to("..one")
    real.symlink_to("..data/mirror.yaml")
    stage.file = real

    def swap() -> None:
        (tmp_path / "..new").symlink_to("..two")
        (tmp_path / "..new").rename(tmp_path / "..data")

    ran = await stage.watch(swap, None)
    assert held(stage.target, "two", image)
    assert len(lines(ran, "now in force")) == 1
    assert (tmp_path / ".regsync" / "state.db").exists()


async def test_a_file_that_cannot_be_used_leaves_the_last_good_one_in_force(stage):
    bodies: list[dict[str, Any]] = []
    stage.load("v1")
    stage.write({"from": "app", "tags": tags("v1")})
    good = stage.file.read_bytes()

    def step(content: bytes | None) -> Step:
        def replace() -> None:
            bodies.append(probe("/healthz")[1])
            if content is None:
                stage.file.unlink()
            else:
                stage.file.write_bytes(content)

        return replace

    bad = b"mappings: []\ndefaults:\n  sorce: x\nregistres: {}\n"
    steps = [step(bad), step(bad), step(None), step(good), step(good)]
    ran = await stage.watch(*steps)
    assert stage.asked[1:] == [({"HEAD manifest": 1}, {"HEAD manifest": 1})] * 5
    wrong = lines(ran, "error: CONFIG_ERROR: ", "mirror.yaml:3:3", "stays in force")
    assert len(wrong) == 1
    assert len(lines(ran, "mirror.yaml:4:1")) == 1
    assert len(lines(ran, "mirror.yaml", "No such file")) == 1
    assert len(lines(ran, "now in force")) == 1
    told = [body["reload_error"] for body in bodies]
    assert told[0] is None
    assert "mirror.yaml:3:3" in told[1]
    assert "mirror.yaml:3:3" in told[2], "also where nothing has changed"
    assert "No such file" in told[3]
    assert told[4] is None
    assert all(body["status"] == "ready" for body in bodies)


async def test_an_empty_file_after_a_wrong_one_is_told(stage):
    stage.load("v1")
    stage.write({"from": "app", "tags": tags("v1")})

    def write(text: str) -> Step:
        def replace() -> None:
            stage.file.write_text(text)

        return replace

    ran = await stage.watch(write("- x\n"), write(""), more=("--log-format", "json"))
    wrong = [
        each for each in map(json.loads, ran.err.splitlines()) if each["event"] == "reload_failed"
    ]
    assert len(wrong) == len({each["message"] for each in wrong}) == 2
    assert all(each["code"] == "CONFIG_ERROR" and "hint" in each for each in wrong)


async def test_files_that_the_configuration_names_are_read_again_each_cycle(
    world, tmp_path, clean_env
):
    services: list[TokenService] = []

    def auth() -> TokenService:
        services.append(TokenService({"u": "p"}, anonymous=False, now=anyio.current_time))
        return services[-1]

    def log_in(password: str) -> None:
        (clean_env / ".docker").mkdir(exist_ok=True)
        logins = {
            f"{end}.test": {"username": "u", "password": password} for end in ("source", "target")
        }
        (clean_env / ".docker" / "config.json").write_text(json.dumps({"auths": logins}))

    stage = Scene(world, tmp_path, auth=auth)
    image = stage.load("v1")
    stage.write({"from": "app", "tags": tags("v1")})
    log_in("old")
    ran = await stage.watch(lambda: log_in("p"), None)
    assert len(lines(ran, "failed", "AUTH_ERROR")) == 1
    assert held(stage.target, "app", image)


async def test_a_named_file_that_is_gone_is_as_if_it_were_there(stage, tmp_path):
    errors: list[str | None] = []
    stage.load("v1")
    authority = tmp_path / "ca.pem"
    stage.world.listen(stage.source.app, "source.test", scheme="https")
    secure = {"url": "https://source.test", "ca_file": str(authority)}
    CA().cert_pem.write_to_path(str(authority))
    stage.write({"from": "app", "tags": tags("v1")}, registries={"source": secure})
    text = authority.read_text()

    def step(content: str | None) -> Step:
        def replace() -> None:
            errors.append(probe("/readyz")[1]["reload_error"])
            if content is None:
                authority.unlink()
            else:
                authority.write_text(content)

        return replace

    ran = await stage.watch(step(None), step(text), step(text))
    assert (ran.status, ran.out.count("synced ")) == (0, 1)
    assert not lines(ran, "failed ")
    assert len(lines(ran, "error: CONFIG_ERROR: ", "ca.pem", "stays in force")) == 1
    assert [error is None for error in errors] == [True, False, True]


# What probes are told.


async def test_a_first_cycle_in_which_all_fails_makes_nobody_ready(stage):
    stage.write({"from": "app", "tags": tags("v1")})
    seen: list[dict[str, Any]] = []
    ready: list[int] = []

    def look() -> None:
        seen.append(probe("/healthz")[1])
        ready.append(probe("/readyz")[0])
        stage.load("v1")

    await stage.watch(look, look)
    assert ready == [503, 200]
    assert [body["cycle"]["exit_status"] for body in seen] == [2, 0]
    assert [body["cycle"]["number"] for body in seen] == [1, 2]
    assert seen[1]["cycle"]["images"] == {"synced": 1, "skipped": 0, "failed": 0}
    assert seen[1].keys() == {"status", "version", "cycle", "reload_error"}


async def test_a_watch_that_was_told_to_stop_is_not_ready(stage):
    stage.load("v1")
    stage.write({"from": "app", "tags": tags("v1")})
    answers: list[tuple[int, dict[str, Any]]] = []

    async def stop() -> None:
        stage.load("v1")
        stage.target.app.faults.on("PUT", "manifest").first().delay(10)
        await anyio.sleep(INTERVAL / 2 + 5)  # into the next cycle
        signal.raise_signal(signal.SIGTERM)
        await anyio.sleep(1)
        answers.append(probe("/readyz"))

    await stage.watch(stop)
    ((status, body),) = answers
    assert (status, body["status"]) == (503, "stopping")


async def test_a_first_cycle_in_which_not_all_fails_makes_ready(stage):
    seen: list[tuple[int, int]] = []
    stage.load("v1")
    stage.write({"from": "app", "tags": tags("v1", "missing")})

    def look() -> None:
        status, body = probe("/readyz")
        seen.append((status, body["cycle"]["exit_status"]))

    await stage.watch(look)
    assert seen == [(200, 1)]
