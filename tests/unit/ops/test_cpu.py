"""The C++ ops against the reference in float64: each instruction set of this CPU, both dtypes, odd shapes, forward and
backward.

fp32 results have about ten roundings of sums over up to 300 terms (tolerance 2e-5 relative to the largest value).
Both computations use the same bf16 inputs, so they differ only by the rounding of the result (2^-8).
In attention the rounding of the probabilities adds another 2^-8.
"""

from __future__ import annotations

import pytest
import torch

from frontier_llm.libraries import BUILD_COMMAND
from frontier_llm.ops import AdamWUpdate, Mask, Routing, Scores, cases, native, reference
from frontier_llm.ops.cases import normal
from tests.unit.ops.compare import Comparison
from tests.unit.ops.stretches import compare_stretch

missing = native.load_cpu_library()
pytestmark = pytest.mark.skipif(bool(missing), reason=f"{missing}; build: {BUILD_COMMAND}")
if not missing:
    from frontier_llm.ops.cpu import CpuOps

    cpu = CpuOps()

DTYPES = [torch.float32, torch.bfloat16]
ISAS = ["generic", "avx2", "avx512", "avx512_bf16"]


@pytest.fixture(params=ISAS)
def isa(request):
    best = torch.ops.frontier_llm.instruction_set()
    if ISAS.index(request.param) > ISAS.index(best):
        pytest.skip(f"this CPU's best is {best}")
    torch.ops.frontier_llm.use_instruction_set(request.param)
    yield request.param
    torch.ops.frontier_llm.use_instruction_set(best)


comparison = Comparison({torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float64: 2e-5})
close = comparison.close


def compare(case, factor=1.0):
    return comparison.case(cpu, case, factor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 7, 64, 100])
def test_attention_in_a_window(isa, dtype, window):
    compare(cases.attention(dtype, 150, 2, 4, 2, 16, scores=Scores(0.25, window=window)), factor=2.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_attention_of_bounded_scores(isa, dtype, softcap):
    documents = (torch.arange(300) // 70).view(2, 150)
    for scores in (
        Scores(0.25, softcap=softcap),
        Scores(2.0, 2.0 ** -torch.arange(1, 5), documents, window=30, softcap=softcap),
    ):
        compare(cases.attention(dtype, 150, 2, 4, 2, 16, scores=scores), factor=2.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "offset"),
    [(70, 70, 0), (70, 140, 70), (33, 200, 300), (130, 65, 65), (64, 100, -20), (5, 3, 0)],
)
def test_stretches_of_a_sequence(isa, dtype, queries, keys, offset, extras):
    """Queries start `offset` positions after the first key and attend to all, some or none of the keys.

    The backward uses a log-sum-exp over more keys than the case has.
    """
    scores = Scores(0.25, offset=offset)
    if extras:
        of_queries, of_keys = (torch.arange(2 * count).reshape(2, count) // 40 for count in (queries, keys))
        scores = Scores(0.25, 2.0 ** -torch.arange(1, 5), of_queries, offset, of_keys, window=90, softcap=2.0)
    case = cases.attention_block(dtype, queries, keys, 2, heads=4, kv_heads=2, head_dim=16, scores=scores)
    compare_stretch(cpu, case, scores, close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sequence", "batch", "heads", "kv_heads", "dim"),
    [
        (1, 1, 1, 1, 8),
        (63, 2, 4, 2, 32),
        (65, 1, 6, 1, 40),
        (130, 2, 2, 2, 64),
        (97, 1, 2, 1, 128),
        (40, 1, 1, 1, 256),
        (33, 1, 2, 2, 7),
    ],
)
def test_attention(isa, dtype, sequence, batch, heads, kv_heads, dim):
    scores = Scores(dim**-0.5)
    compare(cases.attention(dtype, sequence, batch, heads, kv_heads, dim, scores=scores), factor=2.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extras", ["alibi", "documents", "both"])
def test_attention_with_alibi_and_documents(isa, dtype, extras):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]) if extras != "documents" else None
    # Document 9 starts after a block of keys that it does not attend to. Document ids are not sorted.
    documents = (
        torch.stack([torch.tensor([5] * 40 + [1] * 60 + [9] * 50), torch.tensor([7] * 140 + [2] * 10)])
        if extras != "alibi"
        else None
    )
    compare(cases.attention(dtype, 150, 2, 4, 2, 24, scores=Scores(0.2, slopes, documents)), factor=2.0)


def test_attention_reads_views_of_one_fused_tensor(isa):
    fused = normal(70, 2, 4, 3, 16, dtype=torch.float32)
    q, k, v = fused.unbind(3)
    close(cpu.attention(q, k, v, Scores(0.25)), reference.attention(q.double(), k.double(), v.double(), Scores(0.25)))
    last_dim_strided = fused.transpose(-1, -2).contiguous().transpose(-1, -2)
    close(
        cpu.attention(*last_dim_strided.unbind(3), Scores(0.25)),
        reference.attention(q.double(), k.double(), v.double(), Scores(0.25)),
    )


def test_attention_survives_huge_scores():
    q = 1e4 * torch.ones(70, 1, 1, 8)
    out = cpu.attention(q, q, torch.ones(70, 1, 1, 8), Scores(1.0))
    torch.testing.assert_close(out, torch.ones(70, 1, 1, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 9), (3, 5, 77), (4, 384), (2, 3, 129)])
