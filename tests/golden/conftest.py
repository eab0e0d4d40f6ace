"""Fixtures of tests that train for real."""

from tests.running import home

__all__ = ["home"]
