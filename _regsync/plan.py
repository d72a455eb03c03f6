"""What has to be copied for one image, which mapping writes which tag, and which mappings are one process's share.
Owns: the tree of an image in put order, the order of its blobs, the election of leaders, which mapping gets which tag,
shards. May not know: how anything is asked or moved, what registries hold. Invariants: I2 (children before their
index), I10 (on a conflict the earlier mapping wins); shards are disjoint and together the whole. Mappings with a
repository in common share one: it is listed once, conflicts are seen. So do those below one base path of a target,
which mount each other's layers: as short a path as makes no group half more than a fair share, for everything may lie
below one. Follows design.md sections 2, 3, 6, 7, specification 1.1."""
from __future__ import annotations
import enum, heapq, re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple
from _regsync.config import Config, MappingRule, Registry
from _regsync.errors import ConfigError, ContentError, RegistryError, clean
from _regsync.oci import IMAGE_CONFIGS, MAX_INDEX_DEPTH, Descriptor, Manifest
LATE_SHARE = 0.02  # of a run's requests, those that ask for late signatures (design.md section 8)
# What is noted of a look at an image's artifacts, beside `referrers.Referrers.shown`: it has some, they are all there.
HAS, COMPLETE = 16, 32
_MOST_BLOBS = 10_000  # of one image; real ones name hundreds, and a hostile index hundreds of thousands
class NotAtHand(ContentError):
    """A child that was left at the source, because its target seemed to hold it, is needed after all."""
class Tree(NamedTuple):
    """An image as it will stand at the target: `children` in put order, without the root."""
    root: Manifest
    children: tuple[Manifest, ...]
    source_digest: str
    @property
    def size(self) -> int: return sum(each.size for each in (self.root, *self.children))
    @property
    def names(self) -> frozenset[str]:
        """Everything that the target has to hold before the root: blobs and children, at hand or not."""
        return frozenset(each.digest for manifest in (self.root, *self.children) for each in manifest.names)
    def above(self, lost: frozenset[str]) -> frozenset[str]:
        """Return what has to be brought again where `lost` is gone: that, and each manifest that names it."""
        found = set(lost)
        for manifest in (*self.children, self.root):
            found |= {manifest.digest for each in manifest.names if each.digest in found}
        return frozenset(found)
    @property
    def is_image(self) -> bool:
        """Say whether every config is an image's: registries look into those (design.md section 7)."""
        return all(one.config is None or one.config.media_type in IMAGE_CONFIGS for one in (self.root, *self.children))
    def needs(self, is_committed: Callable[[str], bool]) -> tuple[tuple[Descriptor, ...], tuple[Manifest, ...]]:
        """Return the unique blobs and the children that the target lacks; a committed child stands for all below it."""
        if is_committed(self.root.digest): return (), ()
        by_digest, blobs = {child.digest: child for child in self.children}, dict[str, Descriptor]()
        lacking, pending = {self.root.digest}, [self.root]
        for manifest in pending:
            for blob in manifest.blobs:
                known = blobs.setdefault(blob.digest, blob)
                if known.size != blob.size:
                    raise ContentError(f"{blob.digest} is named with {known.size} and with {blob.size} bytes")
            for digest in [entry.digest for entry in manifest.children]:
                if digest not in lacking and not is_committed(digest):
                    if digest not in by_digest: raise NotAtHand(f"the index names {digest}, which is not at hand")
                    lacking.add(digest)
                    pending.append(by_digest[digest])
        if len(blobs) > _MOST_BLOBS: raise ContentError(f"the image names more than {_MOST_BLOBS} blobs")
        return tuple(blobs.values()), tuple(child for child in self.children if child.digest in lacking)
class Look(enum.IntEnum):
    """How an image's artifacts are looked at: not, when it is its turn, the top's at once, or with all below it."""
    NOT, LATE, TOP, ALL = range(4)
