"""The request discipline where time matters: the age of the state, providers by their names, who
waits for whom.

Registries and the program share one loop on a clock that jumps (`ends.virtual`), so that a day
costs nothing and the order of things is the same each time. What needs no clock is in
test_discipline.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from conformance.content.images import Image, Part, Seed, compose
from conformance.messages import Answer, Request, Response, digest_of, error
from conformance.registry.app import App
from conformance.registry.tokens import TokenService
from conformance.server.memory import Link, Place
from tests.ends import Ran, Virtual, document, held, tags

LARGE = 70_000
HOUR = 3600.0


@pytest.fixture
def seed() -> Seed:
    return Seed(61)


async def sync(
    world: Virtual,
    directory: Path,
    registries: Mapping[str, Any],
    *mappings: Mapping[str, Any],
    **top: Any,
) -> Ran:
    """Run mappings from a file, so that there is state beside it."""
    file = directory / "mirror.yaml"
    file.write_text(document(registries, *mappings, **top))
    return await world.run("sync", "--json", "-q", "-c", str(file))


def clear(*places: Place) -> None:
    for place in places:
        place.journal.clear()


# How old the state is.


@pytest.mark.parametrize(
    ("ttl", "hours", "warm"), [("12h", 11, True), ("12h", 13, False), (0, 10_000, True)]
)
async def test_what_is_older_than_cache_ttl_is_asked_again(world, seed, tmp_path, ttl, hours, warm):
    source, target = world.registry("source.test"), world.registry("target.test")
    for number in range(2):
        seed.image().load_into(source.app, "app", tag=f"v{number}")
    ends, mapping = {"source": source, "target": target}, {"from": "app", "tags": tags("*")}
    assert (
        await sync(world, tmp_path, ends, mapping, **{"global": {"cache_ttl": ttl}})
    ).status == 0
    await anyio.sleep(hours * HOUR)
    clear(source, target)
    ran = await sync(world, tmp_path, ends, mapping, **{"global": {"cache_ttl": ttl}})
    assert ran.statuses() == ["skipped"] * 2
    how = "HEAD manifest" if warm else "GET manifest"
    assert source.journal.summary() == {"GET tag_list": 1, how: 2}
    lists = {} if warm else {"GET tag_list": 1}
    assert target.journal.summary() == {**lists, "HEAD manifest": 2}


async def test_an_unchanged_tag_keeps_its_snapshot_alive(world, seed, tmp_path):
    """Each run that finds a tag unchanged confirms it: only what no run has seen for `cache_ttl` is
    old.
    """
    source, target = world.registry("source.test"), world.registry("target.test")
    seed.image().load_into(source.app, "app", tag="v1")
    ends, mapping = {"source": source, "target": target}, {"from": "app", "tags": tags("v1")}
    await sync(world, tmp_path, ends, mapping)
    for _ in range(5):
        await anyio.sleep(8 * HOUR)
        clear(source, target)
        await sync(world, tmp_path, ends, mapping)
        assert source.journal.summary() == target.journal.summary() == {"HEAD manifest": 1}


# Whether the state is believed (docs/design.md section 7, "Vouching").


def artifact(seed: Seed, *layers: bytes) -> Image:
    """Make an image of which no registry looks at the layers: its config is none that it knows."""
    config = Part("application/vnd.acme.config.v1+json", seed.blob(60))
    return compose(config, [Part("application/vnd.acme.part", each) for each in layers])


@pytest.mark.parametrize(("minutes", "asked"), [(20, 0), (40, 1)])
async def test_a_weak_entry_of_an_artifact_is_checked_when_it_is_not_fresh(
    world, seed, tmp_path, minutes, asked
):
    """A registry that looks at no blobs lost one: nothing but a question can tell."""
    source, target = (
        world.registry("source.test"),
        world.registry("target.test", require_blobs=False),
    )
    lost = seed.blob(LARGE)
    artifact(seed, lost).load_into(source.app, "app", tag="v1")
    then = artifact(seed, lost, seed.blob(LARGE)).load_into(source.app, "app", tag="v2")
    ends = {"source": source, "target": target}
    assert (await sync(world, tmp_path, ends, {"from": "app", "tags": tags("v1")})).status == 0
    digest = next(digest for digest, data in then.blobs.items() if data == lost)
    if asked:
        del target.app.repositories["app"].blobs[digest]
    await anyio.sleep(60 * minutes)
    clear(source, target)
    assert (await sync(world, tmp_path, ends, {"from": "app", "tags": tags("v2")})).status == 0
    assert held(target, "app", then)
    assert any(digest in each.target for each in target.journal.entries) == bool(asked)
    source.journal.matching("GET", "blob", reference=digest).exactly(asked)


@pytest.mark.parametrize("how", ["tag gone", "repository gone"])
async def test_an_answer_against_the_state_makes_it_ask_before_it_believes(
    world, seed, tmp_path, how
):
    source, target = world.registry("source.test"), world.registry("target.test")
    image = seed.image(sizes=(LARGE, LARGE)).load_into(source.app, "app", tag="v1")
    ends, mapping = {"source": source, "target": target}, {"from": "app", "tags": tags("v1")}
    assert (await sync(world, tmp_path, ends, mapping)).status == 0
    held_there = target.app.repositories["app"]
    if how == "repository gone":
        del target.app.repositories["app"]
    else:
        held_there.tags.clear()
        held_there.manifests.clear()
        del held_there.blobs[image.document["layers"][0]["digest"]]
    await anyio.sleep(40 * 60)
    clear(source, target)
    assert (await sync(world, tmp_path, ends, mapping)).statuses() == ["synced"]
    assert held(target, "app", image)
    # Nothing was believed that was not there: the manifest was right at once, and only what
    # lacked was sent.
    target.journal.matching("PUT", "manifest").exactly(1)
    source.journal.matching("GET", "blob").exactly(3 if how == "repository gone" else 1)


async def bring_beside_what_is_old(
    world: Virtual, directory: Path, image: Image, then: Image
) -> tuple[Place, Place]:
    """Copy an image; five hours later copy another one beside it, which is all that the journals of
    the two registries have.
    """
    source, target = world.registry("source.test"), world.registry("target.test")
    image.load_into(source.app, "app", tag="v1")
    ends = {"source": source, "target": target}
    first, second = ({"from": "app", "tags": tags(name)} for name in ("v1", "v2"))
    assert (await sync(world, directory, ends, first)).status == 0
    await anyio.sleep(5 * HOUR)
    then.load_into(source.app, "app", tag="v2")
    clear(source, target)
    # One look-up at a time, so that v1 has vouched when v2 is brought.
    ran = await sync(world, directory, ends, first, second)
    assert (ran.status, sorted(ran.statuses())) == (0, ["skipped", "synced"])
    assert held(target, "app", then)
    return source, target


async def test_entries_vouched_for_are_believed_however_old(world, seed, tmp_path):
    """A manifest that the target's tag answers with in this run vouches for the blobs that it
    names.
    """
    base = seed.blob(LARGE)
    then = artifact(seed, base, seed.blob(LARGE))
    source, target = await bring_beside_what_is_old(world, tmp_path, artifact(seed, base), then)
    source.journal.matching("GET", "blob", reference=digest_of(base)).none()
    target.journal.matching("PUT", "upload", query={"digest": digest_of(base)}).none()


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_a_vouching_index_vouches_for_what_its_children_name(world, seed, tmp_path, depth):
    """The target's tag answers with an index; the blobs are named by manifests below it."""
    base = seed.blob(LARGE)
    image = artifact(seed, base)
    for _ in range(depth):
        image = seed.index([image], with_platforms=False)
    then = artifact(seed, base, seed.blob(LARGE))
    source, target = await bring_beside_what_is_old(world, tmp_path, image, then)
    source.journal.matching("GET", "blob", reference=digest_of(base)).none()
    # It is not asked for, but for the one question that teaches what a POST answers (rule 11).
    asked = [each for each in target.journal.entries if digest_of(base) in each.target]
    assert [(each.method, each.status) for each in asked] == [("POST", 201)]


