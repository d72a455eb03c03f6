"""Secrets that are known and unique, a machine that has one in every place, and the search for any
part of one in all that a run leaves behind.

Invariants: eight characters of a secret in a row are enough to be found, in any of the writings,
compressed or not. Each place is in one variant of the machine at least, and a variant in which
nothing fails has every one of its secrets in use. Clouds are played by one site that believes
anybody: what they verify is tested elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import anyio

from conformance.clouds.google import make_key
from conformance.http import Reception, Site
from conformance.images import Seed
from conformance.messages import Answer, Content, Request, Response
from conformance.registry import App
from conformance.tokens import BasicAuth, TokenService
from tests.ends import Ran, Virtual, basic, document

# The search.

LEAST = 8
# A run of so many characters of a writing says as much as eight of the secret itself.
_ENOUGH = {"hex": 16, "base64": 11}
_PLACE = re.compile(r"<([^<>|]+)(?:\|([^>]+))?>")
_STREAM = re.compile(rb"x[\x01\x5e\x9c\xda]")


def writings(secret: str) -> Iterator[tuple[str, str]]:
    """Give the ways in which a secret can be written, each with its kind."""
    raw = secret.encode("utf-8", "surrogatepass")
    yield "plain", secret
    yield "percent", quote(raw, safe="")
    yield "percent", quote_plus(raw)
    yield "percent", quote(raw, safe="").lower()
    escaped = json.dumps(secret)[1:-1]
    yield "json", escaped
    yield "json", escaped.replace("/", "\\/")
    yield "repr", repr(secret)[1:-1]
    yield "hex", raw.hex()
    yield "hex", raw.hex().upper()
    # Of what stands before it, base64 keeps the remainder of a division by three.
    for before in range(3):
        coded = base64.b64encode(bytes(before) + raw).decode().rstrip("=")
        whole = coded[-(-before * 8 // 6) + (before > 0) : len(coded) - 1]
        yield "base64", whole
        yield "base64", whole.replace("+", "-").replace("/", "_")


# What says enough of a secret, by its size: the place, how it is written.
_parts: dict[int, dict[bytes, tuple[str, str]]] = {size: {} for size in (LEAST, *_ENOUGH.values())}
_known: dict[str, str] = {}


def add(place: str, secret: str) -> str:
    """Remember the secret of a place, for all tests that follow."""
    assert len(secret) >= LEAST, "too short to be found"
    if _known.get(place) != secret:
        _known[place] = secret
        for kind, text in writings(secret):
            size = _ENOUGH.get(kind, LEAST)
            for at in range(len(text) - size + 1):
                part = text[at : at + size].encode("utf-8", "surrogatepass")
                _parts[size].setdefault(part, (place, kind))
    return secret


def canary(place: str, joint: str = "/") -> str:
    """Return the secret of a place: blocks of letters and digits, between them what has to be
    escaped somewhere.
    """
    text = base64.b32encode(hashlib.sha256(place.encode()).digest()).decode().lower()
    blocks = (f"{text[at]}Q{text[at + 1 : at + 9]}" for at in range(0, 40, 10))
    return add(place, joint.join(blocks))


def find(text: str | bytes) -> dict[str, str]:
    """Return the places whose secrets are in a text, each with what is there and how it is written."""
    seen: dict[str, str] = {}
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    for each in _unpack(data):
        for size, known in _parts.items():
            ends = range(size, len(each) + 1)
            if known.keys().isdisjoint(map(each.__getitem__, map(slice, range(len(ends)), ends))):
                continue  # a call for each place takes three times as long
            for at in range(len(ends)):
                if found := known.get(each[at : at + size]):
                    around = each[max(0, at - 60) : at + size + 60]
                    seen.setdefault(found[0], f"{found[1]}: {around.decode('latin-1')!r}")
    return seen


def _unpack(text: bytes) -> Iterator[bytes]:
    """Give a text, and what is compressed in it."""
    yield text
    for match in _STREAM.finditer(text):
        try:
            yield zlib.decompressobj().decompress(text[match.start() :])
        except zlib.error:
            continue


class Traces:
    """Where a run can leave anything: what it says, and all that is new below some directories.

    What was there before is the test's own, unless it has changed.
    """

    def __init__(self, *directories: Path) -> None:
        self._directories = directories
        self._before = dict(self._files())

    def _files(self) -> Iterator[tuple[Path, tuple[int, int]]]:
        for directory in self._directories:
            for parent, folders, files in os.walk(directory):
                yield from ((Path(parent, name), (0, 0)) for name in folders)
                for name in files:
                    about = Path(parent, name).lstat()
                    yield Path(parent, name), (about.st_mtime_ns, about.st_size)

    def left(self) -> Iterator[tuple[str, bytes]]:
        """Give names and bytes of what is new."""
        for path, about in self._files():
            if self._before.get(path) != about:
                yield f"the name {path.name}", os.fsencode(path)
                if path.is_symlink():
                    yield f"the link {path.name}", os.fsencode(os.readlink(path))
                elif path.is_file():
                    yield f"the file {path.name}", path.read_bytes()

    def found(self, said: Ran | str | bytes = "") -> list[str]:
        """Return what of which secret is where, a line each."""
        told = (said.out, said.err) if isinstance(said, Ran) else (said,)
        return [
            f"{place} in {channel}: {part}"
            for channel, text in [*(("what was said", each) for each in told), *self.left()]
            for place, part in find(text).items()
        ]


# The machine.

ECR, ACR = "123456789012.dkr.ecr.eu-west-1.amazonaws.com", "name.azurecr.io"
GAR, GITHUB = "europe-docker.pkg.dev", "ghcr.io"
USER = "mirror"
STS, SSO = "sts.eu-west-1.amazonaws.com", "portal.sso.eu-west-1.amazonaws.com"
GOOGLE, GOOGLE_STS = "oauth2.googleapis.com", "sts.googleapis.com"
MICROSOFT, IMPERSONATION = "login.microsoftonline.com", "iamcredentials.googleapis.com"
ISSUERS = ("api.ecr.eu-west-1.amazonaws.com", "oidc.eu-west-1.amazonaws.com", STS, SSO)
SERVICES = (*ISSUERS, MICROSOFT, GOOGLE, GOOGLE_STS, IMPERSONATION)
IMDS, ECS = "169.254.169.254", "169.254.170.2"
NEARBY = {IMDS: 80, ECS: 80, "localhost": 42356}
STORAGE, PROXY = "storage.test", "proxy.test"

ROLE = "arn:aws:iam::123456789012:role/pull"
TENANT = "22222222-2222-4222-8222-222222222222"
AZURE = {"$AZURE_CLIENT_ID": "11111111-1111-4111-8111-111111111111", "$AZURE_TENANT_ID": TENANT}
AZURE_ACCOUNT = {"home_account_id": "oid.tid", "environment": MICROSOFT}
AZURE_PROFILE = {
    "tenantId": TENANT,
    "isDefault": True,
    "environmentName": "AzureCloud",
    "user": {"name": "me@tenant.test", "type": "user"},
}


def azure_cache(place: str) -> dict[str, Any]:
    refresh = {**AZURE_ACCOUNT, "last_modification_time": "1", "secret": f"<{place}|+>"}
    account = {**AZURE_ACCOUNT, "username": "me@tenant.test"}
    return {"RefreshToken": {"1": refresh}, "Account": {"1": account}}


GOOGLE_VARIABLE = {"$GOOGLE_APPLICATION_CREDENTIALS": "HOME/google.json"}
GOOGLE_USER = {
    "type": "authorized_user",
    "client_id": "client",
    "client_secret": "<Google client_secret|->",
    "refresh_token": "<Google refresh_token|//>",
}
# What an environment and a home directory have, by the source of an identity: variables, whose names
# begin with $, and files. HOME is that directory, <PLACE> or <PLACE|JOINT> is a canary.
SOURCES: Mapping[str, Mapping[str, Any]] = {
    "AWS keys": {
        "$AWS_ACCESS_KEY_ID": "ASIA0000000000000000",
        "$AWS_SECRET_ACCESS_KEY": "<secret_access_key of the environment>",
        "$AWS_SESSION_TOKEN": "<AWS_SESSION_TOKEN|+>",
    },
    "AWS web identity": {
        "$AWS_WEB_IDENTITY_TOKEN_FILE": "HOME/web-identity",
        "$AWS_ROLE_ARN": ROLE,
        "web-identity": "<AWS_WEB_IDENTITY_TOKEN_FILE|.>",
    },
    "AWS container": {
        "$AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2/x",
        "$AWS_CONTAINER_AUTHORIZATION_TOKEN": "<AWS_CONTAINER_AUTHORIZATION_TOKEN>",
    },
    "AWS pod": {
        "$AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://{ECS}/v1/credentials",
        "$AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "HOME/pod-token",
        "pod-token": "<AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE|.>",
    },
    "AWS SSO": {
        ".aws/config": "[sso-session corp]\nsso_start_url = https://corp.test\n"
        "sso_region = eu-west-1\n[default]\nsso_session = corp\nsso_account_id = 123456789012\n"
        "sso_role_name = pull\nregion = eu-west-1\n",
        f".aws/sso/cache/{hashlib.sha1(b'corp').hexdigest()}.json": {
            "accessToken": "<SSO accessToken>",
            "expiresAt": "2100-01-01T00:00:00Z",
        },
    },
    "AWS profile": {
        ".aws/credentials": "[base]\naws_access_key_id = ASIA0000000000000002\n"
        "aws_secret_access_key = <secret_access_key of a profile>\n"
        "aws_session_token = <token of a profile>\n",
        ".aws/config": f"[default]\nrole_arn = {ROLE}\nsource_profile = base\n"
        "region = eu-west-1\nexternal_id = <external_id>\n",
    },
    "Azure secret": {**AZURE, "$AZURE_CLIENT_SECRET": "<AZURE_CLIENT_SECRET|~/>"},
    "Azure federated": {
        **AZURE,
        "$AZURE_FEDERATED_TOKEN_FILE": "HOME/federated",
        "federated": "<AZURE_FEDERATED_TOKEN_FILE|.>",
    },
    "Azure service": {
        "$IDENTITY_ENDPOINT": "http://localhost:42356/msi/token",
        "$IDENTITY_HEADER": "<IDENTITY_HEADER|->",
    },
    "Azure session": {
        ".azure/azureProfile.json": {"subscriptions": [AZURE_PROFILE]},
        ".azure/msal_token_cache.json": {**azure_cache("az login, renewal"), "AccessToken": {}},
    },
    "Google user": {**GOOGLE_VARIABLE, "google.json": GOOGLE_USER},
    "Google key": {
        **GOOGLE_VARIABLE,
        "google.json": {
            "type": "service_account",
            "private_key": "PRIVATE_KEY",
            "private_key_id": "1",
            "client_email": "robot@project.test",
        },
    },
    "Google subject": {
        **GOOGLE_VARIABLE,
        "subject": "<Google subject token|.>",
        "google.json": {
            "type": "external_account",
            "audience": "//iam.googleapis.com/projects/1/locations/global"
            "/workloadIdentityPools/pool/providers/mine",
            "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
            "token_url": f"https://{GOOGLE_STS}/v1/token",
            "credential_source": {"file": "HOME/subject"},
        },
    },
    "Google workforce": {
        **GOOGLE_VARIABLE,
        "google.json": {
            **GOOGLE_USER,
            "type": "external_account_authorized_user",
            "token_url": f"https://{GOOGLE_STS}/v1/oauthtoken",
        },
    },
    "Google impersonation": {
        **GOOGLE_VARIABLE,
        "google.json": {
            "type": "impersonated_service_account",
            "service_account_impersonation_url": f"https://{IMPERSONATION}/v1/projects/-"
            "/serviceAccounts/x:generateAccessToken",
            "source_credentials": GOOGLE_USER,
        },
    },
    "machine": {},  # what metadata services give
}
# The sources for AWS, Azure and Google, and who gives Google's access token.
VARIANTS: Mapping[str, tuple[str, str, str, str]] = {
    "of the environment": ("AWS keys", "Azure secret", "Google user", GOOGLE),
    "of files": ("AWS web identity", "Azure federated", "Google key", GOOGLE),
    "of containers": ("AWS container", "Azure service", "Google subject", GOOGLE_STS),
    "of logins": ("AWS SSO", "Azure session", "Google workforce", GOOGLE_STS),
    "of sessions": ("AWS profile", "Azure session", "Google impersonation", IMPERSONATION),
    "of a pod": ("AWS pod", "Azure secret", "Google user", GOOGLE),
    "of machines": ("machine", "machine", "machine", IMDS),
}
# What proves an identity without being sent: keys sign. The others nobody has any use for.
NEVER_SENT = re.compile("secret_access_key|private_key|netrc|cookie|refresh token|_state of")


# Who answers, and repeats whatever is shown.


class Tokens(TokenService):
    """A token service whose tokens are canaries; `rotates`: each comes with a new refresh token."""

    def __init__(self, scene: Scene, name: str, *, rotates: bool = True, **options: Any) -> None:
        super().__init__(anonymous=False, now=anyio.current_time, **options)
        self._scene, self._name, self._rotates, self._made = scene, name, rotates, 0

    def write_token(self, user: str | None) -> str:
        self._made += 1
        return self._scene.hand(f"token {self._made} of {self._name}", ".")

    def issue(self, *given: Any, offline: bool) -> Response:
        answer = super().issue(*given, offline=False)
        if self._rotates and answer.status == 200:
            renewed = self._scene.hand(f"refresh token {self._made} of {self._name}", "~")
            self.refresh_tokens[renewed] = renewed
            answer.body = json.dumps({**answer.json(), "refresh_token": renewed}).encode()
        return answer


class Bearer:
    """A registry that knows one token."""

    def __init__(self, token: str) -> None:
        self._token = token

    def answer(self, request: Request) -> None:
        return None

    def check(self, request: Request, needs: object) -> Response | None:
        if request.header("authorization") == f"Bearer {self._token}":
            return None
        challenge = 'Bearer realm="https://elsewhere.test/token"'
        return Response(401, [("WWW-Authenticate", challenge)], b"{}")


def whole(answer: Callable[[str], Response]) -> Reception:
    """Answer a request when its body has come."""
    content = Content()
    return Reception(content, lambda _: answer(bytes(content).decode("latin-1")))


class Services(Site):
    """All services of all clouds."""

    def __init__(self, scene: Scene, *, is_azure_machine: bool) -> None:
        super().__init__()
        self._scene, self._is_azure_machine = scene, is_azure_machine
        self.bodies: dict[str, str] = {}

    def start(self, request: Request) -> Reception:
        def answer(body: str) -> Response:
            self.bodies[request.header("host")] = body
            return self._tell(request)

        return whole(answer)

    def _tell(self, request: Request) -> Response:
        host, path, hand = request.header("host").partition(":")[0], request.path, self._scene.hand
        if path == "/latest/api/token":
            return Response(200, [], hand("token of IMDS", "=").encode())
        if path == "/latest/meta-data/iam/security-credentials/":
            return Response(200, [], b"role")
        if path.startswith("/metadata/identity") and not request.header("metadata"):
            return Response(400 if self._is_azure_machine else 404)

        keys = {"AccessKeyId": "ASIA0000000000000001", "Expiration": "2026-01-01T06:00:00Z"}
        told: dict[str, Any] = {}
        if host in (STS, SSO, ECS) or path.startswith("/latest/"):
            keys["SecretAccessKey"] = hand(f"secret_access_key of {host}")
            session = hand(f"session token of {host}")
            told = {**keys, "Token": session}
            if host == STS:
                text = {**keys, "SessionToken": session}
                xml = "".join(f"<{name}>{value}</{name}>" for name, value in text.items())
                return Response(200, [], xml.encode())
            if host == SSO:
                given = {name[0].lower() + name[1:]: value for name, value in keys.items()}
                told = {"roleCredentials": {**given, "sessionToken": session}}
        elif host.startswith("api.ecr"):
            login = basic("AWS", hand("password of ECR", "+"))
            told = {"authorizationData": [{"authorizationToken": login, "expiresAt": 1.8e9}]}
        elif host == IMPERSONATION:
            told = {"accessToken": access_token_of(self._scene, host), "expireTime": "2026-01-01"}
        else:
            told = {"access_token": access_token_of(self._scene, host), "expires_in": 3600}
        headers = [("Content-Type", "application/json"), ("Metadata-Flavor", "Google")]
        return Response(200, headers, json.dumps(told).encode())


def access_token_of(scene: Scene, host: str) -> str:
    return scene.hand(f"access token of {host}", ".")


class Storage(Site):
    """Where registries send for blobs, by signed URLs; and a proxy that lets nobody through."""

    def __init__(self, blobs: Mapping[str, bytes]) -> None:
        super().__init__()
        self.blobs = blobs

    def start(self, request: Request) -> Response:
        if request.method == "CONNECT":
            return Response(407, [("Proxy-Authenticate", 'Basic realm="proxy"')])
        body = self.blobs.get(request.path.rpartition("/")[2])
        return Response(200, [], body) if body is not None else Response(404)


# What becomes of an answer to somebody who has shown something: (host, request, answer, all of it).
Answers = Callable[[str, Request, Response, str], Answer]


class Scene:
    """A mirror on that machine: without a variant with a secret in every place that is no cloud's,
    else with clouds' alone; None: with nothing.

    `first` is the size in bytes of the first registry's image.
    """

    def __init__(
        self,
        world: Virtual,
        directory: Path,
        home: Path,
        variant: str | None = "",
        first: int = 300,
    ) -> None:
        self.world, self.home, self.first = world, home, first
        self.file = directory / "mirror.yaml"
        self.env: dict[str, str] = {}
        self.registries: dict[str, Any] = {}
        self.sites: dict[str, Site] = {}
        self.handed: set[str] = set()  # the places of secrets that servers give
        self.heard: list[str] = []  # all that servers were shown
        self.answers: Answers | None = None
        self.asked = 0
        self.repeated = 0  # answers that repeated a secret
        self._blobs: dict[str, bytes] = {}
        if variant is not None:
            self._add_targets()
            if variant:
                self._add_clouds(*VARIANTS[variant])
            else:
                self._add_places()

    def hand(self, place: str, joint: str = "/") -> str:
        """Return a secret that a server gives."""
        self.handed.add(place)
        return canary(place, joint)

    def write(self, name: str, text: str | object) -> Path:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.filled(text if isinstance(text, str) else json.dumps(text)))
        return path

    def filled(self, text: str) -> str:
        """Return a text of SOURCES with canaries."""
        if "PRIVATE_KEY" in text:
            pem = make_key().pem
            for number, line in enumerate(pem.splitlines()[1:-1]):
                add(f"private_key, line {number}", line)
            text = text.replace('"PRIVATE_KEY"', json.dumps(pem))
        text = text.replace("HOME", str(self.home))
        return _PLACE.sub(lambda found: canary(found[1], found[2] or "/"), text)

    def listen(self, site: Site, host: str, port: int | None = None, scheme: str = "http") -> None:
        """Let a site answer; nobody judges what is asked of it."""
        site.amend = lambda request, answer: self._amend(host, site, request, answer)
        self.sites[host] = site
        self.world.network.listen(site, host, port, scheme=scheme)

    def registry(self, name: str, auth: Any, host: str = "", **config: Any) -> App:
        """Let a registry answer that is a source; its blobs are at a storage, behind signed URLs."""
        is_first = not self.registries.keys() - {"target", "second"}
        app, size = App(auth=auth), self.first if is_first else 300
        image = Seed(len(self.registries)).image(sizes=(size,)).load_into(app, "app", tag="v1")
        self._blobs |= image.contents()
        signature = self.hand(f"signature of {name}", "%2F")
        query = (
            f"X-Amz-Signature={signature}&X-Amz-Security-Token={canary(f'_state of {name}', '-')}"
        )
        scheme = "https" if host else "http"

        def redirect(request: Request) -> Response | None:
            if (request.method, request.kind) != ("GET", "blob") or app.auth.check(request, []):
                return None
            return Response(
                307, [("Location", f"{scheme}://{STORAGE}/{request.reference}?{query}")]
            )

        app.intercept = redirect
        host = host or f"{name}.test"
        self.listen(app, host, scheme=scheme)
        self.registries[name] = {"url": f"{scheme}://{host}", **config}
        return app

    def _add_targets(self) -> None:
        """Have two targets, which one login is for, and a storage."""
        self.env["CONFIG_PASSWORD"] = password = canary("credentials.password", "/:+")
        login = {"username": USER, "password": "${CONFIG_PASSWORD}"}
        for name in ("target", "second"):
            self.listen(App(auth=BasicAuth({USER: password})), f"{name}.test")
            entry = {"url": f"http://{name}.test", "auth_type": "basic", "credentials": login}
            self.registries[name] = entry
        for scheme in ("http", "https"):
            self.listen(Storage(self._blobs), STORAGE, scheme=scheme)

    def _add_places(self) -> None:
        """Put a canary into every place that is no cloud's."""
        written = canary("credentials.password, written out", "%&~")
        login = {"username": USER, "password": written}
        service = Tokens(self, "written", users={USER: written})
        self.registry("written", service, auth_type="basic", credentials=login)
        token = self.env["CONFIG_TOKEN"] = canary("token", ".")
        self.registry("static", Bearer(token), auth_type="static_token", token="${CONFIG_TOKEN}")
        token = self.env["GITHUB_TOKEN"] = canary("GITHUB_TOKEN", "_")
        self.env["GITHUB_ACTOR"] = USER
        self.registry("github", Tokens(self, "github", rotates=False, users={USER: token}), GITHUB)

        self.env["DOCKER_AUTH_CONFIG"] = json.dumps(self._auths("auth"))
        self.env["REGISTRY_AUTH_FILE"] = str(self.write("auth.json", self._auths("identitytoken")))
        kinds = ("auth", "identitytoken", "registrytoken")
        self.write("docker/config.json", self._auths(*kinds, where="docker"))
        self.env["DOCKER_CONFIG"] = str(self.home / "docker")
        for number, variable in enumerate(("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME")):
            auths = self._auths("password", where=f"xdg{number}")
            self.write(f"{variable}/containers/auth.json", auths)
            self.env[variable] = str(self.home / variable)
        self.write(".netrc", f"machine target.test login {USER} password {canary('netrc')}\n")

        self.listen(Storage({}), PROXY, 3128)
        ours, theirs = canary("proxy", "%2F"), canary("HTTPS_PROXY", "%2F")
        for place, quoted in (("proxy", ours), ("HTTPS_PROXY", theirs)):
            add(f"{place}, decoded", quoted.replace("%2F", "/"))
        proxy = f"http://{USER}:{ours}@{PROXY}:3128"
        self.registries["proxied"] = {"url": "https://proxied.test", "proxy": proxy}
        self.env["HTTPS_PROXY"] = f"http://{USER}:{theirs}@{PROXY}:3128"
        self.env["NO_PROXY"] = f"{GITHUB},{STORAGE}"
        self.registries["outside"] = {"url": "https://outside.test"}

    def _auths(self, *kinds: str, where: str = "") -> dict[str, Any]:
        """Return a file of credentials, whose registries let nobody else in."""
        entries: dict[str, Any] = {}
        for kind in kinds:
            name = f"{kind}{where}"
            secret = canary(f"{kind} in {where or 'a variable'}", ".")
            users = {"users": {USER: secret}, "refresh_tokens": {secret: USER}}
            is_token = kind == "registrytoken"
            self.registry(name, Bearer(secret) if is_token else Tokens(self, name, **users))
            told = {"auth": basic(USER, secret)} if kind == "auth" else {kind: secret}
            entries[f"{name}.test"] = {"username": USER, **told} if kind == "password" else told
        return {"auths": entries}

    def _add_clouds(self, aws: str, azure: str, google: str, issuer: str) -> None:
        """Put canaries where three clouds' identities are looked for, by one source each."""
        services = Services(self, is_azure_machine=azure == "machine")
        for host in SERVICES:
            self.listen(services, host, scheme="https")
        for host, port in NEARBY.items():
            self.listen(services, host, port)
        for source in (aws, azure, google):
            for name, text in SOURCES[source].items():
                if name.startswith("$"):
                    self.env[name[1:]] = self.filled(text)
                else:
                    self.write(name, text)
        self.registry(
            "ecr", BasicAuth({"AWS": self.hand("password of ECR", "+")}), ECR, auth_type="ecr"
        )
        users = {"oauth2accesstoken": access_token_of(self, issuer)}
        refresh = self.hand("refresh token of ACR", ".")
        service = Tokens(self, "acr", refresh_tokens={refresh: USER})
        acr = self.registry("acr", service, ACR, auth_type="acr")
        redirect: Any = acr.intercept

        def exchange(request: Request) -> Any:
            def answer(body: str) -> Response:
                self.heard.append(body)
                return Response(200, [], json.dumps({"refresh_token": refresh}).encode())

            return whole(answer) if request.path == "/oauth2/exchange" else redirect(request)

        acr.intercept = exchange
        self.registry("gar", Tokens(self, "gar", rotates=False, users=users), GAR, auth_type="gar")

    def _amend(self, host: str, site: Site, request: Request, answer: Answer) -> Answer:
        """Note what a server was shown, and let it repeat that."""
        if not isinstance(answer, Response):
            return answer
        self.asked += 1
        said = self._shown(site, request)
        self.heard += said
        answer.headers.append(("Set-Cookie", f"session={canary('cookie')}; Path=/"))
        if host == "target.test" and request.method == "POST" and answer.status == 202:
            state = canary("_state of an upload", "-")
            answer.headers = [
                (name, f"{value}&token={state}" if name == "Location" else value)
                for name, value in answer.headers
            ]
        text = " and ".join(each for each in dict.fromkeys(said) if each)
        if self.answers is None or not find(text):
            return answer  # it has nothing to repeat
        given = self.answers(host, request, answer, text)
        self.repeated += given is not answer
        return given

    @staticmethod
    def _shown(site: Site, request: Request) -> list[str]:
        """Return all of a request that may be a secret: headers, parameters, the body."""
        usual = ("host", "user-agent", "accept")
        shown = [value for name, value in request.headers if name not in usual]
        shown += [value for _, value in request.query if len(value) > 20 and ":" not in value]
        own = request.header("host")
        for entry in site.journal.entries[-5:]:
            if (entry.header("host"), entry.target) == (own, request.target):
                shown += entry.sent_secrets()
                for secret in entry.secrets:
                    if not find(secret):
                        add(f"what was sent to {own}", secret)
        scheme, _, value = request.header("authorization").partition(" ")
        if scheme == "Basic":
            shown.append(base64.b64decode(value).decode())
        return [*shown, request.target, *([site.bodies[own]] if isinstance(site, Services) else [])]

    def config(self) -> Path:
        """Write the configuration: each registry's image goes to the target, the first to both."""
        mappings = [
            {"from": "app", "to": name, "source": name, "tags": {"glob": "v*"}}
            for name in self.registries
            if name not in ("target", "second")
        ]
        mappings[1:] = [{**each, "targets": ["target"]} for each in mappings[1:]]
        targets = [name for name in ("target", "second") if name in self.registries]
        defaults = {"source": "target", "targets": targets, "artifacts": {"enabled": True}}
        self.file.write_text(document(self.registries, *mappings, defaults=defaults))
        return self.file

    async def run(self, command: str, registry: str = "written.test") -> Ran:
        """Run a command; FILE and REGISTRY stand for the configuration and a source."""
        text = command.replace("FILE", str(self.file)).replace("REGISTRY", registry)
        return await self.world.run(*text.split(), env=self.env)

    def unused(self) -> set[str]:
        """Return the places whose secrets no server was shown, and which are for showing."""
        files = [path.read_text() for path in self.home.rglob("*") if path.is_file()]
        placed = find("\n".join([*self.env.values(), *files, self.file.read_text()]))
        idle = (placed.keys() | self.handed) - find("\n".join(self.heard)).keys()
        return {place for place in idle if not NEVER_SENT.search(place)}
