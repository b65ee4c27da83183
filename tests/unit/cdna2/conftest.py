"""The code objects of gfx90a, as fixtures."""

from tests.harness.objects import gfx90a, objects

__all__ = ["gfx90a", "objects"]
