"""What an ordinary run leaves out has no pair of values that it does not meet elsewhere, and an
option runs it.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import pytest_collection_modifyitems
from tests.fuzzing import fuzz
from tests.thinning import covering, pairs, thinned
from tools import check

ROOT = Path(__file__).resolve().parent.parent

CELLS = st.integers(1, 5).flatmap(
    lambda size: st.lists(st.tuples(*[st.integers(0, 4)] * size), min_size=1, max_size=60)
)


@given(CELLS, CELLS)
@fuzz(60)
def test_every_pair_of_any_cell_is_in_a_cell_that_is_kept(
    one: list[tuple[int]], other: list[tuple[int]]
) -> None:
    cells = [*zip(one, other, strict=False)]
    kept = covering(cells)
    assert kept == covering(cells)
    for view in (0, 1):
        every = set().union(*(pairs(cell[view]) for cell in cells))
        assert every == set().union(*(pairs(cells[place][view]) for place in kept))


def test_a_product_of_three_dimensions_costs_little_more_than_its_two_largest() -> None:
    cells = [*itertools.product(range(3), range(5), range(12))]
    kept = [param.values for param in thinned(cells) if not param.marks]
    for one, other in itertools.combinations(range(3), 2):
        assert {(cell[one], cell[other]) for cell in kept} == {
            (cell[one], cell[other]) for cell in cells
        }
    assert 60 <= len(kept) <= 66


def test_of_two_dimensions_nothing_is_left_out() -> None:
    assert not [param for param in thinned([*itertools.product("abc", "xy")]) if param.marks]


def test_a_view_says_what_the_dimensions_are() -> None:
    cells = [*itertools.product("ab", "xy", (1, 2))]
    kept = [param.values for param in thinned(cells, lambda cell: cell[:1], lambda cell: cell[1:])]
    assert kept == cells
    left = [param.values for param in thinned(cells, lambda cell: cell[:1]) if not param.marks]
    assert left == [("a", "x", 1), ("b", "x", 1)]


def test_what_was_a_parameter_keeps_its_name_and_marks() -> None:
    named = [
        pytest.param("a", 1, id="first"),
        pytest.param("a", 1, id="second", marks=pytest.mark.slow),
    ]
    first, second = thinned(named)
    assert (first.id, first.marks) == ("first", ())
    assert (second.id, [mark.name for mark in second.marks]) == ("second", ["slow", "thorough"])


class Item:
    """What conftest.py looks at in a test: its file, and the one mark that it bears."""

    def __init__(self, file: str, mark: str = "") -> None:
        self.path = Path(file)
        self.get_closest_marker = {mark: True}.get


@pytest.mark.parametrize("is_thorough", [False, True])
def test_an_option_runs_what_was_left_out(is_thorough: bool) -> None:
    left: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    options = {"--thorough": is_thorough, "--file": None}
    config: Any = SimpleNamespace(getoption=options.__getitem__, hook=hook)

    items: list[Any] = [Item("a", "slow"), Item("a", "thorough"), Item("a", "slow")]
    one, other, third = items
    pytest_collection_modifyitems(config, items)
    assert items == ([one, other, third] if is_thorough else [one, third])
    assert left == ([] if is_thorough else [other])


def test_files_with_slow_tests_begin_first() -> None:
    config: Any = SimpleNamespace(getoption={"--thorough": True, "--file": None}.__getitem__)
    items: list[Any] = [Item("a"), Item("b"), Item("b", "slow"), Item("c"), Item("b")]
    a, b, slow, c, last = items
    pytest_collection_modifyitems(config, items)
    assert items == [b, slow, last, a, c]


@pytest.mark.parametrize(
    ("arguments", "has_changed", "tests"),
    [
        (["-x"], False, ["tests"]),
        (["-x"], True, ["tests", "conformance/tests"]),
        (["-k", "zipapp"], False, ["tests"]),
        (["--thorough", "-x"], False, ["tests", "conformance/tests"]),
        (["tests/test_thinning.py::test_one", "-x"], True, []),
        (["--file", "regsync.py"], True, []),
    ],
)
def test_what_is_run_and_how_long_it_may_take(
    arguments: list[str], has_changed: bool, tests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options are passed on, everything may take longer than CI allows, and what the tests start
    is compiled once.
    """
    started: list[tuple[list[str], float | None]] = []

    def run(
        command: list[str], *, timeout: float | None, env: dict[str, str], check: bool
    ) -> subprocess.CompletedProcess[str]:
        started.append((command, timeout))
        assert "PYTHONDONTWRITEBYTECODE" not in env
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(check, "ready_venv", lambda: sys.executable)
    monkeypatch.setattr(check, "ready_programs", lambda: None)
    monkeypatch.setattr(check, "ready_provider", lambda: None)
    monkeypatch.setattr(check, "harness_has_changed", lambda: has_changed)
    monkeypatch.setattr(
        check, "subprocess", SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    )
    monkeypatch.chdir(ROOT)
    assert check.main(arguments) == 0
    command, _ = started[-1]
    assert command[2] == "pytest"
    passed_on = check.for_pytest(arguments)
    assert command[command.index(passed_on[0]) :] == [*passed_on, *tests]
    is_bounded = "--thorough" not in arguments
    for _, timeout in started:
        assert is_bounded is (timeout is not None)
        assert timeout is None or timeout <= 19 * 60


@pytest.mark.parametrize("branch", ["main", "feature"])
@pytest.mark.parametrize("name", ["program.py", "conformance/old.py", "conformance/new.py"])
def test_git_tells_whether_the_harness_has_changed(
    name: str, branch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "test")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "test@example.com")

    def commit(name: str) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with (tmp_path / name).open("a", encoding="utf-8") as file:
            file.write("1\n")
        for words in (["add", "-A"], ["commit", "-q", "-m", name]):
            assert check.git(*words).returncode == 0

    assert check.git("init", "-q", "-b", "main").returncode == 0
    commit("conformance/old.py")
    commit("other.py")
    check.git("checkout", "-q", "-B", branch)
    assert not check.harness_has_changed()
    commit(name)
    if branch == "feature":
        commit("other.py")
    assert check.harness_has_changed() is name.startswith("conformance/")


def test_where_git_cannot_say_the_harness_may_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check.harness_has_changed()
    monkeypatch.setenv("PATH", "")
    assert check.harness_has_changed()


def test_a_new_file_of_the_harness_is_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"rev-parse": "1", "merge-base": "1", "ls-files": "conformance/new.py", "diff": ""}
    monkeypatch.setattr(
        check, "git", lambda word, *_: subprocess.CompletedProcess([], 0, answers[word], "")
    )
    assert check.harness_has_changed()
    answers["ls-files"] = ""
    assert not check.harness_has_changed()
