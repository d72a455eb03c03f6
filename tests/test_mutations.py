"""Deliberate mistakes of a client, each of which the harness catches and names.

Most are the program with one place changed, in the process, on its real path: a mutant. What has no
path in it yet is played by a script. Each mutant says which mistake `conformance.audit.mistakes` has to
name, was seen to be executed, and differs from the unchanged program, which passes the same
scenario without a complaint. No mistake in the table of `audit` is without a mutant or a script.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from _regsync.auth import tokens as auth_tokens
from _regsync.net import http1
from _regsync.net.pool import Lease
from _regsync.oci.manifest import Descriptor
from _regsync.registry.remote import RemoteRepository
from _regsync.registry.transport import Transport
from _regsync.registry.upload import Upload
from _regsync.state.knowledge import Knowledge
from _regsync.sync import transfer
from _regsync.sync.discovery import Discovery, Once
from _regsync.sync.relay import Relay
from _regsync.sync.staging import Staging
from conformance.audit.mistakes import MISTAKES, Finding, audit, report
from conformance.client.copies import ACCEPT
from conformance.content.images import Image, Seed
from conformance.messages import Answer, Content, Request, Response, digest_of
from conformance.registry.app import App
from conformance.registry.tokens import BasicAuth, TokenService
from conformance.server.exchange import Reception, Site
from conformance.server.sockets import Server, run_in_thread
from tests.ends import Ran, basic, copy, document, run_regsync, tags

SECRET = "correct-horse"
LOGIN = {"auth_type": "basic", "credentials": {"username": "captain", "password": SECRET}}
USERS = {"captain": SECRET}


class World:
    """The registries of one scenario, and what the client is asked to do with them."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.seed = Seed(11)
        self.sites: dict[str, Site] = {}
        self.readonly: list[str] = []

    def serve(self, site: Site | None = None, *, readonly: bool = False, **options: Any) -> Server:
        server = self._stack.enter_context(
            run_in_thread(site if site is not None else App(**options))
        )
        self.sites[server.url] = server.app
        self.readonly += [server.url] * readonly
        return server

    def findings(self) -> list[Finding]:
        return audit(self.sites, readonly=self.readonly)


class Storage(Site):
    """Object storage in front of a registry: blobs come from it, and go into it, without a login."""

    def __init__(self, app: App, repository: str) -> None:
        super().__init__()
        self._app, self._repository = app, repository

    def start(self, request: Request) -> Answer | Reception:
        if request.method != "PUT":
            return Response(200, [], self._app.blob(self._repository, request.path[3:]) or b"")
        content = Content()

        def finish(received: int) -> Response:
            self._app.add_blob(self._repository, bytes(content), request.parameter("digest"))
            return Response(201)

        return Reception(content, finish)


# Scenarios: what goes right with the unchanged program.

Scenario = Callable[[World], Ran]


def together(registries: Mapping[str, Any], *mappings: Mapping[str, Any]) -> Ran:
    """Sync one image at a time, so that what one brings is known to the next."""
    limits = {"max_concurrent_transfers": 1}
    text = document(registries, *mappings, **{"global": limits})
    return run_regsync("sync", "--json", "-q", "-c", "-", stdin=text)


def ends(world: World, image: Image, *names: str, **target: Any) -> tuple[Server, Server]:
    """Start a source that holds an image under tags of `app`, and an empty target."""
    source = world.serve(readonly=True)
    image.load_into(source.app, "app", *names or ("v1",))
    return source, world.serve(**target)


def plain(world: World) -> Ran:
    return copy(*ends(world, world.seed.image()))


def index(world: World) -> Ran:
    image = world.seed.index(platforms=("linux/amd64", "linux/arm64"))
    return copy(*ends(world, image))


def index_at_lax(world: World) -> Ran:
    image = world.seed.index(platforms=("linux/amd64", "linux/arm64"))
    return copy(*ends(world, image, require_blobs=False))


def any_type(world: World) -> Ran:
    """A target that takes a manifest whatever it is called."""
    bare = world.seed.image()
    document = {key: value for key, value in bare.document.items() if key != "mediaType"}
    image = bare.with_manifest(json.dumps(document).encode(), bare.media_type)
    return copy(*ends(world, image, any_manifest_type=True))


def lax(world: World) -> Ran:
    return copy(*ends(world, world.seed.image(), require_blobs=False))


def two_tags(world: World) -> Ran:
    """Two images of one repository with a layer in common."""
    layer = world.seed.layer(3000)
    source, target = ends(world, world.seed.image(layers=[layer]))
    world.seed.image(layers=[layer, world.seed.layer(20)]).load_into(source.app, "app", tag="v2")
    return together({"source": source, "target": target}, {"from": "app", "tags": tags("v1", "v2")})


def two_indexes(world: World) -> Ran:
    """Two indexes with a child in common."""
    child, one, two = (world.seed.image() for _ in range(3))
    source, target = ends(world, world.seed.index([child, one]))
    world.seed.index([child, two]).load_into(source.app, "app", tag="v2")
    return together({"source": source, "target": target}, {"from": "app", "tags": tags("v1", "v2")})


def three_repositories(world: World, mounts: bool = True) -> Ran:
    """Repositories that have two layers in common."""
    layers = [world.seed.layer(3000), world.seed.layer(2000)]
    source, target = world.serve(readonly=True), world.serve(mounts=mounts)
    names = ("one", "two", "three")
    for number, name in enumerate(names):
        world.seed.image(layers=[*layers, world.seed.layer(number)]).load_into(
            source.app, name, tag="v1"
        )
    mappings = [{"from": name, "tags": tags("v1")} for name in names]
    return together({"source": source, "target": target}, *mappings)


