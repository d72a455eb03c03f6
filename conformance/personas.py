"""The registries that behave as providers, by name, and servers for them.

Each provider has a section: what it does otherwise than the strict registry, then its rows. All
rows are in `PERSONAS`, at the end.

Owns: the differences of each provider.
May not know: logins of clouds (`clouds/`), any client.
Invariant: the behaviour of a row is documented in docs/protocol-facts.md, by section. Behaviour
that a row does not change is strict.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from .clouds.azure import CLOUDS, Cloud, Exchange
from .clouds.google import GoogleTokens
from .http import Server, run_in_thread
from .journal import Journal
from .messages import Access, Content, Request, Response, digest_of, error, errors
from .names import Names
from .provider import Persona, Provider, Role, without
from .rates import READS, WRITES, Cap
from .storage import Stored

__all__ = ["LAG", "LATE", "PERSONAS", "Persona", "Provider", "Running", "imitate", "persona"]

# No cloud documents a POST with the whole blob. They lose the bytes of a body that breaks off.
_CLOUD = {"single_post": False, "resumable": False}
_NO_API = {"referrers_api": False}


# Registries of no particular provider. `redirecting` has object storage (see `provider`).


def _no_large_pages(provider: Provider, request: Request) -> Response | None:
    """Refuse a large `n`. Later registries use their maximum instead (section 1.11)."""
    size = request.parameter("n") or ""
    if request.kind != "tag_list" or not size.isdecimal() or int(size) <= 100:
        return None
    text = "invalid number of results requested"
    return error(400, "PAGINATION_NUMBER_INVALID", text, {"n": size})


_GENERAL = {
    "strict": Persona("docs/protocol-facts.md section 1", {"registry": "strict.test"}),
    "old": Persona(
        "docs/protocol-facts.md sections 1.8 (202 for a mount), 1.10 (no referrers), 1.11 (pages)",
        {"registry": "old.test"},
        options={**_CLOUD, **_NO_API, "page_size": 100},
        mount="never",
        before=(_no_large_pages,),
    ),
    "redirecting": Persona(
        "docs/protocol-facts.md sections 1.2, 1.13; R1 and R4 of 9.2",
        {"registry": "redirecting.test", "storage": "storage.test"},
    ),
}


# Registries that are strict except for referrers (sections 1.10 and 7.9). Those whose names begin
# with `unknown` have no referrers API.

LATE = 60.0  # seconds until a new referrer is listed


def _page(provider: Provider, request: Request) -> Response | None:
    """Answer unknown paths with a page, as a success."""
    if request.kind not in ("referrers", "other"):
        return None
    html = ("Content-Type", "text/html; charset=utf-8")
    return Response(200, [html], b"<!doctype html><title>Registry</title>\n")


def _no_api(provider: Provider, request: Request) -> Response | None:
    """Refuse the referrers API although subjects are announced, as ECR did in June 2024."""
    if request.kind != "referrers":
        return None
    return error(404, "UNSUPPORTED", "the referrers API is not here")


def _late(provider: Provider, request: Request, answer: Response) -> Response:
    """List a referrer only LATE seconds after it was put.

    Content loaded by tests counts as older.
    """
    now = provider.now()
    if request.kind == "manifest" and request.method == "PUT" and answer.status == 201:
        provider.notes.setdefault(answer.header("Docker-Content-Digest"), now)
    if request.kind == "referrers" and answer.status == 200:
        document = answer.json()
        document["manifests"] = [
            entry
            for entry in document["manifests"]
            if provider.notes.get(entry["digest"], -math.inf) + LATE <= now
        ]
        return replace(answer, body=json.dumps(document).encode())
    return answer


def _strict_but(name: str, **row: Any) -> Persona:
    source = "docs/protocol-facts.md sections 1.10, 7.9"
    return Persona(source, {"registry": f"{name}.test"}, **row)


_REFERRERS: Mapping[str, Mapping[str, Any]] = {
    "referrers-in-pages": {"options": {"referrers_page": 2}},
    "referrers-unfiltered": {"options": {"referrers_page": 3, "referrers_filter": False}},
    "referrers-late": {"after": (_late,)},
    "unknown-404": {"options": _NO_API},
    "unknown-200-in-html": {"options": _NO_API, "before": (_page,)},
    "unknown-referrers-announced": {"before": (_no_api,)},
}


# Distribution, which most private registries run. `distribution` is Debian's 2.8.2: what it answers
# to a correct client; conformance/tests/test_docker_registry.py compares both. `distribution3` was
# taken from the source code of version 3, which keeps the bytes of a body that breaks off: a GET on
# the old Location returns their number, and a PUT can send the other bytes.


def _any_last_chunk(provider: Provider, request: Request) -> Request:
    """Ignore Content-Range of a PUT. Of a PATCH it counts (section 1.7)."""
    if request.kind != "upload" or request.method != "PUT":
        return request
    kept = [(name, value) for name, value in request.headers if name != "content-range"]
    return replace(request, headers=kept)


def _whole_lists(provider: Provider, request: Request) -> Request:
    """Ignore `n` and `last` of `tags/list`: there are no pages up to 2.8.3 (section 1.11)."""
    return without(request, "n", "last") if request.kind == "tag_list" else request


def _plain_page(provider: Provider, request: Request) -> Response | None:
    """Answer unknown paths with the page of Go's router."""
    if request.kind not in ("referrers", "other"):
        return None
    headers = [("Content-Type", "text/plain; charset=utf-8"), ("X-Content-Type-Options", "nosniff")]
    return Response(404, headers, b"404 page not found\n")


