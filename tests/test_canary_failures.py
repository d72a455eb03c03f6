"""Secrets in every command while anything else fails: what is inside, the disk, the network, a
signal, a stream that nobody reads; and a watch with its reloads and probes. The last part is of
real processes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import pytest

from conformance.content.images import Seed
from conformance.messages import Request, Response
from conformance.registry.tokens import BasicAuth
from tests.canaries import Canaries, Traces
from tests.canary_scene import COMMANDS, STORAGE, USER, Scene, arranged, said, words
from tests.ends import ROOT, document, run_regsync
from tests.watching import probe

# What stands in each manifest, and in each listing of tags.
READ = ('"schemaVersion"', '"tags"')


@contextlib.contextmanager
def crashed(scene: Scene) -> Iterator[None]:
    """Let the standard library fail where the program reads a manifest or a listing."""

    def crash(text: Any, **named: Any) -> Any:
        who = sys._getframe(1).f_globals["__name__"].partition(".")[0]
        if who not in ("conformance", "tests") and any(name in str(text) for name in READ):
            raise RuntimeError("a defect in the middle")
        return loads(text, **named)

    loads = json.loads
    with mock.patch.object(json, "loads", crash):
        yield


@contextlib.contextmanager
def interrupted(scene: Scene) -> Iterator[None]:
    """Have a signal at the 60th request."""

    def stop(host: str, request: Request, answer: Response, text: str) -> Response:
        if scene.asked == 60:
            signal.raise_signal(signal.SIGTERM)
        return answer

    scene.answers = stop
    yield


@contextlib.contextmanager
def full(scene: Scene) -> Iterator[None]:
    """Let nothing be written below cache_dir."""

    def refuse(path: Any, *given: Any, **named: Any) -> int:
        if ".regsync" in str(path) and given and given[0] & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return opened(path, *given, **named)

    opened = os.open
    with mock.patch.object(os, "open", refuse):
        yield


@contextlib.contextmanager
def locked(scene: Scene) -> Iterator[None]:
    directory = scene.directory / ".regsync"
    directory.mkdir()
    with open(directory / "state.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def changed(scene: Scene) -> Iterator[None]:
    """Let storages give other bytes."""

    def corrupt(host: str, request: Request, answer: Response, text: str) -> Response:
        return Response(200, answer.headers, answer.data[::-1]) if host == STORAGE else answer

    scene.answers = corrupt
    yield


@contextlib.contextmanager
def unreachable(scene: Scene) -> Iterator[None]:
    """Refuse connections to some, know no name of others."""
    places = scene.world.network._places
    for number, (host, port) in enumerate(sorted(places)):
        if host not in ("target.test", "written.test") and number % 2:
            places[host, port + 1] = places.pop((host, port))
        elif host not in ("target.test", "written.test"):
            del places[host, port]
    yield


@contextlib.contextmanager
def circling(scene: Scene) -> Iterator[None]:
    """Redirect from storage to storage, each URL signed with what was heard."""

    def again(host: str, request: Request, answer: Response, text: str) -> Response:
        return Response(307, [("Location", f"{request.target}&x")]) if host == STORAGE else answer

    scene.answers = again
    yield


FAILURES: dict[str, Callable[[Scene], contextlib.AbstractContextManager[None]]] = {
    each.__name__: each
    for each in (crashed, interrupted, full, locked, changed, unreachable, circling)
}
ONLINE = (*("sync", "sync, its log", "sync --dry-run", "lock", "audit", "auth", "tags"), "copy")
FROM_A_LOCK = ("lock --check", "sync --locked")
OFFLINE = ("validate", "expand", "schema", "version")


@pytest.mark.anyio
@pytest.mark.virtual_time
@pytest.mark.parametrize("failure", FAILURES)
async def test_a_failure_within_shows_no_secret(world, failure, tmp_path, clean_env):
    """The commands one after the other, on what the one before has left."""
    scene = arranged(
        world,
        tmp_path,
        clean_env,
        "of the environment",
        first=1_100_000 if failure == "full" else 300,
    )
    scene.registry("written", BasicAuth({USER: (secret := scene.canaries.make("login"))}), auth_type="basic",
        credentials={"username": USER, "password": secret})  # fmt: skip
    scene.config()
    traces = Traces(scene.canaries, tmp_path, clean_env)
    with FAILURES[failure](scene):
        for command in ONLINE if failure in ("crashed", "unreachable") else ("sync", "copy"):
            scene.asked = 0
            ran = await scene.run(*words(scene, command))
            assert failure != "crashed" or command == "auth" or "a defect in the middle" in ran.err
            found = traces.found({**said(ran)})
            assert not found, (command, found)


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_each_command_shows_no_secret(world, tmp_path, clean_env):
    assert {*ONLINE, *OFFLINE, "auth, json", *FROM_A_LOCK} == {*COMMANDS}
    scene = arranged(world, tmp_path, clean_env)
    scene.config()
    traces = Traces(scene.canaries, tmp_path, clean_env)
    online = ("sync --dry-run", "lock", *FROM_A_LOCK, "auth, json", "tags", "copy")
    for command in (*online, *OFFLINE):
        for host in ("written.test", "static.test") if command in ("tags", "copy") else ("",):
            ran = await scene.run(*words(scene, command, host))
            found = traces.found(said(ran))
            assert not found, (command, found)
    ran = await scene.run("expand", "--show-secrets", str(tmp_path / "mirror.yaml"))
    shown = {"credentials.password", "credentials.password, written out", "token", "proxy"}
    assert {*scene.canaries.found(ran.out.encode())} == shown, (
        "what is asked for is shown, and is what is hidden else"
    )


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_a_watch_its_reloads_and_its_probes_show_no_secret(world, tmp_path, clean_env):
    """A cycle, a new password, a file that is broken around one, a registry that repeats it, the
    end.
    """
    bodies: list[str] = []
    scene = arranged(world, tmp_path, clean_env, "of the environment")
    file = scene.config()
    secret = scene.canaries.make("another password")
    traces = Traces(scene.canaries, tmp_path, clean_env)

    def write(password: str) -> None:
        login = {"auth_type": "basic", "credentials": {"username": USER, "password": password}}
        scene.registries["another"] = {"url": "http://elsewhere.test", **login}
        scene.config()

    def repeat(host: str, request: Request, answer: Response, text: str) -> Response:
        told = json.dumps({"errors": [{"code": "DENIED", "message": text}]})
        return Response(403, [], told.encode()) if host == "target.test" else answer

    async def play() -> None:
        steps: list[Callable[[], object]] = [
            lambda: write(secret),
            lambda: file.write_text(
                file.read_text().replace(f'"{secret}"', f"*{secret.replace('/', '')}")
            ),
            lambda: file.write_text(
                f"registries: {{a: {{url: 'https://me:{secret}@a.test'}}}}\nmappings: []\n"
            ),
            lambda: write(secret),
            lambda: setattr(scene, "answers", repeat),
        ]
        await anyio.sleep(15)  # between two cycles
        for step in steps:
            await anyio.sleep(30)
            bodies.extend(json.dumps(probe(path)) for path in ("/healthz", "/readyz"))
            step()
        await anyio.sleep(45)
        signal.raise_signal(signal.SIGTERM)

    more = ("--interval", "30", "--health-port", "0", "-vv", "--json")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(play)
        ran = await scene.run("watch", "-c", str(file), *more)
        tasks.cancel_scope.cancel()
    assert "reload_failed" in ran.err or "in force" in ran.err
    assert "a user or password cannot stand here" in "".join(bodies), (
        "a probe tells why a file was not taken"
    )
    assert "***" in ran.err, "what the registry repeated"
    file.unlink()
    assert not traces.found({**said(ran), "probes": "\n".join(bodies)})


# Real processes.


@pytest.fixture
def secrets(clean_env: Path, monkeypatch: pytest.MonkeyPatch) -> Canaries:
    """Put a password into the environment, a token into a file."""
    canaries = Canaries()
    monkeypatch.setenv("CONFIG_PASSWORD", canaries.make("CONFIG_PASSWORD", "/:"))
    return canaries


def mirror(path: Path, source: str, target: str, **more: Any) -> str:
    login = {
        "auth_type": "basic",
        "credentials": {"username": USER, "password": "${CONFIG_PASSWORD}"},
    }
    registries = {"source": {"url": source, **login, **more}, "target": {"url": target, **login}}
    file = path / "mirror.yaml"
    file.write_text(document(registries, {"from": "app", "tags": {"glob": "*"}}))
    return str(file)


# What a process does when it begins its first upload; it also writes down how it is called by
# then.
MIDDLES = {
    "crash": "os.abort()",
    "SIGTERM": "os.kill(os.getpid(), 15); os.kill(os.getpid(), 15)",
    "Ctrl-C": "raise KeyboardInterrupt",
    "defect": "raise ValueError('a defect in the middle')",
}
MIDDLE = """
import os, runpy, socket, sys
send = socket.socket.send
def stop(self, data, *flags):
    if bytes(data[:5]) == b'POST ':
        with open('/proc/self/cmdline', 'rb') as title, open(os.environ['TMPDIR'] + '/title', 'wb') as file:
            file.write(title.read())
        {}
    return send(self, data, *flags)
