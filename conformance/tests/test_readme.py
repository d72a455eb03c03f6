"""The README's programs run as they stand there; the paths that it names are there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from conformance.registry import App

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "conformance" / "README.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_are_programs() -> None:
    assert len(PROGRAMS) == 2


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_runs_as_it_stands(program: str) -> None:
    exec(compile(program, "README.md", "exec", dont_inherit=True), {"__name__": "readme"})


def test_every_option_of_a_registry_is_told() -> None:
    told = re.findall(r"(?m)^\| (`\w+`(?:, `\w+`)*) \| .* \| .* \|$", README)
    options = [name for cell in told for name in re.findall(r"\w+", cell)]
    assert [name for name in inspect.signature(App).parameters if name not in options] == []


def test_every_path_is_there() -> None:
    for path in set(re.findall(r"\b(?:tools|tests|conformance|docs)/[\w./-]*", README)):
        assert (ROOT / path.rstrip(".")).exists(), path
