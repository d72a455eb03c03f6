"""What others wrote, wherever it is printed: no secret comes back in it (R10), each is one clean line
(R18), and what a user wrote in the wrong place is not repeated (R19).
"""

from __future__ import annotations

import unicodedata

import pytest

from _regsync.text import printable

BIDIRECTIONAL = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


@pytest.mark.rule("R18")
def test_nothing_that_a_terminal_obeys_is_left():
    every = [chr(code) for code in range(0x110000)]
    unsafe = {each for each in every if unicodedata.category(each) in ("Cc", "Zl", "Zp")}
    # What reorders, and what has no width: what stands before or behind it looks as if it were
    # something else.
    unsafe |= {each for each in every if unicodedata.bidirectional(each) in BIDIRECTIONAL} | {
        *"\u200b\u200c\u2060\ufeff"
    }
    assert [hex(ord(each)) for each in unsafe if each in printable(f"a{each}b")] == []
    assert len(printable("".join(every), len(every)).splitlines()) == 1
    assert printable("tab\tand\nline") == "tab and line"


@pytest.mark.rule("R18")
def test_what_was_cut_says_so():
    assert printable("a" * 10, 10) == "a" * 10
    assert printable("a" * 11, 10) == "a" * 9 + "…"
    assert printable("\x00" * 38 + "a" * 9, 10) == "aa…"
