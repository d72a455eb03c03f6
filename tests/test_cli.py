"""The command line as a shell sees it: what is refused, exit statuses, the two streams, signals.

Exit statuses and error forms are those of docs/design.md section 2. No output ever holds a
traceback; every run here is looked at for one. What a rule of tags selects, and what a failure is
told as, have files of their own.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from conformance.http import Server
from conformance.images import Image, Seed
from tests.ends import ROOT, Ran, document, held, only, program, run_regsync, stopped_at, tags
from tests.program import Chosen, command_names, help_of

SECRET = "Xyzzy-0pen-Sesame"


def call(*arguments: str, **options: Any) -> Ran:
    """Run, and assert what holds for every run."""
    ran = run_regsync(*arguments, **options)
    assert "Traceback" not in ran.out + ran.err
    assert SECRET not in ran.out + ran.err
    return ran


def refused(*arguments: str, **options: Any) -> str:
    """Run what is status 3 and attempts nothing; return what is said, one error at least."""
    ran = call(*arguments, **options)
    assert ran.status == 3
    lines = ran.err.splitlines()
    assert lines[0].startswith("error: CONFIG_ERROR: ")
    assert all(line.startswith(("error: CONFIG_ERROR: ", "hint: ")) for line in lines)
    assert all(line.isprintable() for line in lines)
    if "--json" in arguments:
        assert ran.report["error"]["code"] == "CONFIG_ERROR"
    else:
        assert ran.out == ""
    return ran.err


def config_of(source: Server, target: Server, *names: str, **top: Any) -> str:
    return document(
        {"source": source, "target": target}, {"from": "app", "tags": tags(*names)}, **top
    )


@pytest.fixture
def image(source: Server) -> Image:
    return Seed(11).image().load_into(source.app, "app", "v1", "latest")


# Wrong command lines.

WRONG = [
    ([], "a command line begins with a command\nhint: see `regsync --help`"),
    (["snyc"], "a command line begins with a command, not 'snyc'"),
    (["x" * 5000], "regsync --help"),
    (["copy", "localhost/a:1"], "DST"),
    (["copy", "localhost/a:1", "localhost/b:1", SECRET], "unrecognized arguments: ***"),
    (["copy", "--al", "localhost/a:1", "localhost/b:1"], "unrecognized arguments: --al"),
    (["copy", "--platform", "linux", "localhost/a:1", "localhost/b:1"], "--platform"),
    (["copy", "\x1b[31m", "x"], "is not a repository"),
    (["copy", f"captain:{SECRET}@localhost/a:1", "localhost/b:1"], "user name or password"),
    (["copy", "localhost/b:1", "localhost/A:1"], "lower case"),
    (["copy", "localhost/b:1", f"localhost/a@sha256:{'0' * 64}"], "hint: give DST a tag"),
    (["sync"], "-c"),
    (["sync", "-c", ""], "a file without a name cannot be read"),
    (["version", "--log-format", "xml"], "xml"),
    (["validate", "a.yaml", "-c", "a.yaml"], "unrecognized arguments: -c"),
    (["watch", "-c", "-"], "watch needs a file, not -"),
    (["tags", "localhost/app:1.2"], "--glob"),
    (["tags", f"localhost/app@sha256:{'0' * 64}"], "--glob"),
    (["tags", "docker://localhost/app"], "docker://"),
    (["tags", "app", "--latest", "3"], "sort"),
    (["tags", "app", "--latest", "many"], "--latest"),
    (["tags", "app", "--glob", "a\nb*"], "--glob"),
    (["tags", "app", "--semver", "1 2"], "comma"),
    (["tags", "app", "--immutable-tags", "v*"], "--immutable-tags"),
    (["tags", "app", "-c", "/nowhere/x.yaml"], "/nowhere/x.yaml"),
]


@pytest.mark.parametrize(
    ("arguments", "words"), WRONG, ids=[" ".join(row[0])[:40] or "nothing" for row in WRONG]
)
def test_a_wrong_command_line_is_status_3_and_attempts_nothing(
    arguments: list[str], words: str
) -> None:
    assert words in refused(*arguments)
    refused(*arguments, "--json")


@pytest.mark.parametrize("spelled", [["--log-format", "json"], ["--log-format=json"]], ids=" ".join)
@pytest.mark.parametrize("rest", [["sync"], ["nonsense"], ["tags", "a:1"]], ids=" ".join)
def test_what_is_wrong_with_a_command_line_is_logged_as_it_asks(
    spelled: list[str], rest: list[str]
) -> None:
    for arguments in ([*spelled, *rest], [*rest, *spelled]):
        ran = call(*arguments)
        assert ran.status == 3
        assert json.loads(only(ran.err.splitlines()))["code"] == "CONFIG_ERROR"


@pytest.mark.process
@pytest.mark.parametrize("arguments", [[b"copy", b"\xff/a:1", b"b"], [b"sync", b"-c", b"/\xff"]])
def test_arguments_that_are_no_text_are_status_3(arguments: Sequence[Any]) -> None:
    refused(*arguments)


# Configurations.


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff\xfe\x00", b"mappings: [", b"[]", b"mappings: 1\nregistries: 2\n"],
    ids=["empty", "not utf-8", "not yaml", "a list", "wrong types"],
)
@pytest.mark.parametrize("words", ["sync -c", "validate", "copy a b -c"])
def test_a_configuration_that_is_nonsense_says_where(text: bytes, words: str) -> None:
    said = refused(*words.split(), "-", stdin=text)
    assert said.startswith("error: CONFIG_ERROR: standard input:1:")


@pytest.mark.parametrize(
    "words",
    [
        "validate -",
        "expand -",
        "sync --json -c -",
        "copy -c - {0}/x:1 {1}/x:1",
        "tags -c - {0}/x",
        "lock --lock x -c -",
        "audit -c -",
        "auth check -c -",
    ],
)
def test_one_problem_keeps_every_command_from_the_network(
    words: str, source: Server, target: Server
) -> None:
    text = document({"source": source, "target": target}, {"from": "x"}, {"form": "y"})
    said = refused(*words.format(source.address, target.address).split(), stdin=text)
    assert "standard input:1:" in said
    assert "write one of from," in said
    assert not source.journal.entries
    assert not target.journal.entries


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.symlink("loop", tmp_path / "loop")
    for name, reason in {
        "nothing.yaml": "nothing.yaml cannot be read: No such file",
        ".": "cannot be read: Is a directory",
        "file/c.yaml": "cannot be read: Not a directory",
        "loop": "cannot be read: ",
    }.items():
        for words in ("validate", "expand", "sync --json -c"):
            said = refused(*words.split(), str(tmp_path / name))
            assert reason in only(said.splitlines())


def test_a_name_with_line_breaks_makes_no_second_line(tmp_path: Path) -> None:
    path = tmp_path / "a\n\x1b[31merror: b.yaml"
    path.write_text("mappings: {}")
    only(refused("validate", str(path)).splitlines())


def test_an_endless_file_is_not_read_to_its_end() -> None:
    """It would not be UTF-8 either."""
    most = 32 << 20
    said = refused("validate", "-", stdin=b"\xff" * (most + 1))
    assert only(said.splitlines()).endswith(f"is larger than {most} bytes")


@pytest.mark.parametrize("words", ["validate", "sync -c", "sync --config"])
def test_a_valid_configuration_says_nothing(words: str) -> None:
    ran = call(*words.split(), "-", stdin="mappings: []\n")
    assert (ran.status, ran.out, ran.err) == (0, "", "")


def test_a_warning_of_the_configuration_names_its_place_in_each_command_and_q_hides_it() -> None:
    login = "auth_type: static_token, token: written-out"
    text = f"\nregistries: {{b: {{url: 'http://b.test', {login}}}}}\nmappings: []\n"
    for command in (("validate", "-"), ("sync", "-c", "-")):
        ran = call(*command, stdin=text)
        assert (ran.status, ran.out) == (0, "")
        assert only(ran.err.splitlines()).startswith("warning: standard input:2:")
        assert "written-out" not in ran.err
        assert call(*command, "-q", stdin=text).err == ""


def test_standard_input_keeps_state_in_an_absolute_directory_alone(
    image, source, target, tmp_path
) -> None:
    """Where state is kept the second run knows the tag: a HEAD at the source takes the place of the
    manifest.
    """
    for cache_dir, is_kept in ((str(tmp_path / "state"), True), ("state", False)):
        text = config_of(source, target, "v1", **{"global": {"cache_dir": cache_dir}})
        call("sync", "-c", "-", stdin=text)
        source.journal.clear()
        ran = call("sync", "-v", "-c", "-", stdin=text)
        assert ran.status == 0
        kind = "HEAD manifest" if is_kept else "GET manifest"
        assert source.journal.summary() == {kind: 1}
    assert (tmp_path / "state" / "state.db").exists()


# References. Every form of one is read in tests/unit/test_oci.py.


@pytest.mark.parametrize(
    ("source_end", "target_end", "tag"),
    [
        ("", "", "latest"),
        (":v1", "", "v1"),
        ("@{top}", "", None),
        ("@{top}", ":x", "x"),
        ("@{top}", "@{top}", None),
    ],
)
def test_the_targets_reference_defaults_to_the_sources(
    source, target, image, source_end, target_end, tag
) -> None:
    there, here = source_end.format(top=image.top), target_end.format(top=image.top)
    where = (f"{source.address}/app{there}", f"{target.address}/b{here}")
    ran = call("copy", "-v", "--no-artifacts", *where)
    assert ran.status == 0
    assert held(target, "b", image)
    assert target.app.tags("b") == ({tag: image.top} if tag else {})
    named = f"{source.address}/app{there or ':latest'}"
    pushed = f"{target.address}/b{here or there or ':latest'}"
    assert only(ran.out.splitlines()).startswith(f"synced {named} -> {pushed} (")


def test_a_target_digest_must_be_the_sources(source, target, image) -> None:
    for there in (":v1", f"@sha256:{'0' * 64}"):
        where = (f"{source.address}/app{there}", f"{target.address}/b@{image.top}")
        assert "hint: " in refused("copy", "--no-artifacts", *where)
    assert not source.journal.entries


# Exit statuses.


def fail(source: Server, status: int, *names: str) -> None:
    for name in names:
        source.app.faults.on("GET", "manifest", reference=name).status(status, "DENIED")


@pytest.mark.parametrize(
    ("denied", "missing", "status"),
    [
        pytest.param([], [], 0, id="nothing failed"),
        pytest.param([], ["v1"], 1, id="some failed"),
        pytest.param([], ["v1", "v2"], 2, id="all failed"),
        pytest.param(["v1", "v2"], [], 4, id="all were refused"),
        pytest.param(["v1"], ["v2"], 2, id="all failed, one of them refused"),
    ],
)
def test_exit_statuses_of_a_run(source, target, denied, missing, status) -> None:
    for tag in ("v1", "v2"):
        Seed(1).image().load_into(source.app, "app", tag=tag)
    fail(source, 403, *denied)
    fail(source, 404, *missing)
    ran = call("sync", "-c", "-", stdin=config_of(source, target, "v1", "v2"))
    assert ran.status == status
    failed = len(denied + missing)
    assert len(ran.failed) == failed
    lines = ran.out.splitlines()
    assert sum(line.startswith("synced ") for line in lines) == 2 - failed
    assert lines[-4] == f"Images: {2 - failed} synced, 0 skipped, {failed} failed"
    assert [line.partition(":")[0] for line in lines[-3:]] == ["Layers", "Data", "Time"]


async def test_a_defect_shows_no_traceback_unless_it_is_asked_for(world) -> None:
    async def broken(host: str, port: int) -> None:
        raise ZeroDivisionError("of our own")

    edge = world.edge()._replace(connect=broken)
    for more, is_shown in (((), False), (("-v",), False), (("-vv",), True)):
        ran = await world.run("copy", *more, "http://a.test/a", "http://b.test/b", edge=edge)
        assert ran.status == 2
        assert "error: INTERNAL_ERROR: ZeroDivisionError: of our own" in ran.err.splitlines()
        assert ("Traceback" in ran.err) is is_shown
    words = ("-vv", "--log-format", "json", "http://a.test/a", "http://b.test/b")
    told = map(json.loads, (await world.run("copy", *words, edge=edge)).err.splitlines())
    assert [each["event"] for each in told][-2:] == ["traceback", "run_failed"]


# Streams.


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ("sync", {"warning"}),
        ("sync -q", set()),
        ("sync -v", {"warning", "info", "debug"}),
        ("sync -vv", {"warning", "info", "debug", "trace"}),
    ],
)
def test_levels_of_the_log(source, target, words, kinds) -> None:
    Seed(12).index().load_into(source.app, "app", "multi")
    mapping = {"from": "app", "tags": tags("multi"), "platforms": ["linux/amd64"]}
    text = document({"source": source, "target": target}, mapping)
    ran = call(*words.split(), "--no-progress", "-c", "-", stdin=text)
    assert ran.status == 0
    assert {line.partition(":")[0] for line in ran.err.splitlines()} == kinds
    assert ran.out.startswith("synced ")


def test_quiet_still_says_what_failed(source, target) -> None:
    ran = call("copy", "-q", f"{source.address}/app:v1", f"{target.address}/app")
    assert ran.status == 2
    failed, hint = ran.err.splitlines()
    assert failed.startswith("failed ")
    assert f"`regsync tags {source.address}/app`" in hint
    where = (f"{source.address}/app:v1", f"{target.address}/app")
    ran = call("copy", "-q", "--log-format", "json", *where)
    entry = json.loads(only(ran.err.splitlines()))
    assert (entry["level"], entry["event"]) == ("error", "image_failed")


def test_each_request_is_a_line_at_vv_beside_one_json_document(source, target) -> None:
    """Of a body's PUT as of a look-up, with its status and without a query: what was asked, and
    nothing else.
    """
    Seed(5).image(sizes=(900, 200_000)).load_into(source.app, "app", "v1")
    where = [f"{source.address}/app:v1", f"{target.address}/app"]
    ran = call("copy", "--log-format", "json", "-vv", "--json", *where)
    assert only(ran.images)["status"] == "synced"
    told = [json.loads(line) for line in ran.err.splitlines()]
    assert all({"ts", "level", "event", "message"} <= entry.keys() for entry in told)
    lines = Counter(each["message"] for each in told if each["event"] == "request")
    asked = Counter(
        f"{entry.method} {server.url}{entry.target.partition('?')[0]} -> {entry.status}"
        for server in (source, target)
        for entry in server.journal.entries
    )
    assert lines == asked
    assert any(line.startswith("PUT") for line in asked)
    plain = call("copy", "-vv", *where)
    assert f"trace: GET {source.url}/v2/app/manifests/v1 -> 200" in plain.err


@pytest.mark.process
def test_what_is_printed_is_for_any_terminal_but_a_document_is_utf_8() -> None:
    text = "mappings: []\nglobal: {cache_dir: /tmp/übung}\n"
    plain = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    ran = call("expand", "-", stdin=text, env=plain)
    assert (ran.status, ran.err) == (0, "")
    assert "cache_dir: /tmp/übung" in ran.out
    # A static executable is told no encoding: it prints UTF-8.
    shown = "cü" if Chosen.is_static else "c\\xfc"
    assert shown in refused("validate", "-", stdin="mappings: [{from: cü}]", env=plain)


# Signals. When and in which order what happens is test_stop.py's.


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_signal_lets_what_is_under_way_end_and_says_what_is_left(
    mirror, number, status
) -> None:
    for tag in ("v1", "v2"):
        mirror.push(tag)
    mirror.source.app.faults.on("GET", "blob").delay(2)
    one = {"global": {"max_concurrent_transfers": 1}}
    mirror.write({"from": "app", "tags": tags("v1", "v2")}, **one)
    async with stopped_at(1.0, number=number):
        ran = await mirror.world.run("sync", "--json", "-c", str(mirror.file))
    assert (ran.status, ran.report["interrupted"], ran.statuses()) == (status, True, ["synced"])
    assert ran.totals["images"] == {"synced": 1, "skipped": 0, "failed": 0, "undone": 1}
    left = {"v1", "v2"} - {ran.images[0]["source"].rpartition(":")[2]}
    name = f"app:{only([*left])}"
    ends = {"source": f"source.test/{name}", "target": f"target.test/{name}"}
    assert ran.report["undone"][0].items() >= {**ends, "status": "undone"}.items()
    assert "interrupted, images left undone: 1\n" in ran.err
    assert len(mirror.target.app.tags("app")) == 1


async def test_an_interrupted_run_says_that_mappings_were_not_listed(mirror) -> None:
    mirror.source.app.faults.on("GET", "tag_list").stall()
    mirror.write(*({"from": "app", "to": name, "tags": tags("*")} for name in ("one", "two")))
    async with stopped_at(1.0):
        ran = await mirror.world.run("sync", "--json", "-c", str(mirror.file))
    assert ran.status == 143
    assert ran.totals["images"] == {"synced": 0, "skipped": 0, "failed": 0, "undone": 2}
    assert [(each["source"], each["target"]) for each in ran.report["undone"]] == [
        ("source.test/app:*", f"target.test/{name}:*") for name in ("one", "two")
    ]
    assert "interrupted, images left undone: 2\n" in ran.err


# Shards. Which mapping is in which is tests/unit/test_shards.py's.


def test_shards_together_copy_everything_once_and_an_empty_one_ends_well(
    source, target, tmp_path
) -> None:
    Seed(1).image().load_into(source.app, "a", "v1", "v2")
    places = {"one/b": "v1", "one/c": "v2", "two/a": "v1", "two/c": "v2"}
    mappings = [{"from": "a", "tags": tags(tag), "to": name} for name, tag in places.items()]
    path = tmp_path / "mirror.yaml"
    path.write_text(document({"source": source, "target": target}, *mappings))
    done: list[str] = []
    for number in range(3):
        ran = call("sync", "--json", "-v", "-c", str(path), "--shard", f"{number}/3")
        assert ran.status == 0, ran.err
        done += [each["target"].partition("/")[2] for each in ran.images]
        assert f"info: shard {number} of 3: {len(ran.images)} of 4 mappings" in ran.err
        assert (tmp_path / ".regsync" / f"shard-{number}-of-3").is_dir()
    assert sorted(done) == [f"{name}:{tag}" for name, tag in places.items()]
    assert len(ran.images) == 0, "no name is the last one's"
    index = {"JOB_COMPLETION_INDEX": "0"}
    again = call("sync", "--json", "-c", str(path), "--shard", "/3", env=index)
    assert again.statuses() == ["skipped"] * 2, "its state was found again"
    foretold = call("sync", "--dry-run", "--json", "-c", str(path), "--shard", "0/3")
    ends = [[each["target"] for each in ran.images] for ran in (foretold, again)]
    assert sorted(ends[0]) == sorted(ends[1])


# Help and schemas.


@pytest.mark.parametrize("command", command_names())
def test_help_shows_examples_and_the_exit_statuses_that_the_command_has(command: str) -> None:
    said = help_of(command)
    assert f"\n  regsync {command}" in said
    statuses = [line.split()[0] for line in said.partition("exit status:\n")[2].splitlines()]
    assert {"0", "3"} <= {*statuses}
    assert ("1" in statuses) is (command in ("copy", "sync", "lock", "audit"))
    assert ("4" in statuses) is (command in ("copy", "sync", "lock", "tags", "auth"))
    assert "Exit status" not in said, "all meanings are in one place"


# Output that nobody takes: closed streams, a full disk.

FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
POSIX = pytest.mark.skipif(os.name != "posix", reason="uses a POSIX shell")
LOST = "error: INTERNAL_ERROR: the output of this command cannot be written: "


def run(
    redirections: str, *arguments: str, stdout: Any = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """Run in a shell with redirections, buffered as for a user."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = ["sh", "-c", f'exec "$@" {redirections}', "sh", *program(), *arguments]
    pipe = subprocess.PIPE
    done = subprocess.run(
        command, stdout=stdout, stderr=pipe, text=True, env=environment, check=False
    )
    assert "Traceback" not in (done.stdout or "") + done.stderr
    assert "Exception ignored" not in done.stderr
    return done


