"""The old place of `conformance.provider`."""

from ..provider import Persona, Provider

__all__ = ["Persona", "Provider"]
