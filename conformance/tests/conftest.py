"""Fixtures of the harness's own tests."""

from conformance.tests.fixtures import *  # noqa: F403
