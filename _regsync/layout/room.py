"""The bytes that are still to be written to the device of a layout.

Owns: what each image under way has reserved, and how much of it is written.
May not know: files, devices.
Invariants: a blob that several images need is counted once.
Follows: docs/design.md section 13.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping


class Reserved:
    """What images under way and open files are still to write, by the digests of it."""

    def __init__(self) -> None:
        self.total = 0
        # Of each digest, the bytes that are to be written yet.
        self._rest = dict[str, int]()
        # Of each digest, how many have reserved it.
        self._owners = Counter[str]()

    def add(self, sizes: Mapping[str, int]) -> None:
        """Reserve room for these; what others have reserved already is shared with them."""
        self._owners.update(sizes.keys())
        for digest, size in sizes.items():
            if digest not in self._rest:
                self.set_rest(digest, size)

    def remove(self, digests: Iterable[str]) -> None:
        """Give up what `add` has reserved."""
        for digest in digests:
            self._owners[digest] -= 1
            if not self._owners[digest]:
                del self._owners[digest]
                self.total -= self._rest.pop(digest)

    def set_rest(self, digest: str, rest: int) -> None:
        """Note how many bytes of something reserved are to be written yet."""
        self.total += rest - self._rest.get(digest, 0)
        self._rest[digest] = rest

    def __contains__(self, digest: str) -> bool:
        return digest in self._rest

    def rest_of(self, digest: str) -> int:
        """Return the bytes that are to be written of a digest, 0 where it is not reserved."""
        return self._rest.get(digest, 0)
