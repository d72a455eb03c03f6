"""Fixtures that every test file shares."""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests import ends, fuzzing

# Fixtures: registries at both ends of a copy.
from tests.ends import audited, serve, source, speaker, target  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent

# What would lead a test to the network, to the user's credentials or to another trust store.
# Matched by prefix and without case, since proxy variables come in both.
_SCRUBBED = (
    "all_proxy",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "ssl_cert_",
    "docker_",
    "registry_auth_file",
    "github_token",
    "aws_",
    "azure_",
    "google_",
    "gce_metadata_",
    "cloudsdk_",
    "identity_",
    "msi_",
    "regsync_",
    "no_color",
)


# A shell's background job is born deaf to these, and what the tests start would be too.
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough", action="store_true", help="run also what tests/thinning.py leaves out"
    )
    parser.addoption(
        "--file", help="run this executable in place of the checkout, and only the tests that can"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tell those who decide when they are imported."""
    fuzzing.begin(thorough=config.getoption("--thorough"))
    if config.getoption("--file"):
        ends.program_file = Path(config.getoption("--file")).resolve()


# Whose tests run any file as they run the checkout: they only look at what it says and asks for.
FOR_ANY_FILE = (
    "test_auth_check",
    "test_bad_config",
    "test_cli",
    "test_google_logins",
    "test_hosts",
    "test_output_lost",
    "test_proxy_runs",
    "test_real_registry",
    "test_report",
    "test_resume",
    "test_secrets",
    "test_shard",
    "test_signals",
    "test_static_file",
    "test_tls_runs",
    "test_warm",
)

# Whose tests of the built file are about the zipapp, its interpreter or its gate.
FOR_THE_ZIPAPP = ("test_deploy", "test_fips", "test_start", "test_supply_chain", "test_zipapp")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `thorough`, but with the option; with --file, what runs no process."""

    def is_wanted(item: pytest.Item) -> bool:
        if item.get_closest_marker("thorough") and not config.getoption("--thorough"):
            return False
        if not config.getoption("--file"):
            return True
        module = item.path.stem
        runs_file = "pyz" in getattr(item, "fixturenames", ()) and module not in FOR_THE_ZIPAPP
        is_inside = item.get_closest_marker("in_process") is not None
        return (runs_file or module in FOR_ANY_FILE) and not is_inside

    left_out = [item for item in items if not is_wanted(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if is_wanted(item)]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run async tests on the backend that ships."""
    return "asyncio"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give tests marked `virtual_time` trio's clock, which jumps to the next deadline when all
    tasks wait.

    In-memory streams only: the clock cannot see that a real socket or a worker thread is at work.
    """
    if metafunc.definition.get_closest_marker("virtual_time"):
        from trio.testing import MockClock

        backend = ("trio", {"clock": MockClock(autojump_threshold=0)})
        metafunc.parametrize("anyio_backend", [pytest.param(backend, id="virtual_time")])


@pytest.fixture(autouse=True)
def clean_env(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Take everything personal out of the environment; return the temporary home."""
    for name in list(os.environ):
        if name.lower().startswith(_SCRUBBED):
            monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(home / name.lower()))
    return home


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Thaw what a test has frozen, and collect when memory has grown.

    Registries of earlier tests are few objects, for which no collection begins, and many bytes.
    """
    yield
    gc.unfreeze()
    if memory() > 1.3 * _memory[0]:
        gc.collect()
        _memory[0] = max(memory(), 100 << 20)


def memory() -> int:
    """Return the bytes that this process has in memory, where the system tells them."""
    try:
        return (
            int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            * resource.getpagesize()
        )
    except OSError:
        return 0


_memory = [100 << 20]


@pytest.fixture(scope="session")
def ca() -> trustme.CA:
    """Return a certificate authority that nobody else trusts."""
    return trustme.CA()


@pytest.fixture(scope="session")
def pyz(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Build the program for the interpreter that runs the tests; return the build without the gate.

    Processes of tests that run side by side share it. With --file it is that file.
    """
    if ends.program_file is not None:
        return ends.program_file
    top = tmp_path_factory.getbasetemp()
    out = (top if worker_id == "master" else top.parent) / "dist"
    command = [sys.executable, str(ROOT / "tools" / "build_zipapp.py"), "--out", str(out)]
    with (out.parent / "dist.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (out / "SHA256SUMS").exists():
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
    return out / "regsync-nofips.pyz"


@pytest.fixture
def docker_registries(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., str]]:
    """Return a function that starts Debian's docker-registry and returns its `127.0.0.1:PORT`.

    Its arguments are those of `conformance.registries.docker_registry` without the directory. It
    holds in memory what it gets, unless the run is thorough: on a disk it waits for that at every
    step.
    """
    from conformance import registries

    with ExitStack() as running:

        def start(**options: Any) -> str:
            directory = tmp_path / f"registry-{len(list(tmp_path.glob('registry-*')))}"
            directory.mkdir()
            chosen = {"in_memory": not request.config.getoption("--thorough"), **options}
            started: AbstractContextManager[str] = registries.docker_registry(directory, **chosen)
            return running.enter_context(started)

        yield start


@pytest.fixture
def docker_registry(docker_registries: Callable[..., str]) -> str:
    """Start one open, empty docker-registry."""
    return docker_registries()
