#!/usr/bin/env python3
"""Lay out `_regsync`: as `ruff format` does, then in fewer lines.

The program is bounded in lines (tests/test_shape.py), and a call that fits into two of them need not take
eight. What brackets hold is filled, a block of one short statement stands behind its header, imports are sorted,
those of whole modules stand in one line, and there are no blank lines. Statements with comments inside stay as
they are. The syntax tree is compared before a file is written. To read the program as it is usually laid out:
`ruff format _regsync`.

    python3 tools/layout.py           writes
    python3 tools/layout.py --check   says which files are laid out otherwise; exit status 1 if any
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["fill", "main"]

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 120
SHORT = 120  # a block and its header together
_BLOCKS = ("def ", "async def ", "if ", "elif ", "while ", "for ", "with ", "class ", "async with ", "async for ")
_DROPPED = "\f"
_SIMPLE = (
    *(ast.Return, ast.Raise, ast.Continue, ast.Break, ast.Pass, ast.Delete, ast.Expr, ast.Assert),
    *(ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Nonlocal),
)
_BEFORE = {"for", "if", "else", "and", "or", "not in", "in", "async"}


class Piece(NamedTuple):
    """One token with the space before it, and how unwillingly a line is broken there: 0 is never, not 1."""

    text: str
    space: str
    rank: int


def statements(source: str) -> Iterator[list[tokenize.TokenInfo]]:
    """Give the tokens of each logical line."""
    found: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.INDENT, tokenize.DEDENT):
            continue
        if token.type == tokenize.NEWLINE:
            yield found
            found = []
        elif token.type == tokenize.COMMENT and not found:
            continue
        elif token.type != tokenize.NL:
            found.append(token)


def pieces(tokens: Sequence[tokenize.TokenInfo]) -> list[Piece]:
    """Return a statement as one line would have it, without commas before closing brackets."""
    found: list[Piece] = []
    depth = named = 0
    for index, token in enumerate(tokens):
        before = tokens[index - 1] if index else None
        closes = token.string in (")", "]", "}")
        single = found and token.string == ")" and found[-1].text == "," and _is_tuple(found)
        if closes:
            depth -= 1
            if found and found[-1].text == "," and not single:
                found.pop()
        space, breaks = "", 0
        if before is not None:
            split = before.end[0] != token.start[0]
            if not split:
                space = " " * (token.start[1] - before.end[1])
            elif before.string not in ("(", "[", "{") and not closes:
                space = " "
            strings = before.type == tokenize.STRING == token.type
            if (before.string == "," or strings) and not named:
                breaks = 2 * depth
            elif token.string in _BEFORE and space and depth:
                breaks = 2 * depth + 1
            elif before.string in ("(", "[", "{") and split:
                # Only where nothing inside lets the line be broken sooner.
                breaks = 2 * depth + 100
        found.append(Piece(token.string, space, breaks))
        depth += token.string in ("(", "[", "{")
        # What a comprehension names is not torn apart.
        named = depth if token.string == "for" else 0 if token.string == "in" else named
    return found


def _is_tuple(found: Sequence[Piece]) -> bool:
    """Say whether the comma before `)` makes a tuple of one."""
    depth = commas = 0
    for piece in reversed(found):
        if piece.text in (")", "]", "}"):
            depth += 1
        elif piece.text in ("(", "[", "{"):
            if not depth:
                index = next(i for i, each in enumerate(found) if each is piece)
                called = index and (found[index - 1].text.isidentifier() or found[index - 1].text in (")", "]"))
                keyword = index and found[index - 1].text in ("in", "return", "and", "or", "else", "if", "yield", "=")
                return commas == 1 and (not called or bool(keyword))
            depth -= 1
        commas += piece.text == "," and not depth
    return False


def wrapped(found: Sequence[Piece], indent: int) -> list[str]:
    """Return a statement's lines: broken where the brackets are fewest, as late as fits."""
    text = "".join(piece.space + piece.text for piece in found)
    inner = indent + (8 if text.startswith(_BLOCKS) else 4)
    lines: list[str] = []
    rest, margin = list(found), indent
    while rest:
        whole = "".join(piece.space + piece.text for piece in rest).lstrip()
        if margin + len(whole) <= WIDTH:
            lines.append(" " * margin + whole)
            break
        best: tuple[int, int] | None = None
        length = margin
        for index, piece in enumerate(rest):
            if index and piece.rank and length <= WIDTH:
                late = length > margin + (WIDTH - margin) // 3
                rank = piece.rank if late else piece.rank + 40
                if best is None or rank <= best[0]:
                    best = (rank, index)
            length += len(piece.space) * bool(index) + len(piece.text)
            if length > WIDTH:
                break
        if best is None:
            return []
        cut = best[1]
        lines.append(" " * margin + "".join(piece.space + piece.text for piece in rest[:cut]).strip())
        rest, margin = rest[cut:], inner
    return lines


