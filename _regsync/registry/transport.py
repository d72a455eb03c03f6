"""One authenticated, admitted, repeated exchange with a registry.

Owns: the registries of a run, the way of a request, redirects, repetition (not of what goes with a
blob: the transfer does that), what answers say about how often to ask, counts per action.
May not know: what a manifest or a blob is.
Invariants: I6 (a credential is attached hop by hop, to its own origin only, never again once
redirects have left it), I7 (a body is sent once), I8 (nothing is held while waiting).
Follows: docs/design.md sections 6, 7 and 9, docs/protocol-facts.md sections 1.12, 1.13 and 9.2 (R1,
R2, R4, R14, R15).
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple

import anyio

from _regsync import __version__
from _regsync.addresses import Origin
from _regsync.auth.cloud import Answer, CloudEnvironment, CloudLogin, CloudModule, Clouds
from _regsync.auth.credentials import Credential, Pair
from _regsync.auth.tokens import LoginRefusals
from _regsync.config.model import Registry
from _regsync.errors import (
    AuthError,
    ConnectFailed,
    Disconnected,
    LoginExpired,
    ProtocolBroken,
    RegistryError,
    Side,
    SyncError,
    TimedOut,
    WireError,
)
from _regsync.net.http1 import Buffers, Header, Pieces, Request, Response, parse_retry_after
from _regsync.net.pool import Lease, Pool
from _regsync.net.streams import Stream, Timeouts
from _regsync.providers import PRODUCTS
from _regsync.registry.admission import Gate, Turn
from _regsync.registry.host import Dialer, Host, RegistryClient
from _regsync.registry.outage import Patience, Reach, is_gateway_failure
from _regsync.registry.recovery import Peer, Recovery
from _regsync.registry.redirects import check_foreign, resolve_location
from _regsync.registry.throttle import (
    ATTEMPTS,
    DEFAULT_CONCURRENCY,
    DISCOVERY,
    LARGE_BODY,
    LONGEST_WAIT,
    THROTTLED_FOR,
    UNDER_WAY,
    Demand,
    Meter,
    RegistryLimits,
    Remaining,
    RetryBudget,
    parse_quota,
)
from _regsync.text import duration_text

# R4: how many redirects are followed.
_MOST_REDIRECTS = 10
_REDIRECTS = (301, 302, 303, 307, 308)

# R14: an error's body is read so far, in bytes. A manifest and a listing have limits of their own.
ERROR_BODY = 64 * 1024
_TOKEN_BODY = 1024 * 1024

# Worker threads that move bodies at a time. Each keeps a processor busy.
_MOVERS = 4

# Files that a process needs for itself, beside those of its connections.
_OWN_FILES = 24

_USER_AGENT: Header = ("User-Agent", f"regsync/{__version__}")
_EVERY_REQUEST: tuple[Header, ...] = (_USER_AGENT, ("Accept-Encoding", "identity"))

# The rank of what everybody else may wait for: an image waits for nothing but its manifest.
_FIRST = 0.0


class Machine(NamedTuple):
    """The parts of its machine that a run uses; tests replace them."""

    environ: Mapping[str, str]
    home: str | None
    read: Callable[[str], bytes | None]
    chance: Callable[[], float]
    wall: Callable[[], float]
    log: Callable[..., None]
    timeouts: Timeouts = Timeouts()
    open_files: int = 65536  # how many the process may have; permits are clamped to it
    traces: bool = True  # whether `log` shows lines of the level "trace", one for each request

    def __repr__(self) -> str:
        return "<Machine>"  # it holds secrets


class Call(NamedTuple):
    """One request as a registry's endpoint words it."""

    action: str  # a key of docs/design.md section 9
    method: str
    path: str
    repository: str
    rights: str = "pull"
    headers: tuple[Header, ...] = ()
    body: bytes = b""

    # Other repositories that the token must cover: (name, rights).
    also: tuple[tuple[str, str], ...] = ()

    # Where it goes when not to the registry itself: an upload's Location.
    origin: Origin | None = None

    # Whether it needs a connection that no other request has used, because a body that came over
    # another one was wrong.
    is_fresh: bool = False

    @property
    def shown_path(self) -> str:
        """The path without its query, which may hold signatures."""
        return self.path.partition("?")[0]

    def request(self, authorization: str | None) -> Request:
        """Return the request to send; it asks for content without any coding (R15)."""
        headers = (*_EVERY_REQUEST, *self.headers)
        if authorization is not None:
            headers = (*headers, ("Authorization", authorization))
        return Request(self.method, self.path, headers, self.body)


