"""Origins (scheme, host and port), and tests for loopback and private hosts.

Owns: default ports, the text form of host and port, the definitions of loopback and private.
May not know: name resolution.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any, NamedTuple

DEFAULT_PORTS: Mapping[str, int] = {"https": 443, "http": 80}

# RFC 6052 section 2.1: the IPv4 address is in the last 32 bits.
_NAT64 = IPv6Network("64:ff9b::/96")

# Matches unusual IPv4 addresses such as `127.1`, `2130706433` and `0x7f.1`. The last label of a
# host name is never a number.
_NUMBER_LAST = r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)"
_LOCAL_NAMES = r"(?:.*\.)?localhost|metadata\.google\.internal"


class Origin(NamedTuple):
    """A scheme, host and port. Credentials are bound to an origin (R1)."""

    scheme: str
    host: str  # lower case, without brackets
    port: int
    # The Registry of `config` with the settings of the connection: trust, client certificate,
    # proxy. Its type is Any because this module may not import `config`.
    via: Any = None

    @property
    def address(self) -> tuple[str, str, int]:
        """Scheme, host and port, without `via`. They are equal for all registries at one server."""
        return self[:3]

    @property
    def authority(self) -> str:
        """The value of the Host header. See `format_authority`."""
        return format_authority(self.scheme, self.host, self.port)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


def format_authority(scheme: str, host: str, port: int) -> str:
    """Return `host`, or `host:port` if the port is not the scheme's default.

    An IPv6 address is put in brackets.
    """
    bracketed = f"[{host}]" if ":" in host else host
    # An empty scheme counts as http.
    default = DEFAULT_PORTS.get(scheme, DEFAULT_PORTS["http"])
    return bracketed if port == default else f"{bracketed}:{port}"


def is_loopback(host: str) -> bool:
    """Report whether a name, or an address without brackets, refers to this machine."""
    return host in ("localhost", "::1") or re.fullmatch(r"127(?:\.[0-9]{1,3}){3}", host) is not None


def is_private(host: str) -> bool:
    """Report whether a host is a local name, or an address that is not publicly reachable.

    A server on the internet must not be able to direct requests to such a host.
    """
    host = host.rstrip(".").lower()
    try:
        address = ip_address(host)
    except ValueError:
        is_local_name = re.fullmatch(_LOCAL_NAMES, host) is not None
        return is_local_name or is_unusual_address(host)

    if isinstance(address, IPv6Address):
        address = _embedded_ipv4(address) or address
    # Python's `is_global` is true for multicast addresses.
    return not address.is_global or address.is_multicast


def is_unusual_address(host: str) -> bool:
    """Report whether a host is an address such as `127.1`, which resolvers accept as 127.0.0.1.

    Returns False for addresses in the usual notation. The host must be in lower case.
    """
    try:
        ip_address(host)
    except ValueError:
        return re.fullmatch(_NUMBER_LAST, host) is not None
    return False


def _embedded_ipv4(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address in an IPv4-mapped, 6to4 or NAT64 address. Returns None otherwise."""
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour
