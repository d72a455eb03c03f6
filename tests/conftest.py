"""Fixtures that every test file shares."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.tests.fixtures import *  # noqa: F403
from tests import costs, fuzzing
from tests.builds import fips_host, host, open_folder  # noqa: F401

# Fixtures: registries at both ends of a copy, and what is built of them.
from tests.ends import audited, chance, serve, source, speaker, sync_pair, target, world  # noqa: F401
from tests.mirrors import mirror  # noqa: F401
from tests.program import Chosen
from tests.watching import stage  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough", action="store_true", help="run also what tests/thinning.py leaves out"
    )
    parser.addoption(
        "--file", help="run this executable in place of the checkout, and only the tests that can"
    )
    parser.addoption(
        "--order-seed",
        type=int,
        default=0,
        help="run ready tasks of virtual-time tests in the order that this number gives",
    )
    parser.addoption(
        "--as-budget", action="store_true", help="let runs cost less than tests/test_costs.py says"
    )


_session = contextlib.ExitStack()


def pytest_unconfigure() -> None:
    _session.close()


def pytest_configure(config: pytest.Config) -> None:
    """Tell those who decide when they are imported."""
    fuzzing.begin(thorough=config.getoption("--thorough"))
    costs.as_budget = config.getoption("--as-budget")
    if config.getoption("--file"):
        Chosen.file = Path(config.getoption("--file")).resolve()
        with Chosen.file.open("rb") as file:
            Chosen.is_static = file.read(4) == b"\x7fELF"  # elf(5)
    else:
        # Tests of the program's inside have the edge of this process.
        from _regsync import edge
        from _regsync.app.cli import process_edge

        _session.enter_context(edge.using(process_edge()))


# Whose tests are about this checkout: its documents, and how it is built. Some run the built file.
FOR_THE_CHECKOUT = (
    "test_build",
    "test_commands_shown",
    "test_documents",
    "test_fips",
    "test_layering",
    "test_static",
)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Import no test that knows this program's modules where a file is judged."""
    return True if Chosen.file is not None and collection_path.name == "unit" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `thorough`, but with the option, and what cannot judge a file.

    Files with slow tests come first: of several processes none is left alone with one at the end.
    """

    def is_wanted(item: pytest.Item) -> bool:
        if item.get_closest_marker("thorough") and not config.getoption("--thorough"):
            return False
        if Chosen.file is None:
            return True
        without_file = ("virtual_time", "in_process", "long_wait")
        return item.path.stem not in FOR_THE_CHECKOUT and not any(
            map(item.get_closest_marker, without_file)
        )

    wanted = [item for item in items if is_wanted(item)]
    if len(wanted) < len(items):
        left_out = set(items) - set(wanted)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = wanted
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Begin each test on the virtual clock with the same dice.

    trio shuffles the tasks that are ready at one moment. hypothesis, whose plugin is always there,
    has it sort them first, so that these dice alone decide.
    """
    if item.get_closest_marker("virtual_time"):
        from trio._core import _run  # hypothesis warns where trio is imported first

        _run._r.seed(item.config.getoption("--order-seed"))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Say with a failure on the virtual clock in which order its tasks ran."""
    report = yield
    if report.failed and item.get_closest_marker("virtual_time"):
        seed = item.config.getoption("--order-seed")
        report.sections.append(("Order of tasks", f"run it again with --order-seed {seed}"))
    return report


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
def pyz(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Build the program for the interpreter that runs the tests; return the build without the gate.

    Processes of tests that run side by side share it. With --file it is that file.
    """
    if Chosen.file is not None:
        return Chosen.file
    top = tmp_path_factory.getbasetemp()
    out = (top if worker_id == "master" else top.parent) / "dist"
    command = [sys.executable, str(ROOT / "tools" / "build_zipapp.py"), "--out", str(out)]
    with (out.parent / "dist.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (out / "SHA256SUMS").exists():
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
    return out / "regsync-nofips.pyz"
