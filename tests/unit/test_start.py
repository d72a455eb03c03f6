"""What a start of the built file imports: bytecode, each module once, and nothing that only another
command needs.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from conformance.images import Seed
from tests.builds import TREE, WHEELS, contents, copy_sources, python, run
from tests.ends import Start, document, tags
from tests.program import ROOT

# Which sources a start compiles, how often it opens the file, and where its modules come from.
STARTED = """
import json, sys
compiled, opened = [], []
sys.addaudithook(lambda event, args: event == "compile" and compiled.append(str(args[1])))
sys.addaudithook(lambda event, args: event == "open" and opened.append(str(args[0])))
before = set(sys.modules)
import anyio, anyio.abc, h11, regsync, truststore, yaml
anyio.create_task_group
specs = {name: getattr(sys.modules[name], "__spec__", None) for name in set(sys.modules) - before}
loaded = {name: str(spec.origin) for name, spec in specs.items() if spec}
print(json.dumps([compiled, opened, loaded]))
"""


def start(pyz: Path, *, tree: bool) -> tuple[list[str], list[str], dict[str, str]]:
    """Import the program's modules, through the tree as `__main__.py` does, or from the root."""
    code = f"import tree_importer{STARTED}" if tree else STARTED
    path = f"{pyz / TREE}:{pyz}" if tree else str(pyz)
    done = run(sys.executable, "-S", "-c", code, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    compiled, opened, loaded = json.loads(done.stdout)
    here = [[each for each in names if str(pyz) in each] for names in (compiled, opened)]
    return here[0], here[1], {name: path for name, path in loaded.items() if str(pyz) in path}


def test_bytecode_is_what_runs_and_each_module_is_read_once(pyz):
    """zipimport reads and unmarshals a module to name its file, and again to run it."""
    compiled, opened, loaded = start(pyz, tree=True)
    assert {"anyio.abc", "h11._connection", "regsync", "_regsync", "yaml.scanner"} <= set(loaded)
    assert {os.path.splitext(origin)[1] for origin in loaded.values()} == {".pyc"}
    # anyio parses the sources of two packages of its own to import the rest lazily.
    assert {name.partition(f"{TREE}/")[2].removesuffix("c") for name in compiled} == {
        "anyio/__init__.py",
        "anyio/abc/__init__.py",
    }
    assert "anyio._core._tasks" in loaded
    assert "anyio._core._fileio" not in loaded, "without its source anyio would import all of it"
    assert len(opened) == len(loaded) + len(compiled)

    compiled, _, loaded = start(pyz, tree=False)
    assert loaded["anyio"] == f"{pyz}/anyio/__init__.py"
    assert len(compiled) > 40


def test_modules_of_a_tree_have_the_names_that_zipimport_gives_them_and_their_sources(pyz):
    """Tracebacks of the module of that name show lines of source."""
    code = """
import h11, h11._state, json, regsync, traceback
told = [[m.__file__, m.__cached__, m.__spec__.origin, m.__spec__.submodule_search_locations,
         m.__package__] for m in (h11, h11._state, regsync)]
print(json.dumps(told), type(h11.__loader__).__name__)
try: h11.Request(method="GET", target="/", headers=[])
except Exception: traceback.print_exc()
"""
    path = f"{pyz / TREE}:{pyz}"
    ours, zipimports = (
        run(sys.executable, "-S", "-c", first + code, PYTHONPATH=path)
        for first in ("import tree_importer", "")
    )
    assert ours.stdout.replace("TreeImporter", "zipimporter") == zipimports.stdout
    assert "TreeImporter" in ours.stdout
    assert re.search(
        r'h11/_events\.py", line \d+, in __init__\n    raise LocalProtocolError', ours.stderr
    )


@pytest.mark.slow
def test_one_file_serves_several_pythons_each_with_its_tree(pyz, tmp_path):
    pythons = {TREE: sys.executable, "cp312": python("python3.12")}
    folder = copy_sources(tmp_path / "source")
    command = [sys.executable, folder / "tools" / "build_zipapp.py", "--cache", WHEELS]
    done = run(*command, *(f"--python={path}" for path in pythons.values()))
    assert done.returncode == 0, done.stderr
    built = folder / "dist" / "regsync-nofips.pyz"
    assert {name for name in contents(built) if "cp312/" not in name} == contents(pyz).keys()
    for tree, path in pythons.items():
        shown = run(path, "-v", built, "version")
        assert f"import 'regsync' # <zipimporter object \"{built / tree}/\">" in shown.stderr
        assert "properties" in json.loads(run(path, built, "schema").stdout), (
            "a file beside modules"
        )


# Half of the time of a sync in which nothing has changed is imports: each of these names costs from
# half a millisecond to fifteen. First what only other commands need, or those who use a registry of a
# cloud, a lock or an image layout; then what a run used to load of the standard library.
NEEDLESS_OURS = {
    *("app.access", "app.watch", "app.health", "app.pages"),
    *("auth.aws", "auth.azure", "auth.google"),
    *("layout", "audit", "sync.dry_run", "locking", "pins"),
}
NEEDLESS = {
    *("bz2", "ctypes", "decimal", "difflib", "email", "encodings.idna", "fractions", "hmac"),
    *("http", "lzma", "pathlib", "platform", "random", "shutil", "stringprep"),
}
# Runs the built file, which ends the process, in place of which it comes back here; then tells what is
# loaded, and how many threads were ever started.
LOADED = """
import json, os, runpy, sys
os._exit = sys.exit
threads = []
sys.addaudithook(lambda event, _: event == "_thread.start_new_thread" and threads.append(event))
pyz, sys.argv = sys.argv[1], sys.argv[1:]
try:
    runpy.run_path(pyz, run_name="__main__")
except SystemExit as end:
    status = end.code
print(json.dumps([status, sorted(sys.modules), len(threads)]))
"""

# People write blocks, programs JSON on one line.
BLOCK = """\
registries:
  source: {{url: "{source}", max_concurrent: 8}}
  target:
    url: {target}  # a comment
defaults: {{source: source, targets: [target], artifacts: {{enabled: false}}}}
mappings:
  - from: app
    tags: {{glob: [v1]}}
"""


@pytest.fixture
def ends(serve: Start) -> dict[str, str]:
    """Give a source and a target with the same tag."""
    source, target = serve(), serve()
    for server in (source, target):
        Seed(5).image(sizes=(1000,)).load_into(server.app, "app", tag="v1")
    return {"source": source.url, "target": target.url}


def loaded(pyz: Path, directory: Path, *words: str) -> tuple[set[str], int]:
    """Run a command; return the modules that were loaded, and how many threads were started."""
    environment = {"HOME": str(directory), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-I", "-S", "-c", LOADED, pyz, *words]
    done = run(*command, cwd=str(directory), **environment)
    assert done.returncode == 0, done.stderr
    status, modules, threads = json.loads(done.stdout.splitlines()[-1])
    assert status == 0, done.stderr
    return set(modules), threads


@pytest.mark.process
@pytest.mark.parametrize("is_block", [True, False])
def test_a_sync_that_changes_nothing_loads_what_it_needs_and_no_more(pyz, tmp_path, ends, is_block):
    for name in NEEDLESS_OURS:
        assert (ROOT / "_regsync" / f"{name.replace('.', '/')}.py").is_file(), name
    text = BLOCK.format(**ends) if is_block else document(ends, {"from": "app", "tags": tags("v1")})
    (tmp_path / "mirror.yaml").write_text(text)
    modules, threads = loaded(pyz, tmp_path, "sync", "-c", "mirror.yaml")
    assert modules & {f"_regsync.{name}" for name in NEEDLESS_OURS} == set()
    assert modules & NEEDLESS == set()
    assert threads == 0


@pytest.mark.process
def test_a_command_without_a_configuration_loads_no_yaml_and_version_nothing_of_a_run(
    pyz, tmp_path, ends
):
    modules, _ = loaded(pyz, tmp_path, "tags", f"{ends['source'].partition('://')[2]}/app")
    assert modules & {"yaml"} == set()
    modules, _ = loaded(pyz, tmp_path, "version")
    rooms = {name.split(".")[1] for name in modules if name.startswith("_regsync.")}
    assert rooms == {"app", "edge", "errors", "fips", "text"}
    assert modules & {"anyio", "asyncio", "h11", "ssl", "yaml", *NEEDLESS} == set()


def test_the_process_ends_when_its_command_has():
    """The interpreter's own ending takes all modules apart: a sixth of such a run."""
    code = "import atexit, regsync; atexit.register(print, 'ending'); print('held back'); regsync.main()"
    done = run(
        sys.executable, "-c", code, "version", cwd=str(ROOT), PYTHONPATH=os.pathsep.join(sys.path)
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["held", "regsync"]