class Body(Pieces):
    """An upload's body on its way. It says when it begins and when it is well under way, and counts
    its bytes in the transport.
    """

    def __init__(
        self, pieces: Pieces, seconds: float, on_begin: Callable[[], None], transport: Transport
    ) -> None:
        self.length = pieces.length
        self.seconds = seconds  # for the answer, after the last piece
        self.authorization: str | None = None  # with which it was sent

        # Called for each piece that follows LARGE_BODY bytes.
        self.on_under_way: Callable[[], None] = lambda: None

        self.has_begun = False  # a piece of it was asked for

        self._pieces = pieces
        self._on_begin = on_begin
        self._transport = transport
        self._taken = 0

    async def next(self) -> memoryview:
        """Return the next piece, as Pieces do."""
        if not self.has_begun:
            self.has_begun = True
            self._on_begin()
        if self._taken >= LARGE_BODY:
            self.on_under_way()
        piece = await self._pieces.next()
        self._taken += len(piece)
        self._transport.count_sent(len(piece))
        return piece

    def write_to(self, socket: int) -> int:
        """Move what comes next from a file into a socket, as Pieces do."""
        sent = self._pieces.write_to(socket)
        if sent and self._taken >= LARGE_BODY:
            self.on_under_way()
        self._taken += sent
        self._transport.count_sent(sent)
        return sent


class _ClientKey(NamedTuple):
    """What requests have in common that share a client: no other gets its tokens, nor shows its
    certificate.
    """

    authority: str
    credential: Credential | CloudLogin | None
    failure: str  # why the credential cannot be had, else ""
    ca_file: str | None
    client_cert: str | None
    client_key: str | None
    proxy: str | None

    def __repr__(self) -> str:
        # A proxy's URL may hold a login.
        return f"_ClientKey(authority={self.authority!r})"


class _Hop(NamedTuple):
    """One request of a chain of redirects."""

    call: Call
    origin: Origin
    peer: Peer
    authorization: str | None
    number: int = 0  # of redirects before it
    has_left: bool = False  # whether the chain has been elsewhere than at the registry


def _cloud(name: str) -> CloudModule:
    """Import what only those need who use a registry of this cloud."""
    if name == "aws":
        from _regsync.auth import aws

        return aws
    if name == "azure":
        from _regsync.auth import azure

        return azure
    from _regsync.auth import google

    return google


