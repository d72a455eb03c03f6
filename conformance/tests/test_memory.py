"""The network in memory is as slow, as full and as broken as it says, on the virtual clock."""

from __future__ import annotations

import anyio
import pytest

from conformance.evidence import Act
from conformance.memory import End, Link, network
from conformance.registry import App

pytestmark = pytest.mark.virtual_time


def now() -> float:
    return round(anyio.current_time(), 6)


async def read(end: End, count: int) -> bytes:
    room = memoryview(bytearray(count))
    while (got := end.read_into(room)) is None:
        await end.readable()
    return bytes(room[:got])


async def read_all(end: End, count: int) -> bytes:
    whole = b""
    while len(whole) < count and (piece := await read(end, count - len(whole))):
        whole += piece
    return whole


PING = b"GET /v2/ HTTP/1.1\r\nHost: r.test\r\n\r\n"


async def test_an_answer_takes_both_latencies_and_the_bandwidth() -> None:
    async with network() as net:
        net.listen(App(), "r.test", up=Link(latency=0.5), down=Link(latency=1.5, bandwidth=10))
        end = await net.connect("r.test", 80)
        assert now() == 2.0, "a connection takes one round trip"
        assert end.write(PING) == len(PING)
        assert (await read(end, 10), now()) == (b"HTTP/1.1 2", 5.0)
        assert (await read(end, 10), now()) == (b"00 OK\r\nCon", 6.0)


async def test_bandwidth_is_shared_by_the_connections_of_a_place() -> None:
    async with network() as net:
        app = App()
        digest = app.add_blob("app", bytes(900_000))
        net.listen(app, "r.test", down=Link(bandwidth=100_000))
        ended: list[float] = []

        async def pull() -> None:
            end = await net.connect("r.test", 80)
            end.write(f"GET /v2/app/blobs/{digest} HTTP/1.1\r\nHost: r.test\r\n\r\n".encode())
            await read_all(end, 900_000)
            ended.append(now())

        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(pull)
        assert min(ended) >= 17
        assert round(max(ended), 1) == 18.0


async def test_a_full_window_makes_the_writer_wait_until_the_reader_reads() -> None:
    async with network() as net:
        place = net.listen(App(), "r.test", up=Link(bandwidth=100))
        place.fail("silent")
        place.recover()
        end = await net.connect("r.test", 80)
        place.fail("silent")
        assert end.write(b"G" * 300) == 100
        assert end.write(b"G") is None
        with anyio.move_on_after(5) as scope:
            await end.writable()
        assert scope.cancelled_caught


async def test_a_close_arrives_behind_what_was_written_and_a_reset_at_once() -> None:
    async with network() as net:
        place = net.listen(App(), "r.test", down=Link(latency=3.0))
        asked = PING.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        end = await net.connect("r.test", 80)
        end.write(asked)
        whole = b""
        while piece := await read(end, 4096):
            whole += piece
        assert (whole.startswith(b"HTTP/1.1 200 OK"), whole.endswith(b"{}"), now()) == (
            True,
            True,
            6.0,
        )
        other = await net.connect("r.test", 80)
        other.write(PING)
        await anyio.sleep(1)
        place.reset_connections()
        with pytest.raises(ConnectionResetError):
            await read(other, 100)
        with pytest.raises(ConnectionResetError):
            other.write(PING)


async def test_an_answer_that_a_reset_destroys_is_a_failure_in_the_journal() -> None:
    async with network() as net:
        place = net.listen(App(), "r.test", down=Link(latency=3.0))
        for _ in range(2):
            end = await net.connect("r.test", 80)
            end.write(PING)
            await anyio.sleep(7)
            if place.journal.count("GET") == 1:
                await read(end, 4096)
        place.reset_connections()
        kept, lost = (Act("http://r.test", entry) for entry in place.journal.entries)
        assert [act.status for act in (kept, lost)] == [200, 200]
        assert (kept.is_success, lost.is_success) == (True, False)
        assert (kept.is_failure, lost.is_failure) == (False, True)


async def test_nobody_listens_under_another_name_or_port_or_in_an_outage() -> None:
    async with network() as net:
        place = net.listen(App(), "r.test")
        with pytest.raises(OSError, match="Name or service not known"):
            await net.connect("other.test", 80)
        with pytest.raises(ConnectionRefusedError):
            await net.connect("r.test", 443)
        async with place.outage("refused", 60):
            with pytest.raises(ConnectionRefusedError):
                await net.connect("r.test", 80)
        async with place.outage("silent", 60):
            await net.connect("r.test", 80)
        assert now() == 120.0, "a silent line takes connections when it is back"
        assert place.open_connections() == 1
