"""What has to be copied for one image, who brings which blob where, and which mappings are one
process's share. Owns: the tree of an image in put order, the order of its blobs, the election of
leaders, the claims of docs/design.md section 6 rules 9 and 10, which mapping gets which tag,
shards. May not know: how anything is asked or moved, clocks, tasks. Invariants: I2 (children before
their index), I4 (skip beats mount, mount beats upload), I10 (on a conflict the earlier mapping
wins); claims are made in promotion order: an owner was promoted before those who wait for it, no
cycle can form; shards are disjoint and together the whole. Mappings with a repository in common
share one: it is listed once, conflicts are seen. So do those below one base path of a target, which
mount each other's layers: as short a path as makes no group half more than a fair share. Follows
docs/design.md sections 2, 3, 6, 7, docs/specification.md 1.1."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from _regsync.config.model import Config, MappingRule, Registry
from _regsync.errors import ConfigError
from _regsync.text import clean


def grouped(
    mappings: Iterable[MappingRule], keys: Callable[[MappingRule], list[object]]
) -> list[list[MappingRule]]:
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
    mapping: MappingRule
    tag: str
    targets: tuple[Registry, ...]


def assign(
    selected: Iterable[tuple[MappingRule, Iterable[str]]],
) -> tuple[list[Wanted], list[tuple[Wanted, MappingRule]]]:
    """Give each target tag to the first mapping that names it, once (docs/design.md section 3): the
    tags to look up, and those that two mappings fight for, with the one that has them."""
    owners: dict[object, MappingRule] = {}
    wanted = list[Wanted]()
    conflicts = list[tuple[Wanted, MappingRule]]()
    for mapping, tags in selected:
        # Among tags of one digest, the version is put before the name that floats (I2).
        for tag in sorted(tags, key=lambda tag: not tag.removeprefix("v")[:1].isdigit()):
            free: list[Registry] = []
            for target, place in zip(mapping.targets, mapping.places, strict=True):
                owner = owners.get((place, tag))
                if owner is None:
                    owners[place, tag] = mapping
                    free.append(target)
                elif owner.content != mapping.content:
                    conflicts.append((Wanted(mapping, tag, (target,)), owner))
            if free:
                wanted.append(Wanted(mapping, tag, tuple(free)))
    return wanted, conflicts


_INDEX = "JOB_COMPLETION_INDEX"  # Kubernetes sets it in the pods of an Indexed Job


def share(config: Config, number: int, total: int) -> Config:
    """Return the configuration with the mappings of one of `total` shards, in their order, and its
    own `cache_dir`.
    """
    groups = _groups(config.mappings, max(1.0, 1.5 * len(config.mappings) / total))
    shares: list[list[MappingRule]] = [[] for _ in range(total)]
    for group in sorted(groups, key=lambda group: (-len(group), group[0].index)):
        min(shares, key=len).extend(group)
    own = tuple(sorted(shares[number], key=lambda rule: rule.index))
    cache_dir = config.cache_dir and f"{config.cache_dir}/shard-{number}-of-{total}"
    return config._replace(mappings=own, cache_dir=cache_dir)


def parse_shard(text: str, environ: Mapping[str, str]) -> tuple[int, int]:
    """Read `I/N`, I from 0, or `/N` with I from the environment; ConfigError names what is wrong."""
    (number, _, total), where = text.partition("/"), clean(text, 40)
    if text[:1] == "/":
        where += f" ({_INDEX}: {clean(number := environ.get(_INDEX, 'not set'), 40)})"
    if all(re.fullmatch("[0-9]{1,3}", part) for part in (number, total)) and int(number) < int(
        total
    ):
        return int(number), int(total)
    hint = "the first of four is 0/4, the last 3/4; /4 is for the pods of an Indexed Job"
    raise ConfigError(f"--shard {where}: I/N is needed, I from 0 and below N", hint=hint)


def _groups(
    rules: Sequence[MappingRule], most: float, depth: int = 1
) -> Iterator[list[MappingRule]]:
    """Give what stays together where base paths have `depth` segments, or more in a group of more
    than `most`.
    """

    def keys(rule: MappingRule) -> list[object]:
        path = rule.target_repository.split("/")
        read = rule.source.place(rule.source_repository)
        return [
            read,
            *rule.places,
            *((each.origin, *path[:depth], "/") for each in rule.targets if depth < len(path)),
        ]

    for group in grouped(rules, keys):
        if len(group) <= most or all(rule.target_repository.count("/") < depth for rule in group):
            yield group
        else:
            yield from _groups(group, most, depth + 1)
