"""Ask registries what there is: listings, what a tag names at both ends, the tree of an image.

Owns: which requests find out what has to be copied, in which order, and that none is sent twice in
a run (docs/design.md section 6, rules 3 to 8).
May not know: what is transferred when.
Invariants: an answer already held is not asked for again; concurrent askers share one request.
Follows: docs/specification.md section 1.1, "Tag skip decision", "head_first" and "Platform filtering".
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import NamedTuple, TypeVar

import anyio
import anyio.abc

from _regsync import tags as tags_module
from _regsync.config.model import MappingRule, Registry
from _regsync.errors import ContentError, RegistryError, Side, SyncError
from _regsync.layout.layouts import Layouts
from _regsync.oci.manifest import MAX_INDEX_DEPTH, TRIM_RULE, Descriptor, Manifest, trim_index
from _regsync.oci.reference import is_digest, is_referrer_tag
from _regsync.registry.host import Host, RegistryClient
from _regsync.registry.remote import RemoteRepository
from _regsync.registry.repository import Repository
from _regsync.registry.transport import Transport
from _regsync.state.archive import RepositoryKey, SnapshotEntry, hashed_key, key_of
from _regsync.state.knowledge import Knowledge
from _regsync.state.seen import FirstSeen
from _regsync.sync.image import Tree, build_tree
from _regsync.sync.once import LazyEvent, Once, gather
from _regsync.tags import Selection, TagRule
from _regsync.text import printable

_T = TypeVar("_T")

# Bytes of manifests that are kept (docs/design.md section 6, rule 13).
_MANIFEST_BUDGET = 32 * 1024 * 1024
# The least that a manifest counts for, because what it is parsed into needs memory too.
_LIGHTEST_MANIFEST = 8192

# Seconds for which a look-up waits for answers that may show where its blobs can be mounted from.
_ANSWER_PATIENCE = 5.0

# Tags that one warning names.
_MOST_NAMED = 10

# Several registries answer so for repositories that they hide (docs/design.md section 9).
_HIDING_STATUSES = (401, 403)

# Manifests of one image on all levels.
_MOST_MANIFESTS = 10_000
# Bytes of these manifests: an entry may name an index of 4 MiB.
_LARGEST_TREE = 32 * 1024 * 1024


class SourceImage(NamedTuple):
    """The manifest that a reference names at its source."""

    digest: str
    # The digest that targets are to hold; None where the index has to be filtered to know it.
    digest_at_target: str | None
    # None where it was not fetched, or is no longer kept.
    manifest: Manifest | None


class TargetTag:
    """What one target holds under a tag or digest. A look-up fills it in."""

    # A run has one for each tag and target, so its size counts.
    __slots__ = (
        "answered_event",
        "digest",
        "error",
        "reference",
        "settled_event",
        "snapshot_entry",
        "snapshot_key",
        "target",
    )

    def __init__(self, target: Repository, reference: str, snapshot_key: bytes) -> None:
        self.target = target
        self.reference = reference
        # The key of the snapshot in the state (`Discovery.snapshot_key`); empty for a directory.
        self.snapshot_key = snapshot_key
        # The digests of both ends when an earlier run copied the tag; None where none has.
        self.snapshot_entry: SnapshotEntry | None = None
        # The digest that the target has answered. None where it has not been asked, where the tag is
        # absent, and where the answer is an error.
        self.digest: str | None = None
        self.error: SyncError | None = None
        # Set when the target has answered.
        self.answered_event = LazyEvent()
        # Set when no other look-up has to wait for what the answer shows.
        self.settled_event = LazyEvent()

    def is_up_to_date(self, named: SourceImage) -> bool:
        """Say whether nothing has to be copied to the target, as far as digests alone can tell.

        With a platform filter the target is to hold another digest than the source, which is not known
        before the index is filtered. Then the snapshot decides: the target is up to date if neither
        end has changed since.
        """
        if self.error is not None:
            return True  # it fails with this error: nothing is copied to it
        if self.digest is None:
            return False
        if named.digest_at_target is None:
            snapshot = self.snapshot_entry and self.snapshot_entry.snapshot
            return snapshot == (key_of(named.digest), key_of(self.digest))
        return self.digest == named.digest_at_target

    @property
    def was_copied(self) -> bool:
        """Whether an earlier run has copied the tag, as far as the state says."""
        return self.snapshot_entry is not None


class TagLookup(NamedTuple):
    """What a tag or digest names at the source, and what the targets hold under it."""

    source: Repository
    reference: str
    # The image to copy; None when every target holds it.
    tree: Tree | None
    # The digest that the targets are to hold.
    digest: str
    # The source's own digest, which differs where an index is trimmed to its platforms.
    source_digest: str
    targets: tuple[TargetTag, ...]
    # The digests of the tree's manifests that the source holds too: all but trimmed indexes.
    digests_at_source: frozenset[str] = frozenset()
    # Whether digests alone have shown that every target holds the image, so that no manifest of it
    # was fetched.
    is_by_digest: bool = False
    # Targets that lack the image and do not get it yet (`min_age`), and until when, in seconds since
    # 1970. They are not among `targets`.
    held_tags: tuple[TargetTag, ...] = ()
    held_until: int | None = None

    def tag_at(self, target: Repository) -> TargetTag | None:
        """Return what one target holds, None for a target that is not in this look-up."""
        return next((tag for tag in self.targets if tag.target is target), None)


class TargetWorkers:
    """Tasks that ask targets what they hold, one question after another.

    A task and a group for each question would cost a twentieth of the CPU of a run without changes.
    """

    def __init__(self, ask: Callable[[TargetTag], Awaitable[None]]) -> None:
        self._ask = ask
        self._questions = deque[TargetTag]()
        self._tasks: anyio.abc.TaskGroup | None = None
        # The events that idle tasks wait for.
        self._idle = list[anyio.Event]()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Return a block in which questions are asked. Its end drops those without an answer."""
        async with anyio.create_task_group() as self._tasks:
            yield
            self._tasks.cancel_scope.cancel()

    def submit(self, tag: TargetTag) -> None:
        """Have a target asked, by an idle task or by a new one."""
        self._questions.append(tag)
        if self._idle:
            self._idle.pop().set()
        else:
            assert self._tasks is not None
            self._tasks.start_soon(self._work)

    async def _work(self) -> None:
        while True:
            while self._questions:
                tag = self._questions.popleft()
                await self._ask(tag)
                tag.answered_event.set()
            question_event = anyio.Event()
            self._idle.append(question_event)
            await question_event.wait()


