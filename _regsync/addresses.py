"""Origins (scheme, host and port), and which hosts are this machine's own or private.

Owns: default ports, how host and port are written, what is loopback or private.
May not know: how a name is looked up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any, NamedTuple

DEFAULT_PORTS: Mapping[str, int] = {"https": 443, "http": 80}

# RFC 6052 section 2.1: the IPv4 address is in the last 32 bits.
_NAT64 = IPv6Network("64:ff9b::/96")

# `127.1`, `2130706433` and `0x7f.1` are IPv4 addresses: no name of a host ends in a number.
_NUMBER_LAST = r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)"
_LOCAL_NAMES = r"(?:.*\.)?localhost|metadata\.google\.internal"


class Origin(NamedTuple):
    """Scheme, host (lower case, no brackets) and port: what a credential is bound to (R1)."""

    scheme: str
    host: str
    port: int
    # The Registry of config.model, a room above this one, that says how it is reached: trust,
    # client certificate, proxy.
    via: Any = None

    @property
    def address(self) -> tuple[str, str, int]:
        """Scheme, host and port alone: the same under all registries that are reached there."""
        return self[:3]

    @property
    def authority(self) -> str:
        """The Host header: brackets for IPv6, no default port."""
        return format_authority(self.scheme, self.host, self.port)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


def format_authority(scheme: str, host: str, port: int) -> str:
    """Return `host` or `host:port`: brackets for IPv6, no port that is the scheme's own."""
    bracketed = f"[{host}]" if ":" in host else host
    # An empty scheme counts as http.
    default = DEFAULT_PORTS.get(scheme, DEFAULT_PORTS["http"])
    return bracketed if port == default else f"{bracketed}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether a name, or an address without brackets, is this machine's own."""
    return host in ("localhost", "::1") or re.fullmatch(r"127(?:\.[0-9]{1,3}){3}", host) is not None


def is_private(host: str) -> bool:
    """Return whether a host is, or names, an address that no stranger may send us to."""
    host = host.rstrip(".").lower()
    try:
        address = ip_address(host)
    except ValueError:
        is_local_name = re.fullmatch(_LOCAL_NAMES, host) is not None
        return is_local_name or is_address_in_disguise(host)

    if isinstance(address, IPv6Address):
        address = _ipv4_inside(address) or address
    # Python counts multicast addresses among the global ones.
    return not address.is_global or address.is_multicast


def is_address_in_disguise(host: str) -> bool:
    """Return whether a lower-case host is no address as people write it, but is one to the resolver,
    as `127.1`.
    """
    try:
        ip_address(host)
    except ValueError:
        return re.fullmatch(_NUMBER_LAST, host) is not None
    return False


def _ipv4_inside(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address inside a mapped one, of 6to4 or of NAT64; None for any other."""
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour
