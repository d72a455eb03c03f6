"""The tree of an image, and how the bytes that a run will send are counted, which progress shows."""

from __future__ import annotations

import pytest

from _regsync.oci import Descriptor
from _regsync.state import RepositoryKey
from _regsync.sync.image import BlobResult, Traffic


@pytest.mark.parametrize("was_known", [True, False])
@pytest.mark.parametrize(
    ("result", "sent", "present", "mounted"),
    [
        (BlobResult.UPLOADED, 7, 0, 0),
        (BlobResult.MOUNTED, 0, 0, 7),
        (BlobResult.PRESENT, 0, 7, 0),
        (BlobResult.BELIEVED, 0, 7, 0),
    ],
)
def test_a_blob_is_counted_as_sent_or_as_saved_whether_or_not_the_host_was_known_to_lack_it(
    result: BlobResult, sent: int, present: int, mounted: int, was_known: bool
) -> None:
    traffic, blob = Traffic(), Descriptor("", f"sha256:{'c' * 64}", 7)
    if was_known:
        traffic.expect("t.example", blob.digest, blob.size)
        assert traffic.expected_bytes == 7
    traffic.record(RepositoryKey("t.example", "app"), blob, result)
    counted = (traffic.expected_bytes, traffic.present_bytes, traffic.mounted_bytes)
    assert counted == (sent, present, mounted)
