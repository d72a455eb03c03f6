"""Resolve the `Location` of an answer: a redirect, a listing's next page, an upload session.

Owns: the parsing of a `Location`, the locations that are refused.
May not know: requests, answers, credentials.
Invariants: R3 and R4 (a location is not less safe than the origin that names it); the text of a
signed URL is not changed.
Follows: docs/protocol-facts.md sections 1.7, 1.13 and 9.2 (R1, R3, R4).
"""

from __future__ import annotations

import re
from functools import lru_cache
from urllib.parse import unquote

from _regsync.addresses import DEFAULT_PORTS, Origin, is_private
from _regsync.errors import ProtocolBroken
from _regsync.text import keep_passing_secret, printable

# Matches each value in a URL's query, because any value may be the URL's signature. Values shorter
# than 8 characters would mask unrelated text. Values longer than 2048 exceed the length of a
# printed line.
_QUERY_VALUES = "=([^&]{8,2048})"

_LINE_BREAKS = re.compile("[\t\r\n]")

# An http or https URL without its fragment.
_ABSOLUTE_URL = re.compile(r"(?P<origin>https?://[^/?#]*)(?P<target>[^#]*)", re.IGNORECASE)


def resolve_location(base: Origin, path: str, location: str) -> tuple[Origin, str]:
    """Resolve the `Location` of the answer to a request for `path` at `base`. It may be an absolute
    URL or a relative reference.

    Returns the origin, and the path with the query. Raises ProtocolBroken if the location is not a
    valid http or https URL without a login.
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


def mask_signature(path: str) -> None:
    """Mask the values in the query of a URL that a registry has named, because one may sign it."""
    values = re.findall(_QUERY_VALUES, path)
    keep_passing_secret(*values, *map(unquote, values))


def check_foreign(base: Origin, origin: Origin) -> None:
    """Raise ProtocolBroken if an origin is less safe than the `base` that names it (R3, R4)."""
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
