"""Benchmarks of the step, the ops and the links, calibration of a machine file, and reports about run directories.

Nothing in this package trains a model.
"""
