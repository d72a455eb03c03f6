"""The fault matrix: what goes wrong, where, on which side, how often; and what has to hold whatever
it was.

Each case is one world in memory on a clock that jumps: a source and one or two targets that want
tokens, an index, images that share layers, a tag that is old at the targets, an image with a
referrer. A fault strikes once, three times or for ever. Then what is called synced is there byte
for byte; what is not is reported failed; no tag is anything but old or whole; nothing the program
says or keeps holds a secret; it ends; and the next run, undisturbed, completes the rest.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import os
import re
import sqlite3
import ssl
import tempfile
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import anyio

from conformance.content.images import Image, Seed
from conformance.faults.rules import Rule
from conformance.messages import Answer, Request, digest_of
from conformance.registry.app import App
from conformance.registry.tokens import TokenService
from conformance.server.memory import Place
from tests import ends
from tests.ends import Ran, Virtual, document, tags, virtual

__all__ = ["Case", "cases", "endpoint", "faults_by_side", "frequency", "judge"]

# What follows from an exchange that went wrong: what was learnt by it is asked, or tried, again.
PROVOKED = (
    "known_blob_asked",
    "blob_before_session",
    "second_session",
    "refused_login_again",
    "own_manifest_asked",  # children, when the registry says that one of them is unknown
)
# What is told where a referrer is not found: that it is not there, or that nobody here knows of
# referrers.
LEFT_OUT = ("is listed as a referrer of", "no artifacts found")
USER, PASSWORD = "robot", "correct-horse-battery"
TIMES = {"once": 1, "three": 3, "ever": None}
_DAY = 86_400
# The name of a file for staged blobs, or of its folder.
_STAGED = re.compile("sha256|[0-9a-f]{64}")
# What the statements begin with that write to the state.
_WRITES = ("INSERT", "REPLACE", "UPDATE", "DELETE")

Strike = Callable[["Scene", int | None], contextlib.AbstractAsyncContextManager[None]]


class Endpoint(NamedTuple):
    """One kind of request: `where` narrows it, `world` is the one in which it is made."""

    side: str
    name: str
    method: str
    kind: str
    where: Callable[[Request], bool] | None = None
    world: str = "cold"

    @property
    def answers(self) -> bool:
        return self.method == "GET"

    @property
    def takes(self) -> bool:
        return self.method == "PUT"


class Case(NamedTuple):
    """What happens, in which world; `recovers`: the run itself is to end well."""

    name: str
    world: str
    strike: Strike
    times: int | None
    recovers: bool = False

    @property
    def group(self) -> str:
        return self.name.split("-")[-2]


def _is_mount(request: Request) -> bool:
    return bool(request.parameter("mount")) and request.parameter("from") != request.repository


def _is_digest(request: Request) -> bool:
    return ":" in request.reference


def _is_start(request: Request) -> bool:
    return not _is_mount(request)


def _is_tag(request: Request) -> bool:
    return not _is_digest(request)


ENDPOINTS = [
    Endpoint("source", "token", "GET", "token"),
    Endpoint("source", "listing", "GET", "tag_list"),
    Endpoint("source", "manifest", "GET", "manifest", _is_tag),
    Endpoint("source", "child", "GET", "manifest", _is_digest),
    Endpoint("source", "referrers", "GET", "referrers"),
    Endpoint("source", "blob", "GET", "blob"),
    Endpoint("source", "head", "HEAD", "manifest", None, "warm"),
    Endpoint("source", "staged", "GET", "blob", None, "two"),
    Endpoint("target", "token", "GET", "token"),
    Endpoint("target", "listing", "GET", "tag_list"),
    Endpoint("target", "head", "HEAD", "manifest", lambda request: request.reference == "v2"),
    Endpoint("target", "look", "HEAD", "blob"),
    Endpoint("target", "start", "POST", "upload_start", _is_start),
    Endpoint("target", "mount", "POST", "upload_start", _is_mount),
    Endpoint("target", "body", "PUT", "upload"),
    Endpoint("target", "child", "PUT", "manifest", _is_digest),
    Endpoint("target", "manifest", "PUT", "manifest", _is_tag),
    Endpoint("target", "warm", "HEAD", "manifest", None, "warm"),
    Endpoint("target", "staged", "PUT", "upload", None, "two"),
]

Verb = Callable[[Rule], Rule]
# What a program that repeats gets over, when it happens once.
PASSING: dict[str, Verb] = {
    "429": lambda rule: rule.status(429),
    "429_when": lambda rule: rule.status(429, retry_after=20),
    "500": lambda rule: rule.status(500),
    "503_early": lambda rule: rule.status(503, early=True),
    "504_done": lambda rule: rule.status(504, at="answer"),
    "reset_before": lambda rule: rule.drop(reset=True),
    "reset_after": lambda rule: rule.drop(at="answer", reset=True),
    "stall": lambda rule: rule.stall(),
    "429_nonsense": lambda rule: rule.status(429, retry_after="soon"),
    "500_html": lambda rule: rule.status(
        500, body=b"<html>", headers={"Content-Type": "text/html"}
    ),
    "delay": lambda rule: rule.delay(20, at="answer"),
    "delay_in_head": lambda rule: rule.delay(20, at="head"),
    "stall_in_head": lambda rule: rule.stall(at="head"),
    "stall_of_answer": lambda rule: rule.stall(at="answer"),
    "drop_in_head": lambda rule: rule.drop(at="head"),
    "raw_interim": lambda rule: rule.raw(b"HTTP/1.1 103 Early Hints\r\n\r\n", where="before"),
    "raw_second": lambda rule: rule.raw(
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad", where="after"
    ),
}
LASTING: dict[str, Verb] = {
    "401_bare": lambda rule: rule.status(401),
    "403": lambda rule: rule.status(403),
    "elsewhere": lambda rule: rule.redirect("http://elsewhere.test"),
}
OF_ANSWERS: dict[str, Verb] = {
    "reset_body": lambda rule: rule.drop(20, of="response", reset=True),
    "stall_body": lambda rule: rule.stall(20, of="response"),
    "drip": lambda rule: rule.throttle(10),
    "truncated": lambda rule: rule.truncate(20),
    "truncated_chunked": lambda rule: rule.truncate(20, "chunked"),
    "corrupt": lambda rule: rule.corrupt(20),
    "long": lambda rule: rule.lie("Content-Length"),
}
OF_BODIES: dict[str, Verb] = {
    "reset_body": lambda rule: rule.drop(20, of="request", reset=True),
    "stall_body": lambda rule: rule.stall(20, of="request"),
    "drip": lambda rule: rule.throttle(100, of="request"),
}
# A body that is damaged on its way under a tag is stored as what it is: nobody can know before the
# answer names it.
OF_UPLOADS: dict[str, Verb] = {
    "corrupt": lambda rule: rule.corrupt(20, of="request"),
    "forgotten": lambda rule: rule.forget(),
}
WITH_DIGEST: dict[str, Verb] = {"digest": lambda rule: rule.lie("Docker-Content-Digest")}
OF_STARTS: dict[str, Verb] = {
    "location": lambda rule: rule.lie(
        headers={"Location": "http://elsewhere.test/v2/x/blobs/uploads/1"}
    ),
    "no_location": lambda rule: rule.lie(headers={"Location": None}),
    "location_https": lambda rule: rule.lie(headers={"Location": "https://169.254.169.254/latest"}),
}
REFUSED: dict[str, Verb] = {
    "400_invalid": lambda rule: rule.status(400, "MANIFEST_INVALID"),
    "400_blob_unknown": lambda rule: rule.status(400, "MANIFEST_BLOB_UNKNOWN"),
    "404_blob_unknown": lambda rule: rule.status(404, "MANIFEST_BLOB_UNKNOWN"),
    "413": lambda rule: rule.status(413, "SIZE_INVALID"),
    "422": lambda rule: rule.status(422),
}
GONE: dict[str, Verb] = {"404": lambda rule: rule.status(404, "BLOB_UNKNOWN")}
# What no registry means.
ODD: dict[str, Verb] = {
    "400": lambda rule: rule.status(400),
    "416": lambda rule: rule.status(416),
    "200_empty": lambda rule: rule.status(200, body=b""),
    "204": lambda rule: rule.status(204),
    "redirect_round": lambda rule: rule.redirect(),
    "redirect_303": lambda rule: rule.redirect(code=303),
    "redirect_to_no_url": lambda rule: rule.redirect("http://[/", 302),
    "challenge_again": lambda rule: rule.challenge(
        realm="http://source.test/token", service="registry.test", error="invalid_token"
    ),
    "challenge_elsewhere": lambda rule: rule.challenge(realm="http://elsewhere.test/token"),
    "challenge_malformed": lambda rule: rule.challenge('Bearer realm="http://[,=,"'),
    "challenge_for_basic": lambda rule: rule.challenge('Basic realm="x"'),
    "raw_garbage": lambda rule: rule.raw(b"SSH-2.0-x\r\n"),
    "raw_headers": lambda rule: rule.raw(b"HTTP/1.1 200 OK\r\n: x\r\n\x00\r\n\r\n"),
}
LENGTH: dict[str, Verb] = {"length": lambda rule: rule.lie("Content-Length")}
TYPE: dict[str, Verb] = {
    "type": lambda rule: rule.lie("Content-Type"),
    "no_type": lambda rule: rule.lie(headers={"Content-Type": None}),
}
NO_DIGEST: dict[str, Verb] = {
    "no_digest": lambda rule: rule.lie(headers={"Docker-Content-Digest": None})
}


def _ruled(endpoint: Endpoint, verb: Verb) -> Strike:
    """Let a verb strike an endpoint."""

    @contextlib.asynccontextmanager
    async def strike(scene: Scene, times: int | None) -> AsyncIterator[None]:
        faults = scene.place(endpoint.side).app.faults
        # Not the bare request that is challenged.
        who = None if endpoint.kind == "token" else {"Authorization": "*"}
        rule = faults.on(endpoint.method, endpoint.kind, header=who, where=endpoint.where)
        verb(rule if times is None else rule.first(times))
        yield
        faults.check()

    return strike


def _revoked(endpoint: Endpoint) -> Strike:
    """Let every token of a side end when an endpoint is asked."""

    @contextlib.asynccontextmanager
    async def strike(scene: Scene, times: int | None) -> AsyncIterator[None]:
        struck = 0

        def intercept(request: Request) -> Answer | None:
            nonlocal struck
            mine = request.method == endpoint.method and request.kind == endpoint.kind
            if (
                mine
                and (endpoint.where is None or endpoint.where(request))
                and (times is None or struck < times)
            ):
                struck += request.header("authorization") != ""
                scene.place(endpoint.side).app.auth.revoke()
            return None

        scene.place(endpoint.side).app.intercept = intercept
        yield
        scene.place(endpoint.side).app.intercept = None
        assert struck

    return strike


def _ruled_cases() -> Iterator[Case]:
    for endpoint in ENDPOINTS:
        verbs = {**PASSING, **LASTING}
        if endpoint.answers:
            verbs |= OF_ANSWERS
        if endpoint.takes:
            verbs |= OF_BODIES
        if endpoint.kind == "upload":
            verbs |= OF_UPLOADS
        if endpoint.kind in ("manifest", "upload"):
            verbs |= WITH_DIGEST
        if endpoint.name in ("start", "mount"):
            verbs |= OF_STARTS
        if (endpoint.method, endpoint.kind) == ("PUT", "manifest"):
            verbs |= REFUSED
        if endpoint.kind in ("blob", "manifest", "referrers", "upload_start"):
            verbs |= GONE
        verbs |= ODD | LENGTH
        if endpoint.answers:
            verbs |= TYPE
        if endpoint.kind in ("manifest", "blob", "upload"):
            verbs |= NO_DIGEST
        for name, verb in verbs.items():
            for often, times in TIMES.items():
                full = f"{endpoint.side}-{endpoint.name}-{name}-{often}"
                yield Case(
                    full,
                    endpoint.world,
                    _ruled(endpoint, verb),
                    times,
                    name in PASSING and times == 1,
                )
        if endpoint.kind != "token":
            for often, times in TIMES.items():
                full = f"{endpoint.side}-{endpoint.name}-revoked-{often}"
                # A token that ends at its first use costs the one login that a request may repeat.
                first = (endpoint.side, endpoint.name) == ("source", "listing")
                yield Case(
                    full, endpoint.world, _revoked(endpoint), times, times == 1 and not first
                )


# Faults of no exchange.


@contextlib.asynccontextmanager
async def _mounts_refused(scene: Scene, times: int | None) -> AsyncIterator[None]:
    asked = 0

    def intercept(request: Request) -> Answer | None:
        nonlocal asked
        asked += request.kind == "upload_start" and _is_mount(request)
        scene.target.app.mounts = times is not None and asked > times
        return None

    scene.target.app.intercept = intercept
    yield
    scene.target.app.intercept, scene.target.app.mounts = None, True
    assert asked


@contextlib.asynccontextmanager
async def _blobs_lost(scene: Scene, times: int | None) -> AsyncIterator[None]:
    """Let the target lose a blob of each manifest that it is about to get."""
    lost = 0

    def intercept(request: Request) -> Answer | None:
        nonlocal lost
        if (
            request.method == "PUT"
            and request.kind == "manifest"
            and (times is None or lost < times)
        ):
            blobs = scene.target.app.repositories[request.repository].blobs
            if blobs:
                lost += 1
                blobs.pop(sorted(blobs)[lost % len(blobs)])
        return None

    scene.target.app.intercept = intercept
    yield
    scene.target.app.intercept = None
    assert lost


def _unreachable(side: str, how: str) -> Strike:
    """Refuse connections, or let their handshakes fail."""

    @contextlib.asynccontextmanager
    async def strike(scene: Scene, times: int | None) -> AsyncIterator[None]:
        world, struck, host = scene.world, 0, scene.place(side).host
        connect, start_tls = world.connect, world.start_tls

        def strikes(name: str) -> bool:
            nonlocal struck
            struck += name == host
            return name == host and (times is None or struck <= times)

        async def refusing(name: str, port: int) -> Any:
            if how != "tls" and strikes(name):
                if how == "silent":
                    await anyio.sleep_forever()
                raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            return await connect(name, port)

        async def failing(below: Any, context: object, name: str) -> Any:
            if how == "tls" and strikes(name):
                raise ssl.SSLError(1, "bad certificate")
            return await start_tls(below, context, name)

        with (
            mock.patch.object(world, "connect", refusing),
            mock.patch.object(world, "start_tls", failing),
        ):
            yield
        assert struck

    return strike


def _outage(side: str, how: Any, request: str) -> Strike:
    """Let a registry go away when its first request of a kind comes, for ever or for a while."""

    @contextlib.asynccontextmanager
    async def strike(scene: Scene, times: int | None) -> AsyncIterator[None]:
        place, came = scene.place(side), anyio.Event()

        def intercept(asked: Request) -> Answer | None:
            if f"{asked.method} {asked.kind}" == request:
                came.set()
            return None

        async def outage() -> None:
            await came.wait()
            async with place.outage(how, (times or _DAY) * 5.0):
                pass

        place.app.intercept = intercept
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outage)
            yield
            tasks.cancel_scope.cancel()
        place.reset_connections()  # nothing of what was under way arrives later
        place.recover()
        place.app.intercept = None
        assert came.is_set()

    return strike


def _disk(where: str) -> Strike:
    """Fill or break the disk below staged blobs, by what the system tells of their files.

    `write` and `read` fail in the kernel, because the descriptor is of another device or cannot be
    read; the others fail by themselves. What a full disk does to the state is
    tests/test_hostile_files.py's.
    """

    @contextlib.asynccontextmanager
    async def strike(scene: Scene, times: int | None) -> AsyncIterator[None]:
        struck = 0

        def strikes(path: Any) -> bool:
            nonlocal struck
            struck += (is_staged := bool(_STAGED.search(os.fsdecode(path))))
            return is_staged and (times is None or struck <= times)

        def failing(plain: Callable[..., Any]) -> Callable[..., Any]:
            def call(path: Any, *rest: Any, **more: Any) -> Any:
                if strikes(path):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "blobs")
                return plain(path, *rest, **more)

            return call

        def opened(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            descriptor: int = plain(path, flags, *rest, **more)
            reads = flags & (os.O_WRONLY | os.O_RDWR) == os.O_RDONLY
            if reads == (where == "read") and strikes(path):
                other = plain(path if reads else "/dev/full", os.O_WRONLY)
                os.dup2(other, descriptor, inheritable=False)
                os.close(other)
            return descriptor

        name = "open" if where in ("write", "read") else where
        plain = getattr(os, name)
        struck_call = opened if where in ("write", "read") else failing(plain)
        with mock.patch.object(os, name, struck_call):
            yield
        assert struck

    return strike


def _state(where: str) -> Strike:
    """Let the state's file fail as on a full or broken disk: when opened or written."""

    @contextlib.asynccontextmanager
    async def strike(scene: Scene, times: int | None) -> AsyncIterator[None]:
        struck, plain = 0, sqlite3.connect

        def strikes() -> None:
            nonlocal struck
            struck += 1
            if times is None or struck <= times:
                raise sqlite3.OperationalError("database or disk is full")

        class Full(sqlite3.Connection):
            def execute(self, statement: str, *rest: Any) -> Any:
                if statement.startswith(_WRITES):
                    strikes()
                return super().execute(statement, *rest)

            def executemany(self, statement: str, *rest: Any) -> Any:
                if statement.startswith(_WRITES):
                    strikes()
                return super().executemany(statement, *rest)

        def connect(*given: Any, **more: Any) -> Any:
            if where == "open":
                strikes()
                return plain(*given, **more)
            return plain(*given, factory=Full, **more)

        with mock.patch.object(sqlite3, "connect", connect):
            yield
        assert struck

    return strike


