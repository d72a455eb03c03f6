"""Runs that follow a run: what the state saves, and how wrong it may be (docs/design.md sections 6
and 7).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from conformance.content.images import Image, Seed
from conformance.messages import digest_of
from conformance.registry.tokens import TokenService
from conformance.server.sockets import Server
from tests.ends import document, held, run_regsync, sync_file, tags


def load(source: Server, repository: str, count: int, seed: int = 1) -> list[Image]:
    made = Seed(seed)
    base = made.blob(500)
    return [
        made.image(layers=[base, made.blob(300 + number)]).load_into(
            source.app, repository, tag=f"v{number}"
        )
        for number in range(count)
    ]


def clear(*servers: Server) -> None:
    for server in servers:
        server.journal.clear()


def test_an_unchanged_tag_costs_one_head_at_each_side(tmp_path, serve):
    source, one, two = serve(), serve(), serve()
    load(source, "app", 5)
    ends = {"source": source, "one": one, "two": two}
    mapping = {"from": "app", "tags": tags(*(f"v{number}" for number in range(5)))}
    assert sync_file(tmp_path, ends, mapping).status == 0
    clear(source, one, two)
    again = sync_file(tmp_path, ends, mapping)
    assert again.status == 0
    assert set(again.statuses()) == {"skipped"}
    for server in (source, one, two):
        assert server.journal.summary() == {"HEAD manifest": 5}


def test_a_tag_that_is_copied_by_hand_again_costs_one_head_at_each_side(tmp_path, serve):
    source, target = serve(), serve()
    load(source, "app", 1)
    file = tmp_path / "mirror.yaml"
    file.write_text(document({"source": source, "target": target}))
    names = [f"http://{server.address}/app:v0" for server in (source, target)]
    command = ("copy", *names, "--no-artifacts", "-q", "-c", str(file))
    assert run_regsync(*command).status == 0
    clear(source, target)
    assert run_regsync(*command).status == 0
    assert source.journal.summary() == target.journal.summary() == {"HEAD manifest": 1}


def test_a_moved_tag_among_unchanged_ones_costs_what_is_new(source, target, sync_pair):
    load(source, "app", 5)
    mapping = {"from": "app", "tags": tags(*(f"v{number}" for number in range(5)))}
    sync_pair(mapping)
    images = load(source, "app", 5)
    made = Seed(9)
    new = made.image(
        layers=[images[0].contents()[images[0].document["layers"][0]["digest"]], made.blob(77)]
    )
    new.load_into(source.app, "app", tag="v3")
    clear(source, target)
    ran = sync_pair(mapping)
    assert sorted(ran.statuses()) == ["skipped"] * 4 + ["synced"]
    assert held(target, "app", new)
    assert source.journal.summary() == {"HEAD manifest": 5, "GET manifest": 1, "GET blob": 2}
    # The shared layer is known from the first run. It is asked for by POST, which shows that config
    # and new layer need no HEAD (rule 11).
    assert target.journal.summary() == {
        "HEAD manifest": 5, "POST upload_start": 3, "PUT upload": 2, "PUT manifest": 1,
    }  # fmt: skip


@pytest.mark.parametrize("says", ["MANIFEST_BLOB_UNKNOWN", "MANIFEST_INVALID"])
@pytest.mark.provokes("manifest_names_absent")
def test_a_target_that_lost_a_blob_is_healed_in_the_same_run(source, target, says, sync_pair):
    images = load(source, "app", 2)
    assert sync_pair({"from": "app", "tags": tags("v0")}).status == 0
    lost = images[0].document["layers"][0]["digest"]
    del target.app.repositories["app"].blobs[lost]
    if says == "MANIFEST_INVALID":

        def amend(request: Any, answer: Any) -> Any:
            if request.method == "PUT" and request.kind == "manifest" and answer.status == 400:
                return type(answer)(400, [], b'{"errors": [{"code": "MANIFEST_INVALID"}]}')
            return answer

        target.app.amend = amend
    clear(source, target)
    ran = sync_pair({"from": "app", "tags": tags("v1")})
    assert (ran.status, ran.statuses()) == (0, ["synced"]), ran.err
    assert held(target, "app", images[1])
    assert target.journal.count("PUT", "manifest", status=400) == 1
    assert target.journal.count("PUT", "manifest", status=201) == 1
    assert source.journal.count("GET", "blob", reference=lost) == 1


@pytest.mark.provokes("manifest_names_absent")
def test_a_target_that_names_one_lost_blob_at_a_time_is_healed_in_the_same_run(
    source, target, sync_pair
):
    made = Seed(5)
    shared = [made.blob(500 + number) for number in range(4)]
    made.image(layers=shared).load_into(source.app, "app", tag="v0")
    image = made.image(layers=[*shared, made.blob(9)]).load_into(source.app, "app", tag="v1")
    assert sync_pair({"from": "app", "tags": tags("v0")}).status == 0
    for blob in shared:
        del target.app.repositories["app"].blobs[digest_of(blob)]

    def amend(request: Any, answer: Any) -> Any:
        if request.method == "PUT" and request.kind == "manifest" and answer.status == 400:
            first = json.loads(answer.body)["errors"][:1]
            return type(answer)(400, [], json.dumps({"errors": first}).encode())
        return answer

    target.app.amend = amend
    clear(source, target)
    ran = sync_pair({"from": "app", "tags": tags("v1")})
    assert (ran.status, ran.statuses()) == (0, ["synced"]), ran.err
    assert held(target, "app", image)
    # The first refusal brings what it names; the second one all that the state was believed of.
    assert target.journal.count("PUT", "manifest", status=400) == 2
    assert target.journal.count("PUT", "manifest", status=201) == 1
    for blob in shared:
        assert source.journal.count("GET", "blob", reference=digest_of(blob)) == 1
        target.journal.matching("PUT", "upload", query={"digest": digest_of(blob)}).exactly(1)


@pytest.mark.provokes("manifest_names_absent")
def test_a_target_that_lost_blobs_of_two_platforms_is_healed_in_the_same_run(
    source, target, sync_pair
):
    made = Seed(6)
    shared = [made.blob(500), made.blob(600), made.blob(700)]
    for tag in ("v0", "v1"):
        children = [
            made.image(layers=[blob, made.blob(40)], architecture=architecture)
            for blob, architecture in zip(shared, ("amd64", "arm64", "s390x"), strict=True)
        ]
        index = made.index(children).load_into(source.app, "app", tag=tag)
    assert sync_pair({"from": "app", "tags": tags("v0")}).status == 0
    for blob in shared[:2]:
        del target.app.repositories["app"].blobs[digest_of(blob)]
    clear(source, target)
    ran = sync_pair({"from": "app", "tags": tags("v1")})
    assert (ran.status, ran.statuses()) == (0, ["synced"]), ran.err
    assert held(target, "app", index)
    for blob, often in zip(shared, (1, 1, 0), strict=True):
        assert source.journal.count("GET", "blob", reference=digest_of(blob)) == often


@pytest.mark.parametrize(("status", "exit_status"), [(403, 4), (413, 2)])
def test_a_manifest_that_is_refused_for_itself_makes_nothing_of_the_state_doubtful(
    source, target, status, exit_status, sync_pair
):
    """Who may not push, or pushes too much, hears nothing of blobs that are gone."""
    images = load(source, "app", 2)
    shared = images[0].document["layers"][0]["digest"]
    assert sync_pair({"from": "app", "tags": tags("v0")}).status == 0
    target.app.faults.on("PUT", "manifest").status(status)
    clear(source, target)
    ran = sync_pair({"from": "app", "tags": tags("v1")})
    assert (ran.status, ran.statuses()) == (exit_status, ["failed"]), ran.err
    assert str(status) in ran.failed[0]
    target.journal.matching("PUT", "manifest").exactly(1)
    # The shared layer, of which only the state knows, is neither asked for nor brought again.
    assert source.journal.summary() == {"GET manifest": 1, "GET blob": 2}
    assert not [each for each in target.journal.entries if shared in each.target]


def test_a_target_that_lost_a_repository_is_healed_in_the_same_run(source, target, sync_pair):
    images = load(source, "app", 3)
    mapping = {"from": "app", "tags": tags("v0", "v1", "v2")}
    sync_pair(mapping)
    del target.app.repositories["app"]
    ran = sync_pair(mapping)
    assert (ran.status, ran.statuses()) == (0, ["synced"] * 3), ran.err
    assert all(held(target, "app", each) for each in images)
    assert target.journal.count("PUT", "manifest", status=400) == 0


def test_tags_that_moved_together_cost_one_manifest(source, target, sync_pair):
    load(source, "app", 3)
    mapping = {"from": "app", "tags": tags("v0", "v1", "v2")}
    sync_pair(mapping)
    made = Seed(9)
    new = made.image(layers=[made.blob(77)])
    for name in ("v0", "v1", "v2"):
        new.load_into(source.app, "app", tag=name)
    clear(source, target)
    ran = sync_pair(mapping)
    assert ran.statuses() == ["synced"] * 3
    assert source.journal.summary() == {"HEAD manifest": 3, "GET manifest": 1, "GET blob": 2}
    assert target.journal.count("PUT", "manifest") == 3


def test_an_empty_blob_is_never_fetched(source, target, sync_pair):
    made = Seed(9)
    image = made.image(layers=[made.blob(0), made.blob(50)]).load_into(source.app, "app", tag="v1")
    ran = sync_pair({"from": "app", "tags": tags("v*")})
    assert (ran.status, ran.statuses()) == (0, ["synced"]), ran.err
    assert held(target, "app", image)
    assert source.journal.count("GET", "blob") == 2


def test_the_way_to_a_login_is_remembered(tmp_path, serve):
    users = {"me": "secret-word"}
    source, target = serve(auth=TokenService(users)), serve(auth=TokenService(users))
    load(source, "app", 2)
    login = {"auth_type": "basic", "credentials": {"username": "me", "password": "secret-word"}}
    ends = {"source": {"url": source.url, **login}, "target": {"url": target.url, **login}}
    mapping = {"from": "app", "tags": tags("v0", "v1")}
    assert sync_file(tmp_path, ends, mapping).status == 0
    before = [len(server.journal.entries) for server in (source, target)]
    assert {*sync_file(tmp_path, ends, mapping).statuses()} == {"skipped"}
    for server, first in zip((source, target), before, strict=True):
        assert server.journal.count(status=401) == 1
        kinds = [f"{each.method} {each.kind}" for each in server.journal.entries[first:]]
        assert sorted(kinds) == ["GET token", "HEAD manifest", "HEAD manifest"]
    assert b"secret-word" not in (tmp_path / ".regsync" / "state.db").read_bytes()
