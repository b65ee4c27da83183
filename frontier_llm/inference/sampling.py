"""Chooses the next token from logits: repetition penalty, temperature, top-k, top-p, min-p, then one random draw."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from frontier_llm.errors import ConfigError, FrontierError, Problem

# number of tokens that are sorted first; while a filter keeps all sorted tokens, 16 times as many are sorted
CANDIDATES = 1024
LOWEST_TEMPERATURE = 1e-6  # logits divided by a much lower temperature overflow


@dataclass(frozen=True)
class Sampling:
    """Rules by which tokens are chosen. temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 disable the filters."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # arXiv:1909.05858; a value > 1 makes seen tokens less likely
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()  # these tokens end a row and are not part of its text

    def __post_init__(self) -> None:
        rules = [
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            (
                "temperature",
                self.temperature == 0 or self.temperature >= LOWEST_TEMPERATURE,
                f"0 (greedy), or {LOWEST_TEMPERATURE} or more",
            ),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p < 1, "in [0, 1)"),
            ("repetition_penalty", self.repetition_penalty > 0, "more than 0; 1 is off"),
        ]
        problems = [
            Problem(where=name, what=f"{getattr(self, name)} is not {rule}", fix=f"give a value {rule}")
            for name, holds, rule in rules
            if not holds
        ]
        if problems:
            raise ConfigError(problems)


class Sampler:
    """Random draws for B rows. A row's draws depend only on the seed and the row's number, not on the batch."""

    def __init__(self, sampling: Sampling, row_ids: Sequence[int]) -> None:
        self._sampling = sampling
        digests = [hashlib.blake2b(f"{sampling.seed}:{row}".encode(), digest_size=7).digest() for row in row_ids]
        self._generators = [torch.Generator().manual_seed(int.from_bytes(digest, "little")) for digest in digests]

    def choose(self, logits_BV: Tensor, seen_BV: Tensor) -> Tensor:
        """Return the next tokens (B), int64. `seen_BV` marks the tokens in each row's context.

        Raises FrontierError if the logits are not finite, for example because a weight is NaN.
        """
        if not bool(logits_BV.amax(-1).isfinite().all()):
            raise FrontierError(
                "the model's logits are not finite",
                fix="use --dtype fp32, or an earlier checkpoint",
            )
        sampling = self._sampling
        logits_BV = penalise(logits_BV, seen_BV, sampling.repetition_penalty)
        if sampling.temperature == 0:
            return logits_BV.argmax(-1)
        order_BK, probabilities_BK = self._kept(logits_BV / sampling.temperature)
        cumulative_BK = probabilities_BK.cumsum(-1)
        draws_B = torch.stack(
            [torch.rand((), generator=generator, dtype=torch.float64) for generator in self._generators]
        )
        # the draw is scaled by the rounded sum of all kept probabilities, so that no token of probability 0 is chosen
        thresholds_B1 = draws_B.to(cumulative_BK)[:, None] * cumulative_BK[:, -1:]
        place_B1 = torch.searchsorted(cumulative_BK, thresholds_B1, right=True)
        return order_BK.gather(1, place_B1.minimum(_last(probabilities_BK)))[:, 0]

    def _kept(self, scaled_BV: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids of the K most likely tokens, most likely first, and their probabilities.

        Tokens that a filter drops have probability 0. K is large enough to contain all kept tokens.
        """
        sampling = self._sampling
        V = scaled_BV.shape[1]
        log_total_B1 = scaled_BV.logsumexp(-1, keepdim=True)
        width = max(CANDIDATES, sampling.top_k + 1)
        while True:
            order_BK = _likeliest(scaled_BV, min(width, V))
            ordered_BK = scaled_BV.gather(1, order_BK)
            probabilities_BK = keep_likely(ordered_BK, sampling.top_k, sampling.top_p, sampling.min_p, log_total_B1)
            # Sort more tokens in two cases: the filters may also keep tokens beyond these K, or a token beyond K may
            # have the same logit as the last kept token.
            if width >= V or bool((ordered_BK.gather(1, _last(probabilities_BK)) > ordered_BK[:, -1:]).all()):
                return order_BK, probabilities_BK
            width *= 16


def _last(probabilities_BK: Tensor) -> Tensor:
    """Return the index of the last token with a probability above 0 in each row, (B, 1)."""
    return (probabilities_BK > 0).sum(-1, keepdim=True) - 1


def _likeliest(logits_BV: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` highest logits, highest first. Equal logits are ordered by id."""
    if count == logits_BV.shape[1]:
        return logits_BV.argsort(dim=-1, descending=True, stable=True)
    ids_BK = logits_BV.topk(count).indices.sort(-1).values
    return ids_BK.gather(1, logits_BV.gather(1, ids_BK).argsort(dim=-1, descending=True, stable=True))


def penalise(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Divide positive logits of seen tokens by the penalty and multiply negative ones by it (arXiv:1909.05858)."""
    if penalty == 1.0:
        return logits_BV
    return torch.where(seen_BV, torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)


def keep_likely(ordered_BK: Tensor, top_k: int, top_p: float, min_p: float, log_total_B1: Tensor) -> Tensor:
    """Return probabilities, highest first, with 0 for the dropped tokens.

    The first filter keeps the top k tokens. The second filter keeps the fewest tokens whose probabilities add up to
    top_p (arXiv:1904.09751). The third filter keeps tokens that are at least min_p times as likely as the most likely
    token (arXiv:2407.01082). `ordered_BK` holds the highest logits in order. `log_total_B1` is the logsumexp of all
    logits.
    """
    if top_k:
        ordered_BK = ordered_BK.clone()
        ordered_BK[:, top_k:] = -torch.inf
        log_total_B1 = ordered_BK.logsumexp(-1, keepdim=True)
    probabilities_BK = (ordered_BK - log_total_B1).exp()
    if top_p < 1:
        before_BK = probabilities_BK.cumsum(-1) - probabilities_BK
        probabilities_BK = torch.where(before_BK < top_p, probabilities_BK, 0)
    if min_p:
        probabilities_BK = torch.where(probabilities_BK >= min_p * probabilities_BK[:, :1], probabilities_BK, 0)
    return probabilities_BK
