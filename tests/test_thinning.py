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


@pytest.mark.parametrize("is_thorough", [False, True])
def test_an_option_runs_what_was_left_out(is_thorough: bool) -> None:
    left: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    config: Any = SimpleNamespace(getoption={"--thorough": is_thorough}.get, hook=hook)
    items: list[Any] = [
        SimpleNamespace(get_closest_marker={name: True}.get)
        for name in ("slow", "thorough", "slow")
    ]
    one, other, third = items
    pytest_collection_modifyitems(config, items)
    assert items == ([one, other, third] if is_thorough else [one, third])
    assert left == ([] if is_thorough else [other])


def test_with_a_file_only_what_runs_one_is_left() -> None:
    left: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    config: Any = SimpleNamespace(getoption={"--file": "regsync"}.get, hook=hook)

    def item(module: str, *fixtures: str, mark: str = "slow") -> Any:
        return SimpleNamespace(
            path=Path(f"{module}.py"), fixturenames=fixtures, get_closest_marker={mark: True}.get
        )

    kept = [item("test_cli"), item("test_personas", "pyz")]
    others = [
        item("test_personas"),
        item("test_zipapp", "pyz"),
        item("test_cli", mark="in_process"),
        item("test_cli", mark="thorough"),
    ]
    items = [*others, *kept]
    pytest_collection_modifyitems(config, items)
    assert (items, left) == (kept, others)


@pytest.mark.parametrize(
    ("arguments", "is_bounded"), [(["-x"], True), (["--thorough", "-x"], False)]
)
def test_everything_may_take_longer_than_ci_allows(
    arguments: list[str], is_bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option is passed on."""
    started: list[tuple[list[str], float | None]] = []

    def run(
        command: list[str], *, timeout: float | None, check: bool
    ) -> subprocess.CompletedProcess[str]:
        started.append((command, timeout))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(check, "ready_venv", lambda: sys.executable)
    monkeypatch.setattr(check, "ready_programs", lambda: None)
    monkeypatch.setattr(check, "ready_provider", lambda: None)
    monkeypatch.setattr(
        check, "subprocess", SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    )
    monkeypatch.chdir(ROOT)
    assert check.main(arguments) == 0
    command, _ = started[-1]
    assert command[2] == "pytest"
    assert command[-len(arguments) :] == arguments
    for _, timeout in started:
        assert is_bounded is (timeout is not None)
        assert timeout is None or timeout <= 19 * 60
