"""`regsync lock` and runs from a lock: what they ask, what they copy, what they refuse."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import anyio
import pytest

from conformance.client.attachments import referrers_tag
from conformance.content.images import Seed
from conformance.messages import Answer, Request, Response
from conformance.registry.app import App
from conformance.registry.tokens import BasicAuth, TokenService
from tests.ends import Virtual, document, tags
from tests.mirrors import SBOM, SIGNATURE, LockedMirror, asked
from tests.published import check
from tools.benches.place import app_of

DAY = 86_400.0


@pytest.fixture
def mirror(world: Virtual, tmp_path: Path) -> LockedMirror:
    return LockedMirror(world, tmp_path)


# What a lock costs, and what is in it.


async def test_a_first_lock_and_an_unchanged_one(mirror):
    images = {f"v{number}": mirror.push(f"v{number}") for number in range(3)}
    mirror.push("nightly")
    mirror.write({"from": "app", "tags": tags("v*")})
    ran = await mirror.succeed("lock")

    assert mirror.digests() == {tag: image.top for tag, image in images.items()}
    assert asked(mirror.source) == {"GET tag_list": 1, "GET manifest": 3, "GET referrers": 3}
    assert asked(mirror.target) == {}
    assert [change["kind"] for change in ran.report["changes"]] == ["came"] * 3
    assert ran.report["written"] is True

    before = mirror.lock.stat()
    ran = await mirror.succeed("lock")
    assert asked(mirror.source) == {"GET tag_list": 1, "HEAD manifest": 3}
    assert asked(mirror.target) == {}
    assert (ran.report["changes"], ran.report["written"]) == ([], False)
    assert mirror.lock.stat() == before


async def test_one_image_that_moves_is_one_line(mirror):
    for number in range(3):
        mirror.push(f"v{number}")
    mirror.write({"from": "app", "tags": tags("v*")})
    await mirror.succeed("lock")
    before = mirror.lock.read_text().splitlines()
    moved = mirror.push("v1")
    signature = mirror.attach(moved)

    ran = await mirror.run("lock", "--check")
    assert ran.status == 1
    assert mirror.lock.read_text().splitlines() == before
    assert not ran.report["written"]
    check("lock", ran.report)
    (change,) = ran.report["changes"]
    assert change["kind"] == "moved"
    assert change["after"]["digest"] == moved.top

    await mirror.succeed("lock")
    # Of the signature, too, it is asked what refers to it.
    assert asked(mirror.source) == {
        "GET tag_list": 1,
        "HEAD manifest": 3,
        "GET manifest": 1,
        "GET referrers": 2,
    }
    after = mirror.lock.read_text().splitlines()
    assert len(before) == len(after)
    assert sum(old != new for old, new in zip(before, after, strict=True)) == 1
    assert mirror.lines()["v1"]["artifacts"] == [
        {"digest": signature.top, "type": SIGNATURE, "subject": moved.top}
    ]


async def test_two_platforms_of_one_source_have_lines_of_their_own(mirror):
    child = mirror.seed.image()
    index = mirror.push("v1", mirror.seed.index([child, mirror.seed.image(architecture="arm64")]))
    signature = mirror.attach(child)
    mirror.attach(index)
    mirror.write(
        {"from": "app", "to": "whole", "tags": tags("v1")},
        {"from": "app", "to": "part", "tags": tags("v1"), "platforms": ["linux/amd64"]},
    )
    await mirror.succeed("lock")
    # The index and its manifests are fetched once for both lines.
    assert mirror.source.journal.count("GET", "manifest", reference="v1") == 1
    whole, part = [
        json.loads(line)
        for line in mirror.lock.read_text().splitlines()
        if line.startswith('{"source"')
    ]
    assert whole["digest"] == part["digest"] == index.top
    assert "pushed" not in whole
    assert part["pushed"] not in (None, index.top)
    assert len(whole["artifacts"]) == 2
    # What refers to the top of a trimmed index is not carried.
    assert [each["digest"] for each in part["artifacts"]] == [signature.top]

    await mirror.succeed("lock")
    assert asked(mirror.source) == {"HEAD manifest": 1}
    ran = await mirror.succeed("sync", "--locked")
    assert ran.statuses() == ["synced"] * 2
    assert mirror.held(repository="whole") == {"v1": index.top}
    assert mirror.held(repository="part") == {"v1": part["pushed"]}
    await mirror.skip_all(2)


async def test_artifacts_that_one_mapping_excludes_are_the_other_ones(mirror):
    image = mirror.push("v1")
    sbom = mirror.attach(image, SBOM)
    signature = mirror.attach(image)
    of_sbom = mirror.attach(sbom)
    mirror.write(
        {"from": "app", "to": "all", "tags": tags("v1")},
        {"from": "app", "to": "signed", "tags": tags("v1"), "artifacts": {"exclude": [SBOM]}},
        {"from": "app", "to": "bare", "tags": tags("v1"), "artifacts": {"enabled": False}},
    )
    await mirror.succeed("lock")
    listed = [each["digest"] for each in mirror.lines()["v1"]["artifacts"]]
    assert sorted(listed) == sorted([sbom.top, signature.top, of_sbom.top])
    assert listed.index(sbom.top) < listed.index(of_sbom.top)

    await mirror.succeed("sync", "--locked")
    assert mirror.source.journal.count(kind="referrers") == 0
    held = mirror.target.app.repositories
    assert {sbom.top, signature.top, of_sbom.top} <= held["all"].manifests.keys()
    assert signature.top in held["signed"].manifests
    assert {sbom.top, of_sbom.top}.isdisjoint(held["signed"].manifests)
    assert held["bare"].manifests.keys() == {image.top}
    await mirror.skip_all(3)


async def test_the_artifacts_of_a_tag_are_read_with_the_login_of_its_own_mapping(world, tmp_path):
    """Another mapping names the same repository by another registry, whose password is refused."""
    seed = Seed(1)
    source = world.listen(App(auth=BasicAuth({"a": "right"})), "source.test")
    world.registry("target.test")
    image = seed.image().load_into(source.app, "app", "v1")
    seed.artifact(image, None).load_into(source.app, "app")

    def registry(password: str) -> dict[str, object]:
        credentials = {"username": "a", "password": password}
        return {"url": "http://source.test", "auth_type": "basic", "credentials": credentials}

    ends = {
        "source": registry("right"),
        "again": registry("wrong"),
        "target": {"url": "http://target.test"},
    }
    mappings = (
        {"from": "app", "source": "source", "tags": tags("v1"), "artifacts": {}},
        {
            "from": "app",
            "to": "b",
            "source": "again",
            "tags": tags("v2"),
            "artifacts": {"include": [SBOM]},
        },
    )
    file = tmp_path / "mirror.yaml"
    file.write_text(document(ends, *mappings, defaults={"targets": ["target"]}))
    ran = await world.run("lock", "--json", "-c", str(file))
    assert ran.status == 1
    assert ran.report["locked"] == 1


async def test_without_artifacts_and_platforms_a_head_a_tag_is_enough(mirror):
    images = [mirror.push(tag) for tag in ("v1", "v2")]
    mirror.write({"from": "app", "tags": tags("v1", "v2"), "artifacts": {"enabled": False}})
    await mirror.succeed("lock")
    assert asked(mirror.source) == {"HEAD manifest": 2}
    assert list(mirror.digests().values()) == [image.top for image in images]


async def test_a_tag_that_moves_to_a_digest_of_another_line_costs_its_head_alone(mirror):
    image = mirror.push("v1")
    mirror.attach(image)
    mirror.push("latest")
    mirror.write({"from": "app", "tags": tags("v1", "latest")})
    await mirror.succeed("lock")
    seen = mirror.lines()["v1"]["first_seen"]
    await anyio.sleep(DAY)
    mirror.push("latest", image)
    await mirror.succeed("lock")
    assert asked(mirror.source) == {"HEAD manifest": 2}
    lines = mirror.lines()
    assert lines["latest"]["artifacts"] == lines["v1"]["artifacts"] != []
    assert lines["latest"]["first_seen"] == seen


async def test_digests_in_a_listing_spare_the_heads(mirror, world):
    """Google's registries tell them."""
    provider = world.persona("gcr_open")
    images = {tag: mirror.seed.image() for tag in ("v1", "v2")}
    for tag, image in images.items():
        image.load_into(provider, "project/app", tag)

    def list_digests(request: Request) -> Answer | None:
        if request.kind != "tag_list":
            return None
        named = {image.top: {"tag": [tag]} for tag, image in images.items()}
        listing = {"name": "project/app", "tags": [*images], "manifest": named}
        headers = [("Content-Type", "application/json")]
        return Response(200, headers, json.dumps(listing).encode())

    provider.intercept = list_digests
    mapping = {"from": "project/app", "tags": tags("v*"), "artifacts": {"enabled": False}}
    registry = {"url": provider.row.hosts["registry"], "auth_type": "anonymous"}
    mirror.write(mapping, registries={"source": registry})
    await mirror.succeed("lock")
    assert mirror.digests() == {tag: image.top for tag, image in images.items()}
    assert provider.journal.summary() == {"GET tag_list": 1}


