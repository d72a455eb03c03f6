"""The providers that the harness imitates: each compared with what it imitates, then driven by real
clients.

`distribution` is asked what Debian's docker-registry is asked, request by request. The others rest
on docs/protocol-facts.md: a test names what a client meets there. skopeo goes through them.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from conformance.images import Image, Seed
from conformance.messages import Response
from conformance.names import Names, names
from conformance.personas import LAG, PERSONAS, Persona, Provider, Running, imitate, persona
from conformance.programs import skopeo
from conformance.rates import Cap
from conformance.registry import App
from conformance.walks import ACCEPT

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = "sha256:" + "0" * 64
TAKE = ("Accept", ACCEPT)
PLAIN = ("--src-tls-verify=false", "--dest-tls-verify=false")


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def basic(user: str, password: str) -> str:
    """Return what Basic puts into the Authorization header."""
    return base64.b64encode(f"{user}:{password}".encode()).decode()


def held(at: Running, repository: str, image: Image) -> bool:
    """Whether everything that an image names is in a repository, byte for byte."""
    app = at.app
    assert isinstance(app, App)
    for digest, body in image.contents().items():
        manifest = app.manifest(repository, digest)
        if (manifest.body if manifest else app.blob(repository, digest)) != body:
            return False
    return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def seed() -> Seed:
    return Seed(31)


# ECR


def test_ecr_leaves_everything_as_it_was_when_it_refuses_what_it_sees_late(
    seed: Seed, clock: Clock
) -> None:
    app = imitate("ecr", now=clock)
    app.notes[LAG] = 5.0
    old = seed.image(sizes=(1,))
    old.load_into(app, "app", tag="v1")
    image = seed.image(sizes=(2,))

    def put(reference: str) -> Response:
        headers = [("Content-Type", image.media_type)]
        return app.request("PUT", f"/v2/app/manifests/{reference}", headers, image.body)

    def upload(digest: str, data: bytes) -> None:
        session = app.request("POST", "/v2/app/blobs/uploads/").header("Location")
        target = f"{urlsplit(session).path}?{urlsplit(session).query}&digest={digest}"
        headers = [("Content-Type", "application/octet-stream")]
        assert app.request("PUT", target, headers, data).status == 201

    for digest, data in image.blobs.items():
        upload(digest, data)
    refused = put("v1")
    assert (refused.status, refused.codes) == (400, ["MANIFEST_BLOB_UNKNOWN"])
    assert app.tags("app") == {"v1": old.top}
    assert app.manifest("app", image.top) is None

    clock.now += 5.0
    assert put("v1").status == 201
    assert app.tags("app") == {"v1": image.top}

    upload(*next(iter(image.blobs.items())))
    assert put("v2").status == 400
    assert app.tags("app") == {"v1": image.top}
    assert app.manifest("app", image.top) is not None, "it was there before"


# distribution


def test_distribution_lists_all_tags_whatever_is_asked(seed: Seed) -> None:
    """2.8.2 knows no pages of tags: who stops after `n` misses some (docs/protocol-facts.md section
    1.11).
    """
    app = imitate("distribution")
    for tag in ("a", "b", "c"):
        seed.image(sizes=(1,)).load_into(app, "app", tag=tag)
    listed = app.request("GET", "/v2/app/tags/list?n=1&last=b")
    assert (sorted(listed.json()["tags"]), listed.header("Link")) == (["a", "b", "c"], "")


# The frame.


def test_every_row_names_its_source_and_a_host_for_each_part() -> None:
    assert {"strict", "distribution", "distribution3", "old", "dockerhub", "redirecting"} <= set(
        PERSONAS
    )
    for name, row in PERSONAS.items():
        assert row.source.startswith("docs/protocol-facts.md section"), name
        assert set(imitate(name).sites) == set(row.hosts), name
    hosts = [host for row in PERSONAS.values() for host in row.hosts.values()]
    assert len(hosts) == len(set(hosts))


def test_a_row_may_mount_only_what_a_manifest_names(seed: Seed) -> None:
    """docs/protocol-facts.md section 4.9."""
    row = Persona(source="section 4.9", hosts={"registry": "ecr.test"}, mount="committed")
    app = Provider(row)
    loose = app.add_blob("a", b"loose")
    image = seed.image().load_into(app, "a", tag="v1")
    named = next(iter(image.blobs))
    assert app.request("POST", f"/v2/b/blobs/uploads/?mount={loose}&from=a").status == 202
    assert app.blob("b", loose) is None
    assert app.request("POST", f"/v2/b/blobs/uploads/?mount={named}&from=a").status == 201
    asked = app.journal.entries[0]
    assert asked.query == {"mount": loose, "from": "a"}, "the journal has what the client sent"
    app.journal.check()


def test_a_row_changes_requests_and_answers_by_functions(seed: Seed) -> None:
    row = Persona(
        source="section 9",
        hosts={"registry": "made-up.test"},
        before=(lambda app, request: Response(418) if request.kind == "ping" else None,),
        after=(lambda app, request, answer: Response(answer.status, [("X-Kind", request.kind)]),),
    )
    app = Provider(row)
    answers = [app.request("GET", "/v2/"), app.request("PUT", "/v2/a/manifests/v1", body=b"{}")]
    assert [answer.header("X-Kind") for answer in answers] == ["ping", "manifest"]
    assert answers[0].status == 418


def test_who_may_not_is_refused_before_who_asks_too_much(clock: Clock) -> None:
    row = Persona(
        source="section 2.5",
        hosts={"registry": "made-up.test"},
        tokens={"anonymous": False},
        caps=lambda provider: (Cap(1),),
    )
    app = Provider(row, users={"user": "password"}, now=clock)
    for _ in range(3):
        assert app.request("GET", "/v2/a/tags/list").status == 401, "and counts for nothing"
    given = app.request(
        "GET",
        "/token?service=registry.test&scope=repository:a:pull",
        [("Authorization", f"Basic {basic('user', 'password')}")],
    )
    login = [("Authorization", f"Bearer {given.json()['token']}")]
    assert [app.request("GET", "/v2/a/tags/list", login).status for _ in range(2)] == [404, 429]


# old


def test_old_has_pages_of_100_tags_and_refuses_larger_ones(seed: Seed) -> None:
    app = imitate("old")
    image = seed.image(sizes=(1,)).load_into(app, "app")
    for number in range(250):
        app.add_manifest("app", image.body, image.media_type, f"v{number:03}")
    page = app.request("GET", "/v2/app/tags/list")
    assert (len(page.json()["tags"]), page.header("Link")) == (
        100,
        '</v2/app/tags/list?last=v099&n=100>; rel="next"',
    )
    refused = app.request("GET", "/v2/app/tags/list?n=1000")
    assert (refused.status, refused.codes) == (400, ["PAGINATION_NUMBER_INVALID"])


def test_old_mounts_nothing_and_has_no_referrers(seed: Seed) -> None:
    app = imitate("old")
    image = seed.image().load_into(app, "a", tag="v1")
    blob = next(iter(image.blobs))
    assert app.request("POST", f"/v2/b/blobs/uploads/?mount={blob}&from=a").status == 202
    assert app.request("GET", f"/v2/a/referrers/{image.top}").status == 404
    artifact = seed.artifact(image).load_into(app, "a")
    put = app.request(
        "PUT",
        f"/v2/a/manifests/{artifact.top}",
        [("Content-Type", artifact.media_type)],
        artifact.body,
    )
    assert (put.status, put.header("OCI-Subject")) == (201, "")


# dockerhub


def hub_token(hub: Provider, repository: str, user: str | None = None) -> list[tuple[str, str]]:
    """Log in as a client does; return the header."""
    assert hub.tokens is not None
    known = [("Authorization", f"Basic {basic(user, 'password')}")] if user else []
    scope = f"repository:{repository}:pull{',push' if user else ''}"
    given = hub.tokens.request("GET", f"/token?service=registry.docker.io&scope={scope}", known)
    assert (given.status, given.json()["expires_in"]) == (200, 300)
    return [("Authorization", f"Bearer {given.json()['token']}"), TAKE]


def test_hub_sends_clients_to_its_token_service() -> None:
    """docs/protocol-facts.md section 7.2."""
    refused = imitate("dockerhub").request("GET", "/v2/library/alpine/manifests/latest")
    assert refused.status == 401
    assert refused.header("WWW-Authenticate") == (
        'Bearer realm="https://auth.docker.io/token",service="registry.docker.io",'
        'scope="repository:library/alpine:pull"'
    )


def test_hub_counts_manifests_that_are_got_and_nothing_else(seed: Seed, clock: Clock) -> None:
    hub = imitate("dockerhub", now=clock)
    image = seed.image().load_into(hub, "library/alpine", tag="latest")
    login = hub_token(hub, "library/alpine")
    path = "/v2/library/alpine/manifests/latest"

    def left(method: str) -> str:
        answer = hub.request(method, path, login)
        assert (answer.status, answer.header("ratelimit-limit")) == (200, "100;w=21600")
        assert answer.header("docker-ratelimit-source") == "192.0.2.1"
        return answer.header("ratelimit-remaining")

    assert [left("HEAD"), left("HEAD"), left("GET"), left("GET")] == [
        f"{n};w=21600" for n in (100, 100, 99, 98)
    ]
    blob = f"/v2/library/alpine/blobs/{next(iter(image.blobs))}"
    assert hub.request("GET", blob, login).header("ratelimit-limit") == ""
    assert [hub.request("GET", path, login).status for _ in range(98)] == [200] * 98
    refused = hub.request("GET", path, login)
    assert (refused.status, refused.codes, refused.header("Retry-After")) == (
        429,
        ["TOOMANYREQUESTS"],
        "",
    )
    assert left("HEAD") == "0;w=21600", "asking what is there stays free"
    clock.now += 299
    assert hub.request("GET", path, login).status == 429
    clock.now += 21600
    assert hub.request("GET", path, login).status == 401, "tokens live 300 s"
    login = hub_token(hub, "library/alpine")
    assert left("GET") == "99;w=21600"


def test_hub_gives_accounts_200_of_their_own(seed: Seed, clock: Clock) -> None:
    hub = imitate("dockerhub", now=clock, users={"one": "password", "two": "password"})
    seed.image().load_into(hub, "library/alpine", tag="latest")
    path = "/v2/library/alpine/manifests/latest"
    first = [hub.request("GET", path, hub_token(hub, "library/alpine", "one")) for _ in range(2)][
        -1
    ]
    other = hub.request("GET", path, hub_token(hub, "library/alpine", "two"))
    found = [answer.header("ratelimit-remaining") for answer in (first, other)]
    assert found == ["198;w=21600", "199;w=21600"]
    assert first.header("docker-ratelimit-source") != other.header("docker-ratelimit-source")


def test_hub_does_not_know_a_name_without_its_library(seed: Seed) -> None:
    hub = imitate("dockerhub")
    seed.image().load_into(hub, "alpine", tag="latest")
    refused = hub.request("GET", "/v2/alpine/manifests/latest", hub_token(hub, "alpine"))
    assert refused.status == 401
    assert 'error="insufficient_scope"' in refused.header("WWW-Authenticate")


# redirecting


def fetched(address: str, path: str, **headers: str) -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection(address, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers.get("Location", ""), answer.read()


def test_redirecting_signs_for_a_while_and_for_one_blob(seed: Seed, clock: Clock) -> None:
    app = imitate("redirecting", wall=clock)
    data = seed.blob(100)
    digest = app.add_blob("team/app", data)
    storage = app.sites["storage"]
    sent = app.request("GET", f"/v2/team/app/blobs/{digest}")
    assert (sent.status, sent.data) == (307, b"")
    place = sent.header("Location")
    assert place.startswith("https://storage.test/team/app/")
    path = place.removeprefix("https://storage.test")
    got = storage.request("GET", path)
    assert (got.status, got.data, got.header("Docker-Content-Digest")) == (200, data, "")
    part = storage.request("GET", path, [("Range", "bytes=90-")])
    assert (part.status, part.data, part.header("Content-Range")) == (
        206,
        data[90:],
        "bytes 90-99/100",
    )
    clock.now += 300
    assert storage.request("GET", path).status == 200
    clock.now += 2
    late = storage.request("GET", path)
    assert (late.status, b"Request has expired" in late.data) == (403, True)
    other = app.add_blob("team/app", b"other")
    forged = storage.request(
        "GET", path.replace(digest.replace(":", "%3A"), other.replace(":", "%3A"))
    )
    assert (forged.status, b"SignatureDoesNotMatch" in forged.data) == (403, True)
    assert storage.request("HEAD", path).status == 403, "signed for another method"
    assert app.request("HEAD", f"/v2/team/app/blobs/{digest}").status == 200
    assert app.request("GET", f"/v2/team/app/blobs/{NOWHERE}").status == 404
    storage.journal.check()


def test_redirecting_refuses_a_credential_at_its_storage_and_notes_it(seed: Seed) -> None:
    app = imitate("redirecting")
    digest = app.add_blob("app", seed.blob(100))
    place = app.request("GET", f"/v2/app/blobs/{digest}").header("Location")
    storage = app.sites["storage"]
    path = place.removeprefix("https://storage.test")
    refused = storage.request("GET", path, [("Authorization", "Bearer secret")])
    assert (refused.status, b"Only one auth mechanism" in refused.data) == (400, True)
    with pytest.raises(AssertionError, match="authorization was sent to the storage"):
        storage.journal.check()
    assert "secret" not in "".join(storage.journal.violations)


# Other clients.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["strict", "distribution", "distribution3", "old", "redirecting"])
def test_skopeo_copies_into_out_of_and_within(name: str, seed: Seed, tmp_path: Path) -> None:
    image = seed.index(platforms=("linux/amd64", "linux/arm64/v8"))
    with persona("strict") as plain, persona(name) as other:
        image.load_into(plain.app, "team/app", tag="v1")
        place = f"docker://{plain.address}/team"
        at = f"docker://{other.address}/team"
        skopeo("copy", "--all", *PLAIN, f"{place}/app:v1", f"{at}/app:v1", home=tmp_path)
        assert held(other, "team/app", image)
        skopeo("copy", "--all", *PLAIN, f"{at}/app:v1", f"{at}/copy:v1", home=tmp_path)
        assert held(other, "team/copy", image)
        skopeo("copy", "--all", *PLAIN, f"{at}/copy:v1", f"{place}/back:v1", home=tmp_path)
        assert held(plain, "team/back", image)
        listed = json.loads(skopeo("list-tags", "--tls-verify=false", f"{at}/app", home=tmp_path))
        assert listed["Tags"] == ["v1"]
        if name == "redirecting":
            assert other.servers["storage"].journal.count("GET", status=200) > 0
        other.check()
        plain.check()


def test_what_a_client_is_to_trust_is_found_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with names("known") as known:
        monkeypatch.chdir("/")
        assert Path(known.environ["SSL_CERT_FILE"]).is_file()


@pytest.fixture
def known_names(tmp_path: Path) -> Iterator[Names]:
    with names(tmp_path) as found:
        yield found


@pytest.mark.slow
def test_skopeo_copies_out_of_hub_by_name(known_names: Names, seed: Seed, tmp_path: Path) -> None:
    """Through the forward proxy, over TLS by the throw-away authority, with the token service
    elsewhere.
    """
    with persona("dockerhub", names=known_names) as hub:
        image = seed.image().load_into(hub.app, "library/alpine", tag="3")
        out = tmp_path / "out"
        command = ["skopeo", "--insecure-policy", "copy", "docker://alpine:3", f"dir:{out}"]
        home = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path), "PATH": os.environ["PATH"]}
        ran = subprocess.run(
            command,
            env={**home, **known_names.environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        assert (out / "manifest.json").read_bytes() == image.body
        assert set(known_names.tunnels) == {"registry-1.docker.io:443", "auth.docker.io:443"}
        assert known_names.refused == []
        hub.check()


@pytest.mark.parametrize("name", sorted(PERSONAS))
def test_a_persona_is_served_at_a_port(name: str) -> None:
    with persona(name) as served:
        assert fetched(served.address, "/v2/")[0] in (200, 401)
        assert {server.host for server in served.servers.values()} == {"127.0.0.1"}
        port = served.servers["registry"].port
    with persona(name, port=port) as again:
        assert again.servers["registry"].port == port


def test_names_lead_nowhere_but_where_they_are_known(known_names: Names) -> None:
    proxy = urlsplit(known_names.proxy)
    with persona("strict", names=known_names):
        for target in ("elsewhere.test:443", "strict.test:80", "strict.test"):
            connection = http.client.HTTPConnection(proxy.netloc, timeout=10)
            with contextlib.closing(connection):
                connection.request("CONNECT", target)
                assert connection.getresponse().status == 403
        connection = http.client.HTTPConnection(proxy.netloc, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", "http://strict.test/v2/")
            assert connection.getresponse().status == 405
    assert known_names.refused == [
        "CONNECT elsewhere.test:443",
        "CONNECT strict.test:80",
        "CONNECT strict.test",
        "GET http://strict.test/v2/",
    ]
    assert known_names.tunnels == []


def test_certificates_are_good_for_the_names_and_no_others(known_names: Names) -> None:
    proxy = urlsplit(known_names.proxy)
    trusting = ssl.create_default_context(cafile=str(known_names.ca_file))
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT

    def status(name: str, context: ssl.SSLContext) -> int:
        assert proxy.hostname is not None
        connection = http.client.HTTPSConnection(
            proxy.hostname, proxy.port, context=context, timeout=10
        )
        with contextlib.closing(connection):
            connection.set_tunnel(name, 443)
            connection.request("GET", "/v2/")
            return connection.getresponse().status

    with persona("strict", names=known_names) as strict:
        assert strict.url == "https://strict.test"
        assert status("strict.test", trusting) == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            status("strict.test", ssl.create_default_context())
        port = strict.servers["registry"].port
        wrong = pytest.raises(ssl.SSLCertVerificationError, match=r"not valid for .other\.test.")
        with known_names.known("other.test", port), wrong:
            status("other.test", trusting)
