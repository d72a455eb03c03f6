"""What a path costs where registries refuse, err or forget, and what it must not (docs/design.md, section 6).

What undisturbed runs cost is in test_costs, who waits for whom in test_turns. Rules 1 (no ping, one bare
request), 2 (tokens) and 3 (pages) have their own files. Every run is audited besides (`tests.ends`), so
that no request of a kind that was known to be unnecessary goes unnoticed.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter

import anyio
import pytest

from conformance.images import Image, Part, Seed, compose
from conformance.messages import Answer, Request, Response, digest_of, error
from conformance.registry import App
from conformance.tokens import TokenService
from tests.ends import Ran, document, held, only, tags
from tests.mirrors import WRITES, Mirror, asked, lose_blob
from tests.states import entries

LARGE = 70_000  # bytes of a layer
MIB = 1 << 20
HOUR = 3600.0
V1 = {"from": "app", "tags": tags("v1")}
ALL = {"from": "app", "tags": tags("*")}
WITH_ARTIFACTS = {"artifacts": {"enabled": True}}
LOGIN = {"auth_type": "basic", "credentials": {"username": "me", "password": "secret-word"}}
# A POST for an upload that asks for a mount; where it is from its own repository, whether the blob is there.
MOUNT = {"mount": "*"}
ITSELF = {"mount": "*", "from": "app"}


class Plain(Mirror):
    """A mirror that copies no artifacts unless a test says so."""

    def text(self, *mappings, **top):
        defaults = {"artifacts": {"enabled": False}, **top.pop("defaults", {})}
        return super().text(*mappings, defaults=defaults, **top)

    async def bring(self, *mappings, **top) -> Ran:
        """Run once; all goes well."""
        ran = await self.sync(*mappings, **top)
        assert (ran.status, ran.failed) == (0, []), ran.err
        return ran

    async def moved(self, new: int, **top) -> Image:
        """Copy an image, and let its tag move to one with so many new blobs."""
        self.push("v1", self.seed.image(sizes=(LARGE, LARGE)))
        await self.bring(V1, **top)
        return self.push("v1", self.seed.image(sizes=(900,) * (new - 1)))

    async def change(self, new: int, **top) -> None:
        """Copy an image that has so many new blobs to a repository that the state knows."""
        image = await self.moved(new, **top)
        await self.bring(V1, **top)
        assert held(self.target, "app", image)

    def at_both(self, tag: str, image: Image) -> Image:
        return self.push(tag, image).load_into(self.target.app, "app", tag)


@pytest.fixture
def mirror(world, tmp_path) -> Plain:
    return Plain(world, tmp_path)


def with_target(world, tmp_path, **options) -> Plain:
    """Return a mirror whose target has these options."""
    return Plain(world, tmp_path, of={"target": options})


class Secured(Plain):
    """Registries that want a login. Their journals stay: the audit looks there for the challenge that an
    earlier run was given.
    """

    def __init__(self, world, directory, *names: str, service: str = "registry.test") -> None:
        users = {"me": "secret-word"}
        of = {
            name: {"auth": TokenService(users, service=service, now=anyio.current_time)}
            for name in names
        }
        super().__init__(world, directory, of=of)
        places = {"source": self.source, **self.targets}
        self.registries = {name: {"url": places[name].url, **LOGIN} for name in names}

    def clear(self) -> None:
        pass


def manifests(place) -> Counter[str]:
    """Count the manifests that were asked for: `GET tag`, `HEAD tag`, `GET digest`."""
    entries = place.journal.matching(kind="manifest")
    return Counter(
        f"{each.method} {'digest' if ':' in each.reference else 'tag'}" for each in entries
    )


def blobs(place) -> Counter[str]:
    """Count what was asked about blobs, by method and status: a POST answered 201 is one that is there or
    was mounted.
    """
    kinds = ("blob", "upload", "upload_start")
    return Counter(
        f"{each.method} {each.status}" for each in place.journal.entries if each.kind in kinds
    )


def largest(image: Image) -> str:
    """Return the digest of the largest blob."""
    return max(image.blobs, key=lambda digest: len(image.blobs[digest]))


# A source tag is asked for once a run, whichever mappings want it (rule 4).


def three(*names: str) -> list[dict]:
    return [{"from": "app", "to": to, "tags": tags(*names)} for to in ("one", "two", "three")]


async def test_mappings_share_a_tag_and_one_that_fails_takes_nothing_from_the_others(mirror):
    index = mirror.push(
        "v0", mirror.seed.index(platforms=("linux/amd64", "linux/arm64", "linux/arm"))
    )
    mappings = three("v*")
    mappings[0]["platforms"] = ["linux/s390x"]
    mappings[1]["platforms"] = ["linux/amd64"]
    ran = await mirror.sync(*mappings, defaults=WITH_ARTIFACTS)
    assert sorted(ran.statuses()) == ["failed", "synced", "synced"]
    assert manifests(mirror.source) == {"GET tag": 1, "GET digest": 3}
    # The index and its three children, each asked about once.
    assert mirror.source.journal.count("GET", "referrers") == 4
    assert held(mirror.target, "three", index)


async def test_another_filter_is_another_image(mirror):
    mirror.push("v1", mirror.seed.index())
    mapping = {**V1, "platforms": ["linux/amd64"]}
    assert (await mirror.bring(mapping)).statuses() == ["synced"]
    assert (await mirror.bring(mapping)).statuses() == ["skipped"]
    assert manifests(mirror.source) == manifests(mirror.target) == {"HEAD tag": 1}
    assert (await mirror.bring({**V1, "platforms": ["linux/arm/v7"]})).statuses() == ["synced"]
    assert manifests(mirror.source) == {"GET tag": 1, "GET digest": 1}


@pytest.mark.parametrize(
    ("status", "head_first", "requests"),
    [(404, False, {"GET tag": 1}), (404, True, {"HEAD tag": 1}), (500, False, {"GET tag": 5})],
    ids=["gone", "gone, head first", "broken"],
)
async def test_a_tag_that_cannot_be_read_fails_each_mapping_and_is_tried_as_for_one(
    mirror, status, head_first, requests
):
    mirror.push("v0")
    mirror.source.app.faults.on("GET HEAD", "manifest").status(status)
    entry = {"url": mirror.source.url, "head_first": head_first}
    ran = await mirror.sync(*three("v0"), registries={"source": entry})
    assert ran.statuses() == ["failed"] * 3
    told = {(each["error"]["code"], each["error"]["retries"]) for each in ran.images}
    assert told == {("SOURCE_ERROR", sum(requests.values()) - 1)}
    assert manifests(mirror.source) == requests


async def test_a_digest_that_is_gone_behind_its_head_fails_and_the_next_run_copies(mirror):
    mirror.push("v0")
    await mirror.bring(*three("v0"))
    new = mirror.push("v0")
    gone = digest_of(b"moved on between HEAD and GET")
    moved = mirror.source.app.faults.on("HEAD", "manifest", reference="v0")
    moved.lie(headers={"Docker-Content-Digest": gone})
    assert (await mirror.sync(*three("v0"))).statuses() == ["failed"] * 3
    assert manifests(mirror.source) == {"HEAD tag": 1, "GET digest": 1}
    mirror.source.journal.matching("GET", reference=gone, status=404).exactly(1)
    mirror.source.app.faults.clear()
    await mirror.bring(*three("v0"))
    assert all(held(mirror.target, place, new) for place in ("one", "two", "three"))


@pytest.mark.provokes("tag_asked_twice")  # what two credentials see may differ
async def test_a_tag_is_asked_for_under_each_credential(world, tmp_path):
    users = {"source": "a secret", "bob": "b secret"}
    service = TokenService(users, anonymous=False, now=anyio.current_time)
    mirror = Plain(world, tmp_path, of={"source": {"auth": service}})
    mirror.push("v0")
    logins = {
        name: {
            "url": mirror.source.url,
            "auth_type": "basic",
            "credentials": {"username": name, "password": password},
        }
        for name, password in users.items()
    }
    mappings = [
        {"from": "app", "to": f"{name}-{number}", "source": name, "targets": ["target"]}
        for name in users
        for number in range(2)
    ]
    await mirror.bring(*mappings, registries=logins, defaults={"tags": tags("v0")})
    mirror.source.journal.matching("GET", "manifest", reference="v0", status=200).exactly(2)


# A tag that its target holds costs no manifest where digests are asked for first.


async def first(mirror, *names, **top) -> list[str]:
    """Ask for digests first; return the outcomes."""
    registries = {"source": {"url": mirror.source.url, "head_first": True}}
    mapping = {"from": "app", "tags": tags(*names)}
    top = {"defaults": WITH_ARTIFACTS, **top}
    return (await mirror.sync(mapping, registries=registries, **top)).statuses()


async def test_docker_hub_is_asked_by_head_for_tags_that_the_target_lists(mirror, world):
    """A GET counts against the quota, a HEAD does not (docs/protocol-facts.md section 7.2)."""
    hub = world.persona("dockerhub")
    for name in ("v0", "v1", "v2"):
        index = mirror.seed.index().load_into(hub, "library/alpine", name)
        if name != "v2":
            index.load_into(mirror.target.app, "alpine", name)
    mapping = {"from": "alpine", "tags": tags("v0", "v1", "v2"), **WITH_ARTIFACTS}
    mirror.file.write_text(document({"source": "docker.io", "target": mirror.target}, mapping))
    assert (await mirror.run("sync")).statuses() == ["skipped", "skipped", "synced"]
    hub.journal.matching("HEAD", "manifest", status=200).exactly(2)
    # The new one: its index and four children.
    hub.journal.matching("GET", "manifest", status=200).exactly(5)


@pytest.mark.parametrize("before", ["nothing", "refused", "not wanted"])
async def test_what_is_copied_and_what_a_run_left_out_is_looked_at_at_all_depths(mirror, before):
    children = [mirror.seed.image(architecture=each) for each in ("amd64", "arm64")]
    index = mirror.push("v0", mirror.seed.index(children))
    signature = mirror.attach(children[1])
    top = {"global": {"cache_ttl": "1h"}}
    if before == "refused":
        puts = mirror.target.app.faults.on("PUT", "manifest", reference=signature.top)
        puts.status(403).optional()
        assert await first(mirror, "v0", **top) == ["failed"]
        mirror.target.app.faults.rules.clear()
        await anyio.sleep(2 * HOUR)
    elif before == "not wanted":
        await first(mirror, "v0", defaults={}, **top)
    assert await first(mirror, "v0", **top) == ["synced"]
    assert held(mirror.target, "app", index)
    assert held(mirror.target, "app", signature)
    if before == "nothing":
        assert manifests(mirror.source) == {"HEAD tag": 1, "GET digest": 4}
        assert mirror.source.journal.count("GET", "referrers") == 4


# Listings, and answers that the specification does not foresee, or hardly (docs/design.md section 9).


@pytest.mark.parametrize("status", [400, 401, 403, 405, 501])
async def test_a_target_that_does_not_list_its_tags_is_written_to(mirror, status):
    image = mirror.load(mirror.seed.image(), "v1", "v2")
    mirror.target.app.faults.on("GET", "tag_list").status(status)
    await mirror.bring(ALL)
    assert mirror.target.app.tags("app") == {"v1": image.top, "v2": image.top}
    mirror.target.journal.matching("HEAD", "manifest").exactly(2)


@pytest.mark.parametrize("options", [(), ("--recheck",), ("--verify",)])
@pytest.mark.parametrize("status", [200, 403, 405])
async def test_a_tag_that_never_moves_stays_where_its_target_is_asked_for_it(
    mirror, status, options
):
    """It does not list its tags, or is asked for all."""
    mirror.push("v1")
    there = mirror.seed.image().load_into(mirror.target.app, "app", "v1")
    if status != 200:
        mirror.target.app.faults.on("GET", "tag_list").status(status)
    mirror.write({"from": "app", "tags": tags("v*", immutable_tags="v*"), "artifacts": {}})
    ran = await mirror.run("sync", *options)
    assert (ran.status, only(ran.images)["reason"]) == (0, "immutable_tag")
    assert mirror.target.app.tags("app") == {"v1": there.top}
    mirror.target.journal.matching(WRITES).none()


async def test_a_full_page_without_a_link_is_not_the_last_one(mirror):
    image = mirror.load(mirror.seed.image(), "x0999", "x1000")
    names = [f"x{number:04}" for number in range(1001)]

    def page(request: Request) -> Answer | None:
        if request.kind != "tag_list":
            return None
        # A null counts (docs/protocol-facts.md section 1.11).
        named = names[1000:] if request.parameter("last") else [None, *names[1:1000]]
        return Response(
            200, [("Content-Type", "application/json")], json.dumps({"tags": named}).encode()
        )

    mirror.source.app.intercept = page
    await mirror.bring({"from": "app", "tags": tags("x1*")})
    assert held(mirror.target, "app", image)
    pages = [entry.query for entry in mirror.source.journal.matching("GET", "tag_list")]
    assert pages == [{"n": "1000"}, {"n": "1000", "last": "x0999"}]


def google(world, host):
    """Start a registry that lists as Google's do: with the digest that each tag names, and with entries
    that make no sense (docs/protocol-facts.md section 5.5). It leaves out the tag `left-out`.
    """
    place = world.listen(App(), host, scheme="https")

    def listed(request: Request) -> Answer | None:
        named = place.app.tags(request.repository)
        if request.kind != "tag_list" or not named:
            return None
        digests = {
            digest: {"tag": [tag, None]} for tag, digest in named.items() if tag != "left-out"
        }
        listing = {
            "tags": sorted(named),
            "manifest": {**digests, "sha256:0": [], "none": {"tag": ["v1"]}},
        }
        return Response(200, [("Content-Type", "application/json")], json.dumps(listing).encode())

    place.app.intercept = listed
    return place


async def test_a_listing_with_digests_spares_the_heads_of_both_sides(world):
    source, target = google(world, "europe-docker.pkg.dev"), google(world, "us-docker.pkg.dev")
    seed = Seed(1)
    for tag in ("v0", "v1", "v2", "v3", "left-out"):
        seed.image().load_into(source.app, "p/app", tag)
    ends = {"source": "europe-docker.pkg.dev", "target": "us-docker.pkg.dev"}
    assert (await world.sync(ends, {"from": "p/app", "tags": tags("*")})).status == 0
    # A tag that the map leaves out is asked for by itself.
    source.journal.matching("GET", "tag_list", query={"n": "10000"}).exactly(1)
    assert manifests(source) == {"GET digest": 4, "GET tag": 1}
    source.journal.clear()
    target.journal.clear()
    ran = await world.sync(ends, {"from": "p/app", "tags": tags("*")})
    assert ran.statuses() == ["skipped"] * 5
    assert asked(source) == {"GET tag_list": 1, "GET manifest": 1}
    assert asked(target) == {"GET tag_list": 1, "HEAD manifest": 1}
    target.journal.matching("HEAD", "manifest", reference="left-out").exactly(1)


async def test_a_tag_whose_digest_a_head_does_not_tell_is_read(mirror):
    mirror.at_both("v1", mirror.seed.image())
    mirror.target.app.faults.on("HEAD", "manifest").lie(headers={"Docker-Content-Digest": None})
    assert (await mirror.bring(V1)).statuses() == ["skipped"]
    assert asked(mirror.target) == {"HEAD manifest": 1, "GET manifest": 1}


@pytest.mark.parametrize(("is_stored", "others"), [(True, ""), (False, ""), (False, "HEAD GET")])
async def test_a_200_to_a_manifest_is_believed_when_the_registry_holds_it(
    mirror, is_stored, others
):
    """A firewall may answer all that it refuses so; `others` are asked after the PUT."""
    mirror.push("v1")
    put = mirror.target.app.faults.on("PUT", "manifest")
    put.status(200, body=b"<html>Welcome</html>", at="answer" if is_stored else "request")
    for method in others.split():
        asked_again = mirror.target.app.faults.on(method, "manifest")
        asked_again.since(2 if method == "HEAD" else 1).status(200, body=b"<html>Welcome</html>")
    ran = await mirror.sync(V1)
    assert (ran.status, ran.statuses()) == ((0, ["synced"]) if is_stored else (2, ["failed"]))
    mirror.target.journal.matching("PUT", "manifest").exactly(1)
    mirror.target.journal.matching("HEAD", "manifest").exactly(2)


@pytest.mark.parametrize("status", [400, 403, 405, 501])
async def test_a_target_that_refuses_heads_of_blobs_is_written_to(mirror, status):
    there = mirror.push("v0")
    there.load_into(mirror.target.app, "app", "v0")
    image = mirror.push("v1")
    mirror.target.app.faults.on("HEAD", "blob").status(status)
    mirror.target.app.faults.on("PUT", "upload").first().drop(at="answer")
    await mirror.bring(ALL)
    assert held(mirror.target, "app", image)


async def test_a_blob_that_the_target_holds_with_another_size_is_sent(mirror):
    image = mirror.push("v1", mirror.seed.image(sizes=(9000,)))
    # The repository is populated, and has the blobs, so that a POST asks for them (rule 11).
    for each in (mirror.seed.image(), image):
        each.load_into(mirror.target.app, "app", "old")
    del mirror.target.app.repositories["app"].manifests[image.top]
    mirror.target.app.repositories["app"].tags.clear()
    mirror.target.app.faults.on("HEAD", "blob").status(200, headers={"Content-Length": "7"})
    await mirror.bring(V1)
    mirror.target.journal.matching("HEAD", "blob").exactly(len(image.blobs))
    mirror.target.journal.matching("PUT", "upload").exactly(len(image.blobs))
    assert held(mirror.target, "app", image)


# What a tag's answer teaches of its repository (rule 4), and how long a state is believed
# (docs/design.md section 7, "Vouching").


@pytest.mark.parametrize(
    "is_index", [True, False], ids=["an index, no state", "an image, an old state"]
)
async def test_what_an_unchanged_tag_names_is_mounted_without_a_state(mirror, is_index):
    image = mirror.push(
        "v1", mirror.seed.index() if is_index else mirror.seed.image(sizes=(LARGE,) * 2)
    )
    top = {"global": {"cache_ttl": "12h"}}
    await mirror.bring(V1, **top)
    if is_index:
        shutil.rmtree(mirror.cache)
    await anyio.sleep(24 * HOUR)
    ran = await mirror.bring({**V1, "to": "beside/it"}, V1, **top)
    assert sorted(ran.statuses()) == ["skipped", "synced"]
    assert held(mirror.target, "beside/it", image)
    mirror.target.journal.matching("POST", "upload_start").exactly(len(image.blobs))
    mirror.target.journal.matching("HEAD", "blob").none()
    # The answer may come when one of them is on its way already.
    mounts = mirror.target.journal.matching("POST", "upload_start", status=201, query=ITSELF)
    mounts.at_least(len(image.blobs) - 1)
    mirror.target.journal.matching("PUT", "upload").at_most(1)
    mirror.source.journal.matching("GET", "blob").at_most(1)


@pytest.mark.parametrize(
    ("ttl", "hours", "is_believed"), [("12h", 11, True), ("12h", 13, False), (0, 10_000, True)]
)
async def test_what_is_older_than_cache_ttl_is_asked_again(mirror, ttl, hours, is_believed):
    """Here no tag is asked for whose answer would vouch for the layer."""
    layer, top = mirror.seed.blob(LARGE), {"global": {"cache_ttl": ttl}}
    for tag in ("v0", "v1"):
        mirror.push(tag, mirror.seed.image(layers=[layer, mirror.seed.blob(9)]))
        await mirror.bring({**ALL, "tags": tags("*", immutable_tags="*")}, **top)
        await anyio.sleep(hours * HOUR)
    heads = mirror.target.journal.matching("HEAD", "blob", reference=digest_of(layer))
    heads.exactly(0 if is_believed else 1)


@pytest.mark.parametrize(("days", "is_known"), [(80, True), (100, False)])
async def test_a_copied_tag_is_known_for_longer_than_cache_ttl(mirror, days, is_known):
    """Nothing is believed because of it: both ends are asked."""
    mirror.push("v0")
    mirror.push("v1")
    await mirror.bring(ALL)
    await anyio.sleep(days * 24 * HOUR)
    assert (await mirror.bring(ALL)).statuses() == ["skipped"] * 2
    how = "HEAD manifest" if is_known else "GET manifest"
    lists = {} if is_known else {"GET tag_list": 1}
    assert asked(mirror.source) == {"GET tag_list": 1, how: 2}
    assert asked(mirror.target) == {**lists, "HEAD manifest": 2}


async def test_the_state_does_not_grow_with_images_that_are_gone(mirror):
    """What nobody confirmed for `cache_ttl` goes; a tag that each run finds unchanged stays known."""
    mirror.push("stays")
    kept = []
    for _ in range(8):
        mirror.push("nightly", mirror.seed.image(layers=[mirror.seed.blob(100) for _ in range(20)]))
        # Within 12 hours of the last run, so that what is still there stays confirmed.
        for _ in range(2):
            await anyio.sleep(11 * HOUR)
            await mirror.bring(ALL, **{"global": {"cache_ttl": "12h"}})
            mirror.source.journal.matching("GET", reference="stays").at_most(0 if kept else 1)
        # What is still there is known.
        assert manifests(mirror.source) == manifests(mirror.target) == {"HEAD tag": 2}
        kept.append(entries(mirror.cache))
    assert max(kept[4:]) <= max(kept[:4]), "something of the first images is kept"


def artifact(seed: Seed, *layers: bytes) -> Image:
    """Make an image of which no registry looks at the layers: its config is none that it knows."""
    config = Part("application/vnd.acme.config.v1+json", seed.blob(60))
    return compose(config, [Part("application/vnd.acme.part", each) for each in layers])


@pytest.mark.parametrize(("minutes", "times"), [(20, 0), (40, 1)], ids=["fresh", "not fresh"])
async def test_a_blob_whose_absence_no_registry_would_notice_is_asked_for_when_not_fresh(
    world, tmp_path, minutes, times
):
    """A registry that looks at no blobs lost one: nothing but a question can tell."""
    mirror = with_target(world, tmp_path, require_blobs=False)
    blob = mirror.seed.blob(LARGE)
    mirror.push("v1", artifact(mirror.seed, blob))
    then = mirror.push("v2", artifact(mirror.seed, blob, mirror.seed.blob(LARGE)))
    await mirror.bring(V1)
    if times:
        del mirror.target.app.repositories["app"].blobs[digest_of(blob)]
    await anyio.sleep(60 * minutes)
    await mirror.bring({"from": "app", "tags": tags("v2")})
    assert held(mirror.target, "app", then)
    about = [each for each in mirror.target.journal.entries if digest_of(blob) in each.target]
    assert bool(about) == bool(times)
    mirror.source.journal.matching("GET", "blob", reference=digest_of(blob)).exactly(times)


@pytest.mark.parametrize("minutes", [20, 40])
async def test_nor_is_its_whole_manifest_believed_that_another_tag_gets(world, tmp_path, minutes):
    mirror = with_target(world, tmp_path, require_blobs=False)
    image = mirror.push("v1", artifact(mirror.seed, mirror.seed.blob(LARGE)))
    await mirror.bring(V1)
    if minutes > 30:
        mirror.target.app.repositories.clear()
    await anyio.sleep(60 * minutes)
    mirror.push("v2", image)
    await mirror.bring({"from": "app", "tags": tags("v2")})
    assert held(mirror.target, "app", image)
    assert mirror.source.journal.count("GET", "blob") == (2 if minutes > 30 else 0)
    assert mirror.target.journal.count("POST", "upload_start") == (2 if minutes > 30 else 0)


@pytest.mark.parametrize("is_repository_gone", [True, False])
async def test_an_answer_against_the_state_makes_it_ask_before_it_believes(
    mirror, is_repository_gone
):
    image = mirror.push("v1", mirror.seed.image(sizes=(LARGE, LARGE)))
    await mirror.bring(V1)
    there = mirror.target.app.repositories["app"]
    if is_repository_gone:
        del mirror.target.app.repositories["app"]
    else:
        there.tags.clear()
        there.manifests.clear()
        del there.blobs[largest(image)]
    await anyio.sleep(40 * 60)
    assert (await mirror.bring(V1)).statuses() == ["synced"]
    assert held(mirror.target, "app", image)
    # The manifest was right at once, and only what lacked was sent.
    mirror.target.journal.matching("PUT", "manifest").exactly(1)
    mirror.source.journal.matching("GET", "blob").exactly(3 if is_repository_gone else 1)


@pytest.mark.parametrize("depth", [0, 1, 3])
async def test_a_manifest_vouches_for_all_below_it_however_old_that_is(mirror, depth):
    """The target's tag answers with an index; the blobs are named by manifests below it."""
    base = mirror.seed.blob(LARGE)
    image = artifact(mirror.seed, base)
    for _ in range(depth):
        image = mirror.seed.index([image], with_platforms=False)
    mirror.push("v1", image)
    await mirror.bring(V1)
    await anyio.sleep(5 * HOUR)
    then = mirror.push("v2", artifact(mirror.seed, base, mirror.seed.blob(LARGE)))
    # One look-up at a time, so that v1 has vouched when v2 is brought.
    ran = await mirror.bring(V1, {"from": "app", "tags": tags("v2")})
    assert sorted(ran.statuses()) == ["skipped", "synced"]
    assert held(mirror.target, "app", then)
    mirror.source.journal.matching("GET", "blob", reference=digest_of(base)).none()
    # It is not asked for, but for the one question that teaches what a POST answers (rule 11).
    about = [each for each in mirror.target.journal.entries if digest_of(base) in each.target]
    assert {(each.method, each.status) for each in about} <= {("POST", 201)}
    assert len(about) <= 1


