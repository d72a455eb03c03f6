"""The gate of the default build, on a real provider: it opens for that alone, and nothing gets
around it.

Debian's module stands for a validated one (tools/fips_provider.py): what is shown is that the
program computes by it and refuses to run without, not that anything is validated.
"""

from __future__ import annotations

import _hashlib
import _ssl
import json
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme

from conformance.images import Seed
from tests.builds import PYTHONS, SETUP, Host, openssl_server, python, run
from tests.ends import Start, clear, document, held, tags

LEGACY = next(iter(Path("/usr").glob("lib*/**/ossl-modules/legacy.so")), None)
PROPERTY = "[init]\nalg_section = algorithms\n[algorithms]\ndefault_properties = fips=yes\n"
NAME = "OpenSSL FIPS Provider"


def refused(done: subprocess.CompletedProcess[str], words: str) -> str:
    """Hold a refusal to its form: status 3, the error with what was looked for, both remedies,
    nothing else. Returns the error.
    """
    assert (done.returncode, done.stdout) == (3, ""), done
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: CONFIG_ERROR: the FIPS provider ")
    assert words in error
    assert hint.startswith("hint: install one, ")
    assert "`openssl fipsinstall -module" in hint
    assert "regsync-nofips.pyz" in hint
    return error


# With a provider.


@pytest.mark.parametrize("name", PYTHONS)
def test_version_names_the_provider(fips_host, name):
    words = [python(name), "-I", "-S", "-OO", str(fips_host.file), "version", "--json"]
    done = fips_host.start(*words)
    told = json.loads(done.stdout)
    assert (done.returncode, done.stderr, told["gate_holds"]) == (0, "", True)
    assert told["provider"]["name"] == NAME
    assert told["gate"] == f"FIPS gate holds: {NAME} {told['provider']['version']} is active"


@pytest.mark.process
def test_a_sync_over_tls_goes_through_the_provider(fips_host, serve: Start, ca: trustme.CA):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    ca.cert_pem.write_to_path(str(fips_host.folder / "ca.pem"))
    source, target = serve(ssl_context=context), serve(ssl_context=context)
    image = Seed(1).image().load_into(source.app, "app", "v1")
    registries = {
        alias: {"url": each.url, "ca_file": "ca.pem"}
        for alias, each in (("source", source), ("target", target))
    }
    (fips_host.folder / "mirror.json").write_text(
        document(registries, {"from": "app", "tags": tags("v1")})
    )
    done = fips_host.run("sync", "-q", "--json", "-c", "mirror.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["totals"]["images"] == {"synced": 1, "skipped": 0, "failed": 0}
    assert held(target, "app", image)
    clear(source, target)
    fips_host.variables["OPENSSL_MODULES"] = str(fips_host.none)
    refused(fips_host.run("sync", "-q", "-c", "mirror.json"), INACTIVE)
    assert (source.journal.entries, target.journal.entries) == ([], [])


def test_a_server_that_speaks_chacha20_only_shares_no_cipher(fips_host, pyz, ca: trustme.CA):
    """Under TLS 1.3 the suites are the library's; the other build offers this one."""
    folder = fips_host.folder
    ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(folder / "server"))
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    options = "-tls1_3 -ciphersuites TLS_CHACHA20_POLY1305_SHA256"
    with openssl_server(folder / "server", options) as address:
        registry = {"url": f"https://{address}", "ca_file": "ca.pem"}
        config = json.dumps({"registries": {"one": registry}, "mappings": []})
        (folder / "registry.json").write_text(config)
        words = ["tags", f"{address}/app", "-c", "registry.json"]
        default = fips_host.run(*words)
        other = run(sys.executable, pyz, *words, cwd=str(folder))
    assert default.returncode == 2
    assert "handshake failure" in default.stderr
    assert "TLS" not in other.stderr, other.stderr


def test_openssl_that_began_before_the_gate_is_the_providers_too(fips_host):
    """The host is set up so, from the start of its process."""
    (fips_host.folder / "sitecustomize.py").write_text("import hashlib, ssl")
    fips_host.variables["PYTHONPATH"] = str(fips_host.folder)
    assert json.loads(fips_host.run("version", "--json").stdout)["gate_holds"] is True
    del fips_host.variables["OPENSSL_CONF"]
    refused(fips_host.run("validate", "x"), INACTIVE)


# A provider that is no use.


