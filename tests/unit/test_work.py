"""Which image is next: a greedy set cover of those that wait."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from _regsync.sync.work import Pending


def waiting(*images: tuple[str, str]) -> Pending:
    """Return images that wait, given as host and blobs (a letter each)."""
    pending = Pending()
    for host, blobs in images:
        add(pending, host, blobs)
    return pending


def add(pending: Pending, host: str, blobs: Any) -> None:
    image: Any = SimpleNamespace(number=-1, tree=SimpleNamespace(size=0))
    pending.add(image, [(host, blob) for blob in blobs])


def taken(pending: Pending) -> list[int]:
    """Return the order in which all images are taken."""
    return [pending.take().number for _ in range(len(pending))]


def test_the_image_with_most_shared_blobs_leads() -> None:
    pending = waiting(("h", "a"), ("h", "xyz"), ("h", "ab"), ("h", "b"))
    assert taken(pending) == [2, 0, 1, 3]


def test_blobs_that_somebody_brings_already_count_for_nothing() -> None:
    pending = waiting(*(("h", blobs) for blobs in ("c", "cd", "cd", "ab")))
    assert pending.take().number == 1
    # Who comes later is given without what number 1 brings.
    add(pending, "h", "a")
    assert taken(pending) == [3, 0, 2, 4]


def test_blobs_are_shared_within_one_host_only() -> None:
    assert taken(waiting(("h", "x"), ("one", "a"), ("two", "a"))) == [0, 1, 2]


def test_without_shared_blobs_the_first_that_came_goes_first() -> None:
    assert taken(waiting(("h", "a"), ("h", "bc"), ("h", ""))) == [0, 1, 2]


@given(st.lists(st.sets(st.sampled_from("abcdefghij")), max_size=12))
def test_the_election_is_the_greedy_set_cover(images: list[set[str]]) -> None:
    """Whoever is taken gains most of what is shared among those who still wait and was not taken
    before.
    """
    pending = Pending()
    for blobs in images:
        add(pending, "h", sorted(blobs))
    left, covered = dict(enumerate(images)), set[str]()
    while left:
        wanted = Counter(blob for blobs in left.values() for blob in blobs - covered)
        gains = {
            number: sum(wanted[blob] > 1 for blob in blobs - covered)
            for number, blobs in left.items()
        }
        number = pending.take().number
        assert number == min(gains, key=lambda each: (-gains[each], each))
        covered |= left.pop(number)


def test_an_election_is_near_linear() -> None:
    """2,000 images of 40 blobs, all shared: what is done for an image does not grow with their number."""

    def pushes(images: int) -> int:
        pending = Pending()
        for number in range(images):
            add(pending, "h", [f"{(number * 7 + blob) % (images * 4)}" for blob in range(40)])
        return len(pending._heap)

    assert pushes(2000) < 21 * pushes(100)


def test_no_more_than_512_candidates_wait() -> None:
    pending = Pending()
    for number in range(512):
        assert not pending.is_full()
        add(pending, "h", str(number))
    assert pending.is_full()
    pending.take()
    assert not pending.is_full()