async def test_the_way_to_a_login_is_remembered(world, tmp_path):
    mirror = Secured(world, tmp_path, "source", "target")
    mirror.push("v0")
    mirror.push("v1")
    mapping = {"from": "app", "tags": tags("v0", "v1")}
    await mirror.bring(mapping, registries=mirror.registries)
    places = (mirror.source, mirror.target)
    before = [asked(place) for place in places]
    await mirror.bring(mapping, registries=mirror.registries)
    for place, earlier in zip(places, before, strict=True):
        assert asked(place) - earlier == {"GET token": 1, "HEAD manifest": 2}
        place.journal.matching(status=401).exactly(1)
    assert b"secret-word" not in (mirror.cache / "state.db").read_bytes()


# Mounts, also from earlier runs (rules 9 and 10).


async def test_two_aliases_of_one_host_are_asked_and_filled_once(world, tmp_path):
    mirror = Plain(world, tmp_path)
    base = mirror.seed.layer(LARGE)
    for number in range(4):
        for tag in ("v0", "v1"):
            image = mirror.seed.image(layers=[base, mirror.seed.layer(LARGE)])
            mirror.push(tag, image, f"team/app-{number}")
    mappings = [
        {"from": f"team/app-{number}", "tags": tags("*"), "targets": [alias]}
        for number, alias in enumerate(["target", "again"] * 2)
    ]
    ends = {"again": mirror.target}
    await mirror.bring(*mappings, registries=ends)
    # The base, and a layer and a config of each image; the base is mounted in three repositories.
    assert blobs(mirror.source) == {"GET 200": 1 + 16}
    assert blobs(mirror.target) == {"POST 202": 1 + 16, "PUT 201": 1 + 16, "POST 201": 3}
    await mirror.bring(*mappings, registries=ends)
    assert asked(mirror.target) == {"HEAD manifest": 8}
    assert asked(mirror.source) == {"GET tag_list": 4, "HEAD manifest": 8}


