"""One exchange over one stream, and which connection serves the next: against a peer that follows a
script, on a clock that jumps.
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

import anyio
import anyio.lowlevel
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from _regsync.addresses import Origin
from _regsync.edge import WANT_WRITE
from _regsync.errors import (
    ContentError,
    Disconnected,
    LoginExpired,
    ProtocolBroken,
    Side,
    SyncError,
    TimedOut,
    WireError,
    WrongBytes,
)
from _regsync.net.wire import PIECE, Request
from tests.fuzzing import fuzz
from tests.unit.wires import (
    GET,
    NEVER,
    ORIGIN,
    Blob,
    End,
    Item,
    Pause,
    Wire,
    answer,
    ask,
    pool_of,
    put,
    watched,
)

pytestmark = pytest.mark.virtual_time

HEAD = Request("HEAD", "/v2/")
CREATED = answer(status=201)
OK = b"HTTP/1.1 200 OK\r\n"
GO_ON = b"HTTP/1.1 100 Go on\r\n\r\n"


async def alone(*incoming, request=GET, limit=10**6):
    """Ask once over a connection of its own, whose answer this is."""
    return await ask(pool_of(Wire(answers=(incoming,))), request, limit=limit)


def packets(data, *cuts):
    """Return the data in packets that end at these places."""
    places = sorted({0, *(cut for cut in cuts if cut < len(data)), len(data)})
    return tuple(data[start:end] for start, end in pairwise(places))


# The request.


@pytest.mark.parametrize(
    ("origin", "request_", "lines"),
    [
        (ORIGIN, GET, "GET /v2/ HTTP/1.1|Host: registry.test||"),
        (ORIGIN, Request("HEAD", "/x?y=z", (("A", "b"), ("A", "c"))),
            "HEAD /x?y=z HTTP/1.1|Host: registry.test|A: b|A: c||"),
        (ORIGIN, Request("DELETE", "/"), "DELETE / HTTP/1.1|Host: registry.test||"),
        (ORIGIN, Request("POST", "/"), "POST / HTTP/1.1|Host: registry.test|Content-Length: 0||"),
        (ORIGIN, Request("PUT", "/", (), b"{}"), "PUT / HTTP/1.1|Host: registry.test|Content-Length: 2||{}"),
        (Origin("https", "a.test", 443), GET, "GET /v2/ HTTP/1.1|Host: a.test||"),
        (Origin("http", "::1", 443), GET, "GET /v2/ HTTP/1.1|Host: [::1]:443||"),
    ],
)  # fmt: skip
async def test_head_and_body_leave_in_one_write(origin, request_, lines):
    wire = Wire(answers=((answer(),),))
    async with await pool_of(wire).exchange(origin, request_):
        assert wire.writes == [lines.replace("|", "\r\n").encode()]


@pytest.mark.parametrize(
    "request_",
    [
        Request("GET", "/ HTTP/1.1\r\nInjected: x\r\nRest:"),
        Request("GET", "/a b"),
        Request("GET", "/", (("Name: x\r\nInjected", "x"),)),
        Request("GET", "/", (("Authorization", "Bearer secret\ny"),)),
        Request("GET", "/", (("Authorization", "Bearer secret\u00e9"),)),
    ],
)
async def test_no_line_of_a_head_is_more_than_it_says(request_):
    wire = Wire()
    with pytest.raises(ProtocolBroken) as caught:
        await ask(pool_of(wire), request_)
    assert (wire.writes, "secret" in str(caught.value)) == ([], False)


async def test_the_first_piece_goes_with_the_head_and_the_others_from_their_own_memory():
    wire, blob = Wire(answers=((CREATED,),)), Blob(b"first", b"second", b"third")
    assert (await put(pool_of(wire), blob)).status == 201
    assert wire.writes[0].endswith(b"\r\nContent-Length: 16\r\n\r\nfirst")
    assert [offer.obj for offer in wire.offers[1:]] == blob.buffers[1:]
    assert wire.offers[1].obj is blob.buffers[1]
    assert wire.requests[0].body == b"firstsecondthird"


@given(st.lists(st.sampled_from([1, 3, 70, WANT_WRITE]), max_size=30))
async def test_a_stream_that_takes_little_at_a_time_gets_every_byte_once(steps):
    wire = Wire(sends=tuple(steps), answers=((WANT_WRITE, CREATED),))
    assert (await put(pool_of(wire), Blob(b"a" * 100, b"b" * 50, b"c"))).status == 201
    assert wire.requests[0].body == b"a" * 100 + b"b" * 50 + b"c"
    for step, (offer, following) in zip(steps, pairwise(wire.offers), strict=False):
        if step < 0:  # OpenSSL demands the same memory again
            assert following.obj is offer.obj
            assert len(following) == len(offer)


@pytest.mark.parametrize("length", [2, 5, 7], ids=["first too long", "second too long", "short"])
async def test_no_byte_more_is_sent_than_was_declared_and_no_fewer_are_told(length):
    wire = Wire(answers=((CREATED,),) * 2)
    with pytest.raises(ContentError, match="declared length"):
        await put(pool_of(wire), Blob(b"abc", b"def", length=length))
    assert len(b"".join(wire.writes).partition(b"\r\n\r\n")[2]) <= length
    assert wire.is_closed


@pytest.mark.parametrize("failure", [Disconnected("gone"), WrongBytes("the digest is wrong")])
async def test_a_source_that_fails_is_the_error_and_no_answer_is_waited_for(failure):
    """I3: a wrong digest takes the place of the last piece, and the connection is closed."""

    def fail():
        if blob.given == 1:
            raise failure

    wire, blob = Wire(), Blob(b"a", b"b")
    failure.side = Side.SOURCE
    blob.tick = fail
    began = anyio.current_time()
    with pytest.raises(SyncError) as caught:
        await put(pool_of(wire), blob)
    assert (caught.value, wire.is_closed, anyio.current_time()) == (failure, True, began)
    assert not wire.requests[0].whole


# Answers before the request is sent.


@pytest.mark.parametrize("status", [200, 413])
async def test_an_early_answer_saves_the_rest_of_the_body_and_ends_its_connection(status):
    wire, other = Wire(), Wire(answers=((answer(),),))
    wire.when(1, answer(b"early", status=status))
    pool, blob = pool_of(wire, other), Blob(*[b"x" * 1000] * 50, pause=1)
    response = await put(pool, blob)
    assert (response.status, response.is_early, response.body) == (status, True, b"early")
    assert (blob.given < 5, wire.is_closed) == (True, True)
    assert not (await ask(pool)).is_early
    assert other.requests


async def test_interim_answers_do_not_end_the_sending():
    wire = Wire(answers=((CREATED,),))
    wire.when(1, GO_ON + b"HTTP/1.1 103 Hints\r\nLink: x\r\n\r\n")
    response = await put(pool_of(wire), Blob(b"a", b"b", pause=1))
    assert (response.status, response.is_early, wire.requests[0].whole) == (201, False, True)


@pytest.mark.parametrize("sends", [(End.RESET,), (5, WANT_WRITE, End.RESET), (500, End.RESET)])
async def test_what_the_peer_said_before_it_closed_its_side_is_heard(sends):
    wire = Wire(Pause(1), answer(b"no", status=413), End.EOF, sends=sends)
    async with watched(pool_of(wire)) as pool:
        response = await put(pool, Blob(b"a" * 400, b"b" * 400, pause=0.1))
    assert (response.status, response.body, wire.is_closed) == (413, b"no", True)


async def test_last_words_are_waited_for_two_seconds():
    began = anyio.current_time()
    async with watched(pool_of(Wire(sends=(500, End.RESET)))) as pool:
        with pytest.raises(Disconnected, match="the connection broke: Broken pipe"):
            await put(pool, Blob(b"a", b"b"))
    assert anyio.current_time() - began == 2.0


# The answer: how it is framed.


class Framed(NamedTuple):
    """An answer's bytes, what it says, and whether its connection serves another exchange."""

    data: bytes
    status: int
    body: bytes
    is_kept: bool
    method: str = "GET"
    end: tuple[Item, ...] = ()


