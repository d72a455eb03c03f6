"""ECR's logins: the signature, the chain, what is said when there is nothing; botocore and moto as
second opinions.

The persona (conformance/clouds/aws.py) verifies signatures and words by itself; botocore, driven through
the same persona, says whether that is what AWS's own programs send, and finds the same identity
from the same files and variables.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import anyio
import anyio.lowlevel
import botocore.auth
import botocore.awsrequest
import botocore.credentials
import botocore.endpoint_provider
import botocore.exceptions
import botocore.httpsession
import botocore.session
import botocore.tokens
import botocore.utils
import pytest
from botocore.compat import HTTPHeaders
from hypothesis import given, settings
from hypothesis import strategies as st
from moto import mock_aws
from moto.core.models import botocore_stubber

from _regsync.auth import aws
from _regsync.auth.aws import Keys, is_configured, sign
from _regsync.auth.cloud import Answer, Login, Request
from _regsync.auth.credentials import Credential
from _regsync.errors import AuthError
from conformance.clouds.aws import ACCOUNT
from tests.inside.aws_machine import (
    PRIVATE,
    SOURCES,
    Source,
    World,
    config_file,
    container,
    container_with_a_token,
    credentials_file,
    environment,
    environment_for_a_while,
    instance,
    keys_of,
    registry,
    role_by,
    role_of_a_source_profile,
    sso,
    web_identity,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def world(clean_env: Path) -> World:
    return World(clean_env, instance_role=None)


# SigV4: docs/protocol-facts.md section 4.4.

EXAMPLE = Keys("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")
ECR = [
    ("Content-Type", "application/x-amz-json-1.1"),
    ("X-Amz-Target", "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken"),
]


words = st.text("abcXYZ019-_.~ +/=%&?é", min_size=1, max_size=12)


@settings(max_examples=60)
@given(
    session=st.one_of(
        st.just(""), words.map(lambda text: text.encode("ascii", "ignore").hex() + "x")
    ),
    method=st.sampled_from(["GET", "POST", "PUT"]),
    path=st.lists(
        st.text("abcXYZ019-_.~", min_size=1, max_size=8).filter(lambda part: part.strip(".")),
        max_size=3,
    ),
    query=st.dictionaries(words, words, max_size=3),
    headers=st.dictionaries(
        st.from_regex(r"X-[A-Z][a-z]{1,6}", fullmatch=True),
        st.text("ab c=\"';,", max_size=10),
        max_size=3,
    ),
    body=st.binary(max_size=40),
    service=st.sampled_from(["ecr", "sts", "ecr-public"]),
    now=st.floats(1e9, 2e9),
)
def test_signatures_are_botocores(
    session: str,
    method: str,
    path: list[str],
    query: dict[str, str],
    headers: dict[str, str],
    body: bytes,
    service: str,
    now: float,
) -> None:
    url = f"https://{service}.eu-west-1.amazonaws.com/{'/'.join(path)}"
    url += f"?{urlencode(query, quote_via=quote)}" if query else ""
    keys = EXAMPLE._replace(session_token=session)
    request = Request(method, url, [*headers.items()], body)
    ours = dict(sign(keys, request, service, "eu-west-1", now).headers)
    theirs = botocore.awsrequest.AWSRequest(
        method=method, url=url, headers=dict(headers), data=body
    )
    theirs.context["timestamp"] = ours["X-Amz-Date"]
    held = botocore.credentials.Credentials(keys.access_key, keys.secret_key, session or None)
    signer = botocore.auth.SigV4Auth(held, service, "eu-west-1")
    theirs.headers["X-Amz-Date"] = ours["X-Amz-Date"]
    if session:
        theirs.headers["X-Amz-Security-Token"] = session
    text = signer.string_to_sign(theirs, signer.canonical_request(theirs))
    assert ours["Authorization"].endswith(signer.signature(text, theirs))
    assert (
        f"SignedHeaders={signer.signed_headers(signer.headers_to_sign(theirs))},"
        in ours["Authorization"]
    )


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("", ""),
        ("region", "SignatureDoesNotMatch"),
        ("service", "SignatureDoesNotMatch"),
        ("secret", "SignatureDoesNotMatch"),
        ("body", "SignatureDoesNotMatch"),
        ("early", "SignatureDoesNotMatch"),
        ("late", "SignatureDoesNotMatch"),
        ("added header", "SignatureDoesNotMatch"),
        ("no session", "UnrecognizedClientException"),
        ("unsigned", "MissingAuthenticationTokenException"),
    ],
)
def test_the_services_here_take_a_good_signature_and_no_other(
    world: World, change: str, name: str
) -> None:
    """What the persona lets pass, AWS would: each part of a signature counts."""
    user, url, body = (
        world.aws.identity("role", lasting=False),
        "https://api.ecr.eu-west-1.amazonaws.com/",
        b"{}",
    )
    keys = Keys(
        user.access,
        user.secret + "x" * (change == "secret"),
        user.session * (change != "no session"),
    )
    now = world.aws.now() + {"early": -600.0, "late": 600.0}.get(change, 0.0)
    service, region = (
        "sts" if change == "service" else "ecr",
        "us-east-1" if change == "region" else "eu-west-1",
    )
    sent = sign(keys, Request("POST", url, ECR, body), service, region, now).headers
    if change == "added header":
        sent.append(("X-Amz-Content-Sha256", "unsigned"))
    if change == "unsigned":
        sent.pop()
    answer = world.answer("POST", url, sent, b"{ }" if change == "body" else body)
    assert (answer.status, answer.json().get("__type", "")) == (400 if change else 200, name)


# Names of services: sections 4.1 and 4.2.

REGIONS = [
    "us-east-1", "eu-west-1", "ap-southeast-5", "mx-central-1", "us-gov-west-1", "cn-north-1",
    "eusc-de-east-1", "us-iso-east-1", "us-isob-east-1", "eu-isoe-west-1", "us-isof-south-1",
]  # fmt: skip
IDS = dict([("ecr",) * 2, ("ecr-public",) * 2, ("sts",) * 2, ("portal.sso", "sso")])


@pytest.mark.parametrize("service", sorted(IDS))
def test_names_are_botocores(service: str) -> None:
    """But for one, where its rule and AWS's documents differ (section 4.2)."""
    loader = botocore.session.Session().get_component("data_loader")
    rules = loader.load_service_model(IDS[service], "endpoint-rule-set-1")
    provider = botocore.endpoint_provider.EndpointProvider(rules, loader.load_data("partitions"))
    differ, same = [], 0
    for region in REGIONS if service != "ecr-public" else ("us-east-1",):
        for fips in (False, True):
            if fips and service == "ecr-public":
                continue  # a rule, but no endpoint that is documented
            try:
                theirs = provider.resolve_endpoint(
                    Region=region, UseFIPS=fips, UseDualStack=False
                ).url
            except botocore.exceptions.EndpointProviderError:
                continue  # no such service there
            ours = f"https://{aws.endpoint(service, region, use_fips=fips)}"
            same += theirs == ours
            if theirs != ours:
                differ.append((theirs, ours))
    known = [
        (f"https://api.ecr-fips.{region}.amazonaws.com", f"https://ecr-fips.{region}.amazonaws.com")
        for region in REGIONS[:5]
    ]
    assert differ == (known if service == "ecr" else [])
    assert same >= (1 if service == "ecr-public" else 10)


