"""The oracle: GPT, Llama, MPT and NeoX written from their formulas, serially, in float64, one head at a time.

The oracle is the reference of the parity tests. It imports nothing of the package, and shares no code, no layout
technique and no kernel with it. Oracle and package use the same names and global shapes of parameters. Vp is the
vocabulary padded to vocab_multiple, G the number of key/value heads, A the number of query heads, and D the head dim:

    embedding.token.weight (Vp, H)
    embedding.position.weight (S, H)
    layers.i.attention.qkv.weight (G, A/G + 2, D, H): queries of the group, key, value
    layers.i.attention.output.weight (H, A D)
    layers.i.attention_norm.weight (H)
    layers.i.mlp.up.weight (2, F, H) = gate, up for SwiGLU, else (F, H)
    layers.i.mlp.down.weight (H, F)
    layers.i.mlp_norm.weight (H)
    layers.i.attention_output_norm.weight (H), layers.i.mlp_output_norm.weight (H): norms of block outputs, if present
    final_norm.weight (H)
    head.weight (Vp, H), absent if embeddings are tied

Each of them has a `.bias` if the configuration has biases: (G, A/G + 2, D), (2, F) or (F), else (H).

Sources: Vaswani et al. 2017 and Radford et al. 2019 (GPT-2), Zhang & Sennrich 2019 (RMSNorm), Su et al. 2021 (RoPE, in
the rotate-half pairing of GPT-NeoX; Dubey et al. 2024 for Llama 3.1's slower rotations), Press et al. 2022 (ALiBi),
Shazeer 2020 (SwiGLU, GeGLU), Gemma team 2024 (soft caps), Ainslie et al. 2023 (grouped queries).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.oracle import dropout, moe
from tests.oracle.optimizers import Direction

Params = Mapping[str, Tensor]
Config = Mapping[str, Any]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b."""
    y = x @ weight.T
    return y if bias is None else y + bias


def _norm(x: Tensor, params: Params, name: str, config: Config) -> Tensor:
    """Apply LayerNorm or RMSNorm over the last dim. Without a norm of this name, return x unchanged."""
    if f"{name}.weight" not in params:
        return x
    if config["norm"] == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    scaled = x / (x.pow(2).mean(-1, keepdim=True) + config["norm_eps"]).sqrt() * _gain(params[f"{name}.weight"], config)
    return scaled + params[f"{name}.bias"] if f"{name}.bias" in params else scaled


def _gain(weight: Tensor, config: Config) -> Tensor:
    """Return the factor of a norm. Gemma's weights are added to 1."""
    return 1 + weight if config.get("norm_plus_one") else weight


def _bounded(x: Tensor, cap: float | None) -> Tensor:
    """Apply Gemma 2's soft cap."""
    return x if cap is None else cap * torch.tanh(x / cap)


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def _gelu_tanh(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def alibi_slopes(heads: int, max_bias: float) -> list[float]:
    """Return the slopes of the ALiBi paper. For a power of two they are a geometric series. Otherwise they are the
    series of the nearest lower power, then every other slope of the next power.
    """
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-max_bias * (i + 1) / power) for i in range(power)]
    between = [2 ** (-max_bias * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)]
    return (slopes + between)[:heads]


def _slowed(frequency: float, scaling: Mapping[str, float]) -> float:
    """Return the frequency under Llama 3.1's scaling. It is divided by `factor` if its wavelength exceeds the original
    context over `low`. It is unchanged if its wavelength is shorter than the original context over `high`.
    """
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    context = scaling["original_sequence_length"]
    wave = 2 * math.pi / frequency
    if wave > context / low:
        return frequency / scaling["factor"]
    if wave < context / high:
        return frequency
    smooth = (context / wave - low) / (high - low)
    return (1 - smooth) * frequency / scaling["factor"] + smooth * frequency


