"""What is the static executable's alone, on the one that `--file` names: nothing of the host is needed,
names, certificate authorities where distributions keep them.

tests/test_hosts.py syncs by it in an empty root; other modules run it as they run the
checkout (tests/conftest.py).
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from conformance.http import run_in_thread
from conformance.images import Seed
from conformance.registry import App
from tests.builds import NOBODY
from tests.program import Chosen


def is_executable(path: Path) -> bool:
    """Tell whether a file needs no interpreter (elf(5))."""
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        Chosen.file is None or not is_executable(Chosen.file),
        reason="runs with --file and a static executable",
    ),
]
as_root = pytest.mark.skipif(os.getuid() != 0, reason="chroot is root's")

NAME_SERVER = ("127.0.0.77", 53)
A, AAAA = 1, 28
NO_ERROR, TROUBLE, NO_NAME = 0, 2, 3  # 2: SERVFAIL (RFC 1035 section 4.1.1)
LISTED = (0, "v1\n", "")


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
    assert (told["build"], told["gate"]) == ("static", "static file, no FIPS gate")
    for command in ("--help", "schema"):
        assert run(root, command).stderr == ""
    parts = json.loads(run(root, "version", "--sbom").stdout)["components"]
    assert {"CPython", "OpenSSL", "SQLite", "musl", "zlib"} <= {each["name"] for each in parts}


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
    assert {kind for _, kind in names.asked} == {A, AAAA}


@as_root
def test_a_name_of_the_hosts_file_is_asked_of_nobody(root, names, port):
    (root / "etc" / "hosts").write_text("127.0.0.1 mirror.test\n")
    assert list_tags(root, f"http://mirror.test:{port}") == LISTED
    assert names.asked == []
