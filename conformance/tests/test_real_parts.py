"""The harness against parts that others wrote: Debian's docker-registry and skopeo.

Both have to be installed (`apt-get install docker-registry skopeo`); without them these tests fail,
since a fake that was never compared with the real thing proves nothing.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import shutil
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trustme

from conformance.audit.mistakes import audit, report
from conformance.client.copies import ACCEPT, fetch_http, identical, push_http
from conformance.content.images import Image, Seed
from conformance.messages import digest_of
from conformance.programs import HTPASSWD, PASSWORD, USER, MissingProgram, docker_registry, skopeo
from conformance.registry.app import App
from conformance.registry.tokens import BasicAuth, TokenService
from conformance.server.sockets import Server, run_in_thread

PLAIN = ("--src-tls-verify=false", "--dest-tls-verify=false")
NOWHERE = "sha256:" + "0" * 64
SECRET = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run one docker-registry for the module; each test uses a repository of its own."""
    with docker_registry(tmp_path_factory.mktemp("real")) as address:
        yield address


@pytest.fixture
def ours(request: pytest.FixtureRequest) -> Iterator[Server]:
    with run_in_thread(App()) as server:
        yield server
        # Not by what is not needed (skopeo pings, for one); Go's client undoes the coding that it
        # asks for.
        sites = {server.url: server.app}
        provoked = [
            name for marker in request.node.iter_markers("provokes") for name in marker.args
        ]
        findings = audit(
            sites, kinds=("protocol", "safety"), excused=["coding_accepted", *provoked]
        )
        assert not findings, report(findings)


@pytest.fixture
def repository(request: pytest.FixtureRequest) -> str:
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name.lower())
    return "t/" + "-".join(filter(None, name.split("-")))


SHAPES: Mapping[str, Callable[[Seed], Image]] = {
    "oci image": lambda seed: seed.image(spacing="odd"),
    "docker image": lambda seed: seed.image(format="docker", extra={"x-unknown": [1]}),
    "oci index": lambda seed: seed.index(attestations=True, spacing="indent"),
    "docker list": lambda seed: seed.index(format="docker"),
    "repeated layer": lambda seed: seed.image(layers=[seed.layer(5000)] * 3),
    "large layer": lambda seed: seed.image(sizes=(3 << 20, 10)),
}

pytestmark = pytest.mark.slow


@pytest.fixture(params=[pytest.param(shape, id=name) for name, shape in SHAPES.items()])
def image(request: pytest.FixtureRequest) -> Image:
    built = request.param(Seed(7))
    assert isinstance(built, Image)
    return built


def test_the_same_pushes_leave_the_same_bytes(
    real: str, ours: Server, image: Image, repository: str
) -> None:
    for address in (real, ours.address):
        push_http(image, address, repository, "v1")
        assert identical(fetch_http(address, repository, "v1"), image.contents())


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "repeated layer"])
def test_skopeo_copies_between_the_two_both_ways(
    real: str, ours: Server, shape: str, repository: str, tmp_path: Path
) -> None:
    """Without repeated layers: skopeo pushes them at once, and 2.8.2 then answers some HEADs with
    500.
    """
    image = SHAPES[shape](Seed(7))
    push_http(image, real, repository, "v1")
    there = f"docker://{real}/{repository}"
    here = f"docker://{ours.address}/{repository}"
    skopeo("copy", "--all", *PLAIN, f"{there}:v1", f"{here}:v1", home=tmp_path)
    assert identical(fetch_http(ours.address, repository, "v1"), image.contents())
    skopeo("copy", "--all", *PLAIN, f"{here}:v1", f"{there}-back:v1", home=tmp_path)
    assert identical(fetch_http(real, f"{repository}-back", "v1"), image.contents())
    for place in (here, f"{there}-back"):
        assert (
            skopeo("inspect", "--raw", "--tls-verify=false", f"{place}:v1", home=tmp_path)
            == image.body
        )


def test_skopeo_copies_within_the_harness_and_mounts(
    ours: Server, repository: str, tmp_path: Path
) -> None:
    image = push_http(Seed(1).image(), ours.address, repository, "v1")
    ours.journal.clear()
    source = f"docker://{ours.address}/{repository}"
    skopeo("copy", *PLAIN, f"{source}:v1", f"{source}-copy:v1", home=tmp_path)
    assert identical(fetch_http(ours.address, f"{repository}-copy", "v1"), image.contents())
    skopeo("copy", *PLAIN, f"{source}:v1", f"{source}:v2", home=tmp_path)
    listed = json.loads(skopeo("list-tags", "--tls-verify=false", source, home=tmp_path))
    assert listed["Tags"] == ["v1", "v2"]


