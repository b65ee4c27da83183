"""Schema and parser of manifest.json, which lists the tensors of a checkpoint and where their parts are stored.

The manifest is parsed strictly, because it determines which files are opened and where bytes are copied. The file is
the text of one JSON object. Its digest is in the file `manifest.sha256`, in the format of sha256sum.
docs/checkpoint_format.md describes every field.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from operator import add, le
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from frontier_llm.blueprint.optimizers import MASTER, STATISTIC
from frontier_llm.config.fields import first_fault
from frontier_llm.config.plugins import PluginRecord, recorded_names
from frontier_llm.data.position import Position
from frontier_llm.errors import CheckpointError, Problem, first_of
from frontier_llm.files import LIFT_HINT, lifted_bound
from frontier_llm.run.complete import MAX_MANIFEST_BYTES
from frontier_llm.run.records import is_count, is_number

FORMAT: Final = "frontier_llm checkpoint"
VERSION: Final = 4
READ_VERSIONS: Final = (3, VERSION)  # version 3 has a number of steps instead of a data position, and no plugins
DtypeName = Literal["F32", "F64"]
ITEM_BYTES = {"F32": 4, "F64": 8, "BF16": 2, "F16": 2}  # Key: safetensors' type. Checkpoints use F32 and F64.
# A model of 1T parameters on 3072 ranks, with 72,087 pieces, needs less than half of these limits.
MAX_MANIFEST_VALUES = 1 << 21  # Limit for the values in the text, counted by commas and brackets.
MAX_CORNERS = 1 << 21  # Limit for the number of corners of all pieces together (_coverage_problems).
MIN_BLOCK_BYTES = 1 << 20
MAX_BLOCK_BYTES = 1 << 30
MAX_PLUGINS = 1_000
_MAX_DIMS = 8
MAX_STEPS = 10**12  # largest number of steps of a run; train.steps has the same limit
_IMPOSSIBLE = (
    "no run can have this position in its data: restore the checkpoint from a copy, or move it away to continue "
    "from an older one"
)
_SHARD_NAME = re.compile(r"shard_[0-9]{5,9}\.safetensors")

Count = Annotated[int, Field(ge=0, le=2**53)]
Size = Annotated[int, Field(gt=0, le=2**53)]
Dims = Annotated[tuple[Size, ...], Field(max_length=_MAX_DIMS)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# (index into the manifest's tensors, offset, shape)
PieceRow = tuple[Count, Annotated[tuple[Count, ...], Field(max_length=_MAX_DIMS)], Dims]
StateName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]  # a state's name, or "master"


class DamagedCheckpoint(CheckpointError):
    """A file of the checkpoint differs from what was written. Another checkpoint may be intact."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


class Progress(_Record):
    """Scalars of a run. To continue, a run needs only these scalars and the tensors of the checkpoint.

    The state of a random generator is not needed. Initial weights are a pure function of the seed, and `position`
    determines the order of samples.
    """

    step: Count  # Index of the next step. Steps 0 … step-1 are done.
    consumed_samples: Count  # Number of samples so far, including samples that were left out.
    tokens: Count  # Number of targets that were trained on.
    # Position in the data. None for imported weights before the first step, and in manifests of version 3.
    position: Position | None = None
    optimizer_updates: Count  # Steps that were not skipped. Used by Adam's bias correction.
    loss_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    scaler_clean_steps: Count
    skipped_steps: Count
    policy: dict[str, Any] = {}  # State of the loss-spike policy (losses, rewinds), and the best evaluation.

    @property
    def is_best(self) -> bool:
        """True if the held-out loss of this step was the lowest of the run (train.keep_best)."""
        best = self.policy.get("best")
        return best is not None and bool(best["step"] == self.step)


class TensorEntry(_Record):
    """A global tensor of the checkpoint: its name, shape and kinds."""

    name: Annotated[str, Field(min_length=1, max_length=512)]
    shape: Dims
    kinds: tuple[StateName, ...] = ()  # stored kinds (master, optimizer states); () = all kinds of the manifest


class Shard(_Record):
    """A shard file and its rectangles in file order. A rectangle is stored once for each kind of its tensor."""

    file: str
    bytes: Size
    sha256: Digest  # digest of the file's header and blocks (shard.py)
    pieces: Annotated[tuple[PieceRow, ...], Field(min_length=1)]


