"""The Triton sources in the interpreter against the reference in float64: every kernel, odd shapes, forward and
backward.

The interpreter computes in the kernels' own types, so the tolerances are those of test_cpu.py. bf16 is checked by the
code objects' compilation only: numpy, which the interpreter runs on, has no bf16 products; fp16 stands for both.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="pip install --no-deps triton")

from frontier_llm.errors import BackendError
from frontier_llm.ops import AdamWUpdate, Mask, Routing, Scores, reference
from frontier_llm.ops.check import against_reference, gathered_rows, grouped_gradient, grouped_products, normal, routed
from frontier_llm.ops.gpu import GpuOps
from tests.harness.marks import but_first
from tests.unit.ops.interpreter import InterpretedKernels
from tests.unit.ops.stretches import compare_stretch

gpu = GpuOps(InterpretedKernels("gfx90a"))
DTYPES = [torch.float32, torch.float16]


def close(got, expected, factor=1.0):
    step = {torch.float32: 2e-5, torch.float16: 2**-9, torch.float64: 1e-6}[got.dtype]
    scale = expected.abs().max().item() or 1.0
    error = (got.double() - expected).abs().max().item()
    assert error <= factor * step * scale, f"{got.dtype}: error {error:.2e} of {scale:.2e}"


def compare(op_name, inputs, *args, factor=1.0, weights=None):
    """Outputs and input gradients of gpu.<op> equal those of reference.<op> on the same values in float64."""
    for got, expected in against_reference(gpu, op_name, inputs, *args, weights=weights):
        assert got.shape == expected.shape
        close(got, expected, factor)


@pytest.mark.parametrize(
    ("sequence", "batch", "heads", "kv_heads", "dim"),
    [(5, 1, 1, 1, 16), (131, 2, 4, 2, 32), (70, 1, 2, 1, 80), (129, 1, 1, 1, 64), (40, 1, 1, 1, 256)],
)
def test_attention(sequence, batch, heads, kv_heads, dim):
    q = normal(sequence, batch, heads, dim, dtype=torch.float16)
    k, v = (normal(sequence, batch, kv_heads, dim, dtype=torch.float16, seed=seed) for seed in (1, 2))
    compare("attention", (q, k, v), Scores(dim**-0.5), factor=2.0)


@pytest.mark.parametrize("extras", ["alibi", "documents", "both"])
def test_attention_with_alibi_and_documents(extras):
    q = normal(150, 2, 2, 16, dtype=torch.float16)
    k, v = (normal(150, 2, 1, 16, dtype=torch.float16, seed=seed) for seed in (1, 2))
    slopes = torch.tensor([0.5, 0.0625]) if extras != "documents" else None
    documents = (
        torch.stack([torch.tensor([5] * 40 + [1] * 60 + [9] * 50), torch.tensor([7] * 140 + [2] * 10)])
        if extras != "alibi"
        else None
    )
    compare("attention", (q, k, v), Scores(0.25, slopes, documents), factor=2.0)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # e^2x of tanh may be infinite
@pytest.mark.parametrize(("softcap", "window"), but_first([(30.0, 40), (0.5, 0), (1.0, 1)]))
def test_attention_of_bounded_scores_in_a_window(softcap, window):
    q = normal(150, 2, 2, 16, dtype=torch.float16)
    k, v = (normal(150, 2, 1, 16, dtype=torch.float16, seed=seed) for seed in (1, 2))
    documents = (torch.arange(300) // 70).view(2, 150)
    compare(
        "attention",
        (q, k, v),
        Scores(1.0, torch.tensor([0.5, 0.0625]), documents, window=window, softcap=softcap),
        factor=2.0,
    )
    compare("attention", (q, k, v), Scores(1.0, window=window, softcap=softcap), factor=2.0)


# all, some or none of the keys in sight; ends of both stretches within blocks
@pytest.mark.parametrize(
    ("queries", "keys", "offset"), [(70, 70, 0), (70, 140, 70), (33, 200, 300), (130, 65, 65), (140, 150, 7), (5, 3, 0)]
)
@pytest.mark.parametrize("kind", but_first(["documents, ALiBi, soft cap, window", "plain", "documents, ALiBi"]))
def test_attention_over_stretches_of_a_sequence(queries, keys, offset, kind):
    """The backward with a log-sum-exp over more keys than these. A row that sees none of them: output 0, log-sum-exp
    -infinite, no gradient.
    """
    q, grad, o = (normal(queries, 2, 4, 16, dtype=torch.float16, seed=seed) for seed in (0, 3, 4))
    k, v = normal(keys, 2, 2, 2, 16, dtype=torch.float16, seed=1).unbind(1)
    scores = Scores(0.25, offset=offset)
    if kind != "plain":
        of_queries, of_keys = (torch.arange(2 * count).reshape(2, count) // 40 for count in (queries, keys))
        softcap, window = (2.0, 90) if "window" in kind else (0.0, 0)
        scores = Scores(0.25, 2.0 ** -torch.arange(1, 5), of_queries, offset, of_keys, window, softcap)
    compare_stretch(gpu, q, (k, v), (o, grad), scores, close)


def test_keys_that_begin_after_the_queries_are_refused():
    q = normal(64, 1, 1, 16, dtype=torch.float16)
    with pytest.raises(BackendError, match="queries that begin 20 positions before the keys"):
        gpu.attention_block(q, (q, q), Scores(0.25, offset=-20))


@pytest.mark.parametrize(("inputs", "outputs"), [(80, 144), (33, 7)])
def test_products_over_groups(inputs, outputs):
    """Groups of no, few and more rows than a block has, the last ones at the end of a block and past it."""
    for ends in ([0, 5, 135, 135, 168], [128, 256, 256], [0, 0, 1]):
        for pairs in (grouped_products, grouped_gradient):
            for got, expected in pairs(torch.float16, torch.tensor(ends, dtype=torch.int32), inputs, outputs, gpu):
                close(got, expected)


def test_more_groups_than_are_looked_at_together():
    ends = torch.arange(0, 600, 2, dtype=torch.int32)
    x = normal(598, 16, dtype=torch.float16)
    weight = normal(300, 16, 16, dtype=torch.float16)
    close(gpu.grouped_linear(x, weight, ends), reference.grouped_linear(x.double(), weight.double(), ends))


def test_small_probabilities_outlive_products_that_flush_subnormals():
    """Most of a row of 1000 are subnormal in fp16, and the gradient of v sums them over the rows: 8.5e-4 wrong
    without the lift, 2.9e-4 with it.
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
    with pytest.raises(BackendError, match="multiple of 16"):
        gpu.attention(*normal(4, 1, 1, 3, 24).unbind(3), Scores(1.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 15, 77), (2, 2100), (2, 8200)])
