"""Checks of the workflow Push, second part: manifests of every shape, and the form of refusals.

Owns: the expected answers to pushes of manifests; the check that refused manifests are not stored.
May not know: how a registry stores manifests.
Invariants: the returned bytes are compared with the pushed bytes.
Follows: section "Pushing Manifests" of the OCI distribution specification 1.1.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..content.images import Image, encode, without_none
from ..messages import digest_of
from ..registry.storage import OCI_INDEX, OCI_MANIFEST
from .checks import (
    ACCEPT,
    MANIFESTS,
    NOWHERE,
    Absent,
    Failed,
    Run,
    check,
    codes,
    expect,
    expect_body,
    expect_code,
    expect_manifest,
    expect_optional_header,
    location_of,
    set_up,
    skip_if,
)

_MANIFESTS = "Pushing Manifests"
_LIMIT = 4 << 20  # size of a manifest in bytes that a registry should accept


@check(
    "push",
    "PUT manifest",
    "by tag, 201 and its Location gives it",
    f"{_MANIFESTS}: MUST be 201 with Location (end-7)",
    tuple(MANIFESTS),
)
def put_by_tag(run: Run, kind: str) -> None:
    _put(run, MANIFESTS[kind](run.seed), f"{run.identity}-put-{kind.replace(' ', '-')}")


@check(
    "push",
    "PUT manifest",
    "by digest, 201 and its Location gives it",
    f"{_MANIFESTS}: MUST be 201 with Location (end-7)",
    tuple(MANIFESTS),
)
def put_by_digest(run: Run, kind: str) -> None:
    image = MANIFESTS[kind](run.seed)
    _put(run, image, image.top)


def _put(run: Run, image: Image, reference: str) -> None:
    """Push a whole graph. Fail unless Location, reference and digest return its bytes."""
    with set_up():
        run.push_parts(image)
    reply = expect(run.put_image(image, reference), 201)
    for target in (location_of(reply), f"manifests/{reference}", f"manifests/{image.top}"):
        expect_body(expect(run.ask("GET", target, ACCEPT), 200), image.body)


@check(
    "push",
    "PUT manifest",
    "its digest in a header",
    f"{_MANIFESTS}: MUST be equal to the client's",
    tuple(MANIFESTS),
)
def put_says_digest(run: Run, kind: str) -> None:
    image = run.stored_image(kind)
    reply = expect(run.put_image(image), 201)
    expect_optional_header(reply, "Docker-Content-Digest", image.top)


# The cited sentence and the function that builds the image, by shape.
_SHAPES: Mapping[str, tuple[str, Callable[[Run], Image]]] = {
    "no layers": (
        f"{_MANIFESTS}: the list of blobs MAY be empty",
        lambda run: run.seed.image(sizes=()),
    ),
    "no mediaType": (
        f"{_MANIFESTS}: All manifests SHOULD include a mediaType field",
        lambda run: _edited_image(run, mediaType=None),
    ),
    "an empty index": ("Image Index: manifests MAY be empty", lambda run: run.seed.index([])),
    "one layer three times": (
        "Image Manifest: layers",
        lambda run: run.seed.image(layers=[run.seed.layer(50)] * 3),
    ),
    "annotations": (
        "Image Manifest: annotations",
        lambda run: run.seed.image(annotations={"org.example": "ü"}),
    ),
}


def _edited_image(run: Run, **fields: object) -> Image:
    image = run.seed.image(sizes=(60,))
    document = without_none({**image.document, **fields})
    return image.with_manifest(encode(document), image.media_type)


def _add_shape_check(shape: str, cites: str, build: Callable[[Run], Image]) -> None:
    @check("push", "PUT manifest", shape, cites, "index" if "index" in shape else "image")
    def put_shape(run: Run) -> None:
        image = build(run)
        with set_up():
            run.push_parts(image)
        reply = run.put_image(image)
        if shape in ("no layers", "an empty index"):
            skip_if(reply, 400)  # the lists MAY be empty
        expect(reply, 201)
        expect_manifest(run, image.top, image.body)


for _shape, (_cites, _build) in _SHAPES.items():
    _add_shape_check(_shape, _cites, _build)


@check(
    "push",
    "PUT manifest",
    "Content-Type with a parameter",
    f"{_MANIFESTS}: SHOULD ignore parameters",
    "image",
)
def put_with_parameter(run: Run) -> None:
    image = run.seed.image(sizes=(60,))
    with set_up():
        run.push_parts(image)
    reply = run.put_manifest(image.top, f"{OCI_MANIFEST}; charset=utf-8", image.body)
    expect(skip_if(reply, 400, 415), 201)
    got = expect(run.ask("GET", f"manifests/{image.top}", ACCEPT), 200)
    if got.header("Content-Type") not in (OCI_MANIFEST, f"{OCI_MANIFEST}; charset=utf-8"):
        raise Failed(f"{got} with Content-Type {got.header('Content-Type')!r}")


@check("push", "PUT manifest", "many tags for one", f"{_MANIFESTS}: MUST be 201 (end-7)", "image")
def many_tags(run: Run) -> None:
    tags = [f"{run.identity}-many-{number}" for number in range(4)]
    image = run.push_image(run.seed.image(sizes=(60,)), *tags)
    for tag in tags:
        expect_manifest(run, tag, image.body)


@check(
    "push", "PUT manifest", "a tag moves", f"{_MANIFESTS}; Definitions: a tag is a pointer", "image"
)
def tag_moves(run: Run) -> None:
    tag = f"{run.identity}-moving"
    first = run.push_image(run.seed.image(sizes=(60,)), tag)
    second = run.push_image(run.seed.image(sizes=(60,)), tag)
    expect_manifest(run, tag, second.body)
    expect_manifest(run, first.top, first.body)


@check(
    "push",
    "PUT manifest",
    "a subject that is not there",
    "Push: MUST initially accept",
    ("artifact", "index"),
)
def put_before_subject(run: Run, kind: str) -> None:
    subject = run.seed.image(sizes=(60,))
    run.push_image(
        run.seed.artifact(subject) if kind == "artifact" else run.seed.index([], subject=subject)
    )


@check(
    "push",
    "PUT manifest",
    "naming what is not there",
    "Push: MAY reject, MUST be MANIFEST_BLOB_UNKNOWN",
    ("image", "index"),
)
def put_naming_absent(run: Run, kind: str) -> None:
    image = (
        run.seed.image(sizes=(60,))
        if kind == "image"
        else run.seed.index(platforms=("linux/amd64",))
    )
    reply = run.put_image(image)
    if reply.status == 201:
        return
    if "MANIFEST_BLOB_UNKNOWN" not in codes(reply):
        raise Failed(f"{reply} ({', '.join(codes(reply))}) without code MANIFEST_BLOB_UNKNOWN")
    expect(run.ask("GET", f"manifests/{image.top}", ACCEPT), 404)


@check(
    "push",
    "PUT manifest",
    "bytes of another digest",
    f"{_MANIFESTS}: the digest MUST be equal; DIGEST_INVALID",
    "image",
)
def put_under_other_digest(run: Run) -> None:
    image = run.seed.image(sizes=(60,))
    with set_up():
        run.push_parts(image)
    wrong = digest_of(image.body + b"\n")
    expect_code(expect(run.put_image(image, wrong), 400), "DIGEST_INVALID", "MANIFEST_INVALID")
    expect(run.ask("GET", f"manifests/{wrong}", ACCEPT), 404)


@check(
    "push",
    "PUT manifest",
    "what is no JSON",
    "Error Codes: MANIFEST_INVALID (code-6)",
    ("image", "index"),
)
def put_no_json(run: Run, kind: str) -> None:
    media_type = OCI_MANIFEST if kind == "image" else OCI_INDEX
    tag = f"{run.identity}-no-json"
    expect_code(expect(run.put_manifest(tag, media_type, b"blablabla"), 400), "MANIFEST_INVALID")
    expect(run.ask("GET", f"manifests/{tag}", ACCEPT), 404)


def _padded(run: Run, size: int) -> Image:
    image = run.seed.image(sizes=())
    return image.with_manifest(image.body + b" " * (size - len(image.body)), image.media_type)


@check(
    "push",
    "PUT manifest",
    "of 4 MiB",
    f"{_MANIFESTS}: SHOULD support at least 4 megabytes",
    "image",
)
def put_large(run: Run) -> None:
    image = _padded(run, _LIMIT)
    with set_up():
        run.push_parts(image)
    expect(skip_if(run.put_image(image), 400, 413), 201)
    expect_manifest(run, image.top, image.body)


@check(
    "push",
    "PUT manifest",
    "above the limit, 413",
    f"{_MANIFESTS}: SHOULD respond with 413",
    "image",
)
def put_too_large(run: Run) -> None:
    image = _padded(run, _LIMIT * 4)
    with set_up():
        run.push_parts(image)
    reply = run.put_image(image)
    expect(skip_if(reply, 201, 400), 413)


@check(
    "push",
    "errors",
    "their form",
    "Error Codes: if JSON, MUST have the format; code MUST be one of the table",
)
def error_bodies(run: Run) -> None:
    for target in (f"blobs/{NOWHERE}", f"manifests/{NOWHERE}", "blobs/sha256:totallywrong"):
        run.ask("GET", target, ACCEPT)
    if run.malformed_errors:
        raise Failed(
            f"{len(run.malformed_errors)} of {run.json_errors} JSON error bodies have another form:"
            f" {run.malformed_errors[0]}"
        )
    if not run.json_errors:
        raise Absent("no error body is JSON")


@check(
    "push",
    "warnings",
    "their form",
    "Warnings: MUST be 299 and -, MUST NOT have a date, MUST NOT be more than 4096 bytes",
)
def warnings(run: Run) -> None:
    for target in ("blobs/uploads/", f"blobs/uploads/?mount={NOWHERE}"):
        run.ask("POST", target, None, b"")
    run.ask("GET", f"manifests/{NOWHERE}", ACCEPT)
    if run.malformed_warnings:
        raise Failed(
            f"{len(run.malformed_warnings)} Warning headers have another form:"
            f" {run.malformed_warnings[0]}"
        )
