"""README and the user's documents, held to the program: what they show runs, what they name exists.

A new user reads nothing else, so every claim in them that a machine can look at is looked at here:
command lines, options, keys, examples of tag rules, recipes (run between registries), codes, files,
links.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from conformance.content.images import Image, Seed
from conformance.providers.personas import PERSONAS
from conformance.registry.app import App
from conformance.registry.tokens import BasicAuth
from tests.ends import held, run_regsync
from tests.layouts import make_layout
from tests.pages import PAGES_FOR_USERS
from tools import build_zipapp

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
LONGEST = 200
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES_FOR_USERS)
# Without the tables that a program makes.
OWN_WORDS = re.sub(r"(?s)<!-- (reference|measured): begin -->.*?<!-- \1: end -->", "", TEXT)

BLOCKS = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", TEXT)
RECIPES = [block for language, block in BLOCKS if language == "yaml"]
SECRETS = {"MIRROR_PASSWORD": "secret"}


def test_it_is_short():
    assert README.count("\n") < LONGEST
    assert max(len(line) for line in OWN_WORDS.splitlines() if not line.startswith("|")) <= 120


def anchors(page: Path) -> set[str]:
    """Return what a link into a page may name, as GitHub makes it of the headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "conformance" / "README.md", *sorted((ROOT / "docs").glob("*.md"))],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link


def test_every_document_is_linked():
    for path in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{path.name})" in README, path.name


# --- command lines
# ------------------------------------------------------------------------------------


def samples() -> Iterator[str]:
    """Give each line of output that the pages show of one image, `ghcr.io/org/app`."""
    for language, block in BLOCKS:
        if language == "text" and "ghcr.io/org/app" in block:
            # A line that is broken goes on behind four blanks.
            yield from block.replace("\n    ", " ").splitlines()


async def test_the_output_that_is_shown_is_the_programs(world, tmp_path):
    source = world.listen(App(), "ghcr.io", scheme="https")
    auth = BasicAuth({"mirror": "right"})
    world.listen(App(auth=auth), "registry.example.com", scheme="https")
    for number, tag in enumerate(("v1.2.3", "v1.2.4", "v1.3.0-rc.1")):
        Seed(number).image().load_into(source.app, "org/app", tag=tag)
    path = tmp_path / "mirror.yaml"
    output = list[str]()

    async def call(*words: str, password: str, glob: str | list[str]) -> None:
        credentials = {"username": "mirror", "password": password}
        mine = {"url": "registry.example.com", "auth_type": "basic", "credentials": credentials}
        mapping = {"from": "org/app", "to": "app", "source": "ghcr", "targets": ["mine"]}
        document = {
            "registries": {"ghcr": {"url": "ghcr.io"}, "mine": mine},
            "mappings": [{**mapping, "tags": {"glob": glob}}],
        }
        path.write_text(json.dumps(document))
        where = [] if words[0] == "tags" else ["-c", str(path)]
        ran = await world.run(*words, *where)
        output.extend(ran.out.splitlines() + ran.err.splitlines())

    await call("auth", "check", password="wrong", glob="v1.2.*")
    await call("sync", password="right", glob=["v1.2.3", "v1.2.5"])
    await call("auth", "check", password="right", glob="v1.2.*")
    await call("sync", "--dry-run", password="right", glob="v1.2.*")
    rule = ("--semver", ">=1.2", "--latest", "1")
    await call("tags", "-v", "ghcr.io/org/app", *rule, password="right", glob="*")
    await call("lock", password="right", glob="v1.2.*")
    Seed(9).image().load_into(source.app, "org/app", tag="v1.2.4")
    await call("lock", "--check", password="right", glob="v1.2.*")

    shortened = {re.sub(r"(sha256:[0-9a-f]{8})[0-9a-f]{56}", r"\1…", line) for line in output}
    told = [line for line in samples() if not line.startswith("$ ")]
    assert len(told) == 18
    assert [line for line in told if line not in shortened] == []


@pytest.mark.parametrize("name", ["validate", "expand"])
def test_a_configuration_is_named_with_or_without_an_option(name, tmp_path):
    path = tmp_path / "mirror.yaml"
    path.write_text("mappings: []")
    plain = run_regsync(name, str(path))
    assert plain.status == 0
    for option in ("-c", "--config"):
        assert run_regsync(name, option, str(path)).out == plain.out
    both = run_regsync(name, str(path), "-c", str(path))
    none = run_regsync(name)
    for ran in (both, none):
        assert ran.status == 3
        assert "-c/--config" in ran.err