CHUNKED = b"HTTP/1.1 %d Words\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n4;x=y\r\ndefg\r\n0\r\n%s\r\n"
FRAMED = {
    "length": Framed(answer(b"abcdef", "A: b"), 200, b"abcdef", True),
    "empty": Framed(answer(), 200, b"", True),
    "range": Framed(answer(b"cd", status=206), 206, b"cd", True),
    "error": Framed(answer(b'{"errors":[]}', status=404), 404, b'{"errors":[]}', True),
    "chunked": Framed(CHUNKED % (200, b""), 200, b"abcdefg", True),
    "chunked error": Framed(CHUNKED % (503, b""), 503, b"abcdefg", True),
    "trailers": Framed(CHUNKED % (200, b"X: y\r\n"), 200, b"abcdefg", True),
    "until the end": Framed(b"HTTP/1.1 200 OK\r\n\r\nabc", 200, b"abc", False, end=(End.EOF,)),
    "1.0": Framed(answer(b"abc", version="1.0"), 200, b"abc", False),
    "close": Framed(answer(b"abc", "Connection: a", "Connection: b, Close"), 200, b"abc", False),
    "head": Framed(OK + b"Content-Length: 99\r\n\r\n", 200, b"", True, "HEAD"),
    "no content": Framed(b"HTTP/1.1 204 No\r\n\r\n", 204, b"", True),
    "no content of a length": Framed(b"HTTP/1.1 204 No\r\nContent-Length: 9\r\n\r\n", 204, b"", True),
    "not modified": Framed(b"HTTP/1.1 304 No\r\nContent-Length: 9\r\n\r\n", 304, b"", True),
    "interim": Framed(GO_ON + b"HTTP/1.1 103 Hints\r\n\r\n" + answer(b"abc"), 200, b"abc", True),
    "bare line feeds": Framed(b"HTTP/1.1 200 OK\nContent-Length: 3\n\nabc", 200, b"abc", True),
    "the same length twice": Framed(answer(b"abc", "Content-Length: 3"), 200, b"abc", True),
}  # fmt: skip


