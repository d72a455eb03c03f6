"""Who waits for whom, for how long, and what runs find that were killed or have a rival.

Registries and the program share one loop on a clock that jumps, so that a day costs nothing. What requests
say is in test_requests, how outages and rates are waited for in files of their own.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections import Counter
from datetime import datetime, timezone

import anyio
import pytest

from conformance.images import Image, Seed
from conformance.memory import Link
from conformance.messages import Answer, Request, digest_of, error
from conformance.registry import App
from conformance.tokens import TokenService
from tests.ends import Virtual, document, held, load_numbered, only, run_regsync, started, tags
from tests.mirrors import Mirror, asked

LARGE = 70_000  # bytes of a layer
MIB = 1 << 20
ALL = {"from": "app", "tags": tags("*")}


def largest(image: Image) -> str:
    """Return the digest of the largest blob."""
    return max(image.blobs, key=lambda digest: len(image.blobs[digest]))


def put_at(place, repository: str | None = None) -> list[float]:
    """Return when manifests were put, in seconds since the registry was first asked."""
    began = place.journal.entries[0].time
    puts = place.journal.matching("PUT", "manifest", repository, status=201)
    return [each.time - began for each in puts]


# A slow or rationed registry holds back nobody who has to do with others.


async def from_both(world, hard, easy) -> tuple[list[float], list[float]]:
    """Sync a repository from each of two sources; return when the manifests of the easy one were put, and
    those of the hard one.
    """
    target = world.registry("target.test")
    ran = await world.sync(
        {"source": hard, "easy": easy, "target": target},
        {"from": "hard", "tags": tags("*"), "targets": ["target"]},
        {"from": "easy", "tags": tags("*"), "source": "easy", "targets": ["target"]},
    )
    assert (ran.status, ran.failed) == (0, [])
    return put_at(target, "easy"), put_at(target, "hard")


@pytest.mark.parametrize("how", ["slow", "rationed"])
async def test_a_source_that_gives_little_stalls_nobody_who_reads_elsewhere(world, how):
    """Images of the hard source were found first and hold as many slots as there are, and yet."""
    slow = Link(bandwidth=2000) if how == "slow" else Link()
    hard, easy = world.registry("hard.test", down=slow), world.registry("easy.test")
    seed = Seed(61)
    for number in range(4):
        seed.image(sizes=(LARGE,)).load_into(hard.app, "hard", f"v{number}")
        seed.image(sizes=(LARGE,)).load_into(easy.app, "easy", f"v{number}")
    if how == "rationed":
        hard.app.faults.on("GET", "blob").first(8).status(429, retry_after=60)
    easily, hardly = await from_both(world, hard, easy)
    assert max(easily) < 10 < 59 < max(hardly)


async def test_nobody_waits_to_learn_of_a_target_while_the_first_source_pauses(world):
    """The first small blob that is to go to a target may teach something about it."""
    hard, easy = world.registry("hard.test"), world.registry("easy.test")
    seed = Seed(61)
    seed.image(sizes=(LARGE, LARGE)).load_into(hard.app, "hard", "v0")
    seed.image(sizes=(900,)).load_into(hard.app, "hard", "v1")
    for number in range(4):
        seed.image(sizes=(900,)).load_into(easy.app, "easy", f"v{number}")
    # First large blobs, which begin the pause; then small ones, which wait for its end; then the others.
    hard.app.faults.on("GET", "blob").first(3).status(429, retry_after=60)
    hard.app.faults.on("GET", "manifest", reference="v1").delay(2)
    easy.app.faults.on("GET", "tag_list").delay(4)
    easily, hardly = await from_both(world, hard, easy)
    assert max(easily) < 10 < 59 < min(hardly)


@pytest.mark.parametrize("how", ["slow", "failing"])
async def test_a_target_in_trouble_holds_back_no_other(world, tmp_path, how):
    source, well = world.registry("source.test"), world.registry("well.test")
    ill = world.registry("ill.test", up=Link(bandwidth=5000) if how == "slow" else Link())
    seed = Seed(61)
    images = [seed.image(sizes=(LARGE, 1_100_000)) for _ in range(2)]
    for number, image in enumerate(images):
        image.load_into(source.app, "app", f"v{number}")
    if how == "failing":
        ill.app.faults.on("POST PUT").status(503)
    ends = {"source": source, "ill": ill, "well": well}
    ran = await world.sync(ends, ALL, **{"global": {"cache_dir": str(tmp_path)}})
    assert ran.status == (0 if how == "slow" else 1)
    assert all(held(well, "app", image) for image in images)
    assert max(put_at(well)) < 10
    # One read of the source serves both.
    source.journal.matching("GET", "blob").exactly(6)
    if how == "slow":
        assert min(put_at(ill)) > 100


async def test_the_first_upload_starts_before_the_last_tag_is_discovered(world):
    far = Link(latency=0.05)
    source, target = (
        world.registry(f"{name}.test", up=far, down=far) for name in ("source", "target")
    )
    seed = Seed(61)
    for number in range(80):
        seed.image(sizes=(900,)).load_into(source.app, "app", f"v{number}")
    ran = await world.sync({"source": source, "target": target}, ALL)
    assert (ran.status, len(ran.images)) == (0, 80)
    first = min(each.begun for each in target.journal.matching("POST", "upload_start"))
    asked_later = [
        each for each in source.journal.matching("GET", "manifest") if each.begun > first
    ]
    assert len(asked_later) > 16


async def test_the_tags_of_a_listing_that_comes_late_are_looked_up_as_many_at_once_as_any(world):
    """Those who have looked up the tags of the other listing have gone by then."""
    far = Link(latency=1.0)
    source, target = world.registry("source.test", up=far), world.registry("target.test")
    seed = Seed(61)
    for name in ("early", "late"):
        for number in range(30):
            seed.image(sizes=(900,)).load_into(source.app, name, f"v{number}")
    source.app.faults.on("GET", "tag_list", repository="late").first().status(429, retry_after=60)
    mappings = ({"from": name, "tags": tags("*")} for name in ("early", "late"))
    ran = await world.sync({"source": source, "target": target}, *mappings)
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 60)
    assert 60 < ran.seconds < 75


async def test_both_ends_are_asked_at_once(mirror):
    image = mirror.push("v1")
    image.load_into(mirror.target.app, "app", "v1")

    async def intercept(request: Request) -> Answer | None:
        await anyio.sleep(5.0)
        return None

    mirror.source.app.intercept = mirror.target.app.intercept = intercept
    ran = await mirror.sync({"from": "app", "tags": tags("v1"), "artifacts": {"enabled": False}})
    assert (ran.statuses(), ran.seconds) == (["skipped"], pytest.approx(5.0, abs=0.1))


# Who goes first.


async def test_the_first_upload_start_of_a_repository_is_alone(mirror):
    """Where a first upload makes the repository, another that comes at the same time may be refused."""
    images = [
        mirror.push(f"v{number}", mirror.seed.image(sizes=(LARGE, LARGE))) for number in range(2)
    ]
    starts = list[float]()
    made = anyio.Event()

    async def intercept(request: Request) -> Answer | None:
        if request.kind != "upload_start":
            return None
        starts.append(anyio.current_time())
        if len(starts) == 1:
            await anyio.sleep(1)
            made.set()
        return None if made.is_set() else error(404, "NAME_UNKNOWN", "not yet")

    mirror.target.app.intercept = intercept
    assert (await mirror.sync(ALL)).statuses() == ["synced", "synced"]
    assert all(held(mirror.target, "app", image) for image in images)
    # The others go at the same time, as soon as it is answered.
    assert len(starts) == 6
    assert max(starts) - starts[0] < 1.5
    assert mirror.target.journal.count("POST", "upload_start", status=404) == 0


async def test_an_index_waits_for_its_slowest_child_at_every_level(mirror):
    """What an index names is there before it is put, at each level (I2)."""
    leaves = [mirror.seed.image(sizes=(900,)) for _ in range(2)]
    inner = mirror.seed.index(leaves, with_platforms=False)
    middle = mirror.seed.index([inner, mirror.seed.image()], with_platforms=False)
    top = mirror.push("v1", mirror.seed.index([mirror.seed.image(), middle], with_platforms=False))
    for slow in (leaves[1], inner, middle):
        mirror.target.app.faults.on("PUT", "manifest", reference=slow.top).delay(5)
    assert (await mirror.sync(ALL)).status == 0
    assert held(mirror.target, "app", top)
    # The registry takes no index whose parts are not there: none was refused.
    mirror.target.journal.matching("PUT", "manifest").exactly(7)


# A token that ends while others use it.


async def test_a_403_to_a_token_that_was_replaced_meanwhile_is_asked_again(world):
    """Two requests carry one token. It is refused to the first, which gets another; the answer to the
    second comes later, and says nothing of the new one.
    """
    tokens = TokenService(now=anyio.current_time)
    source = world.registry("source.test", auth=tokens)
    seed = Seed(61)
    for number in range(2):
        seed.image().load_into(source.app, "app", f"v{number}")
    with_token = {"authorization": "Bearer *"}
    early, late = (
        source.app.faults.on("GET", "manifest", reference=tag, header=with_token).first()
        for tag in ("v0", "v1")
    )
    realm = "http://source.test/token"
    early.delay(1).challenge(realm=realm, service=tokens.service, error="invalid_token")
    late.delay(2).status(403)
    ran = await world.sync({"source": source, "target": world.registry("target.test")}, ALL)
    assert (ran.status, ran.failed) == (0, [])
    sent = source.journal.matching("GET", "manifest", reference="v1", header=with_token)
    assert [each.authorization.value.partition(".")[0] for each in sent] == ["token-1", "token-2"]
    assert source.journal.count(status=403) == 1
    assert source.journal.count("GET", "token") == 2


async def test_a_body_read_while_its_token_ended_is_sent_with_the_next_to_the_same_session(world):
    """The first piece of the layer comes after the config was refused its token. Nothing of the layer was
    sent with that token, so it is not read again, and its session is not given up.
    """
    tokens = TokenService({"captain": "secret"}, now=anyio.current_time)
    source, target = world.registry("source.test"), world.registry("target.test", auth=tokens)
    image = Seed(61).image(sizes=(700_000,)).load_into(source.app, "app", "v1")
    layer = largest(image)
    source.app.faults.on("GET", "blob", reference=layer).delay(10, after=0)
    revoked = list[str | None]()

    def intercept(request: Request) -> Answer | None:
        if (request.method, request.kind) == ("PUT", "upload") and not revoked:
            revoked.append(request.parameter("digest"))
            tokens.revoke()
        return None

    target.app.intercept = intercept
    login = {"auth_type": "basic", "credentials": {"username": "captain", "password": "secret"}}
    ran = await world.sync({"source": source, "target": {"url": target.url, **login}}, ALL)
    assert (ran.status, ran.failed) == (0, [])
    assert held(target, "app", image)
    assert layer not in revoked
    source.journal.matching("GET", "blob").exactly(2)
    sent = only(target.journal.matching("PUT", "upload", query={"digest": layer}))
    assert sent.authorization.value.partition(".")[0] == "token-2"
    target.journal.matching("GET", "upload").none()
    # The config gets a second session: its body was refused.
    target.journal.matching("POST", "upload_start").exactly(3)


# The smallest permits: nothing hangs or is sent twice.


def fewest(permits: int, slots: int, **places) -> dict:
    """Return a configuration's settings that give each registry so many permits, and all so many slots."""
    ends = {name: {"url": place.url, "max_concurrent": permits} for name, place in places.items()}
    return {"registries": ends, "global": {"max_concurrent_transfers": slots}}


