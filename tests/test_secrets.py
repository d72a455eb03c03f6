"""No secret is in anything that a run says or leaves: every command, every failure, secrets in every
place.

The machine and the search are those of canaries.py. Servers repeat whatever they are shown, in every
part of an answer that is read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote

import anyio
import pytest

from conformance.images import Seed
from conformance.messages import Request, Response
from conformance.tokens import BasicAuth
from tests.canaries import (
    ACR,
    ECR,
    ECS,
    GAR,
    IMDS,
    SERVICES,
    SOURCES,
    STORAGE,
    USER,
    VARIANTS,
    Answers,
    Bearer,
    Scene,
    Traces,
    add,
    canary,
    find,
    writings,
)
from tests.ends import ROOT, Virtual, document, only, run_regsync, tags
from tests.program import command_names, run_process
from tests.thinning import thorough
from tests.watching import probe

COMMANDS = (
    "sync -vv --json -c FILE",
    "sync --recheck --verify -vv --log-format json -c FILE",
    "sync --dry-run -vv --json -c FILE",
    "lock -vv --recheck -c FILE",
    "lock -vv --recheck --check -c FILE",
    "sync --locked -vv --json -c FILE",
    "audit -vv --json --read -c FILE",
    "auth check -vv -c FILE",
    "auth check -vv --json -c FILE",
    "tags -vv -c FILE REGISTRY/app",
    "copy -vv -c FILE REGISTRY/app:v1 target.test/copied:v1",
    "validate -vv FILE",
    "expand -vv FILE",
    "schema -vv",
    "version -vv --json",
)
SYNC, COPY = COMMANDS[0], COMMANDS[10]


@pytest.fixture
def traces(tmp_path: Path, clean_env: Path) -> Traces:
    return Traces(tmp_path, clean_env)


@pytest.fixture
def arranged(
    world: Virtual, tmp_path: Path, clean_env: Path
) -> Callable[..., tuple[Scene, Traces]]:
    """Return a function that sets up a scene with its configuration, and what is to be searched."""

    def arrange(variant: str | None = "", **options: Any) -> tuple[Scene, Traces]:
        scene = Scene(world, tmp_path, clean_env, variant, **options)
        scene.config()
        return scene, Traces(tmp_path, clean_env)

    return arrange


# The search finds what there is.


def test_a_secret_is_found_in_each_writing_and_place_that_a_run_can_leave_it_in(traces, tmp_path):
    secret = canary("here", "/:+")
    for name, text in writings(secret):
        assert find(text[5:29]).keys() == {"here"}, name
    packed = zlib.compress(b"x" * 99 + secret.encode())
    for said in (secret, json.dumps({"said": secret}), b"\0" + secret.encode(), b"head" + packed):
        assert len(traces.found(said)) == 1
    assert not traces.found()
    (tmp_path / secret[:9]).mkdir()
    (tmp_path / "state.db").write_bytes(b"SQLite format 3\0" + packed)
    (tmp_path / "link").symlink_to(f"/nowhere/{secret[:9]}")
    assert len(traces.found()) == 3


# Where nothing fails, and each command.


@pytest.mark.parametrize("variant", ["", *VARIANTS])
async def test_where_all_goes_well_each_secret_is_used_and_none_is_seen(arranged, variant):
    scene, traces = arranged(variant, first=300 if variant else 1_100_000)
    ran = await scene.run(SYNC)
    failures = [each["error"]["message"] for each in ran.images if each["error"]]
    assert [each for each in failures if "(407)" not in each] == []
    assert scene.unused() == set()
    assert "the file state.db" in dict(traces.left()), "else its search means nothing"
    assert not traces.found(ran)


async def test_each_command_shows_no_secret(arranged):
    scene, traces = arranged()
    for command in COMMANDS[1:]:
        for host in ("written.test", "static.test") if "REGISTRY" in command else ("",):
            ran = await scene.run(command, host)
            assert not traces.found(ran), command


# Where servers refuse, and repeat.


def as_json(text: str) -> bytes:
    entry = {"code": text, "message": text}
    oauth = {"error": text, "error_description": text, "message": text, "Message": text}
    return json.dumps({"errors": [entry], "details": text, "__type": text, **oauth}).encode()


def as_long_text(text: str) -> bytes:
    """Write so much that it is cut, wherever its reader cuts."""
    return (f"{'.' * (len(text) % 31)} {text} " * 800).encode()[:70_000]


def refusing(status: int, write: Callable[[str], bytes]) -> Answers:
    def refuse(host: str, request: Request, answer: Response, text: str) -> Response:
        kept = [pair for pair in answer.headers if pair[0].lower() != "content-length"]
        return Response(status, [*kept, ("Warning", f'299 - "{text}"')], write(text))

    return refuse


def odd(host: str, request: Request, answer: Response, text: str) -> Response:
    """Answer 200 with what was heard in place of everything."""
    body = as_json(text) if len(text) % 2 else text.encode()
    return Response(200, [("Content-Type", text)], body)


def headed(host: str, request: Request, answer: Response, text: str) -> Response:
    """Put what was heard into each header that is read."""
    words = text.split()
    token = re.sub("[^a-zA-Z0-9]", "", words[-1 if len(text) % 2 else 0])[:60] or "x"
    url = f"https://{token}.test/{token}?{token}"
    names = ("Content-Type", "Content-Range", "Retry-After", "X-Amzn-ErrorType", "RateLimit-Limit")
    told = {
        **dict.fromkeys(names, text),
        "Docker-Content-Digest": f"sha256:{text}",
        "Location": url if len(text) % 3 else f"http://{token}:{token}@[{token}",
        "Link": f'<{url}>; rel="next"',
        "WWW-Authenticate": f'Bearer realm="{url}",service="{words[0]}",scope="{text}"'
        if len(text) % 2
        else f'{token} realm="x"',
    }
    status = {"POST": 202, "PUT": 201}.get(request.method, (200, 401, 307, 429)[len(text) % 4])
    return Response(status, [*told.items()], answer.data)


def raw(host: str, request: Request, answer: Response, text: str) -> bytes:
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
    "401": refusing(401, as_json),
    "403": refusing(403, lambda text: as_json(text).replace(b"/", b"\\/")),
    "400": refusing(400, lambda text: as_json(quote(text, safe=" "))),
    "404": refusing(404, str.encode),
    "500": refusing(500, as_json),
    "403, long": refusing(403, as_long_text),
    "403, xml": refusing(403, lambda text: f"<Error><Code>{text}</Code></Error>".encode()),
    "odd": odd,
    "headers": headed,
    "no HTTP": raw,
}


def is_login(host: str, request: Request) -> bool:
    is_near = request.path in ("/token", "/oauth2/exchange")
    return is_near or host in (*SERVICES, IMDS, ECS, "localhost")


REPEATERS: dict[str, Callable[[str, Request], bool]] = {
    "a login": is_login,
    "the first": lambda host, request: not is_login(host, request),
    "a storage": lambda host, request: host == STORAGE,
    "an upload": lambda host, request: request.kind == "upload",
}
# Who repeats, with which identity at hand: storages and uploads are the same for all. Of the logins
# an ordinary run has every second one of each kind of answer.
REPEATED = [
    *(
        param if (number + kind) % 2 else thorough(param)
        for number, variant in enumerate(VARIANTS)
        for kind, refusal in enumerate(REFUSALS)
        for param in [pytest.param("a login", variant, refusal)]
    ),
    *(("the first", "", refusal) for refusal in REFUSALS),
    *((who, "of the environment", each) for who in ("a storage", "an upload") for each in REFUSALS),
]


@pytest.mark.parametrize(("who", "variant", "refusal"), REPEATED)
async def test_what_servers_repeat_of_our_secrets_is_not_told(arranged, who, variant, refusal):
    scene, traces = arranged(variant)
    is_repeater, answers = REPEATERS[who], REFUSALS[refusal]

    def repeat(host: str, request: Request, answer: Response, text: str) -> Any:
        return answers(host, request, answer, text) if is_repeater(host, request) else answer

    scene.answers = repeat
    ran = await scene.run("auth check -vv -c FILE" if who == "a login" else SYNC)
    assert scene.repeated
    assert ran.status or who != "a login"
    assert not traces.found(ran)


async def test_a_challenge_that_repeats_a_secret_is_not_kept(arranged, tmp_path):
    scene, traces = arranged()

    def challenge(host: str, request: Request, answer: Response, text: str) -> Response:
        """Ask for a login in words that hold one, once for all that the state keeps of it."""
        secret = max(text.split(), key=len).replace('"', "")
        way = f'Bearer realm="http://{host}/token",service="{secret}",scope="{secret}"'
        refusal = Response(401, [("WWW-Authenticate", way)], b"{}")
        return refusal if request.kind == "manifest" else answer

    scene.answers = challenge
    ran = await scene.run(SYNC)
    kept = (tmp_path / ".regsync" / "state.db").read_bytes()
    assert b"registry.test" in kept, "challenges without a secret are"
    assert not traces.found(ran)


async def test_a_renewed_refresh_token_that_a_token_service_repeats_is_not_told(arranged):
    """The first token is taken back, and whoever asks for the next one shows what came with it."""
    scene, traces = arranged("of the environment")
    service: Any = scene.sites[ACR]
    asked = list[str]()

    def take_back(host: str, request: Request, answer: Response, text: str) -> Any:
        if host == ACR and request.kind == "tag_list" and len(asked) == 1:
            service.auth.revoke()
        if host == ACR and request.path == "/token":
            asked.append(text)
        is_refused = len(asked) > 1 and "/token" in request.path
        return REFUSALS["403"](host, request, answer, text) if is_refused else answer

    scene.answers = take_back
    ran = await scene.run(SYNC)
    assert "refresh token 1 of acr" in find(asked[1])
    assert "AUTH_ERROR" in only(ran.failed)
    assert not traces.found(ran)


async def test_a_redirect_that_repeats_names_hides_none_of_them(world):
    """As Quay's storage has the names of the repository in each of its URLs, and a region."""
    source, target = (world.registry(f"{name}.eu-central-1.test") for name in ("source", "target"))
    name = "argoproj/argo-events-controller"
    Seed(1).image().load_into(source.app, name, tag="v1")
    query = (
        "namespace=argoproj&repo_name=argo-events-controller&region=eu-central-1&sig=" + "e" * 64
    )

    def lead(request: Request) -> Response | None:
        if request.kind != "blob" or "?" in request.target:
            return None
        return Response(307, [("Location", f"{request.path}?{query}&of={request.reference}")])

    source.app.intercept = lead
    ran = await world.sync({"source": source, "target": target}, {"from": name, "tags": tags("v1")})
    assert ran.status == 0
    assert source.journal.count("GET", "blob") == 6
    assert only(ran.images)["source"] == f"{source.address}/{name}:v1"
    assert "***" not in ran.out


