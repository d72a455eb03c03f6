"""The old place of `conformance.rates`."""

from ..rates import ACTIONS, READS, WRITES, Cap, Metered, Rates, actions_of

__all__ = ["ACTIONS", "READS", "WRITES", "Cap", "Metered", "Rates", "actions_of"]
