"""Google's login services, which issue access tokens.

Owns: the token endpoint, the security token service, impersonation and the metadata server; their
accounts, keys and pools; the credential files of these accounts.
May not know: registries, sockets, any client.
Invariants: a token is issued only for the credential of an identity. The signature of a JWT is
verified with the account's public key, and all its claims are checked. A request that no correct
client sends is refused *and* recorded in `journal.violations`. Time is an argument.
Follows: docs/protocol-facts.md sections 5.2 to 5.4, RFC 7515 to 7523 and RFC 8693.

One Site answers under all host names. Each path belongs to one service, which refuses other host
names.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import hmac
import itertools
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote, unquote

from ..messages import Answer, Request, Response
from ..programs import find_program
from ..registry.tokens import TokenService, read_basic, read_form
from ..server.exchange import Reception, Site, receive_whole
from ..server.names import Names
from ..server.sockets import run_in_thread

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

# Scopes.
_CLOUD = "https://www.googleapis.com/auth/cloud-platform"
_IAM = "https://www.googleapis.com/auth/iam"
_FORM = "application/x-www-form-urlencoded"
_SKEW = 300.0  # maximum difference of a client's clock in seconds
_LONGEST = 3600  # maximum lifetime of a token in seconds
_URN = "urn:ietf:params:oauth:"
_LOCAL = re.compile(r"(?:localhost|127\.0\.0\.1)(?::[0-9]+)?\Z")
_IMPERSONATE = re.compile(r"/v1/projects/-/serviceAccounts/([^/:]+):generateAccessToken\Z")
_SERIAL = itertools.count(1)  # numbers of the Google objects of this process

Service: TypeAlias = "Callable[[Request, bytes], Response]"


class Client(NamedTuple):
    """The program with which users log in. It sends its secret by Basic or in a form."""

    id: str
    secret: str


CLIENT = Client("32555940559.apps.googleusercontent.example", "a-client-secret-of-tests")


class Key(NamedTuple):
    """An RSA key: the private key in PEM, its name, and the public key."""

    pem: str
    name: str
    modulus: int
    exponent: int

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Report whether an RSASSA-PKCS1-v1_5 signature is valid (RFC 8017 section 8.2.2)."""
        size = (self.modulus.bit_length() + 7) // 8
        if len(signature) != size:
            return False
        digest = (
            bytes.fromhex("3031300d060960864801650304020105000420")
            + hashlib.sha256(message).digest()
        )
        expected = b"\0\1" + b"\xff" * (size - len(digest) - 3) + b"\0" + digest
        opened = pow(int.from_bytes(signature, "big"), self.exponent, self.modulus)
        return hmac.compare_digest(opened.to_bytes(size, "big"), expected)


@functools.cache
def make_key(number: int = 0) -> Key:
    """Make an RSA key with the program `openssl`.

    Within a process, a number always has the same key.
    """
    program = find_program("openssl", "openssl")

    def run(*arguments: str, text: str = "") -> str:
        completed = subprocess.run(
            [program, *arguments], input=text, capture_output=True, text=True, check=False
        )
        if completed.returncode:
            raise RuntimeError(f"openssl {arguments[0]} failed:\n{completed.stderr}")
        return completed.stdout

    pem = run("genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048")
    modulus = int(run("rsa", "-noout", "-modulus", text=pem).partition("=")[2], 16)
    return Key(pem, f"{number:08d}{hashlib.sha256(pem.encode()).hexdigest()[:32]}", modulus, 65537)


@dataclass
class _Token:
    """An access token."""

    principal: str  # the account or user
    scopes: frozenset[str]
    expires: float  # in seconds of the clock `Google.now`


