"""Faults: every verb as a plain client sees it, which exchanges a rule strikes, and what it says of
itself.

Bytes are read by `http.client` or by hand, never by the program: what is judged here is the
harness.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import anyio
import pytest

from conformance.faults import Faults, Rule
from conformance.http import Site, run_in_thread
from conformance.images import Image, Seed
from conformance.memory import End, network
from conformance.messages import digest_of
from conformance.registry import App
from conformance.tokens import TokenService
from conformance.walks import ACCEPT

ROOT = Path(__file__).resolve().parents[2]
LAYER = bytes(range(256)) * 400  # 102,400 bytes
DIGEST = digest_of(LAYER)
BLOB = f"/v2/app/blobs/{DIGEST}"


@pytest.fixture
def app() -> App:
    app = App()
    app.add_blob("app", LAYER)
    return app


@pytest.fixture
def image(app: App) -> Image:
    return Seed(1).image().load_into(app, "app", tag="v1")


class Client:
    """One connection at a time, opened again after it broke; what came is what is returned."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.address = (host, int(port))
        self.kept: http.client.HTTPConnection | None = None

    def ask(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> http.client.HTTPResponse | Exception:
        """Return the answer with `.data`, or what broke it."""
        kept = self.kept = self.kept or http.client.HTTPConnection(*self.address, timeout=20)
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                kept.request(method, target, body, {"Accept": ACCEPT, **(headers or {})})
            answer = kept.getresponse()
            answer.data = answer.read()  # type: ignore[attr-defined]
        except (OSError, http.client.HTTPException) as problem:
            kept.close()
            self.kept = None
            return problem
        if answer.will_close:
            self.kept = None
        return answer

    def get(self, target: str = BLOB, method: str = "GET", body: bytes | None = None) -> Any:
        """Return an answer that must come."""
        answer = self.ask(method, target, body)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def begin(self) -> str:
        """Open an upload session and return its path."""
        answer = self.get("/v2/app/blobs/uploads/", "POST", b"")
        assert answer.status == 202, answer.data
        return "/" + answer.getheader("Location").split("/", 3)[3]

    def close(self) -> None:
        if self.kept is not None:
            self.kept.close()


@contextlib.contextmanager
def asking(site: Site) -> Iterator[Client]:
    with run_in_thread(site) as server, contextlib.closing(Client(server.address)) as client:
        yield client
        site.faults.release()


@pytest.fixture
def client(app: App) -> Iterator[Client]:
    with asking(app) as client:
        yield client


def talk(site: Site, data: bytes) -> bytes:
    """Send bytes and return everything that comes until the connection ends."""
    with (
        run_in_thread(site) as server,
        socket.create_connection((server.host, server.port), 20) as sock,
    ):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: sock.recv(65536), b""))


GET = f"GET {BLOB} HTTP/1.1\r\nHost: r.test\r\n\r\n".encode()


# Answers instead of the registry's.


def test_status_refuses_with_the_specifications_error_body(app: App, client: Client) -> None:
    app.faults.on("GET", "blob").first().status(503, retry_after=7)
    answer = client.get()
    assert (answer.status, answer.getheader("Retry-After")) == (503, "7")
    assert [each["code"] for each in json.loads(answer.data)["errors"]] == ["UNAVAILABLE"]
    assert client.get().data == LAYER, "only the first"
    assert [(entry.status, entry.tampered) for entry in app.journal.entries] == [
        (503, True),
        (200, False),
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0.2, "1"),
        ("soon", "soon"),
        (datetime(2030, 1, 2, tzinfo=timezone.utc), "Wed, 02 Jan 2030 00:00:00 GMT"),
    ],
)
def test_retry_after_is_seconds_a_date_or_nonsense(app: App, given: Any, said: str) -> None:
    app.faults.on().status(429, retry_after=given, headers={"RateLimit-Remaining": "0;w=21600"})
    answer = app.request("GET", BLOB)
    assert (answer.status, answer.codes, answer.header("Retry-After")) == (
        429,
        ["TOOMANYREQUESTS"],
        said,
    )
    assert answer.header("RateLimit-Remaining") == "0;w=21600"


