"""Save and load speed against the machine's own: `dd conv=fsync` for writing, a plain read with sha256 for reading, in the same run.

    python scripts/bench_checkpoint.py [--gib 1.0] [--repeats 3] [--directory .]

One rank, a model of one large matrix; every figure is the best of the repeats, page cache dropped before each read (needs root; without
it both sides read from the cache).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from frontier_llm.checkpoint import CheckpointManager, Progress
from frontier_llm.comm import serial_mesh, single
from frontier_llm.config import BatchConfig, ModelConfig, OpsConfig, OptimizerConfig, RunConfig
from frontier_llm.ops import select_ops
from frontier_llm.optim import AdamW, build_buckets
from frontier_llm.tensor_parallel import ShardedParameter
from frontier_llm.topology import whole
from frontier_llm.units import GIB


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gib", type=float, default=1.0, help="size of the checkpoint")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--directory", type=Path, default=Path("."), help="on the file system to measure")
    return options


def manager_of(directory: Path, gib: float) -> tuple[CheckpointManager, AdamW]:
    rows = int(gib * GIB / 12 / 4096 / 8)

    class Matrices(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for index in range(8):
                spec = whole(f"weight{index}", (rows, 4096), 0.02)
                setattr(self, f"w{index}", ShardedParameter.create(torch.empty(spec.shape, device="meta"), spec, False))

    buckets = build_buckets([Matrices()], single("dp"), 1, torch.device("cpu"), 40_000_000)
    for bucket in buckets:
        bucket.weights.normal_()
    mesh = serial_mesh()
    optimizer = AdamW(buckets, OptimizerConfig(), mesh, select_ops(OpsConfig(), "cpu", torch.float32))
    for state in optimizer.states:
        state.exp_avg.normal_()
        state.exp_avg_sq.normal_()
    model = ModelConfig(layers=1, hidden=64, heads=1, ffn_hidden=64, vocab_size=128, sequence_length=8)
    config = RunConfig(model=model, batch=BatchConfig(global_batch=1))
    return CheckpointManager(directory, mesh, buckets, optimizer, config=config, keep=2), optimizer


def drop_caches() -> None:
    os.sync()
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3")


def best_s(work: Callable[[], None], repeats: int, before: Callable[[], None] = lambda: None) -> float:
    times = []
    for _ in range(repeats):
        before()
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    options = parser().parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.directory, prefix="bench-checkpoint-"))
    try:
        manager, _ = manager_of(folder / "checkpoints", options.gib)
        size = manager._writer.total_bytes
        source, target = folder / "source", folder / "dd"
        with source.open("wb") as file:
            for _ in range(size >> 20):
                file.write(os.urandom(1 << 20))

        def dd() -> None:
            target.unlink(missing_ok=True)
            command = ["dd", f"if={source}", f"of={target}", "bs=8M", "conv=fsync", "status=none"]
            subprocess.run(command, check=True)

        def read_and_hash() -> None:
            digest, buffer = hashlib.sha256(), bytearray(8 << 20)
            with target.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    digest.update(memoryview(buffer)[:count])

        def save() -> None:
            step = next(steps)
            manager.save(
                Progress(
                    step=step, consumed_samples=0, tokens=0, optimizer_updates=0, loss_scale=1.0, scaler_clean_steps=0, skipped_steps=0
                )
            )

        def copy() -> None:
            manager._writer.snapshot.take()

        steps = iter(range(1, 1000))
        save()  # allocates the copy
        manager.wait()
        rates = {
            "dd_fsync": best_s(dd, options.repeats, before=source.read_bytes),
            "save": best_s(save, options.repeats, before=manager.wait),
            "read_sha256": best_s(read_and_hash, options.repeats, before=drop_caches),
        }
        manager.wait()
        rates["load"] = best_s(lambda: manager.load_latest(strict=True), options.repeats, before=drop_caches)
        rates["training_waits_for_copy"] = best_s(copy, options.repeats)
        result = {name: {"s": round(seconds, 3), "gib_per_s": round(size / GIB / seconds, 3)} for name, seconds in rates.items()}
        result["save_share_of_dd"] = round(rates["dd_fsync"] / rates["save"], 3)
        result["load_share_of_read_sha256"] = round(rates["read_sha256"] / rates["load"], 3)
        print(json.dumps({"bytes": size, **result}, indent=1))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
