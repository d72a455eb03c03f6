"""README, the documents and deploy/, held to the program: what they name exists, what they show as
output is the program's, and files for other programs are valid by those programs' own standards.

The commands that they show are run by test_commands_shown.py.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from conformance.images import Seed
from conformance.registry import App
from conformance.tokens import BasicAuth
from tests.ends import ROOT, only, run_regsync
from tests.pages import PAGES_FOR_USERS
from tests.program import command_names, help_of, report_schema, run_process
from tools import build_zipapp, reference

README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES_FOR_USERS)
# Without the tables that a program makes.
OWN_WORDS = re.sub(r"(?s)<!-- (reference|measured): begin -->.*?<!-- \1: end -->", "", TEXT)
BLOCKS = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", TEXT)
DEPLOY = ROOT / "deploy"


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


# Form, links, files.


def test_the_readme_is_short_and_lines_are() -> None:
    assert README.count("\n") < 200
    assert max(len(line) for line in OWN_WORDS.splitlines() if not line.startswith("|")) <= 120


def test_every_table_is_whole() -> None:
    for table in re.findall(r"(?m)(?:^\|.*\n)+", TEXT):
        assert len({row.replace(r"\|", "").count("|") for row in table.splitlines()}) == 1, table


def anchors(page: Path) -> set[str]:
    """Return what a link into a page may name, as GitHub makes it of the headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_somewhere_and_every_document_is_linked() -> None:
    documents = sorted((ROOT / "docs").glob("*.md"))
    for page in (ROOT / "README.md", ROOT / "conformance" / "README.md", *documents):
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = link.partition("#")
            file = page.parent / name if name else page
            assert "://" in link or file.exists(), link
            assert not anchor or "://" in link or anchor in anchors(file), link
    assert [path.name for path in documents if f"(docs/{path.name})" not in README] == []


def test_every_file_that_is_named_is_there_and_every_file_to_deploy_is_named() -> None:
    for name in set(re.findall(r"\b(?:tools|tests|conformance|docs|deploy)/[\w./-]*", TEXT)):
        assert (ROOT / name.rstrip(".")).exists(), name
    for path in DEPLOY.rglob("*.*"):
        assert f"/{path.name}`" in TEXT or f"`{path.name}`" in TEXT, path.name
    assert all(wheel.name in TEXT for wheel in build_zipapp.BUNDLE[:4])


def test_the_documents_agree_on_whether_there_is_a_release() -> None:
    latest = re.findall(r"(?m)^## (.*)$", text_of("docs/changes.md"))[0]
    assert latest.partition(" ")[0] == run_regsync("version", "--json").report["version"]
    is_unreleased = latest.endswith("(not released yet)")
    for page in ("README.md", "docs/install.md"):
        assert ("No release has been published yet" in text_of(page)) is is_unreleased, page


# Names: commands, options, statuses, keys, fields, codes.

# Options of other programs, and of this one in the past.
OTHERS = {
    *("--all", "--all-tags", "--cache", "--check", "--diff", "--file", "--from"),
    *("--ignore-missing", "--into", "--markdown", "--oci-layout-path"),
    *("--generated", "--order-seed", "--out", "--peer", "--python", "--quiet"),
    *("--report", "--show-secrets", "--table", "--thorough"),
}


