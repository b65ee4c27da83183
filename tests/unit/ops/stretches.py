"""Compares attention over a range of keys of a sequence with the reference in float64, for any back-end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from frontier_llm.ops import Scores, reference
from frontier_llm.ops.cases import Case


def compare_stretch(ops: Any, case: Case, scores: Scores, close: Callable[..., None]) -> None:
    """Compare a case of `attention_block`, including its log-sum-exp.

    The backward uses a log-sum-exp over more keys than the case has.
    A row that attends to no key has output 0, log-sum-exp -infinity and no gradient.
    """
    q, k, v, grad, o = case.inputs
    wide_q, wide_k, wide_v, wide_grad, wide_o = (x.double() for x in case.inputs if x is not None)
    out, logsumexp = ops.attention_block(q, (k, v), scores)
    expected, exact = reference.attention_block(wide_q, (wide_k, wide_v), scores)
    close(out, expected, 2.0)
    assert torch.equal(logsumexp == -torch.inf, exact == -torch.inf)
    torch.testing.assert_close(logsumexp.double(), exact, rtol=1e-5, atol=1e-5)
    over_more = exact + 1.0
    grads = ops.attention_block_backward(grad, q, (k, v), o, over_more.float(), scores)
    wanted = reference.attention_block_backward(wide_grad, wide_q, (wide_k, wide_v), wide_o, over_more, scores)
    for got, true in zip(grads, wanted, strict=True):
        close(got, true, 4.0)
