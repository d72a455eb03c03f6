"""Which authorities a context trusts, which certificates it shows, and how failures read; handshakes
run in memory, without sockets.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import ssl
import types

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import serialization as form

from _regsync import edge
from _regsync.errors import ConfigError
from _regsync.net import trust

HOST = "registry.example"


@pytest.fixture
def ca_file(ca, tmp_path):
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return str(tmp_path / "ca.pem")


@pytest.fixture(autouse=True)
def defaults(monkeypatch, tmp_path):
    """Stand in for the paths that OpenSSL was compiled with, and hide this machine's bundles."""

    def set_paths(cafile, capath):
        paths = ssl.DefaultVerifyPaths("", "", "SSL_CERT_FILE", cafile, "SSL_CERT_DIR", capath)
        monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: paths)
        monkeypatch.setattr(trust, "_BUNDLES", ())

    set_paths(str(tmp_path / "none.pem"), str(tmp_path / "none"))
    return set_paths


def hashed(directory, ca):
    """Lay a directory out as `openssl rehash` does, without calling it: a name is the SHA-1 over
    the canonical subject (lower case, UTF8String, without the outer SEQUENCE).
    """
    encoded = b""
    for attribute in x509.load_pem_x509_certificate(ca.cert_pem.bytes()).subject:
        text = " ".join(str(attribute.value).lower().split()).encode()
        oid = x509.Name([attribute]).public_bytes()
        start = oid.index(b"\x06")
        oid = oid[start : start + 2 + oid[start + 1]]
        pair = oid + b"\x0c" + bytes([len(text)]) + text
        sequence = b"\x30" + bytes([len(pair)]) + pair
        encoded += b"\x31" + bytes([len(sequence)]) + sequence
    number = int.from_bytes(hashlib.sha1(encoded).digest()[:4], "little")
    directory.mkdir()
    (directory / f"{number:08x}.0").write_bytes(ca.cert_pem.bytes())
    return str(directory)


def context_of(environ=None, **options):
    with edge.using(edge.current()._replace(environ=environ or {})):
        return trust.make_context(**options)


def server(issued, **settings):
    """Return the context of a server with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued.configure_cert(context)
    for name, value in settings.items():
        setattr(context, name, value)
    return context


def shake(client, peer, host=HOST):
    """Run a handshake through memory; return the TLS version, raise what the client raises."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=host)
    theirs = peer.wrap_bio(to_server, to_client, server_side=True)
    pending, server_error = [ours, theirs], None
    for _ in range(10):
        for side in list(pending):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                if side is ours:
                    raise
                server_error = error
            pending.remove(side)
    if server_error is not None:
        # Under TLS 1.3 the client learns from its first read what the server thought of its
        # certificate.
        ours.read(1)
    return ours.version()


def refusal(client, peer, host=HOST):
    with pytest.raises(ssl.SSLError) as caught:
        shake(client, peer, host)
    return trust.explain(caught.value, host)


# Which authorities.


def test_ca_file_is_added_to_the_systems_trust(ca, ca_file, tmp_path):
    other = trustme.CA()
    other.cert_pem.write_to_path(str(tmp_path / "system.pem"))
    context = context_of({"SSL_CERT_FILE": str(tmp_path / "system.pem")}, ca_file=ca_file)
    assert shake(context, server(other.issue_cert(HOST))) == "TLSv1.3"
    assert shake(context, server(ca.issue_cert(HOST)))


def test_an_intermediate_as_ca_file_anchors_a_chain(ca, tmp_path):
    intermediate = ca.create_child_ca()
    intermediate.cert_pem.write_to_path(str(tmp_path / "intermediate.pem"))
    context = context_of(ca_file=str(tmp_path / "intermediate.pem"))
    assert shake(context, server(intermediate.issue_cert(HOST)))


def test_a_hashed_default_directory_is_used_alone(ca, ca_file, tmp_path, defaults, monkeypatch):
    """Parsing a bundle costs 30 ms and megabytes; a hashed directory costs one file per look-up."""
    defaults(ca_file, hashed(tmp_path / "certs", ca))
    monkeypatch.setattr(trust, "_load", None)
    assert shake(context_of(), server(ca.issue_cert(HOST)))


def test_a_default_directory_without_hashed_names_gives_way_to_the_bundle(
    ca, ca_file, tmp_path, defaults
):
    (tmp_path / "certs").mkdir()
    (tmp_path / "certs" / "ca.pem").write_bytes(ca.cert_pem.bytes())
    defaults(ca_file, str(tmp_path / "certs"))
    context = context_of()
    assert len(context.get_ca_certs()) == 1
    assert shake(context, server(ca.issue_cert(HOST)))


