"""The fault plan: what goes wrong, where, on which side, how often; and what has to hold whatever it
was.

Each cell is one world in memory on a clock that jumps: a source and one or two targets that want
tokens, an index, images that share layers, a tag that is old at the targets, an image with a
referrer. A fault strikes once, three times or for ever. Then what is called synced is there byte
for byte; what is not is reported failed; no tag is anything but old or whole; nothing the program
says or keeps holds a secret; it ends; and the next run, undisturbed, completes the rest.

An ordinary run plays a part of the cells (tests/thinning.py), `--thorough` plays all.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import os
import re
import resource
import sqlite3
import ssl
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import anyio
import anyio.abc
import pytest

from conformance.faults import Rule
from conformance.images import Seed
from conformance.memory import Place
from conformance.messages import Answer, Request, digest_of
from conformance.registry import App
from conformance.tokens import TokenService
from tests import ends
from tests.ends import Ran, Virtual, document, held, started, tags, virtual
from tests.thinning import thinned

USER, PASSWORD = "robot", "correct-horse-battery"
DAY = 86_400

# The plan.

TIMES = {"once": 1, "three": 3, "ever": None}


class Blow:
    """A fault that strikes on its first occasion, on three, or on all."""

    def __init__(self, times: int | None) -> None:
        self.times = times
        self.occasions = 0

    def strikes(self) -> bool:
        """Count an occasion; return whether the fault strikes."""
        self.occasions += 1
        return self.times is None or self.occasions <= self.times


Strike = Callable[["Scene", Blow], None]


class Case(NamedTuple):
    """A cell: its name is SIDE-WHERE-WHAT-TIMES; `recovers`: the run itself is to end well."""

    name: str
    world: str
    strike: Strike
    recovers: bool

    @property
    def parts(self) -> tuple[str, str, str, str]:
        side, where, *what, times = self.name.split("-")
        return side, where, "-".join(what), times


class Endpoint(NamedTuple):
    """One kind of request: `where` narrows it, `world` is the one in which it is made."""

    side: str
    name: str
    method: str
    kind: str
    where: Callable[[Request], bool] = lambda request: True
    world: str = "cold"


def is_mount(request: Request) -> bool:
    return bool(request.parameter("mount")) and request.parameter("from") != request.repository


def is_start(request: Request) -> bool:
    return not is_mount(request)


def is_digest(request: Request) -> bool:
    return ":" in request.reference


def is_tag(request: Request) -> bool:
    return not is_digest(request)


ENDPOINTS = [
    Endpoint("source", "token", "GET", "token"),
    Endpoint("source", "listing", "GET", "tag_list"),
    Endpoint("source", "manifest", "GET", "manifest", is_tag),
    Endpoint("source", "child", "GET", "manifest", is_digest),
    Endpoint("source", "referrers", "GET", "referrers"),
    Endpoint("source", "blob", "GET", "blob"),
    Endpoint("source", "head", "HEAD", "manifest", world="warm"),
    Endpoint("source", "staged", "GET", "blob", world="two"),
    Endpoint("target", "token", "GET", "token"),
    Endpoint("target", "listing", "GET", "tag_list"),
    Endpoint("target", "head", "HEAD", "manifest", lambda request: request.reference == "v2"),
    Endpoint("target", "look", "HEAD", "blob"),
    Endpoint("target", "start", "POST", "upload_start", is_start),
    Endpoint("target", "mount", "POST", "upload_start", is_mount),
    Endpoint("target", "body", "PUT", "upload"),
    Endpoint("target", "child", "PUT", "manifest", is_digest),
    Endpoint("target", "manifest", "PUT", "manifest", is_tag),
    Endpoint("target", "warm", "HEAD", "manifest", world="warm"),
    Endpoint("target", "staged", "PUT", "upload", world="two"),
]

Verbs = dict[str, Callable[[Rule], Rule]]

# What a program that repeats gets over, when it happens once.
PASSING: Verbs = {
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
LASTING: Verbs = {
    "401_bare": lambda rule: rule.status(401),
    "403": lambda rule: rule.status(403),
    "elsewhere": lambda rule: rule.redirect("http://elsewhere.test"),
}
OF_ANSWERS: Verbs = {
    "reset_body": lambda rule: rule.drop(20, of="response", reset=True),
    "stall_body": lambda rule: rule.stall(20, of="response"),
    "drip": lambda rule: rule.throttle(10),
    "truncated": lambda rule: rule.truncate(20),
    "truncated_chunked": lambda rule: rule.truncate(20, "chunked"),
    "corrupt": lambda rule: rule.corrupt(20),
    "long": lambda rule: rule.lie("Content-Length"),
}
OF_BODIES: Verbs = {
    "reset_body": lambda rule: rule.drop(20, of="request", reset=True),
    "stall_body": lambda rule: rule.stall(20, of="request"),
    "drip": lambda rule: rule.throttle(100, of="request"),
}
# A body that is damaged on its way under a tag is stored as what it is: nobody can know before the
# answer names it.
OF_UPLOADS: Verbs = {
    "corrupt": lambda rule: rule.corrupt(20, of="request"),
    "forgotten": lambda rule: rule.forget(),
}
WITH_DIGEST: Verbs = {"digest": lambda rule: rule.lie("Docker-Content-Digest")}
OF_STARTS: Verbs = {
    "location": lambda rule: rule.lie(
        headers={"Location": "http://elsewhere.test/v2/x/blobs/uploads/1"}
    ),
    "no_location": lambda rule: rule.lie(headers={"Location": None}),
    "location_https": lambda rule: rule.lie(headers={"Location": "https://169.254.169.254/latest"}),
}
REFUSED: Verbs = {
    "400_invalid": lambda rule: rule.status(400, "MANIFEST_INVALID"),
    "400_blob_unknown": lambda rule: rule.status(400, "MANIFEST_BLOB_UNKNOWN"),
    "404_blob_unknown": lambda rule: rule.status(404, "MANIFEST_BLOB_UNKNOWN"),
    "413": lambda rule: rule.status(413, "SIZE_INVALID"),
    "422": lambda rule: rule.status(422),
}
GONE: Verbs = {"404": lambda rule: rule.status(404, "BLOB_UNKNOWN")}
# What no registry means.
ODD: Verbs = {
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
    "length": lambda rule: rule.lie("Content-Length"),
}
TYPE: Verbs = {
    "type": lambda rule: rule.lie("Content-Type"),
    "no_type": lambda rule: rule.lie(headers={"Content-Type": None}),
}
NO_DIGEST: Verbs = {"no_digest": lambda rule: rule.lie(headers={"Docker-Content-Digest": None})}


def verbs_at(method: str, kind: str) -> Verbs:
    """Return what may go wrong with a kind of request."""
    groups = [
        (PASSING | LASTING, True),
        (OF_ANSWERS, method == "GET"),
        (OF_BODIES, method == "PUT"),
        (OF_UPLOADS, kind == "upload"),
        (WITH_DIGEST, kind in ("manifest", "upload")),
        (OF_STARTS, kind == "upload_start"),
        (REFUSED, (method, kind) == ("PUT", "manifest")),
        (GONE, kind in ("blob", "manifest", "referrers", "upload_start")),
        (ODD, True),
        (TYPE, method == "GET"),
        (NO_DIGEST, kind in ("manifest", "blob", "upload")),
    ]
    return {name: verb for verbs, is_here in groups if is_here for name, verb in verbs.items()}


def cases() -> Iterator[Case]:
    """Give every cell."""
    for endpoint in ENDPOINTS:
        where = f"{endpoint.side}-{endpoint.name}"
        for name, verb in verbs_at(endpoint.method, endpoint.kind).items():
            passes = ["once"] if name in PASSING else []
            yield from often(f"{where}-{name}", endpoint.world, ruled(endpoint, verb), passes)
        if endpoint.kind != "token":
            # A token that ends at its first use costs the one login that a request may repeat.
            passes = [] if where == "source-listing" else ["once"]
            yield from often(f"{where}-revoked", endpoint.world, revoked(endpoint), passes)
    for times in TIMES:
        yield from other_cases(times)


def often(name: str, world: str, strike: Strike, passes: list[str]) -> Iterator[Case]:
    for times in TIMES:
        yield Case(f"{name}-{times}", world, strike, times in passes)


def other_cases(times: str) -> Iterator[Case]:
    """Give the cells of faults of no exchange."""
    is_once = times == "once"
    yield Case(f"target-every-mount_refused-{times}", "cold", mounts_refused, True)
    yield Case(f"target-every-blob_lost-{times}", "cold", blobs_lost, False)
    for side in ("source", "target"):
        for how in ("refused", "silent"):
            name = f"{side}-connect-{how}-{times}"
            yield Case(name, "cold", unreachable(side, how), is_once)
        yield Case(f"{side}-connect-tls-{times}", "https", unreachable(side, "tls"), False)
    for how in ("refused", "silent"):
        for request in ("source GET blob", "target PUT upload", "target PUT manifest"):
            side, _, what = request.partition(" ")
            name = f"{side}-{what.replace(' ', '_')}-outage_{how}-{times}"
            yield Case(name, "cold", outage(side, how, what), False)
    for call in ("write", "read", "open", "replace", "mkdir"):
        yield Case(f"disk-stage_{call}-full-{times}", "large", staging_fails(call), call != "read")
    for call in ("open", "write"):
        yield Case(f"disk-state_{call}-full-{times}", "cold", state_fails(call), True)
    yield Case(f"disk-state_write-warm-{times}", "warm", state_fails("write"), True)
    jumps = {"day": DAY, "decade": 3652 * DAY, "back_day": -DAY, "back_decade": -3652 * DAY}
    for jump, seconds in jumps.items():
        for when, world in (("between", "warm"), ("amid", "cold"), ("amid", "warm")):
            name = f"clock-{world}_{when}-{jump}-{times}"
            yield Case(name, world, clock_jumps(seconds, when), True)


# What strikes: each arranges it, for as long as the run lasts.


def ruled(endpoint: Endpoint, verb: Callable[[Rule], Rule]) -> Strike:
    """Let a verb strike an endpoint."""

    def strike(scene: Scene, blow: Blow) -> None:
        faults = scene.app(endpoint.side).faults
        # Not the bare request that is challenged.
        who = None if endpoint.kind == "token" else {"Authorization": "*"}
        rule = faults.on(endpoint.method, endpoint.kind, header=who, where=endpoint.where)
        verb(rule if blow.times is None else rule.first(blow.times))
        blow.occasions = 1  # it is the rule that knows whether it has struck

    return strike


def revoked(endpoint: Endpoint) -> Strike:
    """Let every token of a side end when an endpoint is asked."""

    def strike(scene: Scene, blow: Blow) -> None:
        app = scene.app(endpoint.side)

        def intercept(request: Request) -> Answer | None:
            is_it = (request.method, request.kind) == (endpoint.method, endpoint.kind)
            if not is_it or not endpoint.where(request):
                return None
            if blow.times is None or blow.occasions < blow.times:
                blow.occasions += request.header("authorization") != ""
                app.auth.revoke()
            return None

        app.intercept = intercept

    return strike


def mounts_refused(scene: Scene, blow: Blow) -> None:
    app = scene.app("target")

    def intercept(request: Request) -> Answer | None:
        blow.occasions += request.kind == "upload_start" and is_mount(request)
        app.mounts = blow.times is not None and blow.occasions > blow.times
        return None

    app.intercept = intercept


def blobs_lost(scene: Scene, blow: Blow) -> None:
    """Let the target lose a blob of each manifest that it is about to get."""
    app = scene.app("target")

    def intercept(request: Request) -> Answer | None:
        if (request.method, request.kind) == ("PUT", "manifest"):
            blobs = app.repositories[request.repository].blobs
            if blobs and blow.strikes():
                blobs.pop(sorted(blobs)[blow.occasions % len(blobs)])
        return None

    app.intercept = intercept


def unreachable(side: str, how: str) -> Strike:
    """Refuse connections, or let their handshakes fail."""

    def strike(scene: Scene, blow: Blow) -> None:
        world, host = scene.world, scene.places[side].host
        plain_connect, plain_start_tls = world.connect, world.start_tls

        async def connect(name: str, port: int) -> Any:
            if how != "tls" and name == host and blow.strikes():
                if how == "silent":
                    await anyio.sleep_forever()
                raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            return await plain_connect(name, port)

        async def start_tls(below: Any, context: object, name: str) -> Any:
            if how == "tls" and name == host and blow.strikes():
                raise ssl.SSLError(1, "bad certificate")
            return await plain_start_tls(below, context, name)

        scene.replace(world, "connect", connect)
        scene.replace(world, "start_tls", start_tls)

    return strike


def outage(side: str, how: Any, what: str) -> Strike:
    """Let a registry go away when its first request of a kind comes, for ever or for a while."""

    def strike(scene: Scene, blow: Blow) -> None:
        place, came = scene.places[side], anyio.Event()

        def intercept(request: Request) -> Answer | None:
            if f"{request.method} {request.kind}" == what:
                blow.occasions += 1
                came.set()
            return None

        async def go_away() -> None:
            await came.wait()
            async with place.outage(how, (blow.times or DAY) * 5.0):
                pass

        place.app.intercept = intercept
        scene.tasks.start_soon(go_away)
        scene.during.callback(place.recover)
        scene.during.callback(place.reset_connections)  # nothing that was under way arrives later

    return strike


# The name of a file for staged blobs, or of its folder.
STAGED = re.compile("sha256|[0-9a-f]{64}")


def staging_fails(call: str) -> Strike:
    """Fill or break the disk below staged blobs, by what the system tells of their files.

    `write` and `read` fail in the kernel, because the descriptor is of another device or cannot be
    read; the others fail by themselves.
    """

    def strike(scene: Scene, blow: Blow) -> None:
        name = "open" if call in ("write", "read") else call
        plain = getattr(os, name)

        def strikes(path: Any) -> bool:
            return bool(STAGED.search(os.fsdecode(path))) and blow.strikes()

        def failing(path: Any, *rest: Any, **more: Any) -> Any:
            if strikes(path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "blobs")
            return plain(path, *rest, **more)

        def opened(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            descriptor: int = plain(path, flags, *rest, **more)
            reads = flags & (os.O_WRONLY | os.O_RDWR) == os.O_RDONLY
            if reads == (call == "read") and strikes(path):
                other = plain(path if reads else "/dev/full", os.O_WRONLY)
                os.dup2(other, descriptor, inheritable=False)
                os.close(other)
            return descriptor

        scene.replace(os, name, opened if call in ("write", "read") else failing)

    return strike


def state_fails(call: str) -> Strike:
    """Let the state's file fail as on a full or broken disk: when opened or written."""
    plain = sqlite3.connect

    def strike(scene: Scene, blow: Blow) -> None:
        def fail() -> None:
            if blow.strikes():
                raise sqlite3.OperationalError("database or disk is full")

        class Full(sqlite3.Connection):
            def execute(self, statement: str, *rest: Any) -> Any:
                if statement.startswith(("INSERT", "REPLACE", "UPDATE", "DELETE")):
                    fail()
                return super().execute(statement, *rest)

            def executemany(self, statement: str, *rest: Any) -> Any:
                fail()
                return super().executemany(statement, *rest)

        def connect(*given: Any, **more: Any) -> Any:
            if call == "open":
                fail()
                return plain(*given, **more)
            return plain(*given, factory=Full, **more)

        scene.replace(sqlite3, "connect", connect)

    return strike


