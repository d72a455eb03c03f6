"""Mistakes that disclose secrets or damage images.

Owns: which servers may receive a credential; what may be committed; what must not be deleted.
May not know: whether a request was needed.
Invariants: a credential may only be sent after a challenge has asked for it.
Follows: docs/design.md section 7 (I1, I3, I6), docs/protocol-facts.md sections 1.6, 2.7 and 9.2.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_plus, urlsplit

from ..messages import digest_of
from ..registry.storage import INDEXES, Stored, is_foreign
from .evidence import FALLBACK, Act, Location, Run, group_by, parameters, without_digest
from .rules import rule, single

if TYPE_CHECKING:
    from ..registry.storage import Repository

__all__: list[str] = []

# Shorter secrets are not searched for in URLs, in characters.
_SHORTEST_SECRET = 4
# Fields of a descriptor that a list of referrers must have right.
_DESCRIBED = ("mediaType", "digest", "size", "artifactType", "annotations")


def _has_credential(act: Act) -> bool:
    """Whether the request has a credential, in a header or in the form of a token request."""
    return "authorization" in act.headers or bool(act.entry.secrets)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _registries_naming(run: Run, act: Act) -> list[str]:
    """Return the origins of registries that named the URL of `act` as their realm before `act`."""
    url = act.origin + urlsplit(act.target).path
    return [
        challenge.giver.origin
        for challenge in run.challenges
        if challenge.scheme == "bearer"
        and challenge.giver.before(act)
        and challenge.realm.partition("?")[0] == url
    ]


def _may_name(registry: str, realm: str) -> bool:
    """Whether a registry may name a realm: only on its own host (section 2.7)."""
    realms_host = urlsplit(realm).hostname or ""
    host = urlsplit(registry).hostname or ""
    are_both_loopback = _is_loopback(realms_host) and _is_loopback(host)
    return realms_host == host or are_both_loopback


def _redirects_to(run: Run, act: Act) -> list[Act]:
    """Return earlier redirects of other origins to the URL of `act`."""
    return _other_givers(run.redirects, act, act.target)


def _locations_to(run: Run, act: Act) -> list[Act]:
    """Return earlier answers of other origins whose upload Location `act` uses."""
    locations = [location for session in run.sessions for location in session.locations]
    return _other_givers(locations, act, without_digest(act.target))


def _other_givers(locations: Iterable[Location], act: Act, target: str) -> list[Act]:
    """Return earlier exchanges of other origins that gave `target` at the origin of `act`."""
    return [
        location.giver
        for location in locations
        if location.giver.before(act)
        and (location.origin, location.target) == (act.origin, target)
        and location.giver.origin != act.origin
    ]


def _realms_of(run: Run, origin: str) -> set[str]:
    """Return the realms that a registry has named."""
    return {challenge.realm for challenge in run.challenges if challenge.giver.origin == origin}


# Credentials.


@rule("safety", "a credential follows a redirect to another origin")
def credential_on_redirect(run: Run) -> Iterator[tuple[Act, ...]]:
    for act in run.acts:
        givers = _redirects_to(run, act) if _has_credential(act) else []
        if givers:
            yield givers[-1], act


@rule("safety", "a credential goes to an upload's Location on another origin")
def credential_to_location(run: Run) -> Iterator[tuple[Act, ...]]:
    for act in run.acts:
        givers = _locations_to(run, act) if _has_credential(act) else []
        if givers:
            yield givers[-1], act


@rule("safety", "a credential goes to the realm of a registry that may not name it")
def credential_to_realm(run: Run) -> Iterator[tuple[Act, ...]]:
    for act in run.acts:
        registries = _registries_naming(run, act) if _has_credential(act) else []
        if registries and not any(_may_name(registry, act.origin) for registry in registries):
            yield (act,)


@rule("safety", "a credential is sent before, or in another way than, it was asked for there")
def credential_unasked(run: Run) -> Iterator[tuple[Act, ...]]:
    for act in run.acts:
        # The login service of a cloud gets proofs of identity without a challenge. It refuses wrong
        # ones.
        if not _has_credential(act) or _registries_naming(run, act) or act.kind == "login":
            continue
        scheme = act.authorization.scheme
        challenges = [
            challenge
            for challenge in run.challenges
            if challenge.giver.origin == act.origin
            and challenge.giver.before(act)
            and challenge.scheme == scheme
        ]
        if not challenges and not _redirects_to(run, act) and not _locations_to(run, act):
            yield (act,)


@rule("safety", "a token goes to a registry whose token service did not give it")
def token_of_another(run: Run) -> Iterator[tuple[Act, ...]]:
    bearing = [act for act in run.acts if act.authorization.scheme == "bearer"]
    for acts in group_by(bearing, lambda act: act.authorization.value).values():
        first = acts[0]
        realms = _realms_of(run, first.origin)
        for act in acts[1:]:
            if act.origin != first.origin and realms.isdisjoint(_realms_of(run, act.origin)):
                yield first, act
                break


@rule("safety", "a credential that TLS protects elsewhere goes in clear")
def credential_in_clear(run: Run) -> Iterator[tuple[Act, ...]]:
    for act in run.acts:
        if not _has_credential(act) or not act.origin.startswith("http:"):
            continue
        authorization = act.authorization
        over_tls = [
            other
            for other in run.acts
            if other.origin.startswith("https:")
            and authorization.value
            and other.authorization == authorization
        ]
        tls_registries = [
            origin for origin in _registries_naming(run, act) if origin.startswith("https:")
        ]
        if over_tls or tls_registries:
            yield (*over_tls[:1], act)


@rule("safety", "a secret stands in a URL: it ends in the logs of every server on the way")
def secret_in_url(run: Run) -> Iterator[tuple[Act, ...]]:
    sent = {
        text for act in run.acts for text in (*act.entry.sent_secrets(), act.authorization.value)
    }
    secrets = {text for text in sent if len(text) >= _SHORTEST_SECRET}
    # A server's Location may contain a secret, which the client has to send back.
    locations = {location.target for session in run.sessions for location in session.locations}
    locations |= {location.target for location in run.redirects}
    for act in run.acts:
        if without_digest(act.target) in locations or act.target in locations:
            continue
        if any(text in unquote_plus(act.target) for text in secrets):
            yield (act,)


@single("safety", "a cookie is sent: nobody gave one")
def cookie_sent(act: Act) -> bool:
    return "cookie" in act.headers


@rule("safety", "a token is asked for with push where nothing is to be written")
def push_asked_of_source(run: Run) -> Iterator[tuple[Act, ...]]:
    for act in run.select(kind="token"):
        registries = [
            challenge.giver.place
            for challenge in run.challenges
            if challenge.realm.startswith(act.origin)
        ]
        scopes = " ".join(parameters(act, "scope"))
        if registries and all(place in run.readonly for place in registries) and "push" in scopes:
            yield (act,)


# Content.


@single("safety", "something is deleted that is not an upload session")
def deleted(act: Act) -> bool:
    return act.method == "DELETE" and act.kind != "upload"


@rule("safety", "something is written to a source")
def source_written(run: Run) -> Iterator[tuple[Act, ...]]:
    for act in run.acts:
        if act.is_write and act.kind != "token" and act.place in run.readonly:
            yield (act,)


def _committed(run: Run) -> Iterator[tuple[Act, Repository, Stored]]:
    """Yield each manifest that this run has committed, with the exchange and the repository."""
    for (place, name, digest), act in run.commits.items():
        repository = run.repository(place, name)
        if digest in repository.manifests:
            yield act, repository, repository.manifests[digest]


@rule("safety", "what was sent and committed does not have the bytes of its digest")
def content_differs(run: Run) -> Iterator[tuple[Act, ...]]:
    for act, repository, manifest in _committed(run):
        algorithm = manifest.digest.partition(":")[0]
        if digest_of(manifest.body, algorithm) != manifest.digest:
            yield (act,)
        for part in manifest.blobs:
            digest = part["digest"]
            blob = repository.blobs.get(digest)
            sent = [
                other
                for other in run.acts_by_digest.get(digest, ())
                if other.is_write and other.status == 201
            ]
            if blob is not None and sent and blob.digest(digest.partition(":")[0]) != digest:
                yield (*sent, act)


@rule("safety", "a manifest is committed and what it names is missing, or has another size")
def content_missing(run: Run) -> Iterator[tuple[Act, ...]]:
    for act, repository, manifest in _committed(run):
        for part in (*manifest.blobs, *manifest.children):
            size = repository.size_of(part["digest"])
            if size != part["size"] and not (size is None and is_foreign(part["mediaType"])):
                yield (act,)
                break


def _held(run: Run) -> Iterator[tuple[tuple[str, str, str], Stored]]:
    """Yield all manifests that the sites hold, with place, repository name and digest."""
    for place in run.sites:
        for name, repository in run.repositories(place).items():
            for digest, manifest in repository.manifests.items():
                yield (place, name, digest), manifest


def _held_before(run: Run) -> list[Stored]:
    """Return all manifests that a site held before the run."""
    return [
        manifest
        for key, manifest in _held(run)
        if key not in run.commits or run.arrivals.get(key) is not run.commits[key]
    ]


@rule(
    "safety",
    "a manifest is committed that no source holds: neither its bytes nor a choice of an index",
)
def manifest_invented(run: Run) -> Iterator[tuple[Act, ...]]:
    held = _held_before(run)
    committed = {digest for _, _, digest in run.commits}
    for act, _, manifest in _committed(run):
        has_sources = any(run.repositories(place) for place in run.sites if place != act.place)
        is_copy = any(other.body == manifest.body for other in held)
        if is_copy or not has_sources:
            continue
        if FALLBACK.match(act.reference):
            continue  # a list of referrers, which the client writes: see `list_of_referrers_wrong`

        # A trimmed index may contain another trimmed index, which this run has committed.
        children = {part["digest"] for part in manifest.children}
        is_trimmed = manifest.media_type in INDEXES and any(
            other.media_type == manifest.media_type
            and len(children) <= len(other.children)
            and children <= {part["digest"] for part in other.children} | committed
            for other in held
        )
        if not is_trimmed:
            yield (act,)


@rule(
    "safety",
    "a list of referrers is put that names one twice, one of another subject, or describes it otherwise",
)
def list_of_referrers_wrong(run: Run) -> Iterator[tuple[Act, ...]]:
    for act, repository, manifest in _committed(run):
        if not FALLBACK.match(act.reference):
            continue

        digests = [part["digest"] for part in manifest.children]
        subject = act.reference.replace("-", ":", 1)
        for part in manifest.children:
            referrer = repository.manifests.get(part["digest"])
            if (
                digests.count(part["digest"]) > 1
                or referrer is None
                or referrer.subject != subject
                or not _describes(part, referrer)
            ):
                yield (act,)
                break


def _describes(part: Mapping[str, Any], manifest: Stored) -> bool:
    """Whether a descriptor in a list of referrers has the fields of a manifest."""
    expected = manifest.descriptor()
    return all((part.get(key) or None) == expected.get(key) for key in _DESCRIBED)


@rule("safety", "a manifest is committed under another media type than its source's")
def media_type_changed(run: Run) -> Iterator[tuple[Act, ...]]:
    held = _held_before(run)
    for act, _, manifest in _committed(run):
        types = {other.media_type for other in held if other.body == manifest.body}
        if types and manifest.media_type not in types:
            yield (act,)


@rule("safety", "a layer that must not be distributed is fetched or pushed")
def foreign_layer_moved(run: Run) -> Iterator[tuple[Act, ...]]:
    parts = [part for _, manifest in _held(run) for part in manifest.blobs]
    foreign = {part["digest"] for part in parts if is_foreign(part["mediaType"])}
    # A layer that one manifest names as an ordinary layer may be moved.
    foreign -= {part["digest"] for part in parts if not is_foreign(part["mediaType"])}
    for act in run.select("GET PUT POST PATCH", "blob upload upload_start"):
        if act.digest in foreign:
            yield (act,)