def test_skopeo_logs_in_by_bearer_and_by_basic(repository: str, tmp_path: Path) -> None:
    image = Seed(1).image()
    for auth in (TokenService({USER: PASSWORD}, anonymous=False), BasicAuth({USER: PASSWORD})):
        app = App(auth=auth)
        image.load_into(app, repository, tag="v1")
        with run_in_thread(app) as server:
            source = f"docker://{server.address}/{repository}"
            known = (f"--src-creds={USER}:{PASSWORD}", f"--dest-creds={USER}:{PASSWORD}")
            skopeo("copy", *PLAIN, *known, f"{source}:v1", f"{source}/copy:v1", home=tmp_path)
            with pytest.raises(AssertionError, match=r"unauthorized|authentication required"):
                skopeo("inspect", "--no-creds", "--tls-verify=false", f"{source}:v1", home=tmp_path)
            server.journal.check()
        copied = app.manifest(f"{repository}/copy", "v1")
        assert copied is not None
        assert copied.digest == image.top


def test_the_real_registry_asks_for_its_password(tmp_path: Path) -> None:
    image = Seed(1).image()
    with docker_registry(tmp_path, htpasswd=HTPASSWD) as address:
        with pytest.raises(AssertionError, match="401"):
            push_http(image, address, "a/b", "v1")
        push_http(image, address, "a/b", "v1", authorization=SECRET)
        got = fetch_http(address, "a/b", "v1", authorization=SECRET)
    assert identical(got, image.contents())


def test_the_real_registry_speaks_tls(tmp_path: Path, ca: trustme.CA) -> None:
    leaf = ca.issue_cert("127.0.0.1")
    leaf.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    leaf.private_key_pem.write_to_path(tmp_path / "key.pem")
    trusting = ssl.create_default_context()
    ca.configure_trust(trusting)
    files = (tmp_path / "cert.pem", tmp_path / "key.pem")
    with docker_registry(tmp_path / "data", tls=files) as address:
        image = push_http(Seed(1).image(), address, "a/b", "v1", context=trusting)
        assert identical(fetch_http(address, "a/b", "v1", context=trusting), image.contents())


def test_a_missing_program_is_an_error_that_names_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with (
        pytest.raises(MissingProgram, match="apt-get install docker-registry"),
        docker_registry(tmp_path),
    ):
        pass
    with pytest.raises(MissingProgram, match="apt-get install skopeo"):
        skopeo("--version", home=tmp_path)


def test_a_registry_that_cannot_start_says_why(tmp_path: Path) -> None:
    files = (tmp_path / "no-cert", tmp_path / "no-key")
    with pytest.raises(RuntimeError, match="no-cert"), docker_registry(tmp_path, tls=files):
        pass


# The same requests to both. A conversation returns what a client can act on; the two have to be
# equal.


@dataclass
class Talk:
    """One client at one registry, which writes down every answer."""

    address: str
    repository: str
    answers: list[tuple[Any, ...]] = field(default_factory=list)

    # What a client acts on; dates, ids and the spelling of JSON's type are each registry's own.
    SAME = ("content-range", "docker-content-digest", "range", "content-length")

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> str:
        """Send one request on its own connection; note the answer; return the Location's path."""
        target = path if path.startswith("/v2/") else f"/v2/{self.repository}/{path}"
        connection = http.client.HTTPConnection(self.address, timeout=30)
        with contextlib.closing(connection):
            connection.request(
                method, target, body, {k.replace("_", "-"): v for k, v in headers.items()}
            )
            answer = connection.getresponse()
            try:
                data = answer.read()
            except http.client.IncompleteRead as short:
                data = (
                    short.partial
                )  # 2.8.2's 416 has the blob's length (docs/protocol-facts.md section 1.12)
        said: list[Any] = []
        if (
            data
            and answer.status != 416
            and answer.headers["Content-Type"].startswith("application/json")
        ):
            document = json.loads(data)  # 2.8.2 lists tags in the order of its directory
            said = [entry["code"] for entry in document.get("errors", [])] or sorted(
                document["tags"]
            )
        elif answer.status < 400:
            said = [(name, answer.headers[name]) for name in self.SAME if name in answer.headers]
        shown = path.partition("?")[0] if "uploads/" in path else path
        self.answers.append((method, shown[:30], answer.status, said))
        where = urlsplit(answer.headers.get("Location", ""))
        return f"{where.path}?{where.query}" if where.query else where.path


