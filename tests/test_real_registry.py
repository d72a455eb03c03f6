"""Between two of Debian's docker-registry, judged by skopeo: programs that share nothing with ours.

What we copied is compared byte for byte with what was pushed, and read once more by skopeo,
manifest by manifest and as a whole copy out of the target into a third place.
"""

from __future__ import annotations

import base64
import json
import re
import select
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.client.copies import fetch_http, identical, push_http
from conformance.content.images import Image, Seed
from conformance.content.shapes import shapes
from conformance.messages import digest_of
from conformance.programs import HTPASSWD, PASSWORD, USER, skopeo
from tests.ends import basic, only, run_regsync

pytestmark = pytest.mark.process  # for sockets and TLS

Registries = Callable[..., str]
LOGIN = f"Basic {basic(USER, PASSWORD)}"
OCTETS = 300_000  # a layer above what leaves in one write


@pytest.fixture
def seed() -> Seed:
    return Seed(23)


def judged(image: Image, address: str, where: str, home: Path, *options: str) -> None:
    """Have skopeo read an image's top manifest, then copy all of it to a directory."""
    there = f"docker://{address}/{where}"
    tls_verify = "--tls-verify=false"
    assert skopeo("inspect", "--raw", tls_verify, *options, there, home=home) == image.body
    out = home / "out"
    options = tuple(option.replace("--creds", "--src-creds") for option in options)
    skopeo("copy", "--all", "--src-tls-verify=false", *options, there, f"dir:{out}", home=home)
    for digest, data in image.contents().items():
        name = "manifest.json" if digest == image.top else digest.partition(":")[2]
        found = [out / name, out / f"{name}.manifest.json"]
        assert data in [path.read_bytes() for path in found if path.exists()], digest


def copy(source: str, target: str, *more: str, where: str = "app:v1", **options: Any) -> Any:
    arguments = (
        "copy",
        "--json",
        "--no-artifacts",
        *more,
        f"{source}/{where}",
        f"{target}/{where}",
    )
    return run_regsync(*arguments, **options)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["oci", "docker"])
def test_an_index_arrives_whole_and_a_second_run_moves_nothing(
    docker_registries, seed, tmp_path, format
):
    source, target = docker_registries(), docker_registries()
    image = seed.index(format=format, platforms=("linux/amd64", "linux/arm64/v8"))
    push_http(image, source, "app", "v1")
    first = copy(source, target)
    assert (first.status, first.err) == (0, "")
    assert identical(fetch_http(target, "app", "v1"), image.contents())
    judged(image, target, "app:v1", tmp_path)
    blobs = len(image.blobs)
    assert first.totals["requests"] == {
        source: {"blob_get": blobs, "manifest_get": 3},
        target: {
            "manifest_head": 1,
            "manifest_put": 3,
            "upload_body": blobs,
            "upload_start": blobs,
        },
    }
    second = copy(source, target)
    assert only(second.images)["reason"] == "unchanged"
    assert second.totals["requests"] == {source: {"manifest_get": 1}, target: {"manifest_head": 1}}
    assert second.totals["bytes"] == 0


@pytest.mark.slow
def test_a_sync_selects_trims_mounts_and_settles(docker_registries, seed, tmp_path):
    source, target = docker_registries(), docker_registries()
    shared = seed.layer(OCTETS)
    one, two = (
        seed.image(layers=[shared, seed.layer(7)]),
        seed.image(layers=[shared, seed.layer(8)]),
    )
    whole = seed.index(platforms=("linux/amd64", "linux/arm64/v8", "linux/arm/v7"))
    push_http(one, source, "one", "v1", "latest")
    push_http(two, source, "two", "v1")
    push_http(whole, source, "multi", "v1")
    config = {
        "registries": {"s": {"url": source}, "t": {"url": target}},
        "defaults": {"source": "s", "targets": ["t"], "artifacts": {"enabled": False}},
        "mappings": [
            {"from": "one", "tags": {"glob": "*"}},
            {"from": "two", "to": "deep/er/two", "tags": {"glob": "v*"}},
            {"from": "multi", "tags": {"glob": "v1"}, "platforms": ["linux/arm64"]},
        ],
    }
    path = tmp_path / "mirror.yaml"
    path.write_text(json.dumps(config))
    first = run_regsync("sync", "--json", "-q", "-c", str(path))
    assert (first.status, first.statuses()) == (0, ["synced"] * 4)
    assert first.totals["layers"]["mounted"] == 1
    assert first.totals["requests"][source]["blob_get"] == 3 + 2 + 3
    judged(one, target, "one:v1", tmp_path)
    judged(one, target, "one:latest", tmp_path)
    assert identical(fetch_http(target, "deep/er/two", "v1"), two.contents())
    assert len(fetch_http(target, "multi", "v1")) == 5, "index, manifest, config and two layers"
    trimmed = skopeo(
        "inspect", "--raw", "--tls-verify=false", f"docker://{target}/multi:v1", home=tmp_path
    )
    assert digest_of(trimmed) in {each["digest"] for each in first.images}
    second = run_regsync("sync", "--json", "-q", "-c", str(path))
    assert (second.status, second.statuses()) == (0, ["skipped"] * 4)
    actions = {action for counted in second.totals["requests"].values() for action in counted}
    assert actions <= {"tag_list", "manifest_head", "manifest_get"}
    assert second.totals["bytes"] == 0


