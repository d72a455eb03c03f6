"""The files of deploy/: valid by their own standards, and everything that they say to the program
is understood.

Nobody can run them here; so their schemas are asked, their commands parsed by our own command line,
their configuration by `regsync validate`, and what one file names in another is looked up.
"""

from __future__ import annotations

import configparser
import copy
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from _regsync import __version__
from _regsync.app import cli
from _regsync.app.commands import lock_path
from _regsync.config import reader
from _regsync.config.model import Config
from _regsync.sync.run import DRAIN_SECONDS
from tests.ends import run_regsync

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").iterdir())
WORKFLOW = DEPLOY / "ci" / "github.yml"
THOROUGH = DEPLOY.parent / ".github" / "workflows" / "thorough.yml"
# The oldest is the first in which all fields that are used here are in force.
VERSIONS = ["1.33", kubernetes_validate.latest_version()]


def documents(path: Path) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all(path.read_text(encoding="utf-8"))]


DOCUMENTS = [(path, each) for path in MANIFESTS for each in documents(path)]
COMMON = {
    (each["kind"], each["metadata"]["name"]): each
    for path, each in DOCUMENTS
    if path.stem == "common"
}
WORKLOADS = {path.stem: each for path, each in DOCUMENTS if path.stem != "common"}
MIRROR = COMMON["ConfigMap", "regsync-config"]["data"]["mirror.yaml"]
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


def test_there_is_one_file_for_each_use():
    kinds = {"cronjob": "CronJob", "watch": "Deployment"}
    assert {name: each["kind"] for name, each in WORKLOADS.items()} == kinds


def test_the_image_is_named_with_the_version_that_it_has_and_files_that_are_there():
    shown = (DEPLOY / "kubernetes" / "common.yaml").read_text(encoding="utf-8")
    images = {main_of(name)["image"] for name in WORKLOADS}
    assert images == {f"registry.example.com/tools/regsync:{__version__}"}
    assert f"oci-archive:dist/regsync-linux.oci.tar docker://{images.pop()}" in shown
    named = re.findall(r"deploy/[\w./-]+\.yaml", shown)
    assert named
    assert all((DEPLOY.parent / name).is_file() for name in named)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_is_valid_and_no_field_of_it_is_unknown(path, version):
    for each in documents(path):
        assert kubernetes_validate.validate(each, version, strict=True)


def test_a_misspelt_field_would_be_found():
    wrong = copy.deepcopy(WORKLOADS["watch"])
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 30
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_pod_may_do_nothing_that_it_need_not(name):
    pod = pod_of(WORKLOADS[name])
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_pod_has_the_time_that_a_drain_takes(name):
    """docs/specification.md section 1.6: 25 s, and then the state is saved."""
    assert pod_of(WORKLOADS[name])["terminationGracePeriodSeconds"] == 30 >= DRAIN_SECONDS + 2


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_pod_has_the_resources_of_the_specification(name):
    """docs/specification.md section 1.6."""
    assert main_of(name)["resources"] == {
        "requests": {"cpu": "100m", "memory": "128Mi"},
        "limits": {"memory": "512Mi"},
    }


@pytest.mark.parametrize("name", WORKLOADS)
def test_what_a_pod_mounts_and_names_is_there(name):
    pod = pod_of(WORKLOADS[name])
    volumes = {each["name"]: each for each in pod["volumes"]}
    mounted = [mount["name"] for mount in main_of(name)["volumeMounts"]]
    assert sorted(mounted) == sorted(volumes)
    for volume in volumes.values():
        if "configMap" in volume:
            assert ("ConfigMap", volume["configMap"]["name"]) in COMMON
        if "persistentVolumeClaim" in volume:
            assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in COMMON
    for source in main_of(name)["envFrom"]:
        assert ("Secret", source["secretRef"]["name"]) in COMMON
    writable = {
        mount["mountPath"] for mount in main_of(name)["volumeMounts"] if not mount.get("readOnly")
    }
    assert writable == {load({}).cache_dir}
    # A mounted file, in place of a directory, would never change.
    assert not any("subPath" in mount for mount in main_of(name)["volumeMounts"])


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


def load(more: dict[str, str]) -> Config:
    environ = {**SECRETS, **more}
    return reader.load(
        reader.ConfigFile(
            MIRROR.encode(), name="mirror.yaml", environ=environ, base_dir="/config", home="/"
        )
    )


