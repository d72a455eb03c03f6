"""The Authorization headers of requests to one registry, and the bearer tokens in them.

Owns: the current challenge, the choice of scopes, token requests to the registry's token service.
May not know: sockets, permits, sources of credentials, cloud logins.
Invariants: a secret is only sent to its own registry, or to a realm that `check_realm` accepts. No
message and no log contains a secret (I6). A refused password is not sent again, because repeated
failures lock accounts. `authorization` never returns a header that was refused.
Follows: docs/design.md sections 3, 6 and 9, docs/protocol-facts.md sections 2 and 9.2 (R2, R9, R18,
R19).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum, auto
from urllib.parse import urlencode

from _regsync.addresses import Origin
from _regsync.auth.challenge import Challenge, check_realm, parse_challenges, parse_error_body
from _regsync.auth.cloud import Answer, CloudLogin, Fetch, jwt_lifetime
from _regsync.auth.credentials import Credential, Pair
from _regsync.auth.token_cache import Scope, Scopes, Token, TokenCache, Use, union_of, use_of
from _regsync.errors import AuthError, LoginExpired, RegistryError, SyncError
from _regsync.net.wire import parse_retry_after
from _regsync.text import json_object, keep_secret, mask, printable

# The largest number of repositories that one token request names (docs/design.md section 6, rule
# 2). Even with the longest names, the URL stays below the limits of all known servers.
_MOST_REPOSITORIES = 8

# The fraction of a token's lifetime after which the token is renewed.
_REFRESH_AT = 0.9

# Seconds. The token specification requires at least this lifetime. A shorter `expires_in` is
# treated as this value (docs/protocol-facts.md section 2.5).
_SHORTEST_LIFE = 60.0

# Statuses that a token service returns to a POST if it supports only GET, or only some of the POST
# grants (Artifactory: 401, ACR: 400).
_STATUSES_WITHOUT_POST = (400, 401, 404, 405)

# Statuses with which a token service may refuse a request for several repositories although it
# would issue a token for one of them: it refuses another repository, or the number of scopes (ghcr:
# 403).
_STATUSES_FOR_SCOPES = (400, 403, 404, 413, 414, 431)

# Matches a token that can be sent in a header.
_TOKEN = r"[\x21-\x7e]{1,65536}"

# The number of characters of a token service's explanation that are shown.
_MOST_REASON = 198

# The number of refused logins that are kept, so that queued requests do not send them again.
_MOST_REFUSED = 64

# The number of times that one request may be repeated because its token had ended.
_MOST_RENEWALS = 5


class Refusal(Enum):
    """The reason why the registry refused a request's login, if another login may help."""

    # The request had no login, or a login that may never have been sufficient for it.
    INSUFFICIENT = auto()

    # The request's token was sufficient before. It was revoked, or its number of uses is limited.
    REVOKED = auto()

    # Like REVOKED, but another request's 401 has already removed the token from the cache.
    REPLACED = auto()


def may_repeat_after(refusals: list[Refusal]) -> bool:
    """Report whether a request may be sent again after all these refusals of its login.

    REPLACED needs no limit. Each replaced token was accepted for other requests, so these
    requests make progress, and will end.
    """
    renewals = refusals.count(Refusal.REVOKED)
    return refusals.count(Refusal.INSUFFICIENT) <= 1 and renewals <= _MOST_RENEWALS


