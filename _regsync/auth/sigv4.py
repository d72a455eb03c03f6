"""Requests to AWS's services, signed by Signature Version 4.

Owns: the signature. AWS's keys are a Credential here: the access key is its user name, the secret
key its password, the session token its identity token.
May not know: where keys come from, sockets.
Follows: docs/protocol-facts.md section 4.4.
"""

from __future__ import annotations

import time
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, urlsplit

from _regsync.auth.credentials import Credential, Pair
from _regsync.crypto import hash_hex, hmac_bytes


class Request(NamedTuple):
    """A request to a service of AWS. `service` is empty for the credential service of a container,
    whose requests are not signed.
    """

    method: str
    url: str
    headers: list[Pair]
    body: bytes = b""
    service: str = ""
    region: str = ""

    def __repr__(self) -> str:
        return "<Request>"  # it holds secrets


def sign(keys: Credential, request: Request, now: float) -> list[Pair]:
    """Return a request's headers, with date, session token and the signature over all of them.

    `now`: seconds since 1970.
    """
    date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    scope = f"{date[:8]}/{request.region}/{request.service}/aws4_request"
    headers = [*request.headers, ("X-Amz-Date", date)]
    if keys.identity_token:
        headers.append(("X-Amz-Security-Token", keys.identity_token))

    host = urlsplit(request.url).netloc
    signed_headers = sorted(
        (name.lower(), " ".join(value.split())) for name, value in [("host", host), *headers]
    )
    names = ";".join(name for name, _ in signed_headers)
    canonical = _canonical_request(request, signed_headers, names)
    canonical_hash = hash_hex("sha256", canonical.encode())
    string_to_sign = "\n".join(("AWS4-HMAC-SHA256", date, scope, canonical_hash))

    # Each part of the scope makes a narrower key of the key before it.
    key = f"AWS4{keys.password}".encode()
    for part in scope.split("/"):
        key = hmac_bytes(key, part.encode())
    signature = hmac_bytes(key, string_to_sign.encode()).hex()
    proof = f"Credential={keys.username}/{scope}, SignedHeaders={names}, Signature={signature}"
    return [*headers, ("Authorization", f"AWS4-HMAC-SHA256 {proof}")]


def _canonical_request(request: Request, signed_headers: list[Pair], names: str) -> str:
    """Return a request in the one form in which client and service hash it. `names` are those of the
    signed headers.
    """
    parts = urlsplit(request.url)
    query = sorted(
        (quote(name, "~"), quote(value, "~"))
        for name, value in parse_qsl(parts.query, keep_blank_values=True)
    )
    lines = (
        request.method,
        quote(parts.path, "/~") or "/",
        "&".join(f"{name}={value}" for name, value in query),
        *(f"{name}:{value}" for name, value in signed_headers),
        "",
        names,
        hash_hex("sha256", request.body),
    )
    return "\n".join(lines)
