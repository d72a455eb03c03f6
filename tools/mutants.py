#!/usr/bin/env python3
"""Change the program in small ways that matter, and see whether the tests notice each of them.

    python3 tools/mutants.py                    every mutant, with the tests that are likeliest to kill it
    python3 tools/mutants.py -k staging -j 2    those with the word in their file or title, two at a time

A mutant is a piece of `_regsync` that is replaced by another one; `mutant_lists/` has them, a file
for each package. It is killed by a test that fails or hangs. What lives shows that no test cares
for what the title says: it takes a test, or the mutant changes nothing that anybody can see and
goes. A mutant is stale when its text no longer stands in its file, exactly once: then it is written
again for the code that took the place, or goes with the promise that it broke.

Exit status: 0 where all are killed, 1 where one lives, 2 where one is stale.

Owns: which mutants there are, the copies of the tree that they run in, the verdicts.
May not know: what the program does, but by the titles.
Invariants: the checkout is never written to; each mutant runs alone in a whole copy of it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import multiprocessing
import os
import queue
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

__all__ = ["Mutant", "Verdict", "main", "read_lists", "run", "troubles"]

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "tools" / "mutant_lists"
PROGRAM = "_regsync"
WITHOUT = (
    ".git",
    ".venv",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
    "build",
    "dist",
)
HANGS_AFTER = 60  # seconds for one test; few take more than two
LIMIT = 600  # seconds for one file of tests

# Of pytest's exit statuses: 1 and 2 are a test or a module that fails, by the mutant as no other
# file differs; others are a mistake in the list, such as a file of tests that does not exist.
KILLED = (1, 2)

# A process of tests is forked off one that has imported what takes long and is not the program.
FORKS = multiprocessing.get_context("forkserver")
PRELOADED = [
    "pytest",
    "trio.testing",
    "hypothesis.strategies",
    "trustme",
    "h11",
    "yaml",
    "anyio.to_thread",
    # These share no code with the program.
    "conformance.registry.app",
    "conformance.audit.mistakes",
    "conformance.providers.personas",
]


class Mutant(NamedTuple):
    """One change of one file, and where it is likeliest to be noticed."""

    breaks: str  # what is no longer so, or what is wrong instead; its title
    file: str  # below _regsync/
    old: str  # stands exactly once in the file
    new: str
    tests: tuple[str, ...]  # `tokens` for tests/test_tokens.py, the likeliest first


class Verdict(NamedTuple):
    """What came of one mutant."""

    mutant: Mutant
    is_killed: bool
    by: str  # the test that failed, or why that proves nothing


def read_lists() -> list[Mutant]:
    """Read all mutants."""
    rows = [
        row
        for path in sorted(LISTS.glob("*.yaml"))
        for row in yaml.safe_load(path.read_text("utf-8"))
    ]
    return [Mutant(**{**row, "tests": tuple(row["tests"].split())}) for row in rows]


def troubles(mutants: Iterable[Mutant], root: Path = ROOT) -> list[str]:
    """Tell which mutants cannot be run as they stand, a line for each."""
    return [
        f"{mutant.file}: {mutant.breaks}: {trouble}"
        for mutant in mutants
        for trouble in _troubles_of(mutant, root)
    ]


def _troubles_of(mutant: Mutant, root: Path) -> Iterator[str]:
    path = root / PROGRAM / mutant.file
    count = path.read_text("utf-8").count(mutant.old) if path.exists() else 0
    if count != 1:
        yield f"its text stands there {count} times: {mutant.old!r}"
    if mutant.new == mutant.old:
        yield "it changes nothing"
    for name in mutant.tests:
        if not (root / _test_file(name)).exists():
            yield f"there is no {_test_file(name)}"


def _test_file(name: str) -> str:
    return f"tests/test_{name}.py"


def run(
    mutants: Sequence[Mutant],
    tell: Callable[[Verdict], None],
    *,
    root: Path = ROOT,
    at_once: int = 1,
) -> list[Verdict]:
    """Run mutants in copies of the tree, tell each verdict as it comes, and return them all."""
    verdicts: list[Verdict] = []
    FORKS.set_forkserver_preload(PRELOADED)
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as directory,
        ThreadPoolExecutor(at_once) as pool,
    ):
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(at_once):
            copies.put(_copy_tree(root, Path(directory) / str(number)))
        futures = [pool.submit(_try, mutant, copies) for mutant in mutants]
        for future in as_completed(futures):
            verdicts.append(future.result())
            tell(verdicts[-1])
    return verdicts


def _copy_tree(root: Path, place: Path) -> Path:
    tree = place / "tree"
    shutil.copytree(root, tree, ignore=shutil.ignore_patterns(*WITHOUT), symlinks=True)
    if (root / "build").exists():  # what the tests have fetched, such as a FIPS provider
        (tree / "build").symlink_to(root / "build")
    return tree


def _try(mutant: Mutant, copies: queue.SimpleQueue[Path]) -> Verdict:
    """Ask one file of tests after the other, as most mutants are killed by the first."""
    tree = copies.get()
    try:
        with _applied(mutant, tree):
            killer = _first_killer(mutant, tree)
        if not killer:
            return Verdict(mutant, False, "")
        # A test that fails or hangs by itself, or under load, has noticed nothing.
        tests = _tests_of(killer)
        if _killer(tree, tests):
            return Verdict(mutant, False, f"{tests} fails without it, too")
        return Verdict(mutant, True, killer)
    except (RuntimeError, SyntaxError) as error:
        return Verdict(mutant, False, f"it cannot be tried: {error}")  # the rest of the list can
    finally:
        copies.put(tree)


def _first_killer(mutant: Mutant, tree: Path) -> str:
    for name in mutant.tests:
        if killer := _killer(tree, _test_file(name)):
            return killer
    return ""


def _tests_of(killer: str) -> str:
    """Return what pytest runs again: the test with all its parameters, or the file that hangs."""
    if "::" in killer:
        return killer.partition("[")[0]
    return killer.partition(":")[0]


@contextlib.contextmanager
def _applied(mutant: Mutant, tree: Path) -> Iterator[None]:
    """Change the copy, and change it back with its old times, by which Python knows what is
    compiled.
    """
    path = tree / PROGRAM / mutant.file
    text = path.read_text("utf-8")
    changed = text.replace(mutant.old, mutant.new)
    ast.parse(changed, f"{mutant.file} ({mutant.breaks})")  # else all tests would kill it
    times = path.stat()
    path.write_text(changed, "utf-8")
    try:
        yield
    finally:
        path.write_text(text, "utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _killer(tree: Path, tests: str) -> str:
    """Run tests in a copy. Returns the first test that fails or hangs, "" if all pass.

    Raises RuntimeError if pytest itself fails.
    """
    log = tree.parent / "log"
    process = FORKS.Process(target=_run_pytest, args=(tree, tests, log))
    process.start()
    process.join(LIMIT)
    is_late = process.exitcode is None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)  # what its tests have started, too
    process.join()
    output = log.read_text("utf-8", "replace")
    if is_late:
        return f"{tests}: no end within {LIMIT} s"
    if process.exitcode == 0:
        return ""
    # The dump of a hanging test's stacks may end the process by a signal.
    hangs = re.search(r"(?m)^Timeout \(", output) is not None
    if process.exitcode not in KILLED and not hangs:
        raise RuntimeError(f"{tests}: pytest ended with {process.exitcode}: {output[-2000:]}")
    failed = re.search(r"(?m)^(?:FAILED|ERROR) (\S+)", output)
    return failed[1] if failed else f"{tests}: a test that hangs"


def _run_pytest(tree: Path, tests: str, log: Path) -> None:
    """Be a process of pytest in a copy of the tree."""
    os.setsid()
    os.chdir(tree)
    sys.dont_write_bytecode = False  # the next mutant finds compiled what this one leaves as it is
    sys.path[:] = [
        str(tree),
        *(place for place in sys.path if not place.startswith(str(ROOT / "tools"))),
    ]
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    options = ["-q", "-x", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is preloaded
    options += ["-o", f"faulthandler_timeout={HANGS_AFTER}", f"--basetemp={tree.parent / 'tmp'}"]
    status = int(pytest.ExitCode.INTERNAL_ERROR)
    try:
        status = int(pytest.main([*options, tests]))
    finally:
        sys.stdout.flush()
        os._exit(status)  # whatever threads the tests have left


def main(argv: Sequence[str]) -> int:
    """Run the mutants that are asked for; return the exit status."""
    parser = argparse.ArgumentParser(
        description="Change the program, and see whether tests notice."
    )
    parser.add_argument(
        "-k", metavar="WORD", default="", help="those with it in their file or title"
    )
    parser.add_argument("-j", metavar="N", type=int, default=1, help="so many at a time")
    arguments = parser.parse_args(argv)

    mutants = [
        mutant
        for mutant in read_lists()
        if arguments.k.lower() in f"{mutant.file} {mutant.breaks}".lower()
    ]
    if not mutants:
        parser.error(f"no mutant has {arguments.k!r} in its file or title")
    stale = troubles(mutants)
    for line in stale:
        print(f"stale   {line}", flush=True)
    if stale:
        return 2

    began = time.monotonic()
    verdicts = run(mutants, _print, at_once=arguments.j)
    living = [verdict.mutant for verdict in verdicts if not verdict.is_killed]
    seconds = time.monotonic() - began
    print(f"{len(verdicts)} mutants, {len(living)} live, {seconds:.0f} s")
    for mutant in living:
        print(f"lives   {mutant.file}: {mutant.breaks}")
    return 1 if living else 0


def _print(verdict: Verdict) -> None:
    mutant = verdict.mutant
    why = f" ({verdict.by})" if verdict.by else ""
    fate = "killed" if verdict.is_killed else "LIVES "
    print(f"{fate}  {mutant.file}: {mutant.breaks}{why}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
