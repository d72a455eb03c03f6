"""Push, read and compare graphs at any registry, independently of the program under test.

A graph is read from digests as clients of OCI 1.1 and `cosign verify` read it: with the referrers
API or the fallback tag, and with cosign's tags. A family is an image with its attachments.

Invariants: every body that is read has the digest by which it was asked for. A list of referrers is
accepted only if every entry occurs once and describes an existing manifest with that subject.
Follows: docs/protocol-facts.md sections 1.3 to 1.7 and 1.10, cosign's specs/SIGNATURE_SPEC.md.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from .images import EMPTY, Image, Part, Seed, compose
from .messages import Headers, Request, Response, digest_of, has_digest
from .shapes import Sample, shapes
from .storage import (
    DOCKER_LIST,
    DOCKER_MANIFEST,
    INDEXES,
    OCI_INDEX,
    OCI_MANIFEST,
    is_foreign,
    read_manifest,
)

if TYPE_CHECKING:  # the demo pushes and fetches with the standard library alone
    from .http import Site
    from .registry import App

__all__ = [
    "ACCEPT",
    "FAMILIES",
    "SBOM",
    "SIGNED",
    "Client",
    "Family",
    "Graph",
    "equal",
    "fallback_lists",
    "family",
    "fetch_http",
    "has_api",
    "identical",
    "list_referrers",
    "plain",
    "push_http",
    "referrers_tag",
    "walk",
]

ACCEPT = ", ".join((OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST))
SBOM = "application/spdx+json"
SIGNED = "application/vnd.cncf.notary.signature"
COSIGN = (".sig", ".att", ".sbom")  # the ends of cosign's tags
Entry = Mapping[str, Any]  # a descriptor in a list of referrers

_NEXT = re.compile(r"<([^>]*)>\s*;(?:[^,]*;)?\s*rel=\"?next\"?", re.IGNORECASE)
_TIMEOUT = 60.0  # seconds for one read or write


# Requests.


class Client:
    """Requests to one registry: a Site in memory, or one that listens at HOST:PORT.

    With a `context` it is asked by HTTPS.
    """

    def __init__(
        self,
        at: Site | str,
        authorization: str | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._site = None if isinstance(at, str) else at
        self._always = [("authorization", authorization)] if authorization else []
        address = at if isinstance(at, str) else "registry.test"
        # Connected by the first request that needs it.
        self._connection = (
            http.client.HTTPConnection(address, timeout=_TIMEOUT)
            if context is None
            else http.client.HTTPSConnection(address, timeout=_TIMEOUT, context=context)
        )

    def close(self) -> None:
        self._connection.close()

    def ask(
        self,
        method: str,
        target: str,
        *statuses: int,
        accept: str = ACCEPT,
        headers: Headers = (),
        body: bytes | None = None,
    ) -> Response:
        """Send one request for a path, or for a URL at the same registry.

        Raises AssertionError if the status is not one of `statuses`, unless there are none.
        """
        path = urlsplit(target)._replace(scheme="", netloc="").geturl()
        sent = [("accept", accept), *self._always, *headers]
        if self._site is not None:
            answer = self._site.request(method, path, sent, body)
        else:
            self._connection.request(method, path, body, dict(sent))
            given = self._connection.getresponse()
            answer = Response(given.status, given.getheaders(), given.read())
        assert not statuses or answer.status in statuses, (
            f"{method} {path} answered {answer.status}: {answer.data[:500]!r}"
        )
        return answer


def push_http(
    image: Image,
    at: Site | str,
    repository: str,
    *tags: str,
    authorization: str | None = None,
    context: ssl.SSLContext | None = None,
) -> Image:
    """Push the whole graph, children first, then the top under all tags, or by its digest."""
    base = f"/v2/{repository}"
    with closing(Client(at, authorization, context)) as client:
        for digest, data in image.blobs.items():
            if client.ask("HEAD", f"{base}/blobs/{digest}", 200, 404).status == 200:
                continue
            opened = client.ask("POST", f"{base}/blobs/uploads/", 202, body=b"")
            location = opened.header("Location")
            target = f"{location}{'&' if '?' in location else '?'}digest={digest}"
            octets = [("content-type", "application/octet-stream")]
            client.ask("PUT", target, 201, headers=octets, body=data)
        for digest, (media_type, body) in image.manifests.items():
            for reference in tags if tags and digest == image.top else (digest,):
                typed = [("content-type", media_type)]
                target = f"{base}/manifests/{reference}"
                client.ask("PUT", target, 201, headers=typed, body=body)
    return image


def fetch_http(
    at: Site | str,
    repository: str,
    reference: str,
    *,
    authorization: str | None = None,
    context: ssl.SSLContext | None = None,
    referrers: bool = False,
) -> dict[str, bytes]:
    """Fetch the graph below a tag or a digest. Returns the verified bytes by digest.

    Foreign layers that are absent are left out. With `referrers`, whatever is attached to manifests
    of the graph is fetched too.
    """
    with closing(Client(at, authorization, context)) as client:
        return _walk(client, repository, [reference], with_attached=referrers).contents


# Walks.


@dataclass
class Graph:
    """The result of one walk."""

    contents: dict[str, bytes] = field(default_factory=dict)  # bytes, by digest
    # Outer keys: digests of subjects. Inner keys: digests of referrers.
    referrers: dict[str, dict[str, Entry]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)  # digests, by cosign's tag
    lists: dict[str, str] = field(default_factory=dict)  # digests of indexes, by fallback tag
    manifests: set[str] = field(default_factory=set)  # digests


def walk(at: Site | str, repository: str, roots: Iterable[str]) -> Graph:
    """Read all content that is reachable from some digests.

    Raises AssertionError if content is missing or wrong.
    """
    with closing(Client(at)) as client:
        return _walk(client, repository, roots, with_attached=True)


def _walk(client: Client, repository: str, roots: Iterable[str], *, with_attached: bool) -> Graph:
    graph = Graph()
    waiting = list(roots)
    while waiting:
        reference = waiting.pop()
        if reference in graph.manifests:
            continue
        digest, _, body = _manifest(client, repository, reference)
        graph.contents[digest] = body
        graph.manifests.add(digest)
        document = json.loads(body)
        waiting += [child["digest"] for child in document.get("manifests", [])]
        for part in [document.get("config"), *document.get("layers", [])]:
            if part is not None and part["digest"] not in graph.contents:
                _read_blob(client, repository, part, graph)
        if with_attached:
            waiting += _attached(client, repository, digest, graph)
    return graph


def _manifest(client: Client, repository: str, reference: str) -> tuple[str, str, bytes]:
    """Return the digest, the media type and the bytes of a manifest."""
    target = f"/v2/{repository}/manifests/{reference}"
    answer = client.ask("GET", target, 200)
    body = answer.data
    digest = reference if ":" in reference else digest_of(body)
    assert has_digest(body, digest), f"{target}: other bytes"
    named = answer.header("Docker-Content-Digest")
    assert named in ("", digest), f"{target}: {digest} is called {named}"
    media_type = answer.header("Content-Type")
    assert (media_type in INDEXES) == ("manifests" in json.loads(body)), f"{target}: {media_type}"
    return digest, media_type, body


def _read_blob(client: Client, repository: str, part: Entry, graph: Graph) -> None:
    """Add a blob to the graph, unless it is an absent foreign layer."""
    digest = part["digest"]
    statuses = (200, 404) if is_foreign(part["mediaType"]) else (200,)
    answer = client.ask("GET", f"/v2/{repository}/blobs/{digest}", *statuses)
    if answer.status == 200:
        assert has_digest(answer.data, digest), f"blob {digest}: other bytes"
        graph.contents[digest] = answer.data


def _attached(client: Client, repository: str, digest: str, graph: Graph) -> list[str]:
    """Return the digests of what is attached to a manifest, and add its names to the graph."""
    entries, lists = list_referrers(client, repository, digest)
    graph.lists.update(lists)
    if entries:
        graph.referrers[digest] = {str(entry["digest"]): entry for entry in entries}

    tags = {}
    for end in COSIGN:
        tag = digest.replace(":", "-") + end
        answer = client.ask("HEAD", f"/v2/{repository}/manifests/{tag}", 200, 404)
        if answer.status == 200:
            tags[tag] = answer.header("Docker-Content-Digest")
    graph.tags.update(tags)
    return [*graph.referrers.get(digest, {}), *tags.values()]


def list_referrers(
    client: Client, repository: str, digest: str
) -> tuple[list[Entry], dict[str, str]]:
    """Return the verified referrers of a digest, and the digest of the fallback index by its tag.

    The second result is empty if the API was used.
    """
    target = f"/v2/{repository}/referrers/{digest}"
    page = client.ask("GET", target, 200, 400, 404, 405, 501, accept=OCI_INDEX)
    lists: dict[str, str] = {}
    if page.status != 200 or page.header("Content-Type") != OCI_INDEX:
        tag = referrers_tag(digest)
        target = f"/v2/{repository}/manifests/{tag}"
        page = client.ask("GET", target, 200, 404)
        if page.status == 404:
            return [], {}
        assert "subject" not in page.json(), f"{target} has a subject"
        lists[tag] = digest_of(page.data)

    entries: list[Entry] = [*page.json()["manifests"]]
    while following := _NEXT.search(page.header("Link")):
        target = urljoin(target, following[1])
        page = client.ask("GET", target, 200, accept=OCI_INDEX)
        entries += page.json()["manifests"]

    digests = [entry["digest"] for entry in entries]
    assert len(digests) == len(set(digests)), f"{target}: one is listed twice: {digests}"
    for entry in entries:
        _check_entry(client, repository, digest, entry)
    return sorted(entries, key=lambda entry: str(entry["digest"])), lists


def _check_entry(client: Client, repository: str, subject: str, entry: Entry) -> None:
    """Assert that an entry of a list of referrers describes its manifest correctly."""
    digest, media_type, body = _manifest(client, repository, entry["digest"])
    stored = read_manifest(body, media_type, digest, any_type=True)
    assert stored.subject == subject, (
        f"{digest} is listed for {subject}, refers to {stored.subject}"
    )
    right = stored.descriptor()
    for key in ("mediaType", "digest", "size", "artifactType", "annotations"):
        told = entry.get(key) or None
        assert told == right.get(key), f"{key} of {digest} is {told!r}, not {right.get(key)!r}"


def identical(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> bool:
    """Assert that two fetched graphs are equal byte for byte. Returns True."""
    missing = sorted(one.keys() - other.keys())
    added = sorted(other.keys() - one.keys())
    assert not missing, f"only on the first side: {missing}"
    assert not added, f"only on the second side: {added}"
    different = [digest for digest, data in one.items() if other[digest] != data]
    assert not different, f"other bytes: {different}"
    return True


def equal(source: Graph, target: Graph) -> bool:
    """Assert that two walks are equal, but for where lists of referrers are. Returns True."""
    assert identical(source.contents, target.contents)
    one, other = (
        {subject: sorted(entries) for subject, entries in graph.referrers.items()}
        for graph in (source, target)
    )
    assert one == other, f"referrers {one} became {other}"
    assert source.tags == target.tags, f"cosign's tags {source.tags} became {target.tags}"
    return True


# Referrers.


def has_api(app: App) -> bool:
    """Report whether a registry has the referrers API, by the same request as a client's."""
    absent = "sha256:" + "0" * 64
    request = Request("GET", f"/v2/nothing/referrers/{absent}", [("host", "registry.test")])
    answer: Any = app.start(request)
    if answer.status == 404 and answer.header("Content-Type") == "application/json":
        return bool(answer.codes == ["MANIFEST_UNKNOWN"])
    return bool(answer.status == 200 and answer.header("Content-Type") == OCI_INDEX)


