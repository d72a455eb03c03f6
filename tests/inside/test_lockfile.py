"""The lines of a lock: what is written is read again, one image is one line, and each wrong line is
named.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _regsync.errors import ConfigError
from _regsync.sync.lockfile import (
    Change,
    Lock,
    LockedArtifact,
    LockedImage,
    LockedMapping,
    SourceKey,
    compare,
    lines_of,
    locked_mapping,
    read_lock,
)
from tests.fuzzing import fuzz, scraps, trees
from tests.unit.configs import read_mappings

NOON = 1_795_348_800  # 2026-11-22T12:00:00Z
RULES = "0123456789abcdef" * 4
SOURCE = SourceKey("docker.io/library/alpine", None)
ARM = SourceKey("docker.io/library/alpine", ("linux/arm64",))
SIGNATURE = "application/vnd.dev.sigstore.bundle.v0.3+json"


def digest(number: int) -> str:
    return f"sha256:{number:064x}"


def image(tag: str, number: int = 1, source: SourceKey = SOURCE, **more: Any) -> LockedImage:
    fields = {"pushed": None, "artifacts": (), "first_seen": NOON, **more}
    return LockedImage(source, tag, digest(number), **fields)


def lock(*images: LockedImage) -> Lock:
    return Lock([LockedMapping(source, RULES) for source in (SOURCE, ARM)], images)


def read(*lines: str) -> Lock:
    return read_lock([f"{line}\n".encode() for line in lines], "mirror.lock")


def problems(*lines: bytes | str) -> list[str]:
    """Return what is wrong with lines, as `LINE: what`."""
    encoded = [line if isinstance(line, bytes) else line.encode() for line in lines]
    with pytest.raises(ConfigError) as refused:
        read_lock([line + b"\n" for line in encoded], "mirror.lock")
    assert refused.value.hint is not None
    assert {problem.file for problem in refused.value.problems} == {"mirror.lock"}
    return [f"{problem.line}: {problem.message}" for problem in refused.value.problems]


HEAD = '{"lock": 1}'
MAPPING = json.dumps({"mapping": SOURCE.repository, "rules": RULES})
LINE = json.dumps(
    {
        "source": "docker.io/library/alpine:3.20",
        "digest": digest(1),
        "first_seen": "2026-11-22T12:00:00Z",
    }
)


def altered(**fields: object) -> str:
    """Return an image's line with other fields; None takes one out."""
    line = {**json.loads(LINE), **fields}
    return json.dumps({name: value for name, value in line.items() if value is not None})


# What is written.


def test_the_lines_are_those_of_the_document() -> None:
    signature = LockedArtifact(digest(3), digest(2), (SIGNATURE,))
    cosign = LockedArtifact(digest(4), digest(1), ("a/b", "c/d"), f"sha256-{1:064x}.sig")
    trimmed = image("3.20", source=ARM, pushed=digest(2), artifacts=(cosign, signature))
    assert list(lines_of(lock(trimmed, image("3.20"), image("3.19", 5)))) == [
        HEAD,
        MAPPING,
        '{"mapping": "docker.io/library/alpine", "platforms": ["linux/arm64"], '
        f'"rules": "{RULES}"}}',
        f'{{"source": "docker.io/library/alpine:3.19", "digest": "{digest(5)}", '
        '"first_seen": "2026-11-22T12:00:00Z"}',
        LINE,
        '{"source": "docker.io/library/alpine:3.20", "platforms": ["linux/arm64"], '
        f'"digest": "{digest(1)}", "pushed": "{digest(2)}", "artifacts": ['
        f'{{"digest": "{digest(4)}", "type": ["a/b", "c/d"], "subject": "{digest(1)}", '
        f'"tag": "sha256-{1:064x}.sig"}}, '
        f'{{"digest": "{digest(3)}", "type": "{SIGNATURE}", "subject": "{digest(2)}"}}], '
        '"first_seen": "2026-11-22T12:00:00Z"}',
    ]


