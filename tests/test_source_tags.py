"""A source tag is asked for once a run, whichever mappings want it (docs/design.md section 6, rule 4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from conformance.content.images import Image, Seed
from conformance.messages import Answer, Request, Response, digest_of
from conformance.registry.tokens import TokenService
from conformance.server.sockets import Server
from tests.ends import held, sync_file, tags

NAMES = ("v0", "v1", "v2", "v3")
LAST = tags("v*")


def load(source: Server, names: tuple[str, ...] = NAMES) -> dict[str, Image]:
    seed = Seed(3)
    return {name: seed.image().load_into(source.app, "app", tag=name) for name in names}


def three(rule: Mapping[str, Any] = LAST) -> list[dict[str, Any]]:
    return [{"from": "app", "to": name, "tags": rule} for name in ("one", "two", "three")]


def asked(source: Server) -> Counter[str]:
    """Count the manifests that were asked for: `GET tag`, `HEAD tag`, `GET digest`."""
    entries = source.journal.matching(kind="manifest")
    kinds = ("digest" if ":" in entry.reference else "tag" for entry in entries)
    return Counter(f"{entry.method} {kind}" for entry, kind in zip(entries, kinds, strict=True))


def test_platform_filters_share_the_tag_and_what_is_below_it(source, target, sync_pair):
    platforms = ("linux/amd64", "linux/arm64", "linux/arm/v7")
    image = Seed(4).index(platforms=platforms).load_into(source.app, "app", tag="v0")
    mappings = [
        {"from": "app", "to": "all", "tags": LAST},
        {"from": "app", "to": "amd", "tags": LAST, "platforms": ["linux/amd64"]},
        {"from": "app", "to": "both", "tags": LAST, "platforms": ["linux/amd64", "linux/arm64"]},
    ]
    artifacts = {"artifacts": {"enabled": True}}
    assert sync_pair(*mappings, defaults=artifacts).statuses() == ["synced"] * 3
    assert asked(source) == {"GET tag": 1, "GET digest": 3}
    # The index and its three children, each asked about once.
    assert source.journal.count("GET", "referrers") == 4
    assert held(target, "all", image)

    source.journal.clear()
    assert sync_pair(*mappings, defaults=artifacts).statuses() == ["skipped"] * 3
    assert asked(source) == {"HEAD tag": 1}


def test_a_mapping_that_fails_takes_nothing_from_the_others(source, target, sync_pair):
    image = Seed(5).index(platforms=("linux/amd64", "linux/arm64"))
    image.load_into(source.app, "app", tag="v0")
    mappings = three()
    mappings[0]["platforms"] = ["linux/s390x"]
    ran = sync_pair(*mappings)
    assert ran.statuses() == ["failed", "synced", "synced"]
    assert asked(source) == {"GET tag": 1, "GET digest": 2}
    assert held(target, "two", image)
    assert held(target, "three", image)


@pytest.mark.parametrize("head_first", [True, False])
def test_a_tag_that_is_not_there_is_asked_for_once_and_fails_each_mapping(
    source, target, tmp_path, head_first
):
    load(source, ("v0",))
    ends = {"source": {"url": source.url, "head_first": head_first}, "target": target}
    ran = sync_file(tmp_path, ends, *three(tags("v9")))
    assert ran.statuses() == ["failed"] * 3
    assert {each["error"]["code"] for each in ran.images} == {"SOURCE_ERROR"}
    assert asked(source) == {"HEAD tag" if head_first else "GET tag": 1}


def test_a_tag_that_cannot_be_read_is_tried_as_often_as_for_one_mapping(source, sync_pair):
    load(source, ("v0",))
    source.app.faults.on("GET", "manifest").status(500)
    ran = sync_pair(*three(tags("v0")))
    assert ran.statuses() == ["failed"] * 3
    assert {each["error"]["retries"] for each in ran.images} == {4}
    assert asked(source) == {"GET tag": 5}


def test_a_digest_that_is_gone_has_its_tag_asked_for_once_more(source, target, sync_pair):
    load(source, ("v0",))
    assert sync_pair(*three()).statuses() == ["synced"] * 3
    new = Seed(6).image().load_into(source.app, "app", tag="v0")
    gone = digest_of(b"moved on between HEAD and GET")

    def intercept(request: Request) -> Answer | None:
        if (request.method, request.reference) == ("HEAD", "v0"):
            return Response(200, [("Docker-Content-Digest", gone)])
        return None

    source.app.intercept = intercept
    source.journal.clear()
    assert sync_pair(*three()).statuses() == ["synced"] * 3
    assert asked(source) == {"HEAD tag": 1, "GET digest": 1, "GET tag": 1}
    assert [entry.status for entry in source.journal.matching("GET", reference=gone)] == [404]
    for place in ("one", "two", "three"):
        assert held(target, place, new)


@pytest.mark.provokes("tag_asked_twice")  # what two credentials see may differ
def test_a_tag_is_asked_for_under_each_credential(tmp_path, serve):
    users = {"source": "a secret", "bob": "b secret"}
    source, target = serve(auth=TokenService(users, anonymous=False)), serve()
    load(source, ("v0",))
    registries: dict[str, Any] = {
        name: {
            "url": source.url,
            "auth_type": "basic",
            "credentials": {"username": name, "password": password},
        }
        for name, password in users.items()
    }
    registries["target"] = target
    mappings = [
        {"from": "app", "to": f"{name}-{number}", "source": name, "targets": ["target"]}
        for name in users
        for number in range(2)
    ]
    ran = sync_file(tmp_path, registries, *mappings, defaults={"tags": tags("v0")})
    assert ran.statuses() == ["synced"] * 4
    fetched = source.journal.matching("GET", "manifest", reference="v0", status=200)
    assert len(fetched) == 2
