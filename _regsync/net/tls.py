"""The TLS contexts of the program, and words for what goes wrong with them.

Owns: trusted authorities, client certificates, the lowest version, the text of TLS failures.
May not know: sockets, registries, how many contexts there are. The caller shares them, because
reading a bundle of authorities takes 30 ms.
Invariants: a file that the user named is used or is an error; nothing else takes its place.
Follows: docs/design.md section 9 ("CA"), docs/protocol-facts.md section 8.2.
"""

from __future__ import annotations

import os
import re
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from _regsync.errors import ConfigError
from _regsync.text import printable

# Where truststore 0.10.5 looks when OpenSSL's own defaults do not exist.
_BUNDLES = (
    "/etc/ssl/cert.pem",  # Alpine, Arch, RHEL 9 and 10
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",  # Fedora
    "/etc/pki/tls/cert.pem",  # older RHEL
    "/etc/ssl/certs/ca-certificates.crt",  # Debian
    "/etc/ssl/ca-bundle.pem",  # SUSE
)

_CERTS_D = ("/etc/containers/certs.d", "/etc/docker/certs.d")

# Python cannot choose among the cipher suites of TLS 1.3 before 3.15; OpenSSL's first is AES.
_UNWANTED_CIPHERS = "CHACHA20|MD5"


def certs_d(home: str | None, authority: str, port: int) -> tuple[str, ...]:
    """Return the certificate files that container clients have for a registry.

    They are the paths in the first directory that can be read, sorted by name; empty when there is
    none.
    """
    bases = list(_CERTS_D)
    if home:
        bases.insert(0, f"{home}/.config/containers/certs.d")

    # A directory may be named with the port also where it is the scheme's own.
    host = authority.removesuffix(f":{port}")
    names = dict.fromkeys((authority, f"{host}:{port}"))

    for base in bases:
        for name in names:
            directory = f"{base}/{name}"
            try:
                files = sorted(os.listdir(directory))
            except OSError:
                continue
            return tuple(
                f"{directory}/{file}" for file in files if file.endswith((".crt", ".cert", ".key"))
            )
    return ()


def make_context(
    ca_file: str | None = None,
    client_cert: str | None = None,
    client_key: str | None = None,
    certs_d: tuple[str, ...] = (),
    *,
    environ: Mapping[str, str],
) -> ssl.SSLContext:
    """Build a client's context that trusts the system's authorities and those that were named.

    `certs_d` are files as the function of that name returns them. Their authorities count where
    there is no `ca_file`, their certificates where there is no `client_cert`. ConfigError names the
    file or the variable that cannot be used.
    """
    own_authorities = [file for file in certs_d if file.endswith(".crt")]
    authorities = [ca_file] if ca_file else own_authorities

    context = _new_context()
    _trust_system(context, environ, is_required=not authorities)
    for file in authorities:
        _load(f"ca_file {printable(file)}", context.load_verify_locations, file)

    _restrict(context)

    if client_cert:
        _show_certificate(context, client_cert, client_key or client_cert)
    else:
        for certificate, key in _pairs(certs_d):
            _show_certificate(context, certificate, key)
    return context


def _asks_system() -> bool:
    """Ask whether the system's trust is behind an interface that OpenSSL does not know."""
    return sys.platform in ("darwin", "win32")


def _new_context() -> ssl.SSLContext:
    if not _asks_system():
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    # Since truststore 0.10.5 do_handshake() checks the peer at its end, also when the socket was
    # wrapped without a handshake.
    import truststore

    return truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _trust_system(
    context: ssl.SSLContext, environ: Mapping[str, str], *, is_required: bool
) -> None:
    """Load the system's authorities; ConfigError when there are none and `is_required`."""
    if _asks_system():
        bundle = environ.get("SSL_CERT_FILE")
        directories: list[str] = []
    else:
        bundle, directories = _system_trust(environ, ssl.get_default_verify_paths())
        if not bundle and not directories and is_required:
            raise ConfigError(
                "no certificate authorities found on this host",
                hint="install the system's CA certificates, or set SSL_CERT_FILE to a PEM bundle",
            )

    if bundle:
        _load(f"SSL_CERT_FILE={bundle}", context.load_verify_locations, bundle)
    for directory in directories:
        context.load_verify_locations(capath=directory)


