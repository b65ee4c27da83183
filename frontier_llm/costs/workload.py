"""What is priced: a model's shape and a layout, as numbers that may also be numpy arrays (thousands of layouts at once).

Every formula in this room uses numpy functions on these fields, so one layout and ten thousand go through the same code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from frontier_llm.config import ModelConfig, RunConfig
from frontier_llm.topology import AXIS_ORDERS

Number = Any  # int, float or a numpy array of them; arrays of one workload broadcast against each other

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
GPIPE, ZERO_BUBBLE = 0, 3
FSDP = 3  # `Workload.zero` of runs that shard weights, gradients and optimizer state (parallel.data_mode: fsdp)
RECOMPUTE = {"none": 0, "selective": 1, "full": 2}
DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


def statistics_bytes(dtype: str) -> int:
    """Of what is summed beside a working type, gradients and optimizer state: fp64 under fp64, else fp32 (ops.statistics_dtype)."""
    return max(4, DTYPE_BYTES[dtype])


@dataclass(frozen=True)
class Workload:
    """One training step of a model on a layout. Letters as in `model/dims.py`."""

    S: Number  # sequence length, tokens
    H: Number  # hidden
    A: Number  # query heads
    G: Number  # key/value heads
    D: Number  # head dimension
    F: Number  # MLP width
    V: Number  # padded vocabulary
    layers: Number
    gated: Number  # 1 = SwiGLU: the MLP has a gate as well
    learned_positions: Number  # 1 = a learned position embedding
    rope: Number  # 1 = rotary positions
    bias: Number  # 1 = linear layers have biases
    qkv_bias: Number  # 1 = the query, key and value projection has one
    norm_bias: Number
    tied: Number  # 1 = the head is the embedding
    tp: Number
    pp: Number
    dp: Number
    chunks: Number
    B: Number  # microbatch, sequences
    m: Number  # microbatches per replica and step
    sp: Number  # 1 = sequence parallel
    recompute: Number  # 0 none, 1 selective (attention core), 2 full
    zero: Number  # 0 | 1, 3 = fully sharded (FSDP), 2 = fully sharded but weights gathered once, as others have it
    dp_outer: Number  # index into topology.AXIS_ORDERS; 1 = tp-pp-dp: stages are neighbours, replicas far apart
    schedule: Number = 1  # index into SCHEDULES
    dtype_bytes: Number = 2
    flash: Number = -1  # 1 flash, 0 unfused; -1 = as the stack does
    recompute_share: Number = 1.0  # of the layers that full recomputation covers (others: every second layer)
    gradients_cut: Number = 0  # 1 = zero 1 with gradients kept in parts too (others: ZeRO-2 beside a pipeline); its time is as zero 1's
    checkpoints_cut: Number = 0  # 1 = recomputation's checkpoints are cut over tp even without sequence parallelism
    gradient_bytes: Number = 0  # in which gradients are summed over dp; 0 = as the stack does

    @property
    def tokens(self) -> Number:
        """Tokens of one microbatch, S·B."""
        return self.S * self.B

    @property
    def step_tokens(self) -> Number:
        """Tokens of one step over all replicas."""
        return self.tokens * self.m * self.dp

    @property
    def devices(self) -> Number:
        """tp · pp · dp."""
        return self.tp * self.pp * self.dp

    @property
    def sequence_shards(self) -> Number:
        """Ranks over which activations between blocks are cut: tp with sequence parallelism, else 1."""
        return np.where(np.asarray(self.sp) == 1, self.tp, 1)

    @property
    def stage_layers(self) -> Number:
        """Layers of the most loaded pipeline rank when layers are spread evenly."""
        return np.ceil(np.asarray(self.layers) / self.pp)

    def at(self, index: Any) -> Workload:
        """The workload(s) at an index or mask of the arrays."""
        size = np.broadcast(*(np.asarray(value) for value in vars(self).values())).shape
        return replace(self, **{key: np.broadcast_to(np.asarray(value), size)[index] for key, value in vars(self).items()})


def model_numbers(model: ModelConfig) -> dict[str, Number]:
    """The shape fields of a Workload from a model."""
    return {
        "S": model.sequence_length,
        "H": model.hidden,
        "A": model.heads,
        "G": model.num_kv_heads,
        "D": model.dim_per_head,
        "F": model.ffn_hidden,
        "V": model.padded_vocab_size,
        "layers": model.layers,
        "gated": int(model.gated),
        "learned_positions": int(model.position == "learned"),
        "rope": int(model.position == "rope"),
        "bias": int(model.bias),
        "qkv_bias": int(model.has_qkv_bias),
        "norm_bias": int(model.norm_bias),
        "tied": int(model.tied_embeddings),
    }


def from_config(config: RunConfig, world_size: int) -> Workload:
    """The workload of a run on `world_size` ranks; the layout must be legal (`topology.make_plan` checks)."""
    parallel, batch = config.parallel, config.batch
    dp = world_size // (parallel.tensor * parallel.pipeline)
    return Workload(
        **model_numbers(config.model),
        tp=parallel.tensor,
        pp=parallel.pipeline,
        dp=dp,
        chunks=parallel.chunks,
        B=batch.micro_batch,
        m=batch.global_batch // (batch.micro_batch * dp),
        sp=int(parallel.sequence_parallel and parallel.tensor > 1),
        recompute=RECOMPUTE[config.train.recompute],
        zero=FSDP if parallel.data_mode == "fsdp" else parallel.zero,
        dp_outer=AXIS_ORDERS.index(parallel.axis_order),
        schedule=SCHEDULES.index(parallel.schedule),
        dtype_bytes=DTYPE_BYTES[config.precision.dtype],
        gradient_bytes=DTYPE_BYTES.get(config.precision.gradient_wire, 0),
    )
