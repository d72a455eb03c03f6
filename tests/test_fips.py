"""The gate of the default build, on a real provider: it opens for that alone, and nothing gets
around it.

Debian's module stands for a validated one (tools/fips_provider.py): what is shown is that the
program computes by it and refuses to run without, not that anything is validated.
"""

from __future__ import annotations

import _hashlib
import _ssl
import json
import os
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import trustme

from conformance.content.images import Seed
from tests.ends import Start, document, held, tags
from tests.pythons import PYTHONS
from tools import check, fips_provider

LEGACY = next(iter(Path("/usr").glob("lib*/**/ossl-modules/legacy.so")), None)
PROPERTY = "[init]\nalg_section = algorithms\n[algorithms]\ndefault_properties = fips=yes\n"
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


@pytest.fixture
def copy(modules: Path, tmp_path: Path) -> Path:
    """Return a copy of that directory, to be damaged."""
    return Path(shutil.copytree(modules, tmp_path / "copy"))


@pytest.fixture
def active(copy: Path, tmp_path: Path) -> dict[str, Path]:
    """Return the variables of a host that uses the copy of the provider."""
    (tmp_path / "own.cnf").write_text(
        SETUP.format(settings=copy / "fipsmodule.cnf", section="fips_sect")
    )
    return {"OPENSSL_MODULES": copy, "OPENSSL_CONF": tmp_path / "own.cnf"}


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Hold a refusal to its form: status 3, the error with what was looked for, both remedies,
    nothing else.
    """
    assert (done.returncode, done.stdout) == (3, ""), done
    error, hint = done.stderr.splitlines()
    assert error.startswith(REFUSED)
    assert not [word for word in words if word not in error], error
    assert hint.startswith("hint: install one, ")
    assert "`openssl fipsinstall -module" in hint
    assert "regsync-nofips.pyz" in hint


def holds(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether `version --json` says that the gate holds."""
    assert (done.returncode, done.stderr) == (0, ""), done
    return bool(json.loads(done.stdout)["gate_holds"])


# With a provider.


def trusting(ca: trustme.CA, directory: Path) -> str:
    ca.cert_pem.write_to_path(str(directory / "ca.pem"))
    return str(directory / "ca.pem")


