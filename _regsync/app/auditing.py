"""`regsync audit`: what targets hold, told as findings, JSON and a receipt.

Owns: how the audit, the signals and the console come together; the receipt's file.
May not know: what is asked, and what an answer means.
Invariants: a receipt is replaced as a whole, and only by an audit that has come to its end and knew
    which images there are.
Follows: docs/design.md section 12.
"""

from __future__ import annotations

import os
from contextlib import closing

import anyio

from _regsync.app.console import Console
from _regsync.app.environment import carry_out, connect, utc_now
from _regsync.config.model import Config
from _regsync.errors import RegsyncError, Side, SyncError
from _regsync.files import replacing
from _regsync.state.seen import first_seen_for
from _regsync.sync.audit import Audit
from _regsync.sync.findings import AuditReport, Finding
from _regsync.sync.lockfile import Lock
from _regsync.sync.report import Outcome
from _regsync.text import printable, reason_of


async def audit(
    config: Config, console: Console, *, read: int, receipt: str | None, lock: Lock | None
) -> int:
    """Look at what the targets of a configuration hold; return the exit status.

    `read` is how many blobs of each target are downloaded and checked. `receipt` is the file that gets
    the list of what is there. With a lock its digests and artifacts are expected, and no source is asked.
    """
    began = anyio.current_time()
    started_at = utc_now()
    run_id = os.urandom(8).hex()

    def tell(news: Finding | Outcome) -> None:
        if isinstance(news, Outcome):
            console.show_outcome(news)
        elif not console.writes_json:
            console.print_line(news.line())

    report = AuditReport()
    with closing(connect(console)) as transport:
        known = lock.first_seen_times() if lock is not None else None
        wall = transport.machine.wall
        first_seen = first_seen_for(config, wall, console.log, keep=False, known=known)
        work = Audit(transport, config, tell, report, read=read, first_seen=first_seen, lock=lock)
        signals = await carry_out(work.run, console, work)
    elapsed = anyio.current_time() - began

    if report.interrupted:
        console.log("warning", "interrupted", report.undone_text())
    elif receipt is not None:
        write_receipt(receipt, report, console)
    console.print_summary(report, elapsed)
    if console.writes_json:
        console.print_document(
            report.as_json(run_id, started_at, elapsed, transport.requests, transport.throttled)
        )
    return 128 + signals[0] if report.interrupted else report.exit_status()


def write_receipt(path: str, report: AuditReport, console: Console) -> None:
    """Replace a receipt by what an audit has found; RegsyncError when it cannot be written."""
    # Where a source did not tell its images, an older receipt stays. A new one would lack them, or be
    # empty, and the next disk for the closed network would hold everything again.
    unread = 0
    for outcome in report.failures:
        if isinstance(outcome.error, SyncError) and outcome.error.side is Side.SOURCE:
            unread += 1
    if unread and os.path.exists(path) and os.path.getsize(path) > 0:
        text = (
            f"{printable(path)} is left as it was: images whose source could not be read: {unread}"
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
