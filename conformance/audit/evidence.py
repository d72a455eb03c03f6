"""The evidence of a run: its exchanges in one order, its upload sessions, challenges and commits.

Owns: deriving facts about a client from journals and from the registries' content.
May not know: any rule.
Invariants: the client is assumed to know only complete answers of the registry itself. An answer of
a hook is no evidence against the client.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import parse_qsl, urljoin, urlsplit

from ..journal import Authorization, Entry
from ..registry.storage import OCI_INDEX, Repository
from ..server.exchange import Site

__all__ = [
    "FALLBACK",
    "Act",
    "Challenge",
    "Location",
    "RepositoryKey",
    "Run",
    "Session",
    "group_by",
    "parameters",
    "without_digest",
]

# Tags under which clients store lists of referrers (docs/protocol-facts.md section 1.10).
FALLBACK = re.compile(r"sha(?:256-[a-f0-9]{64}|512-[a-f0-9]{64})\Z")

_HARMLESS = {"delay", "throttle"}  # faults that only change the time of an exchange
_REDIRECTS = (301, 302, 303, 307, 308)
# Statuses of refusals that do not show that the request was wrong.
_NO_FAULT = (401, 403, 408, 429)


class RepositoryKey(NamedTuple):
    """A repository of one of the sites."""

    place: str  # the site's origin
    name: str


class Act(NamedTuple):
    """One request of the client, with its answer."""

    place: str  # the site's own origin
    origin: str  # the origin by the name that the client used
    entry: Entry

    @property
    def method(self) -> str:
        return self.entry.method

    @property
    def kind(self) -> str:
        """The kind of path, one of `journal.KINDS`."""
        return self.entry.kind

    @property
    def target(self) -> str:
        return self.entry.target

    @property
    def reference(self) -> str:
        return self.entry.reference

    @property
    def query(self) -> Mapping[str, str]:
        return self.entry.query

    @property
    def headers(self) -> Mapping[str, str]:
        return self.entry.headers

    @property
    def authorization(self) -> Authorization:
        return self.entry.authorization

    @property
    def status(self) -> int | None:
        return self.entry.status

    @property
    def response_headers(self) -> Mapping[str, str]:
        return self.entry.response_headers

    @property
    def said_digest(self) -> str:
        """The answer's Docker-Content-Digest, or an empty string."""
        return self.response_headers.get("docker-content-digest", "")

    @property
    def begun(self) -> int:
        """The place of the request in the order of all journals.

        `entry.ended` is that of the answer.
        """
        return self.entry.begun

    @property
    def repository(self) -> RepositoryKey:
        return RepositoryKey(self.place, self.entry.repository)

    @property
    def digest(self) -> str | None:
        """The digest of the content that the exchange is about, or None."""
        entry = self.entry
        if ":" in entry.reference:
            return entry.reference
        return entry.query.get("digest") or entry.query.get("mount")

    @property
    def is_write(self) -> bool:
        return self.method in ("POST", "PUT", "PATCH", "DELETE")

    @property
    def is_disturbed(self) -> bool:
        """Whether a hook or a fault changed the exchange."""
        return self.entry.tampered or not {*self.entry.faults} <= _HARMLESS

    @property
    def is_success(self) -> bool:
        """Whether the request succeeded and its answer was not changed.

        A request whose body broke off is no success.
        """
        entry = self.entry
        if entry.status is None or not 200 <= entry.status < 300 or self.is_disturbed:
            return False
        if entry.method not in ("PUT", "PATCH", "POST"):
            return True
        received = str(entry.request_bytes)
        return received == entry.headers.get("content-length", received)

    @property
    def has_final_answer(self) -> bool:
        """Whether the answer is final: a success, or a 404 that was not changed."""
        method = self.method
        kind = self.kind
        is_question = method == "HEAD" or (
            method == "GET" and kind in ("manifest", "tag_list", "referrers")
        )
        return self.is_success or (is_question and self.status == 404 and not self.is_disturbed)

    @property
    def is_failure(self) -> bool:
        """Whether the request may be repeated: it has no final answer and was not redirected."""
        return not self.has_final_answer and self.status not in (304, *_REDIRECTS)

    @property
    def is_refusal(self) -> bool:
        """Whether the registry itself has answered that the request was wrong."""
        status = self.status
        refused = status is not None and 400 <= status < 500 and status not in _NO_FAULT
        return refused and not self.is_disturbed

    def before(self, other: Act) -> bool:
        """Whether this was answered before `other` began.

        The client may not have read the answer yet.
        """
        return self.entry.ended is not None and self.entry.ended < other.begun

    def __str__(self) -> str:
        return f"{self.origin} {self.entry}"


