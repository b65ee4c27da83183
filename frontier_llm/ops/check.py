"""Every GPU op at small odd shapes against the reference in float64: what runs the kernels is the caller's, a GPU or
something in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from frontier_llm.errors import FrontierError
from frontier_llm.ops import reference
from frontier_llm.ops.dropout import Mask
from frontier_llm.ops.gpu import GpuOps
from frontier_llm.ops.reference import AdamWUpdate, Scores
from frontier_llm.ops.routing import Routing

Pair = tuple[Tensor, Tensor]  # what came out, and what should have
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Check:
    """One op at one shape, forward and backward. `limit` is in units in the last place of the largest element: one
    rounding is half of one.
    """

    op: str
    shape: str
    run: Callable[[GpuOps], list[Pair]]
    limit: float


@dataclass(frozen=True)
class Result:
    """What became of a case: the largest error in units in the last place, or what went wrong."""

    op: str
    dtype: str
    shape: str
    error: float
    limit: float
    fault: str = ""

    @property
    def ok(self) -> bool:
        """Within the limit, without a fault."""
        return not self.fault and self.error <= self.limit


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers on torch's default device that depend on the shape and the seed alone."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), device="cpu")
    return numbers.to(torch.get_default_device(), dtype)


def against_reference(
    ops: Any, name: str, inputs: Sequence[Tensor | None], *args: Any, weights: Tensor | None = None
) -> list[Pair]:
    """Outputs and gradients of an op, each beside the reference's in float64. `weights` of its rows stand behind the
    other arguments.
    """
    generator = torch.Generator().manual_seed(1)
    given = (*inputs, *(() if weights is None else (weights,)))
    ours = [None if x is None else x.detach().clone().requires_grad_() for x in given]
    wide = [None if x is None else x.detach().double().requires_grad_() for x in given]
    outputs = []
    for op, tensors in ((getattr(ops, name), ours), (getattr(reference, name), wide)):
        output = op(*tensors[: len(inputs)], *args, *tensors[len(inputs) :])
        outputs.append(output if isinstance(output, tuple) else (output,))
    grads = [torch.randn(x.shape, generator=generator, device="cpu").to(x) for x in outputs[0]]
    torch.autograd.backward(outputs[0], grads)
    torch.autograd.backward(outputs[1], [grad.double() for grad in grads])
    pairs = list(zip(*outputs, strict=True))
    for a, b in zip(ours, wide, strict=True):
        if a is not None and b is not None:
            assert a.grad is not None and b.grad is not None
            pairs.append((a.grad, b.grad))
    return pairs


def units(got: Tensor, expected: Tensor) -> float:
    """The largest error in units in the last place of the largest element; NaN is infinitely wrong."""
    error = (got.double() - expected.double()).abs().max().item()
    scale = expected.abs().max().item() or 1.0
    return error / scale / torch.finfo(got.dtype).eps if error == error else float("inf")


def _cross_entropy(logits: Tensor, ops: GpuOps) -> list[Pair]:
    columns = logits.shape[1]
    targets = torch.tensor([100, 100 + columns - 1, 99, 100 + columns, -1, 100])  # of this shard, and of others
    stats = reference.cross_entropy_stats(logits.double(), targets, 100)
    logsumexp = stats[0] + stats[1].log()
    grad_loss = torch.tensor([1.0, 0.5, 0.25, 1, 0, 2])
    expected = reference.cross_entropy_backward_(logits.double(), targets, 100, logsumexp, grad_loss)
    pairs = [(ops.cross_entropy_stats(logits, targets, 100), stats)]
    return [*pairs, (ops.cross_entropy_backward_(logits.clone(), targets, 100, logsumexp.float(), grad_loss), expected)]


def _adamw(dtype: torch.dtype, count: int, ops: GpuOps) -> list[Pair]:
    ours = [normal(count, seed=seed) for seed in range(4)]
    ours[3].abs_()
    wide = [x.double() for x in ours]
    weights = torch.empty(count, dtype=dtype)
    update = AdamWUpdate(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3, grad_scale=0.25)
    ops.adamw_(ours[0], ours[1], ours[2], ours[3], weights, update)
    reference.adamw_(wide[0], wide[1], wide[2], wide[3], wide[0], update)
    return [*((ours[index], wide[index]) for index in (0, 2, 3)), (weights, wide[0])]


def _sums(dtype: torch.dtype, count: int, ops: GpuOps) -> list[Pair]:
    main = normal(count)
    grad = normal(count, dtype=dtype, seed=1)
    expected = main.double() + grad.double()
    ops.accumulate_(main, grad)
    return [(main, expected), (ops.sum_of_squares(grad).float(), grad.double().square().sum())]


def _drop(dtype: torch.dtype, columns: int, ops: GpuOps) -> list[Pair]:
    x, residual = (normal(5, 2, columns, dtype=dtype, seed=seed) for seed in (0, 1))
    mask = Mask(0xFEDCBA9876543210, 1 << 14, torch.tensor([3, (5 << 32) + 7]), torch.arange(5) + 1000)
    return [
        (ops.drop(x, residual, mask), reference.drop(x.double(), residual.double(), mask)),
        (ops.drop(x, None, mask), reference.drop(x.double(), None, mask)),
    ]


def _embedding(dtype: torch.dtype, columns: int, ops: GpuOps) -> list[Pair]:
    ids = torch.tensor([[3, 7], [9, 3], [2, 7]])
    rows = normal(3, 2, columns, dtype=dtype)
    table = torch.zeros(5, columns)
    wide = torch.zeros(5, columns, dtype=torch.float64)
    ops.embedding_backward_(table, ids, rows, 3)
    reference.embedding_backward_(wide, ids, rows, 3)
    return [(table, wide)]


BEHIND = 200  # rows behind the last group, which are nobody's


def grouped_products(dtype: torch.dtype, ends: Tensor, inputs: int, outputs: int, ops: Any) -> list[Pair]:
    """Forward and input gradient over groups of rows that end at `ends`."""
    rows = int(ends[-1])
    groups = len(ends)
    x, grad = (normal(rows + BEHIND, columns, dtype=dtype) for columns in (inputs, outputs))
    weight = normal(groups, outputs, inputs, dtype=dtype)
    pairs = (
        (ops.grouped_linear(x, weight, ends), reference.grouped_linear(x.double(), weight.double(), ends)),
        (
            ops.grouped_input_gradient(grad, weight, ends),
            reference.grouped_input_gradient(grad.double(), weight.double(), ends),
        ),
    )
    return [(got[:rows], expected[:rows]) for got, expected in pairs]


def grouped_gradient(dtype: torch.dtype, ends: Tensor, inputs: int, outputs: int, ops: Any) -> list[Pair]:
    """The weights' gradient of the same, added to what is there."""
    rows = int(ends[-1]) + BEHIND
    main = normal(len(ends), outputs, inputs)
    x = normal(rows, inputs, dtype=dtype)
    grad = normal(rows, outputs, dtype=dtype)
    expected = main.double()
    reference.accumulate_grouped_gradient_(expected, grad.double(), x.double(), ends)
    ops.accumulate_grouped_gradient_(main, grad, x, ends)
    return [(main, expected)]


