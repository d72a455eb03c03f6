"""Watch mode: what is decided without a clock (design.md section 10)."""

from __future__ import annotations

from pathlib import Path

import pytest

from _regsync import watch
from tests.ends import run_regsync


def test_what_changed_is_said_without_values() -> None:
    from _regsync import config

    def load(text: str) -> config.Config:
        return config.load(text.encode(), name="x", environ={}, base_dir="/", home=None)

    basic = "auth_type: basic, credentials: {username: u, password: %s}"
    one = "registries: {a: {url: a.test, %s}, b: {url: b.test}}\nmappings:\n" % (basic % "secret")
    rule = "- {from: x, source: a, targets: [b]}\n"
    old = load(one + rule + "- {from: y, source: a, targets: [b]}\n" + "- {from: y, source: a, targets: [b], to: z}")
    new = load(one.replace("secret", "other") + "- {from: y, source: a, targets: [b], tags: {glob: v*}}\n" + rule)
    assert list(watch.changes(old, old)) == []
    assert list(watch.changes(old, new)) == [
        "registry a changed",
        "mapping a/y -> y changed",
        "mapping a/y -> z removed",
    ], "a registry that changes is no mapping that does, nor is another order"


def test_states_follow_cycles() -> None:
    clock, moved, stopping = [0.0], [-1e9], False
    health = watch.Health(lambda: clock[0], lambda: moved[0], lambda: stopping)

    def told(now: float) -> tuple[int, int, str]:
        clock[0] = now
        (alive, first), (ready, second) = health.tell("/healthz"), health.tell("/readyz")
        assert first == second
        assert first.keys() == {"status", "version", "cycle", "reload_error"}
        return alive, ready, first["status"]

    assert told(0) == (200, 503, "starting")
    health.began = 1000.0
    assert told(1899) == (200, 503, "starting")
    assert told(1900) == (503, 503, "starting")
    moved[0] = 1899.0
    assert told(2798)[0] == 200, "long is not stuck"
    assert told(2799)[0] == 503
    health.end(exit_status=2)
    assert told(1e9) == (200, 503, "starting"), "to wait is no illness"
    health.end(exit_status=1)
    assert told(1e9) == (200, 200, "ready")
    health.end(exit_status=4)
    assert told(1e9) == (200, 200, "ready"), "for good"
    stopping = True
    assert told(1e9) == (200, 503, "stopping")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required: -c/--config"),
        (["-c", "-"], "needs a file"),
        (["-c", "/nowhere/mirror.yaml"], "cannot be read"),
        (["-c", "FILE", "--interval", "0"], "above 0"),
        (["-c", "FILE", "--interval", "often"], "--interval: 'often' is no duration"),
        (["-c", "FILE", "--health-port", "http"], "argument --health-port: invalid int value: 'http'"),
        (["-c", "FILE", "--health-port", "70000"], "127.0.0.1 port 70000: ports end at 65535"),
        (["-c", "FILE", "--health-bind", "192.0.2.1"], "192.0.2.1 port 8080"),
        (["-c", "FILE", "--shard", "2/2"], "--shard 2/2"),
        (["-c", "WRONG"], "wrong.yaml:1:11"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_from_the_start_is_an_error(tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "mirror.yaml").write_text("mappings: []")
    (tmp_path / "wrong.yaml").write_text("mappings: {}")
    names = {"FILE": str(tmp_path / "mirror.yaml"), "WRONG": str(tmp_path / "wrong.yaml")}
    ran = run_regsync("watch", *(names.get(each, each) for each in arguments))
    assert (ran.status, ran.out) == (3, "")
    assert words in ran.err.splitlines()[0]
    assert ran.err.startswith("error: CONFIG_ERROR: ")
