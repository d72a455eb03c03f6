"""Manifests, YAML and command lines: a value, or the one declared error; what is read is what
PyYAML and JSON read.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from _regsync.config.yaml import DocumentError, Entry, Node, compose, dump
from _regsync.errors import ContentError
from _regsync.oci import digest_of, parse_manifest, parse_platform, trim_index
from tests.fuzzing import fuzz, scraps, trees

INDEX, IMAGE = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
)
DIGESTS = [digest_of(bytes([number])) for number in range(4)]

# Manifests.


def near(good: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with these fields, of which one may be missing or anything."""
    whole = st.fixed_dictionaries(good)
    wrong = trees(
        "mediaType digest size",
        leaves=st.sampled_from([-1, 2**63, 1.5, 1e400, True, INDEX, DIGESTS[0], "x\n"]),
    )
    strange = st.tuples(whole, st.sampled_from([*good, "urls", "subject", "extra"]), wrong).map(
        lambda drawn: {**drawn[0], drawn[1]: drawn[2]}
    )
    less = st.tuples(whole, st.sampled_from([*good])).map(
        lambda drawn: {name: value for name, value in drawn[0].items() if name != drawn[1]}
    )
    return st.one_of(whole, whole, whole, strange, less)


DESCRIPTOR = {
    "mediaType": st.sampled_from(
        [INDEX, IMAGE, "application/vnd.oci.image.layer.v1.tar", "a/b;c=d", "A/B"]
    ),
    "digest": st.sampled_from(DIGESTS),
    "size": st.sampled_from([1, 1, 1, 0, 2**62]),
    "annotations": st.none()
    | st.dictionaries(
        st.sampled_from(["vnd.docker.reference.digest", "x"]),
        st.sampled_from([*DIGESTS, None]),
        max_size=2,
    ),
    "platform": st.none()
    | st.fixed_dictionaries(
        {
            "os": st.sampled_from(["linux", "unknown", ""]),
            "architecture": st.sampled_from(["amd64", "arm", "unknown"]),
        }
    ),
    "data": st.none() | st.sampled_from(["AA==", "AQ==", "\ud800", "A"]),
}
DESCRIPTORS = near(DESCRIPTOR)
IMAGES = near(
    {
        "schemaVersion": st.sampled_from([2, 2, 1]),
        "mediaType": st.sampled_from([IMAGE, IMAGE.upper(), ""]),
        "config": DESCRIPTORS,
        "layers": st.lists(DESCRIPTORS, max_size=3),
    }
)
INDEXES = near(
    {
        "schemaVersion": st.just(2),
        "mediaType": st.sampled_from([INDEX, None]),
        "manifests": st.lists(DESCRIPTORS, max_size=4),
    }
)
TYPES = st.sampled_from(
    [None, INDEX, IMAGE, f"{INDEX}; charset=utf-8", "text/plain", "x/y", "\xff", ""]
)


INDEX_OF_A_BLOB = {
    "schemaVersion": 2,
    "mediaType": "application/vnd.oci.image.index.v1+json",
    "manifests": [
        {
            "mediaType": "application/vnd.oci.image.layer.v1.tar",
            "digest": digest_of(b"layer"),
            "size": 5,
        }
    ],
}


@fuzz(150)
@given(
    IMAGES | INDEXES,
    TYPES,
    st.lists(st.sampled_from(["linux/amd64", "linux/arm/v7"]), min_size=1, max_size=2),
)
@example(INDEX_OF_A_BLOB, None, ["linux/amd64"])
def test_what_is_nearly_a_manifest_is_one_or_a_content_error(document, content_type, wanted):
    body = json.dumps(document).encode()
    platforms = [parse_platform(text) for text in wanted]
    try:
        read = parse_manifest(body, content_type=content_type, digest=digest_of(body))
        named = [document["config"]] if document.get("config") else []
        named += [*(document.get("layers") or []), *(document.get("manifests") or [])]
        parts = [*filter(None, [read.config]), *read.layers, *read.children]
        assert sorted(each.digest for each in parts) == sorted(each["digest"] for each in named)
        trimmed, _ = trim_index(
            read, platforms, {each.digest: read._replace(children=()) for each in read.children}
        )
        if trimmed.manifest.body == body:
            return  # whole: what it names beside its children are blobs
        again = json.loads(trimmed.manifest.body)
        kept = [each.digest for each in trimmed.manifest.children]
        assert [each["digest"] for each in again.get("manifests") or []] == kept
    except ContentError as error:
        assert len(str(error).replace("\n", "x" * 1000)) < 1000  # noqa: PT017


