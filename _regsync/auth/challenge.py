"""."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from _regsync.addresses import is_loopback, is_private
from _regsync.errors import AuthError
from _regsync.text import clean, json_object


class Challenge(NamedTuple):
    """One way in that a 401 offers; `scheme` is lower case, what is missing is empty."""

    scheme: str
    realm: str = ""
    service: str = ""
    scope: str = ""
    error: str = ""


# A word, and its value when `=` follows: quoted (the closing quote may be missing) or bare.
_WORD = (
    r"""(?s)([!#$%&'*+.^_`|~0-9A-Za-z-]+)(?:[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"?|([^\s,"]*)))?"""
)


def parse_challenges(values: Iterable[str]) -> list[Challenge]:
    """Read WWW-Authenticate lines as seen in the wild (docs/protocol-facts.md 2.1): a word without
    `=` opens a challenge.
    """
    found: list[dict[str, str]] = []
    for value in values:
        inside: dict[str, str] = {}
        for word in re.finditer(_WORD, value):
            name = word.group(1).lower()
            quoted = word.group(2)
            bare = word.group(3)
            if quoted is None and bare is None:
                found.append(inside := {"scheme": name})
            else:
                inside.setdefault(
                    name, bare if quoted is None else re.sub(r"(?s)\\(.)", r"\1", quoted)
                )
    return [Challenge(*(given.get(name, "") for name in Challenge._fields)) for given in found]


# Parents below which strangers have names (docs/protocol-facts.md section 2.7), and ends of
# addresses. Not the public suffix list; what it protects is already at the mercy of the registry
# that names the realm.
_SHARED = r"""(?x)(?:.*\.)?(?:
    amazonaws\.(?:com(?:\.cn)?|eu) | on\.aws | awsapprunner\.com | cloudfront\.net | azurecr\.(?:io|cn|us) | azure\.com
    | azurewebsites\.net | windows\.net | cloudapp\.net | (?:pkg|pages|workers|r2|fly)\.dev | googleapis\.com
    | github\.(?:io|dev) | (?:gcr|gitlab|ngrok|ocir|jfrog|nip|sslip)\.io | appspot\.com | digitaloceanspaces\.com
    | (?:run|web|vercel|netlify|ngrok|ngrok-free|railway|ondigitalocean)\.app | herokuapp\.com | onrender\.com
    | aliyuncs\.com | myqcloud\.com | oraclecloud\.com | scw\.cloud | duckdns\.org | dyndns\.org | ts\.net
    ) |  (?:ac|co|com|edu|go|gob|gov|ltd|me|mil|ne|net|nhs|nom|or|org|plc|sch)\.[a-z]{2} | [0-9.]+"""


def check_realm(realm: str, scheme: str, registry: str, has_credentials: bool) -> None:
    """Raise AuthError unless the host `registry` may send us to `realm` (docs/protocol-facts.md
    section 2.7).
    """
    hint = None
    parent = registry.partition(".")[2]
    # A realm of the same owner is below the registry's own name, or below that name's unshared
    # parent.
    kin = [registry] if re.fullmatch(_SHARED, parent) else [registry, parent]
    try:
        parts = urlsplit(realm)
        host = (parts.hostname or "").rstrip(".")
        _ = parts.port
    except ValueError:
        host = ""
    if not host or not realm.isascii() or not realm.isprintable() or " " in realm:
        trouble = "which is not a URL"
    elif "@" in parts.netloc or "#" in realm:
        trouble = "with user info or a fragment, refused"
    elif parts.scheme not in ("https", scheme):
        trouble = "which is not https"
        hint = "the registry's operator has to correct its realm"
    elif host == registry or (is_loopback(host) and is_loopback(registry)):
        return  # one machine with several ports, as in a test set-up, has several names for itself
    elif is_private(host):
        trouble = "a private address, refused"
    elif has_credentials and not any(
        "." in name and f".{host}".endswith(f".{name}") for name in kin
    ):
        trouble = "a host that may have another owner: the credentials are not sent"
        hint = "use auth_type: anonymous if the images are public"
    else:
        return
    shown = clean(realm.partition("?")[0].rpartition("@")[2], 100)
    raise AuthError(f"{registry} asks for a login at {shown!r}, {trouble}", hint=hint)


def words(body: bytes) -> tuple[tuple[str, ...], str]:
    """Return an error's codes and words, in any shape of docs/protocol-facts.md section 1.12; a
    page for people has none.
    """
    if (document := json_object(body)) is None:
        return (), "" if b"<" in body[:2000] else clean(body.decode("utf-8", "replace"), 2000)
    entries = document.get("errors")
    shapes = ("message", "error_description", "details", "error")
    told = (
        [(each.get("code"), each.get("message")) for each in entries if isinstance(each, dict)]
        if isinstance(entries, list)
        else []
    )
    told = told or [
        (
            None,
            next(
                (each for each in map(document.get, shapes) if isinstance(each, str) and each), None
            ),
        )
    ]
    said = (" ".join(text for text in pair if isinstance(text, str) and text) for pair in told)
    return tuple(code for code, _ in told if isinstance(code, str)), "; ".join(
        dict.fromkeys(filter(None, said))
    )