@pytest.mark.rule("R8", "R20")
@pytest.mark.parametrize(
    ("host", "asked"),
    [
        (PRIVATE, "api.ecr.eu-west-1.amazonaws.com"),
        (f"{ACCOUNT}.dkr.ecr-fips.us-east-2.amazonaws.com", "ecr-fips.us-east-2.amazonaws.com"),
        (f"{ACCOUNT}.dkr-ecr.us-west-2.on.aws", "api.ecr.us-west-2.amazonaws.com"),
        (f"{ACCOUNT}.dkr-ecr-fips.us-gov-west-1.on.aws", "ecr-fips.us-gov-west-1.amazonaws.com"),
        *(
            (f"{ACCOUNT}.dkr.ecr.{place}", f"api.ecr.{place}")
            for place in (
                "us-gov-east-1.amazonaws.com",
                "cn-northwest-1.amazonaws.com.cn",
                "eusc-de-east-1.amazonaws.eu",
                "us-iso-east-1.c2s.ic.gov",
                "us-isob-east-1.sc2s.sgov.gov",
                "eu-isoe-west-1.cloud.adc-e.uk",
                "us-isof-south-1.csp.hci.ic.gov",
            )
        ),
        ("public.ecr.aws", "api.ecr-public.us-east-1.amazonaws.com"),
    ],
)
async def test_a_registrys_name_tells_whom_to_ask(world: World, host: str, asked: str) -> None:
    user = world.aws.identity("user")
    world.environ |= {"AWS_ACCESS_KEY_ID": user.access, "AWS_SECRET_ACCESS_KEY": user.secret}
    world.environ["AWS_REGION"] = "ap-south-1"  # has no say in it
    assert await world.who(host) == "user"
    assert [entry.headers["host"] for entry in world.aws.journal.entries] == [asked]


