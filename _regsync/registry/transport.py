"""One request to a registry, from its lane to its answer.

`Transport.exchange` tells it: the login, the lane, the connection, redirects, and what the answer says
of the registry. It sends a request again only with another login; `request` repeats short requests
(`limits.Retry`). A transport serves all registries of a run, or of all runs of a watch.

May not know: which images are copied where, and why.
Invariants: no credential leaves the registry's origin (I6); a body is sent once (I7); the answer ends
before its permit is given back, so that the next request can reuse the connection.
Follows: docs/design.md section 9, docs/protocol-facts.md sections 8.1 and 9.2.
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
from _regsync.auth.tokens import NEEDED, Scopes, says_login_ended
from _regsync.config import Registry
from _regsync.errors import (
    AuthError,
    ConnectFailed,
    Disconnected,
    LoginExpired,
    ProtocolBroken,
    RegistryError,
    SyncError,
    TimedOut,
    WireError,
)
from _regsync.net.wire import Header, Pieces, Pool, Request, Response, parse_retry_after
from _regsync.providers import DIALECTS
from _regsync.registry.host import Dialer, Machine, RegistryClient
from _regsync.registry.limits import (
    DEFAULT_CONCURRENCY,
    LONGEST_WAIT,
    Gate,
    HostLimits,
    Lane,
    Need,
    Patience,
    Reach,
    Retry,
    Turn,
    is_gateway_failure,
    quota_wait,
)
from _regsync.registry.redirects import check_foreign, mask_signature, resolve_location
from _regsync.text import duration_text

# How many redirects of one request are followed (R4).
_MOST_REDIRECTS = 10
_REDIRECTS = (301, 302, 303, 307, 308)

# How many bytes of an error's body are read (R14). Manifests and listings have limits of their own.
ERROR_BODY = 64 * 1024
_TOKEN_BODY = 1024 * 1024

# How many files the process needs besides those of its connections.
_OWN_FILES = 24

# Seconds of refusals alone after which the requests of a lane fail.
_THROTTLED_FOR = 600.0

# The actions that find out what to copy. A long wait for one of them stops these requests alone, so
# that images that are being copied are finished.
_DISCOVERY = ("tag_list", "manifest_head", "manifest_get")

_USER_AGENT: Header = ("User-Agent", f"regsync/{__version__}")
_EVERY_REQUEST: tuple[Header, ...] = (_USER_AGENT, ("Accept-Encoding", "identity"))


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
    def scopes(self) -> Scopes:
        """What its token has to cover."""
        return frozenset(((self.repository, self.rights), *self.other_rights))

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
    """The body of an upload, on its way. It counts its bytes, and frees the place in the window when
    the registry takes more of it than its first piece.
    """

    def __init__(self, pieces: Pieces, on_begin: Callable[[], None], transport: Transport) -> None:
        self.length = pieces.length
        self.authorization: str | None = None  # the header with which it was sent
        self.turn: Turn | None = None
        self._pieces = pieces
        self._on_begin = on_begin  # called before the first piece is read
        self._transport = transport
        self._taken = 0  # pieces
        self._unsent: memoryview | None = None

    async def next(self) -> memoryview:
        """Return the next piece (see `Pieces`)."""
        piece, self._unsent = self._unsent, None
        if piece is not None:
            return piece
        if self._taken == 0:
            self._on_begin()
        elif self._taken == 2 and self.turn is not None:
            self.turn.record_under_way(anyio.current_time())
        self._taken += 1
        piece = await self._pieces.next()
        self._transport.count_sent(len(piece))
        return piece

    def take_back(self, piece: memoryview) -> None:
        """Let `next` return a piece again, because nothing was sent."""
        self._unsent = piece


class Exchange:
    """An answer whose body may be unread, and what its request occupies: `async with` yields the
    response, and ends both.
    """

    def __init__(
        self, turn: Turn, response: Response, reach: Reach, *, is_body: bool, is_home: bool
    ) -> None:
        self.turn = turn
        self.response = response
        self.reach = reach  # of the host that has answered
        self.is_body = is_body  # whether the request carried a blob's body
        self.is_home = is_home  # whether the registry itself has answered

    async def __aenter__(self) -> Response:
        return self.response

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.response.close()
        finally:
            self.turn.leave()


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
        # status 429, and the lane of the last request that got one.
        self.requests: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.throttled: Counter[str] = Counter()
        self.throttled_lanes: dict[str, Lane] = {}

        # When the last response arrived or the last bytes moved, in the event loop's time.
        self.last_progress = -math.inf
        # Bytes of blobs in this run that were read from sources and that were sent to targets.
        self.blob_bytes = 0
        self.bytes_sent = 0

        # The limits of each registry, by host:port; and the reachability of other hosts (token
        # services, storage), by `Origin.address`.
        self.limits: dict[str, HostLimits] = {}
        self._others: dict[tuple[str, str, int], Reach] = {}

        # The clients of this run, and the first client of each address (scheme, host and port).
        self._clients: dict[_ClientKey, RegistryClient] = {}
        self._first_client_at: dict[tuple[str, str, int], RegistryClient] = {}

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
        self.last_progress = anyio.current_time()
        self.bytes_sent += count

    def begin_run(self, registries: Collection[Registry]) -> None:
        """Begin another run with new counts. `registries` are those of its configuration.

        A client is kept, with its tokens, if its registry's configuration is unchanged and the last
        run has used it.
        """
        self.blob_bytes = 0
        self.bytes_sent = 0
        self.requests.clear()
        self.throttled.clear()
        self._clouds.reload()  # identities of clouds are searched for again

        earlier_clients = self._clients
        self._clients = {}
        self._first_client_at = {}
        for key, client in earlier_clients.items():
            if client.registry not in registries:  # its configuration was changed or removed
                # Registries at the same address lose their idle connections too, and make new ones.
                self.limits.pop(client.key, None)
                self.pool.close(origin=client.origin)
            elif client.is_used:  # an unused one is not looked up again: its login has changed
                client.begin_run()
                self._add_client(key, client)
        now = anyio.current_time()
        for reach in (*self.limits.values(), *self._others.values()):
            reach.begin_run(now)

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
                limits=self._limits_of(registry),
                fetch=self.fetch,
                wall=self.machine.wall,
            )
            self._add_client(key, client)
        client.is_used = True  # `begin_run` keeps it for the next run
        if failure is not None:
            client.stop(failure)
        self._limits_of(registry)
        return client

    def _add_client(self, key: _ClientKey, client: RegistryClient) -> None:
        self._clients[key] = client
        self._first_client_at.setdefault(client.origin.address, client)

    def _limits_of(self, registry: Registry) -> HostLimits:
        """Return the limits of a registry's host:port. If several registries of the configuration
        have the same host:port, the smallest `max_concurrent` applies.
        """
        # One registry may use a quarter of the open files. A run may use several registries.
        most_connections = max(2, (self.machine.open_files - _OWN_FILES) // 4)
        cap = min(registry.max_concurrent or DEFAULT_CONCURRENCY, most_connections)
        limits = self.limits.get(registry.authority)
        if limits is None:
            dialect = DIALECTS[registry.kind]
            close_idle = partial(self._close_idle, registry.authority)
            limits = HostLimits(
                self.gate, cap, dialect.limits, registry.authority, *self._reach_terms(close_idle)
            )
            self.limits[registry.authority] = limits
        elif registry.max_concurrent:  # the default does not reduce what another alias has set
            limits.cap = min(limits.cap, cap)
        return limits

    def _reach_terms(
        self, on_away: Callable[[], None]
    ) -> tuple[Patience, Callable[[], float], Callable[..., None], Callable[[], None]]:
        timeouts = self.machine.timeouts
        patience = Patience(timeouts.outage, timeouts.first_answer)
        return patience, self.machine.chance, self.machine.log, on_away

    def _close_idle(self, authority: str) -> None:
        """Close the idle connections to a registry that has become unreachable."""
        for client in self._first_client_at.values():
            if client.key == authority:
                self.pool.close(client.origin)

    def _reach_of(self, origin: Origin) -> Reach:
        """Return the reachability of the host at an origin: a registry, or another one."""
        client = self._first_client_at.get(origin.address)
        if client is not None:
            return client.limits
        reach = self._others.get(origin.address)
        if reach is None:
            on_away = partial(self.pool.close, origin)
            reach = Reach(origin.authority, *self._reach_terms(on_away))
            self._others[origin.address] = reach
        return reach

    @property
    def reaches(self) -> list[Reach]:
        """All hosts that this run has to do with."""
        return [*self.limits.values(), *self._others.values()]

    async def _dial(self, origin: Origin, is_foreign: bool) -> edge.Stream:
        client = self._first_client_at.get(origin.address)
        registry = client.registry if client else None
        return await self.dialer.dial(origin, registry, is_foreign=is_foreign)

    # The way of a request.

    async def request(
        self, client: RegistryClient, call: Call, *, ok: Collection[int], limit: int = ERROR_BODY
    ) -> Response:
        """Send a short request, with the retries of docs/design.md section 9. Returns the response
        with its body, which may have at most `limit` bytes. Raises SyncError for a status not in
        `ok`.
        """
        retry = Retry(self.machine.chance)
        while True:
            try:
                async with await self.exchange(client, call, ok) as response:
                    await response.read(limit)
                    return response
            except SyncError as error:
                failure = error
            text = f"{call.method} {client.key}{call.shown_path}: {failure}"
            self.machine.log("debug", "retry", text)
            await retry.pause(failure, client.limits)

    def needs_of(self, client: RegistryClient, call: Call) -> tuple[Need, ...]:
        """Return what a request needs of its registry. The first is its lane."""
        per_project = DIALECTS[client.registry.kind].per_project
        area = call.repository.partition("/")[0] if per_project else ""
        is_whole_body = call.action == "upload_body" and call.method == "PUT"
        if not is_whole_body:
            return (client.limits.lane(call.action, area),)
        lane = client.limits.lane("upload_finish", area)
        other = client.limits.lane("upload_body", area)
        return (lane,) if lane is other else (lane, other.token)

    async def exchange(
        self,
        client: RegistryClient,
        call: Call,
        ok: Collection[int],
        *,
        body: Body | None = None,
        turn: Turn | None = None,
    ) -> Exchange:
        """Send a request, and return its answer with the body unread. The caller ends the exchange.
        Raises SyncError for a status not in `ok`.

        The request is repeated only with a new login, or after a redirect. A request with a `body`
        is sent once (I7), so the caller has to handle a refused login, and a success that arrives
        before the last byte was sent. `turn` was taken for it already.
        """
        needs = self.needs_of(client, call)
        refusals: list[bool] = []  # of logins: whether they had worked before
        while True:
            unread: Response | None = None
            keeps_turn = False
            try:
                client.raise_if_stopped()
                authorization = await self._login(client, call, can_repeat=body is None)
                if turn is None:
                    turn = (await self.gate.enter(*needs))[0]
                self._check_login(client, call, authorization)
                exchange = await self._send_and_follow(client, call, authorization, turn, body)
                unread = response = exchange.response
                self._record_login(client, call, authorization, response.status)
                if response.is_early and body is None and response.status in (200, 201):
                    raise Disconnected("the registry answered before the request was sent")
                if response.status in ok:
                    turn = None  # it ends with the exchange
                    return exchange
                await response.read(ERROR_BODY)
                is_login_refused = response.status == 403 or says_login_ended(
                    response.status, response.body
                )
                if not is_login_refused or body is not None or not exchange.is_home:
                    raise self.refusal(client, call, exchange)
                unread = None
                await response.close()
                if not client.limits.has_answered:
                    # The others wait until the first request has got its login and its answer.
                    self.refresh_login(client, call, authorization, exchange, refusals)
                    keeps_turn = True
                    continue
            except LoginExpired:
                continue  # the login was refused to another request, and nothing was sent
            finally:
                if turn is not None and not keeps_turn:
                    try:
                        if unread is not None:
                            await unread.close()
                    finally:
                        turn.leave()
                        turn = None
            self.refresh_login(client, call, authorization, exchange, refusals)

    async def _send_and_follow(
        self,
        client: RegistryClient,
        call: Call,
        authorization: str | None,
        turn: Turn,
        body: Body | None,
    ) -> Exchange:
        """Send a request and follow its redirects. Returns the last answer, unread."""
        origin = call.origin or client.origin
        is_home = origin == client.origin
        for number in range(_MOST_REDIRECTS + 1):
            action = call.action
            if number == 0:
                self.requests[client.key][action] += 1
            else:  # the origin need not be a registry
                self._count(origin, action)
            reach = client.limits if origin == client.origin else self._reach_of(origin)
            response = await self._send(client, call, origin, authorization, reach, turn, body)
            is_redirect = response.status in _REDIRECTS and call.method in ("GET", "HEAD")
            is_first_refusal = response.status == 401 and not client.limits.has_answered
            is_from_host = not is_gateway_failure(
                response.status, response.headers.get("retry-after")
            )
            if is_from_host and not (is_home and is_first_refusal):
                reach.record_answer(response.came_at)
            if origin == client.origin and number == 0:
                self._record_pace(client, call, turn, response)
            if not is_redirect:
                if response.status == 401 and not is_home and body is None:
                    await response.close()
                    raise ProtocolBroken(
                        f"{origin.authority}, to which the registry redirects, asks for a login"
                    )
                return Exchange(turn, response, reach, is_body=body is not None, is_home=is_home)

            location = response.headers.get("location")
            await response.close()  # other requests may use the connection from now on
            if location is None:
                raise ProtocolBroken(f"status {response.status} without a Location")
            there, path = resolve_location(origin, call.path, location)
            check_foreign(origin, there)  # each origin is as safe as the one before it
            mask_signature(path)
            # After a redirect to another origin no credential is sent, not even to the registry.
            is_home = is_home and there == client.origin
            authorization = authorization if is_home else None
            origin, call = there, call._replace(path=path, origin=there)
            turn.began = anyio.current_time()
        raise ProtocolBroken(f"more than {_MOST_REDIRECTS} redirects")

    async def _send(
        self,
        client: RegistryClient,
        call: Call,
        origin: Origin,
        authorization: str | None,
        reach: Reach,
        turn: Turn,
        body: Body | None,
    ) -> Response:
        """Send one request of a chain of redirects, and return its response."""
        first: memoryview | None = None
        if body is not None:
            body.authorization, body.turn = authorization, turn
            first = await body.next()
            try:
                self._check_login(client, call, authorization)  # the source may have taken time
            except SyncError:
                body.take_back(first)
                raise
        is_probe = turn.is_probe and reach is client.limits
        deadline = reach.gives_up_at if reach.is_out else math.inf
        try:
            with anyio.CancelScope(deadline=deadline) as scope:
                response = await self.pool.exchange(
                    origin,
                    call.request(authorization),
                    first=first,
                    pieces=body,
                    seconds=call.seconds,
                    is_fresh=call.is_fresh,
                    is_foreign=origin != client.origin,
                    check_may_send=partial(self._check_login, client, call, authorization),
                )
            if scope.cancelled_caught:
                reach.raise_if_stopped(anyio.current_time())
                raise TimedOut(f"{origin.authority} did not answer in time")
        except LoginExpired:
            if body is not None and first is not None:
                body.take_back(first)
            raise
        except WireError as error:
            # A host that disconnects or breaks the protocol may serve only https.
            is_breach = not isinstance(error, ConnectFailed | TimedOut)
            if is_breach and not client.limits.has_answered:
                error.hint = client.https_hint or error.hint
            if error.side is None:  # otherwise the source of the body has failed, not this host
                # A registry may refuse a body by closing the connection.
                is_counted = body is None or isinstance(error, ConnectFailed) or is_probe
                self._record_failure(reach, error, turn, is_probe=is_probe, is_counted=is_counted)
            raise
        if self.machine.traces:
            trace = f"{call.method} {origin}{call.shown_path} -> {response.status}"
            self.machine.log("trace", "request", trace)
        return response

    def _record_failure(
        self, reach: Reach, error: SyncError, turn: Turn, *, is_probe: bool, is_counted: bool
    ) -> None:
        now = anyio.current_time()
        if isinstance(error, ProtocolBroken):
            reach.record_answer(now)
        elif is_counted:
            reach.record_failure(error, turn.began, now, is_probe=is_probe)
        elif reach.is_out:
            error.away = reach

    # Logins.

    async def _login(self, client: RegistryClient, call: Call, *, can_repeat: bool) -> str | None:
        """Return the Authorization header for a call, after a request for a token if it needs one.
        Returns None if the call goes to another origin than the registry's (I6), or needs no login.

        Stops the registry if another attempt to log in could lock the account.
        """
        if call.origin is not None and call.origin != client.origin:
            return None
        login, scopes = client.authenticator, call.scopes
        try:
            while True:
                header = login.header(scopes, anyio.current_time(), for_body=not can_repeat)
                if header is not NEEDED:
                    return header
                await login.obtain(scopes, for_body=not can_repeat)
        except AuthError as error:
            if error.fatal:
                client.stop(error)  # another attempt could lock the account
            raise

    def _check_login(self, client: RegistryClient, call: Call, authorization: str | None) -> None:
        """Raise the error of a client that was stopped meanwhile. Raises LoginExpired if the login
        was refused to another request, or if the registry has asked another one for a login.
        """
        client.raise_if_stopped()
        if call.origin not in (None, client.origin):
            return  # no login goes there
        if client.authenticator.header(call.scopes, anyio.current_time()) != authorization:
            raise LoginExpired("another request has shown that this one needs another login")

    def _record_login(
        self, client: RegistryClient, call: Call, authorization: str | None, status: int
    ) -> None:
        # With 429 or 5xx the server may not have checked the login.
        is_accepted = status < 500 and status not in (401, 403, 429)
        if authorization is not None and is_accepted:
            client.authenticator.record_success(authorization, call.scopes, call.method)

    def refresh_login(
        self,
        client: RegistryClient,
        call: Call,
        used_authorization: str | None,
        refused: Exchange,
        refusals: list[bool],
    ) -> None:
        """Handle an answer that refuses a login, whose body was read. Returns if the call may be
        repeated with a new Authorization header. Otherwise raises the refusal as an error, and stops
        the registry if another attempt could lock the account.

        `used_authorization` is the Authorization header of the refused request. `refusals` are
        the earlier ones of the call (see `Authenticator.refused`).
        """
        try:
            may_repeat = client.authenticator.refused(
                refused.response, used_authorization, call.scopes, call.method, refusals
            )
        except AuthError as error:
            if error.fatal:
                client.stop(error)  # another attempt could lock the account
            raise
        if not may_repeat:
            raise self.refusal(client, call, refused)

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
        The response has to arrive within `seconds`. `check_may_send` is passed to Pool.exchange.
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
        ask = partial(self._fetch_once, origin, request, seconds, check_may_send, is_foreign)
        if client is None:
            return await ask()  # the modules of the clouds retry by themselves
        return await self._ask_token_service(origin, ask)

    async def _ask_token_service(
        self, origin: Origin, ask: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        """Send the request `ask` to the token service of a registry, which may be away like the
        registry itself.
        """
        reach = self._reach_of(origin)
        now = began = anyio.current_time()
        reach.raise_if_stopped(now)
        try:
            with anyio.CancelScope(
                deadline=reach.gives_up_at if reach.is_out else math.inf
            ) as scope:
                answer = await ask()
            if scope.cancelled_caught:
                reach.raise_if_stopped(anyio.current_time())
                raise TimedOut(f"{origin.authority} did not answer in time")
        except WireError as error:
            error.is_of_login = True
            reach.record_failure(error, began, anyio.current_time())
            raise
        now = anyio.current_time()
        if not is_gateway_failure(answer.status, answer.headers.get("retry-after")):
            reach.record_answer(now)
            return answer
        failure = RegistryError(f"status {answer.status}", status=answer.status)
        failure.is_of_login = True
        reach.record_failure(failure, began, now)
        if failure.away is not None or reach.stop_error is not None:
            raise failure
        return answer

    async def _fetch_once(
        self,
        origin: Origin,
        request: Request,
        seconds: float | None,
        check_may_send: Callable[[], None] | None,
        is_foreign: bool,
    ) -> Answer:
        """Send the request of `fetch` once. Raises TimedOut after `seconds`; if that is None, only
        the time-outs of the connection apply.
        """
        if check_may_send is not None:
            check_may_send()
        with anyio.move_on_after(seconds):
            async with await self.pool.exchange(
                origin, request, check_may_send=check_may_send, is_foreign=is_foreign
            ) as response:
                # The path is not logged, because some metadata services return credentials to
                # anybody who knows it.
                trace = f"{request.method} {origin} -> {response.status}"
                self.machine.log("trace", "request", trace)
                content = await response.read(_TOKEN_BODY)
                return Answer(response.status, dict(response.headers), content)
        assert seconds is not None  # only a time-out leaves the block without a return
        raise TimedOut(f"{origin} did not answer within {seconds:g} s")

    # What answers say about how often to ask.

    def _count(self, origin: Origin, action: str) -> None:
        """Count a request, if its origin belongs to a registry of this run."""
        client = self._first_client_at.get(origin.address)
        if client is not None:
            self.requests[client.key][action] += 1

    def _record_pace(
        self, client: RegistryClient, call: Call, turn: Turn, response: Response
    ) -> None:
        """Apply an answer of the registry itself to its lane."""
        now = response.came_at
        status = response.status
        header = response.headers.get
        self.last_progress = now
        retry_after = 0.0
        if status >= 500 or status in (408, 429):
            retry_after = parse_retry_after(header("retry-after"), self.machine.wall()) or 0.0
        turn.record_answer(status, now, retry_after)
        if status != 429:
            return
        lane = turn.lane
        self.throttled_lanes[client.key] = lane
        used_up_for = quota_wait(header, self.machine.wall())
        if used_up_for:
            lane.paused_until = max(lane.paused_until, now + min(used_up_for, LONGEST_WAIT))
        if used_up_for > LONGEST_WAIT:
            error = RegistryError("the quota is used up", status=429)
            self._stop_requests(client, call, turn, error, used_up_for)
        elif now - lane.refused_since > _THROTTLED_FOR:
            error = RegistryError("status 429 to every request for 10 minutes", status=429)
            self._stop_requests(client, call, turn, error, LONGEST_WAIT)

    def _stop_requests(
        self, client: RegistryClient, call: Call, turn: Turn, error: RegistryError, seconds: float
    ) -> None:
        """Stop requests to a registry for `seconds`, because it asks for a longer wait than a run
        makes: those of the lane if they find out what to copy, otherwise all. Makes `error` final,
        and adds the time to its message.
        """
        moment = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.machine.wall() + seconds))
        wait = duration_text(seconds)
        error.message += f" (asks to wait {wait}, until {moment}: longer than a run waits)"
        error.make_final()
        until = anyio.current_time() + seconds
        if call.action in _DISCOVERY:
            turn.lane.stop(error, until)
        else:
            client.limits.stop(error, until)

    def refusal(self, client: RegistryClient, call: Call, exchange: Exchange) -> RegistryError:
        """Return the error for an answer, whose body has been read, and record what it says of its
        host: that a proxy could not reach it, or that it asks for a long wait.
        """
        response, turn = exchange.response, exchange.turn
        if response.status == 429:
            self.throttled[client.key] += 1
        error = client.error_of(response, self.machine.wall())
        is_of_registry = exchange.reach is client.limits
        error.is_paced_by_window = response.status == 429 and is_of_registry
        if is_gateway_failure(error.status, error.retry_after):
            is_probe = turn.is_probe and is_of_registry
            is_counted = not exchange.is_body or is_probe
            self._record_failure(
                exchange.reach, error, turn, is_probe=is_probe, is_counted=is_counted
            )
        elif error.retryable and (error.retry_after or 0.0) > LONGEST_WAIT:
            self._stop_requests(client, call, turn, error, error.retry_after or 0.0)
        return error
