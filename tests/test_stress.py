"""Many small syncs at random over registries that fail at random: what holds must hold in all of
them.

Each seed makes registries (which mount or not, page or not), repositories whose images share layers
and children, mappings (several targets, aliases, within one registry, several into one repository),
permits as low as two and images one at a time. Requests are delayed and answered with 5xx, 429,
refused mounts, dropped and cut answers. Then: every image has one outcome, what is synced is whole,
no blob was stored twice, nothing was sent that no correct client sends, and the next run,
undisturbed, completes the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from conformance.audit.mistakes import KINDS, audit, latest, report
from conformance.client.copies import fetch_http, identical
from conformance.content.images import Image, Seed
from conformance.messages import Answer, Request, Response, error
from conformance.registry.app import App
from conformance.server.sockets import Server, run_in_thread
from tests.ends import Ran, run_regsync

# A manifest may be asked for by its digest while another tag's answer with the same bytes is under
# way; how a blob comes to its place is decided when its image is promoted, and not again when it may
# start.
NOT_YET = ("manifest_fetched_twice", "blob_pulled_twice", "upload_without_mount")

_Wanted = dict[tuple[int, str, str], Image]


class _Faults:
    """What a registry does wrong, each request only so often."""

    def __init__(self, app: App, random: Random, share: float, pause: float, most: int) -> None:
        self.on = False
        self._random, self._share, self._pause, self._most = random, share, pause, most
        self._seen: Counter[tuple[str, ...]] = Counter()
        app.intercept, app.amend = self._intercept, self._amend

    def _strikes(self, request: Request, share: float, *which: str) -> bool:
        if not self.on or self._random.random() > share:
            return False
        key = (*which, request.method, request.kind, request.repository, request.reference)
        self._seen[key] += 1
        return self._seen[key] <= self._most

    async def _intercept(self, request: Request) -> Answer | None:
        if self.on and self._pause:
            # Not anyio's, which makes no pauses in tests: answers are to come in another order.
            await asyncio.sleep(self._random.random() * self._pause)
        if not self._strikes(request, self._share):
            return None
        if request.parameter("mount") and self._random.random() < 0.5:
            return error(self._random.choice([400, 403, 404, 405]), "UNSUPPORTED", "no mount")
        wait = [("Retry-After", "1")]
        bad: list[Answer] = [
            Response(500),
            Response(502, early=True),
            error(503, "UNAVAILABLE", "ill"),
            b"",
        ]
        return self._random.choice([*bad, error(429, "TOOMANYREQUESTS", "slowly", headers=wait)])

    def _amend(self, request: Request, answer: Answer) -> Answer:
        """Carry out the request and lose its answer, or cut a blob."""
        if not isinstance(answer, Response) or not self._strikes(request, self._share / 2, "lost"):
            return answer
        if request.method == "GET" and request.kind == "blob" and answer.status == 200:
            body = b"".join(map(bytes, answer.pieces()))
            cut = body[: self._random.randrange(len(body) + 1)]
            return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + cut
        return b""


def pool(random: Random, seed: Seed) -> list[Image]:
    """Make images of every shape from few layers, so that much is shared."""
    layers = [
        seed.layer(random.choice([0, 900, 5000, 300_000])) for _ in range(random.randint(2, 7))
    ]
    layers += [seed.layer(1_100_000)] * (random.random() < 0.4)

    def image(architecture: str = "amd64") -> Image:
        chosen = [random.choice(layers) for _ in range(random.randint(0, 5))]
        return seed.image(
            layers=chosen, architecture=architecture, inline_config=random.random() < 0.1
        )

    pool = [image(), image(), seed.artifact(None)]
    for _ in range(random.randint(1, 6)):
        children = [image("amd64"), image("arm64"), *random.sample(pool, random.randint(0, 2))]
        pool.append(
            random.choice([image(), seed.index(children, attestations=random.random() < 0.2)])
        )
    return pool


def _scene(random: Random, pool: list[Image], servers: list[Server]) -> tuple[str, _Wanted]:
    """Fill the sources, write a configuration, and return what the targets shall hold after it."""
    registries: dict[str, dict[str, Any]] = {}
    for each in ("a", "b"):
        for n, server in enumerate(servers):
            permits = {"max_concurrent": random.choice([2, 3])} if random.random() < 0.5 else {}
            registries[f"{each}{n}"] = {
                "url": server.url,
                "head_first": random.random() < 0.2,
                **permits,
            }
    mappings: list[dict[str, Any]] = []
    wanted: _Wanted = {}
    for number in range(random.randint(2, 7)):
        origin, repository = random.randrange(2), f"from/r{number}"
        held = {f"t{number}-{n}": random.choice(pool) for n in range(random.randint(1, 4))}
        for tag, image in held.items():
            image.load_into(_app(servers[origin]), repository, tag=tag)
        for to in random.sample([f"to/r{number}", "to/all", f"x{number}"], random.randint(1, 2)):
            targets = random.sample(range(len(servers)), random.randint(1, len(servers)))
            wanted.update({(n, to, tag): image for n in targets for tag, image in held.items()})
            one = {"from": repository, "to": to, "tags": {"glob": random.choice(["*", [*held]])}}
            one |= {"source": random.choice("ab") + str(origin)}
            mappings.append({**one, "targets": [random.choice("ab") + str(n) for n in targets]})
    for (n, to, tag), image in wanted.items():
        if random.random() < 0.15:
            there = random.choice([image, random.choice(pool)])
            there.load_into(_app(servers[n]), to, tag=random.choice([tag, "other"]))
    limits = {"max_concurrent_transfers": random.choice([1, 2, 50])}
    rest = {"defaults": {"artifacts": {"enabled": False}}, "global": limits}
    return json.dumps({"registries": registries, "mappings": mappings, **rest}), wanted


def _app(server: Server) -> App:
    assert isinstance(server.app, App)
    return server.app


def _run(config: str) -> Ran:
    return run_regsync("sync", "--json", "-q", "-c", "-", stdin=config)


def _whole(server: Server, repository: str, tag: str, image: Image) -> bool:
    expected = {
        digest: body for digest, body in image.contents().items() if digest not in image.absent
    }
    return identical(expected, fetch_http(server.address, repository, tag))


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 3, 7, 10, 12])
def test_whatever_goes_wrong_every_image_ends_once_and_what_is_synced_is_whole(number: int) -> None:
    random = Random(number)
    share, pause = random.choice([0, 0.1, 0.3, 0.6]), random.choice([0, 0.002, 0.01])
    with contextlib.ExitStack() as running:
        servers, faults = [], []
        for _ in range(random.randint(2, 4)):
            app = App(mounts=random.random() < 0.7, page_size=random.choice([None, 2]))
            faults.append(
                _Faults(app, Random(random.random()), share, pause, random.choice([1, 3, 8]))
            )
            servers.append(running.enter_context(run_in_thread(app)))
        config, wanted = _scene(random, pool(random, Seed(number)), servers)
        for each in faults:
            each.on = True
        ran = _run(config)
        for each in faults:
            each.on = False
        sites = {server.url: server.app for server in servers}
        findings = audit(sites, kinds=("protocol", "safety") if share else KINDS, excused=NOT_YET)
        assert not findings, report(findings)

        outcomes = {each["target"]: each for each in ran.images}
        assert len(outcomes) == len(ran.images), "no image has two outcomes"
        failed = [each for each in ran.images if each["status"] == "failed"]
        assert ran.status == (0 if not failed else 2 if len(failed) == len(ran.images) else 1)
        assert share or not failed
        assert "INTERNAL_ERROR" not in {each["error"]["code"] for each in failed}
        names = {key: f"{servers[key[0]].address}/{key[1]}:{key[2]}" for key in wanted}
        if not any(name.endswith(":*") for name in outcomes):
            assert outcomes.keys() == set(names.values())
        for (n, to, tag), image in wanted.items():
            outcome = outcomes.get(names[n, to, tag])
            assert (
                not outcome or outcome["status"] == "failed" or _whole(servers[n], to, tag, image)
            )
        for server in servers:
            stored = server.journal.matching("PUT", "upload", status=201)
            assert (
                max(
                    Counter((each.repository, each.query["digest"]) for each in stored).values(),
                    default=1,
                )
                == 1
            )

        since = latest(sites)
        again = _run(config)
        findings = audit(sites, since=since, excused=NOT_YET)
        assert not findings, report(findings)
        assert (again.status, again.failed) == (0, [])
        assert all(_whole(servers[n], to, tag, image) for (n, to, tag), image in wanted.items())
        for server in servers:
            server.journal.check()
            server.journal.clear()
        assert {each["status"] for each in _run(config).images} == {"skipped"}
        assert not any(
            server.journal.count("POST") + server.journal.count("PUT") for server in servers
        )


def _lose(app: App, repository: str, random: Random) -> None:
    """Let a target lose things as a registry does that keeps to its word: nothing stands whose
    parts are gone.
    """
    held = app.repositories.get(repository)
    what = random.choice(["nothing", "repository", "blobs", "manifests", "tags"])
    if held is None or what == "repository":
        app.repositories.pop(repository, None)
        return
    parts: dict[str, dict[str, Any]] = {
        "blobs": held.blobs,
        "manifests": held.manifests,
        "tags": held.tags,
    }
    for name in [each for each in parts.get(what, {}) if random.random() < 0.4]:
        del parts[what][name]
    while broken := [
        digest
        for digest, manifest in held.manifests.items()
        if any(each["digest"] not in held.manifests for each in manifest.children)
        or any(each["digest"] not in held.blobs and not each.get("urls") for each in manifest.blobs)
    ]:
        for digest in broken:
            del held.manifests[digest]
    for tag in [tag for tag, digest in held.tags.items() if digest not in held.manifests]:
        del held.tags[tag]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(100, 103))
def test_targets_that_lose_things_behind_our_back_converge_in_the_next_run(
    number: int, tmp_path: Path
) -> None:
    """With state from a run under faults, which may have failed in parts (docs/design.md section 7,
    I5).
    """
    random = Random(number)
    share = random.choice([0, 0, 0.1, 0.3])
    with contextlib.ExitStack() as running:
        servers, faults = [], []
        for _ in range(random.randint(2, 4)):
            app = App(mounts=random.random() < 0.7, single_post=random.random() < 0.5)
            faults.append(_Faults(app, Random(random.random()), share, 0, random.choice([1, 3, 8])))
            servers.append(running.enter_context(run_in_thread(app)))
        config, wanted = _scene(random, pool(random, Seed(number)), servers)
        file = tmp_path / "mirror.yaml"
        file.write_text(config)

        def again() -> Ran:
            return run_regsync("sync", "--json", "-q", "-c", str(file))

        for each in faults:
            each.on = True
        ran = again()
        assert share or ran.status == 0
        for each in faults:
            each.on = False
        for _ in range(2):
            for n, to in sorted({(n, to) for n, to, _ in wanted}):
                _lose(_app(servers[n]), to, random)
            ran = again()
            assert (ran.status, ran.failed) == (0, [])
            for (n, to, tag), image in wanted.items():
                assert _whole(servers[n], to, tag, image)
        ran = again()
        assert {*ran.statuses()} == {"skipped"}
        assert ran.totals["bytes"] == 0