@pytest.mark.parametrize("case", FRAMED.values(), ids=FRAMED)
async def test_an_answer_says_the_same_wherever_it_is_cut(case):
    for cuts in (range(len(case.data)), *((cut,) for cut in range(len(case.data)))):
        wire = Wire(answers=((*packets(case.data, *cuts), *case.end), (answer(),)))
        pool = pool_of(wire, Wire(answers=((answer(),),)))
        response = await ask(pool, Request(case.method, "/"))
        told = (response.status, response.body, response.is_early)
        assert told == (case.status, case.body, False)
        await ask(pool)
        assert len(wire.requests) == 1 + case.is_kept


@pytest.mark.parametrize("end", [End.EOF, End.RESET])
@pytest.mark.parametrize("name", ["length", "chunked", "trailers", "interim"])
async def test_an_answer_that_ends_too_early_is_no_answer(name, end):
    data = FRAMED[name].data
    for cut in range(len(data)):
        with pytest.raises(Disconnected):
            await alone(*packets(data[:cut]), end)


@pytest.mark.parametrize("name", ["error", "chunked error"])
async def test_an_error_that_is_cut_short_is_still_that_error(name):
    case = FRAMED[name]
    for cut in range(case.data.index(b"\r\n\r\n") + 4, len(case.data)):
        response = await alone(*packets(case.data[:cut]), End.EOF)
        assert response.status == case.status
        assert case.body.startswith(response.body)


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_body_is_as_long_as_its_limit_at_most_and_of_an_error_that_much_is_read(framing):
    data, long = FRAMED[framing].data, FRAMED[framing].body
    assert (await alone(data, limit=len(long))).body == long
    for cut in range(len(data)):
        with pytest.raises(ContentError, match="longer than 5 bytes"):
            await alone(*packets(data, cut), limit=5)
    for status in (b"400", b"500"):
        assert (await alone(data.replace(b"200", status), limit=5)).body == long[:5]


async def test_a_long_body_is_read_into_the_callers_memory_and_nothing_behind_it():
    body = bytes(range(256)) * 5000
    wire = Wire(*packets(answer(body), *range(0, len(body), 7001)), b"behind")
    response = await pool_of(wire).exchange(ORIGIN, GET)
    read, buffer = bytearray(), memoryview(bytearray(PIECE))
    while count := await response.read_into(buffer):
        read += buffer[:count]
    assert (read, response.length, [*wire.incoming]) == (body, len(body), [b"behind"])
    await response.close()


async def test_who_reads_a_body_that_is_all_there_lets_others_go_on():
    wire = Wire(*packets(answer(b"x" * 100_000), *range(0, 100_000, 1000)))
    response = await pool_of(wire).exchange(ORIGIN, GET)
    buffer = memoryview(bytearray(1000))
    with anyio.CancelScope() as scope:
        scope.cancel()
        while await response.read_into(buffer):
            pass
    assert scope.cancelled_caught
    await response.close()


