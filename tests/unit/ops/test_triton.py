"""The Triton sources in the interpreter against the reference in float64: each kernel, odd shapes, forward and
backward.

The interpreter computes in the kernels' own dtypes, so that the tolerances of test_cpu.py apply. The interpreter runs
on numpy, which has no bf16 products. The bf16 kernels are therefore only compiled, and fp16 stands for both 16-bit
types.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="pip install --no-deps triton")

from frontier_llm.errors import BackendError
from frontier_llm.ops import Routing, Scores, cases, reference
from frontier_llm.ops.cases import normal
from frontier_llm.ops.gpu import GpuOps
from tests.harness.marks import but_first
from tests.unit.ops.compare import Comparison
from tests.unit.ops.interpreter import InterpretedKernels
from tests.unit.ops.stretches import compare_stretch

gpu = GpuOps(InterpretedKernels("gfx90a"))
DTYPES = [torch.float32, torch.float16]


comparison = Comparison({torch.float32: 2e-5, torch.float16: 2**-9, torch.float64: 1e-6})
close = comparison.close


def compare(case, factor=1.0):
    return comparison.case(gpu, case, factor)


@pytest.mark.parametrize(
    ("sequence", "batch", "heads", "kv_heads", "dim"),
    [(5, 1, 1, 1, 16), (131, 2, 4, 2, 32), (70, 1, 2, 1, 80), (129, 1, 1, 1, 64), (40, 1, 1, 1, 256)],
)
def test_attention(sequence, batch, heads, kv_heads, dim):
    scores = Scores(dim**-0.5)
    compare(cases.attention(torch.float16, sequence, batch, heads, kv_heads, dim, scores=scores), factor=2.0)


@pytest.mark.parametrize("extras", ["alibi", "documents", "both"])
def test_attention_with_alibi_and_documents(extras):
    slopes = torch.tensor([0.5, 0.0625]) if extras != "documents" else None
    documents = (
        torch.stack([torch.tensor([5] * 40 + [1] * 60 + [9] * 50), torch.tensor([7] * 140 + [2] * 10)])
        if extras != "alibi"
        else None
    )
    scores = Scores(0.25, slopes, documents)
    compare(cases.attention(torch.float16, 150, 2, 2, 1, 16, scores=scores), factor=2.0)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # e^2x in tanh may be infinite
@pytest.mark.parametrize(("softcap", "window"), but_first([(30.0, 40), (0.5, 0), (1.0, 1)]))
def test_attention_of_bounded_scores_in_a_window(softcap, window):
    documents = (torch.arange(300) // 70).view(2, 150)
    for scores in (
        Scores(1.0, torch.tensor([0.5, 0.0625]), documents, window=window, softcap=softcap),
        Scores(1.0, window=window, softcap=softcap),
    ):
        compare(cases.attention(torch.float16, 150, 2, 2, 1, 16, scores=scores), factor=2.0)


# Queries attend to all, some or none of the keys. Both ranges end within blocks.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("queries", "keys", "offset"), [(70, 70, 0), (70, 140, 70), (33, 200, 300), (130, 65, 65), (140, 150, 7), (5, 3, 0)]
)
@pytest.mark.parametrize(
    "kind", but_first(["documents, ALiBi, soft cap, window", "plain", "documents, ALiBi"], in_ci=1)
)
def test_attention_over_stretches_of_a_sequence(queries, keys, offset, kind):
    """The backward uses a log-sum-exp over more keys than the case has.

    A row that attends to no key has output 0, log-sum-exp -infinity and no gradient.
    """
    scores = Scores(0.25, offset=offset)
    if kind != "plain":
        of_queries, of_keys = (torch.arange(2 * count).reshape(2, count) // 40 for count in (queries, keys))
        softcap, window = (2.0, 90) if "window" in kind else (0.0, 0)
        scores = Scores(0.25, 2.0 ** -torch.arange(1, 5), of_queries, offset, of_keys, window, softcap)
    case = cases.attention_block(torch.float16, queries, keys, 2, heads=4, kv_heads=2, head_dim=16, scores=scores)
    compare_stretch(gpu, case, scores, close)


def test_keys_that_begin_after_the_queries_are_refused():
    q = normal(64, 1, 1, 16, dtype=torch.float16)
    with pytest.raises(BackendError, match="the queries begin 20 positions before the keys"):
        gpu.attention_block(q, (q, q), Scores(0.25, offset=-20))


@pytest.mark.parametrize(("inputs", "outputs"), [(80, 144), (33, 7)])
def test_products_over_groups(inputs, outputs):
    """The groups have no rows, few rows, and more rows than a block.

    The last groups end at the end of a block or after it.
    """
    for ends in ([0, 5, 135, 135, 168], [128, 256, 256], [0, 0, 1]):
        for make in (cases.grouped_linear, cases.grouped_gradient):
            compare(make(torch.float16, torch.tensor(ends, dtype=torch.int32), inputs, outputs))


@pytest.mark.thorough
def test_more_groups_than_are_looked_at_together():
    ends = torch.arange(0, 600, 2, dtype=torch.int32)
    x = normal(598, 16, dtype=torch.float16)
    weight = normal(300, 16, 16, dtype=torch.float16)
    close(gpu.grouped_linear(x, weight, ends), reference.grouped_linear(x.double(), weight.double(), ends))


@pytest.mark.thorough
def test_small_probabilities_outlive_products_that_flush_subnormals():
    """Most probabilities of a row of 1000 are subnormal in fp16, and the gradient of v sums them over the rows.

    The kernels scale them by 2^14. The error is 8.5e-4 without this factor and 2.9e-4 with it.
    """
    q, k = (normal(1000, 1, 1, 16, dtype=torch.float16, seed=seed) for seed in (0, 1))
    v, grad = (normal(1000, 1, 1, 16, dtype=torch.float16, seed=seed).requires_grad_() for seed in (2, 3))
    gpu.attention(q, k, v, Scores(0.25)).backward(grad)
    wide = v.detach().double().requires_grad_()
    reference.attention(q.double(), k.double(), wide, Scores(0.25)).backward(grad.double())
    error = (v.grad.double() - wide.grad).norm() / wide.grad.norm()
    assert error < 4e-4


def test_attention_reads_views_and_copies_what_it_cannot_read():
    fused = normal(33, 2, 2, 3, 16, dtype=torch.float16)
    for q, k, v in (fused.unbind(3), fused.transpose(-1, -2).contiguous().transpose(-1, -2).unbind(3)):
        close(
            gpu.attention(q, k, v, Scores(0.25)),
            reference.attention(q.double(), k.double(), v.double(), Scores(0.25)),
            2.0,
        )
    with pytest.raises(BackendError, match="head dim 264 is not supported"):
        gpu.attention(*normal(4, 1, 1, 3, 264, dtype=torch.float16).unbind(3), Scores(1.0))


@pytest.mark.thorough
@pytest.mark.parametrize("head_dim", [24, 40])
def test_attention_pads_a_head_dim_that_is_no_multiple_of_16(head_dim):
    """The model gpt-1t has 128 heads of 200."""
    compare(cases.attention(torch.float16, 70, 2, 4, 2, head_dim, scores=Scores(head_dim**-0.5)), factor=2.0)
    scores = Scores(head_dim**-0.5, offset=70)
    case = cases.attention_block(torch.float16, 70, 140, 2, heads=4, kv_heads=2, head_dim=head_dim, scores=scores)
    compare_stretch(gpu, case, scores, close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 15, 77), (2, 2100), (2, 8200)])
def test_norms(dtype, shape):
    compare(cases.rms_norm(dtype, *shape), factor=2.0)
    for bias in (True, False):
        compare(cases.layer_norm(dtype, *shape, bias=bias), factor=2.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_add_norm(dtype, kind):
    compare(cases.add_norm(dtype, 70, 77, kind=kind, bias=kind == "layernorm"), factor=2.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize(("dim", "half"), but_first([(20, 5), (64, 32), (200, 40)]))
def test_rope(dtype, per_sample, dim, half):
    compare(cases.rope(dtype, 5, 2, 17, dim, half=half, per_sample=per_sample))
    for groups, members in ((1, 3), (5, 4)):
        shape = (5, 2, groups, members, dim)
        compare(cases.rope(dtype, *shape, half=half, per_sample=per_sample, op="rotated_heads"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 77, 1100])
def test_activations(dtype, width):
    compare(cases.swiglu(dtype, 3, 2, width))
    for approximate in (False, True):
        for bias in (True, False):
            compare(cases.gelu(dtype, 3, width, approximate=approximate, bias=bias))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [77, 1100])
def test_rows_are_weighted_where_they_are_activated(dtype, width):
    """Tests one block of columns, and two whose parts of a weight's gradient are summed."""
    compare(cases.swiglu(dtype, 3, 2, width, weighted=True))
    for approximate in (False, True):
        compare(cases.gelu(dtype, 70, width, approximate=approximate, weighted=True))


