"""What others wrote is read in bounded work and memory (R14), and printed as one clean line (R18)."""

from __future__ import annotations

import json
import re
import socket
import threading
import tracemalloc
import unicodedata
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from _regsync.addresses import Origin
from _regsync.errors import ContentError, ProtocolBroken, Side
from _regsync.net import dial
from _regsync.net.wire import Headers
from _regsync.oci import check_digest
from _regsync.registry import client, endpoints
from _regsync.sync.once import gather
from _regsync.text import printable

BIDIRECTIONAL = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def test_nothing_that_a_terminal_obeys_is_left():
    every = "".join(map(chr, range(0x110000)))
    unsafe = {each for each in every if unicodedata.category(each) in ("Cc", "Zl", "Zp")}
    # What reorders, and what has no width: what stands before or behind it looks as if it were
    # something else.
    unsafe |= {each for each in every if unicodedata.bidirectional(each) in BIDIRECTIONAL}
    unsafe |= {*"\u200b\u200c\u2060\ufeff"}
    assert [hex(ord(each)) for each in unsafe if each in printable(f"a{each}b")] == []
    assert len(printable(every, len(every)).splitlines()) == 1
    assert printable("tab\tand\nline") == "tab and line"


def test_what_was_cut_says_so():
    assert printable("a" * 10, 10) == "a" * 10
    assert printable("a" * 11, 10) == "a" * 9 + "…"


def test_a_digest_of_megabytes_is_refused_in_its_own_memory():
    tracemalloc.start()
    try:
        for text in ("a." * 2**21, "a" * 2**22 + ":", "a:" + "b" * 2**22):
            with pytest.raises(ContentError):
                check_digest(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * 2**20, (
        "a pattern that gives back words remembers fifty bytes for each letter"
    )


# Patterns: a square of these texts is hours, and would be the run's own time-out.


def test_text_is_searched_in_one_pass():
    assert re.findall(endpoints._LINK, "<" * 65_536 + '</v2/x>; rel="next"') == [
        ("/v2/x", '; rel="next"')
    ]
    for text in (
        ";rel=" + " " * 2_000_000,
        "; rel" * 400_000,
        ";rel=" + '"' * 999_999,
        '";rel=" ' * 300_000,
    ):
        assert re.match(endpoints._NEXT, text) is None
    assert re.sub(client._QUERY, "?...", "://" * 1_000_000) == "://" * 1_000_000
    assert re.sub(client._QUERY, "?...", "?" * 1_000_000) == "?..."


def test_each_urls_query_in_an_error_is_left_out():
    said = "at https://a.test/x?sig=1&r=https://b.test/?2 and v2/?_state=d, who? e.test/?f"
    shown = "at https://a.test/x?... and v2/?... who? e.test/?..."
    assert re.sub(client._QUERY, "?...", said) == shown


@pytest.mark.parametrize(
    ("parameters", "is_next"),
    [
        (';REL = " next "; x=y', True),
        ('; rel="prev next"', True),
        ('; title=","; rel=next', True),
        ("; rel=next-archive", False),
        ('; title="; rel=next"', False),
    ],
)
def test_a_relation_is_a_word_of_the_parameter_rel(parameters, is_next):
    assert bool(re.match(endpoints._NEXT, parameters)) is is_next


# Listings without end.


class Pages:
    """A host whose listings go on; `body` makes a page by its number."""

    key = "registry.test"
    origin = Origin("https", "registry.test", 443)
    registry = SimpleNamespace(kind="unknown", host="registry.test")

    def __init__(self, body: Callable[[int], bytes], *, pad: int = 0, most: int = 10**9) -> None:
        self.asked, self._body, self._pad, self._most = 0, body, pad, most

    async def request(self, call: object, **_: object) -> Any:
        self.asked += 1
        path = f"/v2/app/tags/list?page={self.asked}&x={'y' * self._pad}"
        links = [("link", f"<{path}>; rel=next")] if self.asked < self._most else []
        return SimpleNamespace(status=200, headers=Headers(links), body=self._body(self.asked))

    def repository(self) -> endpoints.RemoteRepository:
        host: Any = self
        return endpoints.RemoteRepository(host, "app", Side.SOURCE)


def tags_of(names: list[str]) -> bytes:
    return json.dumps({"tags": names}).encode()


def referrers_of(*digests: str, **more: Any) -> bytes:
    entries = [{"mediaType": "a/b", "digest": each, "size": 2, **more} for each in digests]
    return json.dumps({"schemaVersion": 2, "manifests": entries}).encode()


async def test_a_listing_of_too_many_pages_is_refused():
    pages = Pages(lambda number: tags_of([f"v{number}"]))
    with pytest.raises(ProtocolBroken, match="more than 10000 pages"):
        await pages.repository().list_tags()
    assert pages.asked == 10_000


@pytest.mark.parametrize(("more", "is_refused"), [(0, False), (1, True)])
async def test_a_listing_of_too_many_tags_is_refused(monkeypatch, more, is_refused):
    monkeypatch.setattr(endpoints, "_MOST_TAGS", 27)
    names = [f"v{number}" for number in range(27 + more)]
    pages = Pages(lambda number: tags_of(names[9 * number - 9 : 9 * number]), most=4)
    if is_refused:
        with pytest.raises(ContentError, match="more than 27 tags"):
            await pages.repository().list_tags()
    else:
        assert [*(await pages.repository().list_tags() or ())] == names


async def test_a_list_of_referrers_whose_pages_carry_megabytes_is_refused():
    text = {"annotations": {"a": "b" * 2**20}}
    pages = Pages(lambda number: referrers_of(f"sha256:{number:064x}", **text))
    with pytest.raises(ProtocolBroken, match="or more than that many KiB"):
        await pages.repository().list_referrers(f"sha256:{'a' * 64}")
    assert pages.asked == 10


@pytest.mark.parametrize("what", ["tags", "referrers"])
async def test_the_long_names_of_pages_are_not_kept(what):
    body = tags_of([]) if what == "tags" else referrers_of()
    pages = Pages(lambda number: body, pad=60_000, most=400)
    repository = pages.repository()
    tracemalloc.start()
    try:
        await (
            repository.list_tags()
            if what == "tags"
            else repository.list_referrers(f"sha256:{'a' * 64}")
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert pages.asked == 400
    assert peak < 20 * 2**20, "the names have 24 MB; the library keeps the last 128, in parts too"


# Tasks and threads.


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
                group.start_soon(dial._resolve, f"{number}.silent.test", 443, socket.AF_UNSPEC)
            await anyio.wait_all_tasks_blocked()
            with anyio.fail_after(5):
                assert await dial._resolve("127.0.0.1", 443, socket.AF_UNSPEC)
            answered.set()
    finally:
        answered.set()
