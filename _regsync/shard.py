"""The share of a configuration that is one process's, where several work on it.

Owns: the grammar of `--shard`, which mappings stay together, which shard has them. May not know: what registries hold.
Invariants: shares follow from the configuration alone, are disjoint, and together are the whole. Mappings with a
repository in common stay together: its tags are listed once, conflicts are seen. So do those below one base path of a
target registry, which share layers and mount them: as short a path as makes no group half more than a fair share, for
everything may lie below one. Follows design.md section 2."""
from __future__ import annotations
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from _regsync.config import Config, MappingRule
from _regsync.errors import ConfigError, clean
__all__ = ["Shard", "parse"]

_INDEX = "JOB_COMPLETION_INDEX"  # Kubernetes sets it in the pods of an Indexed Job

class Shard(NamedTuple):
    """One of `total`, numbered from 0."""
    number: int
    total: int
    def share(self, config: Config) -> Config:
        """Return the configuration with this shard's mappings alone, in their order, and a `cache_dir` of its own."""
        groups = _groups(config.mappings, max(1.0, 1.5 * len(config.mappings) / self.total))
        shares: list[list[MappingRule]] = [[] for _ in range(self.total)]
        for group in sorted(groups, key=lambda group: (-len(group), group[0].index)): min(shares, key=len).extend(group)
        own = tuple(sorted(shares[self.number], key=lambda rule: rule.index))
        cache_dir = config.cache_dir and f"{config.cache_dir}/shard-{self.number}-of-{self.total}"
        return config._replace(mappings=own, cache_dir=cache_dir)

def parse(text: str, environ: Mapping[str, str]) -> Shard:
    """Read `I/N`, or `/N` with I from the environment; ConfigError names what is wrong."""
    (number, _, total), where = text.partition("/"), clean(text, 40)
    if text[:1] == "/": where += f" ({_INDEX}: {clean(number := environ.get(_INDEX, 'not set'), 40)})"
    if all(re.fullmatch("[0-9]{1,3}", part) for part in (number, total)) and int(number) < int(total):
        return Shard(int(number), int(total))
    hint = "the first of four is 0/4, the last 3/4; /4 is for the pods of an Indexed Job"
    raise ConfigError(f"--shard {where}: I/N is needed, I from 0 and below N", hint=hint)

def _groups(rules: Sequence[MappingRule], most: float, depth: int = 1) -> Iterator[list[MappingRule]]:
    """Give what stays together where base paths have `depth` segments, or more in a group of more than `most`."""
    above, groups = dict[object, object](), dict[object, list[MappingRule]]()
    def name_of(key: object) -> object:
        while (up := above.setdefault(key, key)) != key: above[key] = key = above[up]
        return key
    for rule in rules:
        first, *others = _keys(rule, depth)
        for key in others: above[name_of(key)] = name_of(first)
    for rule in rules: groups.setdefault(name_of(next(_keys(rule, depth))), []).append(rule)
    for group in groups.values():
        if len(group) <= most or all(rule.target_repository.count("/") < depth for rule in group): yield group
        else: yield from _groups(group, most, depth + 1)

def _keys(rule: MappingRule, depth: int) -> Iterator[object]:
    yield rule.source.place(rule.source_repository)
    path = rule.target_repository.split("/")
    for target in rule.targets:
        yield target.place(rule.target_repository)
        if depth < len(path): yield target.origin, *path[:depth], "/"
