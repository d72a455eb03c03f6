"""skopeo, which others wrote, as a client of the harness: to, from and within its registries.

It has to be installed (`apt-get install skopeo`). What it cannot do with the harness, the harness
gets wrong: each test ends with `journal.check()`, so that no refusal of a correct client goes
unseen. test_shapes_elsewhere.py has it copy every kind of content, test_personas.py to every provider.
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

from conformance.http import Server, run_in_thread
from conformance.images import Seed
from conformance.programs import PASSWORD, USER, skopeo
from conformance.registry import App
from conformance.tokens import BasicAuth, TokenService
from conformance.walks import fetch_http, identical

pytestmark = pytest.mark.slow

PLAIN = ("--src-tls-verify=false", "--dest-tls-verify=false")
CREDENTIALS = (f"--src-creds={USER}:{PASSWORD}", f"--dest-creds={USER}:{PASSWORD}")


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


@pytest.mark.parametrize("format", ["oci", "docker"])
def test_copies_to_the_real_registry_and_back_are_the_same_bytes(
    format: Any, docker_registry: str, tmp_path: Path
) -> None:
    app = App()
    image = Seed(3).index(format=format, spacing="odd").load_into(app, "a/b", tag="v1")
    with registries(app) as (ours,):
        there = f"docker://{docker_registry}/a/b:v1"
        skopeo("copy", "--all", *PLAIN, place(ours, "a/b"), there, home=tmp_path)
        skopeo("copy", "--all", *PLAIN, there, place(ours, "c/d"), home=tmp_path)
        assert identical(fetch_http(ours.address, "c/d", "v1"), image.contents())
        assert identical(fetch_http(docker_registry, "a/b", "v1"), image.contents())


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


@pytest.mark.parametrize(
    "options", [pytest.param({"mounts": False}, id="no mounts"), pytest.param({}, id="mounts")]
)
def test_copies_to_every_kind_of_registry_and_within_it(
    options: Mapping[str, Any], tmp_path: Path
) -> None:
    image = Seed(6).index(format="docker")
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


def test_tags_are_listed_page_by_page(tmp_path: Path) -> None:
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


def test_a_copy_by_digest_and_a_look(tmp_path: Path) -> None:
    one = App()
    other = App()
    image = Seed(10).image().load_into(one, "a/b", tag="v1")
    with registries(one, other) as (source, target):
        there = place(target, "a/b")
        skopeo("copy", *PLAIN, place(source, "a/b", image.top), there, home=tmp_path)
        seen = json.loads(skopeo("inspect", "--tls-verify=false", there, home=tmp_path))
    assert (seen["Digest"], seen["RepoTags"]) == (image.top, ["v1"])
