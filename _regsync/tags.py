"""Which tags of a listing are copied: globs, versions, exclusion, order, limits.

Owns: the glob language, the tag rule, the selection with a reason for every tag that it drops.
May not know: where a listing comes from, configuration files.
Invariants: the selection is a function of the listing and the rule alone; matching takes no more
steps than tag times pattern; what is wrong with a pattern is one line that says what to write.
Follows: docs/design.md sections 4 (globs) and 5 (the steps).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Literal, NamedTuple

from _regsync.oci.reference import is_referrer_tag, is_tag
from _regsync.semver import Prerelease, Version, admits, parse_range, parse_version

Reason = Literal["glob", "semver", "prerelease", "exclude", "latest", "referrer_tag"]

_Order = Literal["semver", "alpha"]


# The tokens of a glob: literal text, a set that one character has to be of, or a mark.


class _Mark(enum.Enum):
    """A token that is neither text nor a set of characters."""

    ANY_RUN = "*"
    OPEN = "{"
    NEXT = ","
    CLOSE = "}"


class _Span(NamedTuple):
    """Characters from `low` to `high`, both included."""

    low: str
    high: str


class _CharacterSet(NamedTuple):
    """`[...]`, or `[!...]` where `is_negated`."""

    spans: tuple[_Span, ...]
    is_negated: bool

    def accepts(self, character: str) -> bool:
        is_in_spans = any(span.low <= character <= span.high for span in self.spans)
        return is_in_spans is not self.is_negated


_Token = str | _Mark | _CharacterSet

_ANY_CHARACTER = _CharacterSet((), is_negated=True)  # `?`

_WRITTEN_TOKEN = re.compile(
    r"\\(?P<escaped>.)"
    r"|\[(?P<negated>!?)(?P<members>(?:\\.|[^\]\\])*)\]"
    r"|(?P<unfinished>[\[\\])"
    r"|(?P<special>[*?{},])"
    r"|(?P<literal>.)",
    re.DOTALL,
)

_SET_MEMBER = re.compile(r"(\\.|.)(?:-(\\.|.))?", re.DOTALL)


class _Pattern(NamedTuple):
    """A glob as read; `literal` is the only tag that it matches, if it has no wildcards."""

    tokens: tuple[_Token, ...]
    literal: str | None


@lru_cache(256)  # a configuration repeats a few patterns in many mappings
def _parse_glob(pattern: str) -> _Pattern:
    """Read a glob; ValueError says what is wrong with it."""
    if not pattern:
        raise ValueError("an empty pattern matches nothing: remove it, or write '*' for every tag")

    tokens: list[_Token] = []
    open_braces = 0
    for match in _WRITTEN_TOKEN.finditer(pattern):
        token = _token(pattern, match, is_in_braces=open_braces > 0)
        if token is _Mark.OPEN:
            open_braces += 1
        elif token is _Mark.CLOSE:
            open_braces -= 1
        tokens.append(token)
    if open_braces > 0:
        raise ValueError(f"{pattern!r} has a '{{' without '}}'")

    tokens = _with_texts_joined(tokens)
    has_wildcards = any(not isinstance(token, str) for token in tokens)
    if has_wildcards:
        return _Pattern(tuple(tokens), literal=None)

    # The literal will stand in a request as it is (docs/design.md section 5).
    literal = "".join(map(str, tokens))
    if not is_tag(literal):
        raise ValueError(
            f"{literal!r} can never be a tag: letters, digits and . _ - only, 128 at most"
        )
    return _Pattern((literal,), literal)


def _token(pattern: str, match: re.Match[str], *, is_in_braces: bool) -> _Token:
    """Return the token that one match of `_WRITTEN_TOKEN` is; ValueError names the trouble with the
    pattern.
    """
    if match["members"] is not None:
        return _character_set(pattern, match["members"], match["negated"] == "!")
    if match["unfinished"]:
        character = match["unfinished"]
        trouble = "'[' without ']'" if character == "[" else "a backslash at its end"
        raise ValueError(f"{pattern!r} has {trouble}: for the character itself write \\{character}")

    special = match["special"]
    if special is None:
        return match["escaped"] or match["literal"]
    if special == "?":
        return _ANY_CHARACTER
    if special == "," and not is_in_braces:
        return ","  # outside of braces it is a character like any other
    if special == "}" and not is_in_braces:
        raise ValueError(f"{pattern!r} has a '}}' without '{{'")
    return _Mark(special)


def _character_set(pattern: str, members: str, is_negated: bool) -> _CharacterSet:
    """Return the set that `[MEMBERS]` or `[!MEMBERS]` is in a pattern."""
    if not members:
        raise ValueError(f"{pattern!r} has an empty set of characters")
    if members.startswith("^") and not is_negated:
        raise ValueError(f"{pattern!r}: negate a set by '!', as in [!a-z]")
    spans: list[_Span] = []
    for first, last in _SET_MEMBER.findall(members):
        low = first[-1]  # without its backslash
        high = last[-1] if last else low
        if low > high:
            raise ValueError(f"{pattern!r}: the range {low}-{high} is the wrong way round")
        spans.append(_Span(low, high))
    return _CharacterSet(tuple(spans), is_negated)


def _with_texts_joined(tokens: Sequence[_Token]) -> list[_Token]:
    """Return tokens with neighbouring characters as one text, which is matched in one step."""
    joined: list[_Token] = []
    for token in tokens:
        if joined and isinstance(token, str) and isinstance(joined[-1], str):
            joined[-1] += token
        else:
            joined.append(token)
    return joined


class _Choice:
    """The alternatives between `{` and `}` while they are matched."""

    def __init__(self, starts: set[int]) -> None:
        self.starts = starts  # the places where each alternative begins
        self.ends: set[int] = set()  # the places where one of those matched so far ends


def _matches(tokens: Sequence[_Token], tag: str) -> bool:
    """Return whether tokens match a whole tag.

    All ways to match are followed at once: `places` is the set of places in the tag (0: before its
    first character) where the tokens so far can end. Each token looks at each place at most once, so
    that no pattern can hang the program. A regular expression could: it tries alternatives of
    different lengths anew for each way that leads to them.
    """
    places = {0}
    choices: list[_Choice] = []
    for token in tokens:
        if isinstance(token, str):
            places = {place + len(token) for place in places if tag.startswith(token, place)}
        elif isinstance(token, _CharacterSet):
            before_end = (place for place in places if place < len(tag))
            places = {place + 1 for place in before_end if token.accepts(tag[place])}
        elif token is _Mark.ANY_RUN:
            if places:
                places = set(range(min(places), len(tag) + 1))
        elif token is _Mark.OPEN:
            choices.append(_Choice(places))
        elif token is _Mark.NEXT:
            # The alternative before the comma ends here. The next one begins where that one began.
            choices[-1].ends |= places
            places = choices[-1].starts
        elif token is _Mark.CLOSE:
            places = choices.pop().ends | places

        if not places and not choices:  # within a choice, another alternative may match
            return False
    return len(tag) in places


def compile_glob(*patterns: str) -> Callable[[str], bool]:
    """Return a case-sensitive test of whole tags against any of the patterns.

    ValueError says what is wrong with a pattern.
    """
    parsed = [_parse_glob(pattern) for pattern in patterns]
    literals = {pattern.literal for pattern in parsed if pattern.literal is not None}
    wildcards = [pattern.tokens for pattern in parsed if pattern.literal is None]

    def matches(tag: str) -> bool:
        return tag in literals or any(_matches(tokens, tag) for tokens in wildcards)

    return matches


def check_glob(pattern: str) -> str | None:
    """Return the only tag that a pattern without wildcards matches; None for one with wildcards.

    ValueError says what is wrong with a pattern.
    """
    return _parse_glob(pattern).literal


class TagRule(NamedTuple):
    """The rule of one mapping (docs/specification.md section 2.5).

    Empty and None mean that a field is not set.
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
        """How the result is sorted, None for the order of the listing. ValueError where `latest` has no
        order to go by.
        """
        if self.latest and not (self.sort or self.semver):
            raise ValueError("latest needs `sort` or `semver`, to say which tags are the highest")
        if self.sort:
            return self.sort
        return "semver" if self.semver else None

    @property
    def drops_versions(self) -> bool:
        """Whether a tag's version may be a reason to drop it."""
        return self.semver is not None or self.semver_prerelease in ("exclude", "only")


