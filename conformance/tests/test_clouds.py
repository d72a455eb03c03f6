"""The clouds' login services: each part of a request counts, and what proves an identity is proved.

What is right is written by botocore and google-auth, which others wrote. That the services answer
whole clients of theirs, and msal, is in tests/test_logins_aws.py and its neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from google.auth import crypt, jwt

from conformance.clouds.aws import ACCOUNT, Aws, Private, Public
from conformance.clouds.azure import CLOUDS, COMMAND_LINE, TOKEN_USER, Directory, Exchange, Identity
from conformance.clouds.google import CLIENT, Google, make_key
from conformance.http import Site
from conformance.messages import Access, Request, Response
from conformance.tests.asking import Clock, basic

FORM = ("Content-Type", "application/x-www-form-urlencoded")
ROLES = "/latest/meta-data/iam/security-credentials/"
SECONDS = ("X-aws-ec2-metadata-token-ttl-seconds", "60")
CLOUD = "https://www.googleapis.com/auth/cloud-platform"
URN = "urn:ietf:params:oauth:"


# Requests of which each part counts.


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
        if self.method == "POST":
            headers |= dict([FORM])
        target = f"{self.target}?{urlencode(self.query)}" if self.query else self.target
        body = urlencode(self.form).encode()
        request = Request(self.method, target, [*headers.items()], body, self.scheme)
        answer = self.site.handle(request)
        assert isinstance(answer, Response)
        return answer


def machine(role: str | None = "worker") -> tuple[Aws, tuple[str, str]]:
    """Return a machine's services and the header with a token of its metadata service."""
    aws = Aws(instance_role=role)
    token = aws.request("PUT", "/latest/api/token", [SECONDS])
    return aws, ("x-aws-ec2-metadata-token", token.data.decode())


def to_aws() -> Iterator[Right]:
    aws = Aws()
    role = aws.role("pod")
    form = {"Action": "AssumeRoleWithWebIdentity", "WebIdentityToken": aws.web_token(role)}
    form |= {"Version": "2011-06-15", "RoleArn": role.arn, "RoleSessionName": "a" * 64}
    yield Right(aws, "POST", "/", {"host": "sts.eu-west-1.amazonaws.com"}, {}, form)
    aws, token = machine()
    yield Right(aws, "GET", f"{ROLES}worker", dict([token]), {}, {})
    login = aws.sso_login((ACCOUNT, "reader"))
    host = {"host": "portal.sso.eu-west-1.amazonaws.com", "x-amz-sso_bearer_token": login.access}
    query = {"account_id": ACCOUNT, "role_name": "reader"}
    yield Right(aws, "GET", "/federation/credentials", host, query, {})
    aws.container = ("/credentials", "token")
    headers = {"accept": "application/json", "authorization": "token"}
    yield Right(aws, "GET", "/credentials", headers, {}, {})


AUDIENCE = CLOUDS["io"].audiences[0]
USER = Identity(secret="secret", assertion="assertion", refresh_tokens={"refresh"})


def to_azure() -> Iterator[Right]:
    exchange = Exchange(service="a.azurecr.io", cloud=CLOUDS["io"])
    directory = exchange.directory
    assert directory is not None
    directory.identities += [USER, Identity(client_id="machine", managed="user")]
    directory.header = "header"
    token = f"/{USER.tenant}/oauth2/v2.0/token"
    mine = {"client_id": USER.client_id, "grant_type": "client_credentials"}
    mine["scope"] = f"{AUDIENCE}/.default"
    kind = f"{URN}client-assertion-type:jwt-bearer"
    for proof in (
        {"client_secret": "secret"},
        {"client_assertion": "assertion", "client_assertion_type": kind},
        {"grant_type": "refresh_token", "refresh_token": "refresh", "client_id": COMMAND_LINE},
    ):
        right = Right(directory, "POST", token, {}, {}, {**mine, **proof})
        yield right
    for path, version, header in (
        ("/metadata/identity/oauth2/token", "2018-02-01", {"metadata": "true"}),
        ("/msi/token", "2019-08-01", {"x-identity-header": "header"}),
    ):
        query = {"api-version": version, "resource": AUDIENCE, "client_id": "machine"}
        yield Right(directory, "GET", path, header, query, {})
    form = {"grant_type": "access_token", "service": "a.azurecr.io"}
    form["access_token"] = right.send().json()["access_token"]
    yield Right(exchange, "POST", "/oauth2/exchange", {}, {}, form)


