"""."""

from __future__ import annotations

from _regsync import FIPS_BUILD
from _regsync.fips import _libcrypto, _pointer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hashlib import _Hash

# Digests that this program can verify, and the length of their hexadecimal form (image-spec
# descriptor.md).
DIGEST_HEX_LENGTHS = {"sha256": 64, "sha512": 128}


def _new(algorithm: str, data: bytes | bytearray | memoryview) -> _Hash:
    if FIPS_BUILD:
        import _hashlib

        return _hashlib.new(algorithm, data)
    import hashlib

    return hashlib.new(algorithm, data, usedforsecurity=algorithm != "sha1")


def new_hash(algorithm: str, data: bytes | bytearray | memoryview = b"") -> _Hash:
    """Return a running hash, begun with `data`, for `sha256` or `sha512`; ValueError for anything
    else.
    """
    if algorithm not in DIGEST_HEX_LENGTHS:
        raise ValueError(f"digest algorithm {algorithm!r} is not supported")
    return _new(algorithm, data)


def hash_hex(algorithm: str, data: bytes | bytearray | memoryview) -> str:
    """Return the hexadecimal digest of `data`; ValueError as `new_hash`."""
    return new_hash(algorithm, data).hexdigest()


def hmac_bytes(key: bytes, data: bytes) -> bytes:
    """Return the HMAC of `data` by SHA-256."""
    from _hashlib import hmac_digest

    return hmac_digest(key, data, "sha256")


def name_hash(text: str) -> str:
    """Return the SHA-1 by which another program has named a file; it secures nothing."""
    return _new("sha1", text.encode()).hexdigest()


def sign_rs256(key: str, message: bytes) -> bytes:
    """Return the RSASSA-PKCS1-v1_5 signature by a PEM key over SHA-256; ValueError says what of the
    key is no use. No other copy of libcrypto is used than TLS runs on, and nothing is left on its
    list of errors (5.4 c)."""
    import re
    from ctypes import byref, c_size_t, c_void_p, create_string_buffer

    label, text = (
        re.findall(r"-----BEGIN ([A-Z ]+)-----(.*?)-----END \1-----", key, re.DOTALL) or [("", "")]
    )[0]
    if "ENCRYPTED" in label + text:
        raise ValueError("is encrypted: use one without a pass phrase")
    # In base64 the head of a PKCS#8 key shows rsaEncryption so; the older form has it in its label.
    if not (label == "RSA PRIVATE KEY" or (label == "PRIVATE KEY" and "BgkqhkiG9w0BAQE" in text)):
        raise ValueError("is not an RSA key in PEM (PKCS#8)")
    crypto = _libcrypto()
    pem = key.encode()
    size = c_size_t(2048)
    room = create_string_buffer(2048)
    bio = _pointer(crypto, "BIO_new_mem_buf", pem, len(pem))
    context = _pointer(crypto, "EVP_MD_CTX_new")
    private = c_void_p()
    try:
        # The last argument is a pass phrase, so that the library never asks for one at the
        # terminal.
        private = _pointer(crypto, "PEM_read_bio_PrivateKey", bio, None, None, b"")
        if not private:
            raise ValueError("does not parse")
        if (
            crypto.EVP_DigestSignInit(context, None, _pointer(crypto, "EVP_sha256"), None, private)
            != 1
            or crypto.EVP_DigestSign(context, room, byref(size), message, c_size_t(len(message)))
            != 1
        ):
            raise ValueError("was refused by OpenSSL: RSA keys have 2048 to 16384 bits")
        return room.raw[: size.value]
    finally:
        crypto.EVP_MD_CTX_free(context)
        crypto.EVP_PKEY_free(private)
        crypto.BIO_free(bio)
        crypto.ERR_clear_error()
