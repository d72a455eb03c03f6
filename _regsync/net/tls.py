"""The only place where a TLS context is made, and where its failures are put into words. Owns:
trusted authorities, client certificates, the lowest TLS version. May not know: sockets, registries,
how many contexts there are (the caller shares them: a bundle takes 30 ms). Invariant: a name that
the user gave and that leads to nothing is an error, never a silent fall-back. Follows
docs/design.md section 9 ("CA"), docs/protocol-facts.md section 8.2."""

from __future__ import annotations

import os
import re
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping

from _regsync.errors import ConfigError
from _regsync.text import clean

# Where truststore 0.10.5 looks without OpenSSL's defaults: Alpine, Arch, RHEL 9-10; Fedora; older
# RHEL; Debian; SUSE.
_BUNDLES = (
    "/etc/ssl/cert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/cert.pem",
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/ssl/ca-bundle.pem",
)


_CERTS_D = ("/etc/containers/certs.d", "/etc/docker/certs.d")


class _Context(ssl.SSLContext):
    """The way of Linux; `sessions`: by host name, what the next connection resumes."""

    def __init__(self, _: int) -> None:
        self.sessions = dict[str, ssl.SSLSession]()


def certs_d(home: str | None, authority: str, port: int) -> tuple[str, ...]:
    """Return the files for a registry in the first of the container clients' directories that can
    be read.
    """
    # as it may be called where it is the scheme's own
    with_port = f"{authority.removesuffix(f':{port}')}:{port}"
    for base in (*([f"{home}/.config/containers/certs.d"] if home else []), *_CERTS_D):
        for name in dict.fromkeys((authority, with_port)):
            try:
                found = os.listdir(f"{base}/{name}")
            except OSError:
                continue
            return tuple(
                f"{base}/{name}/{each}"
                for each in sorted(found)
                if each.endswith((".crt", ".cert", ".key"))
            )
    return ()


