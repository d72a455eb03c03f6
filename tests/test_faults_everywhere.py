"""Every verb, at every endpoint, on both sides: one exchange of a sync goes wrong.

Whatever it is, the run ends; what it calls synced is there byte for byte; what it calls failed has
a line that says why; the target holds nothing that is not what its name says; and the next run,
undisturbed, completes the rest. All of it takes no time: the clock jumps, so that every time-out
and pause is the program's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from conformance.content.images import Seed
from conformance.faults.rules import Rule
from conformance.registry.app import App
from conformance.registry.tokens import TokenService
from conformance.server.memory import Place
from tests.ends import Ran, Virtual, held, tags, virtual
from tests.thinning import Cell, thinned

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.virtual_time,
    # What follows from an exchange that went wrong: what was learnt by it is asked or tried again.
    pytest.mark.provokes("blob_before_session", "second_session", "refused_login_again"),
]

Verb = Callable[[Rule], Rule]
_DAY = 86_400

# Side, method, kind: every request that a sync of two tags makes, and the look for a blob that is
# there.
ENDPOINTS = [
    ("source", "GET", "token"),
    ("source", "GET", "tag_list"),
    ("source", "HEAD", "manifest"),
    ("source", "GET", "manifest"),
    ("source", "GET", "blob"),
    ("target", "GET", "token"),
    ("target", "HEAD", "manifest"),
    ("target", "HEAD", "blob"),
    ("target", "POST", "upload_start"),
    ("target", "PUT", "upload"),
    ("target", "PUT", "manifest"),
]

ANYWHERE: dict[str, Verb] = {
    "status_400": lambda rule: rule.status(400),
    "status_401_without_a_challenge": lambda rule: rule.status(401),
    "status_403": lambda rule: rule.status(403),
    "status_404": lambda rule: rule.status(404),
    "status_416": lambda rule: rule.status(416),
    "status_429": lambda rule: rule.status(429),
    "status_429_and_when_to_come_again": lambda rule: rule.status(429, retry_after=20),
    "status_429_and_nonsense": lambda rule: rule.status(429, retry_after="soon"),
    "status_500_in_html": lambda rule: rule.status(
        500, body=b"<html>", headers={"Content-Type": "text/html"}
    ),
    "status_503_before_the_body": lambda rule: rule.status(503, early=True),
    "status_503_after_all_was_done": lambda rule: rule.status(503, at="answer"),
    "status_200_with_nothing": lambda rule: rule.status(200, body=b""),
    "status_204": lambda rule: rule.status(204),
    "delay": lambda rule: rule.delay(20),
    "delay_of_the_answer": lambda rule: rule.delay(20, at="answer"),
    "delay_in_the_head": lambda rule: rule.delay(20, at="head"),
    "stall": lambda rule: rule.stall(),
    "stall_in_the_head": lambda rule: rule.stall(at="head"),
    "stall_of_the_answer": lambda rule: rule.stall(at="answer"),
    "drop": lambda rule: rule.drop(),
    "drop_by_reset": lambda rule: rule.drop(reset=True),
    "drop_in_the_head": lambda rule: rule.drop(at="head"),
    "drop_of_the_answer": lambda rule: rule.drop(at="answer"),
    "redirect_round": lambda rule: rule.redirect(),
    "redirect_303": lambda rule: rule.redirect(code=303),
    "redirect_to_nowhere": lambda rule: rule.redirect("http://nowhere.test"),
    "redirect_to_no_url": lambda rule: rule.redirect("http://[/", 302),
    "challenge_again": lambda rule: rule.challenge(
        realm="http://source.test/token", service="registry.test", error="invalid_token"
    ),
    "challenge_for_a_foreign_realm": lambda rule: rule.challenge(realm="http://nowhere.test/token"),
    "challenge_that_is_malformed": lambda rule: rule.challenge('Bearer realm="http://[,=,"'),
    "challenge_for_basic": lambda rule: rule.challenge('Basic realm="x"'),
    "raw_garbage": lambda rule: rule.raw(b"SSH-2.0-x\r\n"),
    "raw_headers": lambda rule: rule.raw(b"HTTP/1.1 200 OK\r\n: x\r\n\x00\r\n\r\n"),
    "raw_interim_answer": lambda rule: rule.raw(
        b"HTTP/1.1 103 Early Hints\r\n\r\n", where="before"
    ),
    "raw_second_answer": lambda rule: rule.raw(
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad", where="after"
    ),
}
WITH_ANSWER_BODY: dict[str, Verb] = {
    "drop_in_the_body": lambda rule: rule.drop(20, of="response"),
    "drop_at_the_end_of_the_head": lambda rule: rule.drop(0, of="response"),
    "drop_in_the_body_by_reset": lambda rule: rule.drop(20, of="response", reset=True),
    "delay_in_the_body": lambda rule: rule.delay(20, after=20, of="response"),
    "stall_in_the_body": lambda rule: rule.stall(20, of="response"),
    "throttle": lambda rule: rule.throttle(10),
    "truncate": lambda rule: rule.truncate(20),
    "truncate_chunked": lambda rule: rule.truncate(20, "chunked"),
    "truncate_by_closing": lambda rule: rule.truncate(20, "close"),
    "corrupt": lambda rule: rule.corrupt(20),
    "corrupt_whole": lambda rule: rule.corrupt(whole=True),
}
WITH_BODY: dict[str, Verb] = {
    "drop_in_the_request": lambda rule: rule.drop(20, of="request"),
    "drop_in_the_request_by_reset": lambda rule: rule.drop(20, of="request", reset=True),
    "stall_in_the_request": lambda rule: rule.stall(20, of="request"),
    "delay_in_the_request": lambda rule: rule.delay(20, after=20, of="request"),
    "throttle_the_request": lambda rule: rule.throttle(10, of="request"),
    "corrupt_the_request": lambda rule: rule.corrupt(20, of="request"),
}
# A header of the answer, where it has one that says something.
LIES = {
    ("GET", "manifest"): ("Docker-Content-Digest", "Content-Type", "Content-Length"),
    ("HEAD", "manifest"): ("Docker-Content-Digest", "Content-Type", "Content-Length"),
    ("GET", "blob"): ("Docker-Content-Digest", "Content-Type", "Content-Length"),
    ("HEAD", "blob"): ("Docker-Content-Digest", "Content-Length"),
    ("GET", "tag_list"): ("Content-Length", "Content-Type"),
    ("GET", "token"): ("Content-Length", "Content-Type"),
    ("POST", "upload_start"): ("Location", "Range", "Content-Length"),
    ("PUT", "upload"): ("Docker-Content-Digest", "Location", "Content-Length"),
    ("PUT", "manifest"): ("Docker-Content-Digest", "Location", "Content-Length"),
}
# A registry that calls stored what it did not store, that takes what was damaged on its way, or
# whose list is of other names cannot be found out in the same exchange; the next run does.
BLIND = {
    ("PUT", "manifest", "status_204"),
    ("PUT", "manifest", "corrupt_the_request"),
    ("GET", "tag_list", "corrupt"),
}
_LEFT_OUT = ("Docker-Content-Digest", "Content-Type", "Location")


def _lie(name: str) -> Verb:
    return lambda rule: rule.lie(name)


def _silence(name: str) -> Verb:
    return lambda rule: rule.lie(headers={name: None})


def cases() -> Iterator[Any]:
    for side, method, kind in ENDPOINTS:
        verbs = dict(ANYWHERE)
        if method == "GET":
            verbs |= WITH_ANSWER_BODY
        if method == "PUT":
            verbs |= WITH_BODY
        if kind == "upload":
            verbs["forget"] = lambda rule: rule.forget()
        for name in LIES[method, kind]:
            verbs[f"lie_about_{name}"] = _lie(name)
            if name in _LEFT_OUT:
                verbs[f"lie_without_{name}"] = _silence(name)
        for name, verb in verbs.items():
            for often in ("once", "ever") if name.startswith(LASTING) else ("once",):
                marks = pytest.mark.slow if often == "ever" else ()
                at = f"{side}-{method}-{kind}-{name}"
                yield pytest.param(
                    side, method, kind, name, verb, often, id=f"{at}-{often}", marks=marks
                )


LASTING = (
    "status",
    "stall",
    "drop",
    "redirect",
    "challenge",
    "truncate",
    "corrupt",
    "lie",
    "forget",
)


def parts(cell: Cell) -> Cell:
    """The dimensions of an ordinary run: what is asked where, what goes wrong, how often."""
    side, method, kind, name, _, often = cell
    return side, method, kind, name, often


def sorts(cell: Cell) -> Cell:
    """Every endpoint meets every sort of fault."""
    side, method, kind, name, _, often = cell
    return (side, method, kind), str(name).partition("_")[0], often


CASES = thinned(cases(), parts, sorts)
WHERE = ("side", "method", "kind", "name", "verb", "often")
ONCE, EVER = ([case for case in CASES if case.values[-1] == often] for often in ("once", "ever"))


class Scene:
    """Two registries that want tokens, two tags at the source, and the syncs between them."""

    def __init__(self, world: Virtual) -> None:
        self.world = world
        self.source, self.target = (
            world.registry(
                f"{name}.test", auth=TokenService({"u": "p"}, expires_in=_DAY, lifetime=_DAY)
            )
            for name in ("source", "target")
        )
        self.images = {
            "v1": Seed(3).image(sizes=(400, 900)).load_into(self.source.app, "app", tag="v1"),
            "v2": Seed(4).image(sizes=(70_000,)).load_into(self.source.app, "app", tag="v2"),
        }
        # What the target has of the second tag is old.
        self.old = Seed(5).image(sizes=(50,)).load_into(self.target.app, "app", tag="v2")
        # One blob is there already, for a look that finds something.
        self.known = next(iter(self.images["v1"].blobs))
        assert isinstance(self.target.app, App)
        self.target.app.add_blob("app", self.images["v1"].blobs[self.known])

    def place(self, side: str) -> Place:
        return self.source if side == "source" else self.target

    async def run(self) -> Ran:
        with anyio.fail_after(4 * 3600):
            who = {"auth_type": "basic", "credentials": {"username": "u", "password": "p"}}
            registries = {
                "source": {"url": "http://source.test", "head_first": True, **who},
                "target": {"url": "http://target.test", **who},
            }
            return await self.world.sync(registries, {"from": "app", "tags": tags("v*")})

    def check_target(self, *, any_tag: bool) -> None:
        """Everything at the target is what its name says, and every tag is the source's."""
        app = self.target.app
        assert isinstance(app, App)
        for repository, there in app.repositories.items():
            for digest in there.blobs:
                assert _digest(app.blob(repository, digest) or b"") == digest
            for digest, manifest in there.manifests.items():
                assert _digest(manifest.body) == digest
        right = {(tag, image.top) for tag, image in self.images.items()} | {("v2", self.old.top)}
        assert any_tag or app.tags("app").items() <= right
        assert app.repositories.keys() <= {"app"}

    def check_outcome(self, ran: Ran, *, blind: bool) -> None:
        """What is synced is whole (unless nobody could know); what is not has a line that says why."""
        assert "INTERNAL_ERROR" not in ran.out + ran.err, ran.err
        assert "Traceback" not in ran.err
        self.check_target(any_tag=blind)
        if not ran.images and not blind:
            assert ran.status != 0
            assert ran.err.strip(), "nothing was done, and nothing is said"
            return
        for each in ran.images:
            tag = str(each["target"]).rpartition(":")[2]
            if each["status"] == "failed":
                assert each["error"]["message"]
                assert any(tag in line for line in ran.failed), ran.err
            else:
                assert blind or held(self.target, "app", self.images[tag]), (tag, each)
        assert (ran.status == 0) == (not ran.failed)


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(WHERE, ONCE)
async def test_one_exchange_goes_wrong(
    side: str, method: str, kind: str, name: str, verb: Verb, often: str
) -> None:
    async with virtual() as world:
        scene = Scene(world)
        faults = scene.place(side).app.faults
        # Not the request that is challenged, and of the looks for blobs the one that finds
        # something.
        who = None if kind == "token" else {"Authorization": "*"}
        blob = scene.known if (method, kind) == ("HEAD", "blob") else None
        # Nor is a start struck that asks for what is there: its answer opens no session.
        rule = faults.on(
            method,
            kind,
            reference=blob,
            header=who,
            where=lambda request: request.parameter("mount") != scene.known,
        )
        verb(rule.first())
        ran = await scene.run()
        faults.check()
        scene.check_outcome(ran, blind=(method, kind, name) in BLIND)

        faults.clear()
        again = await scene.run()
        assert (again.status, again.failed) == (0, []), again.err
        assert all(held(scene.target, "app", image) for image in scene.images.values())
        tags_there = scene.target.app.tags("app")
        assert tags_there == {tag: image.top for tag, image in scene.images.items()}


@pytest.mark.parametrize(WHERE, EVER)
async def test_every_exchange_of_a_kind_goes_wrong(
    side: str, method: str, kind: str, name: str, verb: Verb, often: str
) -> None:
    """The program gives up, after a bounded number of requests (of 429s it is a bounded time)."""
    async with virtual() as world:
        scene = Scene(world)
        faults = scene.place(side).app.faults
        verb(faults.on(method, kind))
        ran = await scene.run()
        faults.check()
        scene.check_outcome(ran, blind=(method, kind, name) in BLIND)
        if "429" not in name:
            assert len(faults.rules[0].struck) <= 60, (
                "what does not get better is not asked for ever"
            )

        faults.clear()
        again = await scene.run()
        assert (again.status, again.failed) == (0, []), again.err
        assert all(held(scene.target, "app", image) for image in scene.images.values())
