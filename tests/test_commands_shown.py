"""Every command that README and the documents show is run, in the order of its document, and every
configuration copies what its text says.

Each document has a directory of its own, and the hosts that it names answer in memory. What would
change this machine, needs a service that is not here, or takes minutes stands in `NOT_RUN`.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest
import trustme

from conformance.clouds.aws import ACCOUNT, Aws, Private
from conformance.images import Image, Seed
from conformance.personas import imitate
from conformance.registry import App
from conformance.tokens import BasicAuth
from tests.ends import ROOT, Ran, Virtual, stopped_at
from tests.pages import OTHER_PAGES, PAGES_FOR_USERS
from tests.program import help_of

PAGES = [*PAGES_FOR_USERS, *OTHER_PAGES]

# The first words of lines that a shell is to run. Blocks of code hold diagrams and JSON, too.
_PROGRAMS = (
    "regsync|python3|sha256sum|install|skopeo|apt-get|openssl|cd|tar|cat|touch|printf|git|grep|cmp"
    "|export"
)
COMMAND = re.compile(rf"\(?(?:[A-Z]+=\S+ )?(?:{_PROGRAMS}|dist/\S+) \S")
CRON_LINE = re.compile(r"(?:[\d*/,-]+ ){5}\S+ .*?(regsync (?:sync|lock|audit) .*)")

# What is not run here, each with the reason.
NOT_RUN = {
    r"python3 tools/build_zipapp\.py.*": "the fixture `pyz` builds the file, and test_build has every option",
    r"python3 tools/build_static\.py.*": "a quarter of an hour; test_static has its parts",
    r"python3 tools/check\.py.*": "it runs the tests",
    r"python3 tools/demo\.py": "test_documents runs it",
    r"python3 tools/bench\.py.*": "it takes minutes, and measures",
    r"python3 tools/mutants\.py.*": "it takes hours",
    r"PYTHONPATH=dist/regsync-nofips\.pyz python3 -m conformance serve": "it serves until it is stopped",
    r"(?:python3 -m zipfile -l )?dist/regsync-linux-x86_64.*": "test_static_file runs the file, where one was built",
    r"cmp again/.*": "it compares static files, which take a quarter of an hour",
    r"apt-get install .*": "it changes the system",
    r"skopeo .*": "test_layouts and test_static run skopeo with such names",
    r"openssl fipsinstall .*": "it changes the system; test_fips sets up a provider of its own",
    r"git (?:diff --quiet mirror\.lock|rev-parse HEAD)": "it asks git alone",
}

# What stands for words that are not meant as they are.
PLACEHOLDERS = {
    "SRC": "docker.io/library/alpine:3.20",
    "DST": "registry.example.com/base/alpine",
    "HOST/REPO": "docker.io/library/alpine",
    "REPO": "library/alpine",
    "FILE": "mirror.yaml",
    "COMMAND": "sync",
}

# This one finds what was lost just before it.
FINDS = "regsync audit -c mirror.yaml --read"

# Directories of the machine that have a double below the test's own directory.
_MACHINE = re.compile(r"(?<![\w./])/(?=(?:etc|var|media|usr/local)/)")
FOLDERS = "etc/regsync etc/ssl var/lib var/cache/regsync media/disk home/.docker usr/local/bin"

CONTENT = {
    "registry-1.docker.io": {
        "library/alpine": "2.7 3.18.9 3.19 3.19.1 3.20 3.20.0 3.20.3 edge latest",
        "library/nginx": "1.26 1.27 1.27.3 1.28 1.28.0 latest",
        "library/redis": "6.2.1 7.2.4 7.4.0 7.4.1 7.4.1-alpine 7.4 7",
        "example/app": "1.9.0 2.0.1 2.1.0 2.1.0-rc1",
    },
    "ghcr.io": {
        "org/app": "v1 v1.2.3 v1.2.4 v1.3.0-rc.1",
        "fluxcd/source-controller": "v1.1.0 v1.2.3 v1.2.4 v1.3.0-rc.1 v2.0.0",
        "fluxcd/helm-controller": "v1.0.0 v1.1.0-rc.1 v1.1.0-rc.2",
    },
    "quay.io": {
        "org/app": "v1 v2 v2.1.0",
        "prometheus/prometheus": "v2.49.0 v2.50.0 v2.51.2",
        "prometheus/node-exporter": "v1.8.2",
    },
}
TARGETS = ("registry.example.com", "registry.inside.example")
OFFICES = ("berlin.example.com", "lisbon.example.com:5000")
REGION = "eu-central-1"


class Shown(NamedTuple):
    """A block or command of a page."""

    line: int
    # "yaml": the text of a configuration; "python": a program; "command": a line for a shell; "text": output.
    kind: str
    text: str


def shown_in(page: Path) -> Iterator[Shown]:
    """Give the configurations, commands and output of a page, in their order."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"(?ms)^( *)```(\w*)\n(.*?)^ *```$|`([^`]+)`", text):
        line = text.count("\n", 0, found.start()) + 1
        _, language, block, span = found.groups()
        if span is not None and page in OTHER_PAGES:
            continue
        if span is not None:
            command = " ".join(span.split())
            if COMMAND.match(command):
                yield Shown(line, "command", command)
        elif language in ("yaml", "python"):
            yield Shown(line, language, block)
        elif language in ("", "sh", "text"):
            for number, each in enumerate(block.replace("\\\n", "").splitlines(), line + 1):
                if cron := CRON_LINE.match(each):
                    yield Shown(number, "command", cron[1])
                elif COMMAND.match(each.removeprefix("$ ")) and not each.startswith("regsync 0"):
                    yield Shown(number, "command", each.removeprefix("$ "))
            if language == "text":
                yield Shown(line, "text", block.replace("\n    ", " "))


def is_run(shown: Shown) -> bool:
    is_left_out = any(re.fullmatch(pattern, shown.text) for pattern in NOT_RUN)
    return shown.kind == "command" and not is_left_out


def test_every_line_of_a_block_without_a_language_is_a_command() -> None:
    for page in PAGES_FOR_USERS:
        blocks = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"))
        shell = "".join(block for language, block in blocks if not language)
        lines = shell.replace("\\\n", "").splitlines()
        assert [line for line in lines if line and not COMMAND.match(line)] == [], page


def test_what_is_not_run_is_shown_somewhere() -> None:
    shown = [each for page in PAGES for each in shown_in(page)]
    for pattern in [*NOT_RUN, re.escape(FINDS)]:
        assert any(re.fullmatch(pattern, each.text) for each in shown), pattern
    assert sum(map(is_run, shown)) > 60


# Lines that a command prints.
RESULT = re.compile(
    r"(?:synced|missing|incomplete|differs|corrupt|failed|would|select|moved|ok|Images|Layers|Data|Time)\b"
    r"|regsync \d"
)
# test_documents compares blocks about this repository word for word.
COMPARED_ELSEWHERE = "ghcr.io/org/app"


def in_general(text: str) -> str:
    """Return a line of output without names, numbers, times and digests, which differ between runs."""
    text = re.sub(r"\S+/\S+", "NAME", text)
    text = re.sub(r"\d+ [A-Z][a-z]{2} \d{4}", "DATE", text)
    text = re.sub(r"sha256:[0-9a-f]*…?", "DIGEST", text)
    text = re.sub(r"\d+(?:\.\d+)*", "0", text)
    return re.sub(r"\b0 (?:[kKMG]i?)?B\b", "SIZE", text)


class Reader:
    """One who reads a page from top to bottom, and types in what it shows."""

    def __init__(self, world: Virtual, directory: Path, pyz: Path) -> None:
        self.world = world
        self.directory = directory
        self.output = list[str]()
        # Whether the built file was installed, as a page shows it.
        self.has_installed = False
        self.apps = dict[str, App]()
        self.images = dict[str, Image]()
        self._start_registries()
        self._make_files(pyz)
        self.environment = {
            "HOME": str(directory / "home"),
            "MIRROR_PASSWORD": "secret",
            "HUB_TOKEN": "secret",
            **self._start_amazon(),
        }

    def _start_registries(self) -> None:
        for host in (*CONTENT, *TARGETS, *OFFICES):
            name, _, port = host.partition(":")
            self.apps[host] = App(auth=BasicAuth({"mirror": "secret"}) if host in TARGETS else None)
            self.world.listen(self.apps[host], name, port=int(port or 443), scheme="https")
        self.world.listen(App(), "localhost", port=5000)
        seed = Seed(77)
        for host, repositories in CONTENT.items():
            for repository, tags in repositories.items():
                for tag in tags.split():
                    image = seed.index(platforms=("linux/amd64", "linux/arm64"))
                    image.load_into(self.apps[host], repository, tag=tag)
                    self.images[f"{host}/{repository}:{tag}"] = image

    def _start_amazon(self) -> dict[str, str]:
        """Start a registry of ECR's with repositories; return the variables that log in to it."""
        aws = Aws(now=self.world.wall)
        self.world.listen(aws, f"api.ecr.{REGION}.amazonaws.com", scheme="https")
        provider = imitate("ecr", auth=Private(aws), now=anyio.current_time, wall=self.world.wall)
        self.world.listen(provider, f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com", scheme="https")
        for name in ("redis", "nginx", "source-controller"):
            Seed(5).image().load_into(provider, f"mirror/{name}", tag="old")
        user = aws.identity("user")
        return {"AWS_ACCESS_KEY_ID": user.access, "AWS_SECRET_ACCESS_KEY": user.secret}

    def _make_files(self, pyz: Path) -> None:
        for name in FOLDERS.split():
            (self.directory / name).mkdir(parents=True)
        login = base64.b64encode(b"mirror:secret").decode()
        (self.directory / "home/.docker/config.json").write_text(
            json.dumps({"auths": {host: {"auth": login} for host in TARGETS}})
        )
        for name in ("inside.pem", "berlin.pem"):
            trustme.CA().cert_pem.write_to_path(str(self.directory / "etc/ssl" / name))
        (self.directory / "password.txt").write_text("secret\n")
        for name in ("regsync.pyz", "regsync-nofips.pyz", "SHA256SUMS"):
            (self.directory / name).symlink_to(pyz.parent / name)
        (self.directory / "dist").symlink_to(pyz.parent)
        (self.directory / "usr/local/bin/regsync").symlink_to(pyz)

    def at_home(self, text: str) -> str:
        """Return a text in which directories of the machine are those below this directory."""
        return _MACHINE.sub(f"{self.directory}/", text)

    def write_file(self, text: str) -> str:
        """Write the file that the first line of a configuration or program names, or `mirror.yaml`; return
        its name.
        """
        named = re.match(r"# ([a-z-]+\.(?:yaml|py))\b", text)
        name = named[1] if named else "mirror.yaml"
        for folder in (self.directory, self.directory / "etc/regsync"):
            (folder / name).write_text(self.at_home(text))
        return name

    async def run(self, command: str) -> Ran:
        """Run a command as a shell does, and keep its output."""
        command = self.at_home(command)
        if "sha256:…" in command:
            command = command.replace("sha256:…", self.images["quay.io/org/app:v2"].top)
        command, _, file = (part.strip() for part in command.partition(" >"))
        words = [PLACEHOLDERS.get(word, word) for word in shlex.split(command)]

        if words[0] == "export":
            name = words[1].partition("=")[0]
            ran = self._run_in_shell(f'{command}; printf %s "${name}"')
            self.environment[name] = ran.out
            return ran

        self.has_installed |= words[0] == "install"
        is_built = words[1] == "version" and self.has_installed
        if words[0] != "regsync" or is_built:
            ran = self._run_in_shell(command)
        elif words[-1] == "--help":
            return Ran(0, help_of(words[1]), "")
        elif words[1] == "watch":
            async with stopped_at(60.0):
                ran = await self.world.run(*words[1:], "--health-port", "0", env=self.environment)
        else:
            ran = await self.world.run(*words[1:], env=self.environment)

        if file:
            (self.directory / file).write_text(ran.out)
        self.output += (*ran.out.splitlines(), *ran.err.splitlines())
        return ran

    def _run_in_shell(self, command: str) -> Ran:
        elsewhere = [word for word in shlex.split(command) if word.startswith("/")]
        assert all(word.startswith(str(self.directory)) for word in elsewhere), command
        path = f"{self.directory / 'usr/local/bin'}:{os.path.dirname(sys.executable)}:/usr/bin:/bin"
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=self.directory,
            env={**os.environ, **self.environment, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    def lose_a_tag_and_a_blob(self) -> None:
        """Damage a target as a full disk or a restored backup does."""
        repository = self.apps["registry.example.com"].repositories["team/app"]
        del repository.tags["2.0.1"]
        named = repository.manifests[repository.tags["2.1.0"]]
        platform = repository.manifests[named.children[0]["digest"]]
        del repository.blobs[platform.blobs[0]["digest"]]


@pytest.fixture
def reader(world: Virtual, tmp_path: Path, pyz: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    monkeypatch.chdir(tmp_path)
    return Reader(world, tmp_path, pyz)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(map(is_run, shown_in(page)))],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
async def test_the_commands_of_a_page_run_in_their_order(page: Path, reader: Reader) -> None:
    first = next(each for each in shown_in(ROOT / "README.md") if each.kind == "yaml")
    reader.write_file(first.text)

    # What `report` and `--retry-from` read is from an earlier run.
    everything = [*shown_in(page)]
    for name in ("run.json", "report.json"):
        if any(name in shown.text for shown in everything if shown.kind == "command"):
            assert (await reader.run("regsync sync -c mirror.yaml")).status == 0
            assert (await reader.run(f"regsync sync -c mirror.yaml --json >{name}")).status == 0

    for shown in everything:
        if shown.kind in ("yaml", "python"):
            reader.write_file(shown.text)
        if not is_run(shown):
            continue
        finds = shown.text == FINDS
        if finds:
            assert (await reader.run("regsync sync -c mirror.yaml")).status == 0
            reader.lose_a_tag_and_a_blob()
        ran = await reader.run(shown.text)
        told = f"{page.name}:{shown.line}: {shown.text}\n{ran.out[-2000:]}{ran.err[-2000:]}"
        assert ran.status == finds, told

    printed = {in_general(line) for line in reader.output}
    for shown in everything:
        if shown.kind == "text" and COMPARED_ELSEWHERE not in shown.text:
            told = [line for line in shown.text.splitlines() if RESULT.match(line)]
            assert [line for line in told if in_general(line) not in printed] == []


# What each configuration of the pages is about: the tags at its targets, in the order of the pages.
WANTED = [
    "base/alpine:3.19.1 base/alpine:3.20.0 base/alpine:3.20.3 library/nginx:1.27 library/nginx:1.28",
    "fluxcd/source-controller:v1.2.3 fluxcd/source-controller:v1.2.4 mirror/redis:7.4.0 mirror/redis:7.4.1",
    "team/app:2.0.1 team/app:2.1.0",
    "library/alpine:3.20",
    "base/alpine:3.20",
    " ".join(f"library/alpine:3.{end}" for end in ("18.9", "19", "19.1", "20", "20.0", "20.3")),
]


def name_of(target: str) -> str:
    """Return the repository and tag of a target."""
    return target.rpartition("//")[2] if "//" in target else target.partition("/")[2]


async def test_each_configuration_copies_what_it_says_and_nothing_twice(reader: Reader) -> None:
    """What the first of two writes to a disk, the second takes from there."""
    texts = [each.text for page in PAGES for each in shown_in(page) if each.kind == "yaml"]
    for text, wanted in zip(texts, WANTED, strict=True):
        name = reader.write_file(text)
        valid = await reader.run(f"regsync validate {name}")
        assert (valid.status, valid.out, valid.err) == (0, "", ""), "nothing in it is doubted"
        reader.write_file(re.sub(r', proxy: "[^"]*"', "", text))
        (reader.directory / "far.txt").touch()
        ran = await reader.run(f"regsync sync --json -c {name}")
        assert ran.status == 0, ran.err
        found = {name_of(each["target"]) for each in ran.images}
        assert found == {*wanted.split()}
        again = await reader.run(f"regsync sync --json -c {name}")
        assert {each["status"] for each in again.images} == {"skipped"}
        assert again.totals["bytes"] == 0


# The program of the recipe for a mirror map, and the command that runs it.
RECIPES = [*shown_in(ROOT / "docs" / "recipes.md")]
MAP_MAKER = next(each.text for each in RECIPES if each.kind == "python")
MAKES_THE_MAP = next(each.text for each in RECIPES if each.text.startswith("python3 mirrors.py"))


async def check_map(reader: Reader, sources: dict[str, str], root: str) -> None:
    """Make the map of a report; it has one mirror of each source, and containerd's file its root."""
    assert (await reader.run(MAKES_THE_MAP)).status == 0
    digests, tags = json.loads((reader.directory / "mirrors.json").read_text())["items"]
    assert (digests["kind"], tags["kind"]) == ("ImageDigestMirrorSet", "ImageTagMirrorSet")
    entries = digests["spec"]["imageDigestMirrors"]
    assert tags["spec"]["imageTagMirrors"] == entries
    assert {each["source"]: each["mirrors"] for each in entries} == {
        f"docker.io/{source}": [mirror] for source, mirror in sources.items()
    }
    assert (reader.directory / "certs.d/docker.io/hosts.toml").read_text() == (
        f'[host."https://{root}"]\ncapabilities = ["pull", "resolve"]\noverride_path = true\n'
    )


async def test_a_mirror_map_names_what_a_run_has_found_or_copied(reader: Reader) -> None:
    """containerd finds the repository that has kept its name, OpenShift also the other one."""
    first = next(each for each in shown_in(ROOT / "README.md") if each.kind == "yaml")
    reader.write_file(first.text + "  - { from: library/missing }\n")
    reader.write_file(MAP_MAKER)
    names = {"library/alpine": "base/alpine", "library/nginx": "library/nginx"}
    mirrors = {source: f"registry.example.com/{name}" for source, name in names.items()}
    for _ in range(2):
        ran = await reader.run("regsync sync -c mirror.yaml --json >report.json")
        assert ran.status == 1, "one repository is not there"
        await check_map(reader, mirrors, "registry.example.com/v2")


async def test_a_mirror_map_is_made_inside_where_names_on_the_disk_have_their_host(
    reader: Reader,
) -> None:
    outside, inside, *_ = (
        each.text for each in RECIPES if re.match("# (outside|inside)", each.text)
    )
    reader.write_file(outside.replace("alpine, tags", "alpine, to: docker.io/library/alpine, tags"))
    reader.write_file(inside.replace("library/alpine, to: base/alpine", '"*"'))
    reader.write_file(MAP_MAKER)
    assert (await reader.run("regsync sync -c outside.yaml")).status == 0
    assert (await reader.run("regsync sync -c inside.yaml --json >report.json")).status == 0
    mirror = "registry.inside.example/docker.io/library/alpine"
    await check_map(reader, {"library/alpine": mirror}, "registry.inside.example/v2/docker.io")