def test_every_option_exists_and_every_option_is_named() -> None:
    rules = {f"--{key.replace('_', '-')}" for key in keys_of("tags")}
    real = set[str]()
    for name in command_names():
        listed = help_of(name).partition("\noptions:")[2].partition("\nexamples:")[0]
        for line in re.findall(r"(?m)^  -.*", listed):
            real.update(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", line))
    named = set(re.findall(r"(?<![\w:-])(--[a-z][a-z-]+|-[cq]|-vv?)(?![\w-])", OWN_WORDS))
    assert named - real - OTHERS == set()
    assert real - named - rules == {"-h", "--config"}


def test_every_command_has_a_line_and_the_statuses_are_those_of_the_help() -> None:
    named = re.findall(r"(?m)^\| `regsync (\w+)", README)
    assert {*named} == {*command_names()}
    table = dict(re.findall(r"(?m)^\| ([\d, ]+) \| (.*) \|$", TEXT))
    assert table.pop("130, 143") == "interrupted by SIGINT, SIGTERM, with work left undone"
    assert table == dict(re.findall(r"(?m)^  (\d)    (.*)$", run_process("--help").out))


def config_schema() -> dict[str, Any]:
    return run_regsync("schema").report


def keys_of(section: str) -> set[str]:
    return set(config_schema()["$defs"][section]["properties"])


def test_every_key_of_the_configuration_is_named_and_its_reference_is_of_now() -> None:
    page = reference.PAGE.read_text(encoding="utf-8")
    assert reference.updated(page) == page, "run .venv/bin/python tools/reference.py"
    with pytest.raises(SystemExit, match="reference: begin"):
        reference.updated("# title\n")
    defined = config_schema()
    for section in (defined, *defined["$defs"].values()):
        for key in section.get("properties", ()):
            assert re.search(rf"\b{key}\b", TEXT), key


def test_the_fields_and_codes_of_a_report_are_those_of_its_schema() -> None:
    kinds = report_schema()["$defs"]
    told = re.search(
        r"(?s)The document of `sync` and `copy` has (.*?)An image has:(.*?)\n\n[^|]", TEXT
    )
    assert told is not None
    assert {*re.findall(r"`(\w+)`", told[1])} <= {*kinds["report"]["properties"]}
    rows = re.findall(r"(?m)^\| (`.*?) \| (.*) \|$", told[2])
    fields = {name for names, _ in rows for name in re.findall(r"`(\w+)`", names)}
    assert {"source", "status", "error"} <= fields <= {*kinds["image"]["properties"]}
    parts = only([meaning for name, meaning in rows if name == "`error`"])
    assert {*re.findall(r"`(\w+)`", parts)} == {*kinds["cause"]["properties"]}
    codes = kinds["cause"]["properties"]["code"]["enum"]
    assert set(re.findall(r"(?m)^\| `([A-Z_]+)` \|", TEXT)) == {*codes}


# Output and tag rules.


async def test_the_output_that_is_shown_is_the_programs(world: Any, tmp_path: Path) -> None:
    """That of one image, `ghcr.io/org/app`, word for word."""
    source = world.listen(App(), "ghcr.io", scheme="https")
    auth = BasicAuth({"mirror": "right"})
    world.listen(App(auth=auth), "registry.example.com", scheme="https")
    for number, tag in enumerate(("v1.2.3", "v1.2.4", "v1.3.0-rc.1")):
        Seed(number).image().load_into(source.app, "org/app", tag=tag)
    path = tmp_path / "mirror.yaml"
    output = list[str]()

    async def call(words: str, glob: str | list[str] = "v1.2.*", password: str = "right") -> None:
        credentials = {"username": "mirror", "password": password}
        mine = {"url": "registry.example.com", "auth_type": "basic", "credentials": credentials}
        mapping = {"from": "org/app", "to": "app", "source": "ghcr", "targets": ["mine"]}
        registries = {"ghcr": {"url": "ghcr.io"}, "mine": mine}
        mappings = [{**mapping, "tags": {"glob": glob}}]
        path.write_text(json.dumps({"registries": registries, "mappings": mappings}))
        where = [] if words.startswith("tags") else ["-c", str(path)]
        ran = await world.run(*words.split(), *where)
        output.extend(ran.out.splitlines() + ran.err.splitlines())

    await call("auth check", password="wrong")
    await call("sync", ["v1.2.3", "v1.2.5"])
    await call("auth check")
    await call("sync --dry-run")
    await call("tags -v ghcr.io/org/app --semver >=1.2 --latest 1")
    await call("lock")
    Seed(9).image().load_into(source.app, "org/app", tag="v1.2.4")
    await call("lock --check")

    shortened = {re.sub(r"(sha256:[0-9a-f]{8})[0-9a-f]{56}", r"\1…", line) for line in output}
    blocks = [block for kind, block in BLOCKS if kind == "text" and "ghcr.io/org/app" in block]
    # A line that is broken goes on behind four blanks.
    lines = "".join(block.replace("\n    ", " ") for block in blocks).splitlines()
    told = [line for line in lines if not line.startswith("$ ")]
    assert len(told) == 17
    assert [line for line in told if line not in shortened] == []


RULES = re.findall(r"(?m)^\| `(\{.*\})` \| (.*) \|$", TEXT)


def test_there_are_examples_of_every_tag_rule_that_selects() -> None:
    named = {name for rule, _ in RULES for name in yaml.safe_load(rule)}
    assert named == keys_of("tags") - {"immutable_tags"}
    assert len(RULES) == 11


@pytest.mark.parametrize(("rule", "selected"), RULES, ids=[rule for rule, _ in RULES])
def test_a_tag_rule_selects_what_its_row_says(source: Any, rule: str, selected: str) -> None:
    preamble = re.search(r"(?s)From the tags\s(.*?) and a\ssignature\s`(sha256-….sig)`", TEXT)
    assert preamble is not None
    listed = re.findall(r"`([^`]+)`", preamble[1])
    Seed(1).image().load_into(source.app, "a", *listed, preamble[2].replace("…", "0" * 64))
    mapping = {"from": "a", "source": "s", "targets": ["t"], "tags": yaml.safe_load(rule)}
    registries = {"s": {"url": source.url}, "t": {"url": "t.example"}}
    text = json.dumps({"registries": registries, "mappings": [mapping]})
    ran = run_regsync("tags", f"{source.address}/a", "-c", "-", stdin=text)
    told, kept = re.findall(r"`([^`]+)`", selected), ran.out.split()
    if not {"sort", "semver"} & mapping["tags"].keys():  # in the order of the listing
        told, kept = sorted(told or listed), sorted(kept)
    assert (ran.status, kept) == (0, told)


# Kubernetes.

KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
DOCUMENTS = {path.stem: [*yaml.safe_load_all(path.read_text())] for path in KUBERNETES}
COMMON = {(each["kind"], each["metadata"]["name"]): each for each in DOCUMENTS["common"]}
WORKLOADS = {"cronjob": only(DOCUMENTS["cronjob"]), "watch": only(DOCUMENTS["watch"])}
MIRROR = COMMON["ConfigMap", "regsync-config"]["data"]["mirror.yaml"]
SECRETS: dict[str, str] = COMMON["Secret", "regsync-secrets"]["stringData"]


def pod_of(name: str) -> dict[str, Any]:
    """Return the specification of the pods that a workload makes."""
    spec = WORKLOADS[name]["spec"]
    spec = spec["jobTemplate"]["spec"] if name == "cronjob" else spec
    return dict(spec["template"]["spec"])


def understood(words: list[str]) -> None:
    """Assert that the program reads a command line up to the file that is not there."""
    path = words[words.index("-c") + 1]
    ran = run_regsync(*words)
    assert ran.err.startswith(f"error: CONFIG_ERROR: {path} cannot be read: "), ran.err


# The oldest is the first in which all fields that are used here are in force.
@pytest.mark.parametrize("version", ["1.33", kubernetes_validate.latest_version()])
def test_manifests_are_valid_and_no_field_of_them_is_unknown(version: str) -> None:
    for each in (document for documents in DOCUMENTS.values() for document in documents):
        assert kubernetes_validate.validate(each, version, strict=True)
    wrong = copy.deepcopy(WORKLOADS["watch"])
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 30
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_pod_may_do_nothing_that_it_need_not_and_has_what_the_specification_says(
    name: str,
) -> None:
    """docs/specification.md section 1.6: a drain of 25 s, and then the state is saved."""
    pod, container = pod_of(name), only(pod_of(name)["containers"])
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["terminationGracePeriodSeconds"] == 30
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"] == {
        "requests": {"cpu": "100m", "memory": "128Mi"},
        "limits": {"memory": "512Mi"},
    }


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_pod_has_what_it_mounts_and_the_program_understands_its_arguments(name: str) -> None:
    container = only(pod_of(name)["containers"])
    assert "command" not in container
    assert container["args"][0] == {"cronjob": "sync", "watch": "watch"}[name]
    assert "-q" not in container["args"], "warnings are for the log"
    understood(container["args"])
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod_of(name)["volumes"]}
    assert sorted(mounts) == sorted(volumes)
    assert ("ConfigMap", volumes["config"]["configMap"]["name"]) in COMMON
    claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]
    assert ("PersistentVolumeClaim", claim) in COMMON
    assert ("Secret", only(container["envFrom"])["secretRef"]["name"]) in COMMON
    config = container["args"][container["args"].index("-c") + 1]
    assert config == f"{mounts['config']['mountPath']}/mirror.yaml"
    writable = [each["mountPath"] for each in mounts.values() if not each.get("readOnly")]
    assert writable == [yaml.safe_load(MIRROR)["global"]["cache_dir"]]
    # A mounted file, in place of a directory, would never change.
    assert not any("subPath" in mount for mount in mounts.values())


