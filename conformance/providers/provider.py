"""A provider's row, and a registry that behaves as its row says.

Owns: what a row can say (`Persona`), the registry made of it (`Provider`), the object storage
behind a registry (`Storage`).
May not know: sockets, any client, which providers there are (see `personas`).
Invariants: what a row leaves out is strict. The functions of a row are called in the order
`rewrites`, `before`, `judges`, `after`.
Follows: docs/protocol-facts.md sections 1.13 and 4.9.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias
from urllib.parse import quote, urlencode

from ..messages import Answer, Content, Request, Response
from ..registry.app import App, Auth
from ..registry.tokens import TokenService
from ..server.exchange import Reception, Site
from .rates import Cap, Metered, Rates, RetryAfter

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
]

# The parts of a provider: the registry itself, its token service, the storage from which blobs
# come, the directory of identities that it believes.
Role: TypeAlias = Literal["registry", "token", "storage", "authority"]
Mount: TypeAlias = Literal["any", "committed", "never"]
Rewrite: TypeAlias = "Callable[[Provider, Request], Request]"
Before: TypeAlias = "Callable[[Provider, Request], Response | None]"
Judge: TypeAlias = "Callable[[Provider, Request, bytes], Response | None]"
After: TypeAlias = "Callable[[Provider, Request, Response], Response]"


# Of the clouds none documents a POST with the whole blob; the bytes of a broken body are lost.
CLOUD_OPTIONS: Mapping[str, Any] = {"single_post": False, "resumable": False}


@dataclass(frozen=True)
class Persona:
    """The row of one provider.

    `options` are App's, `tokens` TokenService's; without `tokens` everybody may do everything.
    `service` makes the token service, `parts` other parts with a role and a host of their own.
    `mount` "committed" mounts only blobs that a manifest of the source repository names. `caps` are
    made for a provider, so that they can ask it who a caller is. URLs to the storage are good for
    `signed_for` seconds; `redirects` are the methods on blobs that are sent there. `seed` puts
    content into a new registry.
    """

    source: str
    hosts: Mapping[Role, str]
    options: Mapping[str, Any] = field(default_factory=dict)
    tokens: Mapping[str, Any] | None = None
    service: Callable[..., TokenService] = TokenService
    parts: Callable[[Provider], Mapping[Role, Site]] = lambda provider: {}
    mount: Mount = "any"
    caps: Callable[[Provider], Sequence[Cap]] = lambda provider: ()
    retry_after: RetryAfter = "seconds"
    throttled: str = "too many requests"
    redirects: frozenset[str] = frozenset({"GET"})
    signed_for: float = 300.0
    seed: Callable[[Provider], None] = lambda provider: None
    rewrites: Sequence[Rewrite] = ()
    before: Sequence[Before] = ()
    judges: Sequence[Judge] = ()
    after: Sequence[After] = ()


class Provider(App):
    """A registry that behaves as a row says; `sites` are all parts of it, by role.

    `auth`: who may ask, where that is more than the row's own token service (`aws`).
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
            self.tokens = row.service(users, now=now, wall=wall, **row.tokens)

        caps = row.caps(self)
        self.rates = Rates(
            *caps, now=now, wall=wall, retry_after=row.retry_after, message=row.throttled
        )
        login = Metered(self.rates, auth or self.tokens)
        super().__init__(auth=login, mounts=row.mount != "never", **{**row.options, **options})
        self.sites: dict[Role, Site] = {"registry": self}
        if self.tokens is not None and "token" in row.hosts:
            self.sites["token"] = self.tokens

        self.storage: Storage | None = None
        if "storage" in row.hosts:
            self.storage = self.sites["storage"] = Storage(self, row.signed_for, wall)

        self.sites.update(row.parts(self))
        # The memory of the row's functions between requests, under their own keys.
        self.notes: dict[Any, Any] = {}
        self.place({role: f"https://{host}" for role, host in row.hosts.items()})
        row.seed(self)
        self.journal.clear()

    def place(self, origins: Mapping[Role, str]) -> None:
        """Say where the parts answer, as `SCHEME://HOST[:PORT]`."""
        if self.tokens is not None and "token" in origins:
            self.tokens.realm = origins["token"] + self.tokens.path
        if self.storage is not None:
            self.storage.origin = origins["storage"]

    def kind_of(self, request: Request) -> str:
        """Name a request's kind of path, whatever path a Location has."""
        for rewrite in self.row.rewrites:
            rewrite(self, request)
        return request.kind

    def start(self, request: Request) -> Answer | Reception:
        """Decide as the strict registry, on the rewritten request, and amend the answer."""
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
            return self._with_judges(request, decision)
        return decision

    def _with_judges(self, request: Request, reception: Reception) -> Reception:
        """Let the row's judges see a manifest before it is stored, and amend the answer."""

        def finish(received: int) -> Response:
            answer = self._judgement(request, reception) or reception.finish(received)
            assert isinstance(answer, Response), "a registry in memory has its answer at once"
            return self._after(request, answer)

        return replace(reception, finish=finish)

    def _judgement(self, request: Request, reception: Reception) -> Response | None:
        """Return the first answer of a judge to a manifest that was received."""
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
        is_served = request.kind == "blob" and answer.status in (200, 206)
        if self.storage is not None and is_served and request.method in self.row.redirects:
            where = self.storage.sign(request.method, request.repository, request.reference)
            # Section 1.13: usually 307, to object storage.
            answer = Response(307, [("Location", where)])
        for last in self.row.after:
            answer = last(self, request, answer)
        return answer

    def _without_from(self, request: Request) -> Request:
        """Leave `from` out where no manifest of that repository names the blob (section 4.9)."""
        mount = request.parameter("mount")
        source = request.parameter("from")
        if request.kind != "upload_start" or mount is None or source is None:
            return request
        repository = self.repositories.get(source)
        manifests = repository.manifests.values() if repository is not None else ()
        if any(part["digest"] == mount for manifest in manifests for part in manifest.blobs):
            return request
        query = urlencode(
            [(key, value) for key, value in request.query if key not in ("mount", "from")]
        )
        return replace(request, target=f"{request.path}?{query}")

    def user(self, request: Request) -> str | None:
        """Return who asks; None for the anonymous and where there are no logins."""
        return None if self.tokens is None else self.tokens.user(request)


class Storage(Site):
    """Object storage behind a registry: signed URLs that expire, and no other login.

    Section 1.13; R1 of section 9.2: a client that sends the registry's credential here has leaked
    it, which is noted.
    """

    def __init__(self, registry: App, seconds: float, wall: Callable[[], float]) -> None:
        super().__init__()
        self.origin = ""
        self._seconds = seconds
        self._wall = wall
        self._secret = b"nobody signs for us"
        # What it serves, without the registry's logins, caps and quirks.
        self._vault = App()
        self._vault.repositories = registry.repositories

    def sign(self, method: str, repository: str, digest: str) -> str:
        """Return a URL for one method on one blob, good for a while."""
        expires = str(int(self._wall() + self._seconds))
        path = f"/{quote(repository)}/{quote(digest)}"
        return f"{self.origin}{path}?" + urlencode(
            {"X-Expires": expires, "X-Signature": self._mark(method, path, expires)}
        )

    def _mark(self, method: str, path: str, expires: str) -> str:
        return hmac.new(self._secret, f"{method} {path} {expires}".encode(), "sha256").hexdigest()

    def start(self, request: Request) -> Answer | Reception:
        """Give a blob for a good signature; refuse everything else as storage does, in XML."""
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