def sent(place) -> Counter[str]:
    """Count how often each blob's bytes were taken, by digest."""
    return Counter(
        each.query["digest"] for each in place.journal.matching("PUT", "upload", status=201)
    )


@pytest.mark.provokes("source_written")
@pytest.mark.parametrize("slots", [1, 50])
async def test_mappings_within_one_host_end_and_send_nothing(mirror, slots):
    place = mirror.source
    base = mirror.seed.layer(LARGE)
    for number in range(4):
        mirror.push("v1", mirror.seed.image(layers=[base, mirror.seed.layer(LARGE)]), f"a-{number}")
    mappings = [
        {"from": f"a-{number}", "to": f"b-{(number + 1) % 4}", "tags": tags("v1")}
        for number in range(4)
    ]
    ran = await mirror.sync(*mappings, **fewest(2, slots, source=place, target=place))
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 4)
    place.journal.matching("GET PUT", "blob upload").none()
    place.journal.matching("POST", "upload_start", status=201).exactly(12)


@pytest.mark.provokes("source_written")
async def test_two_registries_with_one_permit_each_that_take_chunks_fill_each_other(world):
    """Each chunk enters its registry by itself, while its source is open."""
    places = {
        name: world.listen(App(), f"{name}.azurecr.io", scheme="https")
        for name in ("source", "target")
    }
    seed = Seed(61)
    for name, place in places.items():
        place.app.faults.on("POST", "upload_start").delay(1.0)  # both go on at the same moment
        for number in range(2):
            layer = seed.blob(100) + bytes(20 * MIB)
            seed.image(layers=[layer]).load_into(place.app, name, f"v{number}")
    mappings = [
        {"from": name, "tags": tags("v*"), "source": name, "targets": [other]}
        for name, other in zip(places, reversed(places), strict=True)
    ]
    settings = fewest(1, 50, **places)
    for each in settings["registries"].values():
        each["auth_type"] = "anonymous"
    ran = await world.sync(settings.pop("registries"), *mappings, **settings)
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 4), ran.err
    for place in places.values():
        place.journal.matching("PATCH", "upload", status=202).exactly(4)


