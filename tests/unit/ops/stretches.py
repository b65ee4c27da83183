"""Attention over stretches of a sequence, against the reference in float64, whichever back-end has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from frontier_llm.ops import Scores, reference


def compare_stretch(
    ops: Any,
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    backward: tuple[Tensor, Tensor],
    scores: Scores,
    close: Callable[..., None],
) -> None:
    """`backward` are the output and its gradient, with a log-sum-exp over more keys than these. A row that sees no
    key: output 0, log-sum-exp -infinite, no gradient.
    """
    (o, grad), wide, wide_kv = backward, [x.double() for x in (q, *backward)], tuple(x.double() for x in kv)
    (out, logsumexp), (expected, exact) = (
        ops.attention_block(q, kv, scores),
        reference.attention_block(wide[0], wide_kv, scores),
    )
    close(out, expected, 2.0)
    assert torch.equal(logsumexp == -torch.inf, exact == -torch.inf)
    torch.testing.assert_close(logsumexp.double(), exact, rtol=1e-5, atol=1e-5)
    over_more = exact + 1.0
    grads = ops.attention_block_backward(grad, q, kv, o, over_more.float(), scores)
    wanted = reference.attention_block_backward(wide[2], wide[0], wide_kv, wide[1], over_more, scores)
    for got, true in zip(grads, wanted, strict=True):
        close(got, true, 4.0)
