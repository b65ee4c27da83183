"""Weak and strong scaling series: planning, running, collecting results, and figures with predictions."""