def test_well_known_bundles_are_found_where_openssls_defaults_are_absent(ca_file, monkeypatch):
    monkeypatch.setattr(trust, "_BUNDLES", ("/nowhere/bundle.pem", ca_file, ca_file))
    assert len(context_of().get_ca_certs()) == 1


def test_each_variable_replaces_its_own_default_only(ca, ca_file, tmp_path, defaults):
    """docs/protocol-facts.md section 8.2."""
    system = trustme.CA()
    defaults(ca_file, hashed(tmp_path / "certs", system))
    empty = tmp_path / "empty"
    empty.mkdir()
    peer = server(system.issue_cert(HOST))
    assert shake(context_of({"SSL_CERT_FILE": ca_file}), peer)
    both = context_of({"SSL_CERT_FILE": ca_file, "SSL_CERT_DIR": str(empty)})
    assert "unable to get local issuer certificate" in refusal(both, peer)[0]
    assert shake(both, server(ca.issue_cert(HOST)))
    searched = os.pathsep.join((str(empty), str(tmp_path / "certs")))
    assert shake(context_of({"SSL_CERT_DIR": searched}), peer)


FILE, DIRECTORY = "SSL_CERT_FILE", "SSL_CERT_DIR"
MISSING = "none.pem does not exist"
OURS = {"ca_file": "ca.pem", "client_cert": "leaf.pem"}
# Variables, fields of the configuration, and the words of the error.
USELESS = [
    ({}, {}, "no certificate authorities found"),
    ({FILE: "none.pem"}, {}, f"SSL_CERT_FILE=none.pem: {MISSING}"),
    ({FILE: "junk.pem"}, {}, "SSL_CERT_FILE=junk.pem cannot be used"),
    ({FILE: "empty"}, {}, "SSL_CERT_FILE=empty: empty is not a file"),
    ({DIRECTORY: "empty:none"}, {}, "no certificate authorities found"),
    ({}, {"ca_file": "none.pem"}, f"ca_file none.pem: {MISSING}"),
    ({}, {"ca_file": "junk.pem"}, "ca_file junk.pem cannot be used: no certificate or crl found"),
    ({}, {"ca_file": "ca.pem", "client_cert": "none.pem"}, f"client_cert none.pem with client_key none.pem: {MISSING}"),
    ({}, {**OURS, "client_key": "none.pem"}, f"client_key none.pem: {MISSING}"),
    ({}, OURS, "client_cert leaf.pem with client_key leaf.pem cannot be used"),
    ({}, {**OURS, "client_key": "other.pem"}, "client_key other.pem cannot be used: key values mismatch"),
    ({}, {**OURS, "client_key": "locked.pem"}, "client_key locked.pem cannot be used"),
    ({}, {"ca_file": "ca.pem", "certs_d": ("d/client.cert",)}, "d/client.cert does not exist"),
    ({}, {"certs_d": ("d/gone.crt",)}, "ca_file d/gone.crt: d/gone.crt does not exist"),
    ({FILE: "pipe.crt"}, {}, "pipe.crt is not a file"),
    ({}, {"ca_file": "pipe.crt"}, "pipe.crt is not a file"),
    ({}, {**OURS, "client_cert": "pipe.crt"}, "pipe.crt is not a file"),
    ({}, {"certs_d": ("pipe.crt",)}, "pipe.crt is not a file"),
]  # fmt: skip


@pytest.mark.usefixtures("ca_file")
@pytest.mark.parametrize(("environ", "fields", "complaint"), USELESS)
def test_what_leads_to_nothing_is_a_config_error_naming_it(
    environ, fields, complaint, ca, tmp_path, monkeypatch
):
    leaf, other = ca.issue_cert("client.example"), ca.issue_cert("other.example")
    key = form.load_pem_private_key(leaf.private_key_pem.bytes(), None)
    secret = form.BestAvailableEncryption(b"passphrase")
    locked = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, secret)
    (tmp_path / "junk.pem").write_text("nothing of use")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.crt")  # which would be waited for
    (tmp_path / "leaf.pem").write_bytes(leaf.cert_chain_pems[0].bytes())
    (tmp_path / "other.pem").write_bytes(other.private_key_pem.bytes())
    (tmp_path / "locked.pem").write_bytes(locked)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        context_of(environ, **fields)
    assert complaint in caught.value.message


def test_a_file_that_this_user_may_not_read_is_named(ca_file, tmp_path, monkeypatch):
    """Docker's own keys are root's; who is root here is refused nothing, so the system's answer is
    stood in for.
    """
    files = tuple(str(tmp_path / name) for name in ("client.cert", "client.key"))
    for file in files:
        open(file, "wb").close()
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith(".key"))
    with pytest.raises(ConfigError, match=r"\.key is not a file, or this user may not read it"):
        context_of(ca_file=ca_file, certs_d=files)


