"""The FIPS gate: the default build runs only where the host's OpenSSL uses a FIPS provider alone.

The host is configured for that, by its own mode or by OPENSSL_CONF; nothing is activated here. The
static executable has a FIPS module inside instead, and runs only if that is the one it was built with.
Invariants: the gate opens only if every check succeeds. There is no fallback. The checks call
OpenSSL itself, because Python also works without a provider: hashlib has its own implementations,
and FIPS mode is only a setting. Neither OpenSSL nor ctypes is imported before a function is called.
Follows: docs/design.md sections 1 and 11, docs/protocol-facts.md section 8.3.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from _regsync import FIPS_BUILD, IS_STATIC

if TYPE_CHECKING:
    from ctypes import CDLL, c_void_p

_REMEDY = (
    "install one, with `openssl fipsinstall -module DIR/fips.so -out DIR/fipsmodule.cnf`, and activate "
    "it in the file that OPENSSL_CONF names (docs/install.md), or use regsync-nofips.pyz"
)
_REMEDY_IF_STATIC = "the file is not as it was built: compare it with SHA256SUMS"

# The module inside the static executable, by its own name, and what is claimed about it.
_MODULE = "AWS-LC FIPS"
_MODULE_VERSION = "3.1.0"
CLAIM = (
    "built from the source of AWS-LC FIPS 3.1.0, the module version of certificate #5314;"
    " not claimed as validated outside the environments of its security policy"
)

# OpenSSL 3.0.0, in the format of OpenSSL_version_num.
_OLDEST_OPENSSL = 0x30000000

# OSSL_PARAM_UTF8_PTR: the type of a parameter that is a pointer to a string (openssl/core.h).
_PARAMETER_UTF8_POINTER = 6


def open_gate() -> str:
    """Check that the host's OpenSSL uses a FIPS provider, and no other one.

    Returns "" if the gate is open, or the reason why it stays closed. A build without the gate
    always returns "".
    """
    if not FIPS_BUILD:
        return ""
    if IS_STATIC:
        return _check_module()
    if sys.platform in ("darwin", "win32"):
        return "the FIPS provider does not check certificates on this system"
    try:
        _check_host()
    except ValueError as error:  # raised in this module, with the end of this sentence
        return f"the FIPS provider {error}"
    except (AttributeError, ImportError, OSError) as error:
        return f"the FIPS provider cannot be used: {error}"
    return ""


def remedy() -> str:
    """Return what to do where the gate is closed."""
    return _REMEDY_IF_STATIC if IS_STATIC else _REMEDY


def _check_module() -> str:
    """Return "" if the module inside the static executable is the right one, or what is wrong."""
    from _regsync_native import fips_module  # type: ignore[import-not-found]

    found: str = fips_module()
    if found == f"{_MODULE} {_MODULE_VERSION}":
        return ""
    return (
        f"the FIPS module of this file is {found or 'not active'}, not {_MODULE} {_MODULE_VERSION}"
    )


def _check_host() -> None:
    """Raise ValueError, OSError or ImportError unless all checks succeed."""
    crypto = libcrypto()
    if crypto.OpenSSL_version_num() < _OLDEST_OPENSSL:
        raise ValueError("needs OpenSSL 3.0 or newer")
    _check_is_active(crypto)
    _check_is_alone(crypto)
    crypto.ERR_clear_error()  # otherwise Python's TLS would report these errors as its own


def _check_is_active(crypto: CDLL) -> None:
    """Raise ValueError unless the provider is active."""
    # This reads OpenSSL's configuration. Without it, the next call would load the default provider.
    crypto.EVP_default_properties_is_fips_enabled(None)
    if crypto.OSSL_PROVIDER_available(None, b"fips") != 1:
        raise ValueError("is not active: `openssl list -providers` says which is, or why none is")


def _check_is_alone(crypto: CDLL) -> None:
    """Check that digests, random numbers and TLS use only the FIPS provider.

    Raises ValueError, OSError or ImportError if this is not the case.
    """
    digest = call_for_pointer(crypto, "EVP_MD_fetch", None, b"SHA256", None)
    if _provider_of(crypto, "EVP_MD_get0_provider", digest) != b"fips":
        raise ValueError("does not compute SHA-256")

    if _provider_of(crypto, "EVP_RAND_get0_provider", _random_generator(crypto)) != b"fips":
        raise ValueError("does not make the random numbers")

    _check_hashlib()
    _check_ssl()


def _random_generator(crypto: CDLL) -> c_void_p | None:
    """Return a pointer to the algorithm (EVP_RAND) of OpenSSL's public random generator."""
    context = call_for_pointer(crypto, "RAND_get0_public", None)
    if not context:
        return None
    return call_for_pointer(crypto, "EVP_RAND_CTX_get0_rand", context)


