"""RSA signatures by the libcrypto that the interpreter's own TLS runs on.

Owns: finding that library, what keys it takes. May not know: what is signed. Invariant: no other copy of it is used, no
message shows a key, nothing is left on its list of errors, which TLS reads too. Follows protocol-facts.md 5.4, 8.3."""
from __future__ import annotations
import re
from ctypes import CDLL, byref, c_size_t, c_void_p, create_string_buffer
__all__ = ["sign_rs256"]
def sign_rs256(key: str, message: bytes) -> bytes:
    """Return the RSASSA-PKCS1-v1_5 signature by a PEM key over SHA-256; ValueError says what of the key is no use."""
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
    # By the extension's own names; or it is inside the interpreter; Windows gives the library that is loaded already.
    for place in (getattr(_ssl, "__file__", None), None, "libcrypto-3", "libcrypto-3-x64", "libcrypto-3-arm64"):
        try: crypto = CDLL(place)
        except (OSError, TypeError): continue
        if getattr(crypto, "OpenSSL_version_num", int)() == _ssl.OPENSSL_VERSION_NUMBER: return crypto
    raise ValueError("cannot be used: this Python does not show its libcrypto; run regsync with the system's Python")
