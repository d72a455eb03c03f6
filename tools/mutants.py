#!/usr/bin/env python3
"""Change the program, and the harness that judges it, in small ways that matter, and see whether the
tests notice each of them.

    python3 tools/mutants.py reach              run the tests once, and note which lines each executes
    python3 tools/mutants.py try                try the mutants that nothing has killed yet
    python3 tools/mutants.py try -k staging     those with the word in their file or title, again
    python3 tools/mutants.py try --generated    the 500 that chance has made, in place of those by hand

A mutant is a piece of `_regsync` or `conformance` that is replaced by another one; `mutant_lists/` has
those by hand, a file for each package. Others are made, of `_regsync` alone: a condition is negated, a
comparison takes its border in or leaves it out, a number is one more, a statement goes. A seed chooses
which.

The judges are the tests that know only the boundary (those of tests/ itself), the pure units
(tests/unit) and the harness's own tests: of these, those that execute the line, first those whose names
are like the title, then the quick ones. A kill counts when the test passes without the mutant. The
verdicts go to build/kills.json, which is gone on with.

What lives shows that no test cares for what the title says: it takes a test, or the mutant changes
nothing that anybody can see and goes; `mutant_lists/reasons.yaml` says why a made one may live. A mutant
is stale when its text no longer stands in its file, exactly once: then it is written again for the code
that took the place, or goes with its promise.

Exit status: 0 where all are killed or have a reason, 1 where one lives, 2 where one is stale.

Invariants: the checkout is written to below build/ alone; each mutant runs alone in a copy.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "tools" / "mutant_lists"
PROGRAM = "_regsync"
HARNESS = "conformance"
REACH = ROOT / "build" / "reach.json"
KILLS = ROOT / "build" / "kills.json"
REASONS = LISTS / "reasons.yaml"
WITHOUT = (".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", "build", "dist")

# Files of tests that judge nothing of either, or take minutes for what others show in seconds.
NO_JUDGES = ("build", "documents", "hosts", "layering", "sentences", "static", "static_file")

MADE = 500  # mutants that chance makes
SEED = 1

ALIKE = 40  # tests that are tried first
LONGEST = 20.0  # seconds that one test may take, or it counts as one that hangs
LATE = 600.0  # seconds after which a whole try has hung


class Mutant(NamedTuple):
    """One change of one file: `old`, which stands at `start`, becomes `new`."""

    breaks: str  # what is no longer so, or what is wrong instead; its title
    file: str  # from the root of the checkout
    old: str
    new: str
    start: int  # characters from the start of the file; -1 where `old` does not stand there once

    @property
    def text(self) -> str:
        return (ROOT / self.file).read_text("utf-8")

    @property
    def changed(self) -> str:
        """The file with this change."""
        text = self.text
        return text[: self.start] + self.new + text[self.start + len(self.old) :]


def read_lists() -> list[Mutant]:
    """Return the mutants that were written by hand."""
    mutants = []
    for path in sorted(LISTS.glob("*.yaml")):
        for row in yaml.safe_load(path.read_text("utf-8")) if path != REASONS else ():
            file = ROOT / row["file"]
            text = file.read_text("utf-8") if file.exists() else ""
            is_there = text.count(row["old"]) == 1
            mutants.append(Mutant(**row, start=text.index(row["old"]) if is_there else -1))
    return mutants


def troubles(mutants: Iterable[Mutant]) -> list[str]:
    """Tell which mutants cannot be tried as they stand, a line for each."""
    return [
        f"{mutant.file}: {mutant.breaks}: its text does not stand there once"
        for mutant in mutants
        if mutant.start < 0
    ]


# Mutants by chance

BORDERS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}


def make_mutants() -> list[Mutant]:
    """Return MADE mutants of all that can be made. Their titles and SEED decide which, so that those of
    code that stays are chosen again, and keep their verdicts and reasons.
    """
    every: dict[str, Mutant] = {}  # by file and title, of which a verdict has nothing else
    for path in sorted((ROOT / PROGRAM).rglob("*.py")):
        text = path.read_text("utf-8")
        file = str(path.relative_to(ROOT))
        for function in functions_of(ast.parse(text)):
            for node in ast.walk(function):
                for mutant in changes_of(node, function.name, file, text):
                    every.setdefault(f"{file}: {mutant.breaks}", mutant)
    chosen = sorted(every, key=lambda title: hashlib.sha256(f"{SEED} {title}".encode()).digest())
    mutants = [every[title] for title in chosen[:MADE]]
    return sorted(mutants, key=lambda mutant: (mutant.file, mutant.start))


def functions_of(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions that stand in no other one."""
    for node in tree.body:
        for each in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield each


