"""Run `regsync audit` and write its results: findings, a JSON document and a receipt.

Owns: how the audit, the signals and the console work together; the receipt file.
May not know: which requests an audit sends, what their answers mean.
Invariants: a receipt is replaced atomically. It is replaced only if the audit was not interrupted and
all sources could be read.
Follows: docs/design.md section 12.
"""

from __future__ import annotations

import os

import anyio

from _regsync import edge
from _regsync.app.console import Console
from _regsync.app.environment import carry_out, connected, print_report, utc_now
from _regsync.audit import Audit
from _regsync.config import Config
from _regsync.errors import RegsyncError, Side, SyncError
from _regsync.files import replacing
from _regsync.pins import Lock
from _regsync.state import StateFile, first_seen_for
from _regsync.sync.inspection import Finding
from _regsync.sync.report import Outcome
from _regsync.text import printable, reason_of


async def audit(
    config: Config,
    console: Console,
    *,
    reads_blobs: bool,
    receipt_path: str | None,
    lock: Lock | None,
) -> int:
    """Check that targets hold the images that a configuration selects. Returns the exit status.

    With `reads_blobs`, the bytes of all blobs at the targets are downloaded and checked. A receipt
    lists every manifest and blob that was found. It is written to `receipt_path`, unless that is
    None or a signal interrupts the audit. With a lock, no source is contacted: the lock has the
    expected digests and artifacts. After a signal, the exit status is 128 and the signal's number.
    """
    start = anyio.current_time()
    started_at = utc_now()

    def show(result: Finding | Outcome) -> None:
        if isinstance(result, Outcome):  # an image that could not be checked
            console.show_outcome(result)
        elif not console.writes_json:
            console.print_line(result.line())

    async with connected(console) as transport:
        locked_times = lock.first_seen_times() if lock is not None else None
        wall = edge.current().wall
        state = StateFile(config.cache_dir, transport.machine.log)
        first_seen = first_seen_for(config, state, wall, may_write=False, locked_times=locked_times)
        work = Audit(
            transport,
            config,
            show,
            state,
            reads_blobs=reads_blobs,
            first_seen=first_seen,
            lock=lock,
        )
        signals = await carry_out(work.run, console, work)
    elapsed = anyio.current_time() - start
    if work.interrupted:
        console.log("warning", "interrupted", work.undone_text())
    elif receipt_path is not None:
        write_receipt(receipt_path, work, console)
    console.print_summary(work, elapsed)
    if console.writes_json:
        print_report(work, started_at, elapsed, transport, console)
    if work.interrupted:
        return 128 + signals[0]
    return work.exit_status()


def write_receipt(path: str, report: Audit, console: Console) -> None:
    """Replace the receipt: the list of all manifests and blobs that the audit has found.

    If a source could not be read, a file that is not empty is kept and an error is logged. Raises
    RegsyncError if the file cannot be written.
    """
    errors = [outcome.error for outcome in report.failures]
    # How many images have a source that could not be read.
    unread_count = sum(
        isinstance(error, SyncError) and error.side is Side.SOURCE for error in errors
    )
    # A new receipt would lack these images, so that the next disk for a closed network would
    # contain them again, although the registry in that network has them.
    has_old_receipt = os.path.exists(path) and os.path.getsize(path) > 0
    if unread_count and has_old_receipt:
        shown_path = printable(path)
        text = (
            f"{shown_path} is left as it was: images whose source could not be read: {unread_count}"
        )
        remedy = "run it again when the source can be read and its disk is mounted, or remove the file first"
        console.log("error", "receipt_kept", text, hint=remedy)
        return
    try:
        with replacing(path) as descriptor, open(descriptor, "w", encoding="utf-8") as stream:
            stream.writelines(f"{line}\n" for line in report.receipt())
    except OSError as error:
        reason = reason_of(error)
        raise RegsyncError(
            f"{printable(path)} cannot be written: {reason}",
            hint="name a file on another disk; what the file held before is unchanged",
        ) from error
