"""`regsync lock` and runs from a lock: what they ask, what they copy, what they refuse."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest

from conformance.images import Image
from conformance.messages import Answer, Request, Response
from conformance.tokens import BasicAuth, TokenService
from conformance.walks import FAMILIES, family, referrers_tag
from tests.attached import Scene
from tests.ends import Ran, Virtual, only, stopped_at, tags
from tests.mirrors import SBOM, SIGNATURE, LockedMirror, asked
from tests.published import check
from tests.states import rows
from tests.thinning import thinned
from tests.watching import Scene as Watched
from tests.watching import lines

HOUR = 3600.0
DAY = 24 * HOUR
ALL = {"from": "app", "tags": tags("v*")}
PLAIN = {"artifacts": {"enabled": False}}


class Locked(LockedMirror):
    """A mirror of `app` with images v0, v1 and so on, and a lock of them."""

    def hold(self, count: int = 1) -> dict[str, Image]:
        return {f"v{number}": self.push(f"v{number}") for number in range(count)}

    async def lock_all(self, *mappings: Any, **top: Any) -> Ran:
        """Write mappings, or the one of all images, and lock them."""
        self.write(*(mappings or (ALL,)), **top)
        return await self.succeed("lock")

    @property
    def manifests(self) -> set[str]:
        """What the target's `app` holds."""
        return {*self.target.app.repositories["app"].manifests}

    def artifacts(self) -> list[str]:
        """The digests of the artifacts of v1 in the lock."""
        return [each["digest"] for each in self.lines()["v1"]["artifacts"]]

    async def change(self, *options: str) -> dict[str, Any]:
        """Lock again, and return the one change."""
        return only((await self.succeed("lock", *options)).report["changes"])  # type: ignore[no-any-return]

    async def say(self, *options: str) -> Ran:
        """Lock as a user does, without JSON."""
        return await self.world.run("lock", *options, "-c", str(self.file))


@pytest.fixture
def mirror(world: Virtual, tmp_path: Path) -> Locked:
    return Locked(world, tmp_path)


def moved_lines(before: str, after: str) -> list[str]:
    """Return the lines that are others in a lock; no line came or went."""
    pairs = zip(before.splitlines(), after.splitlines(), strict=True)
    return [new for old, new in pairs if old != new]


# What a lock costs, and what is in it.


async def test_a_first_lock_and_an_unchanged_one(mirror):
    images = mirror.hold(3)
    mirror.push("nightly")
    ran = await mirror.lock_all()
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
    mirror.hold(3)
    await mirror.lock_all()
    before = mirror.lock.read_text()
    moved = mirror.push("v1")
    signature = mirror.attach(moved)

    ran = await mirror.succeed("lock")
    check("lock", ran.report)
    change = only(ran.report["changes"])
    assert (change["kind"], change["after"]) == ("moved", moved.top)
    # Of the signature, too, it is asked what refers to it.
    looked = {"GET manifest": 1, "GET referrers": 2}
    assert asked(mirror.source) == {"GET tag_list": 1, "HEAD manifest": 3, **looked}
    assert len(moved_lines(before, mirror.lock.read_text())) == 1
    line = mirror.lines()["v1"]
    artifact = {"digest": signature.top, "type": SIGNATURE, "subject": moved.top}
    assert line["artifacts"] == [artifact]
    await mirror.succeed("lock", "--recheck")
    assert len(moved_lines(before, mirror.lock.read_text())) == 1


async def test_two_platforms_of_one_source_have_lines_of_their_own(mirror):
    child = mirror.seed.image()
    index = mirror.push("v1", mirror.seed.index([child, mirror.seed.image(architecture="arm64")]))
    signature = mirror.attach(child)
    mirror.attach(index)
    await mirror.lock_all(
        {**ALL, "to": "whole"}, {**ALL, "to": "part", "platforms": ["linux/amd64"]}
    )
    # The index and its manifests are fetched once for both lines.
    assert mirror.source.journal.count("GET", "manifest", reference="v1") == 1
    read = [json.loads(line) for line in mirror.lock.read_text().splitlines()]
    whole, part = (line for line in read if "source" in line)
    assert whole["digest"] == part["digest"] == index.top
    assert "pushed" not in whole
    assert part["pushed"] not in (None, index.top)
    assert len(whole["artifacts"]) == 2
    # What refers to the top of a trimmed index is not carried.
    assert [each["digest"] for each in part["artifacts"]] == [signature.top]

    await mirror.succeed("lock")
    assert asked(mirror.source) == {"GET tag_list": 1, "HEAD manifest": 1}
    assert (await mirror.succeed("sync", "--locked")).statuses() == ["synced"] * 2
    assert mirror.held(repository="whole") == {"v1": index.top}
    assert mirror.held(repository="part") == {"v1": part["pushed"]}
    await mirror.skip_all(2)


