"""Kills random ranks with signal 9 at random instants. Every run must end bit-equal to the undisturbed run.

    python scripts/kill_anywhere.py [--kills 200] [--in-save 50] [--ranks 2] [--seed 1] [--lag 1] [--minutes M]
    [--faults kill,flip,…]

Ranks are forked from this process, which has already imported torch. Everything else is as under any launcher:
rendezvous, collectives, lock, resume. A run is disturbed until it reaches its end. Then the loss of every step (also of
repeated steps) and the digests of the final weights and optimizer state are compared, and the next run begins.

`--in-save` of the kills happen at exact instants inside a save (failpoints), the others at random times. `--lag` is
train.save_lag_steps. If kills are the only faults, a start may lose at most one interval plus the lag. Prints a JSON
summary. The exit code is 1 at the first difference.

Faults: kill, abort, segv (a rank dies of that signal), freeze (SIGSTOP), error (an exception in a step), term (SIGTERM:
the ranks save and exit), flip (damages a bit of the newest checkpoint before a start, then kills), enospc (a save
fails).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from frontier_llm.checkpoint import directory as folder
from frontier_llm.config import RunConfig, load_model
from frontier_llm.run.launchers import RankEnv, free_port
from frontier_llm.run.signals import EXIT_INTERRUPTED, SignalWatcher
from frontier_llm.training.loop import train
from tests.harness.runs import Run

SAVE_POINTS = [
    "copied",
    "shard_created",
    "block_written",
    "shard_written",
    "shard_synced",
    "before_manifest",
    "manifest_written",
    "before_rename",
    "before_latest",
    "latest_written",
    "latest_moved",
    "before_delete",
    "delete_renamed",
]
RANK_0_ONLY = set(SAVE_POINTS[5:])
STEPS = 60
INTERVAL = 5
SIGNALS = {
    "kill": signal.SIGKILL,
    "flip": signal.SIGKILL,
    "abort": signal.SIGABRT,
    "segv": signal.SIGSEGV,
    "freeze": signal.SIGSTOP,
    "term": signal.SIGTERM,
}
# Permitted exit codes, besides 0 and the launcher's SIGKILL. 1: a rank failed, or a surviving rank detected that. 2:
# the last save of a run failed, which is an error. 70: the watchdog ended a rank that made no progress.
CODES = {
    "kill": {1},
    "flip": {1},
    "abort": {1, -signal.SIGABRT},
    "segv": {1, -signal.SIGSEGV},
    "freeze": {1, 70},
    "error": {1},
    "term": {EXIT_INTERRUPTED, -signal.SIGTERM},
    "enospc": {2},
}


def config_of(run: Run, ranks: int, lag: int, timeout_s: float, steps: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": load_model("llama-tiny"),
            "parallel": {"data": ranks},
            "batch": {"global_batch": 8, "micro_batch": 2},
            "optimizer": {"lr": 1e-3, "warmup_steps": 2, "decay_steps": 60},
            "precision": {"dtype": "bf16"},
            "train": {
                "run_dir": str(run.run_dir),
                "steps": steps,
                "save_interval": INTERVAL,
                "save_lag_steps": lag,
                "device": "cpu",
                "tensorboard": False,
                "timeout_s": timeout_s,
            },
        }
    )


class Attempt:
    def __init__(self, config: RunConfig, log: Path, ranks: int, failpoint: str) -> None:
        port = free_port()
        self.pids = [self._fork(config, log, rank, ranks, port, failpoint) for rank in range(ranks)]

    def _fork(self, config: RunConfig, log_path: Path, rank: int, ranks: int, port: int, failpoint: str) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            with SignalWatcher() as signals:
                log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.environ["FRONTIER_LLM_FAILPOINTS"] = failpoint
                place = (
                    RankEnv(rank, ranks, rank, ranks, socket.gethostname(), "127.0.0.1", port, "local")
                    if ranks > 1
                    else None
                )
                code = train(config, place, signals)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            code = getattr(error, "exit_code", 1)
        finally:
            os._exit(code)

    def ended_within(self, limit_s: float) -> bool:
        """Return True if any rank ends within the time."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            if any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in self.pids):
                return True
            time.sleep(0.005)
        return False

    def end(self, kill: bool) -> list[int]:
        """Return the exit codes of all ranks (negative: signal). `kill` ends them first, as a launcher does after the
        first failure.
        """
        if kill:
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]