def clock_jumps(seconds: float, when: str) -> Strike:
    """Let the time of day jump: between two runs, or in the middle of one, there or there and back."""

    def strike(scene: Scene, blow: Blow) -> None:
        jumped = 0.0

        def intercept(request: Request) -> Answer | None:
            nonlocal jumped
            if when == "amid" and request.method in ("POST", "PUT"):
                jumped = seconds if blow.strikes() else 0.0
            return None

        if when == "between":
            jumped, blow.occasions = seconds, 1
        scene.app("target").intercept = intercept
        scene.replace(scene.world, "wall", lambda: Virtual.wall() + jumped)

    return strike


# The world of a cell.

# What is told where a referrer is not found: that it is not there, or that nobody here knows of
# referrers.
LEFT_OUT = ("is listed as a referrer of", "no artifacts found")


class Scene:
    """Two or three registries that want tokens, what the source holds, what the targets held
    before.
    """

    tasks: anyio.abc.TaskGroup  # what happens while the fault lasts
    during: contextlib.ExitStack  # what is to be undone when it is over

    def __init__(self, world: Virtual, kind: str, home: Path) -> None:
        self.world, self.home = world, home
        self.is_left_out = False  # the referrer
        self.targets = ["target", "second"] if kind in ("two", "large") else ["target"]
        scheme = "https" if kind == "https" else "http"
        self.places: dict[str, Place] = {}
        for name in ("source", *self.targets):
            auth = TokenService(
                {USER: PASSWORD}, expires_in=DAY, lifetime=DAY, now=anyio.current_time
            )
            self.places[name] = world.listen(App(auth=auth), f"{name}.test", scheme=scheme)
        self.elsewhere = world.registry("elsewhere.test", referrers_api=False)
        self._load(1_100_000 if kind == "large" else 70_000)  # too large to be staged in memory
        self._write(head_first=kind == "warm")

    def _load(self, least: int) -> None:
        seed = Seed(7)
        base, *own = seed.layer(least), *(seed.layer(least + 10_000 + n) for n in range(4))
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
            image.load_into(self.app("source"), repository, tag)
        self.signature = seed.artifact(self.images["app", "v2"])
        self.signature.load_into(self.app("source"), "app")
        self.old = {("app", "v2"): Seed(5).image(sizes=(50,))}
        for name in self.targets:
            self.old["app", "v2"].load_into(self.app(name), "app", "v2")
            self.app(name).add_blob("app", own[2])  # for a look that finds something

    def _write(self, *, head_first: bool) -> None:
        login = {"auth_type": "basic", "credentials": {"username": USER, "password": PASSWORD}}
        registries = {name: {"url": place.url, **login} for name, place in self.places.items()}
        registries["source"]["head_first"] = head_first
        mappings = [{"from": name, "tags": tags("v*")} for name in ("app", "lib")]
        text = document(registries, *mappings, defaults={"artifacts": {"enabled": True}})
        (self.home / "mirror.yaml").write_text(text)

    def app(self, name: str) -> App:
        app = self.places[name].app
        assert isinstance(app, App)
        return app

    def replace(self, owner: Any, name: str, by: Any) -> None:
        """Replace something for as long as the fault lasts."""
        self.during.enter_context(mock.patch.object(owner, name, by))

    async def run(self) -> Ran:
        file = str(self.home / "mirror.yaml")
        with anyio.fail_after(6 * 3600):
            ran = await self.world.run("sync", "--json", "-vv", "-c", file)
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
        for repository in ("app", "lib"):
            self.images[repository, "v1"].load_into(self.app("source"), repository, "v1")

    @contextlib.asynccontextmanager
    async def under(self, case: Case) -> AsyncIterator[None]:
        """Let the fault strike for as long as the block runs, and assert that it did."""
        blow = Blow(TIMES[case.parts[3]])
        async with anyio.create_task_group() as self.tasks:
            with contextlib.ExitStack() as self.during:
                case.strike(self, blow)
                yield
            self.tasks.cancel_scope.cancel()
        self.world.check()
        assert blow.occasions, "there was no occasion"
        for place in (*self.places.values(), self.elsewhere):
            place.app.intercept = None
            place.app.faults.clear()
        self.app("target").mounts = True

    # What has to hold.

    def check_secrets(self, ran: Ran) -> None:
        """No password and no token is told or kept, or shown to a stranger."""
        files = [path for path in self.home.rglob("*") if path.is_file()]
        kept = [path.read_bytes() for path in files if path.name != "mirror.yaml"]
        told = b"\n".join([ran.out.encode(), ran.err.encode(), *kept])
        login = base64.b64encode(f"{USER}:{PASSWORD}".encode())
        for secret in (PASSWORD.encode(), login, b"token-1.", b"refresh-"):
            assert secret not in told, f"{secret!r} is told or kept"
        for entry in self.elsewhere.app.journal.entries:
            assert not entry.headers.get("authorization"), f"{entry} carries a credential"

    def check(self, ran: Ran, *, lossy: bool) -> None:
        """Raise AssertionError when anything is wrong at a target or with what is told."""
        assert "INTERNAL_ERROR" not in ran.out + ran.err, ran.err
        assert "Traceback" not in ran.err, ran.err
        for name in self.targets:
            self._check_target(self.app(name), lossy=lossy)
        for each in ran.images:
            where, _, tag = str(each["target"]).rpartition(":")
            host, _, repository = where.partition("/")
            if each["status"] == "failed":
                assert each["error"]["message"]
                assert any(f"{where}:{tag}" in line for line in ran.failed), ran.err
                continue
            image, place = self.images[repository, tag], self.places[host.partition(".")[0]]
            assert place.app.tags(repository)[tag] == image.top, each
            assert lossy or held(place, repository, image), each
        assert (ran.status == 0) == (not ran.failed and bool(ran.images)), (ran.status, ran.err)
        assert ran.images or ran.err.strip()

    def _check_target(self, app: App, *, lossy: bool) -> None:
        assert app.repositories.keys() <= {"app", "lib"}
        for repository, content in app.repositories.items():
            for digest in content.blobs:
                body = app.blob(repository, digest) or b""
                assert digest_of(body, digest.partition(":")[0]) == digest
            for digest, manifest in content.manifests.items():
                assert digest_of(manifest.body) == digest
                blobs = {each["digest"] for each in manifest.blobs}
                assert lossy or blobs <= content.blobs.keys(), "an incomplete image"
                children = {each["digest"] for each in manifest.children}
                assert children <= content.manifests.keys(), "an incomplete index"
            for tag, digest in app.tags(repository).items():
                known = [images.get((repository, tag)) for images in (self.images, self.old)]
                is_known = digest in [each.top for each in known if each]
                assert tag.startswith("sha256-") or is_known, (repository, tag)

    async def converge(self) -> None:
        """The next run completes the rest, the one after it finds nothing to do."""
        again = await self.run()
        assert (again.status, again.failed) == (0, []), again.err
        for name in self.targets:
            for (repository, tag), image in self.images.items():
                assert held(self.places[name], repository, image), (name, repository, tag)
                assert self.app(name).tags(repository)[tag] == image.top
            # One that was listed and not there is left out with a warning, and looked for again
            # when a look is due.
            is_there = self.app(name).manifest("app", self.signature.top)
            assert self.is_left_out or is_there, "the referrer is there"
        written = self.written()
        last = await self.run()
        assert {each["status"] for each in last.images} == {"skipped"}
        assert self.written() == written

    def written(self) -> int:
        """Count what was asked to be changed so far."""
        return sum(place.journal.count("PUT POST") for place in self.places.values())