@pytest.mark.parametrize("behind", [b"0\r\n\r\n", b"", b"\r", b"5", b"5;x=y\r", b"0\r\n"])
async def test_chunks_that_have_arrived_are_read_at_once_and_no_other_is_waited_for(behind):
    """A piece for each of them would make a copy several times as slow."""
    chunks = b"".join(b"%x\r\n%s\r\n" % (size, b"x" * size) for size in range(1, 150))
    wire = Wire(OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + behind)
    response = await pool_of(wire).exchange(ORIGIN, GET)
    buffer = memoryview(bytearray(PIECE))
    with anyio.fail_after(1):
        # What has come with the head, and the rest.
        pieces = [await response.read_into(buffer) for _ in range(2)]
    assert sum(pieces) == sum(range(1, 150))
    await response.close()


@pytest.mark.parametrize("lacks", [0, 1, 3])
async def test_bytes_that_came_before_a_reset_are_read(lacks):
    wire = Wire(answer(b"x" * 1000)[: -lacks or None], End.RESET)
    response = await pool_of(wire).exchange(ORIGIN, GET)
    buffer, read = memoryview(bytearray(PIECE)), 0
    with suppress(Disconnected):
        while count := await response.read_into(buffer):
            read += count
    assert read == 1000 - lacks
    await response.close()


# Answers that hide another one, or cost more than they should.


@pytest.mark.parametrize(
    "data",
    [
        answer(b"abc", "Content-Length: 4"),
        OK + b"Content-Length: 3, 4\r\n\r\nabc",
        OK + b"Content-Length: -3\r\n\r\nabc",
        OK + b"Content-Length: +3\r\n\r\nabc",
        OK + b"Content-Length: 0x3\r\n\r\nabc",
        OK + b"Content-Length: \r\n\r\nabc",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n-3\r\nabc\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
        OK + b"Content-Length : 3\r\n\r\nabc",
        OK + b"Content-Length: 3\r\nA\x00: b\r\n\r\nabc",
        OK + b" folded: first\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        b"\r\n\r\n\r\n\r\n",
        b"\x16\x03\x01\x00\x00",
    ],
)
async def test_an_answer_that_may_be_read_in_two_ways_is_refused(data):
    wire = Wire(answers=((data, End.EOF),))
    with pytest.raises(WireError) as caught:
        await ask(pool_of(wire))
    assert (str(caught.value).isprintable(), wire.is_closed) == (True, True)


@pytest.mark.parametrize(
    "data",
    [
        OK + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        answer(b"abc") + answer(b"hidden"),
        answer(b"abc", status=404) + answer(b"hidden"),
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n" + answer(b"hidden"),
        answer(b"abc") + b"\n",
    ],
    ids=["two framings", "behind a body", "behind an error", "behind chunks", "a byte"],
)
async def test_what_hides_behind_an_answer_answers_nobody(data):
    wire, other = Wire(answers=((data,),)), Wire(answers=((answer(b"ours"),),))
    pool = pool_of(wire, other)
    assert (await ask(pool)).body == b"abc"
    assert (await ask(pool)).body == b"ours"
    assert wire.is_closed


async def test_a_head_may_have_64_kib():
    long, too_long = (answer(b"x", "Location: " + "a" * size) for size in (60_000, 80_000))
    assert (await alone(*packets(long, *range(0, 60_000, 9000)))).body == b"x"
    with pytest.raises(ProtocolBroken, match="longer than 65536 bytes"):
        await alone(*packets(too_long, *range(0, 80_000, 9000)))


