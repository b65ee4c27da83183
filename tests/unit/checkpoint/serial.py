"""Writes checkpoints of a tiny model in one process. The values of the states encode the step."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from frontier_llm import failpoints
from frontier_llm.checkpoint.checkpoints import Checkpoints
from frontier_llm.checkpoint.facts import JobFacts
from frontier_llm.checkpoint.manifest import Progress
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
    def __init__(
        self,
        directory: Path,
        dtype: str = "bf16",
        config: RunConfig = CONFIG,
        keep_every: int = 0,
        lag_steps: int | None = None,
        allow_changes: Collection[str] = (),
        remote: str | None = None,
        on_wait: Callable[[], object] = lambda: None,
        **facts: Any,
    ) -> None:
        mesh = serial_mesh()
        self.buckets = buckets_of(TINY, Layout(dtype=dtype), 0)
        self.optimizer = Zero(self.buckets, OptimizerConfig(), select_ops(OpsConfig(), "cpu", torch.float32))
        policy = {"run_dir": str(directory), "keep_every": keep_every, "save_lag_steps": lag_steps, "remote": remote}
        train = config.train.model_copy(update=policy)
        job = JobFacts(config.model_dump(mode="json"), **facts)
        self.checkpoints = Checkpoints(train, mesh, self.optimizer, job, allow_changes, on_wait)

    def fill(self, step: int) -> None:
        for number, state in enumerate(self.optimizer.states):
            for kind_number, tensor in enumerate(state.values()):
                tensor.copy_(torch.arange(tensor.numel()) * 0.25 + step * 1000 + number * 10 + kind_number)
            self.buckets[number].own(self.buckets[number].weights).copy_(state["master"])
        self.optimizer.updates = step

    def save(self, *steps: int) -> None:
        for step in steps:
            self.fill(step)
            self.checkpoints.begin(progress(step))
            self.checkpoints.finish()

    def check(self, step: int) -> None:
        """Assert that optimizer and weights have the values of `fill(step)`."""
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
    """Run `work` in a forked process with a failpoint armed. Return the exit code (negative for a signal)."""
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
