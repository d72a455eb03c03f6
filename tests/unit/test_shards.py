"""Which mappings a shard has: all of them are somebody's, none is two's, and what belongs together
stays together.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _regsync.config import Config
from _regsync.errors import ConfigError
from _regsync.sync.mappings import config_of_shard, parse_shard
from tests.fuzzing import fuzz
from tests.unit.configs import read_mappings


def shares(found: Config, total: int) -> list[list[int]]:
    """Return the numbers of the mappings that each shard has."""
    return [
        [rule.index for rule in config_of_shard(found, number, total).mappings]
        for number in range(total)
    ]


def below(*paths: str) -> Config:
    """Mappings of sources of their own to these repositories."""
    return read_mappings(
        *({"from": f"from/{number}", "to": path} for number, path in enumerate(paths))
    )


@pytest.mark.parametrize(
    ("text", "environ", "shard"),
    [
        ("0/1", {}, (0, 1)),
        ("3/4", {"JOB_COMPLETION_INDEX": "1"}, (3, 4)),
        ("/999", {"JOB_COMPLETION_INDEX": "998"}, (998, 999)),
    ],
)
def test_a_shard_is_named(text: str, environ: dict[str, str], shard: tuple[int, int]) -> None:
    assert parse_shard(text, environ) == shard


@pytest.mark.parametrize("text", ["", "/", "1", "4/4", "0/0", "-1/4", "1/4/2", "0/1000", "٣/4"])
def test_what_names_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--shard .*I from 0 to N-1") as refused:
        parse_shard(text, {})
    assert refused.value.hint is not None
    assert "0/4" in refused.value.hint


@pytest.mark.parametrize(
    ("index", "shown"),
    [(None, "not set"), ("4", "4"), ("-1", "-1"), ("\x1b[2J" + "9" * 999, "[2J999")],
)
def test_the_variable_is_named_when_it_is_wrong(index: str | None, shown: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_shard("/4", {} if index is None else {"JOB_COMPLETION_INDEX": index})
    assert f"--shard /4 (JOB_COMPLETION_INDEX: {shown}" in refused.value.message
    assert len(refused.value.message) < 140


def test_a_mapping_stays_in_its_shard_whatever_comes_before_it() -> None:
    plain = shares(below("a", "b", "c"), 3)
    later = shares(below("new", "a", "b", "c"), 3)
    assert [[index - 1 for index in share if index] for share in later] == plain


def test_names_that_differ_in_a_number_are_spread_evenly_and_a_shard_may_be_empty() -> None:
    found = below(*(f"team/service-{number}" for number in range(40)))
    assert max(map(len, shares(found, 4))) == 10
    assert sorted(shares(below("a", "b"), 4)) == [[], [], [0], [1]]


PATHS = st.lists(st.sampled_from(["a", "b", "library"]), min_size=1, max_size=3).map("/".join)
MAPPINGS = st.fixed_dictionaries(
    {
        "from": PATHS.map("from/{}".format) | st.integers(0, 99).map("many/{}".format),
        "to": PATHS | st.integers(0, 99).map("mirror/{}".format),
        "source": st.sampled_from(["a", "again", "c"]),
        "targets": st.lists(st.sampled_from(["b", "hub"]), min_size=1, max_size=2, unique=True),
    }
)


@fuzz(120)
@given(st.lists(MAPPINGS, max_size=40), st.integers(1, 9))
def test_shares_are_disjoint_together_the_whole_and_none_writes_what_another_does(
    mappings: list[dict[str, Any]], total: int
) -> None:
    """A repository may have two names: `alpine` and `library/alpine` are one of Docker Hub's."""
    found = read_mappings(*mappings)
    dealt = shares(found, total)
    assert sorted(index for share in dealt for index in share) == [*range(len(mappings))]
    assert all(share == sorted(share) for share in dealt)
    holders = Counter(
        place
        for share in dealt
        for place in {key for index in share for key in found.mappings[index].target_keys}
    )
    assert set(holders.values()) <= {1}
