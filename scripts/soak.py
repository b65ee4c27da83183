"""Tests that nothing leaks: injects random faults into runs for a given time, then runs for a long time without faults.

    python scripts/soak.py [--minutes 30] [--seed 1] [--ranks 2]

Faults are drawn at random from scripts/kill_anywhere.py. Each disturbed run must end bit-equal to the undisturbed one.
After each run the program counts this process's open files, memory and shared regions, leftovers beside the
checkpoints, and processes without a parent. During the long run it counts files, memory and regions of every rank once
a second. All counts cover this program's own processes, so other load on the machine does not matter. Prints a JSON
summary. The exit code is 1 if a run differs or a series grows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from kill_anywhere import CODES, Campaign, Different

from frontier_llm.comm.host_memory import MEMORY_DIR
from frontier_llm.run.run_dir import STOP_FILE
from frontier_llm.run.signals import EXIT_INTERRUPTED

FAULTS = ["kill", "kill", *CODES]
LONG_SHARE = 1 / 6  # share of the time that is used for the long run
SLACK = {"files": 2, "rss_mib": 24, "shared_regions": 0, "orphans": 0, "leftovers": 0}  # largest growth of a series

Series = dict[str, list[float]]


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def orphans() -> int:
    """Count the other processes of this program's group. All forked ranks have been waited for at this point."""
    found = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # the process has just ended
            found += int(fields[2]) == os.getpgrp()
    return found


def shared_regions(pid: int) -> int:
    """Count the files of /dev/shm that a process has mapped. They have no name, so a file that no process maps is
    freed.
    """
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if f"{MEMORY_DIR}/" in line})  # column 4: inode


def sample_process(pid: int, series: Series) -> None:
    series["files"].append(open_files(pid))
    series["rss_mib"].append(rss_mib(pid))
    series["shared_regions"].append(shared_regions(pid))


def sample(base: Path, series: Series) -> None:
    """Count all resources between two runs, when no rank is alive."""
    sample_process(os.getpid(), series)
    series["orphans"].append(orphans())
    series["leftovers"].append(len(list(base.iterdir())))


def long_run(campaign: Campaign, seconds: float) -> dict[str, Series]:
    """Run undisturbed for `seconds`, then stop with the file STOP. Samples once a second. Returns the series by
    rank.
    """
    run = campaign.new_run("long")
    attempt = campaign.start(run, "", steps=10**6)
    stop_s = time.monotonic() + seconds
    found: dict[str, Series] = {f"rank {rank}": defaultdict(list) for rank in range(len(attempt.pids))}
    while not attempt.ended_within(1.0):
        for series, pid in zip(found.values(), attempt.pids, strict=True):
            sample_process(pid, series)
        if time.monotonic() > stop_s:
            (run.run_dir / STOP_FILE).touch()
    codes = attempt.end(kill=False)
    if codes != [EXIT_INTERRUPTED] * len(codes):
        raise Different(f"the long run ended with exit codes {codes}\n{(run.directory / 'log').read_text()[-3000:]}")
    shutil.rmtree(run.directory)
    return found


def growth(values: list[float]) -> float:
    """Return the median of the last third minus the median of the middle third. The first third is start-up."""
    third = len(values) // 3
    return median(values[-third:]) - median(values[third : 2 * third]) if third else 0.0


def growing(where: str, series: Series) -> list[str]:
    return [
        f"{where}: {name} grew by {growth(values):g}" for name, values in series.items() if growth(values) > SLACK[name]
    ]


def span(series: Series) -> dict[str, list[float]]:
    return {name: [round(min(values), 1), round(max(values), 1)] for name, values in series.items()}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--minutes", type=float, default=30)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--ranks", type=int, default=2)
    args = options.parse_args()
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    torch.set_num_threads(1)
    print(f"seed {args.seed}", file=sys.stderr, flush=True)
    base = Path(tempfile.mkdtemp(prefix="soak-"))
    started = time.monotonic()
    series = defaultdict[str, list[float]](list)
    try:
        campaign = Campaign(base, args.ranks, args.seed, 1, FAULTS, 0.3)
        disturbed = time.monotonic()
        while time.monotonic() - started < 60 * args.minutes * (1 - LONG_SHARE):
            campaign.one_run()
            sample(base, series)
            print(f"{time.monotonic() - started:.0f} s: {dict(campaign.count)}", file=sys.stderr, flush=True)
        disturbed_s = time.monotonic() - disturbed
        ranks = long_run(campaign, 60 * args.minutes * LONG_SHARE)
    except Different as difference:
        print(f"seed {args.seed}: {difference}")
        return 1
    problems = [*growing("this process", series), *(line for rank, own in ranks.items() for line in growing(rank, own))]
    shutil.rmtree(base)
    summary = {
        **campaign.summary(),
        "effective_time": round(campaign.count["runs"] * campaign.undisturbed_s / disturbed_s, 3),
        "from_to": {"this process": span(series), **{rank: span(own) for rank, own in ranks.items()}},
        "grew": problems,
        "bit_equal": True,
        "elapsed_s": round(time.monotonic() - started),
        "seed": args.seed,
    }
    print(json.dumps(summary))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