class Authenticator:
    """Authenticates requests to one registry, with one credential or anonymously.

    The transport calls `authorization` before each request, and `record_success`, `on_unauthorized`
    or `on_forbidden` after it. The first request to a registry is sent without a login. Its 401
    contains the challenge that later requests answer, with the password (Basic) or with a token
    from the registry's token service (Bearer).

    Several tasks may call these methods concurrently. Each call may be cancelled.

    If no other login can help after a refusal, `on_unauthorized` and `on_forbidden` return None,
    and the caller reports the registry's answer. They raise AuthError if they can explain the
    refusal better than that answer.
    """

    def __init__(
        self,
        *,
        origin: Origin,
        credential: Credential | CloudLogin | None,
        fetch: Fetch,
        now: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._is_https = origin.scheme == "https"  # whether the registry is reached over TLS
        self._host = origin.host  # the registry's host, without a port
        self._authority = origin.authority  # `host` or `host:port`, for messages
        self._token_service = f"the token service of {origin.authority}"  # for messages
        self._fetch = fetch
        self._now = now  # the event loop's clock, in seconds
        self._wall = wall  # seconds since 1970

        # The logins (Authorization headers and refresh tokens) that were refused recently. A task
        # checks this list after each wait, before it sends a login.
        self.refused_logins = deque[str](maxlen=_MOST_REFUSED)
        # The cloud login that provides the credential, or None.
        self.cloud_login = credential if isinstance(credential, CloudLogin) else None
        # A cloud login provides its credential later, in `_renew_cloud_login`.
        self._set_credential(credential if isinstance(credential, Credential) else Credential())

        # The challenge that each request answers. None until the registry has sent a challenge.
        self._challenge: Challenge | None = None
        # False if `_challenge` was saved by an earlier run. Such a challenge may be out of date.
        self._challenged_in_this_run = False
        # Repository -> the actions ("pull" or "pull,push") that this run will need there.
        self._planned_scopes: dict[str, str] = {}
        self._token_cache = TokenCache(now)  # the registry's bearer tokens, issued and pending
        # (repository, actions) -> the scope that the registry requested for them in a 401, if it
        # differs from `repository:NAME:ACTIONS`.
        self._scope_overrides: dict[Scope, str] = {}

    def _set_credential(self, credential: Credential) -> None:
        self.credential = credential
        self.was_accepted = False  # whether the registry has accepted this credential
        keep_secret(*credential.secrets)
        # The OAuth2 refresh token to send to the token service, or "". The service may replace it.
        self._refresh_token = self.credential.identity_token

    @property
    def is_anonymous(self) -> bool:
        """Whether there is no credential."""
        return self.credential == Credential()  # its fields are empty

    @property
    def login_hint(self) -> str:
        """Advice for the user on how to provide a credential."""
        hint = (
            f"log in with a container client (docker login {self._authority}), "
            "or configure auth_type: basic"
        )
        if self.cloud_login is None:
            return hint
        return f"set auth_type (ecr, gar, acr) to see why the cloud's login fails, or {hint}"

    @property
    def denied_hint(self) -> str:
        """Advice for the user if the registry denies access."""
        if self.is_anonymous:
            return (
                f"{self.login_hint}, since no credentials are in use; or check the name: "
                "a missing repository may look like a private one"
            )
        return f"check which rights the credentials ({self.credential.found_at}) have there"

    async def _renew_cloud_login(self, refused: Credential | None = None) -> None:
        """Update `credential` from the cloud login, if there is a cloud login.

        The cloud login renews an expiring credential. It also renews the credential that the
        registry has `refused`. Raises SyncError if it has no valid credential.
        """
        if self.cloud_login is None:
            return
        credential = await self.cloud_login.credential(refused) or Credential()
        # Setting the same credential again would reset `was_accepted` and the refresh token.
        if credential != self.credential:
            self._set_credential(credential)

    async def _replace_refused_credential(self, refused: Credential) -> bool:
        """Replace a refused credential if possible. Returns whether it was replaced.

        Returns True if another task has already replaced it. Returns False if the credential does
        not come from a cloud login, or if no request with it has ever succeeded. Raises SyncError
        if the cloud issues no new credential.
        """
        is_current = refused == self.credential
        if is_current and not self.was_accepted:
            return False  # a new login of the same cloud identity would be refused too
        await self._renew_cloud_login(refused)
        return self.credential != refused

    def has_new_challenge(self) -> bool:
        """Report whether a request without a login has to get one, because another was refused."""
        return self._challenge is not None

    # Runs, and the state that is kept between runs.

    def begin(self) -> None:
        """Start another run: discard the planned scopes, and treat the challenge as out of date."""
        self._planned_scopes = {}
        self._challenged_in_this_run = False
        self.refused_logins.clear()  # the account may have been unlocked since the last run

    def plan_scope(self, repository: str, actions: str) -> None:
        """Declare that this run will use a repository, so that the next token request names it too.

        One token covers up to eight repositories (rule 2).
        """
        planned = self._planned_scopes.get(repository, actions)
        self._planned_scopes[repository] = union_of(planned, actions)

    @property
    def service(self) -> str:
        """The `service` of the registry's challenge.

        Empty if the registry sent no challenge yet.
        """
        return self._challenge.service if self._challenge is not None else ""

    @property
    def login_facts(self) -> list[list[str] | bool | None]:
        """The JSON value that `restore` accepts in the next run: a list of two elements.

        The first element is the list of the challenge's fields, or None if there is no challenge or
        if the challenge may contain a secret. The second element reports whether this registry
        needs tokens with exact scopes (`TokenCache.needs_exact_scopes`).
        """
        fields: list[str] | None = None
        if self._challenge is not None:
            text = " ".join(self._challenge)
            fields = [*self._challenge] if mask(text) == text else None
        return [fields, self._token_cache.needs_exact_scopes]

    def restore(self, login_facts: object) -> None:
        """Restore the challenge and `needs_exact_scopes` from the `login_facts` of an earlier run.

        With a saved challenge the first request can carry a token, which saves a 401 round trip.
        The realm is validated when it is used. A malformed value is ignored.
        """
        match login_facts:
            case [saved_challenge, bool(needs_exact_scopes)]:
                challenge = Challenge.from_json(saved_challenge)
            case _:
                return
        self._token_cache.needs_exact_scopes |= needs_exact_scopes
        if challenge is None or self._challenge is not None:
            return
        # The Basic scheme sends the password itself. Over plain http it is only sent if the
        # registry has asked for it in this run (docs/protocol-facts.md section 2.6).
        if challenge.scheme == "bearer" or self._is_https:
            self._challenge = challenge

    # Requests and refusals.

    async def authorization(
        self, repository: str, actions: str, also: Iterable[Scope] = (), can_repeat: bool = True
    ) -> str | None:
        """Return the Authorization header for a request.

        Returns None if the registry has not asked for a login, or if the challenge of an earlier
        run is out of date, which is then discarded. Raises SyncError if no token can be obtained,
        or if the registry has already refused the password.

        `also` lists other repositories that the request uses, each with its actions. `can_repeat` is
        false for a request with a body, which cannot be sent again after a 401.
        """
        challenge = self._challenge  # None if the registry has not asked for a login
        static_token = self.credential.registry_token  # sent as it is, without a token service
        # Over plain http, which can be overheard, it is only sent if the registry asks for a login.
        if static_token and (challenge is not None or self._is_https):
            return f"Bearer {static_token}"
        if challenge is None:
            return None
        if challenge.scheme == "basic":
            await self._renew_cloud_login()
            basic = self.credential.basic
            if basic in self.refused_logins:  # the cloud has returned the refused password again
                raise self._refused_error(self._authority)
            return basic

        needed = {repository: actions}
        needed.update(also)
        try:
            return f"Bearer {await self._obtain_token(needed, can_repeat)}"
        except (AuthError, RegistryError) as error:
            was_login_refused = isinstance(error, AuthError) and error.fatal
            if self._challenged_in_this_run or error.retryable or was_login_refused:
                raise
            # The challenge was saved by an earlier run, and its token service no longer issues
            # tokens. The registry answers a request without a login with its current challenge.
            self._challenge = None
            return None

    def record_success(self, header: str, repository: str, method: str) -> None:
        """Record that the registry accepted a request with this Authorization header."""
        self.was_accepted = True
        self._challenged_in_this_run = True  # the header answers it
        token = self._token_cache.token_in(header)
        if token is not None:
            # After this, a 401 to the same kind of request means that the token has ended.
            # Otherwise it could mean that the token does not grant the action.
            token.accepted_for.add(use_of(repository, method))

    async def on_unauthorized(
        self,
        challenges: Iterable[str],
        refused_header: str | None,
        repository: str,
        actions: str,
        method: str = "GET",
    ) -> Refusal | None:
        """Adopt the challenge of a 401 answer, so that later calls of `authorization` answer it.

        Returns the reason for the refusal if another login may help. Returns None if neither this
        401 nor an earlier answer has a challenge. Raises AuthError if the challenge is not
        supported or not safe to answer, or if there is no login but the refused login.

        `challenges` are the WWW-Authenticate headers of the 401. `refused_header` is the
        Authorization header of the refused request, or None if the request had no such header.
        """
        chosen = self._choose_challenge(challenges, was_login_sent=refused_header is not None)
        if chosen is None:
            return None
        refusal = Refusal.INSUFFICIENT
        if self.credential.registry_token:
            if refused_header is not None:  # a static token cannot be renewed
                raise self._refused_error(self._authority, fatal=False)
        elif chosen.scheme == "basic":
            await self._ensure_other_password(refused_header)
        else:
            self._check_realm(chosen)
            use = use_of(repository, method)
            refusal = self._handle_refused_token(chosen, refused_header, use, actions)
        # The scope and the error apply only to the refused request.
        self._challenge = chosen._replace(scope="", error="")
        self._challenged_in_this_run = True
        return refusal

    def _handle_refused_token(
        self, challenge: Challenge, refused_header: str | None, use: Use, actions: str
    ) -> Refusal:
        """Drop the token that a 401 refused, and store the scope that the registry requires.

        Returns the reason for the refusal. `challenge` is the challenge of the 401. `use` and
        `actions` describe the refused request.
        """
        was_login_sent = refused_header is not None
        self._adopt_scope(challenge, use.repository, actions, was_login_sent=was_login_sent)
        token = self._token_cache.token_in(refused_header)
        if token is None:
            return Refusal.INSUFFICIENT

        match challenge.error:
            case "invalid_token":
                may_lack_right = False
            case "insufficient_scope":
                may_lack_right = True
            case _:
                may_lack_right = use not in token.accepted_for
        was_dropped = token.is_dropped  # by another request's 401
        if not was_dropped:
            self._drop_refused_token(token, {use.repository: actions})
            # Some registries read only the first scope of a token. They refuse a valid token for a
            # repository in another scope, without the error `insufficient_scope`.
            is_valid = challenge.error == "insufficient_scope" or self._token_cache.is_live(
                token, can_repeat=False
            )
            # Set after the drop, which would otherwise spare the tokens that cover more.
            if token.covers_more and may_lack_right and is_valid:
                self._token_cache.needs_exact_scopes = True
        if may_lack_right or not token.accepted_for:
            return Refusal.INSUFFICIENT
        return Refusal.REPLACED if was_dropped else Refusal.REVOKED

    def _drop_refused_token(self, token: Token, needed: Scopes) -> None:
        """Drop a token that was refused for a request that needs these scopes, and similar tokens."""
        dropped_values = self._token_cache.drop(token, needed)
        # A queued request may be about to send a dropped token.
        for value in dropped_values:
            self._record_refused(f"Bearer {value}")

    def _check_realm(self, challenge: Challenge) -> None:
        check_realm(
            challenge.realm,
            self._host,
            is_http_allowed=not self._is_https,
            has_credentials=not self.is_anonymous,
        )

    async def log_in_unasked(
        self, challenges: Iterable[str], repository: str, actions: str
    ) -> bool:
        """Send the credential with all further requests, although the registry requires no login.

        Returns False if there is no credential that can be sent. Raises AuthError in the same cases
        as `on_unauthorized`.

        `challenges` are the WWW-Authenticate headers of a successful answer. If there are no
        challenges, the credential is sent to the registry itself by the Basic scheme.
        """
        await self._renew_cloud_login()
        if self.is_anonymous:
            return False
        offered = [*challenges]
        if not parse_challenges(offered):
            can_go_to_registry = self.credential.basic or self.credential.registry_token
            if not can_go_to_registry:
                return False
            offered = ["Basic"]
        # The challenges are handled like the challenges of a 401 to a request without a login.
        await self.on_unauthorized(offered, None, repository, actions)
        return True

    def _choose_challenge(
        self, challenges: Iterable[str], *, was_login_sent: bool
    ) -> Challenge | None:
        """Choose the challenge to answer: a bearer challenge, or else a basic challenge.

        If there is neither, the challenge that the refused login answered still applies. Returns
        None if no challenge applies. Raises AuthError if there are only unsupported challenges.
        """
        offered = parse_challenges(challenges)
        previous = self._challenge if was_login_sent else None
        bearer = [one for one in offered if one.scheme == "bearer" and one.realm]
        basic = [one for one in offered if one.scheme == "basic"]
        # If the registry has asked for tokens in this run, a single Basic challenge is ignored. By
        # accepting it, every further request would carry the password.
        uses_tokens = (
            self._challenged_in_this_run and previous is not None and previous.scheme == "bearer"
        )
        if uses_tokens:
            basic = []
        # Quay offers both. A token has fewer rights and a shorter life than a password.
        chosen = next(iter((*bearer, *basic)), previous)
        if chosen is None and offered:
            schemes = printable(", ".join(challenge.scheme for challenge in offered), 60)
            raise AuthError(
                f"{self._authority} asks for a login by {schemes}, which is not supported"
            )
        return chosen

    async def _ensure_other_password(self, refused_header: str | None) -> None:
        """Ensure that further requests carry a password, and not the password in `refused_header`.

        Raises AuthError if there is no password, or if the refused password cannot be replaced.
        """
        if refused_header is not None and refused_header == self.credential.basic:
            self._record_refused(refused_header)
        await self._renew_cloud_login()  # if it is due; this may change `credential`
        if self.credential.basic is None:
            lack = f"{self.credential.found_at} has none"
            if self.is_anonymous:
                lack = "none are configured or found"
            message = f"{self._authority} asks for a user name and password, and {lack}"
            raise AuthError(message, hint=self.login_hint, fatal=not self.is_anonymous)

        is_still_refused = refused_header == self.credential.basic
        if is_still_refused and not await self._replace_refused_credential(self.credential):
            raise self._refused_error(self._authority)

    def on_forbidden(self, refused_header: str | None) -> Refusal | None:
        """Handle a 403 answer. Returns the reason for the refusal if another token may help.

        `refused_header` is the Authorization header of the refused request.
        """
        has_static_token = bool(self.credential.registry_token)
        is_bearer = refused_header is not None and refused_header.startswith("Bearer ")
        if has_static_token or not is_bearer:
            return None
        token = self._token_cache.token_in(refused_header)
        if token is None or token.is_dropped:
            return Refusal.INSUFFICIENT  # another request has already replaced the token
        if not token.covers_more:
            return None  # a new token would have the same scopes
        # The token service may have granted fewer rights, because it was asked for several
        # repositories at once.
        self._token_cache.needs_exact_scopes = True
        return Refusal.INSUFFICIENT

    def _record_refused(self, login: str) -> None:
        if login not in self.refused_logins:
            self.refused_logins.append(login)

    def _refused_error(self, who: str, *, fatal: bool = True) -> AuthError:
        hint = "check the user name, and whether the password or token has expired or lacks rights"
        message = f"{who} refused the credentials ({self.credential.found_at})"
        return AuthError(message, hint=hint, fatal=fatal)

    def _adopt_scope(
        self, challenge: Challenge, repository: str, actions: str, *, was_login_sent: bool
    ) -> None:
        """Store the scope of a 401 for later token requests, if we would request another scope.

        A scope for all repositories is used for every request. Another scope is only used for this
        repository and these actions (docs/protocol-facts.md sections 2.2 and 2.3).
        """
        scope = challenge.scope
        if not scope:
            return
        if ":" not in scope:
            # ECR Public uses the scope `aws` for every repository.
            self._token_cache.scope_for_all = scope
            return

        # Some registries use another repository name in the scope than in the URL.
        is_of_other_repository = f" repository:{repository}:" not in f" {scope}"
        was_too_narrow = challenge.error == "insufficient_scope" and was_login_sent
        own_scope = re.fullmatch(f"repository:{re.escape(repository)}:([^ *]+)", scope)
        if own_scope is not None and not set(actions.split(",")) <= set(own_scope[1].split(",")):
            # The scope is only for the refused request, such as a DELETE. All other requests with
            # these actions get the same token, and must not lose their rights.
            scope = f"repository:{repository}:{union_of(own_scope[1], actions)}"
        if is_of_other_repository or was_too_narrow:
            self._scope_overrides[repository, actions] = scope
        if is_of_other_repository:
            self._token_cache.needs_exact_scopes = True

    # Tokens.

    async def _obtain_token(self, needed: Scopes, can_repeat: bool) -> str:
        """Return a token that covers the needed scopes, from the cache or from the token service.

        Concurrent requests that can use the same token share one token request. If the task that
        made the token request was cancelled, or its request named too many scopes, the first
        waiting task makes another token request. Raises SyncError if no token can be obtained.
        """
        while True:
            token = self._token_cache.find(needed, can_repeat)
            if token is None:
                token = await self._request_token(needed, can_repeat)
            if token.value:
                return token.value
            if not token.done.is_set():
                await token.done.wait()  # another task is requesting this token
            # If exact scopes have become necessary while this task waited, the token request was
            # for other scopes, and its error does not concern this task.
            if token.error is not None and self._token_cache.is_sufficient(token, needed):
                raise token.error.copy_without_context() from token.error

    async def _request_token(self, needed: Scopes, can_repeat: bool) -> Token:
        """Request a token for the needed scopes and for planned scopes, and store it in the cache.

        A SyncError is not raised, but stored in the token, because it also concerns the tasks that
        wait for the token. If the token service may have refused the planned scopes, the token has
        neither a value nor an error, and the caller must request another token.
        """
        scopes = self._scopes_to_request(needed, can_repeat)
        token = Token(scopes, covers_more=scopes != needed, requested_at=self._now())
        self._token_cache.pending.append(token)  # so that other tasks wait for this token
        try:
            answer = await self._ask_token_service(scopes)
            if token.covers_more and self._may_be_refused_for_scopes(answer):
                self._token_cache.needs_exact_scopes = True
            else:
                self._complete_token(token, answer)
        except SyncError as error:
            token.error = error
        finally:
            self._token_cache.pending.remove(token)
            token.done.set()

        return token

    async def _ask_token_service(self, scopes: Scopes) -> Answer:
        """Send a token request. Repeat it if the login is refused and the cloud login renews it.

        Returns the service's answer, which may have an error status. Raises SyncError in the same
        cases as `_send_token_request`.
        """
        await self._renew_cloud_login()
        sent_credential = self.credential
        answer = await self._send_token_request(scopes)
        if answer.status == 401 and await self._replace_refused_credential(sent_credential):
            return await self._send_token_request(scopes)
        return answer

    def _may_be_refused_for_scopes(self, answer: Answer) -> bool:
        """Report whether the service may have refused a token because of the planned scopes."""
        if answer.status == 401:
            # A refused password is not sent again, not even for fewer scopes: accounts get locked.
            return self.is_anonymous
        return answer.status in _STATUSES_FOR_SCOPES

    def _scopes_to_request(self, needed: Scopes, can_repeat: bool) -> Scopes:
        """Return the needed scopes, and planned scopes that no token covers yet.

        Planned scopes are only added if the registry accepts one token for several repositories.
        """
        if self._token_cache.needs_exact_scopes or self._token_cache.scope_for_all:
            return {**needed}
        # Actions that this run will need in the same repositories are requested at once.
        scopes = {
            name: union_of(actions, self._planned_scopes.get(name, actions))
            for name, actions in needed.items()
        }
        covered = self._token_cache.covered_scopes(can_repeat)
        for name, actions in self._planned_scopes.items():
            if len(scopes) < _MOST_REPOSITORIES and (name, actions) not in covered:
                scopes.setdefault(name, actions)
        return scopes

    async def _send_token_request(self, scopes: Scopes) -> Answer:
        """Request a token with the refresh token, with the password, or anonymously.

        If the service supports no refresh tokens, the password is used, and the refresh token is
        discarded. Returns the service's answer, which may have an error status. Raises SyncError if
        there is no answer, or if the realm must not be contacted.
        """
        challenge = self._challenge
        # Another task may have dropped the challenge while this task waited for a cloud's login.
        if challenge is None:
            raise AuthError(
                "another request to this host has found that the challenge is out of date"
            )
        self._check_realm(challenge)
        scope = self._scope_text(scopes)
        if not self._refresh_token:
            return await self._request_by_get(challenge, scope)

        answer = await self._request_by_post(challenge, scope)
        has_password = self.credential.basic is not None
        may_support_only_get = answer.status in _STATUSES_WITHOUT_POST
        if may_support_only_get and has_password:
            answer = await self._request_by_get(challenge, scope)
            if answer.status == 200:
                # The service accepts the password by GET. Do not try POST again.
                self._refresh_token = ""
        return answer

    def _scope_text(self, scopes: Scopes) -> str:
        if self._token_cache.scope_for_all:
            return self._token_cache.scope_for_all
        return " ".join(
            self._scope_overrides.get((name, actions)) or f"repository:{name}:{actions}"
            for name, actions in scopes.items()
        )

    async def _request_by_post(self, challenge: Challenge, scope: str) -> Answer:
        """Request a token by POST, with the refresh token (docs/protocol-facts.md section 2.4)."""
        form = [
            ("grant_type", "refresh_token"),
            *_service_of(challenge),
            ("client_id", "regsync"),
            ("scope", scope),
            ("refresh_token", self._refresh_token),
        ]
        headers = [("Content-Type", "application/x-www-form-urlencoded")]
        body = urlencode(form, errors="surrogatepass").encode()
        return await self._fetch_unless_refused(
            "POST", challenge.realm, headers, body, login=self._refresh_token
        )

    async def _request_by_get(self, challenge: Challenge, scope: str) -> Answer:
        """Request a token by GET, with the password or anonymously.

        See docs/protocol-facts.md section 2.3.
        """
        query = _service_of(challenge)
        query += [("scope", word) for word in dict.fromkeys(scope.split())]
        headers: list[Pair] = []
        basic = self.credential.basic
        if basic:
            query.append(("account", self.credential.username))
            headers.append(("Authorization", basic))
        separator = "&" if "?" in challenge.realm else "?"
        url = f"{challenge.realm}{separator}{urlencode(query, errors='surrogatepass')}"
        return await self._fetch_unless_refused("GET", url, headers, b"", login=basic or "")

    async def _fetch_unless_refused(
        self, method: str, url: str, headers: list[Pair], body: bytes, *, login: str
    ) -> Answer:
        """Send one request to the token service, and return its answer.

        `login` is the secret in the request, or "". If the service has already refused this login,
        the request is not sent, and the method returns an answer with status 401. A login that the
        service refuses now is recorded as refused.
        """

        def check_login() -> None:
            if login in self.refused_logins:
                raise LoginExpired("the login was refused to another request")

        try:
            check_login()
            # `_fetch` checks again before it sends the request, because it may wait before.
            answer = await self._fetch(method, url, headers, body, check_may_send=check_login)
        except LoginExpired:
            return Answer(401, {}, b"")
        if answer.status == 401 and login:
            self._record_refused(login)
        return answer

    def _complete_token(self, token: Token, answer: Answer) -> None:
        """Complete a pending token with the token service's answer, and add it to the cache.

        Raises AuthError or RegistryError if the answer does not contain a token.
        """
        if not 200 <= answer.status < 300:
            raise self._token_error(answer, token.scopes)
        document = json_object(answer.body) or {}
        value = document.get("token") or document.get("access_token")
        if not isinstance(value, str) or not re.fullmatch(_TOKEN, value):
            raise AuthError(f"{self._token_service} answered without a usable token")

        lifetime = document.get("expires_in")  # seconds, as a number or as a string
        if lifetime is None:
            lifetime = jwt_lifetime(value, self._wall())
        with suppress(ValueError):  # `float("None")` fails if the lifetime is unknown
            seconds = max(_SHORTEST_LIFE, float(str(lifetime)))
            token.renew_at = token.requested_at + seconds * _REFRESH_AT
        refresh_token = document.get("refresh_token")
        # If there is no refresh token to replace, tokens are requested by password.
        if self._refresh_token and refresh_token and isinstance(refresh_token, str):
            self._refresh_token = refresh_token
            keep_secret(refresh_token)

        token.value = value
        self._token_cache.add(token)
        keep_secret(value)
        with suppress(ValueError):  # the service may have issued a refused token again
            self.refused_logins.remove(f"Bearer {value}")

    def _token_error(self, answer: Answer, scopes: Scopes) -> SyncError:
        """Return the error for an error status of the token service.

        Returns a RegistryError if a later attempt may succeed, otherwise an AuthError. `scopes` are
        the scopes of the token request.
        """
        who = self._token_service
        status = answer.status
        if status == 401 and not self.is_anonymous:
            return self._refused_error(who)

        reason = parse_error_body(answer.body).message
        suffix = f": {printable(reason, _MOST_REASON)}" if reason else ""
        is_temporary = status in (408, 429) or status >= 500
        if is_temporary:
            wait = parse_retry_after(answer.headers.get("retry-after"), self._wall())
            message = f"{who} answered {status}{suffix}"
            return RegistryError(message, status=status, retry_after=wait)

        # The needed scopes come first; the planned scopes follow.
        first_two = [*scopes.items()][:2]
        shown_scopes = ", ".join(f"{name} ({actions})" for name, actions in first_two)
        recipient = f"to the credentials from {self.credential.found_at}"
        if self.is_anonymous:
            recipient = "without credentials"
        message = f"{who} gives no token for {shown_scopes} {recipient}: status {status}{suffix}"
        return AuthError(message, hint=self.denied_hint)


def _service_of(challenge: Challenge) -> list[Pair]:
    return [("service", challenge.service)] if challenge.service else []
