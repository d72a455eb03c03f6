"""The program behind `regsync.py`. Nothing here is an API; `regsync.py` is the public face.

Eight packages and a few modules beside them, which import downwards only: docs/design.md ("The house") lists them, and
tests/test_layering.py holds the list against the imports.
"""

import sys

__version__ = "0.1.0"
# The one constant in which the two builds differ; tools/build_zipapp.py writes the first of them
# into dist/regsync.pyz. A checkout behaves as the second.
FIPS_BUILD = False
# Whether this is the static executable (tools/build_static.py), which has a module in C of its own.
IS_STATIC = "_regsync_native" in sys.builtin_module_names