# Who waits for a turn has decided before: the 202 of a refused mount is its session all the same.
@pytest.mark.provokes("mount_refused_again")
@pytest.mark.parametrize(
    ("slots", "mounts"), [(1, True), (3, True), (50, True), (3, False), (50, False)]
)
async def test_eight_images_that_need_each_others_layers_end(world, tmp_path, slots, mounts):
    mirror = Mirror(world, tmp_path, of={"target": {"mounts": mounts}})
    layers = [mirror.seed.layer(LARGE) for _ in range(8)]
    images = dict[str, Image]()
    for number in range(8):
        # Each has three of the others' layers, in another order.
        chosen = [layers[(number * step + offset) % 8] for step, offset in ((1, 0), (3, 1), (5, 4))]
        name = f"app-{number}"
        images[name] = mirror.push("v1", Seed(number).image(layers=chosen), name)
    few = fewest(2, slots, source=mirror.source, target=mirror.target)
    ran = await mirror.sync(*({"from": name, "tags": tags("v1")} for name in images), **few)
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 8)
    assert all(held(mirror.target, name, image) for name, image in images.items())
    if mounts:
        assert max(sent(mirror.target).values()) == 1
        mirror.source.journal.matching("GET", "blob").exactly(8 + 8)
    else:
        puts = mirror.target.journal.matching("PUT", "upload", status=201)
        assert len({(each.repository, each.query["digest"]) for each in puts}) == len(puts)


