"""A command at work: what the process gives to it, signals, and how its progress and its end are
told. Owns: the edge to the process (environment, files, clock, chance), the wiring of a run or a
listing, and what `auth check` asks a repository. May not know: arguments, configuration files, how
anything is copied or a login is made. Invariants: connections are closed however a command ends;
`auth check` reads and writes no manifest, creates no repository: an upload is begun, and ended at
once, only where one is. Follows docs/specification.md 1.6, docs/design.md 2, 5, 9."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from typing import Any, Literal

import anyio

from _regsync.app.console import Console, Snapshot
from _regsync.config.model import Config, MappingRule, Registry
from _regsync.errors import ConfigError, RegistryError, Side, SyncError
from _regsync.oci.manifest import Descriptor
from _regsync.registry.repository import Repository
from _regsync.registry.transport import Edge, Transport
from _regsync.registry.upload import Upload
from _regsync.state.knowledge import Knowledge
from _regsync.sync.discovery import Discovery, together
from _regsync.sync.report import Outcome, Report, analysis_lines
from _regsync.sync.run import Run
from _regsync.sync.schedule import Execution
from _regsync.tags import TagRule
from _regsync.text import clean, duration_text

_TICK = 0.25


_HEARTBEAT = 30.0


_RATE_SECONDS = 5.0  # an average over hours hides that nothing moves now


async def run(
    found: Config,
    console: Console,
    one: tuple[MappingRule, str, str] | None = None,
    rehearse: Literal["plan", "analysis"] | None = None,
) -> int:
    """Run a configuration's mappings, or copy `one` image; tell how it ended, return the exit
    status.
    """
    began = anyio.current_time()
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    report = Report()
    connected = connect(console)
    run_id = os.urandom(8).hex()
    work = Run(connected, found, console.outcome, report, rehearse)
    signals = list[int]()
    stop = anyio.Event()
    with closing(connected):
        async with anyio.create_task_group() as tasks:

            def take(number: int) -> None:
                signals.append(number)
                stop.set()  # take nothing new, and drain
                if len(signals) > 1:
                    tasks.cancel_scope.cancel()

            tasks.start_soon(listen_for_signals, take, (signal.SIGINT, signal.SIGTERM))
            if console.live or console.heartbeat:
                tasks.start_soon(show_progress, console, work.execution)
            await (work.copy(*one, stop) if one else work.sync(stop))
            tasks.cancel_scope.cancel()
    elapsed = anyio.current_time() - began
    document = report.as_json(run_id, started, elapsed, connected.requests, connected.throttled)
    if work.rehearsal is not None:
        document = (
            work.rehearsal.analysis() if rehearse == "analysis" else {**document, "dry_run": True}
        )
        if not console.as_json:
            for line in analysis_lines(document) if rehearse == "analysis" else report.plan():
                console.line(line)
    elif one is None:
        console.summary(report, elapsed)
    if console.as_json:
        console.document(document)
    return 128 + signals[0] if report.interrupted else report.exit_status()


async def list_tags(registry: Registry, repository: str, rule: TagRule, console: Console) -> int:
    """List a repository, show what a rule selects of it and why not the others; return the exit
    status.
    """
    with closing(connect(console)) as connected:
        connected.prepare(registry)
        discovery = Discovery(connected, Knowledge())
        source = discovery.repository(registry, repository, Side.SOURCE)
        kept, dropped, floor = await discovery.select(rule, source)
    for tag, reason in dropped.items():
        console.log("info", "tag_dropped", f"dropped, {reason:<12}  {tag}", tag=tag, reason=reason)
    reasons = ", ".join(
        f"{count} {reason}" for reason, count in Counter(dropped.values()).most_common()
    )
    told = f"{source}: {len(kept)} of {len(kept) + len(dropped)} tags are selected"
    level, event = ("info", "selected") if kept else ("warning", "nothing_selected")
    console.log(level, event, f"{told} (dropped: {reasons})" if reasons else told)
    if len(kept) < floor:
        console.log("warning", "min_tags", f"{source}: min_tags asks for {floor}, not {len(kept)}")
    if console.as_json:
        console.document({"repository": str(source), "tags": kept, "dropped": dict(dropped)})
    for tag in () if console.as_json else kept:
        console.line(tag)
    return 0


async def check(found: Config, console: Console) -> int:
    """Ask for every repository in use, tell what works and what is missing; return the exit status."""
    connected = connect(console)
    needs = dict[tuple[Registry, str], Side]()
    rows = list[dict[str, Any]]()
    for mapping in found.mappings:
        needs.setdefault((mapping.source, mapping.source_repository), Side.SOURCE)
        needs |= {(target, mapping.target_repository): Side.TARGET for target in mapping.targets}
    with closing(connected):
        for registry, _ in needs:
            connected.prepare(registry)
        discovery = Discovery(connected, Knowledge())
        left = iter([discovery.repository(*where, side) for where, side in needs.items()])

        async def work() -> None:
            for repository in left:
                rows.append(await _row(connected, repository, console))

        await together([work] * 16)
    if console.as_json:
        console.document(
            {"schema": 1, "access": sorted(rows, key=lambda row: str(row["repository"]))}
        )
    return 4 if any(row["error"] for row in rows) else 0


async def _row(connected: Transport, repository: Repository, console: Console) -> dict[str, Any]:
    login = repository.host.authenticator
    method = repository.host.registry.auth_type
    upload = None
    error = None
    try:
        with repository.located("check", str(repository)):
            upload = await _ask(connected, repository)
    except SyncError as caught:
        error = caught
        console.log(
            "error", "check_failed", f"{error.code}: {error}", code=error.code, hint=error.hint
        )
    expires = login.chain.expires if login.chain else math.inf
    until = (
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expires)) if 0 <= expires < 1e11 else None
    )
    source = (
        None if login.anonymous or not login.proven else login.credential.origin
    )  # who is not asked shows none
    later = "not there yet, so no push was tried" if upload == "absent" else ""
    told = ", ".join(filter(None, (source or "anonymous", until and f"until {until}", later)))
    if not (error or console.as_json):
        console.line(f"ok  {repository}  {repository.rights}  ({told})")
    return {
        "registry": repository.host.registry.alias,
        "repository": str(repository),
        "rights": repository.rights,
        "method": method or "detected",
        "source": source,
        "expires": until,
        "upload": upload,
        "error": Outcome("", "", "", error=error).as_json()["error"],
    }


async def _ask(connected: Transport, repository: Repository) -> str | None:
    host = repository.host
    writes = repository.side is Side.TARGET
    call = repository.call("tag_list", "GET", "tags/list?n=1")
    try:
        await connected.request(host, call, ok=(200,), limit=8 * 1024 * 1024)
    except RegistryError as error:
        # What hides a repository may let us push to it all the same; what ECR has not got it does
        # not create.
        if not writes or error.status not in (401, 403, 404):
            raise
        if error.status == 404 and host.registry.kind.startswith("ecr"):
            raise
        if error.status == 404:
            return "absent"
    if not writes:
        return None
    async with connected.pool.lease(host.origin) as lease:
        upload = Upload(repository, connected, lease, Descriptor("", "", 0))
        await upload.start()
        await upload.cancel_upload()
    return "opened"


async def show_progress(console: Console, progress: Execution) -> None:
    """Keep the live display, or a heartbeat every 30 s, until cancelled."""
    began = anyio.current_time()
    past = deque([(began, 0)])
    try:
        while True:
            await anyio.sleep(_TICK if console.live else _HEARTBEAT)
            now = anyio.current_time()
            while len(past) > 1 and past[1][0] <= now - _RATE_SECONDS:
                past.popleft()
            rate = (progress.transport.bytes - past[0][1]) / (now - past[0][0])
            past.append((now, progress.transport.bytes))
            console.progress(
                Snapshot(
                    progress.done,
                    progress.known,
                    progress.transport.bytes,
                    progress.expected,
                    rate,
                    now - began,
                    _waiting(progress, now),
                )
            )
    finally:
        console.clear()


def _waiting(progress: Execution, now: float) -> str:
    names = progress.under_way()
    if progress.ends is not None:
        return f"stopping in {duration_text(max(0.0, progress.ends - now))} at most, {len(names)} under way"
    for host, meter in progress.transport.paused.items():
        if meter.paused > now:
            text = f"{host} is throttled (429), window {meter.width:.0f}"
            return f"{text}, next try in {duration_text(meter.paused - now)}"
    if not names:
        return "asking what there is" if progress.done == progress.known else "comparing tags"
    return f"copying {names[0]}" if len(names) == 1 else f"{len(names)} under way, first {names[0]}"


def connect(console: Console, log: Callable[..., None] | None = None) -> Transport:
    """Return what a process asks registries with; `log` stands for the console's."""
    home = os.path.expanduser("~")  # itself where nobody knows it
    return Transport(
        Edge(
            environ=os.environ,
            home=None if home == "~" else home,
            read=_read_file,
            chance=lambda: int.from_bytes(os.urandom(6), "big") / 2**48,
            wall=time.time,
            log=log or console.log,
            open_files=_raise_file_limit(),
        )
    )


