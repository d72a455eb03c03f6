"""The fewest requests and bytes that a sync could cost, computed from the images alone.

`least` is for a program that knows all about blobs and manifests before it asks, and nothing about tags
and artifacts. What it cannot avoid then is a convention:

- Tags of the source that are chosen by a pattern cost one listing of their repository.
- What a tag names at the source costs one question, which all mappings share: a HEAD where an earlier
  run knew the tag (`is_stateful`) or digests are asked for first, and a GET by digest besides for what is
  new; else a GET. A lock says what tags name: the source is asked for nothing but what is new.
- What a tag names at a target costs one HEAD, unless a listing says that it is not there. A repository of
  a target is listed where that tells of two tags or more that no earlier run knew there (not with a
  lock), or where a tag may never move: it is not asked for, on either side, if the listing has it.
- What a target lacks is fetched once for all targets: each child, each blob. A blob without a byte and
  the empty config `{}` are never fetched.
- A blob that a host lacks is uploaded there by a POST and a PUT. What the host has in another repository
  is mounted (where it does that), what the repository has is not asked for.
- Each child and each artifact is put once to a repository, the top of an image once for each tag.
- Artifacts are looked for at each digest of an image that is copied, and of an image that is there when
  no earlier run has looked (then at its top alone, where digests are asked for first). With the
  referrers API that is a question for each digest and for each artifact found; without, one question
  shows it (for each first segment of repositories' names), and each list that the source has is fetched.
  A target is asked for those artifacts by HEAD whose subject it had, and once (for each first segment)
  whether it has the API. Without the API a list is put under the tag of each subject, after it was asked
  for where no listing says that it is not there, and is asked for by HEAD then: somebody else may have
  put another at the same time.
- Whether a registry has the API is known to a run if an earlier one has asked.

Bytes are those of manifests and blobs, not of listings, of answers to questions for referrers, or of
error bodies.

Owns: these conventions.
May not know: anything of the program; how requests are counted on a wire.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from conformance.images import EMPTY_CONFIG, Image
from conformance.messages import digest_of
from conformance.walks import fallback_lists

__all__ = ["Costs", "Repository", "Tally", "Terms", "least"]

PAGE = 1000  # tags of a listing
EMPTY = digest_of(EMPTY_CONFIG)
Tagged = Mapping[str, Image]
Sizes = dict[str, int]  # by digest


@dataclass
class Tally:
    """What was asked of one side, and the bytes of manifests and blobs that it gave or took."""

    requests: Counter[str] = field(default_factory=Counter)
    bytes: int = 0

    @property
    def count(self) -> int:
        """All requests together."""
        return sum(self.requests.values())

    def add(self, kind: str, sizes: Iterable[int]) -> None:
        """Add a request for each of these bodies."""
        sizes = list(sizes)
        self.requests[kind] += len(sizes)
        self.bytes += sum(sizes)


class Costs(NamedTuple):
    """What is asked of the source, and of each target."""

    source: Tally
    targets: Sequence[Tally]


@dataclass(frozen=True)
class Terms:
    """What a run knows from elsewhere, and what registries can do."""

    is_stateful: bool = False
    is_locked: bool = False
    head_first: bool = False
    # Whether the source, and each target, has the referrers API; whether targets mount blobs.
    source_has_api: bool = True
    target_has_api: bool = True
    target_mounts: bool = True


@dataclass(frozen=True)
class Repository:
    """A repository of the targets: what the source has for it, and what each target has before."""

    name: str
    now: Tagged
    before: Sequence[Tagged]  # of each target; as the target has them
    source: str = ""  # how the source calls it, if otherwise
    # What the targets get of an index that loses platforms, by tag.
    trimmed: Tagged = field(default_factory=dict)
    # The artifacts that the source has, if they are copied.
    attached: Sequence[Image] | None = None
    # What each target holds besides: artifacts, and what tags named before they moved.
    others: Sequence[Sequence[Image]] = ()
    is_listed: bool = True  # its tags are chosen by a pattern
    is_immutable: bool = False

    def wanted(self) -> dict[str, Image]:
        """Return what the targets are to have."""
        return {**self.now, **self.trimmed}

    def held(self, target: int) -> list[Image]:
        """Return all that a target holds."""
        return [*self.before[target].values(), *(self.others[target] if self.others else ())]

    def is_settled(self, tag: str, target: int) -> bool:
        """Tell whether a target's listing alone says that nothing is to be done."""
        return self.is_immutable and tag in self.before[target]

    def missing(self, target: int) -> dict[str, Image]:
        """Return the tags that are put at a target."""
        before = self.before[target]
        return {
            tag: image
            for tag, image in self.wanted().items()
            if not self.is_settled(tag, target)
            and (tag not in before or before[tag].top != image.top)
        }

    def found(self, target: int) -> dict[str, Image]:
        """Return the tags that are asked for at a target, and name what they should."""
        missing = self.missing(target)
        return {
            tag: image
            for tag, image in self.wanted().items()
            if tag not in missing and not self.is_settled(tag, target)
        }

    def hung_on(self, digests: Iterable[str]) -> list[Image]:
        """Return the artifacts of these digests, and theirs, once each."""
        known = set(digests)
        artifacts = dict[str, Image]()
        left = list(self.attached or ())
        while of_these := [each for each in left if each.document["subject"]["digest"] in known]:
            artifacts |= {each.top: each for each in of_these}
            known |= artifacts.keys()
            left = [each for each in left if each.top not in artifacts]
        return list(artifacts.values())


