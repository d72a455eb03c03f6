"""What `tools/bench.py reading` counts, and that each subject of tools/bench.py can be asked for."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

from tools import bench
from tools.benches import reading
from tools.benches.runner import ROOT, BenchError, Figure, choose

MADE_UP = '''\
"""One sentence."""

from typing import Any, cast

LIMIT = 3  # seconds


def plain(value: Any) -> Any:
    # Two words.
    first, second = value, LIMIT
    first, second = second, first
    if (length := len(first)) > 1:
        return cast(Any, length)
    return "Any" if second else "none"


class Thing:
    async def method(self) -> None:
        """Say so."""
'''

LONG = "def long():\n" + "    pass\n" * 40
COMPLEX = '''\
def complex(values):
    """Has eleven: itself, for, two ifs, and, or, comprehension with its if, while, except, ternary."""
    for value in values:
        if value and value > 1 or value < -1:
            continue
        if value:
            values = [each for each in values if each]
    while values:
        try:
            return values
        except ValueError:
            return 1 if values else 2

    def inner():
        return 1 if values else 2
'''


def test_a_made_up_module_is_counted() -> None:
    counts = reading.count([MADE_UP])
    assert counts == reading.Counts(
        modules=1,
        lines=19,
        blank_lines=6,
        characters=sum(len(line) for line in MADE_UP.splitlines()),
        statements=12,
        functions=2,
        documented_functions=1,
        parallel_assignments=1,
        walruses=1,
        ternaries=1,
        lines_with_any=3,
        comments=2,
    )
    shown = reading.rows(counts)
    assert shown["blank lines"] == "32 %"
    assert shown["statements per non-blank line"] == "0.92"
    assert shown["comments per 100 lines"] == "10.5"
    assert shown["ternaries per 1,000 statements"] == "83"
    assert reading.count([MADE_UP, MADE_UP]).statements == 24


def test_long_functions_are_those_of_more_than_40_lines_without_the_docstring() -> None:
    documented = LONG.replace("pass", '"""Two\n    lines."""', 1)
    assert [reading.count([text]).long_functions for text in (LONG, documented)] == [1, 0]


def test_branches_make_a_function_complex_and_those_of_an_inner_one_do_not() -> None:
    counts = reading.count([COMPLEX])
    assert (counts.functions, counts.complex_functions) == (2, 1)
    [function] = ast.parse(COMPLEX).body
    assert isinstance(function, ast.FunctionDef)
    assert reading.complexity_of(function) == 11


@pytest.mark.parametrize(
    ("text", "parallel"),
    [
        ("a, b = x, y", True),
        ("self.a, self.b = {}, []", True),
        ("a, b = b, a", False),
        ("a, b = pair", False),
        ("a = x, y", False),
    ],
)
def test_a_parallel_assignment_is_no_exchange_and_no_unpacking(text: str, parallel: bool) -> None:
    [statement] = ast.parse(text).body
    assert isinstance(statement, ast.Assign)
    assert reading.is_parallel(statement) is parallel


def test_nested_packages_are_counted_and_their_tests_are_not(tmp_path: Path) -> None:
    for place in ("flat.py", "inner/__init__.py", "inner/deep/module.py", "inner/tests/no.py"):
        file = tmp_path / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"PLACE = '{place}'\n")
    (tmp_path / "inner" / "schema.json").write_text("{}")
    sources = reading.sources_below(tmp_path)
    places = [ast.literal_eval(source.partition(" = ")[2]) for source in sources]
    assert places == ["flat.py", "inner/__init__.py", "inner/deep/module.py"]


def test_an_empty_folder_has_figures_too(tmp_path: Path) -> None:
    assert reading.rows(reading.count(reading.sources_below(tmp_path)))["blank lines"] == "0 %"
    with pytest.raises(BenchError, match="is no folder"):
        reading.sources_below(tmp_path / "absent")


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.com"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git on this machine")
def test_a_folder_is_read_as_it_stood_in_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "ROOT", tmp_path)
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    (package / "inner" / "old.py").write_text("OLD = 'ä'\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    (package / "inner" / "old.py").write_text("NEW = 1\n")
    assert reading.sources_of_commit("HEAD", package) == ["OLD = 'ä'\n"]
    assert reading.sources_below(package) == ["NEW = 1\n"]
    with pytest.raises(BenchError, match="git has no package of v1: "):
        reading.sources_of_commit("v1", package)
    with pytest.raises(BenchError, match="is in no commit"):
        reading.sources_of_commit("HEAD", tmp_path.parent)


def test_the_figures_stand_beside_those_of_h11(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["reading", str(ROOT / "tools" / "benches")]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert "tools/benches" in head
    assert "h11" in head
    assert lines[0].startswith("lines ")


@pytest.mark.parametrize("name", bench.SUBJECTS)
def test_each_subject_says_what_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main([name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: bench.py {name} ")
    assert "Owns:" not in shown


def test_without_a_subject_skopeo_is_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["nothing"]) == 1
    assert capsys.readouterr().err.startswith("bench: no such case: nothing (there are bulk, ")
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"\n    {name} " in shown for name in bench.SUBJECTS)
    assert "usage: bench.py skopeo " in shown


def test_a_figure_says_whether_it_is_what_it_should_be() -> None:
    most = Figure("start", 1.5, "s", 2.0)
    assert str(most).split() == ["start", "1.50", "s", "at", "most", "2", "met"]
    least = Figure("speed", 1.5, "x skopeo", 2.0, "at least", "slow")
    assert str(least).split()[2:] == ["x", "skopeo", "at", "least", "2", "NOT", "MET", "slow"]
    assert str(Figure("size", 1.0, "MB")).split() == ["size", "1.00", "MB"]


def test_all_cases_are_chosen_where_none_is_named() -> None:
    cases = {"a": 1, "b": 2}
    assert choose([], cases) == cases
    assert choose(["b"], cases) == {"b": 2}
    with pytest.raises(BenchError, match="no such case: c \\(there are a, b\\)"):
        choose(["c"], cases)
