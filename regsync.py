"""regsync copies container images and their referrers between OCI registries.

This is the public face: `main` is the program, the other names are for embedding. The code is in
`_regsync`, which is not an API.
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
    from _regsync.errors import RegsyncError

__all__ = ["RegsyncError", "__version__", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with `argv` (default: the process's arguments) and return its exit status."""
    from _regsync import fips  # first of all, so that nothing touches OpenSSL before its gate

    open_missing_streams()
    arguments = sys.argv[1:] if argv is None else list(argv)
    is_whole_process = argv is None
    if is_whole_process:
        end_by_signals(is_watch=arguments[:1] == ["watch"])
    closed = fips.closed()

    from _regsync.app import cli

    status = cli.main(arguments, closed)
    if is_whole_process:
        end_at_once(status)
    return status


def open_missing_streams() -> None:
    """Open what the caller has closed, so that no socket gets the number of a standard stream."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            from _regsync.files import empty_input, lost_output

            take_number()
            setattr(sys, name, empty_input() if name == "stdin" else lost_output())


def take_number() -> None:
    """Open something, so that the lowest free number is free no more."""
    try:
        os.open(os.devnull, os.O_RDWR)
    except OSError:  # a root without /dev
        os.open(os.sep, os.O_RDONLY)


def end_by_signals(*, is_watch: bool) -> None:
    """Let a signal end the process at once until a run listens to it: there is nothing to save yet.

    An exception could come where nobody passes it on, and the first process of a container does not
    get a signal for which it has no function. A watch ends well by a signal, and reads its
    configuration anyway when it begins.
    """
    on_signal = end_with_success if is_watch else end_interrupted
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, on_signal)
    if is_watch and hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def end_interrupted(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def end_with_success(number: int, frame: FrameType | None) -> None:
    os._exit(0)


def end_at_once(status: int) -> NoReturn:
    """End without the interpreter's own ending: all files and connections are closed by now.

    The interpreter would wait for a thread that a silent name server holds, and nobody can end that
    thread. It would also take all modules apart: a sixth of the time of a run with nothing to do.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def __getattr__(name: str) -> object:
    if name == "RegsyncError":
        from _regsync.errors import RegsyncError

        return RegsyncError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    sys.exit(main())
