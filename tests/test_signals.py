"""SIGTERM and SIGINT at every stage of a run: nothing new begins, what can end ends, the rest is
for the next run.

When and in which order is shown on the virtual clock; what is the process's own (handlers before a
run listens, threads that nobody can end) by processes that stop themselves at a known place.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import pytest

from conformance.content.images import Image, Seed
from conformance.messages import Request, digest_of
from conformance.server.memory import Link, Place
from tests.ends import ROOT, Ran, Virtual, document, held, only, stopped_at, tags
from tests.states import entries

# How long a run goes on with what it has begun, after a signal.
DRAIN_SECONDS = 25.0

SIGNALS = pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name
)


def ends(world: Virtual, **target: Any) -> tuple[Place, Place]:
    return world.registry("source.test"), world.registry("target.test", **target)


def written(path: Path, *mappings: Any, **top: Any) -> str:
    registries = {"source": "http://source.test", "target": "http://target.test"}
    file = path / "mirror.yaml"
    file.write_text(document(registries, *mappings, **top))
    return str(file)


async def again(world: Virtual, file: str) -> Ran:
    """Run once more, undisturbed: all is brought."""
    for place in world._places:
        place.app.faults.clear()
        place.journal.clear()
    ran = await world.run("sync", "--json", "-q", "-c", file)
    assert (ran.status, ran.failed) == (0, []), ran.err
    return ran


def check_left(ran: Ran, number: signal.Signals = signal.SIGTERM) -> None:
    """The run was interrupted, says so, and calls nothing failed that it only left."""
    assert ran.status == 128 + number
    assert ran.report["interrupted"] is True
    assert not ran.failed
    assert "Traceback" not in ran.err


# Nothing new.


@SIGNALS
@pytest.mark.parametrize(
    ("side", "method", "kind"),
    [
        ("source", "GET", "tag_list"),
        ("target", "GET", "tag_list"),
        ("source", "GET", "manifest"),
        ("target", "HEAD", "manifest"),
    ],
)
@pytest.mark.parametrize("how", ["stalls", "is ill", "is throttled"])
async def test_a_signal_ends_what_only_asks_at_once(
    world, tmp_path, number, side, method, kind, how
):
    source, target = ends(world)
    images = [
        Seed(n).image(sizes=(9000,)).load_into(source.app, "app", tag=f"v{n}") for n in range(3)
    ]
    Seed(9).image().load_into(target.app, "app", "v0", "v1", "v2")
    rule = (source if side == "source" else target).app.faults.on(method, kind)
    if how == "stalls":
        rule.stall()
    elif how == "is ill":
        rule.status(503, retry_after=30)
    else:
        rule.status(429, retry_after=200)
    file = written(tmp_path, {"from": "app", "tags": tags("v*")})
    async with stopped_at(7.0, number=number):
        ran = await world.run("sync", "--json", "-q", "-c", file)
    check_left(ran, number)
    assert ran.seconds == pytest.approx(7.0, abs=0.01)
    assert not target.journal.count("POST") + target.journal.count("PUT")
    await again(world, file)
    assert all(held(target, "app", image) for image in images)


@pytest.mark.parametrize("command", ["copy", "sync --dry-run"])
async def test_so_do_a_copy_and_what_changes_nothing(world, tmp_path, command):
    source, target = ends(world)
    Seed(1).image().load_into(source.app, "app", tag="v1")
    source.app.faults.on("GET", "manifest").stall()
    async with stopped_at(3.0):
        if command == "copy":
            ran = await world.copy(source, target)
        else:
            file = written(tmp_path, {"from": "app", "tags": tags("v1")})
            ran = await world.run(*command.split(), "--json", "-q", "-c", file)
    assert ran.status == 128 + signal.SIGTERM
    assert ran.seconds == pytest.approx(3.0, abs=0.01)


@pytest.mark.provokes("manifest_names_absent")
async def test_an_image_that_starts_again_behind_a_signal_asks_nothing_new(world, tmp_path):
    """The questions that wait would be asked by a worker that no signal has cancelled."""
    source, target = ends(world)
    seed = Seed(1)
    layer = seed.layer(9000)
    seed.image(layers=[layer]).load_into(source.app, "app", tag="a1")
    state = {"global": {"cache_dir": str(tmp_path / "state")}}
    file = written(tmp_path, {"from": "app", "tags": tags("*")}, **state)
    await again(world, file)

    del target.app.repositories["app"].blobs[digest_of(layer)]
    source.app.repositories["app"].tags.clear()
    images = [seed.image(layers=[layer], architecture=name) for name in ("arm64", "s390x")]
    images[0].load_into(source.app, "app", tag="a2")
    for number in range(20):
        images[1].load_into(source.app, "app", tag=f"z{number}")
    source.app.faults.on("GET", "manifest", reference="z*").stall()

    asked = []

    async def stop(request: Request) -> None:
        if request.method == "PUT" and request.kind == "manifest":
            target.app.intercept = None
            asked.append(source.journal.count("GET", "manifest"))
            signal.raise_signal(signal.SIGTERM)
            await anyio.sleep(1)

    target.app.intercept = stop
    check_left(await world.run("sync", "--json", "-q", "-c", file))
    target.journal.matching("PUT", "manifest", status=400).exactly(1)
    source.journal.matching("GET", "manifest").exactly(only(asked))
    await again(world, file)
    assert all(held(target, "app", image) for image in images)


@pytest.mark.parametrize("chance", [0.99])
async def test_a_late_look_at_artifacts_is_cut_off_too(world, tmp_path):
    source, target = ends(world)
    image = Seed(1).image(sizes=(9000,)).load_into(source.app, "app", tag="v1")
    file = written(
        tmp_path, {"from": "app", "tags": tags("v1")}, defaults={"artifacts": {"enabled": True}}
    )
    assert (await world.run("sync", "--json", "-q", "-c", file)).status == 0

    def later() -> float:
        return Virtual.wall() + 8 * 86_400.0

    with mock.patch.object(world, "wall", later):
        source.app.faults.on("GET", "referrers").stall()
        async with stopped_at(3.0):
            ran = await world.run("sync", "--json", "-q", "-c", file)
        check_left(ran)
        assert ran.seconds == pytest.approx(3.0, abs=0.01)
        await again(world, file)
    assert held(target, "app", image)


@pytest.mark.parametrize(
    ("method", "kind"),
    [("POST", "upload_start"), ("PUT", "upload"), ("PUT", "manifest"), ("GET", "blob")],
)
@pytest.mark.parametrize("wait", [60, 250])
async def test_a_transfer_that_waits_for_a_registry_is_left_when_nothing_else_goes_on(
    world, tmp_path, method, kind, wait
):
    source, target = ends(world)
    image = Seed(1).image(sizes=(9000,)).load_into(source.app, "app", tag="v1")
    faults = (source if method == "GET" else target).app.faults
    faults.on(method, kind).status(429 if wait > 60 else 503, retry_after=wait)
    file = written(tmp_path, {"from": "app", "tags": tags("v1")})
    async with stopped_at(20.0):
        ran = await world.run("sync", "--json", "-q", "-c", file)
    check_left(ran)
    assert ran.seconds < 20.0 + 5
    await again(world, file)
    assert held(target, "app", image)


async def test_a_manifest_put_in_a_short_back_off_is_put_again(world):
    source, target = ends(world)
    image = Seed(1).image(sizes=(9000,)).load_into(source.app, "app", tag="v1")
    target.app.faults.on("PUT", "manifest").first().delay(5).status(503, retry_after=1)
    async with stopped_at(4.0):
        ran = await world.copy(source, target)
    assert (ran.status, ran.statuses()) == (0, ["synced"])
    assert held(target, "app", image)
    assert target.app.tags("app") == {"v1": image.top}


async def test_images_that_have_not_begun_do_not_begin(world, tmp_path):
    """Eight images wait to mount what one brings: it ends, and none of them starts."""
    source, target = ends(world, up=Link(bandwidth=10_000))
    image = Seed(1).image(sizes=(60_000,))
    for n in range(8):
        image.load_into(source.app, f"app-{n}", tag="v1")
    file = written(tmp_path, *({"from": f"app-{n}", "tags": tags("v1")} for n in range(8)))
    async with stopped_at(3.0):
        ran = await world.run("sync", "--json", "-q", "-c", file)
    check_left(ran)
    assert ran.statuses() == ["synced"]
    assert target.journal.count("PUT", "manifest") == 1
    assert target.journal.count("POST") == 2
    ran = await again(world, file)
    assert sorted(ran.statuses()) == ["skipped", *["synced"] * 7]
    assert ran.totals["bytes"] == 0


# What can end.


async def test_a_stream_that_ends_in_time_ends_and_the_others_are_dropped(world, tmp_path):
    """Both share a line."""
    source, target = ends(world, up=Link(bandwidth=20_000))
    small = Seed(1).image(sizes=(180_000,)).load_into(source.app, "small", tag="v1")
    Seed(2).image(sizes=(2_000_000,)).load_into(source.app, "large", tag="v1")
    file = written(tmp_path, *({"from": name, "tags": tags("v1")} for name in ("large", "small")))
    async with stopped_at(5.0):
        ran = await world.run("sync", "--json", "-q", "-c", file)
    check_left(ran)
    assert ran.statuses() == ["synced"]
    assert ran.seconds == pytest.approx(5 + DRAIN_SECONDS, abs=0.01)
    assert held(target, "small", small)
    assert target.app.tags("large") == {}
    await again(world, file)


async def test_a_stream_that_ends_in_time_is_not_dropped(world):
    source, target = ends(world, up=Link(bandwidth=40_000))
    image = Seed(1).image(sizes=(1_000_000,)).load_into(source.app, "app", tag="v1")
    async with stopped_at(5.0):
        ran = await world.copy(source, target)
    assert (ran.status, ran.statuses()) == (0, ["synced"])
    assert 20 < ran.seconds < 5 + DRAIN_SECONDS
    assert held(target, "app", image)


async def test_a_stall_lasts_as_long_as_a_drain(world):
    source, target = ends(world)
    Seed(1).image(sizes=(9000,)).load_into(source.app, "app", tag="v1")
    target.app.faults.on("PUT", "manifest").stall()
    async with stopped_at(5.0):
        ran = await world.copy(source, target)
    check_left(ran)
    assert ran.seconds == pytest.approx(5 + DRAIN_SECONDS, abs=0.01)


# At once.


@SIGNALS
async def test_a_second_signal_ends_at_once_and_saves_what_was_answered(world, tmp_path, number):
    source, target = ends(world, up=Link(bandwidth=10_000))
    image = Seed(1).image(sizes=(10_000, 200_000)).load_into(source.app, "app", tag="v1")
    file = written(tmp_path, {"from": "app", "tags": tags("v1")})
    async with stopped_at(10.0, 11.0, number=number):
        ran = await world.run("sync", "--json", "-q", "-c", file)
    check_left(ran, number)
    assert ran.seconds == pytest.approx(11.0, abs=0.01)
    assert entries(tmp_path / ".regsync") > 0
    assert not (tmp_path / ".regsync" / "state.db-journal").exists()
    there = [digest for digest in image.blobs if target.app.blob("app", digest) is not None]
    assert len(there) == 2, "the config and the small layer"
    await again(world, file)
    assert target.journal.count("PUT", "upload") == 1, (
        "what was answered is not asked for, the rest is brought"
    )
    assert target.journal.count("HEAD", "blob") <= 1
    assert held(target, "app", image)


# Processes.

_STUCK = """
import os, signal, socket, sys, threading
import regsync
asked = threading.Event()
look_up = socket.getaddrinfo
def getaddrinfo(host, *arguments, **options):
    if not host.endswith(".test"):
        return look_up(host, *arguments, **options)
    os.write(2, b"asked\\n")
    asked.set()
    threading.Event().wait()
