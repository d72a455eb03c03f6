"""Which authorities a context trusts, and how failures read; handshakes run in memory, without
sockets.
"""

from __future__ import annotations

import datetime
import os
import ssl
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from _regsync.errors import ConfigError
from _regsync.net import trust

HOST = "registry.example"
Defaults = Callable[[str, str], None]


@pytest.fixture
def ca_file(ca: trustme.CA, tmp_path: Path) -> str:
    path = tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(str(path))
    return str(path)


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Defaults:
    """Stand in for the paths that OpenSSL was compiled with, and hide this machine's bundles."""

    def set_paths(cafile: str, capath: str) -> None:
        paths = ssl.DefaultVerifyPaths("", "", "SSL_CERT_FILE", cafile, "SSL_CERT_DIR", capath)
        monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: paths)
        monkeypatch.setattr(trust, "_BUNDLES", ())

    set_paths(str(tmp_path / "none.pem"), str(tmp_path / "none"))
    return set_paths


def hashed(directory: Path, ca: trustme.CA) -> str:
    """Lay a directory out as `openssl rehash` does, without calling it."""
    directory.mkdir()
    (directory / f"{subject_hash(ca)}.0").write_bytes(ca.cert_pem.bytes())
    return str(directory)


def subject_hash(ca: trustme.CA) -> str:
    """X509_NAME_hash: SHA-1 over the canonical name (lower case, UTF8String, without the outer
    SEQUENCE).
    """
    import hashlib

    from cryptography import x509

    subject = x509.load_pem_x509_certificate(ca.cert_pem.bytes()).subject
    encoded = b""
    for attribute in subject:
        text = " ".join(str(attribute.value).lower().split()).encode()
        oid = x509.Name([attribute]).public_bytes()
        start = oid.index(b"\x06")
        oid = oid[start : start + 2 + oid[start + 1]]
        pair = oid + b"\x0c" + bytes([len(text)]) + text
        sequence = b"\x30" + bytes([len(pair)]) + pair
        encoded += b"\x31" + bytes([len(sequence)]) + sequence
    return f"{int.from_bytes(hashlib.sha1(encoded).digest()[:4], 'little'):08x}"


def server(issued: trustme.LeafCert) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued.configure_cert(context)
    return context


def shake(client: ssl.SSLContext, peer: ssl.SSLContext, host: str = HOST) -> str | None:
    """Run a handshake through memory; return the TLS version, raise what the client raises."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=host)
    theirs = peer.wrap_bio(to_server, to_client, server_side=True)
    pending = [ours, theirs]
    server_error: ssl.SSLError | None = None
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
        if not pending:
            break
    if server_error is not None:
        # Under TLS 1.3 the client learns from its first read what the server thought of its
        # certificate.
        ours.read(1)
    return ours.version()


def refusal(
    client: ssl.SSLContext, peer: ssl.SSLContext, host: str = HOST
) -> tuple[str, str | None]:
    with pytest.raises(ssl.SSLError) as caught:
        shake(client, peer, host)
    return trust.explain(caught.value, host)


@pytest.mark.usefixtures("defaults")
def test_ca_file_is_trusted(ca: trustme.CA, ca_file: str) -> None:
    context = trust.make_context(ca_file=ca_file, environ={})
    assert shake(context, server(ca.issue_cert(HOST))) == "TLSv1.3"


@pytest.mark.usefixtures("defaults")
def test_ca_file_is_added_to_the_systems_trust(
    ca: trustme.CA, ca_file: str, tmp_path: Path
) -> None:
    other = trustme.CA()
    other.cert_pem.write_to_path(str(tmp_path / "system.pem"))
    context = trust.make_context(
        ca_file=ca_file, environ={"SSL_CERT_FILE": str(tmp_path / "system.pem")}
    )
    assert shake(context, server(other.issue_cert(HOST)))
    assert shake(context, server(ca.issue_cert(HOST)))


@pytest.mark.usefixtures("defaults")
def test_an_intermediate_as_ca_file_anchors_a_chain(ca: trustme.CA, tmp_path: Path) -> None:
    intermediate = ca.create_child_ca()
    intermediate.cert_pem.write_to_path(str(tmp_path / "intermediate.pem"))
    context = trust.make_context(ca_file=str(tmp_path / "intermediate.pem"), environ={})
    assert shake(context, server(intermediate.issue_cert(HOST)))


def test_a_hashed_default_directory_is_used_alone(
    ca: trustme.CA,
    ca_file: str,
    tmp_path: Path,
    defaults: Defaults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parsing a bundle costs 30 ms and megabytes; a hashed directory costs one file per look-up."""
    defaults(ca_file, hashed(tmp_path / "certs", ca))
    loaded: list[str] = []
    monkeypatch.setattr(trust, "_load", lambda what, load, cafile: loaded.append(cafile))
    context = trust.make_context(environ={})
    assert loaded == []
    assert shake(context, server(ca.issue_cert(HOST)))


