"""A registry that behaves as a certain provider, according to the provider's row.

Owns: the fields of a row (`Persona`); the registry made from a row (`Provider`); the object storage
behind a registry (`Storage`).
May not know: sockets, any client, the rows (see `personas`).
Invariant: behaviour that a row does not change is strict. The functions of a row are called in the
order `rewrites`, `before`, `judges`, `after`.
Follows: docs/protocol-facts.md sections 1.13 and 4.9.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias
from urllib.parse import quote, urlencode

from .clouds.azure import Exchange
from .http import Reception, Site
from .messages import Answer, Content, Request, Response, digest_of
from .rates import Cap, Metered, Rates
from .registry import App, Auth
from .storage import Invalid, Repository, Stored, read_manifest
from .tokens import TokenService

__all__ = ["Persona", "Provider", "Role", "Storage", "without"]

# The parts of a provider: the registry itself, its token service, the object storage that serves
# its blobs, and the directory of identities that it trusts.
Role: TypeAlias = Literal["registry", "token", "storage", "authority"]
_VALID = 300  # seconds for which a URL of the storage is valid


@dataclass(frozen=True)
class Persona:
    """The row of one provider."""

    source: str  # the documentation of the behaviour
    hosts: Mapping[Role, str]  # host names
    options: Mapping[str, Any] = field(default_factory=dict)  # of App
    # Options of the token service. None: no logins, everybody may do everything.
    tokens: Mapping[str, Any] | None = None
    service: Callable[..., TokenService] = TokenService  # makes the token service
    # Which blobs are mounted: all, only those that a manifest of the source names, or none.
    mount: Literal["any", "committed", "never"] = "any"
    # Makes the caps. The argument is the provider, which can tell the user of a request.
    caps: Callable[[Provider], Sequence[Cap]] = lambda provider: ()
    has_retry_after: bool = True  # whether a 429 says when the request would be admitted
    # Functions. A rewrite returns the request that the registry processes. One of `before` answers
    # instead of the registry, a judge instead of storing a manifest, unless they return None. One
    # of `after` returns the answer that is sent.
    rewrites: Sequence[Callable[[Provider, Request], Request]] = ()
    before: Sequence[Callable[[Provider, Request], Response | None]] = ()
    judges: Sequence[Callable[[Provider, Request, Stored], Response | None]] = ()
    after: Sequence[Callable[[Provider, Request, Response], Response]] = ()


class Provider(App):
    """A registry that behaves according to a row. `sites` has all its parts by role.

    `auth` replaces the row's own token service (see `conformance/clouds/aws.py`). `now` is the
    clock of rates and tokens, `wall` the clock of dates. Other options are App's.
    """

    def __init__(
        self,
        row: Persona,
        *,
        users: Mapping[str, str] | None = None,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        auth: Auth | None = None,
        **options: Any,
    ) -> None:
        self.row = row
        self.now = now
        self.tokens: TokenService | None = None
        if row.tokens is not None:
            self.tokens = row.service(dict(users or {}), now=now, wall=wall, **row.tokens)
        self.rates = Rates(*row.caps(self), now=now, has_retry_after=row.has_retry_after)
        login = Metered(self.rates, auth or self.tokens)
        super().__init__(auth=login, **{"mounts": row.mount != "never", **row.options, **options})

        self.sites: dict[Role, Site] = {"registry": self}
        if self.tokens is not None and "token" in row.hosts:
            self.sites["token"] = self.tokens
        if isinstance(self.tokens, Exchange) and self.tokens.directory is not None:
            self.sites["authority"] = self.tokens.directory
        if "storage" in row.hosts:
            self.sites["storage"] = Storage(self, wall)
        # State that the row's functions keep between requests. They choose the keys.
        self.notes: dict[Any, Any] = {}
        self.place({role: f"https://{host}" for role, host in row.hosts.items()})

    def place(self, origins: Mapping[Role, str]) -> None:
        """Set the origins of the parts, as `SCHEME://HOST[:PORT]`."""
        if self.tokens is not None and "token" in origins:
            self.tokens.realm = origins["token"] + self.tokens.path
        storage = self.sites.get("storage")
        if isinstance(storage, Storage):
            storage.origin = origins["storage"]

    def user(self, request: Request) -> str | None:
        """Return the user of a request, or None without a login."""
        return None if self.tokens is None else self.tokens.user(request)

    def repository(self, name: str) -> Repository:
        """Return a repository. An unknown repository is not created, but looks empty."""
        return self._repository(name)

    def kind_of(self, request: Request) -> str:
        """Return the kind of a request's path. Rewrites may set the kind of other paths."""
        for rewrite in self.row.rewrites:
            rewrite(self, request)
        return request.kind

    def start(self, request: Request) -> Answer | Reception:
        """Decide as the strict registry, with the row's functions before and after."""
        for rewrite in self.row.rewrites:
            request = rewrite(self, request)
        if self.row.mount == "committed":
            request = self._without_uncommitted(request)
        for first in self.row.before:
            answer = first(self, request)
            if answer is not None:
                return self._after(request, answer)

        decision = super().start(request)
        if isinstance(decision, Response):
            return self._after(request, decision)
        if not isinstance(decision, Reception):
            return decision
        received_whole = decision.finish

        def finish(received: int) -> Response:
            answer = self._judge(request, decision.content) or received_whole(received)
            assert isinstance(answer, Response), "a registry in memory has its answer at once"
            return self._after(request, answer)

        return replace(decision, finish=finish)

    def _judge(self, request: Request, content: object) -> Response | None:
        """Return the first answer of a judge to a received manifest, or None."""
        if request.kind != "manifest" or not isinstance(content, Content) or not self.row.judges:
            return None
        media_type = request.header("content-type").partition(";")[0].strip()
        try:
            manifest = read_manifest(
                bytes(content), media_type, "", any_type=self.any_manifest_type
            )
        except Invalid:
            return None
        answers = (judge(self, request, manifest) for judge in self.row.judges)
        return next((answer for answer in answers if answer is not None), None)

    def _after(self, request: Request, answer: Response) -> Response:
        """Return the answer to send, which may be a redirect to the storage."""
        storage = self.sites.get("storage")
        is_pull = (request.method, request.kind) == ("GET", "blob") and answer.status in (200, 206)
        if is_pull and isinstance(storage, Storage):
            where = storage.sign(request.repository, request.reference)
            answer = Response(307, [("Location", where)])  # the usual status (section 1.13)
        for last in self.row.after:
            answer = last(self, request, answer)
        return answer

    def _without_uncommitted(self, request: Request) -> Request:
        """Remove a mount if no manifest of the source names the blob (section 4.9)."""
        mount = request.parameter("mount")
        source = request.parameter("from")
        if request.kind != "upload_start" or mount is None or source is None:
            return request
        if self.repository(source).naming(mount):
            return request
        return without(request, "mount", "from")


