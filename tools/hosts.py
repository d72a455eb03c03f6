#!/usr/bin/env python3
"""Run the built file on every sort of host that this machine can be: each interpreter, each
environment.

    python3 tools/hosts.py [--python EXE ...] [-k PART] [FILE]

A host is a way to start the program: options of the interpreter, variables, a user, limits, what
may be written. On each, `version`, `validate`, a `copy` from plain HTTP to TLS, a `sync` to two
targets and a second `sync` have to end well and say nothing on standard error; what was copied is
compared byte for byte, the second run may ask but not move, and nothing is left but the state,
readable by its owner alone. tests/test_hosts.py tries every host, several at once, on the
interpreter of the tests; this command tries all on all interpreters from 3.10 that it finds.

Owns: the table of hosts, finding interpreters, the steps. May not know: anything of the program but
its command line. Invariant: a host that this machine cannot be is named with the reason, never
counted as passed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import shutil
import ssl
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import trustme

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from conformance.app import App  # noqa: E402
from conformance.images import Image, Seed  # noqa: E402
from conformance.server import Server, run_in_thread  # noqa: E402

__all__ = [
    "HOSTS",
    "NOBODY",
    "Absent",
    "Failed",
    "Host",
    "Interpreter",
    "Smoke",
    "interpreters",
    "main",
]

NOBODY = 54321  # a user id that has no name
TIME_LIMIT = 120
MANY = 30


class Failed(Exception):
    """What did not hold on a host."""


class Absent(Exception):
    """Why this machine cannot be a host."""


class Interpreter(NamedTuple):
    """A Python of this machine."""

    path: str
    name: str
    version: tuple[int, int, int]


class Host(NamedTuple):
    """A way to start the program."""

    name: str
    options: tuple[str, ...] = ()  # the interpreter's
    environ: Mapping[str, str | None] = {}  # None takes a variable away
    # What a shell does first; $place is the folder of the configuration. Its end starts the
    # program.
    shell: str = 'exec "$@"'
    user: int | None = None
    folder: str = "place"
    # A module that Python imports at its start.
    hook: str = ""
    # Whether nothing but cache_dir may be written, which is there then.
    sealed: bool = False
    tags: str = "v*"
    # What may be said on standard error.
    noise: str = ""

    def beside(self, other: Host) -> Host:
        """Return the host that is both; ValueError where they contradict."""
        told: dict[str, Any] = {
            "name": f"{self.name}; {other.name}",
            "options": self.options + other.options,
        }
        told["environ"] = {**self.environ, **other.environ}
        for field, default in Host._field_defaults.items():
            values = (
                {getattr(self, field), getattr(other, field)} - {default}
                if field not in told
                else set()
            )
            if len(values) > 1:
                raise ValueError(f"{self.name} and {other.name} have different {field}")
            told.update((field, value) for value in values)
        return Host(**told)


# Mounts in a namespace of our own. Who is not root becomes root in one of users first, where that
# is allowed.
_OWN_MOUNTS = f"exec unshare {'' if os.getuid() == 0 else '-r'} -m -- sh -c '"
_READ_ONLY_HOME = (
    'mount --bind "$HOME" "$HOME" && mount -o remount,ro,bind "$HOME" '
    '&& ! touch "$HOME/x" 2>/dev/null && exec "$@"'
)
_READ_ONLY_ROOT = r"""
mount --bind "$1/cache" "$1/cache" || exit 90
while read -r _ where _ options _; do
    case "$where:$options" in
    */cache:*) ;;
    *:rw*) mount -o remount,ro,bind "$where" 2>/dev/null ;;
    esac
done </proc/mounts
cd / && shift || exit 91
for each in / /tmp /var/tmp "$HOME"; do
    touch "$each/x" 2>/dev/null && exit 92
done
exec "$@"
"""

# What CPython does not have outside POSIX is taken away before anything of the standard library
# looks; the event loop then refuses what the one of Windows refuses; msvcrt is its lock of files.
_WITHOUT_POSIX = """
import _signal, _socket, fcntl, os, select, sys, types

msvcrt = types.ModuleType("msvcrt")
msvcrt.LK_NBLCK = 2
msvcrt.locking = lambda file, mode, count, lock=fcntl.flock: lock(file, 6)
for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "_posixshmem", "readline"):
    sys.modules[name] = None
