"""What goes over the wire in a copy or a sync, counted exactly, and how far a failure reaches.

The lower bounds of docs/design.md section 6 for open registries, then the isolation and the
repetition of failures. Every test looks at the target as well as at the counts, and at what must
not have been asked.
"""

from __future__ import annotations

from typing import Any

import pytest

from _regsync.errors import ProtocolBroken
from _regsync.registry import upload
from conformance.content.images import Seed
from tests.ends import copy, only


@pytest.fixture
def seed() -> Seed:
    return Seed(7)


# Blobs.


# Repetition.


def test_a_session_at_a_refused_location_gets_no_request(source, target, seed):
    seed.image(sizes=()).load_into(source.app, "app", tag="v1")

    def refuse(*_: Any) -> None:
        raise ProtocolBroken("refused")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upload, "check_foreign", refuse)
        ran = copy(source, target)
    assert "refused" in only(ran.failed)
    assert only(ran.images)["error"]["retries"] == 0
    assert target.journal.count("DELETE") == target.journal.count("PUT") == 0
