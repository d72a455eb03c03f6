"""How much the fuzz tests try, the same examples each time: with `--thorough` four times as many as
in an ordinary run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import hypothesis  # its hook for trio warns when trio is there first
import trio
from hypothesis import HealthCheck
from hypothesis import strategies as st
from trio.testing import MockClock

# No wait of the program's is so long, whatever it is told: who is not back by then never comes
# back.
_NEVER = 30 * 86_400.0
_asked = {"thorough": False}


def begin(*, thorough: bool) -> None:
    """Say, before tests are imported, whether all examples are tried (`--thorough`) or a quarter
    of them. A property that says nothing else has the settings of `fuzz()`: no test measures time.
    """
    _asked["thorough"] = thorough
    hypothesis.settings.register_profile("all", fuzz())
    hypothesis.settings.load_profile("all")


def fuzz(examples: int = 100) -> Callable[[Any], Any]:
    """Return the settings of a property that is tried with so many examples; in an ordinary run
    with a quarter of them.
    """
    return hypothesis.settings(
        max_examples=examples if _asked["thorough"] else -(-examples // 4),
        derandomize=True,
        database=None,
        deadline=None,  # on a busy machine an example may take a second
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
        ],
    )


def in_virtual_time(work: Callable[[], Awaitable[None]]) -> None:
    """Run one example on a clock of its own that jumps; who would wait for ever fails."""

    async def bounded() -> None:
        with anyio.fail_after(_NEVER):
            await work()

    trio.run(bounded, clock=MockClock(autojump_threshold=0))


def scraps(
    words: str, *more: str, most: int = 12, other: str | None = None
) -> st.SearchStrategy[str]:
    """Texts of these words, and of pieces that have blanks themselves, in any order; with other
    characters between them.
    """
    pieces = [*words.split(" "), *more] if words else more
    piece = st.sampled_from(pieces)
    strange = st.text(max_size=3) if other is None else st.text(other, max_size=3)
    return st.lists(st.one_of(piece, piece, piece, strange), max_size=most).map("".join)


def trees(
    words: str, *more: str, leaves: st.SearchStrategy[Any] | None = None
) -> st.SearchStrategy[Any]:
    """Values of JSON with these keys and leaves, and whatever else JSON can say."""
    keys = [*words.split(" "), *more]
    anything = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
    # A text of JSON may hold half a character, which no UTF-8 can.
    leaf = st.one_of(anything, st.just("\ud800"), leaves) if leaves is not None else anything
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.sampled_from(keys), inner, max_size=4),
            st.dictionaries(st.sampled_from(keys), inner, max_size=4),
        ),
        max_leaves=12,
    )
