"""Format a report as one HTML page.

Owns: the page: bytes moved and saved, failures by cause, a timeline of the images of each registry.
May not know: files, registries.
Invariants: the page has no scripts and loads nothing, and its content security policy forbids both.
No text of a report becomes markup. The page is readable at a width of 400 pixels, in light and dark
mode, and without colours.
Follows: docs/design.md section 15.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

from _regsync.app.report_file import Cause, ReportedImage, ReportedRun
from _regsync.app.report_forms import STATUS_WORDS, headline, notes
from _regsync.text import duration_text, size_text

# Bars in one registry's timeline. If there are more images, those with the most bytes are drawn.
_MOST_BARS = 400

_MOST_ROWS = 5000  # rows in one table of images

_NARROWEST_BAR = 0.25  # per cent of the timeline's width; a narrower bar could not be seen

# Pixels. The lanes of a timeline are above each other, with a gap between two lanes.
_TIMELINE_HEIGHT = 400  # of all lanes. Bars of _THINNEST_BAR may need more.
_THICKEST_BAR = 14
_THINNEST_BAR = 2
_GAP = 2

_TICKS = 4  # intervals between the times below a timeline

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #5b6475; --paper: #ffffff; --line: #d8dce4;
  --panel: #f5f6f9; --moved: #2f6fde; --present: #9aa5b8; --mounted: #43a488; --failed: #c23b35;
  --undone: #b98a1d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9f0; --soft: #a3acbd; --paper: #14171d;
  --line: #343b49; --panel: #1c2129; --moved: #6f9ff2; --present: #67728a; --mounted: #5cc0a2;
  --failed: #f07a73; --undone: #dcb251; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem 1rem 4rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
h3 .soft { font-weight: 400; }
p { margin: .25rem 0; }
.soft { color: var(--soft); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem;
  margin: 1.5rem 0; padding: 0; }
.facts div { background: var(--panel); border-radius: .5rem; padding: .6rem .8rem; }
.facts dt { color: var(--soft); font-size: .85rem; }
.facts dd { margin: 0; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.failed { color: var(--failed); }
.share { display: flex; height: 1.5rem; border-radius: .3rem; overflow: hidden;
  background: var(--panel); }
.share span, .key i { background: var(--moved); }
.share .mounted, .key .mounted { background: var(--mounted); }
.share .present, .key .present { background: var(--present); }
.key { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding: 0; margin: .5rem 0 0;
  list-style: none; }
.key i { display: inline-block; width: .8rem; height: .8rem; border-radius: .15rem;
  margin-right: .4rem; }
.key .failed-bar, .bar.failed { background: var(--failed); }
.cause { border-left: .25rem solid var(--failed); background: var(--panel);
  border-radius: 0 .5rem .5rem 0; padding: .75rem 1rem; margin: .75rem 0; }
.lanes { position: relative; background: var(--panel); border-radius: .3rem; overflow: hidden; }
.bar { position: absolute; background: var(--moved); border-radius: 2px; min-width: 2px; }
.bar.failed { background-image: repeating-linear-gradient(45deg, transparent 0 3px,
  rgb(0 0 0 / .35) 3px 5px); }
.ticks { display: flex; justify-content: space-between; color: var(--soft); font-size: .8rem;
  font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; overflow-wrap: normal; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .75rem .3rem 0;
  border-bottom: 1px solid var(--line); }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
code { font: .9em/1.4 ui-monospace, monospace; }
summary { cursor: pointer; padding: .25rem 0; }
"""

# The content security policy. It allows the inline style sheet and nothing else.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def as_page(run: ReportedRun) -> str:
    """Format the report as an HTML page."""
    title = f"regsync: {headline(run)}"
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        "</head>",
        "<body>",
        f"<h1>{escape(headline(run).capitalize())}</h1>",
        f'<p class="soft">regsync, {escape(run.started_at)}, run {escape(run.run_id)}</p>',
        *(f"<p><strong>{escape(note)}</strong></p>" for note in notes(run)),
        *_figures_section(run),
        *_causes_section(run.causes()),
        *_share_section(run),
        *_timelines_section(run),
        *_requests_section(run),
        *_images_section(run),
        *_mappings_section(run),
        "</body>",
        "</html>",
    ]
    return "\n".join(lines) + "\n"


def _figures_section(run: ReportedRun) -> Iterator[str]:
    """Yield a row of boxes with the figures of the run."""
    yield '<dl class="facts">'
    for status, count in run.counts.items():
        is_shown = count > 0 or status == "synced"
        if is_shown and status in STATUS_WORDS:
            css_class = "failed" if status == "failed" else ""
            yield _figure_box(STATUS_WORDS[status].capitalize(), str(count), css_class)
    yield _figure_box("Moved", size_text(run.bytes))
    saved = run.bytes_present + run.bytes_mounted
    if saved:
        yield _figure_box("Saved", size_text(saved))
    yield _figure_box("Time", duration_text(run.duration))
    requests = sum(sum(counts.values()) for counts in run.requests.values())
    yield _figure_box("Requests", str(requests))
    yield "</dl>"


