"""What a layout is: how one training step is spread over ranks and microbatches, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frontier_llm.config import ModelConfig, RunConfig

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

# What the replicas share out among them → the stage of ZeRO that it is:
# "gradients" is ZeRO-2 as DeepSpeed has it; "weights" gathers a layer's weights forward and again backward (ZeRO-3,
# FSDP), and
# "weights-gathered-once" keeps them from forward to backward (torch's SHARD_GRAD_OP, which other people's runs have)
SHARDING = {"none": 0, "optimizer": 1, "gradients": 2, "weights": 3, "weights-gathered-once": 3}

# section of a run file → its keys that make a layout, in the order in which they are written → the field of `Layout`
# that each sets
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
    """Of what is summed beside a working type, gradients and optimizer state: fp64 under fp64, else fp32
    (ops.statistics_dtype).
    """
    return max(4, DTYPE_BYTES[dtype])


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One training step on tp · cp · pp · dp ranks."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1  # ranks that share out the experts, folded out of tp · dp
    etp: int = 1  # ranks that split each expert's width
    expert_nodes: int = 1  # over which rows go to experts in two stages: once to a node, and on inside it; 1 = in one
    imbalance: float = 1.0  # rows of the busiest rank's experts over the mean
    chunks: int = 1  # virtual stages per pipeline rank
    schedule: str = "1f1b"
    micro_batch: int = 1  # sequences
    microbatches: int = 1  # of one replica and step
    sequence_parallel: bool = False
    recompute: str = "none"  # of RECOMPUTE; or several, "full,none", that repeat through each virtual stage's layers
    sharding: str = "optimizer"  # of SHARDING
    data_shard: int = 0  # replicas that share out one copy of the weights, where they do; 0 = all
    axis_order: str = "tp-dp-pp"  # innermost first
    dtype: str = "bf16"
    gradient_wire: str = "full"  # dtype in which gradients are summed over dp; full = as the software does
    optimizer: str = "adamw"
    context_attention: str = "auto"  # of blueprint.context.WAYS, or auto
    tensor_chunks: int = 1  # pieces in which tp gathers, scatters and sums beside its products

    @property
    def devices(self) -> int:
        """tp · cp · pp · dp."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights: gradients are summed, and optimizer state is shared out, over dp · cp."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """Of them, those that share out what is cut."""
        return self.data_shard or self.replicas

    @property
    def global_batch(self) -> int:
        """Sequences of one step over all replicas."""
        return self.micro_batch * self.microbatches * self.dp

    @property
    def edp(self) -> int:
        """Replicas of each expert."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def sequence_shards(self) -> int:
        """Ranks over which activations between blocks are cut: tp with sequence parallelism, else 1."""
        return self.tp if self.sequence_parallel else 1


def layer_modes(recompute: str, layers: int) -> tuple[str, ...]:
    """How each layer of a virtual stage of so many is recomputed."""
    modes = recompute.split(",")
    return tuple(modes[layer % len(modes)] for layer in range(layers))


def mode_shares(model: ModelConfig, layout: Layout, layers: int | None = None) -> dict[str, float]:
    """Of the layers of a virtual stage that has `layers` of them; None: of the fullest, where they are evenly
    spread.
    """
    return shares(layer_modes(layout.recompute, layers or -(-model.layers // (layout.pp * layout.chunks))))


def shares(modes: Sequence[str]) -> dict[str, float]:
    """Mode of recomputation → share of the layers."""
    return {mode: modes.count(mode) / len(modes) for mode in dict.fromkeys(modes)}


def layout_of(config: RunConfig, world_size: int) -> Layout:
    """The layout of a run on `world_size` ranks; it must be legal (`topology.make_plan` checks)."""
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
        "expert_nodes": 1,  # how many, topology.expert_nodes.over_nodes says
        "dtype": config.precision.dtype,
        "optimizer": config.optimizer.name,
    }
    return Layout(**{**as_written, **meant})


def run_keys(layout: Layout) -> dict[str, dict[str, Any]]:
    """The sections of a run file that make it this layout, whatever the file says otherwise; stages have as many
    layers as each other.
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
        del parallel["zero"]  # of 0 or 1, it means nothing then
    return sections


# gather: keys and values of all ranks; ring: the same from neighbour to neighbour, beside compute; heads: all tokens of
# some heads (Ulysses)
WAYS = ("gather", "ring", "heads")


def context_way(model: ModelConfig, tp: int, cp: int, wanted: str = "auto") -> str:
    """`wanted`, or for `auto` the way that sends fewer bytes per layer: heads where each rank can have some, else
    gather.

    In units of one rank's S / cp tokens of one head, forward and backward: gathering moves keys and values three times
    (they are gathered again, and their gradients scattered), 6 g (cp - 1); by heads queries, keys, values and outputs
    move twice, 4 (a + g) (cp - 1) / cp.
    """
    if wanted != "auto":
        return wanted
    heads = model.heads // tp
    kv_heads = model.num_kv_heads // tp
    if kv_heads % cp == 0 and 4 * (heads + kv_heads) < 6 * kv_heads * cp:
        return "heads"
    return "gather"
