"""Each op through the launcher against float64 on a machine with a GPU and prebuilt kernels, with the no-JIT guard on.

Skipped without a GPU. test_triton.py runs the same sources in Triton's interpreter.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from frontier_llm.errors import BackendError
from frontier_llm.ops import Scores, cases, reference, torch_linear
from frontier_llm.ops.cases import normal
from frontier_llm.ops.no_jit import allow_jit, forbid_jit
from frontier_llm.ops.providers import PROVIDERS
from tests.unit.ops.compare import Comparison

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

STEP = {torch.float32: 4e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6, torch.float64: 1e-5}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(scope="module")
def gpu():
    missing = PROVIDERS["triton"].missing()
    assert not missing, missing
    forbid_jit()
    yield SimpleNamespace(**PROVIDERS["triton"].load())
    allow_jit()


comparison = Comparison(STEP)
close = comparison.close


@pytest.fixture(autouse=True)
def on_the_gpu():
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("extras", [False, True])
def test_attention(gpu, dtype, dim, extras):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]) if extras else None
    documents = torch.tensor([[1] * 100 + [2] * 233, [3] * 333]) if extras else None
    scores = Scores(dim**-0.5, slopes, documents)
    comparison.case(gpu, cases.attention(dtype, 333, 2, 4, 2, dim, scores=scores))


@pytest.mark.parametrize("dtype", DTYPES)
# Unaligned and aligned widths: two block sizes, and rows longer than a block.
@pytest.mark.parametrize("columns", [1500, 2048, 8192, 8500, 9024])
def test_norms_and_pointwise_ops(gpu, dtype, columns):
    for case in (
        cases.rms_norm(dtype, 70, 3, columns),
        cases.layer_norm(dtype, 70, 3, columns, eps=1e-5),
        cases.add_norm(dtype, 70, 3, columns, kind="rmsnorm"),
        cases.rope(dtype, 9, 2, 3, 80, half=32),
        cases.rope(dtype, 9, 2, 3, 64, half=32),
        cases.swiglu(dtype, 3, 5, 2, columns),
    ):
        comparison.case(gpu, case)
    for approximate in (False, True):
        for bias in (True, False):
            comparison.case(gpu, cases.gelu(dtype, 70, columns, approximate=approximate, bias=bias, size=1.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [5000, 5008])
def test_cross_entropy(gpu, dtype, columns):
    comparison.case(gpu, cases.cross_entropy(dtype, columns))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "columns"), [(100_003, 1037), (100_000, 1040)])
def test_flat_buffers(gpu, dtype, count, columns):
    master, _, _, weights = comparison.case(gpu, cases.adamw(dtype, count))
    assert torch.equal(weights, master.to(dtype))
    main, grad = cases.accumulate(dtype, count).inputs
    expected = main + grad.float()
    gpu.accumulate_(main, grad)
    assert torch.equal(main, expected)
    comparison.case(gpu, cases.accumulate_rows(67, columns))
    assert gpu.sum_of_squares(grad).item() == pytest.approx(grad.double().square().sum().item(), rel=1e-6)
    ids = torch.randint(0, 50, (4, 500))
    rows = normal(4, 500, columns, dtype=dtype)
    tables = [torch.zeros(40, columns) for _ in range(2)]
    for table in tables:
        gpu.embedding_backward_(table, ids, rows, 5)
    assert torch.equal(*tables)  # no atomics: two runs are bitwise equal
    expected = torch.zeros(40, columns, dtype=torch.float64)
    reference.embedding_backward_(expected, ids, rows, 5)
    close(tables[0], expected)


def test_tensors_of_two_types_are_refused(gpu):
    with pytest.raises(BackendError, match=r"residual is torch\.float32"):
        x = normal(4, 64, dtype=torch.bfloat16)
        weight = normal(64, dtype=torch.bfloat16)
        gpu.add_norm(x, x.float(), weight, None, 1e-5, "rmsnorm")


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_gradient(gpu, dtype):
    main = torch.ones(70, 90)
    grad = normal(300, 70, dtype=dtype)
    x = normal(300, 90, dtype=dtype)
    PROVIDERS["torch"].load()["accumulate_weight_gradient_"](main, grad, x)
    # torch for ROCm before September 2025 rounds the product once.
    rounds = torch_linear.weight_gradient_method(dtype, main.device) == "rounded-product"
    tolerance = STEP[dtype] if rounds else 1e-3
    torch.testing.assert_close(main.double(), 1 + grad.double().t() @ x.double(), rtol=tolerance, atol=tolerance)
