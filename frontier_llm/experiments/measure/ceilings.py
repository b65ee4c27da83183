"""Largest values of fitted constants, each with the measurement or definition that it comes from.

A constant that is fitted to step times takes up errors of other parts of the formula. Above these values it would
state a rate that nobody has measured on the device. Times (latencies, host time) have no ceiling.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFINITION = "a share of a rate is at most 1"
AXONN = "largest rate of square bf16 products, AxoNN (SC24)"
AZURE = "the fastest BabelStream kernel, Azure/AI-benchmarking-guide"
INFINIBAND = (
    "96.6 of 100 Gb/s: ib_write_bw, thread 273376 of NVIDIA's forum (NCCL: 24 of 25 GB/s, NVIDIA/nccl issue 307)"
)


@dataclass(frozen=True)
class Ceiling:
    """Largest value of a constant on devices of one architecture."""

    constant: str  # field of Rates
    architecture: str | None  # None: every device
    value: float  # in the unit of the field
    source: str


CEILINGS = (
    Ceiling("gemm_efficiency", None, 1.0, DEFINITION),
    Ceiling("gemm_efficiency", "sm_80", 280 / 312, f"280 of 312 TFLOP/s: {AXONN}"),
    Ceiling("gemm_efficiency", "sm_90", 813 / 989, f"813 of 989 TFLOP/s: {AXONN}"),
    Ceiling("gemm_efficiency", "gfx90a", 147 / 191.5, "147 of 191.5 TFLOP/s on ROCm 6.2: stas00/ml-engineering"),
    Ceiling("flash_efficiency", None, 1.0, DEFINITION),
    Ceiling("flash_efficiency", "sm_80", 0.73, "up to 73 % of the peak: FlashAttention-2 (arXiv:2307.08691)"),
    Ceiling("flash_efficiency", "sm_90", 0.75, "740 TFLOP/s, 75 % of the peak: FlashAttention-3 (arXiv:2407.08608)"),
    Ceiling("flash_backward", None, 1.0, "per FLOP the backward pass is never faster (arXiv:2307.08691, figures 4, 5)"),
    Ceiling("hbm_efficiency", None, 1.0, DEFINITION),
    Ceiling("hbm_efficiency", "sm_80", 1.75 / 2.039, f"1.75 of 2.039 TB/s: {AZURE}, ND A100 v4"),
    Ceiling("hbm_efficiency", "sm_90", 3.18 / 3.35, f"3.18 of 3.35 TB/s: {AZURE}, ND H100 v5"),
    Ceiling("linear_speedup", None, 2.0, "the peak in FP8 is twice that in 16 bit: data sheets of H100 and MI300X"),
    Ceiling("fabric_share", None, 1.0, DEFINITION),
    Ceiling("fabric_bytes_s", "sm_80", 230e9, "12 NVLinks, NCCL's rings: NVIDIA/nccl-tests issue 149"),
    Ceiling("fabric_bytes_s", "sm_90", 370e9, "18 NVLinks, NCCL's rings: NVIDIA/nccl-tests issue 212"),
    Ceiling("network_efficiency", None, 0.966, INFINIBAND),
    Ceiling("network_crowding", None, 1.0, DEFINITION),
)


def ceilings_of(architecture: str | None) -> dict[str, Ceiling]:
    """Return field of Rates → ceiling. A ceiling of the architecture replaces that of every device."""
    everywhere = {one.constant: one for one in CEILINGS if one.architecture is None}
    own = {one.constant: one for one in CEILINGS if one.architecture == architecture}
    return everywhere | own
