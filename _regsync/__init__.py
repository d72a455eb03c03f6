"""The program behind `regsync.py`. This package is private; `regsync.py` is the public API.

docs/design.md ("The house") lists the packages and modules. A module imports only from lower layers,
which tests/test_layering.py checks.
"""

import sys

__version__ = "0.1.0"
# Whether a FIPS provider is required. tools/build_zipapp.py sets True in dist/regsync.pyz. The
# builds differ only in this line.
FIPS_BUILD = False
# Whether this is the static executable. tools/build_static.py adds the module `_regsync_native`.
IS_STATIC = "_regsync_native" in sys.builtin_module_names