class SavedPiece(NamedTuple):
    """A rectangle of a global tensor, and the kinds that a file stores of it. In JSON a piece is a list."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    kinds: tuple[str, ...]
    global_shape: tuple[int, ...]


class Manifest(_Record):
    """Description of a complete checkpoint."""

    format: Literal["frontier_llm checkpoint"]
    version: Literal[3, 4]
    block_bytes: Count  # block size of the shards' digests (shard.py)
    incarnation: Count  # number of the run's start that wrote the checkpoint
    progress: Progress
    layout: dict[str, int]  # parallel degrees of the run that wrote the checkpoint; loading ignores them
    config: dict[str, Any]
    config_sha256: Digest
    environment: dict[str, str]
    # plugins of the run that wrote the checkpoint; `known_plugins` also covers older manifests
    plugins: Annotated[tuple[PluginRecord, ...], Field(max_length=MAX_PLUGINS)] = ()
    data: dict[str, Digest]  # path → identity of each training dataset; empty for synthetic data
    dtype: DtypeName
    optimizer: str  # name of the optimizer whose states are saved
    kinds: Annotated[
        tuple[StateName, ...], Field(min_length=1)
    ]  # "master" and the name of every state that any tensor has
    tensors: tuple[TensorEntry, ...]
    shards: tuple[Shard, ...]

    @property
    def total_bytes(self) -> int:
        """Sum of the sizes of all shards in bytes."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def known_plugins(self) -> tuple[PluginRecord, ...]:
        """Plugins of the run that wrote the checkpoint.

        If the manifest lists no plugins, these are the plugins in its configuration, without digests.
        """
        return self.plugins or recorded_names(self.config)[:MAX_PLUGINS]

    def kinds_of(self, tensor: TensorEntry) -> tuple[str, ...]:
        """Return the kinds of values (master, optimizer states) that the checkpoint stores for a tensor."""
        return tensor.kinds or self.kinds

    def pieces_of(self, shard: Shard) -> list[SavedPiece]:
        """Return the pieces of a file, in file order."""
        rows = [(self.tensors[tensor], offset, shape) for tensor, offset, shape in shard.pieces]
        return [
            SavedPiece(tensor.name, offset, shape, self.kinds_of(tensor), tensor.shape)
            for tensor, offset, shape in rows
        ]

    def summary(self) -> dict[str, Any]:
        """Return the values that `checkpoint list` shows."""
        model = self.config.get("model", {})
        return {
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            "bytes": self.total_bytes,
            "shards": len(self.shards),
            "layout": " x ".join(f"{axis.upper()}{size}" for axis, size in self.layout.items() if axis != "zero"),
            "incarnation": self.incarnation,
            "model": str(model.get("name", "")) if isinstance(model, dict) else "",
        }

    def to_bytes(self) -> bytes:
        """Return the content of manifest.json."""
        return (json.dumps(self.model_dump(mode="json"), separators=(",", ":"), allow_nan=False) + "\n").encode()