async def test_artifacts_that_one_mapping_excludes_are_the_other_ones(mirror):
    image = mirror.push("v1")
    sbom = mirror.attach(image, SBOM)
    signature = mirror.attach(image)
    of_sbom = mirror.attach(sbom)
    await mirror.lock_all(
        {**ALL, "to": "all"},
        {**ALL, "to": "signed", "artifacts": {"exclude": [SBOM]}},
        {**ALL, "to": "bare", **PLAIN},
    )
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
    mirror = Locked(world, tmp_path, of={"source": {"auth": BasicAuth({"a": "right"})}})
    mirror.attach(mirror.push("v1"))

    def login(password: str) -> dict[str, object]:
        credentials = {"username": "a", "password": password}
        return {"url": mirror.source.url, "auth_type": "basic", "credentials": credentials}

    other = {"from": "app", "to": "b", "source": "again", "tags": tags("v2")}
    mirror.write(
        {"from": "app", "tags": tags("v1")},
        {**other, "artifacts": {"include": [SBOM]}},
        registries={"source": login("right"), "again": login("wrong")},
        defaults={"targets": ["target"]},
    )
    ran = await mirror.run("lock")
    assert (ran.status, ran.report["locked"]) == (1, 1)


async def test_without_artifacts_and_platforms_a_head_a_tag_is_enough(mirror):
    images = mirror.hold(2)
    await mirror.lock_all({"from": "app", "tags": tags("v0", "v1"), **PLAIN})
    assert asked(mirror.source) == {"HEAD manifest": 2}
    assert mirror.digests() == {tag: image.top for tag, image in images.items()}


async def test_a_tag_that_moves_to_a_digest_of_another_line_costs_its_head_alone(mirror):
    image = mirror.push("v1")
    mirror.attach(image)
    mirror.push("latest")
    await mirror.lock_all({"from": "app", "tags": tags("v1", "latest")})
    mirror.push("latest", image)
    await mirror.succeed("lock")
    assert asked(mirror.source) == {"HEAD manifest": 2}
    read = mirror.lines()
    assert read["latest"]["artifacts"] == read["v1"]["artifacts"] != []


async def test_digests_in_a_listing_spare_the_heads(mirror, world):
    """Google's registries tell them."""
    provider = world.persona("gcr_open")
    images = {tag: mirror.seed.image() for tag in ("v1", "v2")}
    for tag, image in images.items():
        image.load_into(provider, "project/app", tag)
    named = {image.top: {"tag": [tag]} for tag, image in images.items()}
    listing = {"name": "project/app", "tags": [*images], "manifest": named}

    def list_digests(request: Request) -> Answer | None:
        headers = [("Content-Type", "application/json")]
        answer = Response(200, headers, json.dumps(listing).encode())
        return answer if request.kind == "tag_list" else None

    provider.intercept = list_digests
    registry = {"url": provider.row.hosts["registry"], "auth_type": "anonymous"}
    mapping = {"from": "project/app", "tags": tags("v*"), **PLAIN}
    await mirror.lock_all(mapping, registries={"source": registry})
    assert mirror.digests() == {tag: image.top for tag, image in images.items()}
    assert provider.journal.summary() == {"GET tag_list": 1}


async def test_signatures_that_come_later(mirror):
    """One under a tag of cosign's is in the listing; what the API alone could tell is asked for with
    --recheck.
    """
    image = mirror.push("v1")
    mirror.push("v2")
    await mirror.lock_all()
    late = mirror.attach(image)
    assert (await mirror.succeed("lock")).report["changes"] == []
    change = await mirror.change("--recheck")
    assert (change["kind"], change["before"], change["after"]) == ("changed", image.top, image.top)
    assert mirror.artifacts() == [late.top]
    assert asked(mirror.source)["GET referrers"] == 3  # of both images and the signature

    tag = referrers_tag(image.top) + ".sig"
    cosign = mirror.push(tag)
    assert (await mirror.change())["kind"] == "changed"
    assert sorted(mirror.artifacts()) == sorted([late.top, cosign.top])
    assert [each.get("tag") for each in mirror.lines()["v1"]["artifacts"]] == [tag, None]
    await mirror.succeed("lock")
    assert asked(mirror.source) == {"GET tag_list": 1, "HEAD manifest": 2}


