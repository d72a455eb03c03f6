"""The checks judged: green on the harness, red for each way in which a registry is broken.

A check that cannot fail proves nothing: `BREAKAGES` breaks the harness in one way each and says
which checks have to notice; together they make every single check fail. Most run in memory, without
a socket.
"""

from __future__ import annotations

import fnmatch
import json
import re
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
import trustme

from conformance import programs
from conformance.__main__ import main
from conformance.check import suite
from conformance.check.checks import WORKFLOWS, Check, Row
from conformance.check.suite import begin_run, choose_checks, run_checks
from conformance.client.http import Client, Connections, Reply, Send
from conformance.messages import Answer, Content, Request, Response, digest_of, error
from conformance.programs import HTPASSWD, PASSWORD, USER, docker_registry
from conformance.registry.app import App
from conformance.registry.storage import OCI_INDEX, Stored, Upload
from conformance.registry.tokens import BasicAuth, TokenService
from conformance.server.sockets import run_in_thread

ROOT = Path(__file__).resolve().parents[2]
URL = "http://registry.test/team/app"


def in_memory(app: App) -> Send:
    """Send to a registry without a socket."""

    def send(method: str, url: str, headers: Any, body: bytes | None) -> Reply:
        parts = urlsplit(url)
        given = [("Host", parts.netloc), *headers.items()]
        if body is not None:
            given.append(("Content-Length", str(len(body))))
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        answer = app.handle(Request(method, target, given, body or b""))
        assert isinstance(answer, Response)
        lines = {name.lower(): value for name, value in answer.headers}
        lines.setdefault("content-length", str(answer.size))
        return Reply(method, url, answer.status, lines, b"" if method == "HEAD" else answer.data)

    return send


def judge(app: App, names: Sequence[str] = ()) -> list[Row]:
    """Run these checks and those that they need, or all."""
    checks = choose_checks()
    if names:
        acts = {entry.act for name in names for entry in with_needs(name)}
        checks = [entry for entry in checks if entry.act in acts]
    return run_checks(begin_run(URL, in_memory(app), seed=1), checks)


def with_needs(name: str) -> Iterator[Check]:
    entry = BY_NAME[name]
    yield entry
    for act in entry.needs:
        yield from with_needs(BY_ACT[act].name)


def became(rows: Iterable[Row], *outcomes: str) -> set[str]:
    return {row.check.name for row in rows if row.outcome in outcomes}


NAMES = [entry.name for entry in choose_checks()]
BY_NAME = {entry.name: entry for entry in choose_checks()}
BY_ACT = {entry.act: entry for entry in choose_checks()}


@pytest.mark.parametrize(
    "text", ['299 - "your token will expire"', '299 - "say \\"no\\"", 299 - "deprecated, soon"']
)
def test_warnings_in_their_form_are_no_failure(text: str) -> None:
    assert became(judge(amended(warned(text))(), ["warnings: their form"]), "pass") == {
        "warnings: their form"
    }


def test_a_name_is_one_check() -> None:
    assert len(NAMES) == len(set(NAMES)) >= 200
    assert {entry.workflow for entry in choose_checks()} == set(WORKFLOWS)
    assert all(entry.cites for entry in choose_checks())
    assert all(need in BY_ACT for entry in choose_checks() for need in entry.needs)


def test_the_harness_passes_every_check() -> None:
    app = App()
    rows = judge(app)
    assert [suite.as_line(row) for row in rows if row.outcome != "pass"] == []
    assert len(rows) == len(NAMES)
    assert len(app.journal.entries) > len(rows)


# What the specification leaves open: passed in another way, or skipped with the reason; never
# failed.

REFERRERS = [
    "GET referrers*",
    "PUT manifest: OCI-Subject*",
    "DELETE manifest: it is listed as a referrer no more*",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "skipped"),
    [
        pytest.param({"locations": "relative"}, [], id="relative locations"),
        pytest.param({"page_size": 3}, [], id="pages of tags"),
        pytest.param({"referrers_page": 1}, [], id="pages of referrers"),
        pytest.param({"chunk_min_length": 1000}, [], id="long chunks"),
        pytest.param({"automatic_mounts": True}, [], id="mounts from anywhere"),
        pytest.param({"require_blobs": False}, [], id="manifests before blobs"),
        pytest.param(
            {"mounts": False}, ["POST upload mount: a blob of another repository*"], id="no mounts"
        ),
        pytest.param(
            {"single_post": False}, ["POST upload digest: bytes of another*"], id="no single post"
        ),
        pytest.param({"sha512": False}, ["*(sha512 blob)"], id="no sha512"),
        pytest.param({"referrers_api": False}, REFERRERS, id="no referrers API"),
        pytest.param({"referrers_filter": False}, ["GET referrers artifactType*"], id="no filter"),
        pytest.param({"tag_deletes": False}, ["DELETE tag*"], id="no deletion of tags"),
        pytest.param({"deletes": False}, ["DELETE *"], id="no deletion"),
    ],
)
def test_what_is_optional_is_skipped_never_failed(
    options: dict[str, Any], skipped: list[str]
) -> None:
    rows = judge(App(**options))
    assert [suite.as_line(row) for row in rows if row.outcome == "fail"] == []
    wanted = {name for name in NAMES for pattern in skipped if fnmatch.fnmatchcase(name, pattern)}
    assert became(rows, "skip") == wanted
    assert all(row.reason for row in rows if row.outcome == "skip")


# Breakages.


class Breakage(NamedTuple):
    """One way to be wrong, and patterns of the checks that have to notice."""

    what: str
    make: Callable[[], App]
    noticed: tuple[str, ...]


Change = Callable[[Request, Response], Response]


def registry(what: str, make: Callable[[], App], *noticed: str) -> Breakage:
    return Breakage(what, make, noticed)


def answers(what: str, requests: str, change: Change, *noticed: str, **options: Any) -> Breakage:
    """Break the answers to some requests: patterns of method and kind."""
    return Breakage(what, amended(change, *requests.split(), **options), noticed)


