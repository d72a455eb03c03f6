#!/usr/bin/env python3
"""Show on this machine that regsync copies images bit for bit, and that a second sync moves
nothing.

    python3 tools/demo.py [--counts]

Builds the program, starts two registries on free local ports, puts images of the common shapes into
the first, syncs them to the second with a built file (the default build where its FIPS gate holds,
else the other), compares both registries byte for byte, syncs again. `--counts` shows requests by
kind of both syncs instead of the first one's own output.

Owns: the story and its verdict: status 0 only when both registries hold the same and the second
sync moved nothing. May not know: how anything is copied. Needs Python 3.10 or newer, and pip and a
package index once, for the wheels that tools/build_zipapp.py bundles. Writes to demo/, dist/ and
build/ only.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
REPOSITORIES = {"shop/web": "shop/web", "shop/base": "mirror/base"}


class DemoError(Exception):
    """What is missing or went wrong, on one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when everything held, 1 when something did not, with one line that says what."""
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
    program, why = choose()
    say(f"using {program}: {why}")
    with ExitStack() as stack:
        source, target = (stack.enter_context(registry(name)) for name in ("source", "target"))
        say(f"two empty registries: source {source}, target {target}; their logs are in demo/")
        images = seed(source)
        blobs = {
            digest: data for _, image in images.values() for digest, data in image.blobs.items()
        }
        held = f"{len(blobs)} blobs of {sum(map(len, blobs.values()))} bytes"
        say(f"the source now holds {len(images)} tags, which name {held}:")
        for (repository, tag), (shape, _) in images.items():
            print(f"{f'{repository}:{tag}':18} {shape}")
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
        second = json.loads(sync(program, "--json"))
        totals = second["totals"]
        print(f"Images: {totals['images']['synced']} synced, {totals['images']['skipped']} skipped")
        print(
            f"Data: {totals['bytes']} bytes; requests: {by_side(totals['requests'], source, target)}"
        )
        check_nothing_moved(totals, len(images))
        compare(images, source, target)
        if counts:
            table(first["totals"], totals, least(images), (source, target))
    say("all of it held. Both registries have ended; next:")
    print("  look at demo/mirror.yaml, put your own registries into it, and check it:")
    print(f"    python3 {program} validate demo/mirror.yaml")
    print("  copy a single image:")
    print(f"    python3 {program} copy SOURCE/REPOSITORY:TAG TARGET/REPOSITORY")


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
    told: dict[str, Any] = json.loads(run(GATED, "version", "--json"))
    return (GATED if told["gate_holds"] else OPEN).relative_to(ROOT), told["gate"]


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
            line = running.stdout.readline().decode()
            if not line.startswith("serving "):
                raise DemoError(f"the registry did not start: see demo/{name}.log")
            yield line.split()[1].partition("://")[2]
        finally:
            running.terminate()
            running.communicate()


def seed(address: str) -> dict[tuple[str, str], tuple[str, Image]]:
    """Put images into a registry; return them with what each is, by repository and tag."""
    from conformance.copies import push_http
    from conformance.images import Seed

    make = Seed(2024)
    base = make.layer(300_000)
    web = make.image(layers=[base, make.layer(40_000)])
    newer = make.image(format="docker", layers=[base, make.layer(50_000), base])
    many = make.index(attestations=True)
    nested = make.index([many, make.index(format="docker", platforms=("windows/amd64",))])
    images = {
        ("shop/web", "v1.0.0"): ("one platform, OCI", web),
        ("shop/web", "v1.1.0"): (
            "one platform, Docker's format; shares a layer with v1.0.0",
            newer,
        ),
        ("shop/web", "latest"): ("another name of v1.1.0", newer),
        ("shop/base", "12"): ("four platforms and their attestations", many),
        ("shop/base", "stable"): ("another name of 12", many),
        ("shop/base", "bundle"): ("an index of indexes", nested),
    }
    for (repository, tag), (_, image) in images.items():
        push_http(image, address, repository, tag)
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


def compare(images: Mapping[tuple[str, str], tuple[str, Image]], source: str, target: str) -> None:
    """Fetch everything from both sides by the standard library's client; AssertionError where they
    differ.
    """
    from conformance.copies import fetch_http, identical

    there: dict[str, set[str]] = {}
    for repository, tag in images:
        to = REPOSITORIES[repository]
        there.setdefault(to, set()).add(tag)
        identical(fetch_http(source, repository, tag), fetch_http(target, to, tag))
    for to, tags in there.items():
        assert tags_of(target, to) == tags, f"{to} has other tags than it should"


def tags_of(address: str, repository: str) -> set[str]:
    """Return the tags that a registry lists."""
    with contextlib.closing(http.client.HTTPConnection(address, timeout=60)) as connection:
        connection.request("GET", f"/v2/{repository}/tags/list")
        return set(json.load(connection.getresponse())["tags"])


def by_side(requests: Mapping[str, Mapping[str, int]], source: str, target: str) -> str:
    """Write the requests by kind that went to each side."""
    sides = {
        name: ", ".join(f"{count} {kind}" for kind, count in requests.get(address, {}).items())
        for name, address in (("source", source), ("target", target))
    }
    return "; ".join(f"{name} {text or 'none'}" for name, text in sides.items())


def check_nothing_moved(totals: Mapping[str, Any], tags: int) -> None:
    """Hold a second sync to its promise: it looks, and does nothing."""
    kinds = {kind for counted in totals["requests"].values() for kind in counted}
    moving = kinds & {"blob_get", "upload_start", "upload_body", "upload_finish", "manifest_put"}
    if totals["images"] != {"synced": 0, "skipped": tags, "failed": 0} or totals["bytes"] or moving:
        raise DemoError(f"the second sync moved something: {totals}")


def least(images: Mapping[tuple[str, str], tuple[str, Image]]) -> dict[str, tuple[int, int]]:
    """Return the fewest requests of each kind that the two syncs can do with (docs/design.md
    section 6).
    """
    tags = len(images)
    repositories = len(REPOSITORIES)
    held: dict[str, set[str]] = {repository: set() for repository in REPOSITORIES}
    blobs: dict[str, dict[str, int]] = {repository: {} for repository in REPOSITORIES}
    for (repository, _), (_, image) in images.items():
        held[repository].update(image.manifests)
        blobs[repository].update({digest: len(body) for digest, body in image.blobs.items()})
    tops = {image.top for _, image in images.values()}
    children = sum(len(digests - tops) for digests in held.values())
    moved = sum(map(len, blobs.values()))
    # These registries take a blob of up to 64 KiB in one request; before the first upload to a
    # repository is accepted none is read for it, so one goes in two there.
    large = sum(max(1, sum(size > 65536 for size in each.values())) for each in blobs.values())
    return {
        "source tag_list": (repositories, repositories),
        "source manifest_get": (tags + children, 0),
        "source manifest_head": (0, tags),
        "source blob_get": (moved, 0),
        "target tag_list": (repositories, 0),
        "target manifest_head": (0, tags),
        "target upload_start": (moved, 0),
        "target upload_body": (large, 0),
        "target manifest_put": (tags + children, 0),
    }


def table(
    cold: Mapping[str, Any],
    warm: Mapping[str, Any],
    bounds: Mapping[str, tuple[int, int]],
    addresses: tuple[str, str],
) -> None:
    """Show requests by side and kind for both syncs, each beside the fewest possible, and bytes
    sent.
    """
    asked: dict[str, list[int]] = {kind: [0, 0] for kind in bounds}
    for column, totals in enumerate((cold, warm)):
        for side, address in zip(("source", "target"), addresses, strict=True):
            for kind, count in totals["requests"].get(address, {}).items():
                asked.setdefault(f"{side} {kind}", [0, 0])[column] = count
    print(f"{'requests':24}{'first':>8}{'least':>8}{'second':>8}{'least':>8}")
    for kind, (first, second) in asked.items():
        fewest = bounds.get(kind, (0, 0))
        print(f"{kind:24}{first:8}{fewest[0]:8}{second:8}{fewest[1]:8}")
    print(f"{'bytes of blobs sent':24}{cold['bytes']:8}{'':8}{warm['bytes']:8}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the registries end too
    sys.exit(main())
