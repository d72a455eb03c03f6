"""Which authorities are trusted, which certificates are shown, and why TLS failed.

Invariants: a file that the user named is used, or is an error; no other file replaces it. Of the
directories in SSL_CERT_DIR those that OpenSSL can read by hashed names are used. A caller
keeps the contexts that it made, because reading a bundle of authorities takes 30 ms.
Follows: docs/design.md section 9 ("Trust"), docs/protocol-facts.md section 8.2.
"""

from __future__ import annotations

import os
import re
import ssl
import sys
from collections.abc import Callable

from _regsync import edge
from _regsync.errors import ConfigError
from _regsync.text import printable

# The bundles that truststore 0.10.5 tries if OpenSSL's own defaults do not exist.
_BUNDLES = (
    "/etc/ssl/cert.pem",  # Alpine, Arch, RHEL 9 and 10
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",  # Fedora
    "/etc/pki/tls/cert.pem",  # older RHEL
    "/etc/ssl/certs/ca-certificates.crt",  # Debian
    "/etc/ssl/ca-bundle.pem",  # SUSE
)

# The system's directories of certificates by registry, as other container clients use them.
_CERTS_D = ("/etc/containers/certs.d", "/etc/docker/certs.d")

# A pattern of cipher names. Python before 3.15 cannot select cipher suites of TLS 1.3; OpenSSL
# prefers AES there.
_UNWANTED_CIPHERS = "CHACHA20|MD5"


def find_certs_d(home: str | None, authority: str, port: int) -> tuple[str, ...]:
    """Return the paths of the certificate files that other container clients use for a registry.

    They are the files of the first directory that can be read, sorted by name. Returns an empty
    tuple if there is no such directory. `home` is the user's home directory, or None if it is not
    known. `authority` is the registry's HOST or HOST:PORT.
    """
    bases = list(_CERTS_D)
    if home:
        bases.insert(0, f"{home}/.config/containers/certs.d")

    # The name of a directory may include the port even if it is the default port of the scheme.
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
) -> ssl.SSLContext:
    """Return a client context that trusts the system's authorities and the named ones.

    `certs_d` are certificate files as `find_certs_d` returns them. Their authorities are used only
    if `ca_file` is not given, and their client certificates only if `client_cert` is not given.
    Raises ConfigError, which names the file or the variable, if a file or directory cannot be used.
    """
    own_authorities = [file for file in certs_d if file.endswith(".crt")]
    authorities = [ca_file] if ca_file else own_authorities

    context = _new_context()
    _trust_system(context, is_required=not authorities)
    for file in authorities:
        _load(f"ca_file {printable(file)}", context.load_verify_locations, file)

    _restrict_protocol(context)

    if client_cert:
        _show_certificate(context, client_cert, client_key or client_cert)
    else:
        _show_pairs(context, certs_d)
    return context


def _uses_truststore() -> bool:
    """Report whether the system's authorities are kept in a store that OpenSSL cannot read."""
    return sys.platform in ("darwin", "win32")


def _new_context() -> ssl.SSLContext:
    if not _uses_truststore():
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    # truststore 0.10.5 and newer verify the peer at the end of do_handshake(), even if the socket
    # was wrapped without a handshake.
    import truststore

    return truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _trust_system(context: ssl.SSLContext, *, is_required: bool) -> None:
    """Load the system's authorities into a context.

    SSL_CERT_FILE and SSL_CERT_DIR each replace only their own default, as in OpenSSL. If neither is
    set, one default is enough: a directory is preferred, because OpenSSL reads from it only if it
    looks up a certificate. Raises ConfigError if a file that the environment names cannot be used,
    or if `is_required` and no authority can be found.
    """
    bundle = edge.variable("SSL_CERT_FILE")
    if bundle:
        _load(f"SSL_CERT_FILE={bundle}", context.load_verify_locations, bundle)
    if _uses_truststore():  # the context trusts the system's store already
        return

    defaults = ssl.get_default_verify_paths()
    named = edge.variable("SSL_CERT_DIR")
    searched = named.split(os.pathsep) if named else [defaults.openssl_capath]
    directories = list(filter(_is_hashed, searched))
    for directory in directories:
        context.load_verify_locations(capath=directory)
    if bundle or (directories and not named):
        return

    for file in (defaults.openssl_cafile, *(() if named else _BUNDLES)):
        if os.path.isfile(file):
            _load(f"the bundle {file}", context.load_verify_locations, file)
            return
    if is_required and not directories:
        raise ConfigError(
            "no certificate authorities found on this host",
            hint="install the system's CA certificates, or set SSL_CERT_FILE to a PEM bundle",
        )


def _is_hashed(directory: str) -> bool:
    """Report whether OpenSSL can look up certificates in a directory by their file names."""
    try:
        names = os.listdir(directory)
    except OSError:
        return False
    return any(re.fullmatch(r"[0-9a-fA-F]{8}\.[0-9]+", name) for name in names)