class _ManifestCache:
    """Manifests that were fetched, by repository and digest, within a budget of bytes.

    One that is being fetched counts for nothing: `record_use` follows when it is there.
    """

    def __init__(self) -> None:
        self._by_key: dict[tuple[RepositoryKey, str], Once[Manifest]] = {}
        # The bytes that each fetched manifest counts for, the least recently used first.
        self._weights: dict[tuple[RepositoryKey, str], int] = {}
        self._total_weight = 0

    def has(self, where: RepositoryKey, digest: str) -> bool:
        """Say whether a manifest is kept, or is being fetched."""
        return (where, digest) in self._by_key

    def get(self, where: RepositoryKey, digest: str) -> Manifest | None:
        """Return a manifest that is kept, None for any other."""
        once = self._by_key.get((where, digest))
        return once.answer[0] if once is not None and once.answer else None

    def once(self, where: RepositoryKey, digest: str) -> Once[Manifest]:
        """Return the shared request for a manifest, which may be under way or answered."""
        key = (where, digest)
        if key not in self._by_key:
            self._by_key[key] = Once()
        return self._by_key[key]

    def record_use(self, where: RepositoryKey, digest: str, manifest: Manifest) -> None:
        """Keep a manifest as the one used last; drop the least recently used above the budget."""
        key = (where, digest)
        if self.get(where, digest) is None:
            self._by_key[key] = Once(manifest)

        # The order of the weights is that of use: whatever is used again goes to the end.
        self._total_weight -= self._weights.pop(key, 0)
        self._weights[key] = max(manifest.size, _LIGHTEST_MANIFEST)
        self._total_weight += self._weights[key]

        while self._total_weight > _MANIFEST_BUDGET:
            oldest = next(iter(self._weights))
            self._total_weight -= self._weights.pop(oldest)
            self._by_key.pop(oldest, None)