def to_google() -> Iterator[Right]:
    google = Google()
    user = {"refresh_token": next(iter(google.users)), "grant_type": "refresh_token"}
    client = {"client_id": CLIENT.id, "client_secret": CLIENT.secret}
    yield Right(google, "POST", "/token", {"host": "oauth2.googleapis.com"}, {}, {**client, **user})
    sts = {"host": "sts.googleapis.com"}
    subject = {
        "grant_type": f"{URN}grant-type:token-exchange",
        "audience": google.provider,
        "scope": CLOUD,
        "requested_token_type": f"{URN}token-type:access_token",
        "subject_token": next(iter(google.subjects)),
        "subject_token_type": f"{URN}token-type:jwt",
    }
    yield Right(google, "POST", "/v1/token", sts, {}, subject)
    staff = {"refresh_token": next(iter(google.staff)), "grant_type": "refresh_token"}
    login = {**sts, **dict([basic(*CLIENT)])}
    yield Right(google, "POST", "/v1/oauthtoken", login, {}, staff)
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


@pytest.mark.parametrize("make", [to_aws, to_azure, to_google])
def test_every_part_of_a_request_counts(make: Callable[[], Iterator[Right]]) -> None:
    for right in make():
        right.site.journal.violations.clear()
        assert right.send().status == 200, right
        right.site.journal.check()
        for each in wrong(right):
            assert each.send().status >= 400, each


# AWS.


@pytest.mark.parametrize(
    ("status", "method", "path", "headers"),
    [
        (400, "PUT", "/latest/api/token", []),
        (403, "GET", ROLES, [("X-Forwarded-For", "10.0.0.1")]),
        (404, "GET", f"{ROLES}other", []),
    ],
)
def test_mistakes_at_a_machines_metadata_service_are_refused_and_noted(
    status: int, method: str, path: str, headers: list[tuple[str, str]]
) -> None:
    aws, token = machine()
    assert aws.request(method, path, [token, *headers]).status == status
    assert len(aws.journal.violations) == 1


def test_to_ask_a_machine_without_a_role_or_with_an_old_token_is_no_mistake() -> None:
    aws, token = machine(None)
    assert aws.request("GET", ROLES, [token]).status == 404
    assert aws.request("GET", ROLES, [(token[0], "old")]).status == 401
    aws.journal.check()


ECR = "api.ecr.eu-west-1.amazonaws.com"
TARGET = ("x-amz-target", "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken")


def signed(
    keys: Credentials, body: bytes = b"{}", *, host: str = ECR, region: str = "eu-west-1"
) -> list[tuple[str, str]]:
    """Return the headers of a request to ECR or STS, as botocore signs it."""
    service = host.partition(".")[0].replace("api", "ecr")
    kind = "application/x-amz-json-1.1" if service == "ecr" else FORM[1]
    headers = {"host": host, "content-type": kind}
    headers |= dict([TARGET]) if service == "ecr" else {}
    request = AWSRequest("POST", f"https://{host}/", headers, body)
    SigV4Auth(keys, service, region).add_auth(request)
    return [(name.lower(), value) for name, value in request.headers.items()]


def keys_of(aws: Aws, **options: Any) -> Credentials:
    identity = aws.identity("somebody", **options)
    return Credentials(identity.access, identity.secret, identity.session or None)


