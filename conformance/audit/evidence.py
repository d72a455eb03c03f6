"""The old name of what `evidence` has now."""

from ..evidence import Act as Act
