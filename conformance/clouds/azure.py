"""Azure's login services: the directory, metadata, a registry's exchange and token endpoints.

Owns: identities with their secrets; signed tokens with audience, tenant and lifetime.
May not know: any client, what the registry holds.
Invariants: a token is issued only for the right secret, audience and tenant. A request that no
correct client sends is refused and recorded in the journal, without its secret. Time is an
argument.
Follows: docs/protocol-facts.md sections 6.1 to 6.4.
"""

from __future__ import annotations

import base64
import hmac
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..messages import Answer, Request, Response
from ..registry.tokens import TokenService, read_form
from ..server.exchange import Reception, Site, receive_whole

__all__ = [
    "CLOUDS",
    "COMMAND_LINE",
    "TOKEN_USER",
    "Cloud",
    "Directory",
    "Exchange",
    "Identity",
    "claims_of",
]

# The user name with which a refresh token is the password.
TOKEN_USER = "00000000-0000-0000-0000-000000000000"
# Client id of Azure's command line.
COMMAND_LINE = "04b07795-8ddb-461a-bbee-02f9e1bf7b46"
_ASSERTION = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
_TENANT = re.compile(r"/([0-9a-f-]{36})/oauth2/v2\.0/token\Z")
_METADATA = "/metadata/identity/oauth2/token"  # the metadata service of virtual machines
_SERVICE = "/msi/token"  # the metadata service of App Service
_REFRESH_LIFE = 10_800  # seconds for which a registry's refresh token is valid (section 6.1)


@dataclass(frozen=True)
class Cloud:
    """One of Azure's clouds (section 6.2)."""

    name: str
    suffix: str  # of the host names of its registries
    authority: str  # host name
    audiences: tuple[str, ...]  # of tokens that its registries accept


