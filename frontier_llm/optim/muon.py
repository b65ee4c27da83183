"""Muon (Jordan et al. 2024) for matrices, AdamW for everything else.

The update is scaled as in Moonlight (Liu et al. 2025, arXiv:2502.16982):

    M <- momentum M + G,   W <- W - lr (0.2 sqrt(max(rows, columns)) orthogonal(G + momentum M) + decay W)

The momentum is sharded by ZeRO. The matrices that are orthogonalised do not depend on the layout: q, k, v, gate and up
are separate matrices.
"""

from __future__ import annotations

from collections import defaultdict
from math import sqrt

import torch
from torch import Tensor

from frontier_llm.blueprint.matrices import Matrices, Part, matrices_of
from frontier_llm.blueprint.optimizers import MUON
from frontier_llm.comm import Axis
from frontier_llm.config import OptimizerConfig
from frontier_llm.ops import Ops
from frontier_llm.optim.elementwise import AdamW
from frontier_llm.optim.newton_schulz import MatrixStack, orthogonalize_
from frontier_llm.optim.registry import Slice, register
from frontier_llm.topology.shards import ShardSpec

SCALE = 0.2  # with the factor sqrt(longer side), the elements of an update are as large as AdamW's


class Muon:
    """Update by Muon (implements `SliceUpdate`)."""

    def __init__(self, config: OptimizerConfig, ops: Ops) -> None:
        self._config = config
        self._others = AdamW(config, ops)

    @torch.no_grad()
    def update(self, part: Slice, lr: float, step: int, grad_scale: float | Tensor) -> None:
        """Update `part` in place with step number `step`, counted from 1."""
        if part.tensors is None:
            self._others.update(part, lr, step, grad_scale)
            return
        direction = part.gradient * grad_scale
        momentum = part.states["momentum"].mul_(self._config.momentum).add_(direction)
        direction.add_(momentum, alpha=self._config.momentum)
        # bf16 is precise enough for the direction of an update. The range of fp16 is too small for gradients.
        dtype = torch.bfloat16 if part.weights.element_size() == 2 else part.weights.dtype
        tensors = part.tensors.of(direction.to(dtype))
        self._orthogonalize(part.tensors.specs, tensors, part.tensors.tp)
        part.tensors.back(tensors, direction)
        part.apply(direction, step_size=lr, decay=lr * self._config.weight_decay)

    def _orthogonalize(self, specs: list[ShardSpec], tensors: list[Tensor], tp: Axis) -> None:
        """Replace each matrix in the tensors by its scaled orthogonal matrix, in place.

        Matrices of equal shape are processed together.
        """
        alike: dict[tuple[Part, int, int], list[tuple[Matrices, Tensor]]] = defaultdict(list)
        for spec, tensor in zip(specs, tensors, strict=True):
            for matrices in matrices_of(spec.parameter, self._config.heads == "groups"):
                piece = matrices.piece
                values = tensor.narrow(piece.dim, piece.start, piece.size) if piece else tensor
                alike[matrices.part(tp.size), matrices.short, matrices.long].append((matrices, values))
        parts = {key: [_oriented(*one, tp.size) for one in ones] for key, ones in alike.items()}
        stacks = [MatrixStack(torch.cat(each), part) for (part, *_), each in parts.items()]
        orthogonalize_(stacks, tp)
        for stack, (key, ones) in zip(stacks, alike.items(), strict=True):
            stack.x *= SCALE * sqrt(key[2])
            for (matrices, values), x in zip(ones, stack.x.split([len(each) for each in parts[key]]), strict=True):
                values.copy_((x.mT if matrices.transposed else x).reshape(values.shape))


def _oriented(matrices: Matrices, values: Tensor, tp: int) -> Tensor:
    """Return this rank's part of the matrices as [count, short, long], with the shorter side first."""
    _, short, long = matrices.on_rank(tp)
    if matrices.transposed:
        return values.reshape(-1, long, short).mT
    return values.reshape(-1, short, long)


register(MUON, Muon)
