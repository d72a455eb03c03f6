"""Checks of the workflow Content Management: a deletion removes its content and nothing else.

Owns: the expected answers to deletions, and their effects.
May not know: how a registry collects garbage.
Invariants: a check deletes only its own content, on which no other check depends.
Follows: section "Content Management" of the OCI distribution specification 1.1.1.
"""

from __future__ import annotations

from ..content.images import Image
from ..messages import digest_of
from .checks import (
    ACCEPT,
    NOWHERE,
    Failed,
    Run,
    check,
    expect,
    expect_body,
    expect_code,
    expect_manifest,
    expect_no_repository,
    skip_if,
)
from .discovery import referrers, tags_of

_TAGS = "Deleting tags"
_MANIFESTS = "Deleting Manifests"
_BLOBS = "Deleting Blobs"

# Names of the checks that show whether deletion is enabled.
DELETES_TAG = "DELETE tag: it is gone, its manifest and other tags stay (tag)"
DELETES_MANIFEST = "DELETE manifest: it is gone, and so are its tags (image)"
DELETES_BLOB = "DELETE blob: it is gone (blob)"


def _push_fresh(run: Run, name: str) -> Image:
    """Push an image under two tags for one check, once. Returns the image."""
    tags = (f"{run.identity}-{name}-1", f"{run.identity}-{name}-2")
    return run.set_up_once(
        f"fresh {name}", lambda: run.push_image(run.seed.image(sizes=(300,)), *tags)
    )


def _delete(run: Run, target: str) -> None:
    """Delete content. Skip the check if the registry answers 400 or 405: deletion is disabled."""
    expect(skip_if(run.ask("DELETE", target), 400, 405), 202)


@check(
    "management",
    "DELETE tag",
    "it is gone, its manifest and other tags stay",
    f"{_TAGS}: MUST respond with 202 (end-9), then GET 404; MAY be disabled with 400 or 405",
    "tag",
)
def delete_tag(run: Run) -> None:
    image = _push_fresh(run, "tag")
    first = f"manifests/{run.identity}-tag-1"
    second = f"manifests/{run.identity}-tag-2"
    _delete(run, first)
    expect(run.ask("GET", first, ACCEPT), 404)
    expect(run.ask("HEAD", first, ACCEPT), 404)
    expect_body(expect(run.ask("GET", second, ACCEPT), 200), image.body)
    expect_manifest(run, image.top, image.body)


@check(
    "management",
    "DELETE tag",
    "the list has it no more",
    f"{_TAGS}; Listing Tags",
    "tags",
    DELETES_TAG,
)
def delete_tag_listed(run: Run) -> None:
    _push_fresh(run, "listed")
    before = set(tags_of(run))
    _delete(run, f"manifests/{run.identity}-listed-1")
    after = set(tags_of(run))
    if before - after != {f"{run.identity}-listed-1"} or after - before:
        raise Failed(
            f"of the tags there went {sorted(before - after)}, there came {sorted(after - before)}"
        )


@check("management", "DELETE tag", "404", "Endpoints: 404 (end-9)", "absent", DELETES_TAG)
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
    image = _push_fresh(run, "manifest")
    _delete(run, f"manifests/{image.top}")
    for reference in (image.top, f"{run.identity}-manifest-1", f"{run.identity}-manifest-2"):
        expect(run.ask("GET", f"manifests/{reference}", ACCEPT), 404)
        expect(run.ask("HEAD", f"manifests/{reference}", ACCEPT), 404)


@check(
    "management",
    "DELETE manifest",
    "the list of tags has its tags no more",
    f"{_MANIFESTS}; Listing Tags",
    "tags",
    DELETES_MANIFEST,
)
def delete_manifest_listed(run: Run) -> None:
    image = _push_fresh(run, "gone")
    before = set(tags_of(run))
    _delete(run, f"manifests/{image.top}")
    still_listed = before & set(tags_of(run)) & {f"{run.identity}-gone-1", f"{run.identity}-gone-2"}
    if still_listed:
        raise Failed(f"still listed: {sorted(still_listed)}")


@check(
    "management",
    "DELETE manifest",
    "its children stay",
    f"{_MANIFESTS} (end-9)",
    "index",
    DELETES_MANIFEST,
)
def delete_index(run: Run) -> None:
    child = _push_fresh(run, "child")
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
    (DELETES_MANIFEST, "GET referrers: an empty list (absent)"),
)
def delete_referrer(run: Run) -> None:
    subject = _push_fresh(run, "subject")
    remaining = run.push_image(run.seed.artifact(subject))
    deleted = run.push_image(run.seed.artifact(subject))
    if {entry["digest"] for entry in referrers(run, subject.top)} != {remaining.top, deleted.top}:
        raise Failed("the referrers are not listed before one is deleted")
    _delete(run, f"manifests/{deleted.top}")
    if [entry["digest"] for entry in referrers(run, subject.top)] != [remaining.top]:
        raise Failed("after one of two referrers was deleted, the other one is not what is listed")


@check(
    "management", "DELETE manifest", "404", f"{_MANIFESTS}: 404 (end-9)", "absent", DELETES_MANIFEST
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
    DELETES_MANIFEST,
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
    DELETES_MANIFEST,
)
def push_again(run: Run) -> None:
    image = _push_fresh(run, "again")
    _delete(run, f"manifests/{image.top}")
    run.push_image(image, f"{run.identity}-again-1")
    expect_body(
        expect(run.ask("GET", f"manifests/{run.identity}-again-1", ACCEPT), 200), image.body
    )


@check(
    "management",
    "DELETE blob",
    "it is gone",
    f"{_BLOBS}: MUST respond with 202 (end-10); disabled with 400 or 405",
    "blob",
)
def delete_blob(run: Run) -> None:
    data = run.seed.blob(100)
    digest = digest_of(data)
    run.set_up_once("blob to delete", lambda: run.push_blob(digest, data))
    _delete(run, f"blobs/{digest}")
    expect(run.ask("GET", f"blobs/{digest}"), 404)
    expect(run.ask("HEAD", f"blobs/{digest}"), 404)


@check(
    "management", "DELETE blob", "404", f"{_BLOBS}: MUST be 404 (end-10)", "absent", DELETES_BLOB
)
def delete_absent_blob(run: Run) -> None:
    expect_code(expect(run.ask("DELETE", f"blobs/{NOWHERE}"), 404), "BLOB_UNKNOWN", "NAME_UNKNOWN")


@check(
    "management",
    "DELETE blob",
    "it can be pushed again",
    "Pushing blobs: MUST be 201",
    "blob",
    DELETES_BLOB,
)
def upload_again(run: Run) -> None:
    data = run.seed.blob(100)
    digest = digest_of(data)
    run.set_up_once("blob to push again", lambda: run.push_blob(digest, data))
    _delete(run, f"blobs/{digest}")
    run.push_blob(digest, data)
    expect_body(expect(run.ask("GET", f"blobs/{digest}"), 200), data)
