"""The old place of the rows about referrers in `conformance.personas`."""

from ..personas import LATE

__all__ = ["LATE"]