async def test_other_artifacts_are_looked_for_when_the_mapping_takes_others(mirror):
    """Other tags alone cost no look at what stays."""
    signature = mirror.attach(mirror.push("v1"))
    sboms = {"artifacts": {"include": [SBOM]}}
    await mirror.lock_all({**ALL, **sboms})
    assert "artifacts" not in mirror.lines()["v1"]
    ran = await mirror.lock_all({"from": "app", "tags": tags("v*", "w*"), **sboms})
    assert (ran.report["changes"], ran.report["rules_changed"]) == ([], True)
    assert asked(mirror.source) == {"GET tag_list": 1, "HEAD manifest": 1}
    await mirror.lock_all()
    assert mirror.artifacts() == [signature.top]


# Of several repositories.

OTHER = {"from": "other", "tags": tags("v*")}


async def lock_both(mirror: Locked) -> None:
    """Lock v1 of two repositories, which is an index."""
    for repository in ("app", "other"):
        mirror.push("v1", mirror.seed.index(), repository=repository)
    await mirror.lock_all(ALL, OTHER)


async def test_only_some_repositories(mirror):
    await lock_both(mirror)
    before = mirror.lock.read_text()
    for repository in ("app", "other"):
        mirror.push("v1", repository=repository)

    ran = await mirror.run("lock", "--only", "other", "--check")
    assert ran.status == 1
    assert [each["source"] for each in ran.report["changes"]] == ["source.test/other:v1"]
    await mirror.succeed("lock", "--only", "other")
    assert mirror.source.journal.count(repository="app") == 0
    assert "other:v1" in only(moved_lines(before, mirror.lock.read_text()))

    ran = await mirror.run("lock", "--only", "nothing")
    assert ran.status == 3
    assert "--only nothing: no mapping has this repository as `from`" in ran.err


async def test_what_the_configuration_no_longer_names_leaves_the_lock(mirror):
    await lock_both(mirror)
    ran = await mirror.lock_all(ALL)
    assert [each["kind"] for each in ran.report["changes"]] == ["gone"]
    assert "other" not in mirror.lock.read_text()


# What fails while a lock is made.


async def test_a_first_lock_has_what_could_be_looked_up(mirror):
    """A mapping that it lacks is refused by --locked; of a tag that it lacks it was told."""
    images = mirror.hold(3)
    mirror.push("v1", repository="other")
    mirror.write(ALL, OTHER)
    faults = mirror.source.app.faults
    faults.on("GET", "manifest", reference="v1", repository="app").status(401)
    faults.on("GET", "tag_list", repository="other").first().status(403)
    ran = await mirror.run("lock")
    assert (ran.status, ran.report["written"]) == (1, True)
    failed = {each["source"]: each["error"]["code"] for each in ran.report["failed"]}
    assert failed == {"source.test/app:v1": "AUTH_ERROR", "source.test/other": "AUTH_ERROR"}
    assert mirror.digests() == {tag: images[tag].top for tag in ("v0", "v2")}
    ran = await mirror.run("sync", "--locked")
    assert ran.status == 3
    assert "mappings[1], from source.test/other, is not in the lock" in ran.err

    assert (await mirror.run("lock")).status == 1
    await mirror.succeed("sync", "--locked")
    assert mirror.held().keys() == {"v0", "v2"}
    assert mirror.held(repository="other").keys() == {"v1"}


async def test_an_image_that_fails_fails_alone_and_keeps_its_old_line(mirror):
    """Its registry refuses it, or it has no such platform any more."""
    for number in range(3):
        mirror.push(f"v{number}", mirror.seed.index())
    await mirror.lock_all({**ALL, "platforms": ["linux/amd64"]})
    before = mirror.digests()
    moved, new = (mirror.push(tag, mirror.seed.index()) for tag in ("v0", "v9"))
    mirror.push("v1", mirror.seed.index(platforms=("linux/s390x", "linux/arm64")))
    mirror.push("v2")
    mirror.source.app.faults.on("GET HEAD", "manifest", reference="v2").status(403)
    ran = await mirror.run("lock")
    assert ran.status == 1
    failed = {each["source"] for each in ran.report["failed"]}
    assert failed == {"source.test/app:v1", "source.test/app:v2"}
    assert mirror.digests() == {**before, "v0": moved.top, "v9": new.top}


