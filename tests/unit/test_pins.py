"""The lock: its lines, what differs between two of them, and a source whose tags it has."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _regsync.errors import ConfigError, RegistryError, Side, SyncError
from _regsync.oci import Descriptor, Manifest, is_digest, parse_manifest
from _regsync.pins import (
    Lock,
    LockedArtifact,
    LockedImage,
    LockedMapping,
    PinnedSource,
    SourceKey,
    compare,
    lines_of,
    locked_mapping,
    read_lock,
)
from _regsync.registry.repository import Locked, Repository
from _regsync.state import RepositoryKey
from conformance.images import Seed
from tests.fuzzing import fuzz, scraps, trees
from tests.unit.configs import read_mappings

RULES = "0123456789abcdef" * 4
SOURCE = SourceKey("docker.io/library/alpine")
ARM = SourceKey("docker.io/library/alpine", ("linux/arm64",))
SIGNATURE = "application/vnd.dev.sigstore.bundle.v0.3+json"


def digest(number: int) -> str:
    return f"sha256:{number:064x}"


def image(tag: str, number: int = 1, source: SourceKey = SOURCE, **more: Any) -> LockedImage:
    fields = {"pushed": "", "artifacts": (), **more}
    return LockedImage(source, tag, digest(number), **fields)


def lock(*images: LockedImage) -> Lock:
    return Lock([LockedMapping(source, RULES) for source in (SOURCE, ARM)], images)


def read(*lines: str) -> Lock:
    return read_lock([f"{line}\n".encode() for line in lines], "mirror.lock")


def trouble(*lines: bytes | str) -> str:
    """Return what is wrong with the first wrong one of lines, as `LINE: what`."""
    encoded = [line if isinstance(line, bytes) else line.encode() for line in lines]
    with pytest.raises(ConfigError) as refused:
        read_lock([line + b"\n" for line in encoded], "mirror.lock")
    return refused.value.message.removeprefix("mirror.lock:")


HEAD = '{"lock": 1}'
MAPPING = json.dumps({"mapping": SOURCE.repository, "rules": RULES})
LINE = json.dumps({"source": "docker.io/library/alpine:3.20", "digest": digest(1)})


def altered(**fields: object) -> str:
    """Return an image's line with other fields; None takes one out."""
    line = {**json.loads(LINE), **fields}
    return json.dumps({name: value for name, value in line.items() if value is not None})


# The lines.


def test_the_lines_are_those_of_the_document():
    signature = LockedArtifact(digest(3), digest(2), (SIGNATURE,))
    cosign = LockedArtifact(digest(4), digest(1), ("a/b", "c/d"), f"sha256-{1:064x}.sig")
    trimmed = image("3.20", source=ARM, pushed=digest(2), artifacts=(cosign, signature))
    assert list(lines_of(lock(trimmed, image("3.20"), image("3.19", 5)))) == [
        HEAD,
        MAPPING,
        '{"mapping": "docker.io/library/alpine", "platforms": ["linux/arm64"], '
        f'"rules": "{RULES}"}}',
        f'{{"source": "docker.io/library/alpine:3.19", "digest": "{digest(5)}"}}',
        LINE,
        '{"source": "docker.io/library/alpine:3.20", "platforms": ["linux/arm64"], '
        f'"digest": "{digest(1)}", "pushed": "{digest(2)}", "artifacts": ['
        f'{{"digest": "{digest(4)}", "type": ["a/b", "c/d"], "subject": "{digest(1)}", '
        f'"tag": "sha256-{1:064x}.sig"}}, '
        f'{{"digest": "{digest(3)}", "type": "{SIGNATURE}", "subject": "{digest(2)}"}}]}}',
    ]


