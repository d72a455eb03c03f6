"""Laws about size, state and words (docs/design.md section
11).

As in test_layering.py: `breaches` looks at one module's source.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = sorted((ROOT / "_regsync").rglob("*.py"))
# What runs under Python 2.7 too has its types in comments.
FOR_OLD_PYTHON = {ROOT / "tools" / "old_python.py"}
TOOLS = sorted(set((ROOT / "tools").glob("*.py")) - FOR_OLD_PYTHON)
SHAPED = [*PROGRAM, ROOT / "regsync.py", *TOOLS]

# Containers that are empty when made, or objects that exist to be changed.
# fmt: off
_CHANGING = {
    "Condition", "Counter", "Event", "Lock", "OrderedDict", "RLock", "Semaphore",
    "WeakKeyDictionary", "WeakSet", "WeakValueDictionary", "array", "bytearray", "count", "cycle",
    "defaultdict", "deque",
}
_CHANGES = {
    "add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "insert",
    "intersection_update", "pop", "popitem", "popleft", "remove", "reverse", "setdefault", "sort",
    "symmetric_difference_update", "update",
}
# fmt: on
# Words that say nothing about what a thing is.
_EMPTY_WORDS = {
    "common",
    "engine",
    "handler",
    "helper",
    "helpers",
    "manager",
    "process",
    "util",
    "utils",
}


def breaches(name: str, source: str) -> list[str]:
    """Return every breach of the laws in module `name`, as `LINE: what`."""
    tree = ast.parse(source)
    found = [*state_breaches(tree), *word_breaches(name, tree)]
    if name != "__init__":
        found += opening_breaches(name, tree)
    return [f"{line}: {text}" for line, text in sorted(set(found))]


def state_breaches(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Find what could change at module level: a constant is full, upper-case and never written to."""
    constants: set[str] = set()
    for node in module_level(tree):
        for target, value in assignments(node):
            constants.add(target)
            if changing(value):
                yield node.lineno, f"{target} is made to be changed"
            held = isinstance(value, (ast.Dict, ast.List, ast.Set, ast.Call)) and not is_alias(
                target, value
            )
            if held and re.search("[a-z]", target):
                yield (
                    node.lineno,
                    f"{target} is a value at module level and not named like a constant",
                )
    for inner in ast.walk(tree):
        if isinstance(inner, ast.Global):
            yield inner.lineno, "global is used"
        changed = changed_name(inner)
        if changed in constants and not is_local(changed, tree):
            yield getattr(inner, "lineno", 0), f"{changed} is changed"


def module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Walk statements that run at import and are not in a class or function."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        yield node
        pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def assignments(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, node.value
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
        yield node.target.id, node.value


def changing(value: ast.expr) -> bool:
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.List):
        return not value.elts
    if isinstance(value, ast.Call):
        made = ast.unparse(value.func).rpartition(".")[2]
        return made in _CHANGING or (
            made in {"dict", "list", "set"} and not value.args and not value.keywords
        )
    return False


def is_alias(target: str, value: ast.expr) -> bool:
    """Let type aliases and type variables pass, and `__all__`."""
    if target.startswith("__") and target.endswith("__"):
        return True
    made = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    return made.rpartition(".")[2] in {"TypeVar", "ParamSpec", "NewType", "namedtuple"}


def changed_name(node: ast.AST) -> str | None:
    """Return the plain name that a node changes in place, if it does."""
    place: ast.expr | None = None
    if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(
        node.ctx, (ast.Store, ast.Del)
    ):
        place = node.value
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _CHANGES
    ):
        place = node.func.value
    return place.id if isinstance(place, ast.Name) else None


def is_local(name: str, tree: ast.Module) -> bool:
    """Tell whether some function has a variable of its own by that name."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = [*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs]
            stored = [
                inner.id
                for inner in ast.walk(node)
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
            ]
            if name in stored or name in [argument.arg for argument in arguments]:
                return True
    return False


def word_breaches(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    named = [(1, name)]
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            named.append((node.lineno, node.name))
    for line, word in named:
        parts = {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", word)}
        for part in sorted(parts & _EMPTY_WORDS):
            yield line, f"{word} says {part}, which says nothing"


def opening_breaches(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Ask for what each module opens with; in the program the underscore says what `__all__` would."""
    if not ast.get_docstring(tree):
        yield 1, "no docstring says what the module owns"
    imported = [
        node
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    ]
    if not any(alias.name == "annotations" for node in imported for alias in node.names):
        yield 1, "no 'from __future__ import annotations'"
    listed = name in {path.stem for path in PROGRAM}
    if not listed and not any(
        target == "__all__" for node in tree.body for target, _ in assignments(node)
    ):
        yield 1, "no __all__"


@pytest.mark.parametrize("path", SHAPED, ids=lambda path: path.stem)
def test_module_keeps_its_shape(path: Path) -> None:
    assert breaches(path.stem, path.read_text(encoding="utf-8")) == []
