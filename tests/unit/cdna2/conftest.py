"""Fixtures that provide the code objects of gfx90a."""

from tests.harness.objects import gfx90a, objects

__all__ = ["gfx90a", "objects"]
