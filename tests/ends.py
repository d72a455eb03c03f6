"""Both ends of a copy and the program between them: registries, and runs with what they said.

Registries are the harness's. Tests that are coroutines use `virtual`, or the fixture `world`:
registries and the program on the test's event loop, in memory, on a clock that jumps. Other tests
use `serve` (or `source` and `target`) and `run_regsync`, which make such a loop for each run. Tests
with the marker `process` have registries on sockets, each in a thread of its own, and the program
in a process: that is for TLS, signals, pipes and other peers. With `--file` all of the second kind
run so.
"""

from __future__ import annotations

import base64
import contextlib
import inspect
import json
import signal
import socket
import threading
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import hypothesis  # noqa: F401  (its hook for trio warns when trio is there first)
import pytest
import trio
from trio.testing import MockClock

from conformance.audit import audit, latest, report
from conformance.http import Endpoint, Gone, Site, SocketConnection, run_in_thread
from conformance.images import Image, Seed
from conformance.memory import Link, Network, Place, network
from conformance.personas import Provider, Running, imitate
from conformance.registry import App
from tests import program as program_under_test
from tests.program import (
    NEW_YEAR,
    ROOT,
    Chosen,
    Edge,
    Ran,
    Stream,
    believe,
    edge_of,
    run_here,
    run_process,
    run_virtual,
    started,
)

__all__ = ["ROOT", "Ran", "started"]

# No run of a test takes longer: who is not back by then never comes back.
_LONGEST_RUN = 30 * 86_400.0

# By then, registries have noticed that the program has left.
_UNTIL_IDLE = 60.0

_BETWEEN_RUNS = 1.0  # seconds from the end of a run to the next one

Start = Callable[..., Endpoint]

# The running test's registries by origin, and the mistakes that it provokes (marker `provokes`).
_audited: dict[str, Site] = {}
_provoked: set[str] = set()


class _Test:
    """The running test's registries in memory, if it is no coroutine and starts no process."""

    places: list[Place] = []  # noqa: RUF012
    is_process = False  # marker `process`, or --file
    is_inside = False  # markers `process` and `in_process`: on sockets, but in this process
    began = 0.0  # when it began, in seconds since 1970
    elapsed = 0.0  # how long its runs have taken, on their clocks


def run_regsync(
    *arguments: str, env: Mapping[str, str] | None = None, stdin: str | bytes = b""
) -> Ran:
    """Run the program and return what it did.

    Then the registries that `serve` started are asked what it did wrong.
    """
    since = latest(_audited)
    if _Test.is_inside:
        ran = run_here(*arguments, env=env, stdin=stdin)
    elif _Test.is_process:
        ran = run_process(*arguments, env=env, stdin=stdin)
    else:
        ran = trio.run(
            partial(_run_in_memory, arguments, env, stdin), clock=MockClock(autojump_threshold=0)
        )
        _Test.elapsed += ran.seconds + _BETWEEN_RUNS
    check_run(_audited, since, ran.status)
    return ran


async def _run_in_memory(
    arguments: Sequence[str], env: Mapping[str, str] | None, stdin: str | bytes
) -> Ran:
    async with network() as net:
        for place in _Test.places:
            net.attach(place)
        edge = edge_of(net, wall=wall, chance=0.0, env=env)
        with anyio.fail_after(_LONGEST_RUN):
            ran = await run_virtual(arguments, edge, stdin)
        await anyio.sleep(_UNTIL_IDLE)
    return ran


def now() -> float:
    """Return the time of the running test, in seconds since its first run."""
    try:
        return _Test.elapsed + anyio.current_time()
    except anyio.NoEventLoopError:
        return _Test.elapsed


def wall() -> float:
    """Return the time of day in the running test, in seconds since 1970."""
    return _Test.began + now()


def check_run(
    sites: Mapping[str, Site], since: int, status: int, away: Collection[str] = ()
) -> None:
    """Raise AssertionError when the program made a mistake in a run whose exchanges are all behind
    `since`; `away` are the registries that could not be reached for some time.

    A test that provokes one says so: `@pytest.mark.provokes("name", ...)`.
    """
    findings = audit(
        sites,
        since=since,
        # Tests of which it is a target too say so: `provokes("source_written")`.
        readonly=[url for url in sites if url.endswith("//source.test")],
        remembered=True,
        excused=_provoked,
        away=away,
        has_failed=status != 0,
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
        return NEW_YEAR + anyio.current_time()

    def edge(self, env: Mapping[str, str] | None = None) -> Edge:
        """Return the world as the program has it; a test may replace a part."""
        made = edge_of(self.network, wall=self.wall, chance=self._chance, env=env)
        return made._replace(connect=self.connect, start_tls=self.start_tls)

    async def connect(self, host: str, port: int) -> Stream:
        """Connect the program to a place; a test may replace it."""
        return Stream(await self.network.connect(host, port))

    async def start_tls(self, below: Stream, context: object, host: str) -> Stream:
        """Let a TLS handshake of the program succeed; a test may replace it."""
        return await believe(below, context, host)

    async def run(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
        edge: Edge | None = None,
        terminal: bool = False,
    ) -> Ran:
        """Run the program and return what it did."""
        self._since = latest(self._sites())
        ran = await run_virtual(arguments, edge or self.edge(env), stdin, terminal=terminal)
        self.check_so_far(ran.status)
        return ran

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
        self, source: Endpoint, target: Endpoint, reference: str = "app:v1", *more: str
    ) -> Ran:
        """Copy one image and report in JSON; both are called by their names, and asked by http."""
        registries = {"source": source, "target": target}
        where = [f"{source.address}/{reference}", f"{target.address}/{reference}"]
        plain = ("copy", "--no-artifacts", "--json", "--no-progress", "-c", "-")
        return await self.run(*plain, *more, *where, stdin=document(registries))


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


