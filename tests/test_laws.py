"""Each law of laws.py catches a breach and passes what only looks like one; the folders keep them
all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.laws import breaches

ROOT = Path(__file__).resolve().parent.parent
KEPT = ("_regsync", "conformance", "tools")  # the folders whose modules are held to the laws
MODULES = [
    path
    for folder in KEPT
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.parent != ROOT / "conformance" / "tests"
]

BREACHES = [
    ("a, b = x, y", "are assigned in one statement"),
    ("self.a, self.b = 1, None", "are assigned in one statement"),
    ("[a, b] = [b, b]", "are assigned in one statement"),
    ("(a, b), c = (x, y), z", "are assigned in one statement"),
    ("count += not done", "a truth value"),
    ("count = seen + (a == b)", "a truth value"),
    ("words = ['more'] * (len(found) > 3)", "a truth value"),
    ("def f(wide: bool):\n    return 2 * wide", "a truth value"),
    ("def f():\n    wide = a > b\n    return text * wide", "a truth value"),
    ("total = left - call.is_lost", "a truth value"),
    ("total = left - call.is_lost()", "a truth value"),
    ("total = sum(each.name == name for each in rows)", "a truth value"),
    ("cap = caps[user is not None]", "a truth value"),
    ("for a in b if c else (): f(a)", "a for runs over a choice"),
    ("found = [a for a in (b if c else d)]", "a for runs over a choice"),
    ("f(a := 1)", "a is assigned inside an expression"),
    ("if f(a := g()):\n    pass", "a is assigned inside an expression"),
    ("found = [b for a in c if (b := f(a))]", "b is assigned inside an expression"),
    ("found = a if (a := f()) else b", "a is assigned inside an expression"),
    ("found = a if b else c if d else e", "a choice within a choice"),
    ("found = f(a if b else c) if d else e", "a choice within a choice"),
    ("found = a if (b if c else d) else e", "a choice within a choice"),
    ("def f(pair: tuple[str, int]):\n    return pair[1]", "by number: pair[1]"),
    ("def f(pair: tuple[str, int] | None):\n    return pair[0]", "by number: pair[0]"),
    (
        "class Row(NamedTuple):\n    a: int\ndef f(row: Row):\n    return row[0]",
        "by number: row[0]",
    ),
    ("class Own:\n    key: tuple[str, int]\ndef f(own):\n    return own.key[0]", "by number"),
    ("def g() -> tuple[int, str]: ...\nfound = g()\nf(found[1])", "by number: found[1]"),
    ("async def g() -> 'tuple[int, str]': ...\nfound = await g()\nf(found[1])", "by number"),
    ("found = ask(host)[1]", "by number: ask(host)[1]"),
    ("found = sorted(rows, key=lambda row: row[1])", "by number: row[1]"),
    ("if a: f()", "a second statement on a line: f()"),
    ("f(); g()", "a second statement on a line: g()"),
    ("try:\n    f()\nfinally: g()", "a second statement on a line: g()"),
    ("for a in (\n    b,\n    c,\n): f(a)", "a second statement on a line: f(a)"),
    ("class Own: name = 'ä'; place = 1", "a second statement on a line: place = 1"),
]

LAWFUL = [
    "a, b = b, a",
    "row[i], row[j] = row[j], row[i]",
    "a, b = pair",
    "a = b = 0",
    "place = (x, y)",
    "count += 1",
    "flag = a == b and not c",
    "flag |= a == b",
    "text = 'it is %s' % (a == b)",
    "words = [a == b] * 3",
    "word = {True: 'yes', False: 'no'}[a == b]",
    "total = sum(1 for row in rows if row.name == name)",
    "def f(wide: bool):\n    wide = 2\n    return 2 * wide",
    "def f(wide: bool):\n    return g(wide)",
    "for a in b or ():\n    f(a)",
    "found = [a if b else c for a in d]",
    "found = [f(a) for a in g(b if c else d)]",
    "if a := f():\n    pass",
    "while (a := f()) is not None and b:\n    pass",
    "if not (a := f()):\n    pass\nelif (b := g()) > 1:\n    pass",
    "found = (a if b else c, d if e else f)",
    "found = [a for a in (b, c) if d]",
    "def f(words: list[str]):\n    return words[0]",
    "def f(numbers: tuple[int, ...]):\n    return numbers[0]",
    "def f(pair: tuple[str, int]):\n    return pair[1:]",
    "def f(rows: dict[int, str]):\n    return rows[0]",
    "top = text.partition(':')[2]",
    "first = sorted(rows)[0]",
    "last = pages()[-1]",
    "first = order(key=lambda row: row.number)[n]",
    "if a:\n    f()\nelif b:\n    g()\nelse:\n    h()",
    "def f() -> int: ...",
    "@mark\nclass Own:\n    pass",
    "f(lambda: g(), 'a; b')",
]


@pytest.mark.parametrize(("source", "words"), BREACHES)
def test_a_breach_is_caught(source: str, words: str) -> None:
    assert any(words in breach for breach in breaches(source, "module"))


@pytest.mark.parametrize("source", LAWFUL)
def test_what_only_looks_like_a_breach_passes(source: str) -> None:
    assert breaches(source, "module") == []


def test_a_breach_is_told_with_its_place() -> None:
    assert breaches("\na, b = 1, 2", "module") == ["module:2: (a, b) are assigned in one statement"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_keeps_the_laws(path: Path) -> None:
    assert breaches(path.read_text(encoding="utf-8"), path.stem) == []