async def test_what_an_image_has_not_brought_goes_to_the_oldest_that_waits(mirror):
    """Else the second and the third image would wait for each other: in one repository the third comes
    after the first, which does not find the blob at its source.
    """
    lost, other = (mirror.seed.layer(LARGE) for _ in range(2))
    layers = {"one": [lost], "two": [lost, other], "three": [lost, other]}
    for number, (name, its_layers) in enumerate(layers.items()):
        mirror.push(f"v{number}", mirror.seed.image(layers=its_layers), name)
        mirror.source.app.faults.on("GET", "manifest", repository=name).delay(number)
    read = mirror.source.app.faults.on("GET", "blob", repository="one", reference=digest_of(lost))
    read.delay(5).status(404)
    names = {"one": "first", "two": "second", "three": "first"}
    ran = await mirror.sync(
        *({"from": name, "to": to, "tags": tags("*")} for name, to in names.items())
    )
    assert ran.statuses() == ["failed", "synced", "synced"], ran.err
    assert max(sent(mirror.target).values()) == 1


# How long one registry is waited for. Pauses are the shortest that the dice allow.


@pytest.mark.parametrize("chance", [0.0])
@pytest.mark.parametrize(
    ("strike", "outcome", "seconds"),
    [
        (
            lambda source, _: source.on("GET", "manifest").first().status(429, retry_after=30),
            "synced",
            30,
        ),
        (
            lambda _, target: (
                target.on("HEAD", "manifest")
                .first()
                .status(429, retry_after=datetime.fromtimestamp(Virtual.wall() + 45, timezone.utc))
            ),
            "synced",
            45,
        ),
        (lambda source, _: source.on().first(9).status(429, retry_after=60), "synced", 540),
        (lambda source, _: source.on().status(429, retry_after=60), "failed", 660),
        (lambda source, _: source.on("GET", "manifest").first().delay(59), "synced", 59),
        (lambda source, _: source.on("GET", "manifest").first().delay(61), "synced", 60),
        (lambda source, _: source.on("GET", "blob").nth(2).stall(after=1000), "synced", 60),
        # It takes connections and says nothing: one contact of a minute, and 15 s for a probe.
        (lambda source, _: source.on().stall(), "failed", 75),
        # All blobs wait at once for one attempt that finds out whether the repository accepts uploads.
        (lambda _, target: target.on("POST", "upload_start").first(4).delay(100), "synced", 120),
        # Nobody waits longer for the end of a session.
        (
            lambda source, target: (
                source.on("GET", "blob").status(404),
                target.on("DELETE", "upload").stall(),
            ),
            "failed",
            60,
        ),
    ],
    ids=[
        "Retry-After in seconds",
        "Retry-After as a date",
        "nine minutes of 429s",
        "429s without end",
        "an answer in time",
        "an answer that is late",
        "a body that stalls",
        "a silent registry",
        "a target that is silent at first",
        "a session that does not end",
    ],
)
async def test_a_copy_waits_so_long_for(world, strike, outcome, seconds):
    source, target = world.registry("source.test"), world.registry("target.test")
    image = Seed(41).image(sizes=(200_000, 901, 902)).load_into(source.app, "app", "v1")
    strike(source.app.faults, target.app.faults)
    ran = await world.copy(source, target)
    assert ran.statuses() == [outcome], ran.err
    assert ran.seconds == pytest.approx(seconds, abs=0.6)
    assert held(target, "app", image) is (outcome == "synced")


