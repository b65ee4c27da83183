"""Labels of all values of a training step on the mesh axes, inferred in one process."""
