"""What a user reads when a copy fails: a row for each class of failure, the exact line and its
remedy.

Each row is a real copy between the harness's registries, or with a peer that no registry would be.
A line names what failed, where (`S` is the source's address, `T` the target's), why in the
registry's own cleaned words; a hint says what to do where that is known. Nothing else is said: no
traceback, no second line.
"""

from __future__ import annotations

import datetime
import json
import re
import select
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trustme

from conformance.content.images import Image, Seed
from conformance.messages import Answer, Request, Response, error
from conformance.registry.app import App
from conformance.registry.tokens import BasicAuth, TokenService
from conformance.server.sockets import Server
from tests.ends import Peer, Ran, Start, document, run_regsync, sync, tags, until_blank_line

USER, SECRET = "captain", "hunter2"
ECR = "123456789012.dkr.ecr.eu-west-1.amazonaws.com"
LOGIN = "log in with a container client (docker login {}), or configure auth_type: basic"
ANONYMOUS = (
    f"{LOGIN}, since no credentials are in use; or check the name: "
    "a missing repository may look like a private one"
)
UNREACHED = "check host, port and firewalls; set HTTPS_PROXY if a proxy leads there"
PROXY = "check the proxy, which HTTPS_PROXY names; list hosts to reach without it in NO_PROXY"
WRONG = "check the user name, and whether the password or token has expired or lacks rights"
PLAIN = "write http:// before the host if it serves plain HTTP"