async def test_signatures_that_come_later(mirror):
    """One under a tag of cosign's is in the listing; what the API alone could tell is asked for with
    --recheck.
    """
    image = mirror.push("v1")
    mirror.push("v2")
    mirror.write({"from": "app", "tags": tags("v*")})
    await mirror.succeed("lock")

    late = mirror.attach(image)
    assert (await mirror.succeed("lock")).report["changes"] == []
    (change,) = (await mirror.succeed("lock", "--recheck")).report["changes"]
    assert change["kind"] == "changed"
    assert change["after"]["artifacts"] == [late.top]
    assert asked(mirror.source)["GET referrers"] == 3  # of both images and the signature

    tag = referrers_tag(image.top) + ".sig"
    cosign = mirror.push(tag)
    (change,) = (await mirror.succeed("lock")).report["changes"]
    assert sorted(change["after"]["artifacts"]) == sorted([late.top, cosign.top])
    assert [each.get("tag") for each in mirror.lines()["v1"]["artifacts"]] == [tag, None]
    await mirror.succeed("lock")
    assert asked(mirror.source) == {"GET tag_list": 1, "HEAD manifest": 2}


# What fails while a lock is made.


async def test_a_mapping_that_fails_keeps_its_lines(mirror):
    for repository in ("app", "other"):
        mirror.push("v1", repository=repository)
    mirror.write({"from": "app", "tags": tags("v*")}, {"from": "other", "tags": tags("v*")})
    await mirror.succeed("lock")
    before = mirror.lock.read_text().splitlines()
    mirror.push("v1")
    mirror.push("v1", repository="other")
    mirror.source.app.faults.on("GET", "tag_list", repository="app").status(403)

    ran = await mirror.run("lock")
    assert ran.status == 1
    (failure,) = ran.report["failed"]
    assert (failure["source"], failure["keeps_lines"]) == ("source.test/app", True)
    assert failure["error"]["code"] == "AUTH_ERROR"
    assert "failed source.test/app: AUTH_ERROR" in ran.err
    check("lock", ran.report)
    after = mirror.lock.read_text().splitlines()
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert len(moved) == 1
    assert "source.test/other:v1" in moved[0]


