"""What tools/bench.py puts around the program that it measures: a slow line, slow registries, a
clock.

    python -m tools.bench_peers delay SECONDS HOST:PORT     a TCP line, SECONDS long in each direction
    python -m tools.bench_peers slow PAIRS                  registries whose large blobs never end
    python -m tools.bench_peers lag PYZ ARGUMENT...         the program, with a clock in its event loop

Owns: peers that have to be processes of their own so that their time and memory are not the
client's. May not know: what is measured with them. Invariant: the first line on standard output is
the address (or addresses) to talk to; everything ends when its standard input ends, so that nothing
outlives the benchmark. Standard library only; `lag` imports anyio from the .pyz that it runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

__all__ = ["LARGE", "main"]

LARGE = 256 * 1024 * 1024  # bytes of each blob that `slow` offers
_PIECE = 64 * 1024
_PAUSE = 0.1  # seconds between two pieces that a slow target takes: 640 kB/s a stream
_TICK = 0.001

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def _until_stdin_ends() -> None:
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)


async def _listen(serve: Serve) -> tuple[asyncio.AbstractServer, str]:
    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(quietly, "127.0.0.1", 0, limit=_PIECE)
    return server, "{}:{}".format(*server.sockets[0].getsockname())


# ---------------------------------------------------------------- a line with a length


async def _carry(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, opened: float, delay: float
) -> None:
    """Pass bytes on `delay` after they came, none of them earlier than `delay` after `opened`."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def arrive() -> None:
        while True:
            due, data = await under_way.get()
            if (left := due - loop.time()) > 0:
                await asyncio.sleep(left)
            if not data:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            writer.write(data)

    arriving = asyncio.ensure_future(arrive())
    try:
        data = b"first"
        while data:
            data = await reader.read(_PIECE)
            under_way.put_nowait((max(loop.time(), opened) + delay, data))
        await arriving
    finally:
        arriving.cancel()


async def delay(seconds: float, address: str) -> None:
    """Stand in front of `address`. Connecting costs a round trip too: the first bytes leave one
    later.
    """
    host, _, port = address.rpartition(":")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened = asyncio.get_running_loop().time() + 2 * seconds
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        try:
            await asyncio.gather(
                _carry(reader, far_writer, opened, seconds),
                _carry(far_reader, writer, 0.0, seconds),
            )
        finally:
            far_writer.close()

    server, here = await _listen(serve)
    print(here, flush=True)
    await _until_stdin_ends()
    server.close()


# ---------------------------------------------------------------- registries that are too slow


def _layer(tag: str) -> str:
    return "sha256:" + hashlib.sha256(tag.encode()).hexdigest()


def _manifest(tag: str) -> bytes:
    """Name one large layer, different for each tag; nobody ever gets to its end to check it."""
    config = {
        "mediaType": "application/vnd.oci.empty.v1+json",
        "digest": "sha256:" + hashlib.sha256(b"{}").hexdigest(),
        "size": 2,
    }
    layer = {
        "mediaType": "application/vnd.oci.image.layer.v1.tar",
        "digest": _layer(tag),
        "size": LARGE,
    }
    kind = "application/vnd.oci.image.manifest.v1+json"
    return json.dumps(
        {"schemaVersion": 2, "mediaType": kind, "config": config, "layers": [layer]}
    ).encode()


class _Slow:
    """Sources that send without end and targets that take little at a time; says how many streams
    run.
    """

    def __init__(self) -> None:
        self.streams = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            method, path, _ = head.split(" ", 2)
            found = re.search(r"(?i)\r\ncontent-length: *(\d+)", head)
            length = int(found[1]) if found else 0
            if length > _PIECE:
                await self._take(reader)
            await reader.readexactly(length)
            name = path.partition("?")[0].rpartition("/")[2]
            if method == "GET" and "/blobs/" in path:
                await self._send_without_end(writer)
            elif method == "GET" and "/manifests/" in path:
                body = _manifest(name)
                kind = "application/vnd.oci.image.manifest.v1+json"
                await _answer(writer, "200 OK", body, f"Content-Type: {kind}")
            elif method == "POST":
                await _answer(
                    writer, "202 Accepted", b"", f"Location: {path.partition('?')[0]}{id(writer)}"
                )
            elif method == "PUT":
                await _answer(writer, "201 Created", b"")
            else:
                await _answer(writer, "404 Not Found", b"", head=method == "HEAD")

    async def _take(self, reader: asyncio.StreamReader) -> None:
        self.streams += 1
        print(self.streams, flush=True)
        while await reader.read(_PIECE):  # noqa: ASYNC110  the pause is what makes it slow
            await asyncio.sleep(_PAUSE)
        raise ConnectionError

    @staticmethod
    async def _send_without_end(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {LARGE}\r\n\r\n".encode())
        nothing = bytes(_PIECE)
        for _ in range(LARGE // _PIECE - 1):
            writer.write(nothing)
            await writer.drain()
        await asyncio.sleep(3600)


async def _answer(
    writer: asyncio.StreamWriter, status: str, body: bytes, *headers: str, head: bool = False
) -> None:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    writer.write("\r\n".join(lines).encode() + (b"" if head else body))
    await writer.drain()


async def slow(pairs: int) -> None:
    """Run `pairs` sources and `pairs` targets; print their addresses, then the streams that run."""
    peers = _Slow()
    servers = [await _listen(peers.serve) for _ in range(2 * pairs)]
    print(" ".join(address for _, address in servers), flush=True)
    await _until_stdin_ends()


# ---------------------------------------------------------------- a clock in the program's event
# loop


def lag(pyz: str, arguments: Sequence[str]) -> int:
    """Run the program with a ticker beside each run; print the longest gaps as JSON on standard
    error.

    `cpu_ms` is the longest that the program itself computed between two ticks; `wall_ms` has in it
    what the system gave to others meanwhile.
    """
    sys.path[:0] = ["{}/cp{}{}".format(pyz, *sys.version_info[:2]), pyz]
    import anyio

    import regsync
    from _regsync.sync.run import Run

    gaps: list[tuple[float, float]] = []

    async def tick() -> None:
        while True:
            wall = time.perf_counter()
            cpu = time.thread_time()
            await anyio.sleep(_TICK)
            gaps.append((time.perf_counter() - wall - _TICK, time.thread_time() - cpu))

    conduct = Run._conduct

    async def timed(self: Run, *given: Any) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tick)
            await conduct(self, *given)
            tasks.cancel_scope.cancel()

    Run._conduct = timed  # type: ignore[method-assign, assignment]
    status = regsync.main(arguments)
    walls, cpus = (sorted(1000 * gap[side] for gap in gaps) for side in (0, 1))
    found = {"wall_ms": walls[-1], "cpu_ms": cpus[-1]}
    found["wall_p99_ms"], found["cpu_p99_ms"] = (
        side[len(gaps) * 99 // 100] for side in (walls, cpus)
    )
    sys.stderr.write(json.dumps(found) + "\n")
    return status


def main(argv: Sequence[str]) -> int:
    """Be one of the peers until standard input ends."""
    if argv[0] == "lag":
        return lag(argv[1], argv[2:])
    asyncio.run(delay(float(argv[1]), argv[2]) if argv[0] == "delay" else slow(int(argv[1])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
