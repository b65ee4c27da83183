"""frontier-llm checkpoint import-hf | import-megatron | export-hf: convert checkpoints from and to the formats of other
programs, in one process without GPUs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING

from frontier_llm.cli.arguments import JSON, NO_VERIFY, PLUGIN, command, option, positive_amount, show
from frontier_llm.cli.settings import refuse_settings
from frontier_llm.errors import CheckpointError
from frontier_llm.units import GIB

if TYPE_CHECKING:
    from frontier_llm.checkpoint.weights import WeightSource
    from frontier_llm.config import ModelConfig
    from frontier_llm.inference.open import OpenedModel

_THEN = (
    "`frontier-llm train RUN` then continues from it on any layout. Without RUN, print the model section that a run "
    "file needs."
)
_DTYPES = ("fp32", "bf16", "fp16", "fp64")

IMPORT_OPTIONS = (
    option(
        "run",
        nargs="?",
        metavar="RUN",
        help="run file whose model has the same shape, or the name of one in configs/runs",
    ),
    option(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="e.g. train.run_dir=runs/imported",
    ),
    option(
        "--shard-gib",
        type=positive_amount,
        default=8.0,
        metavar="N",
        help="size of the checkpoint's files (default: 8)",
    ),
    JSON,
)


@command(
    option("source", metavar="DIR", help="directory with config.json and safetensors"),
    *IMPORT_OPTIONS,
    PLUGIN,
    line="start a run from a Hugging Face model (docs/huggingface.md has the families)",
    about=f"Write step 0 of a run from a Hugging Face directory; {_THEN}",
    examples=(
        "frontier-llm checkpoint import-hf Llama-2-7b/ >> my_run.yaml",
        "frontier-llm checkpoint import-hf Llama-2-7b/ my_run.yaml",
    ),
)
def import_hf(args: argparse.Namespace) -> int:
    """Import a Hugging Face directory."""
    from frontier_llm.config.plugins import import_plugins
    from frontier_llm.interop.huggingface import HuggingFaceModel, read_model_config

    import_plugins(args.plugin)
    return _import(args, read_model_config, lambda directory, model: HuggingFaceModel(directory, model.vocab_multiple))


@command(
    option(
        "source",
        metavar="DIR",
        help="directory with iter_*/mp_rank_*/ or global_step*/layer_*-model_states.pt, or one step of it",
    ),
    *IMPORT_OPTIONS,
    line="start a run from a checkpoint of Megatron-LM or Megatron-DeepSpeed",
    about="Write step 0 of a run from the weights of a Megatron checkpoint of any tensor- and pipeline-parallel "
    "layout, without "
    f"running anything that its files contain; {_THEN}",
    examples=("frontier-llm checkpoint import-megatron megatron_ckpt/ pretrain_22b",),
)
def import_megatron(args: argparse.Namespace) -> int:
    """Import a Megatron checkpoint. The run's vocabulary size determines which rows of the embedding are padding."""
    from frontier_llm.interop.megatron.weights import MegatronModel

    return _import(
        args,
        lambda directory: MegatronModel(directory).model,
        lambda directory, model: MegatronModel(directory, model.vocab_size, model.vocab_multiple),
    )


def _import(
    args: argparse.Namespace,
    read_model: Callable[[str], ModelConfig],
    read_weights: Callable[[str, ModelConfig], WeightSource],
) -> int:
    """Write a checkpoint after checking that run, weights and tokenizer fit.

    Without a run, print the model section that a run file needs.
    """
    from frontier_llm.checkpoint.weights import compare_models, write_checkpoint
    from frontier_llm.data.tokenizer import load_tokenizer
    from frontier_llm.inference.open import check_vocabulary, tokenizer_in
    from frontier_llm.machine.precision import load_resolved

    if args.run is None:
        refuse_settings(args.overrides, lambda key: True, "name the run that it changes, after the directory")
        model = read_model(args.source)
        tokenizer = tokenizer_in(Path(args.source))
        content = {"model": model.model_dump(mode="json"), "tokenizer": tokenizer}
        show(args, content, lambda: _section(model, tokenizer))
        return 0
    config = load_resolved(args.run, args.overrides)
    source = read_weights(args.source, config.model)
    problems = compare_models(config.model, source.model)
    if problems:
        raise CheckpointError(problems)
    if config.data.tokenizer is not None:
        check_vocabulary(load_tokenizer(config.data.tokenizer), config.model)
    written = write_checkpoint(source, config, int(args.shard_gib * GIB))
    show(args, {"checkpoint": str(written)}, lambda: str(written))
    return 0


