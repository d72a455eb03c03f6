"""Watch mode: what is decided without a clock (docs/design.md section 10)."""

from __future__ import annotations

import pytest

from tests.ends import run_regsync


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required: -c/--config"),
        (["-c", "-"], "needs a file"),
        (["-c", "/nowhere/mirror.yaml"], "No such file"),
        (["-c", "FILE", "--interval", "0"], "above 0"),
        (["-c", "FILE", "--interval", "often"], "--interval: 'often'"),
        (
            ["-c", "FILE", "--health-port", "http"],
            "argument --health-port: invalid int value: 'http'",
        ),
        (
            ["-c", "FILE", "--health-port", "70000"],
            "127.0.0.1 port 70000: the highest port is 65535",
        ),
        (["-c", "FILE", "--health-bind", "192.0.2.1"], "192.0.2.1 port 8080"),
        (["-c", "FILE", "--shard", "2/2"], "--shard 2/2"),
        (["-c", "WRONG"], "wrong.yaml:1:11"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_from_the_start_is_an_error(tmp_path, arguments, words):
    (tmp_path / "mirror.yaml").write_text("mappings: []")
    (tmp_path / "wrong.yaml").write_text("mappings: {}")
    names = {"FILE": str(tmp_path / "mirror.yaml"), "WRONG": str(tmp_path / "wrong.yaml")}
    ran = run_regsync("watch", *(names.get(each, each) for each in arguments))
    assert (ran.status, ran.out) == (3, "")
    assert words in ran.err.splitlines()[0]
    assert ran.err.startswith("error: CONFIG_ERROR: ")