@pytest.mark.parametrize("kind", ["manifest", "tag_list"])
@pytest.mark.parametrize("length", [50, 2000, 60_000])
async def test_of_a_long_token_that_a_document_repeats_no_part_is_told(world, kind, length):
    """Only the beginning of such a document is, which the token may be."""
    token = "".join(f"{number:x}." for number in range(length))[:length]
    app = world.registry("source.test", auth=Bearer(token)).app
    world.registry("target.test")
    Seed(1).image().load_into(app, "app", tag="v1")
    answer = Response(200, [("Content-Type", token)], f"Bearer {token}".encode())
    app.intercept = lambda request: answer if request.kind == kind else None
    source = {"url": "http://source.test", "auth_type": "static_token", "token": token}
    mapping = {"from": "app", "tags": tags("*" if kind == "tag_list" else "v1")}
    text = document({"source": source, "target": "http://target.test"}, mapping)
    ran = await world.run("sync", "-vv", "--json", "-c", "-", stdin=text)
    assert ran.status == 2
    assert token[:8] not in ran.out + ran.err
    # Of more than is searched nothing is shown, since its end may be the beginning of a secret.
    assert ("***" if length < 10_000 else "…") in ran.err


# Where anything else fails.


@contextlib.contextmanager
def crashed(scene: Scene) -> Iterator[None]:
    """Let the standard library fail where the program reads a manifest or a listing."""
    loads = json.loads

    def crash(text: Any, **named: Any) -> Any:
        who = sys._getframe(1).f_globals["__name__"].partition(".")[0]
        is_read = any(name in str(text) for name in ('"schemaVersion"', '"tags"'))
        if is_read and who not in ("conformance", "tests"):
            raise RuntimeError("a defect in the middle")
        return loads(text, **named)

    with mock.patch.object(json, "loads", crash):
        yield