def test_the_image_is_named_with_the_version_that_it_has_and_files_that_are_there() -> None:
    shown = text_of("deploy/kubernetes/common.yaml")
    version = run_regsync("version", "--json").report["version"]
    image = only([*{only(pod_of(name)["containers"])["image"] for name in WORKLOADS}])
    assert image == f"registry.example.com/tools/regsync:{version}"
    assert f"docker buildx build -f deploy/Dockerfile --tag {image} --push dist" in shown
    named = re.findall(r"deploy/(?:[\w./-]+\.yaml|Dockerfile)", shown)
    assert named
    assert all((ROOT / name).is_file() for name in named)


def test_the_configuration_is_valid_and_nothing_in_it_is_doubted() -> None:
    ran = run_regsync("validate", "-", env=SECRETS, stdin=MIRROR)
    assert (ran.status, ran.out, ran.err) == (0, "", "")
    assert set(re.findall(r"\$\{(\w+)\}", MIRROR)) == set(SECRETS)


def test_the_probes_ask_where_watch_listens_and_no_two_run_at_a_time() -> None:
    container = only(pod_of("watch")["containers"])
    options = dict(zip(container["args"][1::2], container["args"][2::2], strict=True))
    port = only(container["ports"])
    assert str(port["containerPort"]) == options["--health-port"]
    assert options["--health-bind"] == "0.0.0.0", "probes do not come by the loopback"
    for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert container[probe]["httpGet"] == {"path": path, "port": port["name"]}
    watch, cron = WORKLOADS["watch"]["spec"], WORKLOADS["cronjob"]["spec"]
    assert (watch["replicas"], watch["strategy"]["type"]) == (1, "Recreate")
    labels = watch["template"]["metadata"]["labels"]
    assert watch["selector"]["matchLabels"].items() <= labels.items()
    assert cron["concurrencyPolicy"] == "Forbid"
    assert len(cron["schedule"].split()) == 5


