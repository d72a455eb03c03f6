"""Both ends of a copy and the program between them: registries in threads, runs with what they
said.

Registries are the harness's, each in a thread of its own, so that the program runs in this process
as a user would call it: `cli.main` with its own output, its environment and its standard input.
Time-outs are short there, and no pause is made: what would have been waited is written down. What
needs a process of its own (signals, pipes) uses `started`. What is about waiting uses `virtual`:
registries and the program on one event loop in memory, with the program's own time-outs and pauses,
on a clock that jumps.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from _regsync.addresses import Origin
from _regsync.app import cli, environment
from _regsync.errors import ConnectFailed
from _regsync.net import pool
from _regsync.net.streams import Stream, Timeouts
from _regsync.registry.host import Machine
from _regsync.registry.throttle import Meter
from conformance.audit.mistakes import audit, latest, report
from conformance.content.images import Image, Seed
from conformance.providers.personas import Provider, Running, imitate
from conformance.registry.app import App
from conformance.server.exchange import Site
from conformance.server.http1 import Endpoint
from conformance.server.memory import Link, Network, Place, network
from conformance.server.sockets import Server, run_in_thread
from tests.wires import MemoryWire

ROOT = Path(__file__).resolve().parent.parent
QUICK = Timeouts(
    connect=5.0,
    tls=5.0,
    head=5.0,
    manifest_put=5.0,
    finish=5.0,
    idle=5.0,
    idle_connection=5.0,
    outage=1.0,
    first_answer=0.4,
    probe=0.02,
)

_HEARTBEAT = 30.0
_NEW_YEAR = 1767225600.0  # 2026-01-01, when every virtual run begins

Start = Callable[..., Server]

# The built file that is run in place of the checkout (pytest's option --file).
program_file: Path | None = None

# The running test's registries by origin, and the mistakes that it provokes (marker `provokes`).
_audited: dict[str, Site] = {}
_provoked: set[str] = set()


@dataclass(frozen=True)
class Ran:
    """One finished run: what the shell and the user got."""

    status: int
    out: str
    err: str
    # The pauses that were not made, in seconds.
    waited: Sequence[float] = ()
    # How long it took on a virtual clock.
    seconds: float = 0.0

    @property
    def report(self) -> dict[str, Any]:
        """The one JSON document on standard output."""
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document

    @property
    def images(self) -> list[dict[str, Any]]:
        return list(self.report["images"])

    @property
    def totals(self) -> dict[str, Any]:
        return dict(self.report["totals"])

    @property
    def failed(self) -> list[str]:
        """The lines about failed images."""
        return [line for line in self.err.splitlines() if line.startswith("failed ")]

    def statuses(self) -> list[str]:
        """Each image's outcome, in the order of the targets' names."""
        return [
            each["status"] for each in sorted(self.images, key=lambda each: str(each["target"]))
        ]


def run_regsync(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    stdin: str | bytes = b"",
    timeouts: Timeouts = QUICK,
) -> Ran:
    """Call the program in this process, with this environment on top, and return what it did.

    Then the registries that `serve` started are asked what it did wrong. With `--file` it is that
    file's process.
    """
    if program_file is not None:
        return run_file(*arguments, env=env, stdin=stdin)

    def edge(**given: Any) -> Machine:
        return plain_edge(**{**given, "chance": lambda: 0.0, "timeouts": timeouts})

    async def at_once(seconds: float) -> None:
        if seconds == _HEARTBEAT:
            await sleep(seconds)
        waited.append(seconds)
        await sleep(0)

    def unpaused(meter: Meter, *given: Any) -> None:
        record(meter, *given)
        if meter.paused_until > -math.inf:
            waited.append(meter.paused_until - given[2])
        meter.paused_until = -math.inf

    plain_edge, sleep, record, waited = Machine, anyio.sleep, Meter.record_answer, list[float]()
    out, err = io.StringIO(), io.StringIO()
    text = stdin.encode() if isinstance(stdin, str) else stdin
    since, umask = latest(_audited), os.umask(0o022)
    os.umask(umask)
    with (
        mock.patch.dict(os.environ, env or {}),
        mock.patch.object(environment, "Machine", edge),
        mock.patch.object(anyio, "sleep", at_once),
        mock.patch.object(Meter, "record_answer", unpaused),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(text))),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = cli.main(arguments)
    assert os.umask(umask) == umask  # a run that wants another gives it back
    check_run(_audited, since, status)
    return Ran(status, out.getvalue(), err.getvalue(), waited)


def run_file(
    *arguments: str, env: Mapping[str, str] | None = None, stdin: str | bytes = b""
) -> Ran:
    """Run the built file that the tests are for, as `run_regsync` runs the checkout."""
    text = stdin.encode() if isinstance(stdin, str) else stdin
    since = latest(_audited)
    done = subprocess.run(
        [str(program_file), *arguments],
        input=text,
        capture_output=True,
        env={**os.environ, **(env or {})},
        check=False,
    )
    check_run(_audited, since, done.returncode)
    return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())


def check_run(
    sites: Mapping[str, Site], since: int, status: int, away: Collection[str] = ()
) -> None:
    """Raise AssertionError when the program made a mistake in a run whose exchanges are all behind
    `since`; `away` are the registries that could not be reached for some time.

    A test that provokes one says so: `@pytest.mark.provokes("name", ...)`.
    """
    findings = audit(
        sites, since=since, remembered=True, excused=_provoked, away=away, has_failed=status != 0
    )
    assert not findings, report(findings)


class Virtual:
    """A network in memory and the program on it, on the clock of the test's own event loop.

    Use it with the marker `virtual_time`: `async with virtual() as world`. DNS, sockets and TLS are
    left out (a name with https is believed), and what would run in a worker thread runs at once,
    because a clock that jumps sees neither.
    """

    def __init__(self, net: Network, chance: float) -> None:
        self.network = net
        self._chance = chance
        self._places: list[Place] = []
        self._since = 0

    def registry(
        self, name: str, *, up: Link | None = None, down: Link | None = None, **options: Any
    ) -> Place:
        """Start a strict registry, `http://NAME`; options are App's."""
        return self.listen(App(**options), name, up=up, down=down)

    def listen(self, site: Site, name: str, **where: Any) -> Place:
        """Let a Site listen (see Network.listen); at the end of the test its journal and faults are
        checked.
        """
        place = self.network.listen(site, name, **where)
        self._places.append(place)
        return place

    def persona(self, name: str, **options: Any) -> Provider:
        """Let a provider answer under its own host names, over https that is only believed."""
        provider = imitate(name, now=anyio.current_time, wall=self.wall, **options)
        for role, site in provider.sites.items():
            self.listen(site, provider.row.hosts[role], scheme="https")
        return provider

    def check(self) -> None:
        for place in self._places:
            place.journal.check()
            place.app.faults.check()

    @staticmethod
    def wall() -> float:
        """Return the time of day, in seconds since 1970."""
        return _NEW_YEAR + anyio.current_time()

    async def run(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
        **timeouts: float,
    ) -> Ran:
        """Call the program with its own time-outs (or these) and real pauses, and return what it
        did.
        """

        def edge(**given: Any) -> Machine:
            times = Timeouts(**timeouts)
            chosen = {"chance": lambda: self._chance, "wall": self.wall, "timeouts": times}
            return plain_edge(**{**given, **chosen})

        def later(*given: Any) -> int:
            parsed.append(given)
            return 0

        self._since = latest(self._sites())
        plain_edge, parsed = Machine, list[Any]()
        out, err = io.StringIO(), io.StringIO()
        began = anyio.current_time()
        with (
            mock.patch.dict(os.environ, env or {}),
            mock.patch.object(environment, "Machine", edge),
            mock.patch.object(pool, "connect", self._connect),
            mock.patch.object(pool, "start_tls", self._start_tls),
            mock.patch.object(anyio.to_thread, "run_sync", self._in_turn),
            mock.patch.object(environment, "run_async", later),
            mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()))),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            status = cli.main(arguments)
            for first, *rest in parsed:
                status = await first(*rest)
        took = anyio.current_time() - began
        self.check_so_far(status)
        return Ran(status, out.getvalue(), err.getvalue(), seconds=took)

    def check_so_far(self, status: int = 0) -> None:
        """Judge what came since the last time, as one run: each cycle of a watch is one."""
        since, self._since = self._since, latest(self._sites())
        urls = {site: url for url, site in self._sites().items()}
        away = {urls[place.app] for place in self._places if place.was_away}
        check_run(self._sites(), since, status, away)
        for place in self._places:
            place.forget_outages()

    def _sites(self) -> dict[str, Site]:
        # A Site may listen under several names; its journal is one.
        return {
            place.url: site for site, place in {each.app: each for each in self._places}.items()
        }

    async def sync(
        self, registries: Mapping[str, Any], *mappings: Mapping[str, Any], **top: Any
    ) -> Ran:
        """Run mappings once, quietly, and report in JSON (see `document`)."""
        return await self.run(
            "sync", "--json", "-q", "-c", "-", stdin=document(registries, *mappings, **top)
        )

    async def copy(
        self, source: Server, target: Server, reference: str = "app:v1", *more: str
    ) -> Ran:
        """Copy one image and report in JSON; both are called by their names, and asked by http."""
        registries = {"source": source, "target": target}
        where = [f"{source.address}/{reference}", f"{target.address}/{reference}"]
        plain = ("copy", "--no-artifacts", "--json", "--no-progress", "-c", "-")
        return await self.run(*plain, *more, *where, stdin=document(registries))

    async def _connect(self, host: str, port: int, timeouts: Timeouts) -> MemoryWire:
        """As `_regsync.net.streams.connect`."""
        where = Origin("", host, port).authority
        try:
            with anyio.fail_after(timeouts.connect):
                return MemoryWire(await self.network.connect(host, port))
        except TimeoutError as error:
            within = f"within {timeouts.connect:g} s"
            message = f"{where}: silent {within}"
            brief = f"no connection {within}"
            raise ConnectFailed(message, address=(host, port), brief=brief) from error
        except OSError as error:
            brief = error.strerror or ""
            message = f"{where}: no connection: {brief}"
            failure = ConnectFailed(message, address=(host, port), brief=brief)
            failure.is_unknown_name = isinstance(error, socket.gaierror)
            raise failure from error

    @staticmethod
    async def _start_tls(below: Stream, context: object, host: str, timeouts: Timeouts) -> Stream:
        assert context is not None, "https needs a context"
        await anyio.lowlevel.checkpoint()
        return below

    @staticmethod
    async def _in_turn(function: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        return function(*arguments)


@contextlib.asynccontextmanager
async def virtual(chance: float = 0.5) -> AsyncIterator[Virtual]:
    """Give a world in memory; `chance` is the program's dice: a pause is so much of the longest
    one.
    """
    async with network() as net:
        world = Virtual(net, chance)
        yield world
    world.check()


@pytest.fixture
def chance() -> float:
    """Return the program's dice in the `world`; a test file has a fixture of its own for others."""
    return 0.5


@pytest.fixture
async def world(virtual_clock: None, chance: float) -> AsyncIterator[Virtual]:
    """Give a world in memory to a test, which then runs on the virtual clock."""
    async with virtual(chance) as made:
        yield made


@contextlib.asynccontextmanager
async def stopped_at(
    *seconds: float, number: signal.Signals = signal.SIGTERM
) -> AsyncIterator[None]:
    """Send this process a signal so many seconds of the virtual clock from now, each."""
    began = anyio.current_time()

    async def stop() -> None:
        for at in seconds:
            await anyio.sleep_until(began + at)
            signal.raise_signal(number)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop)
        yield
        tasks.cancel_scope.cancel()


