"""Checks of the workflow Pull: downloads return the bytes that were pushed.

Owns: the expected answers to downloads.
May not know: how content is pushed (`Run.stored_image` and `Run.stored_blob` push it).
Invariants: every body is compared byte for byte.
Follows: sections "Pull" and "API" of the OCI distribution specification 1.1.1.
"""

from __future__ import annotations

from collections.abc import Callable

from ..client.http import Reply
from ..messages import digest_of
from .checks import (
    ACCEPT,
    BLOBS,
    MANIFESTS,
    NOWHERE,
    Absent,
    Failed,
    Run,
    check,
    codes,
    expect,
    expect_blob,
    expect_body,
    expect_code,
    expect_header,
    expect_manifest,
    expect_no_repository,
    expect_optional_header,
)

_PULLING_BLOBS = "Pulling blobs"
_PULLING_MANIFESTS = "Pulling manifests"
_EXISTS = "Checking if content exists in the registry"


@check(
    "pull", "GET /v2/", "the registry says that it is one", "Determining Support: 200 OK (end-1)"
)
def ping(run: Run) -> None:
    expect(run.ask("GET", "/v2/"), 200)


# Blobs.


@check("pull", "GET blob", "its bytes", f"{_PULLING_BLOBS}: MUST be 200 OK (end-2)", tuple(BLOBS))
def get_blob(run: Run, kind: str) -> None:
    expect_blob(run, *run.stored_blob(kind))


@check(
    "pull",
    "GET blob",
    "its digest in a header",
    f"{_PULLING_BLOBS}: SHOULD, if present MUST",
    tuple(BLOBS),
)
def get_blob_digest(run: Run, kind: str) -> None:
    digest, data = run.stored_blob(kind)
    reply = expect(run.ask("GET", f"blobs/{digest}"), 200)
    algorithm = digest.partition(":")[0]
    if not reply.header("Docker-Content-Digest").startswith(algorithm):
        digest = digest_of(data)  # a registry may name a sha512 blob by its sha256
    expect_optional_header(reply, "Docker-Content-Digest", digest)


@check("pull", "HEAD blob", "is there", f"{_EXISTS}: MUST be 200 OK (end-2)", tuple(BLOBS))
def head_blob(run: Run, kind: str) -> None:
    digest, _ = run.stored_blob(kind)
    expect(run.ask("HEAD", f"blobs/{digest}"), 200)


@check("pull", "HEAD blob", "its size", f"{_EXISTS}: SHOULD contain Content-Length", tuple(BLOBS))
def head_blob_size(run: Run, kind: str) -> None:
    digest, data = run.stored_blob(kind)
    reply = expect(run.ask("HEAD", f"blobs/{digest}"), 200)
    expect_optional_header(reply, "Content-Length", str(len(data)))


@check("pull", "HEAD blob", "its digest in a header", f"{_EXISTS}: SHOULD, if present MUST", "blob")
def head_blob_digest(run: Run) -> None:
    digest, _ = run.stored_blob("blob")
    reply = expect(run.ask("HEAD", f"blobs/{digest}"), 200)
    expect_optional_header(reply, "Docker-Content-Digest", digest)


def _get_range(run: Run, range_header: str, *statuses: int) -> Reply:
    """Return the answer to a GET with Range. Skips the check if the registry ignores Range."""
    digest, _ = run.stored_blob("blob")
    reply = expect(run.ask("GET", f"blobs/{digest}", {"Range": range_header}), 200, *statuses)
    if reply.status == 200:
        raise Absent("Range is ignored")
    return reply


# Start and stop of the expected bytes of a blob of 1,000 bytes, by Range.
_RANGES = {
    "bytes=0-9": (0, 10),
    "bytes=10-19": (10, 20),
    "bytes=990-": (990, 1000),
    "bytes=-5": (995, 1000),
    "bytes=900-5000": (900, 1000),
}


