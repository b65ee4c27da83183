"""Tests which ranks read data: the first and last pipeline stages read their samples, and the stages between them read
none.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from frontier_llm.comm import Ledger, serial_mesh
from frontier_llm.data.loader import SampleBatch
from frontier_llm.parallel.tensor import mean_over_global_batch
from frontier_llm.schedule import Action, Kind
from frontier_llm.training.clock import PhaseClock
from frontier_llm.training.feed import Feed


class Source:
    """Two microbatches of one row of four tokens. Counts the reads."""

    microbatches = 2

    def __init__(self, reset_at_documents: bool) -> None:
        self.reset_at_documents = self.masks_targets = reset_at_documents
        self.reads = 0

    def microbatch(self, step: int, index: int) -> SampleBatch:
        self.reads += 1
        tokens = np.arange(5)[None] + 10 * index + 100 * step
        return (
            SampleBatch(tokens, np.zeros((1, 4), np.int32), np.array([[True, True, False, True]]))
            if self.reset_at_documents
            else SampleBatch(tokens)
        )


def feed(source: Source, is_end: bool) -> Feed:
    return Feed(source, 8, serial_mesh(), torch.device("cpu"), is_end)


def test_an_end_gets_tokens_and_the_next_ones_sequence_first() -> None:
    batch = feed(Source(False), is_end=True).step(2)(1)
    assert batch.tokens_SB is not None and batch.tokens_SB.tolist() == [[210], [211], [212], [213]]
    assert batch.targets_SB is not None and batch.targets_SB.tolist() == [[211], [212], [213], [214]]


@pytest.mark.parametrize("reset_at_documents, reads", [(False, 0), (True, 1)])
def test_a_middle_stage_reads_only_where_documents_cut_attention(reset_at_documents: bool, reads: int) -> None:
    source = Source(reset_at_documents)
    batch = feed(source, is_end=False).microbatch(0, 0, 8)
    assert source.reads == reads
    assert (batch.documents_BS is not None) == reset_at_documents


def test_targets_are_counted_without_reading_unless_some_are_masked() -> None:
    plain = Source(False)
    masked = Source(True)
    assert feed(plain, is_end=True).count_targets(0) == 8 and plain.reads == 0
    assert feed(masked, is_end=True).count_targets(0) == 6 and masked.reads == 2


def test_a_step_is_fed_without_reading_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the host would wait for all queued work. Reading a tensor without memory raises an error here."""
    monkeypatch.setattr(
        Feed, "_tensor", lambda feed, array: torch.from_numpy(np.ascontiguousarray(array)).to(feed._device)
    )
    batch = Feed(Source(True), 8, serial_mesh(), torch.device("meta")).step(0)(1)
    assert (
        isinstance(batch.global_targets, torch.Tensor)
        and batch.global_targets.is_meta
        and batch.global_targets.shape == ()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_is_the_same_whether_a_number_or_a_tensor_divides_it(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    for count in (1, 3, 8191, 2**24 + 1, 2**31 + 7, 18_874_367):
        losses = [torch.rand(64, 2, generator=generator, dtype=dtype).requires_grad_()]
        losses.append(losses[0].detach().clone().requires_grad_())
        means = [
            mean_over_global_batch(loss, total)
            for loss, total in zip(losses, (count, torch.tensor(count)), strict=True)
        ]
        for mean in means:
            mean.backward()
        assert means[0].dtype == means[1].dtype == dtype and torch.equal(*means)
        assert torch.equal(losses[0].grad, losses[1].grad)


def test_a_feed_announces_each_read_and_its_end() -> None:
    source = Source(False)
    reader = feed(source, is_end=True)
    events: list[tuple[int | None, int]] = []
    reader.on_read = lambda index: events.append((index, source.reads))
    reader.microbatch(0, 1, 8)
    assert events == [(1, 0), (None, 1)]
    middle = feed(source, is_end=False)
    middle.on_read = lambda index: events.append((index, source.reads))
    middle.microbatch(0, 0, 8)
    assert len(events) == 2  # no sample was read


def test_time_of_reading_counts_as_data_and_not_as_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    source = Source(False)
    read = source.microbatch

    def slow_read(step: int, index: int) -> SampleBatch:
        nonlocal now_s
        now_s += 5.0
        return read(step, index)

    monkeypatch.setattr(source, "microbatch", slow_read)
    reader = feed(source, is_end=True)
    phases = PhaseClock(Ledger())
    phases.attach(SimpleNamespace(pipeline=SimpleNamespace(), feed=reader))
    phases.on_action(Action(Kind.FORWARD, 0, 0))
    now_s += 1.0
    reader.microbatch(0, 0, 8)
    now_s += 2.0
    phases.on_action(None)
    seconds = phases.take()
    assert (seconds["data"], seconds["forward"]) == (5.0, 3.0)
