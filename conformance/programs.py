"""Run docker-registry and skopeo, with which tests compare the harness.

Owns: finding programs; starting and stopping these two.
May not know: which requests they get.
Invariants: if a program is missing, that is an error that names its package, never a skipped test.
A registry that was started is always stopped. Its port is chosen by the kernel unless the caller
passes a port, so that two registries never collide.
"""

from __future__ import annotations

import http.client
import json
import queue
import re
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO

__all__ = [
    "HTPASSWD",
    "PASSWORD",
    "USER",
    "MissingProgram",
    "docker_registry",
    "find_program",
    "skopeo",
]

USER = "captain"
PASSWORD = "open sesame"
# A line of an htpasswd file: bcrypt of PASSWORD at the lowest cost. docker-registry supports only
# bcrypt.
HTPASSWD = f"{USER}:$2y$05$abcdefghijklmnopqrstuupx2xBUC4954936wVIjyyPHmUBFu0wCW\n"

# The line of docker-registry's log that has its address.
_LISTENING = re.compile(r'msg="listening on ([^",]+)')
_START = 30.0  # maximum seconds until docker-registry listens; it usually takes 0.1


class MissingProgram(Exception):
    """A required program is not installed."""


def find_program(program: str, package: str) -> str:
    """Return the path of a program.

    Raises MissingProgram, which names Debian's package, if absent.
    """
    path = shutil.which(program)
    if path is None:
        raise MissingProgram(
            f"{program} is not installed; Debian's package is {package}: apt-get install {package}"
        )
    return path


@contextmanager
def docker_registry(
    directory: Path | str,
    *,
    htpasswd: str | None = None,
    tls: tuple[Path | str, Path | str] | None = None,
    in_memory: bool = False,
    port: int = 0,
) -> Iterator[str]:
    """Run docker-registry while the block runs. Yields its HOST:PORT.

    Configuration and log are in `directory`. So is its data, unless `in_memory`. `htpasswd` is the
    content of an htpasswd file (see HTPASSWD). `tls` has the paths of certificate and key in PEM.
    `port` is 0 for any free port, or the port of a registry that is started again.
    """
    program = find_program("docker-registry", "docker-registry")
    home = Path(directory)
    home.mkdir(parents=True, exist_ok=True)
    settings = _settings(home, tls, port, in_memory=in_memory)
    if htpasswd is not None:
        (home / "htpasswd").write_text(htpasswd)
        settings["auth"] = {"htpasswd": {"realm": "real", "path": str(home / "htpasswd")}}

    config = home / "config.yml"
    config.write_text(json.dumps(settings))  # JSON is YAML
    process = subprocess.Popen(
        [program, "serve", str(config)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={"HOME": str(home), "OTEL_TRACES_EXPORTER": "none"},
        cwd=home,
    )
    assert process.stderr is not None
    addresses: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(
        target=_copy_log, args=(process.stderr, home / "registry.log", addresses), daemon=True
    )
    reader.start()
    try:
        address = addresses.get(timeout=_START)
        if address is None:
            raise RuntimeError(
                f"docker-registry did not start:\n{(home / 'registry.log').read_text()[-2000:]}"
            )
        _ask(address, secure=tls is not None)
        yield address
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        if process.poll() is None:
            process.kill()
            process.wait()
        reader.join()
        process.stderr.close()


def _settings(
    home: Path, tls: tuple[Path | str, Path | str] | None, port: int, *, in_memory: bool
) -> dict[str, object]:
    """Return a configuration with deletion enabled.

    With a port of 0, the kernel chooses the port.
    """
    driver: dict[str, object] = {"filesystem": {"rootdirectory": str(home / "data")}}
    if in_memory:
        driver = {"inmemory": {}}

    server: dict[str, object] = {
        "addr": f"127.0.0.1:{port}",
        "secret": "not a secret: it only signs upload states of one run",
    }
    if tls is not None:
        certificate, key = tls
        server["tls"] = {"certificate": str(certificate), "key": str(key)}

    return {
        "version": "0.1",
        "log": {"level": "info", "accesslog": {"disabled": True}},
        "storage": {**driver, "delete": {"enabled": True}, "cache": {"blobdescriptor": "inmemory"}},
        "http": server,
    }


def _copy_log(source: IO[bytes], log: Path, addresses: queue.Queue[str | None]) -> None:
    """Copy the log of docker-registry to a file.

    Put its address into `addresses`, and None at the end.
    """
    with log.open("wb") as out:
        for line in source:
            out.write(line)
            out.flush()
            match = _LISTENING.search(line.decode("utf-8", "replace"))
            if match:
                addresses.put(match[1])
    addresses.put(None)


def _ask(address: str, *, secure: bool) -> None:
    """Send one request. Raises an error if the registry listens but cannot answer."""
    connection = http.client.HTTPConnection(address, timeout=_START)
    if secure:
        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(address, timeout=_START, context=context)
    with closing(connection):
        connection.request("GET", "/v2/")
        status = connection.getresponse().status
    if status not in (200, 401):
        raise RuntimeError(f"docker-registry answers {status} to /v2/")


def skopeo(*arguments: str, home: Path | str) -> bytes:
    """Run skopeo with an empty home directory and no policy. Returns its standard output.

    Raises AssertionError if skopeo fails.
    """
    program = find_program("skopeo", "skopeo")
    command: Sequence[str] = [program, "--insecure-policy", f"--tmpdir={home}", *arguments]
    environment = {"HOME": str(home), "XDG_RUNTIME_DIR": str(home), "PATH": "/usr/bin:/bin"}
    completed = subprocess.run(
        command, capture_output=True, env=environment, timeout=120, check=False
    )
    if completed.returncode:
        raise AssertionError(f"{' '.join(command)}:\n{completed.stderr.decode('utf-8', 'replace')}")
    return completed.stdout
