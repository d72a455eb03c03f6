"""The evidence of a run: its exchanges in one order, its upload sessions, challenges and commits.

What is derived here from journals and from the registries' content is what the rules of `audit`
judge.
Invariants: the client is assumed to know only complete answers of the registry itself. An answer of
a hook or a fault is no evidence against the client.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

from .http import Site
from .journal import Entry
from .storage import Repository, Stored

__all__ = [
    "Act",
    "Challenge",
    "ContentKey",
    "Location",
    "RepositoryKey",
    "Run",
    "Session",
    "group_by",
]

_REDIRECTS = (301, 302, 303, 307, 308)


class RepositoryKey(NamedTuple):
    """A repository of one of the sites."""

    origin: str  # of the site
    name: str


class ContentKey(NamedTuple):
    """A manifest or a blob in a repository of one of the sites."""

    origin: str
    repository: str
    digest: str


class Act(Entry):
    """One request of the client, with its answer."""

    def __init__(self, site: str, entry: Entry) -> None:
        vars(self).update(vars(entry))
        self.site = site  # the site's own origin; `origin` is by the name that the client used

    @property
    def url(self) -> str:
        return self.origin + self.target

    @property
    def place(self) -> RepositoryKey:
        return RepositoryKey(self.site, self.repository)

    @property
    def said_digest(self) -> str:
        """The answer's Docker-Content-Digest, or an empty string."""
        return self.response_headers.get("docker-content-digest", "")

    @property
    def digest(self) -> str | None:
        """The digest of the content that the exchange is about, or None if nobody has said it."""
        if ":" in self.reference:
            return self.reference
        said = self.said_digest if self.kind == "manifest" else ""
        return self.query.get("digest") or self.query.get("mount") or said or None

    @property
    def is_write(self) -> bool:
        return self.method in ("POST", "PUT", "PATCH", "DELETE") and self.kind != "token"

    @property
    def is_disturbed(self) -> bool:
        """Whether a hook or a fault changed the exchange."""
        return self.tampered or bool(self.faults)

    @property
    def is_success(self) -> bool:
        """Whether the request succeeded and its answer was not changed.

        A request whose body broke off is no success.
        """
        if self.status is None or not 200 <= self.status < 300 or self.is_disturbed:
            return False
        received = str(self.request_bytes)
        is_upload = self.method in ("PUT", "PATCH", "POST")
        return not is_upload or received == self.headers.get("content-length", received)

    @property
    def is_final(self) -> bool:
        """Whether the answer settles the question: a success, or a 404 that was not changed."""
        is_question = self.method == "HEAD" or (
            self.method == "GET" and self.kind in ("manifest", "tag_list", "referrers")
        )
        is_absent = is_question and self.status == 404 and not self.is_disturbed
        return is_absent or self.is_success

    @property
    def is_failure(self) -> bool:
        """Whether the request may be repeated: it has no final answer and was not redirected."""
        return not self.is_final and self.status not in (304, *_REDIRECTS)

    def is_refused(self, code: str) -> bool:
        """Whether the registry itself has refused to take something, with this error code."""
        return self.method == "PUT" and code in self.codes and not self.is_disturbed

    def before(self, other: Act) -> bool:
        """Whether this was answered before `other` began.

        The client may not have read the answer yet.
        """
        return self.ended is not None and self.ended < other.begun

    def __str__(self) -> str:
        return f"{self.origin} {super().__str__()}"


class Location(NamedTuple):
    """A Location of a redirect or of an upload session."""

    giver: Act  # the exchange whose answer has the Location
    url: str  # absolute


class Challenge(NamedTuple):
    """One challenge of a 401."""

    giver: Act  # the exchange whose answer has the challenge
    scheme: str  # "basic" or "bearer"
    realm: str


