"""Whatever bytes a peer sends, an exchange has an answer or one declared error, and the next one is
in step.

Answers are pieces of HTTP in good and bad order, cut into packets anywhere; time is virtual. What
is read of a well-formed answer is what was put into it (RFC 9112 sections 6 and 7).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from _regsync.errors import SyncError
from _regsync.net.http1 import Request, Response
from tests.fuzzing import fuzz, in_virtual_time
from tests.inside.wires import ORIGIN, Blob, End, Item, Pause, Wire, connection, pool_of

MARK = b"HTTP/1.1 299 Mark\r\nContent-Length: 4\r\n\r\nmark"
# h11 holds at most a head of 64 KiB, and what was read with it.
_MOST_HELD = 64 * 1024 + 16 * 1024

STATUS_LINES = st.sampled_from([
    b"HTTP/1.1 200 OK", b"HTTP/1.1 200 OK", b"HTTP/1.1 206 Part", b"HTTP/1.0 200 OK", b"HTTP/1.1 204 None",
    b"HTTP/1.1 304 Same", b"HTTP/1.1 401 Login", b"HTTP/1.1 500 Oops", b"HTTP/1.1 100 Go on", b"HTTP/1.1 103 Hints",
    b"HTTP/1.1 101 Switch", b"HTTP/1.1 999 What", b"HTTP/1.1 200", b"HTTP/2 200", b"ICY 200 OK", b"HTTP/1.1 2000 x",
    b"",
])  # fmt: skip
HEADERS = st.sampled_from([
    b"Content-Length: 0", b"Content-Length: 3", b"Content-Length: 3", b"Content-Length: 5", b"Content-Length: 3, 3",
    b"Content-Length: 3, 4", b"Content-Length: +3", b"Content-Length: -1", b"Content-Length: 0x3", b"content-length:3 ",
    b"Content-Length: 99999999999999999999", b"Content-Length: " + b"9" * 30, b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: Chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: identity",
    b"Transfer-Encoding: chunked, chunked", b"Transfer-Encoding:\tchunked\t", b"Connection: close",
    b"Connection: keep-alive", b"Connection: x, CLOSE", b"Content-Encoding: gzip", b"Location: /x", b"X: \xff\xfe",
    b"X:", b" folded", b"\tfolded: too", b"Bad Name: x", b"NoColon", b": nameless", b"X: a\x00b", b"X: a\rb",
    b"Trailer: X", b"Upgrade: h2c", b"X: " + b"y" * 70_000,
])  # fmt: skip
BODIES = st.sampled_from([
    b"", b"abc", b"hello", b"3\r\nabc\r\n0\r\n\r\n", b"3;x=y\r\nabc\r\n0\r\n\r\n",
    b"3\r\nabc\r\n0\r\nTrailer: x\r\n\r\n",
    b"0\r\n\r\n", b"FFFFFFFFFFFFFFFFFFFFF\r\n", b"-1\r\n", b"3\nabc\n0\n\n", b"3\r\nabcd\r\n",
    b"0\r\n" + b"T: x\r\n" * 20_000,
    b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad", MARK[:30], b"\r\n", b"\x00",
])  # fmt: skip
LINE_ENDS = st.sampled_from([b"\r\n"] * 12 + [b"\n", b"\r", b"\r\r\n"])


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    whole = b""
    for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
        for line in (draw(STATUS_LINES), *draw(st.lists(HEADERS, max_size=3)), b""):
            whole += line + draw(LINE_ENDS)
        whole += b"".join(draw(st.lists(BODIES, max_size=2)))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        place = draw(st.integers(0, len(whole)))
        whole = (
            whole[:place] + draw(st.binary(max_size=3)) + whole[place + draw(st.integers(0, 3)) :]
        )
    return whole


def packets(whole: bytes, cuts: list[int]) -> list[Item]:
    places = sorted({0, len(whole), *(cut % (len(whole) + 1) for cut in cuts)})
    return [whole[start:end] for start, end in pairwise(places)]


CUTS = st.lists(st.integers(0, 200_000), max_size=5)
ENDS = st.sampled_from([(), (End.EOF,), (End.RESET,)])
METHODS = st.sampled_from(["GET", "GET", "HEAD", "POST"])


@fuzz(200)
@given(answers(), CUTS, ENDS, METHODS, st.sampled_from([0, 3, 100_000]))
@example(
    b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcHTTP/1.1 200 OK\r\n\r\n", [41], (), "GET", 3
)
def test_any_answer_is_read_or_refused_and_the_next_exchange_is_in_step(
    whole, cuts, end, method, limit
):
    async def work() -> None:
        wire = Wire(answers=((*packets(whole, cuts), *end), (MARK,)))
        pool = pool_of(wire, Wire(answers=((MARK,),)))
        try:
            async with pool.lease(ORIGIN) as lease:
                response = await lease.exchange(Request(method, "/v2/"))
                body = await response.read(limit)
        except SyncError:
            pass
        else:
            assert len(body) <= limit
            if response.length is not None and response.status in (200, 206):
                assert len(body) == response.length
            assert len(response._connection.unread()) <= _MOST_HELD
        async with pool.lease(ORIGIN) as lease:
            response = await lease.exchange(Request("GET", "/v2/"))
            assert (response.status, await response.read(9)) == (299, b"mark")

    in_virtual_time(work)


def framed(body: bytes, framing: str, sizes: list[int]) -> bytes:
    if framing != "chunked":
        return (
            b"Content-Length: %d\r\n\r\n" % len(body) if framing == "length" else b"\r\n"
        ) + body
    chunks, at = b"", 0
    for size in [*sizes, len(body)]:
        if chunk := body[at : at + size]:
            chunks += b"%x\r\n%s\r\n" % (len(chunk), chunk)
        at += size
    return b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


@fuzz(100)
@given(
    st.sampled_from([200, 206, 404, 500]),
    st.binary(max_size=300),
    st.sampled_from(["length", "chunked", "close"]),
    st.lists(st.integers(1, 50), max_size=4),
    CUTS,
    st.integers(0, 3),
    st.booleans(),
)
def test_what_was_put_into_an_answer_is_read_from_it(
    status, body, framing, sizes, cuts, interim, closing
):
    whole = (
        b"HTTP/1.1 103 Hints\r\nLink: </x>\r\n\r\n" * interim + b"HTTP/1.1 %d Words\r\n" % status
    )
    whole += b"Connection: close\r\n" * closing + framed(body, framing, sizes)
    read: list[Any] = []

    async def work() -> None:
        end = (End.EOF,) if framing == "close" else ()
        pool = pool_of(Wire(answers=((*packets(whole, cuts), *end),)))
        async with pool.lease(ORIGIN) as lease:
            response = await lease.exchange(Request("GET", "/v2/"))
            read.append((response.status, await response.read(1000)))
        read.append(pool.reuse(ORIGIN) is not None)

    in_virtual_time(work)
    assert read == [(status, body), framing != "close" and not closing]


@fuzz(100)
@given(
    answers(),
    CUTS,
    ENDS,
    st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=4),
    st.integers(0, 300),
    st.lists(
        st.integers(1, 99) | st.sampled_from([-2, End.RESET, Pause(5), Pause(90)]), max_size=5
    ),
    st.integers(0, 2),
)
def test_an_upload_ends_whatever_is_answered_whenever(
    whole, cuts, end, pieces, after, sends, missing
):
    async def work() -> None:
        wire = Wire(sends=tuple(sends))
        wire.after(after, *packets(whole, cuts), *end)
        blob = Blob(*pieces, pause=1.0, length=sum(map(len, pieces)) + missing)
        sent = connection(wire)
        try:
            response = await sent.exchange(Request("PUT", "/u"), await blob.next(), blob, 300)
        except SyncError:
            return
        assert isinstance(response, Response)
        if not response.is_early:
            assert wire.requests[0].whole
            assert wire.requests[0].body == b"".join(pieces)

    in_virtual_time(work)


@pytest.mark.parametrize(
    "sent", [b"3\r\nabc\r\n0\r\n" + b"T: x\r\n" * 20_000, b"F" * 200_000, b"3;" + b"x" * 200_000]
)
def test_framing_without_end_is_not_held(sent):
    async def work() -> None:
        wire = Wire(answers=((b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", sent),))
        lease = pool_of(wire).lease(ORIGIN)
        with pytest.raises(SyncError):
            await (await lease.exchange(Request("GET", "/v2/"))).read(100)
        assert (
            sum(map(len, (item for item in wire.incoming if isinstance(item, bytes))))
            > len(sent) - _MOST_HELD - 99
        )

    in_virtual_time(work)