def test_a_default_directory_without_hashed_names_gives_way_to_the_bundle(
    ca: trustme.CA, ca_file: str, tmp_path: Path, defaults: Defaults
) -> None:
    (tmp_path / "certs").mkdir()
    (tmp_path / "certs" / "ca.pem").write_bytes(ca.cert_pem.bytes())
    defaults(ca_file, str(tmp_path / "certs"))
    context = trust.make_context(environ={})
    assert len(context.get_ca_certs()) == 1
    assert shake(context, server(ca.issue_cert(HOST)))


def test_well_known_bundles_are_found_where_openssls_defaults_are_absent(
    ca_file: str, defaults: Defaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "_BUNDLES", ("/nowhere/bundle.pem", ca_file, ca_file))
    assert len(trust.make_context(environ={}).get_ca_certs()) == 1


@pytest.mark.usefixtures("defaults")
def test_ssl_cert_dir_is_searched(ca: trustme.CA, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    named = os.pathsep.join((str(tmp_path / "empty"), hashed(tmp_path / "certs", ca)))
    context = trust.make_context(environ={"SSL_CERT_DIR": named})
    assert shake(context, server(ca.issue_cert(HOST)))


def test_both_variables_together_replace_the_store(
    ca: trustme.CA, ca_file: str, tmp_path: Path, defaults: Defaults
) -> None:
    """docs/protocol-facts.md section 8.2: each variable replaces its own default only."""
    system = trustme.CA()
    defaults(ca_file, hashed(tmp_path / "certs", system))
    (tmp_path / "empty").mkdir()
    peer = server(system.issue_cert(HOST))
    alone = trust.make_context(environ={"SSL_CERT_FILE": ca_file})
    both = trust.make_context(
        environ={"SSL_CERT_FILE": ca_file, "SSL_CERT_DIR": str(tmp_path / "empty")}
    )
    assert shake(alone, peer)
    assert "unknown authority" in refusal(both, peer)[0]
    assert shake(both, server(ca.issue_cert(HOST)))


FILE, DIRECTORY = "SSL_CERT_FILE", "SSL_CERT_DIR"
MISSING = "none.pem does not exist"
OURS = {"ca_file": "ca.pem", "client_cert": "leaf.pem"}
# Variables, fields of the configuration, and the words of the error.
USELESS = [
    ({}, {}, "no certificate authorities found"),
    ({FILE: "none.pem"}, {}, f"SSL_CERT_FILE=none.pem: {MISSING}"),
    ({FILE: "junk.pem"}, {}, "SSL_CERT_FILE=junk.pem cannot be used"),
    ({FILE: "empty"}, {}, "SSL_CERT_FILE=empty"),
    ({DIRECTORY: "none"}, {}, "SSL_CERT_DIR names 'none'"),
    ({DIRECTORY: "empty:none"}, {}, "SSL_CERT_DIR names 'none'"),
    ({DIRECTORY: "empty"}, {}, "SSL_CERT_DIR=empty holds no hashed"),
    ({FILE: "ca.pem", DIRECTORY: "none"}, {}, "'none'"),
    ({}, {"ca_file": "none.pem"}, f"ca_file none.pem: {MISSING}"),
    ({}, {"ca_file": "junk.pem"}, "ca_file junk.pem cannot be used: no certificate or crl found"),
    ({}, {"ca_file": "ca.pem", "client_cert": "none.pem"}, f"client_cert none.pem with client_key none.pem: {MISSING}"),
    ({}, {**OURS, "client_key": "none.pem"}, f"client_key none.pem: {MISSING}"),
    ({}, OURS, "client_cert leaf.pem with client_key leaf.pem cannot be used"),
    ({}, {**OURS, "client_cert": "junk.pem", "client_key": "key.pem"}, "junk.pem"),
    ({}, {**OURS, "client_key": "other.pem"}, "client_key other.pem cannot be used: key values mismatch"),
    ({}, {**OURS, "client_key": "locked.pem"}, "client_key locked.pem cannot be used"),
    ({}, {"ca_file": "ca.pem", "certs_d": ("d/client.cert",)}, "d/client.cert has no client.key beside it"),
    ({}, {"ca_file": "ca.pem", "certs_d": ("d/client.key",)}, "d/client.key has no client.cert beside it"),
    ({}, {"certs_d": ("d/gone.crt",)}, "ca_file d/gone.crt: d/gone.crt does not exist"),
]  # fmt: skip


@pytest.mark.usefixtures("defaults")
@pytest.mark.parametrize(
    ("environ", "arguments", "complaint"), USELESS, ids=[row[2] for row in USELESS]
)
def test_what_leads_to_nothing_is_a_config_error_naming_it(
    environ: dict[str, str],
    arguments: dict[str, Any],
    complaint: str,
    ca: trustme.CA,
    ca_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from cryptography.hazmat.primitives import serialization as form

    leaf, other = ca.issue_cert("client.example"), ca.issue_cert("other.example")
    key = form.load_pem_private_key(leaf.private_key_pem.bytes(), None)
    locked = key.private_bytes(
        form.Encoding.PEM, form.PrivateFormat.PKCS8, form.BestAvailableEncryption(b"passphrase")
    )
    (tmp_path / "junk.pem").write_text("nothing of use")
    (tmp_path / "empty").mkdir()
    (tmp_path / "leaf.pem").write_bytes(leaf.cert_chain_pems[0].bytes())
    (tmp_path / "key.pem").write_bytes(leaf.private_key_pem.bytes())
    (tmp_path / "other.pem").write_bytes(other.private_key_pem.bytes())
    (tmp_path / "locked.pem").write_bytes(locked)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        trust.make_context(environ=environ, **arguments)
    assert complaint in caught.value.message


@pytest.mark.usefixtures("defaults")
@pytest.mark.parametrize("files", [1, 2], ids=["one-file", "two-files"])
def test_a_client_certificate_is_shown(
    ca: trustme.CA, ca_file: str, tmp_path: Path, files: int
) -> None:
    leaf = ca.issue_cert("client.example")
    certificate, key = tmp_path / "leaf.pem", tmp_path / "key.pem"
    key.write_bytes(leaf.private_key_pem.bytes())
    certificate.write_bytes(
        (leaf.private_key_and_cert_chain_pem if files == 1 else leaf.cert_chain_pems[0]).bytes()
    )
    peer = server(ca.issue_cert(HOST))
    peer.verify_mode = ssl.CERT_REQUIRED
    ca.configure_trust(peer)
    context = trust.make_context(
        ca_file=ca_file,
        client_cert=str(certificate),
        client_key=None if files == 1 else str(key),
        environ={},
    )
    assert shake(context, peer)
    message, hint = refusal(trust.make_context(ca_file=ca_file, environ={}), peer)
    assert "client certificate" in message
    assert hint is not None
    assert "client_cert" in hint


@pytest.mark.usefixtures("defaults")
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated:DeprecationWarning")
def test_nothing_below_tls_1_2_is_spoken(ca: trustme.CA, ca_file: str) -> None:
    context = trust.make_context(ca_file=ca_file, environ={})
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    peer = server(ca.issue_cert(HOST))
    peer.maximum_version = ssl.TLSVersion.TLSv1_2
    assert shake(context, peer) == "TLSv1.2"
    peer.minimum_version = peer.maximum_version = ssl.TLSVersion.TLSv1_1
    assert "TLS handshake" in refusal(context, peer)[0]
    peer.set_ciphers("ALL:@SECLEVEL=0")
    message, hint = refusal(context, peer)
    assert "TLS version" in message
    assert "TLS 1.2" in (hint or "")


@pytest.mark.usefixtures("defaults")
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1 is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("policy", "least"), [("TLSv1", "TLSv1_2"), ("TLSv1_3", "TLSv1_3")])
def test_a_laxer_policy_of_the_system_is_tightened_and_a_stricter_one_stays(
    policy: str, least: str, ca_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where Python is built to leave the lowest version to the system, which Debian's is not and
    RHEL's is.
    """

    def lax_context() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion[policy]
        return context

    monkeypatch.setattr(trust, "_new_context", lax_context)
    assert trust.make_context(ca_file=ca_file, environ={}).minimum_version == ssl.TLSVersion[least]


@pytest.mark.usefixtures("defaults")
def test_neither_chacha20_nor_md5_is_offered_below_tls_1_3(ca: trustme.CA, ca_file: str) -> None:
    """All others of the system's policy stay. Python cannot choose those of TLS 1.3, of which AES
    comes first.
    """
    before = [each["name"] for each in ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).get_ciphers()]
    context = trust.make_context(ca_file=ca_file, environ={})
    offered = [each["name"] for each in context.get_ciphers()]
    assert offered[0] == "TLS_AES_256_GCM_SHA384"
    assert [name for name in before if name not in offered] == [
        name for name in before if "CHACHA20" in name and not name.startswith("TLS_")
    ]
    assert not [name for name in offered if "MD5" in name]
    peer = server(ca.issue_cert(HOST))
    peer.maximum_version = ssl.TLSVersion.TLSv1_2
    peer.set_ciphers("ECDHE-ECDSA-CHACHA20-POLY1305:ECDHE-RSA-CHACHA20-POLY1305")
    assert "TLS handshake" in refusal(context, peer)[0]


@pytest.mark.usefixtures("defaults")
@pytest.mark.parametrize(
    ("code", "verdict", "remedy"),
    [
        *((code, "unknown authority", "`ca_file`") for code in (2, 19, 21)),
        (26, "for a server", "serverAuth"),
        (64, "this name", "reissued"),
        (66, "too weak", "2048"),
        (67, "too weak", "2048"),
        (68, "too weak", "SHA-256"),
    ],
)
def test_the_librarys_other_verdicts_have_words(code: int, verdict: str, remedy: str) -> None:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code = code
    message, hint = trust.explain(error, HOST)
    assert message.startswith(f"{HOST} ")
    assert verdict in message
    assert hint is not None
    assert remedy in hint


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
@pytest.mark.usefixtures("defaults")
def test_every_platform_verifies_chain_and_name(
    platform: str, ca_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "sys", types.SimpleNamespace(platform=platform))
    context = trust.make_context(ca_file=ca_file, environ={})
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert (type(context).__module__.partition(".")[0] == "truststore") is (platform != "linux")


UTC = datetime.timezone.utc
PAST, FUTURE = datetime.datetime(2021, 1, 1, tzinfo=UTC), datetime.datetime(2037, 1, 1, tzinfo=UTC)


@pytest.mark.usefixtures("defaults")
@pytest.mark.parametrize(
    ("issue", "host", "verdict", "remedy"),
    [
        (lambda ca: ca.issue_cert(HOST, not_after=PAST), HOST, "expired", "clock"),
        (lambda ca: ca.issue_cert(HOST, not_before=FUTURE), HOST, "valid yet", "clock"),
        (lambda ca: ca.issue_cert("elsewhere.example"), HOST, "this name", "reissued"),
        (lambda ca: ca.issue_cert("elsewhere.example"), "192.0.2.7", "this name", "reissued"),
        (lambda ca: trustme.CA().issue_cert(HOST), HOST, "unknown authority", "`ca_file`"),
    ],
)
def test_an_untrusted_certificate_is_explained(
    issue: Callable[[trustme.CA], trustme.LeafCert],
    host: str,
    verdict: str,
    remedy: str,
    ca: trustme.CA,
    ca_file: str,
) -> None:
    message, hint = refusal(
        trust.make_context(ca_file=ca_file, environ={}), server(issue(ca)), host
    )
    assert message.startswith(f"{host} ")
    assert verdict in message
    assert remedy in (hint or "")


@pytest.mark.usefixtures("defaults")
def test_a_self_signed_certificate_is_named_so(ca_file: str) -> None:
    """A CA's own certificate served as leaf stands in for what `openssl req -x509` makes."""
    lone = trustme.CA()
    peer = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with lone.private_key_pem.tempfile() as key, lone.cert_pem.tempfile() as certificate:
        peer.load_cert_chain(certificate, key)
    message, hint = refusal(trust.make_context(ca_file=ca_file, environ={}), peer)
    assert "self-signed" in message
    assert hint is not None
    assert "`ca_file`" in hint


@pytest.mark.usefixtures("defaults")
def test_plain_http_is_recognised(ca_file: str) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trust.make_context(ca_file=ca_file, environ={}).wrap_bio(
        incoming, outgoing, server_hostname=HOST
    )
    incoming.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    with pytest.raises(ssl.SSLError) as caught:
        client.do_handshake()
    message, hint = trust.explain(caught.value, HOST)
    assert message.startswith(HOST)
    assert "http://" in (hint or "")


@pytest.mark.parametrize("name", ["SSLV3_ALERT_BAD_CERTIFICATE", "SSL/TLS_ALERT_BAD_CERTIFICATE"])
def test_a_server_that_says_the_same_of_no_certificate_and_a_wrong_one_is_not_guessed_about(
    name: str,
) -> None:
    """Go's before 1.21, and so Debian's docker-registry, whatever the version of TLS."""
    error = ssl.SSLError(1, name.lower())
    error.reason = name
    message, hint = trust.explain(error, HOST)
    assert "the lack of one" in message
    assert "client_cert" in (hint or "")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionResetError(104, "Connection reset by peer"), "Connection reset by peer"),
        (OSError(), "OSError"),
        (ssl.SSLEOFError(8, "EOF occurred"), "closed"),
        (ssl.SSLError(1, "odd\x1b[31m\nwords"), "failed: odd[31m words"),
    ],
)
def test_other_failures_are_one_clean_line(error: OSError, message: str) -> None:
    text, hint = trust.explain(error, HOST)
    assert message in text
    assert text.startswith((HOST, "TLS"))
    assert (hint is not None) is isinstance(error, ssl.SSLEOFError), (
        "what plain HTTP may be is said so"
    )
    assert text.isprintable()


