#!/usr/bin/env python3
"""Run the built file on every sort of host that this machine can be.

    python3 tools/hosts.py [--python EXE ...] [-k PART] [FILE]

FILE is the zipapp without the gate, or a static executable, which is its own interpreter.

A host is a way to start the program: an interpreter and its options, variables, a user, limits,
what may be written. On each, `version`, `validate`, a `copy` from plain HTTP to TLS, a `sync` to
two targets and a second `sync` have to end well and say nothing on standard error. What was copied
is compared byte for byte. The second run may ask but not move. Nothing is left but the state,
readable by its owner alone. tests/test_hosts.py tries every host, several at once, on the
interpreter of the tests; this command tries all on all interpreters from 3.10 that it finds.

Owns: the table of hosts, finding interpreters, the steps.
May not know: anything of the program but its command line.
Invariants: a host that this machine cannot be is named with the reason, never counted as passed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
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
from typing import Any, Literal, NamedTuple

import trustme

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from conformance.content.images import Image, Seed  # noqa: E402
from conformance.registry.app import App  # noqa: E402
from conformance.server.sockets import Server, run_in_thread  # noqa: E402

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
TIME_LIMIT = 120  # seconds for one step
MANY = 30  # small images beside the others, for hosts with few open files
OLDEST_PYTHON = (3, 10)


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
    # A script that starts the program at its end; $place is the folder of the configuration.
    shell: str = 'exec "$@"'
    user: int | None = None
    folder: str = "place"
    hook: str = ""  # a module that Python imports at its start
    sealed: bool = False  # whether nothing but cache_dir may be written, which is there then
    needs_file: bool = False  # whether no interpreter can be there
    tags: str = "v*"
    noise: str = ""  # an expression for lines that standard error may have

    def beside(self, other: Host) -> Host:
        """Return the host that is both; ValueError where they contradict."""
        chosen: dict[str, Any] = {
            "name": f"{self.name}; {other.name}",
            "options": self.options + other.options,
            "environ": {**self.environ, **other.environ},
        }
        for field, default in Host._field_defaults.items():
            if field in chosen:
                continue
            values = {getattr(self, field), getattr(other, field)} - {default}
            if len(values) > 1:
                raise ValueError(f"{self.name} and {other.name} have different {field}")
            chosen[field] = values.pop() if values else default
        return Host(**chosen)


# Starts a shell that may mount, in a namespace of its own. Another user than root becomes root in a
# namespace of users first, where that is allowed.
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

# Takes away what CPython does not have outside POSIX, before anything of the standard library looks.
# The event loop then refuses what the one of Windows refuses, and msvcrt has its lock of files.
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
        if name == "_regsync.state.database":
            import asyncio, subprocess  # which takes whoever has msvcrt for Windows

            def refuse(*_):
                raise NotImplementedError

            for method in ("add_reader", "remove_reader", "add_writer", "remove_writer", "add_signal_handler"):
                setattr(asyncio.SelectorEventLoop, method, refuse)
            sys.modules["msvcrt"] = msvcrt


sys.meta_path.insert(0, Refusing())
"""
_WITHOUT_LOCALE = "import sys\nsys.modules['_locale'] = None\n"

# Nothing is there but the folder of the configuration: no /etc, /dev, /proc, /tmp, nothing writable.
_EMPTY_ROOT = r"""
mount -t tmpfs -o mode=755 none /mnt && mkdir -p "/mnt$1" || exit 90
mount --bind "$1" "/mnt$1" && mount -o remount,ro /mnt && shift || exit 91
exec /usr/sbin/chroot /mnt "$@"
"""

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
    Host("empty root", shell=f'{_OWN_MOUNTS}{_EMPTY_ROOT}\' sh "$place" "$@"', needs_file=True),
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
    found: dict[str, Interpreter] = {}
    for path in _candidates():
        real = os.path.realpath(path)
        if real in found or not os.access(path, os.X_OK):
            continue
        done = subprocess.run([path, "-c", _ASK], capture_output=True, text=True, check=False)
        if not done.returncode:
            executable, (major, minor, patch) = json.loads(done.stdout)
            name = f"{executable} ({major}.{minor}.{patch})"
            found[real] = Interpreter(path, name, (major, minor, patch))
    return tuple(found.values())


