"""Each mistake of a client is caught and called by its name (conformance/audit), and nothing else is.

A script is a client that makes one mistake, or none, without a network. No mistake in the table of
`audit` is without one. Behind them is what excuses a client, and where a run begins.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from conformance.audit import MISTAKES, audit, latest, report
from conformance.http import Site
from conformance.images import Image, Seed
from conformance.messages import Answer, Request, Response, digest_of, error
from conformance.registry import App
from conformance.tests.asking import OCTETS, TAKE, basic, bearer, location
from conformance.tokens import BasicAuth, TokenService

REGISTRY = "http://registry.test"
SOURCE = "http://source.test"
SECURE = "https://secure.test"
ELSEWHERE = "http://elsewhere.test"
TAGS = "/v2/app/tags/list"
V1 = "/v2/app/manifests/v1"
START = "/v2/app/blobs/uploads/"
BYTES = digest_of(b"bytes")
THRICE = digest_of(b"bytes" * 3)
SECRET = "correct-horse"
USERS = {"captain": SECRET}
LOGIN = basic("captain", SECRET)
Asked = tuple[Any, ...]  # method, target, headers
PULL = "/token?service=registry.test&scope=repository:app:pull"


def tokens(**options: Any) -> TokenService:
    return TokenService(USERS, anonymous=False, **options)


class Script:
    """A client that does what it is told at a registry, at a source and elsewhere."""

    def __init__(self, **options: Any) -> None:
        self.seed = Seed(5)
        self.app = App(**options)
        self.source = App()
        self.sites: dict[str, Site] = {REGISTRY: self.app, SOURCE: self.source}

    def say(self, requests: list[Asked]) -> None:
        """Ask for one after the other. `@` is the newest Location of an upload, `@0` the first."""
        given: list[str] = []
        for method, target, *headers in requests:
            at = SOURCE if target.startswith(SOURCE) else REGISTRY
            target = target.removeprefix(at)
            body = None
            if target.startswith("@") and method != "DELETE":
                headers.append(OCTETS)
                body = b"bytes"
            target = target.replace("@0", given[0]) if "@0" in target else target
            target = target.replace("@", given[-1]) if "@" in target else target
            answer = self.ask(method, target, *headers, body=body, at=at)
            if answer.status == 202:
                given.append(location(answer))

    def ask(
        self,
        method: str,
        target: str,
        *headers: tuple[str, str],
        body: bytes | None = None,
        at: str = REGISTRY,
    ) -> Response:
        host = ("host", at.partition("://")[2])
        return self.sites[at].request(method, target, [host, *headers], body)

    def upload(self, digest: str, body: bytes, repository: str = "app") -> None:
        where = location(self.ask("POST", f"/v2/{repository}/blobs/uploads/"))
        answer = self.ask("PUT", f"{where}&digest={digest}", OCTETS, body=body)
        assert answer.status == 201

    def put_blobs(self, image: Image) -> None:
        for digest, data in image.blobs.items():
            self.upload(digest, data)

    def put_manifest(self, image: Image, reference: str, media_type: str = "") -> Response:
        kind = ("content-type", media_type or image.media_type)
        return self.ask("PUT", f"/v2/app/manifests/{reference}", kind, body=image.body)

    def put(self, image: Image, reference: str = "") -> Image:
        """Put an image, as it should be done, by its digest if it gets no tag."""
        self.put_blobs(image)
        assert self.put_manifest(image, reference or image.top).status == 201
        return image

    def mistakes(self, **options: Any) -> set[str]:
        return {each.name for each in audit(self.sites, **options)}


class Told(NamedTuple):
    mistakes: frozenset[str]  # none where the conversation is right
    script: Callable[[Script], None]
    options: dict[str, Any]  # of the registry


SCRIPTS: dict[str, Told] = {}


def script(
    mistakes: str, **options: Any
) -> Callable[[Callable[[Script], None]], Callable[[Script], None]]:
    """Enter a conversation under the mistakes in it."""

    def enter(told: Callable[[Script], None]) -> Callable[[Script], None]:
        SCRIPTS[told.__name__] = Told(frozenset(mistakes.split()), told, options)
        return told

    return enter


# Requests of which each is a mistake, or the last one behind the others. The registry holds an image
# as `v1`, and two blobs.

IMAGE = Seed(5).image()
CHILD = f"/v2/app/manifests/{IMAGE.top}"
BLOB = f"/v2/app/blobs/{BYTES}"
NO_API = {"referrers_api": False}

OWN = ("POST", f"{START}?mount={BYTES}&from=app")  # asks for a blob, as rule 11 has it
END = ("PUT", f"@&digest={BYTES}")
CANCEL = ("DELETE", "@")
NO_MOUNTS = {"mounts": False}


def chunk(span: str) -> Asked:
    return "PATCH", "@", ("content-range", span)


REQUESTS: list[tuple[str, dict[str, Any], list[Asked]]] = [
    ("", {}, [("GET", TAGS), ("GET", V1, TAKE), ("GET", BLOB)]),
    ("refused_as_wrong", {}, [("GET", "/v2/app/blob/x")]),
    ("deleted refused_as_wrong", {}, [("DELETE", V1)]),
    ("accept_lacks_types", {}, [("GET", V1, ("accept", "*/*"))]),
    ("coding_accepted", {}, [("GET", BLOB, ("accept-encoding", "gzip"))]),
    ("range_malformed", {}, [("GET", BLOB, ("range", "0-99"))]),
    ("cookie_sent", {}, [("GET", TAGS, ("cookie", "session=1"))]),
    ("location_not_given", {}, [("PUT", f"{START}x?_state=1&digest={BYTES}", OCTETS)]),
    ("manifest_refused refused_as_wrong", {}, [("PUT", "/v2/app/manifests/v2")]),
    ("session_unused", {}, [("POST", START)]),
    ("source_written", {}, [("POST", SOURCE + START)]),
    ("", {}, [("POST", START), chunk("0-4"), chunk("5-9"), ("PUT", f"@&digest={THRICE}")]),
    ("", {}, [("POST", START), CANCEL]),
    ("chunk_order", {}, [("POST", START), chunk("0-4"), chunk("0-4")]),
    ("location_stale", {}, [("POST", START), ("PATCH", "@0"), ("PATCH", "@0")]),
    ("session_after_end", {}, [("POST", START), CANCEL, END]),
    ("bytes_not_of_digest", {}, [("POST", START), ("PUT", f"@&digest={THRICE}")]),
    ("blob_uploaded_twice second_session", {}, [("POST", START), END, ("POST", START), END]),
    ("blob_before_session", {}, [("GET", SOURCE + BLOB), ("POST", START), END]),
    ("", NO_MOUNTS, [OWN, END, OWN, CANCEL]),
    ("second_session", NO_MOUNTS, [OWN, END, OWN, CANCEL, OWN, CANCEL]),
    ("second_session", NO_MOUNTS, [OWN, CANCEL, OWN, CANCEL]),
    ("mount_uncommitted", {}, [("POST", f"{START}?mount={BYTES}&from=some/where")]),
    ("trivial_blob_fetched", {}, [("GET", f"/v2/app/blobs/{digest_of(b'{}')}")]),
    ("blob_pulled_twice", {}, [("GET", BLOB), ("GET", BLOB)]),
    ("known_blob_asked", {}, [("HEAD", BLOB), ("HEAD", BLOB)]),
    ("ping", {}, [("GET", "/v2/")]),
    ("listing_twice", {}, [("GET", TAGS), ("GET", TAGS)]),
    ("listing_twice", {}, [("GET", f"/v2/app/referrers/{BYTES}")] * 2),
    ("absent_api_asked", NO_API, [("GET", f"/v2/app/referrers/{BYTES[:-1]}{n}") for n in "01"]),
    ("tag_asked_twice", {}, [("GET", V1, TAKE), ("GET", V1, TAKE)]),
    ("manifest_fetched_twice", {}, [("GET", CHILD, TAKE), ("GET", CHILD, TAKE)]),
    ("absent_tag_asked", {}, [("GET", TAGS), ("HEAD", "/v2/app/manifests/v2", TAKE)]),
    ("page_not_linked", {"page_size": 1}, [("GET", f"{TAGS}?n=1"), ("GET", f"{TAGS}?last=v1")]),
    ("credential_unasked", {}, [("GET", TAGS, LOGIN)]),
    ("credential_unasked", {"auth": tokens()}, [("GET", TAGS), ("GET", TAGS, LOGIN)]),
    (
        "token_twice",
        {"auth": tokens()},
        [("GET", TAGS), ("GET", PULL, LOGIN), ("GET", PULL, LOGIN)],
    ),
    (
        "secret_in_url",
        {"auth": tokens()},
        [("GET", TAGS), ("GET", f"{PULL}&password={SECRET}", LOGIN)],
    ),
    (
        "challenge_twice",
        {"auth": BasicAuth(USERS)},
        [("GET", TAGS), ("GET", TAGS, LOGIN), ("GET", TAGS)],
    ),
    (
        "refused_login_again",
        {"auth": BasicAuth(USERS)},
        [("GET", TAGS), *[("GET", TAGS, basic("captain", "wrong"))] * 2],
    ),
]


@pytest.mark.parametrize(("mistakes", "options", "requests"), REQUESTS)
def test_requests_are_judged_by_the_mistake_in_them(
    mistakes: str, options: dict[str, Any], requests: list[Asked]
) -> None:
    client = Script(**options)
    IMAGE.load_into(client.app, "app", "v1", "v3")
    for data in (b"bytes", b"{}"):
        client.app.add_blob("app", data)
    client.source.add_blob("app", b"bytes")
    client.say(requests)
    excused = {"session_unused"} - {*mistakes.split()}
    assert client.mistakes(excused=excused, readonly=[SOURCE]) == {*mistakes.split()}


# Mounts.


@script("second_session", mounts=False)
def a_refused_mount_and_another_post(client: Script) -> None:
    digest, body = next(iter(client.put(client.seed.image(), "v1").blobs.items()))
    client.ask("POST", f"/v2/two/blobs/uploads/?mount={digest}&from=app")
    client.upload(digest, body, "two")


@script("mount_refused_again", mounts=False)
def a_refused_mount_forgotten(client: Script) -> None:
    image = client.put(client.seed.image(), "v1")
    for digest in [*image.blobs][:2]:
        client.ask("POST", f"/v2/two/blobs/uploads/?mount={digest}&from=app")


@script("upload_without_mount")
def a_mount_not_thought_of(client: Script) -> None:
    digest, body = next(iter(client.put(client.seed.image(), "v1").blobs.items()))
    client.upload(digest, body, "two")


# Manifests and referrers.


@script("manifest_names_absent")
def a_tag_before_its_blobs(client: Script) -> None:
    client.put_manifest(client.seed.image(), "v1")


@script("content_missing", require_blobs=False)
def a_manifest_whose_blobs_are_taken_for_present(client: Script) -> None:
    client.put_manifest(client.seed.image(), "v1")


@script("content_differs")
def bytes_that_nobody_verifies(client: Script) -> None:
    """The registry is as careless as the client."""
    layer = client.put(client.seed.image(), "v1").document["layers"][0]
    client.app.add_blob("app", bytes(layer["size"]), layer["digest"])


@script("manifest_invented")
def a_manifest_that_no_source_has(client: Script) -> None:
    client.seed.image().load_into(client.source, "app", "v1")
    client.put(client.seed.image(), "v1")


def put_choice(client: Script, *chosen: int) -> None:
    """Put an index of some of three images, of which the source's index names the first two."""
    images = [client.seed.image() for _ in range(3)]
    client.seed.index(images[:2]).load_into(client.source, "app", tag="v1")
    for image in images:
        image.load_into(client.app, "app")
    client.put_manifest(client.seed.index([images[number] for number in chosen]), "v1")


