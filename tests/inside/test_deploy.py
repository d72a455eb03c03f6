"""The files of deploy/: valid by their own standards, and everything that they say to the program
is understood.

Nobody can run them here; so their schemas are asked, their commands parsed by our own command line,
their configuration by `regsync validate`, and what one file names in another is looked up.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from _regsync.app import cli
from _regsync.app.commands import lock_path
from _regsync.sync.run import DRAIN_SECONDS

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
WORKFLOW = DEPLOY / "ci" / "github.yml"


def documents(path: Path) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all(path.read_text(encoding="utf-8"))]


DOCUMENTS = [(path, each) for path in MANIFESTS for each in documents(path)]
COMMON = {
    (each["kind"], each["metadata"]["name"]): each
    for path, each in DOCUMENTS
    if path.stem == "common"
}
WORKLOADS = {path.stem: each for path, each in DOCUMENTS if path.stem != "common"}
SECRETS: dict[str, str] = COMMON["Secret", "regsync-secrets"]["stringData"]


def pod_of(workload: dict[str, Any]) -> dict[str, Any]:
    """Return the specification of the pods that a workload makes."""
    spec = workload["spec"]
    spec = spec["jobTemplate"]["spec"] if workload["kind"] == "CronJob" else spec
    return copy.deepcopy(dict(spec["template"]["spec"]))


def parsed(words: list[str]) -> Any:
    """Let the program's own command line read what is behind the program's name."""
    return cli.parse_arguments(words)


def main_of(name: str) -> dict[str, Any]:
    (container,) = pod_of(WORKLOADS[name])["containers"]
    return dict(container)


# --- Kubernetes
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_pod_has_the_time_that_a_drain_takes(name):
    """docs/specification.md section 1.6: 25 s, and then the state is saved."""
    assert pod_of(WORKLOADS[name])["terminationGracePeriodSeconds"] == 30 >= DRAIN_SECONDS + 2


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_program_understands_its_arguments(name):
    container = main_of(name)
    assert "command" not in container
    arguments = parsed(container["args"])
    assert not arguments.q, "warnings are for the log"
    assert arguments.command == ("watch" if name == "watch" else "sync")
    paths = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert os.path.dirname(arguments.config) in paths
    assert os.path.basename(arguments.config) == "mirror.yaml"


def test_the_probes_ask_where_watch_listens():
    container = main_of("watch")
    arguments = parsed(container["args"])
    (port,) = container["ports"]
    assert port["containerPort"] == arguments.health_port
    assert arguments.health_bind == "0.0.0.0", "probes do not come by the loopback"
    for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert container[probe]["httpGet"] == {"path": path, "port": port["name"]}
    assert WORKLOADS["watch"]["spec"]["replicas"] == 1
    assert WORKLOADS["watch"]["spec"]["strategy"]["type"] == "Recreate"
    labels = WORKLOADS["watch"]["spec"]["template"]["metadata"]["labels"]
    assert WORKLOADS["watch"]["spec"]["selector"]["matchLabels"].items() <= labels.items()


# --- systemd
# ------------------------------------------------------------------------------------------------


def options(path: Path) -> Iterator[tuple[str, str, str]]:
    """Give the options of a unit: section, name, value; one name may come more than once."""
    section = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"\[(\w+)\]", line):
            section = match[1]
        elif line and not line.startswith("#"):
            name, equals, value = line.partition("=")
            assert section, line
            assert equals, line
            yield section, name, value


def test_the_unit_runs_a_sync_of_a_configuration_with_a_cache_that_it_may_write():
    service = DEPLOY / "systemd" / "regsync.service"
    found = {name: value for _, name, value in options(service)}
    python, program, *words = shlex.split(found["ExecStart"])
    arguments = parsed(words)
    # The journal gets what was copied, what failed, and warnings, which -q would hide.
    assert (arguments.command, arguments.q, arguments.no_progress) == ("sync", False, True)
    shown = service.read_text(encoding="utf-8").partition("[Unit]")[0]
    assert python == "/usr/bin/python3"
    assert program in shown
    assert arguments.config in shown
    assert f"/var/cache/{found['CacheDirectory']}" in shown
    assert int(found["TimeoutStopSec"]) >= DRAIN_SECONDS + 2
    assert int(found["SuccessExitStatus"]) == 128 + 15


# --- CI
# -----------------------------------------------------------------------------------------------------


def commands_of(job: dict[str, Any]) -> list[Any]:
    """Return what the steps of a job ask of the program, as it reads that."""
    commands = []
    for step in job["steps"]:
        assert set(step) & {"uses", "run"}
        if "run" in step:
            python, program, *words = shlex.split(re.split(" >>? ", step["run"])[0])
            assert (python, program) == ("python3", "regsync.pyz")
            commands.append(parsed(words))
    return commands


def test_the_workflow_proposes_what_it_then_copies():
    """The lock that one job writes and proposes is the one that starts the other job, and that this
    one reads.
    """
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    propose = workflow["jobs"]["propose"]
    (lock,) = commands_of(propose)
    validate, shows, copies, *reports = commands_of(workflow["jobs"]["mirror"])
    assert (lock.command, lock.check, validate.command) == ("lock", False, "validate")
    assert (shows.command, shows.locked, shows.dry_run) == ("sync", True, True)
    assert (copies.command, copies.locked, copies.dry_run) == ("sync", True, False)
    assert [(each.command, each.to) for each in reports] == [
        ("report", "markdown"),
        ("report", "junit"),
    ]
    # A runner has no state: what came after its image would not be found, or not be copied.
    assert lock.recheck
    assert copies.recheck
    assert lock_path(lock) == lock_path(shows) == lock_path(copies) == "mirror.lock"
    # Both runs write the report that is shown.
    steps = workflow["jobs"]["mirror"]["steps"]
    written = [step["run"].partition(" > ")[2] for step in steps if " sync " in str(step)]
    assert written == ["report.json"] * 2
    assert shows.json
    assert copies.json

    proposal = propose["steps"][-1]["with"]
    assert proposal["add-paths"] == "mirror.lock"
    assert f"> {proposal['body-path']} ||" in propose["steps"][1]["run"]
    # YAML 1.1, which PyYAML reads, takes `on` for a truth.
    assert set(workflow[True]) == {"schedule", "workflow_dispatch", "pull_request", "push"}
    for event in ("pull_request", "push"):
        assert "mirror.lock" in workflow[True][event]["paths"]
    assert workflow["permissions"] == {"contents": "read"}
    assert propose["permissions"] == {"contents": "write", "pull-requests": "write"}
    assert "permissions" not in workflow["jobs"]["mirror"]
    assert set(workflow["env"]) == set(SECRETS)
