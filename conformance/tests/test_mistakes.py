"""Each mistake of a client is caught and called by its name (conformance/audit).

A script is a client that makes one mistake, or none, without a network. No mistake in the table of
`audit` is without one.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from conformance.audit import MISTAKES, audit, report
from conformance.http import Site
from conformance.images import Image, Seed
from conformance.messages import Answer, Request, Response, digest_of
from conformance.registry import App
from conformance.tokens import BasicAuth, TokenService
from conformance.walks import ACCEPT

REGISTRY = "http://registry.test"
SOURCE = "http://source.test"
SECURE = "https://secure.test"
ELSEWHERE = "http://elsewhere.test"
TAGS = "/v2/app/tags/list"
START = "/v2/app/blobs/uploads/"
OCTETS = ("content-type", "application/octet-stream")
TAKE = ("accept", ACCEPT)
SECRET = "correct-horse"
USERS = {"captain": SECRET}


def basic(password: str = SECRET) -> tuple[str, str]:
    login = base64.b64encode(f"captain:{password}".encode()).decode()
    return "authorization", f"Basic {login}"


def bearer(answer: Response) -> tuple[str, str]:
    """Return the header for a token that was given."""
    return "authorization", f"Bearer {answer.json()['token']}"


class Script:
    """A client that does what it is told at a registry, at a source and elsewhere."""

    def __init__(self, **options: Any) -> None:
        self.seed = Seed(5)
        self.app = App(**options)
        self.source = App()
        self.sites: dict[str, Site] = {REGISTRY: self.app, SOURCE: self.source}

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

    def where(self, answer: Response) -> str:
        """Return the path and query of an upload's next Location."""
        return answer.header("location").removeprefix(REGISTRY)

    def begin(self) -> str:
        return self.where(self.ask("POST", START))

    def patch(self, target: str, body: bytes, first: int | None = None) -> Response:
        span = () if first is None else (("content-range", f"{first}-{first + len(body) - 1}"),)
        return self.ask("PATCH", target, OCTETS, *span, body=body)

    def end(self, target: str, digest: str, body: bytes = b"") -> Response:
        return self.ask("PUT", f"{target}&digest={digest}", OCTETS, body=body)

    def put_blobs(self, image: Image) -> None:
        for digest, data in image.blobs.items():
            assert self.end(self.begin(), digest, data).status == 201

    def put_manifest(self, image: Image, reference: str, media_type: str = "") -> Response:
        kind = ("content-type", media_type or image.media_type)
        return self.ask("PUT", f"/v2/app/manifests/{reference}", kind, body=image.body)

    def put(self, image: Image, *tags: str) -> None:
        """Put a whole image, as it should be done."""
        self.put_blobs(image)
        for digest, (media_type, body) in image.manifests.items():
            for reference in tags or (digest,):
                answer = self.ask(
                    "PUT", f"/v2/app/manifests/{reference}", ("content-type", media_type), body=body
                )
                assert answer.status == 201, answer.data


class Told(NamedTuple):
    script: Callable[[Script], None]
    mistakes: frozenset[str]  # none where the conversation is right
    options: dict[str, Any]  # of the registry


SCRIPTS: dict[str, Told] = {}


def script(
    mistakes: str, **options: Any
) -> Callable[[Callable[[Script], None]], Callable[[Script], None]]:
    """Enter a conversation under the mistakes in it; the first is what it is about."""

    def enter(told: Callable[[Script], None]) -> Callable[[Script], None]:
        SCRIPTS[told.__name__] = Told(told, frozenset(mistakes.split()), options)
        return told

    return enter


# Conversations that are right, and mistakes in uploads, manifests and referrers.


@script("")
def a_blob_in_chunks(client: Script) -> None:
    first = client.seed.blob(4000)
    second = client.seed.blob(500)
    where = client.where(client.patch(client.begin(), first, 0))
    where = client.where(client.patch(where, second, 4000))
    assert client.end(where, digest_of(first + second)).status == 201


@script("")
def a_cancelled_upload(client: Script) -> None:
    assert client.ask("DELETE", client.begin()).status == 204


def ask_for_own(client: Script, digest: str) -> None:
    """Ask for a blob as rule 11 has it, at a registry that opens a session for what is there."""
    answer = client.ask("POST", f"{START}?mount={digest}&from=app")
    assert answer.status == 202
    assert client.ask("DELETE", client.where(answer)).status == 204


