"""The FIPS gate: the default build computes by the host's FIPS provider, or not at all.

Owns: finding and activating the provider, the proof that nothing else computes, libcrypto itself.
May not know: anything else of the program. Neither OpenSSL nor ctypes is imported before a call.
Invariants: the gate is open only when everything is proven; nothing here falls back. OpenSSL itself
is asked, because Python would go on without a provider: hashlib has code of its own, and its FIPS
mode is only a setting.
Follows: docs/design.md sections 1 and 11, docs/protocol-facts.md section 8.3.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from _regsync import FIPS_BUILD

if TYPE_CHECKING:
    from ctypes import CDLL, c_void_p

REMEDY = (
    "install one, with `openssl fipsinstall -module DIR/fips.so -out DIR/fipsmodule.cnf`, "
    "or use regsync-nofips.pyz"
)

# OpenSSL 3.0.0 as OpenSSL_version_num gives it.
_OLDEST_OPENSSL = 0x30000000

# Arguments of OPENSSL_info (openssl/crypto.h).
_INFO_CONFIG_DIR = 1001
_INFO_MODULES_DIR = 1003

# Where distributions keep modules and settings, besides the places that OpenSSL itself names.
_MORE_MODULE_DIRS = ("/usr/lib64/ossl-modules",)
_MORE_SETTINGS_DIRS = ("/etc/ssl", "/etc/pki/tls")

# These settings go behind those that fipsinstall wrote: of two equal keys the later one holds.
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

# Of OSSL_PARAM: a pointer to a string (openssl/core.h).
_PARAMETER_UTF8_POINTER = 6


def closed() -> str:
    """Activate the host's FIPS provider for this process. Return why the gate stays closed, "" when it
    is open.
    """
    if not FIPS_BUILD:
        return ""
    if sys.platform in ("darwin", "win32"):
        return "the FIPS provider does not check certificates on this system"
    try:
        _check(_activate())
    except ValueError as error:
        return f"the FIPS provider {error}"
    except (AttributeError, ImportError, OSError) as error:
        return f"the FIPS provider cannot be used: {error}"
    return ""


def provider() -> dict[str, str]:
    """Return name and version of OpenSSL's provider "fips", as the provider itself gives them."""
    from ctypes import Structure, addressof, c_char_p, c_size_t, c_uint, c_void_p

    class Parameter(Structure):
        """OSSL_PARAM of openssl/core.h."""

        _fields_ = [
            ("key", c_char_p),
            ("type", c_uint),
            ("at", c_void_p),
            ("size", c_size_t),
            ("used", c_size_t),
        ]

    values = {"name": c_char_p(), "version": c_char_p()}
    parameters = [
        Parameter(key.encode(), _PARAMETER_UTF8_POINTER, addressof(value))
        for key, value in values.items()
    ]
    crypto = libcrypto()
    fips = pointer(crypto, "OSSL_PROVIDER_load", None, b"fips")
    # The array has one element more than there are parameters: an empty one ends the list. The
    # provider writes into `values`, at the addresses above.
    crypto.OSSL_PROVIDER_get_params(fips, (Parameter * 3)(*parameters))
    return {key: (value.value or b"?").decode("ascii", "replace") for key, value in values.items()}


# Activation.


class _Module(NamedTuple):
    """A provider's module, and the settings that fipsinstall wrote for it."""

    path: str  # of fips.so
    settings: bytes  # empty where there are none: some modules need none
    settings_place: str  # where the settings are, or are missing, for messages


def _activate() -> CDLL:
    """Return libcrypto with the FIPS provider active; ValueError says why it cannot be.

    A host in FIPS mode is taken as it is. Elsewhere its provider is added to what OPENSSL_CONF or
    the system says of OpenSSL.
    """
    # An OpenSSL that was loaded before has its settings already.
    was_loaded_before = not sys.modules.keys().isdisjoint({"_hashlib", "_ssl"})
    crypto = libcrypto()
    if crypto.OpenSSL_version_num() < _OLDEST_OPENSSL:
        raise ValueError("needs OpenSSL 3.0 or newer")
    own_settings_path = os.environ.get("OPENSSL_CONF")
    if own_settings_path:
        _check_loads(crypto, own_settings_path)
    if _is_in_fips_mode(crypto):
        return crypto
    if was_loaded_before:
        raise ValueError(
            "comes too late: OpenSSL was loaded before regsync began; start it with `python3 -I -S`"
        )
    _load(crypto, _find(crypto, own_settings_path), own_settings_path)
    return crypto


