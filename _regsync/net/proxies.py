"""Which proxy a connection goes through.

The variables and nearly all of NO_PROXY's grammar are Go's (`httpproxy`), as in container clients
(docs/protocol-facts.md section 8.1). As in curl and Python, the lower-case variable comes first, and
an empty variable counts as unset.

Invariants: neither the text of a `Proxy` nor an error contains its user name or password. Loopback
and metadata services are never reached by proxy, unless a registry's own configuration says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from _regsync.addresses import DEFAULT_PORTS, is_unusual_address
from _regsync.errors import ConfigError

# The name of the setting `proxy` of a registry, for messages.
IN_CONFIGURATION = "proxy in the configuration"

# Metadata services return this machine's credentials, which no proxy may see
# (docs/protocol-facts.md sections 8.1 and 9.2, R20).
_NEVER_PROXIED = (
    "localhost",
    "127.0.0.0/8",
    "::1",
    "169.254.0.0/16",
    "fe80::/10",
    "fd00:ec2::/32",
    "metadata.google.internal",
)


class Proxy(NamedTuple):
    """An HTTP proxy that supports CONNECT. User name and password are percent-decoded."""

    host: str
    port: int
    setting: str  # the name of the setting that names the proxy, for messages
    username: str | None = None
    password: str | None = None

    def __repr__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def proxy_for(
    scheme: str,
    host: str,
    port: int,
    environ: Mapping[str, str],
    override: str | None = None,
    *,
    heeds_exemptions: bool = False,
) -> Proxy | None:
    """Return the proxy for an origin, or None for a direct connection.

    `override` is the proxy of a registry's configuration; it replaces the variables. It also
    applies to exempt origins, unless `heeds_exemptions`. Raises ConfigError if the selected value
    is not a proxy URL.
    """
    if override:
        setting, url = IN_CONFIGURATION, override
    else:
        setting, url = _variable(environ, f"{scheme}_proxy")
    if not url:
        return None
    may_be_exempt = heeds_exemptions or not override
    if may_be_exempt and _is_exempt(host.lower(), port, environ):
        return None
    return _parse(setting, url)


def _variable(environ: Mapping[str, str], lower: str) -> tuple[str, str]:
    """Return name and value of the first spelling of a variable, lower or upper case, that is set.

    The value is empty if neither is.
    """
    for name in (lower, lower.upper()):
        # In a CGI program the client's "Proxy:" header arrives as HTTP_PROXY (CVE-2016-1000110).
        if name == "HTTP_PROXY" and "REQUEST_METHOD" in environ:
            continue
        value = environ.get(name, "").strip()
        if value:
            return name, value
    return lower, ""


def _is_exempt(host: str, port: int, environ: Mapping[str, str]) -> bool:
    """Report whether an origin, in lower case, is reached without a proxy."""
    without_dot = host.rstrip(".")
    if is_unusual_address(without_dot):
        return True
    if any(_names_origin(item, without_dot, port) for item in _NEVER_PROXIED):
        return True
    _, no_proxy = _variable(environ, "no_proxy")
    return any(_names_origin(item.strip(), host, port) for item in no_proxy.lower().split(","))


def _names_origin(item: str, host: str, port: int) -> bool:
    """Report whether an item of NO_PROXY, in lower case, matches an origin. Host names are not
    resolved.
    """
    if item == "*":
        return True
    address = _address(host)
    if "/" in item:
        try:
            return address is not None and address in ip_network(item, strict=False)
        except ValueError:
            return False

    # NAME, NAME:PORT, or an address. A name stands for its sub-domains too.
    name, only_port = item, ""
    if item.count(":") == 1:  # an IPv6 address has more
        name, only_port = item.split(":")
    if only_port not in ("", str(port)):
        return False
    name = name.removeprefix("*").removeprefix(".")
    named_address = _address(name)
    if address or named_address:
        return address == named_address  # an address never matches a name
    return bool(name) and f".{host}".endswith(f".{name}")


def _address(host: str) -> IPv4Address | IPv6Address | None:
    """Parse an IP address. An IPv4-mapped IPv6 address is returned as IPv4. Returns None if the
    host is a name.
    """
    try:
        address = ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _parse(setting: str, url: str) -> Proxy:
    """Parse a proxy's URL. Raises ConfigError if it is not valid. The error does not contain the
    URL, because it may have a login.
    """
    malformed = ConfigError(f"{setting} is not a proxy URL", hint="write http://HOST:PORT")
    try:
        # Go reads `proxy.example:3128` as http://proxy.example:3128.
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or DEFAULT_PORTS["http"]
    except ValueError:
        raise malformed from None

    # An @ after the host belongs to a login whose password contains an unescaped slash.
    is_login_cut = "@" in url.replace(parts.netloc, "")
    host = parts.hostname or ""
    # Undecodable bytes of the environment are not printable.
    if is_login_cut or not url.isprintable() or not re.fullmatch(r"[\w.:-]+", host):
        raise malformed
    if parts.scheme != "http":
        raise ConfigError(
            f"{setting}: proxy scheme {parts.scheme!r} is not supported",
            hint="write http://HOST:PORT; through it the connection to a registry is TLS all the same",
        )
    username = parts.username and unquote(parts.username)
    password = parts.password and unquote(parts.password)
    return Proxy(host, port, setting, username, password)
