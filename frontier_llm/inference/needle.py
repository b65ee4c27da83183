"""Tests how well a model recalls earlier text: random tokens, the needle, are hidden in held-out text.

The needle's first half is repeated at the end of the text, and the model predicts the second half. The test needs no
tokenizer and no language. The second half cannot be guessed. A correct prediction therefore shows that the model
attended to the needle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from frontier_llm.data.indexed import IndexedDataset
from frontier_llm.errors import DataError
from frontier_llm.inference.model import InferenceModel
from frontier_llm.inference.score import score

HALF = 4  # tokens of a needle's key and of its value
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # 0: at the beginning of the text, 1: directly before the repeated half


@dataclass(frozen=True)
class Recall:
    """Recall of the needles at one depth in texts of one length."""

    length: int  # tokens, with question and answer
    depth: float  # place of the needles in the text: 0 = beginning, 1 = end
    needles: int
    found: float  # share of needles whose tokens all were the model's first choice
    loss: float  # nats per token of the answers; log(vocabulary) for random guesses


def lengths_up_to(window: int) -> list[int]:
    """Return the window and its halves down to 1024 tokens, smallest first. A smaller window is returned alone."""
    lengths = [window]
    while lengths[-1] // 2 >= 1024:
        lengths.append(lengths[-1] // 2)
    return lengths[::-1]


def needles(
    model: InferenceModel,
    prefix: str,
    samples: int,
    batch_size: int = 1,
    on_batch: Callable[[int], object] = lambda done: None,
) -> list[Recall]:
    """Return the recall by length and depth, from `samples` needles each, in different texts.

    Collective over the world. Raises DataError if the dataset has too little text.
    """
    dataset = IndexedDataset(prefix)
    window = model.config.sequence_length
    lengths = lengths_up_to(window)
    room = lengths[0] - 4 * HALF
    if room < 1 or dataset.token_count < window:
        what = (
            f"has {dataset.token_count} tokens, but the text around the needles needs {window}; the model's context of "
            f"{window} must be at least {4 * HALF + 1}"
        )
        raise DataError(what, where=prefix, fix="give a larger dataset, or a model with a longer context")
    cells = list(product(lengths, DEPTHS))
    requests = [_request(dataset, model.config.vocab_size, cell, sample) for cell in cells for sample in range(samples)]
    answers = score(model, requests, batch_size, on_batch)
    recalls = []
    for index, (length, depth) in enumerate(cells):
        mine = answers[index * samples : (index + 1) * samples]
        loss = -sum(answer.log_probability for answer in mine) / (samples * HALF)
        recalls.append(Recall(length, depth, samples, sum(answer.greedy for answer in mine) / samples, loss))
    return recalls


def _request(
    dataset: IndexedDataset,
    vocabulary: int,
    cell: tuple[int, float],
    sample: int,
) -> tuple[Sequence[int], Sequence[int]]:
    """Return (text with a needle and the repeated key, value).

    The result depends only on length, depth and `sample`.
    """
    length, depth = cell
    filler = length - 4 * HALF
    draw = np.random.default_rng([length, round(100 * depth), sample])
    needle = draw.integers(0, vocabulary, 2 * HALF).tolist()
    start = int(draw.integers(0, dataset.token_count - filler + 1))
    text = np.asarray(dataset.tokens[start : start + filler], np.int64).tolist()
    place = round(depth * filler)
    return [*text[:place], *needle, *text[place:], *needle[:HALF]], needle[HALF:]