@pytest.mark.parametrize("chance", [0.999])
async def test_pauses_double_between_server_errors(mirror):
    mirror.push("v1")
    mirror.source.app.faults.on(kind="manifest").status(500)
    ran = await mirror.sync({"from": "app", "tags": tags("v1")})
    assert ran.status == 2
    pauses = mirror.source.journal.matching(kind="manifest").gaps()
    assert [round(gap, 1) for gap in pauses] == [0.5, 1.0, 2.0, 4.0]
    assert only(ran.images)["error"]["retries"] == 4


async def test_slow_bandwidth_is_not_a_stall(world):
    """4 KiB a second for more than five minutes: slower than any time-out lets an idle body be."""
    source = world.registry("source.test", down=Link(bandwidth=4096))
    target = world.registry("target.test", up=Link(bandwidth=4096))
    image = Seed(41).image(sizes=(320 * 4096,)).load_into(source.app, "app", "v1")
    ran = await world.copy(source, target)
    assert (ran.status, ran.err) == (0, "")
    assert held(target, "app", image)
    assert 320 < ran.seconds < 380, "what is read is sent at the same time"
    assert (source.journal.count("GET", "blob"), target.journal.count("PUT", "upload")) == (2, 2)


@pytest.mark.slow
@pytest.mark.provokes("blob_pulled_twice")  # less than one piece came each time
async def test_a_line_much_slower_than_1_kib_a_second_is_given_up(world):
    """What has come is gone on with, but ten times five minutes are less than a mebibyte."""
    source = world.registry("source.test", down=Link(bandwidth=300))
    target = world.registry("target.test")
    Seed(41).image(sizes=(4_000_000,)).load_into(source.app, "app", "v1")
    ran = await world.copy(source, target)
    assert ran.statuses() == ["failed"]
    # 300 bytes a second, and what has come with the head.
    assert re.search(r"only 9\d\d\d\d bytes .* in 300 s", ran.err)
    assert source.journal.count("GET", "blob") <= 2 * 10, "as often as anything is repeated"
    assert target.app.tags("app") == {}