program = program_under_test.words


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
    _Test.places.clear()
    _Test.is_process = (
        Chosen.file is not None
        or request.node.get_closest_marker("process") is not None
        or not {"docker_registry", "docker_registries"}.isdisjoint(request.fixturenames)
    )
    _Test.is_inside = _Test.is_process and request.node.get_closest_marker("in_process") is not None
    _Test.began = time.time()
    _Test.elapsed = 0.0
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
    running: list[Endpoint] = []
    with contextlib.ExitStack() as stack:

        def start(site: Site | None = None, *, ssl_context: Any = None, **options: Any) -> Endpoint:
            site = site if site is not None else App(**options)
            server: Endpoint
            if _Test.is_process:
                server = stack.enter_context(run_in_thread(site, ssl_context=ssl_context))
            else:
                assert ssl_context is None, "TLS needs sockets: mark the test `process`"
                port = 40001 + len(_Test.places)
                server = Place(site, "http", "127.0.0.1", port, Link(), Link())
                _Test.places.append(server)
            running.append(server)
            _audited[server.url] = server.app
            return server

        yield start
    for server in running:
        server.journal.check()
        server.app.faults.check()


@pytest.fixture
def source(serve: Start) -> Endpoint:
    return serve()


@pytest.fixture
def target(serve: Start) -> Endpoint:
    return serve()


@pytest.fixture
def sync_pair(tmp_path: Path, source: Endpoint, target: Endpoint) -> Callable[..., Ran]:
    """Return a function that runs mappings from `source` to `target`, with a state that stays."""
    return partial(sync_file, tmp_path, {"source": source, "target": target})


class Peer:
    """What a script has of a connection: it may say anything, HTTP or not."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def receive(self) -> bytes:
        """Return some bytes that have arrived; none when the client has left."""
        try:
            return bytes(await self._connection.receive())
        except Gone:
            return b""

    async def head(self) -> bytes:
        """Return a request's head; it is empty when the client has left."""
        got = b""
        while b"\r\n\r\n" not in got:
            piece = await self.receive()
            if not piece:
                return b""
            got += piece
        return got

    async def send(self, data: bytes) -> None:
        """Send bytes. Raises Gone when the client has left."""
        await self._connection.send(data)

    def reset(self) -> None:
        self._connection.reset()


Script = Callable[[Peer], Awaitable[None]]


class Talk(Place):
    """A place in memory at which a script talks to every connection."""

    def __init__(self, script: Script, port: int) -> None:
        super().__init__(App(), "http", "127.0.0.1", port, Link(), Link())
        self._script = script

    async def converse(self, connection: Any, number: int) -> None:
        await converse(self._script, connection)


async def converse(script: Script, connection: Any) -> None:
    try:
        await script(Peer(connection))
    except Gone:
        return
    finally:
        connection.close()


@pytest.fixture
def speaker() -> Iterator[Callable[[Any], str]]:
    """Return a function that lets a script talk to every connection to a port; it gives HOST:PORT.

    For peers that no HTTP library could play. A script is a coroutine function of a `Peer`. Where
    the program is a process, it may also be a plain function of a socket.
    """
    with contextlib.ExitStack() as stack:

        def start(script: Any) -> str:
            if _Test.is_process:
                return stack.enter_context(talking(script))
            place = Talk(script, 40001 + len(_Test.places))
            _Test.places.append(place)
            return place.address

        yield start


@contextlib.contextmanager
def talking(script: Any) -> Iterator[str]:
    """Let a script talk to every connection to a port of this machine, each in a thread."""
    threads: list[threading.Thread] = []

    def talk(connected: socket.socket) -> None:
        if inspect.iscoroutinefunction(script):
            connected.setblocking(False)
            anyio.run(converse, script, SocketConnection(connected))
            return
        connected.settimeout(10)
        with connected, contextlib.suppress(OSError):
            script(connected)

    def accept(listener: socket.socket) -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=talk, args=(connected,)))
            threads[-1].start()

    listener = socket.create_server(("127.0.0.1", 0))
    threads.append(threading.Thread(target=accept, args=(listener,)))
    threads[0].start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for thread in threads:
        thread.join()


def only(items: Sequence[Any]) -> Any:
    """Return the one item."""
    assert len(items) == 1, items
    return items[0]
