"""Tiny models with random weights that need no file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from frontier_llm.blueprint.parameters import model_parameters
from frontier_llm.comm import Mesh, serial_mesh
from frontier_llm.config import ModelConfig, OpsConfig, load_model
from frontier_llm.inference.generate import stream
from frontier_llm.inference.model import InferenceModel, build_inference_model, inference_plan
from frontier_llm.inference.sampling import Sampling

NAMES = ("llama-tiny", "gpt-tiny", "mpt-tiny")


class RandomWeights:
    """Every tensor is random, including norms and biases, so that each of them matters. Values depend only on the
    name.
    """

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self._shapes = {name: parameter.shape for name, parameter in model_parameters(model).items()}

    def rectangle(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        whole = 0.15 * torch.randn(self._shapes[name], generator=generator, dtype=torch.float64)
        if "norm" in name and name.endswith("weight"):
            whole += 1
        return whole[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]


def tiny(
    name: str,
    dtype: str = "fp64",
    mesh: Mesh | None = None,
    tensor: int = 1,
    pipeline: int = 1,
    expert: int = 1,
    **shape: object,
) -> InferenceModel:
    model = load_model(name, shape)
    mesh = mesh or serial_mesh()
    plan = inference_plan(model, tensor, pipeline, mesh.world.size, expert)
    return build_inference_model(RandomWeights(model), plan, mesh, torch.device("cpu"), dtype, OpsConfig())


def prompts(lengths: Sequence[int], vocab: int = 250) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]


@dataclass(frozen=True)
class Completion:
    """New tokens of one row, and the reason for its end. The reason is "stop" (a stop token) or "length" (the requested
    number, or a full context).
    """

    tokens: tuple[int, ...]
    finish_reason: str


def generate(
    model: InferenceModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    use_cache: bool = True,
) -> list[Completion]:
    """Complete every prompt, in one batch. Collective over tp and pp. Every rank returns all completions."""
    rows: list[list[int]] = [[] for _ in prompts]
    for tokens in stream(model, prompts, sampling, use_cache):
        for row, token in zip(rows, tokens, strict=True):
            if token is not None:
                row.append(token)
    stops = set(sampling.stop_tokens)
    return [
        Completion(tuple(row[:-1]), "stop") if row and row[-1] in stops else Completion(tuple(row), "length")
        for row in rows
    ]