async def test_a_registry_that_fails_half_way_writes_no_first_lock(mirror, world):
    for number in range(3):
        mirror.push(f"v{number}")
    mirror.push("v1", repository="other")
    mirror.write({"from": "app", "tags": tags("v*")}, {"from": "other", "tags": tags("v*")})
    fault = mirror.source.app.faults.on("GET", "manifest", reference="v1", repository="app")
    fault.status(401)
    ran = await mirror.run("lock")
    assert ran.status == 1
    assert not mirror.lock.exists()
    assert not ran.report["written"]
    (failure,) = ran.report["failed"]
    assert (failure["source"], failure["keeps_lines"]) == ("source.test/app", False)
    said = await mirror.world.run("lock", "-c", str(mirror.file))
    assert f"{mirror.lock} was not written: it would lack source.test/app" in said.err


async def test_a_registry_that_fails_half_way_leaves_the_old_lines(mirror):
    for number in range(3):
        mirror.push(f"v{number}")
    mirror.write({"from": "app", "tags": tags("v*")})
    await mirror.succeed("lock")
    before = mirror.lock.read_text()
    mirror.push("v0")
    mirror.push("v9")
    mirror.source.app.faults.on("GET HEAD", "manifest", reference="v2").status(403)
    ran = await mirror.run("lock")
    assert ran.status == 1
    assert mirror.lock.read_text() == before
    assert ran.report["failed"][0]["keeps_lines"]


async def test_everything_that_fails_for_want_of_a_login_is_status_4(mirror):
    mirror.push("v1")
    mirror.write({"from": "app", "tags": tags("v*")})
    mirror.source.app.faults.on("GET", "tag_list").status(403)
    assert (await mirror.run("lock")).status == 4
    assert (await mirror.run("lock", "--check")).status == 2


@pytest.mark.parametrize("rules", ["the same", "others", "other platforms"])
async def test_what_could_not_be_looked_up_is_never_gone(mirror, world, rules):
    """Not even where the rules are others, so that the lock cannot keep its old lines."""
    for repository in ("app", "other"):
        mirror.push("v1", mirror.seed.index(), repository=repository)
    lost = mirror.push("v2", repository="other")
    mapping = {"from": "app", "tags": tags("v*")}
    mirror.write(mapping, {"from": "other", "tags": tags("v*")})
    await mirror.succeed("lock")
    before = mirror.lock.read_text()

    mapping |= {
        "the same": {},
        "others": {"tags": {"glob": "v*", "exclude": "v9"}},
        "other platforms": {"platforms": ["linux/amd64"]},
    }[rules]
    mirror.write(mapping, {"from": "other", "tags": tags("v*")})
    mirror.source.app.faults.on("GET", "tag_list", repository="app").status(403)
    del mirror.source.app.repositories["other"].tags["v2"]
    for check_only, status in ((["--check"], 2), ([], 1)):
        ran = await world.run("lock", *check_only, "-c", str(mirror.file))
        assert ran.status == status
        gone = [line for line in ran.out.splitlines() if line.startswith("gone ")]
        assert gone == [f"gone source.test/other:v2 {lost.top}"]
        assert "failed source.test/app" in ran.err
        assert ("was not written" in ran.err) is (rules != "the same" and not check_only)
        assert (mirror.lock.read_text() == before) is (bool(check_only) or rules != "the same")


async def test_an_image_that_is_itself_at_fault_fails_alone(mirror):
    """No such tag, no such platform: the others are locked, and what was known of it stays."""
    index = mirror.push("v1", mirror.seed.index())
    mirror.push("v2", mirror.seed.index())
    mapping = {"from": "app", "tags": tags("v1", "v2", "v3"), "platforms": ["linux/amd64"]}
    mirror.write(mapping)
    ran = await mirror.run("lock")
    assert ran.status == 1
    assert [each["source"] for each in ran.report["failed"]] == ["source.test/app:v3"]
    assert mirror.digests().keys() == {"v1", "v2"}

    mirror.push("v1", mirror.seed.index(platforms=("linux/s390x", "linux/arm64")))
    ran = await mirror.run("lock")
    failed = {each["source"]: each["keeps_lines"] for each in ran.report["failed"]}
    assert failed == {"source.test/app:v1": True, "source.test/app:v3": False}
    assert mirror.digests()["v1"] == index.top