@script("")
def a_choice_of_an_index(client: Script) -> None:
    put_choice(client, 0)


@script("manifest_invented")
def a_choice_that_the_source_has_not(client: Script) -> None:
    put_choice(client, 0, 2)


@script("media_type_changed", any_manifest_type=True)
def a_manifest_as_any_json(client: Script) -> None:
    typed = client.seed.image()
    bare = {key: value for key, value in typed.document.items() if key != "mediaType"}
    image = typed.with_manifest(json.dumps(bare).encode(), typed.media_type)
    image.load_into(client.source, "app", "v1")
    client.put_blobs(image)
    client.put_manifest(image, "v1", "application/json")


@script("foreign_layer_moved")
def a_layer_that_must_not_be_distributed(client: Script) -> None:
    image = client.seed.image(foreign=["https://example.org/layer"])
    image.load_into(client.source, "app", "v1")
    client.ask("GET", f"/v2/app/blobs/{next(iter(image.absent))}", at=SOURCE)


@script("own_manifest_asked")
def a_tag_looked_up_behind_its_put(client: Script) -> None:
    client.put(client.seed.image(), "v1")
    client.ask("HEAD", V1, TAKE)


@script("manifest_put_twice")
def a_manifest_put_twice_over(client: Script) -> None:
    client.put_manifest(client.put(client.seed.image(), "v1"), "v1")


