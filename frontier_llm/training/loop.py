"""The training loop of a rank: join the other ranks, resume, train until the last step or a signal, evaluate, save."""

from __future__ import annotations

import faulthandler
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from frontier_llm import failpoints, log
from frontier_llm.checkpoint.checkpoints import Checkpoints
from frontier_llm.checkpoint.directory import is_there
from frontier_llm.checkpoint.facts import checkpoints_folder
from frontier_llm.checkpoint.save import Saved
from frontier_llm.comm import StragglerWatch, maximum
from frontier_llm.config import RunConfig, RunPhase, dump, phase_at, phases_of, plugins, resolved
from frontier_llm.data.identity import wanted
from frontier_llm.data.loader import Batches, open_batches, open_run_batches
from frontier_llm.data.summary import news
from frontier_llm.errors import ConfigError, suggest
from frontier_llm.failpoints import hit
from frontier_llm.files import write_atomically
from frontier_llm.machine.precision import resolve_precision
from frontier_llm.ops import working_dtype
from frontier_llm.optim import GradientSync, draw_masters
from frontier_llm.run.launchers import RankEnv
from frontier_llm.run.rank_env import environ, node_name, start_number
from frontier_llm.run.run_dir import DECISIONS_FILE, STOP_FILE
from frontier_llm.run.signals import EXIT_INTERRUPTED, SignalWatcher
from frontier_llm.training import observers
from frontier_llm.training.build import BestLoss, TrainState
from frontier_llm.training.evaluate import evaluate
from frontier_llm.training.feed import Feed
from frontier_llm.training.guard import (
    Decisions,
    Recompute,
    ReplicaCheck,
    RequestCollector,
    Requests,
    RouterWatch,
    Skips,
    Watchdog,
)
from frontier_llm.training.guard.retries import RetryWatch, device_retries
from frontier_llm.training.join import joined_state
from frontier_llm.training.memory import MemoryCheck, StageBytes
from frontier_llm.training.metrics import Metrics, metrics_of
from frontier_llm.training.progress import AS_BEFORE, Resume, job_facts, progress_of, restore, run_datasets
from frontier_llm.training.step import StepResult, train_step
from frontier_llm.training.tasks import evaluate_tasks, open_tasks
from frontier_llm.units import strict_json

# A rank whose start takes longer than this multiple of train.timeout_s exits. The limit is long, because a start may
# build indices of the data or wait for files.
START_TIMEOUTS = 3


def train(
    config: RunConfig,
    place: RankEnv | None,
    signals: SignalWatcher,
    resume: Resume = AS_BEFORE,
    predict: StageBytes | None = None,
) -> int:
    """Train this rank's part of the run to its end.

    `predict` returns the predicted memory, which is logged beside the measured memory.

    Returns 0 after the last step, and EXIT_INTERRUPTED if a signal or STOP ended the run after a save.
    The caller must enter the context of `signals` as early as possible, so that a signal during the start is handled.
    """
    failpoints.arm(environ("FRONTIER_LLM_FAILPOINTS", "") or "", place.rank if place else 0, start_number())
    hit("train.start")
    config = resolve_precision(config)
    # TCPStore has no timeout if rank 0 is stopped, and the watchdog is not running yet.
    faulthandler.dump_traceback_later(START_TIMEOUTS * config.train.timeout_s, exit=True, file=2)
    # A checkpoint replaces initial weights, and for 175B on 64 devices each device would draw 2.7 billion numbers.
    draws = not is_there(checkpoints_folder(config.train))
    try:
        with joined_state(config, place, draws) as state:
            watchdog = Watchdog(config.train, state.mesh, config.comm.timeouts_s)
            with watchdog.guarding():  # replaces the timer set above
                session = _Session(config, state, resume, watchdog, signals, drawn=draws, predict=predict)
                return session.run()
    finally:
        faulthandler.cancel_dump_traceback_later()


