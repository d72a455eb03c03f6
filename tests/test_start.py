"""A command loads nothing that only other commands need.

Half of the time of a sync in which nothing has changed is imports: each of these names costs from half
a millisecond to fifteen.
"""

from __future__ import annotations

import subprocess
import sys

from tests.ends import ROOT

# What only other commands need, or those who use a registry of a cloud, a lock or an image layout.
NEEDLESS_OURS = {
    *("app.access", "app.auditing", "app.locking", "app.watch", "app.health"),
    "app.pages",
    *("auth.aws", "auth.azure", "auth.google"),
    "layout",
    *("audit", "sync.dry_run", "sync.retry"),
    *("locking", "pins"),
}


def test_the_process_ends_when_its_command_has():
    """The interpreter's own ending takes all modules apart: a sixth of such a run."""
    code = "import atexit, regsync; atexit.register(print, 'ending'); print('held back'); regsync.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    first, *rest = done.stdout.splitlines()
    assert first == "held back"
    assert [line.split()[0] for line in rest] == ["regsync"]


def test_the_modules_that_are_not_loaded_are_there():
    for name in NEEDLESS_OURS:
        assert (ROOT / "_regsync" / f"{name.replace('.', '/')}.py").is_file(), name
