"""Which image is next: a greedy set cover of those that wait. And how many are at work."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import anyio
from hypothesis import given
from hypothesis import strategies as st

from _regsync.sync.work import Pending, Slots


def add(pending, blobs, number=0):
    """Let an image wait that has these blobs, each given with its host."""
    pending.add(SimpleNamespace(number=number, tree=SimpleNamespace(size=0)), blobs)


IMAGES = st.tuples(st.sampled_from("hi"), st.sets(st.sampled_from("abcdefghij")))


@given(st.lists(st.none() | IMAGES, max_size=12))
def test_the_election_is_the_greedy_set_cover(steps):
    """Whoever is taken gains most of what is shared, at one host, among those who still wait and was
    not taken before; of equals it is who came first. Who comes later is given without what the others
    bring.
    """
    pending, left, covered, arrivals = Pending(), {}, set(), 0
    for step in [*steps, *[None] * len(steps)]:
        if step is not None:
            host, letters = step
            left[arrivals] = {(host, letter) for letter in letters} - covered
            add(pending, sorted(left[arrivals]), arrivals)
            arrivals += 1
        elif left:
            wanted = Counter(blob for blobs in left.values() for blob in blobs - covered)
            gains = {
                number: sum(wanted[blob] > 1 for blob in blobs - covered)
                for number, blobs in left.items()
            }
            number = pending.take().number
            assert number == min(gains, key=lambda each: (-gains[each], each))
            covered |= left.pop(number)
    assert not left


def test_an_election_is_near_linear():
    """1,000 images of 40 blobs, all shared: what is done for an image does not grow with their number."""

    def pushes(images):
        pending = Pending()
        for number in range(images):
            add(pending, [("h", (number * 7 + blob) % (images * 4)) for blob in range(40)])
        return len(pending._heap)

    assert pushes(1000) < 21 * pushes(50)


def test_no_more_than_512_candidates_wait():
    pending = Pending()
    for number in range(512):
        assert not pending.is_full()
        add(pending, [("h", number)])
    assert pending.is_full()
    pending.take()
    assert not pending.is_full()


def test_artifacts_whose_subject_is_there_go_before_images():
    pending = Pending()
    add(pending, [("h", 1)])
    pending.artifacts.append("artifact")
    assert pending.take() == "artifact"
    assert pending.take().number == 0


async def test_who_waits_gives_the_slot_to_the_next_and_takes_another_one_later():
    waiting, at_work = ["first", "second"], []

    def refill():
        if not waiting:
            return False
        at_work.append(waiting.pop(0))
        return True

    slots = Slots(1, refill)
    slots.fill()
    assert at_work == ["first"]
    is_there = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(slots.leave_while, 0, is_there.wait())
        await anyio.wait_all_tasks_blocked()
        assert at_work == ["first", "second"]
        is_there.set()
        await anyio.wait_all_tasks_blocked()
        slots.used -= 1  # the second has ended
        slots.fill()
    assert slots.used == 1
