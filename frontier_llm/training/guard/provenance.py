"""Code, libraries and device of a run. Every checkpoint records them, and a resume compares them."""

from __future__ import annotations

import platform

import numpy as np
import torch

from frontier_llm import __version__
from frontier_llm.files import package_digest


def provenance(device: torch.device) -> dict[str, str]:
    """Return versions, a digest of the package's sources, and the device's name.

    The digest is also correct without git.
    """
    return {
        "frontier_llm": __version__,
        "code_sha256": package_digest(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
    }
