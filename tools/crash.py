#!/usr/bin/env python3
"""Kill syncs between real registries at any byte, run them again, and see that nothing is lost or
wrong.

    python3 tools/crash.py [-n 10] [--seed 1] [-v]

Each round starts a new, older target (Debian's docker-registry), lets a sync of many tags begin,
and ends it with SIGKILL when a number of bytes that the seed draws has gone over the wire, anywhere
between the first and the last of an undisturbed run. Then every tag at the target must be the old
or the new image, whole (its manifest read by skopeo, everything below it walked and compared), the
state must load, and the next run must bring the rest and what hangs on it, in which both runs
together may move at most 1.5 times the bytes of an undisturbed one.

Owns: the rounds, the meter between the program and its registries, the verdict. May not know:
anything of the program but its command line. Invariant: where a sync is killed is decided by bytes,
not by a clock.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from conformance.attachments import Family, plain  # noqa: E402
from conformance.copies import fetch_http, push_http  # noqa: E402
from conformance.images import Image, Seed  # noqa: E402
from conformance.registries import docker_registry, skopeo  # noqa: E402

__all__ = ["CrashError", "Round", "main", "rounds"]

REPOSITORIES = 3
TAGS = 3
LAYER = 200_000
MOST = 1.5  # times the bytes of an undisturbed run, for the killed and the next one together
TIME_LIMIT = 120


class CrashError(Exception):
    """What did not hold."""


class Round(NamedTuple):
    """What came of one kill: where, how many tags were new then, and bytes in parts of an
    undisturbed run's.
    """

    number: int
    at: float
    was_killed: bool
    new: int
    tags: int
    lost: float  # what both runs moved, above an undisturbed one's
    kept: bool  # whether a state was there that knows something

    def __str__(self) -> str:
        how = f"killed at {self.at:4.0%}" if self.was_killed else "ended first   "
        return f"round {self.number:>3}: {how}, {self.new:>2} of {self.tags} tags new, {1 + self.lost:.2f} of the bytes"


class Meter:
    """A port in front of a registry: counts what passes, in both directions, and strikes at a
    number of bytes.
    """

    def __init__(self, address: str, tally: Tally) -> None:
        host, _, port = address.rpartition(":")
        self._to = (host, int(port))
        self._tally = tally
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                registry = socket.create_connection(self._to)
            except OSError:
                client.close()
                continue
            self._threads.append(threading.Thread(target=self._serve, args=(client, registry)))
            self._threads[-1].start()

    def _serve(self, client: socket.socket, registry: socket.socket) -> None:
        with client, registry:
            answering = threading.Thread(target=self._pump, args=(registry, client))
            answering.start()
            self._pump(client, registry)
            answering.join()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(16384):
                if not self._tally.add(len(data)):
                    break
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening; wait until everything that was connected has gone."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads.pop(0).join()
        for thread in self._threads:
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
    """What the source holds (and what the target held before), and who stands between."""

    work: Path
    source: str
    tally: Tally
    images: dict[tuple[str, str], Image]
    # Of each image everything below it and everything that hangs on it: a fallback list, and what
    # that names.
    hung: dict[tuple[str, str], dict[str, bytes]]
    old: dict[tuple[str, str], Image]
    in_memory: bool


@contextlib.contextmanager
def _scene(seed: int, in_memory: bool) -> Iterator[Scene]:
    with (
        tempfile.TemporaryDirectory(prefix="crash-") as directory,
        contextlib.ExitStack() as running,
    ):
        work = Path(directory)
        tally = Tally()
        made = Seed(seed)
        address = running.enter_context(docker_registry(work / "source", in_memory=in_memory))
        base = [made.layer(LAYER * 3) for _ in range(2)]
        images: dict[tuple[str, str], Image] = {}
        hung: dict[tuple[str, str], dict[str, bytes]] = {}
        for number in range(REPOSITORIES):
            for tag in range(TAGS):
                own = [
                    made.image(layers=[*base, made.layer(LAYER), made.layer(LAYER)])
                    for _ in range(1 + (tag == 1))
                ]
                image = own[0] if tag != 1 else made.index(own)
                Family(plain(made, image)).push(address, f"app-{number}", f"v{tag}")
                images[f"app-{number}", f"v{tag}"] = image
                found = fetch_http(address, f"app-{number}", f"v{tag}", referrers=True)
                assert len(found) > len(image.contents()) + 3, (
                    "three artifacts, and the lists of them"
                )
                hung[f"app-{number}", f"v{tag}"] = found
        # One tag of each repository is at the target already, as it once was.
        old = {(f"app-{number}", "v0"): made.image(sizes=(5000,)) for number in range(REPOSITORIES)}
        meter = Meter(address, tally)
        running.callback(meter.close)
        yield Scene(work, meter.address, tally, images, hung, old, in_memory)


@contextlib.contextmanager
def _target(scene: Scene) -> Iterator[tuple[str, str]]:
    """Start the older target; give its own address and the meter's."""
    home = scene.work / "target"
    with contextlib.ExitStack() as running:
        running.callback(shutil.rmtree, home, ignore_errors=True)
        address = running.enter_context(docker_registry(home, in_memory=scene.in_memory))
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
    mappings = [{"from": f"app-{number}", "tags": {"glob": "v*"}} for number in range(REPOSITORIES)]
    registries = {"s": {"url": f"http://{scene.source}"}, "t": {"url": f"http://{target}"}}
    defaults = {"source": "s", "targets": ["t"]}
    limits = {"max_concurrent_transfers": slots}
    file = home / "mirror.yaml"
    file.write_text(
        json.dumps(
            {"registries": registries, "defaults": defaults, "mappings": mappings, "global": limits}
        )
    )
    return file


