"""One authenticated, admitted, repeated exchange with a registry. Owns: each registry's `Host`,
admission, redirects, repetition (not of what goes with a blob: the transfer does that), how an
answer becomes an error. May not know: what a manifest or a blob is. Invariants: I6 (a credential is
attached hop by hop, to its own origin only, never again once redirects have left it), I7 and I8
(nothing is held while waiting). Follows docs/design.md sections 6, 7 and 9, docs/protocol-facts.md
sections 1.12, 1.13 and 9.2 (R1-R4, R10, R14)."""

from __future__ import annotations

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from functools import cache, partial
from typing import Any, NamedTuple

import anyio

from _regsync import __version__
from _regsync.addresses import Origin, is_private
from _regsync.auth.challenge import words
from _regsync.auth.cloud import Answer, Chain, Clouds, Machine
from _regsync.auth.credentials import Credential, Pair
from _regsync.auth.tokens import Authenticator
from _regsync.config.model import Registry
from _regsync.errors import (
    AuthError,
    ConfigError,
    ConnectFailed,
    Disconnected,
    ProtocolBroken,
    RegistryError,
    Side,
    SyncError,
    TimedOut,
    WireError,
)
from _regsync.net.http1 import Headers, Request, Response, parse_retry_after
from _regsync.net.pool import Lease, Pool, open_stream
from _regsync.net.proxy import proxy_for
from _regsync.net.streams import Stream, Timeouts
from _regsync.net.tls import SHOW, certs_d, make_context
from _regsync.providers import ROWS, api_host
from _regsync.registry.admission import Gate
from _regsync.registry.throttle import (
    ATTEMPTS,
    DEFAULT_CONCURRENCY,
    DISCOVERY,
    LONGEST_WAIT,
    THROTTLED_FOR,
    UNDER_WAY,
    Limit,
    Meter,
    Patience,
    Want,
    parse_quota,
)
from _regsync.text import clean, duration_text, one_line

_REDIRECTS = (301, 302, 303, 307, 308)


_MOST_REDIRECTS = 10


_UNREACHABLE_AFTER = 3


# R14: an error body is read this far; a manifest, a listing or a token has its own limit.
ERROR_BODY = 64 * 1024


_TOKEN_BODY = 1024 * 1024


_QUERY = r"\?\S+"  # of a URL or a path; in linear time


class Edge(NamedTuple):
    """What a run takes from its machine, so that tests can give it others."""

    environ: Mapping[str, str]
    home: str | None
    read: Callable[[str], bytes | None]
    chance: Callable[[], float]
    wall: Callable[[], float]
    log: Callable[..., None]
    timeouts: Timeouts = Timeouts()
    open_files: int = 65536  # how many the process may have; permits are clamped to it

    def __repr__(self) -> str:
        return "<Edge>"  # it holds secrets


class Call(NamedTuple):
    """One request as a registry method words it; `action` is a key of docs/design.md section 9."""

    action: str
    method: str
    path: str
    repository: str
    rights: str = "pull"
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    also: tuple[
        tuple[str, str], ...
    ] = ()  # other repositories that the token must cover: (name, rights)
    origin: Origin | None = (
        None  # where it goes when not to the registry itself: an upload's Location
    )

    def request(self, authorization: str | None) -> Request:
        """Return what goes over the wire; content is never asked for in a coding (R15)."""
        own = (("User-Agent", f"regsync/{__version__}"), ("Accept-Encoding", "identity"))
        login = (("Authorization", authorization),) if authorization is not None else ()
        return Request(self.method, self.path, (*own, *login, *self.headers), self.body)