# The chain: sections 4.5 and 4.6. Each source arranges a machine (tests/inside/aws_machine.py).


@pytest.mark.parametrize("source", sorted(SOURCES))
async def test_each_source_logs_in_with_so_many_requests(world: World, source: str) -> None:
    arrange, asked = SOURCES[source]
    expected = arrange(world)
    assert await world.who() == expected
    assert world.aws.requests == asked.split()
    # Whoever comes back after the password has ended is asked for everything anew: keys have ended
    # long before.
    assert await world.who() == expected
    assert world.aws.requests == asked.split() * 2
    # Metadata is nearby or absent; only there a time is set for a whole exchange.
    assert {"imds": 1.0, "container": 2.0}.get(asked.split()[0]) == world.patience[0]
    assert world.patience[-1] is None


@pytest.mark.parametrize("source", sorted(SOURCES))
def test_botocore_finds_the_same(
    world: World, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same files, the same variables, and the same services: the persona takes what AWS's
    programs send.
    """
    arrange, _ = SOURCES[source]
    expected = arrange(world)
    assert botocores(world, monkeypatch) == expected
    world.aws.journal.check()


def botocores(world: World, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return who botocore says that it is."""
    for name, value in world.environ.items():
        monkeypatch.setenv(name, value)
    cache = str(world.home / ".aws/sso/cache")
    monkeypatch.setattr(botocore.credentials.SSOProvider, "_SSO_TOKEN_CACHE_DIR", cache)
    monkeypatch.setattr(botocore.tokens.SSOTokenProvider, "_SSO_TOKEN_CACHE_DIR", cache)
    monkeypatch.setattr(botocore.utils.ContainerMetadataFetcher, "SLEEP_TIME", 0)

    def send(_: Any, request: Any) -> Any:
        if urlsplit(request.url).hostname in world.down:
            raise botocore.exceptions.ConnectionClosedError(endpoint_url=request.url)
        body = request.body if isinstance(request.body, bytes) else (request.body or "").encode()
        headers = [(str(name), _text(value)) for name, value in request.headers.items()]
        answer = world.answer(request.method, request.url, headers, body)
        raw = io.BytesIO(answer.data)
        raw.stream = lambda **_: iter([answer.data])  # type: ignore[attr-defined]
        return botocore.awsrequest.AWSResponse(
            request.url, answer.status, dict(answer.headers), raw
        )

    monkeypatch.setattr(botocore.httpsession.URLLib3Session, "send", send)
    session = botocore.session.Session()
    session.set_config_variable("region", "eu-west-1")
    found = session.get_credentials()
    assert found is not None
    return world.aws.identities[found.get_frozen_credentials().access_key].name


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


async def test_a_role_of_the_environment_is_for_a_profile_that_is_named(world: World) -> None:
    """The variables come first of all, so only `cloud_profile` gets as far as the profile."""
    expected = role_by("Environment")(world)
    assert await world.who() == "user"
    assert await world.who(auth_type="ecr", cloud_profile="named") == expected


async def test_cloud_profile_is_used_instead_of_all_else(world: World) -> None:
    environment(world)
    web_identity(world)
    credentials_file(world)
    text = (world.home / ".aws/credentials").read_text()
    world.write(".aws/credentials", f"{text}[other]\n{keys_of(world.aws.identity('other'))}")
    assert await world.who(auth_type="ecr", cloud_profile="other") == "other"


@pytest.mark.parametrize("variable", ["AWS_REGION", "AWS_DEFAULT_REGION", "profile", ""])
async def test_where_sts_is_asked(world: World, variable: str) -> None:
    web_identity(world)
    if variable == "profile":
        world.write(".aws/config", "[default]\nregion = sa-east-1\n")
    elif variable:
        world.environ[variable] = "sa-east-1"
    await world.who()
    region = "sa-east-1" if variable else "eu-west-1"
    hosts = [entry.headers["host"] for entry in world.aws.journal.entries]
    assert hosts == [f"sts.{region}.amazonaws.com", "api.ecr.eu-west-1.amazonaws.com"]


@pytest.mark.parametrize("by_profile", [False, True])
async def test_fips_is_asked_for_by_variable_or_profile(world: World, by_profile: bool) -> None:
    web_identity(world)
    if by_profile:
        world.write(".aws/config", "[default]\nuse_fips_endpoint = true\n")
    else:
        world.environ["AWS_USE_FIPS_ENDPOINT"] = "true"
    await world.who()
    hosts = [entry.headers["host"] for entry in world.aws.journal.entries]
    assert hosts == ["sts-fips.eu-west-1.amazonaws.com", "ecr-fips.eu-west-1.amazonaws.com"]


async def test_a_login_says_when_it_ends_and_shows_no_secret(world: World) -> None:
    environment(world)
    login = await world.log_in()
    assert login is not None
    assert login.expires == pytest.approx(world.aws.now() + 43200, abs=5)
    public = await world.log_in("public.ecr.aws")
    assert public is not None
    assert public.credential.password in world.aws.passwords["ecr-public"]
    for each in (login, public):
        assert not any(secret in repr(each) for secret in world.aws.secrets)
    assert login.credential.found_at == "AWS_ACCESS_KEY_ID"


# What is said when a source is broken, and that nothing else is tried then.


async def refused(world: World, host: str = PRIVATE, **options: Any) -> AuthError:
    with pytest.raises(AuthError) as caught:
        await world.log_in(host, **options)
    error = caught.value
    shown = f"{error} {error.hint}"
    assert error.fatal
    assert not [secret for secret in world.aws.secrets if secret in shown]
    assert len(shown) < 1200
    return error


async def test_when_there_is_nothing_every_place_is_named(world: World) -> None:
    error = await refused(world)
    assert str(error) == (
        f"registry 'r': no AWS credentials for {PRIVATE}; looked at AWS_ACCESS_KEY_ID, AWS_WEB_IDENTITY_TOKEN_FILE, "
        "profile 'default' in ~/.aws/config and ~/.aws/credentials, AWS_CONTAINER_CREDENTIALS_FULL_URI, "
        "the EC2 metadata service at http://169.254.169.254: status 404"
    )
    assert "role" in str(error.hint)
    world.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    assert "(AWS_EC2_METADATA_DISABLED)" in str(await refused(world))
    assert world.aws.requests == ["imds", "imds"], "and never an address that was switched off"


def broken(arrange: Source, config: str = "", **environ: str) -> Source:
    def changed(world: World) -> str:
        arrange(world)
        if config:
            found = world.home / ".aws/config"
            world.write(".aws/config", (found.read_text() if found.exists() else "") + config)
        world.environ |= environ
        return ""

    return changed


def nothing(world: World) -> str:
    return ""


def without(arrange: Source, path: str) -> Source:
    def changed(world: World) -> str:
        arrange(world)
        (world.home / path).unlink()
        return ""

    return changed


def wrong_clock(world: World) -> str:
    environment(world)
    world.skew = 3600.0
    return ""


def denied(world: World) -> str:
    user = world.aws.identity("poor", may=("sts",))
    world.environ |= {"AWS_ACCESS_KEY_ID": user.access, "AWS_SECRET_ACCESS_KEY": user.secret}
    return ""


def expired_keys(world: World) -> str:
    environment_for_a_while(world)
    next(iter(world.aws.identities.values())).expires = 0.0
    return ""


def wrong_secret(world: World) -> str:
    environment_for_a_while(world)
    world.environ["AWS_SECRET_ACCESS_KEY"] += "x"
    return ""


def stranger(world: World) -> str:
    role_of_a_source_profile(world)
    next(iter(world.aws.roles.values())).trusts = "somebody else"
    return ""


def expired_sso(world: World) -> str:
    sso(world)
    world.sso_cache("corp", world.aws.sso_login((ACCOUNT, "reader"), life=-5.0))
    return ""


def unreadable_sso(world: World) -> str:
    sso(world)
    (path,) = world.home.glob(".aws/sso/cache/*.json")
    path.write_text('{"accessToken": 5}')
    return ""


def sso_without_the_role(world: World) -> str:
    sso(world)
    for login in world.aws.logins.values():
        login.roles = set()
    return ""


def foreign_web_token(world: World) -> str:
    web_identity(world)
    world.aws.web_tokens.clear()
    return ""


ROLE = "role_arn = arn:aws:iam::1:role/x\n"
FAILURES: dict[str, tuple[Source, str]] = {
    "half the keys": (broken(nothing, AWS_ACCESS_KEY_ID="AKIA"), "gives no AWS credentials: the access key"),
    "wrong secret": (wrong_secret, "AWS_ACCESS_KEY_ID at api.ecr.eu-west-1.amazonaws.com: status 400: Sig"),
    "expired keys": (expired_keys, "ExpiredTokenException: The security token included"),
    "denied": (denied, "User: poor is not authorized to perform: ecr:GetAuthorizationToken"),
    "wrong clock": (wrong_clock, "Signature expired or not yet current"),
    "line break": (broken(nothing, AWS_ACCESS_KEY_ID="A\nB", AWS_SECRET_ACCESS_KEY="x"), "AWS_ACCESS_KEY_ID"),
    "no such profile": (broken(config_file, AWS_PROFILE="gone"), "there is no profile 'gone' in ~/.aws/config and"),
    "no token file": (without(web_identity, "token"), "AWS_WEB_IDENTITY_TOKEN_FILE: "),
    "no role": (broken(web_identity, AWS_ROLE_ARN=""), "AWS_ROLE_ARN or role_arn is missing, or is not text"),
    "role that is no text": (
        broken(web_identity, AWS_ROLE_ARN="\udcff"),
        "AWS_ROLE_ARN or role_arn is missing, or is not text",
    ),
    "key that is no text": (
        broken(nothing, AWS_ACCESS_KEY_ID="A", AWS_SECRET_ACCESS_KEY="\udcff"),
        "AWS_ACCESS_KEY_ID gives no AWS credentials: the access key or its secret is missing, or is not",
    ),
    "foreign token": (foreign_web_token, "InvalidIdentityToken: no provider knows ***"),
    "no file of profiles": (
        broken(nothing, "aws_access_key_id\n"),
        "~/.aws/config is not a valid AWS configuration file",
    ),
    "program": (broken(nothing, "[default]\ncredential_process = /bin/keys --secret s3cret\n"), "credential_process"),
    "login": (broken(nothing, "[default]\nlogin_session = arn:aws:iam::1:user/x\n"), "has login_session"),
    "program and login": (
        broken(nothing, "[default]\nlogin_session = arn:aws:iam::1:user/x\ncredential_process = /bin/keys\n"),
        "has credential_process",
    ),
    "mfa": (broken(nothing, f"[default]\n{ROLE}source_profile = a\nmfa_serial = x\n"), "mfa_serial"),
    "no source": (broken(nothing, f"[default]\n{ROLE}"), "needs either source_profile or credential_source"),
    "two sources": (
        broken(nothing, f"[default]\n{ROLE}source_profile = a\ncredential_source = EcsContainer\n"),
        "needs either source_profile or credential_source",
    ),
    "unknown source": (broken(nothing, f"[default]\n{ROLE}credential_source = Moon\n"), "(EcsContainer,"),
    "source without keys": (
        broken(nothing, f"[default]\n{ROLE}source_profile = a\n[profile a]\nregion = x\n"),
        "profile 'default': its source of keys has none: profile 'a' in ~/.aws/config and",
    ),
    "source that is not there": (broken(nothing, f"[default]\n{ROLE}source_profile = a\n"), "there is no profile 'a'"),
    "source that is silent": (
        broken(nothing, f"[default]\n{ROLE}credential_source = Ec2InstanceMetadata\n"),
        "its source of keys has none: the EC2 metadata service at",
    ),
    "circle": (
        broken(nothing, f"[default]\n{ROLE}source_profile = a\n[profile a]\n{ROLE}source_profile = default\n"),
        "profile 'default' is its own source: default -> a -> default",
    ),
    "not trusted": (stranger, "403: AccessDenied: User: base is not authorized to perform: sts:AssumeRole"),
    "sso without a login": (
        without(sso, f".aws/sso/cache/{hashlib.sha1(b'corp').hexdigest()}.json"),
        ".json is missing or empty",
    ),
    "sso expired": (expired_sso, "profile 'dev': its SSO login ended at 20"),
    "sso that is no login": (unreadable_sso, "profile 'dev': its SSO login is not readable in"),
    "sso without the role": (sso_without_the_role, "403: ForbiddenException: No access"),
    "sso in half": (broken(nothing, "[default]\nsso_account_id = 1\n"), "sso_start_url, sso_region, sso_role_name"),
    "sso told twice": (broken(sso, AWS_PROFILE="b", config="[profile b]\nsso_session = corp\nsso_account_id = 1\n"
        "sso_role_name = x\nsso_region = us-east-1\n"), "or different in its sso-session: sso_region"),
    "container elsewhere": (
        broken(nothing, AWS_CONTAINER_CREDENTIALS_FULL_URI="http://10.0.0.1/keys"),
        "http://10.0.0.1/keys is neither https nor a metadata address",
    ),
    "container, led astray": (
        broken(nothing, AWS_CONTAINER_CREDENTIALS_RELATIVE_URI="@evil.test/keys"),
        "http://169.254.170.2@evil.test/keys is neither https nor a metadata address",
    ),
    "container without its token file": (
        broken(container_with_a_token, AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE="/nowhere"),
        "/nowhere is missing or empty",
    ),
}  # fmt: skip


@pytest.mark.parametrize("failure", sorted(FAILURES))
async def test_a_broken_source_is_the_end(world: World, failure: str) -> None:
    arrange, words = FAILURES[failure]
    arrange(world)
    world.aws.instance_role = "worker" if "silent" not in failure else None
    error = await refused(world)
    assert words in str(error), str(error)
    assert "s3cret" not in f"{error}{error.hint}"
    if failure not in ("wrong clock", "source that is silent"):
        assert "imds" not in world.aws.requests
    world.aws.journal.check()


async def test_what_may_help_is_said(world: World) -> None:
    expired_sso(world)
    assert (await refused(world)).hint == "run `aws sso login --profile dev`"
    stranger(world)
    assert (await refused(world)).hint == "check the role's ARN, and its trust policy"
    denied(world)
    assert (await refused(world)).hint == "allow this identity ecr:GetAuthorizationToken"
    public = await refused(world, "public.ecr.aws")
    assert "sts:GetServiceBearerToken, or use auth_type: anonymous" in str(public.hint)


@pytest.mark.parametrize("host", ["registry.corp.test", "10.0.0.1"])
async def test_a_host_of_another_name_needs_a_region(world: World, host: str) -> None:
    environment(world)
    error = await refused(world, host, auth_type="ecr")
    assert error.hint == "set AWS_REGION"
    world.environ["AWS_REGION"] = "eu-north-1"
    assert await world.who(host, auth_type="ecr") == "user"
    assert world.aws.journal.entries[-1].headers["host"] == "api.ecr.eu-north-1.amazonaws.com"
    world.environ["AWS_REGION"] = "evil.test/"
    assert "'evil.test/' is not an AWS region" in str(await refused(world, host, auth_type="ecr"))


# Guessing, and whether there is anything to guess from: docs/design.md section 3.


async def test_a_guess_asks_the_metadata_service_alone(world: World) -> None:
    assert await world.log_in(probing_metadata=True) is None
    assert world.aws.requests == ["imds", "imds"], (
        "which is there, and has no role for this machine"
    )
    assert world.patience == [1.0, 1.0]
    instance(world)
    assert await world.who(probing_metadata=True) == "instance:worker"
    credentials_file(world)
    assert await world.who(probing_metadata=True) == "instance:worker", "a file is not a guess"
    world.down.add("169.254.169.254")
    world.patience.clear()
    assert await world.log_in(probing_metadata=True) is None
    assert world.patience == [1.0]


async def test_a_machines_role_that_knows_nothing_of_public_images_is_nobody(world: World) -> None:
    instance(world)
    given = world.aws._new_keys
    world.aws._new_keys = lambda name, field: given(name, field, frozenset({"ecr"}))  # type: ignore[method-assign]
    assert await world.log_in("public.ecr.aws", probing_metadata=True) == Login(
        Credential(), math.inf
    )
    assert await world.who(probing_metadata=True) == "instance:worker"


@pytest.mark.parametrize("source", sorted(SOURCES))
def test_what_is_configured_is_seen_without_asking(world: World, source: str) -> None:
    SOURCES[source][0](world)
    assert is_configured(world.machine) == (
        not source.startswith("instance") or "profile" in source
    )
    assert world.aws.requests == []


def test_a_file_with_a_region_alone_is_no_identity(world: World) -> None:
    assert not is_configured(world.machine)
    world.write(
        ".aws/config",
        "[default]\nregion = eu-west-1\noutput = json\n[profile a]\naws_access_key_id = x\n",
    )
    assert not is_configured(world.machine)
    world.write(".aws/credentials", "nonsense")
    with pytest.raises(AuthError, match="is not a valid AWS configuration file"):
        is_configured(world.machine)


# Services that fail for a while, or answer nonsense.


def answering(world: World, *answers: tuple[int, dict[str, str], bytes]) -> None:
    """Let the next requests be answered so."""
    left = [*answers]
    fetch = world.fetch

    async def instead(
        method: str, url: str, headers: Any, body: bytes, seconds: float | None = None
    ) -> Any:
        if not left:
            return await fetch(method, url, headers, body, seconds)
        world.aws.requests.append("instead")
        return Answer(*left.pop(0))

    world.fetch = instead  # type: ignore[method-assign]


THROTTLED = b'{"__type":"com.amazonaws.ecr#ThrottlingException","message":"Rate exceeded"}'


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    "answer",
    [
        (500, {}, b""),
        (503, {}, b"<html>"),
        (429, {}, b"{}"),
        (400, {}, THROTTLED),
        (400, {"x-amzn-errortype": "TooManyRequestsException:http://internal/"}, b"{}"),
        (200, {}, b"not JSON"),
    ],
)
async def test_a_service_that_is_busy_is_asked_twice_more(world: World, answer: Any) -> None:
    environment(world)
    answering(world, answer, answer)
    began = anyio.current_time()
    assert await world.who() == "user"
    assert world.aws.requests == ["instead", "instead", "ecr"]
    assert anyio.current_time() - began == 3.0
    answering(world, answer, answer, answer)
    await refused(world)
    assert world.aws.requests[3:] == ["instead"] * 3


