"""Checks of the workflow Push, first part: uploads of blobs in every way, and mounts.

Owns: the expected answers to uploads; the check that refused bytes are not stored.
May not know: how a registry stores blobs.
Invariants: each check uploads its own bytes, which no other check uploads.
Follows: sections "Pushing blobs" and "Mounting a blob from another repository" of the OCI
distribution specification 1.1.1.
"""

from __future__ import annotations

from ..client.http import Reply, with_query
from ..messages import digest_of
from .checks import (
    BLOBS,
    OCTETS,
    Failed,
    Run,
    Skipped,
    check,
    expect,
    expect_body,
    expect_code,
    location_of,
    skip_if,
)

_TWO_STEPS = "POST then PUT"
_SINGLE = "Single POST"
_CHUNKS = "Pushing a blob in chunks"
_MOUNT = "Mounting a blob from another repository"


def _start(run: Run, target: str = "blobs/uploads/", repository: str | None = None) -> Reply:
    """Open an upload session. Returns the answer."""
    reply = expect(run.ask("POST", target, None, b"", repository=repository), 202)
    location_of(reply)
    return reply


def _finish(run: Run, where: str, digest: str, body: bytes = b"", **headers: str) -> Reply:
    """Finish an upload session by PUT. Returns the answer with any status."""
    sent = {
        **(OCTETS if body else {}),
        **{key.replace("_", "-"): value for key, value in headers.items()},
    }
    reply = run.ask("PUT", with_query(where, digest=digest), sent, body)
    if reply.status == 201:
        run.delete_later(f"blobs/{digest}")
    return reply


def _patch(run: Run, where: str, body: bytes, start: int | None = None) -> Reply:
    """Send a chunk, with Content-Range if `start` is given. Returns the answer with any status."""
    sent = dict(OCTETS)
    if start is not None:
        sent["Content-Range"] = f"{start}-{start + len(body) - 1}"
    return run.ask("PATCH", where, sent, body)


def _expect_stored(run: Run, digest: str, data: bytes, repository: str | None = None) -> None:
    expect_body(expect(run.ask("GET", f"blobs/{digest}", repository=repository), 200), data)


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
    if location_of(_start(run)) == location_of(_start(run)):
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
    reply = _finish(run, location_of(_start(run)), digest, data)
    if kind == "sha512 blob":
        skip_if(reply, 400)
    where = location_of(expect(reply, 201))
    expect_body(expect(run.ask("GET", where), 200), data)
    _expect_stored(run, digest, data)


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
    _expect_stored(run, digest, data)


def _expect_refusal(run: Run, reply: Reply, *statuses: int) -> None:
    """Fail unless the answer is a refusal of bytes that have another digest."""
    expect(reply, *statuses)
    expect_code(reply, "DIGEST_INVALID", "BLOB_UPLOAD_INVALID")


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
    _expect_refusal(run, _finish(run, location_of(_start(run)), digest, data), 400)
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
    where = location_of(_start(run))
    _, data = _new_blob(run)
    _expect_refusal(run, run.ask("PUT", where, OCTETS, data), 400)


@check("push", "PUT upload", "a digest that is none, 400", "Endpoints: 400 (end-6)", "malformed")
def put_malformed_digest(run: Run) -> None:
    _expect_refusal(run, _finish(run, location_of(_start(run)), "sha256:totallywrong", b"x"), 400)


@check("push", "PUT upload", "to no session, 404", "Endpoints: 404 (end-6)", "absent")
def put_to_nothing(run: Run) -> None:
    digest, data = _new_blob(run)
    where = location_of(_start(run))
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
    _expect_stored(run, digest, data)


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
        raise Skipped(f"optional and not here: {reply}, a single POST only opens a session")
    _expect_refusal(run, reply, 400)
    expect(run.ask("GET", f"blobs/{digest}"), 404)


# Chunks.


def _least_chunk(reply: Reply) -> int:
    """Return the minimum length of a chunk in bytes: the registry's, but at least 300."""
    header = reply.header("OCI-Chunk-Min-Length")
    return max(int(header) if header.isdigit() else 0, 300)


