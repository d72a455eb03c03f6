"""Every case of the fault matrix (tests/fault_matrix.py), and a disk that is really full."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import pytest

from conformance.content.images import Seed
from tests.ends import ROOT, document, held, tags
from tests.fault_matrix import cases, endpoint, faults_by_side, frequency, judge
from tests.thinning import thinned, thorough

PARAMS = [pytest.param(case, id=case.name) for case in cases()]
# `--thorough` plays all of them.
CASES = thinned(
    PARAMS,
    lambda cell: faults_by_side(*cell),
    lambda cell: endpoint(*cell),
    lambda cell: frequency(*cell),
)


@pytest.mark.anyio
@pytest.mark.virtual_time
@pytest.mark.parametrize("case", CASES)
async def test_the_outcome_is_right_or_told_and_the_next_run_completes_it(case):
    await judge(case)


def test_an_ordinary_run_has_every_fault_on_every_side_as_often_as_it_can_be():
    every = {case.name for case in cases()}
    played = {param.id for param in CASES if not param.marks}
    assert len(every) == len(cases())
    assert len(played) < len(every) / 10
    for view in (
        lambda name: name.rpartition("-")[2],  # how often
        lambda name: name.split("-")[:2],  # where
        lambda name: [name.partition("-")[0], name.split("-")[2:-1]],  # what, on which side
    ):
        assert {str(view(name)) for name in played} == {str(view(name)) for name in every}


@pytest.mark.process
@pytest.mark.parametrize(
    "limit", [thorough(pytest.param(1_500_000, id="blobs")), pytest.param(3000, id="the state too")]
)
def test_a_full_disk_costs_time_and_fails_nothing(serve, tmp_path, limit):
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
    assert ran.stderr.count("be staged") == 1
    assert ("no state" in ran.stderr) == (limit < 10_000)
    assert "Traceback" not in ran.stderr
    assert all(held(target, name, image) for target in (one, two) for name in ("app", *many))
    assert not list((tmp_path / ".regsync").rglob("*.partial"))
    again = run()
    assert (again.returncode, again.stdout) == (0, "")
    assert "warning: the state" not in again.stderr
