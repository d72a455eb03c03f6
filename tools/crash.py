#!/usr/bin/env python3
"""Kill syncs between real registries at any byte, run them again, and look for what was lost.

    python3 tools/crash.py [-n 10] [--seed 1] [-v]

Each round starts a new, older target (Debian's docker-registry) and lets a sync of many tags begin.
It ends the sync with SIGKILL when a number of bytes that the seed draws has gone over the wire,
anywhere between the first and the last of an undisturbed run. Then every tag at the target must be
the old or the new image, whole: its manifest is read by skopeo, everything below it is walked and
compared. The state must load. The next run must copy the rest with all artifacts, and both runs
together may move at most 1.5 times the bytes of an undisturbed one.

Owns: the rounds, the meter between the program and its registries, the verdict.
May not know: anything of the program but its command line.
Invariants: where a sync is killed is decided by bytes, not by a clock.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from conformance.client.attachments import Family, plain  # noqa: E402
from conformance.client.copies import fetch_http, push_http  # noqa: E402
from conformance.content.images import Image, Seed  # noqa: E402
from conformance.programs import docker_registry, skopeo  # noqa: E402

__all__ = ["CrashError", "Round", "main", "rounds"]

REPOSITORIES = 3
TAGS = 3
LAYER = 200_000  # bytes
PIECE = 16384  # bytes that pass a meter at once
MOST = 1.5  # times the bytes of an undisturbed run, for the killed and the next one together
TIME_LIMIT = 120  # seconds for one sync

Tag = tuple[str, str]  # repository and tag


class CrashError(Exception):
    """What did not hold."""


class Round(NamedTuple):
    """What came of one kill."""

    number: int
    at: float  # where it struck, in parts of an undisturbed run's bytes
    was_killed: bool
    new: int  # tags that named the new image then
    tags: int
    lost: float  # what both runs moved above an undisturbed one, in parts of its bytes
    kept: bool  # whether there was a state that knows something

    @property
    def stage(self) -> str:
        """How many tags were new when it struck, in a word."""
        if not self.new:
            return "none"
        return "all" if self.new == self.tags else "some"

    def __str__(self) -> str:
        end = f"killed at {self.at:4.0%}" if self.was_killed else "ended first   "
        new = f"{self.new:>2} of {self.tags} tags new"
        return f"round {self.number:>3}: {end}, {new}, {1 + self.lost:.2f} of the bytes"


class Meter:
    """A port in front of a registry, which counts the bytes that pass in both directions."""

    def __init__(self, address: str, tally: Tally) -> None:
        host, _, port = address.rpartition(":")
        self._registry = (host, int(port))
        self._tally = tally
        self._listener = socket.create_server(("127.0.0.1", 0))
        _, own_port = self._listener.getsockname()
        self.address = f"127.0.0.1:{own_port}"
        self._accepting = threading.Thread(target=self._accept)
        self._serving: list[threading.Thread] = []
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                registry = socket.create_connection(self._registry)
            except OSError:
                client.close()
                continue
            thread = threading.Thread(target=self._serve, args=(client, registry))
            self._serving.append(thread)
            thread.start()

    def _serve(self, client: socket.socket, registry: socket.socket) -> None:
        with client, registry:
            answering = threading.Thread(target=self._pass_on, args=(registry, client))
            answering.start()
            self._pass_on(client, registry)
            answering.join()

    def _pass_on(self, sender: socket.socket, receiver: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := sender.recv(PIECE):
                if not self._tally.add(len(data)):
                    break
                receiver.sendall(data)
        for end in (sender, receiver):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening; wait until everything that was connected has gone."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        for thread in self._serving:
            thread.join(TIME_LIMIT)


class Tally:
    """Bytes that passed all meters of one run; the process that dies at `limit` of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begin()

    def begin(self, limit: int | None = None) -> None:
        """Count from nothing."""
        with self._lock:
            self.bytes = 0
            self._limit = limit
            self.victim: subprocess.Popen[str] | None = None

    def add(self, count: int) -> bool:
        """Count; False when these bytes are not to arrive any more."""
        with self._lock:
            self.bytes += count
            if self._limit is None or self.bytes < self._limit:
                return True
            if self.victim is not None and self.victim.poll() is None:
                self.victim.kill()
            return False


class Scene(NamedTuple):
    """What the source holds, and what the target held before."""

    work: Path
    source: str
    tally: Tally
    images: dict[Tag, Image]
    # Of each image everything below it and all its artifacts: a fallback list, and what that names.
    contents: dict[Tag, dict[str, bytes]]
    old: dict[Tag, Image]