def _expect_range(run: Run, reply: Reply, status: int, end: int) -> str:
    """Fail unless the upload has received the bytes up to `end`. Returns its next Location."""
    expect(reply, status)
    if reply.header("Range") != f"0-{end}":
        raise Failed(f"{reply} with Range {reply.header('Range')!r}, not '0-{end}'")
    return location_of(reply)


class _Session:
    """An upload session with a blob of three chunks. The first two have the minimum length."""

    def __init__(self, run: Run) -> None:
        opened = _start(run)
        self.size = _least_chunk(opened)
        self.digest, self.data = _new_blob(run, self.size * 2 + 100)
        self.where = location_of(opened)

    def chunk(self, number: int) -> bytes:
        return self.data[number * self.size : (number + 1) * self.size]

    def patch(self, run: Run, number: int) -> Reply:
        return _patch(run, self.where, self.chunk(number), number * self.size)

    def patch_first(self, run: Run) -> str:
        """Send the first chunk. Returns the Location that it was sent to, which is old then."""
        used = self.where
        self.where = _expect_range(run, self.patch(run, 0), 202, self.size - 1)
        return used


@check(
    "push",
    "PATCH upload",
    "a stream without Content-Range",
    f"{_CHUNKS}: MUST be 202 (end-5), then 201",
    "blob",
)
def streamed(run: Run) -> None:
    session = _Session(run)
    where = location_of(expect(_patch(run, session.where, session.data), 202))
    expect(_finish(run, where, session.digest), 201)
    _expect_stored(run, session.digest, session.data)


@check(
    "push",
    "PATCH upload",
    "chunks in order",
    f"{_CHUNKS}: MUST be 202 with Location and Range (end-5)",
    "blob",
)
def chunked(run: Run) -> None:
    session = _Session(run)
    session.patch_first(run)
    session.where = _expect_range(run, session.patch(run, 1), 202, session.size * 2 - 1)
    session.where = _expect_range(run, session.patch(run, 2), 202, len(session.data) - 1)
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
    session.patch_first(run)
    rest = session.data[session.size :]
    content_range = f"{session.size}-{len(session.data) - 1}"
    expect(_finish(run, session.where, session.digest, rest, Content_Range=content_range), 201)
    _expect_stored(run, session.digest, session.data)


@check(
    "push",
    "PATCH upload",
    "the second chunk first, 416",
    f"{_CHUNKS}: MUST respond with 416",
    "blob",
)
def second_chunk_first(run: Run) -> None:
    session = _Session(run)
    expect(session.patch(run, 1), 416)


@check("push", "PATCH upload", "a chunk left out, 416", f"{_CHUNKS}: MUST respond with 416", "blob")
def chunk_left_out(run: Run) -> None:
    session = _Session(run)
    session.patch_first(run)
    expect(session.patch(run, 2), 416)


@check("push", "PATCH upload", "a chunk twice, 416", f"{_CHUNKS}: MUST respond with 416", "blob")
def chunk_twice(run: Run) -> None:
    session = _Session(run)
    used = session.patch_first(run)
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
    session.patch_first(run)
    tail = session.chunk(2)
    content_range = f"{session.size * 2}-{len(session.data) - 1}"
    expect(_finish(run, session.where, session.digest, tail, Content_Range=content_range), 416)


@check(
    "push",
    "GET upload",
    "where it stands, and it goes on",
    f"{_CHUNKS}: MUST be 204 with Location and Range (end-13)",
    "blob",
)
def status_of_upload(run: Run) -> None:
    session = _Session(run)
    session.patch_first(run)
    session.where = _expect_range(run, run.ask("GET", session.where), 204, session.size - 1)
    session.where = _expect_range(run, session.patch(run, 1), 202, session.size * 2 - 1)
    expect(_finish(run, session.where, session.digest, session.chunk(2)), 201)
    _expect_stored(run, session.digest, session.data)