async def test_the_state_does_not_grow_with_images_that_are_gone(world, seed, tmp_path):
    """A mirror of a nightly build runs for years: what nobody confirmed for `cache_ttl` goes."""
    sizes = list[int]()
    source, target = world.registry("source.test"), world.registry("target.test")
    seed.image().load_into(source.app, "app", tag="stays")
    ends = {"source": source, "target": target}
    mapping = {"from": "app", "tags": tags("nightly", "stays")}
    for _ in range(12):
        layers = [seed.blob(100) for _ in range(60)]
        seed.image(layers=layers).load_into(source.app, "app", tag="nightly")
        # Within 12 hours of the last run, so that what is still there stays confirmed.
        for _ in range(2):
            await anyio.sleep(11 * HOUR)
            clear(source, target)
            ran = await sync(world, tmp_path, ends, mapping, **{"global": {"cache_ttl": "12h"}})
            assert (ran.status, ran.failed) == (0, [])
        # What is still there is known.
        assert source.journal.summary() == target.journal.summary() == {"HEAD manifest": 2}
        files = [each for each in (tmp_path / ".regsync").rglob("*") if each.is_file()]
        sizes.append(sum(each.stat().st_size for each in files))
    # The twelfth image left no more than the fourth: nothing of the first ones is kept.
    assert sizes[-1] <= 1.5 * sizes[3], sizes