def manifests(talk: Talk) -> None:
    seed = Seed(11)
    for number, image in enumerate((seed.image(), seed.image(format="docker"), seed.index())):
        push_http(image, talk.address, talk.repository, f"v{number}")
        for method in ("GET", "HEAD"):
            for reference in (f"v{number}", image.top):
                talk.ask(method, f"manifests/{reference}", Accept=ACCEPT)
        if number != 1:
            talk.ask("GET", f"manifests/v{number}")
            talk.ask("GET", f"manifests/v{number}", Accept="*/*")
            talk.ask("GET", f"manifests/{image.top}", Accept="application/json")
    talk.ask("GET", "manifests/nope", Accept=ACCEPT)
    talk.ask("HEAD", f"manifests/{NOWHERE}", Accept=ACCEPT)
    talk.ask("GET", "/v2/no/such/manifests/v1", Accept=ACCEPT)
    talk.ask("GET", "tags/list")
    talk.ask("GET", "/v2/no/such/tags/list")


def manifest_refusals(talk: Talk) -> None:
    seed = Seed(12)
    image = seed.image(layers=[one := seed.layer(10), one])
    index = seed.index()
    kind = {"Content_Type": image.media_type}
    talk.ask("PUT", "manifests/v1", image.body, **kind)
    talk.ask("PUT", "manifests/v1", index.body, Content_Type=index.media_type)
    push_http(image, talk.address, talk.repository, "v1")
    talk.ask("PUT", "manifests/v1", b"{", **kind)
    talk.ask("PUT", "manifests/v1", image.body)
    talk.ask("PUT", "manifests/v1", image.body, Content_Type="application/json")
    talk.ask("PUT", "manifests/v1", image.body, Content_Type=index.media_type)
    talk.ask("PUT", f"manifests/{NOWHERE}", image.body, **kind)
    talk.ask("PUT", f"manifests/{image.top}", image.body, **kind)
    talk.ask("PUT", "manifests/v2", image.body, **kind, If_Match=f'"{NOWHERE}"')
    talk.ask("PUT", "manifests/v2", image.body, **kind, If_None_Match="*")
    talk.ask("GET", "tags/list")


def blobs(talk: Talk) -> None:
    data = Seed(13).blob(1000)
    digest = digest_of(data)
    talk.ask("GET", f"blobs/{digest}")
    where = talk.ask("POST", "blobs/uploads/", b"")
    talk.ask("PUT", f"{where}&digest={digest}", data, Content_Type="application/octet-stream")
    for span in ("bytes=0-9", "bytes=10-", "bytes=-5", "bytes=5-5000", "bytes=999-", "bytes=1000-"):
        talk.ask("GET", f"blobs/{digest}", Range=span)
    talk.ask("GET", f"blobs/{digest}")
    talk.ask("HEAD", f"blobs/{digest}")
    talk.ask("HEAD", f"blobs/{NOWHERE}")
    talk.ask("GET", "blobs/sha256:12")
    talk.ask("GET", "tags/list")  # blobs alone make no repository


def uploads(talk: Talk) -> None:
    data = Seed(14).blob(1000)
    digest = digest_of(data)
    kind = {"Content_Type": "application/octet-stream"}
    for wrong in (f"&digest={NOWHERE}", "", "&digest=foo"):
        talk.ask("PUT", talk.ask("POST", "blobs/uploads/", b"") + wrong, data, **kind)
    where = talk.ask("GET", talk.ask("POST", "blobs/uploads/", b""))
    where = talk.ask("PATCH", where, data[:400], Content_Range="0-399", **kind)
    where = talk.ask("PATCH", talk.ask("GET", where), data[400:600], **kind)
    talk.ask("PUT", f"{where}&digest={digest}", data[600:], **kind)
    talk.ask("PUT", f"{where}&digest={digest}", b"", **kind)
    where = talk.ask("POST", "blobs/uploads/", b"")
    talk.ask("DELETE", where)
    talk.ask("GET", where)
    where = talk.ask("PATCH", talk.ask("POST", "blobs/uploads/", b""), data[:1], **kind)
    talk.ask("GET", where)
    talk.ask("GET", f"blobs/{digest}")
    empty = digest_of(b"")
    talk.ask("PUT", talk.ask("POST", "blobs/uploads/", b"") + f"&digest={empty}", b"", **kind)
    talk.ask("GET", f"blobs/{empty}")


