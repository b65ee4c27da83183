"""The oracle's mixture of experts: every expert computes every token. The router's weights, most of them zero, select
the results.

There is no dispatch and no sorting. A capacity applies to one sequence. Sources: Shazeer et al. 2017, Fedus et al. 2021
(Switch: the balance loss), Zoph et al. 2022 (ST-MoE: the z-loss), DeepSeek-V3 (sigmoid scores, selection bias,
sequence-wise balance).

    layers.i.moe.router.weight (E, H), .bias (E), .load (E)
    layers.i.moe.experts.up.weight (E, 2, F, H) = gate, up
    layers.i.moe.experts.down.weight (E, H, F)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Params = Mapping[str, Tensor]
Config = Mapping[str, Any]


class Said(NamedTuple):
    """Scores and chosen experts of one layer's router for one sequence."""

    logits_SE: Tensor
    scores_SE: Tensor  # normalised to a sum of 1
    chosen: list[list[int]]  # experts of each token


def mixture(x_SH: Tensor, params: Params, name: str, config: Config) -> tuple[Tensor, Said]:
    """Return the sum over experts of weight times SwiGLU expert, and the router's output."""
    logits_SE = x_SH @ params[f"{name}.router.weight"].T
    scores_SE = torch.softmax(logits_SE, -1) if config["score"] == "softmax" else 1 / (1 + torch.exp(-logits_SE))
    bias_E = params.get(f"{name}.router.bias")
    chosen = []
    weights = []
    for scores_E in scores_SE:
        preferred = (scores_E if bias_E is None else scores_E + bias_E).tolist()
        best = sorted(range(config["experts"]), key=lambda expert: -preferred[expert])[: config["top_k"]]
        total = sum(scores_E[expert] for expert in best) if config["normalise"] else 1.0
        weights.append(
            [
                scores_E[e] / total * config["scale"] if e in best else torch.zeros((), dtype=x_SH.dtype)
                for e in range(config["experts"])
            ]
        )
        chosen.append(best)
    if config["capacity"]:
        room = math.ceil(len(chosen) * config["top_k"] / config["experts"] * config["capacity"])
        for expert in range(config["experts"]):
            theirs = [token for token, best in enumerate(chosen) if expert in best]
            for token in sorted(theirs, key=lambda token: -float(weights[token][expert].detach()))[room:]:
                weights[token][expert] = torch.zeros((), dtype=x_SH.dtype)
    y_SH = torch.zeros_like(x_SH)
    for expert in range(config["experts"]):
        gate, up = params[f"{name}.experts.up.weight"][expert]
        opened = x_SH @ gate.T
        hidden = opened * torch.sigmoid(opened) * (x_SH @ up.T)
        weight_S = torch.stack([row[expert] for row in weights])
        y_SH = y_SH + weight_S[:, None] * (hidden @ params[f"{name}.experts.down.weight"][expert].T)
    normal_SE = scores_SE if config["score"] == "softmax" else scores_SE / scores_SE.sum(-1, keepdim=True)
    return y_SH, Said(logits_SE, normal_SE, chosen)


def balance(said: Said, config: Config, load_E: Tensor | None) -> Tensor:
    """Return E times the sum over experts of (share of the sequence's choices) x (mean score). `load_E` is the load in
    the complete previous step. If it is given, return the sum of (load) x (mean score).
    """
    if load_E is not None:
        return (said.scores_SE.mean(0) * load_E.detach()).sum()
    total = torch.zeros((), dtype=torch.float64)
    S = len(said.chosen)
    for expert in range(config["experts"]):
        share = sum(expert in chosen for chosen in said.chosen) / (config["top_k"] * S)
        total = total + share * said.scores_SE[:, expert].mean()
    return config["experts"] * total


def losses(routers: Sequence[Sequence[Said]], config: Config, params: Params) -> Tensor:
    """Return both router losses, weighted, summed over layers and averaged over sequences."""
    if not config.get("moe"):
        return torch.zeros((), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    moe = config["moe"]
    loads = [params.get(name.replace("weight", "load")) for name in _of_routers(params, "weight")]
    for said, load_E in ((said, load_E) for sequence in routers for said, load_E in zip(sequence, loads, strict=True)):
        z = torch.stack([row.exp().sum().log() ** 2 for row in said.logits_SE]).mean()
        total = total + (moe["balance_weight"] * balance(said, moe, load_E) + moe["z_weight"] * z) / len(routers)
    return total


def _of_routers(params: Params, what: str) -> list[str]:
    """Return the names of the routers' parameters, layer after layer."""
    return sorted(
        (name for name in params if name.endswith(f"router.{what}")), key=lambda name: int(name.split(".")[1])
    )


def kept(
    config: Config, params: Params, tokens: Tensor, documents: Tensor | None, loss: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """Return the values that routers keep between steps, after a step on this batch: expert load and selection biases.

    A bias rises at a fixed rate for experts chosen less often than the mean, and falls for others.
    """
    biases = _of_routers(params, "bias")
    loads = _of_routers(params, "load")
    if not biases and not loads:
        return {}
    routers: list[list[Said]] = []
    loss(config, params, tokens, documents, routers)
    now = {}
    for layer in range(len(routers[0])):
        counts = [
            sum(expert in chosen for said in routers for chosen in said[layer].chosen)
            for expert in range(config["moe"]["experts"])
        ]
        mean = sum(counts) / len(counts)
        if loads:
            now[loads[layer]] = torch.tensor([count / mean for count in counts], dtype=torch.float64)
        if biases:
            steps = [float(count < mean) - float(count > mean) for count in counts]
            now[biases[layer]] = params[biases[layer]] + config["moe"]["bias_rate"] * torch.tensor(
                steps, dtype=torch.float64
            )
    return now
