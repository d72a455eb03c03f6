"""The JSON report of a run, held against its published schema and against what happened; and
`regsync report`, which shows it as Markdown, JUnit and HTML.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import html5lib
import pytest
from markdown_it import MarkdownIt

from conformance.images import Seed, encode
from tests.ends import Ran, load_numbered, run_regsync, sync, tags
from tests.ends import document as configuration
from tests.published import check, mixed_run

# What a run has written.


def test_a_run_of_every_outcome_is_as_published_and_retries_are_real(source, target):
    ran = mixed_run(source, target)
    check("report", ran.report)
    found = {each["target"].partition("/")[2]: each for each in ran.images}
    assert {name: each["status"] for name, each in found.items()} == {
        "app:v1": "skipped",
        "ill:v1": "failed",
        "multi:v1": "synced",
        "none:*": "failed",
        "part:v1": "synced",
    }
    assert (found["app:v1"]["reason"], found["multi:v1"]["reason"]) == ("unchanged", None)
    mappings = {each["to"]: each for each in ran.report["mappings"]}
    assert list(mappings) == ["app", "multi", "ill", "part"], "what was not listed has no figures"
    error = found["ill:v1"]["error"]
    known = {"code": "TARGET_ERROR", "status": 500, "side": "target", "retries": 4}
    assert error == {**known, "message": error["message"], "hint": error["hint"]}
    assert target.journal.count("POST", "upload_start", status=500) >= 5
    index, part = found["multi:v1"], found["part:v1"]
    assert part["source_digest"] == index["digest"] != part["digest"]
    assert index["source_digest"] == index["digest"]
    for image in ran.images:
        assert sum(image["artifacts"].values()) == 0
        assert 0 <= image["duration_s"] <= ran.report["duration_s"] + 0.01


def test_bytes_that_need_not_be_sent_count_once_for_each_target_repository(source, target):
    image = Seed(1).image()
    for name in ("first", "second"):
        image.load_into(source.app, name, "v1")
    ends = {"source": source, "target": target}
    cold = sync(ends, *({"from": name, "tags": tags("v1")} for name in ("first", "second"))).totals
    assert (cold["bytes"], cold["saved"]) == (image.size, {"present": 0, "mounted": image.size})

    # Two tags of the first repository name blobs that are there.
    body = encode({**image.document, "annotations": {"made": "again"}})
    image.with_manifest(body, image.media_type).load_into(source.app, "first", "v2", "v3")
    warm = sync(ends, {"from": "first", "tags": tags("v*")}).totals
    assert (warm["bytes"], warm["saved"]) == (0, {"present": image.size, "mounted": 0})


def test_a_blob_that_another_image_brings_is_skipped_by_the_others(source, target):
    images = load_numbered(source, 3)
    ran = sync({"source": source, "target": target}, {"from": "app", "tags": tags("v*")})
    counts = [each["blobs"] for each in ran.images]
    assert [sum(each.values()) for each in counts] == [len(image.blobs) for image in images]
    assert sum(each["skipped"] for each in counts) == 2


def test_the_number_of_requests_in_the_report_is_that_of_the_journal(source, target):
    Seed(1).image().load_into(source.app, "app", "v1")
    ran = run_regsync("copy", "--json", f"{source.address}/app:v1", f"{target.address}/app")
    for server in (source, target):
        told = sum(ran.totals["requests"][server.address].values())
        assert told == len(server.journal.entries)
    check("report", ran.report)


def test_what_is_not_attempted_is_said_as_published():
    """Each problem of a configuration has its place, and what a command line says has none."""
    wrong = "mapings: []\nregistries: {a: {url: 'ftp://x'}}\n"
    for words, stdin, lines in (
        (("copy", "--json", "x"), "", []),
        (("sync", "--json", "-c", "-"), wrong, [1, 1, 2]),
    ):
        ran = run_regsync(*words, stdin=stdin)
        assert ran.status == 3
        check("error", ran.report)
        assert ran.report["error"]["code"] == "CONFIG_ERROR"
        assert [problem["line"] for problem in ran.report["problems"]] == lines


def test_tags_and_version_are_as_published(source):
    Seed(1).image().load_into(source.app, "app", "v1", "v2", "latest")
    ran = run_regsync("tags", "--json", f"{source.address}/app", "--glob", "v*", "--semver", "^2")
    check("tags", ran.report)
    assert ran.report["dropped"] == {"latest": "glob", "v1": "semver"}
    check("version", run_regsync("version", "--json").report)


# Reports as they may be.


def image(number: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "source": f"docker.io/team/app:v{number}",
        "target": f"mirror.example/team/app:v{number}",
        "digest": None,
        "source_digest": None,
        "status": "synced",
        "reason": None,
        "error": None,
        "bytes": 1000,
        "duration_s": 1.5,
        "blobs": {"transferred": 3, "mounted": 2, "skipped": 1},
        "artifacts": {"synced": 0, "skipped": 0, "failed": 0, "stripped": 0},
        **fields,
    }


def failed(number: int = 0, message: str = "denied", **fields: Any) -> dict[str, Any]:
    error = {
        "code": "AUTH_ERROR",
        "message": f"push blob mirror.example/team/app:v{number}: {message}",
        "hint": "log in again",
        "status": 403,
        "side": "target",
        "retries": 0,
    }
    return image(number, status="failed", bytes=0, error=error, **fields)


def report_of(*images: dict[str, Any], **fields: Any) -> dict[str, Any]:
    statuses = [each["status"] for each in images]
    mapping = {
        "from": "docker.io/team/app",
        "to": "team/app",
        "selected": 2,
        "dropped": {"glob": 3},
    }
    return {
        "schema": 1,
        "run_id": "r1",
        "started_at": "2026-11-23T03:04:05Z",
        "duration_s": 60.0,
        "interrupted": False,
        "dry_run": False,
        "images": list(images),
        "mappings": [mapping],
        "totals": {
            "images": {each: statuses.count(each) for each in ("synced", "skipped", "failed")},
            "layers": {"transferred": 6, "unique": 4, "mounted": 2, "skipped": 1},
            "bytes": 2000,
            "saved": {"present": 8_100_000_000, "mounted": 3_300_000_000},
            "requests": {"docker.io": {"manifest_get": 2}, "mirror.example": {"manifest_put": 2}},
            "throttled": {"mirror.example": 5},
        },
        **fields,
    }


def show(document: object, form: str = "markdown") -> Ran:
    text = document if isinstance(document, str) else json.dumps(document)
    return run_regsync("report", "-", "--to", form, stdin=text)


def shown(document: object, form: str = "markdown") -> str:
    ran = show(document, form)
    assert (ran.status, ran.err) == (0, "")
    return ran.out


def rendered(markdown: str) -> Any:
    made = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(markdown)
    return html5lib.parse(made, namespaceHTMLElements=False)


def parsed(page: str) -> Any:
    return html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(page)


FORMS = pytest.mark.parametrize("form", ["markdown", "junit", "html"])


@FORMS
def test_a_real_report_is_shown_in_each_form(form, source, target, tmp_path):
    ran = mixed_run(source, target)
    file = tmp_path / "run.json"
    file.write_text(ran.out)
    told = run_regsync("report", str(file), "--to", form)
    assert (told.status, told.err) == (0, "")
    codes = [each["error"]["code"] for each in ran.images if each["status"] == "failed"]
    assert codes
    assert all(code in told.out for code in codes)
    assert told.out.endswith("\n")


def test_a_summary_is_the_markdown_of_the_run(source, target, tmp_path):
    Seed(1).image().load_into(source.app, "app", "v1")
    config, summary = tmp_path / "mirror.yaml", tmp_path / "summary.md"
    ends = {"source": source, "target": target}
    config.write_text(configuration(ends, {"from": "app", "tags": tags("v1")}))
    summary.write_text("of an earlier run")
    ran = run_regsync("sync", "--json", "-c", str(config), "--summary", str(summary))
    assert ran.status == 0
    assert summary.read_text() == shown(ran.report)
    for place, why in (("none/x", "its directory does not exist"), ("", "it names no file")):
        nowhere = run_regsync("sync", "-c", str(config), "--summary", str(tmp_path / place))
        assert (nowhere.status, why in nowhere.err) == (3, True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_summary_that_cannot_be_written_costs_no_report(source, target, tmp_path):
    Seed(1).image().load_into(source.app, "app", "v1")
    config = tmp_path / "mirror.yaml"
    ends = {"source": source, "target": target}
    config.write_text(configuration(ends, {"from": "app", "tags": tags("v1")}))
    ran = run_regsync("sync", "--json", "-c", str(config), "--summary", "/dev/full")
    assert (ran.status, ran.statuses()) == (2, ["synced"])
    assert "error: INTERNAL_ERROR: /dev/full cannot be written" in ran.err


# Markdown.


def tables(tree: Any) -> list[list[list[str]]]:
    """Return the texts of the cells of each table, row by row."""
    return [
        [["".join(cell.itertext()) for cell in row if cell.tag in ("td", "th")] for row in rows]
        for rows in (table.iter("tr") for table in tree.iter("table"))
    ]


def test_the_figures_are_a_table():
    figures, _ = tables(rendered(shown(report_of(image(1), image(2)))))
    assert figures == [
        ["Figure", "Value"],
        ["Layers", "6 transferred (4 unique), 2 mounted"],
        ["Data", "2.0 KB transferred"],
        ["Saved", "8.1 GB already there, 3.3 GB mounted"],
        ["Time", "1m00s from 2026-11-23T03:04:05Z"],
        ["docker.io", "2 requests (2 manifest_get)"],
        ["mirror.example", "2 requests (2 manifest_put), 5 of them throttled (429)"],
    ]


def other_failure(number: int) -> dict[str, Any]:
    """Return an image that fails for another reason than `failed` says."""
    ill = failed(number, "no such thing")
    ill["error"].update(code="SOURCE_ERROR", hint=None)
    return ill


def test_failures_come_first_and_are_listed_by_cause_with_a_message_each():
    document = report_of(image(1), other_failure(4), failed(2), failed(3, "denied too"))
    text = shown(document)
    assert text.startswith("## regsync: 3 failed, 1 synced\n")
    tree = rendered(text)
    headings = ["".join(each.itertext()) for each in tree.iter("h3")]
    assert headings == ["2 images: AUTH_ERROR", "1 image: SOURCE_ERROR", "Figures"]
    assert ["".join(each.itertext()) for each in tree.iter("p")] == ["Remedy: log in again"]
    denied, missing, _, synced = tables(tree)
    pair = ["docker.io/team/app:v{}", "mirror.example/team/app:v{}"]
    error = "push blob mirror.example/team/app:v{}: {}"
    rows = [(2, "denied"), (3, "denied too")]
    assert denied[1:] == [
        [*(name.format(number) for name in pair), error.format(number, said)]
        for number, said in rows
    ]
    assert missing[1][2] == error.format(4, "no such thing")
    assert synced[1:] == [[*(name.format(1) for name in pair), "1.0 KB", "1.5s"]]
    assert "<summary>1 synced</summary>" in text


def test_the_page_says_what_markdown_says():
    document = report_of(image(1), other_failure(4), failed(2), image(3, status="would_sync"))
    page, markdown = parsed(shown(document, "html")), rendered(shown(document))
    assert tables(page) == tables(markdown)
    for mine, other in (("h1", "h2"), ("h2", "h3"), ("summary", "summary"), ("p", "p")):
        texts = ["".join(each.itertext()) for each in page.iter(mine)]
        assert texts == ["".join(each.itertext()) for each in markdown.iter(other)]


def test_markdown_stays_below_what_ci_services_take_and_says_so():
    long = [image(n, source=f"docker.io/{'long/' * 40}app:{n}") for n in range(6000)]
    text = shown(report_of(failed(1), *long))
    assert len(text.encode()) < 1024 * 1024
    assert re.search(r"\d+ more lines are left out", text)
    assert text.count("<details>") == text.count("</details>")
    assert "AUTH" in text


# JUnit.


def test_junit_has_a_case_an_image_and_target():
    report = report_of(
        image(1),
        image(2, status="skipped", reason="unchanged"),
        image(3, status="skipped", reason="immutable_tag"),
        failed(4),
        image(5, target="other.example/team/app:v5"),
        image(6, target="oci-layout:/media/disk//team/app:v6"),
    )
    suite = ElementTree.fromstring(shown(report, "junit"))
    assert (suite.tag, suite.get("name")) == ("testsuite", "regsync")
    counts = {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "6", "failures": "1", "errors": "0", "skipped": "1"}
    cases = {str(case.get("name")).rpartition(":")[2]: case for case in suite.iter("testcase")}
    assert [name for name, case in cases.items() if len(case) == 0] == ["v1", "v2", "v5", "v6"]
    assert cases["v5"].get("classname") == "other.example/team/app:v5"
    assert cases["v5"].get("name") == "docker.io/team/app:v5"
    (failure,) = cases["v4"]
    assert failure.get("type") == "AUTH_ERROR"
    assert "log in again" in str(failure.text)


# HTML.


def test_the_page_is_html_without_scripts_or_anything_to_load():
    page = shown(report_of(image(1), failed(2)), "html")
    tree = parsed(page)
    names = {each.tag for each in tree.iter() if isinstance(each.tag, str)}
    assert not names & {"script", "img", "link", "iframe", "object", "a", "form", "svg"}
    attributes = {name for each in tree.iter() for name in each.attrib}
    assert not {name for name in attributes if name.startswith("on")} | attributes & {"src", "href"}
    assert "url(" not in page
    metas = [each for each in tree.iter("meta") if each.get("http-equiv") is not None]
    (policy,) = (each.get("content") for each in metas)
    assert policy.startswith("default-src 'none'")


# What each form says of runs that are not like others.


def test_what_is_held_back_is_counted_with_the_next_moment():
    waiting = {"status": "skipped", "reason": "min_age"}
    later, sooner = (f"2026-11-2{day}T00:00:00Z" for day in (9, 6))
    document = report_of(
        image(1), image(2, until=later, **waiting), image(3, until=sooner, **waiting)
    )
    assert f"next {sooner}" in shown(document)
    assert "Held" not in shown(report_of(image(1)))


def test_what_an_interrupted_run_has_left_is_named_in_each_form():
    ends = {name: f"{name}.example/team/app:v9" for name in ("source", "target")}
    report = report_of(image(1), interrupted=True, undone=[image(**ends, status="undone")])
    for form in ("markdown", "html"):
        text = shown(report, form)
        assert "source.example/team/app:v9" in text
        assert "interrupted" in text
    (error,) = ElementTree.fromstring(shown(report, "junit")).iter("error")
    assert error.get("type") == "UNDONE"


def test_a_dry_run_says_that_nothing_was_changed():
    report = report_of(image(1, status="would_sync"), dry_run=True)
    report["totals"]["images"] = {"synced": 0, "skipped": 0, "failed": 0, "would_sync": 1}
    for form in ("markdown", "html"):
        text = shown(report, form)
        assert "1 would be synced" in text
        assert "nothing was changed" in text


# Hostile reports: markup, in each of the forms, and things that Markdown turns into links and
# mentions.
HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(1)> ]]> --> </style> \" ' & "
    "`code` ```fence``` **bold** | cell | [link](https://evil.example) <https://evil.example> "
    "https://evil.example @somebody #1 \\ ~~gone~~ ![image](x) _a_ __b__ www.evil.example $x$"
)


def hostile() -> dict[str, Any]:
    names = {"source": f"docker.io/{HOSTILE}:v1", "target": f"mirror.example/{HOSTILE}:v1"}
    bad = failed(1, HOSTILE, **names)
    bad["error"].update(hint=HOSTILE, code=HOSTILE)
    good = image(2, source=f"docker.io/{HOSTILE}:v2", reason=HOSTILE)
    skipped = image(3, status="skipped", reason=HOSTILE)
    report = report_of(bad, good, skipped, run_id=HOSTILE, started_at=HOSTILE)
    report["mappings"][0].update({"from": HOSTILE, "to": HOSTILE, "dropped": {HOSTILE: 3}})
    report["totals"].update(requests={HOSTILE: {HOSTILE: 3}}, throttled={HOSTILE: 3})
    return report


def has_text_alone(tree: Any) -> None:
    """Assert that a page has what is hostile as text, and nothing made of it."""
    names = {each.tag for each in tree.iter() if isinstance(each.tag, str)}
    assert not names & {"script", "img", "a", "s", "em", "strike"}
    assert HOSTILE in " ".join("".join(tree.itertext()).split())


def test_hostile_text_stays_text_on_the_page():
    has_text_alone(parsed(shown(hostile(), "html")))


def test_hostile_text_stays_text_in_markdown():
    text = shown(hostile())
    # What this program opens and closes itself is the only HTML.
    own = {"<details>", "</details>", "<summary>", "</summary>"}
    assert {*re.findall(r"<[/!]?\w[^>]*>", text)} == own
    # Nothing that a service turns into a link or a mention, whatever Markdown says of it.
    assert not re.search(r"@somebody|https://evil|www\.evil|(?<!\\)#1", text)
    tree = rendered(text)
    has_text_alone(tree)
    assert not [*tree.iter("strong"), *tree.iter("code")]


def test_hostile_text_stays_text_in_junit():
    root = ElementTree.fromstring(shown(hostile(), "junit"))
    (failure,) = root.iter("failure")
    assert failure.get("type") == HOSTILE
    assert HOSTILE in str(failure.text)
    own = {"testsuite", "testcase", "failure", "skipped"}
    assert {each.tag for each in root.iter()} == own


@FORMS
def test_no_control_character_and_no_half_of_a_pair_is_written(form):
    ran = show(report_of(failed(1, "\x1b[31m \r\n \u202e \ufffe \ud800 \x00 end")), form)
    assert ran.status == 0
    assert not set("\x1b\r\u202e\x00\ud800") & set(ran.out)
    assert "end" in ran.out
    if form == "junit":
        ElementTree.fromstring(ran.out)


# What is no report.

GONE = object()


def altered(path: str, value: object) -> dict[str, Any]:
    """Return a report with one field that is otherwise, or gone."""
    report = report_of(image(1))
    *parents, last = path.split(".")
    place: Any = report
    for name in parents:
        place = place[int(name)] if name.isdigit() else place[name]
    if value is GONE:
        del place[last]
    else:
        place[last] = value
    return report


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("totals.saved", GONE, "'saved' is missing"),
        ("images.0.source", GONE, "'source' is missing"),
        ("images", {}, ""),
        ("images.0.bytes", 10**400, ""),
        ("images.0.duration_s", float("nan"), ""),
        ("images.0.status", "done", "this version does not know the status 'done'"),
        ("images.0.source", None, "the name of an image is not text"),
        ("images.0.error", "denied", ""),
        ("totals.requests", {"docker.io": {"x": "1"}}, ""),
        ("schema", 2, "its `schema` is 2, and only 1 can be read"),
    ],
)
def test_what_is_no_report_of_a_run_is_refused(path, value, said):
    ran = show(altered(path, value), "html")
    assert (ran.status, ran.out) == (3, "")
    assert ran.err.startswith(
        "error: CONFIG_ERROR: standard input is not the JSON report of a run: "
    )
    assert said in ran.err
    assert "sync --json" in ran.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ("[" * 100_000, "recursion"),
        ('{"schema": 1}\n{"schema": 1}\n', "one of the lines of `regsync watch --json`"),
        (
            '{"schema": 1, "error": {"code": "CONFIG_ERROR", "message": "no such file"}}',
            "before it tried any: no such file",
        ),
        ('{"schema": 1, "tags": []}', "'images' is missing"),
    ],
    ids=range(5),
)
def test_what_is_no_report_is_refused_in_one_line(text, said):
    ran = show(text)
    assert (ran.status, ran.out) == (3, "")
    assert "standard input is not the JSON report of a run: " in ran.err
    assert said in ran.err
    assert "Traceback" not in ran.err
