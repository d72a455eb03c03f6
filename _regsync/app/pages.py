"""The JSON report of a run as Markdown for a CI job, as JUnit XML, and as an HTML page.

Markdown and the page are two ways to write one list of blocks.

Invariants: a report is untrusted. Every text goes through `_markdown`, `_html` or `_xml` where it is
written, so that it is one line without control characters, and never markup. Markdown stays below
1 MB, the limit of CI services. The page has no scripts and loads nothing; it can be read at a width
of 400 pixels, in light and dark mode.
Follows: docs/design.md section 15.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any, NamedTuple, TypeAlias

from _regsync.errors import ConfigError
from _regsync.text import duration_text, printable, size_text

LARGEST_REPORT = 256 * 1024 * 1024  # bytes; 100,000 images take 70 MB

# Bytes. GitHub accepts 1 MiB for the summary of one step, to which a job may add text of its own.
_LARGEST_MARKDOWN = 900_000

_HINT = (
    "use what `regsync sync --json` or `regsync copy --json` wrote, or one of the lines of"
    " `regsync watch --json`"
)

# The words for each status, in the order of a headline.
_STATUS_WORDS = {
    "failed": "failed",
    "undone": "left undone",
    "synced": "synced",
    "would_sync": "would be synced",
    "skipped": "skipped",
}

Json: TypeAlias = dict[str, Any]  # a report, or a part of it: see tests/report.schema.json


# Reading.


@contextmanager
def expecting_report(name: str) -> Iterator[None]:
    """Raise ConfigError for whatever fails in the block because a file is not a report of a run.

    `name` is the name of the file.
    """
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        text = f"{name} is not the JSON report of a run: {printable(reason, 200)}"
        raise ConfigError(text, hint=_HINT) from error


def read_report(data: bytes, name: str) -> Json:
    """Parse the report of a run. The images that were left undone follow the others.

    `name` is the name of the file, for errors. Raises ConfigError if `data` is not a report. Only the
    names and the status of each image are checked; whoever uses other fields has to expect a report.
    """
    with expecting_report(name):
        run: Json = json.loads(data)
        if run["schema"] != 1:
            raise ValueError(f"its `schema` is {run['schema']!r}, and only 1 can be read")
        if "error" in run:
            raise ValueError(f"its command ended before it tried any: {run['error']['message']}")
        run["images"] += run.get("undone", ())
        for image in run["images"]:
            names = image["source"], image["target"]
            if not all(isinstance(each, str) for each in names):
                raise ValueError("the name of an image is not text")
            if image["status"] not in _STATUS_WORDS:
                raise ValueError(f"this version does not know the status {image['status']!r}")
        return run


# What Markdown and the page say.


class Block(NamedTuple):
    """A heading, a text, and a table. The page and Markdown hide a folded one until it is opened."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: str = ""
    is_folded: bool = False


def title_of(run: Json) -> str:
    """Format the number of images by status: `regsync: 3 failed, 12 synced, 85 skipped`."""
    counts = run["totals"]["images"]
    parts = [
        f"{counts[status]} {word}" for status, word in _STATUS_WORDS.items() if counts.get(status)
    ]
    title = f"regsync: {', '.join(parts) or 'nothing to do'}"
    if run["dry_run"]:
        title += " (a dry run: nothing was changed)"
    if run["interrupted"]:
        title += " (interrupted)"
    return title


def blocks_of(run: Json) -> Iterator[Block]:
    """Yield what is told below the title: failures by cause, the figures, what was copied."""
    images_by_cause = defaultdict[tuple[str, str | None], list[Json]](list)
    for image in run["images"]:
        if error := image["error"]:
            images_by_cause[error["code"], error["hint"]].append(image)
    causes = sorted(images_by_cause.items(), key=lambda cause: -len(cause[1]))
    for (code, hint), images in causes:
        count = "1 image" if len(images) == 1 else f"{len(images)} images"
        rows = [(image["source"], image["target"], image["error"]["message"]) for image in images]
        text = f"Remedy: {hint}" if hint else ""
        yield Block(f"{count}: {code}", ("Source", "Target", "Message"), rows, text)

    yield Block("Figures", ("Figure", "Value"), [*figures_of(run)])

    for status in ("undone", "synced", "would_sync"):
        copied = [
            (
                image["source"],
                image["target"],
                size_text(image["bytes"]),
                duration_text(image["duration_s"]),
            )
            for image in run["images"]
            if image["status"] == status
        ]
        if copied:
            heading = f"{len(copied)} {_STATUS_WORDS[status]}"
            yield Block(heading, ("Source", "Target", "Bytes", "Time"), copied, is_folded=True)


def figures_of(run: Json) -> Iterator[tuple[str, str]]:
    """Yield the figures of a run as pairs of a name and a value, the registries last."""
    totals = run["totals"]
    layers = totals["layers"]
    present, mounted = totals["saved"]["present"], totals["saved"]["mounted"]
    # Times in UTC sort as texts.
    held_until = [image["until"] for image in run["images"] if image.get("until")]
    if held_until:
        yield "Held", f"{len(held_until)} (next {min(held_until)})"
    transferred = f"{layers['transferred']} transferred ({layers['unique']} unique)"
    yield "Layers", f"{transferred}, {layers['mounted']} mounted"
    yield "Data", f"{size_text(totals['bytes'])} transferred"
    yield "Saved", f"{size_text(present)} already there, {size_text(mounted)} mounted"
    yield "Time", f"{duration_text(run['duration_s'])} from {run['started_at']}"
    for host, counts in totals["requests"].items():
        which = ", ".join(f"{count} {action}" for action, count in counts.items())
        text = f"{sum(counts.values())} requests ({which})"
        if throttled := totals["throttled"].get(host):
            text += f", {throttled} of them throttled (429)"
        yield host, text


