#!/usr/bin/env python3
"""Time (processor seconds) the selection among 100,000 tags by rules of several kinds.

    python3 tools/bench_tags.py [-n TAGS]

Owns: the listing and the rules. May not know: registries; nothing is asked of any. Nothing needs to
be installed. Goal, on an idle machine with Debian's Python 3.11: under 2 s for every rule.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _regsync.tags import TagRule, select

__all__ = ["main"]

_ENDS = ("", "-alpine", "-rc.1", "-alpine3.19")
# fmt: off
_RULES = (
    ("everything", TagRule()),
    ("globs", TagRule(glob=("*.[0-9]?{,-alpine*}", "v*"), exclude=("*-rc*", "0.*"), sort="alpha")),
    ("500 globs", TagRule(glob=tuple(f"{i}.*" for i in range(500)))),
    ("range", TagRule(semver=">=1.2,<30", latest=10)),
    ("all at once", TagRule(glob=("*.*", "v*"), exclude=("*-rc*", "*-beta*"), semver="^1||^2||>=3,!=4.x",
                            semver_prerelease="include", sort="semver", latest=10, min_tags=20)),
    ("a floor of all", TagRule(semver="<0", min_tags=1_000_000)),
)
# fmt: on


def main() -> int:
    """Print seconds and how many tags each rule keeps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "-n", dest="tags", type=int, default=100_000, help="tags in the listing (100000)"
    )
    count = parser.parse_args().tags
    listing = [f"{i % 40}.{i // 40 % 50}.{i // 2000}{_ENDS[i % 7 % 4]}" for i in range(count)]
    for name, rule in _RULES:
        began = time.process_time()
        kept = len(select(listing, rule).kept)
        print(
            f"{name:<15} {time.process_time() - began:5.2f} s  {kept} of {len(set(listing))} kept",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
