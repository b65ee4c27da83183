"""Tools that observe runs: measurements, calibration, measured search, scaling series and reports."""
