"""Chooses a back-end for each group of ops at start-up, and lists the available back-ends.

Each chosen back-end is logged with its version and the reason for the choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from frontier_llm import log
from frontier_llm.config.model import ModelConfig
from frontier_llm.config.schema import OpsConfig, RunConfig
from frontier_llm.config.validate import rotary_dim
from frontier_llm.errors import BackendError, Problem
from frontier_llm.machine.precision import is_deterministic
from frontier_llm.ops import reference
from frontier_llm.ops.attention_table import AttentionShape, load_attention, rule_for
from frontier_llm.ops.driver import architecture_of_device
from frontier_llm.ops.dtypes import working_dtype
from frontier_llm.ops.no_jit import forbid_jit
from frontier_llm.ops.providers import PROVIDERS, UNKNOWN_SIZES, AttentionNeeds, Provider, Refusal, Sizes
from frontier_llm.ops.reference import GROUPS, Op, Ops
from frontier_llm.run.rank_env import environ, put

PLAIN = AttentionNeeds()

# Back-ends that `auto` tries, in order of preference. apex is used only on request, because the prebuilt kernels make
# fewer passes over memory.
PREFERENCE: dict[str, tuple[str, ...]] = {
    "cpu": ("cpu", "sdpa", "reference"),
    "cuda": ("flash_attn", "triton", "torch", "sdpa", "reference"),
}


@dataclass(frozen=True)
class ChosenBackend:
    """The provider that was chosen for one group of ops, and the reason."""

    group: str
    provider: Provider
    why: str


@dataclass(frozen=True)
class Conditions:
    """What a run needs from the back-ends of all groups."""

    device_type: str
    dtype: torch.dtype
    needs: AttentionNeeds = PLAIN
    allow_fallback: bool = False  # ops.allow_fallback
    deterministic: bool = False  # refuse a back-end if two runs of it may differ
    sizes: Sizes = UNKNOWN_SIZES

    def refusal(self, provider: Provider, group: str) -> Refusal | None:
        """Return the reason why the provider cannot be used for the group."""
        if (
            self.deterministic
            and self.device_type in provider.devices
            and provider.determinism(self.device_type) == "never"
        ):
            return Refusal(f"{provider.name} does not give equal bits in two runs (ops.deterministic)")
        return provider.refusal(group, self.device_type, self.dtype, self.needs, self.sizes)


def choose(group: str, wanted: str, conditions: Conditions, first: tuple[str, ...] = ()) -> ChosenBackend | Problem:
    """Return the provider for one group of ops, or a Problem, which gives the flag and the fix.

    `first` are the back-ends that `auto` tries before the others, because they are known to be faster.
    """
    if wanted != "auto":
        return _choose_named(group, wanted, conditions)
    if conditions.dtype == torch.float64:
        return ChosenBackend(group, PROVIDERS["reference"], "float64 is for tests and always uses the reference")
    return _choose_auto(group, conditions, first)


def _choose_named(group: str, wanted: str, conditions: Conditions) -> ChosenBackend | Problem:
    """Return the back-end that the user has named, or a Problem if it is not available."""
    provider = PROVIDERS[wanted]
    refusal = conditions.refusal(provider, group)
    if refusal is None:
        return ChosenBackend(group, provider, f"set by ops.{group}")
    fix = f"{refusal.build}, or ops.{group}=auto".removeprefix(", or ")
    if conditions.deterministic:
        fix += ", or ops.deterministic=false"
    return Problem(f"ops.{group}={wanted}", refusal.why, fix)


def _choose_auto(group: str, conditions: Conditions, first: tuple[str, ...]) -> ChosenBackend | Problem:
    """Return the first back-end in the order of preference that can be used.

    Without ops.allow_fallback a Problem is returned in two cases. In the first, this package's own kernels are not
    available, and a slower back-end would be used. In the second, only the reference could compute attention on a GPU.
    """
    on_gpu = conditions.device_type == "cuda"
    passed_over: list[str] = []
    order = list(dict.fromkeys([*first, *PREFERENCE[conditions.device_type]]))
    if conditions.needs.documents and on_gpu:
        # flash_attn reads the lengths of the documents on the host in every layer, so the host waits for the GPU. The
        # rows of the attention table do not show this: they are measured with ALiBi.
        order.remove("flash_attn")
        order.insert(order.index("triton") + 1, "flash_attn")
    for provider in (PROVIDERS[name] for name in order):
        if group not in provider.groups:
            continue
        refusal = conditions.refusal(provider, group)
        if refusal is None:
            stores_scores = provider.name == "reference" and group == "attention" and on_gpu
            if stores_scores and not conditions.allow_fallback:
                return _only_the_reference(conditions, passed_over)
            why = f"auto; not used: {'; '.join(passed_over)}" if passed_over else "auto"
            return ChosenBackend(group, provider, why)
        if refusal.build and provider.required and not conditions.allow_fallback:
            instead = f"or run without it: ops.{group}=reference, or ops.allow_fallback=true for all ops"
            return Problem(
                f"ops.{group}=auto",
                f"the kernels of this GPU cannot be used: {refusal.why}",
                f"{refusal.build}; {instead}",
            )
        passed_over.append(f"{provider.name} ({refusal})")
    raise AssertionError("the reference supports everything")


def _only_the_reference(conditions: Conditions, passed_over: Sequence[str]) -> Problem:
    """Return the Problem that `auto` could use only the reference for attention on a GPU."""
    what = (
        f"only the reference supports what this run needs, and it stores the complete matrix of scores: "
        f"{'; '.join(passed_over)}"
    )
    fix = ""
    if conditions.needs.parts and not conditions.needs.softcap:
        fix = "set parallel.context_attention=heads if there are enough heads, or "
    if conditions.dtype == torch.float32:
        fix += "set precision.dtype=bf16, or "
    fix += "use the reference: ops.attention=reference"
    return Problem("ops.attention=auto", what, fix)


def select_ops(
    config: OpsConfig,
    device_type: str,
    dtype: torch.dtype,
    needs: AttentionNeeds = PLAIN,
    *,
    sizes: Sizes = UNKNOWN_SIZES,
    attention: AttentionShape | None = None,
    deterministic: bool | None = None,
) -> Ops:
    """Choose the ops for a device and a working type. Each choice is logged. ops.no_jit also sets the no-JIT guard.

    `needs` are the options of attention, and `attention` is its shape, for which ops.attention_table has an order.
    `sizes` are compared with the limits of the back-ends.
    `deterministic`: two runs must have equal bits. By default the value of ops.deterministic is used, in which `auto`
    means no.

    Raises one BackendError for all explicitly chosen back-ends that are not available, and for a GPU's prebuilt kernels
    that `auto` cannot use (unless ops.allow_fallback). The error gives flags and build commands.
    """
    if config.no_jit:
        forbid_jit()
    if deterministic is None:
        deterministic = config.deterministic is True
    conditions = Conditions(device_type, dtype, needs, config.allow_fallback, deterministic, sizes)
    measurable = attention is not None and not (needs.parts or needs.window or needs.softcap)
    first = (
        {"attention": _measured_first(config.attention_table, device_type, attention)}
        if attention and measurable
        else {}
    )
    outcomes = [choose(group, getattr(config, group), conditions, first.get(group, ())) for group in GROUPS]
    problems = [outcome for outcome in outcomes if isinstance(outcome, Problem)]
    if problems:
        raise BackendError(problems)
    if deterministic and device_type == "cuda":
        _use_deterministic_algorithms()
    chosen = [outcome for outcome in outcomes if isinstance(outcome, ChosenBackend)]
    ops = _load(chosen, deterministic)
    _log_choices(chosen)
    if differing := _not_repeatable(chosen, device_type, deterministic):
        ops.not_repeatable = differing
        log.info(
            f"two runs may differ in the last bits, so a resume is not equal to the bit: {differing}. "
            f"ops.deterministic=true selects ops whose results are equal"
        )
    return ops


def _load(chosen: Sequence[ChosenBackend], deterministic: bool) -> Ops:
    """Load the functions of the chosen back-ends."""
    tables = {provider: _functions(provider, deterministic) for provider in {outcome.provider for outcome in chosen}}
    functions: dict[str, Op] = {}
    for outcome in chosen:
        table = tables[outcome.provider]
        # A back-end may lack an op such as attention_block. It is then chosen only for runs that do not call this op,
        # and the reference's function is filled in.
        functions |= {op: table.get(op, getattr(reference, op)) for op in GROUPS[outcome.group]}
    return Ops(**functions)


def _log_choices(chosen: Sequence[ChosenBackend]) -> None:
    """Log each back-end with its version, its groups of ops and the reason. Equal reasons share a line."""
    groups_by_choice: dict[str, list[str]] = {}
    for outcome in chosen:
        choice = f"{outcome.provider.name} ({outcome.provider.version()}): {outcome.why}"
        groups_by_choice.setdefault(choice, []).append(outcome.group)
    for choice, groups in groups_by_choice.items():
        log.info(f"ops {', '.join(groups)}: {choice}")


def _functions(provider: Provider, deterministic: bool) -> Mapping[str, Op]:
    if deterministic and provider.load_deterministic is not None:
        return provider.load_deterministic()
    return provider.load()


def _not_repeatable(chosen: Sequence[ChosenBackend], device_type: str, deterministic: bool) -> str:
    """Return the chosen back-ends whose results may differ between two runs, such as 'attention (cudnn)', or ''."""
    allowed = ("always", "on request") if deterministic else ("always",)
    differing = [
        f"{outcome.group} ({outcome.provider.name})"
        for outcome in chosen
        if outcome.provider.determinism(device_type) not in allowed
    ]
    return ", ".join(differing)


def _use_deterministic_algorithms() -> None:
    """Make torch's own ops and matrix products avoid atomics. An op without a deterministic kernel only warns."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    # By default torch then also fills new memory, which costs time. No kernel of this package reads unwritten memory.
    torch._C._set_deterministic_fill_uninitialized_memory(False)
    if environ("CUBLAS_WORKSPACE_CONFIG") is None:
        put("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with a workspace of fixed size


def _measured_first(table: str, device_type: str, shape: AttentionShape) -> tuple[str, ...]:
    """Return the back-ends that the attention table prefers for this device and shape; () if it has no rule."""
    if device_type == "cuda" and not torch.cuda.is_available():
        return ()
    rule = rule_for(load_attention(table), architecture_of_device() if device_type == "cuda" else "cpu", shape)
    if rule is None:
        return ()
    log.info(f"attention: {', then '.join(rule.order)} ({rule.tag}: {rule.source})")
    return rule.order


def backends(dtype_name: str) -> list[dict[str, Any]]:
    """Return one row per group of ops, device, and back-end that has the group.

    `status` is the version, or the reason why the back-end cannot be used, with the build command.
    """
    dtype = working_dtype(dtype_name)
    rows = []
    for group, device in itertools.product(GROUPS, PREFERENCE):
        taken = choose(group, "auto", Conditions(device, dtype, allow_fallback=True))
        assert isinstance(taken, ChosenBackend)
        for provider in PROVIDERS.values():
            if group in provider.groups and device in provider.devices:
                refusal = provider.refusal(group, device, dtype)
                row = {"op": group, "device": device, "backend": provider.name, "available": refusal is None}
                row["deterministic"] = provider.determinism(device)
                row["chosen"] = taken.provider is provider and (device == "cpu" or torch.cuda.is_available())
                rows.append({**row, "status": provider.version() if refusal is None else f"no: {refusal}"})
    return rows


def attention_needs(config: RunConfig, attends_in_parts: bool) -> AttentionNeeds:
    """Return the options of attention that a run needs. See `select_run_ops` for `attends_in_parts`."""
    model = config.model
    return AttentionNeeds(
        config.data.reset_at_documents,
        parts=attends_in_parts,
        window=model.sliding_window is not None,
        alibi=model.position == "alibi",
        softcap=model.score_softcap is not None,
    )


def sizes_of(model: ModelConfig) -> Sizes:
    """Return the sizes of a model that back-ends limit."""
    return Sizes(
        head_dim=model.dim_per_head,
        rotated_dims=rotary_dim(model) if model.position == "rope" else 0,
        experts=model.moe.experts if model.moe else 0,
        top_k=model.moe.top_k if model.moe else 0,
    )


def select_run_ops(config: RunConfig, device_type: str, attends_in_parts: bool) -> Ops:
    """Return the ops of a training run.

    `attends_in_parts` is True if attention is computed over parts of the keys, such as the keys of one cp rank.
    """
    needs = attention_needs(config, attends_in_parts)
    shape = AttentionShape(config.model.dim_per_head, extras=needs.documents or needs.alibi)
    return select_ops(
        config.ops,
        device_type,
        working_dtype(config.precision.dtype),
        needs,
        sizes=sizes_of(config.model),
        attention=shape,
        deterministic=is_deterministic(config),
    )
