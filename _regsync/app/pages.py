"""The JSON report of a run as Markdown for a CI job, as JUnit XML, and as an HTML page.

A checked report is its JSON document, read by the names that tests/report.schema.json has.

Invariants: a report is untrusted. The type of every value is checked, every text becomes one line
without control characters, and no text becomes markup. Markdown stays below 1 MB, the limit of CI
services. The page has no scripts and loads nothing; it can be read at a width of 400 pixels, in
light and dark mode, and without colours.
Follows: docs/design.md section 15.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any, NamedTuple, TypeAlias

from _regsync.errors import ConfigError
from _regsync.oci import full_name, split_full_name
from _regsync.sync.report import general_message
from _regsync.text import duration_text, printable, size_text

LARGEST_REPORT = 256 * 1024 * 1024  # bytes; 100,000 images take 70 MB

_LONGEST_TEXT = 2000  # characters; a longer text is cut

_LARGEST_NUMBER = 2**53  # the largest that every JSON reader represents exactly

# Bytes. GitHub accepts 1 MiB for the summary of one step, to which a job may add text of its own.
_LARGEST_MARKDOWN = 900_000

_MOST_ROWS = 5000  # rows in one table of the page

_MOST_BARS = 400  # in one timeline. If there are more images, those with the most bytes are drawn.

_HINT = "use what `regsync sync --json` or `regsync copy --json` wrote"

_STATUSES = ("synced", "skipped", "failed", "would_sync")

# The words for each status, in the order of a headline.
_STATUS_WORDS = {
    "failed": "failed",
    "undone": "left undone",
    "synced": "synced",
    "would_sync": "would be synced",
    "skipped": "skipped",
}

Json: TypeAlias = dict[str, Any]  # a checked report, or a part of it


# Reading. A shape says what a value has to be: a type (`int` is a count, `float` are seconds), a
# tuple of the texts that are known, a list of the shape of its elements, or a dict of the shapes of
# its fields. A field whose name ends in `?` may be null or missing; `*` are fields of any name.

_FAILURE = {"code": str, "message": str, "hint?": str}

_IMAGE = {
    "source": str,  # references with hosts
    "target": str,
    "status": _STATUSES,
    "reason?": str,  # why it was skipped
    "until?": str,  # when `min_age` will no longer hold it back, in RFC 3339
    "error?": _FAILURE,
    "bytes": int,  # sent to the target
    "started_s?": float,  # since the run's start; missing in reports of old versions
    "duration_s": float,
    "blobs": {"transferred": int, "mounted": int, "skipped": int},
}

_RUN = {
    "totals": {
        "images": {"*": int},  # by status
        "layers": {"transferred": int, "unique": int, "mounted": int},
        "bytes": int,
        "saved?": {"present": int, "mounted": int},  # bytes
        "requests": {"*": {"*": int}},  # by host and action
        "throttled": {"*": int},  # by host
    },
    "images": [_IMAGE],
    "undone?": [{"source": str, "target": str}],
    "run_id": str,
    "started_at": str,
    "duration_s": float,
    "interrupted": bool,
    "dry_run": bool,
}

# What an image that was left undone has beside its names.
_UNDONE = {
    "status": "undone",
    **dict.fromkeys(("reason", "until", "error", "started_s")),
    "bytes": 0,
    "duration_s": 0.0,
    "blobs": dict.fromkeys(("transferred", "mounted", "skipped"), 0),
}


def read_report(data: bytes, name: str) -> Json:
    """Parse the report of a run. Raises ConfigError if `data` is not such a report.

    `name` is the name of the file, for errors. The images that were left undone follow the others.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = _why_not_json(data, error)
        raise ConfigError(f"{name} is not a JSON document: {reason}", hint=_HINT) from error
    return check_report(document, name)


