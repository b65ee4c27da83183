"""Log-probabilities of tokens and of continuations, for held-out evaluation, tasks and lm_eval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from frontier_llm.comm import all_gather, all_reduce_
from frontier_llm.config import ModelConfig
from frontier_llm.errors import ConfigError
from frontier_llm.inference.model import InferenceModel
from frontier_llm.parallel.tensor import vocab_parallel_cross_entropy


@dataclass(frozen=True)
class Likelihood:
    """Log-probability of one continuation given its context."""

    log_probability: float  # sum over the continuation's tokens, in nats
    greedy: bool  # True if each token of the continuation is the most likely one
    tokens: int
    parts: tuple[float, ...]  # log_probability of each of several equal parts of the continuation


Pair = tuple[Sequence[int], Sequence[int]]  # tokens of a context and of its continuation


def score(
    model: InferenceModel,
    requests: Sequence[Pair],
    batch_size: int = 8,
    on_batch: Callable[[int], object] = lambda done: None,
    parts: int = 1,
) -> list[Likelihood]:
    """Return log p(continuation | context) of every (context, continuation), also split into `parts` equal parts.

    Collective over the world. Every rank returns all scores. A context that exceeds S + 1 tokens together with its
    continuation is cut from the left.
    Batches are distributed over the dp replicas. Except for rounding, the result does not depend on the batch size.
    Raises ConfigError if a context or continuation is empty, or a continuation is longer than S.
    """
    check_requests(model.config, requests)
    window = model.config.sequence_length + 1
    texts = [([*context, *continuation][-window:], len(continuation)) for context, continuation in requests]
    # sort longest first: the rows of a batch then have similar lengths, and if memory is too small, the first batch
    # fails
    order = sorted(range(len(texts)), key=lambda index: (-len(texts[index][0]), index))
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    # columns: greedy flag, then the log-probability of each part
    sums_NP = torch.zeros(len(texts), 1 + parts, dtype=torch.float64)
    for number, batch in enumerate(batches):
        if number % model.mesh.dp.size != model.mesh.dp.rank:
            continue
        rows = token_scores(model, [texts[index][0] for index in batch], [texts[index][1] for index in batch])
        if rows is not None and model.mesh.tp.rank == 0:
            for index, (log_probabilities, greedy) in zip(batch, rows, strict=True):
                sums_NP[index, 0] = float(greedy.all())
                sums_NP[index, 1:] = torch.stack(
                    [part.sum(dtype=torch.float64) for part in log_probabilities.tensor_split(parts)]
                )
        on_batch(number + 1)
    total = all_reduce_(sums_NP.to(model.device), model.mesh.world).tolist()
    return [
        Likelihood(sum(values), bool(greedy), texts[index][1], tuple(values))
        for index, (greedy, *values) in enumerate(total)
    ]


@torch.inference_mode()
def token_scores(
    model: InferenceModel,
    texts: Sequence[Sequence[int]],
    counts: Sequence[int] | None = None,
) -> list[tuple[Tensor, Tensor]] | None:
    """Return log p and whether the token was the most likely, for the last tokens of each text.

    `counts` has the number of last tokens of each text. If it is None, all tokens but the first are scored. Both
    tensors have the shape (count,) and are on the CPU. Logits are computed only from the first position that a row
    needs. Collective over tp and pp. Stages without logits return None. Texts have 2 to S + 1 tokens. Rows are padded
    on the right. Causal attention never attends to this padding.
    """
    longest = max(map(len, texts))
    padded_BS1 = torch.zeros(len(texts), longest, dtype=torch.int64)
    for row, text in enumerate(texts):
        padded_BS1[row, : len(text)] = torch.tensor(text)
    ends = [len(text) - 1 for text in texts]
    starts = [0] * len(texts) if counts is None else [end - count for end, count in zip(ends, counts, strict=True)]
    first = min(starts)
    tokens_SB = padded_BS1[:, :-1].T.contiguous().to(model.device)
    targets_SB = padded_BS1[:, first + 1 :].T.contiguous().to(model.device)
    x_SBH = model.hidden(tokens_SB)
    if x_SBH is None:
        return None
    logits_SBv = model.stage.logits(x_SBH[first:])
    first_vocab = model.config.padded_vocab_size // model.mesh.tp.size * model.mesh.tp.rank
    best_SB = _most_likely(model, logits_SBv, first_vocab)  # called before the loss, which may overwrite the logits
    loss_SB, _ = vocab_parallel_cross_entropy(logits_SBv, targets_SB, first_vocab, model.stage.context)
    log_probabilities_BS = -loss_SB.T.cpu()
    greedy_BS = (best_SB == targets_SB).T.cpu()
    spans = [
        (row, slice(start - first, end - first)) for row, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
    return [(log_probabilities_BS[span], greedy_BS[span]) for span in spans]


def _most_likely(model: InferenceModel, logits_SBv: Tensor, first_vocab: int) -> Tensor:
    """Return the vocabulary id of the highest logit, (S, B).

    If logits are equal, the lowest id is returned, as by an argmax over the complete vocabulary.
    """
    value_SB, index_SB = logits_SBv.max(-1)
    values_tSB = all_gather(value_SB[None].contiguous(), model.mesh.tp)
    indices_tSB = all_gather((index_SB + first_vocab)[None].contiguous(), model.mesh.tp)
    return indices_tSB.gather(0, values_tSB.argmax(0, keepdim=True))[0]


def check_requests(model: ModelConfig, requests: Sequence[Pair]) -> None:
    """Raise ConfigError if a context or continuation is empty or does not fit the model's context or vocabulary."""
    S = model.sequence_length
    V = model.vocab_size
    for number, (context, continuation) in enumerate(requests):
        what = fix = ""
        if not context or not continuation:
            what = f"has an empty {'continuation' if context else 'context'}"
            fix = "start a context with the end-of-document token"
        elif len(continuation) > S:
            what = f"has a continuation of {len(continuation)} tokens, more than the model's context of {S}"
        elif (token := outside([*context, *continuation], V)) is not None:
            what = f"contains the token id {token}, but the vocabulary has {V} ids"
            fix = "use the tokenizer of the training data"
        if what:
            raise ConfigError(what, fix, f"request {number}")


def outside(tokens: Sequence[int], vocabulary: int) -> int | None:
    """Return a token outside a vocabulary of this size, or None if there is none."""
    return next((token for token in (min(tokens), max(tokens)) if not 0 <= token < vocabulary), None)
