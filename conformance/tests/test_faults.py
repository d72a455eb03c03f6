"""Faults: every verb as a plain client sees it, which exchanges a rule strikes, and what it says of
itself.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import anyio
import pytest

from conformance.faults import Faults, Rule
from conformance.http import Server, Site, run_in_thread
from conformance.images import Seed
from conformance.memory import End, network
from conformance.messages import digest_of
from conformance.registry import App
from conformance.tests.asking import TAKE, begin
from conformance.tokens import TokenService

LAYER = bytes(range(256)) * 400  # 102,400 bytes
DIGEST = digest_of(LAYER)
BLOB = f"/v2/app/blobs/{DIGEST}"
GET = f"GET {BLOB} HTTP/1.1\r\nHost: r.test\r\n\r\n".encode()
CLOSING = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


@pytest.fixture
def app() -> App:
    app = App()
    app.add_blob("app", LAYER)
    return app


@pytest.fixture
def server(app: App) -> Iterator[Server]:
    with run_in_thread(app) as running:
        yield running
        app.faults.release()


def ask(server: Server, method: str = "GET", target: str = BLOB, body: Any = None) -> Any:
    """Send a request on a connection of its own; return the answer with `data`, or what broke it."""
    connection = http.client.HTTPConnection(server.address, timeout=20)
    with contextlib.closing(connection):
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, target, body)
            answer = connection.getresponse()
            answer.data = answer.read()  # type: ignore[attr-defined]
        except (OSError, http.client.HTTPException) as problem:
            return problem
        return answer


def talk(server: Server, data: bytes = GET) -> bytes:
    """Send bytes and return everything that comes until the connection ends."""
    with socket.create_connection((server.host, server.port), 20) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: sock.recv(65536), b""))


# Answers instead of the registry's.


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (7, "7"),
        (0.2, "1"),
        ("soon", "soon"),
        (datetime(2030, 1, 2, tzinfo=timezone.utc), "Wed, 02 Jan 2030 00:00:00 GMT"),
    ],
)
def test_status_refuses_with_the_specifications_error_body(app: App, given: Any, said: str) -> None:
    app.faults.on("GET", "blob").first().status(503, retry_after=given, headers={"X-Own": "1"})
    answer = app.request("GET", BLOB)
    assert (answer.status, answer.codes) == (503, ["UNAVAILABLE"])
    assert (answer.header("Retry-After"), answer.header("X-Own")) == (said, "1")
    assert app.request("GET", BLOB).data == LAYER, "only the first"
    assert [entry.tampered for entry in app.journal.entries] == [True, False]


@pytest.mark.parametrize(("early", "read"), [(True, 0), (False, 3 << 20)])
def test_status_comes_before_or_after_the_body(
    app: App, server: Server, early: bool, read: int
) -> None:
    app.faults.on("PATCH").status(413, early=early)
    answer = ask(server, "PATCH", begin(app), bytes(3 << 20))
    assert isinstance(answer, Exception) or answer.status == 413
    assert app.journal.matching("PATCH").exactly(1).bytes_in() == read


@pytest.mark.parametrize(
    "verb", [lambda rule: rule.status(500, at="answer"), lambda rule: rule.drop(at="answer")]
)
def test_at_the_answer_all_was_carried_out(
    app: App, server: Server, verb: Callable[[Rule], Rule]
) -> None:
    verb(app.faults.on("PUT", "upload"))
    body = b"stored and not said"
    answer = ask(server, "PUT", f"{begin(app)}&digest={digest_of(body)}", body)
    assert isinstance(answer, Exception) or answer.status == 500
    assert app.blob("a/b", digest_of(body)) == body


@pytest.mark.parametrize(
    ("to", "location"),
    [
        ("http://cdn.test:81", f"http://cdn.test:81{BLOB}?x=1"),
        ("/other", "/other"),
        ("http://cdn.test/signed?sig=a", "http://cdn.test/signed?sig=a"),
        ("", f"{BLOB}?x=1"),
    ],
)
def test_redirect_goes_to_an_origin_a_path_a_url_or_round(app: App, to: str, location: str) -> None:
    app.faults.on("GET HEAD", "blob").redirect(to, 302)
    answer = app.request("GET", f"{BLOB}?x=1")
    assert (answer.status, answer.header("Location"), answer.data) == (302, location, b"")


def test_challenge_is_words_or_made_of_its_parts(app: App) -> None:
    app.faults.on().first().challenge('Negotiate, Bearer realm="x')
    app.faults.on().challenge(realm="http://evil.test/token", error="invalid_token")
    answer = app.request("GET", BLOB)
    assert (answer.status, answer.codes) == (401, ["UNAUTHORIZED"])
    assert answer.header("WWW-Authenticate") == 'Negotiate, Bearer realm="x'
    assert app.request("GET", BLOB).header("WWW-Authenticate") == (
        'Bearer realm="http://evil.test/token",error="invalid_token"'
    )


def test_a_forgotten_session_stays_forgotten_and_others_live(app: App) -> None:
    app.faults.on("PATCH", "upload").first().forget()
    lost, other = begin(app), begin(app)
    for method in ("PATCH", "GET", "PATCH", "DELETE"):
        answer = app.request(method, lost)
        assert (answer.status, answer.codes) == (404, ["BLOB_UPLOAD_UNKNOWN"])
    assert app.request("PATCH", other, body=b"abc").status == 202


def test_raw_stands_for_an_answer_or_beside_it(app: App, server: Server) -> None:
    hints = b"HTTP/1.1 103 Early Hints\r\n\r\n"
    app.faults.on().raw(hints, where="before").raw(b"more", where="after")
    said = talk(server)
    assert said.startswith(hints + b"HTTP/1.1 200 OK\r\n")
    assert said.endswith(LAYER + b"more")
    app.faults.clear()
    app.faults.on().raw(b"HTTP/1.1 abc\r\n\x00")
    assert talk(server) == b"HTTP/1.1 abc\r\n\x00"


# Ends in the middle, and bodies and heads that are not as they should be.


@pytest.mark.parametrize("after", [0, 5000, len(LAYER)])
def test_drop_in_the_response_body_leaves_exactly_that_much(
    app: App, server: Server, after: int
) -> None:
    app.faults.on("GET", "blob").drop(after)
    head, _, body = talk(server).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(LAYER)}".encode() in head
    assert body == LAYER[:after]
    assert app.journal.entries[0].response_bytes == after


def test_drop_in_the_head_of_the_answer(app: App, server: Server) -> None:
    app.faults.on().drop(at="head")
    said = talk(server)
    assert said.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\n\r\n" not in said


@pytest.mark.parametrize("after", [1, 100_000])
@pytest.mark.parametrize("body", [lambda: LAYER, lambda: iter([LAYER])], ids=["length", "chunked"])
def test_drop_in_the_request_body_takes_exactly_that_much(
    app: App, server: Server, after: int, body: Callable[[], Any]
) -> None:
    app.faults.on("PATCH", "upload").first().drop(after)
    assert isinstance(ask(server, "PATCH", begin(app), body()), Exception)
    assert app.journal.matching("PATCH").exactly(1).bytes_in() == after
    (upload,) = app.repositories["a/b"].uploads.values()
    assert bytes(upload.content) == LAYER[:after], "what came is kept, as a registry keeps it"


@pytest.mark.parametrize("after", [None, 5])
def test_a_reset_is_one(app: App, server: Server, after: int | None) -> None:
    app.faults.on("GET", "blob").drop(after, reset=True)
    with socket.create_connection((server.host, server.port), 20) as sock:
        sock.sendall(GET)
        with pytest.raises(ConnectionResetError):
            b"".join(iter(lambda: sock.recv(65536), b""))
    app.faults.check()


@pytest.mark.parametrize(
    ("framing", "said"),
    [("length", b"Content-Length: 100\r\n"), ("chunked", b"Transfer-Encoding: chunked\r\n")],
)
def test_truncate_ends_the_body_cleanly(
    app: App, server: Server, framing: Any, said: bytes
) -> None:
    app.faults.on("GET", "blob").truncate(100, framing)
    assert ask(server).data == LAYER[:100], "no error: the answer is complete"
    head = talk(server).partition(b"\r\n\r\n")[0] + b"\r\n"
    assert said in head
    assert (b"Content-Length" in head) == (framing == "length")


@pytest.mark.parametrize("at", [0, 70_000, -1])
def test_corrupt_changes_one_byte(app: App, server: Server, at: int) -> None:
    app.faults.on("GET", "blob").corrupt(at)
    got = ask(server).data
    assert [n for n in range(len(LAYER)) if got[n] != LAYER[n]] == [at % len(LAYER)]
    app.faults.clear()
    app.faults.on("GET").corrupt(whole=True)
    assert ask(server).data == bytes(len(LAYER))
    app.faults.on("PATCH").corrupt(5, of="request")
    assert ask(server, "PATCH", begin(app), b"0123456").status == 202
    (upload,) = app.repositories["a/b"].uploads.values()
    assert bytes(upload.content) == b"0123446"


@pytest.mark.parametrize(
    ("method", "target", "name"),
    [
        ("HEAD", "/v2/app/manifests/v1", "Docker-Content-Digest"),
        ("GET", "/v2/app/manifests/v1", "Content-Type"),
        ("HEAD", BLOB, "Content-Length"),
        ("POST", "/v2/app/blobs/uploads/", "Location"),
    ],
)
def test_lie_makes_a_header_wrong_and_leaves_it_well_formed(
    app: App, method: str, target: str, name: str
) -> None:
    Seed(1).image().load_into(app, "app", tag="v1")
    honest = app.request(method, target, [TAKE]).header(name) or str(len(LAYER))
    app.faults.on().lie(name)
    answer = app.request(method, target, [TAKE])
    told = answer.header(name)
    assert told not in ("", honest)
    assert name == "Content-Type" or len(told) == len(honest)
    assert answer.close == (name == "Content-Length")


def test_lie_says_what_it_is_told_or_leaves_a_header_out(app: App) -> None:
    app.faults.on().lie(headers={"content-type": "text/plain", "Etag": None, "X-Own": "1"})
    answer = app.request("GET", BLOB)
    told = [answer.header(name) for name in ("Content-Type", "Etag", "X-Own")]
    assert told == ["text/plain", "", "1"]
    assert answer.data == LAYER


# Time, on a clock that jumps.


async def timed(site: Site, data: bytes = CLOSING) -> list[tuple[float, int]]:
    """Send bytes; return when how many had come, until the other side ends."""
    async with network() as net:
        net.listen(site, "r.test")
        end: End = await net.connect("r.test", 80)
        end.write(data)
        began = anyio.current_time()
        room = memoryview(bytearray(1 << 16))
        total = 0
        marks = list[tuple[float, int]]()
        while True:
            while (got := end.read_into(room)) is None:
                await end.readable()
            if not got:
                return marks
            total += got
            marks.append((round(anyio.current_time() - began, 3), total))


def waits(marks: list[tuple[float, int]]) -> list[float]:
    """Return the waits that there were, in order."""
    times = [0.0, *(time for time, _ in marks)]
    return [round(b - a, 3) for a, b in itertools.pairwise(times) if b > a]


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


@pytest.mark.virtual_time
async def test_throttle_moves_a_body_at_its_rate(app: App) -> None:
    app.faults.on("GET").throttle(10_240)
    marks = await timed(app)
    assert marks[-1][0] == pytest.approx(10.0)
    assert 50_000 < next(count for time, count in marks if time >= 5.0) < 55_000

    app.faults.on("PATCH").throttle(10_240, of="request")
    head = f"PATCH {begin(app)} HTTP/1.1\r\nHost: r.test\r\nConnection: close\r\n"
    head += f"Content-Length: {len(LAYER)}\r\n\r\n"
    marks = await timed(app, head.encode() + LAYER)
    assert marks[0][0] == pytest.approx(10.0, abs=0.1)
    assert app.journal.matching("PATCH", status=202).exactly(1).bytes_in() == len(LAYER)


@pytest.mark.virtual_time
async def test_verbs_of_one_rule_all_take_place(app: App) -> None:
    rule = app.faults.on().status(503, body=bytes(1000)).delay(2)
    rule.delay(3, at="answer").throttle(100).truncate(400)
    assert (await timed(app))[-1][0] == pytest.approx(2 + 3 + 4)
    app.faults.check()
    assert app.journal.entries[0].response_bytes == 400


@pytest.mark.virtual_time
async def test_a_stall_lasts_until_it_is_released(app: App) -> None:
    rule = app.faults.on().stall(after=1000)
    marks: list[tuple[float, int]] = []

    async def read() -> None:
        marks.extend(await timed(app))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.sleep(3600)
        assert [str(effect) for effect, _ in rule.done] == ["stall 1000"]
        rule.release()
    assert waits(marks) == [3600.0]


def test_a_stall_is_released_from_another_thread(app: App, server: Server) -> None:
    rule = app.faults.on("GET", "blob").stall()
    got: list[Any] = []
    asking = threading.Thread(target=lambda: got.append(ask(server)))
    asking.start()
    rule.wait()
    assert not got
    app.faults.release()
    asking.join(20)
    assert got[0].data == LAYER
    assert ask(server).data == LAYER, "and stays released"


# Which exchanges.


@pytest.mark.parametrize(
    ("say", "expected"),
    [
        (lambda rule: rule.nth(2, 5), [2, 5]),
        (lambda rule: rule.first(3), [1, 2, 3]),
        (lambda rule: rule.since(10), [10, 11, 12]),
        (lambda rule: rule.chance(1), list(range(1, 13))),
    ],
)
def test_which_occurrence(say: Callable[[Rule], Rule], expected: list[int]) -> None:
    app = App()
    say(app.faults.on()).status(503)
    struck = [n for n in range(1, 13) if app.request("GET", "/v2/").status == 503]
    assert struck == expected


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ({"method": "GET HEAD"}, {"ping", "blob", "token"}),
        ({"kind": "blob upload_start"}, {"blob", "post"}),
        ({"repository": "app/*"}, {"blob"}),
        ({"repository": "app"}, {"post"}),
        ({"reference": "sha256:*"}, {"blob"}),
        ({"host": "other.*"}, {"token"}),
        ({"path": "/tok*"}, {"token"}),
        ({"header": {"Range": "bytes=5-*"}}, {"blob"}),
        ({"header": {"X-None": "*"}}, set()),
        ({"query": {"service": "x", "scope": "a*"}}, {"token"}),
        ({"where": lambda request: request.method == "POST"}, {"post"}),
        ({"kind": "token"}, {"token"}),
        ({}, {"ping", "blob", "post", "token"}),
    ],
)
def test_what_a_rule_and_the_journal_match(which: dict[str, Any], expected: set[str]) -> None:
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
    if "where" not in which:
        assert len(app.journal.matching(**which)) == len(expected)


def test_the_same_seed_gives_the_same_faults_in_whatever_order_requests_come() -> None:
    names = [f"/v2/r{n}/blobs/{DIGEST}" for n in range(40)]

    def run(seed: int, order: list[str]) -> set[tuple[str, int]]:
        app = App()
        app.faults.seed = seed
        app.faults.on("GET", "blob").chance(0.3).status(503)
        asked = dict.fromkeys(names, 0)
        hit = set()
        for name in order:
            asked[name] += 1
            if app.request("GET", name).status == 503:
                hit.add((name, asked[name]))
        return hit

    first = run(7, names * 2)
    assert first == run(7, names[::-1] * 2)
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


# What a rule says of itself.


def test_the_report_says_what_was_done_to_which_exchange(app: App) -> None:
    app.faults.on("GET", "ping").nth(2).status(503).lie("Content-Type")
    app.faults.on("PUT").optional().status(503)
    for _ in range(3):
        app.request("GET", "/v2/")
    assert app.faults.report().startswith(
        "GET ping nth=2: status 503, lie Content-Type: 3 matched, 1 struck\n"
        "    status 503, lie Content-Type: 2. [0] GET /v2/ -> 503 (status 503; lie Content-Type)"
    )
    app.faults.check()


@pytest.mark.parametrize(
    ("say", "problem"),
    [
        (lambda faults: faults.on("PUT").status(503), "never struck: PUT: status 503: 0 matched"),
        (lambda faults: faults.on("GET").nth(2), "no verb: GET nth=2"),
        (lambda faults: faults.on().drop(len(LAYER) + 1), "did not take place"),
        (lambda faults: faults.on().truncate(len(LAYER)), "did not take place"),
        (lambda faults: faults.on().corrupt(len(LAYER)), "did not take place"),
        (lambda faults: faults.on().lie("Location"), "did not take place"),
        (lambda faults: faults.on().delay(1, after=10, of="request"), "did not take place"),
    ],
)
def test_a_fault_that_did_not_happen_fails_the_check(
    app: App, server: Server, say: Callable[[Faults], Rule], problem: str
) -> None:
    say(app.faults)
    assert ask(server).data == LAYER
    with pytest.raises(AssertionError, match=problem):
        app.faults.check()


@pytest.mark.parametrize(
    ("say", "why"),
    [
        (lambda f: f.on("FETCH"), "no method FETCH"),
        (lambda f: f.on().nth(0), "counted from 1"),
        (lambda f: f.on().first(1).nth(2), "said already"),
        (lambda f: f.on().chance(1.5), "probability"),
        (lambda f: f.on().drop().status(503), "ends once"),
        (lambda f: f.on().forget(), "only an upload"),
        (lambda f: f.on().drop(5, at="answer"), "either after bytes or at a place"),
        (lambda f: f.on().delay(1, of="request"), "of needs after"),
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
