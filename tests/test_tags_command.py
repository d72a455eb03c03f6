"""`regsync tags`: which requests are made, what is printed where, which exit status an answer gives.

What a rule selects is tests/unit/test_tags.py's; wrong command lines are test_cli.py's.
"""

from __future__ import annotations

import json

import jsonschema
import pytest

from conformance.http import Server
from conformance.images import Seed
from conformance.messages import Response, error
from conformance.registry import App
from conformance.tokens import BasicAuth, TokenService
from tests.ends import Ran, Start, Virtual, held, only, run_regsync
from tests.program import report_schema

SECRET = "Xyzzy-0pen-Sesame"
SIGNATURE = f"sha256-{'a' * 64}.sig"
TAGS = ("1.0.0", "1.1.0", "1.2.0-rc.1", "2.0.0", "edge", SIGNATURE)
LOGIN = {"auth_type": "basic", "credentials": {"username": "captain", "password": SECRET}}


@pytest.fixture
def source(serve: Start) -> Server:
    return filled(serve())


def filled(server: Server) -> Server:
    Seed(5).image().load_into(server.app, "app", *TAGS)
    return server


def list_tags(server: Server, *options: str, **more: str) -> Ran:
    ran = run_regsync("tags", f"{server.address}/app", *options, **more)
    assert "Traceback" not in ran.out + ran.err
    assert SECRET not in ran.out + ran.err
    return ran


# What is printed.


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ("", "1.0.0 1.1.0 1.2.0-rc.1 2.0.0 edge"),
        ("--glob 1.* --glob edge --exclude *-rc* --exclude 1.0.*", "1.1.0 edge"),
        ("--semver <3 --semver-prerelease include --latest 2", "2.0.0 1.2.0-rc.1"),
        ("--sort alpha", "edge 2.0.0 1.2.0-rc.1 1.1.0 1.0.0"),
        ("--semver 1.0 --min-tags 2", "2.0.0 1.0.0"),
        ("--glob sha256-*", SIGNATURE),
    ],
)
def test_kept_tags_are_printed_in_order_for_one_request(
    source: Server, options: str, kept: str
) -> None:
    ran = list_tags(source, *options.split())
    assert (ran.status, ran.out.split("\n"), ran.err) == (0, [*kept.split(), ""], "")
    assert source.journal.summary() == {"GET tag_list": 1}


def test_reasons_stand_in_line_on_standard_error(source: Server) -> None:
    options = ["--glob", "[12]*", "--semver", ">=1", "--exclude", "1.1*", "--latest", "1"]
    ran = list_tags(source, "-v", *options)
    assert ran.out == list_tags(source, *options).out == "2.0.0\n"
    dropped = [line for line in ran.err.splitlines() if line.startswith("info: ")]
    assert sorted(line.split()[2:] for line in dropped) == [
        ["exclude", "1.1.0"],
        ["glob", "edge"],
        ["latest", "1.0.0"],
        ["prerelease", "1.2.0-rc.1"],
        ["referrer_tag", SIGNATURE],
    ]
    assert len({line.rindex(" ") for line in dropped}) == 1


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ("--glob 3.*", "no tag is selected"),
        ("--glob 1* --min-tags 4", "only 3 tags were found, min_tags asks for 4"),
    ],
)
def test_too_few_are_a_warning(source: Server, options: str, warning: str) -> None:
    ran = list_tags(source, *options.split())
    assert (ran.status, ran.err) == (0, f"warning: {source.address}/app: {warning}\n")


def test_documents_name_each_tag_with_its_reason(source: Server) -> None:
    ran = list_tags(source, "--json", "-v", "--log-format=json", "--semver", "1.x")
    dropped = {"1.2.0-rc.1": "prerelease", "2.0.0": "semver", "edge": "semver"}
    dropped[SIGNATURE] = "referrer_tag"
    assert ran.report == {
        "schema": 1,
        "repository": f"{source.address}/app",
        "tags": ["1.1.0", "1.0.0"],
        "dropped": dropped,
    }
    jsonschema.Draft202012Validator(report_schema()).validate(ran.report)
    entries = [json.loads(line) for line in ran.err.splitlines()]
    told = {each["tag"]: each["reason"] for each in entries if each["event"] == "tag_dropped"}
    assert told == dropped


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