class Discovery:
    """The requests of one run that find out what has to be copied."""

    def __init__(
        self,
        transport: Transport,
        knowledge: Knowledge,
        *,
        layouts: Layouts | None = None,
        reads_only: bool = False,
        wants_all_trees: bool = False,
    ) -> None:
        """Prepare to ask. With `reads_only` no token with the right to push is asked for; with
        `wants_all_trees` the manifests of images that no target lacks are fetched as well.
        """
        self._transport = transport
        self._knowledge = knowledge
        self._layouts = layouts or Layouts(transport)
        self._reads_only = reads_only
        self._wants_all_trees = wants_all_trees

        # Logs each text once, however many tags of a repository give cause for it.
        self.log_once = cache(transport.machine.log)

        # By registry, name, and whether it is a source.
        self._repositories: dict[tuple[Registry, str, bool], Repository] = {}
        # The clients of registries, each once, for `keep_logins`.
        self._hosts: dict[RegistryClient, None] = {}

        # The answers of this run, each asked for once.
        self._listings: dict[RepositoryKey, Once[Mapping[str, str | None] | None]] = {}
        # The tags of target repositories, as `target_tags` returns them.
        self._target_tags: dict[RepositoryKey, Once[Collection[str] | None]] = {}
        self._manifests = _ManifestCache()
        # The digests of source tags, for all mappings (rule 4), by host, repository and tag. Two
        # credentials for one registry are two hosts: they may see different repositories.
        self._source_tags: dict[tuple[Host, str, str], Once[str]] = {}
        # What targets hold under tags of cosign's, by target and tag. Images of several sources may
        # bring such a tag; any other one has a single source (`mappings.assign`).
        self._target_signatures: dict[tuple[RepositoryKey, str], Once[str | None]] = {}

        self.target_workers = TargetWorkers(self._look_at_target)
        # The tags that are not settled, by target host, in the order in which they were asked for.
        self._unsettled_tags = defaultdict[str, dict[TargetTag, None]](dict)
        # Tags whose indexes lack wanted platforms, by source and the text of these platforms.
        self._missing_platforms = defaultdict[tuple[str, str], set[str]](set)

    def repository(self, registry: Registry, name: str, side: Side) -> Repository:
        """Return a repository, the same object each time."""
        key = (registry, name, side is Side.SOURCE)
        if key not in self._repositories:
            open_repository = self._layouts.repository if registry.is_layout else self.open_remote
            self._repositories[key] = open_repository(registry, name, side)
        return self._repositories[key]

    def source_of(self, mapping: MappingRule) -> Repository:
        """Return the repository that a mapping copies from."""
        return self.repository(mapping.source, mapping.source_repository, Side.SOURCE)

    def open_remote(self, registry: Registry, name: str, side: Side) -> RemoteRepository:
        """Return a repository of a registry, a new object each time. No request is made."""
        host = self._transport.host(registry, name)
        repository = RemoteRepository(
            self._transport, host, name, side, reads_only=self._reads_only
        )
        # The challenge that an earlier run got saves the request that would ask for it (rule 1). What
        # this run has learnt already is not replaced.
        host.authenticator.restore(self._knowledge.host(host.key).login)
        host.authenticator.plan_scope(repository.api_name, repository.rights)
        self._hosts[host] = None
        return repository

    def save_logins(self) -> None:
        """Let a later run know how the hosts of this one ask for a login."""
        for host in self._hosts:
            if any(host.authenticator.snapshot):
                self._knowledge.learn_login(host.key, host.authenticator.snapshot)

    # Listings.

    async def list_tags(self, repository: Repository) -> Mapping[str, str | None] | None:
        """List a repository, once a run (rule 3); returns what `Repository.list_tags` does."""
        listing = self._listings.setdefault(repository.key, Once())
        return await listing.get(repository.list_tags)

    def known_listing(self, repository: Repository) -> Mapping[str, str | None] | None:
        """Return the tags of a repository by its listing, None where it was not listed yet."""
        listing = self._listings.get(repository.key)
        if listing is None or not listing.answer:
            return None
        return listing.answer[0] or {}

    async def select(self, rule: TagRule, source: Repository) -> Selection:
        """Return what a rule selects of a source's tags; SyncError where they cannot be listed."""
        listing = await self.list_tags(source)
        if listing is None:
            error = RegistryError("the registry has no such repository", status=404)
            raise error.with_place(Side.SOURCE, "list tags of", str(source))
        return tags_module.select(listing, rule)

    async def select_tags(self, mapping: MappingRule) -> Selection:
        """Return what a mapping selects of its source's tags. One that names its tags without a pattern
        needs no listing.
        """
        selection = tags_module.select_literals(mapping.tags)
        if selection is None:
            selection = await self.select(mapping.tags, self.source_of(mapping))
        return selection

    async def target_tags(self, target: Repository) -> Collection[str] | None:
        """Return the tags of a target by its listing (rule 6), None where the registry hides it."""
        tags = self._target_tags.setdefault(target.key, Once())
        return await tags.get(partial(self._list_target, target))

    async def _list_target(self, target: Repository) -> Collection[str] | None:
        """Return a target's tags: none for a repository that does not exist, None for one that the
        registry hides, where nobody knows. The first write will show whether we may write there.
        """
        try:
            listing = await self.list_tags(target)
        except RegistryError as error:
            if error.status in _HIDING_STATUSES:
                return None
            raise

        self._knowledge.set_populated(target.key, bool(listing))
        return listing or ()

    # Tags.

    def snapshot_key(
        self,
        mapping: MappingRule,
        source: Repository,
        target: Repository,
        reference: str,
        target_reference: str,
    ) -> bytes:
        """Return the key of a tag's snapshot: the digests that the source and the target had when an
        earlier run copied the tag. Empty for a directory, of which the state keeps no snapshot.

        The key is a hash of all that the target's digest depends on: both ends, the platforms, and
        the rule by which indexes are trimmed to these.
        """
        if target.is_local:
            return b""
        platforms = ""
        if mapping.platforms is not None:
            platforms = ",".join(sorted(map(str, mapping.platforms)))
        return hashed_key(
            *source.key, reference, *target.key, target_reference, platforms, TRIM_RULE
        )

    def new_target_tags(
        self,
        targets: Iterable[Repository],
        mapping: MappingRule,
        reference: str,
        target_reference: str,
    ) -> list[TargetTag]:
        """Return what a look-up fills in: one for each target. `load_snapshots` follows."""
        source = self.source_of(mapping)
        return [
            TargetTag(
                target,
                target_reference,
                self.snapshot_key(mapping, source, target, reference, target_reference),
            )
            for target in targets
        ]

    def load_snapshots(self, tags: Collection[TargetTag]) -> None:
        """Read from the state what earlier runs have copied of these tags."""
        entries = self._knowledge.snapshots(tag.snapshot_key for tag in tags)
        for tag in tags:
            tag.snapshot_entry = entries.get(tag.snapshot_key)

    def is_probably_absent(self, tag: TargetTag) -> bool:
        """Say whether a target is likely to lack a tag: no earlier run has copied it."""
        return not tag.was_copied

    async def look_up(
        self,
        mapping: MappingRule,
        reference: str,
        tags: Sequence[TargetTag],
        *,
        known_to_lack: Collection[Repository] = (),
        expected: Descriptor | None = None,
        first_seen: FirstSeen | None = None,
    ) -> TagLookup:
        """Find out what a tag or digest names, and which targets lack it (rules 4 to 6 and 8).

        `tags` are those of `tags_at`. Targets in `known_to_lack` are not asked. `expected` is the entry
        of an index that names the digest. `first_seen` is given for an image that a mapping selects,
        and not for artifacts: its digest is noted there, and held back until it is `min_age` old. Raises
        the source's SyncError; a target's is kept in its TargetTag.
        """
        source = self.source_of(mapping)
        # Other look-ups may wait for these answers until all that they show is noted.
        for tag in tags:
            self._unsettled_tags[tag.target.host.key][tag] = None
        try:
            asked = [tag for tag in tags if tag.target not in known_to_lack]
            for tag in asked:
                self.target_workers.submit(tag)
            # The manifest of an image that may be held back is fetched only when it is due.
            may_be_held = first_seen is not None and mapping.min_age > 0
            by_head = may_be_held or self._should_head_first(mapping, tags)
            # The source's error is raised when the targets have answered.
            named = await _or_error(self.resolve_at_source(mapping, reference, by_head=by_head))
            for tag in asked:
                await tag.answered_event.wait()
            if isinstance(named, SyncError):
                raise named
            self._learn_at_hand(source, tags)
        finally:
            for tag in tags:
                self._settle(tag)

        return await self._compare_digests(
            mapping, source, reference, named, tags, expected, first_seen
        )

    async def _compare_digests(
        self,
        mapping: MappingRule,
        source: Repository,
        reference: str,
        named: SourceImage,
        tags: Sequence[TargetTag],
        expected: Descriptor | None,
        first_seen: FirstSeen | None,
    ) -> TagLookup:
        """Decide what a look-up comes to, when both ends have answered.

        Nothing is to be copied now where all targets hold the image, and where its digest is younger
        than `min_age`. Then no manifest is fetched, except for an analysis (`wants_all_trees`), which
        looks at all images whatever their age.
        """
        lacking = tuple(tag for tag in tags if not tag.is_up_to_date(named))
        held_until = None
        if first_seen is not None:
            held_until = first_seen.held_until(source.key, named.digest, mapping.min_age)
        is_to_be_copied = bool(lacking) and held_until is None
        if not is_to_be_copied and not self._wants_all_trees:
            return _nothing_to_copy(source, reference, named, tags, lacking, held_until)

        top = named.manifest or await self.top_manifest(source, reference, named.digest, expected)
        if top.digest == named.digest:
            return await self._fetch_missing_manifests(mapping, source, reference, top, tuple(tags))

        # The tag was moved since it was asked for. What it names now has an age of its own.
        digest_at_target = None if mapping.platforms else top.digest
        moved = SourceImage(digest=top.digest, digest_at_target=digest_at_target, manifest=top)
        return await self._compare_digests(
            mapping, source, reference, moved, tags, expected, first_seen
        )

    def _should_head_first(self, mapping: MappingRule, tags: Sequence[TargetTag]) -> bool:
        """Say whether the source is asked for a digest alone, because all targets probably hold the
        image (rule 4). If one does not, the manifest costs a second request.
        """
        if self._wants_all_trees:
            return False
        if all(tag.was_copied for tag in tags):
            return True
        if mapping.platforms:
            return False  # without a snapshot a digest does not tell what the targets should hold
        if mapping.source.head_first:
            return True

        is_listed = any(tag.reference in (self.known_listing(tag.target) or ()) for tag in tags)
        # Docker Hub counts a manifest's GET against the quota, and not its HEAD
        # (docs/protocol-facts.md section 7.2). A layout shows without a request whether it holds the
        # digest, so that the source's HEAD is all that the comparison costs.
        has_quota = mapping.source.kind == "dockerhub"
        are_local = all(tag.target.is_local for tag in tags)
        return is_listed and (has_quota or are_local)

    async def resolve_at_source(
        self, mapping: MappingRule, reference: str, *, by_head: bool
    ) -> SourceImage:
        """Return what a tag or digest names at a mapping's source; raises SyncError."""
        source = self.source_of(mapping)
        digest = await self.resolve_digest(source, reference, by_head=by_head)
        digest_at_target = None if mapping.platforms else digest
        # The caller holds the manifest: `_manifests` may drop it before the targets have answered.
        manifest = self._manifests.get(source.pool, digest)
        return SourceImage(digest=digest, digest_at_target=digest_at_target, manifest=manifest)

    async def resolve_digest(self, source: Repository, reference: str, *, by_head: bool) -> str:
        """Return the digest of what a reference names at its source. A tag is asked for once a run
        (rule 4), unless a listing has its digest (rule 5).

        Without `by_head` a tag's manifest is fetched and kept: it is probably needed.
        """
        if is_digest(reference):
            return reference
        ask = self._head_tag if by_head else self._get_tag
        return await self._source_tag(source, reference).get(partial(ask, source, reference))

    def _source_tag(self, source: Repository, tag: str) -> Once[str]:
        """Return the shared request for a tag's digest, which may be under way or answered."""
        key = (source.host, source.api_name, tag)
        if key not in self._source_tags:
            listed_digest = (self.known_listing(source) or {}).get(tag)
            self._source_tags[key] = Once(listed_digest) if listed_digest else Once()
        return self._source_tags[key]

    async def _head_tag(self, source: Repository, tag: str) -> str:
        digest = await source.head_manifest(tag)
        if digest is None:
            error = RegistryError("no such tag or manifest", status=404)
            raise error.with_place(Side.SOURCE, "look up", source.reference(tag))
        # The digest is empty where a registry answers a HEAD without one.
        return digest or await self._get_tag(source, tag)

    async def _get_tag(self, source: Repository, tag: str) -> str:
        return (await self.manifest_of_tag(source, tag)).digest

    async def top_manifest(
        self, source: Repository, reference: str, digest: str, expected: Descriptor | None
    ) -> Manifest:
        """Fetch the manifest of a digest that a reference named a moment ago. If the manifest is gone,
        the tag has been moved: the tag is asked for once more, for all mappings (rule 4).
        """
        try:
            return await self.manifest(source, digest, expected)
        except RegistryError as error:
            if error.status != 404 or reference == digest:
                raise

        # The answer may be newer than `digest`, or on its way: another mapping has asked then.
        is_outdated = self._source_tag(source, reference).answer == (digest,)
        if is_outdated:
            self._source_tags[source.host, source.api_name, reference] = Once()
        digest = await self.resolve_digest(source, reference, by_head=False)
        return await self.manifest(source, digest)

    async def _look_at_target(self, tag: TargetTag) -> None:
        """Find out what a target holds under a tag; set the digest or error of `tag`.

        The answer confirms or contradicts what the state says of the repository (I5).
        """
        target = tag.target
        reference = tag.reference
        ask = partial(self._target_digest, target, reference)
        try:
            if is_referrer_tag(reference):  # other look-ups may ask for it too
                once = self._target_signatures.setdefault((target.key, reference), Once())
                tag.digest = await once.get(ask)
            else:
                tag.digest = await ask()
        except SyncError as error:
            tag.error = error
            self._settle(tag)
            return

        if tag.digest is not None:
            # `look_up` settles the tag, when it has noted what the manifest names.
            self._knowledge.confirm_tagged_manifest(target.pool, tag.digest)
            return

        self._settle(tag)
        if tag.was_copied:
            # The state says that the tag was copied: whatever it says of this repository is in doubt.
            self._knowledge.record_contradiction(target.pool)
        elif is_digest(reference) and self._knowledge.is_manifest_believed(target.pool, reference):
            # It says that the target holds this manifest.
            self._knowledge.forget(target.pool, reference)

    async def _target_digest(self, target: Repository, reference: str) -> str | None:
        """Return the digest that a target holds under a tag, by its listing or a HEAD; None where the
        tag is absent or the repository is hidden.
        """
        is_tag = not is_digest(reference)
        if is_tag and target.key in self._target_tags:  # it is being listed, or was listed
            listed_tags = await self.target_tags(target)
            # Some registries list digests with the tags (rule 5).
            listed_digest = (self.known_listing(target) or {}).get(reference)
            if listed_digest is not None:
                return listed_digest
            if listed_tags is not None and reference not in listed_tags:
                return None

        try:
            digest = await target.head_manifest(reference)
        except RegistryError as error:
            if error.status not in _HIDING_STATUSES:
                raise
            return (
                None  # it may not exist yet; the first write will show whether we may write there
            )

        if digest is not None:
            self._knowledge.set_populated(target.key)
        if digest == "":  # a registry may answer a HEAD without a digest
            digest = (await target.get_manifest(reference)).digest
        return digest

    async def _fetch_missing_manifests(
        self,
        mapping: MappingRule,
        source: Repository,
        reference: str,
        top: Manifest,
        tags: tuple[TargetTag, ...],
    ) -> TagLookup:
        """Fetch the manifests that some target lacks; return the look-up."""
        root, trimmed = await self._filter_platforms(mapping, source, reference, top)
        lacking = [
            tag.target.pool for tag in tags if tag.digest != root.digest and tag.error is None
        ]
        if lacking:
            await self._wait_for_answers({host for host, _ in lacking})
        tree = await self._tree_to_copy(source, top, root, trimmed, lacking)

        manifests = (tree.root, *tree.children) if tree is not None else (root,)
        for tag in tags:
            for manifest in manifests:
                self._learn(tag.target, manifest)

        digests_at_source = frozenset(
            manifest.digest
            for manifest in manifests
            if self._manifests.has(source.pool, manifest.digest)
        )
        return TagLookup(
            source,
            reference,
            tree=tree,
            digest=root.digest,
            source_digest=top.digest,
            targets=tags,
            digests_at_source=digests_at_source,
        )

    async def _tree_to_copy(
        self,
        source: Repository,
        top: Manifest,
        root: Manifest,
        trimmed: dict[str, Manifest],
        lacking: Sequence[RepositoryKey],
    ) -> Tree | None:
        """Return an image with those of its manifests that some of the target repositories `lacking`
        have not got; None where nothing is to be copied.
        """

        def is_there(manifest: Descriptor | Manifest) -> bool:
            if self._wants_all_trees:
                return False
            return all(
                self._knowledge.is_manifest_believed(where, manifest.digest) for where in lacking
            )

        if not is_there(root):
            return await self._fetch_tree(source, top.digest, root, trimmed, is_there)
        # The targets have the root, but not under this tag.
        return Tree(root, (), top.digest) if lacking else None

    # What the answers of targets show to be there (rule 4).

    def _learn_at_hand(self, source: Repository, tags: Iterable[TargetTag]) -> None:
        """Learn the manifests whose digests targets have answered, as far as they are at hand."""
        for tag in tags:
            manifest = self._manifests.get(source.pool, tag.digest or "")
            if manifest is not None:
                self._learn(tag.target, manifest)

    def _learn(self, target: Repository, manifest: Manifest) -> None:
        """Note the blobs and children of a manifest as present in all repositories of a target's host
        that hold the manifest: a registry accepts it only with them.
        """
        blobs = (blob.digest for blob in manifest.blobs)
        children = (child.digest for child in manifest.children)
        self._knowledge.learn_manifest(target.host.key, manifest.digest, blobs, children)

    def _settle(self, tag: TargetTag) -> None:
        """Let other look-ups wait no longer for the answer of a tag."""
        self._unsettled_tags[tag.target.host.key].pop(tag, None)
        tag.settled_event.set()

    async def _wait_for_answers(self, hosts: Collection[str]) -> None:
        """Wait for the answers under way from these hosts. They may show that another repository of
        the host holds the blobs, from where these can be mounted.

        An answer that takes too long is settled, so that no other look-up waits for it.
        """
        # Where a host never mounts, the answers show nothing of use.
        mounting = [host for host in hosts if self._knowledge.supports_mounts(host) is not False]
        under_way = [tag for host in mounting for tag in self._unsettled_tags[host]]
        with anyio.move_on_after(_ANSWER_PATIENCE):
            for tag in under_way:
                await tag.settled_event.wait()
        for tag in under_way:
            self._settle(tag)

    # Manifests.

    async def manifest(
        self, source: Repository, digest: str, expected: Descriptor | None = None
    ) -> Manifest:
        """Fetch a manifest by its digest, once as long as the budget holds it (rules 7, 8 and 13)."""
        once = self._manifests.once(source.pool, digest)
        manifest = await once.get(partial(source.get_manifest, digest, expected=expected))
        self._manifests.record_use(source.pool, digest, manifest)
        return manifest

    async def manifest_of_tag(self, where: Repository, tag: str) -> Manifest:
        """Fetch what a tag names now, and keep it."""
        manifest = await where.get_manifest(tag)
        self._manifests.record_use(where.pool, manifest.digest, manifest)
        return manifest

    def cached_manifest(self, where: Repository, digest: str) -> Manifest | None:
        """Return a manifest that was fetched and is still kept."""
        return self._manifests.get(where.pool, digest)

    async def complete_tree(self, source: Repository, tree: Tree) -> Tree:
        """Return a tree with all its manifests. Some were not fetched, because targets seemed to hold
        them.
        """
        at_hand = {child.digest: child for child in tree.children}
        return await self._fetch_tree(
            source, tree.source_digest, tree.root, at_hand, lambda entry: False
        )

    async def child_subjects(self, mapping: MappingRule, lookup: TagLookup) -> list[str]:
        """Return the digests below an image's index that artifacts may refer to. Attestations are left
        out, and trimmed indexes, whose digests the source does not know.
        """
        source = lookup.source
        tree = lookup.tree or await self._indexes_of(mapping, lookup)
        # Trimmed indexes were made here, so that none was fetched from the source.
        trimmed = {
            child.digest
            for child in tree.children
            if not self._manifests.has(source.pool, child.digest)
        }
        return [
            entry.digest
            for manifest in (tree.root, *tree.children)
            for entry in manifest.children
            if not entry.attested_digest and entry.digest not in trimmed
        ]

    async def _indexes_of(self, mapping: MappingRule, lookup: TagLookup) -> Tree:
        """Return an image with its nested indexes, as the platform filter leaves them, and without the
        manifests of platforms: an index names these.
        """
        source = lookup.source
        top = await self.manifest(source, lookup.source_digest)
        root, trimmed = await self._filter_platforms(mapping, source, lookup.reference, top)
        nested = {entry.digest for entry in root.children if entry.is_index}
        return await self._fetch_tree(
            source, top.digest, root, trimmed, lambda entry: entry.digest not in nested
        )

    async def look_up_at_source(self, mapping: MappingRule, tag: str, digest: str) -> TagLookup:
        """Look up an image at its source alone. `digest` is what the tag named a moment ago.

        The answer has the digest at the source and the digest that targets get, which is another one
        where platforms are left out; it has no tree.
        """
        source = self.source_of(mapping)
        top = await self.top_manifest(source, tag, digest, expected=None)
        root, _ = await self._filter_platforms(mapping, source, tag, top)
        return TagLookup(
            source, tag, tree=None, digest=root.digest, source_digest=top.digest, targets=()
        )

    async def _filter_platforms(
        self, mapping: MappingRule, source: Repository, reference: str, top: Manifest
    ) -> tuple[Manifest, dict[str, Manifest]]:
        """Apply the platform filter (docs/specification.md section 1.1).

        Returns the root to push, and by digest the trimmed indexes below it. RegistryError where no
        platform is left.
        """
        platforms = mapping.platforms
        if not platforms:
            return top, {}
        # The entries of an index may be blobs (BuildKit's older cache): it has no platforms.
        names_blobs = bool(top.layers) and not top.children
        if not top.is_index or names_blobs:
            text = f"{source}: not an index, so `platforms` does not apply and it is copied"
            self.log_once("debug", "no_index", text)
            return top, {}

        # `_fetch_tree` adds the indexes below the top; their images are not needed yet.
        nested = dict[str, Manifest]()
        await self._fetch_tree(source, top.digest, top, nested, lambda entry: not entry.is_index)
        with source.adding_place("filter platforms of", source.reference(top.digest)):
            trimmed = trim_index(top, platforms, nested)
            if not trimmed.matched:
                raise _no_platform_matches(platforms, trimmed.available)

        absent = ", ".join(
            str(platform) for platform in platforms if platform not in trimmed.matched
        )
        if absent:
            self._missing_platforms[str(source), absent].add(reference)
        if trimmed.manifest is not top:
            digest = trimmed.manifest.digest
            text = f"{source}: the index is trimmed to `platforms`, so its digest at the target is {digest}"
            self.log_once("info", "index_trimmed", text)
        indexes = [index.manifest for index in trimmed.nested.values()]
        return trimmed.manifest, {index.digest: index for index in indexes}

    def warn_of_missing_platforms(self) -> None:
        """Warn of the wanted platforms that indexes lack, once for all tags of a repository."""
        for (source, absent), references in sorted(self._missing_platforms.items()):
            names = sorted(references)
            listed = ", ".join(names[:_MOST_NAMED])
            if len(names) > _MOST_NAMED:
                listed += f" and {len(names) - _MOST_NAMED} more"
            text = f"{source}: the index has {listed}, but not {absent}; the other platforms are copied"
            self.log_once("warning", "platform_missing", text)

    async def _fetch_tree(
        self,
        source: Repository,
        top_digest: str,
        root: Manifest,
        at_hand: dict[str, Manifest],
        is_left_out: Callable[[Descriptor], bool],
    ) -> Tree:
        """Fetch the manifests below the root, level by level, and return the tree.

        Those in `at_hand` are not fetched; the fetched ones are added there. Where `is_left_out` is true
        of an entry, neither its manifest is fetched nor what that names. `top_digest` is that of the
        source's own index, of which the root may be a trimmed one. Raises ContentError for a tree that
        is too large or too deep.
        """
        parents = [root, *at_hand.values()]
        with source.adding_place("read", source.reference(top_digest)):
            # One level more than is allowed, because `build_tree` refuses what is too deep.
            for _ in range(MAX_INDEX_DEPTH + 1):
                entries = {entry.digest: entry for parent in parents for entry in parent.children}
                lacking = [
                    entry
                    for entry in entries.values()
                    if entry.digest not in at_hand and not is_left_out(entry)
                ]
                check_tree_size([*at_hand.values(), *lacking])
                if not lacking:
                    break

                parents = await gather(
                    partial(self.manifest, source, entry.digest, entry) for entry in lacking
                )
                for entry, manifest in zip(lacking, parents, strict=True):
                    at_hand[entry.digest] = manifest
            return build_tree(root, at_hand, top_digest)


