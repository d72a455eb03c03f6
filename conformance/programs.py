"""Run docker-registry and skopeo, with which tests compare the harness.

If a program is missing, that is an error that names its package, never a skipped test. A registry
that was started is always stopped. Its port is chosen by the kernel unless the caller passes one,
so that two registries never collide.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

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
_LISTENING = re.compile(rb'msg="listening on ([^",]+)')


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


@contextlib.contextmanager
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
    Raises RuntimeError if it does not start.
    """
    program = find_program("docker-registry", "docker-registry")
    home = Path(directory)
    home.mkdir(parents=True, exist_ok=True)
    driver = {"inmemory": {}} if in_memory else {"filesystem": {"rootdirectory": f"{home}/data"}}
    settings = {
        "version": "0.1",
        "log": {"level": "info", "accesslog": {"disabled": True}},
        "storage": {**driver, "delete": {"enabled": True}, "cache": {"blobdescriptor": "inmemory"}},
        "http": {
            "addr": f"127.0.0.1:{port}",
            "secret": "not a secret: it only signs upload states of one run",
            "tls": None if tls is None else {"certificate": str(tls[0]), "key": str(tls[1])},
        },
    }
    if htpasswd is not None:
        (home / "htpasswd").write_text(htpasswd)
        settings["auth"] = {"htpasswd": {"realm": "real", "path": str(home / "htpasswd")}}
    config = home / "config.yml"
    config.write_text(json.dumps(settings))  # JSON is YAML

    with (
        (home / "registry.log").open("wb") as log,
        subprocess.Popen(
            [program, "serve", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={"HOME": str(home), "OTEL_TRACES_EXPORTER": "none"},
            cwd=home,
        ) as process,
    ):
        assert process.stderr is not None
        said = b""
        for line in process.stderr:
            said += line
            address = _LISTENING.search(line)
            if address:
                break
        else:
            raise RuntimeError(f"docker-registry did not start:\n{said.decode()[-2000:]}")

        log.write(said)
        # Its log is read until it ends, because it waits while nobody reads.
        reader = threading.Thread(target=shutil.copyfileobj, args=(process.stderr, log))
        reader.start()
        try:
            yield address[1].decode()
        finally:
            process.terminate()
            reader.join()


def skopeo(*arguments: str, home: Path | str) -> bytes:
    """Run skopeo with an empty home directory and no policy. Returns its standard output.

    Raises AssertionError if skopeo fails.
    """
    command = [
        find_program("skopeo", "skopeo"),
        "--insecure-policy",
        f"--tmpdir={home}",
        *arguments,
    ]
    environment = {"HOME": str(home), "XDG_RUNTIME_DIR": str(home), "PATH": "/usr/bin:/bin"}
    completed = subprocess.run(
        command, capture_output=True, env=environment, timeout=120, check=False
    )
    if completed.returncode:
        raise AssertionError(f"{' '.join(command)}:\n{completed.stderr.decode('utf-8', 'replace')}")
    return completed.stdout