async def test_a_line_of_other_artifact_rules_is_not_taken_for_one_of_the_new_ones(mirror):
    """Where its tag fails the mapping keeps its old rules, and all lines that were made by them, so
    that the next lock looks again.
    """
    signature = mirror.attach(mirror.push("v1"))
    mirror.attach(mirror.push("v2"))
    await mirror.lock_all({**ALL, **PLAIN})
    mirror.write(ALL)
    mirror.source.app.faults.on("HEAD", "manifest", reference="v1").first().status(403)
    mirror.source.app.faults.on("GET", "manifest", reference="v1").first().status(403)
    ran = await mirror.run("lock")
    assert (ran.status, ran.report["written"]) == (1, False)
    assert "source.test/app:v1" in only(ran.report["failed"])["error"]["message"]
    await mirror.succeed("lock")
    assert mirror.artifacts() == [signature.top]


async def test_everything_that_fails_for_want_of_a_login_is_status_4(mirror):
    mirror.hold()
    mirror.write(ALL)
    mirror.source.app.faults.on("GET", "tag_list").status(403)
    assert (await mirror.run("lock")).status == 4
    assert (await mirror.run("lock", "--check")).status == 2


@pytest.mark.parametrize("rules", ["the same", "others", "other platforms"])
async def test_what_could_not_be_looked_up_is_never_gone(mirror, rules):
    """Not even where the rules are others. Then `--locked` goes on refusing the mapping."""
    lost = mirror.push("v2", repository="other")
    await lock_both(mirror)
    before = mirror.lock.read_text()
    changed = {
        "the same": {},
        "others": {"tags": {"glob": "v*", "exclude": "v9"}},
        "other platforms": {"platforms": ["linux/amd64"]},
    }[rules]
    mirror.write({**ALL, **changed}, OTHER)
    mirror.source.app.faults.on("GET", "tag_list", repository="app").status(403)
    del mirror.source.app.repositories["other"].tags["v2"]
    for check_only, status in ((["--check"], 2), ([], 1)):
        ran = await mirror.say(*check_only)
        assert ran.status == status
        gone = [line for line in ran.out.splitlines() if line.startswith("gone ")]
        assert gone == [f"gone source.test/other:v2 {lost.top}"]
        assert "failed source.test/app" in ran.err
        assert (mirror.lock.read_text() == before) is bool(check_only)
    assert [
        *before.splitlines()[:4],
        before.splitlines()[-2],
    ] == mirror.lock.read_text().splitlines()
    assert (await mirror.run("sync", "--locked")).status == (0 if rules == "the same" else 3)


# The file, and what is shown.


async def test_a_lock_is_readable_for_all_and_a_link_stays_one(mirror, tmp_path):
    mirror.hold()
    await mirror.lock_all()
    assert mirror.lock.stat().st_mode & 0o777 == 0o644
    elsewhere = tmp_path / "elsewhere"
    mirror.lock.rename(elsewhere)
    mirror.lock.symlink_to(elsewhere)
    elsewhere.chmod(0o600)
    mirror.hold()
    await mirror.succeed("lock")
    assert mirror.lock.is_symlink()
    assert elsewhere.stat().st_mode & 0o777 == 0o600
    assert not any(name.endswith(".partial") for name in os.listdir(tmp_path))


async def test_a_full_disk_leaves_the_old_lock(mirror, tmp_path, monkeypatch):
    mirror.hold()
    await mirror.lock_all()
    before = mirror.lock.read_text()
    mirror.hold()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    ran = await mirror.run("lock")
    assert ran.status == 2
    assert "was not written and is unchanged: No space left on device" in ran.out
    assert mirror.lock.read_text() == before
    assert [name for name in os.listdir(tmp_path) if "lock" in name] == ["mirror.lock"]


async def test_a_lock_that_cannot_be_read_is_a_configuration_error(mirror):
    mirror.write(ALL)
    mirror.lock.write_text('{"lock": 1}\n<<<<<<< HEAD\n')
    for command in (["lock"], ["sync", "--locked"]):
        ran = await mirror.run(*command)
        assert ran.status == 3
        assert f"{mirror.lock}:2: not a line that" in ran.report["error"]["message"]
    mirror.lock.unlink()
    mirror.lock.mkdir()
    assert (await mirror.run("lock")).status == 3
    ran = await mirror.run("sync", "--locked")
    assert ran.status == 3
    assert f"{mirror.lock} cannot be read" in ran.report["error"]["message"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda each: each.name)
