"""Old commands and options: each is an error of status 3, whose one line names what to do instead."""

from __future__ import annotations

import pytest

from tests.ends import run_regsync

# By the old words: a command line with them in it, and what to do instead.
OLD = {
    "analyze": (
        "analyze -c mirror.yaml --locked",
        "`sync --dry-run` shows how many images and bytes a run would move, and what it would mount",
    ),
    "lock --diff": (
        "lock -c - --lock x --diff",
        "`lock --check` shows the changes and does not write the lock file",
    ),
    "lock --markdown": ("lock --markdown -c mirror.yaml", "`lock` prints a line for each change"),
    "audit --read N": (
        "audit -c - --read 20",
        "`--read` takes no number, and reads all blobs; `--shard` takes a part of the mappings",
    ),
    "report --to text": (
        "report - --to=text",
        "`--to markdown` shows the failures by cause, and the figures",
    ),
}


@pytest.mark.new
@pytest.mark.parametrize("old", OLD)
def test_an_old_word_gets_one_line(old: str) -> None:
    line, instead = OLD[old]
    for words in (line.split(), ["-v", *line.split(), "--json"]):
        ran = run_regsync(*words, stdin="mappings: []")
        assert ran.status == 3
        assert ran.err == f"error: CONFIG_ERROR: `{old}` is gone: {instead}\n"


@pytest.mark.new
def test_a_value_may_follow_an_equals_sign() -> None:
    ran = run_regsync("audit", "--read=20", "-c", "-", stdin="mappings: []")
    assert (ran.status, "is gone" in ran.err) == (3, True)


@pytest.mark.parametrize("line", ["audit --read -c -", "audit -c - --read --no-progress"])
def test_what_is_still_there_is_not_gone(line: str) -> None:
    ran = run_regsync(*line.split(), stdin="{registries: {}, mappings: []}")
    assert "is gone" not in ran.err
