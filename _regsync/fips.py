"""The only door to digests, MACs and signatures, and the gate: the default build computes by the
host's FIPS provider. Owns: which library computes them. May not know: anything else of the program;
it imports os and sys until it is asked for something. Invariants: no message shows a key; no other
module of `_regsync` imports hashlib, hmac or secrets; what the gate cannot prove closes it,
whatever the arguments. Python fails open: without a provider hashlib uses code of its own, and its
FIPS mode tells a setting. So OpenSSL itself is asked, and nothing here falls back. Chance that
secures nothing (temporary names, pauses) is os.urandom's. Follows docs/design.md sections 1 and 11,
docs/protocol-facts.md 8.3."""

from __future__ import annotations

import os
import sys

from _regsync import FIPS_BUILD

# typing's constant without typing, which costs `version` a third of its time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ctypes import CDLL, c_void_p


REMEDY = (
    "install one, with `openssl fipsinstall -module DIR/fips.so -out DIR/fipsmodule.cnf`, "
    "or use regsync-nofips.pyz"
)


def closed() -> str:
    """Activate the host's FIPS provider for this process; return why the gate is closed, "" if it
    is not.
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


def _activate() -> CDLL:
    """Take a host in FIPS mode as it is; else add its provider to what OPENSSL_CONF or the system
    say of OpenSSL.
    """
    early = sys.modules.keys() & {"_hashlib", "_ssl"}
    crypto = _libcrypto()
    from ctypes import c_ulong

    if crypto.OpenSSL_version_num() < 0x30000000:
        raise ValueError("needs OpenSSL 3.0 or newer")
    own = os.environ.get("OPENSSL_CONF")  # OpenSSL goes on in silence without what it cannot read
    if own and crypto.NCONF_load(_pointer(crypto, "NCONF_new", None), os.fsencode(own), None) != 1:
        raise ValueError(
            f"cannot be set up by OPENSSL_CONF={own!r}, which does not load ({_said(crypto)})"
        )
    # The setting first: asking for a provider that nobody named would load the built-in one.
    if (
        crypto.EVP_default_properties_is_fips_enabled(None)
        == 1
        == crypto.OSSL_PROVIDER_available(None, b"fips")
    ):
        return crypto
    if early:
        raise ValueError(
            "comes too late: OpenSSL was loaded before regsync began; start it by `python3 -I -S`"
        )
    module, settings, text = _find(crypto, own)
    # Behind what fipsinstall wrote, so that this holds; in memory, so that nothing is left behind.
    text += (
        b"\n[fips_sect]\nactivate = 1\n[regsync]\nproviders = regsync_providers\n[regsync_providers]\n"
        b"fips = fips_sect\n[default]\nopenssl_conf = regsync\n"
    )
    config = _pointer(crypto, "NCONF_new", None)
    bio = _pointer(crypto, "BIO_new_mem_buf", text, len(text))
    crypto.OSSL_PROVIDER_set_default_search_path(None, os.fsencode(os.path.dirname(module)))
    if (
        crypto.NCONF_load_bio(config, bio, None) != 1
        or crypto.CONF_modules_load(config, None, c_ulong()) != 1
        or not _pointer(crypto, "OSSL_PROVIDER_load", None, b"fips")
    ):
        tried = f"{module!r} with {settings}" + (f", after OPENSSL_CONF={own!r}," if own else "")
        raise ValueError(
            f"{tried} does not load ({_said(crypto)}): one is damaged, or not made for the other"
        )
    _pointer(
        crypto, "OSSL_PROVIDER_load", None, b"base"
    )  # reads keys and certificates, computes nothing
    crypto.EVP_default_properties_enable_fips(None, 1)
    return crypto


def _find(crypto: CDLL, own: str | None) -> tuple[str, str, bytes]:
    """Return the path of fips.so, and where fipsinstall's settings for it are, with them."""
    from ctypes import c_char_p

    crypto.OPENSSL_info.restype = c_char_p
    base, modules = (os.fsdecode(crypto.OPENSSL_info(number)) for number in (1001, 1003))
    named = os.environ.get("OPENSSL_MODULES")  # as in OpenSSL the only place, if it is given
    places = [named] if named else [modules, "/usr/lib64/ossl-modules"]
    found = next((place for place in places if os.path.isfile(f"{place}/fips.so")), None)
    if found is None:
        raise ValueError(f"is not found: no fips.so in {places}")
    tried = dict.fromkeys(
        (named, own and os.path.dirname(own), found, base, "/etc/ssl", "/etc/pki/tls")
    )
    for path in [f"{place}/fipsmodule.cnf" for place in tried if place]:
        if os.path.isfile(path):
            with open(path, "rb") as file:
                return f"{found}/fips.so", repr(path), file.read()
    return (
        f"{found}/fips.so",
        f"no fipsmodule.cnf in {[*filter(None, tried)]}",
        b"",
    )  # some modules need none


