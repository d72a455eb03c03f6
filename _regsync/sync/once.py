"""Make a request once for all tasks that need its answer, and many requests at the same time.

Owns: sharing one request between tasks; a bound on concurrent requests; the order of answers.
May not know: what is requested.
Invariants: while a request is under way, no other task starts the same request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

import anyio

from _regsync.errors import SyncError

_T = TypeVar("_T")

# Tasks of one `gather`. A registry admits fewer concurrent requests by default.
_MAX_TASKS = 64


class Once(Generic[_T]):
    """The answer to a request that is made once, however many tasks need the answer.

    If the task that makes the request is cancelled, a waiting task makes the request. A SyncError
    is kept like an answer, and raised for every task.
    """

    # A run has a Once for each tag, so its size matters.
    __slots__ = ("_end", "_error", "_is_under_way", "answer")

    def __init__(self, *answer: _T) -> None:
        # A tuple of the answer, which may be None. The tuple is empty until there is an answer.
        self.answer = answer
        self._error: SyncError | None = None
        # Whether a task is making the request.
        self._is_under_way = False
        # Set when that task has finished or was cancelled. None unless another task waits.
        self._end: anyio.Event | None = None

    async def get(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Return the answer. Calls `ask` if there is no answer and no other task is calling `ask`.

        Raises the SyncError that `ask` has raised.
        """
        # The loop repeats if the task that made the request was cancelled.
        while len(self.answer) == 0 and self._error is None:
            if self._is_under_way:
                self._end = self._end or anyio.Event()
                await self._end.wait()
            else:
                await self._ask(ask)

        if self._error is not None:
            raise self._error
        return self.answer[0]

    async def _ask(self, ask: Callable[[], Awaitable[_T]]) -> None:
        """Keep the answer or the SyncError of `ask`, and wake the tasks that wait for it."""
        self._is_under_way = True
        try:
            self.answer = (await ask(),)
        except SyncError as error:
            error.drop_frames()  # the frames would keep the buffers of the request alive
            self._error = error
        finally:
            self._is_under_way = False
            if self._end is not None:
                self._end.set()
                self._end = None


class LazyEvent:
    """An event that allocates its anyio.Event when a task first waits.

    Most are never waited for.
    """

    __slots__ = ("_event", "_is_set")

    def __init__(self) -> None:
        self._is_set = False
        # None until a task waits.
        self._event: anyio.Event | None = None

    def set(self) -> None:
        """Wake all waiting tasks. Later calls of `wait` return at once."""
        self._is_set = True
        if self._event is not None:
            self._event.set()

    async def wait(self) -> None:
        """Wait until `set` is called."""
        if self._is_set:
            return
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()


async def gather(asks: Iterable[Callable[[], Awaitable[_T]]]) -> list[_T]:
    """Call all of `asks`, at most 64 at the same time, and return their answers in the same order.

    If calls raise SyncErrors, the first SyncError is raised after all calls have ended. Any other
    exception cancels the other calls.
    """
    calls = list(asks)
    if len(calls) <= 1:
        return [await ask() for ask in calls]
    # By position in `calls`.
    answers = dict[int, _T]()
    errors = list[SyncError]()

    # All workers share one iterator, so that each call is made once. This task is a worker too.
    queue = iter(enumerate(calls))

    async def work() -> None:
        for position, ask in queue:
            try:
                answers[position] = await ask()
            except SyncError as error:
                errors.append(error)

    other_workers = min(len(calls), _MAX_TASKS) - 1
    async with anyio.create_task_group() as group:
        for _ in range(other_workers):
            group.start_soon(work)
        await work()

    if errors:
        raise errors[0]
    return [answers[position] for position in range(len(calls))]
