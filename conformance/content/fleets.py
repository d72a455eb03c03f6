"""The names of `conformance.images` under their old path, until all imports are renamed."""

from ..images import LARGE as LARGE
from ..images import PLATFORMS as PLATFORMS
from ..images import Fleet as Fleet