def test_a_password_of_ecr_is_given_for_botocores_signature() -> None:
    late = [0.0]
    aws = Aws(now=lambda: time.time() + late[0])
    keys = keys_of(aws, lasting=False)

    def ask(headers: list[tuple[str, str]], seconds: float = 0) -> Response:
        late[0] = seconds
        return aws.request("POST", "/", headers, b"{}")

    right = signed(keys)
    answer = ask(right)
    assert answer.status == 200
    given = answer.json()["authorizationData"][0]["authorizationToken"]
    login = Request("GET", "/v2/", [("host", "r.test"), ("authorization", f"Basic {given}")])
    assert Private(aws).check(login, []) is None
    assert Public(aws).check(login, []) is not None
    late[0] = 12 * 3600
    assert Private(aws).check(login, []) is not None

    stranger = Credentials(keys.access_key, "another secret", keys.token)
    for headers in (
        signed(stranger),
        signed(keys, b"{ }"),
        signed(keys, region="us-east-1"),
        [*right, ("x-amz-meta", "not signed")],
        [header for header in right if header[0] != "authorization"],
    ):
        assert ask(headers).status == 400
    assert [ask(right, seconds).status for seconds in (200, 302, 4000)] == [200, 400, 400]
    assert ask(signed(keys_of(aws, may=["sts"]))).status == 400


def test_expired_keys_are_refused() -> None:
    aws = Aws()
    keys = keys_of(aws, lasting=False)
    next(iter(aws.identities.values())).expires = time.time() - 1
    answer = aws.request("POST", "/", signed(keys), b"{}")
    assert answer.json()["__type"] == "ExpiredTokenException"


@pytest.mark.parametrize(
    ("who", "external", "status"),
    [
        ("somebody", "id", 200),
        ("somebody", "other", 403),
        ("somebody", None, 403),
        ("else", "id", 403),
    ],
)
def test_a_role_is_assumed_by_whom_it_trusts(who: str, external: str | None, status: int) -> None:
    aws = Aws()
    role = aws.role("pod", trusts=who, external_id="id")
    form = {"Action": "AssumeRole", "Version": "2011-06-15", "RoleArn": role.arn}
    form |= {"RoleSessionName": "me"} | ({"ExternalId": external} if external else {})
    body = urlencode(form).encode()
    headers = signed(keys_of(aws), body, host="sts.eu-west-1.amazonaws.com")
    assert aws.request("POST", "/", headers, body).status == status


def test_a_web_identity_assumes_its_own_role() -> None:
    right = next(to_aws())
    assert isinstance(right.site, Aws)
    other = right.site.role("other")
    assert right._replace(form={**right.form, "RoleArn": other.arn}).send().status == 400


def test_an_anonymous_token_of_ecr_public_only_pulls() -> None:
    public = Public(Aws())
    given = public.answer(Request("GET", "/token/?service=public.ecr.aws&scope=aws"))
    assert isinstance(given, Response)
    request = Request("GET", "/v2/", [("authorization", f"Bearer {given.json()['token']}")])
    assert public.check(request, [Access("repository", "a", "pull")]) is None
    refusal = public.check(request, [Access("repository", "a", "push")])
    assert refusal is not None
    assert refusal.status == 403


# Azure.


@pytest.fixture
def azure(clock: Clock) -> Exchange:
    return Exchange(service="a.azurecr.io", cloud=CLOUDS["io"], wall=clock, now=clock)


def exchanged(azure: Exchange, audience: str = AUDIENCE, **form: str) -> Response:
    """Exchange a token of the directory for an audience."""
    directory = azure.directory
    assert directory is not None
    token = directory._signer.make(3599, aud=audience, tid=USER.tenant, appid="app")
    form = {"grant_type": "access_token", "service": "a.azurecr.io", "access_token": token, **form}
    return azure.request("POST", "/oauth2/exchange", [FORM], urlencode(form).encode())


def test_a_token_is_exchanged_for_its_audience_and_tenant(azure: Exchange) -> None:
    assert exchanged(azure).status == 200
    assert exchanged(azure, tenant=USER.tenant).status == 200
    assert exchanged(azure, "https://other.test").status == 401
    assert exchanged(azure, tenant="other").status == 401
    azure.tenants = ("other",)
    assert exchanged(azure).status == 401


