"""The old name of what `audit` has now."""

from . import KINDS as KINDS
from . import MISTAKES as MISTAKES
from . import audit as audit
from . import latest as latest
from . import report as report