def changes_of(node: ast.AST, function: str, file: str, text: str) -> Iterator[Mutant]:
    """Yield the mutants that change one node of the syntax."""

    def mutant(old: ast.expr | ast.stmt, new: str, kind: str) -> Mutant:
        start = place_of(text, old.lineno, old.col_offset)
        end = place_of(text, old.end_lineno or 0, old.end_col_offset or 0)
        piece = text[start:end]
        line = " ".join(piece.split())[:60]
        return Mutant(f"{function}: {kind}: {line}", file, piece, new.format(piece), start)

    match node:
        case ast.If() | ast.While() | ast.IfExp() | ast.Assert():
            yield mutant(node.test, "(not ({}))", "negated")
        case ast.Compare(ops=[operator]) if type(operator) in BORDERS:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            new = f"({left} {BORDERS[type(operator)]} {right})"
            yield mutant(node, new.replace("{", "{{").replace("}", "}}"), "compared otherwise")
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield mutant(node, str(value + 1), "one more")
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise():
            yield mutant(node, "pass", "left out")


def place_of(text: str, line: int, column: int) -> int:
    """Return how many characters precede a line's column, which ast counts in bytes."""
    lines = text.splitlines(keepends=True)
    before = lines[line - 1].encode()[:column].decode()
    return sum(map(len, lines[: line - 1])) + len(before)


def reasons() -> dict[str, str]:
    """Return why a mutant by chance may live, by its file and title."""
    found = yaml.safe_load(REASONS.read_text("utf-8"))
    assert isinstance(found, dict)
    return found


# Which lines a test executes


def judges() -> list[str]:
    """Return the paths of the tests that may judge."""
    return [
        str(path.relative_to(ROOT))
        for folder in ("tests", "tests/unit", f"{HARNESS}/tests")
        for path in sorted((ROOT / folder).glob("test_*.py"))
        if path.stem.removeprefix("test_") not in NO_JUDGES
    ]


class Noting:
    """A plugin of pytest: which lines each test executes, and how long it takes."""

    def __init__(self, directory: Path) -> None:
        import coverage

        self._coverage = coverage.Coverage(
            data_file=str(directory / "data"),
            data_suffix=True,
            source=[str(ROOT / PROGRAM), str(ROOT / HARNESS)],
            config_file=False,
        )
        self._times = directory / f"times.{os.getpid()}"

    def pytest_sessionstart(self) -> None:
        self._coverage.start()

    def pytest_runtest_setup(self, item: Any) -> None:
        self._coverage.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call":
            with self._times.open("a", encoding="utf-8") as file:
                file.write(f"{report.duration:.3f} {report.outcome} {report.nodeid}\n")

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()


def note_reach(at_once: int) -> int:
    """Run all judges, and write REACH: the seconds of each test, and the tests of each line."""
    import coverage

    with tempfile.TemporaryDirectory(prefix="reach-") as name:
        directory = Path(name)
        code = (
            "import sys, pathlib, pytest; sys.path.insert(0, '.'); from tools import mutants;"
            "noting = mutants.Noting(pathlib.Path(sys.argv[1]));"
            "options = ['-q', '--tb=no', '-p', 'no:cacheprovider', '-o', 'faulthandler_timeout=0'];"
            "sys.exit(pytest.main([*options, sys.argv[2]], plugins=[noting]))"
        )

        def run(file: str) -> None:
            command = [sys.executable, "-c", code, name, file]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            print(file, *done.stdout.splitlines()[-1:], flush=True)

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(run, judges()))

        seconds = {}
        for path in directory.glob("times.*"):
            for line in path.read_text("utf-8").splitlines():
                took, outcome, test = line.split(" ", 2)
                if outcome == "passed":
                    seconds[test] = float(took)
        data = coverage.CoverageData(str(directory / "all"))
        for path in directory.glob("data.*"):
            part = coverage.CoverageData(str(path))
            part.read()
            data.update(part)
        tests = sorted(seconds)
        number_of = {test: number for number, test in enumerate(tests)}
        lines: dict[str, dict[int, list[int]]] = {}
        for path_text in data.measured_files():
            key = str(Path(path_text).relative_to(ROOT))
            lines[key] = {
                line: sorted(number_of[test] for test in contexts if test in number_of)
                for line, contexts in data.contexts_by_lineno(path_text).items()
            }
    REACH.parent.mkdir(exist_ok=True)
    REACH.write_text(json.dumps({"seconds": seconds, "tests": tests, "lines": lines}), "utf-8")
    print(f"{len(tests)} tests reach {sum(map(len, lines.values()))} lines")
    return 0


