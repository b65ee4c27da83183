"""Measuring: benchmarks of the step, the ops and the links; calibration of a machine file; reports over run
directories. Nothing that trains.
"""