def serving(ca: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    return context


@pytest.mark.process
def test_a_sync_over_tls_goes_through_the_provider(
    run: Run, active: dict[str, Path], serve: Start, ca: trustme.CA, tmp_path: Path
) -> None:
    source, target = serve(ssl_context=serving(ca)), serve(ssl_context=serving(ca))
    image = Seed(1).image().load_into(source.app, "app", "v1")
    trusted = {"ca_file": trusting(ca, tmp_path)}
    registries = {
        "source": {"url": source.url, **trusted},
        "target": {"url": target.url, **trusted},
    }
    config = tmp_path / "mirror.json"
    config.write_text(document(registries, {"from": "app", "tags": tags("v1")}))
    done = run("sync", "-q", "--json", "-c", str(config), **active)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["totals"]["images"] == {"synced": 1, "skipped": 0, "failed": 0}
    assert held(target, "app", image)
    before = len(source.journal.entries), len(target.journal.entries)
    closed = run("sync", "-q", "-c", str(config))
    refused(closed, "no fips.so in ")
    assert (len(source.journal.entries), len(target.journal.entries)) == before


def test_a_server_that_speaks_chacha20_only_shares_no_cipher(
    run: Run, pyz: Path, active: dict[str, Path], ca: trustme.CA, tmp_path: Path
) -> None:
    """Under TLS 1.3 the suites are the library's; the other build offers this one."""
    ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(
        str(tmp_path / "server.pem")
    )
    command = ["openssl", "s_server", "-accept", "127.0.0.1:0", "-www", "-tls1_3"]
    command += ["-ciphersuites", "TLS_CHACHA20_POLY1305_SHA256"]
    command += ["-cert", str(tmp_path / "server.pem")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            address = next(line.split()[1] for line in server.stdout if line.startswith("ACCEPT "))
            config = tmp_path / "registry.json"
            registry = {"url": f"https://{address}", "ca_file": trusting(ca, tmp_path)}
            config.write_text(json.dumps({"registries": {"one": registry}, "mappings": []}))
            arguments = ["tags", f"{address}/app", "-c", str(config)]
            other = subprocess.run(
                [sys.executable, str(pyz), *arguments], capture_output=True, text=True, check=False
            )
            done = run(*arguments, **active)
        finally:
            server.kill()
    assert "TLS" not in other.stderr, other.stderr
    assert done.returncode == 2
    assert "TLS handshake" in done.stderr


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("options", [(), ("-I", "-S", "-OO")], ids=["plain", "isolated"])
def test_version_names_the_provider(
    run: Run, active: dict[str, Path], python: str, options: tuple[str, ...]
) -> None:
    told = run("version", "--json", python=PYTHONS[python], options=options, **active)
    provider = json.loads(told.stdout)["provider"]
    assert holds(told)
    assert provider["name"] == "OpenSSL FIPS Provider"
    assert (
        json.loads(told.stdout)["gate"]
        == f"FIPS gate holds: {provider['name']} {provider['version']} is active"
    )


def test_a_provider_that_nothing_activates_is_refused(run: Run, active: dict[str, Path]) -> None:
    """Not even where its settings lie beside it: the host has to use it."""
    modules = active["OPENSSL_MODULES"]
    refused(
        run("validate", "x", OPENSSL_MODULES=modules), "is not active: ", f"'{modules}/fips.so'"
    )
    assert holds(run("version", "--json", **active))


@pytest.mark.parametrize(
    "own",
    [
        "",
        PROPERTY,
        f"openssl_conf = init\n{PROPERTY}",
        f"openssl_conf = init\n{PROPERTY}".replace("fips=yes", "?fips=yes"),
        "openssl_conf = init\n[init]\nproviders = p\n[p]\ndefault = d\n[d]\nactivate = 1\n",
    ],
    ids=["nothing", "no beginning", "property", "preference", "built-in provider"],
)
def test_what_the_operators_file_leaves_out_is_not_added(
    run: Run, active: dict[str, Path], own: str
) -> None:
    active["OPENSSL_CONF"].write_text(own)
    refused(run("validate", "x", **active), "is not active: ", str(active["OPENSSL_CONF"]))


# A provider that is no use.


def flip(copy: Path) -> None:
    module = copy / "fips.so"
    data = bytearray(module.read_bytes())
    data[len(data) // 2] ^= 1
    module.write_bytes(data)


def change(old: str, new: str) -> Callable[[Path], None]:
    def damage(copy: Path) -> None:
        settings = copy / "fipsmodule.cnf"
        text = settings.read_text()
        assert old in text
        settings.write_text(text.replace(old, new))

    return damage


DAMAGES: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "a changed module": (flip, "is not active: "),
    "a changed MAC": (change("module-mac = ", "module-mac = 00:"), "is not active: "),
    "no MAC": (change("module-mac", "module"), "is not active: "),
    "no settings": (lambda copy: (copy / "fipsmodule.cnf").unlink(), "is not active: "),
    "settings that do not parse": (change("[fips_sect]", "[fips_sect"), "is not active: "),
    "another section": (change("[fips_sect]", "[other]"), "is not active: "),
    "no library": (lambda copy: (copy / "fips.so").write_text("text"), "is not active: "),
    "a directory": (lambda copy: [(copy / "fips.so").unlink(), (copy / "fips.so").mkdir()], "no fips.so in "),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_provider_is_refused(
    run: Run, copy: Path, active: dict[str, Path], damage: str
) -> None:
    make, words = DAMAGES[damage]
    make(copy)
    refused(run("validate", "x", **active), words, str(copy))


@pytest.mark.parametrize("way", ["named so", "put there"])
def test_another_provider_by_the_same_name_is_refused(
    run: Run, copy: Path, active: dict[str, Path], way: str
) -> None:
    if LEGACY is None:
        pytest.skip("this OpenSSL has no other module")
    if way == "put there":
        shutil.copy(LEGACY, copy / "fips.so")
    else:
        setup = SETUP.format(settings=copy / "fipsmodule.cnf", section="other")
        active["OPENSSL_CONF"].write_text(f"{setup}[other]\nmodule = {LEGACY}\nactivate = 1\n")
    refused(run("validate", "x", **active), "does not compute SHA-256")


def test_random_numbers_of_another_provider_are_refused(
    run: Run, modules: Path, tmp_path: Path
) -> None:
    """Keys of TLS would be drawn from them; the property alone does not keep an operator's file
    from that.
    """
    setup = SETUP.format(settings=modules / "fipsmodule.cnf", section="fips_sect")
    setup = setup.replace("[init]", "[init]\nrandom = chance").replace(
        "base = base_sect", "default = base_sect"
    )
    (tmp_path / "own.cnf").write_text(f"{setup}[chance]\nrandom = CTR-DRBG\nproperties = -fips\n")
    done = run("validate", "x", OPENSSL_MODULES=modules, OPENSSL_CONF=tmp_path / "own.cnf")
    refused(done, "does not make the random numbers")


def test_openssl_that_began_before_the_gate_is_the_providers_too(
    run: Run, active: dict[str, Path], tmp_path: Path
) -> None:
    """The host is set up so, from the start of its process."""
    (tmp_path / "sitecustomize.py").write_text("import hashlib, ssl")
    variables = {"PYTHONPATH": tmp_path, "OPENSSL_MODULES": active["OPENSSL_MODULES"]}
    refused(run("validate", "x", **variables), "is not active: ")
    assert holds(run("version", "--json", PYTHONPATH=tmp_path, **active))


@pytest.mark.parametrize("module", ["_hashlib", "_ssl", "ctypes"])
def test_a_python_without_what_the_gate_needs_is_refused(
    run: Run, active: dict[str, Path], tmp_path: Path, module: str
) -> None:
    (tmp_path / f"{module}.py").write_text(f"raise ImportError('no {module} here')")
    done = run("validate", "x", PYTHONPATH=tmp_path, **active)
    refused(done, f"cannot be used: no {module} here")


# The real extension, but for what follows.
DOUBLE = """\
from importlib.machinery import ExtensionFileLoader, ModuleSpec
loader = ExtensionFileLoader(__name__, {path!r})
real = loader.create_module(ModuleSpec(__name__, loader, origin={path!r}))
loader.exec_module(real)
globals().update(vars(real))
__file__ = {path!r}
"""
CHACHA = """\
class _SSLContext(real._SSLContext):
    def get_ciphers(self):
        return [{"name": "TLS_CHACHA20_POLY1305_SHA256"}]
"""


@pytest.mark.parametrize(
    ("extension", "instead", "words"),
    [
        pytest.param(_hashlib, "openssl_md5 = real.openssl_sha256",
            "is not the only provider: OpenSSL still computes MD5", id="MD5"),
        pytest.param(_ssl, CHACHA, "is not the only provider: TLS still offers ChaCha20", id="ChaCha20"),
    ],
)  # fmt: skip
def test_an_extension_that_computes_elsewhere_is_refused(
    run: Run,
    active: dict[str, Path],
    tmp_path: Path,
    extension: ModuleType,
    instead: str,
    words: str,
) -> None:
    """As of a Python whose parts are bound to several copies of OpenSSL: the provider is active in
    one of them.
    """
    if not getattr(extension, "__file__", None):
        pytest.skip("it is inside this interpreter")
    (tmp_path / f"{extension.__name__}.py").write_text(
        DOUBLE.format(path=extension.__file__) + instead
    )
    refused(run("validate", "x", PYTHONPATH=tmp_path, **active), words)


# Without a provider.

COMMANDS = {
    "copy": ["copy", "localhost:1/a:b", "localhost:1/c:d"],
    "sync": ["sync", "-c", "x"],
    "dry run": ["sync", "-c", "version", "--dry-run"],
    "validate": ["validate", "schema"],
    "before its command": ["-c", "schema", "sync"],
    "odd options": ["--log-format", "text", "-q", "validate", "--", "version"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_refused_however_it_is_written(run: Run, tmp_path: Path, name: str) -> None:
    refused(run(*COMMANDS[name]), f"is not found: no fips.so in ['{tmp_path}/none']")


def test_no_command_is_told_first(run: Run) -> None:
    done = run()
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        3,
        "error: CONFIG_ERROR: a command is needed",
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no fips.so"),
        (f"openssl_conf = init\n{PROPERTY}", "no fips.so"),
        ("openssl_conf", "no fips.so"),
        (None, "no fips.so"),
    ],
    ids=["nothing", "the property alone", "does not parse", "absent"],
)
def test_an_operators_file_that_is_no_use(
    run: Run, tmp_path: Path, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / "own.cnf").write_text(text)
    refused(run("validate", "x", OPENSSL_CONF=tmp_path / "own.cnf"), words)


def test_names_from_the_environment_do_no_harm_to_a_terminal(run: Run, tmp_path: Path) -> None:
    odd = f"{tmp_path}/\x1b[2J\nerror: \udcff"
    refused(run("validate", "x", OPENSSL_MODULES=odd), "\\x1b[2J\\nerror: ")
    (tmp_path / "none" / "fips.so").touch()
    refused(run("validate", "x", OPENSSL_CONF=odd), "is not active: ", "\\x1b[2J\\nerror: ")


@pytest.mark.parametrize("arguments", [["schema", "--report"], ["sync", "-h"]], ids=" ".join)
def test_what_only_tells_works_and_says_that_the_gate_is_closed(
    run: Run, arguments: list[str]
) -> None:
    done = run(*arguments)
    assert done.returncode == 0
    assert len(done.stdout) > 100
    assert done.stderr.startswith("warning: the FIPS provider is not found: no fips.so in ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["version"], ["--version"]], ids=" ".join)
def test_version_says_that_the_gate_is_closed(run: Run, arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "(FIPS gate closed: the FIPS provider is not found: no fips.so in " in done.stdout
    assert not holds(run(*arguments, "--json")) if "version" in arguments else True


# Other systems, in this process.


def test_the_other_build_has_no_gate(pyz: Path, tmp_path: Path) -> None:
    environment = {"OPENSSL_MODULES": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(pyz), "version", "--json"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    told = json.loads(done.stdout)
    assert (told["gate"], told["gate_holds"], told["provider"]) == (
        "no FIPS gate in this build",
        False,
        None,
    )


# Where the provider of these tests comes from.

BOOKWORM = 'ID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n'


def test_the_suite_with_the_package() -> None:
    assert fips_provider.suite_of(BOOKWORM) == ("bookworm", "trixie")
    later = BOOKWORM.replace("12", "14").replace("bookworm", "forky")
    assert fips_provider.suite_of(later) == ("forky", "forky")


@pytest.mark.parametrize(
    ("release", "why"),
    [
        ("", "this is no Debian"),
        (BOOKWORM.replace("ID=debian", "ID=ubuntu"), "not a release of Debian"),
        (BOOKWORM.replace("12", "11"), "older than the package's C library"),
    ],
)
def test_machines_without_the_package(release: str, why: str) -> None:
    with pytest.raises(fips_provider.ProviderError, match=why):
        fips_provider.suite_of(release)


@pytest.mark.parametrize(
    "lists",
    [
        "# old\ndeb-src http://no.test/debian bookworm main\n"
        "deb [arch=amd64 signed-by=/k.gpg] http://m.test/d bookworm main\n",
        "Types: deb\nURIs: http://no.test/x\nSuites: other\n\n"
        "Types: deb deb-src\n# hint\nURIs: http://m.test/d\nSuites: bookworm bookworm-updates\nSigned-By: /k.gpg\n",
    ],
    ids=["list", "sources"],
)
def test_the_machines_own_mirror_is_asked(lists: str) -> None:
    told = fips_provider.source_of(lists, "bookworm", "trixie")
    assert (
        told
        == "Types: deb\nURIs: http://m.test/d\nSuites: trixie\nComponents: main\nSigned-By: /k.gpg\n"
    )
    with pytest.raises(fips_provider.ProviderError, match="no source for trixie"):
        fips_provider.source_of(lists, "trixie", "trixie")


def test_the_set_up_says_in_one_line_why_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On a machine without apt, for a checkout that has none yet."""
    (tmp_path / "tools").mkdir()
    shutil.copy(fips_provider.__file__, tmp_path / "tools")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    check.ready_provider()
    told = "check: no FIPS provider, its tests are skipped: no apt-get on this machine\n"
    assert capsys.readouterr().out == told