@script("subject_after_referrer")
def a_referrer_before_its_subject(client: Script) -> None:
    subject = client.seed.image()
    client.put(client.seed.artifact(subject))
    client.put(subject)


def fallback(image: Image) -> str:
    return image.top.replace(":", "-")


@script("fallback_after_api")
def the_fallback_tag_all_the_same(client: Script) -> None:
    subject = client.put(client.seed.image())
    client.put(client.seed.artifact(subject))
    client.ask("GET", f"/v2/app/referrers/{subject.top}")
    client.ask("GET", f"/v2/app/manifests/{fallback(subject)}", TAKE)


@script("absent_api_asked", referrers_api=False)
def a_page_instead_of_the_api_for_each_digest(client: Script) -> None:
    """What is looked at says the same as a 404; the fallback tag is no mistake behind it."""
    page = Response(200, [("Content-Type", "text/html")], b"<html>")
    real = client.app.start
    client.app.start = lambda request: page if request.kind == "referrers" else real(request)  # type: ignore[method-assign]
    for text in (b"a", b"b"):
        client.ask("GET", f"/v2/app/referrers/{digest_of(text)}")
        client.ask("GET", f"/v2/app/manifests/{digest_of(text).replace(':', '-')}", TAKE)


@script("absent_tag_asked", referrers_api=False)
def a_fallback_tag_that_the_listing_has_not(client: Script) -> None:
    subject = client.put(client.seed.image(), "v1")
    client.ask("GET", TAGS)
    client.ask("GET", f"{TAGS}?n=9")
    client.ask("GET", f"/v2/app/manifests/{fallback(subject)}", TAKE)