class _Session:
    """State of one rank's process during a run: training state, checkpoints, guards and observers."""

    def __init__(
        self,
        config: RunConfig,
        state: TrainState,
        resume: Resume,
        watchdog: Watchdog,
        signals: SignalWatcher,
        *,
        drawn: bool,
        predict: StageBytes | None,
    ) -> None:
        """`config` is the configuration of the complete run, and `state` is in one of its phases.

        `drawn` is True if initial weights have been drawn. Otherwise the weights have no values yet.
        """
        self.state = state
        self.config = config
        self.resume = resume
        self.watchdog = watchdog
        self.drawn = drawn
        self.run_dir = Path(self.config.train.run_dir)
        world = state.mesh.world
        self.is_first = world.rank == 0
        self.tasks = open_tasks(config)
        self.metrics: Metrics | None = None  # None on all ranks except rank 0
        self.datasets = run_datasets(config, state)
        self.observers = observers.make(self.config, world.rank)
        self.replicas = ReplicaCheck(state.optimizer, state.mesh)
        self.recompute: Recompute | None = None
        self.stragglers = StragglerWatch(
            state.mesh,
            state.plan.grid,
            state.device,
            node_name(),
            interval=self.config.guard.straggler_interval,
            longest_s=self.config.guard.straggler_seconds,
        )
        self.routers = RouterWatch(self.config.model)
        self.predict = predict
        self.retries = RetryWatch(world, state.device, device_retries(state.device))
        self.request_collector = RequestCollector(signals, self.run_dir, world, state.device)
        self.decisions = Decisions(self.run_dir / DECISIONS_FILE if self.is_first else None)
        facts = job_facts(config, state, self.datasets)
        self.checkpoints = Checkpoints(
            config.train, state.mesh, state.optimizer, facts, resume.allow_changes, on_wait=watchdog.moved
        )
        self.skips = Skips(self.config.guard, self.decisions, self.checkpoints)

    def run(self) -> int:
        """Run to the end and return the exit code. Observers are closed, also after an error."""
        try:
            return self._run()
        finally:
            for observer in self.observers:
                observer.close()

    def _run(self) -> int:
        """Resume from the newest intact checkpoint, and train."""
        self._resume()
        if self.is_first:
            self._write_run_files()
            self.metrics = metrics_of(self.config, self.state, self.checkpoints.facts.incarnation, self.observers)
            self.metrics.data(self.state)
            if self.state.current_step >= self.config.train.steps:
                log.info(
                    f"nothing to train: {self.state.current_step} steps are done, and train.steps is "
                    f"{self.config.train.steps}"
                )
        finished = self._train_until_end()
        with self.watchdog.section("save"):
            if self.config.train.save_final or (not finished and self.config.train.save_interval):
                self._finish_save()
            self._log_saved(self.checkpoints.finish(verify=False))
            self.checkpoints.close(verify=finished, is_stopped=self.request_collector.stop)
        if self.metrics is not None:
            self.metrics.close()
        if not finished and not environ("SLURM_JOB_ID"):  # Slurm jobs: the supervisor restarts the run
            stop = self.run_dir / STOP_FILE
            first = f"delete {stop}, then " if stop.exists() else ""
            log.info(
                f"step {self.state.current_step} of {self.config.train.steps} is saved; to continue, {first}run the "
                "same command again"
            )
        return 0 if finished else EXIT_INTERRUPTED

    def _resume(self) -> None:
        with self.watchdog.section("load"):
            progress = self.checkpoints.newest(self.resume.strict)
        if progress is not None:
            restore(self.state, progress)
        # At the start, some rank found a checkpoint that does not exist any more, and drew no weights.
        elif maximum([not self.drawn], self.state.mesh.world, self.state.device)[0]:
            draw_masters(self.state.optimizer, self.config.train.seed, working_dtype(self.config.precision.dtype))
        self._count_durations()
        self.decisions.resume_at(self.state.current_step, progress.policy.get("rewinds", []) if progress else [])
        for path in self.resume.restart_sources:
            self._restart_source(path)
        phase = self._next_phase()
        self._announce(phase)
        self._enter(phase, self.resume.leave_out)
        if self.resume.leave_out:
            self.decisions.add(self.state.current_step, "leave out", samples=self.resume.leave_out)
            log.info(f"after step {self.state.current_step}: {self.resume.leave_out} samples are left out")

    def _restart_source(self, path: str) -> None:
        """Read the dataset `path` from its beginning again. Raises ConfigError if the run has no such dataset."""
        if path not in self.datasets:
            raise ConfigError(
                f"{path!r} is not a dataset of this run", suggest(path, list(self.datasets)), "--restart-source"
            )
        identity = self.datasets[path].identity
        samples = sum(
            stream.taken for stream in self.state.position.streams if stream.dataset == identity and not stream.retired
        )
        self.state.position = self.state.position.restart(identity)
        self.decisions.add(self.state.current_step, "restart source", path=path, samples_taken=samples)
        log.info(
            f"after step {self.state.current_step}: {path} is read from its beginning again, after {samples} "
            "samples of it"
        )

    def _train_until_end(self) -> bool:
        """Train until the last step. Returns False if a signal or STOP ended the run, on all ranks at the same step."""
        state = self.state
        train = self.config.train
        if self.request_collector.stop() or (state.current_step == 0 and not self._evaluate()):
            return False
        if state.current_step >= train.steps:
            return self._evaluate()
        while state.current_step < train.steps:
            self._follow_phase()
            requests = self._step()
            if self.request_collector.stop_requested(requests):
                return False
            if _due(state.current_step, self.config.guard.replica_check_interval, train.steps):
                self.replicas.check(state.current_step, state.mesh.world)
            if self.recompute is not None and _due(
                state.current_step, self.config.guard.recompute_interval, train.steps
            ):
                self._look_for_wrong_arithmetic(self.recompute)
            is_last = state.current_step >= train.steps
            tight = None if is_last else self.retries.after_step(state.current_step)
            if tight is not None:
                if train.save_interval:
                    # A failed save must not hide the reason of this end: the next start uses an older checkpoint.
                    with self.checkpoints.tolerating_one_failure():
                        self._finish_save()
                self.retries.end(tight, self.run_dir)
            evaluates = is_last or _due(state.current_step, train.eval_interval, train.steps)
            if evaluates and not self._evaluate():  # evaluate before the save, which records the best loss
                return False
            if requests.save or _due(state.current_step, train.save_interval, train.steps):
                self._begin_save()
        return True

    def _count_durations(self) -> None:
        """Convert durations in tokens to steps, from the current step on, because the batch size may have changed."""
        self.config = resolved(self.config, self.state.position.steps_done)
        self.state.phases = phases_of(self.config)

    def _next_phase(self) -> RunPhase:
        return phase_at(self.state.phases, self.state.current_step)

    def _follow_phase(self) -> None:
        """If the next step belongs to another phase than the current phase, enter that phase."""
        phase = self._next_phase()
        if self.state.config is not phase.config:
            self._announce(phase)
            self._enter(phase)
            if self.metrics is not None:
                self.metrics.phase(self.state)

    def _announce(self, phase: RunPhase) -> None:
        if self.config.train.phases and self.state.config != phase.config:
            log.info(f"after step {self.state.current_step}: {phase.describe()}")

    def _enter(self, phase: RunPhase, left_out_samples: int = 0) -> None:
        """Train in `phase` from now on, after skipping `left_out_samples` samples of the data."""
        state = self.state
        dp = self.state.mesh.dp
        position = state.position.enter(wanted(phase.config, self.datasets))
        for line in news(state.position, position):
            log.info(line)
        position = position.leave_out(left_out_samples)
        state.enter(phase, open_run_batches(phase.config, position, state.current_step, dp.rank, dp.size), position)
        self.validation = _validation(state)
        self.memory = MemoryCheck(state, self.predict)
        self.recompute = _recompute(state) if self.config.guard.recompute_interval else None
        if self.metrics is not None:
            self.metrics.enter(state)
            self.metrics.data(state)

    def _step(self) -> Requests:
        """Run one step, and log and record its result. Returns the requests that any rank has received."""
        step = self.state.current_step
        hit("train.step")
        for observer in self.observers:
            observer.before_step(self.state)
        with self.stragglers.step() as stragglers:
            result = train_step(self.state, self.request_collector.own)
        for observer in self.observers:
            observer.after_step(self.state, result)
        if self.metrics is not None:
            # Record the step before any event, because an event restarts the step's clock.
            self.metrics.step(step, result, self.state.skipped_steps, self.state.position)
        stages = self.memory.after_step(self.state)
        if self.metrics is not None and stages:
            self.metrics.memory(self.state.current_step, self.memory.steps, stages)
        for straggler in stragglers:
            log.info(f"straggler at step {step}: {straggler}")
            self._record("straggler", step, {**asdict(straggler), "slowdown": straggler.slowdown})
        for collapsed in self.routers.step(result.routing):
            log.warn(str(collapsed))
            self._record("collapsed router", step, asdict(collapsed))
        self.watchdog.at(step + 1, "train")
        self._advance_save()
        self._judge(step, result)
        return result.requests

    def _record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.event(kind, step, values)

    def _judge(self, step: int, result: StepResult) -> None:
        """Handle a skipped step, which may send the run back to a checkpoint."""
        if not result.skipped:
            self.skips.accepted()
            return
        back = self.skips.skipped(step, result.loss, result.gradient_norm, result.spike)
        if back is not None:
            at_spike = self.state.position
            further_steps = max(0, back.step + self.config.guard.rewind_skip_steps - self.state.current_step)
            further_samples = further_steps * self.state.config.batch.global_batch
            restore(self.state, back)
            samples_before = self.state.position.samples
            self.state.position = at_spike.returned_to(self.state.position).leave_out(further_samples)
            samples = self.state.position.samples - samples_before
            self._count_durations()
            if self.metrics is not None:
                self.metrics.go_back(back.step)
            self._enter(self._next_phase())
            self.skips.rewound(step, self.state.current_step, self.state.position.samples_left_out, samples)
            # Save at once. Otherwise a restart after a crash would load an older checkpoint and reach the spike again.
            self._finish_save()

    def _look_for_wrong_arithmetic(self, recompute: Recompute) -> None:
        with self.watchdog.section("recompute"):
            for finding in recompute.check(self.state.current_step):
                log.info(f"step {self.state.current_step}: {finding}")
                self.decisions.add(self.state.current_step, "wrong arithmetic", **asdict(finding))

    def _evaluate(self) -> bool:
        """Evaluate held-out loss and tasks. Returns False if a signal or STOP interrupted the evaluation."""
        if self.validation:
            with self.watchdog.section("evaluate"):
                values = evaluate(
                    self.state, self.validation, self.config.train.eval_samples, self.request_collector.stop
                )
            if values:
                self._record("evaluation", self.state.current_step, values)
            self._keep_if_best(values)
            if not values:
                return False
        if self.tasks:
            with self.watchdog.section("evaluate"):
                accuracies = evaluate_tasks(self.state, self.tasks, self.request_collector.stop)
            if accuracies:
                self._record("tasks", self.state.current_step, accuracies)
            return bool(accuracies)
        return True

    def _keep_if_best(self, losses: Mapping[str, float]) -> None:
        """Save this step if its held-out loss is the lowest so far, and write the checkpoint's name to BEST."""
        state = self.state
        name = self.config.train.keep_best
        loss = losses.get("loss" if name == "validation" else name or "")
        if loss is None or state.current_step == 0 or (state.best is not None and not loss < state.best.loss):
            return
        state.best = BestLoss(state.current_step, loss)
        self._begin_save()

    def _begin_save(self) -> None:
        """Copy the state, and write it while training continues. The first failure in a row is only logged."""
        with self.checkpoints.tolerating_one_failure():
            self._start_save()
        self._advance_save()

    def _finish_save(self) -> None:
        """Save this step and wait until it is on disk. Every failure is raised, because no other save would follow."""
        self._start_save()
        self._log_saved(self.checkpoints.finish(verify=False))

    def _start_save(self) -> None:
        """Start to save this step, unless it is on disk or being written."""
        step = self.state.current_step
        if self.checkpoints.newest_step == step:
            return
        if self.config.guard.replica_check_interval:
            self.replicas.check(step, self.state.mesh.world)
        self._log_saved(self.checkpoints.finish())
        self.checkpoints.begin(progress_of(self.state, self.decisions.rewinds))

    def _advance_save(self) -> None:
        """Advance the running save. The first failure in a row is only logged."""
        save = self.checkpoints.under_way
        if save is not None:
            with self.checkpoints.tolerating_one_failure():
                self._log_saved(save.advance(self.state.current_step))

    def _log_saved(self, saved: Saved | None) -> None:
        if saved is None:
            return
        log.info(f"saved {saved.path}")
        if self.metrics is not None:
            self.metrics.event("save", saved.step, {"path": str(saved.path)})
            self.metrics.communication()  # `status` reads this record to show the communication of a running job

    def _write_run_files(self) -> None:
        names = plugins.below(self.config.plugins, self.run_dir)
        write_atomically(self.run_dir / "config.yaml", dump(self.config.model_copy(update={"plugins": names})))
        write_atomically(self.run_dir / "plan.json", strict_json(asdict(self.state.plan)))


