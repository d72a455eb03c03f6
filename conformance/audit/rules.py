"""The old name of what `audit` has now."""

from . import RULES as RULES