@script("", referrers_api=False)
def a_list_of_referrers_that_is_read_put_and_read_back(client: Script) -> None:
    subject = client.put(client.seed.image())
    attached = [
        client.put(client.seed.artifact(subject, None, config_type=kind, annotations={"a": "b"}))
        for kind in ("a/b", "c/d")
    ]
    where = f"/v2/app/manifests/{fallback(subject)}"
    assert client.ask("GET", where, TAKE).status == 404
    listed = client.put(client.seed.fallback_index(attached), fallback(subject))
    assert client.ask("GET", where, TAKE).data == listed.body


@script("own_manifest_asked", referrers_api=False)
def a_list_of_referrers_that_is_read_back_twice(client: Script) -> None:
    a_list_of_referrers_that_is_read_put_and_read_back(client)
    client.ask("GET", f"/v2/app/manifests/{next(iter(client.app.tags('app')))}", TAKE)


def put_list(client: Script, change: Callable[[list[Any]], object]) -> None:
    """Put a list of two referrers, of which the second is another image's, with a change."""
    subject, other = client.put(client.seed.image()), client.put(client.seed.image())
    attached = [
        client.put(client.seed.artifact(image, None, config_type="a/b", annotations={"a": "b"}))
        for image in (subject, other)
    ]
    listed = client.seed.fallback_index(attached)
    document = listed.document
    change(document["manifests"])
    body = json.dumps(document).encode()
    client.put(listed.with_manifest(body, listed.media_type), fallback(subject))


