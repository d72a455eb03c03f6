"""AWS's login services: STS, ECR's two APIs, SSO, container and machine metadata.

Owns: identities with their keys, tokens, expiry times and permissions; the refusals of each
service.
May not know: sockets, any client, what a registry holds (`Private` and `Public` only check logins).
Invariants: a service accepts only requests exactly as documented. A request that no correct client
sends is refused and recorded in `journal.violations`. Time is an argument.
Follows: docs/protocol-facts.md section 4.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, NamedTuple

from ..messages import Access, Answer, Request, Response, error
from ..registry.tokens import read_basic, read_form
from ..server.exchange import Reception, Site, receive_whole
from .sigv4 import canonical_request, read_claim, signature_of

__all__ = ["ACCOUNT", "Aws", "Identity", "Private", "Public"]

ACCOUNT = "123456789012"
ALL_SERVICES = frozenset({"ecr", "ecr-public", "sts"})
# Domains of the services in all partitions.
_SUFFIXES = (
    r"amazonaws\.com|amazonaws\.com\.cn|amazonaws\.eu|c2s\.ic\.gov|sc2s\.sgov\.gov|cloud\.adc-e\.uk|csp\.hci\.ic\.gov"
    r"|api\.aws|api\.amazonwebservices\.com\.cn|api\.amazonwebservices\.eu|api\.aws\.ic\.gov|api\.aws\.scloud"
    r"|api\.cloud-aws\.adc-e\.uk|api\.aws\.hci\.ic\.gov"
)
# Host names of the services (section 4.2). Tests decide which of them exist.
_HOST = re.compile(
    rf"(?:api\.)?(ecr-public|ecr|sts|portal\.sso|oidc)(?:-fips)?\.([a-z0-9-]+)\.(?:{_SUFFIXES})\Z"
)
_SKEW = 300.0  # maximum difference of a client's clock in seconds
_PASSWORD_LIFE = 43200.0  # seconds for which a password of ECR or a token of ECR Public is valid
_KEYS_LIFE = 3600.0  # seconds for which temporary keys are valid
_JSON_1_1 = "application/x-amz-json-1.1"  # the media type of ECR's requests and answers
_STS = "https://sts.amazonaws.com/doc/2011-06-15/"
_FIELDS_OF_ASSUMING = {
    "Action",
    "Version",
    "RoleArn",
    "RoleSessionName",
    "ExternalId",
    "DurationSeconds",
}
_FIELDS_OF_WEB_IDENTITY = {"Action", "Version", "RoleArn", "RoleSessionName", "WebIdentityToken"}
_TARGETS = {"ecr": "AmazonEC2ContainerRegistry_V20150921", "ecr-public": "SpencerFrontendService"}


@dataclass
class Identity:
    """A user or role session with keys."""

    name: str
    access: str  # the access key
    secret: str  # the secret key
    session: str = ""  # the session token of temporary keys; empty for permanent keys
    expires: float = math.inf  # seconds since 1970
    may: frozenset[str] = ALL_SERVICES  # the services that its policies allow


@dataclass
class Role:
    """A role that identities may assume."""

    arn: str
    trusts: str | None = None  # the only identity that may assume it, by name; None: any identity
    external_id: str | None = None
    may: frozenset[str] = ALL_SERVICES  # the services that its policies allow


@dataclass
class Login:
    """The result of `aws sso login`."""

    access: str  # the access token
    expires: float  # seconds since 1970
    refresh: str = ""  # the refresh token; empty if the login cannot be renewed
    client: tuple[str, str] = ("", "")  # id and secret of the refresh token's client
    roles: set[tuple[str, str]] = field(default_factory=set)  # account and name of each role


class _Refusal(NamedTuple):
    """Why a signature is refused."""

    name: str  # of the exception
    message: str


class Aws(Site):
    """All services of one account. The host name of a request determines the service.

    `now` returns the time in seconds since 1970. `instance_role` is the role of the machine, or
    None if it has no role. `container` has the path of a container's credentials and the token that
    is required there, or None if there are none.
    """

    def __init__(
        self,
        *,
        now: Callable[[], float] = time.time,
        instance_role: str | None = None,
        container: tuple[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.now = now
        self.instance_role = instance_role
        self.container = container
        self.identities: dict[str, Identity] = {}  # by access key
        self.roles: dict[str, Role] = {}  # by ARN
        self.web_tokens: dict[str, str] = {}  # ARNs of roles, by token of an identity provider
        self.logins: dict[str, Login] = {}  # by access token
        # Passwords that were issued. Outer keys: services. Inner keys: passwords. Values: expiry
        # times.
        self.passwords: dict[str, dict[str, float]] = {"ecr": {}, "ecr-public": {}}
        self.requests: list[str] = []  # the service of each request
        # All secrets. Tests search outputs for them.
        self.secrets: set[str] = set()
        # Expiry times, by token of the machine's metadata service.
        self._metadata_tokens: dict[str, float] = {}
        self._numbers = itertools.count(1)  # makes names and secrets unique

    # Set-up by tests.

    def identity(
        self, name: str, *, lasting: bool = True, may: Iterable[str] = ALL_SERVICES
    ) -> Identity:
        """Add an identity with permanent keys, or with temporary keys if not `lasting`."""
        number = next(self._numbers)
        kind = "AKIA" if lasting else "ASIA"
        secret = base64.b64encode(hashlib.sha256(f"secret {number}".encode()).digest())[
            :40
        ].decode()
        identity = Identity(name, f"{kind}{number:016d}", secret, may=frozenset(may))
        if not lasting:
            identity.session = base64.b64encode(f"session {number} {name} ".encode() * 8).decode()
            identity.expires = self.now() + _KEYS_LIFE
        self.identities[identity.access] = identity
        self.secrets |= {identity.secret, identity.session} - {""}
        return identity

    def role(self, name: str, **options: Any) -> Role:
        """Add a role to the account."""
        role = Role(f"arn:aws:iam::{ACCOUNT}:role/{name}", **options)
        self.roles[role.arn] = role
        return role

    def web_token(self, role: Role) -> str:
        """Return a new token of an identity provider, with which a role can be assumed."""
        token = f"eyJhbGciOiJub25lIn0.{next(self._numbers)}.{'signature' * 8}"
        self.web_tokens[token] = role.arn
        self.secrets.add(token)
        return token

    def sso_login(
        self, *roles: tuple[str, str], life: float = 3600.0, renewable: bool = False
    ) -> Login:
        """Add a login as `aws sso login` does. `roles` has account and name of each role."""
        number = next(self._numbers)
        login = Login(f"sso-access-{number}" * 4, self.now() + life, roles=set(roles))
        if renewable:
            login.refresh = f"sso-refresh-{number}" * 4
            login.client = (f"client-{number}", f"sso-client-secret-{number}")
        self.logins[login.access] = login
        _, client_secret = login.client
        self.secrets |= {login.access, login.refresh, client_secret} - {""}
        return login

    @staticmethod
    def owner(password: str) -> str:
        """Return the name of the identity for which a password was issued."""
        return base64.b64decode(password).decode().split()[3]

    def count(self, *services: str) -> int:
        """Count the requests to these services, or all requests."""
        return sum(1 for service in self.requests if not services or service in services)

    # One request.

    def kind_of(self, request: Request) -> str:
        """Return "login": at these services, clients send credentials without a challenge."""
        return "login"

    def _service(self, request: Request) -> str:
        host = re.sub(r":[0-9]+\Z", "", request.header("host").lower())
        match = _HOST.match(host)
        if match:
            return match[1]
        if request.path.startswith("/latest/"):
            return "imds"
        path, _ = self.container or ("", "")
        return "container" if path and request.path == path else "unknown"

    def start(self, request: Request) -> Answer | Reception:
        """Receive the body, which must be short, then answer as the service of the host."""
        request.kind = "login"
        service = self._service(request)
        self.requests.append(service)
        return receive_whole(lambda body: self._answer(service, request, body))

    def _answer(self, service: str, request: Request, body: bytes) -> Response:
        match service:
            case "imds":
                return self._imds(request, body)
            case "container":
                return self._container(request)
            case "portal.sso":
                return self._portal(request)
            case "oidc":
                return self._oidc(request, body)
            case "sts":
                return self._sts(request, body)
            case "ecr" | "ecr-public":
                return self._ecr(service, request, body)
        return self._refuse_mistake(
            request, 404, "UnknownOperationException", "nothing answers here"
        )

    def _refuse_mistake(self, request: Request, status: int, name: str, message: str) -> Response:
        """Refuse a request that no correct client sends, and record the violation."""
        self.journal.violations.append(
            f"{request.method} {request.header('host')}{request.path}: {message}"
        )
        return _json(status, {"__type": f"com.amazonaws#{name}", "message": message})

    # Signatures: SigV4, section 4.4.

    def _signer(self, request: Request, body: bytes) -> Identity | _Refusal:
        """Return the identity that signed a request, or the reason why the signature is refused."""
        claim = read_claim(request.header("authorization"))
        if claim is None:
            return _Refusal("MissingAuthenticationTokenException", "Missing Authentication Token")

        host = _HOST.match(request.header("host"))
        assert host is not None
        service, region = host.groups()
        if (claim.service, claim.region) != (service, region):
            text = f"Credential should be scoped to {region}, service {service}"
            return _Refusal("SignatureDoesNotMatch", text)

        signed = claim.names.split(";")
        required = {
            name
            for name, _ in request.headers
            if name in ("host", "content-type") or name.startswith("x-amz-")
        } | {"host"}
        if signed != sorted(signed) or not required <= set(signed):
            text = f"{sorted(required - set(signed))} must be signed"
            return _Refusal("SignatureDoesNotMatch", text)

        identity = self.identities.get(claim.access)
        if identity is None or request.header("x-amz-security-token") != identity.session:
            text = "The security token included in the request is invalid."
            return _Refusal("UnrecognizedClientException", text)

        date = request.header("x-amz-date")
        canonical = canonical_request(request, body, signed)
        signature = signature_of(identity.secret, claim, date, canonical)
        if not hmac.compare_digest(signature, claim.signature):
            # As at STS, the message contains all signed values. A client that prints the whole
            # message discloses the session token.
            text = f"The Canonical String for this request should have been '{canonical}'"
            return _Refusal("SignatureDoesNotMatch", text)

        try:
            then = datetime.strptime(date, "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
        except ValueError:
            text = "Date must be in ISO-8601 'basic format'"
            return _Refusal("IncompleteSignatureException", text)
        if date[:8] != claim.day or abs(then.timestamp() - self.now()) > _SKEW:
            text = f"Signature expired or not yet current: {date}"
            return _Refusal("SignatureDoesNotMatch", text)
        if identity.expires <= self.now():
            text = "The security token included in the request is expired"
            return _Refusal("ExpiredTokenException", text)
        return identity

    def _new_keys(
        self, name: str, session_field: str, may: frozenset[str] = ALL_SERVICES
    ) -> dict[str, str]:
        """Add an identity with temporary keys. Returns the fields of an answer with these keys.

        `session_field` is the name of the field that has the session token.
        """
        identity = self.identity(name, lasting=False, may=may)
        return {
            "AccessKeyId": identity.access,
            "SecretAccessKey": identity.secret,
            session_field: identity.session,
            "Expiration": _iso(identity.expires),
        }

    # ECR and ECR Public, section 4.3.

    def _ecr(self, service: str, request: Request, body: bytes) -> Response:
        """Answer as the API `service`: "ecr" or "ecr-public"."""
        if request.method != "POST" or request.target != "/":
            return self._refuse_mistake(
                request, 400, "UnknownOperationException", "operations are POST /"
            )
        if request.header("content-type") != _JSON_1_1:
            return self._refuse_mistake(
                request, 400, "UnknownOperationException", "the content type is not JSON 1.1"
            )

        target, _, action = request.header("x-amz-target").partition(".")
        if target != _TARGETS[service] or action != "GetAuthorizationToken":
            return self._refuse_mistake(
                request, 400, "UnknownOperationException", "no such operation"
            )

        signer = self._signer(request, body)
        if isinstance(signer, _Refusal):
            document = {"__type": signer.name, "message": signer.message}
            return self._add_date(_json(400, document))
        if service not in signer.may:
            text = f"User: {signer.name} is not authorized to perform: {service}:{action} on resource: *"
            return _json(400, {"__type": "AccessDeniedException", "message": text})
        if body != b"{}":
            return self._refuse_mistake(
                request, 400, "InvalidParameterException", "registryIds is deprecated"
            )
        return self._answer_with_password(service, request, signer)

    def _answer_with_password(self, service: str, request: Request, signer: Identity) -> Response:
        """Return an answer with a new password for the service's registries."""
        password = base64.b64encode(
            f"password {next(self._numbers)} for {signer.name} ".encode() * 12
        ).decode()
        token = base64.b64encode(f"AWS:{password}".encode()).decode()
        expires = self.now() + _PASSWORD_LIFE
        self.passwords[service][password] = expires
        self.secrets |= {password, token}
        data: Any = {"authorizationToken": token, "expiresAt": expires}
        if service == "ecr":
            host = _HOST.match(request.header("host"))
            assert host is not None
            endpoint = f"https://{ACCOUNT}.dkr.ecr.{host[2]}.amazonaws.com"
            data = [{**data, "proxyEndpoint": endpoint}]

        return _json(200, {"authorizationData": data}, _JSON_1_1)

    def _add_date(self, answer: Response) -> Response:
        """Add the time to an answer, so that a client with a wrong clock can sign again."""
        answer.headers.append(
            ("Date", time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(self.now())))
        )
        return answer

    # STS, section 4.6.

    def _sts(self, request: Request, body: bytes) -> Response:
        """Answer with temporary keys for a role."""
        kind = request.header("content-type").partition(";")[0]
        if (
            request.method != "POST"
            or request.target != "/"
            or kind != "application/x-www-form-urlencoded"
        ):
            return self._refuse_mistake(
                request, 400, "InvalidAction", "actions are forms that are POSTed to /"
            )
        form = read_form(body)
        if form is None:
            return self._refuse_mistake(
                request, 400, "MalformedQueryString", "the form is malformed"
            )

        by_web_identity = form.get("Action") == "AssumeRoleWithWebIdentity"
        fields = _FIELDS_OF_WEB_IDENTITY if by_web_identity else _FIELDS_OF_ASSUMING
        odd = {*form} - fields | {name for name, value in form.items() if not value}
        if odd or form.get("Version") != "2011-06-15":
            self.journal.violations.append(
                f"STS was sent {sorted(odd)}, Version {form.get('Version')}"
            )
            return _refusal(400, "InvalidParameterValue", "unknown parameter or version")
        if not re.fullmatch(r"[\w+=,.@-]{2,64}", form.get("RoleSessionName", "")):
            return _refusal(400, "ValidationError", "RoleSessionName")

        if by_web_identity:
            role = self._role_of_token(request, form)
        elif form["Action"] == "AssumeRole":
            role = self._role_of_signer(request, body, form)
        else:
            return _refusal(400, "InvalidAction", "Could not find operation")

        return role if isinstance(role, Response) else self._answer_with_keys(form["Action"], role)

    def _role_of_token(self, request: Request, form: Mapping[str, str]) -> Role | Response:
        """Return the role for a token of an identity provider, or a refusal."""
        if request.header("authorization"):
            self.journal.violations.append("AssumeRoleWithWebIdentity needs no signature")
        role = self.roles.get(form.get("RoleArn", ""))
        if role is None or self.web_tokens.get(form.get("WebIdentityToken", "")) != role.arn:
            return _refusal(
                400, "InvalidIdentityToken", f"no provider knows {form.get('WebIdentityToken')}"
            )
        return role

    def _role_of_signer(
        self, request: Request, body: bytes, form: Mapping[str, str]
    ) -> Role | Response:
        """Return the role that the signer of a request assumes, or a refusal."""
        signer = self._signer(request, body)
        if isinstance(signer, _Refusal):
            return self._add_date(_refusal(403, *signer))
        role = self.roles.get(form.get("RoleArn", ""))
        if (
            role is None
            or role.trusts not in (None, signer.name)
            or role.external_id != form.get("ExternalId")
            or "sts" not in signer.may
        ):
            text = f"User: {signer.name} is not authorized to perform: sts:AssumeRole on {form.get('RoleArn')}"
            return _refusal(403, "AccessDenied", text)
        return role

    def _answer_with_keys(self, name: str, role: Role) -> Response:
        """Return an answer of STS with temporary keys for a role. `name` is the action."""
        keys = self._new_keys(role.arn, "SessionToken", role.may)
        inner = "".join(f"<{key}>{value}</{key}>" for key, value in keys.items())
        user = f"<AssumedRoleUser><AssumedRoleId>AROA:x</AssumedRoleId><Arn>{role.arn}</Arn></AssumedRoleUser>"
        return _xml(
            200,
            f'<{name}Response xmlns="{_STS}">\n  <{name}Result>\n    {user}\n    <Credentials>{inner}</Credentials>\n'
            f"  </{name}Result>\n  <ResponseMetadata><RequestId>1</RequestId></ResponseMetadata>\n</{name}Response>\n",
        )

    # SSO, section 4.6: temporary keys for a login, and the renewal of a login.

    def _portal(self, request: Request) -> Response:
        """Answer with temporary keys for a role of a login."""
        if (
            request.method != "GET"
            or request.path != "/federation/credentials"
            or request.header("authorization")
        ):
            return self._refuse_mistake(
                request, 400, "InvalidRequestException", "GET /federation/credentials, unsigned"
            )

        login = self.logins.get(request.header("x-amz-sso_bearer_token"))
        if login is None or login.expires <= self.now():
            return _json(
                401,
                {
                    "__type": "UnauthorizedException",
                    "message": "Session token not found or invalid",
                },
            )

        account = request.parameter("account_id") or ""
        role = request.parameter("role_name") or ""
        if len(request.query) != 2 or (account, role) not in login.roles:
            return _json(403, {"__type": "ForbiddenException", "message": "No access"})

        identity = self.identity(f"sso:{role}", lasting=False)
        keys = {
            "accessKeyId": identity.access,
            "secretAccessKey": identity.secret,
            "sessionToken": identity.session,
        }
        return _json(200, {"roleCredentials": {**keys, "expiration": int(identity.expires * 1000)}})

    def _oidc(self, request: Request, body: bytes) -> Response:
        """Answer with the access token of a new login for a refresh token, which stays valid."""
        if request.method != "POST" or request.path != "/token" or request.header("authorization"):
            return self._refuse_mistake(request, 400, "invalid_request", "POST /token, unsigned")

        form = json.loads(body)
        if {*form} != {"clientId", "clientSecret", "grantType", "refreshToken"}:
            return self._refuse_mistake(
                request, 400, "invalid_request", f"odd parameters {sorted(form)}"
            )

        by_refresh = {login.refresh: login for login in self.logins.values() if login.refresh}
        login = by_refresh.get(form["refreshToken"])
        if (
            login is None
            or login.client != (form["clientId"], form["clientSecret"])
            or form["grantType"] != "refresh_token"
        ):
            return _json(
                400,
                {"error": "invalid_grant", "error_description": "Invalid refresh token provided"},
            )

        renewed = self.sso_login(*login.roles, renewable=False)
        return _json(
            200, {"accessToken": renewed.access, "expiresIn": 3600, "refreshToken": login.refresh}
        )

    # Metadata, section 4.6.

    def _container(self, request: Request) -> Response:
        """Answer with temporary keys of the container's role."""
        assert self.container is not None
        _, token = self.container
        if request.method != "GET" or request.header("accept") != "application/json":
            return self._refuse_mistake(request, 400, "BadRequest", "GET, application/json")
        if request.header("authorization") != token:
            return _json(401, {"code": "401", "message": "Authorization token is invalid"})
        return _json(200, {**self._new_keys("container", "Token"), "AccountId": ACCOUNT})

    def _imds_token(self, request: Request, body: bytes) -> Response:
        """Issue a token, which all other requests to the machine's metadata service need."""
        if request.method != "PUT":
            return self._refuse_mistake(request, 405, "MethodNotAllowed", "only PUT")
        life = request.header("x-aws-ec2-metadata-token-ttl-seconds")
        if body or not life.isdecimal() or not 1 <= int(life) <= 21600:
            return self._refuse_mistake(request, 400, "BadRequest", "a body, or no valid seconds")
        token = f"imds-token-{next(self._numbers)}=="
        self._metadata_tokens[token] = self.now() + int(life)
        self.secrets.add(token)
        return Response(200, [("Content-Type", "text/plain")], token.encode())

    def _imds(self, request: Request, body: bytes) -> Response:
        """Answer with the machine's role or its temporary keys."""
        if request.header("x-forwarded-for"):
            return self._refuse_mistake(request, 403, "Forbidden", "through a proxy")
        if request.path == "/latest/api/token":
            return self._imds_token(request, body)
        if self._metadata_tokens.get(request.header("x-aws-ec2-metadata-token"), 0.0) <= self.now():
            return Response(401)

        roles = "/latest/meta-data/iam/security-credentials/"
        if request.method != "GET" or not request.path.startswith(roles):
            return self._refuse_mistake(request, 404, "NotFound", f"only GET {roles}")
        if self.instance_role is None:
            return Response(404)
        if request.path == roles:
            return Response(200, [("Content-Type", "text/plain")], self.instance_role.encode())
        if request.path != roles + self.instance_role:
            return self._refuse_mistake(request, 404, "NotFound", "the machine has another role")

        keys = self._new_keys(f"instance:{self.instance_role}", "Token")
        about = {"Code": "Success", "LastUpdated": _iso(self.now()), "Type": "AWS-HMAC"}
        return _json(200, {**about, **keys}, "text/plain")


