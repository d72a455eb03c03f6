"""Mistakes at the clouds' services: each is refused and noted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from conformance.clouds.aws import Aws
from conformance.clouds.azure import CLOUDS, Directory, Exchange, Identity
from conformance.clouds.google import Google
from conformance.server.exchange import Site

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
