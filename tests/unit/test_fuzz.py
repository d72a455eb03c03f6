"""Whatever is written or answered means one thing, or is the one declared error; and no secret goes to
anybody else.

The small grammars of docs/design.md section 4 are held against readers of their own. What registries
answer comes in well framed heads and bodies (test_wire.py has the others): each endpoint's method
gives a value or a SyncError, in virtual time.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections import deque
from unittest import mock

import anyio
import anyio.lowlevel
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from _regsync import config, oci, tags
from _regsync.addresses import Origin, resolve_location
from _regsync.app import cli, environment
from _regsync.auth.challenge import Challenge, parse_challenges
from _regsync.errors import ConfigError, ContentError, ProtocolBroken, Side, SyncError, WireError
from _regsync.net.proxies import proxy_for
from _regsync.registry.client import Machine
from _regsync.registry.endpoints import RemoteRepository
from _regsync.registry.runs import Transport
from _regsync.registry.upload import Upload
from tests.fuzzing import fuzz, in_virtual_time, scraps, trees
from tests.unit.wires import Blob, Wire, answer

INDEX = "application/vnd.oci.image.index.v1+json"
IMAGE = "application/vnd.oci.image.manifest.v1+json"
SECRET = "Xyzzy-0pen-Sesame"

# Durations.

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@fuzz(100)
@given(
    st.lists(st.tuples(st.integers(0, 10**9 - 1), st.sampled_from("smhd")), min_size=1, max_size=4)
)
def test_a_duration_is_the_sum_of_its_parts(parts):
    text = "".join(f"{number}{unit}" for number, unit in parts)
    assert config.parse_duration(text) == sum(number * UNITS[unit] for number, unit in parts)


# The environment in texts.

VALUES = {"A": "x", "EMPTY": "", "NESTED": "${A}$$", "_b1": "y"}


def by_hand(text):
    """Read a text with variables one character after another; None where it is malformed or lacks a
    value.
    """
    out, at = "", 0
    while at < len(text):
        if text.startswith("$$", at):
            out, at = out + "$", at + 2
        elif text.startswith("${", at):
            end = text.find("}", at)
            name, colon, rest = text[at + 2 : end].partition(":")
            is_name = re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name)
            if end < 0 or not is_name or (colon and rest[:1] not in ("-", "?")) or "${" in rest:
                return None
            value = VALUES.get(name)
            if rest[:1] == "-":
                value = value or rest[1:].replace("$$", "$")
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
        found = config.substitute(text, VALUES)
    except ValueError:
        found = None
    assert found == by_hand(text)


@pytest.mark.parametrize("unit", ["${", "${A:-", "${A:-$", "$$", "${A:?x", "{", "}"])
def test_variables_without_end_are_looked_at_once(unit):
    # A square of this is an hour, and would be the run's own time-out.
    text = unit * (300_000 // len(unit))
    assert len(re.findall(config._VARIABLE, text)) == len(re.findall(r"\$\$|\$\{", text))


# Globs.


def expression(pattern):
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


@fuzz(400)
@given(
    scraps("* ? a b - [ab] [!a] [a-b] { } , \\a \\* [b-] []", most=8, other="ab*"),
    st.lists(st.text("ab-,*]", max_size=6), max_size=6),
)
def test_globs_match_what_regular_expressions_match(pattern, names):
    try:
        matches = tags.compile_glob(pattern)
    except ValueError:
        return
    same = re.compile(expression(pattern), re.DOTALL)
    assert [matches(name) for name in names] == [same.fullmatch(name) is not None for name in names]


# Versions and ranges, in the words of node-semver: a partial version stands for all that begin so.

NUMBERS = st.integers(0, 3)
COMPARATORS = st.tuples(
    st.sampled_from(["", "=", "==", "!=", ">", ">=", "<", "<=", "^", "~"]),
    st.lists(NUMBERS, max_size=3),
    st.sampled_from(["", "", "x", "X", "*"]),
    st.sampled_from(["", "", " "]),
)


def takes(operator, partial, version):
    begin, edge = version[: len(partial)], tuple(partial)
    padded = (*partial, 0, 0, 0)[:3]
    if operator in ("^", "~"):
        stays = min(len(partial), 2)
        if operator == "^":
            # The left-most number that is not zero stays; where all are zero, all that are given.
            indexes = (index for index, number in enumerate(partial) if number)
            stays = next(indexes, len(partial) - 1) + 1
        return version >= padded and version[:stays] == padded[:stays]
    if operator == "!=":
        return begin != edge
    higher, lower = begin > edge, begin < edge
    wanted = {">": higher, ">=": not lower, "<": lower, "<=": not higher}
    return wanted.get(operator, begin == edge)


def spelled(operator, partial, wild, blank):
    parts = [str(number) for number in partial] or ["*"]
    return f"{operator}{blank}{'.'.join(parts + [wild] * bool(wild and len(parts) < 3))}"


@fuzz(250)
@given(
    st.lists(st.lists(COMPARATORS, min_size=1, max_size=2), min_size=1, max_size=2),
    st.tuples(NUMBERS, NUMBERS, NUMBERS),
    st.sampled_from(["", "", "-rc.1", "+b", "_b"]),
)
def test_a_range_takes_what_its_words_say(sets, numbers, end):
    allowed = tags.parse_range(
        " || ".join(", ".join(spelled(*each) for each in part) for part in sets)
    )
    wanted = any(all(takes(*each[:2], numbers) for each in part) for part in sets)
    version = tags.parse_version("v" + ".".join(map(str, numbers)) + end)
    assert tags.admits(allowed, version, "include") is wanted
    assert tags.admits(allowed, version, "exclude") is (wanted and end != "-rc.1")
    assert tags.admits(allowed, version, "only") is (wanted and end == "-rc.1")


VERSION = r"v?\d+(\.\d+){0,2}(-[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?([+_][0-9A-Za-z._+-]+)?"


@fuzz(250)
@given(
    scraps("v 1 0 12 . - rc + _ x", "9" * 30, " ", most=10, other="٣V-."),
    scraps("1 2.1 .x * v -rc.1 + , || = < > ! ^ ~", " ", most=8, other="0123a"),
)
def test_any_text_is_a_version_or_none_and_a_range_or_an_error(tag, text):
    version = tags.parse_version(tag)
    assert (version is not None) is (re.fullmatch(VERSION, tag, re.ASCII) is not None)
    with contextlib.suppress(ValueError):
        allowed = tags.parse_range(text)
        for found in (version or tags.parse_version("1.2.3"), tags.parse_version("2.1.0-rc.1")):
            taken = [rule for rule in ("exclude", "only") if tags.admits(allowed, found, rule)]
            assert not taken or tags.admits(allowed, found, "include")
            assert found.is_prerelease or "only" not in taken


# References, challenges, proxies.


@fuzz(150)
@given(
    scraps("localhost a.b : 5000 / team app @ v1 [::1] :// A .. - _", f"sha256:{'a' * 64}", most=8)
)
def test_a_reference_means_the_same_when_it_is_read_again(text):
    try:
        reference = oci.parse_reference(text)
    except ConfigError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert oci.is_repository(reference.repository)
    assert reference.tag is None or oci.is_tag(reference.tag)
    assert oci.parse_reference(str(reference)) == reference
    spellings = (str(reference), str(reference).removeprefix("docker.io/"))
    assert text in spellings or text.lower() != text


TOKENS = st.from_regex(r"[A-Za-z!#$%&'*+.^_`|~0-9-]{1,8}", fullmatch=True)
QUOTABLE = st.text(
    st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=8
)
PARAMETERS = st.dictionaries(TOKENS.map(str.lower), QUOTABLE, min_size=1, max_size=3)


@fuzz(150)
@given(
    st.lists(st.tuples(TOKENS, PARAMETERS), max_size=3),
    st.sampled_from([",", ", ", " ,\t"]),
    st.booleans(),
)
def test_challenges_by_the_grammar_are_read_by_it(offered, comma, bare):
    """RFC 9110 section 11.6.1; a value that is a token may stand without quotes."""

    def quoted(text):
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


PROXIES = scraps(
    "http:// https:// socks5:// user : hunter2 @ p.test 3128 99999 [::1] / %41 % \udcff", most=7
)


@fuzz(200)
@given(PROXIES | st.text(max_size=8), st.text(min_size=1, max_size=8), st.text(max_size=8))
@example("http://\udcff:hunter2@p.test", "a.test", "")
def test_any_environment_gives_a_proxy_or_none_or_a_config_error(text, host, no_proxy):
    try:
        proxy = proxy_for("https", host, 443, {"https_proxy": text, "no_proxy": no_proxy})
    except ConfigError as error:
        assert error.hint  # noqa: PT017
        shown = f"{error} {error.hint}"
    else:
        shown = str(proxy)
        if proxy is not None:
            assert f"{proxy.username}:{proxy.password}".encode() is not None
            assert 0 < proxy.port < 65536
    assert "hunter2@" not in shown
    assert "\n" not in shown


# Manifests.

DIGESTS = [oci.digest_of(bytes([number])) for number in range(4)]


def near(good):
    """Objects with these fields, of which one may be missing or anything."""
    whole = st.fixed_dictionaries(good)
    wrong = trees(
        "mediaType digest size",
        leaves=st.sampled_from([-1, 2**63, 1.5, 1e400, True, INDEX, DIGESTS[0], "x\n"]),
    )
    names = st.sampled_from([*good, "urls", "subject", "extra"])
    strange = st.builds(lambda known, name, value: {**known, name: value}, whole, names, wrong)
    less = st.builds(
        lambda known, left_out: {name: known[name] for name in known if name != left_out},
        whole,
        st.sampled_from([*good]),
    )
    return st.one_of(whole, whole, whole, strange, less)


PLATFORMS = {
    "os": st.sampled_from(["linux", "unknown", ""]),
    "architecture": st.sampled_from(["amd64", "arm", "unknown"]),
}
ANNOTATIONS = st.dictionaries(
    st.sampled_from(["vnd.docker.reference.digest", "x"]),
    st.sampled_from([*DIGESTS, None]),
    max_size=2,
)
DESCRIPTORS = near(
    {
        "mediaType": st.sampled_from(
            [INDEX, IMAGE, "application/vnd.oci.image.layer.v1.tar", "a/b;c=d", "A/B"]
        ),
        "digest": st.sampled_from(DIGESTS),
        "size": st.sampled_from([1, 1, 1, 0, 2**62]),
        "annotations": st.none() | ANNOTATIONS,
        "platform": st.none() | st.fixed_dictionaries(PLATFORMS),
        "data": st.sampled_from([None, "AA==", "AQ==", "\ud800", "A"]),
    }
)
IMAGES = near(
    {
        "schemaVersion": st.sampled_from([2, 2, 1]),
        "mediaType": st.sampled_from([IMAGE, IMAGE.upper(), ""]),
        "config": DESCRIPTORS,
        "layers": st.lists(DESCRIPTORS, max_size=3),
    }
)
INDEXES = near(
    {
        "schemaVersion": st.just(2),
        "mediaType": st.sampled_from([INDEX, None]),
        "manifests": st.lists(DESCRIPTORS, max_size=4),
    }
)
TYPES = st.sampled_from(
    [None, INDEX, IMAGE, f"{INDEX}; charset=utf-8", "text/plain", "x/y", "\xff", ""]
)
A_BLOB = {
    "mediaType": "application/vnd.oci.image.layer.v1.tar",
    "digest": oci.digest_of(b"layer"),
    "size": 5,
}


@fuzz(150)
@given(
    IMAGES | INDEXES,
    TYPES,
    st.lists(st.sampled_from(["linux/amd64", "linux/arm/v7"]), min_size=1, max_size=2),
)
@example({"schemaVersion": 2, "mediaType": INDEX, "manifests": [A_BLOB]}, None, ["linux/amd64"])
def test_what_is_nearly_a_manifest_is_one_or_a_content_error(document, content_type, wanted):
    body = json.dumps(document).encode()
    platforms = [oci.parse_platform(text) for text in wanted]
    try:
        read = oci.parse_manifest(body, content_type=content_type, digest=oci.digest_of(body))
        named = [document["config"]] if document.get("config") else []
        named += [*(document.get("layers") or []), *(document.get("manifests") or [])]
        parts = [*filter(None, [read.config]), *read.layers, *read.children]
        assert sorted(each.digest for each in parts) == sorted(each["digest"] for each in named)
        trimmed = oci.trim_index(read, platforms)
        if trimmed.manifest.body == body:
            return  # whole: what it names beside its children are blobs
        again = json.loads(trimmed.manifest.body)
        kept = [each.digest for each in trimmed.manifest.children]
        assert [each["digest"] for each in again.get("manifests") or []] == kept
    except ContentError as error:
        assert len(str(error).replace("\n", "x" * 1000)) < 1000  # noqa: PT017


# Command lines.

WORDS = """copy sync tags audit validate expand schema version watch auth check nonsense -c --config
    --config=- - --json --dry-run -v -vv -q --log-format json text --log-format=xml --no-progress --platform
    linux/amd64 linux --glob * [ --semver >=1 --sort alpha --latest 3 0 999999999999999999999999999999
    --semver-prerelease only --min-tags=2 --no-artifacts a.test/app:v1 a.test/app
    app@sha256:0 http://a/b u:hunter2@a.test/b --help -h --version -- --shard 1/2 /nowhere -cx --jso ="""
ODD_WORDS = ["", "1 - 2", "\udcff", "\n", "--exclude=a\nb"]
FILES = [
    b"", b"mappings: []", b"\xff", b"mappings: [{from: a, source: x, targets: y}]", b"a: *b", b"mappings: 5"
]  # fmt: skip


@fuzz(150)
@given(st.lists(st.sampled_from([*WORDS.split(), *ODD_WORDS]), max_size=6), st.sampled_from(FILES))
@example(["tags", "a.test/app", "--latest", "3"], b"")
@example(["copy", "a.test/app:v1", "\udcff", "--json"], b"")
@example(["validate", "-", "a\nb"], b"")
def test_any_command_line_ends_in_a_status_and_one_line(words, file):
    out, err = io.StringIO(), io.StringIO()
    ran = mock.Mock(return_value=0)
    with (
        mock.patch.object(environment, "run_async", ran),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(file))),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            status = cli.main(words)
        except SystemExit as error:
            status = int(error.code or 0)
            assert {"--help", "-h", "--version"} & {*words}
    said = err.getvalue()
    assert (status == 0) or (status == 3 and "CONFIG_ERROR" in said and not ran.called)
    assert "hunter2" not in said + out.getvalue() or "reference" not in said
    if status and "--json" in words and not {"--help", "-h"} & {*words}:
        assert json.loads(out.getvalue())["error"]["code"] == "CONFIG_ERROR"
    begins = ("error: ", "hint: ", "warning: ", "info: ", "{")
    assert [line for line in said.splitlines() if not line.startswith(begins)] == []