def sync(directory: Path, source: str, target: str, *mappings: dict[str, Any]) -> Any:
    """Run mappings of app:v1 from a file, so that there is state beside it."""
    config = {
        "registries": {"s": {"url": source}, "t": {"url": target}},
        "defaults": {"source": "s", "targets": ["t"], "artifacts": {"enabled": False}},
        "mappings": [{"from": "app", "tags": {"glob": "v1"}, **mapping} for mapping in mappings],
    }
    path = directory / "mirror.yaml"
    path.write_text(json.dumps(config))
    ran = run_regsync("sync", "--json", "-q", "-c", str(path))
    assert ran.status == 0, ran.err
    return ran


@pytest.mark.slow
def test_an_equal_tag_lets_a_new_repository_mount_without_a_state(
    docker_registries, seed, tmp_path
):
    """docs/design.md section 6, rule 4."""
    source, target = docker_registries(), docker_registries()
    image = seed.image(sizes=(OCTETS, 900))
    push_http(image, source, "app", "v1")
    sync(tmp_path, source, target, {})
    for path in (tmp_path / ".regsync").iterdir():
        path.unlink()
    ran = sync(tmp_path, source, target, {}, {"to": "beside/app"})
    assert ran.totals["bytes"] == 0
    assert ran.totals["requests"] == {
        source: {"manifest_get": 1},
        target: {"manifest_head": 2, "upload_start": 3, "manifest_put": 1},
    }
    judged(image, target, "beside/app:v1", tmp_path)


@pytest.mark.slow
def test_new_blobs_of_a_changed_repository_cost_no_head(docker_registries, seed, tmp_path):
    """docs/design.md section 6, rule 11: one POST for a blob that is there, in the first run only."""
    source, target = docker_registries(), docker_registries()
    push_http(seed.image(), source, "app", "v1")
    sync(tmp_path, source, target, {})
    for question in (1, 0):
        image = seed.image(sizes=(900,) * 23)
        push_http(image, source, "app", "v1")
        ran = sync(tmp_path, source, target, {})
        assert ran.totals["requests"][target] == {
            "manifest_head": 1,
            "upload_start": 24 + question,
            "upload_body": 24,
            "manifest_put": 1,
        }
    judged(image, target, "app:v1", tmp_path)


@pytest.mark.slow
def test_mappings_of_one_source_ask_for_each_tag_once(docker_registries, seed, tmp_path):
    source, target = docker_registries(), docker_registries()
    for number in range(4):
        push_http(seed.image(), source, "app", f"v{number}")
    config = {
        "registries": {"s": {"url": source}, "t": {"url": target}},
        "defaults": {"source": "s", "targets": ["t"], "tags": {"glob": "v*"}},
        "mappings": [{"from": "app", "to": name} for name in ("one", "two", "three")],
    }
    path = tmp_path / "mirror.yaml"
    path.write_text(json.dumps(config))
    first = run_regsync("sync", "--json", "-q", "-c", str(path))
    assert (first.status, first.statuses()) == (0, ["synced"] * 12)
    # One of the GETs finds out that there is no referrers API.
    assert first.totals["requests"][source]["manifest_get"] == 4 + 1
    second = run_regsync("sync", "--json", "-q", "-c", str(path))
    assert second.totals["requests"] == {
        source: {"tag_list": 1, "manifest_head": 4},
        target: {"manifest_head": 12},
    }