def least(
    repositories: Sequence[Repository], terms: Terms, elsewhere: Iterable[Image] = ()
) -> Costs:
    """Return the fewest requests and bytes of a sync.

    Each target holds the images `elsewhere` in other repositories.
    """
    on_hosts = blob_sizes(elsewhere).keys()
    targets = range(len(repositories[0].before))
    costs = Costs(Tally(), [Tally() for _ in targets])
    by_source: dict[str, list[Repository]] = {}
    for each in repositories:
        by_source.setdefault(each.source or each.name, []).append(each)
    for shared in by_source.values():
        count_source(costs.source, shared, terms)
    if not terms.source_has_api and not terms.is_stateful:
        looks = {
            segment(each.source or each.name) for each in repositories if looked_at(each, terms)
        }
        costs.source.requests["GET referrers"] += len(looks)

    fetched = dict[str, int]()  # blobs
    for number, target in enumerate(costs.targets):
        fetched |= count_target_blobs(target, repositories, number, on_hosts, terms)
        for each in repositories:
            count_target_tags(target, each, number, terms)
            count_puts(target, each, number)
            count_artifacts(target, each, number, terms)
        hung = {segment(each.name) for each in repositories if hung_there(each, number, terms)}
        known = {segment(each.name) for each in repositories if has_artifacts(each, number)}
        target.requests["GET referrers"] += len(hung - known if terms.is_stateful else hung)
    costs.source.add(
        "GET blob", (size for digest, size in fetched.items() if size and digest != EMPTY)
    )
    return costs


def looked_at(each: Repository, terms: Terms, *targets: int) -> set[str]:
    """Return the digests of images at which artifacts are looked for."""
    digests = set[str]()
    if each.attached is None:
        return digests
    for target in targets or range(len(each.before)):
        for image in each.missing(target).values():
            digests |= image.manifests.keys()
        if terms.is_stateful:
            continue
        for image in each.found(target).values():
            digests |= {image.top} if terms.head_first else image.manifests.keys()
    return digests


def has_artifacts(each: Repository, target: int) -> bool:
    """Tell whether a target had artifacts, so that a run has asked whether it has the API."""
    return any("subject" in image.document for image in each.held(target))


def hung_there(each: Repository, target: int, terms: Terms) -> list[Image]:
    """Return the artifacts that a target has or gets, of the images at which they are looked for."""
    return each.hung_on(looked_at(each, terms, target))


def count_source(source: Tally, repositories: Sequence[Repository], terms: Terms) -> None:
    """Add what a repository of the source is asked, but for its blobs.

    It may be copied to several of each target.
    """
    tags = {tag: image for each in repositories for tag, image in each.now.items()}
    if any(each.is_listed for each in repositories) and not terms.is_locked:
        source.requests["list"] += pages(tags)

    wanted = Sizes()  # what is fetched by digest
    looked = set[str]()
    for each in repositories:
        for target in range(len(each.before)):
            held = {digest for image in each.held(target) for digest in image.manifests}
            for tag, image in each.missing(target).items():
                trimmed = {image.top} if tag in each.trimmed else set()
                children = sizes_of([image]).keys() - held - {image.top}
                wanted |= pick(
                    sizes_of([image, each.now[tag]]), children | {each.now[tag].top} - trimmed
                )
        looked |= looked_at(each, terms)
        hung = each.hung_on(looked_at(each, terms))
        lacking = [
            image
            for image in hung
            if any(image.top not in tops(each.held(target)) for target in range(len(each.before)))
        ]
        wanted |= sizes_of(lacking)
        looked |= {image.top for image in hung}

    answered = Sizes()
    for tag, image in tags.items():
        places = [
            (each, target)
            for each in repositories
            if tag in each.now
            for target in range(len(each.before))
        ]
        if terms.is_locked or all(each.is_settled(tag, target) for each, target in places):
            continue
        is_known = terms.is_stateful and any(tag in each.before[target] for each, target in places)
        if is_known or terms.head_first:
            source.requests["HEAD manifest"] += 1
            continue
        source.add("GET manifest", [len(image.body)])
        answered[image.top] = len(image.body)
    source.add("GET manifest", (wanted[digest] for digest in wanted.keys() - answered.keys()))
    count_looks(source, repositories, looked, terms)