async def test_a_tag_that_moves_while_it_is_looked_at_is_locked_as_it_is_then(mirror):
    mirror.push("v1")
    mirror.write({"from": "app", "tags": tags("v1")})
    await mirror.succeed("lock")
    between = mirror.push("v1")
    newest = mirror.seed.image()

    def move(request: Request) -> Answer | None:
        if request.method == "GET" and request.reference == between.top:
            mirror.source.app.repositories["app"].manifests.pop(between.top, None)
            newest.load_into(mirror.source.app, "app", "v1")
        return None

    mirror.source.app.intercept = move
    await mirror.succeed("lock")
    assert mirror.digests() == {"v1": newest.top}


async def test_only_some_repositories(mirror):
    for repository in ("app", "other"):
        mirror.push("v1", repository=repository)
    mapping = {"tags": tags("v1")}
    mirror.write({"from": "app", **mapping}, {"from": "other", **mapping})
    await mirror.succeed("lock")
    before = mirror.lock.read_text().splitlines()
    mirror.push("v1")
    mirror.push("v1", repository="other")

    ran = await mirror.run("lock", "--only", "other", "--check")
    assert ran.status == 1
    assert [each["source"] for each in ran.report["changes"]] == ["source.test/other:v1"]
    await mirror.succeed("lock", "--only", "source.test/other")
    assert mirror.source.journal.count(repository="app") == 0
    after = mirror.lock.read_text().splitlines()
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert len(moved) == 1
    assert "other:v1" in moved[0]

    ran = await mirror.run("lock", "--only", "nothing")
    assert ran.status == 3
    assert "--only nothing: no mapping has this repository as `from`" in ran.err


async def test_what_the_configuration_no_longer_names_leaves_the_lock(mirror):
    for repository in ("app", "other"):
        mirror.push("v1", repository=repository)
    mapping = {"tags": tags("v1")}
    mirror.write({"from": "app", **mapping}, {"from": "other", **mapping})
    await mirror.succeed("lock")
    mirror.write({"from": "app", **mapping})
    ran = await mirror.succeed("lock")
    assert [each["kind"] for each in ran.report["changes"]] == ["gone"]
    assert "other" not in mirror.lock.read_text()


async def test_other_artifacts_are_looked_for_when_the_mapping_takes_others(mirror):
    """Other tags alone cost no look at what stays."""
    image = mirror.push("v1")
    signature = mirror.attach(image)
    mirror.write({"from": "app", "tags": tags("v*"), "artifacts": {"include": [SBOM]}})
    await mirror.succeed("lock")
    assert "artifacts" not in mirror.lines()["v1"]
    mirror.write({"from": "app", "tags": tags("v*", "w*"), "artifacts": {"include": [SBOM]}})
    ran = await mirror.succeed("lock")
    assert (ran.report["changes"], ran.report["rules_changed"]) == ([], True)
    assert asked(mirror.source) == {"GET tag_list": 1, "HEAD manifest": 1}
    mirror.write({"from": "app", "tags": tags("v*")})
    (change,) = (await mirror.succeed("lock")).report["changes"]
    assert change["after"]["artifacts"] == [signature.top]


# The file.


async def test_a_lock_is_readable_for_all_and_a_link_stays_one(mirror, tmp_path):
    mirror.push("v1")
    mirror.write({"from": "app", "tags": tags("v1")})
    await mirror.succeed("lock")
    assert mirror.lock.stat().st_mode & 0o777 == 0o644
    elsewhere = tmp_path / "elsewhere"
    mirror.lock.rename(elsewhere)
    mirror.lock.symlink_to(elsewhere)
    elsewhere.chmod(0o600)
    mirror.push("v1")
    await mirror.succeed("lock")
    assert mirror.lock.is_symlink()
    assert elsewhere.stat().st_mode & 0o777 == 0o600
    assert not any(name.endswith(".partial") for name in os.listdir(tmp_path))


async def test_a_full_disk_leaves_the_old_lock(mirror, tmp_path, monkeypatch):
    mirror.push("v1")
    mirror.write({"from": "app", "tags": tags("v1")})
    await mirror.succeed("lock")
    before = mirror.lock.read_text()
    mirror.push("v1")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    text = "was not written and is unchanged: No space left on device"
    ran = await mirror.run("lock")
    assert ran.status == 2
    assert text in ran.out
    assert mirror.lock.read_text() == before
    assert [name for name in os.listdir(tmp_path) if "lock" in name] == ["mirror.lock"]


async def test_a_lock_that_cannot_be_read_is_a_configuration_error(mirror):
    mirror.write({"from": "app", "tags": tags("v1")})
    mirror.lock.write_text('{"lock": 1}\n<<<<<<< HEAD\n')
    for command in (["lock"], ["sync", "--locked"]):
        ran = await mirror.run(*command)
        assert ran.status == 3
        assert f"{mirror.lock}:2:1: conflict marks" in ran.err
        assert ran.report["problems"][0]["line"] == 2
    mirror.lock.unlink()
    mirror.lock.mkdir()
    assert (await mirror.run("lock")).status == 3