def test_refused_references_need_no_network():
    for words in (
        ["copy", "docker://a/b", "c"],
        ["copy", "a/B", "c"],
        ["sync"],
        ["sync", "-c", ""],
    ):
        ran = run_regsync(*words)
        assert ran.status == 3
        assert ran.err.startswith("error: CONFIG_ERROR: ")
        assert not ran.out


def test_an_abbreviated_option_is_none():
    ran = run_regsync("version", "--jso")
    assert ran.status == 3
    assert "--jso" in ran.err


# --- the configuration
# ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", RECIPES, ids=range(len(RECIPES)))
def test_every_example_is_valid_and_nothing_in_it_is_doubted(text, tmp_path):
    (tmp_path / "mirror.yaml").write_text(text)
    ran = run_regsync("validate", str(tmp_path / "mirror.yaml"), env=SECRETS)
    assert (ran.status, ran.out, ran.err) == (0, "", "")


def test_the_example_needs_the_variable_that_the_text_names():
    ran = run_regsync("validate", "-", stdin=RECIPES[0])
    assert ran.status == 3
    assert "MIRROR_PASSWORD" in ran.err


# The tags at the source before each recipe; the two halves of the relay are two.
CONTENT: list[dict[str, list[str]]] = [
    {
        "library/alpine": ["3.18.9", "3.19.1", "3.19", "3.20.0", "3.20.3", "3.20", "edge"],
        "library/nginx": ["1.26", "1.27", "1.28"],
    },
    {
        "library/redis": ["6.2.1", "7.2.4", "7.4.0", "7.4.1", "7.4.1-alpine", "7.4", "7"],
        "fluxcd/source-controller": ["v1.1.0", "v1.2.3", "v1.2.4", "v1.3.0-rc.1"],
    },
    {
        "prometheus/prometheus": ["v2.49.0", "v2.50.0", "v2.51.2"],
        "prometheus/node-exporter": ["v1.8.2"],
    },
    {
        "fluxcd/source-controller": ["v1.1.0", "v1.2.3", "v1.2.4", "v1.3.0-rc.1", "v2.0.0"],
        "fluxcd/helm-controller": ["v1.0.0", "v1.1.0-rc.1", "v1.1.0-rc.2"],
    },
    {"example/app": ["1.9.0", "2.0.1", "2.1.0", "2.1.0-rc1"]},
    {"library/alpine": ["3.20"]},
    {"library/alpine": ["3.20"]},
    {"library/alpine": ["2.7", "3.19", "3.20"]},
]
SYNCED = [
    {
        "base/alpine:3.19.1",
        "base/alpine:3.20.0",
        "base/alpine:3.20.3",
        "library/nginx:1.27",
        "library/nginx:1.28",
    },
    {
        *(f"mirror/redis:{tag}" for tag in ("7.4.0", "7.4.1")),
        *(f"mirror/source-controller:{tag}" for tag in ("v1.2.3", "v1.2.4")),
    },
    {
        "prometheus/prometheus:v2.50.0",
        "prometheus/prometheus:v2.51.2",
        "prometheus/node-exporter:v1.8.2",
    },
    {
        *(f"fluxcd/source-controller:{tag}" for tag in ("v1.1.0", "v1.2.3", "v1.2.4")),
        "fluxcd/helm-controller:v1.1.0-rc.2",
    },
    {"team/app:2.0.1", "team/app:2.1.0"},
    {"library/alpine:3.20"},
    {"base/alpine:3.20"},
    {"library/alpine:3.19", "library/alpine:3.20"},
]


