"""A rank's life: join, build, resume, train until the last step or a signal, evaluate, save, leave."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from frontier_llm import failpoints, log
from frontier_llm.checkpoint import CheckpointManager, Progress, Superseded
from frontier_llm.cluster.rank_env import RankEnv, environ
from frontier_llm.cluster.run_dir import STOP_FILE
from frontier_llm.cluster.signals import SignalWatcher
from frontier_llm.comm import StragglerWatch, all_reduce_
from frontier_llm.comm.board import Board
from frontier_llm.config import RunConfig, dump
from frontier_llm.costs.flops import model_flops_per_token
from frontier_llm.data.loader import open_batches
from frontier_llm.data.meta import read_meta
from frontier_llm.errors import CheckpointError, FrontierError
from frontier_llm.failpoints import hit
from frontier_llm.train.build import TrainState
from frontier_llm.train.clock import PhaseClock
from frontier_llm.train.evaluate import evaluate
from frontier_llm.train.join import joined_state
from frontier_llm.train.metrics import Metrics, peak_tflops
from frontier_llm.train.provenance import provenance
from frontier_llm.train.replicas import ReplicaCheck
from frontier_llm.train.spikes import Decisions
from frontier_llm.train.step import StepResult, train_step
from frontier_llm.train.watchdog import Watchdog

# The job saved at a signal and is not done: a batch script requeues on this code (75 = EX_TEMPFAIL, "try again later")
EXIT_INTERRUPTED = 75
MOST_REWINDS = 3  # to one checkpoint: then other data has not helped, and the run must not go in circles


@dataclass(frozen=True)
class Resume:
    """How the user wants to continue."""

    strict: bool = False  # a damaged newest checkpoint stops the run instead of falling back to the one before
    allow_changes: tuple[str, ...] = ()  # keys of the configuration that may change the mathematics


def train(config: RunConfig, place: RankEnv | None, resume: Resume = Resume()) -> int:
    """Train this rank's part of the run to its end. Returns 0 when done, EXIT_INTERRUPTED after a save at a signal."""
    failpoints.arm(environ("FRONTIER_LLM_FAILPOINTS", "") or "", place.rank if place else 0)
    with joined_state(config, place) as state:
        watchdog = _watchdog(state, place)
        with watchdog.guarding():
            return _Session(state, resume, watchdog).run()


def _watchdog(state: TrainState, place: RankEnv | None) -> Watchdog:
    """Fires a little before the collectives' own timeout, while the others' progress can still be read."""
    train, world = state.config.train, state.mesh.world
    alone = place is None or place.world_size == 1 or place.master_port is None
    board = None if alone else Board(place.master_addr, place.master_port)  # type: ignore[union-attr, arg-type]
    return Watchdog(board, world.rank, world.size, state.mesh.ledger, Path(train.run_dir), 0.9 * train.timeout_s)


