#!/usr/bin/env python3
"""Feed the parsers of foreign bytes with other and more examples than the tests do.

    python3 tools/fuzz.py --seconds 600              every property of tests/test_fuzz_*.py, round by round
    python3 tools/fuzz.py --seconds 60 link          those whose name has `link` in it (pytest's -k)

Each round has a seed of its own. It is printed when something is found: `--seed N` repeats that
round. The example that is shown is the smallest one; it belongs into a test of its own.

Owns: the rounds and their seeds.
May not know: what is fed to whom.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]

ROOT = Path(__file__).resolve().parent.parent
LONGEST_TEST = 1800  # seconds
FACTOR = 10  # times the examples of an ordinary run


def main(argv: Sequence[str]) -> int:
    """Run rounds until the time is over or something is found; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\nOwns: ")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name", nargs="?", help="only properties whose name matches (as pytest's -k)"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="no round begins later (600)")
    parser.add_argument("--seed", type=int, help="of the first round")
    options = parser.parse_args(argv)
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "hypothesis"]
    pytest += ["-o", f"faulthandler_timeout={LONGEST_TEST}"]
    if options.name:
        pytest += ["-k", options.name]
    pytest += map(str, sorted(ROOT.glob("tests/test_fuzz_*.py")))
    environ = {**os.environ, "FUZZ_FACTOR": str(FACTOR)}

    began = time.monotonic()
    rounds = 0
    while not rounds or time.monotonic() - began < options.seconds:
        seed = random.randrange(2**32)
        if not rounds and options.seed is not None:
            seed = options.seed
        command = [*pytest, f"--hypothesis-seed={seed}"]
        done = subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(f"{done.stdout}{done.stderr}\nfound with --seed {seed}")
            return 1
        rounds += 1
        print(f"round {rounds}: {done.stdout.splitlines()[-1]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
