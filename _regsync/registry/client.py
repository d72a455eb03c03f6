"""One registry under one credential, and the way of one request to it: from its lane to its answer.

`exchange` tells that way: login, lane, connection, redirects, and what the answer says of the
registry. It sends a request again only with another login; `request` repeats short requests
(`limits.Retry`).

May not know: which images are copied where, and why.
Invariants: no credential leaves the registry's origin, and a location is not less safe than the
origin that names it (I6, R3, R4); a body is sent once (I7); the answer ends before its permit is
given back, so that the next request can reuse the connection; no error contains a secret or a
terminal's control characters (R10, R18).
Follows: docs/design.md section 9, docs/protocol-facts.md sections 1.7, 1.13, 8.1 and 9.2.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote

import anyio

from _regsync import __version__, edge
from _regsync.addresses import Origin, check_foreign, resolve_location
from _regsync.auth.challenge import parse_error_body
from _regsync.auth.cloud import CloudLogin
from _regsync.auth.credentials import Credential, Pair
from _regsync.auth.tokens import NEEDED, Authenticator, Scopes, says_login_ended
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
from _regsync.net.wire import Header, Pieces, Pool, Request, Response, Timeouts, parse_retry_after
from _regsync.providers import DIALECTS, api_host
from _regsync.registry.limits import (
    LONGEST_WAIT,
    THROTTLED_FOR,
    Gate,
    HostLimits,
    Lane,
    Retry,
    Trial,
    Turn,
    is_gateway_failure,
    quota_wait,
)
from _regsync.text import duration_text, keep_passing_secret, one_line, printable

# How many redirects of one request are followed (R4).
_MOST_REDIRECTS = 10
_REDIRECTS = (301, 302, 303, 307, 308)

# How often a request is repeated with a new login.
_MOST_LOGINS = 2

# How many bytes of an error's body are read (R14). Manifests and listings have limits of their own.
ERROR_BODY = 64 * 1024

_LARGEST_TOKEN_ANSWER = 1024 * 1024  # bytes

USER_AGENT: Header = ("User-Agent", f"regsync/{__version__}")
_EVERY_REQUEST: tuple[Header, ...] = (USER_AGENT, ("Accept-Encoding", "identity"))

# The number of characters of a registry's explanation that are searched for URLs.
_MOST_EXPLAINED = 4000

# Matches the query of a URL, which may contain a signature, in linear time.
_QUERY = r"\?\S+"

# Matches each value in a URL's query, because any value may be the URL's signature. Values shorter
# than 16 characters sign nothing, and would mask unrelated text, such as a region in a host name.
# Values longer than 2048 exceed the length of a printed line.
_QUERY_VALUES = "=([^&]{16,2048})"


class Machine(NamedTuple):
    """What a command gives to its runs, besides the edge. Tests replace it."""

    read: Callable[[str], bytes | None]  # read a file by its path; None if there is no such file
    log: Callable[..., None]
    timeouts: Timeouts = Timeouts()
    traces: bool = True  # whether `log` shows the level "trace", which has one line per request


class Run:
    """What the clients of a run share: the pool, the queues, the hosts, and what is counted."""

    def __init__(self, machine: Machine, pool: Pool) -> None:
        self.machine = machine
        self.pool = pool
        self.gate = Gate()
        # By `Origin.address`: the first client of each registry; all hosts that were asked.
        self.clients_at: dict[tuple[str, str, int], RegistryClient] = {}
        self.hosts: dict[tuple[str, str, int], HostLimits] = {}

        # By host:port, for the report and the progress display: requests by action, responses with
        # status 429, and the lane of the last request that got one.
        self.requests: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.throttled: Counter[str] = Counter()
        self.throttled_lanes: dict[str, Lane] = {}
        # When the last response arrived or the last bytes moved, in the event loop's time.
        self.last_progress = -math.inf

    def count(self, origin: Origin, action: str) -> None:
        """Count a request, if its origin belongs to a registry of this run."""
        client = self.clients_at.get(origin.address)
        if client is not None:
            self.requests[client.key][action] += 1

    def host_at(self, origin: Origin) -> HostLimits:
        """Return the host at an origin: a registry, or another one."""
        if origin.address not in self.hosts:
            self.hosts[origin.address] = self.new_host(origin.authority, origin)
        return self.hosts[origin.address]

    async def fetch(
        self,
        client: RegistryClient | None,
        method: str,
        url: str,
        headers: list[Pair],
        body: bytes,
        seconds: float | None = None,
    ) -> Response:
        """Send a request to a login service, under no permit (I8). No redirect is followed (R2).

        `client` is that of the registry which names the service, None for a cloud's own service,
        whose modules retry by themselves. The response has to arrive within `seconds`.
        Raises WireError if no response arrives, and RegistryError if the service is away.
        """
        # It is resolved only to check it and to split it: `url` has to be absolute.
        nowhere = Origin("https", "invalid.invalid", 443)
        origin, target = resolve_location(nowhere, "/", url)
        if origin == nowhere:
            raise ProtocolBroken("its address is not an http or https URL")
        # The connection uses the proxy and the authorities of this registry.
        known = client or self.clients_at.get(origin.address)
        if known is not None:
            origin = origin._replace(via=known.registry)
        self.count(origin, "token")
        headers = [USER_AGENT, ("Accept", "application/json"), *headers]
        request = Request(method, target, tuple(headers), body)
        ask = partial(self._ask, origin, request, seconds)
        if client is None:
            return await ask()

        # A token service may be away like the registry itself.
        host, began = self.host_at(origin), anyio.current_time()
        host.raise_if_stopped()
        failure: RegistryError | WireError
        try:
            with host.limiting():
                answer = await ask()
            if not is_gateway_failure(answer.status, answer.headers.get("retry-after")):
                host.record_answer(anyio.current_time())
                return answer
            text = f"the token service at {host.name} answered {answer.status}"
            failure = RegistryError(text, status=answer.status)
        except WireError as error:
            failure = error
        failure.enters_no_lane = True
        host.record_failure(failure, began, anyio.current_time())
        is_of_moment = failure.away is None and host.stop_error is None
        if is_of_moment and isinstance(failure, RegistryError):
            return answer
        raise failure

    async def _ask(self, origin: Origin, request: Request, seconds: float | None) -> Response:
        """Send the request of `fetch` once. Raises TimedOut after `seconds`, if they are given."""
        with anyio.move_on_after(seconds):
            async with await self.pool.exchange(origin, request) as response:
                # The path is not logged, because some metadata services return credentials to
                # anybody who knows it.
                trace = f"{request.method} {origin} -> {response.status}"
                self.machine.log("trace", "request", trace)
                await response.read(_LARGEST_TOKEN_ANSWER)
                return response
        assert seconds is not None  # only a time-out leaves the block without a return
        raise TimedOut(f"{origin} did not answer within {seconds:g} s")

    def new_host(self, name: str, origin: Origin, **lanes: Any) -> HostLimits:
        machine = self.machine
        return HostLimits(
            name,
            self.gate,
            chance=edge.current().chance,
            log=machine.log,
            timeouts=machine.timeouts,
            # A host that is away has closed its idle connections, or will not read them.
            on_away=partial(self.pool.close, origin),
            **lanes,
        )


class Call(NamedTuple):
    """One request to an endpoint of a registry, without login and origin."""

    action: str  # what the request counts as, a key of the table in docs/design.md section 9
    method: str
    path: str
    repository: str
    rights: str = "pull"  # which rights to `repository` its token needs
    headers: tuple[Header, ...] = ()
    body: bytes | memoryview = b""  # or its first piece

    # Other repositories that the token must cover too: name and rights.
    other_rights: tuple[tuple[str, str], ...] = ()

    # The origin of an upload's Location. None: the request goes to the registry itself.
    origin: Origin | None = None

    # Whether the request must use a new connection, because a reused one has delivered wrong bytes.
    is_fresh: bool = False

    # How long the response may take after the request was sent. `request` does not repeat a request
    # that had this time. None: the default.
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


class Exchange:
    """One request on its way, and its answer: `async with` yields the response, whose body may be
    unread, and ends both.
    """

    response: Response  # when it has come

    def __init__(
        self, call: Call, origin: Origin, turn: Turn, authorization: str | None, body: Pieces | None
    ) -> None:
        self.call = call
        self.origin = origin  # where it goes
        self.turn = turn
        self.authorization = authorization  # the header with its login
        self.body = body
        self.is_home = True  # whether it has gone to the registry alone

    def follow(self, origin: Origin, path: str) -> None:
        """Go where a redirect leads."""
        # After a redirect to another origin no credential is sent, not even to the registry (I6).
        if origin != self.origin:
            self.is_home = False
            self.authorization = None
        self.origin = origin
        self.call = self.call._replace(path=path, origin=origin)
        self.turn.began = anyio.current_time()

    async def __aenter__(self) -> Response:
        return self.response

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.response.close()
        finally:
            self.turn.leave()


def origin_of(registry: Registry) -> Origin:
    return Origin(registry.scheme, api_host(registry.host), registry.port, registry)


class RegistryClient:
    """A registry under one credential. All aliases of one HOST:PORT with that credential share it."""

    def __init__(
        self,
        registry: Registry,
        credential: Credential | CloudLogin | None,
        run: Run,
        limits: HostLimits,
    ) -> None:
        self.registry = registry
        self.key = registry.authority
        self.origin = origin_of(registry)
        self.limits = limits  # of HOST:PORT, whatever the credential
        self.timeouts = run.machine.timeouts
        self._run = run
        self._per_project = DIALECTS[registry.kind].per_project
        self.authenticator = Authenticator(
            origin=self.origin, credential=credential, fetch=partial(run.fetch, self)
        )

        # A password that is refused again and again locks its account.
        self._trial = Trial(limits, lambda: self.authenticator.has_let_in)

        # Whether this run uses the client. A client that a run did not use is dropped.
        self.is_used = True

        # Whether broken uploads are resumed (rule 16). Set to False when the registry refuses that.
        self.can_resume = True

    def begin_run(self) -> None:
        """Prepare for another run, which tries the credential again."""
        self.is_used = False
        self.authenticator.begin()

    def stop(self, error: SyncError) -> None:
        """Make all further requests with this credential fail with an error in this run."""
        self.authenticator.refusal = error.copy_without_context()

    @property
    def stop_error(self) -> SyncError | None:
        """The error with which all further requests of this run fail, or None."""
        return self.authenticator.refusal or self.limits.stop_error

    # The way of a request.

    async def request(
        self, call: Call, *, ok: Collection[int], limit: int = ERROR_BODY
    ) -> Response:
        """Send a short request, with the retries of docs/design.md section 9. Returns the response
        with its body, which may have at most `limit` bytes. Raises SyncError for a status not in
        `ok`.
        """
        retry = Retry(edge.current().chance)
        while True:
            try:
                async with await self.exchange(call, ok) as response:
                    await response.read(limit)
                    return response
            except SyncError as error:
                failure = error
            if isinstance(failure, TimedOut) and call.seconds is not None:
                failure.retryable = False
            text = f"{call.method} {self.key}{call.shown_path}: {failure}"
            self._run.machine.log("debug", "retry", text)
            await retry.pause(failure, self.limits)

    def lane_of(self, call: Call) -> Lane:
        """Return the lane that a request enters. A PUT with a body ends its upload too."""
        area = call.repository.partition("/")[0] if self._per_project else ""
        is_whole_body = call.action == "upload_body" and call.method == "PUT"
        return self.limits.lane("upload_finish" if is_whole_body else call.action, area)

    async def _enter(self, call: Call, authorization: str | None) -> Turn:
        """Wait until a request may be sent, and take its turn."""
        on_trial = [self._trial] if self.authenticator.is_on_trial(authorization) else []
        turn: Turn
        turn, *places = await self._run.gate.enter(self.lane_of(call), *on_trial)
        turn.places = places
        return turn

    async def exchange(
        self,
        call: Call,
        ok: Collection[int],
        *,
        body: Pieces | None = None,
        turn: Turn | None = None,
    ) -> Exchange:
        """Send a request, and return its answer with the body unread. The caller ends the exchange.
        Raises SyncError for a status not in `ok`.

        The request is repeated only with a new login, or after a redirect. A request with a `body`
        is sent once (I7), so the caller has to handle a refused login, and a success that arrives
        before the last byte was sent. `turn` was taken for it already.
        """
        logins = 0  # after refusals
        while True:
            try:
                authorization = await self._log_in(call, can_repeat=body is None)
                if turn is None:
                    turn = await self._enter(call, authorization)
                if body is not None and not body.has_begun:
                    # This may take so long that the login ends.
                    call = call._replace(body=await body.next())
                exchange = Exchange(call, call.origin or self.origin, turn, authorization, body)
                exchange.is_home = exchange.origin == self.origin
                self._check_login(exchange)
                await self._follow(exchange)
            except LoginExpired:  # the login has ended, or was refused to another request
                # A body keeps its turn, because those of both its ends were taken in one step (I8).
                if turn is not None and body is None:
                    turn.leave()
                    turn = None
                continue
            except BaseException:
                if turn is not None:
                    turn.leave()
                raise
            turn = None  # it ends with the exchange
            if exchange.response.status in ok:
                return exchange
            async with exchange as response:
                await response.read(ERROR_BODY)
                is_denied = response.status == 403 or says_login_ended(response)
                if not is_denied or not exchange.is_home or body is not None:
                    raise self.refusal(exchange)
                self.refresh_login(exchange, may_repeat=logins < _MOST_LOGINS)
                logins += 1

    async def _follow(self, exchange: Exchange) -> None:
        """Send a request, and follow its redirects (R4)."""
        asked = exchange.call.path
        for _ in range(_MOST_REDIRECTS + 1):
            response = exchange.response = await self._send(exchange)
            is_redirect = exchange.call.method in ("GET", "HEAD") and response.status in _REDIRECTS
            try:
                self._record(exchange)
                if not is_redirect:
                    return
            except SyncError:
                await response.close()
                raise
            await response.close()  # other requests may use the connection from now on
            location = response.headers.get("location")
            if not location:
                raise ProtocolBroken(f"status {response.status} without a Location")
            origin, path = resolve_location(exchange.origin, exchange.call.path, location)
            check_foreign(exchange.origin, origin)  # each is as safe as the one before it
            mask_signature(path, asked)
            exchange.follow(origin, path)
        raise ProtocolBroken(f"more than {_MOST_REDIRECTS} redirects")

    async def _send(self, exchange: Exchange) -> Response:
        """Send a request once, and return its answer."""
        call, origin = exchange.call, exchange.origin
        host = self._host_at(origin)
        host.raise_if_stopped()
        if host is not self.limits:
            exchange.turn.end_probe()  # it says nothing of the registry
        if exchange.body is not None:
            exchange.body.on_taken = partial(exchange.turn.record_taken, host)
        self._run.count(origin, call.action)
        try:
            with host.limiting():
                response = await self._run.pool.exchange(
                    origin,
                    call.request(exchange.authorization),
                    pieces=exchange.body,
                    seconds=call.seconds,
                    is_fresh=call.is_fresh,
                    check_may_send=partial(self._check_login, exchange),
                )
        except WireError as error:
            # Otherwise the source of the body has failed, or a host was stopped meanwhile.
            if error.side is None and error.away is None:
                if origin != self.origin:
                    error.message += f" (a Location of {self.key} leads there)"
                self._record_failure(exchange, error)
            raise
        if self._run.machine.traces:
            trace = f"{call.method} {origin}{call.shown_path} -> {response.status}"
            self._run.machine.log("trace", "request", trace)
        return response

    def _host_at(self, origin: Origin) -> HostLimits:
        return self.limits if origin == self.origin else self._run.host_at(origin)

    # Logins.

    async def _log_in(self, call: Call, *, can_repeat: bool) -> str | None:
        """Return the Authorization header for a call, after a request for a token if it needs one.
        Returns None if the call goes to another origin than the registry's (I6), or needs no login.
        """
        login, scopes = self.authenticator, call.scopes
        if login.refusal is not None:
            raise login.refusal.copy_without_context()
        self.limits.raise_if_stopped()
        if call.origin not in (None, self.origin):
            return None
        while True:
            header = login.header(scopes, anyio.current_time(), for_body=not can_repeat)
            if header is not NEEDED:
                return header
            with self._stopping():
                await login.obtain(scopes, for_body=not can_repeat)

    def _check_login(self, exchange: Exchange) -> None:
        """Raise LoginExpired if the login of a request has ended or was refused to another one, or if
        the registry has asked another one for a login.
        """
        if not exchange.is_home:
            return  # no login goes there
        scopes, now = exchange.call.scopes, anyio.current_time()
        header = self.authenticator.header(scopes, now, for_body=exchange.body is not None)
        if header != exchange.authorization:
            raise LoginExpired("the request needs another login")

    def refresh_login(self, refused: Exchange, *, may_repeat: bool) -> None:
        """Handle an answer that refuses a login, whose body was read. Returns if its request is to be
        repeated with a new login. Otherwise raises the refusal as an error.
        """
        with self._stopping():
            may_help = self.authenticator.refused(
                refused.response, refused.authorization, refused.call.scopes
            )
        if not (may_help and may_repeat):
            raise self.refusal(refused)

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """Stop the client by an AuthError after which another attempt could lock the account, and by
        a token service that asks for a longer wait than a run makes.
        """
        try:
            yield
        except AuthError as error:
            if error.fatal:
                self.stop(error)
            raise
        except RegistryError as error:
            # Who waited for the same token gets a copy of an error that is final already.
            if error.retryable and (error.retry_after or 0.0) > LONGEST_WAIT:
                _make_final(error, error.retry_after or 0.0)
                self.stop(error)
            raise

    # What answers say.

    def _record(self, exchange: Exchange) -> None:
        """Record what the head of an answer says of its host. Raises an error if it is no answer to
        the request.
        """
        response, status = exchange.response, exchange.response.status
        has_login = exchange.authorization is not None
        # With 429 or 5xx the server may not have checked the login. ECR answers 400 to an ended one.
        if has_login and status < 500 and status not in (400, 401, 403, 429):
            self.authenticator.record_success()
        retry_after = self._asked_wait(response)
        now = anyio.current_time()
        if not is_gateway_failure(status, retry_after):
            self._host_at(exchange.origin).record_answer(now)
        if exchange.is_home:
            self._run.last_progress = now
            exchange.turn.record_answer(status, now, retry_after or 0.0)
        if exchange.body is not None:
            return  # `upload` judges its answer
        if status == 401 and not exchange.is_home:
            who = exchange.origin.authority
            raise ProtocolBroken(f"{who}, to which the registry redirects, asks for a login")
        if response.is_early and status in (200, 201):
            raise Disconnected("the registry answered before the request was sent")

    def _asked_wait(self, response: Response) -> float | None:
        """Return the seconds that an answer asks to wait: by Retry-After, or else until the quota is
        renewed that is used up; None if it does not ask.
        """
        status, header = response.status, response.headers.get
        if status < 500 and status not in (408, 429):
            return None
        wall = edge.current().wall()
        wait = parse_retry_after(header("retry-after"), wall)
        return quota_wait(header, wall) if wait is None and status == 429 else wait

    def _record_failure(self, exchange: Exchange, error: SyncError) -> None:
        """Record that a host has not answered, or that a proxy in front of it has."""
        now = anyio.current_time()
        turn, host = exchange.turn, self._host_at(exchange.origin)
        error.enters_no_lane = host is not self.limits
        if isinstance(error, ProtocolBroken):
            host.record_answer(now)
        elif exchange.body is None or turn.is_probe or isinstance(error, ConnectFailed):
            host.record_failure(error, turn.began, now, is_probe=turn.is_probe)
        elif host.is_out:  # otherwise it says nothing: a registry may refuse a body so
            error.away = host

    def refusal(self, exchange: Exchange) -> RegistryError:
        """Return the error for an answer whose body has been read, and record what it says of its
        host: that a proxy could not reach it, or that it asks for a long wait.
        """
        error, lane = self._error_of(exchange.response), exchange.turn.lane
        if exchange.origin != self.origin:
            error.enters_no_lane = True
            who = exchange.origin.authority
            error.message += f" (from {who}: a Location of {self.key} leads there)"
            if error.hint is not None:  # our rights at the registry do not matter there
                error.hint = "check whether a proxy or firewall refuses requests to that host"
        wait = error.retry_after or 0.0
        if error.status == 429:
            self._run.throttled[self.key] += 1
            self._run.throttled_lanes[self.key] = lane
            if anyio.current_time() - lane.refused_since > THROTTLED_FOR:
                error.message = "status 429 to every request for 10 minutes"
                wait = max(wait, LONGEST_WAIT + 1)
        if is_gateway_failure(error.status, error.retry_after):
            self._record_failure(exchange, error)
        elif error.retryable and wait > LONGEST_WAIT:
            _make_final(error, wait)
            lane.stop(error, anyio.current_time() + wait)
        return error

    def _error_of(self, response: Response) -> RegistryError:
        """Convert an answer into an error with the cleaned text of the registry (R18)."""
        status = response.status
        codes, text = parse_error_body(response.body)
        # Some servers repeat the request in the error, so the queries of URLs are removed (R10).
        text = one_line(re.sub(_QUERY, "?...", printable(text, _MOST_EXPLAINED)))
        error = RegistryError(
            f"status {status}: {text}" if text else f"status {status}",
            status=status,
            codes=codes,
            retry_after=self._asked_wait(response),
        )
        if status in (401, 403):
            error.hint = self.authenticator.denied_hint
        return error


def _make_final(error: RegistryError, seconds: float) -> None:
    """Make an error final, because a registry asks for a longer wait than a run makes, and add the
    time to its message.
    """
    end = time.gmtime(edge.current().wall() + seconds)
    moment = time.strftime("%Y-%m-%d %H:%M UTC", end)
    wait = duration_text(seconds)
    error.message += f" (asks to wait {wait}, until {moment}: longer than a run waits)"
    error.retryable = False


def mask_signature(path: str, asked: str) -> None:
    """Mask the values in the query of a URL that a registry has named, because one may sign it. What
    is repeated of the names that it was asked for (`asked`) is no secret.
    """
    values = re.findall(_QUERY_VALUES, path)
    secrets = {*values, *map(unquote, values)}
    keep_passing_secret(*(each for each in secrets if each not in asked))
