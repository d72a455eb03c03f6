"""Globs, versions, ranges and the selection of tags (docs/design.md sections 4 and 5).

More ranges are in test_published_ranges.py; any text as a glob, a range or a version in test_fuzz.py.
"""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _regsync.tags import (
    TagRule,
    admits,
    compile_glob,
    literal_tag,
    parse_range,
    parse_version,
    select,
    select_literals,
)

SIGNATURE = f"sha256-{'a' * 64}"


# Globs.

# pattern, tags that match, tags that do not
GLOBS = [
    ("latest", "latest", "Latest latest1 xlatest"),
    ("*", "a 1.2 _", ""),
    ("1.*", "1. 1.2 1.2.3", "1 2.1 11.2 x1.2"),
    ("*-alpine", "1.2-alpine -alpine", "1.2-alpine3 alpine"),
    ("v[0-9].[0-9]", "v1.2", "v12 v1.22 vx.1"),
    ("[!a-c]x", "dx 1x", "ax bx x"),
    ("[-a]x", "ax -x", "bx"),
    ("[*?]", "", "a b"),
    ("{1.2,1.3}", "1.2 1.3", "1.4 1.21 1.2,1.3"),
    ("a{,b}c", "ac abc", "abbc"),
    ("a{b{1,2},c}d", "ab1d ab2d acd", "abd ab1cd ad"),
    ("{*-rc,v?}", "1-rc v1 -rc", "v v11"),
    ("*a*b*", "ab xaxbx", "ba"),
]


@pytest.mark.parametrize(("pattern", "taken", "refused"), GLOBS, ids=[row[0] for row in GLOBS])
def test_a_glob_matches_whole_tags(pattern, taken, refused):
    matches = compile_glob(pattern)
    assert [tag for tag in taken.split() if not matches(tag)] == []
    assert [tag for tag in refused.split() if matches(tag)] == []


NO_PATTERNS = ["[abc", "[!", "[]", "[^a]", "[z-a]", "{a,b", "a}", "[a\\"]
NO_TAGS = ["a b", "1.0,1.1", "repo:tag", "x" * 129]
MALFORMED = [
    ("", "empty"),
    ("{a,b}" * 10, "1000 alternatives"),
    ("*" * 1025, "1024 characters"),
    *((pattern, "is not a pattern") for pattern in NO_PATTERNS),
    *((pattern, "never be a tag") for pattern in NO_TAGS),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "remedy"), MALFORMED)
def test_a_malformed_glob_says_what_is_wrong(pattern, remedy):
    for read in (literal_tag, compile_glob):
        with pytest.raises(ValueError, match=remedy):
            read(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["*a" * 60 + "b", "*" * 60 + "b", "{*,a*}" * 9 + "b", "*?" * 60 + "b", "[a-b]*?" * 60 + "b"],
    ids=["runs", "stars", "runs in alternatives", "runs and single", "runs and sets"],
)
def test_no_pattern_hangs(pattern):
    # Any of these takes a backtracking matcher more than 2**60 steps.
    assert not compile_glob(pattern)("a" * 128)


@given(
    st.lists(st.sampled_from([row[0] for row in GLOBS]), max_size=6),
    st.text("ab1.2-xvc", max_size=6),
)
def test_many_patterns_match_what_one_of_them_matches(patterns, tag):
    assert compile_glob(*patterns)(tag) is any(compile_glob(pattern)(tag) for pattern in patterns)


# Versions.

VERSIONS = """1 v1 1.2 v1.2.3 01.002.3 20240131 1.2.3-rc.1 1.2-alpine 1.2.3_5 1.2.3+build.7 1.2.3-rc.1_b-2
    1.2.3-alpine3.19 1.2.3-- 1.2.3-0"""  # fmt: skip
NO_VERSIONS = [
    "", "v", "latest", "1.2.3.4", "1.", ".1", "1..2", "V1", "vv1", "1.2.3-", "1.2.3-a..b", "1.2.3rc1", "1.x",
    "1.2.3_", " 1", "1\n", "-1", "१.२", "release-1.2", "9" * 5000,
]  # fmt: skip