@dataclass(eq=False)
class Google(Site):
    """All services."""

    now: Callable[[], float] = time.monotonic  # the clock for the validity of tokens
    wall: Callable[[], float] = time.time  # the clock for the claims of JWTs
    lifetime: int = 3600  # of access tokens, in seconds
    has_account: bool = True  # whether the machine has a service account
    issued: list[str] = field(default_factory=list, init=False)  # access tokens, in order
    # The service of each request, in order.
    asked: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        super().__init__()
        # Service accounts: one with a key, one that others may impersonate, and that of the
        # machine.
        self.robot = "robot@project.iam.gserviceaccount.com"
        self.target = "target@project.iam.gserviceaccount.com"
        self.machine = "machine@project.iam.gserviceaccount.com"
        self.provider = "//iam.googleapis.com/projects/123/locations/global/workloadIdentityPools/pool/providers/mine"
        self.workforce = (
            "//iam.googleapis.com/locations/global/workforcePools/people/providers/mine"
        )
        self.keys: dict[str, Key] = {self.robot: make_key()}
        serial = next(_SERIAL)
        # Owners, by refresh token of users and of a workforce, and by subject token of a pool.
        self.users = {f"1//refresh-{serial}-secret": "user@example.com"}
        self.staff = {f"workforce-refresh-{serial}-secret": "staff@example.com"}
        self.subjects = {f"subject.{serial}.token-secret": "workload"}
        # Pairs of an account and a service account that it may impersonate.
        self.impersonators = {
            (who, self.target)
            for who in (self.robot, "user@example.com", "workload", "staff@example.com")
        }
        self._serial = serial  # part of each secret, so that those of two objects differ
        self._tokens: dict[str, _Token] = {}  # by text of the token

    # Requests of registries.

    def principal(self, username: str, password: str) -> str | None:
        """Return the owner of an access token that is used as a password, or None.

        Section 5.2 has the user names.
        """
        token = self._tokens.get(password)
        if (
            username not in ("oauth2accesstoken", "_token")
            or token is None
            or token.expires <= self.now()
        ):
            return None
        return token.principal if _CLOUD in token.scopes else None

    def revoke(self) -> None:
        """Make all tokens issued so far invalid."""
        self._tokens.clear()

    @property
    def secrets(self) -> list[str]:
        """All secrets: tokens, lines of keys, credentials. Tests search outputs for them."""
        lines = [
            line for key in self.keys.values() for line in key.pem.splitlines() if len(line) > 40
        ]
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
            "client_id": "1234567890",
            "token_uri": "https://oauth2.googleapis.com/token",
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
            "token_url": "https://sts.googleapis.com/v1/token",
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
            "token_url": "https://sts.googleapis.com/v1/oauthtoken",
            **fields,
        }

    @property
    def impersonation_url(self) -> str:
        host = "https://iamcredentials.googleapis.com"
        return f"{host}/v1/projects/-/serviceAccounts/{self.target}:generateAccessToken"

    def impersonated(self, source: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        return {
            "type": "impersonated_service_account",
            "service_account_impersonation_url": self.impersonation_url,
            "delegates": [],
            "source_credentials": dict(source),
            **fields,
        }

    # One request.

    def kind_of(self, request: Request) -> str:
        return "login"

    def start(self, request: Request) -> Answer | Reception:
        """Answer as the service of the request's path."""
        request.kind = "login"
        if request.path.startswith("/computeMetadata/") or request.path == "/":
            return self._metadata(request)

        services: dict[str, tuple[str, Service]] = {
            "/token": (_OAUTH, self._oauth),
            "/v1/token": (_STS, self._exchange),
            "/v1/oauthtoken": (_STS, self._staff),
        }
        found = services.get(request.path)
        if found is None and _IMPERSONATE.match(request.path):
            found = (_IAM_CREDENTIALS, self._impersonate)
        if found is None:
            return self._refuse_mistake(request, 404, "not_found", "no such path")

        host, service = found
        named_host = request.header("host")
        if (named_host != host or request.scheme != "https") and not _LOCAL.match(named_host):
            return self._refuse_mistake(
                request, 404, "not_found", f"{request.scheme}://{named_host} is another service's"
            )
        if request.method != "POST" or request.query:
            return self._refuse_mistake(
                request, 405, "invalid_request", "a POST without a query is wanted"
            )

        self.asked.append(host.partition(".")[0])
        return receive_whole(lambda body: service(request, body))

    def _refuse_mistake(self, request: Request, status: int, code: str, text: str) -> Response:
        """Refuse a request that no correct client sends, and record the violation."""
        self.journal.violations.append(f"{request.method} {request.path}: {text}")
        return _refusal(status, code, text)

    def _issue(self, principal: str, scopes: str, life: float) -> str:
        token = f"ya29.{self._serial}-{len(self.issued)}-access-secret"
        self.issued.append(token)
        self._tokens[token] = _Token(principal, frozenset(scopes.split()), self.now() + life)
        return token

    def _answer_with_token(self, principal: str, scopes: str, **more: object) -> Response:
        token = self._issue(principal, scopes, self.lifetime)
        return _json(
            200,
            {"access_token": token, "expires_in": self.lifetime, "token_type": "Bearer", **more},
        )

    def _read_form(
        self, request: Request, body: bytes, required: str, optional: str = ""
    ) -> dict[str, str] | Response:
        """Parse a form. Refuse it unless it has each required field once, and no unknown field."""
        if request.header("content-type") != _FORM:
            return self._refuse_mistake(
                request, 400, "invalid_request", "Content-Type is not a form's"
            )
        form = read_form(body)
        if form is None:
            return self._refuse_mistake(request, 400, "invalid_request", "the form is malformed")
        lacking = {*required.split()} - {*form}
        strange = {*form} - {*required.split(), *optional.split()}
        if lacking or strange or not all(form.values()):
            return self._refuse_mistake(
                request, 400, "invalid_request", f"the form lacks {lacking}, has {strange} besides"
            )
        return form

    # The token endpoint: service accounts (RFC 7523) and users (RFC 6749 section 6).

    def _oauth(self, request: Request, body: bytes) -> Response:
        if request.header("authorization"):
            return self._refuse_mistake(request, 400, "invalid_request", "an Authorization header")
        if b"assertion=" in body:
            return self._oauth_account(request, body)
        return self._oauth_user(request, body)

    def _oauth_user(self, request: Request, body: bytes) -> Response:
        """Answer with a token for a user's refresh token."""
        form = self._read_form(
            request, body, "grant_type client_id client_secret refresh_token", "scope"
        )
        if isinstance(form, Response):
            return form
        if form["grant_type"] != "refresh_token":
            return self._refuse_mistake(
                request, 400, "unsupported_grant_type", "Invalid grant_type"
            )
        if (form["client_id"], form["client_secret"]) != CLIENT:
            return _refusal(401, "invalid_client", "Unauthorized")
        if form["refresh_token"] not in self.users:
            return _refusal(400, "invalid_grant", "Token has been expired or revoked.")
        return self._answer_with_token(self.users[form["refresh_token"]], _CLOUD)

    def _oauth_account(self, request: Request, body: bytes) -> Response:
        """Answer with a token for a JWT that a service account has signed."""
        form = self._read_form(request, body, "grant_type assertion")
        if isinstance(form, Response):
            return form
        if form["grant_type"] != f"{_URN}grant-type:jwt-bearer":
            return self._refuse_mistake(
                request, 400, "unsupported_grant_type", "Invalid grant_type"
            )

        return self._check_jwt(request, form["assertion"])

    def _check_jwt(self, request: Request, assertion: str) -> Response:
        """Answer with a token for a valid JWT of a service account."""
        try:
            first, second, third = assertion.split(".")
            header = json.loads(_unbase64(first))
            claims = json.loads(_unbase64(second))
            signature = _unbase64(third)
            issuer = claims["iss"]
            audience = claims["aud"]
            begun = claims["iat"]
            ends = claims["exp"]
            scopes = claims["scope"].split()
        except (ValueError, KeyError, AttributeError) as problem:
            return self._refuse_mistake(
                request, 400, "invalid_grant", f"Not a valid JWT: {problem!r}"
            )

        key = self.keys.get(issuer)
        if key is None:
            return _refusal(400, "invalid_grant", "Invalid grant: account not found")
        if header != {"alg": "RS256", "typ": "JWT", "kid": header.get("kid")}:
            return self._refuse_mistake(request, 400, "invalid_grant", f"header {header}")
        if header["kid"] != key.name or not key.verifies(signature, f"{first}.{second}".encode()):
            return _refusal(400, "invalid_grant", "Invalid JWT Signature.")

        names = {"iss", "aud", "iat", "exp", "scope"}
        if audience != "https://oauth2.googleapis.com/token" or {*claims} != names:
            return self._refuse_mistake(request, 400, "invalid_grant", f"claims {claims}")

        now = self.wall()
        are_whole = isinstance(begun, int) and isinstance(ends, int)
        if not are_whole or not 0 < ends - begun <= _LONGEST or not begun - _SKEW <= now < ends:
            text = "Invalid JWT: Token must be a short-lived token (60 minutes) and in a reasonable timeframe."
            return _refusal(400, "invalid_grant", text)
        if not scopes or not {*scopes} <= {_CLOUD, _IAM}:
            return self._refuse_mistake(request, 400, "invalid_scope", f"scope {scopes}")
        return self._answer_with_token(issuer, " ".join(scopes))

    # The security token service (RFC 8693).

    def _exchange(self, request: Request, body: bytes) -> Response:
        """Answer with a token for a subject token of a pool."""
        required = "grant_type audience scope requested_token_type subject_token subject_token_type"
        form = self._read_form(request, body, required, "options")
        if isinstance(form, Response):
            return form

        fixed = {
            "grant_type": f"{_URN}grant-type:token-exchange",
            "requested_token_type": f"{_URN}token-type:access_token",
            "subject_token_type": f"{_URN}token-type:jwt",
        }
        sent = {name: form[name] for name in fixed}
        if sent != fixed or form["scope"] not in (_CLOUD, _IAM):
            return self._refuse_mistake(request, 400, "invalid_request", str(sent))
        if form["audience"] not in (self.provider, self.workforce):
            return _refusal(
                400, "invalid_target", "The target service indicated by the audience is invalid."
            )

        options = json.loads(unquote(form["options"])) if "options" in form else None
        client = _client_of(request)
        # Users of a workforce have to name a project, except with the login of a client.
        needs_project = form["audience"] == self.workforce and client is None
        names_project = options == {"userProject": "project"}
        if names_project != needs_project:
            return self._refuse_mistake(request, 400, "invalid_request", f"options {options}")
        if client not in (None, CLIENT):
            return _refusal(401, "invalid_client", "Unauthorized")
        if form["subject_token"] not in self.subjects:
            return _refusal(
                400, "invalid_grant", "The given credential is rejected by the attribute condition."
            )

        issued = {
            "issued_token_type": fixed["requested_token_type"],
            "expires_in": str(self.lifetime),
        }
        return self._answer_with_token(
            self.subjects[form["subject_token"]], form["scope"], **issued
        )

    def _staff(self, request: Request, body: bytes) -> Response:
        """Answer with a token for the refresh token of a workforce's user."""
        form = self._read_form(request, body, "grant_type refresh_token")
        if isinstance(form, Response):
            return form
        if form["grant_type"] != "refresh_token":
            return self._refuse_mistake(
                request, 400, "unsupported_grant_type", "Invalid grant_type"
            )
        if _client_of(request) != CLIENT:
            return _refusal(401, "invalid_client", "Unauthorized")
        if form["refresh_token"] not in self.staff:
            return _refusal(400, "invalid_grant", "The refresh token is invalid.")
        return self._answer_with_token(self.staff[form["refresh_token"]], _CLOUD)

    # Impersonation.

    def _impersonate(self, request: Request, body: bytes) -> Response:
        """Answer with a token of the account in the path, if the request's token permits it."""
        match = _IMPERSONATE.match(request.path)
        assert match is not None
        scheme, _, value = request.header("authorization").partition(" ")
        token = self._tokens.get(value)
        if scheme != "Bearer" or token is None or token.expires <= self.now():
            return _api_refusal(
                401, "UNAUTHENTICATED", "Request had invalid authentication credentials."
            )

        document = json.loads(body) if request.header("content-type") == "application/json" else {}
        life = re.fullmatch(r"([0-9]+)s", str(document.get("lifetime")))
        if (
            {*document} - {"delegates"} != {"scope", "lifetime"}
            or document["scope"] != [_CLOUD]
            or life is None
        ):
            return self._refuse_mistake(
                request, 400, "INVALID_ARGUMENT", f"a request for {document}"
            )
        if not token.scopes & {_CLOUD, _IAM}:
            return _api_refusal(
                403, "PERMISSION_DENIED", "Request had insufficient authentication scopes."
            )
        if int(life[1]) > _LONGEST:
            return _api_refusal(
                400, "INVALID_ARGUMENT", "The access token lifetime cannot exceed 3600s."
            )

        chain = [
            token.principal,
            *(name.rpartition("/")[2] for name in document.get("delegates") or []),
            match[1],
        ]
        if any(step not in self.impersonators for step in itertools.pairwise(chain)):
            text = "Permission 'iam.serviceAccounts.getAccessToken' denied on resource (or it may not exist)."
            return _api_refusal(403, "PERMISSION_DENIED", text)

        ends = time.gmtime(self.wall() + int(life[1]))
        issued = self._issue(match[1], _CLOUD, float(life[1]))
        return _json(
            200, {"accessToken": issued, "expireTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", ends)}
        )

    # The metadata server.

    def _metadata(self, request: Request) -> Response:
        host = request.header("host")
        if (host not in METADATA or request.scheme != "http") and not _LOCAL.match(host):
            return self._refuse_mistake(
                request, 404, "not_found", f"{request.scheme}://{host} has no metadata"
            )

        self.asked.append("metadata")
        own = [("Metadata-Flavor", "Google"), ("Server", "Metadata Server for VM")]
        if request.header("metadata-flavor") != "Google" or request.header("x-forwarded-for"):
            self.journal.violations.append(
                f"{request.method} {request.path}: without Metadata-Flavor"
            )
            return Response(403, own, b"Missing required header: Metadata-Flavor")

        text = ("Content-Type", "application/text")
        if request.path == "/":
            return Response(200, [*own, text], b"computeMetadata/\n")
        path = request.path.removeprefix("/computeMetadata/v1/")
        if path == "project/project-id":
            return Response(200, [*own, text], b"project")
        if path == "instance/service-accounts/default/" and self.has_account:
            about = _json(200, {"email": self.machine, "scopes": [_CLOUD], "aliases": ["default"]})
            about.headers += own
            return about
        if path != "instance/service-accounts/default/token" or not self.has_account:
            return Response(404, [*own, ("Content-Type", "text/html")], b"not found")
        if request.method != "GET" or (request.parameter("scopes") or _CLOUD) != _CLOUD:
            return self._refuse_mistake(
                request, 400, "invalid_request", f"{request.method} {request.query}"
            )

        answer = self._answer_with_token(self.machine, _CLOUD)
        answer.headers += own
        return answer


