"""Finds the files of a Megatron checkpoint, and assigns each of their tensors to a parameter of our model.

Megatron-LM writes one file per (tensor rank, pipeline rank): `iter_0001000/mp_rank_TT[_PPP]/model_optim_rng.pt`. Layers
are numbered within the rank. Megatron-DeepSpeed writes one file per (layer, tensor rank):
`global_step1000/layer_LL-model_TT-model_states.pt`. The arguments are in `mp_rank_TT_model_states.pt`. The layer
numbers differ between versions of Megatron-DeepSpeed, so the kind of a layer is derived from its tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from frontier_llm.checkpoint.drift import flattened
from frontier_llm.errors import CheckpointError, Problem
from frontier_llm.interop.megatron.archive import Namespace, StoredTensor, TorchArchive

_RANK = re.compile(r"mp_rank_([0-9]{1,8})(?:_([0-9]{1,8}))?")
_LAYER_FILE = re.compile(r"layer_([0-9]{1,8})-model_([0-9]{1,8})-model_states\.pt")
_TRACKER_BYTES = 256
_REPORTED = 8
# model_rng.pt is written instead of model_optim_rng.pt if the distributed optimizer's state is in a separate file
_MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt", "model.pt")
_IN_LAYER = re.compile(r"(?:.*\.)?layers\.([0-9]{1,8})\.(.*)")
# Megatron's name within a layer, in the spellings of several versions → our name
_LAYER_NAMES = (
    (r"(input_layernorm|input_norm|self_attention\.linear_qkv\.layer_norm)[._](weight|bias)", r"attention_norm.\2"),
    (
        r"(post_attention_layernorm|post_attention_norm|pre_mlp_layernorm|mlp\.linear_fc1\.layer_norm)[._](weight|bias)",
        r"mlp_norm.\2",
    ),
    (r"((?:self_)?attention\.query_key_value|self_attention\.linear_qkv)\.(weight|bias)", r"attention.qkv.\2"),
    (r"((?:self_)?attention\.dense|self_attention\.linear_proj)\.(weight|bias)", r"attention.output.\2"),
    (r"mlp\.(dense_h_to_4h|linear_fc1)\.(weight|bias)", r"mlp.up.\2"),
    (r"mlp\.(dense_4h_to_h|linear_fc2)\.(weight|bias)", r"mlp.down.\2"),
)
_END_NAMES = (
    (r"(?:.*\.)?position_embeddings\.weight()", "embedding.position.weight"),
    (r"(?:.*\.)?(?:word_embeddings_for_head|output_layer|lm_head)\.weight()", "head.weight"),
    (r"(?:.*\.)?word_embeddings\.weight()", "embedding.token.weight"),
    (r"(?:.*\.)?(?:final_layernorm|final_norm)\.(weight|bias)", r"final_norm.\1"),
)
_NO_WEIGHTS = re.compile(r".*(_extra_state|inv_freq|masked_bias)(\d*)$")


@dataclass(frozen=True)
class StoredModel:
    """Content of a checkpoint in the order of the model, with our names."""

    where: str
    arguments: dict[str, Any]
    version: float  # checkpoint_version; determines the row order of query_key_value
    tensors: Mapping[str, list[StoredTensor]]  # our name → its part on each tensor rank


def find(directory: Path) -> StoredModel:
    """Open a step's folder, or the newest step below a directory.

    Raises CheckpointError with the expected content if there is no checkpoint.
    """
    folder = _step_folder(directory)
    layer_files = {
        match.groups(): path for path in folder.glob("layer_*") if (match := _LAYER_FILE.fullmatch(path.name))
    }
    if layer_files:
        return _deepspeed(folder, {(int(layer), int(rank)): path for (layer, rank), path in layer_files.items()})
    ranks: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob("mp_rank_*")):
        held = [path / name for name in _MODEL_FILES if (path / name).is_file()]
        if held and (match := _RANK.fullmatch(path.name)):
            ranks[int(match[1]), int(match[2] or 0)] = held[0]
    if ranks:
        return _megatron(folder, ranks)
    what = "contains no checkpoint of Megatron-LM or Megatron-DeepSpeed"
    fix = "give the folder that contains mp_rank_*/ or layer_*-model_states.pt, or its parent folder"
    if (folder / "metadata.json").exists() or (folder / ".metadata").exists():
        what = "is in Megatron's torch_dist format, which is not supported"
        fix = "save it again with Megatron's --ckpt-convert-format torch"
    raise CheckpointError(what, where=str(folder), fix=fix)


def _step_folder(directory: Path) -> Path:
    for tracker in ("latest_checkpointed_iteration.txt", "latest"):
        if (directory / tracker).is_file():
            with (directory / tracker).open("rb") as file:
                name = file.read(_TRACKER_BYTES).decode(errors="replace").strip()
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}", name):
                raise CheckpointError(
                    f"contains {name!r}, which is not the name of a folder",
                    "give the step's folder itself",
                    str(directory / tracker),
                )
            folder = directory / (f"iter_{int(name):07d}" if re.fullmatch("[0-9]{1,12}", name) else name)
            if not folder.is_dir():
                raise CheckpointError(
                    f"names {name}, which does not exist",
                    where=str(directory / tracker),
                    fix="give the step's folder itself",
                )
            return folder
    return directory


def _megatron(folder: Path, files: dict[tuple[int, int], Path]) -> StoredModel:
    tensor, pipeline = (1 + max(key[axis] for key in files) for axis in (0, 1))
    _complete((((t, p), f"mp_rank_{t:02d}_{p:03d}") for t in range(tensor) for p in range(pipeline)), files, folder)
    contents = {key: TorchArchive(path).content for key, path in files.items()}
    first = contents[0, 0]
    arguments = _arguments(first, files[0, 0])
    _expect_degree("tensor_model_parallel_size", arguments, tensor, folder)
    _expect_degree("pipeline_model_parallel_size", arguments, pipeline, folder)
    chunks = sorted((key for key in first if re.fullmatch(r"model\d*", key)), key=lambda key: int(key[5:] or 0))
    parts: dict[str, list[StoredTensor]] = {}
    layers_before = 0
    for chunk in chunks:  # in model order: the first virtual stage of every pipeline rank, then the second, …
        for stage in range(pipeline):
            numbers: set[int] = set()
            for rank in range(tensor):
                for name, value in flattened(contents[rank, stage][chunk]):
                    numbers |= _take(parts, name, value, rank, layers_before, files[rank, stage])
            layers_before += len(numbers)
    return StoredModel(str(folder), arguments, float(first.get("checkpoint_version", 0)), parts)


def _deepspeed(folder: Path, files: dict[tuple[int, int], Path]) -> StoredModel:
    layers = sorted({layer for layer, _ in files})
    tensor = 1 + max(rank for _, rank in files)
    expected = (
        ((layer, t), f"layer_{layer:02d}-model_{t:02d}-model_states.pt") for layer in layers for t in range(tensor)
    )
    _complete(expected, files, folder)
    state_file = folder / "mp_rank_00_model_states.pt"
    state = TorchArchive(state_file).content
    arguments = _arguments(state, state_file)
    _expect_degree("tensor_model_parallel_size", arguments, tensor, folder)
    parts: dict[str, list[StoredTensor]] = {}
    index = 0
    for layer in layers:
        contents = [dict(flattened(TorchArchive(files[layer, rank]).content)) for rank in range(tensor)]
        transformer = any("mlp." in name for name in contents[0])
        for rank, content in enumerate(contents):
            for name, value in content.items():
                if transformer:
                    name = f"layers.{index}.{name}"
                elif name in ("weight", "bias"):
                    name = f"final_norm.{name}"
                _take(parts, name, value, rank, 0, files[layer, rank])
        index += transformer
    return StoredModel(str(folder), arguments, float(state.get("checkpoint_version", 0)), parts)


def _complete(
    expected: Iterable[tuple[tuple[int, int], str]], files: Mapping[tuple[int, int], Path], folder: Path
) -> None:
    """Raise CheckpointError with the first missing files.

    The list of missing files is limited, because one file name can claim rank 99,999,999.
    """
    missing = list(islice((name for key, name in expected if key not in files), _REPORTED))
    if missing:
        raise CheckpointError(
            [Problem(str(folder / name), "is missing", "copy the complete checkpoint") for name in missing]
        )


def _expect_degree(key: str, arguments: Mapping[str, Any], count: int, folder: Path) -> None:
    """Raise CheckpointError if the degree in the arguments is not `count`: in this case the files of the last ranks are
    missing.
    """
    if arguments.get(key, count) != count:
        raise CheckpointError(
            f"was written with {key} {arguments[key]}, but has files for a {key} of only {count}",
            where=str(folder),
            fix="copy all files",
        )


def _arguments(content: Any, path: Path) -> dict[str, Any]:
    arguments = content.get("args") if isinstance(content, dict) else None
    if not isinstance(arguments, Namespace):
        raise CheckpointError(
            "contains no `args` of its run, which describe the model", where=str(path), fix="give a training checkpoint"
        )
    return vars(arguments)


def _take(
    parts: dict[str, list[StoredTensor]], name: str, value: Any, rank: int, layers_before: int, path: Path
) -> set[int]:
    """Add one tensor under our name.

    Returns a set with its layer's number within the rank, empty for a tensor outside the layers.
    """
    if not isinstance(value, StoredTensor) or _NO_WEIGHTS.match(name):
        return set()
    match = _IN_LAYER.fullmatch(name)
    ours = _renamed(match[2], _LAYER_NAMES) if match else _renamed(name, _END_NAMES)
    if ours is None:
        raise CheckpointError(f"{name} is not part of any supported model", where=str(path), fix="see docs/megatron.md")
    full = f"layers.{layers_before + int(match[1])}.{ours}" if match else ours
    held = parts.setdefault(full, [])
    if len(held) == rank:  # False for the copy of a tied embedding on the last stage, which is not needed
        held.append(value)
    return {int(match[1])} if match else set()


def _renamed(name: str, table: tuple[tuple[str, str], ...]) -> str | None:
    for pattern, ours in table:
        if match := re.fullmatch(pattern, name):
            return match.expand(ours)
    return None