def flip_bit(run: Run, rng: random.Random) -> bool:
    """Damage the newest checkpoint if another one exists. Returns whether a bit was changed."""
    steps = folder.named_steps(run.run_dir / "checkpoints")
    if len(steps) < 2:
        return False
    path = rng.choice(sorted((run.run_dir / "checkpoints" / folder.step_name(steps[0])).iterdir()))
    with path.open("r+b") as file:
        position = rng.randrange(path.stat().st_size)
        file.seek(position)
        byte = file.read(1)[0] ^ (1 << rng.randrange(8))
        file.seek(position)
        file.write(bytes([byte]))
    return True


def saving(run: Run) -> bool:
    directory = run.run_dir / "checkpoints"
    return directory.is_dir() and any(
        ".tmp." in entry.name or ".deleted." in entry.name for entry in os.scandir(directory)
    )


def steps_not_saved(run: Run) -> int:
    """Return the number of steps that were done and that no complete checkpoint contains."""
    done = max(run.losses(), default=0) if (run.run_dir / "metrics.jsonl").exists() else 0
    return done - max(folder.named_steps(run.run_dir / "checkpoints"), default=0)


class Different(Exception):
    """A run did not end like the undisturbed run, or a rank exited with a wrong code."""


class Campaign:
    """Disturbed runs, each compared with an undisturbed run."""

    def __init__(self, base: Path, ranks: int, seed: int, lag: int, faults: list[str], in_save_share: float) -> None:
        self.base = base
        self.ranks = ranks
        self.lag = lag
        self.faults = faults
        self.in_save_share = in_save_share
        self.rng = random.Random(seed)
        self.count = Counter[str]()
        self.timeout_s = 30.0 if "freeze" in faults else 60.0
        self.steps_computed = self.most_steps_lost = 0
        self.reference = self.new_run("reference")
        started = time.monotonic()
        codes = self.start(self.reference, "").end(kill=False)
        self.undisturbed_s = self.usual_s = time.monotonic() - started
        if codes != [0] * ranks:
            raise Different(f"the undisturbed run ended with exit codes {codes}\n{self._log(self.reference)}")

    def new_run(self, name: str) -> Run:
        run = Run(self.base / name)
        run.directory.mkdir()
        return run

    def _log(self, run: Run) -> str:
        return (run.directory / "log").read_text()[-3000:]

    def start(self, run: Run, failpoint: str, steps: int = STEPS) -> Attempt:
        """Start all ranks of a run."""
        return Attempt(
            config_of(run, self.ranks, self.lag, self.timeout_s, steps), run.directory / "log", self.ranks, failpoint
        )

    def one_run(self) -> None:
        """Disturb a run until it reaches its end. Raises Different."""
        run = self.new_run(f"run{self.count['runs']}")
        while not self._one_start(run):
            if self.faults == ["kill"]:
                self.most_steps_lost = max(self.most_steps_lost, steps_not_saved(run))
                if self.most_steps_lost > INTERVAL + self.lag:
                    raise Different(f"{run.directory}: {self.most_steps_lost} steps lost\n{self._log(run)}")
        if run.losses() != self.reference.losses() or run.shards() != self.reference.shards():
            raise Different(f"{run.directory} differs from the undisturbed run {self.reference.directory}")
        self.count["runs"] += 1
        self.steps_computed += sum(
            '"kind": "step"' in line for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()
        )
        shutil.rmtree(run.directory)

    def _one_start(self, run: Run) -> bool:
        """Start the run once and disturb it. Returns True if the run reached its end."""
        fault = self.rng.choice(self.faults)
        victim = self.rng.randrange(self.ranks)
        failpoint = self._failpoint(fault, victim)
        if fault == "flip":
            self.count["flips"] += flip_bit(run, self.rng)
        self.count["starts"] += 1
        attempt = self.start(run, failpoint)
        started = time.monotonic()
        ended = attempt.ended_within(120.0 if failpoint else self.rng.uniform(0.0, 0.7 * self.usual_s))
        codes = self._let_end(attempt) if ended else self._strike(run, attempt, fault, victim)
        self._judge(run, fault, codes)
        # Let `usual_s` follow the machine's current load, so that most random kill times lie before the run's end.
        if ended and not failpoint:
            self.usual_s = 0.5 * (self.usual_s + max(1.0, time.monotonic() - started))
        if ended and -signal.SIGKILL in codes and "=kill" in failpoint:
            self.count.update(kills=1, in_save=1, exact_points=1)
        elif fault in ("error", "enospc"):
            self.count[fault] += codes != [0] * self.ranks or fault == "enospc"
        return codes == [0] * self.ranks

    def _failpoint(self, fault: str, victim: int) -> str:
        """Return the failpoint for this start, or '' if the fault happens at a random time."""
        nth = self.rng.randint(1, 3)
        if fault == "kill" and self.rng.random() < self.in_save_share:
            name = self.rng.choice(SAVE_POINTS)
            return f"checkpoint.{name}@{0 if name in RANK_0_ONLY else victim}#{nth}=kill"
        if fault == "enospc":
            return f"checkpoint.shard_written@{victim}#{nth}=errno:ENOSPC"
        return f"train.step@{victim}#{self.rng.randint(1, STEPS)}=error:boom" if fault == "error" else ""

    def _let_end(self, attempt: Attempt) -> list[int]:
        """Let the ranks exit by themselves. If a signal killed the first rank that ended, kill all ranks, as a launcher
        does.
        """
        first = next(pid for pid in attempt.pids if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))
        how = os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        return attempt.end(kill=how is not None and how.si_code != os.CLD_EXITED)

    def _strike(self, run: Run, attempt: Attempt, fault: str, victim: int) -> list[int]:
        self.count["in_save"] += fault == "kill" and saving(run)
        self.count["kills" if fault in ("kill", "flip") else fault] += 1
        os.kill(attempt.pids[victim], SIGNALS[fault])
        if fault == "term":
            return attempt.end(kill=False)
        if fault == "freeze" and not attempt.ended_within(4 * self.timeout_s):
            attempt.end(kill=True)
            raise Different(
                f"{run.directory}: no rank reported within {4 * self.timeout_s:.0f} s that rank {victim} was "
                f"frozen\n{self._log(run)}"
            )
        return attempt.end(kill=True)

    def _judge(self, run: Run, fault: str, codes: list[int]) -> None:
        unexpected = [code for code in codes if code not in {0, -signal.SIGKILL, *CODES[fault]}]
        if unexpected or (1 in codes and fault == "kill" and -signal.SIGKILL not in codes):
            raise Different(f"{run.directory}: exit codes {codes} after {fault}\n{self._log(run)}")

    def summary(self) -> dict[str, object]:
        share = round(STEPS * self.count["runs"] / max(self.steps_computed, 1), 3)
        return {
            **self.count,
            "interval": INTERVAL,
            "lag": self.lag,
            "most_steps_lost": self.most_steps_lost,
            "steps_kept_of_computed": share,
        }


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=200)
    options.add_argument("--in-save", type=int, default=50)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--lag", type=int, default=1, help="train.save_lag_steps; 0 = wait for each save")
    options.add_argument("--minutes", type=float, default=0, help="stop after this time instead of after --kills")
    options.add_argument("--faults", default="kill", help=f"faults, comma-separated: {', '.join(CODES)}")
    return options


def main() -> int:
    args = parser().parse_args()
    torch.set_num_threads(1)
    base = Path(tempfile.mkdtemp(prefix="kill-anywhere-"))
    started = time.monotonic()
    try:
        campaign = Campaign(
            base, args.ranks, args.seed, args.lag, args.faults.split(","), max(0.3, args.in_save / args.kills)
        )
        count = campaign.count

        def enough() -> bool:
            if args.minutes:
                return time.monotonic() - started > 60 * args.minutes
            return count["kills"] >= args.kills and count["in_save"] >= args.in_save

        while not enough():
            campaign.one_run()
            print(f"{time.monotonic() - started:.0f} s: {dict(count)}", file=sys.stderr, flush=True)
    except Different as difference:
        print(f"seed {args.seed}: {difference}")
        return 1
    shutil.rmtree(base)
    print(
        json.dumps(
            {**campaign.summary(), "bit_equal": True, "elapsed_s": round(time.monotonic() - started), "seed": args.seed}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
