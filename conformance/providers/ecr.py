"""The old place of ECR's row in `conformance.personas`."""

from ..personas import LAG

__all__ = ["LAG"]
