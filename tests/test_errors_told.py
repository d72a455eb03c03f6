"""What a user reads when a copy fails: the exact line of each class of failure, and its remedy.

A line names what failed, where, and why, in the registry's own cleaned words; a hint says what to do
where that is known. Nothing else is said: no traceback, no second line.
"""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme

from conformance.images import Seed
from conformance.messages import Answer, Request, Response, error
from conformance.registry import App
from conformance.tokens import BasicAuth, TokenService
from tests.ends import Peer, Ran, Start, Talk, Virtual, run_regsync

USER, SECRET = "captain", "hunter2"
ECR = "123456789012.dkr.ecr.eu-west-1.amazonaws.com"
LOGIN = "log in with a container client (docker login {}), or configure auth_type: basic"
ANONYMOUS = (
    f"{LOGIN}, since no credentials are in use; or check the name: "
    "a missing repository may look like a private one"
)
UNREACHED = "check host, port and firewalls; set HTTP_PROXY if a proxy leads there"
PROXY = "check the proxy, which HTTPS_PROXY names"
WRONG = "check the user name, and whether the password or token has expired or lacks rights"
PLAIN = "write http:// before the host if it serves plain HTTP"
RIGHTS = "check which rights the credentials (credentials of registry 'it') have there"
CREATE = "create the repository, or the project that it belongs to, at the target first"


class Ends:
    """A source that has `app:v1`, a target, and a copy from one to the other that fails."""

    def __init__(self, world: Virtual, directory: Path, **options: Any) -> None:
        self.world, self.directory = world, directory
        self.apps = {
            name: world.registry(f"{name}.test", **options.get(name, {})).app
            for name in ("source", "target")
        }
        self.image = Seed(1).image(sizes=(2000,)).load_into(self.apps["source"], "app", tag="v1")

    def answers(self, name: str, method: str, kind: str, response: Response) -> None:
        """Let a registry answer one kind of request so."""

        def intercept(request: Request) -> Answer | None:
            return response if (request.method, request.kind) == (method, kind) else None

        self.apps[name].intercept = intercept

    def config(self, url: str, **fields: Any) -> list[str]:
        """Write a configuration that knows one registry."""
        path = self.directory / "mirror.yaml"
        path.write_text(json.dumps({"registries": {"it": {"url": url, **fields}}, "mappings": []}))
        return ["-c", str(path)]

    def login(self, name: str, password: str = SECRET) -> list[str]:
        credentials = {"username": USER, "password": password}
        return self.config(f"http://{name}.test", auth_type="basic", credentials=credentials)

    def talk(self, script: Any) -> str:
        """Let a script talk to every connection to a port; return HOST:PORT."""
        place = Talk(script, 40001)
        self.world.network.attach(place)
        return place.address

    def says(self, text: bytes) -> str:
        """Start a peer that reads one head and says `text`; without, it is silent."""

        async def script(peer: Peer) -> None:
            await peer.head()
            await (peer.send(text) if text else peer.receive())

        return self.talk(script)

    async def copy(self, *more: str, env: Any = None, source: str = "", target: str = "") -> Ran:
        """Copy, from and to others where that is said."""
        where = (source or "http://source.test", target or "http://target.test")
        words = ["copy", "--no-artifacts", *more, *(f"{each}/app:v1" for each in where)]
        return await self.world.run(*words, env=env)

    def check(self, ran: Ran, cause: str, hint: str | None, **names: str) -> None:
        """Assert that this is what a run told; `names` are of other registries: S, T, the proxy P."""
        check(ran, cause, hint, {"S": "source.test", "T": "target.test", **names}, self.directory)


def check(ran: Ran, cause: str, hint: str | None, names: dict[str, str], place: Path) -> None:
    text = re.sub("sha256:[0-9a-f]{64}", "DIGEST", ran.err)
    text = re.sub(", until [0-9-]{10} [0-9:]{5} UTC", "", text)
    for short, name in sorted(names.items(), key=lambda row: -len(row[1])):
        text = text.replace(name, short)
    lines = text.replace(str(place), "DIR").splitlines()
    passing = ("warning: waiting for ", "still running")
    failed, *more = [line for line in lines if not line.startswith(passing)]
    assert failed == f"failed S/app:v1 -> T/app:v1: {cause}"
    assert more == ([f"hint: {hint}"] if hint else [])
    assert ran.status == (4 if cause.startswith("AUTH_ERROR") else 2)
    assert SECRET not in ran.err
    assert ran.out == ""