def without_mounts(world: World) -> Ran:
    return three_repositories(world, mounts=False)


def listed(world: World) -> Ran:
    """Tags by a listing of several pages; the target has one of them."""
    source, target = ends(world, world.seed.image(), "v0")
    source.app.page_size = 2
    for number in range(1, 5):
        world.seed.image(sizes=(9,)).load_into(source.app, "app", tag=f"v{number}")
    world.seed.image(sizes=(9,)).load_into(target.app, "app", tag="v1")
    return together({"source": source, "target": target}, {"from": "app", "tags": tags("v*")})


def one_listing(world: World) -> Ran:
    """Two mappings that choose from one repository."""
    source, target = ends(world, world.seed.image(), "a1")
    world.seed.image().load_into(source.app, "app", tag="b1")
    mappings = [{"from": "app", "to": f"to/{each}", "tags": tags(f"{each}*")} for each in "ab"]
    return together({"source": source, "target": target}, *mappings)


def several_targets(world: World) -> Ran:
    source, first = ends(world, world.seed.image())
    registries = {"source": source, "t1": first, "t2": world.serve()}
    return together(registries, {"from": "app", "tags": tags("v1"), "targets": ["t1", "t2"]})


def foreign_layer(world: World) -> Ran:
    return copy(*ends(world, world.seed.image(foreign=["https://example.org/layer"])))


def artifact(world: World) -> Ran:
    return copy(*ends(world, world.seed.artifact()))


def with_login(world: World, *services: Any) -> Ran:
    """Both ends ask for a login."""
    source, target = world.serve(auth=services[0], readonly=True), world.serve(auth=services[1])
    for name in ("one", "two"):
        world.seed.image().load_into(source.app, name, tag="v1")
    registries = {"source": {"url": source.url, **LOGIN}, "target": {"url": target.url, **LOGIN}}
    return together(registries, *({"from": name, "tags": tags("v1")} for name in ("one", "two")))


def tokens(world: World) -> Ran:
    return with_login(world, *(TokenService(USERS, anonymous=False) for _ in range(2)))


def passwords(world: World) -> Ran:
    return with_login(world, BasicAuth(USERS), BasicAuth(USERS))


def wrong_password(world: World) -> Ran:
    return with_login(world, BasicAuth({"captain": "another"}), BasicAuth(USERS))


def strange_realm(world: World) -> Ran:
    """A registry that sends its users to somebody else's token service."""
    service = TokenService(USERS, anonymous=False)
    elsewhere = world.serve(service)
    service.realm = f"http://auth.elsewhere.test:{elsewhere.port}/token"
    source, target = world.serve(auth=service, readonly=True), world.serve()
    world.seed.image().load_into(source.app, "app", tag="v1")
    registries = {"source": {"url": source.url, **LOGIN}, "target": target}
    return together(registries, {"from": "app", "tags": tags("v1")})


def redirected(world: World) -> Ran:
    """A registry with a login whose blobs lie in a storage without one."""
    app = App(auth=BasicAuth(USERS))
    storage, source = world.serve(Storage(app, "app")), world.serve(app, readonly=True)
    world.seed.image().load_into(app, "app", tag="v1")

    def amend(request: Request, answer: Answer) -> Answer:
        if request.kind == "blob" and isinstance(answer, Response) and answer.status == 200:
            return Response(307, [("Location", f"{storage.url}/x/{request.reference}")])
        return answer

    app.amend = amend
    registries = {"source": {"url": source.url, **LOGIN}, "target": world.serve()}
    return together(registries, {"from": "app", "tags": tags("v1")})


def uploads_elsewhere(world: World, *, lying: bool = False) -> Ran:
    """A registry with a login that takes its uploads in a storage without one."""
    app = App(auth=BasicAuth(USERS))
    source = world.serve(readonly=True)
    storage, target = world.serve(Storage(app, "app")), world.serve(app)
    image = world.seed.image().load_into(source.app, "app", tag="v1")
    if lying:
        lie(source, image)

    def amend(request: Request, answer: Answer) -> Answer:
        if isinstance(answer, Response) and answer.status == 202:
            sessions.append(request.target)
            return Response(202, [("Location", f"{storage.url}/up?session={len(sessions)}")])
        return answer

    sessions: list[str] = []
    app.amend = amend
    registries = {"source": source, "target": {"url": target.url, **LOGIN}}
    return together(registries, {"from": "app", "tags": tags("v1")})


def lying_source(world: World) -> Ran:
    """A source whose layer has other bytes than its digest says."""
    image = world.seed.image()
    source, target = ends(world, image)
    lie(source, image)
    return copy(source, target)


def lying_source_and_careless_target(world: World) -> Ran:
    """The same where nobody verifies what is uploaded."""
    return uploads_elsewhere(world, lying=True)


def lie(source: Server, image: Image) -> None:
    """Have a registry hold other bytes under a layer's digest."""
    layer = image.document["layers"][0]
    source.app.add_blob("app", bytes(layer["size"]), layer["digest"])


# Mutants.