class Storage(Site):
    """Object storage behind a registry, with signed URLs that expire (section 1.13).

    A client that sends the registry's credential to the storage leaks it, which is recorded as a
    violation (section 9.2, R1).
    """

    def __init__(self, registry: App, wall: Callable[[], float]) -> None:
        super().__init__()
        self.origin = ""
        self._wall = wall
        self._signed: dict[str, float] = {}  # expiry times, by path and query
        # Serves the registry's content without its logins, caps and quirks.
        self._vault = App()
        self._vault.repositories = registry.repositories

    def sign(self, repository: str, digest: str) -> str:
        """Return a URL with which a blob can be pulled. It is valid for _VALID seconds."""
        expires = int(self._wall()) + _VALID
        path = f"/{quote(repository)}/{quote(digest)}"
        signature = digest_of(f"{path} {expires}".encode())[7:]
        target = f"{path}?X-Expires={expires}&X-Signature={signature}"
        self._signed[target] = expires
        return self.origin + target

    def start(self, request: Request) -> Answer | Reception:
        """Answer with a blob if the signature is valid.

        Refusals are in XML, as at real storages.
        """
        request.kind = "storage"
        for name in ("authorization", "cookie", "proxy-authorization"):
            if request.header(name):
                place = f"{request.method} {request.path}"
                self.journal.violations.append(f"{name} was sent to the storage: {place}")
                return _in_xml(400, "InvalidArgument", "Only one auth mechanism allowed")
        if request.method != "GET" or request.target not in self._signed:
            return _in_xml(403, "SignatureDoesNotMatch", "The signature does not match")
        if self._wall() > self._signed[request.target]:
            return _in_xml(403, "AccessDenied", "Request has expired")

        repository, _, digest = request.path[1:].rpartition("/")
        inner = Request("GET", f"/v2/{repository}/blobs/{digest}", request.headers)
        answer = self._vault.start(inner)
        assert isinstance(answer, Response)
        if answer.status == 404:
            return _in_xml(404, "NoSuchKey", "The specified key does not exist.")
        answer.headers = [
            (name, value) for name, value in answer.headers if not name.startswith("Docker-")
        ]
        return answer


def _in_xml(status: int, code: str, text: str) -> Response:
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{text}</Message></Error>'
    return Response(status, [("Content-Type", "application/xml")], body.encode())


def without(request: Request, *names: str) -> Request:
    """Return a request without these parameters of its query."""
    kept = [(key, value) for key, value in request.query if key not in names]
    return replace(request, target=f"{request.path}?{urlencode(kept)}")
