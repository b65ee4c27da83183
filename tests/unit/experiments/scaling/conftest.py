"""Fixtures of tests that submit."""

from tests.harness.submissions import quick_submit

__all__ = ["quick_submit"]