_digests = st.integers(0, 9).map(digest)
_artifacts = st.builds(
    LockedArtifact,
    _digests,
    _digests,
    st.lists(st.sampled_from([SIGNATURE, "ä", "\ud800"]), max_size=2, unique=True).map(
        lambda types: tuple(sorted(types))
    ),
    st.none() | st.just("sha256-1.sig"),
)
_images = st.builds(
    LockedImage,
    st.sampled_from([SOURCE, ARM]),
    st.sampled_from(["1", "10", "2", "v1.2.3", "latest"]),
    _digests,
    st.none() | _digests,
    st.lists(_artifacts, max_size=3, unique=True).map(tuple),
    st.integers(0, 4_000_000_000),
)


@fuzz()
@given(st.lists(_images, max_size=8, unique_by=lambda each: (each.source, each.tag)))
def test_what_was_written_is_read_in_any_order_of_its_lines(images: list[LockedImage]) -> None:
    written = list(lines_of(lock(*images)))
    head, *rest = written
    random.Random(len(rest)).shuffle(rest)
    again = read(head, *rest)
    assert list(lines_of(again)) == written
    assert compare(again, lock(*images)) == []
    assert len(again) == len(images)


def test_an_image_that_moves_is_one_line() -> None:
    tags = [f"1.{number}" for number in range(20)]
    before = list(lines_of(lock(*map(image, tags))))
    after = list(lines_of(lock(*(image(tag, 9 if tag == "1.7" else 1) for tag in tags))))
    assert len(before) == len(after)
    assert sum(old != new for old, new in zip(before, after, strict=True)) == 1


# What is read.


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_ends_of_lines_are_any_platforms(end: str) -> None:
    text = end.join([HEAD, MAPPING, LINE, ""]) if end else "\n".join([HEAD, MAPPING, LINE])
    found = read_lock(text.encode().splitlines(keepends=True), "x")
    assert found.images_of(SOURCE) == {"3.20": image("3.20")}


def test_blank_lines_and_the_order_of_platforms_mean_nothing() -> None:
    both = ("linux/amd64", "linux/arm64/v8")
    mapping = {"mapping": "a.test/x", "platforms": [*reversed(both)], "rules": RULES}
    found = read(HEAD, "", json.dumps(mapping), " ", "")
    assert found.mappings == {LockedMapping(SourceKey("a.test/x", both), RULES)}


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "not JSON"),
        (b"\xff", "utf-8"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "neither `source` nor `mapping`"),
        (HEAD, "neither `source` nor `mapping`"),
        ('{"source": "a.test/b:1", "source": "a.test/b:2"}', "a field appears twice"),
        (LINE, "the same as line 3"),
        (MAPPING, "the same as line 2"),
        (altered(source="a.test/b:1"), "a.test/b:1: the lock has no such mapping"),
        (altered(platforms=["linux/s390x"]), "(linux/s390x): the lock has no such mapping"),
        (altered(platforms=[]), "`platforms` is not a list of platforms"),
        (altered(platforms=["linux"]), "'linux' is not OS/ARCH"),
        (altered(platforms=[[]]), "is not OS/ARCH"),
        (altered(source="docker.io/library/alpine"), "`source` does not end with a tag"),
        (altered(source=1), "`source` is missing, or is not text"),
        (altered(digest=None), "`digest` is missing"),
        (altered(digest="sha256:12"), "'sha256:12' is not a digest"),
        (altered(pushed="sha512:12"), "is not a digest"),
        (altered(first_seen=None), "`first_seen` is missing"),
        (altered(first_seen="yesterday"), "is not a time like"),
        (altered(first_seen="2026-02-30T00:00:00Z"), "day is out of range"),
        (altered(size=1), "unknown field 'size'"),
        (altered(artifacts={}), "`artifacts` is not a list"),
        (altered(artifacts=[1]), "an artifact is not a JSON object"),
        (altered(artifacts=[{"digest": digest(1)}]), "`subject` is missing"),
        (altered(artifacts=[{"digest": digest(1), "subject": digest(2), "type": 1}]), "`type`"),
        (altered(artifacts=[{"digest": digest(1), "subject": digest(2), "tag": "/"}]), "not a tag"),
        ('{"mapping": "a.test/b", "rules": "12"}', "is not a digest"),
        ('{"mapping": "a.test/b"}', "`rules` is missing"),
    ],
)
def test_each_wrong_line_is_named(line: bytes | str, text: str) -> None:
    (problem,) = problems(HEAD, MAPPING, LINE, line)
    assert problem.startswith("4: ")
    assert text in problem
    assert len(problem) < 520


