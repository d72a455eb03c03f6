"""Text from elsewhere is made safe to print; sizes, durations and moments are put into words.

Owns: which characters a line may have, how secrets are taken out of a text, how a cut is shown.
May not know: whose secrets they are, who prints.
Invariants: secrets are removed before a text is cut, because half a secret would not be found.
Others' text is printed on one line, without control characters (R18).
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

Secrets = Callable[[], Iterable[str]]

# Characters that control a terminal, turn the direction of text around, or have no width (R18: no
# control character of others' text is printed).
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
_SPACES = (0x09, 0x0A, 0x0D, 0x2028, 0x2029)
_PRINTABLE = dict.fromkeys(_INVISIBLE, "") | dict.fromkeys(_SPACES, " ")

_MASK = "***"

# Characters of a text in which secrets are looked for. More of an error's body is read, so that
# a secret which the reading cuts in two stands behind them.
_MOST_SEARCHED = 16 * 1024 - 1

# The last second that RFC 3339 can write.
_LAST_MOMENT = 253_402_300_799

# Functions that return the secrets which text in the present task may hold: see `redacting`.
_SECRETS_IN_USE: ContextVar[tuple[Secrets, ...]] = ContextVar("secrets in use", default=())


def one_line(text: str, limit: int = 500) -> str:
    """Return `text` on one line, without control characters, at most `limit` characters long, `…`
    where it was cut. Secrets stay in it.
    """
    looked_at = text[: 4 * limit]  # the text may be huge
    shown = looked_at.translate(_PRINTABLE).strip()
    if len(shown) <= limit and len(looked_at) == len(text):
        return shown
    return shown[: limit - 1] + "…"


def printable(text: str, limit: int = 500) -> str:
    """Return others' text as `one_line` does, without the secrets in use (see `redacting`)."""
    secrets = [secret for secrets_of in _SECRETS_IN_USE.get() for secret in secrets_of()]
    if any(secrets):
        text = redact(text, secrets)
    return one_line(text, limit)


def clean_beginning(body: bytes, limit: int) -> str:
    """Return the beginning of others' bytes as `printable` does, however many they are."""
    # UTF-8 has at most four bytes a character, so the cut is behind all that is searched.
    most = 4 * (_MOST_SEARCHED + 1)
    return printable(body[:most].decode("utf-8", "replace"), limit)


class redacting:  # read as a verb, as those of contextlib are
    """Within the block, let `printable` remove these secrets from every text before it cuts it.

    Text is made printable where it is parsed. The secrets are known further out, where the request
    was made.
    """

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._outer: tuple[Secrets, ...] = ()

    def __enter__(self) -> None:
        self._outer = _SECRETS_IN_USE.get()
        _SECRETS_IN_USE.set((*self._outer, self._secrets))

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        _SECRETS_IN_USE.set(self._outer)


def reason_of(error: Exception, limit: int = 500) -> str:
    """Return what the system says of an error, or else the error's own text, as `printable` does."""
    return printable(getattr(error, "strerror", None) or str(error), limit)


def redact(text: str, secrets: Iterable[str]) -> str:
    """Return a text on one line, with `***` in place of each secret.

    A secret is found as it is, in lower case, JSON-escaped and percent-encoded once or twice. The
    result is percent-decoded, and ends after `_MOST_SEARCHED` characters. Any shorter cut has to
    come afterwards.
    """
    if not text:
        return text
    is_cut = len(text) > _MOST_SEARCHED
    text = text[:_MOST_SEARCHED].replace("\\/", "/")
    text = _without_controls(unquote(unquote(text)))

    forms = {form for secret in secrets for form in _written_forms(secret)}
    # The longest first: one secret may be the beginning of another.
    longest_first = sorted(forms, key=lambda form: (-len(form), form))
    for form in longest_first:
        text = text.replace(form, _MASK)
    if is_cut:
        # The last characters may be the beginning of a secret, as long as the longest one at most.
        longest = max(map(len, longest_first), default=0)
        text = f"{text[: max(0, len(text) - longest)]}…"
    return text


# All texts of a run are searched for the same secrets. A login remembers half as many as fit here.
@lru_cache(maxsize=1024)
def _written_forms(secret: str) -> frozenset[str]:
    """Return what a secret may look like in a text that `redact` has percent-decoded twice. A secret
    that has a percent sign of its own was decoded with the text.
    """
    forms: set[str] = set()
    spellings = (
        secret,
        json.dumps(secret)[1:-1],
        secret.lower(),  # in the name of a host
    )
    for spelling in spellings:
        decoded_once = unquote(spelling)
        decoded_twice = unquote(decoded_once)
        forms |= {_without_controls(form) for form in (spelling, decoded_once, decoded_twice)}
    return frozenset(filter(None, forms))


def _without_controls(text: str) -> str:
    """Return a text as `one_line` does, but of any length."""
    if text.isprintable():
        return text.strip()
    return text.translate(_PRINTABLE).strip()


def strip_userinfo(text: str) -> str:
    """Return a text without `user:password@`, wherever it was written by mistake."""

    def mask(word_before_at: re.Match[str]) -> str:
        has_password = ":" in word_before_at[0]
        return "***@" if has_password else word_before_at[0]

    # A digest follows an `@` too.
    return re.sub(r"""(?<![^\s'"])[^\s'"]*@(?!sha(?:256|512):)""", mask, text)


def mask_unless_word(text: str) -> str:
    """Return a text that stands where a name belongs, or asterisks if it does not look like a name:
    somebody may have put a secret in the wrong place.
    """
    return text if re.fullmatch("!?[A-Za-z_.-]{1,24}", text) else _MASK


def json_object(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object that a text is, None for anything else."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def size_text(count: int) -> str:
    """Return a size in SI units: `0 B`, `512 B`, `31.5 MB`."""
    if count < 1000:
        return f"{count} B"
    for power, unit in enumerate(("KB", "MB", "GB"), start=1):
        size = count / 1000**power
        if size < 999.95:  # more would be shown as 1000.0
            return f"{size:.1f} {unit}"
    return f"{count / 1000**4:.1f} TB"


def duration_text(seconds: float) -> str:
    """Return a duration: `0.3s`, `47s`, `2m13s`, `1h30m`."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


@lru_cache(maxsize=1024)  # what one run has seen has few different times
def time_text(seconds: float) -> str:
    """Return a moment, in seconds since 1970, as `2026-11-22T12:00:00Z`."""
    moment = datetime.fromtimestamp(min(int(seconds), _LAST_MOMENT), timezone.utc)
    return f"{moment:%Y-%m-%dT%H:%M:%S}Z"


@lru_cache(maxsize=1024)
def parse_time(text: str) -> int:
    """Return the seconds since 1970 of what `time_text` has written; ValueError for another text."""
    if not re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z", text):
        raise ValueError(f"{text!r} is not a time like 2026-11-22T12:00:00Z")
    return int(datetime.fromisoformat(f"{text[:-1]}+00:00").timestamp())
