"""What has to be copied for one image, and which mapping writes which tag.

Owns: the tree of an image in the order in which it may be put, the order of its blobs, the assignment
of target tags to mappings. May not know: how anything is asked or moved. Invariants: I2 (children
before their index), I10 (the same inputs give the same plan; on a conflict the earlier mapping wins).
Follows design.md sections 3, 6 and 7, specification section 1.1 "Blob order".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from _regsync.config import MappingRule, Registry
from _regsync.errors import ContentError
from _regsync.oci import Descriptor, Manifest

__all__ = ["Assignment", "Tree", "Wanted", "assign", "grow", "order_blobs", "target_groups"]

# protocol-facts.md section 1.5: real indexes are one or two deep; a cycle cannot be built from digests.
DEEPEST = 4


@dataclass(frozen=True, slots=True)
class Tree:
    """An image as it will stand at the target: `children` in put order, without the root."""

    root: Manifest
    children: tuple[Manifest, ...]
    source_digest: str

    def needs(
        self, is_committed: Callable[[str], bool]
    ) -> tuple[tuple[Descriptor, ...], tuple[Manifest, ...]]:
        """Return the unique blobs and the children that the target lacks, by what is committed there.

        A committed child stands for everything below it (design.md section 6 rule 8).
        """
        by_digest = {child.digest: child for child in self.children}
        blobs: dict[str, Descriptor] = {}
        lacking: dict[str, Manifest] = {}
        pending = [self.root]
        while pending:
            manifest = pending.pop()
            for blob in manifest.blobs:
                known = blobs.setdefault(blob.digest, blob)
                if known.size != blob.size:
                    raise ContentError(f"{blob.digest} is named with {known.size} and with {blob.size} bytes")
            for entry in manifest.children:
                child = by_digest.get(entry.digest)
                if child is not None and entry.digest not in lacking and not is_committed(entry.digest):
                    lacking[entry.digest] = child
                    pending.append(child)
        ordered = tuple(child for child in self.children if child.digest in lacking)
        return tuple(blobs.values()), ordered


def grow(root: Manifest, fetched: Mapping[str, Manifest], source_digest: str) -> Tree:
    """Order an image's manifests so that each stands behind its own children (I2)."""
    ordered: dict[str, Manifest] = {}

    def visit(manifest: Manifest, depth: int) -> None:
        if depth > DEEPEST:
            raise ContentError(f"indexes are nested more than {DEEPEST} deep")
        for entry in manifest.children:
            child = fetched.get(entry.digest)
            if child is not None and entry.digest not in ordered:
                visit(child, depth + 1)
                ordered[entry.digest] = child

    visit(root, 1)
    return Tree(root, tuple(ordered.values()), source_digest)


def order_blobs(blobs: Iterable[Descriptor], references: Mapping[str, int]) -> tuple[Descriptor, ...]:
    """Order blobs by descending reference count over all images discovered so far; ties as they stand."""
    return tuple(sorted(blobs, key=lambda blob: -references.get(blob.digest, 0)))


def target_groups(mappings: Iterable[MappingRule]) -> list[list[MappingRule]]:
    """Group mappings that write a common repository: these are listed together (I10)."""
    groups: dict[int, list[MappingRule]] = {}
    home: dict[tuple[str, str], int] = {}
    for mapping in mappings:
        keys = [(target.authority, mapping.target_repository) for target in mapping.targets]
        joined = sorted({home[key] for key in keys if key in home})
        group = joined[0] if joined else mapping.index
        members = groups.setdefault(group, [])
        for other in joined[1:]:
            members += groups.pop(other)
            home.update({key: group for key, where in home.items() if where == other})
        members.append(mapping)
        home.update(dict.fromkeys(keys, group))
    return [sorted(group, key=lambda mapping: mapping.index) for group in groups.values()]


@dataclass(frozen=True, slots=True)
class Wanted:
    """One source tag and the targets that shall have it."""

    mapping: MappingRule
    tag: str
    targets: tuple[Registry, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a group of mappings comes to: tags to look up, and tags that two mappings fight for."""

    wanted: tuple[Wanted, ...]
    conflicts: tuple[tuple[Wanted, MappingRule], ...]


def assign(selected: Iterable[tuple[MappingRule, Iterable[str]]]) -> Assignment:
    """Give each target tag to the first mapping that names it; design.md section 3."""
    owners: dict[tuple[str, str, str], MappingRule] = {}
    wanted: list[Wanted] = []
    conflicts: list[tuple[Wanted, MappingRule]] = []
    for mapping, tags in selected:
        for tag in tags:
            free: list[Registry] = []
            for target in mapping.targets:
                key = (target.authority, mapping.target_repository, tag)
                owner = owners.setdefault(key, mapping)
                if owner is mapping:
                    free.append(target)
                elif _source_of(owner) != _source_of(mapping) or owner.platforms != mapping.platforms:
                    conflicts.append((Wanted(mapping, tag, (target,)), owner))
            if free:
                wanted.append(Wanted(mapping, tag, tuple(free)))
    return Assignment(tuple(wanted), tuple(conflicts))


def _source_of(mapping: MappingRule) -> tuple[str, str]:
    return mapping.source.authority, mapping.source_repository