def _manifests_by_sha256(provider: Provider, request: Request) -> Response | None:
    """Refuse sha512 digests of manifests (section 1.7)."""
    is_put = (request.method, request.kind) == ("PUT", "manifest")
    if not is_put or not request.reference.startswith("sha512:"):
        return None
    return error(400, "DIGEST_INVALID", "provided digest did not match uploaded content")


def _layers_with_urls(provider: Provider, request: Request, manifest: Stored) -> Response | None:
    """Refuse layers with `urls` by three errors, and absent layers by one.

    The type of a layer does not matter, and neither does the presence of a layer with `urls`. This
    was observed, as in section 1.12.
    """
    held = provider.repository(request.repository).blobs
    problems: list[tuple[str, str, object]] = []
    for part in manifest.blobs:
        missing = ("MANIFEST_BLOB_UNKNOWN", "blob unknown to registry", {"digest": part["digest"]})
        if part.get("urls"):
            problems += [("UNKNOWN", "unknown error", None)] * 2 + [missing]
        elif part["digest"] not in held:
            problems.append(missing)
    if not problems:
        return None
    # The first error determines the status.
    return errors(500 if problems[0][0] == "UNKNOWN" else 400, problems)


def _blobs_by_sha256(provider: Provider, request: Request, answer: Response) -> Response:
    """Store a blob under both digests, and answer with sha256's (section 1.12)."""
    digest = request.parameter("digest") or ""
    if request.kind != "upload" or answer.status != 201 or not digest.startswith("sha512:"):
        return answer
    blobs = provider.repositories[request.repository].blobs
    canonical = blobs[digest].digest()
    blobs[canonical] = blobs[digest]
    answer.headers = [(name, value.replace(digest, canonical)) for name, value in answer.headers]
    return answer


def _unsorted_tags(provider: Provider, request: Request, answer: Response) -> Response:
    """List tags in an arbitrary order, as in a directory."""
    if request.kind != "tag_list" or answer.status != 200:
        return answer
    document = answer.json()
    document["tags"].sort(key=lambda tag: digest_of(tag.encode()))
    return replace(answer, body=json.dumps(document).encode())


