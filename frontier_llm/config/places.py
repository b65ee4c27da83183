"""Finds the folder of the shipped configuration files."""

from __future__ import annotations

import sys
from pathlib import Path


def configs_dir() -> Path:
    """Return the shipped configs/: beside the package in a checkout, under the prefix if installed from a wheel."""
    checkout = Path(__file__).resolve().parents[2] / "configs"
    if checkout.is_dir():
        return checkout
    return Path(sys.prefix) / "share" / "frontier_llm" / "configs"