# A run that is killed, and two at once.


def clear(*places) -> None:
    for place in places:
        place.wait_until_idle()
        place.journal.clear()


@pytest.mark.process
@pytest.mark.slow
def test_a_kill_before_the_last_manifest_loses_nothing(tmp_path, serve):
    """All that was answered half a second before is in the state, though the run never ended. (Kills at any
    byte are in test_killed.)
    """
    source, target = serve(), serve()
    image = Seed(32).image(sizes=(LARGE, LARGE, LARGE)).load_into(source.app, "app", "v1")
    file = tmp_path / "mirror.yaml"
    file.write_text(
        document({"source": source, "target": target}, {"from": "app", "tags": tags("v1")})
    )
    running = list[subprocess.Popen[str]]()

    def kill(request: Request) -> Answer | None:
        if (request.method, request.kind) != ("PUT", "manifest"):
            return None
        time.sleep(0.7)
        running[0].kill()
        return error(503, "UNAVAILABLE", "too late")

    target.app.intercept = kill
    running.append(started("sync", "-q", "-c", str(file)))
    running[0].communicate()
    assert running[0].returncode == -signal.SIGKILL
    target.app.intercept = None
    assert sum(sent(target).values()) == 4
    clear(source, target)
    assert run_regsync("sync", "--json", "-q", "-c", str(file)).statuses() == ["synced"]
    assert held(target, "app", image)
    assert asked(source) == {"GET manifest": 1}
    assert asked(target) == {"HEAD manifest": 1, "PUT manifest": 1}


@pytest.mark.process
@pytest.mark.slow
def test_a_second_run_beside_the_first_says_so_and_spoils_nothing(tmp_path, serve):
    source, target = serve(), serve()
    images = load_numbered(source, 8)
    file = str(tmp_path / "mirror.yaml")
    (tmp_path / "mirror.yaml").write_text(document({"source": source, "target": target}, ALL))
    held_up = source.app.faults.on("GET", "blob").first()
    held_up.stall(after=100)
    first = started("sync", "--json", "-q", "-c", file)
    held_up.wait()
    second = started("sync", "--json", "--no-progress", "-c", file)
    _, told = second.communicate()
    assert (second.returncode, told.count("another run")) == (0, 1)
    held_up.release()
    _, complaints = first.communicate()
    assert (first.returncode, complaints) == (0, "")
    assert all(held(target, "app", image) for image in images)
    # The first one's state was saved, whatever the second did.
    clear(source, target)
    assert {*run_regsync("sync", "--json", "-q", "-c", file).statuses()} == {"skipped"}
    assert asked(target) == {"HEAD manifest": 8}
