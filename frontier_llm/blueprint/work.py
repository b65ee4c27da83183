"""Work (computation, communication, kept bytes) of a block, the embedding and the head on one rank for one microbatch,
as lists of items.

From these lists the planner computes FLOPs, seconds and kept bytes (`planner/costs/`). From the same lists, tests
compute the bytes that a run sends (`topology/traffic.py`). A recomputed item is in the list once. `Item.repeated_by`
names the recomputation modes that execute it again. Letters as in `model/dims.py`. T = S·B is the number of tokens of a
microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from frontier_llm.blueprint.expert_work import expert_work
from frontier_llm.blueprint.items import (
    ALIGNMENT,
    ANY,
    ATTENTION,
    EMBEDDING,
    EXCHANGE,
    FULL,
    HEAD,
    LOSS,
    PASSES,
    PRODUCTS,
    SENDING,
    SHARDS,
    STATISTICS,
    Collective,
    FlashCore,
    Item,
    Keep,
    Pass,
    Phase,
    Product,
    Software,
    Under,
    rank_tokens,
    weight_gradient,
)
from frontier_llm.blueprint.layout import DTYPE_BYTES, Layout, context_way, mode_shares, statistics_bytes
from frontier_llm.blueprint.parameters import (
    Parameter,
    ParameterKind,
    Split,
    StageSpec,
    block_parameters,
    layer_kinds,
    stage_parameters,
)
from frontier_llm.config import ModelConfig


def block_work(model: ModelConfig, layout: Layout, software: Software, layer: int | None = None) -> list[Item]:
    """Return the work of one transformer block.

    `layer` is the index of the block, which decides whether it has experts. None means the first block with experts,
    or a dense block if the model has no experts.
    """
    layer = layer_kinds(model)[-1][0] if layer is None else layer
    moe = model.moe if layer in model.routed_layers else None
    F = model.ffn_hidden if moe is None else moe.shared_hidden
    T = rank_tokens(model, layout)
    H = model.hidden
    tp = layout.tp
    size = DTYPE_BYTES[layout.dtype]
    cut = layout.sequence_shards
    # bytes per element of a product's input that is kept for the weight gradient; FP8 layers keep one byte per element
    input_size = size if software.linear_speedup == 1 else 1
    parameters = list(block_parameters(model, layer, layout.sequence_parallel))
    items: list[Item] = []
    for parameter in parameters:
        if parameter.kind is ParameterKind.MATRIX and isinstance(parameter.axes.get("tp"), Split):
            items += linear(parameter, T, layout, software)
            column, _, inputs = local_shape(parameter, tp)
            items.append(
                Item(Phase.F, PRODUCTS, Keep(input_size * T * inputs / (cut if column else 1), ("none", "selective")))
            )
    items += attention_core(model, layout, software)
    items += head_norm_work(model, layout)
    items += expert_work(model, layout, software) if moe is not None else ()
    forward, backward = elementwise(model, layout, software, F)
    items += [Item(Phase.F, PASSES, forward, FULL), Item(Phase.I, PASSES, backward)]
    if model.dropout:
        # In forward, dropout is part of the kernel that adds the residual. The following norm then cannot add the
        # residual, which costs one more kernel. In backward, the gradient of each dropout needs a separate pass.
        items += [Item(Phase.F, PASSES, Pass(0, 1), FULL), Item(Phase.I, PASSES, Pass(4 * size * T * H / cut, 2))]
    boundary = size * T * H
    # kept tensors that only sequence parallelism divides: inputs of the norms, and masks of the two dropouts
    whole = norms(model) * boundary + (2 * T * H if software.dropout else 0)
    own = size * T * (model.heads + 2 * model.num_kv_heads) * model.dim_per_head / tp  # q, k, v.
    # The backward of the activation needs its input. GeGLU also keeps a copy of its gate before GELU and one after it.
    own += size * T * (1 + model.gated + 2 * (model.activation == "geglu_tanh")) * F / tp
    if software.linear_speedup != 1:
        own += size * T * model.heads * model.dim_per_head / tp  # attention's output, in addition to its 8-bit copy
    checkpoint = boundary / (tp if software.checkpoints_cut else cut)
    items += [
        Item(Phase.F, PASSES, Keep(whole / cut + own, ("none", "selective"))),
        Item(Phase.F, PASSES, Keep(checkpoint, FULL)),
    ]
    return items + sharded_weights(parameters, layout, software)


def norms(model: ModelConfig) -> int:
    """Return the number of norms of a block, without the norms of queries and keys."""
    return 4 if model.norm_placement == "both" else 2


def local_shape(weight: Parameter, tp: int) -> tuple[bool, int, int]:
    """Return (output features are cut over tp, output features, input features) of a linear layer on one rank."""
    how = weight.axes["tp"]
    inputs = weight.shape[-1]
    outputs = prod(weight.shape[:-1])
    column = isinstance(how, Split) and how.dim < len(weight.shape) - 1
    if column:
        return True, outputs // tp, inputs
    return False, outputs, inputs // tp


def _row_scaling(T: int, outputs: int, inputs: int) -> Iterator[Item]:
    """Yield the passes that scale and convert the operands of a linear layer's three products to FP8, row by row.

    Along contiguous rows a pass reads 2 bytes and writes 1 byte per element. Across contiguous rows it reads each
    element twice: for the largest value of a row, and for the conversion.
    """
    x = T * inputs
    w = outputs * inputs
    g = T * outputs
    yield Item(Phase.F, PASSES, Pass(3 * (x + w), 2), FULL)
    yield Item(Phase.I, PASSES, Pass(3 * g + 5 * w, 2))
    yield Item(Phase.W, PASSES, Pass(5 * (x + g), 2))


def linear(weight: Parameter, T: int, layout: Layout, software: Software, cause: str = PRODUCTS) -> Iterator[Item]:
    """Yield the work of a linear layer: forward and gradient products, gradient accumulation and tp collectives.

    A column-parallel layer sums the gradients of its input over tp, and a row-parallel layer sums its outputs. With
    sequence parallelism each sum is a reduce-scatter. A column-parallel layer then gathers its input in forward, and
    again for the weight gradient. A row-parallel layer gathers its output gradient in backward. If the schedule splits
    backward, the row-parallel layer gathers its output gradient again for the weight gradient.
    """
    head = cause == HEAD
    column, outputs, inputs = local_shape(weight, layout.tp)
    again = () if head else FULL

    def product(m: int, n: int, k: int) -> Product:
        return Product(m, n, k, parameter=weight.name, fp8=not head)

    # 16-bit gradients that are summed in fp32 are converted to a second buffer
    converted_bytes = 6 if layout.gradient_wire == "fp32" and software.gradient_bytes == 2 else 0
    forward = product(T, outputs, inputs)
    backward = product(T, inputs, outputs)
    yield Item(Phase.F, cause, forward, again)
    yield Item(Phase.I, cause, backward)
    yield from weight_gradient(cause, product(outputs, inputs, T), software, converted_bytes)
    if software.scales_fp8_rows and not head:
        yield from _row_scaling(T, outputs, inputs)
    if layout.tp == 1:
        return

    def send(
        phase: Phase,
        operation: str,
        under: Under = Under.PRODUCT,
        beside: Product | None = None,
        apart: bool = False,
    ) -> Item:
        size = T * model_width * DTYPE_BYTES[layout.dtype]
        repeated = again if phase is Phase.F else ()
        return Item(phase, HEAD if head else SENDING, Collective("tp", operation, size, under, beside), repeated, apart)

    model_width = inputs if column else outputs
    if layout.sequence_parallel:
        yield send(Phase.F, "all_gather" if column else "reduce_scatter", beside=forward)
        yield send(Phase.I, "reduce_scatter") if column else send(Phase.I, "all_gather", beside=backward)
        yield send(Phase.W, "all_gather", Under.HEAD if head else Under.GRADIENT, apart=not column)
    else:
        yield send(Phase.I, "all_reduce") if column else send(Phase.F, "all_reduce", beside=forward)


def attention_core(model: ModelConfig, layout: Layout, software: Software) -> list[Item]:
    """Return the work of the attention core of this rank's heads: scores, softmax, dropout and weighted sum of values.

    With flash attention the exchange of keys and values over cp is included.
    """
    S = model.sequence_length
    D = model.dim_per_head
    B = layout.micro_batch
    a = model.heads // layout.tp
    modes = ("none",)
    if software.attention == "flash":
        queries = S // layout.cp
        return [
            *context_exchange(model, layout),
            Item(Phase.F, ATTENTION, FlashCore(B, a, queries, S, D), ANY),
            Item(
                Phase.I,
                ATTENTION,
                FlashCore(
                    batch=B,
                    heads=a,
                    queries=queries,
                    keys=S,
                    head_dim=D,
                    backward=True,
                ),
            ),
            # the log-sum-exp of each query, which backward needs
            Item(Phase.F, ATTENTION, Keep(float(statistics_bytes(layout.dtype)) * B * queries * a, modes)),
        ]
    batch = B * a
    scores, values = (Product(S, n, k, batch, aligned=D % ALIGNMENT == 0) for n, k in ((S, D), (D, S)))
    square = batch * S * S * 2.0  # bytes of the score matrix in 16 bit.
    # Memory traffic in units of one read or write of the 16-bit score matrix. Separate softmax kernels compute in fp32
    # and have 18.5 units: conversion 3, scale 4, mask 4.5, softmax 4, conversion back 3.
    passes = (2.0 if software.fused_softmax else 18.5) + (2.5 if software.dropout else 0.0)
    forward = [Item(Phase.F, ATTENTION, work, ANY) for work in (scores, values, Pass(passes * square, 2))]
    backward = [
        Item(Phase.I, ATTENTION, work) for work in (scores, scores, values, values, Pass((passes + 1.0) * square, 2))
    ]
    probabilities = batch * S * S * (2.0 * DTYPE_BYTES[layout.dtype] + (1 if software.dropout else 0))
    return [*forward, *backward, Item(Phase.F, ATTENTION, Keep(probabilities, modes))]


def head_norm_work(model: ModelConfig, layout: Layout) -> Iterator[Item]:
    """Yield the work of the norms of queries and keys.

    With a norm over all heads (`qk_norm="full"`), the mean squares are summed over tp in forward, and their gradients
    in backward.
    """
    if model.qk_norm is None:
        return
    T = rank_tokens(model, layout)
    heads = (model.heads + model.num_kv_heads) / layout.tp
    moved = T * heads * model.dim_per_head * DTYPE_BYTES[layout.dtype]
    yield Item(Phase.F, PASSES, Pass(2 * moved, 2), FULL)
    yield Item(Phase.I, PASSES, Pass(4 * moved, 4))
    yield Item(Phase.F, PASSES, Keep(moved, ("none", "selective")))
    if model.qk_norm == "full" and layout.tp > 1:
        for phase, again in ((Phase.F, FULL), (Phase.I, ())):
            for _ in "qk":
                yield Item(phase, SENDING, Collective("tp", "all_reduce", T * statistics_bytes(layout.dtype)), again)


def context_exchange(model: ModelConfig, layout: Layout) -> Iterator[Item]:
    """Yield the communication of context-parallel attention, and the copies that it needs.

    "gather" gathers all keys and values, in two halves. "ring" sends blocks of keys and values from neighbour to
    neighbour. "heads" is an all-to-all: before it a rank has all heads of its tokens, and after it some heads of all
    tokens.
    """
    if layout.cp == 1:
        return
    D = model.dim_per_head
    cp = layout.cp
    B = layout.micro_batch
    a = model.heads // layout.tp
    g = model.num_kv_heads // layout.tp
    # bytes of one head at one position, for all sequences of the microbatch
    row = B * D * DTYPE_BYTES[layout.dtype]
    held = model.sequence_length // cp  # number of positions on this rank

    def send(phase: Phase, operation: str, size: int, under: Under = Under.NOTHING, calls: int = 1) -> Item:
        return Item(
            phase,
            EXCHANGE,
            Collective("cp", operation, size, under, calls=calls),
            ANY if phase is Phase.F else (),
        )

    way = context_way(model, layout.tp, cp, layout.context_attention)
    if way == "gather":
        # the all-gather of the second half of the keys overlaps with attention to the first half
        for under in (Under.NOTHING, Under.ATTENTION):
            half = held * cp * g * row
            yield send(Phase.F, "all_gather", half, under)
            yield send(Phase.I, "all_gather", half, under)
            yield send(Phase.I, "reduce_scatter", half, under)
        # a copy that reorders the second half, whose chunks arrive in reverse order
        yield Item(Phase.F, EXCHANGE, Pass(2 * half, 2), ANY)
        # backward: keys and values are reordered again, and both gradients are summed and reordered
        yield Item(Phase.I, EXCHANGE, Pass(12 * half, 8))
    elif way == "ring":
        both = held * 2 * g * row
        yield send(Phase.F, "exchange", both, Under.ATTENTION, cp - 1)
        yield send(Phase.I, "exchange", both, Under.ATTENTION, cp - 1)
        # The gradients of keys and values travel around the complete ring, so they need cp messages instead of cp - 1.
        # The last message returns them to the rank that holds the keys.
        yield send(Phase.I, "exchange", both, Under.ATTENTION, cp)
        # From the second block on, separate kernels merge the output of a block into the sum (in fp32) and sum
        # gradients. Half of the blocks have all queries, and the other half have only half of the queries, so the mean
        # is 0.75.
        merged = (cp - 1) * 0.75 * held * a * B * D * statistics_bytes(layout.dtype)
        yield Item(Phase.F, EXCHANGE, Pass(7 * merged, 6 * (cp - 1)), ANY)
        yield Item(Phase.I, EXCHANGE, Pass(3 * merged * (1 + 2 * g / a), 3 * (cp - 1)))
    else:
        # Full recomputation also repeats the second all-to-all, which sends the outputs. Selective recomputation
        # repeats only the attention core, which does not need it.
        for phase, again in ((Phase.F, FULL), (Phase.I, ())):
            yield send(phase, "all_to_all", held * (a + 2 * g) * row)
            yield Item(phase, EXCHANGE, Collective("cp", "all_to_all", held * a * row), again)
            # copies that sort the data by target rank before an all-to-all, and by position after it
            packed = Pass(4 * held * (2 * a + 2 * g) * row, 8)
            yield Item(phase, EXCHANGE, packed, ANY if phase is Phase.F else ())
        # The input of the all-to-all, which is attention's output, is kept until backward. The output of the all-to-all
        # is kept too, by another item.
        yield Item(Phase.F, ATTENTION, Keep(held * a * row, ("none",)))


def elementwise(model: ModelConfig, layout: Layout, software: Software, F: int) -> tuple[Pass, Pass]:
    """Return the memory traffic of a block's elementwise operations in (forward, backward). F is the width of its MLP.

    These are norms, biases, activation, rotary embedding, dropout and residual additions. The unit of traffic is one
    read or write of S·B·H elements. A norm has 2 units, a residual addition 3 (+1.5 with dropout and its mask). Norms
    and residual additions are divided by tp only with sequence parallelism. The qkv split and merge and the activation
    over F are always divided by tp.
    """
    token_bytes = 2.0 * rank_tokens(model, layout)
    residual = 3.0 + (1.5 if software.dropout else 0.0)
    between = (
        token_bytes
        * model.hidden
        / layout.sequence_shards
        * (2.0 * norms(model) + 2 * residual)
        * (1.0 if software.fused else 1.8)
    )
    heads = token_bytes * (model.heads + 2 * model.num_kv_heads) * model.dim_per_head / layout.tp
    inside = heads * (4.0 if model.position == "rope" else 2.0)
    inside += token_bytes * F / layout.tp * (2 + model.gated) * (1.0 if software.fused else 2.5)
    kernels = norms(model) + (4 if software.fused else 14)
    return Pass(between + inside, kernels), Pass(1.6 * (between + inside), 2 * kernels)


def sharded_weights(parameters: Iterable[Parameter], layout: Layout, software: Software) -> list[Item]:
    """Return the collectives of a block with sharded weights (FSDP); an empty list if weights are not sharded.

    Weights are gathered in forward, and again in backward unless they are kept. Gradients are reduce-scattered.
    """
    if not layout.sharding.startswith("weights"):
        return []
    numel = sum(parameter.rank_numel({"tp": layout.tp, "ep": layout.ep, "etp": layout.etp}) for parameter in parameters)
    gather = Collective("dp", "all_gather", numel * DTYPE_BYTES[layout.dtype])
    scatter = Item(Phase.I, SHARDS, Collective("dp", "reduce_scatter", numel * software.gradient_bytes))
    again = [Item(Phase.I, SHARDS, gather)] if layout.sharding == "weights" else []
    return [Item(Phase.F, SHARDS, gather), *again, scatter]


def embedding_work(model: ModelConfig, layout: Layout) -> list[Item]:
    """Return the work of the vocabulary-parallel embedding.

    Forward looks up rows and sums them over tp. Backward adds the output gradient to the rows of the weight gradient.
    """
    size = rank_tokens(model, layout) * model.hidden * DTYPE_BYTES[layout.dtype]
    items = [Item(Phase.F, EMBEDDING, Pass(3 * size, 4)), Item(Phase.W, EMBEDDING, Pass(4 * size, 4))]
    if model.dropout:
        dropped = Pass(2 * size / layout.sequence_shards, 1)
        items += [Item(Phase.F, EMBEDDING, dropped), Item(Phase.W, EMBEDDING, dropped)]
    if layout.tp == 1:
        return items

    def send(phase: Phase, operation: str) -> Item:
        return Item(phase, EMBEDDING, Collective("tp", operation, size, Under.PRODUCT))

    if layout.sequence_parallel:
        return [*items, send(Phase.F, "reduce_scatter"), send(Phase.W, "all_gather")]
    return [*items, send(Phase.F, "all_reduce")]


def head_work(model: ModelConfig, layout: Layout, software: Software) -> list[Item]:
    """Return the work of the output head and the cross-entropy over 16-bit logits.

    A fused cross-entropy reads the logits once in forward, and reads and overwrites them in backward. Separate kernels,
    as in Megatron, have this memory traffic in bytes per logit. Forward: to fp32 6, maximum 4, subtract 8, exponential
    8, sum 4, divide 8. Backward: multiply 8, to 16 bit 6.
    """
    T = rank_tokens(model, layout)
    size = DTYPE_BYTES[layout.dtype]
    only_head = StageSpec(model.layers, 0, embedding=False, head=True)
    weight = next(one for one in stage_parameters(model, only_head) if one.kind is ParameterKind.EMBEDDING)
    logits = T * model.padded_vocab_size // layout.tp
    forward, backward = (2.0, 4.0) if software.fused_cross_entropy else (38.0, 14.0)
    in_place = software.fused and software.attention == "flash"
    items = [
        *linear(weight, T, layout, software, HEAD),
        Item(Phase.F, LOSS, Pass(forward * logits, 6)),
        Item(Phase.I, LOSS, Pass(backward * logits, 3)),
        Item(Phase.F, LOSS, Keep(logits * (size if in_place else size + 4))),
        Item(Phase.W, LOSS, Keep(logits * size)),  # the head's weight gradient needs the gradient of the logits
    ]
    if model.logit_softcap is not None:  # kernels for division, tanh and product; backward needs the output of tanh
        items += [Item(Phase.F, LOSS, Pass(6 * size * logits, 3)), Item(Phase.I, LOSS, Pass(7 * size * logits, 3))]
        items.append(Item(Phase.F, LOSS, Keep(size * logits)))
    if layout.tp > 1:
        statistics = STATISTICS * T * layout.tp * statistics_bytes(layout.dtype)
        items.append(Item(Phase.F, LOSS, Collective("tp", "all_gather", statistics)))
    return items


def flops(items: Iterable[Item], causal: bool = False, forward_only: bool = False) -> float:
    """Return the FLOPs of matrix products and attention in a work list. With `causal`, half of attention is counted."""
    total = 0.0
    for item in items:
        if isinstance(item.work, Product | FlashCore) and (item.phase is Phase.F or not forward_only):
            total += item.work.flops * (0.5 if causal and item.cause == ATTENTION else 1.0)
    return total


def model_flops_per_token(model: ModelConfig, causal: bool = False) -> float:
    """Return the FLOPs per token of forward and backward, without recomputation and without padding of the vocabulary.

    Forward has 2 FLOPs per weight and token, and 4·S·A·D per layer and token for the scores and their weighted sum.
    Backward computes two gradients for every matrix product. `causal=False` counts the full S x S square, as is usual
    for MFU (PaLM, arXiv:2204.02311 appendix B; Megatron's 72·B·s·L·h²(1 + s/6h + V/12Lh)). `causal=True` counts the
    half that is computed.
    """
    unpadded = model.model_copy(update={"vocab_multiple": 1})
    return hardware_flops_per_token(unpadded, Layout(), causal)


def hardware_flops_per_token(model: ModelConfig, layout: Layout, causal: bool = False) -> float:
    """Return the FLOPs that the devices execute per token.

    They are the FLOPs of the model, of the head's padding rows and of the recomputed forward.
    """
    software = Software()
    modes = mode_shares(model, layout)
    whole = flops(head_work(model, layout, software), causal)
    for layer, count in layer_kinds(model):
        block = block_work(model, layout, software, layer=layer)
        again = sum(item.repeats(modes) * flops([item], causal) for item in block)
        whole += count * (flops(block, causal) + again)
    return whole * layout.tp * layout.cp / (model.sequence_length * layout.micro_batch)


def matrix_parameters(model: ModelConfig) -> int:
    """Return the number of weights by which a token is multiplied: matrices of the layers and of the output head.

    The embedding lookup and padding rows are not counted. Only the `top_k` experts that process a token are counted.
    """

    def each(layer: int) -> int:
        parameters = list(block_parameters(model, layer))
        total = sum(parameter.numel for parameter in parameters if parameter.kind is ParameterKind.MATRIX)
        if model.moe is not None:
            experts = sum(parameter.numel for parameter in parameters if parameter.kind is ParameterKind.EXPERTS)
            total += experts * model.moe.top_k // model.moe.experts
        return total

    return sum(count * each(layer) for layer, count in layer_kinds(model)) + model.hidden * model.vocab_size