def test_status_can_have_any_body(app: App) -> None:
    app.faults.on().status(
        502, body=b"<html>Bad Gateway</html>", headers={"Content-Type": "text/html"}
    )
    answer = app.request("GET", BLOB)
    assert (answer.data, answer.header("Content-Type")) == (
        b"<html>Bad Gateway</html>",
        "text/html",
    )


def test_status_after_all_was_done_hides_that_it_was(app: App, client: Client) -> None:
    app.faults.on("PUT", "upload").first().status(500, at="answer")
    body = b"committed"
    where = client.begin()
    assert client.get(f"{where}&digest={digest_of(body)}", "PUT", body).status == 500
    assert app.blob("app", digest_of(body)) == body


@pytest.mark.parametrize(("early", "read"), [(True, 0), (False, 3 << 20)])
def test_status_comes_before_or_after_the_body(
    app: App, client: Client, early: bool, read: int
) -> None:
    app.faults.on("PATCH").status(413, early=early)
    answer = client.ask("PATCH", client.begin(), bytes(3 << 20))
    assert isinstance(answer, Exception) or answer.status == 413
    assert app.journal.matching("PATCH").exactly(1).bytes_in() == read


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    ("to", "location"),
    [
        ("http://cdn.test:81", f"http://cdn.test:81{BLOB}?x=1"),
        ("/other", "/other"),
        ("http://cdn.test/signed?sig=a", "http://cdn.test/signed?sig=a"),
        ("", f"{BLOB}?x=1"),
    ],
)
def test_redirect_goes_to_an_origin_a_path_a_url_or_round(
    app: App, code: int, to: str, location: str
) -> None:
    app.faults.on("GET HEAD", "blob").redirect(to, code)
    answer = app.request("GET", f"{BLOB}?x=1")
    assert (answer.status, answer.header("Location"), answer.data) == (code, location, b"")


def test_challenge_is_words_or_made_of_its_parts(app: App) -> None:
    faults = app.faults
    faults.on().first().challenge('Negotiate, Bearer realm="x')
    faults.on().challenge(realm="http://evil.test/token", service="s", error="insufficient_scope")
    answer = app.request("GET", BLOB)
    assert answer.header("WWW-Authenticate") == 'Negotiate, Bearer realm="x'
    assert (answer.status, answer.codes) == (401, ["UNAUTHORIZED"])
    assert app.request("GET", BLOB).header("WWW-Authenticate") == (
        'Bearer realm="http://evil.test/token",service="s",error="insufficient_scope"'
    )


def test_a_forgotten_session_stays_forgotten_and_others_live(app: App, client: Client) -> None:
    app.faults.on("PATCH", "upload").first().forget()
    lost = client.begin()
    other = client.begin()
    assert client.get(lost, "PATCH", b"abc").status == 404
    for method in ("GET", "PATCH", "DELETE"):
        answer = client.get(lost, method, b"abc" if method == "PATCH" else None)
        assert (answer.status, b"BLOB_UPLOAD_UNKNOWN" in answer.data) == (404, True)
    assert client.get(f"{lost}&digest={digest_of(b'abc')}", "PUT", b"abc").status == 404
    assert client.get(other, "PATCH", b"abc").status == 202


def test_raw_is_what_was_written_and_then_the_end(app: App) -> None:
    app.faults.on().raw(b"HTTP/1.1 abc\r\n\x00")
    assert talk(app, GET) == b"HTTP/1.1 abc\r\n\x00"


