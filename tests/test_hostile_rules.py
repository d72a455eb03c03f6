"""The rules of docs/protocol-facts.md section 9.2: each has a test that bears its number.

`@pytest.mark.rule("R7")` marks one; most are in test_hostile_*.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.ends import ROOT

RULES = {
    "R1": "a credential is bound to one origin",
    "R2": "a realm is checked, a login is not redirected",
    "R3": "an upload goes where it is safe",
    "R4": "a redirect leads to no place that is less safe",
    "R5": "the urls of a descriptor are not fetched",
    "R6": "the next page is on the same origin and below the same name",
    "R7": "a proxy's login is in CONNECT alone",
    "R8": "a credential is chosen by the exact host",
    "R9": "no scheme gives way to another",
    "R10": "no URL's query, no header that proves anything is shown",
    "R11": "digests, tags and names are checked before they are part of anything",
    "R12": "every body is hashed, and compared with what named it",
    "R13": "a document is what all its names say, and one thing only",
    "R14": "everything is bounded",
    "R15": "no coding is asked for, none is decoded",
    "R16": "nothing from a registry is a path, no link is followed",
    "R17": "after a broken exchange the connection is closed",
    "R18": "text of others is one clean line",
    "R19": "no secret in arguments' echoes, no write to files of credentials",
    "R20": "where a cloud's identity is asked for is fixed",
}


def rules_of(path: Path) -> Iterator[tuple[str, str]]:
    """Give each test function of a file with each rule that it bears."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if "mark.rule(" in text else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith(
            "test_"
        ):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.rule":
                    yield from ((node.name, str(ast.literal_eval(each))) for each in mark.args)


def test_every_rule_has_a_test():
    found = [
        pair for path in sorted((ROOT / "tests").rglob("test_*.py")) for pair in rules_of(path)
    ]
    named = {rule for _, rule in found}
    assert named - {*RULES} == set(), "a mark that is no rule"
    assert {*RULES} - named == set(), "a rule without a test"