def _add_range_check(asked: str, start: int, stop: int) -> None:
    cites = f"{_PULLING_BLOBS}: SHOULD support Range; RFC 9110 section 14.2"

    @check("pull", "GET blob Range", asked, cites, "blob")
    def get_range(run: Run) -> None:
        reply = _get_range(run, asked, 206)
        _, data = run.blob("blob")
        expect_body(reply, data[start:stop])
        expect_header(reply, "Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")


for _asked, (_start, _stop) in _RANGES.items():
    _add_range_check(_asked, _start, _stop)


@check(
    "pull",
    "GET blob Range",
    "bytes=1000- is beyond the end",
    "RFC 9110 section 15.5.17: 416",
    "blob",
)
def get_range_beyond(run: Run) -> None:
    expect(_get_range(run, "bytes=1000-", 416), 416)


@check("pull", "GET blob", "404", f"{_PULLING_BLOBS}: MUST be 404 Not Found (end-2)", "absent")
def get_absent_blob(run: Run) -> None:
    reply = expect(run.ask("GET", f"blobs/{NOWHERE}"), 404)
    expect_code(reply, "BLOB_UNKNOWN", "NAME_UNKNOWN")


@check("pull", "HEAD blob", "404", f"{_EXISTS}: MUST be 404 Not Found (end-2)", "absent")
def head_absent_blob(run: Run) -> None:
    expect(run.ask("HEAD", f"blobs/{NOWHERE}"), 404)


@check(
    "pull",
    "GET blob",
    "404 where the repository is not",
    f"{_PULLING_BLOBS}: MUST be 404",
    "absent",
)
def get_blob_nowhere(run: Run) -> None:
    expect_no_repository(
        run.ask("GET", f"/v2/{run.repository}/no/such/{run.identity}/blobs/{NOWHERE}")
    )


@check(
    "pull",
    "GET blob",
    "404 in a repository that has it not",
    f"{_PULLING_BLOBS}: MUST be 404",
    "absent",
)
def get_blob_of_another(run: Run) -> None:
    digest, _ = run.stored_blob("blob")
    expect_no_repository(
        run.ask("GET", f"blobs/{digest}", repository=f"{run.mounting}-not-{run.identity}")
    )


@check("pull", "GET blob", "400 or 404", "Error Codes: DIGEST_INVALID (code-4)", "malformed")
def get_malformed_blob(run: Run) -> None:
    expect(run.ask("GET", "blobs/sha256:totallywrong"), 400, 404)


# Manifests.


def _reference(run: Run, kind: str, by: str) -> str:
    """Return the tag or the digest of a stored image. `by` is "tag" or "digest"."""
    image = run.stored_image(kind)
    return run.tag(kind) if by == "tag" else image.top


def _add_manifest_checks(by: str) -> None:
    kinds = tuple(MANIFESTS)
    must = f"{_PULLING_MANIFESTS}: MUST provide the expected manifest, MUST be 200 OK (end-3)"

    @check("pull", "GET manifest", f"by {by}, its bytes", must, kinds)
    def get_manifest(run: Run, kind: str) -> None:
        expect_manifest(run, _reference(run, kind, by), run.image(kind).body)

    @check(
        "pull", "HEAD manifest", f"by {by}, is there", f"{_EXISTS}: MUST be 200 OK (end-3)", kinds
    )
    def head_manifest(run: Run, kind: str) -> None:
        expect(run.ask("HEAD", f"manifests/{_reference(run, kind, by)}", ACCEPT), 200)

    cites = f"{_PULLING_MANIFESTS}: SHOULD contain the digest"

    @check("pull", "GET manifest", f"by {by}, its digest in a header", cites, kinds)
    def get_manifest_digest(run: Run, kind: str) -> None:
        reply = expect(run.ask("GET", f"manifests/{_reference(run, kind, by)}", ACCEPT), 200)
        expect_optional_header(reply, "Docker-Content-Digest", run.image(kind).top)

    @check("pull", "HEAD manifest", f"by {by}, its digest in a header", f"{_EXISTS}: SHOULD", kinds)
    def head_manifest_digest(run: Run, kind: str) -> None:
        reply = expect(run.ask("HEAD", f"manifests/{_reference(run, kind, by)}", ACCEPT), 200)
        expect_optional_header(reply, "Docker-Content-Digest", run.image(kind).top)


