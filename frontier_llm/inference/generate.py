"""Generates tokens: one forward pass over the prompts, then one pass for each new token until every row has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from frontier_llm.comm import broadcast_
from frontier_llm.config import ModelConfig
from frontier_llm.errors import ConfigError, Problem
from frontier_llm.inference.cache import KeyValueCache
from frontier_llm.inference.model import InferenceModel
from frontier_llm.inference.sampling import Sampler, Sampling
from frontier_llm.inference.score import outside


@torch.inference_mode()
def stream(
    model: InferenceModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    use_cache: bool = True,
    first_row: int = 0,
) -> Iterator[list[int | None]]:
    """Yield the new tokens of all rows, one list per pass. The entry of a row that has ended is None.

    A stop token is yielded too. Row n draws the same random numbers as row `first_row` + n of one large batch.
    Raises ConfigError if a prompt is empty, fills the context, or holds a token outside the vocabulary.
    """
    check_prompts(model.config, prompts)
    batch = _Batch(model, prompts, sampling)
    cache = model.new_cache(len(prompts), batch.slots) if use_cache else None
    sampler = Sampler(sampling, range(first_row, first_row + len(prompts)))
    while not all(batch.ended):
        x_BH = batch.last_hidden(cache)
        tokens_B = torch.zeros(len(prompts), dtype=torch.int64, device=model.device)
        if x_BH is not None:
            logits_BV = model.whole_logits(x_BH[None])[0]
            tokens_B = sampler.choose(logits_BV.cpu(), batch.seen_BV).to(model.device)
            broadcast_(tokens_B, model.mesh.tp, 0)
        yield batch.append(broadcast_(tokens_B, model.mesh.pp, model.mesh.pp.size - 1))


class _Batch:
    """Rows of unequal length, padded on the right."""

    def __init__(self, model: InferenceModel, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        self.model = model
        self.sampling = sampling
        self.lengths = [len(prompt) for prompt in prompts]
        self.limits = [min(length + sampling.max_new_tokens, model.config.sequence_length) for length in self.lengths]
        self.ended = [length >= limit for length, limit in zip(self.lengths, self.limits, strict=True)]
        self.slots = max(self.limits)
        self.tokens_SB = torch.zeros(self.slots, len(prompts), dtype=torch.int64)
        self.seen_BV = torch.zeros(len(prompts), model.config.vocab_size, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            self.tokens_SB[: len(prompt), row] = torch.tensor(prompt)
            self.seen_BV[row, list(prompt)] = True

    def last_hidden(self, cache: KeyValueCache | None) -> Tensor | None:
        """Return the hidden state (B, H) of each row's last token on the last stage, None on other stages.

        With a filled cache only these tokens pass through the model.
        """
        device = self.model.device
        last_B = torch.tensor(self.lengths) - 1
        if cache is not None and not cache.is_empty:
            tokens_1B = self.tokens_SB.gather(0, last_B[None]).to(device)
            x_1BH = self.model.hidden(tokens_1B, last_B[None].to(device), cache)
            return None if x_1BH is None else x_1BH[0]
        tokens_SB = self.tokens_SB[: max(self.lengths)].to(device)
        positions_SB = torch.arange(len(tokens_SB), device=device)[:, None].expand_as(tokens_SB)
        x_SBH = self.model.hidden(tokens_SB, positions_SB, cache)
        return None if x_SBH is None else x_SBH[last_B, torch.arange(len(self.lengths))]

    def append(self, tokens_B: Tensor) -> list[int | None]:
        """Add one token to each row that has not ended. Returns the added token of each row, None for ended rows."""
        new = [None if ended else token for ended, token in zip(self.ended, tokens_B.tolist(), strict=True)]
        for row, token in enumerate(new):
            if token is not None:
                self.tokens_SB[self.lengths[row], row] = token
                self.seen_BV[row, token] = True
                self.lengths[row] += 1
                self.ended[row] = token in self.sampling.stop_tokens or self.lengths[row] >= self.limits[row]
        return new


def check_prompts(model: ModelConfig, prompts: Sequence[Sequence[int]]) -> None:
    """Raise ConfigError with every prompt that is empty, fills the context, or has a token outside the vocabulary."""
    problems = []
    S = model.sequence_length
    V = model.vocab_size
    for row, prompt in enumerate(prompts):
        where = f"prompt {row}"
        if not prompt:
            problems.append(
                Problem(
                    where=where,
                    what="contains no token",
                    fix="start it with the end-of-document token, or give some text",
                )
            )
        elif len(prompt) >= S:
            problems.append(
                Problem(
                    where=where,
                    what=f"has {len(prompt)} tokens, which leaves no space for new ones in a context of {S}",
                    fix=f"give at most {S - 1} tokens",
                )
            )
        if prompt and (token := outside(prompt, V)) is not None:
            problems.append(
                Problem(
                    where=where,
                    what=f"contains the token id {token}, but the vocabulary has {V} ids",
                    fix="use the tokenizer of the training data",
                )
            )
    if problems or not prompts:
        raise ConfigError(problems or "there is no prompt", fix="give at least one prompt")
