"""Which pending image is promoted next.

Owns: the images that wait for their promotion, and the election among them.
May not know: slots, tasks, who copies which blob in the end.
Invariants: the choice among the same images is the same (I10).
Follows: docs/specification.md section 1.1 "Cross-repo blob mounting"; docs/design.md section 9.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from itertools import count

from _regsync.sync.image import Image

# Images that stand for election, and bytes of their manifests, at which discovery rests.
_MAX_PENDING = 512
_MAX_PENDING_BYTES = 64 * 1024 * 1024


class Election:
    """Which pending image is promoted next: the greedy set cover of docs/specification.md section
    1.1, in near-linear time.

    The image with the highest gain goes next, then the one with the lowest number. Its gain is the
    count of its blobs that other pending images of that host want too and that nobody copies yet.
    """

    def __init__(self) -> None:
        # What each pending image would copy, and what it would gain.
        self._blobs = dict[int, list[tuple[str, str]]]()
        self._gains = dict[int, int]()
        # The pending images that want a blob, in the order in which they came.
        self._wanted_by = dict[tuple[str, str], list[int]]()
        # (-gain, number). An entry whose gain is not the image's present one is out of date.
        self._heap = list[tuple[int, int]]()

    def add(self, number: int, blobs: Iterable[tuple[str, str]]) -> None:
        """Let an image stand for election; `blobs` are the (host, digest) that nobody copies yet."""
        self._blobs[number] = list(blobs)
        self._gains[number] = 0
        for blob in self._blobs[number]:
            images = self._wanted_by.setdefault(blob, [])
            images.append(number)
            if len(images) == 2:
                # The second image makes the blob a shared one for the first image too.
                self._change_gain(images[0], +1)
            if len(images) >= 2:
                self._gains[number] += 1
        heapq.heappush(self._heap, (-self._gains[number], number))

    def take(self) -> int:
        """Return the number of the elected image. The others gain nothing from its blobs any more."""
        number = self._pop_highest()
        for blob in self._blobs.pop(number):
            for other in self._wanted_by.pop(blob, ()):
                if other in self._gains:
                    self._change_gain(other, -1)
        return number

    def _pop_highest(self) -> int:
        while True:
            negative_gain, number = heapq.heappop(self._heap)
            if self._gains.get(number) == -negative_gain:
                del self._gains[number]
                return number

    def _change_gain(self, number: int, change: int) -> None:
        self._gains[number] += change
        heapq.heappush(self._heap, (-self._gains[number], number))


class Pending:
    """The images that wait for their promotion.

    Artifacts whose subject is at the target go first, in the order in which they came, so that
    images finish one after another. The others stand for election.
    """

    def __init__(self) -> None:
        self._artifacts = deque[Image]()
        self._candidates = dict[int, Image]()
        self._candidate_bytes = 0
        self._election = Election()
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._artifacts) + len(self._candidates)

    def is_full(self) -> bool:
        """Say whether discovery should rest."""
        if len(self._candidates) >= _MAX_PENDING:
            return True
        return self._candidate_bytes > _MAX_PENDING_BYTES

    def add(self, image: Image, blobs: Iterable[tuple[str, str]]) -> None:
        """Let an image stand for election; `blobs` are those that nobody copies to its host yet.

        An image that stood before keeps its number, and so its place among equals.
        """
        if image.number < 0:
            image.number = next(self._numbers)
        self._candidates[image.number] = image
        self._candidate_bytes += image.tree.size
        self._election.add(image.number, blobs)

    def add_artifacts(self, images: Iterable[Image]) -> None:
        """Let artifacts go next."""
        self._artifacts.extend(images)

    def take(self) -> Image:
        """Return the image to promote now; there has to be one."""
        if self._artifacts:
            return self._artifacts.popleft()
        image = self._candidates.pop(self._election.take())
        self._candidate_bytes -= image.tree.size
        return image
