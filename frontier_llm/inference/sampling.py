"""From logits to the next token: repetition penalty, temperature, top-k, top-p, min-p, then one draw."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from frontier_llm.errors import ConfigError, Problem


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch these filters off."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # arXiv:1909.05858: > 1 makes tokens that were seen less likely
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()  # end a row; not part of its text

    def __post_init__(self) -> None:
        rules = [
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p < 1, "in [0, 1)"),
            ("repetition_penalty", self.repetition_penalty > 0, "more than 0; 1 is off"),
        ]
        problems = [
            Problem(name, f"{getattr(self, name)} is not {rule}", f"give a value {rule}") for name, holds, rule in rules if not holds
        ]
        if problems:
            raise ConfigError(problems)


class Sampler:
    """Draws for B rows. A row's draws depend on the seed and its own number alone, not on its neighbours in the batch."""

    def __init__(self, sampling: Sampling, row_ids: Sequence[int]) -> None:
        self._sampling = sampling
        self._generators = [torch.Generator().manual_seed(_row_seed(sampling.seed, row)) for row in row_ids]

    def choose(self, logits_BV: Tensor, seen_BV: Tensor) -> Tensor:
        """Next tokens (B), int64. `seen_BV` marks the tokens of each row's context."""
        sampling = self._sampling
        logits_BV = penalise(logits_BV, seen_BV, sampling.repetition_penalty)
        if sampling.temperature == 0:
            return logits_BV.argmax(-1)
        ordered_BV, order_BV = (logits_BV / sampling.temperature).sort(dim=-1, descending=True, stable=True)
        probabilities_BV = keep_likely(ordered_BV, sampling.top_k, sampling.top_p, sampling.min_p)
        cumulative_BV = probabilities_BV.cumsum(-1)
        draws_B = torch.stack([torch.rand((), generator=generator, dtype=torch.float64) for generator in self._generators])
        # below the last kept token's cumulative sum, so that rounding cannot choose a token of probability 0
        thresholds_B1 = draws_B.to(cumulative_BV)[:, None] * cumulative_BV[:, -1:]
        place_B1 = torch.searchsorted(cumulative_BV, thresholds_B1, right=True)
        last_B1 = (probabilities_BV > 0).sum(-1, keepdim=True) - 1
        return order_BV.gather(1, place_B1.minimum(last_B1))[:, 0]


def penalise(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Logits of seen tokens divided by the penalty where positive, multiplied by it where negative (arXiv:1909.05858)."""
    if penalty == 1.0:
        return logits_BV
    return torch.where(seen_BV, torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)


def keep_likely(ordered_BV: Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> Tensor:
    """Probabilities, highest first, with 0 for all but the top k, of these the smallest head whose mass reaches p (arXiv:1904.09751),
    and of these the ones at least min_p times as likely as the first (arXiv:2407.01082).
    """
    if top_k:
        ordered_BV = ordered_BV.clone()
        ordered_BV[:, top_k:] = -torch.inf
    probabilities_BV = ordered_BV.softmax(-1)
    if top_p < 1:
        before_BV = probabilities_BV.cumsum(-1) - probabilities_BV
        probabilities_BV = torch.where(before_BV < top_p, probabilities_BV, 0)
    if min_p:
        probabilities_BV = torch.where(probabilities_BV >= min_p * probabilities_BV[:, :1], probabilities_BV, 0)
    return probabilities_BV


def _row_seed(seed: int, row: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{row}".encode(), digest_size=7).digest(), "little")
