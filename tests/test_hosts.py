"""The built file on every sort of host that this machine can be: a sync to two registries, one of
them over TLS, is right and says nothing on standard error; the second one moves nothing; only the
state is left, readable by its owner alone.

Older interpreters are in test_build.py.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trustme

from conformance.images import Seed
from tests.builds import NOBODY, PYTHONS, python
from tests.ends import Start, clear, document, held, program, tags
from tests.program import Chosen
from tests.thinning import thorough

pytestmark = [pytest.mark.slow, pytest.mark.process]

MANY = 30  # small images beside the others, for a host with few open files

# `$1` is the folder of the configuration. Nothing may be written but the cache in it.
READ_ONLY_ROOT = r"""
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

# Nothing is there but that folder: no /etc, /dev, /proc, /tmp.
EMPTY_ROOT = r"""
mount -t tmpfs -o mode=755 none /mnt && mkdir -p "/mnt$1" || exit 90
mount --bind "$1" "/mnt$1" && mount -o remount,ro /mnt && shift || exit 91
exec /usr/sbin/chroot /mnt "$@"
"""

# Takes away what CPython does not have outside POSIX, before anything of the standard library looks.
# The event loop then refuses what the one of Windows refuses, and msvcrt has its lock of files.
WITHOUT_POSIX = """
import _signal, _socket, fcntl, os, select, sys, types

msvcrt = types.ModuleType("msvcrt")
msvcrt.LK_NBLCK = 2
msvcrt.locking = lambda file, mode, count, lock=fcntl.flock: lock(file, 6)
for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "_posixshmem", "readline"):
    sys.modules[name] = None
KEPT = ("SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN")
GONE = {
    _signal: [each for each in dir(_signal) if each.startswith("SIG") and each not in KEPT]
    + ["pthread_sigmask", "pthread_kill", "setitimer", "alarm", "pause", "sigwait", "siginterrupt"],
    select: ["poll", "epoll", "kqueue"],
    _socket: ["AF_UNIX", "socketpair", "CMSG_LEN", "sethostname"],
    os: "fork forkpty getuid geteuid getgid getegid getgroups setuid setsid getpgid killpg fchmod fchown chown lchown "
    "chroot mkfifo mknod nice openpty pread pwrite preadv pwritev posix_spawn posix_fadvise sendfile statvfs fstatvfs "
    "uname getloadavg register_at_fork O_NOFOLLOW O_CLOEXEC O_DIRECTORY O_NONBLOCK set_blocking".split(),
}
for module, names in GONE.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

import shutil

shutil.disk_usage = lambda _: types.SimpleNamespace(free=10**12, total=10**12)  # Windows has its own


class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name == "_regsync.state":
            import asyncio, subprocess  # which takes whoever has msvcrt for Windows

            def refuse(*_):
                raise NotImplementedError

            for method in ("add_reader", "remove_reader", "add_writer", "remove_writer", "add_signal_handler"):
                setattr(asyncio.SelectorEventLoop, method, refuse)
            sys.modules["msvcrt"] = msvcrt


sys.meta_path.insert(0, Refusing())
"""


class Host(NamedTuple):
    """A way to start the program."""

    python: str = ""  # a name, in place of the interpreter that runs the tests
    options: Sequence[str] = ()  # the interpreter's
    environ: Mapping[str, str | None] = {}  # None takes a variable away
    shell: str = 'exec "$@"'
    mounts: str = ""  # a script for a namespace of its own, in place of `shell`
    user: int | None = None
    folder: str = "place"
    hook: str = ""  # a module that Python imports at its start


HOSTS = {
    "isolated": Host(options=("-I", "-S", "-OO")),
    # From the sources in the file, which has no tree for these.
    **{f"Python {name[6:]}": Host(python=name) for name in PYTHONS},
    "256 open files": Host(shell='ulimit -n 256; exec "$@"'),
    "no environment, umask 000": Host(
        environ=dict.fromkeys(("HOME", "LANG", "PATH")), shell='umask 000; exec "$@"'
    ),
    "no standard input, HOME is no directory": Host(
        environ={"HOME": "/dev/null"}, shell='exec "$@" <&-', folder="a place"
    ),
    "unknown user without HOME": Host(environ={"HOME": None}, user=NOBODY),
    "ASCII alone, a path that is no UTF-8": Host(
        environ={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, folder="pl\udce4tze"
    ),
    "read-only root": Host(mounts=READ_ONLY_ROOT),
    "empty root": Host(mounts=EMPTY_ROOT),
    "without what is POSIX-only": Host(hook=WITHOUT_POSIX),
}
# An ordinary run has one of each sort: options, versions, limits, users, mounts, systems.
ORDINARY = {
    *("isolated", "Python 3.10", "256 open files", "unknown user without HOME", "read-only root"),
    "without what is POSIX-only",
}


class Place:
    """The folders and files of one host, and the program in them."""

    def __init__(self, top: Path, host: Host, start: Sequence[str]) -> None:
        self.host = host
        self.home, self.hook, self.folder = top / "home", top / "hook", top / host.folder
        self.cache = self.folder / "cache"
        for folder in (self.home, self.hook, self.folder):
            folder.mkdir(mode=0o755)
        self.cache.mkdir(mode=0o700)
        (self.hook / "sitecustomize.py").write_text(host.hook, encoding="utf-8")
        *interpreter, file = start
        copied = self.folder / "regsync.pyz"
        shutil.copyfile(file, copied)
        copied.chmod(0o755)
        self.start = [*interpreter, str(copied)]
        if host.user is not None:
            os.chown(self.cache, host.user, host.user)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environ: dict[str, str | None] = {
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "PATH": os.defpath,
            "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH"),
            "PYTHONPATH": str(self.hook) if self.host.hook else None,
            **self.host.environ,
        }
        command = ["/bin/sh", "-c", self.host.shell, "sh", *self.start, *arguments]
        if self.host.mounts:
            own = ["unshare", *([] if os.getuid() == 0 else ["-r"]), "-m", "--"]
            script = ["/bin/sh", "-c", self.host.mounts, "sh", str(self.folder)]
            command = [*own, *script, *self.start, *arguments]
        return subprocess.run(
            command,
            env={name: value for name, value in environ.items() if value is not None},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=120,
            check=False,
            user=self.host.user,
            group=self.host.user,
            extra_groups=None if self.host.user is None else [],
        )

    def check_run(self, *arguments: str) -> str:
        """Run a command that has to end well and say nothing on standard error; return its output."""
        done = self.run(*arguments)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def check_left(self) -> None:
        entries = [*self.cache.rglob("*")]
        assert {each.name for each in entries if each.is_file()} == {"state.db", "state.lock"}
        assert not [each for each in entries if stat.S_IMODE(each.stat().st_mode) & 0o077]
        assert {*os.listdir(self.folder), *os.listdir(self.home)} == {
            *("regsync.pyz", "mirror.yaml", "ca.pem", "cache")
        }