def amended(
    change: Change, method: str = "*", kind: str = "*", **options: Any
) -> Callable[[], App]:
    """Make a harness whose answers to some requests are changed."""

    def amend(request: Request, answer: Answer) -> Answer:
        if not fnmatch.fnmatchcase(request.method, method) or not fnmatch.fnmatchcase(
            request.kind, kind
        ):
            return answer
        assert isinstance(answer, Response)
        return change(request, answer)

    def make() -> App:
        app = App(**options)
        app.amend = amend
        return app

    return make


def turned(old: int, new: int) -> Change:
    """Give answers of one status another one."""

    def change(request: Request, answer: Response) -> Response:
        return Response(new, answer.headers, answer.body) if answer.status == old else answer

    return change


def without(name: str) -> Change:
    def change(request: Request, answer: Response) -> Response:
        kept = [(key, value) for key, value in answer.headers if key.lower() != name.lower()]
        return Response(answer.status, kept, answer.body)

    return change


def saying(
    name: str, value: Callable[[str], str], statuses: Sequence[int] = (200, 201, 202, 204)
) -> Change:
    """Change or add a header."""

    def change(request: Request, answer: Response) -> Response:
        if answer.status not in statuses:
            return answer
        return Response(
            answer.status,
            [*without(name)(request, answer).headers, (name, value(answer.header(name)))],
            answer.body,
        )

    return change


def listing(change: Callable[[Any], Any]) -> Change:
    """Change the document of a list."""

    def amend(request: Request, answer: Response) -> Response:
        if answer.status != 200:
            return answer
        return Response(200, answer.headers, json.dumps(change(answer.json())).encode())

    return amend


