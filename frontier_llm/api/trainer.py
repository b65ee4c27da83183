"""`Trainer`, for a training loop that the user writes. Step, optimizer and checkpoints are the same as in `train`. The
tokens come from the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frontier_llm.api.run import Run, load_run
from frontier_llm.checkpoint.checkpoints import Checkpoints
from frontier_llm.data.identity import wanted
from frontier_llm.data.loader import Batches
from frontier_llm.errors import ConfigError, DataError
from frontier_llm.machine.precision import resolve_precision
from frontier_llm.run.rank_env import discover
from frontier_llm.topology.rank_variables import set_rank_variables
from frontier_llm.training.join import joined_state
from frontier_llm.training.progress import job_facts, progress_of, restore
from frontier_llm.training.step import StepResult, train_step


class _Given:
    """The samples of one global batch. The caller passes a new batch for each step."""

    masked = False

    def __init__(self, sequence_length: int, global_batch: int) -> None:
        self.sequence_length = sequence_length
        self.tokens_BS1: NDArray[np.int64] = np.zeros((global_batch, sequence_length + 1), np.int64)

    def fill(self, k: int, tokens_S1: NDArray[np.int64], learnt_S1: Any = None) -> NDArray[np.int64]:
        """Write sample k into `tokens_S1`. The sample is one document."""
        tokens_S1[:] = self.tokens_BS1[k % len(self.tokens_BS1)]
        return np.array([len(tokens_S1)])

    def origin(self, k: int, place: int) -> None:
        """Return None: the tokens come from no dataset."""
        return


class Trainer:
    """The training state of one rank. The rank is started by torchrun or srun, or is the only rank.

    Every method is collective: all ranks call it with the same arguments. The layout is the run's, over the ranks that
    the launcher has started. Watchdogs, signal handlers and metrics exist only in `train`.
    """

    def __init__(self, run: Run | str | Path | Mapping[str, Any]) -> None:
        """Join the ranks and draw the initial weights.

        The run's `data.train` is not read and is recorded as "synthetic", because the caller gives the tokens. Raises
        FrontierError if the layout does not fit the ranks, or if the run has phases.
        """
        run = Run(resolve_precision(load_run(run, {"data.train": "synthetic"}).config))
        if run.config.train.phases:
            what = "a Trainer has one batch size and one sequence length, and no phases"
            raise ConfigError(what, "use one Trainer for each phase, or train()", "train.phases")
        place = discover()
        if place is not None:
            set_rank_variables(run.config, place)
        self.run = run
        self._stack = ExitStack()
        self._state = self._stack.enter_context(joined_state(run.config, place))
        config = self._state.config
        self._given = _Given(config.model.sequence_length, config.batch.global_batch)
        dp = self._state.mesh.dp
        self._source = Batches(
            self._given,
            config.batch.global_batch,
            config.batch.micro_batch,
            dp.rank,
            dp.size,
            vocab_size=config.model.vocab_size,
            read_ahead=0,
        )
        position = self._state.position.enter(wanted(config, {}))
        self._state.enter(self._state.phases[0], self._source, position)
        facts = job_facts(run.config, self._state, {})
        self._checkpoints = Checkpoints(run.config.train, self._state.mesh, self._state.optimizer, facts)

    @property
    def current_step(self) -> int:
        """Number of finished steps."""
        return self._state.current_step

    @property
    def rank(self) -> int:
        """Number of this rank in the world."""
        return self._state.mesh.world.rank

    def step(self, tokens_BS1: Any) -> StepResult:
        """Train one step on a global batch. Returns the loss in nats per token, the gradient norm, and more.

        `tokens_BS1` are token ids, (global batch, sequence length + 1), as a tensor or array. Each rank gets the
        complete batch and trains on its share. Raises FrontierError for another shape, and for ids outside of the
        vocabulary.
        """
        tokens = np.asarray(tokens_BS1, np.int64)
        if tokens.shape != self._given.tokens_BS1.shape:
            raise DataError(
                f"the batch has shape {tokens.shape}, expected {self._given.tokens_BS1.shape}",
                "give (batch.global_batch, model.sequence_length + 1) token ids",
                "Trainer.step",
            )
        self._given.tokens_BS1 = tokens
        return train_step(self._state)

    def save(self) -> Path:
        """Write a checkpoint of this step and wait until it is on disk. Any layout can load it. Returns its folder."""
        step = self.current_step
        self._checkpoints.begin(progress_of(self._state, []))
        self._checkpoints.finish()
        return self._checkpoints.directory / f"step_{step:08d}"

    def restore(self) -> int:
        """Load the newest intact checkpoint of the run directory. Returns its step, or 0 if there is none."""
        progress = self._checkpoints.newest()
        if progress is None:
            return 0
        restore(self._state, progress)
        self._state.enter(self._state.phases[0], self._source, self._state.position)
        return progress.step

    def close(self, wait: bool = True) -> None:
        """Destroy the process groups. A trainer is also a context manager, which calls this at its end.

        With `train.remote`, first wait for the uploads, at most `train.remote_wait_s`. Without `wait` the next trainer
        or run with this run directory continues them. After an exception the context manager does not wait.
        """
        try:
            self._checkpoints.close(verify=wait)
        finally:
            self._stack.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is None)
