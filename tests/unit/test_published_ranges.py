"""Ranges that node-semver and Masterminds/semver publish in their tests, and where this grammar
differs.

The facts (range, versions, answer) are those of node-semver 7.8.5, `test/fixtures/range-include.js`
and `range-exclude.js`, and of Masterminds/semver 3.4.0, `constraints_test.go`. Their ranges are
written as this grammar wants them: with commas, and with `>=1,<=2` and `~1` in place of `1 - 2` and
`~>1`. Here stand those that a pre-release is held against, and the borders of the others, of which
test_fuzz.py has a model. Examples of each way to differ stand in `DIFFERENT`, with the reason.
"""

from __future__ import annotations

import re

import pytest

from _regsync.tags import Prerelease, admits, parse_range, parse_version

EXCLUDE = """
^1.2.3+build           takes 1.2.3 1.3.0                   not 2.0.0 1.2.0
>=1.2.3-pre+asdf,<=2.4.3-pre+asdf takes 1.2.3 1.2.3-pre.2 2.4.3-alpha
>=1.2.3+asdf,<=2.4.3+asdf takes 1.2.3                      not 1.2.3-pre.2 2.4.3-alpha
*                      takes 1.0.0 1.2.3 v1.2.3 1 4.5.6    not v1.2.3-foo 1.2.3-alpha.1
1.2.x||2.x             takes 2.1.3 1.2.3                   not 3.1.3 1.1.3
~0.0.1                 takes 0.0.1 0.0.2                   not 0.1.0-alpha 0.1.0
~v0.5.4-pre            takes 0.5.5 0.5.4
=0.7.x                 takes 0.7.2                         not 0.7.0-asdf 0.8.2
<=0.7.x                takes 0.7.2 0.6.2                   not 0.7.0-asdf
>=0.7.x                takes 0.7.2                         not 0.7.0-asdf 0.6.2
^1.2.3                 takes 1.8.1 1.8.9                   not 1.2.3-pre 1.2.3-beta 2.0.0-alpha 1.2.2 2.8.9 1.2.1
^0.0.1                 takes 0.0.1                         not 0.0.2-alpha 0.0.2 0.3.1
^1.2                   takes 1.4.2 1.8.9                   not 1.2.0-pre 1.1.9 2.8.9
^1.2.3-alpha           takes 1.2.3-pre
^0.0.1-alpha           takes 0.0.1-beta 0.0.1
^x                     takes 1.2.3
<=7.x                  takes 7.9.9
>1.2                                                       not 1.3.0-beta 1.2.8
<=1.2.3                                                    not 1.2.3-beta
~v0.5.4-beta                                               not 0.5.4-alpha
<1.2.3                                                     not 1.2.3-beta
^1.0.0                                                     not 2.0.0-rc1
>=1,<=2                                                    not 2.0.0-pre 1.0.0-pre
1.x                    takes 1.4                           not 1.0.0-a 1.1.0-a 1.2.0-a
>=1.0.0,<1.1.0-pre                                         not 1.1.0-pre
!=4.1.0                takes 4.1.1                         not 4.1.0 5.1.0-alpha.1
!=4.1                  takes 5.1.0                         not 4.1.0 4.1.1 5.1.0-alpha.1
>0                     takes 1                             not 0 0.0.1-alpha 0.0.0-alpha
>0.0.0-0               takes 0.0.0-alpha
>1.2.3-alpha.1         takes 1.2.3-alpha.2
>11.1                  takes 11.2.1                        not 11.1.0 11.1.1
>=0                    takes 0                             not 0.0.1-alpha 0.0.0-alpha
>=0.0.0-0              takes 0.0.0-alpha 1.2.3
<0                                                         not 0.0.0-alpha
~1.2.3-beta.2          takes 1.2.3-beta.4                  not 1.3.4-beta.2
^1.2.0-alpha.2                                             not 1.2.0-alpha.1
^0.2.3                 takes 0.2.5                         not 0.5.6
^0.0                   takes 0.0.3                         not 0.1.4 1.0.4
^0                     takes 0.2.3                         not 1.1.4
^0.2.3-beta.2          takes 0.2.3-beta.4 0.2.3-beta.2     not 0.3.4-beta.2
!=4.x                  takes 5.1.0                         not 4.1.0
>=1.1,<2,!=1.2.3||>3   takes 4.1.2                         not 3.1.2 3.0.0 1.2.3
>=1.0.0,<=2.0.0-beta,!=1.0.1-beta||>3                      not 1.0.1-beta
^1.x                   takes 1.1.1                         not 2.1.1 1.1.1-beta1
~*                     takes 2.1.1
~1.1.1-beta            takes 1.1.1                         not 1.1.1-alpha
"""

