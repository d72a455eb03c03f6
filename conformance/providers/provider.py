"""A registry that behaves as a certain provider, according to the provider's row.

Owns: the fields of a row (`Persona`); the registry made from a row (`Provider`); the object storage
behind a registry (`Storage`).
May not know: sockets, any client, the rows of the providers (see `personas`).
Invariants: behaviour that a row does not change is strict. The functions of a row are called in the
order `rewrites`, `before`, `judges`, `after`.
Follows: docs/protocol-facts.md sections 1.13 and 4.9.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias
from urllib.parse import quote, urlencode

from ..messages import Answer, Content, Headers, Request, Response
from ..registry.app import App, Auth
from ..registry.tokens import TokenService
from ..server.exchange import Reception, Site
from .rates import Cap, Metered, Rates

__all__ = [
    "CLOUD_OPTIONS",
    "After",
    "Before",
    "Judge",
    "Mount",
    "Persona",
    "Provider",
    "Rewrite",
    "Role",
    "Storage",
    "change_query",
]

# The parts of a provider: the registry itself, its token service, the object storage that serves
# its blobs, and the directory of identities that it trusts.
Role: TypeAlias = Literal["registry", "token", "storage", "authority"]
# Which blobs are mounted: all, only blobs that a manifest of the source repository names, or none.
Mount: TypeAlias = Literal["any", "committed", "never"]

# Functions of a row. A Rewrite returns the request that the registry processes. A Before answers
# instead of the registry, a Judge instead of storing a manifest with these bytes, unless they
# return None. An After returns the answer that is sent.
Rewrite: TypeAlias = "Callable[[Provider, Request], Request]"
Before: TypeAlias = "Callable[[Provider, Request], Response | None]"
Judge: TypeAlias = "Callable[[Provider, Request, bytes], Response | None]"
After: TypeAlias = "Callable[[Provider, Request, Response], Response]"

_VALID = 300  # seconds for which a URL of the storage is valid

# No cloud documents a POST with the whole blob. They lose the bytes of a body that breaks off.
CLOUD_OPTIONS: Mapping[str, Any] = {"single_post": False, "resumable": False}


@dataclass(frozen=True)
class Persona:
    """The row of one provider."""

    source: str  # the documentation of the behaviour
    hosts: Mapping[Role, str]  # host names
    options: Mapping[str, Any] = field(default_factory=dict)  # of App
    # Options of the token service. None: no logins, everybody may do everything.
    tokens: Mapping[str, Any] | None = None
    # Makes the token service.
    service: Callable[..., TokenService] = TokenService
    # Makes further parts, which have hosts of their own.
    parts: Callable[[Provider], Mapping[Role, Site]] = lambda provider: {}
    mount: Mount = "any"
    # Makes the caps. The argument is the provider, which can tell the user of a request.
    caps: Callable[[Provider], Sequence[Cap]] = lambda provider: ()
    has_retry_after: bool = True  # whether a 429 says when the request would be admitted
    throttled: str = "too many requests"  # the message of a 429
    # Puts content into a new registry.
    seed: Callable[[Provider], None] = lambda provider: None
    rewrites: Sequence[Rewrite] = ()
    before: Sequence[Before] = ()
    judges: Sequence[Judge] = ()
    after: Sequence[After] = ()


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

        caps = row.caps(self)
        self.rates = Rates(
            *caps, now=now, has_retry_after=row.has_retry_after, message=row.throttled
        )
        login = Metered(self.rates, auth or self.tokens)
        super().__init__(auth=login, mounts=row.mount != "never", **{**row.options, **options})
        self.sites: dict[Role, Site] = {"registry": self}
        if self.tokens is not None and "token" in row.hosts:
            self.sites["token"] = self.tokens

        self.storage: Storage | None = None
        if "storage" in row.hosts:
            self.storage = self.sites["storage"] = Storage(self, wall)

        self.sites.update(row.parts(self))
        # State that the row's functions keep between requests. They choose the keys.
        self.notes: dict[Any, Any] = {}
        self.place({role: f"https://{host}" for role, host in row.hosts.items()})
        row.seed(self)
        self.journal.clear()

    def place(self, origins: Mapping[Role, str]) -> None:
        """Set the origins of the parts, as `SCHEME://HOST[:PORT]`."""
        if self.tokens is not None and "token" in origins:
            self.tokens.realm = origins["token"] + self.tokens.path
        if self.storage is not None:
            self.storage.origin = origins["storage"]

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
            request = self._without_from(request)
        for first in self.row.before:
            answer = first(self, request)
            if answer is not None:
                return self._after(request, answer)
        decision = super().start(request)
        if isinstance(decision, Response):
            return self._after(request, decision)
        if isinstance(decision, Reception):
            return self._add_judges(request, decision)
        return decision

    def _add_judges(self, request: Request, reception: Reception) -> Reception:
        """Return a Reception that calls the row's judges before a manifest is stored."""

        def finish(received: int) -> Response:
            answer = self._ask_judges(request, reception) or reception.finish(received)
            assert isinstance(answer, Response), "a registry in memory has its answer at once"
            return self._after(request, answer)

        return replace(reception, finish=finish)

    def _ask_judges(self, request: Request, reception: Reception) -> Response | None:
        """Return the first answer of a judge to a received manifest, or None."""
        if request.kind != "manifest" or not isinstance(reception.content, Content):
            return None
        body = bytes(reception.content)
        if not body:
            return None
        for judge in self.row.judges:
            answer = judge(self, request, body)
            if answer is not None:
                return answer
        return None

    def _after(self, request: Request, answer: Response) -> Response:
        """Return the answer to send, which may be a redirect to the storage."""
        is_pull = (request.method, request.kind) == ("GET", "blob") and answer.status in (200, 206)
        if self.storage is not None and is_pull:
            where = self.storage.sign(request.repository, request.reference)
            # The usual status is 307 (section 1.13).
            answer = Response(307, [("Location", where)])
        for last in self.row.after:
            answer = last(self, request, answer)
        return answer

    def _without_from(self, request: Request) -> Request:
        """Remove a mount if no manifest of the source names the blob (section 4.9)."""
        mount = request.parameter("mount")
        source = request.parameter("from")
        if request.kind != "upload_start" or mount is None or source is None:
            return request
        if self._repository(source).naming(mount):
            return request
        return change_query(request, without=frozenset({"mount", "from"}))

    def user(self, request: Request) -> str | None:
        """Return the user of a request.

        Returns None if it is anonymous or if there are no logins.
        """
        return None if self.tokens is None else self.tokens.user(request)


