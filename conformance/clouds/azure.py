"""Azure's login services: the directory, metadata, a registry's exchange and token endpoints.

Owns: identities with their secrets; tokens with audience, tenant and lifetime.
May not know: any client, what the registry holds.
Invariants: a token is issued only for the right secret, audience and tenant. Time is an argument.
Follows: docs/protocol-facts.md sections 6.1 to 6.4.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..http import Reception, receive_whole
from ..messages import Answer, Request, Response
from ..tokens import TokenService, read_form
from .services import Refused, Services, as_json, demand, form_of

__all__ = ["CLOUDS", "COMMAND_LINE", "TOKEN_USER", "Cloud", "Directory", "Exchange", "Identity"]

# The user name with which a refresh token is the password.
TOKEN_USER = "00000000-0000-0000-0000-000000000000"
# Client id of Azure's command line.
COMMAND_LINE = "04b07795-8ddb-461a-bbee-02f9e1bf7b46"
_ASSERTION = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
_TENANT = re.compile(r"/([0-9a-f-]{36})/oauth2/v2\.0/token\Z")
_REFRESH_LIFE = 10_800  # seconds for which a registry's refresh token is valid (section 6.1)


@dataclass(frozen=True)
class Cloud:
    """One of Azure's clouds (section 6.2)."""

    name: str
    suffix: str  # of the host names of its registries
    authority: str  # host name
    audiences: tuple[str, ...]  # of tokens that its registries accept


_GLOBAL_AUDIENCE = "https://containerregistry.azure.net"
CLOUDS: Mapping[str, Cloud] = {
    "io": Cloud(
        "AzureCloud",
        "azurecr.io",
        "login.microsoftonline.com",
        (_GLOBAL_AUDIENCE, "https://management.azure.com"),
    ),
    "cn": Cloud(
        "AzureChinaCloud",
        "azurecr.cn",
        "login.chinacloudapi.cn",
        (
            "https://containerregistry.azure.cn",
            _GLOBAL_AUDIENCE,
            "https://management.core.chinacloudapi.cn/",
        ),
    ),
    "us": Cloud(
        "AzureUSGovernment",
        "azurecr.us",
        "login.microsoftonline.us",
        (
            "https://containerregistry.azure.us",
            _GLOBAL_AUDIENCE,
            "https://management.core.usgovcloudapi.net/",
        ),
    ),
}


@dataclass
class Identity:
    """An application, a managed identity or a user of the directory, with its secrets."""

    client_id: str = "11111111-1111-4111-8111-111111111111"
    tenant: str = "22222222-2222-4222-8222-222222222222"
    secret: str = ""
    assertion: str = ""  # the federated token that is valid now
    refresh_tokens: set[str] = field(default_factory=set)
    # "system" for the identity of the machine, "user" for an identity that requests select by
    # client id, "" if it is not managed.
    managed: str = ""