def _system_trust(
    environ: Mapping[str, str], defaults: ssl.DefaultVerifyPaths
) -> tuple[str | None, list[str]]:
    """Return the bundle file, if any, and the hashed directories to trust.

    Each variable replaces its own default only, as in OpenSSL. Of the defaults one is enough; the
    directory is the first choice, because it costs nothing until a certificate is looked up.
    """
    bundle = environ.get("SSL_CERT_FILE")
    variable = environ.get("SSL_CERT_DIR")

    if variable:
        candidates = variable.split(os.pathsep)
        for directory in candidates:
            if not os.path.isdir(directory):
                raise ConfigError(f"SSL_CERT_DIR names {directory!r}, which is not a directory")
    else:
        candidates = [defaults.openssl_capath]
    directories = [directory for directory in candidates if _is_hashed(directory)]

    # Beside SSL_CERT_FILE an empty directory is no mistake: the two replace the whole store.
    if variable and not directories and not bundle:
        raise ConfigError(
            f"SSL_CERT_DIR={variable} holds no hashed certificate names",
            hint="run `openssl rehash` on the directory, or unset SSL_CERT_DIR",
        )

    if not bundle and (variable or not directories):
        bundles = [defaults.openssl_cafile]
        if not directories:
            bundles += _BUNDLES
        bundle = next(filter(os.path.isfile, bundles), None)
    return bundle, directories


def _is_hashed(directory: str) -> bool:
    """Ask whether OpenSSL can look up a certificate in a directory."""
    try:
        names = os.listdir(directory)
    except OSError:
        return False
    return any(re.fullmatch(r"[0-9a-fA-F]{8}\.[0-9]+", name) for name in names)


def _restrict(context: ssl.SSLContext) -> None:
    """Tighten what the system's policy allows; where that is stricter, it stays."""
    names = [cipher["name"] for cipher in context.get_ciphers()]
    context.set_ciphers(":".join(name for name in names if not re.search(_UNWANTED_CIPHERS, name)))
    context.minimum_version = max(context.minimum_version, ssl.TLSVersion.TLSv1_2)
    # An intermediate authority may be the anchor, as in Go and Python 3.13.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN


