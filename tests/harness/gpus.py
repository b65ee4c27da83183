"""Pretends that torch has GPUs by replacing its functions. Nothing is computed on them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from frontier_llm.training import device


def pretend_gpus(
    monkeypatch: pytest.MonkeyPatch,
    *,
    count: int = 8,
    architecture: str = "gfx90a",
    bus: int = 0xC1,
    version: str = "2.10.0",
) -> None:
    """Let torch look like the build for this architecture's vendor, with `count` visible GPUs of this architecture."""
    major, minor = divmod(int(architecture.removeprefix("sm_")), 10) if architecture.startswith("sm_") else (9, 0)
    properties = SimpleNamespace(
        gcnArchName=architecture, major=major, minor=minor, pci_domain_id=0, pci_bus_id=bus, pci_device_id=0
    )
    pretend_torch(monkeypatch, "nvidia" if architecture.startswith("sm_") else "amd", version)
    for name, function in {
        "is_available": lambda: count > 0,
        "device_count": lambda: count,
        "set_device": lambda index: None,
        "get_device_properties": lambda index: properties,
        "get_device_name": lambda index: f"pretended {architecture}",
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(device, "_use", lambda index: None)


def pretend_torch(monkeypatch: pytest.MonkeyPatch, vendor: str, version: str = "2.10.0") -> None:
    """Let torch look like a build for AMD's or NVIDIA's GPUs, or for neither."""
    monkeypatch.setattr(torch.version, "hip", "7.0" if vendor == "amd" else None)
    monkeypatch.setattr(torch.version, "cuda", "12.8" if vendor == "nvidia" else None)
    monkeypatch.setattr(torch, "__version__", version)
