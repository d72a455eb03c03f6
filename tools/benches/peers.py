"""The programs that are compared: where each is found, which version it is, how it is told what to do.

A program is looked for on the PATH, or is where `--peer NAME=PATH` says. It is asked for its
version, so that no other program of the same name is measured in its place. Each gets a home of its
own, in which it keeps whatever it remembers from one run to the next.

Every program that can be told so keeps CONCURRENCY requests to a registry in flight at most; what
cannot be told keeps its own limit. Everything else is as it comes. The rest of what each was told
is in `settings`, which `compare` prints.

Owns: the programs' command lines and configurations.
May not know: what is measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from tools.benches.runner import REGSYNC, BenchError, Ran, Spent, run_unchecked, write_config

__all__ = [
    "CONCURRENCY",
    "PEERS",
    "Job",
    "Ours",
    "Peer",
    "add_peer_option",
    "find_peers",
    "forget_blobs",
    "run_job",
]

CONCURRENCY = 16  # requests to one registry at a time

# Where skopeo remembers which registry has which blob. The first is root's, the other below a home.
CACHES = ("/var/lib/containers/cache", ".local/share/containers/cache")


class Job(NamedTuple):
    """What is to be copied: every tag of each repository, to each target, under another name or not.

    All repositories of the targets have the same first part. Registries are HOST:PORT and speak
    plain HTTP.
    """

    home: Path
    source: str
    targets: tuple[str, ...]
    repositories: Mapping[str, str]  # name at the source -> name at the targets
    has_artifacts: bool = False  # signatures and other referrers too
    platform: str = ""  # only this one of each index
    is_immutable: bool = False  # tags never move

    @property
    def first_part(self) -> str:
        """The part of their names that all repositories of the targets share."""
        [part] = {name.rpartition("/")[0] for name in self.repositories.values()}
        return part


class Peer:
    """A program that copies images."""

    name: ClassVar[str]
    program: ClassVar[str]
    settings: ClassVar[str]
    has_platforms: ClassVar[bool] = False  # it can be told to leave platforms out
    version_arguments: ClassVar[Sequence[str]] = ("version",)
    sign: ClassVar[str] = ""  # its version says this, and that of no other program of the name

    def __init__(self, *start: str) -> None:
        self.start = start  # the words that start it

    def version(self) -> str:
        """Return what the program says of itself, on one line; BenchError when it is another one."""
        *_, file = self.start
        try:
            done = subprocess.run(
                [*self.start, *self.version_arguments],
                capture_output=True,
                text=True,
                check=True,
                timeout=30,
            )
        except (OSError, subprocess.SubprocessError):
            raise BenchError(f"{file} does not say its version") from None
        said = " ".join(done.stdout.split())
        if self.sign not in said:
            raise BenchError(f"{file} is not {self.name}: it says {said[:100]!r}")
        return said

    def commands(self, job: Job) -> list[list[str]]:
        """Write what the program has to read, and return what is to be run, one after another."""
        raise NotImplementedError

    def forget(self, job: Job) -> None:
        """Remove all that the program remembers."""
        shutil.rmtree(job.home, ignore_errors=True)
        job.home.mkdir(parents=True)


class Ours(Peer):
    """The program of this repository."""

    name = "this"
    program = "regsync.py"
    settings = f"max_concurrent: {CONCURRENCY}"
    has_platforms = True

    def __init__(self, *start: str) -> None:
        super().__init__(*(start or REGSYNC.command()))

    def commands(self, job: Job) -> list[list[str]]:
        """One sync with a mapping for each repository."""
        names = {f"target{number}": address for number, address in enumerate(job.targets)}
        tags = {"glob": "*", "immutable_tags": "*"} if job.is_immutable else {"glob": "*"}
        defaults: dict[str, object] = {
            "source": "source",
            "targets": list(names),
            "tags": tags,
            "artifacts": {"enabled": job.has_artifacts},
        }
        if job.platform:
            defaults["platforms"] = [job.platform]
        config = write_config(
            job.home / "mirror.yaml",
            {
                name: {"url": f"http://{address}", **self._registry()}
                for name, address in {"source": job.source, **names}.items()
            },
            [{"from": name, "to": to} for name, to in job.repositories.items()],
            defaults,
        )
        return [[*self.start, "sync", "--json", "-q", "-c", str(config)]]

    def _registry(self) -> dict[str, object]:
        return {"max_concurrent": CONCURRENCY}


class Ocync(Ours):
    """ocync, whose configuration is like ours.

    It asks registries for logins over HTTPS alone, unless it has a token: it gets one, which these
    registries do not look at.
    """

    name = "ocync"
    program = "ocync"
    settings = f"max_concurrent: {CONCURRENCY}, auth_type: static_token"
    sign = "ocync"

    def _registry(self) -> dict[str, object]:
        return {"max_concurrent": CONCURRENCY, "auth_type": "static_token", "token": "none"}


class Regclient(Peer):
    """regclient's regsync."""

    name = "regclient"
    program = "regsync"
    settings = f"once, parallel: {CONCURRENCY}, reqConcurrent: {CONCURRENCY}"
    has_platforms = True
    sign = "VCSRef"

    def version(self) -> str:
        """Return the tag of the source, or what stands for it where a commit has none."""
        _, _, tag = super().version().partition("VCSTag: ")
        return tag.partition(" ")[0] or "unknown"

    def commands(self, job: Job) -> list[list[str]]:
        """One run with an entry for each repository and target."""
        entries = []
        for target in job.targets:
            for name, to in job.repositories.items():
                entry: dict[str, object] = {
                    "source": f"{job.source}/{name}",
                    "target": f"{target}/{to}",
                    "type": "repository",
                }
                if job.platform:
                    entry["platforms"] = [job.platform]
                entries.append(entry)
        hosts = [
            {"registry": address, "tls": "disabled", "reqConcurrent": CONCURRENCY}
            for address in dict.fromkeys((job.source, *job.targets))
        ]
        defaults = {
            "parallel": CONCURRENCY,
            "referrers": job.has_artifacts,
            "digestTags": job.has_artifacts,
            "skipDockerConfig": True,
        }
        config = job.home / "regsync.yaml"
        document = {"version": 1, "creds": hosts, "defaults": defaults, "sync": entries}
        config.write_text(json.dumps(document), encoding="utf-8")
        return [[*self.start, "once", "-c", str(config), "-v", "warn"]]


