"""What has to be sent to a registry so that it lets us in.

Owns: challenges, the rules for realms, tokens with their scopes and lifetimes. May not know: sockets,
permits, retries, manifests, files; token requests go through the `fetch` it is given. Invariant: a
secret goes to its own registry and to a realm that `check_realm` let pass, nowhere else, never into a
message or a log (I6). Shared work is a latch: when the asker in front is cancelled, the next takes
over. Follows design.md section 6 (rules 1 and 2) and section 9 (circuit breaker), protocol-facts.md
sections 2 and 9.2 (R2, R18).
"""

from __future__ import annotations

import json
import re
from base64 import urlsafe_b64decode
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import anyio

from _regsync.credentials import Credential, find_credential, is_loopback
from _regsync.errors import AuthError, RegistryError, SyncError, clean
from _regsync.pacing import parse_retry_after

__all__ = [
    "Authenticator",
    "Challenge",
    "Credential",
    "Fetch",
    "Scopes",
    "check_realm",
    "find_credential",
    "is_private",
    "parse_challenges",
]

# (method, url, headers, body) -> (status, lower-case headers, body): follows no redirect, bounds the body.
Fetch = Callable[[str, str, list[tuple[str, str]], bytes], Awaitable[tuple[int, Mapping[str, str], bytes]]]
# Repository -> actions ("pull" or "pull,push"), the one needed now first.
Scopes = Mapping[str, str]

# design.md section 6, rule 2. Eight scopes of the longest names stay below any server's limit on a URL.
_MOST_REPOSITORIES = 8
_UNKNOWN_LIFE_BEFORE_BODY = 60.0
_REFRESH_AT = 0.9
# The token specification's minimum: shorter ones are read as this (protocol-facts.md section 2.5).
_SHORTEST_LIFE = 60.0
_LONGEST_LIFE = 86400.0
_CLIENT_ID = "regsync"
_TOKEN = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class Challenge:
    """One way in that a 401 offers; `scheme` is lower case, what is missing is empty."""

    scheme: str
    realm: str = ""
    service: str = ""
    scope: str = ""
    error: str = ""


# A word, and its value when `=` follows: quoted (the closing quote may be missing) or bare.
_WORD = re.compile(
    r"""([!#$%&'*+.^_`|~0-9A-Za-z-]+)(?:[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"?|([^\s,"]*)))?""", re.DOTALL
)


def parse_challenges(values: Iterable[str]) -> list[Challenge]:
    """Read WWW-Authenticate lines, forgiving what is seen in the wild (protocol-facts.md section 2.1).

    A word without `=` opens a challenge, so commas, spaces or nothing may separate what follows.
    """
    found: list[tuple[str, dict[str, str]]] = []
    for value in values:
        inside: dict[str, str] = {}
        for word in _WORD.finditer(value):
            name, quoted, bare = word.group(1).lower(), word.group(2), word.group(3)
            if quoted is None and bare is None:
                inside = {}
                found.append((name, inside))
            else:
                inside.setdefault(name, bare if quoted is None else re.sub(r"(?s)\\(.)", r"\1", quoted))
    names = ("realm", "service", "scope", "error")
    return [Challenge(scheme, *(given.get(name, "") for name in names)) for scheme, given in found]


def _choose(challenges: list[Challenge]) -> Challenge | None:
    """Prefer Bearer: its tokens are narrow and short-lived, a password is neither (Quay offers both)."""
    for challenge in challenges:
        if challenge.scheme == "bearer" and challenge.realm:
            return challenge
    return next((challenge for challenge in challenges if challenge.scheme == "basic"), None)