def _section(model: ModelConfig, tokenizer: str | None) -> str:
    """Return the model section of a run file, with the tokenizer in a comment."""
    from frontier_llm.config import dump

    lines = ["model:", indent(dump(model).rstrip(), "  ")]
    if tokenizer:
        lines.append(f"# its tokenizer, for the run's data section: {{tokenizer: {tokenizer}}}")
    return "\n".join(lines)


@command(
    option("source", metavar="CHECKPOINT", help="a run directory (its newest checkpoint) or one checkpoint's folder"),
    option("output", metavar="DIR", help="directory to create"),
    option("--dtype", choices=_DTYPES, help="precision of the written weights (default: the run's working precision)"),
    option("--tokenizer", help="file, directory, `bytes`, or `none` (default: the run's, or its data's)"),
    option(
        "--shard-gib",
        type=positive_amount,
        default=5.0,
        metavar="N",
        help="size of the files (default: 5)",
    ),
    NO_VERIFY,
    option(
        "--push-to-hub",
        metavar="USER/NAME",
        help="upload the export to this repository of the Hugging Face Hub, which is made if there is none",
    ),
    option("--private", action="store_true", help="with --push-to-hub: make the repository private"),
    PLUGIN,
    JSON,
    line="write a checkpoint as a Hugging Face model",
    about="Write config.json, safetensors, tokenizer and a model card. Reads the checkpoint tensor by tensor, "
    "whatever layout wrote it.",
    examples=("frontier-llm checkpoint export-hf runs/quickstart exported/",),
)
def export_hf(args: argparse.Namespace) -> int:
    """Open and verify a checkpoint, and write it as a Hugging Face model.

    All other checks come before the verification, because it reads every byte.
    """
    from frontier_llm.checkpoint.manifest import DamagedCheckpoint
    from frontier_llm.checkpoint.weights import CheckpointWeights
    from frontier_llm.inference.open import open_model, open_tokenizer
    from frontier_llm.interop.huggingface import (
        Companions,
        HubRepository,
        check_export,
        export_huggingface,
        tokenizer_files,
    )
    from frontier_llm.ops import working_dtype

    opened = open_model(args.source, plugins=args.plugin)
    check_export(opened.source.model, args.output)
    companions = Companions(facts=run_facts(opened))
    if args.tokenizer != "none":
        tokenizer = open_tokenizer(opened, args.tokenizer, ", or --tokenizer none to export weights alone")
        files = tokenizer_files(tokenizer, opened.source.model.sequence_length)
        companions = Companions(files, tokenizer.eod, companions.facts)
    repository = HubRepository(args.push_to_hub, args.private) if args.push_to_hub else None
    damage = opened.source.damage() if isinstance(opened.source, CheckpointWeights) and not args.no_verify else []
    if damage:
        raise DamagedCheckpoint(damage)
    family = export_huggingface(
        opened.source,
        args.output,
        working_dtype(args.dtype or opened.dtype),
        companions,
        args.shard_gib,
    )
    commit = repository.upload(args.output) if repository is not None else None
    content = {"directory": args.output, "architecture": family.architecture, "commit": commit}
    text = f"{Path(args.output)}: {family.architecture}"
    show(args, content, lambda: f"{text}\n{commit}" if commit else text)
    return 0


def run_facts(opened: OpenedModel) -> dict[str, object]:
    """Return the facts about the run that the checkpoint recorded, for the model card."""
    from frontier_llm.checkpoint.weights import CheckpointWeights
    from frontier_llm.units import format_count

    if not isinstance(opened.source, CheckpointWeights) or opened.run is None:
        return {}
    manifest = opened.source.manifest
    run = opened.run
    degrees = " x ".join(
        f"{axis} {manifest.layout[axis]}" for axis in ("tp", "cp", "pp", "dp") if axis in manifest.layout
    )
    if isinstance(run.data.train, str):
        sources = "synthetic"
    else:
        sources = ", ".join(Path(source.path).name for source in run.data.train)
    return {
        "Steps": manifest.progress.step,
        "Tokens": format_count(manifest.progress.tokens),
        "Global batch": f"{run.batch.global_batch} x {run.model.sequence_length} tokens",
        "Precision": run.precision.dtype,
        "Learning rate": f"{run.optimizer.lr:g}, {run.optimizer.schedule}",
        "Weight decay": run.optimizer.weight_decay,
        "Layout": degrees,
        "Data": sources,
        "Seeds": f"weights {run.train.seed}, data {run.data.seed}",
        "Configuration digest": manifest.config_sha256[:16],
        **manifest.environment,
    }
