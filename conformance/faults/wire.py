"""The old name of what `faults` has now."""

from ..messages import Response
from . import Dropped as Dropped
from . import Wire as Wire
from . import as_wire as as_wire
from . import bodiless as bodiless
from . import head_of as head_of
from . import with_framing as with_framing


class Streamed(Response):
    """A name that `server.exchange` still has. Nothing makes one."""