KEPT = ("SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM")
GONE = {
    _signal: [each for each in dir(_signal) if each.startswith("SIG") and each[3:4] != "_" and each not in KEPT]
    + ["pthread_sigmask", "pthread_kill", "setitimer", "alarm", "pause", "sigwait", "siginterrupt"],
    select: ["poll", "epoll", "kqueue"],
    _socket: ["AF_UNIX", "socketpair", "CMSG_LEN", "sethostname"],
    os: "fork forkpty getuid geteuid getgid getegid getgroups setuid setsid getpgid killpg fchmod fchown chown lchown "
    "chroot mkfifo mknod nice openpty pread pwrite preadv pwritev posix_spawn posix_fadvise sendfile statvfs fstatvfs "
    "uname getloadavg register_at_fork O_NOFOLLOW O_CLOEXEC O_DIRECTORY O_NONBLOCK set_blocking".split(),
}
GONE[_signal] = [each for each in GONE[_signal] if each not in ("SIG_DFL", "SIG_IGN")]
for module, names in GONE.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name == "_regsync.sync.staging":
            import asyncio, subprocess  # which takes whoever has msvcrt for Windows

            def refuse(*_):
                raise NotImplementedError

            for method in ("add_reader", "remove_reader", "add_writer", "remove_writer", "add_signal_handler"):
                setattr(asyncio.SelectorEventLoop, method, refuse)
            sys.modules["msvcrt"] = msvcrt


