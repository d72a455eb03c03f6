"""Mistakes that a strict registry refuses, or that no correct client makes.

Owns: the rules of the distribution specification about requests.
May not know: which registry is source or target.
Invariants: the rules check requests. An answer counts only if the registry itself gave it.
Follows: the OCI distribution specification 1.1.1 and docs/protocol-facts.md sections 1.2 to 1.9.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ..messages import is_digest, is_name, is_tag
from ..registry.app import METHODS
from ..registry.storage import DOCKER_LIST, DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST
from .evidence import Act, Run, parameters, without_digest
from .rules import rule, single

__all__: list[str] = []

# Media types that a client has to accept.
_TYPES = frozenset({OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST})
# The forms of Content-Range and of Range.
_RANGE = re.compile(r"([0-9]+)-([0-9]+)\Z")
_ASKED_RANGE = re.compile(r"bytes=([0-9]+-[0-9]*|-[0-9]+)\Z")


def _length(act: Act) -> int | None:
    text = act.headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() else None


def _is_chunked(act: Act) -> bool:
    return "chunked" in act.headers.get("transfer-encoding", "").lower()


def _carries_blob(act: Act) -> bool:
    """Whether the request sends bytes of a blob to an upload session."""
    return act.kind == "upload" and act.method in ("PATCH", "PUT")


class _Span(NamedTuple):
    """The positions of a Content-Range, counted from 0."""

    first: int
    last: int  # of the last byte, inclusive


def _span(act: Act) -> _Span | None:
    """Parse the Content-Range. Returns None if it is absent or malformed."""
    match = _RANGE.match(act.headers.get("content-range", ""))
    return _Span(int(match[1]), int(match[2])) if match else None


# Framing.


@single("protocol", "a request that carries a body says neither its length nor that it is chunked")
def length_missing(act: Act) -> bool:
    has_body = act.method in ("POST", "PUT", "PATCH")
    return has_body and "content-length" not in act.headers and not _is_chunked(act)


@single("protocol", "Content-Length is no number")
def length_malformed(act: Act) -> bool:
    return "content-length" in act.headers and _length(act) is None


@single("protocol", "a GET, HEAD or DELETE has a body")
def body_unexpected(act: Act) -> bool:
    return act.method in ("GET", "HEAD", "DELETE") and (bool(_length(act)) or _is_chunked(act))


@single("protocol", "Expect is sent: several servers never answer it")
def expect_sent(act: Act) -> bool:
    return "expect" in act.headers


# Names.


@single("protocol", "a repository name, tag or digest is not in the grammar")
def name_malformed(act: Act) -> bool:
    kind = act.kind
    reference = act.reference
    if act.entry.repository and not is_name(act.entry.repository):
        return True
    if kind in ("blob", "referrers") or (kind == "manifest" and ":" in reference):
        return not is_digest(reference)
    return kind == "manifest" and not is_tag(reference)


@rule("protocol", "a method that this path does not have, or a path that no registry has")
def path_unknown(run: Run) -> Iterator[tuple[Act, ...]]:
    for act in run.acts:
        entry = act.entry
        allowed = METHODS.get(entry.kind)
        was_sent_there = run.is_redirected(act) or run.is_realm(act)
        is_unknown = entry.kind == "other" and run.is_registry(act.place) and not was_sent_there
        if is_unknown or (allowed is not None and entry.method not in allowed):
            yield (act,)


# Reading.


@single(
    "protocol",
    "Accept lacks a media type of manifests: what is there looks absent, or another is given",
)
def accept_lacks_types(act: Act) -> bool:
    if act.kind != "manifest" or act.method not in ("GET", "HEAD"):
        return False
    accepted = {part.partition(";")[0].strip() for part in act.headers.get("accept", "").split(",")}
    return not accepted >= _TYPES


@single("protocol", "content is asked for in a coding: its bytes would not have the digest")
def coding_accepted(act: Act) -> bool:
    coding = act.headers.get("accept-encoding", "identity")
    return act.method == "GET" and act.kind in ("blob", "manifest") and coding != "identity"


@single("protocol", "Range is not bytes=<start>-<end>")
def range_malformed(act: Act) -> bool:
    text = act.headers.get("range")
    return text is not None and _ASKED_RANGE.match(text) is None


@rule("protocol", "the next page is not the one that the Link named")
def page_not_linked(run: Run) -> Iterator[tuple[Act, ...]]:
    pages = list(run.select("GET", "tag_list referrers"))
    for act in pages:
        if "last" not in act.query:
            continue
        earlier = [page for page in pages if page.repository == act.repository and page.before(act)]
        links = ", ".join(page.response_headers.get("link", "") for page in earlier)
        if "next" in links and f"{act.target}>" not in links:
            yield (*earlier, act)


# Uploads.


@single("protocol", "Content-Range is not <start>-<end>")
def content_range_form(act: Act) -> bool:
    return _carries_blob(act) and "content-range" in act.headers and _span(act) is None


@single("protocol", "Content-Range and Content-Length differ")
def content_range_length(act: Act) -> bool:
    span = _span(act)
    return _carries_blob(act) and span is not None and _length(act) != span.last - span.first + 1


@rule("protocol", "a chunk does not begin where the one before it ended")
def chunk_order(run: Run) -> Iterator[tuple[Act, ...]]:
    for session in run.sessions:
        offset = 0
        sent = list[Act]()
        for act in session.acts:
            if not _carries_blob(act):
                continue
            span = _span(act)
            is_misplaced = span is not None and span.first != offset
            if is_misplaced and not any(chunk.is_failure for chunk in sent):
                yield (*sent, act)
                break
            sent.append(act)
            offset += act.entry.request_bytes


@single(
    "protocol", "bytes of a blob are sent under another Content-Type than application/octet-stream"
)
def upload_type(act: Act) -> bool:
    has_body = _is_chunked(act) or bool(_length(act))
    is_octets = act.headers.get("content-type", "") in ("", "application/octet-stream")
    return _carries_blob(act) and has_body and not is_octets


@single("protocol", "an upload names its digest not exactly once, or not as a digest")
def digest_query(act: Act) -> bool:
    digests = parameters(act, "digest")
    if act.kind == "upload_start":
        digests += parameters(act, "mount")
        return not all(is_digest(value) for value in digests)
    is_end = act.kind == "upload" and act.method == "PUT"
    return is_end and (len(digests) != 1 or not is_digest(digests[0]))


@single("protocol", "a POST has a body and no digest")
def body_without_digest(act: Act) -> bool:
    has_body = bool(_length(act)) or _is_chunked(act)
    return act.kind == "upload_start" and has_body and not parameters(act, "digest")


@rule("protocol", "an upload goes elsewhere than to a Location that was given")
def location_not_given(run: Run) -> Iterator[tuple[Act, ...]]:
    for session in run.sessions:
        for act in session.acts:
            target = without_digest(act.target)
            if target not in {location.target for location in session.locations}:
                yield session.opener, act
    yield from ((act,) for act in run.strays)


@rule("protocol", "an upload goes to an older Location than the newest one of its session")
def location_stale(run: Run) -> Iterator[tuple[Act, ...]]:
    for session in run.sessions:
        # A GET of the status may use an older Location, because after a broken body the client does
        # not know the newest (end-13).
        for act in (act for act in session.acts if act.method != "GET"):
            newest = session.newest(act)
            target = without_digest(act.target)
            if target != newest.target and target in {
                location.target for location in session.locations
            }:
                yield newest.giver, act


@rule("protocol", "an upload session is used after it was finished or cancelled")
def session_after_end(run: Run) -> Iterator[tuple[Act, ...]]:
    for session in run.sessions:
        ends = [act for act in session.acts if act.method in ("PUT", "DELETE") and act.is_success]
        for end in ends:
            later = [act for act in session.acts if end.before(act)]
            if later:
                yield (end, *later)
                break


@rule("protocol", "bytes were sent under a digest that is not theirs")
def bytes_not_of_digest(run: Run) -> Iterator[tuple[Act, ...]]:
    for act in run.acts:
        is_refused = act.method == "PUT" and act.is_refusal
        if is_refused and "DIGEST_INVALID" in act.entry.codes and not digest_query(act):
            yield (act,)


# Manifests.


@single("protocol", "a manifest is put without its media type")
def manifest_type_missing(act: Act) -> bool:
    is_put = (act.method, act.kind) == ("PUT", "manifest")
    return is_put and not act.headers.get("content-type")


@rule("protocol", "a manifest is put that names what is not there")
def manifest_names_absent(run: Run) -> Iterator[tuple[Act, ...]]:
    for act in run.select("PUT", "manifest"):
        # After a changed answer, the client may be wrong about the registry's content.
        misleading = [
            other
            for other in run.acts
            if other.is_disturbed and other.place == act.place and other.begun < act.begun
        ]
        if act.is_refusal and "MANIFEST_BLOB_UNKNOWN" in act.entry.codes and not misleading:
            yield (act,)


@rule("protocol", "a manifest is put before something that it names")
def child_after_index(run: Run) -> Iterator[tuple[Act, ...]]:
    for (place, name, digest), commit in run.commits.items():
        manifest = run.repository(place, name).manifests.get(digest)
        if manifest is None or getattr(run.sites[place], "require_blobs", True):
            continue  # a strict registry has refused it
        for part in (*manifest.blobs, *manifest.children):
            arrival = run.arrivals.get((place, name, part["digest"]))
            if arrival is not None and not arrival.before(commit):
                yield commit, arrival


@rule("protocol", "the registry itself refuses a manifest as not what its media type says")
def manifest_refused(run: Run) -> Iterator[tuple[Act, ...]]:
    for act in run.select("PUT", "manifest"):
        is_invalid = act.is_refusal and "MANIFEST_INVALID" in act.entry.codes
        if is_invalid and not manifest_type_missing(act):
            yield (act,)
