"""Checks of the workflow Push, first part: uploads of blobs in every way, and mounts.

Owns: the expected answers to uploads; the check that refused bytes are not stored.
May not know: how a registry stores blobs.
Invariants: each check uploads its own bytes, which no other check uploads.
Follows: sections "Pushing blobs" and "Mounting a blob from another repository" of the OCI
distribution specification 1.1.1.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..client.http import Reply, with_query
from ..messages import digest_of
from .checks import (
    BLOBS,
    OCTETS,
    Absent,
    Failed,
    Run,
    check,
    expect,
    expect_blob,
    expect_body,
    expect_code,
    expect_header,
    location_of,
    set_up,
    skip_if,
)

_TWO_STEPS = "POST then PUT"
_SINGLE = "Single POST"
_CHUNKS = "Pushing a blob in chunks"
_MOUNT = "Mounting a blob from another repository"


def _open(run: Run) -> Reply:
    """Open an upload session. Returns the answer."""
    return expect(run.ask("POST", "blobs/uploads/", None, b""), 202)


def _start(run: Run) -> str:
    """Open an upload session. Returns its Location."""
    return location_of(_open(run))


def _headers(body: bytes, start: int | None) -> Mapping[str, str]:
    """Return the headers of a body that begins at the byte `start` of its blob.

    Without `start`, there is no Content-Range.
    """
    if start is None:
        return OCTETS
    return {**OCTETS, "Content-Range": f"{start}-{start + len(body) - 1}"}


def _patch(run: Run, where: str, body: bytes, start: int | None = None) -> Reply:
    """Send a chunk. Returns the answer with any status."""
    return run.ask("PATCH", where, _headers(body, start), body)


def _finish(
    run: Run, where: str, digest: str, body: bytes = b"", start: int | None = None
) -> Reply:
    """Finish an upload session by PUT. Returns the answer with any status."""
    headers = _headers(body, start) if body else None
    reply = run.ask("PUT", with_query(where, digest=digest), headers, body)
    if reply.status == 201:
        run.delete_later(f"blobs/{digest}")
    return reply


def _new_blob(run: Run, size: int = 500) -> tuple[str, bytes]:
    data = run.seed.blob(size)
    return digest_of(data), data


# Whole blobs.


@check(
    "push",
    "POST upload",
    "a session",
    f"{_TWO_STEPS}: MUST be 202 Accepted with Location (end-4a)",
    "blob",
)
def start(run: Run) -> None:
    _start(run)


@check(
    "push",
    "POST upload",
    "each its own session",
    f"{_TWO_STEPS}: MUST be a unique session ID",
    "blob",
)
def sessions(run: Run) -> None:
    if _start(run) == _start(run):
        raise Failed("two sessions have one Location")


@check(
    "push",
    "PUT upload",
    "a whole blob",
    f"{_TWO_STEPS}: MUST be 201 Created with Location (end-6)",
    tuple(BLOBS),
)
def post_and_put(run: Run, kind: str) -> None:
    digest, data = run.blob(kind)
    reply = _finish(run, _start(run), digest, data)
    if kind == "sha512 blob":
        skip_if(reply, 400)
    where = location_of(expect(reply, 201))
    expect_body(expect(run.ask("GET", where), 200), data)
    expect_blob(run, digest, data)


@check(
    "push",
    "PUT upload",
    "a blob that is there already",
    f"{_TWO_STEPS}: MUST be 201 Created",
    "blob",
)
def put_twice(run: Run) -> None:
    digest, data = _new_blob(run)
    run.push_blob(digest, data)
    run.push_blob(digest, data)
    expect_blob(run, digest, data)


def _expect_refusal(reply: Reply) -> None:
    """Fail unless the answer refuses an upload because of its digest."""
    expect_code(expect(reply, 400), "DIGEST_INVALID", "BLOB_UPLOAD_INVALID")


@check(
    "push",
    "PUT upload",
    "bytes of another digest, 400",
    "Endpoints: 400 (end-6); DIGEST_INVALID",
    "blob",
)
def put_other_bytes(run: Run) -> None:
    digest, _ = _new_blob(run)
    other, data = _new_blob(run)
    _expect_refusal(_finish(run, _start(run), digest, data))
    for name in (digest, other):
        expect(run.ask("GET", f"blobs/{name}"), 404)


@check(
    "push",
    "PUT upload",
    "without digest, 400",
    f"{_CHUNKS}: MUST include the digest; 400 (end-6)",
    "malformed",
)
def put_without_digest(run: Run) -> None:
    where = _start(run)
    _, data = _new_blob(run)
    _expect_refusal(run.ask("PUT", where, OCTETS, data))


@check("push", "PUT upload", "a digest that is none, 400", "Endpoints: 400 (end-6)", "malformed")
def put_malformed_digest(run: Run) -> None:
    _expect_refusal(_finish(run, _start(run), "sha256:totallywrong", b"x"))


@check("push", "PUT upload", "to no session, 404", "Endpoints: 404 (end-6)", "absent")
def put_to_nothing(run: Run) -> None:
    digest, data = _new_blob(run)
    where = _start(run)
    expect(_finish(run, where, digest, data), 201)
    expect_code(expect(_finish(run, where, digest, data), 404), "BLOB_UPLOAD_UNKNOWN")


# One request.


@check(
    "push",
    "POST upload digest",
    "201 and it is there, or 202",
    f"{_SINGLE}: MUST be 201 or SHOULD be 202 (end-4b)",
    ("blob", "empty blob"),
)
def single_post(run: Run, kind: str) -> None:
    digest, data = _new_blob(run) if kind == "blob" else run.blob(kind)
    reply = run.ask("POST", with_query("blobs/uploads/", digest=digest), OCTETS, data)
    where = location_of(expect(reply, 201, 202))
    if reply.status == 202:
        if kind == "blob":
            expect(run.ask("GET", f"blobs/{digest}"), 404)
        expect(_finish(run, where, digest, data), 201)
    else:
        run.delete_later(f"blobs/{digest}")
        expect_body(expect(run.ask("GET", where), 200), data)
    expect_blob(run, digest, data)


@check(
    "push",
    "POST upload digest",
    "bytes of another digest, 400",
    f"{_SINGLE}: the digest MUST match; 400 (end-4b)",
    "blob",
)
def single_post_other_bytes(run: Run) -> None:
    digest, _ = _new_blob(run)
    _, data = _new_blob(run)
    reply = run.ask("POST", with_query("blobs/uploads/", digest=digest), OCTETS, data)
    if reply.status == 202:
        raise Absent(f"{reply}, a single POST only opens a session")
    _expect_refusal(reply)
    expect(run.ask("GET", f"blobs/{digest}"), 404)


# Chunks.


def _least_chunk(reply: Reply) -> int:
    """Return the minimum length of a chunk in bytes: the registry's, but at least 300."""
    header = reply.header("OCI-Chunk-Min-Length")
    return max(int(header) if header.isdigit() else 0, 300)