_DISTRIBUTION = {
    "distribution": Persona(
        "docs/protocol-facts.md sections 1.2, 1.7 to 1.12",
        {"registry": "distribution.test"},
        options={**_CLOUD, **_NO_API},
        rewrites=(_whole_lists,),
        before=(_plain_page, _manifests_by_sha256),
        judges=(_layers_with_urls,),
        after=(_blobs_by_sha256, _unsorted_tags),
    ),
    "distribution3": Persona(
        "docs/protocol-facts.md sections 1.7 (Content-Range), 1.9 (resuming), 7.7 (no referrers)",
        {"registry": "distribution3.test"},
        options={**_NO_API, "single_post": False},
        rewrites=(_any_last_chunk,),
    ),
}


# Docker Hub: its token service, its names, its limit of pulls in six hours (sections 2.1 and 7.2).


def _hub_caps(provider: Provider) -> tuple[Cap, Cap]:
    """Return the caps in six hours: 100 manifests without a login, 200 for each account.

    A HEAD does not count.
    """

    def anonymous(request: Request) -> str | None:
        return "" if provider.user(request) is None else None

    gets = frozenset({"manifest_get"})
    return (Cap(100, 21600.0, gets, per=anonymous), Cap(200, 21600.0, gets, per=provider.user))


def _hub_quota(provider: Provider, request: Request, answer: Response) -> Response:
    """Add the headers with the remaining quota to answers to GET and HEAD of a manifest."""
    is_read = request.kind == "manifest" and request.method in ("GET", "HEAD")
    if not is_read or answer.status in (401, 403):
        return answer
    user = provider.user(request)
    cap = provider.rates.caps[0 if user is None else 1]
    as_get = Request("GET", request.target, request.headers)  # a HEAD would not be counted
    window = f"w={cap.seconds:.0f}"
    answer.headers += [
        ("ratelimit-limit", f"{cap.requests};{window}"),
        ("ratelimit-remaining", f"{provider.rates.remaining(cap, as_get)};{window}"),
        ("docker-ratelimit-source", "192.0.2.1" if user is None else f"account-of-{user}"),
    ]
    return answer


def _hub_grants(user: str | None, access: Access) -> bool:
    """Report whether a user has a permission.

    Names of one component have none: clients abbreviate names that begin with `library/` at the
    registry.
    """
    return "/" in access.name and (access.action == "pull" or user is not None)


_HUB = Persona(
    "docs/protocol-facts.md sections 2.1, 7.2",
    {"registry": "registry-1.docker.io", "token": "auth.docker.io"},
    tokens={"service": "registry.docker.io", "grants": _hub_grants},
    caps=_hub_caps,
    has_retry_after=False,
    after=(_hub_quota,),
)


# Amazon ECR and ECR Public (sections 4.7 to 4.9). Their logins are in `clouds.aws`.

# Key of `Provider.notes` under which tests set the seconds for which a new blob is not visible.
LAG = "lag"


def _absent_repository(provider: Provider, request: Request) -> Response | None:
    """Refuse unknown repositories. Tests create repositories; a push does not."""
    name = request.repository
    if not name or name in provider.repositories:
        return None
    registry = request.header("host").partition(".")[0]
    text = f"The repository with name '{name}' does not exist in the registry with id '{registry}'"
    return error(404, "NAME_UNKNOWN", text)


def _unreferenced(provider: Provider, request: Request) -> Response | None:
    """Refuse to serve a blob that no manifest names.

    ECR has download URLs only for layers of images.
    """
    if request.kind != "blob" or request.method != "GET":
        return None
    if provider.repository(request.repository).naming(request.reference):
        return None
    return error(404, "BLOB_UNKNOWN", "blob unknown to registry", {"digest": request.reference})


def _note_arrival(provider: Provider, request: Request, answer: Response) -> Response:
    """Record when a blob was uploaded."""
    if request.kind == "upload" and answer.status == 201:
        provider.notes[request.repository, request.parameter("digest")] = provider.now()
    return answer