def _candidates() -> Iterator[str]:
    """Give the paths where a CPython may be; pyenv's shims are none, but start one of the others."""
    names = ["python3", "python2.7", *(f"python3.{minor}" for minor in range(6, 15))]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    places = os.environ.get("PATH", "").split(os.pathsep)
    places += map(str, pyenv.glob("versions/*/bin"))
    yield sys.executable
    for place in places:
        if os.path.basename(place) != "shims":
            yield from (os.path.join(place, name) for name in names)


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
        """Run all steps on a host, by the file itself where `python` is empty.

        Failed says what did not hold, Absent why this machine cannot be that host.
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
        """Make the folders and files of the host. Raises Absent if this machine cannot be that host."""
        host = self._host
        if self._python and host.needs_file:
            raise Absent("an interpreter needs more files")
        if not self._python and (host.options or host.hook):
            raise Absent("the file has no interpreter that could be told")
        if host.user is not None and os.getuid() != 0:
            raise Absent("only root can be another user")

        for folder in (self._place, self._home, self._top / "hook"):
            folder.mkdir(mode=0o755)
        shutil.copyfile(pyz, self._pyz)
        self._pyz.chmod(0o755)
        (self._place / "ca.pem").write_bytes(authority)
        (self._top / "hook" / "sitecustomize.py").write_text(host.hook, encoding="utf-8")
        self._config.write_text(self._document(), encoding="utf-8")
        writable = [self._place, self._home]
        if host.sealed:
            cache = self._place / "cache"
            cache.mkdir(mode=0o700)
            writable = [cache]
        if host.user is not None:
            for folder in writable:
                os.chown(folder, host.user, host.user)
        if host.user is not None or "unshare" in host.shell:
            done = self._start("version")
            if done.returncode:
                status = f"its preparation ended with status {done.returncode}"
                raise Absent(done.stderr.strip() or status)

    def _document(self) -> str:
        entries: dict[str, dict[str, str]] = {
            name: {"url": server.url} for name, server in self._smoke.servers.items()
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

    def _environ(self) -> dict[str, str]:
        """Return the variables of the host."""
        environ: dict[str, str] = {"HOME": str(self._home), "LANG": "C.UTF-8", "PATH": os.defpath}
        for name in ("LD_LIBRARY_PATH", "SYSTEMROOT"):
            if name in os.environ:
                environ[name] = os.environ[name]
        if self._host.hook:
            environ["PYTHONPATH"] = str(self._top / "hook")
        for name, value in self._host.environ.items():
            environ.pop(name, None)
            if value is not None:
                environ[name] = value
        return environ

    def _start(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        script = f"place=$1; shift; {self._host.shell}"
        command = ["/bin/sh", "-c", script, "sh", str(self._place)]
        if self._python:
            command += [self._python, *self._host.options]
        command += [str(self._pyz), *arguments]
        return subprocess.run(
            command,
            env=self._environ(),
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
        done = self._start(*arguments)
        allowed = self._host.noise or "$."  # `$.` fits nothing
        complaints = [line for line in done.stderr.splitlines() if not re.fullmatch(allowed, line)]
        if done.returncode or complaints:
            words = done.stderr.strip() or done.stdout.strip()
            raise Failed(f"{arguments[0]} ended with {done.returncode}: {words}")
        return done.stdout

    def steps(self) -> None:
        """Run the program as a user would, and look at what it did."""
        version = self._step("version")
        if not re.fullmatch(r"regsync \S+ \(.+\), CPython 3\.\d+\.\d+, \S.*\n", version):
            raise Failed("version says something else")
        config = str(self._config)
        output = self._step("validate", config)
        if output:
            raise Failed(f"validate says {output!r}")

        servers = self._smoke.servers
        copied = f"copied/{self._repository}"
        where = (f"{servers['source'].address}/app:v1", f"{servers['secure'].address}/{copied}:v1")
        self._check_lines("copy", self._step("copy", "-c", config, *where), 1)
        self._check_held("secure", copied, {"v1": self._smoke.images["v1"]})

        self._check_lines("sync", self._step("sync", "-c", config), 2 * len(self._images))
        for name in ("plain", "secure"):
            self._check_held(name, self._repository, self._images)
        self._check_second_sync(config)
        self._check_left()

    def _check_second_sync(self, config: str) -> None:
        """Sync again: each tag is asked for once at each registry, and nothing else happens."""
        before = {name: len(app.journal.entries) for name, app in self._smoke.apps.items()}
        output = self._step("sync", "-c", config)
        if output:
            raise Failed(f"the second sync says {output!r}")
        for name, app in self._smoke.apps.items():
            entries = app.journal.entries[before[name] :]
            asked = [entry for entry in entries if entry.kind != "tag_list"]
            if [entry.method for entry in asked] != ["HEAD"] * len(self._images):
                requests = [f"{entry.method} {entry.target}" for entry in asked]
                raise Failed(f"the second sync asked {name}: {requests}")

    def _check_lines(self, step: str, output: str, images: int) -> None:
        lines = [line for line in output.splitlines() if line.startswith("synced")]
        if len(lines) != images:
            raise Failed(f"{step} names {len(lines)} images, not {images}")

    def _check_held(self, name: str, repository: str, images: Mapping[str, Image]) -> None:
        app = self._smoke.apps[name]
        for tag, image in images.items():
            if app.tags(repository).get(tag) != image.top:
                raise Failed(f"{name} has no {repository}:{tag}")
            for digest, body in image.contents().items():
                manifest = app.manifest(repository, digest)
                held = manifest.body if manifest else app.blob(repository, digest)
                if held != body:
                    raise Failed(f"{name} holds another {digest} in {repository}")

    def _check_left(self) -> None:
        """See that the state is kept, readable by its owner alone, and that nothing else is left."""
        entries = list((self._place / "cache").rglob("*"))
        files = [entry for entry in entries if not entry.is_dir()]
        if {file.name for file in files} != {"state.db", "state.lock"}:
            raise Failed(f"left in cache_dir: {sorted(map(str, files))}")
        for entry in entries:
            mode = stat.S_IMODE(entry.stat().st_mode)
            if mode & 0o077:
                raise Failed(f"{entry.name} is open to others: {mode:o}")

        expected = {"regsync.pyz", "mirror.yaml", "ca.pem", "cache"}
        left = {*os.listdir(self._place), *os.listdir(self._home)} - expected
        if left:
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


def is_executable(path: Path) -> bool:
    """Tell whether a file needs no interpreter (elf(5))."""
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


class Tried(NamedTuple):
    """What came of one host on one interpreter."""

    python: str
    host: str
    verdict: Literal["passed", "not tried", "FAILED"]
    reason: str = ""

    def __str__(self) -> str:
        text = f"{self.verdict}: {self.reason}" if self.reason else self.verdict
        shown = text.encode("utf-8", "backslashreplace").decode()
        return f"{self.python or 'by itself'}  {self.host}: {shown}"


def _try(smoke: Smoke, python: str, host: Host) -> Tried:
    try:
        smoke.run(host, python)
    except Absent as error:
        return Tried(python, host.name, "not tried", str(error))
    except (Failed, subprocess.TimeoutExpired) as error:
        return Tried(python, host.name, "FAILED", str(error))
    return Tried(python, host.name, "passed")


def main(argv: Sequence[str] | None = None) -> int:
    """Try all hosts, a line each; return 1 when one failed."""
    options = _parse(argv)
    if not options.file.is_file():
        sys.stderr.write(f"error: {options.file} does not exist: tools/build_zipapp.py makes it\n")
        return 1
    pythons = options.python
    if is_executable(options.file):
        pythons = [""]
    if not pythons:
        pythons = [python.path for python in interpreters() if python.version >= OLDEST_PYTHON]
    hosts = [host for host in HOSTS if options.k in host.name]
    counts = {"passed": 0, "not tried": 0, "FAILED": 0}
    with Smoke(options.file.resolve()) as smoke:
        for python, host in itertools.product(pythons, hosts):
            tried = _try(smoke, python, host)
            counts[tried.verdict] += 1
            print(tried, flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
