"""Digests, MACs and signatures. Every other module uses cryptography through this module.

Owns: the choice of the library. The default build uses only OpenSSL, once `fips` has seen that it has
a FIPS provider.
May not know: any other module but `fips`.
Invariants: no message shows a key. Besides `fips`, no other module of `_regsync` imports hashlib,
hmac or secrets. Random numbers for temporary names and pauses come from os.urandom, because no
security depends on them.
Follows: docs/design.md sections 1 and 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from _regsync import FIPS_BUILD, IS_STATIC
from _regsync.fips import call_for_pointer, libcrypto

if TYPE_CHECKING:
    from hashlib import _Hash

# The supported digest algorithms, with the length of their digests in hexadecimal digits
# (descriptor.md of the image specification).
DIGEST_HEX_LENGTHS = {"sha256": 64, "sha512": 128}

# Bytes. The size of a signature with a 16384-bit RSA key, the longest key that OpenSSL accepts.
_MAX_SIGNATURE = 2048


def new_hash(algorithm: str, data: bytes | bytearray | memoryview = b"") -> _Hash:
    """Return a new hash object, updated with `data`. The algorithm is that of a valid digest, or sha1."""
    if FIPS_BUILD:
        # `_hashlib` is OpenSSL. `hashlib` would fall back to Python's own implementations.
        import _hashlib

        return _hashlib.new(algorithm, data)
    import hashlib

    return hashlib.new(algorithm, data, usedforsecurity=algorithm != "sha1")


def hash_hex(algorithm: str, data: bytes | bytearray | memoryview) -> str:
    """Return the hexadecimal digest of `data`."""
    return new_hash(algorithm, data).hexdigest()


def name_hash(text: str) -> str:
    """Return the SHA-1 of a text, which the AWS CLI uses for file names.

    No security depends on it.
    """
    return hash_hex("sha1", text.encode())


def hmac_bytes(key: bytes, data: bytes) -> bytes:
    """Return the HMAC-SHA-256 of `data`."""
    from _hashlib import hmac_digest

    return hmac_digest(key, data, "sha256")


def sign_rs256(key: str, message: bytes) -> bytes:
    """Sign a message by RS256: RSASSA-PKCS1-v1_5 with SHA-256 (docs/protocol-facts.md section 5.4).

    `key` is a private key in PEM. Raises ValueError if OpenSSL cannot parse the key, because it has
    a pass phrase for example, or refuses it. The error's text is the end of a sentence whose subject
    is the key.
    """
    if IS_STATIC:
        # The static executable has no ctypes, because it cannot look up C functions by name.
        from _regsync_native import sign_rs256 as sign  # type: ignore[import-not-found]

        signature: bytes = sign(key.encode(), message)
        return signature
    return _sign_by_ctypes(key.encode(), message)


def _sign_by_ctypes(pem: bytes, message: bytes) -> bytes:
    """Sign a message through the C functions of libcrypto.

    Raises ValueError in the same cases as `sign_rs256`. The OpenSSL objects are freed in any case.
    """
    from ctypes import byref, c_size_t, c_void_p, create_string_buffer

    crypto = libcrypto()
    size = c_size_t(_MAX_SIGNATURE)  # EVP_DigestSign replaces it by the signature's size
    signature = create_string_buffer(_MAX_SIGNATURE)
    pem_source = call_for_pointer(crypto, "BIO_new_mem_buf", pem, len(pem))
    context = call_for_pointer(crypto, "EVP_MD_CTX_new")
    private_key = c_void_p()
    try:
        # The last argument is the pass phrase. If it were NULL, OpenSSL would prompt on the
        # terminal.
        private_key = call_for_pointer(
            crypto, "PEM_read_bio_PrivateKey", pem_source, None, None, b""
        )
        if not private_key:
            raise ValueError("does not parse")

        sha256 = call_for_pointer(crypto, "EVP_sha256")
        # Both functions return 1 for success.
        is_ready = crypto.EVP_DigestSignInit(context, None, sha256, None, private_key) == 1
        arguments = (context, signature, byref(size), message, c_size_t(len(message)))
        is_signed = is_ready and crypto.EVP_DigestSign(*arguments) == 1
        if not is_signed:
            raise ValueError("was refused by OpenSSL: RSA keys have 2048 to 16384 bits")
        return signature.raw[: size.value]
    finally:
        crypto.EVP_MD_CTX_free(context)
        crypto.EVP_PKEY_free(private_key)
        crypto.BIO_free(pem_source)
        crypto.ERR_clear_error()  # otherwise Python's TLS would report these errors as its own