@script("", mounts=False)
def a_blob_that_is_there_is_asked_for_once(client: Script) -> None:
    body = client.seed.blob(500)
    digest = digest_of(body)
    started = client.ask("POST", f"{START}?mount={digest}&from=app")
    assert client.end(client.where(started), digest, body).status == 201
    ask_for_own(client, digest)


@script("second_session", mounts=False)
def a_blob_that_is_there_is_asked_for_again(client: Script) -> None:
    a_blob_that_is_there_is_asked_for_once(client)
    ask_for_own(client, digest_of(Seed(5).blob(500)))


@script("second_session", mounts=False)
def a_blob_that_is_not_there_is_asked_for_twice(client: Script) -> None:
    body = client.seed.blob(500)
    ask_for_own(client, digest_of(body))
    ask_for_own(client, digest_of(body))


@script("")
def a_subject_and_its_referrers(client: Script) -> None:
    subject = client.seed.image()
    client.put(subject)
    client.put(client.seed.artifact(subject))
    assert client.ask("GET", f"/v2/app/referrers/{subject.top}").status == 200


@script("refused_as_wrong")
def a_post_without_a_length(client: Script) -> None:
    client.app.handle(Request("POST", START, [("host", "registry.test")]))


@script("refused_as_wrong")
def a_length_that_is_no_number(client: Script) -> None:
    client.ask("POST", START, ("content-length", "none"))


@script("refused_as_wrong")
def a_get_with_a_body(client: Script) -> None:
    client.ask("GET", "/v2/app/tags/list", ("content-length", "2"), body=b"{}")


@script("refused_as_wrong")
def a_post_with_a_body(client: Script) -> None:
    client.ask("POST", START, OCTETS, body=b"bytes")


@script("refused_as_wrong")
def a_digest_given_twice(client: Script) -> None:
    digest = digest_of(b"bytes")
    client.ask("PUT", f"{client.begin()}&digest={digest}&digest={digest}", OCTETS, body=b"bytes")


@script("chunk_order")
def a_chunk_sent_twice(client: Script) -> None:
    where = client.where(client.patch(client.begin(), b"first", 0))
    client.patch(where, b"first", 0)


@script("refused_as_wrong")
def a_range_in_httpss_form(client: Script) -> None:
    client.ask("PATCH", client.begin(), OCTETS, ("content-range", "bytes 0-4/5"), body=b"first")


@script("location_stale")
def a_location_used_for_every_chunk(client: Script) -> None:
    where = client.begin()
    client.patch(where, b"first")
    client.patch(where, b"second")


@script("location_not_given")
def a_session_of_ones_own(client: Script) -> None:
    client.end(
        f"{START}00000000-0000-4000-8000-000000000099?_state=1", digest_of(b"bytes"), b"bytes"
    )


@script("session_after_end")
def an_upload_behind_its_cancelling(client: Script) -> None:
    where = client.begin()
    client.ask("DELETE", where)
    client.end(where, digest_of(b"bytes"), b"bytes")


@script("manifest_names_absent")
def a_tag_before_its_blobs(client: Script) -> None:
    image = client.seed.image()
    client.ask("PUT", "/v2/app/manifests/v1", ("content-type", image.media_type), body=image.body)


@script("subject_after_referrer")
def a_referrer_before_its_subject(client: Script) -> None:
    subject = client.seed.image()
    client.put(client.seed.artifact(subject))
    client.put(subject)


@script("listing_twice")
def referrers_for_each_tag(client: Script) -> None:
    for _ in range(2):
        client.ask("GET", f"/v2/app/referrers/{digest_of(b'a')}")


@script("fallback_after_api")
def the_fallback_tag_all_the_same(client: Script) -> None:
    subject = client.seed.image()
    client.put(subject)
    client.ask("GET", f"/v2/app/referrers/{subject.top}")
    client.ask("GET", f"/v2/app/manifests/{subject.top.replace(':', '-')}", TAKE)


@script("absent_api_asked", referrers_api=False)
def an_api_that_is_not_there_for_each_digest(client: Script) -> None:
    for text in (b"a", b"b"):
        client.ask("GET", f"/v2/app/referrers/{digest_of(text)}")


def fallback(image: Image) -> str:
    return image.top.replace(":", "-")


