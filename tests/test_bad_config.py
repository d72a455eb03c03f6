"""Configurations that are wrong, hostile or unreadable: exit status 3, every problem placed,
nothing attempted.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from conformance.server.sockets import Server
from tests.ends import Ran, run_regsync

PROBLEM = "error: CONFIG_ERROR: "


def refused(ran: Ran) -> list[str]:
    """Return the lines of a refusal, without what every one begins with."""
    assert ran.status == 3
    assert ran.out == ""
    lines = ran.err.splitlines()
    assert lines
    assert all(line.startswith((PROBLEM, "hint: ")) and line.isprintable() for line in lines)
    return [line.removeprefix(PROBLEM) for line in lines if line.startswith(PROBLEM)]


# --- nothing is attempted ------------------------------------------------------------------------

COMMANDS = [
    ("validate", "-"),
    ("expand", "-"),
    ("sync", "-c", "-"),
    ("sync", "--json", "-c", "-"),
    ("copy", "-c", "-", "{source}/x:1", "{target}/x:1"),
    ("tags", "-c", "-", "{source}/x"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:2]))
def test_one_problem_keeps_every_command_from_the_network(
    words: tuple[str, ...], source: Server, target: Server
) -> None:
    registries = {"a": {"url": source.url}, "b": {"url": target.url}}
    mappings = [
        {"from": "x", "source": "a", "targets": ["b"], "tags": {"glob": ["1"]}},
        {"form": "y"},
    ]
    hosts = {"source": source.url.partition("//")[2], "target": target.url.partition("//")[2]}
    ran = run_regsync(
        *(word.format(**hosts) for word in words),
        stdin=json.dumps({"registries": registries, "mappings": mappings}),
    )
    assert ran.status == 3
    assert "standard input:1:" in ran.err + ran.out
    assert "mean 'from'?" in ran.err + ran.out
    assert "Traceback" not in ran.err + ran.out
    assert not source.journal.entries
    assert not target.journal.entries


# --- files ---------------------------------------------------------------------------------------


def file_problem(path: str) -> str:
    for words in (("validate", path), ("expand", path), ("sync", "-c", path)):
        (line,) = refused(run_regsync(*words))
    return line


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert "nothing.yaml cannot be read: No such file" in file_problem(
        str(tmp_path / "nothing.yaml")
    )
    assert "cannot be read: Is a directory" in file_problem(str(tmp_path))
    (tmp_path / "file").touch()
    assert "cannot be read: Not a directory" in file_problem(str(tmp_path / "file" / "c.yaml"))
    os.symlink("loop", tmp_path / "loop")
    assert "cannot be read: " in file_problem(str(tmp_path / "loop"))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").touch(mode=0)
    assert "cannot be read: Permission denied" in file_problem(str(tmp_path / "c.yaml"))


@pytest.mark.rule("R18")
def test_a_name_with_line_breaks_makes_no_second_line(tmp_path: Path) -> None:
    path = tmp_path / "a\n\x1b[31merror: b.yaml"
    path.write_text("mappings: {}")
    assert "\x1b" not in file_problem(str(path))