class Struck:
    """How often the changed place was passed."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


Mutation = Callable[[pytest.MonkeyPatch, Struck], None]


class Mutant(NamedTuple):
    """One change of the program; `also` are mistakes that come with the one that it is about."""

    mutation: Mutation
    mistake: str
    scenario: Scenario
    also: frozenset[str]


MUTANTS: dict[str, Mutant] = {}


def mutant(mistake: str, scenario: Scenario, *also: str) -> Callable[[Mutation], Mutation]:
    """Enter a mutation under its name."""

    def enter(mutation: Mutation) -> Mutation:
        assert mutation.__name__ not in MUTANTS
        MUTANTS[mutation.__name__] = Mutant(mutation, mistake, scenario, frozenset(also))
        return mutation

    return enter


Alter = Callable[[http1.Request, "http1.Lease"], http1.Request]


def wire(patch: pytest.MonkeyPatch, struck: Struck, alter: Alter) -> None:
    """Have every request altered on its way out."""
    real = Lease.exchange

    async def exchange(self: Lease, request: http1.Request, *more: Any, **named: Any) -> Any:
        changed = alter(request, self)
        if changed != request:
            struck()
        return await real(self, changed, *more, **named)

    patch.setattr(Lease, "exchange", exchange)


def is_blob_put(request: http1.Request) -> bool:
    return request.method == "PUT" and "/blobs/uploads/" in request.target


def is_manifest_put(request: http1.Request) -> bool:
    return request.method == "PUT" and "/manifests/" in request.target


def with_header(request: http1.Request, name: str, value: str | None) -> http1.Request:
    kept = tuple(pair for pair in request.headers if pair[0].lower() != name.lower())
    return request._replace(headers=(*kept, (name, value)) if value is not None else kept)


def replaced(patch: pytest.MonkeyPatch, owner: Any, name: str, value: Any) -> None:
    """Change one place that has to be there."""
    assert hasattr(owner, name), f"{owner} has no {name}: this mutant is of another program"
    patch.setattr(owner, name, value)


def always(patch: pytest.MonkeyPatch, struck: Struck, owner: Any, name: str, value: Any) -> None:
    """Have a function return one value."""

    def changed(*_: Any, **__: Any) -> Any:
        struck()
        return value

    static = isinstance(vars(owner).get(name), staticmethod)
    replaced(patch, owner, name, staticmethod(changed) if static else changed)


# Requests of another form.


def header_mutant(
    mistake: str, name: str, value: str | None, which: Callable[[http1.Request], bool]
) -> None:
    def mutation(patch: pytest.MonkeyPatch, struck: Struck) -> None:
        wire(patch, struck, lambda each, _: with_header(each, name, value) if which(each) else each)

    mutation.__name__ = f"{name} {value}".replace("/", " ")
    mutant(mistake, plain)(mutation)


header_mutant("content_range_form", "Content-Range", "bytes 0-9/10", is_blob_put)
header_mutant("content_range_length", "Content-Range", "0-1", is_blob_put)
header_mutant("expect_sent", "Expect", "100-continue", is_blob_put)
header_mutant("upload_type", "Content-Type", "text/plain", is_blob_put)
header_mutant("manifest_type_missing", "Content-Type", None, is_manifest_put)
header_mutant(
    "manifest_refused", "Content-Type", "application/vnd.oci.image.index.v1+json", is_manifest_put
)
header_mutant("cookie_sent", "Cookie", "session=1", is_blob_put)
header_mutant(
    "coding_accepted", "Accept-Encoding", "gzip", lambda each: "/blobs/sha256" in each.target
)
header_mutant("accept_lacks_types", "Accept", "*/*", lambda each: "/manifests/" in each.target)
header_mutant(
    "range_malformed",
    "Range",
    "0-99",
    lambda each: each.method == "GET" and "/blobs/" in each.target,
)


@mutant("media_type_changed", any_type)
def a_manifest_is_put_as_any_json(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    kind = "application/json"
    wire(
        patch,
        struck,
        lambda each, _: with_header(each, "Content-Type", kind) if is_manifest_put(each) else each,
    )


@mutant("chunk_order", plain)
def a_chunk_begins_where_none_ended(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    head = http1.Connection._write_head

    def written(self: Any, request: http1.Request, length: int) -> bytes:
        if is_blob_put(request):
            request = with_header(request, "Content-Range", f"1-{length}")
            struck()
        return head(self, request, length)

    replaced(patch, http1.Connection, "_write_head", written)


@mutant("digest_query", plain)
def an_upload_ends_without_its_digest(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    def alter(each: http1.Request, _: Lease) -> http1.Request:
        return each._replace(target=each.target.partition("&digest=")[0])

    wire(patch, struck, alter)


@mutant("digest_query", plain)
def a_digest_goes_without_its_algorithm(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    wire(
        patch,
        struck,
        lambda each, _: each._replace(target=each.target.replace("digest=sha256:", "digest=")),
    )


@mutant("location_not_given", plain)
def the_query_of_a_location_is_dropped(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    def alter(each: http1.Request, _: Lease) -> http1.Request:
        path, _, query = each.target.partition("?")
        return (
            each._replace(target=f"{path}?{query[query.find('digest=') :]}")
            if is_blob_put(each)
            else each
        )

    wire(patch, struck, alter)


@mutant("path_unknown", plain)
def a_path_is_misspelt(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    wire(
        patch,
        struck,
        lambda each, _: each._replace(target=each.target.replace("/blobs/", "/blob/")),
    )


@mutant("name_malformed", plain)
def a_tag_is_written_as_a_digest(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    wire(
        patch,
        struck,
        lambda each, _: each._replace(
            target=each.target.replace("/manifests/v1", "/manifests/sha256:v1")
        ),
    )


@mutant("page_not_linked", listed)
def the_next_page_is_guessed(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    wire(patch, struck, lambda each, _: each._replace(target=each.target.replace("&n=2", "")))


# Content.


@mutant("bytes_not_of_digest", lying_source)
def the_comparison_of_digests_is_skipped(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    _any_bytes(patch, struck)


@mutant("content_differs", lying_source_and_careless_target)
def the_comparison_of_digests_is_left_to_the_target(
    patch: pytest.MonkeyPatch, struck: Struck
) -> None:
    _any_bytes(patch, struck)


def _any_bytes(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    class Agreeing:
        """A hash that is always the expected one."""

        def __init__(self, relay: Any) -> None:
            self._relay = relay

        def update(self, data: bytes) -> None:
            pass

        def hexdigest(self) -> str:
            struck()
            return str(self._relay._expected)

    real = Relay._open

    async def opened(self: Any) -> None:
        assert hasattr(self, "_hash")
        self._hash = Agreeing(self)
        await real(self)

    replaced(patch, Relay, "_open", opened)


@mutant("manifest_names_absent", index)
def the_children_are_put_behind_their_index(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    _children_last(patch, struck)


@mutant("child_after_index", index_at_lax)
def the_children_are_put_behind_their_index_at_a_lax_registry(
    patch: pytest.MonkeyPatch, struck: Struck
) -> None:
    _children_last(patch, struck)


def _children_last(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    """Keep what goes under a digest back until a tag has been put."""
    real = RemoteRepository.put_manifest
    waiting: list[Any] = []

    async def put(self: Any, reference: str, manifest: Any, **_: Any) -> None:
        if ":" in reference:
            struck()
            waiting.append((self, reference, manifest))
            return
        await real(self, reference, manifest)
        while waiting:
            await real(*waiting.pop())

    replaced(patch, RemoteRepository, "put_manifest", put)


@mutant("content_missing", lax)
def a_blob_is_taken_for_present_without_asking(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    async def bring(self: Any, step: Any, *_: Any, **__: Any) -> Any:
        struck()
        return "there"

    replaced(patch, transfer.BlobTransfer, "copy", bring)


@mutant("manifest_invented", plain)
def a_manifest_is_written_anew(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    real = RemoteRepository.put_manifest

    async def put(self: Any, reference: str, manifest: Any, **_: Any) -> None:
        struck()
        body = json.dumps(json.loads(manifest.body), indent=1).encode()
        await real(self, reference, manifest._replace(body=body, digest=digest_of(body)))

    replaced(patch, RemoteRepository, "put_manifest", put)


@mutant("foreign_layer_moved", foreign_layer)
def foreign_layers_are_taken_for_layers(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    def own(_: Any) -> bool:
        struck()
        return False

    replaced(patch, Descriptor, "is_foreign", property(own))


@mutant("deleted", plain)
def a_tag_is_deleted_before_it_is_put(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    real = RemoteRepository.put_manifest

    async def put(self: Any, reference: str, manifest: Any, **_: Any) -> None:
        struck()
        await self._transport.request(
            self.host, self.call("manifest_put", "DELETE", f"manifests/{reference}"), ok=(202, 404)
        )
        await real(self, reference, manifest)

    replaced(patch, RemoteRepository, "put_manifest", put)


@mutant("source_written", plain)
def a_tag_is_put_at_the_source_too(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    real = RemoteRepository.get_manifest

    async def get(self: Any, reference: str, **named: Any) -> Any:
        struck()
        manifest = await real(self, reference, **named)
        await self.put_manifest("seen", manifest)
        return manifest

    replaced(patch, RemoteRepository, "get_manifest", get)


# Credentials.


@mutant("credential_on_redirect", redirected)
def a_login_follows_a_redirect(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    _remembered_login(patch, struck)


@mutant("credential_to_location", uploads_elsewhere)
def a_login_goes_to_a_foreign_location(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    real = Transport.login

    async def login(self: Any, host: Any, call: Any, **named: Any) -> Any:
        if call.origin not in (None, host.origin):
            struck()
        return await real(self, host, call._replace(origin=None), **named)

    replaced(patch, Transport, "login", login)


def _remembered_login(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    """Send the last login to every origin."""
    seen: list[str] = []

    def alter(each: http1.Request, lease: Lease) -> http1.Request:
        own = dict(each.headers).get("Authorization")
        seen[:] = [own] if own else seen
        return (
            with_header(each, "Authorization", seen[0]) if seen and "/x/" in each.target else each
        )

    wire(patch, struck, alter)


@mutant("credential_to_realm", strange_realm)
def any_realm_is_believed(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    always(patch, struck, auth_tokens, "check_realm", None)


@mutant("credential_unasked", passwords)
def a_password_is_sent_before_it_is_asked_for(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    async def authorization(self: Any, *_: Any, **__: Any) -> Any:
        struck()
        return self.credential.basic

    replaced(patch, auth_tokens.Authenticator, "authorization", authorization)


@mutant("credential_unasked", tokens, "refused_login_again")
def the_password_goes_to_the_registry_that_takes_tokens(
    patch: pytest.MonkeyPatch, struck: Struck
) -> None:
    real = auth_tokens.Authenticator.authorization

    async def authorization(self: Any, *arguments: Any, **named: Any) -> Any:
        found = await real(self, *arguments, **named)
        if found is None:
            return None
        struck()
        return self.credential.basic

    replaced(patch, auth_tokens.Authenticator, "authorization", authorization)


@mutant("token_of_another", tokens)
def tokens_are_kept_across_registries(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    real = auth_tokens.Authenticator.authorization
    kept: list[str] = []

    async def authorization(self: Any, *arguments: Any, **named: Any) -> Any:
        found = await real(self, *arguments, **named)
        if found is None:
            return None
        kept.append(found)
        if found != kept[0]:
            struck()
        return kept[0]

    replaced(patch, auth_tokens.Authenticator, "authorization", authorization)


@mutant("secret_in_url", tokens)
def a_password_stands_in_a_query(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    def alter(each: http1.Request, _: Lease) -> http1.Request:
        asks = each.target.startswith("/token?")
        return each._replace(target=f"{each.target}&password={SECRET}") if asks else each

    wire(patch, struck, alter)


@mutant("push_asked_of_source", tokens)
def the_source_is_asked_for_push(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    real = RemoteRepository.__init__

    def made(self: Any, *arguments: Any, **named: Any) -> None:
        struck()
        real(self, *arguments, **named)
        self.rights = "pull,push"

    replaced(patch, RemoteRepository, "__init__", made)


@mutant("token_twice", tokens)
def tokens_are_not_kept(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    always(patch, struck, auth_tokens._TokenCache, "has_rights", False)


@mutant("challenge_twice", passwords)
def a_challenge_is_forgotten(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    real = auth_tokens.Authenticator.authorization

    async def authorization(self: Any, *arguments: Any, **named: Any) -> Any:
        found = await real(self, *arguments, **named)
        struck()
        self._challenge = None
        return found

    replaced(patch, auth_tokens.Authenticator, "authorization", authorization)


@mutant("refused_login_again", wrong_password)
def a_refused_password_is_tried_again(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    real = auth_tokens.Authenticator.on_unauthorized

    async def refused(self: Any, challenges: Any, used: Any, *more: Any) -> bool:
        struck()
        return await real(self, challenges, None, *more)

    replaced(patch, auth_tokens.Authenticator, "on_unauthorized", refused)


# Requests that were not needed.


@mutant("ping", plain)
def a_registry_is_pinged(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    real = RemoteRepository.get_manifest

    async def get(self: Any, reference: str, **named: Any) -> Any:
        struck()
        call = self.call("manifest_get", "GET", "")._replace(path="/v2/")
        await self._transport.request(self.host, call, ok=(200,))
        return await real(self, reference, **named)

    replaced(patch, RemoteRepository, "get_manifest", get)


def _twice(patch: pytest.MonkeyPatch, struck: Struck, owner: Any, name: str) -> None:
    """Have a coroutine function carried out twice."""
    real = getattr(owner, name)

    async def twice(*arguments: Any, **named: Any) -> Any:
        struck()
        await real(*arguments, **named)
        return await real(*arguments, **named)

    replaced(patch, owner, name, twice)


def _forgetful(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    """Have questions that are asked once asked by each who wants to know."""

    async def get(self: Any, ask: Any) -> Any:
        struck()
        return await ask()

    replaced(patch, Once, "get", get)


@mutant("tag_asked_twice", plain)
def a_tag_is_resolved_twice(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    _twice(patch, struck, RemoteRepository, "get_manifest")


@mutant("manifest_fetched_twice", two_indexes, "listing_twice")
def children_are_fetched_for_each_index(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    _forgetful(patch, struck)


@mutant("listing_twice", one_listing, "manifest_fetched_twice")
def a_listing_is_fetched_for_each_mapping(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    _forgetful(patch, struck)


@mutant("absent_tag_asked", listed)
def the_listing_of_the_target_is_not_looked_at(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    real = Discovery.target_tags

    async def target_tags(self: Any, target: Any) -> Any:
        await real(self, target)
        struck()

    replaced(patch, Discovery, "target_tags", target_tags)


@mutant("own_manifest_asked", plain)
def a_tag_is_looked_up_behind_its_put(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    real = RemoteRepository.put_manifest

    async def put(self: Any, reference: str, manifest: Any, **_: Any) -> None:
        struck()
        await real(self, reference, manifest)
        await self.head_manifest(reference)

    replaced(patch, RemoteRepository, "put_manifest", put)


@mutant("manifest_put_twice", plain)
def a_manifest_is_put_twice_over(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    _twice(patch, struck, RemoteRepository, "put_manifest")


@mutant("blob_pulled_twice", several_targets)
def staged_blobs_are_forgotten(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    real = Staging.keeping

    def keeping(self: Any, *arguments: Any, **options: Any) -> Any:
        struck()
        assert hasattr(self, "_memory")
        self._memory.clear()
        return real(self, *arguments, **options)

    replaced(patch, Staging, "keeping", keeping)


@mutant("trivial_blob_fetched", artifact)
def the_empty_config_is_fetched(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    always(patch, struck, transfer, "known_body", None)


@mutant("blob_uploaded_twice", plain, "second_session", "blob_pulled_twice")
def a_blob_is_brought_twice(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    real = Upload.start

    async def start(self: Any, mount_from: str | None = None) -> bool:
        return await real(self)

    _twice(patch, struck, transfer.BlobTransfer, "copy")
    replaced(patch, Upload, "start", start)


@mutant("known_blob_asked", plain)
def a_blob_is_looked_up_behind_its_upload(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    real = Upload.send

    async def send(self: Any, pieces: Any, **last: bool) -> bool:
        struck()
        done = await real(self, pieces, **last)
        await self.repository.has_blob(self.blob)
        return done

    replaced(patch, Upload, "send", send)


@mutant("blob_before_session", plain, "blob_pulled_twice")
def a_source_is_opened_before_the_target_has_agreed(
    patch: pytest.MonkeyPatch, struck: Struck
) -> None:
    real = transfer.BlobTransfer._attempt

    async def attempt(self: Any, copy: Any) -> Any:
        struck()
        async with copy.relay.source.open_blob(copy.blob) as response:
            await response.read(1 << 20)
        return await real(self, copy)

    replaced(patch, transfer.BlobTransfer, "_attempt", attempt)


# Upload sessions and mounts.


@mutant("second_session", without_mounts)
def a_refused_mount_is_followed_by_a_second_post(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    real = Upload.start

    async def start(self: Any, mount_from: str | None = None) -> bool:
        done = await real(self, mount_from)
        if done or mount_from is None or mount_from == self.repository.api_name:
            return done
        struck()
        return await real(self)

    replaced(patch, Upload, "start", start)


@mutant("session_unused", plain)
def a_session_is_opened_for_nothing(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    real = Upload.start

    async def start(self: Any, mount_from: str | None = None) -> bool:
        struck()
        await real(self)
        return await real(self, mount_from)

    replaced(patch, Upload, "start", start)


@mutant("mount_uncommitted", plain, "mount_refused_again")
def a_mount_is_tried_from_anywhere(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    always(patch, struck, Knowledge, "mount_source", "some/where")


@mutant("mount_refused_again", without_mounts)
def refused_mounts_are_forgotten(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    always(patch, struck, Knowledge, "refuse_mount", None)


@mutant("upload_without_mount", three_repositories)
def mounts_are_not_thought_of(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    always(patch, struck, Knowledge, "mount_source", None)


# Scripts: mistakes that the program has no path for, and the conversations that are right.

REGISTRY, OTHER, SECURE = "http://registry.test", "http://other.test", "https://secure.test"
START = "/v2/app/blobs/uploads/"
OCTETS = ("content-type", "application/octet-stream")


class Script:
    """A client that does what it is told, without a network."""

    def __init__(self, **options: Any) -> None:
        self.seed = Seed(5)
        self.app = App(**options)
        self.sites: dict[str, Site] = {REGISTRY: self.app, OTHER: App()}

    def ask(
        self, method: str, target: str, *headers: tuple[str, str], body: bytes | None = None
    ) -> Response:
        return self.app.request(method, target, headers, body)

    def where(self, answer: Response) -> str:
        """Return the path and query of an upload's next Location."""
        return answer.header("location").removeprefix(REGISTRY)

    def begin(self) -> str:
        return self.where(self.ask("POST", START))

    def patch(self, target: str, body: bytes, first: int | None = None) -> Response:
        span = () if first is None else (("content-range", f"{first}-{first + len(body) - 1}"),)
        return self.ask("PATCH", target, OCTETS, *span, body=body)

    def end(self, target: str, digest: str, body: bytes = b"") -> Response:
        return self.ask("PUT", f"{target}&digest={digest}", OCTETS, body=body)

    def put(self, image: Image, *tags: str) -> None:
        """Put a whole image, as it should be done."""
        for digest, data in image.blobs.items():
            self.end(self.begin(), digest, data)
        for digest, (media_type, body) in image.manifests.items():
            for reference in tags or (digest,):
                answer = self.ask(
                    "PUT", f"/v2/app/manifests/{reference}", ("content-type", media_type), body=body
                )
                assert answer.status == 201, answer.data


