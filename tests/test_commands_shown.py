"""Every command that README and the documents show is run, in the order of its document.

Each document has a directory of its own, and the hosts that it names answer in memory. What would
change this machine, needs a service that is not here, or takes minutes stands in `NOT_RUN`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.ends import ROOT
from tests.pages import PAGES_FOR_USERS

# Pages for developers are read for blocks alone: their sentences name commands in part.
OTHER_PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if page not in PAGES_FOR_USERS]
PAGES = [*PAGES_FOR_USERS, *OTHER_PAGES]

# The first words of lines that a shell is to run. Blocks of code hold diagrams and JSON, too.
_PROGRAMS = (
    "regsync|python3|sha256sum|install|skopeo|apt-get|openssl|cd|tar|cat|touch|printf|git|jq|useradd|grep|cmp"
    "|runuser"
)
COMMAND = re.compile(rf"\(?(?:[A-Z]+=\S+ )?(?:{_PROGRAMS}|dist/\S+) \S")
CRON_LINE = re.compile(r"(?:[\d*/,-]+ ){5}\S+ .*?(regsync (?:sync|lock|audit) .*)")

# What is not run here, each with the reason.
NOT_RUN = {
    r"python3 tools/build_zipapp\.py.*": "the fixture `pyz` builds the file, and test_build has every option",
    r"python3 tools/build_static\.py.*": "a quarter of an hour; test_static has its parts",
    r"python3 tools/check\.py.*": "it runs the tests",
    r"python3 tools/demo\.py": "test_demo runs it",
    r"python3 tools/bench\.py.*": "it takes minutes, and measures",
    r"python3 tools/mutants\.py.*": "it takes hours",
    r"python3 tools/reference\.py": "it writes into the checkout; test_reference compares what it makes",
    r"PYTHONPATH=dist/regsync-nofips\.pyz python3 -m conformance serve": "it serves until it is stopped",
    r"(?:python3 -m zipfile -l )?dist/regsync-linux-x86_64.*": "test_static_file runs the file, where one was built",
    r"cmp again/.*": "it compares static files, which take a quarter of an hour",
    r"skopeo .*": "test_layout_tools and test_static run skopeo with such names",
    r"apt-get install .*": "it changes the system",
    r"useradd .*": "it changes the system",
    r"(?:install -d -o mirror|runuser -u mirror) .*": "it needs the user that was made",
    r"openssl fipsinstall .*": "it changes the system; test_fips sets up a provider of its own",
    r"git (?:diff --quiet mirror\.lock|rev-parse HEAD)": "it asks git alone",
    r"regsync \w+ .*\[-.*": "a synopsis",
    r"regsync validate FILE \| -c FILE": "a synopsis",
}

# Exit statuses that are not 0, by page and the beginning of the command.
STATUSES = {("recipes", "regsync audit -c mirror.yaml --read"): 1}


class Shown(NamedTuple):
    """A block or command of a page."""

    line: int
    # "yaml": the text of a configuration; "command": a line for a shell; "text": output.
    kind: str
    text: str


def shown_in(page: Path) -> Iterator[Shown]:
    """Give the configurations, commands and output of a page, in their order."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"(?ms)^( *)```(\w*)\n(.*?)^ *```$|`([^`]+)`", text):
        line = text.count("\n", 0, found.start()) + 1
        _, language, block, span = found.groups()
        if span is not None and page in OTHER_PAGES:
            continue
        if span is not None:
            command = " ".join(span.split())
            if COMMAND.match(command):
                yield Shown(line, "command", command)
        elif language == "yaml":
            yield Shown(line, "yaml", block)
        elif language in ("", "sh", "text"):
            for number, each in enumerate(block.replace("\\\n", "").splitlines(), line + 1):
                if cron := CRON_LINE.match(each):
                    yield Shown(number, "command", cron[1])
                elif COMMAND.match(each.removeprefix("$ ")) and not each.startswith("regsync 0"):
                    yield Shown(number, "command", each.removeprefix("$ "))
            if language == "text":
                yield Shown(line, "text", block.replace("\n    ", " "))


def reason_against(command: str) -> str | None:
    """Return the pattern of `NOT_RUN` that a command matches."""
    return next((pattern for pattern in NOT_RUN if re.fullmatch(pattern, command)), None)


def commands_of(page: Path) -> list[Shown]:
    return [shown for shown in shown_in(page) if shown.kind == "command"]


@pytest.mark.parametrize(
    "page", PAGES_FOR_USERS, ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_every_line_of_a_block_without_a_language_is_a_command(page: Path) -> None:
    blocks = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"))
    shell = "".join(block for language, block in blocks if not language)
    lines = shell.replace("\\\n", "").splitlines()
    assert [line for line in lines if line and not COMMAND.match(line)] == []


def test_what_is_not_run_is_shown_somewhere() -> None:
    commands = [shown.text for page in PAGES for shown in commands_of(page)]
    for pattern in NOT_RUN:
        assert any(re.fullmatch(pattern, command) for command in commands), pattern
    for page, beginning in STATUSES:
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        assert beginning in " ".join(text.split()), beginning
    assert sum(not reason_against(command) for command in commands) > 60