# systemd.

SERVICE = text_of("deploy/systemd/regsync.service")
HEAD, _, UNIT = SERVICE.partition("[Unit]")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    """Nor with what the head of the service says of credentials."""
    more = re.findall(r"(?m)^#   ((?:LoadCredential|Environment)=.*)$", HEAD)
    assert len(more) == 2
    text = SERVICE.replace("[Service]\nType", "\n".join(["[Service]", *more, "Type"]))
    assert text.count(more[0]) == 2
    # The interpreter that is there stands for the one that should be.
    text = text.replace("/usr/bin/python3", sys.executable)
    (tmp_path / "regsync.service").write_text(text)
    shutil.copy(DEPLOY / "systemd" / "regsync.timer", tmp_path)
    units = [str(tmp_path / name) for name in ("regsync.service", "regsync.timer")]
    command = ["systemd-analyze", "verify", "--man=no", *units]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_unit_runs_a_sync_of_a_configuration_with_a_cache_that_it_may_write() -> None:
    found = dict(re.findall(r"(?m)^(\w+)=(.*)$", UNIT))
    python, program, *words = shlex.split(found["ExecStart"])
    # The journal gets what was copied, what failed, and warnings, which -q would hide.
    assert words == ["sync", "--no-progress", "-c", "/etc/regsync/mirror.yaml"]
    understood(words)
    assert python == "/usr/bin/python3"
    assert program in HEAD
    assert words[-1] in HEAD
    assert f"/var/cache/{found['CacheDirectory']}" in HEAD
    assert int(found["TimeoutStopSec"]) >= 27, "a drain takes 25 s"
    assert int(found["SuccessExitStatus"]) == 128 + 15


