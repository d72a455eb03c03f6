"""The small grammars of docs/design.md section 4 against readers of their own: any text has one
meaning or is refused.
"""

from __future__ import annotations

import datetime
from email.utils import format_datetime

from hypothesis import given
from hypothesis import strategies as st

from _regsync.net.wire import parse_retry_after
from tests.fuzzing import fuzz

# Headers.


@fuzz(100)
@given(
    st.datetimes(datetime.datetime(1970, 1, 2), datetime.datetime(2200, 1, 1)),
    st.integers(0, 10**9),
)
def test_a_date_to_come_again_is_read_as_it_was_written(moment, now):
    whole = moment.replace(microsecond=0, tzinfo=datetime.timezone.utc)
    assert parse_retry_after(format_datetime(whole, usegmt=True), now) == max(
        0.0, whole.timestamp() - now
    )
