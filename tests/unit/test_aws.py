"""Signatures of requests to AWS, as AWS publishes them, and as docs/protocol-facts.md section 4.4 has
computed more.
"""

from __future__ import annotations

import pytest

from _regsync.auth.aws import Keys, sign
from _regsync.auth.cloud import Request

EXAMPLE = Keys("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")
THEN = 1440938160.0  # 2015-08-30T12:36:00Z
HOST = "https://example.amazonaws.com/"
FORM = [("Content-Type", "application/x-www-form-urlencoded; charset=utf-8")]
ECR = [
    ("Content-Type", "application/x-amz-json-1.1"),
    ("X-Amz-Target", "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken"),
]
DEMO = (
    b"Action=AssumeRole&DurationSeconds=3600&RoleArn=arn%3Aaws%3Aiam%3A%3A123456789012%3Arole%2Fdemo"
    b"&RoleSessionName=test&Version=2011-06-15"
)
TOKEN = "6e86291e8372ff2a2260956d9b8aae1d763fbf315fa00fa31553b73ebf194267"


PARAM = [("Content-Type", "application/x-www-form-urlencoded")]
MINE = [("My-Header1", "value1"), ("My-Header2", '"a   b   c"')]
API, STS = "https://api.ecr.us-east-1.amazonaws.com/", "https://sts.us-east-1.amazonaws.com/"
SORTED = f"{HOST}?Param2=value2&Param1=value1"
VECTORS = [
    ("", Request("GET", HOST, [], b""), "service",
        "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
    ("", Request("POST", HOST, PARAM, b"Param1=value1"), "service",
        "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a"),
    (TOKEN, Request("GET", HOST, [], b""), "service",
        "07ec1639c89043aa0e3e2de82b96708f198cceab042d4a97044c66dd9f74e7f8"),
    ("", Request("GET", SORTED, [], b""), "service",
        "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500"),
    ("", Request("GET", HOST, MINE, b""), "service",
        "acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736"),
    ("", Request("POST", API, ECR, b"{}"), "ecr",
        "527a2155e9afc2426cb4c659023df9c031e8103458f349819615ff25111f5de0"),
    ("TESTSESSIONTOKEN", Request("POST", API, ECR, b"{}"), "ecr",
        "4f97774ff81377798af990a32ce33a36e3427e9fd062b01df0675a4dfa02c4f0"),
    ("", Request("POST", STS, FORM, DEMO), "sts",
        "8124828011764c0555dda7e3cabb12399dfd6340d261abb94d8061fd0cc9eaad"),
]  # fmt: skip


@pytest.mark.parametrize(("session", "request_", "service", "signature"), VECTORS)
def test_published_vectors(session: str, request_: Request, service: str, signature: str) -> None:
    keys = EXAMPLE._replace(session_token=session)
    sent = dict(sign(keys, request_, service, "us-east-1", THEN).headers)
    assert sent["Authorization"].endswith(f"Signature={signature}")
    scope = f"20150830/us-east-1/{service}/aws4_request"
    assert f"Credential=AKIDEXAMPLE/{scope}, " in sent["Authorization"]
    assert sent.get("X-Amz-Security-Token", "") == session