SCRIPTS: dict[str, tuple[Callable[[Script], None], dict[str, Any]]] = {}


def script(
    mistake: str, **options: Any
) -> Callable[[Callable[[Script], None]], Callable[[Script], None]]:
    """Enter a conversation under the mistake in it, none where it is right."""

    def enter(told: Callable[[Script], None]) -> Callable[[Script], None]:
        SCRIPTS[f"{mistake}: {told.__name__}"] = (told, options)
        return told

    return enter


@script("")
def a_blob_in_chunks(client: Script) -> None:
    first, second = client.seed.blob(4000), client.seed.blob(500)
    where = client.where(client.patch(client.begin(), first, 0))
    where = client.where(client.patch(where, second, 4000))
    assert client.end(where, digest_of(first + second)).status == 201


@script("")
def a_cancelled_upload(client: Script) -> None:
    assert client.ask("DELETE", client.begin()).status == 204


def ask_for_own(client: Script, digest: str) -> None:
    """Ask for a blob as rule 11 has it, at a registry that opens a session for what is there."""
    answer = client.ask("POST", f"{START}?mount={digest}&from=app")
    assert answer.status == 202
    assert client.ask("DELETE", client.where(answer)).status == 204


@script("", mounts=False)
def a_blob_that_is_there_is_asked_for_once(client: Script) -> None:
    body = client.seed.blob(500)
    digest = digest_of(body)
    started = client.ask("POST", f"{START}?mount={digest}&from=app")
    assert client.end(client.where(started), digest, body).status == 201
    ask_for_own(client, digest)