def check_report(document: object, name: str) -> Json:
    """Check the document of a run, like `read_report`."""
    if not isinstance(document, dict):
        raise _mismatch_error(name, "an object")
    schema = document.get("schema")
    if schema != 1:
        reason = f"its `schema` is {printable(repr(schema), 40)}, and only 1 can be read"
        raise ConfigError(f"{name} is not a report of a run: {reason}", hint=_HINT)
    if document.get("error") is not None:
        error = _checked(document["error"], {"message": str}, f"{name}: error")
        reason = f"its command ended before it tried any: {error['message']}"
        raise ConfigError(f"{name} has no images: {reason}", hint=_HINT)

    run: Json = _checked(document, _RUN, name)
    run["totals"]["saved"] = run["totals"]["saved"] or {"present": 0, "mounted": 0}
    run["images"] += [{**_UNDONE, **image} for image in run["undone"] or ()]
    return run


def _checked(value: object, shape: Any, place: str) -> Any:
    """Return a value as its shape describes it. Raises ConfigError, which names the place."""
    if isinstance(shape, list):
        if not isinstance(value, list):
            raise _mismatch_error(place, "a list")
        return [_checked(each, shape[0], f"{place}[{i}]") for i, each in enumerate(value)]
    if not isinstance(shape, dict):
        return _checked_value(value, shape, place)
    if not isinstance(value, dict):
        raise _mismatch_error(place, "an object")
    fields: Json = {}
    if "*" in shape:
        for key, each in value.items():
            name = _checked_value(key, str, place)
            fields[name] = _checked(each, shape["*"], f"{place}: {name}")
        return fields
    for key, each in shape.items():
        name = key.removesuffix("?")
        found = value.get(name)
        is_left_out = name != key and found is None
        fields[name] = None if is_left_out else _checked(found, each, f"{place}: {name}")
    return fields


def _checked_value(value: Any, shape: Any, place: str) -> Any:
    """Return a value that is no list and no object, like `_checked`."""
    if isinstance(shape, tuple):
        if value not in shape:
            raise _mismatch_error(place, "a status that this version knows")
        return value
    if type(value) is not shape and (shape is not float or type(value) is not int):
        words = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
        raise _mismatch_error(place, words[shape])
    if shape is str:
        # JSON can contain half of a surrogate pair, which cannot be encoded.
        return printable(value.encode("utf-8", "replace").decode(), _LONGEST_TEXT)
    if not 0 <= value < _LARGEST_NUMBER:  # nor is NaN, which `json` accepts
        raise _mismatch_error(place, "a count" if shape is int else "a number of seconds")
    return shape(value)


def _mismatch_error(place: str, expected: str) -> ConfigError:
    return ConfigError(f"{place} is not {expected}", hint=_HINT)


def _why_not_json(data: bytes, error: Exception) -> str:
    """Describe why a file is not a JSON document, given the parser's error."""
    if not data.strip():
        return "it is empty"
    first_lines = data.strip().split(b"\n", 2)[:2]
    if len(first_lines) == 2 and all(line.startswith(b"{") for line in first_lines):
        return "it has a document on each line, as `watch` writes them; use one of the lines"
    return printable(str(error), 100)


# What all forms say.


def with_status(run: Json, *statuses: str) -> list[Json]:
    """Return the images with one of the statuses, in the order of the report."""
    return [image for image in run["images"] if image["status"] in statuses]


class Cause(NamedTuple):
    """The common cause of failures, and the images that failed because of it."""

    code: str
    message: str  # without the names of the images
    hint: str | None
    images: Sequence[Json]


def _count(images: Sequence[Json]) -> str:
    return "1 image" if len(images) == 1 else f"{len(images)} images"


def causes_of(run: Json) -> list[Cause]:
    """Return the causes of all failures, the most frequent first."""
    images_by_cause = defaultdict[tuple[str, str, str | None], list[Json]](list)
    for image in run["images"]:
        if error := image["error"]:
            message = general_message(error["message"], image["source"], image["target"])
            images_by_cause[error["code"], message, error["hint"]].append(image)
    causes = [Cause(*cause, images) for cause, images in images_by_cause.items()]
    return sorted(causes, key=lambda cause: -len(cause.images))