@pytest.mark.rule("R14")
@pytest.mark.parametrize("what", ["ca_file", "client_cert", "SSL_CERT_FILE", "certs_d"])
def test_a_pipe_in_the_place_of_a_certificate_is_refused_and_not_waited_for(
    what: str, tmp_path: Path
) -> None:
    pipe = str(tmp_path / "pipe.crt")
    os.mkfifo(pipe)
    environ = {what: pipe} if what.isupper() else {}
    with pytest.raises(ConfigError, match="is not a file"):
        trust.make_context(
            ca_file=pipe if what == "ca_file" else None,
            client_cert=pipe if what == "client_cert" else None,
            certs_d=(pipe,) if what == "certs_d" else (),
            environ=environ,
        )


# Container clients' directories.


@pytest.fixture
def bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Return directories that stand for the user's and the two of /etc."""
    found = {name: tmp_path / name for name in ("home", "containers", "docker")}
    found["home"] = found["home"] / ".config/containers/certs.d"
    monkeypatch.setattr(trust, "_CERTS_D", (str(found["containers"]), str(found["docker"])))
    return found


DOCKER, PODMAN, USER = "docker/r.example", "containers/r.example", "home/r.example"


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
        ("r.example", 443, [], None),
    ],
)
def test_the_first_directory_is_used_alone(
    bases: dict[str, Path],
    tmp_path: Path,
    authority: str,
    port: int,
    laid: list[str],
    expected: str | None,
) -> None:
    for place in laid:
        base, _, name = place.partition("/")
        (bases[base] / name).mkdir(parents=True)
        for file in ("b.crt", "a.crt", "x.cert", "x.key", "README", "old.pem", "..data"):
            (bases[base] / name / file).write_text("")
    found = trust.find_certs_d(str(tmp_path / "home"), authority, port)
    base, _, name = (expected or "").partition("/")
    files = (
        [str(bases[base] / name / file) for file in ("a.crt", "b.crt", "x.cert", "x.key")]
        if expected
        else []
    )
    assert list(found) == files