def test_norms(isa, dtype, shape):
    compare(cases.rms_norm(dtype, *shape))
    for bias in (True, False):
        compare(cases.layer_norm(dtype, *shape, bias=bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_add_norm(isa, dtype, kind):
    compare(cases.add_norm(dtype, 3, 4, 77, kind=kind, bias=kind == "layernorm"))


def test_layer_norm_of_values_far_from_zero(isa):
    x = 1000 + normal(4, 4096, dtype=torch.float32)
    expected = reference.layer_norm(x.double(), torch.ones(4096).double(), None, 1e-5)
    # The spacing of the inputs at 1000 is 6e-5. A variance computed as E[x²] - mean² would be wrong by 0.1.
    torch.testing.assert_close(cpu.layer_norm(x, torch.ones(4096), None, 1e-5).double(), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize(("dim", "half"), [(64, 32), (20, 5), (7, 3)])
def test_rope(isa, dtype, per_sample, dim, half):
    shape = (9, 2, 3, dim)
    compare(cases.rope(dtype, *shape, half=half, per_sample=per_sample))
    compare(cases.rope(dtype, 9, 2, 3, 4, dim, half=half, per_sample=per_sample, op="rotated_heads"))
    cos, sin = cases.rotations(*shape, half=half, per_sample=per_sample)
    view = normal(9, 2, 3, 2, dim, dtype=dtype)[:, :, :, 1]
    close(cpu.rope(view, cos, sin), reference.rope(view.double(), cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 77, 300])
def test_activations(isa, dtype, width):
    compare(cases.swiglu(dtype, 3, 5, 2, width, size=4.0))
    for approximate in (False, True):
        for bias in (True, False):
            compare(cases.gelu(dtype, 3, 5, width, approximate=approximate, bias=bias, size=4.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 77])
def test_rows_are_weighted_where_they_are_activated(isa, dtype, width):
    compare(cases.swiglu(dtype, 3, 5, 2, width, weighted=True, size=4.0))
    for approximate in (False, True):
        compare(cases.gelu(dtype, 3, 5, width, approximate=approximate, weighted=True, size=4.0))
    with pytest.raises(RuntimeError, match="one for each of 15 rows"):
        cpu.swiglu(normal(15, 2, width, dtype=dtype), normal(5))


@pytest.mark.parametrize(("experts", "top_k"), [(16, 4), (13, 1), (100, 6), (256, 16), (1021, 8)])
@pytest.mark.parametrize(
    ("sigmoid", "normalise", "biased"),
    [(False, True, False), (False, False, True), (True, True, True), (True, False, False)],
)
def test_a_router_chooses_weighs_and_passes_gradients_back(isa, experts, top_k, sigmoid, normalise, biased):
    case = cases.route(experts, Routing(top_k, sigmoid, normalise, 2.5), biased=biased)
    pairs = case.pairs(cpu)
    chosen, expected = pairs.pop(2)
    assert torch.equal(chosen.double(), expected)
    for got, wanted in pairs:
        close(got, wanted)


def test_equal_experts_are_taken_in_their_order_and_what_is_no_number_last(isa):
    logits = torch.tensor([[1.0, 2, 2, 1, 2], [0, 0, 0, 0, 0], [float("nan"), 1, float("nan"), 1, 2]])
    for ops in (cpu, reference):
        assert ops.route(logits, None, Routing(4))[2].tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [4, 1, 3, 0]]
        assert ops.route(logits, torch.tensor([0.0, 0, 0, 9, 0]), Routing(2))[2][:2].tolist() == [[3, 1], [3, 0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 77])
def test_rows_are_gathered_and_summed(isa, dtype, width):
    for terms in (1, 3):
        compare(cases.gather_rows(dtype, width, terms=terms))
    x = normal(7, width, dtype=dtype)
    assert torch.equal(cpu.gather_rows(x, torch.arange(6, -1, -1)[:, None]), x.flip(0))  # rows are copied bit for bit
    assert not cpu.gather_rows(x[:0], torch.full((2, 3), -1)).any() and cpu.gather_rows(
        x, torch.empty(0, 4).long()
    ).shape == (0, width)
    with pytest.raises(RuntimeError, match="row 7 does not exist, because x has 7 rows"):
        cpu.gather_rows(x, torch.tensor([[7]]))


def test_activations_at_the_ends(isa):
    x = torch.tensor([-200.0, -90.0, 0.0, 90.0, 200.0])
    for approximate in (False, True):
        close(cpu.gelu(x, None, approximate), reference.gelu(x.double(), None, approximate))
    gate_up = torch.stack([x, torch.ones(5)])
    close(cpu.swiglu(gate_up), reference.swiglu(gate_up.double()))
    assert cpu.gelu(torch.tensor([float("nan")]), None, True).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 9, 77, 384, 2175])
