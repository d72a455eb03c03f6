"""The command line as a shell sees it: exit statuses, the two streams, signals, pipes.

Exit statuses and error forms are those of docs/design.md section 2. No output ever holds a
traceback; every run here is looked at for one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from conformance.content.images import Image, Seed
from conformance.messages import Answer, Request, Response, error
from conformance.registry.tokens import BasicAuth
from conformance.server.sockets import Server
from tests.ends import (
    ROOT,
    Ran,
    copy,
    document,
    held,
    only,
    program,
    run_regsync,
    started,
    sync,
    tags,
)

SECRET = "Xyzzy-0pen-Sesame"


def call(*arguments: str, **options: Any) -> Ran:
    """Run, and assert what holds for every run."""
    ran = run_regsync(*arguments, **options)
    assert "Traceback" not in ran.out + ran.err
    assert SECRET not in ran.out + ran.err
    return ran


@pytest.fixture
def image(source: Server) -> Image:
    return Seed(11).image().load_into(source.app, "app", "v1", "latest")


# Wrong command lines.


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([], id="nothing"),
        pytest.param(["mirror"], id="unknown command"),
        pytest.param(["copy"], id="no references"),
        pytest.param(["copy", "localhost/a:1"], id="one reference"),
        pytest.param(["copy", "localhost/a:1", "localhost/b:1", "c"], id="three references"),
        pytest.param(["copy", "--al", "localhost/a:1", "localhost/b:1"], id="unknown option"),
        pytest.param(
            ["copy", "--platform", "linux", "localhost/a:1", "localhost/b:1"], id="platform"
        ),
        pytest.param(["sync"], id="sync without a file"),
        pytest.param(["sync", "-c"], id="option without its value"),
        pytest.param(["--log-format", "xml", "version"], id="unknown log format"),
        pytest.param(["validate"], id="validate nothing"),
        pytest.param(["copy", "\x1b[31m", "x"], id="control characters"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_a_wrong_command_line_is_status_3_and_attempts_nothing(arguments, as_json):
    ran = call(*arguments, *(["--json"] if as_json else []))
    assert ran.status == 3
    assert ran.err.startswith("error: CONFIG_ERROR: ")
    assert "\x1b" not in ran.out + ran.err
    assert all(line.startswith(("error: ", "hint: ")) for line in ran.err.splitlines())
    if as_json:
        assert ran.report["error"]["code"] == "CONFIG_ERROR"
        assert ran.report["problems"] == []
    else:
        assert ran.out == ""


@pytest.mark.parametrize(
    "reference",
    [
        "",
        "/",
        "docker://localhost/a:1",
        "https://a:1",
        "localhost:5000",
        "localhost:5000/",
        "localhost:99999/a",
        "localhost/A:1",
        "localhost/a//b:1",
        "localhost/a:b:c",
        "localhost/a:-x",
        "localhost/a:" + "x" * 129,
        "localhost/a@sha256:12",
        "localhost/a@md5:" + "0" * 32,
        "localhost/a:1@sha256:" + "0" * 64,
        f"captain:{SECRET}@localhost/a:1",
        "localhost/a b",
        "localhost/../etc:1",
        "::1/a:1",
    ],
)
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_reference_of_a_wrong_form_is_said_with_its_place(reference, side):
    pair = (reference, "localhost/b:1") if side == "source" else ("localhost/b:1", reference)
    ran = call("copy", "--no-artifacts", *pair)
    assert ran.status == 3
    assert ran.err.startswith("error: CONFIG_ERROR: ")
    assert ran.out == ""


# Configurations.


def test_a_configuration_that_is_not_there_is_status_3(tmp_path):
    for name in ("missing.yaml", ".", "a\nb"):
        ran = call("sync", "-c", str(tmp_path / name), "--json")
        assert ran.status == 3
        assert "CONFIG_ERROR" in only(ran.err.splitlines())
        assert ran.report["error"]["code"] == "CONFIG_ERROR"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_a_configuration_that_may_not_be_read_is_status_3(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("mappings: []")
    path.chmod(0)
    assert call("sync", "-c", str(path)).status == 3


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe\x00",
        b"mappings: [",
        b"[]",
        b"mappings: 1\nregistries: 2\n",
        b"a: &a [*a]",
        b"\x00",
    ],
    ids=["empty", "not utf-8", "not yaml", "a list", "wrong types", "a knot", "nul"],
)
@pytest.mark.parametrize(
    "command", [["sync", "-c", "-"], ["validate", "-"]], ids=["sync", "validate"]
)
def test_a_configuration_that_is_nonsense_says_where(text, command):
    ran = call(*command, stdin=text)
    assert ran.status == 3
    assert ran.out == ""
    assert all(
        line.startswith(("error: CONFIG_ERROR: ", "hint: ")) for line in ran.err.splitlines()
    )
    assert "standard input" in ran.err


def test_problems_come_in_one_json_document_with_their_places():
    ran = call(
        "sync", "--json", "-c", "-", stdin="mapings: []\nregistries: {a: {url: 'ftp://x'}}\n"
    )
    assert ran.status == 3
    assert len(ran.report["problems"]) >= 2
    assert {problem["line"] for problem in ran.report["problems"]} >= {1, 2}
    assert len(ran.err.splitlines()) >= 2


def test_standard_input_keeps_state_in_an_absolute_directory_alone(image, source, target, tmp_path):
    """Where state is kept the second run knows the tag: a HEAD at the source takes the place of the
    manifest. Where none is kept, that is said once, to whom asks for it.
    """
    mapping = {"from": "app", "tags": {"glob": "v1"}}
    for cache_dir, is_kept in ((str(tmp_path / "state"), True), ("state", False)):
        top = {"global": {"cache_dir": cache_dir}}
        text = document({"source": source, "target": target}, mapping, **top)
        assert "nothing is kept" not in call("sync", "-c", "-", stdin=text).err
        source.journal.clear()
        ran = call("sync", "-v", "-c", "-", stdin=text)
        assert ran.status == 0
        assert source.journal.summary()["HEAD manifest" if is_kept else "GET manifest"] == 1
        assert len(source.journal.summary()) == 1
        said = [line for line in ran.err.splitlines() if "nothing is kept" in line]
        assert len(said) == (0 if is_kept else 1)
        assert all(line.startswith("info: ") for line in said)
    assert (tmp_path / "state" / "state.db").exists()


def test_a_copy_without_a_configuration_says_that_nothing_is_kept(image, source, target):
    pair = (f"{source.address}/app:v1", f"{target.address}/app")
    assert call("copy", "-v", *pair).err.count("nothing is kept") == 1


def test_a_valid_configuration_says_nothing(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("mappings: []\n")
    for arguments in (
        ["validate", str(path)],
        ["sync", "-c", str(path)],
        ["sync", "--config", str(path)],
    ):
        ran = call(*arguments)
        assert (ran.status, ran.out, ran.err) == (0, "", "")


def test_a_warning_of_the_configuration_names_its_place_in_each_command():
    text = """
