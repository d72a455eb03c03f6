#!/usr/bin/env python3
"""Count what runs cost, beside the least that they could cost: requests by class, bytes by
direction.

    python3 tools/bench_bytes.py [--json] [--on harness|debian] [SCENE ...]

Each scene is run cold, then unchanged with the state of the first run, then unchanged without it;
scenes whose source changes are run cold, changed, and changed without state. Registries are the
harness's, which count in their journals, and Debian's docker-registry, whose log is counted. Bytes
are those of manifests and blobs, not of listings and error bodies.

The least is computed here from the images, for a program that knows everything about blobs: each
repository is listed once at each side where tags are chosen by a pattern, each selected tag costs
one question at each side that the listing does not answer, each manifest that a target lacks is
fetched once, each blob that a host lacks is fetched once and uploaded once to each host (a POST and
a PUT; one POST up to 64 KiB where the registry takes that), each other repository of the host
mounts it, each manifest is put once.

Owns: the scenes, their bounds, the tables. May not know: anything of the program but its command
line. Invariant: the program's own count of requests agrees with what the registries saw, else the
run fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from conformance.app import App  # noqa: E402
from conformance.families import PLATFORMS, Family  # noqa: E402
from conformance.images import Image  # noqa: E402
from conformance.messages import Request  # noqa: E402
from conformance.registries import docker_registry  # noqa: E402
from conformance.server import Server, run_in_thread  # noqa: E402
from tools.bench_memory import BenchError, Spent, spend  # noqa: E402

__all__ = ["main"]

SINGLE_POST = 64 * 1024  # up to this a blob goes in one POST, where that is taken
PAGE = 1000
CLASSES = ("list", "HEAD manifest", "GET manifest", "HEAD blob", "GET blob", "mount", "POST upload", "PUT upload",
           "PUT manifest")  # fmt: skip
Images = Mapping[str, Mapping[str, Image]]


class Exchange(NamedTuple):
    """One request as a registry saw it: `pulled` and `pushed` are bytes of manifests and blobs."""

    method: str
    kind: str
    repository: str
    query: Mapping[str, str]
    status: int
    pulled: int = 0
    pushed: int = 0

    @property
    def name(self) -> str:
        """Which of CLASSES it is."""
        if self.kind == "tag_list":
            return "list"
        if self.kind == "upload_start":
            mounts = self.query.get("mount") and self.query.get("from") != self.repository
            return "mount" if mounts and self.status == 201 else "POST upload"
        return f"{self.method} {self.kind}"


@dataclass
class Tally:
    """What was asked of one side, and the bytes of manifests and blobs that it gave or took."""

    requests: Counter[str] = field(default_factory=Counter)
    bytes: int = 0

    @classmethod
    def of(cls, exchanges: Iterable[Exchange]) -> Tally:
        found = cls()
        for each in exchanges:
            found.requests[each.name] += 1
            found.bytes += each.pulled + each.pushed
        return found

    @property
    def count(self) -> int:
        return sum(self.requests.values())

    def __str__(self) -> str:
        return (
            ", ".join(f"{self.requests[name]} {name}" for name in CLASSES if self.requests[name])
            or "nothing"
        )


@dataclass(frozen=True)
class Scene:
    """What the source holds, and before that, where it changes; to how many targets it goes."""

    text: str
    family: Family
    before: Family | None = None
    targets: int = 1
    immutable: bool = False


SCENES: Mapping[str, Scene] = {
    "a": Scene("10 repositories x 10 tags, 5 shared and 3 own layers", Family(size=70_000)),
    "b": Scene("the same as indexes of 4 platforms", Family(size=70_000, platforms=PLATFORMS)),
    "c": Scene(
        "ten bases under 100 repositories x 2 tags",
        Family(size=70_000, repositories=100, tags=2, bases=10),
    ),
    "d": Scene("(a) to three targets", Family(size=70_000), targets=3),
    "e": Scene(
        "1,000 tags that never move, 5 of them new",
        Family(size=70_000, repositories=1, tags=1000, own=1),
        Family(size=70_000, repositories=1, tags=1000, own=1, left_out=5),
        immutable=True,
    ),
    "f": Scene("(a) with 5 % of its tags moved", Family(size=70_000, moved=5), Family(size=70_000)),
}


# ---------------------------------------------------------------- the least


def least(
    scene: Scene, before: Images, now: Images, *, stateful: bool, single: bool
) -> tuple[Tally, Tally]:
    """Return what the source and all targets must be asked when the targets hold `before`."""
    source = Tally()
    target = Tally()
    held = {name: _blobs(tagged.values()) for name, tagged in before.items()}
    on_host = {digest for blobs in held.values() for digest in blobs}
    fetched: dict[str, int] = {}
    for name, tagged in now.items():
        old = before.get(name, {})
        fresh = [tag for tag in tagged if tag not in old]
        moved = [tag for tag in tagged if tag in old and old[tag].top != tagged[tag].top]
        asked = [] if scene.immutable else [tag for tag in tagged if tag in old]
        # A snapshot turns the source's GET into a HEAD, and a moved tag costs its GET besides.
        gets = [*fresh, *(moved if stateful else asked)]
        source.requests["list"] += _pages(tagged)
        source.requests["HEAD manifest"] += len(asked) if stateful else 0
        source.requests["GET manifest"] += len(gets)
        source.bytes += sum(len(tagged[tag].body) for tag in gets)
        # A target is listed where that tells something of two tags: the state tells of those it
        # knows.
        listed = scene.immutable or not stateful or len(fresh) > 1
        target.requests["list"] += _pages(old) if listed else 0
        target.requests["HEAD manifest"] += len(asked)
        new = [tagged[tag] for tag in (*fresh, *moved)]
        known = {digest for image in old.values() for digest in image.manifests}
        children = {
            digest: len(body)
            for image in new
            for digest, (_, body) in image.manifests.items()
            if digest != image.top and digest not in known
        }
        source.requests["GET manifest"] += len(children)
        source.bytes += sum(children.values())
        target.requests["PUT manifest"] += len(new) + len(children)
        target.bytes += sum(len(image.body) for image in new) + sum(children.values())
        for digest, size in _blobs(new).items():
            if digest in held.get(name, {}):
                continue
            if digest in on_host:
                target.requests["mount"] += 1
                continue
            on_host.add(digest)
            fetched[digest] = size
            target.requests["POST upload"] += 1
            target.requests["PUT upload"] += not (single and size <= SINGLE_POST)
            target.bytes += size
    source.requests["GET blob"] += len(fetched)
    source.bytes += sum(fetched.values())
    times = scene.targets
    return source, Tally(
        Counter({name: n * times for name, n in target.requests.items()}), target.bytes * times
    )


def _pages(tags: Collection[str]) -> int:
    """Count the pages of a listing: behind a full one another may stand, whether or not a Link says
    so.
    """
    return len(tags) // PAGE + 1


def _blobs(images: Iterable[Image]) -> dict[str, int]:
    return {digest: len(data) for image in images for digest, data in image.blobs.items()}


# ---------------------------------------------------------------- registries


class Harness:
    """A registry of the harness, in a thread."""

    single = True

    def __init__(self, server: Server) -> None:
        self.address = server.address
        self._server = server

    def know(self, images: Images) -> None:
        """Learn nothing: the journal tells how much came."""

    def load(self, images: Images) -> None:
        """Hold images."""
        assert isinstance(self._server.app, App)
        for repository, tagged in images.items():
            for tag, image in tagged.items():
                image.load_into(self._server.app, repository, tag)

    def exchanges(self) -> list[Exchange]:
        """Return what was asked since the last time."""
        entries = list(self._server.journal.entries)
        self._server.journal.check()
        self._server.journal.clear()
        found = []
        for each in entries:
            carries = each.kind in ("manifest", "blob") and each.status == 200
            pulled = each.response_bytes if carries and each.method == "GET" else 0
            found.append(
                Exchange(
                    each.method,
                    each.kind,
                    each.repository,
                    each.query,
                    each.status or 0,
                    pulled,
                    each.request_bytes,
                )
            )
        return found


class Debian:
    """A docker-registry: its storage is written as it would, its log is read."""

    single = False

    def __init__(self, address: str, home: Path) -> None:
        self.address = address
        self._home = home
        self._read = len((home / "registry.log").read_text())
        self._sizes: dict[str, int] = {}

    def load(self, images: Images) -> None:
        """Hold images, in the files of distribution's storage (its registry/storage/paths.go says
        where).
        """
        base = self._home / "data" / "docker" / "registry" / "v2"
        for repository, tagged in images.items():
            place = base / "repositories" / repository
            for tag, image in tagged.items():
                for digest, body in image.contents().items():
                    algorithm, _, hexed = digest.partition(":")
                    _write(base / "blobs" / algorithm / hexed[:2] / hexed / "data", body)
                    kind = "_manifests/revisions" if digest in image.manifests else "_layers"
                    _write(place / kind / algorithm / hexed / "link", digest.encode())
                algorithm, _, hexed = image.top.partition(":")
                named = place / "_manifests" / "tags" / tag
                _write(named / "index" / algorithm / hexed / "link", image.top.encode())
                _write(named / "current" / "link", image.top.encode())

    def know(self, images: Images) -> None:
        """Learn how large what a log names is: it tells what was sent, not what came."""
        for repository, tagged in images.items():
            for tag, image in tagged.items():
                self._sizes[f"{repository}:{tag}"] = len(image.body)
                self._sizes.update((digest, len(body)) for digest, body in image.contents().items())

    def exchanges(self) -> list[Exchange]:
        """Return what was asked since the last time."""
        text = (self._home / "registry.log").read_text()[self._read :]
        self._read += len(text)
        found = []
        for line in text.splitlines():
            if 'msg="response completed' not in line:
                continue
            facts = {
                name: plain or quoted
                for name, quoted, plain in re.findall(r'([\w.]+)=(?:"([^"]*)"|(\S+))', line)
            }
            uri = facts["http.request.uri"]
            method = facts["http.request.method"]
            status = int(facts["http.response.status"])
            request = Request(method, uri, [])
            query = dict(parse_qsl(urlsplit(uri).query))
            carries = request.kind in ("manifest", "blob") and (method, status) == ("GET", 200)
            found.append(
                Exchange(
                    method,
                    request.kind,
                    request.repository,
                    query,
                    status,
                    int(facts["http.response.written"]) if carries else 0,
                    self._pushed(method, request, query),
                )
            )
        return found

    def _pushed(self, method: str, request: Request, query: Mapping[str, str]) -> int:
        if method == "PUT" and request.kind == "manifest":
            digest = (
                request.reference
                if ":" in request.reference
                else f"{request.repository}:{request.reference}"
            )
            return self._sizes[digest]
        return (
            self._sizes[query["digest"]] if method in ("PUT", "POST") and "digest" in query else 0
        )


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


Registry = Harness | Debian


@contextlib.contextmanager
def registries(kind: str, count: int, work: Path) -> Iterator[list[Registry]]:
    """Start so many empty registries."""
    with contextlib.ExitStack() as stack:
        found: list[Registry] = []
        for number in range(count):
            if kind == "harness":
                found.append(Harness(stack.enter_context(run_in_thread(App()))))
                continue
            home = Path(tempfile.mkdtemp(prefix=f"registry-{number}-", dir=work))
            found.append(Debian(stack.enter_context(docker_registry(home)), home))
        yield found


# ---------------------------------------------------------------- runs


class Measured(NamedTuple):
    """One run: what was asked, beside the least."""

    scene: str
    kind: str
    phase: str
    source: Tally
    target: Tally
    least: tuple[Tally, Tally]
    spent: Spent

    @property
    def excess(self) -> float:
        """How many percent of requests were more than the least."""
        most = sum(each.count for each in self.least)
        return 100 * (self.source.count + self.target.count - most) / most

    @property
    def more_bytes(self) -> int:
        """How many bytes more than the least."""
        return self.source.bytes + self.target.bytes - sum(each.bytes for each in self.least)


def configuration(scene: Scene, places: Sequence[Registry], directory: Path) -> Path:
    """Write the configuration of a scene; the state stands beside it."""
    names = ["source", *(f"target-{number}" for number in range(1, len(places)))]
    rule = {"glob": "*", **({"immutable_tags": "*"} if scene.immutable else {})}
    document = {
        "registries": {
            name: {"url": f"http://{place.address}"}
            for name, place in zip(names, places, strict=True)
        },
        "defaults": {"source": "source", "targets": names[1:], "artifacts": {"enabled": False}},
        "mappings": [{"from": name, "tags": rule} for name in scene.family.images()],
    }
    file = directory / "mirror.yaml"
    file.write_text(json.dumps(document))
    return file


def run(file: Path, places: Sequence[Registry]) -> tuple[Tally, Tally, Spent]:
    """Run once; BenchError unless every image is well and the program counted what the registries
    saw.
    """
    for place in places:
        place.exchanges()
    spent, said = spend(
        [sys.executable, str(ROOT / "regsync.py"), "sync", "--json", "-q", "-c", str(file)]
    )
    report = json.loads(said)
    if report["totals"]["images"]["failed"]:
        raise BenchError(
            f"images failed: {[each for each in report['images'] if each['error']][:3]}"
        )
    seen = {place.address: place.exchanges() for place in places}
    for address, exchanges in seen.items():
        counted = sum(report["totals"]["requests"].get(address, {}).values())
        if counted != len(exchanges):
            raise BenchError(
                f"{address}: the program says {counted} requests, the registry {len(exchanges)}"
            )
    source, *targets = seen.values()
    return Tally.of(source), Tally.of(each for target in targets for each in target), spent


class World(NamedTuple):
    """One scene between registries that were just started."""

    name: str
    kind: str
    places: Sequence[Registry]
    file: Path

    def measure(self, phase: str, before: Images, now: Images, *, stateful: bool) -> Measured:
        """Run once and hold it against the least."""
        bounds = least(
            SCENES[self.name], before, now, stateful=stateful, single=self.places[0].single
        )
        source, target, spent = run(self.file, self.places)
        return Measured(self.name, self.kind, phase, source, target, bounds, spent)


@contextlib.contextmanager
def world(name: str, kind: str, work: Path, *images: Images) -> Iterator[World]:
    """Start the registries of a scene, whose source shall hold the first of `images` and later the
    others.
    """
    scene = SCENES[name]
    with registries(kind, 1 + scene.targets, work) as places:
        for each in places:
            for held in images:
                each.know(held)
        places[0].load(images[0])
        yield World(
            name, kind, places, configuration(scene, places, Path(tempfile.mkdtemp(dir=work)))
        )


def measure(name: str, kind: str, work: Path) -> Iterator[Measured]:
    """Run one scene in all its phases."""
    scene = SCENES[name]
    now = scene.family.images()
    nothing: Images = {repository: {} for repository in now}
    before = now if scene.before is None else scene.before.images()
    with world(name, kind, work, before, now) as one:
        yield one.measure("cold", nothing, before, stateful=False)
        one.places[0].load(now)
        if scene.before is not None:
            yield one.measure("changed", before, now, stateful=True)
        yield one.measure("warm", now, now, stateful=True)
        shutil.rmtree(one.file.parent / ".regsync")
        yield one.measure("warm, no state", now, now, stateful=False)
    if scene.before is not None:
        with world(name, kind, work, before, now) as one:
            run(one.file, one.places)
            one.places[0].load(now)
            shutil.rmtree(one.file.parent / ".regsync")
            yield one.measure("changed, no state", before, now, stateful=False)


# ---------------------------------------------------------------- tables


def table(found: Measured) -> str:
    """Write one run for people."""
    wanted = found.least[0].count + found.least[1].count
    count = found.source.count + found.target.count
    size = found.source.bytes + found.target.bytes
    lines = [
        f"{found.scene} on {found.kind}, {found.phase}: {count} requests, {found.excess:+.1f} % of {wanted}; "
        f"{size} bytes, {found.more_bytes:+d} of the least"
    ]
    for side, was, best in zip(
        ("source", "target"), (found.source, found.target), found.least, strict=True
    ):
        lines.append(f"    {side}: {was}; {was.bytes} bytes")
        if +was.requests != +best.requests or was.bytes != best.bytes:
            lines.append(f"    {'least':>{len(side)}}: {best}; {best.bytes} bytes")
    lines.append(
        f"    {found.spent}, {1000 * found.spent.cpu / count:.2f} s of CPU per 1,000 requests"
    )
    return "\n".join(lines)


def document(found: Measured) -> dict[str, Any]:
    """Write one run for machines."""

    def tally(each: Tally) -> dict[str, Any]:
        return {"requests": dict(+each.requests), "bytes": each.bytes}

    return {
        "scene": found.scene,
        "registry": found.kind,
        "phase": found.phase,
        "source": tally(found.source),
        "target": tally(found.target),
        "least": {"source": tally(found.least[0]), "target": tally(found.least[1])},
        "cpu_s": found.spent.cpu,
        "rss_mb": found.spent.rss,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the scenes; 1 when one could not be run."""
    parser = argparse.ArgumentParser(
        description="count what runs cost, beside the least that they could cost"
    )
    parser.add_argument(
        "scenes",
        nargs="*",
        metavar="SCENE",
        help="; ".join(f"{n}: {s.text}" for n, s in SCENES.items()),
    )
    parser.add_argument(
        "--on", choices=("harness", "debian", "both"), default="both", help="which registries"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")
    given = parser.parse_args(arguments)
    if unknown := {*given.scenes} - {*SCENES}:
        parser.error(f"no scene {', '.join(sorted(unknown))}: one of {' '.join(SCENES)}")
    documents = []
    for kind in ("harness", "debian") if given.on == "both" else (given.on,):
        for name in given.scenes or SCENES:
            if not given.json:
                print(f"({name}) {SCENES[name].text}")
            with tempfile.TemporaryDirectory() as work:
                try:
                    for found in measure(name, kind, Path(work)):
                        documents.append(document(found))
                        if not given.json:
                            print(table(found), flush=True)
                except BenchError as problem:
                    print(f"bench_bytes: {problem}", file=sys.stderr)
                    return 1
    if given.json:
        print(json.dumps(documents, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
