"""ECR's logins: where a machine in AWS has an identity, whom it asks for a password, what is said
when it gets none.

The services (conformance/clouds/aws.py) verify signatures and words by themselves; botocore, driven
through the same services, says whether that is what AWS's own programs send, and finds the same
identity from the same files and variables.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Callable
from typing import Any

import botocore.awsrequest
import botocore.credentials
import botocore.exceptions
import botocore.httpsession
import botocore.session
import botocore.tokens
import botocore.utils
import pytest

from conformance.clouds.aws import ACCOUNT, Login, Private, Public
from conformance.messages import Response
from tests.clouds import ECR, ECS, EKS, IMDS, PRIVATE, STS, InAws, answer_first

PUBLIC = "public.ecr.aws"


class Configured(InAws):
    """How identities are written down."""

    def keys(self, name: str, *, lasting: bool = True) -> str:
        """Return the keys of a new user as fields of a profile."""
        user = self.aws.identity(name, lasting=lasting)
        text = f"aws_access_key_id = {user.access}\naws_secret_access_key = {user.secret}\n"
        return text + (f"aws_session_token = {user.session}\n" if user.session else "")

    def config(self, text: str, profile: str = "") -> None:
        """Add to the config file, and name the profile that is used."""
        path = self.home / ".aws/config"
        self.write(".aws/config", (path.read_text() if path.exists() else "") + text)
        if profile:
            self.set(AWS_PROFILE=profile)

    def keep_sso(self, name: str, login: Login) -> str:
        """Keep a login as `aws sso login` does."""
        ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(login.expires))
        told = {"accessToken": login.access, "expiresAt": ends, "region": "eu-west-1"}
        told |= {"refreshToken": login.refresh, "registrationExpiresAt": "2099-01-01T00:00:00Z"}
        told |= {"clientId": login.client[0], "clientSecret": login.client[1]}
        hashed = hashlib.sha1(name.encode()).hexdigest()
        return self.write(f".aws/sso/cache/{hashed}.json", json.dumps(told))


@pytest.fixture
def machine(world, clean_env, monkeypatch):
    return Configured(world, clean_env, monkeypatch)


# Sources of an identity. Each arranges a machine, and returns the name of who it then is; beside it
# stands what is asked for one login.

Source = Callable[[Configured], str]
SOURCES: dict[str, tuple[Source, str]] = {}


def source(asked: str) -> Callable[[Source], Source]:
    def add(arrange: Source) -> Source:
        SOURCES[arrange.__name__] = arrange, asked
        return arrange

    return add


@source("ecr")
def variables(machine: Configured) -> str:
    return machine.set_keys(machine.aws.identity("user"))


@source("ecr")
def variables_for_a_while(machine: Configured) -> str:
    return machine.set_keys(machine.aws.identity("role", lasting=False))


@source("sts ecr")
def web_identity(machine: Configured) -> str:
    role = machine.aws.role("pod")
    path = machine.write("token", machine.aws.web_token(role))
    machine.set(AWS_WEB_IDENTITY_TOKEN_FILE=path, AWS_ROLE_ARN=role.arn)
    machine.set(AWS_ROLE_SESSION_NAME="pod-1")
    return role.arn


@source("ecr")
def credentials_file_before_the_config(machine: Configured) -> str:
    machine.config(f"[default]\n{machine.keys('configured', lasting=False)}")
    machine.write(".aws/credentials", f"[default]\n{machine.keys('filed')}")
    return "filed"


@source("ecr")
def credentials_file_elsewhere(machine: Configured) -> str:
    text = f"[some one]\n{machine.keys('elsewhere', lasting=False)}"
    machine.set(AWS_SHARED_CREDENTIALS_FILE=machine.write("keys.ini", text), AWS_PROFILE="some one")
    return "elsewhere"


@source("ecr")
def config_file(machine: Configured) -> str:
    nested = "s3 =\n  max_concurrent_requests = 20\nregion = eu-west-1\n"
    text = f"# mine\n[default]\n{nested}[profile 'my own']\n{nested}{machine.keys('configured')}"
    machine.config(text, "my own")
    return "configured"


@source("ecr")
def default_profile_variable(machine: Configured) -> str:
    text = f"[a]\n{machine.keys('first')}[b]\n{machine.keys('second')}"
    machine.write(".aws/credentials", text)
    machine.set(AWS_DEFAULT_PROFILE="a", AWS_PROFILE="b")
    return "first"


@source("sts ecr")
def role_of_a_source_profile(machine: Configured) -> str:
    role = machine.aws.role("reader", trusts="base", external_id="abc")
    fields = "source_profile = base\nexternal_id = abc\nduration_seconds = 900\n"
    more = f"role_arn = {role.arn}\nrole_session_name = me\n"
    machine.config(f"[profile reader]\n{fields}{more}", "reader")
    machine.write(".aws/credentials", f"[base]\n{machine.keys('base')}")
    return role.arn


@source("sts ecr")
def role_of_itself(machine: Configured) -> str:
    role = machine.aws.role("own", trusts="base")
    fields = f"role_arn = {role.arn}\nsource_profile = default\n{machine.keys('base')}"
    machine.config(f"[default]\n{fields}")
    return role.arn


@source("sts sts ecr")
def role_of_a_role_of_web_identity(machine: Configured) -> str:
    pod = machine.aws.role("pod")
    path = machine.write("token", machine.aws.web_token(pod))
    far = machine.aws.role("far", trusts=pod.arn)
    machine.config(f"[profile far]\nrole_arn = {far.arn}\nsource_profile = pod\n", "far")
    machine.config(f"[profile pod]\nrole_arn = {pod.arn}\nweb_identity_token_file = {path}\n")
    return far.arn


@source("portal.sso ecr")
def sso(machine: Configured) -> str:
    machine.keep_sso("corp", machine.aws.sso_login((ACCOUNT, "reader"), renewable=True))
    fields = f"sso_session = corp\nsso_account_id = {ACCOUNT}\nsso_role_name = reader\n"
    machine.config(f"[profile dev]\n{fields}[sso-session corp]\n", "dev")
    machine.config("sso_start_url = https://corp.awsapps.com/start\nsso_region = eu-west-1\n")
    return "sso:reader"


@source("portal.sso ecr")
def sso_of_old(machine: Configured) -> str:
    start = "https://corp.awsapps.com/start"
    machine.keep_sso(start, machine.aws.sso_login((ACCOUNT, "reader")))
    fields = f"sso_account_id = {ACCOUNT}\nsso_role_name = reader\n"
    machine.config(f"[default]\nsso_start_url = {start}\nsso_region = us-east-2\n{fields}")
    return "sso:reader"


@source("container ecr")
def container(machine: Configured) -> str:
    machine.aws.container = ("/v2/credentials/abc", "")
    machine.set(AWS_CONTAINER_CREDENTIALS_RELATIVE_URI="/v2/credentials/abc")
    return "container"


@source("container ecr")
def container_with_a_token(machine: Configured) -> str:
    machine.aws.container = ("/v1/credentials", "a-token")
    machine.set(AWS_CONTAINER_CREDENTIALS_FULL_URI=f"http://{EKS}/v1/credentials")
    machine.set(AWS_CONTAINER_AUTHORIZATION_TOKEN="a-token")
    return "container"


@source("container ecr")
def pod_identity(machine: Configured) -> str:
    machine.aws.container = ("/v1/credentials", "from-a-file")
    machine.set(AWS_CONTAINER_CREDENTIALS_FULL_URI="http://[fd00:ec2::23]/v1/credentials")
    machine.set(AWS_CONTAINER_AUTHORIZATION_TOKEN="the file comes first")
    path = machine.write("pod-token", "from-a-file")
    machine.set(AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE=path)
    return "container"


@source("imds imds imds ecr")
def instance(machine: Configured) -> str:
    machine.aws.instance_role = "worker"
    return "instance:worker"


def role_by(name: str, trusted: str, machine: Configured) -> str:
    role = machine.aws.role("named", trusts=trusted)
    machine.config(f"[profile named]\nrole_arn = {role.arn}\ncredential_source = {name}\n", "named")
    return role.arn


@source("container sts ecr")
def role_of_the_container(machine: Configured) -> str:
    return role_by("EcsContainer", container(machine), machine)


@source("imds imds imds sts ecr")
def role_of_the_instance(machine: Configured) -> str:
    return role_by("Ec2InstanceMetadata", instance(machine), machine)


@pytest.mark.parametrize("name", sorted(SOURCES))
async def test_each_source_logs_in_with_so_many_requests_as_who_botocore_finds(machine, name):
    arrange, asked = SOURCES[name]
    expected = arrange(machine)
    assert await machine.who() == expected
    assert machine.aws.requests == asked.split()
    assert await machine.who(auth_type=None) == expected, "it is seen that this is configured"
    assert machine.aws.requests == asked.split() * 2, "and nothing is kept"
    assert botocores(machine) == expected


def botocores(machine: Configured) -> str:
    """Return who botocore says that it is."""
    cache = str(machine.home / ".aws/sso/cache")
    for provider in (botocore.credentials.SSOProvider, botocore.tokens.SSOTokenProvider):
        machine.patch.setattr(provider, "_SSO_TOKEN_CACHE_DIR", cache)
    machine.patch.setattr(botocore.utils.ContainerMetadataFetcher, "SLEEP_TIME", 0)
    # It takes expiry times for what they are in the services' time.
    machine.patch.setattr(machine.aws, "now", time.time)
    for login in machine.aws.logins.values():
        login.expires = time.time() + 3600
        for name in ("corp", "https://corp.awsapps.com/start"):
            machine.keep_sso(name, login)

    def send(_: Any, request: Any) -> Any:
        body = request.body if isinstance(request.body, bytes) else (request.body or "").encode()
        headers = {name: _text(value) for name, value in request.headers.items()}
        answer = machine.ask(request.method, request.url, headers, body)
        if answer is None:
            raise botocore.exceptions.ConnectionClosedError(endpoint_url=request.url)
        raw = io.BytesIO(answer.data)
        raw.stream = lambda **_: iter([answer.data])  # type: ignore[attr-defined]
        heads = dict(answer.headers)
        return botocore.awsrequest.AWSResponse(request.url, answer.status, heads, raw)

    machine.patch.setattr(botocore.httpsession.URLLib3Session, "send", send)
    session = botocore.session.Session()
    session.set_config_variable("region", "eu-west-1")
    found = session.get_credentials()
    assert found is not None
    return machine.aws.identities[found.get_frozen_credentials().access_key].name


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


async def test_the_first_source_is_taken_and_the_others_are_not_asked(machine):
    instance(machine)
    container(machine)
    credentials_file_before_the_config(machine)
    role = web_identity(machine)
    variables(machine)
    machine.set(AWS_PROFILE="default")
    assert await machine.who() == "user"
    machine.unset("AWS_ACCESS_KEY_ID")
    assert await machine.who() == role
    machine.unset("AWS_WEB_IDENTITY_TOKEN_FILE")
    assert await machine.who() == "filed"
    for name in ("config", "credentials"):
        (machine.home / ".aws" / name).unlink()
    machine.unset("AWS_PROFILE")
    assert await machine.who() == "container"
    machine.unset("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    assert await machine.who() == "instance:worker"
    assert machine.aws.count("container") == 1
    assert machine.aws.count("imds") == 3


async def test_cloud_profile_is_used_instead_of_all_else(machine):
    """As for the role of the environment: by itself the environment comes first."""
    role = role_by("Environment", variables(machine), machine)
    web_identity(machine)
    assert await machine.who() == "user"
    assert await machine.who(cloud_profile="named") == role


async def test_no_name_is_masked_that_a_metadata_service_was_only_asked_with(machine):
    """As 21600, the seconds for which a session of that service lives."""
    instance(machine)
    row = await machine.check(PRIVATE, repository="app-21600")
    assert row["repository"] == f"{PRIVATE}/app-21600"


# Whom to ask.


@pytest.mark.parametrize(
    ("host", "asked"),
    [
        (PUBLIC, "api.ecr-public.us-east-1.amazonaws.com"),
        (f"{ACCOUNT}.dkr.ecr-fips.us-east-2.amazonaws.com", "ecr-fips.us-east-2.amazonaws.com"),
        (f"{ACCOUNT}.dkr-ecr.us-west-2.on.aws", "api.ecr.us-west-2.amazonaws.com"),
        (f"{ACCOUNT}.dkr-ecr-fips.us-gov-west-1.on.aws", "ecr-fips.us-gov-west-1.amazonaws.com"),
        *(
            (f"{ACCOUNT}.dkr.ecr.{place}", f"api.ecr.{place}")
            for place in ("cn-north-1.amazonaws.com.cn", "us-isof-south-1.csp.hci.ic.gov")
        ),
    ],
)
async def test_a_registrys_name_tells_whom_to_ask(machine, host, asked):
    variables(machine)
    machine.set(AWS_REGION="ap-south-1")  # has no say in it
    machine.answer(machine.aws, asked)
    is_public = host == PUBLIC
    machine.registry(Public(machine.aws) if is_public else Private(machine.aws), host)
    assert await machine.source(host) == "AWS_ACCESS_KEY_ID"
    assert machine.asked == [asked]
    assert len(machine.aws.passwords["ecr-public"]) == is_public


@pytest.mark.parametrize(
    ("variables", "profile", "asked"),
    [
        ({"AWS_REGION": "sa-east-1"}, "", ["sts.sa-east-1", "api.ecr.eu-west-1"]),
        ({"AWS_DEFAULT_REGION": "sa-east-1"}, "", ["sts.sa-east-1", "api.ecr.eu-west-1"]),
        ({}, "region = sa-east-1", ["sts.sa-east-1", "api.ecr.eu-west-1"]),
        ({"AWS_USE_FIPS_ENDPOINT": "true"}, "", ["sts-fips.eu-west-1", "ecr-fips.eu-west-1"]),
        ({}, "use_fips_endpoint = true", ["sts-fips.eu-west-1", "ecr-fips.eu-west-1"]),
    ],
)
async def test_the_region_of_sts_and_fips_are_configurable(machine, variables, profile, asked):
    web_identity(machine)
    hosts = [f"{name}.amazonaws.com" for name in asked]
    machine.answer(machine.aws, *hosts)
    machine.set(**variables)
    machine.config(f"[default]\n{profile}\n")
    await machine.who()
    assert machine.asked == hosts


async def test_a_host_of_another_name_needs_a_region(machine):
    variables(machine)
    host = "registry.corp.test"
    machine.registry(Private(machine.aws), host)
    machine.answer(machine.aws, "api.ecr.eu-north-1.amazonaws.com")
    assert "(set AWS_REGION, or" in await machine.refused(host)
    machine.set(AWS_REGION="eu-north-1")
    assert await machine.who(host) == "user"
    assert machine.asked == ["api.ecr.eu-north-1.amazonaws.com"]
    machine.set(AWS_REGION="evil.test/")
    assert "'evil.test/' is not an AWS region" in await machine.refused(host)


async def test_a_region_of_the_profile_that_is_none_is_corrected_there(machine):
    sso(machine)
    path = machine.home / ".aws/config"
    path.write_text(path.read_text().replace("sso_region = eu-west-1", "sso_region = eu west"))
    told = await machine.refused(PRIVATE)
    assert "'eu west' is not an AWS region (" in told
    assert "sso_region in the profile" in told


# What is said when a source is broken, and that nothing else is tried then.


async def test_when_there_is_nothing_every_place_is_named(machine):
    assert (await machine.refused(PRIVATE)).startswith(
        f"registry 'source': no AWS credentials for {PRIVATE}; looked at AWS_ACCESS_KEY_ID, "
        "AWS_WEB_IDENTITY_TOKEN_FILE, profile 'default' in ~/.aws/config and ~/.aws/credentials, "
        "AWS_CONTAINER_CREDENTIALS_FULL_URI, the EC2 metadata service at 169.254.169.254: "
        "status 404 (give this machine or container a role"
    )
    machine.set(AWS_EC2_METADATA_DISABLED="true")
    assert "(AWS_EC2_METADATA_DISABLED)" in await machine.refused(PRIVATE)
    assert machine.aws.requests == ["imds", "imds"], "and never an address that was switched off"


async def test_an_address_without_a_scheme_is_told_as_that(machine):
    machine.set(AWS_EC2_METADATA_SERVICE_ENDPOINT=IMDS)
    reason = "its address is not an http or https URL"
    assert f"the EC2 metadata service at {IMDS}: {reason} (" in await machine.refused(PRIVATE)


def first(made: dict[Any, Any]) -> Any:
    return next(iter(made.values()))


Change = Callable[[Configured], object]
SSO_FILE = f".aws/sso/cache/{hashlib.sha1(b'corp').hexdigest()}.json"
ROLE = "[default]\nrole_arn = arn:aws:iam::1:role/x\n"
CIRCLE = "source_profile = a\n[profile a]\nrole_arn = arn:x\nsource_profile = default\n"
NO_KEYS = "gives no AWS credentials: the access key or its secret is missing, or is not ASCII"
NO_TEXT = "AWS_ROLE_ARN or role_arn is missing, or is not text"
NO_SOURCE = "needs either source_profile or credential_source (EcsContainer,"
LOGIN_AGAIN = "(run `aws sso login --profile dev`)"
FAILURES: list[tuple[Source | None, Change, list[str]]] = [
    (None, lambda m: m.set(AWS_ACCESS_KEY_ID="AKIA"), [f"AWS_ACCESS_KEY_ID {NO_KEYS}"]),
    (None, lambda m: m.set(AWS_ACCESS_KEY_ID="A", AWS_SECRET_ACCESS_KEY="\udcff"), [NO_KEYS]),
    (variables, lambda m: m.set(AWS_ACCESS_KEY_ID="A\nB"), [NO_KEYS]),
    (variables_for_a_while, lambda m: m.set(AWS_SECRET_ACCESS_KEY="wrong"),
        [f"AWS_ACCESS_KEY_ID at {ECR}: status 400: Sig"]),
    (variables, lambda m: setattr(m.aws, "now", lambda: m.world.wall() + 3600),
        ["Signature expired or not yet current", "(check the keys and this machine's clock, and"]),
    (variables_for_a_while, lambda m: setattr(first(m.aws.identities), "expires", 0.0),
        ["ExpiredTokenException: The security token included"]),
    (variables, lambda m: setattr(first(m.aws.identities), "may", {"sts"}),
        ["User: user is not authorized", "allow this identity ecr:GetAuthorizationToken)"]),
    (config_file, lambda m: m.set(AWS_PROFILE="gone"), ["no profile 'gone' in ~/.aws/config and"]),
    (web_identity, lambda m: m.write("token", ""),
        ["AWS_WEB_IDENTITY_TOKEN_FILE: ", "token is missing or empty"]),
    (web_identity, lambda m: m.set(AWS_ROLE_ARN=""), [NO_TEXT]),
    (web_identity, lambda m: m.set(AWS_ROLE_ARN="\udcff"), [NO_TEXT]),
    (web_identity, lambda m: m.aws.web_tokens.clear(), ["InvalidIdentityToken: no provider knows ***"]),
    (None, lambda m: m.config("aws_access_key_id\n"), ["~/.aws/config is not a valid AWS config"]),
    (None, lambda m: m.config("[default]\ncredential_process = keys --secret s3cret\n"),
        ["has credential_process, which needs another program"]),
    (None, lambda m: m.config(f"{ROLE}source_profile = a\ncredential_source = Environment\n"), [NO_SOURCE]),
    (None, lambda m: m.config(f"{ROLE}credential_source = Moon\n"), [NO_SOURCE]),
    (None, lambda m: m.config(f"{ROLE}source_profile = a\n[profile a]\nregion = x\n"),
        ["profile 'default': its source of keys has none: profile 'a' in ~/.aws/config and"]),
    (None, lambda m: m.config(f"{ROLE}source_profile = a\n"), ["there is no profile 'a'"]),
    (None, lambda m: m.config(f"{ROLE}{CIRCLE}"), ["its own source: default -> a -> default"]),
    (role_of_a_source_profile, lambda m: setattr(first(m.aws.roles), "trusts", "somebody else"),
        ["403: AccessDenied: User: base is not", "(check the role's ARN, its trust policy"]),
    (sso, lambda m: m.write(SSO_FILE, ""), [".json is missing or empty", LOGIN_AGAIN]),
    (sso, lambda m: m.write(SSO_FILE, '{"accessToken": 5}'),
        ["profile 'dev': its SSO login is not readable in", LOGIN_AGAIN]),
    (sso, lambda m: m.keep_sso("corp", m.aws.sso_login((ACCOUNT, "reader"), life=-5.0)),
        ["profile 'dev': its SSO login ended at 20", LOGIN_AGAIN]),
    (sso, lambda m: first(m.aws.logins).roles.clear(), ["403: ForbiddenException: No", LOGIN_AGAIN]),
    (None, lambda m: m.config("[default]\nsso_account_id = 1\n"),
        ["sso_start_url, sso_region, sso_role_name"]),
    (None, lambda m: m.set(AWS_CONTAINER_CREDENTIALS_FULL_URI="http://10.0.0.1/keys"),
        ["10.0.0.1 is neither https nor a metadata address"]),
    (None, lambda m: m.set(AWS_CONTAINER_CREDENTIALS_RELATIVE_URI="@evil.test/keys"),
        ["evil.test is neither https nor a metadata address"]),
    (container_with_a_token, lambda m: m.set(AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE="/nowhere"),
        ["/nowhere is missing or empty"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arrange", "change", "words"), FAILURES, ids=[row[2][0] for row in FAILURES]
)
async def test_a_broken_source_is_the_end(machine, arrange, change, words):
    if arrange is not None:
        arrange(machine)
    change(machine)
    machine.aws.instance_role = "worker"
    told = await machine.refused(PRIVATE)
    assert all(each in told for each in words), told
    assert "s3cret" not in machine.ran.err + machine.ran.out
    assert machine.aws.count("imds") == 0


async def test_public_images_need_another_right_or_none(machine):
    machine.set_keys(machine.aws.identity("poor", may=()))
    machine.registry(Public(machine.aws), PUBLIC)
    machine.answer(machine.aws, "api.ecr-public.us-east-1.amazonaws.com")
    assert "sts:GetServiceBearerToken, or use auth_type: anonymous" in await machine.refused(PUBLIC)


# Where nothing is configured, the metadata service alone is asked.


async def test_a_guess_asks_the_metadata_service_alone(machine):
    guess: dict[str, Any] = {"auth_type": None}
    told = await machine.refused(PRIVATE, **guess)
    assert "none are configured or found" in told
    assert "the cloud gives no login" in told
    assert "looked at the EC2 metadata service" in told
    assert machine.aws.requests == ["imds", "imds"], "which is there, and has no role for it"
    instance(machine)
    settings = "region = eu-west-1\ncli_pager =\nretry_mode = standard\nuse_fips_endpoint = false\n"
    machine.config(f"[default]\n{settings}[profile a]\nrole_arn = x\n")
    login = {"username": "AWS", "password": "of-docker"}
    machine.write(".docker/config.json", json.dumps({"auths": {PRIVATE: login}}))
    assert "refused the credentials (" in await machine.refused(PRIVATE, **guess), "docker's"
    (machine.home / ".docker/config.json").unlink()
    assert await machine.who(**guess) == "instance:worker", "settings alone are no identity"
    machine.reachable[IMDS].fail("silent")
    assert "none are configured or found" in await machine.refused(PRIVATE, **guess)
    assert machine.ran.seconds == pytest.approx(1.0)
    machine.set(AWS_PROFILE="a")
    assert "profile 'a' needs either source_profile" in await machine.refused(PRIVATE, **guess)
    machine.write(".aws/credentials", "nonsense")
    told = await machine.refused(PRIVATE, **guess)
    assert "~/.aws/credentials is not a valid AWS configuration file" in told


async def test_a_machines_role_that_knows_nothing_of_public_images_is_nobody(machine, monkeypatch):
    instance(machine)
    login = Public(machine.aws)
    machine.registry(login, PUBLIC)
    machine.answer(machine.aws, "api.ecr-public.us-east-1.amazonaws.com")
    given = machine.aws._new_keys
    monkeypatch.setattr(
        machine.aws, "_new_keys", lambda name, field: given(name, field, frozenset({"ecr"}))
    )
    assert (await machine.check(PUBLIC, auth_type=None))["source"] is None
    assert login.issued == [False]
    assert await machine.who(auth_type=None) == "instance:worker"


# Services that fail for a while, or answer nonsense.


THROTTLED = b'{"__type":"com.amazonaws.ecr#ThrottlingException","message":"Rate exceeded"}'
NAMED = [("x-amzn-errortype", "TooManyRequestsException:http://internal/")]
IDP = b"<ErrorResponse><Error><Code>IDPCommunicationError</Code></Error></ErrorResponse>"


@pytest.mark.parametrize(
    "answer",
    [
        Response(503, [], b"<html>"),
        Response(429, [], b"{}"),
        Response(400, [], THROTTLED),
        Response(400, NAMED, b"{}"),
        Response(400, [], IDP),
        Response(200, [], b"not JSON"),
    ],
    ids=["503", "429", "throttled", "named in a header", "in XML", "cut off"],
)
async def test_a_service_that_is_busy_is_asked_twice_more(machine, answer):
    variables(machine)
    answer_first(machine.aws, answer, answer)
    assert await machine.who() == "user"
    assert (len(machine.asked), machine.ran.seconds) == (3, pytest.approx(3.0))
    answer_first(machine.aws, answer, answer, answer)
    await machine.refused(PRIVATE)
    assert len(machine.asked) == 6


async def test_a_service_that_cannot_be_reached_is_asked_twice_more(machine):
    web_identity(machine)
    machine.reachable[STS].fail("refused")
    error = (await machine.check(PRIVATE))["error"]
    assert f"at {STS}: no connection to {STS}:443: connection refused" in error["message"]
    assert error["code"] == "NETWORK_ERROR", "nobody has refused the identity"
    assert "trust policy" not in str(error["hint"]), "no permission is missing"
    assert machine.ran.seconds == pytest.approx(3.0)


async def test_a_containers_service_has_two_seconds_and_three_attempts(machine):
    container(machine)
    answer_first(machine.aws, Response(404), Response(500))
    assert await machine.who() == "container"
    assert machine.ran.seconds == pytest.approx(3.0)
    machine.reachable[ECS].fail("silent")
    told = await machine.refused(PRIVATE)
    assert "(check AWS_CONTAINER_CREDENTIALS_RELATIVE_URI, which names this address)" in told
    assert machine.ran.seconds == pytest.approx(3 * 2.0 + 3.0)


async def test_keys_from_an_agent_are_text_or_an_error(machine):
    """They go into a signature for the role, which has no form for half a character."""
    machine.config(f"{ROLE}credential_source = EcsContainer\n")
    container(machine)
    keys = json.dumps({"AccessKeyId": "A", "SecretAccessKey": "\ud800"}).encode()
    answer_first(machine.aws, *[Response(200, [], keys)] * 3)
    told = await machine.refused(PRIVATE)
    assert f"RELATIVE_URI at {ECS}: status 200: no usable answer" in told


def data(text: str) -> bytes:
    return f'{{"authorizationData":[{text}]}}'.encode()


BOMB = b"""<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;">]>
<AssumeRoleResponse><Credentials><AccessKeyId>&b;</AccessKeyId>
<SecretAccessKey>x</SecretAccessKey></Credentials></AssumeRoleResponse>"""
NONSENSE = {
    "nothing": b"",
    "too deep": b"[" * 100_000,
    "no text": b"\xff\xfe",
    "no token": data("{}"),
    "not base64": data('{"authorizationToken":"!"}'),
    "no password": data('{"authorizationToken":"QVdT"}'),
    "no time": data('{"authorizationToken":"QVdTOnB3","expiresAt":"soon"}'),
    "a bomb": BOMB,
}


@pytest.mark.parametrize("body", NONSENSE.values(), ids=NONSENSE)
async def test_nonsense_is_an_error_that_says_so(machine, body):
    for arrange in (web_identity, variables):
        arrange(machine)
        answer_first(machine.aws, *[Response(200, [], body)] * 3)
        told = await machine.refused(PRIVATE)
        assert ": status 200: no usable answer" in told or body == BOMB
    assert "&b;" not in told + machine.ran.err


@pytest.mark.parametrize("ends", ["-1e300", "NaN", f"1{'0' * 400}"])
async def test_an_end_that_no_calendar_has_is_not_shown(machine, ends):
    variables(machine)
    machine.aws.passwords["ecr"]["pw"] = float("inf")
    beyond = data(f'{{"authorizationToken":"QVdTOnB3","expiresAt":{ends}}}')
    answer_first(machine.aws, Response(200, [], beyond))
    row = await machine.check(PRIVATE)
    assert (row["error"], row["expires"]) == (None, None)