# CI.


def test_the_workflow_proposes_what_it_then_copies() -> None:
    """The lock that one job writes and proposes is the one that starts the other job, and that this
    one reads.
    """
    workflow = yaml.safe_load(text_of("deploy/ci/github.yml"))
    propose, mirror = workflow["jobs"]["propose"], workflow["jobs"]["mirror"]
    # A runner has no state: without --recheck, what came after its image would not be found, or not
    # be copied. Both runs write the report that is shown.
    assert [step["run"] for step in propose["steps"] if "run" in step] == [
        "python3 regsync.pyz lock --recheck -c mirror.yaml > changes.txt || test $? -eq 1"
    ]
    assert [step["run"] for step in mirror["steps"] if "run" in step] == [
        "python3 regsync.pyz validate mirror.yaml",
        "python3 regsync.pyz sync --locked --dry-run --json -c mirror.yaml > report.json",
        "python3 regsync.pyz sync --locked --recheck --json -c mirror.yaml > report.json",
        'python3 regsync.pyz report report.json --to markdown >> "$GITHUB_STEP_SUMMARY"',
    ]
    for step in (*propose["steps"], *mirror["steps"]):
        if " -c " in step.get("run", ""):
            understood(shlex.split(step["run"].partition(" > ")[0])[2:])
    proposal = propose["steps"][-1]["with"]
    assert (proposal["add-paths"], proposal["body-path"]) == ("mirror.lock", "changes.txt")
    # YAML 1.1, which PyYAML reads, takes `on` for a truth.
    assert set(workflow[True]) == {"schedule", "workflow_dispatch", "pull_request", "push"}
    for event in ("pull_request", "push"):
        assert "mirror.lock" in workflow[True][event]["paths"]
    assert workflow["permissions"] == {"contents": "read"}
    assert propose["permissions"] == {"contents": "write", "pull-requests": "write"}
    assert "permissions" not in mirror
    assert set(workflow["env"]) == set(SECRETS)


# The demo, which is the README's first command.


@pytest.mark.slow
def test_the_demo_holds_in_a_copy_of_the_tree(tmp_path: Path, pyz: Path) -> None:
    """The wheels are those that building `pyz` has left behind."""
    clone = tmp_path / "clone"
    for name in ("_regsync", "conformance", "tools", "build/wheels"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("LICENSE", "regsync.py"):
        shutil.copy(ROOT / name, clone)
    command = [sys.executable, str(clone / "tools" / "demo.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "Images: 0 synced, 6 skipped" in done.stdout
    assert ":: all of it held." in done.stdout
    assert {path.name for path in (clone / "demo").glob("*.log")} == {"source.log", "target.log"}