def check_sync(place: Place, serve: Start) -> None:
    """Sync twice as a user would, and look at what it did."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(place.folder / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    source, plain, secure = serve(), serve(), serve(ssl_context=context)
    images = {
        "v1": Seed(1).image(layers=[Seed(2).layer(1 << 21), b"a little"]),
        "v2": Seed(3).index(),
        **{f"m{number}": Seed(10 + number).image() for number in range(MANY)},
    }
    for tag, image in images.items():
        image.load_into(source.app, "app", tag=tag)
    registries = {
        "source": source,
        "plain": plain,
        "secure": {"url": secure.url, "ca_file": "ca.pem"},
    }
    text = document(
        registries,
        {"from": "app", "tags": tags("*")},
        defaults={"artifacts": {"enabled": True}},
        **{"global": {"cache_dir": "cache"}},
    )
    config = place.folder / "mirror.yaml"
    config.write_text(f"# Spiegel für alle\n{text}\n", encoding="utf-8")

    output = place.check_run("sync", "-c", str(config))
    assert len(re.findall("(?m)^synced ", output)) == 2 * len(images)
    for target in (plain, secure):
        assert all(held(target, "app", image) for image in images.values())

    clear(source, plain, secure)
    assert place.check_run("sync", "-c", str(config)) == ""
    for server in (source, plain, secure):
        asked = [each.method for each in server.journal.entries if each.kind != "tag_list"]
        assert asked == ["HEAD"] * len(images)
    place.check_left()


def is_absent(place: Place) -> str:
    """Say why this machine cannot be the host of a place, "": it can."""
    if place.host.user is None and not place.host.mounts:
        return ""
    done = place.run("version")
    return "" if done.returncode == 0 else f"status {done.returncode}: {done.stderr.strip()}"


@pytest.mark.parametrize(
    "name", [name if name in ORDINARY else thorough(pytest.param(name)) for name in HOSTS]
)
def test_a_sync_is_right_and_silent_and_the_second_one_moves_nothing(
    name, pyz, open_folder, serve: Start
):
    host = HOSTS[name]
    if Chosen.file is not None:
        if host.python:
            pytest.skip("the file has its own")
        host = host._replace(options=(), hook="")  # what is asked of an interpreter has no meaning
    elif host.mounts == EMPTY_ROOT:
        pytest.skip("an interpreter needs more files")
    if host.user is not None and os.getuid() != 0:
        pytest.skip("only root can be another user")
    start = program(pyz, *host.options)
    if host.python:
        start[0] = python(host.python)
    if host.user is not None and Chosen.file is None:
        start[0] = "/usr/bin/python3"  # another user may not reach that of the tests
    place = Place(open_folder, host, start)
    reason = is_absent(place)
    if reason:
        pytest.skip(reason)
    check_sync(place, serve)


@pytest.mark.in_process
def test_an_interrupt_ends_a_run_on_a_loop_that_takes_no_signals(pyz, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_POSIX, encoding="utf-8")
    environ = {"PYTHONPATH": str(tmp_path), "PATH": os.defpath, "HOME": str(tmp_path)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, str(pyz), "copy", f"{where}/app:v1", f"{where}/other:v1"]
        with subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, **pipes) as process:
            silent.accept()[0].close()
            process.send_signal(signal.SIGINT)
            assert (*process.communicate(timeout=60), process.returncode) == ("", "", 130)
    done = subprocess.run([sys.executable, "-c", "import fcntl"], env=environ, **pipes, check=False)
    assert "ModuleNotFoundError" in done.stderr, "the simulation takes away what it says"


@pytest.mark.in_process
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_an_error_with_an_umlaut_is_told_on_any_terminal(pyz, tmp_path, encoding):
    file = tmp_path / "Schlüssel→.yaml"
    file.write_text("mappings: []\nunknown: 1\n", encoding="utf-8")
    environ = {"PYTHONIOENCODING": encoding, "PATH": os.defpath}
    command = [*program(pyz), "validate", str(file)]
    done = subprocess.run(command, env=environ, capture_output=True, check=False)
    assert done.returncode == 3
    assert done.stderr.decode(encoding).count("\n") == done.stderr.count(b"error: ")
    assert b"Traceback" not in done.stderr
    assert b"Schl" in done.stderr
