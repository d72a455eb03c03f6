"""The program behind `regsync.py`. Nothing here is an API; `regsync.py` is the public face. Flat
modules on five layers, each importing downwards only (tests/test_layering.py holds the table)."""

__version__ = "0.1.0"
# The one constant in which the two builds differ; tools/build_zipapp.py writes the first of them
# into dist/regsync.pyz. A checkout behaves as the second.
FIPS_BUILD = False