# What is shown and spoken.


@pytest.mark.parametrize("files", [1, 2], ids=["one-file", "two-files"])
def test_a_client_certificate_is_shown(ca, ca_file, tmp_path, files):
    leaf = ca.issue_cert("client.example")
    certificate, key = tmp_path / "leaf.pem", tmp_path / "key.pem"
    key.write_bytes(leaf.private_key_pem.bytes())
    both = leaf.private_key_and_cert_chain_pem
    certificate.write_bytes((both if files == 1 else leaf.cert_chain_pems[0]).bytes())
    peer = server(ca.issue_cert(HOST), verify_mode=ssl.CERT_REQUIRED)
    ca.configure_trust(peer)
    client_key = None if files == 1 else str(key)
    ours = context_of(ca_file=ca_file, client_cert=str(certificate), client_key=client_key)
    assert shake(ours, peer)
    message, hint = refusal(context_of(ca_file=ca_file), peer)
    assert "certificate required" in message
    assert "client_cert" in hint


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated:DeprecationWarning")
def test_nothing_below_tls_1_2_is_spoken(ca, ca_file):
    context = context_of(ca_file=ca_file)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    peer = server(ca.issue_cert(HOST), maximum_version=ssl.TLSVersion.TLSv1_2)
    assert shake(context, peer) == "TLSv1.2"
    peer.minimum_version = peer.maximum_version = ssl.TLSVersion.TLSv1_1
    assert "handshake failure" in refusal(context, peer)[0]
    peer.set_ciphers("ALL:@SECLEVEL=0")
    assert "protocol version" in refusal(context, peer)[0]


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1 is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("policy", "least"), [("TLSv1", "TLSv1_2"), ("TLSv1_3", "TLSv1_3")])
def test_a_laxer_policy_of_the_system_is_tightened_and_a_stricter_one_stays(
    policy, least, ca_file, monkeypatch
):
    """As where Python is built to leave the lowest version to the system, which Debian's is not and
    RHEL's is.
    """
    system = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    system.minimum_version = ssl.TLSVersion[policy]
    monkeypatch.setattr(trust, "_new_context", lambda: system)
    assert context_of(ca_file=ca_file).minimum_version == ssl.TLSVersion[least]


def test_neither_chacha20_nor_md5_is_offered_below_tls_1_3(ca, ca_file):
    """All others of the system's policy stay. Python cannot choose those of TLS 1.3, of which AES
    comes first.
    """
    before = [each["name"] for each in ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).get_ciphers()]
    context = context_of(ca_file=ca_file)
    offered = [each["name"] for each in context.get_ciphers()]
    assert offered[0] == "TLS_AES_256_GCM_SHA384"
    assert [name for name in before if name not in offered] == [
        name for name in before if "CHACHA20" in name and not name.startswith("TLS_")
    ]
    assert not [name for name in offered if "MD5" in name]
    peer = server(ca.issue_cert(HOST), maximum_version=ssl.TLSVersion.TLSv1_2)
    peer.set_ciphers("ECDHE-ECDSA-CHACHA20-POLY1305:ECDHE-RSA-CHACHA20-POLY1305")
    assert "handshake failure" in refusal(context, peer)[0]


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_every_platform_verifies_chain_and_name(platform, ca_file, monkeypatch):
    monkeypatch.setattr(trust, "sys", types.SimpleNamespace(platform=platform))
    context = context_of(ca_file=ca_file)
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert (type(context).__module__.partition(".")[0] == "truststore") is (platform != "linux")


# How failures read.

UTC = datetime.timezone.utc
PAST, FUTURE = datetime.datetime(2021, 1, 1, tzinfo=UTC), datetime.datetime(2037, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("issue", "host", "verdict", "remedy"),
    [
        (lambda ca: ca.issue_cert(HOST, not_after=PAST), HOST, "expired", "clock"),
        (lambda ca: ca.issue_cert(HOST, not_before=FUTURE), HOST, "not yet valid", "clock"),
        (lambda ca: ca.issue_cert("elsewhere.example"), HOST, f"not valid for '{HOST}'", None),
        (lambda ca: ca.issue_cert("x.example"), "192.0.2.7", "not valid for '192.0.2.7'", None),
        (lambda ca: trustme.CA().issue_cert(HOST), HOST, "local issuer certificate", "`ca_file`"),
    ],
)
def test_an_untrusted_certificate_is_explained(issue, host, verdict, remedy, ca, ca_file):
    message, hint = refusal(context_of(ca_file=ca_file), server(issue(ca)), host)
    assert message.startswith(f"{host} is not trusted")
    assert verdict in message
    assert hint is None if remedy is None else remedy in hint