# Domains below which strangers have names: sharing one says nothing (protocol-facts.md section 2.7). Not
# the public suffix list; what it protects is already at the mercy of the registry that names the realm.
_SHARED = re.compile(
    r"""(?:.*\.)?(?:
    amazonaws\.(?:com(?:\.cn)?|eu) | on\.aws | awsapprunner\.com | cloudfront\.net
    | azurecr\.(?:io|cn|us) | azurewebsites\.net | azure\.com | windows\.net | cloudapp\.net
    | pkg\.dev | gcr\.io | run\.app | web\.app | appspot\.com | googleapis\.com
    | github\.(?:io|dev) | gitlab\.io | (?:pages|workers|r2|fly)\.dev | herokuapp\.com | onrender\.com
    | (?:vercel|netlify|ngrok|ngrok-free|railway|ondigitalocean)\.app | ngrok\.io | digitaloceanspaces\.com
    | aliyuncs\.com | myqcloud\.com | ocir\.io | oraclecloud\.com | scw\.cloud | jfrog\.io
    | (?:nip|sslip)\.io | duckdns\.org | dyndns\.org | ts\.net
    ) | (?:ac|co|com|edu|go|gob|gov|ltd|me|mil|ne|net|nhs|nom|or|org|plc|sch)\.[a-z]{2}""",
    re.VERBOSE,
)


def is_private(host: str) -> bool:
    """Say whether a host is an address, or a name for one, that a stranger must not send us to."""
    import ipaddress

    host = host.rstrip(".").lower()
    if host in ("localhost", "metadata.google.internal") or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        # `127.1`, `2130706433` and `0x7f.1` are addresses to the resolver, whatever they name.
        return re.fullmatch(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)", host) is not None
    address = getattr(address, "ipv4_mapped", None) or address
    return not address.is_global or address.is_multicast


def _is_kin(realm_host: str, registry_host: str) -> bool:
    """Say whether a realm is below the registry's own name, or below that name's unshared parent."""
    parent = registry_host.partition(".")[2]
    domains = [registry_host] if _SHARED.fullmatch(parent) else [registry_host, parent]
    return any("." in name and f".{realm_host}".endswith(f".{name}") for name in domains)


def check_realm(
    realm: str,
    *,
    registry_scheme: str,
    registry_host: str,
    has_credentials: bool,
    allowed: Iterable[str] = (),
) -> str:
    """Return the realm as a URL that may be asked for a token (protocol-facts.md section 2.7, R2).

    `allowed` are host names that the operator vouches for. Raise AuthError for any other realm.
    """
    asks = f"{registry_host} asks for a login at {clean(realm.partition('?')[0].rpartition('@')[2], 100)!r}"
    try:
        parts = urlsplit(realm)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        host, port = "", None
    if not host or not realm.isascii() or not realm.isprintable() or " " in realm:
        raise AuthError(f"{asks}, which is not a URL")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise AuthError(f"{asks}, with user info or a fragment, refused")
    if parts.scheme != "https" and (parts.scheme != "http" or registry_scheme != "http"):
        raise AuthError(
            f"{asks}, which is not https", hint="the registry's operator has to correct its realm"
        )
    authority = (f"[{host}]" if ":" in host else host) + ("" if port is None else f":{port}")
    url = urlunsplit((parts.scheme, authority, parts.path or "/", parts.query, ""))
    # One machine with several ports, as in a test set-up, has several names for itself.
    if host in {registry_host, *allowed} or (is_loopback(host) and is_loopback(registry_host)):
        return url
    if is_private(host):
        raise AuthError(f"{asks}, a private address, refused")
    if has_credentials and not _is_kin(host, registry_host):
        raise AuthError(
            f"{asks}, a host that may have another owner: the credentials are not sent",
            hint="use auth_type: anonymous if the images are public",
        )
    return url


@dataclass(frozen=True, slots=True)
class _Token:
    """A token with what it was asked for; `wide` when that was more than one request needed."""

    value: str = field(repr=False)
    scopes: Scopes
    wide: bool
    born: float
    expires: float | None


class _Latch:
    """One token request under way; whoever waits for it looks again when it is done."""

    def __init__(self, scopes: Scopes) -> None:
        self.scopes = scopes
        self.done = anyio.Event()
        self.error: SyncError | None = None


def _union(*actions: str) -> str:
    # Sorted is `pull,push`: registries compare literally (protocol-facts.md section 2.2).
    return ",".join(sorted({action for text in actions for action in text.split(",")}))