def referrers_tag(digest: str) -> str:
    """Return the fallback tag of a digest.

    Its parts are cut to 32 and 64 characters (section 1.10).
    """
    algorithm, _, encoded = digest.partition(":")
    return f"{algorithm[:32]}-{encoded[:64]}"


def fallback_lists(attached: Iterable[Image]) -> dict[str, Image]:
    """Return the index of referrers that a client keeps for each subject, by fallback tag."""
    by_subject: dict[str, list[Image]] = {}
    for referrer in attached:
        by_subject.setdefault(referrer.document["subject"]["digest"], []).append(referrer)
    return {
        referrers_tag(subject): Seed().fallback_index(referrers)
        for subject, referrers in by_subject.items()
    }


# Families.


@dataclass(frozen=True)
class Family:
    """An image and its attachments. The subject of every referrer is in the family."""

    sample: Sample
    # The platforms that a copy selects. Empty: all.
    platforms: tuple[str, ...] = ()
    # Digests of the roots from which walks over source and target must be equal.
    kept: tuple[str, ...] = ()
    # Digests of the referrers that are not copied, because their subject is not.
    lost: frozenset[str] = frozenset()

    @property
    def image(self) -> Image:
        return self.sample.image

    @property
    def travelling(self) -> list[Image]:
        """The attachments that are copied with the image, referrers first."""
        attachments = [*self.sample.attached, *self.sample.tagged.values()]
        return [image for image in attachments if image.top not in self.lost]

    def load_into(self, app: App, repository: str = "app", tag: str = "v1") -> Family:
        """Store the family in a registry of the harness.

        Adds fallback tags if it has no referrers API.
        """
        self.sample.load_into(app, repository, tag)
        if not has_api(app):
            for name, index in fallback_lists(self.sample.attached).items():
                index.load_into(app, repository, name)
        return self

    def push(self, at: Site | str, repository: str = "app", tag: str = "v1") -> Family:
        """Push the family to any registry, with fallback tags."""
        for name, image in {**self.sample.parts(), **fallback_lists(self.sample.attached)}.items():
            push_http(image, at, repository, *(() if ":" in name else (name or tag,)))
        return self


