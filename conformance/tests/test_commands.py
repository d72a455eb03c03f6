"""The harness as a program, and its borders."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from conformance.tests.asking import ROOT
from conformance.walks import fetch_http


@pytest.mark.slow
def test_the_harness_imports_nothing_of_the_program_and_few_others() -> None:
    code = (
        "import sys; before = set(sys.modules); import conformance.__main__, conformance.programs;"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    allowed = {
        "anyio",
        "h11",
        "conformance",
        "exceptiongroup",
        "idna",
        "sniffio",
        "typing_extensions",
    }
    assert set(done.stdout.split()) <= allowed
    assert {"anyio", "h11"} <= set(done.stdout.split())


@pytest.mark.slow
def test_serve_says_where_and_ends_at_a_signal() -> None:
    command = [sys.executable, "-m", "conformance", "serve", "--seed-images"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        try:
            assert said.startswith("serving http://127.0.0.1:")
            address = said.split("/")[-1].strip()
            got = fetch_http(address, "seed/signed", "v1", referrers=True)
            assert (
                len(got) == 4 + 2 * 2 + 1
            )  # image with config and two layers; two artifacts; one config
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stdout.read() == ""