@pytest.mark.parametrize(("experts", "top_k"), but_first([(16, 4), (100, 6), (13, 1), (256, 16)], 2))
@pytest.mark.parametrize(
    ("sigmoid", "normalise", "biased"),
    [(False, True, False), (False, False, True), (True, True, True), (True, False, False)],
)
def test_a_router_chooses_weighs_and_passes_gradients_back(experts, top_k, sigmoid, normalise, biased):
    case = cases.route(experts, Routing(top_k, sigmoid, normalise, 2.5), biased=biased)
    pairs = case.pairs(gpu)
    chosen, expected = pairs.pop(2)
    assert torch.equal(chosen.double(), expected)
    for got, wanted in pairs:
        close(got, wanted)


def test_equal_experts_are_taken_in_their_order_and_what_is_no_number_last():
    logits = torch.tensor([[1.0, 2, 2, 1, 2], [0, 0, 0, 0, 0], [float("nan"), 1, float("nan"), 1, 2]])
    for ops in (gpu, reference):
        assert ops.route(logits, None, Routing(4))[2].tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [4, 1, 3, 0]]
        assert ops.route(logits, torch.tensor([0.0, 0, 0, 9, 0]), Routing(2))[2][:2].tolist() == [[3, 1], [3, 0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 1100])
def test_rows_are_gathered_and_summed(dtype, width):
    for terms in (1, 3):
        compare(cases.gather_rows(dtype, width, terms=terms))