@contextlib.contextmanager
def interrupted(scene: Scene) -> Iterator[None]:
    """Have a signal at the 60th request."""

    def stop(host: str, request: Request, answer: Response, text: str) -> Response:
        if scene.asked == 60:
            signal.raise_signal(signal.SIGTERM)
        return answer

    scene.answers = stop
    yield


@contextlib.contextmanager
def full(scene: Scene) -> Iterator[None]:
    """Let nothing be written below cache_dir."""
    opened = os.open

    def refuse(path: Any, *given: Any, **named: Any) -> int:
        if ".regsync" in str(path) and given and given[0] & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return opened(path, *given, **named)

    with mock.patch.object(os, "open", refuse):
        yield


@contextlib.contextmanager
def locked(scene: Scene) -> Iterator[None]:
    directory = scene.file.parent / ".regsync"
    directory.mkdir()
    with open(directory / "state.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def unreachable(scene: Scene) -> Iterator[None]:
    """Refuse connections to some, know no name of others."""
    places = scene.world.network._places
    for number, (host, port) in enumerate(sorted(places)):
        if host not in ("target.test", "written.test"):
            place = places.pop((host, port))
            if number % 2:
                places[host, port + 1] = place
    yield


@contextlib.contextmanager
def storage_redirects(scene: Scene) -> Iterator[None]:
    """Redirect from storage to storage, each URL signed with what was heard."""
    scene.answers = lambda host, request, answer, text: (
        Response(307, [("Location", f"{request.target}&x")]) if host == STORAGE else answer
    )
    yield


FAILURES = (crashed, interrupted, full, locked, unreachable, storage_redirects)


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_failure_within_shows_no_secret(arranged, failure):
    """The commands one after the other, on what the one before has left."""
    scene, _ = arranged("of the environment", first=1_100_000 if failure is full else 300)
    secret = canary("login")
    login = {"username": USER, "password": secret}
    scene.registry("written", BasicAuth({USER: secret}), auth_type="basic", credentials=login)
    scene.config()
    traces = Traces(scene.file.parent, scene.home)
    online = [each for each in COMMANDS[:11] if "lock" not in each or "check" not in each]
    with failure(scene):
        for command in online if failure in (crashed, unreachable) else (SYNC, COPY):
            if "--locked" in command:
                continue
            scene.asked = 0
            ran = await scene.run(command)
            is_told = "auth check" in command or "a defect in the middle" in ran.err
            assert failure is not crashed or is_told
            assert not traces.found(ran), command


async def test_a_watch_its_reloads_and_its_probes_show_no_secret(arranged):
    """A cycle, a new password, a file that is broken around one, a registry that repeats it, the
    end.
    """
    scene, _ = arranged("of the environment")
    secret, bodies = canary("another password"), list[str]()

    def write() -> None:
        login = {"auth_type": "basic", "credentials": {"username": USER, "password": secret}}
        scene.registries["another"] = {"url": "http://elsewhere.test", **login}
        scene.config()

    def break_password() -> None:
        text = scene.file.read_text()
        scene.file.write_text(text.replace(f'"{secret}"', f"*{secret.replace('/', '')}"))

    def break_url() -> None:
        scene.file.write_text(
            f"registries: {{a: {{url: 'https://me:{secret}@a.test'}}}}\nmappings: []\n"
        )

    def repeat() -> None:
        scene.answers = lambda host, request, answer, text: (
            Response(403, [], as_json(text)) if host == "target.test" else answer
        )

    async def play() -> None:
        await anyio.sleep(15)  # between two cycles
        for step in (write, break_password, break_url, write, repeat):
            await anyio.sleep(30)
            bodies.extend(json.dumps(probe(path)) for path in ("/healthz", "/readyz"))
            step()
        await anyio.sleep(45)
        signal.raise_signal(signal.SIGTERM)

    traces = Traces(scene.file.parent, scene.home)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(play)
        ran = await scene.run("watch -c FILE --interval 30 --health-port 0 -vv --json")
        tasks.cancel_scope.cancel()
    assert "reload_failed" in ran.err or "in force" in ran.err
    told = "\n".join(bodies)
    assert "a user or password cannot stand here" in told, "why a file was not taken"
    assert "***" in ran.err, "what the registry repeated"
    scene.file.unlink()
    assert not [*traces.found(ran), *traces.found(told)]


# Where a secret does not belong: in broken files, variables with a login, arguments.

SECRET = "hQ2k7dmw3x/9Qv5tn8cjz:7Qf4bs6yuk+2Qr9gh3epw"
PLAIN = "hQ2k7dmw3x9Qv5tn8cjz7Qf4bs6yuk2Qr9gh3epw"
URL = f"https://mirror:{SECRET}@registry.test"
add("the secret", SECRET)
add("the secret in one word", PLAIN)


def hidden(value: object) -> str:
    """Name a row without its secret."""
    return str(value).replace(SECRET, "*").replace(PLAIN, "*")[:60]


# Values of a password, of a field of a registry, and whole files.
PASSWORDS = (
    *(f"['{SECRET}']", f"{{'{PLAIN}': 1}}", f"{{password: '{SECRET}'}}", f"*{PLAIN}"),
    *(f"!{PLAIN}", f"!!{PLAIN} x", f"!<{PLAIN}> x", f"&{PLAIN}", f"%{PLAIN}", f"@{PLAIN}"),
    *(f"|{PLAIN}", f"'{SECRET}", f'"{PLAIN}\\q"', f"{PLAIN}: {PLAIN}", f"'${{{PLAIN}'"),
    *(f"'${{A B:-{SECRET}}}'", f"'{SECRET}${{NOT_SET}}'", f'"{PLAIN}\\x07"', f"'{PLAIN}\x07'"),
    f"'{SECRET * 3000}",
)
FIELDS = (
    f"credentials: {{username: me, password: '{SECRET}', password: '{SECRET}'}}",
    f"auth_type: basic, credentials: 'me:{SECRET}'",
    f"credentials: {{username: 'me:{SECRET}', password: x}}",
    f"auth_type: basic, credentials: {{'me:{SECRET}'}}",
    f"auth_type: basic, credentials: {{username: me, pasword: '{SECRET}'}}",
    f"auth_type: static_token, token: 'Bearer {SECRET}'",
    f"token: '{SECRET}'",
    f"auth_type: '{SECRET}'",
    f"max_concurrent: '{SECRET}'",
    f"proxy: 'socks5://me:{SECRET}@proxy.test'",
    f"proxy: 'http://me:{SECRET}@proxy.test:99999'",
    f"proxy: 'http://{SECRET.partition(':')[0]}@proxy.test'",
)
FILES = (
    f"registries:\n  one:\n    credentials:\n      password:\n {SECRET}\n",
    f"registries:\n  one:\n    credentials:\n\tpassword: {SECRET}\n",
    f"registries: {{one: {{url: '{URL}'}}}}\nmappings: []\n",
    f"registries: {{one: {{url: 'https://{SECRET}@'}}}}\nmappings: []\n",
    f"registries: {{one: {{url: 'https://registry.test/?sig={PLAIN}'}}}}\nmappings: []\n",
    f"registries: {{one: {{url: a.test}}}}\nmappings: [{{from: app, source: '{URL}'}}]\n",
    f"registries: {{one: {{url: a.test}}}}\nmappings: [{{from: app, targets: ['{URL}']}}]\n",
    f"registries: {{one: {{url: a.test}}}}\nmappings: [{{from: '{URL}', to: '{URL}'}}]\n",
    f"{URL}\n",
    f"a: {URL}\n---\nb: {URL}\n",
    f"a: {SECRET}\udcff{SECRET}\n",
)
FIELDS += tuple(
    f"auth_type: basic, credentials: {{username: me, password: {each}}}" for each in PASSWORDS
)
FILES += tuple(f"registries: {{one: {{url: a.test, {each}}}}}\nmappings: []\n" for each in FIELDS)


@pytest.mark.parametrize("text", FILES, ids=hidden)
def test_a_broken_configuration_is_told_without_its_secret(tmp_path, clean_env, text):
    file = tmp_path / "mirror.yaml"
    file.write_bytes(os.fsencode(text))
    traces = Traces(tmp_path, clean_env)
    readers = ("expand -vv FILE", "sync -vv --json --log-format json -c FILE")
    for reader in readers:
        ran = run_regsync(*reader.replace("FILE", str(file)).split())
        assert ran.status == 3, ran.err
        assert not traces.found(ran)


GOOGLE = {
    "type": "authorized_user",
    "client_id": "c",
    "client_secret": SECRET,
    "refresh_token": "x",
}
ACCOUNT = {"type": "service_account", "private_key": SECRET, "private_key_id": "1"}
EXTERNAL = {"type": "external_account", "credential_source": {"url": f"ftp://{SECRET}@x"}}
CREDENTIALS = [
    *(
        ("docker/config.json", text)
        for text in (
            f'{{"auths": {{"plain.test": {{"auth": "{SECRET}',
            f'["{SECRET}"]',
            f'{{"auths": {{"plain.test": "{SECRET}"}}}}',
            f'{{"auths": {{"plain.test": {{"auth": "{SECRET}"}}}}}}',
            f'{{"auths": {{"plain.test": {{"auth": "{PLAIN}"}}}}}}',
            f'{{"auths": {{"plain.test": {{"password": ["{SECRET}"]}}}}}}',
        )
    ),
    (".aws/credentials", f"aws_secret_access_key = {SECRET}\n"),
    (".aws/credentials", f"[default]\n{SECRET}\n"),
    (".aws/credentials", f"[default]\naws_access_key_id =\naws_secret_access_key = {SECRET}\n"),
    (".aws/credentials", f"[default]\n{f'aws_secret_access_key = {SECRET}{chr(10)}' * 2}"),
    (".aws/credentials", f"[default]\naws_access_key_id = ä\naws_secret_access_key = {SECRET}\n"),
    ("google.json", f'{{"type": "authorized_user", "refresh_token": "{SECRET}'),
    ("google.json", json.dumps({**GOOGLE, "type": 7})),
    ("google.json", json.dumps({**GOOGLE, "token_uri": f"https://me:{SECRET}@evil.test/"})),
    ("google.json", json.dumps({**ACCOUNT, "client_email": "x"})),
    ("google.json", json.dumps(EXTERNAL)),
]


def add_everyone(scene: Scene) -> None:
    """Have registries of all clouds, and one that is open to a login; no service of theirs answers."""
    for kind, host in (("ecr", ECR), ("acr", ACR), ("gar", GAR), ("docker_config", "plain.test")):
        scene.registry(kind, Bearer("never given"), host, auth_type=kind)
    scene.registries["target"] = {"url": "https://target.test"}
    scene.config()


@pytest.mark.parametrize(("name", "text"), CREDENTIALS, ids=hidden)
async def test_a_broken_file_of_credentials_is_told_without_its_secret(arranged, name, text):
    scene, _ = arranged(None)
    file = scene.write(name, text)
    scene.env = {"DOCKER_CONFIG": str(scene.home / "docker")}
    scene.env["GOOGLE_APPLICATION_CREDENTIALS"] = str(scene.home / "google.json")
    add_everyone(scene)
    traces = Traces(scene.file.parent, scene.home)
    ran = await scene.run(SYNC)
    assert ran.status
    assert file.name in ran.err
    assert not traces.found(ran)


VARIABLES = [
    *(
        ("HTTPS_PROXY", value)
        for value in (
            f"http://me:{SECRET}@proxy.test:1",
            f"me:{PLAIN}@proxy.test:1",
            f"http://{PLAIN}/{PLAIN}@proxy.test:1",
            f"http://me:{PLAIN}#@proxy.test:1",
        )
    ),
    ("HTTP_PROXY", f"socks5://me:{SECRET}@proxy.test:1"),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"https://me:{PLAIN}@credentials.test/x"),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://me:{PLAIN}@credentials.test/x?{PLAIN}"),
    ("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://me:{PLAIN}@metadata.test"),
    ("AZURE_AUTHORITY_HOST", f"https://me:{PLAIN}@login.test"),
    ("GCE_METADATA_HOST", f"me:{PLAIN}@metadata.test"),
    ("SSL_CERT_FILE", f"https://me:{PLAIN}@registry.test/ca.pem"),
    ("DOCKER_AUTH_CONFIG", f'{{"auths": {{"plain.test": {{"auth": "{SECRET}'),
]


