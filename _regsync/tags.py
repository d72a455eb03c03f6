"""The selection of tags from a listing: globs, versions, exclusion, order, limits.

Owns: the glob language, the tag rule, the selection with a reason for each dropped tag.
May not know: where a listing comes from, configuration files.
Invariants: the selection depends only on the listing and the rule. Matching a glob takes at most as
many steps as the product of the lengths of tag and pattern. An error message about a pattern is one
line with a remedy.
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

# The part of a rule that drops a tag.
Reason = Literal["glob", "semver", "prerelease", "exclude", "latest", "referrer_tag"]

_Order = Literal["semver", "alpha"]


# A glob is a sequence of tokens. A token is literal text, a character set or a mark.


class _Mark(enum.Enum):
    """A token that is neither literal text nor a character set."""

    ANY_RUN = "*"
    OPEN = "{"  # begins a choice between alternatives
    NEXT = ","  # separates two alternatives
    CLOSE = "}"  # ends the choice


class _Span(NamedTuple):
    """The characters from `low` to `high`, both included."""

    low: str
    high: str


class _CharacterSet(NamedTuple):
    """The token `[...]`, or `[!...]` if `is_negated` is set. It matches one character."""

    spans: tuple[_Span, ...]
    is_negated: bool

    def accepts(self, character: str) -> bool:
        is_in_spans = any(span.low <= character <= span.high for span in self.spans)
        return is_in_spans is not self.is_negated


_Token = str | _Mark | _CharacterSet

_ANY_CHARACTER = _CharacterSet((), is_negated=True)  # `?`

# One token of a pattern, except that each character of a literal text is a match of its own.
_WRITTEN_TOKEN = re.compile(
    r"\\(?P<escaped>.)"
    r"|\[(?P<negated>!?)(?P<members>(?:\\.|[^\]\\])*)\]"
    r"|(?P<unfinished>[\[\\])"
    r"|(?P<special>[*?{},])"
    r"|(?P<literal>.)",
    re.DOTALL,
)

# A character of a set, or a range of two characters. Each character may follow a backslash.
_SET_MEMBER = re.compile(r"(\\.|.)(?:-(\\.|.))?", re.DOTALL)


class _Pattern(NamedTuple):
    """A parsed glob."""

    tokens: tuple[_Token, ...]
    literal: str | None  # the only tag that matches; None if the glob has wildcards


@lru_cache(256)  # the mappings of a configuration repeat a few patterns
def _parse_glob(pattern: str) -> _Pattern:
    """Parse a glob. Raises ValueError if it is invalid."""
    if not pattern:
        raise ValueError("an empty pattern matches nothing: remove it, or write '*' for every tag")

    written_tokens: list[_Token] = []
    open_braces = 0
    for match in _WRITTEN_TOKEN.finditer(pattern):
        token = _parse_token(pattern, match, is_in_braces=open_braces > 0)
        if token is _Mark.OPEN:
            open_braces += 1
        elif token is _Mark.CLOSE:
            open_braces -= 1
        written_tokens.append(token)
    if open_braces > 0:
        raise ValueError(f"{pattern!r} has a '{{' without '}}'")

    tokens = _join_texts(written_tokens)
    has_wildcards = any(not isinstance(token, str) for token in tokens)
    if has_wildcards:
        return _Pattern(tuple(tokens), literal=None)

    # Literals are requested without a listing, so they must be valid tags (docs/design.md section
    # 5).
    literal = "".join(map(str, tokens))  # all tokens are strings
    if not is_tag(literal):
        raise ValueError(
            f"{literal!r} can never be a tag: letters, digits and . _ - only, 128 at most"
        )
    return _Pattern((literal,), literal)


def _parse_token(pattern: str, match: re.Match[str], *, is_in_braces: bool) -> _Token:
    """Return the token for a match of `_WRITTEN_TOKEN`. Raises ValueError if it is invalid.

    `pattern` is the whole glob, for error messages. A comma or a closing brace has its special
    meaning only if `is_in_braces` is set.
    """
    if match["members"] is not None:
        is_negated = match["negated"] == "!"
        return _parse_character_set(pattern, match["members"], is_negated=is_negated)
    if match["unfinished"]:
        character = match["unfinished"]
        defect = "'[' without ']'" if character == "[" else "a backslash at its end"
        raise ValueError(f"{pattern!r} has {defect}: for the character itself write \\{character}")

    special = match["special"]
    if special is None:
        return match["escaped"] or match["literal"]
    if special == "?":
        return _ANY_CHARACTER
    if not is_in_braces:
        if special == ",":
            return ","  # literal text
        if special == "}":
            raise ValueError(f"{pattern!r} has a '}}' without '{{'")
    return _Mark(special)


def _parse_character_set(pattern: str, members: str, *, is_negated: bool) -> _CharacterSet:
    """Return the character set with the given members. Raises ValueError if it is invalid.

    `members` is the text between the brackets, without `!`. `pattern` is shown in error messages.
    """
    if not members:
        raise ValueError(f"{pattern!r} has an empty set of characters")
    if members.startswith("^") and not is_negated:
        raise ValueError(f"{pattern!r}: negate a set by '!', as in [!a-z]")
    spans: list[_Span] = []
    for first, last in _SET_MEMBER.findall(members):  # `last` is empty if there is no range
        low = first[-1]  # without a backslash
        high = last[-1] if last else low
        if low > high:
            raise ValueError(f"{pattern!r}: the range {low}-{high} is the wrong way round")
        spans.append(_Span(low, high))
    return _CharacterSet(tuple(spans), is_negated)


def _join_texts(tokens: Sequence[_Token]) -> list[_Token]:
    """Join adjacent literal texts to one token, which is matched in one step."""
    joined: list[_Token] = []
    for token in tokens:
        if joined and isinstance(token, str) and isinstance(joined[-1], str):
            joined[-1] += token
        else:
            joined.append(token)
    return joined


class _Choice:
    """The state of matching the alternatives between `{` and `}`."""

    def __init__(self, starts: set[int]) -> None:
        self.starts = starts  # the positions at which every alternative begins
        self.ends: set[int] = set()  # the positions at which the alternatives read so far can end


def _matches(tokens: Sequence[_Token], tag: str) -> bool:
    """Report whether tokens match a whole tag.

    The function simulates a nondeterministic automaton: `positions` is the set of positions in the
    tag at which the tokens read so far can end. Position 0 is before the first character. Each
    token examines each position at most once. Backtracking, as in `re`, could take exponential
    time. Braces are balanced, so that every `,` and `}` among the marks belongs to a choice.
    """
    positions = {0}
    choices: list[_Choice] = []  # the choices around the current token; the innermost comes last
    for token in tokens:
        if isinstance(token, str):
            positions = {
                position + len(token) for position in positions if tag.startswith(token, position)
            }
        elif isinstance(token, _CharacterSet):
            before_end = (position for position in positions if position < len(tag))
            positions = {position + 1 for position in before_end if token.accepts(tag[position])}
        elif token is _Mark.ANY_RUN:
            if positions:  # the run can end at any position from the lowest to the end of the tag
                positions = set(range(min(positions), len(tag) + 1))
        elif token is _Mark.OPEN:
            choices.append(_Choice(starts=positions))
        elif token is _Mark.NEXT:
            # The previous alternative ends here. Every alternative begins at the same positions.
            choices[-1].ends |= positions
            positions = choices[-1].starts
        elif token is _Mark.CLOSE:
            positions = choices.pop().ends | positions

        if not positions and not choices:  # inside a choice the next alternative may still match
            return False
    return len(tag) in positions


def compile_glob(*patterns: str) -> Callable[[str], bool]:
    """Return a function that reports whether a whole tag matches one of the patterns.

    Matching is case-sensitive. Raises ValueError if a pattern is invalid.
    """
    parsed = [_parse_glob(pattern) for pattern in patterns]
    literals = {pattern.literal for pattern in parsed if pattern.literal is not None}
    wildcards = [pattern.tokens for pattern in parsed if pattern.literal is None]

    def matches(tag: str) -> bool:
        return tag in literals or any(_matches(tokens, tag) for tokens in wildcards)

    return matches


def literal_tag(pattern: str) -> str | None:
    """Return the only tag that a pattern matches, or None if the pattern has wildcards.

    Raises ValueError if the pattern is invalid.
    """
    return _parse_glob(pattern).literal


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
        if self.sort:
            return self.sort
        return "semver" if self.semver else None

    @property
    def drops_versions(self) -> bool:
        """Whether the rule may drop a tag because of its version."""
        return self.semver is not None or self.semver_prerelease in ("exclude", "only")


class Selection(NamedTuple):
    """The result of applying a rule to a listing."""

    kept: tuple[str, ...]  # the selected tags, in the order of the rule
    dropped: Mapping[str, Reason]  # tag -> the part of the rule that drops it
    min_tags: int = 0  # see `TagRule`

    def shortfall(self, source: str) -> str | None:
        """Return a warning if fewer tags than `min_tags` are kept, or None."""
        count = len(self.kept)
        if count >= self.min_tags:
            return None
        return f"{source}: only {count} tags were found, min_tags asks for {self.min_tags}"

    def warnings(self, source: str) -> Iterator[tuple[str, str]]:
        """Yield each warning for the user: the name of its event in logs, and its text."""
        shortfall = self.shortfall(source)
        if shortfall is not None:
            yield "min_tags", shortfall
        if not self.kept:
            yield "nothing_selected", f"{source}: the mapping selects no tag"


def select_literals(rule: TagRule) -> Selection | None:
    """Return the selection of a rule that lists its tags without wildcards.

    Returns None if the rule cannot be applied without a listing. Raises ValueError if a pattern is
    invalid.
    """
    needs_listing = not rule.glob or rule.exclude or rule.drops_versions or rule.latest
    if needs_listing:
        return None
    literals: list[str] = []
    for pattern in rule.glob:
        literal = literal_tag(pattern)
        if literal is None:
            return None
        literals.append(literal)
    return select(literals, rule)


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

    ranked = _ordered(candidates, rule.order, compiled.version_of)
    kept = ranked[: rule.latest]  # all of them if `latest` is None
    beyond_latest = ranked[len(kept) :]

    # If fewer than `min_tags` tags are kept, dropped tags are restored: first tags that `latest`
    # cut off, then tags dropped because of their version (docs/design.md section 5, step 6).
    min_tags = rule.min_tags or 0
    if len(kept) < min_tags:
        order = rule.order or "semver"
        by_version = [tag for tag, reason in dropped.items() if compiled.can_restore(tag, reason)]
        restorable = (*beyond_latest, *_ordered(by_version, order, compiled.version_of))
        restored = restorable[: min_tags - len(kept)]
        if restored:  # otherwise `kept` must remain in its own order
            kept = _ordered((*kept, *restored), order, compiled.version_of)

    dropped |= dict.fromkeys(beyond_latest, "latest")
    for tag in kept:
        dropped.pop(tag, None)  # a restored tag
    return Selection(kept, dropped, min_tags)


def selectable(tags: Iterable[str], rule: TagRule) -> tuple[str, ...]:
    """Return the tags that a rule could select from a listing that also has unknown tags.

    The effect of `latest` is ignored, and `min_tags` is assumed to restore every tag that it can.
    """
    compiled = _CompiledRule(rule)
    restores_tags = bool(rule.min_tags)
    selected: list[str] = []
    for tag in tags:
        reason = compiled.reason_to_drop(tag)
        if reason is None or (restores_tags and compiled.can_restore(tag, reason)):
            selected.append(tag)
    return tuple(selected)


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

    def can_restore(self, tag: str, reason: Reason) -> bool:
        """Report whether `min_tags` may restore a tag that was dropped for `reason`."""
        return reason in ("semver", "prerelease") and not self.is_excluded(tag)

    def _reason_by_version(self, tag: str) -> Reason | None:
        """Return "semver" if the range drops a tag, or "prerelease" if the rule for pre-releases
        does.

        Returns None if neither drops the tag. Without a range, a tag that is not a version counts
        as a release.
        """
        if self.range is None:
            if self.prerelease == "include":
                return None
            version = self.version_of(tag)
            is_prerelease = version is not None and version.is_prerelease
            is_wanted = is_prerelease == (self.prerelease == "only")
            return None if is_wanted else "prerelease"
        version = self.version_of(tag)
        if version is None:
            return "semver"
        if admits(self.range, version, self.prerelease):
            return None
        # If the range admits the version as a pre-release, the rule for pre-releases is the reason.
        return "prerelease" if admits(self.range, version, "include") else "semver"


def _ordered(
    tags: Sequence[str], order: _Order | None, version_of: Callable[[str], Version | None]
) -> tuple[str, ...]:
    """Sort tags with the highest first. If `order` is None, the order is unchanged.

    Tags with equal versions, and tags that are not versions, are sorted by descending code points.
    """
    if order is None:
        return tuple(tags)
    by_text = sorted(tags, reverse=True)
    if order == "alpha":
        return tuple(by_text)
    # The key of a tag that is not a version is the empty tuple, which is below every version.
    # Because the sort is stable, tags with equal keys remain sorted by text.
    return tuple(sorted(by_text, key=lambda tag: version_of(tag) or (), reverse=True))
