"""A small copy of a configuration: the same options, few ranks on each axis that the run splits, and tiny tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from frontier_llm.blueprint.layout import context_way
from frontier_llm.config import ModelConfig, MoeConfig, RunConfig, phases_of
from frontier_llm.data.loader import SampleBatch
from frontier_llm.topology.plan import ParallelPlan, plan_as_given

HEAD_DIM = 8
WIDTH = 16  # width of an MLP and of an expert
MOST_STAGES = 3  # pipeline ranks: the first, a middle one without embedding and head, and the last


def reasons_not_checkable(config: RunConfig, world_size: int) -> list[str]:
    """Return the options of this run whose step the simulated ranks cannot run."""
    reasons = []
    if config.parallel.data_mode == "fsdp":
        reasons.append("parallel.data_mode=fsdp: torch's fully_shard communicates through process groups of its own")
    if config.optimizer.engine == "deepspeed":
        reasons.append("optimizer.engine=deepspeed: DeepSpeed communicates through process groups of its own")
    if config.model.moe is not None and config.model.moe.capacity is not None:
        reasons.append(
            "model.moe.capacity: each rank drops tokens according to its own rows, so no serial step computes the "
            "same values"
        )
    plane = max(1, world_size // config.parallel.pipeline)
    small = _degree(config.parallel.tensor) * _degree(config.parallel.context) * _degree(_data(config, world_size))
    if plane > 1 and small % (_degree(config.parallel.expert) * _degree(config.parallel.expert_tensor)):
        reasons.append("parallel.expert and parallel.expert_tensor: two ranks on each axis are too few for both")
    return reasons


def differences(config: RunConfig) -> list[str]:
    """Return the options that the small copy replaces by others, for the section's evidence."""
    notes = [
        f"at most {MOST_STAGES} ranks on pp, and 2 on any other axis",
        "fp64 and reference ops, so rounding and fused kernels are not checked",
    ]
    if config.comm.algorithms != "flat":
        notes.append("flat collectives instead of comm.algorithms")
    if config.comm.overlap_experts and config.parallel.expert > 1:
        notes.append("microbatches run one after the other, not interleaved in pairs (comm.overlap_experts)")
    if config.parallel.expert_all_to_all == "hierarchical":
        notes.append("one rank of ep on each node")
    if len(phases_of(config)) > 1:
        notes.append("only the first of the run's phases (train.phases)")
    return notes


def small_copy(config: RunConfig, world_size: int) -> RunConfig:
    """Return the small copy of the run's first phase."""
    config = phases_of(config)[0].config
    parallel = config.parallel
    tp = _degree(parallel.tensor)
    cp = _degree(parallel.context)
    pp = min(parallel.pipeline, MOST_STAGES)
    dp = _degree(_data(config, world_size))
    chunks = parallel.chunks if pp > 1 else 1
    way = context_way(config.model, parallel.tensor, parallel.context, parallel.context_attention)
    tensor_chunks = min(config.comm.tensor_chunks, 2)
    model = _small_model(config.model, tp=tp, cp=cp, virtual_stages=pp * chunks, pieces=tensor_chunks, way=way)
    microbatches = _few_microbatches(config, world_size, pp, chunks)
    micro_batch = min(config.batch.micro_batch, 2)
    return _with(
        config,
        model=model,
        parallel=_with(
            parallel,
            tensor=tp,
            context=cp,
            pipeline=pp,
            data=dp,
            sequence_parallel=parallel.sequence_parallel and tp > 1,
            chunks=chunks,
            schedule=parallel.schedule if pp > 1 else "1f1b",
            expert=_degree(parallel.expert),
            expert_tensor=_degree(parallel.expert_tensor),
            expert_all_to_all="hierarchical" if parallel.expert_all_to_all == "hierarchical" else "flat",
            context_attention=way,
            stage_layers=None,
        ),
        batch=_with(config.batch, global_batch=microbatches * micro_batch * dp, micro_batch=micro_batch),
        optimizer=_with(
            config.optimizer,
            lr=1e-2,
            min_lr=1e-3,
            warmup_steps=0,
            decay_steps=None,
            clip_norm=0.01 if config.optimizer.clip_norm else 0.0,
        ),
        precision=_with(config.precision, dtype="fp64"),
        ops=_with(config.ops, **dict.fromkeys(_OP_GROUPS, "reference")),
        comm=_with(
            config.comm,
            in_flight="many",
            algorithms="flat",
            overlap_experts=False,
            tensor_chunks=tensor_chunks,
            bucket_elements=min(config.comm.bucket_elements, 2000),
        ),
        train=_with(config.train, steps=4, phases=()),
        guard=_with(config.guard, spike_sigmas=0.0, recompute_interval=0),
    )


def wide_copy(config: RunConfig, world_size: int, layers_per_stage: int) -> RunConfig:
    """Return a copy of the run's first phase with fewer pipeline stages, layers and microbatches.

    All tensors have the sizes of the run. `layers_per_stage` is the number of layers of a virtual stage.
    """
    config = phases_of(config)[0].config
    parallel = config.parallel
    model = config.model
    pp = min(parallel.pipeline, MOST_STAGES)
    chunks = parallel.chunks if pp > 1 else 1
    dp = _data(config, world_size)
    layers = max(pp * chunks, _kinds_of_layers(model)) + pp * chunks * (layers_per_stage - 1)
    moe = model.moe and _with(model.moe, dense_layers=min(model.moe.dense_layers, 1))
    microbatches = _few_microbatches(config, world_size, pp, chunks)
    dtype = config.precision.dtype
    return _with(
        config,
        # auto is replaced by bf16, which it selects on every GPU
        precision=_with(config.precision, dtype="bf16" if dtype == "auto" else dtype),
        model=_with(model, layers=layers, moe=moe),
        parallel=_with(
            parallel,
            pipeline=pp,
            data=dp,
            chunks=chunks,
            schedule=parallel.schedule if pp > 1 else "1f1b",
            context_attention=context_way(model, parallel.tensor, parallel.context, parallel.context_attention),
            stage_layers=None,
        ),
        batch=_with(config.batch, global_batch=microbatches * config.batch.micro_batch * dp),
        # with overlap, a second thread would compute the other microbatch of a pair
        comm=_with(config.comm, overlap_experts=False),
        train=_with(config.train, steps=4, phases=()),
        guard=_with(config.guard, spike_sigmas=0.0, recompute_interval=0),
    )


