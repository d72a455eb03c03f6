"""skopeo, which others wrote, as a client of the harness: to, from and between its registries.

It has to be installed (`apt-get install skopeo`). What it cannot do with the harness, the harness
gets wrong: each test ends with `journal.check()`, so that no refusal of a correct client goes
unseen. Copies to and from docker-registry are in `test_real_parts.py`.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from conformance.client.copies import fetch_http, identical
from conformance.content.images import Image, Seed
from conformance.programs import PASSWORD, USER, skopeo
from conformance.registry.app import App
from conformance.registry.tokens import BasicAuth, TokenService
from conformance.server.sockets import Server, run_in_thread

pytestmark = pytest.mark.slow

PLAIN = ("--src-tls-verify=false", "--dest-tls-verify=false")
CREDENTIALS = (f"--src-creds={USER}:{PASSWORD}", f"--dest-creds={USER}:{PASSWORD}")


def shared_layers(seed: Seed, shared: bytes) -> Image:
    """Build an index of four images that have one layer in common."""
    return seed.index(
        [
            seed.image(layers=[shared, seed.layer(20)], architecture=f"arch{number}")
            for number in range(4)
        ]
    )


SINGLE: Mapping[str, Callable[[Seed], Image]] = {
    "oci image": lambda seed: seed.image(spacing="odd", extra={"x-unknown": 1}),
    "docker image": lambda seed: seed.image(format="docker", spacing="indent"),
    "repeated layer": lambda seed: seed.image(layers=[seed.layer(5000)] * 3),
    "no layers": lambda seed: seed.image(sizes=()),
    "large layer": lambda seed: seed.image(sizes=(5 << 20, 10)),
    "inline config": lambda seed: seed.image(inline_config=True),
}
LISTS: Mapping[str, Callable[[Seed], Image]] = {
    "oci index": lambda seed: seed.index(attestations=True, spacing="indent"),
    "docker list": lambda seed: seed.index(format="docker"),
    "shared layers": lambda seed: shared_layers(seed, seed.layer(3000)),
}


@contextmanager
def registries(*apps: App, context: ssl.SSLContext | None = None) -> Iterator[list[Server]]:
    """Serve some registries; what no correct client sends fails the test."""
    with ExitStack() as stack:
        servers = [stack.enter_context(run_in_thread(app, ssl_context=context)) for app in apps]
        yield servers
        for server in servers:
            server.journal.check()


def place(server: Server, repository: str, reference: str = "v1") -> str:
    return f"docker://{server.address}/{repository}{'@' if ':' in reference else ':'}{reference}"


@pytest.mark.parametrize("shape", [*SINGLE, *LISTS])
def test_copies_between_two_harnesses_are_the_same_bytes(shape: str, tmp_path: Path) -> None:
    image = {**SINGLE, **LISTS}[shape](Seed(3))
    one = App()
    other = App()
    image.load_into(one, "a/b", tag="v1")
    with registries(one, other) as (source, target):
        skopeo("copy", "--all", *PLAIN, place(source, "a/b"), place(target, "c/d"), home=tmp_path)
        assert identical(fetch_http(target.address, "c/d", "v1"), image.contents())
        uploads = target.journal.matching("PUT", "upload", status=201)
        assert len({entry.query["digest"] for entry in uploads}) == len(image.blobs)


@pytest.mark.parametrize("format", ["oci", "docker"])
def test_one_platform_of_an_index_is_copied_alone(format: Any, tmp_path: Path) -> None:
    index = Seed(4).index(format=format, platforms=("linux/amd64", "linux/arm64", "linux/s390x"))
    one = App()
    other = App()
    index.load_into(one, "a/b", tag="v1")
    with registries(one, other) as (source, target):
        skopeo(
            "--override-arch=arm64",
            "copy",
            *PLAIN,
            place(source, "a/b"),
            place(target, "a/b"),
            home=tmp_path,
        )
    child = index.document["manifests"][1]
    assert child["platform"]["architecture"] == "arm64"
    assert other.tags("a/b") == {"v1": child["digest"]}
    assert list(other.repositories["a/b"].manifests) == [child["digest"]]


@pytest.mark.parametrize("shape", ["oci image", "oci index"])
def test_a_layout_on_disk_is_pushed_and_pulled(shape: str, tmp_path: Path) -> None:
    image = {**SINGLE, **LISTS}[shape](Seed(5))
    one = App()
    other = App()
    image.load_into(one, "a/b", tag="v1")
    with registries(one, other) as (source, target):
        layout = f"oci:{tmp_path / 'layout'}:v1"
        skopeo("copy", "--all", PLAIN[0], place(source, "a/b"), layout, home=tmp_path)
        skopeo("copy", "--all", PLAIN[1], layout, place(target, "a/b"), home=tmp_path)
        assert identical(fetch_http(target.address, "a/b", "v1"), image.contents())


@pytest.mark.parametrize("shape", ["oci image", "docker list"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"locations": "relative"}, id="relative locations"),
        pytest.param({"mounts": False}, id="no mounts"),
        pytest.param({"automatic_mounts": True}, id="mounts from anywhere"),
        pytest.param({"single_post": False}, id="no single post"),
        pytest.param({"referrers_api": False}, id="no referrers API"),
        pytest.param({"deletes": False}, id="no deletion"),
    ],
)
def test_copies_to_every_kind_of_registry(
    options: Mapping[str, Any], shape: str, tmp_path: Path
) -> None:
    image = {**SINGLE, **LISTS}[shape](Seed(6))
    one = App()
    other = App(**options)
    image.load_into(one, "a/b", tag="v1")
    with registries(one, other) as (source, target):
        skopeo("copy", "--all", *PLAIN, place(source, "a/b"), place(target, "a/b"), home=tmp_path)
        skopeo("copy", "--all", *PLAIN, place(target, "a/b"), place(target, "c/d"), home=tmp_path)
        assert identical(fetch_http(target.address, "c/d", "v1"), image.contents())


AUTHS: Mapping[str, Callable[[], Any]] = {
    "basic": lambda: BasicAuth({USER: PASSWORD}),
    "bearer": lambda: TokenService({USER: PASSWORD}, anonymous=False),
    "web tokens": lambda: TokenService(
        {USER: PASSWORD}, anonymous=False, jwt=True, field="access_token"
    ),
}


@pytest.mark.parametrize("auth", AUTHS)
def test_copies_with_passwords_over_tls(auth: str, ca: trustme.CA, tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    (tmp_path / "certs").mkdir()
    ca.cert_pem.write_to_path(tmp_path / "certs" / "ca.crt")
    trusted = (f"--src-cert-dir={tmp_path / 'certs'}", f"--dest-cert-dir={tmp_path / 'certs'}")
    image = Seed(7).index()
    one = App(auth=AUTHS[auth]())
    other = App(auth=AUTHS[auth]())
    image.load_into(one, "a/b", tag="v1")
    with registries(one, other, context=context) as (source, target):
        places = (place(source, "a/b"), place(target, "c/d"))
        skopeo("copy", "--all", *trusted, *CREDENTIALS, *places, home=tmp_path)
        with pytest.raises(AssertionError, match="certificate"):
            skopeo("copy", "--all", *CREDENTIALS, *places, home=tmp_path)
        with pytest.raises(AssertionError, match=r"unauthorized|authentication required|incorrect"):
            skopeo("copy", "--all", *trusted, *places, home=tmp_path)
        assert source.journal.hellos == target.journal.hellos == 0
    copied = other.manifest("c/d", "v1")
    assert copied is not None
    assert copied.digest == image.top
    assert other.repositories["c/d"].manifests.keys() == image.manifests.keys()


def test_tags_are_listed_page_by_page_and_deleted(tmp_path: Path) -> None:
    app = App(page_size=10)
    tags = [f"v{number:02}" for number in range(35)]
    seed = Seed(8)
    for tag in tags:
        seed.image(sizes=(50,)).load_into(app, "a/b", tag=tag)
    with registries(app) as (server,):
        where = f"docker://{server.address}/a/b"
        listed = json.loads(skopeo("list-tags", "--tls-verify=false", where, home=tmp_path))
        assert listed["Tags"] == tags
        assert server.journal.count("GET", "tag_list") == 4
        skopeo("delete", "--tls-verify=false", f"{where}:v07", home=tmp_path)
    assert sorted(app.tags("a/b")) == [tag for tag in tags if tag != "v07"]


def test_a_repository_is_synced_with_all_its_tags(tmp_path: Path) -> None:
    one = App()
    other = App()
    seed = Seed(9)
    images = [
        seed.index().load_into(one, "a/b", tag="v1"),
        seed.image().load_into(one, "a/b", tag="v2"),
    ]
    with registries(one, other) as (source, target):
        arguments = ("sync", "--all", *PLAIN, "--src=docker", "--dest=docker")
        skopeo(*arguments, f"{source.address}/a/b", f"{target.address}/c", home=tmp_path)
    assert other.tags("c/b") == {"v1": images[0].top, "v2": images[1].top}


def test_a_copy_by_digest_and_a_look(tmp_path: Path) -> None:
    one = App()
    other = App()
    image = Seed(10).image().load_into(one, "a/b", tag="v1")
    with registries(one, other) as (source, target):
        skopeo("copy", *PLAIN, place(source, "a/b", image.top), place(target, "a/b"), home=tmp_path)
        raw = skopeo("inspect", "--raw", "--tls-verify=false", place(target, "a/b"), home=tmp_path)
        seen = json.loads(
            skopeo("inspect", "--tls-verify=false", place(target, "a/b"), home=tmp_path)
        )
    assert raw == image.body
    assert seen["Digest"] == image.top
    assert seen["RepoTags"] == ["v1"]
