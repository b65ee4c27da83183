"""Fixtures of tests that submit."""

from tests.harness.submissions import fake_slurm, here

__all__ = ["fake_slurm", "here"]
