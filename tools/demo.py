#!/usr/bin/env python3
"""Show on this machine that regsync copies images bit for bit, and that a second sync moves nothing.

    python3 tools/demo.py

Builds the program, starts two registries on free local ports, puts images of the usual shapes into
the first, syncs them to the second with the built file, compares both registries byte for byte,
syncs again.

Needs Python 3.10 or newer, and pip and a package index once, for the wheels that
tools/build_zipapp.py bundles. Writes to demo/, dist/ and build/ only.

Owns: the story and its verdict.
May not know: how anything is copied.
Invariants: status 0 only when both registries hold the same and the second sync moved nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["main"]

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "demo"
PROGRAM = ROOT / "dist" / "regsync-nofips.pyz"

CONFIG = """\
# Written by tools/demo.py; both registries end with it.
registries:
  source:
    url: http://{source}
  target:
    url: http://{target}

defaults:
  source: source
  targets: target

mappings:
  - from: shop/web            # three tags, one of them another name of the same image
    tags:
      glob: ["v*", latest]
  - from: shop/base           # multi-arch, and an index inside an index; into another repository
    to: mirror/base
    tags:
      glob: "*"
"""
REPOSITORIES = {"shop/web": "shop/web", "shop/base": "mirror/base"}  # at the source: at the target

Tag = tuple[str, str]  # repository and tag at the source


class DemoError(Exception):
    """What is missing or went wrong, on one line."""


def main() -> int:
    """Run the demo; return 0, or 1 and one line that says what did not hold."""
    if sys.version_info < (3, 10):  # noqa: UP036  what comes next does not run there
        sys.stderr.write(
            f"demo: Python 3.10 or newer is needed; this is {sys.version.split()[0]}\n"
        )
        return 1
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    try:
        show()
    except (DemoError, AssertionError, OSError) as error:
        sys.stderr.write(f"demo: {error}\n")
        return 1
    return 0


def show() -> None:
    """Tell the story; raise where it does not hold."""
    say("building dist/regsync.pyz and dist/regsync-nofips.pyz")
    build()
    sys.path.insert(0, str(PROGRAM))  # h11 and anyio, for the harness
    DEMO.mkdir(exist_ok=True)
    with registry("source") as source, registry("target") as target:
        say(f"two empty registries: source {source}, target {target}; their logs are in demo/")
        say("putting six tags into the source:")
        images = seed(source)
        config = CONFIG.format(source=source, target=target)
        (DEMO / "mirror.yaml").write_text(config, encoding="utf-8")

        say("python3 dist/regsync-nofips.pyz sync -c demo/mirror.yaml")
        print(sync(), end="")
        say("comparing what both registries hold, byte for byte")
        compare(images, source, target)

        say("the same sync again")
        totals = json.loads(sync("--json"))["totals"]
        check_nothing_moved(totals, len(images))
        requests = sum(sum(counts.values()) for counts in totals["requests"].values())
        print(f"Images: {totals['images']['synced']} synced, {totals['images']['skipped']} skipped")
        print(f"Data: {totals['bytes']} bytes, by {requests} requests")
        compare(images, source, target)
    say("all of it held. Both registries have ended; next:")
    print("  look at demo/mirror.yaml, put your own registries into it, and check it:")
    print("    python3 dist/regsync-nofips.pyz validate demo/mirror.yaml")
    print("  copy a single image:")
    print("    python3 dist/regsync-nofips.pyz copy SOURCE/REPOSITORY:TAG TARGET/REPOSITORY")


def say(text: str) -> None:
    """Write one line of the story, before whatever a child writes next."""
    print(f":: {text}", flush=True)


def build() -> None:
    """Build the program with the interpreter that runs this."""
    from tools import build_zipapp

    if build_zipapp.main([]):
        raise DemoError("the program cannot be built")


@contextmanager
def registry(name: str) -> Iterator[str]:
    """Run an empty registry, on h11 and anyio from the built file; yield HOST:PORT."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(PROGRAM), str(ROOT)))}
    command = [sys.executable, "-m", "conformance", "serve"]
    with (
        open(DEMO / f"{name}.log", "wb") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, env=environment, cwd=ROOT, text=True
        ) as running,
    ):
        try:
            assert running.stdout is not None
            line = running.stdout.readline()
            if not line.startswith("serving "):
                raise DemoError(f"the registry did not start: see demo/{name}.log")
            yield line.split()[1].removeprefix("http://")
        finally:
            running.terminate()


def seed(address: str) -> set[Tag]:
    """Put images into a registry; return what was put."""
    from conformance.images import Seed
    from conformance.walks import push_http

    make = Seed(2024)
    base = make.layer(300_000)
    web = make.image(layers=[base, make.layer(40_000)])
    newer = make.image(format="docker", layers=[base, make.layer(50_000), base])
    many = make.index(attestations=True)
    nested = make.index([many, make.index(format="docker", platforms=("windows/amd64",))])
    docker = "one platform, Docker's format; shares a layer with v1.0.0"
    images = {
        ("shop/web", "v1.0.0"): (web, "one platform, OCI"),
        ("shop/web", "v1.1.0"): (newer, docker),
        ("shop/web", "latest"): (newer, "another name of v1.1.0"),
        ("shop/base", "12"): (many, "four platforms and their attestations"),
        ("shop/base", "stable"): (many, "another name of 12"),
        ("shop/base", "bundle"): (nested, "an index of indexes"),
    }
    for (repository, tag), (image, shape) in images.items():
        push_http(image, address, repository, tag)
        print(f"{f'{repository}:{tag}':18} {shape}")
    return set(images)


def sync(*options: str) -> str:
    """Run one sync with the built file, as a user would, in demo/; return its standard output."""
    sys.stdout.flush()  # before what the child says on standard error
    command = [sys.executable, str(PROGRAM), "sync", "-c", "mirror.yaml", "--no-progress", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", cwd=DEMO, check=False)
    if done.returncode:
        raise DemoError(f"the sync ended with status {done.returncode}")
    return done.stdout


def compare(images: Iterable[Tag], source: str, target: str) -> None:
    """Fetch everything from both sides by the harness's client, and compare it.

    AssertionError says where they differ.
    """
    from conformance.walks import fetch_http, identical

    for repository, tag in images:
        copied = fetch_http(target, REPOSITORIES[repository], tag)
        identical(fetch_http(source, repository, tag), copied)


def check_nothing_moved(totals: Mapping[str, Any], tags: int) -> None:
    """Hold a second sync to its promise: it looks, and does nothing."""
    kinds = {kind for counts in totals["requests"].values() for kind in counts}
    moving = kinds & {"blob_get", "upload_start", "upload_body", "upload_finish", "manifest_put"}
    nothing = {"synced": 0, "skipped": tags, "failed": 0}
    if totals["images"] != nothing or totals["bytes"] or moving:
        raise DemoError(f"the second sync moved something: {totals}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the registries end too
    sys.exit(main())