def program(pyz: Path | None = None, *options: str) -> list[str]:
    """Return the words that start the program as a process: the checkout, a zipapp, or the file.

    `options` are the interpreter's, if there is one.
    """
    if program_file is not None:
        return [str(program_file)]
    return [sys.executable, *options, str(pyz or ROOT / "regsync.py")]


def started(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start the checkout's program as a process; its home is this process's (temporary) one."""
    options = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "cwd": ROOT,
        **options,
    }
    command = [*program(), *arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)


def copy(
    source: Endpoint | Running,
    target: Endpoint | Running,
    reference: str = "app:v1",
    to: str | None = None,
    *more: str,
) -> Ran:
    """Copy one image between two registries and report in JSON."""
    where = [f"{source.address}/{reference}", f"{target.address}/{to or reference}"]
    return run_regsync("copy", "--no-artifacts", "--json", *more, *where)


def document(
    registries: Mapping[str, Endpoint | Running | str | Mapping[str, Any]],
    *mappings: Mapping[str, Any],
    **top: Any,
) -> str:
    """Write a configuration: the alias `source` is the source, all others are the targets."""
    entries = {
        alias: {"url": each.url}
        if isinstance(each, (Endpoint, Running))
        else {"url": each}
        if isinstance(each, str)
        else dict(each)
        for alias, each in registries.items()
    }
    defaults = {
        "source": "source",
        "targets": sorted({*registries} - {"source"}),
        "artifacts": {"enabled": False},
    }
    defaults = {**defaults, **top.pop("defaults", {})}
    return json.dumps(
        {"registries": entries, "defaults": defaults, "mappings": list(mappings), **top}
    )


def tags(*names: str, **rule: Any) -> dict[str, Any]:
    """Write a tag rule of literal names or globs."""
    return {"glob": list(names), **rule}


def sync(
    registries: Mapping[str, Endpoint | Running | str | Mapping[str, Any]],
    *mappings: Mapping[str, Any],
    **top: Any,
) -> Ran:
    """Run mappings once, quietly, and report in JSON."""
    return run_regsync(
        "sync", "--json", "-q", "-c", "-", stdin=document(registries, *mappings, **top)
    )


def sync_file(
    directory: Path, registries: Mapping[str, Any], *mappings: Mapping[str, Any], **top: Any
) -> Ran:
    """Run mappings once from a file, so that there is state beside it, and report in JSON."""
    file = directory / "mirror.yaml"
    file.write_text(document(registries, *mappings, **top))
    return run_regsync("sync", "--json", "-q", "-c", str(file))


def held(server: Endpoint | Running, repository: str, image: Image) -> bool:
    """Whether everything that an image names, and a registry holds, is in a repository, byte for
    byte.
    """
    app = registry_of(server)
    for digest, body in image.contents().items():
        found = app.manifest(repository, digest)
        if (
            digest not in image.absent
            and (found.body if found else app.blob(repository, digest)) != body
        ):
            return False
    return True


def registry_of(server: Endpoint | Running) -> App:
    assert isinstance(server.app, App)
    return server.app


def load_all(server: Endpoint, images: Mapping[str, Mapping[str, Image]]) -> None:
    """Hold images at a registry, by repository and tag."""
    for repository, tagged in images.items():
        for tag, image in tagged.items():
            image.load_into(registry_of(server), repository, tag=tag)


def load_numbered(server: Endpoint, count: int) -> list[Image]:
    """Hold images v0, v1 and so on in `app`, which share a layer."""
    made = Seed(1)
    base = made.blob(500)
    layers = ([base, made.blob(300 + number)] for number in range(count))
    return [
        made.image(layers=each).load_into(registry_of(server), "app", tag=f"v{number}")
        for number, each in enumerate(layers)
    ]


def clear(*servers: Endpoint) -> None:
    """Forget what registries were asked."""
    for server in servers:
        server.journal.clear()


def drop_state(directory: Path) -> None:
    """Remove the state beside a configuration."""
    for each in (directory / ".regsync").iterdir():
        each.unlink()


def basic(user: str, password: str) -> str:
    """Return what Basic puts into the Authorization header."""
    return base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture(autouse=True)
def audited(request: pytest.FixtureRequest) -> None:
    """Forget the registries of the last test, and learn which mistakes this one provokes."""
    _audited.clear()
    _provoked.clear()
    _provoked.update(
        name for marker in request.node.iter_markers("provokes") for name in marker.args
    )


@pytest.fixture
def serve() -> Iterator[Start]:
    """Return a function that starts a registry (its arguments are App's) or serves the Site it is
    given.

    At the end of the test every one is asked whether the program sent what no correct client sends,
    and whether the faults that the test wanted took place.
    """
    running: list[Server] = []
    with contextlib.ExitStack() as stack:

        def start(site: Site | None = None, *, ssl_context: Any = None, **options: Any) -> Server:
            server = stack.enter_context(
                run_in_thread(site if site is not None else App(**options), ssl_context=ssl_context)
            )
            running.append(server)
            _audited[server.url] = server.app
            return server

        yield start
    for server in running:
        server.journal.check()
        server.app.faults.check()


@pytest.fixture
def source(serve: Start) -> Server:
    return serve()


@pytest.fixture
def target(serve: Start) -> Server:
    return serve()


@pytest.fixture
def sync_pair(tmp_path: Path, source: Server, target: Server) -> Callable[..., Ran]:
    """Return a function that runs mappings from `source` to `target`, with a state that stays."""
    return partial(sync_file, tmp_path, {"source": source, "target": target})


@pytest.fixture
def speaker() -> Iterator[Callable[[Callable[[socket.socket], None]], str]]:
    """Return a function that lets a plain function talk to every connection to a port; it gives
    HOST:PORT.

    For peers that no HTTP library could play.
    """
    listeners: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def talk(connected: socket.socket, script: Callable[[socket.socket], None]) -> None:
        with connected, contextlib.suppress(OSError):
            script(connected)

    def accept(listener: socket.socket, script: Callable[[socket.socket], None]) -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                return
            connected.settimeout(10)
            thread = threading.Thread(target=talk, args=(connected, script))
            thread.start()
            threads.append(thread)

    def start(script: Callable[[socket.socket], None]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        thread = threading.Thread(target=accept, args=(listener, script))
        thread.start()
        threads.append(thread)
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join()


def until_blank_line(connected: socket.socket) -> bytes:
    """Read one request's head from a socket; empty when the client has left."""
    got = b""
    while b"\r\n\r\n" not in got:
        piece = connected.recv(65536)
        if not piece:
            return b""
        got += piece
    return got


def only(items: Sequence[Any]) -> Any:
    """Return the one item."""
    assert len(items) == 1, items
    return items[0]