def _stretched(frequency: float, j: int, rotating: int, config: Config) -> float:
    """Return the frequency of rotation j under the scaling's kind."""
    scaling = config["rope_scaling"]
    kind = scaling.get("kind", "llama3")
    factor = scaling["factor"]
    theta = config["rope_theta"]
    if kind == "linear":
        return frequency / factor
    if kind == "ntk":
        return (theta * factor ** (rotating / (rotating - 2))) ** (-2 * j / rotating)
    if kind == "yarn":
        low, high = (
            rotating * math.log(scaling["original_sequence_length"] / (beta * 2 * math.pi)) / (2 * math.log(theta))
            for beta in (scaling["beta_fast"], scaling["beta_slow"])
        )
        low = max(math.floor(low), 0)
        high = min(math.ceil(high), rotating - 1)
        ramp = min(max((j - low) / max(high - low, 0.001), 0), 1)
        return frequency / factor * ramp + frequency * (1 - ramp)
    return _slowed(frequency, scaling)


def _rotate(x_SD: Tensor, positions: list[int], config: Config) -> Tensor:
    """Apply RoPE to the first R = `rope_fraction` D dims. Dim j is paired with dim j + R / 2, and the angle is position
    * theta^(-2 j / R).
    """
    rotating = int(x_SD.shape[-1] * config["rope_fraction"])
    half = rotating // 2
    columns = list(x_SD.unbind(-1))
    scaling = config.get("rope_scaling") or {}
    amplitude = 0.1 * math.log(scaling["factor"]) + 1 if scaling.get("kind") == "yarn" else 1.0
    for j in range(half):
        frequency = config["rope_theta"] ** (-2 * j / rotating)
        if config.get("rope_scaling"):
            frequency = _stretched(frequency, j, rotating, config)
        angle = torch.tensor([position * frequency for position in positions], dtype=x_SD.dtype)
        first = x_SD[:, j]
        second = x_SD[:, j + half]
        columns[j] = amplitude * (first * angle.cos() - second * angle.sin())
        columns[j + half] = amplitude * (second * angle.cos() + first * angle.sin())
    return torch.stack(columns, -1)