def _read_file(path: str) -> bytes | None:
    try:
        with open(path, "rb") as stream:
            return stream.read(4 * 1024 * 1024)  # more than any file of credentials has
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(
            f"{clean(path)} cannot be read: {clean(error.strerror or str(error))}"
        ) from error


async def run_awake_to_signals(work: Callable[..., Awaitable[int]], *arguments: Any) -> int:
    """Run `work` in an event loop that every signal wakes; return its exit status.

    Python runs a signal's function only between two steps of its own. A signal that comes right
    before the event loop waits would be acted on when something else ends the wait. While the loop
    receives any signal, it sets `signal.set_wakeup_fd`, and then each signal ends the wait. SIGURG
    is one that nobody sends and that does nothing: the functions of the others stay as they are.
    """
    unused = getattr(signal, "SIGURG", None)
    # Windows has no SIGURG, but a loop that every signal wakes. Only the main thread gets signals.
    if unused is None or threading.current_thread() is not threading.main_thread():
        return await work(*arguments)

    with anyio.open_signal_receiver(unused):
        return await work(*arguments)


async def listen_for_signals(
    take: Callable[[int], None], numbers: Sequence[signal.Signals]
) -> None:
    """Tell `take` of each signal, until cancelled."""
    try:
        with anyio.open_signal_receiver(*numbers) as received:
            async for number in received:
                take(int(number))
    except NotImplementedError:
        # the event loop of Windows takes no signal handlers; an interrupt then ends the program at
        # once
        return


def _raise_file_limit() -> int:
    most = 65536  # or as many as the system lets us open (docs/design.md section 9)
    try:
        import resource
    except ImportError:
        return most
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < most:
        soft = most if hard == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return most if soft == resource.RLIM_INFINITY else soft
