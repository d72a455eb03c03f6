"""The names of `conformance.walks` under their old path, until all imports are renamed."""

from ..walks import Graph as Graph
from ..walks import equal as equal
from ..walks import list_referrers as list_referrers
from ..walks import walk as walk