def _figure_box(name: str, figure: str, css_class: str = "") -> str:
    attribute = f' class="{css_class}"' if css_class else ""
    return f"<div><dt>{escape(name)}</dt><dd{attribute}>{escape(figure)}</dd></div>"


def _causes_section(causes: Sequence[Cause]) -> Iterator[str]:
    if not causes:
        return
    yield "<h2>Why images failed</h2>"
    for cause in causes:
        count = "1 image" if len(cause.images) == 1 else f"{len(cause.images)} images"
        yield '<section class="cause">'
        yield f"<p><strong>{count}: {escape(cause.code)}</strong></p>"
        yield f"<p>{escape(cause.message)}</p>"
        if cause.hint:
            yield f"<p><strong>Remedy:</strong> {escape(cause.hint)}</p>"
        columns = ("Source", "Target", "Message")
        yield from _collapsed_table("Which", columns, cause.images, _failed_cells)
        yield "</section>"


def _share_section(run: ReportedRun) -> Iterator[str]:
    """Yield a bar with the shares of moved, mounted and present bytes."""
    moved_words = "would be moved" if run.is_dry_run else "moved"
    # (CSS class, words for the reader, bytes).
    shares = [
        ("moved", moved_words, run.bytes),
        ("mounted", "mounted from another repository of the target", run.bytes_mounted),
        ("present", "at the target already", run.bytes_present),
    ]
    total = sum(size for _, _, size in shares)
    if total == 0:
        return
    yield "<h2>Moved and saved</h2>"
    yield '<div class="share">'
    for css_class, _, size in shares:
        if size > 0:
            yield f'<span class="{css_class}" style="width:{100 * size / total:.2f}%"></span>'
    yield "</div>"
    yield '<ul class="key">'
    for css_class, words, size in shares:
        text = f"{size_text(size)} {words} ({100 * size / total:.0f} %)"
        yield f'<li><i class="{css_class}"></i>{text}</li>'
    yield "</ul>"
    yield (
        f'<p class="soft">{run.blobs_transferred} uploads of {run.blobs_unique} different blobs, '
        f"{run.blobs_mounted} mounts. A blob counts once for each target repository; images that "
        "were there unchanged do not count.</p>"
    )


# The timeline.


def _timelines_section(run: ReportedRun) -> Iterator[str]:
    """Yield a timeline for each target registry, with the images that were synced or failed."""
    images_by_registry = defaultdict[str, list[ReportedImage]](list)
    for image in run.with_status("synced", "failed"):
        if image.started is not None:
            images_by_registry[image.registry].append(image)
    if not images_by_registry:
        return
    yield "<h2>When images were copied</h2>"
    yield '<ul class="key"><li><i></i>copied</li><li><i class="failed-bar"></i>failed</li></ul>'
    for registry, images in sorted(images_by_registry.items()):
        drawn = heapq.nlargest(_MOST_BARS, images, key=lambda image: (image.bytes, image.duration))
        moved = size_text(sum(image.bytes for image in images))
        text = f"{len(images)} images, {moved}"
        if len(drawn) < len(images):
            text += f"; the {len(drawn)} that moved most are drawn"
        yield f'<h3><code>{escape(registry)}</code> <span class="soft">{text}</span></h3>'
        yield from _timeline(drawn, run.duration)


