"""Debian's docker-registry, which others wrote, is asked what the harness is asked, request by request.

The provider `distribution` answers alike; the strict registry where the specification leaves no
choice. The program has to be installed (`apt-get install docker-registry`): without it these tests
fail, since a fake that was never compared with the real thing proves nothing.
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

from conformance.images import Image, Seed, encode
from conformance.messages import digest_of
from conformance.personas import persona
from conformance.programs import MissingProgram, docker_registry, skopeo
from conformance.tests.asking import NOWHERE
from conformance.walks import ACCEPT, push_http


class Answered(NamedTuple):
    """What a client can act on in an answer."""

    status: int
    codes: list[str]
    headers: list[str]  # their names
    said: list[str]  # values that have to be the same everywhere


# Dates, ids and the spelling of JSON's type are each registry's own.
SAME = ("content-range", "docker-content-digest", "range", "content-length")


class Talk:
    """One client at one registry; every answer is noted under a label."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.answers: dict[str, Answered] = {}

    def ask(
        self, label: str, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> str:
        """Send one request on its own connection; return the Location's path."""
        target = path if path.startswith("/") else f"/v2/team/app/{path}"
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection(self.address, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, target, body, sent)
            answer = connection.getresponse()
            try:
                data = answer.read()
            except http.client.IncompleteRead as short:
                # 2.8.2's 416 has the blob's length (docs/protocol-facts.md section 1.12).
                data = short.partial
        document = {}
        if answer.headers.get("Content-Type", "").startswith("application/json"):
            with contextlib.suppress(ValueError):
                document = json.loads(data)
        codes = [entry["code"] for entry in document.get("errors", [])]
        said = sorted(document.get("tags", []))  # 2.8.2 has them in the order of its directory
        if answer.status < 400 and not document:
            said += [answer.headers[name] for name in SAME if name in answer.headers]
        names = sorted({name.lower() for name in answer.headers} - {"date", "connection"})
        assert label not in self.answers, label
        self.answers[label] = Answered(answer.status, codes, names, said)
        where = urlsplit(answer.headers.get("Location", ""))
        return f"{where.path}?{where.query}" if where.query else where.path

    def start(self, label: str) -> str:
        return self.ask(f"start: {label}", "POST", "blobs/uploads/", b"")

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


OCTETS = {"Content_Type": "application/octet-stream"}


def talk_paths(talk: Talk) -> None:
    ask = talk.ask
    ask("ping", "GET", "/v2/")
    ask("ping by HEAD", "HEAD", "/v2/")
    ask("ping without its slash", "GET", "/v2")
    ask("unknown path", "GET", "/v2/team/app/what/ever")
    ask("bad repository", "GET", "/v2/NO/such/manifests/v1", Accept=ACCEPT)


def talk_blobs(talk: Talk, data: bytes) -> None:
    ask = talk.ask
    digest = digest_of(data)
    for method in ("GET", "HEAD"):
        ask(f"{method} unknown blob", method, f"blobs/{NOWHERE}")
    ask("short digest", "GET", "blobs/sha256:12")
    where = talk.start("whole")
    ask("whole PUT", "PUT", f"{where}&digest={digest}", data, **OCTETS)
    where = talk.start("with a status")
    ask("status of a fresh session", "GET", where)
    ask("whole PUT at the Location of before", "PUT", f"{where}&digest={digest}", data, **OCTETS)
    for method in ("GET", "HEAD"):
        ask(f"{method} blob", method, f"blobs/{digest}")
    for span in ("0-9", "10-", "1000-", "5-2", "0-1,4-5"):
        ask(f"bytes={span}", "GET", f"blobs/{digest}", Range=f"bytes={span}")
    ask("range of a HEAD", "HEAD", f"blobs/{digest}", Range="bytes=0-9")
    ask("blob that is known", "GET", f"blobs/{digest}", If_None_Match=f'"{digest}"')
    ask("tags of blobs only", "GET", "tags/list")


def talk_starts(talk: Talk, data: bytes, other: bytes) -> None:
    digest = digest_of(data)
    there = "/v2/team/b/blobs/uploads/?mount="
    ask = talk.ask
    ask("single POST", "POST", f"blobs/uploads/?digest={digest_of(other)}", other, **OCTETS)
    ask("POST with a body", "POST", "blobs/uploads/", b"abc", **OCTETS)
    ask("mount without from", "POST", f"{there}{digest}", b"")
    ask("mount of nothing", "POST", f"{there}{NOWHERE}&from=team/app", b"")
    ask("mount", "POST", f"{there}{digest}&from=team/app", b"")


def talk_uploads(talk: Talk, data: bytes, other: bytes) -> None:
    ask = talk.ask
    digest = digest_of(data)
    where = ask("PATCH", "PATCH", talk.start("chunks"), other[:300], **OCTETS)
    where = ask("status between", "GET", where)
    where = ask(
        "PATCH with its range", "PATCH", where, other[300:500], Content_Range="300-499", **OCTETS
    )
    ask("PUT of the rest", "PUT", f"{where}&digest={digest_of(other)}", other[500:], **OCTETS)
    old = talk.start("out of order")
    ask("PATCH out of order", "PATCH", old, other[:300], Content_Range="100-399", **OCTETS)
    ask("PATCH at an old Location", "PATCH", old, other[:300], **OCTETS)
    for label, headers in {
        "range with a unit": {"Content_Range": "bytes 0-299/600", **OCTETS},
        "no type": {},
    }.items():
        ask(f"PATCH, {label}", "PATCH", talk.start(label), other[:300], **headers)
    where = talk.start("wrong digest")
    ask("PUT, wrong digest", "PUT", f"{where}&digest={NOWHERE}", data, **OCTETS)
    ask("status after a wrong digest", "GET", where)
    ask("PUT, bad digest", "PUT", talk.start("bad digest") + "&digest=foo", data, **OCTETS)
    where = talk.start("cancel")
    ask("cancel", "DELETE", where)
    ask("status of a cancelled session", "GET", where)
    where = talk.start("broken")
    talk.break_off(where)
    ask("status after a broken body", "GET", where)
    empty = digest_of(b"")
    ask("PUT of nothing", "PUT", talk.start("nothing") + f"&digest={empty}", b"")
    ask("GET of nothing", "GET", f"blobs/{empty}")
    longer = digest_of(data, "sha512")
    ask("PUT by sha512", "PUT", talk.start("sha512") + f"&digest={longer}", data, **OCTETS)
    ask("GET by sha512", "GET", f"blobs/{longer}")


def talk_manifests(talk: Talk, seed: Seed) -> Image:
    ask = talk.ask
    image = seed.image(sizes=(100, 200))
    index = seed.index()
    docker = seed.image(format="docker")
    listed = seed.index(format="docker")
    kind = {"Content_Type": image.media_type}
    ask("image without its blobs", "PUT", "manifests/v0", image.body, **kind)
    ask(
        "index without its children",
        "PUT",
        "manifests/v0",
        index.body,
        Content_Type=index.media_type,
    )
    for tag, each in {"pushed": image, "index": index, "docker": docker, "list": listed}.items():
        push_http(each, talk.address, "team/app", tag)
    ask("PUT by tag", "PUT", "manifests/v1", image.body, **kind)
    ask("PUT by a wrong digest", "PUT", f"manifests/{NOWHERE}", image.body, **kind)
    longer = digest_of(image.body, "sha512")
    ask("manifest by sha512", "PUT", f"manifests/{longer}", image.body, **kind)
    ask("PUT of junk", "PUT", "manifests/v1", b"{", **kind)
    ask("PUT without a type", "PUT", "manifests/v1", image.body)
    ask("PUT as another type", "PUT", "manifests/v1", image.body, Content_Type=index.media_type)
    ask("PUT of 5 MiB", "PUT", "manifests/v1", b" " * (5 << 20), **kind)
    for name in ("v1", "index", "docker", "list"):
        for method in ("GET", "HEAD"):
            ask(f"{method} {name}", method, f"manifests/{name}", Accept=ACCEPT)
        if name != "docker":  # 2.8.2 makes schema 1 of it for those who name no type
            ask(f"GET {name} without Accept", "GET", f"manifests/{name}")
            ask(f"GET {name}, */*", "GET", f"manifests/{name}", Accept="*/*")
    ask("GET by digest", "GET", f"manifests/{image.top}", Accept=ACCEPT)
    for known in (f'"{image.top}"', image.top):
        ask(f"GET, known as {known[:2]}", "GET", "manifests/v1", Accept=ACCEPT, If_None_Match=known)
    ask("unknown tag", "GET", "manifests/nope", Accept=ACCEPT)
    ask("referrers", "GET", f"referrers/{image.top}")
    artifact = push_http(seed.artifact(image), talk.address, "team/app")
    ask(
        "artifact",
        "PUT",
        f"manifests/{artifact.top}",
        artifact.body,
        Content_Type=artifact.media_type,
    )
    talk_foreign_layers(talk, seed)
    return docker


def talk_foreign_layers(talk: Talk, seed: Seed) -> None:
    """Layers that are to be fetched elsewhere, by type or by `urls`, here or not."""
    base = seed.image(sizes=(100, 200))
    data = seed.blob(77)
    for number, (digest, blob) in enumerate({**base.blobs, digest_of(data): data}.items()):
        where = talk.start(f"foreign {number}") + f"&digest={digest}"
        talk.ask(f"foreign {number}", "PUT", where, blob, **OCTETS)
    gone = seed.blob(78)
    media_type = "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"
    there = {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}
    away = {"mediaType": media_type, "digest": digest_of(gone), "size": len(gone)}
    urls = {"urls": ["https://elsewhere.test/layer"]}
    config = base.document["config"]
    first, second = base.document["layers"]
    for label, layers in {
        "here": [first, there],
        "here with urls": [first, {**there, **urls}],
        "missing": [first, away],
        "missing with urls": [first, {**away, **urls}],
        "an ordinary one with urls": [{**first, **urls}, second],
    }.items():
        body = encode(
            {"schemaVersion": 2, "mediaType": base.media_type, "config": config, "layers": layers}
        )
        talk.ask(
            f"foreign layer, {label}", "PUT", "manifests/f", body, Content_Type=base.media_type
        )


def talk_lists(talk: Talk) -> None:
    ask = talk.ask
    ask("tags", "GET", "tags/list")
    ask("tags of an unknown repository", "GET", "/v2/no/such/tags/list")
    for query in ("n=2", "n=0", "n=x"):
        ask(f"tags?{query}", "GET", f"tags/list?{query}")


def conversation(talk: Talk) -> None:
    seed = Seed(31)
    data = seed.blob(1000)
    other = seed.blob(600)
    talk_paths(talk)
    talk_blobs(talk, data)
    talk_starts(talk, data, other)
    talk_uploads(talk, data, other)
    talk_manifests(talk, seed)
    talk_lists(talk)


# What the strict registry answers otherwise: it refuses more, and is newer than 2.8.2. These hold
# the facts that it must not be "corrected" to.
STRICT = {
    "ping without its slash": (404, "UNSUPPORTED"),
    "unknown path": (404, "UNSUPPORTED"),
    "bad repository": (400, "NAME_INVALID"),
    "whole PUT at the Location of before": (416, "BLOB_UPLOAD_INVALID"),
    "bytes=1000-": (416, "UNSUPPORTED"),
    "bytes=5-2": (416, "UNSUPPORTED"),
    "bytes=0-1,4-5": (200,),
    "range of a HEAD": (200,),
    "blob that is known": (200,),
    "single POST": (201,),
    "POST with a body": (400, "SIZE_INVALID"),
    "PATCH out of order": (416, "BLOB_UPLOAD_INVALID"),
    "PATCH at an old Location": (416, "BLOB_UPLOAD_INVALID"),
    "PATCH, range with a unit": (400, "BLOB_UPLOAD_INVALID"),
    "status after a wrong digest": (404, "BLOB_UPLOAD_UNKNOWN"),
    "status after a broken body": (204,),
    "PUT by sha512": (201,),  # answers with the digest that was asked for
    "GET by sha512": (200,),
    "manifest by sha512": (201,),
    "PUT of 5 MiB": (413, "MANIFEST_INVALID"),
    "GET list without Accept": (200,),
    "GET list, */*": (200,),
    'GET, known as "s': (304,),  # names the digest
    "GET, known as sh": (304,),
    "referrers": (200,),
    "foreign layer, here with urls": (201,),
    "foreign layer, missing": (201,),
    "foreign layer, missing with urls": (201,),
    "foreign layer, an ordinary one with urls": (201,),
    "tags?n=2": (200,),  # pages
    "tags?n=0": (200,),
    "tags?n=x": (400, "UNSUPPORTED"),
}


# Of these, what `distribution` answers as the real one, because a correct client may ask it; and what
# it answers in its own way.
ALIKE = {
    "unknown path",
    "single POST",
    "PUT by sha512",
    "manifest by sha512",
    "referrers",
    "foreign layer, here with urls",
    "foreign layer, missing",
    "foreign layer, missing with urls",
    "foreign layer, an ordinary one with urls",
    "tags?n=2",
    "tags?n=0",
    "tags?n=x",
}
DISTRIBUTION = {
    **{label: told for label, told in STRICT.items() if label not in ALIKE},
    "ping without its slash": (404,),
    "status after a broken body": (404, "BLOB_UPLOAD_UNKNOWN"),
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answered]:
    """Return what the real registry answers."""
    with docker_registry(tmp_path_factory.mktemp("real")) as address:
        talk = Talk(address)
        conversation(talk)
    assert len(talk.answers) > 95
    return talk.answers


def answers(name: str) -> dict[str, Answered]:
    with persona(name) as ours:
        talk = Talk(ours.address)
        conversation(talk)
    return talk.answers


def differing(
    ours: dict[str, Answered], real: dict[str, Answered]
) -> dict[str, tuple[int | str, ...]]:
    assert list(ours) == list(real)
    return {
        label: (each.status, *each.codes) for label, each in ours.items() if each != real[label]
    }


def bare(every: dict[str, Answered]) -> dict[str, Answered]:
    """Leave the names of headers out: 2.8.2 sends more."""
    return {label: each._replace(headers=[]) for label, each in every.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "expected"), [("distribution", DISTRIBUTION), ("strict", STRICT)])
def test_a_persona_differs_from_the_real_one_where_it_is_stricter_or_newer(
    name: str, expected: dict[str, tuple[int | str, ...]], real: dict[str, Answered]
) -> None:
    assert differing(bare(answers(name)), bare(real)) == expected


def test_a_missing_program_is_an_error_that_names_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    missing = pytest.raises(MissingProgram, match="apt-get install docker-registry")
    with missing, docker_registry(tmp_path):
        pass
    with pytest.raises(MissingProgram, match="apt-get install skopeo"):
        skopeo("--version", home=tmp_path)


def test_a_registry_that_cannot_start_says_why(tmp_path: Path) -> None:
    files = (tmp_path / "no-cert", tmp_path / "no-key")
    with pytest.raises(RuntimeError, match="no-cert"), docker_registry(tmp_path, tls=files):
        pass
