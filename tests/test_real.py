"""Between programs that share nothing with ours, and runs that are killed at any byte.

Registries are Debian's docker-registry. What we copied is compared byte for byte with what was
pushed, and read once more by skopeo, manifest by manifest and as a whole copy out of the target.
Kills at a request are in test_turns.py, power cuts at a write of a layout in unit/test_layout_power.py.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from conformance.images import Image, Seed
from conformance.messages import digest_of
from conformance.names import names
from conformance.personas import persona
from conformance.programs import HTPASSWD, PASSWORD, USER, skopeo
from conformance.shapes import shapes
from conformance.walks import fetch_http, identical, push_http
from tests.ends import (
    Ran,
    basic,
    document,
    held,
    only,
    program,
    run_regsync,
    started,
    sync_file,
    tags,
)
from tests.layouts import check_layout, names_of

pytestmark = [pytest.mark.process, pytest.mark.slow]

OCTETS = 300_000  # a layer above what leaves in one write
SIGNATURE = "application/vnd.example.signature"
APP = {"from": "app", "tags": tags("v1")}


@pytest.fixture
def seed() -> Seed:
    return Seed(23)


def judge(image: Image, address: str, where: str, home: Path, *options: str) -> None:
    """Have skopeo read an image's top manifest, then copy all of it to a directory."""
    there = f"docker://{address}/{where}"
    assert skopeo("inspect", "--raw", "--tls-verify=false", *options, there, home=home) == (
        image.body
    )
    out = home / "out"
    options = tuple(option.replace("--creds", "--src-creds") for option in options)
    skopeo("copy", "--all", "--src-tls-verify=false", *options, there, f"dir:{out}", home=home)
    for digest, data in image.contents().items():
        name = "manifest.json" if digest == image.top else digest.partition(":")[2]
        found = [out / name, out / f"{name}.manifest.json"]
        assert data in [path.read_bytes() for path in found if path.exists()], digest


def copy(source: str, target: str, text: str = "", env: Mapping[str, str] | None = None) -> Ran:
    where = (f"{source}/app:v1", f"{target}/app:v1")
    configured = ("-c", "-") if text else ()
    return run_regsync("copy", "--json", "--no-artifacts", *configured, *where, stdin=text, env=env)


def requests(ran: Ran, address: str) -> dict[str, int]:
    return dict(ran.totals["requests"].get(address, {}))


# What real registries take and give.


@pytest.mark.parametrize("kind", ["oci", "docker", "blobs"])
def test_an_index_arrives_whole_and_a_second_run_moves_nothing(
    docker_registries, seed, tmp_path, kind
):
    source, target = docker_registries(), docker_registries()
    if kind == "blobs":  # BuildKit's older cache, whose entries are no manifests
        image = shapes()["buildkit-cache-index"].build().image
    else:
        image = seed.index(format=kind, platforms=("linux/amd64", "linux/arm64/v8"))
    push_http(image, source, "app", "v1")
    first = copy(source, target)
    assert (first.status, first.err) == (0, "")
    blobs, manifests = len(image.blobs), len(image.manifests)
    assert requests(first, source) == {"blob_get": blobs, "manifest_get": manifests}
    uploads = {"upload_start": blobs, "upload_body": blobs}
    assert requests(first, target) == {"manifest_head": 1, "manifest_put": manifests, **uploads}
    if kind != "blobs":
        assert identical(fetch_http(target, "app", "v1"), image.contents())
        judge(image, target, "app:v1", tmp_path)
    second = copy(source, target)
    assert only(second.images)["reason"] == "unchanged"
    assert second.totals["requests"] == {source: {"manifest_get": 1}, target: {"manifest_head": 1}}
    assert second.totals["bytes"] == 0


