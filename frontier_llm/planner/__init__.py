"""Planner: searches the parallel layout with the shortest step of a model on a machine, and explains the choice."""
