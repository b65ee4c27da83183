"""Starts the ranks of commands that need them, or joins the ranks of a launcher."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from frontier_llm import log
from frontier_llm.cli.arguments import NO_VERIFY, PLUGIN, as_typed, option
from frontier_llm.cli.settings import refuse_settings

if TYPE_CHECKING:
    import torch

    from frontier_llm.comm import Axis
    from frontier_llm.config import RunConfig
    from frontier_llm.inference.model import InferenceModel
    from frontier_llm.inference.open import OpenedModel
    from frontier_llm.run.launchers import RankEnv


def local_world_size(config: RunConfig) -> int:
    """Return the number of ranks to start without a launcher: the product of the degrees. data is 1 if not set."""
    return config.parallel.model_ranks * (config.parallel.data or 1)


def start_local_ranks(config: RunConfig, world_size: int, argv: Sequence[str]) -> int:
    """Run `frontier-llm ARGV` as `world_size` ranks, with their logs in the run directory.

    Return the exit code of the first rank that failed, or 0.
    """
    from frontier_llm.cluster.local import run_local_ranks
    from frontier_llm.run.rank_env import environment

    run_dir = Path(config.train.run_dir)
    return run_local_ranks(world_size, argv, environment(), run_dir / "logs", run_dir=run_dir)


def read_run(name_or_path: str, overrides: Sequence[str], place: RankEnv | None) -> RunConfig:
    """Return the run with its working precision, and log the notes about it.

    A local rank logs no notes, because the process that started the local ranks has logged them. Raises FrontierError
    if the run's device does not support the working precision.
    """
    from frontier_llm.machine.precision import load_resolved, refuse_on_device

    is_logged = place is not None and place.launcher == "local"
    with log.quiet() if is_logged else nullcontext():
        config = load_resolved(name_or_path, overrides)
        refuse_on_device(config)
        if config.train.device == "cpu":
            log.info(f"train.device=cpu: the ranks compute on CPUs, and no GPU of machine={config.machine} is checked")
    return config


def measure_on_ranks(args: argparse.Namespace, measure: Callable[[RunConfig, RankEnv | None], None]) -> int:
    """Run `measure` in the run's layout.

    Under a launcher it runs on this rank. Without one it runs alone if one rank suffices, or else on local ranks that
    receive the same command line.
    """
    from frontier_llm.cli.checks import check
    from frontier_llm.machine.cores import set_own_threads
    from frontier_llm.run.rank_env import discover
    from frontier_llm.topology.rank_variables import set_rank_variables

    place = discover()
    config = read_run(args.run, args.overrides, place)
    if place is not None:
        set_rank_variables(config, place)  # torch reads these variables when it is imported
    world_size = place.world_size if place else local_world_size(config)
    if place is None and world_size == 1:
        set_own_threads()
    if place is None:
        check(config, world_size, saves=False)
    if place is None and world_size > 1:
        return start_local_ranks(config, world_size, args.typed)
    measure(config, place)
    return 0


_FLAGS = {"train.device=": "--device "}


MODEL_OPTIONS = (
    PLUGIN,
    NO_VERIFY,
    option("model", metavar="CHECKPOINT", help="a run directory, one checkpoint's folder, or a Hugging Face directory"),
    option(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="layout: parallel.tensor, parallel.pipeline, parallel.expert, parallel.data (default: 1 each)",
    ),
    option("--tokenizer", help="a .model or tokenizer.json file, its directory, or `bytes` (default: the run's own)"),
    option(
        "--dtype",
        choices=("fp32", "bf16", "fp16", "fp64"),
        help="working precision (default: the run's; fp32 for others)",
    ),
    option(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="cuda is also ROCm's name in torch (default: auto)",
    ),
)


@dataclass(frozen=True)
class Degrees:
    """Layout of a model for evaluation or generation. `expert` is the number of tensor ranks that share the experts."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    data: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data