@pytest.mark.parametrize("is_allowed", [True, False])
async def test_a_mount_asks_for_the_right_to_read_elsewhere_and_without_it_is_an_upload(
    world, tmp_path, is_allowed
):
    mirror = Secured(world, tmp_path, "target")
    image = mirror.seed.image(sizes=(LARGE, LARGE))
    for name in ("one", "two"):
        mirror.push("v1", image, name)
    await mirror.bring({**V1, "from": "one"}, registries=mirror.registries)
    if not is_allowed:
        scopes = mirror.target.app.faults.on(
            "GET", path="/token", query={"scope": "*repository:one:*"}
        )
        scopes.status(403)
    await mirror.bring({**V1, "from": "two"}, registries=mirror.registries)
    assert held(mirror.target, "two", image)
    mounts = mirror.target.journal.matching("POST", "upload_start", "two", query={"from": "one"})
    assert [each.status for each in mounts] == ([201] * 3 if is_allowed else [])
    mirror.target.journal.matching("PUT", "upload", status=201).exactly(3 if is_allowed else 6)


async def test_a_registry_that_never_mounts_is_asked_once_and_not_by_the_next_run(world, tmp_path):
    mirror = with_target(world, tmp_path, mounts=False)
    base = mirror.seed.layer(LARGE)
    mappings = [{**V1, "from": f"app-{number}"} for number in range(4)]
    for each in mappings:
        mirror.push("v1", mirror.seed.image(layers=[base, mirror.seed.layer(LARGE)]), each["from"])
    for chosen, times in ((mappings[:2], 1), (mappings[2:], 0)):
        await mirror.bring(*chosen)
        mounts = mirror.target.journal.matching("POST", "upload_start", query=MOUNT)
        assert sum(each.query["from"] != each.repository for each in mounts) == times
    assert blobs(mirror.target)["POST 202"] == blobs(mirror.target)["PUT 201"] == 6