@script("", referrers_api=False)
def a_list_of_referrers_that_is_read_put_and_read_back(client: Script) -> None:
    subject = client.seed.image()
    attached = [
        client.seed.artifact(subject, None, config_type=kind, annotations={"a": "b"})
        for kind in ("a/b", "c/d")
    ]
    for each in (subject, *attached):
        client.put(each)
    listed = client.seed.fallback_index(attached)
    where = f"/v2/app/manifests/{fallback(subject)}"
    assert client.ask("GET", where, TAKE).status == 404
    client.put(listed, fallback(subject))
    assert client.ask("GET", where, TAKE).data == listed.body


@script("own_manifest_asked", referrers_api=False)
def a_list_of_referrers_that_is_read_back_twice(client: Script) -> None:
    a_list_of_referrers_that_is_read_put_and_read_back(client)
    tag = next(iter(client.app.tags("app")))
    client.ask("GET", f"/v2/app/manifests/{tag}", TAKE)


@script("list_of_referrers_wrong", referrers_api=False)
def a_list_that_names_one_twice(client: Script) -> None:
    subject = client.seed.image()
    client.put(subject)
    client.put(attached := client.seed.artifact(subject))
    client.put(client.seed.fallback_index([attached, attached]), fallback(subject))


@script("list_of_referrers_wrong", referrers_api=False)
def a_list_that_names_what_refers_to_another(client: Script) -> None:
    one = client.seed.image()
    other = client.seed.image()
    for each in (one, other, attached := client.seed.artifact(other)):
        client.put(each)
    client.put(client.seed.fallback_index([attached]), fallback(one))


@script("list_of_referrers_wrong", referrers_api=False)
def a_list_without_annotations(client: Script) -> None:
    subject = client.seed.image()
    client.put(subject)
    client.put(attached := client.seed.artifact(subject, annotations={"a": "b"}))
    listed = client.seed.fallback_index([attached])
    document = listed.document
    del document["manifests"][0]["annotations"]
    client.put(
        listed.with_manifest(json.dumps(document).encode(), listed.media_type), fallback(subject)
    )


@script("fallback_after_api")
def a_list_of_referrers_for_the_api(client: Script) -> None:
    a_subject_and_its_referrers(client)
    client.put(client.seed.fallback_index([]), f"sha256-{'0' * 64}")


@script("absent_tag_asked", referrers_api=False)
def a_fallback_tag_that_the_listing_has_not(client: Script) -> None:
    subject = client.seed.image()
    client.put(subject, "v1")
    for path in ("tags/list", "tags/list?n=9", f"manifests/{fallback(subject)}"):
        client.ask("GET", f"/v2/app/{path}", TAKE)


@script("absent_api_asked", referrers_api=False)
def a_page_instead_of_the_api_for_each_digest(client: Script) -> None:
    """What is looked at says the same as a 404; the fallback tag is no mistake behind it."""
    page = Response(200, [("Content-Type", "text/html")], b"<html>")
    real = client.app.start
    client.app.start = lambda request: page if request.kind == "referrers" else real(request)  # type: ignore[method-assign]
    for text in (b"a", b"b"):
        client.ask("GET", f"/v2/app/referrers/{digest_of(text)}")
        client.ask("GET", f"/v2/app/manifests/{digest_of(text).replace(':', '-')}", TAKE)


@script("credential_in_clear")
def a_token_of_https_over_http(client: Script) -> None:
    secure = App(auth=TokenService(USERS, anonymous=False))
    plain = App(auth=TokenService(USERS, anonymous=False, realm=f"{SECURE}/token"))
    client.sites |= {SECURE: secure, "http://secure.test": plain}

    def ask(site: Site, scheme: str, path: str, *headers: tuple[str, str]) -> Response:
        answer = site.handle(
            Request("GET", path, [("host", "secure.test"), *headers], scheme=scheme)
        )
        assert isinstance(answer, Response)
        return answer

    for site, scheme in ((secure, "https"), (plain, "http")):
        assert ask(site, scheme, "/v2/app/tags/list").status == 401
    login = basic()
    given = ask(secure, "https", "/token?service=registry.test&scope=repository:app:pull", login)
    token = bearer(given)
    assert ask(secure, "https", "/v2/app/tags/list", token).status == 404
    assert ask(plain, "http", "/v2/app/tags/list", token).status == 401