# What is shown.


async def test_what_changed_is_a_line_each(mirror, world):
    old = {tag: mirror.push(tag) for tag in ("v1", "v2", "v3")}
    mirror.write({"from": "app", "tags": tags("v*")})
    said = await world.run("lock", "-c", str(mirror.file))
    assert said.out.splitlines() == [
        *(f"came source.test/app:{tag} {image.top}" for tag, image in old.items()),
        "changed the mappings, or their rules",
    ]
    assert (await world.run("lock", "-c", str(mirror.file))).out == ""
    ran = await world.run("lock", "--check", "-c", str(mirror.file))
    assert (ran.status, ran.out, ran.err) == (0, "", "")

    new = mirror.push("v1")
    signature = mirror.attach(old["v2"])
    del mirror.source.app.repositories["app"].tags["v3"]
    options = ("lock", "--recheck", "-c", str(mirror.file))
    checked = await world.run(*options, "--check")
    assert checked.status == 1
    assert signature.top not in mirror.lock.read_text()
    said = await world.run(*options)
    assert (said.status, said.out) == (0, checked.out)
    assert said.out.splitlines() == [
        f"moved source.test/app:v1 {old['v1'].top} -> {new.top}",
        f"changed source.test/app:v2 {old['v2'].top} (artifacts: 1 came, 0 gone)",
        f"gone source.test/app:v3 {old['v3'].top}",
    ]
    assert signature.top in mirror.lock.read_text()
    assert (await world.run(*options, "--check")).status == 0


# A run from a lock.


async def test_a_run_from_a_lock_copies_what_was_reviewed_and_asks_nothing_else(mirror):
    reviewed = {f"v{number}": mirror.push(f"v{number}") for number in range(3)}
    signature = mirror.attach(reviewed["v0"])
    mirror.write({"from": "app", "tags": tags("v*")})
    await mirror.succeed("lock")
    mirror.push("v1")
    mirror.push("v9")
    late = mirror.attach(reviewed["v2"])

    ran = await mirror.succeed("sync", "--locked")
    assert ran.statuses() == ["synced"] * 3
    assert mirror.held() == {tag: image.top for tag, image in reviewed.items()}
    manifests = mirror.target.app.repositories["app"].manifests
    assert signature.top in manifests
    assert late.top not in manifests
    assert mirror.source.journal.count(kind="tag_list") == 0
    assert mirror.source.journal.count(kind="referrers") == 0
    fetched = mirror.source.journal.matching(kind="manifest")
    assert sorted(str(entry.reference) for entry in fetched) == sorted(
        [*(image.top for image in reviewed.values()), signature.top]
    )

    await mirror.skip_all(3)


async def test_a_lock_that_is_not_for_this_configuration_stops_the_run_before_any_request(mirror):
    mirror.push("v1")
    mirror.write({"from": "app", "tags": tags("v*")})
    ran = await mirror.run("sync", "--locked")
    assert ran.status == 3
    assert f"the lock file {mirror.lock} does not exist" in ran.err
    assert "run `regsync lock`" in ran.err

    await mirror.succeed("lock")
    for mapping in (
        {"from": "app", "tags": tags("v*", "w*")},
        {"from": "app", "tags": tags("v*"), "platforms": ["linux/arm64"]},
        {"from": "app", "tags": tags("v*"), "artifacts": {"enabled": False}},
    ):
        mirror.write({"from": "app", "tags": tags("v*"), "to": "x"}, mapping)
        for command in ("sync", "audit"):
            ran = await mirror.run(command, "--locked")
            assert ran.status == 3
            assert "mappings[1], from source.test/app" in ran.err
            assert asked(mirror.source) == asked(mirror.target) == {}


async def test_a_path_for_the_lock_means_a_run_from_it(mirror, world, tmp_path):
    image = mirror.push("v1")
    mirror.write({"from": "app", "tags": tags("v*")})
    elsewhere = str(tmp_path / "elsewhere.lock")
    await mirror.succeed("lock", "--lock", elsewhere)
    assert not mirror.lock.exists()
    mirror.push("v1")
    await mirror.succeed("sync", "--lock", elsewhere)
    assert mirror.held() == {"v1": image.top}
    ran = await world.run("sync", "--locked", "-c", "-", stdin=mirror.file.read_text())
    assert ran.status == 3
    assert "--lock PATH is required" in ran.err


async def test_a_digest_that_is_gone_fails_its_image_alone(mirror):
    """What the tag names now has not been reviewed, so it is not copied."""
    kept = mirror.push("v1")
    gone = mirror.push("v2")
    mirror.write({"from": "app", "tags": tags("v*")})
    await mirror.succeed("lock")
    mirror.push("v2")
    del mirror.source.app.repositories["app"].manifests[gone.top]

    ran = await mirror.run("sync", "--locked")
    assert ran.status == 1
    assert mirror.held() == {"v1": kept.top}
    (failed,) = (each for each in ran.images if each["status"] == "failed")
    assert failed["source"] == "source.test/app:v2"
    assert failed["error"]["code"] == "SOURCE_ERROR"
    assert "regsync lock" in failed["error"]["hint"]
    assert mirror.source.journal.count("HEAD", "manifest") == 0


