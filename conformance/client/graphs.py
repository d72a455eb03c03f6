"""Walk over images, their referrers and cosign's tags at a registry, and compare two walks.

Owns: walks from digests as by `cosign verify` and by clients of OCI 1.1, with the referrers API or
the fallback tag; comparing two walks.
May not know: how content was pushed.
Invariants: a list of referrers is accepted only if every entry occurs once and correctly describes
an existing manifest with that subject.
Follows: docs/protocol-facts.md section 1.10 and cosign specs/SIGNATURE_SPEC.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from ..messages import digest_of, has_digest
from ..registry.storage import OCI_INDEX, is_foreign, read_manifest
from ..server.exchange import Site
from .attachments import referrers_tag
from .copies import ACCEPT, Client, identical

__all__ = ["COSIGN", "Graph", "equal", "list_referrers", "walk"]

# Suffixes of cosign's tags.
COSIGN = (".sig", ".att", ".sbom")
_DEEPEST = 64  # maximum depth of a graph
# Fields of a list entry that must agree with the manifest.
_SAME = ("mediaType", "digest", "size", "artifactType", "annotations")
Entry = Mapping[str, Any]  # a descriptor in a list of referrers


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
        return _walk(client, repository, roots)


def _walk(client: Client, repository: str, roots: Iterable[str]) -> Graph:
    graph = Graph()
    waiting = [(root, 0) for root in roots]
    while waiting:
        digest, depth = waiting.pop()
        if digest in graph.manifests:
            continue

        assert depth < _DEEPEST, f"{digest} is {depth} levels deep"
        _, body, document = _manifest(client, repository, digest)
        graph.contents[digest] = body
        graph.manifests.add(digest)
        waiting += [(child["digest"], depth + 1) for child in document.get("manifests", [])]
        for part in [document.get("config"), *document.get("layers", [])]:
            if part is not None and part["digest"] not in graph.contents:
                _blob(client, repository, part, graph)

        entries, lists = list_referrers(client, repository, digest)
        graph.lists.update(lists)
        if entries:
            graph.referrers[digest] = {str(entry["digest"]): entry for entry in entries}
            waiting += [(str(entry["digest"]), depth + 1) for entry in entries]

        for suffix in COSIGN:
            tag = digest.replace(":", "-") + suffix
            reply = client.ask(
                "HEAD", f"/v2/{repository}/manifests/{tag}", headers={"Accept": ACCEPT}
            )
            assert reply.status in (200, 404), reply
            if reply.status == 200:
                graph.tags[tag] = reply.header("Docker-Content-Digest")
                waiting.append((graph.tags[tag], depth + 1))

    return graph


def list_referrers(
    client: Client, repository: str, digest: str
) -> tuple[list[Entry], dict[str, str]]:
    """Return the verified referrers of a digest, and the digest of the fallback index by its tag.

    The second result is empty if the API was used.
    """
    pages = list(client.pages(f"/v2/{repository}/referrers/{digest}", {"Accept": OCI_INDEX}))
    lists: dict[str, str] = {}
    if pages[0].status != 200 or pages[0].header("Content-Type") != OCI_INDEX:
        assert pages[0].status in (200, 400, 404, 405, 501), pages[0]
        tag = referrers_tag(digest)
        index = client.ask("GET", f"/v2/{repository}/manifests/{tag}", headers={"Accept": ACCEPT})
        if index.status == 404:
            return [], {}
        assert "subject" not in json.loads(index.body), f"{index}: the list has a subject"
        lists[tag] = digest_of(index.body)
        pages = [index]

    where = str(pages[0])
    entries: list[Entry] = []
    for reply in pages:
        assert reply.status == 200, reply
        assert reply.header("Content-Type") == OCI_INDEX, (
            f"{reply} with {reply.header('Content-Type')}"
        )
        document = json.loads(reply.body)
        assert document["schemaVersion"] == 2, where
        assert document.get("mediaType", OCI_INDEX) == OCI_INDEX, where
        entries += document["manifests"]

    digests = [entry["digest"] for entry in entries]
    assert len(digests) == len(set(digests)), f"{where}: one of them is listed twice: {digests}"
    for entry in entries:
        _check_entry(client, repository, digest, entry, where)
    return sorted(entries, key=lambda entry: str(entry["digest"])), lists


def _check_entry(client: Client, repository: str, subject: str, entry: Entry, where: str) -> None:
    """Assert that an entry of a list describes its manifest correctly. `where` is for messages."""
    kind, body, _ = _manifest(client, repository, entry["digest"])
    stored = read_manifest(body, kind, entry["digest"], any_type=True)
    assert stored.subject == subject, f"{where}: {entry['digest']} refers to {stored.subject}"
    expected = stored.descriptor()
    for key in _SAME:
        value = entry.get(key) or None
        assert value == expected.get(key), (
            f"{where}: {key} of {entry['digest']} is {value!r}, not {expected.get(key)!r}"
        )


def _manifest(client: Client, repository: str, digest: str) -> tuple[str, bytes, dict[str, Any]]:
    reply = client.ask("GET", f"/v2/{repository}/manifests/{digest}", headers={"Accept": ACCEPT})
    assert reply.status == 200, reply
    assert has_digest(reply.body, digest), f"{reply}: other bytes"
    document = json.loads(reply.body)
    assert isinstance(document, dict)
    return reply.header("Content-Type"), reply.body, document


def _blob(client: Client, repository: str, part: Mapping[str, Any], graph: Graph) -> None:
    digest = part["digest"]
    reply = client.ask("GET", f"/v2/{repository}/blobs/{digest}")
    if reply.status == 404 and is_foreign(part["mediaType"]):
        return
    assert reply.status == 200, reply
    assert has_digest(reply.body, digest), f"{reply}: other bytes"
    graph.contents[digest] = reply.body


def equal(source: Graph, target: Graph) -> bool:
    """Assert that two walks are equal. Returns True."""
    assert identical(source.contents, target.contents)
    for subject in source.referrers.keys() | target.referrers.keys():
        source_referrers = source.referrers.get(subject, {})
        target_referrers = target.referrers.get(subject, {})
        assert source_referrers.keys() == target_referrers.keys(), (
            f"referrers of {subject}: {sorted(source_referrers)} became {sorted(target_referrers)}"
        )
    assert source.tags == target.tags, f"cosign's tags {source.tags} became {target.tags}"
    return True
