"""Fixtures of the tests of `relight.dcp`."""

from tests.running import home

__all__ = ["home"]