@pytest.mark.parametrize("unit", [b" ", b" \t", b"\r\n ", b"\n\t"])
@pytest.mark.parametrize("before", [b"", GO_ON], ids=["final", "interim"])
async def test_a_head_with_long_runs_of_blanks_never_reaches_the_parser(unit, before):
    """Whose time grows with the square of their length."""
    for size in (1000, 1100, 60_000):
        run = unit * (size // len(unit))
        data = before + OK + b"X: a" + run + b"b\r\nContent-Length: 1\r\n\r\nx"
        for cuts in ((), range(0, len(data), 500)):
            if size == 1000:
                assert (await alone(*packets(data, *cuts))).body == b"x"
            else:
                with pytest.raises(ProtocolBroken, match="more than 1024 blanks in a row"):
                    await alone(*packets(data, *cuts))


@pytest.mark.parametrize("head", [OK + b"Content-Length: 60000\r\n\r\n", OK + b"\r\n"])
async def test_a_body_may_be_of_blanks(head):
    for cuts in ((), range(0, 60_000, 900)):
        assert (await alone(*packets(head + b" " * 60_000, *cuts), End.EOF)).body == b" " * 60_000


async def test_a_line_between_chunks_is_bounded():
    with pytest.raises(ProtocolBroken, match="too long"):
        await alone(OK + b"Transfer-Encoding: chunked\r\n\r\n3;", *[b"x" * 1000] * 100)


async def test_a_flood_of_interim_answers_lets_others_go_on():
    flood, turns = Wire(*[b"HTTP/1.1 102 Wait\r\n\r\n"] * 500, answer(b"x")), 0

    async def count_turns():
        nonlocal turns
        while True:
            await anyio.lowlevel.checkpoint()
            turns += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count_turns)
        assert (await ask(pool_of(flood))).body == b"x"
        tasks.cancel_scope.cancel()
    assert turns >= 500


# Deadlines.

NO_ANSWER = "no answer from registry.test within {} s"
STILL = "registry.test moved nothing for 60 s"
CRAWLS = "only N bytes of the body moved in 300 s"


@pytest.mark.parametrize(
    ("incoming", "limit", "text", "seconds"),
    [
        ((), None, NO_ANSWER.format(60), 60),
        ((), 900, NO_ANSWER.format(900), 900),
        ((OK, *[Pause(9.5), b"A: b\r\n"] * 20), None, NO_ANSWER.format(60), 60),
        ([Pause(1), b"HTTP/1.1 102 Wait\r\n\r\n"] * 200, None, NO_ANSWER.format(60), 60),
        ((answer(b"abc")[:-3], Pause(40), b"a"), None, STILL, 100),
        (((CHUNKED % (200, b""))[:-3], Pause(40), b"\r"), None, STILL, 100),
        ((answer(b"x" * 10**6)[: -(10**6)], *[Pause(30), b"x" * 1000] * 100), None, CRAWLS, 300),
    ],
    ids=["none", "as said", "part", "interim", "still", "chunks still", "crawls"],
)
async def test_an_answer_is_waited_for_in_measure(incoming, limit, text, seconds):
    wire, began = Wire(*incoming), anyio.current_time()
    async with watched(pool_of(wire)) as pool:
        with pytest.raises(TimedOut) as caught:
            async with await pool.exchange(ORIGIN, GET, seconds=limit) as response:
                await response.read(10**6)
    assert re.sub(r"only \d+", "only N", str(caught.value)) == text
    assert (round(anyio.current_time() - began, 3), wire.is_closed) == (seconds, True)


@pytest.mark.parametrize(
    ("sends", "text", "seconds"),
    [((100, NEVER), "moved nothing for 60 s", 60),
     ((100, *[Pause(25), 1] * 50), r"only \d+ bytes of the body moved in 300 s", 302)],
    ids=["takes nothing", "crawls, with the last words"],
)  # fmt: skip
async def test_a_peer_that_does_not_take_a_body_is_given_up(sends, text, seconds):
    wire, began = Wire(sends=sends), anyio.current_time()
    async with watched(pool_of(wire)) as pool:
        with pytest.raises(TimedOut, match=text):
            await put(pool, Blob(b"a" * 1000))
    assert (anyio.current_time() - began, wire.is_closed) == (seconds, True)


async def test_an_answer_within_its_time_is_read_and_the_beginning_of_an_error_is_an_error():
    async with (
        watched(pool_of(Wire(Pause(899), answer(b"x")))) as pool,
        await pool.exchange(ORIGIN, GET, seconds=900) as response,
    ):
        assert await response.read(9) == b"x"
    began = anyio.current_time()
    async with watched(pool_of(Wire(answer(b"ab", status=404)[:-1]))) as pool:
        assert (await ask(pool)).status == 404
    assert anyio.current_time() - began == 60