class _Session:
    """What one process of the run holds from start to end."""

    def __init__(self, state: TrainState, resume: Resume, watchdog: Watchdog) -> None:
        self.state, self.config, self.mesh = state, state.config, state.mesh
        self.run_dir = Path(self.config.train.run_dir)
        self.is_first = self.mesh.world.rank == 0
        self.validation = open_batches(self.config, self.mesh.dp.rank, self.mesh.dp.size, "validation")
        self.checkpoints = CheckpointManager(
            self.run_dir / "checkpoints",
            self.mesh,
            state.buckets,
            state.optimizer,
            config=self.config,
            keep=self.config.train.keep_checkpoints,
            keep_every=self.config.train.keep_every,
            environment=provenance(state.device) if self.is_first else {},
            job=environ("SLURM_JOB_ID", "") or "",
            restart=int(environ("SLURM_RESTART_COUNT", "0") or 0),
            allow_changes=resume.allow_changes,
        )
        self.watchdog, self.replicas = watchdog, ReplicaCheck(state.buckets, state.optimizer, state.mesh)
        self.decisions = Decisions(self.run_dir / "decisions.jsonl" if self.is_first else None)
        self.stragglers = StragglerWatch(self.mesh, state.plan.grid, state.device)
        self.strict = resume.strict
        self.saved_step = -1  # of the newest checkpoint, under way or on disk
        self.failed_saves = self.skips_in_row = 0
        self.metrics: Metrics | None = None

    def run(self) -> int:
        """Resume where the newest intact checkpoint stopped, and go on."""
        self._resume()
        if self.is_first:
            self._write_run_files()
            clock = PhaseClock(self.mesh.ledger)
            clock.attach(self.state)
            flops = model_flops_per_token(self.config.model)
            self.metrics = Metrics(self.run_dir, self.config, self.mesh.world.size, flops, peak_tflops(self.config), clock)
        with SignalWatcher() as signals:
            interrupted = self._train_until_end(signals)
        if not interrupted and self.validation is not None:
            self._evaluate()
        self._save(last=True)
        self.checkpoints.close(audit=not interrupted)
        if self.metrics is not None:
            self.metrics.close()
        return EXIT_INTERRUPTED if interrupted else 0

    def _train_until_end(self, signals: SignalWatcher) -> bool:
        """True when a signal ended it; all ranks agree on the step."""
        train, state = self.config.train, self.state
        if state.current_step == 0 and self.validation is not None:
            self._evaluate()
        while state.current_step < train.steps:
            step = state.current_step
            hit("train.step")
            with self.stragglers.step() as found:
                result = train_step(state)
            for straggler in found:
                log.info(f"straggler at step {step}: {straggler}")
            self.watchdog.at(state.current_step, "train")
            if self.metrics is not None:
                self.metrics.step(step, result, state.skipped_steps)
            self._note_saved()
            if result.skipped:
                self._skipped(step, result)
            elif self.skips_in_row:
                self.skips_in_row = 0
            stop, save = self._wishes(signals.requested)
            if stop:
                log.info(f"stopping after step {state.current_step} on {signals.requested or 'a wish of another rank or the file STOP'}")
                return True
            if _due(state.current_step, self.config.guard.replica_check_interval, train.steps):
                self.replicas.check(state.current_step, self.mesh.world)
            if _due(state.current_step, train.eval_interval, train.steps) and self.validation is not None:
                self._evaluate()
            if save or _due(state.current_step, train.save_interval, train.steps):
                self._save()
        return False

    def _wishes(self, requested: str | None) -> tuple[bool, bool]:
        """(stop, save), the same on every rank: a signal to any of them, or a file STOP or SAVE in the run directory."""
        stop_file, save_file = self.run_dir / STOP_FILE, self.run_dir / "SAVE"
        stop = requested is not None or (self.is_first and stop_file.exists())
        save = self.is_first and save_file.exists()
        if save:
            save_file.unlink(missing_ok=True)
        flags = torch.tensor([float(stop), float(save)], device=self.state.device)
        stop_any, save_any = all_reduce_(flags, self.mesh.world, "max").tolist()
        return stop_any > 0, save_any > 0

    def _skipped(self, step: int, result: StepResult) -> None:
        """Write the decision down; go back if the run says so; stop when nothing but skips happen."""
        guard, spike = self.config.guard, result.spike
        self.skips_in_row += 1
        self.decisions.add(step, "spike" if spike else "not finite", loss=repr(result.loss), gradient_norm=repr(result.gradient_norm))
        if self.skips_in_row >= guard.max_skips_in_row:
            raise FrontierError(
                f"{self.skips_in_row} steps in a row were skipped; at the last one loss was {result.loss}, gradient norm {result.gradient_norm}",
                "lower optimizer.lr, look at the data of these steps (decisions.jsonl), or raise guard.max_skips_in_row",
                f"step {step}",
            )
        if spike and guard.spike_action == "rewind":
            self._rewind(step)

    def _rewind(self, step: int) -> None:
        """Back to a checkpoint from before the spike, past the data that led to it."""
        guard, feed = self.config.guard, self.state.feed
        target = self.checkpoints.newest_at_most(step - guard.rewind_steps)
        if target is not None and self.decisions.rewinds_to(target) >= MOST_REWINDS:
            log.info(f"spike at step {step}: after {MOST_REWINDS} rewinds to step {target} it is skipped instead")
            return
        left_out = feed.left_out_steps
        progress = self.checkpoints.rewind(step - guard.rewind_steps)
        if progress is None:
            log.info(f"no checkpoint is {guard.rewind_steps} steps older than the spike at step {step}: the step is skipped instead")
            return
        self._restore(progress)
        feed.left_out_steps = left_out + guard.rewind_skip_steps
        self.decisions.add(progress.step, "rewind", spike_at=step, left_out_steps=feed.left_out_steps)
        log.info(f"spike at step {step}: back to step {progress.step}, leaving out {guard.rewind_skip_steps} steps of data")
        self.saved_step = -1
        self._save(last=True)  # so that a crash from here on does not run into the spike again

    def _evaluate(self) -> None:
        assert self.validation is not None
        loss = evaluate(self.state, self.validation, self.config.train.eval_samples)
        values = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        bytes_per_token = self._bytes_per_token()
        if bytes_per_token:
            values["bits_per_byte"] = loss / math.log(2) / bytes_per_token
        bits = f"  {values['bits_per_byte']:.4f} bits per byte" if bytes_per_token else ""
        log.info(f"held-out after step {self.state.current_step}: loss {loss:.4f}{bits}")
        if self.metrics is not None:
            self.metrics.event("evaluation", self.state.current_step, values)

    def _bytes_per_token(self) -> float | None:
        """Over the whole held-out blend; None where the text's size is not recorded."""
        sources = self.config.data.validation
        if not isinstance(sources, tuple):
            return None
        metas = [read_meta(source.path) for source in sources]
        known = [meta for meta in metas if meta is not None and meta.text_bytes]
        return sum(meta.text_bytes for meta in known) / sum(meta.tokens for meta in known) if len(known) == len(metas) else None

    def _save(self, last: bool = False) -> None:
        """Begin a save; the copy is taken on return, the writing goes on beside the next steps. The last one is waited for."""
        state = self.state
        if self.saved_step == state.current_step:
            self._saved(self.checkpoints.wait(audit=False))
            return
        if self.config.guard.replica_check_interval:
            self.replicas.check(state.current_step, self.mesh.world)
        samples = (state.current_step + state.feed.left_out_steps) * self.config.batch.global_batch
        progress = Progress(
            step=state.current_step,
            consumed_samples=samples,
            tokens=state.current_step * self.config.batch.global_batch * self.config.model.sequence_length,
            optimizer_updates=state.optimizer.updates,
            loss_scale=state.scaler.scale,
            scaler_clean_steps=state.scaler.clean_steps,
            skipped_steps=state.skipped_steps,
            policy={**state.spikes.state(), "left_out_steps": state.feed.left_out_steps, "rewinds": self.decisions.rewinds},
        )
        try:
            self.checkpoints.start_save(progress)
            self.saved_step = state.current_step
            if last:
                self._saved(self.checkpoints.wait(audit=False))
        except CheckpointError as error:
            self._save_failed(error, last)

    def _note_saved(self) -> None:
        """Move a save that is under way on; it is a step boundary."""
        try:
            self._saved(self.checkpoints.poll())
        except CheckpointError as error:
            self._save_failed(error, last=False)

    def _saved(self, path: Path | None) -> None:
        if path is not None:
            self.failed_saves = 0
            log.info(f"saved {path}")
            if self.metrics is not None:
                self.metrics.event("save", self.saved_step, {"path": str(path)})

    def _save_failed(self, error: CheckpointError, last: bool) -> None:
        """Train on after one failed save, the checkpoints before it are intact; stop at the second in a row or when no other will follow."""
        self.failed_saves, self.saved_step = self.failed_saves + 1, -1
        if last or self.failed_saves > 1 or isinstance(error, Superseded):
            raise error
        log.info(f"a save failed, training goes on and stops if the next one fails too\n{error}")

    def _resume(self) -> None:
        progress = self.checkpoints.load_latest(self.strict)
        if progress is None:
            log.info(f"no checkpoint in {self.run_dir / 'checkpoints'}: starting from step 0")
            return
        self.saved_step = progress.step
        self._restore(progress)
        self.decisions.resume_at(progress.step, progress.policy.get("rewinds", []))
        log.info(f"resuming after step {progress.step} ({progress.tokens:,} tokens)")

    def _restore(self, progress: Progress) -> None:
        """The scalars; the tensors are loaded already."""
        state = self.state
        state.current_step, state.skipped_steps = progress.step, progress.skipped_steps
        state.optimizer.updates = progress.optimizer_updates
        state.scaler.scale, state.scaler.clean_steps = progress.loss_scale, progress.scaler_clean_steps
        state.spikes.restore(progress.policy)
        state.feed.left_out_steps = int(progress.policy.get("left_out_steps", 0))

    def _write_run_files(self) -> None:
        (self.run_dir / "config.yaml").write_text(dump(self.config), encoding="utf-8")
        (self.run_dir / "plan.json").write_text(json.dumps(asdict(self.state.plan), indent=1), encoding="utf-8")


def _due(step: int, interval: int, last: int) -> bool:
    """After every `interval` steps; the end has its own."""
    return bool(interval) and step % interval == 0 and step < last
