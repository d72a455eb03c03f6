"""The list of mutants fits the program as it is, and tools/mutants.py tells what lives."""

from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path

import pytest

from tools.mutants import Mutant, Verdict, read_lists, run, troubles

ROOT = Path(__file__).resolve().parent.parent
MUTANTS = read_lists()


def test_no_mutant_is_stale() -> None:
    assert troubles(MUTANTS) == []


def test_each_mutant_has_a_title_of_its_own() -> None:
    assert [
        title for title, count in Counter(each.breaks for each in MUTANTS).items() if count > 1
    ] == []


def test_there_are_mutants_of_every_package() -> None:
    packages = {path.parent.name for path in (ROOT / "_regsync").rglob("*.py")} - {"_regsync"}
    counts = Counter(mutant.file.partition("/")[0] for mutant in MUTANTS)
    assert {package: counts[package] for package in packages if counts[package] < 15} == {}
    assert len(MUTANTS) >= 150


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a tree with a program of two lines, of which one is tested."""
    files = {
        "_regsync/__init__.py": "",
        "_regsync/rule.py": "def is_enough(count):\n    return count >= 3\n\n\nSPARE = 1\n",
        "tests/test_rule.py": """
            from _regsync.rule import is_enough

            def test_three_is_enough():
                assert is_enough(3)
            """,
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\n',
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return tmp_path


def mutant(old: str, new: str, *tests: str) -> Mutant:
    return Mutant("What is meant is not so", "rule.py", old, new, tests)


@pytest.mark.parametrize(
    ("old", "new", "test", "words"),
    [
        ("count > 3", "count", "rule", "its text stands there 0 times"),
        ("n", "m", "rule", "its text stands there 4 times"),
        ("count >= 3", "count >= 3", "rule", "it changes nothing"),
        ("count >= 3", "count > 3", "rules", "there is no tests/test_rules.py"),
    ],
)
def test_what_cannot_be_run_is_told(tree: Path, old: str, new: str, test: str, words: str) -> None:
    (trouble,) = troubles([mutant(old, new, test)], tree)
    assert trouble.startswith(f"rule.py: What is meant is not so: {words}")


def test_a_file_that_is_gone_makes_its_mutants_stale(tree: Path) -> None:
    (tree / "_regsync" / "rule.py").unlink()
    (trouble,) = troubles([mutant("count >= 3", "count > 3", "rule")], tree)
    assert "its text stands there 0 times" in trouble


def test_what_cannot_be_tried_is_not_taken_for_killed_and_the_rest_is_tried(tree: Path) -> None:
    no_python = mutant("return count >= 3", "return count >=", "rule")
    no_tests = mutant("count >= 3", "count > 3", "unknown")
    killed = mutant("count >= 3", "count > 3", "rule")
    verdicts = run([no_python, no_tests, killed], lambda verdict: None, root=tree)
    assert [verdict.is_killed for verdict in verdicts] == [False, False, True]
    assert "it cannot be tried: invalid syntax" in verdicts[0].by
    assert "tests/test_unknown.py: pytest ended with 4" in verdicts[1].by


def test_a_test_that_fails_by_itself_kills_nothing(tree: Path) -> None:
    (tree / "tests" / "test_other.py").write_text("def test_other(): assert 0\n", encoding="utf-8")
    change = mutant("count >= 3", "count > 3", "other")
    (verdict,) = run([change], lambda verdict: None, root=tree)
    reason = "tests/test_other.py::test_other fails without it, too"
    assert verdict == Verdict(change, False, reason)


def test_what_lives_is_told_and_the_tree_stays_as_it_is(tree: Path) -> None:
    killed = mutant("count >= 3", "count > 3", "rule")
    living = mutant("SPARE = 1", "SPARE = 2", "rule")
    before = {path: path.read_bytes() for path in tree.rglob("*.*")}
    told: list[Verdict] = []
    verdicts = run([killed, living, killed], told.append, root=tree)
    by = "tests/test_rule.py::test_three_is_enough"
    assert (
        verdicts
        == told
        == [Verdict(killed, True, by), Verdict(living, False, ""), Verdict(killed, True, by)]
    )
    assert {path: path.read_bytes() for path in tree.rglob("*.*")} == before
