"""Find out what has to be copied: list tags, resolve tags at both ends, fetch manifests.

Owns: which of these requests are sent, and in which order (docs/design.md section 6, rules 3 to 8).
May not know: when anything is transferred.
Invariants: no request is repeated while its answer is cached; concurrent tasks share one request.
Follows: docs/specification.md section 1.1, "Tag skip decision", "head_first" and "Platform filtering".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from _regsync import tags as tags_module
from _regsync.config import MappingRule, Registry
from _regsync.errors import ContentError, RegistryError, Side, SyncError
from _regsync.oci import (
    MAX_INDEX_DEPTH,
    TRIM_RULE,
    Descriptor,
    Manifest,
    is_digest,
    is_referrer_tag,
    trim_index,
)
from _regsync.registry.endpoints import RemoteRepository
from _regsync.registry.repository import Host, Repository
from _regsync.registry.runs import Transport
from _regsync.state import Knowledge, RepositoryKey, Snapshot, hashed_key
from _regsync.sync.image import Tree
from _regsync.sync.once import Once, gather
from _regsync.tags import Selection, TagRule
from _regsync.text import printable

if TYPE_CHECKING:
    from _regsync.layout import Layout, LayoutRepository
    from _regsync.pins import Lock

# Bytes of manifests in the cache (docs/design.md section 6, rule 13).
_MANIFEST_BUDGET = 32 * 1024 * 1024
# Bytes that a manifest counts for at least, because the parsed manifest needs memory too.
_LIGHTEST_MANIFEST = 8192

# Some registries answer 401 or 403 for a repository that does not exist (docs/design.md section 9).
_HIDING_STATUSES = (401, 403)

# Some registries answer a HEAD so, and find the same manifest by GET (crazy-max/diun#1614).
_REFUSALS_OF_HEAD = (400, 403, 405)

# Manifests of one image, on all levels.
_MOST_MANIFESTS = 10_000
# Bytes of all these manifests. A single index may have 4 MiB.
_LARGEST_TREE = 32 * 1024 * 1024


class SourceImage(NamedTuple):
    """The image that a tag or digest resolves to at its source."""

    digest: str
    # The digest that the image will have at targets. None if the index must first be filtered.
    digest_at_target: str | None


@dataclass(eq=False, slots=True)  # a run has one for each tag and target, so its size matters
class TargetTag:
    """A tag or digest at one target, with the result of looking it up there."""

    target: Repository
    # The tag or digest at the target.
    reference: str
    # The key of `snapshot` in the state. Empty if the state keeps no snapshot of this tag or digest.
    snapshot_key: bytes
    # The digests at source and target after an earlier run copied the tag. None if unknown.
    snapshot: Snapshot | None = None
    # The digest at the target. None if the tag is absent, or if `error` is set, or before the target
    # has answered.
    digest: str | None = None
    # Why the target could not be asked. The image fails with this error at this target.
    error: SyncError | None = None

    def needs_copy(self, source_image: SourceImage) -> bool:
        """Report whether the image must be copied to the target, judged by digests alone.

        Returns False if the target could not be asked, because the image fails there.
        """
        if self.error is not None:
            return False
        if self.digest is None:
            return True
        if source_image.digest_at_target is not None:
            return self.digest != source_image.digest_at_target
        # The index must be filtered before its digest at the target is known. Without filtering it,
        # the target is known to be up to date only if both digests are those of the snapshot.
        return self.snapshot != Snapshot(source_image.digest, self.digest)

    @property
    def was_copied(self) -> bool:
        """Whether the state says that an earlier run copied the tag."""
        return self.snapshot is not None


class TagLookup(NamedTuple):
    """The result of looking up a tag or digest at its source and at the targets."""

    source: Repository
    # The tag or digest at the source.
    reference: str
    # The image to copy. None if every target holds the image under this reference.
    tree: Tree | None
    # The digest that the image has at targets.
    digest: str
    # The digest at the source. It differs from `digest` if the index was trimmed to `platforms`.
    source_digest: str
    # The targets that were looked up, except those of `held_tags`.
    targets: tuple[TargetTag, ...]
    # The targets that lack the image but do not get it yet, because of `min_age`.
    held_tags: tuple[TargetTag, ...] = ()
    # When the image of `held_tags` will be old enough, in seconds since 1970.
    held_until: int | None = None

    @property
    def is_trimmed(self) -> bool:
        return self.digest != self.source_digest

    def tag_at(self, target: Repository) -> TargetTag | None:
        """Return the result for one target. Returns None if the target was not looked up."""
        return next((tag for tag in self.targets if tag.target is target), None)


class _ManifestCache(dict[tuple[RepositoryKey, str], Once[Manifest]]):
    """The requests for manifests, finished or under way; the least recently used come first."""

    _weight = 0

    def request(self, where: RepositoryKey, digest: str) -> Once[Manifest]:
        """Return the request for a manifest, as the most recently used."""
        request = self.pop((where, digest), None) or Once()
        self[where, digest] = request
        return request

    def find(self, where: RepositoryKey, digest: str) -> Manifest | None:
        request = self.get((where, digest))
        return request.answer[0] if request is not None and request.answer else None

    def add(self, where: RepositoryKey, manifest: Manifest) -> None:
        """Add a manifest that was fetched, and drop the oldest above the budget."""
        if self.find(where, manifest.digest) is None:
            self._weight += max(manifest.size, _LIGHTEST_MANIFEST)
        self[where, manifest.digest] = Once(manifest)
        while self._weight > _MANIFEST_BUDGET:
            dropped = self.pop(next(iter(self))).answer
            self._weight -= max(dropped[0].size, _LIGHTEST_MANIFEST) if dropped else 0


class Discovery:
    """The requests of one run that find out what has to be copied.

    `select_tags` lists a source and selects tags. `look_up` resolves one of these tags at its
    source and at its targets, and fetches the manifests that a target lacks. Both share and cache
    requests.

    In this class, `top` is the manifest to which a tag resolves at its source. `root` is the
    manifest that targets get. They differ if the top is an index that is trimmed to `platforms`.
    """

    def __init__(
        self,
        transport: Transport,
        knowledge: Knowledge,
        *,
        recheck: bool = False,
        reads_only: bool = False,
        layouts_exist: bool = False,
        lock: Lock | None = None,
    ) -> None:
        """Create a Discovery without making a request.

        With `recheck` a layout that is a target holds an image only if it holds all parts of it.
        If `layouts_exist`, a target without `index.json` is an error, and no empty layout.
        If `reads_only` is set, tokens are requested without the right to push. With a lock the
        sources of mappings are pinned: the lock has their tags and artifacts (`PinnedSource`).
        """
        self._transport = transport
        self._knowledge = knowledge
        self._recheck = recheck
        self._layouts_exist = layouts_exist
        self.reads_only = reads_only
        self._lock = lock

        # Reports whether a target has all parts of what a tag or digest names there. Without it the
        # tag, or an answer about the digest, vouches for them.
        self.is_whole: Callable[[Repository, str, str], Awaitable[bool]] | None = None

        # `log_once(level, event, text)` logs each text once in a run.
        self.log_once = cache(transport.machine.log)

        # By authority, the registries that are image layouts.
        self.layouts: dict[str, Layout] = {}
        # By registry, repository name, and whether the repository is a source.
        self._repositories: dict[tuple[Registry, str, bool], Repository] = {}
        # With a lock, by the index of a mapping.
        self._pinned_sources: dict[int, Repository] = {}

        # By repository, the digest of each tag: None for a digest that the listing does not have,
        # and None in place of the listing if the repository does not exist.
        self._listings: dict[RepositoryKey, Once[Mapping[str, str | None] | None]] = {}
        self._manifests = _ManifestCache()
        # By host, repository name and tag, the request for the digest of a source tag
        # (docs/design.md section 6, rule 4). Two credentials for one registry are two hosts,
        # because they may have access to different repositories.
        self._digest_requests: dict[tuple[Host, str, str], Once[str]] = {}
        # By target and the cosign tag or digest of an artifact, the request for the digest at the
        # target, which is None if it is absent. Several images may have the same artifact, while any
        # other target tag has one source (`mappings.assign_tags`).
        self._artifact_requests: dict[tuple[RepositoryKey, str], Once[str | None]] = {}

    def repository(self, registry: Registry, name: str, side: Side) -> Repository:
        """Return a repository. The same arguments always return the same object."""
        key = (registry, name, side is Side.SOURCE)
        if key not in self._repositories:
            open_repository = self._open_in_layout if registry.is_layout else self.open_remote
            self._repositories[key] = open_repository(registry, name, side)
        return self._repositories[key]

    def source_of(self, mapping: MappingRule) -> Repository:
        """Return the repository that a mapping copies from. With a lock it is pinned."""
        source = self.repository(mapping.source, mapping.source_repository, Side.SOURCE)
        if self._lock is None:
            return source
        if mapping.index not in self._pinned_sources:
            self._pinned_sources[mapping.index] = self._lock.pin(mapping, source)
        return self._pinned_sources[mapping.index]

    def layout(self, registry: Registry) -> Layout:
        """Return the layout that a registry is."""
        from _regsync.layout import Layout  # most runs do not need this module

        key = registry.authority
        if key not in self.layouts:
            self.layouts[key] = Layout(
                registry,
                self._transport,
                must_be_whole=self._recheck,
                must_exist=self._layouts_exist,
            )
        return self.layouts[key]

    def _open_in_layout(self, registry: Registry, name: str, side: Side) -> LayoutRepository:
        from _regsync.layout import LayoutRepository

        return LayoutRepository(self.layout(registry), name, side)

    def open_remote(self, registry: Registry, name: str, side: Side) -> RemoteRepository:
        """Create a repository of a registry, and plan its authentication, without making a request."""
        host = self._transport.client(registry, name)
        repository = RemoteRepository(host, name, side, reads_only=self.reads_only)
        # With a challenge saved by an earlier run the first request can carry a token, which saves
        # a 401 round trip (docs/design.md section 6, rule 1). `restore` does not replace a
        # challenge of this run.
        host.authenticator.restore(self._knowledge.host_note(host.key, "login"))
        host.authenticator.plan_scope(repository.api_name, repository.rights)
        return repository

    def save_logins(self) -> None:
        """Save the authentication challenges of this run's hosts for later runs."""
        # A layout has no login. Several repositories may share a client.
        remotes = [
            each for each in self._repositories.values() if isinstance(each, RemoteRepository)
        ]
        for host in dict.fromkeys(repository.host for repository in remotes):
            if any(host.authenticator.login_facts):
                self._knowledge.learn(host.key, "login", host.authenticator.login_facts)

    # Listings.

    async def list_tags(self, repository: Repository) -> Mapping[str, str | None] | None:
        """List a repository, once a run (docs/design.md section 6, rule 3).

        Returns the digest of each tag, or None for a digest that the listing does not have. Returns
        None in place of the listing if the repository does not exist.
        """

        async def list_repository() -> Mapping[str, str | None] | None:
            listing = await repository.list_tags()
            self._knowledge.record_populated(repository.key, bool(listing))
            return listing

        return await self._listings.setdefault(repository.key, Once()).get(list_repository)

    def known_listing(self, repository: Repository) -> Mapping[str, str | None] | None:
        """Return the listing of a repository if this run has made it, without making a request.

        Returns None if the repository was not listed, and an empty listing if it does not exist.
        """
        if repository.known_tags is not None:
            return repository.known_tags
        listing = self._listings.get(repository.key)
        if listing is None or not listing.answer:
            return None
        return listing.answer[0] or {}

    async def select(self, rule: TagRule, source: Repository) -> Selection:
        """Select tags of a source repository. Raises SyncError if the tags cannot be listed."""
        listing = await self.list_tags(source)
        if listing is None:
            error = RegistryError("the registry has no such repository", status=404)
            raise error.add_context(Side.SOURCE, "list tags of", str(source))
        return tags_module.select(listing, rule)

    async def select_tags(self, mapping: MappingRule) -> Selection:
        """Select the tags of a mapping, and log the warnings about the selection.

        The source is not listed if the mapping names its tags without a pattern. Raises SyncError
        if the source's tags cannot be listed.
        """
        source = self.source_of(mapping)
        if source.known_tags is not None:
            selection = tags_module.select(source.known_tags, mapping.tags)
        else:
            selection = tags_module.select_literals(mapping.tags) or await self.select(
                mapping.tags, source
            )
        for event, text in selection.warnings(str(source)):
            self.log_once("warning", event, text)
        return selection

    async def list_target_tags(self, target: Repository) -> Mapping[str, str | None] | None:
        """List a target repository, once a run (docs/design.md section 6, rule 6).

        Returns the digest of each tag, as `list_tags` does. The listing is empty if the repository
        does not exist. Returns None if the registry refuses to list it: the repository may exist or
        not.
        """
        try:
            return await self.list_tags(target) or {}
        except RegistryError as error:
            if error.is_temporary:
                raise
            return None

    # Tags.

    def new_target_tags(
        self,
        targets: Iterable[Repository],
        mapping: MappingRule,
        reference: str,
        target_reference: str,
    ) -> list[TargetTag]:
        """Create a TargetTag for each target, with what the state says about it.

        A snapshot has the digests at source and target after the tag was last copied. Its key is a
        hash of everything that determines the digest at the target: source, target, platforms, and
        the version of the trimming rule. Digests have none, and neither have tags in a layout.
        """
        source = self.source_of(mapping)
        platforms = ",".join(sorted(map(str, mapping.platforms or ())))
        tags = list[TargetTag]()
        for target in targets:
            key = b""
            if not target.is_local and not is_digest(target_reference):
                names = (*source.key, reference, *target.key, target_reference)
                key = hashed_key(*names, platforms, TRIM_RULE)
            tags.append(TargetTag(target, target_reference, key, self._knowledge.snapshot(key)))
        return tags

    def is_probably_absent(self, tag: TargetTag) -> bool:
        """Report whether a target probably lacks a tag, because no earlier run copied the tag.

        With a lock the answer is False: a job without a state runs the same lock many times, and
        its targets usually have all the tags.
        """
        return self._lock is None and not tag.was_copied

    async def look_up(
        self,
        mapping: MappingRule,
        reference: str,
        tags: Sequence[TargetTag],
        *,
        known_to_lack: Collection[Repository] = (),
        expected: Descriptor | None = None,
        counts_age: bool = False,
    ) -> TagLookup:
        """Look up a tag or digest at its source and its targets (docs/design.md section 6, rule 4).

        `reference` is the tag or digest at the source, `tags` come from `new_target_tags`. No
        request is sent to the targets in `known_to_lack`. `expected` is the descriptor of the
        digest, if an index has named the digest. With `counts_age` it is recorded that the digest
        was seen, and the image is held back until the digest is `min_age` old.

        Fetches the manifests that some target lacks, unless the image is held back. Raises
        SyncError if the source fails. The error of a target is kept in its TargetTag.
        """
        source = self.source_of(mapping)
        # An image that is held back needs no manifest in this run.
        may_be_held = counts_age and mapping.min_age > 0
        by_head = may_be_held or self._should_head_first(mapping, tags)
        asks: list[Callable[[], Awaitable[SourceImage | None]]] = [
            partial(self.resolve_at_source, mapping, reference, by_head=by_head)
        ]
        asks += [
            partial(self._look_up_at_target, tag) for tag in tags if tag.target not in known_to_lack
        ]
        image, *_ = await gather(asks)  # both ends at the same time
        assert image is not None
        if any(tag.target.store_key == source.store_key for tag in tags):
            # Another tag of the same repository: only that one is missing.
            self._knowledge.confirm_tagged_manifest(source.store_key, image.digest)
        for tag in tags:
            manifest = self.cached_manifest(source, tag.digest or "")
            if manifest is not None:
                self._learn_manifest(tag.target, manifest)

        lacking = tuple(tag for tag in tags if tag.needs_copy(image))
        held_until = None
        if counts_age:
            held_until = self._knowledge.record_sighting(source.key, image.digest, mapping.min_age)
        if lacking and held_until is None:
            top = await self.fetch_manifest(source, image.digest, expected)
            return await self._fetch_missing_manifests(mapping, source, reference, top, tuple(tags))

        others = tuple(tag for tag in tags if tag not in lacking)
        # All targets that are up to date have the same digest. With a platform filter it is not
        # known from the source, because the index was not fetched and trimmed.
        up_to_date = next((tag.digest for tag in others if tag.digest), image.digest)
        return TagLookup(
            source,
            reference,
            tree=None,
            digest=up_to_date,
            source_digest=image.digest,
            targets=others,
            held_tags=lacking,
            held_until=held_until,
        )

    def _should_head_first(self, mapping: MappingRule, tags: Sequence[TargetTag]) -> bool:
        """Report whether to send a HEAD to the source instead of a GET.

        A HEAD is enough if all targets are up to date. Otherwise the manifest costs a second
        request (docs/design.md section 6, rule 4).
        """
        if all(tag.was_copied for tag in tags):
            return True
        if mapping.platforms:
            return False  # without a snapshot the filtered index has to be compared
        if mapping.source.head_first:
            return True

        # A target that lists the tag probably has the image.
        is_listed_at_target = any(
            tag.reference in (self.known_listing(tag.target) or ()) for tag in tags
        )
        # Docker Hub counts a manifest GET against the quota, but not a HEAD (docs/protocol-facts.md
        # section 7.2). A layout is read without a request, so the HEAD is the only request.
        has_quota = mapping.source.kind == "dockerhub"
        are_targets_local = all(tag.target.is_local for tag in tags)
        return is_listed_at_target and (has_quota or are_targets_local)

    async def resolve_at_source(
        self, mapping: MappingRule, reference: str, *, by_head: bool
    ) -> SourceImage:
        """Resolve a tag or digest at a mapping's source. Raises SyncError if that fails."""
        source = self.source_of(mapping)
        digest = await self.resolve_digest(source, reference, by_head=by_head)
        locked = source.locked_parts(reference)
        if locked is not None:
            return SourceImage(digest, locked.digest)
        return SourceImage(digest, None if mapping.platforms else digest)

    async def resolve_digest(self, source: Repository, reference: str, *, by_head: bool) -> str:
        """Return the digest that a tag or digest has at its source.

        A digest is returned unchanged. If this run has listed the source and the listing has the
        tag's digest, that digest is returned. For any other tag one request is sent in a run, and
        all callers share its answer (docs/design.md section 6, rules 4 and 5): a HEAD if the first
        caller has set `by_head` (`find_digest`), otherwise a GET, which adds the manifest to the
        cache.

        Raises SyncError if the request fails or if the source does not have the tag.
        """
        if is_digest(reference):
            return reference
        listed_digest = (self.known_listing(source) or {}).get(reference)
        if listed_digest is not None:
            return listed_digest

        async def ask() -> str:
            if not by_head:
                return (await self.fetch_manifest_of_tag(source, reference)).digest
            # Nothing fails for want of a cosign tag; and `head_first` takes a HEAD at its word.
            is_final = is_referrer_tag(reference) or source.host.registry.head_first
            digest = await self.find_digest(source, reference, is_final=is_final)
            if digest is None:
                error = RegistryError("no such tag or manifest", status=404)
                raise error.add_context(Side.SOURCE, "look up", source.name_of(reference))
            return digest

        key = (source.host, source.api_name, reference)
        return await self._digest_requests.setdefault(key, Once()).get(ask)

    async def find_digest(
        self, where: Repository, reference: str, *, is_final: bool = False
    ) -> str | None:
        """Return the digest that a reference has in a repository. Returns None if it has none.

        Asks by HEAD, and by GET if the answer has no digest. Unless `is_final` is set, a GET also
        follows a HEAD that finds nothing or is refused. Raises SyncError.
        """
        try:
            digest = await where.head_manifest(reference)
        except RegistryError as error:
            if is_final or error.status not in _REFUSALS_OF_HEAD:
                raise
            digest = None
        if digest or (digest is None and is_final):
            return digest
        try:
            return (await self.fetch_manifest_of_tag(where, reference)).digest
        except RegistryError as error:
            if error.status != 404:
                raise
            return None

    async def _look_up_at_target(self, tag: TargetTag) -> None:
        """Set the digest or the error of a tag, with a request to its target if necessary.

        The answer confirms or contradicts what the state says about the repository (I5).
        """
        target = tag.target
        reference = tag.reference
        ask = partial(self._find_at_target, target, reference)
        try:
            # Look-ups of several images may need an artifact: a cosign tag or a digest.
            if is_referrer_tag(reference) or is_digest(reference):
                request = self._artifact_requests.setdefault((target.key, reference), Once())
                tag.digest = await request.get(ask)
            else:
                tag.digest = await ask()
        except SyncError as error:
            tag.error = error
            return

        known, where = self._knowledge, target.store_key
        if tag.digest is not None:
            known.confirm_tagged_manifest(where, tag.digest)
        elif tag.was_copied:
            # The state may be wrong about everything in this repository.
            known.record_contradiction(where)
        elif is_digest(reference):
            known.forget(where, reference)

    async def _find_at_target(self, target: Repository, reference: str) -> str | None:
        """Resolve a reference at a target. Returns None if it is absent, or lacks a part."""
        digest = await self._resolve_at_target(target, reference)
        if digest is None or self.is_whole is None:
            return digest
        return digest if await self.is_whole(target, reference, digest) else None

    async def _resolve_at_target(self, target: Repository, reference: str) -> str | None:
        """Resolve a reference at a target, from the target's listing or by a HEAD.

        Returns None if the reference is absent, or if the registry answers 401 or 403.
        """
        is_tag = not is_digest(reference)
        if is_tag and target.key in self._listings:  # a listing was made or is under way
            listing = await self.list_target_tags(target)
            # The listings of some registries contain digests (docs/design.md section 6, rule 5).
            if listing is not None and (reference not in listing or listing[reference]):
                return listing.get(reference)

        try:
            digest = await self.find_digest(target, reference, is_final=True)
        except RegistryError as error:
            if error.status not in _HIDING_STATUSES:
                raise
            # The repository may not exist yet. If the credential lacks the right to write, the
            # first write fails.
            return None
        if digest is not None:
            self._knowledge.record_populated(target.key)
        return digest

    async def _fetch_missing_manifests(
        self,
        mapping: MappingRule,
        source: Repository,
        reference: str,
        top: Manifest,
        tags: tuple[TargetTag, ...],
    ) -> TagLookup:
        """Filter the platforms of the index `top`, and fetch the manifests that some target lacks.

        Also records the content of the image as present at each target that has it.
        """
        root = self._filter_platforms(mapping, source, top)
        locked = source.locked_parts(reference)
        if locked is not None and locked.digest != root.digest:
            found = f"is {root.digest}, but {locked.digest} in the lock"
            text = f"the index trimmed to `platforms` {found}"
            hint = "run `regsync lock --recheck`, and review what has changed"
            error = ContentError(text, hint=hint)
            raise error.add_context(source.side, "filter platforms of", source.name_of(reference))
        lacking = [
            tag.target.store_key for tag in tags if tag.digest != root.digest and tag.error is None
        ]

        def is_left_out(manifest: Descriptor | Manifest) -> bool:
            return all(
                self._knowledge.is_manifest_believed(where, manifest.digest) for where in lacking
            )

        tree: Tree | None = None
        if lacking and is_left_out(root):
            tree = Tree(root, (), top.digest)  # only the tag is missing
        elif lacking:
            fetch = partial(self._fetch_unless, is_left_out, source)
            tree = await self.fetch_tree(source, top.digest, root, fetch)

        for manifest in tree.manifests if tree is not None else (root,):
            for tag in tags:
                self._learn_manifest(tag.target, manifest)
        return TagLookup(
            source, reference, tree=tree, digest=root.digest, source_digest=top.digest, targets=tags
        )

    def _learn_manifest(self, target: Repository, manifest: Manifest) -> None:
        """Record the blobs and children of a manifest as present at a target's host.

        A registry accepts a manifest only if they are present, so they are in each repository of
        the host that has the manifest (docs/design.md section 6, rule 4).
        """
        blobs = (blob.digest for blob in manifest.blobs)
        children = (child.digest for child in manifest.children)
        self._knowledge.record_tagged_content(target.host.key, manifest.digest, blobs, children)

    # Manifests.

    async def fetch_manifest(
        self, source: Repository, digest: str, expected: Descriptor | None = None
    ) -> Manifest:
        """Return a manifest from the cache, or fetch it by its digest and add it to the cache.

        Concurrent callers share one request (docs/design.md section 6, rules 7, 8 and 13).
        """

        # The entry of an artifact in a lock has only a digest to compare with.
        descriptor = expected if expected is not None and expected.media_type else None

        async def fetch() -> Manifest:
            manifest = await source.get_manifest(digest, expected=descriptor)
            self._manifests.add(source.store_key, manifest)
            return manifest

        return await self._manifests.request(source.store_key, digest).get(fetch)

    async def fetch_manifest_of_tag(self, where: Repository, tag: str) -> Manifest:
        """Fetch the manifest that a tag names now, and add it to the cache."""
        manifest = await where.get_manifest(tag)
        self._manifests.add(where.store_key, manifest)
        return manifest

    def cached_manifest(self, where: Repository, digest: str) -> Manifest | None:
        """Return a manifest if it is in the cache, and None otherwise. No request is made."""
        return self._manifests.find(where.store_key, digest)

    async def complete_tree(self, source: Repository, tree: Tree) -> Tree:
        """Fetch the manifests that are missing in a tree because targets seemed to have them."""
        fetched = {manifest.digest: manifest for manifest in tree.children}

        async def fetch(entry: Descriptor) -> Manifest:
            manifest = fetched.get(entry.digest)
            return manifest or await self.fetch_manifest(source, entry.digest, entry)

        return await self.fetch_tree(source, tree.source_digest, tree.root, fetch)

    async def subjects_in(self, mapping: MappingRule, lookup: TagLookup) -> list[str]:
        """Return the digests of an image's manifests that may be the subject of artifacts.

        Attestations are left out. A trimmed index is left out because the source does not have it.
        """
        source, tree = lookup.source, lookup.tree
        if tree is None:
            top = await self.fetch_manifest(source, lookup.source_digest)
            root = self._filter_platforms(mapping, source, top)
            # The indexes are enough: platform manifests are not fetched.
            fetch = partial(self._fetch_unless, lambda entry: not entry.is_index, source)
            tree = await self.fetch_tree(source, top.digest, root, fetch)
        entries = [entry for manifest in tree.manifests for entry in manifest.children]
        digests = [entry.digest for entry in entries if not entry.attested_digest]
        return digests if lookup.is_trimmed else [tree.root.digest, *digests]

    async def look_up_at_source(self, mapping: MappingRule, tag: str, digest: str) -> TagLookup:
        """Look up an image at its source only. `digest` is the digest to which the tag was
        resolved.

        The result has the digests at source and target, which differ if platforms are filtered. It
        has no tree and no targets.
        """
        source = self.source_of(mapping)
        top = await self.fetch_manifest(source, digest)
        root = self._filter_platforms(mapping, source, top)
        return TagLookup(
            source, tag, tree=None, digest=root.digest, source_digest=top.digest, targets=()
        )

    def _filter_platforms(
        self, mapping: MappingRule, source: Repository, top: Manifest
    ) -> Manifest:
        """Apply the platform filter of a mapping to the index `top` (docs/specification.md section
        1.1).

        Returns the root for the targets. It is `top` itself if the mapping has no filter, if `top`
        is not an index, or if all its entries match. Raises RegistryError if no platform matches,
        and ContentError if the index cannot be filtered.
        """
        platforms = mapping.platforms
        # The entries of an index may be blobs (BuildKit's older cache): such an index has no platforms.
        names_blobs = bool(top.layers) and not top.children
        if not platforms or not top.is_index or names_blobs:
            return top

        with source.adding_context("filter platforms of", source.name_of(top.digest)):
            trim_result = trim_index(top, platforms)
            if not trim_result.matched:
                raise _no_platform_matches(platforms, trim_result.available)

        missing_platforms = ", ".join(
            str(platform) for platform in platforms if platform not in trim_result.matched
        )
        if missing_platforms:
            text = f"{source}: an index lacks {missing_platforms}; its other platforms are copied"
            self.log_once("warning", "platform_missing", text)
        root = trim_result.manifest
        if root is not top:
            text = (
                f"the index is trimmed to `platforms`, so its digest at the target is {root.digest}"
            )
            no_artifacts = "artifacts of the whole index stay behind"
            self.log_once("info", "index_trimmed", f"{source}: {text}; {no_artifacts}")
        return root

    async def _fetch_unless(
        self, is_left_out: Callable[[Descriptor], bool], source: Repository, entry: Descriptor
    ) -> Manifest | None:
        """Fetch a manifest that an index names. Returns None if it is left out."""
        if is_left_out(entry):
            return None
        return await self.fetch_manifest(source, entry.digest, entry)

    async def fetch_tree(
        self,
        source: Repository,
        top_digest: str,
        root: Manifest,
        fetch: Callable[[Descriptor], Awaitable[Manifest | None]],
    ) -> Tree:
        """Fetch the manifests below `root`, level by level, and return the tree, in which each comes
        after its own children (I2).

        `fetch` is called for each manifest that an index of the tree names. The tree goes on without
        those for which it returns None. `top_digest` is the digest of the root at the source, before
        platforms were filtered.

        Raises ContentError if the tree is too large or too deep.
        """
        named = dict[str, Descriptor]()
        levels = [[root]]
        with source.adding_context("read", source.name_of(top_digest)):
            # One level more than allowed is looked at, to find that there is none.
            for _ in range(MAX_INDEX_DEPTH + 1):
                entries = {each.digest: each for parent in levels[-1] for each in parent.children}
                if not entries:
                    # By the deepest level that names them.
                    below = {each.digest: each for level in levels[:0:-1] for each in level}
                    return Tree(root, tuple(below.values()), top_digest)
                named |= entries
                _check_tree_size(named.values())
                fetched = await gather(partial(fetch, entry) for entry in entries.values())
                levels.append([manifest for manifest in fetched if manifest is not None])
            raise ContentError(f"indexes are nested more than {MAX_INDEX_DEPTH} deep")


def _check_tree_size(manifests: Collection[Descriptor]) -> None:
    """Raise ContentError if an image has more manifests, or more bytes of them, than a real image
    has.
    """
    size = sum(manifest.size for manifest in manifests)
    if len(manifests) > _MOST_MANIFESTS or size > _LARGEST_TREE:
        text = f"more than {_MOST_MANIFESTS} manifests, or more than {_LARGEST_TREE} bytes of them"
        raise ContentError(f"the index names {text}")


def _no_platform_matches(wanted: Iterable[object], available: Iterable[object]) -> RegistryError:
    source_has = printable(", ".join(map(str, available))) or "none"
    filter_text = ", ".join(map(str, wanted))
    text = f"no platform matches the filter {filter_text}; the source has {source_has}"
    error = RegistryError(text, status=404)
    error.hint = "choose one of these platforms, or ask the publisher for another"
    return error
