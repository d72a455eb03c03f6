"""Azure's login services: the directory, metadata, a registry's exchange and token endpoints.

Owns: identities with their proofs; tokens with audience, tenant and life, signed so that nobody
else can make one.
May not know: any client, what the registry holds.
Invariants: a token is given only for the exact proof, audience and tenant. A request that no
correct client sends is refused and noted in the journal, without the secret that it carried. Time
is an argument.
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
from urllib.parse import parse_qsl

from ..messages import Answer, Content, Request, Response
from ..registry.tokens import TokenService
from ..server.exchange import Reception, Site

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

TOKEN_USER = "00000000-0000-0000-0000-000000000000"
COMMAND_LINE = "04b07795-8ddb-461a-bbee-02f9e1bf7b46"
_ASSERTION = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
_TENANT = re.compile(r"/([0-9a-f-]{36})/oauth2/v2\.0/token\Z")
_METADATA = "/metadata/identity/oauth2/token"
_SERVICE = "/msi/token"
_JSON = [("Content-Type", "application/json; charset=utf-8")]


@dataclass(frozen=True)
class Cloud:
    """One of Azure's clouds (section 6.2); its registries take tokens for any of `audiences`."""

    name: str
    suffix: str
    authority: str
    audiences: tuple[str, ...]


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
    """An application, a managed identity or a user of the directory, with its proofs."""

    client_id: str = "11111111-1111-4111-8111-111111111111"
    tenant: str = "22222222-2222-4222-8222-222222222222"
    secret: str = ""
    # The federated token that is good now.
    assertion: str = ""
    refresh_tokens: set[str] = field(default_factory=set)
    # "system": the machine's own; "user": for requests that name its client id; "": not managed.
    managed: str = ""


def _base64url(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).rstrip(b"=").decode()


def claims_of(token: str) -> dict[str, Any]:
    """Read a token's claims, unverified."""
    part = token.split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    assert isinstance(claims, dict)
    return claims


class _Signer:
    """A maker of signed tokens, who can also tell whether one is genuine and still good."""

    def __init__(self, key: bytes, wall: Callable[[], float]) -> None:
        self._key = key
        self._wall = wall
        self.made: list[str] = []

    def _mark(self, text: str) -> str:
        return _base64url(hmac.new(self._key, text.encode(), "sha256").digest())

    def make(self, life: float, **claims: object) -> str:
        now = int(self._wall())
        header = {"alg": "HS256", "typ": "JWT"}
        dates = {"iat": now, "nbf": now, "exp": now + int(life)}
        payload = {**dates, "jti": str(len(self.made)), **claims}
        text = ".".join(_base64url(json.dumps(part).encode()) for part in (header, payload))
        self.made.append(f"{text}.{self._mark(text)}")
        return self.made[-1]

    def read(self, token: str) -> dict[str, Any] | None:
        text, _, mark = token.rpartition(".")
        if not text or not hmac.compare_digest(mark, self._mark(text)):
            return None
        claims = claims_of(token)
        return claims if claims["exp"] > self._wall() else None


