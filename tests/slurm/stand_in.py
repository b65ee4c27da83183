"""A training run without a model. Ranks count steps, save checkpoints without weights, and exit in order after a
signal.

As a module it is the program of each rank. `stand_in.py job …` is the batch script's supervisor with this program in
place of `frontier-llm train`. With this program, tests of node failures and walltimes take seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from frontier_llm.cluster import supervisor
from frontier_llm.config import load_run
from frontier_llm.files import write_atomically
from frontier_llm.run import run_dir
from frontier_llm.run.failure import REFUSED, Evidence, Failure, Suspect, write_failure
from frontier_llm.run.rank_env import discover, environ, node_name
from frontier_llm.run.signals import EXIT_INTERRUPTED, SignalWatcher

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # ranks start this file as a program
from tests.harness.checkpoints import save_only


def refuse_as_rank_1(rank: int, directory: Path) -> int:
    """Act as after the ranks' agreement: rank 1 refuses, and rank 0 has recorded that rank 1 gives no sign of life."""
    if rank == 0:
        silent = Failure("it gives no sign of life", Evidence.NOTICES, rank=1, host=node_name(), host_suspect=True)
        write_failure(directory, silent)
    while not (directory / "failure.json").exists():
        time.sleep(0.02)
    if rank != 1:
        time.sleep(60)
        return 1
    print("frontier-llm train: error\ncomm.backend: not possible here\n    fix: comm.backend=gloo", flush=True)
    return REFUSED


def train(words: list[str]) -> int:
    config = load_run(words[0], words[1:])
    place = discover()
    assert place is not None
    directory = Path(config.train.run_dir)
    incarnation = int(environ("FRONTIER_LLM_INCARNATION") or 0)

    def say_alive(step: int) -> None:
        write_atomically(directory / "alive" / f"{incarnation}-{place.rank}", f"{place.hostname} {step}")

    if environ("STAND_IN_REFUSE"):
        return refuse_as_rank_1(place.rank, directory)
    if environ("STAND_IN_DEAF") and incarnation == 1:
        os.kill(os.getpid(), signal.SIGUSR1)  # Slurm's warning, before Python has a signal handler
    with SignalWatcher() as watcher:
        step = run_dir.latest_step(directory)
        wrong = environ("STAND_IN_WRONG")
        if wrong in run_dir.untrusted_hosts(directory):
            wrong = None
        say_alive(step)  # if rank 0 has already saved the last step, a slower rank does not enter the loop
        while step < config.train.steps and watcher.requested is None and not (directory / run_dir.STOP_FILE).exists():
            if planted := environ("STAND_IN_CRASH"):
                when, who = map(int, planted.split(":"))
                if (step, place.rank) == (when, who):
                    raise RuntimeError("planted crash")
            if wrong and step == 3:  # if replicas differ, all ranks end in this way (training/guard/cause.py)
                if place.rank == 0:
                    run_dir.distrust(directory, [wrong])
                    suspect = Suspect(2, wrong, "w")
                    record = Failure(
                        "ranks differ",
                        Evidence.COMPARISON,
                        "wrong results",
                        2,
                        wrong,
                        host_suspect=True,
                        suspects=(suspect,),
                    )
                    write_failure(directory, record)
                while not (directory / "failure.json").exists():  # otherwise srun ends rank 0 before it has written
                    time.sleep(0.02)
                return 1
            time.sleep(float(environ("STAND_IN_STEP_S") or 0.05))
            step += 1
            say_alive(step)
            if place.rank == 0:
                with (directory / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps({"step": step, "loss": 1 / step}) + "\n")
                save_only(directory, step)
        done = step >= config.train.steps
        print(f"rank {place.rank} ends at {step}, asked by {watcher.requested}, {os.getpid()}", flush=True)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as in frontier_llm/cli/train.py
    return 0 if done else EXIT_INTERRUPTED


if __name__ == "__main__":
    if sys.argv[1] == "job":
        sys.exit(supervisor.main(sys.argv[2:], program=(__file__, "train")))
    sys.exit(train(sys.argv[2:]))