async def test_an_artifact_that_is_gone_fails_its_image(mirror):
    image = mirror.push("v1")
    signature = mirror.attach(image)
    mirror.write({"from": "app", "tags": tags("v1")})
    await mirror.succeed("lock")
    del mirror.source.app.repositories["app"].manifests[signature.top]
    ran = await mirror.run("sync", "--locked")
    assert ran.statuses() == ["failed"]
    assert mirror.held() == {}
    assert "run `regsync lock --recheck`" in ran.images[0]["error"]["hint"]
    await mirror.succeed("lock", "--recheck")
    assert (await mirror.succeed("sync", "--locked")).statuses() == ["synced"]


async def test_the_rules_choose_among_the_tags_in_the_lock(mirror):
    """`latest` and `min_tags` mean what they meant when the lock was made, whatever came since, and a
    line that a reviewer takes out is not copied.
    """
    for version in ("1.0.0", "1.1.0", "1.2.0", "1.3.0", "2.0.0"):
        mirror.push(version)
    mirror.write(
        {"from": "app", "to": "latest", "tags": {"semver": "1.x", "latest": 3}},
        {"from": "app", "to": "floor", "tags": {"semver": ">=2", "min_tags": 2}},
    )
    await mirror.succeed("lock")
    assert mirror.digests().keys() == {"1.1.0", "1.2.0", "1.3.0", "2.0.0"}
    mirror.push("1.4.0")
    mirror.push("2.1.0")
    ran = await mirror.succeed("sync", "--locked")
    assert mirror.held(repository="latest").keys() == {"1.1.0", "1.2.0", "1.3.0"}
    assert mirror.held(repository="floor").keys() == {"1.3.0", "2.0.0"}
    assert [each["selected"] for each in ran.report["mappings"]] == [3, 2]

    lines = mirror.lock.read_text().splitlines()
    mirror.lock.write_text("\n".join(line for line in lines if ":1.2.0" not in line))
    ran = await mirror.succeed("sync", "--locked")
    assert [each["selected"] for each in ran.report["mappings"]] == [2, 2]


async def test_several_targets_have_one_head_each_a_tag(world, tmp_path):
    mirror = LockedMirror(world, tmp_path, "one", "two")
    images = {f"v{number}": mirror.push(f"v{number}") for number in range(4)}
    mirror.attach(images["v1"])
    mirror.write({"from": "app", "tags": tags("v*")})
    await mirror.succeed("lock")
    await mirror.succeed("sync", "--locked")
    assert [mirror.held(place).keys() for place in mirror.targets.values()] == [images.keys()] * 2
    await mirror.succeed("sync", "--locked")
    assert asked(mirror.source) == {}
    assert [asked(place) for place in mirror.targets.values()] == [{"HEAD manifest": 4}] * 2


async def test_a_job_without_state_has_one_head_a_tag_too(mirror, tmp_path):
    for number in range(4):
        mirror.push(f"v{number}")
    mirror.write({"from": "app", "tags": tags("v*")}, **{"global": {"cache_dir": "kept"}})
    await mirror.succeed("lock")
    await mirror.succeed("sync", "--locked")
    assert mirror.target.journal.count(kind="tag_list") == 0
    (tmp_path / "kept").rename(tmp_path / "lost")
    await mirror.skip_all(4)


async def test_without_state_a_quarter_of_the_day_decides_about_artifacts(mirror):
    mirror.cache.write_text("a file where the directory was to be")
    mirror.attach(mirror.push("v1"))
    mirror.write({"from": "app", "tags": tags("v*")})
    for words in (("lock",), ("sync", "--locked")):
        assert (await mirror.run(*words)).status == 0

    asked_about = []
    for _ in range(16):
        await anyio.sleep(DAY / 4)
        assert (await mirror.run("sync", "--locked")).statuses() == ["skipped"]
        asked_about.append(asked(mirror.target)["HEAD manifest"] - 1)
        assert asked(mirror.source) == {}
    assert sum(asked_about) == 4, asked_about


async def test_the_type_that_a_lock_does_not_have_is_read_for_filters(mirror):
    """A signature under a tag of cosign's: the first mapping has no filters, and asks for no type."""
    image = mirror.push("v1")
    signature = mirror.load(mirror.seed.image(), f"{referrers_tag(image.top)}.sig")
    kind = signature.document["layers"][0]["mediaType"]
    mirror.write(
        {"from": "app", "to": "all", "tags": tags("v*")},
        {"from": "app", "to": "same", "tags": tags("v*"), "artifacts": {"include": [kind]}},
        {"from": "app", "to": "bare", "tags": tags("v*"), "artifacts": {"include": [SBOM]}},
    )
    await mirror.succeed("lock")
    (locked,) = mirror.lines()["v1"]["artifacts"]
    assert "type" not in locked
    await mirror.succeed("sync", "--locked")
    held = {
        name: signature.top in each.manifests
        for name, each in mirror.target.app.repositories.items()
    }
    assert held == {"all": True, "same": True, "bare": False}


