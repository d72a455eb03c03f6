"""A mirror with a secret in every place that a secret can come from, between servers that repeat
whatever they hear.

Owns: the places, what is in each, who asks for it. May not know: what the program may show.
Invariant: each place is in one variant at least, and a variant in which nothing fails has every one
of its secrets in use. Services of clouds are played by one site that believes anybody: what they
verify is tested elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from conformance.clouds.google import make_key
from conformance.content.images import Seed
from conformance.messages import Answer, Content, Request, Response
from conformance.registry.app import App
from conformance.registry.tokens import BasicAuth, TokenService
from conformance.server.exchange import Reception, Site
from tests.canaries import Canaries, make
from tests.ends import Ran, Virtual, basic, document

ECR, ACR, GAR = (
    "123456789012.dkr.ecr.eu-west-1.amazonaws.com",
    "name.azurecr.io",
    "europe-docker.pkg.dev",
)
STORAGE, PROXY = "storage.test", "proxy.test"
SERVICES = (
    *(
        "api.ecr.eu-west-1.amazonaws.com",
        "sts.eu-west-1.amazonaws.com",
        "portal.sso.eu-west-1.amazonaws.com",
    ),
    *(
        "oidc.eu-west-1.amazonaws.com",
        "login.microsoftonline.com",
        "oauth2.googleapis.com",
        "sts.googleapis.com",
    ),
    "iamcredentials.googleapis.com",
)
NEARBY = (("169.254.169.254", 80), ("169.254.170.2", 80), ("localhost", 42356))
USER = "mirror"
TENANT, CLIENT = "22222222-2222-4222-8222-222222222222", "11111111-1111-4111-8111-111111111111"
# What proves an identity without being sent: keys sign. The others nobody has any use for.
NEVER_SENT = ("secret_access_key", "private_key", "client_key", "netrc", "cookie", "instead")


class Tokens(TokenService):
    """A token service whose tokens are canaries; `rotates`: each comes with a new refresh token."""

    def __init__(
        self, name: str, canaries: Canaries, *, rotates: bool = False, **options: Any
    ) -> None:
        super().__init__(anonymous=False, now=anyio.current_time, **options)
        self._name, self._canaries, self._rotates, self._made = name, canaries, rotates, 0

    def write_token(self, user: str | None) -> str:
        self._made += 1
        return self._canaries.make(f"token {self._made} of {self._name}", ".")

    def issue(self, *given: Any, offline: bool) -> Response:
        answer = super().issue(*given, offline=False)
        if self._rotates and answer.status == 200:
            renewed = self._canaries.make(f"refresh token {self._made} of {self._name}", "~")
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
        return Response(
            401, [("WWW-Authenticate", 'Bearer realm="https://elsewhere.test/token"')], b"{}"
        )


class Services(Site):
    """All services of all clouds; `gives` are the secrets that they hand out."""

    def __init__(self, canaries: Canaries) -> None:
        super().__init__()
        self.canaries, self.bodies = canaries, dict[str, str]()
        self.is_machine = False  # whether a metadata service of Azure's has an identity

    def start(self, request: Request) -> Reception:
        content = Content()

        def finish(_: int) -> Response:
            self.bodies[request.header("host")] = bytes(content).decode("latin-1")
            return self._tell(request)

        return Reception(content, finish)

    def given(self, what: str, joint: str = "/") -> str:
        return self.canaries.make(f"given: {what}", joint)

    def _tell(self, request: Request) -> Response:
        host, path = request.header("host").partition(":")[0], request.path
        headers = [("Content-Type", "application/json")]
        if host.startswith("api.ecr"):
            password = self.given("password of ECR", "+")
            told: Any = {
                "authorizationData": [
                    {"authorizationToken": basic("AWS", password), "expiresAt": 1.8e9}
                ]
            }
        elif host.startswith("sts.eu"):
            keys = {**self._keys(host), "SessionToken": self.given(f"session token of {host}")}
            return Response(
                200,
                [],
                "".join(f"<{name}>{value}</{name}>" for name, value in keys.items()).encode(),
            )
        elif host.startswith("portal.sso"):
            told = {
                "roleCredentials": {
                    name[0].lower() + name[1:]: value for name, value in self._keys(host).items()
                }
            }
            told["roleCredentials"]["sessionToken"] = self.given(f"session token of {host}")
        elif host.startswith("iamcredentials"):
            told = {
                "accessToken": self.given("access token of an impersonation", "."),
                "expireTime": "2026-01-01",
            }
        elif path == "/latest/api/token":
            return Response(200, [], self.given("token of IMDS", "=").encode())
        elif path == "/latest/meta-data/iam/security-credentials/":
            return Response(200, [], b"role")
        elif host == "169.254.170.2" or path.startswith("/latest/"):
            told = {**self._keys(host), "Token": self.given(f"session token of {host}")}
        else:
            if path.startswith("/metadata/identity") and not request.header("metadata"):
                return Response(400 if self.is_machine else 404)
            headers.append(("Metadata-Flavor", "Google"))
            told = {"access_token": self.given(f"access token of {host}", "."), "expires_in": 3600}
        return Response(200, headers, json.dumps(told).encode())

    def _keys(self, host: str) -> dict[str, str]:
        secret = self.given(f"secret_access_key of {host}")
        return {
            "AccessKeyId": "ASIA0000000000000001",
            "SecretAccessKey": secret,
            "Expiration": "2026-01-01T06:00:00Z",
        }


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


@dataclass
class Scene:
    """What a variant's machine has, and who answers it; `heard`: all that servers were shown."""

    world: Virtual
    directory: Path
    home: Path
    canaries: Canaries = field(default_factory=Canaries)
    env: dict[str, str] = field(default_factory=dict)
    registries: dict[str, Any] = field(default_factory=dict)
    sites: dict[str, Site] = field(default_factory=dict)
    heard: list[str] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    # What becomes of an answer to somebody who has shown something: (host, request, answer, all of
    # it) -> answer.
    answers: Callable[[str, Request, Response, str], Answer] | None = None
    asked: int = 0
    repeated: int = 0  # answers that repeated a secret
    first: int = 300  # bytes of the first registry's image

    def write(self, name: str, text: str | object) -> Path:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        return path

    def listen(self, site: Site, host: str, port: int | None = None, scheme: str = "http") -> None:
        """Let a site answer; nobody judges what is asked of it."""
        site.amend = lambda request, answer: self._amend(host, site, request, answer)
        self.sites[host] = site
        self.world.network.listen(site, host, port, scheme=scheme)

    def registry(self, name: str, auth: Any, host: str = "", **config: Any) -> App:
        """Let a registry answer that is a source; its blobs are at a storage, behind signed URLs."""
        app, size = (
            App(auth=auth),
            300 if self.registries.keys() - {"target", "second"} else self.first,
        )
        image = Seed(len(self.registries)).image(sizes=(size,)).load_into(app, "app", tag="v1")
        self.blobs |= image.contents()
        signature = self.canaries.make(f"signature of {name}", "%2F")
        session = self.canaries.make(f"_state of {name}", "-")

        def redirect(request: Request) -> Response | None:
            if (
                request.kind != "blob"
                or request.method != "GET"
                or app.auth.check(request, []) is not None
            ):
                return None
            query = f"?X-Amz-Signature={signature}&X-Amz-Security-Token={session}"
            return Response(307, [("Location", f"{scheme}://{STORAGE}/{request.reference}{query}")])

        app.intercept = redirect
        scheme = "https" if host else "http"
        self.listen(app, host or f"{name}.test", scheme=scheme)
        self.registries[name] = {"url": f"{scheme}://{host or f'{name}.test'}", **config}
        return app

    def _amend(self, host: str, site: Site, request: Request, answer: Answer) -> Answer:
        if not isinstance(answer, Response):
            return answer
        self.asked += 1
        shown = [
            value for name, value in request.headers if name not in ("host", "user-agent", "accept")
        ]
        shown += [value for _, value in request.query if len(value) > 20 and ":" not in value]
        own = request.header("host")
        near = [
            entry
            for entry in site.journal.entries[-5:]
            if (entry.header("host"), entry.target) == (own, request.target)
        ]
        shown += [secret for entry in near for secret in entry.sent_secrets()]
        for secret in (secret for entry in near for secret in entry.secrets):
            if not self.canaries.found(secret.encode()):
                self.canaries.add(f"what was sent to {own}", secret)
        pair = request.header("authorization").partition(" ")[2]
        if request.header("authorization").startswith("Basic "):
            shown.append(base64.b64decode(pair).decode())
        body = site.bodies.get(own, "") if isinstance(site, Services) else ""
        self.heard += [*shown, request.target, body]
        answer.headers.append(("Set-Cookie", f"session={self.canaries.make('cookie')}; Path=/"))
        if host == "target.test" and request.method == "POST" and answer.status == 202:
            state = self.canaries.make("_state of an upload", "-")
            answer.headers = [
                (name, f"{value}&token={state}" if name == "Location" else value)
                for name, value in answer.headers
            ]
        said = " and ".join(each for each in dict.fromkeys([*shown, request.target, body]) if each)
        if self.answers is None or not self.canaries.found(said.encode()):
            return answer  # it has nothing to repeat
        given = self.answers(host, request, answer, said)
        self.repeated += given is not answer
        return given

    def config(self, *more: Mapping[str, Any], **top: Any) -> Path:
        """Write the configuration: each registry's image goes to the target."""
        mappings = [
            {"from": "app", "to": name, "source": name, "tags": {"glob": "v*"}}
            for name in self.registries
            if name not in ("target", "second")
        ]
        file = self.directory / "mirror.yaml"
        defaults = {
            "source": "target",
            "targets": ["target", "second"],
            "artifacts": {"enabled": True},
        }
        mappings[1:] = [{**each, "targets": ["target"]} for each in mappings[1:]]
        file.write_text(document(self.registries, *mappings, *more, defaults=defaults, **top))
        return file

    async def run(self, *words: str) -> Ran:
        return await self.world.run(*words, env=self.env)


