"""Everything that others can make large is bounded (R14): memory, work, tasks, connections, threads.

Each test is an attack. It may fail its own image; everything else goes on as if it were not there.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import tracemalloc
from functools import partial
from typing import Any

import anyio
import pytest

from _regsync.addresses import Origin
from _regsync.errors import ProtocolBroken, Side
from _regsync.net import dial
from _regsync.registry import client, endpoints
from _regsync.registry.client import Call
from _regsync.sync import artifacts, discovery
from _regsync.sync import image as sync_image
from _regsync.sync.once import gather
from conformance.content.images import Seed
from conformance.messages import Answer, Request, Response
from tests.ends import copy, only, sync, tags
from tests.inside.wires import NEVER, Told, Wire, answer, plain_registry, transport_of

# Bombs: a small answer that names much more, or is large in memory.


@pytest.mark.rule("R14")
@pytest.mark.parametrize(("name", "bound"), [("_MOST_MANIFESTS", 2), ("_LARGEST_TREE", 900)])
def test_an_index_of_too_much_is_refused_before_its_children_are_fetched(
    source, target, monkeypatch, name, bound
):
    monkeypatch.setattr(discovery, name, bound)
    image = Seed(1).index(platforms=("linux/amd64", "linux/arm64", "linux/s390x"))
    image.load_into(source.app, "app", tag="v1")
    ran = copy(source, target)
    assert ran.status == 2
    assert "CONTENT_ERROR: read " in only(ran.failed)
    assert "more than" in only(ran.failed)
    assert source.journal.count("GET", "manifest") == 1


@pytest.mark.rule("R14")
def test_an_image_of_too_many_blobs_is_refused(source, target, monkeypatch):
    monkeypatch.setattr(sync_image, "_MAX_BLOBS", 3)
    Seed(1).image(sizes=(10, 11, 12)).load_into(source.app, "app", tag="v1")
    assert "more than 3 blobs" in only(copy(source, target).failed)
    assert not target.journal.count("POST")


@pytest.mark.rule("R14")
def test_a_listing_of_too_many_tags_is_refused(source, target, monkeypatch):
    monkeypatch.setattr(endpoints, "_MOST_TAGS", 26)

    def pages(request: Request) -> Answer | None:
        if request.kind != "tag_list":
            return None
        page = int(request.parameter("last") or 0) + 1
        link = f'</v2/app/tags/list?last={page}>; rel="next"'
        return Response(
            200, [("Link", link)], json.dumps({"tags": [f"{page}-{n}" for n in range(9)]}).encode()
        )

    source.app.intercept = pages
    ran = sync({"source": source, "t": target}, {"from": "app", "tags": tags("*")})
    assert "more than 26 tags" in only(ran.failed)
    assert source.journal.count("GET", "tag_list") == 3


@pytest.mark.rule("R14")
def test_a_listing_of_too_many_pages_is_refused(source, target, monkeypatch):
    monkeypatch.setattr(endpoints, "_MOST_PAGES", 3)

    def pages(request: Request) -> Answer | None:
        if request.kind != "tag_list":
            return None
        page = int(request.parameter("last") or 0) + 1
        link = f'</v2/app/tags/list?last={page}>; rel="next"'
        return Response(200, [("Link", link)], json.dumps({"tags": [f"v{page}"]}).encode())

    source.app.intercept = pages
    ran = sync({"source": source, "t": target}, {"from": "app", "tags": tags("*")})
    assert "more than 3 pages" in only(ran.failed)
    assert source.journal.count("GET", "tag_list") == 3


@pytest.mark.anyio
@pytest.mark.parametrize("what", ["tags", "referrers"])
async def test_the_long_names_of_pages_are_not_kept(what, monkeypatch):
    through, asked = transport_of({}), 0
    body = b'{"tags": []}' if what == "tags" else b'{"schemaVersion": 2, "manifests": []}'

    async def page(*_: object, **__: object) -> Told:
        nonlocal asked
        asked += 1
        target = f"/v2/app/tags/list?page={asked}&x={'y' * 60_000}"
        return Told(200, [("link", f"<{target}>; rel=next")] if asked < 500 else [], body)

    host = through.client(plain_registry())
    monkeypatch.setattr(host, "request", page)
    listed = endpoints.RemoteRepository(host, "app", Side.SOURCE)
    tracemalloc.start()
    try:
        await (
            listed.list_tags() if what == "tags" else listed.list_referrers(f"sha256:{'a' * 64}")
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert asked == 500
    assert peak < 25 * 2**20, (
        "500 names have 30 MB, of which the library keeps the last 128 whole and in parts"
    )


@pytest.mark.rule("R14")
@pytest.mark.anyio
async def test_a_list_of_referrers_whose_pages_carry_megabytes_is_refused(monkeypatch):
    through, asked = transport_of({}), 0

    async def page(*_: object, **__: object) -> Told:
        nonlocal asked
        asked += 1
        entry = {
            "mediaType": "a/b",
            "digest": f"sha256:{asked:064x}",
            "size": 2,
            "annotations": {"a": "b" * 2**20},
        }
        link = [("link", f"</v2/app/referrers/x?page={asked}>; rel=next")]
        return Told(200, link, json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode())

    host = through.client(plain_registry())
    monkeypatch.setattr(host, "request", page)
    listed = endpoints.RemoteRepository(host, "app", Side.SOURCE)
    with pytest.raises(ProtocolBroken, match="or more than that many KiB"):
        await listed.list_referrers(f"sha256:{'a' * 64}")
    assert asked == 10


@pytest.mark.rule("R14")
def test_artifacts_that_all_have_artifacts_are_not_all_asked_for(source, target, monkeypatch):
    """Each list may name 10,000: of 900 such lists a run held all, and a task for each of their
    entries.
    """
    monkeypatch.setattr(artifacts, "MOST_ARTIFACTS", 50)
    seed = Seed(1)
    image = seed.image().load_into(source.app, "app", tag="v1")
    for _ in range(40):
        artifact = seed.artifact(image, "a/b").load_into(source.app, "app")
        for _ in range(20):
            seed.artifact(artifact, "a/b").load_into(source.app, "app")
    ran = sync(
        {"source": source, "t": target},
        {"from": "app", "tags": tags("v1"), "artifacts": {"enabled": True}},
    )
    assert "more than 50 artifacts" in only(ran.failed)
    asked = [entry for entry in source.journal.entries if "/referrers/" in entry.target]
    assert 2 <= len(asked) <= 1 + 32, (
        "those that were asked when the first one told too much, and none of the other 8"
    )


# Work: what is read takes no longer than its length.


def test_a_link_is_read_in_one_pass():
    # Each `<` is looked at once: a target holds none, so 64 KiB of them are no work.
    assert re.findall(endpoints._LINK, '<<</v2/x>; rel="next"') == [("/v2/x", '; rel="next"')]


@pytest.mark.parametrize(
    "text",
    [";rel=" + " " * 2_000_000, "; rel" * 400_000, ";rel=" + '"' * 999_999, '";rel=" ' * 300_000],
)
def test_a_relation_is_read_in_linear_time(text):
    # A square of these is hours, and would be the run's own time-out.
    assert re.match(endpoints._NEXT, text) is None


@pytest.mark.parametrize(
    ("parameters", "is_next"),
    [
        ("; rel=next", True),
        (';REL = " next "; x=y', True),
        ('; rel="prev next"', True),
        ('; title=","; rel=next', True),
        ("; rel=next-archive", False),
        ('; title="; rel=next"', False),
        ("; rel=prev", False),
    ],
)
def test_a_relation_is_a_word_of_the_parameter_rel(parameters, is_next):
    assert bool(re.match(endpoints._NEXT, parameters)) is is_next


def test_urls_in_an_error_are_found_in_linear_time():
    assert re.sub(client._QUERY, "?...", "://" * 1_000_000) == "://" * 1_000_000
    assert re.sub(client._QUERY, "?...", "?" * 1_000_000) == "?..."
    said = "at https://a.test/x?sig=1&r=https://b.test/?2 and v2/?_state=d, who? e.test/?f"
    assert (
        re.sub(client._QUERY, "?...", said)
        == "at https://a.test/x?... and v2/?... who? e.test/?..."
    )


# Tasks, connections and threads.


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_thousands_of_questions_are_no_thousands_of_tasks():
    running = most = 0

    async def ask(number: int) -> int:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await anyio.sleep(1)
        running -= 1
        return number

    began = anyio.current_time()
    assert await gather(partial(ask, number) for number in range(1000)) == [*range(1000)]
    assert most == 64
    assert anyio.current_time() - began == 16


@pytest.mark.anyio
async def test_names_whose_servers_are_silent_hold_up_no_other_name(monkeypatch):
    answered, resolve = threading.Event(), socket.getaddrinfo

    def look_up(host: str, *rest: Any, **more: Any) -> Any:
        if host.endswith(".silent.test"):
            answered.wait(10)
            return []
        return resolve(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    try:
        async with anyio.create_task_group() as group:
            for number in range(64):
                group.start_soon(dial._resolve, f"{number}.silent.test", 443)
            await anyio.wait_all_tasks_blocked()
            with anyio.fail_after(5):
                assert await dial._resolve("127.0.0.1", 443)
            answered.set()
    finally:
        answered.set()


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_a_thank_you_for_half_a_manifest_is_none():
    wire = Wire(sends=(400, NEVER))
    wire.when(400, answer(b"", status=201))
    again = Wire(answers=((answer(b"", status=201),),))
    through = transport_of({Origin("http", "registry.test", 80): [wire, again]})
    call = Call("manifest_put", "PUT", "/v2/app/manifests/v1", "app", body=bytes(5000))
    told = await through.client(plain_registry()).request(call, ok=(201,))
    assert told.status == 201
    assert only(again.requests).body == bytes(5000)