def look_again(record: tuple[int, int, int, bytes], shown: int, now: float, *, required: bool) -> Look:
    """Decide on an unchanged image by its record (`Knowledge.look`), and by its tags in a listing."""
    if not record[2] & COMPLETE or (required and not record[2] & HAS): return Look.ALL
    if shown & ~record[2]: return Look.TOP
    pause = min(max(3600.0, (now - record[1]) / 4), 7 * 86400.0)
    return Look.LATE if now - record[0] >= pause else Look.NOT
def look_without_state(digest: str, now: float) -> Look:
    """Decide by digest and day in which hour of the day an unchanged image is looked at."""
    day, rest = divmod(int(now), 86400)
    return Look.ALL if (int(digest[-6:], 16) + day) % 24 == rest // 3600 else Look.NOT
def names_absence(error: RegistryError) -> bool:
    """Say whether a refused manifest was refused for something that it names."""
    return error.status == 404 or any(code.endswith("_UNKNOWN") for code in error.codes)
def may_be_stale(error: RegistryError) -> bool:
    """Say whether a refused manifest may mean that something it names is gone (design.md section 7, I5)."""
    if error.status >= 500: return "MANIFEST_BLOB_UNKNOWN" in error.codes
    return error.status not in (401, 403, 413, 429) and not is_immutable(error)  # zot and Quay say MANIFEST_INVALID
def is_immutable(error: RegistryError) -> bool:
    """Say whether this is how a tag that never moves is refused (design.md section 9)."""
    return "TAG_INVALID" in error.codes or "ImageTagAlreadyExistsException" in error.message
def grow(root: Manifest, fetched: Mapping[str, Manifest], source_digest: str) -> Tree:
    """Order an image's manifests so that each stands behind its own children (I2); ContentError for a deep one."""
    ordered: dict[str, Manifest] = {}
    def visit(manifest: Manifest, depth: int) -> None:
        if manifest.is_index and depth > MAX_INDEX_DEPTH:
            raise ContentError(f"indexes are nested more than {MAX_INDEX_DEPTH} deep")
        for entry in manifest.children:
            if (child := fetched.get(entry.digest)) and entry.digest not in ordered:
                visit(child, depth + 1)
                ordered[entry.digest] = child
    visit(root, 1)
    return Tree(root, tuple(ordered.values()), source_digest)
def order_blobs(blobs: Iterable[Descriptor], references: Mapping[str, int]) -> tuple[Descriptor, ...]:
    """Order blobs by descending reference count over all images discovered so far; ties as they stand."""
    return tuple(sorted(blobs, key=lambda blob: -references.get(blob.digest, 0)))
class Election:
    """Which pending image to promote next: the greedy set cover of specification section 1.1, near-linear over a run.
    The highest gain goes next, then the lowest number: how many blobs others on its host want and nobody brings yet."""
    def __init__(self) -> None:
        self._blobs: dict[int, list[tuple[str, str]]] = {}
        self._gains: dict[int, int] = {}
        self._waiting: dict[tuple[str, str], list[int]] = {}
        self._heap: list[tuple[int, int]] = []
    def add(self, number: int, blobs: Iterable[tuple[str, str]]) -> None:
        """Let an image wait; `blobs` are the (host, digest) that nobody brings or has brought to the host."""
        self._blobs[number], self._gains[number] = list(blobs), 0
        for blob in self._blobs[number]:
            waiting = self._waiting.setdefault(blob, [])
            waiting.append(number)
            # The second to wait for a blob makes it a shared one for the first too.
            for each in waiting[-1:] if len(waiting) > 2 else waiting if len(waiting) == 2 else (): self._gain(each, 1)
        self._gain(number, 0)
    def take(self) -> int:
        """Return the number of the next one; what it brings counts for no other any more."""
        gain, number = heapq.heappop(self._heap)
        while self._gains.get(number) != -gain: gain, number = heapq.heappop(self._heap)
        del self._gains[number]
        for blob in self._blobs.pop(number):
            for each in self._waiting.pop(blob, ()):
                if each in self._gains: self._gain(each, -1)
        return number
    def _gain(self, number: int, more: int) -> None:
        self._gains[number] += more
        heapq.heappush(self._heap, (-self._gains[number], number))