@script("", referrers_api=False)
def a_list_of_its_own(client: Script) -> None:
    put_list(client, lambda entries: entries.pop())


@script("list_of_referrers_wrong", referrers_api=False)
def a_list_that_names_what_refers_to_another(client: Script) -> None:
    put_list(client, lambda entries: None)


@script("list_of_referrers_wrong", referrers_api=False)
def a_list_that_names_one_twice(client: Script) -> None:
    put_list(client, lambda entries: entries.__setitem__(1, entries[0]))


@script("list_of_referrers_wrong", referrers_api=False)
def a_list_without_annotations(client: Script) -> None:
    put_list(client, lambda entries: (entries.pop(), entries[0].pop("annotations")))


# Credentials.


class Storage(Site):
    """What a registry sends its clients to; it takes and gives whatever is asked."""

    def start(self, request: Request) -> Answer:
        return Response(200)


def elsewhere(client: Script, method: str, status: int, path: str) -> None:
    """Have the registry send a client to a storage, for requests of a method."""
    client.sites[ELSEWHERE] = Storage()
    sent = Response(status, [("Location", f"{ELSEWHERE}{path}")])
    client.app.intercept = lambda request: sent if request.method == method else None


@script("credential_on_redirect")
def a_login_that_follows_a_redirect(client: Script) -> None:
    elsewhere(client, "GET", 307, "/x/1")
    client.ask("GET", BLOB)
    client.ask("GET", "/x/1", LOGIN, at=ELSEWHERE)


@script("credential_on_redirect")
def a_login_that_goes_to_a_foreign_location(client: Script) -> None:
    elsewhere(client, "POST", 202, "/up?session=1")
    client.ask("POST", START)
    target = f"/up?session=1&digest={BYTES}"
    client.ask("PUT", target, OCTETS, LOGIN, body=b"bytes", at=ELSEWHERE)


@script("credential_to_realm", auth=tokens(realm="http://auth.elsewhere.test/token"))
def a_realm_that_belongs_to_somebody_else(client: Script) -> None:
    client.sites["http://auth.elsewhere.test"] = tokens()
    client.ask("GET", TAGS)
    client.ask("GET", "/token?service=registry.test", LOGIN, at="http://auth.elsewhere.test")


@script("token_of_another", auth=tokens())
def a_token_shown_to_another_registry(client: Script) -> None:
    client.sites[ELSEWHERE] = App(auth=tokens())
    for place in (REGISTRY, ELSEWHERE):
        client.ask("GET", TAGS, at=place)
    token = bearer(client.ask("GET", PULL, LOGIN))
    for place in (REGISTRY, ELSEWHERE):
        client.ask("GET", TAGS, token, at=place)


