"""Which tags a rule selects from a listing: globs, versions and ranges, order, limits.

Invariants: a selection depends only on the listing and the rule, and each dropped tag has a reason.
No pattern, tag or range makes this module take long. An error message about a pattern or a range is
one line with a remedy.
Follows: docs/design.md sections 4 (grammars) and 5 (the steps of a selection), SemVer 2.0.0 section
11, node-semver (operators, partials).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import takewhile
from typing import Literal, NamedTuple

from _regsync.oci import is_referrer_tag, is_tag

# The part of a rule that drops a tag.
Reason = Literal["glob", "semver", "prerelease", "exclude", "latest", "referrer_tag"]

# The rule for pre-releases (docs/design.md section 4).
Prerelease = Literal["include", "exclude", "only"]

_Order = Literal["semver", "alpha"]

# Characters of a pattern, a version or a range. Tags have 128 at most. For much longer numbers
# int() would raise its own error.
_MAX_LENGTH = 1024


# Globs.

_BRACES = r"\{([^{}]*)\}"  # the innermost braces
_CHARACTER_SET = r"\[!?[^]!^][^]]*\]"
_SPECIAL_CHARACTER = r"[][{}*?\\]"

# Patterns without braces that one glob stands for. `{a,b}` five times stands for 32.
_MAX_ALTERNATIVES = 1000


def compile_glob(*patterns: str) -> Callable[[str], bool]:
    """Return a function that reports whether a whole tag matches one of the patterns.

    Matching is case-sensitive. Raises ValueError if a pattern is invalid.
    """
    alternatives = {each for pattern in patterns for each in _expand_braces(pattern)}
    literals = {each for each in alternatives if is_tag(each)}
    # In the expressions of `fnmatch`, only what follows the last `*` is tried more than once.
    wildcards = [re.compile(fnmatch.translate(each)) for each in alternatives - literals]

    def matches(tag: str) -> bool:
        return tag in literals or any(wildcard.match(tag) for wildcard in wildcards)

    return matches


def literal_tag(pattern: str) -> str | None:
    """Return the only tag that a pattern matches, or None if the pattern has wildcards.

    Raises ValueError if the pattern is invalid.
    """
    _expand_braces(pattern)
    return None if re.search(_SPECIAL_CHARACTER, pattern) else pattern


def _expand_braces(pattern: str) -> list[str]:
    """Return the patterns without braces that a glob stands for: `ac` and `bc` for `{a,b}c`.

    Raises ValueError if the glob is invalid.
    """
    if not pattern:
        raise ValueError("an empty pattern matches nothing: remove it, or write '*' for every tag")
    # Literals are requested without a listing, so they must be valid tags.
    if not re.search(_SPECIAL_CHARACTER, pattern) and not is_tag(pattern):
        raise ValueError(
            f"{pattern!r} can never be a tag: letters, digits and . _ - only, 128 at most"
        )
    if len(pattern) > _MAX_LENGTH:
        raise ValueError(f"a pattern is limited to {_MAX_LENGTH} characters: write several")

    expanded: list[str] = []
    pending = [pattern]
    while pending:
        current = pending.pop()
        braces = re.search(_BRACES, current)
        if braces is None:
            _check_characters(current, pattern)
            expanded.append(current)
            continue
        before, after = current[: braces.start()], current[braces.end() :]
        pending += [f"{before}{inside}{after}" for inside in braces[1].split(",")]
        if len(expanded) + len(pending) > _MAX_ALTERNATIVES:
            raise ValueError(
                f"{pattern!r} has more than {_MAX_ALTERNATIVES} alternatives: write several patterns"
            )
    return expanded


def _check_characters(alternative: str, pattern: str) -> None:
    """Raise ValueError if `fnmatch` would take a part of an alternative in another way than meant.

    `pattern` is the whole glob, for error messages.
    """
    is_plain = re.fullmatch(rf"(?:[^][{{}}\\]|{_CHARACTER_SET})*", alternative)
    ranges = re.findall("(.)-([^]])", "".join(re.findall(_CHARACTER_SET, alternative)))
    if not is_plain or any(low > high for low, high in ranges):
        forms = "*, ?, [abc], [a-z], [!a-z] and {a,b}"
        raise ValueError(f"{pattern!r} is not a pattern: it may have {forms}; nothing escapes")


# Versions.

_SUFFIX = r"(?:-(?P<prerelease>[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?(?:[+_][0-9A-Za-z._+-]+)?"
_VERSION = rf"v?(?P<numbers>[0-9]+(?:\.[0-9]+){{0,2}}){_SUFFIX}"

_Release = tuple[int, int, int]  # major, minor, patch


class Version(NamedTuple):
    """The parts of a version that determine its precedence. Tuple comparison orders versions.

    A listing may have a million versions, so the record is kept small.
    """

    release: _Release
    is_release: bool = True  # False for a pre-release, which comes before its release
    identifiers: str = ""  # of a pre-release: the concatenated results of `_sort_key`

    @property
    def is_prerelease(self) -> bool:
        return not self.is_release


def parse_version(tag: str) -> Version | None:
    """Parse a tag as a version. Missing numbers are 0. Returns None if the tag is not a version."""
    match = re.fullmatch(_VERSION, tag) if len(tag) <= _MAX_LENGTH else None
    if match is None:
        return None
    numbers = [int(number) for number in match["numbers"].split(".")]
    return _make_version(numbers, match["prerelease"])


def _make_version(numbers: Sequence[int], prerelease: str | None = None) -> Version:
    """Return the version with up to three numbers. Missing numbers are 0."""
    major, minor, patch = (*numbers, 0, 0, 0)[:3]
    release = (major, minor, patch)
    if prerelease is None:
        return Version(release)
    identifiers = "".join(_sort_key(identifier) for identifier in prerelease.split("."))
    return Version(release, is_release=False, identifiers=identifiers)


def _sort_key(identifier: str) -> str:
    """Return a sort key for an identifier of a pre-release.

    The concatenated keys of two pre-releases compare as SemVer compares the pre-releases. Numbers
    sort below words. The key of a number is `\\1`, the count of its digits, and the digits. The key
    of a word is `\\2`, the word, and `\\0`, so that a word sorts below longer words that begin with
    it.
    """
    if not identifier.isdigit():
        return f"\2{identifier}\0"
    digits = identifier.lstrip("0")
    return f"\1{len(digits):04}{digits}"


# Ranges.

_PART = r"(?:[0-9]+|[xX*])"
_OPERATOR = r"(?P<operator>==|!=|>=|<=|[=<>^~])?"
_COMPARATOR = rf"{_OPERATOR}[ \t]*v?(?P<numbers>{_PART}(?:\.{_PART}){{0,2}}){_SUFFIX}"

# Below and above every version that a tag can represent.
_LOWEST = Version((0, 0, 0), is_release=False)
_HIGHEST = Version((10**_MAX_LENGTH, 0, 0))


class Comparator(NamedTuple):
    """One condition of a range, such as `>=1.2`, as a half-open interval of versions."""

    low: Version  # included
    high: Version  # not included
    is_negated: bool  # True for `!=`: versions outside the interval are admitted
    # The release whose pre-release the comparator mentions, if any: 1.2.0 for `>=1.2.0-rc.1`.
    prerelease_of: _Release | None

    def admits(self, version: Version) -> bool:
        return (self.low <= version < self.high) is not self.is_negated


# The alternatives of a range, which are joined by `||`. An alternative is a list of comparators,
# which are joined by `,`. A version must satisfy all comparators of at least one alternative.
Range = tuple[tuple[Comparator, ...], ...]


def admits(range_: Range, version: Version, prerelease: Prerelease = "exclude") -> bool:
    """Report whether a version is in a range under a rule for pre-releases."""
    if prerelease == "only" and version.is_release:
        return False
    return any(_all_admit(comparators, version, prerelease) for comparators in range_)


def _all_admit(comparators: Sequence[Comparator], version: Version, prerelease: Prerelease) -> bool:
    """Report whether a version satisfies all comparators of one alternative, as in node-semver.

    A comparator that mentions a pre-release, such as `>=1.2.0-rc.1` (but not `!=1.2.0-rc.1`),
    permits all pre-releases of that release. The rule `exclude` refuses all other pre-releases.
    """
    permitted_releases = [each.prerelease_of for each in comparators if not each.is_negated]
    if version.is_release or version.release in permitted_releases:
        return all(comparator.admits(version) for comparator in comparators)
    if prerelease == "exclude":
        return False

    # By the other rules the release is compared in place of its pre-release: 1.3.0 for 1.3.0-rc.1.
    # But `!=1.2.0-rc.1` excludes 1.2.0-rc.1, and not 1.2.0-rc.2.
    release = Version(version.release)
    return all(
        comparator.admits(version if comparator.prerelease_of == version.release else release)
        for comparator in comparators
    )


def parse_range(text: str) -> Range:
    """Parse a range. Raises ValueError if it is invalid."""
    if len(text) > _MAX_LENGTH:
        raise ValueError(f"a range is limited to {_MAX_LENGTH} characters")
    return tuple(
        tuple(_parse_comparator(word.strip(" \t")) for word in alternative.split(","))
        for alternative in text.split("||")
    )


def _parse_comparator(word: str) -> Comparator:
    """Parse one comparator, such as `>=1.2`. Raises ValueError if it is invalid."""
    match = re.fullmatch(_COMPARATOR, word)
    if match is None:
        forms = "write '*', 1.x, 1.2 or 1.2.3, optionally after = == != > >= < <= ^ ~"
        raise ValueError(
            f"{word!r} is not a comparator: {forms}; join comparators with a comma, as in '>=1,<2'"
        )
    # As in node-semver, parts after the first `x` or `*` are ignored.
    numbers = [int(part) for part in takewhile(str.isdigit, match["numbers"].split("."))]
    prerelease = match["prerelease"]
    if prerelease is not None and len(numbers) < 3:
        raise ValueError(
            f"{word!r} names a pre-release of a partial version: write all three numbers"
        )

    version = _make_version(numbers, prerelease)
    operator = match["operator"]
    start = version if numbers else _LOWEST
    end = _upper_bound(version, numbers, operator)
    bounds = {
        ">": (end, _HIGHEST),
        ">=": (start, _HIGHEST),
        "<": (_LOWEST, start),
        "<=": (_LOWEST, end),
    }
    low, high = bounds.get(operator, (start, end))
    prerelease_of = None if version.is_release else version.release
    return Comparator(low, high, is_negated=operator == "!=", prerelease_of=prerelease_of)


def _upper_bound(version: Version, numbers: list[int], operator: str | None) -> Version:
    """Return the exclusive upper bound of the versions that `1.2`, `^1.2` or `~1.2` stands for.

    `1.2` stands for the versions from 1.2.0 to below 1.3.0, `^1.2.3` for the versions from 1.2.3 to
    below 2.0.0, and `~1.2.3` for the versions from 1.2.3 to below 1.3.0. `1.2.3` stands only for
    itself. `numbers` are the numbers in the text of `version`.
    """
    if len(numbers) == 3 and operator not in ("^", "~"):
        # The interval contains only `version`, because no tag represents a version between it and
        # this bound.
        return version._replace(identifiers=version.identifiers + "\0")

    fixed_numbers = numbers  # the leading numbers that all these versions have in common
    if operator == "^":
        # The numbers up to the first number that is not zero: ^0.2.3 means 0.2.x, ^0.0 means 0.0.x.
        leading_zeros = len([*takewhile(lambda number: number == 0, numbers)])
        fixed_numbers = numbers[: leading_zeros + 1]
    elif operator == "~":
        fixed_numbers = numbers[:2]
    if not fixed_numbers:  # `*`
        return _HIGHEST
    *first, last = fixed_numbers
    return _make_version([*first, last + 1])


# Rules.


class TagRule(NamedTuple):
    """The tag rule of one mapping (docs/specification.md section 2.5).

    A field that is not set is None or an empty tuple.
    """

    glob: tuple[str, ...] = ()  # patterns of the tags to select; () for every tag
    exclude: tuple[str, ...] = ()  # patterns of tags to drop
    semver: str | None = None  # a range
    semver_prerelease: Prerelease | None = None
    sort: _Order | None = None
    latest: int | None = None  # the largest number of tags
    min_tags: int | None = None  # the smallest number of tags, if the listing has enough
    immutable_tags: str | None = None  # a pattern of tags that never move

    @property
    def order(self) -> _Order | None:
        """The order of the selected tags; None for the order of the listing.

        Raises ValueError if `latest` is set without an order.
        """
        if self.latest and not (self.sort or self.semver):
            raise ValueError("latest needs `sort` or `semver`, to say which tags are the highest")
        return self.sort or ("semver" if self.semver else None)


class Selection(NamedTuple):
    """The result of applying a rule to a listing."""

    kept: tuple[str, ...]  # the selected tags, in the order of the rule
    dropped: Mapping[str, Reason]  # tag -> the part of the rule that drops it
    min_tags: int = 0  # see `TagRule`

    def warnings(self, source: str) -> Iterator[tuple[str, str]]:
        """Yield each warning for the user: the name of its event in logs, and its text."""
        count = len(self.kept)
        if count < self.min_tags:
            text = f"only {count} tags were found, min_tags asks for {self.min_tags}"
            yield "min_tags", f"{source}: {text}"
        if not self.kept:
            yield "nothing_selected", f"{source}: no tag is selected"


def select(tags: Iterable[str], rule: TagRule) -> Selection:
    """Apply a rule to a listing, in the order of docs/design.md section 5.

    Raises ValueError if the rule is invalid.
    """
    compiled = _CompiledRule(rule)
    candidates: list[str] = []
    dropped: dict[str, Reason] = {}
    for tag in dict.fromkeys(tags):
        reason = compiled.reason_to_drop(tag)
        if reason is None:
            candidates.append(tag)
        else:
            dropped[tag] = reason

    ranked = compiled.rank(candidates, rule.order)
    kept = ranked[: rule.latest]  # all of them if `latest` is None
    beyond_latest = ranked[len(kept) :]

    # If fewer than `min_tags` tags are kept, dropped tags are restored: first tags that `latest`
    # cut off, then tags dropped because of their version (docs/design.md section 5, step 6).
    min_tags = rule.min_tags or 0
    if len(kept) < min_tags:
        order = rule.order or "semver"
        by_version = [
            tag
            for tag, reason in dropped.items()
            if reason in ("semver", "prerelease") and not compiled.is_excluded(tag)
        ]
        restorable = [*beyond_latest, *compiled.rank(by_version, order)]
        restored = restorable[: min_tags - len(kept)]
        if restored:  # otherwise `kept` must remain in its own order
            kept = compiled.rank([*kept, *restored], order)

    dropped |= dict.fromkeys(beyond_latest, "latest")
    for tag in kept:
        dropped.pop(tag, None)  # a restored tag
    return Selection(tuple(kept), dropped, min_tags)


def select_literals(rule: TagRule) -> Selection | None:
    """Return the selection of a rule that lists its tags without wildcards.

    Returns None if the rule cannot be applied without a listing. Raises ValueError if a pattern is
    invalid.
    """
    drops_versions = rule.semver is not None or rule.semver_prerelease in ("exclude", "only")
    if not rule.glob or rule.exclude or drops_versions or rule.latest:
        return None
    literals = [tag for tag in map(literal_tag, rule.glob) if tag is not None]
    return select(literals, rule) if len(literals) == len(rule.glob) else None


class _CompiledRule:
    """A rule with its globs and its range parsed, for the tags of one listing."""

    def __init__(self, rule: TagRule) -> None:
        # Functions that report whether a tag matches `glob` and whether it matches `exclude`.
        self.is_wanted = compile_glob(*rule.glob or ("*",))
        self.is_excluded = compile_glob(*rule.exclude)
        self.takes_referrer_tags = any(
            pattern.startswith(("sha256-", "sha512-")) for pattern in rule.glob
        )
        self.version_of = cache(parse_version)  # a tag's version is needed several times
        self.range = parse_range(rule.semver) if rule.semver is not None else None
        # By default, pre-releases are dropped if the rule has a range.
        default: Prerelease = "include" if self.range is None else "exclude"
        self.prerelease: Prerelease = rule.semver_prerelease or default

    def reason_to_drop(self, tag: str) -> Reason | None:
        """Return the reason why a tag is dropped. Returns None if only `latest` may drop it."""
        if not self.takes_referrer_tags and is_referrer_tag(tag):
            return "referrer_tag"
        if not self.is_wanted(tag):
            return "glob"
        reason = self._reason_by_version(tag)
        if reason is None and self.is_excluded(tag):
            return "exclude"
        return reason

    def _reason_by_version(self, tag: str) -> Reason | None:
        """Return "semver" if the range drops a tag, "prerelease" if only the rule for pre-releases
        does, or None.

        Without a range, a tag that is not a version counts as a release.
        """
        if self.range is None and self.prerelease == "include":
            return None
        version = self.version_of(tag)
        if self.range is None:
            is_prerelease = version is not None and version.is_prerelease
            return None if is_prerelease == (self.prerelease == "only") else "prerelease"
        if version is None or not admits(self.range, version, "include"):
            return "semver"
        return None if admits(self.range, version, self.prerelease) else "prerelease"

    def rank(self, tags: list[str], order: _Order | None) -> list[str]:
        """Sort tags with the highest first. If `order` is None, the order is unchanged.

        Tags with equal versions, and tags that are not versions, are sorted by descending code
        points.
        """
        if order is None:
            return tags
        by_text = sorted(tags, reverse=True)
        if order == "alpha":
            return by_text
        # The key of a tag that is not a version is the empty tuple, which is below every version.
        # Because the sort is stable, tags with equal keys remain sorted by text.
        return sorted(by_text, key=lambda tag: self.version_of(tag) or (), reverse=True)
