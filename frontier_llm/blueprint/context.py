"""By which way the ranks that hold one sequence attend to each other."""

from __future__ import annotations

from frontier_llm.config import ModelConfig

# gather: keys and values of all ranks; ring: the same from neighbour to neighbour, beside compute; heads: all tokens of
# some heads (Ulysses)
WAYS = ("gather", "ring", "heads")


def context_way(model: ModelConfig, tp: int, cp: int, wanted: str = "auto") -> str:
    """`wanted`, or for `auto` the way that sends fewer bytes per layer: heads where each rank can have some, else
    gather.

    In units of one rank's S / cp tokens of one head, forward and backward: gathering moves keys and values three times
    (they are gathered again, and their gradients scattered), 6 g (cp - 1); by heads queries, keys, values and outputs
    move twice, 4 (a + g) (cp - 1) / cp.
    """
    if wanted != "auto":
        return wanted
    heads = model.heads // tp
    kv_heads = model.num_kv_heads // tp
    return "heads" if kv_heads % cp == 0 and 4 * (heads + kv_heads) < 6 * kv_heads * cp else "gather"
