#!/usr/bin/env python3
"""Draw docs/run.svg: a terminal in the middle of a real sync.

    .venv/bin/python tools/picture.py

Starts two registries, the source slow enough to watch, puts images that share layers into it, and
syncs them in a terminal of 80 columns. The picture is the screen when half of the bytes are
there, as the terminal has it then.

Owns: the images, the moment, how a screen is drawn.
May not know: what the program writes.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pyte  # noqa: E402

from conformance.content.images import Seed  # noqa: E402
from conformance.registry.app import App  # noqa: E402
from conformance.server.sockets import run_in_thread  # noqa: E402

__all__ = ["drawing", "main"]

PICTURE = ROOT / "docs" / "run.svg"
COLUMNS = 80
ROWS = 24
COMMAND = "$ regsync sync -c mirror.yaml"

MEGABYTE = 1_000_000
SOURCE_RATE = MEGABYTE  # bytes a second of each layer
# By repository, the sizes of the layers that its tags have for themselves.
IMAGES = {
    "library/nginx": {"1.26": 2, "1.27": 3, "1.28": 4},
    "library/redis": {"7.2": 3, "7.4": 5},
    "team/web": {"v1": 2, "v2": 6, "v3": 7, "v4": 8},
}
BASE = 3  # megabytes of the layer that all images share

CONFIG = """\
registries:
  hub:  {{ url: "localhost:{source}" }}
  mine: {{ url: "localhost:{target}" }}
defaults: {{ source: hub, targets: [mine] }}
global: {{ max_concurrent_transfers: 3 }}
mappings:
"""

# Of the drawing, in pixels.
CHARACTER = 8.4
LINE = 20
MARGIN = 16


def main() -> int:
    """Write the picture and return 0."""
    screens = list(screens_of_a_run())
    moment = next(screen for screen in screens if is_the_moment(screen))
    PICTURE.write_text(drawing([COMMAND, *moment]), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)}: {len(moment)} lines")
    return 0


def is_the_moment(screen: Sequence[str]) -> bool:
    """Say whether half of the bytes are there, with the time that is left."""
    data = next((line for line in screen if line.startswith("data ")), "")
    bar = data.count("█") + data.count("░")
    return bar > 0 and 2 * data.count("█") >= bar and " left" in data


def screens_of_a_run() -> Iterator[list[str]]:
    """Sync between two registries, and give the terminal's lines after each change."""
    source = App()
    target = App()
    seed = Seed(7)
    base = seed.layer(BASE * MEGABYTE)
    for repository, sizes in IMAGES.items():
        for tag, size in sizes.items():
            image = seed.image(layers=[base, seed.layer(size * MEGABYTE)])
            image.load_into(source, repository, tag=tag)
    source.faults.on("GET", "blob").throttle(SOURCE_RATE)

    with (
        tempfile.TemporaryDirectory() as directory,
        run_in_thread(source) as hub,
        run_in_thread(target) as mine,
    ):
        text = CONFIG.format(source=port_of(hub.address), target=port_of(mine.address))
        text += "".join(f"  - {{ from: {repository} }}\n" for repository in IMAGES)
        config = Path(directory, "mirror.yaml")
        config.write_text(text, encoding="ascii")
        yield from screens_of([sys.executable, str(ROOT / "regsync.py"), "sync", "-c", str(config)])


def port_of(address: str) -> str:
    return address.rpartition(":")[2]


def screens_of(command: Sequence[str]) -> Iterator[list[str]]:
    """Run a command in a terminal, and give the terminal's lines after each change."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # Linux says so that nobody has the other end any more
                break
            stream.feed(data)
            yield [line.rstrip() for line in screen.display if line.strip()]
    os.close(ours)
    if process.returncode:
        raise SystemExit(f"the sync ended with {process.returncode}")


def drawing(lines: Sequence[str]) -> str:
    """Return a terminal with these lines as SVG, without scripts or anything to load."""
    width = round(COLUMNS * CHARACTER + 2 * MARGIN)
    height = len(lines) * LINE + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>A sync in a terminal</title>",
        "<style>text { font: 14px ui-monospace, Menlo, Consolas, monospace; fill: #e6e9f0;"
        " white-space: pre; } .prompt { fill: #7fb2ff; }</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#14171d"/>',
    ]
    for number, line in enumerate(lines):
        place = MARGIN + LINE * number + 14
        style = ' class="prompt"' if line.startswith("$") else ""
        # The length keeps bars and columns where they are, whatever font there is.
        length = f'textLength="{len(line) * CHARACTER:.1f}" lengthAdjust="spacingAndGlyphs"'
        parts.append(f'<text x="{MARGIN}" y="{place}" {length}{style}>{escape(line)}</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
