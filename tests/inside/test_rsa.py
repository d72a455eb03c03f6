"""Signatures by the interpreter's own libcrypto, under every Python beside this one, as `openssl`
makes them.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from conformance.clouds.google import make_key
from tests.pythons import PYTHONS, signed_elsewhere

ROOT = Path(__file__).resolve().parents[2]
SIGN = """
import json, sys
sys.path.insert(0, sys.argv[1])
from _regsync.crypto import sign_rs256
key, message = json.load(sys.stdin)
print(sign_rs256(key, message.encode()).hex())
"""


@pytest.mark.parametrize("python", PYTHONS)
def test_every_python_signs_the_same(python: str) -> None:
    key = make_key()
    given = json.dumps([key.pem, "hello"])
    ran = subprocess.run(
        [PYTHONS[python], "-c", SIGN, str(ROOT)],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert bytes.fromhex(ran.stdout) == signed_elsewhere(key.pem, b"hello")
