"""The catalogue of shapes (conformance/shapes.py): equal on every run and Python, true to what
it says, taken by the strict registry.

That the program copies what is valid, and refuses what is not, is in tests/test_copy.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.images import Image
from conformance.registry import App
from conformance.shapes import Sample, shapes
from conformance.walks import identical, push_http

ROOT = Path(__file__).resolve().parents[2]
DIGESTS = Path(__file__).resolve().parent / "data" / "shapes.txt"
VALID = {name: shape for name, shape in shapes().items() if not shape.refused}
REFUSED = {name: shape for name, shape in shapes().items() if shape.refused}


def golden() -> dict[str, str]:
    """Read the digest of each shape: the same from Python 3.10 to 3.13."""
    lines = [line.split() for line in DIGESTS.read_text(encoding="ascii").splitlines()]
    return {name: digest for digest, name in lines}


@pytest.mark.slow
def test_every_shape_has_the_bytes_that_it_always_had() -> None:
    assert {name: shape.build().fingerprint() for name, shape in shapes().items()} == golden()


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_interpreters_hashes() -> None:
    code = "from conformance.shapes import shapes\n"
    code += "for name, shape in shapes().items(): print(name, shape.build().fingerprint())"
    told = []
    for hashes in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": hashes}
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True
        )
        told.append(dict(line.split() for line in done.stdout.splitlines()))
    assert told == [golden()] * 2


def graph_of(sample: Sample) -> set[str]:
    """Follow every descriptor of every document of a sample; return the digests."""
    named: set[str] = set()
    for image in sample.parts().values():
        for media_type, body in image.manifests.values():
            document = Image("t", media_type, {"t": (media_type, body)}, {}).document
            config = document.get("config")
            for entry in [*([config] if config else []), *(document.get("layers") or [])]:
                named.add(entry["digest"])
            named |= {
                entry["digest"]
                for key in ("manifests", "blobs")
                for entry in document.get(key) or []
            }
    return named


@pytest.mark.parametrize("name", VALID)
def test_a_valid_sample_holds_what_it_names_and_nothing_else(name: str) -> None:
    sample = VALID[name].build()
    parts = sample.parts().values()
    everything = {
        digest for image in parts for digest in (*image.blobs, *image.manifests, *image.absent)
    }
    tops = {image.top for image in parts}
    assert graph_of(sample) - everything == set()
    assert everything - graph_of(sample) - tops == set()


@pytest.mark.parametrize("name", VALID)
def test_the_strict_registry_takes_every_valid_shape(name: str) -> None:
    shape = VALID[name]
    sample = shape.build()
    app = App(**shape.options)
    for reference, image in sample.parts().items():
        tags = () if ":" in reference else (reference or "v1",)
        push_http(image, app, "app", *tags)
    app.journal.check()
    held = app.repositories["app"]
    found = {digest: bytes(content) for digest, content in held.blobs.items()}
    found |= {digest: stored.body for digest, stored in held.manifests.items()}
    parts = sample.parts().values()
    assert identical(
        found, {key: body for image in parts for key, body in image.contents().items()}
    )