class Host:
    """A registry as this run knows it under one credential; shared by all aliases of one host:port."""

    def __init__(
        self, transport: Transport, registry: Registry, credential: Credential | Chain | None
    ) -> None:
        self.registry = registry
        self.key = registry.authority
        self.origin = Origin(registry.scheme, api_host(registry.host), registry.port, registry)
        self.authenticator = Authenticator(
            origin=self.origin,
            credential=credential,
            fetch=partial(transport.fetch, self),
            now=anyio.current_time,
            wall=transport.edge.wall,
        )
        self.stopped: SyncError | None = (
            None  # for the rest of a run: circuit breaker (docs/design.md section 9)
        )
        self.reopens = -math.inf  # when a later run may ask it again
        # What could not be asked since an answer came, after which repetitions of one request are
        # one failure.
        self.known = False
        self.unreached = set[str]()
        self.first_contact = anyio.Lock()
        self.used = True  # since the last run began
        self.resumes = True  # until a status GET on the session of a broken upload fails
        told = f"if it serves HTTPS, write {self.origin._replace(scheme='https')} as its url"
        self.secure = told if registry.scheme == "http" else None

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Stop this registry at once when an error in the block says that it is beyond use:
        accounts get locked.
        """
        try:
            yield
        except AuthError as error:
            if error.fatal:
                self.stopped = error.again()
            raise


def resolve_location(base: Origin, path: str, location: str) -> tuple[Origin, str]:
    """Resolve a Location, kept byte for byte (they are signed: docs/protocol-facts.md 1.7);
    ProtocolBroken if unusable.
    """
    from urllib.parse import urljoin, urlsplit

    try:
        whole = re.match(
            "https?://", location, re.IGNORECASE
        )  # joining would lose an empty parameter of its path
        parts = urlsplit(location if whole else urljoin(f"{base}{path}", location))
        port = parts.port or (443 if parts.scheme == "https" else 80)
        host = (parts.hostname or "").lower()
    except ValueError as error:
        raise ProtocolBroken("the Location of the answer is not a URL") from error
    if parts.scheme not in ("http", "https") or not host or parts.username is not None:
        raise ProtocolBroken("the Location of the answer is not an http or https URL")
    # A registry behind a TLS proxy may not know its own scheme (I6).
    own = (base.scheme, parts.scheme, base.host) == ("https", "http", host) and parts.port in (
        None,
        base.port,
    )
    origin = base if own else Origin(parts.scheme, host, port, base.via)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if re.search("[^!-~]", host + target):
        raise ProtocolBroken("the Location of the answer holds characters that no URL may have")
    return origin, target


def check_foreign(base: Origin, origin: Origin) -> None:
    """Refuse another origin that is less safe than the registry (R3, R4); it never gets
    credentials.
    """
    if base.scheme == "https" and origin.scheme != "https":
        raise ProtocolBroken(
            f"the registry sends us from https to http ({clean(origin.host, 100)}), refused"
        )
    if is_private(origin.host) and not is_private(base.host):
        raise ProtocolBroken(
            f"the registry sends us to a private address ({clean(origin.host, 100)}), refused"
        )


def _cloud(name: str) -> Any:
    from _regsync.auth import (
        aws,
        azure,
        google,  # only for those who use a registry of a cloud
    )

    return {"aws": aws, "azure": azure, "google": google}[name]


class Transport:
    """Every exchange of a run, or of the runs of one process, passes here."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.gate = Gate()
        # By host:port: requests of each action, 429s, and what answered the last one, for the
        # display.
        self.requests = defaultdict[str, Counter[str]](Counter)
        self.throttled = Counter[str]()
        self.paused = dict[str, Meter]()
        self._closed: dict[
            Want, tuple[float, SyncError]
        ] = {}  # what is not asked before a time, and why
        # when an answer came last, or bytes moved; how many of blobs in this run
        self.moved = -math.inf
        self.bytes = 0
        self.streams: dict[
            anyio.CancelScope, Lease
        ] = {}  # the blobs under way: who drops one cancels it
        self._hosts: dict[tuple[object, ...], Host] = {}
        self._known: dict[tuple[object, ...], Host] = {}
        # A file is read once a run, and one TLS context serves all who trust and show the same.
        self._read = cache(edge.read)
        self._contexts = cache(partial(make_context, environ=edge.environ))
        self._certs_d = cache(certs_d)
        self.pool = Pool(self._dial, edge.timeouts)
        # What is read for a login is renewed in place by others: never kept.
        self._clouds = Clouds(
            Machine(edge.environ, edge.home, edge.read, edge.wall, partial(self.fetch, None)),
            _cloud,
        )
        # Where a registry sends us is to take us for a stranger (I6), even one of ours: no client
        # certificate.
        self.abroad = Pool(partial(self._dial, abroad=True), edge.timeouts)

    def close(self) -> None:
        for pool in (self.pool, self.abroad):
            pool.close()

    def begin(self, registries: Collection[Registry]) -> None:
        """Begin another run, with the clients of those of its registries that are what they were."""
        hosts = self._hosts
        self._hosts = {}
        self._known = {}
        self.gate.youngest = 0.0
        self.bytes = 0
        for counted in (self.requests, self.throttled):
            counted.clear()
        self._clouds.reload()
        for key, host in hosts.items():
            if host.registry not in registries:
                self.gate.limits.pop(host.key, None)
                self.pool.close(origin=host.origin)
                continue
            if not host.used:
                continue  # its login has been replaced
            self._hosts[key], host.used = host, False
            self._known.setdefault(host.origin[:3], host)
            host.authenticator.begin()
            if host.stopped is not None and host.reopens <= anyio.current_time():
                # It is tried by a first contact that others wait for, and one more failure is
                # enough.
                host.stopped = None
                host.known = False
                host.unreached = set(map(str, range(_UNREACHABLE_AFTER - 1)))

    def renew(self, registries: Collection[Registry]) -> None:
        """Read again what the configuration names; ConfigError when that is unusable: what was read
        before stays.
        """
        self._read.cache_clear()
        kept = self._contexts, self._certs_d
        self._contexts = cache(self._contexts.__wrapped__)
        self._certs_d = cache(certs_d)
        try:
            for registry in registries:
                self.prepare(registry)
        except ConfigError:
            self._contexts, self._certs_d = kept
            raise

    def prepare(self, registry: Registry) -> None:
        """Read what the configuration names for a registry; ConfigError when it is unusable."""
        if registry.scheme == "https":
            self._context(registry)
        proxy_for(
            registry.scheme,
            api_host(registry.host),
            registry.port,
            self.edge.environ,
            registry.proxy,
        )

    def host(self, registry: Registry, repository: str | None = None) -> Host:
        """Return what is known of a registry under a repository's credential; a useless one stops
        this host only.
        """
        edge = self.edge
        stopped = None
        credential = None
        try:
            credential = self._clouds.find(registry, repository, self._read)
        except AuthError as error:
            stopped = error
        # Never another's token, nor another's client certificate.
        way = registry.ca_file, registry.client_cert, registry.client_key, registry.proxy
        key = (registry.authority, stopped.message if stopped else credential, way)
        if key not in self._hosts:
            self._hosts[key] = host = Host(self, registry, credential)
            self._known.setdefault(host.origin[:3], host)
        self._hosts[key].used = True
        self._hosts[key].stopped = stopped or self._hosts[key].stopped
        # A quarter for each side, since more registries than two may be in use; some files are
        # ours.
        cap = min(
            registry.max_concurrent or DEFAULT_CONCURRENCY, max(2, (edge.open_files - 24) // 4)
        )
        row = ROWS[registry.kind]
        fresh = Limit(cap, row.paces, per_project=row.per_project)
        limit = self.gate.limits.setdefault(registry.authority, fresh)
        limit.cap = min(limit.cap, cap) if registry.max_concurrent else limit.cap
        return self._hosts[key]

    def _context(self, registry: Registry | None, *, stranger: bool = False) -> Any:
        """Return what is trusted where a registry's configuration holds; a stranger is shown no
        client certificate.
        """
        if registry is None:
            return self._contexts()
        files = self._certs_d(self.edge.home, registry.authority, registry.port)
        if stranger:
            return self._contexts(
                registry.ca_file, certs_d=tuple(x for x in files if x.endswith(".crt"))
            )
        return self._contexts(registry.ca_file, registry.client_cert, registry.client_key, files)

    async def _dial(self, origin: Origin, *, abroad: bool = False) -> Stream:
        known = self._known.get(origin[:3])
        timeouts = self.edge.timeouts
        registry: Registry | None = known.registry if known and abroad else origin.via
        own = registry.proxy if registry else None
        proxy, decided = proxy_for(*origin[:3], self.edge.environ, own, listed=known is None)
        if origin.scheme == "http" and not (known or abroad):
            proxy = None  # metadata, whatever its name (R20)
        self.edge.log(
            "debug",
            "connect",
            f"connecting to {origin}{f' through {proxy}' if proxy else ''} ({decided})",
        )
        context = self._context(registry, stranger=abroad) if origin.scheme == "https" else None
        around = (
            self._context(registry, stranger=True) if proxy and proxy.scheme == "https" else None
        )
        # What goes when there is a line at last was drawn from the buckets as if it had gone at
        # once.
        limit = self.gate.limits.get(known.key if known else "")
        began = anyio.current_time()
        drawn = [(meter, meter.full) for meter in limit.meters.values()] if limit else []
        try:
            return await open_stream(
                origin, context=context, timeouts=timeouts, proxy=proxy, proxy_context=around
            )
        except ConnectFailed as error:
            if proxy and str(proxy) not in error.message:
                error.message = f"through the proxy {proxy}: {error.message}"
            if proxy and (error.hint is None or "HTTPS_PROXY" in error.hint):
                error.hint = f"this proxy is named by {decided}"
                if not own:
                    error.hint += "; NO_PROXY names hosts to reach without it"
            raise
        finally:
            for meter, full in drawn:
                meter.full = max(meter.full, full + anyio.current_time() - began)

    async def fetch(
        self,
        host: Host | None,
        method: str,
        url: str,
        headers: list[Pair],
        body: bytes,
        seconds: float | None = None,
    ) -> Answer:
        """Ask a login service: no permit (I8), no redirect (R2), a bounded body; `host`: the
        registry that named it.
        """
        origin, target = resolve_location(Origin("https", "invalid.invalid", 443), "/", url)
        if about := host or self._known.get(origin[:3]):
            origin = origin._replace(via=about.registry)
        self.count(origin, "token")
        sent = (("User-Agent", f"regsync/{__version__}"), ("Accept", "application/json"), *headers)
        with anyio.move_on_after(seconds):
            async with self.kept(host, origin) if host else self.pool.lease(origin) as lease:
                response = await lease.exchange(Request(method, target, sent, body))
                # Without the path: on some hosts it is all that a metadata service asks for.
                self.edge.log("trace", "request", f"{method} {origin} -> {response.status}")
                content = await response.read(_TOKEN_BODY)
                return Answer(response.status, dict(response.headers), content)
        raise TimedOut(f"{origin} did not answer within {seconds:g} s")

    def count(self, origin: Origin, action: str) -> None:
        if known := self._known.get(origin[:3]):
            self.requests[known.key][action] += 1

    async def request(
        self, host: Host, call: Call, *, ok: Collection[int], limit: int = ERROR_BODY
    ) -> Response:
        """Do a short exchange, with its body, as docs/design.md section 9 repeats it; SyncError for
        a status not in `ok`.
        """
        patience = Patience(ATTEMPTS)
        while True:
            try:
                async with AsyncExitStack() as first:
                    if not host.known or host.first_contact.locked():
                        # docs/design.md section 6 rule 1: one real request, sent bare; the others
                        # wait for its outcome.
                        await first.enter_async_context(host.first_contact)
                        if host.known:
                            await first.aclose()
                    async with self.opened(host, call, ok) as response:
                        await response.read(limit)
                        return response
            except SyncError as error:
                pause = self.pause_after(error, patience, host, call=call)
                self.edge.log(
                    "debug",
                    "retry",
                    f"{call.method} {host.key}{call.path.partition('?')[0]}: {error}",
                )
            await anyio.sleep(pause)

    def pause_after(
        self, error: SyncError, patience: Patience, *hosts: Host, call: Call | None = None
    ) -> float:
        """Return the seconds to wait before what failed is repeated; raise the error when it is not
        to be.
        """
        error.retries = patience.repeated
        answer = error if isinstance(error, RegistryError) else None
        throttled = answer is not None and answer.status == 429
        asked = (answer and answer.retry_after) or 0.0
        now = anyio.current_time()
        host = hosts[-1 if error.side is Side.TARGET else 0]
        pause = patience.pause(
            now,
            self.edge.chance(),
            throttled=throttled,
            asked=0.0 if answer and answer.paced else asked,
        )
        if answer and answer.retryable and asked > LONGEST_WAIT:
            self._close(host, self.want(host, call) if call else None, answer, asked)
        if pause is None or not error.retryable or any(each.stopped for each in hosts):
            raise error
        return pause

    def _close(self, host: Host, want: Want | None, error: RegistryError, seconds: float) -> None:
        """Ask for nothing more before a time; where only discovery is refused, what was begun may
        go on.
        """
        error.final = True
        moment = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.edge.wall() + seconds))
        error.message += (
            f" (asks to wait {duration_text(seconds)}, until {moment}, longer than a run waits)"
        )
        if want and want.discovers:
            self._closed[want] = anyio.current_time() + seconds, error.again()
        else:
            host.stopped = error.again()
            host.reopens = anyio.current_time() + seconds

    def _check_open(self, host: Host, want: Want) -> None:
        until, closed = self._closed.get(want, (-math.inf, None))
        if error := closed if anyio.current_time() < until else host.stopped:
            raise error.again()

    def want(self, host: Host, call: Call) -> Want:
        """Say what a request draws; a PUT or POST with the body is more than one step."""
        steps = [call.action]
        if (call.action, call.method) == ("upload_body", "PUT"):
            steps = ["upload_finish", "upload_body"]
        if call.action == "upload_start" and call.body:
            steps += ["upload_body", "upload_finish"]
        meters = self.gate.limits[host.key].meters_of(call.repository, *steps)
        return Want(host.key, meters=meters, discovers=call.action in DISCOVERY)

    @asynccontextmanager
    async def metered(
        self, host: Host, call: Call, lease: Lease | None
    ) -> AsyncIterator[Callable[..., None]]:
        """Let a request have what it draws; tell the result of its answer, or nothing when a body
        is well under way.
        """
        want = self.want(host, call)
        work = self.gate.at_work.get()
        within = work is not None and any(each.host == host.key for each in work.wants)
        rank = 0.0 if call.action == "manifest_put" else None  # an image waits for nothing else
        async with (
            nullcontext(work) if work and within else self.gate.admitted((want,), rank) as permit
        ):
            await self.gate.take(permit, want, lease=lease)
            self._check_open(host, want)
            at = [place for place, *_ in permit.entered].index(want.place)
            _, meter, number = permit.entered.pop(at)
            for each in (self.gate.limits[host.key].meters[name] for name in want.meters):
                then, full = permit.drawn[each]  # a PUT goes when its source has answered
                each.full = max(each.full, full + anyio.current_time() - then)
            if call.action == "upload_body":
                meter.inside[number] = anyio.current_time() + UNDER_WAY
                self.gate.wake()
            permit.busy += 1
            try:
                yield partial(self._hear, host, call, meter, number)
            finally:
                permit.busy -= 1
                meter.end(number)
                self.gate.wake()

    def _hear(
        self, host: Host, call: Call, meter: Meter, number: int, answer: Response | None = None
    ) -> None:
        """Let a window, and all who wait for it, know what an answer says about how often to ask."""
        now = anyio.current_time()
        wall = self.edge.wall()
        status = 200
        header = Headers().get
        self.moved = now
        if answer is not None:
            status = answer.status
            header = answer.headers.get
        asked = (
            (status >= 500 or status in (408, 429))
            and parse_retry_after(header("retry-after"), wall)
        ) or 0.0
        meter.end(number, status, now, asked, self.edge.chance())
        if status == 429:
            self.paused[host.key] = meter
        if now - meter.refused_since > THROTTLED_FOR:
            refused = RegistryError("status 429 to everything for 10 minutes", status=429)
            self._close(host, self.want(host, call), refused, LONGEST_WAIT)
        if quota := parse_quota(header, wall):
            action = ROWS[host.registry.kind].quota or call.action
            want = self.want(host, call._replace(action=action))._replace(discovers=True)
            about = self.gate.limits[host.key].meters[want.meters[0]]
            if not about.tell(now, number if about is meter else 0, *quota):
                self._close(host, want, RegistryError("the quota is used up", status=429), quota[2])
        self.gate.wake()

    @asynccontextmanager
    async def opened(
        self, host: Host, call: Call, ok: Collection[int], *, lease: Lease | None = None
    ) -> AsyncIterator[Response]:
        """Do one exchange, with login and redirects, and give its answer unread; SyncError for a
        status not in `ok`.
        """
        for _ in range(2):
            used = await self.login(host, call)
            async with self.metered(host, call, lease) as hear, AsyncExitStack() as held:
                response, moved = await self._follow(host, call, used, lease, held)
                hear(response)
                host.authenticator.proven |= used is not None and response.status not in (401, 403)
                if moved or response.status not in (401, 403):
                    if response.early and response.status in (200, 201):
                        raise Disconnected("the registry answered before the request was sent")
                    await self.expect(host, response, ok)
                    yield response
                    return
                await response.read(ERROR_BODY)
            await self.relearn(host, call, used, response)
        raise self.refusal(host, response)

    async def _follow(
        self, host: Host, call: Call, used: str | None, lease: Lease | None, held: AsyncExitStack
    ) -> tuple[Response, bool]:
        """Return the answer at the end of the redirects of a GET or HEAD (R1, R4), and whether
        there were any.
        """
        base = call.origin or host.origin
        moved = False
        left = base != host.origin
        for _ in range(_MOST_REDIRECTS + 1):
            response = await self._send(
                host, call, await held.enter_async_context(self.kept(host, base, lease)), used
            )
            if response.status == 401 and left:
                raise ProtocolBroken(
                    f"{base.authority}, where the registry sends us, asks for a login"
                )
            if response.status not in _REDIRECTS or call.method not in ("GET", "HEAD"):
                return response, moved
            await held.aclose()  # that connection serves others meanwhile
            if (location := response.headers.get("location")) is None:
                raise ProtocolBroken(f"status {response.status} without a Location")
            origin, path = resolve_location(base, call.path, location)
            check_foreign(base, origin)  # by induction as safe as the registry
            host.authenticator.conceal(path)
            # Once a chain has left the registry it stays without credentials, even when it comes
            # back.
            base = origin
            call = call._replace(path=path)
            moved = True
            left = left or origin != host.origin
            used = None if left else await self.login(host, call)
        raise ProtocolBroken(f"more than {_MOST_REDIRECTS} redirects")

    async def login(self, host: Host, call: Call, *, before_body: bool = False) -> str | None:
        """Return the Authorization header for a call, None for another origin than the registry's
        (I6).
        """
        self._check_open(host, self.want(host, call))
        if call.origin is not None and call.origin != host.origin:
            return None
        with host.judged():
            return await host.authenticator.authorization(
                call.repository, call.rights, call.also, before_body
            )

    async def relearn(self, host: Host, call: Call, used: str | None, refused: Response) -> None:
        """Take in a 401 or 403: return when a new login may do better, else raise the error that it
        is.
        """
        login = host.authenticator
        ways = refused.headers.all("www-authenticate")
        with host.judged():
            # ECR says 403 to a password that is too old; in words only.
            again = (
                await login.refused(ways, used, call.repository, call.rights)
                if refused.status == 401 or b"token has expired" in refused.body
                else login.forbidden(used)
            )
        if not again:
            raise self.refusal(host, refused)

    async def expect(self, host: Host, answer: Response, ok: Collection[int]) -> None:
        if answer.status not in ok:
            await answer.read(ERROR_BODY)
            raise self.refusal(host, answer)

    def refusal(self, host: Host, answer: Response) -> RegistryError:
        """Turn an answer into an error with the registry's own words, cleaned (R18), and count what
        is throttled.
        """
        login = host.authenticator
        status = answer.status
        body = answer.body
        codes, said = words(body)
        # Some servers repeat the request: our secrets go, and what follows a URL's `?` (R10).
        said = one_line(re.sub(_QUERY, "?...", login.redact(said)))
        error = RegistryError(
            f"status {status}" + (f": {said}" if said else ""),
            status=status,
            codes=codes,
            digests=frozenset(
                re.findall("sha(?:256|512):[0-9a-f]{64,128}", body.decode("latin-1"))
            ),
            retry_after=parse_retry_after(answer.headers.get("retry-after"), self.edge.wall()),
        )
        if status == 429:
            self.throttled[host.key] += 1
            error.paced = True
            error.hint = (
                f"who logs in may ask more often: {login.login}" if login.anonymous else None
            )
        elif status in (401, 403):
            error.hint = login.advice
        elif status == 400 and b"SSL certificate" in body:
            error.hint = SHOW  # as nginx words it
        elif status == 400 and b"HTTPS" in (body or b"HTTPS"):
            error.hint = host.secure  # as Go and nginx word it; the answer to a HEAD has no words
        return error

    async def _send(self, host: Host, call: Call, lease: Lease, used: str | None) -> Response:
        self.count(lease.origin, call.action)
        own = lease.origin == host.origin
        seconds = self.edge.timeouts.manifest_put
        try:
            response = await lease.exchange(
                call.request(used), seconds if call.action == "manifest_put" else None
            )
        except WireError as error:
            # A host that takes connections and has never answered is as good as down.
            if own and (
                isinstance(error, ConnectFailed) or (isinstance(error, TimedOut) and not host.known)
            ):
                host.unreached.add(call.path if host.known else str(len(host.unreached)))
                if len(host.unreached) >= _UNREACHABLE_AFTER:
                    host.stopped = error.again()
            elif own and not host.known:
                error.hint = host.secure or error.hint
            raise
        if own:
            host.known = True
            host.unreached = set()
        self.trace(call, lease, response)
        return response

    def trace(self, call: Call, lease: Lease, response: Response) -> None:
        self.edge.log(
            "trace",
            "request",
            f"{call.method} {lease.origin}{call.path.split('?')[0]} -> {response.status}",
        )

    def kept(
        self, host: Host, origin: Origin, lease: Lease | None = None
    ) -> AbstractAsyncContextManager[Lease]:
        """Give the caller's own lease, which outlives this exchange (POST before PUT), or one for
        another origin.
        """
        if lease and lease.origin == origin:
            return nullcontext(lease)
        return (self.pool if origin == host.origin else self.abroad).lease(origin)
