"""What `tools/bench.py compare` finds, judges and prints, without a program that is not ours."""

from __future__ import annotations

import asyncio
import gc
import json
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.content.fleets import Fleet
from tools import bench
from tools.benches import compare
from tools.benches.compare import Scene, Theatre, fleet
from tools.benches.peers import PEERS, Job, Ours, find_peers
from tools.benches.props import CutLine, delay
from tools.benches.runner import BenchError
from tools.benches.tables import Measured, Outcome, Side, tables

# ---------------------------------------------------------------- the programs


def program(path: Path, version: str) -> str:
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    return str(path)


def test_programs_on_the_path_are_told_by_their_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours is called regsync too: it must not be measured as regclient's."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_peers([]) == []
    program(tmp_path / "regsync", "regsync 0.1.0")
    program(tmp_path / "skopeo", "skopeo version 1.22.0")
    [found] = find_peers([])
    assert (found.name, found.version()) == ("skopeo", "skopeo version 1.22.0")
    with pytest.raises(BenchError, match=r"is not regclient: it says 'regsync 0\.1\.0'"):
        find_peers([f"regclient={tmp_path / 'regsync'}"])

    elsewhere = program(tmp_path / "other", "VCSTag: v1 VCSRef: 725072f")
    peers = find_peers([f"regclient={elsewhere}"])
    assert [(peer.name, peer.version()) for peer in peers] == [
        ("regclient", "v1"),
        ("skopeo", "skopeo version 1.22.0"),
    ]


@pytest.mark.parametrize("text", ["regclient", "docker=/bin/true", "=/bin/true"])
def test_a_program_that_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(BenchError, match="NAME one of regclient, ocync, skopeo, crane"):
        find_peers([text])


def test_a_program_without_a_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="does not say its version"):
        find_peers([f"crane={tmp_path / 'absent'}"])


def test_every_program_is_told_all_of_a_job(tmp_path: Path) -> None:
    job = Job(tmp_path, "s:1", ("a:1", "b:1"), {"x/one": "m/one", "x/two": "m/two"})
    said = {}
    for name, kind in PEERS.items():
        commands = kind(f"/bin/{name}").commands(job)
        files = [file.read_text() for file in tmp_path.iterdir()]
        said[name] = json.dumps(commands) + "".join(files)
        for file in tmp_path.iterdir():
            file.unlink()
        assert all(command[0] == f"/bin/{name}" for command in commands)

    for name, text in said.items():
        for part in ("s:1", "a:1", "b:1", "x/one", "x/two"):
            assert part in text, (name, part)


# ---------------------------------------------------------------- what is right


SMALL = Fleet(repositories=2, tags=2, shared=1, own=1, size=500)
SCENE = Scene("a few", lambda: fleet(SMALL), phases=("cold", "unchanged"), has_least=True)


def test_our_own_run_is_counted_and_right(tmp_path: Path) -> None:
    least = {phase: numbers for phase, *numbers in compare.least_requests_and_bytes(SCENE)}
    outcomes = list(Theatre(tmp_path, [Ours()], 1).play("few", SCENE))
    assert [(run.phase, run.status, run.wrong) for run in outcomes] == [
        ("cold", 0, ""),
        ("unchanged", 0, ""),
    ]
    for run in outcomes:
        assert [run.requests, run.bytes] == least[run.phase]
        assert (run.is_right, run.mistakes, run.said) == (True, 0, "")


class Nothing(Ours):
    """A program that says that all is well, and does nothing."""

    def commands(self, job: Job) -> list[list[str]]:
        return [["/bin/true"]]


class Sulking(Ours):
    """A program that does nothing, and says so."""

    def commands(self, job: Job) -> list[list[str]]:
        return [["/bin/sh", "-c", "echo 'error: no mood' >&2; echo bye >&2; exit 3"], ["/bin/true"]]


def test_what_is_missing_is_said_whatever_the_program_says(tmp_path: Path) -> None:
    [run] = Theatre(tmp_path, [Nothing()], 1).play("few", replace(SCENE, phases=("cold",)))
    assert (run.status, run.is_right) == (0, False)
    assert run.wrong == "4 of 4 tags are missing or name something else"

    [run] = Theatre(tmp_path, [Sulking()], 1).play("few", replace(SCENE, phases=("cold",)))
    assert (run.status, run.said) == (3, "error: no mood")


