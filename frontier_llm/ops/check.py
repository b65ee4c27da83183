"""Compares every GPU op with the reference in float64, at small odd shapes, on a GPU or a simulator of a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from frontier_llm.errors import FrontierError
from frontier_llm.ops import cases as catalogue
from frontier_llm.ops.cases import Case
from frontier_llm.ops.gpu import GpuOps
from frontier_llm.ops.reference import Scores
from frontier_llm.ops.routing import Routing

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Error limits in units in the last place (ULP). One rounding is half a unit. The limit for fp32 results is larger,
# because they are sums of rounded numbers.
FP32_LIMIT = 32.0
ROUNDED_LIMIT = 1.0
# Attention has two consecutive matrix products, and the inputs of both are rounded.
ATTENTION_LIMIT = 2.0
EXTRAS = "ALiBi, documents"
BOUNDED = "ALiBi, documents, soft cap, window"


@dataclass(frozen=True)
class Check:
    """A case with its error limit, in units in the last place of the largest element.

    `part` selects the outputs and gradients of the case to which the limit applies.
    """

    case: Case
    limit: float
    part: slice = field(default_factory=lambda: slice(None))


@dataclass(frozen=True)
class Result:
    """Result of a case: the largest error in units in the last place, or an error message (`fault`)."""

    op: str
    dtype: str
    shape: str
    error: float
    limit: float
    fault: str = ""

    @property
    def ok(self) -> bool:
        """True if the error is within the limit and no exception was raised."""
        return not self.fault and self.error <= self.limit


def units(got: Tensor, expected: Tensor) -> float:
    """Return the largest error, in units in the last place of the largest element; infinite for NaN."""
    error = (got.double() - expected.double()).abs().max().item()
    scale = expected.abs().max().item() or 1.0
    return error / scale / torch.finfo(got.dtype).eps if error == error else float("inf")


def checks(dtype: torch.dtype) -> Iterator[Check]:
    """Yield a check for every op and variant, first with sizes that are multiples of 16, then with other sizes.

    Together the checks use all code objects of the dtype.
    """
    limit = FP32_LIMIT if dtype is torch.float32 else ROUNDED_LIMIT
    for odd in (0, 3):
        for case in _pointwise(dtype, odd):
            yield Check(case, limit)
        for case in _weighted(dtype, 1104 - odd):
            yield Check(case, limit, slice(0, -1))
            # The gradient of the row weights is a sum in fp32, so it has the limit for fp32.
            yield Check(case, FP32_LIMIT, slice(-1, None))
        yield Check(catalogue.accumulate_rows(67, 2064 - odd), FP32_LIMIT)  # the result is a sum in fp32
    if dtype is torch.float32:
        for case in _routers():
            yield Check(case, FP32_LIMIT)
        return
    for odd in (0, 3):
        # The groups of rows are empty, small, or larger than a block. The inputs and outputs of the products are not
        # multiples of a block, so that complete and partial blocks are tested.
        ends = torch.tensor((0, 5, 135, 135, 168), dtype=torch.int32)
        yield Check(catalogue.grouped_linear(dtype, ends, 80 - odd, 144 - odd), limit)
        yield Check(catalogue.grouped_gradient(dtype, ends, 80 - odd, 144 - odd), FP32_LIMIT)
    for case in _attentions(dtype):
        yield Check(case, ATTENTION_LIMIT)


def _pointwise(dtype: torch.dtype, odd: int) -> Iterator[Case]:
    """Yield cases of memory-bound ops. Each size is reduced by `odd`."""
    for rows, columns in ((35, 80 - odd), (3, 2064 - odd), (3, 4112 - odd), (3, 8208 - odd)):
        yield catalogue.rms_norm(dtype, rows, columns)
        yield catalogue.add_norm(dtype, rows, columns, kind="layernorm", bias=True)
    for head_dim, half in ((80, 32), (128, 64), (256, 128)):
        yield catalogue.rope(dtype, 5, 2, 3, head_dim - odd, half=half - odd)
        yield catalogue.rope(dtype, 5, 2, 2, 4, head_dim - odd, half=half - odd, op="rotated_heads")
    width = 1104 - odd
    yield catalogue.swiglu(dtype, 3, 2, width)
    for approximate in (False, True):
        yield catalogue.gelu(dtype, 35, width, approximate=approximate)
    for terms in (1, 3):
        yield catalogue.gather_rows(dtype, width, terms=terms)
    for columns in (80 - odd, 5008 - odd):
        yield catalogue.cross_entropy(dtype, columns)
    yield catalogue.adamw(dtype, 1504 - odd)
    yield catalogue.accumulate(dtype, 66000 - odd)
    yield catalogue.sum_of_squares(dtype, 66000 - odd)
    for residual in (True, False):
        # In this kernel a lane processes eight features that are an eighth of a row apart, so the test needs long rows.
        yield catalogue.drop(dtype, 5, 2, 2176 - odd, residual=residual)
    yield catalogue.embedding(dtype, 1040 - odd)


def _weighted(dtype: torch.dtype, width: int) -> Iterator[Case]:
    yield catalogue.swiglu(dtype, 3, 2, width, weighted=True)
    for approximate in (False, True):
        yield catalogue.gelu(dtype, 35, width, approximate=approximate, bias=False, weighted=True)


def _routers() -> Iterator[Case]:
    """Yield router cases: each number of experts, combined with each option for scores and weights."""
    for experts, top_k in ((16, 4), (13, 1), (256, 16), (100, 6), (512, 8), (1021, 8)):
        for sigmoid, normalise, biased in (
            (False, True, False),
            (False, False, False),
            (True, True, True),
            (True, False, True),
        ):
            yield catalogue.route(experts, Routing(top_k, sigmoid, normalise, 2.5), biased=biased)


def _attentions(dtype: torch.dtype) -> Iterator[Case]:
    for sequence, heads, kv_heads, head_dim, kinds in (
        (131, 4, 2, 64, ("", EXTRAS)),
        (131, 2, 1, 64, (BOUNDED,)),
        (70, 2, 1, 128, ("", EXTRAS)),
        (70, 1, 1, 80, ("", EXTRAS)),
        (40, 1, 1, 128, (BOUNDED,)),
        (40, 1, 1, 256, ("", EXTRAS, BOUNDED)),
    ):
        for kind in kinds:
            scores = _scores(kind, heads, head_dim, torch.arange(sequence)[None] // 50)
            yield catalogue.attention(
                dtype,
                sequence=sequence,
                batch=1,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                scores=scores,
                kind=kind,
            )
    # Attention of 40 queries to a range of 70 keys. With document boundaries, a query sees some of the keys or none.
    for keys, offset, head_dim, kind in (
        (70, 30, 128, ""),
        (70, 90, 64, ""),
        (70, 30, 64, EXTRAS),
        (70, 90, 64, BOUNDED),
    ):
        of_queries = torch.arange(40)[None] // 25 + 1
        of_keys = torch.arange(keys)[None] // 50
        scores = _scores(kind, 2, head_dim, of_queries, key_documents=of_keys, offset=offset)
        yield catalogue.attention_block(
            dtype,
            queries=40,
            keys=keys,
            batch=1,
            heads=2,
            kv_heads=1,
            head_dim=head_dim,
            scores=scores,
            kind=kind,
        )


def _scores(
    kind: str, heads: int, head_dim: int, documents: Tensor, key_documents: Tensor | None = None, offset: int = 0
) -> Scores:
    """Return the `Scores` for a kind: '', EXTRAS or BOUNDED."""
    if not kind:
        return Scores(head_dim**-0.5, offset=offset)
    return Scores(
        head_dim**-0.5,
        2.0 ** -torch.arange(1, heads + 1),
        documents,
        offset=offset,
        key_documents_BK=key_documents,
        window=30 if kind == BOUNDED else 0,
        softcap=1.0 if kind == BOUNDED else 0.0,
    )


def check(ops: GpuOps, device: str, dtypes: Sequence[str] = tuple(DTYPES)) -> Iterator[Result]:
    """Run every case on a device, in these types. A case that raises FrontierError gives a result with a fault."""
    for dtype in dtypes:
        with torch.device(device):
            of_type = list(checks(DTYPES[dtype]))
        for one in of_type:
            case = one.case
            try:
                with torch.device(device):
                    error = max(units(*pair) for pair in case.pairs(ops)[one.part])
                yield Result(case.op, dtype, case.shape, error, one.limit)
            except FrontierError as problem:
                yield Result(case.op, dtype, case.shape, error=0.0, limit=one.limit, fault=str(problem))
