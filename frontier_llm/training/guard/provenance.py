"""Provenance of a run: its code, libraries and device. Every checkpoint records them, and a resume compares them."""

from __future__ import annotations

import platform

import numpy as np
import torch

from frontier_llm import __version__
from frontier_llm.files import package_digest
from frontier_llm.ops.reference import Ops


def provenance(device: torch.device, ops: Ops) -> dict[str, str]:
    """Return versions, a digest of the package's sources, the device's name, and whether two runs have equal bits.

    The digest is also correct without git.
    """
    return {
        "frontier_llm": __version__,
        "code_sha256": package_digest(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
        "equal_bits_in_two_runs": f"no: {ops.not_repeatable}" if ops.not_repeatable else "yes",
    }
