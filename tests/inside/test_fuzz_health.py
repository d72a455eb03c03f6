"""Whatever a client sends to the health listener, in whatever pieces: one answer of ours, or none."""

from __future__ import annotations

import contextlib
import json
from itertools import pairwise
from typing import Any
from unittest import mock

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from _regsync.app import health
from _regsync.edge import WANT_READ
from tests.fuzzing import fuzz, scraps

STATUSES = {200, 400, 404, 405, 431, 501, 503, 505}
SMALL = 4000  # bytes: a head of that size is taken in whatever pieces it comes
SECRET = "hunter2"


class Said:
    """A client that has said all it will; between two packets there is nothing to read."""

    def __init__(self, *packets: bytes, resets: bool = False) -> None:
        self._packets: list[bytes] = [part for each in packets if each for part in (b"", each)]
        self._resets = resets
        self.read, self.told = 0, b""

    def recv_into(self, buffer: memoryview) -> int:
        if not self._packets:
            if self._resets:
                raise ConnectionResetError("reset")
            return 0
        packet = self._packets.pop(0)
        if not packet:
            return WANT_READ
        count = min(len(packet), len(buffer))
        buffer[:count] = packet[:count]
        if packet[count:]:
            self._packets.insert(0, packet[count:])
        self.read += count
        return count

    def send_now(self, data: memoryview) -> int:
        self.told += data[:100]
        return min(100, len(data))

    async def wait(self, want: int) -> None:
        assert want == WANT_READ

    def answer(self) -> bytes:
        """Let the listener take all of it, and return what it says."""
        with mock.patch.object(health, "SocketStream", lambda own: own):
            own: Any = self
            client = health.Client(own, tell)
        with pytest.raises(StopIteration):  # nothing in it waits
            client.answer().send(None)
        return self.told


def tell(path: str) -> tuple[int, dict[str, Any]]:
    asked.append(path)
    return (200 if path == "/healthz" else 503), {"status": path}


asked: list[str] = []


def answered(*packets: bytes) -> tuple[int, bytes]:
    """Return status and body (0: no answer), after the answer has been held to the standard."""
    asked.clear()
    client = Said(*packets)
    found = client.answer()
    assert client.read < 8192
    if not found:
        return 0, b""
    # The method decides whether there is a body; the answer to a HEAD is the one with nothing
    # behind its head.
    _, _, body = found.partition(b"\r\n\r\n")
    peer = h11.Connection(h11.CLIENT)
    peer.send(h11.Request(method="GET" if body else "HEAD", target="/", headers=[("Host", "h")]))
    peer.send(h11.EndOfMessage())
    peer.receive_data(found)
    answer = peer.next_event()
    assert isinstance(answer, h11.Response)
    assert answer.status_code in STATUSES
    assert (b"connection", b"close") in list(answer.headers)
    if body:
        told = peer.next_event()
        assert isinstance(told, h11.Data)
        assert bytes(told.data) == body
        assert json.loads(body)
        assert isinstance(peer.next_event(), h11.EndOfMessage)
    assert not peer.trailing_data[0]
    assert SECRET.encode() not in found
    assert bool(asked) == (answer.status_code in (200, 503)), (
        "nobody is asked for an answer that is not given"
    )
    return answer.status_code, body


LINES = scraps(
    "/healthz /readyz http://h * ? Host: Transfer-Encoding : , \0 \x80",
    *("GET ", "HEAD ", "POST ", " ", "\t", " HTTP/1.1", " HTTP/1.0", " HTTP/2.0"),
    *("\r\n", "\r\n", "\n", "\r", "Host: h\r\n", "Content-Length: 0\r\n", "Content-Length: 5"),
    *("Transfer-Encoding: chunked\r\n", "Expect: 100-continue\r\n", "Connection: close\r\n"),
    *(f"X: {SECRET}\r\n", "0\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
)
HEADS = st.builds(
    "{}{}{}\r\n{}\r\n{}".format,
    st.sampled_from(["GET ", "HEAD ", "GET  ", "get ", "POST "]),
    st.sampled_from(["/healthz", "/readyz", "/readyz?x", "http://h/healthz", "/", f"/{SECRET}"]),
    st.sampled_from([" HTTP/1.1", " HTTP/1.0", " HTTP/1.2", " HTTP/3.0", ""]),
    scraps(
        "",
        *("Host: h\r\n", "Host: h\r\n", "Host: a b\r\n", "Content-Length: 5\r\n"),
        *("Content-Length: 5\r\n", "Transfer-Encoding: chunked\r\n", "X: y\r\n"),
        *(" folded\r\n", "X\r\n", "Expect: 100-continue\r\n"),
        most=5,
        other="",
    ),
    scraps("12345", "0\r\n\r\n", "GET /readyz HTTP/1.1\r\nHost: h\r\n\r\n", most=2),
)
SENT = (LINES | HEADS).map(lambda text: text.encode("latin-1", "replace")) | st.binary(max_size=200)
CUTS = st.lists(st.integers(0, 400), max_size=6)


def pieces(whole: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    return [whole[start:end] for start, end in pairwise(places)]


@fuzz(400)
@given(SENT, CUTS)
@example(b"", [])
@example(b"\x16\x03\x01\x02\x00\x01", [1])
@example(b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n", [*range(35)])
def test_any_bytes_have_one_answer_or_none_whatever_pieces_they_come_in(whole, cuts):
    assert answered(*pieces(whole, cuts)) == answered(whole)


@fuzz(60)
@given(HEADS.map(str.encode), st.integers(0, 20_000), CUTS)
def test_a_head_of_any_length_is_answered_after_less_than_8_kib(whole, padding, cuts):
    first, line, rest = whole.partition(b"\r\n")
    long = first + line + b"X: " + b"a" * padding + b"\r\n" + rest
    status, _ = answered(*pieces(long, cuts))
    if len(long) < SMALL:
        assert status == answered(long)[0]
    elif padding >= 8192:
        assert status in {400, 431}


@fuzz(60)
@given(SENT, CUTS)
def test_a_client_that_breaks_off_is_answered_or_gone(whole, cuts):
    with contextlib.suppress(ConnectionResetError):
        assert Said(*pieces(whole, cuts), resets=True).answer()[:9] in (b"HTTP/1.1 ", b"")
