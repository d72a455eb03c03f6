"""Fixtures of the harness's own tests."""

from conformance.tests.asking import app, clock, seed  # noqa: F401
from conformance.tests.fixtures import *  # noqa: F403
