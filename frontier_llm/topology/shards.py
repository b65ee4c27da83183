"""ShardSpec: what a rank owns of a parameter. ZeRO, gradient norm, tied weights, initialisation and checkpoints read only this."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

# elements: each parameter in a flat bucket, and each rank's slice of one, starts on a multiple; 256 bytes in bf16, the width that RCCL and
# vector loads like
BUCKET_ALIGNMENT = 128


@dataclass(frozen=True)
class ShardSpec:
    """One rank's rectangle of one global parameter, declared by the layer that builds it.

    The local tensor has exactly `shape`; layers view it as they need. A fused weight has a global shape in which every
    tensor-parallel part is a rectangle: QKV is (kv_heads, queries_per_kv + 2, head_dim, H), gate/up is (2, F, H).
    """

    name: str  # dotted, unique in the model, the same on every layout: "layers.3.attention.qkv.weight"
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]  # of this rank's rectangle in the global tensor
    shape: tuple[int, ...]  # of this rank's rectangle
    init_std: float | None  # normal(0, std) by (seed, name, position); None = constant `init_value`
    init_value: float = 0.0
    tp_replicas: int = 1  # ranks of the tp axis that hold this same rectangle
    tp_index: int = 0  # which of these replicas this one is; only replica 0 counts in norms and is saved
    sum_over_tp: bool = False  # gradients are partial over tp and must be summed (sequence-parallel norms and biases)
    tied_copies: int = 1  # pipeline stages that hold this parameter (the embedding, where it is also the head)
    tied_index: int = 0  # which of these copies this one is; only copy 0 counts and is saved

    @property
    def decay(self) -> bool:
        """Weight decay applies as in Megatron: to matrices, which start random; not to biases and norms, which start constant."""
        return self.init_std is not None

    @property
    def counted(self) -> bool:
        """True on the one replica that enters the gradient norm and the checkpoint."""
        return self.tp_index == 0 and self.tied_index == 0

    @property
    def numel(self) -> int:
        """Elements of this rank's rectangle."""
        return prod(self.shape)


def whole(
    name: str,
    shape: tuple[int, ...],
    init_std: float | None,
    init_value: float = 0.0,
    tp_size: int = 1,
    tp_rank: int = 0,
    sum_over_tp: bool = False,
) -> ShardSpec:
    """A parameter that every tp rank holds in full (norms, row-parallel biases, position embeddings)."""
    return ShardSpec(
        name,
        shape,
        (0,) * len(shape),
        shape,
        init_std,
        init_value,
        tp_replicas=tp_size,
        tp_index=tp_rank,
        sum_over_tp=sum_over_tp and tp_size > 1,
    )


def split(name: str, global_shape: tuple[int, ...], dim: int, tp_size: int, tp_rank: int, init_std: float | None) -> ShardSpec:
    """A parameter cut evenly along `dim` over tp. The caller has checked divisibility (topology.plan does, for every layer)."""
    part, rest = divmod(global_shape[dim], tp_size)
    assert rest == 0, f"{name}: {global_shape[dim]} is not divisible by tp {tp_size}"
    shape = (*global_shape[:dim], part, *global_shape[dim + 1 :])
    offset = tuple(part * tp_rank if index == dim else 0 for index in range(len(global_shape)))
    return ShardSpec(name, global_shape, offset, shape, init_std)