def test_a_refresh_token_is_good_for_its_registry_and_three_hours(
    azure: Exchange, clock: Clock
) -> None:
    token = exchanged(azure).json()["refresh_token"]
    other = Exchange(service="b.azurecr.io", wall=clock)
    other._signer = azure._signer
    for registry, user in ((azure, "app"), (other, None)):
        assert registry.user_of_refresh_token(token) == user
        assert registry.user_of_password(TOKEN_USER, token) == user
    clock.now += 10_800
    assert azure.user_of_refresh_token(token) is None


def test_a_machine_has_the_identity_that_is_managed() -> None:
    system = Identity(client_id="system", managed="system")
    directory = Directory(CLOUDS["io"], Identity(client_id="plain"), system)
    path = f"/metadata/identity/oauth2/token?api-version=2018-02-01&resource={AUDIENCE}"
    for query, status in (("", 200), ("&client_id=system", 200), ("&client_id=plain", 400)):
        assert directory.request("GET", path + query, [("Metadata", "true")]).status == status


# Google.


def assertion(google: Google, signer: Any = None, **claims: Any) -> Response:
    """Ask for a token with a JWT as google-auth writes it, with other claims."""
    now = int(google.wall())
    account = {"iss": google.robot, "aud": "https://oauth2.googleapis.com/token", "scope": CLOUD}
    payload = {**account, "iat": now, "exp": now + 3600, **claims}
    signer = signer or crypt.RSASigner.from_service_account_info(google.service_account())
    token = jwt.encode(signer, {key: value for key, value in payload.items() if value}).decode()
    form = {"grant_type": f"{URN}grant-type:jwt-bearer", "assertion": token}
    headers = [("host", "localhost"), FORM]
    return google.request("POST", "/token", headers, urlencode(form).encode())


def test_each_claim_of_a_jwt_counts_and_its_signature(clock: Clock) -> None:
    google = Google(now=clock, wall=clock)
    now = int(clock.now)
    assert assertion(google).status == 200
    for claims in (
        {"iss": "stranger@project.test"},
        {"aud": "https://sts.googleapis.com/token"},
        {"scope": "https://www.googleapis.com/auth/drive"},
        {"scope": None},
        {"exp": now + 3601},
        {"iat": now - 4000, "exp": now - 400},
        {"iat": now + 301},
        {"sub": "somebody"},
    ):
        assert assertion(google, **claims).status == 400, claims
    stranger = crypt.RSASigner.from_string(make_key(1).pem, key_id=make_key().name)
    answer = assertion(google, stranger)
    assert answer.json()["error_description"] == "Invalid JWT Signature."


def test_an_access_token_is_a_password_for_an_hour_with_its_scope(clock: Clock) -> None:
    google = Google(now=clock, wall=clock)
    token = assertion(google).json()["access_token"]
    other = assertion(google, scope="https://www.googleapis.com/auth/iam").json()["access_token"]
    assert google.principal("oauth2accesstoken", token) == google.robot
    assert google.principal("somebody", token) is None
    assert google.principal("oauth2accesstoken", other) is None
    clock.now += 3600
    assert google.principal("oauth2accesstoken", token) is None


def test_an_account_is_impersonated_by_whom_it_trusts(clock: Clock) -> None:
    google = Google(now=clock, wall=clock)
    token = assertion(google).json()["access_token"]

    def ask(account: str, bearer: str = token, lifetime: str = "3600s") -> int:
        headers = [("host", "localhost"), ("authorization", f"Bearer {bearer}")]
        headers.append(("content-type", "application/json"))
        path = f"/v1/projects/-/serviceAccounts/{account}:generateAccessToken"
        body = f'{{"scope": ["{CLOUD}"], "lifetime": "{lifetime}"}}'.encode()
        return google.request("POST", path, headers, body).status

    assert ask(google.target) == 200
    assert ask(google.machine) == 403
    assert ask(google.target, "x") == 401
    assert ask(google.target, lifetime="3601s") == 400