def headline(run: Json) -> str:
    """Format the number of images by status: `3 failed, 12 synced, 85 skipped`."""
    counts = run["totals"]["images"]
    parts = [
        f"{counts[status]} {word}" for status, word in _STATUS_WORDS.items() if counts.get(status)
    ]
    return ", ".join(parts) or "nothing to do"


def notes(run: Json) -> list[str]:
    """Return sentences about a dry run or an interrupted run, which the figures do not show."""
    texts = []
    if run["dry_run"]:
        texts.append("A dry run: nothing was changed.")
    if run["interrupted"]:
        texts.append("The run was interrupted; images left undone are not in the figures.")
    return texts


def facts(run: Json) -> list[tuple[str, str]]:
    """Return the figures of a run as pairs of a name and a value, the registries last."""
    totals = run["totals"]
    layers = totals["layers"]
    present, mounted = totals["saved"]["present"], totals["saved"]["mounted"]
    # Times in UTC sort as texts.
    held_until = [image["until"] for image in run["images"] if image["until"] is not None]

    lines = [("Images", headline(run))]
    if held_until:
        lines.append(("Held", f"{len(held_until)} (next {min(held_until)})"))
    transferred = f"{layers['transferred']} transferred ({layers['unique']} unique)"
    lines.append(("Layers", f"{transferred}, {layers['mounted']} mounted"))
    lines.append(("Data", f"{size_text(totals['bytes'])} transferred"))
    if present or mounted:
        parts = f"{size_text(present)} already there, {size_text(mounted)} mounted"
        lines.append(("Saved", f"{size_text(present + mounted)}: {parts}"))
    lines.append(("Time", f"{duration_text(run['duration_s'])} from {run['started_at']}"))
    for host, counts in totals["requests"].items():
        which = ", ".join(f"{count} {action}" for action, count in counts.items())
        text = f"{sum(counts.values())} requests ({which})"
        if throttled := totals["throttled"].get(host):
            text += f", {throttled} of them throttled (429)"
        lines.append((host, text))
    return lines


# Markdown.

_END_DETAILS = "\n</details>\n"


def as_markdown(run: Json) -> str:
    """Format the report in GitHub's Markdown, failures first. What does not fit is counted."""
    lines = [*_markdown_lines(run)]
    size = 0  # bytes
    for number, line in enumerate(lines):
        size += len(line.encode()) + 1
        if size <= _LARGEST_MARKDOWN:
            continue
        kept = lines[:number]
        if sum(each.startswith("<details>") for each in kept) > kept.count(_END_DETAILS):
            kept.append(_END_DETAILS)
        omitted = f"{len(lines) - number} more lines are left out: they are in the report."
        return "\n".join([*kept, omitted]) + "\n"
    return "\n".join(lines) + "\n"


def _markdown_lines(run: Json) -> Iterator[str]:
    yield f"## regsync: {headline(run)}\n"
    for note in notes(run):
        yield f"*{note}*\n"
    for cause in causes_of(run):
        yield f"### {_count(cause.images)}: {_span(cause.code)}\n"
        yield f"{_markdown(cause.message)}\n"
        if cause.hint:
            yield f"**Remedy:** {_markdown(cause.hint)}\n"
        for image in cause.images:
            yield f"- {_span(image['source'])} to {_span(image['target'])}"
        yield ""

    yield "| | |\n|---|---|"
    for name, value in facts(run):
        yield f"| {_markdown(name)} | {_markdown(value)} |"
    yield ""

    for status in ("undone", "synced", "would_sync"):
        images = with_status(run, status)
        if not images:
            continue
        yield f"<details><summary>{len(images)} {_STATUS_WORDS[status]}</summary>\n"
        for image in images:
            cost = f" ({size_text(image['bytes'])}, {duration_text(image['duration_s'])})"
            names = f"- {_span(image['source'])} to {_span(image['target'])}"
            yield names if status == "undone" else names + cost
        yield _END_DETAILS


def _markdown(text: str) -> str:
    """Escape a text for Markdown, including the cells of a table."""
    escaped = escape(text, quote=False)
    # Prevent links to URLs and mentions of users.
    escaped = escaped.replace("://", ":&#47;&#47;").replace("@", "&#64;")
    return re.sub(r"([\\`*_\[\]{}()#|~!])", r"\\\1", escaped)