@pytest.mark.provokes("mount_uncommitted")
async def test_a_repository_that_was_deleted_costs_one_head_and_does_not_end_the_mounts_of_its_host(
    mirror,
):
    lost, shared = mirror.seed.image(sizes=(LARGE,)), mirror.seed.layer(LARGE)
    for name in ("one", "two"):
        mirror.push("v1", lost, name)
    await mirror.bring({**V1, "from": "one"})
    del mirror.target.app.repositories["one"]
    await mirror.bring({**V1, "from": "two"})
    assert held(mirror.target, "two", lost)
    for digest in lost.blobs:
        mirror.target.journal.matching("POST", query={"mount": digest}).at_most(1)
        mirror.target.journal.matching("HEAD", "blob", reference=digest).at_most(1)
    # No session was opened and left: each POST has its PUT.
    assert blobs(mirror.target) == {"HEAD 404": 1, "POST 202": 2, "PUT 201": 2}

    images = {
        name: Seed(number).image(layers=[shared]) for number, name in enumerate(("three", "four"))
    }
    for name, image in images.items():
        mirror.push("v1", image, name)
    await mirror.bring(*({**V1, "from": name} for name in images))
    assert all(held(mirror.target, name, image) for name, image in images.items())
    # The two configs and the shared layer are read once each, the layer is mounted once.
    assert blobs(mirror.source) == {"GET 200": 3}
    mounted = mirror.target.journal.matching("POST", "upload_start", status=201)
    assert [each.query["mount"] for each in mounted] == [digest_of(shared)]
    mirror.target.journal.matching("PUT", "upload", status=201).exactly(3)