# SemVer 2.0.0 section 11, and what tags add to it; lowest first. A leading zero does not count.
ORDER = """0.0.0-0 0 1.0.0-0 1.0.0-2 1.0.0-11 1.0.0-alpha 1.0.0-alpha.0 1.0.0-alpha.00.1 1.0.0-alpha.1
    1.0.0-alpha.beta 1.0.0-beta 1.0.0-beta.2 1.0.0-beta.00000000009 1.0.0-beta.010 1.0.0-beta.11 1.0.0-rc.1
    1.0.0 1.0.1 v1.2 1.10 2.0.0-alpine 2 20240131"""  # fmt: skip


def version(tag):
    parsed = parse_version(tag)
    assert parsed is not None
    return parsed


def test_a_tag_that_spells_a_version_is_one():
    assert [tag for tag in VERSIONS.split() if parse_version(tag) is None] == []
    assert [tag for tag in NO_VERSIONS if parse_version(tag) is not None] == []


def test_precedence_is_semvers():
    versions = [version(tag) for tag in ORDER.split()]
    assert all(low < high for low, high in itertools.pairwise(versions))


@pytest.mark.parametrize(
    ("tag", "same"),
    [
        *((tag, "1.2") for tag in ("1.2.0", "v1.2", "01.02", "1.2_5", "1.2.0+5")),
        ("1.0.0-rc.002", "1.0.0-rc.2"),
        ("1.0.0-00", "1.0.0-0"),
    ],
)
def test_spelling_build_and_leading_zeros_do_not_count(tag, same):
    assert version(tag) == version(same)


def test_a_version_of_many_identifiers_takes_no_more_than_its_text():
    """A listing may name a million of them, and to order them all are in memory at once."""
    tracemalloc.start()
    try:
        versions = [parse_version(f"1.2.3-{'1.' * 58}{number}") for number in range(200)]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert all(versions)
    assert held / 200 < 1000


# Ranges.

# range, rule for pre-releases, versions that it takes, versions that it refuses
RANGES = [
    ("!=1.2", "exclude", "1.3.0 1.1.9", "1.2.0 1.2.9"),
    ("!=*", "exclude", "", "0.0.0 1.0.0"),
    (">*", "exclude", "", "0.0.0 9.9.9"),
    ("<*", "exclude", "", "0.0.0 1.0.0"),
    ("^0.0.0", "exclude", "0.0.0", "0.0.1 0.0.9 0.1.0"),
    (">=1,<2 || >=3 , !=3.1", "exclude", "1.5 3.0.1", "2 3.1.4"),
    (">=v1.2.3", "exclude", "1.2.3", "1.2.2 1.3.0-rc.1 1.2.3-rc.1"),
    (">=1.2.3-rc.2", "exclude", "1.2.3-rc.2 1.2.3-rc.3", "1.2.3-rc.1 1.2.4-rc.1"),
    ("~1.2.3-rc.2", "exclude", "1.2.3-rc.3", "1.2.3-rc.1 1.3.0-rc.1"),
    ("1.2.3-rc.1", "exclude", "1.2.3-rc.1 v1.2.3-rc.1", "1.2.3-rc.2"),
    (">=1.2.3-rc.1,<1.2.3", "exclude", "1.2.3-rc.5", "1.2.3-alpha"),
    (">=1.2.3-rc.1 || <1", "exclude", "1.2.3-rc.1", "0.9.0-rc.1"),
    (">=1,!=1.2.3-rc.1", "exclude", "", "1.2.3-rc.1 1.2.3-rc.2"),
    (">=1.2.3", "include", "1.2.3-rc.1 1.3.0-alpine", "1.2.2-rc.1"),
    (">=1,!=1.2.3-rc.1", "include", "1.2.3-rc.2", "1.2.3-rc.1"),
    ("*", "only", "0.0.0-0 1.0.0-rc.1", "1.0.0 0"),
    (">=2", "only", "2.0.0-rc.1", "1.0.0-rc.1 2.0.0"),
]


@pytest.mark.parametrize(("text", "rule", "taken", "refused"), RANGES)
def test_a_range_takes(text, rule, taken, refused):
    allowed = parse_range(text)
    assert [tag for tag in taken.split() if not admits(allowed, version(tag), rule)] == []
    assert [tag for tag in refused.split() if admits(allowed, version(tag), rule)] == []


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        *((text, "write '*'") for text in ("", ",", ">=1,", "1||")),
        *((text, "comma") for text in (">=1.2 <2", "1.2 1.3")),
        ("1.2 - 1.4", "as in '>=1,<2'"),
        *((text, "not a comparator") for text in ("latest", "1.2.3.4", ">>1", "=>1", "~>1.2", ">=", "1.2.3-", "1|2")),
        *((text, "all three numbers") for text in ("1.2-rc.1", "1.x.3-rc.1")),
        ("1" * 2000, "characters"),
    ],
)  # fmt: skip
def test_a_malformed_range_says_the_remedy(text, remedy):
    with pytest.raises(ValueError, match=r"[a-z]") as caught:
        parse_range(text)
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


