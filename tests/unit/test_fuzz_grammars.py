"""The small grammars of docs/design.md section 4 against readers of their own: any text has one
meaning or is refused.
"""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from _regsync.auth.challenge import Challenge, parse_challenges
from _regsync.config import parse_duration, parse_registry_url, parse_size, shown_form, substitute
from _regsync.errors import ConfigError
from _regsync.net.proxies import proxy_for
from _regsync.oci import is_repository, is_tag, parse_reference
from _regsync.tags import admits, compile_glob, parse_range, parse_version
from tests.fuzzing import fuzz, scraps

# Durations and sizes.


@fuzz(100)
@given(
    st.lists(
        st.tuples(st.integers(0, 999_999_999), st.sampled_from("smhd")), min_size=1, max_size=4
    )
)
def test_a_duration_is_the_sum_of_its_parts(parts):
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
    text = "".join(f"{number}{unit}" for number, unit in parts)
    assert parse_duration(text) == sum(number * seconds[unit] for number, unit in parts)


@fuzz(100)
@given(
    st.integers(0, 10**9),
    st.integers(0, 10**6 - 1),
    st.sampled_from(["", "k", "m", "g", "t", "ki", "mi", "gi", "ti"]),
    st.sampled_from(["", " ", "  "]),
    st.booleans(),
)
def test_a_size_is_what_its_unit_says(whole, millionths, prefix, blank, upper):
    factor = (1024 if prefix.endswith("i") else 1000) ** " kmgt".index(prefix[:1] or " ")
    text = f"{whole}.{millionths:06}{blank}{prefix}b"
    exact = (Fraction(whole) + Fraction(millionths, 10**6)) * factor
    assert abs(parse_size(text.upper() if upper else text) - exact) <= max(1, exact / 10**15)


@fuzz(100)
@given(scraps("1 0 30 s m h d . k K i B - e", " ", "9" * 30, other="٣²ºKı"))
def test_any_text_is_a_duration_a_size_or_an_error(text):
    for parse in (parse_duration, parse_size):
        try:
            value = parse(text)
        except ValueError as error:
            assert "write" in str(error)  # noqa: PT017
        else:
            assert value >= 0
            assert text.isascii()


# The environment in texts.

VALUES = {"A": "x", "EMPTY": "", "NESTED": "${A}$$", "_b1": "y"}


def by_hand(text: str) -> str | None:
    """Read a text with variables one character after another; None where it is malformed or lacks a
    value.
    """
    out, at = "", 0
    while at < len(text):
        if text.startswith("$$", at):
            out, at = out + "$", at + 2
        elif text.startswith("${", at):
            end = text.find("}", at)
            inside = text[at + 2 : end]
            if end < 0:
                return None
            name, colon, rest = inside.partition(":")
            if not (
                name
                and name.isascii()
                and name.replace("_", "a").isalnum()
                and not name[0].isdigit()
            ):
                return None
            if (colon and rest[:1] not in ("-", "?")) or "${" in rest:
                return None
            value = VALUES.get(name)
            if rest[:1] == "-":
                value = value or rest[1:]
            elif value is None or (rest[:1] == "?" and not value):
                return None
            out, at = out + value, end + 1
        else:
            out, at = out + text[at], at + 1
    return out


@fuzz(250)
@given(scraps("${ } $ $$ { A EMPTY NESTED _b1 UNSET :- :? : - x 1", " ", "\n"))
@example("${A:-$}")
@example("${UNSET:-$$}")
def test_variables_are_replaced_as_by_hand(text):
    try:
        found = substitute(text, VALUES)
    except ValueError:
        found = None
    assert found == by_hand(text)
    if found is not None:
        shown = shown_form(text.replace("x", "secret"), is_url=False)
        assert "secret" not in shown.replace("${secret}", "")