async def test_a_signal_ends_a_lock_at_once_and_its_file_stays(mirror, number):
    mirror.hold(2)
    await mirror.lock_all()
    before = mirror.lock.read_bytes()
    mirror.push("v1")
    mirror.source.app.faults.on("HEAD GET", "manifest").stall()
    async with stopped_at(5.0, number=number):
        ran = await mirror.run("lock")
    assert ran.status == 128 + number
    assert ran.seconds == pytest.approx(5.0, abs=0.01)
    assert mirror.lock.read_bytes() == before


async def test_a_lock_that_can_be_written_nowhere_is_said_before_any_request(mirror):
    mirror.push("v1")
    mirror.write(ALL)
    ran = await mirror.run("lock", "--lock", str(mirror.directory / "none" / "mirror.lock"))
    assert (ran.status, ran.report["error"]["code"]) == (3, "CONFIG_ERROR")
    assert not mirror.source.journal.entries


async def test_what_changed_is_a_line_each(mirror):
    old = mirror.hold(3)
    mirror.write(ALL)
    assert (await mirror.say()).out.splitlines() == [
        *(f"came source.test/app:{tag} {image.top}" for tag, image in old.items()),
        "changed the mappings, or their rules",
    ]
    assert (await mirror.say()).out == ""
    ran = await mirror.say("--check")
    assert (ran.status, ran.out, ran.err) == (0, "", "")

    new = mirror.push("v0")
    signature = mirror.attach(old["v1"])
    del mirror.source.app.repositories["app"].tags["v2"]
    checked = await mirror.say("--recheck", "--check")
    assert checked.status == 1
    assert signature.top not in mirror.lock.read_text()
    said = await mirror.say("--recheck")
    assert (said.status, said.out) == (0, checked.out)
    assert said.out.splitlines() == [
        f"moved source.test/app:v0 {old['v0'].top} -> {new.top}",
        f"changed source.test/app:v1 {old['v1'].top}",
        f"gone source.test/app:v2 {old['v2'].top}",
    ]
    assert signature.top in mirror.lock.read_text()
    assert (await mirror.say("--recheck", "--check")).status == 0


# A run from a lock.


async def test_a_run_from_a_lock_copies_what_was_reviewed_and_asks_nothing_else(mirror):
    reviewed = mirror.hold(3)
    signature = mirror.attach(reviewed["v0"])
    await mirror.lock_all()
    mirror.push("v1")
    mirror.push("v9")
    late = mirror.attach(reviewed["v2"])

    assert (await mirror.succeed("sync", "--locked")).statuses() == ["synced"] * 3
    assert mirror.held() == {tag: image.top for tag, image in reviewed.items()}
    assert signature.top in mirror.manifests
    assert late.top not in mirror.manifests
    assert asked(mirror.source).keys() == {"GET manifest", "GET blob"}
    fetched = [str(each.reference) for each in mirror.source.journal.matching(kind="manifest")]
    assert sorted(fetched) == sorted([*(image.top for image in reviewed.values()), signature.top])
    await mirror.skip_all(3)


async def test_a_lock_that_is_not_for_this_configuration_stops_the_run_before_any_request(mirror):
    mirror.hold()
    mirror.write(ALL)
    ran = await mirror.run("sync", "--locked")
    assert ran.status == 3
    assert f"the lock file {mirror.lock} does not exist" in ran.err
    assert "run `regsync lock`" in ran.err

    await mirror.succeed("lock")
    for other in ({"tags": tags("v*", "w*")}, {"platforms": ["linux/arm64"]}, PLAIN):
        mirror.write({**ALL, "to": "x"}, {**ALL, **other})
        for command in ("sync", "audit"):
            ran = await mirror.run(command, "--locked")
            assert ran.status == 3
            assert "mappings[1], from source.test/app" in ran.err
            assert asked(mirror.source) == asked(mirror.target) == {}


async def test_a_path_for_the_lock_means_a_run_from_it(mirror, world, tmp_path):
    image = mirror.push("v1")
    mirror.write(ALL)
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
    """An image's, or an artifact's. What the tag names now has not been reviewed, so it is not
    copied.
    """
    kept, gone, signed = mirror.hold(3).values()
    signature = mirror.attach(signed)
    await mirror.lock_all()
    mirror.push("v1")
    for each in (gone, signature):
        del mirror.source.app.repositories["app"].manifests[each.top]
    ran = await mirror.run("sync", "--locked")
    assert ran.status == 1
    assert mirror.held() == {"v0": kept.top}
    failed = {each["source"]: each["error"] for each in ran.images if each["status"] == "failed"}
    assert failed.keys() == {"source.test/app:v1", "source.test/app:v2"}
    for error in failed.values():
        assert error["code"] == "SOURCE_ERROR"
        assert "run `regsync lock --recheck`" in error["hint"]
    assert mirror.source.journal.count("HEAD", "manifest") == 0


