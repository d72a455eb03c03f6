"""`regsync report`: a report as Markdown, JUnit and HTML, and what is refused as a report."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import html5lib
import pytest
from markdown_it import MarkdownIt

from conformance.content.images import Seed
from conformance.server.sockets import Server
from tests.ends import Ran, run_regsync, tags
from tests.ends import document as configuration
from tests.published import mixed_run

# Markup, in each of the forms, and things that Markdown turns into links and mentions.
HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(1)> ]]> --> </style> \" ' & "
    "`code` ```fence``` **bold** | cell | [link](https://evil.example) <https://evil.example> "
    "https://evil.example @somebody #1 \\ ~~gone~~ ![image](x)"
)


def image(number: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "source": f"docker.io/team/app:v{number}",
        "target": f"mirror.example/team/app:v{number}",
        "digest": None,
        "status": "synced",
        "reason": None,
        "error": None,
        "bytes": 1000,
        "started_s": float(number),
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
    return {
        "schema": 1,
        "run_id": "r1",
        "started_at": "2026-11-23T03:04:05Z",
        "duration_s": 60.0,
        "interrupted": False,
        "dry_run": False,
        "images": list(images),
        "mappings": [
            {"from": "docker.io/team/app", "to": "team/app", "selected": 2, "dropped": {"glob": 3}}
        ],
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


# What a real run has written.


@pytest.mark.parametrize("form", ["markdown", "junit", "html"])
def test_a_real_report_is_shown_in_each_form(
    form: str, source: Server, target: Server, tmp_path: Path
) -> None:
    ran = mixed_run(source, target)
    file = tmp_path / "run.json"
    file.write_text(ran.out)
    told = run_regsync("report", str(file), "--to", form)
    assert (told.status, told.err) == (0, "")
    failures = [each for each in ran.images if each["status"] == "failed"]
    assert failures
    for each in failures:
        assert each["error"]["code"] in told.out
    assert told.out.endswith("\n")


@pytest.mark.new
def test_a_summary_is_the_markdown_of_the_run(
    source: Server, target: Server, tmp_path: Path
) -> None:
    Seed(1).image().load_into(source.app, "app", tag="v1")
    config, summary = tmp_path / "mirror.yaml", tmp_path / "summary.md"
    ends = {"source": source, "target": target}
    config.write_text(configuration(ends, {"from": "app", "tags": tags("v1")}))
    summary.write_text("of an earlier run")
    ran = run_regsync("sync", "--json", "-c", str(config), "--summary", str(summary))
    assert ran.status == 0
    assert summary.read_text() == shown(ran.report, "markdown")
    nowhere = run_regsync("sync", "-c", str(config), "--summary", str(tmp_path / "none" / "x"))
    assert (nowhere.status, "its directory does not exist" in nowhere.err) == (3, True)


def test_what_is_held_back_is_counted_with_the_next_moment() -> None:
    held = {"status": "skipped", "reason": "min_age"}
    later, sooner = (f"2026-11-2{day}T00:00:00Z" for day in (9, 6))
    document = report_of(image(1), image(2, until=later, **held), image(3, until=sooner, **held))
    assert f"next {sooner}" in shown(document, "markdown")
    assert "Skipped, min_age" in shown(document, "html")
    assert "Held" not in shown(report_of(image(1)))


def test_the_figures_are_a_table_in_markdown() -> None:
    document = report_of(image(1), failed(2), failed(3))
    rendered = MarkdownIt("commonmark").enable("table").render(shown(document))
    page = html5lib.parse(rendered, namespaceHTMLElements=False)
    rows = [[" ".join(cell.itertext()) for cell in row.iter("td")] for row in page.iter("tr")]
    assert rows[1:] == [
        ["Images", "2 failed, 1 synced"],
        ["Layers", "6 transferred (4 unique), 2 mounted"],
        ["Data", "2.0 KB transferred"],
        ["Saved", "11.4 GB: 8.1 GB already there, 3.3 GB mounted"],
        ["Time", "1m00s from 2026-11-23T03:04:05Z"],
        ["docker.io", "2 requests (2 manifest_get)"],
        ["mirror.example", "2 requests (2 manifest_put), 5 of them throttled (429)"],
    ]


def test_failures_come_first_in_markdown_and_are_listed_by_cause() -> None:
    text = shown(report_of(image(1), failed(2), failed(3), failed(4, "no such thing")), "markdown")
    assert text.startswith("## regsync: 3 failed, 1 synced\n")
    page = html5lib.parse(
        MarkdownIt("commonmark", {"html": False}).render(text), namespaceHTMLElements=False
    )
    headings = ["".join(each.itertext()) for each in page.iter("h3")]
    assert headings == ["2 images: AUTH_ERROR", "1 image: AUTH_ERROR"]
    assert text.index("no such thing") < text.index("1 synced</summary>")


def test_a_report_of_an_earlier_version_is_read() -> None:
    """Fields may be added within schema 1, so that older reports lack some."""
    report = report_of(image(1), failed(2))
    del report["totals"]["saved"]
    for each in report["images"]:
        del each["started_s"]
    del report["images"][1]["error"]["hint"]
    assert "Saved" not in shown(report)
    assert "When images were copied" not in shown(report, "html")


def test_what_an_interrupted_run_has_left_is_named_in_each_form() -> None:
    undone = {
        "source": "docker.io/team/app:v9",
        "target": "mirror.example/team/app:v9",
        "status": "undone",
    }
    report = report_of(image(1), interrupted=True, undone=[undone])
    for form in ("markdown", "html"):
        text = shown(report, form)
        assert "docker.io/team/app:v9" in text
        assert "interrupted" in text
    (error,) = ElementTree.fromstring(shown(report, "junit")).iter("error")
    assert error.get("type") == "UNDONE"


def test_a_dry_run_says_that_nothing_was_changed() -> None:
    report = report_of(image(1, status="would_sync"), dry_run=True)
    report["totals"]["images"] = {"synced": 0, "skipped": 0, "failed": 0, "would_sync": 1}
    for form in ("markdown", "html"):
        text = shown(report, form)
        assert "1 would be synced" in text
        assert "nothing was changed" in text


# JUnit.


def test_junit_has_a_suite_a_mapping_and_a_case_an_image_and_target() -> None:
    report = report_of(
        image(1),
        image(2, status="skipped", reason="unchanged"),
        image(3, status="skipped", reason="immutable_tag"),
        failed(4),
        image(5, target="other.example/team/app:v5"),
    )
    root = ElementTree.fromstring(shown(report, "junit"))
    assert root.tag == "testsuites"
    (suite,) = root.iter("testsuite")
    assert suite.get("name") == "docker.io/team/app to team/app"
    counts = {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "5", "failures": "1", "errors": "0", "skipped": "1"}
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert [name for name, case in cases.items() if len(case) == 0] == ["v1", "v2", "v5"]
    assert cases["v5"].get("classname") == "other.example/team/app"
    (failure,) = cases["v4"]
    assert failure.get("type") == "AUTH_ERROR"
    assert "log in again" in str(failure.text)


def test_an_image_layout_is_named_whole_where_registries_have_their_host() -> None:
    disk = {"target": "oci-layout:/media/disk//team/app:v1"}
    report = report_of(image(1, **disk), failed(2, "no room", **{"target": disk["target"]}))
    (suite,) = ElementTree.fromstring(shown(report, "junit")).iter("testsuite")
    assert (suite.get("name"), len(suite)) == ("docker.io/team/app to team/app", 2)
    assert {case.get("classname") for case in suite} == {"oci-layout:/media/disk//team/app"}
    assert "<h3><code>oci-layout:/media/disk</code>" in shown(report, "html")


# HTML.


def parsed(page: str) -> Any:
    return html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(page)


def test_the_page_is_html_without_scripts_or_anything_to_load() -> None:
    page = shown(report_of(image(1), failed(2)), "html")
    tree = parsed(page)
    tags = {each.tag for each in tree.iter() if isinstance(each.tag, str)}
    assert not tags & {"script", "img", "link", "iframe", "object", "a", "form", "svg"}
    attributes = {name for each in tree.iter() for name in each.attrib}
    assert not {name for name in attributes if name.startswith("on")} | attributes & {"src", "href"}
    assert "url(" not in page
    (policy,) = [
        each.get("content") for each in tree.iter("meta") if each.get("http-equiv") is not None
    ]
    assert policy.startswith("default-src 'none'")


def bars(page: str) -> list[dict[str, float]]:
    """Return left, width and top of each bar of the timelines."""
    found = re.findall(r'class="bar[^"]*" style="left:([\d.]+)%;width:([\d.]+)%;top:(\d+)px', page)
    return [
        {"left": float(left), "width": float(width), "top": float(top)}
        for left, width, top in found
    ]


def test_the_timeline_draws_each_image_where_it_was_and_no_two_over_each_other() -> None:
    images = [image(number, started_s=number * 3.0, duration_s=9.0) for number in range(12)]
    drawn = bars(shown(report_of(*images, image(99, status="skipped")), "html"))
    assert [bar["left"] for bar in sorted(drawn, key=lambda bar: bar["left"])] == [
        number * 5.0 for number in range(12)
    ]
    assert {bar["width"] for bar in drawn} == {15.0}
    assert len({bar["top"] for bar in drawn}) == 3
    for one in drawn:
        for other in drawn:
            if one is not other and one["top"] == other["top"]:
                assert abs(one["left"] - other["left"]) >= 15.0


def test_each_registry_has_a_timeline_which_says_what_it_leaves_out() -> None:
    many = [image(number, bytes=number, duration_s=0.01) for number in range(401)]
    page = shown(report_of(*many, image(7, target="other.example/x:1")), "html")
    assert page.count('class="lanes"') == 2
    assert len(bars(page)) == 401
    assert "the 400 that moved most are drawn" in page


# Hostile reports.


@pytest.fixture
def hostile() -> dict[str, Any]:
    bad = failed(
        1, HOSTILE, source=f"docker.io/{HOSTILE}:v1", target=f"mirror.example/{HOSTILE}:v1"
    )
    bad["error"]["hint"] = HOSTILE
    bad["error"]["code"] = HOSTILE
    good = image(2, source=f"docker.io/{HOSTILE}:v2", reason=HOSTILE)
    report = report_of(bad, good, image(3, status="skipped", reason=HOSTILE))
    report["run_id"] = HOSTILE
    report["started_at"] = HOSTILE
    report["mappings"][0].update({"from": HOSTILE, "to": HOSTILE, "dropped": {HOSTILE: 3}})
    report["totals"]["requests"] = {HOSTILE: {HOSTILE: 3}}
    report["totals"]["throttled"] = {HOSTILE: 3}
    return report


def texts(tree: Any) -> str:
    return " ".join("".join(tree.itertext()).split())


def test_hostile_text_stays_text_on_the_page(hostile: dict[str, Any]) -> None:
    tree = parsed(shown(hostile, "html"))
    tags = {each.tag for each in tree.iter() if isinstance(each.tag, str)}
    assert not tags & {"script", "img", "a", "strike"}
    assert HOSTILE in texts(tree)


def test_hostile_text_stays_text_in_markdown(hostile: dict[str, Any]) -> None:
    text = shown(hostile, "markdown")
    # What this program opens and closes itself is the only HTML.
    outside_code = re.sub(r"(`+) .*? \1|`[^`]*`", "", text)
    own = {"<details>", "</details>", "<summary>", "</summary>"}
    assert {*re.findall(r"<[/!]?\w[^>]*>", outside_code)} == own
    # Nothing that a service turns into a link or a mention, whatever Markdown says of it.
    assert not re.search(r"@somebody|https://evil|(?<!\\)#1", outside_code)

    rendered = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text)
    tree = html5lib.parse(rendered, namespaceHTMLElements=False)
    tags = {each.tag for each in tree.iter() if isinstance(each.tag, str)}
    assert not tags & {"script", "img", "a", "s", "em"}
    assert HOSTILE in texts(tree)
    assert {"".join(each.itertext()) for each in tree.iter("strong")} == {"Remedy:"}
    assert {len(row) for row in tree.iter("tr")} == {2}


def test_hostile_text_stays_text_in_junit(hostile: dict[str, Any]) -> None:
    root = ElementTree.fromstring(shown(hostile, "junit"))
    (failure,) = root.iter("failure")
    assert failure.get("type") == HOSTILE
    assert HOSTILE in str(failure.text)
    assert {each.tag for each in root.iter()} == {
        "testsuites",
        "testsuite",
        "testcase",
        "failure",
        "skipped",
    }


@pytest.mark.parametrize("form", ["markdown", "junit", "html"])
def test_no_control_character_and_no_half_of_a_pair_is_written(form: str) -> None:
    report = failed(1, "\x1b[31m \r\n \u202e \ufffe \ud800 \x00 end")
    ran = show(report_of(report), form)
    assert ran.status == 0
    assert not set("\x1b\r\u202e\x00\ud800") & set(ran.out)
    assert "end" in ran.out
    if form == "junit":
        ElementTree.fromstring(ran.out)


def test_markdown_stays_below_what_ci_services_take_and_says_so() -> None:
    images = [
        image(number, source=f"docker.io/{'long/' * 40}app:{number}") for number in range(6000)
    ]
    text = shown(report_of(failed(1), *images), "markdown")
    assert len(text.encode()) < 1024 * 1024
    assert re.search(r"\d+ more lines are left out", text)
    assert text.count("<details>") == text.count("</details>")
    assert "AUTH" in text


# What is no report.


def drop(path: str) -> Callable[[dict[str, Any]], None]:
    def change(report: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for name in parents:
            report = report[name]
        del report[last]

    return change


def put(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(report: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        place: Any = report
        for name in parents:
            place = place[int(name)] if name.isdigit() else place[name]
        place[last] = value

    return change


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (drop("images"), "images is not a list"),
        (put("images", {}), "images is not a list"),
        (put("images.0.bytes", "many"), "images[0]: bytes is not a whole number"),
        (put("images.0.bytes", True), "images[0]: bytes is not a whole number"),
        (put("images.0.bytes", -1), "images[0]: bytes is not a count"),
        (put("images.0.bytes", 10**400), "images[0]: bytes is not a count"),
        (put("images.0.duration_s", float("nan")), "duration_s is not a number of seconds"),
        (put("images.0.duration_s", 10**400), "duration_s is not a number of seconds"),
        (put("images.0.status", "done"), "status is not a status that this version knows"),
        (put("images.0.source", None), "images[0]: source is not text"),
        (put("images.0.error", "denied"), "images[0]: error is not an object"),
        (put("totals.requests", []), "totals: requests is not an object"),
        (put("interrupted", 1), "interrupted is not true or false"),
        (put("schema", 2), "its `schema` is 2, and only 1 can be read"),
        (drop("schema"), "its `schema` is None, and only 1 can be read"),
    ],
)
def test_what_is_wrong_with_a_report_is_named(
    spoil: Callable[[dict[str, Any]], None], said: str
) -> None:
    report = report_of(image(1))
    spoil(report)
    ran = show(report, "html")
    assert (ran.status, ran.out) == (3, "")
    assert said in ran.err
    assert "sync --json" in ran.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        ("nothing", "standard input is not a JSON document"),
        ("[" * 100_000, "standard input is not a JSON document"),
        ("[]", "standard input is not an object"),
        ('{"schema": 1}\n{"schema": 1}\n', "a document on each line"),
        (
            '{"schema": 1, "error": {"code": "CONFIG_ERROR", "message": "no such file"}}',
            "before it tried any: no such file",
        ),
        ('{"schema": 1, "tags": []}', "totals is not an object"),
    ],
)
def test_what_is_no_report_is_refused_in_one_line(text: str, said: str) -> None:
    ran = show(text)
    assert (ran.status, ran.out) == (3, "")
    assert said in ran.err
    assert "Traceback" not in ran.err


def test_a_file_that_is_not_there_is_named() -> None:
    ran = run_regsync("report", "/nowhere/run.json")
    assert ran.status == 3
    assert "/nowhere/run.json" in ran.err
    assert "No such file" in ran.err
