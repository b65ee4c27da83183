"""On a machine with a GPU and prebuilt kernels: every op through the launcher against float64, with the no-JIT guard
on.

Skipped elsewhere; the same sources run in Triton's interpreter in test_triton.py.
"""

from __future__ import annotations

import pytest
import torch

from frontier_llm.errors import BackendError
from frontier_llm.ops import AdamWUpdate, Scores, reference, torch_linear
from frontier_llm.ops.no_jit import allow_jit, forbid_jit
from frontier_llm.ops.providers import PROVIDERS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

STEP = {torch.float32: 4e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6, torch.float64: 1e-5}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(scope="module")
def gpu():
    missing = PROVIDERS["triton"].missing()
    assert not missing, missing
    forbid_jit()
    yield PROVIDERS["triton"].load()
    allow_jit()


def normal(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype).cuda()


def close(got, expected):
    scale = expected.abs().max().item() or 1.0
    error = (got.double() - expected).abs().max().item()
    assert error <= STEP[got.dtype] * scale, f"{got.dtype}: error {error:.2e} of {scale:.2e}"


def compare(gpu, name, inputs, *args, **kwargs):
    ours = [None if x is None else x.clone().requires_grad_() for x in inputs]
    wide = [None if x is None else x.double().requires_grad_() for x in inputs]
    got = gpu[name](*ours, *args, **kwargs)
    expected = getattr(reference, name)(*wide, *args, **kwargs)
    got, expected = (x if isinstance(x, tuple) else (x,) for x in (got, expected))
    grads = [torch.randn_like(x) for x in got]
    torch.autograd.backward(got, grads)
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    for a, b in zip(
        (*got, *(x.grad for x in ours if x is not None)),
        (*expected, *(x.grad for x in wide if x is not None)),
        strict=True,
    ):
        close(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("extras", [False, True])
def test_attention(gpu, dtype, dim, extras):
    q = normal(333, 2, 4, dim, dtype=dtype)
    k, v = (normal(333, 2, 2, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]).cuda() if extras else None
    documents = torch.tensor([[1] * 100 + [2] * 233, [3] * 333]).cuda() if extras else None
    compare(gpu, "attention", (q, k, v), Scores(dim**-0.5, slopes, documents))


@pytest.mark.parametrize("dtype", DTYPES)
# unaligned and aligned; in one block, in two sizes of it; longer
@pytest.mark.parametrize("columns", [1500, 2048, 8192, 8500, 9024])
def test_norms_and_pointwise_ops(gpu, dtype, columns):
    x = normal(70, 3, columns, dtype=dtype)
    weight = normal(columns, dtype=dtype)
    bias = normal(columns, dtype=dtype, seed=3)
    compare(gpu, "rms_norm", (x, weight), 1e-5)
    compare(gpu, "layer_norm", (x, weight, bias), 1e-5)
    whole = ((x.float() * 4).round() / 4).to(dtype)  # sums are exact
    compare(gpu, "add_norm", (whole, whole.flip(0), weight, None), 1e-5, "rmsnorm")
    angle = normal(9, 32, dtype=torch.float32)
    compare(gpu, "rope", (normal(9, 2, 3, 80, dtype=dtype),), angle.cos(), angle.sin())
    compare(gpu, "rope", (normal(9, 2, 3, 64, dtype=dtype),), angle.cos(), angle.sin())
    compare(gpu, "swiglu", (normal(3, 5, 2, columns, dtype=dtype),))
    for approximate in (False, True):
        compare(gpu, "gelu", (normal(70, columns, dtype=dtype), bias), approximate)
        compare(gpu, "gelu", (normal(70, columns, dtype=dtype), None), approximate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [5000, 5008])
def test_cross_entropy(gpu, dtype, columns):
    logits = normal(6, columns, dtype=dtype)
    targets = torch.tensor([100, 99 + columns, 99, 100 + columns, -1, 100]).cuda()
    expected = reference.cross_entropy_stats(logits.double(), targets, 100)
    close(gpu["cross_entropy_stats"](logits, targets, 100), expected)
    logsumexp = expected[0] + expected[1].log()
    grad_loss = torch.ones(6).cuda()
    wide = reference.cross_entropy_backward_(logits.double(), targets, 100, logsumexp, grad_loss)
    close(gpu["cross_entropy_backward_"](logits, targets, 100, logsumexp.float(), grad_loss), wide)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "columns"), [(100_003, 1037), (100_000, 1040)])
def test_flat_buffers(gpu, dtype, count, columns):
    ours = [normal(count, dtype=torch.float32, seed=seed) for seed in range(4)]
    ours[3].abs_()
    wide = [x.double() for x in ours]
    weights = torch.empty(count, dtype=dtype, device="cuda")
    update = AdamWUpdate(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3, grad_scale=0.25)
    gpu["adamw_"](*ours, weights, update)
    reference.adamw_(*wide, wide[0], update)
    for index in (0, 2, 3):
        close(ours[index], wide[index])
    assert torch.equal(weights, ours[0].to(dtype))
    main = ours[0].clone()
    grad = normal(count, dtype=dtype)
    gpu["accumulate_"](main, grad)
    assert torch.equal(main, ours[0] + grad.float())
    assert gpu["sum_of_squares"](grad).item() == pytest.approx(grad.double().square().sum().item(), rel=1e-6)
    ids = torch.randint(0, 50, (4, 500)).cuda()
    rows = normal(4, 500, columns, dtype=dtype)
    tables = [torch.zeros(40, columns, device="cuda") for _ in range(2)]
    for table in tables:
        gpu["embedding_backward_"](table, ids, rows, 5)
    assert torch.equal(*tables)  # no atomics: two runs are bitwise equal
    expected = torch.zeros(40, columns, dtype=torch.float64, device="cuda")
    reference.embedding_backward_(expected, ids, rows, 5)
    close(tables[0], expected)


def test_tensors_of_two_types_are_refused(gpu):
    with pytest.raises(BackendError, match=r"residual is torch\.float32"):
        x = normal(4, 64, dtype=torch.bfloat16)
        weight = normal(64, dtype=torch.bfloat16)
        gpu["add_norm"](x, x.float(), weight, None, 1e-5, "rmsnorm")


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_gradient(gpu, dtype):
    main = torch.ones(70, 90, device="cuda")
    grad = normal(300, 70, dtype=dtype)
    x = normal(300, 90, dtype=dtype)
    PROVIDERS["torch"].load()["accumulate_weight_gradient_"](main, grad, x)
    # torch for ROCm before September 2025 rounds the product once
    rounds = dtype != torch.float32 and torch_linear._way(dtype, main.device) is torch_linear._rounded_product
    tolerance = STEP[dtype] if rounds else 1e-3
    torch.testing.assert_close(main.double(), 1 + grad.double().t() @ x.double(), rtol=tolerance, atol=tolerance)