def gathered_rows(dtype: torch.dtype, columns: int, ops: Any) -> list[Pair]:
    """Rows of 7 in another order, sums of three and of none."""
    x = normal(7, columns, dtype=dtype)
    wide = normal(7, columns, dtype=dtype).double()
    one = torch.tensor([[6], [0], [-1], [3], [3]])
    three = torch.tensor([[0, 1, 6], [-1, 5, -1], [-1, -1, -1], [2, 2, 4]])
    return [(ops.gather_rows(x, places), reference.gather_rows(wide, places)) for places in (one, three)]


def routed(experts: int, routing: Routing, biased: bool, ops: Any) -> list[Pair]:
    """19 tokens, of which one likes all experts equally and some like two; choices count as numbers."""
    logits = 3 * normal(19, experts)
    logits[1], logits[2::3, experts // 2] = 0.25, logits[2::3, experts - 1]
    bias = 0.1 * normal(experts) if biased else None
    x = logits.clone().requires_grad_()
    wide = logits.double().requires_grad_()
    got = ops.route(x, bias, routing)
    expected = reference.route(wide, None if bias is None else bias.double(), routing)
    grads = [normal(*one.shape, seed=seed) for seed, one in enumerate(got[:2])]
    torch.autograd.backward(got[:2], grads)
    torch.autograd.backward(expected[:2], [grad.double() for grad in grads])
    assert x.grad is not None and wide.grad is not None
    return [*zip(got[:2], expected[:2], strict=True), (got[2].float(), expected[2].double()), (x.grad, wide.grad)]


def _attention(
    dtype: torch.dtype, sequence: int, heads: int, kv_heads: int, head_dim: int, kind: str, ops: GpuOps
) -> list[Pair]:
    q = normal(sequence, 1, heads, head_dim, dtype=dtype)
    k, v = (normal(sequence, 1, kv_heads, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    slopes = 2.0 ** -torch.arange(1, heads + 1) if kind else None
    documents = (torch.arange(sequence) // 50)[None] if kind else None
    softcap, window = (1.0, 30) if "soft cap" in kind else (0.0, 0)
    return against_reference(
        ops, "attention", (q, k, v), Scores(head_dim**-0.5, slopes, documents, window=window, softcap=softcap)
    )


def _attention_block(dtype: torch.dtype, keys: int, offset: int, head_dim: int, kind: str, ops: GpuOps) -> list[Pair]:
    """40 queries, which with documents see some or none of the keys, and a log-sum-exp over more keys in the
    backward.
    """
    q, grad, o = (normal(40, 1, 2, head_dim, dtype=dtype, seed=seed) for seed in (0, 3, 4))
    kv = normal(2, keys, 1, 1, head_dim, dtype=dtype, seed=1).unbind(0)
    scores = Scores(head_dim**-0.5, offset=offset)
    if kind:
        slopes = 2.0 ** -torch.arange(1, 3)
        of_queries = (torch.arange(40)[None] // 25) + 1
        of_keys = torch.arange(keys)[None] // 50
        softcap, window = (1.0, 30) if "soft cap" in kind else (0.0, 0)
        scores = Scores(head_dim**-0.5, slopes, of_queries, offset, of_keys, window, softcap)
    wide = [x.double() for x in (q, grad, o)]
    wide_kv = tuple(x.double() for x in kv)
    (out, logsumexp), (expected, exact) = (
        ops.attention_block(q, kv, scores),
        reference.attention_block(wide[0], wide_kv, scores),
    )
    over_more = (exact + 1.0).float()
    grads = ops.attention_block_backward(grad, q, kv, o, over_more, scores)
    wanted = reference.attention_block_backward(wide[1], wide[0], wide_kv, wide[2], over_more, scores)
    return [(out, expected), (logsumexp.exp().to(dtype), exact.exp()), *zip(grads, wanted, strict=True)]


def _routers() -> Iterator[Check]:
    """Each size in each convention."""
    for experts, top_k in ((16, 4), (13, 1), (256, 16), (100, 6), (512, 8), (1021, 8)):
        for sigmoid, normalise, biased in (
            (False, True, False),
            (False, False, False),
            (True, True, True),
            (True, False, True),
        ):
            kind = f"{'sigmoid' if sigmoid else 'softmax'}{', normalised' * normalise}{', biased' * biased}"
            run = partial(routed, experts, Routing(top_k, sigmoid, normalise, 2.5), biased)
            yield Check("route", f"19 x {top_k} of {experts}, {kind}", run, 32.0)


def cases(dtype: torch.dtype) -> Iterator[Check]:
    """Every op in every variant, first with sizes that are multiples of 16, then without; all code objects of a type
    are among them.
    """
    one = 32.0 if dtype is torch.float32 else 1.0  # fp32 results are sums of rounded numbers

    def case(op: str, shape: str, run: Callable[[GpuOps], list[Pair]], limit: float = one) -> Check:
        return Check(op, shape, run, limit)

    def compared(op: str, shape: str, inputs: Sequence[Tensor | None], *args: Any) -> Check:
        return case(op, shape, lambda ops: against_reference(ops, op, inputs, *args))

    def weighted(op: str, shape: str, x: Tensor, *args: Any) -> Iterator[Check]:
        weights = normal(len(x))
        yield case(op, f"{shape}, weighted", lambda ops: against_reference(ops, op, (x,), *args, weights=weights)[:-1])
        # the weights' gradient is a sum in fp32
        yield case(
            op, f"{shape}, weights", lambda ops: against_reference(ops, op, (x,), *args, weights=weights)[-1:], 32.0
        )

    for odd in (0, 3):
        for rows, columns in ((35, 80 - odd), (3, 2064 - odd), (3, 8208 - odd)):
            x = normal(rows, columns, dtype=dtype)
            weight = normal(columns, dtype=dtype)
            bias = normal(columns, dtype=dtype, seed=3)
            # multiples of 1/4: their sum is exact, so that the reference norms the same numbers
            whole, residual = ((normal(rows, columns, seed=seed) * 4).round().div(4).to(dtype) for seed in (0, 1))
            yield compared("rms_norm", f"{rows} x {columns}", (x, weight), 1e-5)
            yield compared(
                "add_norm", f"{rows} x {columns}, layernorm", (whole, residual, weight, bias), 1e-5, "layernorm"
            )
        for head_dim, half in ((80, 32), (128, 64), (256, 128)):
            angle = normal(5, half - odd)
            x = normal(5, 2, 3, head_dim - odd, dtype=dtype)
            yield compared("rope", f"5 x 2 x 3 x {head_dim - odd}, {half - odd} angles", (x,), angle.cos(), angle.sin())
            qkv = normal(5, 2, 2, 4, head_dim - odd, dtype=dtype)
            yield compared(
                "rotated_heads",
                f"5 x 2 x 2 x 4 x {head_dim - odd}, {half - odd} angles",
                (qkv,),
                angle.cos(),
                angle.sin(),
            )
        width = 1104 - odd
        yield compared("swiglu", f"3 x {width}", (2 * normal(3, 2, width, dtype=dtype),))
        yield from weighted("swiglu", f"3 x {width}", 2 * normal(3, 2, width, dtype=dtype))
        for approximate in (False, True):
            inputs = (2 * normal(35, width, dtype=dtype), normal(width, dtype=dtype))
            shape = f"35 x {width}{', tanh' * approximate}"
            yield compared("gelu", shape, inputs, approximate)
            yield from weighted("gelu", shape, inputs[0], None, approximate)
        yield case("gather_rows", f"7 x {width}", partial(gathered_rows, dtype, width))
        for columns in (80 - odd, 5008 - odd):
            yield case("cross_entropy", f"6 x {columns}", partial(_cross_entropy, 3 * normal(6, columns, dtype=dtype)))
        yield case("adamw", f"{1504 - odd}", partial(_adamw, dtype, 1504 - odd))
        yield case("accumulate, sum_of_squares", f"{66000 - odd}", partial(_sums, dtype, 66000 - odd))
        # a lane's features are an eighth of a row apart
        yield case("drop", f"5 x 2 x {2176 - odd}", partial(_drop, dtype, 2176 - odd))
        yield case("embedding", f"6 x {1040 - odd}", partial(_embedding, dtype, 1040 - odd))
    if dtype is torch.float32:
        yield from _routers()
    else:
        for odd in (0, 3):
            # groups of no, few and more rows than a block has; depth and width in whole blocks and in parts
            ends = torch.tensor((0, 5, 135, 135, 168), dtype=torch.int32)
            depth = 80 - odd
            width = 144 - odd
            shape = f"168 rows of 5 groups x {depth} x {width}"
            yield case(
                "grouped_linear, grouped_input_gradient", shape, partial(grouped_products, dtype, ends, depth, width)
            )
            # into fp32
            yield case("accumulate_grouped_gradient", shape, partial(grouped_gradient, dtype, ends, depth, width), 32.0)
        extras = "ALiBi, documents"
        bounded = "ALiBi, documents, soft cap, window"
        for sequence, heads, kv_heads, head_dim, kinds in (
            (131, 4, 2, 64, ("", extras)),
            (131, 2, 1, 64, (bounded,)),
            (70, 2, 1, 128, ("", extras)),
            (70, 1, 1, 80, ("", extras)),
            (40, 1, 1, 128, (bounded,)),
            (40, 1, 1, 256, ("", extras, bounded)),
        ):
            for kind in kinds:
                shape = f"{sequence} x {heads}/{kv_heads} x {head_dim}{', ' * bool(kind)}{kind}"
                # two products in a row, each of inputs rounded to the type
                yield case(
                    "attention", shape, partial(_attention, dtype, sequence, heads, kv_heads, head_dim, kind), 2.0
                )
        for keys, offset, head_dim, kind in (
            (70, 30, 128, ""),
            (70, 90, 64, ""),
            (70, 30, 64, extras),
            (70, 90, 64, bounded),
        ):
            shape = f"40 after {offset} x {keys} x 2/1 x {head_dim}{', ' * bool(kind)}{kind}"
            yield case("attention_block", shape, partial(_attention_block, dtype, keys, offset, head_dim, kind), 2.0)


def check(ops: GpuOps, device: str, dtypes: Sequence[str] = tuple(DTYPES)) -> Iterator[Result]:
    """Runs every case on a device, in these types; a case that raises is a result with a fault."""
    for name in dtypes:
        with torch.device(device):
            of_type = list(cases(DTYPES[name]))
        for case in of_type:
            try:
                with torch.device(device):
                    error = max(units(*pair) for pair in case.run(ops))
                yield Result(case.op, name, case.shape, error, case.limit)
            except FrontierError as problem:
                yield Result(case.op, name, case.shape, 0.0, case.limit, str(problem))
