"""What goes wrong at night: registries that hang, drop answers or ask for hours, and a stop in
between.

Each test says how far the failure reaches, what it costs in requests, and what the operator is
told.
"""

from __future__ import annotations

from _regsync.errors import RegistryError, Side


def test_an_error_that_is_raised_again_elsewhere_has_another_place_and_no_retries():
    error = RegistryError("status 503", status=503)
    error.add_context(Side.SOURCE, "fetch blob", "a.test/app@sha256:00")
    error.retries = 4
    copy = error.copy_without_context()
    assert str(copy) == "status 503"
    assert (copy.side, copy.retries) == (None, 0)
    assert str(error) == "fetch blob a.test/app@sha256:00: status 503 (tried 5 times)"
