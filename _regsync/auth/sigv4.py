"""Signing of requests to AWS services (Signature Version 4).

Owns: AWS keys, the signature.
May not know: the sources of keys, sockets.
Follows: docs/protocol-facts.md section 4.4.
"""

from __future__ import annotations

import time
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, urlsplit

from _regsync.auth.credentials import Pair
from _regsync.crypto import hash_hex, hmac_bytes


class Keys(NamedTuple):
    """An AWS access key with its secret."""

    access_key: str
    secret_key: str
    session_token: str = ""  # of temporary keys
    found_at: str = ""  # the source of the keys, for messages

    @property
    def secrets(self) -> tuple[str, str]:
        """The texts that must be masked in messages."""
        return self.secret_key, self.session_token

    def __repr__(self) -> str:
        return f"<Keys {self.found_at!r}>"


class Request(NamedTuple):
    """A request to an AWS service, or to the credential service of a container."""

    method: str
    url: str
    headers: list[Pair]
    body: bytes = b""
    # `ecr`, `sts`, ... Empty for a container's credential service, whose requests are not signed.
    service: str = ""
    region: str = ""

    @property
    def is_to_container_service(self) -> bool:
        return not self.service

    def __repr__(self) -> str:
        return "<Request>"  # headers and body may contain secrets


def sign(keys: Keys, request: Request, now: float) -> list[Pair]:
    """Sign a request. Return its headers with the date, the session token and the signature.

    `now` is the time in seconds since 1970.
    """
    date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    scope = f"{date[:8]}/{request.region}/{request.service}/aws4_request"
    headers = [*request.headers, ("X-Amz-Date", date)]
    if keys.session_token:
        headers.append(("X-Amz-Security-Token", keys.session_token))

    host = urlsplit(request.url).netloc
    # Lower-case names in order, and values without surplus blanks, as the service will hash them.
    signed_headers = sorted(
        (name.lower(), " ".join(value.split())) for name, value in [("host", host), *headers]
    )
    names = ";".join(name for name, _ in signed_headers)
    canonical = _canonical_request(request, signed_headers, names)
    canonical_hash = hash_hex("sha256", canonical.encode())
    string_to_sign = "\n".join(("AWS4-HMAC-SHA256", date, scope, canonical_hash))

    # The signing key is derived from the secret key, by one HMAC for each part of the scope.
    key = f"AWS4{keys.secret_key}".encode()
    for part in scope.split("/"):
        key = hmac_bytes(key, part.encode())
    signature = hmac_bytes(key, string_to_sign.encode()).hex()
    proof = f"Credential={keys.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
    return [*headers, ("Authorization", f"AWS4-HMAC-SHA256 {proof}")]


def _canonical_request(request: Request, signed_headers: list[Pair], names: str) -> str:
    """Return the canonical form of a request, which client and service hash.

    `names` are the names of the signed headers, joined by semicolons.
    """
    parts = urlsplit(request.url)
    # The parameters are sorted in their encoded form.
    query = sorted(
        (quote(name, "~"), quote(value, "~"))
        for name, value in parse_qsl(parts.query, keep_blank_values=True)
    )
    lines = (
        request.method,
        quote(parts.path, "/~") or "/",
        "&".join(f"{name}={value}" for name, value in query),
        *(f"{name}:{value}" for name, value in signed_headers),
        "",  # an empty line ends the headers
        names,
        hash_hex("sha256", request.body),
    )
    return "\n".join(lines)
