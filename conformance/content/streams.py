"""The names of `conformance.images` under their old path, until all imports are renamed."""

from ..images import Stream as Stream
