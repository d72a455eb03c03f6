"""Checks of the workflow Content Management: a deletion removes its content and nothing else.

Owns: the expected answers to deletions, and their effects.
May not know: how a registry collects garbage.
Invariants: a check deletes only its own content, on which no other check depends.
Follows: section "Content Management" of the OCI distribution specification 1.1.1.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..content.images import Image
from ..messages import digest_of
from .checks import (
    ACCEPT,
    NOWHERE,
    Failed,
    Run,
    check,
    expect,
    expect_blob,
    expect_code,
    expect_manifest,
    expect_no_repository,
    set_up,
    skip_if,
)
from .discovery import expect_listed, no_referrers, referrers, tags_of

_TAGS = "Deleting tags"
_MANIFESTS = "Deleting Manifests"
_BLOBS = "Deleting Blobs"


def _push_fresh(run: Run, name: str) -> tuple[Image, str, str]:
    """Push a new image for one check. Returns the image and its two tags."""
    first = f"{run.identity}-{name}-1"
    second = f"{run.identity}-{name}-2"
    with set_up():
        image = run.push_image(run.seed.image(sizes=(300,)), first, second)
    return image, first, second


def _push_fresh_blob(run: Run) -> tuple[str, bytes]:
    """Push a new blob for one check. Returns its digest and bytes."""
    data = run.seed.blob(100)
    digest = digest_of(data)
    with set_up():
        run.push_blob(digest, data)
    return digest, data


def _delete(run: Run, target: str) -> None:
    """Delete content. Skip the check if the registry answers 400 or 405: deletion is disabled."""
    expect(skip_if(run.ask("DELETE", target), 400, 405), 202)


def _expect_gone(run: Run, target: str, headers: Mapping[str, str] | None = None) -> None:
    expect(run.ask("GET", target, headers), 404)
    expect(run.ask("HEAD", target, headers), 404)


@check(
    "management",
    "DELETE tag",
    "it is gone, its manifest and other tags stay",
    f"{_TAGS}: MUST respond with 202 (end-9), then GET 404; MAY be disabled with 400 or 405",
    "tag",
)
def delete_tag(run: Run) -> None:
    image, first, second = _push_fresh(run, "tag")
    _delete(run, f"manifests/{first}")
    _expect_gone(run, f"manifests/{first}", ACCEPT)
    expect_manifest(run, second, image.body)
    expect_manifest(run, image.top, image.body)


@check(
    "management",
    "DELETE tag",
    "the list has it no more",
    f"{_TAGS}; Listing Tags",
    "tags",
    [delete_tag],
)
def delete_tag_listed(run: Run) -> None:
    _, deleted, _ = _push_fresh(run, "listed")
    before = set(tags_of(run))
    _delete(run, f"manifests/{deleted}")
    after = set(tags_of(run))
    if before - after != {deleted} or after - before:
        raise Failed(
            f"{deleted} was deleted, but {sorted(before - after)} are listed no more,"
            f" and {sorted(after - before)} are new"
        )


@check("management", "DELETE tag", "404", "Endpoints: 404 (end-9)", "absent", [delete_tag])
def delete_absent_tag(run: Run) -> None:
    expect_code(
        expect(run.ask("DELETE", f"manifests/{run.identity}-none"), 404),
        "MANIFEST_UNKNOWN",
        "NAME_UNKNOWN",
    )


@check(
    "management",
    "DELETE manifest",
    "it is gone, and so are its tags",
    f"{_MANIFESTS}: MUST respond with 202 (end-9), then GET 404; disabled with 400 or 405",
    "image",
)
def delete_manifest(run: Run) -> None:
    image, *tags = _push_fresh(run, "manifest")
    _delete(run, f"manifests/{image.top}")
    for reference in (image.top, *tags):
        _expect_gone(run, f"manifests/{reference}", ACCEPT)


@check(
    "management",
    "DELETE manifest",
    "the list of tags has its tags no more",
    f"{_MANIFESTS}; Listing Tags",
    "tags",
    [delete_manifest],
)
def delete_manifest_listed(run: Run) -> None:
    image, *tags = _push_fresh(run, "gone")
    before = set(tags_of(run))
    _delete(run, f"manifests/{image.top}")
    still_listed = before & set(tags_of(run)) & set(tags)
    if still_listed:
        raise Failed(f"still listed: {sorted(still_listed)}")


@check(
    "management",
    "DELETE manifest",
    "its children stay",
    f"{_MANIFESTS} (end-9)",
    "index",
    [delete_manifest],
)
def delete_index(run: Run) -> None:
    child, *_ = _push_fresh(run, "child")
    index = run.push_image(run.seed.index([child]))
    _delete(run, f"manifests/{index.top}")
    expect(run.ask("GET", f"manifests/{index.top}", ACCEPT), 404)
    expect_manifest(run, child.top, child.body)


@check(
    "management",
    "DELETE manifest",
    "it is listed as a referrer no more",
    f"{_MANIFESTS}; Listing Referrers",
    "referrers",
    [delete_manifest, no_referrers],
)
def delete_referrer(run: Run) -> None:
    subject, *_ = _push_fresh(run, "subject")
    remaining = run.push_image(run.seed.artifact(subject))
    deleted = run.push_image(run.seed.artifact(subject))
    expect_listed(referrers(run, subject.top), [remaining, deleted])
    _delete(run, f"manifests/{deleted.top}")
    expect_listed(referrers(run, subject.top), [remaining])


@check(
    "management",
    "DELETE manifest",
    "404",
    f"{_MANIFESTS}: 404 (end-9)",
    "absent",
    [delete_manifest],
)
def delete_absent_manifest(run: Run) -> None:
    expect_code(
        expect(run.ask("DELETE", f"manifests/{NOWHERE}"), 404), "MANIFEST_UNKNOWN", "NAME_UNKNOWN"
    )


@check(
    "management",
    "DELETE manifest",
    "404 where the repository is not",
    f"{_MANIFESTS}: if the repository does not exist, MUST return 404",
    "absent",
    [delete_manifest],
)
def delete_manifest_nowhere(run: Run) -> None:
    expect_no_repository(
        run.ask("DELETE", f"/v2/{run.repository}/no/such/{run.identity}/manifests/{NOWHERE}")
    )


@check(
    "management",
    "DELETE manifest",
    "it can be pushed again",
    "Pushing Manifests: MUST return 201",
    "image",
    [delete_manifest],
)
def push_again(run: Run) -> None:
    image, tag, _ = _push_fresh(run, "again")
    _delete(run, f"manifests/{image.top}")
    run.push_image(image, tag)
    expect_manifest(run, tag, image.body)


@check(
    "management",
    "DELETE blob",
    "it is gone",
    f"{_BLOBS}: MUST respond with 202 (end-10); disabled with 400 or 405",
    "blob",
)
def delete_blob(run: Run) -> None:
    digest, _ = _push_fresh_blob(run)
    _delete(run, f"blobs/{digest}")
    _expect_gone(run, f"blobs/{digest}")


@check(
    "management", "DELETE blob", "404", f"{_BLOBS}: MUST be 404 (end-10)", "absent", [delete_blob]
)
def delete_absent_blob(run: Run) -> None:
    expect_code(expect(run.ask("DELETE", f"blobs/{NOWHERE}"), 404), "BLOB_UNKNOWN", "NAME_UNKNOWN")


@check(
    "management",
    "DELETE blob",
    "it can be pushed again",
    "Pushing blobs: MUST be 201",
    "blob",
    [delete_blob],
)
def upload_again(run: Run) -> None:
    digest, data = _push_fresh_blob(run)
    _delete(run, f"blobs/{digest}")
    run.push_blob(digest, data)
    expect_blob(run, digest, data)