@contextlib.contextmanager
def _scene(seed: int) -> Iterator[Scene]:
    with (
        tempfile.TemporaryDirectory(prefix="crash-") as directory,
        contextlib.ExitStack() as running,
    ):
        work = Path(directory)
        tally = Tally()
        make = Seed(seed)
        address = running.enter_context(docker_registry(work / "source"))
        base = [make.layer(LAYER * 3) for _ in range(2)]
        images: dict[Tag, Image] = {}
        contents: dict[Tag, dict[str, bytes]] = {}
        for repository in _repositories():
            for number in range(TAGS):
                tag = f"v{number}"
                image = _image(make, base, is_index=number == 1)
                Family(plain(make, image)).push(address, repository, tag)
                images[repository, tag] = image
                held = fetch_http(address, repository, tag, referrers=True)
                assert len(held) > len(image.contents()) + 3, "three artifacts, and lists of them"
                contents[repository, tag] = held

        # One tag of each repository is at the target already, as it once was.
        old = {(repository, "v0"): make.image(sizes=(5000,)) for repository in _repositories()}
        meter = Meter(address, tally)
        running.callback(meter.close)
        yield Scene(work, meter.address, tally, images, contents, old)


def _repositories() -> list[str]:
    return [f"app-{number}" for number in range(REPOSITORIES)]


def _image(make: Seed, base: list[bytes], *, is_index: bool) -> Image:
    """Make an image, or an index of two, each with two layers of its own."""

    def one() -> Image:
        return make.image(layers=[*base, make.layer(LAYER), make.layer(LAYER)])

    return make.index([one(), one()]) if is_index else one()


@contextlib.contextmanager
def _target(scene: Scene) -> Iterator[tuple[str, str]]:
    """Start the older target; yield its own address and the meter's."""
    home = scene.work / "target"
    with contextlib.ExitStack() as running:
        running.callback(shutil.rmtree, home, ignore_errors=True)
        address = running.enter_context(docker_registry(home))
        for (repository, tag), image in scene.old.items():
            push_http(image, address, repository, tag)
        meter = Meter(address, scene.tally)
        running.callback(meter.close)
        yield address, meter.address


def _configuration(scene: Scene, target: str, slots: int) -> Path:
    """Write the sync into a directory of its own, which gets the state too."""
    home = scene.work / "run"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    document = {
        "registries": {"s": {"url": f"http://{scene.source}"}, "t": {"url": f"http://{target}"}},
        "defaults": {"source": "s", "targets": ["t"]},
        "mappings": [{"from": name, "tags": {"glob": "v*"}} for name in _repositories()],
        "global": {"max_concurrent_transfers": slots},
    }
    file = home / "mirror.yaml"
    file.write_text(json.dumps(document), encoding="utf-8")
    return file


class Ended(NamedTuple):
    """How a sync ended, and what it said."""

    status: int
    output: str