@POSIX
@pytest.mark.parametrize(
    ("redirections", "words", "status", "told"),
    [
        (">&-", "version -v", 0, ""),
        ("2>&-", "nonsense", 3, ""),
        ("<&- >&- 2>&-", "sync -c -", 3, ""),
        ("<&-", "sync -c -", 3, "error: CONFIG_ERROR: standard input:1:1: the document is empty"),
        pytest.param(">/dev/full", "version", 2, LOST, marks=FULL),
        pytest.param("2>/dev/full", "sync --json -c /nonexistent", 3, "", marks=FULL),
        pytest.param(">/dev/full 2>&1", "sync --json -c /nonexistent", 3, "", marks=FULL),
    ],
)
def test_the_status_is_true_whoever_takes_the_output(
    redirections: str, words: str, status: int, told: str
) -> None:
    done = run(redirections, *words.split())
    assert done.returncode == status
    assert done.stderr.startswith(told)
    assert done.stderr.count("\n") == bool(told)


@FULL
@pytest.mark.in_process
def test_a_full_standard_output_is_said_in_one_line_beside_a_document() -> None:
    err = io.StringIO()
    full = open("/dev/full", "w")  # noqa: SIM115  to close it would fail
    with contextlib.redirect_stdout(full), contextlib.redirect_stderr(err):
        status = importlib.import_module("regsync").main(["version", "--json"])
    with contextlib.suppress(OSError):
        full.close()
    assert status == 2
    assert only(err.getvalue().splitlines()).startswith(LOST)


