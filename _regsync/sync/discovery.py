"""Ask registries what there is: listings, what a tag names at both ends, the tree of an image.
Owns: which questions are asked, in which order, and each only once a run (docs/design.md section 6
rules 3 to 8). May not know: what is transferred when. Invariant: an answer already held is not
asked for again; concurrent askers share one question. Follows docs/specification.md section 1.1
"Tag skip decision", "head_first" and "Platform filtering"."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from functools import cache, partial
from typing import Generic, NamedTuple, TypeVar

import anyio

from _regsync import tags as tags_module
from _regsync.config.model import MappingRule, Registry
from _regsync.errors import ContentError, RegistryError, Side, SyncError
from _regsync.oci.manifest import MAX_INDEX_DEPTH, TRIM_RULE, Descriptor, Manifest, trim_index
from _regsync.registry.repository import Repository
from _regsync.registry.transport import Transport
from _regsync.state.database import key_of, named
from _regsync.state.knowledge import Knowledge, Snapshot
from _regsync.sync.image import Tree, grow
from _regsync.tags import Selection, TagRule
from _regsync.text import clean

_T = TypeVar("_T")


# docs/design.md section 6 rule 13: 32 MiB, at 8 KB and more for a manifest and what it was parsed
# into.
_MANIFEST_BUDGET = 32 * 1024 * 1024


_LIGHTEST_MANIFEST = 8192


# tasks of one asker: more than a registry has permits by default
_NOT_SAYING = (401, 403)


_AT_ONCE = 64


# of one image, all levels; entries name indexes of 4 MiB each
_MOST_BELOW = 10_000


_LARGEST_TREE = 32 * 1024 * 1024


class Once(Generic[_T]):
    """One question asked once: later askers wait for the answer; a cancelled asker hands the asking
    on.
    """

    def __init__(self, *answer: _T) -> None:
        self.answer = answer  # when there is one
        self._lock = anyio.Lock()
        self._error: SyncError | None = None

    async def get(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        while not self.answer:
            async with self._lock:
                if self._error is not None:
                    raise self._error
                try:
                    self.answer = self.answer or (await ask(),)
                except SyncError as error:
                    error.shed()
                    self._error = error
        return self.answer[0]


async def together(asks: Iterable[Callable[[], Awaitable[_T]]]) -> list[_T]:
    """Ask all, many at the same time; raises the first error when all have ended."""
    found = dict[int, _T | SyncError]()
    left = enumerate(waiting := [*asks])

    async def work() -> None:
        for number, one in left:
            found[number] = await _or_error(one())

    async with anyio.create_task_group() as group:
        for _ in waiting[:_AT_ONCE]:
            group.start_soon(work)
    if errors := [each for each in found.values() if isinstance(each, SyncError)]:
        raise errors[0]
    return [each for _, each in sorted(found.items()) if not isinstance(each, SyncError)]


async def _or_error(asking: Awaitable[_T]) -> _T | SyncError:
    try:
        return await asking
    except SyncError as error:
        return error


class _End:
    """One target of a look-up: the name of its tag's snapshot (`state.named`), that, and what it is
    found to hold.
    """

    held: str | SyncError | None = None  # a digest, nothing, an error

    def __init__(self, target: Repository, snapshot: bytes, known: Snapshot | None) -> None:
        self.target = target
        self.snapshot = snapshot
        self.known = known

    @property
    def error(self) -> SyncError | None:
        return self.held if isinstance(self.held, SyncError) else None

    def meets(self, told: str, *, trims: bool) -> bool:
        """Say whether it has, for all that HEADs can tell, what the source's digest comes to."""
        if not isinstance(self.held, str):
            return self.held is not None
        return self.known == (key_of(told), key_of(self.held)) if trims else self.held == told


class Sighting(NamedTuple):
    source: Repository
    tree: Tree | None
    digest: str
    source_digest: str
    ends: tuple[_End, ...]
    at_source: frozenset[str] = (
        frozenset()
    )  # what of the tree the source itself holds: all but trimmed indexes