class Private:
    """Logins at an ECR registry: Basic with a password of its API (sections 4.3 and 4.7)."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def answer(self, request: Request) -> Answer | Reception | None:
        """Return None: there are no paths of a service."""
        return None

    def check(self, request: Request, needs: Sequence[Access]) -> Response | None:
        """Refuse a request without a valid password."""
        if _has_password(self._aws, "ecr", request.header("authorization")):
            return None
        host = request.header("host")
        challenge = (
            "WWW-Authenticate",
            f'Basic realm="https://{host}/",service="ecr.amazonaws.com"',
        )
        return Response(
            401, [challenge, ("Content-Type", "text/plain; charset=utf-8")], b"Not Authorized\n"
        )


class _PublicToken(NamedTuple):
    """A token of ECR Public."""

    has_login: bool  # False: issued to an anonymous client
    expires: float  # seconds since 1970


class Public:
    """Logins at ECR Public: Bearer (section 4.3).

    Tokens are issued for a password of its API, or without a login. Tokens without a login allow
    pulls only.
    """

    def __init__(self, aws: Aws) -> None:
        self._aws = aws
        self._tokens: dict[str, _PublicToken] = {}  # by text of the token
        self.issued: list[bool] = []  # for each token, whether it was issued for a login

    def answer(self, request: Request) -> Answer | Reception | None:
        """Answer the path of the token service, which supports one scope."""
        if request.path != "/token/":
            return None
        request.kind = "token"
        login = request.header("authorization")
        if request.method != "GET" or request.parameter("service") != "public.ecr.aws":
            return error(400, "UNSUPPORTED", "GET with the challenge's service")
        if request.parameter("scope") != "aws":
            return error(400, "UNSUPPORTED", f"scope {request.parameter('scope')}")
        if login and not _has_password(self._aws, "ecr-public", login):
            return error(401, "UNAUTHORIZED", "Not Authorized")
        token = f"public-token-{len(self.issued)}"
        self.issued.append(bool(login))
        self._tokens[token] = _PublicToken(bool(login), self._aws.now() + _PASSWORD_LIFE)
        return _json(200, {"token": token})

    def check(self, request: Request, needs: Sequence[Access]) -> Response | None:
        """Refuse a request without a valid token, and a push with a token without a login."""
        token = self._tokens.get(request.header("authorization").removeprefix("Bearer "))
        if token is None or token.expires <= self._aws.now():
            realm = f"{request.origin}/token/"
            challenge = f'Bearer realm="{realm}",service="public.ecr.aws",scope="aws"'
            return error(401, "DENIED", "Not Authorized", headers=[("WWW-Authenticate", challenge)])
        if token.has_login or all(need.action == "pull" for need in needs):
            return None
        return error(403, "DENIED", "Not Authorized")


def _has_password(aws: Aws, service: str, header: str) -> bool:
    """Report whether a Basic credential has a valid password of a service."""
    login = read_basic(header)
    if login is None or login.user != "AWS":
        return False
    return aws.passwords[service].get(login.password, 0.0) > aws.now()


def _iso(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


def _json(status: int, document: object, kind: str = "application/json") -> Response:
    return Response(status, [("Content-Type", kind)], json.dumps(document).encode())


def _xml(status: int, text: str) -> Response:
    return Response(status, [("Content-Type", "text/xml")], text.encode())


def _refusal(status: int, code: str, message: str) -> Response:
    inner = f"<Type>Sender</Type><Code>{code}</Code><Message>{message}</Message>"
    return _xml(
        status,
        f'<ErrorResponse xmlns="{_STS}"><Error>{inner}</Error><RequestId>1</RequestId></ErrorResponse>',
    )