def degrees(args: argparse.Namespace) -> Degrees:
    """Return the layout that the user typed. Raises ConfigError for a key that inference does not use."""
    from frontier_llm.config import ParallelConfig, build
    from frontier_llm.config.load import parse_overrides

    used = [f"parallel.{field.name}" for field in fields(Degrees)]
    refuse_settings(args.overrides, lambda key: key not in used, f"{args.command} uses {', '.join(used)}")
    content = parse_overrides(args.overrides)
    parallel = build(ParallelConfig, content.get("parallel", {}), where="command line: parallel")
    return Degrees(parallel.tensor, parallel.pipeline, parallel.expert, parallel.data or 1)


def on_ranks(args: argparse.Namespace, work: Callable[[argparse.Namespace], int]) -> int:
    """Run `work` on this rank if a launcher started it or one rank suffices. Otherwise start local ranks.

    An invalid model or layout is refused here, in one process, before any local rank starts.
    """
    from frontier_llm.machine.cores import set_own_threads
    from frontier_llm.run.rank_env import discover, environment

    layout = degrees(args)
    with as_typed(_FLAGS):
        place = discover()
        if place is None and layout.ranks == 1:
            set_own_threads()
        if place is not None or layout.ranks == 1:
            return work(args)
        from frontier_llm.inference.model import inference_plan
        from frontier_llm.inference.open import open_model

        model = open_model(args.model, plugins=args.plugin).source.model
        inference_plan(model, layout.tensor, layout.pipeline, layout.ranks, layout.expert)
    from frontier_llm.cluster.local import run_local_ranks
    from frontier_llm.run.node_folders import temporary_folder

    with temporary_folder() as logs:
        return run_local_ranks(layout.ranks, args.typed, environment(), logs)


@contextmanager
def inference_model(args: argparse.Namespace, opened: OpenedModel) -> Iterator[tuple[InferenceModel, bool]]:
    """Yield (this rank's part of the model with its weights, True on the rank that prints).

    Raises DamagedCheckpoint for a damaged checkpoint, unless `args.no_verify` is set.
    """
    from frontier_llm.config import OpsConfig
    from frontier_llm.inference.model import build_inference_model, inference_run
    from frontier_llm.run.rank_env import discover
    from frontier_llm.training.join import joined

    place = discover()
    layout = degrees(args)
    run = inference_run(
        model=opened.source.model,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        world_size=place.world_size if place else 1,
        device=args.device,
        expert=layout.expert,
    )
    with joined(run, place, recorded=False) as (plan, mesh, device):
        verify_together(args, opened, mesh.world, device)
        model = build_inference_model(
            source=opened.source,
            plan=plan,
            mesh=mesh,
            device=device,
            dtype=args.dtype or opened.dtype,
            ops=OpsConfig(),
        )
        yield model, mesh.world.rank == 0


def verify_together(args: argparse.Namespace, opened: OpenedModel, world: Axis, device: torch.device) -> None:
    """Compare the checkpoint with its digests. Each rank reads its share of the files. Collective.

    Raises DamagedCheckpoint with the damaged files on all ranks.
    """
    from frontier_llm.checkpoint.manifest import DamagedCheckpoint
    from frontier_llm.checkpoint.weights import CheckpointWeights
    from frontier_llm.comm import all_gather_json
    from frontier_llm.errors import Problem, first_of

    if not isinstance(opened.source, CheckpointWeights):
        return
    if args.no_verify:
        log.info(f"{opened.path}: {verification(args, opened)}")
        return
    mine = [vars(problem) for problem in opened.source.damage(world.rank, world.size)[:10]]
    problems = [Problem(**row) for rows in all_gather_json(mine, world, device) for row in rows]
    if problems:
        raise DamagedCheckpoint(first_of(problems))


def verification(args: argparse.Namespace, opened: OpenedModel) -> str:
    """Return a text that states whether the checkpoint was compared with its digests."""
    if opened.run is None:
        return "not verified: a Hugging Face directory has no digests"
    if args.no_verify:
        return "not verified (--no-verify)"
    return "verified against its digests"