"""
_RUN = "socket.getaddrinfo = getaddrinfo\nsys.exit(regsync.main())"
_AT_ONCE = 5.0  # seconds for the end of a process: half the time that a connect may take
# Once an address is asked for, a signal comes after the interpreter's last look at signals and
# before its event loop blocks: `map` calls both without a step of the interpreter between them, and
# libc's `kill`, unlike Python's, has no look of its own.
_UNLUCKY = """
import ctypes, select, selectors
from functools import partial
kill = ctypes.CDLL(None).kill
class Selector(selectors.SelectSelector):
    struck = False
    def _select(self, read, write, _, timeout=None):
        if not asked.is_set():
            return select.select(read, write, [], 0.01 if timeout is None else min(timeout, 0.01))
        wait = partial(select.select, read, write, [], timeout)
        if timeout == 0 or self.struck:
            return wait()
        self.struck = True
        _, ready = map(partial.__call__, (partial(kill, os.getpid(), {number}), wait))
        return ready
selectors.DefaultSelector = Selector
"""
_AT = """
import os, signal, sys
import regsync, {module}
def strike(*_, **__):
    for number in {numbers}:
        os.kill(os.getpid(), number)
    while True:
        pass
{module}.{name} = strike
sys.exit(regsync.main())
"""


@contextmanager
def program(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script, which does not outlive the test, however that ends."""
    pipes: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments], text=True, cwd=ROOT, **pipes
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@SIGNALS
def test_a_signal_ends_a_watch_well_also_before_it_listens(tmp_path, number):
    """And one to reload, which a service manager may send at once, ends nothing."""
    both = [int(signal.SIGHUP), int(number)]
    script = _AT.format(module="anyio", name="run", numbers=both)
    with program(script, "watch", "-c", written(tmp_path, {"from": "app"})) as process:
        assert (*process.communicate(timeout=60), process.returncode) == ("", "", 0)


