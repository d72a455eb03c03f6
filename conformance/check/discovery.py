"""Checks of the workflow Content Discovery: lists of tags and of referrers.

Owns: the expected content of a list, its order, its pages and filters.
May not know: how a registry stores lists.
Invariants: a list is checked with all its pages. Other content of the repository is ignored.
Follows: section "Content Discovery" of the OCI distribution specification 1.1.1.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from ..client.http import Reply, next_page
from ..content.images import Image
from ..registry.storage import OCI_INDEX
from .checks import (
    ACCEPT,
    NOWHERE,
    Absent,
    Failed,
    Run,
    check,
    expect,
    expect_code,
    expect_header,
    expect_no_repository,
)

_TAGS = "Listing Tags"
_REFERRERS = "Listing Referrers"

# Tags that sort differently by bytes and without case. Both orders are accepted.
_NAMES = ("a", "B", "c", "0", "_x", "Z")


def _read_json(reply: Reply) -> Any:
    try:
        return json.loads(reply.body)
    except ValueError:
        raise Failed(f"{reply} with a body that is not JSON") from None


# Tags.


def _tags_on_page(reply: Reply, run: Run) -> list[str]:
    """Return the tags of one page. Fail if its form is wrong."""
    document = _read_json(expect(reply, 200))
    if not isinstance(document, dict) or document.get("name") != run.repository:
        raise Failed(f"{reply} without the repository's name")
    tags = document.get("tags")
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise Failed(f"{reply} without a list of tags")
    return tags


def _some(tags: Sequence[str], run: Run) -> str:
    """Format the number of tags and the first four, without the prefix of the run."""
    first_tags = ", ".join(tag.removeprefix(f"{run.identity}-") for tag in tags[:4])
    return f"{len(tags)} tags ({first_tags}{', ...' if len(tags) > 4 else ''})"


def tags_of(run: Run) -> list[str]:
    """Return the tags of all pages."""
    return [
        tag
        for page in run.client.pages(f"/v2/{run.repository}/tags/list")
        for tag in _tags_on_page(page, run)
    ]


def _push_tags(run: Run) -> set[str]:
    """Push the tags that these checks need, once. Returns the tags."""
    tags = [f"{run.identity}-{name}" for name in _NAMES]
    run.set_up_once("tags", lambda: run.push_image(run.seed.image(sizes=(100,)), *tags))
    return set(tags)


def _push_and_list_tags(run: Run) -> list[str]:
    """Return the tags of all pages, after pushing those that these checks need.

    Fail if there are none.
    """
    _push_tags(run)
    tags = tags_of(run)
    if not tags:
        raise Failed("no tags are listed")
    return tags


@check("discovery", "GET tags/list", "every tag once", f"{_TAGS}: MUST be 200 OK (end-8a)", "tags")
def list_tags(run: Run) -> None:
    pushed = _push_tags(run)
    tags = tags_of(run)
    if not pushed <= set(tags):
        raise Failed(f"not listed: {sorted(pushed - set(tags))}")
    if len(set(tags)) != len(tags):
        raise Failed("a tag is listed twice")


@check(
    "discovery", "GET tags/list", "in lexical order", f"{_TAGS}: MUST be in lexical order", "tags"
)
def order_of_tags(run: Run) -> None:
    tags = _push_and_list_tags(run)
    if tags not in (sorted(tags), sorted(tags, key=str.lower)):
        raise Failed(f"neither in lexical nor in byte order: {_some(tags, run)}")


@check(
    "discovery",
    "GET tags/list",
    "404 where the repository is not",
    "Endpoints: 404 (end-8a)",
    "absent",
)
def list_nowhere(run: Run) -> None:
    reply = run.ask("GET", f"/v2/{run.repository}/no/such/{run.identity}/tags/list")
    expect_code(expect_no_repository(reply), "NAME_UNKNOWN")


@check(
    "discovery", "GET tags/list n", "n=0 is an empty list without Link", f"{_TAGS}: MUST", "tags"
)
def no_tags(run: Run) -> None:
    _push_tags(run)
    reply = run.ask("GET", "tags/list?n=0")
    if _tags_on_page(reply, run):
        raise Failed(f"{reply} with tags")
    if reply.header("Link"):
        raise Failed(f"{reply} with Link")


def _expect_page(run: Run, query: str, rest: Sequence[str], most: int) -> None:
    """Fail unless a page has the first `most` tags of `rest`.

    With a Link it may have fewer, but not none.
    """
    reply = run.ask("GET", f"tags/list?{query}")
    tags = _tags_on_page(reply, run)
    expected = list(rest[:most])
    if tags and next_page(reply) is not None:
        expected = expected[: len(tags)]
    if tags != expected:
        raise Failed(f"{reply} with {_some(tags, run)}, not {_some(expected, run)}")


@check(
    "discovery",
    "GET tags/list n",
    "half of the tags",
    f"{_TAGS}: MUST include n results (end-8b)",
    "tags",
)
def half_of_tags(run: Run) -> None:
    tags = _push_and_list_tags(run)
    _expect_page(run, f"n={len(tags) // 2}", tags, len(tags) // 2)


@check(
    "discovery",
    "GET tags/list n",
    "more than there are",
    f"{_TAGS}: MAY return fewer (end-8b)",
    "tags",
)
def more_than_tags(run: Run) -> None:
    tags = _push_and_list_tags(run)
    _expect_page(run, f"n={len(tags) + 10}", tags, len(tags))


@check(
    "discovery",
    "GET tags/list n",
    "pages by Link have every tag once",
    f"{_TAGS}: Link MAY",
    "tags",
)
def linked_pages(run: Run) -> None:
    all_tags = _push_and_list_tags(run)
    pages = list(run.client.pages(f"/v2/{run.repository}/tags/list?n=2"))
    if len(pages) == 1 and len(all_tags) > 2:
        raise Absent("no Link to the next page")
    tags = [tag for page in pages for tag in _tags_on_page(page, run)]
    if tags != all_tags:
        raise Failed(
            f"{len(pages)} pages with {len(tags)} tags, not the {len(all_tags)} of the whole list"
        )


@check(
    "discovery",
    "GET tags/list last",
    "what follows it, n",
    f"{_TAGS}: non-inclusively (end-8b)",
    "tags",
)
def after_last(run: Run) -> None:
    tags = _push_and_list_tags(run)
    for position in (0, len(tags) // 2, len(tags) - 2):
        _expect_page(run, f"n=3&last={quote(tags[position], safe='')}", tags[position + 1 :], 3)


@check("discovery", "GET tags/list last", "what follows it", f"{_TAGS}: n is OPTIONAL", "tags")
def after_last_without_n(run: Run) -> None:
    tags = _push_and_list_tags(run)
    rest = tags[len(tags) // 2 :]
    _expect_page(run, f"last={quote(rest[0], safe='')}", rest[1:], len(rest))


@check(
    "discovery",
    "GET tags/list last",
    "nothing follows the last one",
    f"{_TAGS}: non-inclusively",
    "tags",
)
def after_the_end(run: Run) -> None:
    tags = _push_and_list_tags(run)
    _expect_page(run, f"n=5&last={quote(tags[-1], safe='')}", [], 5)


# Referrers.


def _referrers_on_page(reply: Reply) -> list[Mapping[str, Any]]:
    """Return the descriptors of one page. Fail if its form is wrong."""
    expect_header(expect(reply, 200), "Content-Type", OCI_INDEX)
    document = _read_json(reply)
    if not isinstance(document, dict) or document.get("schemaVersion") != 2:
        raise Failed(f"{reply} with a body that is not an image index")
    entries = document.get("manifests")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise Failed(f"{reply} without a list of manifests")
    return entries


def referrers(run: Run, digest: str) -> list[str]:
    """Return the digests of the referrers of a digest from all pages."""
    return [str(entry.get("digest")) for entry in _entries(run, digest)]


def _entries(run: Run, digest: str) -> list[Mapping[str, Any]]:
    """Return the descriptors of the referrers of a digest from all pages."""
    pages = run.client.pages(f"/v2/{run.repository}/referrers/{digest}")
    return [entry for page in pages for entry in _referrers_on_page(page)]


def expect_listed(digests: Sequence[str], expected: Iterable[Image]) -> None:
    """Fail unless each of the expected referrers is listed once, and nothing else."""
    listed = Counter(digests)
    required = Counter(image.top for image in expected)
    missing = (required - listed).total()
    surplus = (listed - required).total()
    if missing or surplus:
        raise Failed(
            f"{missing} of {required.total()} referrers not listed, {surplus} entries too many"
        )


_SBOM = "application/vnd.example.sbom.v1+json"
_SIGNED = "application/vnd.example.signature.v1"
_OLD = "application/vnd.example.old.v1"


class _Family:
    """A subject and referrers of every form. Two of them are pushed before their subject."""

    def __init__(self, run: Run) -> None:
        seed = run.seed
        note = {"org.opencontainers.conformance.test": run.identity}
        self.subject = seed.image(sizes=(200,))
        self.by_type = run.push_image(seed.artifact(self.subject, _SBOM, annotations=note))
        self.by_config = run.push_image(
            seed.artifact(self.subject, None, config_type=_OLD, annotations=note)
        )
        self.before = referrers(run, self.subject.top)  # digests, while the subject is absent
        run.push_image(self.subject)
        children = [seed.image(sizes=())]
        self.second = run.push_image(seed.artifact(self.subject, _SBOM))
        self.typed_index = run.push_image(
            seed.index(children, subject=self.subject, artifact_type=_SIGNED, annotations=note)
        )
        self.bare_index = run.push_image(seed.index(children, subject=self.subject))
        self.of_referrer = run.push_image(seed.artifact(self.by_type, _SBOM))

    @property
    def members(self) -> list[Image]:
        """All referrers of the subject."""
        return [self.by_type, self.by_config, self.second, self.typed_index, self.bare_index]


def _family(run: Run) -> _Family:
    return run.set_up_once("referrers", lambda: _Family(run))


def _entry_of(run: Run, member: Image) -> Mapping[str, Any]:
    """Return the entry of a referrer in the list. Fail unless it is listed exactly once."""
    entries = _entries(run, _family(run).subject.top)
    matching = [entry for entry in entries if entry.get("digest") == member.top]
    if len(matching) != 1:
        raise Failed(f"{member.top} is listed {len(matching)} times")
    return matching[0]


@check(
    "discovery",
    "GET referrers",
    "an empty list",
    f"{_REFERRERS}: an empty list MUST be returned",
    "absent",
)
def no_referrers(run: Run) -> None:
    _push_tags(run)
    reply = run.ask("GET", f"referrers/{NOWHERE}")
    if reply.status == 404:
        raise Absent(f"the referrers API ({reply})")
    if _referrers_on_page(reply):
        raise Failed(f"{reply} with referrers of a digest that nobody has")


@check(
    "discovery",
    "GET referrers",
    "400",
    f"{_REFERRERS}: invalid syntax MUST be 400",
    "malformed",
    [no_referrers],
)
def malformed_referrers(run: Run) -> None:
    expect(run.ask("GET", "referrers/sha256:totallywrong"), 400)


@check(
    "discovery",
    "GET referrers",
    "each once, no other",
    f"{_REFERRERS} (end-12a)",
    "referrers",
    [no_referrers],
)
def all_referrers(run: Run) -> None:
    family = _family(run)
    expect_listed(referrers(run, family.subject.top), family.members)


@check(
    "discovery",
    "GET referrers",
    "before the subject is there",
    "Push: MUST initially accept a subject that does not exist; Listing Referrers",
    "referrers",
    [no_referrers],
)
def referrers_before(run: Run) -> None:
    family = _family(run)
    expect_listed(family.before, [family.by_type, family.by_config])


@check(
    "discovery",
    "GET referrers",
    "of a referrer",
    f"{_REFERRERS} (end-12a)",
    "referrers",
    [no_referrers],
)
def referrers_of_referrer(run: Run) -> None:
    family = _family(run)
    expect_listed(referrers(run, family.by_type.top), [family.of_referrer])


_ENTRIES = {
    "artifact": lambda family: family.by_type,
    "config type": lambda family: family.by_config,
    "index": lambda family: family.typed_index,
    "bare index": lambda family: family.bare_index,
}
_KINDS = tuple(_ENTRIES)


@check(
    "discovery",
    "GET referrers",
    "digest, size and mediaType",
    f"{_REFERRERS}",
    _KINDS,
    [no_referrers],
)
def described(run: Run, kind: str) -> None:
    member = _ENTRIES[kind](_family(run))
    entry = _entry_of(run, member)
    for key, value in member.descriptor().items():
        if entry.get(key) != value:
            raise Failed(f"{key} is {entry.get(key)!r}, not {value!r}")


@check(
    "discovery",
    "GET referrers",
    "artifactType",
    f"{_REFERRERS}: MUST, as to artifactType",
    _KINDS,
    [no_referrers],
)
def typed(run: Run, kind: str) -> None:
    expected = {"artifact": _SBOM, "config type": _OLD, "index": _SIGNED, "bare index": None}[kind]
    entry = _entry_of(run, _ENTRIES[kind](_family(run)))
    if entry.get("artifactType") != expected or (expected is None and "artifactType" in entry):
        raise Failed(f"artifactType is {entry.get('artifactType')!r}, not {expected!r}")


@check(
    "discovery",
    "GET referrers",
    "annotations",
    f"{_REFERRERS}: MUST include annotations",
    _KINDS,
    [no_referrers],
)
def annotated(run: Run, kind: str) -> None:
    member = _ENTRIES[kind](_family(run))
    entry = _entry_of(run, member)
    expected = member.document.get("annotations", {})
    if (entry.get("annotations") or {}) != expected:
        raise Failed(f"annotations are {entry.get('annotations')!r}, not {expected!r}")


def _referrers_of_type(run: Run, artifact_type: str) -> list[str]:
    """Return the digests of the subject's referrers with a type, as the registry filters them.

    Fail if it filters without saying so. Skip if it does not filter.
    """
    family = _family(run)
    query = f"?artifactType={quote(artifact_type, safe='')}"
    digests: list[str] = []
    for page in run.client.pages(f"/v2/{run.repository}/referrers/{family.subject.top}{query}"):
        digests += [str(entry.get("digest")) for entry in _referrers_on_page(page)]
        applied = {part.strip() for part in page.header("OCI-Filters-Applied").split(",")}
        if "artifactType" in applied:
            continue
        if next_page(page) is None and set(digests) < {member.top for member in family.members}:
            raise Failed(f"{page} with a part of the list and without OCI-Filters-Applied")
        raise Absent("no filter is applied")

    return digests


@check(
    "discovery",
    "GET referrers artifactType",
    "what has that type, and the header",
    f"{_REFERRERS}: SHOULD filter; if applied MUST say so (end-12b)",
    ("artifact", "config type", "index"),
    [no_referrers],
)
def filtered(run: Run, kind: str) -> None:
    family = _family(run)
    artifact_type, members = {
        "artifact": (_SBOM, [family.by_type, family.second]),
        "config type": (_OLD, [family.by_config]),
        "index": (_SIGNED, [family.typed_index]),
    }[kind]
    expect_listed(_referrers_of_type(run, artifact_type), members)


@check(
    "discovery",
    "GET referrers artifactType",
    "an empty list",
    f"{_REFERRERS}: MUST",
    "absent",
    [no_referrers],
)
def filtered_away(run: Run) -> None:
    expect_listed(_referrers_of_type(run, "application/vnd.example.none"), [])


@check(
    "discovery",
    "PUT manifest",
    "OCI-Subject says that the subject was seen",
    "Pushing Manifests with Subject: MUST respond with OCI-Subject",
    ("artifact", "index"),
    [no_referrers],
)
def subject_seen(run: Run, kind: str) -> None:
    family = _family(run)
    member = family.by_type if kind == "artifact" else family.bare_index
    reply = expect(run.put_image(member), 201)
    expect_header(reply, "OCI-Subject", family.subject.top)


@check(
    "discovery",
    "GET referrers",
    "a list that was kept under a tag is no referrer",
    "Referrers Tag Schema: an index under <alg>-<ref>; Listing Referrers: those with that subject",
    "index",
    [no_referrers],
)
def fallback_tag(run: Run) -> None:
    family = _family(run)
    index = run.seed.fallback_index(family.members)
    tag = family.subject.top.replace(":", "-")
    expect(run.put_image(index, tag), 201)
    expect(run.ask("GET", f"manifests/{tag}", ACCEPT), 200)
    if index.top in referrers(run, family.subject.top):
        raise Failed("the index under the fallback tag is listed as a referrer")


# Without the API, clients maintain the lists. These checks cover the features that they need.


@check(
    "discovery",
    "PUT manifest",
    "no OCI-Subject where nothing is listed",
    "Pushing Manifests with Subject: OCI-Subject indicates that the registry processed the subject",
    "artifact",
)
def announced_in_vain(run: Run) -> None:
    subject = run.seed.image(sizes=(100,))
    run.push_image(subject)
    artifact = run.seed.artifact(subject, _SBOM)
    run.push_parts(artifact)
    announced = expect(run.put_image(artifact), 201).header("OCI-Subject")
    if not announced:
        return
    reply = run.ask("GET", f"referrers/{subject.top}")
    media_type = reply.header("Content-Type")
    if reply.status != 200 or media_type != OCI_INDEX:
        raise Failed(
            f"OCI-Subject {announced} was sent, but {reply} with Content-Type {media_type!r}"
        )


@check(
    "discovery",
    "PUT manifest",
    "a list under the fallback tag is taken, and taken again with more in it",
    "Referrers Tag Schema: pushed by clients; Pushing Manifests with Subject, step 4",
    "index",
)
def list_kept(run: Run) -> None:
    subject = run.push_image(run.seed.image(sizes=(100,)))
    tag = subject.top.replace(":", "-")
    attached = list[Image]()
    for _ in range(2):
        attached.append(run.push_image(run.seed.artifact(subject, _SBOM)))
        index = run.seed.fallback_index(attached)
        expect(run.put_image(index, tag), 201)
        reply = expect(run.ask("GET", f"manifests/{tag}", ACCEPT), 200)
        if reply.body != index.body:
            raise Failed(
                f"{reply} with other bytes than the {len(attached)} referrers that were put"
            )
