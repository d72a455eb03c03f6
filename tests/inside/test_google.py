"""Google's application default credentials against strict services, and against google-auth with
the same files.
"""

from __future__ import annotations

import base64
import datetime
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from urllib.parse import parse_qsl, quote, urlsplit

import anyio
import pytest

from _regsync.auth import google as auth_google
from _regsync.auth.cloud import Answer, CloudEnvironment, Login
from _regsync.config import Registry
from _regsync.errors import AuthError, ConfigError, ConnectFailed
from conformance.clouds.google import CLIENT, HOSTS, METADATA, Google, make_key
from conformance.messages import Request, Response

HOME = "/home/someone"
WELL_KNOWN = f"{HOME}/.config/gcloud/application_default_credentials.json"
NAMED = "/keys/mine.json"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
NOW = 1_800_000_000.25
REGISTRY = Registry(
    alias="mine",
    scheme="https",
    host="europe-docker.pkg.dev",
    port=443,
    kind="gar",
    auth_type="gar",
)


pytestmark = pytest.mark.anyio


@dataclass
class Host:
    """A machine of its own: environment, files and a line to Google's services in memory."""

    google: Google
    environ: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    home: str | None = HOME
    # What answers instead, by a host's name: an answer, an error, or a function of the request.
    instead: dict[str, Any] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    seconds: list[float | None] = field(default_factory=list)

    @property
    def machine(self) -> CloudEnvironment:
        return CloudEnvironment(self.environ, self.home, self.files.get, lambda: NOW, self.fetch)

    async def fetch(
        self,
        method: str,
        url: str,
        headers: list[tuple[str, str]],
        body: bytes,
        seconds: float | None = None,
    ) -> Answer:
        await anyio.lowlevel.checkpoint()
        self.seconds.append(seconds)
        answer = self.answer(method, url, dict(headers), body)
        heads = {name.lower(): value for name, value in answer.headers}
        return Answer(answer.status, heads, answer.data)

    def answer(self, method: str, url: str, headers: dict[str, str], body: bytes) -> Response:
        parts = urlsplit(url)
        self.asked.append(
            (method, url, {name.lower(): value for name, value in headers.items()}, body)
        )
        found = self.instead.get(parts.netloc)
        if isinstance(found, list):
            found = found.pop(0) if found else None
        if isinstance(found, Exception):
            raise found
        if found is not None:
            assert isinstance(found, Response)
            return found
        if parts.hostname not in (*HOSTS, *METADATA):
            raise ConnectFailed(f"{parts.netloc} is down")
        sent = [("Host", parts.netloc), ("Content-Length", str(len(body))), *headers.items()]
        sent = [pair for pair in sent if pair[1] != "0"]
        target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
        given = self.google.handle(Request(method, target, sent, body, parts.scheme))
        assert isinstance(given, Response)
        return given

    def write(self, info: Mapping[str, Any], path: str = NAMED) -> None:
        """Write a credential file, and name it unless it is the well-known one."""
        self.files[path] = json.dumps(info).encode()
        if path == NAMED:
            self.environ["GOOGLE_APPLICATION_CREDENTIALS"] = NAMED

    async def log_in(self, *, probing_metadata: bool = False) -> Login | None:
        return await auth_google.log_in(self.machine, REGISTRY, probing_metadata=probing_metadata)

    async def refused(self) -> AuthError:
        """Log in, which has to fail with an error for people that shows no secret."""
        with pytest.raises(AuthError) as caught:
            await self.log_in()
        error = caught.value
        assert error.fatal
        shown = f"{error.message} {error.hint}"
        assert not [secret for secret in self.google.secrets if secret in shown]
        return error


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host(Google(now=lambda: NOW, wall=lambda: NOW))
    yield made
    made.google.journal.check()


def subject(host: Host) -> str:
    return next(iter(host.google.subjects))


FILE = "/var/run/token"
URL = "https://tokens.example/mine?a=b"


def by_file(host: Host, **fields: Any) -> dict[str, Any]:
    host.files[FILE] = subject(host).encode()
    return host.google.external_account({"file": FILE}, **fields)


def by_json_file(host: Host) -> dict[str, Any]:
    host.files[FILE] = json.dumps({"other": 1, "token": subject(host)}).encode()
    return host.google.external_account(json_in(FILE, "token"))


