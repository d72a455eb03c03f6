"""The old name of what `faults` has now."""

from . import Faults as Faults
from . import Rule as Rule