class Discovery:
    def __init__(
        self,
        transport: Transport,
        knowledge: Knowledge,
        *,
        reads_only: bool = False,
        whole: bool = False,
    ) -> None:
        """Ask for a run; one that `reads_only` changes nothing, `whole` has every image's tree."""
        self._transport = transport
        self._knowledge = knowledge
        self._reads_only = reads_only
        self._whole = whole
        self.say = cache(
            transport.edge.log
        )  # once what would be said for every tag of a repository
        self._repositories: dict[tuple[str, str, str, Side], Repository] = {}
        self._listings: dict[tuple[str, str], Once[Mapping[str, str | None] | None]] = {}
        self._held: dict[tuple[str, str], Once[Collection[str] | None]] = {}
        self._manifests: dict[tuple[str, str, str], Once[Manifest]] = {}
        # Weights of those that are answered, the one that nobody has asked for longest first, and
        # their sum.
        self._recent: dict[tuple[str, str, str], int] = {}
        self._kept_bytes = 0

    def repository(self, registry: Registry, name: str, side: Side) -> Repository:
        key = (registry.alias, registry.authority, name, side)
        if key not in self._repositories:
            host = self._transport.host(registry, name)
            # Rule 1: what an earlier run was asked for saves the bare request.
            host.authenticator.recall(self._knowledge.host(host.key).login)
            found = self._repositories[key] = Repository(
                self._transport, host, name, side, reads_only=self._reads_only
            )
            host.authenticator.declare(found.api_name, found.rights)
        return self._repositories[key]

    def keep_logins(self) -> None:
        """Let a later run know how the hosts of this one want to be asked."""
        for each in self._repositories.values():
            if any(each.host.authenticator.learnt):
                self._knowledge.learn_login(each.host.key, each.host.authenticator.learnt)

    async def list_tags(self, repository: Repository) -> Mapping[str, str | None] | None:
        """List a repository, once per run (rule 3), as `Repository.list_tags` does."""
        return await self._listings.setdefault(repository.key, Once()).get(repository.list_tags)

    async def select(self, rule: TagRule, source: Repository) -> Selection:
        if (listed := await self.list_tags(source)) is None:
            missing = RegistryError("the registry knows no such repository", status=404)
            raise missing.located(Side.SOURCE, "list tags of", str(source))
        return tags_module.select(listed, rule)

    async def target_tags(self, target: Repository) -> Collection[str] | None:
        """Return the tags of a target by its listing, None where it does not say (rule 6)."""

        async def ask() -> Collection[str] | None:
            try:
                listed = await self.list_tags(target)
            except RegistryError as error:
                if error.status not in _NOT_SAYING:
                    raise
                # several registries hide repositories so: the first write decides (section 9)
                return None
            self._knowledge.set_populated(target.key, bool(listed))
            return listed or ()

        return await self._held.setdefault(target.key, Once()).get(ask)

    def names(self, repository: Repository) -> Mapping[str, str | None] | None:
        """Return the tags of a source or target that was listed, None where it was not."""
        return (
            (once.answer[0] or {})
            if (once := self._listings.get(repository.key)) and once.answer
            else None
        )

    def snapshot_name(
        self,
        mapping: MappingRule,
        source: Repository,
        target: Repository,
        reference: str,
        target_reference: str,
    ) -> bytes:
        """Name what the state keeps of a tag: where from and to, and under which rules it is
        trimmed.
        """
        rules = "" if mapping.platforms is None else ",".join(sorted(map(str, mapping.platforms)))
        return named(*source.key, reference, *target.key, target_reference, rules, TRIM_RULE)

    async def look_up(
        self,
        mapping: MappingRule,
        reference: str,
        target_reference: str,
        targets: tuple[Repository, ...],
        *,
        silent: Collection[Repository] = (),
    ) -> Sighting:
        """Say what a reference names, which targets lack it (rules 4 to 6, 8); raises what the
        source says. Of `silent` targets it is known that they do not have it."""
        source = self.repository(mapping.source, mapping.source_repository, Side.SOURCE)
        names = [
            self.snapshot_name(mapping, source, each, reference, target_reference)
            for each in targets
        ]
        ends = [
            _End(*each, self._knowledge.snapshot(each[1]))
            for each in zip(targets, names, strict=True)
        ]

        async def ask(end: _End) -> None:
            end.held = await _or_error(self._target_digest(end.target, target_reference, end.known))

        async with anyio.create_task_group() as group:
            for end in ends:
                if end.target not in silent:
                    group.start_soon(ask, end)
            found = await _or_error(
                self._first_look(mapping, source, reference, target_reference, ends)
            )
        if isinstance(found, SyncError):
            raise found
        if isinstance(found, str):
            if all(end.meets(found, trims=bool(mapping.platforms)) for end in ends):
                digest = next((end.held for end in ends if isinstance(end.held, str)), found)
                return Sighting(source, None, digest, found, tuple(ends))
            try:
                found = await self.manifest(source, found)
            except RegistryError as error:
                if (
                    error.status != 404
                ):  # what the HEAD told of is gone by now: what the tag names instead (rule 4)
                    raise
                found = await self.manifest(source, reference)
        root, fetched = await self._root(mapping, source, found)
        lacking = [end.target.key for end in ends if end.held != root.digest and not end.error]
        tree = Tree(root, (), found.digest) if lacking else None

        def is_there(each: Descriptor | Manifest) -> bool:
            return not self._whole and all(
                self._knowledge.is_committed(where, each.digest) for where in lacking
            )

        if not is_there(root):
            tree = await self._tree(source, found.digest, root, fetched, is_there)
        whole = (root, *tree.children) if tree is not None else ()
        at_source = frozenset(
            each.digest for each in whole if (*source.key, each.digest) in self._manifests
        )
        return Sighting(source, tree, root.digest, found.digest, tuple(ends), at_source)

    async def _first_look(
        self,
        mapping: MappingRule,
        source: Repository,
        reference: str,
        target_reference: str,
        ends: list[_End],
    ) -> str | Manifest:
        """Ask the source what a tag names: its digest where that is likely to be enough (rules 4
        and 5).
        """
        if self._whole:
            return await self.manifest(source, reference)
        if digest := (self.names(source) or {}).get(reference):
            return digest
        listed = [self.names(end.target) or () for end in ends]
        # Docker Hub counts a manifest's GET against the quota, and not its HEAD
        # (docs/protocol-facts.md 7.2).
        metered = mapping.source.kind == "dockerhub" and any(
            target_reference in tags for tags in listed
        )
        likely = (mapping.source.head_first or metered) and not mapping.platforms
        if not likely and not all(end.known for end in ends):
            return await self.manifest(source, reference)
        if (told := await source.head_manifest(reference)) is None:
            missing = RegistryError("no such tag or manifest", status=404)
            raise missing.located(Side.SOURCE, "look up", source.reference(reference))
        return told or await self.manifest(source, reference)

    async def completed(self, source: Repository, tree: Tree) -> Tree:
        """Fetch what a tree left out because its target seemed to hold it."""
        at_hand = {child.digest: child for child in tree.children}
        return await self._tree(source, tree.source_digest, tree.root, at_hand, lambda entry: False)

    async def _target_digest(
        self, target: Repository, reference: str, known: Snapshot | None
    ) -> str | None:
        """Return what a target holds under a tag, by its listing or a HEAD; what it says is
        evidence (I5).
        """
        listed = None
        held = None
        if ":" not in reference and target.key in self._held:
            listed = await self.target_tags(target)
            held = (self.names(target) or {}).get(reference)
        if held is None and (listed is None or reference in listed):
            try:
                held = await target.head_manifest(reference)
            except RegistryError as error:
                if error.status not in _NOT_SAYING:
                    raise
            if held is not None:
                self._knowledge.set_populated(target.key)
            held = (await target.get_manifest(reference)).digest if held == "" else held
        if held is not None:
            self._knowledge.vouch(target.key, held)
        elif known is not None:
            self._knowledge.contradict(target.key)
        elif ":" in reference and self._knowledge.is_committed(target.key, reference):
            self._knowledge.forget(target.key, reference)
        return held

    async def manifest(
        self, source: Repository, reference: str, expected: Descriptor | None = None
    ) -> Manifest:
        """Fetch a manifest, by digest once as long as the budget holds it (rules 7, 8 and 13)."""
        if ":" in reference:
            once = self._manifests.setdefault(key := (*source.key, reference), Once())
            manifest = await once.get(partial(source.get_manifest, reference, expected=expected))
        else:
            manifest = await source.get_manifest(reference)
            self._manifests[key := (*source.key, manifest.digest)] = Once(manifest)
        weight = max(manifest.size, _LIGHTEST_MANIFEST)
        self._kept_bytes += weight - self._recent.pop(key, 0)
        self._recent[key] = weight
        while self._kept_bytes > _MANIFEST_BUDGET:
            oldest = next(iter(self._recent))
            self._kept_bytes -= self._recent.pop(oldest)
            self._manifests.pop(oldest, None)
        return manifest

    async def below(self, mapping: MappingRule, sighting: Sighting) -> list[str]:
        """Return the digests below an image's index that referrers may hang on: no attestations, no
        trimmed indexes.
        """
        source = sighting.source
        tree = sighting.tree
        if tree is None:
            top = await self.manifest(source, sighting.source_digest)
            root, fetched = await self._root(mapping, source, top)
            nested = {each.digest for each in root.children if each.is_index}
            tree = await self._tree(
                source, top.digest, root, fetched, lambda entry: entry.digest not in nested
            )
        entries = [
            each
            for index in (tree.root, *tree.children)
            for each in index.children
            if not each.attests
        ]
        trimmed = {
            each.digest
            for each in tree.children
            if (*source.key, each.digest) not in self._manifests
        }
        return [each.digest for each in entries if each.digest not in trimmed]

    async def _root(
        self, mapping: MappingRule, source: Repository, top: Manifest
    ) -> tuple[Manifest, dict[str, Manifest]]:
        """Apply the platform filter (docs/specification.md section 1.1): the root to push, trimmed
        indexes below.
        """
        wanted = mapping.platforms
        nested = dict[str, Manifest]()
        if not wanted or not top.is_index or (top.layers and not top.children):
            if wanted:
                self.say(
                    "debug",
                    "no_index",
                    f"{source}: not an index, copied whatever the platform filter",
                )
            return top, nested
        await self._tree(source, top.digest, top, nested, lambda entry: not entry.is_index)
        with source.located("filter platforms of", source.reference(top.digest)):
            trimmed = trim_index(top, wanted, nested)
            if not trimmed.matched:
                had = clean(", ".join(trimmed.available)) or "none"
                asked = ", ".join(map(str, wanted))
                raise RegistryError(
                    f"no platform matches the filter {asked}; the source has {had}", status=404
                )
        if absent := ", ".join(str(each) for each in wanted if each not in trimmed.matched):
            self.say(
                "warning",
                "platform_missing",
                f"{source}: no {absent} in the source index, the others are copied",
            )
        if trimmed.manifest is not top:
            text = f"{source}: the index is trimmed to its platforms, its digest at the target is "
            self.say("info", "index_trimmed", text + trimmed.manifest.digest)
        return trimmed.manifest, {
            each.manifest.digest: each.manifest for each in trimmed.nested.values()
        }

    async def _tree(
        self,
        source: Repository,
        top: str,
        root: Manifest,
        at_hand: dict[str, Manifest],
        is_there: Callable[[Descriptor], bool],
    ) -> Tree:
        """Fetch everything below the root that is neither at hand yet nor there, level by level."""
        level = [root, *at_hand.values()]
        with source.located("read", source.reference(top)):
            for _ in range(MAX_INDEX_DEPTH + 1):
                entries = {entry.digest: entry for each in level for entry in each.children}
                lacking = [
                    each
                    for each in entries.values()
                    if each.digest not in at_hand and not is_there(each)
                ]
                size = sum(each.size for each in at_hand.values()) + sum(
                    each.size for each in lacking
                )
                if len(at_hand) + len(lacking) > _MOST_BELOW or size > _LARGEST_TREE:
                    large = f"more than {_MOST_BELOW} manifests or {_LARGEST_TREE} bytes of them"
                    raise ContentError(f"the index comes to {large}")
                level = await together(
                    partial(self.manifest, source, each.digest, each) for each in lacking
                )
                at_hand.update(
                    (each.digest, found) for each, found in zip(lacking, level, strict=True)
                )
            return grow(root, at_hand, top)
