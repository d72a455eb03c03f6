"""No secret is in anything that a run leaves or says: every command, every failure, secrets in
every place.

The places are canary_scene's, the search is canaries'. Servers repeat whatever they are shown, in
every part of an answer that is read.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from conformance.content.images import Seed
from conformance.messages import Request, Response
from tests.canaries import Canaries, Traces, writings
from tests.canary_scene import (
    ACR,
    NEVER_SENT,
    SERVICES,
    STORAGE,
    VARIANTS,
    Bearer,
    Scene,
    arranged,
    said,
    words,
)
from tests.ends import document, only

# The search finds what there is.


@pytest.fixture
def traces(tmp_path: Path) -> Traces:
    canaries = Canaries()
    canaries.make("here", "/:+")
    return Traces(canaries, tmp_path)


@pytest.mark.parametrize("writing", range(len([*writings("x" * 9)])))
def test_a_canary_is_found_in_each_writing(traces, writing):
    _, text = [*writings(traces.canaries.places["here"])][writing]
    for part in (text, text[5:29], f"words before {text[:19]}… and behind"):
        assert len(traces.found({"standard error": part})) == 1, part
    assert not traces.found({"standard error": f"{text[:7]} {text[-7:]}"}), (
        "less than eight say nothing"
    )


def test_a_canary_is_found_in_each_place_that_a_run_can_leave_it_in(traces, tmp_path):
    secret = traces.canaries.places["here"]
    name = secret[:9]

    def is_found(text: str | bytes = "") -> bool:
        return len(traces.found({"a channel": text})) == 1

    for channel in (
        "out",
        "err",
        json.dumps({"said": secret}),
        b"\0\1" + secret.encode() + b"\xff",
    ):
        assert is_found(secret if isinstance(channel, str) and len(channel) < 4 else channel)
    assert is_found(b"head" + zlib.compress(b"x" * 99 + secret.encode()) + b"tail")
    assert not is_found()
    (tmp_path / "below" / name).mkdir(parents=True)
    assert is_found()
    (tmp_path / "below" / name).rmdir()
    (tmp_path / "state.db").write_bytes(b"SQLite format 3\0" + zlib.compress(secret.encode()))
    assert is_found()
    (tmp_path / "state.db").unlink()
    (tmp_path / "link").symlink_to(f"/nowhere/{name}")
    assert is_found()


# Where nothing fails.


def unheard(scene: Scene) -> list[str]:
    """Return the places whose secrets no server was shown, and which are for showing."""
    heard = scene.canaries.found("\n".join(scene.heard).encode())
    idle = (*NEVER_SENT, "refresh token", "_state of", "Google private_key")
    return [
        place
        for place in scene.canaries.places
        if place not in heard and not any(each in place for each in idle)
    ]


@pytest.mark.anyio
@pytest.mark.virtual_time
@pytest.mark.parametrize("variant", ["", *VARIANTS])
async def test_where_all_goes_well_each_secret_is_used_and_none_is_seen(
    world, variant, tmp_path, clean_env
):
    scene = arranged(
        world, tmp_path, clean_env, variant, **({} if variant else {"first": 1_100_000})
    )
    scene.config()
    traces = Traces(scene.canaries, tmp_path, clean_env)
    ran = await scene.run(*words(scene, "sync"))
    bad = [each for each in ran.images if each["error"] and "(407)" not in each["error"]["message"]]
    assert not bad
    assert unheard(scene) == []
    assert [name for name, _ in traces.left() if name == "the file state.db"], (
        "else its search means nothing"
    )
    assert not traces.found(said(ran))


# Where servers refuse, and repeat.

Answers = Callable[[str, Request, Response, str], Response]


def is_login(host: str, request: Request) -> bool:
    near = request.path in ("/token", "/oauth2/exchange")
    return near or host in SERVICES or host in ("169.254.169.254", "169.254.170.2", "localhost")


def as_json(text: str) -> bytes:
    entry = {"code": text, "message": text}
    oauth = {
        "error": text,
        "error_description": text,
        "message": text,
        "Message": text,
        "__type": text,
    }
    return json.dumps({"errors": [entry], "details": text, **oauth}).encode()


def as_long_text(text: str) -> bytes:
    """Write so much that it is cut, wherever its reader cuts."""
    return (f"{'.' * (len(text) % 31)} {text} " * 800).encode()[:70_000]


BODIES: dict[str, Callable[[str], bytes]] = {
    "json": as_json,
    "escaped": lambda text: as_json(text).replace(b"/", b"\\/"),
    "percent": lambda text: as_json(quote(text, safe=" ")),
    "text": str.encode,
    "long text": as_long_text,
    "xml": lambda text: f"<Error><Code>{text}</Code><Message>{text}</Message></Error>".encode(),
}


def refusing(status: int, body: str) -> Answers:
    def refuse(host: str, request: Request, answer: Response, text: str) -> Response:
        kept = [pair for pair in answer.headers if pair[0].lower() != "content-length"]
        return Response(status, [*kept, ("Warning", f'299 - "{text}"')], BODIES[body](text))

    return refuse


def odd(host: str, request: Request, answer: Response, text: str) -> Response:
    """Answer 200 with what was heard in place of everything."""
    return Response(
        200, [("Content-Type", text)], as_json(text) if len(text) % 2 else text.encode()
    )


def headed(host: str, request: Request, answer: Response, text: str) -> Response:
    """Put what was heard into each header that is read."""
    token = re.sub("[^a-zA-Z0-9]", "", text.split()[-1 if len(text) % 2 else 0])[:60] or "x"
    first = text.split()[0]
    told = {
        "Docker-Content-Digest": f"sha256:{text}",
        "Content-Type": text,
        "Location": f"https://{token}.test/{token}?{token}"
        if len(text) % 3
        else f"http://{token}:{token}@[{token}",
        "Link": f'<https://{token}.test/?{token}>; rel="next"',
        "Content-Range": text,
        "Retry-After": text,
        "X-Amzn-ErrorType": text,
        "RateLimit-Limit": text,
    }
    ways = [
        f'{token} realm="x"',
        f'Bearer realm="https://{token}.test/{token}?{token}",service="{first}",scope="{text}"',
    ]
    status = {"POST": 202, "PUT": 201}.get(request.method, (200, 401, 307, 429)[len(text) % 4])
    challenge = ways[len(text) % 2]
    return Response(status, [*told.items(), ("WWW-Authenticate", challenge)], answer.data)


def challenged(host: str, request: Request, answer: Response, text: str) -> Response:
    """Ask for a login in words that hold one, once for all that the state keeps of it."""
    secret = max(text.split(), key=len).replace('"', "")
    way = f'Bearer realm="http://{host}/token",service="{secret}",scope="{secret}"'
    return (
        Response(401, [("WWW-Authenticate", way)], b"{}") if request.kind == "manifest" else answer
    )


def raw(host: str, request: Request, answer: Response, text: str) -> Any:
    """Answer with what is no HTTP."""
    line = text.split()[0]
    heads = (
        f"HTTP/1.1 {line}",
        f"{line} 200 OK",
        f"HTTP/1.1 200 OK\r\n{line}",
        f"HTTP/1.1 200 {text}\r\nContent-Length: {line}",
    )
    return f"{heads[len(text) % 4]}\r\n\r\n".encode()


REFUSALS: dict[str, Answers] = {
    "401": refusing(401, "json"),
    "403": refusing(403, "escaped"),
    "400": refusing(400, "percent"),
    "404": refusing(404, "text"),
    "500": refusing(500, "json"),
    "403, long": refusing(403, "long text"),
    "403, xml": refusing(403, "xml"),
    "odd": odd,
    "headers": headed,
    "no HTTP": raw,
}


def is_storage(host: str, request: Request) -> bool:
    return host == STORAGE


def is_upload(host: str, request: Request) -> bool:
    return request.kind == "upload"


def is_first(host: str, request: Request) -> bool:
    return not is_login(host, request)


def only_for(where: Callable[[str, Request], bool], answers: Answers) -> Answers:
    def choose(host: str, request: Request, answer: Response, text: str) -> Response:
        return answers(host, request, answer, text) if where(host, request) else answer

    return choose


# Who repeats, to which command, with which identity at hand: storages and uploads are the same for
# all.
REPEATERS = [
    *(pytest.param(is_login, "auth", variant, id=f"login {variant}") for variant in VARIANTS),
    pytest.param(is_first, "sync", "", id="first"),
    *(
        pytest.param(each, "sync", "of the environment", id=each.__name__)
        for each in (is_storage, is_upload)
    ),
]


@pytest.mark.anyio
@pytest.mark.virtual_time
@pytest.mark.rule("R10")
@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize(("where", "command", "variant"), REPEATERS)
async def test_who_repeats_our_secrets(
    world, where, command, variant, refusal, tmp_path, clean_env
):
    scene = arranged(world, tmp_path, clean_env, variant)
    scene.config()
    scene.answers = only_for(where, REFUSALS[refusal])
    traces = Traces(scene.canaries, tmp_path, clean_env)
    ran = await scene.run(*words(scene, command))
    assert scene.repeated
    assert ran.status or where is not is_login
    assert not traces.found(said(ran))


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_a_challenge_that_repeats_a_secret_is_not_kept(world, tmp_path, clean_env):
    scene = arranged(world, tmp_path, clean_env)
    scene.config()
    scene.answers = challenged
    traces = Traces(scene.canaries, tmp_path, clean_env)
    ran = await scene.run(*words(scene, "sync"))
    assert b"registry.test" in (tmp_path / ".regsync" / "state.db").read_bytes(), (
        "challenges without are"
    )
    assert not traces.found(said(ran))


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_a_token_service_that_repeats_a_renewed_refresh_token(world, tmp_path, clean_env):
    """The first token is taken back, and whoever asks for the next one shows what came with the
    first.
    """
    scene = arranged(world, tmp_path, clean_env, "of the environment")
    scene.config()
    service, asked = scene.sites[ACR].auth, list[str]()  # type: ignore[attr-defined]

    def take_back(host: str, request: Request, answer: Response, text: str) -> Response:
        if host == ACR and request.kind == "tag_list" and len(asked) == 1:
            service.revoke()
        if host == ACR and request.path == "/token":
            asked.append(text)
        return (
            REFUSALS["403"](host, request, answer, text)
            if len(asked) > 1 and "/token" in request.path
            else answer
        )

    scene.answers = take_back
    traces = Traces(scene.canaries, tmp_path, clean_env)
    ran = await scene.run(*words(scene, "sync"))
    assert "refresh token 1 of acr" in scene.canaries.found(asked[1].encode())
    assert "AUTH_ERROR" in only(ran.failed)
    assert not traces.found(said(ran))


@pytest.mark.anyio
@pytest.mark.virtual_time
@pytest.mark.rule("R10")
@pytest.mark.parametrize("kind", ["manifest", "tag_list"])
@pytest.mark.parametrize("length", [50, 500, 1000, 2000, 60_000])
async def test_of_a_long_token_that_a_document_repeats_no_part_is_told(world, kind, length):
    """Only the beginning of such a document is, which the token may be."""
    token = "".join(f"{number:x}." for number in range(length))[:length]
    app = world.registry("source.test").app
    world.registry("target.test")
    Seed(1).image().load_into(app, "app", tag="v1")
    app.intercept = lambda request: (
        Response(200, [("Content-Type", token)], f"Bearer {token}".encode())
        if request.kind == kind
        else None
    )
    source = {"url": "http://source.test", "auth_type": "static_token", "token": token}
    app.auth = Bearer(token)
    glob = {"glob": ["*" if kind == "tag_list" else "v1"]}
    text = document(
        {"source": source, "target": "http://target.test"}, {"from": "app", "tags": glob}
    )
    ran = await world.run("sync", "-vv", "--json", "-c", "-", stdin=text)
    assert ran.status == 2
    assert token[:8] not in ran.out + ran.err
    # Of more than is searched nothing is shown, since its end may be the beginning of a secret.
    assert ("***" if length < 10_000 else "…") in ran.err
