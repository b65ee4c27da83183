"""The reference against independent formulas that are written out by hand, and its gradients against finite
differences.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from frontier_llm.ops import AdamWUpdate, Scores, reference, sdpa

torch.manual_seed(0)


def normal(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def attention_by_loops(q, k, v, scale, slopes=None, documents=None):
    out = torch.zeros_like(q)
    sequence, batch, heads, _ = q.shape
    group = heads // k.shape[2]
    for b in range(batch):
        for h in range(heads):
            for i in range(sequence):
                seen = [j for j in range(i + 1) if documents is None or documents[b, i] == documents[b, j]]
                scores = torch.stack([scale * (q[i, b, h] @ k[j, b, h // group]) for j in seen])
                if slopes is not None:
                    scores = scores - slopes[h] * torch.tensor([float(i - j) for j in seen], dtype=scores.dtype)
                out[i, b, h] = sum(p * v[j, b, h // group] for p, j in zip(torch.softmax(scores, 0), seen, strict=True))
    return out


@pytest.mark.parametrize("implementation", [reference.attention, sdpa.attention])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("extras", ["none", "alibi", "documents", "both"])
def test_attention_equals_the_formula(implementation, kv_heads, extras):
    q = normal(5, 2, 4, 3)
    k = normal(5, 2, kv_heads, 3)
    v = normal(5, 2, kv_heads, 3)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]) if extras in ("alibi", "both") else None
    documents = torch.tensor([[0, 0, 1, 1, 1], [3, 3, 3, 3, 4]]) if extras in ("documents", "both") else None
    got = implementation(q, k, v, Scores(0.6, slopes, documents))
    torch.testing.assert_close(got, attention_by_loops(q, k, v, 0.6, slopes, documents))
    assert gradcheck(lambda *qkv: implementation(*qkv, Scores(0.6, slopes, documents)), (q, k, v))


@pytest.mark.parametrize("extras", ["none", "alibi", "documents", "both"])
def test_stretches_of_keys_merge_to_the_whole(extras):
    """Queries 3..7 of a sequence of 8 attend to keys 0..1, 2..4 and 5..7.

    Outputs merge by their log-sum-exp, and gradients add up.
    """
    q = normal(8, 2, 4, 3)
    k = normal(8, 2, 2, 3)
    v = normal(8, 2, 2, 3)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]) if extras in ("alibi", "both") else None
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2], [3] * 8]) if extras in ("documents", "both") else None
    whole = reference.attention(q, k, v, Scores(0.6, slopes, documents))[3:]
    grad = normal(*whole.shape, grad=False)
    expected = torch.autograd.grad(whole, (q, k, v), grad)

    def scores(first: int, last: int) -> Scores:
        ids = (None, None) if documents is None else (documents[:, 3:], documents[:, first:last])
        return Scores(0.6, slopes, ids[0], offset=3 - first, key_documents_BK=ids[1])

    stretches = [(0, 2), (2, 5), (5, 8)]
    blocks = [reference.attention_block(q[3:], (k[a:b], v[a:b]), scores(a, b)) for a, b in stretches]
    logsumexp = torch.stack([one for _, one in blocks]).logsumexp(0)
    out = sum(o * (one - logsumexp).exp().permute(2, 0, 1)[..., None] for o, one in blocks)
    torch.testing.assert_close(out, whole.detach())
    assert all(torch.isfinite(o).all() for o, _ in blocks)
    found = [torch.zeros_like(x) for x in (q, k, v)]
    for a, b in stretches:
        parts = reference.attention_block_backward(grad, q[3:], (k[a:b], v[a:b]), out, logsumexp, scores(a, b))
        for total, part, rows in zip(found, parts, (slice(3, 8), slice(a, b), slice(a, b)), strict=True):
            total[rows] += part
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_attention_takes_views_of_one_fused_tensor():
    fused = normal(4, 2, 3, 5, 8, grad=False)
    q, k, v = fused.unbind(2)
    torch.testing.assert_close(
        reference.attention(q, k, v, Scores(1.0)),
        attention_by_loops(q.contiguous(), k.contiguous(), v.contiguous(), 1.0),
    )


def test_norms_equal_the_formula_and_their_gradients_are_right():
    x = normal(3, 2, 7)
    residual = normal(3, 2, 7)
    weight = normal(7)
    bias = normal(7)
    rms = x / torch.sqrt((x * x).sum(-1, keepdim=True) / 7 + 1e-3) * weight
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-3), rms)
    centred = x - x.mean(-1, keepdim=True)
    layer = centred / torch.sqrt((centred**2).sum(-1, keepdim=True) / 7 + 1e-3) * weight + bias
    torch.testing.assert_close(reference.layer_norm(x, weight, bias, 1e-3), layer)
    for kind, norm_bias in (("rmsnorm", None), ("layernorm", bias), ("layernorm", None)):
        normed, total = reference.add_norm(x, residual, weight, norm_bias, 1e-3, kind)
        torch.testing.assert_close(total, x + residual)
        expected = (
            reference.rms_norm(total, weight, 1e-3)
            if kind == "rmsnorm"
            else reference.layer_norm(total, weight, norm_bias, 1e-3)
        )
        torch.testing.assert_close(normed, expected)
        assert gradcheck(
            lambda a, b, w, k=kind, n=norm_bias: reference.add_norm(a, b, w, n, 1e-3, k), (x, residual, weight)
        )


def test_norm_statistics_are_fp32_in_bf16():
    x = (1000 + torch.randn(4, 4096)).bfloat16()
    got = reference.layer_norm(x, torch.ones(4096).bfloat16(), None, 1e-5)
    torch.testing.assert_close(
        got.double(), reference.layer_norm(x.double(), torch.ones(4096).double(), None, 1e-5), atol=0.02, rtol=0.01
    )


@pytest.mark.parametrize("per_sample", [False, True])
def test_rope_rotates_pairs_and_keeps_the_rest(per_sample):
    x = normal(5, 2, 3, 8)
    angle = normal(5, 2, 3, grad=False) if per_sample else normal(5, 3, grad=False)
    got = reference.rope(x, angle.cos(), angle.sin())
    wide = angle[:, :, None] if per_sample else angle[:, None, None]
    turned = torch.complex(x[..., :3], x[..., 3:6]) * torch.polar(torch.ones_like(wide), wide)
    torch.testing.assert_close(got, torch.cat([turned.real, turned.imag, x[..., 6:]], -1))
    assert gradcheck(lambda y: reference.rope(y, angle.cos(), angle.sin()), (x,))


def test_activations_equal_the_formula():
    x = normal(3, 2, 5)
    bias = normal(5)
    gate = x[:, 0]
    up = x[:, 1]
    torch.testing.assert_close(reference.swiglu(x), gate / (1 + torch.exp(-gate)) * up)
    shifted = x + bias
    torch.testing.assert_close(reference.gelu(x, bias, False), shifted * 0.5 * (1 + torch.erf(shifted / math.sqrt(2))))
    tanh = 0.5 * shifted * (1 + torch.tanh(math.sqrt(2 / math.pi) * (shifted + 0.044715 * shifted**3)))
    torch.testing.assert_close(reference.gelu(x, bias, True), tanh)
    torch.testing.assert_close(reference.gelu(x, None, True), F.gelu(x, approximate="tanh"))


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_cross_entropy_pieces_make_the_loss_and_its_gradient(shards):
    logits = normal(6, 12)
    targets = torch.tensor([0, 3, 11, 4, 8, -1])
    weight = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    expected = F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
    (expected * weight).sum().backward()
    parts = [part.clone() for part in logits.detach().chunk(shards, dim=1)]
    stats = [reference.cross_entropy_stats(part, targets, rank * 12 // shards) for rank, part in enumerate(parts)]
    top = torch.stack([s[0] for s in stats]).amax(0)
    logsumexp = top + torch.log(sum(s[1] * torch.exp(s[0] - top) for s in stats))
    loss = logsumexp - sum(s[2] for s in stats)
    torch.testing.assert_close(loss[:5], expected[:5])
    grads = [
        reference.cross_entropy_backward_(p, targets, r * 12 // shards, logsumexp, weight) for r, p in enumerate(parts)
    ]
    assert grads[0] is parts[0]
    torch.testing.assert_close(torch.cat(grads, 1), logits.grad)


@pytest.mark.parametrize("grad_scale", [0.25, torch.tensor(0.25)])
def test_adamw_equals_torch(grad_scale):
    weights = normal(33)
    theirs = weights.detach().clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    master = weights.detach().clone()
    low = torch.empty(33, dtype=torch.bfloat16)
    exp_avg = torch.zeros(33, dtype=torch.float64)
    exp_avg_sq = torch.zeros(33, dtype=torch.float64)
    for step in range(1, 4):
        grad = normal(33, grad=False)
        theirs.grad = grad * 0.25
        optimizer.step()
        update = AdamWUpdate(
            lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step, grad_scale=grad_scale
        )
        reference.adamw_(master, grad, exp_avg, exp_avg_sq, low, update)
    torch.testing.assert_close(master, theirs.detach(), rtol=1e-12, atol=1e-14)
    assert torch.equal(low, master.bfloat16())


def test_gradient_sums():
    main = torch.ones(3, 4)
    grad_output = torch.randn(2, 5, 3).bfloat16()
    x = torch.randn(2, 5, 4).bfloat16()
    reference.accumulate_weight_gradient_(main, grad_output, x)
    torch.testing.assert_close(main, 1 + torch.einsum("bno,bnk->ok", grad_output.float(), x.float()))
    reference.accumulate_(main, torch.full((3, 4), 2.0).bfloat16())
    torch.testing.assert_close(main, 3 + torch.einsum("bno,bnk->ok", grad_output.float(), x.float()))
    table = torch.zeros(4, 2)
    reference.embedding_backward_(table, torch.tensor([[7, 3], [4, 7]]), torch.arange(8.0).reshape(2, 2, 2), 4)
    torch.testing.assert_close(table, torch.tensor([[4.0, 5.0], [0, 0], [0, 0], [6.0, 8.0]]))
    values = torch.randn(1000, dtype=torch.float32)
    assert reference.sum_of_squares(values).item() == pytest.approx(values.double().square().sum().item(), rel=1e-12)
