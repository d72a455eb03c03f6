"""Which tags of a listing are copied: globs, versions, exclusion, order, limits. Owns: the glob
language, when a tag is a version, ranges and precedence, the tag rule, the selection with a reason
for every tag that it drops. May not know: where a listing comes from, configuration files.
Invariants: the selection is a function of the listing and the rule alone; matching is linear in tag
times pattern; what is wrong with a pattern or a range is one line that says what to write instead.
Follows design.md sections 4 (globs, ranges), 5 (the steps), SemVer 2.0.0 section 11, node-semver
(operators, partials)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache, reduce
from itertools import takewhile
from typing import Literal, NamedTuple

from _regsync.oci import is_referrer_tag, is_tag

Prerelease = Literal["include", "exclude", "only"]
_SUFFIX = r"(?:-([0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?(?:[+_][0-9A-Za-z._+-]+)?"
_VERSION = rf"v?([0-9]+)(?:\.([0-9]+))?(?:\.([0-9]+))?{_SUFFIX}"
_PART = r"([0-9]+|[xX*])"
_COMPARATOR = rf"(==|!=|>=|<=|[=<>^~])?[ \t]*v?{_PART}(?:\.{_PART})?(?:\.{_PART})?{_SUFFIX}"
_LONGEST = (
    1024  # of a tag (128 at most) or a range; int() refuses far longer numbers in its own way
)


class Version(NamedTuple):
    """What precedence sees of a version; `stage` 0: a pre-release. A listing may name a million."""

    release: tuple[int, int, int]
    stage: int = 1
    identifiers: str = (
        ""  # as text of that order: of each one 1, how many digits, these; or 2, the word, 0
    )

    @property
    def is_prerelease(self) -> bool:
        return not self.stage


def parse_version(tag: str) -> Version | None:
    match = re.fullmatch(_VERSION, tag) if len(tag) <= _LONGEST else None
    return _version([int(part or 0) for part in match.groups()[:3]], match[4]) if match else None


def _version(numbers: list[int], prerelease: str | None = None) -> Version:
    major, minor, patch = (*numbers, 0, 0, 0)[:3]
    parts = prerelease.split(".") if prerelease else []
    keys = (
        f"\1{len(part.lstrip('0')):04}{part.lstrip('0')}" if part.isdigit() else f"\2{part}\0"
        for part in parts
    )
    return Version((major, minor, patch), 0 if parts else 1, "".join(keys))


# below and above what tags can spell
_LOWEST = Version((0, 0, 0), 0)
_HIGHEST = Version((10**_LONGEST, 0, 0))
# From where, to below what, whether it takes what lies between or all but that, the M.m.p of a
# pre-release in it.
_Comparator = tuple[Version, Version, bool, tuple[int, int, int] | None]
_Range = tuple[
    tuple[_Comparator, ...], ...
]  # what `||` and `,` joined: alternatives of conjunctions


def admits(versions: _Range, version: Version, prerelease: Prerelease = "exclude") -> bool:
    """Say whether a range, under the rule for pre-releases, takes a version."""
    is_wanted = version.is_prerelease or prerelease != "only"
    return is_wanted and any(
        _all_admit(comparators, version, prerelease) for comparators in versions
    )


def _all_admit(
    comparators: tuple[_Comparator, ...], version: Version, prerelease: Prerelease
) -> bool:
    # In full where one of the same M.m.p is named; elsewhere by M.m.p (`include`, `only`), or
    # refused (`exclude`). `!=1.0.0-rc.1` says what is unwanted: it invites no other pre-release of
    # 1.0.0.
    in_full = not version.is_prerelease or any(
        named == version.release and inside for _, _, inside, named in comparators
    )
    if prerelease == "exclude" and not in_full:
        return False
    release = version if in_full else Version(version.release)
    return all(
        (low <= (version if named == version.release else release) < high) is inside
        for low, high, inside, named in comparators
    )


def parse_range(text: str) -> _Range:
    """Parse a range; ValueError says what is wrong and what to write instead."""
    if len(text) > _LONGEST:
        raise ValueError(f"a range of more than {_LONGEST} characters")
    return tuple(
        tuple(_comparator(word.strip(" \t")) for word in part.split(","))
        for part in text.split("||")
    )


def _comparator(word: str) -> _Comparator:
    match = re.fullmatch(_COMPARATOR, word)
    if match is None:
        if hyphen := re.fullmatch(r"([^ \t]+)[ \t]+-[ \t]+([^ \t]+)", word):
            raise ValueError(
                f"hyphen ranges are not supported: write '>={hyphen[1]},<={hyphen[2]}'"
            )
        forms = "write '*', 1.x, 1.2 or 1.2.3, if need be after = == != > >= < <= ^ ~"
        raise ValueError(f"{word!r} is no comparator: {forms}; join comparators with a comma")
    operator, *parts, prerelease = match.groups()
    # As in node-semver, nothing counts after the first part that is open.
    numbers = [int(part) for part in takewhile(lambda part: part and part not in "xX*", parts)]
    if prerelease is not None and len(numbers) < 3:
        raise ValueError(
            f"{word!r} names a pre-release of a partial version: write all three numbers"
        )
    version = _version(numbers, prerelease)
    # What is written spans low..high: 1.2 all that begin so, 1.2.3 itself and nothing else that a
    # tag can spell.
    low = version if numbers else _LOWEST
    kept = numbers
    if operator == "^":
        # The leftmost number that is not zero stays: 0.2.x for ^0.2.3, 0.0.x for ^0.0.
        kept = numbers[: next((i for i, number in enumerate(numbers, 1) if number), 3)]
    elif operator == "~":
        kept = numbers[:2]
    high = _version([*kept[:-1], kept[-1] + 1]) if kept else _HIGHEST
    if operator not in ("^", "~") and len(numbers) == 3:
        high = version._replace(identifiers=version.identifiers + "\0")
    spans = {
        ">": (high, _HIGHEST),
        ">=": (low, _HIGHEST),
        "<": (_LOWEST, low),
        "<=": (_LOWEST, high),
    }
    named = version.release if version.is_prerelease else None
    return *spans.get(operator, (low, high)), operator != "!=", named


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
    ):  # it will stand in a request as it is (design.md section 5)
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
    """The rule of one mapping (specification section 2.5); empty and None mean that a field is not
    set.
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
    """Apply a rule to a listing, in the order of design.md section 5; ValueError for a rule that is
    wrong.
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
    # design.md section 5, step 6: what `latest` cut comes back first, then what versions dropped.
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