@pytest.mark.parametrize("number", range(len(RECIPES)))
def test_a_recipe_copies_what_it_says_and_nothing_twice(number, serve, tmp_path):
    """Its hosts become the harness's; certificates and proxies, which these need not, go."""
    document: dict[str, Any] = yaml.safe_load(RECIPES[number])
    alias = document["defaults"]["source"]
    registries = document["registries"]
    layouts = {name for name in registries if registries[name]["url"].startswith("oci-layout:")}
    servers = {name: serve() for name in registries.keys() - layouts}
    images: dict[str, Image] = {}
    sources = {alias} | {each.get("source", alias) for each in document["mappings"]}
    apps = [servers[name].app for name in sources - layouts] or [App()]
    for repository, names in CONTENT[number].items():
        for name in names:
            seed = Seed(len(images))
            image = seed.index() if document["defaults"].get("platforms") else seed.image()
            for each in apps:
                images[f"{repository}:{name}"] = image.load_into(each, repository, tag=name)
    if alias in layouts:
        make_layout(tmp_path / alias, images)
    (tmp_path / "far.txt").write_text("")
    for name, registry in registries.items():
        url = f"oci-layout:{name}" if name in layouts else servers[name].url
        registries[name] = {**registry, "url": url}
        if "assume" in registry:
            registries[name]["assume"] = ["far.txt"]
        for field in ("ca_file", "proxy"):
            document["registries"][name].pop(field, None)
    document.setdefault("global", {})["cache_dir"] = os.fspath(tmp_path / "cache")
    path = tmp_path / "mirror.yaml"
    path.write_text(json.dumps(document))
    ran = run_regsync("sync", "--json", "-c", str(path), env=SECRETS)
    assert ran.status == 0, ran.err
    assert {each["status"] for each in ran.images} == {"synced"}
    assert {_name_of(each["target"]) for each in ran.images} == SYNCED[number]
    again = run_regsync("sync", "--json", "-c", str(path), env=SECRETS)
    assert {each["status"] for each in again.images} == {"skipped"}
    assert again.totals["bytes"] == 0
    if number == 2:
        assert ran.totals["images"]["synced"] == 3 * 2 + 1, (
            "to three registries, and one of them alone"
        )
        for name in ("berlin", "lisbon", "seattle"):
            assert held(
                servers[name], "prometheus/prometheus", images["prometheus/prometheus:v2.51.2"]
            )
        digests = [each for image in images.values() for each in image.blobs]
        assert (
            max(servers[alias].journal.count("GET", "blob", reference=each) for each in digests)
            == 1
        )


def _name_of(target: str) -> str:
    """Return the repository and tag of a target."""
    _, inside, name = target.rpartition("//")
    return name if inside else target.partition("/")[2]


def test_every_recipe_has_content_here():
    assert len(RECIPES) == len(CONTENT) == len(SYNCED)


# --- failures, files
# ----------------------------------------------------------------------------------------


def test_every_file_is_there():
    for name in set(re.findall(r"\b(?:tools|tests|conformance|docs|deploy)/[\w./-]*", TEXT)):
        assert (ROOT / name.rstrip(".")).exists(), name
    for path in (ROOT / "deploy").rglob("*.*"):
        assert f"/{path.name}`" in TEXT or f"`{path.name}`" in TEXT, (
            f"{path.name} is shown to nobody"
        )
    for wheel in build_zipapp.BUNDLE[:4]:
        assert wheel.name in TEXT


def test_the_harness_names_its_modules_and_personas():
    told = (ROOT / "conformance" / "README.md").read_text(encoding="utf-8")
    named = set(re.findall("`([a-z][a-z0-9_-]*)`", told))
    ends = tuple(re.findall("`(-[a-z0-9-]+)`", told))  # `unknown-404`, `-405` and so on
    paths = [*(ROOT / "conformance").glob("*.py"), *(ROOT / "conformance").glob("*/[a-z]*.py")]
    modules = {path.stem for path in paths if path.parent.name != "tests"} - {
        "__init__",
        "__main__",
    }
    assert modules - named == set()
    assert [name for name in PERSONAS if name not in named and not name.endswith(ends)] == []


def test_every_invariant_is_cited_by_tests():
    numbers = re.findall(
        r"(?m)^- (I[0-9]+): ", (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    )
    assert numbers == [f"I{number}" for number in range(1, 13)]
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    for number in numbers:
        assert any(re.search(rf"\b{number}\b", text) for text in texts), number


def test_every_table_is_whole():
    for table in re.findall(r"(?m)(?:^\|.*\n)+", TEXT):
        widths = {row.replace(r"\|", "").count("|") for row in table.splitlines()}
        assert len(widths) == 1, table
