"""The rules of docs/protocol-facts.md section 9.2, each by its number: peers, files and words that
mean harm.

Every rule has a test that bears its number (`@pytest.mark.rule("R7")`), here or where the same is
tested already; `test_every_rule_has_a_test` reads the marks of all test files. What goes over the
wire is read from the journals of those who must not be asked, what a user reads from the run's
output.
"""

from __future__ import annotations

import ast
import json
import os
import socket
import stat
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from _regsync.state.archive import BlobEntry, RepositoryKey
from _regsync.state.database import StateFile
from _regsync.sync.staging import Staging
from _regsync.text import printable
from conformance.content.images import Seed
from conformance.messages import Answer, Request, Response, error
from conformance.registry.storage import OCI_MANIFEST
from conformance.registry.tokens import BasicAuth, TokenService
from conformance.server.sockets import Server
from tests import states
from tests.ends import (
    ROOT,
    Ran,
    Start,
    basic,
    document,
    held,
    only,
    run_regsync,
    sync,
    tags,
    until_blank_line,
)

RULES = {
    "R1": "a credential is bound to one origin",
    "R2": "a realm is checked, a login is not redirected",
    "R3": "an upload goes where it is safe",
    "R4": "a redirect leads to no place that is less safe",
    "R5": "the urls of a descriptor are not fetched",
    "R6": "the next page is on the same origin and below the same name",
    "R7": "a proxy's login is in CONNECT alone",
    "R8": "a credential is chosen by the exact host",
    "R9": "no scheme gives way to another",
    "R10": "no URL's query, no header that proves anything is shown",
    "R11": "digests, tags and names are checked before they are part of anything",
    "R12": "every body is hashed, and compared with what named it",
    "R13": "a document is what all its names say, and one thing only",
    "R14": "everything is bounded",
    "R15": "no coding is asked for, none is decoded",
    "R16": "nothing from a registry is a path, no link is followed",
    "R17": "after a broken exchange the connection is closed",
    "R18": "text of others is one clean line",
    "R19": "no secret in arguments' echoes, no write to files of credentials",
    "R20": "where a cloud's identity is asked for is fixed",
}

USER, SECRET = "captain", "Xyzzy-0pen-Sesame-" + "q" * 60
PAIR = basic(USER, SECRET)
LOGIN = {"auth_type": "basic", "credentials": {"username": USER, "password": SECRET}}
# Colours, a window's title, a bell, a line that overwrites, C1's CSI, bidirectional marks, nothing
# wide, new lines.
UGLY = "\x1b[31mred\x1b]0;t\x07\b\r\nsynced a -> b\n\x9b0m\u202eevil\u2066\u2028\u200b\u061c\x85\x7f\U000e0041"