def _seen_late(provider: Provider, request: Request, manifest: Stored) -> Response | None:
    """Refuse a manifest that names a blob which was uploaded less than LAG seconds ago."""
    visible_since = provider.now() - provider.notes.get(LAG, 0.0)
    digests = [blob["digest"] for blob in manifest.blobs]
    arrivals = {each: provider.notes.get((request.repository, each), -math.inf) for each in digests}
    fresh = [digest for digest, arrived in arrivals.items() if arrived > visible_since]
    if not fresh:
        return None
    text = f"Images with digests '{fresh}' required for pushing image into repository do not exist"
    return error(400, "MANIFEST_BLOB_UNKNOWN", text)


def _worded_as_ecr(provider: Provider, request: Request, answer: Response) -> Response:
    """Use ECR's message for an immutable tag, and answer a PATCH with 201."""
    if answer.status == 400 and request.kind == "manifest" and answer.codes == ["TAG_INVALID"]:
        text = f"The image tag '{request.reference}' already exists in the '{request.repository}' repository"
        text += " and cannot be overwritten because the repository is immutable."
        return error(400, "TAG_INVALID", text)
    if request.method == "PATCH" and answer.status == 202:
        return replace(answer, status=201)
    return answer


def _each_second(counts: Mapping[str, int]) -> Callable[[Provider], list[Cap]]:
    """Return a function that makes caps per second. `counts` has them by actions (section 4.8)."""
    caps = [Cap(count, actions=frozenset(actions.split())) for actions, count in counts.items()]
    return lambda provider: caps


# The registry of an account whose setting BLOB_MOUNTING is off, with a cap for each API.
_ECR = Persona(
    "docs/protocol-facts.md sections 4.7 to 4.9",
    {"registry": "123456789012.dkr.ecr.eu-west-1.amazonaws.com"},
    options=_CLOUD,
    mount="never",
    caps=_each_second(
        {
            "blob_head": 1000,
            "manifest_head": 2000,
            "manifest_get": 2000,
            "blob_get": 3000,
            "upload_start": 100,
            "upload_body": 500,
            "upload_finish": 100,
            "manifest_put": 10,
        }
    ),
    before=(_absent_repository, _unreferenced),
    judges=(_seen_late,),
    after=(_note_arrival, _worded_as_ecr),
)
_ECR_MOUNTING = replace(
    _ECR, hosts={"registry": "210987654321.dkr.ecr.eu-west-1.amazonaws.com"}, mount="committed"
)
# With the caps for clients that have logged in.
_ECR_PUBLIC = replace(
    _ECR,
    hosts={"registry": "public.ecr.aws"},
    caps=_each_second(
        {
            "manifest_head manifest_get blob_get": 10,
            "blob_head": 200,
            "upload_start": 10,
            "upload_body": 260,
            "upload_finish": 10,
            "manifest_put": 10,
        }
    ),
)


# Google's Artifact Registry and the former Container Registry (sections 5.1, 5.2 and 5.5). `gar`
# and `gcr` have logins: tests set `tokens.google`, which issues tokens.

# The path of an upload's Location, without its last part.
_LOCATION = "/artifacts-uploads/namespaces/{project}/repositories/{rest}/uploads/"


def _no_chunks(provider: Provider, request: Request) -> Response | None:
    """Refuse PATCH."""
    if request.kind != "upload" or request.method != "PATCH":
        return None
    text = "chunked uploads are not supported"
    provider.journal.violations.append(f"PATCH {request.target}: {text}")
    return error(405, "UNSUPPORTED", text)


def _move_locations(provider: Provider, request: Request, answer: Response) -> Response:
    """Replace the Location of an upload by a long one outside of `/v2/`, without a query."""
    if answer.status != 202 or request.kind != "upload_start":
        return answer
    project, _, rest = request.repository.partition("/")
    location = _LOCATION.format(project=project, rest=rest or "-")
    location += "A" * 1500 + str(len(provider.notes))  # each is long and unique
    provider.notes[location] = answer.header("Location")
    return Response(202, [("Location", request.origin + location)])


