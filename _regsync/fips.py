"""The FIPS gate: the default build uses only the host's FIPS provider for cryptography.

Owns: finding and activating the provider, checks that no other provider is used, libcrypto.
May not know: any other module. Neither OpenSSL nor ctypes is imported before a function is called.
Invariants: the gate opens only if every check succeeds. There is no fallback. The checks call
OpenSSL itself, because Python also works without a provider: hashlib has its own implementations,
and FIPS mode is only a setting.
Follows: docs/design.md sections 1 and 11, docs/protocol-facts.md section 8.3.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from _regsync import FIPS_BUILD

if TYPE_CHECKING:
    from ctypes import CDLL, c_void_p

REMEDY = (
    "install one, with `openssl fipsinstall -module DIR/fips.so -out DIR/fipsmodule.cnf`, "
    "or use regsync-nofips.pyz"
)

# OpenSSL 3.0.0, in the format of OpenSSL_version_num.
_OLDEST_OPENSSL = 0x30000000

# Arguments of OPENSSL_info (openssl/crypto.h).
_INFO_CONFIG_DIR = 1001
_INFO_MODULES_DIR = 1003

# Directories in which distributions install modules and settings, besides the directories that
# OpenSSL reports.
_MORE_MODULE_DIRS = ("/usr/lib64/ossl-modules",)
_MORE_SETTINGS_DIRS = ("/etc/ssl", "/etc/pki/tls")

# Appended to the settings from `openssl fipsinstall`. If a key occurs twice, OpenSSL uses the last
# value.
_ACTIVATION = b"""
[fips_sect]
activate = 1
[regsync]
providers = regsync_providers
[regsync_providers]
fips = fips_sect
[default]
openssl_conf = regsync
"""

# OSSL_PARAM_UTF8_PTR: the type of a parameter that is a pointer to a string (openssl/core.h).
_PARAMETER_UTF8_POINTER = 6


def open_gate() -> str:
    """Activate the host's FIPS provider, and check that no other provider is used.

    Returns "" if the gate is open, or the reason why it stays closed. A build without the gate
    always returns "".
    """
    if not FIPS_BUILD:
        return ""
    if sys.platform in ("darwin", "win32"):
        return "the FIPS provider does not check certificates on this system"
    try:
        _check(_activate())
    except ValueError as error:  # raised in this module, with the end of this sentence
        return f"the FIPS provider {error}"
    except (AttributeError, ImportError, OSError) as error:
        return f"the FIPS provider cannot be used: {error}"
    return ""


def provider() -> dict[str, str]:
    """Return the `name` and the `version` that OpenSSL's provider "fips" reports."""
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


# Activation.


class _Module(NamedTuple):
    """A provider's module, and the settings that `openssl fipsinstall` wrote for it."""

    path: str  # of fips.so
    settings: bytes  # empty if there is no settings file; some modules need no settings
    settings_source: str  # the path of the settings, or the searched directories, for messages


def _activate() -> CDLL:
    """Return libcrypto with the FIPS provider active. Raises ValueError if it cannot be activated.

    On a host in FIPS mode nothing is changed. On other hosts, the provider is activated in addition
    to the configuration in OPENSSL_CONF or of the system. This is only possible before Python has
    loaded OpenSSL.
    """
    # If Python has loaded OpenSSL already, the configuration can no longer be changed. Check this
    # first, because `libcrypto` imports `_ssl`.
    was_loaded_before = not sys.modules.keys().isdisjoint({"_hashlib", "_ssl"})
    crypto = libcrypto()
    if crypto.OpenSSL_version_num() < _OLDEST_OPENSSL:
        raise ValueError("needs OpenSSL 3.0 or newer")
    openssl_conf = os.environ.get("OPENSSL_CONF")
    if openssl_conf:
        _check_openssl_conf(crypto, openssl_conf)
    if _is_in_fips_mode(crypto):
        return crypto
    if was_loaded_before:
        raise ValueError(
            "comes too late: OpenSSL was loaded before regsync began; start it with `python3 -I -S`"
        )
    _load_module(crypto, _find_module(crypto, openssl_conf), openssl_conf)
    return crypto


def _check_openssl_conf(crypto: CDLL, openssl_conf: str) -> None:
    """Raise ValueError if the file in OPENSSL_CONF is broken.

    OpenSSL itself would silently ignore it.
    """
    config = call_for_pointer(crypto, "NCONF_new", None)
    if crypto.NCONF_load(config, os.fsencode(openssl_conf), None) != 1:
        reason = _reported_errors(crypto)
        raise ValueError(
            f"cannot be set up by OPENSSL_CONF={openssl_conf!r}, which does not load ({reason})"
        )


def _is_in_fips_mode(crypto: CDLL) -> bool:
    """Report whether the host's own configuration activates the FIPS provider."""
    # OSSL_PROVIDER_available would load the default provider if no provider is configured. So it is
    # only called if FIPS is enabled.
    is_fips_enabled = crypto.EVP_default_properties_is_fips_enabled(None) == 1
    return is_fips_enabled and bool(crypto.OSSL_PROVIDER_available(None, b"fips") == 1)