async def test_nobody_pays_for_the_other_end_of_a_body():
    """Neither a target whose source is slow, nor a source whose target is."""
    async with watched(pool_of(Wire(answers=((Pause(50), CREATED),)))) as pool:
        assert (await put(pool, Blob(*[b"x"] * 4, pause=200))).status == 201
    wire = Wire(answer(b"x" * 100)[:-100], *[Pause(1), b"x" * 20] * 5)
    async with watched(pool_of(wire)) as pool, await pool.exchange(ORIGIN, GET) as response:
        buffer, read = memoryview(bytearray(10)), 0
        while count := await response.read_into(buffer):
            read += count
            await anyio.sleep(200)
        assert read == 100


# Which connection serves which exchange.


async def test_exchanges_at_a_time_have_their_own_connections_and_the_last_one_is_reused():
    """But where a fresh one is asked for."""
    wires = [Wire(answers=((answer(),),) * 3) for _ in range(3)]
    pool = pool_of(*wires)
    first, second = await pool.exchange(ORIGIN, GET), await pool.exchange(ORIGIN, GET)
    await second.close()
    await first.close()
    await ask(pool)
    assert [len(wire.requests) for wire in wires] == [2, 1, 0]
    await (await pool.exchange(ORIGIN, GET, is_fresh=True)).close()
    assert [len(wire.requests) for wire in wires] == [2, 1, 1]


@pytest.mark.parametrize("sign", [End.EOF, End.RESET, b"HTTP/1.1 408 Late\r\n\r\n", b"\n"])
async def test_a_connection_that_its_peer_closed_or_spoke_on_is_not_used(sign):
    old, new = Wire(answers=((answer(),),)), Wire(answers=((answer(),),) * 2)
    pool = pool_of(old, new)
    await ask(pool)
    old.feed(sign)
    await ask(pool)
    await ask(pool)
    assert (len(old.requests), len(new.requests), old.is_closed) == (1, 2, True)


async def test_a_connection_is_kept_idle_for_50_seconds():
    wires = [Wire(answers=((answer(),),) * 9) for _ in range(2)]
    async with watched(pool_of(*wires)) as pool:
        for pause in (49, 49, 51):
            await ask(pool)
            await anyio.sleep(pause)
        assert wires[0].is_closed
        await ask(pool)
    assert [len(wire.requests) for wire in wires] == [3, 1]


async def test_a_connection_serves_its_own_origin_alone():
    """Scheme, host and port, and the settings by which it was made."""
    origins = [
        ORIGIN,
        ORIGIN._replace(port=81),
        ORIGIN._replace(host="other.test"),
        ORIGIN._replace(scheme="https"),
        ORIGIN._replace(via="alias"),
    ]
    wires = [Wire(answers=((answer(),),) * 2) for _ in origins]
    pool = pool_of(*wires)
    for origin in origins * 2:
        with anyio.fail_after(1):
            await (await pool.exchange(origin, GET)).close()
    assert [wire.dialled for wire in wires] == origins
    assert [len(wire.requests) for wire in wires] == [2] * len(origins)
    pool.close(ORIGIN)
    assert [wire.is_closed for wire in wires] == [True, False, False, False, False]
    pool.close()
    assert all(wire.is_closed for wire in wires)


async def test_of_all_connections_the_one_that_was_idle_longest_makes_room():
    wires = [Wire(answers=((answer(),),)) for _ in range(300)]
    pool = pool_of(*wires)
    origins = [ORIGIN._replace(port=number % 100) for number in range(300)]
    for response in [await pool.exchange(origin, GET) for origin in origins]:
        await response.close()
    assert [wire.is_closed for wire in wires] == [True] * 44 + [False] * 256


SHORT = answer(b"x" * 5000)[:-5000]


@pytest.mark.parametrize(
    ("incoming", "is_kept", "seconds"),
    [
        ((SHORT, b"x" * 5000), True, 0.0),
        ((SHORT, b"x" * 2500, Pause(0.5), b"x" * 2500), True, 0.5),
        ((SHORT, b"x" * 2500, Pause(1.5), b"x" * 2500), False, 1.0),
        ((SHORT, b"x" * 2500, End.EOF), False, 0.0),
        ((answer(b"x" * 70_000)[:-70_000], Pause(0.5), b"x" * 70_000), False, 0.0),
    ],
    ids=["there", "soon there", "late", "never", "too long"],
)
async def test_a_rest_that_nobody_wants_is_read_if_it_is_short_and_soon_there(
    incoming, is_kept, seconds
):
    wire = Wire(answers=(incoming,))
    async with watched(pool_of(wire)) as pool:
        response = await pool.exchange(ORIGIN, GET)
        began = anyio.current_time()
        await response.close()
        assert (not wire.is_closed, anyio.current_time() - began) == (is_kept, seconds)