registries: {a: {url: a.test}, b: {url: "http://b.test", auth_type: static_token, token: written-out}}
mappings: []
"""
    for command in (("validate", "-"), ("sync", "-c", "-")):
        ran = call(*command, stdin=text)
        assert (ran.status, ran.out) == (0, "")
        assert ran.err.startswith("warning: standard input:2:")
        assert "written-out" not in ran.err


def test_registries_of_a_configuration_are_found_by_host(serve, image, source):
    target = serve(auth=BasicAuth({"captain": SECRET}))
    login = {"auth_type": "basic", "credentials": {"username": "captain", "password": SECRET}}
    text = json.dumps({"registries": {"t": {"url": target.url, **login}}, "mappings": []})
    where = (f"{source.address}/app:v1", f"{target.address}/app:v1")
    assert call("copy", "--no-artifacts", "-c", "-", *where, stdin=text).status == 0
    assert held(target, "app", image)


# References that mean something.


def test_no_tag_means_latest_and_is_said_when_asked(source, target, image):
    ran = call("copy", "-v", "--no-artifacts", f"{source.address}/app", f"{target.address}/b")
    assert ran.status == 0
    assert only([line for line in ran.err.splitlines() if "latest" in line]).startswith("info: ")
    assert target.app.tags("b") == {"latest": image.top}


def test_the_targets_tag_defaults_to_the_sources(source, target, image):
    ran = call("copy", "--no-artifacts", f"{source.address}/app:v1", f"{target.address}/b")
    assert target.app.tags("b") == {"v1": image.top}
    line = only(ran.out.splitlines())
    assert line.startswith(f"synced {source.address}/app:v1 -> {target.address}/b:v1 (")


def test_a_digest_is_pushed_by_digest_or_under_a_tag(source, target, image):
    there = f"{source.address}/app@{image.top}"
    assert call("copy", "--no-artifacts", there, f"{target.address}/b").status == 0
    assert held(target, "b", image)
    assert target.app.tags("b") == {}
    assert call("copy", "--no-artifacts", there, f"{target.address}/b:x").status == 0
    assert target.app.tags("b") == {"x": image.top}
    again = call("copy", "--no-artifacts", there, f"{target.address}/b@{image.top}")
    assert (again.status, again.out) == (0, "")


def test_a_target_digest_must_be_the_sources(source, target, image):
    for there in (f"{source.address}/app:v1", f"{source.address}/app@sha256:{'0' * 64}"):
        ran = call("copy", "--no-artifacts", there, f"{target.address}/b@{image.top}")
        assert ran.status == 3
        assert "hint: " in ran.err
    assert not source.journal.entries


# Exit statuses.


def refuse(server: Server, status: int, *references: str) -> None:
    def intercept(request: Request) -> Answer | None:
        return error(status, "DENIED", "no") if request.reference in references else None

    server.app.intercept = intercept


@pytest.mark.parametrize(
    ("refusals", "status"),
    [
        pytest.param({}, 0, id="nothing failed"),
        pytest.param({404: ["v1"]}, 1, id="some failed"),
        pytest.param({404: ["v1", "v2"]}, 2, id="all failed"),
        pytest.param({403: ["v1"]}, 1, id="some were refused"),
        pytest.param({403: ["v1", "v2"]}, 4, id="all were refused"),
    ],
)
def test_exit_statuses_of_a_run(source, target, refusals, status):
    for tag in ("v1", "v2"):
        Seed(1).image().load_into(source.app, "app", tag=tag)
    for code, names in refusals.items():
        refuse(source, code, *names)
    text = document({"source": source, "target": target}, {"from": "app", "tags": tags("v1", "v2")})
    ran = call("sync", "-c", "-", stdin=text)
    assert ran.status == status
    failed = sum(map(len, refusals.values()))
    assert len(ran.failed) == failed
    lines = ran.out.splitlines()
    assert sum(line.startswith("synced ") for line in lines) == 2 - failed
    assert f"Images: {2 - failed} synced, 0 skipped, {failed} failed" in lines
    assert [line.partition(":")[0] for line in lines[-4:]] == ["Images", "Layers", "Data", "Time"]


def test_different_failures_of_all_images_are_status_2(source, target):
    refuse(source, 403, "v1")
    ran = sync({"source": source, "target": target}, {"from": "app", "tags": tags("v1", "v2")})
    assert ran.status == 2
    assert {each["error"]["code"] for each in ran.images} == {"AUTH_ERROR", "SOURCE_ERROR"}


# Streams.


def test_json_is_one_document_however_much_is_logged(source, target, image):
    ran = call(
        "-vv",
        "copy",
        "--json",
        "--no-artifacts",
        f"{source.address}/app:v1",
        f"{target.address}/app",
    )
    assert ran.report["images"][0]["status"] == "synced"
    assert sum(line.startswith("trace: ") for line in ran.err.splitlines()) >= 8
    assert f"GET {source.url}/v2/app/manifests/v1 -> 200" in ran.err


@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        ([], {"warning"}),
        (["-q"], set()),
        (["-v"], {"warning", "info", "debug"}),
        (["-v", "-v"], {"warning", "info", "debug", "trace"}),
        (["-vv"], {"warning", "info", "debug", "trace"}),
    ],
    ids=lambda words: " ".join(sorted(words)),
)
@pytest.mark.parametrize("place", ["before", "after"])
def test_levels_of_the_log(source, target, image, flags, kinds, place):
    Seed(12).index().load_into(source.app, "app", "multi")
    mapping = {"from": "app", "tags": tags("multi"), "platforms": ["linux/amd64"]}
    text = document({"source": source, "target": target}, mapping)
    command = ["sync", "--no-progress", "-c", "-"]
    ran = call(*([*flags, *command] if place == "before" else [*command, *flags]), stdin=text)
    assert ran.status == 0
    assert {line.partition(":")[0] for line in ran.err.splitlines()} == kinds
    assert ran.out.startswith("synced ")


def test_quiet_still_says_what_failed(source, target):
    ran = call("-q", "copy", f"{source.address}/app:v1", f"{target.address}/app")
    assert ran.status == 2
    failed, hint = ran.err.splitlines()
    assert failed.startswith("failed ")
    assert f"`regsync tags {source.address}/app`" in hint
    assert call("-q", "copy", "x").err.startswith("error: ")


def test_log_lines_can_be_json(source, target):
    ran = call(
        "--log-format", "json", "-vv", "copy", f"{source.address}/app:v1", f"{target.address}/app"
    )
    entries = [json.loads(line) for line in ran.err.splitlines()]
    assert all({"ts", "level", "event", "message"} <= entry.keys() for entry in entries)
    assert [entry["event"] for entry in entries if entry["level"] == "error"] == ["image_failed"]
    wrong = call("--log-format", "json", "sync", "-c", "/nowhere")
    assert only([json.loads(line) for line in wrong.err.splitlines()])["code"] == "CONFIG_ERROR"


def test_failures_are_part_of_the_json_report(source, target):
    ran = copy(source, target)
    found = only(ran.images)
    assert found["error"] == {
        "code": "SOURCE_ERROR",
        "message": found["error"]["message"],
        "hint": found["error"]["hint"],
        "status": 404,
        "side": "source",
        "retries": 0,
    }
    assert ran.totals["images"] == {"synced": 0, "skipped": 0, "failed": 1}
    assert ran.totals["requests"][source.address] == {"manifest_get": 1}


def test_version_names_program_and_interpreter():
    ran = call("version", "--json")
    assert (ran.status, ran.err) == (0, "")
    assert isinstance(ran.report, dict)


# Processes: pipes and signals.


class Stall:
    """Holds every answer that `which` chooses until `go`; `came` says that one is held."""

    def __init__(self, server: Server, **which: str) -> None:
        self.came = threading.Event()
        self._go, self._which = threading.Event(), which
        server.app.intercept = self._intercept

    async def _intercept(self, request: Request) -> Answer | None:
        if all(getattr(request, name) == value for name, value in self._which.items()):
            self.came.set()
            await anyio.to_thread.run_sync(self._go.wait, 60)
        return None

    def go(self) -> None:
        self._go.set()


@pytest.fixture
def stalled(source: Server) -> Iterator[Stall]:
    stall = Stall(source, method="GET", kind="blob")
    yield stall
    stall.go()


def until(process: subprocess.Popen[str], words: str) -> None:
    """Read standard error until a line has `words`."""
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return
    pytest.fail(f"the process ended without saying {words!r}")


def two_images(source: Server, target: Server, path: Path) -> list[str]:
    """Write a sync of two images, one after the other; return the arguments."""
    for tag in ("v1", "v2"):
        Seed(len(tag)).image().load_into(source.app, "app", tag=tag)
    Seed(9).image().load_into(source.app, "app", tag="v2")
    path.write_text(
        document(
            {"source": source, "target": target},
            {"from": "app", "tags": tags("v1", "v2")},
            **{"global": {"max_concurrent_transfers": 1}},
        )
    )
    return ["sync", "--json", "-c", str(path)]


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=str
)
def test_a_signal_lets_what_is_under_way_end_and_begins_nothing_more(
    source, target, stalled, tmp_path, number, status
):
    with started(*two_images(source, target, tmp_path / "x.yaml")) as process:
        assert stalled.came.wait(30)
        process.send_signal(number)
        until(process, "stopping")
        stalled.go()
        out, err = process.communicate(timeout=30)
    assert process.returncode == status
    report = json.loads(out)
    assert report["interrupted"] is True
    assert [each["status"] for each in report["images"]] == ["synced"]
    assert report["totals"]["images"] == {"synced": 1, "skipped": 0, "failed": 0, "undone": 1}
    copied = report["images"][0]["source"].rpartition(":")[2]
    left = {"v1", "v2"} - {copied}
    names = {"source": f"{source.address}/app:{left.pop()}"}
    names["target"] = names["source"].replace(source.address, target.address)
    assert report["undone"] == [{**names, "status": "undone"}]
    assert "interrupted, images left undone: 1\n" in err
    assert len(target.app.tags("app")) == 1
    assert "Traceback" not in err
    target.journal.check()


@pytest.mark.process
def test_an_interrupted_run_says_that_mappings_were_not_listed(source, target, tmp_path):
    stall = Stall(source, method="GET", kind="tag_list")
    arguments = two_images(source, target, tmp_path / "x.yaml")
    both = [{"from": "app", "to": name, "tags": tags("*")} for name in ("one", "two")]
    (tmp_path / "x.yaml").write_text(document({"source": source, "target": target}, *both))
    with started(*arguments) as process:
        assert stall.came.wait(30)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        stall.go()
    assert process.returncode == 143
    assert json.loads(out)["totals"]["images"] == {"synced": 0, "skipped": 0, "failed": 0}
    assert [(each["source"], each["target"]) for each in json.loads(out)["undone"]] == [
        (f"{source.address}/app:*", f"{target.address}/{name}:*") for name in ("one", "two")
    ]
    words = "images left undone: 0; mappings not listed: 2"
    assert f"interrupted, {words}\n" in err


@pytest.mark.process
def test_a_signal_when_all_is_under_way_leaves_nothing_undone(source, target, image, stalled):
    where = [f"{source.address}/app:v1", f"{target.address}/app"]
    with started("copy", "--no-artifacts", *where) as process:
        assert stalled.came.wait(30)
        process.send_signal(signal.SIGTERM)
        until(process, "stopping")
        stalled.go()
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("synced ")
    assert held(target, "app", image)


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=str
)
def test_a_second_signal_ends_at_once(source, target, stalled, tmp_path, number, status):
    with started(*two_images(source, target, tmp_path / "x.yaml")) as process:
        assert stalled.came.wait(30)
        process.send_signal(number)
        until(process, "stopping")
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert process.returncode == status
    assert json.loads(out)["interrupted"] is True
    assert not target.app.tags("app")
    assert "Traceback" not in err


@pytest.mark.process
def test_what_does_not_end_in_time_after_a_signal_is_left(source, target, stalled, tmp_path):
    shorter = "import sys, regsync, _regsync.sync.run as run; run.DRAIN_SECONDS = 0.1; sys.exit(regsync.main())"
    command = [sys.executable, "-c", shorter, *two_images(source, target, tmp_path / "x.yaml")]
    pipes: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "cwd": ROOT,
    }
    with subprocess.Popen(command, **pipes) as process:
        assert stalled.came.wait(30)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 143
    assert json.loads(out)["interrupted"] is True
    assert not target.app.tags("app")
    assert "Traceback" not in err


@pytest.mark.skipif(not hasattr(os, "pipe2"), reason="needs pipes")
@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_a_reader_that_left_is_no_traceback(source, target, image, more):
    reading, writing = os.pipe()
    os.close(reading)
    where = [f"{source.address}/app:v1", f"{target.address}/app"]
    with started("copy", "--no-artifacts", *more, *where, stdout=writing) as process:
        os.close(writing)
        _, err = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "Traceback" not in err
    assert "defect" not in err
    assert "BrokenPipeError" not in err


@pytest.mark.process
def test_a_terminal_without_utf_8_gets_its_lines(source, target):
    def intercept(request: Request) -> Answer | None:
        body = json.dumps(
            {"errors": [{"code": "DENIED", "message": "nicht erlaubt: \u00fc\u2713"}]}
        )
        return Response(403, [], body.encode())

    source.app.intercept = intercept
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    where = [f"{source.address}/app:v1", f"{target.address}/app"]
    with started("copy", "--no-artifacts", *where, env=environment) as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (4, "")
    failed, hint = err.splitlines()
    assert failed.startswith("failed ")
    assert "container client" in hint


@pytest.mark.process
@pytest.mark.slow
def test_the_built_program_copies_from_any_directory(source, target, image, pyz):
    where = [f"{source.address}/app:v1", f"{target.address}/app"]
    command = [*program(pyz, "-I", "-S"), "copy", "--no-artifacts", *where]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("synced ")
    assert held(target, "app", image)
    target.journal.check()


def test_each_request_is_a_line_at_vv(source, target, tmp_path):
    """Of a body's PUT as of a look-up, with its status and without a query: what was asked, and
    nothing else.
    """
    Seed(5).image(sizes=(900, 200_000)).load_into(source.app, "app", "v1")
    ran = call(
        "--log-format", "json", "-vv", "copy", f"{source.address}/app:v1", f"{target.address}/app"
    )
    assert ran.status == 0
    told = [json.loads(line) for line in ran.err.splitlines()]
    lines = Counter(each["message"] for each in told if each["event"] == "request")
    asked = Counter(
        f"{entry.method} {server.url}{entry.target.partition('?')[0]} -> {entry.status}"
        for server in (source, target)
        for entry in server.journal.entries
    )
    assert lines == asked
    assert any(line.startswith("PUT") for line in asked)
