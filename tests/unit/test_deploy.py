"""The files of deploy/: valid by their own standards, and everything that they say to the program
is understood.

Nobody can run them here; so their schemas are asked, their commands parsed by our own command line,
their configuration by `regsync validate`, and what one file names in another is looked up.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from _regsync import __version__, config
from _regsync.config import Config

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


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


def test_the_image_is_named_with_the_version_that_it_has_and_files_that_are_there():
    shown = (DEPLOY / "kubernetes" / "common.yaml").read_text(encoding="utf-8")
    images = {main_of(name)["image"] for name in WORKLOADS}
    assert images == {f"registry.example.com/tools/regsync:{__version__}"}
    assert f"oci-archive:dist/regsync-linux.oci.tar docker://{images.pop()}" in shown
    named = re.findall(r"deploy/[\w./-]+\.yaml", shown)
    assert named
    assert all((DEPLOY.parent / name).is_file() for name in named)


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


def load(more: dict[str, str]) -> Config:
    environ = {**SECRETS, **more}
    return config.load(
        config.ConfigFile(
            MIRROR.encode(), name="mirror.yaml", environ=environ, base_dir="/config", home="/"
        )
    )