# What registries answer.

BODY = b'{"schemaVersion":2,"manifests":[]}'
DIGEST = oci.digest_of(BODY)
BLOB = oci.Descriptor("a/b", oci.digest_of(b"blob"), 4)

URLS = scraps(
    "http:// https:// registry.test .registry.test other.test 127.0.0.1 [::1] [ "
    "localhost :80 :443 : / /v2/app/ /v2/app/blobs/uploads/1 tags/list?n=1000&last=b "
    "?sig=1 #x .. @ %2f \\ // 0x7f.1 user:pw@",
    SECRET,
    most=6,
)
CHALLENGE_WORDS = scraps(
    'realm= " , service= scope= repository:app:pull error= insufficient_scope '
    "invalid_token https://auth.registry.test/t http://registry.test/t \\ =",
    "Bearer ",
    "Basic ",
    "Negotiate ",
    " ",
    SECRET,
    other="\x80ÿa",
)
HEADERS = {
    "WWW-Authenticate": st.one_of(
        CHALLENGE_WORDS,
        st.just('Bearer realm="http://registry.test/t",service="s",scope="repository:app:pull"'),
        st.just('Basic realm="x"'),
        URLS.map(lambda url: f'Bearer realm="{url}",service="s"'),
    ),
    "Link": st.one_of(
        scraps('< > ; next " , /v2/app/tags/list?last= a http://registry.test =', " rel=", "\t"),
        URLS.map(lambda url: f'<{url}>; rel="next"'),
        st.integers(0, 3).map(lambda n: f"</v2/app/tags/list?last={n}>; rel=next"),
    ),
    "Location": URLS,
    "Docker-Content-Digest": scraps("sha256: sha512:", DIGEST, BLOB.digest, "a" * 64, most=2),
    "Content-Type": st.one_of(scraps("; application/ json", INDEX, " ", most=3), st.just(INDEX)),
    "Retry-After": scraps("1 0 9 - . e5 : inf", " ", "Thu, 01 Jan 2026 00:00:00 GMT", most=5),
    "Range": scraps("0 - bytes= 3", "9" * 30, most=4),
    "Connection": st.sampled_from(["close", "keep-alive", "Close, x"]),
    "RateLimit-Remaining": scraps("0 1 ;w= - nan", "9" * 20, most=3),
    "X-RateLimit-Reset": scraps("0 1 - nan inf", "9" * 20, most=3),
}
LIKELY_HEADERS = {401: "WWW-Authenticate", 202: "Location", 307: "Location", 429: "Retry-After"}
STATUSES = st.sampled_from([
    200, 200, 200, 201, 202, 204, 206, 301, 307, 308, 400, 401, 401, 403, 404, 404, 405, 408, 416, 429, 500, 501, 503,
])  # fmt: skip
SAID = [
    "a", "latest", "MANIFEST_UNKNOWN", "TAG_INVALID", INDEX, DIGEST, BLOB.digest, SECRET, 4, 300, 1e400
]  # fmt: skip
LEAVES = st.one_of(st.sampled_from(SAID), CHALLENGE_WORDS, st.just("a.eyJleHAiOjF9.b"))
DOCUMENTS = st.one_of(
    trees(
        "tags name manifest tag errors code message detail details token access_token "
        "expires_in refresh_token manifests config layers mediaType digest size error",
        DIGEST,
        leaves=LEAVES,
    ),
    st.lists(st.sampled_from(["a", "b", "c"]), max_size=3).map(lambda tags: {"tags": tags}),
    LEAVES.map(lambda value: {"errors": [{"code": value, "message": value}]}),
    LEAVES.map(lambda value: {"token": value, "expires_in": value}),
)
NO_DOCUMENTS = [
    BODY, b"blob", b"<html>", b"[" * 5_000, b'{"a":' * 5_000, b"1" * 5000, b"\xff\xfe", b"\x00", b"NaN",
    SECRET.encode(),
]  # fmt: skip
BODIES = st.one_of(
    DOCUMENTS.map(lambda tree: json.dumps(tree).encode()),
    st.sampled_from(NO_DOCUMENTS),
    st.binary(max_size=20),
)