@pytest.mark.slow
def test_unchanged_tags_cost_no_manifest_with_head_first_and_nothing_known(
    docker_registries, seed, tmp_path
):
    source, target = docker_registries(), docker_registries()
    for number in range(5):
        image = seed.index(platforms=("linux/amd64", "linux/arm64"))
        for address in (source, target):
            push_http(image, address, "app", f"v{number}")
    config = {
        "registries": {"s": {"url": source, "head_first": True}, "t": {"url": target}},
        "defaults": {"source": "s", "targets": ["t"]},
        "mappings": [{"from": "app", "tags": {"glob": "v*"}}],
    }
    path = tmp_path / "mirror.yaml"
    path.write_text(json.dumps(config))
    ran = run_regsync("sync", "--json", "-q", "-c", str(path))
    assert (ran.status, ran.statuses()) == (0, ["skipped"] * 5)
    # The one GET finds out that there is no referrers API.
    assert ran.totals["requests"] == {
        source: {"tag_list": 1, "manifest_head": 5, "manifest_get": 1},
        target: {"tag_list": 1, "manifest_head": 5},
    }


@pytest.mark.slow
def test_within_one_registry_blobs_are_mounted(docker_registry, seed):
    image = seed.image(sizes=(OCTETS,))
    push_http(image, docker_registry, "app", "v1")
    arguments = (
        "copy",
        "--json",
        "--no-artifacts",
        f"{docker_registry}/app:v1",
        f"{docker_registry}/b/c:v1",
    )
    ran = run_regsync(*arguments)
    assert ran.status == 0
    assert identical(fetch_http(docker_registry, "b/c", "v1"), image.contents())
    assert only(ran.images)["blobs"] == {"transferred": 0, "mounted": 2, "skipped": 0}
    assert "blob_get" not in ran.totals["requests"][docker_registry]


@pytest.mark.slow
def test_an_index_of_blobs_is_taken(docker_registries):
    """BuildKit's older cache, whose entries are no manifests."""
    source, target = docker_registries(), docker_registries()
    image = shapes()["buildkit-cache-index"].build().image
    push_http(image, source, "app", "v1")
    first, second = copy(source, target), copy(source, target)
    assert (first.statuses(), second.statuses()) == (["synced"], ["skipped"])
    assert only(first.images)["blobs"] == {"transferred": 3, "mounted": 0, "skipped": 0}
    again = copy(target, docker_registries())
    assert (again.status, again.totals["bytes"]) == (0, first.totals["bytes"])


@pytest.mark.slow
def test_a_login_from_the_docker_configuration(docker_registries, seed, tmp_path, clean_env):
    source, target = docker_registries(htpasswd=HTPASSWD), docker_registries(htpasswd=HTPASSWD)
    image = seed.image(sizes=(OCTETS, 12))
    push_http(image, source, "app", "v1", authorization=LOGIN)
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    (clean_env / ".docker").mkdir()
    (clean_env / ".docker" / "config.json").write_text(
        json.dumps({"auths": {source: {"auth": auth}, target: {"auth": auth}}})
    )
    ran = copy(source, target)
    assert (ran.status, ran.err) == (0, "")
    assert identical(fetch_http(target, "app", "v1", authorization=LOGIN), image.contents())
    judged(image, target, "app:v1", tmp_path, f"--creds={USER}:{PASSWORD}")
    counted = ran.totals["requests"]
    # The first request to a registry goes bare and is asked to log in; nothing else is asked twice.
    assert counted[source] == {"blob_get": 3, "manifest_get": 2}
    assert counted[target] == {
        "manifest_head": 2,
        "manifest_put": 1,
        "upload_body": 3,
        "upload_start": 3,
    }


@pytest.mark.slow
def test_a_wrong_password_is_status_4_with_its_remedy(docker_registries, seed):
    source, target = docker_registries(), docker_registries(htpasswd=HTPASSWD)
    push_http(seed.image(), source, "app", "v1")
    wrong = {
        "auth_type": "basic",
        "credentials": {"username": USER, "password": "not the password"},
    }
    config = {"registries": {"t": {"url": target, **wrong}}, "mappings": []}
    ran = copy(source, target, "-c", "-", stdin=json.dumps(config))
    assert ran.status == 4
    line = only(ran.failed)
    assert "AUTH_ERROR" in line
    assert f"{target}/app:v1" in line
    assert "hint: " in ran.err
    assert "not the password" not in ran.err + ran.out
    assert ran.totals["requests"][target] == {"manifest_head": 2}, (
        "a wrong password is not tried twice"
    )