@pytest.mark.parametrize(("name", "value"), VARIABLES, ids=hidden)
async def test_a_variable_with_a_login_is_told_without_it(arranged, name, value):
    scene, traces = arranged(None)
    scene.env = {name: value}
    if name.startswith("AZURE"):
        scene.env |= {"AZURE_CLIENT_ID": "c", "AZURE_TENANT_ID": "t", "AZURE_CLIENT_SECRET": SECRET}
    add_everyone(scene)
    ran = await scene.run(SYNC)
    assert ran.status
    assert not traces.found(ran)


ME = f"mirror:{PLAIN}@registry.test"
TYPED = (
    *(URL, ME, f"cpoy {URL}/app b.test/app", f"copy {URL}/app:v1 b.test/app"),
    *(f"copy a.test/app:v1 {ME}/app", f"copy a.test/app b.test/app {URL}/app"),
    *(f"copy a.test/a b.test/a --password={PLAIN}", f"copy a.test/a b.test/a --platform {ME}"),
    *(f"tags {URL}/app", f"tags {ME}/app", f"tags a.test/app --semver {URL}"),
    *(f"tags a.test/app --glob {URL}[", f"tags a.test/app --sort {URL}"),
    *(f"tags a.test/app --latest {URL}", f"sync {URL}", f"sync -c {URL}", f"sync -c - {URL}"),
    *(f"sync -c /dev/null --shard mirror:{PLAIN}@x", f"audit --log-format {URL} -c x"),
    *(f"watch -c /dev/null --interval {URL}", f"watch -c /dev/null --health-bind {URL}"),
    *(f"auth {URL}", f"auth check {URL}", f"validate {URL}"),
    f"version --user={ME}",
)