def test_all_wrong_lines_are_named_at_once_up_to_fifty() -> None:
    assert [each.partition(":")[0] for each in problems(HEAD, "{", MAPPING, "[]", LINE, "1")] == [
        *("2", "4", "6")
    ]
    assert len(problems(HEAD, *["{}"] * 60)) == 50
    strays = [altered(source=f"a.test/b:{number}") for number in range(60)]
    assert len(problems(HEAD, MAPPING, *strays)) == 50


@pytest.mark.parametrize("mark", ["<<<<<<< HEAD", "||||||| 1234", "=======", ">>>>>>> topic"])
def test_the_marks_of_a_merge_are_one_clear_error(mark: str) -> None:
    (problem,) = problems(HEAD, MAPPING, "{", mark, LINE, LINE)
    assert problem == "4: conflict marks of a merge: take one side of each conflict"


@pytest.mark.parametrize(
    ("first", "text"),
    [
        ('{"lock": 2}', "has version 2, and this regsync reads only version 1"),
        ('{"lock": true}', 'the first line of a lock must be {"lock": 1}'),
        (MAPPING, 'the first line of a lock must be {"lock": 1}'),
        ("mappings: []", "not JSON"),
    ],
)
def test_the_first_line_says_what_the_file_is(first: str, text: str) -> None:
    assert text in problems(first, "{}")[0]
    assert problems(b"", "") == ["0: the file is empty"]


@fuzz()
@given(
    st.lists(
        st.binary(max_size=20)
        | scraps('{ } [ ] , : "', LINE, "<<<<<<<", HEAD).map(
            lambda text: text.encode("utf-8", "surrogatepass")
        )
        | trees(
            "mapping source platforms rules digest artifacts first_seen subject type tag lock pushed",
            leaves=st.sampled_from([digest(1), RULES, "a.test/b:1", "2026-11-22T12:00:00Z", 1]),
        ).map(lambda tree: json.dumps(tree).encode()),
        max_size=4,
    )
)
def test_whatever_is_in_the_file_is_a_lock_or_an_error_that_can_be_shown(
    lines: list[bytes],
) -> None:
    try:
        found = read_lock([HEAD.encode(), MAPPING.encode(), *lines], "x")
    except ConfigError as refused:
        for problem in refused.problems:
            assert problem.message.isprintable()
            assert len(problem.message) < 600
    else:
        assert read_lock([line.encode() for line in lines_of(found)], "x") == found


# Which mappings it was made for.