# Providers by their names.


async def test_docker_hub_is_asked_by_head_for_tags_that_the_target_lists(world, seed, tmp_path):
    """A GET counts against the quota, a HEAD does not (docs/protocol-facts.md section 7.2), also
    without state.
    """
    hub, target = world.persona("dockerhub"), world.registry("target.test")
    images = {f"v{number}": seed.index() for number in range(3)}
    for tag, image in images.items():
        image.load_into(hub, "library/alpine", tag=tag)
        if tag != "v2":
            image.load_into(target.app, "alpine", tag=tag)
    text = document({"source": "docker.io", "t": target}, {"from": "alpine", "tags": tags("*")})
    ran = await world.run("sync", "--json", "-q", "-c", "-", stdin=text)
    assert (ran.status, ran.statuses()) == (0, ["skipped", "skipped", "synced"])
    hub.journal.matching("HEAD", "manifest", status=200).exactly(2)
    hub.journal.matching("GET", "manifest", reference="v0").none()
    hub.journal.matching("GET", "manifest", reference="v1").none()
    # The new one: its index and four children.
    hub.journal.matching("GET", "manifest", status=200).exactly(5)


def with_digests(request: Request, answer: Answer) -> Answer:
    """List as the Google registries do: with the digest that each tag names (docs/protocol-facts.md
    section 5.5).
    """
    if request.kind != "tag_list" or not isinstance(answer, Response) or answer.status != 200:
        return answer
    listing = json.loads(b"".join(map(bytes, answer.pieces())))
    named: dict[str, list[str]] = {}
    for tag in listing["tags"]:
        if tag != "left-out":
            named.setdefault(
                REGISTRIES[request.header("host")].tags(request.repository)[tag], []
            ).append(tag)
    listing["manifest"] = {digest: {"tag": found} for digest, found in named.items()}
    headers = [(name, value) for name, value in answer.headers if name.lower() != "content-length"]
    return Response(200, headers, json.dumps(listing).encode())


REGISTRIES: dict[str, App] = {}


def google(world: Virtual, host: str) -> Place:
    registry = REGISTRIES[host] = App()
    registry.amend = with_digests
    return world.listen(registry, host, scheme="https")


