"""What is the static executable's alone, on the one that `--file` names: nothing of the host is needed,
names, certificate authorities where distributions keep them, what its own library of TLS speaks.

Both variants are judged. Their TLS meets servers on the host's OpenSSL.

tests/test_hosts.py syncs by it in an empty root; other modules run it as they run the
checkout (tests/conftest.py).
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from conformance.http import run_in_thread
from conformance.images import Seed
from conformance.registry import App
from tests.builds import NOBODY, contents, openssl_server
from tests.program import Chosen, Ran, run_process

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Chosen.is_static, reason="runs with --file and a static executable"),
]
as_root = pytest.mark.skipif(os.getuid() != 0, reason="chroot is root's")

NAME_SERVER = ("127.0.0.77", 53)
A, AAAA = 1, 28
NO_ERROR, TROUBLE, NO_NAME = 0, 2, 3  # 2: SERVFAIL (RFC 1035 section 4.1.1)
LISTED = (0, "v1\n", "")
CLAIM = (
    "FIPS gate holds: AWS-LC FIPS 3.1.0 is active: built from the source of AWS-LC FIPS 3.1.0, the module"
    " version of certificate #5314; not claimed as validated outside the environments of its security policy"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a root that holds the file alone."""
    place = tmp_path / "root"
    place.mkdir(mode=0o755)
    assert Chosen.file is not None
    shutil.copy(Chosen.file, place / "regsync")
    return place