def _follow_locations(provider: Provider, request: Request) -> Request:
    """Return a request for such a Location as a request for its upload session."""
    location = provider.notes.get(request.path)
    if location is None:
        return request
    digest = request.parameter("digest")
    target = location.removeprefix(request.origin) + (f"&digest={digest}" if digest else "")
    changed = replace(request, target=target)
    request.kind = changed.kind
    request.repository = changed.repository
    request.reference = changed.reference
    return changed


def _bare_mount(provider: Provider, request: Request) -> Response | None:
    """Answer a mount without `from` with 201 if the repository has the blob (section 1.8, GCR)."""
    digest = request.parameter("mount")
    if request.kind != "upload_start" or digest is None or request.parameter("from") is not None:
        return None
    if digest not in provider.repository(request.repository).blobs:
        return None
    location = f"{request.origin}/v2/{request.repository}/blobs/{digest}"
    return Response(201, [("Location", location), ("Docker-Content-Digest", digest)])


def _google_caps(provider: Provider) -> tuple[Cap, ...]:
    """Return the caps on all requests and on writes, per minute and project."""

    def project(request: Request) -> str:
        return request.repository.partition("/")[0]

    return (Cap(60_000, 60.0, per=project), Cap(18_000, 60.0, WRITES, per=project))


def _google(host: str, **row: Any) -> Persona:
    return Persona(
        "docs/protocol-facts.md sections 1.8, 5.1, 5.2, 5.5",
        {"registry": host},
        options=_CLOUD,
        caps=_google_caps,
        rewrites=(_follow_locations,),
        after=(_move_locations,),
        **{"before": (_no_chunks,), **row},
    )


def _google_logins(host: str) -> Persona:
    tokens = {"service": host, "path": "/v2/token", "anonymous": False}
    return _google(host, tokens=tokens, service=GoogleTokens)


# GitHub's registry (sections 7.1 and 7.9).


def _last_chunk_alone(provider: Provider, request: Request) -> Response | None:
    """Refuse a large chunk with Content-Range. Keep only the last of several chunks."""
    if request.kind != "upload" or request.method != "PATCH":
        return None
    if request.header("content-range") and (request.length() or 0) > 4 << 20:
        return error(416, "REQUESTED_RANGE_NOT_SATISFIABLE", "the body exceeds 4.00 MiB")
    upload = provider.repository(request.repository).uploads.get(request.reference)
    if upload is not None and upload.content.size:
        upload.content = Content()
    return None


def _ghcr(host: str, status: int = 0, code: str = "") -> Persona:
    """Return a row. A PUT with a body is refused with a status, if it is given."""

    def no_whole_put(provider: Provider, request: Request) -> Response | None:
        is_put = request.kind == "upload" and request.method == "PUT"
        if not status or not is_put or not request.has_body:
            return None
        return replace(error(status, code, "not by this way"), early=True)

    return Persona(
        "docs/protocol-facts.md sections 7.1 (upload, referrers, rate), 7.9 (what is refused)",
        {"registry": host},
        options={**_CLOUD, **_NO_API},
        caps=lambda provider: (Cap(2000, 60.0),),
        before=(_last_chunk_alone, no_whole_put),
    )


# Azure's registries (sections 6.1 to 6.5). `acr` has no logins; the others have the directory and
# the token exchange of one of Azure's clouds.

_BODY_LIMIT = 20_000_000  # bytes; "above about 20 MB" (section 6.5)


def _limited_uploads(provider: Provider, request: Request) -> Response | None:
    """Refuse bodies that are too long, chunked coding, and the unit `bytes` in Content-Range."""
    is_upload = request.kind == "upload" and request.method in ("PUT", "PATCH")
    if not is_upload or not request.has_body:
        return None
    if request.is_chunked:
        return error(400, "CONTENT_LENGTH_INVALID", "the Content-Length header is missing")
    span = request.header("content-range")
    if (request.method == "PUT" or span) and (request.length() or 0) > _BODY_LIMIT:
        page = b"<html><head><title>413 Request Entity Too Large</title></head></html>"
        headers = [("Content-Type", "text/html"), ("Server", "AzureContainerRegistry")]
        return Response(413, headers, page, early=True)
    if span.startswith("bytes "):
        return error(400, "BLOB_UPLOAD_INVALID", "the Content-Range header format is invalid")
    return None