@pytest.mark.parametrize("line", TYPED, ids=hidden)
def test_a_login_among_the_arguments_is_not_repeated(line):
    for more in ((), ("--json", "--log-format", "json")):
        ran = run_regsync(*line.split(), *more, "-vv")
        assert ran.status in (3, 2, 4)
        assert not find(ran.out + ran.err)


def test_what_is_not_known_is_named_without_what_follows():
    ran = run_regsync("copy", "a.test/app", "b.test/app", "--user", "me", f"--password={PLAIN}")
    line = "error: CONFIG_ERROR: unrecognized arguments: --user *** --password\n"
    assert ran.err.startswith(line)
    assert "a command, not 'cpoy'\nhint: " in run_regsync("cpoy").err
    assert "a command, not '***'" in run_regsync(PLAIN).err


# What is printed of objects.


def ours() -> Iterator[object]:
    """Give every living object of a class of the program's."""
    for each in gc.get_objects():
        if str(type(each).__module__).startswith("_regsync"):
            yield each


async def test_no_object_shows_a_secret(arranged):
    """At some requests of a run, whatever is alive in it is printed."""
    scene, _ = arranged("of containers")
    earlier = [
        *ours()
    ]  # of other tests: kept, so that no new object has the identity of one of these
    known = set(map(id, earlier))
    classes, shown = Counter[str](), set[str]()

    def look(host: str, request: Request, answer: Response, text: str) -> Response:
        if scene.asked in (5, 12, 20, 30, 120):
            for each in (each for each in ours() if id(each) not in known):
                classes[name := type(each).__qualname__] += 1
                if classes[name] < 40 and find(repr(each)[:20_000]):
                    shown.add(name)
        return answer

    scene.answers = look
    await scene.run("sync -q -c FILE")
    assert len(classes) > 50
    assert shown <= {"Call", "Headers", "_Hop"}, "which hold what servers sign, for a moment"


