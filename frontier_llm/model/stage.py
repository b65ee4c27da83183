"""Stage: the part of the transformer that one virtual stage holds; one stage holding everything is the serial model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from frontier_llm.comm import Axis
from frontier_llm.config import ModelConfig
from frontier_llm.model.batch import Microbatch
from frontier_llm.model.layers import Block, Norm
from frontier_llm.model.losses import LossTerm
from frontier_llm.model.positions import Positions, alibi_slopes, rope_table, within_document
from frontier_llm.model.recompute import recompute
from frontier_llm.ops import statistics_dtype
from frontier_llm.pipeline import StageOutput
from frontier_llm.tensor_parallel import (
    LayerContext,
    ShardedParameter,
    column_linear,
    mean_over_global_batch,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)
from frontier_llm.topology import StageSpec, split


class Stage(nn.Module):
    """Embedding (first stage), blocks, final norm and head (last stage). Built on the meta device; holds no memory yet."""

    def __init__(
        self,
        model: ModelConfig,
        spec: StageSpec,
        context: LayerContext,
        device: torch.device,
        recompute_mode: str = "none",
        *,
        tied_ranks: int = 2,
        tied_embedding: ShardedParameter | None = None,
        terms: Mapping[str, LossTerm] = MappingProxyType({}),
    ) -> None:
        """`tied_ranks`: pipeline ranks that hold a tied embedding; `tied_embedding`: the one of another virtual stage of this rank, which
        is this one's head as well; `terms`: further losses.
        """
        super().__init__()
        self._terms = {name: term for name, term in terms.items() if term.every_stage or spec.head}
        self.model, self.spec, self.context = model, spec, context
        self.recompute_blocks = recompute_mode == "full"
        core = recompute_mode == "selective"
        tied_head = spec.head and model.tied_embeddings
        self.token_embedding = tied_embedding if tied_head else None
        if spec.embedding or (tied_head and tied_embedding is None):
            self.token_embedding = declare_embedding(model, context, spec, tied_ranks)
        learned = spec.embedding and model.position == "learned"
        position_shape = (model.sequence_length, model.hidden)
        self.position_embedding = context.whole("embedding.position.weight", position_shape, model.init_std) if learned else None
        self.blocks = nn.ModuleList(Block(model, context, index, core) for index in spec.layers)
        self.final_norm = Norm(model, context, "final_norm") if spec.head else None
        untied = spec.head and not model.tied_embeddings
        self.output_head = context.matrix("head.weight", (model.padded_vocab_size, model.hidden), 0, model.init_std) if untied else None
        wide = statistics_dtype(context.dtype)
        self._rope = rope_table(model, device, wide) if model.position == "rope" else None
        self._alibi_slopes_a = _local_slopes(model, context.tp, device, wide) if model.position == "alibi" else None

    def forward(self, x: Tensor | None, batch: Microbatch) -> Tensor | StageOutput:
        """What this stage does for one microbatch.

        `x` is the previous stage's output, None on the first. Returns the activation for the next stage, (S or s, B, H), or on
        the last stage this microbatch's share of the mean loss over the step's targets, a scalar in fp32 (fp64 under fp64); with the
        further losses of this stage, where it has some.
        """
        x = self.hidden(x, batch)
        context = self.context
        losses = {name: term.value(x, batch, context.tp, context.sequence_parallel) for name, term in self._terms.items()}
        output = self.loss(x, batch) if self.spec.head else x
        return StageOutput(output, losses) if losses else output

    def hidden(self, x: Tensor | None, batch: Microbatch) -> Tensor:
        """Embedding and blocks: (S or s, B, H)."""
        if x is None:
            x = self._embed(batch)
        positions = self._positions(batch, x.shape[0] * (self.context.tp.size if self.context.sequence_parallel else 1))
        for block in self.blocks:
            x = recompute(lambda x, block=block: block(x, positions), x) if self.recompute_blocks else block(x, positions)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Final norm and head: (S or s, B, H) → (S, B, v), this rank's slice of the true vocabulary."""
        assert self.final_norm is not None
        weight_vH = self.output_head if self.output_head is not None else self.token_embedding
        assert weight_vH is not None
        return column_linear(self.final_norm(x), weight_vH, self.context, num_rows=self._real_rows(weight_vH))

    def token_losses(self, x: Tensor, batch: Microbatch) -> Tensor:
        """-log p(target) of each token, (S, B)."""
        assert batch.targets_SB is not None
        first_vocab = self.model.padded_vocab_size // self.context.tp.size * self.context.tp.rank
        return vocab_parallel_cross_entropy(self.logits(x), batch.targets_SB, first_vocab, self.context)

    def loss(self, x: Tensor, batch: Microbatch) -> Tensor:
        """This microbatch's share of the mean loss over the step's targets."""
        loss_SB = self.token_losses(x, batch)
        if batch.loss_mask_SB is not None:
            loss_SB = loss_SB * batch.loss_mask_SB
        return mean_over_global_batch(loss_SB, batch.global_targets)

    def _real_rows(self, weight_vH: ShardedParameter) -> int:
        """Rows of this rank's slice that stand for a token; the rest is padding and never enters a logit."""
        return min(weight_vH.shape[0], self.model.vocab_size - weight_vH.shape[0] * self.context.tp.rank)

    def _embed(self, batch: Microbatch) -> Tensor:
        assert self.token_embedding is not None and batch.tokens_SB is not None
        x = vocab_parallel_embedding(batch.tokens_SB, self.token_embedding, self.context)
        if self.position_embedding is None:
            return x
        first = x.shape[0] * self.context.tp.rank if self.context.sequence_parallel else 0
        index_SB = _given_positions(batch)
        if index_SB is None:
            return x + self.position_embedding[first : first + x.shape[0], None]
        return x + nn.functional.embedding(index_SB[first : first + x.shape[0]], self.position_embedding)

    def _positions(self, batch: Microbatch, sequence: int) -> Positions:
        rope = self._rope
        if rope is not None:
            index_SB = _given_positions(batch)
            index = slice(0, sequence) if index_SB is None else index_SB
            rope = rope[0][index], rope[1][index]
        return Positions(rope, self._alibi_slopes_a, batch.documents_BS)


