"""The only place where a TLS context is made, and where its failures are put into words.

Owns: which certificate authorities are trusted, client certificates, the lowest TLS version. May not
know: sockets, registries, how many contexts there are (the caller keeps and shares them: a bundle
takes 30 ms to parse). Invariant: a name that the user gave and that leads to nothing is an error, never
a silent fall-back to other trust. Follows design.md section 9 ("CA"), protocol-facts.md section 8.2.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from _regsync.errors import ConfigError, clean

if TYPE_CHECKING:
    import ssl

__all__ = ["explain", "make_context"]

# Where truststore 0.10.5 looks when OpenSSL's own defaults are absent, in its order (interpreters built
# elsewhere carry the builder's paths): Alpine, Arch and RHEL 9-10; Fedora 44; older RHEL; Debian; SUSE.
_BUNDLES = (
    "/etc/ssl/cert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/cert.pem",
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/ssl/ca-bundle.pem",
)
_HASHED_NAME = re.compile(r"[0-9a-fA-F]{8}\.[0-9]+")


def make_context(
    *,
    ca_file: str | None = None,
    client_cert: str | None = None,
    client_key: str | None = None,
    environ: Mapping[str, str],
    platform: str = sys.platform,
) -> ssl.SSLContext:
    """Build a client context: the system's trust, `ca_file` added to it, an optional client certificate.

    Raise ConfigError that names the variable or file which is missing or does not parse.
    """
    import ssl

    context: ssl.SSLContext
    files: list[str]
    directories: list[str]
    if platform in ("darwin", "win32"):
        # The trust of these systems is behind an API that OpenSSL does not ask. Since 0.10.5 the peer is
        # checked at the end of do_handshake() also for a socket that was wrapped without one.
        import truststore

        context = truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        files, directories = [name for name in [environ.get("SSL_CERT_FILE")] if name], []
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        files, directories = _system_trust(environ, ssl.get_default_verify_paths())
        if not files and not directories and ca_file is None:
            raise ConfigError(
                "no certificate authorities found on this host",
                hint="install the system's CA certificates, or set SSL_CERT_FILE to a PEM bundle",
            )
    for name in files:
        _load(context, f"SSL_CERT_FILE={name}", name)
    for name in directories:
        context.load_verify_locations(capath=name)
    # A stricter minimum of the host's own policy stays.
    if context.minimum_version < ssl.TLSVersion.TLSv1_2:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
    # An intermediate given as ca_file anchors a chain, as it does for Go's clients and for Python 3.13.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if ca_file is not None:
        _load(context, f"ca_file {ca_file}", ca_file)
    if client_key is not None and client_cert is None:
        raise ConfigError(f"client_key {client_key} is given without client_cert", hint="give both, or none")
    if client_cert is not None:
        _load_client(context, client_cert, client_key)
    return context


def _system_trust(
    environ: Mapping[str, str], defaults: ssl.DefaultVerifyPaths
) -> tuple[list[str], list[str]]:
    """Return the bundle files and the hashed directories to trust.

    Each variable replaces its own default only, as in OpenSSL; where neither is set one of the two
    defaults is enough, and a hashed directory costs nothing until a certificate is looked up.
    """
    named_file, named_directories = environ.get("SSL_CERT_FILE"), environ.get("SSL_CERT_DIR")
    files = [named_file] if named_file else []
    directories: list[str] = []
    if named_directories:
        for part in named_directories.split(os.pathsep):
            if not os.path.isdir(part):
                raise ConfigError(f"SSL_CERT_DIR names {part!r}, which is not a directory")
            if _is_hashed(part):
                directories.append(part)
        # An empty directory beside SSL_CERT_FILE is how the whole store is replaced.
        if not directories and not named_file:
            raise ConfigError(
                f"SSL_CERT_DIR={named_directories} holds no hashed certificate names",
                hint="run `openssl rehash` on the directory, or unset SSL_CERT_DIR",
            )
    elif _is_hashed(defaults.openssl_capath):
        directories = [defaults.openssl_capath]
    if not files and (named_directories or not directories):
        candidates = (defaults.openssl_cafile, *(_BUNDLES if not directories else ()))
        files = [name for name in candidates if os.path.isfile(name)][:1]
    return files, directories


def _is_hashed(directory: str) -> bool:
    try:
        with os.scandir(directory) as entries:
            return any(_HASHED_NAME.fullmatch(entry.name) for entry in entries)
    except OSError:
        return False


def _load(context: ssl.SSLContext, what: str, cafile: str) -> None:
    import ssl

    try:
        context.load_verify_locations(cafile=cafile)
    except ssl.SSLError as error:
        raise ConfigError(f"{what} holds no readable PEM certificate") from error
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}") from error


def _load_client(context: ssl.SSLContext, certificate: str, key: str | None) -> None:
    import ssl

    def refuse() -> str:
        # Without a callback OpenSSL would ask on the terminal.
        raise ConfigError(
            f"client_key {key or certificate} is encrypted", hint="store the key without passphrase"
        )

    for name, path in (("client_cert", certificate), ("client_key", key)):
        if path is not None and not os.path.isfile(path):
            raise ConfigError(f"{name} {path} does not exist")
    try:
        context.load_cert_chain(certificate, key, password=refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"client_key {key or certificate} does not belong to {certificate}") from error
        raise ConfigError(f"client_cert {certificate} and its key do not parse as PEM") from error
    except OSError as error:
        raise ConfigError(f"client_cert {certificate} cannot be read: {error.strerror}") from error


# X509_V_ERR_* of OpenSSL's x509_vfy.h, with what the user can do about it.
_CLOCK = "check this host's clock; if it is right, the registry's certificate must be renewed"
_OWN_AUTHORITY = "give the authority's PEM file as `ca_file` of the registry, or in SSL_CERT_FILE"
_WEAK = "the registry's certificate must be replaced"
_VERDICTS: Mapping[int, tuple[str, str]] = MappingProxyType(
    {
        9: ("its certificate is not valid yet", _CLOCK),
        10: ("its certificate has expired", _CLOCK),
        18: ("its certificate is self-signed", _OWN_AUTHORITY),
        19: ("its certificate comes from an unknown authority (a self-signed root)", _OWN_AUTHORITY),
        20: ("its certificate comes from an unknown authority", _OWN_AUTHORITY),
        21: ("its certificate comes from an unknown authority", _OWN_AUTHORITY),
        66: ("its certificate's key is too small for this host's policy", _WEAK),
        67: ("its authority's key is too small for this host's policy", _WEAK),
        68: ("its certificate's signature is too weak for this host's policy", _WEAK),
    }
)
# Plain HTTP read as a TLS record; the name of the error differs between OpenSSL 1.1.1, 3.0 and 3.2.
_NOT_TLS = frozenset(
    {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"}
)


def explain(error: OSError, host: str) -> tuple[str, str | None]:
    """Return one line that says why TLS with `host` failed, and a remedy where one is known."""
    import ssl

    if isinstance(error, ssl.SSLCertVerificationError):
        code = getattr(error, "verify_code", 0)
        if code in (62, 64):
            what = "the certificate that was sent is not valid for this name"
            return f"{host} is not trusted: {what}", "use the name in the certificate, or have it reissued"
        text = clean(str(getattr(error, "verify_message", "") or error), 200)
        verdict, hint = _VERDICTS.get(code, (text, None))
        return f"{host} is not trusted: {verdict}", hint
    if isinstance(error, ssl.SSLError):
        reason = getattr(error, "reason", None) or ""
        if reason in _NOT_TLS:
            return f"{host} does not speak TLS", f"if it serves plain HTTP, write http://{host} as its url"
        if "CERTIFICATE_REQUIRED" in reason or "ALERT_UNKNOWN_CA" in reason or "BAD_CERTIFICATE" in reason:
            return (
                f"{host} refused this client's certificate",
                "check client_cert and client_key of the registry",
            )
        if "PROTOCOL_VERSION" in reason or reason in ("UNSUPPORTED_PROTOCOL", "NO_PROTOCOLS_AVAILABLE"):
            return f"{host} and this program share no TLS version", "TLS 1.2 or newer is needed"
        if "HANDSHAKE_FAILURE" in reason:
            return f"{host} refused the TLS handshake", "it may want other ciphers or a client certificate"
        if isinstance(error, ssl.SSLEOFError):
            return f"{host} closed the connection during the TLS handshake", None
        words = reason.replace("_", " ").lower() or clean(str(error), 200)
        return f"TLS handshake with {host} failed: {words}", None
    return f"TLS with {host} failed: {clean(error.strerror or str(error) or type(error).__name__, 200)}", None