@pytest.mark.parametrize("unit", ["${", "${A", "${A:-", "${A:-$", "$", "$$", "${A:?x", "{", "}"])
def test_variables_without_end_are_looked_at_once(unit):
    # A square of this is hours, and would be the run's own time-out.
    text = unit * (1_000_000 // len(unit))
    assert "A" not in shown_form(text, is_url=False)


# Globs.

_PATTERN = scraps("* ? a b - [ab] [!a] [a-b] { } , \\a \\* [b-] []", most=8, other="ab*")


def expression(pattern: str) -> str:
    """Translate a glob to a regular expression, which backtracks and may for these lengths."""
    out, depth, at = "", 0, 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == "[":
            end = pattern.index("]", at)
            members = pattern[at + 1 : end].replace("[", "\\[")
            out, at = out + f"[{'^' + members[1:] if members[0] == '!' else members}]", end
        elif letter in "{}":
            depth += 1 if letter == "{" else -1
            out += "(?:" if letter == "{" else ")"
        elif letter == "," and depth:
            out += "|"
        else:
            out += {"*": ".*", "?": "."}.get(letter) or re.escape(letter)
        at += 1
    return out


@fuzz(250)
@given(_PATTERN, st.lists(st.text("ab-,*]", max_size=6), max_size=6))
def test_globs_match_what_regular_expressions_match(pattern, names):
    try:
        matches = compile_glob(pattern)
    except ValueError:
        return
    same = re.compile(expression(pattern), re.DOTALL)
    assert [matches(name) for name in names] == [same.fullmatch(name) is not None for name in names]


# Versions and ranges, in the words of node-semver: a partial version stands for all that begin so.

NUMBERS = st.integers(0, 3)
PARTIALS = st.lists(NUMBERS, max_size=3)
OPERATORS = st.sampled_from(["", "=", "==", "!=", ">", ">=", "<", "<=", "^", "~"])


def takes(operator: str, partial: list[int], version: tuple[int, ...]) -> bool:
    begin, edge = version[: len(partial)], tuple(partial)
    padded = (*partial, 0, 0, 0)[:3]
    if operator == "^":
        # The left-most number that is not zero stays; where all are zero, all that are given.
        stays = (
            next((index for index, number in enumerate(partial) if number), len(partial) - 1) + 1
        )
        return version >= padded and version[:stays] == padded[:stays]
    if operator == "~":
        stays = min(len(partial), 2)
        return version >= padded and version[:stays] == padded[:stays]
    if operator == "!=":
        return begin != edge
    return {
        "": begin == edge,
        ">": begin > edge,
        ">=": begin >= edge,
        "<": begin < edge,
        "<=": begin <= edge,
    }[operator.replace("==", "").replace("=", "") if operator in ("=", "==") else operator]


def spelled(operator: str, partial: list[int], wild: str, blank: str) -> str:
    parts = [str(number) for number in partial] or ["*"]
    return f"{operator}{blank}{'.'.join(parts + [wild] * bool(wild and len(parts) < 3))}"


COMPARATORS = st.tuples(
    OPERATORS, PARTIALS, st.sampled_from(["", "", "x", "X", "*"]), st.sampled_from(["", "", " "])
)


@fuzz(250)
@given(
    st.lists(st.lists(COMPARATORS, min_size=1, max_size=2), min_size=1, max_size=2),
    st.tuples(NUMBERS, NUMBERS, NUMBERS),
    st.sampled_from(["", "", "-rc.1", "+b", "_b"]),
)
def test_a_range_takes_what_its_words_say(sets, numbers, end):
    text = " || ".join(", ".join(spelled(*each) for each in part) for part in sets)
    wanted = any(
        all(takes(operator, partial, numbers) for operator, partial, _, _ in part) for part in sets
    )
    version = parse_version("v" + ".".join(map(str, numbers)) + end)
    assert version is not None
    allowed = parse_range(text)
    assert admits(allowed, version, "include") is wanted
    assert admits(allowed, version, "exclude") is (wanted and end != "-rc.1")
    assert admits(allowed, version, "only") is (wanted and end == "-rc.1")


@fuzz(150)
@given(scraps("v 1 0 12 . - rc + _ x", "9" * 30, " ", most=10, other="٣V-."))
def test_any_tag_is_a_version_or_none(text):
    grammar = r"v?\d+(\.\d+){0,2}(-[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?([+_][0-9A-Za-z._+-]+)?"
    found = parse_version(text)
    assert (found is not None) is (re.fullmatch(grammar, text, re.ASCII) is not None)


# References, platforms, addresses.


@fuzz(150)
@given(
    scraps("localhost a.b : 5000 / team app @ v1 [::1] :// A .. - _", f"sha256:{'a' * 64}", most=8)
)
def test_a_reference_means_the_same_when_it_is_read_again(text):
    try:
        reference = parse_reference(text)
    except ConfigError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert is_repository(reference.repository)
    assert reference.tag is None or is_tag(reference.tag)
    assert parse_reference(str(reference)) == reference
    assert (
        text in (str(reference), str(reference).removeprefix("docker.io/")) or text.lower() != text
    )


@fuzz(150)
@given(
    scraps(
        "http:// https:// HTTP:// ftp:// a B.c - . : 80 99999 [::1] [ @ / ? 127.0.0.1 "
        "localhost docker.io",
        most=5,
    )
)
def test_a_registrys_address_means_the_same_when_it_is_written_whole(text):
    try:
        scheme, host, port = parse_registry_url(text)
    except ValueError:
        return
    assert 0 < port < 65536
    assert parse_registry_url(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}") == (
        scheme,
        host,
        port,
    )


