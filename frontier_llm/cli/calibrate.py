"""`frontier-llm calibrate`: time the model's own products, attention, copies and collectives here, and write a machine file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frontier_llm.config import RunConfig


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser("calibrate", help="measure this machine and write its machine file", description=__doc__)
    parser.add_argument("run", nargs="?", default="bench", help="run file whose model, precision and ops are timed (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--ranks", type=int, default=2, help="ranks that measure at once, as tensor-parallel ranks (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("calibrated.yaml"), help="machine file to write (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timings per sample, of which the median counts (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Join a launcher's ranks or start local ones; rank 0 writes the file."""
    from frontier_llm.cluster.local import run_local_ranks
    from frontier_llm.cluster.rank_env import discover, environment
    from frontier_llm.config import load_run

    place = discover()
    ranks = place.world_size if place else args.ranks
    config = load_run(args.run, [*args.overrides, f"parallel.tensor={ranks}", "parallel.pipeline=1", "parallel.data=1"])
    if place is None and ranks > 1:
        words = ["calibrate", args.run, *args.overrides, "--output", str(args.output), "--repeats", str(args.repeats)]
        return run_local_ranks(ranks, words, environment(), Path(config.train.run_dir) / "logs")
    _measure(config, place, args)
    return 0


def _measure(config: RunConfig, place: Any, args: argparse.Namespace) -> None:
    import datetime

    import yaml

    from frontier_llm.machine import load_machine
    from frontier_llm.planner.calibration import machine_content, report
    from frontier_llm.train.calibrate import measure
    from frontier_llm.train.join import joined

    batch = config.batch.model_copy(update={"global_batch": config.batch.micro_batch})
    config = config.model_copy(update={"batch": batch})
    with joined(config, place) as (_, mesh, device):
        samples = measure(config, mesh, device, memory_bytes(device.type, mesh.world.size), args.repeats)
        if mesh.world.rank == 0:
            when = datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d")
            content = machine_content(samples, config, when)
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(yaml.safe_dump(content, sort_keys=False, width=200), encoding="utf-8")
            load_machine(str(args.output))
            print(report(samples, config))
            print(f"wrote {args.output}; use it with `frontier-llm plan MODEL --machine {args.output} --nodes 1`")


def memory_bytes(device: str, ranks: int) -> float:
    """Memory of this rank's device; on a CPU the computer's physical memory divided over the ranks."""
    if device == "cuda":
        import torch

        return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    import os

    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / ranks
