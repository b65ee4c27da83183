"""What `generate` and `evaluate` share: which model, on which ranks; joining a launcher's ranks or starting local ones."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from frontier_llm.cli.arguments import add_json, as_typed, positive

if TYPE_CHECKING:
    from frontier_llm.data.tokenizer import Tokenizer
    from frontier_llm.inference.model import InferenceModel
    from frontier_llm.inference.open import OpenedModel


_FLAGS = {"parallel.tensor": "--tensor", "parallel.pipeline": "--pipeline", "train.device=": "--device "}


def add_model_options(parser: argparse.ArgumentParser, replicas: bool) -> None:
    """The model, its tokenizer, its precision and its layout."""
    parser.add_argument("model", metavar="MODEL", help="a run directory, one of its checkpoints, or a Hugging Face directory")
    parser.add_argument("--tokenizer", help="a .model or tokenizer.json file, its directory, or `bytes` (default: the run's own)")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16", "fp64"), help="working precision (default: the run's; fp32 for others)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="cuda is also ROCm's name in torch (default: auto)"
    )
    parser.add_argument("--tensor", type=positive, default=1, metavar="N", help="tensor-parallel degree (default: 1)")
    parser.add_argument("--pipeline", type=positive, default=1, metavar="N", help="pipeline stages (default: 1)")
    if replicas:
        parser.add_argument(
            "--data-parallel", type=positive, default=1, metavar="N", help="copies of the model that share the work (default: 1)"
        )
    add_json(parser)


def on_ranks(args: argparse.Namespace, work: Callable[[argparse.Namespace], int]) -> int:
    """Run `work` on this rank when a launcher started it or one rank suffices, else on local ranks that are started here.

    Model and layout are refused here, in one process, before any rank starts.
    """
    from frontier_llm.cluster.rank_env import discover, environment

    world_size = args.tensor * args.pipeline * getattr(args, "data_parallel", 1)
    with as_typed(_FLAGS):
        if discover() is not None or world_size == 1:
            return work(args)
        from frontier_llm.inference.model import inference_plan
        from frontier_llm.inference.open import open_model

        inference_plan(open_model(args.model).source.model, args.tensor, args.pipeline, world_size)
    from frontier_llm.cluster.local import run_local_ranks

    with TemporaryDirectory(prefix="frontier-llm-") as logs:
        return run_local_ranks(world_size, as_arguments(args), environment(), Path(logs))


def as_arguments(args: argparse.Namespace) -> list[str]:
    """The command line that gives these arguments again."""
    words = [args.command, args.model]
    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')}"
        if name in ("command", "model") or value is None or value is False:
            continue
        if value is True:
            words.append(flag)
        else:
            # one word, so that a value may begin with a dash
            words += [f"{flag}={item}" for item in (value if isinstance(value, list) else [value])]
    return words


@contextmanager
def inference_model(args: argparse.Namespace, opened: OpenedModel) -> Iterator[tuple[InferenceModel, bool]]:
    """(this rank's part with its weights, True on the rank that prints)."""
    from frontier_llm.cluster.rank_env import discover
    from frontier_llm.config import OpsConfig
    from frontier_llm.inference.model import build_inference_model, inference_run
    from frontier_llm.train.join import joined

    place = discover()
    run = inference_run(opened.source.model, args.tensor, args.pipeline, place.world_size if place else 1, args.device)
    with joined(run, place) as (plan, mesh, device):
        model = build_inference_model(opened.source, plan, mesh, device, args.dtype or opened.dtype, OpsConfig())
        yield model, mesh.world.rank == 0


def tokenizer_of(args: argparse.Namespace, opened: OpenedModel) -> Tokenizer:
    """The tokenizer that was asked for, or the run's."""
    from frontier_llm.inference.open import open_tokenizer

    return open_tokenizer(opened, args.tokenizer)