def family(name: str) -> Family:
    """Build a family. It is the same in every run and with every version of Python."""
    built = _BUILDERS[name](Seed(zlib.crc32(name.encode())))
    return built if isinstance(built, Family) else Family(built, kept=(built.image.top,))


def plain(seed: Seed, image: Image | None = None) -> Sample:
    """Return an image with an SBOM and two signatures.

    One signature has annotations in two scripts.
    """
    image = image or seed.image(sizes=(300, 600))
    created = {"org.opencontainers.image.created": "2026-01-01T00:00:00Z"}
    notes = {"org.example.name": "Prüfsumme 校验", "org.example.empty": ""}
    attached = (
        seed.artifact(image, SBOM, annotations=created),
        seed.artifact(image, SIGNED, annotations=notes, spacing="odd"),
        seed.artifact(image, SIGNED, size=100),
    )
    return Sample(image, attached)


def _bare(seed: Seed) -> Sample:
    """Return an image with minimal artifacts, artifacts of older kinds, indexes and an image."""
    image = seed.image(sizes=(200,))
    subject = image.descriptor()
    attached = (
        compose(EMPTY, [], artifactType="application/vnd.example.mark", subject=subject),
        compose(EMPTY, [EMPTY], artifactType="a/b", subject=subject, annotations={"k": "v"}),
        seed.artifact(image, None, config_type="application/vnd.example.config.v1+json"),
        seed.artifact(image, None),
        seed.index([seed.artifact()], subject=image, artifact_type="application/vnd.example"),
        seed.index([seed.artifact()], subject=image),
        seed.image(subject=image, annotations={"soci": "v2"}),
    )
    return Sample(image, attached)


