"""A strict OCI 1.1 registry for tests, with fault injection.

It imports nothing of the program that it tests, only the standard library, h11, anyio and, for
`names`, trustme. So it also runs with the packages in a built .pyz by PYTHONPATH. `README.md`
describes what it proves.
"""