def _run(scene: Scene, file: Path, kill_at: int | None = None) -> Ended:
    scene.tally.begin(kill_at)
    command = [sys.executable, str(ROOT / "regsync.py"), "sync", "--no-progress", "-c", str(file)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        scene.tally.victim = running
        try:
            output, _ = running.communicate(timeout=TIME_LIMIT)
        finally:
            running.kill()
    return Ended(running.returncode, output)


def _tags(address: str, repository: str) -> list[str]:
    """Return the tags of a repository; docker-registry answers 404 where there is none yet."""
    try:
        with urllib.request.urlopen(
            f"http://{address}/v2/{repository}/tags/list", timeout=30
        ) as answer:
            return list(json.load(answer)["tags"] or [])
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return []
        raise


def _check_tags(scene: Scene, address: str, *, all_new: bool) -> int:
    """Count the tags that are new; CrashError unless each is the old or the new image, whole.

    With `all_new` none may be old or absent, and each must have its artifacts.
    """
    new = 0
    listed = {name: _tags(address, name) for name in _repositories()}
    for repository, tag in scene.images:
        old = None if all_new else scene.old.get((repository, tag))
        if tag in listed[repository]:
            new += _check_image(scene, address, repository, tag, old)
        elif all_new or old is not None:
            raise CrashError(f"{repository}:{tag} is not there")
        if all_new:
            contents = fetch_http(address, repository, tag, referrers=True)
            if contents != scene.contents[repository, tag]:
                message = "has not all the artifacts that the source has"
                raise CrashError(f"{repository}:{tag} {message}")
    _check_no_other_tags(scene, listed)
    return new


def _check_image(scene: Scene, address: str, repository: str, tag: str, old: Image | None) -> bool:
    """Tell whether a tag names the new image; CrashError unless it or `old` is there, whole."""
    name = f"{repository}:{tag}"
    where = f"docker://{address}/{name}"
    body = skopeo("inspect", "--raw", "--tls-verify=false", where, home=scene.work)
    known = [image for image in (scene.images[repository, tag], old) if image is not None]
    found = next((image for image in known if image.body == body), None)
    if found is None:
        raise CrashError(f"{name} is neither the old image nor the new one")
    if fetch_http(address, repository, tag) != found.contents():
        raise CrashError(f"{name} is not whole")
    return found is not old


def _check_no_other_tags(scene: Scene, listed: Mapping[str, Sequence[str]]) -> None:
    """Refuse tags that nobody asked for; fallback lists and cosign's tags belong to an image."""
    extra = [
        f"{repository}:{tag}"
        for repository, tags in listed.items()
        for tag in tags
        if not tag.startswith("sha256-") and (repository, tag) not in scene.images
    ]
    if extra:
        raise CrashError(f"tags that nobody asked for: {extra}")


def _check_run(ended: Ended) -> None:
    """Refuse a run that failed, that warned of its state, or that did not know what it did."""
    signs = ("failed", "error", "warning: the state", "warning: no s")
    complaints = [line for line in ended.output.splitlines() if line.startswith(signs)]
    if ended.status != 0 or complaints or "Traceback" in ended.output:
        raise CrashError(f"status {ended.status}: {ended.output[-2000:]}")


def rounds(count: int, seed: int) -> Iterator[Round]:
    """Do so many rounds; CrashError at the first that is not as it has to be."""
    with _scene(seed) as scene:
        undisturbed: dict[int, int] = {}  # bytes of such a run, by its slots
        for number in range(1, count + 1):
            dice = random.Random(seed * 1_000_003 + number)
            slots = dice.choice([1, 2, 4])
            if slots not in undisturbed:
                undisturbed[slots] = _run_undisturbed(scene, slots)
            limit = dice.randrange(1, undisturbed[slots])
            try:
                yield _round(scene, number, slots, limit, undisturbed[slots])
            except CrashError as error:
                where = f"{slots} slots, killed at byte {limit} of {undisturbed[slots]}"
                raise CrashError(f"round {number}, {where}: {error}") from error


def _run_undisturbed(scene: Scene, slots: int) -> int:
    """Run once to the end; return the bytes that this moved."""
    with _target(scene) as (address, metered):
        _check_run(_run(scene, _configuration(scene, metered, slots)))
        moved = scene.tally.bytes
        _check_tags(scene, address, all_new=True)
    return moved


def _round(scene: Scene, number: int, slots: int, limit: int, undisturbed: int) -> Round:
    """Kill a run at byte `limit` of the bytes of an undisturbed run, look, run again, look again."""
    with _target(scene) as (address, metered):
        file = _configuration(scene, metered, slots)
        killed = _run(scene, file, limit)
        moved = scene.tally.bytes
        was_killed = killed.status == -signal.SIGKILL
        if not was_killed:
            _check_run(killed)
        new = _check_tags(scene, address, all_new=False)
        kept = has_entries(file.parent / ".regsync")

        _check_run(_run(scene, file))
        moved += scene.tally.bytes
        _check_tags(scene, address, all_new=True)
    if moved > MOST * undisturbed:
        raise CrashError(f"both runs moved {moved} bytes, an undisturbed one {undisturbed}")
    lost = moved / undisturbed - 1
    return Round(number, limit / undisturbed, was_killed, new, len(scene.images), lost, kept)


def has_entries(cache: Path) -> bool:
    """Say whether the state that a killed run left knows anything.

    A copy is looked at: SQLite repairs what it opens.
    """
    if not (cache / "state.db").exists():
        return False
    with tempfile.TemporaryDirectory() as directory:
        for path in cache.glob("state.db*"):
            shutil.copy(path, directory)
        with contextlib.closing(sqlite3.connect(Path(directory) / "state.db")) as database:
            tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            counts = [f"SELECT count(*) FROM {name}" for (name,) in tables.fetchall()]
            return any(database.execute(count).fetchone() != (0,) for count in counts)


def main(argv: Sequence[str]) -> int:
    """Do the rounds that are asked for and tell what came of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-n", type=int, default=10, help="how many rounds (10)")
    parser.add_argument("--seed", type=int, default=1, help="of the images and the instants (1)")
    parser.add_argument("-v", action="store_true", help="a line for each round")
    options = parser.parse_args(argv)
    done: list[Round] = []
    try:
        for finished in rounds(options.n, options.seed):
            done.append(finished)
            if options.v:
                print(finished, flush=True)
    except CrashError as error:
        print(f"crash: {error}", file=sys.stderr)
        return 1

    killed = [finished for finished in done if finished.was_killed]
    with_state = [finished for finished in killed if finished.kept]
    stages = Counter(finished.stage for finished in killed)
    new = ", ".join(f"{stage} in {number}" for stage, number in sorted(stages.items()))
    moved = [1 + finished.lost for finished in killed] or [1.0]
    print(
        f"{len(done)} rounds, {len(killed)} killed ({len(with_state)} with a state; "
        f"new tags then: {new}); every tag old or whole, every next run complete; "
        f"both runs together moved {statistics.mean(moved):.2f} of one run's bytes on average, "
        f"{max(moved):.2f} at most"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
