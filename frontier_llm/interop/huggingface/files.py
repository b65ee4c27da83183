"""Reads and writes sharded safetensors files with an index, one tensor at a time. Only one tensor is in memory.

A file begins with the length of the header (u64, little-endian). The JSON header maps name → dtype, shape, [begin, end)
in the data. The data follows in row-major order without holes. Several files are listed in
model.safetensors.index.json: {"metadata": {"total_size"}, "weight_map": {name: file}}.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from frontier_llm.checkpoint.shard import safetensors_layout
from frontier_llm.errors import CheckpointError, Problem
from frontier_llm.files import (
    LIFT_HINT,
    created,
    lifted_bound,
    read_beyond,
    write_all,
    write_durably,
)
from frontier_llm.topology.buckets import packed
from frontier_llm.units import strict_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# largest header of a shard and largest index file; each limit is enough for about 100,000 tensors
MAX_HEADER_BYTES = 1 << 24
MAX_INDEX_BYTES = 1 << 25
_CODES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class ShardedReader:
    """Tensors by name from a directory of safetensors files, memory-mapped."""

    def __init__(self, directory: Path) -> None:
        """Open all shards. Raises CheckpointError with every shard that is missing or damaged."""
        self.directory = directory
        self.files = _weight_map(directory)
        self._open: dict[str, Any] = {}
        problems = list[Problem]()
        for file in sorted(set(self.files.values())):
            try:
                self._open[file] = _opened(directory / file)
            except FileNotFoundError:
                count = sum(holder == file for holder in self.files.values())
                problems.append(
                    Problem(
                        str(directory / file),
                        f"is missing; according to {INDEX} it has {count} tensors",
                        "fetch the shard again",
                    )
                )
            except CheckpointError as error:
                problems.extend(error.problems)
        if problems:
            raise CheckpointError(problems)
        held = {file: set(handle.keys()) for file, handle in self._open.items()}
        absent = [name for name, file in self.files.items() if name not in held[file]]
        if absent:
            what = f"{INDEX} lists {len(absent)} tensors that are missing, e.g. {absent[0]} in {self.files[absent[0]]}"
            raise CheckpointError(what, fix="fetch index and shards of the same revision", where=str(directory))

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape from the header, without reading data."""
        return tuple(self._open[self.files[name]].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """Return one tensor in the file's dtype."""
        return self._open[self.files[name]].get_tensor(name)


def _opened(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > lifted_bound(MAX_HEADER_BYTES):
            what = f"has a header of {header_bytes} bytes, more than the limit of {lifted_bound(MAX_HEADER_BYTES)}"
            raise CheckpointError(what, f"fetch the file again; {LIFT_HINT}", str(path))
        return safe_open(str(path), framework="pt")
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"is damaged: {error}", where=str(path), fix="fetch the file again") from error


def read_json(path: Path, most_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a file of at most `most_bytes`.

    Raises CheckpointError if the file is larger or holds no object. OSError is not converted.
    """
    with path.open("rb") as file:
        text = read_beyond(file, lifted_bound(most_bytes))
    if len(text) > lifted_bound(most_bytes):
        raise CheckpointError(
            f"has more bytes than the limit of {lifted_bound(most_bytes)}",
            f"fetch the file again; {LIFT_HINT}",
            str(path),
        )
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is not JSON: {error}", "fetch the file again", str(path)) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"contains a JSON {type(content).__name__}, but an object is expected", "fetch the file again", str(path)
        )
    return content


def _weight_map(directory: Path) -> dict[str, str]:
    """Return name → file, from the index or from the only file's header."""
    index = directory / INDEX
    if index.is_file():
        content = read_json(index, MAX_INDEX_BYTES)
        try:
            weight_map = dict(content["weight_map"])
            outside = [file for file in weight_map.values() if Path(file).name != file]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"is damaged: {error!r}", where=str(index), fix="fetch the index again") from error
        if outside:
            raise CheckpointError(
                f"names {outside[0]!r}, which is not a file in the same directory",
                where=str(index),
                fix="fetch the index again",
            )
        return weight_map
    if (directory / SINGLE).is_file():
        return dict.fromkeys(_opened(directory / SINGLE).keys(), SINGLE)
    pickles = [path.name for path in directory.glob("*.bin")] + [path.name for path in directory.glob("*.pt")]
    why = f"; {pickles[0]} is a pickle, which can run code and is never opened" if pickles else ""
    fix = "give the model's directory"
    if next(directory.glob("*.safetensors"), None):
        fix = f"fetch {INDEX} too: it lists the shard of each tensor"
    elif pickles:
        fix = (
            "if you trust it, convert it: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…, "
            "safe_serialization=True)"
        )
    raise CheckpointError(f"contains neither {SINGLE} nor {INDEX}{why}", where=str(directory), fix=fix)


def write_sharded(
    directory: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    tensors: Iterable[Tensor],
    shard_bytes: int,
) -> list[str]:
    """Write `tensors` to files of at most `shard_bytes`. A tensor larger than `shard_bytes` has its own file. Returns
    the files' names.

    `tensors` come in the order of `shapes`. The headers are computed from `shapes` alone, so only one tensor is in
    memory at a time.
    """
    size = dtype.itemsize
    shards = list(packed(shapes, lambda name: prod(shapes[name]) * size, shard_bytes))
    if len(shards) == 1:
        names = [SINGLE]
    else:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    stream = iter(tensors)
    for name, shard in zip(names, shards, strict=True):
        head, (*starts, _) = safetensors_layout(
            {tensor: shapes[tensor] for tensor in shard},
            _CODES[dtype],
            {"format": "pt"},
        )
        with created(directory / name) as descriptor:
            write_all(descriptor, memoryview(head), 0)
            for tensor, start in zip(shard, starts, strict=True):
                values = next(stream)
                assert tuple(values.shape) == shapes[tensor], f"{tensor}: {tuple(values.shape)} is not {shapes[tensor]}"
                write_all(descriptor, values.to(dtype).reshape(-1).view(torch.uint8).numpy().data, start)
    if next(stream, None) is not None:
        raise AssertionError("more tensors than names")
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        content = {"metadata": {"total_size": size * sum(map(prod, shapes.values()))}, "weight_map": weight_map}
        write_durably(directory / INDEX, (strict_json(content, indent=2, sort_keys=True) + "\n").encode())
    return names