# Existence and the start of an upload in one request, where that was seen to work (rule 11).


ANYTHING = {"Location": "/v2/app/blobs/x"}
BY_HEAD = {"HEAD 404": 5, "POST 202": 5, "PUT 201": 5}


async def test_an_empty_repository_is_asked_for_no_blob(mirror):
    """An interrupted run's blobs are found by the POST that would start the upload."""
    images = [mirror.push(f"v{number}", mirror.seed.image(sizes=(LARGE,))) for number in range(2)]
    mirror.target.app.add_blob("app", images[0].blobs[largest(images[0])])
    await mirror.bring(ALL)
    assert blobs(mirror.source) == {"GET 200": 3}
    # One HEAD confirms the first 201.
    assert blobs(mirror.target) == {"HEAD 200": 1, "POST 201": 1, "POST 202": 3, "PUT 201": 3}


async def test_a_probe_that_was_seen_to_work_replaces_the_heads_of_the_next_run(mirror):
    there = [mirror.seed.layer(LARGE) for _ in range(3)]
    mirror.push("v1", mirror.seed.image(layers=there))
    # Somebody else's image: the repository is not empty, and holds one of the layers.
    mirror.seed.image(layers=there[:1]).load_into(mirror.target.app, "app", "other")
    await mirror.bring(V1)
    assert blobs(mirror.source) == {"GET 200": 3}
    mirror.target.journal.matching("HEAD", "blob").exactly(1)
    image = mirror.seed.image(layers=[*there, *(mirror.seed.layer(LARGE) for _ in range(2))])
    mirror.push("v2", image)
    await mirror.bring({"from": "app", "tags": tags("v2")})
    assert held(mirror.target, "app", image)
    assert blobs(mirror.source) == {"GET 200": 3}
    assert blobs(mirror.target) == {"POST 202": 3, "PUT 201": 3}
    mirror.target.journal.matching("POST", "upload_start", query=ITSELF).exactly(3)