class Reach:
    """What `note_reach` has written."""

    def __init__(self) -> None:
        read = json.loads(REACH.read_text("utf-8"))
        self.seconds: dict[str, float] = read["seconds"]
        self._tests: list[str] = read["tests"]
        self._lines: dict[str, dict[str, list[int]]] = read["lines"]
        self._names_with = Counter(word for test in self._tests for word in words_of(test))

    def judges_of(self, mutant: Mutant, seconds: float) -> list[str]:
        """Return the tests that execute what the mutant changes: the ALIKE ones whose names have
        most words of its title and its file, then in turn the next quick one of all, and the next
        quick one of each file of tests. They took at most so many seconds together when they were
        noted.
        """
        found: set[int] = set()
        lines = self._lines.get(mutant.file, {})
        for line in lines_of(mutant):
            found.update(lines.get(str(line), ()))
        by_time = sorted((self._tests[number] for number in found), key=self.seconds.__getitem__)
        before = Counter[str]()  # by file, its quicker ones
        rank = {}
        for test in by_time:
            file = test.partition("::")[0]
            rank[test] = before[file]
            before[file] += 1
        in_turn = zip(by_time, sorted(by_time, key=rank.__getitem__), strict=True)
        quick = [*dict.fromkeys(chain.from_iterable(in_turn))]
        words = words_of(f"{mutant.breaks} {mutant.file}")
        alike = sorted(quick, key=lambda test: -self._weight(words & words_of(test)))[:ALIKE]

        chosen = []
        total = 0.0
        for test in dict.fromkeys([*alike, *quick]):
            total += self.seconds[test] + 0.01
            if total > seconds:
                break
            chosen.append(test)
        return chosen

    def _weight(self, words: Iterable[str]) -> float:
        """Return what some words have in common with a name: the rarer a word, the more."""
        return sum(1 / self._names_with[word] for word in words)


def words_of(text: str) -> set[str]:
    """Return the beginnings of a text's words, so that "refused" is like "refuses"."""
    return {word[:5] for word in re.findall(r"[a-z]{4,}", text.lower())}


def lines_of(mutant: Mutant) -> set[int]:
    """Return the numbers of the lines that the mutant changes, or of the smallest statement that
    has them where it begins before; of a constant of the module, those that name it; of an `elif`,
    also that of the condition before it.
    """
    text = mutant.text
    start = text[: mutant.start].count("\n") + 1
    end = start + mutant.old.count("\n")
    lines = set(range(start, end + 1))
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and node.orelse and node.orelse[0].lineno == start:
            lines.add(node.lineno)
        if not isinstance(node, (ast.Return, ast.Assign, ast.Expr, ast.AugAssign, ast.AnnAssign)):
            continue
        first = node.lineno
        last = node.end_lineno or first
        if first <= start and end <= last:
            lines = set(range(first, last + 1))
            if node in tree.body:  # it is executed before any test
                named = [each for each in ast.walk(tree) if isinstance(each, ast.Name)]
                own = {
                    each.id
                    for each in named
                    if each.lineno in lines and isinstance(each.ctx, ast.Store)
                }
                lines |= {each.lineno for each in named if each.id in own}
    return lines


# Trying