def _local_gradients(state: TrainState, feed: Feed) -> dict[str, Tensor]:
    """Run forward and backward of the current step over `feed`. Returns this rank's unsummed gradients by parameter.

    Changes only the gradient buffers. Only the native engine supports this function.
    """
    sync = state.sync
    assert isinstance(sync, GradientSync)
    sync.begin(reduce=False)
    state.pipeline.run(feed.step(state.current_step), state.scaler.scale)
    gradients = sync.gradients
    hit("train.recomputed", next(iter(gradients.values())).view(-1))
    return gradients


def _recompute(state: TrainState) -> Recompute:
    """Return the check for wrong arithmetic. Every replica computes the batches of data-parallel rank 0."""
    batches = open_run_batches(state.config, state.position, state.current_step, 0, state.mesh.dp.size)
    feed = state.new_feed(batches)
    return Recompute(lambda: _local_gradients(state, feed), state.mesh)


def _validation(state: TrainState) -> dict[str, Batches]:
    """Return the batches of each held-out set by name."""
    dp = state.mesh.dp
    return {split: open_batches(state.config, dp.rank, dp.size, split) for split in state.config.data.held_out}


def _due(step: int, interval: int, last: int) -> bool:
    """Return True if `step` is a multiple of `interval` and not the last step, which is handled separately."""
    return bool(interval) and step % interval == 0 and step < last