async def test_an_index_that_is_trimmed_otherwise_fails_its_image(mirror):
    mirror.push("v1", mirror.seed.index())
    await mirror.lock_all({**ALL, "platforms": ["linux/amd64"]})
    pushed, other = mirror.lines()["v1"]["pushed"], f"sha256:{7:064x}"
    mirror.lock.write_text(mirror.lock.read_text().replace(pushed, other))
    ran = await mirror.run("sync", "--locked")
    assert ran.statuses() == ["failed"]
    assert mirror.held() == {}
    error = ran.images[0]["error"]
    assert error["code"] == "CONTENT_ERROR"
    text = f"the index trimmed to `platforms` is {pushed}, but {other} in the lock"
    assert text in error["message"]
    assert "run `regsync lock --recheck`" in error["hint"]
    await mirror.succeed("lock", "--recheck")
    assert (await mirror.succeed("sync", "--locked")).statuses() == ["synced"]


async def test_an_image_that_requires_an_artifact_and_has_none_in_the_lock_fails(mirror):
    image = mirror.push("v1")
    await mirror.lock_all({**ALL, "artifacts": {"require_artifacts": True}})
    mirror.attach(image)
    ran = await mirror.run("sync", "--locked")
    assert ran.statuses() == ["failed"]
    assert "the image has no artifact" in ran.images[0]["error"]["message"]
    await mirror.succeed("lock", "--recheck")
    assert (await mirror.succeed("sync", "--locked")).statuses() == ["synced"]


async def test_the_rules_choose_among_the_tags_in_the_lock(mirror):
    """`latest` means what it meant when the lock was made, whatever came since, and a line that a
    reviewer takes out is not copied.
    """
    for version in ("1.0.0", "1.1.0", "1.2.0", "1.3.0"):
        mirror.push(version)
    await mirror.lock_all({"from": "app", "tags": {"semver": "1.x", "latest": 3}})
    assert mirror.digests().keys() == {"1.1.0", "1.2.0", "1.3.0"}
    mirror.push("1.4.0")
    ran = await mirror.succeed("sync", "--locked")
    assert mirror.held().keys() == {"1.1.0", "1.2.0", "1.3.0"}
    assert [each["selected"] for each in ran.report["mappings"]] == [3]

    kept = [line for line in mirror.lock.read_text().splitlines() if ":1.2.0" not in line]
    mirror.lock.write_text("\n".join(kept))
    ran = await mirror.succeed("sync", "--locked")
    assert [each["selected"] for each in ran.report["mappings"]] == [2]


async def test_a_dry_run_is_from_the_lock_too(mirror):
    mirror.attach(mirror.push("v1"))
    part = {**ALL, "to": "part", "artifacts": {"exclude": [SIGNATURE]}}
    await mirror.lock_all(ALL, part)
    for tag in ("v1", "v2"):
        mirror.push(tag)

    ran = await mirror.succeed("sync", "--locked", "--dry-run")
    assert ran.statuses() == ["would_sync"] * 2
    stripped = {each["target"]: each["artifacts"]["stripped"] for each in ran.images}
    assert stripped == {"target.test/app:v1": 0, "target.test/part:v1": 1}
    assert asked(mirror.source).keys() <= {"GET manifest", "HEAD manifest"}
    references = [str(entry.reference) for entry in mirror.source.journal.entries]
    assert references
    assert all(each.startswith("sha256:") for each in references)
    assert mirror.target.app.repositories == {}


# What is known of targets in a run from a lock.


async def test_without_state_a_quarter_of_the_day_decides_about_artifacts(mirror):
    mirror.cache.write_text("a file where the directory was to be")
    mirror.attach(mirror.push("v1"))
    mirror.write(ALL)
    for words in (("lock",), ("sync", "--locked")):
        assert (await mirror.run(*words)).status == 0
    asked_about = []
    for _ in range(16):
        await anyio.sleep(DAY / 4)
        assert (await mirror.run("sync", "--locked")).statuses() == ["skipped"]
        asked_about.append(asked(mirror.target)["HEAD manifest"] - 1)
        assert asked(mirror.source) == {}
    assert sum(asked_about) == 4, asked_about