@st.composite
def wire_answers(draw):
    status, body = draw(STATUSES), draw(BODIES)
    likely = [LIKELY_HEADERS[status]] if status in LIKELY_HEADERS else []
    lines = [f"HTTP/1.1 {status} Words", f"Content-Length: {len(body)}"]
    for name in [*likely, *draw(st.lists(st.sampled_from([*HEADERS]), max_size=3))]:
        value = "".join(each for each in draw(HEADERS[name]) if each == "\t" or each >= " ")
        lines.append(f"{name}: {value.strip()}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body


class Script(deque):
    """Answers for whoever asks next, on whatever connection; 404 after the last."""

    def __bool__(self):
        return True

    def popleft(self):
        return super().popleft() if len(self) else (answer(status=404),)


class World:
    """A registry's methods, over wires that answer by a script."""

    def __init__(self, scheme, kind, login, answers):
        self.script = Script((each,) for each in answers)
        self.wires = []
        machine = Machine(lambda _: None, mock.Mock())
        transport = Transport(machine)
        transport.pool.dial = self.dial
        who = {"auth_type": "anonymous"}
        if login:
            who = {"auth_type": "basic", "username": "me", "password": SECRET}
        port = 443 if scheme == "https" else 80
        self.host = transport.client(
            config.Registry("r", scheme, "registry.test", port, kind, **who)
        )
        self.repository = RemoteRepository(self.host, "app", Side.TARGET)

    async def dial(self, origin):
        await anyio.lowlevel.checkpoint()
        wire = Wire()
        wire.answers = self.script
        self.wires.append((origin, wire))
        return wire

    def check(self):
        """Look at who was shown what (I6)."""
        for origin, wire in self.wires:
            own = origin.host == "registry.test" or origin.host.endswith(".registry.test")
            for seen in wire.requests:
                if not own or (self.host.origin.scheme, origin.scheme) == ("https", "http"):
                    assert "authorization" not in seen.headers
                    assert SECRET.encode() not in seen.body


async def upload(repository, way):
    sent = Upload(repository, BLOB)
    if not await sent.start("lib" if way == "mount" else None):
        if way == "cancel":
            await sent.cancel_upload()
        elif way == "chunks":
            await in_chunks(sent)
        else:
            await sent.send(Blob(b"bl", b"ob"))


async def in_chunks(sent):
    """Send two chunks; after the first one that breaks ask for what is kept."""
    sent.in_chunks = True
    for _ in range(2):
        try:
            await sent.send(Blob(b"bl"[sent.offset :] or b"ob"), is_last=False)
        except WireError:
            if not sent.is_broken:
                raise
            await sent.resume()
        if not (sent.session and sent.offset <= BLOB.size):
            return
    await sent.send(Blob(b""))


async def fetch(repository):
    async with await repository.open_blob(BLOB) as response:
        return await response.read(BLOB.size)


METHODS = {
    "list": RemoteRepository.list_tags,
    "head": lambda repository: repository.head_manifest("v1"),
    "get": lambda repository: repository.get_manifest("v1"),
    "get by digest": lambda repository: repository.get_manifest(DIGEST),
    "referrers": lambda repository: repository.list_referrers(DIGEST),
    "put": lambda repository: repository.put_manifest("v1", oci.Manifest(INDEX, DIGEST, BODY)),
    "has blob": lambda repository: repository.has_blob(BLOB),
    "fetch": fetch,
    "mount": lambda repository: upload(repository, "mount"),
    "upload": lambda repository: upload(repository, "start"),
    "cancel": lambda repository: upload(repository, "cancel"),
    "chunks": lambda repository: upload(repository, "chunks"),
}


@pytest.mark.parametrize("method", METHODS)
@fuzz(60)
@given(
    st.sampled_from(["http", "https"]),
    st.sampled_from(["unknown", "gar", "acr"]),
    st.booleans(),
    st.lists(wire_answers(), max_size=6),
)
def test_any_answers_give_a_value_or_one_error(method, scheme, kind, login, answers):
    async def work():
        world = World(scheme, kind, login, answers)
        with anyio.fail_after(86_400):
            try:
                value = await METHODS[method](world.repository)
            except SyncError as error:
                shown = f"{error} {error.hint}"
                assert "\n" not in shown
                assert not login or SECRET not in shown
                assert len(shown) < 3000
            else:
                assert method != "list" or value is None or all(map(oci.is_tag, value))
                assert method != "get by digest" or value.digest == DIGEST
        world.check()

    in_virtual_time(work)


REGISTRY = Origin("https", "registry.test", 443)


@fuzz(300)
@given(URLS | st.text(max_size=12), st.sampled_from([REGISTRY, Origin("http", "::1", 5000)]))
@example("http://[::1", REGISTRY)
@example("//a:99999", REGISTRY)
@example("http://a:٣/", REGISTRY)
def test_any_location_is_a_place_or_refused(location, base):
    try:
        origin, path = resolve_location(base, "/v2/app/", location)
    except ProtocolBroken:
        return
    assert origin.scheme in ("http", "https")
    assert 0 < origin.port < 65536
    assert f"{origin.host}{path}".isascii()
    assert " " not in f"{origin.host}{path}"
    assert path.startswith("/")
    # What it means does not change by being read again.
    assert resolve_location(base, "/v2/app/", f"{origin}{path}")[1] == path