def _timeline(images: Sequence[ReportedImage], duration: float) -> Iterator[str]:
    """Yield a bar for each image, from its start to its end, in lanes without overlaps.

    The timeline is `duration` seconds long. Below it are the times.
    """
    lanes = _in_lanes(images)
    # With many lanes the bars are thin, so that the timeline fits on a screen.
    bar_height = max(_THINNEST_BAR, min(_THICKEST_BAR, _TIMELINE_HEIGHT // len(lanes) - _GAP))
    lane_height = bar_height + _GAP
    yield f'<div class="lanes" style="height:{lane_height * len(lanes) + _GAP}px">'
    for number, lane in enumerate(lanes):
        vertical = f"top:{lane_height * number + _GAP}px;height:{bar_height}px"
        for image in lane:
            yield _bar(image, duration, vertical)
    yield "</div>"
    ticks = [duration_text(duration * number / _TICKS) for number in range(_TICKS + 1)]
    yield '<div class="ticks">' + "".join(f"<span>{tick}</span>" for tick in ticks) + "</div>"


def _bar(image: ReportedImage, duration: float, vertical: str) -> str:
    """Return the bar of an image in a timeline of `duration` seconds.

    `vertical` is the CSS for the position and size of the bar in the vertical direction.
    """
    percent_per_second = 100 / max(duration, 0.001)  # the timeline's width is 100 %
    left = percent_per_second * _start(image)
    width = max(_NARROWEST_BAR, percent_per_second * image.duration)
    style = f"left:{left:.2f}%;width:{width:.2f}%;{vertical}"
    times = f"{duration_text(_start(image))} to {duration_text(_end(image))}"
    title = f"{image.source}: {image.status}, {times}, {size_text(image.bytes)}"
    css_class = "bar failed" if image.status == "failed" else "bar"
    return f'<div class="{css_class}" style="{style}" title="{escape(title)}"></div>'


def _in_lanes(images: Iterable[ReportedImage]) -> list[list[ReportedImage]]:
    """Assign each image to a lane that is free at the image's start, or to a new lane.

    The images of one lane do not overlap.
    """
    lanes = list[list[ReportedImage]]()
    for image in sorted(images, key=_start):
        first_to_end = min(lanes, key=lambda lane: _end(lane[-1]), default=None)
        if first_to_end is not None and _end(first_to_end[-1]) <= _start(image):
            first_to_end.append(image)
        else:
            lanes.append([image])
    return lanes


def _start(image: ReportedImage) -> float:
    return image.started or 0.0


def _end(image: ReportedImage) -> float:
    return _start(image) + image.duration


# Tables.


def _mappings_section(run: ReportedRun) -> Iterator[str]:
    if not run.mappings:
        return
    yield "<h2>Mappings</h2>"
    yield f"<details><summary>What each mapping selected ({len(run.mappings)})</summary>"
    yield '<div class="scroll"><table>'
    yield '<tr><th>From</th><th>To</th><th class="n">Selected</th><th>Not selected</th></tr>'
    for mapping in run.mappings:
        if mapping.failure is not None:
            remark = mapping.failure.message
        else:
            remark = ", ".join(f"{count} {reason}" for reason, count in mapping.dropped.items())
        yield (
            f"<tr><td>{_code(mapping.source)}</td><td>{_code(mapping.target)}</td>"
            f'<td class="n">{mapping.selected}</td><td>{escape(remark)}</td></tr>'
        )
    yield "</table></div></details>"


def _requests_section(run: ReportedRun) -> Iterator[str]:
    if not run.requests:
        return
    yield "<h2>Requests</h2>"
    yield '<div class="scroll"><table>'
    yield '<tr><th>Registry</th><th class="n">Requests</th><th class="n">Throttled</th><th>Which</th></tr>'
    for host, counts in run.requests.items():
        actions = ", ".join(f"{count} {action}" for action, count in counts.items())
        yield (
            f'<tr><td>{_code(host)}</td><td class="n">{sum(counts.values())}</td>'
            f'<td class="n">{run.throttled.get(host, 0)}</td><td>{escape(actions)}</td></tr>'
        )
    yield "</table></div>"


def _images_section(run: ReportedRun) -> Iterator[str]:
    yield "<h2>Images</h2>"
    copy_columns = ("Source", "Target", "Bytes", "Time", "Blobs")
    for status in ("undone", "synced", "would_sync"):
        images = sorted(run.with_status(status), key=lambda image: -image.bytes)
        title = STATUS_WORDS[status].capitalize()
        yield from _collapsed_table(title, copy_columns, images, _copy_cells)

    images_by_reason = defaultdict[str, list[ReportedImage]](list)
    for image in run.with_status("skipped"):
        images_by_reason[image.reason or "skipped"].append(image)
    name_columns = ("Source", "Target")
    for reason, images in sorted(images_by_reason.items()):
        yield from _collapsed_table(f"Skipped, {reason}", name_columns, images, _name_cells)


def _collapsed_table(
    title: str,
    columns: Sequence[str],
    images: Sequence[ReportedImage],
    cells_of: Callable[[ReportedImage], Sequence[str]],
) -> Iterator[str]:
    """Yield a table of images that is hidden until the reader opens it. Yields nothing without
    images.

    `cells_of` returns the cells of an image as HTML.
    """
    if not images:
        return
    yield f"<details><summary>{escape(title)} ({len(images)})</summary>"
    yield '<div class="scroll"><table>'
    yield "<tr>" + "".join(f"<th>{column}</th>" for column in columns) + "</tr>"
    for image in images[:_MOST_ROWS]:
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells_of(image)) + "</tr>"
    yield "</table></div>"
    if len(images) > _MOST_ROWS:
        yield f"<p>{len(images) - _MOST_ROWS} more are in the report.</p>"
    yield "</details>"


def _name_cells(image: ReportedImage) -> list[str]:
    return [_code(image.source), _code(image.target)]


def _failed_cells(image: ReportedImage) -> list[str]:
    message = image.failure.message if image.failure is not None else ""
    return [*_name_cells(image), escape(message)]


def _copy_cells(image: ReportedImage) -> list[str]:
    blobs = (
        f"{image.blobs_transferred} moved, {image.blobs_mounted} mounted, "
        f"{image.blobs_present} there"
    )
    return [*_name_cells(image), size_text(image.bytes), duration_text(image.duration), blobs]


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"
