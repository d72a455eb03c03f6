"""Origins (scheme, host and port), loopback and private hosts, and where a registry may send us.

Owns: default ports, the text form of host and port, the definitions of loopback and private; how a
Location is resolved.
May not know: name resolution.
Invariant: where a registry sends us is no less safe than the registry itself (`check_foreign`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any, NamedTuple

from _regsync.errors import ProtocolBroken
from _regsync.text import printable

DEFAULT_PORTS: Mapping[str, int] = {"https": 443, "http": 80}

# RFC 6052 section 2.1: the IPv4 address is in the last 32 bits.
_NAT64 = IPv6Network("64:ff9b::/96")

# Matches unusual IPv4 addresses such as `127.1`, `2130706433` and `0x7f.1`. The last label of a
# host name is never a number.
_NUMBER_LAST = r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)"
_LOCAL_NAMES = r"(?:.*\.)?localhost|metadata\.google\.internal"

_LINE_BREAKS = re.compile("[\t\r\n]")

# An http or https URL without its fragment.
_ABSOLUTE_URL = re.compile(r"(?P<origin>https?://[^/?#]*)(?P<target>[^#]*)", re.IGNORECASE)


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


# Locations: of a redirect, of a listing's next page, of an upload session.


def resolve_location(base: Origin, path: str, location: str) -> tuple[Origin, str]:
    """Resolve the `Location` of the answer to a request for `path` at `base`. It may be an absolute
    URL or a relative reference.

    Returns the origin, and the path with the query, whose text is not changed: it may be signed.
    Raises ProtocolBroken if the location is not a valid http or https URL without a login.
    """
    # The URL of a login service may come from a variable that ends in a line break. urlsplit()
    # drops the same characters.
    location = _LINE_BREAKS.sub("", location).lstrip(" ")
    url = _ABSOLUTE_URL.match(location) or _ABSOLUTE_URL.match(_join(f"{base}{path}", location))
    if url is None:
        raise ProtocolBroken("the Location of the answer is not an http or https URL")
    target = url["target"].removesuffix("?")  # an empty query; an upload appends its own
    if not target.startswith("/"):
        target = "/" + target
    if re.search("[^!-~]", url[0]):
        raise ProtocolBroken("the Location of the answer holds characters that no URL may have")
    scheme, host, port = _split_origin(url["origin"])

    # A registry behind a TLS proxy may name its own host with http. Stay with https (I6).
    is_downgraded = base.scheme == "https" and scheme == "http"
    is_same_host = host == base.host and port in (None, base.port)
    if is_downgraded and is_same_host:
        return base, target
    return Origin(scheme, host, port or DEFAULT_PORTS[scheme], base.via), target


def _join(base: str, location: str) -> str:
    # `location` is a relative reference. urljoin() must not see an absolute URL, because it would
    # drop an empty parameter, which a signature may cover.
    from urllib.parse import urljoin

    try:
        return urljoin(base, location)
    except ValueError as error:
        raise ProtocolBroken("the Location of the answer is not a URL") from error


# Cached, because a registry names the same few origins for each upload.
@lru_cache(maxsize=64)
def _split_origin(origin: str) -> tuple[str, str, int | None]:
    """Split `scheme://host:port`. The port is None if it is not given.

    Raises ProtocolBroken if the host is missing, or if there is a login.
    """
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(origin)
        port = parts.port
        host = (parts.hostname or "").lower()
    except ValueError as error:
        raise ProtocolBroken("the Location of the answer is not a URL") from error
    if not host or parts.username is not None:
        raise ProtocolBroken("the Location of the answer is not an http or https URL")
    return parts.scheme, host, port


def check_foreign(base: Origin, origin: Origin) -> None:
    """Raise ProtocolBroken if an origin is less safe than the `base` that names it (R3, R4)."""
    if base.scheme == "https" and origin.scheme != "https":
        kind = "from https to http"
    elif is_private(origin.host) and not is_private(base.host):
        kind = "to a private address"
    else:
        return
    where = printable(origin.host, 100)
    raise ProtocolBroken(f"the registry redirects {kind} ({where}): not followed")
