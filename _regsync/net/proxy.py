"""Which proxy, if any, a request goes through.

Owns: the proxy variables, the grammar of NO_PROXY, what never sees a proxy.
May not know: sockets, CONNECT, the environment of the process (it is an argument).
Invariants: no text of a `Proxy` and no error shows its user name or password.
Follows: docs/protocol-facts.md section 8.1: Go's `httpproxy` rules, as container clients have them;
lower case first, and empty is unset, as curl and Python have it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from _regsync.addresses import DEFAULT_PORTS, is_address_in_disguise
from _regsync.errors import ConfigError

# Metadata services hand out this machine's credentials, which no proxy is to see
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

# The end of `127.1`, `2130706433` and `0x7f.1`, which are addresses to the resolver. No name of a
# host ends so.


class Proxy(NamedTuple):
    """A proxy to send CONNECT to; user name and password are percent-decoded."""

    scheme: str
    host: str
    port: int
    username: str | None = None
    password: str | None = None

    def __repr__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


class _Setting(NamedTuple):
    """A value and what it is called to the user; "" when it is not set."""

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
) -> tuple[Proxy | None, str]:
    """Return the proxy of an origin, None for a direct connection, and what decided so.

    `override` is a registry's own proxy, used in place of the variables. It is used for exempt origins
    too, unless it `heeds_exemptions`. ConfigError when the value that is used is no proxy.
    """
    setting = _variable(environ, f"{scheme}_proxy")
    if override:
        setting = _Setting("proxy in the configuration", override)
    if not setting.value:
        return None, f"{setting.name} is not set"

    if heeds_exemptions or not override:
        exemption = _exemption(host.lower(), port, environ)
        if exemption is not None:
            return None, exemption
    return _parse(setting), setting.name


def _variable(environ: Mapping[str, str], lower: str) -> _Setting:
    """Return the first of a variable's two spellings that is set."""
    for name in (lower, lower.upper()):
        # In a CGI program the client's "Proxy:" header arrives as HTTP_PROXY (CVE-2016-1000110).
        if name == "HTTP_PROXY" and "REQUEST_METHOD" in environ:
            continue
        value = environ.get(name, "").strip()
        if value:
            return _Setting(name, value)
    return _Setting(lower, "")


def _exemption(host: str, port: int, environ: Mapping[str, str]) -> str | None:
    """Say what names an origin to be reached directly; None when nothing does."""
    never = "the list of what never sees a proxy names"
    without_dot = host.rstrip(".")
    if is_address_in_disguise(without_dot):
        return f"{never} {without_dot}"
    for item in _NEVER_PROXIED:
        if _names_origin(item, without_dot, port):
            return f"{never} {item}"

    no_proxy = _variable(environ, "no_proxy")
    for text in no_proxy.value.split(","):
        item = text.strip()
        if _names_origin(item.lower(), host, port):
            return f"{no_proxy.name} names {item}"
    return None


def _names_origin(item: str, host: str, port: int) -> bool:
    """Ask whether an item of NO_PROXY, in lower case, names an origin. No name is ever resolved."""
    if item == "*":
        return True
    if "/" in item:
        return _is_in_network(host, item)

    # NAME, NAME:PORT, [ADDRESS], [ADDRESS]:PORT, or an IPv6 address without brackets.
    name = item
    with_port = re.fullmatch(r"(\[.*\]|[^:\[]*):([^:]*)", item)
    if with_port:
        name, only_port = with_port.groups()
        if only_port not in ("", str(port)):
            return False
    name = name.strip("[]")
    if not name:
        return False

    address = _address(host)
    named_address = _address(name)
    if address or named_address:
        return address == named_address
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
    """Return an address that is written as one, a v4-mapped one as the IPv4 address it means."""
    try:
        address = ip_address(host)
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        return address.ipv4_mapped
    return address


def _parse(setting: _Setting) -> Proxy:
    """Read a proxy's URL; ConfigError, which does not show it, when it is none."""
    malformed = ConfigError(
        f"{setting.name} is not a proxy URL", hint="write http://HOST:PORT or https://HOST:PORT"
    )
    value = setting.value
    try:
        # Go reads `proxy.example:3128` as http://proxy.example:3128.
        parts = urlsplit(value if "://" in value else f"http://{value}")
        port = parts.port
    except ValueError:
        raise malformed from None

    host = parts.hostname or ""
    # Bytes that are no text are not printable.
    if not value.isprintable() or not re.fullmatch(r"[\w.:-]+", host):
        raise malformed
    # Behind the host an @ is that of a login whose password has a / that is not escaped.
    if "@" in value.replace(parts.netloc, ""):
        raise malformed

    if parts.scheme not in ("http", "https"):
        raise ConfigError(
            f"{setting.name}: proxy scheme {parts.scheme!r} is not supported",
            hint="use http:// or https://",
        )
    return Proxy(
        parts.scheme,
        host,
        port or DEFAULT_PORTS[parts.scheme],
        parts.username and unquote(parts.username),
        parts.password and unquote(parts.password),
    )
