#!/usr/bin/env python3
"""Show on this machine that regsync copies images bit for bit, and that a second sync moves nothing.

    python3 tools/demo.py [--counts]

Builds the program, starts two registries on free local ports, puts images of the usual shapes into
the first, syncs them to the second with a built file (the default build where its FIPS gate holds,
else the other), compares both registries byte for byte, syncs again. `--counts` shows requests by
kind of both syncs instead of the first one's own output.

Needs Python 3.10 or newer, and pip and a package index once, for the wheels that
tools/build_zipapp.py bundles. Writes to demo/, dist/ and build/ only.

Owns: the story and its verdict.
May not know: how anything is copied.
Invariants: status 0 only when both registries hold the same and the second sync moved nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if TYPE_CHECKING:
    from conformance.images import Image

__all__ = ["main"]

DEMO = ROOT / "demo"
GATED = ROOT / "dist" / "regsync.pyz"
OPEN = ROOT / "dist" / "regsync-nofips.pyz"
SEPARATOR = ":: "

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
SEED = 2024  # of the images

Tag = tuple[str, str]  # repository and tag at the source


class DemoError(Exception):
    """What is missing or went wrong, on one line."""


class Shown(NamedTuple):
    """An image of the demo, and what it is an example of."""

    shape: str
    image: Image


class Addresses(NamedTuple):
    """Where both registries listen."""

    source: str
    target: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return 0, or 1 and one line that says what did not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", action="store_true", help="show requests by kind of both syncs")
    options = parser.parse_args(argv)
    if sys.version_info < (3, 10):  # noqa: UP036  what comes next does not run there
        sys.stderr.write(
            f"demo: Python 3.10 or newer is needed; this is {sys.version.split()[0]}\n"
        )
        return 1
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    try:
        show(counts=options.counts)
    except (DemoError, AssertionError, OSError) as error:
        sys.stderr.write(f"demo: {error}\n")
        return 1
    return 0


def show(*, counts: bool) -> None:
    """Tell the story; raise where it does not hold."""
    say(f"building {GATED.relative_to(ROOT)} and {OPEN.relative_to(ROOT)}")
    build()
    DEMO.mkdir(exist_ok=True)
    program, reason = choose()
    say(f"using {program}: {reason}")
    with registry("source") as source, registry("target") as target:
        addresses = Addresses(source, target)
        say(f"two empty registries: source {source}, target {target}; their logs are in demo/")
        images = seed(source)
        show_images(images)
        config = DEMO / "mirror.yaml"
        config.write_text(CONFIG.format(source=source, target=target), encoding="utf-8")

        say(f"python3 {program} sync -c demo/mirror.yaml")
        first: Mapping[str, Any] = {}
        if counts:
            first = json.loads(sync(program, "--json"))
        else:
            print(sync(program), end="")
        say("comparing what both registries hold, byte for byte")
        compare(images, source, target)

        say("the same sync again")
        totals = json.loads(sync(program, "--json"))["totals"]
        print(f"Images: {totals['images']['synced']} synced, {totals['images']['skipped']} skipped")
        requests = by_side(totals["requests"], addresses)
        print(f"Data: {totals['bytes']} bytes; requests: {requests}")
        check_nothing_moved(totals, len(images))
        compare(images, source, target)
        if counts:
            show_counts(first["totals"], totals, least(images), addresses)
    say("all of it held. Both registries have ended; next:")
    print("  look at demo/mirror.yaml, put your own registries into it, and check it:")
    print(f"    python3 {program} validate demo/mirror.yaml")
    print("  copy a single image:")
    print(f"    python3 {program} copy SOURCE/REPOSITORY:TAG TARGET/REPOSITORY")


def show_images(images: Mapping[Tag, Shown]) -> None:
    """Tell what the source holds."""
    blobs: dict[str, bytes] = {}
    for shown in images.values():
        blobs.update(shown.image.blobs)
    size = sum(map(len, blobs.values()))
    say(f"the source now holds {len(images)} tags, which name {len(blobs)} blobs of {size} bytes:")
    for (repository, tag), shown in images.items():
        print(f"{f'{repository}:{tag}':18} {shown.shape}")


def say(text: str) -> None:
    """Write one line of the story, before whatever a child writes next."""
    print(f"{SEPARATOR}{text}", flush=True)


def build() -> None:
    """Build the program with the interpreter that runs this."""
    command = [sys.executable, str(ROOT / "tools" / "build_zipapp.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise DemoError(f"the program cannot be built: {lines[-1].removeprefix('error: ')}")


def choose() -> tuple[Path, str]:
    """Return the build that runs on this host, below the checkout, and why it is that one."""
    version: dict[str, Any] = json.loads(run(GATED, "version", "--json"))
    chosen = GATED if version["gate_holds"] else OPEN
    return chosen.relative_to(ROOT), version["gate"]


@contextmanager
def registry(name: str) -> Iterator[str]:
    """Run an empty registry, on h11 and anyio from the built file; yield HOST:PORT."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(OPEN), str(ROOT)))}
    command = [sys.executable, "-m", "conformance", "serve", "--port", "0"]
    with open(DEMO / f"{name}.log", "wb") as log:
        running = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            cwd=ROOT,
        )
        try:
            assert running.stdout is not None
            line = running.stdout.readline().decode()  # serving URL
            if not line.startswith("serving "):
                raise DemoError(f"the registry did not start: see demo/{name}.log")
            url = line.split()[1]
            yield url.partition("://")[2]
        finally:
            running.terminate()
            running.communicate()