class Transport:
    """Every exchange of a run, or of the runs of one process, passes here."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.gate = Gate()
        self.buffers = Buffers()
        # The worker threads that move bodies.
        self.movers = anyio.CapacityLimiter(_MOVERS)

        # By host:port, for the report and the display: requests of each action, 429s, the meter
        # of the request that was refused last.
        self.requests: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.throttled: Counter[str] = Counter()
        self.throttled_meters: dict[str, Meter] = {}

        # When an answer came last, or bytes moved.
        self.last_progress = -math.inf
        # Bytes of blobs in this run: read from sources, and sent to targets.
        self.blob_bytes = 0
        self.bytes_sent = 0

        # The clients of the registries of this run; and the first of those at each address.
        self._clients: dict[_ClientKey, RegistryClient] = {}
        self._first_at: dict[tuple[str, str, int], RegistryClient] = {}

        timeouts = machine.timeouts
        self.recovery = Recovery(
            patience=Patience(timeouts.outage, timeouts.first_answer, timeouts.probe),
            chance=machine.chance,
            log=machine.log,
            ping=self._ping,
            on_outage=self._on_outage,
            on_back=self._on_back,
        )

        # By the demand of a refused request of discovery: the error of all that are like it, and
        # the time until which it holds.
        self._refused_discovery: dict[Demand, tuple[SyncError, float]] = {}

        self._dialer = Dialer(
            environ=machine.environ,
            home=machine.home,
            read=machine.read,
            log=machine.log,
            timeouts=machine.timeouts,
        )
        self.pool = Pool(self._dial, machine.timeouts)

        # For other hosts that a registry names or redirects to: they get none of its credentials (I6).
        self.foreign_pool = Pool(partial(self._dial, is_foreign=True), machine.timeouts)

        # Other programs renew files with logins in place, so their contents are never kept.
        fetch = partial(self.fetch, None)
        identity = CloudEnvironment(
            machine.environ, machine.home, machine.read, machine.wall, fetch
        )
        self._clouds = Clouds(identity, _cloud)

    # The life of a run.

    def close(self) -> None:
        for pool in (self.pool, self.foreign_pool):
            pool.close()

    def count_read(self, count: int) -> None:
        """Count bytes of a blob that came from a source."""
        self.last_progress = anyio.current_time()
        self.blob_bytes += count

    def count_sent(self, count: int) -> None:
        """Count bytes of a blob that went to a target."""
        self.bytes_sent += count

    def begin(self, registries: Collection[Registry]) -> None:
        """Begin another run, with the clients of those of its registries that are what they were."""
        clients = self._clients
        self._clients = {}
        self._first_at = {}
        self.gate.youngest_rank = 0.0
        self.blob_bytes = 0
        self.bytes_sent = 0
        self.requests.clear()
        self.throttled.clear()
        self._clouds.reload()

        now = anyio.current_time()
        for key, client in clients.items():
            if client.registry not in registries:
                self.gate.limits.pop(client.key, None)
                self.pool.close(origin=client.origin)
            elif client.is_used:  # else its login has been replaced
                client.begin_run(now)
                self._add_client(key, client)
        self.recovery.begin_run()

    def renew(self, registries: Collection[Registry]) -> None:
        """Read again what the configuration names; ConfigError when that is unusable: what was read
        before stays.
        """
        self._dialer.renew(registries)

    def prepare(self, registry: Registry) -> None:
        """Read what the configuration names for a registry; ConfigError when it is unusable."""
        self._dialer.prepare(registry)

    def host(self, registry: Registry, repository: str | None = None) -> RegistryClient:
        """Return the client for a registry under a repository's credential.

        Where the credential cannot be had, a client is returned whose requests all fail with the
        reason: repositories with another credential are copied.
        """
        credential: Credential | CloudLogin | None = None
        failure: AuthError | None = None
        try:
            credential = self._clouds.find(registry, repository, self._dialer.read)
        except AuthError as error:
            failure = error

        key = _ClientKey(
            registry.authority,
            credential,
            failure.message if failure else "",
            registry.ca_file,
            registry.client_cert,
            registry.client_key,
            registry.proxy,
        )
        client = self._clients.get(key)
        if client is None:
            client = RegistryClient(
                registry,
                credential,
                peers=self.recovery.peer,
                fetch=self.fetch,
                wall=self.machine.wall,
            )
            self._add_client(key, client)
        client.is_used = True
        if failure is not None:
            client.stop(failure)
        self._limit_permits(registry)
        return client

    def _add_client(self, key: _ClientKey, client: RegistryClient) -> None:
        self._clients[key] = client
        self._first_at.setdefault(client.origin.address, client)

    def _limit_permits(self, registry: Registry) -> None:
        """Bound the requests under way at a registry's host:port. Where several registries of the
        configuration are at one, the smallest `max_concurrent` holds.
        """
        # A quarter of the open files for each side, since more registries than two may be in use.
        most = max(2, (self.machine.open_files - _OWN_FILES) // 4)
        cap = min(registry.max_concurrent or DEFAULT_CONCURRENCY, most)
        product = PRODUCTS[registry.kind]
        limit = self.gate.limits.get(registry.authority)
        if limit is None:
            limit = RegistryLimits(cap, product.paces, per_project=product.per_project)
            self.gate.limits[registry.authority] = limit
        elif registry.max_concurrent:
            limit.cap = min(limit.cap, cap)

    async def _dial(self, origin: Origin, *, is_foreign: bool = False) -> Stream:
        client = self._first_at.get(origin.address)
        registry = client.registry if client else None
        return await self._dialer.dial(origin, registry, is_foreign=is_foreign)

    # The way of a request.

    async def request(
        self, host: RegistryClient, call: Call, *, ok: Collection[int], limit: int = ERROR_BODY
    ) -> Response:
        """Do a short exchange, with its body of at most `limit` bytes, as often as docs/design.md
        section 9 says; SyncError for a status not in `ok`.
        """
        budget = RetryBudget(ATTEMPTS)
        while True:
            try:
                if host.is_first_contact_done:
                    return await self._answer(host, call, ok, limit)
                return await self._first_answer(host, call, ok, limit)
            except SyncError as error:
                failure = error
            finally:
                self.recovery.end_attempt()
            pause = self.pause_after(failure, budget, host, call=call)
            text = f"{call.method} {host.key}{call.shown_path}: {failure}"
            self.machine.log("debug", "retry", text)
            await self.rest(failure, pause)

    async def _first_answer(
        self, host: RegistryClient, call: Call, ok: Collection[int], limit: int
    ) -> Response:
        """Rule 1: one real request goes to a new host, and the others wait for its outcome."""
        async with host.first_contact:
            if not host.is_first_contact_done:
                try:
                    return await self._answer(host, call, ok, limit)
                finally:
                    host.is_first_contact_done = host.has_answered
        return await self._answer(host, call, ok, limit)

    async def _answer(
        self, host: RegistryClient, call: Call, ok: Collection[int], limit: int
    ) -> Response:
        async with await self.exchange(host, call, ok) as response:
            await response.read(limit)
            return response

    async def exchange(
        self,
        host: RegistryClient,
        call: Call,
        ok: Collection[int],
        *,
        lease: Lease | None = None,
        body: Body | None = None,
    ) -> Turn:
        """Do one exchange and return its turn, which gives the answer unread; SyncError for a status
        not in `ok`.

        A request gets its login, then its turn (permit, place in a window, token of a bucket), then
        a connection, then its answer. `lease` is the caller's own connection, which outlives this
        exchange (a POST before its PUT). With a `body` nothing is repeated (I7): a refused login,
        and a success before the last byte, are the caller's to judge.
        """
        want = self.demand_of(host, call)
        rank = _FIRST if call.action == "manifest_put" else None
        refusals = LoginRefusals()
        while True:
            self._check_not_stopped(host, want)
            if host.peer.outage.reach is not Reach.UP:
                self._check_reach(host, host.peer, can_repeat=body is None)
            authorization = await self.login(host, call, before_body=body is not None)
            origin = call.origin or host.origin
            peer = host.peer if origin == host.origin else self.recovery.peer(origin)
            hop = _Hop(call, origin, peer, authorization, has_left=origin != host.origin)

            turn = await self.gate.begin_request(want, rank, lease)
            try:
                if body is not None:
                    self._watch_body(call, turn, body, authorization)
                response = await self._send(host, want, hop, turn, lease, body)
                while response.status in _REDIRECTS and call.method in ("GET", "HEAD"):
                    await turn.return_connection()  # its connection serves others meanwhile
                    hop = self._next_hop(host, hop, response)
                    turn.began = anyio.current_time()
                    response = await self._send(host, want, hop, turn, lease, body)
                self._record_pace(host, call, turn, response)

                is_refused = response.status in (401, 403)
                # A busy server has not looked at the login.
                is_let_in = not is_refused and response.status < 500 and response.status != 429
                if is_let_in and authorization is not None:
                    host.authenticator.record_success(authorization, call.repository, call.method)

                may_log_in_again = is_refused and body is None and not hop.has_left
                if not may_log_in_again:
                    if response.early and body is None and response.status in (200, 201):
                        raise Disconnected("the registry answered before the request was sent")
                    await self.raise_unless(host, response, ok, hop.peer)
                    turn.response = response
                    return turn
                await response.read(ERROR_BODY)
            except LoginExpired:
                if body is not None and body.has_begun:
                    raise
                continue
            finally:
                # Its caller ends the turn that is returned. Every other one ends here: nobody waits
                # for another login while holding a permit (I8).
                if turn.response is None:
                    await turn.end()
            await self.refresh_login(host, call, hop.authorization, response, refusals)

    async def _send(
        self,
        host: RegistryClient,
        want: Demand,
        hop: _Hop,
        turn: Turn,
        lease: Lease | None,
        body: Body | None,
    ) -> Response:
        """Send one request of a chain, over the caller's `lease` where that leads there, and return
        its answer.
        """
        call = hop.call
        self._check_serves(host, want, hop.authorization)

        is_home = hop.origin == host.origin
        if lease is None or lease.origin != hop.origin:
            pool = self.pool if is_home else self.foreign_pool
            lease = pool.lease(hop.origin, is_fresh=call.is_fresh)
            turn.connection = lease

        seconds: float | None = None  # for the answer: the policy's
        if body is not None:
            seconds = body.seconds
        elif call.action == "manifest_put":
            seconds = self.machine.timeouts.manifest_put

        is_probe = hop.peer.outage.reach is not Reach.UP
        if is_probe:  # every other request to a host that is away ends here
            self._check_reach(host, hop.peer, can_repeat=body is None)

        if hop.number == 0:
            self.requests[host.key][call.action] += 1
        else:
            self._count(hop.origin, call.action)
        try:
            answering = lease.exchange(
                call.request(hop.authorization),
                seconds,
                body,
                confirm=partial(self._check_serves, host, want, hop.authorization),
                now=turn.began,
            )
            if is_probe:
                answering = self.recovery.await_probe(hop.peer, answering)
            response = await answering
        except WireError as error:
            if not host.has_answered and not isinstance(error, ConnectFailed | TimedOut):
                error.hint = host.https_hint or error.hint
            if error.side is None:  # else the source of the body has failed
                self.recovery.record_failure(hop.peer, error, turn.began, counts=body is None)
            raise

        retry_after = response.headers.get("retry-after")
        self._record_reach(
            hop.peer, response.status, retry_after, response.came_at, counts=body is None
        )
        if is_home:
            host.has_answered = True
        if self.machine.traces:
            trace = f"{call.method} {hop.peer.url}{call.shown_path} -> {response.status}"
            self.machine.log("trace", "request", trace)
        if response.status == 401 and hop.has_left and body is None:
            raise ProtocolBroken(
                f"{hop.origin.authority}, to which the registry redirects, asks for a login"
            )
        return response

    def _next_hop(self, host: RegistryClient, hop: _Hop, response: Response) -> _Hop:
        """Return where a redirect leads (R1, R4); ProtocolBroken where nobody should go."""
        location = response.headers.get("location")
        if location is None:
            raise ProtocolBroken(f"status {response.status} without a Location")
        if hop.number == _MOST_REDIRECTS:
            raise ProtocolBroken(f"more than {_MOST_REDIRECTS} redirects")
        origin, path = resolve_location(hop.origin, hop.call.path, location)
        check_foreign(hop.origin, origin)  # by induction as safe as the registry
        host.authenticator.treat_as_secret(path)

        # A chain that has left the registry stays without credentials, even when it comes back.
        call = hop.call._replace(path=path)
        has_left = hop.has_left or origin != host.origin
        authorization = None if has_left else hop.authorization
        return _Hop(
            call, origin, self.recovery.peer(origin), authorization, hop.number + 1, has_left
        )

    # Hosts that are away.

    def _check_reach(self, host: RegistryClient, peer: Peer, *, can_repeat: bool) -> None:
        """Raise the error of a host that is away, except to its probe. A registry stops with what
        it needs: its token service, its store of blobs.
        """
        try:
            self.recovery.check(peer, can_repeat=can_repeat)
        except SyncError as error:
            if not error.retryable and host.stop_error is None:
                host.stop(error)
            raise

    def _record_reach(
        self, peer: Peer, status: int, retry_after: str | None, now: float, *, counts: bool = True
    ) -> None:
        """Note by an answer's head whether its host is there or away, for those who wait for it."""
        if not is_gateway_failure(status, retry_after):
            self.recovery.record_answer(peer, now)
        elif counts:
            failure = RegistryError(f"status {status}", status=status)
            self.recovery.record_failure(peer, failure, now)

    async def _ping(self, peer: Peer) -> None:
        """Send a request to a host that is away, to see whether it answers again."""
        origin = peer.origin
        self._count(origin, "probe")
        request = Request("GET", "/v2/", (_USER_AGENT,))
        is_registry = origin.address in self._first_at
        pool = self.pool if is_registry else self.foreign_pool
        began = anyio.current_time()
        try:
            async with pool.lease(origin) as lease:
                response = await self.recovery.await_probe(peer, lease.exchange(request))
        except WireError as error:
            self.recovery.record_failure(peer, error, began)
        else:
            retry_after = response.headers.get("retry-after")
            self._record_reach(peer, response.status, retry_after, response.came_at)

    def _on_outage(self, peer: Peer) -> None:
        """Close the connections to a host that is away."""
        for pool in (self.pool, self.foreign_pool):
            pool.close(peer.origin)

    def _on_back(self, peer: Peer) -> None:
        """Let the windows of a registry that is back begin again small."""
        client = self._first_at.get(peer.origin.address)
        if client is not None:
            self.gate.limits[client.key].narrow_windows()
            self.gate.wake()

    async def rest(self, error: SyncError, seconds: float, *, can_repeat: bool = True) -> None:
        """Wait before what failed is repeated: until its host is back, or else for some `seconds`.

        Raises `error` when the host is given up. `can_repeat`: the next request of this task may be
        the probe of the host, because it can be sent again.
        """
        if error.unreachable_peer is None:
            await anyio.sleep(seconds)
        else:
            await self.recovery.wait(error, can_repeat=can_repeat)

    def demand_of(self, host: Host, call: Call) -> Demand:
        """Return the limits that a request counts against; a PUT with the body is two steps."""
        is_whole_body = call.action == "upload_body" and call.method == "PUT"
        steps = ("upload_finish", "upload_body") if is_whole_body else (call.action,)
        meters = self.gate.limits[host.key].meters_of(call.repository, *steps)
        return Demand(host.key, meters=meters, is_discovery=call.action in DISCOVERY)

    def _watch_body(self, call: Call, turn: Turn, body: Body, authorization: str | None) -> None:
        """Give a body's window back when it is well under way (docs/design.md section 9)."""
        if call.action == "upload_body":
            turn.presume_success_at(turn.began + UNDER_WAY)
        body.authorization = authorization
        body.on_under_way = partial(self._record_under_way, turn)

    # Logins.

    def _check_serves(self, host: RegistryClient, want: Demand, authorization: str | None) -> None:
        """Raise why a request that has waited is not sent with its login: that was refused meanwhile,
        or the registry has stopped.
        """
        self._check_not_stopped(host, want)
        if authorization in host.authenticator.refused:
            raise LoginExpired("the login was refused to another request")

    async def login(
        self, host: RegistryClient, call: Call, *, before_body: bool = False
    ) -> str | None:
        """Return the Authorization header for a call, None for another origin than the registry's
        (I6).
        """
        if call.origin is not None and call.origin != host.origin:
            return None
        try:
            return await host.authenticator.authorization(
                call.repository, call.rights, call.also, before_body
            )
        except AuthError as error:
            if error.fatal:
                host.stop(error)  # one more attempt could lock the account
            raise
        except RegistryError as error:
            peer = host.token_peer
            if peer is not None and is_gateway_failure(error.status, error.retry_after):
                error.unreachable_peer = peer if peer.outage.is_on else None
            raise

    async def refresh_login(
        self,
        host: RegistryClient,
        call: Call,
        used: str | None,
        refused: Response,
        refusals: LoginRefusals,
    ) -> None:
        """Give a 401 or 403 to the authenticator. Return when the call may be repeated with a new
        Authorization header; otherwise raise the refusal as an error.

        `used` is the Authorization header of the refused request, `refusals` counts its refusals so
        far. The body of `refused` has been read.
        """
        authenticator = host.authenticator
        # ECR answers an expired password with 403, not 401. Only the text of the body tells the two
        # meanings of its 403 apart.
        is_unauthorized = refused.status == 401 or b"token has expired" in refused.body
        try:
            if is_unauthorized:
                challenges = refused.headers.all("www-authenticate")
                refusal = await authenticator.on_unauthorized(
                    challenges, used, call.repository, call.rights, call.method
                )
            else:
                refusal = authenticator.on_forbidden(used)
        except AuthError as error:
            if error.fatal:
                host.stop(error)  # one more attempt could lock the account
            raise
        if not refusals.may_repeat(refusal):
            raise self.error_from(host, refused)

    async def fetch(
        self,
        host: RegistryClient | None,
        method: str,
        url: str,
        headers: list[Pair],
        body: bytes,
        seconds: float | None = None,
        confirm: Callable[[], None] | None = None,
    ) -> Answer:
        """Ask a login service: no permit (I8), no redirect (R2), a bounded body, within `seconds`.

        `host` is the registry that named it, None for a cloud's own. `confirm` is that of
        Lease.exchange.
        """
        origin, target = resolve_location(Origin("https", "invalid.invalid", 443), "/", url)
        client = host or self._first_at.get(origin.address)
        if client is not None:
            origin = origin._replace(via=client.registry)
        self._count(origin, "token")
        own = (_USER_AGENT, ("Accept", "application/json"))
        request = Request(method, target, (*own, *headers), body)
        is_foreign = host is not None and origin != host.origin
        lease = (self.foreign_pool if is_foreign else self.pool).lease(origin)
        if host is None:
            return await self._fetch_once(lease, request, seconds, confirm)

        # A cloud's own services are repeated by those who know them. A registry's are waited for.
        peer = self.recovery.peer(origin)
        host.token_peer = peer
        self._check_reach(host, peer, can_repeat=True)
        began = anyio.current_time()
        try:
            answering = self._fetch_once(lease, request, seconds, confirm)
            if self.recovery.is_probing(peer):
                answering = self.recovery.await_probe(peer, answering)
            answer = await answering
        except WireError as error:
            self.recovery.record_failure(peer, error, began)
            raise
        retry_after = answer.headers.get("retry-after")
        self._record_reach(peer, answer.status, retry_after, anyio.current_time())
        return answer

    async def _fetch_once(
        self,
        lease: Lease,
        request: Request,
        seconds: float | None,
        confirm: Callable[[], None] | None,
    ) -> Answer:
        """Make a request of `fetch`; TimedOut after `seconds`. With None only the time-outs of the
        connection apply.
        """
        with anyio.move_on_after(seconds):
            async with lease:
                response = await lease.exchange(request, confirm=confirm)
                # The path is not logged, because it may be a secret: some metadata services give
                # credentials to everybody who knows it.
                trace = f"{request.method} {lease.origin} -> {response.status}"
                self.machine.log("trace", "request", trace)
                content = await response.read(_TOKEN_BODY)
                return Answer(response.status, dict(response.headers), content)
        assert seconds is not None  # without it nothing ends the block before its return
        raise TimedOut(f"{lease.origin} did not answer within {seconds:g} s")

    # What answers say about how often to ask.

    def _count(self, origin: Origin, action: str) -> None:
        """Count a request to an origin, if it is one of a registry of this run."""
        client = self._first_at.get(origin.address)
        if client is not None:
            self.requests[client.key][action] += 1

    def _record_under_way(self, turn: Turn) -> None:
        """A body counts as a success before its answer."""
        self.last_progress = anyio.current_time()
        if turn.is_in_window():
            turn.meter.end(turn.number, 200)
            self.gate.on_window_change()

    def _record_pace(
        self, host: RegistryClient, call: Call, turn: Turn, response: Response
    ) -> None:
        """Let a window, and all who wait for it, know what an answer says about how often to ask."""
        now = response.came_at
        wall = self.machine.wall()
        status = response.status
        header = response.headers.get
        self.last_progress = now

        retry_after = 0.0
        if status >= 500 or status in (408, 429):
            retry_after = parse_retry_after(header("retry-after"), wall) or 0.0
        chance = 0.0
        if status == 429:
            chance = self.machine.chance()
            self.throttled_meters[host.key] = turn.meter
        turn.meter.end(turn.number, status, now, retry_after, chance)
        if now - turn.meter.window.refused_since > THROTTLED_FOR:
            refused = RegistryError("status 429 to every request for 10 minutes", status=429)
            self._ask_no_more(host, self.demand_of(host, call), refused, LONGEST_WAIT)

        remaining = parse_quota(header, wall)
        if remaining is not None:
            self._record_quota(host, call, turn, response, remaining)
        self.gate.on_window_change()

    def _record_quota(
        self, host: RegistryClient, call: Call, turn: Turn, response: Response, remaining: Remaining
    ) -> None:
        """Obey a quota. It is about discovery, and at some registries about one action of it."""
        action = PRODUCTS[host.registry.kind].quota_action or call.action
        want = self.demand_of(host, call._replace(action=action))._replace(is_discovery=True)
        meter = self.gate.limits[host.key].meters[want.meters[0]]
        number = turn.number if meter is turn.meter else 0
        if not meter.update_quota(response.came_at, number, remaining):
            used_up = RegistryError("the quota is used up", status=429)
            self._ask_no_more(host, want, used_up, remaining.seconds)

    # Errors, and what is done about them.

    def pause_after(
        self, error: SyncError, budget: RetryBudget, *hosts: Host, call: Call | None = None
    ) -> float:
        """Return the seconds to `rest` before what failed is repeated; raise the error when it is
        not to be. `hosts` are those that the work needs: source, target.
        """
        is_stopped = any(host.stop_error for host in hosts)
        if isinstance(error, LoginExpired) and not is_stopped:
            return 0.0  # the upload bounds how often its login is renewed
        if error.unreachable_peer is not None and error.retryable and not is_stopped:
            error.retries = budget.retries
            return 0.0
        answer = error if isinstance(error, RegistryError) else None
        asked = 0.0
        if answer is not None and answer.retry_after is not None:
            asked = answer.retry_after

        error.retries = budget.retries
        pause = budget.take_attempt(
            anyio.current_time(),
            self.machine.chance(),
            is_throttled=answer is not None and answer.status == 429,
            retry_after=0.0 if answer is not None and answer.paced else asked,
        )
        if answer is not None and answer.retryable and asked > LONGEST_WAIT:
            host = hosts[-1] if error.side is Side.TARGET else hosts[0]
            want = None if call is None else self.demand_of(host, call)
            self._ask_no_more(host, want, answer, asked)
        if pause is None or not error.retryable or is_stopped:
            raise error
        return pause

    def _ask_no_more(
        self, host: Host, want: Demand | None, error: RegistryError, seconds: float
    ) -> None:
        """Make an error final that asks for a longer wait than a run makes, and send nothing more
        until that time. Where a listing or a HEAD was refused, only those end: images whose copying
        has begun are finished.
        """
        moment = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.machine.wall() + seconds))
        error.message += (
            f" (asks to wait {duration_text(seconds)}, until {moment}: longer than a run waits)"
        )
        error.final = True

        until = anyio.current_time() + seconds
        if want is not None and want.is_discovery:
            self._refused_discovery[want] = (error.without_place(), until)
        else:
            host.stop(error, until)

    def _check_not_stopped(self, host: RegistryClient, want: Demand) -> None:
        """Raise the error for which nothing more is asked of a registry, or of discovery there."""
        if want in self._refused_discovery:
            error, until = self._refused_discovery[want]
            if anyio.current_time() < until:
                raise error.without_place()
        if host.stop_error is not None:
            raise host.stop_error.without_place()

    async def raise_unless(
        self, host: RegistryClient, answer: Response, ok: Collection[int], peer: Peer | None = None
    ) -> None:
        """Raise the error of an answer whose status is not in `ok`. `peer`: the host that answered, if
        it is not the registry itself.
        """
        if answer.status in ok:
            return
        await answer.read(ERROR_BODY)
        error = self.error_from(host, answer)
        peer = peer or host.peer
        if peer.outage.is_on and is_gateway_failure(error.status, error.retry_after):
            error.unreachable_peer = peer
        raise error

    def error_from(self, host: RegistryClient, answer: Response) -> RegistryError:
        """Turn an answer into an error, and count what is throttled."""
        if answer.status == 429:
            self.throttled[host.key] += 1
        return host.error_of(answer, self.machine.wall())