def _jump(seconds: float, when: str) -> Strike:
    """Let the time of day jump: between two runs, or in the middle of one, there or there and back."""

    @contextlib.asynccontextmanager
    async def strike(scene: Scene, times: int | None) -> AsyncIterator[None]:
        jumped, world, seen = 0.0, scene.world, 0

        def wall() -> float:
            return Virtual.wall() + jumped

        def intercept(request: Request) -> Answer | None:
            nonlocal jumped, seen
            if when != "between" and request.method in ("POST", "PUT"):
                seen += 1
                jumped = seconds if times is None or seen <= times else 0.0
            return None

        jumped = seconds if when == "between" else 0.0
        scene.target.app.intercept = intercept
        with mock.patch.object(world, "wall", wall):
            yield
        scene.target.app.intercept = None
        assert when == "between" or seen

    return strike


def _other_cases() -> Iterator[Case]:
    for often, times in TIMES.items():
        yield Case(f"target-every-mount_refused-{often}", "cold", _mounts_refused, times, True)
        yield Case(f"target-every-blob_lost-{often}", "cold", _blobs_lost, times)
        for side in ("source", "target"):
            for how in ("refused", "silent"):
                yield Case(
                    f"{side}-connect-{how}-{often}",
                    "cold",
                    _unreachable(side, how),
                    times,
                    times == 1,
                )
            yield Case(f"{side}-connect-tls-{often}", "https", _unreachable(side, "tls"), times)
        for how in ("refused", "silent"):
            for side, request in (
                ("source", "GET blob"),
                ("target", "PUT upload"),
                ("target", "PUT manifest"),
            ):
                name = f"{side}-{request.replace(' ', '_')}-outage_{how}-{often}"
                yield Case(name, "cold", _outage(side, how, request), times)
        for where in ("write", "read", "open", "replace", "mkdir"):
            yield Case(
                f"disk-stage_{where}-full-{often}", "large", _disk(where), times, where != "read"
            )
        for where in ("open", "write"):
            yield Case(f"disk-state_{where}-full-{often}", "cold", _state(where), times, True)
        yield Case(f"disk-state_write-warm-{often}", "warm", _state("write"), times, True)
        for name, seconds in (
            ("day", _DAY),
            ("decade", 3652.0 * _DAY),
            ("back_day", -_DAY),
            ("back_decade", -3652.0 * _DAY),
        ):
            for when, world in (("between", "warm"), ("amid", "cold"), ("amid", "warm")):
                yield Case(
                    f"clock-{world}_{when}-{name}-{often}", world, _jump(seconds, when), times, True
                )