async def test_a_listing_with_digests_replaces_the_heads_of_both_sides(world, seed, tmp_path):
    source, target = google(world, "europe-docker.pkg.dev"), google(world, "us-docker.pkg.dev")
    for number in range(4):
        seed.image().load_into(source.app, "p/app", tag=f"v{number}")
    seed.image().load_into(source.app, "p/app", tag="left-out")
    ends = {"source": "europe-docker.pkg.dev", "t": "us-docker.pkg.dev"}
    ran = await world.sync(ends, {"from": "p/app", "tags": tags("*")})
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 5)
    source.journal.matching("GET", "tag_list", query={"n": "10000"}).exactly(1)
    source.journal.matching("HEAD", "manifest").none()
    source.journal.matching("GET", "manifest").exactly(5)
    clear(source, target)
    ran = await world.sync(ends, {"from": "p/app", "tags": tags("*")})
    assert ran.statuses() == ["skipped"] * 5
    # A tag that the map leaves out is asked for by itself.
    target.journal.matching("HEAD", "manifest", reference="left-out").exactly(1)
    assert target.journal.summary() == {"GET tag_list": 1, "HEAD manifest": 1}
    assert source.journal.summary() == {"GET tag_list": 1, "GET manifest": 1}
    source.journal.matching("GET", "manifest", reference="left-out").exactly(1)


# Who waits for whom.


async def test_the_first_upload_starts_before_the_last_tag_is_discovered(world, seed):
    source = world.registry("source.test", up=Link(latency=0.05), down=Link(latency=0.05))
    target = world.registry("target.test", up=Link(latency=0.05), down=Link(latency=0.05))
    base = seed.layer(LARGE)
    for number in range(80):
        seed.image(layers=[base, seed.layer(900)]).load_into(source.app, "app", tag=f"v{number}")
    ran = await world.sync({"source": source, "target": target}, {"from": "app", "tags": tags("*")})
    assert (ran.status, len(ran.images)) == (0, 80)
    first = min(each.begun for each in target.journal.matching("POST", "upload_start"))
    asked = [each.begun for each in source.journal.matching("GET", "manifest")]
    assert sum(begun > first for begun in asked) > 16


async def sync_from_both(
    world: Virtual, hard: Place, easy: Place, target: Place
) -> tuple[list[float], list[float]]:
    """Sync a repository from each of two sources; return after how many seconds the manifests of the
    easy one were put, and those of the hard one.
    """
    began = anyio.current_time()
    ran = await world.sync(
        {"source": hard, "easy": easy, "target": target},
        {"from": "hard", "tags": tags("*"), "targets": ["target"]},
        {"from": "easy", "tags": tags("*"), "source": "easy", "targets": ["target"]},
    )
    assert (ran.status, ran.failed) == (0, [])
    easily = [each.time - began for each in target.journal.matching("PUT", "manifest", "easy")]
    hardly = [each.time - began for each in target.journal.matching("PUT", "manifest", "hard")]
    return easily, hardly


@pytest.mark.parametrize("how", ["slow", "rationed"])
async def test_a_source_that_gives_little_stalls_nobody_who_reads_elsewhere(world, seed, how):
    """Images of the hard source were found first and hold as many slots as there are, and yet."""
    slow = Link(bandwidth=2000) if how == "slow" else Link()
    hard, easy = world.registry("hard.test", down=slow), world.registry("easy.test")
    target = world.registry("target.test")
    for number in range(4):
        seed.image(sizes=(LARGE,)).load_into(hard.app, "hard", tag=f"v{number}")
        seed.image(sizes=(LARGE,)).load_into(easy.app, "easy", tag=f"v{number}")
    if how == "rationed":
        wait = {"Retry-After": "60"}
        hard.app.faults.on("GET", "blob").first(8).status(
            429, error="TOOMANYREQUESTS", headers=wait
        )
    easily, hardly = await sync_from_both(world, hard, easy, target)
    assert max(easily) < 10 < 59 < max(hardly)


async def test_a_source_that_pauses_before_the_first_small_blob_stalls_nobody_who_reads_elsewhere(
    world, seed
):
    """The first small blob that is to go to a target may teach something about it: nobody waits
    for that while its source has asked for a minute's pause.
    """
    hard, easy = world.registry("hard.test"), world.registry("easy.test")
    target = world.registry("target.test")
    config = Part("application/vnd.acme.config.v1+json", seed.blob(LARGE))
    large = compose(config, [Part("application/vnd.acme.part", seed.blob(LARGE))])
    large.load_into(hard.app, "hard", tag="v0")
    seed.image(sizes=(900,)).load_into(hard.app, "hard", tag="v1")
    for number in range(4):
        seed.image(sizes=(900,)).load_into(easy.app, "easy", tag=f"v{number}")
    # First large blobs, which begin the pause; then small ones, which have to wait for its end;
    # then all that could go.
    hard.app.faults.on("GET", "blob").first(2).status(429, retry_after=60)
    hard.app.faults.on("GET", "manifest", reference="v1").delay(2)
    easy.app.faults.on("GET", "tag_list").delay(4)
    easily, hardly = await sync_from_both(world, hard, easy, target)
    assert max(easily) < 10 < 59 < min(hardly)


