"""The only door to digests and MACs, and the place of the FIPS gate.

Owns: which module computes a digest. May not know: anything else of the program; it imports nothing until it is asked
for a digest. Invariant: no other module of `_regsync` imports hashlib, hmac or secrets (tests/test_layering.py). The
gate of the default build (refuse to run without the host's FIPS 140-3 provider) is not part of this version.
Follows design.md section 11, protocol-facts.md section 8.3.
"""
from __future__ import annotations
from _regsync import FIPS_BUILD
__all__ = ["DIGEST_HEX_LENGTHS", "gate_state", "hash_hex", "hmac_bytes", "name_hash", "new_hash"]
# typing's constant without typing, which costs `version` a third of its time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from hashlib import _Hash
# Algorithms that this program can verify, with the length of their hexadecimal form
# (image-spec descriptor.md; sha512 is optional for registries).
DIGEST_HEX_LENGTHS = {"sha256": 64, "sha512": 128}
def new_hash(algorithm: str, data: bytes | bytearray | memoryview = b"") -> _Hash:
    """Return a running hash, begun with `data`, for `sha256` or `sha512`; ValueError for anything else."""
    import hashlib
    if algorithm not in DIGEST_HEX_LENGTHS: raise ValueError(f"digest algorithm {algorithm!r} is not supported")
    return hashlib.new(algorithm, data)
def hash_hex(algorithm: str, data: bytes | bytearray | memoryview) -> str:
    """Return the hexadecimal digest of `data`; ValueError as `new_hash`."""
    return new_hash(algorithm, data).hexdigest()
def hmac_bytes(key: bytes, data: bytes) -> bytes:
    """Return the HMAC of `data` by SHA-256."""
    import hmac
    return hmac.digest(key, data, "sha256")
def name_hash(text: str) -> str:
    """Return the SHA-1 by which another program has named a file; it secures nothing."""
    import hashlib
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
def gate_state() -> str:
    """Say in a few words whether the FIPS gate holds, for `regsync version`."""
    if FIPS_BUILD: return "FIPS gate: not in this version; cryptography is the host's OpenSSL, unchecked"
    return "no FIPS gate in this build"
