"""Fixtures for the tests of ``triptych/checkpoint``."""

from tests.layers.conftest import checkpoint_folder

__all__ = ["checkpoint_folder"]
