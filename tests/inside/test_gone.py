"""Old commands and options: each is an error of status 3, whose one line names what to do instead."""

from __future__ import annotations

import pytest

from _regsync.app.cli import GONE
from tests.ends import run_regsync

# By the row of GONE: a command line with the old word in it, and a part of what to do instead.
OLD = {
    "analyze": ("analyze -c mirror.yaml --locked", "sync --dry-run"),
    "lock --diff": ("lock -c - --lock x --diff", "lock --check"),
    "lock --markdown": ("lock --markdown -c mirror.yaml", "a line for each change"),
    "audit --read N": ("audit -c - --read 20", "reads all blobs"),
}


def test_each_old_word_has_a_command_line_here() -> None:
    assert OLD.keys() == GONE.keys()


@pytest.mark.parametrize("old", OLD)
def test_an_old_word_gets_one_line(old: str) -> None:
    line, instead = OLD[old]
    for words in (line.split(), ["-v", *line.split(), "--json"]):
        ran = run_regsync(*words, stdin="mappings: []")
        assert ran.status == 3
        assert ran.err == f"error: CONFIG_ERROR: `{old}` is gone: {GONE[old]}\n"
        assert instead in ran.err
