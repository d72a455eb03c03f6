"""Moved to `conformance/registry`."""

from . import Measured, MeasuringApp

__all__ = ["Measured", "MeasuringApp"]