def _pairs(files: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for path in reversed(
        files
    ):  # of several for one kind of key OpenSSL shows the last one loaded: the first by name
        stem, _, kind = path.rpartition(".")
        beside = {"cert": f"{stem}.key", "key": f"{stem}.cert"}.get(kind, path)
        if beside not in files:
            hint = "a client's certificate and key are *.cert and *.key, an authority's certificate is *.crt"
            raise ConfigError(
                f"{clean(path)} has no {clean(os.path.basename(beside))} beside it", hint=hint
            )
        if kind == "cert":
            yield path, beside


def make_context(
    ca_file: str | None = None,
    client_cert: str | None = None,
    client_key: str | None = None,
    certs_d: tuple[str, ...] = (),
    *,
    environ: Mapping[str, str],
) -> ssl.SSLContext:
    """Build a client context that trusts what the system does and `ca_file`; ConfigError names what
    fails. Of `certs_d` (see there) the authorities count where there is no `ca_file`, the
    certificates where there is no `client_cert`."""
    trusted = [ca_file] if ca_file else [each for each in certs_d if each.endswith(".crt")]
    if sys.platform not in ("darwin", "win32"):
        context: ssl.SSLContext = _Context(ssl.PROTOCOL_TLS_CLIENT)
        bundle, directories = _system_trust(environ, ssl.get_default_verify_paths())
        if not bundle and not directories and not trusted:
            hint = "install the system's CA certificates, or set SSL_CERT_FILE to a PEM bundle"
            raise ConfigError("no certificate authorities found on this host", hint=hint)
    else:
        # The trust of these systems is behind an API that OpenSSL does not ask. Since 0.10.5 the
        # peer is checked at the end of do_handshake() also for a socket that was wrapped without
        # one.
        import truststore

        context = truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bundle = environ.get("SSL_CERT_FILE")
        directories = []
    if bundle:
        _load(f"SSL_CERT_FILE={bundle}", context.load_verify_locations, bundle)
    for directory in directories:
        context.load_verify_locations(capath=directory)
    for file in trusted:
        _load(f"ca_file {clean(file)}", context.load_verify_locations, file)
    # Of TLS 1.2 and below; before Python 3.15 those of TLS 1.3 are the library's, and AES is its
    # first.
    names = (each["name"] for each in context.get_ciphers())
    context.set_ciphers(":".join(name for name in names if not re.search("CHACHA20|MD5", name)))
    context.minimum_version = max(
        context.minimum_version, ssl.TLSVersion.TLSv1_2
    )  # a stricter policy stays
    context.verify_flags |= (
        ssl.VERIFY_X509_PARTIAL_CHAIN
    )  # an intermediate may be the anchor, as in Go and Python 3.13
    for certificate, key in (
        [(client_cert, client_key or client_cert)] if client_cert else _pairs(certs_d)
    ):
        # Without a password OpenSSL would ask for one on the terminal.
        _load(
            f"client_cert {clean(certificate)} with client_key {clean(key)}",
            context.load_cert_chain,
            certificate,
            key,
            password="",
        )
    return context


def _system_trust(
    environ: Mapping[str, str], defaults: ssl.DefaultVerifyPaths
) -> tuple[str | None, list[str]]:
    """Return the bundle file, if any, and the hashed directories to trust."""
    # Each variable replaces its own default only, as in OpenSSL; of the defaults one is enough,
    # first the directory: it costs nothing until a certificate is looked up.
    bundle = environ.get("SSL_CERT_FILE")
    named = environ.get("SSL_CERT_DIR")
    given = named.split(os.pathsep) if named else []
    if missing := [each for each in given if not os.path.isdir(each)]:
        raise ConfigError(f"SSL_CERT_DIR names {missing[0]!r}, which is not a directory")
    directories = list(filter(_is_hashed, given or [defaults.openssl_capath]))
    if (
        named and not directories and not bundle
    ):  # beside SSL_CERT_FILE an empty one replaces the whole store
        hint = "run `openssl rehash` on the directory, or unset SSL_CERT_DIR"
        raise ConfigError(f"SSL_CERT_DIR={named} holds no hashed certificate names", hint=hint)
    if not bundle and (named or not directories):
        bundle = next(
            filter(os.path.isfile, (defaults.openssl_cafile, *(() if directories else _BUNDLES))),
            None,
        )
    return bundle, directories


def _is_hashed(directory: str) -> bool:
    try:
        return any(re.fullmatch(r"[0-9a-fA-F]{8}\.[0-9]+", name) for name in os.listdir(directory))
    except OSError:
        return False


def _load(what: str, load: Callable[..., None], *files: str, **options: str) -> None:
    # A pipe would be waited for, and by nobody stopped.
    if unread := [
        name for name in files if not (os.path.isfile(name) and os.access(name, os.R_OK))
    ]:
        why = (
            "may not be read by this user, or is no file"
            if os.path.exists(unread[0])
            else "does not exist"
        )
        raise ConfigError(
            f"{what}: {clean(unread[0])} {why}", hint="name another file, or make this one readable"
        )
    try:
        load(*files, **options)
    except OSError as error:
        parsed = (
            "it does not parse as PEM" if isinstance(error, ssl.SSLError) else str(error.strerror)
        )
        reason = (getattr(error, "reason", None) or parsed).replace("_", " ")
        hint = "PEM files are needed, keys without passphrase, RSA of 2048 bits at least"
        raise ConfigError(f"{what} cannot be used: {reason.lower()}", hint=hint) from error


_CLOCK = "check this host's clock; if it is right, the registry's certificate must be renewed"


_AUTHORITY = "give the authority's PEM file as `ca_file` of the registry, or in SSL_CERT_FILE"


_NAME = "use a name in the certificate, or have it reissued"


_PLAIN = "if it serves plain HTTP, its url has to begin with http://"


SHOW = "give client_cert and client_key of the registry, or put the pair into a container client's certs.d"


_CLIENT = (
    "check client_cert and client_key of the registry, and by which authority it knows its clients"
)


_STRONG = "have it reissued with an RSA key of 2048 bits or more, or ECDSA, and signed over SHA-256"


# a pattern for the number in OpenSSL's x509_vfy.h or the error's name, what failed, the remedy
_FAILURES = (
    ("9", "is not trusted: its certificate is not valid yet", _CLOCK),
    ("10", "is not trusted: its certificate has expired", _CLOCK),
    ("18", "is not trusted: its certificate is self-signed", _AUTHORITY),
    ("2|19|20|21", "is not trusted: its certificate comes from an unknown authority", _AUTHORITY),
    (
        "26",
        "is not trusted: its certificate is not meant for a server",
        "have it reissued for serverAuth",
    ),
    ("66|67|68", "is not trusted: its certificate, or the authority's, is too weak", _STRONG),
    ("62|64", "is not trusted: its certificate is not valid for this name", _NAME),
    # Plain HTTP read as a TLS record; OpenSSL 1.1.1, 3.0 and 3.2 each name it otherwise.
    ("WRONG_VERSION.*|HTTP_REQUEST|RECORD_LAYER.*|PACKET_LENGTH.*", "does not speak TLS", _PLAIN),
    (".*ALERT_CERTIFICATE_REQUIRED", "asks for a client certificate", SHOW),
    (
        ".*ALERT_BAD_CERTIFICATE",
        "refused this client's certificate, or the lack of one",
        _CLIENT,
    ),  # Go says so of both
    (
        ".*ALERT_(UNKNOWN_CA|ACCESS_DENIED|.*CERTIFICATE.*)",
        "refused this client's certificate",
        _CLIENT,
    ),
    (
        ".*PROTOCOLS?(_VERSION|_AVAILABLE)?",
        "shares no TLS version with us",
        "TLS 1.2 or newer is needed",
    ),
    (
        ".*HANDSHAKE_FAILURE",
        "refused the TLS handshake",
        "it may want other ciphers or a client certificate",
    ),
    (".*EOF.*", "closed the connection during the TLS handshake", _PLAIN),
)


def explain(error: OSError, host: str) -> tuple[str, str | None]:
    """Return one line that says why TLS with `host` failed, and a remedy where one is known."""
    reason = getattr(error, "reason", None) or type(error).__name__
    for pattern, what, hint in _FAILURES:
        if re.fullmatch(pattern, str(getattr(error, "verify_code", reason))):
            return f"{host} {what}", hint
    said = getattr(error, "verify_message", None) or error.strerror or str(error) or reason
    return f"TLS with {host} failed: {clean(said, 200)}", None
