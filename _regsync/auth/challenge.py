"""Parsing of the challenges and error bodies that registries send.

Owns: the grammar of WWW-Authenticate, the rules for realms, the formats of error bodies.
May not know: credentials, tokens, sockets.
Invariants: no request is sent to a realm that `check_realm` refuses. Otherwise a registry could
have credentials sent to another party (R2, R9).
Follows: docs/protocol-facts.md sections 1.12, 2.1 and 2.7.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from _regsync.addresses import Origin, check_foreign, is_loopback, resolve_location
from _regsync.errors import AuthError, ProtocolBroken
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

# Matches `HOST REGISTRY` if a cloud has its token services under HOST, and not in the domain of its
# registries (docs/protocol-facts.md section 2.7). Customers can choose no such name.
_TOKEN_SERVICES = (
    r"dockerauth(-ee)?(-vpc)?[.-][a-z]{2}-[a-z0-9-]+\.aliyuncs\.com .+\.aliyuncs\.com"
    r"|api\.scaleway\.com .+\.scw\.cloud"
)


def check_realm(realm: str, registry: Origin, *, has_credentials: bool) -> None:
    """Raise AuthError unless tokens may be requested from the URL `realm`
    (docs/protocol-facts.md section 2.7).

    `registry` has sent the realm. `has_credentials` is true if the token request would carry
    credentials.
    """
    hint = "ask the registry's operator to correct its realm"
    scheme = "https?" if registry.scheme == "http" else "https"
    try:
        # Not relative, and without a fragment.
        if not re.fullmatch(f"{scheme}://[^#]+", realm, re.IGNORECASE):
            raise ProtocolBroken(f"it is not an {scheme.rstrip('?')} URL")
        origin, _ = resolve_location(registry, "/", realm)
        check_foreign(registry, origin)
        if not has_credentials or _has_same_owner(origin.host, registry.host):
            return
        objection = "it may have another owner: the credentials are not sent"
        hint = "use auth_type: anonymous if the images are public"
    except ProtocolBroken as error:
        objection = error.message
    # The user info before an `@` and the query after a `?` may be secrets.
    shown = printable(realm.partition("?")[0].rpartition("@")[2], 100)
    raise AuthError(f"{registry.host} asks for a login at {shown!r}: {objection}", hint=hint)


def _has_same_owner(host: str, registry: str) -> bool:
    """Report whether a host belongs to the registry's owner, judged by its domain name.

    The host must be the registry, a subdomain of the registry, or a subdomain of the registry's
    parent domain. The parent domain must not be shared by different owners. All ports of this
    machine have one owner, also under different loopback names. A few services of clouds are known.
    """
    if re.fullmatch(_TOKEN_SERVICES, f"{host} {registry}"):
        return True
    if host == registry or (is_loopback(host) and is_loopback(registry)):
        return True
    domains = [registry]
    parent = registry.partition(".")[2]
    if not re.fullmatch(_SHARED_DOMAINS, parent):
        domains.append(parent)
    # A domain without a dot, such as `com` or a local host name, has no single owner.
    return any("." in domain and f".{host}".endswith(f".{domain}") for domain in domains)


# The number of bytes of a body that are searched for a tag of HTML.
_HTML_SEARCHED = 2000


class ErrorBody(NamedTuple):
    """The explanation of an error in the body of an answer."""

    codes: tuple[str, ...]
    message: str  # untrusted text of any length


def parse_error_body(body: bytes) -> ErrorBody:
    """Parse an error body of any format in docs/protocol-facts.md section 1.12.

    Codes and message are empty if the body is an HTML page. A body in an unknown format is returned
    as the message.
    """
    document = json_object(body)
    if document is None:
        is_html = b"<" in body[:_HTML_SEARCHED]
        return ErrorBody((), "" if is_html else body.decode("utf-8", "replace"))

    errors = document.get("errors")
    entries = (
        [each for each in errors if isinstance(each, dict)] if isinstance(errors, list) else []
    )
    if not entries:
        # Token services, proxies and some registries send a single message, in one of these fields.
        names = ("message", "error_description", "details", "error")
        return ErrorBody((), next(filter(None, (_text(document, name) for name in names)), ""))
    codes = [_text(entry, "code") for entry in entries]
    sentences = [
        " ".join(filter(None, (code, _text(entry, "message"))))
        for code, entry in zip(codes, entries, strict=True)
    ]
    # Some registries repeat the same error for each blob.
    return ErrorBody(tuple(filter(None, codes)), "; ".join(dict.fromkeys(filter(None, sentences))))


def _text(fields: Mapping[str, object], name: str) -> str:
    """Return a field, or "" if it is missing or not a string."""
    value = fields.get(name)
    return value if isinstance(value, str) else ""