def _covers(held: Scopes, needed: Scopes) -> bool:
    return all(name in held and _union(held[name], actions) == held[name] for name, actions in needed.items())


def _key(scopes: Scopes) -> frozenset[tuple[str, str]]:
    return frozenset(scopes.items())


def _document(text: bytes) -> dict[str, object]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _number(value: object) -> float | None:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value[:15])
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < 1e15 else None


def _lifetime(answer: Mapping[str, object], token: str, wall: float) -> float | None:
    """Return for how many seconds a token serves, None when neither the answer nor the token says so."""
    seconds = _number(answer.get("expires_in"))
    if seconds is None and token.count(".") == 2:
        payload = token.split(".")[1]
        try:
            claims = _document(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        except ValueError:
            claims = {}
        # Against the issuer's own clock where it tells; ours may be wrong.
        begin, end = _number(claims.get("iat", wall)), _number(claims.get("exp"))
        seconds = None if begin is None or end is None else end - begin
    return None if seconds is None else min(max(seconds, _SHORTEST_LIFE), _LONGEST_LIFE)


def _words(body: bytes) -> str:
    """Find what a token server says in its error (protocol-facts.md section 1.12 has the shapes)."""
    document = _document(body)
    errors = document.get("errors")
    first = errors[0] if isinstance(errors, list) and errors else None
    for place in (first if isinstance(first, dict) else {}, document):
        for name in ("message", "error_description", "details", "error"):
            if isinstance(text := place.get(name), str) and text:
                return f": {clean(text, 200)}"
    return ""


def _twin(error: SyncError) -> SyncError:
    """Copy an error for another asker: each adds its own side and reference to its own."""
    twin = type(error).__new__(type(error), *error.args)
    twin.__dict__.update(error.__dict__, side=None, operation=None, reference=None, retries=0)
    return twin


class Authenticator:
    """What is sent to one registry with one credential, and the tokens held for it.

    All methods may be called concurrently; `authorization` may be cancelled at any time.
    """

    def __init__(
        self,
        *,
        scheme: str,
        host: str,
        port: int,
        credential: Credential | None,
        fetch: Fetch,
        now: Callable[[], float],
        wall: Callable[[], float],
        realm_allowed: Iterable[str] = (),
    ) -> None:
        self.scheme, self.host, self.port = scheme, host, port
        self.credential = credential
        self._fetch, self._now, self._wall = fetch, now, wall
        self._allowed = frozenset(realm_allowed)
        self._challenge: Challenge | None = None
        # False while the challenge comes from the state: it may be out of date.
        self._seen = False
        self._one_scope = False
        self._declared: dict[str, str] = {}
        # What the registry calls a scope where our wording would not do; None is for all repositories.
        self._worded: dict[tuple[str, str] | None, str] = {}
        self._tokens: dict[frozenset[tuple[str, str]], _Token] = {}
        self._pending: list[_Latch] = []
        self._refresh_token = credential.identity_token if credential else None
        self._fixed = credential.registry_token if credential else None

    @property
    def learnt(self) -> tuple[Challenge | None, bool]:
        """What the state keeps: the challenge, and whether a token may cover one request only."""
        return self._challenge, self._one_scope

    def recall(self, challenge: Challenge | None, one_scope: bool) -> None:
        """Take back what an earlier run learnt: it saves the bare request. The realm is checked at use."""
        # Basic over http only after this run was asked for it (protocol-facts.md section 2.6).
        usable = challenge is not None and (challenge.scheme == "bearer" or self.scheme == "https")
        self._challenge = self._challenge or (challenge if usable else None)
        self._one_scope = self._one_scope or one_scope

    def declare(self, repository: str, actions: str) -> None:
        """Say that this run uses a repository; tokens will cover it as far as rule 2 allows."""
        self._declared[repository] = _union(self._declared.get(repository, actions), actions)

    async def authorization(
        self,
        repository: str | None,
        actions: str,
        *,
        extra: Iterable[tuple[str, str]] = (),
        before_body: bool = False,
    ) -> str | None:
        """Return the Authorization header for a request, None to send it bare.

        `extra` are further repositories that the request touches (a mount's source). `before_body` is
        for a body that cannot be sent twice: a token of unknown lifetime is then renewed after 60 s.
        """
        challenge = self._challenge
        if self._fixed is not None and (challenge is not None or self.scheme == "https"):
            return f"Bearer {self._fixed}"
        if challenge is None:
            return None
        if challenge.scheme == "basic":
            return self.credential.basic if self.credential else None
        needed = {} if repository is None else {repository: actions}
        for name, rights in extra:
            needed[name] = _union(needed.get(name, rights), rights)
        try:
            return f"Bearer {(await self._token(needed, before_body)).value}"
        except (AuthError, RegistryError) as error:
            if error.retryable or (self._seen and self._challenge == challenge):
                raise
        # The state led to a place that no longer serves: go bare, and be told the way again.
        if self._challenge == challenge:
            self._challenge = None
        return None

    async def refused(
        self, challenges: Iterable[str], used: str | None, repository: str | None, actions: str
    ) -> bool:
        """Take in a 401 to a request that carried `used`; say whether repeating it once makes sense.

        Raise AuthError when no repetition could help.
        """
        offered = parse_challenges(challenges)
        chosen = _choose(offered) or (self._challenge if used is not None else None)
        if chosen is None:
            if not offered:
                return False
            schemes = clean(", ".join(challenge.scheme for challenge in offered), 60)
            raise AuthError(f"{self.host} asks for a login by {schemes}, which is not supported")
        if self._fixed is not None:
            if used is not None:
                origin = self.credential.origin if self.credential else ""
                raise AuthError(f"{self.host} refused the {origin}", hint="it may be expired or too narrow")
        elif chosen.scheme == "basic":
            self._check_basic(used)
        else:
            self._realm(chosen)
            self._learn_scope(chosen, repository, actions, used)
        self._challenge, self._seen = replace(chosen, scope="", error=""), True
        self._drop(chosen, used, repository)
        return True

    def forbidden(self, used: str | None) -> bool:
        """Take in a 403 to a request that carried `used`; say whether an exact token may do better."""
        if used is None or not used.startswith("Bearer ") or self._fixed is not None:
            return False
        held = self._held_as(used)
        if held is not None and held.wide:
            self._narrow()
        # One that is no longer held has been replaced because of another request's answer.
        return held is None or held.wide

    def _check_basic(self, used: str | None) -> None:
        if self.credential is None:
            hint = "use auth_type: basic with credentials, or log in with a container client"
            raise AuthError(f"{self.host} asks for user name and password, none are configured", hint=hint)
        if self.credential.basic is None:
            message = (
                f"{self.host} asks for user name and password, {self.credential.origin} holds only a token"
            )
            raise AuthError(message, fatal=True)
        if used is not None and used.startswith("Basic "):
            raise self._wrong(self.host, self.credential)

    @staticmethod
    def _wrong(who: str, credential: Credential) -> AuthError:
        hint = "check the user name, and whether the password or token there has expired"
        return AuthError(f"{who} refused the credentials from {credential.origin}", hint=hint, fatal=True)

    def _learn_scope(
        self, challenge: Challenge, repository: str | None, actions: str, used: str | None
    ) -> None:
        """Keep the registry's wording where ours would not do (protocol-facts.md section 2.2)."""
        words = challenge.scope.split()
        kinds = {re.split(r"[:(]", word)[0] for word in words}
        if not words or repository is None:
            return
        if not kinds & {"repository", "registry"}:
            # ECR Public: `aws`, whatever the repository.
            self._worded[None] = challenge.scope
            return
        alien = "repository" in kinds and not any(
            word.startswith(f"repository:{repository}:") for word in words
        )
        if alien:
            self._narrow()
        if alien or (challenge.error == "insufficient_scope" and used is not None):
            self._worded[repository, actions] = challenge.scope

    def _drop(self, challenge: Challenge, used: str | None, repository: str | None) -> None:
        """Forget the one token that was refused; one that is no longer held was older."""
        held = self._held_as(used) if used is not None else None
        if held is None:
            return
        self._tokens = {key: token for key, token in self._tokens.items() if token is not held}
        # "Some registries only look at the first scope" (protocol-facts.md section 2.3): refused before
        # its time, not as invalid, and for another repository than the first.
        early = self._is_live(held, True) and challenge.error != "invalid_token"
        ignored = early and repository != next(iter(held.scopes), repository)
        if held.wide and (challenge.error == "insufficient_scope" or ignored):
            self._narrow()

    def _narrow(self) -> None:
        """From now on, one token for exactly what one request needs."""
        self._one_scope = True
        self._tokens = {key: token for key, token in self._tokens.items() if not token.wide}

    def _held_as(self, used: str) -> _Token | None:
        return next((token for token in self._tokens.values() if used == f"Bearer {token.value}"), None)

    def _serves(self, scopes: Scopes, needed: Scopes) -> bool:
        if self._one_scope:
            return scopes == needed
        return None in self._worded or _covers(scopes, needed)

    def _is_live(self, token: _Token, before_body: bool) -> bool:
        if token.expires is not None:
            return self._now() < token.expires
        return not before_body or self._now() - token.born < _UNKNOWN_LIFE_BEFORE_BODY

    def _held(self, needed: Scopes, before_body: bool) -> _Token | None:
        exact = self._tokens.get(_key(needed))
        # With one scope each there may be thousands, and only the exact one can serve.
        for token in [exact] if self._one_scope else [exact, *reversed(self._tokens.values())]:
            if token and self._serves(token.scopes, needed) and self._is_live(token, before_body):
                return token
        return None

    async def _token(self, needed: Scopes, before_body: bool) -> _Token:
        while True:
            if (token := self._held(needed, before_body)) is not None:
                return token
            latch = next((latch for latch in self._pending if self._serves(latch.scopes, needed)), None)
            if latch is None:
                return await self._lead(needed, before_body)
            await latch.done.wait()
            if latch.error is not None and self._serves(latch.scopes, needed):
                raise _twin(latch.error) from latch.error
            # No token and no error for us: that asker was cancelled, or refused for a repository of its
            # own. The first to look again takes over.

    async def _lead(self, needed: Scopes, before_body: bool) -> _Token:
        latch = _Latch(self._compose(needed, before_body))
        self._pending.append(latch)
        try:
            token = await self._ask(latch, needed)
        except SyncError as error:
            latch.error = error
            raise
        finally:
            self._pending.remove(latch)
            latch.done.set()
        if not (token.wide and self._one_scope):
            kept = {key: held for key, held in self._tokens.items() if self._is_live(held, False)}
            kept.pop(_key(token.scopes), None)
            self._tokens = {**kept, _key(token.scopes): token}
        return token

    def _compose(self, needed: Scopes, before_body: bool) -> Scopes:
        """Choose what one token request covers: what is needed, then what this run will need next."""
        if self._one_scope or None in self._worded:
            return needed
        covered: dict[str, str] = {}
        live = [token.scopes for token in self._tokens.values() if self._is_live(token, before_body)]
        for scopes in (*live, *(latch.scopes for latch in self._pending)):
            for name, actions in scopes.items():
                covered[name] = _union(covered.get(name, actions), actions)
        chosen = {
            name: _union(actions, self._declared.get(name, actions)) for name, actions in needed.items()
        }
        for name, actions in self._declared.items():
            if len(chosen) >= _MOST_REPOSITORIES:
                break
            if name not in chosen and not _covers(covered, {name: actions}):
                chosen[name] = actions
        return chosen

    async def _ask(self, latch: _Latch, needed: Scopes) -> _Token:
        born, scopes = self._now(), latch.scopes
        status, headers, body = await self._exchange(scopes)
        # One repository out of bounds may spoil the request for all (ghcr answers 403 to the whole). Not
        # asked again after a 401 to a password: wrong ones are counted, and accounts locked.
        spoilt = status in (400, 403, 404, 413, 414, 431) or (status == 401 and self.credential is None)
        if spoilt and scopes != needed:
            self._narrow()
            born, scopes = self._now(), needed
            latch.scopes = needed
            status, headers, body = await self._exchange(scopes)
        value, life = self._read(status, headers, body, scopes)
        expires = None if life is None else born + life * _REFRESH_AT
        return _Token(value, scopes, scopes != needed, born, expires)

    async def _exchange(self, scopes: Scopes) -> tuple[int, Mapping[str, str], bytes]:
        """Do one token request; protocol-facts.md sections 2.3 (GET) and 2.4 (POST, identity tokens)."""
        challenge, credential = self._challenge, self.credential
        if challenge is None:
            raise AuthError(f"{self.host} has not said where to log in")
        parts = urlsplit(self._realm(challenge))
        worded = [self._worded.get(pair) or f"repository:{pair[0]}:{pair[1]}" for pair in scopes.items()]
        scope = self._worded.get(None) or " ".join(worded)
        service = [("service", challenge.service)] if challenge.service else []
        if self._refresh_token is not None:
            form = [("grant_type", "refresh_token"), *service, ("client_id", _CLIENT_ID)]
            form += [("scope", scope), ("refresh_token", self._refresh_token)]
            kind = [("Content-Type", "application/x-www-form-urlencoded")]
            answer = await self._fetch("POST", urlunsplit(parts), kind, urlencode(form).encode())
            # Where the POST flow is missing or half there (Artifactory 401, ACR 400), GET may do.
            if answer[0] not in (400, 401, 404, 405) or credential is None or credential.basic is None:
                return answer
        query = parse_qsl(parts.query, keep_blank_values=True)
        query += [pair for pair in service if "service" not in dict(query)]
        query += [("scope", word) for word in dict.fromkeys(scope.split())]
        headers: list[tuple[str, str]] = []
        if credential is not None and credential.basic is not None:
            query.append(("account", credential.username or ""))
            headers.append(("Authorization", credential.basic))
        answer = await self._fetch("GET", urlunsplit(parts._replace(query=urlencode(query))), headers, b"")
        if answer[0] == 200:
            # It did: no more POSTs.
            self._refresh_token = None
        return answer

    def _realm(self, challenge: Challenge) -> str:
        return check_realm(
            challenge.realm,
            registry_scheme=self.scheme,
            registry_host=self.host,
            has_credentials=self.credential is not None,
            allowed=self._allowed,
        )

    def _read(
        self, status: int, headers: Mapping[str, str], body: bytes, scopes: Scopes
    ) -> tuple[str, float | None]:
        """Turn a token server's answer into a token and its lifetime, or raise what it means."""
        credential, said = self.credential, _words(body)
        said = credential.redact(said) if credential else said
        realm = self._challenge.realm if self._challenge else self.host
        who = f"the token service {urlsplit(realm).hostname}"
        if status == 401 and credential is not None:
            raise self._wrong(who, credential)
        if status in (408, 429) or status >= 500:
            wait = parse_retry_after(headers.get("retry-after"), self._wall())
            raise RegistryError(f"{who} answered {status}{said}", status=status, retry_after=wait)
        if 300 <= status < 400:
            raise AuthError(f"{who} redirects ({status}); a login is not carried elsewhere")
        if not 200 <= status < 300:
            asked = ", ".join(f"{name} ({actions})" for name, actions in [*scopes.items()][:2]) or self.host
            login = f"to the credentials from {credential.origin}" if credential else "without credentials"
            hint = None if credential else f"configure credentials for {self.host}"
            raise AuthError(f"{who} gives no token for {asked} {login}: status {status}{said}", hint=hint)
        answer = _document(body)
        value = answer.get("token") or answer.get("access_token")
        if not isinstance(value, str) or not _TOKEN.fullmatch(value):
            raise AuthError(f"{who} answered without a usable token")
        renewed = answer.get("refresh_token")
        if self._refresh_token is not None and isinstance(renewed, str) and renewed:
            self._refresh_token = renewed
        return value, _lifetime(answer, value, self._wall())
