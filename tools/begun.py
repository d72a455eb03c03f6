"""A plugin of pytest: the test that runs is named in the file $BEGUN, so that one that hangs is known.

tools/mutants.py uses it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def pytest_runtest_setup(item: Any) -> None:
    Path(os.environ["BEGUN"]).write_text(item.nodeid, encoding="utf-8")
