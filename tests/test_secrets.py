"""Canaries: what was shown to a server as a secret is in nothing that a run leaves or says, though
servers repeat it.

Each way to log in, with servers that put every secret they have seen into every error and into a
`Warning`, and one that refuses what it cannot be talked out of. What a secret is, the servers'
journals say (conformance/journal.py).
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from _regsync.auth.cloud import Login
from _regsync.auth.credentials import Credential
from _regsync.errors import SyncError
from _regsync.registry import transport
from conformance.content.images import Seed
from conformance.journal import credentials
from conformance.messages import Access, Answer, Request, Response, error
from conformance.registry.app import App
from conformance.registry.tokens import BasicAuth, TokenService
from conformance.server.exchange import Reception
from tests.ends import Ran, Virtual, document, virtual
from tests.test_clouds import ACR, ECR, Cloud

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

USER, PASSWORD, TOKEN = "canary-user", "canary-password:1", "canary-bearer.token"
IDENTITY = "canary-identity"
PAIR = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


class Rotating(TokenService):
    """A token service that gives a new refresh token with each token."""

    def issue(self, *given: Any, offline: bool) -> Response:
        answer = super().issue(*given, offline=False)
        if answer.status != 200:
            return answer
        renewed = f"refreshed-{len(self.refresh_tokens)}-{USER}"
        self.refresh_tokens[renewed] = USER
        document = {**answer.json(), "refresh_token": renewed}
        return Response(200, answer.headers, json.dumps(document).encode())

    def revoke(self) -> None:
        super().revoke()
        self.refresh_tokens = {
            token: user for token, user in self.refresh_tokens.items() if token == user
        }


class Static:
    """A registry that knows one bearer token."""

    def answer(self, request: Request) -> Answer | Reception | None:
        return None

    def check(self, request: Request, needs: object) -> Response | None:
        if request.header("authorization") == f"Bearer {TOKEN}":
            return None
        return Response(
            401, [("WWW-Authenticate", 'Bearer realm="https://elsewhere.test/token"')], b"{}"
        )


@dataclass
class Scene:
    """How one registry wants a login, and where ours comes from; `given` has what we know before a
    run.
    """

    auth: Any
    given: tuple[str, ...]
    host: str = "source.test"
    registry: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    login: Login | None = None


def tokens(**options: Any) -> TokenService:
    return TokenService({USER: PASSWORD}, anonymous=False, now=anyio.current_time, **options)


def in_file(entry: Mapping[str, str], host: str = "source.test") -> dict[str, str]:
    return {"DOCKER_AUTH_CONFIG": json.dumps({"auths": {host: entry}})}


BASIC = {"auth_type": "basic", "credentials": {"username": USER, "password": PASSWORD}}
SCENES = {
    "basic": lambda: Scene(BasicAuth({USER: PASSWORD}), (PASSWORD, PAIR), registry=BASIC),
    "basic-for-a-token": lambda: Scene(tokens(), (PASSWORD, PAIR), registry=BASIC),
    "static": lambda: Scene(
        Static(), (TOKEN,), registry={"auth_type": "static_token", "token": TOKEN}
    ),
    "file": lambda: Scene(tokens(), (PASSWORD, PAIR), env=in_file({"auth": PAIR})),
    "file-registrytoken": lambda: Scene(Static(), (TOKEN,), env=in_file({"registrytoken": TOKEN})),
    "file-identitytoken": lambda: Scene(
        Rotating(refresh_tokens=[IDENTITY], anonymous=False, now=anyio.current_time),
        (IDENTITY,),
        env=in_file({"identitytoken": IDENTITY}),
    ),
    "github": lambda: Scene(
        tokens(), (PASSWORD,), host="ghcr.io", env={"GITHUB_TOKEN": PASSWORD, "GITHUB_ACTOR": USER}
    ),
    "ecr": lambda: Scene(
        BasicAuth({USER: PASSWORD}),
        (PASSWORD, PAIR),
        host=ECR,
        login=Login(Credential(USER, PASSWORD, origin="a cloud"), math.inf),
    ),
    "acr": lambda: Scene(
        Rotating(refresh_tokens=[IDENTITY], anonymous=False, now=anyio.current_time),
        (IDENTITY,),
        host=ACR,
        login=Login(Credential("0000", identity_token=IDENTITY, origin="a cloud"), math.inf),
    ),
}


def tell_all(site: App, since: list[int]) -> None:
    """Let a server repeat all that it was shown in this run (behind the last of `since`), wherever
    there are words.
    """

    def repeat(request: Request, answer: Answer) -> Answer:
        if not isinstance(answer, Response):
            return answer
        shown = [
            secret for entry in site.journal.entries[since[-1] :] for secret in entry.sent_secrets()
        ]
        seen = [*shown, *_issued(site), request.header("authorization")]
        said = " and ".join(f"you sent {secret}" for secret in dict.fromkeys(seen) if secret)
        headers = [*answer.headers, ("Warning", f'299 - "{said}"'.replace("\n", ""))]
        if answer.status < 400:
            return Response(answer.status, headers, answer.body)
        headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
        entry = {"code": "DENIED", "message": said}
        return Response(
            answer.status, headers, json.dumps({"errors": [entry], "details": said}).encode()
        )

    site.amend = repeat


def _issued(site: App) -> list[str]:
    auth = getattr(site, "auth", None)
    return [*auth._tokens, *auth.refresh_tokens] if isinstance(auth, TokenService) else []


def left_behind(directory: Path) -> Iterator[bytes]:
    """Give all bytes of a directory, compressed ones as what they are too; names count."""
    for path in directory.rglob("*"):
        yield str(path).encode()
        if path.is_file() and path.name != "mirror.yaml":
            body = path.read_bytes()
            yield body
            for start in range(len(body)):
                if body[start : start + 1] == b"x":
                    try:
                        yield zlib.decompressobj().decompress(body[start:])
                    except zlib.error:
                        continue


async def runs(
    world: Virtual, scene: Scene, app: App, since: list[int], file: Path
) -> tuple[list[Ran], set[str]]:
    """Run what talks to registries; return also what this one saw, which it forgets between two
    runs.
    """
    found, seen = [], {*scene.given}
    for words in (
        ("auth", "check", "-vv", "--json"),
        ("auth", "check", "-vv"),
        ("sync", "--dry-run", "-vv", "--json"),
        ("sync", "-vv", "--json"),
        ("sync", "-vv", "--log-format", "json"),
        ("analyze", "-vv", "--json"),
        ("tags", f"{scene.host}/app", "-vv", "--json"),
    ):
        try:
            found.append(await world.run(*words, "-c", str(file), env=scene.env))
        except SyncError as error:  # as the command line would tell it
            found.append(
                Ran(error.exit_status, "", f"error: {error.code}: {error}\nhint: {error.hint}")
            )
        seen |= {*credentials(app.journal), *_issued(app)}
        since.append(len(app.journal.entries))
        if isinstance(scene.auth, TokenService):
            scene.auth.revoke()
    return found, seen


@pytest.mark.rule("R10", "R19")
@pytest.mark.parametrize("refuses", [None, 403, 401])
@pytest.mark.parametrize("name", SCENES)
async def test_no_secret_is_in_what_a_run_leaves_or_says(
    name: str, refuses: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, file = SCENES[name](), tmp_path / "mirror.yaml"
    cloud = Cloud(*[scene.login] * 20)
    monkeypatch.setattr(transport, "_cloud", lambda _: cloud)
    scheme = "http" if scene.host == "source.test" else "https"
    async with virtual() as world:
        app = App(auth=scene.auth)
        world.listen(app, scene.host, scheme=scheme)
        other = world.registry("other.test")
        for site, repository in ((app, "app"), (other.app, "from")):
            assert isinstance(site, App)
            Seed(1).image().load_into(site, repository, tag="v1")
        Seed(2).image().load_into(app, "from", tag="old")  # ECR makes none
        if refuses:
            scene.auth.check = refusing(scene.auth.check, refuses)
        tell_all(app, since := [0])
        file.write_text(
            document(
                {
                    "source": {"url": f"{scheme}://{scene.host}", **scene.registry},
                    "other": "http://other.test",
                },
                {"from": "app", "targets": ["other"]},
                {
                    "source": "other",
                    "from": "from",
                    "tags": {"glob": ["v1"]},
                    "targets": ["source"],
                },
            )
        )
        ran, secrets = await runs(world, scene, app, since, file)
        assert (
            {each.status for each in ran} == {0}
            if refuses is None
            else all(each.status for each in ran[:2])
        )
        said = "".join(each.out + each.err for each in ran).encode()
        assert refuses is None or b"you sent ***" in said or b"refused the credentials" in said
        everything = [said, *left_behind(tmp_path)]
        assert refuses or len(everything) > 3, "there is a state"
        for secret in secrets:
            assert not [part for part in everything if secret.encode() in part], secret


@pytest.mark.rule("R10")
async def test_a_refresh_token_that_was_renewed_since_is_no_less_a_secret() -> None:
    """Each answer of the token service brings a new one; an error repeats all that there were."""
    repositories = ("one", "two", "three")
    async with virtual() as world:
        service = Rotating(
            refresh_tokens=[IDENTITY], anonymous=False, one_scope=True, now=anyio.current_time
        )
        app = App(auth=service)
        world.listen(app, ACR, scheme="https")
        world.registry("target.test")
        for number, name in enumerate(repositories):
            Seed(number).image().load_into(app, name, tag="v1")
        # By now each repository has got its token.
        app.faults.on("GET", "blob").delay(5)

        def repeat(request: Request) -> Answer | None:
            if request.kind != "blob":
                return None
            said = " and ".join(f"you sent {secret}" for secret in service.refresh_tokens)
            return error(403, "DENIED", said)

        app.intercept = repeat
        mappings = [{"from": name, "tags": {"glob": ["v1"]}} for name in repositories]
        text = document({"source": f"https://{ACR}", "target": "http://target.test"}, *mappings)
        env = in_file({"identitytoken": IDENTITY}, ACR)
        ran = await world.run("sync", "-vv", "--json", "-c", "-", stdin=text, env=env)
    assert len(ran.failed) == 3
    sent = {secret for entry in app.journal.entries for secret in entry.secrets}
    renewed = [*service.refresh_tokens]
    assert len(sent.intersection(renewed)) > 2, "several of them were in use"
    assert all("you sent ***" in line for line in ran.failed)
    for secret in renewed:
        assert secret not in ran.out + ran.err, secret


@pytest.mark.rule("R10")
@pytest.mark.parametrize("kind", ["manifest", "tag_list"])
@pytest.mark.parametrize("length", [50, 500, 1000, 2000, 60_000])
async def test_of_a_long_token_that_a_document_repeats_no_part_is_told(
    kind: str, length: int
) -> None:
    """Only the beginning of such a document is, which the token may be."""
    token = "".join(f"{number:x}." for number in range(length))[:length]
    async with virtual() as world:
        app = world.registry("source.test").app
        world.registry("target.test")
        Seed(1).image().load_into(app, "app", tag="v1")
        app.intercept = lambda request: (
            Response(200, [("Content-Type", token)], f"Bearer {token}".encode())
            if request.kind == kind
            else None
        )
        source = {"url": "http://source.test", "auth_type": "static_token", "token": token}
        app.auth = Static()
        app.auth.check = lambda *_: (  # type: ignore[method-assign]
            Response(401, [("WWW-Authenticate", 'Bearer realm="https://elsewhere.test/"')], b"{}")
            if not app.journal.entries[-1].request.header("authorization")
            else None
        )
        glob = {"glob": ["*" if kind == "tag_list" else "v1"]}
        text = document(
            {"source": source, "target": "http://target.test"}, {"from": "app", "tags": glob}
        )
        ran = await world.run("sync", "-vv", "--json", "-c", "-", stdin=text)
    assert ran.status == 2
    assert token[:8] not in ran.out + ran.err
    # Of more than is searched nothing is shown, since its end may be the beginning of a secret.
    assert ("***" if length < 10_000 else "…") in ran.err


def refusing(check: Callable[..., Any], status: int) -> Callable[..., Any]:
    """Refuse whoever logs in, with what challenges there are."""

    def refuse(request: Request, needs: list[Access]) -> Any:
        if not request.header("authorization"):
            return check(request, needs)
        bare = [(name, value) for name, value in request.headers if name.lower() != "authorization"]
        ways = check(replace(request, headers=bare), needs).headers
        return Response(status, ways if status == 401 else [], b"{}")

    return refuse
