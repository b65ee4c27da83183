"""Tests fp16 training with matrix products that flush subnormals, as MI200 does: numbers below 6.1e-5 become zero.

The tests imitate this in the three products of each linear layer: forward, input gradient and weight gradient.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from frontier_llm.comm import serial_mesh
from frontier_llm.config import PrecisionConfig, RunConfig, build
from frontier_llm.config.validate import fp16_note
from frontier_llm.data.loader import SampleBatch
from frontier_llm.machine.load import load_machine
from frontier_llm.ops import Ops
from frontier_llm.optim import initial_loss_scale
from frontier_llm.run.launchers import RankEnv
from frontier_llm.topology.plan import make_plan
from frontier_llm.training import build as train_build
from frontier_llm.training.device import choose_device
from frontier_llm.training.step import train_step
from tests.harness.gpus import pretend_gpus

VOCAB = 512
SEQUENCE = 32
BATCH = 8
TOKENS = SEQUENCE * BATCH


def flushed(x: Tensor) -> Tensor:
    return x.masked_fill(x.abs() < torch.finfo(torch.float16).tiny, 0.0)


def flushing(ops: Ops) -> Ops:
    """Return the ops with MI200's products. Sums stay in fp32, as on MI200."""

    def linear(x: Tensor, weight_ok: Tensor, bias_o: Tensor | None) -> Tensor:
        y = flushed(ops.linear(flushed(x), flushed(weight_ok), None))
        return y if bias_o is None else y + bias_o

    def linear_input_gradient(grad_output: Tensor, weight_ok: Tensor) -> Tensor:
        return flushed(ops.linear_input_gradient(flushed(grad_output), flushed(weight_ok)))

    def accumulate_weight_gradient_(main_grad_ok: Tensor, grad_output_No: Tensor, x_Nk: Tensor) -> None:
        ops.accumulate_weight_gradient_(main_grad_ok, flushed(grad_output_No), flushed(x_Nk))

    return ops.but(
        linear=linear,
        linear_input_gradient=linear_input_gradient,
        accumulate_weight_gradient_=accumulate_weight_gradient_,
    )


class Source:
    """Nine of ten tokens are determined by the previous token."""

    microbatches = 1
    reset_at_documents = False
    masks_targets = False

    def microbatch(self, step: int, index: int) -> SampleBatch:
        generator = np.random.default_rng(step)
        rows = [generator.integers(0, VOCAB, BATCH)]
        for _ in range(SEQUENCE):
            rows.append(
                np.where(generator.random(BATCH) < 0.9, (5 * rows[-1] + 7) % VOCAB, generator.integers(0, VOCAB, BATCH))
            )
        return SampleBatch(np.stack(rows, axis=1))


def configuration(dtype: str, scale_per_token: float | None = None, batch: int = BATCH) -> RunConfig:
    scale = {} if scale_per_token is None else {"initial_loss_scale": scale_per_token * TOKENS}
    model = {"layers": 2, "hidden": 64, "heads": 4, "ffn_hidden": 256, "vocab_size": VOCAB, "sequence_length": SEQUENCE}
    optimizer = {"lr": 3e-3, "min_lr": 3e-3, "schedule": "constant"}
    rest = {"batch": {"global_batch": batch, "micro_batch": batch}, "train": {"tensorboard": False}}
    return build(RunConfig, {"model": model, "optimizer": optimizer, "precision": {"dtype": dtype, **scale}, **rest})


def trained(
    monkeypatch: pytest.MonkeyPatch, config: RunConfig, flush: bool, steps: int
) -> tuple[list[float], list[float]]:
    """Return losses and gradient norms of a run."""
    with monkeypatch.context() as patch:
        if flush:
            select = train_build.select_run_ops
            patch.setattr(
                train_build, "select_run_ops", lambda *arguments, **names: flushing(select(*arguments, **names))
            )
        state = train_build.build_state(config, make_plan(config, 1), serial_mesh(), torch.device("cpu"), Source())
    results = [train_step(state) for _ in range(steps)]
    assert not any(result.skipped for result in results)
    return [result.loss for result in results], [result.gradient_norm for result in results]


@pytest.mark.thorough
def test_the_loss_scale_decides_what_flushing_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual initial scale of 65536 with a batch of 16 M tokens is 2^-8 per token.

    The package starts at 1024 per token (docs/numerics.md).
    """
    exact, kept, lost, ours = (
        trained(monkeypatch, configuration(dtype, scale), flush, steps=60)
        for dtype, scale, flush in (
            ("fp32", None, False),
            ("fp16", 2.0**-8, False),
            ("fp16", 2.0**-8, True),
            ("fp16", None, True),
        )
    )
    norm = exact[1][0]
    loss = np.mean(exact[0][-10:])
    assert kept[1][0] == pytest.approx(norm, rel=1e-3) and ours[1][0] == pytest.approx(norm, rel=1e-3)
    assert lost[1][0] < 0.95 * norm  # the norm of the first step's gradient is too small
    assert np.mean(kept[0][-10:]) == pytest.approx(loss, abs=0.01) and np.mean(ours[0][-10:]) == pytest.approx(
        loss, abs=0.01
    )
    assert np.mean(lost[0][-10:]) > loss + 0.1


def test_the_first_scale_follows_the_batch_and_is_a_power_of_two() -> None:
    assert initial_loss_scale(configuration("bf16")) == 1.0
    assert initial_loss_scale(configuration("fp16")) == 1024 * TOKENS == 2.0**18
    assert initial_loss_scale(configuration("fp16", batch=9)) == 2.0**19
    assert initial_loss_scale(configuration("fp16", 3.0)) == 3.0 * TOKENS


@pytest.mark.parametrize(
    ("machine", "flushes"), [("frontier", True), ("lumi", True), ("mi250", True), ("mi300x", False), ("h100", False)]
)
def test_only_mi200_flushes(machine: str, flushes: bool) -> None:
    device = load_machine(machine).device
    assert bool(fp16_note(PrecisionConfig(dtype="fp16"), device.flushes_fp16)) == flushes
    assert not fp16_note(PrecisionConfig(dtype="bf16"), device.flushes_fp16)


@pytest.mark.parametrize(
    ("architecture", "dtype", "warned"), [("gfx90a:sramecc+", "fp16", 1), ("gfx942", "fp16", 0), ("gfx90a", "bf16", 0)]
)
def test_a_run_on_such_a_device_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], architecture: str, dtype: str, warned: int
) -> None:
    pretend_gpus(monkeypatch, architecture=architecture)
    for rank in range(2):
        place = RankEnv(rank, 8, rank, 8, "n0", "n0", 23456, "slurm")
        assert choose_device(configuration(dtype), place, None).index == rank
    said = capsys.readouterr().err
    assert said.count("precision.dtype=bf16 is as fast") == warned
