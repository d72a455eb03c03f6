"""Laws about who may use what (docs/design.md sections 1, 7 and
11).

`breaches` reads one module's syntax tree and returns what it does against the law.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = [
    path
    for path in sorted((ROOT / "_regsync").rglob("*.py"))
    if path.name != "__init__.py" or path.parent.name == "_regsync"
]

# The rooms from the ground up, as docs/design.md begins with them: a module imports from rooms above
# its own line, and from modules before it in its own line. `_regsync/` is the root.
DRAWING = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
ROOMS = DRAWING.partition("```rooms\n")[2].partition("```")[0].splitlines()


def modules_of(line: str) -> list[str]:
    """Return the modules of `net/  tls proxy`: `net.tls`, `net.proxy`."""
    room, *modules = line.split()
    prefix = "" if room == "_regsync/" else room.replace("/", ".")
    return [f"{prefix}{module}" for module in modules]


ORDER = ["__init__", *(module for line in ROOMS for module in modules_of(line))]


def module_name(path: Path) -> str:
    """Return `sync.run` for _regsync/sync/run.py."""
    return ".".join(path.relative_to(ROOT / "_regsync").with_suffix("").parts)


PURE = {
    *("text", "errors", "addresses", "providers", "semver", "tags"),
    *(
        name
        for name in ORDER
        if name.startswith(("oci.", "config.", "state.archive", "state.knowledge", "layout.index"))
    ),
    *("net.proxy", "registry.throttle", "registry.outage", "registry.redirects"),
    *(
        "sync.report",
        "sync.findings",
        "sync.mappings",
        "sync.retry",
        "sync.lockfile",
        "sync.artifact_checks",
        "sync.image",
        "sync.claims",
        "sync.election",
    ),
    *("app.report_file", "app.report_forms", "app.report_page"),
}
EDGES = {"files", "state.database", "state.seen", "state.sqlite", "sync.staging", "app.health"} | {
    name
    for name in ORDER
    if name.startswith(("net.", "auth.", "registry.", "layout.")) and name not in PURE
}
ABOVE = {name for name in ORDER if name.startswith(("sync.", "app."))} - PURE

# What the pure layers may have of the standard library: nothing with a clock, chance, files or
# threads. pkgutil reads the program's own documents, which lie beside its modules.
# fmt: off
PURE_LIBRARY = {
    "__future__", "abc", "base64", "binascii", "bisect", "codecs", "collections", "contextlib", "contextvars", "copy",
    "dataclasses", "datetime", "difflib", "email.utils", "enum", "functools", "heapq", "html", "ipaddress",
    "itertools", "json", "math", "numbers", "operator", "pkgutil", "posixpath", "re", "string", "struct", "textwrap",
    "types", "typing", "unicodedata", "urllib.parse", "zlib",
}
# fmt: on
IMPURE_CALLS = {
    "open",
    "print",
    "input",
    "now",
    "utcnow",
    "today",
    "getenv",
    "perf_counter",
    "monotonic",
}

CRYPTO = {"fips", "crypto"}

# Run-time packages, and a few standard ones that are edges: who may import them.
RESERVED: dict[str, set[str]] = {
    "anyio": EDGES | ABOVE,
    "h11": EDGES,
    "ssl": EDGES,
    "socket": EDGES,
    "sqlite3": {"state.database", "state.sqlite"},
    "truststore": {"net.tls"},
    "yaml": {"config.yaml", "app.cli"},
    "hashlib": CRYPTO,
    "hmac": CRYPTO,
    "secrets": CRYPTO,
    "_hashlib": CRYPTO,
    "_ssl": CRYPTO | {"app.version"},
    "_regsync_native": {"crypto"},  # in the static executable alone
    "ctypes": CRYPTO,
    "asyncio": set(),  # anyio is the one way to wait
    "importlib": set(),  # imports that this file cannot see
    "subprocess": set(),  # the service calls no other program
    "multiprocessing": set(),
    "concurrent": set(),
    "pty": set(),
    "webbrowser": set(),
}
THIRD_PARTY = {"anyio", "h11", "truststore", "yaml"}

PROGRAM_CALLS = {
    "system",
    "popen",
    "fork",
    "forkpty",
    "posix_spawn",
    "posix_spawnp",
    "startfile",
    "run_process",
    "open_process",
    "to_process",
    "to_interpreter",
    "create_subprocess_exec",
    "create_subprocess_shell",
    "__import__",
    "eval",
    "exec",
    "compile_command",
    *(f"exec{end}" for end in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
    *(f"spawn{end}" for end in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
}
POSIX_ONLY = {"fcntl", "grp", "posix", "pwd", "readline", "resource", "syslog", "termios", "tty"}
TASK_GROUPS = {
    *("net.streams", "net.http1", "net.pool"),
    *("sync.once", "sync.discovery", "sync.feed", "sync.schedule", "sync.run"),
    *("app.environment", "app.locking", "app.watch", "app.health"),
}
SCOPES = {
    "create_task_group",
    "move_on_after",
    "move_on_at",
    "fail_after",
    "fail_at",
    "CancelScope",
}


def breaches(name: str, source: str) -> list[str]:
    """Return every breach of the laws in module `name`, as `LINE: what`."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    found: list[tuple[int, str]] = []
    if name not in ORDER:
        found.append((1, f"{name} is in no room of tests/test_layering.py"))
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for imported in imports(node):
            found += [(line, text) for text in import_breaches(name, imported, node, parents)]
        found += [(line, text) for text in use_breaches(name, node, parents)]
    return [f"{line}: {text}" for line, text in sorted(set(found))]


