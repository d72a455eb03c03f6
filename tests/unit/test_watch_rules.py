"""Watch mode: what is decided without a clock (docs/design.md section 10)."""

from __future__ import annotations

import pytest

from _regsync.app.watch import Health, describe_changes


def test_what_changed_is_said_without_values():
    from _regsync import config

    def load(text: str) -> config.Config:
        return config.load(
            config.ConfigFile(text.encode(), name="x", environ={}, base_dir="/", home=None)
        )

    basic = "auth_type: basic, credentials: {username: u, password: %s}"
    one = "registries: {a: {url: a.test, %s}, b: {url: b.test}}\nmappings:\n" % (basic % "secret")
    rule = "- {from: x, source: a, targets: [b]}\n"
    old = load(
        one
        + rule
        + "- {from: y, source: a, targets: [b]}\n"
        + "- {from: y, source: a, targets: [b], to: z}"
    )
    new = load(
        one.replace("secret", "other")
        + "- {from: y, source: a, targets: [b], tags: {glob: v*}}\n"
        + rule
    )
    assert list(describe_changes(old, old)) == []
    assert list(describe_changes(old, new)) == [
        "registry a changed",
        "mapping a/y -> y changed",
        "mapping a/y -> z removed",
    ], "a registry that changes is no mapping that does, nor is another order"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("targets: [b, c]", "mapping a/x -> x changed"),
        ("tags: {latest: 3, sort: alpha}", "mapping a/x -> x changed"),
        ("platforms: [linux/arm64]", "mapping a/x -> x changed"),
        ("artifacts: {include: [a/b]}", "mapping a/x -> x changed"),
        ("max_concurrent_transfers: 3", "setting max_concurrent_transfers changed"),
        ("cache_dir: other", "setting cache_dir changed"),
        ("cache_ttl: 1h", "setting cache_ttl changed"),
        ("staging_size_limit: 1 GB", "setting staging_size_limit changed"),
    ],
)
def test_each_field_that_changes_is_told(change, told):
    from _regsync import config

    def load(changed: str) -> config.Config:
        rule, whole = ("", changed) if told.startswith("setting") else (changed, "")
        text = "registries: {a: {url: a.test}, b: {url: b.test}, c: {url: c.test}}\n"
        text += "defaults: {source: a, targets: [b]}\n"
        text += f"mappings: [{{from: x, {rule}}}]\nglobal: {{{whole}}}\n"
        return config.load(
            config.ConfigFile(text.encode(), name="x", environ={}, base_dir="/", home=None)
        )

    assert list(describe_changes(load(""), load(change))) == [told]


def test_states_follow_cycles():
    def told(health: Health, now: float, moved: float = -1e9) -> tuple[int, int, str]:
        (alive, first), (ready, second) = (
            health.answer(path, now, moved) for path in ("/healthz", "/readyz")
        )
        assert first == second
        assert first.keys() == {"status", "version", "cycle", "reload_error"}
        return alive, ready, first["status"]

    begun = Health(1000.0)
    assert told(begun, 1899) == (200, 503, "starting")
    assert told(begun, 1900) == (503, 503, "starting")
    assert told(begun, 2798, moved=1899)[0] == 200, "long is not stuck"
    assert told(begun, 2799, moved=1899)[0] == 503
    waits = begun._replace(status="ready", due=5000.0)
    assert told(waits, 3000) == (200, 200, "ready"), "to wait is no illness"
    assert told(waits, 5899) == (200, 200, "ready")
    assert told(waits, 5900) == (503, 200, "ready"), (
        "but a cycle that does not begin when it is due is one"
    )
    assert told(waits._replace(status="stopping"), 5000) == (200, 503, "stopping")
