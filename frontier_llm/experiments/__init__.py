"""Observes runs from outside: measurements, calibration, measured search, scaling series, reports."""