def _restrict_protocol(context: ssl.SSLContext) -> None:
    """Restrict ciphers and versions further than the system's policy. A stricter policy stays in
    effect.
    """
    names = [cipher["name"] for cipher in context.get_ciphers()]
    context.set_ciphers(":".join(name for name in names if not re.search(_UNWANTED_CIPHERS, name)))
    context.minimum_version = max(context.minimum_version, ssl.TLSVersion.TLSv1_2)
    # Accept an intermediate authority as the trust anchor, as Go and Python 3.13 do.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN


def _show_pairs(context: ssl.SSLContext, files: tuple[str, ...]) -> None:
    """Have a context show the client certificates among `files`, each with the key beside it.

    Raises ConfigError if a certificate has no key.
    """
    # Of several certificates with the same type of key, OpenSSL uses the one that was loaded last.
    # Load in reverse order, so that the first by name is used.
    for path in reversed(files):
        if path.endswith(".cert"):
            _show_certificate(context, path, f"{path.removesuffix('.cert')}.key")


def _show_certificate(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Have a context show a client certificate. Raises ConfigError if the files cannot be used."""
    setting = f"client_cert {printable(certificate)} with client_key {printable(key)}"
    # Without a password OpenSSL would ask for one on the terminal.
    _load(setting, context.load_cert_chain, certificate, key, password="")


def _load(setting: str, load: Callable[..., None], *files: str, **options: str) -> None:
    """Call `load`, a method of a context, with `files` and `options`. Raises ConfigError if that
    fails. `setting` names the setting in its message.
    """
    for file in files:
        # Reading a pipe would block, so only regular files are loaded.
        if not (os.path.isfile(file) and os.access(file, os.R_OK)):
            is_absent = not os.path.exists(file)
            why = "does not exist" if is_absent else "is not a file, or this user may not read it"
            raise ConfigError(
                f"{setting}: {printable(file)} {why}",
                hint="name another file, or make this one readable",
            )

    try:
        load(*files, **options)
    except OSError as error:
        reason = str(error.strerror)
        if isinstance(error, ssl.SSLError):
            reason = getattr(error, "reason", None) or "it does not parse as PEM"
        raise ConfigError(
            f"{setting} cannot be used: {reason.replace('_', ' ').lower()}",
            hint="use PEM files, and a key without a passphrase (RSA: at least 2048 bits)",
        ) from error


# Hints for failures.

_CLIENT_CERTIFICATE = (
    "give client_cert and client_key of the registry, or put the pair into a container client's"
    " certs.d; an authority that the registry accepts for clients must have issued it"
)

# A pattern and its hint. The pattern matches the number of a verification error in OpenSSL's
# x509_vfy.h, or the name of any other error. Plain HTTP that is read as a TLS record has different
# names in OpenSSL 1.1.1, 3.0 and 3.2. A peer that misses a client certificate says so only from TLS
# 1.3 on, and Go's says BAD_CERTIFICATE.
_HINTS = (
    ("9|10", "check this host's clock; if it is right, the registry's certificate must be renewed"),
    (
        "2|18|19|20|21",
        "give the authority's PEM file as `ca_file` of the registry, or in SSL_CERT_FILE",
    ),
    (
        "WRONG_VERSION.*|HTTP_REQUEST|RECORD_LAYER.*|PACKET_LENGTH.*|.*EOF.*",
        "write http:// before the host if it serves plain HTTP",
    ),
    (".*ALERT_(.*CERTIFICATE.*|UNKNOWN_CA|ACCESS_DENIED|HANDSHAKE_FAILURE)", _CLIENT_CERTIFICATE),
)

# Keys and signatures that are too weak. AWS-LC has no words for them: tools/static/tls.h gives it
# OpenSSL's numbers.
_TOO_WEAK = ("66", "67", "68")


def explain(error: OSError, host: str) -> tuple[str, str | None]:
    """Return one line that says why TLS with `host` failed, in the words of the TLS library, and a
    hint, or None if no hint is known.
    """
    # An error of verification is known by the number in `verify_code`, another one by OpenSSL's name
    # in `reason`, and one without such a name by its class, such as SSLEOFError.
    reason = getattr(error, "reason", None)
    code = str(getattr(error, "verify_code", reason or type(error).__name__))
    hint = next((hint for pattern, hint in _HINTS if re.fullmatch(pattern, code)), None)
    verdict = getattr(error, "verify_message", None)
    if code in _TOO_WEAK:
        verdict = "certificate key or signature too weak"
    if verdict:
        return f"{host} is not trusted: {printable(verdict, 200)}", hint
    words = reason.replace("_", " ").lower() if reason else error.strerror or code
    return f"TLS with {host} failed: {printable(words, 200)}", hint
