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

# Discovery rests while so many images stand for election, or while their manifests have more bytes.
_MAX_PENDING = 512
_MAX_PENDING_BYTES = 64 * 1024 * 1024


class Election:
    """The greedy set cover of docs/specification.md section 1.1 among numbered pending images, in
    near-linear time.

    An image's gain is the count of its blobs that no image copies yet and that other pending images
    want on the same host: so many uploads the others are spared. The highest gain is elected; among
    equals, the lowest number.
    """

    def __init__(self) -> None:
        # By number, the image's blobs (host, digest) that no image copied when it was added.
        self._blobs = dict[int, list[tuple[str, str]]]()
        # By number, the present gain.
        self._gains = dict[int, int]()
        # By blob (host, digest), the numbers of the pending images that want it, oldest first.
        self._wanted_by = dict[tuple[str, str], list[int]]()
        # (-gain, number). An entry with a gain that is not the present one is out of date.
        self._heap = list[tuple[int, int]]()

    def add(self, number: int, blobs: Iterable[tuple[str, str]]) -> None:
        """Let an image stand for election; `blobs` are its (host, digest) that no image copies yet."""
        self._blobs[number] = list(blobs)
        self._gains[number] = 0
        for blob in self._blobs[number]:
            images = self._wanted_by.setdefault(blob, [])
            images.append(number)
            if len(images) == 2:  # until now the first image alone wanted the blob
                self._change_gain(images[0], +1)
            if len(images) >= 2:
                self._gains[number] += 1
        heapq.heappush(self._heap, (-self._gains[number], number))

    def take(self) -> int:
        """Remove the elected image and return its number. Its blobs add to no gain any more."""
        elected = self._pop_highest()
        for blob in self._blobs.pop(elected):
            # The elected image copies the blob, and the others mount it.
            for number in self._wanted_by.pop(blob, ()):
                if number in self._gains:
                    self._change_gain(number, -1)
        return elected

    def _pop_highest(self) -> int:
        """Remove the image with the highest gain, and return its number."""
        while True:
            negative_gain, number = heapq.heappop(self._heap)
            is_up_to_date = self._gains.get(number) == -negative_gain
            if is_up_to_date:
                del self._gains[number]
                return number

    def _change_gain(self, number: int, change: int) -> None:
        """Note a new gain. The image's older entries stay in the heap, out of date."""
        self._gains[number] += change
        heapq.heappush(self._heap, (-self._gains[number], number))


class Pending:
    """The images that wait for their promotion.

    Artifacts whose subject is at the target go first, in the order in which they came, so that
    images finish one after another. All other images stand for election.
    """

    def __init__(self) -> None:
        self._artifacts = deque[Image]()
        # The images that stand for election, by their number.
        self._candidates = dict[int, Image]()
        # Bytes of the candidates' manifests.
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
        """Let an image stand for election; `blobs` are its (host, digest) that no image copies yet.

        An image that starts again keeps its number, and so its place among equals.
        """
        if image.number < 0:
            image.number = next(self._numbers)
        self._candidates[image.number] = image
        self._candidate_bytes += image.tree.size
        self._election.add(image.number, blobs)

    def add_artifacts(self, images: Iterable[Image]) -> None:
        """Let artifacts go before all candidates, after the artifacts that wait already."""
        self._artifacts.extend(images)

    def take(self) -> Image:
        """Remove and return the image to promote now; the caller has checked that there is one."""
        if self._artifacts:
            return self._artifacts.popleft()
        image = self._candidates.pop(self._election.take())
        self._candidate_bytes -= image.tree.size
        return image
