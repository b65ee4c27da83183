"""Layers of the transformer: norms, attention, MLP, and the transformer block.

With tensor parallelism of degree 1 they are the layers of a serial transformer.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from frontier_llm.config import ModelConfig
from frontier_llm.model.dropout import Dropout
from frontier_llm.model.experts import MixtureOfExperts, Routed
from frontier_llm.model.positions import Positions
from frontier_llm.model.recompute import recompute
from frontier_llm.ops import Scores, statistics_dtype
from frontier_llm.parallel.context import attention_core
from frontier_llm.parallel.tensor import ColumnLinear, Declared, LayerContext, RowLinear, norm_over_heads


class Norm(nn.Module):
    """LayerNorm or RMSNorm over H."""

    def __init__(self, model: ModelConfig, context: LayerContext, declared: Declared, name: str) -> None:
        super().__init__()
        self.kind = model.norm
        self.eps = model.norm_eps
        self.ops = context.ops
        self.plus_one = model.norm_plus_one
        self.weight = declared[f"{name}.weight"]
        self.bias = declared.get(f"{name}.bias")

    def forward(self, x: Tensor) -> Tensor:
        """(…, H) → (…, H)."""
        if self.kind == "rmsnorm":
            return self.ops.rms_norm(x, gain(self.weight, self.plus_one), self.eps)
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual) in one pass."""
        return self.ops.add_norm(x, residual, gain(self.weight, self.plus_one), self.bias, self.eps, self.kind)


def gain(weight: Tensor, plus_one: bool) -> Tensor:
    """Return the factor of a norm: `weight`, or 1 + `weight` if `plus_one`.

    The sum is computed in fp32 (fp64 under fp64), because adding 1 in the working precision would lose small weights.
    """
    return weight.to(statistics_dtype(weight.dtype)) + 1 if plus_one else weight


class NoNorm(nn.Module):
    """Identity module, used in a block in place of a norm that the model does not have."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` unchanged."""
        return x

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (x + residual, x + residual): the sum takes the place of the normed tensor, and is also the residual
        stream.
        """
        total = x + residual
        return total, total


class HeadNorm(nn.Module):
    """RMSNorm of queries or keys (QK norm), over each head, or with "full" over all heads of all tp ranks.

    With "full", the weight is split over tp like the heads.
    """

    def __init__(self, model: ModelConfig, context: LayerContext, declared: Declared, name: str) -> None:
        super().__init__()
        self.full = model.qk_norm == "full"
        self.eps = model.norm_eps
        self.context = context
        self.plus_one = model.norm_plus_one
        self.weight = declared[f"{name}.weight"]

    def forward(self, x_SBaD: Tensor) -> Tensor:
        """(S, B, a, D) → (S, B, a, D)."""
        weight = gain(self.weight, self.plus_one)
        if not self.full:
            return self.context.ops.rms_norm(x_SBaD, weight, self.eps)
        return norm_over_heads(x_SBaD, weight, self.eps, self.context.tp)


class Attention(nn.Module):
    """Causal self-attention with heads split over tp, rotary or ALiBi positions, and grouped key/value heads.

    The fused QKV projection has, for each key/value head, the weights of its Q query heads, its key and its value.
    """

    def __init__(
        self,
        model: ModelConfig,
        context: LayerContext,
        declared: Declared,
        layer: int,
        recompute_core: bool,
    ) -> None:
        super().__init__()
        name = f"layers.{layer}.attention"
        self.ops = context.ops
        self.recompute_core = recompute_core
        self.attend = attention_core(context.ops, context.cp, context.context_attention)
        self.head_dim = model.dim_per_head
        self.queries = model.heads // model.num_kv_heads
        self.local_kv_heads = model.num_kv_heads // context.tp.size
        self.scores = Scores(
            (model.score_width or self.head_dim) ** -0.5,
            window=model.window_of(layer),
            softcap=model.score_softcap or 0.0,
        )
        self.qkv = ColumnLinear(context, declared, f"{name}.qkv")
        normed = model.qk_norm is not None
        self.q_norm, self.k_norm = (
            HeadNorm(model, context, declared, f"{name}.{one}_norm") if normed else None for one in "qk"
        )
        self.output = RowLinear(context, declared, f"{name}.output")

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """(S or s, B, H) → (S or s, B, H)."""
        qkv = self.qkv(x)
        qkv_SBgqD = qkv.view(*qkv.shape[:2], self.local_kv_heads, self.queries + 2, self.head_dim)
        if positions.rope is not None and self.q_norm is None:
            q_SBaD, k_SBgD, v_SBgD = self.ops.rotated_heads(qkv_SBgqD, *positions.rope)
        else:
            q_SBaD, k_SBgD, v_SBgD = self._heads(qkv_SBgqD, positions)

        scores = replace(self.scores, alibi_slopes_a=positions.alibi_slopes_a, documents_BS=positions.documents_BS)

        def core(q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor) -> Tensor:
            return self.attend(q_SBaD, k_SBgD, v_SBgD, scores)

        o_SBaD = recompute(core, q_SBaD, k_SBgD, v_SBgD) if self.recompute_core else core(q_SBaD, k_SBgD, v_SBgD)
        return self.output(o_SBaD.flatten(2))

    def _heads(self, qkv_SBgqD: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values. Used if the fused op `rotated_heads` does not support the configuration."""
        # The backward of one split writes one gradient. The backward of three slices would add three gradients that
        # are mostly zeros.
        q_SBgqD, k_SBgqD, v_SBgqD = qkv_SBgqD.split((self.queries, 1, 1), dim=-2)
        q_SBaD = q_SBgqD.flatten(2, 3)
        k_SBgD = k_SBgqD.squeeze(-2)
        v_SBgD = v_SBgqD.squeeze(-2)
        if self.q_norm is not None and self.k_norm is not None:
            q_SBaD = self.q_norm(q_SBaD)
            k_SBgD = self.k_norm(k_SBgD)
        if positions.rope is not None:
            q_SBaD = self.ops.rope(q_SBaD, *positions.rope)
            k_SBgD = self.ops.rope(k_SBgD, *positions.rope)
        # If q is a copy, also copy k and v. As views, k and v would keep the complete tensor qkv in memory until
        # backward.
        if positions.rope is not None or self.queries > 1:
            k_SBgD = k_SBgD.contiguous()
            v_SBgD = v_SBgD.contiguous()
        return q_SBaD, k_SBgD, v_SBgD