# YAML.


def by_pyyaml(node: yaml.Node) -> Any:
    """Return a node of PyYAML's own composer as ours are; a merge or a repeated key is nothing for
    it.
    """
    tag = node.tag.removeprefix("tag:yaml.org,2002:").replace("value", "str")
    line, column = node.start_mark.line + 1, node.start_mark.column + 1
    if isinstance(node, yaml.SequenceNode):
        return Node(tag, line, column, items=[by_pyyaml(each) for each in node.value])
    if isinstance(node, yaml.MappingNode):
        pairs = [(by_pyyaml(key), by_pyyaml(value)) for key, value in node.value]
        if any(key.tag in ("map", "seq", "merge") for key, _ in pairs) or len(
            {key.text for key, _ in pairs}
        ) < len(pairs):
            raise LookupError
        return Node(
            tag, line, column, entries={key.text: Entry(key, value) for key, value in pairs}
        )
    return Node(tag, line, column, text=node.value)


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-99, 10**20), st.floats(), st.dates(), st.text(max_size=6),
    st.sampled_from(["a", "1.20", "${A:-b}", "yes", "~", "a: b", "- a", "#", " x", "x ", "'", '"', "a\nb", "*",
    "linux/amd64", "=",
        "0o7", "1_000", "190:20:30", "2024-01-02", "é\xa0", "<<", ".inf", "a" * 99]),
)  # fmt: skip
TREES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN.map(str), inner, max_size=4),
    max_leaves=15,
)


@fuzz(150)
@given(
    TREES,
    st.sampled_from([None, True, False]),
    st.sampled_from([2, 4, 7]),
    st.sampled_from([20, 200]),
    st.sampled_from(["\n", "\r\n"]),
)
def test_nodes_and_places_are_those_of_pyyaml(tree, flow, indent, width, end):
    text = yaml.safe_dump(
        tree,
        default_flow_style=flow,
        indent=indent,
        width=width,
        line_break=end,
        allow_unicode=True,
    )
    noted: list[str] = []
    try:
        wanted = by_pyyaml(yaml.compose(text, yaml.SafeLoader))
    except LookupError:
        return
    assert compose(text.encode(), lambda node, path, problem: noted.append(problem)) == wanted
    assert not noted


YAML = scraps(
    "a : { } [ ] ' \" *a << # --- ... \\x41 \\uD800 \ufeff 1.20 ~ é",
    *(": ", "- ", "\n", "  ", ", ", "&a ", "!!str ", "!x ", "|\n", ">-\n", "%YAML 1.1\n"),
    *("\t", "\r", "? ", "\x85", "\u2028"),
    most=16,
)


@fuzz(150)
@given(YAML)
@example("\ufeff\ufeff")
def test_any_scraps_of_yaml_are_what_pyyaml_composes_or_unreadable(text):
    noted: list[str] = []
    try:
        found = compose(
            text.encode("utf-8", "surrogatepass"), lambda node, path, problem: noted.append(problem)
        )
    except DocumentError as error:
        line = error.line
        column = error.column
        message = error.message
        assert line >= 1
        assert column >= 1
        assert message.isprintable()
        return
    if noted:
        return
    node = yaml.compose(text.removeprefix("\ufeff"), yaml.SafeLoader)
    try:
        assert found == (node and by_pyyaml(node))
    except LookupError:
        return


@fuzz(100)
@given(TREES)
def test_what_is_dumped_is_read_back(tree):
    assert repr(yaml.safe_load(dump(tree))) == repr(tree)


@pytest.mark.parametrize(
    "unit",
    ["[", "{", "- ", "a: ", "? ", "[a,", "{a: ", "&a [", "!x [", "\n" * 9 + "- ", "*a ", "'", "|"],
)
def test_deep_or_long_yaml_is_refused_in_bounded_work(unit):
    with contextlib.suppress(DocumentError):
        compose((unit * (200_000 // len(unit))).encode(), lambda node, path, problem: None)
