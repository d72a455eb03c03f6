"""Versions, precedence, ranges and the three rules for pre-releases (docs/design.md section 4)."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _regsync.tags import Prerelease, Version, admits, parse_range, parse_version

VERSIONS = [
    "1", "v1", "1.2", "v1.2.3", "01.002.3", "20240131", "1.2.3-rc.1", "1.2-alpine", "1.2.3_5",
    "1.2.3+build.7", "1.2.3-rc.1_b-2", "1.2.3-alpine3.19", "1.2.3--", "1.2.3-0",
]  # fmt: skip
NO_VERSIONS = [
    "", "v", "latest", "1.2.3.4", "1.", ".1", "1..2", "V1", "vv1", "1.2.3-", "1.2.3-a..b",
    "1.2.3rc1", "1.x", "1.2.3_", " 1", "1\n", "-1", "१.२", "release-1.2", "9" * 5000,
]  # fmt: skip

# SemVer 2.0.0 section 11, and what tags add to it; lowest first.
ORDER = ["0.0.0-0", "0", "1.0.0-0", "1.0.0-2", "1.0.0-11", "1.0.0-alpha", "1.0.0-alpha.1", "1.0.0-alpha.beta",
         "1.0.0-beta", "1.0.0-beta.2", "1.0.0-beta.11", "1.0.0-rc.1", "1.0.0", "1.0.1", "v1.2", "1.10",
         "2.0.0-alpine", "2", "20240131"]  # fmt: skip

# range, versions that it takes, versions that it refuses; more are in test_published_ranges.py
RANGES = [
    ("1.2.3", "1.2.3 v1.2.3 01.2.3 1.2.3_b", "1.2.4 1.2.2 1.2.3-rc.1"),
    ("== 1.2.3", "1.2.3", "1.2.4"),
    ("1.2", "1.2.0 1.2 1.2.99", "1.3.0 1.1.9"),
    ("1.X", "1.0.0 1.99", "2.0.0 0.9"),
    ("1.*", "1.0.0 1.99", "2.0.0"),
    ("1.x.3", "1.0.0 1.5.9", "2.0.0"),
    ("1", "1.0.0 1.9.9", "2.0.0"),
    ("*", "0.0.0 9.9.9", "1.0.0-rc.1"),
    ("!=1.2.3", "1.2.4 1.2.2", "1.2.3"),
    ("!=1.2", "1.3.0 1.1.9", "1.2.0 1.2.9"),
    ("!=*", "", "0.0.0 1.0.0"),
    (">1.2.3", "1.2.4 2", "1.2.3 1.2.2"),
    (">1", "2.0.0", "1.9.9"),
    (">*", "", "0.0.0 9.9.9"),
    ("<*", "", "0.0.0 1.0.0"),
    ("<=1.2", "1.2.9 1.1", "1.3.0"),
    ("<=*", "0 9", ""),
    ("^1.2.3", "1.2.3 1.9.9", "2.0.0 1.2.2"),
    ("^0.2.3", "0.2.3 0.2.9", "0.3.0 0.2.2"),
    ("^0.0.3", "0.0.3", "0.0.4 0.0.2"),
    ("^0.0.0", "0.0.0", "0.0.1 0.0.9 0.1.0"),
    ("^*", "0 9", ""),
    ("~1.2.3", "1.2.3 1.2.9", "1.3.0 1.2.2"),
    (">=1.2,<2", "1.2.0 1.9.9", "2.0.0 1.1"),
    (" >=1.2 , <2 ", "1.2.0", "2.0.0"),
    ("1.2||3", "1.2.5 3.1", "2.0.0 1.3"),
    (">=1,<2 || >=3 , !=3.1", "1.5 3.0.1", "2 3.1.4"),
    (">=v1.2.3", "1.2.3", "1.2.2"),
]

# range, rule, pre-releases that it takes, those that it refuses
PRERELEASES: list[tuple[str, Prerelease, str, str]] = [
    (">=1.2.3", "exclude", "", "1.3.0-rc.1 1.2.3-rc.1"),
    (">=1.2.3-rc.2", "exclude", "1.2.3-rc.2 1.2.3-rc.3", "1.2.3-rc.1 1.2.4-rc.1"),
    ("^1.2.3-rc.2", "exclude", "1.2.3-rc.3", "1.2.3-rc.1 1.2.4-rc.1 2.0.0-rc.1"),
    ("~1.2.3-rc.2", "exclude", "1.2.3-rc.3", "1.2.3-rc.1 1.3.0-rc.1"),
    ("1.2.3-rc.1", "exclude", "1.2.3-rc.1 v1.2.3-rc.1", "1.2.3-rc.2"),
    (">=1.2.3-rc.1,<1.2.3", "exclude", "1.2.3-rc.5", "1.2.3-alpha"),
    (">=1.2.3-rc.1 || <1", "exclude", "1.2.3-rc.1", "0.9.0-rc.1"),
    (">=1,!=1.2.3-rc.1", "exclude", "", "1.2.3-rc.1 1.2.3-rc.2"),
    (">=1.2.3", "include", "1.2.3-rc.1 1.3.0-alpine", "1.2.2-rc.1"),
    ("<2", "include", "1.9.9-rc.1", "2.0.0-rc.1"),
    ("^1.2", "include", "1.2.0-rc.1 1.9.0-x", "2.0.0-rc.1"),
    (">=1.2.3-rc.2", "include", "1.2.3-rc.2 1.2.4-rc.1", "1.2.3-rc.1"),
    (">=1.2.3-rc.1,<1.2.3", "include", "1.2.3-rc.5", "1.2.3-alpha"),
    ("!=1.2.3", "include", "1.2.4-rc.1", "1.2.3-rc.1"),
    (">=1,!=1.2.3-rc.1", "include", "1.2.3-rc.2", "1.2.3-rc.1"),
    ("!=1.2", "include", "1.3.0-rc.1", "1.2.0-rc.1"),
    ("*", "only", "0.0.0-0 1.0.0-rc.1", "1.0.0 0"),
    (">=2", "only", "2.0.0-rc.1", "1.0.0-rc.1 2.0.0"),
]

MALFORMED = [
    ("", "write '*'"),
    (",", "write '*'"),
    (">=1,", "write '*'"),
    ("1||", "write '*'"),
    (">=1.2 <2", "comma"),
    ("1.2 1.3", "comma"),
    ("1.2 - 1.4", "write '>=1.2,<=1.4'"),
    ("latest", "not a comparator"),
    ("1.2.3.4", "not a comparator"),
    (">>1", "not a comparator"),
    ("=>1", "not a comparator"),
    ("~>1.2", "not a comparator"),
    (">=", "not a comparator"),
    ("1.2-rc.1", "all three numbers"),
    ("1.x.3-rc.1", "all three numbers"),
    ("1.2.3-", "not a comparator"),
    ("1|2", "not a comparator"),
    ("1" * 2000, "characters"),
]


@pytest.mark.parametrize("tag", VERSIONS)
def test_a_tag_that_spells_a_version_is_one(tag: str) -> None:
    assert parse_version(tag) is not None


@pytest.mark.parametrize("tag", NO_VERSIONS, ids=lambda tag: repr(tag)[:20])
def test_any_other_tag_is_none(tag: str) -> None:
    assert parse_version(tag) is None


def version(tag: str) -> Version:
    parsed = parse_version(tag)
    assert parsed is not None
    return parsed


def test_precedence_is_semvers() -> None:
    versions = [version(tag) for tag in ORDER]
    assert sorted(versions) == versions
    assert all(low < high for low, high in itertools.pairwise(versions))


@pytest.mark.parametrize("tag", ["1.2.0", "v1.2", "01.02", "1.2_5", "1.2.0+5"])
def test_spelling_and_build_do_not_count(tag: str) -> None:
    assert version(tag) == version("1.2")


@pytest.mark.parametrize(
    ("lower", "same", "higher"),
    [
        ("1.0.0-rc.1", "1.0.0-rc.002", "1.0.0-rc.10"),
        ("1.0.0-0", "1.0.0-01", "1.0.0-2"),
        ("1.0.0-rc.00000000009", "1.0.0-rc.010", "1.0.0-rc.11"),
        ("1.0.0-alpha.0", "1.0.0-alpha.00.1", "1.0.0-alpha.1"),
    ],
)
def test_leading_zeros_of_a_number_in_a_prerelease_do_not_count(
    lower: str, same: str, higher: str
) -> None:
    """Semver forbids them, and tags have them: what is a number is ordered as that number."""
    assert version(lower) < version(same) < version(higher)
    plain = ".".join(part.lstrip("0") or "0" for part in same.removeprefix("1.0.0-").split("."))
    assert version(same) == version(f"1.0.0-{plain}")


@pytest.mark.parametrize(("text", "taken", "refused"), RANGES, ids=[row[0] for row in RANGES])
def test_range_takes(text: str, taken: str, refused: str) -> None:
    allowed = parse_range(text)
    assert [tag for tag in taken.split() if not admits(allowed, version(tag))] == []
    assert [tag for tag in refused.split() if admits(allowed, version(tag))] == []


@pytest.mark.parametrize(
    ("text", "rule", "taken", "refused"),
    PRERELEASES,
    ids=[f"{row[0]} {row[1]}" for row in PRERELEASES],
)
def test_prerelease_rule(text: str, rule: Prerelease, taken: str, refused: str) -> None:
    allowed = parse_range(text)
    assert [tag for tag in taken.split() if not admits(allowed, version(tag), rule)] == []
    assert [tag for tag in refused.split() if admits(allowed, version(tag), rule)] == []


@pytest.mark.parametrize(
    ("text", "remedy"), MALFORMED, ids=[repr(row[0])[:20] for row in MALFORMED]
)
def test_a_malformed_range_says_the_remedy(text: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=r"[a-z]") as caught:
        parse_range(text)
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


NUMBERS = st.integers(0, 12)
IDENTIFIERS = st.lists(
    st.one_of(NUMBERS.map(str), st.text("abR-", min_size=1, max_size=3)), min_size=1, max_size=3
)
TAGS = st.builds(
    lambda numbers, pre: ".".join(map(str, numbers)) + (f"-{'.'.join(pre)}" if pre else ""),
    st.lists(NUMBERS, min_size=1, max_size=3),
    st.one_of(st.none(), IDENTIFIERS),
)


def precedes(one: str, other: str) -> bool:
    """SemVer 2.0.0 section 11, word by word."""

    def split(tag: str) -> tuple[list[int], list[str]]:
        release, _, pre = tag.partition("-")
        numbers = [int(number) for number in release.split(".")]
        return [*numbers, 0, 0][:3], pre.split(".") if pre else []

    (release, pre), (other_release, other_pre) = split(one), split(other)
    if release != other_release:
        return release < other_release
    if not pre or not other_pre:
        return bool(pre) and not other_pre
    for left, right in zip(pre, other_pre, strict=False):
        if left == right:
            continue
        if left.isdigit() and right.isdigit():
            if int(left) != int(right):
                return int(left) < int(right)
        elif left.isdigit() != right.isdigit():
            return left.isdigit()
        else:
            return left < right
    return len(pre) < len(other_pre)


@given(TAGS, TAGS)
def test_ordering_agrees_with_the_words_of_semver(one: str, other: str) -> None:
    assert (version(one) < version(other)) is precedes(one, other)
    assert (version(one) == version(other)) is (
        not precedes(one, other) and not precedes(other, one)
    )


@given(TAGS, TAGS)
def test_operators_agree_with_the_order(tag: str, edge: str) -> None:
    triple = version(edge).release
    spelled = ".".join(map(str, triple))
    release = version(tag).release
    if not version(tag).is_prerelease:
        assert admits(parse_range(f">={spelled}"), version(tag)) is (release >= triple)
        assert admits(parse_range(f"<{spelled}"), version(tag)) is (release < triple)
        assert admits(parse_range(f"{spelled}"), version(tag)) is (release == triple)
        assert admits(parse_range(f"!={spelled}"), version(tag)) is (release != triple)
        assert admits(parse_range("*"), version(tag))


OPERATORS = st.sampled_from(["", "=", "==", "!=", ">", ">=", "<", "<=", "^", "~"])
COMPARATORS = st.builds(lambda operator, tag: operator + tag, OPERATORS, TAGS)


@given(st.lists(COMPARATORS, min_size=1, max_size=3), TAGS)
def test_excluding_prereleases_never_takes_more_than_including_them(
    parts: list[str], tag: str
) -> None:
    try:
        allowed = parse_range(",".join(parts))
    except ValueError:
        return
    if admits(allowed, version(tag), "exclude"):
        assert admits(allowed, version(tag), "include")
    assert not (admits(allowed, version(tag), "only") and not version(tag).is_prerelease)


@given(st.text("0123456789.xX*v-+_ ,|=<>!^~ab", max_size=30))
def test_any_text_is_a_range_or_an_error_that_says_so(text: str) -> None:
    try:
        allowed = parse_range(text)
    except ValueError:
        return
    assert admits(allowed, version("1.2.3"), "include") in (True, False)


_IDENTIFIERS = st.lists(st.text("0129aZ-", min_size=1, max_size=4), min_size=1, max_size=3)


@given(_IDENTIFIERS, _IDENTIFIERS)
def test_identifiers_are_ordered_one_by_one(ours: list[str], theirs: list[str]) -> None:
    def key(identifiers: list[str]) -> list[tuple[int, int, str]]:
        return [(0, int(each), "") if each.isdigit() else (1, 0, each) for each in identifiers]

    one, other = (parse_version(f"1.2.3-{'.'.join(each)}") for each in (ours, theirs))
    assert one is not None
    assert other is not None
    assert ((one < other), (one == other)) == (
        (key(ours) < key(theirs)),
        (key(ours) == key(theirs)),
    )


@pytest.mark.rule("R14")
def test_a_version_of_many_identifiers_takes_no_more_than_its_text() -> None:
    """A listing may name a million of them, and to order them all are in memory at once."""
    tracemalloc.start()
    try:
        kept = [parse_version(f"1.2.3-{'1.' * 58}{number}") for number in range(2000)]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert all(kept)
    assert held / 2000 < 1000
