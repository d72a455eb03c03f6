"""Send requests to registries: log in, wait for a turn, follow redirects, retry.

Owns: the registries of a run, the steps of a request, redirects, retries (except for the transfer
of a blob, which retries as a whole), the limits that responses report, counts per action.
May not know: what a manifest or a blob is.
Invariants: I6 (a credential is sent to its own origin only, and not again after a redirect to
another origin), I7 (a body is sent once), I8 (a waiting request holds nothing).
Follows: docs/design.md sections 6, 7 and 9, docs/protocol-facts.md sections 1.12, 1.13 and 9.2 (R1,
R2, R4, R14, R15).
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import NamedTuple

import anyio

from _regsync import __version__, edge
from _regsync.addresses import Origin
from _regsync.auth.cloud import Answer, CloudEnvironment, CloudLogin, CloudModule, Clouds
from _regsync.auth.credentials import Credential, Pair
from _regsync.auth.tokens import Refusal, may_repeat_after
from _regsync.config import Registry
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
from _regsync.net.wire import Header, Pieces, Pool, Request, Response, parse_retry_after
from _regsync.providers import DIALECTS
from _regsync.registry.admission import Gate, Turn
from _regsync.registry.host import Dialer, Host, Machine, RegistryClient
from _regsync.registry.lease import Lease
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

# How many redirects of one request are followed (R4).
_MOST_REDIRECTS = 10
_REDIRECTS = (301, 302, 303, 307, 308)

# How many bytes of an error's body are read (R14). Manifests and listings have limits of their own.
ERROR_BODY = 64 * 1024
_TOKEN_BODY = 1024 * 1024

# How many files the process needs besides those of its connections.
_OWN_FILES = 24

_USER_AGENT: Header = ("User-Agent", f"regsync/{__version__}")
_EVERY_REQUEST: tuple[Header, ...] = (_USER_AGENT, ("Accept-Encoding", "identity"))

# The rank of a request that is admitted before all others. A PUT of a manifest has it: it is the
# last request of an image, and other images may wait for that image.
_FIRST = 0.0


class Call(NamedTuple):
    """One request to an endpoint of a registry, without login and origin."""

    action: str  # what the request counts as, a key of the table in docs/design.md section 9
    method: str
    path: str
    repository: str
    rights: str = "pull"  # which rights to `repository` its token needs
    headers: tuple[Header, ...] = ()
    body: bytes = b""

    # Other repositories that the token must cover too: name and rights.
    other_rights: tuple[tuple[str, str], ...] = ()

    # The origin of an upload's Location. None: the request goes to the registry itself.
    origin: Origin | None = None

    # Whether the request must use a new connection, because a reused one has delivered wrong bytes.
    is_fresh: bool = False

    # How long the response may take after the request was sent. None: the default.
    seconds: float | None = None

    @property
    def shown_path(self) -> str:
        """The path without its query, which may contain signatures."""
        return self.path.partition("?")[0]

    def request(self, authorization: str | None) -> Request:
        """Return the request as it is sent. It asks for content without a coding (R15)."""
        headers = (*_EVERY_REQUEST, *self.headers)
        if authorization is not None:
            headers = (*headers, ("Authorization", authorization))
        return Request(self.method, self.path, headers, self.body)


class Body(Pieces):
    """The body of an upload. It reports when it begins and when much of it has been sent, and
    counts its bytes in the transport.
    """

    def __init__(self, pieces: Pieces, on_begin: Callable[[], None], transport: Transport) -> None:
        self.length = pieces.length
        self.authorization: str | None = None  # the header with which it was sent

        # Called before each piece after the first LARGE_BODY bytes, which have been sent then.
        self.on_under_way: Callable[[], None] = lambda: None

        self._pieces = pieces
        self._on_begin = on_begin  # called before the first piece is read
        self._transport = transport
        self._has_begun = False  # whether a piece has been read from the source
        self._taken = 0  # how many bytes have been read from the source

        # The last piece that was read, and whether `next` returns it again.
        self._piece = memoryview(b"")
        self._is_unsent = False

    async def next(self) -> memoryview:
        """Return the next piece (see `Pieces`)."""
        if self._is_unsent:
            self._is_unsent = False
            return self._piece
        if not self._has_begun:
            self._has_begun = True
            self._on_begin()
        if self._taken >= LARGE_BODY:
            self.on_under_way()
        self._piece = await self._pieces.next()
        self._taken += len(self._piece)
        self._transport.count_sent(len(self._piece))
        return self._piece

    def take_back(self) -> None:
        """Let `next` return the first piece again, because nothing of the body was sent."""
        self._is_unsent = self._has_begun


class _ClientKey(NamedTuple):
    """The identity of a registry client. Only requests with the same key share its tokens and show
    its client certificate.
    """

    authority: str
    credential: Credential | CloudLogin | None
    failure: str  # why the credential cannot be obtained, else ""
    ca_file: str | None
    client_cert: str | None
    client_key: str | None
    proxy: str | None

    def __repr__(self) -> str:
        # The URL of a proxy may contain a login.
        return f"_ClientKey(authority={self.authority!r})"


class _Hop(NamedTuple):
    """One request of a chain of redirects."""

    call: Call
    origin: Origin
    peer: Peer
    authorization: str | None
    number: int = 0  # how many redirects came before it

    # Whether any request of the chain went to another origin than the registry's.
    has_left_registry: bool = False


def _cloud(name: str) -> CloudModule:
    """Import the login of a cloud, which most runs do not need."""
    if name == "aws":
        from _regsync.auth import aws

        return aws
    if name == "azure":
        from _regsync.auth import azure

        return azure
    from _regsync.auth import google

    return google


class Transport:
    """The way to all registries, for a run or for all runs of a watch."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.gate = Gate()

        # By host:port, for the report and the progress display: requests by action, responses with
        # status 429, and the meter of the last request that got one.
        self.requests: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.throttled: Counter[str] = Counter()
        self.throttled_meters: dict[str, Meter] = {}

        # When the last response arrived or the last bytes moved, in the event loop's time.
        self.last_progress = -math.inf
        # Bytes of blobs in this run that were read from sources and that were sent to targets.
        self.blob_bytes = 0
        self.bytes_sent = 0

        # The clients of this run, and the first client of each address (scheme, host and port).
        self._clients: dict[_ClientKey, RegistryClient] = {}
        self._first_client_at: dict[tuple[str, str, int], RegistryClient] = {}

        timeouts = machine.timeouts
        self.recovery = Recovery(
            patience=Patience(timeouts.outage, timeouts.first_answer, timeouts.probe),
            chance=machine.chance,
            log=machine.log,
            ping=self._ping,
            on_outage=self._on_outage,
            on_back=self._on_back,
        )

        # Requests of discovery that a registry has refused for long, by their demand: the error
        # that equal requests get, and the time until which they get it.
        self._refused_discovery: dict[Demand, tuple[SyncError, float]] = {}

        self.dialer = Dialer(machine)
        self.pool = Pool(self._dial, machine.timeouts)

        # Files with logins are read each time, because other programs rewrite them.
        fetch = partial(self.fetch, None)
        identity = CloudEnvironment(
            machine.environ, machine.home, machine.read, machine.wall, fetch
        )
        self._clouds = Clouds(identity, _cloud)

    # The life of a run.

    def close(self) -> None:
        self.pool.close()

    def count_read(self, count: int) -> None:
        """Count bytes of a blob that came from a source."""
        self.last_progress = anyio.current_time()
        self.blob_bytes += count

    def count_sent(self, count: int) -> None:
        """Count bytes of a blob that went to a target."""
        self.bytes_sent += count

    def begin_run(self, registries: Collection[Registry]) -> None:
        """Begin another run with new counts. `registries` are those of its configuration.

        A client is kept, with its tokens, if its registry's configuration is unchanged and the last
        run has used it.
        """
        self.gate.youngest_rank = 0.0  # ranks begin at 0 in each run
        self.blob_bytes = 0
        self.bytes_sent = 0
        self.requests.clear()
        self.throttled.clear()
        self._clouds.reload()  # identities of clouds are searched for again

        earlier_clients = self._clients
        self._clients = {}
        self._first_client_at = {}
        now = anyio.current_time()
        for key, client in earlier_clients.items():
            if client.registry not in registries:  # its configuration was changed or removed
                # Registries at the same address lose their idle connections too, and make new ones.
                self.gate.limits.pop(client.key, None)
                self.pool.close(origin=client.origin)
            elif client.is_used:  # an unused one is not looked up again: its login has changed
                client.begin_run(now)
                self._add_client(key, client)
        self.recovery.begin_run()  # after the clients, which ask whether their host was stopped

    def client(self, registry: Registry, repository: str | None = None) -> RegistryClient:
        """Return the client of a registry that logs in with the credential of a repository. Creates
        the client on first use.

        If that credential cannot be obtained, all requests of the returned client fail with the
        reason. Repositories with another credential are still copied.
        """
        credential: Credential | CloudLogin | None = None
        failure: AuthError | None = None
        try:
            credential = self._clouds.find(registry, repository, self.dialer.read)
        except AuthError as error:
            failure = error

        key = _ClientKey(
            authority=registry.authority,
            credential=credential,
            failure=failure.message if failure else "",
            ca_file=registry.ca_file,
            client_cert=registry.client_cert,
            client_key=registry.client_key,
            proxy=registry.proxy,
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
        client.is_used = True  # `begin_run` keeps it for the next run
        if failure is not None:
            client.stop(failure)
        self._limit_permits(registry)
        return client

    def _add_client(self, key: _ClientKey, client: RegistryClient) -> None:
        self._clients[key] = client
        self._first_client_at.setdefault(client.origin.address, client)

    def _limit_permits(self, registry: Registry) -> None:
        """Limit the number of requests in flight at a registry's host:port. If several registries
        of the configuration have the same host:port, the smallest `max_concurrent` applies.
        """
        # One registry may use a quarter of the open files. A run may use several registries.
        most_connections = max(2, (self.machine.open_files - _OWN_FILES) // 4)
        cap = min(registry.max_concurrent or DEFAULT_CONCURRENCY, most_connections)
        limits = self.gate.limits.get(registry.authority)
        if limits is None:
            dialect = DIALECTS[registry.kind]
            limits = RegistryLimits(cap, dialect.limits, per_project=dialect.per_project)
            self.gate.limits[registry.authority] = limits
        elif registry.max_concurrent:  # the default does not reduce what another alias has set
            limits.cap = min(limits.cap, cap)

    async def _dial(self, origin: Origin, is_foreign: bool) -> edge.Stream:
        client = self._first_client_at.get(origin.address)
        registry = client.registry if client else None
        return await self.dialer.dial(origin, registry, is_foreign=is_foreign)

    def lease(self, origin: Origin, *, is_fresh: bool = False, is_foreign: bool = False) -> Lease:
        """Return a lease for exchanges with an origin.

        With `is_fresh`, no exchange uses a connection that was used before. An origin that another
        one has named is foreign: it never gets the credentials or the client certificate of a
        registry (I6).
        """
        return Lease(self.pool, origin, is_fresh=is_fresh, is_foreign=is_foreign)

    # The way of a request.

    async def request(
        self, client: RegistryClient, call: Call, *, ok: Collection[int], limit: int = ERROR_BODY
    ) -> Response:
        """Send a short request, with the retries of docs/design.md section 9. Returns the response
        with its body, which may have at most `limit` bytes. Raises SyncError for a status not in
        `ok`.
        """
        budget = RetryBudget(ATTEMPTS)
        while True:
            try:
                if client.is_first_contact_done:
                    return await self._request_once(client, call, ok, limit)
                return await self._request_as_first(client, call, ok, limit)
            except SyncError as error:
                failure = error
            finally:
                # If this attempt was to probe the host and has not, another task probes it.
                self.recovery.end_attempt()
            pause = self.pause_after(failure, budget, client, call=call)
            text = f"{call.method} {client.key}{call.shown_path}: {failure}"
            self.machine.log("debug", "retry", text)
            await self.wait_to_retry(failure, pause)

    async def _request_as_first(
        self, client: RegistryClient, call: Call, ok: Collection[int], limit: int
    ) -> Response:
        """Send a request once. Until a first request to the host is complete, only one is sent at a
        time (rule 1).
        """
        async with client.first_contact:  # a lock
            # Another request may have been the first while this request waited for the lock.
            if not client.is_first_contact_done:
                try:
                    return await self._request_once(client, call, ok, limit)
                finally:
                    # If the host has not answered, another request is the first.
                    client.is_first_contact_done = client.has_answered
        return await self._request_once(client, call, ok, limit)

    async def _request_once(
        self, client: RegistryClient, call: Call, ok: Collection[int], limit: int
    ) -> Response:
        async with await self.exchange(client, call, ok) as response:
            await response.read(limit)
            return response

    async def exchange(
        self,
        client: RegistryClient,
        call: Call,
        ok: Collection[int],
        *,
        lease: Lease | None = None,
        body: Body | None = None,
    ) -> Turn:
        """Send a request, and return its turn with the response unread. The caller must end the
        turn. Raises SyncError for a status not in `ok`.

        The request first gets its login, then its turn (a permit, a place in a window and a token
        of a bucket), then a connection, then its response. It is repeated only with a new login, or
        after a redirect. If `lease` is given, the request uses that connection and leaves it to the
        caller (a PUT follows its POST). A request with a `body` is never repeated (I7), so the
        caller has to handle a refused login, and a success that arrives before the last byte was
        sent.
        """
        demand = self.demand_of(client, call)
        rank = _FIRST if call.action == "manifest_put" else None
        refusals: list[Refusal] = []
        can_repeat = body is None
        while True:
            # Fail before the login and the wait for a turn if the request cannot be sent. `_send`
            # checks this again after the wait.
            self._check_may_send(client, demand)
            if client.peer.outage.reach is not Reach.UP:
                self._check_reach(client, client.peer, can_repeat=can_repeat)
            authorization = await self.login(client, call, can_repeat=can_repeat)
            turn = await self.gate.begin_request(demand, rank, lease)
            try:
                if body is not None:
                    self._watch_body(call, turn, body, authorization)
                hop, response = await self._send_and_follow(
                    client, call, demand, authorization, turn, lease, body
                )
                self._record_pace(client, call, turn, response)

                status = response.status
                is_refused = status in (401, 403)
                # With 429 or 5xx the server may not have checked the login.
                is_login_accepted = status < 500 and status != 429 and not is_refused
                if authorization is not None and is_login_accepted:
                    client.authenticator.record_success(authorization, call.repository, call.method)

                if response.is_early and can_repeat and status in (200, 201):
                    raise Disconnected("the registry answered before the request was sent")
                if status in ok:
                    turn.response = response
                    return turn
                await response.read(ERROR_BODY)
                may_log_in_again = is_refused and can_repeat and not hop.has_left_registry
                if not may_log_in_again:
                    raise self.error_from(client, response, hop.peer)
            except LoginExpired:
                # `_check_may_send` has found that the login was refused to another request. Nothing
                # of the body was sent, so log in again and repeat the request.
                if body is not None:
                    body.take_back()
                continue
            finally:
                # The caller ends the turn that is returned. Every other turn ends here, because no
                # permit may be held during another login (I8).
                if turn.response is None:
                    await turn.end()
            await self.refresh_login(client, call, authorization, response, refusals)

    async def _send_and_follow(
        self,
        client: RegistryClient,
        call: Call,
        demand: Demand,
        authorization: str | None,
        turn: Turn,
        lease: Lease | None,
        body: Body | None,
    ) -> tuple[_Hop, Response]:
        """Send a request and follow its redirects. Returns the last hop and its unread response."""
        origin = call.origin or client.origin
        peer = client.peer if origin == client.origin else self.recovery.peer(origin)
        hop = _Hop(call, origin, peer, authorization, has_left_registry=origin != client.origin)
        response = await self._send(client, demand, hop, turn, lease, body)
        while response.status in _REDIRECTS and call.method in ("GET", "HEAD"):
            await turn.return_connection()  # other requests may use it from now on
            hop = self._next_hop(client, hop, response)
            turn.began = anyio.current_time()
            response = await self._send(client, demand, hop, turn, lease, body)
        if response.status == 401 and hop.has_left_registry and body is None:
            raise ProtocolBroken(
                f"{hop.origin.authority}, to which the registry redirects, asks for a login"
            )
        return hop, response

    async def _send(
        self,
        client: RegistryClient,
        demand: Demand,
        hop: _Hop,
        turn: Turn,
        lease: Lease | None,
        body: Body | None,
    ) -> Response:
        """Send one request of a chain of redirects and return its response. It uses the caller's
        `lease` if that is a lease for its origin. Otherwise it stores a lease of its own in
        `turn.connection`.
        """
        call = hop.call
        can_repeat = body is None
        check_may_send = partial(self._check_may_send, client, demand, hop.authorization)
        check_may_send()

        is_at_registry = hop.origin == client.origin
        if lease is None or lease.origin != hop.origin:
            lease = self.lease(hop.origin, is_fresh=call.is_fresh, is_foreign=not is_at_registry)
            turn.connection = lease

        is_unreachable = hop.peer.outage.reach is not Reach.UP
        if is_unreachable:  # raise an error unless this request is the probe of the host
            self._check_reach(client, hop.peer, can_repeat=can_repeat)

        if hop.number == 0:
            self.requests[client.key][call.action] += 1
        else:  # after a redirect; the origin need not be a registry
            self._count(hop.origin, call.action)
        try:
            answering = lease.exchange(
                call.request(hop.authorization),
                call.seconds,
                body,
                check_may_send=check_may_send,
                now=turn.began,
            )
            if is_unreachable:
                answering = self.recovery.await_probe(hop.peer, answering)
            response = await answering
        except WireError as error:
            # A host that disconnects or breaks the protocol may serve only https.
            is_breach = not isinstance(error, ConnectFailed | TimedOut)
            if is_breach and not client.has_answered:
                error.hint = client.https_hint or error.hint
            if error.side is None:  # otherwise the source of the body has failed, not this host
                self.recovery.record_failure(hop.peer, error, turn.began, is_counted=can_repeat)
            raise

        retry_after = response.headers.get("retry-after")
        self._record_reach(
            hop.peer, response.status, retry_after, response.came_at, is_counted=can_repeat
        )
        if is_at_registry:
            client.has_answered = True
        if self.machine.traces:
            trace = f"{call.method} {hop.peer.url}{call.shown_path} -> {response.status}"
            self.machine.log("trace", "request", trace)
        return response

    def _next_hop(self, client: RegistryClient, hop: _Hop, response: Response) -> _Hop:
        """Return the next request of a chain of redirects (R1, R4). Raises ProtocolBroken if the
        redirect must not be followed.
        """
        location = response.headers.get("location")
        if location is None:
            raise ProtocolBroken(f"status {response.status} without a Location")
        if hop.number == _MOST_REDIRECTS:
            raise ProtocolBroken(f"more than {_MOST_REDIRECTS} redirects")
        origin, path = resolve_location(hop.origin, hop.call.path, location)
        check_foreign(hop.origin, origin)  # each origin is as safe as the one before it
        client.authenticator.mask_query_values(path)  # the query of a signed URL is a secret

        # After a redirect to another origin no credential is sent, not even to the registry again.
        call = hop.call._replace(path=path)
        has_left_registry = hop.has_left_registry or origin != client.origin
        authorization = None if has_left_registry else hop.authorization
        return _Hop(
            call,
            origin,
            peer=self.recovery.peer(origin),
            authorization=authorization,
            number=hop.number + 1,
            has_left_registry=has_left_registry,
        )

    # Unreachable hosts.

    def _check_reach(self, client: RegistryClient, peer: Peer, *, can_repeat: bool) -> None:
        """Raise an error if `peer` is unreachable, unless this request is its probe. `can_repeat`
        says that the request can be sent twice, so that it may be the probe.

        `peer` is the registry, its token service or its blob storage. If it was given up, the
        registry is stopped too.
        """
        error = self.recovery.error_of(peer, can_repeat=can_repeat)
        if error is None:
            return
        is_given_up = not error.retryable
        if is_given_up and client.stop_error is None:
            client.stop(error)
        raise error

    def _record_reach(
        self,
        peer: Peer,
        status: int,
        retry_after: str | None,
        now: float,
        *,
        is_counted: bool = True,
    ) -> None:
        """Record by the head of a response whether its host is reachable. An answer ends an outage.

        A response of a gateway that could not reach the host is a failure of the host. If not
        `is_counted`, that failure is ignored.
        """
        if not is_gateway_failure(status, retry_after):
            self.recovery.record_answer(peer, now)
        elif is_counted:
            failure = RegistryError(f"status {status}", status=status)
            self.recovery.record_failure(peer, failure, now)

    async def _ping(self, peer: Peer) -> None:
        """Send a probe to an unreachable host, and record whether the host has answered."""
        origin = peer.origin
        self._count(origin, "probe")
        request = Request("GET", "/v2/", (_USER_AGENT,))
        is_registry = origin.address in self._first_client_at
        began = anyio.current_time()
        try:
            async with self.lease(origin, is_foreign=not is_registry) as lease:
                response = await self.recovery.await_probe(peer, lease.exchange(request))
        except WireError as error:
            self.recovery.record_failure(peer, error, began)
        else:
            retry_after = response.headers.get("retry-after")
            self._record_reach(peer, response.status, retry_after, response.came_at)

    def _on_outage(self, peer: Peer) -> None:
        """Close the connections to a host that has become unreachable."""
        self.pool.close(peer.origin)

    def _on_back(self, peer: Peer) -> None:
        """Narrow the windows of a registry that is reachable again. A host that is not a registry
        has no windows.
        """
        client = self._first_client_at.get(peer.origin.address)
        if client is not None:
            self.gate.limits[client.key].narrow_windows()
            self.gate.wake()

    async def wait_to_retry(
        self, error: SyncError, seconds: float, *, can_repeat: bool = True
    ) -> None:
        """Wait before a failed request is repeated: until its host is reachable again if `error` is
        an outage, otherwise for `seconds`.

        Raises `error` if the host is given up. `can_repeat` says that the next request of this task
        can be sent twice, so that it may be the probe of the host.
        """
        if error.unreachable_peer is None:
            await anyio.sleep(seconds)
        else:
            await self.recovery.wait(error, can_repeat=can_repeat)

    def demand_of(self, host: Host, call: Call) -> Demand:
        """Return the limits that a request counts against. A PUT with a body is two actions."""
        is_whole_body = call.action == "upload_body" and call.method == "PUT"
        actions = ("upload_finish", "upload_body") if is_whole_body else (call.action,)
        meters = self.gate.limits[host.key].meter_names(call.repository, *actions)
        return Demand(host.key, meters=meters, is_discovery=call.action in DISCOVERY)

    def _watch_body(self, call: Call, turn: Turn, body: Body, authorization: str | None) -> None:
        """Prepare a body to be sent in a turn. It frees its place in the window when UNDER_WAY
        seconds have passed or LARGE_BODY bytes have been sent, because the registry has accepted it
        by then (docs/design.md section 9).
        """
        if call.action == "upload_body":
            turn.presume_success_at(turn.began + UNDER_WAY)
        body.authorization = authorization
        body.on_under_way = partial(self._record_under_way, turn)

    # Logins.

    async def login(
        self, client: RegistryClient, call: Call, *, can_repeat: bool = True
    ) -> str | None:
        """Return the Authorization header for a call, after a request for a token if it needs one.
        Returns None if the call goes to another origin than the registry's (I6), or needs no login.

        Stops the registry if another attempt to log in could lock the account.
        """
        if call.origin is not None and call.origin != client.origin:
            return None
        try:
            return await client.authenticator.authorization(
                call.repository, call.rights, call.other_rights, can_repeat
            )
        except AuthError as error:
            if error.fatal:
                client.stop(error)  # another attempt could lock the account
            raise
        except RegistryError as error:
            # The response of a gateway may belong to an outage of the token service. The caller
            # then waits for the token service, and not for the registry.
            token_service = client.token_peer
            if token_service is not None and is_gateway_failure(error.status, error.retry_after):
                error.unreachable_peer = token_service if token_service.outage.is_on else None
            raise

    async def refresh_login(
        self,
        client: RegistryClient,
        call: Call,
        used_authorization: str | None,
        refused: Response,
        refusals: list[Refusal],
    ) -> None:
        """Handle a response with status 401 or 403. Returns if the call may be repeated with a new
        Authorization header (see `login`). Otherwise raises the refusal as an error, and stops the
        registry if another attempt could lock the account.

        `used_authorization` is the Authorization header of the refused request, `refused` is the
        response, whose body has been read, and `refusals` are the earlier refusals of the call. The
        new refusal is added to them.
        """
        authenticator = client.authenticator
        # For an expired password ECR answers 403 instead of 401. Only the text of the body
        # distinguishes that from a missing right.
        is_unauthorized = refused.status == 401 or b"token has expired" in refused.body
        try:
            if is_unauthorized:
                challenges = refused.headers.all("www-authenticate")
                refusal = await authenticator.on_unauthorized(
                    challenges, used_authorization, call.repository, call.rights, call.method
                )
            else:
                refusal = authenticator.on_forbidden(used_authorization)
        except AuthError as error:
            if error.fatal:
                client.stop(error)  # another attempt could lock the account
            raise
        if refusal is None:  # no other login would help
            raise self.error_from(client, refused)
        refusals.append(refusal)
        if not may_repeat_after(refusals):
            raise self.error_from(client, refused)

    async def fetch(
        self,
        client: RegistryClient | None,
        method: str,
        url: str,
        headers: list[Pair],
        body: bytes,
        seconds: float | None = None,
        check_may_send: Callable[[], None] | None = None,
    ) -> Answer:
        """Send a request to a login service, without a permit (I8) and without following redirects
        (R2).

        `client` is that of the registry which names the service, None for a cloud's own service.
        The response has to arrive within `seconds`. `check_may_send` is passed to Lease.exchange.
        Raises WireError if no response arrives.
        """
        # `url` is absolute. It is resolved only to check it and to split it.
        origin, target = resolve_location(Origin("https", "invalid.invalid", 443), "/", url)
        # The connection uses the proxy and the authorities of this registry.
        known = client or self._first_client_at.get(origin.address)
        if known is not None:
            origin = origin._replace(via=known.registry)
        self._count(origin, "token")
        own_headers = (_USER_AGENT, ("Accept", "application/json"))
        request = Request(method, target, (*own_headers, *headers), body)
        is_foreign = client is not None and origin != client.origin
        lease = self.lease(origin, is_foreign=is_foreign)
        ask = partial(self._fetch_once, lease, request, seconds, check_may_send)
        if client is None:
            return await ask()  # the modules of the clouds retry by themselves
        return await self._ask_token_service(client, origin, ask)

    async def _ask_token_service(
        self, client: RegistryClient, origin: Origin, ask: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        """Send the request `ask` to the token service of a registry, which may have an outage like
        the registry itself.
        """
        peer = self.recovery.peer(origin)
        client.token_peer = peer
        self._check_reach(client, peer, can_repeat=True)
        began = anyio.current_time()
        try:
            if self.recovery.is_probing(peer):
                answer = await self.recovery.await_probe(peer, ask())
            else:
                answer = await ask()
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
        check_may_send: Callable[[], None] | None,
    ) -> Answer:
        """Send the request of `fetch` once. Raises TimedOut after `seconds`; if that is None, only
        the time-outs of the connection apply.
        """
        with anyio.move_on_after(seconds):
            async with lease:
                response = await lease.exchange(request, check_may_send=check_may_send)
                # The path is not logged, because some metadata services return credentials to
                # anybody who knows it.
                trace = f"{request.method} {lease.origin} -> {response.status}"
                self.machine.log("trace", "request", trace)
                content = await response.read(_TOKEN_BODY)
                return Answer(response.status, dict(response.headers), content)
        assert seconds is not None  # only a time-out leaves the block without a return
        raise TimedOut(f"{lease.origin} did not answer within {seconds:g} s")

    # What answers say about how often to ask.

    def _count(self, origin: Origin, action: str) -> None:
        """Count a request, if its origin belongs to a registry of this run."""
        client = self._first_client_at.get(origin.address)
        if client is not None:
            self.requests[client.key][action] += 1

    def _record_under_way(self, turn: Turn) -> None:
        """Count a body as a success before its response arrives, unless it was counted already."""
        self.last_progress = anyio.current_time()
        if turn.meter.record_success(turn.number):
            self.gate.on_window_change()

    def _record_pace(
        self, client: RegistryClient, call: Call, turn: Turn, response: Response
    ) -> None:
        """Apply a response to the window, pauses and quotas, and then admit waiting requests.

        Stops requests to the registry after 10 minutes of status 429.
        """
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
            self.throttled_meters[client.key] = turn.meter  # for the report
        turn.meter.record_answer(turn.number, status, now, retry_after, chance)
        # `refused_since` is infinite after a success.
        if now - turn.meter.window.refused_since > THROTTLED_FOR:
            refused = RegistryError("status 429 to every request for 10 minutes", status=429)
            demand = self.demand_of(client, call)
            self._stop_requests(client, demand, refused, seconds=LONGEST_WAIT)

        remaining = parse_quota(header, wall)
        if remaining is not None:
            self._record_quota(client, call, turn, response, remaining)
        self.gate.on_window_change()

    def _record_quota(
        self,
        client: RegistryClient,
        call: Call,
        turn: Turn,
        response: Response,
        remaining: Remaining,
    ) -> None:
        """Apply a quota that a response reports. If the quota is used up for longer than a run
        waits, stop the requests that it limits.
        """
        # Quotas limit requests of discovery. At some registries they limit only one action, but the
        # responses to all actions report them.
        action = DIALECTS[client.registry.kind].quota_action or call.action
        demand = self.demand_of(client, call._replace(action=action))._replace(is_discovery=True)
        meter = self.gate.limits[client.key].meters[demand.meters[0]]
        # The number of the request means nothing to another meter than its own.
        number = turn.number if meter is turn.meter else 0
        can_wait = meter.quota.update(response.came_at, number, remaining)
        if not can_wait:
            used_up = RegistryError("the quota is used up", status=429)
            self._stop_requests(client, demand, used_up, seconds=remaining.seconds)

    # Errors, and what is done about them.

    def pause_after(
        self, error: SyncError, budget: RetryBudget, *hosts: Host, call: Call | None = None
    ) -> float:
        """Count a failed attempt in `budget`, and return how many seconds to wait before it is
        repeated (see `wait_to_retry`). Raises the error if the attempt must not be repeated.

        An expired login and an outage are not counted. If the registry asks for a longer wait than
        a run makes, requests to it are stopped. `hosts` are the hosts that the work needs: the
        source, then the target. `call` is the failed request, if the work is only that request.
        """
        is_stopped = any(host.stop_error for host in hosts)
        if isinstance(error, LoginExpired) and not is_stopped:
            return 0.0  # the upload limits how often its login is renewed
        error.retries = budget.retries

        retry_after = 0.0  # the seconds for which the registry asks to wait
        is_throttled = False
        if isinstance(error, RegistryError) and error.retryable:
            retry_after = error.retry_after or 0.0
            is_throttled = error.status == 429
            if retry_after > LONGEST_WAIT:
                host = hosts[-1] if error.side is Side.TARGET else hosts[0]
                demand = None if call is None else self.demand_of(host, call)
                # This makes `error` not retryable.
                self._stop_requests(host, demand, error, seconds=retry_after)
            if error.is_paced_by_window:
                retry_after = 0.0  # the next attempt waits for the window, which has recorded it

        if is_stopped or not error.retryable:
            raise error
        if error.unreachable_peer is not None:
            return 0.0  # `wait_to_retry` waits for the end of the outage
        now = anyio.current_time()
        pause = budget.take_attempt(now, self.machine.chance(), is_throttled=is_throttled)
        if pause is None:
            raise error
        return max(retry_after, pause)

    def _stop_requests(
        self, host: Host, demand: Demand | None, error: RegistryError, seconds: float
    ) -> None:
        """Stop requests to a host for `seconds`, because it asks for a longer wait than a run
        makes. Makes `error` final, and adds the time to its message.

        If `demand` is the demand of a request of discovery, only requests with the same demand are
        stopped, so that images that are being copied are finished. Otherwise it stops all requests.
        """
        moment = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.machine.wall() + seconds))
        error.message += (
            f" (asks to wait {duration_text(seconds)}, until {moment}: longer than a run waits)"
        )
        error.is_final = True

        until = anyio.current_time() + seconds
        if demand is not None and demand.is_discovery:
            self._refused_discovery[demand] = (error.copy_without_context(), until)
        else:
            host.stop(error, until)

    def _check_may_send(
        self, client: RegistryClient, demand: Demand, authorization: str | None = None
    ) -> None:
        """Raise an error if `_stop_requests` or `RegistryClient.stop` has stopped such requests.
        Raises LoginExpired if the login was refused to another request in the meantime.
        """
        if demand in self._refused_discovery:
            error, until = self._refused_discovery[demand]
            if anyio.current_time() < until:
                raise error.copy_without_context()
        if client.stop_error is not None:
            raise client.stop_error.copy_without_context()
        if authorization is not None and authorization in client.authenticator.refused_logins:
            raise LoginExpired("the login was refused to another request")

    def error_from(
        self, client: RegistryClient, answer: Response, peer: Peer | None = None
    ) -> RegistryError:
        """Return the error for a response, whose body has been read. Counts a response with status
        429 for the report on this registry. `peer` is the host that sent the response, if that is
        not the registry itself, but for example a storage that it redirects to.

        If the sender is in an outage, and the response only says that a proxy could not reach the
        sender, `error.unreachable_peer` is set. The caller then waits for the end of the outage.
        """
        if answer.status == 429:
            self.throttled[client.key] += 1
        error = client.error_of(answer, self.machine.wall())
        sender = peer or client.peer
        if sender.outage.is_on and is_gateway_failure(error.status, error.retry_after):
            error.unreachable_peer = sender
        return error
