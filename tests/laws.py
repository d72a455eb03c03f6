"""Laws about how the source reads, each a small function over a syntax tree.

Owns: what each law forbids.
May not know: which files are held to them (see test_laws.py), what any module does.
Invariants: a law looks at one source alone and gives pairs of a line and what is wrong there.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from typing import TypeGuard

__all__ = ["breaches"]

Breach = tuple[int, str]
Function = (ast.FunctionDef, ast.AsyncFunctionDef)
Loop = (ast.For, ast.AsyncFor, ast.comprehension)

# Without `%`, which also writes values into text.
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Pow)

# Calls that give a truth value, beside those of functions named `is_...` and `has_...`.
TRUTHS = {
    *("bool", "isinstance", "issubclass", "callable", "hasattr", "any", "all"),
    *("startswith", "endswith", "isdigit", "isdecimal", "isalnum", "isalpha", "isascii"),
}

# Calls that give a sequence, or text in parts: an index is the way to ask for one of them.
SEQUENCES = {
    *(
        "list",
        "sorted",
        "tuple",
        "bytes",
        "split",
        "rsplit",
        "splitlines",
        "partition",
        "rpartition",
    ),
    *("findall", "groups", "most_common", "nlargest", "nsmallest"),
}


def breaches(source: str, name: str) -> list[str]:
    """Return every breach of the laws in a source, as `NAME:LINE: what`."""
    tree = ast.parse(source)
    found = {
        *parallel_assignments(tree),
        *truth_arithmetic(tree),
        *chosen_loops(tree),
        *hidden_walruses(tree),
        *nested_choices(tree),
        *numbered_records(tree),
        *shared_lines(tree, source),
    }
    return [f"{name}:{line}: {text}" for line, text in sorted(found)]


def parallel_assignments(tree: ast.Module) -> Iterator[Breach]:
    """Two things are assigned in two statements, unless they change places."""
    for node in nodes(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, (ast.Tuple, ast.List)):
            continue
        values = sorted(map(ast.unparse, node.value.elts))
        targets = [each for each in node.targets if isinstance(each, (ast.Tuple, ast.List))]
        for target in targets:
            if sorted(map(ast.unparse, target.elts)) != values:
                yield node.lineno, f"{ast.unparse(target)} are assigned in one statement"


def truth_arithmetic(tree: ast.Module) -> Iterator[Breach]:
    """A truth value is no number: it is not added, multiplied or negated, and it is no index."""
    for scope in scopes(tree):
        flags = truth_names(scope)
        for node in own_nodes(scope):
            operands: list[ast.expr] = []
            if isinstance(node, ast.BinOp) and isinstance(node.op, ARITHMETIC):
                operands = [node.left, node.right]
            elif isinstance(node, ast.AugAssign) and isinstance(node.op, ARITHMETIC):
                operands = [node.value]
            elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
                operands = [node.operand]
            elif isinstance(node, ast.Subscript) and not isinstance(node.value, ast.Dict):
                operands = [node.slice]
            elif isinstance(node, ast.Call) and called(node) == "sum" and node.args:
                summed = node.args[0]
                operands = [summed.elt] if isinstance(summed, ast.GeneratorExp) else []
            for operand in operands:
                if is_truth(operand, flags):
                    yield operand.lineno, f"{ast.unparse(operand)} is a truth value, not a number"


def chosen_loops(tree: ast.Module) -> Iterator[Breach]:
    """What a `for` runs over is not chosen by a conditional expression in its head."""
    for node in nodes(tree):
        if isinstance(node, Loop) and isinstance(node.iter, ast.IfExp):
            yield node.iter.lineno, f"a for runs over a choice: {ast.unparse(node.iter)}"


def hidden_walruses(tree: ast.Module) -> Iterator[Breach]:
    """A walrus stands in the test of an `if` or `while`, below no more than and, or, not and
    comparisons.
    """
    open_walruses = {
        walrus
        for node in nodes(tree)
        if isinstance(node, (ast.If, ast.While))
        for walrus in walruses_of_test(node.test)
    }
    for node in nodes(tree):
        if isinstance(node, ast.NamedExpr) and node not in open_walruses:
            yield node.lineno, f"{ast.unparse(node.target)} is assigned inside an expression"


def nested_choices(tree: ast.Module) -> Iterator[Breach]:
    """No conditional expression is part of another one."""
    for node in nodes(tree):
        if isinstance(node, ast.IfExp):
            inner = [part for part in ast.walk(node) if isinstance(part, ast.IfExp)]
            if len(inner) > 1:
                yield node.lineno, f"a choice within a choice: {ast.unparse(node)}"


def numbered_records(tree: ast.Module) -> Iterator[Breach]:
    """The fields of a record have names: an index is for one of many of the same kind."""
    records = record_names(tree)
    for node in nodes(tree):
        if is_numbered(node) and is_record(node.value, records):
            yield node.lineno, f"a field of a record by number: {ast.unparse(node)}"
        elif isinstance(node, ast.Lambda):
            own = {argument.arg for argument in node.args.args}
            for part in ast.walk(node.body):
                if is_numbered(part) and isinstance(part.value, ast.Name) and part.value.id in own:
                    yield part.lineno, f"a field of a record by number: {ast.unparse(part)}"


def shared_lines(tree: ast.Module, source: str) -> Iterator[Breach]:
    """Each statement has a line of its own, that of a one-line block too; a bare `...` may share
    one.
    """
    lines = source.splitlines()
    for node in nodes(tree):
        if not isinstance(node, ast.stmt) or is_ellipsis(node):
            continue
        before = lines[node.lineno - 1].encode()[: node.col_offset]
        if before.strip():
            yield node.lineno, f"a second statement on a line: {ast.unparse(node).splitlines()[0]}"


# What the laws look at.


@functools.lru_cache(maxsize=1)
def nodes(tree: ast.Module) -> list[ast.AST]:
    """Return all nodes of a source: most laws look at each."""
    return list(ast.walk(tree))


def scopes(tree: ast.Module) -> Iterator[ast.AST]:
    """Give the module and every function in it."""
    yield tree
    yield from (node for node in nodes(tree) if isinstance(node, Function))


@functools.lru_cache(maxsize=1)
def own_nodes(scope: ast.AST) -> list[ast.AST]:
    """Return the nodes of a scope without those of the functions in it."""
    found: list[ast.AST] = []
    unvisited = [scope]
    while unvisited:
        children = list(ast.iter_child_nodes(unvisited.pop()))
        found += children
        unvisited += [child for child in children if not isinstance(child, Function)]
    return found


def arguments(scope: ast.AST) -> list[ast.arg]:
    """Return the arguments of a function; a module has none."""
    if not isinstance(scope, Function):
        return []
    return [*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs]


def called(node: ast.Call) -> str:
    """Return the last word of what is called."""
    return ast.unparse(node.func).rpartition(".")[2]


def is_truth(node: ast.expr, flags: Iterable[str]) -> bool:
    """Ask whether an expression can only be True or False."""
    if isinstance(node, ast.Compare):
        return True
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.BoolOp):
        return all(is_truth(value, flags) for value in node.values)
    if isinstance(node, ast.Call):
        return called(node) in TRUTHS or called(node).startswith(("is_", "has_"))
    if isinstance(node, ast.Attribute):
        return node.attr.startswith(("is_", "has_"))
    return isinstance(node, ast.Name) and node.id in flags


def truth_names(scope: ast.AST) -> set[str]:
    """Return the names of a scope that are annotated as bool, or only ever bound to truth values."""
    flags = {
        argument.arg
        for argument in arguments(scope)
        if argument.annotation is not None and ast.unparse(argument.annotation) == "bool"
    }
    others: set[str] = set()
    bound: set[ast.Name] = set()
    for node in own_nodes(scope):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {target for target in targets if isinstance(target, ast.Name)}
            bound |= names
            (flags if is_truth(node.value, ()) else others).update(name.id for name in names)
    for node in own_nodes(scope):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in bound:
            others.add(node.id)
    return flags - others


def walruses_of_test(test: ast.expr) -> Iterator[ast.NamedExpr]:
    """Give the assignments of a test that are made in plain sight."""
    if isinstance(test, ast.NamedExpr):
        yield test
    elif isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from walruses_of_test(value)
    elif isinstance(test, ast.UnaryOp):
        yield from walruses_of_test(test.operand)
    elif isinstance(test, ast.Compare):
        for value in (test.left, *test.comparators):
            yield from walruses_of_test(value)


def is_ellipsis(node: ast.stmt) -> bool:
    """Ask whether a statement is the bare `...` of a declaration."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and node.value.value is Ellipsis
    )