def by_url(host: Host) -> dict[str, Any]:
    host.instead["tokens.example"] = Response(200, [], subject(host).encode())
    return host.google.external_account(
        {"url": URL, "headers": {"X-Mine": "yes"}, "format": {"type": "text"}}
    )


def by_gone_url(host: Host) -> dict[str, Any]:
    info = by_url(host)
    host.instead["tokens.example"] = Response(404, [], b"some other text")
    return info


def by_json_url(host: Host) -> dict[str, Any]:
    host.instead["169.254.169.254"] = Response(
        200, [], json.dumps({"access_token": subject(host)}).encode()
    )
    form = {"type": "json", "subject_token_field_name": "access_token"}
    url = "http://169.254.169.254/metadata/identity/oauth2/token?resource=x"
    return host.google.external_account(
        {"url": url, "headers": {"Metadata": "True"}, "format": form}
    )


def workforce(host: Host, **fields: Any) -> dict[str, Any]:
    return by_file(
        host, audience=host.google.workforce, workforce_pool_user_project="project", **fields
    )


# Each kind of credential file: how it is written, which services are asked in turn, and who that
# makes us.
KINDS: dict[str, tuple[Callable[[Host], dict[str, Any]], list[str], str]] = {
    "service_account": (lambda host: host.google.service_account(), ["oauth2"], "robot"),
    "authorized_user": (lambda host: host.google.authorized_user(), ["oauth2"], "user@"),
    "external_file": (by_file, ["sts"], "workload"),
    "external_json_file": (by_json_file, ["sts"], "workload"),
    "external_url": (by_url, ["sts"], "workload"),
    "external_json_url": (by_json_url, ["sts"], "workload"),
    "external_workforce": (workforce, ["sts"], "workload"),
    "external_workforce_client": (lambda host: workforce(host, client_id=CLIENT[0], client_secret=CLIENT[1]),
        ["sts"], "workload"),
    "external_impersonating": (
        lambda host: by_file(
            host,
            service_account_impersonation_url=host.google.impersonation_url,
            service_account_impersonation={"token_lifetime_seconds": 1800},
        ),
        ["sts", "iamcredentials"],
        "target",
    ),
    "external_user": (lambda host: host.google.external_user(), ["sts"], "staff@"),
    "impersonated_by_user": (
        lambda host: host.google.impersonated(
            host.google.authorized_user(quota_project_id=None)
        ),  # as gcloud writes it
        ["oauth2", "iamcredentials"],
        "target",
    ),
    "impersonated_by_key": (lambda host: host.google.impersonated(host.google.service_account()),
        ["oauth2", "iamcredentials"], "target"),
    "impersonated_by_external_user": (lambda host: host.google.impersonated(host.google.external_user()),
        ["sts", "iamcredentials"], "target"),
}  # fmt: skip


@pytest.mark.parametrize("place", ["named", "well-known"])
@pytest.mark.parametrize("kind", KINDS)
async def test_each_kind_of_file_logs_in_with_one_request_to_each_service(
    host: Host, kind: str, place: str
) -> None:
    write, services, who = KINDS[kind]
    path = NAMED if place == "named" else WELL_KNOWN
    host.write(write(host), path)
    assert auth_google.is_configured(host.machine)
    login = await host.log_in()
    assert login is not None
    assert host.google.asked == services
    principal = host.google.principal(login.credential.username, login.credential.password)
    assert principal is not None
    assert principal.startswith(who)
    assert login.expires - NOW == (1800 if kind == "external_impersonating" else 3600)
    assert login.credential.found_at.startswith(path)
    assert login.credential.password not in f"{login}"
    again = await host.log_in()
    assert again is not None
    assert host.google.asked == services * 2, "after its end as at first"


# The second opinion: google-auth with the same files, at the same services, at the same time.


@dataclass
class Theirs:
    """google-auth's way to ask."""

    host: Host

    def __call__(
        self,
        url: str,
        method: str = "GET",
        body: bytes | None = None,
        headers: Any = None,
        **_: Any,
    ) -> mock.Mock:
        answer = self.host.answer(method, url, dict(headers or {}), body or b"")
        return mock.Mock(
            status=answer.status, headers=CaseInsensitive(answer.headers), data=answer.data
        )


class CaseInsensitive(dict[str, str]):
    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        super().__init__({name.lower(): value for name, value in pairs})

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())


