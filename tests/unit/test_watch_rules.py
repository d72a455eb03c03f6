"""Watch mode: what is decided without a clock (docs/design.md section 10)."""

from __future__ import annotations

from _regsync.app.watch import Health


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
