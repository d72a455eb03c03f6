"""Old commands and options: each is an error of status 3, whose one line names what to do instead."""

from __future__ import annotations

import pytest

from tests.ends import run_regsync

GONE = [
    ("analyze", "analyze -c mirror.yaml --locked",
        "`sync --dry-run` shows how many images and bytes a run would move, and what it would mount"),
    ("lock --diff", "lock -c - --lock x --diff",
        "`lock --check` shows the changes and does not write the lock file"),
    ("lock --markdown", "lock --markdown -c mirror.yaml", "`lock` prints a line for each change"),
    ("audit --read N", "audit -c - --read 20",
        "`--read` takes no number, and reads all blobs; `--shard` takes a part of the mappings"),
    ("audit --read N", "audit --read=20 -c -",
        "`--read` takes no number, and reads all blobs; `--shard` takes a part of the mappings"),
    ("expand --show-secrets", "expand --show-secrets mirror.yaml",
        "secrets are never printed; the variables of the configuration have them"),
    ("schema --report", "schema --report",
        "the source code has that schema, in tests/report.schema.json"),
    ("report --to text", "report - --to=text",
        "`--to markdown` shows the failures by cause, and the figures"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "line", "instead"), GONE)
def test_an_old_word_gets_one_line(old: str, line: str, instead: str) -> None:
    for words in (line.split(), [*line.split(), "-v", "--json"]):
        ran = run_regsync(*words, stdin="mappings: []")
        assert ran.status == 3
        assert ran.err == f"error: CONFIG_ERROR: `{old}` is gone: {instead}\n"


@pytest.mark.parametrize("line", ["audit --read -c -", "audit -c - --read --no-progress"])
def test_what_is_still_there_is_not_gone(line: str) -> None:
    ran = run_regsync(*line.split(), stdin="{registries: {}, mappings: []}")
    assert "is gone" not in ran.err
