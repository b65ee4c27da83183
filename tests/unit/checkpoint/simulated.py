"""Simulates the ranks of a layout one after another, without processes: real buckets, optimizer states, planning,
writing and reading.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from frontier_llm.blueprint.optimizers import ADAMW
from frontier_llm.checkpoint import directory as folder
from frontier_llm.checkpoint import load, shard
from frontier_llm.checkpoint.facts import JobFacts, build_manifest, contents_of
from frontier_llm.checkpoint.manifest import Manifest, Progress
from frontier_llm.checkpoint.snapshot import Snapshot
from frontier_llm.comm import Axis, Ledger
from frontier_llm.config import ModelConfig, OpsConfig, OptimizerConfig, load_model
from frontier_llm.model import build_stages
from frontier_llm.ops import select_ops, working_dtype
from frontier_llm.optim import Zero, build_buckets
from frontier_llm.optim.buckets import Bucket
from frontier_llm.parallel.tensor import LayerContext, WeightGradients
from frontier_llm.topology.grid import Grid
from frontier_llm.topology.plan import split_layers


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    chunks: int = 1
    zero: int = 1
    order: str = "tp-dp-pp"
    dtype: str = "fp32"
    bucket_numel: int = 30_000
    cp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def grid(self) -> Grid:
        return Grid(self.tp, self.pp, self.dp, self.order, self.cp, ep=self.ep, etp=self.etp)


def progress(step: int = 7) -> Progress:
    return Progress(
        step=step,
        consumed_samples=step * 8,
        tokens=step * 8 * 32,
        optimizer_updates=step - 1,
        loss_scale=1024.0,
        scaler_clean_steps=3,
        skipped_steps=1,
    )


def axis(grid: Grid, name: str, rank: int) -> Axis:
    folded = {"ep": grid.experts_group, "edp": grid.replicas_group}
    ranks = folded[name](rank) if name in folded else grid.group(name, rank)
    return Axis(name, ranks.index(rank), len(ranks), ranks, None, Ledger())


def buckets_of(model: ModelConfig, layout: Layout, rank: int, device: str = "cpu") -> list[Bucket]:
    grid = layout.grid
    dtype = working_dtype(layout.dtype)
    ops = select_ops(OpsConfig(), "cpu", dtype)
    context = LayerContext(
        axis(grid, "tp", rank), layout.tp > 1, ops, WeightGradients(), dtype, ep=axis(grid, "ep", rank), etp=grid.etp
    )
    specs = split_layers(model, layout.pp * layout.chunks)
    pp_rank = grid.coordinates(rank)["pp"]
    mine = [specs[chunk * layout.pp + pp_rank] for chunk in range(layout.chunks)]
    stages = build_stages(model, mine, context, torch.device("cpu" if device == "cpu" else device))
    edp = axis(grid, "edp", rank)
    return build_buckets(
        stages, ADAMW, axis(grid, grid.replicas, rank), layout.zero, torch.device(device), layout.bucket_numel, edp=edp
    )


def value(kind: str, name: str, index: np.ndarray) -> np.ndarray:
    """Return the value of state elements in these tests, which depends only on their name and index in the model."""
    seed = zlib.crc32(f"{kind}/{name}".encode())
    return ((index * 2654435761 + seed) % 16_777_213).astype(np.float32)


def expected_state(kind: str, bucket: Bucket) -> np.ndarray:
    """Return the state slice of a rank, element by element from `value`. Padding is zero."""
    size = bucket.weights.numel() // bucket.owner.size
    state = np.zeros(size, np.float64 if bucket.gradients.dtype == torch.float64 else np.float32)
    for run in bucket.owned_ranges():
        spec = run.spec
        local = np.unravel_index(np.arange(run.start, run.stop), spec.shape)
        place = np.ravel_multi_index([d + o for d, o in zip(local, spec.offset, strict=True)], spec.global_shape)
        state[run.position : run.position + run.stop - run.start] = value(kind, spec.name, place)
    return state


def optimizer_of(buckets: list[Bucket], filled: bool) -> Zero:
    optimizer = Zero(buckets, OptimizerConfig(), select_ops(OpsConfig(), "cpu", torch.float32))
    optimizer.states = []
    for bucket in buckets:
        arrays = {kind: expected_state(kind, bucket) for kind in bucket.kinds}
        optimizer.states.append(
            {kind: torch.from_numpy(array if filled else np.zeros_like(array)) for kind, array in arrays.items()}
        )
    return optimizer


def write(model: ModelConfig, layout: Layout, directory: Path, step: int = 7, config: dict | None = None) -> Manifest:
    """Save as `layout` would, into directory/step_…, and return the manifest."""
    directory.mkdir(exist_ok=True)
    building = folder.temporary(directory, step, 1)
    building.mkdir()
    pieces = []
    parts = []
    dtype = "F32"
    for rank in range(layout.grid.world_size):
        optimizer = optimizer_of(buckets_of(model, layout, rank), filled=True)
        snapshot = Snapshot(optimizer, rank)
        snapshot.take()
        head = snapshot.layout(step).head
        data = snapshot.data()
        digest = shard.write(building / snapshot.file, head, data)
        parts.append({"file": snapshot.file, "bytes": len(head) + len(data), "sha256": digest})
        pieces.append(snapshot.pieces)
        dtype = snapshot.dtype
    degrees = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": layout.dp, "zero": layout.zero}
    facts = JobFacts(config=config or {}, layout=degrees, optimizer="adamw", incarnation=1)
    manifest = build_manifest(progress(step), facts, contents_of(pieces, dtype), parts)
    folder.commit(directory, manifest, manifest.to_bytes(), manifest.incarnation)
    return manifest


def check_loads(model: ModelConfig, layout: Layout, path: Path) -> None:
    """Load as every rank of `layout` would, and compare each element."""
    manifest, _ = folder.read_manifest(path)
    for rank in range(layout.grid.world_size):
        buckets = buckets_of(model, layout, rank)
        optimizer = optimizer_of(buckets, filled=False)
        assert load.read_shards(path, manifest, optimizer, rank, layout.grid.world_size) == []
        for bucket, state in zip(buckets, optimizer.states, strict=True):
            for kind, tensor in state.items():
                np.testing.assert_array_equal(tensor.numpy(), expected_state(kind, bucket))


TINY = load_model("llama-tiny")
TINY_EXPERTS = load_model("moe-tiny")
TINY_TIED = load_model("gpt-tiny")