def serial_copy(small: RunConfig) -> RunConfig:
    """Return the small copy on one rank, which computes the reference values.

    It keeps sequence parallelism, so that both runs execute the same lines.
    """
    one = ("tensor", "context", "pipeline", "data", "chunks", "expert", "expert_tensor")
    return _with(
        small,
        parallel=_with(small.parallel, **dict.fromkeys(one, 1), schedule="1f1b", expert_all_to_all="flat"),
        comm=_with(small.comm, tensor_chunks=1),
    )


def plan_of(small: RunConfig) -> ParallelPlan:
    """Return the layout of a small copy."""
    plan = plan_as_given(small, small.parallel.model_ranks * (small.parallel.data or 1))
    return replace(plan, sequence_parallel=small.parallel.sequence_parallel)


class SmallSource:
    """Random microbatches of one data-parallel rank of a small copy. The global batch is equal on all layouts."""

    def __init__(self, small: RunConfig, dp_rank: int) -> None:
        self._config = small
        self._dp = small.parallel.data or 1
        self._dp_rank = dp_rank
        self._size = small.batch.micro_batch
        self.microbatches = small.batch.global_batch // (self._dp * self._size)
        self.reset_at_documents = small.data.reset_at_documents
        self.masks_targets = self.reset_at_documents

    def global_index(self, index: int) -> int:
        """Return the number of this rank's microbatch `index` among all microbatches of the step."""
        return index * self._dp + self._dp_rank

    def sample_ids(self, step: int, index: int) -> range:
        """Return the sample numbers of a microbatch."""
        first = step * self._config.batch.global_batch + self.global_index(index) * self._size
        return range(first, first + self._size)

    def microbatch(self, step: int, index: int) -> SampleBatch:
        """Return a microbatch. With document resets, a target counts only if its input is in the same document."""
        generator = np.random.default_rng((step, self.global_index(index)))
        shape = (self._size, self._config.model.sequence_length + 1)
        tokens = generator.integers(0, self._config.model.vocab_size, shape)
        if not self.reset_at_documents:
            return SampleBatch(tokens)
        documents = (generator.random(shape) < 0.2).cumsum(1).astype(np.int32)
        documents[:, :2] = 0
        return SampleBatch(tokens, documents[:, :-1], documents[:, :-1] == documents[:, 1:])


_OP_GROUPS = (
    "attention",
    "norm",
    "rope",
    "activation",
    "cross_entropy",
    "adamw",
    "linear",
    "experts",
    "accumulate",
)


def _degree(degree: int) -> int:
    return min(degree, 2)


def _few_microbatches(config: RunConfig, world_size: int, stages: int, chunks: int) -> int:
    """Return the number of microbatches of a copy: enough for each virtual stage, if the run has as many."""
    given = config.batch.global_batch // (config.batch.micro_batch * _data(config, world_size))
    microbatches = min(given, max(2, stages * chunks))
    if microbatches > stages:
        microbatches -= microbatches % stages  # an interleaved schedule needs a multiple of the pipeline ranks
    return microbatches


def _kinds_of_layers(model: ModelConfig) -> int:
    return 2 if model.full_attention_every or (model.moe is not None and model.moe.dense_layers) else 1


def _data(config: RunConfig, world_size: int) -> int:
    return max(1, world_size // config.parallel.model_ranks)


def _with(section: Any, **changes: Any) -> Any:
    return section.model_copy(update=changes)


def _small_model(model: ModelConfig, *, tp: int, cp: int, virtual_stages: int, pieces: int, way: str) -> ModelConfig:
    """Return the model with one layer for each virtual stage, and small widths that the degrees divide."""
    layers = max(virtual_stages, _kinds_of_layers(model))
    kv_heads = tp * (cp if way == "heads" else 1)
    heads = kv_heads * min(model.heads // model.num_kv_heads, 2)
    sequence = 4 * cp * tp * pieces
    scaling = model.rope_scaling
    if scaling is not None and scaling.original_sequence_length is not None:
        scaling = _with(scaling, original_sequence_length=sequence)
    return _with(
        model,
        layers=layers,
        hidden=heads * HEAD_DIM,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=None if model.head_dim is None else HEAD_DIM,
        ffn_hidden=WIDTH,
        vocab_size=29,
        vocab_multiple=16,
        sequence_length=sequence,
        sliding_window=None if model.sliding_window is None else 5,
        full_attention_every=None if model.full_attention_every is None else 2,
        rope_scaling=scaling,
        init_std=0.2,
        moe=None if model.moe is None else _small_experts(model.moe),
    )


def _small_experts(moe: MoeConfig) -> MoeConfig:
    return _with(
        moe,
        experts=4,
        top_k=min(moe.top_k, 2),
        expert_hidden=WIDTH,
        dense_layers=min(moe.dense_layers, 1),
        shared_hidden=WIDTH if moe.shared_hidden else 0,
        balance_weight=max(moe.balance_weight, 0.1) if moe.balance_weight else 0.0,
        z_weight=max(moe.z_weight, 0.1) if moe.z_weight else 0.0,
    )
