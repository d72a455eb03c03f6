"""Who we are at one registry, and what has to be sent to it so that it lets us in. Owns: where a
credential comes from (configuration, a cloud's own identity, container clients' files), challenges,
realms, tokens. May not know: sockets, permits, how a cloud does it; files are arguments.
Invariants: a secret goes to its own registry and to a realm that `check_realm` let pass, into no
message or log (I6); a source that is named or broken is an error, never a reason to try another; a
cloud is asked when somebody has to log in, once for all. Follows docs/design.md 3, 6, 9,
docs/protocol-facts.md 2, 3, 4.3, 9.2 (R2, R8, R9, R18, R19)."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlencode

import anyio

from _regsync.addresses import Origin
from _regsync.auth.challenge import Challenge, check_realm, parse_challenges, words
from _regsync.auth.cloud import Answer, Chain, _Fetch, life_of
from _regsync.auth.credentials import Credential, Pair
from _regsync.errors import AuthError, RegistryError, SyncError
from _regsync.net.http1 import parse_retry_after
from _regsync.text import clean, hide, json_object

_Scopes = Mapping[
    str, str
]  # repository -> actions ("pull" or "pull,push"), the one needed now first


# docs/design.md section 6, rule 2. Eight scopes of the longest names stay below any server's limit
# on a URL.
_MOST_REPOSITORIES = 8


_UNKNOWN_LIFE_BEFORE_BODY = 60.0


_REFRESH_AT = 0.9


# the token specification's minimum, as which shorter ones are read (docs/protocol-facts.md 2.5)
_SHORTEST_LIFE = 60.0


class _Token:
    def __init__(self, scopes: _Scopes, wide: bool, born: float) -> None:
        # asked for when; wide: for more than one request needed
        self.scopes = scopes
        self.wide = wide
        self.born = born
        self.value = ""
        self.done = anyio.Event()
        self.expires: float | None = None
        self.error: SyncError | None = None


def _union(*actions: str) -> str:
    # Sorted is `pull,push`: registries compare literally (docs/protocol-facts.md section 2.2).
    return ",".join(sorted({action for text in actions for action in text.split(",")}))


class Authenticator:
    """What is sent to one registry with one credential; its methods may run at once, and be
    cancelled.
    """

    def __init__(
        self,
        *,
        origin: Origin,
        credential: Credential | Chain | None,
        fetch: _Fetch,
        now: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._scheme = origin.scheme
        self._host = origin.host
        self._name = origin.authority
        self._fetch = fetch
        self._now = now
        self._wall = wall
        # How credentials get here, and what may help where the registry does not let us do what we
        # ask.
        cloud = "set auth_type (ecr, gar, acr) to see why no cloud logs in, or " * isinstance(
            credential, Chain
        )
        self.login = f"{cloud}log in with a container client (docker login {self._name}), or configure auth_type: basic"
        self.chain = credential if isinstance(credential, Chain) else None
        self._shown = deque[Credential](maxlen=512)
        self._take(
            None if isinstance(credential, Chain) else credential
        )  # `proven`: it has let a request in
        self._challenge: Challenge | None = None
        self._seen = False  # in this run; a challenge from the state may be out of date
        self._one_scope = False  # whether each request needs a token for exactly itself
        self._declared: dict[str, str] = {}
        self._worded: dict[
            Pair | None, str
        ] = {}  # the registry's words for a scope where ours fail; None: for all
        self._tokens: dict[frozenset[Pair], _Token] = {}
        self._pending: list[_Token] = []

    def _take(self, credential: Credential | None) -> None:
        self.anonymous = credential is None
        self.credential = credential or Credential()
        self.proven = False
        self._shown.append(self.credential)
        self._refresh_token = self.credential.identity_token
        self.advice = (
            f"no credentials are in use: {self.login}; or check the name, absent may look private"
            if self.anonymous
            else f"check what the credentials ({self.credential.origin}) are allowed to do there"
        )

    async def _log_in(self, refused: Credential | None = None) -> bool:
        """Hold a login that lives, another than one `refused` that was good; say whether it is
        another than before.
        """
        if self.chain is None or (refused == self.credential and not self.proven):
            return False
        before = refused or self.credential
        found = await self.chain.credential(refused)
        if (found or Credential()) != self.credential:
            self._take(found)
        return self.credential != before

    def begin(self) -> None:
        """Let another run begin: what it uses is declared anew, and the way to log in may have
        changed.
        """
        self._declared = {}
        self._seen = False

    @property
    def learnt(self) -> list[Any]:
        """What the state keeps (JSON): the challenge, and whether a token may cover one request
        only.
        """
        words = [*(self._challenge or ())]
        return [
            None if not words or "***" in self.redact(" ".join(words)) else words,
            self._one_scope,
        ]

    def recall(self, learnt: Any) -> None:
        """Take back `learnt` of an earlier run, which saves the bare request. The realm is checked
        at use.
        """
        match learnt:
            case [None | [str(), str(), str(), str(), str()] as words, bool(one_scope)]:
                # Basic over http only after this run was asked for it (docs/protocol-facts.md
                # section 2.6).
                if words and (words[0] == "bearer" or self._scheme == "https"):
                    self._challenge = self._challenge or Challenge(*words)
                self._one_scope = self._one_scope or one_scope

    def redact(self, text: str) -> str:
        shown = (secret for each in (self.credential, *self._shown) for secret in each.secrets)
        return hide(
            text, self._refresh_token, *(token.value for token in self._tokens.values()), *shown
        )

    def conceal(self, target: str) -> None:
        """Hide what signs a URL that the registry gives us as if it were a secret of ours."""
        self._shown.extend(
            Credential(registry_token=each) for each in re.findall("=([^&]{8,2048})", target)
        )

    def declare(self, repository: str, actions: str) -> None:
        """Say that this run uses a repository; tokens will cover it as far as rule 2 allows."""
        self._declared[repository] = _union(self._declared.get(repository, actions), actions)

    async def authorization(
        self, repository: str, actions: str, extra: Iterable[Pair] = (), before_body: bool = False
    ) -> str | None:
        """Return a request's Authorization header, None: none; SyncError for no token. It touches
        `extra` as well.
        """
        challenge = self._challenge
        fixed = self.credential.registry_token
        if fixed and (challenge is not None or self._scheme == "https"):
            return f"Bearer {fixed}"
        if challenge is None:
            return None
        if challenge.scheme == "basic":
            await self._log_in()
            return self.credential.basic
        needed = {repository: actions}
        for name, rights in extra:
            needed[name] = _union(needed.get(name, rights), rights)
        try:
            return f"Bearer {await self._token(needed, before_body)}"
        except (AuthError, RegistryError) as error:
            if error.retryable or self._seen or getattr(error, "fatal", False):
                raise  # a refused password is not tried twice: accounts get locked
        self._challenge = (
            None  # the state led to a place that no longer serves: be told the way again
        )
        return None

    async def refused(
        self, challenges: Iterable[str], used: str | None, repository: str, actions: str
    ) -> bool:
        """Take in a 401 to a request that carried `used`: whether to repeat it once, AuthError if
        no use.
        """
        offered = parse_challenges(challenges)
        known = self._challenge if used is not None else None
        # Who has asked this run for tokens gets no password: a stray Basic would be repeated with
        # every request.
        settled = self._seen and known is not None and known.scheme == "bearer"
        usable = [
            each
            for each in offered
            if (each.scheme == "basic" and not settled) or (each.scheme == "bearer" and each.realm)
        ]
        # Bearer first: its tokens are narrow and short-lived, a password is neither (Quay offers
        # both).
        chosen = max(usable, key=lambda each: each.scheme == "bearer", default=known)
        if chosen is None:
            if not offered:
                return False
            schemes = clean(", ".join(each.scheme for each in offered), 60)
            raise AuthError(f"{self._name} asks for a login by {schemes}, which is not supported")
        if self.credential.registry_token:
            if used is not None:
                raise self._refusal(self._name, fatal=False)
        elif chosen.scheme == "basic":
            await self._log_in()
            if self.credential.basic is None:
                lack = (
                    "none are configured or found"
                    if self.anonymous
                    else f"{self.credential.origin} has none"
                )
                message = f"{self._name} asks for user name and password, {lack}"
                raise AuthError(message, hint=self.login, fatal=not self.anonymous)
            if used == self.credential.basic and not await self._log_in(self.credential):
                raise self._refusal(self._name)
        else:
            check_realm(chosen.realm, self._scheme, self._host, not self.anonymous)
            self._learn(chosen, used, repository, actions)
        self._challenge = chosen._replace(scope="", error="")
        self._seen = True
        return True

    def forbidden(self, used: str | None) -> bool:
        """Take in a 403 to a request that carried `used`; say whether an exact token may do better."""
        if not (used or "").startswith("Bearer ") or self.credential.registry_token:
            return False
        held = self._held_as(used)
        self._one_scope = self._one_scope or (held is not None and held.wide)
        return (
            held is None or held.wide
        )  # one no longer held was replaced because of another request's answer

    def _refusal(self, who: str, *, fatal: bool = True) -> AuthError:
        hint = "check the user name, and whether the password or token has expired or is too narrow"
        return AuthError(
            f"{who} refused the credentials ({self.credential.origin})", hint=hint, fatal=fatal
        )

    def _learn(self, given: Challenge, used: str | None, repository: str, actions: str) -> None:
        """Forget the one token that was refused, and how not to word a scope
        (docs/protocol-facts.md 2.2, 2.3).
        """
        held = self._held_as(used)
        scope = given.scope
        lacking = given.error == "insufficient_scope" and used is not None
        alien = ":" in scope and f" repository:{repository}:" not in f" {scope}"
        if scope and ":" not in scope:
            self._worded[None] = scope  # ECR Public: `aws`, whatever the repository
        elif scope and (alien or lacking):
            self._worded[repository, actions] = scope
        if held is not None:
            # Nor is an older one tried, which has ended before it: after a second 401 a request has
            # failed.
            for key, each in [*self._tokens.items()]:
                if each is held or (
                    each.born <= held.born and self._serves(each, {repository: actions})
                ):
                    self._shown.append(
                        Credential(registry_token=self._tokens.pop(key).value)
                    )  # answers may repeat it
            # "Some registries only look at the first scope": refused before its time, and not as
            # invalid.
            early = self._is_live(held, True) and given.error != "invalid_token"
            alien = alien or (held.wide and (lacking or early))
        self._one_scope = self._one_scope or alien

    def _held_as(self, used: str | None) -> _Token | None:
        return next(
            (token for token in self._tokens.values() if used == f"Bearer {token.value}"), None
        )

    def _is_live(self, token: _Token, before_body: bool) -> bool:
        if token.expires is not None:
            return self._now() < token.expires
        return not before_body or self._now() - token.born < _UNKNOWN_LIFE_BEFORE_BODY

    def _serves(self, token: _Token, needed: _Scopes) -> bool:
        held = token.scopes
        if self._one_scope:
            return held == needed
        covers = (
            name in held and _union(held[name], actions) == held[name]
            for name, actions in needed.items()
        )
        return None in self._worded or all(covers)

    async def _token(self, needed: _Scopes, before_body: bool) -> str:
        while True:
            # With one scope each there may be thousands, and only the exact one can serve.
            keys = [frozenset(needed.items())] if self._one_scope else [*self._tokens]
            held = [self._tokens[key] for key in keys if key in self._tokens] + self._pending
            able = [
                each
                for each in held
                if self._serves(each, needed) and self._is_live(each, before_body)
            ]
            youngest = max(able, key=lambda each: (bool(each.value), each.born), default=None)
            token = youngest or await self._ask(needed, before_body)
            if token.value:
                return token.value
            if not token.done.is_set():
                await token.done.wait()
            # Without value and error its asker was cancelled, or it covered too much: the first to
            # look again asks.
            if token.error is not None and self._serves(token, needed):
                raise token.error.again() from token.error

    async def _ask(self, needed: _Scopes, before_body: bool) -> _Token:
        """Ask for a token, for all who wait for it, that covers what is needed, then what this run
        will need next.
        """
        chosen = {**needed}
        if not self._one_scope and None not in self._worded:
            chosen = {
                name: _union(held, self._declared.get(name, held)) for name, held in needed.items()
            }
            live = [
                token
                for token in (*self._tokens.values(), *self._pending)
                if self._is_live(token, before_body)
            ]
            covered = {pair for token in live for pair in token.scopes.items()}
            for pair in self._declared.items():
                if len(chosen) < _MOST_REPOSITORIES and pair not in covered:
                    chosen.setdefault(*pair)
        self._pending.append(token := _Token(chosen, chosen != needed, self._now()))
        try:
            await self._log_in()
            used = self.credential
            answer = await self._exchange(token.scopes)
            if answer[0] == 401 and await self._log_in(used):
                answer = await self._exchange(token.scopes)
            # One repository may spoil it for all (ghcr: 403). Not again after a 401 to a password:
            # accounts get locked.
            spoilt = answer[0] in (400, 403, 404, 413, 414, 431) or (
                answer[0] == 401 and self.anonymous
            )
            if spoilt and token.wide:
                self._one_scope = True
            else:
                self._read(answer, token)
                kept = {
                    key: held for key, held in self._tokens.items() if self._is_live(held, False)
                }
                self._tokens = kept | {frozenset(token.scopes.items()): token}
        except SyncError as error:
            token.error = error
        finally:
            self._pending.remove(token)
            token.done.set()
        return token

    async def _exchange(self, scopes: _Scopes) -> Answer:
        """Do one token request; docs/protocol-facts.md sections 2.3 (GET) and 2.4 (POST, identity
        tokens).
        """
        challenge = self._challenge or Challenge("bearer")
        basic = self.credential.basic
        realm = challenge.realm
        query = [("service", challenge.service)] if challenge.service else []
        check_realm(realm, self._scheme, self._host, not self.anonymous)
        worded = [
            self._worded.get(pair) or f"repository:{pair[0]}:{pair[1]}" for pair in scopes.items()
        ]
        scope = self._worded.get(None) or " ".join(worded)
        if self._refresh_token:
            form = [
                ("grant_type", "refresh_token"),
                *query,
                ("client_id", "regsync"),
                ("scope", scope),
            ]
            form.append(("refresh_token", self._refresh_token))
            kind = [("Content-Type", "application/x-www-form-urlencoded")]
            answer = await self._fetch(
                "POST", realm, kind, urlencode(form, errors="surrogatepass").encode()
            )
            # Where the POST flow is missing or half there (Artifactory 401, ACR 400), GET may do.
            if answer[0] not in (400, 401, 404, 405) or basic is None:
                return answer
        query += [("scope", word) for word in dict.fromkeys(scope.split())]
        query += [("account", self.credential.username)] if basic else []
        url = f"{realm}{'&' if '?' in realm else '?'}{urlencode(query, errors='surrogatepass')}"
        answer = await self._fetch("GET", url, [("Authorization", basic)] if basic else [], b"")
        if answer[0] == 200:
            self._refresh_token = ""  # it did: no more POSTs
        return answer

    def _read(self, answer: Answer, token: _Token) -> None:
        status, headers, body = answer
        who = f"the token service of {self._name}"
        document = json_object(body) or {}
        said = words(body)[1]
        said = clean(self.redact(clean(f": {said}" if said else "", 4**6)), 200)
        if status == 401 and not self.anonymous:
            raise self._refusal(who)
        if status in (408, 429) or status >= 500:
            wait = parse_retry_after(headers.get("retry-after"), self._wall())
            raise RegistryError(f"{who} answered {status}{said}", status=status, retry_after=wait)
        if not 200 <= status < 300:
            asked = ", ".join(
                f"{name} ({actions})" for name, actions in [*token.scopes.items()][:2]
            )
            login = (
                "without credentials"
                if self.anonymous
                else f"to the credentials from {self.credential.origin}"
            )
            message = f"{who} gives no token for {asked} {login}: status {status}{said}"
            raise AuthError(message, hint=self.advice)
        value = document.get("token") or document.get("access_token")
        if not isinstance(value, str) or not re.fullmatch(r"[\x21-\x7e]{1,65536}", value):
            raise AuthError(f"{who} answered without a usable token")
        renewed = document.get("refresh_token")
        if self._refresh_token and isinstance(renewed, str) and renewed:
            self._refresh_token = renewed
            self._shown.append(Credential(identity_token=renewed))
        life = (
            life_of(value, self._wall()) if (told := document.get("expires_in")) is None else told
        )
        try:
            token.expires = token.born + max(_SHORTEST_LIFE, float(str(life))) * _REFRESH_AT
        except ValueError:
            pass  # neither the answer nor the token says
        token.value = value
