"""Parsing of the challenges and error bodies that registries send.

Owns: the grammar of WWW-Authenticate, the rules for realms, the formats of error bodies.
May not know: credentials, tokens, sockets.
Invariants: no request is sent to a realm that `check_realm` refuses. Otherwise a registry could
have credentials sent to another party (R2, R9).
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
    """One challenge of a WWW-Authenticate header. A missing parameter is empty."""

    scheme: str  # lower case: `bearer`, `basic`, ...
    realm: str = ""  # of a bearer challenge: the URL of the token service
    service: str = ""
    scope: str = ""
    error: str = ""  # `invalid_token` or `insufficient_scope`


# A word with its value if `=` follows. The value is quoted (the closing quote may be missing) or
# bare.
_WORD = re.compile(
    r"""(?sx)
    (?P<name> [!#$%&'*+.^_`|~0-9A-Za-z-]+ )
    (?: [ \t]* = [ \t]* (?: "(?P<quoted> (?:[^"\\]|\\.)* )"? | (?P<bare> [^\s,"]* ) ) )?
    """
)


def parse_challenges(values: Iterable[str]) -> list[Challenge]:
    """Parse the values of WWW-Authenticate headers, leniently (docs/protocol-facts.md section 2.1).

    A word without `=` is the scheme of a new challenge. A word with `=` is a parameter of the last
    challenge. If a parameter occurs twice, the first value is used.
    """
    challenges: list[dict[str, str]] = []  # the fields of each challenge
    for value in values:
        # The fields of the last challenge. Parameters before the first scheme are ignored.
        parameters: dict[str, str] = {}
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


# Domains under which different parties can register names, and the end of an IPv4 address
# (docs/protocol-facts.md section 2.7). A few common domains are enough. The full public suffix list
# is not needed, because a hostile registry could collect the credentials itself.
_SHARED_DOMAINS = r"""(?x)(?:.*\.)?(?:
    amazonaws\.(?:com(?:\.cn)?|eu) | on\.aws | awsapprunner\.com | cloudfront\.net | azurecr\.(?:io|cn|us) | azure\.com
    | azurewebsites\.net | windows\.net | cloudapp\.net | (?:pkg|pages|workers|r2|fly)\.dev | googleapis\.com
    | github\.(?:io|dev) | (?:gcr|gitlab|ngrok|ocir|jfrog|nip|sslip)\.io | appspot\.com | digitaloceanspaces\.com
    | (?:run|web|vercel|netlify|ngrok|ngrok-free|railway|ondigitalocean)\.app | herokuapp\.com | onrender\.com
    | aliyuncs\.com | myqcloud\.com | oraclecloud\.com | scw\.cloud | duckdns\.org | dyndns\.org | ts\.net
    ) |  (?:ac|co|com|edu|go|gob|gov|ltd|me|mil|ne|net|nhs|nom|or|org|plc|sch)\.[a-z]{2} | [0-9.]+"""


class _Objection(NamedTuple):
    """The reason for refusing a realm."""

    text: str  # the end of the error message
    hint: str | None = None


def check_realm(realm: str, registry: str, *, is_http_allowed: bool, has_credentials: bool) -> None:
    """Raise AuthError unless tokens may be requested from the URL `realm`
    (docs/protocol-facts.md section 2.7).

    `registry` is the host of the registry that sent the realm. `is_http_allowed` is true if the
    registry itself is reached over plain http. `has_credentials` is true if the token request would
    carry credentials.
    """
    objection = _objection_to(
        realm, registry, is_http_allowed=is_http_allowed, has_credentials=has_credentials
    )
    if objection is not None:
        # The user info before an `@` and the query after a `?` may be secrets.
        without_query = realm.partition("?")[0]
        without_userinfo = without_query.rpartition("@")[2]
        shown_realm = printable(without_userinfo, 100)
        message = f"{registry} asks for a login at {shown_realm!r}, {objection.text}"
        raise AuthError(message, hint=objection.hint)


def _objection_to(
    realm: str, registry: str, *, is_http_allowed: bool, has_credentials: bool
) -> _Objection | None:
    """Return the reason for refusing a realm, or None if the realm is acceptable.

    The parameters are the same as for `check_realm`.
    """
    url = _split_url(realm)
    if url is None:
        return _Objection("which is not a URL")
    if "@" in url.netloc or "#" in realm:
        return _Objection("which holds user info or a fragment: refused")
    is_allowed_http = url.scheme == "http" and is_http_allowed
    if url.scheme != "https" and not is_allowed_http:
        hint = "ask the registry's operator to correct its realm"
        return _Objection("which is not https", hint)

    host = (url.hostname or "").rstrip(".")
    # All ports of this machine are trusted alike, also under different loopback names.
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
    """Split a URL into its parts. Returns None if the text is not a valid URL with a host."""
    if not text.isascii() or not text.isprintable() or " " in text:
        return None
    try:
        url = urlsplit(text)
        _ = url.port  # raises ValueError if the port is not a number from 0 to 65535
    except ValueError:
        return None
    has_host = bool((url.hostname or "").rstrip("."))
    return url if has_host else None


def _has_same_owner(host: str, registry: str) -> bool:
    """Report whether a host belongs to the registry's owner, judged by its domain name.

    The host must be the registry, a subdomain of the registry, or a subdomain of the registry's
    parent domain. The parent domain must not be shared by different owners.
    """
    domains = [registry]
    parent = registry.partition(".")[2]
    if not re.fullmatch(_SHARED_DOMAINS, parent):
        domains.append(parent)
    # A domain without a dot, such as `com` or a local host name, has no single owner.
    return any("." in domain and f".{host}".endswith(f".{domain}") for domain in domains)


# The number of bytes of a body that are searched for a tag of HTML.
_HTML_SEARCHED = 2000


class _ErrorEntry(NamedTuple):
    """One element of `errors` in an error body.

    A field that is missing or not a string is empty.
    """

    code: str = ""
    message: str = ""


class ErrorBody(NamedTuple):
    """The explanation of an error in the body of an answer."""

    codes: tuple[str, ...]
    # Untrusted text of any length. Secrets must be redacted before it is shortened.
    message: str


def parse_error_body(body: bytes) -> ErrorBody:
    """Parse an error body of any format in docs/protocol-facts.md section 1.12.

    Codes and message are empty if the body is an HTML page. A body in an unknown format is returned
    as the message.
    """
    document = json_object(body)
    if document is None:
        is_html = b"<" in body[:_HTML_SEARCHED]
        return ErrorBody((), "" if is_html else body.decode("utf-8", "replace"))

    entries = _error_entries(document.get("errors"))
    if not entries:
        # Token services, proxies and some registries send a single message, in one of these fields.
        names = ("message", "error_description", "details", "error")
        texts = [_as_text(document.get(name)) for name in names]
        entries = [_ErrorEntry(message=next(filter(None, texts), ""))]
    codes = tuple(entry.code for entry in entries if entry.code)
    sentences = [" ".join(filter(None, (entry.code, entry.message))) for entry in entries]
    # Some registries repeat the same error for each blob.
    unique = dict.fromkeys(filter(None, sentences))
    return ErrorBody(codes, "; ".join(unique))


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