def _span(text: str) -> str:
    """Format a text as a code span, in which Markdown makes no links and no mentions."""
    # The delimiter has to be longer than every run of backticks in the text.
    longest = max(map(len, re.findall("`+", text)), default=0)
    delimiter = "`" * (longest + 1)
    return f"{delimiter} {text} {delimiter}" if longest else f"`{text}`"


# JUnit.


def as_junit(run: Json) -> str:
    """Format the report as JUnit XML: a suite for each pair of repositories, a case for each image
    and target.

    A case has passed if the image is at the target, including an image that was there unchanged.
    """
    suites = defaultdict[str, list[Json]](list)
    for image in run["images"]:
        _, target = split_full_name(_repository_of(image["target"]))
        suites[f"{_repository_of(image['source'])} to {target}"].append(image)

    lines = ['<?xml version="1.0" encoding="UTF-8"?>']
    lines.append(f"<testsuites {_junit_counts('regsync', run['images'], run['duration_s'])}>")
    for name, images in suites.items():
        seconds = sum(image["duration_s"] for image in images)
        lines.append(f"<testsuite {_junit_counts(name, images, seconds)}>")
        lines += map(_junit_case, images)
        lines.append("</testsuite>")
    lines.append("</testsuites>")
    return "".join(f"{line}\n" for line in lines)


def _repository_of(reference: str) -> str:
    """Return a reference without its tag or digest."""
    host, name = split_full_name(reference)
    return full_name(host, re.split("[@:]", name)[0])


def _junit_counts(name: str, images: Sequence[Json], seconds: float) -> str:
    counts = Counter(image["status"] for image in images)
    held_back = sum(map(_is_held_back, images))
    return (
        f'name="{_xml(name)}" time="{seconds:.3f}" tests="{len(images)}"'
        f' failures="{counts["failed"]}" errors="{counts["undone"]}" skipped="{held_back}"'
    )


def _is_held_back(image: Json) -> bool:
    """Report whether an image was skipped for another reason than being at the target already."""
    return bool(image["status"] == "skipped" and image["reason"] != "unchanged")


def _junit_case(image: Json) -> str:
    source, target = image["source"], image["target"]
    name = source.removeprefix(_repository_of(source)).lstrip("@:") or source
    result = ""
    if error := image["error"]:
        detail = _xml(f"{source} to {target}\n{error['hint'] or ''}".strip())
        attributes = f'type="{_xml(error["code"])}" message="{_xml(error["message"])}"'
        result = f"<failure {attributes}>{detail}</failure>"
    elif image["status"] == "undone":
        result = '<error type="UNDONE" message="the run was interrupted before"/>'
    elif _is_held_back(image):
        result = f'<skipped message="{_xml(image["reason"] or "skipped")}"/>'
    return (
        f'<testcase classname="{_xml(_repository_of(target))}" name="{_xml(name)}"'
        f' time="{image["duration_s"]:.3f}">{result}</testcase>'
    )


def _xml(text: str) -> str:
    # Texts of a report can contain these two characters, which XML 1.0 forbids.
    return escape(re.sub("[\ufffe\uffff]", "?", text))


# The page.

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #5b6475; --paper: #ffffff; --line: #d8dce4;
  --panel: #f5f6f9; --moved: #2f6fde; --present: #9aa5b8; --mounted: #43a488; --failed: #c23b35; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9f0; --soft: #a3acbd; --paper: #14171d;
  --line: #343b49; --panel: #1c2129; --moved: #6f9ff2; --present: #67728a; --mounted: #5cc0a2;
  --failed: #f07a73; } }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem 1rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