def cases() -> list[Case]:
    """Return every case."""
    return [*_ruled_cases(), *_other_cases()]


def faults_by_side(case: Case) -> list[str]:
    """Return what a case has of two dimensions: on which side, which fault."""
    side, _, *what, _ = case.name.split("-")
    return [side, "-".join(what)]


def endpoint(case: Case) -> list[str]:
    """Return of which endpoint a case is, and on which side."""
    side, where, *_ = case.name.split("-")
    return [f"{side}-{where}"]


def frequency(case: Case) -> list[str]:
    """Return how often the fault of a case strikes."""
    return [case.name.rpartition("-")[2]]


class Scene:
    """Two or three registries that want tokens, what the source holds, what the targets held
    before.
    """

    def __init__(self, world: Virtual, kind: str, home: Path) -> None:
        self.world, self.kind, self.is_left_out = world, kind, False
        scheme = "https" if kind == "https" else "http"
        names = ["source", "target", *(["second"] if kind in ("two", "large") else [])]
        self.places: dict[str, Place] = {}
        for name in names:
            auth = TokenService(
                {USER: PASSWORD}, expires_in=_DAY, lifetime=_DAY, now=anyio.current_time
            )
            self.places[name] = world.listen(App(auth=auth), f"{name}.test", scheme=scheme)
        self.source, self.target = self.places["source"], self.places["target"]
        self.elsewhere = world.registry("elsewhere.test", referrers_api=False)
        seed = Seed(7)
        # Too large to be staged in memory.
        least = 1_100_000 if kind == "large" else 70_000
        base, own = seed.layer(least), [seed.layer(least + 10_000 + n) for n in range(4)]
        children = [
            seed.image(layers=[base, own[0]]),
            seed.image(layers=[base, own[1]], architecture="arm64"),
        ]
        self.images = {
            ("app", "v1"): seed.index(children),
            ("app", "v2"): seed.image(layers=[base, own[2]]),
            ("lib", "v1"): seed.image(layers=[base, own[3]]),
        }
        for (repository, tag), image in self.images.items():
            image.load_into(self.app("source"), repository, tag=tag)
        self.signature = seed.artifact(self.images["app", "v2"])
        self.signature.load_into(self.app("source"), "app")
        self.old = {("app", "v2"): Seed(5).image(sizes=(50,))}
        for name in names[1:]:
            self.old["app", "v2"].load_into(self.app(name), "app", tag="v2")
            self.app(name).add_blob("app", own[2])  # for a look that finds something
        registries = {
            name: {
                "url": place.url,
                "head_first": kind == "warm" and name == "source",
                "auth_type": "basic",
                "credentials": {"username": USER, "password": PASSWORD},
            }
            for name, place in self.places.items()
        }
        self.home, file = home, home / "mirror.yaml"
        mappings = [{"from": name, "tags": tags("v*")} for name in ("app", "lib")]
        file.write_text(document(registries, *mappings, defaults={"artifacts": {"enabled": True}}))
        self.arguments = ("sync", "--json", "-vv", "-c", str(file))

    def app(self, name: str) -> App:
        app = self.places[name].app
        assert isinstance(app, App)
        return app

    def place(self, side: str) -> Place:
        return self.places[side]

    async def run(self) -> Ran:
        with anyio.fail_after(6 * 3600):
            ran = await self.world.run(*self.arguments)
        self.check_secrets(ran)
        self.is_left_out = self.is_left_out or any(words in ran.err for words in LEFT_OUT)
        return ran

    async def warm(self) -> None:
        """Let a run be behind us, then change two tags at the source."""
        assert (await self.run()).status == 0
        seed = Seed(8)
        self.old = dict(self.images)
        self.images["app", "v1"] = seed.index()
        self.images["lib", "v1"] = seed.image(sizes=(90_000,))
        for key in (("app", "v1"), ("lib", "v1")):
            self.images[key].load_into(self.app("source"), key[0], tag=key[1])

    def check_secrets(self, ran: Ran) -> None:
        """No password and no token is told or kept."""
        kept = [
            path.read_bytes()
            for path in self.home.rglob("*")
            if path.is_file() and path.name != "mirror.yaml"
        ]
        told = b"\n".join([ran.out.encode(), ran.err.encode(), *kept])
        login = base64.b64encode(f"{USER}:{PASSWORD}".encode())
        for secret in (PASSWORD.encode(), login, b"token-1.", b"refresh-"):
            assert secret not in told, f"{secret!r} is told or kept"
        for entry in self.elsewhere.app.journal.entries:
            assert not entry.headers.get("authorization"), f"{entry} carries a credential"

    def is_whole(self, name: str, repository: str, image: Image) -> bool:
        for digest, body in image.contents().items():
            found = self.app(name).manifest(repository, digest)
            if (found.body if found else self.app(name).blob(repository, digest)) != body:
                return False
        return True

    def check(self, ran: Ran, *, lossy: bool) -> str:
        """Say how a run ended; AssertionError when anything is wrong at a target or with what is
        told.
        """
        assert "INTERNAL_ERROR" not in ran.out + ran.err, ran.err
        assert "Traceback" not in ran.err, ran.err
        for name in self.places.keys() - {"source"}:
            self._check_target(name, lossy=lossy)
        statuses: Counter[str] = Counter()
        for each in ran.images:
            where, _, tag = str(each["target"]).rpartition(":")
            host, _, repository = where.partition("/")
            statuses[each["status"]] += 1
            if each["status"] == "failed":
                assert each["error"]["message"]
                assert any(f"{where}:{tag}" in line for line in ran.failed), ran.err
                continue
            image, name = self.images[repository, tag], host.partition(".")[0]
            assert self.app(name).tags(repository)[tag] == image.top, each
            assert lossy or self.is_whole(name, repository, image), each
        assert (ran.status == 0) == (not ran.failed and bool(ran.images)), (ran.status, ran.err)
        assert ran.images or ran.err.strip()
        return "right" if not statuses["failed"] else "in part" if len(statuses) > 1 else "failed"

    def _check_target(self, name: str, *, lossy: bool) -> None:
        app = self.app(name)
        assert app.repositories.keys() <= {"app", "lib"}
        for repository, held in app.repositories.items():
            for digest in held.blobs:
                assert (
                    digest_of(app.blob(repository, digest) or b"", digest.partition(":")[0])
                    == digest
                )
            for digest, manifest in held.manifests.items():
                assert digest_of(manifest.body) == digest
                assert lossy or all(each["digest"] in held.blobs for each in manifest.blobs), (
                    "an incomplete image"
                )
                assert all(each["digest"] in held.manifests for each in manifest.children), (
                    "an incomplete index"
                )
            for tag, digest in app.tags(repository).items():
                known = [images.get((repository, tag)) for images in (self.images, self.old)]
                assert tag.startswith("sha256-") or digest in [
                    each.top for each in known if each
                ], (repository, tag)

    async def converge(self) -> None:
        """The next run completes the rest, the one after it finds nothing to do."""
        for place in (*self.places.values(), self.elsewhere):
            place.app.faults.clear()
        again = await self.run()
        assert (again.status, again.failed) == (0, []), again.err
        for name in self.places.keys() - {"source"}:
            for (repository, tag), image in self.images.items():
                assert self.is_whole(name, repository, image), (name, repository, tag)
                assert self.app(name).tags(repository)[tag] == image.top
            # One that was listed and not there is left out with a warning, and looked for again
            # when a look is due.
            assert self.is_left_out or self.app(name).manifest("app", self.signature.top), (
                "the referrer is there"
            )
        written = self.written()
        last = await self.run()
        assert {each["status"] for each in last.images} == {"skipped"}
        assert self.written() == written

    def written(self) -> int:
        """Count what was asked to be changed so far."""
        return sum(
            place.journal.count("PUT") + place.journal.count("POST")
            for place in self.places.values()
        )