def _check_loads(crypto: CDLL, own_settings_path: str) -> None:
    """Raise ValueError if OPENSSL_CONF does not load: OpenSSL would go on in silence without it."""
    config = pointer(crypto, "NCONF_new", None)
    if crypto.NCONF_load(config, os.fsencode(own_settings_path), None) != 1:
        reason = _reported_errors(crypto)
        raise ValueError(
            f"cannot be set up by OPENSSL_CONF={own_settings_path!r}, which does not load ({reason})"
        )


def _is_in_fips_mode(crypto: CDLL) -> bool:
    """Return whether the host's own settings have the FIPS provider active."""
    # The setting is asked first: asking for a provider that nobody named would load the built-in
    # one.
    if crypto.EVP_default_properties_is_fips_enabled(None) != 1:
        return False
    return bool(crypto.OSSL_PROVIDER_available(None, b"fips") == 1)


def _find(crypto: CDLL, own_settings_path: str | None) -> _Module:
    """Return the module that OpenSSL would find, and the settings of the first place that has any;
    ValueError where there is no module.
    """
    from ctypes import c_char_p

    crypto.OPENSSL_info.restype = c_char_p
    config_dir = os.fsdecode(crypto.OPENSSL_info(_INFO_CONFIG_DIR))
    modules_dir = os.fsdecode(crypto.OPENSSL_info(_INFO_MODULES_DIR))

    named_dir = os.environ.get("OPENSSL_MODULES")  # as in OpenSSL the only place, if it is given
    module_dirs = [named_dir] if named_dir else [modules_dir, *_MORE_MODULE_DIRS]
    dirs_with_module = [place for place in module_dirs if os.path.isfile(f"{place}/fips.so")]
    if not dirs_with_module:
        raise ValueError(f"is not found: no fips.so in {module_dirs}")
    module_dir = dirs_with_module[0]
    module = f"{module_dir}/fips.so"

    # What the user has named goes first.
    own_settings_dir = os.path.dirname(own_settings_path or "")
    places = [named_dir, own_settings_dir, module_dir, config_dir, *_MORE_SETTINGS_DIRS]
    settings_dirs = [place for place in dict.fromkeys(places) if place]
    for place in settings_dirs:
        path = f"{place}/fipsmodule.cnf"
        if os.path.isfile(path):
            with open(path, "rb") as file:
                return _Module(module, file.read(), repr(path))
    return _Module(module, b"", f"no fipsmodule.cnf in {settings_dirs}")


def _load(crypto: CDLL, module: _Module, own_settings_path: str | None) -> None:
    """Load a module with its settings; ValueError if that fails."""
    from ctypes import c_ulong

    # In memory, so that no file is left behind.
    text = module.settings + _ACTIVATION
    config = pointer(crypto, "NCONF_new", None)
    text_source = pointer(crypto, "BIO_new_mem_buf", text, len(text))
    directory = os.fsencode(os.path.dirname(module.path))
    crypto.OSSL_PROVIDER_set_default_search_path(None, directory)

    is_loaded = (
        crypto.NCONF_load_bio(config, text_source, None) == 1
        and crypto.CONF_modules_load(config, None, c_ulong()) == 1
        and bool(pointer(crypto, "OSSL_PROVIDER_load", None, b"fips"))
    )
    if not is_loaded:
        tried = f"{module.path!r} with {module.settings_place}"
        if own_settings_path:
            tried += f", after OPENSSL_CONF={own_settings_path!r},"
        reason = _reported_errors(crypto)
        raise ValueError(
            f"{tried} does not load ({reason}): one of the two is damaged, or they do not belong together"
        )

    # `base` reads keys and certificates, and computes nothing.
    pointer(crypto, "OSSL_PROVIDER_load", None, b"base")
    crypto.EVP_default_properties_enable_fips(None, 1)


# The proof.


