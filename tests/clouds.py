"""A machine in a cloud, as tests of logins have it: its home, its environment, the services that it
can ask, and `auth check` of one registry of that cloud.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import pytest

from conformance.clouds.aws import ACCOUNT, Aws, Identity, Private
from conformance.http import Reception, Site
from conformance.images import Seed
from conformance.messages import Answer, Content, Request, Response
from conformance.registry import App
from conformance.tokens import read_basic
from tests.ends import Ran, Virtual, document


class Fixed(Site):
    """A login service with one answer."""

    def __init__(self, answer: Response) -> None:
        super().__init__()
        self.told = answer

    def start(self, request: Request) -> Answer | Reception:
        request.kind = "login"
        return self.told


def answer_first(site: Site, *answers: Response, path: str = "") -> None:
    """Let the next requests to a login service be answered so, or the next ones to one path."""
    left = [*answers]

    def intercept(request: Request) -> Response | None:
        if path and request.path != path:
            return None
        request.kind = "login"
        return left.pop(0) if left else None

    site.intercept = intercept


class Asked(NamedTuple):
    """A request to a login service. Names of headers are lower case."""

    method: str
    place: str  # host and path
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def form(self) -> dict[str, str]:
        return dict(parse_qsl(self.body.decode(), keep_blank_values=True))


def hear(site: Site) -> list[Asked]:
    """Write down what a login service is asked from now on."""
    heard: list[Asked] = []
    start = site.start

    def write_down(request: Request, body: bytes = b"") -> None:
        place = request.header("host") + request.path
        headers = dict(request.headers)
        heard.append(Asked(request.method, place, dict(request.query), headers, body))

    def listen(request: Request) -> Answer | Reception:
        decision = start(request)
        if not isinstance(decision, Reception):
            write_down(request)
            return decision
        finish, content = decision.finish, decision.content

        def finish_heard(received: int) -> Any:
            assert isinstance(content, Content)
            write_down(request, bytes(content))
            return finish(received)

        decision.finish = finish_heard
        return decision

    site.start = listen  # type: ignore[method-assign]
    return heard


class Machine:
    """Nobody but those who are let `answer` can be reached from it."""

    auth_type = ""  # of its cloud's registries: then the whole chain of sources is searched

    def __init__(self, world: Virtual, home: Path, patch: pytest.MonkeyPatch) -> None:
        self.world = world
        self.home = home
        self.patch = patch
        self.reachable = dict[str, Any]()  # places by host
        self.ran = Ran(0, "", "")  # the last run

    def answer(self, site: Site, *hosts: str, scheme: str = "https", **where: Any) -> None:
        """Let a site answer under these names."""
        for host in hosts:
            self.reachable[host] = self.world.listen(site, host, scheme=scheme, **where)

    def ask(self, method: str, url: str, headers: Any, body: bytes | None) -> Response | None:
        """Let another program ask; return None if nobody answers there."""
        parts = urlsplit(url)
        place = self.reachable.get(parts.hostname or "")
        if place is None or place.was_away:
            return None
        sent = {name.lower(): value for name, value in (headers or {}).items()}
        sent |= {"host": parts.netloc, "content-length": str(len(body or b""))}
        if not body:
            del sent["content-length"]
        target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
        asked = Request(method, target, [*sent.items()], body or b"", parts.scheme)
        answer = place.app.handle(asked)
        assert isinstance(answer, Response)
        return answer

    def registry(self, auth: Any, host: str) -> App:
        app = App(auth=auth)
        Seed(1).image(sizes=(9,)).load_into(app, "app", "v1")
        self.answer(app, host)
        return app

    def set(self, **environ: str) -> None:
        for name, value in environ.items():
            self.patch.setenv(name, value)

    def unset(self, *names: str) -> None:
        for name in names:
            self.patch.delenv(name)

    def write(self, name: str, text: str) -> str:
        """Write a file below the home directory."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    def secrets(self) -> Iterable[str]:
        """Return what no output may show."""
        return ()

    async def check(self, host: str, *, repository: str = "app", **fields: Any) -> dict[str, Any]:
        """Try the login to a registry; return the row about it."""
        there = {"url": host, "auth_type": self.auth_type, **fields}
        there = {name: value for name, value in there.items() if value}
        layout = f"oci-layout:{self.home}/layout"
        text = document({"source": there, "layout": layout}, {"from": repository})
        self.ran = await self.world.run("auth", "check", "--json", "-vv", "-c", "-", stdin=text)
        shown = self.ran.out + self.ran.err
        assert not [secret for secret in self.secrets() if secret in shown]
        (row,) = self.ran.report["access"]
        assert isinstance(row, dict)
        assert self.ran.status == (4 if row["error"] else 0)
        return row

    async def source(self, host: str, **fields: Any) -> str:
        """Log in to a registry; return where the identity was found."""
        row = await self.check(host, **fields)
        assert row["error"] is None, row["error"]
        return str(row["source"])

    async def refused(self, host: str, **fields: Any) -> str:
        """Fail to log in to a registry; return the message and the hint."""
        error = (await self.check(host, **fields))["error"]
        assert error is not None
        text = f"{error['message']} ({error['hint']})"
        assert text.replace("\n", " ").isprintable()
        assert len(text) < 1300
        return text.removeprefix(f"check {host}/app: ")


PRIVATE = f"{ACCOUNT}.dkr.ecr.eu-west-1.amazonaws.com"
ECR, STS = "api.ecr.eu-west-1.amazonaws.com", "sts.eu-west-1.amazonaws.com"
PORTALS = [f"portal.sso.{region}.amazonaws.com" for region in ("eu-west-1", "us-east-2")]
IMDS, ECS, EKS = "169.254.169.254", "169.254.170.2", "169.254.170.23"


class InAws(Machine):
    """A machine in AWS, with a registry of ECR."""

    auth_type = "ecr"

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self.aws = Aws(now=self.world.wall)
        self.answer(self.aws, ECR, STS, *PORTALS)
        self.answer(self.aws, IMDS, ECS, EKS, "fd00:ec2::254", "fd00:ec2::23", scheme="http")
        self.ecr = self.registry(Private(self.aws), PRIVATE)

    def secrets(self) -> set[str]:
        return self.aws.secrets

    async def who(self, host: str = PRIVATE, **fields: Any) -> str:
        """Log in, and return whose password the registry was shown."""
        await self.source(host, **fields)
        login = read_basic(self.reachable[host].app.journal.entries[-1].header("authorization"))
        assert login is not None
        return self.aws.owner(login.password)

    @property
    def asked(self) -> list[str]:
        """The hosts of the services that were asked."""
        return [entry.header("host") for entry in self.aws.journal.entries]

    def set_keys(self, user: Identity) -> str:
        self.set(AWS_ACCESS_KEY_ID=user.access, AWS_SECRET_ACCESS_KEY=user.secret)
        if user.session:
            self.set(AWS_SESSION_TOKEN=user.session)
        return user.name
