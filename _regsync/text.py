"""Functions that make untrusted text safe to print, and format sizes, durations and times.

Owns: the characters that are printed, the masking of secrets, the mark of a truncated text.
May not know: the owners of secrets, the output.
Invariants: secrets are masked before a text is truncated, because half a secret would not be found.
Untrusted text is printed on one line, without control characters (R18).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

# A function that returns the secrets to mask.
Secrets = Callable[[], Iterable[str]]

# Characters that are removed from printed text: control characters, characters that change the
# direction of text, and characters of zero width (R18).
_INVISIBLE = {
    *range(0x00, 0x20),
    *range(0x7F, 0xA0),
    0xAD,
    0x61C,
    *range(0x200B, 0x2010),
    *range(0x2028, 0x202F),
    *range(0x2060, 0x2070),
    0xFEFF,
    *range(0xE0000, 0xE0080),
}
_SPACES = (0x09, 0x0A, 0x0D, 0x2028, 0x2029)  # characters that are replaced by a space
_PRINTABLE = dict.fromkeys(_INVISIBLE, "") | dict.fromkeys(_SPACES, " ")  # for str.translate

_MASK = "***"

# The number of characters of a text that are searched for secrets; the text after them is dropped.
# Callers read more bytes of an error body than this. So a secret that was truncated by the read is
# in the dropped part.
_MOST_SEARCHED = 16 * 1024 - 1

# The last time that RFC 3339 can represent, in seconds since 1970.
_LAST_MOMENT = 253_402_300_799

# The secrets that `printable` masks in the current task. See `redacting`.
_SECRETS_IN_USE: ContextVar[tuple[Secrets, ...]] = ContextVar("secrets in use", default=())


def one_line(text: str, limit: int = 500) -> str:
    """Return a text on one line without control characters, truncated to `limit` characters.

    A truncated text ends in `…`. Secrets are not masked.
    """
    beginning = text[: 4 * limit]  # the text may be huge
    cleaned = beginning.translate(_PRINTABLE).strip()
    is_complete = len(beginning) == len(text)
    if is_complete and len(cleaned) <= limit:
        return cleaned
    return cleaned[: limit - 1] + "…"


def printable(text: str, limit: int = 500) -> str:
    """Return an untrusted text like `one_line`, with the secrets of `redacting` masked."""
    # Each block of `redacting` around this call has a function that returns its secrets.
    secrets = [secret for secrets_of in _SECRETS_IN_USE.get() for secret in secrets_of()]
    if any(secrets):
        text = redact(text, secrets)
    return one_line(text, limit)


def clean_beginning(body: bytes, limit: int) -> str:
    """Return an untrusted body like `printable`, without decoding the whole body."""
    # A character has at most four bytes in UTF-8. So more characters remain than `redact` searches.
    most_bytes = 4 * (_MOST_SEARCHED + 1)
    return printable(body[:most_bytes].decode("utf-8", "replace"), limit)


class redacting:  # lower case, like the context managers of contextlib
    """A context manager that makes `printable` mask these secrets inside its block.

    Text is made printable where it is parsed, deep inside the code that sends a request. The
    secrets are only known to the caller of that code.
    """

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        # The value of `_SECRETS_IN_USE` before the block.
        self._outer: tuple[Secrets, ...] = ()

    def __enter__(self) -> None:
        self._outer = _SECRETS_IN_USE.get()
        _SECRETS_IN_USE.set((*self._outer, self._secrets))

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        _SECRETS_IN_USE.set(self._outer)


def reason_of(error: Exception, limit: int = 500) -> str:
    """Return the system's message for an error (`strerror`), or str(error), made printable."""
    return printable(getattr(error, "strerror", None) or str(error), limit)