def _check(crypto: CDLL) -> None:
    """Raise ValueError, OSError or ImportError unless the provider alone serves digests and TLS."""
    if crypto.OSSL_PROVIDER_available(None, b"fips") != 1:
        raise ValueError("is not active")

    digest = pointer(crypto, "EVP_MD_fetch", None, b"SHA256", None)
    if _provider_of(crypto, "EVP_MD_get0_provider", digest) != b"fips":
        raise ValueError("does not compute SHA-256")

    if _provider_of(crypto, "EVP_RAND_get0_provider", _random_generator(crypto)) != b"fips":
        raise ValueError("does not make the random numbers")

    _check_hashlib()
    _check_ssl()
    crypto.ERR_clear_error()  # or TLS would take errors that are left there for its own


def _random_generator(crypto: CDLL) -> c_void_p | None:
    """Return the kind of generator that public random numbers come from."""
    context = pointer(crypto, "RAND_get0_public", None)
    if not context:
        return None
    return pointer(crypto, "EVP_RAND_CTX_get0_rand", context)


def _provider_of(crypto: CDLL, function: str, algorithm: c_void_p | None) -> bytes | None:
    """Return the name of the provider that an algorithm is of, which a `function` of OpenSSL tells;
    None for no algorithm.
    """
    from ctypes import c_char_p

    if not algorithm:
        return None
    crypto.OSSL_PROVIDER_get0_name.restype = c_char_p
    name: bytes | None = crypto.OSSL_PROVIDER_get0_name(pointer(crypto, function, algorithm))
    return name


def _check_hashlib() -> None:
    """Check that the FIPS provider alone serves Python's digests: with it SHA-256 works and MD5, which
    every other provider has, does not. ValueError where that is not so.
    """
    import _hashlib

    _hashlib.openssl_sha256(b"")  # raises ValueError where no provider has it
    try:
        _hashlib.openssl_md5(b"")
    except ValueError:
        has_md5 = False
    else:
        has_md5 = True
    if has_md5:
        raise ValueError("is not the only provider: OpenSSL still computes MD5")


def _check_ssl() -> None:
    """Check that Python's TLS is the provider's, which has no ChaCha20."""
    import _ssl

    ciphers = _ssl._SSLContext(_ssl.PROTOCOL_TLS_CLIENT).get_ciphers()
    if any("CHACHA20" in cipher["name"] for cipher in ciphers):
        raise ValueError("is not the only provider: TLS still offers ChaCha20")


# libcrypto.


def libcrypto() -> CDLL:
    """Return the libcrypto that Python's own TLS runs on; ValueError if it cannot be reached."""
    import _ssl
    from ctypes import CDLL

    places = (
        getattr(_ssl, "__file__", None),  # the extension, by which its libraries are found
        None,  # the interpreter itself
        "libcrypto-3",  # Windows: a name gives the library that is loaded already
        "libcrypto-3-x64",
        "libcrypto-3-arm64",
    )
    for place in places:
        try:
            crypto = CDLL(place)
        except (OSError, TypeError):
            continue
        # Another version is another copy of the library, which TLS does not run on.
        version = getattr(crypto, "OpenSSL_version_num", None)
        if version is not None and version() == _ssl.OPENSSL_VERSION_NUMBER:
            return crypto
    raise ValueError(
        "cannot be used: this Python does not expose its libcrypto; run regsync with the system's Python"
    )


def pointer(crypto: CDLL, function: str, *arguments: object) -> c_void_p:
    """Call a function of libcrypto that returns a pointer; a null pointer is false."""
    from ctypes import c_void_p

    called = crypto[function]  # a new object: `crypto.function` is shared, and so its `restype`
    called.restype = c_void_p  # by default only 32 bits are taken
    return c_void_p(called(*arguments))


def _reported_errors(crypto: CDLL) -> str:
    """Empty OpenSSL's list of errors and return it in words."""
    reasons = ", ".join(_reasons(crypto))
    return f"OpenSSL says: {reasons}" if reasons else "OpenSSL says"


def _reasons(crypto: CDLL) -> Iterator[str]:
    from ctypes import c_char_p, c_ulong

    crypto.ERR_get_error.restype = c_ulong
    crypto.ERR_error_string.restype = c_char_p
    while True:
        code = crypto.ERR_get_error()
        if code == 0:
            return
        line = crypto.ERR_error_string(c_ulong(code), None).decode()
        yield line.rpartition(":")[2]
