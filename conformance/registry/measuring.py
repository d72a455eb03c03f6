"""Moved to `conformance/registry/app.py`."""

from .app import Measured, MeasuringApp

__all__ = ["Measured", "MeasuringApp"]