class Storage(Site):
    """Object storage behind a registry, with signed URLs that expire (section 1.13).

    A client that sends the registry's credential to the storage leaks it, which is recorded as a
    violation (section 9.2, R1).
    """

    def __init__(self, registry: App, wall: Callable[[], float]) -> None:
        super().__init__()
        self.origin = ""
        self._wall = wall
        self._secret = b"nobody signs for us"
        # Serves the registry's content without its logins, caps and quirks.
        self._vault = App()
        self._vault.repositories = registry.repositories

    def sign(self, repository: str, digest: str) -> str:
        """Return a URL with which a blob can be pulled. It is valid for _VALID seconds."""
        expires = str(int(self._wall() + _VALID))
        path = f"/{quote(repository)}/{quote(digest)}"
        return f"{self.origin}{path}?" + urlencode(
            {"X-Expires": expires, "X-Signature": self._mark("GET", path, expires)}
        )

    def _mark(self, method: str, path: str, expires: str) -> str:
        return hmac.new(self._secret, f"{method} {path} {expires}".encode(), "sha256").hexdigest()

    def start(self, request: Request) -> Answer | Reception:
        """Answer with a blob if the signature is valid.

        Refusals are in XML, as at real storages.
        """
        request.kind = "storage"
        for name in ("authorization", "cookie", "proxy-authorization"):
            if request.header(name):
                self.journal.violations.append(
                    f"{name} was sent to the storage: {request.method} {request.path}"
                )
                return self._refusal(400, "InvalidArgument", "Only one auth mechanism allowed")

        expires = request.parameter("X-Expires") or ""
        path = request.target.partition("?")[0]
        if request.parameter("X-Signature") != self._mark(request.method, path, expires):
            return self._refusal(403, "SignatureDoesNotMatch", "The signature does not match")
        if self._wall() > int(expires):
            return self._refusal(403, "AccessDenied", "Request has expired")

        repository, _, digest = request.path[1:].rpartition("/")
        inner = Request(request.method, f"/v2/{repository}/blobs/{digest}", request.headers)
        answer = self._vault.start(inner)
        assert isinstance(answer, Response)
        if answer.status == 404:
            return self._refusal(404, "NoSuchKey", "The specified key does not exist.")

        answer.headers = [
            (name, value) for name, value in answer.headers if not name.startswith("Docker-")
        ]
        return answer

    @staticmethod
    def _refusal(status: int, code: str, text: str) -> Response:
        body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{text}</Message></Error>'
        return Response(status, [("Content-Type", "application/xml")], body.encode())


def change_query(
    request: Request,
    *,
    without: frozenset[str] = frozenset(),
    headers: Headers | None = None,
    **query: str,
) -> Request:
    """Return a request with a changed query.

    The parameters `without` are removed, and those of `query` are added. `headers` replaces all
    headers.
    """
    parameters = [(key, value) for key, value in request.query if key not in without | set(query)]
    target = f"{request.path}?{urlencode([*parameters, *query.items()])}"
    return replace(request, target=target, headers=request.headers if headers is None else headers)
