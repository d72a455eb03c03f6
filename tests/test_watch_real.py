"""Watch mode as it is built, as a process of its own, between two of Debian's docker-registry."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from conformance.client.copies import fetch_http, identical, push_http
from conformance.content.images import Image, Seed
from tests.ends import program

Registries = Callable[..., str]
REAL = ("-I", "-S")


class Process:
    """The program at work; its two streams are one, and its lines are what a test waits for."""

    def __init__(self, started: subprocess.Popen[str]) -> None:
        self._process, self.lines = started, list[str]()

    def until(self, *words: str) -> str:
        """Read until a line has all words; return it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))
            if all(word in line for word in words):
                return self.lines[-1]
        raise AssertionError(f"it ended without {words}: {self.lines}")

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self, number: signal.Signals) -> int:
        self.send(number)
        return self.ended()

    def ended(self) -> int:
        said, _ = self._process.communicate(timeout=40)
        self.lines += said.splitlines()
        return self._process.returncode


@contextmanager
def watching(pyz: Path, file: Path, *more: str) -> Iterator[Process]:
    command = [
        *program(pyz, *REAL),
        "watch",
        "-c",
        str(file),
        "--interval",
        "1",
        "--health-port",
        "0",
        *more,
    ]
    pipes: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
    }
    with subprocess.Popen(command, text=True, **pipes) as started:
        try:
            yield Process(started)
        finally:
            started.kill()


def configure(file: Path, source: str, target: str, *repositories: str) -> None:
    """Replace the configuration, as those do who never leave half a file."""
    written = {
        "registries": {"s": {"url": source}, "t": {"url": target}},
        "defaults": {"source": "s", "targets": ["t"]},
        "mappings": [{"from": name, "tags": {"glob": "v1"}} for name in repositories],
    }
    whole = file.with_suffix(".new")
    whole.write_text(json.dumps(written))
    whole.replace(file)


def holds(registry: str, repository: str, image: Image) -> bool:
    return identical(fetch_http(registry, repository, "v1"), image.contents())


def probe(line: str, path: str) -> int:
    """Ask for a state at the port that the program's line tells."""
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{line.split()[-1]}{path}", timeout=10
        ) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
def test_tags_move_mappings_come_and_go_and_a_kill_loses_nothing(docker_registries, pyz, tmp_path):
    source, target, seed = docker_registries(), docker_registries(), Seed(11)
    file = tmp_path / "mirror.yaml"
    first, moved, last, *two = (seed.image(sizes=(5000,)) for _ in range(5))
    push_http(first, source, "one", "v1")
    push_http(two[0], source, "two", "v1")
    configure(file, source, target, "one")
    with watching(pyz, file) as process:
        probes = process.until("health probes at")
        process.until("synced", "/one:v1")
        assert holds(target, "one", first)
        process.until("info: cycle 1: ")
        push_http(moved, source, "one", "v1")
        process.until("synced", "/one:v1")
        assert holds(target, "one", moved)
        assert (probe(probes, "/healthz"), probe(probes, "/readyz")) == (200, 200)
        configure(file, source, target, "two")
        process.send(signal.SIGHUP)
        process.until("now in force: 1 mappings")
        process.until("synced", "/two:v1")
        assert holds(target, "two", two[0])
        push_http(last, source, "one", "v1")
        push_http(two[1], source, "two", "v1")
        process.until("synced", "/two:v1")
        process.until("info: cycle ")
        assert holds(target, "one", moved), "that mapping is gone"
        process.end(signal.SIGKILL)
    with watching(pyz, file, "--json") as process:
        report = json.loads(process.until('"schema"'))
        assert [each["reason"] for each in report["images"]] == ["unchanged"]
        assert report["totals"]["requests"] == {
            source: {"manifest_head": 1},
            target: {"manifest_head": 1},
        }
        again = json.loads(process.until('"schema"'))
        assert again["totals"]["requests"] == report["totals"]["requests"]
        assert process.end(signal.SIGTERM) == 0


@pytest.mark.process
def test_an_address_that_is_taken_ends_it_before_it_asks_anything(pyz, tmp_path, speaker):
    taken = speaker(lambda connected: None).rpartition(":")[2]
    file = tmp_path / "mirror.yaml"
    configure(file, "http://registry.invalid", "http://other.invalid", "one")
    with watching(pyz, file, "--health-port", taken) as process:
        assert process.until(
            "error: CONFIG_ERROR: ", "health probes: cannot listen", f"127.0.0.1 port {taken}"
        )
        assert process.ended() == 3
    assert not (tmp_path / ".regsync").exists()
