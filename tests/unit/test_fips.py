"""Behind the FIPS gate everything is computed by OpenSSL; on which hosts the gate opens at all."""

from __future__ import annotations

import hashlib
import hmac
import json
import sys
from types import SimpleNamespace

import pytest

import regsync
from _regsync import fips
from conformance.clouds.google import make_key
from tests.builds import SETUP

# In the default build.

COMPUTE = """
import json, os, sys
before = dict(os.environ), sorted(os.listdir("/proc/self/fd"))
import regsync
from _regsync import crypto, fips
key = sys.stdin.read()
answers = [fips.open_gate(), fips.open_gate(), (dict(os.environ), sorted(os.listdir("/proc/self/fd"))) == before]
import hashlib, _hashlib
for data in (b"", b"abc" * 1000):
    answers += [crypto.hash_hex("sha256", data), crypto.hash_hex("sha512", data), crypto.hmac_bytes(data, b"x").hex()]
answers += [crypto.name_hash("abc"), type(crypto.new_hash("sha256")).__module__]
for name in ("md5", "blake2b512"):
    for secure in (True, False):
        try: answers.append(_hashlib.new(name, usedforsecurity=secure).hexdigest())
        except ValueError: answers.append("refused")
print(json.dumps(answers))
print(crypto.sign_rs256(key, b"hello").hex())
"""


def test_all_is_computed_by_the_provider_and_nothing_is_left(fips_host):
    """Also when it is imported rather than run; the built-in provider is not even loaded."""
    key = make_key()
    fips_host.variables["TMPDIR"] = str(fips_host.folder)
    before = sorted(fips_host.folder.iterdir())
    answers, signature = fips_host.interpret(COMPUTE, key.pem)
    expected: list[object] = ["", "", True]
    for data in (b"", b"abc" * 1000):
        expected += [hashlib.sha256(data).hexdigest(), hashlib.sha512(data).hexdigest()]
        expected.append(hmac.new(data, b"x", "sha256").hexdigest())
    expected += [hashlib.sha1(b"abc").hexdigest(), "_hashlib", *["refused"] * 4]
    assert json.loads(answers) == expected
    assert key.verifies(bytes.fromhex(signature), b"hello")
    assert sorted(fips_host.folder.iterdir()) == before


FALL_BACK = """
import hashlib
print(type(hashlib.sha256()).__module__ != "_hashlib")
from _regsync import crypto
for call, *arguments in (
    (crypto.new_hash, "sha256"), (crypto.hash_hex, "sha256", b""),
    (crypto.hmac_bytes, b"k", b"x"), (crypto.name_hash, "x"),
):
    try: print(call.__name__, call(*arguments))
    except ValueError as error: print("refused")
"""


def test_nothing_falls_back_to_built_in_code(host):
    """With the property and no provider hashlib does; the one door to digests and MACs does not."""
    host.conf.write_text(SETUP.format(settings=host.none / "none", section="base_sect"))
    host.variables["OPENSSL_CONF"] = str(host.conf)
    assert host.interpret(FALL_BACK) == ["True", *["refused"] * 4]


EARLIEST = """
import sys, regsync
from _regsync import fips
watched = {"ssl", "_ssl", "hashlib", "_hashlib", "hmac", "secrets", "asyncio", "anyio"}
def open_gate():
    print(sorted(watched & {*sys.modules}))
    return "the FIPS provider is watched"
fips.open_gate = open_gate
for arguments in (["validate", "x"], ["--help"], ["version"]):
    try: print(regsync.main(arguments))
    except SystemExit: pass
"""


def test_the_gate_comes_before_whatever_loads_openssl(host):
    told = host.interpret(EARLIEST)
    assert told[:2] == ["[]", "3"]
    assert told.count("[]") == 3


# The static executable, and other systems, as this process sees them.


@pytest.fixture(autouse=True)
def as_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fips, "FIPS_BUILD", True)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("AWS-LC FIPS 3.1.0", ""),
        ("AWS-LC FIPS 3.2.0", "is AWS-LC FIPS 3.2.0, not AWS-LC FIPS 3.1.0"),
        ("", "is not active, not AWS-LC FIPS 3.1.0"),
    ],
)
def test_the_static_file_runs_with_the_module_of_its_version_alone(
    monkeypatch, capsys, module, why
):
    """It asks nothing of the host."""
    native = SimpleNamespace(fips_module=lambda: module)
    monkeypatch.setitem(sys.modules, "_regsync_native", native)
    monkeypatch.setattr(fips, "IS_STATIC", True)
    monkeypatch.setattr(fips, "libcrypto", None)
    assert regsync.main(["validate", "nothing.yaml"]) == 3
    told = capsys.readouterr().err
    assert ("the FIPS module of this file " in told) is bool(why)
    assert why in told
    assert ("hint: the file is not as it was built" in told) is bool(why)


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_told_of_the_other_build(monkeypatch, capsys, system):
    monkeypatch.setattr(sys, "platform", system)
    assert regsync.main(["validate", "x"]) == 3
    told = capsys.readouterr().err
    assert told.startswith(
        "error: CONFIG_ERROR: the FIPS provider does not check certificates on this system\nhint: "
    )
    assert "regsync-nofips.pyz" in told


def test_an_older_openssl_is_refused(monkeypatch):
    older = SimpleNamespace(OpenSSL_version_num=lambda: 0x1010117F)
    monkeypatch.setattr(fips, "libcrypto", lambda: older)
    assert fips.open_gate() == "the FIPS provider needs OpenSSL 3.0 or newer"


def test_a_library_inside_the_interpreter_that_shows_nothing_is_refused(monkeypatch):
    def nowhere(name: str | None) -> object:
        raise OSError(f"cannot open {name}")

    monkeypatch.setattr("ctypes.CDLL", nowhere)
    assert fips.open_gate().startswith(
        "the FIPS provider cannot be used: this Python does not expose its libcrypto"
    )


@pytest.mark.parametrize(
    ("fine", "why"),
    [
        ([], "is not "),
        (["_check_is_active"], "does not compute SHA-256"),
        (
            ["_check_is_active", "_provider_of"],
            "is not the only provider: OpenSSL still computes MD5",
        ),
        (
            ["_check_is_active", "_provider_of", "_check_hashlib"],
            "is not the only provider: TLS still offers ChaCha20",
        ),
    ],
)
def test_this_openssl_which_has_no_provider_fails_each_check(monkeypatch, fine, why):
    for name in fine:
        monkeypatch.setattr(fips, name, lambda *_: b"fips")
    assert fips.open_gate().startswith(f"the FIPS provider {why}")
