"""Format a report as text, as Markdown for the summary of a CI job, or as JUnit XML.

Owns: the content and order of each format, and the escaping of the report's texts.
May not know: files, registries.
Invariants: no text of a report becomes markup. Markdown stays below 1 MB, the limit of CI services.
Follows: docs/design.md section 15.
"""

from __future__ import annotations

import html
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from _regsync.app.report_file import Cause, ReportedImage, ReportedRun
from _regsync.oci import full_name, split_full_name
from _regsync.text import duration_text, size_text

# Bytes. GitHub accepts 1 MiB for the summary of one step, to which a job may add text of its own.
_LARGEST_MARKDOWN = 900_000

# The HTML tags of a section that the reader can open.
_BEGIN_DETAILS = "<details>"
_END_DETAILS = "\n</details>\n"

# The words for each status.
STATUS_WORDS = {
    "synced": "synced",
    "would_sync": "would be synced",
    "skipped": "skipped",
    "failed": "failed",
    "undone": "left undone",
}


def headline(run: ReportedRun) -> str:
    """Format the number of images by status: `3 failed, 12 synced, 85 skipped`."""
    order = ("failed", "undone", "synced", "would_sync", "skipped")
    counts = [(run.counts.get(status, 0), STATUS_WORDS[status]) for status in order]
    parts = [f"{count} {word}" for count, word in counts if count]
    return ", ".join(parts) if parts else "nothing to do"


def facts(run: ReportedRun) -> list[tuple[str, str]]:
    """Return the lines of the summary as pairs of a name and a value."""
    lines = [("Images", headline(run))]
    # When `min_age` will no longer hold each image back. Times in UTC sort as texts.
    held_until = [image.until for image in run.images if image.until is not None]
    if held_until:
        lines.append(("Held", f"{len(held_until)} (next {min(held_until)})"))
    transferred = f"{run.blobs_transferred} transferred ({run.blobs_unique} unique)"
    lines.append(("Layers", f"{transferred}, {run.blobs_mounted} mounted"))
    lines.append(("Data", f"{size_text(run.bytes)} transferred"))
    saved = saved_text(run)
    if saved:
        lines.append(("Saved", saved))
    lines.append(("Time", f"{duration_text(run.duration)} from {run.started_at}"))
    for host, counts in run.requests.items():
        text = f"{sum(counts.values())} requests"
        if run.throttled.get(host):
            text += f", {run.throttled[host]} of them throttled (429)"
        lines.append((host, text))
    return lines


def saved_text(run: ReportedRun) -> str:
    """Format the bytes that were not sent: `11.4 GB: 8.1 GB already there, 3.3 GB mounted`.

    Returns an empty string if there are none.
    """
    total = run.bytes_present + run.bytes_mounted
    if total == 0:
        return ""
    parts = [(run.bytes_present, "already there"), (run.bytes_mounted, "mounted")]
    details = [f"{size_text(count)} {word}" for count, word in parts if count]
    return f"{size_text(total)}: {', '.join(details)}"


def notes(run: ReportedRun) -> list[str]:
    """Return sentences about a dry run or an interrupted run, which the figures do not show."""
    texts = []
    if run.is_dry_run:
        texts.append("A dry run: nothing was changed.")
    if run.is_interrupted:
        texts.append("The run was interrupted; images left undone are not in the figures.")
    return texts


# Text.


def as_text(run: ReportedRun) -> str:
    """Format failures, their causes and the summary in the way that `sync` prints them."""
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
    """Format the report as a summary in GitHub's Markdown, failures first."""
    lines = [f"## regsync: {headline(run)}", ""]
    lines += [f"*{text}*\n" for text in notes(run)]
    lines += _markdown_causes(run.causes())
    lines += ["| | |", "|---|---|"]
    lines += [f"| {_markdown(name)} | {_markdown(value)} |" for name, value in facts(run)]
    lines.append("")
    for status in ("undone", "synced", "would_sync"):
        lines += _markdown_images(STATUS_WORDS[status], run.with_status(status))
    return _join_up_to(_LARGEST_MARKDOWN, lines)


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
        text = f"- {_code(image.source)} to {_code(image.target)}"
        if image.status != "undone":
            text += f" ({size_text(image.bytes)}, {duration_text(image.duration)})"
        yield text
    yield _END_DETAILS


def _markdown(text: str) -> str:
    """Escape a text for Markdown, including the cells of a table."""
    escaped = html.escape(text, quote=False)
    # Prevent links to URLs and mentions of users.
    escaped = escaped.replace("://", ":&#47;&#47;").replace("@", "&#64;")
    return re.sub(r"([\\`*_\[\]{}()#|~!])", r"\\\1", escaped)


def _code(text: str) -> str:
    """Format a text as a code span, in which Markdown makes no links and no mentions."""
    # The delimiter has to be longer than every run of backticks in the text.
    longest = max((len(backticks) for backticks in re.findall("`+", text)), default=0)
    delimiter = "`" * (longest + 1)
    return f"{delimiter} {text} {delimiter}" if longest else f"`{text}`"


def _join_up_to(limit: int, lines: Sequence[str]) -> str:
    """Join as many of the first lines as fit in `limit` bytes, and add the number of omitted lines."""
    kept = list[str]()
    size = 0  # bytes of `kept`, including line ends
    for line in lines:
        size += len(line.encode()) + 1
        if size > limit:
            break
        kept.append(line)

    omitted_count = len(lines) - len(kept)
    if omitted_count > 0:
        # If the cut is inside a details section, close the section.
        opening_lines = [line for line in kept if line.startswith(_BEGIN_DETAILS)]
        if len(opening_lines) > kept.count(_END_DETAILS):
            kept.append(_END_DETAILS)
        kept.append(f"{omitted_count} more lines are left out: they are in the report.")
    return "\n".join(kept) + "\n"


# JUnit.


def as_junit(run: ReportedRun) -> str:
    """Format the report as JUnit XML: a suite for each mapping, a case for each image and target.

    A case has passed if the image is at the target, including an image that was there unchanged.
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
    """Return the images of each suite by its name, in the order of the configuration's mappings."""
    suites = defaultdict[str, list[ReportedImage]](list)
    # A mapping without images has an empty suite.
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
    """Format the attributes of a suite that count its cases by result."""
    counts = Counter(image.status for image in images)
    held_back = [image for image in images if _is_held_back(image)]
    return (
        f'tests="{len(images)}" failures="{counts["failed"]}" '
        f'errors="{counts["undone"]}" skipped="{len(held_back)}"'
    )


def _is_held_back(image: ReportedImage) -> bool:
    """Report whether an image was skipped for another reason than being at the target already."""
    return image.status == "skipped" and image.reason != "unchanged"


def _junit_case(image: ReportedImage) -> Iterator[str]:
    """Yield the lines of one case."""
    tag_or_digest = image.source.removeprefix(_repository_of(image.source)).lstrip("@:")
    name = tag_or_digest or image.source
    group = _quoted(_repository_of(image.target))
    opening = f'    <testcase classname={group} name={_quoted(name)} time="{image.duration:.3f}"'
    if image.failure is not None:
        failure = image.failure
        attributes = f"type={_quoted(failure.code)} message={_quoted(failure.message)}"
        detail = _xml(f"{image.source} to {image.target}\n{failure.hint or ''}".strip())
        yield f"{opening}>"
        yield f"      <failure {attributes}>{detail}</failure>"
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
    # Texts of a report can contain these two characters, which XML 1.0 forbids.
    return html.escape(re.sub("[\ufffe\uffff]", "?", text))
