"""What a registry's refusal says: challenges and error bodies.

Owns: the grammar of WWW-Authenticate, which realms may get credentials, the shapes of error bodies.
May not know: credentials, tokens, sockets.
Invariants: a realm that `check_realm` refuses gets no request, or a registry could have credentials
sent to a stranger (R2, R9).
Follows: docs/protocol-facts.md sections 1.12, 2.1 and 2.7.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from _regsync.addresses import is_loopback, is_private
from _regsync.errors import AuthError
from _regsync.text import json_object, printable


class Challenge(NamedTuple):
    """One way to log in that a 401 offers. `scheme` is lower case; missing parts are empty."""

    scheme: str
    realm: str = ""
    service: str = ""
    scope: str = ""
    error: str = ""


# A word, and its value where `=` follows: quoted (the closing quote may be missing) or bare.
_WORD = re.compile(
    r"""(?sx)
    (?P<name> [!#$%&'*+.^_`|~0-9A-Za-z-]+ )
    (?: [ \t]* = [ \t]* (?: "(?P<quoted> (?:[^"\\]|\\.)* )"? | (?P<bare> [^\s,"]* ) ) )?
    """
)


def parse_challenges(values: Iterable[str]) -> list[Challenge]:
    """Return the challenges in WWW-Authenticate headers, in any form seen in the wild
    (docs/protocol-facts.md section 2.1).

    A word without `=` begins a challenge. Words with `=` are parameters of the challenge before
    them.
    """
    challenges: list[dict[str, str]] = []
    for value in values:
        parameters: dict[str, str] = {}  # parameters before the first challenge are dropped
        for word in _WORD.finditer(value):
            name = word["name"].lower()
            if word["quoted"] is not None:
                unescaped = re.sub(r"(?s)\\(.)", r"\1", word["quoted"])
                parameters.setdefault(name, unescaped)
            elif word["bare"] is not None:
                parameters.setdefault(name, word["bare"])
            else:
                parameters = {"scheme": name}
                challenges.append(parameters)
    return [
        Challenge(*(parameters.get(field, "") for field in Challenge._fields))
        for parameters in challenges
    ]


# Domains below which strangers have names (docs/protocol-facts.md section 2.7), and ends of
# addresses. A few common ones are enough, the public suffix list is not needed: the registry that
# names the realm could take the credentials itself.
_SHARED = r"""(?x)(?:.*\.)?(?:
    amazonaws\.(?:com(?:\.cn)?|eu) | on\.aws | awsapprunner\.com | cloudfront\.net | azurecr\.(?:io|cn|us) | azure\.com
    | azurewebsites\.net | windows\.net | cloudapp\.net | (?:pkg|pages|workers|r2|fly)\.dev | googleapis\.com
    | github\.(?:io|dev) | (?:gcr|gitlab|ngrok|ocir|jfrog|nip|sslip)\.io | appspot\.com | digitaloceanspaces\.com
    | (?:run|web|vercel|netlify|ngrok|ngrok-free|railway|ondigitalocean)\.app | herokuapp\.com | onrender\.com
    | aliyuncs\.com | myqcloud\.com | oraclecloud\.com | scw\.cloud | duckdns\.org | dyndns\.org | ts\.net
    ) |  (?:ac|co|com|edu|go|gob|gov|ltd|me|mil|ne|net|nhs|nom|or|org|plc|sch)\.[a-z]{2} | [0-9.]+"""


class _Objection(NamedTuple):
    """Why a realm is not asked."""

    text: str  # the end of a sentence
    hint: str | None = None


def check_realm(realm: str, scheme: str, registry: str, has_credentials: bool) -> None:
    """Raise AuthError unless a registry may send us to the URL `realm` for a token
    (docs/protocol-facts.md section 2.7).

    `registry` is the registry's host, `scheme` is that of its own URL. `has_credentials`: they would
    go to the realm.
    """
    objection = _objection_to(realm, scheme, registry, has_credentials)
    if objection is not None:
        # What is before an `@` or behind a `?` may be a secret.
        without_query = realm.partition("?")[0]
        without_userinfo = without_query.rpartition("@")[2]
        place = printable(without_userinfo, 100)
        message = f"{registry} asks for a login at {place!r}, {objection.text}"
        raise AuthError(message, hint=objection.hint)


def _objection_to(
    realm: str, scheme: str, registry: str, has_credentials: bool
) -> _Objection | None:
    """Return why a realm must not be asked, None where it may be. The arguments are those of
    `check_realm`.
    """
    url = _split_url(realm)
    if url is None:
        return _Objection("which is not a URL")
    if "@" in url.netloc or "#" in realm:
        return _Objection("which holds user info or a fragment: refused")
    if url.scheme not in ("https", scheme):
        hint = "ask the registry's operator to correct its realm"
        return _Objection("which is not https", hint)

    host = (url.hostname or "").rstrip(".")
    # The ports of one machine are one owner's, whichever of its names is used.
    is_same_machine = is_loopback(host) and is_loopback(registry)
    if host == registry or is_same_machine:
        return None
    if is_private(host):
        return _Objection("which is a private address: refused")
    if has_credentials and not _has_same_owner(host, registry):
        return _Objection(
            "which may have another owner: the credentials are not sent",
            "use auth_type: anonymous if the images are public",
        )
    return None


def _split_url(text: str) -> SplitResult | None:
    """Return the parts of a URL with a host; None for a text that is none."""
    if not text.isascii() or not text.isprintable() or " " in text:
        return None
    try:
        url = urlsplit(text)
        _ = url.port  # ValueError for a port that is no number
    except ValueError:
        return None
    has_host = bool((url.hostname or "").rstrip("."))
    return url if has_host else None


def _has_same_owner(host: str, registry: str) -> bool:
    """Return whether a host's name says that it belongs to the registry's owner: it is below the
    registry's own name, or below the parent domain unless strangers have names there too.
    """
    domains = [registry]
    parent = registry.partition(".")[2]
    if not re.fullmatch(_SHARED, parent):
        domains.append(parent)
    # Below a name without a dot, such as `com` or a host of the local network, anybody may be.
    return any("." in domain and f".{host}".endswith(f".{domain}") for domain in domains)


class _ErrorEntry(NamedTuple):
    """One error of a body. A part that is missing, or is no text, is empty."""

    code: str = ""
    message: str = ""


def parse_error_body(body: bytes) -> tuple[tuple[str, ...], str]:
    """Return the error codes and the message of an error body, in any shape of
    docs/protocol-facts.md section 1.12. Both are empty for an HTML page.

    The message is the server's own text, of any length. Secrets are to be redacted before it is
    cut.
    """
    document = json_object(body)
    if document is None:
        is_page = b"<" in body[:2000]
        return (), "" if is_page else body.decode("utf-8", "replace")

    entries = _error_entries(document.get("errors"))
    if not entries:
        # Token services, proxies and some registries give one message, under one of these names.
        names = ("message", "error_description", "details", "error")
        texts = [_as_text(document.get(name)) for name in names]
        entries = [_ErrorEntry(message=next(filter(None, texts), ""))]
    codes = tuple(entry.code for entry in entries if entry.code)
    sentences = [" ".join(filter(None, entry)) for entry in entries]
    unique = dict.fromkeys(filter(None, sentences))  # some repeat one error for each blob
    return codes, "; ".join(unique)


def _error_entries(errors: object) -> list[_ErrorEntry]:
    if not isinstance(errors, list):
        return []
    return [
        _ErrorEntry(_as_text(error.get("code")), _as_text(error.get("message")))
        for error in errors
        if isinstance(error, dict)
    ]


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else ""