def _pairs(files: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Give the pairs of a certificate and its key among the files of `certs_d`.

    Of several for one kind of key OpenSSL shows the one that was loaded last. The last by name
    therefore comes first.
    """
    for path in reversed(files):
        stem, _, kind = path.rpartition(".")
        if kind not in ("cert", "key"):
            continue
        certificate = f"{stem}.cert"
        key = f"{stem}.key"

        partner = key if kind == "cert" else certificate
        if partner not in files:
            raise ConfigError(
                f"{printable(path)} has no {printable(os.path.basename(partner))} beside it",
                hint="name a client's certificate and key *.cert and *.key,"
                " and an authority's certificate *.crt",
            )
        if kind == "cert":
            yield certificate, key


def _show_certificate(context: ssl.SSLContext, certificate: str, key: str) -> None:
    what = f"client_cert {printable(certificate)} with client_key {printable(key)}"
    # Without a password OpenSSL would ask for one on the terminal.
    _load(what, context.load_cert_chain, certificate, key, password="")


def _load(what: str, load: Callable[..., None], *files: str, **options: str) -> None:
    """Let a context read files; ConfigError when it cannot."""
    for file in files:
        # Reading a pipe would wait for ever.
        if os.path.isfile(file) and os.access(file, os.R_OK):
            continue
        why = "does not exist"
        if os.path.exists(file):
            why = "is not a file, or this user may not read it"
        raise ConfigError(
            f"{what}: {printable(file)} {why}", hint="name another file, or make this one readable"
        )

    try:
        load(*files, **options)
    except OSError as error:
        reason = getattr(error, "reason", None)
        if not reason:
            is_unparsed = isinstance(error, ssl.SSLError)
            reason = "it does not parse as PEM" if is_unparsed else str(error.strerror)
        raise ConfigError(
            f"{what} cannot be used: {reason.replace('_', ' ').lower()}",
            hint="use PEM files, and a key without a passphrase (RSA: at least 2048 bits)",
        ) from error


# Remedies.

_CLOCK = "check this host's clock; if it is right, the registry's certificate must be renewed"

_AUTHORITY = "give the authority's PEM file as `ca_file` of the registry, or in SSL_CERT_FILE"

_NAME = "use a name in the certificate, or have it reissued"

_PLAIN = "write http:// before the host if it serves plain HTTP"

CLIENT_CERT_HINT = (
    "give client_cert and client_key of the registry,"
    " or put the pair into a container client's certs.d"
)

_CLIENT = (
    "check client_cert and client_key of the registry, and which authority it accepts for clients"
)

_STRONG = "have the certificate reissued with an RSA key of 2048 bits or more, or ECDSA, and signed over SHA-256"


class _Failure(NamedTuple):
    """A way in which TLS fails.

    `pattern` matches the number in OpenSSL's x509_vfy.h, or else the error's name.
    """

    pattern: str
    what: str
    hint: str


# The first that matches counts. Plain HTTP read as a TLS record has another name in each of OpenSSL
# 1.1.1, 3.0 and 3.2; Go says BAD_CERTIFICATE also where it got none.
_FAILURES = (
    _Failure("9", "is not trusted: its certificate is not valid yet", _CLOCK),
    _Failure("10", "is not trusted: its certificate has expired", _CLOCK),
    _Failure("18", "is not trusted: its certificate is self-signed", _AUTHORITY),
    _Failure(
        "2|19|20|21", "is not trusted: its certificate comes from an unknown authority", _AUTHORITY
    ),
    _Failure(
        "26",
        "is not trusted: its certificate is not meant for a server",
        "have the certificate reissued for serverAuth",
    ),
    _Failure(
        "66|67|68", "is not trusted: its certificate, or the authority's, is too weak", _STRONG
    ),
    _Failure("62|64", "is not trusted: its certificate is not valid for this name", _NAME),
    _Failure(
        "WRONG_VERSION.*|HTTP_REQUEST|RECORD_LAYER.*|PACKET_LENGTH.*", "does not speak TLS", _PLAIN
    ),
    _Failure(".*ALERT_CERTIFICATE_REQUIRED", "asks for a client certificate", CLIENT_CERT_HINT),
    _Failure(
        ".*ALERT_BAD_CERTIFICATE", "refused this client's certificate, or the lack of one", _CLIENT
    ),
    _Failure(
        ".*ALERT_(UNKNOWN_CA|ACCESS_DENIED|.*CERTIFICATE.*)",
        "refused this client's certificate",
        _CLIENT,
    ),
    _Failure(
        ".*PROTOCOLS?(_VERSION|_AVAILABLE)?",
        "shares no TLS version with us",
        "enable TLS 1.2 or newer there",
    ),
    _Failure(
        ".*HANDSHAKE_FAILURE",
        "refused the TLS handshake",
        "check whether it requires a client certificate or other ciphers",
    ),
    _Failure(".*EOF.*", "closed the connection during the TLS handshake", _PLAIN),
)


def explain(error: OSError, host: str) -> tuple[str, str | None]:
    """Return one line that says why TLS with `host` failed, and a remedy where one is known."""
    reason = getattr(error, "reason", None) or type(error).__name__
    name = str(getattr(error, "verify_code", reason))
    for failure in _FAILURES:
        if re.fullmatch(failure.pattern, name):
            return f"{host} {failure.what}", failure.hint

    said = getattr(error, "verify_message", None) or error.strerror or str(error) or reason
    return f"TLS with {host} failed: {printable(said, 200)}", None