def test_a_sync_selects_trims_mounts_and_settles(docker_registries, seed, tmp_path):
    source, target = docker_registries(), docker_registries()
    shared = seed.layer(OCTETS)
    one, two = (seed.image(layers=[shared, seed.layer(size)]) for size in (7, 8))
    push_http(one, source, "one", "v1", "latest")
    push_http(two, source, "two", "v1")
    platforms = ("linux/amd64", "linux/arm64/v8", "linux/arm/v7")
    push_http(seed.index(platforms=platforms), source, "multi", "v1")
    mappings = (
        {"from": "one", "tags": tags("*")},
        {"from": "two", "to": "deep/er/two", "tags": tags("v*")},
        {"from": "multi", "tags": tags("v1"), "platforms": ["linux/arm64"]},
    )
    ends = {"source": source, "target": target}
    first = sync_file(tmp_path, ends, *mappings)
    assert (first.status, first.statuses()) == (0, ["synced"] * 4)
    assert first.totals["layers"]["mounted"] == 1
    assert requests(first, source)["blob_get"] == 3 + 2 + 3
    judge(one, target, "one:v1", tmp_path)
    assert identical(fetch_http(target, "deep/er/two", "v1"), two.contents())
    assert len(fetch_http(target, "multi", "v1")) == 5, "index, manifest, config and two layers"
    where = f"docker://{target}/multi:v1"
    trimmed = skopeo("inspect", "--raw", "--tls-verify=false", where, home=tmp_path)
    assert digest_of(trimmed) in {each["digest"] for each in first.images}
    second = sync_file(tmp_path, ends, *mappings)
    assert (second.status, second.statuses()) == (0, ["skipped"] * 4)
    actions = {*requests(second, source), *requests(second, target)}
    assert actions <= {"tag_list", "manifest_head", "manifest_get"}
    assert second.totals["bytes"] == 0


def test_an_equal_tag_lets_a_new_repository_mount_without_a_state(
    docker_registries, seed, tmp_path
):
    source, target = docker_registries(), docker_registries()
    ends = {"source": source, "target": target}
    image = seed.image(sizes=(900,) * 23)
    push_http(image, source, "app", "v1")
    sync_file(tmp_path, ends, APP)
    for path in (tmp_path / ".regsync").iterdir():
        path.unlink()
    ran = sync_file(tmp_path, ends, APP, {**APP, "to": "beside/app"})
    assert ran.totals["bytes"] == 0
    assert requests(ran, source) == {"manifest_get": 1}
    mounts = {"upload_start": 24}
    assert requests(ran, target) == {"manifest_head": 2, "manifest_put": 1, **mounts}
    judge(image, target, "beside/app:v1", tmp_path)


def test_a_login_is_used_and_a_wrong_one_is_tried_once(
    docker_registries, seed, tmp_path, clean_env
):
    source, target = docker_registries(htpasswd=HTPASSWD), docker_registries(htpasswd=HTPASSWD)
    image = seed.image(sizes=(OCTETS, 12))
    auth = basic(USER, PASSWORD)
    push_http(image, source, "app", "v1", authorization=f"Basic {auth}")
    (clean_env / ".docker").mkdir()
    auths = {"auths": {source: {"auth": auth}, target: {"auth": auth}}}
    (clean_env / ".docker" / "config.json").write_text(json.dumps(auths))

    login = {"username": USER, "password": "not the password"}
    wrong = {"url": target, "auth_type": "basic", "credentials": login}
    ran = copy(source, target, json.dumps({"registries": {"t": wrong}, "mappings": []}))
    assert ran.status == 4
    assert "AUTH_ERROR" in only(ran.failed)
    assert f"{target}/app:v1" in only(ran.failed)
    assert "hint: " in ran.err
    assert "not the password" not in ran.err + ran.out
    assert requests(ran, target) == {"manifest_head": 2}

    ran = copy(source, target)
    assert (ran.status, ran.err) == (0, "")
    judge(image, target, "app:v1", tmp_path, f"--creds={USER}:{PASSWORD}")
    # The first request to a registry goes bare and is asked to log in; nothing else is asked twice.
    assert requests(ran, source) == {"blob_get": 3, "manifest_get": 2}
    uploads = {"upload_body": 3, "upload_start": 3}
    assert requests(ran, target) == {"manifest_head": 2, "manifest_put": 1, **uploads}


