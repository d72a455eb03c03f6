"""The Pythons of this machine, and what another library than theirs signs."""

from __future__ import annotations

import sys
from pathlib import Path

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding

# The interpreter that runs the tests, and those that are installed beside its base.
BESIDE = [
    path
    for minor in range(10, 20)
    for path in Path(sys.base_prefix).parent.glob(f"3.{minor}.*/bin/python3.{minor}")
]
PYTHONS = {"this": sys.executable, **{path.name: str(path) for path in BESIDE}}


def signed_elsewhere(pem: str, message: bytes) -> bytes:
    key = serialization.load_pem_private_key(pem.encode(), password=None)
    return bytes(key.sign(message, padding.PKCS1v15(), hashes.SHA256()))  # type: ignore[union-attr, call-arg, arg-type]
