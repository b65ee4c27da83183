"""Where a token stands: rotary tables, ALiBi slopes, and positions that restart at documents."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from frontier_llm.config import ModelConfig, RopeScaling
from frontier_llm.config.validate import rotary_dim


@dataclass(frozen=True)
class Positions:
    """What attention needs to know about positions for one microbatch; unused fields are None."""

    rope: tuple[Tensor, Tensor] | None  # cos, sin: (S, R), or (S, B, R) where positions restart
    alibi_slopes_a: Tensor | None
    documents_BS: Tensor | None  # of the whole sequence, whatever part of it this rank holds


def within_document(documents_BS: Tensor) -> Tensor:
    """Position of each token in its own document: [[7,7,8,8,8]] → [[0,1,0,1,2]]."""
    index_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
    starts_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    starts_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return index_S - (index_S * starts_BS).cummax(dim=1).values


def rope_table(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin (S, R) of arXiv:2104.09864; angles in fp64 so that every dtype rounds the same angle."""
    rotated = rotary_dim(model)
    frequencies_R = model.rope_theta ** -(torch.arange(0, rotated, 2, dtype=torch.float64, device=device) / rotated)
    if model.rope_scaling is not None:
        frequencies_R = _slowed(frequencies_R, model.rope_scaling)
    angles_SR = torch.arange(model.sequence_length, dtype=torch.float64, device=device)[:, None] * frequencies_R
    return angles_SR.cos().to(dtype), angles_SR.sin().to(dtype)


def _slowed(frequencies_R: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's frequencies (arXiv:2407.21783 and its reference code): by how often each turns within the original context."""
    turns_R = frequencies_R * scaling.original_sequence_length / (2 * math.pi)
    kept_R = ((turns_R - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return frequencies_R * (kept_R + (1 - kept_R) / scaling.factor)


def alibi_slopes(heads: int, max_bias: float) -> list[float]:
    """Slope of each head (arXiv:2108.12409): 2^(-max_bias·i/n); heads past a power of two take the odd ones of the next."""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-max_bias * (i + 1) / power) for i in range(power)]
    return slopes if power == heads else (slopes[1::2] + slopes[::2])[:heads]
