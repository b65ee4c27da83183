"""A CheckpointManager of one process over a tiny model, with states that say which step they are of."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from frontier_llm import failpoints
from frontier_llm.checkpoint import CheckpointManager, Progress
from frontier_llm.comm import serial_mesh
from frontier_llm.config import BatchConfig, OpsConfig, OptimizerConfig, RunConfig
from frontier_llm.ops import select_ops
from frontier_llm.optim import Zero
from tests.unit.checkpoint.simulated import TINY, Layout, buckets_of

CONFIG = RunConfig(model=TINY, batch=BatchConfig(global_batch=8))


def progress(step: int) -> Progress:
    return Progress(
        step=step,
        consumed_samples=step * 8,
        tokens=step * 256,
        optimizer_updates=step,
        loss_scale=1.0,
        scaler_clean_steps=0,
        skipped_steps=0,
    )


class Run:
    """One start of a run."""

    def __init__(self, directory: Path, dtype: str = "bf16", **options: object) -> None:
        mesh = serial_mesh()
        self.buckets = buckets_of(TINY, Layout(dtype=dtype), 0)
        self.optimizer = Zero(self.buckets, OptimizerConfig(), select_ops(OpsConfig(), "cpu", torch.float32))
        settings = {"config": CONFIG, "keep": 2, **options}
        self.manager = CheckpointManager(directory / "checkpoints", mesh, self.optimizer, **settings)

    def fill(self, step: int) -> None:
        for number, state in enumerate(self.optimizer.states):
            for kind_number, tensor in enumerate(state.values()):
                tensor.copy_(torch.arange(tensor.numel()) * 0.25 + step * 1000 + number * 10 + kind_number)
            self.buckets[number].own(self.buckets[number].weights).copy_(state["master"])
        self.optimizer.updates = step

    def save(self, *steps: int) -> None:
        for step in steps:
            self.fill(step)
            self.manager.save(progress(step))
            self.manager.wait()

    def check(self, step: int) -> None:
        """Optimizer and weights are those of `fill(step)`."""
        assert self.optimizer.updates == step
        for number, (bucket, state) in enumerate(zip(self.buckets, self.optimizer.states, strict=True)):
            inside = torch.zeros(bucket.weights.numel(), dtype=torch.bool)
            for run in bucket.owned_ranges():
                inside[run.position : run.position + run.stop - run.start] = True
            for kind_number, (kind, tensor) in enumerate(state.items()):
                expected = torch.arange(tensor.numel()) * 0.25 + step * 1000 + number * 10 + kind_number
                assert torch.equal(tensor[inside], expected[inside].to(tensor.dtype)), kind
            assert torch.equal(bucket.weights[inside], state["master"][inside].to(bucket.weights.dtype))


def in_child(work: Callable[[], None], failpoint: str = "") -> int:
    """Run in a forked process with a failpoint armed; its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            failpoints.arm(failpoint)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