p { margin: .25rem 0; }
.soft, dt, .ticks { color: var(--soft); font-size: .9rem; }
.facts, .key { display: flex; flex-wrap: wrap; gap: .75rem 1.5rem; padding: 0; list-style: none; }
.facts div, .share, .lanes, .cause { background: var(--panel); border-radius: .3rem; padding: .6rem; }
.facts dd { margin: 0; font-weight: 600; }
.cause { border-left: .25rem solid var(--failed); margin: .75rem 0; }
.share { display: flex; height: 1.5rem; padding: 0; overflow: hidden; }
.key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem; }
.moved, .bar { background: var(--moved); }
.mounted { background: var(--mounted); }
.present { background: var(--present); }
i.failed, .bar.failed { background: repeating-linear-gradient(45deg, var(--failed) 0 3px, #0005 3px 5px); }
.lanes { position: relative; overflow: hidden; }
.bar { position: absolute; border-radius: 2px; min-width: 2px; }
.ticks { display: flex; justify-content: space-between; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: max-content; min-width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .75rem .3rem 0; max-width: 36rem;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
code { font: .9em/1.4 ui-monospace, monospace; }
"""

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>regsync: {title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def as_page(run: Json) -> str:
    """Format the report as an HTML page."""
    sections = (_figures, _causes, _share, _timelines, _images)
    body = "\n".join(line for section in sections for line in section(run))
    return _PAGE.format(title=escape(headline(run)), style=_STYLE, body=body)


def _figures(run: Json) -> Iterator[str]:
    yield f"<h1>{escape(headline(run).capitalize())}</h1>"
    yield f'<p class="soft">regsync, run {escape(run["run_id"])}</p>'
    for note in notes(run):
        yield f"<p><strong>{escape(note)}</strong></p>"
    yield '<dl class="facts">'
    for name, value in facts(run):
        yield f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
    yield "</dl>"


def _causes(run: Json) -> Iterator[str]:
    causes = causes_of(run)
    if causes:
        yield "<h2>Why images failed</h2>"
    for cause in causes:
        yield f'<section class="cause"><p><strong>{_count(cause.images)}: {escape(cause.code)}</strong></p>'
        yield f"<p>{escape(cause.message)}</p>"
        if cause.hint:
            yield f"<p><strong>Remedy:</strong> {escape(cause.hint)}</p>"
        rows = [(*_names(image), escape(image["error"]["message"])) for image in cause.images]
        yield from _table("Which", ("Source", "Target", "Message"), rows)
        yield "</section>"


def _share(run: Json) -> Iterator[str]:
    """Yield a bar with the shares of moved, mounted and present bytes."""
    totals = run["totals"]
    # (CSS class, words for the reader, bytes).
    shares = [
        ("moved", "would be moved" if run["dry_run"] else "moved", totals["bytes"]),
        ("mounted", "mounted from another repository of the target", totals["saved"]["mounted"]),
        ("present", "at the target already", totals["saved"]["present"]),
    ]
    total = sum(size for _, _, size in shares)
    if total == 0:
        return
    yield '<h2>Moved and saved</h2><div class="share">'
    for css_class, _, size in shares:
        yield f'<span class="{css_class}" style="width:{100 * size / total:.2f}%"></span>'
    yield '</div><ul class="key">'
    for css_class, words, size in shares:
        text = f"{size_text(size)} {words} ({100 * size / total:.0f} %)"
        yield f'<li><i class="{css_class}"></i>{text}</li>'
    yield "</ul>"
    yield (
        '<p class="soft">A blob counts once for each target repository; images that were there'
        " unchanged do not count.</p>"
    )


def _timelines(run: Json) -> Iterator[str]:
    """Yield a timeline for each target registry, with the images that were synced or failed."""
    images_by_registry = defaultdict[str, list[Json]](list)
    for image in with_status(run, "synced", "failed"):
        if image["started_s"] is not None:
            registry, _ = split_full_name(image["target"])
            images_by_registry[registry].append(image)
    if not images_by_registry:
        return
    yield "<h2>When images were copied</h2>"
    yield '<ul class="key"><li><i class="moved"></i>copied</li><li><i class="failed"></i>failed</li></ul>'
    for registry, images in sorted(images_by_registry.items()):
        drawn = heapq.nlargest(
            _MOST_BARS, images, key=lambda each: (each["bytes"], each["duration_s"])
        )
        text = f"{_count(images)}, {size_text(sum(image['bytes'] for image in images))}"
        if len(drawn) < len(images):
            text += f"; the {len(drawn)} that moved most are drawn"
        yield f'<h3><code>{escape(registry)}</code> <span class="soft">{text}</span></h3>'
        yield from _timeline(drawn, run["duration_s"])


def _timeline(images: Sequence[Json], duration: float) -> Iterator[str]:
    """Yield a bar for each image, from its start to its end, in lanes without overlaps.

    The timeline is `duration` seconds long. Below it are the times.
    """
    lanes = _in_lanes(images)
    # Pixels. With many lanes the bars are thin, so that the timeline fits on a screen.
    lane_height = max(4, min(16, 400 // len(lanes)))
    percent_per_second = 100 / max(duration, 0.001)  # the timeline's width is 100 %
    yield f'<div class="lanes" style="height:{lane_height * len(lanes) + 2}px">'
    for number, lane in enumerate(lanes):
        vertical = f"top:{lane_height * number + 2}px;height:{lane_height - 2}px"
        for image in lane:
            left = percent_per_second * image["started_s"]
            width = max(0.25, percent_per_second * image["duration_s"])  # less could not be seen
            times = f"{duration_text(image['started_s'])} to {duration_text(_end(image))}"
            title = f"{image['source']}: {image['status']}, {times}, {size_text(image['bytes'])}"
            css_class = "bar failed" if image["status"] == "failed" else "bar"
            style = f"left:{left:.2f}%;width:{width:.2f}%;{vertical}"
            yield f'<div class="{css_class}" style="{style}" title="{escape(title)}"></div>'
    ticks = [f"<span>{duration_text(duration * quarter / 4)}</span>" for quarter in range(5)]
    yield f'</div><div class="ticks">{"".join(ticks)}</div>'


def _in_lanes(images: Iterable[Json]) -> list[list[Json]]:
    """Assign each image to a lane that is free at the image's start, or to a new lane."""
    lanes = list[list[Json]]()
    for image in sorted(images, key=lambda each: float(each["started_s"])):
        first_to_end = min(lanes, key=lambda lane: _end(lane[-1]), default=None)
        if first_to_end is not None and _end(first_to_end[-1]) <= image["started_s"]:
            first_to_end.append(image)
        else:
            lanes.append([image])
    return lanes


def _end(image: Json) -> float:
    return float(image["started_s"] + image["duration_s"])


def _images(run: Json) -> Iterator[str]:
    """Yield a table for each status but `failed`, and one for each reason to skip images."""
    yield "<h2>Images</h2>"
    rows = defaultdict[str, list[tuple[str, ...]]](list)  # by the title of their table
    for image in sorted(run["images"], key=lambda image: -image["bytes"]):
        if image["status"] == "failed":  # told with its cause
            continue
        title = _STATUS_WORDS[image["status"]].capitalize()
        if image["reason"]:
            title += f", {image['reason']}"
        blobs = "{transferred} moved, {mounted} mounted, {skipped} there".format(**image["blobs"])
        cost = (size_text(image["bytes"]), duration_text(image["duration_s"]), blobs)
        rows[title].append((*_names(image), *cost))
    for title, rows_of_title in sorted(rows.items()):
        yield from _table(title, ("Source", "Target", "Bytes", "Time", "Blobs"), rows_of_title)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a table of cells in HTML, which is hidden until the reader opens it."""
    yield f"<details><summary>{escape(title)} ({len(rows)})</summary>"
    yield '<div class="scroll"><table>'
    yield f"<tr>{''.join(f'<th>{column}</th>' for column in columns)}</tr>"
    for row in rows[:_MOST_ROWS]:
        yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>"
    yield "</table></div>"
    if len(rows) > _MOST_ROWS:
        yield f"<p>{len(rows) - _MOST_ROWS} more are in the report.</p>"
    yield "</details>"


def _names(image: Json) -> tuple[str, str]:
    return f"<code>{escape(image['source'])}</code>", f"<code>{escape(image['target'])}</code>"