BIDIRECTIONAL = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def rules_of(path: Path) -> Iterator[tuple[str, str]]:
    """Give each test function of a file with each rule that it bears."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if "mark.rule(" in text else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith(
            "test_"
        ):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.rule":
                    yield from ((node.name, str(ast.literal_eval(each))) for each in mark.args)


def test_every_rule_has_a_test() -> None:
    found = [pair for path in sorted((ROOT / "tests").glob("test_*.py")) for pair in rules_of(path)]
    named = {rule for _, rule in found}
    assert named - {*RULES} == set(), "a mark that is no rule"
    assert {*RULES} - named == set(), "a rule without a test"


# R10: what is repeated to us. `printable` cuts, and what is cut is still a part of a secret.


def raw(head: str, body: bytes = b"") -> bytes:
    return f"{head}\r\n\r\n".encode("latin-1") + body


ECHOES: dict[str, Callable[[str], Answer]] = {
    "a page": lambda said: Response(200, [], f"<html>{said} and so on".encode()),
    "a page that begins with controls": lambda said: Response(
        200, [], b"\x00" * 150 + said.encode() * 9
    ),
    "the password in a page": lambda said: Response(200, [], b"x" * 40 + SECRET.encode()),
    "a tag": lambda said: Response(200, [], json.dumps({"tags": ["x" * 30 + PAIR]}).encode()),
    "a header that is none": lambda said: raw(f"HTTP/1.1 200 OK\r\nX-Echo {said}"),
    "a status line that is none": raw,
    "a chunk that is none": lambda said: raw(
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", f"{said}\r\n".encode()
    ),
    "an error over and over": lambda said: Response(400, [], f"{said} ".encode() * 30),
    "an error's code": lambda said: error(400, said, said * 3),
    "a realm": lambda said: Response(
        401, [("WWW-Authenticate", f'Bearer realm="https://evil.test/{PAIR}"')]
    ),
    "a coding": lambda said: Response(200, [("Content-Encoding", said)], b'{"tags": []}'),
    "a content type": lambda said: Response(200, [("Content-Type", said)], b"{}"),
}


@pytest.mark.rule("R10")
@pytest.mark.parametrize("what", ["tag_list", "manifest"])
@pytest.mark.parametrize("name", ECHOES)
def test_no_part_of_a_secret_comes_back(serve: Start, target: Server, name: str, what: str) -> None:
    source = serve(auth=BasicAuth({USER: SECRET}))
    Seed(1).image().load_into(source.app, "app", tag="v1")

    def repeat(request: Request) -> Answer | None:
        login = request.header("authorization")
        return ECHOES[name](login) if login and request.kind == what else None

    source.app.intercept = repeat
    mapping = {"from": "app", "tags": tags("*" if what == "tag_list" else "v1")}
    text = document({"source": {"url": source.url, **LOGIN}, "t": target}, mapping)
    ran = run_regsync("sync", "--json", "-vv", "-c", "-", stdin=text)
    assert ran.status in (2, 4)
    said = ran.out + ran.err
    for secret in (SECRET, PAIR):
        assert not [
            secret[start : start + 8]
            for start in range(len(secret) - 8)
            if secret[start : start + 8] in said
        ]
    assert PAIR in str([entry.headers for entry in source.journal.entries]), (
        "else there is nothing to repeat"
    )


@pytest.mark.rule("R10")
def test_no_traceback_shows_what_was_repeated(serve: Start) -> None:
    source = serve(auth=BasicAuth({USER: SECRET}))

    def repeat(request: Request) -> Answer | None:
        login = request.header("authorization")
        return raw(f"HTTP/1.1 200 OK\r\nX-Echo {login}") if login else None

    source.app.intercept = repeat
    text = json.dumps({"registries": {"s": {"url": source.url, **LOGIN}}, "mappings": []})
    ran = run_regsync("tags", "-vv", "-c", "-", f"{source.address}/app", stdin=text)
    assert ran.status == 2
    assert "Traceback" in ran.err, "else this tests nothing"
    assert PAIR[:9] not in ran.err


# R14: a small answer that is large in memory.


@pytest.mark.rule("R14")
@pytest.mark.parametrize(
    "body", [b'{"a":[' + b"[]," * 500_000 + b"[]]}", b'{"a":[' + b"0," * 500_000 + b"0]}"]
)
def test_a_manifest_of_too_many_values_is_refused_unread(
    source: Server, target: Server, body: bytes
) -> None:
    source.app.intercept = lambda request: (
        Response(200, [("Content-Type", OCI_MANIFEST)], body)
        if request.kind == "manifest"
        else None
    )
    ran = sync({"source": source, "t": target}, {"from": "app", "tags": tags("v1")})
    assert "more than 300000 values" in only(ran.failed)
    assert source.journal.count("GET", "manifest") == 1


@pytest.mark.rule("R14")
def test_a_listing_of_lists_is_refused_unread(source: Server, target: Server) -> None:
    body = b'{"tags":[' + b"[]," * 300_000 + b"[]]}"
    source.app.intercept = lambda request: (
        Response(200, [], body) if request.kind == "tag_list" else None
    )
    ran = sync({"source": source, "t": target}, {"from": "app"})
    assert "is not a list of names" in only(ran.failed)


@pytest.mark.rule("R14")
def test_a_token_longer_than_any_head_is_none(serve: Start, target: Server) -> None:
    source = serve(auth=TokenService({USER: SECRET}))
    body = json.dumps({"token": "x" * 65_537}).encode()
    source.app.intercept = lambda request: (
        Response(200, [], body) if request.path == "/token" else None
    )
    ran = sync(
        {"source": {"url": source.url, **LOGIN}, "t": target}, {"from": "app", "tags": tags("v1")}
    )
    assert "usable token" in only(ran.failed)
    assert not [entry for entry in source.journal.entries if "xxx" in str(entry.headers)]


# R15.


@pytest.mark.rule("R15")
@pytest.mark.parametrize("coding", ["gzip", "GZIP", "zstd", "identity, br", "\x1b[1mx"])
@pytest.mark.parametrize("what", ["tag_list", "manifest", "blob", "token"])
def test_a_coding_that_nobody_asked_for_is_refused(
    serve: Start, target: Server, what: str, coding: str
) -> None:
    source = serve(auth=TokenService({USER: SECRET}))
    image = Seed(1).image(sizes=(70_000,)).load_into(source.app, "app", tag="v1")

    def amend(request: Request, answer: Answer) -> Answer:
        kind = "token" if request.path == "/token" else request.kind
        if isinstance(answer, Response) and kind == what and answer.status == 200:
            return Response(200, [*answer.headers, ("Content-Encoding", coding)], answer.body)
        return answer

    source.app.amend = amend
    mapping = {"from": "app", "tags": tags("*" if what == "tag_list" else "v1")}
    ran = sync({"source": {"url": source.url, **LOGIN}, "t": target}, mapping)
    assert "which was not asked for" in only(ran.failed)
    assert "\x1b" not in ran.out + ran.err
    assert not target.app.tags("app")
    assert not held(target, "app", image)
    asked = [entry for entry in source.journal.entries if not entry.target.startswith("/token")]
    assert {entry.headers.get("accept-encoding") for entry in asked} == {"identity"}


@pytest.mark.rule("R15")
def test_an_error_stays_that_error_in_whatever_coding(source: Server, target: Server) -> None:
    packed = Response(404, [("Content-Encoding", "gzip")], b"\x1f\x8b\x08\x00whatever")
    source.app.intercept = lambda request: packed if request.kind == "manifest" else None
    ran = sync({"source": source, "t": target}, {"from": "app", "tags": tags("v1")})
    assert "status 404" in only(ran.failed)
    assert only(ran.images)["error"]["status"] == 404


# R16: files of others in our directory.


@pytest.fixture
def mirror(tmp_path: Path, source: Server, target: Server) -> Callable[..., Ran]:
    """Return a function that runs a mapping of one image, with its state in `tmp_path / "cache"`."""
    Seed(1).image(sizes=(50,)).load_into(source.app, "app", tag="v1")
    path = tmp_path / "mirror.yaml"

    def run(**settings: Any) -> Ran:
        given = {"cache_dir": "cache", **settings}
        path.write_text(
            document(
                {"source": source, "t": target},
                {"from": "app", "tags": tags("v1")},
                **{"global": given},
            )
        )
        return run_regsync("sync", "--json", "-c", str(path))

    return run


def entries(folder: Path) -> dict[str, int]:
    """Return the modes of everything below a directory."""
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode)
        for path in folder.rglob("*")
    }


@pytest.mark.rule("R16")
@pytest.mark.parametrize(
    "name", ["state.db", "state.lock", "state.db-journal", "state.bin", "state.journal"]
)
@pytest.mark.parametrize("what", ["pipe", "link", "other name", "directory", "dangling link"])
def test_what_stands_where_the_state_belongs_is_waited_for_and_written_to_by_nobody(
    tmp_path: Path, mirror: Callable[..., Ran], target: Server, name: str, what: str
) -> None:
    victim, place = tmp_path / "victim", tmp_path / "cache" / name
    victim.write_bytes(b"precious")
    victim.chmod(0o644)
    place.parent.mkdir()
    makes: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(place),
        "link": lambda: place.symlink_to(victim),
        "other name": lambda: place.hardlink_to(victim),
        "directory": place.mkdir,
        "dangling link": lambda: place.symlink_to(tmp_path / "made"),
    }
    makes[what]()
    ran = mirror()
    assert (ran.status, ran.statuses()) == (0, ["synced"])
    assert "Traceback" not in ran.err
    assert victim.read_bytes() == b"precious"
    assert stat.S_IMODE(victim.stat().st_mode) == 0o644
    assert not (tmp_path / "made").exists()


@pytest.mark.rule("R16")
@pytest.mark.parametrize("linked", ["staged", "staged/sha256"])
def test_a_directory_that_somebody_else_chose_is_neither_filled_nor_emptied(
    tmp_path: Path, linked: str
) -> None:
    victim, link = tmp_path / "victim", tmp_path / "cache" / linked
    inside = victim / "sha256" if linked == "staged" else victim
    inside.mkdir(parents=True)
    precious = inside / ("a" * 64)
    precious.write_bytes(b"precious")
    old = inside / f"{'b' * 64}.0011.partial"
    old.write_bytes(b"precious")
    os.utime(old, (0, 0))
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    staging = Staging(str(tmp_path / "cache"))
    with pytest.raises(OSError, match="symbolic link is not followed"):
        staging._folder("sha256")
    staging.close()
    assert sorted(inside.iterdir()) == [precious, old]


@pytest.mark.rule("R16")
def test_what_a_run_makes_is_its_users_alone_whatever_the_umask(
    tmp_path: Path, mirror: Callable[..., Ran]
) -> None:
    before = os.umask(0)
    try:
        assert mirror(cache_dir="a/b/cache").status == 0
    finally:
        os.umask(before)
    made = {name: mode for name, mode in entries(tmp_path).items() if name.startswith("a")}
    assert {*made} >= {"a", "a/b", "a/b/cache", "a/b/cache/state.db"}
    assert [name for name, mode in made.items() if mode & 0o077] == []


@pytest.mark.rule("R16")
@pytest.mark.parametrize("name", ["state.db", "state.db-journal"])
@pytest.mark.parametrize("what", ["link", "other name", "pipe"])
def test_a_state_that_is_another_file_is_begun_anew(tmp_path: Path, name: str, what: str) -> None:
    cache, victim = tmp_path / "cache", tmp_path / "victim"
    write_state(cache)
    victim.write_bytes((cache / "state.db").read_bytes())
    place = cache / name
    place.unlink(missing_ok=True)
    makes: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(place),
        "link": lambda: place.symlink_to(victim),
        "other name": lambda: place.hardlink_to(victim),
    }
    makes[what]()
    before = victim.read_bytes()

    reader = StateFile(str(cache), print)
    reader.load(keep=False)
    reader.close()
    assert os.path.lexists(place), "who has no lock removes nothing"
    write_state(cache)

    assert victim.read_bytes() == before
    assert not (cache / "state.db-journal").exists()
    assert (cache / "state.db").stat().st_nlink == 1
    assert not (cache / "state.db").is_symlink()
    assert states.entries(cache) == 1


def write_state(directory: Path) -> None:
    kept = StateFile(str(directory), print)
    kept.load()
    kept.put_blob(RepositoryKey("host", "app"), bytes(33), BlobEntry(1, True))
    kept.close()


# R19: what a shell's history has already, and a log need not.


@pytest.mark.rule("R19")
@pytest.mark.parametrize(
    "where",
    ["{}@host.test/app:v1", "{}@host.test", "https://{}@host.test/app", "{}@host.test:5000"],
)
@pytest.mark.parametrize(
    "command", [["copy", "", "b.test/x"], ["copy", "b.test/x", ""], ["tags", ""], [""], ["sync", "-c", "x", ""],
                ["copy", "b.test/x", "b.test/y", ""]]
)  # fmt: skip
@pytest.mark.parametrize("more", [[], ["--json"], ["-vv", "--log-format", "json"]])
def test_a_mistyped_login_is_not_repeated(where: str, command: list[str], more: list[str]) -> None:
    word = where.format(f"{USER}:{SECRET}")
    ran = run_regsync(*(word if each == "" else each for each in command), *more)
    assert ran.status == 3
    assert SECRET[:5] not in ran.out + ran.err
    assert "CONFIG_ERROR" in ran.err


@pytest.mark.rule("R19")
@pytest.mark.parametrize("words", [["--password=hunter2"], ["--password", "hunter2"]])
def test_what_an_unknown_option_was_given_is_not_repeated(words: list[str]) -> None:
    ran = run_regsync("sync", "-c", "mirror.yaml", *words)
    assert ran.status == 3
    assert "unrecognized arguments: --password" in ran.err
    assert "hunter2" not in ran.out + ran.err


@pytest.mark.rule("R19")
@pytest.mark.parametrize("word", ["registry.test:5000/app@sha256:zz", "app:v1@sha512:"])
def test_a_digest_is_no_login(word: str) -> None:
    assert word in run_regsync("tags", word).err


# R18.


@pytest.mark.rule("R18")
def test_nothing_that_a_terminal_obeys_is_left() -> None:
    every = [chr(code) for code in range(0x110000)]
    unsafe = {each for each in every if unicodedata.category(each) in ("Cc", "Zl", "Zp")}
    # What reorders, and what has no width: what stands before or behind it looks as if it were
    # something else.
    unsafe |= {each for each in every if unicodedata.bidirectional(each) in BIDIRECTIONAL} | {
        *"\u200b\u200c\u2060\ufeff"
    }
    assert [hex(ord(each)) for each in unsafe if each in printable(f"a{each}b")] == []
    assert len(printable("".join(every), len(every)).splitlines()) == 1
    assert printable("tab\tand\nline") == "tab and line"


@pytest.mark.rule("R18")
def test_what_was_cut_says_so() -> None:
    assert printable("a" * 10, 10) == "a" * 10
    assert printable("a" * 11, 10) == "a" * 9 + "…"
    assert printable("\x00" * 38 + "a" * 9, 10) == "aa…"


@pytest.mark.rule("R19")
@pytest.mark.parametrize(
    "word",
    [f"{USER}:{SECRET}@host.test/app", f"https://{USER}:{SECRET}@h.test/a", f"{USER}:p@{SECRET}@h"],
)
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_login_written_into_a_field_is_not_repeated(word: str, more: list[str]) -> None:
    mapping = {
        "from": word,
        "to": word,
        "source": "a",
        "targets": [word],
        "tags": {"glob": word, "exclude": word, "semver": word},
    }
    registries = {"a": {"url": word, "proxy": word, "auth_type": word}}
    text = json.dumps(
        {"registries": registries, "mappings": [mapping], "global": {"cache_ttl": word}}
    )
    ran = run_regsync("sync", "-c", "-", *more, stdin=text)
    assert ran.status == 3
    assert "mappings[0].from" in ran.err
    assert SECRET[:9] not in ran.out + ran.err


@pytest.mark.rule("R19")
def test_a_digest_in_a_field_is_shown() -> None:
    mapping = {"from": f"host.test/app:v1@sha256:{'a' * 64}", "source": "a", "targets": ["a"]}
    ran = run_regsync(
        "validate",
        "-",
        stdin=json.dumps({"registries": {"a": {"url": "h.test"}}, "mappings": [mapping]}),
    )
    assert f"app:v1@sha256:{'a' * 64}' has a digest" in ran.err


# R17: what two readers could take for two answers is refused, or read once on a connection that is
# used no more.

HEAD = b"HTTP/1.1 200 OK\r\n"
PAGE = b'{"tags":["v1"]}'
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\nf\r\n" + PAGE + b"\r\n0\r\n"
SHAPES: dict[str, tuple[bytes, str]] = {
    "both framings": (HEAD + b"Content-Length: 3\r\n" + CHUNKED + b"\r\n", ""),
    "chunked twice": (
        HEAD + b"Transfer-Encoding: chunked\r\n" + CHUNKED + b"\r\n",
        "multiple Transfer-Encoding",
    ),
    "a coding before chunks": (
        HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding",
    ),
    "almost chunked": (HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", "Transfer-Encoding"),
    "chunked by a control": (HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", "HTTP/1.1"),
    "two lengths": (
        HEAD + b"Content-Length: 15\r\nContent-Length: 16\r\n\r\n" + PAGE,
        "conflicting Content-Length",
    ),
    "a list of lengths": (
        HEAD + b"Content-Length: 15, 16\r\n\r\n" + PAGE,
        "conflicting Content-Length",
    ),
    "a length with a sign": (HEAD + b"Content-Length: +15\r\n\r\n" + PAGE, "bad Content-Length"),
    "a length in hexadecimal": (HEAD + b"Content-Length: 0xf\r\n\r\n" + PAGE, "bad Content-Length"),
    "a length beyond all": (
        HEAD + b"Content-Length: " + b"9" * 300 + b"\r\n\r\n" + PAGE,
        "bad Content-Length",
    ),
    "a space before the colon": (
        HEAD + b"Content-Length : 15\r\n\r\n" + PAGE,
        "illegal header line",
    ),
    "a NUL in a value": (
        HEAD + b"X: a\x00b\r\nContent-Length: 15\r\n\r\n" + PAGE,
        "illegal header line",
    ),
    "a CR alone in a value": (
        HEAD + b"X: a\rY: b\r\nContent-Length: 15\r\n\r\n" + PAGE,
        "illegal header line",
    ),
    "a line without a colon": (HEAD + b"Content-Length\r\n\r\n" + PAGE, "illegal header line"),
    "a continuation of nothing": (
        HEAD + b" Content-Length: 15\r\n\r\n" + PAGE,
        "continuation line",
    ),
    "a chunk of negative size": (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n-f\r\n" + PAGE,
        "illegal chunk header",
    ),
    "a chunk without end": (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n",
        "illegal chunk header",
    ),
    "a chunk that ends elsewhere": (
        HEAD + CHUNKED.replace(b"\r\n0", b"XX0"),
        "malformed chunk footer",
    ),
    "another protocol": (
        HEAD.replace(b"200 OK", b"101 Switching") + b"Upgrade: x\r\n\r\n",
        "HTTP/1.1",
    ),
    "a status of two digits": (HEAD.replace(b"200", b"20") + b"\r\n", "illegal status line"),
    "two answers at once": ((HEAD + b"Content-Length: 15\r\n\r\n" + PAGE) * 2, ""),
    "the same length twice": (
        HEAD + b"Content-Length: 15\r\nContent-Length: 15\r\n\r\n" + PAGE,
        "",
    ),
    "trailers that frame": (HEAD + CHUNKED + b"Transfer-Encoding: x\r\n\r\n", "Transfer-Encoding"),
    "trailers with a length": (HEAD + CHUNKED + b"Content-Length: 3\r\n\r\n", ""),
    # RFC 9112 sections 2.2 and 5.2 let a client read these, and there is one way to do so.
    "lines that end in LF": (b"HTTP/1.1 200 OK\nContent-Length: 15\n\n" + PAGE, ""),
    "a value on two lines": (
        HEAD + b"X: a\r\n Content-Length: 3\r\nContent-Length: 15\r\n\r\n" + PAGE,
        "",
    ),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 15\r\n\r\n" + PAGE, ""),
}
# Nothing of these is doubtful: the connection may serve again.
CLEAR = {
    "the same length twice",
    "trailers with a length",
    "lines that end in LF",
    "a value on two lines",
}


@pytest.mark.rule("R17")
@pytest.mark.parametrize("name", SHAPES)
def test_an_answer_is_one_answer_or_none(speaker: Any, target: Server, name: str) -> None:
    said, words = SHAPES[name]
    served: list[int] = []

    def script(connected: socket.socket) -> None:
        served.append(0)
        while until_blank_line(connected):
            served[-1] += 1
            # A second exchange that read what was left of the first would get these tags.
            connected.sendall(
                said
                if len(served) == served[-1] == 1
                else HEAD + b"Content-Length: 15\r\n\r\n" + PAGE
            )

    text = document(
        {"source": f"http://{speaker(script)}", "t": target}, {"from": "app"}, {"from": "app/two"}
    )
    ran = run_regsync("sync", "-q", "--dry-run", "--json", "-c", "-", stdin=text)
    failed = [line for line in ran.err.splitlines() if "list tags of" in line]
    if words:
        assert words in only(failed)
        assert "/app:" in only(failed)
        assert "\x0b" not in ran.err
    else:
        assert failed == []
    assert [each["selected"] for each in ran.report["mappings"]][-1] == 1
    assert served[0] == 1 or name in CLEAR, "what was read doubtfully is read no more"