# With includePrerelease, here `semver_prerelease: include`: what pre-releases change.
INCLUDE = """
2.x                    takes 2.0.0-pre.0 2.1.0-pre.0       not 3.0.0-pre.0
1.1.x                  takes 1.1.0-a 1.1.1-a               not 1.2.0-a 1.0.0-a
~1.1                   takes 1.1.0-a 1.1.1-a 1.1.1-alpha
~2                     takes 2.0.0-pre.0
*                      takes 1.0.0-rc1 1.2.3-alpha
^1.0.0-0               takes 1.0.1-rc1
^1.0.0                 takes 1.0.1-rc1 1.1.0-rc1           not 2.0.0-rc1
>=1,<=2                takes 2.0.0-pre 1.0.0-pre           not 3.0.0-pre
<=0.7.x                takes 0.7.0-asdf
>=1.0.0,<=1.1.0        takes 1.1.0-pre
^1.2.3-rc2                                                 not 2.0.0
1.x                                                        not 0.0.0-a 2.0.0-a
>1.1                   takes 4.1.0-beta
<1.1                   takes 0.1.0-alpha
=2.0                   takes 2.0.1-beta
>=1.0.0,<=2.0.0-beta,!=1.0.1-beta||>3                      not 1.0.1-beta
~1.1.1-beta                                                not 1.1.1-alpha
"""

PRE = "a pre-release in a range opens those of the same M.m.p only, as in node-semver"
PARTIAL = "a pre-release stands after three numbers"
TRIPLE = "`include` compares M.m.p, so that a release candidate comes with its release"
LOOSE = "no loose mode: 1.2.3pre is no version"

# whose, range, version, rule, what they answer, what this grammar does (None: an error), why
DIFFERENT: list[tuple[str, str, str, Prerelease, bool, bool | None, str]] = [
    ("node", "^0.0.3", "0.0.3-alpha", "include", False, True, TRIPLE),
    ("node", "^1.0.0", "1.0.0-rc1", "include", False, True, TRIPLE),
    ("node", ">=1.2.3pre+asdf,<=2.4.3-pre+asdf", "1.2.3", "exclude", True, None, LOOSE),
    ("node", "==1.0.0||foo", "2.0.0", "exclude", False, None, "words are errors, not skipped"),
    ("masterminds", ">1.2.3-alpha.1", "1.3.3-alpha.2", "exclude", True, False, PRE),
    ("masterminds", ">=0.0.0-0", "3.4.5-beta.1", "exclude", True, False, PRE),
    ("masterminds", "~1.2.3-beta.2", "1.2.4-beta.2", "exclude", True, False, PRE),
    ("masterminds", "^0.2.3-beta.2", "0.2.4-beta.2", "exclude", True, False, PRE),
    ("masterminds", ">=1.0.0,<=2.0.0-beta||>3", "1.0.1-beta", "exclude", True, False, PRE),
    ("masterminds", ">=1.0.0,<=2.0.0-beta,!=1.0.1||>3", "1.0.1-beta", "include", True, False, TRIPLE),
    ("masterminds", "~0.0.0", "1.2.3", "exclude", True, False, "~0.0.0 is 0.0.x, as in node-semver"),
    ("masterminds", ">0-0", "0.0.1-alpha", "exclude", False, None, PARTIAL),
    ("masterminds", ">=0.0-0", "0.0.1-alpha", "exclude", True, None, PARTIAL),
    ("masterminds", "*-0", "1.2.3-alpha.1", "exclude", True, None, PARTIAL),
    ("masterminds", "!=4.1-alpha", "4.1.0-alpha", "exclude", False, None, PARTIAL),
    ("masterminds", "1.1-3", "4.3.2", "exclude", False, None, PARTIAL),
    ("masterminds", "^1.2.x-alpha", "1.1.1-beta1", "exclude", False, None, PARTIAL),
]  # fmt: skip

ROWS: list[tuple[Prerelease, str, list[str], list[str]]] = [
    (rule, match["range"], (match["taken"] or "").split(), (match["refused"] or "").split())
    for rule, table in (("exclude", EXCLUDE), ("include", INCLUDE))
    for match in re.finditer(
        r"(?m)^(?P<range>\S+)(?: +takes (?P<taken>.*?))?(?: +not (?P<refused>.*))?$", table
    )
]


def takes(text: str, version: str, rule: Prerelease) -> bool:
    parsed = parse_version(version)
    assert parsed is not None
    return admits(parse_range(text), parsed, rule)


def test_published_ranges_hold():
    wrong = [
        (rule, text, version)
        for rule, text, taken, refused in ROWS
        for version in taken + refused
        if takes(text, version, rule) is not (version in taken)
    ]
    assert wrong == []


def test_what_differs_differs_as_documented():
    for _, text, version, rule, theirs, ours, _ in DIFFERENT:
        assert theirs is not ours
        if ours is None:
            with pytest.raises(ValueError, match=r"comparator|three numbers"):
                parse_range(text)
        else:
            assert takes(text, version, rule) is ours, (text, version, rule)