_digests = st.integers(0, 9).map(digest)
_artifacts = st.builds(
    LockedArtifact,
    _digests,
    _digests,
    st.lists(st.sampled_from([SIGNATURE, "ä", "\ud800"]), max_size=2, unique=True).map(
        lambda types: tuple(sorted(types))
    ),
    st.sampled_from(["", "sha256-1.sig"]),
)
_images = st.builds(
    LockedImage,
    st.sampled_from([SOURCE, ARM]),
    st.sampled_from(["1", "10", "2", "v1.2.3", "latest"]),
    _digests,
    st.just("") | _digests,
    st.lists(_artifacts, max_size=3, unique=True).map(tuple),
)


@fuzz()
@given(st.lists(_images, max_size=8, unique_by=lambda each: (each.source, each.tag)))
def test_what_was_written_is_read_in_any_order_of_its_lines(images):
    written = list(lines_of(lock(*images)))
    head, *rest = written
    again = read("", head, *(f"{line}\r" for line in reversed(rest)), " ")
    assert list(lines_of(again)) == written
    assert again == lock(*images)
    assert (compare(again, lock(*images)), len(again)) == ([], len(images))


@pytest.mark.parametrize(
    "line",
    [
        b"\xff",
        "[" * 100_000,
        "[]",
        "{}",
        LINE[:-1] + f', "digest": "{digest(2)}"}}',  # a field that is there twice
        LINE.replace(": ", ":"),
        altered(source="docker.io/library/alpine"),
        altered(digest="sha256:12"),
        altered(size=1),
        "<<<<<<< HEAD",  # a conflict of a merge
        altered(artifacts={}),
        altered(artifacts=[{"digest": digest(1), "subject": "sha256:1"}]),
        '{"mapping": "a.test/b", "rules": "12"}',
        MAPPING.replace(f'"{SOURCE.repository}"', f'["{SOURCE.repository}"]'),
        MAPPING.replace(f'"{RULES}"', "1" * 64),
    ],
)
def test_the_first_wrong_line_is_named(line):
    other = "not a line that `regsync lock` writes"
    assert trouble(HEAD, MAPPING, LINE, line, "{") == f"4: {other}"


def test_an_image_has_one_line():
    assert trouble(HEAD, MAPPING, LINE, LINE).startswith("4: a second line for docker.io/library/")


@pytest.mark.parametrize(
    ("lines", "number"), [(['{"lock": 2}', "{}"], 1), ([MAPPING], 1), (["", ""], 1)]
)
def test_the_first_line_says_what_the_file_is(lines, number):
    assert trouble(*lines) == f"{number}: the first line of a lock must be {HEAD}"


@fuzz()
@given(
    st.lists(
        st.binary(max_size=20)
        | scraps('{ } [ ] , : "', LINE, "<<<<<<<", HEAD).map(
            lambda text: text.encode("utf-8", "surrogatepass")
        )
        | trees(
            "mapping source platforms rules digest artifacts subject type tag lock pushed",
            leaves=st.sampled_from([digest(1), RULES, "a.test/b:1", 1]),
        ).map(lambda tree: json.dumps(tree).encode()),
        max_size=4,
    )
)
def test_whatever_is_in_the_file_is_a_lock_or_an_error_that_can_be_shown(lines):
    try:
        found = read_lock([HEAD.encode(), MAPPING.encode(), *lines], "x")
    except ConfigError as refused:
        message = refused.message
    else:
        message = ""
        assert read_lock([line.encode() for line in lines_of(found)], "x") == found
    assert message.isprintable()
    assert len(message) < 600


# Which mappings it was made for.


def test_a_lock_is_for_the_rules_it_was_made_under():
    mapping = {"from": "alpine", "source": "hub", "tags": {"glob": "3.*"}}
    (made,) = read_mappings(mapping).mappings
    found = Lock([locked_mapping(made)])
    for same in (
        mapping,
        {**mapping, "to": "elsewhere"},
        {**mapping, "from": "library/alpine"},
        {**mapping, "targets": ["c"]},
    ):
        found.check(read_mappings(same).mappings)

    for other in (
        {"tags": {"glob": "3.*", "exclude": "*-rc"}},
        {"artifacts": {"exclude": ["a/b"]}},
        {"platforms": ["linux/arm64"]},
        {"source": "a"},
    ):
        with pytest.raises(
            ConfigError, match=r"mappings\[1\], from .* is not in the lock as it is"
        ):
            found.check(read_mappings(mapping, {**mapping, **other}).mappings)