def _run(scene: Scene, file: Path, kill_at: int | None = None) -> tuple[int, str]:
    scene.tally.begin(kill_at)
    command = [sys.executable, str(ROOT / "regsync.py"), "sync", "--no-progress", "-c", str(file)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        scene.tally.victim = process
        try:
            out, _ = process.communicate(timeout=TIME_LIMIT)
        finally:
            process.kill()
    return process.returncode, out


def _tags(address: str, repository: str) -> list[str]:
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
    """Count the tags that are new; CrashError unless each is the old or the new image, whole."""
    new = 0
    listed = {name: _tags(address, name) for name in {name for name, _ in scene.images}}
    for (repository, tag), image in scene.images.items():
        old = scene.old.get((repository, tag))
        if tag not in listed[repository]:
            if all_new or old is not None:
                raise CrashError(f"{repository}:{tag} is not there")
            continue
        where = f"docker://{address}/{repository}:{tag}"
        body = skopeo("inspect", "--raw", "--tls-verify=false", where, home=scene.work)
        found = next(
            (each for each in (image, old) if each is not None and each.body == body), None
        )
        if found is None or (all_new and found is not image):
            raise CrashError(f"{repository}:{tag} is neither the old image nor the new one")
        if fetch_http(address, repository, tag) != found.contents():
            raise CrashError(f"{repository}:{tag} is not whole")
        if (
            all_new
            and fetch_http(address, repository, tag, referrers=True) != scene.hung[repository, tag]
        ):
            raise CrashError(f"{repository}:{tag} has not all that hangs on it at the source")
        new += found is image
    if extra := {
        name: set(tags)
        for name, tags in listed.items()
        if not {(name, tag) for tag in tags if not tag.startswith("sha256-")} <= {*scene.images}
    }:
        raise CrashError(f"tags that nobody asked for: {extra}")
    return new


def _check_run(status: int, out: str) -> None:
    """Refuse a run that failed, that warned of its state, or that did not know what it did."""
    told = [
        line
        for line in out.splitlines()
        if line.startswith(("failed", "error", "warning: the state", "warning: no s"))
    ]
    if status != 0 or told or "Traceback" in out:
        raise CrashError(f"status {status}: {out[-2000:]}")


def rounds(count: int, seed: int, *, in_memory: bool = False) -> Iterator[Round]:
    """Do so many rounds; CrashError at the first that is not as it has to be. `in_memory`: what
    registries hold.
    """
    with _scene(seed, in_memory) as scene:
        whole: dict[int, int] = {}
        for number in range(1, count + 1):
            dice = random.Random(seed * 1_000_003 + number)
            slots = dice.choice([1, 2, 4])
            if slots not in whole:
                with _target(scene) as (address, metered):
                    _check_run(*_run(scene, _configuration(scene, metered, slots)))
                    whole[slots] = scene.tally.bytes
                    _check_tags(scene, address, all_new=True)
            yield _round(scene, number, dice, slots, whole[slots])


def _round(scene: Scene, number: int, dice: random.Random, slots: int, whole: int) -> Round:
    limit = dice.randrange(1, whole)
    with _target(scene) as (address, metered):
        file = _configuration(scene, metered, slots)
        status, out = _run(scene, file, limit)
        spent = scene.tally.bytes
        was_killed = status == -9
        if not was_killed:
            _check_run(status, out)
        try:
            new = _check_tags(scene, address, all_new=False)
            kept = _has_entries(file.parent / ".regsync")
            _check_run(*_run(scene, file))
            spent += scene.tally.bytes
            _check_tags(scene, address, all_new=True)
        except CrashError as error:
            raise CrashError(
                f"round {number}, {slots} slots, killed at byte {limit} of {whole}: {error}"
            ) from error
        if spent > MOST * whole:
            raise CrashError(
                f"round {number}: both runs moved {spent} bytes, an undisturbed one {whole}"
            )
        return Round(
            number, limit / whole, was_killed, new, len(scene.images), spent / whole - 1, kept
        )


def _has_entries(cache: Path) -> bool:
    """Say whether the state that a killed run left knows anything; of a copy, for SQLite repairs what it opens."""
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
    given = parser.parse_args(argv)
    done: list[Round] = []
    try:
        for each in rounds(given.n, given.seed):
            done.append(each)
            if given.v:
                print(each, flush=True)
    except CrashError as error:
        print(f"crash: {error}", file=sys.stderr)
        return 1
    killed = [each for each in done if each.was_killed]
    lost = [1 + each.lost for each in killed] or [1.0]
    stages = Counter(
        "none" if not each.new else "all" if each.new == each.tags else "some" for each in killed
    )
    print(
        f"{len(done)} rounds, {len(killed)} killed ({sum(each.kept for each in killed)} with a state; new tags then: "
        f"{', '.join(f'{name} in {n}' for name, n in sorted(stages.items()))}); every tag old or whole, every next run "
        f"complete; both runs together moved {statistics.mean(lost):.2f} of one run's bytes on average, "
        f"{max(lost):.2f} at most"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
