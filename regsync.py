"""regsync copies container images and their referrers between OCI registries.

This module is the public API: `main` is the program, `run` the program on an event loop and in a
world of the caller's, and the other names are for programs that embed it. The package `_regsync` is private.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from _regsync import __version__

if TYPE_CHECKING:
    from _regsync.edge import Edge

__all__ = ["__version__", "main", "run"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with the arguments `argv` and return its exit status.

    If `argv` is None, the program runs with the arguments of the process and ends the process.
    """
    from _regsync import fips  # must come first: no module may use OpenSSL before the FIPS gate

    open_missing_streams()
    arguments = sys.argv[1:] if argv is None else list(argv)
    is_whole_process = argv is None
    if is_whole_process:
        end_by_signals()
    closed_reason = fips.open_gate()

    from _regsync.app import cli

    status = cli.main(arguments, closed_reason)
    if is_whole_process:
        end_at_once(status)
    return status


async def run(argv: Sequence[str], edge: Edge) -> int:
    """Run the program with the arguments `argv` on the event loop of the caller, in the world that
    `edge` gives it, and return its exit status.

    Standard streams, files and signals are those of the process.
    """
    from _regsync import edge as edges
    from _regsync import fips

    closed_reason = fips.open_gate()

    from _regsync.app import cli

    with edges.using(edge):
        return await cli.run(list(argv), closed_reason)


def open_missing_streams() -> None:
    """Replace closed standard streams, so that no socket gets the descriptor of a standard stream."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            try:
                # It gets the lowest free descriptor, and stays open.
                null = open(os.devnull, "r+")  # noqa: SIM115
            except OSError:
                os._exit(2)  # without /dev nothing can take the place of a stream
            setattr(sys, name, null)


def end_by_signals() -> None:
    """Let SIGINT and SIGTERM end the process at once, until a run installs its own handlers.

    Nothing needs to be saved before a run begins. The handlers raise no KeyboardInterrupt, because
    library code might suppress the exception. The default action is not sufficient either: the kernel
    ignores it for the first process of a container.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, end_interrupted)


def end_interrupted(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def end_at_once(status: int) -> NoReturn:
    """End the process without the interpreter's finalization. All files have been closed, and what
    was printed has been flushed.

    The interpreter would wait for a thread that is blocked in name resolution, and such a thread
    cannot be interrupted. Finalization also takes a sixth of the time of a run that copies nothing.
    """
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
