"""`regsync tags`, `expand` and `schema` as a shell sees them, and every form of reference.

What a rule selects is test_tags.py's; here it is which requests are made, what is printed where,
and which exit status an answer of the registry gives.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import anyio
import jsonschema
import pytest
import yaml

from conformance.content.images import Seed
from conformance.messages import Answer, Request, Response, error
from conformance.registry.app import App
from conformance.registry.tokens import BasicAuth, TokenService
from conformance.server.sockets import Server
from tests.ends import ROOT, Ran, Start, Virtual, held, only, run_regsync, started
from tests.program import command_names, report_schema, run_process

SECRET = "Xyzzy-0pen-Sesame"
SIGNATURE = f"sha256-{'a' * 64}.sig"
TAGS = ("1.0.0", "1.1.0", "1.2.0-rc.1", "2.0.0", "edge", SIGNATURE)


@pytest.fixture
def source(serve: Start) -> Server:
    return filled(serve())


def filled(server: Server, repository: str = "app") -> Server:
    Seed(5).image().load_into(server.app, repository, *TAGS)
    return server


def list_tags(server: Server, *options: str, repository: str = "app", **more: str) -> Ran:
    ran = run_regsync("tags", f"{server.address}/{repository}", *options, **more)
    assert "Traceback" not in ran.out + ran.err
    assert SECRET not in ran.out + ran.err
    return ran


# What is printed.


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ([], "1.0.0 1.1.0 1.2.0-rc.1 2.0.0 edge"),
        (
            ["--glob", "1.*", "--glob", "edge", "--exclude", "*-rc*", "--exclude", "1.0.*"],
            "1.1.0 edge",
        ),
        (["--semver", "<3", "--semver-prerelease", "include", "--latest", "2"], "2.0.0 1.2.0-rc.1"),
        (["--sort", "alpha"], "edge 2.0.0 1.2.0-rc.1 1.1.0 1.0.0"),
        (["--sort=semver", "--latest=1"], "2.0.0"),
        (["--semver", "1.0", "--min-tags", "2"], "2.0.0 1.0.0"),
        (["--glob", "sha256-*"], SIGNATURE),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_kept_tags_are_printed_in_order_for_one_request(
    source: Server, options: list[str], kept: str
) -> None:
    ran = list_tags(source, *options)
    assert (ran.status, ran.out.split("\n"), ran.err) == (0, [*kept.split(), ""], "")
    assert source.journal.summary() == {"GET tag_list": 1}


def test_reasons_stand_in_line_on_standard_error(source: Server) -> None:
    options = ["--glob", "[12]*", "--semver", ">=1", "--exclude", "1.1*", "--latest", "1"]
    ran = list_tags(source, "-v", *options)
    assert ran.out == list_tags(source, *options).out == "2.0.0\n"
    *dropped, summary = [line for line in ran.err.splitlines() if line.startswith("info: ")]
    assert sorted(line.split()[2:] for line in dropped) == [
        ["exclude", "1.1.0"],
        ["glob", "edge"],
        ["latest", "1.0.0"],
        ["prerelease", "1.2.0-rc.1"],
        ["referrer_tag", SIGNATURE],
    ]
    assert len({line.rindex(" ") for line in dropped}) == 1
    where = f"{source.address}/app"
    assert summary.startswith(f"info: {where}: 1 of 6 tags are selected (dropped: ")
    reasons = summary.partition("dropped: ")[2].rstrip(")").split(", ")
    assert sorted(reasons) == ["1 exclude", "1 glob", "1 latest", "1 prerelease", "1 referrer_tag"]


def test_a_name_that_is_not_there_is_said(source: Server) -> None:
    """Only where the glob is a plain name, and nothing else of the rule has dropped it."""
    names = ["9.9", "1.0.0", "2.0.0", "edge", "8*", "7"]
    options = [option for name in names for option in ("--glob", name)]
    ran = list_tags(source, "--semver", "<2", *options)
    assert (ran.status, ran.out) == (0, "1.0.0\n")
    where = f"{source.address}/app"
    assert ran.err.splitlines() == [
        f"warning: {where}: tag {tag!r} does not exist" for tag in ("9.9", "7")
    ]
    assert list_tags(source, "--json", "-q", *options).report["missing"] == ["9.9", "7"]
    assert source.journal.summary() == {"GET tag_list": 2}


def test_json_is_what_its_schema_says(source: Server) -> None:
    ran = list_tags(source, "--json", "-v", "--semver", "1.x")
    told = ran.report
    assert told == {
        "schema": 1,
        "repository": f"{source.address}/app",
        "tags": ["1.1.0", "1.0.0"],
        "dropped": {
            "1.2.0-rc.1": "prerelease",
            "2.0.0": "semver",
            "edge": "semver",
            SIGNATURE: "referrer_tag",
        },
        "missing": [],
    }
    jsonschema.Draft202012Validator(report_schema()).validate(told)


def test_log_lines_in_json_name_tag_and_reason(source: Server) -> None:
    ran = list_tags(source, "--log-format=json", "-v", "--glob", "1*")
    entries = [json.loads(line) for line in ran.err.splitlines()]
    dropped = {each["tag"]: each["reason"] for each in entries if each["event"] == "tag_dropped"}
    assert dropped == {"2.0.0": "glob", "edge": "glob", SIGNATURE: "referrer_tag"}


def test_nothing_selected_is_a_warning_with_the_reasons(source: Server) -> None:
    ran = list_tags(source, "--glob", "3.*")
    assert (ran.status, ran.out) == (0, "")
    where = f"{source.address}/app"
    expected = f"warning: {where}: 0 of 6 tags are selected (dropped: 5 glob, 1 referrer_tag)\n"
    assert ran.err == expected


def test_a_floor_that_is_not_reached_is_a_warning_with_both_numbers(source: Server) -> None:
    ran = list_tags(source, "--glob", "1*", "--min-tags", "4")
    assert ran.status == 0
    assert (
        ran.err == f"warning: {source.address}/app: only 3 tags were found, min_tags asks for 4\n"
    )


# The rules of a configuration.


def mirror(server: Server, *rules: dict[str, object]) -> str:
    """Return a configuration with a mapping of `app` for each rule, and one of another repository."""
    mappings = [{"from": "app", "to": f"copy{n}", "tags": rule} for n, rule in enumerate(rules)]
    mappings.append({"from": "other", "to": "other", "tags": {"glob": "edge"}})
    registries = {"a": {"url": server.url}, "b": {"url": "b.example"}}
    defaults = {"source": "a", "targets": ["b"]}
    return json.dumps({"registries": registries, "defaults": defaults, "mappings": mappings})


@pytest.mark.parametrize(
    ("rules", "options", "kept"),
    [
        ([{"semver": ">=1.1"}], [], "2.0.0 1.1.0"),
        ([{"semver": ">=1.1"}], ["--glob", "e*"], "edge"),
        ([{"glob": "1.0*"}, {"glob": ["edge", "1.0.0"]}], [], "1.0.0 edge"),
        ([], [], "1.0.0 1.1.0 1.2.0-rc.1 2.0.0 edge"),
    ],
    ids=["one mapping", "a rule of its own", "two mappings", "no mapping"],
)
def test_without_a_rule_of_its_own_it_takes_those_of_the_mappings(
    source: Server, rules: list[dict[str, object]], options: list[str], kept: str
) -> None:
    ran = list_tags(source, "-c", "-", *options, stdin=mirror(source, *rules))
    assert (ran.status, ran.out.split(), ran.err) == (0, kept.split(), "")
    assert source.journal.summary() == {"GET tag_list": 1}


def test_of_two_mappings_a_tag_is_dropped_that_neither_selects(source: Server) -> None:
    text = mirror(
        source, {"glob": "1*", "exclude": "*-*"}, {"glob": ["edge", "gone"], "min_tags": 3}
    )
    ran = list_tags(source, "-c", "-", "--json", "-v", stdin=text)
    assert ran.report["tags"] == ["1.0.0", "1.1.0", "edge"]
    assert ran.report["missing"] == ["gone"]
    dropped = {"1.2.0-rc.1": "exclude", "2.0.0": "glob", SIGNATURE: "referrer_tag"}
    assert ran.report["dropped"] == dropped
    assert "info: the rule is that of mappings[0]\n" in ran.err
    assert "info: the rule is that of mappings[1]\n" in ran.err
    assert "only 1 tags were found, min_tags asks for 3" in ran.err


# What is asked, with which credentials.


def test_literal_names_are_listed_too_because_the_listing_is_the_question(source: Server) -> None:
    ran = list_tags(source, "--glob", "edge", "--glob", "gone")
    assert ran.out == "edge\n"
    assert source.journal.summary() == {"GET tag_list": 1}


def test_pages_are_followed_and_nothing_else_is_asked(serve: Start) -> None:
    server = filled(serve(page_size=2))
    assert len(list_tags(server).out.splitlines()) == 5
    assert server.journal.summary() == {"GET tag_list": 3}


def test_a_token_is_asked_for_with_pull_alone(serve: Start) -> None:
    tokens = TokenService(users={"captain": SECRET}, anonymous=False)
    service = serve(tokens)
    tokens.realm = f"{service.url}/token"
    server = filled(serve(auth=tokens))
    login = {"auth_type": "basic", "credentials": {"username": "captain", "password": SECRET}}
    text = json.dumps({"registries": {"a": {"url": server.url, **login}}, "mappings": []})
    ran = list_tags(server, "-c", "-", stdin=text)
    assert (ran.status, len(ran.out.splitlines())) == (0, 5)
    asked = only(service.journal.entries)
    assert asked.query["scope"] == "repository:app:pull"
    assert server.journal.summary() == {"GET tag_list": 2}


def test_credentials_of_another_host_stay_at_home(serve: Start) -> None:
    server = filled(serve(auth=BasicAuth({"captain": SECRET})))
    login = {"auth_type": "basic", "credentials": {"username": "captain", "password": SECRET}}
    for url, status in ((server.url, 0), ("https://registry.example.com", 4)):
        text = json.dumps({"registries": {"a": {"url": url, **login}}, "mappings": []})
        assert list_tags(server, "-c", "-", stdin=text).status == status
    sent = [entry.headers.get("authorization") for entry in server.journal.entries]
    assert sum(each is not None for each in sent) == 1


# What fails.


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        (401, 4, "AUTH_ERROR"),
        (403, 4, "AUTH_ERROR"),
        (404, 2, "SOURCE_ERROR"),
        (400, 2, "SOURCE_ERROR"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_what_the_registry_refuses_is_one_line(
    source: Server, answer: int, status: int, code: str, as_json: bool
) -> None:
    def intercept(request: Request) -> Answer | None:
        return error(answer, "DENIED", "no \x1b[31m way")

    source.app.intercept = intercept
    ran = list_tags(source, *(["--json"] if as_json else []))
    assert ran.status == status
    first = ran.err.splitlines()[0]
    assert first.startswith(f"error: {code}: ")
    assert f" {source.address}/app: " in first
    assert "\x1b" not in ran.out + ran.err
    if as_json:
        assert ran.report["error"]["code"] == code
    else:
        assert ran.out == ""


def test_a_registry_that_is_not_there_is_a_network_error(source: Server) -> None:
    ran = run_regsync("tags", "127.0.0.1:1/app")
    assert ran.status == 2
    warning, failure, *_ = ran.err.splitlines()
    assert warning.startswith("warning: waiting for 127.0.0.1:1 (connection refused), for ")
    assert failure.startswith("error: NETWORK_ERROR: ")


def test_a_listing_that_is_no_listing_is_a_content_error(source: Server) -> None:
    source.app.intercept = lambda request: Response(200, [], b'{"tags": {"a": 1}}')
    ran = list_tags(source)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("error: CONTENT_ERROR: ")


WRONG = [
    (["app:1.2"], "--glob"),
    ([f"app@sha256:{'0' * 64}"], "--glob"),
    (["App"], "lower case"),
    (["docker://localhost/app"], "docker://"),
    (["app", "other"], "unrecognized arguments"),
    (["app", "--latest", "3"], "sort"),
    (["app", "--latest", "3", "--semver-prerelease", "only"], "sort"),
    (["app", "--latest", "0"], "--latest"),
    (["app", "--latest", "-1"], "--latest"),
    (["app", "--latest", "many"], "--latest"),
    (["app", "--min-tags", "1.5"], "--min-tags"),
    (["app", "--glob", "["], "--glob"),
    (["app", "--glob", ""], "--glob"),
    (["app", "--glob", "a\nb*"], "--glob"),
    (["app", "--exclude", "a b"], "--exclude"),
    (["app", "--semver", "1 2"], "comma"),
    (["app", "--semver", "latest"], "--semver"),
    (["app", "--semver-prerelease", "some"], "include"),
    (["app", "--sort", "date"], "alpha"),
    (["app", "--immutable-tags", "v*"], "--immutable-tags"),
    (["app", "-c", "/nowhere/x.yaml"], "/nowhere/x.yaml"),
]


@pytest.mark.parametrize(
    ("arguments", "words"), WRONG, ids=[" ".join(row[0])[:40] for row in WRONG]
)
def test_a_wrong_rule_is_status_3_and_asks_nothing(arguments: list[str], words: str) -> None:
    ran = run_regsync("tags", *arguments, "--json")
    assert ran.status == 3
    assert words in ran.err
    assert all(
        line.startswith(("error: CONFIG_ERROR: ", "hint: ")) for line in ran.err.splitlines()
    )
    assert ran.report["error"]["code"] == "CONFIG_ERROR"


@pytest.mark.process
def test_an_interrupt_ends_a_listing_with_130(source: Server) -> None:
    came, go = threading.Event(), threading.Event()

    async def intercept(request: Request) -> Answer | None:
        came.set()
        await anyio.to_thread.run_sync(go.wait, 60)
        return None

    source.app.intercept = intercept
    try:
        with started("tags", f"{source.address}/app") as process:
            assert came.wait(30)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
    finally:
        go.set()
    assert (process.returncode, out, err) == (130, "", "")


# Forms of references. Names stand for registries in memory; https is believed there.


@pytest.mark.anyio
@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("host", "port", "scheme", "written", "repository"),
    [
        ("registry-1.docker.io", 443, "https", "alpine", "library/alpine"),
        ("quay.test", 8443, "https", "quay.test:8443/app", "app"),
        ("localhost", 80, "http", "localhost/app", "app"),
        ("::1", 5000, "http", "[::1]:5000/app", "app"),
        ("localhost", 5811, "https", "https://localhost:5811/app", "app"),
    ],
)
async def test_a_reference_is_the_registry_that_it_names(
    world: Virtual, host: str, port: int, scheme: str, written: str, repository: str
) -> None:
    source = world.listen(App(), host, port=port, scheme=scheme)
    target = world.registry("target.test")
    image = Seed(5).image().load_into(source.app, repository, "latest", "v1")
    listed = await world.run("tags", written)
    assert (listed.status, listed.out.split(), listed.err) == (0, ["latest", "v1"], "")
    config = json.dumps({"registries": {"t": {"url": "http://target.test"}}, "mappings": []})
    forms = {written: "latest", f"{written}:v1": "v1", f"{written}@{image.top}": None}
    for number, (form, tag) in enumerate(forms.items()):
        to = f"target.test/copy{number}"
        ran = await world.run("copy", "--no-artifacts", "-c", "-", form, to, stdin=config)
        assert (ran.status, ran.err) == (0, "")
        assert held(target, f"copy{number}", image)
        assert list(target.app.tags(f"copy{number}")) == ([tag] if tag else [])


@pytest.mark.parametrize(
    "arguments",
    [
        ["copy", "user@host/app", "b.test/b:1"],
        ["copy", "b.test/b:1", "a--b/_c"],
        ["tags", "host:0/app"],
    ],
    ids=["source", "target", "tags"],
)
def test_a_reference_of_a_wrong_shape_is_one_clear_error(arguments: list[str]) -> None:
    ran = run_regsync(*arguments)
    assert (ran.status, ran.out) == (3, "")
    first, *hints = ran.err.split("\n")[:-1]
    assert first.startswith("error: CONFIG_ERROR: ")
    assert all(line.startswith("hint: ") for line in hints)
    assert first.isprintable()


# Commands that ask nobody.


def test_what_is_expanded_is_utf_8_whatever_the_terminal_takes(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("mappings: []\nglobal: {cache_dir: /tmp/übung}\n", encoding="utf-8")
    environment = {"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin"}
    with started("expand", str(path), env=environment, text=False) as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, b"")
    assert yaml.safe_load(out.decode("utf-8"))["global"]["cache_dir"] == "/tmp/übung"


@pytest.mark.new
def test_schemas_are_json_on_standard_output() -> None:
    plain, told = run_regsync("schema"), run_regsync("schema", "--report")
    assert (plain.status, plain.err, told.status, told.err) == (0, "", 0, "")
    assert "mappings" in plain.report["properties"]
    assert told.report == report_schema()


@pytest.mark.new
@pytest.mark.parametrize("command", command_names())
def test_help_shows_examples_and_the_exit_statuses_that_the_command_has(command: str) -> None:
    for arguments in ([command, "--help"], ["-v", command, "-h"]):
        ran = run_process(*arguments)
        assert (ran.status, ran.err) == (0, "")
        said = ran.out
        assert f"\n  regsync {command}" in said
        statuses = [line.split()[0] for line in said.partition("exit status:\n")[2].splitlines()]
        assert "3" in statuses
        assert ("1" in statuses) is (command in ("copy", "sync", "lock", "audit"))
        assert ("4" in statuses) is (command in ("copy", "sync", "lock", "tags", "auth"))
        assert "0" in statuses
        # All meanings are in one place.
        assert "Exit status" not in said


@pytest.mark.parametrize(
    ("arguments", "near"), [(["snyc"], "sync"), (["tag", "x"], "tags"), (["x" * 5000], "")]
)
def test_an_unknown_command_names_the_nearest(arguments: list[str], near: str) -> None:
    ran = run_regsync(*arguments)
    assert ran.status == 3
    assert (f"did you mean {near!r}" if near else "regsync --help") in ran.err


@pytest.mark.parametrize(
    "flags", [["-v", "--no-progress"], ["--log-format=text", "-q"]], ids=" ".join
)
def test_global_options_count_wherever_they_stand(flags: list[str], source: Server) -> None:
    one, other = flags
    where = f"{source.address}/app"
    places = ([one, other, "tags", where], [one, "tags", other, where], ["tags", where, one, other])
    ran = [run_regsync(*each) for each in places]
    assert len({(each.status, each.out, each.err) for each in ran}) == 1


def test_v_before_and_after_the_command_is_vv(source: Server) -> None:
    ran = run_regsync("-v", "tags", f"{source.address}/app", "-v")
    assert "trace: " in ran.err


def test_a_configuration_may_be_named_before_the_command(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("mappings: []\n")
    assert run_regsync("-c", str(path), "sync").status == 0


@pytest.mark.parametrize("spelled", [["--log-format", "json"], ["--log-format=json"]], ids=" ".join)
@pytest.mark.parametrize("rest", [["sync"], ["nonsense"], ["tags", "a:1"]], ids=" ".join)
def test_what_is_wrong_with_a_command_line_is_logged_as_it_asks(
    spelled: list[str], rest: list[str]
) -> None:
    for arguments in ([*spelled, *rest], [*rest, *spelled]):
        ran = run_regsync(*arguments)
        assert ran.status == 3
        assert json.loads(only(ran.err.splitlines()))["code"] == "CONFIG_ERROR"


@pytest.mark.parametrize(
    "arguments",
    [[b"copy", b"\xff/a:1", b"b"], [b"sync", b"-c", b"/\xff.yaml"], [b"\xff"], [b"tags", b"a\xff"]],
)
def test_arguments_that_are_no_text_are_status_3(arguments: list[bytes]) -> None:
    with started(*arguments) as process:  # type: ignore[arg-type]
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (3, "")
    assert err.startswith("error: CONFIG_ERROR: ")


@pytest.mark.skipif(os.name != "posix", reason="uses a POSIX shell")
@pytest.mark.parametrize("closed", ["<&-", "</dev/null"])
def test_standard_input_that_gives_nothing_is_status_3(closed: str) -> None:
    sync = [sys.executable, str(ROOT / "regsync.py"), "sync", "-c", "-"]
    line = ["sh", "-c", f'exec "$@" {closed}', "sh", *sync]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("error: CONFIG_ERROR: ")
    assert "Traceback" not in done.stderr