@dataclass(eq=False)
class Session:
    """An upload session and all requests that were sent to it."""

    opener: Act  # the POST
    locations: list[Location]  # all of the session, in order
    # All requests to the session, except the POST, in order.
    acts: list[Act] = field(default_factory=list)

    @property
    def digest(self) -> str | None:
        """The digest of the session's blob, or None if the client has not sent it."""
        ends = [act.query["digest"] for act in self.acts if act.query.get("digest")]
        return ends[-1] if ends else self.opener.query.get("mount")

    def given(self, act: Act) -> list[str]:
        """Return the Locations that were given before `act`, the newest last."""
        earlier = [each for each in self.locations if each.giver.before(act)]
        return [each.url for each in sorted(earlier, key=lambda each: each.giver.ended or 0)]


def without_digest(url: str) -> str:
    """Return a URL without the `digest` parameter, which a client adds to finish an upload."""
    return re.sub(r"(?<=[?&])digest=[^&]*&?", "", url).rstrip("?&")


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
        self.readonly = readonly
        self._away = away

        # Exchanges in the order in which they began.
        acts = [
            Act(origin, entry)
            for origin, site in sites.items()
            for entry in tuple(site.journal.entries)
        ]
        acts.sort(key=lambda act: act.begun)
        self.acts = [act for act in acts if act.begun > since]
        self.acts_by_digest = group_by(self.acts, lambda act: act.digest)
        self._connections = group_by(self.acts, lambda act: (act.site, act.connection))

        challenging = acts if remembered else self.acts
        self.challenges = [challenge for act in challenging for challenge in _challenges(act)]
        self.redirects = _locations(act for act in self.acts if act.status in _REDIRECTS)
        self._redirected = {location.url for location in self.redirects}

        # A redirect that was not followed counts as a failure: the client did not get its answer.
        reached = {act.url for act in self.acts}
        self.failures = [act for act in self.acts if act.is_failure or self._is_lie(act)]
        self.failures += [each.giver for each in self.redirects if each.url not in reached]

        # Whether anything failed: a fault or a hook changed an exchange, a registry refused one or
        # was away, or the client failed. A 401 asks for a login, unless it was sent a token.
        asks_login = [
            act
            for act in self.failures
            if act.status == 401 and act.authorization.scheme != "bearer"
        ]
        self.is_disturbed = (
            has_failed
            or bool(away)
            or len(asks_login) < len(self.failures)
            or any(act.is_disturbed for act in self.acts)
        )

        # Upload sessions, and uploads that belong to no session.
        opened = _locations(
            act for act in self.acts if act.kind == "upload_start" and act.status == 202
        )
        self.sessions = [Session(location.giver, [location]) for location in opened]
        self._sessions_by_path: defaultdict[str, list[Session]] = defaultdict(list)
        for session in self.sessions:
            path = session.locations[0].url.partition("?")[0]
            self._sessions_by_path[path].append(session)
        self.strays: list[Act] = []
        for act in self.acts:
            self._assign(act)

        # The exchanges whose answers sent the client to a URL, as redirects or Locations of uploads.
        self.givers: defaultdict[str, list[Act]] = defaultdict(list)
        for location in (*self.redirects, *(each for s in self.sessions for each in s.locations)):
            self.givers[location.url].append(location.giver)

        # The exchanges that committed manifests, in this run and before it.
        self.commits = _commits(self.acts)
        self.earlier_commits = _commits(act for act in acts if act.begun <= since)

    def select(self, method: str | None = None, kind: str | None = None) -> Iterator[Act]:
        """Yield the exchanges with a method and a kind, in order.

        Both may have several values, separated by spaces. None matches every method or kind.
        """
        methods = None if method is None else method.split()
        kinds = None if kind is None else kind.split()
        for act in self.acts:
            if (methods is None or act.method in methods) and (kinds is None or act.kind in kinds):
                yield act

    def repositories(self, origin: str) -> Mapping[str, Repository]:
        """Return the repositories of a site: none if it is no registry of the harness."""
        repositories: Mapping[str, Repository] = getattr(self.sites[origin], "repositories", {})
        return repositories

    def repository(self, place: RepositoryKey) -> Repository:
        """Return a repository of a site. An unknown repository looks empty."""
        return self.repositories(place.origin).get(place.name) or Repository()

    def manifest(self, content: ContentKey) -> Stored | None:
        """Return a manifest that a site holds, or None."""
        place = RepositoryKey(content.origin, content.repository)
        return self.repository(place).manifests.get(content.digest)

    def had_read(self, earlier: Act, act: Act) -> bool:
        """Whether the client had read the answer to `earlier` when it sent `act`.

        The proof is a request on the connection of `earlier`, after that answer and not after
        `act`.
        """
        if not earlier.before(act):
            return False
        same = self._connections[earlier.site, earlier.connection]
        return any(earlier.before(later) and later.begun <= act.begun for later in same)

    def was_there(self, content: ContentKey, act: Act) -> bool:
        """Whether an answer had shown that content is in a repository before `act` was sent."""
        return any(
            (*other.place, content.digest) == content
            and other.kind != "referrers"
            and other.is_success
            and other.status != 202
            and other.before(act)
            for other in self.acts_by_digest[content.digest]
        )

    def is_redirected(self, act: Act) -> bool:
        """Whether a redirect named the URL of `act`."""
        return act.url in self._redirected

    def excuses(
        self, digest: str | None, act: Act, first: Act, without: Collection[str] = ()
    ) -> float:
        """Count the failures of requests about a digest, after `first` and before `act`.

        A request may be repeated once for each failure. Sites in `without` do not count. Nobody
        knows how often a site that was away failed.
        """
        if not {*self._away} <= {*without}:
            return math.inf
        # Most requests of an upload session do not name the digest.
        in_sessions = [
            sent
            for session in self.sessions
            if session.digest == digest
            for sent in (session.opener, *session.acts)
        ]
        return sum(
            1
            for other in self.failures
            if other.site not in without
            and (other.digest == digest or other in in_sessions)
            # A request that was sent before `first` counts too if it failed later.
            and (other.ended or other.begun) > first.begun
            and other.begun < act.begun
        )

    def _is_lie(self, act: Act) -> bool:
        """Whether a registry holds bytes that do not match the digest that `act` asks for."""
        if (act.method, act.kind) != ("GET", "blob"):
            return False
        blob = self.repository(act.place).blobs.get(act.reference)
        return blob is not None and blob.digest(act.reference.partition(":")[0]) != act.reference

    def _assign(self, act: Act) -> None:
        """Add an exchange to its upload session, or an upload without a session to the strays."""
        sessions = self._sessions_by_path.get(act.url.partition("?")[0], ())
        candidates = [session for session in sessions if session.opener.begun < act.begun]
        if act.kind == "upload_start" or not candidates:
            if act.kind == "upload":
                self.strays.append(act)
            return

        # If several sessions have the same path, the query of the Location distinguishes them. If
        # the query is the same too, the first session without a success is chosen.
        url = without_digest(act.url)
        exact = [session for session in candidates if url in session.given(act)[-1:]] or candidates
        untouched = [each for each in exact if not any(sent.is_success for sent in each.acts)]
        session = (untouched or exact[-1:])[0]
        session.acts.append(act)
        if act.status in (202, 204, 416):
            session.locations += _locations([act])


def _commits(acts: Iterable[Act]) -> dict[ContentKey, Act]:
    """Return the exchange that committed each manifest first."""
    commits: dict[ContentKey, Act] = {}
    for act in acts:
        if (act.method, act.kind) == ("PUT", "manifest") and act.is_success and act.digest:
            commits.setdefault(ContentKey(*act.place, act.digest), act)
    return commits


def _locations(acts: Iterable[Act]) -> list[Location]:
    """Return the Locations of answers that have one. The URL is empty if it is malformed."""
    locations = []
    for act in acts:
        if "location" not in act.response_headers:
            continue
        try:
            url = urlsplit(urljoin(act.url, act.response_headers["location"]))
            locations.append(
                Location(act, url._replace(path=url.path or "/", fragment="").geturl())
            )
        except ValueError:
            locations.append(Location(act, ""))
    return locations


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
