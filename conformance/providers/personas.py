"""The old place of `conformance.personas`."""

from ..personas import PERSONAS, Persona, Provider, Running, imitate, persona

__all__ = ["PERSONAS", "Persona", "Provider", "Running", "imitate", "persona"]