socket.socket.send = stop
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


@pytest.mark.process
@pytest.mark.parametrize("how", ["dev", "lost output", "closed output", *MIDDLES])
def test_a_process_shows_no_secret(how, serve, tmp_path, clean_env, secrets, monkeypatch):
    """With warnings about what is left open, a fault handler, no reader, an end in the middle."""
    script = MIDDLE.format(MIDDLES[how]) if how in MIDDLES else None
    check_process(how, script, serve, tmp_path, clean_env, secrets, monkeypatch)


def check_process(how, script, serve, tmp_path, clean_env, secrets, monkeypatch):
    auth = BasicAuth({USER: secrets.places["CONFIG_PASSWORD"]})
    source, target = serve(auth=auth), serve(auth=auth)
    Seed(1).image(sizes=(900,)).load_into(source.app, "app", tag="v1")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    file = mirror(tmp_path, "http://127.0.0.1:9" if how == "refused" else source.url, target.url)
    traces = Traces(secrets, tmp_path, clean_env)
    program = [str(ROOT / "regsync.py")]
    if script is not None:
        program = ["-c", script, *program]
    command = [
        sys.executable,
        *(["-X", "dev"] if how == "dev" else []),
        *program,
        "sync",
        "-vv",
        "--json",
        "-c",
        file,
    ]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            command,
            stdout=full if how == "lost output" else subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=(lambda: os.close(1)) if how == "closed output" else None,
            text=True,
            cwd=ROOT,
        )
        out, err = process.communicate(timeout=60)
    expected = {
        "dev": 0,
        "crash": -signal.SIGABRT,
        "refused": 2,
        "SIGTERM": 143,
        "Ctrl-C": 130,
        "defect": 2,
    }
    assert process.returncode == expected.get(how, process.returncode), err
    assert (how == "crash") == ("Fatal Python error: Aborted" in err)
    assert (how in MIDDLES) == (tmp_path / "tmp" / "title").exists()
    assert how != "defect" or ("Traceback" in err and "a defect in the middle" in err)
    assert not traces.found({"standard output": out or "", "standard error": err})