async def test_an_unchanged_run_asks_the_source_for_no_token(world, tmp_path):
    service = TokenService({"captain": "secret"}, now=anyio.current_time)
    mirror = Locked(world, tmp_path, auth=service)
    mirror.hold()
    login = {"auth_type": "basic", "credentials": {"username": "captain", "password": "secret"}}
    ends = {"source": mirror.source, "target": mirror.target}
    mirror.write(ALL, registries={name: {"url": each.url, **login} for name, each in ends.items()})
    # Journals stay: they have the challenges that logins answer.
    for command in (["lock"], ["sync", "--locked"], ["sync", "--locked"]):
        before = (len(mirror.source.journal.entries), len(service.issued))
        ran = await world.run(*command, "-q", "-c", str(mirror.file))
        assert ran.status == 0, ran.err
    after = (len(mirror.source.journal.entries), len(service.issued))
    assert after == (before[0], before[1] + 1)  # the token is the target's


async def test_recheck_asks_targets_for_what_the_lock_has(mirror):
    image = mirror.push("v1")
    signature = mirror.attach(image)
    await mirror.lock_all()
    await mirror.succeed("sync", "--locked")
    late = mirror.attach(image)
    await mirror.skip_all(2, "--recheck")

    del mirror.target.app.repositories["app"].manifests[signature.top]
    await mirror.succeed("sync", "--locked", "--recheck")
    assert signature.top in mirror.manifests
    assert late.top not in mirror.manifests


async def test_what_an_unlocked_run_has_copied_is_not_copied_again(mirror):
    images = mirror.hold(3)
    mirror.attach(images["v0"])
    mirror.write(ALL)
    await mirror.succeed("sync")
    await mirror.succeed("lock")
    await mirror.skip_all(3)


async def test_a_new_lock_that_adds_an_artifact_brings_it(mirror):
    image = mirror.push("v1")
    mirror.push("v2")
    await mirror.lock_all()
    await mirror.succeed("sync", "--locked")
    late = mirror.attach(image)
    await mirror.succeed("lock", "--recheck")
    ran = await mirror.succeed("sync", "--locked")
    assert ran.statuses() == ["synced", "skipped"]
    assert late.top in mirror.manifests
    assert asked(mirror.source) == {"GET manifest": 1, "GET blob": 1}
    await mirror.skip_all(2)


async def test_tags_that_never_move_are_skipped_by_the_listing_until_a_lock_adds_an_artifact(
    mirror,
):
    image, *_ = mirror.hold(3).values()
    await mirror.lock_all({"from": "app", "tags": tags("v*", immutable_tags="v*")})
    await mirror.succeed("sync", "--locked")

    async def skip() -> None:
        ran = await mirror.succeed("sync", "--locked")
        assert [each["reason"] for each in ran.images] == ["immutable_tag"] * 3
        assert asked(mirror.source) == {}
        assert asked(mirror.target) == {"GET tag_list": 1}

    await skip()
    signature = mirror.attach(image)
    await skip()  # as the lock is
    await mirror.succeed("lock", "--recheck")
    ran = await mirror.succeed("sync", "--locked")
    assert sum(each["artifacts"]["synced"] for each in ran.images) == 1
    assert signature.top in mirror.manifests
    await skip()


# Artifacts of every form, between registries with and without the referrers API.


@pytest.mark.parametrize("api", [True, False], ids=["referrers API", "fallback tags"])
async def test_artifacts_come_by_their_locked_digests(world, tmp_path, api):
    """Tags of cosign's and lists under fallback tags may have moved since."""
    mirror = Locked(world, tmp_path, referrers_api=api)
    image = mirror.push("v1")
    signature = mirror.attach(image)
    tag = referrers_tag(image.top) + ".sig"
    cosign = mirror.push(tag)
    await mirror.lock_all()

    late = mirror.attach(image)
    mirror.push(tag)
    ran = await mirror.succeed("sync", "--locked")
    assert ran.images[0]["artifacts"]["synced"] == 2
    assert {image.top, signature.top, cosign.top} <= mirror.manifests
    assert late.top not in mirror.manifests
    assert mirror.held()[tag] == cosign.top
    if not api:
        listed = mirror.target.app.manifest("app", mirror.held()[referrers_tag(image.top)])
        entry = only(json.loads(listed.body)["manifests"])
        assert (entry["digest"], entry["mediaType"]) == (signature.top, signature.media_type)
        assert (entry["size"], entry["artifactType"]) == (len(signature.body), SIGNATURE)
    # Whether the source has the API is not learnt from a lock.
    learnt = [str(note) for note in rows(mirror.cache)["fact"]]
    assert not [note for note in learnt if "source.test" in note]
    await mirror.skip_all(1)


