"""Which mappings a shard has: all of them are somebody's, none is two's, and what belongs together
stays together.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _regsync.config import Config, MappingRule
from _regsync.errors import ConfigError
from _regsync.sync.mappings import config_of_shard
from _regsync.sync.mappings import parse_shard as parse
from tests.fuzzing import fuzz
from tests.unit.configs import read_mappings


def shares(found: Config, total: int) -> list[list[int]]:
    """Return the numbers of the mappings that each shard has."""
    return [
        [rule.index for rule in config_of_shard(found, number, total).mappings]
        for number in range(total)
    ]


def sizes(found: Config, total: int) -> list[int]:
    return sorted(map(len, shares(found, total)))


def below(*paths: str) -> Config:
    """Mappings of sources of their own to these repositories."""
    return read_mappings(
        *({"from": f"from/{number}", "to": path} for number, path in enumerate(paths))
    )


# --- the grammar
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "environ", "shard"),
    [
        ("0/1", {}, (0, 1)),
        ("3/4", {"JOB_COMPLETION_INDEX": "1"}, (3, 4)),
        ("/4", {"JOB_COMPLETION_INDEX": "0"}, (0, 4)),
        ("/999", {"JOB_COMPLETION_INDEX": "998"}, (998, 999)),
    ],
)
def test_a_shard_is_named(text: str, environ: dict[str, str], shard: tuple[int, int]) -> None:
    assert parse(text, environ) == shard


@pytest.mark.parametrize(
    "text", ["", "/", "1", "4/4", "5/4", "0/0", "-1/4", "1/4/2", "a/b", "1 / 4", "0/1000", "٣/4"]
)
def test_what_names_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--shard .*I from 0 to N-1") as refused:
        parse(text, {})
    assert refused.value.hint is not None
    assert "0/4" in refused.value.hint


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({}, "JOB_COMPLETION_INDEX: not set"),
        ({"JOB_COMPLETION_INDEX": ""}, "JOB_COMPLETION_INDEX: "),
        ({"JOB_COMPLETION_INDEX": "4"}, "JOB_COMPLETION_INDEX: 4"),
        ({"JOB_COMPLETION_INDEX": "-1"}, "JOB_COMPLETION_INDEX: -1"),
        ({"JOB_COMPLETION_INDEX": "\x1b[2J" + "9" * 999}, "JOB_COMPLETION_INDEX: [2J999"),
    ],
)
def test_the_variable_is_named_when_it_is_wrong(environ: dict[str, str], shown: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse("/4", environ)
    assert f"--shard /4 ({shown}" in refused.value.message
    assert len(refused.value.message) < 140


# --- what stays together
# ------------------------------------------------------------------------------------


def test_one_target_repository_stays_together_under_all_its_names() -> None:
    found = read_mappings(
        {"from": "x", "to": "one"},
        {"from": "y", "to": "other"},
        {"from": "z", "to": "one", "source": "c"},
        {"from": "w", "to": "alpine", "targets": ["hub"]},
        {"from": "v", "to": "library/alpine", "targets": ["hub"]},
    )
    for total in range(1, 10):
        for share in shares(found, total):
            assert (0 in share, 3 in share) == (2 in share, 4 in share)


def test_a_mapping_stays_in_its_shard_whatever_comes_before_it() -> None:
    plain = shares(below("a", "b", "c"), 3)
    later = shares(below("new", "a", "b", "c"), 3)
    assert [[index - 1 for index in share if index] for share in later] == plain


def test_names_that_differ_in_a_number_are_spread_evenly() -> None:
    assert sizes(below(*(f"team/service-{number}" for number in range(10))), 2) == [5, 5]
    assert max(sizes(below(*(f"team/service-{number}" for number in range(40))), 4)) == 10


def test_a_shard_may_be_empty_and_a_configuration_too() -> None:
    assert sorted(shares(below("a", "b"), 4)) == [[], [], [0], [1]]
    assert shares(read_mappings(), 2) == [[], []]


def test_each_shard_has_a_cache_of_its_own() -> None:
    found = below("a", "b")
    assert config_of_shard(found, 1, 2).cache_dir == "/cache/shard-1-of-2"
    assert config_of_shard(found, 0, 1).cache_dir == "/cache/shard-0-of-1"
    assert config_of_shard(found._replace(cache_dir=None), 0, 2).cache_dir is None


# --- properties
# ---------------------------------------------------------------------------------------------

PATHS = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map("/".join)
MAPPINGS = st.fixed_dictionaries(
    {
        "from": PATHS.map("from/{}".format) | st.integers(0, 99).map("many/{}".format),
        "to": PATHS | st.integers(0, 99).map("mirror/{}".format),
        "source": st.sampled_from(["a", "again", "c"]),
        "targets": st.lists(st.sampled_from(["b", "hub"]), min_size=1, max_size=2, unique=True),
    }
)


def places(rule: MappingRule) -> set[object]:
    """The repositories that a mapping writes."""
    return {target.repository_key(rule.target_repository) for target in rule.targets}


@fuzz(120)
@given(st.lists(MAPPINGS, max_size=40), st.integers(1, 9))
def test_shares_are_disjoint_and_together_the_whole(
    mappings: list[dict[str, Any]], total: int
) -> None:
    found = read_mappings(*mappings)
    dealt = shares(found, total)
    assert sorted(index for share in dealt for index in share) == [*range(len(mappings))]
    assert all(share == sorted(share) for share in dealt)
    assert shares(found, total) == dealt
    holders = Counter(
        place
        for share in dealt
        for place in {place for index in share for place in places(found.mappings[index])}
    )
    assert set(holders.values()) <= {1}


def test_the_order_of_registries_and_the_content_of_other_fields_are_nothing() -> None:
    mappings: list[dict[str, Any]] = [
        {"from": f"x/{number}", "to": f"y{number % 7}/{number}"} for number in range(50)
    ]
    plain = shares(read_mappings(*mappings), 4)
    random.Random(1).shuffle(chosen := ["v1", "v2", "*"])
    assert (
        shares(read_mappings(*({**each, "tags": {"glob": chosen}} for each in mappings)), 4)
        == plain
    )
