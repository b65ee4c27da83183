"""The oracle's optimizers. Each returns the direction of a parameter's update. `gpt.train` applies weight decay,
clipping and the learning rate.

Formulas: Loshchilov & Hutter 2019 (AdamW), Shazeer & Stern 2018 (the factored second moment), Chen et al. 2023 (Lion),
Jordan et al. 2024 and Liu et al. 2025 (Muon, with Moonlight's scale).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch import Tensor

# (name, clipped gradient, number of the update from 1) → direction, which is multiplied by lr
Direction = Callable[[str, Tensor, int], Tensor]


def _zeros() -> defaultdict[str, Any]:
    return defaultdict(float)


def adamw(betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8) -> Direction:
    """AdamW. The returned function keeps the moments of one run."""
    first = _zeros()
    second = _zeros()

    def direction(name: str, gradient: Tensor, update: int) -> Tensor:
        first[name] = betas[0] * first[name] + (1 - betas[0]) * gradient
        second[name] = betas[1] * second[name] + (1 - betas[1]) * gradient**2
        return first[name] / (1 - betas[0] ** update) / ((second[name] / (1 - betas[1] ** update)).sqrt() + eps)

    return direction


def momentum(beta: float) -> Direction:
    """Stochastic gradient descent with momentum, as in torch.optim.SGD."""
    velocity = _zeros()

    def direction(name: str, gradient: Tensor, update: int) -> Tensor:
        velocity[name] = beta * velocity[name] + gradient
        return velocity[name]

    return direction


def lion(betas: tuple[float, float]) -> Direction:
    """Lion. The direction is the sign of a moving average of the gradient."""
    momenta = _zeros()

    def direction(name: str, gradient: Tensor, update: int) -> Tensor:
        sign = torch.sign(betas[0] * momenta[name] + (1 - betas[0]) * gradient)
        momenta[name] = betas[1] * momenta[name] + (1 - betas[1]) * gradient
        return sign

    return direction


def muon(betas: tuple[float, float], eps: float, by_group: bool) -> Direction:
    """Muon for matrices: orthogonal momentum of q, k, v, gate and up separately, and with `by_group` of each group of
    heads. Other parameters use AdamW.
    """
    momenta = _zeros()
    rest = adamw(betas, eps)

    def direction(name: str, gradient: Tensor, update: int) -> Tensor:
        if not is_matrix(name):
            return rest(name, gradient, update)
        momenta[name] = 0.95 * momenta[name] + gradient
        moved = gradient + 0.95 * momenta[name]
        for part in _pieces(name, moved, by_group):
            matrix = part.reshape(-1, part.shape[-1])
            part.copy_((0.2 * sqrt(max(matrix.shape)) * _orthogonal(matrix)).reshape(part.shape))
        return moved

    return direction


def adafactor(betas: tuple[float, float], eps: float) -> Direction:
    """AdamW with a factored second moment: of a matrix's squared gradients only row and column means are kept. q, k, v,
    gate and up are separate matrices.
    """
    first = _zeros()
    rows = _zeros()
    columns = _zeros()
    rest = adamw(betas, eps)

    def direction(name: str, gradient: Tensor, update: int) -> Tensor:
        if not is_matrix(name):
            return rest(name, gradient, update)
        first[name] = betas[0] * first[name] + (1 - betas[0]) * gradient
        moved = first[name] / (1 - betas[0] ** update)
        for index, (part, squares) in enumerate(
            zip(_pieces(name, moved, False), _pieces(name, gradient**2, False), strict=True)
        ):
            key = (name, index)
            matrix = squares.reshape(-1, squares.shape[-1])
            rows[key] = betas[1] * rows[key] + (1 - betas[1]) * matrix.mean(1)
            columns[key] = betas[1] * columns[key] + (1 - betas[1]) * matrix.mean(0)
            second = torch.outer(rows[key], columns[key]) / rows[key].mean() / (1 - betas[1] ** update)
            part /= second.reshape(part.shape).sqrt() + eps
        return moved

    return direction


def is_matrix(name: str) -> bool:
    """Return True for the weights that Muon orthogonalises."""
    return name.startswith("layers.") and "norm" not in name and name.endswith("weight")


def _orthogonal(matrix: Tensor) -> Tensor:
    """Orthogonalise one matrix by the iteration of the paper."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if wide is matrix else x.T


def _pieces(name: str, tensor: Tensor, by_group: bool) -> list[Tensor]:
    """Return views of the matrices of which a global tensor of the model consists. Each view has its columns in the
    last dim, and its rows in one or more leading dims.
    """
    if "attention.qkv" in name:
        q = tensor[:, :-2]
        k = tensor[:, -2]
        v = tensor[:, -1]
        return [group[index] for group in (q, k, v) for index in range(len(tensor))] if by_group else [q, k, v]
    if "mlp.up" in name and tensor.dim() == 3:
        return [tensor[0], tensor[1]]
    return [tensor]