@pytest.fixture
def ends(world: Virtual, tmp_path: Path) -> Ends:
    return Ends(world, tmp_path)


# Who we are.


TOKENS = partial(TokenService, anonymous=False)
LOGINS = {
    "basic": ("target", BasicAuth, None,
        "look up T/app:v1: T asks for a user name and password, and none are configured or found",
        LOGIN.format("T")),
    "wrong password": ("target", BasicAuth, "wrong",
        "look up T/app:v1: T refused the credentials (credentials of registry 'it')", WRONG),
    "token": ("source", TOKENS, None,
        "fetch manifest S/app:v1: the token service of S gives no token for app (pull) "
        "without credentials: status 401: UNAUTHORIZED incorrect username or password",
        ANONYMOUS.format("S")),
    "wrong password for a token": ("source", TOKENS, "wrong",
        "fetch manifest S/app:v1: the token service of S refused the credentials (credentials of registry 'it')",
        WRONG),
    "token for reading only": ("target", TokenService, None,
        "push blob T/app@DIGEST: status 401: UNAUTHORIZED authentication required", ANONYMOUS.format("T")),
}  # fmt: skip


@pytest.mark.parametrize(("end", "auth", "password", "cause", "hint"), LOGINS.values(), ids=LOGINS)
async def test_a_login_that_is_missing_or_wrong(
    world: Virtual,
    tmp_path: Path,
    end: str,
    auth: Callable[[dict[str, str]], Any],
    password: str | None,
    cause: str,
    hint: str,
) -> None:
    ends = Ends(world, tmp_path, **{end: {"auth": auth({USER: SECRET})}})
    ran = await ends.copy(*(ends.login(end, password) if password else []))
    ends.check(ran, f"AUTH_ERROR: {cause}", hint)


# What a registry refuses.

DENIED = error(403, "DENIED", "requested access to the resource is denied")
REFUSED = "status 403: DENIED requested access to the resource is denied"
MISSING = "The repository with name 'app' does not exist in the registry with id '123456789012'"
LIMIT = "You have reached your pull rate limit."
QUOTA = error(429, "TOOMANYREQUESTS", LIMIT, headers=[("Retry-After", "7200")])
QUOTA_TOLD = (
    f"SOURCE_ERROR: fetch manifest S/app:v1: status 429: TOOMANYREQUESTS {LIMIT} "
    "(asks to wait 2h00m: longer than a run waits)"
)
PUSH, PULL = ("target", "POST", "upload_start"), ("source", "GET", "manifest")
SCHEMA_1 = "application/vnd.docker.distribution.manifest.v1+prettyjws"