def _check(crypto: CDLL) -> None:
    """Raise ValueError, OSError or ImportError unless the provider, and nothing else, serves
    digests and TLS.
    """
    import _hashlib
    import _ssl
    from ctypes import c_char_p

    crypto.OSSL_PROVIDER_get0_name.restype = c_char_p
    if crypto.OSSL_PROVIDER_available(None, b"fips") != 1:
        raise ValueError("is not active")
    chance = _pointer(crypto, "RAND_get0_public", None)
    for kind, what, found in (
        ("MD", "SHA-256", _pointer(crypto, "EVP_MD_fetch", None, b"SHA256", None)),
        ("RAND", "random numbers", chance and _pointer(crypto, "EVP_RAND_CTX_get0_rand", chance)),
    ):
        if (
            not found
            or crypto.OSSL_PROVIDER_get0_name(_pointer(crypto, f"EVP_{kind}_get0_provider", found))
            != b"fips"
        ):
            raise ValueError(f"is not what computes {what}")
    _hashlib.openssl_sha256(b"")
    try:
        _hashlib.openssl_md5(b"")
    except ValueError:
        pass
    else:
        raise ValueError("is not alone: OpenSSL still computes MD5")
    if any(
        "CHACHA20" in cipher["name"]
        for cipher in _ssl._SSLContext(_ssl.PROTOCOL_TLS_CLIENT).get_ciphers()
    ):
        raise ValueError("is not alone: TLS still offers ChaCha20")
    crypto.ERR_clear_error()  # or TLS would take what is left there for its own


def provider() -> dict[str, str]:
    """Return the name and the version that the active provider gives itself."""
    from ctypes import Structure, addressof, c_char_p, c_size_t, c_uint, c_void_p

    class Parameter(Structure):  # OSSL_PARAM of openssl/core.h; type 6 is a pointer to a string
        _fields_ = [
            ("key", c_char_p),
            ("type", c_uint),
            ("at", c_void_p),
            ("size", c_size_t),
            ("used", c_size_t),
        ]

    crypto = _libcrypto()
    told = {"name": c_char_p(), "version": c_char_p()}
    asked = (Parameter * 3)(
        *(Parameter(key.encode(), 6, addressof(value)) for key, value in told.items())
    )
    crypto.OSSL_PROVIDER_get_params(_pointer(crypto, "OSSL_PROVIDER_load", None, b"fips"), asked)
    return {key: (value.value or b"?").decode("ascii", "replace") for key, value in told.items()}


def _libcrypto() -> CDLL:
    import _ssl
    from ctypes import CDLL

    # By the extension's own names; or it is inside the interpreter; Windows gives the library that
    # is loaded already.
    for place in (
        getattr(_ssl, "__file__", None),
        None,
        "libcrypto-3",
        "libcrypto-3-x64",
        "libcrypto-3-arm64",
    ):
        try:
            crypto = CDLL(place)
        except (OSError, TypeError):
            continue
        if getattr(crypto, "OpenSSL_version_num", int)() == _ssl.OPENSSL_VERSION_NUMBER:
            return crypto
    raise ValueError(
        "cannot be used: this Python does not show its libcrypto; run regsync with the system's Python"
    )


def _pointer(crypto: CDLL, name: str, *arguments: object) -> c_void_p:
    from ctypes import c_void_p

    function = crypto[name]
    function.restype = c_void_p  # by default 32 bits of it
    return c_void_p(function(*arguments))


def _said(crypto: CDLL) -> str:
    """Empty OpenSSL's list of errors and return it in words."""
    from ctypes import c_char_p, c_ulong

    crypto.ERR_get_error.restype = c_ulong
    crypto.ERR_error_string.restype = c_char_p
    lines = (
        crypto.ERR_error_string(c_ulong(code), None).decode()
        for code in iter(crypto.ERR_get_error, 0)
    )
    return ", ".join(["OpenSSL says", *(line.rpartition(":")[2] for line in lines)]).replace(
        ",", ":", 1
    )
