"""Every case of the fault matrix (tests/fault_matrix.py), and a disk that is really full."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from conformance.content.images import Seed
from tests.ends import ROOT, Start, document, held, tags
from tests.fault_matrix import Case, cases, judge, parts, sorts
from tests.thinning import thinned

PARAMS = [pytest.param(case, id=case.name) for case in cases()]
# `--thorough`, or `python3 -m tests.fault_matrix`, plays all of them.
CASES = thinned(PARAMS, lambda cell: parts(*cell), lambda cell: sorts(*cell))


@pytest.mark.anyio
@pytest.mark.virtual_time
@pytest.mark.parametrize("case", CASES)
async def test_the_outcome_is_right_or_told_and_the_next_run_completes_it(case: Case) -> None:
    await judge(case)


def test_the_matrix_has_every_fault_on_every_side_as_often_as_it_can_be() -> None:
    every = {case.name for case in cases()}
    played = {param.id for param in CASES if not param.marks}
    assert len(every) == len(cases()) > 900
    assert len(played) > 250
    for names in (every, played):
        often = Counter(name.rpartition("-")[2] for name in names)
        assert often.keys() == {"once", "three", "ever"}
        assert min(often.values()) > len(names) / 5
        assert {name.partition("-")[0] for name in names} == {"source", "target", "disk", "clock"}
    assert {param.values[0].group for param in CASES} == {
        param.values[0].group for param in CASES if not param.marks
    }
    where = [{"-".join(name.split("-")[:2]) for name in names} for names in (every, played)]
    assert where[0] == where[1]


@pytest.mark.parametrize("limit", [1_500_000, 3000], ids=["blobs", "the state too"])
def test_a_full_disk_costs_time_and_fails_nothing(serve: Start, tmp_path: Path, limit: int) -> None:
    """A limit on the size of files stands in for the disk: the kernel refuses the write."""
    source, one, two = serve(), serve(), serve()
    image = (
        Seed(1)
        .image(sizes=(3_000_000, 2_000_000, 900, 1000, 1100))
        .load_into(source.app, "app", tag="v1")
    )
    file = tmp_path / "mirror.yaml"
    registries = {"source": source, "one": one, "two": two}
    many = {
        f"repository-{n}": image.load_into(source.app, f"repository-{n}", tag="v1")
        for n in range(8)
    }
    mappings = [{"from": name, "tags": tags("v1")} for name in ("app", *many)]
    file.write_text(document(registries, *mappings))

    def run(**more: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "regsync.py"), "sync", "-c", str(file)]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=60, **more
        )

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    ran = run(preexec_fn=limited)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("targets that keep pace share a reading") == 1
    assert ("no state is kept" in ran.stderr) == (limit < 10_000)
    assert "Traceback" not in ran.stderr
    assert all(held(target, name, image) for target in (one, two) for name in ("app", *many))
    assert not list((tmp_path / ".regsync").rglob("*.partial"))
    again = run()
    assert (again.returncode, again.stdout) == (0, "")
    assert "warning: the state" not in again.stderr