def config_digest(config: Mapping[str, Any]) -> str:
    """Return the sha256 of a configuration's canonical JSON."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def shard_name(index: int) -> str:
    """Return the file name of the shard that global rank `index` wrote."""
    return f"shard_{index:05}.safetensors"


def parse(content: bytes, where: str) -> Manifest:
    """Return the manifest in a file's bytes.

    Raises DamagedCheckpoint for wrong JSON, types or ranges, for too many bytes or values, and for a file name that is
    not a shard's. The same error is raised for pieces out of bounds, for tensors that the pieces do not cover exactly
    once, and for counters that no run can have.

    Raises CheckpointError for another format version, and for a contradiction in the position in the data. The caller
    must then not fall back to an older checkpoint.
    """
    if len(content) > lifted_bound(MAX_MANIFEST_BYTES):
        raise DamagedCheckpoint(
            f"has more bytes than the limit of {lifted_bound(MAX_MANIFEST_BYTES)}", LIFT_HINT, where
        )
    values = sum(map(content.count, (b",", b"[", b"{")))
    if values > lifted_bound(MAX_MANIFEST_VALUES):
        raise DamagedCheckpoint(
            f"lists {values} values, more than the limit of {lifted_bound(MAX_MANIFEST_VALUES)}", LIFT_HINT, where
        )
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        _refuse_other_version(error, where)
        what = f"is not a manifest: {first_fault(error)}"
        if error.errors()[0]["loc"][:2] == ("progress", "position"):
            raise CheckpointError(what, _IMPOSSIBLE, where) from None
        raise DamagedCheckpoint(what, where=where) from None
    problems = [
        *_name_problems(manifest),
        *_progress_problems(manifest.progress),
        *(_piece_problems(manifest) or _coverage_problems(manifest)),
    ]
    if problems:
        raise DamagedCheckpoint(first_of([Problem(where, what) for what in problems]))
    if faults := _position_faults(manifest.progress):
        raise CheckpointError(first_of([Problem(where, what, _IMPOSSIBLE) for what in faults]))
    return manifest


def _refuse_other_version(error: ValidationError, where: str) -> None:
    """Raise CheckpointError if this version cannot read the manifest's format version."""
    versions = [fault["input"] for fault in error.errors() if fault["loc"] == ("version",)]
    if not versions or type(versions[0]) is not int:
        return
    version = versions[0]
    what = f"has format version {version}, but this frontier_llm reads versions {' and '.join(map(str, READ_VERSIONS))}"
    fix = "use the frontier_llm that wrote it, or a newer one"
    if version < READ_VERSIONS[0]:
        fix = (
            "the checkpoint is unchanged. To convert it, git checkout b4b69c5 (the last commit that reads it), "
            "resume the run there until it has saved once, and continue from that save with this version"
        )
    raise CheckpointError(what, fix, where)


def _duplicates(names: Sequence[str]) -> list[str]:
    return [f"{name!r} is listed {count} times" for name, count in Counter(names).items() if count > 1]


def _name_problems(manifest: Manifest) -> list[str]:
    files = [shard.file for shard in manifest.shards]
    problems = [f"{file!r} is not the name of a shard" for file in files if not _SHARD_NAME.fullmatch(file)]
    if manifest.block_bytes % MIN_BLOCK_BYTES or not 0 < manifest.block_bytes <= MAX_BLOCK_BYTES:
        problems.append(
            f"block_bytes is {manifest.block_bytes}, not a multiple of {MIN_BLOCK_BYTES} up to {MAX_BLOCK_BYTES}"
        )
    problems += _kind_problems(manifest)
    if config_digest(manifest.config) != manifest.config_sha256:
        problems.append("config_sha256 is not the digest of config")
    return problems + _duplicates(files) + _duplicates([tensor.name for tensor in manifest.tensors])


def _kind_problems(manifest: Manifest) -> list[str]:
    listed = {
        "the manifest": manifest.kinds,
        **{tensor.name: tensor.kinds for tensor in manifest.tensors if tensor.kinds},
    }
    return [
        f"the kinds of optimizer state of {owner} are {kinds}, and no optimizer writes these kinds"
        for owner, kinds in listed.items()
        if (kinds[0] != MASTER and kinds != (STATISTIC,))
        or len(set(kinds)) < len(kinds)
        or not set(kinds) <= set(manifest.kinds)
    ]


def _piece_problems(manifest: Manifest) -> list[str]:
    shapes = [tensor.shape for tensor in manifest.tensors]
    for shard in manifest.shards:
        for tensor, offset, shape in shard.pieces:
            if tensor >= len(shapes):
                return [f"{shard.file} has a piece of tensor {tensor}, but there are only {len(shapes)} tensors"]
            whole = shapes[tensor]
            if not (len(whole) == len(offset) == len(shape) and all(map(le, map(add, offset, shape), whole))):
                return [
                    f"{shard.file} has a piece {offset} + {shape} outside of {manifest.tensors[tensor].name} {whole}"
                ]
        if (
            shard.bytes
            <= sum(prod(piece.shape) * len(piece.kinds) for piece in manifest.pieces_of(shard))
            * ITEM_BYTES[manifest.dtype]
        ):
            return [f"{shard.file} has {shard.bytes} bytes, too few for its pieces"]
    return []


