"""The share of a configuration that is one process's, where several work on it.

Owns: the grammar of `--shard`, what stays together, which shard has it. May not know: what registries hold.
Invariants: shares follow from the configuration alone, are disjoint, and together are the whole. Mappings with a
repository in common stay together: it is listed once, conflicts are seen. So do those below one base path of a target
registry, which mount each other's layers: as short a path as makes no group half more than a fair share, for everything
may lie below one. Follows design.md section 2."""
from __future__ import annotations
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from _regsync.config import Config, MappingRule
from _regsync.errors import ConfigError, clean
from _regsync.plan import grouped
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
    def keys(rule: MappingRule) -> list[object]:
        path, read = rule.target_repository.split("/"), rule.source.place(rule.source_repository)
        return [read, *rule.places, *((each.origin, *path[:depth], "/") for each in rule.targets if depth < len(path))]
    for group in grouped(rules, keys):
        if len(group) <= most or all(rule.target_repository.count("/") < depth for rule in group): yield group
        else: yield from _groups(group, most, depth + 1)