@dataclass
class Scene:
    """Two registries, the first with an image, and what it takes to break one of them."""

    serve: Start
    speaker: Callable[[Callable[[socket.socket], None]], str]
    ca: trustme.CA
    directory: Path
    source: Server
    target: Server
    image: Image
    names: tuple[tuple[str, str], ...] = ()

    @property
    def app(self) -> App:
        """What the source holds."""
        return self.source.app

    def copy(
        self, *more: str, source: str = "", target: str = "", proxy: str = "", **options: Any
    ) -> Ran:
        """Copy `app:v1` from S to T, through P."""
        source, target = source or self.source.address, target or self.target.address
        self.names = ((source, "S"), (target, "T"), *([(proxy, "P")] if proxy else []))
        if proxy:
            options["env"] = {"HTTPS_PROXY": f"http://{options.pop('login', '')}{proxy}"}
        where = [f"{source}/app:v1", f"{target}/app:v1"]
        return run_regsync("copy", "--no-artifacts", *more, *where, **options)

    def told(self, ran: Ran) -> list[str]:
        """Return what was said, with short names."""
        text = re.sub("sha256:[0-9a-f]{64}", "DIGEST", ran.err)
        for name, short in self.names:
            text = text.replace(name, short)
        lines = text.replace(str(self.directory), "DIR").splitlines()
        return [
            line
            for line in lines
            if not line.startswith(("warning: waiting for ", "still running"))
        ]

    def login(self, address: str, password: str = SECRET, **fields: Any) -> list[str]:
        """Write a configuration that knows one registry, with credentials."""
        credentials = {"username": USER, "password": password}
        return self.config(address, auth_type="basic", credentials=credentials, **fields)

    def config(self, url: str, **fields: Any) -> list[str]:
        path = self.directory / "mirror.yaml"
        path.write_text(json.dumps({"registries": {"it": {"url": url, **fields}}, "mappings": []}))
        return ["-c", str(path)]

    def secured(self, *names: str, **options: Any) -> str:
        """Serve TLS with a certificate of our authority; return HOST:PORT."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.ca.issue_cert(*names, **options).configure_cert(context)
        return self.serve(ssl_context=context).address

    def ca_file(self) -> str:
        path = self.directory / "ca.pem"
        self.ca.cert_pem.write_to_path(str(path))
        return str(path)

    def says(self, text: bytes) -> str:
        """Start a peer that reads one head and says `text`; return HOST:PORT."""

        async def script(peer: Peer) -> None:
            await peer.head()
            await peer.send(text)

        return self.speaker(script)


@pytest.fixture
def scene(
    serve: Start, speaker: Any, ca: trustme.CA, tmp_path: Path, source: Server, target: Server
) -> Scene:
    image = Seed(1).image(sizes=(2000,))
    scene = Scene(serve, speaker, ca, tmp_path, source, target, image)
    image.load_into(scene.app, "app", tag="v1")
    return scene


def answers(server: Server, kind: str, response: Response, method: str = "") -> Server:
    """Let a registry answer one kind of request so."""

    def intercept(request: Request) -> Answer | None:
        return response if request.kind == kind and method in ("", request.method) else None

    server.app.intercept = intercept
    return server


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


REFUSED = "DENIED requested access to the resource is denied"
DENIED = error(403, "DENIED", REFUSED.removeprefix("DENIED "))
LIMIT = "You have reached your pull rate limit."
MISSING = "The repository with name 'app' does not exist in the registry with id '123456789012'"


Case = Callable[[Scene], Ran]
CASES: list[Any] = []

ON_SOCKETS = pytest.mark.process  # for TLS


def told(cause: str, hint: str | None = None, *marks: Any) -> Callable[[Case], Case]:
    """Enter a way to fail with what the user reads of it: the code and the cause, the hint."""

    def enter(case: Case) -> Case:
        CASES.append(pytest.param(case, cause, hint, marks=marks, id=case.__name__))
        return case

    return enter


# Who we are.


@told(
    "AUTH_ERROR: look up T/app:v1: T asks for a user name and password, and none are configured or found",
    LOGIN.format("T"),
)
def basic(scene: Scene, password: str | None = None) -> Ran:
    target = scene.serve(auth=BasicAuth({USER: SECRET})).address
    return scene.copy(*(scene.login(target, password) if password else []), target=target)


@told(
    "AUTH_ERROR: look up T/app:v1: T refused the credentials (credentials of registry 'it')", WRONG
)
def wrong_password(scene: Scene) -> Ran:
    return basic(scene, "wrong")


@told(
    "AUTH_ERROR: fetch manifest S/app:v1: the token service of S gives no token for app (pull) "
    "without credentials: status 401: UNAUTHORIZED incorrect username or password",
    ANONYMOUS.format("S"),
)
def token(scene: Scene, password: str | None = None) -> Ran:
    source = scene.serve(auth=TokenService({USER: SECRET}, anonymous=False)).address
    return scene.copy(*(scene.login(source, password) if password else []), source=source)


@told(
    "AUTH_ERROR: fetch manifest S/app:v1: the token service of S refused the credentials "
    "(credentials of registry 'it')",
    WRONG,
)
def wrong_password_for_a_token(scene: Scene) -> Ran:
    return token(scene, "wrong")


@told(
    "AUTH_ERROR: push blob T/app@DIGEST: status 401: UNAUTHORIZED authentication required",
    ANONYMOUS.format("T"),
)
def token_for_reading_only(scene: Scene) -> Ran:
    return scene.copy(target=scene.serve(auth=TokenService({USER: SECRET})).address)


@told(f"AUTH_ERROR: push blob T/app@DIGEST: status 403: {REFUSED}", ANONYMOUS.format("T"))
def denied(scene: Scene) -> Ran:
    answers(scene.target, "upload_start", DENIED)
    return scene.copy()


@told(
    f"AUTH_ERROR: push blob T/app@DIGEST: status 403: {REFUSED}",
    "check which rights the credentials (credentials of registry 'it') have there",
)
def denied_to_us(scene: Scene) -> Ran:
    target = answers(scene.serve(auth=BasicAuth({USER: SECRET})), "upload_start", DENIED).address
    return scene.copy(*scene.login(target), target=target)


@told(
    "AUTH_ERROR: look up T/app:v1: registry 'it': no credentials for T; looked at the environment "
    "variable DOCKER_AUTH_CONFIG, DIR/.docker/config.json, DIR/run/containers/auth.json, "
    "DIR/.config/containers/auth.json",
    "log in with a container client, or use auth_type: basic with credentials",
)
def docker_config_absent(scene: Scene) -> Ran:
    return scene.copy(
        *scene.config(scene.target.url, auth_type="docker_config"),
        env={"HOME": str(scene.directory), "XDG_RUNTIME_DIR": str(scene.directory / "run")}
        | {"XDG_CONFIG_HOME": str(scene.directory / ".config")},
    )


@told(
    "AUTH_ERROR: look up T/app:v1: DIR/config.json delegates T to the credential helper "
    "docker-credential-ecr-login (credHelpers), and regsync starts no other programs",
    "use auth_type: basic with credentials, or write an auths entry to a separate file and point "
    "DOCKER_CONFIG at its directory; for public images use auth_type: anonymous",
)
def docker_config_delegates(scene: Scene) -> Ran:
    entry = {"credHelpers": {scene.target.address: "ecr-login"}}
    (scene.directory / "config.json").write_text(json.dumps(entry))
    return scene.copy(env={"DOCKER_CONFIG": str(scene.directory)})


# What is there.


@told(
    "SOURCE_ERROR: fetch manifest S/app:v1: status 404: MANIFEST_UNKNOWN manifest unknown",
    "check the name: `regsync tags S/app` lists what is there",
)
def no_tag(scene: Scene) -> Ran:
    return scene.copy(source=scene.serve().address)


@told(
    "SOURCE_ERROR: list tags of S/nothing: the registry has no such repository",
    "check the name of the repository",
)
def no_repository_to_list(scene: Scene) -> Ran:
    scene.names = ((scene.source.address, "S"), (scene.target.address, "T"))
    return sync({"source": scene.source, "target": scene.target}, {"from": "nothing"})


@told(
    "SOURCE_ERROR: filter platforms of S/app@DIGEST: no platform matches the filter windows/amd64; "
    "the source has linux/amd64, linux/arm64/v8, linux/arm/v7, linux/arm/v6",
    "choose one of these platforms, or ask the publisher for another",
)
def no_platform(scene: Scene) -> Ran:
    Seed(2).index().load_into(scene.app, "app", tag="v1")
    return scene.copy("--platform", "windows/amd64")


@told(
    f"TARGET_ERROR: push blob T/app@DIGEST: status 404: NAME_UNKNOWN {MISSING}",
    "create the repository, or the project that it belongs to, at the target first: "
    "aws ecr create-repository --repository-name app --registry-id 123456789012 --region eu-west-1",
    ON_SOCKETS,
)
def no_repository_at_ecr(scene: Scene) -> Ran:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    scene.ca.issue_cert(ECR).configure_cert(context)
    ecr = answers(
        scene.serve(ssl_context=context), "upload_start", error(404, "NAME_UNKNOWN", MISSING)
    )

    def tunnel(connected: socket.socket) -> None:
        until_blank_line(connected)
        host, _, port = ecr.address.partition(":")
        with socket.create_connection((host, int(port))) as beyond:
            connected.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while ready := select.select([connected, beyond], [], [], 10)[0]:
                if not (piece := ready[0].recv(65536)):
                    return
                (beyond if ready[0] is connected else connected).sendall(piece)

    config = scene.config(f"https://{ECR}", ca_file=scene.ca_file())
    return scene.copy(*config, target=ECR, proxy=scene.speaker(tunnel))


@told(
    "TARGET_ERROR: push blob T/app@DIGEST: status 404: NOT_FOUND project app not found",
    "create the repository, or the project that it belongs to, at the target first",
)
def no_project(scene: Scene) -> Ran:
    answers(scene.target, "upload_start", error(404, "NOT_FOUND", "project app not found"))
    return scene.copy()


# What a registry refuses.


@told(
    f"SOURCE_ERROR: fetch manifest S/app:v1: status 429: TOOMANYREQUESTS {LIMIT} "
    "(asks to wait 2h00m: longer than a run waits)",
    f"{LOGIN.format('S')}, for a higher limit",
)
def quota(scene: Scene) -> Ran:
    refusal = error(429, "TOOMANYREQUESTS", LIMIT, headers=[("Retry-After", "7200")])
    answers(scene.source, "manifest", refusal)
    return scene.copy()


@told(
    f"SOURCE_ERROR: fetch manifest S/app:v1: status 429: TOOMANYREQUESTS {LIMIT} "
    "(asks to wait 2h00m: longer than a run waits)",
    "run again later, or log in with an account that has a higher limit",
)
def quota_of_ours(scene: Scene) -> Ran:
    refusal = error(429, "TOOMANYREQUESTS", LIMIT, headers=[("Retry-After", "7200")])
    source = scene.serve(auth=BasicAuth({USER: SECRET}))
    answers(source, "manifest", refusal)
    return scene.copy(*scene.login(source.address), source=source.address)


@told(
    "TARGET_ERROR: push blob T/app@DIGEST: status 413",
    "raise the size limit for requests, at the registry or at a proxy in front of it "
    "(nginx: client_max_body_size)",
)
def too_large(scene: Scene) -> Ran:
    page = b"<html><h1>413 Request Entity Too Large</h1></html>"
    answers(scene.target, "upload", Response(413, body=page))
    return scene.copy()


@told(
    "TARGET_ERROR: push blob T/app@DIGEST: status 405: UNSUPPORTED The operation is unsupported.",
    "name a registry that accepts pushes: this one may be read-only, or a cache",
)
def read_only(scene: Scene) -> Ran:
    answers(
        scene.target, "upload_start", error(405, "UNSUPPORTED", "The operation is unsupported.")
    )
    return scene.copy()


@told(
    "TARGET_ERROR: push blob T/app@DIGEST: status 500 (tried 5 times)",
    "see the registry's logs or status page; the next run copies only what is missing",
)
def ill(scene: Scene) -> Ran:
    answers(scene.target, "upload_start", Response(500))
    return scene.copy()


@told("TARGET_ERROR: push manifest T/app:v1: status 400: MANIFEST_INVALID [31mbad[0m failed a -> b")
def words_in_colour(scene: Scene) -> Ran:
    answers(
        scene.target,
        "manifest",
        error(400, "MANIFEST_INVALID", "\x1b[31mbad\x1b[0m\nfailed a -> b"),
        "PUT",
    )
    return scene.copy()


# What cannot be copied.


@told(
    "CONTENT_ERROR: fetch manifest S/app:v1: a Docker schema 1 manifest, which cannot be copied unchanged",
    "push the image again with a current tool, as schema 2 or OCI",
)
def schema_1(scene: Scene) -> Ran:
    body = json.dumps({"schemaVersion": 1, "name": "app"}).encode()
    kind = "application/vnd.docker.distribution.manifest.v1+prettyjws"
    scene.app.add_manifest("app", body, kind, "v1")
    return scene.copy()


@told(
    "CONTENT_ERROR: fetch blob S/app@DIGEST: the blob's bytes do not match its digest",
    "check whether a proxy changes what passes it; if none does, push again",
)
def another_blob(scene: Scene) -> Ran:
    digest = max(scene.image.blobs, key=lambda each: len(scene.image.blobs[each]))
    scene.app.add_blob("app", b"x" * len(scene.image.blobs[digest]), digest=digest)
    return scene.copy()


@told(
    "CONTENT_ERROR: fetch manifest S/app:v1: not JSON (Expecting value: line 1 column 1 (char 0)); "
    "received text/html, beginning '<html>login</html>'",
    "check whether a proxy or a login page answers in place of the registry",
)
def a_page_instead(scene: Scene) -> Ran:
    page = Response(200, [("Content-Type", "text/html")], body=b"<html>login</html>")
    answers(scene.source, "manifest", page)
    return scene.copy()


# The way there.


@told(
    "NETWORK_ERROR: fetch manifest S/app:v1: 127.0.0.1 is not trusted: its certificate comes from an "
    "unknown authority",
    "give the authority's PEM file as `ca_file` of the registry, or in SSL_CERT_FILE",
    ON_SOCKETS,
)
def unknown_authority(scene: Scene) -> Ran:
    source = scene.secured("127.0.0.1")
    return scene.copy(*scene.config(f"https://{source}"), source=source)


@told(
    "NETWORK_ERROR: fetch manifest S/app:v1: 127.0.0.1 is not trusted: its certificate has expired",
    "check this host's clock; if it is right, the registry's certificate must be renewed",
    ON_SOCKETS,
)
def expired(scene: Scene) -> Ran:
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
    source = scene.secured("127.0.0.1", not_after=past)
    return scene.copy(*scene.config(f"https://{source}", ca_file=scene.ca_file()), source=source)


@told(
    "NETWORK_ERROR: fetch manifest S/app:v1: 127.0.0.1 is not trusted: its certificate is not valid "
    "for this name",
    "use a name in the certificate, or have it reissued",
    ON_SOCKETS,
)
def another_name(scene: Scene) -> Ran:
    source = scene.secured("other.example")
    return scene.copy(*scene.config(f"https://{source}", ca_file=scene.ca_file()), source=source)


@told(
    "NETWORK_ERROR: look up T/app:v1: the connection broke: Connection reset by peer (waited for 15s)",
    "write https://T if it serves HTTPS",
)
def http_to_https_that_hangs_up(scene: Scene) -> Ran:
    async def script(peer: Peer) -> None:
        await peer.receive()
        peer.reset()

    return scene.copy(target=scene.speaker(script))


@told(
    "SOURCE_ERROR: fetch manifest S/app:v1: status 400: Client sent an HTTP request to an HTTPS server.",
    "write https://S if it serves HTTPS",
)
def http_to_https_of_go(scene: Scene) -> Ran:
    words = b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n"
    return scene.copy(source=scene.says(words))


@told("NETWORK_ERROR: look up T/app:v1: 127.0.0.1 does not speak TLS", PLAIN, ON_SOCKETS)
def https_to_http(scene: Scene) -> Ran:
    async def script(peer: Peer) -> None:
        await peer.receive()
        await peer.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    target = scene.speaker(script)
    return scene.copy(*scene.config(f"https://{target}"), target=target)


@told(
    "NETWORK_ERROR: look up T/app:v1: 127.0.0.1 closed the connection during the TLS handshake "
    "(waited for 15s)",
    PLAIN,
    ON_SOCKETS,
)
def https_to_a_server_that_hangs_up(scene: Scene) -> Ran:
    return scene.copy(*scene.config(f"https://{scene.target.address}"))


@told(
    "NETWORK_ERROR: fetch manifest S/app:v1: the name S could not be resolved: Name or service not known "
    "(tried 3 times)",
    "check the name and this machine's name servers; set HTTPS_PROXY if a proxy leads there",
)
def no_such_name(scene: Scene) -> Ran:
    resolve = socket.getaddrinfo

    def asked(host: str, *more: Any, **options: Any) -> Any:
        if host.endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *more, **options)

    with mock.patch.object(socket, "getaddrinfo", asked):
        return scene.copy(source="no-such-host.invalid")


@told(
    "NETWORK_ERROR: look up T/app:v1: no connection to T: connection refused (waited for 15s)",
    UNREACHED,
)
def refused(scene: Scene) -> Ran:
    return scene.copy(target=closed_port())


@told("NETWORK_ERROR: fetch manifest S/app:v1: no answer from S within 60 s (waited for 15s)")
def silent(scene: Scene) -> Ran:
    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.receive()

    return scene.copy(source=scene.speaker(script))


@told(
    "NETWORK_ERROR: fetch manifest S/app:v1: through the proxy http://P: no connection to P: "
    "connection refused (waited for 15s)",
    PROXY,
)
def proxy_gone(scene: Scene) -> Ran:
    return scene.copy(source="registry.example", proxy=closed_port())


@told(
    "NETWORK_ERROR: fetch manifest S/app:v1: the proxy http://P did not open a tunnel: "
    "no answer from P within 60 s (waited for 15s)",
    PROXY,
)
def proxy_silent(scene: Scene) -> Ran:
    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.receive()

    return scene.copy(source="registry.example", proxy=scene.speaker(script))


def proxy(scene: Scene, status: str, login: str = "") -> Ran:
    speaker = scene.says(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
    return scene.copy(source="registry.example", proxy=speaker, login=login)


@told(
    "NETWORK_ERROR: fetch manifest S/app:v1: the proxy http://P refused a tunnel to S:443 (407)",
    "put user and password into the proxy's URL, percent-encoded",
)
def proxy_wants_a_login(scene: Scene) -> Ran:
    return proxy(scene, "407 Proxy Authentication Required")


@told(
    "NETWORK_ERROR: fetch manifest S/app:v1: the proxy http://P refused a tunnel to S:443 (407)",
    "check the user and password in the proxy's URL",
)
def proxy_refuses_the_login(scene: Scene) -> Ran:
    return proxy(scene, "407 Proxy Authentication Required", f"{USER}:{SECRET}@")


@told(
    "NETWORK_ERROR: fetch manifest S/app:v1: the proxy http://P refused a tunnel to S:443 (403)",
    PROXY,
)
def proxy_forbids_the_host(scene: Scene) -> Ran:
    return proxy(scene, "403 Forbidden")


@pytest.mark.parametrize(("case", "cause", "hint"), CASES)
def test_a_failure_says_what_where_why_and_what_to_do(scene, case, cause, hint):
    ran = case(scene)
    failed, *more = scene.told(ran)
    where = (
        "S/nothing:* -> T/nothing:*" if case is no_repository_to_list else "S/app:v1 -> T/app:v1"
    )
    assert re.sub(", until [0-9-]{10} [0-9:]{5} UTC", "", failed) == f"failed {where}: {cause}"
    assert more == ([f"hint: {hint}"] if hint else [])
    assert ran.status == (4 if cause.startswith("AUTH_ERROR") else 2)
    assert SECRET not in ran.err
    assert ran.out == "" or case is no_repository_to_list


def test_many_that_fail_alike_are_a_line_each_one_hint_and_one_count(scene):
    target = answers(scene.target, "upload_start", DENIED)
    for number in range(2, 6):
        Seed(number).image().load_into(scene.app, "app", tag=f"v{number}")
    config = document(
        {"source": scene.source, "target": target}, {"from": "app", "tags": tags("v*")}
    )
    ran = run_regsync("sync", "-q", "-c", "-", stdin=config)
    lines = ran.err.splitlines()
    assert sum(line.startswith("failed ") for line in lines) == 5
    assert sum(line.startswith("hint: ") for line in lines) == 1
    assert lines[-1] == f"Failed: 5 x AUTH_ERROR {target.address}: status 403: {REFUSED}"
    assert len(lines) == 7
    assert ran.out.splitlines()[0] == "Images: 0 synced, 0 skipped, 5 failed"
    assert len(ran.out.splitlines()) == 4