# Headers.

TOKENS = st.from_regex(r"[A-Za-z!#$%&'*+.^_`|~0-9-]{1,8}", fullmatch=True)
_QUOTABLE = st.text(
    st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=8
)


@fuzz(150)
@given(
    st.lists(
        st.tuples(
            TOKENS, st.dictionaries(TOKENS.map(str.lower), _QUOTABLE, min_size=1, max_size=3)
        ),
        max_size=3,
    ),
    st.sampled_from([",", ", ", " ,\t"]),
    st.booleans(),
)
def test_challenges_by_the_grammar_are_read_by_it(offered, comma, bare):
    """RFC 9110 section 11.6.1; a value that is a token may stand without quotes."""

    def quoted(text: str) -> str:
        if bare and re.fullmatch(r"[A-Za-z0-9._~-]+", text):
            return text
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    line = comma.join(
        f"{scheme} " + comma.join(f"{name}={quoted(text)}" for name, text in given.items())
        for scheme, given in offered
    )
    fields = ("realm", "service", "scope", "error")
    assert parse_challenges([line]) == [
        Challenge(scheme.lower(), *(given.get(name, "") for name in fields))
        for scheme, given in offered
    ]


# Proxies.

HOSTS = st.sampled_from(
    ["a.test", "b.a.test", "ba.test", "a", "10.1.2.3", "10.2.0.1", "fd00::1", "a.test."]
)
ITEMS = st.sampled_from(["a.test", ".a.test", "*.a.test", "10.1.0.0/16", "10.1.2.3", "[fd00::1]", "fd00::/8",
    "a.test:443",
    "a.test:80", "*", "", " A.TEST ", "::ffff:10.1.2.3", "10.0.0.0/99", "[", ":443"])  # fmt: skip


def named(item: str, host: str) -> bool:
    """Go's httpproxy in other words, for port 443."""
    item = item.strip().lower()
    name, colon, port = item.rpartition(":")
    if colon and port.isdigit() and name.count(":") == 0:
        if port != "443":
            return False
        item = name
    nets = {
        "10.1.0.0/16": ["10.1.2.3"],
        "fd00::/8": ["fd00::1"],
        "[fd00::1]": ["fd00::1"],
        "::ffff:10.1.2.3": ["10.1.2.3"],
    }
    if item in nets:
        return host in nets[item]
    if item == "*" or (item == host and item):
        return True
    if item.startswith(("*.", ".")):
        return host.endswith(item.lstrip("*"))
    return bool(item) and host.endswith(f".{item}")


@fuzz(150)
@given(HOSTS, st.lists(ITEMS, max_size=4))
def test_no_proxy_is_read_as_by_go(host, items):
    found = proxy_for(
        "https", host, 443, {"https_proxy": "p.test:3128", "no_proxy": ",".join(items)}
    )
    assert (found is None) is any(named(item, host) for item in items)


@fuzz(150)
@given(
    scraps(
        "http:// https:// socks5:// user : hunter2 @ p.test 3128 99999 [::1] / %41 % \udcff", most=7
    )
)
@example("http://\udcff:hunter2@p.test")
def test_any_proxy_is_an_address_or_a_config_error(text):
    try:
        proxy = proxy_for("https", "a.test", 443, {"https_proxy": text})
    except ConfigError as error:
        shown = f"{error} {error.hint}"
    else:
        shown = str(proxy)
        if proxy is not None:
            assert f"{proxy.username}:{proxy.password}".encode() is not None
            assert 0 < proxy.port < 65536
    assert "hunter2@" not in shown
    assert "\n" not in shown