@pytest.mark.process
def test_a_client_key_is_in_nothing_that_is_said(serve, tmp_path, clean_env, secrets, ca):
    """A server that asks for a certificate, one that nobody trusts, keys that are broken in all
    ways.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    context.verify_mode = ssl.CERT_REQUIRED
    ca.configure_trust(context)
    auth = BasicAuth({USER: secrets.places["CONFIG_PASSWORD"]})
    source, target = serve(ssl_context=context, auth=auth), serve()
    Seed(1).image(sizes=(900,)).load_into(source.app, "app", tag="v1")
    issued = ca.issue_cert("client.test")
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    (certificate := tmp_path / "client.pem").write_bytes(
        b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    )
    pem = issued.private_key_pem.bytes().decode()
    for number, line in enumerate(pem.splitlines()[1:-1]):
        if len(line) > 20:
            secrets.add(f"client_key, line {number}", line)
    keys = {
        "good": pem,
        "no PEM": pem.replace("-----", "----"),
        "half": pem[: len(pem) // 2],
        "encrypted": pem.replace(
            "-----\n", "-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00\n\n", 1
        ),
        "another's": ca.issue_cert("other.test").private_key_pem.bytes().decode(),
    }
    for name, text in keys.items():
        (tmp_path / "client.key").write_text(text)
        for trusts in (True, False):
            tls = {"client_cert": str(certificate), "client_key": str(tmp_path / "client.key")}
            file = mirror(
                tmp_path,
                source.url,
                target.url,
                **tls,
                **({"ca_file": str(tmp_path / "ca.pem")} if trusts else {}),
            )
            traces = Traces(secrets, tmp_path, clean_env)
            ran = run_regsync("sync", "-vv", "--json", "-c", file)
            assert (ran.status == 0) == (name == "good" and trusts), ran.err
            assert not traces.found(said(ran)), name
