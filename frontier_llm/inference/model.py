"""One rank's part of a model for inference: the training stage with weights, without gradients or optimizer state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from frontier_llm.checkpoint.weights import WeightSource, load_weights
from frontier_llm.comm import Mesh, Sends, all_gather, post_receive
from frontier_llm.config import BatchConfig, ModelConfig, OpsConfig, ParallelConfig, RunConfig, TrainConfig
from frontier_llm.errors import ConfigError, divisors, nearest
from frontier_llm.inference.cache import KeyValueCache, RememberingAttention
from frontier_llm.model import Microbatch, Stage, build_stages
from frontier_llm.ops import AttentionNeeds, select_ops, sizes_of, statistics_dtype, working_dtype
from frontier_llm.parallel.tensor import LayerContext, WeightGradients, materialise
from frontier_llm.topology.plan import ParallelPlan, make_plan


def inference_run(
    model: ModelConfig,
    tensor: int,
    pipeline: int,
    world_size: int,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    expert: int = 1,
) -> RunConfig:
    """Return a run configuration with the layout of inference. Data-parallel replicas share the requests.

    Raises ConfigError if the expert degree does not divide the tensor degree, because replicas do not share experts.
    """
    if tensor % expert:
        what = (
            f"{expert} does not divide tensor {tensor}: in inference, the experts are divided among the tensor ranks "
            f"of each replica"
        )
        raise ConfigError(what, f"use one of {nearest(expert, divisors(tensor))}", "parallel.expert")
    parallel = ParallelConfig(tensor=tensor, cross_node_tensor=True, pipeline=pipeline, expert=expert)
    return RunConfig(
        model=model,
        parallel=parallel,
        batch=BatchConfig(global_batch=world_size),
        train=TrainConfig(device=device),
    )


def inference_plan(model: ModelConfig, tensor: int, pipeline: int, world_size: int, expert: int = 1) -> ParallelPlan:
    """Return the layout. Raises LayoutError as training does."""
    return make_plan(inference_run(model, tensor, pipeline, world_size, expert=expert), world_size)


@dataclass
class InferenceModel:
    """The pipeline stage of one rank, and the objects that the stage needs.

    Every method is collective over tp and pp. Each dp replica works independently.
    """

    config: ModelConfig
    mesh: Mesh
    device: torch.device
    dtype: torch.dtype
    stage: Stage
    attention: RememberingAttention

    def new_cache(self, rows: int, slots: int) -> KeyValueCache:
        """Return an empty cache for this rank's layers and heads."""
        kv_heads = self.config.num_kv_heads // self.mesh.tp.size
        shape = (self.stage.spec.num_layers, 2, rows, kv_heads, slots, self.config.dim_per_head)
        return KeyValueCache(torch.zeros(shape, dtype=self.dtype, device=self.device))

    def hidden(
        self,
        tokens_SB: Tensor,
        positions_SB: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor | None:
        """Run the pipeline once, stage after stage.

        Returns (S, B, H) before the final norm on the last stage, None on other stages. `positions_SB` is needed with a
        cache. Without a cache the tokens are complete sequences.
        """
        batch = Microbatch(tokens_SB, tokens_SB, positions_SB=positions_SB)
        self.attention.cache = cache
        if cache is not None:
            assert positions_SB is not None
            cache.begin(positions_SB)
        x = None
        pp = self.mesh.pp
        if not self.stage.spec.embedding:
            shape = (*tokens_SB.shape, self.config.hidden)
            x = post_receive(shape, self.dtype, self.device, self.mesh.channels["forward"], pp.rank - 1).wait()
        x = self.stage.hidden(x, batch)
        if self.stage.spec.head:
            return x
        sends = Sends(limit=1)
        sends.start(x.contiguous(), self.mesh.channels["forward"], pp.rank + 1)
        sends.wait_all()
        return None

    def whole_logits(self, x_SBH: Tensor) -> Tensor:
        """Return logits (S, B, V) in fp32 (fp64 under fp64), equal on every tp rank.

        Call this method only on the last stage.
        """
        logits_SBv = self.stage.logits(x_SBH)
        rows = self.config.padded_vocab_size // self.mesh.tp.size
        padded_vSB = torch.nn.functional.pad(logits_SBv, (0, rows - logits_SBv.shape[-1])).permute(2, 0, 1)
        logits_VSB = all_gather(padded_vSB.contiguous(), self.mesh.tp)[: self.config.vocab_size]
        return logits_VSB.permute(1, 2, 0).to(statistics_dtype(self.dtype))


def build_inference_model(
    source: WeightSource,
    plan: ParallelPlan,
    mesh: Mesh,
    device: torch.device,
    dtype: str,
    ops: OpsConfig,
) -> InferenceModel:
    """Allocate this rank's stage and load its weights from `source`, one rectangle at a time.

    Raises BackendError if an op is missing.
    """
    working = working_dtype(dtype)
    needs = AttentionNeeds(
        window=source.model.sliding_window is not None,
        softcap=source.model.score_softcap is not None,
    )
    selected = select_ops(ops, device.type, working, needs, sizes=sizes_of(source.model))
    attention = RememberingAttention(selected.attention)
    context = LayerContext(
        tp=mesh.tp,
        sequence_parallel=False,
        ops=selected.but(attention=attention),
        gradients=WeightGradients(),
        dtype=working,
        ep=mesh.ep,
        etp=plan.grid.etp,
    )
    (stage,) = build_stages(source.model, plan.stages_of(mesh.pp.rank), context, device)
    load_weights(source, materialise(stage, device))
    return InferenceModel(
        config=source.model,
        mesh=mesh,
        device=device,
        dtype=working,
        stage=stage,
        attention=attention,
    )
