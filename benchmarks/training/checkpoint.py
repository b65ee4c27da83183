"""Measures save and load speed against the machine's own: `dd conv=fsync` for writing, a plain read with sha256 for
reading.

    python -m benchmarks.training.checkpoint [--gib 1.0] [--repeats 3] [--directory .]

One rank, a model of eight matrices, median and best of the repeats. The kinds of work alternate. CPU seconds show the
amount of work on a machine that is not idle. The page cache is dropped before each read. This needs root; without it
both sides read from the cache.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.harness import FOLDER, parse_arguments
from frontier_llm.blueprint.optimizers import ADAMW
from frontier_llm.blueprint.parameters import Parameter, ParameterKind
from frontier_llm.checkpoint.checkpoints import Checkpoints
from frontier_llm.checkpoint.facts import JobFacts
from frontier_llm.checkpoint.manifest import Progress
from frontier_llm.comm import serial_mesh, single
from frontier_llm.config import BatchConfig, ModelConfig, OpsConfig, OptimizerConfig, RunConfig
from frontier_llm.ops import select_ops
from frontier_llm.optim import Zero, build_buckets
from frontier_llm.parallel.tensor import ShardedParameter
from frontier_llm.topology.shards import shard
from frontier_llm.units import GIB


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gib", type=float, default=1.0, help="size of the checkpoint")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--directory", type=Path, default=Path("."), help="folder on the file system to measure")
    return options


def checkpoints_of(directory: Path, gib: float) -> tuple[Checkpoints, Zero]:
    rows = int(gib * GIB / 12 / 4096 / 8)

    class Matrices(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for index in range(8):
                spec = shard(Parameter(f"weight{index}", (rows, 4096), ParameterKind.MATRIX, init_std=0.02))
                setattr(self, f"w{index}", ShardedParameter.create(torch.empty(spec.shape, device="meta"), spec))

    buckets = build_buckets(
        [Matrices()],
        ADAMW,
        single("dp"),
        1,
        torch.device("cpu"),
        40_000_000,
    )
    for bucket in buckets:
        bucket.weights.normal_()
    mesh = serial_mesh()
    optimizer = Zero(buckets, OptimizerConfig(), select_ops(OpsConfig(), "cpu", torch.float32))
    for state in optimizer.states:
        state["exp_avg"].normal_()
        state["exp_avg_sq"].normal_()
    model = ModelConfig(
        layers=1,
        hidden=64,
        heads=1,
        ffn_hidden=64,
        vocab_size=128,
        sequence_length=8,
    )
    config = RunConfig(model=model, batch=BatchConfig(global_batch=1))
    train = config.train.model_copy(update={"run_dir": str(directory)})
    return Checkpoints(train, mesh, optimizer, JobFacts(config.model_dump(mode="json"))), optimizer


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its finished children."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def drop_caches() -> None:
    os.sync()
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3")


def progress_at(step: int) -> Progress:
    return Progress(
        step=step,
        consumed_samples=0,
        tokens=0,
        optimizer_updates=0,
        loss_scale=1.0,
        scaler_clean_steps=0,
        skipped_steps=0,
    )


def summary(size: int, times: dict[str, list[float]], cpu_s: dict[str, float]) -> dict[str, object]:
    """Return GiB/s and CPU seconds per GiB of each kind of work, and the shares of the machine's own speed that saving
    and loading reach.
    """
    gib = size / GIB
    result: dict[str, object] = {}
    for name, seconds in times.items():
        result[name] = {
            "gib_per_s_median": round(gib / median(seconds), 3),
            "gib_per_s_best": round(gib / min(seconds), 3),
            "cpu_s_per_gib": round(cpu_s[name] / gib, 3),
            "all_s": [round(s, 2) for s in seconds],
        }
    for name, machine, ours in (
        ("save_share_of_dd", "dd_fsync", "save"),
        ("load_share_of_read_sha256", "read_sha256", "load"),
    ):
        result[name] = {
            "median": round(median(times[machine]) / median(times[ours]), 3),
            "best": round(min(times[machine]) / min(times[ours]), 3),
        }
    return result


def main() -> None:
    options = parse_arguments(parser(), smoke=["--gib", "0.01", "--repeats", "1", "--directory", FOLDER])
    folder = Path(tempfile.mkdtemp(dir=options.directory, prefix="bench-checkpoint-"))
    try:
        checkpoints, _ = checkpoints_of(folder, options.gib)
        size = checkpoints.total_bytes
        source = folder / "source"
        copies = [folder / f"dd-{number}" / "file" for number in range(options.repeats)]
        with source.open("wb") as file:
            for _ in range(size >> 20):
                file.write(os.urandom(1 << 20))

        def dd() -> None:
            # Write in the same way as a run: into a new folder, while the last two files still exist. Otherwise dd
            # rewrites the blocks of a file that was just deleted. That was five times as fast on a virtual disk.
            number = len(times["dd_fsync"])
            copies[number].parent.mkdir()
            command = ["dd", f"if={source}", f"of={copies[number]}", "bs=8M", "conv=fsync", "status=none"]
            subprocess.run(command, check=True)
            if number > 1:
                shutil.rmtree(copies[number - 2].parent)

        def read_and_hash() -> None:
            digest = hashlib.sha256()
            buffer = bytearray(8 << 20)
            with copies[len(times["read_sha256"])].open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    digest.update(memoryview(buffer)[:count])

        def save() -> None:
            checkpoints.begin(progress_at(next(steps)))
            checkpoints.finish(verify=False)

        def copy() -> None:
            checkpoints.snapshot.take()

        def load() -> None:
            checkpoints.newest(strict=True)

        steps = iter(range(1, 1000))
        save()  # allocates memory for the copy
        work = {
            "dd_fsync": dd,
            "save": save,
            "read_sha256": read_and_hash,
            "load": load,
            "training_waits_for_copy": copy,
        }
        times: dict[str, list[float]] = {name: [] for name in work}
        cpu_s = dict.fromkeys(work, 0.0)
        # the measured operations alternate, so that other load affects both sides of a ratio
        for _ in range(options.repeats):
            for name, measured in work.items():
                checkpoints.finish()
                if name == "dd_fsync":
                    source.read_bytes()  # into the page cache
                else:
                    os.sync()
                if name in ("read_sha256", "load"):
                    drop_caches()
                started = time.perf_counter()
                used_s = cpu_seconds()
                measured()
                times[name].append(time.perf_counter() - started)
                cpu_s[name] += (cpu_seconds() - used_s) / options.repeats
        print(json.dumps({"bytes": size, **summary(size, times, cpu_s)}, indent=1))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
