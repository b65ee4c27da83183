"""Labels of all values of a training step on the mesh axes, inferred in one process."""

from frontier_llm.certificate.axis_types.check import check_axis_types

__all__ = ["check_axis_types"]
