"""Held-out loss, perplexity and bits per byte of a token dataset."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from frontier_llm.data.indexed import IndexedDataset
from frontier_llm.data.meta import read_meta
from frontier_llm.errors import DataError
from frontier_llm.inference.model import InferenceModel
from frontier_llm.inference.score import outside, score


@dataclass(frozen=True)
class HeldOut:
    """Losses on a dataset, as means over its targets."""

    dataset: str
    tokens: int  # number of scored targets
    loss: float  # nats per token
    bits_per_byte: float | None  # None if the text's size was not recorded with the dataset
    by_position: tuple[float, ...] = ()  # loss in equal parts of the window, first to last

    @property
    def perplexity(self) -> float:
        """exp(loss), or inf if it overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def held_out(
    model: InferenceModel,
    prefix: str,
    windows: int = 0,
    batch_size: int = 8,
    on_batch: Callable[[int], object] = lambda done: None,
    positions: int = 1,
) -> HeldOut:
    """Score a dataset's tokens in order, in windows of S targets. The context of a target is the part of its window
    before it.

    `windows` is the number of windows (0: all). Fewer windows are evenly spaced over the dataset. The loss is also
    returned for `positions` equal parts of the windows. Collective over the world. Raises DataError if the dataset has
    less than one window or tokens outside the vocabulary.
    """
    dataset = IndexedDataset(prefix)
    S = model.config.sequence_length
    dataset.check_token_ids()
    available = max(0, dataset.token_count - 1) // S
    if available == 0:
        raise DataError(
            f"has {dataset.token_count} tokens, less than one window of {S} + 1",
            where=prefix,
            fix="give a larger dataset",
        )
    count = min(windows or available, available)
    places = [index * available // count * S for index in range(count)]
    texts = [np.asarray(dataset.tokens[place : place + S + 1], np.int64).tolist() for place in places]
    if (
        token := outside([edge for text in texts for edge in (min(text), max(text))], model.config.vocab_size)
    ) is not None:
        what = f"contains the token id {token}, but the model's vocabulary has {model.config.vocab_size} ids"
        raise DataError(what, where=prefix, fix="tokenize the text with the model's own tokenizer")
    scores = score(model, [(text[:1], text[1:]) for text in texts], batch_size, on_batch, positions)
    tokens = sum(entry.tokens for entry in scores)
    loss = -math.fsum(entry.log_probability for entry in scores) / tokens
    sizes = [len(part) for part in np.array_split(np.arange(S), positions)]
    by_position = [
        -math.fsum(entry.parts[part] for entry in scores) / (len(scores) * size) for part, size in enumerate(sizes)
    ]
    meta = read_meta(prefix)
    bits = loss / math.log(2) / meta.bytes_per_token if meta is not None and meta.text_bytes else None
    return HeldOut(prefix, tokens, loss, bits, tuple(by_position))


def draw_by_position(losses: Sequence[HeldOut], window: int, path: Path) -> None:
    """Draw the loss against a token's position in the window, with one line per dataset."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    for entry in losses:
        middles = [(part + 0.5) * window / len(entry.by_position) for part in range(len(entry.by_position))]
        axes.plot(middles, entry.by_position, marker=".", label=Path(entry.dataset).name)
    axes.set(xlabel="position in the window, tokens", ylabel="loss, nats per token", xlim=(0, window))
    axes.legend()
    figure.savefig(path, dpi=120)