def test_dropout_draws_the_reference_s_masks(isa, dtype, columns):
    case = cases.drop(dtype, 5, 2, columns, residual=False)
    assert torch.equal(*(case.outputs(ops, case.inputs)[0] for ops in (cpu, reference)))
    compare(cases.drop(dtype, 5, 2, columns))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 77, 512])
def test_cross_entropy(isa, dtype, columns):
    stats, gradient = compare(cases.cross_entropy(dtype, columns))
    assert stats.dtype == torch.float32 and gradient.dtype == dtype


def test_the_gradient_of_the_logits_takes_their_place(isa):
    logits = normal(2, 40)
    got = cpu.cross_entropy_backward_(logits, torch.tensor([0, 39]), 0, torch.ones(2), torch.ones(2))
    assert got.data_ptr() == logits.data_ptr()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_cross_entropy_hides_no_bad_logit(isa, bad):
    logits = normal(2, 40, dtype=torch.float32)
    logits[0, 37] = bad
    top, total, _ = cpu.cross_entropy_stats(logits, torch.tensor([0, 0]), 0)
    loss = top + total.log()
    assert loss[1].isfinite()
    assert loss[0].isfinite() == (bad == float("-inf"))


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_adamw(isa, weights_dtype):
    case = cases.adamw(weights_dtype, 1003, grad_scale=torch.tensor(0.25))
    pairs = case.pairs(cpu)
    master = pairs[0][0]
    weights = pairs[3][0]
    assert torch.equal(weights, master.to(weights_dtype))
    for got, expected in pairs[:3]:
        close(got, expected, 0.05)


def test_adamw_may_write_the_weights_over_the_master(isa):
    master, grad, exp_avg, exp_avg_sq, _ = cases.adamw(torch.float32, 1003).inputs
    update = AdamWUpdate(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)
    cpu.adamw_(master, grad, exp_avg, exp_avg_sq, master, update)
    assert master.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "o", "k"), [(1, 1, 1), (7, 33, 5), (300, 70, 129), (1030, 9, 65), (64, 130, 2050)])