@script("second_session", mounts=False)
def a_blob_that_is_there_is_asked_for_again(client: Script) -> None:
    a_blob_that_is_there_is_asked_for_once(client)
    ask_for_own(client, digest_of(Seed(5).blob(500)))


@script("second_session", mounts=False)
def a_blob_that_is_not_there_is_asked_for_twice(client: Script) -> None:
    body = client.seed.blob(500)
    ask_for_own(client, digest_of(body))
    ask_for_own(client, digest_of(body))


@script("")
def a_subject_and_its_referrers(client: Script) -> None:
    subject = client.seed.image()
    client.put(subject)
    client.put(client.seed.artifact(subject))
    assert client.ask("GET", f"/v2/app/referrers/{subject.top}").status == 200


@script("length_missing")
def a_post_without_a_length(client: Script) -> None:
    client.app.handle(Request("POST", START, [("host", "registry.test")]))


@script("length_malformed")
def a_length_that_is_no_number(client: Script) -> None:
    client.ask("POST", START, ("content-length", "none"))


@script("body_unexpected")
def a_get_with_a_body(client: Script) -> None:
    client.ask("GET", "/v2/app/tags/list", ("content-length", "2"), body=b"{}")


@script("body_without_digest")
def a_post_with_a_body(client: Script) -> None:
    client.ask("POST", START, OCTETS, body=b"bytes")


