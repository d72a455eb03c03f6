"""Which tags of a listing are copied: globs, versions, exclusion, order, limits. Owns: the glob
language, when a tag is a version, ranges and precedence, the tag rule, the selection with a reason
for every tag that it drops. May not know: where a listing comes from, configuration files.
Invariants: the selection is a function of the listing and the rule alone; matching is linear in tag
times pattern; what is wrong with a pattern or a range is one line that says what to write instead.
Follows docs/design.md sections 4 (globs, ranges), 5 (the steps), SemVer 2.0.0 section 11,
node-semver (operators, partials)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache, reduce
from typing import Literal, NamedTuple

from _regsync.oci.reference import is_referrer_tag, is_tag
from _regsync.semver import Prerelease, Version, admits, parse_range, parse_version

Reason = Literal["glob", "semver", "prerelease", "exclude", "latest", "referrer_tag"]


_Order = Literal["semver", "alpha"]


_TOKEN = r"\\.|\[(?P<not>!?)(?P<set>(?:\\.|[^\]\\])*)\]|(?P<unfinished>[\[\\])|(?P<mark>[*?{},])|."


_Accepts = Callable[[str], bool]


_Token = tuple[
    str, "_Accepts | None"
]  # what is written, its test of one character; the marks `*{,}` have none


@lru_cache(256)  # a configuration repeats a few patterns in many mappings
def _tokens(pattern: str) -> tuple[tuple[_Token, ...], str | None]:
    """Return a pattern's tokens, and the only tag that it matches when it has no wildcards."""
    if not pattern:
        raise ValueError("an empty pattern matches nothing: remove it, or write '*' for every tag")
    tokens = list[_Token]()
    depth = 0
    is_literal = True
    for match in re.finditer(_TOKEN, pattern, re.DOTALL):
        kind = match.lastgroup
        text = match[0][-1]
        if kind == "unfinished":
            trouble = "'[' without ']'" if text == "[" else "a backslash at its end"
            raise ValueError(f"{pattern!r} has {trouble}: write \\{text} for the character itself")
        accepts: _Accepts | None = text.__eq__
        if kind == "set":
            accepts = _character_set(pattern, match["set"], match["not"] == "!")
            is_literal = False
        elif kind == "mark" and (text != "," or depth):
            depth += (text == "{") - (text == "}")
            if depth < 0:
                raise ValueError(f"{pattern!r} has a '}}' without '{{'")
            # every character is true
            accepts = bool if text == "?" else None
            is_literal = False
        tokens.append((text, accepts))
    if depth:
        raise ValueError(f"{pattern!r} has a '{{' without '}}'")
    literal = "".join(text for text, _ in tokens) if is_literal else None
    if literal is not None and not is_tag(
        literal
    ):  # it will stand in a request as it is (docs/design.md section 5)
        raise ValueError(
            f"{literal!r} can never be a tag: letters, digits and . _ - only, 128 at most"
        )
    return tuple(tokens), literal


def _character_set(pattern: str, members: str, negated: bool) -> _Accepts:
    if not members:
        raise ValueError(f"{pattern!r} has an empty set of characters")
    if members[0] == "^" and not negated:
        raise ValueError(f"{pattern!r}: a set is negated by '!', as in [!a-z]")
    ranges = [
        (low[-1], (high or low)[-1])
        for low, high in re.findall(r"(\\.|.)(?:-(\\.|.))?", members, re.DOTALL)
    ]
    if turned := [f"{low}-{high}" for low, high in ranges if low > high]:
        raise ValueError(f"{pattern!r}: the range {turned[0]} is the wrong way round")
    return lambda character: any(low <= character <= high for low, high in ranges) is not negated


def _machine(tokens: Sequence[_Token]) -> _Accepts:
    """Return a test that follows all ways to match at once, as the places in the pattern that they
    reach.
    """
    # Only the empty text, which stands in no tag, leads from the first place into the pattern.
    tokens = [("", "".__eq__), *tokens, ("", "".__eq__)]
    # Where a place leads without a character: past a star, into each alternative and out of it.
    leads = {i: [i + 1] for i, (_, accepts) in enumerate(tokens) if accepts is None}
    braces: list[list[int]] = []
    for i in leads:
        if tokens[i][0] == "{":
            braces.append([i])
        elif tokens[i][0] == ",":
            leads[braces[-1][0]].append(i + 1)
            braces[-1].append(i)
        elif tokens[i][0] == "}":
            leads |= {comma: [i + 1] for comma in braces.pop()[1:]}

    @lru_cache(1024)  # many tags begin and go on alike
    def follow(places: frozenset[int], character: str) -> frozenset[int]:
        pending = [place for place in places if tokens[place] == ("*", None)]
        pending += [place + 1 for place in places if (test := tokens[place][1]) and test(character)]
        reached = set()
        while pending:
            place = pending.pop()
            if place not in reached:
                reached.add(place)
                pending += leads.get(place, ())
        return frozenset(reached)

    start = follow(frozenset({0}), "")
    return lambda tag: len(tokens) - 1 in reduce(follow, tag, start)


