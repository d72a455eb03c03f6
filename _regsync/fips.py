"""The only door to digests, MACs and signatures, and the place of the FIPS gate.
Owns: which library computes them. May not know: anything else of the program; it imports nothing until it is asked for
something. Invariant: no message shows a key; no other module of `_regsync` imports hashlib, hmac or secrets
(tests/test_layering.py). The gate of the default build (refuse to run without the host's FIPS 140-3 provider) is not
part of this version. Follows design.md section 11, protocol-facts.md section 8.3."""
from __future__ import annotations
from _regsync import FIPS_BUILD
# typing's constant without typing, which costs `version` a third of its time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ctypes import CDLL
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
def sign_rs256(key: str, message: bytes) -> bytes:
    """Return the RSASSA-PKCS1-v1_5 signature by a PEM key over SHA-256; ValueError says what of the key is no use.
    No other copy of libcrypto is used than TLS runs on, and nothing is left on its list of errors (5.4 c)."""
    import re
    from ctypes import byref, c_size_t, c_void_p, create_string_buffer
    label, text = (re.findall(r"-----BEGIN ([A-Z ]+)-----(.*?)-----END \1-----", key, re.DOTALL) or [("", "")])[0]
    if "ENCRYPTED" in label + text: raise ValueError("is encrypted: use one without a pass phrase")
    # In base64 the head of a PKCS#8 key shows rsaEncryption so; the older form has it in its label.
    if not (label == "RSA PRIVATE KEY" or (label == "PRIVATE KEY" and "BgkqhkiG9w0BAQE" in text)):
        raise ValueError("is not an RSA key in PEM (PKCS#8)")
    crypto, pem, size, room = _libcrypto(), key.encode(), c_size_t(2048), create_string_buffer(2048)
    def pointer(name: str, *arguments: object) -> c_void_p:
        function = crypto[name]
        function.restype = c_void_p  # by default 32 bits of it
        return c_void_p(function(*arguments))
    bio, context, private = pointer("BIO_new_mem_buf", pem, len(pem)), pointer("EVP_MD_CTX_new"), c_void_p()
    try:
        # The last argument is a pass phrase, so that the library never asks for one at the terminal.
        private = pointer("PEM_read_bio_PrivateKey", bio, None, None, b"")
        if not private: raise ValueError("does not parse")
        if (crypto.EVP_DigestSignInit(context, None, pointer("EVP_sha256"), None, private) != 1
                or crypto.EVP_DigestSign(context, room, byref(size), message, c_size_t(len(message))) != 1):
            raise ValueError("was refused by OpenSSL: RSA keys have 2048 to 16384 bits")
        return room.raw[: size.value]
    finally:
        crypto.EVP_MD_CTX_free(context)
        crypto.EVP_PKEY_free(private)
        crypto.BIO_free(bio)
        crypto.ERR_clear_error()
def _libcrypto() -> CDLL:
    import _ssl
    from ctypes import CDLL
    # By the extension's own names; or it is inside the interpreter; Windows gives the library that is loaded already.
    for place in (getattr(_ssl, "__file__", None), None, "libcrypto-3", "libcrypto-3-x64", "libcrypto-3-arm64"):
        try: crypto = CDLL(place)
        except (OSError, TypeError): continue
        if getattr(crypto, "OpenSSL_version_num", int)() == _ssl.OPENSSL_VERSION_NUMBER: return crypto
    raise ValueError("cannot be used: this Python does not show its libcrypto; run regsync with the system's Python")
def gate_state() -> str:
    """Say in a few words whether the FIPS gate holds, for `regsync version`."""
    if FIPS_BUILD: return "FIPS gate: not in this version; cryptography is the host's OpenSSL, unchecked"
    return "no FIPS gate in this build"