def test_linear_and_its_gradients(isa, dtype, n, o, k):
    x = normal(n, k, dtype=dtype)
    weight = normal(o, k, dtype=dtype, seed=1)
    grad = normal(n, o, dtype=dtype, seed=2)
    main = normal(o, k, dtype=torch.float32)
    expected = main.double() + grad.double().t() @ x.double()
    cpu.accumulate_weight_gradient_(main, grad, x)
    close(main, expected)  # sums are in fp32 even for bf16 inputs
    out = torch.empty(n, o)
    torch.ops.frontier_llm.gemm(x, weight.t(), out, False)
    close(out, x.double() @ weight.double().t())
    close(cpu.linear_input_gradient(grad, weight), grad.double() @ weight.double())
    compare(cases.linear(dtype, n, o, k), factor=2.0)


@pytest.mark.parametrize(("n", "o", "k"), [(3, 33, 5), (300, 70, 129), (64, 130, 2050), (600, 9, 65)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_bf16_products_are_ours_without_bf16_instructions(isa, monkeypatch, n, o, k, with_bias):
    """The C++ kernels compute the forward product and both gradients. torch computes no product."""
    monkeypatch.setattr("frontier_llm.ops.cpu.has_bf16_instructions", lambda: False)
    monkeypatch.setattr("frontier_llm.ops.cpu.F.linear", None)
    ops = CpuOps()
    x, weight, grad = (normal(*shape, dtype=torch.bfloat16, seed=i) for i, shape in enumerate(((n, k), (o, k), (n, o))))
    bias = normal(o, dtype=torch.bfloat16, seed=3) if with_bias else None
    for each in (x, weight, bias):
        if each is not None:
            each.requires_grad_()
    y = ops.linear(x.view(1, n, k), weight, bias)
    y += 0  # the sum over tp is in place
    y.backward(grad.view(1, n, o))
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    close(y[0], exact)
    close(x.grad, grad.double() @ weight.double())
    close(weight.grad, grad.double().t() @ x.double())
    if bias is not None:
        close(bias.grad, grad.double().sum(0))


def test_weight_gradient_of_a_slice_of_a_wider_buffer(isa):
    main = torch.zeros(6, 50)[:, 5:45]
    x = normal(2, 9, 40, dtype=torch.bfloat16)
    grad = normal(2, 9, 6, dtype=torch.bfloat16)
    cpu.accumulate_weight_gradient_(main, grad, x)
    close(main, torch.einsum("bno,bnk->ok", grad.double(), x.double()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_sums(isa, dtype):
    main, grad = cases.accumulate(dtype, 1003).inputs
    expected = main + grad.float()
    cpu.accumulate_(main, grad)
    assert torch.equal(main, expected)
    compare(cases.accumulate_rows(67, 1003))
    assert cpu.sum_of_squares(grad).item() == pytest.approx(grad.double().square().sum().item(), rel=1e-13)
    compare(cases.embedding(dtype, 37))


MANY_ROWS = 1 << 20
# 2 x 1,024 roundings of at most 2^-24 each. A single fp32 sum of 2^20 equal rows is 0.95 % too small.
FP32_BLOCKED_SUM = 1e-4


def test_a_norm_sums_the_gradients_of_a_million_rows(isa):
    x = torch.tensor([1.0, -1.0]).repeat(MANY_ROWS, 8).requires_grad_()
    weight = torch.ones(16, requires_grad=True)
    bias = torch.zeros(16, requires_grad=True)
    cpu.layer_norm(x, weight, bias, 1e-12).backward(torch.full((MANY_ROWS, 16), 0.1))
    expected = MANY_ROWS * torch.tensor(0.1).double()
    close_to = {"rel": FP32_BLOCKED_SUM}
    assert bias.grad.tolist() == pytest.approx([expected.item()] * 16, **close_to)
    assert weight.grad.tolist() == pytest.approx([expected.item(), -expected.item()] * 8, **close_to)


def test_an_embedding_sums_the_gradients_of_a_million_tokens(isa):
    table = torch.zeros(3, 16)
    cpu.embedding_backward_(table, torch.full((MANY_ROWS,), 6), torch.full((MANY_ROWS, 16), 0.1), 5)
    expected = (MANY_ROWS * torch.tensor(0.1).double()).item()
    assert table[1].tolist() == pytest.approx([expected] * 16, rel=FP32_BLOCKED_SUM)
    assert not table[0].any() and not table[2].any()


def test_adamw_keeps_a_decay_that_is_smaller_than_half_an_ulp(isa):
    """After 500 updates with random gradients the mean weight has decayed as in float64, although fp32 rounds 1 - 2e-8
    to 1.
    """
    count = 1 << 16
    steps = 500
    ours = [torch.ones(count), torch.zeros(count), torch.zeros(count)]
    wide = [x.double() for x in ours]
    for step in range(1, steps + 1):
        update = AdamWUpdate(lr=2e-7, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step)
        gradient = normal(count, dtype=torch.float32, seed=step)
        cpu.adamw_(ours[0], gradient, ours[1], ours[2], ours[0], update)
        reference.adamw_(wide[0], gradient.double(), wide[1], wide[2], wide[0], update)
    decay = steps * 2e-8
    moved = (ours[0].double() - wide[0]).mean().item()
    assert abs(moved) < 0.1 * decay  # without weight decay the error would be the complete decay


def test_bf16_rounds_to_nearest_even_and_keeps_nan(isa):
    x = torch.tensor([1.0, 1.00390625, 1.01171875, -3.3895e38, float("nan"), 1e-20] * 5)
    weights = torch.empty(30, dtype=torch.bfloat16)
    zeros = torch.zeros(30)
    nothing = AdamWUpdate(lr=0.0, beta1=0.9, beta2=0.9, eps=1.0, weight_decay=0.0, step=1)
    cpu.adamw_(x.clone(), zeros, zeros.clone(), zeros.clone(), weights, nothing)
    assert torch.equal(weights.nan_to_num(7.0), x.bfloat16().nan_to_num(7.0))
    infinite = torch.full((1, 35), float("inf"), dtype=torch.bfloat16)
    _, total = cpu.add_norm(infinite, infinite, infinite, None, 1e-5, "rmsnorm")
    assert torch.equal(total, infinite)


def test_wrong_shapes_and_types_are_refused():
    with pytest.raises(RuntimeError, match="fp32 and bf16"):
        cpu.swiglu(torch.ones(2, 2).half())
    with pytest.raises(RuntimeError, match="multiple"):
        cpu.attention(torch.ones(2, 1, 3, 8), torch.ones(2, 1, 2, 8), torch.ones(2, 1, 2, 8), Scores(1.0))
    with pytest.raises(RuntimeError, match="weight has 3 elements"):
        cpu.rms_norm(torch.ones(2, 4), torch.ones(3), 1e-5)
    with pytest.raises(RuntimeError, match="drop expects"):
        cpu.drop(torch.ones(2, 3, 4), None, Mask(1, 1, torch.arange(2), torch.arange(2)))
    with pytest.raises(RuntimeError, match="cannot run"):
        torch.ops.frontier_llm.use_instruction_set("avx1024")
    assert torch.ops.frontier_llm.instruction_set() in ISAS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(40, 72), (7, 33)])
def test_products_over_groups(isa, dtype, inputs, outputs):
    """The groups have no rows, few rows or many rows. The largest group has one part of 512 rows and a remainder."""
    ends = torch.tensor([0, 5, 605, 605, 640], dtype=torch.int32)
    for make in (cases.grouped_linear, cases.grouped_gradient):
        compare(make(dtype, ends, inputs, outputs))


def test_ends_that_fall_are_past_the_rows_or_too_few_are_refused():
    x = torch.ones(6, 4)
    weight = torch.ones(2, 3, 4)
    for ends in ([7, 6], [2, 7], [6], [4, 2]):
        with pytest.raises(RuntimeError, match=r"ends of groups|one int32 per group"):
            cpu.grouped_linear(x, weight, torch.tensor(ends, dtype=torch.int32))
    assert cpu.grouped_linear(x[:0], weight, torch.zeros(2, dtype=torch.int32)).shape == (0, 3)
