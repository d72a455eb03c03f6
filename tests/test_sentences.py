"""Each sentence names its tests: those of the specification, the wire rules, the invariants, and the
rules about hostile peers.

`sentences.yaml` has a row for each: what it says, and the tests that would fail if it were not so, as
FILE::FUNCTION below tests/; or `untested`, with the reason.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.ends import ROOT

TESTS = ROOT / "tests"
ROWS = yaml.safe_load((TESTS / "sentences.yaml").read_text(encoding="utf-8"))
SPECIFICATION = (ROOT / "docs" / "specification.md").read_text(encoding="utf-8")
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
FACTS = (ROOT / "docs" / "protocol-facts.md").read_text(encoding="utf-8")


def sentences() -> list[str]:
    """Return the items, rows of tables and paragraphs of the specification, but for those that only
    introduce others or say that something is left open.
    """
    found = []
    lines = SPECIFICATION.splitlines()
    for line, next_line in zip(lines, [*lines[1:], ""], strict=True):
        text = re.sub(r"^ *(?:\d+\.|-) ", "", line).strip()
        is_heading = line.startswith("#") or re.match(r"\|[-|]+$", next_line)
        is_rule = re.fullmatch(r"\|[-|]+", line)
        is_lead = text.endswith((":", "not shown.", ".**"))
        if text and not is_heading and not is_rule and not is_lead:
            found.append(text)
    return found


def numbered() -> set[str]:
    """Return the names of the wire rules, the invariants, and the rules about hostile peers."""
    rules = DESIGN.partition("## 6.")[2].partition("## 7.")[0]
    names = {f"rule {number}" for number in re.findall(r"(?m)^(\d+)\. ", rules)}
    names.update(re.findall(r"(?m)^- (I\d+): ", DESIGN))
    names.update(re.findall(r"(?m)^\| (R\d+) \| ", FACTS))
    return names


@cache
def functions(file: str) -> set[str]:
    """Return the names of a file's tests, those of its classes among them."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.name.startswith("test_")
    }


def test_every_sentence_of_the_specification_has_its_row_and_no_other_has():
    rows = [row["says"] for row in ROWS if "says" in row]
    assert Counter(rows) == Counter(sentences())


def test_every_numbered_rule_has_its_row_and_no_other_has():
    rows = [row["rule"] for row in ROWS if "rule" in row]
    assert Counter(rows) == Counter(numbered())


@pytest.mark.parametrize("row", ROWS, ids=[row.get("rule") or row["says"][:60] for row in ROWS])
def test_its_witnesses_are_tests(row):
    assert row.get("tests") or row.get("untested")
    for name in row.get("tests", ()):
        file, _, function = name.partition("::")
        assert Path(TESTS / file).exists(), name
        assert function in functions(file), name