# Real processes.


@pytest.fixture
def login(monkeypatch: pytest.MonkeyPatch) -> BasicAuth:
    monkeypatch.setenv("CONFIG_PASSWORD", password := canary("CONFIG_PASSWORD", "/:"))
    return BasicAuth({USER: password})


def mirror(path: Path, source: str, target: str, **more: Any) -> str:
    credentials = {"username": USER, "password": "${CONFIG_PASSWORD}"}
    login = {"auth_type": "basic", "credentials": credentials}
    registries = {"source": {"url": source, **login, **more}, "target": {"url": target, **login}}
    file = path / "mirror.yaml"
    file.write_text(document(registries, {"from": "app", "tags": tags("*")}))
    return str(file)


# What a process does when it begins its first upload, and its status then; it also writes down how
# it is called by then.
MIDDLES = {
    "crash": ("os.abort()", -signal.SIGABRT),
    "SIGTERM": ("os.kill(os.getpid(), 15); os.kill(os.getpid(), 15)", 143),
    "Ctrl-C": ("raise KeyboardInterrupt", 130),
    "defect": ("raise ValueError('a defect in the middle')", 2),
    "lost output": ("", 2),
    "closed output": ("", 0),
}
MIDDLE = """
import os, runpy, socket, sys
send = socket.socket.send
def stop(self, data, *flags):
    if bytes(data[:5]) == b'POST ':
        with open('/proc/self/cmdline', 'rb') as title, open(os.environ['TMPDIR'] + '/title', 'wb') as file:
            file.write(title.read())
        {}
    return send(self, data, *flags)
socket.socket.send = stop
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


@pytest.mark.process
@pytest.mark.parametrize("how", MIDDLES)
def test_a_process_shows_no_secret(how, serve, tmp_path, clean_env, login, monkeypatch):
    """With warnings about what is left open, a fault handler, no reader, an end in the middle."""
    action, status = MIDDLES[how]
    source, target = serve(auth=login), serve(auth=login)
    Seed(1).image(sizes=(900,)).load_into(source.app, "app", tag="v1")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    file = mirror(tmp_path, source.url, target.url)
    traces = Traces(tmp_path, clean_env)
    command = [sys.executable, "-X", "dev", "-c", MIDDLE.format(action), str(ROOT / "regsync.py")]
    with open("/dev/full", "w") as full_device:
        process = subprocess.Popen(
            [*command, "sync", "-vv", "--json", "-c", file],
            stdout=full_device if how == "lost output" else subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=(lambda: os.close(1)) if how == "closed output" else None,
            text=True,
            cwd=ROOT,
        )
        out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert (how == "crash") == ("Fatal Python error: Aborted" in err)
    assert (tmp_path / "tmp" / "title").exists()
    assert how != "defect" or ("Traceback" in err and "a defect in the middle" in err)
    assert not [*traces.found(out or ""), *find(err)]


@pytest.mark.process
@pytest.mark.in_process
def test_a_client_key_is_in_nothing_that_is_said(serve, tmp_path, clean_env, login, ca):
    """A server that asks for a certificate, one that nobody trusts, keys broken in all ways."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    context.verify_mode = ssl.CERT_REQUIRED
    ca.configure_trust(context)
    source, target = serve(ssl_context=context, auth=login), serve()
    Seed(1).image(sizes=(900,)).load_into(source.app, "app", tag="v1")
    issued = ca.issue_cert("client.test")
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    certificate, key = tmp_path / "client.pem", tmp_path / "client.key"
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    pem = issued.private_key_pem.bytes().decode()
    for number, line in enumerate(pem.splitlines()[1:-1]):
        if len(line) > 20:
            add(f"client_key, line {number}", line)
    encrypted = "-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00\n\n"
    keys = {
        "good": pem,
        "no PEM": pem.replace("-----", "----"),
        "half": pem[: len(pem) // 2],
        "encrypted": pem.replace("-----\n", encrypted, 1),
        "another's": ca.issue_cert("other.test").private_key_pem.bytes().decode(),
    }
    for name, text in keys.items():
        key.write_text(text)
        for trust in ({"ca_file": str(tmp_path / "ca.pem")}, {}):
            fields = {"client_cert": str(certificate), "client_key": str(key), **trust}
            file = mirror(tmp_path, source.url, target.url, **fields)
            traces = Traces(tmp_path, clean_env)
            ran = run_regsync("sync", "-vv", "--json", "-c", file)
            assert (ran.status == 0) == (name == "good" and bool(trust)), ran.err
            assert not traces.found(ran), name


# A new command, key or variable has to have its canary. What a key of the configuration is, or that
# it has none.

KEYS = {"token", "password", "proxy", "client_key", "credentials"}
# Words of names of secrets.
_SECRET = re.compile(
    r"token|secret|passw|credential|\bkey|_key|session|auth|proxy|identity_header", re.IGNORECASE
)
# Of the program's text: a code of errors, a status of an upload's session, examples, hosts.
OTHERS = {
    *("AUTH_ERROR", "SESSION_GONE", "MIRROR_PASSWORD"),
    *("HTTP_PROXY", "AZURE_AUTHORITY_HOST"),
}
# An option in a command's help that takes no value: its meaning follows, or is on the next line.
_WITHOUT_VALUE = re.compile(r"^  (?:-[a-z], )?(--?[a-z-]+)(?:  .*)?$", re.MULTILINE)


def test_each_command_and_each_option_that_changes_what_is_printed_has_canaries():
    """`watch` has a test of its own, `report` reads no configuration; help and the usual options
    are in each command's runs.
    """
    names = {*command_names()}
    assert {command.split()[0] for command in COMMANDS} | {"watch", "report"} == names
    helped = (run_process(name, "--help").out for name in names)
    options = {option for text in helped for option in _WITHOUT_VALUE.findall(text)}
    options -= {"--help", "-q", "-v", "--no-progress", *" ".join(COMMANDS).split()}
    assert options == {"--no-artifacts"}


def test_each_secret_key_of_the_configuration_has_its_canary():
    keys = {*names_of(run_regsync("schema").report)}
    assert {name for name in keys if _SECRET.search(name)} - {"auth_type"} == KEYS


def names_of(schema: Any) -> Iterator[str]:
    """Give the names of all properties in a schema."""
    if isinstance(schema, dict):
        yield from (properties := schema.get("properties", {}))
        for each in (*schema.values(), *properties.values()):
            yield from names_of(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from names_of(each)


async def test_each_variable_with_a_secret_has_its_canary(arranged):
    text = "".join(path.read_text() for path in (ROOT / "_regsync").rglob("*.py"))
    every = set(re.findall(r"\b[A-Z][A-Z0-9]+(?:_[A-Z0-9]+)+\b", text))
    scene, _ = arranged()
    placed = {name[1:] for source in SOURCES.values() for name in source} | scene.env.keys()
    names = {name for name in every if _SECRET.search(name)}
    # aws.py names some without their beginning, in lower case.
    assert {name for name in names if not any(name in each for each in placed)} == OTHERS
