"""The training step, its build order, the loop around it, and what a run writes down."""