class Mlp(nn.Module):
    """MLP, H → F → H. A gated MLP fuses gate and up projection into one matrix."""

    def __init__(self, model: ModelConfig, context: LayerContext, declared: Declared, name: str) -> None:
        super().__init__()
        self.ops = context.ops
        self.gated = model.gated
        self.activation = model.activation
        self.up = ColumnLinear(context, declared, f"{name}.up")
        self.down = RowLinear(context, declared, f"{name}.down")

    def forward(self, x: Tensor) -> Tensor:
        """(S or s, B, H) → (S or s, B, H)."""
        if self.gated:
            return self.down(self.ops.gated(self.up(x).unflatten(-1, (2, -1)), self.activation))
        return self.down(self.ops.gelu(self.up(x, add_bias=False), self.up.bias, self.activation == "gelu_tanh"))


class Block(nn.Module):
    """Transformer block, with norms before, after, or both before and after attention and MLP.

    With `parallel_residual`, attention and MLP read the same residual stream (GPT-NeoX).
    """

    def __init__(
        self,
        model: ModelConfig,
        context: LayerContext,
        declared: Declared,
        index: int,
        recompute_core: bool,
    ) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.parallel_residual = model.parallel_residual

        def norm(part: str) -> Norm | NoNorm:
            if f"{name}.{part}.weight" in declared:
                return Norm(model, context, declared, f"{name}.{part}")
            return NoNorm()

        self.attention_norm = norm("attention_norm")
        self.attention_output_norm = norm("attention_output_norm")
        self.attention = Attention(model, context, declared, index, recompute_core)
        self.attention_dropout, self.mlp_dropout = (
            Dropout(model, context, f"{name}.{part}") for part in ("attention", "mlp")
        )
        self.mlp_norm = norm("mlp_norm")
        self.mlp_output_norm = norm("mlp_output_norm")
        self.moe: MixtureOfExperts | None = None
        if model.moe is not None and index in model.routed_layers:
            shared = Mlp(model, context, declared, f"{name}.moe.shared") if model.moe.shared_hidden else None
            self.moe = MixtureOfExperts(model, context, declared, f"{name}.moe", shared)
        self.mlp = Mlp(model, context, declared, f"{name}.mlp") if self.moe is None else None

    def forward(
        self,
        x: Tensor,
        added: Tensor | None,
        positions: Positions,
    ) -> tuple[Tensor, Tensor | None, Routed | None]:
        """Run the block on the residual stream x + added, or x if `added` is None. Shapes are (S or s, B, H).

        Returns the two summands of the residual stream after this block, and the router's `Routed` if the block has
        experts. The kernel of the next norm also computes the sum, forward and backward.
        """
        normed, x = (self.attention_norm(x), x) if added is None else self.attention_norm.add(added, x)
        attended = self.attention_output_norm(self.attention(normed, positions))
        drawn = positions.drawn
        if self.parallel_residual:
            normed = self.mlp_norm(x)
            x = x + attended if drawn is None else self.attention_dropout(attended, x, drawn)
        elif drawn is None:
            normed, x = self.mlp_norm.add(attended, x)
        else:
            x = self.attention_dropout(attended, x, drawn)
            normed = self.mlp_norm(x)
        y, routed = self._feed_forward(normed)
        y = self.mlp_output_norm(y)
        if drawn is None:
            return (x, y, routed)
        return (self.mlp_dropout(y, x, drawn), None, routed)

    def _feed_forward(self, x: Tensor) -> tuple[Tensor, Routed | None]:
        if self.moe is not None:
            return self.moe(x)
        assert self.mlp is not None
        return self.mlp(x), None