def redact(text: str, secrets: Iterable[str]) -> str:
    """Return a text on one line, with each secret replaced by `***`.

    Secrets are found literally, in lower case, JSON-escaped, and percent-encoded once or twice. The
    result is percent-decoded, and has at most `_MOST_SEARCHED` characters. A caller that shortens
    the text must do so after this call.
    """
    if not text:
        return text
    searched = text[:_MOST_SEARCHED].replace("\\/", "/")  # JSON may escape a slash
    masked = _without_controls(unquote(unquote(searched)))

    forms = {form for secret in secrets for form in _written_forms(secret)}
    # Replace the longest first, because a secret may be the beginning of another secret.
    longest_first = sorted(forms, key=lambda form: (-len(form), form))
    for form in longest_first:
        masked = masked.replace(form, _MASK)
    if len(text) <= _MOST_SEARCHED:
        return masked
    # The cut may have left the beginning of a secret at the end. No secret is longer than the
    # longest form, so drop as many characters.
    longest = max(map(len, longest_first), default=0)
    return f"{masked[: max(0, len(masked) - longest)]}…"


# Cached, because every text of a run is searched for the same secrets. The cache has room for twice
# the number of secrets that one login keeps.
@lru_cache(maxsize=1024)
def _written_forms(secret: str) -> frozenset[str]:
    """Return the forms in which a secret can appear in a text that was percent-decoded twice.

    A secret that contains a percent sign may have been decoded together with the text.
    """
    forms: set[str] = set()
    spellings = (
        secret,
        json.dumps(secret)[1:-1],
        secret.lower(),  # host names are converted to lower case
    )
    for spelling in spellings:
        decoded_once = unquote(spelling)
        decoded_twice = unquote(decoded_once)
        forms |= {_without_controls(form) for form in (spelling, decoded_once, decoded_twice)}
    return frozenset(filter(None, forms))


def _without_controls(text: str) -> str:
    """Return a text of any length on one line, without control characters."""
    if text.isprintable():
        return text.strip()
    return text.translate(_PRINTABLE).strip()


def strip_userinfo(text: str) -> str:
    """Mask `user:password@` in a text, with all that precedes it in the same word.

    The text may quote a URL or a reference in which a user has written a password by mistake.
    """

    def mask(match: re.Match[str]) -> str:
        word_up_to_at = match[0]
        has_password = ":" in word_up_to_at
        return f"{_MASK}@" if has_password else word_up_to_at

    # The `@` before a digest does not follow a password.
    return re.sub(r"""(?<![^\s'"])[^\s'"]*@(?!sha(?:256|512):)""", mask, text)


def mask_unless_word(text: str) -> str:
    """Return a text if it looks like a name, and `***` otherwise.

    It is used for a user's value that should be a name, but may be a secret in the wrong place.
    """
    return text if re.fullmatch("!?[A-Za-z_.-]{1,24}", text) else _MASK


def json_object(text: bytes) -> dict[str, Any] | None:
    """Parse a JSON object. Returns None if the text is not valid JSON or not an object."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def size_text(count: int) -> str:
    """Format a size in bytes with SI units: `0 B`, `512 B`, `31.5 MB`."""
    if count < 1000:
        return f"{count} B"
    for power, unit in enumerate(("KB", "MB", "GB"), start=1):
        size = count / 1000**power
        if size < 999.95:  # a larger value would be formatted as 1000.0
            return f"{size:.1f} {unit}"
    return f"{count / 1000**4:.1f} TB"


def duration_text(seconds: float) -> str:
    """Format a duration: `0.3s`, `47s`, `2m13s`, `1h30m`."""
    if seconds < 9.95:  # a longer duration would be formatted as 10.0s
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


@lru_cache(maxsize=1024)  # the entries of one run have few different times
def time_text(seconds: float) -> str:
    """Format a time, in seconds since 1970, as `2026-11-22T12:00:00Z`."""
    moment = datetime.fromtimestamp(min(int(seconds), _LAST_MOMENT), timezone.utc)
    return f"{moment:%Y-%m-%dT%H:%M:%S}Z"


@lru_cache(maxsize=1024)
def parse_time(text: str) -> int:
    """Parse the output of `time_text` into seconds since 1970.

    Raises ValueError for another format.
    """
    if not re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z", text):
        raise ValueError(f"{text!r} is not a time like 2026-11-22T12:00:00Z")
    return int(datetime.fromisoformat(f"{text[:-1]}+00:00").timestamp())
