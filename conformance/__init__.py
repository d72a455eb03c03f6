"""A strict OCI 1.1 registry for tests, with fault injection, and checks of any registry.

It imports nothing of the program that it tests, only the standard library, h11 and anyio. So it
also runs with the packages in a built .pyz by PYTHONPATH. `README.md` describes what it proves.
"""
