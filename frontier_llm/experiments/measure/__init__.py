"""Benchmarks of training steps, ops and links, calibration of machine files, and reports about run directories.

No module of this package trains a model to use it afterwards.
"""
