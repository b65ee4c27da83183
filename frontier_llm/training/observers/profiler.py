"""Observer that writes a torch.profiler trace of some steps, and the device's memory history (`train.profile`).

In the trace, a named range marks each action of the pipeline engine and the optimizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from frontier_llm import log
from frontier_llm.comm.ranges import label
from frontier_llm.config import RunConfig
from frontier_llm.files import folder_below
from frontier_llm.schedule import Action
from frontier_llm.training.observers import Observer

if TYPE_CHECKING:
    from frontier_llm.training.build import TrainState
    from frontier_llm.training.step import StepResult


class Profiler(Observer):
    """Writes a trace such as `profile/steps_10-12_rank_00000.json.gz` on each rank that `train.profile` names.

    Perfetto and chrome://tracing can open the trace.
    """

    def __init__(self, config: RunConfig) -> None:
        assert config.train.profile is not None
        self._chosen = config.train.profile
        self._directory = Path(config.train.run_dir) / "profile"
        self._profile: torch.profiler.profile | None = None
        self._phase: Any = None
        self._watched: Any = None  # the engine's former `on_action`; the trace calls it too

    def before_step(self, state: TrainState) -> None:
        """Start the trace at the first step to be profiled. After a resume, start at the first of these steps that is
        still to come.
        """
        is_chosen = state.current_step + 1 in self._chosen.range and state.mesh.world.rank in self._chosen.ranks
        if self._profile is not None or not is_chosen:
            return
        folder_below(self._directory.parent, self._directory.name)
        if self._chosen.memory_snapshot and state.device.type == "cuda":
            torch.cuda.memory._record_memory_history()  # torch's documentation names this function with the underscore
        activities = [torch.profiler.ProfilerActivity.CPU]
        if state.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._watched = state.pipeline.on_action
        state.pipeline.on_action = self._on_action
        # With overlapped forward and backward, the forward runs in a separate thread (comm/interleaving.py).
        threads = torch.profiler._ExperimentalConfig(profile_all_threads=True)
        self._profile = torch.profiler.profile(activities=activities, profile_memory=True, experimental_config=threads)
        self._profile.start()

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """Write the trace after the last step to be profiled."""
        if self._profile is None or state.current_step < self._chosen.range[-1]:
            return
        self._enter(None)
        state.pipeline.on_action = self._watched
        self._profile.stop()
        name = f"steps_{self._chosen.steps}_rank_{state.mesh.world.rank:05}"
        trace = self._directory / f"{name}.json.gz"
        try:
            self._profile.export_chrome_trace(str(trace))
            if self._chosen.memory_snapshot and state.device.type == "cuda":
                torch.cuda.memory._dump_snapshot(str(self._directory / f"{name}_memory.pickle"))
        except OSError as error:  # a full disk does not end the run
            log.warn(f"the profile of steps {self._chosen.steps} is lost: {error.strerror}")
        else:
            log.info(f"profiled steps {self._chosen.steps}: {trace} (open it in ui.perfetto.dev)")
        if self._chosen.memory_snapshot and state.device.type == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)
        self._profile = None

    def _on_action(self, action: Action | None) -> None:
        if self._watched is not None:
            self._watched(action)
        if action is None:
            self._enter("optimizer")
        elif action.kind.computes:
            self._enter(label(action))

    def _enter(self, phase: str | None) -> None:
        """End the previous named range of the trace. If `phase` is not None, begin a range with this name."""
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
        self._phase = None
        if phase is not None:
            self._phase = torch.profiler.record_function(phase)
            self._phase.__enter__()
