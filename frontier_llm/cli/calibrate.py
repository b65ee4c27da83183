"""`frontier-llm calibrate`: measure a model's matrix products, attention, copies and collectives on this machine, and
write a machine file.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frontier_llm.cli.arguments import JSON, command, option, positive, positive_amount, run_options, show, yaml_file
from frontier_llm.cli.settings import refuse_settings

if TYPE_CHECKING:
    from frontier_llm.config import RunConfig


@command(
    *run_options("its model, precision and ops are timed", default="bench"),
    option(
        "--ranks",
        type=positive,
        default=2,
        metavar="N",
        help="number of ranks that measure at the same time; use the number that will train (default: 2)",
    ),
    option(
        "--repeats",
        type=positive,
        default=5,
        metavar="N",
        help="timings per sample; the median counts (default: 5)",
    ),
    option(
        "--budget-s",
        type=positive_amount,
        metavar="SECONDS",
        help=(
            "time limit of the measurements, counted from the start of the ranks' work. A round times each sample "
            "once; as many rounds as fit are measured, from 1 to --repeats (default: no limit)"
        ),
    ),
    option(
        "--memory-from",
        type=Path,
        metavar="DIR",
        help=(
            "measure nothing; write the machine file of this run with the device memory outside tensors that the "
            "run's first steps have recorded"
        ),
    ),
    option(
        "--emit-machine",
        type=yaml_file,
        default=Path("calibrated.yaml"),
        metavar="FILE",
        help="machine file to write (default: %(default)s)",
    ),
    JSON,
    about="Time a model's own products, attention, copies and collectives here, and write the machine file that plan "
    "reads.",
    examples=(
        "frontier-llm calibrate quickstart --ranks 2 --emit-machine mine.yaml",
        "frontier-llm plan llama-15m --machine mine.yaml",
        "frontier-llm calibrate bench --memory-from runs/first --emit-machine mine.yaml",
    ),
)
def calibrate(args: argparse.Namespace) -> int:
    """Run the measurements on a launcher's ranks or on local ranks. Rank 0 writes the machine file."""
    from frontier_llm.cli.checks import require_data
    from frontier_llm.cli.ranks import start_local_ranks
    from frontier_llm.config.schema import ParallelConfig
    from frontier_llm.machine.cores import set_own_threads
    from frontier_llm.machine.precision import load_resolved
    from frontier_llm.run.rank_env import discover
    from frontier_llm.topology.plan import tensor_degrees
    from frontier_llm.topology.rank_variables import set_rank_variables

    if args.memory_from is not None:
        _write_memory(args)
        return 0
    place = discover()
    ranks = place.world_size if place else args.ranks
    config = load_resolved(args.run, args.overrides)
    refuse_settings(
        args.overrides,
        lambda key: key.startswith("parallel.") or key == "batch.global_batch",
        "calibrate chooses the layout and the batch; set --ranks",
    )
    if place is not None:
        set_rank_variables(config, place)  # torch reads these variables when it is imported
    tensor = max(size for size in tensor_degrees(config.model) if size <= 2 and ranks % size == 0)
    batch = config.batch.model_copy(update={"global_batch": config.batch.micro_batch * ranks})
    config = config.model_copy(update={"parallel": ParallelConfig(tensor=tensor), "batch": batch})
    if place is None:
        require_data(config)
    if place is None and ranks > 1:
        return start_local_ranks(config, ranks, args.typed)
    if place is None:
        set_own_threads()
    _measure(config, place, args)
    return 0


def _write_memory(args: argparse.Namespace) -> None:
    """Write a machine file with the memory that a run has measured."""
    from frontier_llm.experiments.measure.machine_file import memory_content, write_machine
    from frontier_llm.experiments.measure.run_record import read_run

    content = memory_content(read_run(args.memory_from), _today())
    write_machine(args.emit_machine, content)
    written = {"file": str(args.emit_machine), "machine": content}
    show(args, written, lambda: _wrote(args))


def _today() -> str:
    import datetime

    return datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d")


def _wrote(args: argparse.Namespace) -> str:
    use = f"frontier-llm plan MODEL --machine {args.emit_machine} --nodes 1"
    return f"wrote {args.emit_machine}; use it with `{use}`"


def _measure(config: RunConfig, place: Any, args: argparse.Namespace) -> None:
    from frontier_llm.experiments.measure.machine_file import machine_content, report, write_machine
    from frontier_llm.experiments.measure.rounds import measure_within
    from frontier_llm.experiments.measure.samples import measure
    from frontier_llm.training.join import joined

    with joined(config, place) as (_, mesh, device):
        memory = memory_bytes(device.type, mesh.world.size)
        if args.budget_s is None:
            samples = measure(config, mesh, device, memory, args.repeats)
        else:
            samples = measure_within(
                args.budget_s, args.repeats, config=config, mesh=mesh, device=device, memory_bytes=memory
            )
        if mesh.world.rank == 0:
            content = machine_content(samples, config, _today())
            write_machine(args.emit_machine, content)
            written = {"file": str(args.emit_machine), "machine": content}
            show(args, written, lambda: f"{report(samples, config)}\n{_wrote(args)}")


def memory_bytes(device: str, ranks: int) -> float:
    """Return the memory of this rank's device. On a CPU, the computer's physical memory divided by the ranks."""
    if device == "cuda":
        import torch

        return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    import os

    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / ranks
