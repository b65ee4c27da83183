"""The training step, the construction of its state, the loop around it, and the records that a run writes."""
