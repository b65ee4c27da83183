"""What these tests share with those of the GPU ops."""

from tests.unit.ops.conftest import gfx90a, objects

__all__ = ["gfx90a", "objects"]