def _given_positions(batch: Microbatch) -> Tensor | None:
    """Where each token stands, (S, B), if that is not simply its place in the sequence."""
    if batch.positions_SB is not None:
        return batch.positions_SB
    return None if batch.documents_BS is None else within_document(batch.documents_BS).T


def declare_embedding(model: ModelConfig, context: LayerContext, stage: StageSpec, tied_ranks: int) -> ShardedParameter:
    """The token embedding of a stage that embeds, or that uses it as the tied head.

    With tied weights and the ends of the model on two ranks, each holds a copy: their gradients are summed, and only the
    first copy counts in norms and checkpoints. A rank that has both uses its single copy twice per microbatch.
    """
    shape, both = (model.padded_vocab_size, model.hidden), tied_ranks == 1 or (stage.embedding and stage.head)
    spec = split("embedding.token.weight", shape, 0, context.tp.size, context.tp.rank, model.init_std)
    if model.tied_embeddings and not both:
        spec = replace(spec, tied_copies=2, tied_index=0 if stage.embedding else 1)
    parameter = context.declare(spec, layer_accumulates=True)
    parameter.uses = 2 if model.tied_embeddings and both else 1
    return parameter


def _local_slopes(model: ModelConfig, tp: Axis, device: torch.device, dtype: torch.dtype) -> Tensor:
    slopes_A = torch.tensor(alibi_slopes(model.heads, model.alibi_max_bias), device=device, dtype=dtype)
    return slopes_A.chunk(tp.size)[tp.rank]
