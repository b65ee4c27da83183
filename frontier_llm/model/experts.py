"""Mixture-of-experts layer, which replaces the MLP. It has a router, and experts that may be on other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from frontier_llm.blueprint.expert_work import room_of
from frontier_llm.comm import all_reduce_
from frontier_llm.config import ModelConfig
from frontier_llm.ops import Routing
from frontier_llm.parallel.expert import (
    Choices,
    Departure,
    Dispatch,
    GroupedLinear,
    ToNodes,
    beyond_capacity,
    combine,
    count_numbers,
    dispatch,
    gather_sequence,
    plan_dispatch,
    router_product,
    take_part,
)
from frontier_llm.parallel.tensor import Declared, LayerContext

Beside = TypeVar("Beside")


class Routed(NamedTuple):
    """Losses of a router and load of its experts, for the tokens of a microbatch that this rank has routed.

    `model.losses.router_losses` joins the load of all layers of a stage, so that a layer needs fewer operations.
    """

    # Balance loss, summed over sequences: the contribution of this rank's tokens; 0-dim, fp32 (fp64 under fp64).
    balance: Tensor
    z: Tensor  # z loss: sum over tokens of the squared log-sum-exp of the router's logits
    rows_E: Tensor  # int64: rows (token, expert) of each expert, dropped rows included
    negative_entropy: Tensor  # sum over tokens and experts of p ln p, for the scores p of a token
    dropped: Tensor | None  # number of dropped rows; None without a capacity


class Router(nn.Module):
    """Router: scores every expert for every token in fp32, and selects the k best experts of each token."""

    def __init__(self, model: ModelConfig, context: LayerContext, declared: Declared, name: str) -> None:
        super().__init__()
        assert model.moe is not None
        self.moe = model.moe
        self.context = context
        self.weight = declared[f"{name}.weight"].accumulated_by_layer()
        self.bias = declared.get(f"{name}.bias")
        # number of rows (token, expert) of each expert in the global batch of the previous step, divided by the mean
        # over experts
        self.load_E = declared.get(f"{name}.load")

    def forward(self, x_sBH: Tensor) -> tuple[Choices, Tensor, Routed]:
        """Route tokens, (s, B, H). Returns the selected experts, their weights (N, k), and the losses and the load."""
        moe = self.moe
        logits_NE = router_product(x_sBH.flatten(0, 1), self.weight, self.context)
        routing = Routing(moe.top_k, moe.score == "sigmoid", moe.normalise, moe.scale)
        scores_NE, weights_Nk, experts_Nk = self.context.ops.route(logits_NE, self.bias, routing)
        room = room_of(moe, len(experts_Nk))
        chosen_BE = self._chosen(experts_Nk, x_sBH.shape[1])
        chosen_E = chosen_BE[0] if len(chosen_BE) == 1 else chosen_BE.sum(0)
        dropped_Nk = None if room is None else beyond_capacity(experts_Nk, weights_Nk, chosen_E, room)
        if moe.score == "sigmoid":
            scores_NE = scores_NE / (scores_NE.sum(-1, keepdim=True) + 1e-20)
        # Without a weight the z loss is only logged, and its backward would add zeros to the gradient of the logits.
        logits_for_z_NE = logits_NE if moe.z_weight else logits_NE.detach()
        z = logits_for_z_NE.logsumexp(-1).square().sum()
        with torch.no_grad():
            negative_entropy = torch.special.xlogy(scores_NE, scores_NE).sum()
            dropped = None if dropped_Nk is None else dropped_Nk.sum()
        routed = Routed(self._balance(scores_NE, chosen_BE), z, chosen_E, negative_entropy, dropped)
        return Choices(experts_Nk, moe.experts, dropped_Nk, room, chosen_E), weights_Nk, routed

    def _chosen(self, experts_Nk: Tensor, B: int) -> Tensor:
        """Return how many tokens of each sequence have chosen each expert, (B, E), int64."""
        chosen_sBk = experts_Nk.view(len(experts_Nk) // B, B, self.moe.top_k)
        return count_numbers(chosen_sBk.transpose(0, 1).flatten(1), self.moe.experts)

    def _balance(self, scores_NE: Tensor, chosen_BE: Tensor) -> Tensor:
        """Return the balance loss. `chosen_BE` is the number of rows of each sequence and expert.

        The balance loss per sequence is E / (k S²) times the sum, over experts, of the expert's rows times its summed
        scores (Switch, arXiv:2101.03961, generalised to k experts per token).

        The balance loss of the global batch (arXiv:2501.11873) uses the rows of the previous step. The rows of this
        step are not known yet, because backward begins before the last microbatch of the step is routed. The loss of a
        token is then the mean load of the experts, weighted by the scores of the token. No communication between ranks
        is needed.
        """
        moe = self.moe
        tp = self.context.tp
        cp = self.context.cp
        B = len(chosen_BE)
        s = len(scores_NE) // B
        S = s * tp.size * cp.size
        scores_BE = scores_NE.view(s, B, -1).sum(0)
        if self.load_E is not None:
            return scores_BE.sum(0) @ self.load_E.detach() / S
        rows_BE = chosen_BE.to(scores_NE.dtype)
        for axis in (tp, cp):  # each rank has routed a part of every sequence, so the numbers of rows are summed
            all_reduce_(rows_BE, axis)
        if moe.balance == "sequence":
            return (rows_BE * scores_BE).sum() * (moe.experts / (moe.top_k * S**2))
        return rows_BE.sum(0) @ scores_BE.sum(0) * (moe.experts / (moe.top_k * B * S**2))


class Experts(nn.Module):
    """The MLPs of the experts on this rank. The outputs of a token's experts are summed with the router's weights."""

    def __init__(self, model: ModelConfig, context: LayerContext, declared: Declared, name: str) -> None:
        super().__init__()
        self.context = context
        self.gated = model.gated
        self.activation = model.activation
        self.up, self.down = (GroupedLinear(context, declared, f"{name}.{part}") for part in ("up", "down"))

    def forward(
        self, x_NH: Tensor, weights_Nk: Tensor, choices: Choices, overlapped: Callable[[], Beside]
    ) -> tuple[Tensor, Beside]:
        """Return the experts' output, (N, H), and the result of `overlapped()`.

        `overlapped` is computed while the tokens are sent to their experts. The backward of `overlapped` is computed
        while the gradients of these tokens are sent back.
        """
        ep = self.context.ep
        etp = self.context.etp
        ops = self.context.ops
        if ep.levels is None:
            plan = plan_dispatch(choices, ep, ops, etp)
            departure = Departure(plan, x_NH, weights_Nk.flatten())
            beside = overlapped()
            return combine(self._outputs(plan, *departure.arrive()), plan), beside
        node, rail = ep.levels
        to_nodes = ToNodes(x_NH, weights_Nk, choices, rail, ops)
        beside = overlapped()
        x_MH, weights_Mk, on_node = to_nodes.arrive()
        plan = plan_dispatch(on_node, node, ops, etp)
        y_MH = combine(self._outputs(plan, *dispatch(x_MH, weights_Mk, plan)), plan)
        return combine(y_MH, to_nodes.plan), beside

    def _outputs(self, plan: Dispatch, x_MH: Tensor, weights_M: Tensor) -> Tensor:
        """Apply the experts to their rows and multiply by the router's weights.

        The weight multiplies the input of the down projection. The down projection is linear, so this equals a weighted
        output.
        """
        up = self.up(x_MH, plan.ends_E)
        ops = self.context.ops
        if self.gated:
            return self.down(ops.gated(up.unflatten(-1, (2, -1)), self.activation, weights_M), plan.ends_E)
        return self.down(ops.gelu(up, None, self.activation == "gelu_tanh", weights_M), plan.ends_E)


class MixtureOfExperts(nn.Module):
    """Router, experts, and an optional shared MLP that processes every token.

    Each tp rank routes its own part of the sequence. Without sequence parallelism the rank first takes its part. If the
    number of positions is not divisible by tp (for example a generated token), each tp rank routes all positions.
    """

    def __init__(
        self,
        model: ModelConfig,
        context: LayerContext,
        declared: Declared,
        name: str,
        shared: nn.Module | None,
    ) -> None:
        super().__init__()
        self.shared = shared
        self.shared_gate = declared.get(f"{name}.shared_gate.weight")
        self.context = context
        self.router = Router(model, context, declared, f"{name}.router")
        self.experts = Experts(model, context, declared, f"{name}.experts")

    def forward(self, x: Tensor) -> tuple[Tensor, Routed]:
        """(S or s, B, H) → (S or s, B, H)."""
        tp = self.context.tp
        cut = not self.context.sequence_parallel and len(x) % tp.size == 0
        # in training, a second routing of the same positions would multiply the gradients
        assert cut or self.context.sequence_parallel or tp.size == 1 or not torch.is_grad_enabled()
        x_sBH = take_part(x, tp) if cut else x
        choices, weights_Nk, routed = self.router(x_sBH)
        y_NH, beside = self.experts(x_sBH.flatten(0, 1), weights_Nk, choices, lambda: self._of_all_tokens(x))
        y_sBH = y_NH.view(x_sBH.shape)
        y = gather_sequence(y_sBH, tp) if cut else y_sBH
        if beside is not None:
            y = y + beside
        return y, routed

    def _of_all_tokens(self, x: Tensor) -> Tensor | None:
        beside: Tensor | None = None if self.shared is None else self.shared(x)
        if beside is not None and self.shared_gate is not None:
            beside = beside * torch.sigmoid(nn.functional.linear(x, self.shared_gate))
        return beside