def check_tree_size(manifests: Collection[Manifest | Descriptor]) -> None:
    """Raise ContentError for more manifests of one image, or more bytes of them, than any real one has."""
    size = sum(manifest.size for manifest in manifests)
    if len(manifests) > _MOST_MANIFESTS or size > _LARGEST_TREE:
        text = f"more than {_MOST_MANIFESTS} manifests, or more than {_LARGEST_TREE} bytes of them"
        raise ContentError(f"the index names {text}")


def _no_platform_matches(wanted: Iterable[object], available: Iterable[str]) -> RegistryError:
    source_has = printable(", ".join(available)) or "none"
    filter_text = ", ".join(map(str, wanted))
    text = f"no platform matches the filter {filter_text}; the source has {source_has}"
    error = RegistryError(text, status=404)
    error.hint = "choose one of these platforms, or ask the publisher for another"
    return error


def _nothing_to_copy(
    source: Repository,
    reference: str,
    named: SourceImage,
    tags: Iterable[TargetTag],
    held_tags: tuple[TargetTag, ...],
    held_until: int | None,
) -> TagLookup:
    """Return the look-up of an image that each target holds already, or does not get yet (`held_tags`)."""
    up_to_date = tuple(tag for tag in tags if tag not in held_tags)
    # All targets that are up to date hold one digest. With a platform filter nobody else knows it: the
    # index was not fetched and trimmed.
    digests_at_targets = [tag.digest for tag in up_to_date if tag.digest is not None]
    return TagLookup(
        source,
        reference,
        tree=None,
        digest=digests_at_targets[0] if digests_at_targets else named.digest,
        source_digest=named.digest,
        targets=up_to_date,
        is_by_digest=named.manifest is None,
        held_tags=held_tags,
        held_until=held_until,
    )


async def _or_error(answer: Awaitable[_T]) -> _T | SyncError:
    """Return an answer, or the SyncError in its place: raised in a task group it cancels the others."""
    try:
        return await answer
    except SyncError as error:
        return error
