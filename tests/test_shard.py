"""Which mappings a shard has: all of them are somebody's, none is two's, and what belongs together
stays together.
"""

from __future__ import annotations

from pathlib import Path

from conformance.content.images import Seed
from conformance.server.sockets import Server
from tests.ends import Start, document, run_regsync, tags

# --- the command
# --------------------------------------------------------------------------------------------


def load_into(server: Server, repository: str, *more_tags: str) -> None:
    Seed(1).image().load_into(server.app, repository, "v1", *more_tags)


def test_shards_together_copy_everything_once_and_an_empty_one_ends_well(
    serve: Start, tmp_path: Path
) -> None:
    source, target = serve(), serve()
    for name in "ab":
        load_into(source, name, "v2")
    mappings = [
        {"from": name, "to": to, "tags": tags(tag)}
        for name, tag, to in (
            ("a", "v1", "one/b"),
            ("a", "v2", "one/c"),
            ("b", "v1", "two/a"),
            ("b", "v2", "two/c"),
        )
    ]
    path = tmp_path / "mirror.yaml"
    path.write_text(document({"source": source, "target": target}, *mappings))
    done: list[str] = []
    for number in range(3):
        ran = run_regsync("sync", "--json", "-v", "-c", str(path), "--shard", f"{number}/3")
        assert ran.status == 0, ran.err
        done += [each["target"].partition("/")[2] for each in ran.images]
        assert f"info: shard {number} of 3: {len(ran.images)} of 4 mappings" in ran.err
        assert (tmp_path / ".regsync" / f"shard-{number}-of-3").is_dir()
    assert sorted(done) == ["one/b:v1", "one/c:v2", "two/a:v1", "two/c:v2"]
    assert len(ran.images) == 0, "no name is the last one's"
    again = run_regsync(
        "sync", "--json", "-c", str(path), "--shard", "/3", env={"JOB_COMPLETION_INDEX": "0"}
    )
    assert [each["status"] for each in again.images] == ["skipped"] * 2, "its state was found again"


def test_a_rehearsal_is_of_the_shard(serve: Start) -> None:
    source, target = serve(), serve()
    for name in ("a", "b"):
        load_into(source, name)
    text = document(
        {"source": source, "target": target}, *({"from": name, "tags": tags("v1")} for name in "ab")
    )
    ran = run_regsync("sync", "--dry-run", "--json", "-c", "-", "--shard", "1/2", stdin=text)
    assert ran.status == 0, ran.err
    assert {each.repository for each in source.journal.entries} == {"b"}


def test_a_shard_that_is_none_stops_before_anything_is_asked() -> None:
    text = document({"source": "s.test", "target": "t.test"}, {"from": "a"})
    for words, environ in (
        (["--shard", "2/2"], {}),
        (["--shard=/2"], {}),
        (["--shard=/2"], {"JOB_COMPLETION_INDEX": "x"}),
    ):
        ran = run_regsync("sync", "-c", "-", *words, stdin=text, env=environ)
        assert (ran.status, ran.out) == (3, "")
        assert "error: CONFIG_ERROR: --shard " in ran.err
        assert "hint: " in ran.err