_ACR = Persona(
    "docs/protocol-facts.md section 6.5",
    {"registry": "team.azurecr.io"},
    options=_CLOUD,
    # Of Premium registries, on reads and writes per minute.
    caps=lambda provider: (Cap(10_000, 60.0, READS), Cap(2000, 60.0, WRITES)),
    before=(_limited_uploads,),
)


def _acr(cloud: Cloud) -> Persona:
    """Return the row of a registry with its cloud's directory. Every user has all permissions."""
    host = f"name.{cloud.suffix}"
    return replace(
        _ACR,
        hosts={"registry": host, "authority": cloud.authority},
        tokens={"service": host, "anonymous": False, "cloud": cloud},
        service=Exchange,
    )


PERSONAS: Mapping[str, Persona] = MappingProxyType(
    {
        **_GENERAL,
        **{name: _strict_but(name, **row) for name, row in _REFERRERS.items()},
        **_DISTRIBUTION,
        "dockerhub": _HUB,
        "ecr": _ECR,
        "ecr_mounting": _ECR_MOUNTING,
        "ecr_public": _ECR_PUBLIC,
        "gar": _google_logins("europe-docker.pkg.dev"),
        "gcr": _google_logins("gcr.io"),
        "gar_open": _google("europe-west1-docker.pkg.dev", mount="never"),
        "gcr_open": _google("eu.gcr.io", before=(_no_chunks, _bare_mount)),
        "ghcr": _ghcr("ghcr.io"),
        "ghcr_405": _ghcr("ghcr-405.test", 405, "UNSUPPORTED"),
        "ghcr_416": _ghcr("ghcr-416.test", 416, "REQUESTED_RANGE_NOT_SATISFIABLE"),
        "acr": _ACR,
        **{f"acr-{key}": _acr(cloud) for key, cloud in CLOUDS.items()},
    }
)


@dataclass(frozen=True)
class Running:
    """A provider that is being served."""

    provider: Provider
    url: str  # of the registry
    servers: Mapping[Role, Server]

    @property
    def app(self) -> Provider:
        return self.provider

    @property
    def address(self) -> str:
        return self.url.partition("://")[2]

    @property
    def journal(self) -> Journal:
        return self.provider.journal

    def check(self) -> None:
        """Raise AssertionError if any part got a request that no correct client sends."""
        for site in self.provider.sites.values():
            site.journal.check()


def imitate(name: str, **options: Any) -> Provider:
    """Return a provider that is not served. It can answer in memory or listen in a `Network`.

    `users`, `now` and `wall` are options of Provider. Other options are App's, and override the
    row's.
    """
    return Provider(PERSONAS[name], **options)


@contextlib.contextmanager
def persona(
    name: str, *, names: Names | None = None, port: int = 0, **options: Any
) -> Iterator[Running]:
    """Serve a provider while the block runs, each part in a thread of its own.

    Without `names`, each part is at a port of 127.0.0.1, over plain HTTP. With `names`, each part
    is at its host name, over TLS, for clients that use `names.environ`. `port` is the port of the
    registry; 0 means any free port.
    """
    provider = imitate(name, **options)
    hosts = provider.row.hosts
    context = None if names is None else names.context(sorted(hosts.values()))
    with contextlib.ExitStack() as stack:
        servers = {
            role: stack.enter_context(
                run_in_thread(site, port=port if role == "registry" else 0, ssl_context=context)
            )
            for role, site in provider.sites.items()
        }
        origins = {role: server.url for role, server in servers.items()}
        if names is not None:
            origins = {role: f"https://{hosts[role]}" for role in servers}
            for role, server in servers.items():
                stack.enter_context(names.known(hosts[role], server.port))
        provider.place(origins)
        yield Running(provider, origins["registry"], servers)