def test_an_empty_directory_ends_the_search_and_what_cannot_be_listed_does_not(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    (bases["docker"] / "r.example").mkdir(parents=True)
    (bases["docker"] / "r.example" / "a.crt").write_text("")
    bases["containers"].mkdir()
    (bases["containers"] / "r.example").write_text("no directory")
    assert len(trust.find_certs_d(None, "r.example", 443)) == 1
    (bases["home"] / "r.example").mkdir(parents=True)
    assert trust.find_certs_d(str(tmp_path / "home"), "r.example", 443) == ()


def test_looking_costs_six_failed_listings_at_most(
    bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def listdir(path: str) -> list[str]:
        looked.append(path)
        raise FileNotFoundError

    monkeypatch.setattr(os, "listdir", listdir)
    assert trust.find_certs_d("/home/me", "r.example", 443) == ()
    assert len(looked) == 6
    assert trust.find_certs_d("/home/me", "r.example:5000", 5000) == ()
    assert len(looked) == 9
    assert set(bases)


def test_a_file_that_this_user_may_not_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker's own keys are root's; who is root here is refused nothing, so the system's answer is
    stood in for.
    """
    files = [str(tmp_path / name) for name in ("client.cert", "client.key")]
    for file in files:
        Path(file).touch()
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith(".key"))
    with pytest.raises(
        ConfigError, match=r"client\.key is not a file, or this user may not read it"
    ):
        trust.make_context(certs_d=tuple(files), environ={})