# Selections.


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        (TagRule(glob=("1.2", "latest", "1.2")), ("1.2", "latest")),
        (TagRule(glob=("1.2", "1.10"), sort="semver"), ("1.10", "1.2")),
        (TagRule(glob=("1.2",), min_tags=3), ("1.2",)),
        (TagRule(glob=("1.2",), immutable_tags="*"), ("1.2",)),
        (TagRule(glob=(SIGNATURE,)), (SIGNATURE,)),
        (TagRule(glob=("1.2",), semver_prerelease="include"), ("1.2",)),
        (TagRule(), None),
        (TagRule(glob=("1.2", "1.*")), None),
        (TagRule(glob=("{1,2}",)), None),
        (TagRule(glob=("1.2",), exclude=("x",)), None),
        (TagRule(glob=("1.2",), semver=">=1"), None),
        (TagRule(glob=("1.2",), semver_prerelease="exclude"), None),
        (TagRule(glob=("1.2",), sort="alpha", latest=1), None),
    ],
)
def test_only_literals_that_nothing_narrows_need_no_listing(rule, names):
    selection = select_literals(rule)
    assert selection == (names and (names, {}, rule.min_tags or 0))


LISTING = ["1.0.0", "1.1.0", "1.2.0-rc.1", "2.0.0", "v2.1.0", "latest", "edge", "2.0.0-alpine", SIGNATURE]  # fmt: skip

