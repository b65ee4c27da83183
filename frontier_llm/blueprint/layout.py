"""Parallel layout of a training step: degrees of parallelism, microbatches, schedule, recomputation and sharding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frontier_llm.config import ModelConfig, RunConfig

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

# Kind of sharding over the replicas → stage of ZeRO. "gradients" is DeepSpeed's ZeRO-2. "weights" gathers the weights
# of a layer in forward and again in backward (ZeRO-3, FSDP). "weights-gathered-once" keeps them from forward to
# backward (torch's SHARD_GRAD_OP), which some published runs use.
SHARDING = {"none": 0, "optimizer": 1, "gradients": 2, "weights": 3, "weights-gathered-once": 3}

# section of a run file → key → field of `Layout`, for the keys that define a layout; files have them in this order
RUN_KEYS = {
    "parallel": {
        "tensor": "tp",
        "pipeline": "pp",
        "schedule": "schedule",
        "data_mode": "sharding",
        "zero": "sharding",
        "axis_order": "axis_order",
        "data": "dp",
        "data_shard": "data_shard",
        "context": "cp",
        "context_attention": "context_attention",
        "expert": "ep",
        "expert_tensor": "etp",
        "expert_all_to_all": "expert_nodes",
        "chunks": "chunks",
        "sequence_parallel": "sequence_parallel",
    },
    "batch": {"micro_batch": "micro_batch"},
    "precision": {"gradient_wire": "gradient_wire"},
    "train": {"recompute": "recompute"},
    "comm": {"tensor_chunks": "tensor_chunks"},
}
FIELD_OF_KEY = {key: field for keys in RUN_KEYS.values() for key, field in keys.items()}


def statistics_bytes(dtype: str) -> int:
    """Return the bytes per element of gradients, optimizer state and other sums if the model computes in `dtype`.

    These values are in fp64 if the model computes in fp64, otherwise in fp32 (`ops.statistics_dtype`).
    """
    return max(4, DTYPE_BYTES[dtype])


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of one training step on tp · cp · pp · dp ranks."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1  # Ranks over which the experts are distributed. ep · etp divides tp · cp · dp.
    etp: int = 1  # Ranks that split each expert's width.
    expert_nodes: int = 1  # Nodes of the two-stage all-to-all (first between nodes, then inside). 1 = one stage.
    imbalance: float = 1.0  # Token rows that the busiest rank's experts receive, divided by the mean over ranks.
    chunks: int = 1  # Virtual stages per pipeline rank.
    schedule: str = "1f1b"
    micro_batch: int = 1  # Number of sequences in a microbatch.
    microbatches: int = 1  # Microbatches of one replica and step.
    sequence_parallel: bool = False
    recompute: str = "none"  # A mode of RECOMPUTE, or several ("full,none") that alternate over a stage's layers.
    sharding: str = "optimizer"  # A key of SHARDING.
    data_shard: int = 0  # Replicas that together hold one copy of the weights (only for sharding "weights"). 0 = all.
    axis_order: str = "tp-dp-pp"  # Axes of the mesh, innermost first.
    dtype: str = "bf16"
    # Dtype in which gradients are summed over dp. "full" = the dtype of the training framework (`gradient_bytes`).
    gradient_wire: str = "full"
    optimizer: str = "adamw"
    context_attention: str = "auto"  # An algorithm of WAYS, or auto.
    tensor_chunks: int = 1  # Number of pieces of a tp collective. Each piece overlaps a piece of a matrix product.

    @property
    def devices(self) -> int:
        """Number of ranks, tp · cp · pp · dp."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def replicas(self) -> int:
        """Number of ranks with the same weights, dp · cp.

        Gradients are summed and optimizer state is sharded over these ranks.
        """
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """Number of replicas that together hold one copy of the sharded state."""
        return self.data_shard or self.replicas

    @property
    def global_batch(self) -> int:
        """Number of sequences of one step, over all replicas."""
        return self.micro_batch * self.microbatches * self.dp

    @property
    def edp(self) -> int:
        """Number of replicas of each expert."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def sequence_shards(self) -> int:
        """Number of ranks that split the activations between blocks along the sequence: tp with sequence parallelism,
        otherwise 1.
        """
        return self.tp if self.sequence_parallel else 1


def layer_modes(recompute: str, layers: int) -> tuple[str, ...]:
    """Return the recomputation mode of each layer of a virtual stage with `layers` layers."""
    modes = recompute.split(",")
    return tuple(modes[layer % len(modes)] for layer in range(layers))


def mode_shares(model: ModelConfig, layout: Layout, layers: int | None = None) -> dict[str, float]:
    """Return recomputation mode → fraction of the layers of a virtual stage that have this mode.

    `layers` is the stage's number of layers. None means the fullest stage of an even split.
    """
    return shares(layer_modes(layout.recompute, layers or -(-model.layers // (layout.pp * layout.chunks))))


def fullest_stage(model: ModelConfig, layout: Layout) -> range:
    """Return the layers of a virtual stage with the most layers of an even split, and with the most experts."""
    return range(model.layers - -(-model.layers // (layout.pp * layout.chunks)), model.layers)


def shares(modes: Sequence[str]) -> dict[str, float]:
    """Return recomputation mode → fraction of the layers with this mode, from the modes of all layers."""
    return {mode: modes.count(mode) / len(modes) for mode in dict.fromkeys(modes)}


def layout_of(config: RunConfig, world_size: int) -> Layout:
    """Return the layout of a run on `world_size` ranks. The caller has checked that it is legal (`topology.plan`)."""
    parallel = config.parallel
    batch = config.batch
    dp = world_size // parallel.model_ranks
    as_written = {
        field: getattr(getattr(config, section), key)
        for section, keys in RUN_KEYS.items()
        for key, field in keys.items()
    }
    meant = {
        "dp": dp,
        "microbatches": batch.global_batch // (batch.micro_batch * dp),
        "sequence_parallel": parallel.sequence_parallel and parallel.tensor > 1,
        "sharding": "weights" if parallel.data_mode == "fsdp" else list(SHARDING)[parallel.zero],
        "data_shard": parallel.data_shard or 0,
        "expert_nodes": 1,  # replaced later by topology.expert_nodes.over_nodes
        "dtype": config.precision.dtype,
        "optimizer": config.optimizer.name,
    }
    return Layout(**{**as_written, **meant})


def run_keys(layout: Layout) -> dict[str, dict[str, Any]]:
    """Return the sections and keys of a run file that select this layout and override any other layout.

    `stage_layers` is None, so the layers are split evenly.
    """
    sections = {
        section: {key: getattr(layout, field) for key, field in keys.items()} for section, keys in RUN_KEYS.items()
    }
    sharded = layout.sharding == "weights"
    parallel = sections["parallel"]
    if layout.ep == 1:
        all_to_all = "auto"
    elif layout.expert_nodes > 1:
        all_to_all = "hierarchical"
    else:
        all_to_all = "flat"
    parallel |= {
        "data_mode": "fsdp" if sharded else "zero",
        "zero": SHARDING[layout.sharding],
        "data_shard": layout.data_shard or None,
        "expert_all_to_all": all_to_all,
        "stage_layers": None,
    }
    if sharded:
        del parallel["zero"]  # a run file allows only 0 and 1 for this key, and FSDP does not use it
    return sections


# Algorithms of context-parallel attention. gather: all-gather of keys and values. ring: neighbours exchange keys and
# values during compute. heads: all-to-all, after which each rank has all tokens of some heads (Ulysses).
WAYS = ("gather", "ring", "heads")


def context_way(model: ModelConfig, tp: int, cp: int, wanted: str = "auto") -> str:
    """Return `wanted`, or for "auto" the algorithm of context-parallel attention that sends fewer bytes per layer.

    "heads" requires that cp divides the key/value heads; otherwise the result is "gather". Bytes of forward and
    backward are counted in units of S / cp tokens of one head. A rank has a query heads and g key/value heads. "gather"
    moves keys and values three times, 6 g (cp - 1): they are gathered twice, and their gradients are scattered. "heads"
    moves queries, keys, values and outputs twice, 4 (a + g) (cp - 1) / cp.
    """
    if wanted != "auto":
        return wanted
    heads = model.heads // tp
    kv_heads = model.num_kv_heads // tp
    if kv_heads % cp == 0 and 4 * (heads + kv_heads) < 6 * kv_heads * cp:
        return "heads"
    return "gather"


def layer_kinds(model: ModelConfig, layers: range | None = None) -> list[tuple[int, int]]:
    """Return (index of the first layer, number of layers) of each kind: dense layers, then layers with experts.

    Only the layers in `layers` are counted, or all layers.
    """
    layers = range(model.layers) if layers is None else layers
    experts = len(range(max(layers.start, model.routed_layers.start), layers.stop))
    kinds = ((0, len(layers) - experts), (model.routed_layers.start, experts))
    return [(layer, count) for layer, count in kinds if count]