def imports(node: ast.AST) -> Iterator[str]:
    """Give the absolute names that a statement imports; `from a import b` gives `a` and `a.b`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = ".".join(
            part for part in ("_regsync" * bool(node.level), node.module or "") if part
        )
        yield package
        yield from (f"{package}.{alias.name}" for alias in node.names)


def import_breaches(
    name: str, imported: str, node: ast.AST, parents: dict[ast.AST, ast.AST]
) -> Iterator[str]:
    top, _, rest = imported.partition(".")
    if top == "regsync":
        yield "the program imports its own face"
    elif top == "_regsync":
        if rest in ORDER and not may_import(name, rest):
            yield f"{name} may not import {rest}"
    elif top in RESERVED:
        if name not in RESERVED[top] and not for_types_only(node, parents):
            yield f"{name} may not import {top}"
    elif top in POSIX_ONLY:
        if not guarded(node, parents):
            yield f"{top} is imported without a guard for other systems"
    elif top not in sys.stdlib_module_names:
        yield f"{top} is not a run-time package"
    if (
        name in PURE
        and top not in {"_regsync", *THIRD_PARTY}
        and not any(imported == known or imported.startswith(f"{known}.") for known in PURE_LIBRARY)
        and not any(known.startswith(f"{imported}.") for known in PURE_LIBRARY)
    ):
        yield f"{name} is pure and may not import {imported}"


def may_import(name: str, other: str) -> bool:
    return other == "__init__" or (name in ORDER and ORDER.index(other) < ORDER.index(name))


def for_types_only(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Tell whether an import sits under `if TYPE_CHECKING:`."""
    above = ancestors(node, parents)
    return any(isinstance(up, ast.If) and "TYPE_CHECKING" in ast.unparse(up.test) for up in above)


