"""Random shapes, layouts and masks for each GPU kernel, in the interpreter against float64.

test_triton.py has the fixed cases.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as some

pytest.importorskip("triton", reason="pip install --no-deps triton")

from frontier_llm.ops import Scores, cases, reference
from frontier_llm.ops.cases import normal
from tests.unit.ops.test_triton import close, compare, gpu

# shrinking an example would take minutes
EXAMPLES = settings(max_examples=6, derandomize=True, phases=[Phase.generate])
dtypes = some.sampled_from([torch.float32, torch.float16])


@some.composite
def attentions(draw):
    """A fused tensor [S, B, g, group + 2, D] and the options of its attention."""
    sequence = draw(
        some.one_of(some.integers(1, 20), some.integers(60, 70), some.integers(125, 133), some.integers(190, 200))
    )
    batch, kv_heads, group = (draw(some.integers(1, 3)) for _ in range(3))
    head_dim = 16 * draw(some.one_of(some.integers(1, 9), some.integers(1, 16)))
    slopes = normal(kv_heads * group).abs() if draw(some.booleans()) else None
    documents = None
    if draw(some.booleans()):  # documents of any length, whose ids may repeat
        documents = torch.tensor(
            draw(some.lists(some.integers(0, 3), min_size=batch * sequence, max_size=batch * sequence))
        )
        documents = documents.reshape(batch, sequence)
        if draw(some.booleans()):
            documents = documents.sort(dim=1).values
    scale = draw(some.sampled_from([head_dim**-0.5, 0.01, 1.0]))
    return normal(sequence, batch, kv_heads, group + 2, head_dim, dtype=torch.float16), Scores(scale, slopes, documents)


@EXAMPLES
@given(attentions())
@pytest.mark.thorough
def test_attention(case):
    fused, scores = case
    grads = []
    outputs = []
    for attend, x in ((gpu.attention, fused.clone()), (reference.attention, fused.double())):
        x.requires_grad_()
        q, k, v = x.split((x.shape[3] - 2, 1, 1), dim=3)
        outputs.append(attend(q.flatten(2, 3), k.squeeze(3), v.squeeze(3), scores))
        outputs[-1].backward(normal(*outputs[-1].shape, dtype=torch.float16, seed=5).to(x.dtype))
        grads.append(x.grad)
    close(*outputs, 2.0)
    close(*grads, 4.0)


@pytest.mark.thorough
@EXAMPLES
@given(
    dtypes,
    some.integers(1, 80),
    some.one_of(some.integers(2, 70), some.integers(2040, 2056), some.integers(8185, 8200)),
    some.booleans(),
)
def test_norms(dtype, rows, columns, has_bias):
    compare(cases.rms_norm(dtype, rows, columns, eps=1e-3), factor=2.0)
    compare(cases.layer_norm(dtype, rows, columns, eps=1e-1, bias=has_bias), factor=4.0)
    compare(cases.add_norm(dtype, rows, columns, eps=1e-1, bias=has_bias), factor=4.0)


@pytest.mark.thorough
@EXAMPLES
@given(
    dtypes,
    some.integers(1, 70),
    some.one_of(some.integers(1, 70), some.integers(1020, 1030)),
    some.booleans(),
    some.booleans(),
)
def test_activations(dtype, rows, columns, has_bias, approximate):
    compare(cases.swiglu(dtype, rows, 2, columns))
    compare(cases.gelu(dtype, rows, columns, approximate=approximate, bias=has_bias), factor=2.0)


@EXAMPLES
@given(
    dtypes,
    some.integers(1, 9),
    some.integers(1, 3),
    some.integers(1, 40),
    some.integers(1, 128),
    some.integers(0, 40),
    some.booleans(),
)
@pytest.mark.thorough
def test_rope(dtype, sequence, batch, heads, half, rest, per_sample):
    dim = 2 * half + rest
    compare(cases.rope(dtype, sequence, batch, heads, dim, half=half, per_sample=per_sample))
    shape = (sequence, batch, heads, 3 + (heads + rest) % 3, dim)
    compare(cases.rope(dtype, *shape, half=half, per_sample=per_sample, op="rotated_heads"))


@EXAMPLES
@given(
    dtypes,
    some.integers(1, 9),
    some.one_of(some.integers(1, 70), some.integers(4090, 4100)),
    some.integers(0, 8),
    some.integers(0, 200),
)
def test_cross_entropy(dtype, rows, columns, gap, first):
    logits = 3 * normal(rows, columns + gap, dtype=dtype)[:, :columns]
    targets = torch.arange(rows) * 31 % (columns + 9) + first - 4
    expected = reference.cross_entropy_stats(logits.double(), targets, first)
    close(gpu.cross_entropy_stats(logits, targets, first), expected)
    logsumexp = expected[0] + expected[1].log()
    grad_loss = normal(rows)
    wide = reference.cross_entropy_backward_(logits.double(), targets, first, logsumexp, grad_loss)
    close(gpu.cross_entropy_backward_(logits, targets, first, logsumexp.float(), grad_loss), wide)


@EXAMPLES
@given(
    dtypes,
    some.one_of(some.integers(1, 3000), some.sampled_from([65536, 65537, 131073])),
    some.integers(0, 3),
    some.data(),
)
def test_gradient_sums(dtype, count, offset, data):
    main = normal(count + offset)[offset:]
    grad = normal(count, dtype=dtype, seed=1)
    expected = main + grad.float()
    gpu.accumulate_(main, grad)
    assert torch.equal(main, expected)
    assert gpu.sum_of_squares(grad).item() == pytest.approx(grad.double().square().sum().item(), rel=1e-6)
    rows = data.draw(some.integers(1, 9))
    columns = data.draw(some.integers(1, 40))
    ids = torch.tensor(data.draw(some.lists(some.integers(0, 20), min_size=1, max_size=30)))
    tables = [torch.zeros(rows, columns) for _ in range(2)]
    gradients = normal(ids.numel(), columns, dtype=dtype)
    for table, op in zip(tables, (gpu.embedding_backward_, reference.embedding_backward_), strict=True):
        op(table, ids, gradients, 5)
    assert torch.equal(*tables)