def test_raw_before_and_after_an_answer(app: App) -> None:
    rule = app.faults.on()
    rule.raw(b"HTTP/1.1 103 Early Hints\r\n\r\n", where="before")
    rule.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", where="after")
    said = talk(app, GET)
    assert said.startswith(b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert said.endswith(LAYER + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


# Ends in the middle.


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("kind", ["ping", "tag_list", "manifest", "blob"])
def test_drop_before_anything_is_done(
    app: App, client: Client, image: Image, kind: str, reset: bool
) -> None:
    target = {
        "ping": "/v2/",
        "tag_list": "/v2/app/tags/list",
        "manifest": "/v2/app/manifests/v1",
    }.get(kind, BLOB)
    app.faults.on(kind=kind).first().drop(reset=reset)
    broken = client.ask("GET", target)
    assert isinstance(broken, ConnectionResetError if reset else http.client.RemoteDisconnected), (
        broken
    )
    assert client.get(target).status == 200
    app.faults.check()
    assert app.journal.entries[0].status is None


@pytest.mark.parametrize("after", [0, 1, 5000, len(LAYER)])
def test_drop_in_the_response_body_leaves_exactly_that_much(app: App, after: int) -> None:
    app.faults.on("GET", "blob").drop(after)
    head, _, body = talk(app, GET).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(LAYER)}".encode() in head
    assert body == LAYER[:after]
    assert app.journal.entries[0].response_bytes == after


def test_drop_in_the_head_of_the_answer(app: App) -> None:
    app.faults.on().drop(at="head")
    said = talk(app, GET)
    assert said.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\n\r\n" not in said


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("after", [1, 64 << 10, 100_000])
def test_drop_in_the_request_body_takes_exactly_that_much(
    app: App, after: int, chunked: bool
) -> None:
    app.faults.on("PATCH", "upload", repository="app").first().drop(after)
    with asking(app) as client:
        where = client.begin()
        body: Any = iter([LAYER]) if chunked else LAYER
        assert isinstance(client.ask("PATCH", where, body), Exception)
        assert app.journal.matching("PATCH").exactly(1).bytes_in() == after
        (upload,) = app.repositories["app"].uploads.values()
        assert bytes(upload.content) == LAYER[:after], "what came is kept, as a registry keeps it"


def test_a_lost_answer_is_carried_out(app: App, client: Client) -> None:
    app.faults.on("PUT", "upload").drop(at="answer")
    body = b"stored and not said"
    assert isinstance(
        client.ask("PUT", f"{client.begin()}&digest={digest_of(body)}", body), Exception
    )
    assert app.blob("app", digest_of(body)) == body
    assert app.journal.matching("PUT").exactly(1)[0].status is None


def test_a_reset_is_one_even_behind_bytes(app: App, client: Client) -> None:
    app.faults.on("GET", "blob").first().drop(5, reset=True)
    broken = client.ask("GET", BLOB)
    assert isinstance(broken, (ConnectionResetError, http.client.IncompleteRead)), broken
    app.faults.check()


# Bodies and heads that are not as they should be.


@pytest.mark.parametrize(
    ("framing", "said"),
    [("length", b"Content-Length: 100\r\n"), ("chunked", b"Transfer-Encoding: chunked\r\n")],
)
def test_truncate_ends_the_body_cleanly(
    app: App, client: Client, framing: Any, said: bytes
) -> None:
    app.faults.on("GET", "blob").truncate(100, framing)
    assert client.get().data == LAYER[:100], "no error: the answer is complete"
    head = talk(app, GET).partition(b"\r\n\r\n")[0] + b"\r\n"
    assert said in head
    assert (b"Content-Length" in head) == (framing == "length")


@pytest.mark.parametrize("at", [0, 70_000, -1])
def test_corrupt_changes_one_byte(app: App, client: Client, at: int) -> None:
    app.faults.on("GET", "blob").corrupt(at)
    got = client.get().data
    assert [n for n in range(len(LAYER)) if got[n] != LAYER[n]] == [at % len(LAYER)]


def test_corrupt_can_replace_a_body_by_one_as_long(app: App, client: Client) -> None:
    app.faults.on("GET", "blob").corrupt(whole=True)
    assert client.get().data == bytes(len(LAYER))


@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_body_that_is_corrupted_is_refused_by_its_digest(
    app: App, client: Client, chunked: bool
) -> None:
    app.faults.on("PUT", "upload").corrupt(70_000, of="request")
    body = LAYER + b"x"
    where = f"{client.begin()}&digest={digest_of(body)}"
    answer: Any = client.ask("PUT", where, iter([body]) if chunked else body)  # type: ignore[arg-type]
    assert (answer.status, b"DIGEST_INVALID" in answer.data) == (400, True)
    assert app.blob("app", digest_of(body)) is None


@pytest.mark.parametrize(
    ("method", "target", "name", "true"),
    [
        ("HEAD", "/v2/app/manifests/v1", "Docker-Content-Digest", "sha256:"),
        (
            "GET",
            "/v2/app/manifests/v1",
            "Content-Type",
            "application/vnd.oci.image.manifest.v1+json",
        ),
        ("HEAD", BLOB, "Content-Length", str(len(LAYER))),
        ("GET", BLOB, "Etag", '"sha256:'),
        ("POST", "/v2/app/blobs/uploads/", "Location", "/v2/app/blobs/uploads/"),
        ("POST", "/v2/app/blobs/uploads/", "Range", "0-0"),
    ],
)
def test_lie_makes_a_header_wrong_and_leaves_it_well_formed(
    app: App, image: Image, method: str, target: str, name: str, true: str
) -> None:
    honest = app.request(method, target, [("Accept", ACCEPT)])
    app.faults.on().lie(name)
    answer = app.request(method, target, [("Accept", ACCEPT)])
    told = answer.header(name)
    if name == "Content-Length":
        assert (told, answer.close) == (str(len(LAYER) + 1), True)
    else:
        assert true in honest.header(name)
        assert told not in ("", honest.header(name))
    if "sha256:" in true:
        assert len(told) == len(honest.header(name))
    assert answer.status == honest.status


def test_lie_says_what_it_is_told_or_leaves_a_header_out(app: App) -> None:
    app.faults.on().lie(headers={"content-type": "text/plain", "Etag": None, "X-Own": "1"})
    answer = app.request("GET", BLOB)
    assert (answer.header("Content-Type"), answer.header("Etag"), answer.header("X-Own")) == (
        "text/plain",
        "",
        "1",
    )
    assert answer.data == LAYER


def test_a_content_length_that_is_too_long_ends_with_the_connection(
    app: App, client: Client
) -> None:
    app.faults.on().lie("Content-Length")
    broken = client.ask("GET", BLOB)
    assert isinstance(broken, http.client.IncompleteRead)
    assert (broken.partial, broken.expected) == (LAYER, 1)


# Time, on a clock that jumps.


async def read_to_end(end: End) -> list[tuple[float, int]]:
    """Read until the other side ends; return when how many bytes had come."""
    room = memoryview(bytearray(1 << 16))
    total = 0
    marks = list[tuple[float, int]]()
    while True:
        while (got := end.read_into(room)) is None:
            await end.readable()
        if not got:
            return marks
        total += got
        marks.append((anyio.current_time(), total))


CLOSING = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


async def timed(site: Site, data: bytes = CLOSING) -> list[tuple[float, int]]:
    async with network() as net:
        net.listen(site, "r.test")
        end = await net.connect("r.test", 80)
        end.write(data)
        began = anyio.current_time()
        return [(round(time - began, 3), count) for time, count in await read_to_end(end)]


def waits(marks: list[tuple[float, int]]) -> list[float]:
    """Return the waits that there were, in order."""
    times = [0.0, *(time for time, _ in marks)]
    return [round(b - a, 3) for a, b in itertools.pairwise(times) if b > a]


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_delay_waits_at_its_place(app: App) -> None:
    places: list[dict[str, Any]] = [{}, {"at": "answer"}, {"at": "head"}, {"after": 5000}]
    for place in places:
        app.faults.clear()
        app.faults.on().delay(30, **place)
        marks = await timed(app)
        assert waits(marks) == [30.0], place
        early = sum(count for time, count in marks[:1] if time == 0.0)
        assert (early > 5000, 0 < early < 5000) == ("after" in place, place.get("at") == "head")


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_throttle_moves_a_response_at_its_rate(app: App) -> None:
    app.faults.on().throttle(10_240)
    marks = await timed(app)
    assert marks[-1][0] == pytest.approx(10.0)
    middle = next(count for time, count in marks if time >= 5.0)
    assert 50_000 < middle < 55_000


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_throttle_takes_a_request_at_its_rate(app: App) -> None:
    app.faults.on("PATCH").throttle(10_240, of="request")
    where = app.request("POST", "/v2/app/blobs/uploads/").header("Location").split("/", 3)[3]
    head = f"PATCH /{where} HTTP/1.1\r\nHost: r.test\r\nConnection: close\r\n"
    head += f"Content-Length: {len(LAYER)}\r\n\r\n"
    marks = await timed(app, head.encode() + LAYER)
    assert marks[0][0] == pytest.approx(10.0, abs=0.1)
    assert app.journal.matching("PATCH", status=202).exactly(1).bytes_in() == len(LAYER)


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_a_stall_lasts_until_it_is_released(app: App) -> None:
    rule = app.faults.on().stall(after=1000)
    marks: list[tuple[float, int]] = []

    async def ask() -> None:
        marks.extend(await timed(app))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.sleep(3600)
        assert [str(effect) for effect, _ in rule.done] == ["stall 1000"]
        rule.release()
    assert waits(marks) == [3600.0]
    assert app.journal.entries[0].response_bytes == len(LAYER)


def test_a_stall_is_released_from_another_thread(app: App, client: Client) -> None:
    rule = app.faults.on("GET", "blob").stall()
    got: list[Any] = []
    asking = threading.Thread(target=lambda: got.append(client.get()))
    asking.start()
    rule.wait()
    assert not got
    app.faults.release()
    asking.join(20)
    assert got[0].data == LAYER
    assert client.get().data == LAYER, "and stays released"


# Which exchanges.


def struck(app: App, times: int = 12, target: str = "/v2/") -> list[int]:
    return [n for n in range(1, times + 1) if app.request("GET", target).status == 503]


@pytest.mark.parametrize(
    ("say", "expected"),
    [
        (lambda rule: rule, list(range(1, 13))),
        (lambda rule: rule.nth(2), [2]),
        (lambda rule: rule.nth(1, 5), [1, 5]),
        (lambda rule: rule.first(3), [1, 2, 3]),
        (lambda rule: rule.since(10), [10, 11, 12]),
        (lambda rule: rule.chance(1), list(range(1, 13))),
    ],
)
def test_which_occurrence(say: Callable[[Rule], Rule], expected: list[int]) -> None:
    app = App()
    say(app.faults.on()).status(503)
    assert struck(app) == expected


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ({"method": "GET HEAD"}, {"ping", "blob", "token"}),
        ({"kind": "blob upload_start"}, {"blob", "post"}),
        ({"repository": "app/*"}, {"blob"}),
        ({"repository": "app/web"}, {"blob"}),
        ({"repository": "app"}, {"post"}),
        ({"reference": "sha256:*"}, {"blob"}),
        ({"host": "other.*"}, {"token"}),
        ({"path": "/tok*"}, {"token"}),
        ({"header": {"Range": "bytes=5-*"}}, {"blob"}),
        ({"header": {"X-None": "*"}}, set()),
        ({"query": {"mount": "*"}}, {"post"}),
        ({"query": {"service": "x", "scope": "a*"}}, {"token"}),
        ({"where": lambda request: request.method == "POST"}, {"post"}),
        ({"kind": "token"}, {"token"}),
        ({}, {"ping", "blob", "post", "token"}),
    ],
)
def test_what_a_rule_matches(which: dict[str, Any], expected: set[str]) -> None:
    app = App(auth=TokenService({"u": "p"}))
    rule = app.faults.on(**which).status(418)
    requests = {
        "ping": ("GET", "/v2/", []),
        "blob": ("GET", f"/v2/app/web/blobs/{DIGEST}", [("Range", "bytes=5-9")]),
        "post": ("POST", f"/v2/app/blobs/uploads/?mount={DIGEST}", []),
        "token": ("GET", "/token?service=x&scope=abc", [("Host", "other.test")]),
    }
    got = {name for name, asked in requests.items() if app.request(*asked).status == 418}
    assert got == expected
    assert (rule.matched, len(rule.struck)) == (len(expected), len(expected))