def run(root: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the file in its root as a user without a name, with these variables and no others."""
    chroot = ["/usr/sbin/chroot", f"--userspec={NOBODY}:{NOBODY}", str(root), "/regsync"]
    return subprocess.run(
        [*chroot, *arguments], capture_output=True, text=True, env=environ, check=False
    )


def list_tags(root: Path, url: str, **environ: str) -> tuple[int, str, str]:
    """List the tags of the repository that each registry here has."""
    document = {"registries": {"r": {"url": url}}, "mappings": []}
    (root / "c.yaml").write_text(json.dumps(document))
    done = run(root, "tags", f"{url.partition('://')[2]}/app", "-c", "/c.yaml", **environ)
    return done.returncode, done.stdout, done.stderr


def test_the_kernel_alone_starts_it(pyz):
    """It names no interpreter of libraries (PT_INTERP of elf(5))."""
    head = pyz.read_bytes()[:4096]
    (offset,) = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    kinds = {struct.unpack_from("<I", head, offset + n * size)[0] for n in range(count)}
    assert not kinds & {2, 3}  # PT_DYNAMIC, PT_INTERP
    assert pyz.stat().st_size < 25_000_000


@as_root
def test_in_an_empty_root_it_says_what_it_is(root):
    done = run(root, "version", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert told["gate"] == (
        CLAIM if told["build"] == "static-fips" else "no FIPS gate in this build"
    )
    assert told["build"] in ("static-fips", "static-nofips")
    for command in ("--help", "schema"):
        assert run(root, command).stderr == ""
    parts = json.loads(contents(root / "regsync")["sbom.cdx.json"])["components"]
    library = "AWS-LC" if told["gate_holds"] else "OpenSSL"
    assert {"CPython", library, "SQLite", "musl", "zlib"} <= {each["name"] for each in parts}


@as_root
def test_that_it_cannot_be_read_is_said(root):
    (root / "regsync").chmod(0o111)
    done = run(root, "version")
    assert done.returncode == 3
    assert done.stderr == (
        "error: CONFIG_ERROR: regsync cannot read its own file; allow it with chmod a+r /regsync\n"
    )


@as_root
@pytest.mark.parametrize(
    ("place", "variable"),
    [
        ("etc/ssl/cert.pem", ""),
        ("etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", ""),
        ("etc/pki/tls/cert.pem", ""),
        ("etc/ssl/certs/ca-certificates.crt", ""),
        ("etc/ssl/ca-bundle.pem", ""),
        ("own.pem", "SSL_CERT_FILE"),
        ("etc/ssl/certs/HASH.0", ""),
        ("own/HASH.0", "SSL_CERT_DIR"),
    ],
)
def test_authorities_are_found_where_distributions_keep_them(root, ca: trustme.CA, place, variable):
    pem = ca.cert_pem.bytes()
    command = ["openssl", "x509", "-noout", "-subject_hash"]
    told = subprocess.run(command, input=pem, capture_output=True, check=True)
    place = place.replace("HASH", told.stdout.decode().strip())
    path = f"/{Path(place).parent}" if variable == "SSL_CERT_DIR" else f"/{place}"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    with run_in_thread(App(), ssl_context=context) as server:
        Seed(1).image().load_into(server.app, "app", tag="v1")
        status, _, without = list_tags(root, server.url)
        assert status == 3
        assert "no certificate" in without
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_bytes(pem)
        environ = {variable: path} if variable else {}
        assert list_tags(root, server.url, **environ) == LISTED


class NameServer(threading.Thread):
    """Answers to questions by (name, kind): a code; None for silence. Addresses are 127.0.0.1."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.answers: dict[tuple[str, int], list[int | None]] = {}
        self.asked: list[tuple[str, int]] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(NAME_SERVER)

    def run(self) -> None:
        while True:
            question, asker = self._socket.recvfrom(2000)
            if not question:
                return
            name, kind, end = parse_question(question)
            self.asked.append((name, kind))
            codes = self.answers.get((name, kind), [NO_NAME])
            code = codes.pop(0) if len(codes) > 1 else codes[0]
            if code is not None:
                answer = b""
                if code == NO_ERROR and kind == A:
                    address = socket.inet_aton("127.0.0.1")
                    answer = b"\xc0\x0c" + struct.pack("!HHIH", kind, 1, 60, 4) + address
                counts = struct.pack("!HHHHH", 0x8180 | code, 1, 1 if answer else 0, 0, 0)
                self._socket.sendto(question[:2] + counts + question[12:end] + answer, asker)

    def end(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
            own.sendto(b"", NAME_SERVER)
        self.join()
        self._socket.close()


def parse_question(packet: bytes) -> tuple[str, int, int]:
    """Return the name and the kind that a packet asks for, and where its question ends."""
    labels = []
    place = 12
    while packet[place]:
        end = place + 1 + packet[place]
        labels.append(packet[place + 1 : end].decode())
        place = end
    (kind,) = struct.unpack_from("!H", packet, place + 1)
    return ".".join(labels), kind, place + 5


@pytest.fixture
def names(root: Path) -> Iterator[NameServer]:
    """Start a name server, which the root asks."""
    (root / "etc").mkdir()
    (root / "etc" / "resolv.conf").write_text("search corp.test\nnameserver 127.0.0.77\n")
    server = NameServer()
    server.start()
    yield server
    server.end()


@pytest.fixture
def port() -> Iterator[str]:
    """Start a registry without TLS."""
    with run_in_thread(App()) as server:
        Seed(1).image().load_into(server.app, "app", tag="v1")
        yield server.address.rpartition(":")[2]


@as_root
@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("a.test", {("a.test", A): [NO_ERROR], ("a.test", AAAA): [NO_ERROR]}),
        ("a.test", {("a.test", A): [NO_ERROR], ("a.test", AAAA): [None]}),
        ("a.test", {("a.test", A): [NO_ERROR], ("a.test", AAAA): [TROUBLE]}),
        ("a.test", {("a.test", A): [TROUBLE, TROUBLE, TROUBLE, NO_ERROR]}),
        ("mirror", {("mirror.corp.test", A): [NO_ERROR]}),
    ],
    ids=["both", "silent-about-IPv6", "trouble-with-IPv6", "trouble-at-first", "search-domain"],
)
def test_a_name_is_found_whatever_becomes_of_the_other_question(root, names, port, name, answers):
    names.answers = answers
    assert list_tags(root, f"http://{name}:{port}") == LISTED
    assert {kind for _, kind in names.asked} == {A}  # IPv6 is asked for where this leads nowhere


@as_root
def test_a_name_of_the_hosts_file_is_asked_of_nobody(root, names, port):
    (root / "etc" / "hosts").write_text("127.0.0.1 mirror.test\n")
    assert list_tags(root, f"http://mirror.test:{port}") == LISTED
    assert names.asked == []


# TLS.


@pytest.fixture(scope="module")
def has_module(pyz: Path) -> bool:
    """Tell whether the file has the FIPS module."""
    told = json.loads(run_process("version", "--json").out)
    return bool(told["build"] == "static-fips")