def mounts(talk: Talk) -> None:
    data = Seed(15).blob(100)
    digest = digest_of(data)
    start = f"/v2/{talk.repository}/other/blobs/uploads/?mount="
    where = talk.ask("POST", "blobs/uploads/", b"")
    talk.ask("PUT", f"{where}&digest={digest}", data)
    talk.ask("POST", f"{start}{digest}", b"")
    talk.ask("POST", f"{start}{NOWHERE}&from={talk.repository}", b"")
    talk.ask("POST", f"{start}{digest}&from=no/such", b"")
    talk.ask("GET", f"/v2/{talk.repository}/other/blobs/{digest}")
    talk.ask("POST", f"{start}{digest}&from={talk.repository}", b"")
    talk.ask("GET", f"/v2/{talk.repository}/other/blobs/{digest}")
    talk.ask("POST", f"blobs/uploads/?mount={digest}&from={talk.repository}", b"")
    talk.ask("POST", f"blobs/uploads/?mount={NOWHERE}&from={talk.repository}", b"")


def deletions(talk: Talk) -> None:
    image = push_http(Seed(16).image(), talk.address, talk.repository, "v1", "v2")
    blob = next(iter(image.blobs))
    for path in (f"manifests/{image.top}", f"blobs/{blob}"):
        talk.ask("DELETE", path)
        talk.ask("DELETE", path)
        talk.ask("GET", path, Accept=ACCEPT)
    talk.ask("GET", "manifests/v1", Accept=ACCEPT)


@pytest.mark.parametrize(
    "conversation", [manifests, manifest_refusals, blobs, uploads, mounts, deletions]
)
def test_both_answer_alike(
    real: str, ours: Server, repository: str, conversation: Callable[[Talk], None]
) -> None:
    there = Talk(real, repository)
    here = Talk(ours.address, repository)
    conversation(there)
    conversation(here)
    assert len(here.answers) >= 7
    ours.journal.clear()  # some of these are meant to be wrong
    assert here.answers == there.answers


# Where 2.8.2 is known to differ from a registry of OCI 1.1: the harness is the stricter one. These
# hold the facts that the harness must not be "corrected" to.


@pytest.mark.parametrize(
    ("method", "path", "body", "old", "new"),
    [
        pytest.param("POST", "blobs/uploads/?digest={digest}", b"data", 202, 201, id="single post"),
        pytest.param("GET", "referrers/{digest}", None, 404, 200, id="referrers"),
        pytest.param(
            "PUT", "manifests/v1", b" " * (5 << 20), 400, 413, id="manifest above the limit"
        ),
    ],
)
def test_the_old_registry_differs(
    real: str,
    ours: Server,
    repository: str,
    method: str,
    path: str,
    body: bytes | None,
    old: int,
    new: int,
) -> None:
    for address, status in ((real, old), (ours.address, new)):
        talk = Talk(address, repository)
        kind = (
            {"Content_Type": "application/vnd.oci.image.manifest.v1+json"}
            if method == "PUT"
            else {}
        )
        talk.ask(method, path.format(digest=digest_of(b"data")), body, **kind)
        assert talk.answers[0][2] == status
    ours.journal.clear()  # no client should send so much


@pytest.mark.provokes("chunk_order")
def test_the_old_registry_takes_chunks_out_of_order(
    real: str, ours: Server, repository: str
) -> None:
    """2.8.2 does not look at Content-Range; 3.0 and the harness answer 416."""
    for address, status in ((real, 202), (ours.address, 416)):
        talk = Talk(address, repository)
        where = talk.ask("POST", "blobs/uploads/", b"")
        where = talk.ask(
            "PATCH", where, b"data", Content_Range="0-3", Content_Type="application/octet-stream"
        )
        talk.ask(
            "PATCH", where, b"data", Content_Range="0-3", Content_Type="application/octet-stream"
        )
        assert talk.answers[-1][2] == status


def test_both_take_sha512_uploads_but_the_old_one_answers_with_sha256(
    real: str, ours: Server, repository: str
) -> None:
    data = Seed(18).blob(100)
    longer = digest_of(data, "sha512")
    for address, answered in ((real, digest_of(data)), (ours.address, longer)):
        talk = Talk(address, repository)
        talk.ask("PUT", talk.ask("POST", "blobs/uploads/", b"") + f"&digest={longer}", data)
        talk.ask("GET", f"blobs/{answered}")
        assert [answer[2] for answer in talk.answers] == [202, 201, 200]
        assert ("docker-content-digest", answered) in talk.answers[1][3]


def test_the_old_registry_fails_on_layers_with_urls_that_are_missing(
    real: str, ours: Server, repository: str
) -> None:
    """500 on 2.8.2; the harness accepts them as the specification asks."""
    image = Seed(17).image(foreign=["https://elsewhere.test/layer"])
    push_http(image, ours.address, repository, "v1")
    with pytest.raises(AssertionError, match="500"):
        push_http(image, real, repository, "v1")
