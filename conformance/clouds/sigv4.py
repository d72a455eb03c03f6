"""The server's side of SigV4: parse a signature and compute the right one.

Owns: the Authorization header, the canonical request, the signature.
May not know: the keys of users, any service.
Follows: docs/protocol-facts.md section 4.4.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import quote

from ..messages import Request

__all__ = ["Claim", "canonical_request", "read_claim", "signature_of"]

_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/, ]+)/([0-9]{8})/([a-z0-9-]+)/([a-z-]+)/aws4_request, "
    r"SignedHeaders=([a-z0-9;-]+), Signature=([0-9a-f]{64})\Z"
)


class Claim(NamedTuple):
    """The fields of a SigV4 Authorization header."""

    access: str  # the access key
    day: str  # YYYYMMDD
    region: str
    service: str
    names: str  # the signed headers, separated by semicolons
    signature: str


def read_claim(header: str) -> Claim | None:
    """Parse an Authorization header. Returns None if it is not valid for SigV4."""
    match = _AUTHORIZATION.match(header)
    return None if match is None else Claim(*match.groups())


def canonical_request(request: Request, body: bytes, signed: Sequence[str]) -> str:
    """Return the canonical request. `signed` has the names of the signed headers."""
    query = sorted((quote(name, safe="~"), quote(value, safe="~")) for name, value in request.query)
    parts = [
        request.method,
        request.path,
        "&".join("=".join(pair) for pair in query),
        *(f"{name}:{' '.join(request.header(name).split())}" for name in signed),
        "",
        ";".join(signed),
        hashlib.sha256(body).hexdigest(),
    ]
    return "\n".join(parts)


def signature_of(secret: str, claim: Claim, date: str, canonical: str) -> str:
    """Return the right signature for a canonical request."""
    steps = (claim.day, claim.region, claim.service, "aws4_request")
    hashed = hashlib.sha256(canonical.encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{date}\n{'/'.join(steps)}\n{hashed}"
    key = b"AWS4" + secret.encode()
    for step in steps:
        key = hmac.new(key, step.encode(), "sha256").digest()
    return hmac.new(key, text.encode(), "sha256").hexdigest()
