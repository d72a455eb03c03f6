"""Manifests, YAML and command lines: a value, or the one declared error; what is read is what
PyYAML and JSON read.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from unittest import mock

from hypothesis import example, given
from hypothesis import strategies as st

from _regsync.app import cli, environment
from tests.fuzzing import fuzz

# Command lines.

WORDS = st.sampled_from([
    "copy", "sync", "tags", "audit", "validate", "expand", "schema", "version", "watch", "auth", "check",
    "nonsense", "-c",
    "--config", "--config=-", "-", "--json", "--dry-run", "-v", "-vv", "-q", "--log-format", "json", "text",
    "--log-format=xml",
    "--no-progress", "--platform", "linux/amd64", "linux", "--glob", "*", "[", "--semver", ">=1", "1 - 2", "--sort",
    "alpha",
    "--latest", "3", "0", "9" * 30, "--semver-prerelease", "only", "--min-tags=2", "--report", "--show-secrets",
    "--no-artifacts",
    "a.test/app:v1", "a.test/app", "app@sha256:0", "http://a/b", "u:hunter2@a.test/b", "--help", "-h", "--version",
    "--", "", "\udcff",
    "\n", "--shard", "1/2", "--exclude=a\nb", "/nowhere", "-cx", "--jso", "=",
])  # fmt: skip
CONFIGS = st.sampled_from(
    [
        b"",
        b"mappings: []",
        b"\xff",
        b"mappings: [{from: a, source: x, targets: y}]",
        b"a: *b",
        b"mappings: 5",
    ]
)


@fuzz(150)
@given(st.lists(WORDS, max_size=6), CONFIGS)
@example(["tags", "a.test/app", "--latest", "3"], b"")
@example(["copy", "a.test/app:v1", "\udcff", "--json"], b"")
@example(["validate", "-", "a\nb"], b"")
def test_any_command_line_ends_in_a_status_and_one_line(words, config):
    out, err = io.StringIO(), io.StringIO()
    stdin = io.TextIOWrapper(io.BytesIO(config))
    ran = mock.Mock(return_value=0)
    with (
        mock.patch.object(environment, "run_async", ran),
        mock.patch.object(sys, "stdin", stdin),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            status = cli.main(words)
        except SystemExit as error:
            status = int(error.code or 0)
            assert {"--help", "-h", "--version"} & {*words}
    said = err.getvalue()
    assert status in (0, 3)
    assert "Traceback" not in said
    assert "hunter2" not in said + out.getvalue() or "reference" not in said
    assert (status == 0) or "CONFIG_ERROR" in said
    if status and "--json" in words and not {"--help", "-h"} & {*words}:
        assert json.loads(out.getvalue())["error"]["code"] == "CONFIG_ERROR"
    assert status == 0 or not ran.called
    assert all(
        line.startswith(("error: ", "hint: ", "warning: ", "info: ", "{"))
        for line in said.splitlines()
    ), said
