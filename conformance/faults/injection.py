"""The old name of what `faults` has now."""

from . import Injection as Injection
