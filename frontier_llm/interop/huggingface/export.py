"""Writes a source of weights as a Hugging Face directory: weights, configuration, tokenizer and model card.

`HubRepository` uploads an export to a model repository of the Hugging Face Hub with huggingface_hub (extra `hf`).
The token comes from `hf auth login` or HF_TOKEN.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from frontier_llm.checkpoint.weights import WeightSource
from frontier_llm.config import ModelConfig
from frontier_llm.data.remote import reason_of
from frontier_llm.errors import CheckpointError, Problem
from frontier_llm.files import write_durably
from frontier_llm.interop.huggingface.card import model_card
from frontier_llm.interop.huggingface.families import FAMILIES, Family
from frontier_llm.interop.huggingface.files import write_sharded
from frontier_llm.interop.huggingface.read import CONFIG
from frontier_llm.units import GIB, strict_json


def family_for(model: ModelConfig) -> Family:
    """Return the first family that computes exactly this model.

    Raises CheckpointError with the requirements of each family that are not met.
    """
    reasons = {family.architecture: family.refusals(model) for family in FAMILIES}
    for family in FAMILIES:
        if not reasons[family.architecture]:
            return family
    raise CheckpointError(
        [
            Problem(
                f"cannot be exported as {name}",
                "; ".join(why),
                "train a model that one of the named architectures can represent",
            )
            for name, why in reasons.items()
        ]
    )


def check_export(model: ModelConfig, directory: str | Path) -> tuple[Family, Path]:
    """Return the family and the resolved directory of an export.

    Raises CheckpointError if no family computes this model, or if the directory cannot be created or replaced.
    """
    family = family_for(model)
    resolved = Path(directory).resolve()
    if resolved.exists() and not resolved.is_dir():
        raise CheckpointError("is not a directory", where=str(directory), fix="give a new directory")
    if resolved.exists() and any(resolved.iterdir()):
        raise CheckpointError("is not empty", where=str(directory), fix="give a new directory, or remove this one")
    if resolved.is_mount():
        raise CheckpointError("is a mount point", where=str(directory), fix="give a new directory inside of it")
    return family, resolved


@dataclass(frozen=True)
class Companions:
    """Files that are exported with the weights, and facts for the model card."""

    # file name → text, or path of the file to copy
    tokenizer_files: Mapping[str, str | Path] = field(default_factory=dict)
    eos_token_id: int | None = None
    facts: Mapping[str, object] = field(default_factory=dict)  # facts of the run for the model card


def export_huggingface(
    source: WeightSource,
    directory: str | Path,
    dtype: torch.dtype,
    companions: Companions | None = None,
    shard_gib: float = 5.0,
) -> Family:
    """Write config.json, weights, tokenizer files and README.md. Returns the family.

    The directory is renamed into place after the last file is written. Raises CheckpointError as `check_export` does,
    and if the renaming fails.
    """
    companions = companions or Companions()
    model = source.model
    family, directory = check_export(model, directory)
    working = directory.with_name(f"{directory.name}.tmp.{os.getpid()}")
    working.mkdir(parents=True)
    try:
        rules = family.names.rules(model)
        shapes = {name: shape for rule in rules for name, shape in zip(rule.theirs, rule.their_shapes(), strict=True)}
        ours = ((rule, rule.parameter.name, rule.parameter.shape) for rule in rules)
        tensors = (
            part for rule, name, shape in ours for part in rule.cut(source.rectangle(name, (0,) * len(shape), shape))
        )
        files = write_sharded(working, shapes, dtype, tensors, int(shard_gib * GIB))
        config = write_config(family, model, dtype, companions.eos_token_id)
        write_durably(working / CONFIG, (strict_json(config, indent=2, sort_keys=True) + "\n").encode())
        for name, content in companions.tokenizer_files.items():
            if isinstance(content, Path):
                shutil.copyfile(content, working / name)
            else:
                write_durably(working / name, content.encode())
        card = model_card(family.architecture, model, config["dtype"], files, companions.facts)
        write_durably(working / "README.md", card.encode())
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        raise
    try:
        working.rename(directory)  # replaces an empty directory
    except OSError as error:
        what = f"cannot be replaced: {error.strerror}; the export is complete in {working}"
        raise CheckpointError(what, "rename the complete directory", str(directory)) from error
    return family


def write_config(family: Family, model: ModelConfig, dtype: torch.dtype, eos_token_id: int | None) -> dict[str, Any]:
    """Return the config.json of a model.

    Keys that transformers 4 and 5 spell differently are written in both spellings. Releases before 5 read only
    rope_theta and silently use 10000 without it. Release 5 reads rope_parameters.
    """
    name = str(dtype).removeprefix("torch.")
    return {
        "architectures": [family.architecture], "model_type": family.model_type, "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings, "torch_dtype": name, "dtype": name, "use_cache": True,
        "bos_token_id": eos_token_id, "eos_token_id": eos_token_id, **family.config_json(model),
    }  # fmt: skip


class HubRepository:
    """Repository to which this user may write. The repository is created before the export, so that a refusal wastes no
    time.
    """

    def __init__(self, name: str, private: bool = False) -> None:
        from huggingface_hub import HfApi

        self.name = name
        self._api = HfApi()
        with _refusals(
            name,
            "log in with `hf auth login` or set HF_TOKEN, give the repository as USER/NAME, or export without "
            "--push-to-hub",
        ):
            self._api.create_repo(name, private=private, exist_ok=True)

    def upload(self, directory: str | Path) -> str:
        """Upload every file of an export as one commit. Returns the commit's address."""
        with _refusals(self.name, f"the export is complete; upload it later: hf upload {self.name} {directory}"):
            return str(
                self._api.upload_folder(
                    repo_id=self.name,
                    folder_path=directory,
                    commit_message="Export of frontier_llm",
                ).commit_url
            )


@contextmanager
def _refusals(name: str, fix: str) -> Iterator[None]:
    """Turn every error of the Hub's client into a CheckpointError.

    The classes of the errors depend on the client's version and its network library.
    """
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"the Hub refused the upload: {reason_of(error)}", where=name, fix=fix) from error