class _Session:
    """An upload session with a blob of three chunks. The first two have the minimum length."""

    def __init__(self, run: Run) -> None:
        self.run = run
        opened = _open(run)
        self.where = location_of(opened)  # the newest Location
        self.size = _least_chunk(opened)  # bytes of each of the first two chunks
        self.digest, self.data = _new_blob(run, self.size * 2 + 100)

    def chunk(self, number: int) -> bytes:
        return self.data[number * self.size : (number + 1) * self.size]

    def patch(self, number: int) -> Reply:
        """Send a chunk. Returns the answer with any status."""
        return _patch(self.run, self.where, self.chunk(number), number * self.size)

    def patch_first(self) -> str:
        """Send the first chunk. Returns the Location that it was sent to, which is old then."""
        used = self.where
        self.expect_received(self.patch(0), 202, self.size)
        return used

    def expect_received(self, reply: Reply, status: int, count: int) -> None:
        """Fail unless the registry has the first `count` bytes. The answer has a new Location."""
        expect(reply, status)
        expect_header(reply, "Range", f"0-{count - 1}")
        self.where = location_of(reply)

    def finish(self, body: bytes = b"", start: int | None = None) -> None:
        """Send the last bytes by PUT. Fail unless the whole blob is stored then."""
        expect(_finish(self.run, self.where, self.digest, body, start), 201)
        expect_blob(self.run, self.digest, self.data)