@script("digest_query")
def a_digest_given_twice(client: Script) -> None:
    digest = digest_of(b"bytes")
    client.ask("PUT", f"{client.begin()}&digest={digest}&digest={digest}", OCTETS, body=b"bytes")


@script("chunk_order")
def a_chunk_sent_twice(client: Script) -> None:
    where = client.where(client.patch(client.begin(), b"first", 0))
    client.patch(where, b"first", 0)


@script("content_range_form")
def a_range_in_httpss_form(client: Script) -> None:
    client.ask("PATCH", client.begin(), OCTETS, ("content-range", "bytes 0-4/5"), body=b"first")


@script("chunk_too_short", chunk_min_length=1000)
def chunks_below_the_least_length(client: Script) -> None:
    where = client.where(client.patch(client.begin(), b"first", 0))
    client.patch(where, b"second", 5)


@script("location_stale")
def a_location_used_for_every_chunk(client: Script) -> None:
    where = client.begin()
    client.patch(where, b"first")
    client.patch(where, b"second")


@script("location_not_given")
def a_session_of_ones_own(client: Script) -> None:
    client.end(
        f"{START}00000000-0000-4000-8000-000000000099?_state=1", digest_of(b"bytes"), b"bytes"
    )


@script("session_after_end")
def an_upload_behind_its_cancelling(client: Script) -> None:
    where = client.begin()
    client.ask("DELETE", where)
    client.end(where, digest_of(b"bytes"), b"bytes")