# The request, its answer, whether we have logged in, what is told and the hint.
ANSWERS = {
    "denied": (PUSH, DENIED, False, f"AUTH_ERROR: push blob T/app@DIGEST: {REFUSED}", ANONYMOUS.format("T")),
    "denied to us": (PUSH, DENIED, True, f"AUTH_ERROR: push blob T/app@DIGEST: {REFUSED}", RIGHTS),
    "quota": (PULL, QUOTA, False, QUOTA_TOLD,
        "run again later, or log in with an account that has a higher limit"),
    "quota of ours": (PULL, QUOTA, True, QUOTA_TOLD,
        "run again later, or log in with an account that has a higher limit"),
    "no project": (PUSH, error(404, "NOT_FOUND", "project app not found"), False,
        "TARGET_ERROR: push blob T/app@DIGEST: status 404: NOT_FOUND project app not found", CREATE),
    "too large": (("target", "PUT", "upload"), Response(413, body=b"<html>413 Request Entity Too Large"), False,
        "TARGET_ERROR: push blob T/app@DIGEST: status 413",
        "raise the size limit for requests, at the registry or at a proxy in front of it "
        "(nginx: client_max_body_size)"),
    "read-only": (PUSH, error(405, "UNSUPPORTED", "The operation is unsupported."), False,
        "TARGET_ERROR: push blob T/app@DIGEST: status 405: UNSUPPORTED The operation is unsupported.",
        "name a registry that accepts pushes: this one may be read-only, or a cache"),
    "ill": (PUSH, Response(500), False,
        "TARGET_ERROR: push blob T/app@DIGEST: status 500 (tried 5 times)",
        "see the registry's logs or status page; the next run copies only what is missing"),
    "a page instead of an upload": (PUSH, Response(302, [("Location", "https://sso.test/")]), False,
        "TARGET_ERROR: push blob T/app@DIGEST: status 302",
        "check whether a proxy or a login page answers in place of the registry"),
    "words in colour": (("target", "PUT", "manifest"),
        error(400, "MANIFEST_INVALID", "\x1b[31mbad\x1b[0m\nfailed a -> b"), False,
        "TARGET_ERROR: push manifest T/app:v1: status 400: MANIFEST_INVALID [31mbad[0m failed a -> b", None),
    "no tag": (PULL, error(404, "MANIFEST_UNKNOWN", "manifest unknown"), False,
        "SOURCE_ERROR: fetch manifest S/app:v1: status 404: MANIFEST_UNKNOWN manifest unknown",
        "check the name: `regsync tags S/app`, with the same -c FILE if there is one, lists what is there"),
    "schema 1": (PULL, Response(200, [("Content-Type", SCHEMA_1)], b'{"schemaVersion": 1, "name": "app"}'), False,
        "CONTENT_ERROR: fetch manifest S/app:v1: a Docker schema 1 manifest, which cannot be copied unchanged",
        "push the image again with a current tool, as schema 2 or OCI"),
    "a page instead": (PULL, Response(200, [("Content-Type", "text/html")], b"<html>login</html>"), False,
        "CONTENT_ERROR: fetch manifest S/app:v1: not JSON (Expecting value: line 1 column 1 (char 0)); "
        "received text/html, beginning '<html>login</html>'",
        "check whether a proxy or a login page answers in place of the registry"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("place", "response", "has_login", "cause", "hint"), ANSWERS.values(), ids=ANSWERS
)
async def test_an_answer_that_ends_the_copy(
    world: Virtual,
    tmp_path: Path,
    place: tuple[str, str, str],
    response: Response,
    has_login: bool,
    cause: str,
    hint: str | None,
) -> None:
    name = place[0]
    asks = {name: {"auth": BasicAuth({USER: SECRET})}} if has_login else {}
    ends = Ends(world, tmp_path, **asks)
    ends.answers(*place, response)
    ran = await ends.copy(*(ends.login(name) if has_login else []))
    ends.check(ran, cause, hint)


async def test_a_repository_that_is_missing_at_ecr(ends: Ends) -> None:
    ends.apps["target"] = App()
    ends.world.listen(ends.apps["target"], ECR, scheme="https")
    ends.answers(*PUSH, error(404, "NAME_UNKNOWN", MISSING))
    ends.check(
        await ends.copy(*ends.config(f"https://{ECR}", auth_type="anonymous"), target=ECR),
        f"TARGET_ERROR: push blob T/app@DIGEST: status 404: NAME_UNKNOWN {MISSING}",
        f"{CREATE}: aws ecr create-repository --repository-name app --registry-id 123456789012"
        " --region eu-west-1",
        T=ECR,
    )


async def test_a_blob_with_other_bytes(ends: Ends) -> None:
    digest = max(ends.image.blobs, key=lambda each: len(ends.image.blobs[each]))
    wrong = b"x" * len(ends.image.blobs[digest])
    ends.apps["source"].add_blob("app", wrong, digest=digest)
    ends.check(
        await ends.copy(),
        "CONTENT_ERROR: fetch blob S/app@DIGEST: the blob's bytes do not match its digest",
        "check whether a proxy changes what passes it; if none does, push again",
    )


async def test_a_storage_that_a_firewall_refuses(ends: Ends) -> None:
    """The registry has let us in."""
    storage = ends.world.registry("storage.test").app
    storage.intercept = lambda request: Response(403, [], b"<html>blocked</html>")
    elsewhere = Response(307, [("Location", "http://storage.test/blob?signature=" + "e" * 64)])
    ends.answers("source", "GET", "blob", elsewhere)
    ends.check(
        await ends.copy(),
        "AUTH_ERROR: fetch blob S/app@DIGEST: status 403 (from storage.test: a Location of S leads there)",
        "check whether a proxy or firewall refuses requests to that host",
    )


async def test_a_repository_to_list_that_is_not_there(ends: Ends) -> None:
    ends_of = {"source": "http://source.test", "target": "http://target.test"}
    ran = await ends.world.sync(ends_of, {"from": "nothing"})
    cause = "list tags of source.test/nothing: the registry has no such repository"
    assert ran.err.splitlines() == [
        f"failed source.test/nothing:* -> target.test/nothing:*: SOURCE_ERROR: {cause}",
        "hint: check the name of the repository",
    ]
    assert ran.status == 2


# The way there.


async def test_a_peer_that_hangs_up_on_http(ends: Ends) -> None:
    async def script(peer: Peer) -> None:
        await peer.receive()
        peer.reset()

    target = ends.talk(script)
    ends.check(
        await ends.copy(target=target),
        "NETWORK_ERROR: look up T/app:v1: the connection broke: Connection reset by peer (waited for 15s)",
        None,
        T=target,
    )


async def test_a_peer_that_says_that_it_wants_https(ends: Ends) -> None:
    """As Go does."""
    words = "Client sent an HTTP request to an HTTPS server."
    source = ends.says(f"HTTP/1.0 400 Bad Request\r\n\r\n{words}\n".encode())
    ends.check(
        await ends.copy(source=source),
        f"SOURCE_ERROR: fetch manifest S/app:v1: status 400: {words}",
        None,
        S=source,
    )


async def test_a_name_that_nobody_knows(ends: Ends) -> None:
    ends.check(
        await ends.copy(source="no-such-host.invalid"),
        "NETWORK_ERROR: fetch manifest S/app:v1: the name S could not be resolved: Name or service not known "
        "(tried 3 times)",
        "check the name and this machine's name servers; set HTTPS_PROXY if a proxy leads there",
        S="no-such-host.invalid",
    )


async def test_a_port_that_is_closed(ends: Ends) -> None:
    ends.check(
        await ends.copy(target="http://target.test:81"),
        "NETWORK_ERROR: look up T/app:v1: no connection to T: connection refused (waited for 15s)",
        UNREACHED,
        T="target.test:81",
    )


async def test_a_peer_that_is_silent(ends: Ends) -> None:
    source = ends.says(b"")
    ends.check(
        await ends.copy(source=source),
        "NETWORK_ERROR: fetch manifest S/app:v1: no answer from S within 60 s (waited for 15s)",
        None,
        S=source,
    )


NO_LOGIN = b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n"
# What it says, our login there, what is told and the hint.
PROXIES = {
    "gone": (None, "",
        "through the proxy http://P: no connection to P: connection refused (waited for 15s)", PROXY),
    "silent": (b"", "",
        "the proxy http://P did not open a tunnel: no answer from P within 60 s (waited for 15s)", PROXY),
    "refuses the login": (NO_LOGIN, f"{USER}:{SECRET}@",
        "the proxy http://P refused a tunnel to S:443 (407)",
        "put user and password into the proxy's URL, percent-encoded; the proxy has to accept Basic"),
    "forbids the host": (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", "",
        "the proxy http://P refused a tunnel to S:443 (403)", PROXY),
}  # fmt: skip


@pytest.mark.parametrize(("says", "login", "cause", "hint"), PROXIES.values(), ids=PROXIES)
async def test_a_proxy_that_opens_no_tunnel(
    ends: Ends, says: bytes | None, login: str, cause: str, hint: str
) -> None:
    proxy = "target.test:81" if says is None else ends.says(says)
    env = {"HTTPS_PROXY": f"http://{login}{proxy}"}
    ran = await ends.copy(source="registry.example", env=env)
    names = {"S": "registry.example", "P": proxy}
    ends.check(ran, f"NETWORK_ERROR: fetch manifest S/app:v1: {cause}", hint, **names)


@pytest.mark.process
def test_a_certificate_of_an_authority_that_is_not_known(
    serve: Start, ca: trustme.CA, tmp_path: Path
) -> None:
    """How each failure of TLS is told is looked at in tests/unit/test_trust.py."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    source, target = serve(ssl_context=context).address, serve().address
    ran = run_regsync("copy", "--no-artifacts", f"https://{source}/app:v1", f"{target}/app:v1")
    check(
        ran,
        "NETWORK_ERROR: fetch manifest S/app:v1: 127.0.0.1 is not trusted: "
        "unable to get local issuer certificate",
        "give the authority's PEM file as `ca_file` of the registry, or in SSL_CERT_FILE",
        {"S": source, "T": target},
        tmp_path,
    )
