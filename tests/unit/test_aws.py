"""Signatures of requests to AWS, and the names of its services: as AWS publishes them, as
docs/protocol-facts.md section 4.4 has computed more, and as botocore has them.
"""

from __future__ import annotations

import botocore.auth
import botocore.awsrequest
import botocore.credentials
import botocore.endpoint_provider
import botocore.exceptions
import botocore.session
import pytest
from hypothesis import given
from hypothesis import strategies as st

from _regsync.auth.aws import Keys, endpoint, sign
from _regsync.auth.cloud import Request
from tests.fuzzing import fuzz

EXAMPLE = Keys("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")
THEN = 1440938160.0  # 2015-08-30T12:36:00Z
HOST = "https://example.amazonaws.com/"
API = "https://api.ecr.us-east-1.amazonaws.com/"
TARGET = "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken"
ECR = [("Content-Type", "application/x-amz-json-1.1"), ("X-Amz-Target", TARGET)]
FORM = [("Content-Type", "application/x-www-form-urlencoded")]
MINE = [("My-Header1", "value1"), ("My-Header2", '"a   b   c"')]
TOKEN = "6e86291e8372ff2a2260956d9b8aae1d763fbf315fa00fa31553b73ebf194267"
VECTORS = [
    ("", Request("GET", HOST, [], b""), "service",
        "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
    ("", Request("POST", HOST, FORM, b"Param1=value1"), "service",
        "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a"),
    (TOKEN, Request("GET", HOST, [], b""), "service",
        "07ec1639c89043aa0e3e2de82b96708f198cceab042d4a97044c66dd9f74e7f8"),
    ("", Request("GET", HOST, MINE, b""), "service",
        "acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736"),
    ("TESTSESSIONTOKEN", Request("POST", API, ECR, b"{}"), "ecr",
        "4f97774ff81377798af990a32ce33a36e3427e9fd062b01df0675a4dfa02c4f0"),
]  # fmt: skip


@pytest.mark.parametrize(("session", "unsigned", "service", "signature"), VECTORS)
def test_published_signatures(session, unsigned, service, signature):
    keys = EXAMPLE._replace(session_token=session)
    sent = dict(sign(keys, unsigned, service, "us-east-1", THEN).headers)
    assert sent["Authorization"].endswith(f"Signature={signature}")
    scope = f"20150830/us-east-1/{service}/aws4_request"
    assert f"Credential=AKIDEXAMPLE/{scope}, " in sent["Authorization"]
    assert sent.get("X-Amz-Security-Token", "") == session


WORDS = st.text("abcXYZ019-_.~ +/=%&?é", min_size=1, max_size=12)
NAMES = st.text("abz", min_size=1, max_size=6).map("X-M{}".format)


@fuzz(60)
@given(
    session=st.just("") | WORDS.map(lambda text: text.encode("ascii", "ignore").hex() + "x"),
    method=st.sampled_from(["GET", "POST", "PUT"]),
    headers=st.dictionaries(NAMES, st.text("ab c=\"';,", max_size=10), max_size=3),
    body=st.binary(max_size=40),
    service=st.sampled_from(["ecr", "sts", "ecr-public"]),
    now=st.floats(1e9, 2e9),
)
def test_signatures_are_botocores(session, method, headers, body, service, now):
    url = f"https://{service}.eu-west-1.amazonaws.com/"
    keys = EXAMPLE._replace(session_token=session)
    request = Request(method, url, [*headers.items()], body)
    ours = dict(sign(keys, request, service, "eu-west-1", now).headers)

    theirs = botocore.awsrequest.AWSRequest(method=method, url=url, headers={**headers}, data=body)
    theirs.context["timestamp"] = theirs.headers["X-Amz-Date"] = ours["X-Amz-Date"]
    if session:
        theirs.headers["X-Amz-Security-Token"] = session
    held = botocore.credentials.Credentials(keys.access_key, keys.secret_key, session or None)
    signer = botocore.auth.SigV4Auth(held, service, "eu-west-1")
    text = signer.string_to_sign(theirs, signer.canonical_request(theirs))
    names = signer.signed_headers(signer.headers_to_sign(theirs))
    assert ours["Authorization"].endswith(signer.signature(text, theirs))
    assert f"SignedHeaders={names}," in ours["Authorization"]


REGIONS = [
    "us-east-1", "eu-west-1", "ap-southeast-5", "mx-central-1", "us-gov-west-1", "cn-north-1",
    "eusc-de-east-1", "us-iso-east-1", "us-isob-east-1", "eu-isoe-west-1", "us-isof-south-1",
]  # fmt: skip
# Where botocore's rule and AWS's documents differ (docs/protocol-facts.md section 4.2).
KNOWN = {f"https://api.ecr-fips.{region}.amazonaws.com" for region in REGIONS[:5]}


@pytest.mark.parametrize("service", ["ecr", "ecr-public", "sts", "portal.sso"])
def test_names_of_services_are_botocores(service):
    loader = botocore.session.Session().get_component("data_loader")
    rules = loader.load_service_model(service.removeprefix("portal."), "endpoint-rule-set-1")
    provider = botocore.endpoint_provider.EndpointProvider(rules, loader.load_data("partitions"))
    is_public = service == "ecr-public"  # with FIPS it has a rule, but no documented endpoint
    same, differing = 0, set()
    for region in REGIONS[:1] if is_public else REGIONS:
        for fips in (False,) if is_public else (False, True):
            wanted = {"Region": region, "UseFIPS": fips, "UseDualStack": False}
            try:
                theirs = provider.resolve_endpoint(**wanted).url
            except botocore.exceptions.EndpointProviderError:
                continue  # no such service there
            if theirs == f"https://{endpoint(service, region, use_fips=fips)}":
                same += 1
            else:
                differing.add(theirs)
                assert theirs.replace("api.", "").endswith(endpoint("ecr", region, use_fips=True))
    assert differing == (KNOWN if service == "ecr" else set())
    assert same >= (1 if is_public else 10)
