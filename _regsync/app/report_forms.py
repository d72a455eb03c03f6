"""A report as lines of text, as Markdown for a summary of a CI job, and as JUnit XML.

Owns: what each form shows, in which order, and how foreign text is kept text in it.
May not know: files, registries.
Invariants: no text of a report becomes markup. Markdown stays below the megabyte that CI services
take.
Follows: docs/design.md section 15.
"""

from __future__ import annotations

import html
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

from _regsync.app.report_file import Cause, ReportedImage, ReportedRun
from _regsync.oci.reference import full_name, split_full_name
from _regsync.text import duration_text, size_text

# Bytes. GitHub takes 1 MiB for the summary of one step; some is left to what a job writes beside it.
_LARGEST_MARKDOWN = 900_000

# What can be opened and closed in Markdown.
_BEGIN_DETAILS = "<details>"
_END_DETAILS = "\n</details>\n"

# What a reader calls each status.
STATUS_WORDS = {
    "synced": "synced",
    "would_sync": "would be synced",
    "skipped": "skipped",
    "failed": "failed",
    "undone": "left undone",
}


def headline(run: ReportedRun) -> str:
    """Return the result of a run in a few words: `3 failed, 12 synced, 85 skipped`."""
    order = ("failed", "undone", "synced", "would_sync", "skipped")
    counts = [(run.counts.get(status, 0), STATUS_WORDS[status]) for status in order]
    parts = [f"{count} {word}" for count, word in counts if count]
    return ", ".join(parts) if parts else "nothing to do"


def facts(run: ReportedRun) -> list[tuple[str, str]]:
    """Return what a summary says, as names and values."""
    blobs = f"{run.blobs_transferred} transferred ({run.blobs_unique} unique), {run.blobs_mounted} mounted"
    lines = [("Images", headline(run))]
    held = [image.until for image in run.images if image.until is not None]
    if held:
        lines.append(("Held", f"{len(held)} (next {min(held)})"))
    lines.append(("Layers", blobs))
    lines.append(("Data", f"{size_text(run.bytes)} transferred"))
    saved = saved_text(run)
    if saved:
        lines.append(("Saved", saved))
    lines.append(("Time", f"{duration_text(run.duration)} from {run.started_at}"))
    for host, actions in run.requests.items():
        text = f"{sum(actions.values())} requests"
        if run.throttled.get(host):
            text += f", {run.throttled[host]} of them throttled (429)"
        lines.append((host, text))
    return lines


def saved_text(run: ReportedRun) -> str:
    """Return what need not be sent: `11.4 GB: 8.1 GB already there, 3.3 GB mounted`; empty where that
    is nothing or not known.
    """
    present = run.bytes_present or 0
    mounted = run.bytes_mounted or 0
    if not present + mounted:
        return ""
    parts = [(present, "already there"), (mounted, "mounted")]
    details = [f"{size_text(count)} {word}" for count, word in parts if count]
    return f"{size_text(present + mounted)}: {', '.join(details)}"


def notes(run: ReportedRun) -> list[str]:
    """Return what has to be known before the figures are read."""
    texts = []
    if run.is_dry_run:
        texts.append("A dry run: nothing was changed.")
    if run.is_interrupted:
        texts.append("The run was interrupted; images left undone are not in the figures.")
    return texts


# Text.


def as_text(run: ReportedRun) -> str:
    """Return failures, their causes and the summary, as `sync` prints them."""
    lines = [
        f"failed {image.source} -> {image.target}: {image.failure.code}: {image.failure.message}"
        for image in run.images
        if image.failure is not None
    ]
    lines += [f"undone {image.source} -> {image.target}" for image in run.with_status("undone")]
    for cause in run.causes():
        if len(cause.images) > 1:
            lines.append(f"Failed: {len(cause.images)} x {cause.code}: {cause.message}")
        if cause.hint:
            lines.append(f"hint: {cause.hint}")
    lines += notes(run)
    lines += [f"{name}: {value}" for name, value in facts(run)]
    return "".join(f"{line}\n" for line in lines)


# Markdown.


def as_markdown(run: ReportedRun) -> str:
    """Return a summary in GitHub's Markdown, failures first."""
    lines = [f"## regsync: {headline(run)}", ""]
    lines += [f"*{text}*\n" for text in notes(run)]
    lines += _markdown_causes(run.causes())
    lines += ["| | |", "|---|---|"]
    lines += [f"| {_markdown(name)} | {_markdown(value)} |" for name, value in facts(run)]
    lines.append("")
    for status in ("undone", "synced", "would_sync"):
        lines += _markdown_images(STATUS_WORDS[status], run.with_status(status))
    return _within(lines, _LARGEST_MARKDOWN)


def _markdown_causes(causes: Sequence[Cause]) -> Iterator[str]:
    for cause in causes:
        count = f"{len(cause.images)} images" if len(cause.images) > 1 else "1 image"
        yield f"### {count}: {_code(cause.code)}"
        yield f"\n{_markdown(cause.message)}\n"
        if cause.hint:
            yield f"**Remedy:** {_markdown(cause.hint)}\n"
        for image in cause.images:
            yield f"- {_code(image.source)} to {_code(image.target)}"
        yield ""


