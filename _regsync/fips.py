"""The only door to digests and MACs, and the place of the FIPS gate.

Owns: which module computes a digest. May not know: anything else of the program; it imports `os` and
`sys` only until it is asked for a digest. Invariant: no other module of `_regsync` imports hashlib,
hmac or secrets (tests/test_layering.py). Follows design.md section 11, protocol-facts.md section 8.3.

The gate of the default build (refuse to run without the host's FIPS 140-3 provider) is not part of
this version; `gate_state` says so and `regsync version` prints it.
"""

from __future__ import annotations

from _regsync import FIPS_BUILD

__all__ = ["DIGEST_HEX_LENGTHS", "Hash", "gate_state", "hash_hex", "new_hash"]

# Algorithms that this program can verify, with the length of their hexadecimal form
# (image-spec descriptor.md; sha512 is optional for registries).
DIGEST_HEX_LENGTHS = {"sha256": 64, "sha512": 128}


# typing's constant without typing, which costs `version` a third of its time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol
else:
    Protocol = object

Buffer = bytes | bytearray | memoryview


class Hash(Protocol):
    """What the program needs of a running hash."""

    def update(self, data: Buffer, /) -> None: ...
    def hexdigest(self) -> str: ...
    def copy(self) -> Hash: ...


def new_hash(algorithm: str) -> Hash:
    """Return a running hash for `sha256` or `sha512`; ValueError for anything else."""
    import hashlib

    if algorithm == "sha256":
        return hashlib.sha256()
    if algorithm == "sha512":
        return hashlib.sha512()
    raise ValueError(f"digest algorithm {algorithm!r} is not supported")


def hash_hex(algorithm: str, data: Buffer) -> str:
    """Return the hexadecimal digest of `data`."""
    running = new_hash(algorithm)
    running.update(data)
    return running.hexdigest()


def gate_state() -> str:
    """Say in a few words whether the FIPS gate holds, for `regsync version`."""
    if FIPS_BUILD:
        return "FIPS gate: not in this version; cryptography is the host's OpenSSL, unchecked"
    return "no FIPS gate in this build"