def is_numbered(node: ast.AST) -> TypeGuard[ast.Subscript]:
    """Ask whether an expression is something by a number, counted from the beginning."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Constant):
        return False
    return type(node.slice.value) is int


def is_record(node: ast.expr, records: Iterable[str]) -> bool:
    """Ask whether an expression is a tuple of fixed fields, as far as one source can tell."""
    if isinstance(node, ast.Await):
        return is_record(node.value, records)
    if isinstance(node, ast.Call):
        return called(node) not in SEQUENCES
    if isinstance(node, ast.Attribute):
        return node.attr in records
    return isinstance(node, ast.Name) and node.id in records


def record_names(tree: ast.Module) -> set[str]:
    """Return the names of a source that are annotated as a tuple of fixed fields or as one of its
    own NamedTuples, or are bound to what one of its functions gives that is annotated so.
    """
    kinds = {
        node.name
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases)
    }
    names: set[str] = set()
    givers: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.arg) and holds_record(node.annotation, kinds):
            names.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and holds_record(node.annotation, kinds):
            names.add(ast.unparse(node.target).rpartition(".")[2])
        elif isinstance(node, Function) and holds_record(node.returns, kinds):
            is_property = "property" in map(ast.unparse, node.decorator_list)
            (names if is_property else givers).add(node.name)
    for node in nodes(tree):
        value = getattr(node, "value", None)
        if isinstance(value, ast.Await):
            value = value.value
        if isinstance(node, ast.Assign) and isinstance(value, ast.Call) and called(value) in givers:
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def holds_record(annotation: ast.expr | None, kinds: Iterable[str]) -> bool:
    """Ask whether an annotation means a tuple of fixed fields, or such a one or something else."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return holds_record(ast.parse(annotation.value, mode="eval").body, kinds)
    if isinstance(annotation, ast.BinOp):
        return holds_record(annotation.left, kinds) or holds_record(annotation.right, kinds)
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "tuple":
        parts = annotation.slice
        return isinstance(parts, ast.Tuple) and ast.unparse(parts.elts[-1]) != "..."
    return isinstance(annotation, ast.Name) and annotation.id in kinds