# What follows from an exchange that went wrong: what was learnt by it is asked, or tried, again.
PROVOKED = [
    "known_blob_asked",
    "blob_before_session",
    "second_session",
    "refused_login_again",
    "own_manifest_asked",  # children, when the registry says that one of them is unknown
]


def provoked_by(case: Case) -> list[str]:
    """Return what the audit excuses in a cell."""
    _, where, what, _ = case.parts
    if what == "blob_lost":  # brought again when a manifest that names it was refused
        again = ["blob_pulled_twice", "blob_uploaded_twice", "manifest_put_twice"]
        return [*PROVOKED, *again, "manifest_names_absent", "content_missing"]
    if what == "204":  # a registry that says so of a blob that it did not store
        return [*PROVOKED, "manifest_names_absent"]
    # Once for the disk and once for all targets; and a body that goes to a registry whose connections
    # have just broken is in no journal.
    is_pulled_twice = where.startswith("stage_") or what == "outage_refused"
    return [*PROVOKED, "blob_pulled_twice"] if is_pulled_twice else PROVOKED


PARAMS = [pytest.param(case, id=case.name) for case in cases()]
CELLS = thinned(
    PARAMS,
    lambda values: [values[0].parts[0], values[0].parts[2]],  # which fault on which side
    lambda values: ["-".join(values[0].parts[:2])],  # where
    lambda values: [values[0].parts[3]],  # how often
)