def _markdown_images(word: str, images: Sequence[ReportedImage]) -> Iterator[str]:
    if not images:
        return
    yield f"{_BEGIN_DETAILS}<summary>{len(images)} {word}</summary>\n"
    for image in images:
        cost = f" ({size_text(image.bytes)}, {duration_text(image.duration)})"
        text = f"- {_code(image.source)} to {_code(image.target)}"
        yield text if image.status == "undone" else text + cost
    yield _END_DETAILS


def _markdown(text: str) -> str:
    """Return a text that Markdown shows as it is, also within a table."""
    escaped = html.escape(text, quote=False)
    # A colon or an at sign could begin a link or mention somebody.
    escaped = escaped.replace("://", ":&#47;&#47;").replace("@", "&#64;")
    return re.sub(r"([\\`*_\[\]{}()#|~!])", r"\\\1", escaped)


def _code(text: str) -> str:
    """Return a text as code, which mentions nobody and links nowhere."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {text} {fence}" if longest else f"`{text}`"


def _within(lines: Iterable[str], limit: int) -> str:
    """Join lines up to a number of bytes, and say how many are left out."""
    rest = deque(lines)
    kept = list[str]()
    size = 0
    while rest and size + len(rest[0].encode()) < limit:
        kept.append(rest.popleft())
        size += len(kept[-1].encode()) + 1
    if rest:
        # Details that were opened before the cut are closed.
        opened = [line for line in kept if line.startswith(_BEGIN_DETAILS)]
        if len(opened) > kept.count(_END_DETAILS):
            kept.append(_END_DETAILS)
        kept.append(f"{len(rest)} more lines are left out: they are in the report.")
    return "\n".join(kept) + "\n"


# JUnit.


def as_junit(run: ReportedRun) -> str:
    """Return JUnit XML: a suite for each mapping, a case for each image and target.

    An image that is there unchanged has passed, because the target is as it should be.
    """
    suites = _suites(run)
    total = _junit_counts(run.images)
    lines = ['<?xml version="1.0" encoding="UTF-8"?>']
    lines.append(f'<testsuites name="regsync" time="{run.duration:.3f}" {total}>')
    for name, images in suites.items():
        seconds = sum(image.duration for image in images)
        counts = _junit_counts(images)
        lines.append(f'  <testsuite name={_quoted(name)} time="{seconds:.3f}" {counts}>')
        for image in images:
            lines += _junit_case(image)
        lines.append("  </testsuite>")
    lines.append("</testsuites>")
    return "".join(f"{line}\n" for line in lines)


def _suites(run: ReportedRun) -> dict[str, list[ReportedImage]]:
    """Return the images by mapping, in the order of the configuration."""
    suites = defaultdict[str, list[ReportedImage]](list)
    # A mapping of which no image was due has a suite too, without cases.
    for mapping in run.mappings:
        suites[f"{mapping.source} to {mapping.target}"] = []
    for image in run.images:
        source = _repository_of(image.source)
        _, target = split_full_name(_repository_of(image.target))
        suites[f"{source} to {target}"].append(image)
    return suites


def _repository_of(reference: str) -> str:
    """Return a reference without its tag or digest."""
    host, name = split_full_name(reference)
    return full_name(host, re.split("[@:]", name)[0])


def _junit_counts(images: Sequence[ReportedImage]) -> str:
    statuses = Counter(image.status for image in images)
    held_back = [image for image in images if _is_held_back(image)]
    return (
        f'tests="{len(images)}" failures="{statuses["failed"]}" '
        f'errors="{statuses["undone"]}" skipped="{len(held_back)}"'
    )


def _is_held_back(image: ReportedImage) -> bool:
    return image.status == "skipped" and image.reason != "unchanged"


def _junit_case(image: ReportedImage) -> Iterator[str]:
    """Give the lines of one case; its name is the image's tag or digest."""
    name = image.source.removeprefix(_repository_of(image.source)).lstrip("@:") or image.source
    group = _quoted(_repository_of(image.target))
    opening = f'    <testcase classname={group} name={_quoted(name)} time="{image.duration:.3f}"'
    if image.failure is not None:
        failure = image.failure
        detail = _xml(f"{image.source} to {image.target}\n{failure.hint or ''}".strip())
        yield f"{opening}>"
        yield f"      <failure type={_quoted(failure.code)} message={_quoted(failure.message)}>{detail}</failure>"
        yield "    </testcase>"
    elif image.status == "undone":
        yield f'{opening}><error type="UNDONE" message="the run was interrupted before"/></testcase>'
    elif _is_held_back(image):
        yield f"{opening}><skipped message={_quoted(image.reason or 'skipped')}/></testcase>"
    else:
        yield f"{opening}/>"


def _quoted(text: str) -> str:
    return f'"{_xml(text)}"'


def _xml(text: str) -> str:
    # Of the characters that a report's text can have, XML 1.0 excludes these two.
    return html.escape(re.sub("[\ufffe\uffff]", "?", text))
