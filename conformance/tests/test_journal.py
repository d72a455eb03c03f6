"""The journal: what can be claimed of exchanges, and what it says when it is not so.

What a selector matches is in test_faults.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import urlencode

import anyio
import pytest

from conformance.journal import Entries, Journal, before
from conformance.messages import Request, digest_of
from conformance.registry import App
from conformance.tests.asking import basic, begin
from conformance.tokens import TokenService


@pytest.fixture
def journal(app: App) -> Journal:
    """Return the journal of two uploads and a download."""
    for body in (b"one", b"three"):
        app.request("PUT", f"{begin(app)}&digest={digest_of(body)}", body=body)
    app.request("GET", f"/v2/a/b/blobs/{digest_of(b'one')}")
    return app.journal


def test_claims_read_as_sentences(journal: Journal) -> None:
    journal.matching("POST", repository="a/*").exactly(2)
    journal.matching("HEAD").none()
    journal.matching("GET PUT").exactly(3).at_least(3).at_most(3)
    journal.matching("PUT", status=404).none()
    assert journal.matching("PUT", status=201).bytes_in() == journal.bytes_in() == len(b"onethree")
    assert journal.bytes_out() == len(b"one")
    assert (journal.connections(), journal.count("GET")) == (1, 1)
    assert journal.summary() == {"GET blob": 1, "POST upload_start": 2, "PUT upload": 2}


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        (lambda found: found.exactly(1), "exactly 1"),
        (lambda found: found.none(), "none"),
        (lambda found: found.at_most(1), "at most 1"),
        (lambda found: found.at_least(3), "at least 3"),
    ],
)
def test_a_claim_that_fails_shows_the_entries(
    journal: Journal, claim: Callable[[Entries], Entries], said: str
) -> None:
    with pytest.raises(AssertionError) as caught:
        claim(journal.matching("POST", repository="a/b"))
    assert str(caught.value).splitlines() == [
        f"{said} of POST repository=a/b expected, there are 2:",
        "    1. [0] POST /v2/a/b/blobs/uploads/ -> 202",
        "    3. [0] POST /v2/a/b/blobs/uploads/ -> 202",
    ]


def test_a_claim_about_nothing_says_what_there_was(journal: Journal) -> None:
    with pytest.raises(AssertionError, match=r"all there was: 1 GET blob, 2 POST upload_start"):
        journal.matching("DELETE").exactly(1)


def test_order_is_that_of_answers_and_arrivals_over_all_journals(app: App) -> None:
    other = App()
    app.request("GET", "/v2/a/tags/list")
    other.request("GET", "/v2/")
    app.request("GET", "/v2/")
    first = app.journal.matching("GET", "tag_list")
    then = other.journal.matching("GET", "ping")
    first.before(then).before(app.journal.matching("GET", "ping"))
    text = re.escape("was not answered before\n    1. [0] GET /v2/a")
    with pytest.raises(AssertionError, match=text):
        then.before(first)
    with pytest.raises(AssertionError, match="before others"):
        app.journal.matching("DELETE").before(then)


def test_exchanges_that_overlap_are_in_no_order(app: App) -> None:
    first, second = (app.open(Request("GET", "/v2/")) for _ in range(2))
    for exchange in (first, second):
        exchange.start(None)
        exchange.finish()
    assert not before(first.entry, second.entry)
    assert not before(second.entry, first.entry)
    unanswered = app.open(Request("GET", "/v2/"))
    assert before(first.entry, unanswered.entry)
    assert not before(unanswered.entry, app.open(Request("GET", "/v2/")).entry)


@pytest.mark.virtual_time
async def test_time_is_the_event_loops(app: App) -> None:
    for pause in (0, 5, 3600):
        await anyio.sleep(pause)
        app.request("GET", "/v2/")
    assert app.journal.matching("GET", "ping").gaps() == pytest.approx([5, 3600])
    assert app.journal.entries[2].ended_time == app.journal.entries[2].time


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        (*basic("u", "p:w"), "p:w"),
        ("authorization", "Bearer abc.def", "abc.def"),
        ("Authorization", "Basic !!", "!!"),
        ("Authorization", "lonely", "lonely"),
        ("Proxy-Authorization", basic("u", "proxy")[1], "proxy"),
        ("Cookie", "session=1", "session=1"),
        ("X-Other", "x", None),
    ],
)
def test_what_a_secret_is(app: App, name: str, value: str, secret: str | None) -> None:
    app.request("GET", "/v2/", [(name, value)])
    assert app.journal.entries[0].sent_secrets() == ([secret] if secret else [])


def test_secrets_in_queries_and_forms_are_seen() -> None:
    service = TokenService({"u": "form password"}, refresh_tokens={"a refresh token": "u"})
    form = [("Content-Type", "application/x-www-form-urlencoded")]
    plain = {"service": "registry.test", "client_id": "x"}
    for grant in (
        {"grant_type": "password", "username": "u", "password": "form password"},
        {"grant_type": "refresh_token", "refresh_token": "a refresh token"},
    ):
        body = urlencode({**plain, **grant}).encode()
        assert service.request("POST", "/token", form, body).status == 200
    service.request("GET", "/token?password=in+the+query")
    secrets = [entry.sent_secrets() for entry in service.journal.entries]
    assert secrets == [["form password"], ["a refresh token"], ["in the query"]]