def guarded(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Tell whether an import is tried (`except ImportError`) or made on a named platform only."""
    for up in ancestors(node, parents):
        if isinstance(up, ast.If) and (
            "platform" in ast.unparse(up.test) or "os.name" in ast.unparse(up.test)
        ):
            return True
        if isinstance(up, ast.Try) and any("Import" in caught(handler) for handler in up.handlers):
            return True
    return False


def ancestors(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while node in parents:
        node = parents[node]
        yield node


def caught(handler: ast.ExceptHandler) -> str:
    return ast.unparse(handler.type) if handler.type else ""


def use_breaches(name: str, node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[str]:
    """Give the breaches that one node is, apart from imports."""
    if isinstance(node, (ast.Attribute, ast.Name)):
        used = node.attr if isinstance(node, ast.Attribute) else node.id
        yield from word_breaches(name, used, node, parents)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield from word_breaches(name, alias.name, node, parents)
    elif (
        isinstance(node, ast.Constant) and node.value == "DELETE" and not is_compared(node, parents)
    ):
        functions = [
            up.name
            for up in ancestors(node, parents)
            if isinstance(up, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        if name != "registry.upload" or not any("upload" in function for function in functions):
            yield "DELETE is sent for upload sessions only, by registry, in a function that says upload"
    elif isinstance(node, ast.ExceptHandler):
        yield from except_breaches(name, node)
    elif (
        isinstance(node, (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await))
        and name in PURE
    ):
        yield f"{name} is pure and may not be async"
    if isinstance(node, ast.AsyncFunctionDef):
        yield from generator_breaches(node)


def word_breaches(
    name: str, used: str, node: ast.AST, parents: dict[ast.AST, ast.AST]
) -> Iterator[str]:
    on_object = isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Name)
    if used in PROGRAM_CALLS and not on_object:
        yield f"{used} runs another program or hidden code"
    if used == "create_task_group" and name not in TASK_GROUPS:
        yield f"{name} may not create task groups"
    if used in IMPURE_CALLS and name in PURE and is_called(node, parents):
        yield f"{name} is pure and may not call {used}"


def is_called(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    up = parents.get(node)
    return isinstance(up, ast.Call) and up.func is node


def is_compared(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Tell whether a constant is only looked at: what is compared is not sent."""
    return any(isinstance(up, ast.Compare) for up in ancestors(node, parents))


def except_breaches(name: str, handler: ast.ExceptHandler) -> Iterator[str]:
    names = {"BaseException"}
    if handler.type is not None:
        nodes = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        names = {ast.unparse(node) for node in nodes}
    last = handler.body[-1]
    reraised = isinstance(last, ast.Raise) and last.exc is None
    if "Exception" in names and name != "app.cli":
        yield "except Exception is for cli alone"
    if "BaseException" in names and not reraised:
        yield "what catches BaseException ends with a bare raise"


def generator_breaches(function: ast.AsyncFunctionDef) -> Iterator[str]:
    """An async generator that is left in the middle would close its scope in another task (L6)."""
    for node in own_nodes(function):
        if isinstance(node, (ast.With, ast.AsyncWith)):
            scopes = [
                call
                for item in node.items
                for call in ast.walk(item.context_expr)
                if isinstance(call, ast.Call)
                and ast.unparse(call.func).rpartition(".")[2] in SCOPES
            ]
            holds = scopes and any(
                isinstance(inner, (ast.Yield, ast.YieldFrom)) for inner in own_nodes(node)
            )
            managed = any("contextmanager" in ast.unparse(mark) for mark in function.decorator_list)
            if holds and not managed:
                yield f"{function.name} yields inside a cancel scope or task group"


def own_nodes(top: ast.AST) -> Iterator[ast.AST]:
    """Walk a function or block without the functions defined in it."""
    for child in ast.iter_child_nodes(top):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield child
            yield from own_nodes(child)


@pytest.mark.parametrize("path", PROGRAM, ids=module_name)
def test_module_keeps_to_its_layer(path: Path) -> None:
    assert breaches(module_name(path), path.read_text(encoding="utf-8")) == []


def test_table_names_each_module_once() -> None:
    assert len(ORDER) == len(set(ORDER))


def test_face_imports_nothing_when_imported_but_the_version() -> None:
    tree = ast.parse((ROOT / "regsync.py").read_text(encoding="utf-8"))
    at_once = {name for node in tree.body for name in imports(node)}
    ours = {name for name in at_once if name.partition(".")[0] == "_regsync"}
    assert ours - {"_regsync.errors", "_regsync.errors.RegsyncError"} == {
        "_regsync",
        "_regsync.__version__",
    }


def test_face_runs_the_gate_before_it_imports_anything_else() -> None:
    tree = ast.parse((ROOT / "regsync.py").read_text(encoding="utf-8"))
    main = next(
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"
    )
    first = next(node for node in ast.walk(main) if isinstance(node, (ast.Import, ast.ImportFrom)))
    assert "_regsync.fips" in imports(first)