# Requests that are sent again.


def dying(*deaths, sends=()):
    """Return a connection that answers once and then dies: after the next request, or at it."""
    wire = Wire(answers=((answer(),), deaths))
    wire.sends.extend((10**6, *sends))
    return wire


DEATHS = {
    "eof": lambda: dying(End.EOF),
    "reset": lambda: dying(End.RESET),
    "at the write": lambda: dying(sends=(End.RESET,)),
    "at the second write": lambda: dying(sends=(3, End.RESET)),
}


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("has_body", [False, True])
async def test_a_request_that_a_dead_connection_lost_goes_again_over_a_new_one(death, has_body):
    old, new = DEATHS[death](), Wire(answers=((answer(b"x"),),))
    if has_body:  # the death is noticed while the second piece is waited for
        old.when(old.taken + 200, End.RESET)
    async with watched(pool_of(old, new)) as pool:
        await ask(pool)
        blob = Blob(b"a" * 300, b"b", pause=5)
        response = await (put(pool, blob) if has_body else ask(pool))
        assert (response.body, response.is_early, old.is_closed) == (b"x", False, True)
        assert new.requests[0].body == (b"a" * 300 + b"b" if has_body else b"")


async def lose(*wires, blob=None, is_first=False):
    """Have a request fail on the first connection."""
    async with watched(pool_of(*wires)) as pool:
        if not is_first:
            await ask(pool)
        with pytest.raises(Disconnected):
            await (put(pool, blob) if blob else ask(pool))


async def test_a_request_is_repeated_once_and_never_on_a_new_connection():
    await lose(Wire(End.EOF), is_first=True)
    await lose(dying(End.EOF), Wire(End.EOF))


async def test_a_request_is_not_repeated_where_an_answer_began():
    await lose(dying(b"H", End.EOF))
    await lose(dying(GO_ON, End.RESET))


async def test_a_body_behind_the_last_answer_is_no_answer_for_good():
    """Some servers send one to HEAD. A new connection that says the same speaks no HTTP."""
    late = dying(b'{"errors":[]}' + answer())
    async with watched(pool_of(late, Wire(answers=((b'{"errors":[]}' + answer(),),)))) as pool:
        await ask(pool)
        for error in (Disconnected, ProtocolBroken):
            with pytest.raises(error, match="does not speak HTTP") as caught:
                await ask(pool)
            assert caught.value.retryable is (error is Disconnected)
        assert late.is_closed


async def test_a_body_is_not_repeated_where_its_second_piece_was_taken():
    old = Wire(answers=((answer(),),))
    old.when(len(b"GET /v2/ HTTP/1.1\r\nHost: registry.test\r\n\r\n") + 600, End.RESET)
    await lose(old, blob=Blob(b"a" * 300, b"b" * 300, b"c" * 300, pause=1))


async def test_a_first_piece_that_was_taken_whole_with_its_head_is_repeated():
    old, new = Wire(answers=((answer(),),)), Wire(answers=((answer(b"x"),),))
    piece = b"a" * 256 * 1024
    async with watched(pool_of(old, new)) as pool:
        await ask(pool)
        old.when(old.taken + len(piece) + 1, End.RESET)
        assert (await put(pool, Blob(piece, b"b", pause=5))).body == b"x"
    assert new.requests[0].body == piece + b"b"


async def test_a_body_of_which_much_was_taken_is_not_repeated():
    """Its connection was alive; who asks the session learns how much has arrived."""
    old = dying(sends=(400_000, Pause(1)))
    old.when(old.taken + 400_000, Pause(1), End.RESET)
    await lose(old, blob=Blob(b"a" * 500_000))


@pytest.mark.parametrize("status", [400, 404, 416])
async def test_a_session_that_a_repeated_body_finds_gone_says_nothing_of_the_body(status):
    gone = [Wire(answers=((answer(status=status),),)) for _ in range(2)]
    await lose(dying(End.EOF), gone[0], blob=Blob(b"a"))
    async with watched(pool_of(gone[1])) as pool:
        assert (await put(pool, Blob(b"a"))).status == status


