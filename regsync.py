"""regsync copies container images and their referrers between OCI registries.

This is the public face: `main` is the program, the other names are for embedding. The code is in
`_regsync`, which is not an API. Importing this module costs next to nothing: `regsync version` has
to answer within twice the time of an empty Python, so everything else is imported when asked for.
"""

from __future__ import annotations

import sys

from _regsync import __version__

TYPE_CHECKING = (
    False  # typing's constant without typing, which takes longer to import than all of this
)
if TYPE_CHECKING:
    from collections.abc import Sequence

    from _regsync.errors import RegsyncError

__all__ = ["RegsyncError", "__version__", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with `argv` (default: the process's arguments) and return its exit status."""
    from _regsync import fips  # first of all, so that nothing touches OpenSSL before its gate

    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller; no socket may get its number
            import os

            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  it serves until the end
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments in (["version"], ["--version"], ["version", "--json"]):
        from _regsync.app.version import show

        try:
            return show(fips.closed(), as_json="--json" in arguments)
        except OSError:
            arguments = [
                "version"
            ]  # the command line meets the same failure and has the words for it
    if argv is None:
        import signal

        # Until a run listens there is nothing to drain or to save. An exception may come where
        # nobody passes it on, and the first process of a container does not get what has no
        # handler. A watch ends well by a signal, and reads its configuration anyway when it begins.
        watches = arguments[:1] == ["watch"]
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, _end if watches else _leave)
        if watches and hasattr(signal, "SIGHUP"):
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
    closed = fips.closed()
    import gc

    # Nothing that is imported becomes garbage: collecting meanwhile costs 5 ms of a start.
    collecting = gc.isenabled()
    gc.disable()
    try:
        from _regsync.app import cli

        status = cli.main(arguments, closed)
    finally:
        if collecting:
            gc.enable()
    threading = sys.modules.get("threading")
    if argv is None and threading is not None and threading.active_count() > 1:
        # A name server that does not answer holds a thread: nobody can end it, and the interpreter
        # would wait for it.
        sys.stdout.flush()
        sys.stderr.flush()
        _leave(status - 128)
    return status


def _leave(number: int, _: object = None) -> None:
    import os

    os._exit(128 + number)


def _end(*_: object) -> None:
    _leave(-128)


def __getattr__(name: str) -> object:
    if name == "RegsyncError":
        from _regsync.errors import RegsyncError

        return RegsyncError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    sys.exit(main())