@pytest.mark.virtual_time
@pytest.mark.parametrize("case", CELLS)
async def test_the_outcome_is_right_or_told_and_the_next_run_completes_it(case, tmp_path):
    ends._provoked.update(provoked_by(case))
    # The dice show one number, never so low that a registry is asked all the time.
    chance = 0.3 + 0.6 * Random(zlib.crc32(case.name.encode())).random()
    is_lossy = "blob_lost" in case.name
    async with virtual(chance) as world:
        scene = Scene(world, case.world, tmp_path)
        if case.world == "warm":
            await scene.warm()
        async with scene.under(case):
            ran = await scene.run()
        scene.check(ran, lossy=is_lossy)
        assert not case.recovers or "failed" not in ran.statuses(), ran.err
        if is_lossy:  # a registry that loses what it holds is believed until it says so
            for (repository, _), image in scene.images.items():
                image.load_into(scene.app("target"), repository)
        await scene.converge()


@pytest.mark.process
def test_a_full_disk_costs_time_and_fails_nothing(serve, tmp_path):
    """A limit on the size of files stands in for the disk: the kernel refuses the write."""
    source, one, two = serve(), serve(), serve()
    image = Seed(1).image(sizes=(3_000_000, 2_000_000, 900, 1000, 1100))
    names = ["app", *(f"repository-{number}" for number in range(8))]
    for name in names:
        image.load_into(source.app, name, "v1")
    file = tmp_path / "mirror.yaml"
    mappings = [{"from": name, "tags": tags("v1")} for name in names]
    file.write_text(document({"source": source, "one": one, "two": two}, *mappings))

    def run(**options: Any) -> Ran:
        with started("sync", "-c", str(file), **options) as process:
            out, err = process.communicate(timeout=60)
        return Ran(process.returncode, out, err)

    ran = run(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)))
    assert ran.status == 0, ran.err
    assert ran.err.count("be staged") == 1
    assert "no state" in ran.err
    assert "Traceback" not in ran.err
    assert all(held(target, name, image) for target in (one, two) for name in names)
    assert not list((tmp_path / ".regsync").rglob("*.partial"))
    again = run()
    assert (again.status, again.out) == (0, "")
    assert "warning: the state" not in again.err
