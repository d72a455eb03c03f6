"""Mistakes at the clouds' services: each is refused, and noted if no correct client makes it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import urlencode

import pytest

from conformance.clouds.aws import ACCOUNT, Aws
from conformance.clouds.azure import CLOUDS, COMMAND_LINE, Directory, Exchange, Identity
from conformance.clouds.google import CLIENT, Google
from conformance.http import Site
from conformance.messages import Request, Response

FORM = ("Content-Type", "application/x-www-form-urlencoded")
ROLES = "/latest/meta-data/iam/security-credentials/"
SECONDS = ("X-aws-ec2-metadata-token-ttl-seconds", "60")


class Service(NamedTuple):
    """A service that receives forms."""

    make: Callable[[], Site]
    host: str
    path: str


FORMS = {
    "STS": Service(Aws, "sts.eu-west-1.amazonaws.com", "/"),
    "authority": Service(
        lambda: Directory(CLOUDS["io"], Identity()),
        "login.microsoftonline.com",
        f"/{Identity().tenant}/oauth2/v2.0/token",
    ),
    "exchange": Service(Exchange, "a.azurecr.io", "/oauth2/exchange"),
    "Google": Service(Google, "localhost", "/token"),
    "Google's STS": Service(Google, "localhost", "/v1/token"),
}


@pytest.mark.parametrize("body", [b"a", b"a=1&&b=2", b"a=\xff", b"a=%ff", b"a=1&a=1"])
@pytest.mark.parametrize("name", FORMS)
def test_a_malformed_form_is_refused_and_noted(name: str, body: bytes) -> None:
    service = FORMS[name]
    site = service.make()
    answer = site.request("POST", service.path, [("host", service.host), FORM], body)
    assert answer.status == 400
    (violation,) = site.journal.violations
    assert violation.endswith("the form is malformed")


def machine(role: str | None = "worker") -> tuple[Aws, tuple[str, str]]:
    """Return a machine's services and the header with a token of its metadata service."""
    aws = Aws(instance_role=role)
    token = aws.request("PUT", "/latest/api/token", [SECONDS])
    assert token.status == 200
    return aws, ("X-aws-ec2-metadata-token", token.data.decode())


@pytest.mark.parametrize(
    ("status", "method", "path", "headers"),
    [
        pytest.param(405, "GET", "/latest/api/token", [SECONDS], id="a token that is got"),
        pytest.param(400, "PUT", "/latest/api/token", [], id="a token without an end"),
        pytest.param(403, "GET", ROLES, [("X-Forwarded-For", "10.0.0.1")], id="a proxy"),
        pytest.param(404, "POST", ROLES, [], id="another method"),
        pytest.param(404, "GET", "/latest/user-data", [], id="another path"),
        pytest.param(404, "GET", f"{ROLES}other", [], id="another role"),
    ],
)
def test_mistakes_at_a_machines_metadata_service_are_refused_and_noted(
    status: int, method: str, path: str, headers: Sequence[tuple[str, str]]
) -> None:
    aws, token = machine()
    assert aws.request(method, path, [token, *headers]).status == status
    assert len(aws.journal.violations) == 1


def test_to_ask_a_machine_without_a_role_or_with_an_old_token_is_no_mistake() -> None:
    aws, token = machine(None)
    assert aws.request("GET", ROLES, [token]).status == 404
    assert aws.request("GET", f"{ROLES}worker", [token]).status == 404, "it has lost its role"
    assert aws.request("GET", ROLES, [(token[0], "old")]).status == 401
    aws.journal.check()


class Right(NamedTuple):
    """A request that a service answers, whose parts are all needed."""

    site: Site
    method: str
    target: str
    headers: dict[str, str]
    query: dict[str, str]
    form: dict[str, str]
    scheme: str = "https"

    def send(self) -> Response:
        headers = dict(self.headers)
        body = urlencode(self.form).encode()
        if self.method == "POST":
            headers |= dict([FORM])
        target = f"{self.target}?{urlencode(self.query)}" if self.query else self.target
        answer = self.site.handle(
            Request(self.method, target, [*headers.items()], body, self.scheme)
        )
        assert isinstance(answer, Response)
        return answer


CLOUD = "https://www.googleapis.com/auth/cloud-platform"
AUDIENCE = CLOUDS["io"].audiences[0]
URN = "urn:ietf:params:oauth:"
USER = Identity(secret="secret", assertion="assertion", refresh_tokens={"refresh"})


def posts_to_aws() -> Iterator[Right]:
    aws = Aws()
    role = aws.role("pod")
    named = {"Version": "2011-06-15", "RoleArn": role.arn, "RoleSessionName": "a" * 64}
    action = {"Action": "AssumeRoleWithWebIdentity", "WebIdentityToken": aws.web_token(role)}
    yield Right(aws, "POST", "/", {"host": "sts.eu-west-1.amazonaws.com"}, {}, {**action, **named})