def test_the_same_seed_gives_the_same_faults_in_whatever_order_requests_come() -> None:
    names = [f"/v2/r{n}/blobs/{DIGEST}" for n in range(40)]

    def run(seed: int, order: list[str]) -> set[tuple[str, int]]:
        app = App()
        app.faults.seed = seed
        app.faults.on("GET", "blob").chance(0.3).status(503)
        asked: dict[str, int] = {}
        hit = set()
        for name in order:
            asked[name] = asked.get(name, 0) + 1
            if app.request("GET", name).status == 503:
                hit.add((name, asked[name]))
        return hit

    first = run(7, names * 2)
    assert first == run(7, names[::-1] * 2) == run(7, sorted(names * 2))
    assert 10 < len(first) < 40
    assert first != run(8, names * 2)


def test_rules_are_taken_in_order_up_to_the_one_that_ends_the_exchange(app: App) -> None:
    faults = app.faults
    faults.on().lie(headers={"X-First": "1"})
    faults.on().first().status(500)
    faults.on().first().status(501)
    faults.on().lie(headers={"X-Last": "1"})
    seen = [app.request("GET", "/v2/") for _ in range(3)]
    assert [(each.status, each.header("X-First"), each.header("X-Last")) for each in seen] == [
        (500, "1", ""),
        (501, "1", ""),
        (200, "1", "1"),
    ]
    assert [rule.matched for rule in faults.rules] == [3, 3, 2, 1]


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_verbs_of_one_rule_all_take_place(app: App) -> None:
    app.faults.on().status(503, body=bytes(1000)).delay(2).delay(3, at="answer").throttle(
        100
    ).truncate(400)
    marks = await timed(app)
    assert marks[-1][0] == pytest.approx(2 + 3 + 4)
    app.faults.check()
    assert app.journal.entries[0].response_bytes == 400


