"""The audit itself: what excuses a client, where a run begins, what a finding says.

That each mistake is caught and named is in test_mistakes.py; here is what must not be called a
mistake.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.audit import KINDS, MISTAKES, audit, latest, report
from conformance.http import Site
from conformance.images import Image, Seed
from conformance.messages import Request, Response, digest_of, error
from conformance.registry import App
from conformance.tokens import BasicAuth
from conformance.walks import ACCEPT

PLACE = "http://registry.test"
TAGS = "/v2/app/tags/list"


@pytest.fixture
def app() -> App:
    return App()


def names(*sites: Site, **options: object) -> set[str]:
    """Return what the audit calls the mistakes; the first site is at PLACE."""
    placed = dict(zip((PLACE, "http://other.test"), sites, strict=False))
    return {each.name for each in audit(placed, **options)}  # type: ignore[arg-type]


def put(app: App, image: Image, *tags: str) -> None:
    """Put an image as it should be done."""
    for digest, data in image.blobs.items():
        where = app.request("POST", "/v2/app/blobs/uploads/").header("location").removeprefix(PLACE)
        app.request(
            "PUT", f"{where}&digest={digest}", [("content-type", "application/octet-stream")], data
        )
    for tag in tags:
        assert app.request(
            "PUT", f"/v2/app/manifests/{tag}", [("content-type", image.media_type)], image.body
        )


def test_a_right_conversation_has_no_finding(app: App) -> None:
    image = Seed(1).image()
    put(app, image, "v1", "latest")
    assert app.request("GET", "/v2/app/manifests/v1", [("accept", ACCEPT)]).status == 200
    # The one thing that was not needed is named, and nothing else.
    assert names(app) == {"own_manifest_asked"}
    assert names(app, excused=["own_manifest_asked"]) == set()
    assert names(app, kinds=("protocol", "safety")) == set()


@pytest.mark.parametrize(
    "answer", [error(503, "UNAVAILABLE", "later"), error(429, "TOOMANYREQUESTS", "later"), b""]
)
def test_a_repetition_behind_a_failure_is_no_mistake(app: App, answer: Response | bytes) -> None:
    digest = app.add_blob("app", b"bytes")
    answers = [answer]
    app.intercept = lambda request: answers.pop() if answers else None
    for _ in range(2):
        app.handle(Request("GET", f"/v2/app/blobs/{digest}", [("host", "registry.test")]))
    assert names(app) == set()
    app.request("GET", f"/v2/app/blobs/{digest}")
    assert names(app) == {"blob_pulled_twice"}, "once is excused, not as often as one likes"


def test_a_refusal_by_a_hook_proves_nothing(app: App) -> None:
    image = Seed(1).image()
    app.intercept = lambda request: (
        error(400, "MANIFEST_INVALID", "no") if request.kind == "manifest" else None
    )
    app.request("PUT", "/v2/app/manifests/v1", [("content-type", image.media_type)], image.body)
    assert names(app) == set()


def test_who_is_told_that_a_blob_is_there_may_name_it(app: App) -> None:
    image = Seed(1).image()
    app.intercept = lambda request: Response(200) if request.method == "HEAD" else None
    for digest in image.blobs:
        app.request("HEAD", f"/v2/app/blobs/{digest}")
    answer = app.request(
        "PUT", "/v2/app/manifests/v1", [("content-type", image.media_type)], image.body
    )
    assert answer.codes == ["MANIFEST_BLOB_UNKNOWN"] * 3
    assert names(app) == set()
    app.intercept = None
    app.journal.clear()
    app.request("PUT", "/v2/app/manifests/v1", [("content-type", image.media_type)], image.body)
    assert names(app) == {"manifest_names_absent"}


def test_earlier_runs_are_left_out(app: App) -> None:
    app.request("GET", TAGS)
    since = latest({PLACE: app})
    app.request("GET", TAGS)
    assert names(app) == {"listing_twice"}
    assert names(app, since=since) == set()


def test_a_challenge_of_an_earlier_run_counts_for_who_remembers_it() -> None:
    app = App(auth=BasicAuth({"captain": "secret"}))
    app.request("GET", TAGS)
    since = latest({PLACE: app})
    app.request("GET", TAGS, [("authorization", "Basic Y2FwdGFpbjpzZWNyZXQ=")])
    assert names(app) == set()
    assert names(app, since=since) == {"credential_unasked"}
    assert names(app, since=since, remembered=True) == set()


def test_what_is_not_answered_yet_is_not_known(app: App) -> None:
    """Two requests under way at once: the second was sent before the first could say anything."""
    body = [("host", "registry.test")]
    digest = digest_of(b"bytes")
    exchanges = [
        app.open(Request("HEAD", f"/v2/app/blobs/{digest}", body, connection=connection))
        for connection in (1, 2)
    ]
    for exchange in exchanges:
        exchange.start(None)
        exchange.finish()
    assert names(app) == set()
    app.handle(Request("HEAD", f"/v2/app/blobs/{digest}", body, connection=1))
    assert names(app) == {"known_blob_asked"}


def test_a_choice_of_an_index_is_not_invented(app: App) -> None:
    seed = Seed(1)
    other = App()
    one, two, stranger = (seed.image() for _ in range(3))
    seed.index([one, two]).load_into(other, "app", tag="v1")
    for image in (one, stranger):
        image.load_into(app, "app")
    put(app, seed.index([one]), "v1")
    assert names(app, other, kinds=("safety",)) == set()
    put(app, seed.index([one, stranger]), "v2")
    assert names(app, other, kinds=("safety",)) == {"manifest_invented"}


def _cookie(app: App) -> None:
    app.request("GET", TAGS, [("cookie", "session=1")])


def _pinged(app: App) -> None:
    app.request("GET", "/v2/")


@pytest.mark.parametrize(("wrong", "name"), [(_cookie, "cookie_sent"), (_pinged, "ping")])
def test_a_finding_says_what_and_shows_where(
    app: App, wrong: Callable[[App], None], name: str
) -> None:
    wrong(app)
    found = audit({PLACE: app})
    assert [each.name for each in found] == [name]
    assert found[0].kind in KINDS
    written = report(found)
    assert f"{found[0].kind}: {name}: {MISTAKES[name]}" in written
    assert f"{PLACE} 1. [0] GET " in written


def test_every_mistake_is_a_sentence() -> None:
    assert len(MISTAKES) >= 50
    for name, text in MISTAKES.items():
        assert name == name.lower()
        assert " " in text
        assert not text.endswith(".")


def test_what_an_earlier_run_put_may_be_named_before_it_is_put_again(app: App) -> None:
    """By what refers to it, and by a mount from where it is; a run that puts it first has it later."""
    seed = Seed(1)
    image = seed.image()
    referrer = seed.artifact(image)

    def hang() -> None:
        blob = next(iter(image.blobs))
        app.request("POST", f"/v2/other/blobs/uploads/?mount={blob}&from=app")
        put(app, referrer, referrer.top)
        app.request("PUT", "/v2/app/manifests/v2", [("content-type", image.media_type)], image.body)

    put(app, image, "v1")
    since = latest({PLACE: app})
    hang()
    wrong = {"subject_after_referrer", "mount_uncommitted"}
    assert not wrong & names(app, since=since, remembered=True)
    app.repositories["app"].manifests.clear()
    app.journal.clear()
    hang()
    assert wrong <= names(app)


def unnecessary(app: App) -> None:
    """Ping a registry, and read a blob twice."""
    digest = app.add_blob("app", b"bytes")
    app.request("GET", "/v2/")
    for _ in range(2):
        app.request("GET", f"/v2/app/blobs/{digest}")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, {"ping", "blob_pulled_twice"}),
        ({"has_failed": True}, {"blob_pulled_twice"}),
        ({"away": [PLACE]}, set()),
    ],
)
def test_a_disturbed_run_is_held_to_few_rules(
    app: App, options: dict[str, object], found: set[str]
) -> None:
    unnecessary(app)
    assert names(app, **options) == found


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_disturbs_a_run(app: App, status: int) -> None:
    app.faults.on("HEAD").status(status)
    app.request("HEAD", f"/v2/app/blobs/{digest_of(b'a')}")
    unnecessary(app)
    assert names(app) == {"blob_pulled_twice"}


def test_a_login_that_is_asked_for_disturbs_nothing() -> None:
    app = App(auth=BasicAuth({"captain": "secret"}))
    app.request("GET", TAGS)
    app.request("GET", "/v2/", [("authorization", "Basic Y2FwdGFpbjpzZWNyZXQ=")])
    assert names(app) == {"ping"}


@pytest.mark.parametrize(
    ("failing", "found"), [("target", {"manifest_fetched_twice"}), ("source", set())]
)
def test_a_failure_excuses_reading_a_manifest_again_where_it_was(
    app: App, failing: str, found: set[str]
) -> None:
    target = App()
    image = Seed(1).image().load_into(app, "app", "v1")
    path = f"/v2/app/manifests/{image.top}"
    site = {"source": app, "target": target}[failing]
    app.request("GET", path, [("accept", ACCEPT)])
    site.faults.on("PUT" if failing == "target" else "GET", "manifest").status(503)
    kind = [("content-type", image.media_type)]
    target.request("PUT", path, kind, image.body)
    app.request("GET", path, [("accept", ACCEPT)])
    site.faults.clear()
    app.request("GET", path, [("accept", ACCEPT)])
    assert names(app, target) - {"manifest_names_absent"} == found