class Directory(Site):
    """The authority of a cloud, and the metadata services of its machines, all at one Site.

    Tests may add to `identities`. `unknown` are audiences that the directory refuses, as those of
    services that a tenant does not have. `header` is IDENTITY_HEADER of the App Service form.
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
    def given(self) -> list[str]:
        """All tokens that were given, for tests that look for them where they must not be."""
        return self._signer.made

    def read(self, token: str) -> dict[str, Any] | None:
        """Return the claims of a token that this directory has given and that is still good."""
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
        content = Content()
        return Reception(
            content, lambda _: self._authority(request, tenant[1], bytes(content)), limit=1 << 16
        )

    def _refuse_mistake(self, request: Request, status: int, code: str, text: str) -> Response:
        """Refuse what no correct client sends, and note it."""
        self.journal.violations.append(f"{request.method} {request.path}: {text}")
        return self._refusal(status, code, text)

    @staticmethod
    def _refusal(status: int, code: str, text: str) -> Response:
        # Section 6.2: tenants and users stand behind the first line.
        number = re.match(r"AADSTS(\d+)", text)
        document: dict[str, object] = {
            "error": code,
            "error_description": f"{text}\r\nTrace ID: 77\r\nfor somebody@secret.test",
        }
        if number:
            document["error_codes"] = [int(number[1])]
        return Response(status, list(_JSON), json.dumps(document).encode())

    # The authority.

    def _authority(self, request: Request, tenant: str, body: bytes) -> Response:
        if request.header("content-type") != "application/x-www-form-urlencoded":
            return self._refuse_mistake(
                request, 400, "invalid_request", "Content-Type is not a form's"
            )

        pairs = parse_qsl(body.decode(), keep_blank_values=True, strict_parsing=True)
        form = dict(pairs)
        if len(form) != len(pairs):
            return self._refuse_mistake(request, 400, "invalid_request", "a field is given twice")

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

        return self._answer_with_token(
            identity, audience, "AADSTS500011: The resource principal was not found in the tenant."
        )

    def _prove_application(
        self, request: Request, tenant: str, form: Mapping[str, str]
    ) -> Identity | Response:
        """Return the application that proves itself by a secret or an assertion."""
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
        if form.get("client_id") != COMMAND_LINE:
            return self._refuse_mistake(
                request, 400, "invalid_client", "a refresh token of another application"
            )
        # Refresh tokens are independent of tenants and audiences (section 6.4).
        for identity in self.identities:
            if form.get("refresh_token") in identity.refresh_tokens and identity.tenant == tenant:
                return identity
        return self._refusal(
            400, "invalid_grant", "AADSTS700082: The refresh token has expired due to inactivity."
        )

    def _answer_with_token(
        self, identity: Identity, audience: str, unknown: str, *, text: bool = False
    ) -> Response:
        """Answer with a token for an audience; `unknown` are the words for one that is not there."""
        if audience not in self.cloud.audiences or audience in self.unknown:
            return self._refusal(400, "invalid_resource", unknown)

        token = self._signer.make(
            self.life,
            aud=audience,
            tid=identity.tenant,
            appid=identity.client_id,
            iss=self.cloud.authority,
        )
        document: dict[str, object] = {"token_type": "Bearer", "access_token": token}
        # Metadata services write numbers as text (section 6.3).
        if text:
            document |= {"expires_on": str(int(self._wall() + self.life)), "resource": audience}

        document["expires_in"] = str(int(self.life)) if text else int(self.life)
        return Response(200, list(_JSON), json.dumps(document).encode())

    # Metadata services.

    def _answer_machine(self, request: Request, version: str) -> Response:
        if request.method != "GET":
            return self._refuse_mistake(request, 405, "invalid_request", "only GET")
        if request.parameter("api-version") != version:
            return self._refuse_mistake(
                request, 400, "invalid_request", f"api-version is not {version}"
            )

        audience = request.parameter("resource")
        named = request.parameter("client_id")
        if not audience or named == "":
            return self._refuse_mistake(
                request, 400, "invalid_request", "no resource, or a client_id without a value"
            )

        managed = [identity for identity in self.identities if identity.managed]
        if named:
            chosen = [identity for identity in managed if identity.client_id == named]
        else:
            chosen = [identity for identity in managed if identity.managed == "system"]

        if not chosen:
            several = not named and len(managed) > 1
            return self._refusal(
                400,
                "invalid_request",
                "Multiple user assigned identities exist" if several else "Identity not found",
            )

        return self._answer_with_token(
            chosen[0], audience, "AADSTS500011: The resource principal was not found.", text=True
        )

    def _metadata(self, request: Request) -> Response:
        """The service of virtual machines; its refusal of a missing header shows that it is there."""
        for name in ("x-forwarded-for", "proxy-authorization", "via"):
            if request.header(name):
                return self._refuse_mistake(request, 400, "invalid_request", "through a proxy")
        if request.header("metadata") != "true":
            return self._refusal(400, "invalid_request", "Required metadata header not specified")
        return self._answer_machine(request, "2018-02-01")

    def _service(self, request: Request) -> Response:
        if not self.header or request.header("x-identity-header") != self.header:
            return self._refuse_mistake(
                request, 401, "unauthorized", "X-IDENTITY-HEADER is not the one of the environment"
            )
        return self._answer_machine(request, "2019-08-01")


class Exchange(TokenService):
    """A registry's own endpoints: from the directory's token to a refresh token to an access token.

    `directory` knows which tokens are genuine. `tenants` are those that may log in, none: all.
    Refresh tokens are good for `refresh_life` seconds (section 6.1). `refusal` is the status for a
    refresh token that is no longer good: 401 and 400 (section 2.4) are both reported.
    """

    def __init__(self, users: Mapping[str, str] | None = None, **options: Any) -> None:
        self.directory: Directory | None = options.pop("directory", None)
        self.tenants: tuple[str, ...] = options.pop("tenants", ())
        self.refresh_life: float = options.pop("refresh_life", 10_800)
        self.refusal = 401
        self.revoked: set[str] = set()
        self._written: list[str] = []
        # Answers have no expires_in: the JWT has it.
        fixed = {
            "path": "/oauth2/token",
            "field": "access_token",
            "jwt": True,
            "expires_in": None,
            "lifetime": 4500,
        }
        super().__init__(users, **{**fixed, **options})
        self._signer = _Signer(b"the registry's own key", self.wall)
        self.exchanges = 0

    @property
    def given(self) -> list[str]:
        """All refresh and access tokens that were given."""
        return [*self._signer.made, *self._written]

    def write_token(self, user: str | None) -> str:
        self._written.append(super().write_token(user))
        return self._written[-1]

    def answer(self, request: Request) -> Answer | Reception | None:
        """Serve both endpoints at the registry's own origin."""
        return self.start(request) if request.path in ("/oauth2/exchange", self.path) else None

    def kind_of(self, request: Request) -> str:
        return "login" if request.path == "/oauth2/exchange" else super().kind_of(request)

    def start(self, request: Request) -> Answer | Reception:
        """Exchange, or go on as any token service."""
        if request.path != "/oauth2/exchange":
            return super().start(request)
        request.kind = "login"
        if request.method != "POST":
            return self._refuse_mistake(request, "only POST")
        content = Content()
        return Reception(content, lambda _: self._exchange(request, bytes(content)), limit=1 << 16)

    def _exchange(self, request: Request, body: bytes) -> Response:
        form = dict(parse_qsl(body.decode(), keep_blank_values=True, strict_parsing=True))
        self.exchanges += 1
        if form.get("grant_type") != "access_token" or not form.get("access_token"):
            return self._refuse_mistake(request, "grant_type or access_token is missing")
        if form.get("service") != self.service:
            return self._refuse_mistake(request, "service is another registry")

        claims = self.directory.read(form["access_token"]) if self.directory is not None else None
        if claims is None or claims["tid"] != form.get("tenant", claims["tid"]):
            return self._refuse_login()

        assert self.directory is not None
        if claims["aud"] not in self.directory.cloud.audiences or (
            self.tenants and claims["tid"] not in self.tenants
        ):
            return self._refuse_login()

        token = self._signer.make(
            self.refresh_life, grant_type="refresh_token", aud=self.service, appid=claims["appid"]
        )
        return Response(
            200,
            [("Content-Type", "application/json")],
            json.dumps({"refresh_token": token}).encode(),
        )

    def user_of_refresh_token(self, refresh_token: str) -> str | None:
        """Return the application that a refresh token of this registry was given to."""
        claims = self._signer.read(refresh_token) if refresh_token not in self.revoked else None
        if claims is None or claims["aud"] != self.service:
            return None
        return str(claims["appid"])

    def user_of_password(self, user: str, password: str) -> str | None:
        """Return the owner of a pair; under a name of zeros a refresh token is the password (6.1)."""
        return (
            self.user_of_refresh_token(password)
            if user == TOKEN_USER
            else super().user_of_password(user, password)
        )

    def _post(self, request: Request, body: bytes) -> Response:
        answer = super()._post(request, body)
        return replace(answer, status=self.refusal) if answer.status == 401 else answer

    def revoke_logins(self) -> None:
        """Make every refresh and access token that was given so far invalid."""
        self.revoked |= set(self._signer.made)
        self.revoke()