# What a rule says of itself.


def test_the_report_says_what_was_done_to_which_exchange(app: App) -> None:
    app.faults.on("GET", "ping").nth(2).status(503).lie("Content-Type")
    struck(app, 3)
    said = app.faults.report()
    assert said == (
        "GET ping nth=2: status 503, lie Content-Type: 3 matched, 1 struck\n"
        "    status 503, lie Content-Type: 2. [0] GET /v2/ -> 503 (status 503; lie Content-Type)"
    )
    app.faults.check()


def test_a_rule_that_never_struck_fails_the_check_unless_it_is_optional(app: App) -> None:
    app.faults.on("PUT").optional().status(503)
    app.faults.check()
    app.faults.on("GET", "ping").nth(2).status(503)
    struck(app, 1)
    with pytest.raises(
        AssertionError, match=r"never struck: GET ping nth=2: status 503: 1 matched, 0 struck"
    ):
        app.faults.check()


@pytest.mark.parametrize(
    "say",
    [
        lambda rule: rule.drop(len(LAYER) + 1),
        lambda rule: rule.truncate(len(LAYER)),
        lambda rule: rule.corrupt(len(LAYER)),
        lambda rule: rule.lie("Location"),
        lambda rule: rule.delay(1, after=10, of="request"),
        lambda rule: rule.stall(len(LAYER) + 1),
    ],
)
def test_a_verb_that_could_not_take_place_fails_the_check(
    app: App, client: Client, say: Callable[[Rule], Rule]
) -> None:
    say(app.faults.on("GET", "blob"))
    assert client.get().data == LAYER
    with pytest.raises(AssertionError, match="struck and did not take place"):
        app.faults.check()