async def test_the_type_that_a_lock_does_not_have_is_read_for_filters(mirror):
    """A signature under a tag of cosign's: the first mapping has no filters, and asks for no type."""
    image = mirror.push("v1")
    signature = mirror.load(mirror.seed.image(), f"{referrers_tag(image.top)}.sig")
    kind = signature.document["layers"][0]["mediaType"]
    await mirror.lock_all(
        {**ALL, "to": "all"},
        {**ALL, "to": "same", "artifacts": {"include": [kind]}},
        {**ALL, "to": "bare", "artifacts": {"include": [SBOM]}},
    )
    assert "type" not in only(mirror.lines()["v1"]["artifacts"])
    await mirror.succeed("sync", "--locked")
    repositories = mirror.target.app.repositories.items()
    held = {name: signature.top in each.manifests for name, each in repositories}
    assert held == {"all": True, "same": True, "bare": False}


class LockedScene(Scene):
    """Each run writes a lock first, and is from it."""

    async def run(self, **top: Any) -> Ran:
        ran = await super().run("lock", "--recheck", **top)
        assert ran.status == 0, ran.err
        assert self.target.journal.summary() == {}
        ran = await super().run("sync", "--locked", **top)
        assert {entry.kind for entry in self.source.journal.entries} <= {"manifest", "blob"}
        assert all(":" in str(entry.reference) for entry in self.source.journal.entries)
        return ran


CELLS = itertools.product(("strict", "distribution"), ("strict", "distribution"), FAMILIES)


@pytest.mark.parametrize(("source", "target", "name"), thinned(CELLS))
async def test_what_hangs_on_an_image_comes_from_a_lock_as_it_comes_without(
    world, source, target, name, tmp_path
):
    stage = LockedScene(world, tmp_path, family(name), source, target)
    ran = await stage.succeed()
    stage.check_order()
    stage.check()
    told = only(ran.images)["artifacts"]
    assert (told["synced"], told["failed"]) == (len(stage.made.travelling), 0)
    await stage.settle()
    assert stage.source.journal.summary() == {}
    assert stage.target.journal.summary() == {"HEAD manifest": 1}


# A watch.


async def locks(stage: Watched) -> tuple[str, str]:
    """Return a lock, and one in which v1 has moved; the source has moved on from both."""
    stage.load("v2")
    stage.write(ALL, **{"global": {}})
    texts = []
    for _ in range(2):
        stage.load("v1")
        ran = await stage.world.run("lock", "-q", "-c", str(stage.file))
        assert ran.status == 0, ran.err
        texts.append(stage.file.with_suffix(".lock").read_text())
    stage.load("v1")
    stage.source.journal.clear()
    return texts[0], texts[1]


QUIET = ({}, {"HEAD manifest": 2})


async def test_a_watch_reads_the_lock_before_each_cycle(stage):
    first, second = await locks(stage)
    lock = stage.file.with_suffix(".lock")
    lock.write_text(first)
    ran = await stage.watch(
        None,
        lambda: lock.write_text(second) and None,
        lambda: lock.write_text(first + "<<<<<<< HEAD\n") and None,
        lock.unlink,
        lambda: lock.write_text(first) and None,
        more=("--locked",),
    )
    assert ran.status == 0
    copied, quiet, moved_on, broken, gone, mended = stage.asked
    assert copied[0] == {"GET manifest": 2, "GET blob": copied[0]["GET blob"]}
    assert quiet == broken == gone == QUIET
    assert moved_on[0]["GET manifest"] == 1
    assert mended[1]["PUT manifest"] == 1
    assert lines(ran, "info: now in force: 1 mappings, 2 locked images")
    assert lines(ran, "CONFIG_ERROR", "not a line that", "in force")
    assert lines(ran, "mirror.lock does not exist")
    for source, _ in stage.asked:
        assert source.keys() <= {"GET manifest", "GET blob"}
    assert stage.target.app.repositories["app"].tags["v1"] in first


async def test_a_job_without_state_has_one_head_a_tag_too(mirror, tmp_path):
    mirror.hold(4)
    await mirror.lock_all(**{"global": {"cache_dir": "kept"}})
    await mirror.succeed("sync", "--locked")
    assert mirror.target.journal.count(kind="tag_list") == 0
    (tmp_path / "kept").rename(tmp_path / "lost")
    await mirror.skip_all(4)