class Location(NamedTuple):
    """A Location of a redirect or of an upload session."""

    giver: Act  # the exchange whose answer has the Location
    origin: str
    target: str  # path and query


class Challenge(NamedTuple):
    """One challenge of a 401."""

    giver: Act  # the exchange whose answer has the challenge
    scheme: str  # "basic" or "bearer"
    realm: str


@dataclass
class Session:
    """An upload session and all requests that were sent to it."""

    opener: Act  # the POST
    path: tuple[str, str]  # origin, and path without its query
    # All Locations of the session, in order.
    locations: list[Location] = field(default_factory=list)
    # All requests to the session, except the POST, in order.
    acts: list[Act] = field(default_factory=list)

    @property
    def digest(self) -> str | None:
        """The digest of the session's blob, or None if the client has not sent it."""
        ends = [act.query["digest"] for act in self.acts if act.query.get("digest")]
        return ends[-1] if ends else self.opener.query.get("mount")

    def newest(self, act: Act) -> Location:
        """Return the newest Location that was given before `act`."""
        earlier = [location for location in self.locations if location.giver.before(act)]
        return max(
            earlier, key=lambda location: location.giver.entry.ended or 0, default=self.locations[0]
        )


def without_digest(target: str) -> str:
    """Return a target without the `digest` parameter, which a client adds to finish an upload."""
    return re.sub(r"(?<=[?&])digest=[^&]*&?", "", target).rstrip("?&")


