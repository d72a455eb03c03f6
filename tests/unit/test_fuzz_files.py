"""Manifests: a value, or the one declared error; what is read is what JSON reads."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from _regsync.errors import ContentError
from _regsync.oci import digest_of, parse_manifest, parse_platform, trim_index
from tests.fuzzing import fuzz, trees

INDEX, IMAGE = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
)
DIGESTS = [digest_of(bytes([number])) for number in range(4)]


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
