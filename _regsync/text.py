"""Functions that make untrusted text safe to print, and format sizes, durations and times.

This module has the secrets of the process: whoever comes by one calls `keep_secret`, and all that
leaves the process (console, log, documents, probes, tracebacks) goes through `mask` or `json_text`.
Invariants: secrets are masked before a text is truncated, because half a secret would not be found.
Untrusted text is printed on one line, without control characters (R18).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from itertools import chain
from typing import Any
from urllib.parse import unquote

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

# The length of a text that is searched for secrets; what follows is dropped. Callers read more bytes
# of an error's body than this. So a secret that was truncated by the read is in the dropped part.
_MOST_SEARCHED = 16 * 1024 - 1  # characters

# A shorter secret is not masked, because it would mask parts of words.
_SHORTEST_SECRET = 4  # characters

# The number of secrets of single requests that are kept.
_MOST_PASSING = 512

# The last time that RFC 3339 can represent, in seconds since 1970.
_LAST_MOMENT = 253_402_300_799


def one_line(text: str, limit: int = 500) -> str:
    """Return a text on one line without control characters, truncated to `limit` characters.

    A truncated text ends in `…`. Secrets are not masked.
    """
    cleaned = text.translate(_PRINTABLE).strip()
    return cleaned if len(cleaned) <= limit else cleaned[: limit - 1] + "…"


def printable(text: str, limit: int = 500) -> str:
    """Return an untrusted text like `one_line`, with all secrets masked."""
    searched = text[:_MOST_SEARCHED]
    masked = mask(searched)
    if len(searched) < len(text):
        # The cut may have left the beginning of a secret at the end. No secret is longer than the
        # longest spelling, so drop as many characters.
        longest = max(map(len, _all_spellings()), default=0)
        masked = f"{masked[: max(0, len(masked) - longest)]}…"
    return one_line(masked, limit)


def clean_beginning(body: bytes, limit: int) -> str:
    """Return the beginning of an untrusted body like `printable`."""
    return printable(body.decode("utf-8", "replace"), limit)


def reason_of(error: Exception) -> str:
    """Return the system's message for an error (`strerror`), or str(error), made printable."""
    return printable(getattr(error, "strerror", None) or str(error))


# The secrets of the process, each with its spellings. The thread of the probes reads them too.
_kept = dict[str, Sequence[str]]()  # until they are forgotten
_passing = dict[str, Sequence[str]]()  # of single requests: the newest ones, in order


def _all_spellings() -> Iterator[str]:
    """Yield all spellings of all secrets."""
    # Copies, because another thread may add a secret meanwhile.
    return chain.from_iterable([*_kept.values(), *_passing.values()])


def keep_secret(*secrets: str) -> None:
    """Mask these secrets in all that leaves the process."""
    for secret in secrets:
        _kept[secret] = _spellings_of(secret)


def keep_passing_secret(*secrets: str) -> None:
    """Mask these secrets while the texts about one request are made, such as the signature in its URL.

    Only the newest of these are masked, so that they need not be forgotten.
    """
    for secret in secrets:
        spellings = _passing.pop(secret, None) or _spellings_of(secret)
        _passing[secret] = spellings
    while len(_passing) > _MOST_PASSING:
        del _passing[next(iter(_passing))]


def retire_secret(*secrets: str) -> None:
    """Mask secrets that have ended a while longer, because a late answer may repeat them.

    Those that were not kept are not masked.
    """
    for secret in secrets:
        if _kept.pop(secret, None) is not None:
            keep_passing_secret(secret)


def forget_all_secrets() -> None:
    """Begin with an empty list, for a command in a process that has run another one."""
    _kept.clear()
    _passing.clear()


def json_text(value: object) -> str:
    """Return a value as JSON, with the secrets in its strings masked. Names of fields stay, and so does
    each `status`, which is a word of ours: with the password `sync` no report could be read again.
    """
    text = json.dumps(value, default=str)
    if mask(text) == text:
        return text
    return json.dumps(_with_masked_strings(value))


def _with_masked_strings(value: object) -> object:
    match value:
        case None | bool() | int() | float():
            return value
        case dict():
            masked = {name: _with_masked_strings(each) for name, each in value.items()}
            if isinstance(value.get("status"), str):  # a registry may be named so, too
                masked["status"] = value["status"]
            return masked
        case list() | tuple():
            return [_with_masked_strings(each) for each in value]
        case _:
            return mask(str(value))


def mask(text: str) -> str:
    """Return a text with each secret of the process replaced by `***`.

    Secrets are found in the text as it is, and percent-decoded once or twice. A text in which one is
    found is returned on one line, and decoded as far as was needed to find it.
    """
    masked = text
    decoded = text.replace("\\/", "/")  # JSON may escape a slash
    for _ in range(3):
        decoded = _without_controls(decoded)
        found = [spelling for spelling in _all_spellings() if spelling in decoded]
        # The longest first, because a secret may be the beginning of another secret.
        for spelling in sorted(found, key=len, reverse=True):
            decoded = decoded.replace(spelling, _MASK)
        if found:
            masked = decoded
        if "%" not in decoded:
            break
        decoded = unquote(decoded)
    return masked


def _spellings_of(secret: str) -> Sequence[str]:
    """Return the spellings in which a secret can appear in a text that was percent-decoded."""
    # Names of hosts are converted to lower case.
    written = (secret, secret.lower(), json.dumps(secret)[1:-1])
    spellings = dict.fromkeys(map(_without_controls, written))
    return [each for each in spellings if len(each) >= _SHORTEST_SECRET]


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


def time_text(seconds: float) -> str:
    """Format a time, in seconds since 1970, as `2026-11-22T12:00:00Z`."""
    moment = datetime.fromtimestamp(min(int(seconds), _LAST_MOMENT), timezone.utc)
    return f"{moment:%Y-%m-%dT%H:%M:%S}Z"
