"""Google's login services, which issue access tokens.

Owns: the token endpoint, the security token service, impersonation and the metadata server; their
accounts, keys and pools; the credential files of these accounts.
May not know: registries, sockets, any client.
Invariants: a token is issued only for the credential of an identity. The signature of a JWT is
verified with the account's public key, and all its claims are checked. Time is an argument.
Follows: docs/protocol-facts.md sections 5.2 to 5.4, RFC 7515 to 7523 and RFC 8693.

One Site answers under all host names. Each path belongs to one service, which refuses other host
names.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote

from ..http import run_in_thread
from ..messages import Request, Response
from ..names import Names
from ..tokens import TokenService, read_basic
from .services import Refused, Services, as_json, check_fields, demand, form_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

__all__ = [
    "CLIENT",
    "HOSTS",
    "METADATA",
    "Google",
    "GoogleTokens",
    "Key",
    "Running",
    "google",
    "make_key",
]

_OAUTH = "oauth2.googleapis.com"
_STS = "sts.googleapis.com"
_IAM_CREDENTIALS = "iamcredentials.googleapis.com"
HOSTS = (_OAUTH, _STS, _IAM_CREDENTIALS)
METADATA = ("metadata.google.internal", "169.254.169.254")  # hosts of the metadata server
_LOCAL = re.compile(r"(?:localhost|127\.0\.0\.1)(?::[0-9]+)?\Z")
# Hosts of the services, by path.
_SERVICES = {"/token": _OAUTH, "/v1/token": _STS, "/v1/oauthtoken": _STS}
_IMPERSONATE = re.compile(r"/v1/projects/-/serviceAccounts/([^/:]+):generateAccessToken\Z")

# Scopes.
_CLOUD = "https://www.googleapis.com/auth/cloud-platform"
_IAM = "https://www.googleapis.com/auth/iam"

_SKEW = 300.0  # maximum difference of a client's clock in seconds
_LIFETIME = 3600  # of access tokens, in seconds; none can be longer
_URN = "urn:ietf:params:oauth:"
_SERIAL = itertools.count(1)  # numbers of the Google objects of this process


class Client(NamedTuple):
    """The program with which users log in. It sends its secret by Basic or in a form."""

    id: str
    secret: str


CLIENT = Client("32555940559.apps.googleusercontent.example", "a-client-secret-of-tests")


# The package `cryptography` is imported where it is used: a registry is served without it.


class Key(NamedTuple):
    """An RSA key."""

    pem: str  # the private key
    name: str
    public: RSAPublicKey

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Report whether an RSASSA-PKCS1-v1_5 signature is valid (RFC 8017 section 8.2.2)."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
        from cryptography.hazmat.primitives.hashes import SHA256

        try:
            self.public.verify(signature, message, PKCS1v15(), SHA256())
        except InvalidSignature:
            return False
        return True


@functools.cache
def make_key(number: int = 0) -> Key:
    """Make an RSA key. Within a process, a number always has the same key."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(65537, 2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    name = f"{number:08d}{hashlib.sha256(pem).hexdigest()[:32]}"
    return Key(pem.decode(), name, key.public_key())


class _Token(NamedTuple):
    """An access token."""

    principal: str  # the account or user
    scopes: frozenset[str]
    expires: float  # in seconds of the clock `Google.now`