def test_a_rule_without_a_verb_fails_the_check(app: App) -> None:
    app.faults.on("GET").nth(2)
    app.request("GET", "/v2/")
    with pytest.raises(AssertionError, match="no verb: GET nth=2"):
        app.faults.check()


@pytest.mark.parametrize(
    ("say", "why"),
    [
        (lambda f: f.on("FETCH"), "no method FETCH"),
        (lambda f: f.on("GET", "blobs"), "no kind blobs"),
        (lambda f: f.on().nth(), "counted from 1"),
        (lambda f: f.on().nth(0), "counted from 1"),
        (lambda f: f.on().first(1).nth(2), "said already"),
        (lambda f: f.on().chance(1.5), "probability"),
        (lambda f: f.on().status(503).redirect(), "ends once"),
        (lambda f: f.on().drop().status(503), "ends once"),
        (lambda f: f.on().status(100), "no final status"),
        (lambda f: f.on().challenge(), "words or a realm"),
        (lambda f: f.on().forget(), "only an upload"),
        (lambda f: f.on().drop(5, at="answer"), "either after bytes or at a place"),
        (lambda f: f.on().drop(0, at="head"), "either after bytes or at a place"),
        (lambda f: f.on().delay(1, of="request"), "of needs after"),
        (lambda f: f.on().throttle(0), "at least one"),
        (lambda f: f.on().lie(), "about which header"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_where_it_is_written(
    say: Callable[[Faults], Rule], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        say(Faults())


@pytest.mark.parametrize("say", [lambda rule: rule.delay(1), lambda rule: rule.drop()])
def test_what_waits_or_breaks_needs_a_server(app: App, say: Callable[[Rule], Rule]) -> None:
    say(app.faults.on())
    with pytest.raises(TypeError, match="needs a server"):
        app.request("GET", "/v2/")