def test_of_a_repository_that_no_mapping_copies_all_tags_are_listed(source: Server) -> None:
    ran = list_tags(source, "-c", "-", "-v", stdin=mirror(source))
    assert (ran.status, ran.out.split()) == (0, [*TAGS[:-1]])
    assert "info: no mapping copies from there" in ran.err


def test_of_two_mappings_a_tag_is_dropped_that_neither_selects(source: Server) -> None:
    rules = {"glob": "1*", "exclude": "*-*"}, {"glob": "edge", "min_tags": 3}
    ran = list_tags(source, "-c", "-", "--json", "-v", stdin=mirror(source, *rules))
    assert ran.report["tags"] == ["1.0.0", "1.1.0", "edge"]
    dropped = {"1.2.0-rc.1": "exclude", "2.0.0": "glob", SIGNATURE: "referrer_tag"}
    assert ran.report["dropped"] == dropped
    assert "info: the rule is that of mappings[0]\n" in ran.err
    assert "info: the rule is that of mappings[1]\n" in ran.err
    assert "only 1 tags were found, min_tags asks for 3" in ran.err


# What is asked, with which credentials.


def test_pages_are_followed_and_nothing_else_is_asked(serve: Start) -> None:
    server = filled(serve(page_size=2))
    assert len(list_tags(server).out.splitlines()) == 5
    assert server.journal.summary() == {"GET tag_list": 3}


def test_a_token_is_asked_for_with_pull_alone(serve: Start) -> None:
    tokens = TokenService(users={"captain": SECRET}, anonymous=False)
    service = serve(tokens)
    tokens.realm = f"{service.url}/token"
    server = filled(serve(auth=tokens))
    text = json.dumps({"registries": {"a": {"url": server.url, **LOGIN}}, "mappings": []})
    ran = list_tags(server, "-c", "-", stdin=text)
    assert (ran.status, len(ran.out.splitlines())) == (0, 5)
    assert only(service.journal.entries).query["scope"] == "repository:app:pull"
    assert server.journal.summary() == {"GET tag_list": 2}


def test_credentials_of_another_host_stay_at_home(serve: Start) -> None:
    server = filled(serve(auth=BasicAuth({"captain": SECRET})))
    for url, status in ((server.url, 0), ("https://registry.example.com", 4)):
        text = json.dumps({"registries": {"a": {"url": url, **LOGIN}}, "mappings": []})
        assert list_tags(server, "-c", "-", stdin=text).status == status
    sent = [entry.headers.get("authorization") for entry in server.journal.entries]
    assert sum(each is not None for each in sent) == 1


# Names stand for registries in memory; https is believed there.


@pytest.mark.parametrize(
    ("host", "port", "scheme", "written", "repository"),
    [
        ("registry-1.docker.io", 443, "https", "alpine", "library/alpine"),
        ("quay.test", 8443, "https", "quay.test:8443/app", "app"),
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
    ran = await world.run("copy", "--no-artifacts", f"{written}:v1", "http://target.test/copy")
    assert (ran.status, ran.err) == (0, "")
    assert held(target, "copy", image)


# What fails.


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [(401, 4, "AUTH_ERROR"), (403, 4, "AUTH_ERROR"), (404, 2, "SOURCE_ERROR")],
)
def test_what_the_registry_refuses_is_one_line(
    source: Server, answer: int, status: int, code: str
) -> None:
    source.app.intercept = lambda request: error(answer, "DENIED", "no \x1b[31m way")
    for more in ((), ("--json",)):
        ran = list_tags(source, *more)
        assert ran.status == status
        first = ran.err.splitlines()[0]
        assert first.startswith(f"error: {code}: ")
        assert f" {source.address}/app: " in first
        assert "\x1b" not in ran.out + ran.err
        assert ran.report["error"]["code"] == code if more else ran.out == ""


def test_a_listing_that_is_no_listing_is_a_content_error(source: Server) -> None:
    source.app.intercept = lambda request: Response(200, [], b'{"tags": {"a": 1}}')
    ran = list_tags(source)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("error: CONTENT_ERROR: ")
