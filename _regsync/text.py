"""."""

from __future__ import annotations

import json
import posixpath
import re
from typing import Any
from urllib.parse import unquote

# What obeys, reorders, hides or breaks a terminal's line: controls, bidirectional ones, marks
# without width (R18).
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


_CLEANING = dict.fromkeys(_INVISIBLE, "") | dict.fromkeys((0x09, 0x0A, 0x0D, 0x2028, 0x2029), " ")


def clean(text: str, limit: int = 500) -> str:
    """Return `text` on one line, without control characters, at most `limit` characters long, `…`
    where it was cut.
    """
    shown = text[: 4 * limit].translate(_CLEANING).strip()
    return shown if len(shown) <= limit and len(text) <= 4 * limit else shown[: limit - 1] + "…"


def without_logins(text: str) -> str:
    """Return a text without `user:password@`, wherever it was written by mistake."""
    return re.sub(
        r"""(?<![^\s'"])[^\s'"]*@(?!sha(?:256|512):)""",
        lambda it: "***@" if ":" in it[0] else it[0],
        text,
    )


def plain(text: str) -> str:
    """Return what is written where a name belongs; asterisks for what may be a secret in a wrong
    place.
    """
    return text if re.fullmatch("!?[A-Za-z_.-]{1,24}", text) else "***"


def hide(text: str, *secrets: str) -> str:
    """Take secrets out of a text that a server sent, however it writes them, and what a cut has
    left of them.
    """
    text = clean(unquote(unquote(text.replace("\\/", "/"))), len(text) + 1)
    for secret in filter(None, secrets):
        for form in dict.fromkeys(
            map(unquote, (secret, unquote(secret), json.dumps(secret)[1:-1], secret.lower()))
        ):
            at = text.find(
                begin := form[:8]
            )  # in linear time: what has its beginning again goes wherever it begins
            while at >= 0:
                end = at + len(posixpath.commonprefix([form, text[at : at + len(form)]]))
                if (
                    begin in form[1:]
                    or end == at + len(form)
                    or text[end : end + 1] in "…\ufffd'\"%\\"
                ):
                    text = f"{text[:at]}***{text[end:]}"
                    end = at
                at = text.find(begin, max(at + 1, end - 7))
    return text


def json_object(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object that a text is, None for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def size_text(count: int) -> str:
    """Return a size in SI units: `0 B`, `512 B`, `31.5 MB`."""
    if count < 1000:
        return f"{count} B"
    power = next(
        (power for power in (1, 2, 3) if count / 1000**power < 999.95), 4
    )  # more would be shown as 1000.0
    return f"{count / 1000**power:.1f} {'BKMGT'[power]}B"


def duration_text(seconds: float) -> str:
    """Return a duration: `0.3s`, `47s`, `2m13s`, `1h30m`."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"