@POSIX
def test_no_socket_gets_the_number_of_a_closed_stream() -> None:
    start = """
import os, sys
import regsync
status = regsync.main(["version"])
assert os.open("/", os.O_RDONLY) > 2
sys.exit(status)
"""
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", start]
    assert subprocess.run(shell, cwd=ROOT, check=False).returncode == 0


@POSIX
def test_a_pipe_that_is_full_and_does_not_wait_is_no_defect() -> None:
    """Whoever shares it may have made it so, and its reader may be slow."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with open(reading, "rb"), open(writing, "wb", buffering=0) as pipe:
        while pipe.write(bytes(4096)) is not None:
            pass
        done = run("", "version", "--json", stdout=pipe)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(LOST)


@POSIX
@pytest.mark.process
def test_a_reader_that_left_is_no_error_to_tell(source, target, image) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as pipe:
        done = run("", "copy", f"{source.address}/app:v1", f"{target.address}/app", stdout=pipe)
    assert done.returncode != 0
    assert done.stderr == ""


@POSIX
@FULL
@pytest.mark.process
def test_a_full_standard_error_stops_no_copy(source, target, image) -> None:
    where = [f"{source.address}/app:v1", f"{target.address}/app:v1"]
    done = run("2>/dev/full", "copy", "-v", *where)
    assert target.app.tags("app") == {"v1": image.top}
    assert (done.returncode, done.stdout.count("synced")) == (0, 1)