class Google(Services):
    """All services.

    `now` is the clock for the validity of tokens, `wall` that for the claims of JWTs.
    """

    # Service accounts: one with a key, one that others may impersonate, and that of the machine.
    robot = "robot@project.iam.gserviceaccount.com"
    target = "target@project.iam.gserviceaccount.com"
    machine = "machine@project.iam.gserviceaccount.com"
    # Pools, which give identities to the subjects of other services.
    provider = "//iam.googleapis.com/projects/123/locations/global/workloadIdentityPools/pool/providers/mine"
    workforce = "//iam.googleapis.com/locations/global/workforcePools/people/providers/mine"
    impersonation_url = (
        f"https://{_IAM_CREDENTIALS}/v1/projects/-/serviceAccounts/{target}:generateAccessToken"
    )

    def __init__(
        self, now: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        super().__init__()
        self.now = now
        self.wall = wall
        self.has_account = True  # whether the machine has a service account
        self.issued: list[str] = []  # access tokens, in order
        self.asked: list[str] = []  # the service of each request, in order
        self.keys: dict[str, Key] = {self.robot: make_key()}
        self._serial = serial = next(_SERIAL)  # so that secrets of two objects differ
        # Owners, by refresh token of users and of a workforce, and by subject token of a pool.
        self.users = {f"1//refresh-{serial}-secret": "user@example.com"}
        self.staff = {f"workforce-refresh-{serial}-secret": "staff@example.com"}
        self.subjects = {f"subject.{serial}.token-secret": "workload"}
        # Pairs of an account and a service account that it may impersonate.
        self.impersonators = {
            (who, self.target)
            for who in (self.robot, "user@example.com", "workload", "staff@example.com")
        }
        self._tokens: dict[str, _Token] = {}  # by text of the token

    def principal(self, username: str, password: str) -> str | None:
        """Return the owner of an access token that is used as a password, or None.

        Section 5.2 has the user names.
        """
        token = self._token(password)
        is_user = username in ("oauth2accesstoken", "_token")
        return token.principal if is_user and token and _CLOUD in token.scopes else None

    @property
    def secrets(self) -> list[str]:
        """All secrets: tokens, lines of keys, credentials. Tests search outputs for them."""
        lines = [line for key in self.keys.values() for line in key.pem.splitlines()[1:-2]]
        return [*self.issued, *lines, *self.users, *self.staff, *self.subjects, CLIENT.secret]

    # Credential files as written by Google's tools (section 5.4).

    def service_account(self, **fields: Any) -> dict[str, Any]:
        key = self.keys[self.robot]
        return {
            "type": "service_account",
            "project_id": "project",
            "private_key_id": key.name,
            "private_key": key.pem,
            "client_email": self.robot,
            "token_uri": f"https://{_OAUTH}/token",
            "universe_domain": "googleapis.com",
            **fields,
        }

    def authorized_user(self, **fields: Any) -> dict[str, Any]:
        return {
            "type": "authorized_user",
            "client_id": CLIENT.id,
            "client_secret": CLIENT.secret,
            "refresh_token": next(iter(self.users)),
            "quota_project_id": "project",
            **fields,
        }

    def external_account(self, source: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        return {
            "type": "external_account",
            "audience": self.provider,
            "subject_token_type": f"{_URN}token-type:jwt",
            "token_url": f"https://{_STS}/v1/token",
            "credential_source": dict(source),
            **fields,
        }

    def external_user(self, **fields: Any) -> dict[str, Any]:
        return {
            "type": "external_account_authorized_user",
            "audience": self.workforce,
            "client_id": CLIENT.id,
            "client_secret": CLIENT.secret,
            "refresh_token": next(iter(self.staff)),
            "token_url": f"https://{_STS}/v1/oauthtoken",
            **fields,
        }

    def impersonated(self, source: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        return {
            "type": "impersonated_service_account",
            "service_account_impersonation_url": self.impersonation_url,
            "delegates": [],
            "source_credentials": dict(source),
            **fields,
        }

    # One request.

    def answer(self, request: Request, body: bytes) -> Response:
        """Answer as the service of the request's path."""
        path = request.path
        if path.startswith("/computeMetadata/") or path == "/":
            return self._metadata(request)

        account = _IMPERSONATE.match(path)
        host = _IAM_CREDENTIALS if account else _SERVICES.get(path)
        demand(host is not None, "no such path", 404)
        self._demand_host(request, "https", (str(host),))
        demand(request.method == "POST" and not request.query, "a POST without a query is wanted")
        self.asked.append(str(host).partition(".")[0])
        if account:
            return self._impersonate(request, body, account[1])
        form = form_of(request, body)
        if path == "/v1/token":
            return self._exchange(request, form)
        if path == "/v1/oauthtoken":
            return self._oauth_staff(request, form)
        demand(not request.header("authorization"), "an Authorization header")
        return self._oauth_account(form) if "assertion" in form else self._oauth_user(form)

    @staticmethod
    def _demand_host(request: Request, scheme: str, hosts: tuple[str, ...]) -> None:
        """Refuse a request to another service. On this machine, any service answers."""
        host = request.header("host")
        is_right = host in hosts and request.scheme == scheme
        demand(is_right or _LOCAL.match(host), f"{request.scheme}://{host} is another service", 404)

    def refusal(self, request: Request, refused: Refused) -> Response:
        """Return a refusal in the form of Google's APIs or of OAuth services."""
        code, text = refused.code, refused.text
        if _IMPERSONATE.match(request.path):
            fields = {"code": refused.status, "message": text, "status": code}
            return as_json(refused.status, {"error": fields})
        return as_json(refused.status, {"error": code, "error_description": text})

    def _token(self, text: str) -> _Token | None:
        """Return a valid access token, or None."""
        token = self._tokens.get(text)
        return token if token is not None and token.expires > self.now() else None

    def _issue(self, principal: str, scopes: str, life: float) -> str:
        token = f"ya29.{self._serial}-{len(self.issued)}-access-secret"
        self.issued.append(token)
        self._tokens[token] = _Token(principal, frozenset(scopes.split()), self.now() + life)
        return token

    def _answer_with_token(self, principal: str, scopes: str, **more: object) -> Response:
        token = self._issue(principal, scopes, _LIFETIME)
        document = {"access_token": token, "expires_in": _LIFETIME, "token_type": "Bearer", **more}
        return as_json(200, document)

    # The token endpoint: service accounts (RFC 7523) and users (RFC 6749 section 6).

    def _oauth_user(self, form: dict[str, str]) -> Response:
        """Answer with a token for a user's refresh token."""
        check_fields(form, "grant_type client_id client_secret refresh_token", "scope")
        demand(form["grant_type"] == "refresh_token", "another grant_type")
        if (form["client_id"], form["client_secret"]) != CLIENT:
            raise Refused(401, "invalid_client", "Unauthorized")
        if form["refresh_token"] not in self.users:
            raise Refused(400, "invalid_grant", "Token has been expired or revoked.")
        return self._answer_with_token(self.users[form["refresh_token"]], _CLOUD)

    def _oauth_account(self, form: dict[str, str]) -> Response:
        """Answer with a token for a JWT that a service account has signed."""
        check_fields(form, "grant_type assertion")
        demand(form["grant_type"] == f"{_URN}grant-type:jwt-bearer", "another grant_type")
        signed, _, signature = form["assertion"].rpartition(".")
        try:
            header, claims = (json.loads(_unbase64(part)) for part in signed.split("."))
            issuer = claims["iss"]
            begun, ends = claims["iat"], claims["exp"]
            scopes = claims["scope"].split()
            mark = _unbase64(signature)
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            raise Refused(
                400, "invalid_grant", f"Not a valid JWT: {problem!r}", is_mistake=True
            ) from problem

        key = self.keys.get(issuer)
        if key is None:
            raise Refused(400, "invalid_grant", "Invalid grant: account not found")
        is_plain = header == {"alg": "RS256", "typ": "JWT", "kid": header.get("kid")}
        demand(is_plain, "another header of the JWT")
        if header["kid"] != key.name or not key.verifies(mark, signed.encode()):
            raise Refused(400, "invalid_grant", "Invalid JWT Signature.")
        demand({*claims} == {"iss", "aud", "iat", "exp", "scope"}, f"claims {sorted(claims)}")
        demand(claims["aud"] == f"https://{_OAUTH}/token", "another audience")
        demand(isinstance(begun, int) and isinstance(ends, int), "times that are not whole")
        if not 0 < ends - begun <= _LIFETIME or not begun - _SKEW <= self.wall() < ends:
            text = "Token must be a short-lived token (60 minutes) and in a reasonable timeframe."
            raise Refused(400, "invalid_grant", f"Invalid JWT: {text}")
        demand(scopes and {*scopes} <= {_CLOUD, _IAM}, f"scope {scopes}")
        return self._answer_with_token(issuer, claims["scope"])

    # The security token service (RFC 8693).

    def _exchange(self, request: Request, form: dict[str, str]) -> Response:
        """Answer with a token for a subject token of a pool."""
        fixed = {
            "grant_type": f"{_URN}grant-type:token-exchange",
            "requested_token_type": f"{_URN}token-type:access_token",
            "subject_token_type": f"{_URN}token-type:jwt",
        }
        check_fields(form, " ".join([*fixed, "audience scope subject_token"]), "options")
        demand(fixed.items() <= form.items(), f"not {fixed}")
        demand(form["scope"] in (_CLOUD, _IAM), "another scope")
        if form["audience"] not in (self.provider, self.workforce):
            text = "The target service indicated by the audience is invalid."
            raise Refused(400, "invalid_target", text)

        client = _client_of(request)
        # Users of a workforce have to name a project, except with the login of a client.
        needs_project = form["audience"] == self.workforce and client is None
        project = {"userProject": "project"} if needs_project else None
        options = json.loads(unquote(form.get("options", "null")))
        demand(options == project, f"options {options}")
        if client not in (None, CLIENT):
            raise Refused(401, "invalid_client", "Unauthorized")
        subject = form["subject_token"]
        if subject not in self.subjects:
            text = "The given credential is rejected by the attribute condition."
            raise Refused(400, "invalid_grant", text)
        # As of other services that follow RFC 8693, the lifetime is a text.
        more = {"issued_token_type": fixed["requested_token_type"], "expires_in": str(_LIFETIME)}
        return self._answer_with_token(self.subjects[subject], form["scope"], **more)

    def _oauth_staff(self, request: Request, form: dict[str, str]) -> Response:
        """Answer with a token for the refresh token of a workforce's user."""
        check_fields(form, "grant_type refresh_token")
        demand(form["grant_type"] == "refresh_token", "another grant_type")
        if _client_of(request) != CLIENT:
            raise Refused(401, "invalid_client", "Unauthorized")
        if form["refresh_token"] not in self.staff:
            raise Refused(400, "invalid_grant", "The refresh token is invalid.")
        return self._answer_with_token(self.staff[form["refresh_token"]], _CLOUD)

    # Impersonation.

    def _impersonate(self, request: Request, body: bytes, account: str) -> Response:
        """Answer with a token of an account, if the request's token permits it."""
        scheme, _, value = request.header("authorization").partition(" ")
        token = self._token(value)
        if scheme != "Bearer" or token is None:
            text = "Request had invalid authentication credentials."
            raise Refused(401, "UNAUTHENTICATED", text)

        demand(request.header("content-type") == "application/json", "Content-Type is not JSON's")
        document = json.loads(body)
        life = re.fullmatch(r"([0-9]+)s", str(document.get("lifetime")))
        fields = {*document} - {"delegates"}
        demand(fields == {"scope", "lifetime"} and life, f"a request for {document}")
        demand(document["scope"] == [_CLOUD], "another scope")
        if token.scopes.isdisjoint({_CLOUD, _IAM}):
            text = "Request had insufficient authentication scopes."
            raise Refused(403, "PERMISSION_DENIED", text)
        seconds = int(life[1]) if life else 0
        if seconds > _LIFETIME:
            text = "The access token lifetime cannot exceed 3600s."
            raise Refused(400, "INVALID_ARGUMENT", text)

        delegates = [name.rpartition("/")[2] for name in document.get("delegates") or []]
        chain = [token.principal, *delegates, account]
        if any(step not in self.impersonators for step in itertools.pairwise(chain)):
            text = "Permission 'iam.serviceAccounts.getAccessToken' denied on resource (or it may not exist)."
            raise Refused(403, "PERMISSION_DENIED", text)
        ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.wall() + seconds))
        issued = self._issue(account, _CLOUD, seconds)
        return as_json(200, {"accessToken": issued, "expireTime": ends})

    # The metadata server.

    def _metadata(self, request: Request) -> Response:
        """Answer with what the machine is, or with a token of its account."""
        self._demand_host(request, "http", METADATA)
        self.asked.append("metadata")
        answer = self._answer_machine(request)
        answer.headers.append(("Metadata-Flavor", "Google"))
        return answer

    def _answer_machine(self, request: Request) -> Response:
        is_meant = request.header("metadata-flavor") == "Google" and request.method == "GET"
        demand(is_meant and not request.header("x-forwarded-for"), "without Metadata-Flavor", 403)
        path = request.path.removeprefix("/computeMetadata/v1/")
        text = [("Content-Type", "application/text")]
        if path == "/":
            return Response(200, text, b"computeMetadata/\n")
        if path == "project/project-id":
            return Response(200, text, b"project")
        path = path.removeprefix("instance/service-accounts/default/")
        if path == "" and self.has_account:
            about = {"email": self.machine, "scopes": [_CLOUD], "aliases": ["default"]}
            return as_json(200, about)
        if path != "token" or not self.has_account:
            return Response(404, [("Content-Type", "text/html")], b"not found")
        demand((request.parameter("scopes") or _CLOUD) == _CLOUD, "other scopes")
        return self._answer_with_token(self.machine, _CLOUD)


class GoogleTokens(TokenService):
    """The token service of a Google registry. Its passwords are access tokens (section 5.2)."""

    google: Google | None = None

    def user_of_password(self, user: str, password: str) -> str | None:
        """Return the owner of a valid access token, or None."""
        return None if self.google is None else self.google.principal(user, password)


def _unbase64(text: str) -> bytes:
    """Decode base64url without padding, as in JWTs (RFC 7515 section 2)."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", text):
        raise ValueError("not base64url")
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _client_of(request: Request) -> tuple[str, str] | None:
    """Return id and secret of the client in a request's header, both empty if it is malformed."""
    header = request.header("authorization")
    return (read_basic(header) or ("", "")) if header else None


@dataclass(frozen=True)
class Running:
    """The services while they are served."""

    site: Google
    environ: Mapping[str, str]  # where the metadata server is, for a client

    def check(self) -> None:
        """Raise AssertionError if a client has sent a request that no correct client sends."""
        self.site.journal.check()


@contextlib.contextmanager
def google(names: Names) -> Iterator[Running]:
    """Serve the services by host names over TLS, and the metadata server at a local port."""
    site = Google()
    with (
        run_in_thread(site, ssl_context=names.context(HOSTS)) as server,
        run_in_thread(site) as metadata,
        contextlib.ExitStack() as stack,
    ):
        for host in HOSTS:
            stack.enter_context(names.known(host, server.port))
        yield Running(site, {"GCE_METADATA_HOST": quote(metadata.address, safe=":")})