def seed(address: str) -> dict[Tag, Shown]:
    """Put images into a registry and return them."""
    from conformance.images import Seed
    from conformance.walks import push_http

    make = Seed(SEED)
    base = make.layer(300_000)
    web = make.image(layers=[base, make.layer(40_000)])
    newer = make.image(format="docker", layers=[base, make.layer(50_000), base])
    many = make.index(attestations=True)
    nested = make.index([many, make.index(format="docker", platforms=("windows/amd64",))])
    docker = "one platform, Docker's format; shares a layer with v1.0.0"
    images = {
        ("shop/web", "v1.0.0"): Shown("one platform, OCI", web),
        ("shop/web", "v1.1.0"): Shown(docker, newer),
        ("shop/web", "latest"): Shown("another name of v1.1.0", newer),
        ("shop/base", "12"): Shown("four platforms and their attestations", many),
        ("shop/base", "stable"): Shown("another name of 12", many),
        ("shop/base", "bundle"): Shown("an index of indexes", nested),
    }
    for (repository, tag), shown in images.items():
        push_http(shown.image, address, repository, tag)
    return images


def sync(program: Path, *options: str) -> str:
    """Run one sync with the built file; return its results."""
    return run(ROOT / program, "sync", "-c", "mirror.yaml", "--no-progress", *options)


def run(program: Path, *arguments: str) -> str:
    """Run a built file, as a user would, in demo/; return its standard output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    sys.stdout.flush()  # before what the child says on standard error
    command = [sys.executable, str(program), *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, encoding="utf-8", cwd=DEMO, env=environment, check=False
    )
    if done.returncode:
        raise DemoError(f"the {arguments[0]} ended with status {done.returncode}")
    return done.stdout


def compare(images: Iterable[Tag], source: str, target: str) -> None:
    """Fetch everything from both sides by the standard library's client, and compare it.

    AssertionError says where they differ.
    """
    from conformance.walks import fetch_http, identical

    wanted: dict[str, set[str]] = {}
    for repository, tag in images:
        to = REPOSITORIES[repository]
        wanted.setdefault(to, set()).add(tag)
        identical(fetch_http(source, repository, tag), fetch_http(target, to, tag))
    for to, tags in wanted.items():
        assert tags_of(target, to) == tags, f"{to} has other tags than it should"


def tags_of(address: str, repository: str) -> set[str]:
    """Return the tags that a registry lists."""
    with contextlib.closing(http.client.HTTPConnection(address, timeout=60)) as connection:
        connection.request("GET", f"/v2/{repository}/tags/list")
        return set(json.load(connection.getresponse())["tags"])


def by_side(requests: Mapping[str, Mapping[str, int]], addresses: Addresses) -> str:
    """Write the requests by kind that went to each side."""
    sides = []
    for name, address in addresses._asdict().items():
        counts = [f"{count} {kind}" for kind, count in requests.get(address, {}).items()]
        sides.append(f"{name} {', '.join(counts) or 'none'}")
    return "; ".join(sides)


def check_nothing_moved(totals: Mapping[str, Any], tags: int) -> None:
    """Hold a second sync to its promise: it looks, and does nothing."""
    kinds = {kind for counts in totals["requests"].values() for kind in counts}
    moving = kinds & {"blob_get", "upload_start", "upload_body", "upload_finish", "manifest_put"}
    nothing = {"synced": 0, "skipped": tags, "failed": 0}
    if totals["images"] != nothing or totals["bytes"] or moving:
        raise DemoError(f"the second sync moved something: {totals}")


class Least(NamedTuple):
    """The fewest requests of one kind that the syncs can do with."""

    first: int
    second: int


def least(images: Mapping[Tag, Shown]) -> dict[str, Least]:
    """Return the fewest requests by side and kind."""
    tags = len(images)
    repositories = len(REPOSITORIES)
    tops = {shown.image.top for shown in images.values()}
    child_manifests = set[tuple[str, str]]()  # by repository and digest
    blobs = set[tuple[str, str]]()
    for (repository, _), shown in images.items():
        digests = shown.image.manifests.keys() - tops
        child_manifests.update((repository, digest) for digest in digests)
        blobs.update((repository, digest) for digest in shown.image.blobs)
    children = len(child_manifests)
    moved = len(blobs)
    return {
        "source tag_list": Least(repositories, repositories),
        "source manifest_get": Least(tags + children, 0),
        "source manifest_head": Least(0, tags),
        "source blob_get": Least(moved, 0),
        "target tag_list": Least(repositories, 0),
        "target manifest_head": Least(0, tags),
        "target upload_start": Least(moved, 0),
        "target upload_body": Least(moved, 0),
        "target manifest_put": Least(tags + children, 0),
    }


def show_counts(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    bounds: Mapping[str, Least],
    addresses: Addresses,
) -> None:
    """Show requests by side and kind of both syncs beside the fewest possible, and bytes sent."""
    cold = requests_by_kind(first["requests"], addresses)
    warm = requests_by_kind(second["requests"], addresses)
    print(f"{'requests':24}{'first':>8}{'least':>8}{'second':>8}{'least':>8}")
    for kind in dict.fromkeys([*bounds, *cold, *warm]):
        bound = bounds.get(kind, Least(0, 0))
        counts = f"{cold.get(kind, 0):8}{bound.first:8}{warm.get(kind, 0):8}{bound.second:8}"
        print(f"{kind:24}{counts}")
    print(f"{'bytes of blobs sent':24}{first['bytes']:8}{'':8}{second['bytes']:8}")


def requests_by_kind(
    requests: Mapping[str, Mapping[str, int]], addresses: Addresses
) -> dict[str, int]:
    """Return requests of a sync with the side before each kind, in place of an address."""
    counts: dict[str, int] = {}
    for side, address in addresses._asdict().items():
        for kind, count in requests.get(address, {}).items():
            counts[f"{side} {kind}"] = count
    return counts


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the registries end too
    sys.exit(main())