def test_an_authority_of_ones_own_is_trusted_by_file_or_by_variable(
    docker_registries, seed, tmp_path, ca
):
    leaf = ca.issue_cert("127.0.0.1", "localhost")
    certificate, key, bundle = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))
    certificate.write_bytes(b"".join(part.bytes() for part in leaf.cert_chain_pems))
    key.write_bytes(leaf.private_key_pem.bytes())
    bundle.write_bytes(ca.cert_pem.bytes())
    source, target = (docker_registries(tls=(certificate, key)) for _ in range(2))
    context = ssl.create_default_context(cafile=str(bundle))
    image = seed.image(sizes=(OCTETS, 12))
    push_http(image, source, "app", "v1", context=context)

    def over_tls(env: Mapping[str, str] | None = None, **more: str) -> Ran:
        entries = {name: {"url": f"https://{name}", **more} for name in (source, target)}
        named = {f"r{number}": entry for number, entry in enumerate(entries.values())}
        return copy(source, target, json.dumps({"registries": named, "mappings": []}), env)

    ran = over_tls()
    assert ran.status == 2
    assert "NETWORK_ERROR" in only(ran.failed)
    assert "ca_file" in ran.err
    ran = over_tls({"SSL_CERT_FILE": str(bundle)})
    assert (ran.statuses(), ran.err) == (["synced"], "")
    assert identical(fetch_http(target, "app", "v1", context=context), image.contents())
    judge(image, target, "app:v1", tmp_path)
    assert over_tls(ca_file=str(bundle)).statuses() == ["skipped"]


def test_the_built_program_copies_between_providers_by_name(seed, pyz, tmp_path):
    """Docker Hub's short name, a token service elsewhere, redirects, a proxy, an authority."""
    with (
        names(tmp_path) as known,
        persona("dockerhub", names=known) as hub,
        persona("redirecting", names=known) as target,
    ):
        image = seed.index().load_into(hub.app, "library/alpine", tag="3")
        where = ["docker.io/alpine:3", f"{target.address}/mirror/alpine:3"]
        command = [*program(pyz), "copy", "--json", "--no-artifacts", *where]
        env = {**os.environ, **known.environ}
        ran = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=60, check=False
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        assert held(target, "mirror/alpine", image)
        hub.check()
        target.check()
    assert known.refused == []


# Lines that break, and runs that are killed.


class Line:
    """Leads to a registry. When `limit` is reached, the connection is cut, once."""

    def __init__(self, address: str, limit: Callable[[Line], bool] = lambda _: False) -> None:
        self.registry = address.split(":")
        self.limit = limit
        self.is_whole = True
        self.bytes = 0  # both ways
        self.sent = bytearray()  # by clients

    def __call__(self, client: socket.socket) -> None:
        if not self.is_whole:
            time.sleep(0.5)  # the registry forgets a session some moments after its body broke
        with socket.create_connection(tuple(self.registry)) as registry:
            other = {client: registry, registry: client}
            while True:
                for end in select.select([client, registry], [], [])[0]:
                    data = end.recv(16384)
                    self.bytes += len(data)
                    self.sent += data if end is client else b""
                    if not data:
                        return
                    if self.is_whole and self.limit(self):
                        self.is_whole = False
                        return
                    other[end].sendall(data)


def test_a_blob_that_breaks_behind_a_real_registry_goes_on_where_it_ended(
    docker_registries, speaker, seed
):
    """2.8.2 gives the rest by Range."""
    source, target = docker_registries(), docker_registries()
    image = seed.image(layers=[seed.blob(3 << 20)])
    push_http(image, source, "app", "v1")
    line = Line(source, lambda line: line.bytes > 2 << 20)
    ran = copy(speaker(line), target)
    assert (ran.status, ran.failed, line.is_whole) == (0, [], False), ran.err
    assert identical(fetch_http(target, "app", "v1"), image.contents())
    assert len(re.findall(rb"(?i)\r\nrange: bytes=[1-9]", line.sent)) == 1


def test_an_upload_that_breaks_before_a_real_registry_begins_again(
    docker_registries, speaker, seed
):
    """2.8.2 forgets an upload whose body broke: it is asked that once."""
    source, target = docker_registries(), docker_registries()
    image = seed.image(layers=[seed.blob(3 << 20)])
    push_http(image, source, "app", "v1")
    line = Line(target, lambda line: len(line.sent) > 1 << 20)
    ran = copy(source, speaker(line))
    assert (ran.status, ran.failed, line.is_whole) == (0, [], False), ran.err
    assert identical(fetch_http(target, "app", "v1"), image.contents())
    assert len(re.findall(rb"GET /v2/app/blobs/uploads/", line.sent)) == 1
    assert (4 << 20) < len(line.sent) < (4 << 20) + (1 << 18)


