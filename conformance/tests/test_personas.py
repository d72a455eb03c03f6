"""The providers that the harness imitates: their caps, their parts, and how each differs.

They rest on docs/protocol-facts.md: a test names what a client meets there. What `distribution`
answers is compared with Debian's docker-registry in test_docker_registry.py; skopeo goes through
some of them in test_skopeo.py.
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.images import Seed
from conformance.messages import Request, digest_of
from conformance.names import Names, names
from conformance.personas import LAG, LATE, PERSONAS, Persona, Provider, imitate, persona
from conformance.rates import WRITES, Cap, Rates, actions_of
from conformance.tests.asking import (
    OCTETS,
    TAKE,
    Clock,
    basic,
    bearer,
    begin,
    location,
    put_manifest,
    refused,
)
from conformance.walks import has_api

DIGEST = digest_of(b"")
START = "/v2/a/b/blobs/uploads/"
SESSION = f"{START}00000000?_state=1"
BODY = [("Content-Length", "5")]
NONE = [("Content-Length", "0")]


# Caps.


@pytest.mark.parametrize(
    ("method", "path", "headers", "actions"),
    [
        ("GET", "/v2/", (), ""),
        ("GET", "/v2/app/tags/list?n=5", (), "tag_list"),
        ("HEAD", "/v2/app/manifests/v1", (), "manifest_head"),
        ("GET", f"/v2/app/referrers/{DIGEST}", (), "manifest_get"),
        ("PUT", "/v2/app/manifests/v1", BODY, "manifest_put"),
        ("GET", f"/v2/app/blobs/{DIGEST}", (), "blob_get"),
        ("POST", f"{START}?mount={DIGEST}&from=b", NONE, "upload_start"),
        ("POST", f"{START}?digest={DIGEST}", BODY, "upload_start upload_body upload_finish"),
        ("PATCH", SESSION, BODY, "upload_body"),
        ("PUT", f"{SESSION}&digest={DIGEST}", NONE, "upload_finish"),
        ("PUT", f"{SESSION}&digest={DIGEST}", BODY, "upload_body upload_finish"),
        ("DELETE", SESSION, (), ""),
    ],
)
def test_each_request_counts_as_what_it_does(
    method: str, path: str, headers: Any, actions: str
) -> None:
    assert list(actions_of(Request(method, path, headers))) == actions.split()


def asked(repository: str = "app") -> Request:
    return Request("HEAD", f"/v2/{repository}/manifests/v1")


@given(
    st.lists(st.floats(0, 0.7), max_size=60), st.integers(1, 6), st.sampled_from([0.5, 1.0, 3.0])
)
def test_never_more_than_the_cap_and_never_fewer_than_fit(
    gaps: list[float], most: int, seconds: float
) -> None:
    clock = Clock()
    rates = Rates(Cap(most, seconds), now=clock)
    admitted: list[float] = []
    for gap in gaps:
        clock.now += gap
        within = [at for at in admitted if at > clock.now - seconds]
        assert (rates.refuse(asked()) is None) == (len(within) < most)
        if len(within) < most:
            admitted.append(clock.now)


def test_who_is_refused_hears_when_the_longest_full_cap_has_room(clock: Clock) -> None:
    def told(*caps: Cap, has_retry_after: bool = True) -> str:
        rates = Rates(*caps, now=clock, has_retry_after=has_retry_after)
        while (answer := rates.refuse(asked())) is None:
            clock.now += 0.5
        assert (answer.status, answer.codes) == (429, ["TOOMANYREQUESTS"])
        assert rates.refused == {"manifest_head": 1}
        return answer.header("Retry-After")

    assert told(Cap(1, 10.0)) == "10"
    assert told(Cap(1, 10.0), has_retry_after=False) == ""
    assert told(Cap(1, 0.7), Cap(1, 60.0)) == "60"


def test_a_cap_counts_a_request_of_two_actions_once_and_may_have_a_count_for_each(
    clock: Clock,
) -> None:
    put = Request("PUT", f"{SESSION}&digest={DIGEST}", BODY)
    together = Rates(Cap(2, actions=WRITES), now=clock)
    assert [together.refuse(put) is None for _ in range(3)] == [True, True, False]
    assert together.refuse(asked()) is None, "reads are not writes"
    cap = Cap(1, per=lambda request: request.repository)
    apart = Rates(cap, now=clock)
    assert apart.remaining(cap, asked()) == 1
    assert [apart.refuse(asked(name)) is None for name in "aba"] == [True, True, False]
    assert apart.remaining(cap, asked("a")) == 0


# The frame.


def test_every_row_names_its_source_and_a_host_for_each_part() -> None:
    for name, row in PERSONAS.items():
        assert row.source.startswith("docs/protocol-facts.md section"), name
        assert set(imitate(name).sites) == set(row.hosts), name
    hosts = [host for row in PERSONAS.values() for host in row.hosts.values()]
    assert len(hosts) == len(set(hosts))


def test_who_may_not_is_refused_before_who_asks_too_much(clock: Clock) -> None:
    row = Persona(
        source="section 2.5",
        hosts={"registry": "made-up.test"},
        tokens={"anonymous": False},
        caps=lambda provider: (Cap(1),),
    )
    app = Provider(row, users={"user": "password"}, now=clock)
    assert [app.request("GET", "/v2/a/tags/list").status for _ in range(3)] == [401] * 3
    path = "/token?service=registry.test&scope=repository:a:pull"
    login = [bearer(app.request("GET", path, [basic("user", "password")]))]
    assert [app.request("GET", "/v2/a/tags/list", login).status for _ in range(2)] == [404, 429]


# Providers.

IMAGE = Seed(31).image()
LAYER = next(iter(IMAGE.blobs))
LOOSE = digest_of(b"loose")
UPLOAD = "an upload"  # stands for the Location of a new one
WHOLE = f"{UPLOAD}&digest={digest_of(b'data')}"
LARGE = f"{UPLOAD}&digest={digest_of(bytes(20_000_001))}"
CHUNKED = ("Transfer-Encoding", "chunked")


@pytest.mark.parametrize(
    ("name", "method", "target", "headers", "body", "strict", "status"),
    [
        ("old", "GET", "/v2/a/b/tags/list?n=1000", [], None, 200, 400),
        ("old", "POST", f"/v2/c/blobs/uploads/?mount={LAYER}&from=a/b", [], None, 201, 202),
        ("distribution", "POST", f"{START}?digest={LOOSE}", [], b"loose", 201, 202),
        ("distribution3", "PUT", WHOLE, [("Content-Range", "9-9")], b"data", 416, 201),
        ("redirecting", "GET", f"/v2/a/b/blobs/{LAYER}", [], None, 200, 307),
        ("ecr", "POST", "/v2/new/blobs/uploads/", [], None, 202, 404),
        ("ecr", "GET", f"/v2/a/b/blobs/{LOOSE}", [], None, 200, 404),
        ("ecr", "POST", f"/v2/c/blobs/uploads/?mount={LAYER}&from=a/b", [], None, 201, 202),
        ("ecr", "PATCH", UPLOAD, [OCTETS], b"data", 202, 201),
        (
            "ecr_mounting",
            "POST",
            f"/v2/c/blobs/uploads/?mount={LOOSE}&from=a/b",
            [],
            None,
            201,
            202,
        ),
        ("gar_open", "PATCH", UPLOAD, [OCTETS], b"data", 202, 405),
        ("gcr_open", "POST", f"{START}?mount={LAYER}", [], None, 202, 201),
        ("ghcr", "PATCH", UPLOAD, [("Content-Range", "0-5242879")], bytes(5 << 20), 202, 416),
        ("ghcr_405", "PUT", WHOLE, [OCTETS], b"data", 201, 405),
        ("ghcr_416", "PUT", WHOLE, [OCTETS], b"data", 201, 416),
        ("acr", "PUT", LARGE, [OCTETS], bytes(20_000_001), 201, 413),
        ("acr", "PATCH", UPLOAD, [OCTETS, CHUNKED], b"data", 202, 400),
    ],
)
def test_a_provider_differs_from_the_strict_registry(
    name: str,
    method: str,
    target: str,
    headers: list[tuple[str, str]],
    body: bytes | None,
    strict: int,
    status: int,
) -> None:
    for each, expected in (("strict", strict), (name, status)):
        app = imitate(each)
        IMAGE.load_into(app, "a/b", tag="v1")
        app.add_blob("a/b", b"loose")
        app.add_manifest("c", b"{}", "a/b")
        asked = target
        if UPLOAD in target:
            where = begin(app)
            asked = target.replace(UPLOAD, where)
            asked = asked if "?" in where else asked.replace("&", "?", 1)
        assert app.request(method, asked, headers, body).status == expected, each


def test_a_mount_that_is_taken_away_is_in_the_journal_as_it_was_sent() -> None:
    app = imitate("ecr_mounting")
    IMAGE.load_into(app, "c", tag="v1")
    app.add_manifest("a/b", b"{}", "a/b")
    assert app.request("POST", f"{START}?mount={LAYER}&from=c").status == 201
    assert app.request("POST", f"{START}?mount={LOOSE}&from=c").status == 202
    assert app.journal.entries[1].query == {"mount": LOOSE, "from": "c"}
    app.journal.check()


def test_distribution_lists_all_tags_whatever_is_asked(seed: Seed) -> None:
    app = imitate("distribution")
    seed.image().load_into(app, "app", "a", "b", "c")
    listed = app.request("GET", "/v2/app/tags/list?n=1&last=b")
    assert (sorted(listed.json()["tags"]), listed.header("Link")) == (["a", "b", "c"], "")


def hub_token(hub: Provider, repository: str, user: str | None = None) -> list[tuple[str, str]]:
    """Log in as a client does; return the headers."""
    assert hub.tokens is not None
    login = [basic(user, "password")] if user else []
    query = f"service=registry.docker.io&scope=repository:{repository}:pull"
    return [bearer(hub.tokens.request("GET", f"/token?{query}", login)), TAKE]


ALPINE = "/v2/library/alpine/manifests/latest"


def test_hub_has_its_tokens_elsewhere_and_names_of_two_parts() -> None:
    hub = imitate("dockerhub")
    assert hub.request("GET", ALPINE).header("WWW-Authenticate") == (
        'Bearer realm="https://auth.docker.io/token",service="registry.docker.io",'
        'scope="repository:library/alpine:pull"'
    )
    answer = hub.request("GET", "/v2/alpine/manifests/latest", hub_token(hub, "alpine"))
    assert 'error="insufficient_scope"' in answer.header("WWW-Authenticate")


def test_hub_counts_manifests_that_are_got_and_nothing_else(seed: Seed, clock: Clock) -> None:
    hub = imitate("dockerhub", now=clock)
    seed.image().load_into(hub, "library/alpine", tag="latest")
    login = hub_token(hub, "library/alpine")

    def left(method: str) -> str:
        answer = hub.request(method, ALPINE, login)
        assert (answer.status, answer.header("ratelimit-limit")) == (200, "100;w=21600")
        return answer.header("ratelimit-remaining")

    assert [left(method) for method in ("HEAD", "GET", "GET")] == [
        f"{number};w=21600" for number in (100, 99, 98)
    ]
    assert [hub.request("GET", ALPINE, login).status for _ in range(98)] == [200] * 98
    answer = refused(hub.request("GET", ALPINE, login), 429, "TOOMANYREQUESTS")
    assert answer.header("Retry-After") == ""
    assert left("HEAD") == "0;w=21600", "asking what is there stays free"
    clock.now += 21600
    assert hub.request("GET", ALPINE, login).status == 401, "tokens live 300 s"
    login = hub_token(hub, "library/alpine")
    assert left("GET") == "99;w=21600"


def test_hub_gives_accounts_200_of_their_own(seed: Seed, clock: Clock) -> None:
    hub = imitate("dockerhub", now=clock, users={"one": "password", "two": "password"})
    seed.image().load_into(hub, "library/alpine", tag="latest")
    logins = [hub_token(hub, "library/alpine", user) for user in ("one", "one", "two")]
    answers = [hub.request("GET", ALPINE, login) for login in logins]
    left = [answer.header("ratelimit-remaining") for answer in answers]
    assert left == ["199;w=21600", "198;w=21600", "199;w=21600"]
    sources = [answer.header("docker-ratelimit-source") for answer in answers]
    assert sources[0] == sources[1] != sources[2]


def test_ecr_sees_a_blob_late_and_words_what_is_immutable(seed: Seed, clock: Clock) -> None:
    app = imitate("ecr", now=clock, immutable_tags=True)
    app.notes[LAG] = 5.0
    app.add_manifest("a/b", b"{}", "a/b")
    image = seed.image()
    for digest, data in image.blobs.items():
        target = f"{begin(app)}&digest={digest}"
        assert app.request("PUT", target, [OCTETS], data).status == 201
    refused(put_manifest(app, image, "v1"), 400, "MANIFEST_BLOB_UNKNOWN")
    assert app.manifest("a/b", image.top) is None
    clock.now += 5.0
    assert put_manifest(app, image, "v1").status == 201
    answer = refused(put_manifest(app, image, "v1"), 400, "TAG_INVALID")
    assert "cannot be overwritten because" in answer.json()["errors"][0]["message"]


def test_google_has_long_locations_of_its_own() -> None:
    app = imitate("gar_open")
    where = begin(app)
    assert where.startswith("/artifacts-uploads/")
    assert len(where) > 1500
    answer = app.request("PUT", f"{where}?digest={digest_of(b'data')}", [OCTETS], b"data")
    assert answer.status == 201
    app.journal.check()
    app.request("PATCH", begin(app), [OCTETS], b"data")
    assert app.journal.violations


def test_github_keeps_the_last_chunk_alone() -> None:
    app = imitate("ghcr")
    where = begin(app)
    for chunk in (b"first", b"last"):
        where = location(app.request("PATCH", where, [OCTETS], chunk))
    assert app.request("PUT", f"{where}&digest={digest_of(b'last')}").status == 201


def test_redirecting_signs_for_a_while_and_for_one_blob(seed: Seed, clock: Clock) -> None:
    app = imitate("redirecting", wall=clock)
    data = seed.blob(100)
    digest = app.add_blob("team/app", data)
    other = app.add_blob("team/app", b"other")
    storage = app.sites["storage"]
    sent = app.request("GET", f"/v2/team/app/blobs/{digest}")
    assert (sent.status, sent.data) == (307, b"")
    assert sent.header("Location").startswith("https://storage.test/team/app/")
    assert app.request("HEAD", f"/v2/team/app/blobs/{digest}").status == 200
    path = location(sent)
    got = storage.request("GET", path, [("Range", "bytes=90-")])
    assert (got.status, got.data, got.header("Docker-Content-Digest")) == (206, data[90:], "")
    assert storage.request("HEAD", path).status == 403, "signed for another method"
    forged = path.replace(digest[7:], other[7:])
    assert b"SignatureDoesNotMatch" in storage.request("GET", forged).data
    for seconds, status in ((300, 200), (2, 403)):
        clock.now += seconds
        assert storage.request("GET", path).status == status
    storage.journal.check()

    leaking = storage.request("GET", path, [("Authorization", "Bearer secret")])
    assert (leaking.status, b"Only one auth mechanism" in leaking.data) == (400, True)
    with pytest.raises(AssertionError, match="authorization was sent to the storage"):
        storage.journal.check()
    assert "secret" not in "".join(storage.journal.violations)


# Referrers.


@pytest.mark.parametrize(
    ("name", "is_there", "is_announced", "status", "kind"),
    [
        ("strict", True, True, 200, "application/vnd.oci.image.index.v1+json"),
        ("referrers-in-pages", True, True, 200, "application/vnd.oci.image.index.v1+json"),
        ("referrers-unfiltered", True, True, 200, "application/vnd.oci.image.index.v1+json"),
        ("referrers-late", True, True, 200, "application/vnd.oci.image.index.v1+json"),
        ("unknown-referrers-announced", False, True, 404, "application/json"),
        ("unknown-404", False, False, 404, "application/json"),
        ("unknown-200-in-html", False, False, 200, "text/html; charset=utf-8"),
        ("distribution", False, False, 404, "text/plain; charset=utf-8"),
        ("old", False, False, 404, "application/json"),
        ("ghcr", False, False, 404, "application/json"),
    ],
)
def test_a_provider_has_the_referrers_api_or_lacks_it_in_its_way(
    name: str, is_there: bool, is_announced: bool, status: int, kind: str, seed: Seed
) -> None:
    app = imitate(name)
    image = seed.image().load_into(app, "a/b", tag="v1")
    artifact = seed.artifact(image).load_into(app, "a/b")
    assert has_api(app) == is_there
    announced = put_manifest(app, artifact, artifact.top).header("OCI-Subject")
    assert announced == (image.top if is_announced else "")
    answer = app.request("GET", f"/v2/a/b/referrers/{image.top}")
    assert (answer.status, answer.header("Content-Type")) == (status, kind)


@pytest.mark.parametrize(
    ("name", "count", "filtered"),
    [("strict", 3, 1), ("referrers-in-pages", 2, 1), ("referrers-unfiltered", 3, 3)],
)
def test_a_list_has_pages_and_may_not_be_filtered(
    name: str, count: int, filtered: int, seed: Seed
) -> None:
    app = imitate(name)
    image = seed.image().load_into(app, "a/b", tag="v1")
    for kind in ("a/b", "c/d", "a/b"):
        seed.artifact(image, kind).load_into(app, "a/b")
    for query, number in (("", count), ("?artifactType=c/d", filtered)):
        answer = app.request("GET", f"/v2/a/b/referrers/{image.top}{query}")
        assert len(answer.json()["manifests"]) == number


def test_a_referrer_is_listed_late(seed: Seed, clock: Clock) -> None:
    app = imitate("referrers-late", now=clock)
    image = seed.image().load_into(app, "a/b", tag="v1")
    seed.artifact(image).load_into(app, "a/b")  # long ago
    artifact = seed.artifact(image)
    for data in artifact.blobs.values():
        app.add_blob("a/b", data)
    assert put_manifest(app, artifact, artifact.top).status == 201
    for seconds, count in ((0, 1), (LATE - 1, 1), (1, 2)):
        clock.now += seconds
        answer = app.request("GET", f"/v2/a/b/referrers/{image.top}")
        assert len(answer.json()["manifests"]) == count


# Served at ports and by names.


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    monkeypatch.chdir(tmp_path)
    with names("known") as found:
        monkeypatch.chdir("/")
        yield found


@pytest.mark.parametrize("name", ["dockerhub", "redirecting", "acr-io"])
def test_a_persona_is_served_at_ports(name: str) -> None:
    with persona(name) as served:
        assert len(served.servers) == len(PERSONAS[name].hosts)
        connection = http.client.HTTPConnection(served.address, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", "/v2/")
            assert connection.getresponse().status in (200, 401)
        port = served.servers["registry"].port
    with persona(name, port=port) as again:
        assert again.servers["registry"].port == port


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("CONNECT", "elsewhere.test:443", 403),
        ("CONNECT", "strict.test:80", 403),
        ("GET", "http://strict.test/v2/", 405),
    ],
)
def test_names_lead_nowhere_but_where_they_are_known(
    known: Names, method: str, target: str, status: int
) -> None:
    with persona("strict", names=known):
        connection = http.client.HTTPConnection(urlsplit(known.proxy).netloc, timeout=10)
        with contextlib.closing(connection):
            connection.request(method, target)
            assert connection.getresponse().status == status
    assert (known.refused, known.tunnels) == ([f"{method} {target}"], [])


def test_certificates_are_good_for_the_names_and_no_others(known: Names) -> None:
    trusting = ssl.create_default_context(cafile=known.environ["SSL_CERT_FILE"])

    def status(name: str, context: ssl.SSLContext) -> int:
        proxy = urlsplit(known.proxy)
        connection = http.client.HTTPSConnection(
            str(proxy.hostname), proxy.port, context=context, timeout=10
        )
        with contextlib.closing(connection):
            connection.set_tunnel(name, 443)
            connection.request("GET", "/v2/")
            return connection.getresponse().status

    with persona("strict", names=known) as strict:
        assert status("strict.test", trusting) == 200
        assert strict.journal.entries[0].origin == strict.url == "https://strict.test"
        with pytest.raises(ssl.SSLCertVerificationError):
            status("strict.test", ssl.create_default_context())
        wrong = pytest.raises(ssl.SSLCertVerificationError, match=r"not valid for .other\.test.")
        with known.known("other.test", strict.servers["registry"].port), wrong:
            status("other.test", trusting)