class Skopeo(Peer):
    """skopeo, once for each target."""

    name = "skopeo"
    program = "skopeo"
    settings = "sync --all, a run for each target; 6 blobs of one image at a time, its own limit"
    version_arguments = ("--version",)
    sign = "skopeo version"

    def commands(self, job: Job) -> list[list[str]]:
        """One run for each target."""
        images: dict[str, list[str]] = {name: [] for name in job.repositories}
        file = job.home / "skopeo.yaml"
        document = {job.source: {"tls-verify": False, "images": images}}
        file.write_text(json.dumps(document), encoding="utf-8")
        command = [*self.start, "--insecure-policy", "sync", "--src", "yaml", "--dest", "docker"]
        command += ["--all", "--dest-tls-verify=false", str(file)]
        return [[*command, f"{target}/{job.first_part}"] for target in job.targets]

    def forget(self, job: Job) -> None:
        """Remove all that the program remembers, root's cache of blobs included."""
        super().forget(job)
        forget_blobs(job.home)


def forget_blobs(home: Path) -> None:
    """Remove what skopeo remembers of blobs, by which it would mount instead of copying."""
    for folder in CACHES:
        for file in (home / folder).glob("blob-info-cache*"):
            file.unlink()


class Crane(Peer):
    """crane, once for each repository and target."""

    name = "crane"
    program = "crane"
    settings = f"copy --all-tags --jobs {CONCURRENCY}, a run for each repository and target"

    def commands(self, job: Job) -> list[list[str]]:
        """One run for each repository and target."""
        command = [*self.start, "copy", "--all-tags", "--jobs", str(CONCURRENCY), "--insecure"]
        if job.is_immutable:
            command.append("--no-clobber")
        return [
            [*command, f"{job.source}/{name}", f"{target}/{to}"]
            for target in job.targets
            for name, to in job.repositories.items()
        ]


PEERS: Mapping[str, type[Peer]] = {peer.name: peer for peer in (Regclient, Ocync, Skopeo, Crane)}


def add_peer_option(parser: argparse.ArgumentParser) -> None:
    """Let other tools be named that are not on the PATH."""
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help=f"where another tool is that is not on the PATH: {', '.join(PEERS)}",
    )


def find_peers(named: Iterable[str]) -> list[Peer]:
    """Return the tools on the PATH, and those in `named` as NAME=PATH, which take precedence."""
    paths: dict[str, str] = {}
    for text in named:
        name, equals, path = text.partition("=")
        if name not in PEERS or not equals:
            raise BenchError(f"--peer {text}: it is NAME=PATH, NAME one of {', '.join(PEERS)}")
        paths[name] = path

    found = []
    for name, kind in PEERS.items():
        is_named = name in paths
        place = paths.get(name) or shutil.which(kind.program)
        if place is None:
            continue
        peer = kind(str(Path(place).absolute()))
        try:
            peer.version()
        except BenchError:
            if is_named:
                raise
            continue  # another program of that name
        found.append(peer)
    return found


def run_job(peer: Peer, job: Job, seconds: int, before: Sequence[str] = ()) -> Ran:
    """Run the commands of a job in `seconds` together. Returns their output and what they spent.

    The status is the first that is not 0. `before` is put in front of each command.
    """
    environ = {"HOME": str(job.home), "XDG_RUNTIME_DIR": str(job.home)}
    runs: list[Ran] = []
    for command in peer.commands(job):
        left = seconds - sum(ran.spent.wall for ran in runs)
        ran = run_unchecked([*before, *command], seconds=max(1, int(left)), environ=environ)
        runs.append(ran)
        if ran.status < 0:
            break  # killed: the time is over
    spent = Spent(
        sum(ran.spent.wall for ran in runs),
        sum(ran.spent.cpu for ran in runs),
        max(ran.spent.peak for ran in runs),
    )
    status = next((ran.status for ran in runs if ran.status), 0)
    return Ran(spent, "".join(ran.out for ran in runs), "".join(ran.err for ran in runs), status)
