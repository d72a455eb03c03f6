"""Signatures by the interpreter's own libcrypto, under every Python beside this one, as `openssl`
makes them.
"""

from __future__ import annotations

import _ssl
import ctypes
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from _regsync import crypto
from _regsync.crypto import sign_rs256
from conformance.clouds.google import make_key
from tests.builds import PYTHONS, python
from tests.program import ROOT

KEY = make_key()
SIGN = """
import json, sys
sys.path.insert(0, sys.argv[1])
from _regsync.crypto import sign_rs256
key, message = json.load(sys.stdin)
print(sign_rs256(key, message.encode()).hex())
"""


def openssl(*arguments: str, text: str = KEY.pem) -> str:
    return subprocess.run(
        ["openssl", *arguments], input=text, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("message", [b"", b"hello", b"\0" * 3, bytes(range(256)) * 5000])
def test_a_signature_is_the_one_there_is(message):
    signature = sign_rs256(KEY.pem, message)
    assert KEY.verifies(signature, message)
    assert not KEY.verifies(signature, message + b".")
    assert not make_key(1).verifies(signature, message)


@pytest.mark.parametrize("name", PYTHONS)
def test_every_python_signs_the_same(name):
    ran = subprocess.run(
        [python(name), "-c", SIGN, str(ROOT)],
        input=json.dumps([KEY.pem, "hello"]),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert KEY.verifies(bytes.fromhex(ran.stdout), b"hello")


def test_forms_and_sizes_of_keys(tmp_path):
    older = openssl("rsa", "-traditional")
    assert older.startswith("-----BEGIN RSA PRIVATE KEY-----")
    for form in (
        older,
        KEY.pem.replace("\n", "\r\n"),
        f"a comment\n{KEY.pem}\n\n",
        KEY.pem.strip(),
    ):
        assert KEY.verifies(sign_rs256(form, b"x"), b"x")
    longer = openssl("genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:3072")
    (tmp_path / "key.pem").write_text(longer)
    command = ["openssl", "dgst", "-sha256", "-sign", str(tmp_path / "key.pem")]
    signed = subprocess.run(command, input=b"x", capture_output=True, check=True).stdout
    assert sign_rs256(longer, b"x") == signed


LINES = KEY.pem.splitlines()
PASSWORD = ["-passout", "pass:x"]
# A text, or how `openssl` makes one of the key.
USELESS = {
    "text": ("secret-secret", "does not parse"),
    "cut": ("\n".join(LINES[:10] + LINES[-1:]), "does not parse"),
    "no base64": ("\n".join([*LINES[:2], "-", *LINES[2:]]), "does not parse"),
    "public": (["rsa", "-pubout"], "does not parse"),
    "Edwards": (["genpkey", "-algorithm", "ED25519"], "was refused by OpenSSL"),
    "encrypted": (["pkcs8", "-topk8", *PASSWORD], "does not parse"),
    "encrypted older": (["rsa", "-traditional", "-aes128", *PASSWORD], "does not parse"),
}


@pytest.mark.parametrize("name", USELESS)
def test_a_key_of_no_use_is_refused_in_words_without_the_key(name):
    made, words = USELESS[name]
    key = made if isinstance(made, str) else openssl(*made)
    with pytest.raises(ValueError, match=words) as caught:
        sign_rs256(key, b"x")
    assert not [line for line in key.splitlines() if len(line) > 5 and line in str(caught.value)]
    # A failure that stayed on the library's list would be taken for one of the next TLS
    # connection's.
    assert ctypes.CDLL(_ssl.__file__).ERR_peek_error() == 0


def test_the_static_file_signs_by_its_own_module(monkeypatch):
    """It has no ctypes."""
    asked = []

    def sign(pem: bytes, message: bytes) -> bytes:
        asked.append((pem, message))
        return b"signature"

    monkeypatch.setattr(crypto, "IS_STATIC", True)
    monkeypatch.setitem(sys.modules, "_regsync_native", SimpleNamespace(sign_rs256=sign))
    monkeypatch.setitem(sys.modules, "ctypes", None)
    assert sign_rs256(KEY.pem, b"message") == b"signature"
    assert asked == [(KEY.pem.encode(), b"message")]


def test_another_copy_of_the_library_is_not_used(monkeypatch):
    monkeypatch.setattr(_ssl, "OPENSSL_VERSION_NUMBER", _ssl.OPENSSL_VERSION_NUMBER + 16)
    with pytest.raises(ValueError, match="libcrypto"):
        sign_rs256(KEY.pem, b"x")
