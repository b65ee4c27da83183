"""kill -9 of a random rank at random instants, again and again; every run must end bit-equal to the undisturbed one.

    python scripts/kill_anywhere.py [--kills 200] [--in-save 50] [--ranks 2] [--seed 1] [--minutes M] [--faults kill,flip,enospc]

Ranks are forked from this process, which has imported torch already, and otherwise live as under any launcher: rendezvous, collectives,
lock, resume. A run is killed until it reaches its end; then the loss of every step (also of those done several times) and the digests of
the final weights and optimizer state are compared, and the next run begins. `--in-save` of the kills happen at exact instants inside a
save (failpoints), the others at random times. With `--faults` the list is extended: `flip` damages a bit of the newest checkpoint
before a restart, `enospc` makes a save fail. Prints a JSON summary; exit code 1 at the first difference.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from frontier_llm.checkpoint import directory as folder
from frontier_llm.cluster.rank_env import RankEnv, free_port
from frontier_llm.config import RunConfig, load_model
from frontier_llm.train.loop import train
from tests.faults.runs import Run

SAVE_POINTS = [
    "copied", "shard_created", "block_written", "shard_written", "shard_synced", "before_manifest", "manifest_written", "before_rename",
    "before_latest", "latest_written", "latest_moved", "before_delete", "delete_renamed",
]  # fmt: skip
RANK_0_ONLY = set(SAVE_POINTS[5:])
STEPS, INTERVAL = 60, 5


def config_of(run: Run, ranks: int) -> RunConfig:
    return RunConfig.model_validate({
        "model": load_model("llama-tiny"),
        "parallel": {"data": ranks},
        "batch": {"global_batch": 8, "micro_batch": 2},
        "optimizer": {"lr": 1e-3, "warmup_steps": 2, "decay_steps": 60},
        "precision": {"dtype": "bf16"},
        "train": {
            "run_dir": str(run.run_dir), "steps": STEPS, "save_interval": INTERVAL, "device": "cpu", "tensorboard": False, "timeout_s": 60,
        },
    })  # fmt: skip


class Attempt:
    """One start of all ranks."""

    def __init__(self, run: Run, ranks: int, failpoint: str) -> None:
        self.log, port = run.directory / "log", free_port()
        self.pids = [self._fork(run, rank, ranks, port, failpoint) for rank in range(ranks)]

    def _fork(self, run: Run, rank: int, ranks: int, port: int, failpoint: str) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ["FRONTIER_LLM_FAILPOINTS"] = failpoint
            place = RankEnv(rank, ranks, rank, ranks, 0, socket.gethostname(), "127.0.0.1", port, "local") if ranks > 1 else None
            code = train(config_of(run, ranks), place)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            code = getattr(error, "exit_code", 1)
        finally:
            os._exit(code)

    def wait(self, limit_s: float) -> list[int] | None:
        """Exit codes (negative: signal) when any rank has ended within the time; None when none has."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            if any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in self.pids):
                return []
            time.sleep(0.005)
        return None

    def end(self, kill: bool) -> list[int]:
        """Exit codes of all; `kill` as a launcher does after the first failure."""
        if kill:
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]


def flip_bit(run: Run, rng: random.Random) -> bool:
    """Damage the newest checkpoint, when there is another one to fall back to."""
    steps = folder.complete_steps(run.run_dir / "checkpoints")
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
    return directory.is_dir() and any(".tmp." in entry.name or ".deleted." in entry.name for entry in os.scandir(directory))


