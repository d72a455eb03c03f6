"""A registry that verifies blobs and drops their bytes, so that large images need no memory.

Owns: blobs of which only size and digest are kept.
May not know: how blobs are uploaded.
Invariants: a blob with a wrong digest is refused, as at the strict registry.
"""

from __future__ import annotations

from ..messages import Content, Request, Response
from ..server.exchange import Reception
from .app import App

__all__ = ["Measured", "MeasuringApp"]


class Measured(Content):
    """A body of which only the size and the sha256 are kept."""

    def __init__(self) -> None:
        super().__init__()
        # Every piece of the body is received into this buffer, over the piece before.
        self._scratch = bytearray(1 << 18)

    def room(self, expected: int) -> memoryview:
        """Return the buffer for the next bytes, which overwrite earlier bytes."""
        return memoryview(self._scratch)

    def advance(self, count: int) -> None:
        """Count and hash the first `count` bytes of the buffer that `room` returned."""
        self._hash.update(memoryview(self._scratch)[:count])
        self.size += count

    def feed(self, data: bytes) -> None:
        """Count and hash `data`."""
        self._hash.update(data)
        self.size += len(data)

    def digest(self, algorithm: str = "sha256") -> str:
        """Return the sha256. Raises LookupError for other algorithms, which need the bytes."""
        if algorithm != "sha256":
            raise LookupError(f"the bytes are gone, and with them their {algorithm}")
        return super().digest()

    def pieces(self, start: int = 0, stop: int | None = None) -> list[memoryview]:
        """Return no pieces if the body is empty. Raises LookupError otherwise."""
        if self.size:
            raise LookupError("the bytes of this blob were measured and dropped")
        return []


class MeasuringApp(App):
    """A registry that accepts pushes, but cannot answer pulls."""

    def _post_upload_start(self, request: Request) -> Response | Reception:
        answer = super()._post_upload_start(request)
        for upload in self._repository(request.repository).uploads.values():
            if not upload.content.size and not isinstance(upload.content, Measured):
                upload.content = Measured()
        return answer
