"""Model FLOPs: what the mathematics needs, whatever the runtime recomputes; and hardware FLOPs, which count that
too.
"""

from __future__ import annotations

from frontier_llm.blueprint.items import Software
from frontier_llm.blueprint.layout import Layout, mode_shares
from frontier_llm.blueprint.parameters import layer_kinds
from frontier_llm.blueprint.work import block_work, flops, head_work
from frontier_llm.config import ModelConfig


def model_flops_per_token(model: ModelConfig, causal: bool = False) -> float:
    """Forward and backward of the true vocabulary; recomputation does not count.

    2 FLOPs per weight and token, and 4·S·A·D per layer for the scores and their weighted sum; backward computes two
    gradients for every product. `causal=False` counts the full S x S square, as the field's MFU does (PaLM,
    arXiv:2204.02311 appendix B; Megatron's 72·B·s·L·h²(1 + s/6h + V/12Lh)); `causal=True` counts the half that is
    computed.
    """
    unpadded = model.model_copy(update={"vocab_multiple": 1})
    return hardware_flops_per_token(unpadded, Layout(), causal)


def hardware_flops_per_token(model: ModelConfig, layout: Layout, causal: bool = False) -> float:
    """What the devices execute per token: the model's FLOPs, padding rows of the head, and the recomputed forward."""
    software = Software()
    modes = mode_shares(model, layout)
    whole = flops(head_work(model, layout, software), causal)
    for layer, count in layer_kinds(model):
        block = block_work(model, layout, software, layer=layer)
        again = sum(item.repeats(modes) * flops([item], causal) for item in block)
        whole += count * (flops(block, causal) + again)
    return whole * layout.tp * layout.cp / (model.sequence_length * layout.micro_batch)