def test_plain_http_is_recognised(ca_file):
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context_of(ca_file=ca_file).wrap_bio(incoming, outgoing, server_hostname=HOST)
    incoming.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    with pytest.raises(ssl.SSLError) as caught:
        client.do_handshake()
    message, hint = trust.explain(caught.value, HOST)
    assert re.search("wrong version number|http request|record layer|packet length", message)
    assert "http://" in hint


def verdict(code):
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = code, "its words"
    return error


def alert(reason):
    error = ssl.SSLError(1, reason.lower())
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("error", "message", "remedy"),
    [
        *((verdict(code), "not trusted: its words", "`ca_file`") for code in (2, 18, 19, 21)),
        (verdict(26), "not trusted: its words", None),
        # Of Go before 1.21, and so Debian's docker-registry, where no certificate was shown too.
        (alert("SSLV3_ALERT_BAD_CERTIFICATE"), "sslv3 alert bad certificate", "client_cert"),
        (alert("SSL/TLS_ALERT_BAD_CERTIFICATE"), "alert bad certificate", "client_cert"),
        (ssl.SSLEOFError(8, "EOF occurred"), "failed: EOF occurred", "http://"),
        (ConnectionResetError(104, "Connection reset by peer"), "Connection reset by peer", None),
        (OSError(), "OSError", None),
        (ssl.SSLError(1, "odd\x1b[31m\nwords"), "failed: odd[31m words", None),
    ],
    ids=repr,
)
def test_each_failure_has_words_in_one_clean_line(error, message, remedy):
    text, hint = trust.explain(error, HOST)
    assert message in text
    assert text.startswith((f"{HOST} ", f"TLS with {HOST}"))
    assert text.isprintable()
    assert hint is None if remedy is None else remedy in hint


# Container clients' directories.

DOCKER, PODMAN, USER = "docker/r.example", "containers/r.example", "home/r.example"


@pytest.fixture
def find(tmp_path, monkeypatch):
    """Return a function that looks for a registry's files where `docker` and `containers` stand for
    the system's directories, and `home` for the user's.
    """
    home = tmp_path / ".config" / "containers"
    home.mkdir(parents=True)
    (home / "certs.d").symlink_to(tmp_path / "home")
    bases = tuple(str(tmp_path / name) for name in ("containers", "docker"))
    monkeypatch.setattr(trust, "_CERTS_D", bases)

    def find(authority, port, is_at_home=True):
        found = trust.find_certs_d(str(tmp_path) if is_at_home else None, authority, port)
        return [os.path.relpath(os.path.realpath(file), tmp_path) for file in found]

    return find


@pytest.mark.parametrize(
    ("authority", "port", "laid", "expected"),
    [
        ("r.example", 443, [DOCKER], DOCKER),
        ("r.example", 443, [DOCKER, PODMAN, USER], USER),
        ("r.example", 443, [DOCKER, PODMAN], PODMAN),
        ("r.example:5000", 5000, [DOCKER], None),
        ("r.example:5000", 5000, [f"{DOCKER}:5000"], f"{DOCKER}:5000"),
        ("r.example", 443, [f"{DOCKER}:443"], f"{DOCKER}:443"),
        ("r.example", 443, [f"{DOCKER}:443", DOCKER], DOCKER),
        ("[::1]:5000", 5000, ["docker/[::1]:5000"], "docker/[::1]:5000"),
        ("r.example", 443, ["docker/sub.r.example"], None),
    ],
)
def test_the_first_directory_is_used_alone(find, tmp_path, authority, port, laid, expected):
    for place in laid:
        (tmp_path / place).mkdir(parents=True)
        for file in ("b.crt", "a.crt", "x.cert", "x.key", "README", "old.pem", "..data"):
            (tmp_path / place / file).write_text("")
    names = ("a.crt", "b.crt", "x.cert", "x.key")
    assert find(authority, port) == ([f"{expected}/{name}" for name in names] if expected else [])


def test_an_empty_directory_ends_the_search_and_what_cannot_be_listed_does_not(find, tmp_path):
    (tmp_path / DOCKER).mkdir(parents=True)
    (tmp_path / DOCKER / "a.crt").write_text("")
    (tmp_path / "containers").mkdir()
    (tmp_path / PODMAN).write_text("no directory")
    assert find("r.example", 443, is_at_home=False) == [f"{DOCKER}/a.crt"]
    (tmp_path / USER).mkdir(parents=True)
    assert find("r.example", 443) == []