def try_all(mutants: Sequence[Mutant], at_once: int, seconds: float) -> dict[str, str]:
    """Try mutants in copies of the tree. Returns, and writes as it goes, what killed each by its
    title; "" where nothing did.
    """
    reach = Reach()
    kills: dict[str, str] = json.loads(KILLS.read_text("utf-8")) if KILLS.exists() else {}
    lock = threading.Lock()
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(at_once):
            copies.put(copy_tree(Path(directory) / str(number)))

        def work(mutant: Mutant) -> None:
            tree = copies.get()
            try:
                killer = killer_of(mutant, reach.judges_of(mutant, seconds), tree)
            finally:
                copies.put(tree)
            with lock:
                kills[f"{mutant.file}: {mutant.breaks}"] = killer
                KILLS.write_text(json.dumps(kills, indent=0, sort_keys=True), "utf-8")
                fate = f"killed by {killer}" if killer else "LIVES"
                print(f"{mutant.file}: {mutant.breaks}: {fate}", flush=True)

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(work, mutants))
    return kills


def copy_tree(place: Path) -> Path:
    tree = place / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*WITHOUT), symlinks=True)
    return tree


def killer_of(mutant: Mutant, tests: Sequence[str], tree: Path) -> str:
    """Return the first test that fails or hangs with the mutant and not without it."""
    if not tests:
        return ""
    with applied(mutant, tree):
        killer = failing(tests, tree)
    return "" if killer and failing([killer], tree) else killer


@contextlib.contextmanager
def applied(mutant: Mutant, tree: Path) -> Iterator[None]:
    """Change the copy, and change it back."""
    path = tree / mutant.file
    text = path.read_text("utf-8")
    ast.parse(mutant.changed, f"{mutant.file} ({mutant.breaks})")  # else all tests would kill it
    path.write_text(mutant.changed, "utf-8")
    try:
        yield
    finally:
        path.write_text(text, "utf-8")


def failing(tests: Sequence[str], tree: Path) -> str:
    """Run tests in a copy. Returns the first that fails or hangs, "" if all pass."""
    begun = tree.parent / "begun"
    names = tree.parent / "names"
    names.write_text("\n".join(tests), "utf-8")
    options = ["-q", "-x", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-p", "tools.begun"]
    options += ["-o", f"faulthandler_timeout={LONGEST}", f"--basetemp={tree.parent / 'tmp'}"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "BEGUN": str(begun)}
    begun.write_text("", "utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, f"@{names}"],
        cwd=tree,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        status = process.wait(LATE)
    except subprocess.TimeoutExpired:
        status = 1
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what its tests have started, too
    process.wait()
    if status == 0:
        return ""
    return begun.read_text("utf-8") or tests[0]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Change the program, and see whether tests notice."
    )
    parser.add_argument("what", choices=["reach", "try"])
    parser.add_argument("-k", metavar="WORD", help="those with it in their file or title, again")
    parser.add_argument(
        "--generated",
        action="store_true",
        help="those that chance makes, in place of those by hand",
    )
    parser.add_argument("-j", metavar="N", type=int, default=2, help="so many at a time")
    parser.add_argument(
        "-s",
        metavar="SECONDS",
        type=float,
        default=100.0,
        help="of tests that judge a mutant, as they were noted",
    )
    arguments = parser.parse_args(argv)
    if arguments.what == "reach":
        return note_reach(arguments.j)

    mutants = make_mutants() if arguments.generated else read_lists()
    stale = troubles(mutants)
    print("\n".join(f"stale   {line}" for line in stale))
    known = json.loads(KILLS.read_text("utf-8")) if KILLS.exists() else {}
    known |= reasons()
    word = (arguments.k or "").lower()
    wanted = []
    for mutant in mutants:
        title = f"{mutant.file}: {mutant.breaks}"
        if mutant.start >= 0 and (word in title.lower() if word else not known.get(title)):
            wanted.append(mutant)
    known |= try_all(wanted, arguments.j, arguments.s)
    living = [mutant for mutant in mutants if not known.get(f"{mutant.file}: {mutant.breaks}")]
    for mutant in living:
        print(f"lives   {mutant.file}: {mutant.breaks}")
    print(f"{len(mutants)} mutants, {len(living)} live")
    return 2 if stale else 1 if living else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
