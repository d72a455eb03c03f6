"""A strict OCI 1.1 registry to run, to break and to interrogate, on its own code.

It imports nothing of the program that it judges: the standard library, h11 and anyio only, so that
it also runs with the packages inside a built .pyz by PYTHONPATH. `README.md` says what it proves.
"""