async def test_a_target_that_does_not_answer_takes_its_time_out_for_all_blobs_at_once(world, seed):
    """One attempt finds out whether a repository accepts uploads; then nobody waits in a row."""
    source, target = world.registry("source.test"), world.registry("target.test")
    image = seed.image(sizes=(900, 901, 902, 903, 904))
    image.load_into(source.app, "app", tag="v1")
    target.app.faults.on("POST", "upload_start").first(7).delay(100)
    began = anyio.current_time()
    ran = await world.copy(source, target)
    assert (ran.status, ran.failed) == (0, [])
    assert anyio.current_time() - began < 3 * 60


async def test_a_403_to_a_token_that_was_replaced_meanwhile_is_asked_again(world, seed):
    """Two requests carry one token. It is refused to the first, which gets another; the answer to
    the second comes later, and says nothing of the new one.
    """
    tokens = TokenService(now=anyio.current_time)
    source = world.registry("source.test", auth=tokens)
    target = world.registry("target.test")
    for number in range(2):
        seed.image().load_into(source.app, "app", tag=f"v{number}")
    with_token = {"authorization": "Bearer *"}
    early = source.app.faults.on("GET", "manifest", reference="v0", header=with_token)
    early.first(1).delay(1).challenge(
        realm="http://source.test/token", service=tokens.service, error="invalid_token"
    )
    late = source.app.faults.on("GET", "manifest", reference="v1", header=with_token)
    late.first(1).delay(2).status(403)
    ran = await world.sync({"source": source, "target": target}, {"from": "app", "tags": tags("*")})
    assert (ran.status, ran.failed, ran.statuses()) == (0, [], ["synced"] * 2)
    source.journal.matching(status=403).exactly(1)
    asked = source.journal.matching("GET", "manifest", reference="v1", header=with_token)
    assert [each.authorization[1].partition(".")[0] for each in asked] == ["token-1", "token-2"]
    source.journal.matching("GET", "token").exactly(2)


async def test_a_body_read_while_its_token_ended_is_sent_with_the_next_to_the_same_session(
    world, seed
):
    """The first piece of the layer comes after the config was refused its token. Nothing of the
    layer was sent with that token, so it is not read again, and its session is not given up.
    """
    tokens = TokenService({"captain": "secret"}, now=anyio.current_time)
    source, target = world.registry("source.test"), world.registry("target.test", auth=tokens)
    image = seed.image(sizes=(700_000,)).load_into(source.app, "app", tag="v1")
    layer = max(image.blobs, key=lambda digest: len(image.blobs[digest]))
    source.app.faults.on("GET", "blob", reference=layer).delay(10, after=0)
    revoked: list[str] = []

    def intercept(request: Request) -> Answer | None:
        if (request.method, request.kind) == ("PUT", "upload") and not revoked:
            revoked.append(request.parameter("digest") or "")
            tokens.revoke()
        return None

    target.app.intercept = intercept
    login = {"auth_type": "basic", "credentials": {"username": "captain", "password": "secret"}}
    ends = {"source": source, "target": {"url": target.url, **login}}
    ran = await world.sync(ends, {"from": "app", "tags": tags("v1")})
    assert (ran.status, ran.failed) == (0, [])
    assert held(target, "app", image)
    assert layer not in revoked
    source.journal.matching("GET", "blob").exactly(2)
    layer_puts = target.journal.matching("PUT", "upload", query={"digest": layer}).exactly(1)
    assert [each.authorization[1].partition(".")[0] for each in layer_puts] == ["token-2"]
    target.journal.matching("GET", "upload").exactly(0)
    # The config gets a second session: its body was refused.
    target.journal.matching("POST", "upload_start").exactly(3)