_add_manifest_checks("tag")
_add_manifest_checks("digest")


@check(
    "pull",
    "GET manifest",
    "Content-Type as it was pushed",
    f"{_PULLING_MANIFESTS}: SHOULD match what the client pushed; SHOULD NOT include parameters",
    tuple(MANIFESTS),
)
def get_manifest_type(run: Run, kind: str) -> None:
    image = run.stored_image(kind)
    reply = expect(run.ask("GET", f"manifests/{image.top}", ACCEPT), 200)
    expect_header(reply, "Content-Type", image.media_type)


@check(
    "pull",
    "GET manifest",
    "with only its own type accepted",
    "Content Negotiation",
    tuple(MANIFESTS),
)
def get_manifest_alone(run: Run, kind: str) -> None:
    image = run.stored_image(kind)
    reply = run.ask("GET", f"manifests/{run.tag(kind)}", {"Accept": image.media_type})
    expect_body(expect(reply, 200), image.body)


@check(
    "pull",
    "HEAD manifest",
    "its size",
    f"{_EXISTS}: SHOULD contain Content-Length",
    tuple(MANIFESTS),
)
def head_manifest_size(run: Run, kind: str) -> None:
    image = run.stored_image(kind)
    reply = expect(run.ask("HEAD", f"manifests/{image.top}", ACCEPT), 200)
    expect_optional_header(reply, "Content-Length", str(len(image.body)))


# References that name no manifest.
_ABSENT: dict[str, Callable[[Run], str]] = {
    "tag": lambda run: f"{run.identity}-none",
    "digest": lambda run: NOWHERE,
    "a name that no tag can have": lambda run: ".INVALID_MANIFEST_NAME",
}


def _add_absent_checks(by: str) -> None:
    cites = f"{_PULLING_MANIFESTS}: MUST be 404 Not Found (end-3)"
    data = "absent" if by in ("tag", "digest") else "malformed"

    @check("pull", "GET manifest", f"by {by}, 404", cites, data)
    def get_absent(run: Run) -> None:
        reply = expect(run.ask("GET", f"manifests/{_ABSENT[by](run)}", ACCEPT), 404)
        expect_code(reply, "MANIFEST_UNKNOWN", "NAME_UNKNOWN")

    @check("pull", "HEAD manifest", f"by {by}, 404", cites, data)
    def head_absent(run: Run) -> None:
        expect(run.ask("HEAD", f"manifests/{_ABSENT[by](run)}", ACCEPT), 404)


for _by in _ABSENT:
    _add_absent_checks(_by)


@check(
    "pull",
    "GET manifest",
    "404 where the repository is not",
    "Pushing Manifests: an attempt to pull a nonexistent repository MUST return 404",
    "absent",
)
def get_manifest_nowhere(run: Run) -> None:
    reply = run.ask("GET", f"/v2/{run.repository}/no/such/{run.identity}/manifests/latest", ACCEPT)
    expect_code(expect_no_repository(reply), "MANIFEST_UNKNOWN", "NAME_UNKNOWN")


@check(
    "pull",
    "GET manifest",
    "by a malformed digest, 400 or 404",
    "Error Codes: one of the table, in its JSON form",
    "malformed",
)
def get_malformed_manifest(run: Run) -> None:
    reply = expect(run.ask("GET", "manifests/sha256:totallywrong", ACCEPT), 400, 404)
    if reply.status == 400 and not codes(reply):
        raise Failed(f"{reply} without an error code")