@pytest.mark.parametrize(
    ("how", "answers"),
    [
        (lambda rule: rule.first().status(400), {"POST 400": 1, **BY_HEAD}),
        # An error that may pass says nothing: the question is asked again.
        (
            lambda rule: rule.first().status(500),
            {"POST 500": 1, "POST 201": 1, "POST 202": 5, "PUT 201": 5},
        ),
        # An idle connection that is closed is replaced for free.
        (
            lambda rule: rule.first(2).drop(),
            {"POST None": 2, "POST 201": 1, "POST 202": 5, "PUT 201": 5},
        ),
    ],
    ids=["400", "500", "reset"],
)
async def test_where_the_question_is_refused_it_is_not_asked_again_and_heads_ask(
    mirror, how, answers
):
    image = await mirror.moved(5)
    how(mirror.target.app.faults.on("POST", "upload_start", query=MOUNT))
    await mirror.bring(V1)
    assert held(mirror.target, "app", image)
    assert blobs(mirror.target) == answers


@pytest.mark.parametrize("status", [201, 202, 400, 401, 404, 501])
async def test_a_registry_that_answers_all_mounts_alike_is_asked_by_head_in_the_next_run(
    world, tmp_path, status
):
    """The session of a 202 costs nothing: it takes a blob that is absent."""
    mirror = with_target(world, tmp_path, mounts=status != 202)
    if status != 202:
        mounts = mirror.target.app.faults.on("POST", "upload_start", query=MOUNT)
        mounts.status(status, headers=ANYTHING)
    await mirror.change(6)
    await mirror.change(5)
    assert blobs(mirror.target) == BY_HEAD