def test_referrers_and_an_index_of_one_platform_are_looked_at(tmp_path: Path) -> None:
    theatre = Theatre(tmp_path, [Ours()], 1)
    for name in ("signed", "platform"):
        scene = replace(compare.SCENES[name], phases=("cold",))
        if name == "platform":
            small = replace(SMALL, platforms=("linux/amd64", "linux/arm64"))
            scene = replace(scene, now=lambda small=small: fleet(small))
        assert [run.wrong for run in theatre.play(name, scene)] == [""], name

    whole = replace(scene, now=lambda: fleet(replace(SMALL, platforms=("linux/amd64", "a/b"))))
    [run] = Theatre(tmp_path, [AllPlatforms()], 1).play("platform", whole)
    assert run.wrong == "4 of 4 tags are missing or name something else"
    unsigned = replace(compare.SCENES["signed"], phases=("cold",))
    [run] = Theatre(tmp_path, [NoArtifacts()], 1).play("signed", unsigned)
    assert "40 of 40 referrers are missing" in run.wrong


def test_who_cannot_leave_platforms_out_is_not_asked_to(tmp_path: Path) -> None:
    unable = [PEERS["crane"]("/bin/false"), PEERS["skopeo"]("/bin/false")]
    scene = replace(compare.SCENES["platform"], now=lambda: fleet(SMALL))
    assert list(Theatre(tmp_path, unable, 1).play("platform", scene)) == []


class AllPlatforms(Ours):
    """A program that cannot leave platforms out."""

    def commands(self, job: Job) -> list[list[str]]:
        return super().commands(job._replace(platform=""))


class NoArtifacts(Ours):
    """A program that does not know of referrers."""

    def commands(self, job: Job) -> list[list[str]]:
        return super().commands(job._replace(has_artifacts=False))


async def talk(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"12345")
    try:
        return await reader.read(5)
    except ConnectionError:
        return b""
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def test_a_line_is_cut_once_and_comes_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            while data := await reader.read(100):
                writer.write(data)

    async def scene() -> list[bytes]:
        ended = asyncio.Event()
        monkeypatch.setattr("tools.benches.props.until_stdin_ends", ended.wait)
        async with await asyncio.start_server(echo, "127.0.0.1", 0) as far:
            port = far.sockets[0].getsockname()[1]
            line = CutLine(0.0, 8, f"127.0.0.1:{port}")
            running = asyncio.ensure_future(line.run())
            await line.is_open.wait()
            here = int(capsys.readouterr().out.rpartition(":")[2])
            heard = [await talk(here), await talk(here)]
            await line.is_back.wait()
            heard.append(await talk(here))
            ended.set()
            await running
        return heard

    first, _, last = asyncio.run(scene())
    assert (first, last) == (b"12345", b"12345")


