"""Debian's docker-registry, which others wrote, is asked what the harness is asked, request by request.

All requests are such as a correct client may send. The provider `distribution` answers alike, and the
strict registry but for a few that are in a table. The program has to be installed (`apt-get install
docker-registry`): a fake that was never compared with the real thing proves nothing.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from conformance.images import TYPES, Image, Seed
from conformance.messages import digest_of
from conformance.personas import persona
from conformance.programs import MissingProgram, docker_registry, skopeo
from conformance.tests.asking import NOWHERE, edited
from conformance.walks import ACCEPT, push_http


class Answered(NamedTuple):
    """What a client can act on in an answer."""

    status: int
    codes: list[str]
    said: list[str]  # values that have to be the same everywhere


SAME = ("content-range", "docker-content-digest", "range", "content-length")
OCTETS = {"content-type": "application/octet-stream"}


class Talk:
    """One client at one registry; every answer is noted under a label."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.answers: dict[str, Answered] = {}

    def ask(
        self,
        label: str,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> str:
        """Send one request on its own connection; return the Location's path."""
        target = path if path.startswith("/") else f"/v2/team/app/{path}"
        connection = http.client.HTTPConnection(self.address, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, target, body, headers or {})
            answer = connection.getresponse()
            data = answer.read()
        document = {}
        if answer.headers.get("Content-Type", "").startswith("application/json") and data:
            document = json.loads(data)
        codes = [entry["code"] for entry in document.get("errors", [])]
        said = sorted(document.get("tags", []))  # 2.8.2 has them in the order of its directory
        if answer.status < 400 and not document:
            said += [answer.headers[name] for name in SAME if name in answer.headers]
        assert label not in self.answers, label
        self.answers[label] = Answered(answer.status, codes, said)
        where = urlsplit(answer.headers.get("Location", ""))
        return f"{where.path}?{where.query}" if where.query else where.path

    def start(self, label: str) -> str:
        return self.ask(f"start: {label}", "POST", "blobs/uploads/", b"")

    def end(self, label: str, data: bytes, digest: str, where: str = "") -> None:
        where = where or self.start(label)
        self.ask(label, "PUT", f"{where}&digest={digest}", data, OCTETS)

    def put(self, label: str, image: Image, reference: str) -> None:
        kind = {"content-type": image.media_type}
        self.ask(label, "PUT", f"manifests/{reference}", image.body, kind)

    def break_off(self, where: str) -> None:
        """Announce 1,000 bytes, send 400 and leave."""
        host, _, port = self.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as connected:
            head = f"PATCH {where} HTTP/1.1\r\nHost: {self.address}\r\nContent-Length: 1000\r\n\r\n"
            connected.sendall(head.encode() + bytes(400))
            connected.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while connected.recv(65536):
                    pass


def talk_blobs(talk: Talk, data: bytes, other: bytes) -> None:
    digest = digest_of(data)
    talk.ask("ping", "GET", "/v2/")
    talk.end("whole", data, digest)
    talk.end("nothing", b"", digest_of(b""))
    talk.end("wrong digest", data, NOWHERE)
    talk.end("by sha512", data, digest_of(data, "sha512"))
    longer = digest_of(data, "sha512")
    names = {"whole": digest, "unknown": NOWHERE, "empty": digest_of(b""), "sha512": longer}
    for name, each in names.items():
        for method in ("GET", "HEAD"):
            talk.ask(f"{method} {name}", method, f"blobs/{each}")
    for span in ("0-9", "10-", "-5", "5-5000"):
        talk.ask(f"bytes={span}", "GET", f"blobs/{digest}", headers={"range": f"bytes={span}"})
    talk.ask("tags of blobs only", "GET", "tags/list")

    where = talk.ask("PATCH", "PATCH", talk.start("chunks"), other[:300], OCTETS)
    where = talk.ask("status between", "GET", where)
    span = {"content-range": "300-499", **OCTETS}
    where = talk.ask("PATCH with its range", "PATCH", where, other[300:500], span)
    talk.end("the rest", other[500:], digest_of(other), where)
    where = talk.start("cancel")
    talk.ask("cancel", "DELETE", where)
    talk.ask("status of a cancelled session", "GET", where)
    where = talk.start("broken")
    talk.break_off(where)
    talk.ask("status after a broken body", "GET", where)

    single = f"blobs/uploads/?digest={digest_of(b'single')}"
    talk.ask("single POST", "POST", single, b"single", OCTETS)
    there = "/v2/team/b/blobs/uploads/?mount="
    talk.ask("mount", "POST", f"{there}{digest}&from=team/app", b"")
    talk.ask("mount without from", "POST", f"{there}{digest}", b"")
    talk.ask("mount of nothing", "POST", f"{there}{NOWHERE}&from=team/app", b"")
    talk.ask("mount from nowhere", "POST", f"{there}{digest}&from=no/such", b"")


def talk_manifests(talk: Talk, seed: Seed) -> None:
    accept = {"accept": ACCEPT}
    image = seed.image()
    tagged = {
        "image": image,
        "index": seed.index(),
        "docker": seed.image(format="docker"),
        "list": seed.index(format="docker"),
    }
    for name, each in tagged.items():
        talk.put(f"{name} without its parts", each, "v0")
        push_http(each, talk.address, "team/app", name)
        talk.put(f"PUT {name}", each, name)
        for method in ("GET", "HEAD"):
            talk.ask(f"{method} {name}", method, f"manifests/{name}", headers=accept)
    talk.put("by a wrong digest", image, NOWHERE)
    talk.put("manifest by sha512", image, digest_of(image.body, "sha512"))
    talk.ask("GET by digest", "GET", f"manifests/{image.top}", headers=accept)
    known = {"if-none-match": f'"{image.top}"', **accept}
    talk.ask("GET, known", "GET", "manifests/image", headers=known)
    for path in ("manifests/nope", f"manifests/{NOWHERE}", "/v2/no/such/manifests/v1"):
        talk.ask(f"unknown {path}", "GET", path, headers=accept)
    artifact = push_http(seed.artifact(image), talk.address, "team/app")
    talk.put("artifact", artifact, artifact.top)
    talk.ask("referrers", "GET", f"referrers/{image.top}")
    for path in ("tags/list", "/v2/no/such/tags/list", "tags/list?n=2", "tags/list?n=99"):
        talk.ask(path, "GET", path)


def talk_foreign_layers(talk: Talk, seed: Seed) -> None:
    """Layers that are to be fetched elsewhere, by type or by `urls`, here or not."""
    image = push_http(seed.image(), talk.address, "foreign", "v1")
    first, second = image.document["layers"]
    there = {**second, "mediaType": TYPES["oci"]["foreign"]}
    away = {**there, "digest": NOWHERE}
    urls = {"urls": ["https://elsewhere.test/layer"]}
    for label, layers in {
        "here": [first, there],
        "here with urls": [first, {**there, **urls}],
        "missing": [first, away],
        "missing with urls": [first, {**away, **urls}],
        "an ordinary one with urls": [{**first, **urls}],
    }.items():
        kind = {"content-type": image.media_type}
        body = edited(image, layers=layers)
        talk.ask(f"foreign: {label}", "PUT", "/v2/foreign/manifests/f", body, kind)


def conversation(address: str) -> dict[str, Answered]:
    talk = Talk(address)
    seed = Seed(31)
    talk_blobs(talk, seed.blob(1000), seed.blob(600))
    talk_manifests(talk, seed)
    talk_foreign_layers(talk, seed)
    return talk.answers


# What the strict registry answers otherwise, because it is newer than 2.8.2. These hold the facts
# that it must not be "corrected" to.
STRICT: dict[str, tuple[int | str, ...]] = {
    "by sha512": (201,),  # answers with the digest that was asked for
    "GET sha512": (200,),
    "HEAD sha512": (200,),
    "manifest by sha512": (201,),
    "status after a broken body": (204,),
    "single POST": (201,),
    "GET, known": (304,),  # names the digest
    "referrers": (200,),
    "tags/list?n=2": (200,),  # pages
    "foreign: here with urls": (201,),
    "foreign: missing": (201,),
    "foreign: missing with urls": (201,),
    "foreign: an ordinary one with urls": (201,),
}
DISTRIBUTION: dict[str, tuple[int | str, ...]] = {
    "GET sha512": (200,),
    "HEAD sha512": (200,),
    "status after a broken body": (404, "BLOB_UPLOAD_UNKNOWN"),
    "GET, known": (304,),
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answered]:
    """Return what the real registry answers."""
    with docker_registry(tmp_path_factory.mktemp("real")) as address:
        return conversation(address)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "expected"), [("distribution", DISTRIBUTION), ("strict", STRICT)])
def test_a_persona_differs_from_the_real_one_where_it_is_newer(
    name: str, expected: dict[str, tuple[int | str, ...]], real: dict[str, Answered]
) -> None:
    with persona(name) as served:
        ours = conversation(served.address)
        served.check()
    assert list(ours) == list(real)
    differing = {
        label: (each.status, *each.codes) for label, each in ours.items() if each != real[label]
    }
    assert differing == expected


def test_a_missing_program_is_an_error_that_names_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    missing = pytest.raises(MissingProgram, match="apt-get install docker-registry")
    with missing, docker_registry(tmp_path):
        pass
    with pytest.raises(MissingProgram, match="apt-get install skopeo"):
        skopeo("--version", home=tmp_path)
