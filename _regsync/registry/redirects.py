"""Where a `Location` leads: to a redirect's end, a listing's next page, an upload session.

Owns: the reading of a `Location`, and which places are refused.
May not know: requests, answers, credentials.
Invariants: R3 and R4 (no place is less safe than the one that names it); a signed URL stays byte
for byte what it was.
Follows: docs/protocol-facts.md sections 1.7, 1.13 and 9.2 (R1, R3, R4).
"""

from __future__ import annotations

import re

from _regsync.addresses import Origin, is_private
from _regsync.errors import ProtocolBroken
from _regsync.text import printable


def resolve_location(base: Origin, path: str, location: str) -> tuple[Origin, str]:
    """Return the origin and the path of a `Location` that was answered to `path` at `base`;
    ProtocolBroken if it is unusable.
    """
    from urllib.parse import urljoin, urlsplit

    # Joining would lose an empty parameter of an absolute URL's path: signatures cover it.
    is_absolute = re.match("https?://", location, re.IGNORECASE)
    try:
        parts = urlsplit(location if is_absolute else urljoin(f"{base}{path}", location))
        port = parts.port
        host = (parts.hostname or "").lower()
    except ValueError as error:
        raise ProtocolBroken("the Location of the answer is not a URL") from error
    if parts.scheme not in ("http", "https") or not host or parts.username is not None:
        raise ProtocolBroken("the Location of the answer is not an http or https URL")

    # A registry behind a TLS proxy may not know its own scheme (I6).
    schemes = (base.scheme, parts.scheme)
    if schemes == ("https", "http") and host == base.host and port in (None, base.port):
        origin = base
    else:
        usual_port = 443 if parts.scheme == "https" else 80
        origin = Origin(parts.scheme, host, port or usual_port, base.via)

    target = parts.path or "/"
    if parts.query:
        target += f"?{parts.query}"
    if re.search("[^!-~]", host + target):
        raise ProtocolBroken("the Location of the answer holds characters that no URL may have")
    return origin, target


def check_foreign(base: Origin, origin: Origin) -> None:
    """Refuse another origin that is less safe than the one that names it (R3, R4)."""
    if origin == base:
        return
    if base.scheme == "https" and origin.scheme != "https":
        raise ProtocolBroken(
            f"the registry redirects from https to http ({printable(origin.host, 100)}): not followed"
        )
    if is_private(origin.host) and not is_private(base.host):
        raise ProtocolBroken(
            "the registry redirects to a private address"
            f" ({printable(origin.host, 100)}): not followed"
        )
