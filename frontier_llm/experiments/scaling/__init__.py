"""Weak and strong scaling: the series, its harvest, its figures, with the planner's prediction and published points
beside them.
"""
