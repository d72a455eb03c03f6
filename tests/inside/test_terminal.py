"""The line of progress on an emulated terminal."""

from __future__ import annotations

import io
import os

import pyte
import pytest

from _regsync.app.console import Console, Progress
from _regsync.sync.report import Outcome

ROWS = 24
NOW = Progress(
    done=12,
    known=40,
    bytes=31_500_000,
    expected=1_200_000_000,
    rate=5_200_000.0,
    elapsed=65.0,
    remaining=225.0,
    registries=tuple(f"registry-{n}.example.com has not answered for 1m20s" for n in range(6)),
)


class Terminal(io.StringIO):
    """A terminal that shows what is written to it."""

    encoding = "utf-8"

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.screen = pyte.Screen(columns, ROWS)
        self._stream = pyte.Stream(self.screen)

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2

    def write(self, text: str) -> int:
        # The driver of a real terminal makes CR LF of each LF.
        self._stream.feed(text.replace("\n", "\r\n"))
        return len(text)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display if line.strip()]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Terminal:
    shown = Terminal(getattr(request, "param", 80))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(
        "os.get_terminal_size",
        lambda _: os.terminal_size((shown.screen.columns, shown.screen.lines)),
    )
    return shown


def console_on(terminal: Terminal) -> Console:
    return Console(
        terminal, terminal, level="warning", writes_json=False, logs_json=False, shows_progress=True
    )


def synced(number: int) -> Outcome:
    name = f"app:v{number}"
    return Outcome(f"s/{name}", f"t/{name}", "synced", bytes=1000, duration=1.0)


@pytest.mark.parametrize("terminal", [60, 80, 120], indirect=True)
def test_the_line_stands_below_what_stays_and_wraps_nowhere(terminal):
    console = console_on(terminal)
    console.omit_shared_hosts({("s", "t")})
    for number in range(5):
        console.update_progress(NOW._replace(done=number, elapsed=float(number)))
        console.show_outcome(synced(number))
    console.update_progress(NOW._replace(done=5))

    kept = ["s -> t", *(f"synced app:v{n} -> app:v{n} (1.0 KB, 1.0s)" for n in range(5))]
    assert terminal.lines[:-1] == kept
    assert terminal.lines[-1].startswith("5 of 40 images, 31.5 MB of 1.2 GB")
    assert len(terminal.lines[-1]) == terminal.screen.columns - 1

    console.clear_progress()
    assert terminal.lines == kept


def test_a_terminal_that_becomes_wider_keeps_nothing_of_the_line(terminal):
    console = console_on(terminal)
    console.print_line("before")
    console.update_progress(NOW)
    terminal.screen.resize(ROWS, 120)
    console.update_progress(NOW._replace(done=13))
    console.print_line("after")
    assert terminal.lines == ["before", "after"]


def test_a_dumb_terminal_gets_lines_and_no_escapes(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    console = console_on(terminal)
    assert not console.has_progress_line
    console.update_progress(
        NOW._replace(registries=("registry.example.com has not answered for 10s",))
    )
    text = " ".join("".join(terminal.screen.display).split())
    assert text.startswith("still running: 12 of 40 images, 31.5 MB of 1.2 GB")
    assert "registry.example.com has not answered for 10s" in text