async def judge(case: Case) -> str:
    """Play a case; return how the run under the fault ended."""
    ends._provoked.clear()
    ends._provoked.update(PROVOKED)
    if "disk-stage" in case.name or "blob_lost" in case.name:
        ends._provoked.add(
            "blob_pulled_twice"
        )  # once for the disk and once for all targets; what was lost again
    if "blob_lost" in case.name:  # and sent again, when a manifest that names it was refused
        ends._provoked.update(
            ["blob_uploaded_twice", "manifest_names_absent", "manifest_put_twice"]
        )
    if case.group == "204":  # a registry that says so of a blob that it did not store
        ends._provoked.add("manifest_names_absent")
    if "outage_refused" in case.name:
        # A body that goes to a registry whose connections have just broken is in no journal.
        ends._provoked.add("blob_pulled_twice")
    # The dice show one number, never so low that a registry is asked all the time.
    chance = 0.3 + 0.6 * Random(zlib.crc32(case.name.encode())).random()
    with tempfile.TemporaryDirectory(prefix="matrix-") as home:
        async with virtual(chance) as world:
            scene = Scene(world, case.world, Path(home))
            if case.world == "warm":
                await scene.warm()
            async with case.strike(scene, case.times):
                ran = await scene.run()
            lossy = "blob_lost" in case.name
            outcome = scene.check(ran, lossy=lossy)
            assert outcome == "right" or not case.recovers, ran.err
            if lossy:  # a registry that loses what it holds is believed until it says so
                for name, image in (
                    ("app", scene.images["app", "v1"]),
                    ("lib", scene.images["lib", "v1"]),
                ):
                    image.load_into(scene.app("target"), name)
                scene.images["app", "v2"].load_into(scene.app("target"), "app")
            await scene.converge()
    return outcome