@script("manifest_names_absent")
def a_tag_before_its_blobs(client: Script) -> None:
    image = client.seed.image()
    client.ask("PUT", "/v2/app/manifests/v1", ("content-type", image.media_type), body=image.body)


@script("subject_after_referrer")
def a_referrer_before_its_subject(client: Script) -> None:
    subject = client.seed.image()
    client.put(client.seed.artifact(subject))
    client.put(subject)


@script("referrers_twice")
def referrers_for_each_tag(client: Script) -> None:
    for _ in range(2):
        client.ask("GET", f"/v2/app/referrers/{digest_of(b'a')}")


@script("fallback_after_api")
def the_fallback_tag_all_the_same(client: Script) -> None:
    subject = client.seed.image()
    client.put(subject)
    client.ask("GET", f"/v2/app/referrers/{subject.top}")
    client.ask("GET", f"/v2/app/manifests/{subject.top.replace(':', '-')}", ("accept", ACCEPT))


@script("absent_api_asked", referrers_api=False)
def an_api_that_is_not_there_for_each_digest(client: Script) -> None:
    for text in (b"a", b"b"):
        client.ask("GET", f"/v2/app/referrers/{digest_of(text)}")


def fallback(image: Image) -> str:
    return image.top.replace(":", "-")


@script("", referrers_api=False)
def a_list_of_referrers_that_is_read_put_and_read_back(client: Script) -> None:
    subject = client.seed.image()
    attached = [
        client.seed.artifact(subject, None, config_type=kind, annotations={"a": "b"})
        for kind in ("a/b", "c/d")
    ]
    for each in (subject, *attached):
        client.put(each)
    listed, where = client.seed.fallback_index(attached), f"/v2/app/manifests/{fallback(subject)}"
    assert client.ask("GET", where, ("accept", ACCEPT)).status == 404
    client.put(listed, fallback(subject))
    assert client.ask("GET", where, ("accept", ACCEPT)).data == listed.body


@script("own_manifest_asked", referrers_api=False)
def a_list_of_referrers_that_is_read_back_twice(client: Script) -> None:
    a_list_of_referrers_that_is_read_put_and_read_back(client)
    tag = next(iter(client.app.tags("app")))
    client.ask("GET", f"/v2/app/manifests/{tag}", ("accept", ACCEPT))


@script("list_of_referrers_wrong", referrers_api=False)
def a_list_that_names_one_twice(client: Script) -> None:
    subject = client.seed.image()
    client.put(subject)
    client.put(attached := client.seed.artifact(subject))
    client.put(client.seed.fallback_index([attached, attached]), fallback(subject))


