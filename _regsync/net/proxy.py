"""Which proxy, if any, a request goes through. Owns: the proxy variables, the NO_PROXY grammar. May
not know: sockets, CONNECT, the process environment (an argument). Invariant: no text of a `Proxy`
and no error shows user name or password. Follows docs/protocol-facts.md section 8.1: Go's
`httpproxy` rules, as container clients have them; lower case first, and empty is unset, as curl and
Python have it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from _regsync.errors import ConfigError

# Metadata services hand out this machine's credentials: no proxy is to see them
# (docs/protocol-facts.md 8.1 and 9.2, R20).
_ALWAYS_DIRECT = (
    "localhost,127.0.0.0/8,::1,169.254.0.0/16,fe80::/10,fd00:ec2::/32,metadata.google.internal"
)


class Proxy(NamedTuple):
    """A proxy to send CONNECT to; user name and password are percent-decoded already."""

    scheme: str
    host: str
    port: int
    username: str | None = None
    password: str | None = None

    def __repr__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def proxy_for(
    scheme: str,
    host: str,
    port: int,
    environ: Mapping[str, str],
    override: str | None = None,
    *,
    listed: bool = False,
) -> tuple[Proxy | None, str]:
    """Return an origin's proxy (None: none), and what decided; ConfigError if unusable. `override`
    beats the variables, and all lists too unless `listed`."""
    name, value = (
        ("proxy in the configuration", override)
        if override
        else _variable(environ, f"{scheme}_proxy")
    )
    if not value:
        return None, f"{name} is not set"
    host, bare = host.lower(), host.lower().rstrip(".")
    # `127.1` and `2130706433` are addresses to the resolver; no name ends so.
    hidden = _address(bare) is None and re.fullmatch(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)", bare)
    never = ("the list of what never sees a proxy", bare if hidden else _ALWAYS_DIRECT, bare)
    for origin, items, asked in (
        (never, (*_variable(environ, "no_proxy"), host)) if listed or not override else ()
    ):
        for item in map(str.strip, items.split(",")):
            if _exempts(item.lower(), asked, port):
                return None, f"{origin} names {item}"
    return _parse(value, name), name


def _variable(environ: Mapping[str, str], lower: str) -> tuple[str, str]:
    for name in (lower, lower.upper()):
        value = environ.get(name, "").strip()
        # In a CGI program the client's "Proxy:" header arrives as HTTP_PROXY (CVE-2016-1000110).
        if value and not (name == "HTTP_PROXY" and "REQUEST_METHOD" in environ):
            return name, value
    return lower, ""


def _address(host: str) -> Any:
    """Return an IP address, a v4-mapped one as what it stands for; None for a name."""
    from ipaddress import ip_address

    try:
        address = ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _exempts(item: str, host: str, port: int) -> bool:
    """Say whether one NO_PROXY item (trimmed, lower case) names this origin. No name is ever
    resolved.
    """
    from ipaddress import ip_network

    if item == "*":
        return True
    address = _address(host)
    if "/" in item:
        try:
            return address is not None and address in ip_network(item, strict=False)
        except ValueError:
            return False
    with_port = re.fullmatch(r"(\[.*\]|[^:\[]*):([^:]*)", item)
    name, wanted = with_port.groups() if with_port else (item, "")
    name = name.strip("[]")
    if not name or wanted not in ("", str(port)):
        return False
    if (literal := _address(name)) or address:
        return bool(literal == address)
    below = name.startswith((".", "*."))
    return host.endswith(name.removeprefix("*")) if below else f".{host}".endswith(f".{name}")


def _parse(value: str, where: str) -> Proxy:
    from urllib.parse import unquote, urlsplit

    try:
        # Go reads `proxy.example:3128` as http://proxy.example:3128.
        parts = urlsplit(value if "://" in value else f"http://{value}")
        host = parts.hostname or ""
        port = parts.port
    except ValueError:
        host = ""
    # Bytes that are no text are not printable; behind the host an @ is a password's, whose / was
    # not escaped.
    if not (value.isprintable() and re.fullmatch(r"[\w.:-]+", host)) or "@" in value.replace(
        parts.netloc, ""
    ):
        raise ConfigError(
            f"{where}: not a proxy URL", hint="write http://HOST:PORT or https://HOST:PORT"
        )
    if parts.scheme not in ("http", "https"):
        raise ConfigError(
            f"{where}: proxy scheme {parts.scheme!r} is not supported",
            hint="use http:// or https://",
        )
    user, password = (text and unquote(text) for text in (parts.username, parts.password))
    return Proxy(
        parts.scheme, host, port or (443 if parts.scheme == "https" else 80), user, password
    )
