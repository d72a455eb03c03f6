"""The names of `conformance.images` under their old path, until all imports are renamed."""

from ..images import EMPTY_CONFIG as EMPTY_CONFIG
from ..images import EMPTY_TYPE as EMPTY_TYPE
from ..images import OCI_INDEX as OCI_INDEX
from ..images import Image as Image
from ..images import Part as Part
from ..images import Seed as Seed
from ..images import compose as compose
from ..images import compose_index as compose_index
from ..images import encode as encode
