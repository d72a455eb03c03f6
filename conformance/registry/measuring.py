"""A registry that verifies what it is sent and drops the bytes: a target of any size costs no memory.

Owns: blobs of which only size and digest are kept.
May not know: how they came.
Invariants: a blob is refused as at the strict registry when its digest is another.
"""

from __future__ import annotations

from ..messages import Content, Request, Response
from ..server.exchange import Reception
from .app import App

__all__ = ["Measured", "MeasuringApp"]


class Measured(Content):
    """A body of which only the size and the sha256 are kept, for a registry that only verifies."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch = bytearray(1 << 18)

    def room(self, expected: int) -> memoryview:
        """Return where the next bytes go, over those before."""
        return memoryview(self._scratch)

    def advance(self, count: int) -> None:
        """Take `count` bytes that were written into `room`."""
        self._hash.update(memoryview(self._scratch)[:count])
        self.size += count

    def feed(self, data: bytes) -> None:
        """Take bytes that were received elsewhere."""
        self._hash.update(data)
        self.size += len(data)

    def digest(self, algorithm: str = "sha256") -> str:
        """Return the sha256; there are no bytes left for any other algorithm."""
        if algorithm != "sha256":
            raise LookupError(f"the bytes are gone, and with them their {algorithm}")
        return super().digest()

    def pieces(self, start: int = 0, stop: int | None = None) -> list[memoryview]:
        """Refuse, except where there was nothing: the bytes are gone."""
        if self.size:
            raise LookupError("the bytes of this blob were measured and dropped")
        return []


class MeasuringApp(App):
    """A registry that can be pushed to and not pulled from."""

    def _post_upload_start(self, request: Request) -> Response | Reception:
        answer = super()._post_upload_start(request)
        for upload in self._repository(request.repository).uploads.values():
            if not upload.content.size and not isinstance(upload.content, Measured):
                upload.content = Measured()
        return answer