class Selection(NamedTuple):
    """The tags that a rule keeps, why it drops each other tag, and how many `min_tags` asks for."""

    kept: tuple[str, ...]
    dropped: Mapping[str, Reason]
    min_tags: int = 0

    def shortfall(self, source: str) -> str | None:
        """Return a warning where fewer tags are kept than `min_tags` asks for, else None."""
        count = len(self.kept)
        if count >= self.min_tags:
            return None
        return f"{source}: only {count} tags were found, min_tags asks for {self.min_tags}"

    def doubts(self, source: str) -> Iterator[tuple[str, str]]:
        """Yield what a user should hear of the selection, as event and text."""
        shortfall = self.shortfall(source)
        if shortfall is not None:
            yield "min_tags", shortfall
        if not self.kept:
            yield "nothing_selected", f"{source}: the mapping selects no tag"


def select_literals(rule: TagRule) -> Selection | None:
    """Return the tags that a rule names one by one, so that no listing is needed; None for any other
    rule.
    """
    needs_listing = not rule.glob or rule.exclude or rule.drops_versions or rule.latest
    if needs_listing:
        return None
    literals: list[str] = []
    for pattern in rule.glob:
        literal = check_glob(pattern)
        if literal is None:
            return None  # it has wildcards
        literals.append(literal)
    return select(literals, rule)