def test_norms(dtype, shape):
    x = normal(*shape, dtype=dtype)
    weight = normal(shape[-1], dtype=dtype)
    bias = normal(shape[-1], dtype=dtype, seed=3)
    compare("rms_norm", (x, weight), 1e-5, factor=2.0)
    compare("layer_norm", (x, weight, bias), 1e-3, factor=2.0)
    compare("layer_norm", (x, weight, None), 1e-3, factor=2.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_add_norm(dtype, kind):
    x, residual = ((normal(70, 77, seed=s) * 4).round().div(4).to(dtype) for s in (0, 1))  # sums are exact
    bias = normal(77, dtype=dtype, seed=3) if kind == "layernorm" else None
    compare("add_norm", (x, residual, normal(77, dtype=dtype), bias), 1e-5, kind, factor=2.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize(("dim", "half"), but_first([(20, 5), (64, 32), (200, 40)]))
def test_rope(dtype, per_sample, dim, half):
    angle = normal(5, 2, half) if per_sample else normal(5, half)
    compare("rope", (normal(5, 2, 17, dim, dtype=dtype),), angle.cos(), angle.sin())
    for groups, members in ((1, 3), (5, 4)):
        compare("rotated_heads", (normal(5, 2, groups, members, dim, dtype=dtype),), angle.cos(), angle.sin())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 77, 1100])
def test_activations(dtype, width):
    compare("swiglu", (2 * normal(3, 2, width, dtype=dtype),))
    for approximate in (False, True):
        compare("gelu", (2 * normal(3, width, dtype=dtype), normal(width, dtype=dtype)), approximate)
        compare("gelu", (2 * normal(3, width, dtype=dtype), None), approximate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [77, 1100])
def test_rows_are_weighted_where_they_are_activated(dtype, width):
    """With one block of columns and with two, whose parts of a weight's gradient are summed."""
    compare("swiglu", (2 * normal(3, 2, width, dtype=dtype),), weights=normal(3))
    for approximate in (False, True):
        compare(
            "gelu", (2 * normal(70, width, dtype=dtype), normal(width, dtype=dtype)), approximate, weights=normal(70)
        )


