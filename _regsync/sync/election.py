"""Choose the pending image that is promoted next.

Owns: the images that wait for their promotion, and the election among them.
May not know: slots, tasks, which image copies which blob in the end.
Invariants: the same pending images always give the same choice (I10).
Follows: docs/specification.md section 1.1 "Cross-repo blob mounting"; docs/design.md section 9.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from itertools import count

from _regsync.sync.image import Image

# Discovery pauses while this many images are candidates, or while their manifests have more bytes.
_MAX_PENDING = 512
_MAX_PENDING_BYTES = 64 * 1024 * 1024

# A blob at a target host: the host, and the digest of the blob.
HostBlob = tuple[str, str]


class Election:
    """Chooses among numbered images by the greedy set cover of docs/specification.md section 1.1.

    The gain of an image is the number of its blobs that no image copies yet and that other
    candidates need on the same host: these candidates can mount the blobs instead of uploading
    them. The image with the highest gain is elected. Among equal gains, the lowest number is
    elected. The time is nearly linear in the number of blobs.
    """

    def __init__(self) -> None:
        # By image number, the blobs of the image that no image copied when it was added.
        self._blobs = dict[int, list[HostBlob]]()
        # By image number, the current gain. Elected images have no entry.
        self._gains = dict[int, int]()
        # By blob, the numbers of the candidates that need the blob, oldest first.
        self._wanted_by = dict[HostBlob, list[int]]()
        # A heap of (-gain, image number). Entries with an outdated gain are skipped when popped.
        self._heap = list[tuple[int, int]]()

    def add(self, number: int, blobs: Iterable[HostBlob]) -> None:
        """Add a candidate. `blobs` are its blobs that no image copies yet."""
        self._blobs[number] = list(blobs)
        self._gains[number] = 0
        for blob in self._blobs[number]:
            candidates = self._wanted_by.setdefault(blob, [])
            if len(candidates) == 1:
                # The blob is shared now, so it counts in the first candidate's gain too.
                self._change_gain(candidates[0], +1)
            if candidates:
                self._gains[number] += 1
            candidates.append(number)
        heapq.heappush(self._heap, (-self._gains[number], number))

    def take(self) -> int:
        """Remove the elected image and return its number."""
        elected = self._pop_highest()
        for blob in self._blobs.pop(elected):
            # The elected image copies the blob, so the blob counts in no other gain any more.
            for number in self._wanted_by.pop(blob, ()):
                if number in self._gains:
                    self._change_gain(number, -1)
        return elected

    def _pop_highest(self) -> int:
        """Remove the candidate with the highest gain, and return its number."""
        while True:
            negative_gain, number = heapq.heappop(self._heap)
            is_up_to_date = self._gains.get(number) == -negative_gain
            if is_up_to_date:
                del self._gains[number]
                return number

    def _change_gain(self, number: int, change: int) -> None:
        """Change the gain of a candidate. Its old heap entries become outdated."""
        self._gains[number] += change
        heapq.heappush(self._heap, (-self._gains[number], number))


class Pending:
    """The images that wait for their promotion.

    Artifacts whose subject is at the target come first, in the order in which they were added, so
    that images finish one after another. All other images are candidates of the election.
    """

    def __init__(self) -> None:
        # Artifacts whose subject is at the target, oldest first.
        self._artifacts = deque[Image]()
        # By number, the candidates of the election.
        self._candidates = dict[int, Image]()
        # Bytes of the candidates' manifests.
        self._candidate_bytes = 0
        self._election = Election()
        # The numbers for new candidates.
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._artifacts) + len(self._candidates)

    def is_full(self) -> bool:
        """Report whether discovery should pause."""
        if len(self._candidates) >= _MAX_PENDING:
            return True
        return self._candidate_bytes > _MAX_PENDING_BYTES

    def add(self, image: Image, blobs: Iterable[HostBlob]) -> None:
        """Add a candidate. `blobs` are its blobs that no image copies yet.

        An image that starts again keeps its number, and with it its place among equal gains.
        """
        if image.number < 0:
            image.number = next(self._numbers)
        self._candidates[image.number] = image
        self._candidate_bytes += image.tree.size
        self._election.add(image.number, blobs)

    def add_artifacts(self, images: Iterable[Image]) -> None:
        """Add artifacts whose subject is at the target."""
        self._artifacts.extend(images)

    def take(self) -> Image:
        """Remove and return the image to promote next. At least one image must be pending."""
        if self._artifacts:
            return self._artifacts.popleft()
        image = self._candidates.pop(self._election.take())
        self._candidate_bytes -= image.tree.size
        return image