def _find_module(crypto: CDLL, openssl_conf: str | None) -> _Module:
    """Find the FIPS module in OpenSSL's module directories, and its settings file.

    Raises ValueError if there is no module.
    """
    from ctypes import c_char_p

    crypto.OPENSSL_info.restype = c_char_p
    config_dir = os.fsdecode(crypto.OPENSSL_info(_INFO_CONFIG_DIR))
    modules_dir = os.fsdecode(crypto.OPENSSL_info(_INFO_MODULES_DIR))

    # Like OpenSSL, search no other directory if OPENSSL_MODULES is set.
    openssl_modules = os.environ.get("OPENSSL_MODULES")
    module_dirs = [openssl_modules] if openssl_modules else [modules_dir, *_MORE_MODULE_DIRS]
    module_dir = _first_with("fips.so", module_dirs)
    if module_dir is None:
        raise ValueError(f"is not found: no fips.so in {module_dirs}")
    module_path = f"{module_dir}/fips.so"

    # The directories that the user has configured come first.
    own_settings_dir = os.path.dirname(openssl_conf or "")
    candidates = [openssl_modules, own_settings_dir, module_dir, config_dir, *_MORE_SETTINGS_DIRS]
    settings_dirs = [folder for folder in dict.fromkeys(candidates) if folder]
    settings_dir = _first_with("fipsmodule.cnf", settings_dirs)
    if settings_dir is None:
        return _Module(module_path, b"", settings_source=f"no fipsmodule.cnf in {settings_dirs}")
    settings_path = f"{settings_dir}/fipsmodule.cnf"
    with open(settings_path, "rb") as file:
        return _Module(module_path, settings=file.read(), settings_source=repr(settings_path))


def _first_with(file_name: str, folders: Iterable[str]) -> str | None:
    """Return the first of the folders that has a file of this name."""
    return next((folder for folder in folders if os.path.isfile(f"{folder}/{file_name}")), None)


def _load_module(crypto: CDLL, module: _Module, openssl_conf: str | None) -> None:
    """Load a FIPS module with its settings, and let OpenSSL use it by default.

    `openssl_conf` is only named in the error. Raises ValueError if OpenSSL refuses the module or
    its settings.
    """
    from ctypes import c_ulong

    directory = os.fsencode(os.path.dirname(module.path))
    crypto.OSSL_PROVIDER_set_default_search_path(None, directory)
    # The settings are passed in memory, so that no temporary file is needed.
    text = module.settings + _ACTIVATION
    text_source = call_for_pointer(crypto, "BIO_new_mem_buf", text, len(text))
    config = call_for_pointer(crypto, "NCONF_new", None)
    is_loaded = (
        crypto.NCONF_load_bio(config, text_source, None) == 1
        and crypto.CONF_modules_load(config, None, c_ulong()) == 1
        and bool(call_for_pointer(crypto, "OSSL_PROVIDER_load", None, b"fips"))
    )
    if not is_loaded:
        tried = f"{module.path!r} with {module.settings_source}"
        if openssl_conf:
            tried += f", after OPENSSL_CONF={openssl_conf!r},"
        reason = _reported_errors(crypto)
        raise ValueError(
            f"{tried} does not load ({reason}): one of the two is damaged, or they do not belong together"
        )

    # The provider `base` only decodes keys and certificates. It has no cryptographic algorithms.
    call_for_pointer(crypto, "OSSL_PROVIDER_load", None, b"base")
    crypto.EVP_default_properties_enable_fips(None, 1)


# Checks after the activation.


def _check(crypto: CDLL) -> None:
    """Check that digests, random numbers and TLS use only the FIPS provider.

    Raises ValueError, OSError or ImportError if this is not the case.
    """
    if crypto.OSSL_PROVIDER_available(None, b"fips") != 1:
        raise ValueError("is not active")

    digest = call_for_pointer(crypto, "EVP_MD_fetch", None, b"SHA256", None)
    if _provider_of(crypto, "EVP_MD_get0_provider", digest) != b"fips":
        raise ValueError("does not compute SHA-256")

    if _provider_of(crypto, "EVP_RAND_get0_provider", _random_generator(crypto)) != b"fips":
        raise ValueError("does not make the random numbers")

    _check_hashlib()
    _check_ssl()
    crypto.ERR_clear_error()  # otherwise Python's TLS would report these errors as its own


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


def _reported_errors(crypto: CDLL) -> str:
    """Clear OpenSSL's error queue, and return the reasons of its errors as text."""
    from ctypes import c_char_p, c_ulong

    crypto.ERR_get_error.restype = c_ulong
    crypto.ERR_error_string.restype = c_char_p
    reasons: list[str] = []
    while code := crypto.ERR_get_error():
        line = crypto.ERR_error_string(c_ulong(code), None).decode()
        reasons.append(line.rpartition(":")[2])
    return f"OpenSSL says: {', '.join(reasons)}" if reasons else "OpenSSL says"
