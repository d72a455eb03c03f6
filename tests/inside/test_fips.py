"""The gate of the default build, on a real provider: it opens for that alone, and nothing gets
around it.

Debian's module stands for a validated one (tools/fips_provider.py): what is shown is that the
program computes by it and refuses to run without, not that anything is validated.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from _regsync import fips
from _regsync.app.cli import main
from _regsync.crypto import hash_hex, hmac_bytes, name_hash
from conformance.clouds.google import make_key
from tests.pythons import signed_elsewhere
from tools import fips_provider

REFUSED = "error: CONFIG_ERROR: the FIPS provider "
SETUP = """\
openssl_conf = init
.include {settings}
[init]
providers = found
alg_section = algorithms
[found]
fips = {section}
base = base_sect
[base_sect]
activate = 1
[algorithms]
default_properties = fips=yes
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def default(pyz: Path) -> Path:
    """Return the default build."""
    return pyz.with_name("regsync.pyz")


@pytest.fixture
def run(default: Path, tmp_path: Path) -> Run:
    """Return a function that runs the default build with these variables alone, and no provider
    unless they say one.
    """
    (tmp_path / "none").mkdir()

    def start(
        *arguments: str,
        python: str = sys.executable,
        options: tuple[str, ...] = (),
        **variables: object,
    ) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "OPENSSL_MODULES": str(tmp_path / "none"),
        }
        environment.update({name: str(value) for name, value in variables.items()})
        command = [python, *options, str(default), *arguments]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )

    return start


@pytest.fixture
def modules() -> Path:
    """Return a directory with a provider and its settings, or skip."""
    there = fips_provider.find()
    if there is None:
        pytest.skip(
            "no FIPS provider: tools/check.py or tools/fips_provider.py fetches one on Debian"
        )
    return Path(there)


def interpret(
    code: str, default: Path, directory: Path, text: str = "", **variables: object
) -> list[str]:
    """Run code that imports the default build, where no checkout is; return the lines that it
    prints.
    """
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        input=text,
        capture_output=True,
        text=True,
        cwd=directory,
        env={"PYTHONPATH": str(default), **{name: str(value) for name, value in variables.items()}},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# With a provider.


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
answers += [crypto.name_hash("abc"), crypto.sign_rs256(key, b"hello").hex(), type(crypto.new_hash("sha256")).__module__]
for name in ("md5", "blake2b512"):
    for secure in (True, False):
        try: answers.append(_hashlib.new(name, usedforsecurity=secure).hexdigest())
        except ValueError: answers.append("refused")
print(json.dumps(answers))
"""


def test_all_is_computed_by_the_provider_and_nothing_is_left(
    default: Path, modules: Path, tmp_path: Path
) -> None:
    """Also when it is imported rather than run; the built-in provider is not even loaded."""
    key = make_key()
    (tmp_path / "own.cnf").write_text(
        SETUP.format(settings=modules / "fipsmodule.cnf", section="fips_sect")
    )
    variables = {"OPENSSL_MODULES": modules, "OPENSSL_CONF": tmp_path / "own.cnf"}
    [answers] = interpret(COMPUTE, default, tmp_path, key.pem, **variables, TMPDIR=tmp_path)
    expected: list[object] = ["", "", True]
    for data in (b"", b"abc" * 1000):
        expected += [
            hash_hex("sha256", data),
            hash_hex("sha512", data),
            hmac_bytes(data, b"x").hex(),
        ]
    expected += [
        name_hash("abc"),
        signed_elsewhere(key.pem, b"hello").hex(),
        "_hashlib",
        *["refused"] * 4,
    ]
    assert json.loads(answers) == expected
    assert [each.name for each in tmp_path.iterdir()] == ["own.cnf"]


# A provider that is no use.


def test_a_provider_that_is_not_active_is_none() -> None:
    crypto = fips.libcrypto()
    if crypto.OSSL_PROVIDER_available(None, b"fips"):
        pytest.skip("this machine's OpenSSL is in FIPS mode")
    with pytest.raises(ValueError, match=r"is not (active|found)"):
        fips._check_is_active(crypto)


# Without a provider.


def test_a_refusal_in_json(run: Run) -> None:
    done = run("sync", "-c", "x", "--json", "--log-format", "json")
    assert done.returncode == 3
    error = json.loads(done.stdout)["error"]
    assert error["message"].startswith("the FIPS provider is not found")
    assert error["hint"] == fips.REMEDY
    assert json.loads(done.stderr)["level"] == "error"


FALL_BACK = """
import hashlib
print(type(hashlib.sha256()).__module__ != "_hashlib")
from _regsync import crypto
for call in (crypto.new_hash, crypto.hash_hex, crypto.hmac_bytes, crypto.name_hash):
    arguments = {"new_hash": ("sha256",), "hash_hex": ("sha256", b""), "hmac_bytes": (b"k", b"x"), "name_hash": ("x",)}
    try: print(call.__name__, call(*arguments[call.__name__]))
    except ValueError as error: print("refused")
"""


def test_nothing_falls_back_to_built_in_code(default: Path, tmp_path: Path) -> None:
    """With the property and no provider hashlib does; the one door to digests and MACs does not."""
    (tmp_path / "own.cnf").write_text(SETUP.format(settings=tmp_path / "none", section="base_sect"))
    variables = {"OPENSSL_CONF": tmp_path / "own.cnf", "OPENSSL_MODULES": tmp_path}
    assert interpret(FALL_BACK, default, tmp_path, **variables) == ["True", *["refused"] * 4]


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


def test_the_gate_comes_before_whatever_loads_openssl(default: Path, tmp_path: Path) -> None:
    told = interpret(EARLIEST, default, tmp_path)
    assert told[:2] == ["[]", "3"]
    assert told.count("[]") == 3


# Other systems, in this process.


@pytest.fixture
def as_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fips, "FIPS_BUILD", True)


@pytest.mark.usefixtures("as_default")
@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_told_of_the_other_build(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], system: str
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    assert main(["validate", "x"], fips.open_gate()) == 3
    told = capsys.readouterr().err
    assert told.startswith(f"{REFUSED}does not check certificates on this system\nhint: ")
    assert "regsync-nofips.pyz" in told


@pytest.mark.usefixtures("as_default")
def test_an_older_openssl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    older = SimpleNamespace(OpenSSL_version_num=lambda: 0x1010117F)
    monkeypatch.setattr(fips, "libcrypto", lambda: older)
    assert fips.open_gate() == "the FIPS provider needs OpenSSL 3.0 or newer"


@pytest.mark.usefixtures("as_default")
def test_a_library_inside_the_interpreter_that_shows_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere(name: str | None) -> object:
        raise OSError(f"cannot open {name}")

    monkeypatch.setattr("ctypes.CDLL", nowhere)
    assert fips.open_gate().startswith(
        "the FIPS provider cannot be used: this Python does not expose its libcrypto"
    )
