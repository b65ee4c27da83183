"""Log-probabilities: of each token of a text, of continuations of contexts; shared by held-out evaluation, tasks and
lm_eval.
"""

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
    """Of one continuation given its context."""

    log_probability: float  # summed over the continuation's tokens, nats
    greedy: bool  # each of its tokens is the most likely one
    tokens: int
    parts: tuple[float, ...]  # log_probability by equal stretches of the continuation


Pair = tuple[Sequence[int], Sequence[int]]  # tokens of a context and of its continuation


def score(
    model: InferenceModel,
    requests: Sequence[Pair],
    batch_size: int = 8,
    on_batch: Callable[[int], object] = lambda done: None,
    parts: int = 1,
) -> list[Likelihood]:
    """log p(continuation | context) for every (context, continuation), in `parts` equal stretches of the latter.
    Collective over the world; every rank returns all scores.

    What does not fit the context window S is cut from the left. Batches go to the dp replicas in turn; the numbers do
    not depend on the batch size beyond rounding. Raises ConfigError for an empty context or continuation, or a
    continuation longer than S.
    """
    check_requests(model.config, requests)
    window = model.config.sequence_length + 1
    texts = [([*context, *continuation][-window:], len(continuation)) for context, continuation in requests]
    # long ones first: rows of a batch are of like length, and running out of memory happens at once
    order = sorted(range(len(texts)), key=lambda index: (-len(texts[index][0]), index))
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    sums_NP = torch.zeros(len(texts), 1 + parts, dtype=torch.float64)  # whether greedy, and the stretches
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
    """For the last tokens of each text: log p given those before, and whether each was the most likely; (count,) on the
    CPU.

    `counts` None = all but the first token. Logits are made from the first place on that any row needs, not for the
    contexts. Collective over tp and pp; None where no logits come out. Texts have 2 to S + 1 tokens; rows are padded on
    the right, where causal attention never looks.
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
    best_SB = _most_likely(model, logits_SBv, first_vocab)  # before the loss, which may use the logits' memory
    loss_SB, _ = vocab_parallel_cross_entropy(logits_SBv, targets_SB, first_vocab, model.stage.context)
    log_probabilities_BS = -loss_SB.T.cpu()
    greedy_BS = (best_SB == targets_SB).T.cpu()
    spans = [
        (row, slice(start - first, end - first)) for row, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
    return [(log_probabilities_BS[span], greedy_BS[span]) for span in spans]


def _most_likely(model: InferenceModel, logits_SBv: Tensor, first_vocab: int) -> Tensor:
    """Vocabulary id of the highest logit, (S, B); of equal ones the lowest id, as argmax over the whole vocabulary
    has it.
    """
    value_SB, index_SB = logits_SBv.max(-1)
    values_tSB = all_gather(value_SB[None].contiguous(), model.mesh.tp)
    indices_tSB = all_gather((index_SB + first_vocab)[None].contiguous(), model.mesh.tp)
    return indices_tSB.gather(0, values_tSB.argmax(0, keepdim=True))[0]


def check_requests(model: ModelConfig, requests: Sequence[Pair]) -> None:
    """Raises ConfigError for an empty context or continuation, and for what the model's context or vocabulary cannot
    hold.
    """
    S = model.sequence_length
    V = model.vocab_size
    for number, (context, continuation) in enumerate(requests):
        what = fix = ""
        if not context or not continuation:
            what = f"has an empty {'continuation' if context else 'context'}"
            fix = "start a context with the end-of-document token"
        elif len(continuation) > S:
            what = f"a continuation of {len(continuation)} tokens does not fit the model's context of {S}"
        elif (token := outside([*context, *continuation], V)) is not None:
            what = f"holds token {token}, the vocabulary has {V}"
            fix = "use the tokenizer of the training data"
        if what:
            raise ConfigError(what, fix, f"request {number}")


def outside(tokens: Sequence[int], vocabulary: int) -> int | None:
    """A token that a vocabulary of this size does not have; None when it has them all."""
    return next((token for token in (min(tokens), max(tokens)) if not 0 <= token < vocabulary), None)
