"""What `frontier-llm ops list` shows: every op's back-ends on this machine, and the prebuilt architectures."""

from __future__ import annotations

from typing import Any

import torch

from frontier_llm.errors import BackendError, suggest
from frontier_llm.ops.dtypes import working_dtype
from frontier_llm.ops.face import GROUPS
from frontier_llm.ops.kernel_table import ARCHITECTURES
from frontier_llm.ops.manifest import read_manifest
from frontier_llm.ops.providers import PROVIDERS
from frontier_llm.ops.select import Choice, choose


def backends(dtype_name: str) -> list[dict[str, Any]]:
    """One row per op, device and back-end that has the op: status is the version, or why it cannot be used and what builds it."""
    dtype = working_dtype(dtype_name)
    rows = []
    for group in GROUPS:
        for device in ("cpu", "cuda"):
            taken = choose(group, "auto", device, dtype)
            assert isinstance(taken, Choice)
            for provider in PROVIDERS.values():
                if group not in provider.groups or device not in provider.devices:
                    continue
                refusal = provider.refusal(group, device, dtype).partition("\n")[0]
                build = f"; build: {provider.build}" if provider.build and refusal and refusal in provider.missing() else ""
                rows.append(
                    {
                        "op": group,
                        "device": device,
                        "backend": provider.name,
                        "available": not refusal,
                        "chosen": taken.provider is provider and (device == "cpu" or torch.cuda.is_available()),
                        "status": f"no: {refusal}{build}" if refusal else provider.version(),
                    }
                )
    return rows


def prebuilt_architectures() -> dict[str, str]:
    """State of the code objects of each architecture."""
    states = {}
    for architecture in ARCHITECTURES:
        try:
            manifest = read_manifest(architecture)
            states[architecture] = f"{len(manifest['kernels'])} kernels, Triton {manifest['tools']['triton']}"
        except BackendError as error:
            states[architecture] = f"no: {error.problems[0].what}; build: {error.problems[0].fix}"
    return states


def kernel_report(architecture: str) -> list[dict[str, Any]]:
    """The built code objects of an architecture with the facts of their compilation; raises BackendError when there are none.

    waves_per_simd is the occupancy that registers and shared memory allow (at most 8 on CDNA, 16 on NVIDIA).
    """
    machine = ARCHITECTURES.get(architecture)
    if machine is None:
        raise BackendError(f"no GPU ops are built for {architecture!r}", suggest(architecture, ARCHITECTURES), "ARCHITECTURE")
    lines = read_manifest(architecture)["kernels"]
    return [{**line, "waves_per_simd": machine.waves_per_simd(line["warps"], line["registers"], line["shared_bytes"])} for line in lines]
