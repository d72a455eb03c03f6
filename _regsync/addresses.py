"""."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Origin(NamedTuple):
    """Scheme, host (lower case, no brackets) and port: what a credential is bound to (R1)."""

    scheme: str
    host: str
    port: int
    via: Any = None  # by whose configuration it is reached: trust, client certificate, proxy

    @property
    def authority(self) -> str:
        """The Host header: brackets for IPv6, no default port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (
            host if self.port == (443 if self.scheme == "https" else 80) else f"{host}:{self.port}"
        )

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


DEFAULT_PORTS: Mapping[str, int] = {"https": 443, "http": 80}


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or re.fullmatch(r"127(?:\.[0-9]{1,3}){3}", host) is not None


def is_private(host: str) -> bool:
    """Say whether a host is an address, or a name for one, that a stranger must not send us to."""
    from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

    host = host.rstrip(".").lower()
    try:
        address = ip_address(host)
    except ValueError:
        # `127.1`, `2130706433` and `0x7f.1` are addresses to the resolver, whatever they name.
        return bool(
            re.fullmatch(
                r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*|localhost)|metadata\.google\.internal", host
            )
        )
    if isinstance(address, IPv6Address):
        # The IPv4 address inside: mapped, 6to4, or behind a NAT64 gateway (RFC 6052 section 2.1).
        nat64 = (
            IPv4Address(int(address) & 0xFFFFFFFF)
            if address in IPv6Network("64:ff9b::/96")
            else None
        )
        address = address.ipv4_mapped or address.sixtofour or nat64 or address
    return not address.is_global or address.is_multicast