@script("refused_as_wrong")
def a_form_without_its_fields(client: Script) -> None:
    client.sites["http://auth.test"] = service = TokenService(USERS)
    kind = ("content-type", "application/x-www-form-urlencoded")
    service.request("POST", "/token", [("host", "auth.test"), kind], b"grant_type=password")


# Requests of another form.


@script("refused_as_wrong")
def a_range_of_another_length(client: Script) -> None:
    client.ask("PATCH", client.begin(), OCTETS, ("content-range", "0-1"), body=b"first")


@script("refused_as_wrong")
def an_upload_that_waits_to_be_wanted(client: Script) -> None:
    client.ask("POST", START, ("expect", "100-continue"))


@script("refused_as_wrong")
def a_blob_as_text(client: Script) -> None:
    client.ask("PATCH", client.begin(), ("content-type", "text/plain"), body=b"bytes")


@script("manifest_refused refused_as_wrong")
def a_manifest_without_its_type(client: Script) -> None:
    image = client.seed.image()
    client.put_blobs(image)
    client.ask("PUT", "/v2/app/manifests/v1", body=image.body)


@script("manifest_refused refused_as_wrong")
def an_image_as_an_index(client: Script) -> None:
    image = client.seed.image()
    client.put_blobs(image)
    client.put_manifest(image, "v1", "application/vnd.oci.image.index.v1+json")


@script("cookie_sent")
def a_cookie_that_nobody_gave(client: Script) -> None:
    client.ask("GET", TAGS, ("cookie", "session=1"))


@script("coding_accepted")
def a_blob_in_any_coding(client: Script) -> None:
    client.ask("GET", f"/v2/app/blobs/{digest_of(b'a')}", ("accept-encoding", "gzip"))


@script("accept_lacks_types")
def a_manifest_of_any_type(client: Script) -> None:
    client.ask("GET", "/v2/app/manifests/v1", ("accept", "*/*"))


@script("range_malformed")
def a_range_without_its_unit(client: Script) -> None:
    client.ask("GET", f"/v2/app/blobs/{digest_of(b'a')}", ("range", "0-99"))


@script("refused_as_wrong")
def a_path_that_is_misspelt(client: Script) -> None:
    client.ask("GET", f"/v2/app/blob/{digest_of(b'a')}")


@script("refused_as_wrong")
def a_tag_written_as_a_digest(client: Script) -> None:
    client.ask("GET", "/v2/app/manifests/sha256:v1", TAKE)


@script("page_not_linked", page_size=2)
def a_next_page_that_is_guessed(client: Script) -> None:
    client.seed.image().load_into(client.app, "app", "v1", "v2", "v3")
    client.ask("GET", f"{TAGS}?n=2")
    client.ask("GET", f"{TAGS}?last=v2")


# Content.


@script("bytes_not_of_digest")
def bytes_under_another_digest(client: Script) -> None:
    client.end(client.begin(), digest_of(b"other"), b"bytes")


@script("content_differs")
def bytes_that_nobody_verifies(client: Script) -> None:
    """The registry is as careless as the client."""
    image = client.seed.image()
    client.put(image, "v1")
    layer = image.document["layers"][0]
    client.app.add_blob("app", bytes(layer["size"]), layer["digest"])


@script("manifest_names_absent")
def an_index_before_its_child(client: Script) -> None:
    image = client.seed.index([client.seed.image()])
    client.put_blobs(image)
    for digest, (media_type, body) in reversed(image.manifests.items()):
        kind = ("content-type", media_type)
        client.ask("PUT", f"/v2/app/manifests/{digest}", kind, body=body)


@script("content_missing", require_blobs=False)
def a_manifest_whose_blobs_are_taken_for_present(client: Script) -> None:
    client.put_manifest(client.seed.image(), "v1")


@script("manifest_invented")
def a_manifest_that_no_source_has(client: Script) -> None:
    client.seed.image().load_into(client.source, "app", "v1")
    client.put(client.seed.image(), "v1")


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
    [foreign] = image.absent
    client.ask("GET", f"/v2/app/blobs/{foreign}", at=SOURCE)


@script("deleted refused_as_wrong")
def a_tag_deleted(client: Script) -> None:
    client.seed.image().load_into(client.app, "app", "v1")
    client.ask("DELETE", "/v2/app/manifests/v1")


@script("source_written")
def an_upload_to_the_source(client: Script) -> None:
    client.ask("POST", START, at=SOURCE)


# Credentials.


class Storage(Site):
    """What a registry sends its clients to; it takes and gives whatever is asked."""

    def start(self, request: Request) -> Answer:
        return Response(200)


def elsewhere(client: Script, request: Callable[[Request], bool], status: int, path: str) -> None:
    """Have the registry send a client to a storage, for requests like these."""
    client.sites[ELSEWHERE] = Storage()

    def intercept(asked: Request) -> Answer | None:
        location = ("Location", f"{ELSEWHERE}{path}")
        return Response(status, [location]) if request(asked) else None

    client.app.intercept = intercept


@script("credential_on_redirect")
def a_login_that_follows_a_redirect(client: Script) -> None:
    elsewhere(client, lambda asked: asked.kind == "blob", 307, "/x/1")
    client.ask("GET", f"/v2/app/blobs/{digest_of(b'a')}")
    client.ask("GET", "/x/1", basic(), at=ELSEWHERE)


@script("credential_on_redirect")
def a_login_that_goes_to_a_foreign_location(client: Script) -> None:
    elsewhere(client, lambda asked: asked.method == "POST", 202, "/up?session=1")
    client.ask("POST", START)
    target = f"/up?session=1&digest={digest_of(b'bytes')}"
    client.ask("PUT", target, OCTETS, basic(), body=b"bytes", at=ELSEWHERE)


@script(
    "credential_to_realm",
    auth=TokenService(USERS, anonymous=False, realm="http://auth.elsewhere.test/token"),
)
def a_realm_that_belongs_to_somebody_else(client: Script) -> None:
    client.sites["http://auth.elsewhere.test"] = TokenService(USERS, anonymous=False)
    client.ask("GET", TAGS)
    client.ask("GET", "/token?service=registry.test", basic(), at="http://auth.elsewhere.test")


@script("credential_unasked")
def a_password_before_it_is_asked_for(client: Script) -> None:
    client.ask("GET", TAGS, basic())


@script("credential_unasked", auth=TokenService(USERS, anonymous=False))
def a_password_to_a_registry_that_takes_tokens(client: Script) -> None:
    client.ask("GET", TAGS)
    client.ask("GET", TAGS, basic())


PULL = "/token?service=registry.test&scope=repository:app:pull"


@script("token_of_another", auth=TokenService(USERS, anonymous=False))
def a_token_shown_to_another_registry(client: Script) -> None:
    client.sites[ELSEWHERE] = App(auth=TokenService(USERS, anonymous=False))
    client.ask("GET", TAGS)
    client.ask("GET", TAGS, at=ELSEWHERE)
    token = bearer(client.ask("GET", PULL, basic()))
    client.ask("GET", TAGS, token)
    client.ask("GET", TAGS, token, at=ELSEWHERE)


@script("secret_in_url", auth=TokenService(USERS, anonymous=False))
def a_password_in_a_query(client: Script) -> None:
    client.ask("GET", TAGS)
    client.ask("GET", f"{PULL}&password={SECRET}", basic())


def push_at_the_source(client: Script) -> None:
    """The source has a login of its own."""
    client.sites[SOURCE] = App(auth=TokenService(USERS, anonymous=False))
    client.ask("GET", TAGS, at=SOURCE)
    client.ask("GET", f"{PULL},push", basic(), at=SOURCE)


script("push_asked_of_source")(push_at_the_source)


@script("token_twice", auth=TokenService(USERS, anonymous=False))
def a_token_that_is_not_kept(client: Script) -> None:
    client.ask("GET", TAGS)
    for _ in range(2):
        client.ask("GET", PULL, basic())


@script("challenge_twice", auth=BasicAuth(USERS))
def a_challenge_that_is_forgotten(client: Script) -> None:
    for headers in ([], [basic()], []):
        client.ask("GET", TAGS, *headers)


@script("refused_login_again", auth=BasicAuth(USERS))
def a_refused_password_tried_again(client: Script) -> None:
    for headers in ([], [basic("wrong")], [basic("wrong")]):
        client.ask("GET", TAGS, *headers)


# Requests that were not needed.


@script("ping")
def a_ping(client: Script) -> None:
    client.ask("GET", "/v2/")


@script("listing_twice")
def a_listing_for_each_mapping(client: Script) -> None:
    client.seed.image().load_into(client.app, "app", "v1")
    for _ in range(2):
        client.ask("GET", TAGS)


