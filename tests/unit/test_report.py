"""Exit statuses, totals, the JSON report and its schema, and the words for sizes and durations."""

from __future__ import annotations

import pytest

from _regsync.text import duration_text, size_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (512, "512 B"),
        (999, "999 B"),
        (1000, "1.0 KB"),
        (1049, "1.0 KB"),
        (1051, "1.1 KB"),
        (999_949, "999.9 KB"),
        (999_950, "1.0 MB"),
        (999_999, "1.0 MB"),
        (31_500_000, "31.5 MB"),
        (999_949_999, "999.9 MB"),
        (999_950_000, "1.0 GB"),
        (999_949_999_999, "999.9 GB"),
        (999_950_000_000, "1.0 TB"),
        (12_345_600_000_000_000, "12345.6 TB"),
    ],
)
def test_a_size_has_one_decimal_and_never_a_thousand_of_a_unit(count: int, text: str) -> None:
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0s"),
        (0.04, "0.0s"),
        (0.3, "0.3s"),
        (9.94, "9.9s"),
        (9.95, "10s"),
        (10.4, "10s"),
        (47.0, "47s"),
        (59.4, "59s"),
        (59.5, "1m00s"),
        (60.0, "1m00s"),
        (133.0, "2m13s"),
        (3599.4, "59m59s"),
        (3599.6, "1h00m"),
        (5400.0, "1h30m"),
        (7199.0, "1h59m"),
        (360_000.0, "100h00m"),
    ],
)
def test_a_duration_never_shows_sixty_of_a_unit(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