def plainly(asked: tuple[str, str, dict[str, str], bytes]) -> tuple[Any, ...]:
    """Take a request apart: what says which library asks is left out, a form's and an object's
    order is none.
    """
    method, url, headers, body = asked
    headers = {
        name: value
        for name, value in headers.items()
        if name not in ("x-goog-api-client", "user-agent")
    }
    read: Any = body
    if headers.get("content-type") == "application/json":
        read = json.loads(body)
        read["delegates"] = read.get("delegates") or []
    elif body:
        read = dict(parse_qsl(body.decode(), keep_blank_values=True))
    return method, url, headers, read


@pytest.fixture
def theirs(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Any]:
    """Return a function that logs in by google-auth's own chain; the host's files become real ones."""
    from google import auth
    from google.auth import _helpers
    from google.auth.compute_engine import _metadata

    def log_in() -> Any:
        asking = Theirs(host)
        monkeypatch.setattr(
            _helpers,
            "utcnow",
            lambda: datetime.datetime.fromtimestamp(int(NOW), datetime.UTC).replace(tzinfo=None),
        )
        monkeypatch.setattr(_metadata, "_GCE_METADATA_HOST", "169.254.169.254")
        monkeypatch.setenv("HOME", str(tmp_path / HOME[1:]))
        monkeypatch.setenv(
            "GOOGLE_CLOUD_PROJECT", "project"
        )  # it would ask whose project a pool is
        for name, value in host.environ.items():
            monkeypatch.setenv(name, str(tmp_path / value[1:]) if value.startswith("/") else value)
        for path, text in host.files.items():
            real = tmp_path / path[1:]
            real.parent.mkdir(parents=True, exist_ok=True)
            real.write_bytes(
                text.replace(
                    json.dumps(FILE).encode(), json.dumps(str(tmp_path / FILE[1:])).encode()
                )
            )
        credentials, _ = auth.default(scopes=[SCOPE], request=asking)
        credentials.refresh(asking)
        return credentials

    return log_in


@pytest.mark.parametrize("kind", KINDS)
async def test_google_auth_asks_the_same(host: Host, theirs: Callable[[], Any], kind: str) -> None:
    host.write(KINDS[kind][0](host))
    ours = await host.log_in()
    assert ours is not None
    asked = [*host.asked]
    host.asked.clear()
    host.google.issued.clear()  # the second time tokens are called as the first time
    found = theirs()
    assert found.token == ours.credential.password
    mine, other = list(map(plainly, asked)), list(map(plainly, host.asked))
    if kind in ("external_impersonating", "impersonated_by_key"):
        # The token to impersonate with: google-auth narrows it to one API, facts section 5.4 does
        # not.
        mine[0], other[0] = scoped(mine[0], other[0])
    assert mine == other