def count_looks(
    source: Tally, repositories: Sequence[Repository], looked: set[str], terms: Terms
) -> None:
    """Add the questions for artifacts; or, without the API, the lists that the source has."""
    if terms.source_has_api:
        source.requests["GET referrers"] += len(looked)
        return
    attached = {image.top: image for each in repositories for image in each.attached or ()}
    lists = lists_of(attached.values(), looked)
    source.add("GET manifest", (len(listed.body) for listed in lists))


def count_target_blobs(
    target: Tally,
    repositories: Sequence[Repository],
    number: int,
    elsewhere: Collection[str],
    terms: Terms,
) -> Sizes:
    """Add mounts and uploads; return what is uploaded."""
    on_host = {digest for each in repositories for digest in blob_sizes(each.held(number))}
    on_host |= set(elsewhere)
    uploaded = Sizes()
    for each in repositories:
        there = blob_sizes(each.held(number))
        new = each.missing(number).values()
        digests = {digest for image in new for digest in image.manifests}
        for digest, size in blob_sizes([*new, *each.hung_on(digests)]).items():
            if digest in there:
                continue
            if digest in on_host and terms.target_mounts:
                target.requests["mount"] += 1
                continue
            on_host.add(digest)
            uploaded[digest] = size
            target.requests["POST upload"] += 1
            target.add("PUT upload", [size])
    return uploaded


def is_listed(each: Repository, target: int, terms: Terms) -> bool:
    """Tell whether a target's tags are listed."""
    unknown = [tag for tag in each.now if not terms.is_stateful or tag not in each.before[target]]
    is_worth_it = len(unknown) > 1 or (each.is_immutable and len(each.now) > 0)
    return is_worth_it and not terms.is_locked


def count_target_tags(target: Tally, each: Repository, number: int, terms: Terms) -> None:
    """Add the listing of a target, and the questions what tags name there."""
    asked = list(each.now)
    if is_listed(each, number, terms):
        before = each.before[number]
        target.requests["list"] += pages(before)
        asked = [tag for tag in asked if tag in before and not each.is_settled(tag, number)]
    target.requests["HEAD manifest"] += len(asked)


def count_puts(target: Tally, each: Repository, number: int) -> None:
    """Add the manifests of images that are put: a top for each tag, a child where it is not held."""
    held = {digest for image in each.held(number) for digest in image.manifests}
    new = each.missing(number).values()
    children = sizes_of(new).keys() - held - {image.top for image in new}
    target.add("PUT manifest", (len(image.body) for image in new))
    target.add("PUT manifest", pick(sizes_of(new), children).values())


def count_artifacts(target: Tally, each: Repository, number: int, terms: Terms) -> None:
    """Add the artifacts that are asked for, those that are put, and the lists of them."""
    hung = hung_there(each, number, terms)
    held = {digest for image in each.held(number) for digest in image.manifests}
    new = [image for image in hung if image.top not in held]
    known_subject = [image for image in hung if image.document["subject"]["digest"] in held]
    target.requests["HEAD manifest"] += len(known_subject)
    target.add("PUT manifest", (len(image.body) for image in new))
    if terms.target_has_api:
        return

    grown = {image.document["subject"]["digest"] for image in new}
    read = {image.document["subject"]["digest"] for image in known_subject}
    lists = lists_of(hung, grown)
    if not is_listed(each, number, terms):
        target.requests["GET manifest"] += len(grown - read)  # and there is none
    target.add("PUT manifest", (len(listed.body) for listed in lists))
    target.requests["HEAD manifest"] += len(lists)
    there = [image for image in hung if image.top in held]
    target.add("GET manifest", (len(listed.body) for listed in lists_of(there, read)))


def lists_of(artifacts: Iterable[Image], subjects: Collection[str]) -> list[Image]:
    """Return the lists that stand under the fallback tags of these subjects."""
    wanted = [each for each in artifacts if each.document["subject"]["digest"] in subjects]
    return list(fallback_lists(wanted).values())


def segment(repository: str) -> str:
    """Return the first segment of a repository's name."""
    return repository.partition("/")[0]


def pages(tags: Collection[str]) -> int:
    """Count the pages of a listing.

    Behind a full one another may stand, whether or not a Link says so.
    """
    return len(tags) // PAGE + 1


def tops(images: Iterable[Image]) -> set[str]:
    return {image.top for image in images}


def pick(sizes: Sizes, digests: Collection[str]) -> Sizes:
    return {digest: sizes[digest] for digest in digests}


def sizes_of(images: Iterable[Image]) -> Sizes:
    """Return the size of each manifest."""
    return {digest: len(body) for image in images for digest, (_, body) in image.manifests.items()}


def blob_sizes(images: Iterable[Image]) -> Sizes:
    """Return the size of each blob."""
    return {digest: len(data) for image in images for digest, data in image.blobs.items()}
