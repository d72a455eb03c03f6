"""SIGTERM and SIGINT at every stage of a run: nothing new begins, what can end ends, the rest is
for the next run.

When and in which order is shown on the virtual clock; what is the process's own (handlers before a
run listens, threads that nobody can end) by processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from conformance.images import Image, Seed
from conformance.memory import Link
from tests.ends import Ran, Virtual, document, held, stopped_at, tags
from tests.mirrors import WRITES, Mirror, lose_manifest
from tests.program import ROOT, words
from tests.states import entries

DRAIN_SECONDS = 25.0  # how long a run goes on with what it has begun
INT = signal.SIGINT
TERM = signal.SIGTERM
COPY = "copy --no-artifacts source.test/app:v1 target.test/app:v1"
WATCH = "watch --health-port 0"
PLAIN = {"artifacts": {"enabled": False}}
ARTIFACTS = {"artifacts": {"enabled": True}}


class Stopped(Mirror):
    """A mirror whose runs are stopped: images of 9,000 bytes in `app`, or what a test holds."""

    def __init__(self, world: Virtual, directory: Path, **target: Any) -> None:
        super().__init__(world, directory, of={"target": target})
        self.images: list[tuple[str, Image]] = []

    def hold(self, *tags: str, repository: str = "app", sizes: tuple[int, ...] = (9000,)) -> Image:
        image = self.seed.image(sizes=sizes).load_into(self.source.app, repository, *tags)
        self.images.append((repository, image))
        return image

    def write(self, *mappings: Any, **top: Any) -> None:
        named = sorted({repository for repository, _ in self.images})
        mappings = mappings or tuple({"from": each, "tags": tags("*")} for each in named)
        super().write(*mappings, **{"defaults": PLAIN, **top})

    async def stop(self, *seconds: float, command: str = "sync", number: int = TERM) -> Ran:
        """Run and stop: it was interrupted, says so, and calls nothing failed that it only left."""
        async with stopped_at(*seconds, number=signal.Signals(number)):
            ran = await self.run(*command.split())
        assert ran.status == (0 if command == WATCH else 128 + number)
        assert ran.report["interrupted"] is True
        assert not ran.failed
        assert "Traceback" not in ran.err
        return ran

    async def again(self) -> Ran:
        """Run once more, undisturbed: all is brought."""
        for place in (self.source, self.target):
            place.app.faults.clear()
        ran = await self.run("sync")
        assert (ran.status, ran.failed) == (0, []), ran.err
        assert all(held(self.target, repository, image) for repository, image in self.images)
        return ran


@pytest.fixture
def mirror(world: Virtual, tmp_path: Path) -> Stopped:
    return Stopped(world, tmp_path)


def slow(world: Virtual, directory: Path, bandwidth: float) -> Stopped:
    """Return a mirror whose target takes so many bytes a second."""
    return Stopped(world, directory, up=Link(bandwidth=bandwidth))


# Nothing new.


@pytest.mark.parametrize(
    ("command", "side", "question", "how", "number"),
    [
        ("sync", "source", "GET tag_list", "stalls", INT),
        ("sync", "target", "GET tag_list", "is ill", TERM),
        ("sync", "source", "GET manifest", "is throttled", INT),
        ("sync", "target", "HEAD manifest", "stalls", TERM),
        ("sync", "target", "HEAD manifest", "is throttled", INT),
        ("sync --dry-run", "source", "GET manifest", "stalls", TERM),
        (COPY, "source", "GET manifest", "is ill", INT),
        (WATCH, "source", "GET tag_list", "stalls", INT),
        (WATCH, "target", "HEAD manifest", "stalls", TERM),
    ],
)
async def test_a_signal_ends_what_only_asks_at_once(mirror, command, side, question, how, number):
    for n in range(3):
        mirror.hold(f"v{n}")
    Seed(9).image().load_into(mirror.target.app, "app", "v0", "v1", "v2")
    mirror.write()
    rule = (mirror.source if side == "source" else mirror.target).app.faults.on(*question.split())
    if how == "stalls":
        rule.stall()
    else:
        rule.status(503, retry_after=30) if how == "is ill" else rule.status(429, retry_after=200)
    ran = await mirror.stop(7.0, command=command, number=number)
    assert ran.seconds == pytest.approx(7.0, abs=0.01)
    mirror.target.journal.matching(WRITES).none()
    await mirror.again()


@pytest.mark.parametrize(
    ("command", "method", "kind", "wait"),
    [
        ("sync", "POST", "upload_start", 250),
        ("sync", "PUT", "manifest", 250),
        ("sync", "GET", "blob", 60),
        (COPY, "PUT", "manifest", None),
        (WATCH, "PUT", "manifest", None),
    ],
)
async def test_a_transfer_that_waits_for_a_registry_is_left_when_the_drain_ends(
    mirror, command, method, kind, wait
):
    """A registry that asks to wait, or that does not answer."""
    mirror.hold("v1")
    mirror.write()
    rule = (mirror.source if method == "GET" else mirror.target).app.faults.on(method, kind)
    if wait is None:
        rule.stall()
    else:
        rule.status(429 if wait == 250 else 503, retry_after=wait)
    ran = await mirror.stop(20.0, command=command)
    assert ran.seconds == pytest.approx(20 + DRAIN_SECONDS, abs=0.01)
    await mirror.again()


async def test_images_that_have_not_begun_do_not_begin(world, tmp_path):
    """Eight images wait to mount what one brings: it ends, and none of them starts."""
    mirror = slow(world, tmp_path, 10_000)
    image = mirror.seed.image(sizes=(60_000,))
    for n in range(8):
        mirror.images.append((f"app-{n}", image.load_into(mirror.source.app, f"app-{n}", "v1")))
    mirror.write()
    assert (await mirror.stop(3.0)).statuses() == ["synced"]
    mirror.target.journal.matching("PUT", "manifest").exactly(1)
    assert mirror.target.journal.count("POST") == 2
    ran = await mirror.again()
    assert sorted(ran.statuses()) == ["skipped", *["synced"] * 7]
    assert ran.totals["bytes"] == 0


async def test_tags_of_what_is_there_that_have_not_begun_do_not_begin(mirror):
    """They lack no blob, but a slot."""
    mirror.hold("v1", "v2", "v3")
    mirror.write(**{"global": {"max_concurrent_transfers": 1}})
    mirror.target.app.faults.on("PUT", "manifest").delay(5)
    assert (await mirror.stop(3.0)).statuses() == ["synced"]
    mirror.target.journal.matching("PUT", "manifest").exactly(1)
    await mirror.again()


async def test_an_image_that_has_to_start_again_asks_its_source_for_nothing(mirror):
    """The target has lost what it had: the manifest that a new index names beside another one."""
    child, other = (mirror.seed.image(sizes=(9000,)) for _ in range(2))
    mirror.push("v1", mirror.seed.index([child]))
    mirror.write({"from": "app", "tags": tags("*")})
    await mirror.run("sync")
    lose_manifest(mirror.target.app, child.top)
    mirror.push("v2", mirror.seed.index([child, other]))
    mirror.target.app.faults.on("PUT", "manifest", reference="v2").delay(5)
    ran = await mirror.stop(3.0)
    mirror.target.journal.matching("PUT", "manifest", reference="v2", status=400).exactly(1)
    mirror.source.journal.matching("GET", "manifest", reference=child.top).none()
    assert ran.statuses() == ["skipped"]


# What can end.


async def test_a_manifest_put_in_a_short_back_off_is_put_again(mirror):
    image = mirror.hold("v1")
    mirror.write()
    mirror.target.app.faults.on("PUT", "manifest").first().delay(5).status(503, retry_after=1)
    async with stopped_at(4.0):
        ran = await mirror.run(*COPY.split())
    assert (ran.status, ran.statuses()) == (0, ["synced"])
    assert held(mirror.target, "app", image)
    assert mirror.target.app.tags("app") == {"v1": image.top}


async def test_a_stream_that_ends_in_time_ends_and_the_others_are_dropped(world, tmp_path):
    """Both share a line."""
    mirror = slow(world, tmp_path, 20_000)
    small = mirror.hold("v1", repository="small", sizes=(180_000,))
    mirror.hold("v1", repository="large", sizes=(2_000_000,))
    mirror.write()
    ran = await mirror.stop(5.0)
    assert ran.statuses() == ["synced"]
    assert ran.seconds == pytest.approx(5 + DRAIN_SECONDS, abs=0.01)
    assert held(mirror.target, "small", small)
    assert mirror.target.app.tags("large") == {}
    await mirror.again()


async def test_a_copy_of_one_platform_by_digest_that_ends_in_time_was_not_interrupted(mirror):
    """It has another digest at the target than the one that was asked for."""
    index = mirror.push("v1", mirror.seed.index())
    mirror.target.app.faults.on("PUT", "upload").first().delay(3)
    words = ("--platform", "linux/amd64", "--no-artifacts")
    where = (f"http://source.test/app@{index.top}", "http://target.test/app")
    async with stopped_at(1.0):
        ran = await mirror.world.run("copy", "--json", *words, *where)
    assert (ran.status, ran.statuses(), "undone" in ran.report) == (0, ["synced"], False), ran.err


# At once.


@pytest.mark.parametrize(("command", "number"), [("sync", INT), ("sync", TERM), (WATCH, TERM)])
async def test_a_second_signal_ends_at_once_and_saves_what_was_answered(
    world, tmp_path, command, number
):
    mirror = slow(world, tmp_path, 10_000)
    image = mirror.hold("v1", sizes=(10_000, 200_000))
    mirror.write()
    ran = await mirror.stop(10.0, 11.0, command=command, number=number)
    assert (ran.seconds, ran.images) == (pytest.approx(11.0, abs=0.01), [])
    assert entries(mirror.cache) > 0
    assert not (mirror.cache / "state.db-journal").exists()
    there = [digest for digest in image.blobs if mirror.target.app.blob("app", digest) is not None]
    assert len(there) == 2, "the config and the small layer"
    await mirror.again()
    # What was answered is not asked for, the rest is brought.
    mirror.target.journal.matching("PUT", "upload").exactly(1)
    assert mirror.target.journal.count("HEAD", "blob") <= 1


# Processes.

STUCK = """
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
socket.getaddrinfo = getaddrinfo
"""
# Once an address is asked for, a signal comes after the interpreter's last look at signals and
# before its event loop blocks: `map` calls both without a step of the interpreter between them, and
# libc's `kill`, unlike Python's, has no look of its own.
UNLUCKY = """
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
# Signals come when the event loop would begin.
AT_THE_LOOP = """
import os, sys
import anyio, regsync
def strike(*_, **__):
    os.kill(os.getpid(), {number})
    while True:
        pass
anyio.run = strike
"""
AT_ONCE = 5.0  # seconds for the end of a process: half the time that a connect may take


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Start a program, which does not outlive the test, however that ends."""
    pipes: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    with subprocess.Popen(command, text=True, cwd=ROOT, **pipes) as begun:
        try:
            yield begun
        finally:
            begun.kill()


def scripted(script: str) -> list[str]:
    """Return the words that start the program behind a script."""
    return [sys.executable, "-c", f"{script}sys.exit(regsync.main())"]


def until(begun: subprocess.Popen[str], word: str) -> None:
    """Read standard error to the line that has a word."""
    assert begun.stderr is not None
    while word not in (line := begun.stderr.readline()):
        assert line, f"the program ended and did not say {word}"


@pytest.mark.process
@pytest.mark.parametrize(("command", "number"), [("sync", TERM), ("watch", INT)])
def test_a_signal_that_comes_while_the_files_are_read_ends_the_program(tmp_path, command, number):
    file = tmp_path / "mirror.yaml"
    os.mkfifo(file)
    # The file opens when the program has opened it, too.
    with process(*words(), command, "-c", str(file)) as begun, file.open("w"):
        begun.send_signal(number)
        assert (*begun.communicate(timeout=60), begun.returncode) == ("", "", 128 + number)
    assert not (tmp_path / ".regsync").exists()


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Return a configuration whose registries have no address."""
    ends = {"source": "http://source.test", "target": "http://target.test"}
    (tmp_path / "mirror.yaml").write_text(document(ends, {"from": "app"}, defaults=ARTIFACTS))
    return str(tmp_path / "mirror.yaml")