@check(
    "push",
    "GET upload",
    "by an old Location",
    f"{_CHUNKS}: the Location of any preceding request",
    "blob",
)
def status_by_old_location(run: Run) -> None:
    session = _Session(run)
    used = session.patch_first(run)
    session.where = _expect_range(run, run.ask("GET", used), 204, session.size - 1)
    expect(_finish(run, session.where, session.digest, session.data[session.size :]), 201)
    _expect_stored(run, session.digest, session.data)


@check(
    "push",
    "GET upload",
    "after a 416 it goes on",
    f"{_CHUNKS}: to get the current status after a 416",
    "blob",
)
def resumed(run: Run) -> None:
    session = _Session(run)
    used = session.patch_first(run)
    expect(_patch(run, used, session.chunk(0), 0), 416)
    session.where = _expect_range(run, run.ask("GET", used), 204, session.size - 1)
    session.where = location_of(expect(session.patch(run, 1), 202))
    expect(_finish(run, session.where, session.digest, session.chunk(2)), 201)
    _expect_stored(run, session.digest, session.data)


@check(
    "push",
    "GET upload",
    "of a closed session, 404",
    f"{_CHUNKS}: closed with PUT; 404 (end-13)",
    "absent",
)
def closed(run: Run) -> None:
    digest, data = _new_blob(run)
    where = location_of(_start(run))
    expect(_finish(run, where, digest, data), 201)
    expect_code(expect(run.ask("GET", where), 404), "BLOB_UPLOAD_UNKNOWN")


@check("push", "PATCH upload", "to a closed session, 404", "Endpoints: 404 (end-5)", "absent")
def patch_closed(run: Run) -> None:
    digest, data = _new_blob(run)
    where = location_of(_start(run))
    expect(_finish(run, where, digest, data), 201)
    expect_code(expect(_patch(run, where, data, 0), 404), "BLOB_UPLOAD_UNKNOWN")


# Mounts.


def _mount(run: Run, digest: str, **source: str) -> Reply:
    return run.ask(
        "POST",
        with_query("blobs/uploads/", mount=digest, **source),
        None,
        b"",
        repository=run.mounting,
    )


def _expect_session(run: Run, reply: Reply, digest: str, data: bytes) -> None:
    """Fail unless a refused mount has opened a session to which the blob can be uploaded."""
    where = location_of(expect(reply, 202))
    expect(run.ask("PUT", with_query(where, digest=digest), OCTETS, data), 201)
    run.delete_later(f"blobs/{digest}", run.mounting)
    _expect_stored(run, digest, data, run.mounting)


@check(
    "push",
    "POST upload mount",
    "a blob of another repository",
    f"{_MOUNT}: MUST be 201 with Location, SHOULD be 202 (end-11)",
    "blob",
)
def mounted(run: Run) -> None:
    digest, data = _new_blob(run)
    run.set_up_once(f"to mount {digest}", lambda: run.push_blob(digest, data))
    reply = _mount(run, digest, **{"from": run.repository})
    if expect(reply, 201, 202).status == 202:
        _expect_session(run, reply, digest, data)
        raise Skipped(f"optional and not here: {reply}, nothing is mounted")
    run.delete_later(f"blobs/{digest}", run.mounting)
    expect_body(expect(run.ask("GET", location_of(reply)), 200), data)
    _expect_stored(run, digest, data, run.mounting)


@check(
    "push",
    "POST upload mount",
    "without from",
    f"{_MOUNT}: MAY treat from as optional (end-11)",
    "blob",
)
def mounted_from_anywhere(run: Run) -> None:
    digest, data = _new_blob(run)
    run.set_up_once(f"to mount {digest}", lambda: run.push_blob(digest, data))
    reply = _mount(run, digest)
    if expect(reply, 201, 202).status == 202:
        return _expect_session(run, reply, digest, data)
    run.delete_later(f"blobs/{digest}", run.mounting)
    return _expect_stored(run, digest, data, run.mounting)


@check(
    "push",
    "POST upload mount",
    "202 where the source has it not",
    f"{_MOUNT}: SHOULD return a 202",
    "absent",
)
def mounted_from_a_place_without_it(run: Run) -> None:
    digest, data = _new_blob(run)
    _expect_session(run, _mount(run, digest, **{"from": run.repository}), digest, data)


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