def _chain(seed: Seed, depth: int) -> Sample:
    """Return an image with an artifact that has an artifact, and so on."""
    image = seed.image(sizes=(200,))
    chain = [image]
    for number in range(depth):
        chain.append(seed.artifact(chain[-1], f"application/vnd.example.level.{number}", size=50))
    return Sample(image, tuple(chain[1:]))


def _index(seed: Seed) -> Sample:
    children = [seed.image(sizes=(200,)), seed.image(sizes=(300,), architecture="arm64")]
    top = seed.index(children, attestations=True)
    subjects = (top, *children)
    attached = [seed.artifact(each, kind) for each in subjects for kind in (SBOM, SIGNED)]
    return Sample(top, tuple(attached))


def _shared(seed: Seed) -> Sample:
    """Return an image with two referrers that share a blob, which is also a layer of the image."""
    layer = seed.layer(700)
    image = seed.image(layers=[layer, seed.layer(100)])
    part = Part("application/octet-stream", layer)
    attached = [
        compose(EMPTY, [part], artifactType=kind, subject=image.descriptor())
        for kind in (SBOM, SIGNED)
    ]
    return Sample(image, tuple(attached))


def _everything(seed: Seed) -> Sample:
    """Return an image with referrers, cosign's tags, and signatures of both."""
    tagged = shapes()["cosign-tags"].build()
    image = tagged.image
    bill = seed.artifact(image, SBOM)
    signature = seed.artifact(bill, SIGNED)
    kind = "application/vnd.example.index"
    index = seed.index([seed.artifact()], subject=image, artifact_type=kind)
    return Sample(image, (bill, signature, index), tagged.tagged)


def _filtered(seed: Seed) -> Family:
    """Return an attested and signed index of three platforms, of which a copy selects two."""
    systems = ("amd64", "arm64", "s390x")
    children = [
        seed.image(sizes=(200 + number,), architecture=system)
        for number, system in enumerate(systems)
    ]
    top = seed.index(children, attestations=True)
    on_top = seed.artifact(top, SIGNED)
    dropped = seed.artifact(children[2], SBOM)
    of_dropped = seed.artifact(dropped, SIGNED)
    bills = [seed.artifact(child, SBOM) for child in children[:2]]
    signature = seed.artifact(bills[0], SIGNED)
    attached = (on_top, dropped, of_dropped, *bills, signature)
    # The entries of the index: the three children, then the attestation of each.
    entries = [entry["digest"] for entry in top.document["manifests"]]
    kept = (*entries[:2], *entries[3:5])
    lost = frozenset(image.top for image in (on_top, dropped, of_dropped))
    return Family(Sample(top, attached), ("linux/amd64", "linux/arm64"), kept, lost)


_BUILDERS: Mapping[str, Callable[[Seed], Sample | Family]] = {
    "single": plain,
    "bare": _bare,
    "index": _index,
    "filtered": _filtered,
    "nested": lambda seed: _chain(seed, 3),
    "deep": lambda seed: _chain(seed, 6),
    "index-of-index": lambda _: shapes()["referrers-of-children"].build(),
    "cosign-tags": lambda _: shapes()["cosign-tags"].build(),
    "cosign-recursive": lambda _: shapes()["cosign-recursive"].build(),
    "shared": _shared,
    "everything": _everything,
    "nothing": lambda seed: Sample(seed.image(sizes=(100,))),
}
FAMILIES = tuple(_BUILDERS)