class GoogleTokens(TokenService):
    """The token service of a Google registry. Its passwords are access tokens (section 5.2)."""

    google: Google | None = None

    def user_of_password(self, user: str, password: str) -> str | None:
        """Return the owner of a valid access token, or None."""
        return None if self.google is None else self.google.principal(user, password)


def _json(status: int, document: object) -> Response:
    return Response(
        status, [("Content-Type", "application/json; charset=utf-8")], json.dumps(document).encode()
    )


def _refusal(status: int, code: str, text: str) -> Response:
    """Return an error in the form of OAuth services."""
    return _json(status, {"error": code, "error_description": text})


def _api_refusal(status: int, code: str, text: str) -> Response:
    """Return an error in the form of Google's APIs."""
    return _json(status, {"error": {"code": status, "message": text, "status": code}})


def _unbase64(text: str) -> bytes:
    """Decode base64url without padding, as in JWTs (RFC 7515 section 2)."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", text):
        raise ValueError(f"not base64url: {text[:20]}")
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _client_of(request: Request) -> tuple[str, str] | None:
    """Return id and secret of the client in a request's header, both empty if it is malformed."""
    header = request.header("authorization")
    return (read_basic(header) or ("", "")) if header else None


@dataclass(frozen=True)
class Running:
    """The services while they are served."""

    site: Google
    url: str
    metadata: str

    @property
    def environ(self) -> Mapping[str, str]:
        return {"GCE_METADATA_HOST": self.metadata}

    def check(self) -> None:
        """Raise AssertionError if a client has sent a request that no correct client sends."""
        self.site.journal.check()


@contextlib.contextmanager
def google(names: Names, **options: Any) -> Iterator[Running]:
    """Serve the services by host names over TLS, and the metadata server at a local port."""
    site = Google(**options)
    with (
        run_in_thread(site, ssl_context=names.context(HOSTS)) as server,
        run_in_thread(site) as metadata,
        contextlib.ExitStack() as stack,
    ):
        for host in HOSTS:
            stack.enter_context(names.known(host, server.port))
        yield Running(site, server.url, quote(metadata.address, safe=":"))
