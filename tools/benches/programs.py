"""The programs that can do the same work, and how each is told what to do.

`--peer NAME` takes the program of that name on the PATH, `--peer NAME=PATH` the one there. Those of
regclient and of this project are both called regsync: they need the PATH. Each is told to keep
CONCURRENCY requests to a registry in flight, but skopeo, which cannot be told.

Owns: the programs' command lines and configurations.
May not know: what is measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tools.benches.runs import REGSYNC, BenchError, Spent, run_measured

__all__ = ["OURS", "Job", "Program", "add_peer_option", "chosen_programs", "run_job"]

CONCURRENCY = 16
OURS = "this"

Command = list[str]


class Job(NamedTuple):
    """What is to be copied: all tags of each repository, to each target, under the same name.

    Registries are HOST:PORT and speak plain HTTP.
    """

    home: Path  # where the program is told what to do, and remembers what it likes
    source: str
    targets: Sequence[str]
    repositories: Sequence[str]  # FIRST/NAME, and FIRST is the same in all
    is_immutable: bool = False  # tags never move


# A program: it writes what it has to read, and returns what is to be run, one after another.
Program = Callable[[Job], list[Command]]


def write(job: Job, document: Mapping[str, Any]) -> str:
    """Write a configuration (JSON is YAML); return its path."""
    file = job.home / "mirror.yaml"
    file.write_text(json.dumps(document), encoding="utf-8")
    return str(file)


def regsync(start: Command, job: Job, **registry: str) -> list[Command]:
    """This program: one sync; `registry` has further fields of each registry."""
    targets = {f"target{number}": address for number, address in enumerate(job.targets)}
    limit = {"max_concurrent": CONCURRENCY}
    document = {
        "registries": {
            name: {"url": f"http://{address}", **limit, **registry}
            for name, address in {"source": job.source, **targets}.items()
        },
        "defaults": {
            "source": "source",
            "targets": list(targets),
            "tags": {"glob": "*", **({"immutable_tags": "*"} if job.is_immutable else {})},
            "artifacts": {"enabled": False},
        },
        "mappings": [{"from": name} for name in job.repositories],
    }
    return [[*start, "sync", "--json", "-q", "-c", write(job, document)]]


def ocync(start: Command, job: Job) -> list[Command]:
    """One sync. It asks for logins over HTTPS alone, unless it has a token, at which nobody looks."""
    return regsync(start, job, auth_type="static_token", token="none")


def regclient(start: Command, job: Job) -> list[Command]:
    """One run of regclient's regsync with an entry for each repository and target."""
    document = {
        "version": 1,
        "creds": [
            {"registry": address, "tls": "disabled", "reqConcurrent": CONCURRENCY}
            for address in (job.source, *job.targets)
        ],
        "defaults": {"parallel": CONCURRENCY, "skipDockerConfig": True},
        "sync": [
            {"source": f"{job.source}/{name}", "target": f"{target}/{name}", "type": "repository"}
            for target in job.targets
            for name in job.repositories
        ],
    }
    return [[*start, "once", "-c", write(job, document), "-v", "warn"]]


def skopeo(start: Command, job: Job) -> list[Command]:
    """One sync for each target. It puts only the last part of a name behind the target's.

    Run by root it remembers blobs outside of its home, but by addresses, which are new each time.
    """
    images: dict[str, list[str]] = {name: [] for name in job.repositories}
    file = write(job, {job.source: {"tls-verify": False, "images": images}})
    first, _, _ = job.repositories[0].rpartition("/")
    command = [*start, "--insecure-policy", "sync", "--src", "yaml", "--dest", "docker"]
    command += ["--all", "--dest-tls-verify=false", file]
    return [[*command, f"{target}/{first}"] for target in job.targets]


def crane(start: Command, job: Job) -> list[Command]:
    """One copy for each repository and target."""
    command = [*start, "copy", "--all-tags", "--jobs", str(CONCURRENCY), "--insecure"]
    if job.is_immutable:
        command.append("--no-clobber")
    return [
        [*command, f"{job.source}/{name}", f"{target}/{name}"]
        for target in job.targets
        for name in job.repositories
    ]


PEERS = {
    "regsync": regsync,
    "regclient": regclient,
    "ocync": ocync,
    "skopeo": skopeo,
    "crane": crane,
}
ON_THE_PATH = ("ocync", "skopeo", "crane")


def add_peer_option(parser: argparse.ArgumentParser) -> None:
    """Let other programs be named."""
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME[=PATH]",
        help=f"measure this program too; may be repeated; of {', '.join(PEERS)}",
    )


def chosen_programs(named: Iterable[str]) -> dict[str, Program]:
    """Return this program and those of --peer, by name."""
    programs: dict[str, Program] = {OURS: partial(regsync, REGSYNC)}
    for text in named:
        name, _, path = text.partition("=")
        if not path and name in ON_THE_PATH:
            path = shutil.which(name) or ""
        if name not in PEERS or not path:
            raise BenchError(f"--peer {text}: no such program was found")
        programs[name] = partial(PEERS[name], [str(Path(path).absolute())])
    return programs


def run_job(program: Program, job: Job) -> tuple[Spent, str]:
    """Run all commands of a job; return their times, the largest memory, and what the last one said.

    BenchError when one fails.
    """
    runs = [run_measured(command, job.home) for command in program(job)]
    spent = Spent(
        sum(spent.wall for spent, _ in runs),
        sum(spent.cpu for spent, _ in runs),
        max(spent.peak for spent, _ in runs),
    )
    return spent, runs[-1][1]