def test_a_line_whose_far_end_stays_open_is_not_lost_to_the_collector(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else holds the tasks of a connection that the near end has closed."""
    complaints = list[dict[str, object]]()

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        is_listening = asyncio.Event()
        near_has_ended = asyncio.Event()
        ended = asyncio.Event()

        async def until_ended() -> None:
            is_listening.set()
            await ended.wait()

        monkeypatch.setattr("tools.benches.props.until_stdin_ends", until_ended)

        async def keep_open(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            near_has_ended.set()
            await ended.wait()
            writer.close()

        async with await asyncio.start_server(keep_open, "127.0.0.1", 0) as far:
            port = far.sockets[0].getsockname()[1]
            running = asyncio.ensure_future(delay(0.0, f"127.0.0.1:{port}"))
            await is_listening.wait()
            here = int(capsys.readouterr().out.rpartition(":")[2])
            _, writer = await asyncio.open_connection("127.0.0.1", here)
            writer.close()
            await near_has_ended.wait()
            gc.collect()
            ended.set()
            await running

    asyncio.run(scene())
    assert complaints == []


# ---------------------------------------------------------------- tables


def outcome(
    peer: str, requests: int, *, wall: float = 1.0, status: int = 0, wrong: str = ""
) -> Outcome:
    side = Side({"GET blob": requests - 1}, 500_000)
    one = Side({"PUT manifest": 1}, 500_000)
    return Outcome("s", "cold", peer, status, wrong, "", 0, side, one, wall, 0.5, 20_000_000)


def measured(*outcomes: Outcome) -> Measured:
    peers = list(dict.fromkeys(run.peer for run in outcomes))
    return Measured(
        {"counts": "a machine"},
        dict.fromkeys(peers, "1.0"),
        dict.fromkeys(peers, "as it comes"),
        {"s": "a scene", "t": "another scene", "u": "a third scene"},
        list(outcomes),
        {"s, cold": (10, 1_000_000)},
    )


def test_a_run_that_was_wrong_is_never_the_best() -> None:
    made = measured(
        outcome("this", 12), outcome("quick", 5, wrong="all is missing"), outcome("slow", 20)
    )
    lines = tables(made).splitlines()
    assert "| Requests | least | this | quick | slow |" in lines
    assert "| a scene: first run | 10 | **12** | 5 ✗ | 20 |" in lines
    assert "- a scene, first run: quick: all is missing" in lines


def test_rows_in_which_we_lose_come_first_and_medians_are_shown() -> None:
    worse = [replace(run, scene="t") for run in (outcome("this", 30), outcome("other", 10))]
    better = [outcome("this", requests) for requests in (9, 10, 40)]
    best = [replace(run, scene="u") for run in (outcome("this", 2), outcome("other", 20))]
    made = measured(*best, *better, outcome("other", 20), *worse)
    lines = [line for line in tables(made).splitlines() if "first run |" in line]
    assert lines[:3] == [
        "| another scene: first run |  | 30 | **10** |",
        "| a scene: first run | 10 | **10** | 20 |",
        "| a third scene: first run |  | **2** | 20 |",
    ]


def test_where_we_are_wrong_comes_before_all_others() -> None:
    wrong = [
        replace(run, scene="t") for run in (outcome("this", 5, status=-9), outcome("other", 10))
    ]
    lines = tables(measured(outcome("this", 30), outcome("other", 10), *wrong)).splitlines()
    rows = [line for line in lines if "first run |" in line]
    assert rows[0] == "| another scene: first run |  | 5 ✗ | **10** |"
    assert "- another scene, first run: this: not done in time" in lines


def test_tables_are_written_between_the_marks_of_a_document(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(measured(outcome("this", 12)).document()))
    document = tmp_path / "doc.md"
    document.write_text("A\n<!-- measured: begin -->\nstale\n<!-- measured: end -->\nB\n")
    assert bench.main(["compare", "--table", str(kept), "--into", str(document)]) == 0
    text = document.read_text()
    assert text.startswith("A\n<!-- measured: begin -->\n- counts: a machine\n")
    assert text.endswith("<!-- measured: end -->\nB\n")
    assert "stale" not in text
    document.write_text("nothing")
    assert bench.main(["compare", "--table", str(kept), "--into", str(document)]) == 1


def test_measured_runs_can_be_kept_as_json() -> None:
    made = measured(outcome("this", 12), outcome("other", 20))
    assert Measured.from_document(json.loads(json.dumps(made.document()))) == made


def test_runs_of_some_scenes_replace_those_that_are_kept() -> None:
    kept = measured(outcome("this", 12), replace(outcome("this", 9), scene="t"))
    made = measured(outcome("this", 1))
    made.outcomes.clear()
    made.take_over(kept, but={"t"})
    assert [(run.scene, run.requests) for run in made.outcomes] == [("s", 12)]
    made.versions["this"] = "2.0"
    with pytest.raises(BenchError, match=r"this was 1\.0 there, and is 2\.0 now"):
        made.take_over(kept, but=())


def test_a_kind_stands_for_all_of_its_scenes() -> None:
    times = compare.chosen_scenes(["times"])
    assert times
    assert all(scene.is_timed for scene in times.values())
    assert list(compare.chosen_scenes([])) == list(compare.SCENES)
    assert list(compare.chosen_scenes(["away", "cold"])) == ["cold", "away"]
    with pytest.raises(BenchError, match="no such case: nothing"):
        compare.chosen_scenes(["nothing"])
