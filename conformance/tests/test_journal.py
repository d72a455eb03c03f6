"""The journal: what it remembers of an exchange, what can be claimed, and what it says when it is
not so.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import anyio
import pytest

from conformance.http import run_in_thread
from conformance.journal import Entries, Journal, before
from conformance.messages import Request, digest_of
from conformance.registry import App
from conformance.tokens import TokenService

DIGEST = digest_of(b"a blob")
BLOB = f"/v2/app/web/blobs/{DIGEST}"


@pytest.fixture
def app() -> App:
    app = App()
    app.add_blob("app/web", b"a blob")
    return app


@pytest.fixture
def journal(app: App) -> Journal:
    """Return the journal of a download, two uploads and a mount."""
    app.request("GET", BLOB)
    app.request("HEAD", f"/v2/app/db/blobs/{DIGEST}")
    for body in (b"one", b"three"):
        where = app.request("POST", "/v2/app/web/blobs/uploads/").header("Location")
        where = "/" + where.split("/", 3)[3]
        app.request("PUT", f"{where}&digest={digest_of(body)}", body=body)
    app.request("POST", f"/v2/app/db/blobs/uploads/?mount={DIGEST}&from=app/web")
    return app.journal


# What is claimed.


def test_claims_read_as_sentences(journal: Journal) -> None:
    journal.matching("POST", repository="app/web").exactly(2)
    journal.matching("HEAD", "blob", repository="app/web").none()
    journal.matching("GET HEAD", "blob").exactly(2).at_least(1).at_most(2)
    journal.matching("PUT", "upload", status=201).exactly(2)
    assert journal.matching("PUT").bytes_in() == len(b"onethree")
    assert journal.bytes_out() == len(b"a blob")
    assert journal.connections() == 1


@pytest.mark.parametrize(
    ("which", "count"),
    [
        ({"repository": "app/*"}, 7),
        ({"repository": "app/db"}, 2),
        ({"kind": "upload upload_start"}, 5),
        ({"reference": "sha256:*"}, 2),
        ({"reference": DIGEST, "method": "GET"}, 1),
        ({"host": "registry.*"}, 7),
        ({"host": "other"}, 0),
        ({"path": "/v2/app/web/blobs/uploads/"}, 2),
        ({"query": {"mount": "*"}}, 1),
        ({"query": {"digest": digest_of(b"one")}}, 1),
        ({"header": {"Content-Length": "0"}}, 3),
        ({"status": 404}, 1),
        ({"status": 404, "method": "GET"}, 0),
    ],
)
def test_what_matches(journal: Journal, which: dict[str, Any], count: int) -> None:
    assert len(journal.matching(**which)) == count


@pytest.mark.parametrize("which", [{"method": "FETCH"}, {"kind": "blobs"}, {"method": "get"}])
def test_a_claim_about_what_cannot_be_is_refused(journal: Journal, which: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"no (method|kind)"):
        journal.matching(**which)


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        (
            lambda found: found.exactly(1),
            "exactly 1 of POST repository=app/web expected, there are 2:",
        ),
        (lambda found: found.none(), "none of POST repository=app/web expected, there are 2:"),
        (
            lambda found: found.at_most(1),
            "at most 1 of POST repository=app/web expected, there are 2:",
        ),
        (
            lambda found: found.at_least(3),
            "at least 3 of POST repository=app/web expected, there are 2:",
        ),
    ],
)
def test_a_claim_that_fails_shows_the_entries(
    journal: Journal, claim: Callable[[Entries], Entries], said: str
) -> None:
    with pytest.raises(AssertionError) as caught:
        claim(journal.matching("POST", repository="app/web"))
    assert str(caught.value).splitlines() == [
        said,
        "    3. [0] POST /v2/app/web/blobs/uploads/ -> 202",
        "    5. [0] POST /v2/app/web/blobs/uploads/ -> 202",
    ]


def test_a_claim_about_nothing_says_what_there_was(journal: Journal) -> None:
    with pytest.raises(
        AssertionError,
        match=re.escape("all there was: 1 GET blob, 1 HEAD blob, 3 POST upload_start"),
    ):
        journal.matching("DELETE", status=202).exactly(1)


def test_a_claim_that_fails_shows_no_more_than_twenty(app: App) -> None:
    for _ in range(25):
        app.request("GET", "/v2/")
    with pytest.raises(AssertionError) as caught:
        app.journal.matching("GET", "ping").none()
    assert len(str(caught.value).splitlines()) == 22
    assert str(caught.value).endswith("and 5 more")


# Order and time.


def test_order_is_that_of_answers_and_arrivals_over_all_journals(app: App) -> None:
    other = App()
    app.request("GET", BLOB)
    other.request("GET", "/v2/")
    app.request("GET", "/v2/")
    first = app.journal.matching("GET", "blob")
    then = other.journal.matching("GET", "ping")
    first.before(then).before(app.journal.matching("GET", "ping"))
    assert before(first[0], then[0])
    assert not before(then[0], first[0])
    with pytest.raises(
        AssertionError, match=r"was not answered before\n +1\. \[0\] GET /v2/app/web"
    ):
        then.before(first)
    with pytest.raises(AssertionError, match="before others"):
        app.journal.matching("DELETE").before(then)


@pytest.mark.anyio
async def test_exchanges_that_overlap_are_in_no_order(app: App) -> None:
    first = app.open(Request("GET", "/v2/"))
    second = app.open(Request("GET", BLOB))
    for exchange in (first, second):
        exchange.start(None)
        exchange.finish()
    assert not before(first.entry, second.entry)
    assert not before(second.entry, first.entry)
    unanswered = app.open(Request("GET", "/v2/"))
    assert before(first.entry, unanswered.entry)
    assert not before(unanswered.entry, app.open(Request("GET", "/v2/")).entry)


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_time_is_the_event_loops(app: App) -> None:
    began = anyio.current_time()
    for pause in (0, 5, 3600):
        await anyio.sleep(pause)
        app.request("GET", "/v2/")
    assert [round(entry.time - began) for entry in app.journal.entries] == [0, 5, 3605]
    assert app.journal.matching("GET", "ping").gaps() == pytest.approx([5, 3600])
    assert app.journal.entries[2].ended_time == app.journal.entries[2].time


# Secrets.


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("headers", "secrets"),
    [
        ([("Authorization", basic("u", "p:w"))], {"p:w"}),
        ([("authorization", "Bearer abc.def")], {"abc.def"}),
        ([("Authorization", "bearer  abc")], {" abc"}),
        ([("Authorization", "Basic !!")], {"!!"}),
        (
            [("Authorization", "AWS4-HMAC-SHA256 Credential=A, Signature=s")],
            {"Credential=A, Signature=s"},
        ),
        ([("Authorization", "lonely")], {"lonely"}),
        ([("Proxy-Authorization", basic("u", "proxy"))], {"proxy"}),
        ([("Cookie", "session=1")], {"session=1"}),
        ([("X-Other", "x")], set()),
    ],
)
def test_what_a_secret_is(app: App, headers: list[tuple[str, str]], secrets: set[str]) -> None:
    app.request("GET", BLOB, headers)
    assert set(app.journal.entries[0].sent_secrets()) == secrets


def test_secrets_in_queries_and_forms_are_seen() -> None:
    service = TokenService({"u": "form password"}, refresh_tokens={"a refresh token": "u"})
    form = [("Content-Type", "application/x-www-form-urlencoded")]
    plain = {"service": "registry.test", "client_id": "x"}
    password = {**plain, "grant_type": "password", "username": "u", "password": "form password"}
    refresh = {**plain, "grant_type": "refresh_token", "refresh_token": "a refresh token"}
    for body in (password, refresh):
        assert service.request("POST", "/token", form, urlencode(body).encode()).status == 200
    service.request("GET", "/token?password=in+the+query")
    assert [entry.sent_secrets() for entry in service.journal.entries] == [
        ["form password"],
        ["a refresh token"],
        ["in the query"],
    ]


def test_an_origin_has_the_scheme_of_its_server(app: App) -> None:
    with run_in_thread(app) as server:
        import http.client

        connection = http.client.HTTPConnection(server.address, timeout=20)
        connection.request("GET", BLOB, headers={"Authorization": "Bearer t"})
        connection.getresponse().read()
        connection.close()
    assert [entry.origin for entry in app.journal.entries] == [server.url]
