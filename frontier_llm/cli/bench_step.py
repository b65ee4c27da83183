"""frontier-llm bench step RUN [key=value …]: measure the training step."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import fmean
from typing import TYPE_CHECKING

from frontier_llm.cli.arguments import JSON, command, option, positive, run_options, show
from frontier_llm.tables import aligned
from frontier_llm.units import format_seconds

if TYPE_CHECKING:
    from frontier_llm.config import RunConfig
    from frontier_llm.experiments.measure.step import StepBench
    from frontier_llm.run.launchers import RankEnv


@command(
    JSON,
    *run_options(),
    option(
        "--steps",
        type=positive,
        default=5,
        metavar="N",
        help="measured steps, after two of warm-up (default: 5)",
    ),
    line="time the training step, relative to this device's rate of matrix products",
    about="Time the training step and compare its rate with the rate of matrix products alone on this device.",
    examples=(
        "frontier-llm bench step quickstart --steps 10",
        "frontier-llm bench step bench parallel.tensor=2",
    ),
)
def step(args: argparse.Namespace) -> int:
    """Measure training steps in the run's layout, on a launcher's ranks or on local ranks."""
    from frontier_llm.cli.ranks import measure_on_ranks

    def measure(config: RunConfig, place: RankEnv | None) -> None:
        from frontier_llm.experiments.measure.step import bench_step
        from frontier_llm.training.join import joined_state

        with joined_state(config, place) as state:
            result = bench_step(state, args.steps)
            if state.mesh.world.rank == 0:
                show(args, vars(result), lambda: "\n".join(_lines(result)))

    return measure_on_ranks(args, measure)


def _lines(result: StepBench) -> Iterator[str]:
    yield f"{result.tokens_per_s:,.0f} tokens/s   {format_seconds(result.step_time_s)} per step"
    share = (
        f"{result.fraction_of_gemm:.2f} of the {result.gemm_tflops:.3f} TFLOP/s that its matrix products reach alone"
    )
    yield f"{result.model_tflops:.3f} model TFLOP/s per device: {share}"
    mean_s = fmean(result.step_times_s)  # the phases are means too, while step_time_s is the median
    phases = [(name, format_seconds(seconds), f"{seconds / mean_s:.1%}") for name, seconds in result.phases_s.items()]
    yield aligned(("phase", ">time", ">share"), phases, indent="  ")
    gemms = [(gemm["name"], gemm["M"], gemm["N"], gemm["K"], f"{gemm['tflops']:.3f}") for gemm in result.gemms]
    yield aligned(("product", ">M", ">N", ">K", ">TFLOP/s (forward and both gradients)"), gemms, indent="  ")