async def test_an_end_beyond_all_numbers_is_none(world: World) -> None:
    environment(world)
    data = {"authorizationToken": base64.b64encode(b"AWS:pw").decode(), "expiresAt": 10**400}
    answering(world, (200, {}, json.dumps({"authorizationData": [data]}).encode()))
    login = await world.log_in()
    assert login is not None
    assert login.expires == math.inf


@pytest.mark.virtual_time
async def test_keys_from_an_agent_are_text_or_an_error(world: World) -> None:
    """They go into a signature for the role, which has no form for half a character."""
    broken(nothing, f"[default]\n{ROLE}credential_source = EcsContainer\n")(world)
    world.environ["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = "http://127.0.0.1/keys"
    keys = json.dumps({"AccessKeyId": "A", "SecretAccessKey": "\ud800"}).encode()
    answering(world, *[(200, dict[str, str](), keys)] * 3)
    error = await refused(world)
    assert "AWS_CONTAINER_CREDENTIALS_FULL_URI at 127.0.0.1: status 200: no usable" in str(error)


@pytest.mark.virtual_time
async def test_a_service_that_cannot_be_reached_is_asked_twice_more(world: World) -> None:
    web_identity(world)
    world.down.add("sts.eu-west-1.amazonaws.com")
    error = await refused(world)
    assert "at sts.eu-west-1.amazonaws.com: sts.eu-west-1.amazonaws.com is down" in str(error)
    assert len(world.patience) == 3
    assert error.hint is None, "no permission is missing"
    assert error.code == "NETWORK_ERROR", "nobody has refused the identity"
    world.down.clear()
    idp = b"<ErrorResponse><Error><Code>IDPCommunicationError</Code><Message>x</Message></Error></ErrorResponse>"
    answering(world, (400, {}, idp))
    assert (await world.who()).endswith("role/pod")


@pytest.mark.virtual_time
async def test_a_containers_service_is_asked_three_times(world: World) -> None:
    container(world)
    answering(world, (404, {}, b""), (500, {}, b""))
    began = anyio.current_time()
    assert await world.who() == "container"
    assert anyio.current_time() - began == 3.0
    world.down.add("169.254.170.2")
    hint = "check AWS_CONTAINER_CREDENTIALS_RELATIVE_URI, which names this address"
    assert (await refused(world)).hint == hint


BOMB = b"""<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;">]>
<AssumeRoleResponse><Credentials><AccessKeyId>&b;</AccessKeyId><SecretAccessKey>x</SecretAccessKey></Credentials></AssumeRoleResponse>"""


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b'{"authorizationData":[]}',
        b'{"authorizationData":[{}]}',
        b"[" * 100_000,
        b'{"authorizationData":[{"authorizationToken":"!"}]}',
        b'{"authorizationData":[{"authorizationToken":"QVdT"}]}',
        b'{"authorizationData":[{"authorizationToken":"QVdTOnB3","expiresAt":"soon"}]}',
        b'{"authorizationData":[{"authorizationToken":7}]}',
        b'{"authorizationData":"x"}',
        b"\xff\xfe",
        b"<a><b></a>",
        BOMB,
    ],
)
async def test_nonsense_is_an_error_that_says_so(world: World, body: bytes) -> None:
    environment(world)
    answering(world, *[(200, dict[str, str](), body)] * 3)
    error = await refused(world)
    assert ": status 200: no usable answer" in str(error)
    world.environ.clear()
    web_identity(world)
    answering(world, *[(200, dict[str, str](), body)] * 3)
    await refused(world)


# moto, which serves STS and ECR (no SSO portal, no ECR Public): what it takes and gives, without a
# socket.


async def of_moto(
    method: str, url: str, headers: list[tuple[str, str]], body: bytes, seconds: float | None = None
) -> Answer:
    await anyio.lowlevel.checkpoint()
    sent = botocore.awsrequest.AWSPreparedRequest(
        method, url, HTTPHeaders.from_pairs(headers), body, False
    )
    status, answered, content = botocore_stubber.process_request(sent)  # type: ignore[misc]
    data = content.encode() if isinstance(content, str) else bytes(content)
    heads = {str(name).lower(): str(value) for name, value in answered.items()}
    return Answer(status, heads, data)


@pytest.mark.parametrize(
    "source", ["environment", "web identity", "role of a profile", "role of a role"]
)
async def test_moto_takes_it_too(world: World, source: str) -> None:
    SOURCES[source][0](world)
    machine = world.machine._replace(fetch=of_moto)
    with mock_aws():
        login = await aws.log_in(machine, registry(), probing_metadata=False)
    assert login is not None
    assert login.credential.username == "AWS"
    assert login.credential.password == f"{ACCOUNT}-auth-token"
    assert login.expires == 1420070400.0, "as moto has it"