@pytest.mark.in_process
@pytest.mark.parametrize("command", ["sync", "watch"])
def test_a_signal_that_comes_before_the_event_loop_ends_the_program(file, command):
    script = scripted(AT_THE_LOOP.format(number=int(TERM)))
    with process(*script, command, "-c", file) as begun:
        assert (*begun.communicate(timeout=60), begun.returncode) == ("", "", 128 + TERM)


@pytest.mark.in_process
@pytest.mark.parametrize(
    ("command", "number", "is_unlucky"),
    [
        ("sync -c FILE", INT, False),
        ("copy r.test/app s.test/app", TERM, False),
        ("tags r.test/app", INT, False),
        ("auth check -c FILE", TERM, True),
        ("watch --health-port 0 -c FILE", INT, True),
    ],
)
def test_a_name_server_that_hangs_does_not_delay_the_end(file, command, number, is_unlucky):
    """Nor is a signal lost that comes right before the event loop waits."""
    script = scripted(STUCK + UNLUCKY.format(number=int(number)) * is_unlucky)
    with process(*script, *command.replace("FILE", file).split()) as begun:
        until(begun, "asked")
        if not is_unlucky:
            begun.send_signal(number)
        out, err = begun.communicate(timeout=AT_ONCE)
    assert begun.returncode == (0 if "watch" in command else 128 + number)
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.process
def test_a_manifest_that_is_being_put_is_waited_for(source, target, tmp_path):
    image = Seed(1).image().load_into(source.app, "app", "v1")
    put = target.app.faults.on("PUT", "manifest").stall()
    file = tmp_path / "mirror.yaml"
    ends = {"source": source, "target": target}
    file.write_text(document(ends, {"from": "app", "tags": tags("v1")}))
    with process(*words(), "sync", "--json", "-c", str(file)) as begun:
        put.wait()
        begun.send_signal(INT)
        until(begun, "stopping")
        put.release()
        out, err = begun.communicate(timeout=30)
    assert "Traceback" not in err
    assert (begun.returncode, json.loads(out)["interrupted"]) == (0, False)
    assert entries(tmp_path / ".regsync") > 0
    assert held(target, "app", image)
