"""Compares shared memory with gloo's sockets on this machine, for the sizes that CPU training sends.

    python -m benchmarks.comm.shared_memory --ranks 2 [--rounds 30] [--json out.json]

Each (operation, size) is timed in rounds that alternate between the transports, so that other load affects both alike.
Prints median and minimum of the slowest rank's times. Ranks start together from a barrier before every call.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import parse_arguments, run_ranks, write_json
from frontier_llm.comm import (
    Meeting,
    all_gather,
    all_reduce_,
    barrier,
    build_mesh,
    connect,
    disconnect,
    post_receive,
    reduce_scatter,
)
from frontier_llm.comm.axis import Axis
from frontier_llm.config import CommConfig
from frontier_llm.topology.grid import Grid

SHAPES = {  # name: (elements, dtype); activation of the benchmark model, its half, a gradient bucket, a scalar
    "scalar fp64": (1, torch.float64),
    "64 KiB fp32": (16_384, torch.float32),
    "S256 B4 H384 bf16": (256 * 4 * 384, torch.bfloat16),
    "S256 B4 H384 fp32": (256 * 4 * 384, torch.float32),
    "bucket 32 MiB fp32": (8 << 20, torch.float32),
}


def operations(size: int, rank: int) -> dict[str, Callable[[Tensor, Axis], object]]:
    def send_and_receive(x: Tensor, axis: Axis) -> None:
        receive = post_receive(
            tuple(x.shape),
            x.dtype,
            x.device,
            axis,
            (rank - 1) % size,
        )
        assert axis.group is not None
        sent = axis.group.send(x, (rank + 1) % size)
        receive.wait()
        sent.wait()

    return {
        "all_reduce": all_reduce_,
        "reduce_scatter": reduce_scatter,
        "all_gather": lambda x, axis: all_gather(x[: x.shape[0] // size], axis),
        "send+receive": send_and_receive,
    }


def serve(rank: int, port: int, ranks: int, rounds: int, results: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    connect(
        rank,
        ranks,
        Meeting("127.0.0.1", port, 0, ranks),
        "gloo",
        120.0,
    )
    axes = {
        transport: build_mesh(Grid(ranks, 1, 1), rank, timeout_s=60.0, comm=CommConfig(transport=transport)).tp
        for transport in ("torch", "shm")
    }
    rows = []
    for shape, (elements, dtype) in SHAPES.items():
        for name, run in operations(ranks, rank).items():
            if elements < ranks and name != "all_reduce":
                continue
            x = torch.zeros(elements, dtype=dtype)
            times: dict[str, list[float]] = {transport: [] for transport in axes}
            for round_number in range(-2, rounds if elements < 1 << 20 else rounds // 4 + 1):
                for transport, axis in axes.items():
                    barrier(axes["shm"])
                    start_s = time.perf_counter()
                    run(x, axis)
                    mine = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64)
                    slowest = float(all_reduce_(mine, axes["shm"], "max"))
                    if round_number >= 0:
                        times[transport].append(slowest * 1e6)
            row: dict[str, object] = {
                "operation": name,
                "tensor": shape,
                "bytes": elements * x.element_size(),
            }
            for transport, values in times.items():
                row[f"{transport}_median_us"] = round(statistics.median(values), 1)
                row[f"{transport}_min_us"] = round(min(values), 1)
            rows.append(row)
    if rank == 0:
        results.put(rows)
    barrier(axes["shm"])
    disconnect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parse_arguments(parser, smoke=["--rounds", "1"])
    (rows,) = run_ranks(
        arguments.ranks,
        serve,
        arguments.ranks,
        arguments.rounds,
        timeout_s=600,
    )
    print(f"{arguments.ranks} ranks; microseconds, median (minimum)")
    print(f"{'operation':16}{'tensor':22}{'gloo':>22}{'shared memory':>22}{'gain':>8}")
    for row in rows:
        gloo, shm = (f"{row[f'{name}_median_us']:10.0f} ({row[f'{name}_min_us']:.0f})" for name in ("torch", "shm"))
        gain = row["torch_median_us"] / row["shm_median_us"]
        print(f"{row['operation']:16}{row['tensor']:22}{gloo:>22}{shm:>22}{gain:8.1f}")
    write_json(arguments.json, {"ranks": arguments.ranks, "rows": rows})


if __name__ == "__main__":
    main()
