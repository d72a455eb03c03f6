"""Moved to `conformance/tokens.py`."""

from ..tokens import BasicAuth, Challenge, TokenService, plain, read_basic, read_form

__all__ = ["BasicAuth", "Challenge", "TokenService", "plain", "read_basic", "read_form"]
