"""The Authorization header of each request to one registry, and the tokens behind it.

Owns: the challenge in force, which scopes are asked for, the exchange with the token service.
May not know: sockets, permits, where a credential was found, how a cloud logs in.
Invariants: a secret goes to its own registry, or to a realm that `check_realm` let pass; it is in
no message and no log (I6). A refused password is not sent again: accounts get locked. No header is
returned that is known as refused.
Follows: docs/design.md sections 3, 6 and 9, docs/protocol-facts.md sections 2 and 9.2 (R2, R9, R18,
R19).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from enum import Enum, auto
from urllib.parse import urlencode

from _regsync.addresses import Origin
from _regsync.auth.challenge import Challenge, check_realm, parse_challenges, parse_error_body
from _regsync.auth.cloud import Answer, CloudLogin, Fetch, life_of
from _regsync.auth.credentials import Credential, Pair
from _regsync.auth.token_cache import Scopes, Token, TokenCache, Use, union_of, use_of
from _regsync.errors import AuthError, LoginExpired, RegistryError, SyncError
from _regsync.net.http1 import parse_retry_after
from _regsync.text import json_object, one_line, printable, redact

# How many repositories one token covers (docs/design.md section 6, rule 2). Eight scopes of the
# longest names stay below any server's limit on a URL.
_MOST_REPOSITORIES = 8

# The share of its life after which a token is renewed.
_REFRESH_AT = 0.9

# Seconds. The token specification's minimum; a shorter life is read as this one
# (docs/protocol-facts.md section 2.5).
_SHORTEST_LIFE = 60.0

# Answers to a POST by a token service that knows only GET, or only a part of POST (Artifactory
# says 401, ACR 400).
_STATUSES_WITHOUT_POST = (400, 401, 404, 405)

# Answers by which a token service may refuse several repositories at once, though it would give a
# token for the one that is needed: because of another one, or because of their number (ghcr: 403).
_STATUSES_FOR_TOO_MUCH = (400, 403, 404, 413, 414, 431)

# A value in a URL's query: any value may be the URL's signature. A shorter value would be found in
# any text, a longer one does not fit into a line.
_QUERY_VALUES = "=([^&]{8,2048})"

# How many refused logins are remembered: requests that wait may be about to send them.
_MOST_REFUSED = 64

# How often one request may find that a token which had worked has ended.
_MOST_RENEWALS = 5

# How many former secrets are remembered. Each is looked for in each error.
_MOST_SECRETS_SEEN = 512


class Refusal(Enum):
    """Why a refused request may be repeated."""

    # It had no login, or one that has not worked for its kind of request yet. Another may work.
    UNPROVEN = auto()

    # Its token had worked, and has ended: it was revoked, or counts its uses.
    ENDED = auto()

    # Its token had worked, and was dropped when another request found that it has ended.
    REPLACED = auto()


class LoginRefusals:
    """Counts how often one request was refused for its login, to bound how often it is repeated."""

    def __init__(self) -> None:
        self._unproven = 0
        self._ended = 0

    def may_repeat(self, refusal: Refusal | None) -> bool:
        """Count a refusal, and return whether the request may be sent again with another login.

        `refusal` is None where no other login would help.
        """
        match refusal:
            case None:
                return False
            case Refusal.UNPROVEN:
                self._unproven += 1
            case Refusal.ENDED:
                self._ended += 1
            case Refusal.REPLACED:
                # No bound is needed: each token that was replaced has let other requests in. Fewer
                # and fewer of them compete with this one, until it comes through.
                pass
        return self._unproven <= 1 and self._ended <= _MOST_RENEWALS


class Authenticator:
    """The login at one registry: with one credential, or none, and the tokens got by it.

    Several tasks may be in its methods at the same time, and each may be cancelled there.

    Attributes that others read:
    `credential` is in use; it is empty where `is_anonymous`. `is_proven`: a request with it was let
    in. `refused` are the logins (Authorization headers and refresh tokens) that were refused lately:
    whoever has waited looks there before sending one.
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
        self._scheme = origin.scheme
        self._host = origin.host
        self._authority = origin.authority
        self._fetch = fetch
        self._now = now
        self._wall = wall

        self.refused = deque[str](maxlen=_MOST_REFUSED)
        self._secrets_seen = deque[str](maxlen=_MOST_SECRETS_SEEN)  # in use, or lately in use
        self.cloud_login = credential if isinstance(credential, CloudLogin) else None
        # A cloud gives its credential when it is first asked for one.
        self._set_credential(credential if isinstance(credential, Credential) else None)

        # What the registry asks for; None: it has asked for nothing yet.
        self._challenge: Challenge | None = None
        # False where an earlier run has left the challenge: then it may be out of date.
        self._challenged_in_this_run = False
        self._planned_scopes: dict[str, str] = {}  # actions of this run, by repository
        self._tokens = TokenCache(now)
        # By repository and actions: the registry's own words for a scope, where ours do not serve.
        self._scope_overrides: dict[Pair, str] = {}

    def _set_credential(self, credential: Credential | None) -> None:
        """Use a credential from now on, None for no login."""
        self.is_anonymous = credential is None
        self.credential = credential or Credential()
        self.is_proven = False
        self._secrets_seen.extend(filter(None, self.credential.secrets))
        # The token service takes this, until it sends a newer one.
        self._refresh_token = self.credential.identity_token

    @property
    def login_hint(self) -> str:
        """How a credential gets here."""
        hint = (
            f"log in with a container client (docker login {self._authority}), "
            "or configure auth_type: basic"
        )
        if self.cloud_login is None:
            return hint
        return f"set auth_type (ecr, gar, acr) to see why the cloud's login fails, or {hint}"

    @property
    def denied_hint(self) -> str:
        """What may help where the registry does not let us do what we ask."""
        if self.is_anonymous:
            return (
                f"{self.login_hint}, since no credentials are in use; or check the name: "
                "a missing repository may look like a private one"
            )
        return f"check which rights the credentials ({self.credential.found_at}) have there"

    async def _renew_cloud_login(self, refused: Credential | None = None) -> None:
        """Take a cloud's login in its present state: it is renewed before its end, and at once where
        it is the credential that the registry has `refused`.
        """
        if self.cloud_login is None:
            return
        credential = await self.cloud_login.credential(refused)
        is_unchanged = (credential or Credential()) == self.credential
        if not is_unchanged:
            self._set_credential(credential)

    async def _has_other_login(self, refused: Credential) -> bool:
        """Return whether there is now another credential than one that the registry has refused.

        Only a cloud gives another one. It is asked for it, unless another task has done so already.
        """
        has_worked = self.is_proven or refused != self.credential
        if not has_worked:
            return False  # the cloud would give this identity a login that is refused too
        await self._renew_cloud_login(refused)
        return self.credential != refused

    # What a run declares, and what is kept between runs.

    def begin(self) -> None:
        """Begin another run: it declares its repositories anew, and is challenged anew."""
        self._planned_scopes = {}
        self._challenged_in_this_run = False
        self.refused.clear()  # somebody may have given the account its rights back

    def plan_scope(self, repository: str, actions: str) -> None:
        """Declare that this run will use a repository, so that the next token covers it too (rule 2:
        one token covers up to eight repositories).
        """
        planned = self._planned_scopes.get(repository, actions)
        self._planned_scopes[repository] = union_of(planned, actions)

    @property
    def service(self) -> str:
        """The service that the registry's challenge names; empty as long as there was none."""
        return self._challenge.service if self._challenge is not None else ""

    @property
    def snapshot(self) -> list[list[str] | bool | None]:
        """What the state keeps for `restore`, as JSON: the fields of the challenge, and whether each
        token has to be exact.
        """
        fields: list[str] | None = None
        if self._challenge is not None:
            redacted = self.redact(" ".join(self._challenge))
            was_cut = redacted.endswith("…")  # nobody has searched what was cut off
            may_hold_secret = "***" in redacted or was_cut
            fields = None if may_hold_secret else [*self._challenge]
        return [fields, self._tokens.needs_exact]

    def restore(self, snapshot: object) -> None:
        """Take over the `snapshot` of an earlier run, so that this one need not be refused to learn
        the challenge. A value of another form is ignored. The realm is checked when it is used.
        """
        match snapshot:
            case [fields, bool(needs_exact)]:
                self._tokens.needs_exact = self._tokens.needs_exact or needs_exact
            case _:
                return
        match fields:  # those of a Challenge
            case [str(), str(), str(), str(), str()] if self._challenge is None:
                challenge = Challenge(*fields)
                # A password goes over http only where this run was asked for it
                # (docs/protocol-facts.md section 2.6).
                if challenge.scheme == "bearer" or self._scheme == "https":
                    self._challenge = challenge

    def secrets(self) -> Iterator[str]:
        """Yield the secrets in use and lately in use, which no text may show; some are empty."""
        yield self._refresh_token
        yield from self._tokens.values()
        yield from self.credential.secrets
        yield from self._secrets_seen

    def redact(self, text: str) -> str:
        """Return a text on one line without our secrets. To be called before the text is cut, as
        half a secret is not found.
        """
        return redact(text, self.secrets())

    def treat_as_secret(self, target: str) -> None:
        """Let no text show the signature in a URL that the registry has sent us to."""
        self._secrets_seen.extend(re.findall(_QUERY_VALUES, target))

    # What a request carries, and what its refusal teaches.

    async def authorization(
        self, repository: str, actions: str, extra: Iterable[Pair] = (), before_body: bool = False
    ) -> str | None:
        """Return the Authorization header for a request; None where it goes without a login, as long as
        the registry has asked for none. SyncError where no token can be had.

        `extra`: further repositories that the request touches, each with its actions.
        `before_body`: the request has a body, which cannot be sent again after a 401.
        """
        challenge = self._challenge
        fixed_token = self.credential.registry_token
        # Over http, where others may listen, it goes only to a registry that asks for a login.
        may_send_unasked = self._scheme == "https"
        if fixed_token and (challenge is not None or may_send_unasked):
            return f"Bearer {fixed_token}"
        if challenge is None:
            return None
        if challenge.scheme == "basic":
            await self._renew_cloud_login()
            basic = self.credential.basic
            if basic in self.refused:  # the cloud has given the same password again
                raise self._refused_error(self._authority)
            return basic

        needed = {repository: actions}
        for name, rights in extra:
            needed[name] = union_of(needed.get(name, rights), rights)
        try:
            return f"Bearer {await self._token_for(needed, before_body)}"
        except (AuthError, RegistryError) as error:
            was_login_refused = isinstance(error, AuthError) and error.fatal
            is_challenge_current = self._challenged_in_this_run
            if error.retryable or was_login_refused or is_challenge_current:
                raise
        # An earlier run has left this challenge, and it leads to no token any more. A request without
        # a login is answered with the present one.
        self._challenge = None
        return None

    def record_success(self, header: str | None, repository: str, method: str) -> None:
        """Note that a request with an Authorization header, None for none, was let in."""
        if header is None:
            return
        self.is_proven = True
        token = self._tokens.sent_in(header)
        if token is not None:
            # A later 401 to the same use means that the token has ended, and not that it lacks a right.
            token.worked_for.add(use_of(repository, method))

    async def on_unauthorized(
        self,
        challenges: Iterable[str],
        refused_header: str | None,
        repository: str,
        actions: str,
        method: str = "GET",
    ) -> Refusal | None:
        """Take over what a 401 asks for, so that `authorization` answers it from now on. Return why the
        request may be sent again, None where it may not be; AuthError where no login can help.

        `challenges` are the WWW-Authenticate headers of the 401. `refused_header` is the
        Authorization header of the refused request, None where it had none.
        """
        offered = parse_challenges(challenges)
        # A 401 without a challenge repeats the one that has led to `refused_header`.
        known = self._challenge if refused_header is not None else None
        chosen = self._choose_challenge(offered, known)
        if chosen is None:
            if not offered:
                return None
            schemes = printable(", ".join(challenge.scheme for challenge in offered), 60)
            raise AuthError(
                f"{self._authority} asks for a login by {schemes}, which is not supported"
            )

        refusal = Refusal.UNPROVEN
        if self.credential.registry_token:
            if refused_header is not None:  # there is no other token
                raise self._refused_error(self._authority, fatal=False)
        elif chosen.scheme == "basic":
            await self._require_other_password(refused_header)
        else:
            self._check_realm(chosen)
            token = self._tokens.sent_in(refused_header)
            refusal = self._why_refused(chosen, token, use_of(repository, method))
            self._learn_scopes(chosen, refused_header, repository, actions)
            if token is not None and self._tokens.is_in_use(token):
                self._drop_refused_token(chosen, token, refusal, {repository: actions})
        # Scope and error are of this request alone.
        self._challenge = chosen._replace(scope="", error="")
        self._challenged_in_this_run = True
        return refusal

    def _check_realm(self, challenge: Challenge) -> None:
        has_credentials = not self.is_anonymous
        check_realm(challenge.realm, self._scheme, self._host, has_credentials)

    def _why_refused(self, offered: Challenge, token: Token | None, use: Use) -> Refusal:
        """Return whether a 401 says that the token of a request has ended, or that it may lack a right
        (UNPROVEN).
        """
        if token is None or not token.worked_for:
            return Refusal.UNPROVEN

        says_invalid = offered.error == "invalid_token"
        says_too_narrow = offered.error == "insufficient_scope"
        # A token that has let in only other requests may never have had the right for this one.
        may_lack_right = says_too_narrow or use not in token.worked_for
        if may_lack_right and not says_invalid:
            return Refusal.UNPROVEN
        return Refusal.ENDED if self._tokens.is_in_use(token) else Refusal.REPLACED

    async def offer(self, challenges: Iterable[str], repository: str, actions: str) -> bool:
        """Let requests carry the credential from now on, though the registry lets everybody in.
        Return whether there is a credential that they can carry.

        `challenges` are the WWW-Authenticate headers of an answer that let us in. Where there are
        none, the credential goes to the registry itself.
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
        # From here on as if the answer had been a 401.
        return await self.on_unauthorized(offered, None, repository, actions) is not None

    def _choose_challenge(
        self, offered: list[Challenge], known: Challenge | None
    ) -> Challenge | None:
        """Return the challenge to answer: one of those offered, or else the `known` one."""
        # Quay offers both. Bearer goes first: a token is narrow and short-lived, a password
        # neither.
        for challenge in offered:
            if challenge.scheme == "bearer" and challenge.realm:
                return challenge

        # A registry that has asked this run for tokens gets no password for a stray Basic: it would
        # go with every request from then on.
        wants_tokens = (
            self._challenged_in_this_run and known is not None and known.scheme == "bearer"
        )
        if wants_tokens:
            return known
        return next((challenge for challenge in offered if challenge.scheme == "basic"), known)

    async def _require_other_password(self, refused_header: str | None) -> None:
        """Raise AuthError unless there is a password other than the one in the `refused_header`."""
        if refused_header is not None and refused_header == self.credential.basic:
            self._record_refused(refused_header)
        await self._renew_cloud_login()
        if self.credential.basic is None:
            lack = f"{self.credential.found_at} has none"
            if self.is_anonymous:
                lack = "none are configured or found"
            message = f"{self._authority} asks for a user name and password, and {lack}"
            raise AuthError(message, hint=self.login_hint, fatal=not self.is_anonymous)

        was_refused = refused_header == self.credential.basic
        if was_refused and not await self._has_other_login(self.credential):
            raise self._refused_error(self._authority)

    def on_forbidden(self, refused_header: str | None) -> Refusal | None:
        """Learn from the 403 to a request that carried `refused_header`. Return why it may be sent
        again, None where no other token would help.
        """
        fixed_token = self.credential.registry_token
        has_our_token = (
            refused_header is not None and refused_header.startswith("Bearer ") and not fixed_token
        )
        if not has_our_token:
            return None
        token = self._tokens.sent_in(refused_header)
        if token is None or not self._tokens.is_in_use(token):
            return Refusal.UNPROVEN  # another request has learnt from it
        if not token.covers_more:
            return None  # the token was for this request alone
        # A service may give fewer rights to a token for several repositories.
        self._tokens.needs_exact = True
        return Refusal.UNPROVEN

    def _record_refused(self, login: str) -> None:
        if login not in self.refused:
            self.refused.append(login)

    def _refused_error(self, who: str, *, fatal: bool = True) -> AuthError:
        hint = "check the user name, and whether the password or token has expired or lacks rights"
        message = f"{who} refused the credentials ({self.credential.found_at})"
        return AuthError(message, hint=hint, fatal=fatal)

    def _learn_scopes(
        self, offered: Challenge, refused_header: str | None, repository: str, actions: str
    ) -> None:
        """Learn from the scope in a 401 how this registry wants to be asked for this one
        (docs/protocol-facts.md sections 2.2 and 2.3).
        """
        scope = offered.scope
        if not scope:
            return
        if ":" not in scope:
            # ECR Public's scope is `aws`, whatever the repository.
            self._tokens.scope_for_all = scope
            return

        # The registry may ask for a right in a repository of another name than the one in the URL.
        is_of_other_repository = f" repository:{repository}:" not in f" {scope}"
        was_too_narrow = offered.error == "insufficient_scope" and refused_header is not None
        if is_of_other_repository or was_too_narrow:
            self._scope_overrides[repository, actions] = scope
        if is_of_other_repository:
            self._tokens.needs_exact = True

    def _drop_refused_token(
        self, offered: Challenge, token: Token, refusal: Refusal, needed: Scopes
    ) -> None:
        """Drop a token that a 401 has refused. Where it may have been refused because it covers several
        repositories, each token has to be exact from now on.
        """
        # Some registries look only at the first scope of a token. They refuse a live token for a use
        # that it has never let in, and do not call it invalid.
        may_see_only_first_scope = (
            refusal is Refusal.UNPROVEN
            and self._tokens.is_live(token, before_body=True)
            and offered.error != "invalid_token"
        )
        is_too_narrow = offered.error == "insufficient_scope"

        dropped = self._tokens.drop(token, needed)
        # An answer that comes later may repeat a dropped token.
        self._secrets_seen.extend(dropped)
        # A request that waits for its turn may be about to send it.
        for value in dropped:
            self._record_refused(f"Bearer {value}")
        if token.covers_more and (is_too_narrow or may_see_only_first_scope):
            self._tokens.needs_exact = True

    # Tokens.

    async def _token_for(self, needed: Scopes, before_body: bool) -> str:
        """Return the text of a token for a request; SyncError where none can be had.

        Requests that need the same token share one exchange. Where that was cancelled, or has asked for
        too much, the first of them begins another in its next round.
        """
        while True:
            token = self._tokens.find(needed, before_body)
            if token is None:
                token = await self._request_token(needed, before_body)
            if token.value:
                return token.value
            if not token.done.is_set():  # `wait` lets other tasks go first, even where it is set
                await token.done.wait()
            # The error of a token that would not serve us, as by now it has to be exact, is not ours.
            if token.error is not None and self._tokens.has_rights(token, needed):
                raise token.error.without_place() from token.error

    async def _request_token(self, needed: Scopes, before_body: bool) -> Token:
        """Ask for a token that covers what is needed, and what this run will need next. Return it,
        with or without a value (see `Token`).
        """
        scopes = self._scopes_to_ask(needed, before_body)
        token = Token(scopes, covers_more=scopes != needed, requested_at=self._now())
        self._tokens.pending.append(token)
        try:
            answer = await self._exchange_with_new_login(scopes)
            if token.covers_more and self._may_be_too_much(answer):
                self._tokens.needs_exact = True  # the caller asks again, for what it needs alone
            else:
                self._read_token(answer, token)
                self._tokens.add(token)
                with suppress(ValueError):  # a service may give a refused token again
                    self.refused.remove(f"Bearer {token.value}")
        except SyncError as error:
            token.error = error
        finally:
            self._tokens.pending.remove(token)
            token.done.set()

        return token

    async def _exchange_with_new_login(self, scopes: Scopes) -> Answer:
        """Make the exchange for a token, and once more where a cloud gives another login than the one
        that was refused.
        """
        await self._renew_cloud_login()
        credential = self.credential
        answer = await self._exchange(scopes)
        if answer.status == 401 and await self._has_other_login(credential):
            return await self._exchange(scopes)
        return answer

    def _may_be_too_much(self, answer: Answer) -> bool:
        """Return whether a token service may have refused an exchange for the number of its scopes."""
        if answer.status == 401:
            # A refused password is not sent again, for fewer scopes either: accounts get locked.
            return self.is_anonymous
        return answer.status in _STATUSES_FOR_TOO_MUCH

    def _scopes_to_ask(self, needed: Scopes, before_body: bool) -> Scopes:
        """Return which scopes to ask a token for: those that a request needs and, where the registry
        gives one token for several repositories, planned ones that no token covers yet.
        """
        if self._tokens.needs_exact or self._tokens.scope_for_all:
            return {**needed}
        scopes = {
            name: union_of(actions, self._planned_scopes.get(name, actions))
            for name, actions in needed.items()
        }
        covered = self._tokens.covered_scopes(before_body)
        for name, actions in self._planned_scopes.items():
            if len(scopes) < _MOST_REPOSITORIES and (name, actions) not in covered:
                scopes.setdefault(name, actions)
        return scopes

    async def _exchange(self, scopes: Scopes) -> Answer:
        """Ask the token service for a token, by the refresh token if there is one. Return the answer, of
        whatever status; SyncError where there is none, or the realm must not be asked.
        """
        challenge = self._challenge
        if challenge is None:  # `authorization` dropped it while this request waited for a cloud
            raise AuthError(
                "another request to this host has found that the challenge is out of date"
            )
        self._check_realm(challenge)
        scope = self._scope_text(scopes)
        if not self._refresh_token:
            return await self._get(challenge, scope)

        answer = await self._post(challenge, scope)
        has_password = self.credential.basic is not None
        may_know_only_get = answer.status in _STATUSES_WITHOUT_POST
        if may_know_only_get and has_password:
            answer = await self._get(challenge, scope)
            if answer.status == 200:
                # The service takes the password by GET. It is not asked by POST any more.
                self._refresh_token = ""
        return answer

    def _scope_text(self, scopes: Scopes) -> str:
        if self._tokens.scope_for_all:
            return self._tokens.scope_for_all
        return " ".join(
            self._scope_overrides.get((name, actions)) or f"repository:{name}:{actions}"
            for name, actions in scopes.items()
        )

    async def _post(self, challenge: Challenge, scope: str) -> Answer:
        """Ask for a token by the refresh token, in a form (docs/protocol-facts.md section 2.4)."""
        form = [
            ("grant_type", "refresh_token"),
            *_service_of(challenge),
            ("client_id", "regsync"),
            ("scope", scope),
            ("refresh_token", self._refresh_token),
        ]
        headers = [("Content-Type", "application/x-www-form-urlencoded")]
        body = urlencode(form, errors="surrogatepass").encode()
        return await self._ask("POST", challenge.realm, headers, body, self._refresh_token)

    async def _get(self, challenge: Challenge, scope: str) -> Answer:
        """Ask for a token by the password, or anonymously (docs/protocol-facts.md section 2.3)."""
        query = _service_of(challenge)
        query += [("scope", word) for word in dict.fromkeys(scope.split())]
        headers: list[Pair] = []
        basic = self.credential.basic
        if basic:
            query.append(("account", self.credential.username))
            headers.append(("Authorization", basic))
        separator = "&" if "?" in challenge.realm else "?"
        url = f"{challenge.realm}{separator}{urlencode(query, errors='surrogatepass')}"
        return await self._ask("GET", url, headers, b"", basic or "")

    async def _ask(
        self, method: str, url: str, headers: list[Pair], body: bytes, login: str
    ) -> Answer:
        """Ask the token service. `login` is the secret in the request, empty for none.

        A login that was refused to another request, also while this one waits for a connection, is
        not sent. Then the answer is what the service would say, a 401.
        """

        def check_login() -> None:
            if login in self.refused:
                raise LoginExpired("the login was refused to another request")

        try:
            check_login()
            answer = await self._fetch(method, url, headers, body, confirm=check_login)
        except LoginExpired:
            return Answer(401, {}, b"")
        if answer.status == 401 and login:
            self._record_refused(login)
        return answer

    def _read_token(self, answer: Answer, token: Token) -> None:
        """Fill `token` from a token service's answer: its value, and when to renew it.

        AuthError or RegistryError where the answer holds no token.
        """
        who = f"the token service of {self._authority}"
        if not 200 <= answer.status < 300:
            raise self._failure(answer, token, who)
        document = json_object(answer.body) or {}
        value = document.get("token") or document.get("access_token")
        if not isinstance(value, str) or not re.fullmatch(r"[\x21-\x7e]{1,65536}", value):
            raise AuthError(f"{who} answered without a usable token")

        # A service may send a new refresh token, which replaces one that is in use.
        new_refresh_token = document.get("refresh_token")
        if self._refresh_token and isinstance(new_refresh_token, str) and new_refresh_token:
            self._refresh_token = new_refresh_token
            self._secrets_seen.append(new_refresh_token)

        lifetime = document.get("expires_in")  # a number, or the text of one
        if lifetime is None:
            lifetime = life_of(value, self._wall())
        # Of an unknown lifetime, `renew_at` stays None: the text "None" is no number.
        with suppress(ValueError):
            seconds = max(_SHORTEST_LIFE, float(str(lifetime)))
            token.renew_at = token.requested_at + seconds * _REFRESH_AT
        token.value = value

    def _failure(self, answer: Answer, token: Token, who: str) -> SyncError:
        """Return the error that says why a token service, called `who`, gave no token."""
        status = answer.status
        if status == 401 and not self.is_anonymous:
            return self._refused_error(who)

        _, reason = parse_error_body(answer.body)
        suffix = f": {one_line(self.redact(reason), 198)}" if reason else ""
        is_temporary = status in (408, 429) or status >= 500
        if is_temporary:
            wait = parse_retry_after(answer.headers.get("retry-after"), self._wall())
            message = f"{who} answered {status}{suffix}"
            return RegistryError(message, status=status, retry_after=wait)

        # The scopes that were needed stand in front of those that were planned.
        first_two = [*token.scopes.items()][:2]
        scopes = ", ".join(f"{name} ({actions})" for name, actions in first_two)
        login = f"to the credentials from {self.credential.found_at}"
        if self.is_anonymous:
            login = "without credentials"
        message = f"{who} gives no token for {scopes} {login}: status {status}{suffix}"
        return AuthError(message, hint=self.denied_hint)


def _service_of(challenge: Challenge) -> list[Pair]:
    return [("service", challenge.service)] if challenge.service else []