# name, rule, what is kept in order, reasons of some that are dropped
SELECTIONS = [
    ("nothing set keeps images in the listing's order", TagRule(),
     "1.0.0 1.1.0 1.2.0-rc.1 2.0.0 v2.1.0 latest edge 2.0.0-alpine", {SIGNATURE: "referrer_tag"}),
    ("glob", TagRule(glob=("1.*", "edge")), "1.0.0 1.1.0 1.2.0-rc.1 edge",
     {"latest": "glob", SIGNATURE: "referrer_tag"}),
    ("referrer tags on demand", TagRule(glob=("sha256-*",)), SIGNATURE, {"latest": "glob"}),
    ("range sorts too", TagRule(semver=">=1.1"), "v2.1.0 2.0.0 1.1.0",
     {"1.0.0": "semver", "latest": "semver", "1.2.0-rc.1": "prerelease", "2.0.0-alpine": "prerelease"}),
    ("prereleases only", TagRule(semver_prerelease="only"), "1.2.0-rc.1 2.0.0-alpine",
     {"1.0.0": "prerelease", "latest": "prerelease"}),
    ("prereleases excluded, and nothing else", TagRule(semver_prerelease="exclude"),
     "1.0.0 1.1.0 2.0.0 v2.1.0 latest edge", {"1.2.0-rc.1": "prerelease", "2.0.0-alpine": "prerelease"}),
    ("exclude", TagRule(exclude=("*-*", "edge")), "1.0.0 1.1.0 2.0.0 v2.1.0 latest",
     {"edge": "exclude", "2.0.0-alpine": "exclude"}),
    ("latest after sort", TagRule(glob=("*.0",), sort="alpha", latest=2), "v2.1.0 2.0.0",
     {"1.1.0": "latest", "1.0.0": "latest"}),
    ("floor: latest's first, then versions'", TagRule(semver="1.x", latest=1, min_tags=4),
     "v2.1.0 2.0.0 1.1.0 1.0.0", {"2.0.0-alpine": "semver", "latest": "semver"}),
    ("floor: non-versions last", TagRule(glob=("1.0.0", "edge", "latest", "2.*"), semver="1", min_tags=4),
     "2.0.0 2.0.0-alpine 1.0.0 latest", {"edge": "semver"}),
    ("what exclude or glob refuse never comes back",
     TagRule(glob=("1.*", "2.*"), semver=">=2", exclude=("1.1.0", "*-*"), min_tags=9), "2.0.0 1.0.0",
     {"latest": "glob", "1.1.0": "semver", "2.0.0-alpine": "prerelease"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "kept", "dropped"), [row[1:] for row in SELECTIONS], ids=[row[0] for row in SELECTIONS]
)
def test_a_rule_selects(rule, kept, dropped):
    selection = select(LISTING, rule)
    assert (selection.kept, selection.min_tags) == (tuple(kept.split()), rule.min_tags or 0)
    assert {tag: selection.dropped[tag] for tag in dropped} == dropped


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
@pytest.mark.parametrize("end", ["", ".sig"])
def test_a_glob_that_begins_as_a_referrer_tag_takes_referrer_tags(algorithm, end):
    """Of either algorithm: a referrers tag has 64 digits of its digest, whatever the digest has."""
    tag = f"{algorithm}-{'b' * 64}{end}"
    asked_for = select(["1.0", tag], TagRule(glob=(f"{algorithm}-*",)))
    assert (asked_for.kept, asked_for.dropped) == ((tag,), {"1.0": "glob"})
    unasked = select(["1.0", tag], TagRule())
    assert (unasked.kept, unasked.dropped) == (("1.0",), {tag: "referrer_tag"})


def test_latest_alone_is_no_rule():
    for rule in (TagRule(latest=3), TagRule(latest=3, semver_prerelease="only")):
        with pytest.raises(ValueError, match="needs `sort`"):
            select(LISTING, rule)


def test_equal_versions_are_ordered_by_descending_code_points_and_a_tag_listed_twice_is_one():
    listing = ["1.2", "v1.2.0", "1.2", "1.2.0", "1.2.0_a"]
    assert select(listing, TagRule(sort="semver")).kept == ("v1.2.0", "1.2.0_a", "1.2.0", "1.2")
    assert select(["a", "b", "a"], TagRule()).kept == ("a", "b")


RULES = st.builds(
    TagRule,
    glob=st.sampled_from([(), ("*",), ("1*", "l*"), ("sha256-*",)]),
    exclude=st.sampled_from([(), ("*-rc*",), ("1.0*",)]),
    semver=st.sampled_from([None, ">=1.1", "1.x||3", "*"]),
    semver_prerelease=st.sampled_from([None, "include", "exclude", "only"]),
    sort=st.sampled_from(["semver", "alpha"]),
    latest=st.sampled_from([None, 1, 3]),
    min_tags=st.sampled_from([None, 0, 2, 5]),
)


@given(st.lists(st.sampled_from([*LISTING, "1.0", "1.0-rc1", "3", "3.1-rc.2"])), RULES)
def test_a_selection_agrees_with_the_sentences_of_design_section_5(listing, rule):
    """Each step once more, tag by tag and without regard to speed or the order of the listing."""

    def fits(tag, patterns):
        return any(compile_glob(pattern)(tag) for pattern in patterns)

    def height(tag):
        return ((parse_version(tag) or ()) if rule.sort != "alpha" else (), tag)

    def reason_of(tag):
        found = parse_version(tag)
        if tag == SIGNATURE and "sha256-*" not in rule.glob:
            return "referrer_tag"
        if not fits(tag, rule.glob or ("*",)):
            return "glob"
        if rule.semver is None:
            is_prerelease = found is not None and found.is_prerelease
            if rule.semver_prerelease == ("exclude" if is_prerelease else "only"):
                return "prerelease"
        elif found is None or not admits(allowed, found, "include"):
            return "semver"
        elif not admits(allowed, found, rule.semver_prerelease or "exclude"):
            return "prerelease"
        return "exclude" if fits(tag, rule.exclude) else None

    allowed = parse_range(rule.semver or "*")
    reasons = {tag: reason_of(tag) for tag in sorted(set(listing), key=height, reverse=True)}
    ranked = [tag for tag, reason in reasons.items() if reason is None]
    wanted, cut = ranked[: rule.latest], ranked[rule.latest or len(ranked) :]
    by_version = [tag for tag, reason in reasons.items() if reason in ("semver", "prerelease")]
    spare = [*cut, *(tag for tag in by_version if not fits(tag, rule.exclude))]
    wanted += spare[: max(0, (rule.min_tags or 0) - len(wanted))]
    selection = select(listing, rule)
    assert list(selection.kept) == sorted(wanted, key=height, reverse=True)
    reasons |= dict.fromkeys(cut, "latest")
    assert dict(selection.dropped) == {tag: reasons[tag] for tag in reasons if tag not in wanted}