@pytest.mark.parametrize("columns", [3, 77, 1100])
def test_dropout_draws_the_reference_s_masks(columns):
    compare(cases.drop(torch.float32, 5, 2, columns))
    case = cases.drop(torch.float32, 5, 2, columns, residual=False)
    kept, expected = (case.outputs(ops, case.inputs)[0] != 0 for ops in (gpu, reference))
    assert torch.equal(kept, expected) and 0.5 < kept.float().mean() < 0.9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [77, 5000])
def test_cross_entropy(dtype, columns):
    compare(cases.cross_entropy(dtype, columns))


@pytest.mark.filterwarnings("ignore:invalid value")  # inf - inf is expected
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("column", [3, 4500])
def test_cross_entropy_hides_no_bad_logit(bad, column):
    logits = normal(2, 5000)
    logits[0, column] = bad
    top, total, _ = gpu.cross_entropy_stats(logits, torch.tensor([0, 0]), 0)
    loss = top + total.log()
    assert loss[1].isfinite() and not loss[0].isfinite()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad_scale", [0.25, torch.tensor(0.25)])
def test_adamw(dtype, grad_scale):
    master, _, _, weights = compare(cases.adamw(dtype, 1503, grad_scale=grad_scale))
    assert torch.equal(weights, master.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_sums(dtype):
    main, grad = cases.accumulate(dtype, 1503).inputs
    expected = main + grad.float()
    gpu.accumulate_(main, grad)
    assert torch.equal(main, expected)
    compare(cases.accumulate_rows(67, 1037))
    assert gpu.sum_of_squares(grad).item() == pytest.approx(grad.double().square().sum().item(), rel=1e-6)
    compare(cases.embedding(dtype, 1037))


@pytest.mark.thorough
def test_an_embedding_sums_blocks_of_1024_tokens():
    """In fp32 2^24 + 1 is 2^24, so a single sum would lose every 1.0.

    With blocks of 1,024 tokens, only the 1,023 values of the first block and the one value of the last block are lost.
    """
    tokens = 1 + 2048
    rows = torch.ones(tokens, 16)
    rows[0] = 2.0**24
    table = torch.zeros(1, 16)
    gpu.embedding_backward_(table, torch.zeros(tokens, dtype=torch.long), rows, 0)
    assert (table == 2.0**24 + 1024).all()