def compile_glob(*patterns: str) -> _Accepts:
    """Return a case-sensitive test of whole tags against any of the patterns; ValueError for a
    malformed one.
    """
    read = [_tokens(pattern) for pattern in patterns]
    names = {literal for _, literal in read if literal is not None}
    # One machine follows them all: their number counts no more than their length.
    tokens = [token for wild, literal in read if literal is None for token in ((",", None), *wild)]
    if not tokens:
        return names.__contains__
    matches = _machine([("{", None), *tokens[1:], ("}", None)])
    return lambda tag: tag in names or matches(tag)


def check_glob(pattern: str) -> str | None:
    """Return the only tag that a pattern without wildcards matches; ValueError when it is
    malformed.
    """
    return _tokens(pattern)[1]


class TagRule(NamedTuple):
    """The rule of one mapping (docs/specification.md section 2.5); empty and None mean that a field
    is not set.
    """

    glob: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    semver: str | None = None
    semver_prerelease: Prerelease | None = None
    sort: _Order | None = None
    latest: int | None = None
    min_tags: int | None = None
    immutable_tags: str | None = None

    @property
    def order(self) -> _Order | None:
        """How the result is sorted; ValueError when `latest` is set and nothing says it."""
        if self.latest and not (self.sort or self.semver):
            raise ValueError("latest needs `sort` or `semver`, to say which tags are the highest")
        return self.sort or ("semver" if self.semver else None)

    @property
    def chooses_versions(self) -> bool:
        return self.semver is not None or self.semver_prerelease is not None


class Selection(NamedTuple):
    """What a rule keeps, why it drops the others, and how many `min_tags` asks for."""

    kept: tuple[str, ...]
    dropped: Mapping[str, Reason]
    floor: int = 0


def select_literals(rule: TagRule) -> Selection | None:
    """Select without a listing where the rule names its tags one by one; None where it does not."""
    if not rule.glob or rule.exclude or rule.chooses_versions or rule.latest:
        return None
    literals = [name for pattern in rule.glob if (name := check_glob(pattern)) is not None]
    return select(literals, rule) if len(literals) == len(rule.glob) else None


def select(tags: Iterable[str], rule: TagRule) -> Selection:
    """Apply a rule to a listing, in the order of docs/design.md section 5; ValueError for a rule
    that is wrong.
    """
    wanted = compile_glob(*rule.glob or ("*",))
    excluded = compile_glob(*rule.exclude)
    referrers_are_images = any(pattern.startswith(("sha256-", "sha512-")) for pattern in rule.glob)
    version_of = cache(parse_version)
    allowed = None
    prerelease = rule.semver_prerelease or "exclude"
    if rule.chooses_versions:
        allowed = parse_range(rule.semver or "*")

    def refusal(tag: str) -> Reason | None:
        if not referrers_are_images and is_referrer_tag(tag):
            return "referrer_tag"
        if not wanted(tag):
            return "glob"
        if allowed:
            version = version_of(tag)
            if version is None or not admits(allowed, version, prerelease):
                # The rule for pre-releases is the reason where another rule would have let the tag
                # in.
                return "prerelease" if version and admits(allowed, version, "include") else "semver"
        return "exclude" if excluded(tag) else None

    reasons = {tag: refusal(tag) for tag in dict.fromkeys(tags)}
    dropped = {tag: reason for tag, reason in reasons.items() if reason}
    ranked = _ordered(
        [tag for tag, reason in reasons.items() if not reason], rule.order, version_of
    )
    kept = ranked[: rule.latest]
    cut = () if rule.latest is None else ranked[rule.latest :]
    # docs/design.md section 5, step 6: what `latest` cut comes back first, then what versions
    # dropped.
    if len(kept) < (floor := rule.min_tags or 0):
        order = rule.order or "semver"
        spare = [
            tag
            for tag, why in dropped.items()
            if why in ("semver", "prerelease") and not excluded(tag)
        ]
        if back := (*cut, *_ordered(spare, order, version_of))[: floor - len(kept)]:
            kept = _ordered((*kept, *back), order, version_of)
    dropped |= dict.fromkeys(cut, "latest")
    for tag in kept:
        dropped.pop(tag, None)
    return Selection(kept, dropped, floor)


def _ordered(
    tags: Sequence[str], order: _Order | None, version_of: Callable[[str], Version | None]
) -> tuple[str, ...]:
    """Return tags highest first; ties of versions, and what is no version, by descending code
    points.
    """
    by_text = sorted(tags, reverse=True) if order else tags
    if order == "semver":
        # The sort is stable. No version is below the empty tuple, which stands for what is none.
        by_text = sorted(by_text, key=lambda tag: version_of(tag) or (), reverse=True)
    return tuple(by_text)