@script("list_of_referrers_wrong", referrers_api=False)
def a_list_that_names_what_refers_to_another(client: Script) -> None:
    one, other = client.seed.image(), client.seed.image()
    for each in (one, other, attached := client.seed.artifact(other)):
        client.put(each)
    client.put(client.seed.fallback_index([attached]), fallback(one))


@script("list_of_referrers_wrong", referrers_api=False)
def a_list_without_annotations(client: Script) -> None:
    subject = client.seed.image()
    client.put(subject)
    client.put(attached := client.seed.artifact(subject, annotations={"a": "b"}))
    listed = client.seed.fallback_index([attached])
    document = listed.document
    del document["manifests"][0]["annotations"]
    client.put(
        listed.with_manifest(json.dumps(document).encode(), listed.media_type), fallback(subject)
    )


@script("fallback_after_api")
def a_list_of_referrers_for_the_api(client: Script) -> None:
    a_subject_and_its_referrers(client)
    client.put(client.seed.fallback_index([]), f"sha256-{'0' * 64}")


@script("absent_tag_asked", referrers_api=False)
def a_fallback_tag_that_the_listing_has_not(client: Script) -> None:
    subject = client.seed.image()
    client.put(subject, "v1")
    for path in ("tags/list", "tags/list?n=9", f"manifests/{fallback(subject)}"):
        client.ask("GET", f"/v2/app/{path}", ("accept", ACCEPT))


@script("absent_api_asked", referrers_api=False)
def a_page_instead_of_the_api_for_each_digest(client: Script) -> None:
    """What is looked at says the same as a 404; the fallback tag is no mistake behind it."""
    page = Response(200, [("Content-Type", "text/html")], b"<html>")
    real = client.app.start
    client.app.start = lambda request: page if request.kind == "referrers" else real(request)  # type: ignore[method-assign]
    for text in (b"a", b"b"):
        client.ask("GET", f"/v2/app/referrers/{digest_of(text)}")
        client.ask(
            "GET", f"/v2/app/manifests/{digest_of(text).replace(':', '-')}", ("accept", ACCEPT)
        )


@script("credential_in_clear")
def a_token_of_https_over_http(client: Script) -> None:
    secure = App(auth=TokenService(USERS, anonymous=False))
    plain = App(auth=TokenService(USERS, anonymous=False, realm=f"{SECURE}/token"))
    client.sites |= {SECURE: secure, "http://secure.test": plain}

    def ask(site: Site, scheme: str, path: str, *headers: tuple[str, str]) -> Response:
        answer = site.handle(
            Request("GET", path, [("host", "secure.test"), *headers], scheme=scheme)
        )
        assert isinstance(answer, Response)
        return answer

    for site, scheme in ((secure, "https"), (plain, "http")):
        assert ask(site, scheme, "/v2/app/tags/list").status == 401
    login = ("authorization", f"Basic {basic('captain', SECRET)}")
    given = ask(
        secure, "https", "/token?service=registry.test&scope=repository:app:pull", login
    ).json()
    token = ("authorization", f"Bearer {given['token']}")
    assert ask(secure, "https", "/v2/app/tags/list", token).status == 404
    assert ask(plain, "http", "/v2/app/tags/list", token).status == 401


@script("refused_as_wrong")
def a_form_without_its_fields(client: Script) -> None:
    client.sites["http://auth.test"] = service = TokenService(USERS)
    kind = ("content-type", "application/x-www-form-urlencoded")
    service.request("POST", "/token", [("host", "auth.test"), kind], b"grant_type=password")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_judged_by_its_mistake(name: str) -> None:
    told, options = SCRIPTS[name]
    client = Script(**options)
    told(client)
    # Most scripts stop at the mistake: what they began stays open.
    findings = audit(client.sites, excused=["session_unused"])
    mistake = name.partition(":")[0]
    assert {each.name for each in findings} == ({mistake} if mistake else set()), report(findings)


def test_no_mistake_is_without_its_mutant() -> None:
    played = {each.mistake for each in MUTANTS.values()} | {
        name.partition(":")[0] for name in SCRIPTS
    }
    assert played == {*MISTAKES, "refused_as_wrong", ""}
    assert len(MUTANTS) + len(SCRIPTS) >= 60


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Return registries that nobody else asks what the client did; names of the scenarios lead to
    them.
    """
    real = socket.getaddrinfo

    def resolve(host: str, *more: Any, **named: Any) -> Any:
        return real("127.0.0.1" if host.endswith(".elsewhere.test") else host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with contextlib.ExitStack() as stack:
        yield World(stack)


SCENARIOS = {each.scenario.__name__: each.scenario for each in MUTANTS.values()}
REFUSED = {"lying_source", "lying_source_and_careless_target", "strange_realm", "wrong_password"}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_program_passes_every_scenario_without_a_mistake(world: World, name: str) -> None:
    ran = SCENARIOS[name](world)
    assert bool(ran.status) == (name in REFUSED), ran.err
    findings = world.findings()
    assert not findings, report(findings)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught_and_named(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    mutated, struck = MUTANTS[name], Struck()
    mutated.mutation(monkeypatch, struck)
    mutated.scenario(world)
    assert struck.times, "the changed place was never passed: this shows nothing"
    findings = world.findings()
    assert {each.name for each in findings} - mutated.also == {mutated.mistake}, report(findings)
