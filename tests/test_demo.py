"""The README's first command, run for real in a copy of the tree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.client import copies
from conformance.content.images import Image, Seed
from tests.builds import SETUP
from tools import demo, fips_provider

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def clone(tmp_path: Path, pyz: Path) -> Path:
    """Copy what the demo needs, with the wheels that building `pyz` has left behind."""
    root = tmp_path / "clone"
    for name in ("_regsync", "conformance", "tools"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("LICENSE", "regsync.py"):
        shutil.copy(ROOT / name, root)
    shutil.copytree(ROOT / "build" / "wheels", root / "build" / "wheels")
    return root


def run(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "tools" / "demo.py"), *options]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=root.parent, timeout=300, check=False
    )


@pytest.mark.slow
def test_demo_holds_twice_in_a_row_and_shows_counts_beside_the_fewest_possible(clone):
    done = run(clone)
    assert done.returncode == 0, done.stderr
    assert "Images: 6 synced, 0 skipped, 0 failed" in done.stdout
    assert "Images: 0 synced, 6 skipped" in done.stdout
    assert ":: all of it held." in done.stdout
    assert sorted(path.name for path in (clone / "demo").glob("*.log")) == [
        "source.log",
        "target.log",
    ]

    done = run(clone, "--counts")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"(?m)^((?:source|target) \w+) +(\d+) +(\d+) +(\d+) +(\d+)$", done.stdout)
    found = {kind: tuple(map(int, numbers)) for kind, *numbers in rows}
    assert len(found) == 9
    assert all(second == least for _, _, second, least in found.values()), done.stdout
    assert all(first >= least for first, least, _, _ in found.values()), done.stdout
    assert found["source blob_get"][0] == found["source blob_get"][1]


def test_the_build_with_the_gate_is_shown_where_it_holds(monkeypatch, pyz, tmp_path):
    (tmp_path / "dist").symlink_to(pyz.parent)
    for name, value in (
        ("ROOT", tmp_path),
        ("DEMO", tmp_path),
        ("GATED", tmp_path / "dist" / "regsync.pyz"),
    ):
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(demo, "OPEN", tmp_path / "dist" / "regsync-nofips.pyz")
    monkeypatch.setenv("OPENSSL_MODULES", str(tmp_path))
    program, why = demo.choose()
    assert str(program) == "dist/regsync-nofips.pyz"
    assert "gate closed: " in why
    assert why.endswith(f": no fips.so in ['{tmp_path}']")
    if there := fips_provider.find():
        setup = SETUP.format(settings=Path(there) / "fipsmodule.cnf", section="fips_sect")
        (tmp_path / "own.cnf").write_text(setup)
        monkeypatch.setenv("OPENSSL_MODULES", there)
        monkeypatch.setenv("OPENSSL_CONF", str(tmp_path / "own.cnf"))
        program, why = demo.choose()
        assert str(program) == "dist/regsync.pyz"
        assert "gate holds: " in why


def test_demo_fails_when_the_program_does(monkeypatch, capsys, tmp_path):
    program = tmp_path / "broken.py"
    program.write_text("raise SystemExit(1)\n")
    monkeypatch.setattr(demo, "DEMO", tmp_path)
    monkeypatch.setattr(demo, "build", lambda: None)
    monkeypatch.setattr(demo, "choose", lambda: (program, "it is broken"))
    assert demo.main([]) == 1
    assert capsys.readouterr().err == "demo: the sync ended with status 1\n"


@pytest.mark.slow
def test_demo_says_in_one_line_why_there_is_no_build(clone):
    wheel = next((clone / "build" / "wheels").glob("h11-*"))
    wheel.write_bytes(b"other bytes")
    done = run(clone)
    assert done.returncode == 1
    assert done.stderr.startswith("demo: the program cannot be built: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"images": {"synced": 1, "skipped": 5, "failed": 0}},
        {"bytes": 1},
        {"requests": {"b": {"manifest_put": 1}}},
        {"requests": {"a": {"blob_get": 1}}},
    ],
)
def test_a_second_sync_that_does_something_is_a_failure(changed):
    quiet = {"images": {"synced": 0, "skipped": 6, "failed": 0}, "bytes": 0, "requests": {}}
    demo.check_nothing_moved(quiet, 6)
    with pytest.raises(demo.DemoError, match="moved something"):
        demo.check_nothing_moved({**quiet, **changed}, 6)


def test_one_other_byte_at_the_target_is_a_failure(monkeypatch):
    image = Seed(1).image()
    images: dict[tuple[str, str], tuple[str, Image]] = {("shop/web", "v1"): ("an image", image)}

    def fetch(address: str, repository: str, tag: str) -> dict[str, bytes]:
        found = image.contents()
        if address == "target":
            found[image.top] += b" "
        return found

    monkeypatch.setattr(copies, "fetch_http", fetch)
    monkeypatch.setattr(demo, "tags_of", lambda address, repository: {"v1"})
    demo.compare(images, "source", "elsewhere")
    with pytest.raises(AssertionError, match="other bytes"):
        demo.compare(images, "source", "target")
    monkeypatch.setattr(demo, "show", lambda *, counts: demo.compare(images, "source", "target"))
    assert demo.main([]) == 1


def test_what_it_imports_of_the_harness_needs_no_package() -> None:
    """It runs where Python is and nothing else: `-S` leaves out what is installed."""
    for module in ("conformance.client.copies", "conformance.content.images"):
        command = [sys.executable, "-S", "-c", f"import {module}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