def _progress_problems(progress: Progress) -> list[str]:
    counters = ("optimizer_updates", "scaler_clean_steps", "skipped_steps")
    problems = [
        f"{key} is {count} after {progress.step} steps"
        for key in counters
        if (count := getattr(progress, key)) > progress.step
    ]
    if progress.step == 0:
        problems += [
            f"{key} is {count} before the first step"
            for key in ("consumed_samples", "tokens")
            if (count := getattr(progress, key))
        ]
    return problems + _policy_problems(progress)


def _policy_problems(progress: Progress) -> list[str]:
    """Return problems with the state of the loss-spike policy, which has no schema of its own.

    The function checks the types and bounds on which the training loop relies.
    """
    policy = progress.policy
    problems = []
    for key in ("losses", "norms"):
        values = policy.get(key, [])
        if not isinstance(values, list) or not all(is_number(value) for value in values):
            problems.append(f"policy.{key} is not a list of finite numbers")
    if not is_count(policy.get("left_out_steps", 0)) or policy.get("left_out_steps", 0) > MAX_STEPS:
        problems.append(f"policy.left_out_steps is {policy['left_out_steps']!r}")
    best = policy.get("best")
    if best is not None and not (
        isinstance(best, dict) and best.keys() == {"step", "loss"} and is_number(best["loss"])
    ):
        problems.append(f"policy.best is {best!r}, expected a step and a loss")
    elif best is not None and not _is_done(best["step"], progress):
        problems.append(f"policy.best is of step {best['step']!r} after {progress.step} steps")
    rewinds = policy.get("rewinds", [])
    if not isinstance(rewinds, list) or not all(
        isinstance(entry, dict) and _is_done(entry.get("step"), progress) for entry in rewinds
    ):
        problems.append(f"policy.rewinds is not a list of rewinds to a step up to {progress.step}")
    return problems


def _is_done(step: Any, progress: Progress) -> bool:
    return is_count(step) and step <= progress.step


def _position_faults(progress: Progress) -> list[str]:
    position = progress.position
    if position is None:
        return []
    return list(position.faults(progress.step, progress.consumed_samples, progress.tokens))


def _coverage_problems(manifest: Manifest) -> list[str]:
    """Return the tensors whose pieces overlap or do not cover the tensor.

    The indicator function of a box is the signed sum of the indicator functions of the orthants at its corners. These
    functions are linearly independent for different corners. The pieces therefore cover the tensor exactly once if and
    only if their signed corners cancel to the tensor's own corners.
    """
    # number of dims → rows (sign, tensor, offset, end); the tensor's own box has sign -1
    boxes: dict[int, list[tuple[int, ...]]] = {}
    for number, tensor in enumerate(manifest.tensors):
        dims = len(tensor.shape)
        boxes.setdefault(dims, []).append((-1, number, *(0,) * dims, *tensor.shape))
    for shard in manifest.shards:
        for number, offset, shape in shard.pieces:
            boxes[len(shape)].append((1, number, *offset, *map(add, offset, shape)))
    if (corners := sum(len(rows) << dims for dims, rows in boxes.items())) > lifted_bound(MAX_CORNERS):
        return [f"has pieces with {corners} corners, more than the limit of {lifted_bound(MAX_CORNERS)}; {LIFT_HINT}"]
    wrong = sorted(number for dims, rows in boxes.items() for number in _uncovered(np.array(rows, np.int64), dims))
    return [
        f"{manifest.tensors[n].name} {manifest.tensors[n].shape} has pieces that overlap or leave a gap"
        for n in wrong[:10]
    ]


def _uncovered(boxes: np.ndarray, dims: int) -> set[int]:
    """Return the tensors with a corner that does not cancel. `boxes` has the rows that `_coverage_problems` makes."""
    signs = np.concatenate([boxes[:, 0] * (-1) ** sum(ends) for ends in product((0, 1), repeat=dims)])
    columns = [[1, *(2 + dim + dims * end for dim, end in enumerate(ends))] for ends in product((0, 1), repeat=dims)]
    corners = np.concatenate([boxes[:, chosen] for chosen in columns])
    order = np.lexsort(corners.T)
    corners = corners[order]
    signs = signs[order]
    first = np.flatnonzero(np.concatenate([[True], (corners[1:] != corners[:-1]).any(1)]))
    return set(corners[first[np.add.reduceat(signs, first) != 0], 0].tolist())