CLOUDS: Mapping[str, Cloud] = {
    "io": Cloud(
        "AzureCloud",
        "azurecr.io",
        "login.microsoftonline.com",
        ("https://containerregistry.azure.net", "https://management.azure.com"),
    ),
    "cn": Cloud(
        "AzureChinaCloud",
        "azurecr.cn",
        "login.chinacloudapi.cn",
        (
            "https://containerregistry.azure.cn",
            "https://containerregistry.azure.net",
            "https://management.core.chinacloudapi.cn/",
        ),
    ),
    "us": Cloud(
        "AzureUSGovernment",
        "azurecr.us",
        "login.microsoftonline.us",
        (
            "https://containerregistry.azure.us",
            "https://containerregistry.azure.net",
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
    # The federated token that is valid now.
    assertion: str = ""
    refresh_tokens: set[str] = field(default_factory=set)
    # "system" for the identity of the machine, "user" for an identity that requests select by
    # client id, "" if it is not managed.
    managed: str = ""


def _json(status: int, document: object) -> Response:
    headers = [("Content-Type", "application/json; charset=utf-8")]
    return Response(status, headers, json.dumps(document).encode())


def _base64url(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).rstrip(b"=").decode()


def claims_of(token: str) -> dict[str, Any]:
    """Return the claims of a token without verifying its signature."""
    part = token.split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    assert isinstance(claims, dict)
    return claims


class _Signer:
    """Makes and verifies signed tokens."""

    def __init__(self, key: bytes, wall: Callable[[], float]) -> None:
        self._key = key
        self._wall = wall
        self.made: list[str] = []  # all tokens

    def _mark(self, text: str) -> str:
        """Return the signature of a text."""
        return _base64url(hmac.new(self._key, text.encode(), "sha256").digest())

    def make(self, life: float, **claims: object) -> str:
        """Return a new token that is valid for `life` seconds."""
        now = int(self._wall())
        header = {"alg": "HS256", "typ": "JWT"}
        dates = {"iat": now, "nbf": now, "exp": now + int(life)}
        payload = {**dates, "jti": str(len(self.made)), **claims}
        text = ".".join(_base64url(json.dumps(part).encode()) for part in (header, payload))
        self.made.append(f"{text}.{self._mark(text)}")
        return self.made[-1]

    def read(self, token: str) -> dict[str, Any] | None:
        """Return the claims of a token, or None if it is expired or its signature is wrong."""
        text, _, mark = token.rpartition(".")
        if not text or not hmac.compare_digest(mark, self._mark(text)):
            return None
        claims = claims_of(token)
        return claims if claims["exp"] > self._wall() else None


class Directory(Site):
    """The authority of a cloud, and the metadata services of its machines.

    Tests may add to `identities`. `unknown` has audiences that the directory refuses, as if the
    tenant did not use these services. `header` is the value of IDENTITY_HEADER of App Service.
    Tokens are valid for `life` seconds.
    """

    def __init__(
        self,
        cloud: Cloud,
        *identities: Identity,
        header: str = "",
        life: float = 3599,
        unknown: tuple[str, ...] = (),
        wall: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self.cloud = cloud
        self.identities = list(identities)
        self.header = header
        self.life = life
        self.unknown = unknown
        self._signer = _Signer(b"the directory's own key", wall)
        self._wall = wall

    @property
    def issued_tokens(self) -> list[str]:
        """All tokens that were issued. Tests search outputs for them."""
        return self._signer.made

    def read(self, token: str) -> dict[str, Any] | None:
        """Return the claims of a valid token of this directory, or None."""
        return self._signer.read(token)

    def kind_of(self, request: Request) -> str:
        return "login"

    def start(self, request: Request) -> Answer | Reception:
        """Answer the authority's token endpoint and the two metadata services."""
        request.kind = "login"
        if request.path == _METADATA:
            return self._metadata(request)
        if request.path == _SERVICE:
            return self._service(request)
        tenant = _TENANT.match(request.path)
        if tenant is None or request.method != "POST":
            return self._refuse_mistake(request, 404, "not_found", "no such path or method")
        return receive_whole(lambda body: self._authority(request, tenant[1], body))

    def _refuse_mistake(self, request: Request, status: int, code: str, text: str) -> Response:
        """Refuse a request that no correct client sends, and record the violation."""
        self.journal.violations.append(f"{request.method} {request.path}: {text}")
        return self._refusal(status, code, text)

    @staticmethod
    def _refusal(status: int, code: str, text: str) -> Response:
        # Tenants and users follow after the first line (section 6.2).
        number = re.match(r"AADSTS(\d+)", text)
        document: dict[str, object] = {
            "error": code,
            "error_description": f"{text}\r\nTrace ID: 77\r\nfor somebody@secret.test",
        }
        if number:
            document["error_codes"] = [int(number[1])]
        return _json(status, document)

    # The authority.

    def _authority(self, request: Request, tenant: str, body: bytes) -> Response:
        if request.header("content-type") != "application/x-www-form-urlencoded":
            return self._refuse_mistake(
                request, 400, "invalid_request", "Content-Type is not a form's"
            )

        form = read_form(body)
        if form is None:
            return self._refuse_mistake(request, 400, "invalid_request", "the form is malformed")

        audience, _, rest = form.get("scope", "").partition("/.default")
        if not audience or set(rest.split()) - {"openid", "profile", "offline_access"}:
            return self._refuse_mistake(
                request, 400, "invalid_scope", "AADSTS70011: the scope is not valid"
            )
        if all(tenant != identity.tenant for identity in self.identities):
            return self._refusal(
                400, "invalid_request", f"AADSTS90002: Tenant '{tenant}' not found."
            )

        proofs = {"client_credentials": self._prove_application, "refresh_token": self._prove_user}
        prove = proofs.get(form.get("grant_type", ""))
        if prove is None:
            return self._refuse_mistake(
                request, 400, "unsupported_grant_type", "AADSTS70003: unsupported grant_type"
            )

        identity = prove(request, tenant, form)
        if isinstance(identity, Response):
            return identity

        token = self._make_token(identity, audience)
        if token is None:
            text = "AADSTS500011: The resource principal was not found in the tenant."
            return self._refusal(400, "invalid_resource", text)
        return _json(
            200, {"token_type": "Bearer", "access_token": token, "expires_in": int(self.life)}
        )

    def _prove_application(
        self, request: Request, tenant: str, form: Mapping[str, str]
    ) -> Identity | Response:
        """Return the application with the secret or assertion in the form, or a refusal."""
        applications = {
            (identity.client_id, identity.tenant): identity
            for identity in reversed(self.identities)
        }
        application = applications.get((form.get("client_id", ""), tenant))
        if application is None:
            return self._refusal(
                400,
                "unauthorized_client",
                "AADSTS700016: Application was not found in the directory.",
            )

        secret = form.get("client_secret")
        assertion = form.get("client_assertion")
        if (secret is None) == (assertion is None):
            return self._refuse_mistake(
                request,
                401,
                "invalid_client",
                "AADSTS7000218: one of secret and assertion is needed",
            )
        if secret is not None:
            expected = application.secret
            if expected and hmac.compare_digest(secret.encode(), expected.encode()):
                return application
            return self._refusal(
                401, "invalid_client", "AADSTS7000215: Invalid client secret provided."
            )
        if form.get("client_assertion_type") != _ASSERTION:
            return self._refuse_mistake(
                request, 400, "invalid_request", "client_assertion_type is another"
            )
        if application.assertion and assertion == application.assertion:
            return application

        return self._refusal(
            401, "invalid_client", "AADSTS700213: No matching federated identity record found."
        )

    def _prove_user(
        self, request: Request, tenant: str, form: Mapping[str, str]
    ) -> Identity | Response:
        """Return the user with the refresh token in the form, or a refusal."""
        if form.get("client_id") != COMMAND_LINE:
            return self._refuse_mistake(
                request, 400, "invalid_client", "a refresh token of another application"
            )
        # A refresh token is valid for all tenants and audiences (section 6.4).
        for identity in self.identities:
            if form.get("refresh_token") in identity.refresh_tokens and identity.tenant == tenant:
                return identity
        return self._refusal(
            400, "invalid_grant", "AADSTS700082: The refresh token has expired due to inactivity."
        )

    def _make_token(self, identity: Identity, audience: str) -> str | None:
        """Return a new token, or None for an unknown audience."""
        if audience not in self.cloud.audiences or audience in self.unknown:
            return None
        return self._signer.make(
            self.life,
            aud=audience,
            tid=identity.tenant,
            appid=identity.client_id,
            iss=self.cloud.authority,
        )

    # Metadata services.

    def _answer_machine(self, request: Request, version: str) -> Response:
        """Answer a metadata service's request for a token of a managed identity."""
        if request.method != "GET":
            return self._refuse_mistake(request, 405, "invalid_request", "only GET")
        if request.parameter("api-version") != version:
            return self._refuse_mistake(
                request, 400, "invalid_request", f"api-version is not {version}"
            )

        audience = request.parameter("resource")
        client_id = request.parameter("client_id")
        if not audience or client_id == "":
            return self._refuse_mistake(
                request, 400, "invalid_request", "no resource, or a client_id without a value"
            )

        managed = [identity for identity in self.identities if identity.managed]
        if client_id:
            chosen = [identity for identity in managed if identity.client_id == client_id]
        else:
            chosen = [identity for identity in managed if identity.managed == "system"]

        if not chosen:
            several = not client_id and len(managed) > 1
            return self._refusal(
                400,
                "invalid_request",
                "Multiple user assigned identities exist" if several else "Identity not found",
            )

        token = self._make_token(chosen[0], audience)
        if token is None:
            text = "AADSTS500011: The resource principal was not found."
            return self._refusal(400, "invalid_resource", text)

        # Metadata services write numbers as text (section 6.3).
        document = {
            "token_type": "Bearer",
            "access_token": token,
            "expires_on": str(int(self._wall() + self.life)),
            "resource": audience,
            "expires_in": str(int(self.life)),
        }
        return _json(200, document)

    def _metadata(self, request: Request) -> Response:
        """Answer as the metadata service of virtual machines.

        Clients recognise the service by its refusal of a request without the header `metadata`.
        """
        for name in ("x-forwarded-for", "proxy-authorization", "via"):
            if request.header(name):
                return self._refuse_mistake(request, 400, "invalid_request", "through a proxy")
        if request.header("metadata") != "true":
            return self._refusal(400, "invalid_request", "Required metadata header not specified")
        return self._answer_machine(request, "2018-02-01")

    def _service(self, request: Request) -> Response:
        """Answer as the metadata service of App Service."""
        if not self.header or request.header("x-identity-header") != self.header:
            return self._refuse_mistake(
                request, 401, "unauthorized", "X-IDENTITY-HEADER is not the one of the environment"
            )
        return self._answer_machine(request, "2019-08-01")


@dataclass(eq=False, repr=False, kw_only=True)
class Exchange(TokenService):
    """The token endpoints of a registry.

    They exchange a token of the directory for a refresh token, and that for an access token.
    """

    path: str = "/oauth2/token"
    field: str = "access_token"
    jwt: bool = True
    expires_in: int | None = None  # the JWT has an expiry time
    lifetime: float = 4500
    directory: Directory | None = None  # verifies tokens of the directory
    tenants: tuple[str, ...] = ()  # the tenants that may log in; if empty, all may
    # The status for an invalid refresh token: both 401 and 400 have been reported (section 2.4).
    refusal: int = 401

    def __post_init__(self) -> None:
        super().__post_init__()
        self.revoked: set[str] = set()  # refresh tokens
        self.exchanges = 0  # number of requests to exchange a token
        self._written: list[str] = []  # access tokens that were issued
        self._signer = _Signer(b"the registry's own key", self.wall)

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
        if request.method != "POST":
            return self._refuse_mistake(request, "only POST")
        return receive_whole(lambda body: self._exchange(request, body))

    def _exchange(self, request: Request, body: bytes) -> Response:
        self.exchanges += 1
        form = read_form(body)
        if form is None:
            return self._refuse_mistake(request, "the form is malformed")
        if form.get("grant_type") != "access_token" or not form.get("access_token"):
            return self._refuse_mistake(request, "grant_type or access_token is missing")
        if form.get("service") != self.service:
            return self._refuse_mistake(request, "service is another registry")

        if self.directory is None:
            return self._refuse_login()
        claims = self.directory.read(form["access_token"])
        if claims is None or claims["aud"] not in self.directory.cloud.audiences:
            return self._refuse_login()
        tenant = claims["tid"]
        if form.get("tenant", tenant) != tenant or (self.tenants and tenant not in self.tenants):
            return self._refuse_login()

        token = self._signer.make(
            _REFRESH_LIFE, grant_type="refresh_token", aud=self.service, appid=claims["appid"]
        )
        return Response(
            200,
            [("Content-Type", "application/json")],
            json.dumps({"refresh_token": token}).encode(),
        )

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
        return (
            self.user_of_refresh_token(password)
            if user == TOKEN_USER
            else super().user_of_password(user, password)
        )

    def _post(self, request: Request, body: bytes) -> Response:
        answer = super()._post(request, body)
        return replace(answer, status=self.refusal) if answer.status == 401 else answer

    def revoke_logins(self) -> None:
        """Make all refresh and access tokens issued so far invalid."""
        self.revoked |= set(self._signer.made)
        self.revoke()