def _provider_of(crypto: CDLL, function: str, algorithm: c_void_p | None) -> bytes | None:
    """Return the name of the provider that implements an algorithm, or None for a null pointer.

    `function` is the OpenSSL function that returns the provider of this type of algorithm.
    """
    from ctypes import c_char_p

    if not algorithm:
        return None
    crypto.OSSL_PROVIDER_get0_name.restype = c_char_p
    provider = call_for_pointer(crypto, function, algorithm)
    name: bytes | None = crypto.OSSL_PROVIDER_get0_name(provider)
    return name


def _check_hashlib() -> None:
    """Raise ValueError unless Python's digests use only the FIPS provider.

    The FIPS provider has SHA-256, but not MD5. Every other provider has MD5.
    """
    import _hashlib

    _hashlib.openssl_sha256(b"")  # raises ValueError if no provider has SHA-256
    try:
        _hashlib.openssl_md5(b"")
    except ValueError:
        return
    raise ValueError("is not the only provider: OpenSSL still computes MD5")


def _check_ssl() -> None:
    """Raise ValueError unless Python's TLS uses only the FIPS provider, which has no ChaCha20."""
    import _ssl

    ciphers = _ssl._SSLContext(_ssl.PROTOCOL_TLS_CLIENT).get_ciphers()
    if any("CHACHA20" in cipher["name"] for cipher in ciphers):
        raise ValueError("is not the only provider: TLS still offers ChaCha20")


def provider() -> dict[str, str]:
    """Return the `name` and the `version` that OpenSSL's provider "fips" reports, or those of the
    module inside the static executable.
    """
    if IS_STATIC:
        return {"name": _MODULE, "version": _MODULE_VERSION}
    from ctypes import Structure, addressof, c_char_p, c_size_t, c_uint, c_void_p

    class Parameter(Structure):
        """The C struct OSSL_PARAM (openssl/core.h)."""

        _fields_ = [
            ("key", c_char_p),
            ("type", c_uint),
            ("address", c_void_p),
            ("size", c_size_t),
            ("used", c_size_t),
        ]

    values = {"name": c_char_p(), "version": c_char_p()}
    parameters = [
        Parameter(key.encode(), _PARAMETER_UTF8_POINTER, addressof(value))
        for key, value in values.items()
    ]
    crypto = libcrypto()
    fips = call_for_pointer(crypto, "OSSL_PROVIDER_load", None, b"fips")
    # The third, empty element marks the end of the array. The provider writes its answers into
    # `values`, at the addresses in `parameters`.
    crypto.OSSL_PROVIDER_get_params(fips, (Parameter * 3)(*parameters))
    return {key: (value.value or b"?").decode("ascii", "replace") for key, value in values.items()}


# libcrypto.


def libcrypto() -> CDLL:
    """Return the libcrypto that Python's own TLS uses. Raises ValueError if it cannot be loaded."""
    import _ssl
    from ctypes import CDLL

    candidates = (
        getattr(_ssl, "__file__", None),  # the extension module, which also resolves its libraries
        None,  # the interpreter itself
        "libcrypto-3",  # on Windows, a name returns the library that is already loaded
        "libcrypto-3-x64",
        "libcrypto-3-arm64",
    )
    for candidate in candidates:
        try:
            crypto = CDLL(candidate)
        except (OSError, TypeError):
            continue
        # If the version differs, this is a second copy of the library, which Python's TLS does not
        # use.
        version = getattr(crypto, "OpenSSL_version_num", None)
        if version is not None and version() == _ssl.OPENSSL_VERSION_NUMBER:
            return crypto
    raise ValueError(
        "cannot be used: this Python does not expose its libcrypto; run regsync with the system's Python"
    )


def call_for_pointer(crypto: CDLL, function: str, *arguments: object) -> c_void_p:
    """Call a function of libcrypto by name, and return its pointer. A null pointer is false."""
    from ctypes import c_void_p

    # `crypto[name]` creates a new function object. `crypto.name` would be shared, with its
    # `restype`.
    foreign_function = crypto[function]
    foreign_function.restype = c_void_p  # the default, int, would truncate the pointer to 32 bits
    return c_void_p(foreign_function(*arguments))