def newest_step(run: Run) -> int:
    return max(folder.complete_steps(run.run_dir / "checkpoints"), default=0)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=200)
    options.add_argument("--in-save", type=int, default=50)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--minutes", type=float, default=0, help="stop after this time instead of after --kills")
    options.add_argument("--faults", default="kill", help="comma-separated: kill, flip, enospc")
    args = options.parse_args()
    torch.set_num_threads(1)
    rng, faults = random.Random(args.seed), args.faults.split(",")
    base = Path(tempfile.mkdtemp(prefix="kill-anywhere-"))
    reference = Run(base / "reference")
    reference.directory.mkdir()
    started = time.monotonic()
    attempt = Attempt(reference, args.ranks, "")
    assert attempt.end(kill=False) == [0] * args.ranks, reference.directory.joinpath("log").read_text()
    undisturbed_s = time.monotonic() - started
    count = {"kills": 0, "in_save": 0, "exact_points": 0, "flips": 0, "enospc": 0, "runs": 0, "starts": 0, "most_steps_lost": 0}
    steps_computed = 0
    started = time.monotonic()

    def more() -> bool:
        if args.minutes:
            return time.monotonic() - started < 60 * args.minutes
        return count["kills"] < args.kills or count["in_save"] < args.in_save

    while more():
        run = Run(base / f"run{count['runs']}")
        run.directory.mkdir()
        while True:
            point, victim = "", rng.randrange(args.ranks)
            fault = rng.choice(faults)
            if fault == "kill" and rng.random() < max(0.3, args.in_save / args.kills):
                name = rng.choice(SAVE_POINTS)
                victim = 0 if name in RANK_0_ONLY else victim
                point = f"checkpoint.{name}@{victim}#{rng.randint(1, 3)}=kill"
            elif fault == "enospc":
                point = f"checkpoint.shard_written@{victim}#{rng.randint(1, 3)}=errno:ENOSPC"
                count["enospc"] += 1
            elif fault == "flip":
                count["flips"] += flip_bit(run, rng)
            attempt = Attempt(run, args.ranks, point)
            count["starts"] += 1
            limit_s = 120.0 if point else rng.uniform(0.0, 0.7 * undisturbed_s)
            ended = attempt.wait(limit_s)
            if ended is None:
                count["in_save"] += saving(run)
                os.kill(attempt.pids[victim], signal.SIGKILL)
                codes = attempt.end(kill=True)
                count["kills"] += 1
            else:
                clean = os.waitid(os.P_PID, attempt.pids[victim], os.WEXITED | os.WNOWAIT)
                codes = attempt.end(kill=clean is not None and clean.si_code != os.CLD_EXITED)
                if -signal.SIGKILL in codes:
                    count["kills"] += 1
                    count["in_save"] += 1
                    count["exact_points"] += 1
            done = max(run.losses(), default=0) if (run.run_dir / "metrics.jsonl").exists() else 0
            if codes == [0] * args.ranks:
                break
            # a survivor that notices before it is killed too leaves with RankFailure's 1
            # and the last save of a run is not allowed to fail: CheckpointError's 2
            allowed = (0, -signal.SIGKILL, *((2,) if fault == "enospc" else ()))
            unexpected = [code for code in codes if code not in allowed and not (code == 1 and -signal.SIGKILL in codes)]
            if unexpected:
                print(f"{run.directory}: exit codes {codes}\n{run.directory.joinpath('log').read_text()[-3000:]}")
                return 1
            count["most_steps_lost"] = max(count["most_steps_lost"], done - newest_step(run))
        if run.losses() != reference.losses() or run.shards() != reference.shards():
            print(f"{run.directory} differs from the undisturbed run {reference.directory}")
            return 1
        count["runs"] += 1
        steps_computed += sum('"kind": "step"' in line for line in (run.run_dir / "metrics.jsonl").read_text().splitlines())
        print(f"{time.monotonic() - started:.0f} s: {count}", file=sys.stderr, flush=True)
        shutil.rmtree(run.directory)
    elapsed_s = time.monotonic() - started
    shutil.rmtree(base)
    share = round(STEPS * count["runs"] / max(steps_computed, 1), 3)
    print(
        json.dumps(
            {
                **count,
                "interval": INTERVAL,
                "bit_equal": True,
                "elapsed_s": round(elapsed_s),
                "steps_kept_of_computed": share,
                "seed": args.seed,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