def fill(source: str) -> str:
    """Return a module with its statements filled."""
    lines = source.split("\n")
    tables, off = set[int](), False
    for number, line in enumerate(lines):
        off = (off or line.strip() == "# fmt: off") and line.strip() != "# fmt: on"
        tables |= {number} if off else set()
    for tokens in reversed(list(statements(source))):
        first, last = tokens[0].start[0] - 1, tokens[-1].end[0] - 1
        untouched = first in tables or any(
            token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.start[0] != token.end[0])
            for token in tokens
        )
        if first == last or untouched:
            continue
        found = wrapped(pieces(tokens), tokens[0].start[1])
        if found and len(found) < last - first + 1:
            lines[first : last + 1] = found
    return join("\n".join(lines))


def join(source: str) -> str:
    """Return a module with each block of one short statement behind its header, and without two blank lines."""
    lines = source.split("\n")
    joined = set[int]()
    for node in ast.walk(ast.parse(source)):
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(node, ast.Module | ast.ClassDef) or not isinstance(block, list) or len(block) != 1:
                continue
            statement, above = block[0], block[0].lineno - 2
            header, text = lines[above], lines[above + 1].strip()
            short = len(header) + 1 + len(text) <= SHORT and statement.lineno == statement.end_lineno
            if short and header.endswith(":") and isinstance(statement, _SIMPLE) and "#" not in header:
                joined.add(above)
    for above in sorted(joined, reverse=True):
        lines[above : above + 2] = [f"{lines[above]} {lines[above + 1].strip()}"]
    texts = set(range(len(lines))) - _inside_strings("\n".join(lines))
    lines = [line for number, line in enumerate(lines[:-1]) if line or number not in texts] + [""]
    for one, other in itertools.pairwise(ast.parse("\n".join(lines)).body):
        if isinstance(one, ast.Import) and isinstance(other, ast.Import) and len(both(lines, one, other)) <= WIDTH:
            lines[other.lineno - 1], lines[one.lineno - 1] = both(lines, one, other), _DROPPED
    return "\n".join(line for line in lines if line != _DROPPED)


def both(lines: Sequence[str], one: ast.Import, other: ast.Import) -> str:
    """Return two imports of whole modules as one line."""
    return f"{lines[one.lineno - 1]}, {lines[other.lineno - 1].removeprefix('import ')}"


def separate(source: str) -> str:
    """Return what a module means, however its imports are written."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [  # type: ignore[attr-defined]
                part
                for each in body
                for part in ([ast.Import([name]) for name in each.names] if isinstance(each, ast.Import) else [each])
            ]
    return ast.dump(tree)


def _inside_strings(source: str) -> set[int]:
    """Return the lines, from 0, that lie within a string of several lines."""
    found = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING:
            found |= set(range(token.start[0], token.end[0] - 1))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Lay out the modules of _regsync.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if something would change")
    given = parser.parse_args(argv)
    changed = 0
    for path in sorted((ROOT / "_regsync").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(path), "-"]
        formatted = subprocess.run(command, input=source, capture_output=True, text=True, check=True, cwd=ROOT).stdout
        command = [
            sys.executable,
            "-m",
            "ruff",
            "check",
            "--select=I",
            "--fix",
            "-q",
            "--stdin-filename=module.py",
            "-",
        ]
        formatted = subprocess.run(
            command, input=formatted, capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout
        laid_out = fill(formatted)
        if separate(laid_out) != separate(source):
            raise SystemExit(f"{path.name} would mean something else: a defect of this tool")
        if laid_out != source:
            changed += 1
            print(f"{'would lay out' if given.check else 'laid out'} {path.name}")
            if not given.check:
                path.write_text(laid_out, encoding="utf-8")
    return 1 if given.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
