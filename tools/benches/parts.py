"""Measure parts of the program that ask no registry: election, state, tag rules, configuration.

Owns: the inputs, each as large as a large organisation has it.
May not know: registries.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tools.benches.runner import MIB, REGSYNC, BenchError, Figure, Spent, run_measured
from tools.benches.runs import ENTRIES, write_state

__all__ = ["config", "election", "state", "tags"]

TAGS = 100_000  # of one listing
MAPPINGS = 5000  # of a configuration
RUNS = 5  # of `validate`; the fastest counts, the others measure other work of the machine

# Loads a state and asks 1,000 things of it; prints seconds of both.
READ_STATE = """
import sys, time
from _regsync.state.archive import RepositoryKey
from _regsync.state.database import StateFile
from _regsync.state.knowledge import Knowledge
hosts = sys.argv[2:]
began = time.perf_counter()
state = StateFile(sys.argv[1], print)
state.load()
known = Knowledge(state, now=time.time)
loading = time.perf_counter() - began
began = time.perf_counter()
for number in range(1000):
    where = RepositoryKey(hosts[number % len(hosts)], f"held/app-{number % 200}")
    assert known.is_blob_believed(where, f"sha256:{number * 30 + 7:064x}")
asking = time.perf_counter() - began
print(loading, asking)
"""

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


def election() -> Iterator[Figure]:
    """2,000 images of 40 blobs, elected one by one."""
    from _regsync.sync.election import Election

    elected = Election()
    began = time.process_time()
    for number in range(2000):
        shared = [("host", f"base-{number % 50}-{layer}") for layer in range(20)]
        own = [("host", f"own-{number}-{layer}") for layer in range(20)]
        elected.add(number, [*shared, *own])
    taken = {elected.take() for _ in range(2000)}
    seconds = time.process_time() - began
    if len(taken) != 2000:
        raise BenchError("an image was elected twice")
    yield Figure("election", seconds, "s of CPU", 1.0, detail="2,000 images x 40 blobs")


def state() -> Iterator[Figure]:
    """A state of 600,000 entries, loaded and asked 1,000 times in a process of its own."""
    hosts = ["one.example", "two.example", "three.example"]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "state.db"
        write_state(Path(directory), hosts, ENTRIES)
        ran = run_measured([sys.executable, "-c", READ_STATE, directory, *hosts])
        size = file.stat().st_size / MIB
    imports = run_measured(
        [sys.executable, "-c", "from _regsync.state import database, knowledge"]
    ).spent
    loading, asking = map(float, ran.out.split())
    detail = f"{ENTRIES} entries, a file of {size:.0f} MiB, {1000 * asking:.0f} us a look-up"
    yield Figure("state, loaded", loading, "s", 1.0, detail=detail)
    yield Figure("state, in memory", (ran.spent.peak - imports.peak) / MIB, "MiB", 10)


def tags() -> Iterator[Figure]:
    """The selection among 100,000 tags by rules of several kinds."""
    from _regsync.tags import TagRule, select

    rules = {
        "everything": TagRule(),
        "globs": TagRule(
            glob=("*.[0-9]?{,-alpine*}", "v*"), exclude=("*-rc*", "0.*"), sort="alpha"
        ),
        "500 globs": TagRule(glob=tuple(f"{number}.*" for number in range(500))),
        "range": TagRule(semver=">=1.2,<30", latest=10),
        "all at once": TagRule(
            glob=("*.*", "v*"),
            exclude=("*-rc*", "*-beta*"),
            semver="^1||^2||>=3,!=4.x",
            semver_prerelease="include",
            sort="semver",
            latest=10,
            min_tags=20,
        ),
        "a floor of all": TagRule(semver="<0", min_tags=1_000_000),
    }
    ends = ("", "-alpine", "-rc.1", "-alpine3.19")
    listing = [
        f"{number % 40}.{number // 40 % 50}.{number // 2000}{ends[number % 7 % 4]}"
        for number in range(TAGS)
    ]
    for name, rule in rules.items():
        began = time.process_time()
        kept = len(select(listing, rule).kept)
        seconds = time.process_time() - began
        detail = f"{kept} of {len(set(listing))} kept"
        yield Figure(f"tags, {name}", seconds, "s of CPU", 2.0, detail=detail)


def config() -> Iterator[Figure]:
    """`validate` on a large configuration, the start of Python included."""
    anchored = HEAD.replace("  hub: {", "  hub: &hub {")
    kinds = {
        "3 lines each": (HEAD, SHORT),
        "9 lines each": (HEAD, LONG),
        "an anchor": (anchored, SHORT),
    }
    with tempfile.TemporaryDirectory() as directory:
        for name, (head, body) in kinds.items():
            file = Path(directory) / "mirror.yaml"
            entries = "".join(body.format(n=n, minor=n % 9) for n in range(MAPPINGS))
            file.write_text(head + entries, encoding="utf-8")
            runs = [validate(file) for _ in range(RUNS)]
            fastest = min(spent.wall for spent in runs)
            size = file.stat().st_size / 1e6
            peak = max(spent.peak for spent in runs) / 1e6
            detail = f"{MAPPINGS} mappings, {size:.1f} MB; {peak:.0f} MB of memory"
            yield Figure(f"config, {name}", fastest, "s", detail=detail)


def validate(file: Path) -> Spent:
    """Check a configuration, which has to succeed in silence."""
    ran = run_measured(REGSYNC.command("validate", str(file)))
    if ran.err:
        raise BenchError(f"validate says {ran.err[:500]}")
    return ran.spent