def ask(directory: Path, ca: trustme.CA, port: int, host: str = "127.0.0.1", **fields: str) -> Ran:
    """List tags over TLS at a port."""
    ca.cert_pem.write_to_path(str(directory / "ca.pem"))
    registry = {"url": f"https://{host}:{port}", "ca_file": "ca.pem", **fields}
    (directory / "c.json").write_text(json.dumps({"registries": {"r": registry}, "mappings": []}))
    return run_process("tags", f"{host}:{port}/app", "-c", str(directory / "c.json"))


# What a server of the host's OpenSSL allows alone; whether the file without the module speaks with it,
# and whether the one with it does.
ALLOWED = [
    ("-tls1_3 -groups P-256", True, True),
    ("-tls1_3 -groups P-384", True, True),
    ("-tls1_3 -groups P-521", True, True),
    ("-tls1_3 -groups X25519", True, False),
    ("-tls1_3 -ciphersuites TLS_AES_128_GCM_SHA256", True, True),
    ("-tls1_3 -ciphersuites TLS_CHACHA20_POLY1305_SHA256", True, False),
    ("-tls1_2 -cipher ECDHE+AESGCM", True, True),
    ("-tls1_2 -cipher ECDHE+AESGCM -groups X25519", True, False),
    ("-tls1_2 -cipher ECDHE+CHACHA20", False, False),
    ("-tls1_2 -cipher AES128-GCM-SHA256", False, False),
    ("-tls1_1 -cipher ALL:@SECLEVEL=0", False, False),
]


@pytest.mark.parametrize(("options", "without", "with_module"), ALLOWED, ids=str)
def test_what_is_negotiated(tmp_path, ca, has_module, options, without, with_module):
    leaf = ca.issue_cert("127.0.0.1", key_type=trustme.KeyType.RSA)
    leaf.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    with openssl_server(tmp_path / "server.pem", f"-naccept 1 {options}") as address:
        ran = ask(tmp_path, ca, int(address.rpartition(":")[2]))
    spoke = with_module if has_module else without
    assert ("TLS" in ran.err) is not spoke, ran.err
    if not spoke:
        assert re.search("handshake failure|protocol", ran.err), ran.err


UTC = datetime.timezone.utc
PAST = datetime.datetime(2021, 1, 1, tzinfo=UTC)
FUTURE = datetime.datetime(2037, 1, 1, tzinfo=UTC)

# How the host's `openssl` makes a server's certificate.
SELF_SIGNED = "req -x509 -newkey rsa:2048 -sha256"
SHORT_KEY = "req -x509 -newkey rsa:1024 -sha256"


def own_certificate(command: str) -> Callable[[trustme.CA, Path], Path]:
    """Return how `openssl` makes a certificate of no authority."""

    def make(ca: trustme.CA, directory: Path) -> Path:
        path = directory / "server.pem"
        names = ["-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1"]
        files = ["-nodes", "-keyout", f"{path}.key", "-out", str(path)]
        subprocess.run(
            ["openssl", *command.split(), *names, *files], check=True, capture_output=True
        )
        path.write_bytes(Path(f"{path}.key").read_bytes() + path.read_bytes())
        return path

    return make


def signed_over_sha1(ca: trustme.CA, directory: Path) -> Path:
    """Return a certificate of the authority, as old ones sign."""
    path = own_certificate(SELF_SIGNED)(ca, directory)
    authority = directory / "authority.pem"
    ca.private_key_pem.write_to_path(str(authority))
    ca.cert_pem.write_to_path(str(authority), append=True)
    key = Path(f"{path}.key").read_bytes()
    (directory / "names").write_text("subjectAltName=IP:127.0.0.1")
    request = ["openssl", "req", "-new", "-key", f"{path}.key", "-subj", "/CN=x"]
    asked = subprocess.run(request, check=True, capture_output=True).stdout
    sign = ["openssl", "x509", "-req", "-sha1", "-CA", str(authority), "-CAkey", str(authority)]
    sign += ["-extfile", str(directory / "names"), "-set_serial", "1"]
    signed = subprocess.run(sign, input=asked, check=True, capture_output=True).stdout
    path.write_bytes(key + signed)
    return path


