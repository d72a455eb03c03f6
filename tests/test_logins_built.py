"""The built program copies from and to registries of clouds, from an empty state and over TLS, under
the clouds' own names: a forward proxy knows those names and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess

import pytest

from conformance.clouds.aws import Aws, Private, Public
from conformance.clouds.azure import Identity
from conformance.clouds.google import google
from conformance.http import run_in_thread
from conformance.images import Seed
from conformance.names import names
from conformance.personas import imitate, persona
from tests.clouds import ECR, PRIVATE, STS
from tests.ends import held, only, program

pytestmark = pytest.mark.slow

PUBLIC = "public.ecr.aws"


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    with names(tmp_path_factory.mktemp("names")) as made:
        yield made


@pytest.fixture
def copy(pyz, known, clean_env):
    """Return a function that copies an image, and checks that no secret is told or left behind."""

    def run(source, target, env, secrets):
        ran = subprocess.run(
            [*program(pyz), "copy", "--json", "--no-artifacts", "-vv", source, target],
            env={**os.environ, **known.environ, **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert known.refused == []
        assert ran.returncode == 0, ran.stderr
        assert only(json.loads(ran.stdout)["images"])["status"] == "synced"
        left = [path.read_text("latin-1") for path in clean_env.rglob("*") if path.is_file()]
        shown = "".join((ran.stdout, ran.stderr, *left))
        assert not [secret for secret in secrets() if secret in shown]

    return run


def test_from_ecr_public_to_ecr_by_a_pods_identity(known, copy, tmp_path):
    aws = Aws()
    role = aws.role("pod")
    (tmp_path / "token").write_text(aws.web_token(role))
    login = Public(aws)
    private, public = imitate("ecr", auth=Private(aws)), imitate("ecr_public", auth=login)
    image = Seed(7).image(sizes=(900, 70)).load_into(public, "docker/library/app", tag="v1")
    private.repositories["app"]  # is created by that, as it is not by a push
    sites = {ECR: aws, STS: aws, PRIVATE: private, PUBLIC: public}
    sites |= {f"{name}.us-east-1.amazonaws.com": aws for name in ("api.ecr-public", "sts")}
    with contextlib.ExitStack() as stack:
        context = known.context([*sites])
        for host, site in sites.items():
            server = stack.enter_context(run_in_thread(site, ssl_context=context))
            stack.enter_context(known.known(host, server.port))
            if host == PRIVATE:
                target = server
        env = {"AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"), "AWS_ROLE_ARN": role.arn}
        source = f"{PUBLIC}/docker/library/app:v1"
        copy(source, f"{PRIVATE}/app:v1", env, lambda: aws.secrets)
        assert held(target, "app", image)
    # One login for each of the two services by who was to be found, and nothing else.
    owners = [[*map(aws.owner, given)] for given in aws.passwords.values()]
    assert owners == [[role.arn], [role.arn]]
    assert sorted(aws.requests) == ["ecr", "ecr-public", "sts", "sts"]
    assert login.issued == [True], "and one token"
    for site in (aws, private, public):
        site.journal.check()


def test_to_azure_in_china_by_a_federated_token(known, copy, tmp_path):
    with persona("acr-cn", names=known) as target, persona("strict") as source:
        image = Seed(5).index().load_into(source.app, "app", tag="v1")
        exchange = target.provider.tokens
        app = Identity(assertion="eyJ.fede-rated_1.sig")
        exchange.directory.identities.append(app)
        (tmp_path / "token").write_text(app.assertion)
        env = {"AZURE_CLIENT_ID": app.client_id, "AZURE_TENANT_ID": app.tenant}
        env["AZURE_FEDERATED_TOKEN_FILE"] = str(tmp_path / "token")
        issued = lambda: [*exchange.issued_tokens, *exchange.directory.issued_tokens]  # noqa: E731
        where = [f"{source.address}/app:v1", f"{target.address}/app:v1"]
        copy(*where, env, lambda: [app.assertion, *issued()])
        assert held(target, "app", image)
        assert exchange.directory.journal.count(status=200) == 1
        assert (exchange.exchanges, exchange.requests) == (1, 1)
        target.check()


@pytest.mark.parametrize("kind", ["service account", "metadata"])
def test_from_one_registry_of_google_to_another_by_one_login(known, copy, tmp_path, kind):
    with (
        google(known) as services,
        persona("gar", names=known) as source,
        persona("gcr", names=known) as target,
    ):
        for each in (source, target):
            each.provider.tokens.google = services.site
        image = Seed(8).image(sizes=(1000, 70_000))
        image.load_into(source.app, "project/private/app", tag="v1")
        env = services.environ
        if kind == "service account":
            (tmp_path / "key.json").write_text(json.dumps(services.site.service_account()))
            env = {"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "key.json")}
        where = ["europe-docker.pkg.dev/project/private/app:v1", "gcr.io/project/mirror:v1"]
        tokens = [each.provider.tokens._tokens for each in (source, target)]
        copy(*where, env, lambda: [*services.site.secrets, *tokens[0], *tokens[1]])
        assert held(target, "project/mirror", image)
        assert services.site.asked == (["metadata"] if kind == "metadata" else ["oauth2"])
        for each in (source, target):
            # One token for all: asked for with the access token, used as Bearer (section 5.2).
            assert only(each.journal.matching("GET", "token")).authorization.scheme == "basic"
        for each in (services, source, target):
            each.check()