sys.meta_path.insert(0, Refusing())
"""
_WITHOUT_LOCALE = "import sys\nsys.modules['_locale'] = None\n"

HOSTS = (
    Host("as it is"),
    Host("-I", ("-I",)),
    Host("-S", ("-S",)),
    Host("-OO", ("-OO",)),
    # Debugging, asyncio tells of what took long: how long is this machine's affair.
    Host(
        "-W error -X dev -bb",
        ("-W", "error", "-X", "dev", "-bb"),
        noise=r"Executing <.*> took [0-9.]+ seconds",
    ),
    Host("read-only home", shell=f'{_OWN_MOUNTS}{_READ_ONLY_HOME}\' sh "$@"'),
    Host("no HOME", environ={"HOME": None}),
    Host("HOME is no directory", environ={"HOME": "/dev/null"}),
    Host("umask 027", shell='umask 027; exec "$@"'),
    Host("umask 000", shell='umask 000; exec "$@"'),
    Host("unknown user", user=NOBODY),
    Host("unknown user without HOME", environ={"HOME": None}, user=NOBODY),
    Host("64 open files", shell='ulimit -n 64; exec "$@"', tags="*"),
    Host("64 open files, more on request", shell='ulimit -Sn 64; exec "$@"'),
    Host("read-only root", shell=f'{_OWN_MOUNTS}{_READ_ONLY_ROOT}\' sh "$place" "$@"', sealed=True),
    Host("nothing writable but cache_dir", shell='cd / && exec "$@"', user=NOBODY, sealed=True),
    Host("LANG=C", environ={"LANG": "C"}),
    Host("no LANG", environ={"LANG": None}),
    Host("ASCII alone", environ={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}),
    Host(
        "a locale that is not installed", environ={"LC_ALL": "xx_YY.ISO-8859-1", "PYTHONUTF8": "0"}
    ),
    Host("without locales", hook=_WITHOUT_LOCALE),
    Host("no standard input", shell='exec "$@" <&-'),
    Host("path with spaces", folder="a place"),
    Host(
        "path with an umlaut, ASCII alone",
        environ={"LC_ALL": "C", "PYTHONUTF8": "0"},
        folder="plätze",
    ),
    Host("path with a byte that is no UTF-8", folder="pl\udce4tze"),
    Host("no environment at all", environ=dict.fromkeys(("HOME", "LANG", "PATH"))),
    Host("without what is POSIX-only (simulated)", hook=_WITHOUT_POSIX),
)

_ASK = "import json, sys; print(json.dumps([sys.executable, list(sys.version_info[:3])]))"


@functools.cache
def interpreters() -> tuple[Interpreter, ...]:
    """Find every CPython of this machine, the running one first: on PATH, and pyenv's."""
    names = ["python3", "python2.7", *(f"python3.{minor}" for minor in range(6, 15))]
    places = [
        each
        for each in os.environ.get("PATH", "").split(os.pathsep)
        if os.path.basename(each) != "shims"
    ]
    places += map(
        str, Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/*/bin")
    )
    candidates = [
        sys.executable,
        *(os.path.join(place, name) for place in places for name in names),
    ]
    found: dict[str, Interpreter] = {}
    for path in candidates:
        real = os.path.realpath(path)
        if real in found or not os.access(path, os.X_OK):
            continue
        done = subprocess.run([path, "-c", _ASK], capture_output=True, text=True, check=False)
        if not done.returncode:
            executable, (major, minor, patch) = json.loads(done.stdout)
            name = f"{executable} ({major}.{minor}.{patch})"
            found[real] = Interpreter(path, name, (major, minor, patch))
    return tuple(found.values())


class Smoke:
    """The registries that every host is tried with, and the steps; a context manager."""

    def __init__(self, pyz: Path) -> None:
        self._pyz = pyz
        self._running = contextlib.ExitStack()
        self._number = 0
        authority = trustme.CA()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        self._authority = authority.cert_pem.bytes()
        self.apps = {name: App() for name in ("source", "secure", "plain")}
        self._contexts = {"secure": context}
        self.servers: dict[str, Server] = {}
        self.images = {
            "v1": Seed(1).image(layers=[Seed(2).layer(1 << 21), b"a little"]),
            "v2": Seed(3).index(),
        }
        self.images |= {f"m{number}": Seed(10 + number).image() for number in range(MANY)}

    def __enter__(self) -> Smoke:
        for name, app in self.apps.items():
            server = self._running.enter_context(
                run_in_thread(app, ssl_context=self._contexts.get(name))
            )
            self.servers[name] = server
        for tag, image in self.images.items():
            image.load_into(self.apps["source"], "app", tag=tag)
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def run(self, host: Host, python: str) -> None:
        """Run all steps on a host; Failed says what did not hold, Absent why there is no such host
        here.
        """
        self._number += 1
        with tempfile.TemporaryDirectory(prefix="hosts-", ignore_cleanup_errors=True) as top:
            os.chmod(top, 0o755)
            started = Started(host, python, Path(top), f"mirror/n{self._number}", self)
            started.prepare(self._pyz, self._authority)
            started.steps()


class Started:
    """One host while it is tried."""

    def __init__(self, host: Host, python: str, top: Path, repository: str, smoke: Smoke) -> None:
        self._host = host
        self._python = python
        self._top = top
        self._smoke = smoke
        self._place = top / host.folder
        self._home = top / "home"
        self._repository = repository
        self._pyz = self._place / "regsync.pyz"
        self._config = self._place / "mirror.yaml"
        wanted = host.tags.rstrip("*")
        self._images = {tag: image for tag, image in smoke.images.items() if tag.startswith(wanted)}

    def prepare(self, pyz: Path, authority: bytes) -> None:
        """Make the folder, and see that the host can be one."""
        host = self._host
        cache = self._place / "cache"
        for each in (self._place, self._home, self._top / "hook"):
            each.mkdir(mode=0o755)
        shutil.copyfile(pyz, self._pyz)
        (self._place / "ca.pem").write_bytes(authority)
        (self._top / "hook" / "sitecustomize.py").write_text(host.hook, encoding="utf-8")
        self._config.write_text(self._document(), encoding="utf-8")
        if host.sealed:
            cache.mkdir(mode=0o700)
        if host.user is not None:
            if os.getuid() != 0:
                raise Absent("only root can be another user")
            for each in (cache,) if host.sealed else (self._place, self._home):
                os.chown(each, host.user, host.user)
        if host.user is not None or "unshare" in host.shell:
            done = self._start("-c", "pass")
            if done.returncode:
                raise Absent(
                    done.stderr.strip() or f"its preparation ended with status {done.returncode}"
                )

    def _document(self) -> str:
        entries: dict[str, dict[str, str]] = {
            name: {"url": each.url} for name, each in self._smoke.servers.items()
        }
        entries["secure"]["ca_file"] = "ca.pem"
        mapping = {"from": "app", "to": self._repository, "tags": {"glob": self._host.tags}}
        document = {
            "registries": entries,
            "defaults": {"source": "source", "targets": ["plain", "secure"]},
            "mappings": [mapping],
            "global": {"cache_dir": "cache"},
        }
        return f"# Spiegel für alle\n{json.dumps(document)}\n"

    def _start(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environ: dict[str, str] = {"HOME": str(self._home), "LANG": "C.UTF-8", "PATH": os.defpath}
        environ |= {
            name: os.environ[name]
            for name in ("LD_LIBRARY_PATH", "SYSTEMROOT")
            if name in os.environ
        }
        if self._host.hook:
            environ["PYTHONPATH"] = str(self._top / "hook")
        for name, value in self._host.environ.items():
            environ.pop(name, None)
            if value is not None:
                environ[name] = value
        script = f"place=$1; shift; {self._host.shell}"
        command = [
            "/bin/sh",
            "-c",
            script,
            "sh",
            str(self._place),
            self._python,
            *self._host.options,
            *arguments,
        ]
        return subprocess.run(
            command,
            env=environ,
            cwd=self._place,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=TIME_LIMIT,
            check=False,
            user=self._host.user,
            group=self._host.user,
            extra_groups=None if self._host.user is None else [],
        )

    def _step(self, *arguments: str) -> str:
        """Run one command; return what it wrote to standard output."""
        done = self._start(str(self._pyz), *arguments)
        said = [
            line
            for line in done.stderr.splitlines()
            if not re.fullmatch(self._host.noise or "$.", line)
        ]
        if done.returncode or said:
            raise Failed(
                f"{arguments[0]} ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"
            )
        return done.stdout

    def steps(self) -> None:
        """Run the program as a user would, and look at what it did."""
        if not re.fullmatch(
            r"regsync \S+ \(.+\), CPython 3\.\d+\.\d+, \S.*\n", self._step("version")
        ):
            raise Failed("version says something else")
        config = str(self._config)
        servers = self._smoke.servers
        if said := self._step("validate", config):
            raise Failed(f"validate says {said!r}")
        copied = f"copied/{self._repository}"
        where = (f"{servers['source'].address}/app:v1", f"{servers['secure'].address}/{copied}:v1")
        self._check_lines("copy", self._step("copy", "-c", config, *where), 1)
        self._check_lines("sync", self._step("sync", "-c", config), 2 * len(self._images))
        self._check_held("secure", copied, {"v1": self._smoke.images["v1"]})
        for name in ("plain", "secure"):
            self._check_held(name, self._repository, self._images)
        before = {name: len(app.journal.entries) for name, app in self._smoke.apps.items()}
        if said := self._step("sync", "-c", config):
            raise Failed(f"the second sync says {said!r}")
        for name, app in self._smoke.apps.items():
            asked = [
                each for each in app.journal.entries[before[name] :] if each.kind != "tag_list"
            ]
            if [each.method for each in asked] != ["HEAD"] * len(self._images):
                raise Failed(
                    f"the second sync asked {name}: {[f'{each.method} {each.target}' for each in asked]}"
                )
        self._check_left()

    def _check_lines(self, step: str, said: str, images: int) -> None:
        lines = [line for line in said.splitlines() if line.startswith("synced")]
        if len(lines) != images:
            raise Failed(f"{step} names {len(lines)} images, not {images}")

    def _check_held(self, name: str, repository: str, images: Mapping[str, Image]) -> None:
        app = self._smoke.apps[name]
        for tag, image in images.items():
            if app.tags(repository).get(tag) != image.top:
                raise Failed(f"{name} has no {repository}:{tag}")
            for digest, body in image.contents().items():
                found = app.manifest(repository, digest)
                if (found.body if found else app.blob(repository, digest)) != body:
                    raise Failed(f"{name} holds another {digest} in {repository}")

    def _check_left(self) -> None:
        """The state is kept, readable by its owner alone; nothing else is left, nowhere."""
        allowed = {"state.db", "state.lock"}
        cache = self._place / "cache"
        files = [each for each in cache.rglob("*") if not each.is_dir()]
        if {each.name for each in files} != allowed:
            raise Failed(f"left in cache_dir: {sorted(map(str, files))}")
        for each in (*files, *(each for each in cache.rglob("*") if each.is_dir())):
            if stat.S_IMODE(each.stat().st_mode) & 0o077:
                raise Failed(
                    f"{each.name} is open to others: {stat.S_IMODE(each.stat().st_mode):o}"
                )
        expected = {"regsync.pyz", "mirror.yaml", "ca.pem", "cache"}
        if left := {*os.listdir(self._place), *os.listdir(self._home)} - expected:
            raise Failed(f"left behind: {sorted(left)}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--python", action="append", metavar="EXE", help="only this interpreter; may be repeated"
    )
    parser.add_argument("-k", default="", metavar="PART", help="only hosts with this in their name")
    parser.add_argument(
        "file", nargs="?", type=Path, default=ROOT / "dist" / "regsync-nofips.pyz", metavar="FILE"
    )
    return parser.parse_args(argv)


def _tried(smoke: Smoke, pythons: Sequence[str], part: str) -> Iterator[tuple[str, str, str]]:
    for python in pythons:
        for host in HOSTS:
            if part in host.name:
                try:
                    smoke.run(host, python)
                    yield python, host.name, "passed"
                except Absent as error:
                    yield python, host.name, f"not tried: {error}"
                except (Failed, subprocess.TimeoutExpired) as error:
                    yield python, host.name, f"FAILED: {error}"


def main(argv: Sequence[str] | None = None) -> int:
    """Try all hosts, a line each; return 1 when one failed."""
    options = _parse(argv)
    if not options.file.is_file():
        sys.stderr.write(f"error: {options.file} does not exist: tools/build_zipapp.py makes it\n")
        return 1
    pythons = options.python or [each.path for each in interpreters() if each.version >= (3, 10)]
    counts = {"passed": 0, "not tried": 0, "FAILED": 0}
    with Smoke(options.file.resolve()) as smoke:
        for python, name, result in _tried(smoke, pythons, options.k):
            counts[result.partition(":")[0]] += 1
            shown = result.encode("utf-8", "backslashreplace").decode()
            print(f"{python}  {name}: {shown}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
