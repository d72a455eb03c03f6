"""What the tests of the harness and those of the program both stand on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
import trustme

from conformance import programs

__all__ = [
    "anyio_backend",
    "ca",
    "clean_env",
    "docker_registries",
    "docker_registry",
    "pytest_generate_tests",
    "virtual_clock",
]

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


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run async tests on the backend that ships."""
    return "asyncio"


@pytest.fixture
def virtual_clock() -> None:
    """Let every test that this fixture is a part of run on the virtual clock."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give tests marked `virtual_time`, and those whose fixtures ask for `virtual_clock`, trio's
    clock, which jumps to the next deadline when all tasks wait.

    In-memory streams only: the clock cannot see that a real socket or a worker thread is at work.
    """
    is_marked = metafunc.definition.get_closest_marker("virtual_time") is not None
    if is_marked or "virtual_clock" in metafunc.fixturenames:
        from trio.testing import MockClock

        backend = ("trio", {"clock": MockClock(autojump_threshold=0)})
        clock = pytest.param(backend, id="virtual_time", marks=pytest.mark.virtual_time)
        metafunc.parametrize("anyio_backend", [clock])


@pytest.fixture(autouse=True)
def clean_env(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Take everything personal out of the environment; return the temporary home."""
    for name in list(os.environ):
        if name.lower().startswith(_SCRUBBED):
            monkeypatch.delenv(name)
    # In a CI job the program keeps no first-seen times beside a configuration.
    monkeypatch.delenv("CI", raising=False)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(home / name.lower()))
    return home


@pytest.fixture(scope="session")
def ca() -> trustme.CA:
    """Return a certificate authority that nobody else trusts."""
    return trustme.CA()


@pytest.fixture
def docker_registries(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., str]]:
    """Return a function that starts Debian's docker-registry and returns its `127.0.0.1:PORT`.

    Its arguments are those of `conformance.programs.docker_registry` without the directory. It
    holds in memory what it gets, unless the run is thorough: on a disk it waits for that at every
    step.
    """
    with ExitStack() as running:

        def start(**options: Any) -> str:
            directory = tmp_path / f"registry-{len(list(tmp_path.glob('registry-*')))}"
            directory.mkdir()
            chosen = {
                "in_memory": not request.config.getoption("--thorough", default=False),
                **options,
            }
            started: AbstractContextManager[str] = programs.docker_registry(directory, **chosen)
            return running.enter_context(started)

        yield start


@pytest.fixture
def docker_registry(docker_registries: Callable[..., str]) -> str:
    """Start one open, empty docker-registry."""
    return docker_registries()