def refuse():
    raise LoginExpired("refused meanwhile")


async def test_what_is_out_of_date_when_its_connection_was_lost_is_not_sent_again():
    new = Wire(answers=((answer(b"later"),),))
    pool = pool_of(dying(End.EOF), new)
    await ask(pool)
    with pytest.raises(LoginExpired):
        await pool.exchange(ORIGIN, GET, check_may_send=refuse)
    assert (new.requests, new.is_closed) == ([], False)
    assert (await ask(pool)).body == b"later", "over the new connection"


@pytest.mark.parametrize("case", ["get", "put", "unread"])
async def test_cancelling_at_any_time_closes_the_connection_or_keeps_it_whole(case):
    """I9. What is cancelled leaves no connection in use, and the next exchange its own answer."""
    is_done, moment = False, 0.0
    while not is_done:
        moment += 0.5
        slow = (Pause(1), answer(b"mine")[:-2], Pause(1), b"ne")
        old = Wire(sends=(20, Pause(1), 20, WANT_WRITE), answers=(slow,))
        pool = pool_of(old, Wire(answers=((answer(b"next"),),)))
        with anyio.move_on_after(moment) as scope:
            if case == "get":
                await ask(pool)
            elif case == "put":
                await put(pool, Blob(b"a" * 10, b"b", pause=1))
            else:
                await (await pool.exchange(ORIGIN, GET)).close()
        is_done = not scope.cancelled_caught
        assert pool._busy == set()
        if old.is_closed or not is_done:
            assert (await ask(pool)).body == b"next"
    assert moment > 2


# Any sequence of answers.


@st.composite
def answers_of_a_peer(draw):
    """Give a request, the bytes of an honest answer to it, its status and its body."""
    method = draw(st.sampled_from(["GET", "HEAD", "PUT"]))
    status = draw(st.sampled_from([200, 201, 204, 206, 304, 400, 404, 429, 500]))
    body = draw(st.binary(max_size=60))
    has_body = method != "HEAD" and status not in (204, 304)
    if draw(st.booleans()):
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) if has_body else b""
        frame = b"Transfer-Encoding: chunked\r\n\r\n" + (chunks + b"0\r\n\r\n" if has_body else b"")
    else:
        frame = b"Content-Length: %d\r\n\r\n" % len(body) + (body if has_body else b"")
    data = draw(st.sampled_from([b"", GO_ON])) + b"HTTP/1.1 %d Words\r\n" % status + frame
    return Request(method, "/"), data, status, body if has_body else b""


@fuzz(120)
@given(st.lists(answers_of_a_peer(), min_size=1, max_size=6), st.data())
async def test_each_request_gets_its_own_answer_whatever_came_before(talk, data):
    """In any packets, read to its end or not: no byte of one answer is in the next."""
    pool, open_wires = pool_of(), []

    async def dial(origin):
        open_wires.append(Wire(answers=(script,)))
        return open_wires[-1]

    pool.dial = dial
    async with watched(pool):
        for request, sent, status, body in talk:
            cuts = data.draw(st.sets(st.integers(1, 200), max_size=8))
            script = tuple(item for part in packets(sent, *cuts) for item in (Pause(0), part))
            for wire in open_wires:
                wire.answers.append(script)
            response = await pool.exchange(ORIGIN, request)
            assert response.status == status
            if data.draw(st.booleans()):
                assert await response.read(1000) == body
            await response.close()


FRAGMENTS = [
    OK, GO_ON, b"Content-Length: 3\r\n", b"Content-Length: 9\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Connection: close\r\n", b"\r\n", b"3\r\nabc\r\n", b"0\r\n\r\n", b"abc",
]  # fmt: skip


@fuzz(240)
@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from(FRAGMENTS)), max_size=12))
@example([OK, b"Transfer-Encoding: chunked\r\n", b"Content-Length: 3\r\n", b"\r\n", b"0\r\n\r\n"])
async def test_any_bytes_are_an_answer_or_an_error_of_the_wire(parts):
    wire = Wire(answers=((*(part for part in parts if part), End.EOF),))
    async with watched(pool_of(wire)) as pool:
        try:
            response = await ask(pool)
        except (WireError, ContentError) as error:
            assert str(error).isprintable()  # noqa: PT017
        else:
            assert 200 <= response.status < 1000
            assert len(response.body) <= len(b"".join(parts))