def gets_from_aws() -> Iterator[Right]:
    aws, (name, token) = machine()
    yield Right(aws, "GET", f"{ROLES}worker", {name.lower(): token}, {}, {})
    login = aws.sso_login((ACCOUNT, "reader"))
    host = {"host": "portal.sso.eu-west-1.amazonaws.com", "x-amz-sso_bearer_token": login.access}
    query = {"account_id": ACCOUNT, "role_name": "reader"}
    yield Right(aws, "GET", "/federation/credentials", host, query, {})
    aws.container = ("/credentials", "token")
    headers = {"accept": "application/json", "authorization": "token"}
    yield Right(aws, "GET", "/credentials", headers, {}, {})


def to_azure() -> Iterator[Right]:
    exchange = Exchange(service="a.azurecr.io", cloud=CLOUDS["io"])
    directory = exchange.directory
    assert directory is not None
    directory.identities += [USER, Identity(client_id="machine", managed="user")]
    directory.header = "header"
    token = f"/{USER.tenant}/oauth2/v2.0/token"
    mine = {"client_id": USER.client_id, "grant_type": "client_credentials"}
    mine["scope"] = f"{AUDIENCE}/.default"
    jwt = f"{URN}client-assertion-type:jwt-bearer"
    for proof in (
        {"client_secret": "secret"},
        {"client_assertion": "assertion", "client_assertion_type": jwt},
        {"grant_type": "refresh_token", "refresh_token": "refresh", "client_id": COMMAND_LINE},
    ):
        yield Right(directory, "POST", token, {}, {}, {**mine, **proof})
    for path, version, header in (
        ("/metadata/identity/oauth2/token", "2018-02-01", {"metadata": "true"}),
        ("/msi/token", "2019-08-01", {"x-identity-header": "header"}),
    ):
        query = {"api-version": version, "resource": AUDIENCE, "client_id": "machine"}
        yield Right(directory, "GET", path, header, query, {})
    form = {"grant_type": "access_token", "service": "a.azurecr.io"}
    form["access_token"] = directory._make_token(USER, AUDIENCE)
    yield Right(exchange, "POST", "/oauth2/exchange", {}, {}, form)


def to_google() -> Iterator[Right]:
    google = Google()
    client = base64.b64encode(":".join(CLIENT).encode()).decode()
    hosts = {"/token": "oauth2", "/v1/token": "sts", "/v1/oauthtoken": "sts"}
    user = {"refresh_token": next(iter(google.users)), "grant_type": "refresh_token"}
    subject = {
        "grant_type": f"{URN}grant-type:token-exchange",
        "audience": google.provider,
        "scope": CLOUD,
        "requested_token_type": f"{URN}token-type:access_token",
        "subject_token": next(iter(google.subjects)),
        "subject_token_type": f"{URN}token-type:jwt",
    }
    staff = {"refresh_token": next(iter(google.staff)), "grant_type": "refresh_token"}
    for path, form in {
        "/token": {"client_id": CLIENT.id, "client_secret": CLIENT.secret, **user},
        "/v1/token": subject,
        "/v1/oauthtoken": staff,
    }.items():
        headers = {"host": f"{hosts[path]}.googleapis.com"}
        if form is staff:
            headers["authorization"] = f"Basic {client}"
        yield Right(google, "POST", path, headers, {}, form)
    headers = {"host": "169.254.169.254", "metadata-flavor": "Google"}
    path = "/computeMetadata/v1/instance/service-accounts/default/token"
    yield Right(google, "GET", path, headers, {}, {}, "http")


def wrong(right: Right) -> Iterator[Right]:
    """Change or leave out one part of a request after the other."""
    for name in ("headers", "query", "form"):
        parts: dict[str, str] = getattr(right, name)
        for key, value in parts.items():
            yield right._replace(**{name: {**parts, key: f"x{value}"}})
            yield right._replace(**{name: {**parts, key: ""}})
            yield right._replace(**{name: {k: v for k, v in parts.items() if k != key}})
    yield right._replace(target=f"{right.target}x")
    yield right._replace(method="PUT")


@pytest.mark.parametrize("make", [posts_to_aws, gets_from_aws, to_azure, to_google])
def test_every_part_of_a_request_counts(make: Callable[[], Iterator[Right]]) -> None:
    for right in make():
        right.site.journal.violations.clear()
        assert right.send().status == 200, right
        right.site.journal.check()
        for each in wrong(right):
            assert each.send().status >= 400, each
