"""Signatures by the interpreter's own libcrypto, under every Python beside this one, as `openssl`
makes them.
"""

from __future__ import annotations

import _ssl
import ctypes
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from _regsync import crypto
from _regsync.crypto import sign_rs256
from conformance.clouds.google import make_key
from tests.pythons import signed_elsewhere


def openssl(*arguments: str, text: str = "") -> str:
    return subprocess.run(
        ["openssl", *arguments], input=text, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("message", [b"", b"hello", b"\0" * 3, bytes(range(256)) * 5000])
def test_a_signature_is_the_one_there_is(message: bytes) -> None:
    key = make_key()
    signature = sign_rs256(key.pem, message)
    assert signature == signed_elsewhere(key.pem, message)
    assert key.verifies(signature, message)
    assert not key.verifies(signature, message + b".")
    assert not make_key(1).verifies(signature, message)


def test_forms_and_sizes_of_keys() -> None:
    pem = make_key().pem
    older = openssl("rsa", "-traditional", text=pem)
    assert older.startswith("-----BEGIN RSA PRIVATE KEY-----")
    for form in (older, pem.replace("\n", "\r\n"), f"a comment\n{pem}\n\n", pem.strip()):
        assert sign_rs256(form, b"x") == sign_rs256(pem, b"x")
    longer = openssl("genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:3072")
    assert sign_rs256(longer, b"x") == signed_elsewhere(longer, b"x")


def broken(change: Callable[[list[str]], list[str]]) -> str:
    return "\n".join(change(make_key().pem.splitlines()))


REFUSED = {
    "empty": (lambda: "", "not an RSA key"),
    "text": (lambda: "secret-secret", "not an RSA key"),
    "no-end": (lambda: broken(lambda lines: lines[:-1]), "not an RSA key"),
    "cut": (lambda: broken(lambda lines: lines[:10] + lines[-1:]), "does not parse"),
    "no-base64": (lambda: broken(lambda lines: [*lines[:2], "-", *lines[2:]]), "does not parse"),
    "certificate": (lambda: make_key().pem.replace("PRIVATE KEY", "CERTIFICATE"), "not an RSA key"),
    "public": (lambda: openssl("rsa", "-pubout", text=make_key().pem), "not an RSA key"),
    "elliptic": (lambda: openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"),
        "is not an RSA"),
    "edwards": (lambda: openssl("genpkey", "-algorithm", "ED25519"), "not an RSA key"),
    "encrypted": (lambda: openssl("pkcs8", "-topk8", "-passout", "pass:x", text=make_key().pem), "is encrypted"),
    "encrypted-older": (lambda: openssl("rsa", "-traditional", "-aes128", "-passout", "pass:x", text=make_key().pem),
        "is encrypted"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_key_of_no_use_is_refused_in_words_without_the_key(case: str) -> None:
    make, words = REFUSED[case]
    key = make()
    with pytest.raises(ValueError, match=words) as caught:
        sign_rs256(key, b"x")
    assert not [line for line in key.splitlines() if len(line) > 5 and line in str(caught.value)]
    # A failure that stayed on the library's list would be taken for one of the next TLS
    # connection's.
    library = ctypes.CDLL(_ssl.__file__)
    assert library.ERR_peek_error() == 0


def test_the_static_file_signs_by_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no ctypes; keys are judged as everywhere."""
    asked = []

    def sign(pem: bytes, message: bytes) -> bytes:
        asked.append((pem, message))
        return b"signature"

    monkeypatch.setattr(crypto, "IS_STATIC", True)
    monkeypatch.setitem(sys.modules, "_regsync_native", SimpleNamespace(sign_rs256=sign))
    monkeypatch.setitem(sys.modules, "ctypes", None)
    key = make_key().pem
    assert sign_rs256(key, b"message") == b"signature"
    with pytest.raises(ValueError, match="not an RSA key"):
        sign_rs256("text", b"message")
    assert asked == [(key.encode(), b"message")]


def test_a_python_that_does_not_show_its_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str | None) -> ctypes.CDLL:
        raise OSError(f"cannot open {name}")

    monkeypatch.setattr(ctypes, "CDLL", nowhere)
    with pytest.raises(ValueError, match="libcrypto"):
        sign_rs256(make_key().pem, b"x")


def test_another_copy_of_the_library_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ssl, "OPENSSL_VERSION_NUMBER", _ssl.OPENSSL_VERSION_NUMBER + 16)
    with pytest.raises(ValueError, match="libcrypto"):
        sign_rs256(make_key().pem, b"x")
