"""The files of deploy/: valid by their own standards, and everything that they say to the program
is understood.

Nobody can run them here; so their schemas are asked, their commands parsed by our own command line,
their configuration by `regsync validate`, and what one file names in another is looked up.
"""

from __future__ import annotations

import configparser
import copy
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

from tests.ends import run_regsync

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").iterdir())
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


def main_of(name: str) -> dict[str, Any]:
    (container,) = pod_of(WORKLOADS[name])["containers"]
    return dict(container)


# --- Kubernetes
# ---------------------------------------------------------------------------------------------


def test_there_is_one_file_for_each_use():
    kinds = {"cronjob": "CronJob", "watch": "Deployment"}
    assert {name: each["kind"] for name, each in WORKLOADS.items()} == kinds


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
def test_a_pod_has_the_resources_of_the_specification(name):
    """docs/specification.md section 1.6."""
    assert main_of(name)["resources"] == {
        "requests": {"cpu": "100m", "memory": "128Mi"},
        "limits": {"memory": "512Mi"},
    }


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