@check(
    "push",
    "PATCH upload",
    "a stream without Content-Range",
    f"{_CHUNKS}: MUST be 202 (end-5), then 201",
    "blob",
)
def streamed(run: Run) -> None:
    session = _Session(run)
    session.where = location_of(expect(_patch(run, session.where, session.data), 202))
    session.finish()


@check(
    "push",
    "PATCH upload",
    "chunks in order",
    f"{_CHUNKS}: MUST be 202 with Location and Range (end-5)",
    "blob",
)
def chunked(run: Run) -> None:
    session = _Session(run)
    session.patch_first()
    session.expect_received(session.patch(1), 202, session.size * 2)
    session.expect_received(session.patch(2), 202, len(session.data))
    reply = expect(_finish(run, session.where, session.digest), 201)
    expect_body(expect(run.ask("GET", location_of(reply)), 200), session.data)


@check(
    "push",
    "PUT upload",
    "with the last chunk",
    f"{_CHUNKS}: MAY be uploaded in the closing PUT",
    "blob",
)
def last_chunk_by_put(run: Run) -> None:
    session = _Session(run)
    session.patch_first()
    session.finish(session.data[session.size :], session.size)


@check(
    "push",
    "PATCH upload",
    "the second chunk first, 416",
    f"{_CHUNKS}: MUST respond with 416",
    "blob",
)
def second_chunk_first(run: Run) -> None:
    session = _Session(run)
    expect(session.patch(1), 416)


@check("push", "PATCH upload", "a chunk left out, 416", f"{_CHUNKS}: MUST respond with 416", "blob")
def chunk_left_out(run: Run) -> None:
    session = _Session(run)
    session.patch_first()
    expect(session.patch(2), 416)


@check("push", "PATCH upload", "a chunk twice, 416", f"{_CHUNKS}: MUST respond with 416", "blob")
def chunk_twice(run: Run) -> None:
    session = _Session(run)
    used = session.patch_first()
    expect(_patch(run, used, session.chunk(0), 0), 416)


@check(
    "push",
    "PUT upload",
    "a last chunk out of order, 416",
    f"{_CHUNKS}: MUST respond with 416",
    "blob",
)
def put_out_of_order(run: Run) -> None:
    session = _Session(run)
    session.patch_first()
    start = session.size * 2
    expect(_finish(run, session.where, session.digest, session.chunk(2), start), 416)


@check(
    "push",
    "GET upload",
    "where it stands, and it goes on",
    f"{_CHUNKS}: MUST be 204 with Location and Range (end-13)",
    "blob",
)
def status_of_upload(run: Run) -> None:
    session = _Session(run)
    session.patch_first()
    session.expect_received(run.ask("GET", session.where), 204, session.size)
    session.expect_received(session.patch(1), 202, session.size * 2)
    session.finish(session.chunk(2))


@check(
    "push",
    "GET upload",
    "by an old Location",
    f"{_CHUNKS}: the Location of any preceding request",
    "blob",
)
def status_by_old_location(run: Run) -> None:
    session = _Session(run)
    used = session.patch_first()
    session.expect_received(run.ask("GET", used), 204, session.size)
    session.finish(session.data[session.size :])


