"""Layers that are split over an axis of the mesh, and the pipeline engine."""
