"""Test cases for the ops: for each op its call, its inputs, and the result of the reference implementation.

A case can be built at any size. `ops check` (check.py) chooses sizes that use every code object. Tests choose odd
sizes, and `bench ops` uses the sizes of a model's microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frontier_llm.ops import reference
from frontier_llm.ops.dropout import Mask
from frontier_llm.ops.reference import AdamWUpdate, Scores
from frontier_llm.ops.routing import Routing

Pair = tuple[Tensor, Tensor]  # an op's result, and the reference's result in float64

FIRST_TARGET = 100  # first vocabulary id of the shard in the cross-entropy cases
ROWS_BEHIND = 200  # number of additional rows after the last group; no op may read them
DROP_KEY = 0xFEDCBA9876543210


@dataclass(frozen=True)
class Case:
    """One op with its inputs.

    `call(ops, *inputs)` returns the op's outputs, or the tensors that it changed. A case with `gradients` also runs
    the backward pass. An optional input may be None.
    """

    op: str
    shape: str
    inputs: tuple[Tensor | None, ...]
    call: Callable[..., Tensor | tuple[Tensor, ...]]
    gradients: bool = True

    def outputs(self, ops: Any, inputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Return the outputs of one call, always as a tuple."""
        outputs = self.call(ops, *inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def pairs(self, ops: Any) -> list[Pair]:
        """Return the outputs and then the gradients of the inputs, each with the reference's result in float64."""
        ours = [None if x is None else x.detach().clone().requires_grad_(self.gradients) for x in self.inputs]
        wide = [None if x is None else x.detach().double().clone().requires_grad_(self.gradients) for x in self.inputs]
        got = self.outputs(ops, ours)
        expected = self.outputs(reference, wide)
        pairs = list(zip(got, expected, strict=True))
        if not self.gradients:
            return pairs
        trained = [index for index, output in enumerate(got) if output.requires_grad]
        grads = [normal(*got[index].shape, dtype=got[index].dtype, seed=index + 1) for index in trained]
        torch.autograd.backward([got[index] for index in trained], grads)
        torch.autograd.backward([expected[index] for index in trained], [grad.double() for grad in grads])
        for a, b in zip(ours, wide, strict=True):
            if a is not None and b is not None:
                assert a.grad is not None and b.grad is not None
                pairs.append((a.grad, b.grad))
        return pairs


# Larger tensors are drawn on the default device, because drawing them on a CPU takes seconds.
_DRAWN_ON_CPU = 1 << 24


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return normal numbers on torch's default device.

    Up to `_DRAWN_ON_CPU` numbers depend only on shape and seed. Larger tensors use torch's global generator.
    """
    device = torch.get_default_device()
    if torch.Size(shape).numel() > _DRAWN_ON_CPU:
        return torch.randn(*shape, device=device, dtype=dtype)
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), device="cpu")
    return numbers.to(device, dtype)


def quarters(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return multiples of 1/4. Their sums are exact, so that op and reference normalise the same numbers."""
    return (normal(*shape, seed=seed) * 4).round().div(4).to(dtype)


def _words(shape: Sequence[int | str], *more: str) -> str:
    return ", ".join([" x ".join(map(str, shape)), *filter(None, more)])


def attention(
    dtype: torch.dtype, sequence: int, batch: int, heads: int, kv_heads: int, head_dim: int, *,
    scores: Scores, kind: str = "",
) -> Case:  # fmt: skip
    """Return a case of causal attention. `kind` is a text that describes the options in `scores`."""
    q = normal(sequence, batch, heads, head_dim, dtype=dtype)
    k, v = (normal(sequence, batch, kv_heads, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    words = _words((sequence, f"{heads}/{kv_heads}", head_dim), kind)
    return Case("attention", words, (q, k, v), lambda ops, *qkv: ops.attention(*qkv, scores))


def attention_block(
    dtype: torch.dtype, queries: int, keys: int, batch: int, heads: int, kv_heads: int, head_dim: int, *,
    scores: Scores, kind: str = "",
) -> Case:  # fmt: skip
    """Return a case of attention over a range of keys, with its backward.

    The log-sum-exp that is passed to the backward covers more keys than this range. The results are the output,
    exp(log-sum-exp), and the gradients of q, k and v.
    """
    q, grad, o = (normal(queries, batch, heads, head_dim, dtype=dtype, seed=seed) for seed in (0, 3, 4))
    k, v = normal(keys, 2, batch, kv_heads, head_dim, dtype=dtype, seed=1).unbind(1)
    _, exact = reference.attention_block(q.double(), (k.double(), v.double()), scores)
    over_more = (exact + 1.0).float()

    def call(ops: Any, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, o: Tensor) -> tuple[Tensor, ...]:
        output, logsumexp = ops.attention_block(q, (k, v), scores)
        grad_q, grad_k, grad_v = ops.attention_block_backward(grad, q, (k, v), o, over_more, scores)
        return output, logsumexp.exp().to(q.dtype), grad_q, grad_k, grad_v

    words = _words((f"{queries} after {scores.offset}", keys, f"{heads}/{kv_heads}", head_dim), kind)
    return Case("attention_block", words, (q, k, v, grad, o), call, gradients=False)


def rms_norm(dtype: torch.dtype, *shape: int, eps: float = 1e-5) -> Case:
    """Return a case of RMSNorm over the last dim."""
    inputs = (normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype))
    return Case("rms_norm", _words(shape), inputs, lambda ops, x, weight: ops.rms_norm(x, weight, eps))


def layer_norm(dtype: torch.dtype, *shape: int, eps: float = 1e-3, bias: bool = True) -> Case:
    """Return a case of LayerNorm over the last dim."""
    summand = normal(shape[-1], dtype=dtype, seed=3) if bias else None
    inputs = (normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype), summand)
    words = _words(shape, "bias" * bias)
    return Case("layer_norm", words, inputs, lambda ops, x, weight, b: ops.layer_norm(x, weight, b, eps))


def add_norm(dtype: torch.dtype, *shape: int, kind: str = "layernorm", bias: bool = False, eps: float = 1e-5) -> Case:
    """Return a case of the sum of two tensors and its norm."""
    x = quarters(*shape, dtype=dtype)
    residual = quarters(*shape, dtype=dtype, seed=1)
    summand = normal(shape[-1], dtype=dtype, seed=3) if bias else None
    inputs = (x, residual, normal(shape[-1], dtype=dtype), summand)
    return Case("add_norm", _words(shape, kind), inputs, lambda ops, *given: ops.add_norm(*given, eps, kind))


def rotations(*shape: int, half: int, per_sample: bool = False) -> tuple[Tensor, Tensor]:
    """Return cosines and sines for `rope` at this shape: [S, half], or [S, B, half] with `per_sample`."""
    angle = normal(*shape[: 2 if per_sample else 1], half)
    return angle.cos(), angle.sin()


def rope(dtype: torch.dtype, *shape: int, half: int, per_sample: bool = False, op: str = "rope") -> Case:
    """Return a case of rope or rotated_heads (`op`), which rotates `half` pairs of features of the last dim.

    `shape` is [S, B, heads, D] for rope and [S, B, groups, members, D] for rotated_heads.
    """
    cos, sin = rotations(*shape, half=half, per_sample=per_sample)
    words = _words(shape, f"{half} angles")
    return Case(op, words, (normal(*shape, dtype=dtype),), lambda ops, x: getattr(ops, op)(x, cos, sin))


def linear(dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> Case:
    """Return a case of a matrix product with a bias."""
    tensors = (
        normal(1, rows, inputs, dtype=dtype),
        normal(outputs, inputs, dtype=dtype, seed=1),
        normal(outputs, dtype=dtype),
    )
    words = _words((rows, outputs, inputs))
    return Case("linear", words, tensors, lambda ops, x, weight, bias: ops.linear(x, weight, bias))


def swiglu(dtype: torch.dtype, *shape: int, weighted: bool = False, size: float = 2.0) -> Case:
    """Return a case of SwiGLU for `shape` [rows, …, 2, width].

    With `weighted` each row has an fp32 weight, which gets a gradient. `size` scales the inputs.
    """
    x = size * normal(*shape, dtype=dtype)
    words = _words(shape[:-2] + shape[-1:], "weighted" * weighted)
    if weighted:
        return Case("swiglu", words, (x, normal(*shape[:-2])), lambda ops, y, weights: ops.swiglu(y, weights))
    return Case("swiglu", words, (x,), lambda ops, y: ops.swiglu(y))


def gelu(
    dtype: torch.dtype,
    *shape: int,
    approximate: bool = False,
    bias: bool = True,
    weighted: bool = False,
    size: float = 2.0,
) -> Case:
    """Return a case of GELU with an optional bias.

    With `weighted` each row has an fp32 weight, which gets a gradient. `size` scales the inputs.
    """
    x = size * normal(*shape, dtype=dtype)
    summand = normal(shape[-1], dtype=dtype) if bias else None
    words = _words(shape, "tanh" * approximate, "weighted" * weighted)
    if weighted:
        inputs = (x, summand, normal(*shape[:-1]))
        return Case("gelu", words, inputs, lambda ops, y, b, weights: ops.gelu(y, b, approximate, weights))
    return Case("gelu", words, (x, summand), lambda ops, y, b: ops.gelu(y, b, approximate))


def gather_rows(dtype: torch.dtype, columns: int, *, terms: int) -> Case:
    """Return a case of gather_rows. With `terms` 1, 7 rows are reordered. With `terms` 3, 0 to 3 rows are summed."""
    of_terms = {
        1: torch.tensor([[6], [0], [-1], [3], [3]]),
        3: torch.tensor([[0, 1, 6], [-1, 5, -1], [-1, -1, -1], [2, 2, 4]]),
    }
    places = of_terms[terms]
    inputs = (normal(7, columns, dtype=dtype),)
    words = f"7 x {columns}, {terms} to a row"
    return Case("gather_rows", words, inputs, lambda ops, x: ops.gather_rows(x, places), gradients=False)


def route(experts: int, routing: Routing, *, biased: bool = False, tokens: int = 19) -> Case:
    """Return a case of a router with ties: one token has equal logits for all experts, others for two experts.

    The outputs are scores, weights, and the chosen experts as floating-point numbers.
    """
    logits = 3 * normal(tokens, experts)
    logits[1] = 0.25
    logits[2::3, experts // 2] = logits[2::3, experts - 1]
    bias = 0.1 * normal(experts) if biased else None

    def call(ops: Any, x: Tensor) -> tuple[Tensor, ...]:
        of_type = None if bias is None else bias.to(x.dtype)
        scores, weights, choice = ops.route(x, of_type, routing)
        return scores, weights, choice.to(x.dtype)

    words = ", ".join(
        [
            f"{tokens} x {routing.top_k} of {experts}",
            "sigmoid" if routing.sigmoid else "softmax",
            *["normalised"] * routing.normalise,
            *["biased"] * biased,
        ]
    )
    return Case("route", words, (logits,), call)


def cross_entropy(
    dtype: torch.dtype, columns: int, *, targets: Tensor | None = None, first: int = FIRST_TARGET
) -> Case:
    """Return a case of the cross-entropy's statistics and gradient for the vocabulary shard that begins at `first`.

    Without `targets` there are six tokens, with targets inside and outside the shard.
    """
    grad_loss = torch.tensor([1.0, 0.5, 0.25, 1, 0, 2])
    if targets is None:
        targets = torch.tensor([first, first + columns - 1, first - 1, first + columns, -1, first])
    else:
        grad_loss = torch.ones(len(targets))

    def call(ops: Any, x: Tensor) -> tuple[Tensor, ...]:
        stats = ops.cross_entropy_stats(x, targets, first)
        gradient = ops.cross_entropy_backward_(x, targets, first, stats[0] + stats[1].log(), grad_loss)
        return stats, gradient

    logits = 3 * normal(len(targets), columns, dtype=dtype)
    return Case("cross_entropy", _words(logits.shape), (logits,), call, gradients=False)


def adamw(dtype: torch.dtype, count: int, *, grad_scale: float | Tensor = 0.25) -> Case:
    """Return a case of one AdamW update. The results are master weights, both moments and the weights in `dtype`."""
    update = AdamWUpdate(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3, grad_scale=grad_scale)
    master, grad, exp_avg, exp_avg_sq = (normal(count, seed=seed) for seed in range(4))

    def call(ops: Any, master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, weights: Tensor) -> Any:
        ops.adamw_(master, grad, exp_avg, exp_avg_sq, weights, update)
        return master, exp_avg, exp_avg_sq, weights

    inputs = (master, grad, exp_avg, exp_avg_sq.abs(), torch.zeros(count, dtype=dtype))
    return Case("adamw", f"{count}", inputs, call, gradients=False)


def accumulate(dtype: torch.dtype, count: int) -> Case:
    """Return a case that adds a gradient to the fp32 buffer."""

    def call(ops: Any, main: Tensor, grad: Tensor) -> Tensor:
        ops.accumulate_(main, grad)
        return main

    return Case("accumulate", f"{count}", (normal(count), normal(count, dtype=dtype, seed=1)), call, gradients=False)


def accumulate_rows(rows: int, columns: int) -> Case:
    """Return a case that adds the sum of fp32 rows to the fp32 buffer."""

    def call(ops: Any, main: Tensor, rows_RC: Tensor) -> Tensor:
        ops.accumulate_rows_(main, rows_RC)
        return main

    inputs = (normal(columns), normal(rows, columns, seed=1))
    return Case("accumulate_rows", f"{rows} x {columns}", inputs, call, gradients=False)


def sum_of_squares(dtype: torch.dtype, count: int) -> Case:
    """Return a case of sum_of_squares. The result is compared in fp32 (fp64 for fp64 inputs)."""

    def call(ops: Any, grad: Tensor) -> Tensor:
        total: Tensor = ops.sum_of_squares(grad)
        return total if grad.dtype == torch.float64 else total.float()

    return Case("sum_of_squares", f"{count}", (normal(count, dtype=dtype, seed=1),), call, gradients=False)


def drop(dtype: torch.dtype, *shape: int, residual: bool = True) -> Case:
    """Return a case that drops a quarter of the elements. `shape` is [S, B, columns].

    With `residual` the result is added to a residual stream.
    """
    sequence, batch, _ = shape
    samples = 3 + (5 << 32) * torch.arange(batch)
    mask = Mask(DROP_KEY, 1 << 14, samples, torch.arange(sequence) + 1000)
    stream = normal(*shape, dtype=dtype, seed=1) if residual else None
    inputs = (normal(*shape, dtype=dtype), stream)
    words = _words(shape, "residual" * residual)
    return Case("drop", words, inputs, lambda ops, x, stream: ops.drop(x, stream, mask), gradients=False)


def embedding(dtype: torch.dtype, columns: int) -> Case:
    """Return a case that adds gradients of six tokens to five rows of a table. Some tokens belong to other shards."""
    ids = torch.tensor([[3, 7], [9, 3], [2, 7]])

    def call(ops: Any, table: Tensor, rows: Tensor) -> Tensor:
        ops.embedding_backward_(table, ids, rows, 3)
        return table

    inputs = (torch.zeros(5, columns), normal(3, 2, columns, dtype=dtype))
    return Case("embedding", f"6 x {columns}", inputs, call, gradients=False)


def grouped_linear(dtype: torch.dtype, ends: Tensor, inputs: int, outputs: int) -> Case:
    """Return a case of forward and input gradient over groups of rows that end at `ends`."""
    rows = int(ends[-1])
    x, grad = (normal(rows + ROWS_BEHIND, columns, dtype=dtype) for columns in (inputs, outputs))
    weight = normal(len(ends), outputs, inputs, dtype=dtype)

    def call(ops: Any, x: Tensor, grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        output = ops.grouped_linear(x, weight, ends)
        return output[:rows], ops.grouped_input_gradient(grad, weight, ends)[:rows]

    words = f"{rows} rows of {len(ends)} groups x {inputs} x {outputs}"
    return Case("grouped_linear", words, (x, grad, weight), call, gradients=False)


def grouped_gradient(dtype: torch.dtype, ends: Tensor, inputs: int, outputs: int) -> Case:
    """Return a case that adds the weights' gradient of a grouped product to a buffer."""
    rows = int(ends[-1]) + ROWS_BEHIND
    main = normal(len(ends), outputs, inputs)

    def call(ops: Any, main: Tensor, grad: Tensor, x: Tensor) -> Tensor:
        ops.accumulate_grouped_gradient_(main, grad, x, ends)
        return main

    tensors = (main, normal(rows, outputs, dtype=dtype), normal(rows, inputs, dtype=dtype))
    words = f"{rows} rows of {len(ends)} groups x {inputs} x {outputs}"
    return Case("grouped_gradient", words, tensors, call, gradients=False)