def flip_a_bit(host: Host) -> None:
    module = host.modules / "fips.so"
    data = bytearray(module.read_bytes())
    data[len(data) // 2] ^= 1
    module.write_bytes(data)


def change(old: str, new: str) -> Callable[[Host], None]:
    """Return a change of the provider's settings."""

    def damage(host: Host) -> None:
        settings = host.modules / "fipsmodule.cnf"
        text = settings.read_text()
        assert old in text
        settings.write_text(text.replace(old, new))

    return damage


def write(text: str) -> Callable[[Host], object]:
    """Return a change of the file that OPENSSL_CONF names."""
    return lambda host: host.conf.write_text(text)


def unlink(name: str) -> Callable[[Host], object]:
    return lambda host: (host.modules / name).unlink()


def put_text(host: Host) -> None:
    (host.modules / "fips.so").write_text("text")


def legacy() -> Path:
    if LEGACY is None:
        pytest.skip("this OpenSSL has no other module")
    return LEGACY


def put_another(host: Host) -> None:
    shutil.copy(legacy(), host.modules / "fips.so")


def name_another(host: Host) -> None:
    setup = SETUP.format(settings=host.modules / "fipsmodule.cnf", section="other")
    host.conf.write_text(f"{setup}[other]\nmodule = {legacy()}\nactivate = 1\n")


def draw_elsewhere(host: Host) -> None:
    """Keys of TLS would be drawn from these; the property alone does not keep a file from that."""
    setup = host.conf.read_text().replace("[init]", "[init]\nrandom = chance")
    setup = setup.replace("base = base_sect", "default = base_sect")
    host.conf.write_text(f"{setup}[chance]\nrandom = CTR-DRBG\nproperties = -fips\n")


def module(name: str, code: str) -> Callable[[Host], None]:
    """Return a change of the Python: this is its module of the name."""

    def replace(host: Host) -> None:
        (host.folder / f"{name}.py").write_text(code)
        host.variables["PYTHONPATH"] = str(host.folder)

    return replace


def double(extension: object, code: str) -> Callable[[Host], None]:
    """Return a change of the Python: the real extension, but for the code.

    As of one whose parts are bound to several copies of OpenSSL: the provider is active in one.
    """

    def replace(host: Host) -> None:
        path = getattr(extension, "__file__", None)
        if path is None:
            pytest.skip("it is inside this interpreter")
        module(extension.__name__, DOUBLE.format(path=path) + code)(host)  # type: ignore[attr-defined]

    return replace


DOUBLE = """\
from importlib.machinery import ExtensionFileLoader, ModuleSpec
loader = ExtensionFileLoader(__name__, {path!r})
real = loader.create_module(ModuleSpec(__name__, loader, origin={path!r}))
loader.exec_module(real)
globals().update(vars(real))
__file__ = {path!r}
"""
MD5 = "openssl_md5 = real.openssl_sha256"
CHACHA = """\
class _SSLContext(real._SSLContext):
    def get_ciphers(self):
        return [{"name": "TLS_CHACHA20_POLY1305_SHA256"}]
"""
BUILT_IN = "openssl_conf = init\n[init]\nproviders = p\n[p]\ndefault = d\n[d]\nactivate = 1\n"
PREFERENCE = f"openssl_conf = init\n{PROPERTY}".replace("fips=yes", "?fips=yes")
INACTIVE = "is not active: "
BESIDE = "is not the only provider: "


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(flip_a_bit, INACTIVE, id="changed module"),
        pytest.param(change("module-mac", "module"), INACTIVE, id="no MAC"),
        pytest.param(unlink("fipsmodule.cnf"), INACTIVE, id="no settings"),
        pytest.param(put_text, INACTIVE, id="no library"),
        pytest.param(write(""), INACTIVE, id="file says nothing"),
        pytest.param(write(f"openssl_conf = init\n{PROPERTY}"), INACTIVE, id="property alone"),
        pytest.param(write(PREFERENCE), INACTIVE, id="preference"),
        pytest.param(write(BUILT_IN), INACTIVE, id="built-in provider"),
        pytest.param(put_another, "does not compute SHA-256", id="another provider put there"),
        pytest.param(name_another, "does not compute SHA-256", id="another provider named so"),
        pytest.param(draw_elsewhere, "does not make the random numbers", id="random numbers"),
        pytest.param(
            module("_ssl", "raise ImportError('no TLS here')"),
            "cannot be used: no TLS here",
            id="Python without TLS",
        ),
        pytest.param(double(_hashlib, MD5), f"{BESIDE}OpenSSL still computes MD5", id="MD5"),
        pytest.param(double(_ssl, CHACHA), f"{BESIDE}TLS still offers ChaCha20", id="ChaCha20"),
    ],
)
def test_what_is_no_provider_of_the_whole_host_is_refused(fips_host, damage, words):
    damage(fips_host)
    refused(fips_host.run("validate", "x"), words)


# Without a provider.


@pytest.mark.parametrize(
    "words",
    [
        "copy localhost:1/a:b localhost:1/c:d",
        "sync -c version --dry-run",
        "validate --log-format text -q -- version",
    ],
)
def test_a_command_is_refused_however_it_is_written(host, words):
    refused(host.run(*words.split()), INACTIVE)


def test_a_refusal_in_json(host):
    done = host.run("sync", "-c", "x", "--json", "--log-format", "json")
    assert done.returncode == 3
    error = json.loads(done.stdout)["error"]
    assert error["message"].startswith(f"the FIPS provider {INACTIVE}")
    assert error["hint"].startswith("install one, with `openssl fipsinstall -module")
    assert json.loads(done.stderr)["level"] == "error"


def test_what_only_tells_works_and_version_says_that_the_gate_is_closed(host):
    for words in (["schema"], ["sync", "-h"]):
        done = host.run(*words)
        assert done.returncode == 0
        assert len(done.stdout) > 100
        assert done.stderr == ""
    for words in (["version"], ["--version"]):
        done = host.run(*words)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"(FIPS gate closed: the FIPS provider {INACTIVE}" in done.stdout
    assert json.loads(host.run("version", "--json").stdout)["gate_holds"] is False


def test_the_other_build_has_no_gate(host, pyz):
    host.file = pyz
    told = json.loads(host.run("version", "--json").stdout)
    assert told["gate"] == "no FIPS gate in this build"
    assert (told["gate_holds"], told["provider"]) == (False, None)
