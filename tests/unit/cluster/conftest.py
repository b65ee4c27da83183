"""Fixtures of tests that submit."""

from tests.harness.submissions import fake_slurm, here, quick_submit

__all__ = ["fake_slurm", "here", "quick_submit"]