class _Signer:
    """Makes tokens in the form of JWTs, and accepts no others."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self.made: dict[str, dict[str, Any]] = {}  # claims, by token

    def make(self, life: float, **claims: object) -> str:
        """Return a new token that is valid for `life` seconds."""
        now = int(self._wall())
        claims = {"iat": now, "exp": now + int(life), "jti": len(self.made), **claims}
        parts = [{"alg": "HS256", "typ": "JWT"}, claims, "signature"]
        token = ".".join(
            base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()
            for part in parts
        )
        self.made[token] = claims
        return token

    def read(self, token: str) -> dict[str, Any] | None:
        """Return the claims of a token, or None if it is expired or was not made here."""
        claims = self.made.get(token)
        return claims if claims is not None and claims["exp"] > self._wall() else None


class Directory(Services):
    """The authority of a cloud, and the metadata services of its machines.

    Tests may add to `identities`. Tokens are valid for about an hour.
    """

    def __init__(
        self, cloud: Cloud, *identities: Identity, wall: Callable[[], float] = time.time
    ) -> None:
        super().__init__()
        self.cloud = cloud
        self.identities = list(identities)
        self.header = ""  # the value of IDENTITY_HEADER of App Service
        # Audiences that the directory refuses, as if the tenant did not use these services.
        self.unknown: tuple[str, ...] = ()
        self._life = 3599  # seconds
        self._signer = _Signer(wall)
        self._wall = wall

    @property
    def issued_tokens(self) -> list[str]:
        """All tokens that were issued. Tests search outputs for them."""
        return [*self._signer.made]

    def read(self, token: str) -> dict[str, Any] | None:
        """Return the claims of a valid token of this directory, or None."""
        return self._signer.read(token)

    def answer(self, request: Request, body: bytes) -> Response:
        """Answer the authority's token endpoint and the two metadata services."""
        if request.path == "/metadata/identity/oauth2/token":  # of virtual machines
            proxied = {"x-forwarded-for", "proxy-authorization", "via"}
            demand(proxied.isdisjoint(name for name, _ in request.headers), "through a proxy")
            if request.header("metadata") != "true":
                # By this refusal, clients recognise the service.
                raise Refused(400, "invalid_request", "Required metadata header not specified")
            return self._answer_machine(request, "2018-02-01")
        if request.path == "/msi/token":  # of App Service
            header = request.header("x-identity-header")
            demand(self.header and header == self.header, "another X-IDENTITY-HEADER", 401)
            return self._answer_machine(request, "2019-08-01")
        tenant = _TENANT.match(request.path)
        demand(tenant and request.method == "POST", "no such path or method", 404)
        assert tenant is not None
        return self._authority(tenant[1], form_of(request, body))

    def refusal(self, request: Request, refused: Refused) -> Response:
        """Return a refusal, in which tenants and users follow after the first line."""
        text = f"{refused.text}\r\nTrace ID: 77\r\nfor somebody@secret.test"
        return as_json(refused.status, {"error": refused.code, "error_description": text})

    def _make_token(self, identity: Identity, audience: str) -> str:
        """Return a new token. Raises Refused for an unknown audience."""
        if audience not in self.cloud.audiences or audience in self.unknown:
            text = "AADSTS500011: The resource principal was not found in the tenant."
            raise Refused(400, "invalid_resource", text)
        return self._signer.make(
            self._life, aud=audience, tid=identity.tenant, appid=identity.client_id
        )

    # The authority.

    def _authority(self, tenant: str, form: Mapping[str, str]) -> Response:
        audience, _, rest = form.get("scope", "").partition("/.default")
        is_scope = audience and {*rest.split()} <= {"openid", "profile", "offline_access"}
        demand(is_scope, "AADSTS70011: the scope is not valid")
        known = [identity for identity in self.identities if identity.tenant == tenant]
        if not known:
            raise Refused(400, "invalid_request", f"AADSTS90002: Tenant '{tenant}' not found.")
        grant = form.get("grant_type")
        demand(grant in ("client_credentials", "refresh_token"), "unsupported grant_type")
        prove = _prove_application if grant == "client_credentials" else _prove_user
        token = self._make_token(prove(known, form), audience)
        document = {"token_type": "Bearer", "access_token": token, "expires_in": self._life}
        return as_json(200, document)

    # Metadata services.

    def _answer_machine(self, request: Request, version: str) -> Response:
        """Answer a metadata service's request for a token of a managed identity."""
        demand(request.method == "GET", "only GET", 405)
        demand(request.parameter("api-version") == version, f"api-version is not {version}")
        audience = request.parameter("resource") or ""
        client_id = request.parameter("client_id")
        demand(audience, "no resource")
        demand(client_id != "", "a client_id without a value")

        managed = [identity for identity in self.identities if identity.managed]
        chosen = [
            identity
            for identity in managed
            if client_id == identity.client_id or (not client_id and identity.managed == "system")
        ]
        if not chosen:
            several = not client_id and len(managed) > 1
            text = "Multiple user assigned identities exist" if several else "Identity not found"
            raise Refused(400, "invalid_request", text)

        # Metadata services write numbers as text (section 6.3).
        document = {
            "token_type": "Bearer",
            "access_token": self._make_token(chosen[0], audience),
            "expires_on": str(int(self._wall() + self._life)),
            "resource": audience,
            "expires_in": str(self._life),
        }
        return as_json(200, document)


def _prove_application(known: Sequence[Identity], form: Mapping[str, str]) -> Identity:
    """Return the application with the secret or assertion in a form. Raises Refused."""
    client_id = form.get("client_id")
    found = [identity for identity in known if identity.client_id == client_id]
    if not found:
        text = "AADSTS700016: Application was not found in the directory."
        raise Refused(400, "unauthorized_client", text)
    application = found[0]
    secret = form.get("client_secret")
    assertion = form.get("client_assertion")
    demand((secret is None) != (assertion is None), "one of secret and assertion is needed")
    if assertion is None:
        if not secret or secret != application.secret:
            text = "AADSTS7000215: Invalid client secret provided."
            raise Refused(401, "invalid_client", text)
        return application
    is_jwt = form.get("client_assertion_type") == _ASSERTION
    demand(is_jwt, "client_assertion_type is another")
    if not assertion or assertion != application.assertion:
        text = "AADSTS700213: No matching federated identity record found."
        raise Refused(401, "invalid_client", text)
    return application