def hangs(path: Path, command: str) -> list[str]:
    """Return the arguments of a command that asks for the address of a registry."""
    if command == "tags":
        return ["tags", "r.test/app"]
    if command == "copy":
        return ["copy", "r.test/app", "s.test/app"]
    arguments = [*command.split(), "-c", written(path, {"from": "app"})]
    if command == "watch":
        arguments += ["--health-port", "0"]
    return arguments


def wait_until_asked(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    while (line := process.stderr.readline()) != "asked\n":
        assert line, "the program ended and asked no name server"


def check_ended(
    process: subprocess.Popen[str], command: str, number: signal.Signals, out: str, err: str
) -> None:
    assert process.returncode == (0 if command == "watch" else 128 + number)
    assert "Traceback" not in err
    assert out == ""


ASKING = pytest.mark.parametrize("command", ["sync", "copy", "tags", "auth check", "watch"])


@SIGNALS
@ASKING
def test_a_name_server_that_hangs_does_not_delay_the_end(tmp_path, number, command):
    with program(_STUCK + _RUN, *hangs(tmp_path, command)) as process:
        wait_until_asked(process)
        process.send_signal(number)
        out, err = process.communicate(timeout=_AT_ONCE)
    check_ended(process, command, number, out, err)


@SIGNALS
@ASKING
def test_a_signal_right_before_the_event_loop_waits_is_not_lost(tmp_path, number, command):
    script = _STUCK + _UNLUCKY.format(number=int(number)) + _RUN
    with program(script, *hangs(tmp_path, command)) as process:
        wait_until_asked(process)
        out, err = process.communicate(timeout=_AT_ONCE)
    check_ended(process, command, number, out, err)


@pytest.mark.process
def test_a_manifest_that_is_being_put_is_waited_for(source, target):
    image: Image = Seed(1).image().load_into(source.app, "app", tag="v1")
    put = target.app.faults.on("PUT", "manifest").stall()
    where = [f"{source.address}/app:v1", f"{target.address}/app"]
    with program(
        "import sys, regsync; sys.exit(regsync.main())", "copy", "--no-artifacts", *where
    ) as process:
        put.wait()
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert "stopping" in process.stderr.readline()
        put.release()
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("synced ")
    assert held(target, "app", image)


@pytest.mark.process
def test_a_second_signal_saves_the_state(source, target, tmp_path):
    Seed(1).image().load_into(source.app, "app", tag="v1")
    put = target.app.faults.on("PUT", "manifest").stall()
    file = tmp_path / "mirror.yaml"
    file.write_text(
        document({"source": source, "target": target}, {"from": "app", "tags": tags("v1")})
    )
    script = "import sys, regsync; sys.exit(regsync.main())"
    with program(script, "sync", "--json", "-c", str(file)) as process:
        put.wait()
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        while "stopping" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert json.loads(out)["interrupted"] is True
    assert "Traceback" not in err
    assert entries(tmp_path / ".regsync") > 0
    assert not target.app.tags("app")