class Run:
    """The exchanges of one run with all registries, token services and storages.

    `sites` has them by origin, as in `http://127.0.0.1:5000`. Exchanges that began at or before
    `since` belong to an earlier run. `readonly` holds origins of registries that are only sources.
    With `remembered`, the client knows the challenges of earlier runs. `away` holds origins that
    could not be reached for some time, which is in no journal. `has_failed` says that the client
    did not succeed.
    """

    def __init__(
        self,
        sites: Mapping[str, Site],
        since: int = 0,
        *,
        readonly: Collection[str] = (),
        remembered: bool = False,
        away: Collection[str] = (),
        has_failed: bool = False,
    ) -> None:
        self.sites = sites
        self.away = away
        self.readonly = readonly

        # Exchanges in the order in which they began.
        all_acts = sorted(
            (
                Act(place, entry.origin, entry)
                for place, site in sites.items()
                for entry in tuple(site.journal.entries)
            ),
            key=lambda act: act.begun,
        )
        self.acts = [act for act in all_acts if act.begun > since]
        self.acts_by_digest = group_by(self.acts, lambda act: act.digest)
        self._connections = group_by(self.acts, lambda act: (act.place, act.entry.connection))

        # Challenges, and redirects with a Location.
        challenging = all_acts if remembered else self.acts
        self.challenges = [challenge for act in challenging for challenge in _challenges(act)]
        self.realms_named = {challenge.realm.partition("?")[0] for challenge in self.challenges}
        self.redirects = [
            self._location_of(act)
            for act in self.acts
            if act.status in _REDIRECTS and "location" in act.response_headers
        ]
        self._redirected = {location.target for location in self.redirects}

        # A redirect that was not followed counts as a failure: the client did not get its answer.
        reached = {act.target for act in self.acts}
        self.failures = [act for act in self.acts if act.is_failure]
        self.failures += [
            location.giver for location in self.redirects if location.target not in reached
        ]
        self.failures += [act for act in self.select("GET", "blob") if self._is_lie(act)]

        # Whether anything failed: a fault or a hook changed an exchange, a registry refused one or
        # was away, or the client failed. A 401 asks for a login, unless it was sent a token.
        self.is_disturbed = (
            has_failed
            or bool(away)
            or any(act.is_disturbed for act in self.acts)
            or any(
                act.status != 401 or act.authorization.scheme == "bearer" for act in self.failures
            )
        )

        # Upload sessions, and uploads that belong to no session.
        self.sessions = self._find_sessions()
        self.strays: list[Act] = []
        for act in self.acts:
            self._assign(act)

        # The exchanges that committed manifests, in this run and before it. Keys: place, repository
        # name, digest.
        self.commits = _find_commits(self.acts)
        self.earlier_commits = _find_commits(act for act in all_acts if act.begun <= since)
        self.arrivals = self._find_arrivals()

    def select(self, method: str | None = None, kind: str | None = None) -> Iterator[Act]:
        """Yield the exchanges with a method and a kind, in order.

        Both may have several values, separated by spaces. None matches every method or kind.
        """
        methods = None if method is None else method.split()
        kinds = None if kind is None else kind.split()
        for act in self.acts:
            if (methods is None or act.method in methods) and (kinds is None or act.kind in kinds):
                yield act

    def repositories(self, place: str) -> Mapping[str, Repository]:
        """Return the repositories of a site.

        Returns none if the site is no registry of the harness.
        """
        repositories: Mapping[str, Repository] = getattr(self.sites[place], "repositories", {})
        return repositories

    def repository(self, place: str, name: str) -> Repository:
        """Return a repository of a site. An unknown repository looks empty."""
        return self.repositories(place).get(name) or Repository()

    def lists_referrers(self, act: Act) -> bool:
        """Whether an answer to a request for referrers comes from the referrers API."""
        return act.is_success and act.response_headers.get("content-type") == OCI_INDEX

    def lacks_referrers(self, act: Act) -> bool:
        """Whether an answer shows that there is no referrers API (rule 15).

        Such an answer is an error, or a success that is not an index.
        """
        if act.is_disturbed:
            return False
        if act.status in (404, 405, 501):
            return not {"MANIFEST_UNKNOWN", "NAME_UNKNOWN"} & set(act.entry.codes)
        return act.is_success and not self.lists_referrers(act)

    def had_read(self, earlier: Act, act: Act) -> bool:
        """Whether the client had read the answer to `earlier` when it sent `act`.

        The proof is a request on the connection of `earlier`, after that answer and not after
        `act`.
        """
        if not earlier.before(act):
            return False
        same = self._connections[earlier.place, earlier.entry.connection]
        ended = earlier.entry.ended or 0
        begun = act.begun
        return any(ended < later.begun <= begun for later in same)

    def is_registry(self, place: str) -> bool:
        """Whether a site is a registry of the harness."""
        return hasattr(self.sites[place], "repositories")

    def is_redirected(self, act: Act) -> bool:
        """Whether a redirect named the target of `act`."""
        return act.target in self._redirected

    def is_realm(self, act: Act) -> bool:
        """Whether a challenge named the URL of `act` as its realm."""
        return act.origin + act.target.partition("?")[0] in self.realms_named

    def _is_lie(self, act: Act) -> bool:
        """Whether a registry holds bytes that do not match the digest that `act` asks for."""
        digest = act.digest
        blob = self.repository(*act.repository).blobs.get(digest or "")
        return blob is not None and blob.digest(act.reference.partition(":")[0]) != digest

    def excuses(
        self, digest: str | None, act: Act, first: Act, without: Collection[str] = ()
    ) -> float:
        """Count the failures of requests about a digest, after `first` and before `act`.

        A request may be repeated once for each failure. With a digest of None, all failures count.
        Places in `without` do not count. Nobody knows how often a place that was away failed.
        """
        if not set(self.away) <= set(without):
            return math.inf
        # Most requests of an upload session do not name the digest.
        in_sessions = {
            id(other.entry)
            for session in self.sessions
            if digest and session.digest == digest
            for other in (session.opener, *session.acts)
        }
        return sum(
            1
            for other in self.failures
            if other.place not in without
            and (digest in (None, other.digest) or id(other.entry) in in_sessions)
            # A request that was sent before `first` counts too if it failed later.
            and (other.entry.ended or other.begun) > first.begun
            and other.begun < act.begun
        )

    def repeated(self, groups: Mapping[object, list[Act]]) -> Iterator[tuple[Act, ...]]:
        """Yield the groups with more final answers than failures with their digest excuse."""
        for acts in groups.values():
            settled = [act for act in acts if act.has_final_answer]
            if settled and len(settled) > 1 + self.excuses(
                settled[0].digest, settled[-1], settled[0]
            ):
                yield tuple(settled)

    def committed(self, repository: RepositoryKey, blob: str, act: Act) -> bool:
        """Whether a repository held a manifest that names `blob` when `act` was sent."""
        keys = [(*repository, digest) for digest in self.repository(*repository).naming(blob)]
        was_there = any(key in self.earlier_commits for key in keys)
        commits = [self.commits.get(key) for key in keys]
        return was_there or any(commit is None or commit.before(act) for commit in commits)

    @staticmethod
    def _location_of(act: Act) -> Location:
        """Parse the Location of an answer. Origin and target are empty if it is not a URL."""
        try:
            parts = urlsplit(urljoin(act.origin + act.target, act.response_headers["location"]))
        except ValueError:
            return Location(act, "", "")
        query = f"?{parts.query}" if parts.query else ""
        return Location(act, f"{parts.scheme}://{parts.netloc}", (parts.path or "/") + query)

    def _find_sessions(self) -> list[Session]:
        sessions = []
        for act in self.select("POST", "upload_start"):
            if act.status == 202 and "location" in act.response_headers:
                location = self._location_of(act)
                sessions.append(
                    Session(act, (location.origin, urlsplit(location.target).path), [location])
                )
        return sessions

    def _assign(self, act: Act) -> None:
        """Add an exchange to its upload session, or an upload without a session to the strays."""
        if act.kind == "upload_start":
            return

        path = (act.origin, urlsplit(act.target).path)
        candidates = [
            candidate
            for candidate in self.sessions
            if candidate.path == path and candidate.opener.begun < act.begun
        ]
        if not candidates:
            if act.kind == "upload":
                self.strays.append(act)
            return

        # If several sessions have the same path, the query of the Location distinguishes them. If
        # the query is the same too, the first session without a success is chosen.
        exact = [
            candidate
            for candidate in candidates
            if candidate.newest(act).target == without_digest(act.target)
        ]
        untouched = [
            candidate for candidate in exact if not any(sent.is_success for sent in candidate.acts)
        ]
        session = untouched[0] if untouched else (exact or candidates)[-1]
        session.acts.append(act)
        if "location" in act.response_headers and act.status in (202, 204, 416):
            session.locations.append(self._location_of(act))

    def _find_arrivals(self) -> dict[tuple[str, str, str], Act]:
        """Return the exchanges whose answers first showed that content is in a repository.

        Keys: place, repository name, digest.
        """
        arrivals = dict(self.commits)
        for act in self.acts:
            digest = act.digest
            is_content = act.kind in ("blob", "manifest", "upload", "upload_start")
            if act.kind == "manifest":
                digest = act.said_digest or digest
            if act.is_success and is_content and digest and act.status != 202:
                key = (*act.repository, digest)
                first = arrivals.setdefault(key, act)
                if (act.entry.ended or 0) < (first.entry.ended or 0):
                    arrivals[key] = act
        return arrivals


