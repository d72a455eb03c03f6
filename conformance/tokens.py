"""Authentication of registries: bearer token services and Basic.

A token grants those of the requested permissions that the user has, without an error for the others
(docs/protocol-facts.md section 2.5). If a token lacks a permission, the registry answers 401 with
`insufficient_scope`. Time is an argument.

`TokenService` is a Site. Passed to `App(auth=...)` alone, it answers under `path` of the registry.
It can also be served at another origin; then `realm` must be its URL.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias
from urllib.parse import parse_qsl

from .http import Reception, Site, receive_whole
from .messages import Access, Answer, Request, Response, error

__all__ = ["BasicAuth", "Challenge", "TokenService", "plain", "read_basic", "read_form"]

# Reports whether a user has a permission. None stands for an anonymous client.
Grants: TypeAlias = "Callable[[str | None, Access], bool]"

# Numbers of the token services of this process.
_SERVICES = itertools.count(1)
# type, name and actions of a scope, as in `repository:NAME:pull,push`
_SCOPE = re.compile(r"([a-z]+)(?:\([a-z]+\))?:([^ ]+):([a-z*,]+)\Z")


@dataclasses.dataclass(frozen=True)
class Challenge:
    """The parameters of a challenge."""

    realm: str
    service: str
    scope: str  # several scopes are separated by spaces
    error: str | None


# Formats a challenge as the values of WWW-Authenticate headers.
Form: TypeAlias = "Callable[[Challenge], list[str]]"


def plain(challenge: Challenge) -> list[str]:
    """Format a challenge as most services do. Empty parameters are left out."""
    values = dataclasses.asdict(challenge)
    return ["Bearer " + ",".join(f'{key}="{value}"' for key, value in values.items() if value)]


class _Login(NamedTuple):
    """The user and the password of a Basic credential."""

    user: str
    password: str


def read_basic(header: str) -> _Login | None:
    """Parse an Authorization header. Returns None if it is not a valid Basic credential."""
    scheme, _, value = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, _, password = base64.b64decode(value, validate=True).decode().partition(":")
    except ValueError:
        return None
    return _Login(user, password)


def read_form(body: bytes) -> dict[str, str] | None:
    """Parse a form. Returns None if it is malformed, is not UTF-8, or has a field twice."""
    try:
        pairs = parse_qsl(
            body.decode(), keep_blank_values=True, strict_parsing=True, errors="strict"
        )
    except ValueError:
        return None
    form = dict(pairs)
    return form if len(form) == len(pairs) else None


def _scopes_of(needs: Sequence[Access]) -> str:
    """Format permissions as scopes, one for each name. Actions keep their order."""
    actions_by_name: dict[tuple[str, str], list[str]] = {}
    for need in needs:
        actions_by_name.setdefault((need.type, need.name), []).append(need.action)
    return " ".join(
        f"{kind}:{name}:{','.join(actions)}" for (kind, name), actions in actions_by_name.items()
    )


def _permissions_of(kind: str, name: str, actions: str) -> set[Access]:
    """Return the permissions of one scope.

    On a repository, the action `*` stands for all actions.
    """
    action_names = set(actions.split(","))
    if kind == "repository" and "*" in action_names:
        action_names = action_names - {"*"} | {"pull", "push", "delete"}
    return {Access(kind, name, action) for action in action_names}


class BasicAuth:
    """Basic authentication on every request, as at a registry with an htpasswd file."""

    def __init__(self, users: Mapping[str, str], *, anonymous_pull: bool = False) -> None:
        self.users = dict(users)
        self.anonymous_pull = anonymous_pull

    def answer(self, request: Request) -> Answer | Reception | None:
        """Return None: there are no paths of a service."""
        return None

    def check(self, request: Request, needs: Sequence[Access]) -> Response | None:
        """Refuse a request without a valid login, except an allowed anonymous pull."""
        header = request.header("authorization")
        login = read_basic(header)
        if login is not None and self.users.get(login.user) == login.password:
            return None
        is_pull = bool(needs) and all(need.action == "pull" for need in needs)
        if not header and self.anonymous_pull and is_pull:
            return None
        challenge = [("WWW-Authenticate", 'Basic realm="registry"')]
        return error(401, "UNAUTHORIZED", "authentication required", headers=challenge)


@dataclasses.dataclass
class _Token:
    user: str | None  # None if anonymous
    access: frozenset[Access]
    expires: float  # in seconds of the service's clock
    uses: float  # number of requests for which it is still valid


def _usual_grants(user: str | None, access: Access) -> bool:
    """Report whether a user has a permission: users have all, and anonymous clients may pull."""
    return user is not None or access.action == "pull"


@dataclasses.dataclass(eq=False, repr=False)
class TokenService(Site):
    """A bearer token service, and the check of its tokens at the registry."""

    users: dict[str, str] = dataclasses.field(default_factory=dict)  # passwords by user name
    _: dataclasses.KW_ONLY
    anonymous: bool = True  # whether clients without a login get tokens
    grants: Grants = _usual_grants
    realm: str | None = None  # the URL of the service; None if it is at `path` of the registry
    path: str = "/token"
    service: str = "registry.test"
    form: Form = plain  # of challenges
    # The seconds for which a token is valid, which answers tell. None: they do not, and `lifetime`
    # has the seconds.
    expires_in: int | None = 300
    lifetime: float = 300
    uses: float = math.inf  # number of requests for which a token is valid
    one_scope: bool = False  # whether only the first scope parameter counts
    refresh_tokens: dict[str, str] = dataclasses.field(default_factory=dict)  # users, by token
    now: Callable[[], float] = time.monotonic  # the clock for the validity of tokens
    wall: Callable[[], float] = time.time  # the clock of dates, for services of clouds

    def __post_init__(self) -> None:
        super().__init__()
        self.users = dict(self.users)
        self.requests = 0  # number of token requests
        self.issued: list[str] = []  # the scopes of each token, in order
        self._tokens: dict[str, _Token] = {}  # by text of the token
        # Part of each token, so that two services never issue the same token. The number is
        # repeated, so that one damaged byte does not turn the token into another service's token
        # either.
        number = next(_SERVICES)
        self._own = f"{number}-{number}"

    def revoke(self) -> None:
        """Make all tokens issued so far invalid."""
        self._tokens.clear()

    # Requests to the registry.

    def answer(self, request: Request) -> Answer | Reception | None:
        """Answer the token path if the service is at the registry's own origin."""
        return self.start(request) if self.realm is None and request.path == self.path else None

    def check(self, request: Request, needs: Sequence[Access]) -> Response | None:
        """Refuse a request unless it has a valid token with all needed permissions."""
        scheme, _, value = request.header("authorization").partition(" ")
        if not value:
            return self._challenge(request, needs, None)
        token = self._tokens.get(value) if scheme.lower() == "bearer" else None
        if token is None or token.expires <= self.now() or token.uses < 1:
            return self._challenge(request, needs, "invalid_token")
        if not set(needs) <= token.access:
            return self._challenge(request, needs, "insufficient_scope")
        token.uses -= 1
        return None

    def user(self, request: Request) -> str | None:
        """Return the user of a request's token.

        Returns None if the token is anonymous or unknown.
        """
        token = self._tokens.get(request.header("authorization").partition(" ")[2])
        return None if token is None else token.user

    def _challenge(
        self, request: Request, needs: Sequence[Access], problem: str | None
    ) -> Response:
        realm = self.realm or request.origin + self.path
        challenge = Challenge(realm, self.service, _scopes_of(needs), problem)
        headers = [("WWW-Authenticate", line) for line in self.form(challenge)]
        detail = [need._asdict() for need in needs] or None
        return error(401, "UNAUTHORIZED", "authentication required", detail, headers)

    # The token service.

    def kind_of(self, request: Request) -> str:
        """Return "token" for the token path, else the request's own kind."""
        return "token" if request.path == self.path else request.kind

    def start(self, request: Request) -> Answer | Reception:
        """Answer a request for a token.

        A GET has a Basic credential or no credential. A POST has a refresh token or a password.
        """
        if request.path != self.path:
            return error(404, "UNSUPPORTED", "no such path")
        request.kind = "token"
        self.requests += 1
        if request.method == "GET":
            return self._get(request)
        if request.method == "POST":
            return receive_whole(lambda body: self._post(request, body))
        return error(405, "UNSUPPORTED", "method not allowed")

    def _get(self, request: Request) -> Response:
        header = request.header("authorization")
        login = read_basic(header)
        user = None if login is None else self.user_of_password(*login)
        if user is None and (header or not self.anonymous):
            return self._refuse_login()
        scopes = [value for key, value in request.query if key == "scope"]
        offline = request.parameter("offline_token") == "true"
        return self.issue(request, user, scopes, request.parameter("service"), offline=offline)

    def _post(self, request: Request, body: bytes) -> Response:
        if not request.header("content-type").startswith("application/x-www-form-urlencoded"):
            return self._refuse_mistake(request, "Content-Type is not a form's")

        form = read_form(body) or {}
        for name in ("grant_type", "service", "client_id"):
            if not form.get(name):
                return self._refuse_mistake(request, f"no {name}")

        user: str | None
        if form["grant_type"] == "refresh_token":
            user = self.user_of_refresh_token(form.get("refresh_token", ""))
        elif form["grant_type"] == "password":
            user = self.user_of_password(form.get("username", ""), form.get("password", ""))
        else:
            return self._refuse_mistake(request, "unknown grant_type")

        if user is None:
            return self._refuse_login()
        scopes = form.get("scope", "").split()
        offline = form.get("access_type") == "offline"
        return self.issue(request, user, scopes, form["service"], offline=offline)

    def user_of_password(self, user: str, password: str) -> str | None:
        """Return the user with this name and password, or None."""
        return user if user in self.users and self.users[user] == password else None

    def user_of_refresh_token(self, refresh_token: str) -> str | None:
        """Return the user of a valid refresh token, or None."""
        return self.refresh_tokens.get(refresh_token)

    def _refuse_mistake(self, request: Request, message: str) -> Response:
        self.journal.violations.append(f"{request.method} {request.path}: {message}")
        return error(400, "UNSUPPORTED", message)

    @staticmethod
    def _refuse_login() -> Response:
        return error(401, "UNAUTHORIZED", "incorrect username or password")

    def issue(
        self,
        request: Request,
        user: str | None,
        scopes: list[str],
        service: str | None,
        *,
        offline: bool,
    ) -> Response:
        """Return an answer with a new token. With `offline`, a user gets a refresh token too."""
        challenge_line = self.form(Challenge("realm", self.service, "", None))[-1]
        if service != self.service and "service=" in challenge_line.lower():
            return self._refuse_mistake(request, f"service {service!r} is not the challenge's")

        requested: set[Access] = set()
        counting = scopes[:1] if self.one_scope else scopes
        for scope in " ".join(counting).split():
            match = _SCOPE.match(scope)
            if match is None:
                return self._refuse_mistake(request, f"scope {scope!r} is malformed")
            requested |= _permissions_of(*match.groups())

        granted = frozenset(access for access in requested if self.grants(user, access))
        self.issued.append(" ".join(scopes))
        token = self.write_token(user)
        ends = self.now() + (self.lifetime if self.expires_in is None else self.expires_in)
        self._tokens[token] = _Token(user, granted, ends, self.uses)
        document: dict[str, object] = {"token": token}
        if self.expires_in is not None:
            document["expires_in"] = self.expires_in
        if offline and user is not None:
            document["refresh_token"] = f"refresh-{user}"
            self.refresh_tokens[f"refresh-{user}"] = user
        return Response(200, [("Content-Type", "application/json")], json.dumps(document).encode())

    def write_token(self, user: str | None) -> str:
        """Return the text of a new token."""
        return f"token-{len(self.issued)}.{self._own}"