async def test_an_unchanged_run_asks_the_source_for_no_token(world, tmp_path):
    service = TokenService({"captain": "secret"}, now=anyio.current_time)
    mirror = LockedMirror(world, tmp_path, auth=service)
    mirror.push("v1")
    login = {"auth_type": "basic", "credentials": {"username": "captain", "password": "secret"}}
    registries = {
        "source": {"url": mirror.source.url, **login},
        "target": {"url": mirror.target.url, **login},
    }
    mirror.write({"from": "app", "tags": tags("v1")}, registries=registries)
    for command in (["lock"], ["sync", "--locked"], ["sync", "--locked"]):
        before = (len(mirror.source.journal.entries), len(service.issued))
        ran = await world.run(*command, "-q", "-c", str(mirror.file))
        assert ran.status == 0, ran.err
    after = (len(mirror.source.journal.entries), len(service.issued))
    assert after == (before[0], before[1] + 1)  # the token is the target's


@pytest.mark.parametrize("api", [True, False], ids=["referrers API", "fallback tags"])
async def test_artifacts_come_by_their_locked_digests(world, tmp_path, api):
    """Tags of cosign's and lists under fallback tags may have moved since."""
    mirror = LockedMirror(world, tmp_path, referrers_api=api)
    image = mirror.push("v1")
    signature = mirror.attach(image)
    tag = referrers_tag(image.top) + ".sig"
    cosign = mirror.push(tag)
    mirror.write({"from": "app", "tags": tags("v*")})
    await mirror.succeed("lock")

    late = mirror.attach(image)
    mirror.push(tag)
    ran = await mirror.succeed("sync", "--locked")
    assert ran.images[0]["artifacts"]["synced"] == 2
    held = mirror.target.app.repositories["app"]
    assert {image.top, signature.top, cosign.top} <= held.manifests.keys()
    assert late.top not in held.manifests
    assert mirror.held()[tag] == cosign.top
    if not api:
        listed = held.manifests[mirror.held()[referrers_tag(image.top)]]
        (entry,) = json.loads(listed.body)["manifests"]
        assert entry["digest"] == signature.top
        assert entry["mediaType"] == signature.media_type
        assert entry["size"] == len(signature.body)
        assert entry["artifactType"] == SIGNATURE
    await mirror.skip_all(1)


async def test_a_list_at_the_target_is_mended_from_the_manifest_of_an_artifact(world, tmp_path):
    """The target holds the artifact and does not list it: its entry is made of the manifest, which is
    asked for by digest.
    """
    mirror = LockedMirror(world, tmp_path, referrers_api=False)
    image = mirror.push("v1")
    signature = mirror.attach(image)
    mirror.write({"from": "app", "tags": tags("v1")})
    await mirror.succeed("lock")
    await mirror.succeed("sync", "--locked")
    held = mirror.target.app.repositories["app"]
    listed = held.tags.pop(referrers_tag(image.top))
    await mirror.succeed("sync", "--locked", "--recheck")
    assert held.tags[referrers_tag(image.top)] == listed
    assert asked(mirror.source) == {"GET manifest": 1}
    assert mirror.source.journal.entries[0].reference == signature.top


async def test_recheck_asks_targets_for_what_the_lock_has(mirror):
    image = mirror.push("v1")
    signature = mirror.attach(image)
    mirror.write({"from": "app", "tags": tags("v1")})
    await mirror.succeed("lock")
    await mirror.succeed("sync", "--locked")
    late = mirror.attach(image)
    await mirror.skip_all(2, "--recheck")

    del mirror.target.app.repositories["app"].manifests[signature.top]
    await mirror.succeed("sync", "--locked", "--recheck")
    assert signature.top in mirror.target.app.repositories["app"].manifests
    assert late.top not in mirror.target.app.repositories["app"].manifests


async def test_an_artifact_that_a_new_lock_adds_arrives(mirror):
    image = mirror.push("v1")
    mirror.push("v2")
    mirror.write({"from": "app", "tags": tags("v*")})
    await mirror.succeed("lock")
    await mirror.succeed("sync", "--locked")
    late = mirror.attach(image)
    await mirror.succeed("lock", "--recheck")
    ran = await mirror.succeed("sync", "--locked")
    assert ran.statuses() == ["synced", "skipped"]
    assert late.top in mirror.target.app.repositories["app"].manifests
    assert asked(mirror.source) == {"GET manifest": 1, "GET blob": 1}
    await mirror.succeed("sync", "--locked")
    assert asked(mirror.target) == {"HEAD manifest": 2}


async def test_what_an_unlocked_run_has_copied_is_not_copied_again(mirror):
    images = [mirror.push(f"v{number}") for number in range(3)]
    mirror.attach(images[0])
    mirror.write({"from": "app", "tags": tags("v*")})
    await mirror.succeed("sync")
    await mirror.succeed("lock")
    await mirror.skip_all(3)


