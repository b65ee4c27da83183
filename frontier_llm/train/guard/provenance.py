"""Which code, libraries and device a run uses: recorded in every checkpoint, compared on resume."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import numpy as np
import torch

from frontier_llm import __version__


def provenance(device: torch.device) -> dict[str, str]:
    """Versions, a digest of the package's own sources (right also where there is no git), and the device's name."""
    return {
        "frontier_llm": __version__,
        "code_sha256": _code_digest(Path(__file__).resolve().parents[2]),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
    }


def _code_digest(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
