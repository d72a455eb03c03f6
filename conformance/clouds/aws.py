"""AWS's login services: STS, ECR's two APIs, SSO, container and machine metadata.

Owns: identities with their keys, tokens, expiry times and permissions; signatures; the refusals of
each service.
May not know: sockets, any client, what a registry holds (`Private` and `Public` only check logins).
Invariants: a service accepts only requests exactly as documented. Time is an argument.
Follows: docs/protocol-facts.md section 4.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import NamedTuple

from ..http import Reception
from ..messages import Access, Answer, Request, Response, error
from ..tokens import read_basic
from .services import Refused, Services, as_json, check_fields, demand, form_of

__all__ = ["ACCOUNT", "Aws", "Identity", "Login", "Private", "Public", "Role"]

ACCOUNT = "123456789012"
ALL_SERVICES = frozenset({"ecr", "ecr-public", "sts"})

_SKEW = 300.0  # maximum difference of a client's clock in seconds
_PASSWORD_LIFE = 43200.0  # seconds for which a password of ECR or a token of ECR Public is valid
_KEYS_LIFE = 3600.0  # seconds for which temporary keys are valid

# Service and region in the name of a host (section 4.2). Tests decide which hosts exist.
_HOST = re.compile(
    r"(?:api\.)?(ecr-public|ecr|sts|portal\.sso)(?:-fips)?\.([a-z]+(?:-[a-z0-9]+)+)\."
)
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/, ]+)/([0-9]{8})/([a-z0-9-]+)/([a-z-]+)/aws4_request, "
    r"SignedHeaders=([a-z0-9;-]+), Signature=([0-9a-f]{64})\Z"
)
_JSON_1_1 = "application/x-amz-json-1.1"  # the media type of ECR's requests and answers
_PASSWORD_ACTIONS = {
    "ecr": "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken",
    "ecr-public": "SpencerFrontendService.GetAuthorizationToken",
}
_STS = "https://sts.amazonaws.com/doc/2011-06-15/"
# Required and optional fields of STS's actions, besides those of all.
_STS_ACTIONS = {
    "AssumeRole": ("", "ExternalId DurationSeconds"),
    "AssumeRoleWithWebIdentity": ("WebIdentityToken", ""),
}
_MACHINE_ROLES = "/latest/meta-data/iam/security-credentials/"


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


@dataclass
class Login:
    """The result of `aws sso login`."""

    access: str  # the access token
    expires: float  # seconds since 1970
    refresh: str = ""  # the refresh token; empty if the login cannot be renewed
    client: tuple[str, str] = ("", "")  # id and secret of the refresh token's client
    roles: set[tuple[str, str]] = field(default_factory=set)  # account and name of each role


class Aws(Services):
    """All services of one account. The host name of a request determines the service.

    `now` returns the time in seconds since 1970. `instance_role` is the role of the machine, or
    None if it has no role.
    """

    def __init__(
        self, *, now: Callable[[], float] = time.time, instance_role: str | None = None
    ) -> None:
        super().__init__()
        self.now = now
        self.instance_role = instance_role
        # The path of a container's credentials, and the token that is required there.
        self.container = ("", "")
        self.identities: dict[str, Identity] = {}  # by access key
        self.roles: dict[str, Role] = {}  # by ARN
        self.web_tokens: dict[str, str] = {}  # ARNs of roles, by token of an identity provider
        self.logins: dict[str, Login] = {}  # by access token
        # Expiry times of the passwords that were issued. Outer keys: services. Inner keys:
        # passwords.
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
        secret = base64.b64encode(hashlib.sha256(f"secret {number}".encode()).digest()).decode()
        identity = Identity(name, f"{kind}{number:016d}", secret[:40], may=frozenset(may))
        if not lasting:
            identity.session = base64.b64encode(f"session {number} {name} ".encode() * 8).decode()
            identity.expires = self.now() + _KEYS_LIFE
        self.identities[identity.access] = identity
        self.secrets |= {identity.secret, identity.session} - {""}
        return identity

    def role(self, name: str, *, trusts: str | None = None, external_id: str | None = None) -> Role:
        """Add a role to the account."""
        role = Role(f"arn:aws:iam::{ACCOUNT}:role/{name}", trusts, external_id)
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
        self.secrets |= {login.access, login.refresh, login.client[1]} - {""}
        return login

    @staticmethod
    def owner(password: str) -> str:
        """Return the name of the identity for which a password was issued."""
        return base64.b64decode(password).decode().split()[3]

    def count(self, *services: str) -> int:
        """Count the requests to these services."""
        return sum(service in services for service in self.requests)

    # One request.

    def _service(self, request: Request) -> str:
        match = _HOST.match(request.header("host"))
        if match:
            return match[1]
        if request.path.startswith("/latest/"):
            return "imds"
        return "container" if request.path == self.container[0] else "unknown"

    def answer(self, request: Request, body: bytes) -> Response:
        """Answer as the service of the host."""
        service = self._service(request)
        self.requests.append(service)
        match service:
            case "ecr" | "ecr-public":
                return self._ecr(service, request, body)
            case "sts":
                return self._sts(request, body)
            case "portal.sso":
                return self._portal(request)
            case "container":
                return self._container(request)
            case "imds":
                return self._imds(request, body)
        raise Refused(404, "UnknownOperationException", "nothing answers here", is_mistake=True)

    def refusal(self, request: Request, refused: Refused) -> Response:
        """Return a refusal in XML at STS, else in JSON."""
        code, text = refused.code, refused.text
        if self._service(request) != "sts":
            return as_json(refused.status, {"__type": code, "message": text})
        inner = f"<Type>Sender</Type><Code>{code}</Code><Message>{text}</Message>"
        body = f'<ErrorResponse xmlns="{_STS}"><Error>{inner}</Error></ErrorResponse>'
        return Response(refused.status, [("Content-Type", "text/xml")], body.encode())

    # Signatures: SigV4, section 4.4.

    def _signer(self, request: Request, body: bytes) -> Identity:
        """Return the identity that signed a request. Raises Refused if the signature is wrong."""

        def refused(code: str, text: str) -> Refused:
            return Refused(403 if service == "sts" else 400, code, text)

        host = _HOST.match(request.header("host"))
        assert host is not None
        service, region = host.groups()
        claim = _AUTHORIZATION.match(request.header("authorization"))
        if claim is None:
            code = "MissingAuthenticationTokenException"
            raise refused(code, "Missing Authentication Token")

        access, day, claimed_region, claimed_service, names, signature = claim.groups()
        if (claimed_service, claimed_region) != (service, region):
            text = f"Credential should be scoped to {region}, service {service}"
            raise refused("SignatureDoesNotMatch", text)

        signed = names.split(";")
        sent = {name for name, _ in request.headers}
        required = {name for name in sent if name == "content-type" or name.startswith("x-amz-")}
        required.add("host")
        if signed != sorted(signed) or not required <= set(signed):
            raise refused("SignatureDoesNotMatch", f"{sorted(required)} must be signed")

        identity = self.identities.get(access)
        if identity is None or request.header("x-amz-security-token") != identity.session:
            text = "The security token included in the request is invalid."
            raise refused("UnrecognizedClientException", text)

        date = request.header("x-amz-date")
        canonical = _canonical_request(request, body, signed)
        expected = _signature(identity.secret, date, f"{day}/{region}/{service}", canonical)
        if not hmac.compare_digest(signature, expected):
            # As at STS, the message contains all signed values. A client that prints the whole
            # message discloses the session token.
            text = f"The Canonical String for this request should have been '{canonical}'"
            raise refused("SignatureDoesNotMatch", text)

        try:
            then = datetime.strptime(date, "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
        except ValueError:
            text = "Date must be in ISO-8601 'basic format'"
            raise refused("IncompleteSignatureException", text) from None
        if date[:8] != day or abs(then.timestamp() - self.now()) > _SKEW:
            text = f"Signature expired or not yet current: {date}"
            raise refused("SignatureDoesNotMatch", text)
        if identity.expires <= self.now():
            text = "The security token included in the request is expired"
            raise refused("ExpiredTokenException", text)
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
        """Answer with a new password for the registries of the API `service`."""
        demand((request.method, request.target) == ("POST", "/"), "operations are POST /")
        demand(request.header("content-type") == _JSON_1_1, "the content type is not JSON 1.1")
        action = request.header("x-amz-target")
        demand(action == _PASSWORD_ACTIONS[service], "no such operation")
        signer = self._signer(request, body)
        if service not in signer.may:
            right = f"{service}:GetAuthorizationToken"
            text = f"User: {signer.name} is not authorized to perform: {right} on resource: *"
            raise Refused(400, "AccessDeniedException", text)
        demand(body == b"{}", "registryIds is deprecated")

        text = f"password {next(self._numbers)} for {signer.name} "
        password = base64.b64encode(text.encode() * 12).decode()
        token = base64.b64encode(f"AWS:{password}".encode()).decode()
        expires = self.now() + _PASSWORD_LIFE
        self.passwords[service][password] = expires
        self.secrets |= {password, token}
        data = {"authorizationToken": token, "expiresAt": expires}
        return as_json(200, {"authorizationData": [data] if service == "ecr" else data}, _JSON_1_1)

    # STS, section 4.6.

    def _sts(self, request: Request, body: bytes) -> Response:
        """Answer with temporary keys for a role."""
        demand((request.method, request.target) == ("POST", "/"), "actions are POST /")
        form = form_of(request, body)
        action = form.get("Action", "")
        demand(action in _STS_ACTIONS, "no such action")
        required, optional = _STS_ACTIONS[action]
        check_fields(form, f"Action Version RoleArn RoleSessionName {required}", optional)
        demand(form["Version"] == "2011-06-15", "another Version")
        demand(re.fullmatch(r"[\w+=,.@-]{2,64}", form["RoleSessionName"]), "RoleSessionName")

        role = self.roles.get(form["RoleArn"])
        if action == "AssumeRole":
            signer = self._signer(request, body)
            if (
                role is None
                or role.trusts not in (None, signer.name)
                or role.external_id != form.get("ExternalId")
                or "sts" not in signer.may
            ):
                right = f"sts:AssumeRole on {form['RoleArn']}"
                text = f"User: {signer.name} is not authorized to perform: {right}"
                raise Refused(403, "AccessDenied", text)
        else:
            demand(not request.header("authorization"), f"{action} needs no signature")
            token = form["WebIdentityToken"]
            if role is None or self.web_tokens.get(token) != role.arn:
                raise Refused(400, "InvalidIdentityToken", f"no provider knows {token}")

        keys = self._new_keys(role.arn, "SessionToken")
        credentials = "".join(f"<{key}>{value}</{key}>" for key, value in keys.items())
        user = f"<AssumedRoleUser><Arn>{role.arn}</Arn></AssumedRoleUser>"
        result = f"{user}<Credentials>{credentials}</Credentials>"
        text = f'<{action}Response xmlns="{_STS}"><{action}Result>{result}</{action}Result></{action}Response>'
        return Response(200, [("Content-Type", "text/xml")], text.encode())

    # SSO and metadata, section 4.6.

    def _portal(self, request: Request) -> Response:
        """Answer with temporary keys for a role of a login."""
        demand((request.method, request.path) == ("GET", "/federation/credentials"), "another path")
        demand(not request.header("authorization"), "the portal needs no signature")
        login = self.logins.get(request.header("x-amz-sso_bearer_token"))
        if login is None or login.expires <= self.now():
            raise Refused(401, "UnauthorizedException", "Session token not found or invalid")
        account, role = request.parameter("account_id"), request.parameter("role_name")
        if len(request.query) != 2 or (account, role) not in login.roles:
            raise Refused(403, "ForbiddenException", "No access")
        keys = self.identity(f"sso:{role}", lasting=False)
        credentials = {
            "accessKeyId": keys.access,
            "secretAccessKey": keys.secret,
            "sessionToken": keys.session,
            "expiration": int(keys.expires * 1000),
        }
        return as_json(200, {"roleCredentials": credentials})

    def _container(self, request: Request) -> Response:
        """Answer with temporary keys of the container's role."""
        demand(request.method == "GET", "only GET")
        demand(request.header("accept") == "application/json", "Accept is not JSON's")
        if request.header("authorization") != self.container[1]:
            raise Refused(401, "401", "Authorization token is invalid")
        return as_json(200, {**self._new_keys("container", "Token"), "AccountId": ACCOUNT})

    def _imds(self, request: Request, body: bytes) -> Response:
        """Answer with the machine's role or its temporary keys, which need a token."""
        demand(not request.header("x-forwarded-for"), "through a proxy", 403)
        if request.path == "/latest/api/token":
            return self._imds_token(request, body)
        token = request.header("x-aws-ec2-metadata-token")
        if self._metadata_tokens.get(token, 0.0) <= self.now():
            return Response(401)
        is_known = request.method == "GET" and request.path.startswith(_MACHINE_ROLES)
        demand(is_known, f"only GET {_MACHINE_ROLES}", 404)
        if self.instance_role is None:
            return Response(404)
        if request.path == _MACHINE_ROLES:
            return Response(200, [("Content-Type", "text/plain")], self.instance_role.encode())
        asked = request.path.removeprefix(_MACHINE_ROLES)
        demand(asked == self.instance_role, "the machine has another role", 404)
        keys = self._new_keys(f"instance:{self.instance_role}", "Token")
        about = {"Code": "Success", "LastUpdated": _iso(self.now()), "Type": "AWS-HMAC"}
        return as_json(200, {**about, **keys}, "text/plain")

    def _imds_token(self, request: Request, body: bytes) -> Response:
        """Issue a token for the machine's metadata service."""
        demand(request.method == "PUT", "only PUT", 405)
        life = request.header("x-aws-ec2-metadata-token-ttl-seconds")
        demand(not body and life.isdecimal() and 1 <= int(life) <= 21600, "no valid seconds")
        token = f"imds-token-{next(self._numbers)}=="
        self._metadata_tokens[token] = self.now() + int(life)
        self.secrets.add(token)
        return Response(200, [("Content-Type", "text/plain")], token.encode())


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
        challenge = f'Basic realm="https://{request.header("host")}/",service="ecr.amazonaws.com"'
        headers = [("WWW-Authenticate", challenge), ("Content-Type", "text/plain; charset=utf-8")]
        return Response(401, headers, b"Not Authorized\n")


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

    @property
    def issued(self) -> list[bool]:
        """For each token, whether it was issued for a login."""
        return [token.has_login for token in self._tokens.values()]

    def answer(self, request: Request) -> Answer | Reception | None:
        """Answer the path of the token service, which supports one scope."""
        if request.path != "/token/":
            return None
        request.kind = "token"
        login = request.header("authorization")
        asked = {"service": "public.ecr.aws", "scope": "aws"}
        if request.method != "GET" or not asked.items() <= dict(request.query).items():
            return error(400, "UNSUPPORTED", "GET with the challenge's service and scope")
        if login and not _has_password(self._aws, "ecr-public", login):
            return error(401, "UNAUTHORIZED", "Not Authorized")
        token = f"public-token-{len(self._tokens)}"
        self._tokens[token] = _PublicToken(bool(login), self._aws.now() + _PASSWORD_LIFE)
        return as_json(200, {"token": token})

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


def _canonical_request(request: Request, body: bytes, signed: Sequence[str]) -> str:
    """Return the text of a request without a query that is signed, with the headers `signed`."""
    headers = [f"{name}:{' '.join(request.header(name).split())}" for name in signed]
    digest = hashlib.sha256(body).hexdigest()
    return "\n".join([request.method, request.path, "", *headers, "", ";".join(signed), digest])


def _signature(secret: str, date: str, scope: str, canonical: str) -> str:
    """Return the right signature for a canonical request. `scope` is DAY/REGION/SERVICE."""
    scope += "/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    key = f"AWS4{secret}".encode()
    for step in [*scope.split("/"), f"AWS4-HMAC-SHA256\n{date}\n{scope}\n{digest}"]:
        key = hmac.new(key, step.encode(), "sha256").digest()
    return key.hex()


def _iso(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))
