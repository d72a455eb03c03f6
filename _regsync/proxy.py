"""Which proxy, if any, a request goes through.

Owns: the proxy variables, the NO_PROXY grammar, the list of addresses that never see a proxy. May not
know: sockets, CONNECT, the process environment (it is an argument). Invariant: neither the text of a
`Proxy` nor an error ever shows user name or password. Follows protocol-facts.md section 8.1: Go's
`httpproxy` rules, because container clients on the same host read the same variables; lower case is
read before upper case and an empty variable counts as unset, as curl and Python have it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import unquote, urlsplit

from _regsync.errors import ConfigError

__all__ = ["Proxy", "proxy_for"]

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# Metadata services hand out credentials of this machine and live on it or beside it; a proxy that sees
# their answers could use them (protocol-facts.md sections 8.1 and 9.2, R20).
_ALWAYS_DIRECT = frozenset(
    {
        "localhost",
        "metadata.google.internal",
        "169.254.169.254",
        "169.254.170.2",
        "169.254.170.23",
        "fd00:ec2::23",
        "fd00:ec2::254",
    }
)
_DEFAULT_PORTS = MappingProxyType({"http": 80, "https": 443})


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy to send CONNECT to; user name and password are percent-decoded already."""

    scheme: str
    host: str
    port: int
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def proxy_for(
    scheme: str, host: str, port: int, environ: Mapping[str, str], override: str | None = None
) -> tuple[Proxy | None, str]:
    """Return the proxy for an origin (None: go direct), and what decided that, for the debug log.

    `override` is the registry's own `proxy` field: said for this one host, it beats every variable and
    the always-direct list. Raise ConfigError for a value that cannot be used.
    """
    if override:
        return _parse(override, "proxy in the configuration"), "proxy in the configuration"
    host = host.lower()
    address = _address(host)
    if (address is not None and address.is_loopback) or (str(address) if address else host) in _ALWAYS_DIRECT:
        return None, "never through a proxy: loopback or metadata address"
    name, value = _variable(environ, f"{scheme}_proxy")
    if not value:
        return None, f"{name} is not set"
    exempting_name, exempting = _variable(environ, "no_proxy")
    for item in exempting.split(","):
        if _exempts(item.strip().lower(), host, port, address):
            return None, f"{exempting_name} names {item.strip()}"
    return _parse(value, name), name


def _variable(environ: Mapping[str, str], lower: str) -> tuple[str, str]:
    """Return the spelling that is set, and its value; ("http_proxy", "") when neither is."""
    for name in (lower, lower.upper()):
        value = environ.get(name, "").strip()
        # In a CGI program the client's "Proxy:" header arrives as HTTP_PROXY (CVE-2016-1000110).
        if value and not (name == "HTTP_PROXY" and "REQUEST_METHOD" in environ):
            return name, value
    return lower, ""


def _address(host: str) -> Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _exempts(item: str, host: str, port: int, address: Address | None) -> bool:
    """Say whether one NO_PROXY item (trimmed, lower case) names this origin. No name is ever resolved."""
    if item == "*":
        return True
    if "/" in item:
        try:
            network = ipaddress.ip_network(item, strict=False)
        except ValueError:
            return False
        return address is not None and address in network
    name, wanted_port = _split_port(item)
    if not name or (wanted_port and wanted_port != str(port)):
        return False
    literal = _address(name)
    if literal is not None:
        return literal == address
    if address is not None:
        return False
    if name.startswith("*."):
        name = name[1:]
    return host.endswith(name) if name.startswith(".") else host == name or host.endswith(f".{name}")


def _split_port(item: str) -> tuple[str, str]:
    if item.startswith("["):
        name, _, rest = item[1:].partition("]")
        return name, rest.removeprefix(":")
    if item.count(":") == 1:
        name, _, port = item.partition(":")
        return name, port
    return item, ""


def _parse(value: str, where: str) -> Proxy:
    # Go reads `proxy.example:3128` as http://proxy.example:3128.
    try:
        parts = urlsplit(value if "://" in value else f"http://{value}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or not host.isprintable() or any(mark in host for mark in ' "<>\\^`{|}%'):
        raise ConfigError(f"{where}: not a proxy URL", hint="write http://HOST:PORT or https://HOST:PORT")
    if parts.scheme not in _DEFAULT_PORTS:
        raise ConfigError(
            f"{where}: proxy scheme {parts.scheme!r} is not supported",
            hint="use an http:// or https:// proxy",
        )
    return Proxy(
        parts.scheme,
        host,
        port or _DEFAULT_PORTS[parts.scheme],
        None if parts.username is None else unquote(parts.username),
        None if parts.password is None else unquote(parts.password),
    )