@script("credential_in_clear")
def a_token_of_https_over_http(client: Script) -> None:
    secure = App(auth=tokens())
    plain = App(auth=tokens(realm=f"{SECURE}/token"))
    client.sites |= {SECURE: secure, "http://secure.test": plain}

    def ask(site: Site, scheme: str, path: str, *headers: tuple[str, str]) -> Response:
        host = ("host", "secure.test")
        answer = site.handle(Request("GET", path, [host, *headers], scheme=scheme))
        assert isinstance(answer, Response)
        return answer

    ask(secure, "https", TAGS)
    ask(plain, "http", TAGS)
    token = bearer(ask(secure, "https", PULL, LOGIN))
    ask(secure, "https", TAGS, token)
    ask(plain, "http", TAGS, token)


@script("push_asked_of_source")
def a_token_with_push_for_the_source(client: Script) -> None:
    """The source has a login of its own."""
    client.sites[SOURCE] = App(auth=tokens())
    client.ask("GET", TAGS, at=SOURCE)
    client.ask("GET", f"{PULL},push", LOGIN, at=SOURCE)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_judged_by_its_mistake(name: str) -> None:
    told = SCRIPTS[name]
    client = Script(**told.options)
    told.script(client)
    # Most scripts stop at the mistake: what they began stays open.
    findings = audit(client.sites, excused=["session_unused"], readonly=[SOURCE])
    assert {each.name for each in findings} == told.mistakes, report(findings)


def test_no_mistake_is_without_its_script() -> None:
    played = set().union(*(told.mistakes for told in SCRIPTS.values()))
    played |= {name for mistakes, _, _ in REQUESTS for name in mistakes.split()}
    assert played == {*MISTAKES, "refused_as_wrong"}


# What excuses a client, where a run begins, and what a finding says.


@pytest.fixture
def client() -> Script:
    return Script()


def unnecessary(client: Script) -> None:
    """Ping a registry, and read a blob twice."""
    client.app.add_blob("app", b"bytes")
    for target in ("/v2/", BLOB, BLOB):
        client.ask("GET", target)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, {"ping", "blob_pulled_twice"}),
        ({"excused": ["ping"]}, {"blob_pulled_twice"}),
        ({"kinds": ("protocol", "safety")}, set()),
        ({"has_failed": True}, {"blob_pulled_twice"}),
        ({"away": [REGISTRY]}, set()),
    ],
)
def test_a_disturbed_run_is_held_to_few_rules(
    client: Script, options: dict[str, Any], found: set[str]
) -> None:
    unnecessary(client)
    assert client.mistakes(**options) == found


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_disturbs_a_run_and_a_challenge_does_not(client: Script, status: int) -> None:
    client.app.faults.on("HEAD").status(status)
    client.ask("HEAD", f"/v2/app/blobs/{digest_of(b'a')}")
    unnecessary(client)
    assert client.mistakes() == {"blob_pulled_twice"}
    guarded = Script(auth=BasicAuth(USERS))
    guarded.ask("GET", TAGS)
    guarded.ask("GET", "/v2/", LOGIN)
    assert guarded.mistakes() == {"ping"}


@pytest.mark.parametrize("answer", [error(503, "UNAVAILABLE", "later"), b""])
def test_a_failure_excuses_one_repetition(client: Script, answer: Response | bytes) -> None:
    client.app.add_blob("app", b"bytes")
    client.ask("GET", BLOB)
    client.app.intercept = lambda request: answer
    client.app.handle(Request("GET", BLOB, [("host", "registry.test")]))
    client.app.intercept = None
    client.ask("GET", BLOB)
    assert client.mistakes() == set()
    client.ask("GET", BLOB)
    assert client.mistakes() == {"blob_pulled_twice"}, "not as often as one likes"


def test_a_redirect_that_was_not_followed_is_a_failure(client: Script) -> None:
    client.app.add_blob("app", b"bytes")
    client.ask("GET", BLOB)
    elsewhere(client, "GET", 307, "/x/1")
    client.ask("GET", BLOB)
    client.app.intercept = None
    client.ask("GET", BLOB)
    assert client.mistakes() == set()