def test_a_lock_is_for_the_rules_it_was_made_under() -> None:
    mapping = {"from": "alpine", "source": "hub", "tags": {"glob": "3.*"}}
    (made,) = read_mappings(mapping).mappings
    found = Lock([locked_mapping(made)])
    found.check([made])
    for same in (
        {**mapping, "to": "elsewhere"},
        {**mapping, "from": "library/alpine"},
        {**mapping, "targets": ["c"]},
    ):
        found.check(read_mappings(same).mappings)

    for other, text in (
        (
            {**mapping, "tags": {"glob": "3.*", "exclude": "*-rc"}},
            "has changed since the lock was written",
        ),
        ({**mapping, "artifacts": {"exclude": ["a/b"]}}, "has changed since the lock was written"),
        ({**mapping, "platforms": ["linux/arm64"]}, "is not in the lock"),
        ({**mapping, "source": "a"}, "is not in the lock"),
    ):
        with pytest.raises(ConfigError, match=text) as refused:
            found.check(read_mappings(mapping, other).mappings)
        assert refused.value.message.startswith("mappings[1], from ")
        assert "regsync lock" in str(refused.value.hint)
    with pytest.raises(ConfigError, match=r"mappings\[0\].* is not in the lock \(and 1 more\)"):
        Lock().check(read_mappings(mapping, {**mapping, "to": "elsewhere"}).mappings)


def test_a_mapping_is_named_by_host_repository_and_platforms() -> None:
    platforms = ["linux/arm64", "linux/amd64", "linux/arm64"]
    first, second = read_mappings(
        {"from": "alpine", "source": "hub"},
        {"from": "x", "source": "b", "targets": ["a"], "platforms": platforms},
    ).mappings
    assert locked_mapping(first).source == SOURCE
    assert locked_mapping(second).source == SourceKey(
        "b.test:5000/x", ("linux/amd64", "linux/arm64")
    )
    assert str(locked_mapping(second).source) == "b.test:5000/x (linux/amd64, linux/arm64)"


def test_what_artifacts_are_taken_is_told_apart_from_the_tags() -> None:
    """Whether one is required decides nothing about which are taken."""
    plain, required, disabled, other = read_mappings(
        {"from": "x", "to": "1"},
        {"from": "x", "to": "2", "artifacts": {"require_artifacts": True}},
        {"from": "x", "to": "3", "artifacts": {"enabled": False}},
        {"from": "x", "to": "4", "artifacts": {"enabled": False}, "tags": {"glob": "1.*"}},
    ).mappings
    lines = [locked_mapping(each) for each in (plain, required, disabled, other)]
    assert [line.artifacts_hash is None for line in lines] == [True, True, False, False]
    assert lines[2].artifacts_hash == lines[3].artifacts_hash
    assert len({line.rules_hash for line in lines}) == 4
    found = Lock(lines)
    assert read_lock([line.encode() for line in lines_of(found)], "x") == found


def test_the_hash_of_rules_stays_what_it_is() -> None:
    """Another hash would make every lock that was written useless."""
    (plain,) = read_mappings({"from": "x"}).mappings
    (rich,) = read_mappings(
        {
            "from": "x",
            "tags": {"glob": ["1.*", "2.*"], "semver": ">=1", "latest": 3, "immutable_tags": "v*"},
            "artifacts": {"include": ["a/b"], "require_artifacts": True},
        }
    ).mappings
    assert [locked_mapping(each).rules_hash[:16] for each in (plain, rich)] == [
        "ed7d9ad8334242c8",
        "0f00bffac2c41b2f",
    ]


# What has changed.


def test_what_moved_came_went_and_changed() -> None:
    signature = LockedArtifact(digest(3), digest(1), (SIGNATURE,))
    before = lock(image("1"), image("2"), image("3"), image("4"), image("4", source=ARM))
    after = lock(
        image("2", 7),
        image("3", artifacts=(signature,)),
        image("4", first_seen=5),
        image("4", source=ARM, pushed=digest(8)),
        image("5"),
    )
    found = compare(before, after)
    assert [(change.kind, str(change.image)) for change in found] == [
        ("gone", "docker.io/library/alpine:1"),
        ("moved", "docker.io/library/alpine:2"),
        ("changed", "docker.io/library/alpine:3"),
        ("came", "docker.io/library/alpine:5"),
        ("changed", "docker.io/library/alpine:4 (linux/arm64)"),
    ]
    assert found[1] == Change(image("2"), image("2", 7))
    assert [change.kind for change in compare(Lock(), after)] == ["came"] * 5