def grouped(mappings: Iterable[MappingRule], keys: Callable[[MappingRule], list[object]]) -> list[list[MappingRule]]:
    """Group mappings that have a key in common, each group in their order."""
    groups = dict[object, list[MappingRule]]()  # by key
    for mapping in mappings:
        found = {id(each): each for key in keys(mapping) if (each := groups.get(key))}
        group, *joined = sorted(found.values(), key=len, reverse=True) or [[]]
        more = [mapping, *(each for other in joined for each in other)]
        group += more
        groups.update((key, group) for each in more for key in keys(each))
    unique = {id(each): each for each in groups.values()}.values()
    return [sorted(each, key=lambda mapping: mapping.index) for each in unique]
class Wanted(NamedTuple):
    """One source tag and the targets that shall have it."""
    mapping: MappingRule
    tag: str
    targets: tuple[Registry, ...]
def assign(selected: Iterable[tuple[MappingRule, Iterable[str]]]) -> tuple[list[Wanted],
        list[tuple[Wanted, MappingRule]]]:
    """Give each target tag to the first mapping that names it, once (design.md section 3): the tags to look up, and
    those that two mappings fight for, with the one that has them."""
    owners: dict[object, MappingRule] = {}
    wanted, conflicts = list[Wanted](), list[tuple[Wanted, MappingRule]]()
    for mapping, tags in selected:
        # Among tags of one digest, the version is put before the name that floats (I2).
        for tag in sorted(tags, key=lambda tag: not tag.removeprefix("v")[:1].isdigit()):
            free: list[Registry] = []
            for target, place in zip(mapping.targets, mapping.places, strict=True):
                owner = owners.get((place, tag))
                if owner is None:
                    owners[place, tag] = mapping
                    free.append(target)
                elif owner.content != mapping.content: conflicts.append((Wanted(mapping, tag, (target,)), owner))
            if free: wanted.append(Wanted(mapping, tag, tuple(free)))
    return wanted, conflicts
_INDEX = "JOB_COMPLETION_INDEX"  # Kubernetes sets it in the pods of an Indexed Job
def share(config: Config, number: int, total: int) -> Config:
    """Return the configuration with the mappings of one of `total` shards, in their order, and its own `cache_dir`."""
    groups = _groups(config.mappings, max(1.0, 1.5 * len(config.mappings) / total))
    shares: list[list[MappingRule]] = [[] for _ in range(total)]
    for group in sorted(groups, key=lambda group: (-len(group), group[0].index)): min(shares, key=len).extend(group)
    own = tuple(sorted(shares[number], key=lambda rule: rule.index))
    cache_dir = config.cache_dir and f"{config.cache_dir}/shard-{number}-of-{total}"
    return config._replace(mappings=own, cache_dir=cache_dir)
def parse_shard(text: str, environ: Mapping[str, str]) -> tuple[int, int]:
    """Read `I/N`, I from 0, or `/N` with I from the environment; ConfigError names what is wrong."""
    (number, _, total), where = text.partition("/"), clean(text, 40)
    if text[:1] == "/": where += f" ({_INDEX}: {clean(number := environ.get(_INDEX, 'not set'), 40)})"
    if all(re.fullmatch("[0-9]{1,3}", part) for part in (number, total)) and int(number) < int(total):
        return int(number), int(total)
    hint = "the first of four is 0/4, the last 3/4; /4 is for the pods of an Indexed Job"
    raise ConfigError(f"--shard {where}: I/N is needed, I from 0 and below N", hint=hint)
def _groups(rules: Sequence[MappingRule], most: float, depth: int = 1) -> Iterator[list[MappingRule]]:
    """Give what stays together where base paths have `depth` segments, or more in a group of more than `most`."""
    def keys(rule: MappingRule) -> list[object]:
        path, read = rule.target_repository.split("/"), rule.source.place(rule.source_repository)
        return [read, *rule.places, *((each.origin, *path[:depth], "/") for each in rule.targets if depth < len(path))]
    for group in grouped(rules, keys):
        if len(group) <= most or all(rule.target_repository.count("/") < depth for rule in group): yield group
        else: yield from _groups(group, most, depth + 1)
