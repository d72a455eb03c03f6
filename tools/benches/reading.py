"""Print the figures by which the text is looked at, beside those of h11 and httpcore.

    bench.py reading [FOLDER ...] [--ref COMMIT]

Each FOLDER (by default `_regsync`) is counted with everything below it, except folders of tests and
what httpcore generates. With --ref each folder is also counted as it stood in a commit.

They are to look at. Nothing asserts on them, and no line is written to meet one.

Owns: what is counted, and how.
May not know: what the text does.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import io
import subprocess
import tarfile
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tools.benches.runner import ROOT, BenchError

__all__ = [
    "Counts",
    "add_options",
    "count",
    "is_parallel",
    "rows",
    "run",
    "sources_below",
    "sources_of_commit",
]

PROGRAM = ROOT / "_regsync"
PEERS = ("h11", "httpcore")
LONG = 40  # lines of a function, without its docstring
COMPLEX = 10  # 1 + branches
NOT_COUNTED = {"tests", "_sync"}  # `_sync` of httpcore is generated from its `_async`

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Branch = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.match_case,
    ast.comprehension,
)


@dataclass
class Counts:
    """What was counted in some modules."""

    modules: int = 0
    lines: int = 0
    blank_lines: int = 0
    characters: int = 0
    statements: int = 0
    functions: int = 0
    long_functions: int = 0
    complex_functions: int = 0
    documented_functions: int = 0
    parallel_assignments: int = 0
    walruses: int = 0
    ternaries: int = 0
    lines_with_any: int = 0
    comments: int = 0

    @property
    def full_lines(self) -> int:
        """Lines that are not blank."""
        return self.lines - self.blank_lines


# ---------------------------------------------------------------- counting


def count(sources: Iterable[str]) -> Counts:
    """Count the texts of some modules."""
    counts = Counts()
    for source in sources:
        counts.modules += 1
        count_lines(counts, source)
        count_tokens(counts, source)
        for node in ast.walk(ast.parse(source)):
            count_node(counts, node)
    return counts


def count_lines(counts: Counts, source: str) -> None:
    """Count what needs no parser."""
    for line in source.splitlines():
        counts.lines += 1
        if line.strip():
            counts.characters += len(line)
        else:
            counts.blank_lines += 1


def count_tokens(counts: Counts, source: str) -> None:
    """Count comments, and lines of code with the name `Any`."""
    lines_with_any: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            counts.comments += 1
        elif token.type == tokenize.NAME and token.string == "Any":
            lines_with_any.add(token.start[0])
    counts.lines_with_any += len(lines_with_any)


def count_node(counts: Counts, node: ast.AST) -> None:
    """Count one node of a syntax tree, without those below it."""
    if isinstance(node, ast.stmt):
        counts.statements += 1
    if isinstance(node, ast.Assign) and is_parallel(node):
        counts.parallel_assignments += 1
    if isinstance(node, ast.NamedExpr):
        counts.walruses += 1
    if isinstance(node, ast.IfExp):
        counts.ternaries += 1
    if isinstance(node, Function):
        counts.functions += 1
        if length_of(node) > LONG:
            counts.long_functions += 1
        if complexity_of(node) > COMPLEX:
            counts.complex_functions += 1
        if ast.get_docstring(node, clean=False) is not None:
            counts.documented_functions += 1


def is_parallel(node: ast.Assign) -> bool:
    """Tell whether `a, b = x, y` is written; an exchange of values is something else."""
    [target, *_] = node.targets
    if not isinstance(target, (ast.Tuple, ast.List)):
        return False
    if not isinstance(node.value, (ast.Tuple, ast.List)):
        return False
    names = {ast.unparse(element) for element in target.elts}
    values = {ast.unparse(element) for element in node.value.elts}
    return names != values


def length_of(function: Function) -> int:
    """Return the lines of a function from `def` on, without its docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is None:
        return lines
    docstring = function.body[0]
    return lines - ((docstring.end_lineno or docstring.lineno) - docstring.lineno + 1)


