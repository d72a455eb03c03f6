"""Find the mistakes of a client in the journals of all servers that it has used.

    findings = audit({server.url: server.app for server in (source, target)})
    assert not findings, report(findings)

A mistake has the name of the rule that finds it. There are rules of three kinds: requests that
strict registries refuse (`protocol`), disclosed secrets and damaged images (`safety`), and requests
that were not needed, because the client knew the answer (`discipline`).

Invariants: rules of `protocol` and `safety` hold always. Those of `discipline` hold in undisturbed
runs only (`Run.is_disturbed`), but for bytes of a blob that move again without a failure, and
manifests that are read again because a target failed. What a registry refuses as wrong by itself
(`journal.violations`) needs no rule. A credential may only be sent after a challenge has asked for
it.
Follows: docs/design.md sections 6 and 7, docs/protocol-facts.md sections 1.2 to 1.10, 2.7 and 9.2.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qsl, unquote_plus, urlsplit

from .evidence import Act, ContentKey, RepositoryKey, Run, Session, group_by, without_digest
from .http import Site
from .messages import digest_of
from .storage import (
    DOCKER_LIST,
    DOCKER_MANIFEST,
    INDEXES,
    OCI_INDEX,
    OCI_MANIFEST,
    Stored,
    is_foreign,
)

__all__ = ["KINDS", "MISTAKES", "RULES", "Finding", "audit", "latest", "report"]

Kind = Literal["protocol", "safety", "discipline"]
KINDS: tuple[Kind, ...] = ("protocol", "safety", "discipline")

# Tags under which clients store lists of referrers (docs/protocol-facts.md section 1.10).
_FALLBACK = re.compile(r"sha(?:256-[a-f0-9]{64}|512-[a-f0-9]{64})\Z")
# Media types that a client has to accept.
_TYPES = frozenset({OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST})
# Digests of blobs whose bytes every client knows.
_TRIVIAL = (digest_of(b"{}"), digest_of(b""))
# Fields of a descriptor that a list of referrers must have right.
_DESCRIBED = ("mediaType", "digest", "size", "artifactType", "annotations")
_SHORTEST_SECRET = 4  # characters; shorter ones are not searched for in URLs

# What a rule yields: the exchanges that show a mistake.
Acts = tuple[Act, ...]


@dataclass(frozen=True)
class Finding:
    """One mistake of the client."""

    name: str  # of the rule
    kind: Kind
    text: str  # what is wrong
    acts: Acts

    def __str__(self) -> str:
        return "\n    ".join([f"{self.kind}: {self.name}: {self.text}", *map(str, self.acts)])


class Rule(NamedTuple):
    """A kind of mistake, and the function that finds it."""

    kind: Kind
    text: str
    check: Callable[[Run], Iterator[Acts]]
    is_always: bool  # whether it holds in a disturbed run too


RULES: dict[str, Rule] = {}


def rule(
    kind: Kind, text: str, *, after_faults: bool = False
) -> Callable[[Callable[[Run], Iterator[Acts]]], Callable[[Run], Iterator[Acts]]]:
    """Add a function that yields the exchanges of each mistake.

    A rule of `discipline` holds in a disturbed run only with `after_faults`, all others always.
    """

    def add(check: Callable[[Run], Iterator[Acts]]) -> Callable[[Run], Iterator[Acts]]:
        RULES[check.__name__] = Rule(kind, text, check, after_faults or kind != "discipline")
        return check

    return add


def single(kind: Kind, text: str) -> Callable[[Callable[[Act], bool]], Callable[[Act], bool]]:
    """Add a predicate that reports whether a single exchange is a mistake."""

    def add(is_wrong: Callable[[Act], bool]) -> Callable[[Act], bool]:
        def check(run: Run) -> Iterator[Acts]:
            return ((act,) for act in run.acts if is_wrong(act))

        RULES[is_wrong.__name__] = Rule(kind, text, check, kind != "discipline")
        return is_wrong

    return add


# Requests that strict registries refuse, or that no correct client makes.


@single(
    "protocol",
    "Accept lacks a media type of manifests: what is there looks absent, or another is given",
)
def accept_lacks_types(act: Act) -> bool:
    accepted = {part.partition(";")[0].strip() for part in act.header("accept").split(",")}
    return act.kind == "manifest" and act.method in ("GET", "HEAD") and not accepted >= _TYPES


@single("protocol", "content is asked for in a coding: its bytes would not have the digest")
def coding_accepted(act: Act) -> bool:
    coding = act.headers.get("accept-encoding", "identity")
    return act.method == "GET" and act.kind in ("blob", "manifest") and coding != "identity"


@single("protocol", "Range is not bytes=<start>-<end>")
def range_malformed(act: Act) -> bool:
    form = r"bytes=([0-9]+-[0-9]*|-[0-9]+)"
    return "range" in act.headers and not re.fullmatch(form, act.header("range"))


@rule("protocol", "the next page is not the one that the Link named")
def page_not_linked(run: Run) -> Iterator[Acts]:
    pages = list(run.select("GET", "tag_list referrers"))
    for act in pages:
        earlier = [page for page in pages if page.place == act.place and page.before(act)]
        links = ", ".join(page.response_headers.get("link", "") for page in earlier)
        if "last" in act.query and "next" in links and f"{act.target}>" not in links:
            yield (*earlier, act)


@rule("protocol", "a chunk does not begin where the one before it ended")
def chunk_order(run: Run) -> Iterator[Acts]:
    for session in run.sessions:
        sent: list[Act] = []
        for act in session.acts:
            if act.method not in ("PATCH", "PUT"):
                continue
            first = act.header("content-range").partition("-")[0]
            offset = sum(chunk.request_bytes for chunk in sent)
            is_known = not any(chunk.is_failure for chunk in sent)
            if first.isdigit() and int(first) != offset and is_known:
                yield (*sent, act)
                break
            sent.append(act)


@rule("protocol", "an upload goes elsewhere than to a Location that was given")
def location_not_given(run: Run) -> Iterator[Acts]:
    for session in run.sessions:
        given = {location.url for location in session.locations}
        for act in session.acts:
            if without_digest(act.url) not in given:
                yield session.opener, act
    yield from ((act,) for act in run.strays)


@rule("protocol", "an upload goes to an older Location than the newest one of its session")
def location_stale(run: Run) -> Iterator[Acts]:
    for session in run.sessions:
        # A GET of the status may use an older Location, because after a broken body the client does
        # not know the newest (end-13).
        for act in (act for act in session.acts if act.method != "GET"):
            *older, newest = session.given(act) or [""]
            url = without_digest(act.url)
            if url != newest and url in older:
                yield session.opener, act


@rule("protocol", "an upload session is used after it was finished or cancelled")
def session_after_end(run: Run) -> Iterator[Acts]:
    for session in run.sessions:
        ends = [act for act in session.acts if act.method in ("PUT", "DELETE") and act.is_success]
        later = [act for act in session.acts if ends and ends[0].before(act)]
        if later:
            yield (ends[0], *later)


@single("protocol", "bytes were sent under a digest that is not theirs")
def bytes_not_of_digest(act: Act) -> bool:
    return act.is_refused("DIGEST_INVALID")


@single("protocol", "the registry itself refuses a manifest as not what its media type says")
def manifest_refused(act: Act) -> bool:
    return act.is_refused("MANIFEST_INVALID")


@rule("protocol", "a manifest is put that names what is not there")
def manifest_names_absent(run: Run) -> Iterator[Acts]:
    for act in run.acts:
        # After a changed answer, the client may be wrong about the registry's content.
        if act.is_refused("MANIFEST_BLOB_UNKNOWN") and not any(
            other.is_disturbed and other.site == act.site and other.begun < act.begun
            for other in run.acts
        ):
            yield (act,)


# Credentials.


def _has_credential(act: Act) -> bool:
    """Whether the request has a credential, in a header or in the form of a token request."""
    return "authorization" in act.headers or bool(act.secrets)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _namers(run: Run, act: Act) -> list[str]:
    """Return the origins of registries that named the URL of `act` as their realm before `act`."""
    url = act.url.partition("?")[0]
    return [
        challenge.giver.origin
        for challenge in run.challenges
        if challenge.scheme == "bearer"
        and challenge.giver.before(act)
        and challenge.realm.partition("?")[0] == url
    ]


def _may_name(registry: str, realm: str) -> bool:
    """Whether a registry may name a realm: only on its own host (section 2.7)."""
    own = urlsplit(registry).hostname or ""
    other = urlsplit(realm).hostname or ""
    return own == other or (_is_loopback(own) and _is_loopback(other))


def _senders(run: Run, act: Act) -> list[Act]:
    """Return earlier answers of other origins that sent the client to the URL of `act`.

    They are redirects, or have a Location of an upload.
    """
    givers = [*run.givers.get(act.url, ()), *run.givers.get(without_digest(act.url), ())]
    return [giver for giver in givers if giver.before(act) and giver.origin != act.origin]


@rule("safety", "a credential follows a redirect, or an upload's Location, to another origin")
def credential_on_redirect(run: Run) -> Iterator[Acts]:
    for act in filter(_has_credential, run.acts):
        senders = _senders(run, act)
        if senders:
            yield senders[-1], act


@rule("safety", "a credential goes to the realm of a registry that may not name it")
def credential_to_realm(run: Run) -> Iterator[Acts]:
    for act in filter(_has_credential, run.acts):
        registries = _namers(run, act)
        if registries and not any(_may_name(registry, act.origin) for registry in registries):
            yield (act,)


@rule("safety", "a credential is sent before, or in another way than, it was asked for there")
def credential_unasked(run: Run) -> Iterator[Acts]:
    for act in filter(_has_credential, run.acts):
        # The login service of a cloud gets proofs of identity without a challenge. It refuses wrong
        # ones.
        if act.kind == "login" or _namers(run, act) or _senders(run, act):
            continue
        if not any(
            challenge.giver.origin == act.origin
            and challenge.giver.before(act)
            and challenge.scheme == act.authorization.scheme
            for challenge in run.challenges
        ):
            yield (act,)


@rule("safety", "a token goes to a registry whose token service did not give it")
def token_of_another(run: Run) -> Iterator[Acts]:
    realms: dict[str, set[str]] = {}
    for challenge in run.challenges:
        realms.setdefault(challenge.giver.origin, set()).add(challenge.realm)
    bearing = [act for act in run.acts if act.authorization.scheme == "bearer"]
    for first, *others in group_by(bearing, lambda act: act.authorization.value).values():
        named = realms.get(first.origin, set())
        for act in others:
            if act.origin != first.origin and named.isdisjoint(realms.get(act.origin, ())):
                yield first, act


@rule("safety", "a credential that TLS protects elsewhere goes in clear")
def credential_in_clear(run: Run) -> Iterator[Acts]:
    protected = [act for act in run.acts if act.origin.startswith("https:")]
    credentials = {act.authorization for act in protected if act.authorization.value}
    for act in filter(_has_credential, run.acts):
        is_for_tls = any(registry.startswith("https:") for registry in _namers(run, act))
        if act.origin.startswith("http:") and (is_for_tls or act.authorization in credentials):
            yield (act,)


@rule("safety", "a secret stands in a URL: it ends in the logs of every server on the way")
def secret_in_url(run: Run) -> Iterator[Acts]:
    sent = {text for act in run.acts for text in (*act.sent_secrets(), act.authorization.value)}
    secrets = [text for text in sent if len(text) >= _SHORTEST_SECRET]
    # A server's Location may contain a secret, which the client has to send back.
    for act in run.acts:
        if act.url not in run.givers and without_digest(act.url) not in run.givers:
            target = unquote_plus(act.target)
            if any(text in target for text in secrets):
                yield (act,)


@single("safety", "a cookie is sent: nobody gave one")
def cookie_sent(act: Act) -> bool:
    return "cookie" in act.headers


def _scopes(act: Act) -> list[str]:
    """Return the scopes that a token is asked for, sorted. Those of a form are unknown."""
    query = parse_qsl(urlsplit(act.target).query)
    return sorted(scope for key, value in query if key == "scope" for scope in value.split())


@rule("safety", "a token is asked for with push where nothing is to be written")
def push_asked_of_source(run: Run) -> Iterator[Acts]:
    for act in run.select(kind="token"):
        registries = [
            challenge.giver.site
            for challenge in run.challenges
            if challenge.realm.startswith(act.origin)
        ]
        if registries and {*registries} <= {*run.readonly} and "push" in " ".join(_scopes(act)):
            yield (act,)


# Content.


@single("safety", "something is deleted that is not an upload session")
def deleted(act: Act) -> bool:
    return act.method == "DELETE" and act.kind != "upload"


@rule("safety", "something is written to a source")
def source_written(run: Run) -> Iterator[Acts]:
    return ((act,) for act in run.acts if act.is_write and act.site in run.readonly)


def _committed(run: Run) -> Iterator[tuple[Act, RepositoryKey, Stored]]:
    """Yield each manifest that this run has committed, with its exchange and where it is."""
    for content, act in run.commits.items():
        manifest = run.manifest(content)
        if manifest is not None:
            yield act, act.place, manifest


def _held(run: Run) -> Iterator[tuple[ContentKey, Stored]]:
    """Yield all manifests that the sites hold."""
    for origin in run.sites:
        for name, repository in run.repositories(origin).items():
            for digest, manifest in repository.manifests.items():
                yield ContentKey(origin, name, digest), manifest


def _held_before(run: Run) -> list[Stored]:
    """Return all manifests that a site held before the run."""
    return [
        manifest
        for content, manifest in _held(run)
        if content not in run.commits or run.was_there(content, run.commits[content])
    ]


@rule("safety", "what was sent and committed does not have the bytes of its digest")
def content_differs(run: Run) -> Iterator[Acts]:
    for act, place, manifest in _committed(run):
        if digest_of(manifest.body, manifest.digest.partition(":")[0]) != manifest.digest:
            yield (act,)
        for part in manifest.blobs:
            digest = part["digest"]
            blob = run.repository(place).blobs.get(digest)
            about = run.acts_by_digest.get(digest, ())
            sent = [other for other in about if other.is_write and other.status == 201]
            if blob is not None and sent and blob.digest(digest.partition(":")[0]) != digest:
                yield (*sent, act)


@rule("safety", "a manifest is committed and what it names is missing, or has another size")
def content_missing(run: Run) -> Iterator[Acts]:
    for act, place, manifest in _committed(run):
        for part in (*manifest.blobs, *manifest.children):
            size = run.repository(place).size_of(part["digest"])
            if size != part["size"] and not (size is None and is_foreign(part["mediaType"])):
                yield (act,)
                break


@rule(
    "safety",
    "a manifest is committed that no source holds: neither its bytes nor a choice of an index",
)
def manifest_invented(run: Run) -> Iterator[Acts]:
    held = _held_before(run)
    for act, place, manifest in _committed(run):
        has_sources = any(run.repositories(site) for site in run.sites if site != place.origin)
        is_copy = any(other.body == manifest.body for other in held)
        # The client itself writes lists of referrers: see `list_of_referrers_wrong`.
        if is_copy or not has_sources or _FALLBACK.match(act.reference):
            continue

        children = {part["digest"] for part in manifest.children}
        is_trimmed = manifest.media_type in INDEXES and any(
            other.media_type == manifest.media_type
            and len(children) <= len(other.children)
            and children <= {part["digest"] for part in other.children}
            for other in held
        )
        if not is_trimmed:
            yield (act,)


@rule(
    "safety",
    "a list of referrers is put that names one twice, one of another subject, or describes it otherwise",
)
def list_of_referrers_wrong(run: Run) -> Iterator[Acts]:
    for act, place, manifest in _committed(run):
        if not _FALLBACK.match(act.reference):
            continue
        listed = Counter(part["digest"] for part in manifest.children)
        subject = act.reference.replace("-", ":", 1)
        for part in manifest.children:
            referrer = run.repository(place).manifests.get(part["digest"])
            if (
                referrer is None
                or referrer.subject != subject
                or listed[part["digest"]] > 1
                or not _describes(part, referrer)
            ):
                yield (act,)
                break


def _describes(part: Mapping[str, Any], manifest: Stored) -> bool:
    """Whether a descriptor in a list of referrers has the fields of a manifest."""
    expected = manifest.descriptor()
    return all((part.get(key) or None) == expected.get(key) for key in _DESCRIBED)


@rule("safety", "a manifest is committed under another media type than its source's")
def media_type_changed(run: Run) -> Iterator[Acts]:
    held = _held_before(run)
    for act, _, manifest in _committed(run):
        types = {other.media_type for other in held if other.body == manifest.body}
        if types and manifest.media_type not in types:
            yield (act,)


@rule("safety", "a layer that must not be distributed is fetched or pushed")
def foreign_layer_moved(run: Run) -> Iterator[Acts]:
    parts = [part for _, manifest in _held(run) for part in manifest.blobs]
    # A layer that one manifest names as an ordinary layer may be moved.
    ordinary = {part["digest"] for part in parts if not is_foreign(part["mediaType"])}
    foreign = {part["digest"] for part in parts} - ordinary
    for act in run.select("GET PUT POST PATCH", "blob upload upload_start"):
        if act.digest in foreign:
            yield (act,)


# Requests that were not needed: listings, tags and manifests.


def _repeated(acts: Iterable[Act], key: Callable[[Act], object]) -> Iterator[Acts]:
    """Yield the exchanges with an equal key, if there are several."""
    return (tuple(group) for group in group_by(acts, key).values() if len(group) > 1)


def _question(act: Act) -> object:
    """Return a value that is equal for repetitions of a request."""
    return act.site, act.method, act.target


@single("discipline", "the registry is pinged")
def ping(act: Act) -> bool:
    return act.kind == "ping"


@rule("discipline", "a page of a list, of tags or of referrers, is asked for twice")
def listing_twice(run: Run) -> Iterator[Acts]:
    pages = run.select("GET", "tag_list referrers")
    return _repeated((page for page in pages if page.is_final), _question)


@rule("discipline", "a tag is asked for that the listing showed absent")
def absent_tag_asked(run: Run) -> Iterator[Acts]:
    pages = [page for page in run.select("GET", "tag_list") if page.is_final]
    for act in run.select("GET HEAD", "manifest"):
        read = [page for page in pages if page.place == act.place and run.had_read(page, act)]
        is_whole = read and "next" not in read[-1].response_headers.get("link", "")
        if act.status == 404 and ":" not in act.reference and is_whole:
            yield (*read, act)


@rule("discipline", "a tag is asked for twice")
def tag_asked_twice(run: Run) -> Iterator[Acts]:
    tagged = [
        act
        for act in run.select("GET HEAD", "manifest")
        if act.is_final and ":" not in act.reference and not _FALLBACK.match(act.reference)
    ]
    for acts in group_by(tagged, _question).values():
        for first, second in pairwise(acts):
            # The second request is justified if something was put in between.
            if not any(
                put.place == first.place and first.begun < put.begun < second.begun
                for put in run.select("PUT", "manifest")
            ):
                yield first, second


@rule("discipline", "a manifest is fetched again whose bytes are known", after_faults=True)
def manifest_fetched_twice(run: Run) -> Iterator[Acts]:
    # What fails at a target excuses no second reading of the source.
    targets = {act.site for act in run.acts if act.is_write}
    fetched = [act for act in run.select("GET", "manifest") if act.is_success]
    for acts in group_by(fetched, lambda act: (act.place, act.said_digest)).values():
        again = [act for act in acts[1:] if ":" in act.reference]
        others = targets - {acts[0].site}
        if again and len(again) > run.excuses(again[0].digest, again[-1], acts[0], others):
            yield acts[0], *again


@rule("discipline", "a manifest is asked for that this run has put")
def own_manifest_asked(run: Run) -> Iterator[Acts]:
    puts = [act for act in run.select("PUT", "manifest") if act.is_success]
    for act in run.select("GET HEAD", "manifest"):
        own = [
            put
            for put in puts
            if (put.site, put.target) == (act.site, act.target) and run.had_read(put, act)
        ]
        if own and not (_FALLBACK.match(act.reference) and _may_differ(run, own[-1], act)):
            yield own[-1], act


def _may_differ(run: Run, put: Act, act: Act) -> bool:
    """Whether a list of referrers may be another than `put` when `act` reads it (section 1.10).

    Other writers may have changed it before the first look after the put, and before later ones if
    an earlier look has found another list.
    """
    looks = [
        look
        for look in run.select("GET HEAD", "manifest")
        if (look.site, look.target) == (put.site, put.target)
        and put.before(look)
        and look.begun < act.begun
    ]
    return not looks or len({look.said_digest for look in (put, *looks)}) > 1


@rule("discipline", "a manifest is put twice under one name")
def manifest_put_twice(run: Run) -> Iterator[Acts]:
    puts = [act for act in run.select("PUT", "manifest") if act.is_success]
    return _repeated(puts, lambda act: (act.site, act.target, act.said_digest))


@rule("discipline", "a referrer is put before its subject")
def subject_after_referrer(run: Run) -> Iterator[Acts]:
    for content, act in run.commits.items():
        manifest = run.manifest(content)
        about = content._replace(digest=(manifest and manifest.subject) or "")
        subject = None if about in run.earlier_commits else run.commits.get(about)
        if subject is not None and not subject.before(act):
            yield act, subject


# Requests that were not needed: referrers.


def _area(act: Act) -> tuple[str, str]:
    """Return the site and the first path segment, for which facts hold (rules 11, 15)."""
    return act.site, act.repository.partition("/")[0]


def _lists_referrers(act: Act) -> bool:
    """Whether the referrers API has answered. Other successes show that there is none (rule 15)."""
    return act.is_success and act.response_headers.get("content-type") == OCI_INDEX


@rule("discipline", "the fallback tag is asked for, or put, where the referrers API has answered")
def fallback_after_api(run: Run) -> Iterator[Acts]:
    questions = list(run.select("GET", "referrers"))
    for act in run.select(kind="manifest"):
        if not _FALLBACK.match(act.reference):
            continue
        answers = [
            question
            for question in questions
            if _area(question) == _area(act)
            and _lists_referrers(question)
            and run.had_read(question, act)
        ]
        # If the API answers 404 for a digest, the tag may still have its referrers
        # (docs/specification.md section 1.1, step 2).
        subject = act.reference.replace("-", ":", 1)
        is_unknown = any(each.reference == subject and each.status == 404 for each in questions)
        if answers and not is_unknown:
            yield answers[0], act


@rule("discipline", "the referrers API is asked again where it is known to be missing")
def absent_api_asked(run: Run) -> Iterator[Acts]:
    missing: dict[object, Act] = {}
    for act in run.select("GET", "referrers"):
        first = missing.get(_area(act))
        if first is not None and run.had_read(first, act):
            yield first, act
        is_unknown = {"MANIFEST_UNKNOWN", "NAME_UNKNOWN"} & {*act.codes}
        if act.is_final and not _lists_referrers(act) and not is_unknown:
            missing.setdefault(_area(act), act)


# Requests that were not needed: blobs and upload sessions.


def _is_mount(act: Act) -> bool:
    """Whether the request mounts a blob from another repository."""
    return bool(act.query.get("mount")) and act.query.get("from") not in (None, act.repository)


def _is_probe(act: Act) -> bool:
    """Whether the request asks for a blob by mounting it from its own repository (rule 11)."""
    return bool(act.query.get("mount")) and not _is_mount(act)


@rule(
    "discipline", "a blob is pulled again for what one reading of it could serve", after_faults=True
)
def blob_pulled_twice(run: Run) -> Iterator[Acts]:
    pulls = [act for act in run.select("GET", "blob") if act.is_success and not act.header("range")]
    for acts in group_by(pulls, lambda act: (act.place, act.digest)).values():
        digest = acts[0].digest
        # One reading can serve all registries. A registry that does not support mounts gets the
        # blob once for each repository.
        about = run.acts_by_digest[digest]
        targets = {act.place for act in about if act.is_write and act.query.get("digest")}
        readings = max(Counter(target.origin for target in targets).values(), default=1)
        if len(acts) > readings + run.excuses(digest, acts[-1], acts[0]):
            yield tuple(acts)


@single("discipline", "a blob is fetched whose bytes are known to everybody")
def trivial_blob_fetched(act: Act) -> bool:
    return (act.method, act.kind) == ("GET", "blob") and act.reference in _TRIVIAL


@rule("discipline", "a blob is uploaded twice to one repository", after_faults=True)
def blob_uploaded_twice(run: Run) -> Iterator[Acts]:
    ends = [
        act
        for act in run.select(kind="upload upload_start")
        if act.digest and act.is_success and act.status != 202 and not _is_probe(act)
    ]
    for acts in _repeated(ends, lambda act: (act.place, act.digest)):
        if len(acts) > 1 + run.excuses(acts[0].digest, acts[-1], acts[0]):
            yield acts


@rule("discipline", "a blob is asked for of which this run knows whether it is there")
def known_blob_asked(run: Run) -> Iterator[Acts]:
    for act in run.select("HEAD", "blob"):
        answers = [
            earlier
            for earlier in run.acts_by_digest[act.digest]
            if earlier.place == act.place
            and run.had_read(earlier, act)
            and earlier.is_final
            and earlier.kind in ("blob", "upload", "upload_start")
            # A mount that was refused says nothing of whether the blob is in this repository.
            and not (_is_mount(earlier) and earlier.status == 202)
        ]
        if answers and not _verifies_probe(run, answers[-1], act):
            yield answers[-1], act


def _verifies_probe(run: Run, answer: Act, act: Act) -> bool:
    """Whether `act` verifies the first 201 of a registry to a probe (rule 11)."""
    return (
        _is_probe(answer)
        and answer.status == 201
        and not any(
            _area(look) == _area(act) and look.status == 200 and look.before(answer)
            for look in run.select("HEAD", "blob")
        )
    )


@rule("discipline", "a source's blob is opened before a target has accepted an upload")
def blob_before_session(run: Run) -> Iterator[Acts]:
    starts = [act for act in run.select("POST", "upload_start") if act.is_success]
    starts.sort(key=lambda act: act.ended or 0)
    for act in run.select("GET", "blob"):
        about = run.acts_by_digest[act.digest]
        # Sent in the POST: an earlier run had found that uploads are accepted.
        is_in_post = any(each.kind == "upload_start" and "digest" in each.query for each in about)
        targets = {each.place for each in about if each.is_write}
        accepted = [start for start in starts if start.place in targets] or starts[:1]
        is_open = any(start.before(act) for start in accepted)
        if accepted and not is_open and not is_in_post and not run.is_redirected(act):
            yield act, accepted[0]


@rule(
    "discipline",
    "a second upload session is opened for a blob that has one: the 202 of a refused mount",
)
def second_session(run: Run) -> Iterator[Acts]:
    openers: dict[object, list[Act]] = {}
    probed: set[tuple[str, str]] = set()
    for session in run.sessions:
        area = _area(session.opener)
        if area not in probed and _is_needless_probe(run, session):
            probed.add(area)  # rule 11 allows one
        elif session.digest:
            openers.setdefault((session.opener.place, session.digest), []).append(session.opener)
    yield from (tuple(acts) for acts in openers.values() if len(acts) > 1)


def _is_needless_probe(run: Run, session: Session) -> bool:
    """Whether a session was opened by a probe for a blob that was there, and not used for it."""
    opener = session.opener
    blob = ContentKey(*opener.place, opener.digest or "")
    is_used = any(act.query.get("digest") for act in session.acts)
    return _is_probe(opener) and not is_used and run.was_there(blob, opener)


@rule("discipline", "an upload session is opened and never used")
def session_unused(run: Run) -> Iterator[Acts]:
    return ((session.opener,) for session in run.sessions if not session.acts)


@rule(
    "discipline", "a blob is mounted from a repository without a committed manifest that names it"
)
def mount_uncommitted(run: Run) -> Iterator[Acts]:
    for act in filter(_is_mount, run.select("POST", "upload_start")):
        source = RepositoryKey(act.site, act.query["from"])
        naming = run.repository(source).naming(act.query["mount"])
        manifests = [ContentKey(*source, digest) for digest in naming]
        commits = [run.commits.get(manifest) for manifest in manifests]
        was_there = any(manifest in run.earlier_commits for manifest in manifests)
        if not was_there and not any(each is None or each.before(act) for each in commits):
            yield (act,)


@rule("discipline", "a mount is tried again between repositories where it was refused")
def mount_refused_again(run: Run) -> Iterator[Acts]:
    refused: dict[object, Act] = {}
    for act in filter(_is_mount, run.select("POST", "upload_start")):
        pair = (act.place, act.query["from"])
        if pair in refused and run.had_read(refused[pair], act):
            yield refused[pair], act
        if act.status == 202:
            refused.setdefault(pair, act)


@rule("discipline", "a blob is uploaded that another repository of the registry has from this run")
def upload_without_mount(run: Run) -> Iterator[Acts]:
    mounts = filter(_is_mount, run.select("POST", "upload_start"))
    refusing = {act.site for act in mounts if act.status != 201}
    for session in run.sessions:
        act = session.opener
        if act.site in refusing or _is_mount(act) or not session.acts or not session.digest:
            continue
        commits = [
            run.commits.get(ContentKey(act.site, name, manifest))
            for name, repository in run.repositories(act.site).items()
            if name != act.repository
            for manifest in repository.naming(session.digest)
        ]
        earlier = [commit for commit in commits if commit and run.had_read(commit, act)]
        if earlier:
            yield earlier[0], act


# Requests that were not needed: logins.


@rule("discipline", "a token is asked for that is held")
def token_twice(run: Run) -> Iterator[Acts]:
    # The scopes of a form are in its body, which the journal does not keep.
    tokens = [act for act in run.select(kind="token") if act.is_success and _scopes(act)]
    for acts in group_by(tokens, lambda act: (act.site, act.authorization, *_scopes(act))).values():
        for first, second in pairwise(acts):
            if not any(
                act.status in (401, 403)
                and act.authorization.scheme == "bearer"
                and first.begun < (act.ended or 0) < second.begun
                for act in run.acts
            ):
                yield first, second


@rule("discipline", "a registry whose challenge is known is asked again without a login")
def challenge_twice(run: Run) -> Iterator[Acts]:
    bare = [
        challenge.giver
        for challenge in run.challenges
        if not challenge.giver.authorization.scheme and not run.is_redirected(challenge.giver)
    ]
    for first, *others in group_by(bare, lambda act: act.origin).values():
        for act in others:
            # Excuse a request that was about to be sent when the first request was refused. Its
            # connection has carried no login yet.
            has_login = any(
                other.origin == act.origin
                and other.authorization.scheme
                and (other.site, other.connection) == (act.site, act.connection)
                and other.before(act)
                for other in run.acts
            )
            if has_login and run.had_read(first, act):
                yield first, act


@rule("discipline", "a login that was refused is tried again")
def refused_login_again(run: Run) -> Iterator[Acts]:
    refused: dict[object, Act] = {}
    for act in run.acts:
        if act.authorization.scheme != "basic":
            continue
        key = (act.origin, act.method if act.kind == "token" else "", act.authorization.value)
        if key in refused and run.had_read(refused[key], act):
            yield refused[key], act
        if act.status == 401:
            refused.setdefault(key, act)


# The audit.

# What is wrong, by name of the mistake.
MISTAKES: Mapping[str, str] = {name: each.text for name, each in RULES.items()}


def latest(sites: Mapping[str, Site]) -> int:
    """Return the newest place in the order of all journals, for `since` of a later audit."""
    entries = [entry for site in sites.values() for entry in site.journal.entries]
    return max((max(entry.begun, entry.ended or 0) for entry in entries), default=0)


def audit(
    sites: Mapping[str, Site],
    *,
    kinds: Collection[Kind] = KINDS,
    since: int = 0,
    excused: Collection[str] = (),
    readonly: Collection[str] = (),
    remembered: bool = False,
    away: Collection[str] = (),
    has_failed: bool = False,
) -> list[Finding]:
    """Return the mistakes of one run.

    `kinds` selects the rules. `excused` holds names of mistakes that a test provokes. `since`
    excludes earlier runs (see `latest`). `Run` describes the other arguments. What a registry has
    recorded as a violation is the mistake `refused_as_wrong`.
    """
    run = Run(
        sites, since, readonly=readonly, remembered=remembered, away=away, has_failed=has_failed
    )
    findings = [
        Finding(name, each.kind, each.text, acts)
        for name, each in RULES.items()
        if each.kind in kinds and (each.is_always or not run.is_disturbed)
        for acts in each.check(run)
    ]
    if "protocol" in kinds:
        findings += [
            Finding("refused_as_wrong", "protocol", f"{origin}: {text}", ())
            for origin, site in sites.items()
            for text in tuple(site.journal.violations)
        ]
    return [finding for finding in findings if finding.name not in excused]


def report(findings: Iterable[Finding]) -> str:
    """Format findings for the message of a failed test."""
    return "the client made mistakes:\n" + "\n".join(map(str, findings))
