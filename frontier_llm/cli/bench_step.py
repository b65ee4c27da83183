"""frontier-llm bench step RUN [key=value …]."""

from __future__ import annotations

import argparse
import json

from frontier_llm.cli.arguments import add_run, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the bench."""
    add_run(parser)
    parser.add_argument("--steps", type=positive, default=5, metavar="N", help="measured steps, after two of warm-up (default: 5)")


def run(args: argparse.Namespace) -> int:
    """Measure in the run's layout; joins a launcher's ranks or starts local ones."""
    from frontier_llm.cli.checks import check
    from frontier_llm.cli.local_ranks import local_world_size, start_local_ranks
    from frontier_llm.cluster.rank_env import discover
    from frontier_llm.config import load_run

    config = load_run(args.run, args.overrides)
    place = discover()
    if place is None:
        world_size = local_world_size(config)
        check(config, world_size, saves=False)
        if world_size > 1:
            flags = ["--steps", str(args.steps), *(["--json"] if args.json else [])]
            return start_local_ranks(config, world_size, ["bench", "step", args.run, *args.overrides, *flags])
    from frontier_llm.measure.step import bench_step
    from frontier_llm.train.join import joined_state

    with joined_state(config, place) as state:
        result = bench_step(state, args.steps)
        if state.mesh.world.rank == 0:
            _print(vars(result), args.json)
    return 0


def _print(result: dict, as_json: bool) -> None:
    from frontier_llm.units import format_seconds

    if as_json:
        print(json.dumps(result, indent=1))
        return
    print(f"{result['tokens_per_s']:,.0f} tokens/s   {format_seconds(result['step_time_s'])} per step")
    share = f"{result['fraction_of_gemm']:.2f} of the {result['gemm_tflops']:.3f} TFLOP/s that its matrix products reach alone"
    print(f"{result['model_tflops']:.3f} model TFLOP/s per device: {share}")
    for name, seconds in result["phases_s"].items():
        print(f"  {name:<16} {format_seconds(seconds):>9}  {seconds / result['step_time_s']:6.1%}")
    print(f"  {'product':<16} {'M':>6} {'N':>6} {'K':>6}   TFLOP/s (forward and both gradients)")
    for gemm in result["gemms"]:
        print(f"  {gemm['name']:<16} {gemm['M']:>6} {gemm['N']:>6} {gemm['K']:>6}   {gemm['tflops']:.3f}")
