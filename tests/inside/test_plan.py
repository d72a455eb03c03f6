"""Trees in put order, what a target lacks of them, leaders, and who writes which tag."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from _regsync.config import ArtifactRule, MappingRule, Registry
from _regsync.errors import ContentError
from _regsync.oci import Descriptor, Manifest, Platform
from _regsync.sync.image import Tree, build_tree
from _regsync.sync.mappings import assign_tags, group_mappings
from _regsync.tags import TagRule


def blob(name: str, size: int = 1) -> Descriptor:
    return Descriptor("application/octet-stream", name, size)


def leaf(name: str, *layers: str) -> Manifest:
    return Manifest("image", name, b"", layers=tuple(blob(each) for each in layers))


def index(name: str, *children: Manifest) -> Manifest:
    entries = tuple(Descriptor(child.media_type, child.digest, 1) for child in children)
    return Manifest("index", name, b"", is_index=True, children=entries)


def tree(root: Manifest, *below: Manifest) -> Tree:
    return build_tree(root, {each.digest: each for each in below}, root.digest)


def nothing(_: str) -> bool:
    return False


def lacks(
    grown: Tree, is_committed: Callable[[str], bool] = nothing
) -> tuple[list[str], list[str]]:
    blobs, children = grown.missing_at(is_committed)
    return [each.digest for each in blobs], [each.digest for each in children]


def names(grown: Tree) -> list[str]:
    return [child.digest for child in grown.children]


# --- trees
# ------------------------------------------------------------------------------------------


def test_children_stand_before_their_index_at_every_depth():
    """I2."""
    inner = index("inner", one := leaf("one"), two := leaf("two"))
    outer = index("outer", inner, three := leaf("three"))
    assert names(tree(index("root", outer, two), inner, outer, one, two, three)) == [
        "one",
        "two",
        "inner",
        "three",
        "outer",
    ]


def test_blobs_that_stand_in_no_image_are_such_as_a_registry_may_not_miss():
    """Of an index's own blobs nobody says that they are looked for: what an earlier run knew is not
    enough.
    """
    assert tree(index("root", index("inner")), index("inner")).is_image
    assert not tree(
        index("root", one := index("cache")._replace(layers=(blob("a"),))), one
    ).is_image


def test_a_child_that_is_named_twice_stands_once():
    one = leaf("one", "a")
    grown = tree(index("root", one, one), one)
    assert names(grown) == ["one"]
    asked: list[str] = []
    assert lacks(grown, lambda digest: bool(asked.append(digest))) == (["a"], ["one"])  # type: ignore[func-returns-value]
    assert asked == [grown.root.digest, "one"], (
        "a million equal entries must not cost a million visits"
    )


def nested(depth: int, innermost: Manifest | None = None) -> Tree:
    chain = [innermost or leaf("leaf")]
    for level in range(depth):
        chain.append(index(f"index {level}", chain[-1]))
    return tree(chain[-1], *chain)


def test_indexes_may_nest_as_deep_as_any_real_one_and_not_deeper():
    """The images below the deepest index are none; an index that names nothing is one."""
    assert len(nested(4).children) == 4
    with pytest.raises(ContentError, match="more than 4 deep"):
        nested(5)
    inner = index("inner")
    assert len(nested(3, inner).children) == 3
    with pytest.raises(ContentError, match="more than 4 deep"):
        nested(4, inner)


def test_an_image_without_index_needs_its_own_blobs_only():
    assert lacks(tree(leaf("root", "config", "a", "b"))) == (["config", "a", "b"], [])


def test_a_blob_of_several_children_is_needed_once():
    one, two = leaf("one", "a", "b"), leaf("two", "b", "c")
    assert lacks(tree(index("root", one, two), one, two)) == (["a", "b", "c"], ["one", "two"])


def test_a_committed_child_stands_for_all_below_it():
    one, two = leaf("one", "a"), leaf("two", "b")
    inner = index("inner", one)
    grown = tree(index("root", inner, two), inner, one, two)
    assert lacks(grown, {"inner"}.__contains__) == (["b"], ["two"])
    assert lacks(grown, {"one"}.__contains__) == (["b"], ["inner", "two"])


def test_what_a_committed_child_shares_with_another_one_is_still_needed():
    one, two = leaf("one", "a", "shared"), leaf("two", "shared")
    inner = index("inner", two)
    grown = tree(index("root", one, inner, two), one, inner, two)
    assert lacks(grown, {"one"}.__contains__) == (["shared"], ["two", "inner"])
    assert lacks(grown, {"inner"}.__contains__) == (["a", "shared"], ["one", "two"])


def test_a_child_that_is_neither_committed_nor_at_hand_is_an_error():
    """I1: else the index would be put without it."""
    one, two = leaf("one"), leaf("two")
    grown = tree(index("root", one, two), one)
    assert lacks(grown, {"two"}.__contains__) == ([], ["one"])
    with pytest.raises(ContentError, match="two"):
        grown.missing_at(nothing)


def test_one_digest_with_two_sizes_is_refused_unless_it_is_not_needed():
    one = Manifest("image", "one", b"", layers=(blob("a", 1),))
    two = Manifest("image", "two", b"", layers=(blob("a", 2),))
    grown = tree(index("root", one, two), one, two)
    with pytest.raises(ContentError, match="a has two sizes in the image: 1 and 2 bytes"):
        grown.missing_at(nothing)
    assert lacks(grown, {"two"}.__contains__) == (["a"], ["one"])


# --- leaders
# ----------------------------------------------------------------------------------------


# --- mappings
# ---------------------------------------------------------------------------------------


def registry(host: str, alias: str = "", port: int = 443) -> Registry:
    return Registry(alias=alias or host, scheme="https", host=host, port=port, kind="unknown")


def mapping(
    number: int,
    source: str,
    to: str,
    *targets: Registry,
    platforms: tuple[Platform, ...] | None = None,
) -> MappingRule:
    return MappingRule(
        index=number,
        source=registry("source.example"),
        source_repository=source,
        targets=targets or (registry("target.example"),),
        target_repository=to,
        tags=TagRule(),
        platforms=platforms,
        artifacts=ArtifactRule(),
    )


def groups_of(*mappings: MappingRule) -> list[list[int]]:
    return [[each.index for each in group] for group in group_mappings(mappings)]


X, Y, Z = registry("x.example"), registry("y.example"), registry("z.example")


def test_mappings_of_different_repositories_are_groups_of_their_own():
    assert groups_of(mapping(0, "a", "a"), mapping(1, "b", "b")) == [[0], [1]]


def test_mappings_of_one_name_are_one_group_in_their_own_order():
    apart = [mapping(number, "a", "r", target) for number, target in enumerate((X, Y, Z))]
    assert groups_of(*apart, mapping(3, "b", "s", X, Y, Z)) == [[0, 1, 2], [3]]
    assert groups_of(mapping(0, "a", "r"), mapping(1, "b", "s"), mapping(2, "c", "r")) == [
        [0, 2],
        [1],
    ]


def assigned(*selected: tuple[MappingRule, str]) -> tuple[list[str], list[str]]:
    wanted, lost = assign_tags([(each, tags.split()) for each, tags in selected])
    return [
        f"{each.mapping.index} {each.tag} {' '.join(target.alias for target in each.targets)}"
        for each in wanted
    ], [
        f"{each.mapping.index} {each.tag} {each.targets[0].alias} to {error.message[9]}"
        for each, error in lost
    ]


def test_a_tag_from_two_sources_goes_to_the_earlier_mapping_at_that_target_only():
    first, second = mapping(0, "a", "r", X), mapping(1, "b", "r", X, Y)
    assert assigned((first, "1 2"), (second, "2 3")) == (
        ["0 1 x.example", "0 2 x.example", "1 2 y.example", "1 3 x.example y.example"],
        ["1 2 x.example to 0"],
    )


def test_the_same_source_twice_is_done_once_and_is_no_conflict():
    first, second = mapping(0, "a", "r", X), mapping(1, "a", "r", X, Y)
    assert assigned((first, "1"), (second, "1")) == (["0 1 x.example", "1 1 y.example"], [])


def test_the_same_source_under_another_platform_filter_is_another_image():
    arm, amd = Platform("linux", "arm64"), Platform("linux", "amd64")
    first = mapping(0, "a", "r", X, platforms=(arm, amd))
    turned = mapping(1, "a", "r", X, platforms=(amd, arm))
    whole = mapping(2, "a", "r", X)
    assert assigned((first, "1"), (turned, "1"), (whole, "1")) == (
        ["0 1 x.example"],
        ["2 1 x.example to 0"],
    )


def test_two_aliases_of_one_host_are_one_target():
    both = mapping(0, "a", "r", X, registry("x.example", alias="again"))
    assert assigned((both, "1")) == (["0 1 x.example"], [])


def test_a_tag_that_is_selected_twice_is_looked_up_once():
    assert assigned((mapping(0, "a", "r", X), "1 1")) == (["0 1 x.example"], [])


def test_two_ports_of_one_host_are_two_targets():
    both = mapping(0, "a", "r", X, registry("x.example", alias="other", port=5000))
    assert assigned((both, "1")) == (["0 1 x.example other"], [])


def test_both_spellings_of_a_docker_hub_repository_are_one():
    hub = registry("docker.io")
    first, second = mapping(0, "a", "nginx", hub), mapping(1, "b", "library/nginx", hub)
    assert groups_of(first, second) == [[0, 1]]
    assert assigned((first, "1"), (second, "1")) == (["0 1 docker.io"], ["1 1 docker.io to 0"])


def test_whatever_names_what_is_lost_is_lost_with_it():
    inner = index("inner", one := leaf("one", "a"), two := leaf("two", "b"))
    grown = tree(index("root", inner, three := leaf("three", "c")), inner, one, two, three)
    assert grown.with_ancestors(frozenset({"a"})) == {"a", "one", "inner", "root"}
    assert grown.with_ancestors(frozenset({"three"})) == {"three", "root"}
    assert grown.with_ancestors(frozenset()) == frozenset()


def test_one_place_is_one_target_whichever_scheme_leads_there():
    plain = registry("x.example", alias="plain")._replace(scheme="http")
    assert assigned((mapping(0, "a", "r", X, plain), "1")) == (["0 1 x.example"], [])
