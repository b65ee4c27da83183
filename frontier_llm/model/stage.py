"""A virtual pipeline stage: a module with consecutive layers of the transformer. A single stage with all layers is the
serial model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType

import torch
from torch import Tensor, nn

from frontier_llm.blueprint.layout import layer_modes
from frontier_llm.blueprint.parameters import StageSpec, rank_parameters
from frontier_llm.config import ModelConfig
from frontier_llm.model import losses
from frontier_llm.model.batch import Microbatch
from frontier_llm.model.dropout import Drawn, Dropout
from frontier_llm.model.experts import Routed, Router
from frontier_llm.model.layers import Block, Norm
from frontier_llm.model.positions import Positions, local_alibi_slopes, rope_table, within_document
from frontier_llm.model.recompute import recompute
from frontier_llm.ops import softcapped, statistics_dtype
from frontier_llm.parallel.stages import StageOutput
from frontier_llm.parallel.tensor import (
    ColumnLinear,
    Declared,
    LayerContext,
    column_linear,
    mean_over_global_batch,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)
from frontier_llm.topology.grid import held_positions


class Stage(nn.Module):
    """A virtual stage: transformer blocks, with the embedding on the first stage, and final norm and head on the last.

    The stage is built on the meta device, without memory.
    """

    def __init__(
        self,
        model: ModelConfig,
        spec: StageSpec,
        context: LayerContext,
        declared: Declared,
        device: torch.device,
        recompute_modes: str,
        *,
        terms: Mapping[str, losses.LossTerm],
    ) -> None:
        """`declared` maps names to parameters. `declared` contains all parameters of this stage, and may contain more.

        `terms` are the further losses of the run, by name.
        """
        super().__init__()
        self._terms = {name: term for name, term in terms.items() if term.every_stage or spec.head}
        self.spec = spec
        self.context = context
        self._device = device
        self._layers = tuple(spec.layers)
        modes = dict(zip(spec.layers, layer_modes(recompute_modes, spec.num_layers), strict=True))
        self._recomputed = tuple(layer for layer, mode in modes.items() if mode == "full")
        tied = model.tied_embeddings
        embeds = spec.embedding or (spec.head and tied)
        self.token_embedding = declared["embedding.token.weight"].accumulated_by_layer() if embeds else None
        self.position_embedding = declared.get("embedding.position.weight") if spec.embedding else None
        self.embedding_dropout = Dropout(model, context, "embedding") if spec.embedding else None
        self.blocks = nn.ModuleList(
            Block(model, context, declared, index, mode == "selective") for index, mode in modes.items()
        )
        self.final_norm = Norm(model, context, declared, "final_norm") if spec.head else None
        self.output_head = ColumnLinear(context, declared, "head") if spec.head and not tied else None
        # Round the factor to the dtype of the weights, as Gemma's reference code does.
        self._embedding_scale = (
            float(torch.tensor(model.hidden**0.5, dtype=context.dtype)) if model.scaled_embedding else 1.0
        )
        self.follow(model)

    def follow(self, model: ModelConfig) -> None:
        """Use the sequence length and the position settings of `model` from now on.

        The shapes of the weights must be unchanged.
        """
        context = self.context
        device = self._device
        wide = statistics_dtype(self.context.dtype)
        self.model = model
        held = held_positions(model.sequence_length, context.cp.size, context.cp.rank)
        # positions of this rank's tokens in the sequence; None without context parallelism
        self._held_S = torch.tensor(list(chain(*held)), device=device) if context.cp.size > 1 else None
        self._rope = rope_table(model, device, wide) if model.position == "rope" else None
        self._alibi_slopes_a = (
            local_alibi_slopes(model, context.tp, device, wide) if model.position == "alibi" else None
        )

    def forward(self, x: Tensor | None, batch: Microbatch) -> Tensor | StageOutput:
        """Run this stage for one microbatch. `x` is the previous stage's output, or None on the first stage.

        Returns the activation for the next stage, (S or s, B, H). The last stage returns this microbatch's contribution
        to the mean loss over the step's targets, a scalar in fp32 (fp64 under fp64). If the stage has further losses, a
        `StageOutput` with this result and the losses is returned.
        """
        x, routed = self._blocks(x, batch)
        context = self.context
        further = {
            name: term.value(x, batch, context.tp, context.sequence_parallel)
            for name, term in self._terms.items()
            if not term.of_logits
        }
        if routed:
            sequence_shards = context.cp.size * (context.tp.size if context.sequence_parallel else 1)
            tokens = x.shape[0] * sequence_shards * batch.global_sequences
            further |= losses.router_losses(routed, self.model, batch.global_sequences, tokens, context.tp)
        output = x
        if self.spec.head:
            loss_SB, logsumexp_SB = self.losses(x, batch)
            output = mean_over_global_batch(loss_SB, batch.global_targets)
            if batch.text_losses is not None:
                sums_T, texts_SB = batch.text_losses
                sums_T.index_add_(0, texts_SB.flatten(), loss_SB.flatten().to(sums_T.dtype))
            further |= {
                name: term.value(logsumexp_SB, batch, context.tp, False)
                for name, term in self._terms.items()
                if term.of_logits
            }
        return StageOutput(output, further) if further else output

    def hidden(self, x: Tensor | None, batch: Microbatch) -> Tensor:
        """Return the output of embedding and blocks, (S or s, B, H)."""
        return self._blocks(x, batch)[0]

    def _blocks(self, x: Tensor | None, batch: Microbatch) -> tuple[Tensor, dict[int, Routed]]:
        """Return the output of embedding and blocks, and a dict from layer number to the router's `Routed`."""
        embedded = self._embed(batch) if x is None else x
        positions = self._positions(batch, embedded.shape[0])
        x = embedded
        if self.embedding_dropout is not None and positions.drawn is not None:
            x = self.embedding_dropout(embedded, None, positions.drawn)
        routers = dict[int, Routed]()
        added = None
        for layer, block in zip(self._layers, self.blocks, strict=True):
            # `recompute` saves its inputs until backward, so pass the sum of both tensors, which needs half the memory
            if layer in self._recomputed:
                x, added, routed = recompute(lambda x, block=block: block(x, None, positions), _sum(x, added))
            else:
                x, added, routed = block(x, added, positions)
            if routed is not None:
                routers[layer] = routed
        return _sum(x, added), routers

    def routers(self) -> Iterator[tuple[int, Router]]:
        """Yield (layer index, router) for each layer with experts."""
        for layer, block in zip(self._layers, self.blocks, strict=True):
            if isinstance(block, Block) and block.moe is not None:
                yield layer, block.moe.router

    def logits(self, x: Tensor) -> Tensor:
        """Apply final norm and head: (S or s, B, H) → (S, B, v).

        v covers this rank's slice of the vocabulary, without padding.
        """
        assert self.final_norm is not None
        vocab = self.model.vocab_size
        v = self.model.padded_vocab_size // self.context.tp.size
        # The other rows of the head are padding of the vocabulary, for which no logits are computed.
        num_rows = min(v, vocab - v * self.context.tp.rank)
        if self.output_head is not None:
            logits_SBv = self.output_head(self.final_norm(x), num_rows=num_rows)
        else:
            assert self.token_embedding is not None
            logits_SBv = column_linear(self.final_norm(x), self.token_embedding, self.context, num_rows=num_rows)
        return softcapped(logits_SBv, self.model.logit_softcap or 0.0)

    def losses(self, x: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
        """Return each token's loss and the log-sum-exp of its logits, each (S, B).

        The loss of a masked target is 0.
        """
        assert batch.targets_SB is not None
        first_vocab = self.model.padded_vocab_size // self.context.tp.size * self.context.tp.rank
        loss_SB, logsumexp_SB = vocab_parallel_cross_entropy(
            self.logits(x), batch.targets_SB, first_vocab, self.context
        )
        if batch.loss_mask_SB is not None:
            loss_SB = loss_SB * batch.loss_mask_SB
        return loss_SB, logsumexp_SB

    def _embed(self, batch: Microbatch) -> Tensor:
        assert self.token_embedding is not None and batch.tokens_SB is not None
        x = vocab_parallel_embedding(batch.tokens_SB, self.token_embedding, self.context)
        if self.model.scaled_embedding:
            x = x * self._embedding_scale
        if self.position_embedding is None:
            return x
        first = x.shape[0] * self.context.tp.rank if self.context.sequence_parallel else 0
        index_SB = self._given_positions(batch)
        if index_SB is None:
            return x + self.position_embedding[first : first + x.shape[0], None]
        embedded = nn.functional.embedding(index_SB[first : first + x.shape[0]], self.position_embedding)
        return x + (embedded if index_SB.dim() == 2 else embedded[:, None])

    def _positions(self, batch: Microbatch, rows: int) -> Positions:
        """Return the positions of a microbatch.

        `rows` is the number of positions in this rank's activations between blocks (S or s).
        """
        rope = self._rope
        cut = self.context.sequence_parallel
        sequence, first = (rows * self.context.tp.size, rows * self.context.tp.rank) if cut else (rows, 0)
        if rope is not None:
            index_SB = self._given_positions(batch)
            index = slice(0, sequence) if index_SB is None else index_SB
            rope = rope[0][index], rope[1][index]
        drawn = None
        if batch.samples_B is not None:
            held_S = torch.arange(sequence, device=self._device) if self._held_S is None else self._held_S
            drawn = Drawn(batch.samples_B, held_S[first : first + rows])
        return Positions(rope, self._alibi_slopes_a, batch.documents_BS, drawn)

    def _given_positions(self, batch: Microbatch) -> Tensor | None:
        """Return the position of each token, (S, B), or (S,) if it is the same in all rows.

        None means that the position is the index of the row in the microbatch.
        """
        if batch.positions_SB is not None:
            return batch.positions_SB
        if batch.documents_BS is None:
            return self._held_S
        positions_SB = within_document(batch.documents_BS).T
        return positions_SB if self._held_S is None else positions_SB[self._held_S]


def build_stages(
    model: ModelConfig,
    specs: Sequence[StageSpec],
    context: LayerContext,
    device: torch.device,
    recompute_modes: str = "none",
    terms: Mapping[str, losses.LossTerm] = MappingProxyType({}),
) -> list[Stage]:
    """Build the virtual stages of one pipeline rank, in model order.

    If two of these stages use the same parameter (a tied embedding), they share one tensor.
    """
    tied_rank = 0 if any(spec.embedding for spec in specs) else 1
    parameters = rank_parameters(model, specs, context.sequence_parallel)
    declared = {parameter.name: context.declare(parameter, tied_rank) for parameter in parameters}
    return [Stage(model, spec, context, declared, device, recompute_modes, terms=terms) for spec in specs]


def _sum(x: Tensor, added: Tensor | None) -> Tensor:
    return x if added is None else x + added