def _attention(
    x_SH: Tensor, params: Params, name: str, config: Config, documents: list[int], positions: list[int]
) -> Tensor:
    """Compute causal attention of one sequence within its documents, one head after the other."""
    A = config["heads"]
    D = config["head_dim"] or config["hidden"] // config["heads"]
    G = config["kv_heads"] or A
    S = len(documents)
    weight = params[f"{name}.qkv.weight"]
    bias = params.get(f"{name}.qkv.bias")
    window = config.get("sliding_window") or S
    if (every := config.get("full_attention_every")) and (int(name.split(".")[1]) + 1) % every == 0:
        window = S
    allowed = torch.tensor([[i - window < j <= i and documents[j] == documents[i] for j in range(S)] for i in range(S)])
    distance = torch.tensor([[float(j - i) for j in range(S)] for i in range(S)], dtype=x_SH.dtype)
    slopes = alibi_slopes(A, config["alibi_max_bias"])

    def project(group: int, slot: int) -> Tensor:
        return _linear(x_SH, weight[group, slot], None if bias is None else bias[group, slot])

    def normed(x_SD: Tensor, piece: str, head: int) -> Tensor:
        if f"{name}.{piece}_norm.weight" not in params:
            return x_SD
        gamma = _gain(params[f"{name}.{piece}_norm.weight"], config)
        if config["qk_norm"] == "full":
            each = range(A) if piece == "q" else range(G)
            everything = [
                project(one // (A // G), one % (A // G)) if piece == "q" else project(one, A // G) for one in each
            ]
            square_S = torch.stack(everything).pow(2).mean((0, 2))
        else:
            square_S = x_SD.pow(2).mean(-1)
        return (
            x_SD
            / (square_S[:, None] + config["norm_eps"]).sqrt()
            * (gamma[head] if config["qk_norm"] == "full" else gamma)
        )

    def turn(x_SD: Tensor) -> Tensor:
        return _rotate(x_SD, positions, config) if config["position"] == "rope" else x_SD

    heads = []
    for head in range(A):
        group, slot = divmod(head, A // G)
        query = turn(normed(project(group, slot), "q", head))
        key = turn(normed(project(group, A // G), "k", group))
        value = project(group, A // G + 1)
        scores = _bounded(query @ key.T / math.sqrt(config.get("score_width") or D), config.get("score_softcap"))
        if config["position"] == "alibi":
            scores = scores + slopes[head] * distance
        heads.append(scores.masked_fill(~allowed, -math.inf).softmax(-1) @ value)
    return _linear(torch.cat(heads, -1), params[f"{name}.output.weight"], params.get(f"{name}.output.bias"))


def _mlp(x: Tensor, params: Params, name: str, config: Config) -> Tensor:
    """Apply two linear layers with GELU between them, or SwiGLU's three."""
    weight = params[f"{name}.up.weight"]
    bias = params.get(f"{name}.up.bias")
    if config["activation"] in ("swiglu", "geglu_tanh"):
        gate, up = (_linear(x, weight[part], None if bias is None else bias[part]) for part in (0, 1))
        hidden = (gate * torch.sigmoid(gate) if config["activation"] == "swiglu" else _gelu_tanh(gate)) * up
    else:
        hidden = {"gelu": _gelu, "gelu_tanh": _gelu_tanh}[config["activation"]](_linear(x, weight, bias))
    return _linear(hidden, params[f"{name}.down.weight"], params.get(f"{name}.down.bias"))


def logits(
    config: Config,
    params: Params,
    tokens_S: Tensor,
    documents: Sequence[int] | None = None,
    routers: list[moe.Said] | None = None,
    sample: int | None = None,
) -> Tensor:
    """Return the logits (S, vocab_size) of one sequence. `documents` gives each position's document id (contiguous
    runs).

    The output of each layer's router is appended to `routers`. `sample` is the sequence's number, which selects the
    features to drop. None means no dropout.
    """

    def dropped(x: Tensor, place: str) -> Tensor:
        if not config.get("dropout") or sample is None:
            return x
        return x * dropout.factors(config["seed"], place, sample, len(x), config["hidden"], config["dropout"])

    documents = [0] * len(tokens_S) if documents is None else [int(d) for d in documents]
    positions = [i - documents.index(document) for i, document in enumerate(documents)]
    x = params["embedding.token.weight"][tokens_S] * (
        math.sqrt(config["hidden"]) if config.get("scaled_embedding") else 1
    )
    if config["position"] == "learned":
        x = x + params["embedding.position.weight"][positions]
    x = dropped(x, "embedding")
    for i in range(config["layers"]):
        layer = f"layers.{i}"
        attended = _attention(
            _norm(x, params, f"{layer}.attention_norm", config),
            params,
            f"{layer}.attention",
            config,
            documents,
            positions,
        )
        middle = x + dropped(_norm(attended, params, f"{layer}.attention_output_norm", config), f"{layer}.attention")
        mlp_input = _norm(x if config["parallel_residual"] else middle, params, f"{layer}.mlp_norm", config)
        if f"{layer}.moe.router.weight" not in params:
            fed = _mlp(mlp_input, params, f"{layer}.mlp", config)
            x = middle + dropped(_norm(fed, params, f"{layer}.mlp_output_norm", config), f"{layer}.mlp")
            continue
        mixed, said = moe.mixture(mlp_input, params, f"{layer}.moe", config["moe"])
        if f"{layer}.moe.shared.up.weight" in params:
            beside = _mlp(mlp_input, params, f"{layer}.moe.shared", config)
            gate = params.get(f"{layer}.moe.shared_gate.weight")
            mixed = mixed + (beside if gate is None else beside * torch.sigmoid(mlp_input @ gate.T))
        x = middle + dropped(_norm(mixed, params, f"{layer}.mlp_output_norm", config), f"{layer}.mlp")
        if routers is not None:
            routers.append(said)
    x = _norm(x, params, "final_norm", config)
    head = params["embedding.token.weight" if config["tied_embeddings"] else "head.weight"]
    return _bounded(x @ head[: config["vocab_size"]].T, config.get("logit_softcap"))


def loss(
    config: Config,
    params: Params,
    tokens_BS1: Tensor,
    documents_BS1: Tensor | None = None,
    routers: list[list[moe.Said]] | None = None,
    learnt_BS1: Tensor | None = None,
    first_sample: int | None = None,
) -> Tensor:
    """Return the mean cross-entropy over all targets. Inputs are tokens[:, :-1], and targets are tokens[:, 1:].

    With document ids, a target that belongs to another document than its input does not count. A target that is not
    learnt does not count either. `routers` gets one list per sequence. `first_sample` is the sample number of the first
    row, which selects the features to drop.
    """
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for row, tokens in enumerate(tokens_BS1):
        documents = [0] * len(tokens) if documents_BS1 is None else documents_BS1[row].tolist()
        said: list[moe.Said] = []
        z = logits(
            config, params, tokens[:-1], documents[:-1], said, None if first_sample is None else first_sample + row
        )
        if routers is not None:
            routers.append(said)
        for i in range(len(tokens) - 1):
            if documents[i] == documents[i + 1] and (learnt_BS1 is None or learnt_BS1[row, i + 1]):
                total = total + z[i].logsumexp(-1) - z[i, tokens[i + 1]]
                count += 1
    return total / count


def output_z(
    config: Config,
    params: Params,
    tokens_BS1: Tensor,
    documents_BS1: Tensor | None = None,
    learnt_BS1: Tensor | None = None,
) -> Tensor:
    """Return the mean squared log-sum-exp of the logits over the targets that `loss` counts."""
    squares = []
    for row, tokens in enumerate(tokens_BS1):
        documents = [0] * len(tokens) if documents_BS1 is None else documents_BS1[row].tolist()
        learnt = [True] * len(tokens) if learnt_BS1 is None else learnt_BS1[row].tolist()
        z = logits(config, params, tokens[:-1], documents[:-1])
        counted = (i for i in range(len(tokens) - 1) if documents[i] == documents[i + 1] and learnt[i + 1])
        squares += [z[i].logsumexp(-1) ** 2 for i in counted]
    return torch.stack(squares).mean()


def gradients(
    config: Config,
    params: Params,
    tokens_BS1: Tensor,
    documents_BS1: Tensor | None = None,
    learnt_BS1: Tensor | None = None,
    first_sample: int | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradient of each parameter. `config` may have a weight "output_z" for that loss."""
    leaves = {name: value.detach().to(torch.float64).requires_grad_() for name, value in params.items()}
    routers: list[list[moe.Said]] = []
    value = loss(config, leaves, tokens_BS1, documents_BS1, routers, learnt_BS1, first_sample)
    total = value + moe.losses(routers, config, leaves)
    if weight := config.get("output_z"):
        total = total + weight * output_z(config, leaves, tokens_BS1, documents_BS1, learnt_BS1)
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return float(value.detach()), dict(zip(leaves, grads, strict=True))


def global_norm(grads: Params) -> float:
    """Return the 2-norm over all elements of all gradients."""
    return math.sqrt(sum(float(grad.pow(2).sum()) for grad in grads.values()))


def decays(name: str) -> bool:
    """Return True for weights of linear layers and embeddings, and False for biases and norms."""
    return name.endswith(".weight") and "norm" not in name


def learning_rate(update: int, lr: float, min_lr: float, warmup: int, decay: int) -> float:
    """Linear warm-up, then half a cosine from lr to min_lr; `update` counts from 1."""
    if update <= warmup:
        return lr * update / warmup
    if update >= decay:
        return min_lr
    return min_lr + (lr - min_lr) * (1 + math.cos(math.pi * (update - warmup) / (decay - warmup))) / 2


def train(
    config: Config,
    params: Params,
    batches: Sequence[Tensor],
    direction: Direction,
    *,
    rate: Callable[[int], float],
    weight_decay: float = 0.1,
    clip_norm: float = 1.0,
    documents: Sequence[Tensor | None] | None = None,
    learnt: Sequence[Tensor | None] | None = None,
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train on each batch of `batches` once. Return losses, gradient norms before clipping, and the parameters after
    the last update.

    `rate(update)` is the learning rate of update 1, 2, … A clip_norm of 0 means no clipping.
    """
    now = {name: value.detach().to(torch.float64).clone() for name, value in params.items()}
    losses = []
    norms = []
    for update, batch in enumerate(batches, start=1):
        mask = learnt[update - 1] if learnt else None
        value, grads = gradients(
            config, now, batch, documents[update - 1] if documents else None, mask, (update - 1) * len(batch)
        )
        kept = moe.kept(config, now, batch, documents[update - 1] if documents else None, loss)
        norm = global_norm(grads)
        scale = min(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0
        for name in now:
            shrink = weight_decay if decays(name) else 0.0
            now[name] = now[name] - rate(update) * (direction(name, grads[name] * scale, update) + shrink * now[name])
        now |= kept
        losses.append(value)
        norms.append(norm)
    return losses, norms, now