@pytest.mark.parametrize(("experts", "top_k"), but_first([(16, 4), (100, 6), (13, 1), (256, 16)], 2))
@pytest.mark.parametrize(
    ("sigmoid", "normalise", "biased"),
    [(False, True, False), (False, False, True), (True, True, True), (True, False, False)],
)
def test_a_router_chooses_weighs_and_passes_gradients_back(experts, top_k, sigmoid, normalise, biased):
    *numbers, (chosen, expected) = [
        routed(experts, Routing(top_k, sigmoid, normalise, 2.5), biased, gpu)[place] for place in (0, 1, 3, 2)
    ]
    assert torch.equal(chosen.double(), expected)
    for pair in numbers:
        close(*pair)


def test_equal_experts_are_taken_in_their_order_and_what_is_no_number_last():
    logits = torch.tensor([[1.0, 2, 2, 1, 2], [0, 0, 0, 0, 0], [float("nan"), 1, float("nan"), 1, 2]])
    for ops in (gpu, reference):
        assert ops.route(logits, None, Routing(4))[2].tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [4, 1, 3, 0]]
        assert ops.route(logits, torch.tensor([0.0, 0, 0, 9, 0]), Routing(2))[2][:2].tolist() == [[3, 1], [3, 0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 1100])
def test_rows_are_gathered_and_summed(dtype, width):
    for got, expected in gathered_rows(dtype, width, gpu):
        close(got, expected)


@pytest.mark.parametrize("columns", [3, 77, 1100])
def test_dropout_draws_the_reference_s_masks(columns):
    mask = Mask(0xFEDCBA9876543210, 1 << 14, torch.tensor([3, (5 << 32) + 7]), torch.arange(5) + 1000)
    x, residual = (normal(5, 2, columns, seed=seed) for seed in (0, 1))
    close(gpu.drop(x, residual, mask), reference.drop(x.double(), residual.double(), mask))
    dropped = gpu.drop(x, None, mask)
    assert torch.equal(dropped == 0, reference.drop(x, None, mask) == 0) and 0.1 < (dropped == 0).float().mean() < 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [77, 5000])
def test_cross_entropy(dtype, columns):
    logits = 3 * normal(6, columns, dtype=dtype)
    targets = torch.tensor([100, 100 + columns - 1, 99, 100 + columns, -1, 100])
    expected = reference.cross_entropy_stats(logits.double(), targets, 100)
    close(gpu.cross_entropy_stats(logits, targets, 100), expected)
    logsumexp = expected[0] + expected[1].log()
    grad_loss = torch.tensor([1.0, 0.5, 0.25, 1, 0, 2])
    buffer = logits.clone()
    got = gpu.cross_entropy_backward_(buffer, targets, 100, logsumexp.float(), grad_loss)
    assert got.data_ptr() == buffer.data_ptr()
    close(got, reference.cross_entropy_backward_(logits.double(), targets, 100, logsumexp, grad_loss))


@pytest.mark.filterwarnings("ignore:invalid value")  # inf - inf, as it should be
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
    ours = [normal(1503, seed=seed) for seed in range(4)]
    ours[3].abs_()
    wide = [x.double() for x in ours]
    weights = torch.empty(1503, dtype=dtype)
    update = AdamWUpdate(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3, grad_scale=grad_scale)
    gpu.adamw_(*ours, weights, update)
    reference.adamw_(*wide, wide[0], update)
    for index in (0, 2, 3):
        close(ours[index], wide[index])
    assert torch.equal(weights, ours[0].to(dtype))
    gpu.adamw_(*ours, ours[0], update)
    assert ours[0].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_sums(dtype):
    main = normal(1503)
    grad = normal(1503, dtype=dtype, seed=1)
    expected = main + grad.float()
    gpu.accumulate_(main, grad)
    assert torch.equal(main, expected)
    assert gpu.sum_of_squares(grad).item() == pytest.approx(grad.double().square().sum().item(), rel=1e-6)
    table = torch.zeros(5, 1037)
    ids = torch.tensor([[3, 7], [9, 3], [2, 7]])
    rows = normal(3, 2, 1037, dtype=dtype)
    expected = torch.zeros(5, 1037)
    gpu.embedding_backward_(table, ids, rows, 3)
    reference.embedding_backward_(expected, ids, rows, 3)
    assert torch.equal(table, expected)


def test_an_embedding_sums_blocks_of_1024_tokens():
    """In one fp32 sum the ones would vanish beside 2^24; in blocks only those of the first block do."""
    tokens = 1 + 2048
    rows = torch.ones(tokens, 16)
    rows[0] = 2.0**24
    table = torch.zeros(1, 16)
    gpu.embedding_backward_(table, torch.zeros(tokens, dtype=torch.long), rows, 0)
    assert (table == 2.0**24 + 1024).all()
