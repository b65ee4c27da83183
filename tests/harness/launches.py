"""Counts the launches of a layer of a model, with tensors on the meta device and the kernels of a fake GPU driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

import pytest
import torch

from frontier_llm.certificate.device_step.count import launches_of_a_layer
from frontier_llm.config import ModelConfig, RunConfig
from frontier_llm.config.load import build as build_config
from frontier_llm.ops import torch_linear
from frontier_llm.ops.prebuilt import Kernels

ONE_RANK: Mapping[str, int | str] = MappingProxyType({})


def skip_without_fp32_products_on_meta() -> None:
    """Skip the test on torch 2.10, which ignores out_dtype on the meta device. torch's GPU kernels honour it."""
    total = torch.empty(16, 16, device="meta")
    half = total.to(torch.bfloat16)
    try:
        torch_linear._in_the_product(total, half, half)
    except TypeError:
        pytest.skip(f"torch {torch.__version__} has no addmm with out_dtype on the meta device")


def run_of(
    model: ModelConfig,
    micro_batch: int = 1,
    documents: bool = False,
    parallel: Mapping[str, int | str] = ONE_RANK,
) -> RunConfig:
    """Return a run with one microbatch per step and replica."""
    replicas = int(parallel.get("data", 1))
    content = {
        "model": model.model_dump(),
        "batch": {"global_batch": micro_batch * replicas, "micro_batch": micro_batch},
        "precision": {"dtype": "bf16"},
        "data": {"reset_at_documents": documents},
        "train": {"steps": 10},
        "parallel": dict(parallel),
    }
    return build_config(RunConfig, content)


def of_a_layer(
    kernels: Kernels, model: ModelConfig, parallel: Mapping[str, int | str] = ONE_RANK
) -> Counter[tuple[str, str]]:
    """Count the launches that one more layer adds to a microbatch, by (phase, name)."""
    config = run_of(model, parallel=parallel)
    world = config.parallel.model_ranks * int(parallel.get("data", 1))
    counts: Counter[tuple[str, str]] = Counter()
    for launch, count in launches_of_a_layer(config, world, kernels).items():
        counts[launch.phase, launch.name] += count
    return counts