async def test_an_index_that_is_trimmed_otherwise_fails_its_image(mirror):
    mirror.push("v1", mirror.seed.index())
    mirror.write({"from": "app", "tags": tags("v1"), "platforms": ["linux/amd64"]})
    await mirror.succeed("lock")
    pushed = mirror.lines()["v1"]["pushed"]
    other = f"sha256:{7:064x}"
    mirror.lock.write_text(mirror.lock.read_text().replace(pushed, other))
    ran = await mirror.run("sync", "--locked")
    assert ran.statuses() == ["failed"]
    assert mirror.held() == {}
    error = ran.images[0]["error"]
    assert error["code"] == "CONTENT_ERROR"
    assert (
        f"the index trimmed to `platforms` is {pushed}, but {other} in the lock" in error["message"]
    )
    assert "run `regsync lock --recheck`" in error["hint"]
    await mirror.succeed("lock", "--recheck")
    assert (await mirror.succeed("sync", "--locked")).statuses() == ["synced"]


async def test_tags_that_never_move_are_skipped_by_the_targets_listing(mirror):
    for number in range(3):
        mirror.push(f"v{number}")
    mirror.write({"from": "app", "tags": tags("v*", immutable_tags="v*")})
    await mirror.succeed("lock")
    await mirror.succeed("sync", "--locked")
    ran = await mirror.succeed("sync", "--locked")
    assert [each["reason"] for each in ran.images] == ["immutable_tag"] * 3
    assert asked(mirror.source) == {}
    assert asked(mirror.target) == {"GET tag_list": 1}


async def test_a_tag_that_never_moves_gets_an_artifact_that_a_new_lock_adds(mirror):
    image, *_ = (mirror.push(f"v{number}") for number in range(1, 4))
    mirror.write({"from": "app", "tags": tags("v*", immutable_tags="v*")})
    await mirror.succeed("lock")
    await mirror.succeed("sync", "--locked")
    signature = mirror.attach(image)
    ran = await mirror.succeed("sync", "--locked")
    assert [each["reason"] for each in ran.images] == ["immutable_tag"] * 3  # as the lock is

    await mirror.succeed("lock", "--recheck")
    ran = await mirror.succeed("sync", "--locked")
    assert sum(each["artifacts"]["synced"] for each in ran.images) == 1
    assert app_of(mirror.target).manifest("app", signature.top) is not None
    ran = await mirror.succeed("sync", "--locked")
    assert [each["reason"] for each in ran.images] == ["immutable_tag"] * 3
    assert asked(mirror.source) == {}
    assert asked(mirror.target) == {"GET tag_list": 1}


async def test_an_image_that_requires_an_artifact_and_has_none_in_the_lock_fails(mirror):
    image = mirror.push("v1")
    mirror.write({"from": "app", "tags": tags("v1"), "artifacts": {"require_artifacts": True}})
    await mirror.succeed("lock")
    mirror.attach(image)
    ran = await mirror.run("sync", "--locked")
    assert ran.statuses() == ["failed"]
    assert "the image has no artifact" in ran.images[0]["error"]["message"]
    await mirror.succeed("lock", "--recheck")
    assert (await mirror.succeed("sync", "--locked")).statuses() == ["synced"]


async def test_a_dry_run_and_a_shard_are_from_the_lock_too(mirror):
    images = {name: mirror.push("v1", repository=name) for name in ("app", "other")}
    mirror.attach(images["app"])
    mapping = {"tags": tags("v*"), "artifacts": {"exclude": [SIGNATURE]}}
    mirror.write(
        {"from": "app", "tags": tags("v*")},
        {"from": "app", "to": "part", **mapping},
        {"from": "other", "tags": tags("v*")},
    )
    await mirror.succeed("lock")
    for name in images:
        mirror.push("v1", repository=name)
        mirror.push("v2", repository=name)

    def source_was_asked_by_digest_alone() -> bool:
        asked_for = {str(entry.reference) for entry in mirror.source.journal.entries}
        return all(each.startswith("sha256:") for each in asked_for) and bool(asked_for)

    ran = await mirror.succeed("sync", "--locked", "--dry-run")
    assert ran.statuses() == ["would_sync"] * 3
    stripped = {each["target"]: each["artifacts"]["stripped"] for each in ran.images}
    assert stripped["target.test/part:v1"] == 1
    assert sum(stripped.values()) == 1
    assert source_was_asked_by_digest_alone()
    assert mirror.source.journal.count(kind="referrers") == 0
    assert mirror.target.app.repositories == {}

    ran = await mirror.succeed("sync", "--locked", "--shard", "1/2")
    assert ran.statuses() == ["synced"]
    assert mirror.held(repository="other") == {"v1": images["other"].top}


async def test_what_failed_is_asked_for_again_from_the_lock(mirror, tmp_path):
    images = {f"v{number}": mirror.push(f"v{number}") for number in range(3)}
    mirror.write({"from": "app", "tags": tags("v*")})
    await mirror.succeed("lock")
    mirror.push("v1")
    mirror.target.app.faults.on("PUT", "manifest", reference="v1").status(403)
    ran = await mirror.run("sync", "--locked")
    assert ran.status == 1
    report = tmp_path / "report.json"
    report.write_text(ran.out)
    mirror.target.app.faults.clear()
    ran = await mirror.succeed("sync", "--locked", "--retry-from", str(report))
    assert ran.statuses() == ["synced"]
    assert mirror.held() == {tag: image.top for tag, image in images.items()}
    assert mirror.source.journal.count("HEAD") == 0