@script("tag_asked_twice")
def a_tag_resolved_twice(client: Script) -> None:
    client.seed.image().load_into(client.app, "app", "v1")
    for _ in range(2):
        client.ask("GET", "/v2/app/manifests/v1", TAKE)


@script("manifest_fetched_twice")
def a_child_for_each_index(client: Script) -> None:
    image = client.seed.image().load_into(client.app, "app", "v1")
    for _ in range(2):
        client.ask("GET", f"/v2/app/manifests/{image.top}", TAKE)


@script("absent_tag_asked")
def a_tag_that_the_listing_has_not(client: Script) -> None:
    client.seed.image().load_into(client.app, "app", "v1")
    client.ask("GET", TAGS)
    client.ask("HEAD", "/v2/app/manifests/v2", TAKE)


@script("own_manifest_asked")
def a_tag_looked_up_behind_its_put(client: Script) -> None:
    client.put(client.seed.image(), "v1")
    client.ask("HEAD", "/v2/app/manifests/v1", TAKE)


@script("manifest_put_twice")
def a_manifest_put_twice_over(client: Script) -> None:
    image = client.seed.image()
    client.put(image, "v1")
    client.put_manifest(image, "v1")


@script("blob_pulled_twice")
def a_blob_for_each_target(client: Script) -> None:
    digest = client.app.add_blob("app", b"bytes")
    for _ in range(2):
        client.ask("GET", f"/v2/app/blobs/{digest}")


@script("trivial_blob_fetched")
def the_empty_config(client: Script) -> None:
    digest = client.app.add_blob("app", b"{}")
    client.ask("GET", f"/v2/app/blobs/{digest}")


@script("blob_uploaded_twice second_session")
def a_blob_brought_twice(client: Script) -> None:
    for _ in range(2):
        client.end(client.begin(), digest_of(b"bytes"), b"bytes")


@script("known_blob_asked")
def a_blob_looked_up_behind_its_upload(client: Script) -> None:
    client.end(client.begin(), digest_of(b"bytes"), b"bytes")
    client.ask("HEAD", f"/v2/app/blobs/{digest_of(b'bytes')}")


@script("blob_before_session")
def a_source_opened_before_the_target_has_agreed(client: Script) -> None:
    digest = client.source.add_blob("app", b"bytes")
    client.ask("GET", f"/v2/app/blobs/{digest}", at=SOURCE)
    client.end(client.begin(), digest, b"bytes")


@script("session_unused")
def a_session_for_nothing(client: Script) -> None:
    client.begin()


# Mounts.


@script("second_session", mounts=False)
def a_refused_mount_and_another_post(client: Script) -> None:
    image = client.seed.image()
    client.put(image, "v1")
    digest, body = next(iter(image.blobs.items()))
    client.ask("POST", f"/v2/two/blobs/uploads/?mount={digest}&from=app")
    where = client.where(client.ask("POST", "/v2/two/blobs/uploads/"))
    client.end(where, digest, body)


@script("mount_uncommitted")
def a_mount_from_anywhere(client: Script) -> None:
    client.ask("POST", f"{START}?mount={digest_of(b'a')}&from=some/where")


@script("mount_refused_again", mounts=False)
def a_refused_mount_forgotten(client: Script) -> None:
    image = client.seed.image()
    client.put(image, "v1")
    for digest in [*image.blobs][:2]:
        client.ask("POST", f"/v2/two/blobs/uploads/?mount={digest}&from=app")


@script("upload_without_mount")
def a_mount_not_thought_of(client: Script) -> None:
    image = client.seed.image()
    client.put(image, "v1")
    digest, body = next(iter(image.blobs.items()))
    where = client.where(client.ask("POST", "/v2/two/blobs/uploads/"))
    client.end(where, digest, body)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_judged_by_its_mistake(name: str) -> None:
    told = SCRIPTS[name]
    client = Script(**told.options)
    told.script(client)
    # Most scripts stop at the mistake: what they began stays open.
    excused = {"session_unused"} - told.mistakes
    findings = audit(client.sites, excused=excused, readonly=[SOURCE])
    assert {each.name for each in findings} == told.mistakes, report(findings)


def test_no_mistake_is_without_its_script() -> None:
    played = set().union(*(told.mistakes for told in SCRIPTS.values()))
    assert played == {*MISTAKES, "refused_as_wrong"}