@pytest.mark.parametrize("status", [400, 401, 404, 501])
async def test_a_registry_that_refuses_mounts_is_not_asked_for_one_with_each_blob(mirror, status):
    mirror.target.app.faults.on("POST", "upload_start", query=MOUNT).status(status)
    for number in range(2):
        mirror.push(f"v{number}", mirror.seed.image(sizes=(900,) * 5))
    await mirror.bring(ALL)
    assert blobs(mirror.target) == {f"POST {status}": 1, "POST 202": 12, "PUT 201": 12}


@pytest.mark.parametrize("status", [409, 422, 500])
async def test_a_registry_that_fails_at_one_mount_is_asked_for_others(mirror, status):
    mirror.target.app.faults.on("POST", "upload_start", query=MOUNT).first().status(status)
    mirror.push("v1", mirror.seed.image(sizes=(900,) * 5))
    await mirror.bring(V1)
    assert blobs(mirror.target) == {f"POST {status}": 1, "POST 202": 6, "PUT 201": 6}
    mirror.target.journal.matching("POST", "upload_start", status=202, query=ITSELF).exactly(5)


async def test_a_mount_that_fails_does_not_show_how_absent_blobs_are_answered(mirror):
    """A 201 to any blob that comes later is confirmed by a HEAD."""
    await mirror.moved(1)
    mirror.target.app.faults.on("POST", "upload_start", query=MOUNT).since(2).status(500)
    await mirror.bring(V1)
    assert blobs(mirror.target) == {"POST 201": 1, "POST 500": 1, "POST 202": 1, "PUT 201": 1}
    mirror.target.app.faults.clear()
    mounts = mirror.target.app.faults.on("POST", "upload_start", query=MOUNT)
    mounts.status(201, headers=ANYTHING)
    mirror.push("v1")
    await mirror.bring(V1)
    mirror.target.journal.matching("PUT", "manifest", status=400).none()


async def test_harbor_is_asked_by_head(world, tmp_path):
    """It is known by the service of its tokens."""
    mirror = Secured(world, tmp_path, "target", service="harbor-registry")
    await mirror.change(3, registries=mirror.registries)
    mirror.target.journal.matching("POST", "upload_start", query=MOUNT).none()


@pytest.mark.provokes("manifest_names_absent")
@pytest.mark.parametrize("is_healed", [True, False])
async def test_a_201_is_believed_and_a_registry_that_was_wrong_is_healed_once(mirror, is_healed):
    """What refuses a manifest whose blobs it was sent anew is not sent it a third time."""
    await mirror.change(3)
    image = mirror.push("v1", mirror.seed.image(sizes=(900, 900)))
    wrong = image.document["layers"][0]["digest"]
    faults = mirror.target.app.faults
    faults.on("POST", "upload_start", query={"mount": wrong}).status(201, headers=ANYTHING)
    if not is_healed:
        faults.on("PUT", "manifest").status(400, error="MANIFEST_BLOB_UNKNOWN")
    ran = await mirror.sync(V1)
    assert ran.statuses() == (["synced"] if is_healed else ["failed"]), ran.err
    assert mirror.holds(image) == is_healed
    refused = mirror.target.journal.matching("PUT", "manifest", status=400)
    assert len(refused) == 1 if is_healed else 1 < len(refused) <= 5
    if is_healed:
        mirror.target.journal.matching("HEAD", "blob", reference=wrong, status=404).at_least(1)
        mirror.target.journal.matching("HEAD", "blob").at_most(3)
    mirror.target.journal.matching("PUT", "upload", status=201).exactly(3)


@pytest.mark.provokes("manifest_names_absent")
@pytest.mark.parametrize("status", [400, 409])
async def test_an_image_that_starts_again_counts_each_blob_once(mirror, status):
    def amend(request: Request, answer: Answer) -> Answer:
        is_refusal = isinstance(answer, Response) and answer.status == 400
        return error(status, "MANIFEST_BLOB_UNKNOWN", "lost") if is_refusal else answer

    mirror.target.app.amend = amend
    base = [mirror.seed.layer(size) for size in (900, 901, 902)]
    mirror.push("v1", mirror.seed.image(layers=base))
    await mirror.bring(V1)
    lose_blob(mirror.target.app, digest_of(base[0]))
    mirror.push("v2", mirror.seed.image(layers=[*base, mirror.seed.layer(50)]))
    ran = await mirror.bring(ALL)
    assert ran.totals["layers"] == {"transferred": 3, "unique": 3, "mounted": 0, "skipped": 2}