def entries(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    """Change each descriptor of a list of referrers."""
    return listing(
        lambda document: {**document, "manifests": [change(e) for e in document["manifests"]]}
    )


def tags(change: Callable[[list[str]], list[str]]) -> Change:
    return listing(lambda document: {**document, "tags": change(document["tags"])})


def lacking(key: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda entry: {name: value for name, value in entry.items() if name != key}


def ignoring(*parameters: str) -> Callable[[], App]:
    """Make a harness that does not see some query parameters."""

    class Ignoring(App):
        def start(self, request: Request) -> Any:
            request.query = [(key, value) for key, value in request.query if key not in parameters]
            return super().start(request)

    return Ignoring


class AnyOrder(App):
    """Takes chunks as they come, as distribution 2.8.2 does."""

    def _find_session(self, request: Request) -> Upload | Response:
        return self._repository(request.repository).uploads.get(
            request.reference
        ) or super()._find_session(request)

    def _refuse_chunk(self, request: Request, upload: Upload) -> Response | None:
        return None


class KeepsSessions(App):
    """Forgets no upload session when it is closed."""

    def _commit(self, request: Request, upload: Upload, digest: str) -> Response:
        self.repositories[request.repository].uploads[upload.identity] = upload
        return super()._commit(request, upload, digest)


class NewestLocationOnly(App):
    """Answers where an upload stands to its newest Location only."""

    def _get_upload(self, request: Request) -> Response:
        upload = self._find_session(request)
        if isinstance(upload, Response) or request.parameter("_state") == str(upload.sequence):
            return super()._get_upload(request)
        return error(404, "BLOB_UPLOAD_INVALID", "an old state")


class Unverified(App):
    """Stores blobs under whatever digest is given."""

    def _commit(self, request: Request, upload: Upload, digest: str) -> Response:
        self.repositories[request.repository].blobs[digest] = upload.content
        return self._answer_created(request, digest)


class Lying(App):
    """Refuses bytes of another digest, but keeps them."""

    def _commit(self, request: Request, upload: Upload, digest: str) -> Response:
        self.repositories[request.repository].blobs[digest] = upload.content
        return super()._commit(request, upload, digest)


class OneStore(App):
    """Has one store of blobs for all repositories and no borders between them."""

    def _get_blob(self, request: Request) -> Response:
        for held in self.repositories.values():
            if request.reference in held.blobs:
                request.repository = next(n for n, h in self.repositories.items() if h is held)
        return super()._get_blob(request)

    _head_blob = _get_blob


class MountsNothing(App):
    """Says 201 to every mount and has nothing afterwards."""

    def _find_to_mount(self, digest: str, source: str | None) -> Content | None:
        return Content(b"not the blob")


class Rewriting(App):
    """Stores manifests in another spelling, which has the same meaning."""

    def _put_manifest_body(self, request: Request, media_type: str, body: bytes) -> Response:
        answer = super()._put_manifest_body(request, media_type, body)
        if answer.status == 201:
            held = self.repositories[request.repository].manifests
            digest = answer.header("Docker-Content-Digest")
            body = json.dumps(json.loads(held[digest].body), indent=1).encode()
            held[digest] = held[digest].__class__(**{**vars(held[digest]), "body": body})
        return answer


class StuckTags(App):
    """Never moves a tag."""

    def _put_manifest_body(self, request: Request, media_type: str, body: bytes) -> Response:
        before = self.tags(request.repository).get(request.reference)
        answer = super()._put_manifest_body(request, media_type, body)
        if before is not None:
            self.repositories[request.repository].tags[request.reference] = before
        return answer


class Trusting(App):
    """Looks at no manifest: neither at its form nor at its digest."""

    def _put_manifest_body(self, request: Request, media_type: str, body: bytes) -> Response:
        named = request.reference if ":" in request.reference else digest_of(body)
        self.add_manifest(
            request.repository,
            body,
            media_type,
            *([] if ":" in request.reference else [request.reference]),
            digest=named,
        )
        return Response(201, [("Location", f"/v2/{request.repository}/manifests/{named}")])


class StrictSubjects(App):
    """Wants a subject to be there."""

    def _refuse_missing(self, held: Any, stored: Stored) -> Response | None:  # type: ignore[override]
        if stored.subject is not None and stored.subject not in held.manifests:
            return error(400, "MANIFEST_BLOB_UNKNOWN", "subject unknown")
        return App._refuse_missing(held, stored)


class Picky(App):
    """Refuses a manifest for something that the specification allows."""

    def __init__(
        self, refuses: Callable[[Request, Any], bool], code: str = "MANIFEST_INVALID"
    ) -> None:
        super().__init__()
        self._refuses = refuses
        self._code = code

    def _put_manifest_body(self, request: Request, media_type: str, body: bytes) -> Response:
        if self._refuses(request, json.loads(body)):
            return error(409, self._code, "not that one")
        return super()._put_manifest_body(request, media_type, body)


class LateReferrers(App):
    """Lists no referrer whose subject is not there."""

    def _get_referrers(self, request: Request) -> Response:
        if self.manifest(request.repository, request.reference) is None:
            return self._answer_list({"schemaVersion": 2, "manifests": []}, [], OCI_INDEX)
        return super()._get_referrers(request)


class FallbackListed(App):
    """Lists what is under the fallback tag of a subject as if it referred to it."""

    def _get_referrers(self, request: Request) -> Response:
        answer = super()._get_referrers(request)
        kept = self.manifest(request.repository, request.reference.replace(":", "-"))
        if kept is None:
            return answer
        document = answer.json()
        return self._answer_list(
            {**document, "manifests": [*document["manifests"], kept.descriptor()]}, [], OCI_INDEX
        )


class TagsStay(App):
    """Takes a manifest under a tag that is there, and leaves the tag as it was."""

    def _put_manifest_body(self, request: Request, *rest: Any) -> Response:
        before = self.tags(request.repository)
        answer = super()._put_manifest_body(request, *rest)
        self.repositories[request.repository].tags.update(before)
        return answer


class Deleting(App):
    """Deletes something else, more or less than what is asked for."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self._how = how
        self._deleted: set[str] = set()

    def _delete_manifest(self, request: Request) -> Response:
        held = self._repository(request.repository)
        kept = dict(held.manifests)
        tagged = dict(held.tags)
        found = held.find(request.reference)
        answer = super()._delete_manifest(request)
        if answer.status != 202 or found is None:
            return answer
        by_tag = ":" not in request.reference
        if self._how == "nothing":
            held.manifests.update(kept)
            held.tags.update(tagged)
        elif self._how == "tag with manifest" and by_tag:
            del held.manifests[found.digest]
        elif self._how == "manifest without tags" and not by_tag:
            held.tags.update(tagged)
        elif self._how == "children too":
            for child in found.children:
                held.manifests.pop(child["digest"], None)
        elif self._how == "other tags too" and by_tag:
            for tag in [tag for tag, digest in held.tags.items() if digest == found.digest]:
                del held.tags[tag]
        elif self._how == "referrers stay" and found.subject:
            self._deleted.add(found.digest)
            held.manifests.update(kept)
        elif self._how == "for ever":
            self._deleted.add(found.digest)
        return answer

    def _delete_blob(self, request: Request) -> Response:
        blobs = self._repository(request.repository).blobs
        kept = blobs.get(request.reference)
        answer = super()._delete_blob(request)
        if answer.status == 202 and kept is not None:
            if self._how == "nothing":
                blobs[request.reference] = kept
            elif self._how == "for ever":
                self._deleted.add(request.reference)
        return answer

    def _get_manifest(self, request: Request) -> Response:
        found = self._repository(request.repository).find(request.reference)
        if found is not None and found.digest in self._deleted:
            return error(404, "MANIFEST_UNKNOWN", "deleted")
        return super()._get_manifest(request)

    def _get_blob(self, request: Request) -> Response:
        return (
            self._refuse_unknown_blob(request)
            if request.reference in self._deleted
            else super()._get_blob(request)
        )

    _head_manifest = _get_manifest
    _head_blob = _get_blob


def flipped(request: Request, answer: Response) -> Response:
    """Change the last byte of a body."""
    if answer.status not in (200, 206) or not answer.data:
        return answer
    return Response(answer.status, answer.headers, answer.data[:-1] + bytes([answer.data[-1] ^ 1]))


def longer(request: Request, answer: Response) -> Response:
    """Give an empty body a byte."""
    return (
        Response(200, answer.headers, b"\0") if answer.status == 200 and not answer.data else answer
    )


def other_range(request: Request, answer: Response) -> Response:
    """Serve a range as if it began one byte later."""
    return (
        Response(answer.status, answer.headers, answer.data[1:] + b"\0")
        if answer.status == 206
        else answer
    )


def unknown_code(request: Request, answer: Response) -> Response:
    if answer.status < 400:
        return answer
    return Response(
        answer.status, answer.headers, answer.data.replace(b'_UNKNOWN"', b'_UNHEARD_OF"')
    )


def no_errors(request: Request, answer: Response) -> Response:
    return (
        answer
        if answer.status < 400
        else Response(answer.status, answer.headers, b'{"error": "no"}')
    )


def swapped(request: Request, answer: Response) -> Response:
    """Use the code of a manifest for a blob and the other way round."""
    code = b"BLOB_UNKNOWN" if request.kind == "manifest" else b"MANIFEST_UNKNOWN"
    if answer.status != 404:
        return answer
    return Response(404, answer.headers, json.dumps({"errors": [{"code": code.decode()}]}).encode())


def warned(text: str) -> Change:
    return saying("Warning", lambda value: text)


ZERO = "sha256:" + "0" * 64


def wrong_digest(value: str) -> str:
    return ZERO


BREAKAGES = [
    answers("no registry at the root", "GET ping", turned(200, 404), "GET /v2/: *"),
    # Pull.
    answers("blobs with a wrong byte", "GET blob", flipped, "GET blob: its bytes (blob)"),
    answers("an empty blob with a byte", "GET blob", longer, "GET blob: its bytes (empty blob)"),
    answers("blobs answered with 203", "GET blob", turned(200, 203), "GET blob: its bytes (*)"),
    answers("HEAD of blobs is 204", "HEAD blob", turned(200, 204), "HEAD blob: is there (*)"),
    answers(
        "blobs with another digest in the header",
        "* blob",
        saying("Docker-Content-Digest", wrong_digest),
        "GET blob: its digest in a header (*)",
        "HEAD blob: its digest in a header (blob)",
    ),
    answers(
        "HEAD of blobs with another size",
        "HEAD blob",
        saying("Content-Length", lambda value: "7"),
        "HEAD blob: its size (*)",
    ),
    answers(
        "ranges of other bytes",
        "GET blob",
        other_range,
        "GET blob Range: bytes=0-9 *",
        "GET blob Range: bytes=10-19 *",
        "GET blob Range: bytes=990- *",
    ),
    answers(
        "ranges with another Content-Range",
        "GET blob",
        saying("Content-Range", lambda value: "bytes 0-0/1", (206,)),
        "GET blob Range: bytes=-5 *",
        "GET blob Range: bytes=900-5000 *",
    ),
    answers(
        "204 beyond the end of a blob",
        "GET blob",
        turned(416, 204),
        "GET blob Range: bytes=1000- is beyond the end *",
    ),
    answers(
        "410 for what is not there",
        "* *",
        turned(404, 410),
        "GET blob: 404 *",
        "HEAD blob: 404 *",
        "GET manifest: by *, 404 *",
        "HEAD manifest: by *, 404 *",
        "GET *: 404 where the repository is not *",
    ),
    registry(
        "no borders between repositories",
        OneStore,
        "GET blob: 404 in a repository that has it not *",
    ),
    answers(
        "410 for digests that are none",
        "GET *",
        turned(400, 410),
        "GET blob: 400 or 404 *",
        "GET manifest: by a malformed digest*",
        "GET referrers: 400 (malformed)",
    ),
    registry(
        "manifests in another spelling",
        Rewriting,
        "GET manifest: by tag, its bytes (*image)",
        "GET manifest: by digest, its bytes (*image)",
    ),
    answers(
        "manifests with a wrong byte",
        "GET manifest",
        flipped,
        "GET manifest: by * its bytes (*)",
        "GET manifest: with only its own type accepted (*)",
        "PUT manifest: by * its Location gives it (*)",
        "PUT manifest: one layer three times *",
        "PUT manifest: many tags *",
        "PUT manifest: of 4 MiB *",
        "PUT manifest: annotations *",
        "PUT manifest: no layers *",
        "PUT manifest: no mediaType *",
        "PUT manifest: an empty index *",
    ),
    answers(
        "HEAD of manifests is 405",
        "HEAD manifest",
        turned(200, 405),
        "HEAD manifest: by * is there (*)",
        "HEAD manifest: its size (*)",
    ),
    answers(
        "manifests with another digest in the header",
        "* manifest",
        saying("Docker-Content-Digest", wrong_digest),
        "GET manifest: by * its digest in a header (*)",
        "HEAD manifest: by * its digest in a header (*)",
        "PUT manifest: its digest in a header (*)",
    ),
    answers(
        "manifests are all application/json",
        "GET manifest",
        saying("Content-Type", lambda value: "application/json"),
        "GET manifest: Content-Type as it was pushed (*)",
        "PUT manifest: Content-Type with a parameter *",
    ),
    answers(
        "codes that the specification has not",
        "* *",
        unknown_code,
        "errors: their form",
        "GET blob: 404 (absent)",
        "GET manifest: by *, 404 *",
    ),
    answers("error bodies in another form", "* *", no_errors, "errors: their form"),
    answers(
        "codes of one thing for the other",
        "* [bm]*",
        swapped,
        "GET blob: 404 (absent)",
        "GET manifest: by tag, 404 *",
        "DELETE manifest: 404 (absent)",
        "DELETE blob: 404 *",
    ),
    answers(
        "warnings with a date",
        "* *",
        warned('299 - "old" "Sat, 25 Aug 2012 23:34:45 GMT"'),
        "warnings: *",
    ),
    answers("warnings without end", "* *", warned(f'''299 - "{"x" * 4096}"'''), "warnings: *"),
    # Push: blobs.
    answers(
        "sessions without Location",
        "POST upload_start",
        without("Location"),
        "POST upload: a session *",
        "POST upload digest: 201*",
        "POST upload mount: 202 *",
    ),
    answers(
        "one session for all",
        "POST upload_start",
        saying("Location", lambda value: "/v2/team/app/blobs/uploads/x?_state=1"),
        "POST upload: each its own session *",
    ),
    answers(
        "blobs without Location",
        "PUT upload",
        without("Location"),
        "PUT upload: a whole blob (*)",
        "PATCH upload: chunks in order *",
    ),
    answers(
        "blobs whose Location gives nothing",
        "PUT upload",
        saying("Location", lambda value: f"{value}0", (201,)),
        "PUT upload: a whole blob (*)",
    ),
    answers(
        "blobs stored with 200",
        "PUT upload",
        turned(201, 200),
        "PUT upload: a whole blob (*)",
        "PUT upload: with the last chunk *",
        "PUT upload: a blob that is there already *",
        "PATCH upload: a stream *",
        "GET upload: where it stands*",
        "GET upload: after a 416*",
        "GET upload: by an old Location*",
    ),
    registry(
        "bytes that nobody verifies",
        Unverified,
        "PUT upload: bytes of another digest, 400 *",
        "POST upload digest: bytes of another digest, 400 *",
    ),
    registry(
        "bytes that are refused and kept",
        Lying,
        "PUT upload: bytes of another digest, 400 *",
        "POST upload digest: bytes of another digest, 400 *",
    ),
    answers(
        "wrong digests are 409",
        "P* *",
        turned(400, 409),
        "PUT upload: without digest, 400 *",
        "PUT upload: a digest that is none, 400 *",
        "PUT upload: bytes of another digest, 400 *",
        "PUT manifest: bytes of another digest *",
        "PUT manifest: what is no JSON (*)",
    ),
    registry(
        "sessions that never end",
        KeepsSessions,
        "PUT upload: to no session, 404 *",
        "GET upload: of a closed *",
        "PATCH upload: to a closed *",
    ),
    answers(
        "a single POST with another Location",
        "POST upload_start",
        saying("Location", lambda value: f"{value}0", (201,)),
        "POST upload digest: 201 and it is there, or 202 (*)",
        "POST upload mount: a blob of another *",
    ),
    registry(
        "chunks in any order",
        AnyOrder,
        "PATCH upload: the second chunk first, 416 *",
        "PATCH upload: a chunk left out, 416 *",
        "PATCH upload: a chunk twice, 416 *",
        "PUT upload: a last chunk out of order, 416 *",
        "GET upload: after a 416 it goes on *",
    ),
    answers(
        "chunks without Range",
        "PATCH upload",
        without("Range"),
        "PATCH upload: chunks in order *",
        "GET upload: where it stands*",
    ),
    answers(
        "chunks with a Range that counts bytes",
        "[GP][EA]T* upload",
        saying("Range", lambda value: f"0-{int(value.partition('-')[2]) + 1}"),
        "PATCH upload: chunks in order *",
        "GET upload: by an old Location *",
    ),
    answers(
        "status of uploads without Location",
        "GET upload",
        without("Location"),
        "GET upload: where it stands*",
        "GET upload: by an old*",
        "GET upload: after a 416*",
    ),
    registry(
        "status by the newest Location only", NewestLocationOnly, "GET upload: by an old Location *"
    ),
    registry("mounts that give other bytes", MountsNothing, "POST upload mount: *"),
    answers(
        "404 for what cannot be mounted",
        "POST upload_start",
        lambda request, answer: (
            error(404, "BLOB_UNKNOWN", "no")
            if request.parameter("mount") and answer.status == 202
            else answer
        ),
        "POST upload mount: 202 where *",
        "POST upload mount: 202 without *",
        "POST upload mount: without *",
    ),
    # Push: manifests.
    registry("tags that never move", StuckTags, "PUT manifest: a tag moves *"),
    registry(
        "manifests that nobody reads",
        Trusting,
        "PUT manifest: bytes of another digest *",
        "PUT manifest: what is no JSON (*)",
    ),
    registry(
        "subjects that have to be there",
        StrictSubjects,
        "PUT manifest: a subject that is not there (*)",
    ),
    registry(
        "manifests that need layers",
        lambda: Picky(lambda request, document: not document.get("layers", True)),
        "PUT manifest: no layers *",
    ),
    registry(
        "manifests that need a mediaType",
        lambda: Picky(
            lambda request, document: "mediaType" not in document and "config" in document
        ),
        "PUT manifest: no mediaType *",
    ),
    registry(
        "indexes that need an entry",
        lambda: Picky(
            lambda request, document: document.get("manifests") == [] and "subject" not in document
        ),
        "PUT manifest: an empty index *",
    ),
    registry(
        "layers that may not be repeated",
        lambda: Picky(lambda request, document: len(document.get("layers", [])) == 3),
        "PUT manifest: one layer three times *",
    ),
    registry(
        "parameters of Content-Type that are refused",
        lambda: Picky(lambda request, document: ";" in request.header("content-type")),
        "PUT manifest: Content-Type with a parameter *",
    ),
    answers(
        "absent parts refused without their code",
        "PUT manifest",
        lambda request, answer: Response(
            answer.status,
            answer.headers,
            answer.data.replace(b"MANIFEST_BLOB_UNKNOWN", b"MANIFEST_INVALID"),
        ),
        "PUT manifest: naming what is not there (*)",
    ),
    answers(
        "500 for a large manifest",
        "PUT manifest",
        turned(413, 500),
        "PUT manifest: above the limit, 413 *",
    ),
    # Discovery.
    answers(
        "a tag that is not listed",
        "GET tag_list",
        tags(lambda listed: [tag for tag in listed if not tag.endswith("-B")]),
        "GET tags/list: every tag once *",
    ),
    answers(
        "tags listed twice",
        "GET tag_list",
        tags(lambda listed: sorted(listed * 2)),
        "GET tags/list: every tag once *",
    ),
    answers(
        "tags backwards",
        "GET tag_list",
        tags(lambda listed: listed[::-1]),
        "GET tags/list: in lexical order *",
    ),
    answers(
        "the list of another repository",
        "GET tag_list",
        listing(lambda document: {**document, "name": "x"}),
        "GET tags/list: every tag once *",
        "DELETE tag: the list has it no more *",
    ),
    answers(
        "an empty list where there is no repository",
        "GET tag_list",
        lambda request, answer: (
            answer if answer.status != 404 else Response(200, [], b'{"name": "x", "tags": []}')
        ),
        "GET tags/list: 404 where the repository is not *",
    ),
    registry(
        "n is not seen",
        ignoring("n"),
        "GET tags/list n: n=0 *",
        "GET tags/list n: half *",
        "GET tags/list last: what follows it, n *",
    ),
    registry(
        "last is not seen",
        ignoring("last"),
        "GET tags/list last: what follows it *",
        "GET tags/list last: nothing follows *",
        "GET tags/list n: pages by Link *",
    ),
    answers(
        "last is included",
        "GET tag_list",
        lambda request, answer: (
            tags(lambda listed: [request.parameter("last") or "", *listed])(request, answer)
            if request.parameter("last")
            else answer
        ),
        "GET tags/list last: nothing follows *",
        "GET tags/list last: what follows it *",
    ),
    answers(
        "n=0 with a Link",
        "GET tag_list",
        lambda request, answer: (
            saying("Link", lambda value: '</v2/team/app/tags/list?last=a>; rel="next"')(
                request, answer
            )
            if request.parameter("n") == "0"
            else answer
        ),
        "GET tags/list n: n=0 *",
    ),
    answers(
        "empty pages with a Link",
        "GET tag_list",
        lambda request, answer: (
            saying("Link", lambda value: '</v2/team/app/tags/list>; rel="next"')(
                request, tags(lambda listed: [])(request, answer)
            )
            if request.query
            else answer
        ),
        "GET tags/list n: half *",
        "GET tags/list last: what follows it *",
    ),
    answers(
        "an empty list of tags",
        "GET tag_list",
        tags(lambda listed: []),
        "GET tags/list: every tag once *",
        "GET tags/list: in lexical order *",
        "GET tags/list last: *",
    ),
    answers(
        "referrers without a digest",
        "GET referrers",
        entries(lacking("digest")),
        "GET referrers: before the subject is there *",
        "DELETE manifest: it is listed as a referrer no more *",
    ),
    answers(
        "more tags than there are are refused",
        "GET tag_list",
        lambda request, answer: (
            error(400, "UNSUPPORTED", "too many")
            if int(request.parameter("n") or 0) > 15
            else answer
        ),
        "GET tags/list n: more than there are *",
    ),
    answers(
        "referrers that are all of one type",
        "GET referrers",
        entries(lambda entry: {**entry, "artifactType": "application/x"}),
        "GET referrers: artifactType (*)",
    ),
    answers(
        "referrers without artifactType",
        "GET referrers",
        entries(lacking("artifactType")),
        "GET referrers: artifactType (artifact)",
        "GET referrers: artifactType (config type)",
    ),
    answers(
        "referrers without annotations",
        "GET referrers",
        entries(lacking("annotations")),
        "GET referrers: annotations (artifact)",
        "GET referrers: annotations (index)",
    ),
    answers(
        "referrers with annotations that they have not",
        "GET referrers",
        entries(lambda entry: {**entry, "annotations": {"x": "y"}}),
        "GET referrers: annotations (*)",
    ),
    answers(
        "referrers of another size",
        "GET referrers",
        entries(lambda entry: {**entry, "size": 1}),
        "GET referrers: digest, size and mediaType (*)",
    ),
    answers(
        "a referrer that is left out",
        "GET referrers",
        listing(lambda d: {**d, "manifests": d["manifests"][1:]}),
        "GET referrers: each once, *",
        "GET referrers: before *",
        "GET referrers: of a referrer *",
    ),
    registry(
        "referrers of what is there only",
        LateReferrers,
        "GET referrers: before the subject is there *",
    ),
    answers(
        "referrers as application/json",
        "GET referrers",
        saying("Content-Type", lambda value: "application/json"),
        "GET referrers: an empty list (absent)",
    ),
    answers(
        "something that nobody put refers to everything",
        "GET referrers",
        listing(lambda d: {**d, "manifests": [*d["manifests"], {"digest": ZERO}]}),
        "GET referrers: an empty list (absent)",
    ),
    registry(
        "a list kept under a tag as a referrer",
        FallbackListed,
        "GET referrers: a list that was kept *",
    ),
    answers(
        "a filter that is said and not applied",
        "GET referrers",
        saying("OCI-Filters-Applied", lambda value: "artifactType"),
        "GET referrers artifactType: *",
        referrers_filter=False,
    ),
    answers(
        "a filter that is applied and not said",
        "GET referrers",
        without("OCI-Filters-Applied"),
        "GET referrers artifactType: what has that type, and the header (*)",
    ),
    answers(
        "OCI-Subject of another digest",
        "PUT manifest",
        saying("OCI-Subject", wrong_digest),
        "PUT manifest: OCI-Subject says that the subject was seen (*)",
    ),
    answers(
        "no OCI-Subject",
        "PUT manifest",
        without("OCI-Subject"),
        "PUT manifest: OCI-Subject says that the subject was seen (*)",
    ),
    answers(
        "OCI-Subject without the API",
        "GET referrers",
        turned(200, 404),
        "PUT manifest: no OCI-Subject where nothing is listed *",
    ),
    registry(
        "tags that stay where they are",
        TagsStay,
        "PUT manifest: a list under the fallback tag is taken, and taken again *",
    ),
    # Management.
    registry(
        "deletions that do nothing",
        lambda: Deleting("nothing"),
        "DELETE tag: it is gone*",
        "DELETE manifest: it is gone*",
        "DELETE blob: it is gone *",
    ),
    registry(
        "a tag takes its manifest with it",
        lambda: Deleting("tag with manifest"),
        "DELETE tag: it is gone*",
    ),
    registry(
        "a tag takes other tags with it",
        lambda: Deleting("other tags too"),
        "DELETE tag: it is gone*",
    ),
    registry(
        "tags of nothing stay",
        lambda: Deleting("manifest without tags"),
        "DELETE manifest: the list of tags has its tags no more *",
    ),
    registry(
        "an index takes its children with it",
        lambda: Deleting("children too"),
        "DELETE manifest: its children stay *",
    ),
    registry(
        "referrers that were deleted are listed",
        lambda: Deleting("referrers stay"),
        "DELETE manifest: it is listed as a referrer no more *",
    ),
    registry(
        "what was deleted stays so",
        lambda: Deleting("for ever"),
        "DELETE manifest: it can be pushed again *",
        "DELETE blob: it can be pushed again *",
    ),
    answers(
        "202 for the deletion of nothing",
        "DELETE *",
        turned(404, 202),
        "DELETE tag: 404 *",
        "DELETE manifest: 404 *",
        "DELETE manifest: 404 where the repository is not *",
        "DELETE blob: 404 *",
    ),
]


def noticing(entry: Breakage) -> set[str]:
    """Return the names of the checks that have to notice."""
    found = {pattern: fnmatch.filter(NAMES, pattern) for pattern in entry.noticed}
    assert all(found.values()), (
        f"no check is called {[key for key, names in found.items() if not names]}"
    )
    return {name for names in found.values() for name in names}


@pytest.mark.parametrize("entry", [pytest.param(entry, id=entry.what) for entry in BREAKAGES])
def test_every_breakage_is_noticed(entry: Breakage) -> None:
    wanted = noticing(entry)
    rows = judge(entry.make(), sorted(wanted))
    assert sorted(wanted - became(rows, "fail")) == [], (
        "passed or skipped although the registry is broken"
    )


def test_every_check_can_fail() -> None:
    assert len(BREAKAGES) >= 40
    assert sorted(set(NAMES).difference(*map(noticing, BREAKAGES))) == []


# The command.


@pytest.fixture
def address() -> Iterator[str]:
    with run_in_thread(App()) as server:
        yield server.address


def verdict(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the command in this process: exit status, standard output, standard error."""
    status = main(["check", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.slow
def test_the_command_is_green_on_the_harness(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = verdict(capsys, f"http://{address}/team/app")
    assert (status, err) == (0, "")
    rows, *tables, closing = out.strip().split("\n\n")
    assert closing == f"{len(NAMES)} checks: {len(NAMES)} passed, 0 failed, 0 skipped"
    assert [line.split(None, 2)[2] for line in rows.splitlines()] == NAMES
    assert [table.split()[0] for table in tables] == list(WORKFLOWS)
    blobs = next(line for line in tables[0].splitlines() if line.startswith("GET blob "))
    assert set(blobs.removeprefix("GET blob").split()) == {"-", "pass"}


@pytest.mark.slow
def test_the_command_deletes_what_it_pushed_unless_told_otherwise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    app = App()
    with run_in_thread(app) as server:
        url = f"http://{server.address}/team/app"
        assert verdict(capsys, url, "--workflow", "pull", "--keep")[0] == 0
        kept = app.repositories["team/app"]
        assert len(kept.manifests) > 10
        assert len(kept.tags) == 6
        app.repositories.clear()
        assert verdict(capsys, url, "--workflow", "pull")[0] == 0
        left = app.repositories["team/app"]
        assert (left.manifests, left.tags) == ({}, {})
        assert {bytes(blob) for blob in left.blobs.values()} == {b"", b"{}"}, (
            "which other images may use"
        )
        assert verdict(capsys, url, "--workflow", "push")[0] == 0
        assert not left.manifests
        assert not app.repositories["team/app-mount"].blobs


@pytest.mark.slow
def test_a_failure_is_a_line_with_what_is_cited(capsys: pytest.CaptureFixture[str]) -> None:
    app = amended(turned(204, 200), "GET", "upload")()
    with run_in_thread(app) as server:
        status, out, _ = verdict(capsys, f"http://{server.address}/team/app", "--workflow", "push")
    assert status == 1
    failed = [line for line in out.splitlines() if line.startswith("fail")]
    assert len(failed) == 3
    assert all("answered 200, not 204 -- spec: Pushing a blob in chunks" in line for line in failed)
    assert "fail 3/3" in next(line for line in out.splitlines() if line.startswith("GET upload  "))
    assert "3 failed, 0 skipped" in out.splitlines()[-1]


def test_workflows_are_chosen_and_written_for_programs(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://{address}/team/app"
    status, out, _ = verdict(
        capsys, url, "--json", "--workflow", "discovery", "--workflow", "management"
    )
    document = json.loads(out)
    assert status == 0
    assert document["url"] == url
    assert {row["workflow"] for row in document["checks"]} == {"discovery", "management"}
    assert document["count"] == {"pass": len(document["checks"]), "fail": 0, "skip": 0}
    assert {"name", "workflow", "api", "data", "cites", "outcome", "reason"} == set(
        document["checks"][0]
    )


AUTHS: dict[str, Callable[[], Any]] = {
    "basic": lambda: BasicAuth({USER: PASSWORD}),
    "bearer": lambda: TokenService({USER: PASSWORD}, anonymous=False),
    "narrow tokens": lambda: TokenService({USER: PASSWORD}, anonymous=False, exact_scope=True),
    "two challenges": lambda: TokenService({USER: PASSWORD}, anonymous=False, form="two_lines"),
}


@pytest.mark.slow
@pytest.mark.parametrize("auth", AUTHS)
def test_credentials_are_given_where_they_are_asked_for(
    auth: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_in_thread(App(auth=AUTHS[auth]())) as server:
        url = f"http://{server.address}/team/app"
        status, out, err = verdict(capsys, url)
        assert (status, out) == (2, "")
        assert "answered 401: it wants credentials (--user)" in err
        status, _, err = verdict(capsys, url, "--user", f"{USER}:wrong")
        assert status == 2
        assert "are these the credentials?" in err
        status, out, _ = verdict(capsys, url, "--user", f"{USER}:{PASSWORD}")
        assert (status, out.splitlines()[-1]) == (
            0,
            f"{len(NAMES)} checks: {len(NAMES)} passed, 0 failed, 0 skipped",
        )


@pytest.mark.slow
def test_certificates_are_verified(
    ca: trustme.CA, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    with run_in_thread(App(), ssl_context=context) as server:
        url = f"https://{server.address}/team/app"
        status, _, err = verdict(capsys, url, "--workflow", "pull")
        assert status == 2
        assert "certificate verify failed" in err.lower()
        assert verdict(capsys, url, "--workflow", "pull", "--ca", str(tmp_path / "ca.pem"))[0] == 0


@pytest.mark.parametrize(
    ("url", "said"),
    [
        pytest.param("http://127.0.0.1:1/a", "refused", id="nobody listens"),
        pytest.param("ftp://127.0.0.1/a", "is not http(s)://", id="another scheme"),
        pytest.param("http://[/a", "Invalid IPv6 URL", id="no address"),
        pytest.param("http://127.0.0.1:x/a", "nonnumeric port: 'x'", id="no port"),
        pytest.param("http://127.0.0.1:1/", "not the name of a repository", id="no repository"),
        pytest.param("http://127.0.0.1:1/A", "not the name of a repository", id="no name"),
        pytest.param("http://127.0.0.1:1/a?b", "not the name of a repository", id="a query"),
    ],
)
def test_what_cannot_be_reached_or_used_is_2(
    url: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = verdict(capsys, url)
    assert (status, out) == (2, "")
    assert said in err
    assert err.startswith("error: ")


@pytest.mark.slow
def test_the_commands_work_as_programs() -> None:
    """`serve` and `check` as a user runs them, each in a process of its own."""
    program = [sys.executable, "-m", "conformance"]
    with subprocess.Popen(
        [*program, "serve"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().removeprefix("serving ").strip()
            command = [*program, "check", f"{url}/team/app", "--workflow", "management"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        finally:
            server.terminate()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].endswith(" passed, 0 failed, 0 skipped")


def test_a_missing_file_of_certificates_is_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert verdict(capsys, "https://127.0.0.1:1/a", "--ca", str(tmp_path / "none.pem"))[0] == 2


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        pytest.param(
            error(403, "DENIED", "no"),
            "nothing can be pushed there: it wants credentials",
            id="denied",
        ),
        pytest.param(
            error(405, "UNSUPPORTED", "no"), "nothing can be pushed there\n", id="read only"
        ),
    ],
)
def test_where_nothing_can_be_pushed_nothing_is_said(
    answer: Response, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app = App()
    app.intercept = lambda request: answer if request.method == "POST" else None
    with run_in_thread(app) as server:
        status, out, err = verdict(capsys, f"http://{server.address}/team/app")
    assert (status, out) == (2, "")
    assert said in err


def test_repositories_that_are_hidden_are_no_failure() -> None:
    """Who may look where is not the specification's: 401 or 403 where nothing is."""

    def hide(request: Request, answer: Response) -> Response:
        known = request.repository in ("", "team/app", "team/app-mount")
        return answer if known else error(403, "DENIED", "not yours")

    rows = judge(amended(hide)())
    assert became(rows, "fail") == set()
    assert became(rows, "skip") == {
        name
        for name in NAMES
        if "where the repository is not" in name or "that has it not (absent)" in name
    } - {"POST upload mount: 202 where the source has it not (absent)"}


# The client of the checks.


def test_the_client_waits_when_it_is_told_how_long() -> None:
    asked: list[str] = []
    waited: list[float] = []

    def send(method: str, url: str, headers: Any, body: bytes | None) -> Reply:
        asked.append(url)
        said = {"retry-after": "7"} if len(asked) < 3 else {}
        return Reply(method, url, 429 if len(asked) < 4 else 200, said, b"")

    client = Client("http://registry.test", send, sleep=waited.append)
    assert client.ask("GET", "/v2/").status == 429, "without Retry-After it is an answer"
    assert (len(asked), waited) == (3, [7, 7])
    assert client.ask("GET", "/v2/").status == 200


@pytest.mark.parametrize("said", ["3600", "soon", "Fri, 31 Dec 1999 23:59:59 GMT"])
def test_the_client_does_not_wait_for_ever(said: str) -> None:
    def send(method: str, url: str, headers: Any, body: bytes | None) -> Reply:
        return Reply(method, url, 429, {"retry-after": said}, b"")

    client = Client("http://registry.test", send, sleep=lambda seconds: pytest.fail("waited"))
    assert client.ask("GET", "/v2/").status == 429


def test_a_download_that_is_sent_elsewhere_is_followed_without_the_credentials() -> None:
    app = App(auth=BasicAuth({USER: PASSWORD}))
    store = App()
    with run_in_thread(store) as elsewhere, run_in_thread(app) as server:

        def redirect(request: Request, answer: Answer) -> Answer:
            assert isinstance(answer, Response)
            if request.kind != "blob" or request.method != "GET" or answer.status not in (200, 206):
                return answer
            store.add_blob(
                request.repository,
                app.blob(request.repository, request.reference) or b"",
                request.reference,
            )
            return Response(307, [("Location", elsewhere.url + request.path)])

        app.amend = redirect
        url = f"http://{server.address}/team/app"
        rows = suite.check_registry(url, credentials=(USER, PASSWORD), workflows=["pull"])
    assert [suite.as_line(row) for row in rows if row.outcome != "pass"] == []
    assert store.journal.count("GET", "blob", status=200) > 5
    assert not any(entry.headers.get("authorization") for entry in store.journal.entries)


def test_a_connection_that_ends_between_requests_is_opened_again(address: str) -> None:
    wire = Connections()
    for _ in range(2):
        assert wire("GET", f"http://{address}/v2/", {}, None).status == 200
        for kept in wire._kept.values():
            kept.sock.close()
            kept.sock = None
    wire.close()


def test_an_answer_that_is_no_http_fails_the_check_and_no_other() -> None:
    app = App()
    app.intercept = lambda request: b"nonsense\r\n\r\n" if request.target.endswith("n=0") else None
    with run_in_thread(app) as server:
        rows = suite.check_registry(f"http://{server.address}/team/app", workflows=["discovery"])
    failed = [row for row in rows if row.outcome != "pass"]
    assert [row.check.what for row in failed] == ["n=0 is an empty list without Link"]
    assert failed[0].reason.startswith("no answer: GET http://")


@pytest.mark.parametrize("location", ["http://[/", "http://registry.test:x/"])
def test_a_location_that_is_no_url_fails_the_check_and_no_other(location: str) -> None:
    app = amended(saying("Location", lambda value: location, (201,)), "PUT", "upload")()
    with run_in_thread(app) as server:
        names = ["PUT upload: a whole blob (blob)", "PUT upload: to no session, 404 (absent)"]
        with closing(Connections()) as connections:
            run = begin_run(f"http://{server.address}/team/app", connections)
            rows = run_checks(run, [BY_NAME[name] for name in names])
    assert [row.outcome for row in rows] == ["fail", "pass"]
    assert rows[0].reason.startswith("no answer: ")


# The real registry.


@pytest.mark.slow
def test_the_real_registry_has_the_known_gaps_and_no_other(tmp_path: Path) -> None:
    with docker_registry(tmp_path, htpasswd=HTPASSWD) as where:
        url = f"http://{where}/team/app"
        rows = suite.check_registry(url, credentials=(USER, PASSWORD), keep=True)
    gaps = {(row.outcome, row.check.name) for row in rows if row.outcome != "pass"}
    known = {
        (gap.outcome, name)
        for gap in programs.DISTRIBUTION_2_8_GAPS
        for name in fnmatch.filter(NAMES, gap.checks)
    }
    assert gaps == known
    assert all(fnmatch.filter(NAMES, gap.checks) for gap in programs.DISTRIBUTION_2_8_GAPS)


def test_the_readme_names_the_known_gaps_and_every_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    readme = (ROOT / "conformance" / "README.md").read_text(encoding="utf-8")
    for gap in programs.DISTRIBUTION_2_8_GAPS:
        assert f"| `{gap.checks}` | {gap.outcome} | {gap.why} |" in readme
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    for option in set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}:
        assert f"`{option}" in readme
