"""Globs and the selection of tags (docs/design.md sections 4 and 5)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _regsync import tags as tags_module
from _regsync.tags import (
    Reason,
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

# pattern, tags that match, tags that do not
GLOBS = [
    ("latest", "latest", "Latest latest1 xlatest"),
    ("*", "a 1.2 _", ""),
    ("1.*", "1. 1.2 1.2.3", "1 2.1 11.2 x1.2"),
    ("*-alpine", "1.2-alpine -alpine", "1.2-alpine3 alpine"),
    ("1.?", "1.2 1.x", "1. 1.22"),
    ("v[0-9].[0-9]", "v1.2", "v12 v1.22 vx.1"),
    ("[abc]x", "ax bx cx", "dx abcx x"),
    ("[!a-c]x", "dx 1x", "ax bx x"),
    ("[a-]x", "ax -x", "bx"),
    ("[-a]x", "ax -x", "bx"),
    ("[a-c-e]", "a b c - e", "d"),
    ("[*?]", "", "a b"),
    ("{1.2,1.3}", "1.2 1.3", "1.4 1.21 1.2,1.3"),
    ("{1,2}.{0,1}-x", "1.0-x 2.1-x", "1.2-x 3.0-x"),
    ("a{,b}c", "ac abc", "abbc"),
    ("a{b{1,2},c}d", "ab1d ab2d acd", "abd ab1cd ad"),
    ("{a}", "a", "b"),
    ("a{}b", "ab", "a"),
    ("{*-rc,v?}", "1-rc v1 -rc", "v v11"),
    ("**", "a", ""),
    ("*a*b*", "ab xaxbx", "ba"),
]

MALFORMED = [
    ("", "empty"),
    ("[abc", "is not a pattern"),
    ("[", "is not a pattern"),
    ("[!", "is not a pattern"),
    ("[]", "is not a pattern"),
    ("[!]", "is not a pattern"),
    ("[^a]", "is not a pattern"),
    ("[z-a]", "is not a pattern"),
    ("{a,b", "is not a pattern"),
    ("a}", "is not a pattern"),
    ("{a}}", "is not a pattern"),
    ("a\\", "is not a pattern"),
    ("[a\\", "is not a pattern"),
    (r"a\.*", "is not a pattern"),
    ("{a,b}" * 10, "1000 alternatives"),
    ("*" * 1025, "1024 characters"),
    ("a b", "never be a tag"),
    ("1.0,1.1", "never be a tag"),
    ("repo:tag", "never be a tag"),
    ("x" * 129, "never be a tag"),
]


@pytest.mark.parametrize(("pattern", "taken", "refused"), GLOBS, ids=[row[0] for row in GLOBS])
def test_glob_matches_whole_tags(pattern: str, taken: str, refused: str) -> None:
    matches = compile_glob(pattern)
    assert [tag for tag in taken.split() if not matches(tag)] == []
    assert [tag for tag in refused.split() if matches(tag)] == []


@pytest.mark.parametrize(
    ("pattern", "remedy"), MALFORMED, ids=[repr(row[0])[:12] for row in MALFORMED]
)
def test_a_malformed_glob_says_what_is_wrong(pattern: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=r"[a-z]") as caught:
        literal_tag(pattern)
    assert remedy in str(caught.value)
    with pytest.raises(ValueError, match=r"[a-z]"):
        compile_glob(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "*a" * 60 + "b",
        "*" * 60 + "b",
        "{*,a*}" * 9 + "b",
        "{a,{a,{a,{a,a*}*}*}*}*b",
        "*?" * 60 + "b",
        "[a-b]*?" * 60 + "b",
    ],
    ids=["runs", "stars", "runs in alternatives", "nested", "runs and single", "runs and sets"],
)
def test_no_pattern_hangs(pattern: str) -> None:
    # Any of these takes a backtracking matcher more than 2**60 steps.
    assert not compile_glob(pattern)("a" * 128)


@given(
    st.lists(st.sampled_from([row[0] for row in GLOBS]), max_size=6),
    st.text("ab1.2-xvc", max_size=6),
)
def test_many_patterns_match_what_one_of_them_matches(patterns: list[str], tag: str) -> None:
    assert compile_glob(*patterns)(tag) is any(compile_glob(pattern)(tag) for pattern in patterns)


def naive(pattern: tuple[object, ...], tag: str) -> bool:
    """Match by trying everything: the reference."""
    if not pattern:
        return not tag
    first, rest = pattern[0], pattern[1:]
    if first == "*":
        return any(naive(rest, tag[i:]) for i in range(len(tag) + 1))
    if isinstance(first, tuple):
        return any(naive((*branch, *rest), tag) for branch in first)
    if isinstance(first, frozenset):
        return bool(tag) and tag[0] in first and naive(rest, tag[1:])
    return bool(tag) and first in ("?", tag[0]) and naive(rest, tag[1:])


def spelled(pattern: tuple[object, ...]) -> str:
    parts = []
    for part in pattern:
        if isinstance(part, tuple):
            parts.append("{" + ",".join(spelled(branch) for branch in part) + "}")
        elif isinstance(part, frozenset):
            parts.append("[" + "".join(sorted(part)) + "]")
        else:
            parts.append(str(part))
    return "".join(parts)


SIMPLE: st.SearchStrategy[object] = st.one_of(
    st.sampled_from(["*", "?", "a", "b", "1"]), st.frozensets(st.sampled_from("ab1"), min_size=1)
)
PATTERNS = st.recursive(
    st.lists(SIMPLE, max_size=4).map(tuple),
    lambda inner: st.lists(
        st.one_of(SIMPLE, st.lists(inner, min_size=1, max_size=3).map(tuple)), max_size=4
    ).map(tuple),
    max_leaves=6,
)


@given(PATTERNS, st.lists(st.text("ab1", max_size=6), max_size=8))
def test_globs_agree_with_a_naive_matcher(pattern: tuple[object, ...], names: list[str]) -> None:
    text = spelled(pattern)
    if not text:
        return
    matches = compile_glob(text)
    assert [matches(tag) for tag in names] == [naive(pattern, tag) for tag in names]


@given(st.text("ab[]{}!-,*?\\^", max_size=12), st.text("ab-", max_size=5))
def test_any_text_is_a_glob_or_an_error(pattern: str, tag: str) -> None:
    try:
        matches = compile_glob(pattern)
    except ValueError:
        return
    assert matches(tag) in (True, False)


LITERALS = [
    (TagRule(glob=("1.2", "latest")), ("1.2", "latest")),
    (TagRule(glob=("1.2", "1.2")), ("1.2",)),
    (TagRule(glob=("1.2", "1.10"), sort="semver"), ("1.10", "1.2")),
    (TagRule(glob=("1.2",), min_tags=3), ("1.2",)),
    (TagRule(glob=("1.2",), immutable_tags="*"), ("1.2",)),
    (TagRule(glob=(SIGNATURE,)), (SIGNATURE,)),
    (TagRule(), None),
    (TagRule(glob=("1.2", "1.*")), None),
    (TagRule(glob=("{1,2}",)), None),
    (TagRule(glob=("1.2",), exclude=("x",)), None),
    (TagRule(glob=("1.2",), semver=">=1"), None),
    (TagRule(glob=("1.2",), semver_prerelease="include"), ("1.2",)),
    (TagRule(glob=("1.2",), semver_prerelease="exclude"), None),
    (TagRule(glob=("1.2",), sort="alpha", latest=1), None),
]


@pytest.mark.parametrize(("rule", "names"), LITERALS, ids=range(len(LITERALS)))
def test_only_literals_that_nothing_narrows_need_no_listing(
    rule: TagRule, names: tuple[str, ...] | None
) -> None:
    selection = select_literals(rule)
    assert (selection and selection.kept) == names
    assert selection is None or not selection.dropped


def test_literals_that_are_fewer_than_the_floor_say_so() -> None:
    found = [select_literals(TagRule(glob=("1.2", "1.3"), min_tags=floor)) for floor in (0, 2, 3)]
    assert [each and (len(each.kept), each.min_tags) for each in found] == [(2, 0), (2, 2), (2, 3)]


LISTING = (
    "1.0.0",
    "1.1.0",
    "1.2.0-rc.1",
    "2.0.0",
    "v2.1.0",
    "latest",
    "edge",
    "2.0.0-alpine",
    SIGNATURE,
)

# name, rule, what is kept in order, reasons of some that are dropped
SELECTIONS: list[tuple[str, TagRule, str, dict[str, str]]] = [
    ("nothing set keeps images in the listing's order", TagRule(),
     "1.0.0 1.1.0 1.2.0-rc.1 2.0.0 v2.1.0 latest edge 2.0.0-alpine", {SIGNATURE: "referrer_tag"}),
    ("glob", TagRule(glob=("1.*", "edge")), "1.0.0 1.1.0 1.2.0-rc.1 edge",
     {"latest": "glob", SIGNATURE: "referrer_tag"}),
    ("referrer tags on demand", TagRule(glob=("sha256-*",)), SIGNATURE, {"latest": "glob"}),
    ("range sorts too", TagRule(semver=">=1.1"), "v2.1.0 2.0.0 1.1.0",
     {"1.0.0": "semver", "latest": "semver", "1.2.0-rc.1": "prerelease", "2.0.0-alpine": "prerelease"}),
    ("prereleases included", TagRule(semver=">=2", semver_prerelease="include"),
     "v2.1.0 2.0.0 2.0.0-alpine", {"1.2.0-rc.1": "semver"}),
    ("prereleases only", TagRule(semver_prerelease="only"), "1.2.0-rc.1 2.0.0-alpine",
     {"1.0.0": "prerelease", "latest": "prerelease"}),
    ("prereleases excluded, and nothing else", TagRule(semver_prerelease="exclude"),
     "1.0.0 1.1.0 2.0.0 v2.1.0 latest edge",
     {"1.2.0-rc.1": "prerelease", "2.0.0-alpine": "prerelease"}),
    ("prereleases included without a range", TagRule(glob=("[le2]*",), semver_prerelease="include"),
     "2.0.0 latest edge 2.0.0-alpine", {"1.0.0": "glob"}),
    ("prereleases only, of a range", TagRule(semver="<2", semver_prerelease="only"), "1.2.0-rc.1",
     {"1.0.0": "prerelease", "latest": "semver", "2.0.0-alpine": "semver"}),
    ("exclude", TagRule(exclude=("*-*", "edge")), "1.0.0 1.1.0 2.0.0 v2.1.0 latest",
     {"edge": "exclude", "2.0.0-alpine": "exclude"}),
    ("versions before the rest", TagRule(sort="semver"),
     "v2.1.0 2.0.0 2.0.0-alpine 1.2.0-rc.1 1.1.0 1.0.0 latest edge", {}),
    ("alpha", TagRule(sort="alpha", glob=("*.0",)), "v2.1.0 2.0.0 1.1.0 1.0.0", {}),
    ("latest after sort", TagRule(glob=("*.0",), sort="alpha", latest=2), "v2.1.0 2.0.0",
     {"1.1.0": "latest", "1.0.0": "latest"}),
    ("latest by versions under a range", TagRule(semver="*", latest=1), "v2.1.0", {"2.0.0": "latest"}),
    ("floor met", TagRule(semver="*", latest=2, min_tags=2), "v2.1.0 2.0.0", {"1.1.0": "latest"}),
    ("floor above latest", TagRule(semver="*", latest=1, min_tags=3), "v2.1.0 2.0.0 1.1.0",
     {"1.0.0": "latest"}),
    ("floor: latest's first, then versions'", TagRule(semver="1.x", latest=1, min_tags=4),
     "v2.1.0 2.0.0 1.1.0 1.0.0", {"2.0.0-alpine": "semver", "latest": "semver"}),
    ("floor: non-versions last", TagRule(glob=("1.0.0", "edge", "latest", "2.*"), semver="1", min_tags=4),
     "2.0.0 2.0.0-alpine 1.0.0 latest", {"edge": "semver"}),
    ("floor without sort orders by version",
     TagRule(glob=("1.0.0", "latest", "2.0.0"), semver_prerelease="only", min_tags=2), "2.0.0 1.0.0",
     {"latest": "prerelease"}),
    ("floor by alpha", TagRule(semver="1.0", sort="alpha", min_tags=2), "v2.1.0 1.0.0", {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "kept", "dropped"), [row[1:] for row in SELECTIONS], ids=[row[0] for row in SELECTIONS]
)
def test_selection(rule: TagRule, kept: str, dropped: dict[str, str]) -> None:
    selection = select(LISTING, rule)
    assert selection.kept == tuple(kept.split())
    assert {tag: selection.dropped[tag] for tag in dropped} == dropped
    assert len(selection.kept) >= selection.min_tags


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
@pytest.mark.parametrize("end", ["", ".sig"])
def test_a_glob_that_begins_as_a_referrer_tag_takes_referrer_tags(algorithm: str, end: str) -> None:
    """Of either algorithm: a referrers tag has 64 digits of its digest, whatever the digest has."""
    tag = f"{algorithm}-{'b' * 64}{end}"
    asked_for = select(["1.0", tag], TagRule(glob=(f"{algorithm}-*",)))
    assert (asked_for.kept, asked_for.dropped) == ((tag,), {"1.0": "glob"})
    unasked = select(["1.0", tag], TagRule())
    assert (unasked.kept, unasked.dropped) == (("1.0",), {tag: "referrer_tag"})


def test_what_exclude_or_glob_refuse_never_comes_back() -> None:
    rule = TagRule(glob=("1.*", "2.*"), semver=">=2", exclude=("1.1.0", "*-*"), min_tags=9)
    selection = select(LISTING, rule)
    assert selection.kept == ("2.0.0", "1.0.0")
    assert selection.min_tags == 9
    assert selection.dropped["latest"] == "glob"
    assert selection.dropped["1.1.0"] == "semver"
    assert selection.dropped["2.0.0-alpine"] == "prerelease"


def test_latest_alone_is_no_rule() -> None:
    with pytest.raises(ValueError, match="needs `sort`"):
        select(LISTING, TagRule(latest=3))
    with pytest.raises(ValueError, match="needs `sort`"):
        select(LISTING, TagRule(latest=3, semver_prerelease="only"))


def test_equal_versions_are_ordered_by_descending_code_points() -> None:
    listing = ["1.2", "v1.2.0", "1.2.0", "1.2.0_a"]
    assert select(listing, TagRule(sort="semver")).kept == ("v1.2.0", "1.2.0_a", "1.2.0", "1.2")


def test_a_tag_listed_twice_is_one_tag() -> None:
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
def test_every_tag_is_kept_or_dropped_and_order_of_the_listing_does_not_matter(
    listing: list[str], rule: TagRule
) -> None:
    selection = select(listing, rule)
    assert set(selection.kept) | set(selection.dropped) == set(listing)
    assert not set(selection.kept) & set(selection.dropped)
    assert len(set(selection.kept)) == len(selection.kept)
    assert select(reversed(listing), rule).kept == selection.kept
    assert selection.min_tags == (rule.min_tags or 0)


@given(st.lists(st.sampled_from([*LISTING, "1.0", "1.0-rc1", "3", "3.1-rc.2"])), RULES)
def test_selection_agrees_with_the_sentences_of_design_section_5(
    listing: list[str], rule: TagRule
) -> None:
    """Each step once more, tag by tag and without regard to speed."""

    def fits(tag: str, patterns: tuple[str, ...]) -> bool:
        return any(compile_glob(pattern)(tag) for pattern in patterns)

    def height(tag: str) -> tuple[object, ...]:
        by_version = rule.sort != "alpha"
        return (parse_version(tag) or () if by_version else (), tag)

    allowed, stage = parse_range(rule.semver or "*"), rule.semver_prerelease or "exclude"
    tiers: dict[Reason | None, list[str]] = {}
    for tag in set(listing):
        version = parse_version(tag)
        reason: Reason | None = None
        if tag == SIGNATURE and "sha256-*" not in rule.glob:
            reason = "referrer_tag"
        elif not fits(tag, rule.glob or ("*",)):
            reason = "glob"
        elif rule.semver is None:
            is_prerelease = version is not None and version.is_prerelease
            if rule.semver_prerelease == ("exclude" if is_prerelease else "only"):
                reason = "prerelease"
        elif version is None or not admits(allowed, version, "include"):
            reason = "semver"
        elif not admits(allowed, version, stage):
            reason = "prerelease"
        if reason is None and fits(tag, rule.exclude):
            reason = "exclude"
        tiers.setdefault(reason, []).append(tag)
    ranked = sorted(tiers.get(None, []), key=height, reverse=True)
    cut = ranked[rule.latest :] if rule.latest else []
    spare = [
        tag
        for tag in tiers.get("semver", []) + tiers.get("prerelease", [])
        if not fits(tag, rule.exclude)
    ]
    wanted = ranked[: len(ranked) - len(cut)]
    for tag in [*cut, *sorted(spare, key=height, reverse=True)]:
        if len(wanted) < (rule.min_tags or 0):
            wanted.append(tag)
    selection = select(listing, rule)
    assert list(selection.kept) == sorted(wanted, key=height, reverse=True)
    reasons: dict[str, Reason] = dict.fromkeys(cut, "latest")
    reasons |= {tag: reason for reason, names in tiers.items() if reason for tag in names}
    assert dict(selection.dropped) == {
        tag: reason for tag, reason in reasons.items() if tag not in wanted
    }


def test_many_tags_are_parsed_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a version costs counts for 100,000 tags: the range and the order share it."""

    parsed: list[str] = []
    parse = parse_version
    monkeypatch.setattr(tags_module, "parse_version", lambda tag: parsed.append(tag) or parse(tag))
    listing = [f"{major}.{minor}" for major in range(20) for minor in range(20)]
    rule = TagRule(semver="<5||>7", exclude=("*.1",), sort="semver", latest=10, min_tags=390)
    assert len(select(listing, rule).kept) == 380
    assert sorted(parsed) == sorted(listing)


def test_a_selection_says_what_it_lacks() -> None:
    few = select(["1.2"], TagRule(min_tags=2))
    assert list(few.warnings("a.example/app")) == [
        ("min_tags", "a.example/app: only 1 tags were found, min_tags asks for 2")
    ]
    assert [event for event, _ in select([], TagRule(min_tags=2)).warnings("a.example/app")] == [
        "min_tags",
        "nothing_selected",
    ]