def _clean(text: str) -> str:
    """Return a text of a report on one line, without control characters. A long text is cut."""
    # JSON can contain half of a surrogate pair, which cannot be encoded.
    return printable(text, 2000).encode("utf-8", "replace").decode()


def _html(text: str) -> str:
    """Escape a text for HTML and XML."""
    return escape(_clean(text))


# Markdown.

_BEGIN_DETAILS = "<details>"
_END_DETAILS = "\n</details>\n"


def as_markdown(run: Json) -> str:
    """Format the report in GitHub's Markdown. What does not fit is counted."""
    lines = [*_markdown_lines(run)]
    size = 0  # bytes
    for number, line in enumerate(lines):
        size += len(line.encode()) + 1
        if size > _LARGEST_MARKDOWN:
            text = f"\n{len(lines) - number} more lines are left out: they are in the report."
            del lines[number:]
            if lines.count(_BEGIN_DETAILS) > lines.count(_END_DETAILS):
                lines.append(_END_DETAILS)
            lines.append(text)
            break
    return "\n".join(lines) + "\n"


def _markdown_lines(run: Json) -> Iterator[str]:
    yield f"## {_markdown(title_of(run))}\n"
    for block in blocks_of(run):
        heading = _markdown(block.heading)
        if block.is_folded:
            yield _BEGIN_DETAILS
            yield f"<summary>{heading}</summary>\n"
        else:
            yield f"### {heading}\n"
        if block.text:
            yield f"{_markdown(block.text)}\n"

        yield _markdown_row(block.columns)
        yield f"{'|---' * len(block.columns)}|"
        yield from map(_markdown_row, block.rows)
        yield _END_DETAILS if block.is_folded else ""


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_markdown, cells))} |"


def _markdown(text: str) -> str:
    """Escape a text for Markdown, including the cells of a table."""
    # Names have many underscores, which within a word begin no emphasis. `www.` would be a link.
    special = r"[\\`*\[\]#|~$]|(?<![A-Za-z0-9])_|(?<=www)\."
    escaped = escape(re.sub(special, r"\\\g<0>", _clean(text)))
    # Prevent links to URLs and mentions of users.
    return escaped.replace("://", ":&#47;&#47;").replace("@", "&#64;")


# JUnit.


def as_junit(run: Json) -> str:
    """Format the report as JUnit XML: a case for each image, which its target is the class of.

    A case has passed if the image is at the target, including an image that was there unchanged.
    """
    images = run["images"]
    counts = Counter(image["status"] for image in images)
    held_back = sum(map(_is_held_back, images))
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<testsuite name="regsync" time="{run["duration_s"]:.3f}" tests="{len(images)}"'
        f' failures="{counts["failed"]}" errors="{counts["undone"]}" skipped="{held_back}">',
        *map(_junit_case, images),
        "</testsuite>",
    ]
    return "".join(f"{line}\n" for line in lines)


def _is_held_back(image: Json) -> bool:
    """Report whether an image was skipped for another reason than being at the target already."""
    return bool(image["status"] == "skipped" and image["reason"] != "unchanged")


def _junit_case(image: Json) -> str:
    result = ""
    if error := image["error"]:
        attributes = f'type="{_xml(error["code"])}" message="{_xml(error["message"])}"'
        result = f"<failure {attributes}>{_xml(error['hint'] or '')}</failure>"
    elif image["status"] == "undone":
        result = '<error type="UNDONE" message="the run was interrupted before"/>'
    elif _is_held_back(image):
        result = f'<skipped message="{_xml(image["reason"] or "skipped")}"/>'
    return (
        f'<testcase classname="{_xml(image["target"])}" name="{_xml(image["source"])}"'
        f' time="{image["duration_s"]:.3f}">{result}</testcase>'
    )


def _xml(text: str) -> str:
    # Texts of a report can contain these two characters, which XML 1.0 forbids.
    return re.sub("[\ufffe\uffff]", "?", _html(text))


# The page.

_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; }
h2 { font-size: 1.2rem; margin-top: 2rem; }
summary { margin: 1rem 0; font-weight: bold; cursor: pointer; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th { text-align: left; }
th, td { vertical-align: top; padding: .3rem 1rem .3rem 0; border-bottom: 1px solid #8886; }
td:nth-child(-n+2) { min-width: 12rem; }
@media (max-width: 40rem) {
  tr { display: block; padding: .5rem 0; border-bottom: 1px solid #8886; }
  tr:first-child { display: none; }
  td { display: block; padding: 0; border: 0; }
  td:first-child { font-weight: bold; }
}
"""

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def as_page(run: Json) -> str:
    """Format the report as an HTML page."""
    body = "\n".join(map(_page_block, blocks_of(run)))
    return _PAGE.format(title=_html(title_of(run)), style=_STYLE, body=body)


def _page_block(block: Block) -> str:
    heading = _html(block.heading)
    rows = "\n".join(_page_row("td", row) for row in block.rows)
    table = f"<table>\n{_page_row('th', block.columns)}\n{rows}\n</table>"
    if block.is_folded:
        return f"<details><summary>{heading}</summary>\n{table}</details>"
    text = f"<p>{_html(block.text)}</p>\n" if block.text else ""
    return f"<h2>{heading}</h2>\n{text}{table}"


def _page_row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{_html(cell)}</{tag}>' for cell in cells)}</tr>"