def issued(
    authority: trustme.CA | None = None, name: str = "127.0.0.1", **options: Any
) -> Callable[[trustme.CA, Path], Path]:
    """Return how an authority, the trusted one or another, makes a certificate."""

    def make(ca: trustme.CA, directory: Path) -> Path:
        path = directory / "server.pem"
        leaf = (authority or ca).issue_cert(name, **options)
        leaf.private_key_and_cert_chain_pem.write_to_path(str(path))
        return path

    return make


@pytest.mark.parametrize(
    ("make", "told"),
    [
        pytest.param(issued(), "", id="fine"),
        pytest.param(issued(not_after=PAST), "certificate has expired", id="expired"),
        pytest.param(issued(not_before=FUTURE), "certificate is not yet valid", id="not valid yet"),
        pytest.param(issued(name="elsewhere.example"), "certificate is not valid for '127.0.0.1'", id="wrong host"),
        pytest.param(issued(trustme.CA()), "unable to get local issuer certificate", id="unknown authority"),
        pytest.param(own_certificate(SELF_SIGNED), "self.signed certificate", id="self-signed"),
        pytest.param(own_certificate(SHORT_KEY), "self.signed certificate|too weak", id="self-signed, 1024 bits"),
        pytest.param(signed_over_sha1, "too weak", id="over SHA-1"),
    ],
)  # fmt: skip
def test_what_a_server_shows_is_judged_alike(tmp_path, ca, make, told):
    """An old authority inside a company among others."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.load_cert_chain(make(ca, tmp_path))
    with run_in_thread(App(), ssl_context=context) as server:
        Seed(1).image().load_into(server.app, "app", tag="v1")
        ran = ask(tmp_path, ca, int(server.address.rpartition(":")[2]))
    if told:
        assert ran.status == 2
        assert re.search(f"127.0.0.1 is not trusted: .*({told})", ran.err), ran.err
    else:
        assert (ran.status, ran.out, ran.err) == LISTED


def test_an_old_authority_with_a_short_key_is_refused_though_it_is_named(tmp_path, ca):
    make = own_certificate(SHORT_KEY)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    path = make(ca, tmp_path)
    context.load_cert_chain(path)
    with run_in_thread(App(), ssl_context=context) as server:
        port = int(server.address.rpartition(":")[2])
        ran = ask(tmp_path, ca, port, ca_file=str(path))
    assert ran.status == 2
    assert re.search("is not trusted: .* too weak", ran.err), ran.err


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_server_that_wants_a_client_certificate(tmp_path, ca, version):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = version
    context.verify_mode = ssl.CERT_REQUIRED
    ca.issue_cert("127.0.0.1").configure_cert(context)
    ca.configure_trust(context)
    leaf = ca.issue_cert("client.example")
    leaf.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "client.pem"))
    with run_in_thread(App(), ssl_context=context) as server:
        Seed(1).image().load_into(server.app, "app", tag="v1")
        port = int(server.address.rpartition(":")[2])
        without = ask(tmp_path, ca, port)
        with_it = ask(tmp_path, ca, port, client_cert=str(tmp_path / "client.pem"))
    assert without.status == 2
    assert re.search("certificate required|handshake failure", without.err), without.err
    assert "give client_cert" in without.err
    assert (with_it.status, with_it.out, with_it.err) == LISTED


def test_an_encrypted_key_of_a_client_is_an_error_of_the_configuration(tmp_path, ca):
    make = own_certificate("req -x509 -newkey rsa:2048 -passout pass:x")
    path = make(ca, tmp_path)
    locked = ["openssl", "rsa", "-aes256", "-passout", "pass:x", "-in", f"{path}.key"]
    done = subprocess.run(locked, check=True, capture_output=True)
    (tmp_path / "locked.key").write_bytes(done.stdout)
    files = {"client_cert": str(path), "client_key": str(tmp_path / "locked.key")}
    ran = ask(tmp_path, ca, 1, **files)
    assert ran.status == 3
    assert "cannot be used: " in ran.err
    assert "a key without a passphrase" in ran.err


def test_plain_http_where_tls_is_expected(tmp_path, ca):
    def answer(listener: socket.socket) -> None:
        with listener.accept()[0] as peer:
            peer.recv(1000)
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        ran = ask(tmp_path, ca, listener.getsockname()[1])
        thread.join()
    assert ran.status == 2
    assert "write http:// before the host" in ran.err
