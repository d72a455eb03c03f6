#!/usr/bin/env python3
"""Measure what `validate` costs on a large configuration: seconds and MB, the start of Python
included.

    python3 tools/bench_config.py [-n MAPPINGS] [-r RUNS] [--python PYTHON] [--program FILE]

`short` has three lines a mapping and `long` nine. The lowest of the runs counts: the others measure
the machine's other work.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]

ROOT = Path(__file__).resolve().parent.parent
HEAD = """\
registries:
  hub: {url: docker.io}
  mine: {url: registry.example.com}
defaults:
  source: hub
  targets: [mine]
mappings:
"""
SHORT = """\
  - from: library/image-{n}
    to: mirror/image-{n}
    tags: {{glob: ["1.*", "2.*"], semver: ">=1.{minor}", latest: 5}}
"""
LONG = """\
  - from: library/image-{n}
    to: mirror/image-{n}
    tags:
      glob: ["1.*", "2.*"]
      exclude: "*-rc*"
      semver: ">=1.{minor}"
      sort: semver
      latest: 5
    platforms: [linux/amd64, linux/arm64]
"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Measure what validating a large configuration costs."
    )
    parser.add_argument("-n", type=int, default=5000, help="mappings (%(default)s)")
    parser.add_argument("-r", type=int, default=5, help="runs (%(default)s)")
    parser.add_argument("--python", default=sys.executable, help="the interpreter (%(default)s)")
    parser.add_argument("--program", default=str(ROOT / "regsync.py"), help="regsync.py or a .pyz")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        for name, body in (("short", SHORT), ("long", LONG)):
            path = Path(folder, f"{name}.yaml")
            path.write_text(HEAD + "".join(body.format(n=n, minor=n % 9) for n in range(given.n)))
            command = [given.python, given.program, "validate", str(path)]
            seconds, megabytes = zip(*(measured(command) for _ in range(given.r)), strict=True)
            size = path.stat().st_size / 1e6
            print(
                f"{name:8} {given.n} mappings, {size:.1f} MB: {min(seconds):.2f} s, {max(megabytes):.0f} MB"
            )
    return 0


def measured(command: Sequence[str]) -> tuple[float, float]:
    """Run a command that has to succeed in silence; return its seconds and its peak of memory in
    MB.
    """
    started = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or said:
        raise SystemExit(
            f"{' '.join(command)} ended with {process.returncode}: {said.decode()[:500]}"
        )
    return time.perf_counter() - started, usage.ru_maxrss / (
        1e6 if sys.platform == "darwin" else 1024
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