def _find_commits(acts: Iterable[Act]) -> dict[tuple[str, str, str], Act]:
    """Return the exchange that committed each manifest first.

    Keys: place, repository name, digest.
    """
    commits: dict[tuple[str, str, str], Act] = {}
    for act in acts:
        digest = act.said_digest or act.digest
        if (act.method, act.kind) == ("PUT", "manifest") and act.is_success and digest:
            commits.setdefault((*act.repository, digest), act)
    return commits


def _challenges(act: Act) -> Iterator[Challenge]:
    if act.status != 401:
        return
    lines = act.response_headers.get("www-authenticate", "")
    # Challenges are separated in different ways. Each begins with the name of its scheme.
    for scheme, words in re.findall(
        r"(?is)\b(basic|bearer)\s(.*?)(?=\b(?:basic|bearer)\s|\Z)", lines
    ):
        realm = re.search(r'(?i)realm\s*=\s*"((?:[^"\\]|\\.)*)"', words)
        yield Challenge(act, scheme.lower(), re.sub(r"\\(.)", r"\1", realm[1]) if realm else "")


def group_by(acts: Iterable[Act], key: Callable[[Act], object]) -> Mapping[object, list[Act]]:
    """Return the exchanges in groups with an equal key. Groups and exchanges keep their order."""
    groups: defaultdict[object, list[Act]] = defaultdict(list)
    for act in acts:
        groups[key(act)].append(act)
    return groups


def parameters(act: Act, name: str) -> list[str]:
    """Return all values of a query parameter."""
    query = urlsplit(act.target).query
    return [value for key, value in parse_qsl(query, keep_blank_values=True) if key == name]