@pytest.mark.slow
@pytest.mark.parametrize("trust", ["ca_file", "SSL_CERT_FILE", "none"])
def test_tls_with_an_authority_of_ones_own(docker_registries, seed, tmp_path, ca, trust):
    leaf = ca.issue_cert("127.0.0.1", "localhost")
    certificate, key, bundle = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))
    certificate.write_bytes(b"".join(part.bytes() for part in leaf.cert_chain_pems))
    key.write_bytes(leaf.private_key_pem.bytes())
    bundle.write_bytes(ca.cert_pem.bytes())
    source, target = (docker_registries(tls=(certificate, key)) for _ in range(2))
    context = ssl.create_default_context(cafile=str(bundle))
    image = seed.image(sizes=(OCTETS, 12))
    push_http(image, source, "app", "v1", context=context)
    more = {"ca_file": str(bundle)} if trust == "ca_file" else {}
    registries = {
        name: {"url": f"https://{address}", **more}
        for name, address in (("s", source), ("t", target))
    }
    text = json.dumps({"registries": registries, "mappings": []})
    environment = {"SSL_CERT_FILE": str(bundle)} if trust == "SSL_CERT_FILE" else {}
    ran = copy(source, target, "-c", "-", stdin=text, env=environment)
    if trust == "none":
        assert ran.status == 2
        assert "NETWORK_ERROR" in only(ran.failed)
        assert "ca_file" in ran.err
        return
    assert (ran.status, ran.err) == (0, "")
    assert identical(fetch_http(target, "app", "v1", context=context), image.contents())
    judged(image, target, "app:v1", tmp_path)


class Line:
    """Leads to a registry, and breaks once: when a connection has carried `most` bytes.

    They are counted of what the client sends (`up`), or of what it gets.
    """

    def __init__(self, address: str, most: int, *, up: bool) -> None:
        self.address = address
        self.most = most
        self.up = up
        self.is_whole = True
        self.sent = bytearray()  # by clients

    def __call__(self, client: socket.socket) -> None:
        if not self.is_whole:
            time.sleep(0.5)  # the registry forgets a session some moments after its body broke
        host, _, port = self.address.rpartition(":")
        with socket.create_connection((host, int(port))) as registry:
            left = self.most
            while True:
                for end in select.select([client, registry], [], [])[0]:
                    got = end.recv(16384)
                    if end is client:
                        self.sent += got
                    if (end is client) == self.up:
                        left -= len(got)
                    if not got:
                        return
                    if left < 0 and self.is_whole:
                        self.is_whole = False
                        return
                    (registry if end is client else client).sendall(got)


@pytest.mark.slow
def test_a_blob_that_breaks_behind_a_real_registry_goes_on_where_it_ended(
    docker_registries, speaker, seed
):
    """2.8.2 gives the rest by Range."""
    source, target = (docker_registries() for _ in range(2))
    image = seed.image(layers=[seed.blob(3 << 20)])
    push_http(image, source, "app", "v1")
    line = Line(source, 2 << 20, up=False)
    ran = copy(speaker(line), target)
    assert (ran.status, ran.failed) == (0, []), ran.err
    assert identical(fetch_http(target, "app", "v1"), image.contents())
    assert not line.is_whole
    assert len(re.findall(rb"(?i)\r\nrange: bytes=[1-9]", line.sent)) == 1


@pytest.mark.slow
def test_an_upload_that_breaks_before_a_real_registry_begins_again(
    docker_registries, speaker, seed
):
    """2.8.2 forgets an upload whose body broke: it is asked that once."""
    source, target = (docker_registries() for _ in range(2))
    image = seed.image(layers=[seed.blob(3 << 20)])
    push_http(image, source, "app", "v1")
    line = Line(target, 1 << 20, up=True)
    ran = copy(source, speaker(line))
    assert (ran.status, ran.failed) == (0, []), ran.err
    assert identical(fetch_http(target, "app", "v1"), image.contents())
    assert not line.is_whole
    assert len(re.findall(rb"GET /v2/app/blobs/uploads/", line.sent)) == 1
    assert (4 << 20) < len(line.sent) < (4 << 20) + (1 << 18)
