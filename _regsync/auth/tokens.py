"""The Authorization header of each request to one registry.

Before a request, `header` says at once what to send, or NEEDED. Then the caller waits in `obtain`,
while it holds nothing, and asks `header` again; so does who has waited for anything since. After the
answer the caller calls `record_success`, or `refused`, which says whether another login may help.

Invariants: a secret is only sent to its own registry, or to a realm that `check_realm` accepts. A
refused password is not sent again in a run, because repeated failures lock accounts. `header` never
returns a token that was refused.
Follows: docs/design.md sections 3, 6 and 9, docs/protocol-facts.md sections 2 and 9.2 (R2, R9, R18,
R19).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlencode

import anyio

from _regsync import edge
from _regsync.addresses import Origin
from _regsync.auth.challenge import Challenge, check_realm, parse_challenges, parse_error_body
from _regsync.auth.cloud import CloudLogin, Fetch, jwt_lifetime
from _regsync.auth.credentials import Credential
from _regsync.errors import AuthError, RegistryError, SyncError
from _regsync.net.wire import Response, parse_retry_after
from _regsync.text import json_object, keep_secret, mask, printable, retire_secret

# What a request needs, or a token covers: repositories, each with its actions, such as
# ("team/app", "pull,push"). The actions are sorted, because registries compare the text
# (docs/protocol-facts.md section 2.2).
Scopes = frozenset[tuple[str, str]]

# What `header` returns if `obtain` has to be called first.
NEEDED = "needed"

# The largest number of repositories that one token request names (docs/design.md section 6, rule
# 2). Even with the longest names, the URL stays below the limits of all known servers.
_MOST_REPOSITORIES = 8

# The fraction of a token's lifetime after which the token is renewed.
_RENEW_AT = 0.9

# Seconds. The token specification requires at least this lifetime, so a shorter `expires_in` is
# treated as this value (docs/protocol-facts.md section 2.5).
_SHORTEST_LIFE = 60.0

# Seconds for which a login serves in any case, so that at least the request that waits is sent before
# the next renewal.
_SHORTEST_USE = 1.0

# Statuses with which a token service may refuse a request for several repositories although it
# would issue a token for one of them: it refuses another repository, or the number of scopes (ghcr:
# 403). 401 only without a credential.
_STATUSES_FOR_SCOPES = (400, 401, 403, 404, 413, 414, 431)

# Matches the body of a 400 with which a token service refuses a login, most often a refresh token
# (RFC 6749 section 5.2, docs/protocol-facts.md section 2.4).
_REFUSED_LOGIN = rb'"(?:invalid_grant|UNAUTHORIZED)"'

# Matches a token that can be sent in a header.
_TOKEN = r"[\x21-\x7e]{1,65536}"

# The number of characters of a token from which on it is masked in output.
_SHORTEST_MASKED = 8

# The number of characters of a token service's explanation that are shown.
_MOST_REASON = 198

_REFUSED_HINT = "check the user name, and whether the password or token has expired or lacks rights"


class Grant(NamedTuple):
    """A header that may be sent, and what for. Times are seconds of the event loop's clock."""

    header: str
    scopes: Scopes
    renew_at: float
    renew_before_body: float  # a request with a body cannot be repeated

    def __repr__(self) -> str:
        return "<Grant>"  # it holds a secret


def says_login_ended(answer: Response) -> bool:
    """Report whether an answer, whose body was read, asks for a new login.

    For an expired password ECR answers 400 or 403. Only its text distinguishes that from a missing
    right.
    """
    is_expired = answer.status in (400, 403) and b"token has expired" in answer.body
    return answer.status == 401 or is_expired


