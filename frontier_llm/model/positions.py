"""Position embeddings: rotary tables (RoPE), ALiBi slopes, and positions that restart at each document."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from frontier_llm.comm import Axis
from frontier_llm.config import ModelConfig, RopeScaling
from frontier_llm.config.validate import rotary_dim
from frontier_llm.model.dropout import Drawn


@dataclass(frozen=True)
class Positions:
    """Position data of one microbatch for attention and dropout. Unused fields are None."""

    rope: tuple[Tensor, Tensor] | None  # cos, sin: (S, R), or (S, B, R) if positions restart at documents
    alibi_slopes_a: Tensor | None
    documents_BS: Tensor | None  # document number of each position of the complete sequence, on every cp rank
    drawn: Drawn | None = None  # None = no dropout


def within_document(documents_BS: Tensor) -> Tensor:
    """Return the position of each token in its own document: [[7,7,8,8,8]] → [[0,1,0,1,2]]."""
    index_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
    starts_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    starts_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return index_S - (index_S * starts_BS).cummax(dim=1).values


def rope_table(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each (S, R), of rotary embeddings (arXiv:2104.09864).

    Angles are computed in fp64, so that every dtype rounds the same angle.
    """
    rotated = rotary_dim(model)
    scaling = model.rope_scaling
    exponents_R = torch.arange(0, rotated, 2, dtype=torch.float64, device=device) / rotated
    frequencies_R = model.rope_theta**-exponents_R
    amplitude = 1.0
    if scaling is not None:
        frequencies_R = _SLOWED[scaling.kind](frequencies_R, exponents_R, model, scaling)
        # YaRN makes the softmax sharper for longer contexts. For this it scales cos and sin, and thereby queries and
        # keys.
        if scaling.kind == "yarn":
            amplitude = 0.1 * math.log(max(scaling.factor, 1.0)) + 1.0
    angles_SR = torch.arange(model.sequence_length, dtype=torch.float64, device=device)[:, None] * frequencies_R
    return (amplitude * angles_SR.cos()).to(dtype), (amplitude * angles_SR.sin()).to(dtype)


def _linear(frequencies_R: Tensor, exponents_R: Tensor, model: ModelConfig, scaling: RopeScaling) -> Tensor:
    """Interpolate positions (arXiv:2306.15595)."""
    return frequencies_R / scaling.factor


def _ntk(frequencies_R: Tensor, exponents_R: Tensor, model: ModelConfig, scaling: RopeScaling) -> Tensor:
    """Increase the base of the frequencies (NTK-aware scaling, described in arXiv:2309.00071).

    The lowest frequency is divided by the factor, and the highest frequency is unchanged.
    """
    return frequencies_R * scaling.factor ** -(exponents_R / exponents_R[-1])


def _llama3(frequencies_R: Tensor, exponents_R: Tensor, model: ModelConfig, scaling: RopeScaling) -> Tensor:
    """Scale frequencies like Llama 3.1 (arXiv:2407.21783 and its reference code).

    How much a frequency is scaled depends on its number of rotations within the original context.
    """
    assert scaling.original_sequence_length is not None
    rotations_R = frequencies_R * scaling.original_sequence_length / (2 * math.pi)
    kept_R = ((rotations_R - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(
        0, 1
    )
    return frequencies_R * (kept_R + (1 - kept_R) / scaling.factor)


def _yarn(frequencies_R: Tensor, exponents_R: Tensor, model: ModelConfig, scaling: RopeScaling) -> Tensor:
    """Scale frequencies by YaRN (arXiv:2309.00071).

    Frequencies with more than beta_fast rotations within the original context are unchanged. Frequencies with fewer
    than beta_slow rotations are divided by the factor. Between them, the factor is blended linearly by index.
    """
    assert scaling.original_sequence_length is not None

    def index(rotations: float) -> float:
        """Return the index of the frequency that makes `rotations` rotations within the original context."""
        assert scaling.original_sequence_length is not None
        wavelength = scaling.original_sequence_length / (2 * math.pi * rotations)
        return rotary_dim(model) / 2 * math.log(wavelength) / math.log(model.rope_theta)

    first = max(math.floor(index(scaling.beta_fast)), 0)
    last = min(math.ceil(index(scaling.beta_slow)), rotary_dim(model) - 1)
    place_R = torch.arange(len(frequencies_R), dtype=torch.float64, device=frequencies_R.device)
    slowed_R = ((place_R - first) / max(last - first, 0.001)).clamp(0, 1)
    return frequencies_R * (1 - slowed_R + slowed_R / scaling.factor)


_SLOWED = {"linear": _linear, "ntk": _ntk, "llama3": _llama3, "yarn": _yarn}


def alibi_slopes(heads: int, max_bias: float) -> list[float]:
    """Return the ALiBi slope of each head: 2^(-max_bias·i/n), with i from 1 (arXiv:2108.12409).

    If `heads` is not a power of two, n is the next power of two. Slopes with even i are used first, and the remaining
    heads get slopes with odd i.
    """
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-max_bias * (i + 1) / power) for i in range(power)]
    return slopes if power == heads else (slopes[1::2] + slopes[::2])[:heads]


def local_alibi_slopes(model: ModelConfig, tp: Axis, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the slopes of this rank's heads, (a,)."""
    slopes_A = torch.tensor(alibi_slopes(model.heads, model.alibi_max_bias), device=device, dtype=dtype)
    return slopes_A.chunk(tp.size)[tp.rank]
