"""What others wrote, wherever it is printed: no secret comes back in it (R10), each is one clean line
(R18), and what a user wrote in the wrong place is not repeated (R19).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from conformance.content.images import Seed, encode
from conformance.messages import Answer, Request, Response, error
from conformance.registry.storage import OCI_INDEX, OCI_MANIFEST
from conformance.registry.tokens import BasicAuth, TokenService
from tests.ends import Ran, basic, document, only, run_regsync, tags

USER, SECRET = "captain", "Xyzzy-0pen-Sesame-" + "q" * 60
PAIR = basic(USER, SECRET)
LOGIN = {"auth_type": "basic", "credentials": {"username": USER, "password": SECRET}}

# Colours, a title, a bell, a line that begins anew, C1's CSI, bidirectional marks, what has no
# width, line ends.
UGLY = "\x1b[31mred\x1b]0;t\x07\b\r\nsynced a -> b\n\x9b0m\u202eevil\u2066\u2028\u200b\u061c\x85\x7f\u00ad"
# The same as a header's value: one line, Latin-1.
LINE = "\x1b[31mred\x9b0m\x85synced a -> b\xad".replace("\x1b", "\xff")


def is_clean(ran: Ran) -> None:
    """Assert that every line is one that this program begins, and holds nothing that a terminal
    obeys.
    """
    for text in (ran.out, ran.err):
        assert [each for each in text if not (each.isprintable() or each == "\n")] == []
        assert [
            line for line in text.split("\n") if line.startswith(("synced a", "evil", "red"))
        ] == []


def body(document: Any, media_type: str) -> Response:
    return Response(200, [("Content-Type", media_type)], encode(document))


def manifest(**fields: Any) -> Response:
    document = dict(Seed(1).image(sizes=(50,)).document)
    return body({**document, **fields}, OCI_MANIFEST)


def layer(**fields: Any) -> Response:
    document = dict(Seed(1).image(sizes=(50,)).document)
    return manifest(layers=[{**document["layers"][0], **fields}])


def index(**fields: Any) -> Response:
    entry = {"mediaType": OCI_MANIFEST, "digest": f"sha256:{'a' * 64}", "size": 9, **fields}
    return body({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]}, OCI_INDEX)


# Where a registry says it: the kind of request, the answer.
SAID: dict[str, tuple[str, Answer]] = {
    "an error's words": ("manifest", error(400, "BAD", UGLY)),
    "an error's code": ("manifest", error(404, UGLY, "no")),
    "an error's details": ("manifest", Response(400, [], json.dumps({"details": UGLY}).encode())),
    "an error that is no JSON": ("manifest", Response(400, [], UGLY.encode())),
    "an error in other bytes": ("manifest", Response(400, [], UGLY.encode("utf-16"))),
    "a reason": ("manifest", f"HTTP/1.1 404 {LINE}\r\nContent-Length: 0\r\n\r\n".encode("latin-1")),
    "a warning": ("manifest", Response(404, [("Warning", f'299 - "{LINE}"')])),
    "a status line": ("manifest", f"{LINE} 200 OK\r\n\r\n".encode("latin-1")),
    "a header": ("manifest", f"HTTP/1.1 200 OK\r\n{LINE}\r\n\r\n".encode("latin-1")),
    "a wait": ("manifest", Response(400, [("Retry-After", LINE)])),
    "a digest": ("manifest", Response(200, [("Docker-Content-Digest", LINE)], b"{}")),
    "a content type": ("manifest", Response(200, [("Content-Type", LINE)], b"{}")),
    "a coding": ("manifest", Response(200, [("Content-Encoding", LINE)], b"{}")),
    "a location": ("manifest", Response(307, [("Location", f"http://{LINE}.test/")])),
    "a challenge": ("manifest", Response(401, [("WWW-Authenticate", LINE)])),
    "a challenge's name": (
        "manifest",
        Response(401, [("WWW-Authenticate", "Negotiate-" + "x" * 900)]),
    ),
    "a realm": (
        "manifest",
        Response(401, [("WWW-Authenticate", f'Bearer realm="https://evil.test/{LINE}"')]),
    ),
    "a document": ("manifest", Response(200, [("Content-Type", OCI_MANIFEST)], UGLY.encode())),
    "a media type": ("manifest", manifest(mediaType=UGLY)),
    "a config's type": ("manifest", manifest(config={"mediaType": UGLY, "digest": "x", "size": 1})),
    "a layer's type": ("manifest", layer(mediaType=UGLY)),
    "a layer's digest": ("manifest", layer(digest=UGLY)),
    "a layer's size": ("manifest", layer(size=UGLY)),
    "a key": (
        "manifest",
        Response(200, [("Content-Type", OCI_MANIFEST)], f"{{{json.dumps(UGLY)}:1,".encode() * 2),
    ),
    "a key twice": (
        "manifest",
        Response(
            200,
            [("Content-Type", OCI_MANIFEST)],
            f"{{{json.dumps(UGLY)}:1,{json.dumps(UGLY)}:1}}".encode(),
        ),
    ),
    "a platform": ("manifest", index(platform={"os": UGLY, "architecture": UGLY})),
    "an annotation": ("manifest", index(annotations={UGLY: UGLY})),
    "a tag": ("tag_list", Response(200, [], json.dumps({"tags": ["v1", UGLY]}).encode())),
    "a listing": ("tag_list", Response(200, [], UGLY.encode())),
    "a next page": (
        "tag_list",
        Response(200, [("Link", f"<http://{LINE}/>; rel=next")], b'{"tags": ["v1"]}'),
    ),
}


@pytest.mark.rule("R18")
@pytest.mark.parametrize(
    "form", [[], ["-vv"], ["--log-format", "json"]], ids=["text", "vv", "json"]
)
@pytest.mark.parametrize("name", SAID)
def test_what_a_registry_says_is_one_clean_line(source, target, name, form):
    kind, answer = SAID[name]

    def say(request: Request) -> Answer | None:
        if isinstance(answer, Response) and request.kind == kind:
            return Response(answer.status, list(answer.headers), answer.body)
        return answer if request.kind == kind else None

    source.app.intercept = say
    rule = {
        "from": "app",
        "tags": tags("*" if kind == "tag_list" else "v1"),
        "platforms": ["linux/amd64"],
    }
    text = document({"source": source, "t": target}, rule)
    ran = run_regsync("sync", "--no-progress", *form, "-c", "-", stdin=text)
    assert ran.status in (2, 4)
    is_clean(ran)
    if "json" in form:
        told = [json.loads(line) for line in ran.err.splitlines()]
        assert [each["event"] for each in told].count("image_failed") == 1
    else:
        assert len([line for line in ran.err.splitlines() if line.startswith("failed ")]) == 1


@pytest.mark.rule("R18")
@pytest.mark.parametrize(
    "answer", [error(403, UGLY, UGLY), Response(400, [], json.dumps({"error": UGLY}).encode())]
)
def test_what_a_token_service_says_is_one_clean_line(serve, target, answer):
    source = serve(auth=TokenService({"a": "b"}))
    source.app.intercept = lambda request: (
        Response(answer.status, list(answer.headers), answer.body)
        if request.path == "/token"
        else None
    )
    ran = run_regsync(
        "sync",
        "-vv",
        "-c",
        "-",
        stdin=document({"source": source, "t": target}, {"from": "app", "tags": tags("v1")}),
    )
    assert ran.status == 4
    is_clean(ran)


@pytest.mark.rule("R18")
@pytest.mark.parametrize(
    "where", ["registries", "url", "from", "to", "source", "targets", "glob", "semver", "global"]
)
@pytest.mark.parametrize("text", [UGLY, "\x1b[1m", "a\u202eb", "a\nsynced a -> b"], ids=repr)
def test_what_a_configuration_says_is_clean_lines(where, text):
    mapping: dict[str, Any] = {"from": "app", "source": "a", "targets": ["a"], "tags": {}}
    given: dict[str, Any] = {
        "registries": {"a": {"url": "h.test"}},
        "mappings": [mapping],
        "global": {},
    }
    places: dict[str, Callable[[], object]] = {
        "registries": lambda: given["registries"].update({text: {"url": "x.test"}}),
        "url": lambda: given["registries"]["a"].update(url=text),
        "global": lambda: given["global"].update({text: text}),
        "glob": lambda: mapping["tags"].update(glob=text),
        "semver": lambda: mapping["tags"].update(semver=text),
        "targets": lambda: mapping.update(targets=[text]),
    }
    places.get(where, lambda: mapping.update({where: text}))()
    ran = run_regsync("validate", "-", stdin=json.dumps(given))
    assert ran.status == 3
    is_clean(ran)
    assert all(
        line.startswith(("error: CONFIG_ERROR: ", "hint: ", "warning: "))
        for line in ran.err.splitlines()
    )


@pytest.mark.rule("R18")
@pytest.mark.parametrize(
    "arguments",
    [
        ["{}"],
        ["tags", "{}"],
        ["tags", "h.test/a", "--semver", "{}"],
        ["sync", "{}"],
        ["sync", "-c", "{}"],
        ["validate", "{}"],
        ["copy", "a", "{}"],
    ],
)
def test_what_a_command_line_says_is_one_clean_line(arguments):
    ran = run_regsync(*(each.format(UGLY) for each in arguments))
    assert ran.status == 3
    is_clean(ran)


# R10: what is repeated to us. What servers may repeat, and where it must not be, is in test_canary.py.


def raw(head: str, body: bytes = b"") -> bytes:
    return f"{head}\r\n\r\n".encode("latin-1") + body


@pytest.mark.rule("R10")
def test_no_traceback_shows_what_was_repeated(serve):
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


@pytest.mark.rule("R10")
@pytest.mark.parametrize("form", ["json", "text"])
def test_a_registry_that_repeats_the_request_repeats_no_secret(serve, target, form):
    source = serve(auth=BasicAuth({USER: SECRET}))
    Seed(1).image().load_into(source.app, "app", tag="v1")

    def repeat(request: Request) -> Answer | None:
        login = request.header("authorization")
        said = f"you sent {login}, {SECRET}; see https://bucket.test/a?X-Signature=abc123 and ask"
        if not login:
            return None
        return error(400, "BAD", said) if form == "json" else Response(400, [], said.encode())

    source.app.intercept = repeat
    text = json.dumps({"registries": {"s": {"url": source.url, **LOGIN}}, "mappings": []})
    where = (f"{source.address}/app:v1", f"{target.address}/app:v1")
    ran = run_regsync("copy", "--json", "-vv", "--no-artifacts", "-c", "-", *where, stdin=text)
    assert "you sent Basic ***, ***; see https://bucket.test/a?... and ask" in only(ran.failed)
    for secret in (SECRET, basic(USER, SECRET), "abc123"):
        assert secret not in ran.out + ran.err


@pytest.mark.rule("R10")
def test_the_query_of_a_next_page_is_in_no_log(source, target):
    def pages(request: Request) -> Answer | None:
        if request.parameter("state"):
            return Response(503)
        link = '</v2/app/tags/list?state=signed-secret>; rel="next"'
        return (
            Response(200, [("Link", link)], b'{"tags": ["v1"]}')
            if request.kind == "tag_list"
            else None
        )

    source.app.intercept = pages
    text = document({"source": source, "t": target}, {"from": "app"})
    ran = run_regsync("sync", "--json", "-vv", "-c", "-", stdin=text)
    assert ran.status == 2
    assert "GET " in ran.err, "else this tests nothing"
    assert "signed-secret" not in ran.out + ran.err


# R19: what is not known is hidden (tests/test_canary_places.py), and what is no login is shown.


@pytest.mark.rule("R19")
@pytest.mark.parametrize("word", ["registry.test:5000/app@sha256:zz", "app:v1@sha512:"])
def test_a_digest_is_no_login(word):
    assert word in run_regsync("tags", word).err


@pytest.mark.rule("R19")
def test_a_digest_in_a_field_is_shown():
    mapping = {"from": f"host.test/app:v1@sha256:{'a' * 64}", "source": "a", "targets": ["a"]}
    ran = run_regsync(
        "validate",
        "-",
        stdin=json.dumps({"registries": {"a": {"url": "h.test"}}, "mappings": [mapping]}),
    )
    assert f"app:v1@sha256:{'a' * 64}'" in ran.err