def test_the_configuration_is_valid_and_nothing_in_it_is_doubted(tmp_path):
    path = tmp_path / "mirror.yaml"
    path.write_text(MIRROR)
    ran = run_regsync("validate", str(path), env=SECRETS)
    assert (ran.status, ran.out, ran.err) == (0, "", "")
    assert set(re.findall(r"\$\{(\w+)\}", MIRROR)) == set(SECRETS)


def test_the_cron_job_never_runs_twice_at_a_time():
    spec = WORKLOADS["cronjob"]["spec"]
    assert spec["concurrencyPolicy"] == "Forbid"
    assert len(spec["schedule"].split()) == 5


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


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path):
    for unit in UNITS:
        # The interpreter that is there stands for the one that should be.
        text = unit.read_text(encoding="utf-8").replace("/usr/bin/python3", sys.executable)
        (tmp_path / unit.name).write_text(text)
    command = [
        "systemd-analyze",
        "verify",
        "--man=no",
        *(str(tmp_path / unit.name) for unit in UNITS),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


# systemd.unit(5), systemd.service(5), systemd.exec(5), systemd.resource-control(5),
# systemd.timer(5).
KNOWN = {
    "Unit": "Description Wants After",
    "Service": """Type ExecStart EnvironmentFile Environment CacheDirectory CacheDirectoryMode TimeoutStopSec
        SuccessExitStatus LimitNOFILE DynamicUser UMask CapabilityBoundingSet NoNewPrivileges ProtectSystem
        ProtectHome ProtectProc ProtectClock ProtectHostname ProtectControlGroups ProtectKernelLogs
        ProtectKernelModules ProtectKernelTunables PrivateDevices PrivateTmp PrivateUsers LockPersonality
        MemoryDenyWriteExecute RestrictAddressFamilies RestrictNamespaces RestrictRealtime RestrictSUIDSGID
        SystemCallArchitectures SystemCallFilter SystemCallErrorNumber""",
    "Timer": "OnBootSec OnUnitInactiveSec RandomizedDelaySec",
    "Install": "WantedBy",
}


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_every_option_of_a_unit_is_known(path):
    configparser.RawConfigParser(strict=True).read_string(path.read_text(encoding="utf-8"))
    for section, name, _ in options(path):
        assert name in KNOWN[section].split(), f"[{section}] {name}"


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


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
def test_systemd_understands_what_the_unit_says_of_credentials(tmp_path):
    text = (DEPLOY / "systemd" / "regsync.service").read_text(encoding="utf-8")
    head = text.partition("[Unit]")[0]
    more = re.findall(r"(?m)^#   ((?:LoadCredential|Environment)=.*)$", head)
    assert len(more) == 2
    unit = tmp_path / "regsync.service"
    unit.write_text(
        text.replace("[Service]\nType", "\n".join(["[Service]", *more, "Type"])).replace(
            "/usr/bin/python3", sys.executable
        )
    )
    assert unit.read_text(encoding="utf-8").count(more[0]) == 2
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_timer_counts_from_the_end_of_a_run():
    found = {name: value for _, name, value in options(DEPLOY / "systemd" / "regsync.timer")}
    assert set(found) == {
        "Description",
        "OnBootSec",
        "OnUnitInactiveSec",
        "RandomizedDelaySec",
        "WantedBy",
    }
    assert found["WantedBy"] == "timers.target"


# --- CI
# -----------------------------------------------------------------------------------------------------


def test_what_an_ordinary_run_leaves_out_is_run_on_a_schedule():
    workflow = yaml.safe_load(THOROUGH.read_text(encoding="utf-8"))
    assert set(workflow[True]) == {"schedule", "workflow_dispatch"}
    assert workflow["permissions"] == {"contents": "read"}
    commands = [
        shlex.split(step["run"])
        for job in workflow["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    assert [words[1:] for words in commands] == [
        ["tools/check.py", "--thorough", "--order-seed", "$GITHUB_RUN_NUMBER"],
        ["tools/check.py", "tests/test_layering.py"],
        ["tools/mutants.py", "reach"],
        ["tools/mutants.py", "try"],
    ]
    assert all((DEPLOY.parent / words[1]).exists() for words in commands)
    # It makes the environment in whose Python the mutants run.
    assert [words[0] for words in commands[1:]] == ["python3", *[".venv/bin/python"] * 2]


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
