"""Content that is too large to be stored, and is generated when it is read.

Owns: `Stream`, seeded bytes of any length that need almost no memory.
May not know: HTTP, images.
Invariants: the bytes of a Stream depend only on its seed, number and size, in every run and with
every version of Python. All its pieces differ, so that a missing, repeated or exchanged piece
changes the digest.
"""

from __future__ import annotations

import functools
import hashlib

from ..messages import Content

__all__ = ["Stream"]

_PIECE = 1 << 20
_STAMP = 32  # bytes at the start of each piece that identify it


@functools.lru_cache(maxsize=4)
def _filling(seed: int) -> bytes:
    """Return the bytes after each stamp in all streams of a seed.

    They are shared to save memory.
    """
    return hashlib.shake_128(b"stream %d" % seed).digest(_PIECE - _STAMP)


class Stream(Content):
    """`size` seeded bytes. Each piece is a stamp and a view of shared bytes."""

    def __init__(self, seed: int, number: int, size: int) -> None:
        super().__init__()
        self.size = size
        self._seed = seed
        self._number = number
        self._digests: dict[str, str] = {}

    def room(self, expected: int) -> memoryview:
        """Raise TypeError, because a stream does not change."""
        raise TypeError("nothing can be put into a Stream")

    def feed(self, data: bytes) -> None:
        """Raise TypeError, because a stream does not change."""
        raise TypeError("nothing can be put into a Stream")

    def digest(self, algorithm: str = "sha256") -> str:
        """Return the digest. The stream is generated and hashed once for each algorithm."""
        if algorithm not in self._digests:
            hasher = hashlib.new(algorithm)
            for piece in self.pieces():
                hasher.update(piece)
            self._digests[algorithm] = f"{algorithm}:{hasher.hexdigest()}"
        return self._digests[algorithm]

    def pieces(self, start: int = 0, stop: int | None = None) -> list[memoryview]:
        """Return views of the bytes from `start` to `stop`.

        They take about 600 bytes for each MiB.
        """
        stop = self.size if stop is None else min(stop, self.size)
        filling = memoryview(_filling(self._seed))
        views: list[memoryview] = []
        for piece_start in range(start - start % _PIECE, stop, _PIECE):
            stamp = hashlib.sha256(b"%d/%d/%d" % (self._seed, self._number, piece_start)).digest()
            parts = ((piece_start, memoryview(stamp)), (piece_start + _STAMP, filling))
            for part_start, part in parts:
                view = part[max(start - part_start, 0) : max(stop - part_start, 0)]
                if view:
                    views.append(view)
        return views