class Killed:
    """A sync that has run once; since then the source has new images, and v0 has moved."""

    def __init__(self, directory: Path, serve: Any, speaker: Any, *, to_layout: bool) -> None:
        directory.mkdir()
        self.source, self.target = serve(), serve()
        self.disk = directory / "disk" if to_layout else None
        # What a layout gets passes the source's line alone.
        self.line = Line((self.source if to_layout else self.target).address)
        line = f"http://{speaker(self.line)}"
        registries = {"source": self.source, "target": line}
        if to_layout:
            registries = {"source": line, "target": f"oci-layout:{self.disk}"}
        seed = Seed(41)
        self.old = seed.image().load_into(self.source.app, "app", tag="v0")
        self.file = directory / "mirror.yaml"
        mapping = {"from": "app", "tags": tags("v*"), "artifacts": {"enabled": True}}
        few = {"max_concurrent_transfers": 2}
        self.file.write_text(document(registries, mapping, **{"global": few}))
        assert run_regsync("sync", "-q", "-c", str(self.file)).status == 0

        base = seed.layer(100_000)
        self.new = [seed.image(layers=[base, seed.layer(50_000)]) for _ in range(7)]
        self.new.append(seed.index([seed.image(layers=[base]), seed.image(layers=[base])]))
        self.signatures = [seed.artifact(image, SIGNATURE) for image in self.new]
        for number, image in enumerate(self.new):
            image.load_into(self.source.app, "app", tag=f"v{number}")
            self.signatures[number].load_into(self.source.app, "app")

    def run(self, most: float = float("inf")) -> tuple[int, dict[str, str]]:
        """Run, and kill the run at a byte; return its exit status, and what each tag then names.

        Whatever a tag names has to be whole.
        """
        with started("sync", "-q", "-c", str(self.file)) as client:

            def kill(line: Line) -> bool:
                if line.bytes < most:
                    return False
                client.kill()
                return True

            self.line.bytes, self.line.is_whole, self.line.limit = 0, True, kill
            client.communicate()
        self.source.wait_until_idle()
        self.target.wait_until_idle()
        if self.disk:
            check_layout(self.disk)
            tagged = {name.partition(":")[2]: top for name, top in names_of(self.disk).items()}
        else:
            known = {image.top: image for image in (self.old, *self.new)}
            tagged = dict(self.target.app.tags("app"))
            assert all(held(self.target, "app", known[top]) for top in tagged.values())
        return client.returncode, tagged

    def has(self, image: Image) -> bool:
        if self.disk:
            return image.contents().keys() <= check_layout(self.disk)
        return held(self.target, "app", image)


@pytest.mark.parametrize("to_layout", [False, True], ids=["registry", "layout"])
def test_whatever_the_byte_of_a_kill_tags_are_old_or_new_and_the_next_run_brings_the_rest(
    tmp_path, serve, speaker, to_layout
):
    """I11."""
    undisturbed = Killed(tmp_path / "undisturbed", serve, speaker, to_layout=to_layout)
    wanted = {f"v{number}": image.top for number, image in enumerate(undisturbed.new)}
    assert undisturbed.run() == (0, wanted)
    whole = undisturbed.line.bytes
    counts = set()
    # All are prepared before one is killed: what a dead client has sent may arrive in the next run.
    scenes = {
        moment: Killed(tmp_path / str(moment), serve, speaker, to_layout=to_layout)
        for moment in ((0.3, 0.6) if to_layout else (0.2, 0.5, 0.8))
    }
    for moment, scene in scenes.items():
        status, tagged = scene.run(moment * whole)
        assert status == -signal.SIGKILL
        assert all(tagged[tag] in (wanted[tag], scene.old.top) for tag in tagged)
        assert [tag for tag in tagged if tagged[tag] == scene.old.top] in ([], ["v0"])
        counts.add(len(tagged))

        assert scene.run() == (0, wanted)
        assert all(scene.has(image) for image in (*scene.new, *scene.signatures))
        # The next run brings again what a killed one has not saved on a disk.
        most = moment + 1.1 if to_layout else 1.5
        assert moment + scene.line.bytes / whole < most, "for the killed and the next run together"
    # A layout is given its tags at the end of a short run.
    assert to_layout or len(counts) > 1