def test_the_hash_of_rules_stays_what_it_is():
    """Another hash would make every lock that was written useless."""
    plain, rich, required, disabled = read_mappings(
        {"from": "x", "to": "1"},
        {
            "from": "x",
            "to": "2",
            "tags": {"glob": ["1.*", "2.*"], "semver": ">=1", "latest": 3, "immutable_tags": "v*"},
            "artifacts": {"include": ["a/b"], "require_artifacts": True},
        },
        {"from": "x", "to": "3", "artifacts": {"require_artifacts": True}},
        {"from": "x", "to": "4", "artifacts": {"enabled": False}},
    ).mappings
    assert [locked_mapping(each).rules_hash[:16] for each in (plain, rich)] == [
        "ed7d9ad8334242c8",
        "0f00bffac2c41b2f",
    ]
    # Whether an artifact is required decides nothing about which are taken.
    hashes = [locked_mapping(each).artifacts_hash for each in (plain, required, disabled)]
    assert [not each for each in hashes] == [True, True, False]


# What has changed.


def test_what_moved_came_went_and_changed():
    signature = LockedArtifact(digest(3), digest(1), (SIGNATURE,))
    before = lock(image("1"), image("2"), image("3"), image("4"), image("4", source=ARM))
    after = lock(
        image("2", 7),
        image("3", artifacts=(signature,)),
        image("4"),
        image("4", source=ARM, pushed=digest(8)),
        image("5"),
    )
    assert [(change.kind, str(change.image)) for change in compare(before, after)] == [
        ("gone", "docker.io/library/alpine:1"),
        ("moved", "docker.io/library/alpine:2"),
        ("changed", "docker.io/library/alpine:3"),
        ("came", "docker.io/library/alpine:5"),
        ("changed", "docker.io/library/alpine:4 (linux/arm64)"),
    ]
    assert [change.kind for change in compare(Lock(), after)] == ["came"] * 5


# A pinned source.

MADE = Seed(1).image()


class ByDigestAlone(Locked):
    """A source that fails every request by tag, every listing and every look-up."""

    side = Side.SOURCE
    key = store_key = RepositoryKey("docker.io", "library/alpine")

    def __init__(self, *, holds: bool = True):
        self._holds = holds
        self.asked = list[str]()

    def name_of(self, reference: str) -> str:
        return f"app:{reference}"

    async def get_manifest(self, reference: str, *, expected: Descriptor | None = None) -> Manifest:
        assert is_digest(reference)
        self.asked.append(reference)
        if not self._holds:
            raise RegistryError("no such manifest", status=404)
        return parse_manifest(MADE.body, content_type=MADE.media_type, digest=reference)


@pytest.mark.parametrize("held", [True, False])
async def test_a_tag_is_asked_for_by_its_locked_digest(held):
    source = ByDigestAlone(holds=held)
    pinned = PinnedSource(
        cast(Repository, source), {"3.20": image("3.20")._replace(digest=MADE.top)}
    )
    if held:
        assert (await pinned.get_manifest("3.20")).digest == MADE.top
    with pytest.raises(SyncError, match="the lock has no such tag"):
        await pinned.get_manifest("3.21")
    assert source.asked == [MADE.top] * held


async def test_what_the_source_has_removed_is_an_error_that_no_caller_takes_for_absence():
    source = ByDigestAlone(holds=False)
    pinned = PinnedSource(cast(Repository, source), {"1": image("1")})
    with pytest.raises(SyncError) as gone:
        await pinned.get_manifest(digest(1))
    assert not isinstance(gone.value, RegistryError)
    assert gone.value.code == "SOURCE_ERROR"
    assert "regsync lock --recheck`," in (gone.value.hint or "")