@pytest.mark.parametrize(
    ("failing", "found"), [("target", {"manifest_fetched_twice"}), ("source", set())]
)
def test_a_failure_excuses_reading_a_manifest_again_where_it_was(
    client: Script, failing: str, found: set[str]
) -> None:
    IMAGE.load_into(client.source, "app", "v1")
    site = client.source if failing == "source" else client.app
    client.ask("GET", CHILD, TAKE, at=SOURCE)
    site.faults.on("PUT GET", "manifest").status(503)
    client.put_manifest(IMAGE, IMAGE.top)
    client.ask("GET", CHILD, TAKE, at=SOURCE)
    site.faults.clear()
    client.ask("GET", CHILD, TAKE, at=SOURCE)
    assert client.mistakes() - {"manifest_names_absent"} == found


def test_the_answer_of_a_hook_proves_nothing(client: Script) -> None:
    refusal = error(400, "MANIFEST_INVALID", "no")
    client.app.intercept = lambda request: refusal if request.kind == "manifest" else None
    client.put_manifest(IMAGE, "v1")
    assert client.mistakes() == set()
    # Who is told that a blob is there may name it.
    client.app.intercept = lambda request: Response(200) if request.method == "HEAD" else None
    client.ask("HEAD", BLOB)
    answer = client.put_manifest(IMAGE, "v1")
    assert answer.codes == ["MANIFEST_BLOB_UNKNOWN"] * 3
    assert client.mistakes() == set()


def test_what_a_client_cannot_have_read_is_not_known(client: Script) -> None:
    """Requests under way at once, and one on another connection as soon as the first was answered."""
    host = [("host", "registry.test")]
    asked = [Request("HEAD", BLOB, host, connection=number) for number in (1, 2, 3)]
    exchanges = [client.app.open(request) for request in asked[:2]]
    for exchange in exchanges:
        exchange.start(None)
        exchange.finish()
    client.app.handle(asked[2])
    assert client.mistakes() == set()
    client.app.handle(asked[0])
    assert client.mistakes() == {"known_blob_asked"}


def test_earlier_runs_are_left_out_but_for_who_remembers_their_challenges() -> None:
    client = Script(auth=BasicAuth(USERS))
    client.ask("GET", TAGS)
    since = latest(client.sites)
    client.ask("GET", TAGS, LOGIN)
    assert client.mistakes() == set()
    assert client.mistakes(since=since) == {"credential_unasked"}
    assert client.mistakes(since=since, remembered=True) == set()


def test_what_an_earlier_run_put_may_be_named_before_it_is_put_again(client: Script) -> None:
    """By what refers to it, and by a mount from where it is; a run that puts it first has it later."""
    image = client.put(client.seed.image(), "v1")
    referrer = client.seed.artifact(image)

    def hang() -> None:
        blob = next(iter(image.blobs))
        client.ask("POST", f"/v2/other/blobs/uploads/?mount={blob}&from=app")
        client.put(referrer)
        client.put_manifest(image, "v2")

    wrong = {"subject_after_referrer", "mount_uncommitted"}
    since = latest(client.sites)
    hang()
    assert not wrong & client.mistakes(since=since, remembered=True)
    client.app.repositories["app"].manifests.clear()
    client.app.journal.clear()
    hang()
    assert wrong <= client.mistakes()


@pytest.mark.parametrize(("name", "kind"), [("cookie_sent", "safety"), ("ping", "discipline")])
def test_a_finding_says_what_and_shows_where(client: Script, name: str, kind: str) -> None:
    client.ask("GET", TAGS, ("cookie", "session=1"))
    client.ask("GET", "/v2/")
    written = report(audit(client.sites))
    assert f"{kind}: {name}: {MISTAKES[name]}" in written
    assert f"{REGISTRY} 1. [0] GET {TAGS} -> 404" in written
