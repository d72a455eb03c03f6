"""skopeo, which others wrote, as a client of the harness: to, from and within its registries.

It has to be installed (`apt-get install skopeo`). What it cannot do with the harness, the harness
gets wrong: each test ends with `journal.check()`, so that no refusal of a correct client goes
unseen. In test_shapes.py it copies every kind of content.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
import trustme

from conformance.http import Server, run_in_thread
from conformance.images import Seed
from conformance.names import names
from conformance.personas import persona
from conformance.programs import PASSWORD, USER, skopeo
from conformance.registry import App
from conformance.tokens import BasicAuth, TokenService
from conformance.walks import fetch_http, identical

pytestmark = pytest.mark.slow

PLAIN = ("--src-tls-verify=false", "--dest-tls-verify=false")
CREDENTIALS = (f"--src-creds={USER}:{PASSWORD}", f"--dest-creds={USER}:{PASSWORD}")


def place(server: Server, repository: str) -> str:
    return f"docker://{server.address}/{repository}:v1"


@pytest.mark.parametrize("name", ["strict", "distribution", "distribution3", "old", "redirecting"])
def test_copies_into_out_of_and_within(name: str, seed: Seed, tmp_path: Path) -> None:
    image = seed.index(platforms=("linux/amd64", "linux/arm64/v8"))
    with persona("strict") as plain, persona(name) as other:
        image.load_into(plain.app, "team/app", tag="v1")
        here, there = f"docker://{plain.address}/team", f"docker://{other.address}/team"
        for source, target in (
            (f"{here}/app:v1", f"{there}/app:v1"),
            (f"{there}/app:v1", f"{there}/copy:v1"),
            (f"{there}/copy:v1", f"{here}/back:v1"),
        ):
            skopeo("copy", "--all", *PLAIN, source, target, home=tmp_path)
        assert identical(fetch_http(plain.app, "team/back", "v1"), image.contents())
        if name == "redirecting":
            assert other.servers["storage"].journal.count("GET", status=200) > 0
        other.check()
        plain.check()


@pytest.mark.parametrize("format", ["oci", "docker"])
def test_copies_to_the_real_registry_and_back_are_the_same_bytes(
    format: Any, docker_registry: str, tmp_path: Path
) -> None:
    app = App()
    image = Seed(3).index(format=format, spacing="odd").load_into(app, "a/b", tag="v1")
    with run_in_thread(app) as ours:
        there = f"docker://{docker_registry}/a/b:v1"
        skopeo("copy", "--all", *PLAIN, place(ours, "a/b"), there, home=tmp_path)
        skopeo("copy", "--all", *PLAIN, there, place(ours, "c/d"), home=tmp_path)
    assert identical(fetch_http(app, "c/d", "v1"), image.contents())
    assert identical(fetch_http(docker_registry, "a/b", "v1"), image.contents())
    app.journal.check()


@pytest.mark.parametrize("auth", [BasicAuth, TokenService])
def test_copies_with_passwords_over_tls(auth: Any, ca: trustme.CA, tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    (tmp_path / "certs").mkdir()
    ca.cert_pem.write_to_path(tmp_path / "certs" / "ca.crt")
    trusted = (f"--src-cert-dir={tmp_path / 'certs'}", f"--dest-cert-dir={tmp_path / 'certs'}")
    image = Seed(7).index()
    app = App(auth=auth({USER: PASSWORD}))
    image.load_into(app, "a/b", tag="v1")
    with run_in_thread(app, ssl_context=context) as server:
        places = (place(server, "a/b"), place(server, "c/d"))
        skopeo("copy", "--all", *trusted, *CREDENTIALS, *places, home=tmp_path)
        with pytest.raises(AssertionError, match="certificate"):
            skopeo("copy", "--all", *CREDENTIALS, *places, home=tmp_path)
        with pytest.raises(AssertionError, match=r"unauthorized|authentication required|incorrect"):
            skopeo("copy", "--all", *trusted, *places[:1], place(server, "e/f"), home=tmp_path)
    assert app.tags("c/d") == {"v1": image.top}
    assert app.repositories["c/d"].manifests.keys() == image.manifests.keys()
    app.journal.check()


def test_tags_are_listed_page_by_page(seed: Seed, tmp_path: Path) -> None:
    app = App(page_size=10)
    tags = [f"v{number:02}" for number in range(35)]
    seed.image().load_into(app, "a/b", *tags)
    with run_in_thread(app) as server:
        where = f"docker://{server.address}/a/b"
        listed = json.loads(skopeo("list-tags", "--tls-verify=false", where, home=tmp_path))
    assert listed["Tags"] == tags
    assert app.journal.count("GET", "tag_list") == 4
    app.journal.check()


def test_copies_out_of_hub_by_name(seed: Seed, tmp_path: Path) -> None:
    """Through the forward proxy, over TLS by the throw-away authority, with the token service
    elsewhere.
    """
    out = tmp_path / "out"
    command = ["skopeo", "--insecure-policy", "copy", "docker://alpine:3", f"dir:{out}"]
    home = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path), "PATH": os.environ["PATH"]}
    with names(tmp_path) as known, persona("dockerhub", names=known) as hub:
        image = seed.image().load_into(hub.app, "library/alpine", tag="3")
        ran = subprocess.run(
            command,
            env={**home, **known.environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        hub.check()
    assert (out / "manifest.json").read_bytes() == image.body
    assert {*known.tunnels} == {"registry-1.docker.io:443", "auth.docker.io:443"}
    assert known.refused == []
