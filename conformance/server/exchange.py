"""Moved to `conformance/http.py`."""

from ..http import DRAINED, Exchange, Reception, Site, receive_whole

__all__ = ["DRAINED", "Exchange", "Reception", "Site", "receive_whole"]