def _prove_user(known: Sequence[Identity], form: Mapping[str, str]) -> Identity:
    """Return the user with the refresh token in a form. Raises Refused.

    A refresh token is valid for all tenants and audiences (section 6.4).
    """
    is_own = form.get("client_id") == COMMAND_LINE
    demand(is_own, "a refresh token of another application")
    for identity in known:
        if form.get("refresh_token") in identity.refresh_tokens:
            return identity
    text = "AADSTS700082: The refresh token has expired due to inactivity."
    raise Refused(400, "invalid_grant", text)


@dataclass(eq=False, repr=False, kw_only=True)
class Exchange(TokenService):
    """The token endpoints of a registry.

    They exchange a token of the directory for a refresh token, and that for an access token.
    """

    path: str = "/oauth2/token"
    expires_in: int | None = None  # the JWT has an expiry time
    lifetime: float = 4500
    cloud: Cloud | None = None  # whose directory is trusted; None: no directory
    tenants: tuple[str, ...] = ()  # the tenants that may log in; if empty, all may
    # The status for an invalid refresh token: both 401 and 400 have been reported (section 2.4).
    refusal: int = 401

    def __post_init__(self) -> None:
        super().__post_init__()
        self.directory = None if self.cloud is None else Directory(self.cloud, wall=self.wall)
        self.revoked: set[str] = set()  # refresh tokens
        self.exchanges = 0  # number of requests to exchange a token
        self._written: list[str] = []  # access tokens that were issued
        self._signer = _Signer(self.wall)

    @property
    def issued_tokens(self) -> list[str]:
        """All refresh and access tokens that were issued."""
        return [*self._signer.made, *self._written]

    def write_token(self, user: str | None) -> str:
        self._written.append(super().write_token(user))
        return self._written[-1]

    def answer(self, request: Request) -> Answer | Reception | None:
        """Answer the paths of both endpoints, at the registry's origin."""
        return self.start(request) if request.path in ("/oauth2/exchange", self.path) else None

    def kind_of(self, request: Request) -> str:
        return "login" if request.path == "/oauth2/exchange" else super().kind_of(request)

    def start(self, request: Request) -> Answer | Reception:
        """Answer the exchange endpoint, or the access token endpoint as any token service."""
        if request.path != "/oauth2/exchange":
            return super().start(request)
        request.kind = "login"
        return receive_whole(lambda body: self._exchange(request, body))

    def _exchange(self, request: Request, body: bytes) -> Response:
        self.exchanges += 1
        form = read_form(body)
        if form is None:
            return self._refuse_mistake(request, "the form is malformed")
        expected = {"grant_type": "access_token", "service": self.service}
        is_whole = expected.items() <= form.items() and form.get("access_token")
        if request.method != "POST" or not is_whole:
            return self._refuse_mistake(request, f"not POST, or not a token with {expected}")

        if self.directory is None:
            return self._refuse_login()
        claims = self.directory.read(form["access_token"])
        if claims is None or claims["aud"] not in self.directory.cloud.audiences:
            return self._refuse_login()
        tenant = claims["tid"]
        if form.get("tenant", tenant) != tenant or (self.tenants and tenant not in self.tenants):
            return self._refuse_login()
        token = self._signer.make(_REFRESH_LIFE, aud=self.service, appid=claims["appid"])
        return as_json(200, {"refresh_token": token})

    def user_of_refresh_token(self, refresh_token: str) -> str | None:
        """Return the application of a valid refresh token of this registry, or None."""
        claims = self._signer.read(refresh_token) if refresh_token not in self.revoked else None
        if claims is None or claims["aud"] != self.service:
            return None
        return str(claims["appid"])

    def user_of_password(self, user: str, password: str) -> str | None:
        """Return the user with this name and password, or None.

        If the name is TOKEN_USER, the password is a refresh token (section 6.1).
        """
        if user == TOKEN_USER:
            return self.user_of_refresh_token(password)
        return super().user_of_password(user, password)

    def _post(self, request: Request, body: bytes) -> Response:
        answer = super()._post(request, body)
        return replace(answer, status=self.refusal) if answer.status == 401 else answer

    def revoke_logins(self) -> None:
        """Make all refresh and access tokens issued so far invalid."""
        self.revoked |= {*self._signer.made}
        self.revoke()