async def test_a_referrer_that_is_listed_and_gone_is_left_out(mirror):
    image = mirror.push("v1")
    gone, there = mirror.attach(image), mirror.attach(image)
    mirror.source.app.faults.on("GET", "manifest", reference=gone.top).status(404)
    ran = await mirror.bring(V1, defaults=WITH_ARTIFACTS)
    assert only(ran.images)["artifacts"]["synced"] == 1
    assert (mirror.holds(there), mirror.holds(gone)) == (True, False)
    ran = await mirror.world.run("sync", "--recheck", "-c", str(mirror.file))
    assert ran.err.count(f"{gone.top} is listed as a referrer of {image.top}, but missing") == 1


# Bytes that do not match their digest are read once more over a fresh connection, then given up.

PULLED_TWICE = pytest.mark.provokes("blob_pulled_twice", "second_session")


@PULLED_TWICE
@pytest.mark.parametrize("size", [1000, 3 * MIB], ids=["in one piece", "in many"])
@pytest.mark.parametrize("at", [0, -1], ids=["from the first byte", "at the last byte"])
async def test_a_blob_that_was_wrong_once_is_read_again_over_a_fresh_connection(mirror, size, at):
    image = mirror.push("v1", mirror.seed.image(sizes=(size,)))
    mirror.source.app.faults.on("GET", "blob", reference=largest(image)).first().corrupt(at)
    ran = await mirror.bring(V1)
    assert ran.err == ""
    assert held(mirror.target, "app", image)
    first, second = mirror.source.journal.matching("GET", "blob", reference=largest(image))
    others = {each.connection for each in mirror.source.journal.entries if each is not second}
    assert second.connection not in others
    assert first.status == second.status == 200
    assert "range" not in second.headers
    assert ran.seconds == pytest.approx(0, abs=0.01), "nobody waits for it"


@pytest.mark.parametrize("is_staged", [True, False])
async def test_a_blob_that_is_always_wrong_is_read_twice_for_each_target(
    world, tmp_path, is_staged
):
    mirror = Plain(world, tmp_path, "a", "b")
    image = mirror.push("v1", mirror.seed.image(sizes=(3 * MIB,)))
    mirror.source.app.faults.on("GET", "blob", reference=largest(image)).corrupt(5)
    ran = await mirror.sync(V1, **{"global": {} if is_staged else {"staging_size_limit": 0}})
    assert ran.statuses() == ["failed"] * 2
    errors = [each["error"] for each in ran.images]
    assert {error["code"] for error in errors} == {"CONTENT_ERROR"}
    assert all("its digest" in error["message"] for error in errors)
    assert all(target.app.tags("app") == {} for target in mirror.targets.values())
    mirror.source.journal.matching("GET", "blob", reference=largest(image)).exactly(4)


@PULLED_TWICE
async def test_what_a_session_in_chunks_has_taken_of_the_wrong_bytes_is_given_up(mirror, world):
    azure = world.persona("acr")
    image = mirror.push("v1", mirror.seed.image(sizes=(17 * MIB,)))
    mirror.source.app.faults.on("GET", "blob", reference=largest(image)).first().corrupt(3)
    await mirror.bring(V1, registries={"target": f"https://{azure.row.hosts['registry']}"})
    assert azure.blob("app", largest(image)) == image.blobs[largest(image)]
    mirror.source.journal.matching("GET", "blob", reference=largest(image)).exactly(2)
    azure.journal.matching("DELETE", "upload").exactly(1)


WRONG = {
    "another manifest": lambda body: body.replace(b'"size": ', b'"size":  ') + b" ",
    "a page": lambda _: b"<html>",
}


@pytest.mark.provokes("manifest_fetched_twice")
@pytest.mark.parametrize("is_child", [True, False], ids=["a child", "a tag"])
@pytest.mark.parametrize(
    ("change", "times"),
    [(WRONG["another manifest"], 1), (WRONG["a page"], 1), (WRONG["another manifest"], 2)],
    ids=["another manifest, once", "a page, once", "another manifest, always"],
)
async def test_a_manifest_is_read_again_over_a_fresh_connection(mirror, is_child, change, times):
    index = mirror.push("v1", mirror.seed.index(platforms=("linux/amd64",)))
    left = [times]

    def amend(request: Request, answer: Answer) -> Answer:
        is_wanted = request.kind == "manifest" and (":" in request.reference) is is_child
        if not is_wanted or not left[0]:
            return answer
        left[0] -= 1
        headers = [pair for pair in answer.headers if pair[0].lower() != "content-length"]
        return Response(answer.status, headers, change(answer.body))

    mirror.source.app.amend = amend
    ran = await mirror.sync(V1)
    entries = mirror.source.journal.entries
    asked_twice = [
        each for each in entries if each.kind == "manifest" and (":" in each.reference) is is_child
    ]
    assert len(asked_twice) == 2
    second = asked_twice[1]
    assert second.connection not in {each.connection for each in entries[: second.number - 1]}
    if times == 1:
        assert ran.statuses() == ["synced"], ran.err
        assert held(mirror.target, "app", index)
    else:
        assert only(ran.images)["error"]["code"] == "CONTENT_ERROR"


async def test_what_has_its_digest_and_is_no_manifest_is_asked_for_once(mirror):
    mirror.push("v1")
    mirror.source.app.faults.on("GET", "manifest").status(
        200, body=b'{"schemaVersion": 2}', headers={"Content-Type": "application/json"}
    )
    ran = await mirror.sync(V1)
    assert only(ran.images)["error"]["code"] == "CONTENT_ERROR"
    assert mirror.source.journal.count("GET", "manifest") == 1