def targets(scene: Scene) -> None:
    """Have two targets, which one login is for, and a storage."""
    scene.env["CONFIG_PASSWORD"] = password = scene.canaries.make("credentials.password", "/:+")
    login = {
        "auth_type": "basic",
        "credentials": {"username": USER, "password": "${CONFIG_PASSWORD}"},
    }
    for name in ("target", "second"):
        scene.listen(App(auth=BasicAuth({USER: password})), f"{name}.test")
        scene.registries[name] = {"url": f"http://{name}.test", **login}
    for scheme in ("http", "https"):
        scene.listen(Storage(scene.blobs), STORAGE, scheme=scheme)


def everywhere(scene: Scene) -> None:
    """Put a canary into every place that is no cloud's."""
    make, env = scene.canaries.make, scene.env
    written = make("credentials.password, written out", "%&~")
    scene.registry(
        "written",
        Tokens("written", scene.canaries, users={USER: written}, rotates=True),
        auth_type="basic",
        credentials={"username": USER, "password": written},
    )
    env["CONFIG_TOKEN"] = token = make("token", ".")
    scene.registry("static", Bearer(token), auth_type="static_token", token="${CONFIG_TOKEN}")
    env["GITHUB_TOKEN"], env["GITHUB_ACTOR"] = make("GITHUB_TOKEN", "_"), USER
    scene.registry(
        "github", Tokens("github", scene.canaries, users={USER: env["GITHUB_TOKEN"]}), "ghcr.io"
    )

    def entry(place: str, kind: str) -> dict[str, str]:
        """Return an `auths` entry, whose registry lets nobody else in."""
        name = re.sub("[^a-z]+", "-", place.lower())
        secret = make(place, ".")
        auth: Any = Tokens(
            name, scene.canaries, users={USER: secret}, refresh_tokens={secret: USER}, rotates=True
        )
        scene.registry(name, Bearer(secret) if kind == "registrytoken" else auth)
        told = {"auth": basic(USER, secret)} if kind == "auth" else {kind: secret}
        return {
            f"{name}.test": told if kind != "password" else {"username": USER, "password": secret}
        }  # type: ignore[dict-item]

    for variable, kind in (("DOCKER_AUTH_CONFIG", "auth"), ("REGISTRY_AUTH_FILE", "identitytoken")):
        auths = {"auths": entry(variable, kind)}
        env[variable] = (
            json.dumps(auths) if kind == "auth" else str(scene.write("auth.json", auths))
        )
    both = {
        **entry("docker's config.json", "auth"),
        **entry("docker's config.json, identity", "identitytoken"),
    }
    scene.write(
        "docker/config.json",
        {"auths": {**both, **entry("docker's config.json, bearer", "registrytoken")}},
    )
    env["DOCKER_CONFIG"] = str(scene.home / "docker")
    for variable in ("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
        scene.write(f"{variable}/containers/auth.json", {"auths": entry(variable, "password")})
        env[variable] = str(scene.home / variable)
    scene.write(".netrc", f"machine target.test login {USER} password {make('netrc')}\n")
    scene.listen(Storage({}), PROXY, 3128)
    for place in ("proxy", "HTTPS_PROXY"):
        secret = make(place, "%2F")
        url = f"http://{USER}:{secret}@{PROXY}:3128"
        scene.canaries.add(f"{place}, decoded", secret.replace("%2F", "/"))
        if place == "proxy":
            scene.registries["proxied"] = {"url": "https://proxied.test", "proxy": url}
        else:
            env[place] = url
            env["NO_PROXY"] = f"ghcr.io,{STORAGE}"
            scene.registries["outside"] = {"url": "https://outside.test"}


def clouds(scene: Scene, aws: str, azure: str, google: str) -> None:
    """Put canaries where three clouds' identities are looked for, by one source each."""
    services = Services(scene.canaries)
    services.is_machine = azure == "imds"
    for host in SERVICES:
        scene.listen(services, host, scheme="https")
    for host, port in NEARBY:
        scene.listen(services, host, port)
    _AWS[aws](scene)
    _AZURE[azure](scene)
    _GOOGLE[google](scene)
    password = scene.canaries.make("given: password of ECR", "+")
    scene.registry("ecr", BasicAuth({"AWS": password}), ECR, auth_type="ecr")
    refresh = scene.canaries.make("given: refresh token of ACR", ".")
    acr = scene.registry(
        "acr",
        Tokens("acr", scene.canaries, refresh_tokens={refresh: USER}, rotates=True),
        ACR,
        auth_type="acr",
    )
    redirect = acr.intercept
    assert redirect is not None

    def exchange(request: Request) -> Any:
        if request.path != "/oauth2/exchange":
            return redirect(request)
        content = Content()

        def finish(_: int) -> Response:
            scene.heard.append(bytes(content).decode("latin-1"))
            return Response(200, [], json.dumps({"refresh_token": refresh}).encode())

        return Reception(content, finish)

    acr.intercept = exchange
    given = (
        "of an impersonation"
        if google == "impersonation"
        else f"of {_ISSUERS.get(google, 'oauth2.googleapis.com')}"
    )
    access = make(f"given: access token {given}", ".")
    users = {"oauth2accesstoken": access}
    scene.registry("gar", Tokens("gar", scene.canaries, users=users), GAR, auth_type="gar")


_ISSUERS = {
    "subject": "sts.googleapis.com",
    "workforce": "sts.googleapis.com",
    "metadata": "169.254.169.254",
}


def _aws_keys(scene: Scene) -> None:
    make = scene.canaries.make
    scene.env |= {
        "AWS_ACCESS_KEY_ID": "ASIA0000000000000000",
        "AWS_SECRET_ACCESS_KEY": make("AWS secret_access_key"),
        "AWS_SESSION_TOKEN": make("AWS_SESSION_TOKEN", "+"),
    }


def _aws_web_identity(scene: Scene) -> None:
    token = scene.write("web-identity", scene.canaries.make("AWS_WEB_IDENTITY_TOKEN_FILE", "."))
    scene.env |= {
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
        "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/pull",
    }


def _aws_container(scene: Scene) -> None:
    token = scene.canaries.make("AWS_CONTAINER_AUTHORIZATION_TOKEN")
    scene.env |= {
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2/x",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN": token,
    }


def _aws_container_file(scene: Scene) -> None:
    token = scene.write(
        "pod-token", scene.canaries.make("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", ".")
    )
    url = "http://169.254.170.2/v1/credentials"
    scene.env |= {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": url,
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(token),
    }


def _aws_sso(scene: Scene) -> None:
    make = scene.canaries.make
    session = "[sso-session corp]\nsso_start_url = https://corp.test\nsso_region = eu-west-1\n"
    profile = "[default]\nsso_session = corp\nsso_account_id = 123456789012\nsso_role_name = pull\n"
    scene.write(".aws/config", f"{session}{profile}region = eu-west-1\n")
    cached = {"accessToken": make("SSO accessToken"), "expiresAt": "2100-01-01T00:00:00Z"}
    scene.write(f".aws/sso/cache/{hashlib.sha1(b'corp').hexdigest()}.json", cached)


def _aws_profile(scene: Scene) -> None:
    make = scene.canaries.make
    keys = f"aws_secret_access_key = {make('profile secret_access_key')}\naws_session_token = {make('profile token')}\n"
    scene.write(".aws/credentials", f"[base]\naws_access_key_id = ASIA0000000000000002\n{keys}")
    role = "role_arn = arn:aws:iam::123456789012:role/pull\nsource_profile = base\nregion = eu-west-1\n"
    scene.write(".aws/config", f"[default]\n{role}external_id = {make('external_id')}\n")


def _nothing(scene: Scene) -> None:
    """Leave it to the metadata service."""


def _azure_secret(scene: Scene) -> None:
    secret = scene.canaries.make("AZURE_CLIENT_SECRET", "~/")
    scene.env |= {
        "AZURE_CLIENT_SECRET": secret,
        "AZURE_CLIENT_ID": CLIENT,
        "AZURE_TENANT_ID": TENANT,
    }


def _azure_federated(scene: Scene) -> None:
    token = scene.write("federated", scene.canaries.make("AZURE_FEDERATED_TOKEN_FILE", "."))
    scene.env |= {
        "AZURE_FEDERATED_TOKEN_FILE": str(token),
        "AZURE_CLIENT_ID": CLIENT,
        "AZURE_TENANT_ID": TENANT,
    }


def _azure_service(scene: Scene) -> None:
    header = scene.canaries.make("IDENTITY_HEADER", "-")
    scene.env |= {
        "IDENTITY_ENDPOINT": "http://localhost:42356/msi/token",
        "IDENTITY_HEADER": header,
    }


def _azure_session(scene: Scene, *, token: bool = False) -> None:
    held = {"home_account_id": "oid.tid", "environment": "login.microsoftonline.com"}
    access = {
        **held,
        "realm": TENANT,
        "target": "https://containerregistry.azure.net/.default",
        "expires_on": "1900000000",
        "secret": scene.canaries.make("az login access token", ".") if token else "",
    }
    refresh = {
        **held,
        "last_modification_time": "1",
        "secret": scene.canaries.make("az login refresh token", "+"),
    }
    account = {"home_account_id": "oid.tid", "username": "me@tenant.test"}
    named = {"AccessToken": access, "RefreshToken": refresh, "Account": account}
    kept = {kind: {"one": one} for kind, one in named.items() if (kind == "AccessToken") <= token}
    scene.write(".azure/msal_token_cache.json", {"AccessToken": {}, **kept})
    user = {"name": "me@tenant.test", "type": "user"}
    mine = {"tenantId": TENANT, "isDefault": True, "environmentName": "AzureCloud", "user": user}
    scene.write(".azure/azureProfile.json", {"subscriptions": [mine]})


def _google(scene: Scene, kind: str, **fields: Any) -> dict[str, Any]:
    file = {"type": kind, **fields}
    scene.env["GOOGLE_APPLICATION_CREDENTIALS"] = str(scene.write(f"{kind}.json", file))
    return file


def _google_user(scene: Scene) -> dict[str, Any]:
    make = scene.canaries.make
    secret, refresh = make("Google client_secret", "-"), make("Google refresh_token", "//")
    return _google(
        scene, "authorized_user", client_id="client", client_secret=secret, refresh_token=refresh
    )


def _google_account(scene: Scene) -> None:
    key = make_key()
    for number, line in enumerate(key.pem.splitlines()[1:-1]):
        scene.canaries.add(f"Google private_key, line {number}", line)
    _google(
        scene,
        "service_account",
        private_key=key.pem,
        private_key_id=key.name,
        client_email="robot@project.test",
    )


def _google_subject(scene: Scene) -> None:
    token = scene.write("subject", scene.canaries.make("Google subject token", "."))
    _google(
        scene,
        "external_account",
        audience="//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/pool/providers/mine",
        subject_token_type="urn:ietf:params:oauth:token-type:jwt",
        token_url="https://sts.googleapis.com/v1/token",
        credential_source={"file": str(token)},
    )


def _google_workforce(scene: Scene) -> None:
    make = scene.canaries.make
    secret, refresh = make("workforce client_secret", "-"), make("workforce refresh_token", "/")
    url = "https://sts.googleapis.com/v1/oauthtoken"
    fields = {
        "client_id": "client",
        "client_secret": secret,
        "refresh_token": refresh,
        "token_url": url,
    }
    _google(scene, "external_account_authorized_user", **fields)


def _google_impersonation(scene: Scene) -> None:
    at = "https://iamcredentials.googleapis.com/v1/projects/-/serviceAccounts/x:generateAccessToken"
    source = _google_user(scene)
    _google(
        scene,
        "impersonated_service_account",
        service_account_impersonation_url=at,
        source_credentials=source,
    )


_Arrange = Callable[[Scene], object]
_AWS: dict[str, _Arrange] = {
    "keys": _aws_keys,
    "web identity": _aws_web_identity,
    "container": _aws_container,
    "container file": _aws_container_file,
    "sso": _aws_sso,
    "profile": _aws_profile,
    "imds": _nothing,
}
_AZURE: dict[str, _Arrange] = {
    "secret": _azure_secret,
    "federated": _azure_federated,
    "service": _azure_service,
    "session": _azure_session,
    "session's token": lambda scene: _azure_session(scene, token=True),
    "imds": _nothing,
}
_GOOGLE: dict[str, _Arrange] = {
    "user": _google_user,
    "account": _google_account,
    "subject": _google_subject,
    "workforce": _google_workforce,
    "impersonation": _google_impersonation,
    "metadata": _nothing,
}
VARIANTS: Mapping[str, tuple[str, str, str]] = {
    "of the environment": ("keys", "secret", "user"),
    "of files": ("web identity", "federated", "account"),
    "of containers": ("container", "service", "subject"),
    "of logins": ("sso", "session", "workforce"),
    "a valid AWS": ("profile", "session's token", "impersonation"),
    "of a pod": ("container file", "secret", "user"),
    "of machines": ("imds", "imds", "metadata"),
}


def arranged(
    world: Virtual, directory: Path, home: Path, variant: str = "", **options: Any
) -> Scene:
    """Return a machine with a canary in every place, or with clouds' alone."""
    scene = Scene(world, directory, home, **options)
    targets(scene)
    if variant:
        clouds(scene, *VARIANTS[variant])
    else:
        everywhere(scene)
    return scene


# What is run in it.

COMMANDS: dict[str, tuple[str, ...]] = {
    "sync": ("sync", "-vv", "--json", "-c", "FILE"),
    "sync, its log": ("sync", "--recheck", "--verify", "-vv", "--log-format", "json", "-c", "FILE"),
    "sync --dry-run": ("sync", "--dry-run", "-vv", "--json", "-c", "FILE"),
    "lock": ("lock", "-vv", "--recheck", "-c", "FILE"),
    "lock --check": ("lock", "-vv", "--recheck", "--check", "-c", "FILE"),
    "sync --locked": ("sync", "--locked", "-vv", "--json", "-c", "FILE"),
    "audit": ("audit", "-vv", "--json", "--read", "-c", "FILE"),
    "auth": ("auth", "check", "-vv", "-c", "FILE"),
    "auth, json": ("auth", "check", "-vv", "--json", "-c", "FILE"),
    "tags": ("tags", "-vv", "-c", "FILE", "REGISTRY/app"),
    "copy": ("copy", "-vv", "-c", "FILE", "REGISTRY/app:v1", "target.test/copied:v1"),
    "validate": ("validate", "-vv", "FILE"),
    "expand": ("expand", "-vv", "FILE"),
    "schema": ("schema", "-vv"),
    "version": ("version", "-vv", "--json"),
}
# `watch` has tests of its own (test_canary_failures.py); `report` reads no configuration and asks nobody.
ELSEWHERE = {"watch", "report"}


def words(scene: Scene, command: str, registry: str = "written.test") -> list[str]:
    """Return the words of one of COMMANDS."""
    file = str(scene.directory / "mirror.yaml")
    return [word.replace("FILE", file).replace("REGISTRY", registry) for word in COMMANDS[command]]


def said(ran: Ran) -> dict[str, str]:
    """Return what a run said, by channel."""
    return {"standard output": ran.out, "standard error": ran.err}