class Authenticator:
    """What one registry asks for, and the logins that answer it, with one credential or none.

    Several tasks may call these methods concurrently. Each call may be cancelled.
    """

    def __init__(
        self, *, origin: Origin, credential: Credential | CloudLogin | None, fetch: Fetch
    ) -> None:
        self._origin = origin
        self._token_service = f"the token service of {origin.authority}"  # for messages
        self._fetch = fetch

        # The cloud login that provides the credential when it is needed, or None.
        self.cloud_login = credential if isinstance(credential, CloudLogin) else None
        self.credential = Credential()
        self._set_credential(credential if isinstance(credential, Credential) else Credential())
        self._rejected: Credential | None = None  # was refused; only a cloud may replace it
        self.refusal: SyncError | None = None  # ends all logins of this run

        # The challenge that each request answers. None until the registry has sent one. Its scope
        # is empty, unless one scope is for all repositories (ECR Public: `aws`).
        self._challenge: Challenge | None = None
        self._is_challenge_confirmed = False  # whether it was sent in this run
        self._wants_exact = False  # whether a token must not cover more than its request needs
        self._learnt: dict[Scopes, str] = {}  # what to ask for instead, by what is needed
        self._planned: dict[str, str] = {}  # the actions that this run will need, by repository

        self._grants: dict[Scopes, Grant] = {}  # all tokens, the newest last
        self._covering: dict[Scopes, Grant] = {}  # what goes with requests that need these scopes
        self._lacking = set[str]()  # headers without a right; it may be given before the next run
        self.has_let_in = False  # whether a request with a login was let in, in this run

        # Logins are obtained one after the other, because each may serve the next request too. If
        # tokens are exact, this holds for each set of scopes by itself. All who wait for a login
        # share its failure.
        self._locks = defaultdict[Scopes | None, anyio.Lock](anyio.Lock)
        self._waiting: list[Scopes] = []  # what those need who wait for a login
        self._attempts = 0  # that have ended
        self._failures: dict[Scopes, tuple[int, SyncError]] = {}  # each with its attempt's number

    def _set_credential(self, credential: Credential) -> None:
        retire_secret(*self.credential.secrets)
        keep_secret(*credential.secrets)
        self.credential = credential
        self.was_accepted = False  # whether the registry has accepted this credential
        # The OAuth2 refresh token to send to the token service, or "". The service may replace it.
        self._refresh_token = credential.identity_token

    # For messages.

    @property
    def is_anonymous(self) -> bool:
        """Whether there is no credential."""
        return self.credential == Credential()  # its fields are empty

    @property
    def service(self) -> str:
        """The `service` of the registry's challenge. Empty if it has sent none yet."""
        return self._challenge.service if self._challenge is not None else ""

    @property
    def login_hint(self) -> str:
        """Advice for the user on how to provide a credential."""
        who = self._origin.authority
        hint = f"log in with a container client (docker login {who}), or configure auth_type: basic"
        if self.cloud_login is not None and self.cloud_login.lack:
            return f"the cloud gives no login ({self.cloud_login.lack}): {hint}"
        return hint

    @property
    def denied_hint(self) -> str:
        """Advice for the user if the registry denies access."""
        if self.is_anonymous:
            return (
                f"{self.login_hint}, since no credentials are in use; or check the name: "
                "a missing repository may look like a private one"
            )
        return f"check which rights the credentials ({self.credential.found_at}) have there"

    def _refused_error(self, who: str, *, fatal: bool = True) -> AuthError:
        message = f"{who} refused the credentials ({self.credential.found_at})"
        return AuthError(message, hint=_REFUSED_HINT, fatal=fatal)

    # Runs, and what is kept between them.

    def begin(self) -> None:
        """Start another run: discard what is planned, and tokens that have expired or lack a right,
        and treat the challenge as out of date.
        """
        now = anyio.current_time()
        ended = {each.header for each in self._grants.values() if not _serves(each, now, False)}
        self._drop(ended | self._lacking)
        self._lacking.clear()
        self._planned.clear()
        self._failures.clear()
        self.has_let_in = False
        self._is_challenge_confirmed = False
        # The account may have been unlocked since the last run.
        self._rejected = self.refusal = None

    def plan_scope(self, repository: str, actions: str) -> None:
        """Declare that this run will use a repository, so that the next token request names it too.

        One token covers up to eight repositories (rule 2).
        """
        self._planned[repository] = _more(actions, self._planned.get(repository))

    @property
    def login_facts(self) -> list[list[str] | bool | None]:
        """The JSON value that `restore` accepts in the next run: the fields of the challenge, or
        None if there is none or if it contains a secret, and whether tokens must be exact.
        """
        fields = [*self._challenge] if self._challenge is not None else None
        is_secret = fields is not None and any(mask(field) != field for field in fields)
        return [None if is_secret else fields, self._wants_exact]

    def restore(self, login_facts: object) -> None:
        """Restore the `login_facts` of an earlier run. A malformed value is ignored.

        With a saved challenge the first request can carry a token, which saves a 401 round trip.
        The realm is validated when it is used.
        """
        match login_facts:
            case [fields, bool(wants_exact)]:
                self._wants_exact |= wants_exact
            case _:
                return
        match fields:
            # The Basic scheme sends the password itself. Over plain http it is only sent if the
            # registry has asked for it in this run (docs/protocol-facts.md section 2.6).
            case [str(scheme), str(), str(), str(), str()] if (
                scheme == "bearer" or self._origin.scheme == "https"
            ):
                self._challenge = self._challenge or Challenge(*fields)

    # Before a request.

    def header(self, needed: Scopes, now: float, *, for_body: bool = False) -> str | None:
        """Return the header to send: None for none, NEEDED if `obtain` has to be called first.

        `now` is in seconds of the event loop's clock. `for_body`: the request cannot be repeated.
        """
        static_token = self.credential.registry_token  # sent as it is, without a token service
        # Over plain http, which can be overheard, it is only sent if the registry asks for a login.
        if static_token and (self._challenge is not None or self._origin.scheme == "https"):
            return f"Bearer {static_token}"
        if self._challenge is None:
            return None
        grant = self._covering.get(needed)
        return grant.header if grant is not None and _serves(grant, now, for_body) else NEEDED

    async def obtain(self, needed: Scopes, *, for_body: bool = False) -> None:
        """Obtain a login. Who then finds that `header` still says NEEDED calls this again.

        Concurrent callers share one request. Raises SyncError if there is no login, or if it was
        refused.
        """
        self._waiting.append(needed)
        try:
            await self._obtain_in_turn(needed, for_body)
        finally:
            self._waiting.remove(needed)

    async def _obtain_in_turn(self, needed: Scopes, for_body: bool) -> None:
        attempts_before = self._attempts
        key = self._lock_key(needed)
        async with self._locks[key]:
            if self.refusal is not None:
                raise self.refusal.copy_without_context()
            attempt, failure = self._failures.get(needed, (0, None))
            if failure is not None and attempt > attempts_before:
                raise failure.copy_without_context() from failure
            if self._challenge is None or self._lock_key(needed) != key:
                return
            if self._find_token(needed, for_body):
                return
            try:
                if self._challenge.scheme == "basic":
                    await self._obtain_password(needed)
                else:
                    await self._obtain_token(needed, for_body)
            except SyncError as error:
                is_final = isinstance(error, AuthError) and error.fatal
                if is_final:
                    self.refusal = error
                if not (self._is_challenge_confirmed or error.retryable or is_final):
                    # The challenge was saved by an earlier run, and no longer leads to a login. The
                    # registry answers a request without a login with the current one.
                    self._challenge = None
                    return
                self._failures[needed] = (self._attempts + 1, error)
                raise
            finally:
                self._attempts += 1

    def _lock_key(self, needed: Scopes) -> Scopes | None:
        """Return which lock to hold for a login: that of these scopes, or None for that of all."""
        # A password that may be wrong is sent by one task alone.
        return needed if self._wants_exact and self.has_let_in else None

    def is_on_trial(self, sent: str | None) -> bool:
        """Report whether a header shows a password that may be wrong."""
        return not self.has_let_in and sent is not None and sent == self.credential.basic

    async def _renew_credential(self) -> None:
        """Update `credential` from the cloud login, if there is one, which renews it when it is due
        or was refused. Raises SyncError if it has none, or still the refused one.
        """
        if self.cloud_login is None:
            return
        credential = await self.cloud_login.credential(self._rejected) or Credential()
        if credential == self._rejected:
            raise self._refused_error(self._origin.authority)
        # Setting the same credential again would reset `was_accepted` and the refresh token.
        if credential != self.credential:
            self._set_credential(credential)

    async def _obtain_password(self, needed: Scopes) -> None:
        await self._renew_credential()
        basic = self.credential.basic
        if basic is None:
            lack = f"{self.credential.found_at} has none"
            if self.is_anonymous:
                lack = "none are configured or found"
            message = f"{self._origin.authority} asks for a user name and password, and {lack}"
            raise AuthError(message, hint=self.login_hint, fatal=not self.is_anonymous)
        renew_at = math.inf
        if self.cloud_login is not None:
            renew_at = max(self.cloud_login.renew_at, anyio.current_time() + _SHORTEST_USE)
        self._covering[needed] = Grant(basic, needed, renew_at, renew_at)

    def _find_token(self, needed: Scopes, for_body: bool) -> bool:
        """Look for the newest token that serves a request. Returns whether there is one."""
        wanted = self._wanted(needed)
        grants: Iterable[Grant | None] = reversed([*self._grants.values()])
        if self._wants_exact:  # at most one suffices, and there may be thousands
            grants = [self._grants.get(wanted)]
        is_for_all = self._challenge is not None and self._challenge.scope
        for grant in grants:
            if grant is None or not _serves(grant, anyio.current_time(), for_body):
                continue
            if wanted <= grant.scopes or is_for_all:
                self._covering[needed] = grant
                return True
        return False

    # Token requests.

    def _wanted(self, needed: Scopes) -> Scopes:
        """Return what to ask for: for each repository all that this run will need there."""
        if self._wants_exact or needed in self._learnt:
            return needed
        return frozenset(
            (name, _more(actions, self._planned.get(name))) for name, actions in needed
        )

    def _with_others(self, wanted: Scopes, for_body: bool) -> Scopes:
        """Return the wanted scopes, and others that no token covers yet: what those need who wait,
        such as both repositories of a mount, and what is planned.
        """
        is_for_all = self._challenge is not None and self._challenge.scope
        if self._wants_exact or is_for_all or wanted in self._learnt:
            return wanted
        now = anyio.current_time()
        grants = self._grants.values()
        live = [grant.scopes for grant in grants if _serves(grant, now, for_body)]
        for needed in self._waiting:
            scopes = self._wanted(needed)
            is_served = needed in self._learnt or any(scopes <= each for each in live)
            if not is_served and len(wanted | scopes) <= _MOST_REPOSITORIES:
                wanted |= scopes
        covered = wanted.union(*live)
        more = [scope for scope in self._planned.items() if scope not in covered]
        return wanted.union(more[: _MOST_REPOSITORIES - len(wanted)])

    async def _obtain_token(self, needed: Scopes, for_body: bool) -> None:
        """Request a token, and store it. If the service may have refused it because of more scopes
        than are needed, tokens have exact scopes from now on, and nothing is stored.

        Raises SyncError if there is no token.
        """
        await self._renew_credential()
        wanted = self._with_others(self._wanted(needed), for_body)
        began = anyio.current_time()
        used = self.credential
        answer = await self._request_token(wanted, needed)
        # A new login of a cloud's identity that was never let in would be refused too.
        may_be_replaced = self.was_accepted or used != self.credential
        if self._is_refused(answer) and may_be_replaced and self.cloud_login is not None:
            self._rejected = used
            await self._renew_credential()
            answer = await self._request_token(wanted, needed)

        # A refused password is not sent again, not even for fewer scopes.
        is_about_scopes = answer.status in _STATUSES_FOR_SCOPES and not self._is_refused(answer)
        if is_about_scopes and wanted != needed:
            self._demand_exact()
        elif 200 <= answer.status < 300:
            grant = self._read_token(answer.body, wanted, began)
            former = self._grants.pop(wanted, grant)
            if former.header != grant.header:
                self._drop({former.header})
            self._grants[wanted] = self._covering[needed] = grant
        else:
            raise self._token_error(answer, wanted, needed)

    async def _request_token(self, wanted: Scopes, needed: Scopes) -> Response:
        """Send a token request: by POST with a refresh token (docs/protocol-facts.md section 2.4),
        else by GET with a password or anonymously (section 2.3).
        """
        challenge = self._challenge
        # Another task may have dropped the challenge while this task waited for a cloud's login.
        if challenge is None:
            raise AuthError("another request has found that this host's challenge is out of date")
        self._check_realm(challenge)
        scope = challenge.scope or self._learnt.get(wanted) or _scope_text(wanted, needed)
        query = [("service", challenge.service)] if challenge.service else []
        if self._refresh_token:
            query += [
                ("grant_type", "refresh_token"),
                ("client_id", "regsync"),
                ("scope", scope),
                ("refresh_token", self._refresh_token),
            ]
            headers = [("Content-Type", "application/x-www-form-urlencoded")]
            body = urlencode(query, errors="surrogatepass").encode()
            return await self._fetch("POST", challenge.realm, headers, body)

        query += [("scope", word) for word in dict.fromkeys(scope.split())]
        headers = []
        if basic := self.credential.basic:
            query.append(("account", self.credential.username))
            headers = [("Authorization", basic)]
        separator = "&" if "?" in challenge.realm else "?"
        url = f"{challenge.realm}{separator}{urlencode(query, errors='surrogatepass')}"
        return await self._fetch("GET", url, headers, b"")

    def _check_realm(self, challenge: Challenge) -> None:
        check_realm(challenge.realm, self._origin, has_credentials=not self.is_anonymous)

    def _read_token(self, body: bytes, scopes: Scopes, began: float) -> Grant:
        """Read the answer to a token request that began at this time. Raises AuthError if it has no
        usable token.
        """
        document = json_object(body) or {}
        token = document.get("token") or document.get("access_token")
        if not isinstance(token, str) or not re.fullmatch(_TOKEN, token):
            raise AuthError(f"{self._token_service} answered without a usable token")
        # Else a hostile service could choose a word of reports, such as a status.
        if len(token) >= _SHORTEST_MASKED:
            keep_secret(token)
        refresh_token = document.get("refresh_token")
        # If there is no refresh token to replace, tokens are requested by password.
        if self._refresh_token and refresh_token and isinstance(refresh_token, str):
            retire_secret(self._refresh_token)
            keep_secret(refresh_token)
            self._refresh_token = refresh_token

        lifetime = document.get("expires_in")  # seconds, as a number or as a string
        if lifetime is None:
            lifetime = jwt_lifetime(token, edge.current().wall())
        # A token of unknown lifetime serves requests that can be repeated until it is refused.
        renew_at, renew_before_body = math.inf, began + _SHORTEST_LIFE
        with suppress(ValueError):  # `float("None")` fails if the lifetime is unknown
            seconds = max(_SHORTEST_LIFE, float(str(lifetime)))
            renew_at = renew_before_body = began + seconds * _RENEW_AT
        # The service may have taken longer than that to answer.
        soonest = anyio.current_time() + _SHORTEST_USE
        renew_at, renew_before_body = max(renew_at, soonest), max(renew_before_body, soonest)
        return Grant(f"Bearer {token}", scopes, renew_at, renew_before_body)

    def _token_error(self, answer: Response, wanted: Scopes, needed: Scopes) -> SyncError:
        """Return the error for an error status of the token service: a RegistryError if a later
        attempt may succeed, otherwise an AuthError.
        """
        who, status = self._token_service, answer.status
        if self._is_refused(answer):
            return self._refused_error(who)
        reason = parse_error_body(answer.body).message
        suffix = f": {printable(reason, _MOST_REASON)}" if reason else ""
        if status in (408, 429) or status >= 500:
            wait = parse_retry_after(answer.headers.get("retry-after"), edge.current().wall())
            message = f"{who} answered {status}{suffix}"
            error = RegistryError(message, status=status, retry_after=wait)
            error.enters_no_lane = True
            return error

        shown = ", ".join(f"{name} ({actions})" for name, actions in _in_order(wanted, needed)[:2])
        recipient = f"to the credentials from {self.credential.found_at}"
        if self.is_anonymous:
            recipient = "without credentials"
        message = f"{who} gives no token for {shown} {recipient}: status {status}{suffix}"
        return AuthError(message, hint=self.denied_hint)

    def _is_refused(self, answer: Response) -> bool:
        """Report whether a token service has refused the credential itself."""
        is_refusal = answer.status == 401 or (
            answer.status == 400 and re.search(_REFUSED_LOGIN, answer.body) is not None
        )
        return is_refusal and not self.is_anonymous

    def _demand_exact(self) -> None:
        """Let no token cover more than its request needs."""
        self._wants_exact = True
        self._covering.clear()

    def _drop(self, headers: set[str]) -> None:
        """Let tokens serve no more, under whatever scopes they were issued."""
        for grants in (self._grants, self._covering):
            for scopes in [scopes for scopes, grant in grants.items() if grant.header in headers]:
                del grants[scopes]
        retire_secret(*(header.removeprefix("Bearer ") for header in headers))

    # After a request.

    def record_success(self) -> None:
        """Record that the registry has let in a request with a login."""
        self.was_accepted = self.has_let_in = True
        self._is_challenge_confirmed = True  # the login answers it

    def refused(self, answer: Response, sent: str | None, needed: Scopes) -> bool:
        """Record that the registry has refused a request, so that `header` and `obtain` answer it.

        `answer` has been read, and `sent` is the header of the request, or None. Returns whether
        another login may help. Raises AuthError if the challenge is not supported, or if the
        credential was refused.
        """
        grant = self._covering.get(needed)
        is_current = grant is not None and grant.header == sent  # else it was replaced meanwhile
        is_wide = grant is not None and is_current and grant.scopes != needed
        is_static = bool(self.credential.registry_token)
        if not says_login_ended(answer):
            if is_wide:
                # The service may have granted fewer rights, because it was asked for several
                # repositories at once.
                self._demand_exact()
            is_token = sent is not None and sent.startswith("Bearer ") and not is_static
            return is_token and (is_wide or not is_current)

        chosen = self._choose_challenge(answer.headers.all("www-authenticate"), sent)
        if chosen is None:
            return False
        if sent is not None and is_static:
            raise self._refused_error(self._origin.authority, fatal=False)  # nothing renews it
        self._adopt(chosen)
        if chosen.scheme == "basic":
            if sent is not None and sent == self.credential.basic:
                self._rejected = self.credential
                self._covering.clear()
                # A new login of a cloud's identity that was never let in would be refused too.
                if self.cloud_login is None or not self.was_accepted:
                    self.refusal = self._refused_error(self._origin.authority)
                    raise self.refusal.copy_without_context()
            return True
        learnt = self._learnt.get(needed)
        self._learn_scope(chosen, sent, needed)
        is_lacking = chosen.error == "insufficient_scope" and is_current and not is_wide
        if sent is not None and is_lacking and self._learnt.get(needed) == learnt:
            self._lacking.add(sent)
            return False  # it was asked for these rights alone, and so would the next one be
        if sent is not None and is_current:
            # Other tokens for the same are older, and have probably ended too.
            wanted = self._wanted(needed)
            older = (each.header for each in self._grants.values() if wanted <= each.scopes)
            self._drop({sent, *older})
            # Some registries read only the first scope of a token, and refuse it for the others.
            if is_wide and chosen.error != "invalid_token":
                self._demand_exact()
        return True

    def _adopt(self, challenge: Challenge) -> None:
        """Answer a challenge from now on. Raises AuthError if its realm must not be asked."""
        if challenge.scheme == "bearer" and not self.credential.registry_token:
            self._check_realm(challenge)
        if self._challenge is not None and challenge.scheme != self._challenge.scheme:
            self._covering.clear()
        # Other scopes, and errors, apply to the refused request alone.
        scope_for_all = "" if ":" in challenge.scope else challenge.scope
        self._challenge = challenge._replace(scope=scope_for_all, error="")
        self._is_challenge_confirmed = True

    def _learn_scope(self, challenge: Challenge, sent: str | None, needed: Scopes) -> None:
        """Ask for the scope of a challenge, if it names another repository than the URL has (some
        proxies do), or a right that we do not ask for (such as `delete`).
        """
        scope = challenge.scope
        own_scope = _scope_text(needed, needed)
        if ":" in scope and not any(f"repository:{name}:" in scope for name, _ in needed):
            self._learnt[needed] = scope
            self._demand_exact()
        elif challenge.error == "insufficient_scope" and sent and scope not in own_scope:
            # All requests with these needs get the same token, and must not lose their rights.
            self._learnt[needed] = f"{own_scope} {scope}"

    def _choose_challenge(self, challenges: Iterable[str], sent: str | None) -> Challenge | None:
        """Choose the challenge to answer: a bearer challenge, or else a basic challenge.

        If there is neither, the challenge that the refused login answered still applies. Returns
        None if no challenge applies. Raises AuthError if there are only unsupported challenges.
        """
        offered = parse_challenges(challenges)
        previous = self._challenge if sent is not None else None
        bearer = [one for one in offered if one.scheme == "bearer" and one.realm]
        basic = [one for one in offered if one.scheme == "basic"]
        # If the registry has asked for tokens in this run, a single Basic challenge is ignored. By
        # accepting it, every further request would carry the password.
        if previous is not None and previous.scheme == "bearer" and self._is_challenge_confirmed:
            basic = []
        # Quay offers both. A token has fewer rights and a shorter life than a password.
        chosen = next(iter((*bearer, *basic)), previous)
        if chosen is None and offered:
            schemes = printable(", ".join(challenge.scheme for challenge in offered), 60)
            who = self._origin.authority
            raise AuthError(f"{who} asks for a login by {schemes}, which is not supported")
        return chosen

    async def log_in_unasked(self, challenges: Iterable[str]) -> bool:
        """Send the credential with all further requests, although the registry requires no login.

        Returns False if there is no credential that can be sent. Raises AuthError as `refused` does.

        `challenges` are the WWW-Authenticate headers of a successful answer. If there are no
        challenges, the credential is sent to the registry itself by the Basic scheme.
        """
        await self._renew_credential()
        challenge = self._choose_challenge(challenges, None) or Challenge("basic")
        is_for_service = challenge.scheme == "bearer" and not self.is_anonymous
        if not (is_for_service or self.credential.basic or self.credential.registry_token):
            return False
        self._adopt(challenge)
        return True


def _serves(grant: Grant, now: float, for_body: bool) -> bool:
    return now < (grant.renew_before_body if for_body else grant.renew_at)


def _more(actions: str, planned: str | None) -> str:
    """Return the larger of two sets of actions: `pull` or `pull,push`."""
    return max(actions, planned or "", key=len)


def _in_order(scopes: Scopes, needed: Scopes) -> list[tuple[str, str]]:
    """Return scopes in order: needed repositories first, and those that are written to."""
    names = {name for name, _ in needed}
    return sorted(scopes, key=lambda scope: (scope[0] not in names, "push" not in scope[1], scope))


def _scope_text(scopes: Scopes, needed: Scopes) -> str:
    return " ".join(f"repository:{name}:{actions}" for name, actions in _in_order(scopes, needed))
