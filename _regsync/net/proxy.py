"""Select the proxy for a request.

Owns: the proxy variables, the grammar of NO_PROXY, the hosts that are never reached by proxy.
May not know: sockets, CONNECT, the environment of the process (it is an argument).
Invariants: neither the text of a `Proxy` nor an error contains its user name or password.
Follows: docs/protocol-facts.md section 8.1: Go's `httpproxy` rules, which container clients use. As
in curl and Python, the lower-case variable comes first, and an empty variable counts as unset.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from _regsync.addresses import DEFAULT_PORTS, is_unusual_address
from _regsync.errors import ConfigError

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


# The name of the setting `proxy` of a registry, for messages.
IN_CONFIGURATION = "proxy in the configuration"


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


class _Setting(NamedTuple):
    """A setting: the name that is shown to the user, and the value, which is empty if it is not
    set.
    """

    name: str
    value: str


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
    setting = _variable(environ, f"{scheme}_proxy")
    if override:
        setting = _Setting(IN_CONFIGURATION, override)
    if not setting.value:
        return None
    may_be_exempt = heeds_exemptions or not override
    if may_be_exempt and _is_exempt(host.lower(), port, environ):
        return None
    return _parse(setting)


def _variable(environ: Mapping[str, str], lower: str) -> _Setting:
    """Return the first spelling of a variable, lower or upper case, that is set."""
    for name in (lower, lower.upper()):
        # In a CGI program the client's "Proxy:" header arrives as HTTP_PROXY (CVE-2016-1000110).
        if name == "HTTP_PROXY" and "REQUEST_METHOD" in environ:
            continue
        value = environ.get(name, "").strip()
        if value:
            return _Setting(name, value)
    return _Setting(lower, "")


def _is_exempt(host: str, port: int, environ: Mapping[str, str]) -> bool:
    """Report whether an origin is reached without a proxy: it is a private service, or NO_PROXY
    names it. `host` is in lower case.
    """
    without_dot = host.rstrip(".")
    if is_unusual_address(without_dot):
        return True
    if any(_names_origin(item, without_dot, port) for item in _NEVER_PROXIED):
        return True
    no_proxy = _variable(environ, "no_proxy").value.lower()
    return any(_names_origin(item.strip(), host, port) for item in no_proxy.split(","))


def _names_origin(item: str, host: str, port: int) -> bool:
    """Report whether an item of NO_PROXY, in lower case, matches an origin. Host names are not
    resolved.
    """
    if item == "*":
        return True
    if "/" in item:
        return _is_in_network(host, item)

    # NAME, NAME:PORT, [ADDRESS], [ADDRESS]:PORT, or an IPv6 address without brackets.
    name = item
    name_and_port = re.fullmatch(r"(\[.*\]|[^:\[]*):([^:]*)", item)
    if name_and_port:
        name, only_port = name_and_port.groups()
        if only_port not in ("", str(port)):
            return False
    name = name.strip("[]")
    if not name:
        return False

    address = _address(host)
    named_address = _address(name)
    if address or named_address:
        return address == named_address  # an address never matches a name
    if name.startswith((".", "*.")):  # sub-domains only
        return host.endswith(name.removeprefix("*"))
    return host == name or host.endswith(f".{name}")


def _is_in_network(host: str, network: str) -> bool:
    address = _address(host)
    try:
        return address is not None and address in ip_network(network, strict=False)
    except ValueError:
        return False


def _address(host: str) -> IPv4Address | IPv6Address | None:
    """Parse an IP address. An IPv4-mapped IPv6 address is returned as IPv4. Returns None if the
    host is a name.
    """
    try:
        address = ip_address(host)
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        return address.ipv4_mapped
    return address


def _parse(setting: _Setting) -> Proxy:
    """Parse a proxy's URL. Raises ConfigError if it is not valid. The error does not contain the
    URL, because it may have a login.
    """
    malformed = ConfigError(f"{setting.name} is not a proxy URL", hint="write http://HOST:PORT")
    value = setting.value
    try:
        # Go reads `proxy.example:3128` as http://proxy.example:3128.
        parts = urlsplit(value if "://" in value else f"http://{value}")
        port = parts.port
    except ValueError:
        raise malformed from None

    host = parts.hostname or ""
    # Undecodable bytes of the environment are not printable.
    if not value.isprintable() or not re.fullmatch(r"[\w.:-]+", host):
        raise malformed
    # An @ after the host belongs to a login whose password contains an unescaped slash.
    if "@" in value.replace(parts.netloc, ""):
        raise malformed

    if parts.scheme != "http":
        raise ConfigError(
            f"{setting.name}: proxy scheme {parts.scheme!r} is not supported",
            hint="write http://HOST:PORT; through it the connection to a registry is TLS all the same",
        )
    return Proxy(
        host=host,
        port=port or DEFAULT_PORTS["http"],
        setting=setting.name,
        username=parts.username and unquote(parts.username),
        password=parts.password and unquote(parts.password),
    )
