"""Canaries: secrets that are known and unique, and the search for any part of one in all that a run
leaves behind.

Owns: how a canary is made, in which writings it may come back, where a run can leave anything. May
not know: who keeps a secret, what a run does. Invariant: eight characters of a canary in a row are
enough to be found, in any of the writings, compressed or not; nothing else is taken for one.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, quote_plus

LEAST = 8
# A run of so many characters of a writing says as much as eight of the secret itself.
_ENOUGH = {"hex": 16, "base64": 11}
_STREAM = re.compile(rb"x[\x01\x5e\x9c\xda]")


def make(place: str, joint: str = "/", blocks: int = 4) -> str:
    """Make the canary of a place: blocks of letters and digits, between them what has to be escaped
    somewhere.
    """
    text = base64.b32encode(hashlib.sha256(place.encode()).digest()).decode().lower()
    return joint.join(f"{text[at]}Q{text[at + 1 : at + 9]}" for at in range(0, 10 * blocks, 10))


def writings(secret: str) -> Iterator[tuple[str, str]]:
    """Give the ways in which a secret can be written, each with its kind."""
    raw = secret.encode("utf-8", "surrogatepass")
    yield "plain", secret
    yield "percent", quote(raw, safe="")
    yield "percent", quote_plus(raw)
    yield "percent", quote(raw, safe="").lower()
    escaped = json.dumps(secret)[1:-1]
    yield "json", escaped
    yield "json", escaped.replace("/", "\\/")
    yield "repr", repr(secret)[1:-1]
    for digits in (raw.hex(), raw.hex().upper()):
        yield "hex", digits
    for before in range(
        3
    ):  # of what stands before it, base64 keeps the remainder of a division by three
        coded = base64.b64encode(bytes(before) + raw).decode().rstrip("=")
        whole = coded[-(-before * 8 // 6) + (before > 0) : len(coded) - 1]
        yield "base64", whole
        yield "base64", whole.replace("+", "-").replace("/", "_")


@functools.lru_cache(maxsize=256)  # the same ones are made in many tests
def _parts(secret: str) -> list[tuple[str, int, frozenset[bytes]]]:
    """Return what says enough of a secret: of each kind of writing all parts of its size."""
    found: dict[str, set[bytes]] = {}
    for kind, text in writings(secret):
        size = _ENOUGH.get(kind, LEAST)
        parts = (
            text[at : at + size].encode("utf-8", "surrogatepass")
            for at in range(len(text) - size + 1)
        )
        found.setdefault(kind, set()).update(parts)
    return [(kind, _ENOUGH.get(kind, LEAST), frozenset(parts)) for kind, parts in found.items()]


class Canaries:
    """All canaries of a test, by place; what servers hand out is added on the way."""

    def __init__(self) -> None:
        self.places: dict[str, str] = {}
        self._parts: list[tuple[str, str, frozenset[bytes]]] = []
        self._sizes: dict[int, set[bytes]] = {size: set() for size in (LEAST, *_ENOUGH.values())}

    def make(self, place: str, joint: str = "/", blocks: int = 4) -> str:
        """Make a canary, and remember where it is."""
        return self.add(place, make(place, joint, blocks))

    def add(self, place: str, secret: str) -> str:
        """Remember a secret that somebody else has made."""
        if len(secret) < LEAST:
            raise ValueError(f"{place}: {secret!r} is too short to be found")
        if self.places.get(place) == secret:
            return secret
        self.places[place] = secret
        for kind, size, parts in _parts(secret):
            self._parts.append((place, kind, parts))
            self._sizes[size] |= parts
        return secret

    def found(self, text: bytes) -> dict[str, str]:
        """Return the places whose canaries are in a text, each with what is there and how it is
        written.
        """
        seen: dict[str, str] = {}
        for each in unpacked(text):
            for size, known in self._sizes.items():
                ends = range(size, len(each) + 1)
                if known.isdisjoint(map(each.__getitem__, map(slice, range(len(ends)), ends))):
                    continue  # a call for each place takes three times as long
                for at in range(len(each) - size + 1):
                    if (part := each[at : at + size]) in known:
                        place, kind = next(
                            (place, kind) for place, kind, parts in self._parts if part in parts
                        )
                        around = each[max(0, at - 60) : at + size + 60]
                        seen.setdefault(place, f"{kind}: {around.decode('latin-1')!r}")
        return seen


def unpacked(text: bytes) -> Iterator[bytes]:
    """Give a text, and what is compressed in it."""
    yield text
    for match in _STREAM.finditer(text):
        try:
            yield zlib.decompressobj().decompress(text[match.start() :])
        except zlib.error:
            continue


class Traces:
    """Where a run can leave anything: what it says, by channel, and all that is new below some
    directories.

    What was there before is the test's own, unless it has changed.
    """

    def __init__(self, canaries: Canaries, *directories: Path) -> None:
        self.canaries, self._directories = canaries, directories
        self._before = dict(self._files())

    def _files(self) -> Iterator[tuple[Path, tuple[int, int]]]:
        for directory in self._directories:
            for parent, folders, files in os.walk(directory):
                for name in [*folders, *files]:
                    about = (path := Path(parent, name)).lstat()
                    yield (
                        path,
                        (
                            about.st_mtime_ns if name in files else 0,
                            about.st_size if name in files else 0,
                        ),
                    )

    def left(self) -> Iterator[tuple[str, bytes]]:
        """Give names and bytes of what is new."""
        for path, about in self._files():
            if self._before.get(path) != about:
                yield f"the name {path.name}", str(path).encode("utf-8", "surrogateescape")
                if path.is_symlink():
                    yield (
                        f"the link {path.name}",
                        os.readlink(path).encode("utf-8", "surrogateescape"),
                    )
                elif path.is_file():
                    yield f"the file {path.name}", path.read_bytes()

    def found(self, said: Mapping[str, str | bytes], but: Iterable[str] = ()) -> list[str]:
        """Return what of which canary is where, a line each; `but`: places that this run shows
        because it was asked.
        """
        texts = [(name, text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")) for name, text in
            said.items()]  # fmt: skip
        return [
            f"{place} in {channel}: {part}"
            for channel, text in [*texts, *self.left()]
            for place, part in self.canaries.found(text).items()
            if place not in but
        ]
