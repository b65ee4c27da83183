"""Attention over ranges of a sequence with torch's flash kernels.

These tests execute the CPU kernels. For the GPU kernels they check only the call.
"""

from __future__ import annotations

import pytest
import torch

from frontier_llm.errors import BackendError
from frontier_llm.ops import Scores, reference, sdpa
from frontier_llm.ops.cases import normal

# Shapes of a rank's first chunk, a later chunk with all keys before it, a block of the ring before the queries, and one
# token.
SHAPES = [(70, 70, 0), (70, 210, 140), (33, 40, 60), (1, 1, 0)]


@pytest.mark.parametrize(("queries", "keys", "offset"), SHAPES)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-9), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_blocks_equal_the_reference(queries, keys, offset, dtype, close):
    """Compares forward and backward. The backward uses output and log-sum-exp over more keys than the case has.

    Inputs are views of fused tensors with grouped queries.
    """
    q, o, grad = normal(3, queries, 2, 4, 16, dtype=dtype).unbind(0)
    kv = normal(keys, 2, 2, 2, 16, dtype=dtype, seed=1).unbind(1)
    scores = Scores(0.25, offset=offset)
    wide_kv = tuple(x.double() for x in kv)
    out, logsumexp = sdpa.attention_block(q, kv, scores)
    expected, exact = reference.attention_block(q.double(), wide_kv, scores)
    assert out.dtype == dtype and logsumexp.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(logsumexp.double(), exact, rtol=0, atol=min(close, 1e-3))
    over_more = exact + 1.0
    grads = sdpa.attention_block_backward(grad, q, kv, o, over_more.to(logsumexp.dtype), scores)
    wanted = reference.attention_block_backward(grad.double(), q.double(), wide_kv, o.double(), over_more, scores)
    for got, true in zip((out, *grads), (expected, *wanted), strict=True):
        assert got.dtype == dtype and got.shape == true.shape
        torch.testing.assert_close(got.double(), true, rtol=0, atol=close * true.abs().max().item())


def test_the_gpu_kernels_are_called_as_this_torch_declares_them():
    """The meta device checks shapes and the declarations of the kernels, and computes nothing."""
    with torch.device("meta"):
        q = torch.empty(70, 2, 4, 16, dtype=torch.bfloat16)
        kv = torch.empty(210, 2, 4, 2, 16, dtype=torch.bfloat16).unbind(3)
    out, logsumexp = sdpa.attention_block(q, kv, Scores(0.25, offset=140))
    assert (out.shape, out.dtype, logsumexp.shape) == (q.shape, q.dtype, (2, 4, 70))
    grads = sdpa.attention_block_backward(out, q, kv, out, logsumexp, Scores(0.25, offset=140))
    assert [grad.shape for grad in grads] == [q.shape, *(x.shape for x in kv)]


@pytest.mark.parametrize(("queries", "keys", "offset"), [(70, 140, 20), (64, 100, -20), (70, 70, 10)])
def test_other_stretches_are_refused(queries, keys, offset):
    q = normal(queries, 1, 2, 16)
    k = normal(keys, 1, 2, 16)
    with pytest.raises(BackendError, match=f"{queries} queries from position {offset} attend to {keys} keys"):
        sdpa.attention_block(q, (k, k), Scores(0.25, offset=offset))


def test_a_gpu_that_gives_logarithms_to_another_base_is_noticed(monkeypatch):
    ask = sdpa.blocks_missing.__wrapped__
    assert ask("cpu") == ""
    honest = sdpa.attention_block
    monkeypatch.setattr(sdpa, "attention_block", lambda *args: (None, honest(*args)[1] / torch.log(torch.tensor(2.0))))
    assert ask("cpu") == "torch's flash attention computes 1.0000 instead of 0.6931 as the log-sum-exp of two zeros"