def select(tags: Iterable[str], rule: TagRule) -> Selection:
    """Apply a rule to a listing, in the order of docs/design.md section 5.

    ValueError for a rule that is wrong.
    """
    tests = _Tests(rule)
    candidates: list[str] = []
    dropped: dict[str, Reason] = {}
    for tag in dict.fromkeys(tags):
        reason = tests.reason_to_drop(tag)
        if reason is None:
            candidates.append(tag)
        else:
            dropped[tag] = reason

    ranked = _ordered(candidates, rule.order, tests.version_of)
    kept = ranked
    beyond_latest: tuple[str, ...] = ()
    if rule.latest is not None:
        kept = ranked[: rule.latest]
        beyond_latest = ranked[rule.latest :]

    # Where fewer than `min_tags` are kept, tags beyond `latest` come back first, then tags dropped
    # by their version (docs/design.md section 5, step 6).
    min_tags = rule.min_tags or 0
    missing = min_tags - len(kept)
    if missing > 0:
        order = rule.order or "semver"
        dropped_by_version = [
            tag for tag, reason in dropped.items() if tests.may_come_back(tag, reason)
        ]
        spare = (*beyond_latest, *_ordered(dropped_by_version, order, tests.version_of))
        if spare:  # otherwise the order of the listing stays
            kept = _ordered((*kept, *spare[:missing]), order, tests.version_of)

    dropped |= dict.fromkeys(beyond_latest, "latest")
    for tag in kept:
        dropped.pop(tag, None)
    return Selection(kept, dropped, min_tags)


def selectable(tags: Iterable[str], rule: TagRule) -> tuple[str, ...]:
    """Return those of some tags that a rule may select when it sees the whole listing. What `latest`
    cuts off and `min_tags` brings back depends on all other tags.
    """
    tests = _Tests(rule)
    kept = list[str]()
    for tag in tags:
        reason = tests.reason_to_drop(tag)
        if reason is None or (rule.min_tags and tests.may_come_back(tag, reason)):
            kept.append(tag)
    return tuple(kept)


class _Tests:
    """The tests of a rule, prepared for the tags of one listing."""

    def __init__(self, rule: TagRule) -> None:
        self.is_wanted = compile_glob(*rule.glob or ("*",))
        self.is_excluded = compile_glob(*rule.exclude)
        self.takes_referrer_tags = any(
            pattern.startswith(("sha256-", "sha512-")) for pattern in rule.glob
        )
        self.version_of = cache(parse_version)
        self.range = parse_range(rule.semver) if rule.semver is not None else None
        # A range drops pre-releases unless the rule says otherwise. Without one, nothing does.
        default: Prerelease = "include" if self.range is None else "exclude"
        self.prerelease: Prerelease = rule.semver_prerelease or default

    def reason_to_drop(self, tag: str) -> Reason | None:
        """Return why a tag is dropped, whatever `latest` says; None for a candidate."""
        if not self.takes_referrer_tags and is_referrer_tag(tag):
            return "referrer_tag"
        if not self.is_wanted(tag):
            return "glob"
        reason = self._reason_by_version(tag)
        if reason is None and self.is_excluded(tag):
            return "exclude"
        return reason

    def may_come_back(self, tag: str, reason: Reason) -> bool:
        """Say whether `min_tags` may bring back a tag that was dropped for this reason."""
        return reason in ("semver", "prerelease") and not self.is_excluded(tag)

    def _reason_by_version(self, tag: str) -> Reason | None:
        """Return whether the range (`semver`) or the rule for pre-releases drops a tag; None where
        neither does.
        """
        if self.range is None and self.prerelease == "include":
            return None
        version = self.version_of(tag)
        if self.range is None:
            is_prerelease = version is not None and version.is_prerelease
            wants_prereleases = self.prerelease == "only"
            return None if is_prerelease == wants_prereleases else "prerelease"
        if version is None:
            return "semver"
        if admits(self.range, version, self.prerelease):
            return None
        # Where the range alone would take it, the rule for pre-releases is the reason.
        return "prerelease" if admits(self.range, version, "include") else "semver"


def _ordered(
    tags: Sequence[str], order: _Order | None, version_of: Callable[[str], Version | None]
) -> tuple[str, ...]:
    """Return tags highest first.

    Equal versions, and tags that are no versions, come by descending code points.
    """
    if order is None:
        return tuple(tags)
    by_text = sorted(tags, reverse=True)
    if order == "alpha":
        return tuple(by_text)
    # Tags that are no versions count as the empty tuple, which is below every version. The sort is
    # stable: among equals the order by text stays.
    return tuple(sorted(by_text, key=lambda tag: version_of(tag) or (), reverse=True))