@check(
    "push",
    "GET upload",
    "after a 416 it goes on",
    f"{_CHUNKS}: to get the current status after a 416",
    "blob",
)
def resumed(run: Run) -> None:
    session = _Session(run)
    used = session.patch_first()
    expect(_patch(run, used, session.chunk(0), 0), 416)
    session.expect_received(run.ask("GET", used), 204, session.size)
    session.where = location_of(expect(session.patch(1), 202))
    session.finish(session.chunk(2))


@check(
    "push",
    "GET upload",
    "of a closed session, 404",
    f"{_CHUNKS}: closed with PUT; 404 (end-13)",
    "absent",
)
def closed(run: Run) -> None:
    digest, data = _new_blob(run)
    where = _start(run)
    expect(_finish(run, where, digest, data), 201)
    expect_code(expect(run.ask("GET", where), 404), "BLOB_UPLOAD_UNKNOWN")


@check("push", "PATCH upload", "to a closed session, 404", "Endpoints: 404 (end-5)", "absent")
def patch_closed(run: Run) -> None:
    digest, data = _new_blob(run)
    where = _start(run)
    expect(_finish(run, where, digest, data), 201)
    expect_code(expect(_patch(run, where, data, 0), 404), "BLOB_UPLOAD_UNKNOWN")


# Mounts.


def _mount(run: Run, digest: str, source: str = "") -> Reply:
    """Mount a blob from the repository `source`, or from any. Returns the answer with any status."""
    named = {"from": source} if source else {}
    target = with_query("blobs/uploads/", mount=digest, **named)
    return run.ask("POST", target, None, b"", repository=run.mounting)


def _push_to_mount(run: Run) -> tuple[str, bytes]:
    """Push a new blob to the repository from which it will be mounted."""
    digest, data = _new_blob(run)
    with set_up():
        run.push_blob(digest, data)
    return digest, data


def _expect_session(run: Run, reply: Reply, digest: str, data: bytes) -> None:
    """Fail unless a refused mount has opened a session to which the blob can be uploaded."""
    where = location_of(expect(reply, 202))
    expect(run.ask("PUT", with_query(where, digest=digest), OCTETS, data), 201)
    run.delete_later(f"blobs/{digest}", run.mounting)
    expect_blob(run, digest, data, run.mounting)


@check(
    "push",
    "POST upload mount",
    "a blob of another repository",
    f"{_MOUNT}: MUST be 201 with Location, SHOULD be 202 (end-11)",
    "blob",
)
def mounted(run: Run) -> None:
    digest, data = _push_to_mount(run)
    reply = _mount(run, digest, run.repository)
    if expect(reply, 201, 202).status == 202:
        _expect_session(run, reply, digest, data)
        raise Absent(f"{reply}, nothing is mounted")
    run.delete_later(f"blobs/{digest}", run.mounting)
    expect_body(expect(run.ask("GET", location_of(reply)), 200), data)
    expect_blob(run, digest, data, run.mounting)


@check(
    "push",
    "POST upload mount",
    "without from",
    f"{_MOUNT}: MAY treat from as optional (end-11)",
    "blob",
)
def mounted_from_anywhere(run: Run) -> None:
    digest, data = _push_to_mount(run)
    reply = _mount(run, digest)
    if expect(reply, 201, 202).status == 202:
        _expect_session(run, reply, digest, data)
    else:
        run.delete_later(f"blobs/{digest}", run.mounting)
        expect_blob(run, digest, data, run.mounting)


@check(
    "push",
    "POST upload mount",
    "202 where the source has it not",
    f"{_MOUNT}: SHOULD return a 202",
    "absent",
)
def mounted_from_a_place_without_it(run: Run) -> None:
    digest, data = _new_blob(run)
    _expect_session(run, _mount(run, digest, run.repository), digest, data)


@check(
    "push",
    "POST upload mount",
    "202 without from where nobody has it",
    f"{_MOUNT}: SHOULD return a 202",
    "absent",
)
def mounted_from_nowhere(run: Run) -> None:
    digest, data = _new_blob(run)
    _expect_session(run, _mount(run, digest), digest, data)
