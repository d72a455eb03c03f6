"""Ask registries what there is: listings, what a tag names at both ends, the tree of an image.

Owns: which questions are asked, in which order, and each only once a run (design.md section 6 rules 3
to 8). May not know: what is transferred when. Invariant: an answer already held is not asked for again;
concurrent askers share one question. Follows specification section 1.1 "Tag skip decision",
"head_first" and "Platform filtering".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

import anyio

from _regsync import oci, plan, tags
from _regsync.config import MappingRule, Registry
from _regsync.errors import ContentError, RegistryError, Side, SyncError, clean
from _regsync.oci import Manifest
from _regsync.registry import Repository
from _regsync.state import Knowledge
from _regsync.tags import Selection
from _regsync.transport import Transport

__all__ = ["Discovery", "Sighting", "Verdict"]

T = TypeVar("T")
# design.md section 6 rule 13: 32 MiB, at 8 KB and more for a manifest and what it was parsed into.
_MANIFEST_BUDGET, _LIGHTEST_MANIFEST = 32 * 1024 * 1024, 8192
_NOT_SAYING = (401, 403)
# Of one image, all levels together; entries name further indexes of 4 MiB each.
_MOST_BELOW = 10_000
_LARGEST_TREE = 32 * 1024 * 1024


class _Once(Generic[T]):
    """One question asked once: later askers wait for the answer; a cancelled asker hands the asking on."""

    __slots__ = ("_answer", "_error", "_lock")

    def __init__(self) -> None:
        self._lock = anyio.Lock()
        self._answer: list[T] = []
        self._error: SyncError | None = None

    def known(self) -> T | None:
        """Return the answer if there is one already."""
        return self._answer[0] if self._answer else None

    async def get(self, ask: Callable[[], Awaitable[T]]) -> T:
        if not self._answer:
            async with self._lock:
                if self._error is not None:
                    raise self._error
                if not self._answer:
                    try:
                        self._answer.append(await ask())
                    except SyncError as error:
                        self._error = error
                        raise
        return self._answer[0]


class Verdict(NamedTuple):
    """What one target needs: nothing (`reason`), the tree, or nothing can be said (`error`)."""

    target: Repository
    reason: str | None = None
    error: SyncError | None = None


class Sighting(NamedTuple):
    """What was found out about one source tag."""

    source: Repository
    tree: plan.Tree | None
    digest: str
    source_digest: str
    verdicts: tuple[Verdict, ...]
    # What of the tree the source itself holds: all but trimmed indexes.
    at_source: frozenset[str] = frozenset()


def _verdicts(held: dict[Repository, str | SyncError | None], digest: str) -> tuple[Verdict, ...]:
    return tuple(
        Verdict(target, error=found)
        if isinstance(found, SyncError)
        else Verdict(target, "unchanged" if found == digest else None)
        for target, found in held.items()
    )


class Discovery:
    """The questions of one run."""

    def __init__(self, transport: Transport, knowledge: Knowledge) -> None:
        self._transport, self._knowledge = transport, knowledge
        self._log = transport.edge.log
        self._repositories: dict[tuple[str, str, str, Side], Repository] = {}
        self._listings: dict[tuple[str, str], _Once[list[str] | None]] = {}
        self._held: dict[tuple[str, str], _Once[frozenset[str] | None]] = {}
        self._manifests: dict[tuple[str, str, str], _Once[Manifest]] = {}
        # Weights of those that are answered, the one that nobody has asked for longest first.
        self._recent: dict[tuple[str, str, str], int] = {}
        self._kept_bytes = 0
        self._said: set[str] = set()

    def repository(self, registry: Registry, name: str, side: Side) -> Repository:
        """Return the one object of a repository and side."""
        key = (registry.alias, registry.authority, name, side)
        if key not in self._repositories:
            found = Repository(self._transport, self._transport.host(registry, name), name, side)
            found.host.authenticator.declare(found.api_name, found.rights)
            self._repositories[key] = found
        return self._repositories[key]

    async def list_tags(self, repository: Repository) -> list[str] | None:
        """List a repository, once per run (rule 3); None where it holds no manifests."""
        once = self._listings.setdefault(repository.key, _Once())
        return await once.get(repository.list_tags)

    async def select(self, mapping: MappingRule, source: Repository) -> Selection:
        """Choose a mapping's tags; literal names need no listing."""
        literal = tags.literal_tags(mapping.tags)
        if literal is not None:
            return Selection(kept=tuple(literal), dropped={}, shortfall=None)
        listed = await self.list_tags(source)
        if listed is None:
            missing = RegistryError("the registry knows no such repository", status=404)
            raise missing.located(Side.SOURCE, "list tags of", str(source))
        return tags.select(listed, mapping.tags)

    async def target_tags(self, target: Repository) -> frozenset[str] | None:
        """Return the tags of a target by its listing, None where it does not say (rule 6)."""

        async def ask() -> frozenset[str] | None:
            try:
                listed = await self.list_tags(target)
            except RegistryError as error:
                if error.status in _NOT_SAYING:
                    # Several registries hide repositories so: the first write decides (section 9).
                    return None
                raise
            if listed:
                self._knowledge.set_populated(target.key)
            return frozenset(listed or ())

        return await self._held.setdefault(target.key, _Once()).get(ask)

    def listed(self, target: Repository) -> frozenset[str] | None:
        """Return a target's tags by a listing that was made already, None where there is none."""
        once = self._held.get(target.key)
        return once.known() if once is not None else None

    async def look_up(
        self, mapping: MappingRule, reference: str, target_reference: str, targets: tuple[Repository, ...]
    ) -> Sighting:
        """Find out what a source reference names and which targets lack it (rules 4, 6 and 8).

        Raises what the source says; what a target says is in its verdict.
        """
        source = self.repository(mapping.source, mapping.source_repository, Side.SOURCE)
        held: dict[Repository, str | SyncError | None] = {}
        head_first = mapping.source.head_first and not mapping.platforms
        top: list[Manifest] = []
        told: str | None = None
        failure: list[SyncError] = []

        async def ask_target(target: Repository) -> None:
            try:
                held[target] = await self._target_digest(target, target_reference)
            except SyncError as error:
                held[target] = error

        async with anyio.create_task_group() as group:
            for target in targets:
                group.start_soon(ask_target, target)
            try:
                if head_first:
                    told = await self._told(source, reference)
                else:
                    top.append(await self._top(source, reference))
            except SyncError as error:
                failure.append(error)
        if failure:
            raise failure[0]
        if told is not None and all(held[target] == told for target in targets):
            return Sighting(source, None, told, told, _verdicts(held, told))
        if not top:
            top.append(await self._moved_on(source, told, reference))
        root, fetched = await self._root(mapping, source, top[0])
        verdicts = _verdicts(held, root.digest)
        lacking = [verdict.target for verdict in verdicts if verdict.reason is None and verdict.error is None]
        tree = plan.Tree(root, (), top[0].digest) if lacking else None
        if not all(self._knowledge.is_committed(target.key, root.digest) for target in lacking):
            tree = await self._tree(source, top[0], root, fetched)
        whole = (root, *tree.children) if tree is not None else ()
        at_source = frozenset(each.digest for each in whole if (*source.key, each.digest) in self._manifests)
        return Sighting(source, tree, root.digest, top[0].digest, verdicts, at_source)

    async def _moved_on(self, source: Repository, told: str | None, reference: str) -> Manifest:
        """Fetch what a HEAD told of; where it is gone by now, what the tag names instead (rule 4)."""
        try:
            return await self._top(source, told or reference)
        except RegistryError as error:
            if error.status != 404 or told is None:
                raise
            return await self._top(source, reference)

    async def _told(self, source: Repository, reference: str) -> str | None:
        head = await source.head_manifest(reference)
        if head is None:
            raise RegistryError("no such tag or manifest", status=404).located(
                Side.SOURCE, "look up", source.reference(reference)
            )
        return head.digest

    async def _target_digest(self, target: Repository, reference: str) -> str | None:
        if ":" not in reference and target.key in self._held:
            named = await self.target_tags(target)
            if named is not None and reference not in named:
                return None
        try:
            head = await target.head_manifest(reference)
        except RegistryError as error:
            if error.status in _NOT_SAYING:
                return None
            raise
        if head is None:
            return None
        self._knowledge.set_populated(target.key)
        if head.digest is None:
            return (await target.get_manifest(reference)).digest
        return head.digest

    async def _top(self, source: Repository, reference: str) -> Manifest:
        manifest = await source.get_manifest(reference)

        async def known() -> Manifest:
            return manifest

        return await self._keep((*source.key, manifest.digest), known)

    async def _keep(self, key: tuple[str, str, str], ask: Callable[[], Awaitable[Manifest]]) -> Manifest:
        """Return a manifest that is asked for once, as long as the budget holds it (rule 13)."""
        manifest = await self._manifests.setdefault(key, _Once()).get(ask)
        weight = max(manifest.size, _LIGHTEST_MANIFEST)
        self._kept_bytes += weight - self._recent.pop(key, 0)
        self._recent[key] = weight
        while self._kept_bytes > _MANIFEST_BUDGET:
            oldest = next(iter(self._recent))
            self._kept_bytes -= self._recent.pop(oldest)
            self._manifests.pop(oldest, None)
        return manifest

    async def _child(self, source: Repository, entry: oci.Descriptor) -> Manifest:
        """Fetch a child once per digest and run (rule 8), and hold it against its descriptor."""

        async def ask() -> Manifest:
            return await source.get_manifest(entry.digest, expected=entry)

        return await self._keep((*source.key, entry.digest), ask)

    async def _children(
        self, source: Repository, top: Manifest, entries: Iterable[oci.Descriptor], below: dict[str, Manifest]
    ) -> tuple[Manifest, ...]:
        """Fetch entries of an index into `below`, which holds what is there of the image already."""
        wanted = {entry.digest: entry for entry in entries if entry.digest not in below}
        size = sum(each.size for each in wanted.values()) + sum(each.size for each in below.values())
        if len(below) + len(wanted) > _MOST_BELOW or size > _LARGEST_TREE:
            large = f"the index comes to more than {_MOST_BELOW} manifests or {_LARGEST_TREE} bytes of them"
            raise ContentError(large).located(Side.SOURCE, "read", source.reference(top.digest))
        errors: list[SyncError] = []

        async def fetch(entry: oci.Descriptor) -> None:
            try:
                below[entry.digest] = await self._child(source, entry)
            except SyncError as error:
                errors.append(error)

        async with anyio.create_task_group() as group:
            for entry in wanted.values():
                group.start_soon(fetch, entry)
        if errors:
            raise errors[0]
        return tuple(below[digest] for digest in wanted)

    async def _root(
        self, mapping: MappingRule, source: Repository, top: Manifest
    ) -> tuple[Manifest, dict[str, Manifest]]:
        """Apply the platform filter (specification section 1.1): the root to push, trimmed indexes below."""
        if not top.is_index or not mapping.platforms:
            if mapping.platforms:
                self._say("debug", "no_index", f"{source}: not an index, copied whatever the platform filter")
            return top, {}
        nested = await self._nested(source, top)
        with source.located("filter platforms of", source.reference(top.digest)):
            trimmed = oci.trim_index(top, mapping.platforms, nested)
            self._say_platforms(mapping, source, trimmed)
        return trimmed.manifest, {each.manifest.digest: each.manifest for each in trimmed.nested.values()}

    async def _tree(
        self, source: Repository, top: Manifest, root: Manifest, fetched: dict[str, Manifest]
    ) -> plan.Tree:
        """Fetch everything below the root that is not at hand yet, level by level."""
        level = (root, *fetched.values())
        for _ in range(oci.MAX_INDEX_DEPTH + 1):
            entries = {entry.digest: entry for each in level for entry in each.children}
            level = await self._children(source, top, entries.values(), fetched)
        with source.located("read", source.reference(top.digest)):
            return plan.grow(root, fetched, top.digest)

    async def _nested(self, source: Repository, index: Manifest) -> dict[str, Manifest]:
        nested: dict[str, Manifest] = {}
        pending = oci.nested_indexes(index)
        for _ in range(oci.MAX_INDEX_DEPTH):
            found = await self._children(source, index, pending, nested)
            pending = tuple(entry for each in found for entry in oci.nested_indexes(each))
        return nested

    def _say(self, level: str, event: str, message: str) -> None:
        """Log once what would be said for every tag of a repository."""
        if message not in self._said:
            self._said.add(message)
            self._log(level, event, message)

    def _say_platforms(self, mapping: MappingRule, source: Repository, trimmed: oci.Trimmed) -> None:
        wanted = mapping.platforms or ()
        if not trimmed.matched:
            raise RegistryError(
                f"no platform matches the filter {', '.join(map(str, wanted))}; "
                f"the source has {clean(', '.join(trimmed.available)) or 'none'}",
                status=404,
            )
        lacking = [str(each) for each in wanted if each not in trimmed.matched]
        if lacking:
            self._say(
                "warning",
                "platform_missing",
                f"{source}: no {', '.join(lacking)} in the source index, the others are copied",
            )
        if trimmed.changed:
            self._say(
                "info",
                "index_trimmed",
                f"{source}: the index is trimmed to its platforms, its digest at the target is "
                f"{trimmed.manifest.digest}",
            )
