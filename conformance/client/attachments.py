"""The names of `conformance.walks` under their old path, until all imports are renamed."""

from ..walks import FAMILIES as FAMILIES
from ..walks import SBOM as SBOM
from ..walks import SIGNED as SIGNED
from ..walks import Family as Family
from ..walks import fallback_lists as fallback_lists
from ..walks import family as family
from ..walks import has_api as has_api
from ..walks import plain as plain
from ..walks import referrers_tag as referrers_tag
