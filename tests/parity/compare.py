"""Assemble global tensors from the ranks' pieces, and list the differences between two runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from tests.parity.three_steps import Piece, RankResult

Tensors = dict[str, np.ndarray]

# In float64, another order of a sum of a few thousand terms changes the 13th digit. A mistake changes the first digits.
RELATIVE = 1e-10
# Adam divides by sqrt(v) + 1e-8. The gradient of the key's bias is zero except for rounding errors of 1e-16. These
# errors change the parameter by 1e-8 of a step of 1e-2.
AFTER_STEPS = 1e-9


@dataclass(frozen=True)
class Run:
    """The results of one run as global tensors, assembled from all ranks."""

    losses: list[float]
    norms: list[float]
    initial: Tensors
    gradients: Tensors
    final: Tensors
    drift: tuple[
        str, ...
    ]  # replicas that are not bitwise equal, results that differ between ranks, and messages missing in `costs`


def assemble(ranks: Sequence[Sequence[Piece]], what: str) -> tuple[Tensors, list[str]]:
    """Return global tensors from the pieces of all ranks, and a list of replicas that are not equal.

    Raises AssertionError if no rank holds an element of a global tensor.
    """
    tensors: Tensors = {}
    drift: set[str] = set()
    for pieces in ranks:
        rectangles: dict[tuple, np.ndarray] = {}
        for piece in pieces:
            tensors.setdefault(piece.name, np.full(piece.global_shape, np.nan))
            local = rectangles.setdefault((piece.name, piece.offset, piece.shape), np.full(prod(piece.shape), np.nan))
            local[piece.start : piece.stop] = piece.values
        for (name, offset, shape), local in rectangles.items():
            window = tensors[name][tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
            values = local.reshape(shape)
            both = ~np.isnan(window) & ~np.isnan(values)
            if not np.array_equal(window[both], values[both]):
                drift.add(f"{what} of {name}: replicas differ by {np.abs(window[both] - values[both]).max():.1e}")
            np.copyto(window, values, where=~np.isnan(values))
    holes = [name for name, tensor in tensors.items() if np.isnan(tensor).any()]
    assert not holes, f"{what}: no rank holds all of {holes}"
    return tensors, sorted(drift)


def gather(results: Sequence[RankResult]) -> Run:
    """Assemble the results of all ranks."""
    first = results[0]
    drift = [
        f"rank {rank} reports another loss or norm"
        for rank, other in enumerate(results)
        if (other.losses, other.norms) != (first.losses, first.norms)
    ]
    drift += [f"rank {rank}: {line}" for rank, one in enumerate(results) for line in one.traffic]
    parts = {}
    for what in ("initial", "gradients", "final"):
        parts[what], differing = assemble([getattr(rank, what) for rank in results], what)
        drift += differing
    return Run(first.losses, first.norms, **parts, drift=tuple(drift))


def _tensor_differences(what: str, ours: Tensors, theirs: Tensors, tolerance: float) -> list[str]:
    if ours.keys() != theirs.keys():
        return [f"{what}: names differ: {sorted(ours.keys() ^ theirs.keys())}"]
    scale = max(np.abs(tensor).max() for tensor in theirs.values())
    found = []
    for name, tensor in ours.items():
        if tensor.shape != theirs[name].shape:
            found.append(f"{what} of {name}: shape {tensor.shape} instead of {theirs[name].shape}")
            continue
        error = np.abs(tensor - theirs[name]).max() / max(np.abs(theirs[name]).max(), 1e-4 * scale)
        if not error <= tolerance:
            found.append(f"{what} of {name}: relative error {error:.1e}")
    return found


def differences(ours: Run, theirs: Run) -> list[str]:
    """Return all differences between two runs. The list is empty if they are equal up to float64 rounding."""
    found = list(ours.drift)
    for what in ("losses", "norms"):
        mine = np.array(getattr(ours, what))
        other = np.array(getattr(theirs, what))
        if not np.allclose(mine, other, rtol=RELATIVE, atol=0):
            found.append(f"{what}: {mine} instead of {other}")
    for name, tensor in ours.initial.items():
        if not np.array_equal(tensor, theirs.initial.get(name)):
            found.append(f"initial {name} depends on the layout")
    found += _tensor_differences("gradient", ours.gradients, theirs.gradients, RELATIVE)
    found += _tensor_differences("parameters after three steps", ours.final, theirs.final, AFTER_STEPS)
    return found


def worst(ours: Run, theirs: Run) -> dict[str, float]:
    """Return the largest relative error of each kind, for the table in docs/benchmarks/numerics.md."""

    def tensors(mine: Tensors, other: Tensors) -> float:
        scale = max(np.abs(tensor).max() for tensor in other.values())
        return max(
            float(np.abs(mine[name] - other[name]).max() / max(np.abs(other[name]).max(), 1e-4 * scale))
            for name in other
        )

    def numbers(mine: list[float], other: list[float]) -> float:
        return max(abs(a - b) / abs(b) for a, b in zip(mine, other, strict=True))

    return {
        "loss": numbers(ours.losses, theirs.losses),
        "gradient norm": numbers(ours.norms, theirs.norms),
        "gradients": tensors(ours.gradients, theirs.gradients),
        "parameters": tensors(ours.final, theirs.final),
    }
