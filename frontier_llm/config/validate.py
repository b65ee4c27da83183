"""Checks the model's shape and the optimizer's settings, as far as they do not depend on the world size.

`topology.plan` checks the layout. The functions whose names end in `_note` return warnings about a configuration that
is valid but probably a mistake.
"""

from __future__ import annotations

from collections.abc import Iterator

from frontier_llm.config import PrecisionConfig
from frontier_llm.config.model import ModelConfig, MoeConfig, RopeScaling
from frontier_llm.config.phases import phases_of
from frontier_llm.config.schema import OptimizerConfig, RunConfig
from frontier_llm.errors import Problem, divisors, nearest


def model_problems(model: ModelConfig) -> Iterator[Problem]:
    """Yield a problem for every violated rule, with the nearest valid values."""
    if model.head_dim is None and model.hidden % model.heads:
        yield Problem(
            where="model.heads",
            what=f"{model.heads} does not divide hidden {model.hidden}",
            fix=f"set heads to one of {nearest(model.heads, divisors(model.hidden))}, or head_dim",
        )
    if model.heads % model.num_kv_heads:
        yield Problem(
            where="model.kv_heads",
            what=f"{model.num_kv_heads} does not divide heads {model.heads}",
            fix=f"set kv_heads to one of {nearest(model.num_kv_heads, divisors(model.heads))}",
        )
    if model.position == "rope" and (rotary_dim(model) % 2 or not rotary_dim(model)):
        yield Problem(
            where="model.rope_fraction",
            what=(
                f"rotates {rotary_dim(model)} of {model.dim_per_head} dims of each head, not an even number of 2 or "
                f"more"
            ),
            fix="choose a fraction that gives an even number of dims, at least 2",
        )
    if model.rope_scaling is not None:
        yield from _scaling_problems(model, model.rope_scaling)
    if model.moe is not None:
        yield from _moe_problems(model, model.moe)
    if model.norm == "rmsnorm" and model.norm_bias:
        yield Problem(
            where="model.norm_bias",
            what="rmsnorm has no bias",
            fix="set norm_bias: false or norm: layernorm",
        )
    if model.norm == "layernorm" and model.norm_plus_one:
        yield Problem(
            where="model.norm_plus_one",
            what="is true, but only rmsnorm can add 1 to its weight, and the norm is layernorm",
            fix="set norm_plus_one: false or norm: rmsnorm",
        )
    if model.full_attention_every and model.sliding_window is None:
        yield Problem(
            where="model.full_attention_every",
            what=(
                f"is {model.full_attention_every}, but model.sliding_window is not set: every layer has full attention"
            ),
            fix="set model.sliding_window, or remove full_attention_every",
        )


def _scaling_problems(model: ModelConfig, scaling: RopeScaling) -> Iterator[Problem]:
    if scaling.kind in ("llama3", "yarn") and scaling.original_sequence_length is None:
        yield Problem(
            where="model.rope_scaling.original_sequence_length",
            what=f"is not set, but {scaling.kind} needs the context length that the model was trained with before",
            fix=f"set it, e.g. {model.sequence_length // 4}",
        )
    if scaling.kind == "yarn" and scaling.beta_fast <= scaling.beta_slow:
        yield Problem(
            where="model.rope_scaling",
            what=f"beta_fast {scaling.beta_fast} is not above beta_slow {scaling.beta_slow}",
            fix="set beta_fast: 32 and beta_slow: 1, as in YaRN",
        )
    if scaling.kind == "ntk" and rotary_dim(model) <= 2:
        yield Problem(
            where="model.rope_scaling.kind",
            what="ntk needs more than one rotation per head, and this model has only one",
            fix="use linear",
        )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        yield Problem(
            where="model.rope_scaling",
            what=f"high_freq_factor {scaling.high_freq_factor} is not above low_freq_factor {scaling.low_freq_factor}",
            fix="set low_freq_factor: 1 and high_freq_factor: 4, as in Llama 3.1",
        )


def _moe_problems(model: ModelConfig, moe: MoeConfig) -> Iterator[Problem]:
    if moe.top_k > moe.experts:
        yield Problem(
            where="model.moe.top_k",
            what=f"{moe.top_k} is more than the {moe.experts} experts",
            fix=f"set top_k to {moe.experts} or fewer",
        )
    if moe.dense_layers >= model.layers:
        yield Problem(
            where="model.moe.dense_layers",
            what=f"{moe.dense_layers} of {model.layers} layers are dense, so no layer has experts",
            fix=f"set it to {model.layers - 1} or fewer, or remove model.moe",
        )
    if moe.shared_gate and not moe.shared_hidden:
        yield Problem(
            where="model.moe.shared_gate",
            what="is true, but there is no shared expert (moe.shared_hidden is 0)",
            fix="set moe.shared_hidden, or shared_gate: false",
        )
    if model.bias:
        yield Problem(
            where="model.bias",
            what="is true, but experts have no biases",
            fix="set model.bias=false (qkv_bias may be true)",
        )


def optimizer_problems(optimizer: OptimizerConfig) -> Iterator[Problem]:
    """Yield a problem if min_lr is above lr, so that the learning rate would rise.

    This happens if a fine-tuning run sets a small lr and keeps the default min_lr of pretraining.
    """
    if optimizer.schedule != "constant" and optimizer.min_lr > optimizer.lr:
        yield Problem(
            where="optimizer.min_lr",
            what=f"{optimizer.min_lr:g} is above optimizer.lr {optimizer.lr:g}, so the learning rate would rise",
            fix=f"set optimizer.min_lr={optimizer.lr / 10:g}, a tenth, or 0",
        )


def phase_note(config: RunConfig) -> str:
    """Return a warning if the run ends before its last phase begins, else ''."""
    reached = len(phases_of(config))
    written = len(config.train.phases)
    if reached >= written:
        return ""
    total = sum(phase.steps for phase in config.train.phases)
    return (
        f"train.steps={config.train.steps} ends the run in phase {reached} of {written}; remove train.steps, "
        f"or set it to {total}, the sum of all phases"
    )


def warmup_note(config: RunConfig) -> str:
    """Return a warning if the run ends before the learning rate's warm-up does, else ''."""
    warmup = config.optimizer.warmup_steps
    steps = config.train.steps
    if warmup < steps:
        return ""
    return (
        f"optimizer.warmup_steps={warmup} is not less than train.steps={steps}, so the learning rate rises during the "
        f"complete run; "
        f"set e.g. optimizer.warmup_steps={steps // 10}"
    )


def rotary_dim(model: ModelConfig) -> int:
    """Number of dimensions of each head that rotate."""
    return int(model.dim_per_head * model.rope_fraction)


# MI200 (MI210, MI250, MI250X) flushes subnormal fp16 numbers to zero. All other AMD GPUs keep them (PyTorch docs,
# "Numerical accuracy").
FLUSHING = "gfx90a"


def fp16_note(precision: PrecisionConfig, flushes_fp16: bool) -> str:
    """Return a warning for a run in fp16 on a device that flushes subnormal numbers to zero, else ''."""
    if precision.dtype != "fp16" or not flushes_fp16:
        return ""
    if precision.initial_loss_scale is None:
        scale = ""
    else:
        scale = "; with fp16, remove precision.initial_loss_scale, so that the scale follows the batch"
    return (
        "precision.dtype=fp16: MI250X's matrix products treat numbers below 6.1e-5 as zero, including small "
        "gradients (docs/numerics.md). "
        f"precision.dtype=bf16 is as fast and has no such limit{scale}"
    )