def scoped(
    mine: tuple[Any, ...], other: tuple[Any, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Take the scopes out, which have to be what each is known to ask for."""
    found = []
    for (method, url, headers, form), scope in (
        (mine, SCOPE),
        (other, "https://www.googleapis.com/auth/iam"),
    ):
        if "assertion" in form:
            claims = json.loads(base64.urlsafe_b64decode(form["assertion"].split(".")[1] + "=="))
            assert claims.pop("scope") == scope
            form = {**form, "assertion": claims}
        else:
            assert form["scope"] == scope
            form = {**form, "scope": None}
        found.append((method, url, headers, form))
    return found[0], found[1]


async def test_google_auth_asks_the_metadata_server_the_same(
    host: Host, theirs: Callable[[], Any]
) -> None:
    ours = await host.log_in()
    assert ours is not None
    (asked,) = host.asked
    host.asked.clear()
    host.google.issued.clear()
    assert theirs().token == ours.credential.password
    assert plainly(asked) == plainly(host.asked[-1])
    assert len(host.asked) > 1, "google-auth pings and asks for the project first"


@pytest.mark.parametrize(
    ("named", "well_known", "who"),
    [
        pytest.param(True, True, "robot", id="named-first"),
        pytest.param(False, True, "user@", id="then-the-well-known"),
        pytest.param(False, False, "machine", id="then-metadata"),
    ],
)
@pytest.mark.parametrize("folder", [None, "/elsewhere"])
async def test_the_first_place_is_taken_as_by_google_auth(
    host: Host,
    theirs: Callable[[], Any],
    named: bool,
    well_known: bool,
    who: str,
    folder: str | None,
) -> None:
    if named:
        host.write(host.google.service_account())
    if well_known:
        host.write(
            host.google.authorized_user(),
            f"{folder}/application_default_credentials.json" if folder else WELL_KNOWN,
        )
    if folder:
        host.environ["CLOUDSDK_CONFIG"] = folder
    assert auth_google.is_configured(host.machine) is (named or well_known)
    login = await host.log_in()
    assert login is not None
    tokens = [login.credential.password, theirs().token]
    principals = [host.google.principal("_token", token) or "" for token in tokens]
    assert [each.startswith(who) for each in principals] == [True, True]


def test_on_windows_the_file_is_below_appdata(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth_google, "os", SimpleNamespace(name="nt", path=os.path))
    host.environ["APPDATA"] = "/appdata"
    assert not auth_google.is_configured(host.machine)
    host.files["/appdata/gcloud/application_default_credentials.json"] = b"{}"
    assert auth_google.is_configured(host.machine)


def test_without_a_home_there_is_no_well_known_file(host: Host) -> None:
    host.home = None
    assert not auth_google.is_configured(host.machine)
    host.environ["GCE_METADATA_HOST"] = "169.254.169.254"
    assert auth_google.is_configured(host.machine)


# Files that are of no use.


def json_in(file: str, name: str) -> dict[str, Any]:
    return {"file": file, "format": {"type": "json", "subject_token_field_name": name}}


BROKEN: dict[str, tuple[Callable[[Host], Any], str]] = {
    "no-object": (lambda host: [], "type 'None' is not one of authorized_user, external"),
    "no-type": (lambda host: {}, "type 'None' is not one of"),
    "odd-type": (lambda host: {"type": "gdch_service_account"}, "type 'gdch_service_account' is not one of"),
    "no-key": (lambda host: host.google.service_account(private_key=""), "private_key is missing"),
    "no-mail": (lambda host: host.google.service_account(client_email=None), "client_email is missing"),
    "mail-is-a-number": (lambda host: host.google.service_account(client_email=1), "client_email"),
    "no-pem": (lambda host: host.google.service_account(private_key="abc"), "an RSA key in PEM"),
    "no-refresh-token": (lambda host: host.google.authorized_user(refresh_token=None), "refresh_token is missing"),
    "no-client": (lambda host: host.google.authorized_user(client_secret=""), "client_secret is missing"),
    "no-token-url": (lambda host: host.google.external_user(token_url=None), "token_url is missing"),
    "no-source": (lambda host: host.google.external_account({}), "nothing is not supported: use `file` or `url`"),
    "source-is-text": (lambda host: by_file(host) | {"credential_source": "x"}, "nothing is not supported"),
    "program": (lambda host: host.google.external_account({"executable": {"command": "x"}}),
        "executable is not supported"),
    "aws": (lambda host: host.google.external_account({"environment_id": "aws1", "url": "http://169.254.169.254"}),
        "environment_id, url is not supported"),
    "certificate": (lambda host: host.google.external_account({"certificate": {}}), "certificate is not supported"),
    "token-file-gone": (lambda host: host.google.external_account({"file": "/gone"}), "token is missing"),
    "token-url-gone": (by_gone_url, "credential_source at tokens.example: status 404: some other text"),
    "json-without-field": (
        lambda host: (
            by_file(host) | {"credential_source": {"file": FILE, "format": {"type": "json"}}}
        ),
        "subject_token_field_name is missing",
    ),
    "field-gone": (lambda host: by_json_file(host) | {"credential_source": json_in(FILE, "gone")}, "gone is missing"),
    "no-source-credentials": (lambda host: host.google.impersonated({}), "source_credentials: type 'None'"),
    "no-impersonation-url": (
        lambda host: host.google.impersonated(
            host.google.authorized_user(), service_account_impersonation_url=None
        ),
        "service_account_impersonation_url is missing",
    ),
}  # fmt: skip


@pytest.mark.virtual_time
@pytest.mark.parametrize("case", BROKEN)
async def test_a_file_of_no_use_is_named_with_what_is_wrong(host: Host, case: str) -> None:
    make, words = BROKEN[case]
    host.write(make(host))
    error = await host.refused()
    assert error.message.startswith(f"{NAMED} (GOOGLE_APPLICATION_CREDENTIALS)")
    assert words in error.message


@pytest.mark.rule("R20")
@pytest.mark.parametrize(
    "field", ["token_uri", "token_url", "service_account_impersonation_url", "url"]
)
@pytest.mark.parametrize(
    "url",
    [
        "http://oauth2.googleapis.com/token", "http://127.0.0.1.example/token",
        "http://169.254.169.254.example/token", "http://10.0.0.1/token",
        "http://localhost@evil.example/", "https://you@oauth2.googleapis.com/token",
        "https:///token", "ftp://localhost/", "https://a b/", "file:///etc/passwd",
    ],
)  # fmt: skip
async def test_secrets_go_to_no_place_that_is_not_https(host: Host, field: str, url: str) -> None:
    source: Mapping[str, Any] = host.google.authorized_user(token_uri=url)
    if field == "token_url":
        source = by_file(host, token_url=url)
    elif field == "url":
        source = host.google.external_account({"url": url})
    elif field == "service_account_impersonation_url":
        source = host.google.impersonated(
            host.google.authorized_user(), service_account_impersonation_url=url
        )
    host.write(source)
    assert f"{field} is not an https URL" in (await host.refused()).message
    assert all(asked[1] == "https://oauth2.googleapis.com/token" for asked in host.asked)


@pytest.mark.rule("R20")
@pytest.mark.virtual_time
@pytest.mark.parametrize("field", ["token_uri", "token_url", "service_account_impersonation_url"])
@pytest.mark.parametrize(
    "name",
    ["evil.example", "googleapis.com.evil.example", "notgoogleapis.com", "sts.example.cloud"],
)
async def test_secrets_go_to_google_alone(host: Host, field: str, name: str) -> None:
    """docs/protocol-facts.md 5.3: the file of a stranger may name any file as its token, and any
    place to send it to.
    """
    url = f"https://{name}/token"
    source: Mapping[str, Any] = host.google.authorized_user(token_uri=url)
    if field == "token_url":
        source = by_file(host, token_url=url)
    elif field == "service_account_impersonation_url":
        source = host.google.impersonated(
            host.google.authorized_user(), service_account_impersonation_url=url
        )
    host.write(source)
    assert f"{field} names {name}, which is not Google's" in (await host.refused()).message
    assert all(asked[1] == "https://oauth2.googleapis.com/token" for asked in host.asked)
    host.write({**source, "universe_domain": "example.cloud"})
    assert ("which is not Google's" in (await host.refused()).message) is (
        name != "sts.example.cloud"
    )


@pytest.mark.parametrize(
    "url", ["http://localhost:8080/token", "http://127.0.0.1/token", "http://[::1]:1/t?a=b"]
)
async def test_this_machine_may_be_asked_without_https(host: Host, url: str) -> None:
    host.instead[urlsplit(url).netloc] = Response(
        200, [], b'{"access_token": "t", "expires_in": 60}'
    )
    host.write(host.google.authorized_user(token_uri=url))
    login = await host.log_in()
    assert login is not None
    assert (login.credential.password, login.expires) == ("t", NOW + 60)


async def test_a_named_file_that_is_gone_is_no_reason_to_look_elsewhere(host: Host) -> None:
    host.environ["GOOGLE_APPLICATION_CREDENTIALS"] = NAMED
    host.write(host.google.authorized_user(), WELL_KNOWN)
    error = await host.refused()
    assert error.message == f"{NAMED} (GOOGLE_APPLICATION_CREDENTIALS): the file does not exist"
    assert "unset" in (error.hint or "")
    assert host.asked == []


# What services say.


def echo(text: bytes, status: int = 400) -> Response:
    return Response(status, [], text)


@pytest.mark.parametrize(
    ("spoil", "words", "hint"),
    [
        pytest.param(lambda host: host.google.users.clear(), "status 400: invalid_grant: Token has been", "gcloud",
            id="user"),
        pytest.param(lambda host: host.google.keys.clear(), "account not found", "check the key", id="account"),
        pytest.param(lambda host: host.google.subjects.clear(), "attribute condition", "audiences", id="subject"),
        pytest.param(lambda host: host.google.impersonators.clear(), "PERMISSION_DENIED",
            "serviceAccountTokenCreator", id="impersonator"),
    ],
)  # fmt: skip
async def test_a_service_that_refuses_is_quoted_with_what_may_help(
    host: Host,
    spoil: Callable[[Host], object],
    words: str,
    hint: str,
    request: pytest.FixtureRequest,
) -> None:
    written = {
        "user": host.google.authorized_user(),
        "account": host.google.service_account(),
        "subject": by_file(host),
        "impersonator": host.google.impersonated(host.google.authorized_user()),
    }
    host.write(written[request.node.callspec.id])
    spoil(host)
    error = await host.refused()
    assert words in error.message
    assert hint in (error.hint or "")


async def test_a_wrong_key_is_refused_by_the_service(host: Host) -> None:
    host.write(host.google.service_account(private_key=make_key(1).pem))
    assert "Invalid JWT Signature" in (await host.refused()).message
    host.asked.clear()
    host.write(host.google.service_account(private_key_id="another"))
    assert "Invalid JWT Signature" in (await host.refused()).message


async def test_a_clock_that_is_wrong_is_told(host: Host) -> None:
    host.google.wall = lambda: NOW + 7200
    host.write(host.google.service_account())
    error = await host.refused()
    assert "reasonable timeframe" in error.message
    assert "clock" in (error.hint or "")


async def test_what_a_service_echoes_shows_no_secret(host: Host) -> None:
    user = host.google.impersonated(host.google.authorized_user())
    secret, token = user["source_credentials"]["refresh_token"], "the-token"
    host.write(user)
    host.instead["oauth2.googleapis.com"] = echo(f"no {secret} and {CLIENT[1]}\x1b[2J".encode())
    assert (await host.refused()).message.endswith("status 400: no *** and ***[2J")
    assert "/" in secret, "as Google's have it"
    parted = f"{secret[:5]}\0{secret[5:]}"
    host.instead["oauth2.googleapis.com"] = echo(
        f"no {quote(secret, safe='')} and {parted}".encode()
    )
    assert (await host.refused()).message.endswith("status 400: no *** and ***")
    host.instead["oauth2.googleapis.com"] = echo(b'{"access_token": "the-token"}', 200)
    host.instead["iamcredentials.googleapis.com"] = echo(f"Bearer {token}?".encode())
    assert (await host.refused()).message.endswith("status 400: Bearer ***?")
    host.write(host.google.service_account())
    host.asked.clear()
    host.instead["oauth2.googleapis.com"] = echo(b"")
    await host.refused()
    assertion = dict(parse_qsl(host.asked[-1][3].decode()))["assertion"]
    host.instead["oauth2.googleapis.com"] = echo(f"bad {assertion}.".encode())
    assert (await host.refused()).message.endswith("status 400: bad ***.")


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"access_token": ""}',
        b'{"access_token": 1}',
        b'{"access_token": "a b"}',
        b"\xff",
    ],
)
async def test_an_answer_without_a_token_is_an_error(host: Host, body: bytes) -> None:
    host.write(host.google.authorized_user())
    host.instead["oauth2.googleapis.com"] = echo(body, 200)
    assert "status 200: no usable answer" in (await host.refused()).message


@pytest.mark.parametrize(
    ("life", "seconds"),
    [("60", 60.0), (60, 60.0), (None, float("inf")), ("x", float("inf")), (-1, float("inf"))],
)
async def test_a_life_may_be_a_number_or_a_text_or_nothing(
    host: Host, life: object, seconds: float
) -> None:
    host.write(host.google.authorized_user())
    host.instead["oauth2.googleapis.com"] = echo(
        json.dumps({"access_token": "t", "expires_in": life}).encode(), 200
    )
    login = await host.log_in()
    assert login is not None
    assert login.expires == NOW + seconds


# Failures that pass.


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    "first",
    [echo(b"", 503), echo(b"", 500), echo(b"", 429), ConnectFailed("oauth2 is down")],
    ids=["503", "500", "429", "line"],
)
async def test_a_service_is_asked_at_most_three_times(
    host: Host, first: Response | ConnectFailed
) -> None:
    host.write(host.google.authorized_user())
    host.instead["oauth2.googleapis.com"] = [first, first]
    began = anyio.current_time()
    assert await host.log_in() is not None
    assert (len(host.asked), anyio.current_time() - began) == (3, pytest.approx(3.0))
    host.asked.clear()
    host.instead["oauth2.googleapis.com"] = [first] * 9
    error = await host.refused()
    assert len(host.asked) == 3
    assert "authorized_user at oauth2.googleapis.com: " in error.message
    assert host.seconds == [None] * 6


@pytest.mark.virtual_time
@pytest.mark.parametrize("status", [403, 404, 503])
async def test_a_metadata_server_that_is_not_ready_is_asked_again(host: Host, status: int) -> None:
    host.instead["169.254.169.254"] = [echo(b"", status), echo(b"", status)]
    assert await host.log_in() is not None
    assert len(host.asked) == 3
    assert all(seconds is not None and seconds <= 3 for seconds in host.seconds)


@pytest.mark.virtual_time
async def test_nothing_found_names_every_place(host: Host) -> None:
    host.google.has_account = False
    error = await host.refused()
    assert error.message == (
        "registry 'mine': no Google identity for europe-docker.pkg.dev; looked at the environment variable "
        f"GOOGLE_APPLICATION_CREDENTIALS, {WELL_KNOWN}, the metadata server 169.254.169.254: status 404: "
        "not found"
    )
    for word in (
        "gcloud auth application-default login",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "anonymous",
    ):
        assert word in (error.hint or "")
    host.instead["169.254.169.254"] = ConnectFailed("no answer within 3 s")
    assert (await host.refused()).message.endswith(
        "the metadata server 169.254.169.254: no answer within 3 s"
    )
    host.environ["NO_GCE_CHECK"] = "true"
    host.asked.clear()
    assert (await host.refused()).message.endswith("not asked because of NO_GCE_CHECK")
    assert host.asked == []


@pytest.mark.parametrize("name", ["GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"])
async def test_a_metadata_server_is_where_the_environment_says(host: Host, name: str) -> None:
    host.environ[name] = "metadata.google.internal"
    assert auth_google.is_configured(host.machine)
    assert await host.log_in() is not None
    assert [urlsplit(asked[1]).netloc for asked in host.asked] == ["metadata.google.internal"]


async def test_another_service_at_that_address_is_not_believed(host: Host) -> None:
    host.instead["169.254.169.254"] = echo(b'{"access_token": "t", "expires_in": 60}', 200)
    assert "not Google's" in (await host.refused()).message
    assert await host.log_in(probing_metadata=True) is None


async def test_a_guess_is_one_request_of_one_second_to_the_metadata_server_alone(
    host: Host,
) -> None:
    host.write(host.google.service_account())
    login = await host.log_in(probing_metadata=True)
    assert login is not None
    assert login.credential.found_at == "the metadata server 169.254.169.254"
    assert (host.google.asked, host.seconds) == (["metadata"], [1.0])
    for instead in (ConnectFailed("nobody"), echo(b"", 503), echo(b"", 404)):
        host.asked.clear()
        host.instead["169.254.169.254"] = instead
        assert await host.log_in(probing_metadata=True) is None
        assert len(host.asked) == 1
    host.environ["NO_GCE_CHECK"] = "true"
    host.asked.clear()
    assert await host.log_in(probing_metadata=True) is None
    assert host.asked == []


@pytest.mark.parametrize(("told", "life"), [("1800", 1800.0), (900, 900.0), ("soon", float("inf"))])
async def test_an_account_is_spoken_for_as_long_as_the_file_says(
    host: Host, told: object, life: float
) -> None:
    url = host.google.impersonation_url
    more = {
        "service_account_impersonation_url": url,
        "service_account_impersonation": {"token_lifetime_seconds": told},
    }
    host.write(by_file(host, **more))
    host.instead["iamcredentials.googleapis.com"] = echo(
        b'{"accessToken": "t", "expireTime": "2027-01-15T08:30:00Z"}', 200
    )
    login = await host.log_in()
    assert login is not None
    assert json.loads(host.asked[-1][3])["lifetime"] == f"{told}s"
    assert login.expires == NOW + life


async def test_a_well_known_file_that_cannot_be_read_is_no_reason_to_look_elsewhere(
    host: Host,
) -> None:
    def read(path: str) -> bytes | None:
        raise ConfigError(f"{path}: Permission denied")

    machine = host.machine._replace(read=read)
    with pytest.raises(ConfigError, match="Permission denied"):
        auth_google.is_configured(machine)
    with pytest.raises(ConfigError, match="Permission denied"):
        await auth_google.log_in(machine, REGISTRY, probing_metadata=False)


async def test_a_subject_token_is_read_anew_each_time(host: Host) -> None:
    host.write(by_file(host))
    await host.log_in()
    host.google.subjects = {"renewed.subject.token": "workload"}
    host.files[FILE] = b"renewed.subject.token\n"
    assert await host.log_in() is not None
