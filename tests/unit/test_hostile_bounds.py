"""Everything that others can make large is bounded (R14): memory, work, tasks, connections, threads.

Each test is an attack. It may fail its own image; everything else goes on as if it were not there.
"""

from __future__ import annotations

import tracemalloc

import pytest

from _regsync.errors import ContentError
from _regsync.oci import check_digest

# Bombs: a small answer that names much more, or is large in memory.


@pytest.mark.rule("R14")
def test_a_digest_of_megabytes_is_refused_in_its_own_memory():
    tracemalloc.start()
    try:
        for text in ("a." * 2**21, "a" * 2**22 + ":", "a:" + "b" * 2**22):
            with pytest.raises(ContentError):
                check_digest(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * 2**20, (
        "a pattern that may give back every word remembers fifty bytes for each letter"
    )