def complexity_of(function: Function) -> int:
    """Return 1 + the branches of a function; those of functions inside it are their own."""
    branches = 0
    for node in own_nodes(function):
        if isinstance(node, Branch):
            branches += 1
        if isinstance(node, ast.BoolOp):
            branches += len(node.values) - 1
        if isinstance(node, ast.comprehension):
            branches += len(node.ifs)
    return 1 + branches


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """Walk a function's body, but not the functions and classes in it."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        if isinstance(node, Scope):
            continue
        yield node
        pending.extend(ast.iter_child_nodes(node))


# ---------------------------------------------------------------- where modules come from


def is_counted(path: PurePosixPath) -> bool:
    """Tell whether a file below a folder is counted, by its path from there."""
    return path.suffix == ".py" and not NOT_COUNTED & set(path.parts)


def sources_below(folder: Path) -> list[str]:
    """Return the modules of a folder and of all folders in it."""
    if not folder.is_dir():
        raise BenchError(f"{folder} is no folder")
    files = sorted(folder.rglob("*.py"))
    chosen = [file for file in files if is_counted(PurePosixPath(file.relative_to(folder)))]
    return [file.read_text(encoding="utf-8") for file in chosen]


def sources_of_commit(ref: str, folder: Path) -> list[str]:
    """Return the modules of a folder of this repository as they stood in a commit."""
    if not folder.resolve().is_relative_to(ROOT):
        raise BenchError(f"{folder} is in no commit: it is not in {ROOT}")
    place = folder.resolve().relative_to(ROOT).as_posix()
    command = ["git", "archive", "--format=tar", ref, "--", place]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        reason = done.stderr.decode("utf-8", "replace").strip()
        raise BenchError(f"git has no {place} of {ref}: {reason}")
    sources = []
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            file = archive.extractfile(member)
            path = PurePosixPath(member.name)
            if file is not None and is_counted(path.relative_to(place)):
                sources.append(file.read().decode("utf-8"))
    return sources


def package_folder(name: str) -> Path | None:
    """Return where a package is installed, if it is."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


# ---------------------------------------------------------------- the table


def share(part: int, whole: int, scale: float = 1.0) -> float:
    """Return a part of the whole; there may be no whole."""
    return scale * part / whole if whole else 0.0


def rows(counts: Counts) -> dict[str, str]:
    """Return each figure as it is shown, by its name."""
    characters = share(counts.characters, counts.full_lines)
    statements = share(counts.statements, counts.full_lines)
    blank = share(counts.blank_lines, counts.lines, 100)
    ternaries = share(counts.ternaries, counts.statements, 1000)
    comments = share(counts.comments, counts.lines, 100)
    return {
        "lines": f"{counts.lines:,}",
        "modules": f"{counts.modules}",
        "functions": f"{counts.functions}",
        f"functions over {LONG} lines": f"{counts.long_functions}",
        f"functions of complexity over {COMPLEX}": f"{counts.complex_functions}",
        "functions with a docstring": f"{counts.documented_functions}",
        "characters per non-blank line": f"{characters:.0f}",
        "statements per non-blank line": f"{statements:.2f}",
        "blank lines": f"{blank:.0f} %",
        "comments per 100 lines": f"{comments:.1f}",
        "parallel assignments": f"{counts.parallel_assignments}",
        "walruses": f"{counts.walruses}",
        "ternaries per 1,000 statements": f"{ternaries:.0f}",
        "lines with Any": f"{counts.lines_with_any}",
    }


def table(columns: Mapping[str, Counts]) -> list[str]:
    """Return the lines of a table with one column for each name."""
    figures = {name: rows(counts) for name, counts in columns.items()}
    labels = list(rows(Counts()))
    first = max(map(len, labels))
    widths = {name: max(len(name), 8) for name in figures}
    lines = [" " * first + "".join(f"  {name:>{widths[name]}}" for name in figures)]
    for label in labels:
        cells = [f"  {shown[label]:>{widths[name]}}" for name, shown in figures.items()]
        lines.append(f"{label:<{first}}{''.join(cells)}")
    return lines


# ---------------------------------------------------------------- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    """Say which options there are."""
    parser.add_argument(
        "folders", nargs="*", type=Path, metavar="FOLDER", help="what to count (_regsync)"
    )
    parser.add_argument("--ref", metavar="COMMIT", help="also as the folders stood in this commit")


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    folders: Sequence[Path] = options.folders or [PROGRAM]
    columns: dict[str, Counts] = {}
    for folder in folders:
        name = PROGRAM.name if folder == PROGRAM else folder.as_posix()
        columns[name] = count(sources_below(folder))
        if options.ref is not None:
            columns[f"{name} {options.ref}"] = count(sources_of_commit(options.ref, folder))

    absent = []
    for name in PEERS:
        place = package_folder(name)
        if place is None:
            absent.append(name)
        else:
            columns[name] = count(sources_below(place))
    print("\n".join(table(columns)))
    if absent:
        print(f"not installed here, hence not shown: {', '.join(absent)}")
    return 0