@pytest.mark.parametrize("slow", [0, 1])
async def test_an_index_waits_for_its_slowest_child_at_every_level(world, seed, slow):
    """What an index names is there before it is put, at each level (I2)."""
    source, target = world.registry("source.test"), world.registry("target.test")
    leaves = [seed.image(sizes=(900,)) for _ in range(2)]
    inner = seed.index(leaves, with_platforms=False)
    middle = seed.index([inner, seed.image(sizes=(900,))], with_platforms=False)
    top = seed.index([seed.image(sizes=(900,)), middle], with_platforms=False)
    top.load_into(source.app, "app", tag="v1")
    target.app.faults.on("PUT", "manifest", reference=leaves[slow].top).delay(5)
    target.app.faults.on("PUT", "manifest", reference=inner.top).delay(5)
    target.app.faults.on("PUT", "manifest", reference=middle.top).delay(5)
    assert (await world.copy(source, target)).status == 0
    assert held(target, "app", top)
    puts = target.journal.matching("PUT", "manifest")
    puts.exactly(7)
    target.journal.matching("PUT", "manifest", status=201).exactly(7)
    for index, reference in ((inner, inner.top), (middle, middle.top), (top, "v1")):
        put = target.journal.matching("PUT", "manifest", reference=reference).exactly(1)
        for entry in index.document["manifests"]:
            child = target.journal.matching("PUT", "manifest", reference=entry["digest"])
            child.exactly(1).before(put)


@pytest.mark.parametrize("how", ["slow", "failing"])
async def test_a_target_in_trouble_holds_back_no_other(world, seed, tmp_path, how):
    source, well = world.registry("source.test"), world.registry("well.test")
    ill = world.registry("ill.test", up=Link(bandwidth=5000) if how == "slow" else Link())
    images = [seed.image(sizes=(LARGE, 1_100_000)) for _ in range(2)]
    for number, image in enumerate(images):
        image.load_into(source.app, "app", tag=f"v{number}")
    if how == "failing":
        ill.app.faults.on("POST PUT").status(503)
    ends, began = {"source": source, "ill": ill, "well": well}, anyio.current_time()
    ran = await sync(world, tmp_path, ends, {"from": "app", "tags": tags("*")})
    assert ran.status == (0 if how == "slow" else 1)
    assert all(held(well, "app", image) for image in images)
    assert (
        max(each.time - began for each in well.journal.matching("PUT", "manifest", status=201)) < 10
    )
    # One read of the source serves both.
    source.journal.matching("GET", "blob").exactly(6)
    if how == "slow":
        assert min(each.time - began for each in ill.journal.matching("PUT", "manifest")) > 100


async def test_the_first_upload_start_of_a_repository_is_alone(world, tmp_path):
    """Where a first upload makes the repository, another that comes at the same time may be
    refused.
    """
    source, target = world.registry("source.test"), world.registry("target.test")
    seed = Seed(9)
    images = [seed.image(sizes=(LARGE, LARGE)) for _ in range(2)]
    for number, image in enumerate(images):
        image.load_into(source.app, "app", tag=f"v{number}")
    starts: list[float] = []
    made = anyio.Event()

    async def intercept(request: Request) -> Answer | None:
        if request.kind != "upload_start":
            return None
        starts.append(anyio.current_time())
        if len(starts) == 1:
            await anyio.sleep(1)
            made.set()
        return None if made.is_set() else error(404, "NAME_UNKNOWN", "not yet")

    target.app.intercept = intercept
    ends, mapping = {"source": source, "target": target}, {"from": "app", "tags": tags("*")}
    ran = await sync(world, tmp_path, ends, mapping)
    assert ran.statuses() == ["synced", "synced"], ran.err
    assert all(held(target, "app", image) for image in images)
    # The others go at the same time, as soon as it is answered.
    assert len(starts) == 6
    assert max(starts) - starts[0] < 1.5
    assert target.journal.count("POST", "upload_start", status=404) == 0
