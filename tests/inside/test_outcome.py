"""How a copy that has ended is reported."""

from __future__ import annotations

from typing import Any

import pytest

from _regsync.errors import ContentError
from _regsync.oci import Descriptor
from _regsync.state import RepositoryKey
from _regsync.sync.image import BlobResult, Image, ImageCopy, Traffic

SOURCE, PUSHED, OTHER = (f"sha256:{letter * 64}" for letter in "abc")
ERROR = ContentError("wrong digest")


class End:
    """A repository, as far as an outcome needs one."""

    def __init__(self, host: str) -> None:
        self._host = host

    def name_of(self, reference: str) -> str:
        return f"{self._host}/app:{reference}"


def ended(**fields: Any) -> ImageCopy:
    """Return a copy that has ended, after it transferred one blob."""
    source: Any = End("s.example")
    target: Any = End("t.example")
    made = ImageCopy(source, target, "1", "1", PUSHED, SOURCE, 0.0, False, None)
    made.blobs = [(Descriptor("", OTHER, 7), BlobResult.UPLOADED)]
    for name, value in fields.items():
        assert hasattr(made, name)
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("fields", "status", "reason", "digest"),
    [
        ({}, "synced", None, PUSHED),
        ({"artifacts": {"x": "synced"}}, "synced", None, PUSHED),
        ({"already_at_target": True}, "skipped", "unchanged", PUSHED),
        # An artifact was copied: what moves is told.
        ({"already_at_target": True, "artifacts": {"x": "synced"}}, "synced", None, PUSHED),
        ({"immutable_digest": OTHER}, "skipped", "tag_immutable_exists", OTHER),
        ({"immutable_digest": OTHER, "artifacts": {"x": "synced"}}, "synced", None, OTHER),
        (
            {"immutable_digest": OTHER, "already_at_target": True},
            "skipped",
            "tag_immutable_exists",
            OTHER,
        ),
        ({"error": ERROR}, "failed", None, None),
        (
            {"error": ERROR, "already_at_target": True, "artifacts": {"x": "synced"}},
            "failed",
            None,
            None,
        ),
        ({"error": ERROR, "immutable_digest": OTHER}, "failed", None, None),
    ],
)
def test_each_end_of_a_copy_is_one_outcome(
    fields: dict[str, Any], status: str, reason: str | None, digest: str | None
) -> None:
    outcome = ended(**fields).outcome(duration=3.0)
    assert (outcome.status, outcome.reason, outcome.digest) == (status, reason, digest)
    assert outcome.error is fields.get("error")
    assert outcome.source_digest == SOURCE
    assert outcome.duration == 3.0
    assert (outcome.source, outcome.target) == ("s.example/app:1", "t.example/app:1")


def test_a_dry_run_says_what_would_be_copied() -> None:
    assert ended().outcome(duration=0.0, is_dry_run=True).status == "would_sync"
    assert ended(already_at_target=True).outcome(duration=0.0, is_dry_run=True).status == "skipped"
    assert ended(error=ERROR).outcome(duration=0.0, is_dry_run=True).status == "failed"


def test_an_outcome_has_what_was_counted_also_when_it_failed() -> None:
    artifacts = dict.fromkeys("ab", "synced") | dict.fromkeys("cdef", "skipped")
    artifacts |= dict.fromkeys("ghijk", "failed")
    results = [BlobResult.MOUNTED] * 2 + [BlobResult.PRESENT] * 2 + [BlobResult.BELIEVED]
    for error in (None, ERROR):
        copy = ended(artifacts=artifacts, artifacts_stripped=6, planned=["strip z"], error=error)
        copy.blobs += [(Descriptor("", OTHER, 7), result) for result in results]
        outcome = copy.outcome(duration=1.5)
        assert (outcome.bytes, outcome.duration, outcome.transferred) == (7, 1.5, (OTHER,))
        assert (outcome.mounted, outcome.skipped, outcome.planned) == (2, 3, ("strip z",))
        assert outcome.artifacts == {"synced": 2, "skipped": 4, "failed": 5, "stripped": 6}


def test_whatever_hangs_on_an_image_that_failed_has_failed_with_it() -> None:
    copy = ended(unfinished_images=4)
    tree: Any = None
    signature = Image(copy, tree, "signature", b"", [], "signature of the SBOM")
    sbom = Image(copy, tree, "sbom", b"", [signature], "SBOM")
    other = Image(copy, tree, "other", b"", [], "another artifact")
    failed = Image(copy, tree, "1", b"", [sbom, other], error=ERROR)
    copy.record_failure(failed)
    assert copy.artifacts == dict.fromkeys(("sbom", "signature", "other"), "failed")
    assert copy.unfinished_images == 0
    assert copy.error is ERROR


@pytest.mark.parametrize(
    ("result", "expected", "present", "mounted"),
    [
        (BlobResult.UPLOADED, 7, 0, 0),
        (BlobResult.MOUNTED, 0, 0, 7),
        (BlobResult.PRESENT, 0, 7, 0),
        (BlobResult.BELIEVED, 0, 7, 0),
    ],
)
def test_a_blob_is_counted_as_sent_or_as_saved(
    result: BlobResult, expected: int, present: int, mounted: int
) -> None:
    """Whether or not the host was known to lack it."""
    blob = Descriptor("", OTHER, 7)
    for was_known in (True, False):
        traffic = Traffic()
        if was_known:
            traffic.expect("t.example", blob.digest, blob.size)
            assert traffic.expected_bytes == 7
        traffic.record(RepositoryKey("t.example", "app"), blob, result)
        assert (traffic.expected_bytes, traffic.present_bytes, traffic.mounted_bytes) == (
            expected,
            present,
            mounted,
        )
