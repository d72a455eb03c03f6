"""Watch mode: what is decided without a clock (design.md section 10)."""

from __future__ import annotations

from _regsync import watch


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
    clock, moved = [0.0], [-1e9]
    health = watch.Health(lambda: clock[0], lambda: moved[0])

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
    health.is_stopping = True
    assert told(1e9) == (200, 503, "stopping")
