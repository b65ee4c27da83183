"""Finds changes of configuration, data and plugins between a checkpoint and the run that continues from it.

Some configuration keys define the mathematics of the run: the model, the optimizer, the global batch, the data, the
seeds. A change of such a key must be allowed explicitly. Other keys define how the same mathematics is computed:
layout, precision, kernels, machine, logging. Changes of these keys are logged and accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, cast

from pydantic import ValidationError

from frontier_llm.blueprint.parameters import model_parameters
from frontier_llm.checkpoint.facts import JobFacts
from frontier_llm.checkpoint.manifest import Manifest
from frontier_llm.config import ModelConfig, OptimizerConfig, RunConfig, Stretches, in_steps, phases_of
from frontier_llm.config.keys import check_allowable
from frontier_llm.config.plugins import PluginRecord
from frontier_llm.data.blend import whole_weights
from frontier_llm.errors import CheckpointError, Problem
from frontier_llm.optim.scalars import decay_begin, learning_rate
from frontier_llm.run.complete import MANIFEST

_MATHEMATICS = ("model", "optimizer", "batch.global_batch", "data", "train.seed", "guard")
# The only keys that must not change before the first step (for example with imported weights): they define the weights.
_INITIAL_WEIGHTS = ("model", "train.seed")
_HARMLESS = (
    "model.name",
    "data.allow_synthetic",
    "data.cache_dir",
    "data.validation",
    "data.tokenizer",
    "optimizer.engine",
    "optimizer.deepspeed_config",
    "guard.replica_check_interval",
    "guard.straggler_interval",
    "guard.straggler_seconds",
    "guard.recompute_interval",
    "guard.max_skips_in_row",
)
_SILENT = (
    "plugins",
    "train.run_dir",
    "train.log_interval",
    "train.tensorboard",
    "train.peak_tflops",
    "train.remote",
    "train.remote_mib_per_s",
    "train.remote_wait_s",
)
_ABSENT = "(absent)"


@dataclass(frozen=True)
class Change:
    """A changed key, with the value in the checkpoint and the current value."""

    key: str
    saved: Any
    current: Any
    mathematics: bool  # True if the key defines the mathematics of the run
    note: str = ""
    allowable: bool = True  # False if no flag can allow the change, for example other shapes of weights
    remedy: str = ""  # an override (key=value) that keeps the mathematics although the key changes

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.key}: {_without_none(self.saved)!r} → {_without_none(self.current)!r}{note}"


def _without_none(value: Any) -> Any:
    """Return the value without keys whose value is None, because such keys are not set."""
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_without_none(inner) for inner in value]
    return value


def flattened(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings under dotted names. Tuples become lists, as in JSON."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from flattened(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, list(value) if isinstance(value, tuple) else value


def _under(key: str, roots: Collection[str]) -> bool:
    return any(key == root or key.startswith(f"{root}.") for root in roots)


def _ends_with_run(flat: Mapping[str, Any]) -> bool:
    """Return True if the learning rate of every step depends on the run's number of steps."""
    return flat.get("optimizer.decay_steps") is None and flat.get("optimizer.schedule") in ("cosine", "linear")


def _rates_depend_on_steps(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return True if another number of steps changes the learning rates.

    A changed schedule is reported as a separate change.
    """
    same_schedule = before.get("optimizer.schedule") == after.get("optimizer.schedule")
    return same_schedule and (_ends_with_run(before) or _ends_with_run(after))


def _decay_end(flat: Mapping[str, Any]) -> Any:
    """Return the schedule and the step at which its decay ends, for a schedule that decays from the warm-up on.

    `flat` has steps in place of durations. Returns None for another schedule.
    """
    schedule = flat.get("optimizer.schedule")
    if schedule not in ("cosine", "linear"):
        return None
    end = flat.get("optimizer.decay_steps")
    return schedule, flat.get("train.steps") if end is None else end


def _new_decay(before: Mapping[str, Any], after: Mapping[str, Any], step: int) -> str:
    """Return the reason why another end of the decay changes the mathematics, with the rates of step `step`."""
    why = "the learning rate of every step depends on train.steps while optimizer.decay_steps is null"
    rates = [_rate(flat, step) for flat in (before, after)]
    return why + (f"; at step {step} it would be {rates[1]:.3g} instead of {rates[0]:.3g}" if None not in rates else "")


def _rate(flat: Mapping[str, Any], step: int) -> float | None:
    """Return the learning rate of a step. None if the configuration is of another version."""
    names = ("lr", "min_lr", "schedule", "warmup_steps", "decay_steps")
    try:
        config = OptimizerConfig.model_validate({name: flat[f"optimizer.{name}"] for name in names})
    except (KeyError, ValidationError):
        return None
    return learning_rate(config, step, flat["train.steps"])


def _trained_phases(config: Mapping[str, Any], step: int, done: Stretches) -> list[Any]:
    """Return (first step, model, global batch, data) of each phase that has begun after `step` steps.

    Later phases may change (like train.steps), because none of their steps has been trained yet. The microbatch is
    part of the layout, which may change at any step.
    """
    phases = config.get("train", {}).get("phases")
    if not phases:
        return []
    try:
        run = RunConfig.model_validate(_known(config)[0], context=done)
    except ValidationError:
        return list(phases)  # an older version allowed other values; then every change of the phases counts
    begun = [phase for phase in phases_of(run) if phase.first <= step]
    return [(phase.first, phase.config.model, phase.config.batch.global_batch, phase.config.data) for phase in begun]


def _trained_blend(config: Mapping[str, Any]) -> Any:
    return config.get("data", {}).get("train")


def _lost_decay(before: Mapping[str, Any], after: Mapping[str, Any], step: int) -> str:
    """Return a warning if a longer run would raise a learning rate that was in its final decay after `step` steps.

    Otherwise return ''.
    """
    if before.get("optimizer.schedule") != "wsd" or after.get("optimizer.schedule") != "wsd":
        return ""
    begin = decay_begin(before["optimizer.decay_steps"], before["train.steps"])
    if step <= begin or after["train.steps"] <= before["train.steps"]:
        return ""
    return (
        f"the learning rate has decayed since step {begin} and now rises again; to avoid that, start from a "
        f"checkpoint before step {begin}"
    )


def _fits(saved: Mapping[str, Any], current: Mapping[str, Any], key: str) -> bool:
    """Return True if the saved weights fit the shapes of a model with the current value of `key`."""
    field = key.split(".")[1]
    try:
        models = [ModelConfig.model_validate(model) for model in (saved, {**saved, field: current.get(field)})]
    except ValidationError:
        return False
    before, after = ({name: parameter.shape for name, parameter in model_parameters(model).items()} for model in models)
    return before == after


def with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved configuration, completed by the defaults of this version.

    Keys that did not exist when the checkpoint was written get their defaults, which do not change the run. Keys that
    no longer exist are kept, so that they are compared too.
    """
    known, gone = _known(config)
    try:
        complete: Any = RunConfig.model_validate(known).model_dump(mode="json")
    except ValidationError:
        return config  # an older version allowed other values; compare the saved configuration as it is
    for path, key, value in gone:
        _section(complete, path)[key] = value
    return cast("Mapping[str, Any]", complete)


def _known(config: Mapping[str, Any]) -> tuple[Any, list[tuple[list[Any], Any, Any]]]:
    """Return a copy of a configuration without the keys that no longer exist, and (path, key, value) of each."""
    known: Any = deepcopy(dict(config))
    gone: list[tuple[list[Any], Any, Any]] = []
    try:
        RunConfig.model_validate(known)
    except ValidationError as error:
        for place in (fault["loc"] for fault in error.errors() if fault["type"] == "extra_forbidden"):
            *path, key = place
            section = _section(known, path)
            if key in section:  # each member of a union can report the key
                gone.append((path, key, section.pop(key)))
    return known, gone


def _section(config: Any, path: Sequence[Any]) -> Any:
    """Return the section at a path of pydantic, which also contains names of union members."""
    for key in path:
        if isinstance(config, Mapping) or isinstance(key, int):
            config = config[key]
    return config


@contextmanager
def comparing(*manifests: str) -> Iterator[None]:
    """Turn an error of the comparison into a CheckpointError. A manifest can have any JSON value for any key."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"has a value that this version cannot compare: {type(error).__name__}: {error}",
            "restore manifest.json from a copy, or use another checkpoint",
            " or ".join(f"{manifest}: config" for manifest in manifests),
        ) from error


def by_content(config: Mapping[str, Any], data: Mapping[str, str]) -> dict[str, Any]:
    """Return the configuration with datasets' identities instead of paths, and with integer blend weights.

    The data sections of two results are equal if the runs read the same samples. `data` maps path to identity. A
    dataset without an identity keeps its path.
    """
    changed: Any = deepcopy(dict(config))
    phases = changed.get("train", {}).get("phases") or ()
    for section in (changed, *phases):
        blend = (section.get("data") or {}).get("train")
        if isinstance(blend, list | tuple):
            weights = whole_weights([source["weight"] for source in blend])
            named = [{"path": data.get(source["path"], source["path"])} for source in blend]
            members = [{**source, "weight": float(weight)} for source, weight in zip(named, weights, strict=True)]
            section["data"]["train"] = sorted(members, key=lambda member: str(member["path"]))
    return cast("dict[str, Any]", changed)


@dataclass(frozen=True)
class _Compared:
    """A configuration in the three forms that are compared."""

    values: dict[str, Any]  # dotted key → value, as written
    steps: dict[str, Any]  # the same with durations in steps, because a run file may give them in tokens
    content: dict[str, Any]  # nested, with identities of datasets (`by_content`)

    @classmethod
    def of(cls, config: Mapping[str, Any], data: Mapping[str, str] | None, done: Stretches) -> _Compared:
        """Return the forms of `config`. `data` maps paths to identities, `done` has the sizes of finished steps."""
        return cls(
            values=dict(flattened(config)),
            steps=dict(flattened(in_steps(config, done))),
            content=by_content(config, data or {}),
        )


@dataclass(frozen=True)
class _Rules:
    """How changed keys are judged in one comparison."""

    mathematics: list[str]  # keys and sections that define the mathematics, unless they are harmless
    harmless: list[str]
    notes: dict[str, str]  # key → note
    remedies: dict[str, str]  # key → override that keeps the mathematics

    def defines_mathematics(self, key: str) -> bool:
        """Return True if a change of the key changes the mathematics of the run."""
        return _under(key, self.mathematics) and not _under(key, self.harmless)


def _rules(before: _Compared, after: _Compared, begun: bool, step: int, done: Stretches) -> _Rules:
    """Return the rules for two configurations. The effect of some keys depends on the values of others."""
    rules = _Rules(
        mathematics=list(_MATHEMATICS if begun else _INITIAL_WEIGHTS),
        harmless=list(_HARMLESS),
        notes={
            "train.steps": _lost_decay(before.steps, after.steps, step),
            "optimizer.name": "only the weights would be loaded",
        },
        remedies={},
    )
    if _decay_end(before.steps) is not None and _decay_end(before.steps) == _decay_end(after.steps):
        rules.harmless.append("optimizer.decay_steps")
    elif begun and _rates_depend_on_steps(before.values, after.values):
        rules.mathematics.append("train.steps")
        rules.notes["train.steps"] = _new_decay(before.steps, after.steps, step)
        if _ends_with_run(before.values):
            rules.remedies["train.steps"] = f"optimizer.decay_steps={before.values.get('train.steps')}"
    if begun and _trained_phases(before.content, step, done) != _trained_phases(after.content, step, done):
        rules.mathematics.append("train.phases")
    if _trained_blend(before.content) == _trained_blend(after.content):
        rules.harmless.append("data.train")
    return rules


def config_changes(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    begun: bool = True,
    step: int = 0,
    *,
    saved_data: Mapping[str, str] | None = None,
    data: Mapping[str, str] | None = None,
    done: Stretches = (),
) -> list[Change]:
    """Return every key whose value differs, in the order of the current configuration.

    `begun` is False if no sample has been trained on. `step` is the number of finished steps, and `done` has their
    sizes. `saved_data` and `data` map paths to identities.
    """
    before = _Compared.of(saved, saved_data, done)
    after = _Compared.of(current, data, done)
    rules = _rules(before, after, begun, step, done)
    changes = []
    for key in dict.fromkeys([*after.values, *before.values]):
        was = before.values.get(key, _ABSENT)
        now = after.values.get(key, _ABSENT)
        same_steps = before.steps.get(key, _ABSENT) == after.steps.get(key, _ABSENT)
        if was == now or same_steps or _under(key, _SILENT):
            continue
        counts = rules.defines_mathematics(key)
        forbidden = _why_forbidden(key, saved, current) if counts else ""
        changes.append(
            Change(
                key=key,
                saved=was,
                current=now,
                mathematics=counts,
                note=forbidden or rules.notes.get(key, ""),
                allowable=not forbidden,
                remedy=rules.remedies.get(key, ""),
            )
        )
    return changes


def _why_forbidden(key: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return why no flag can allow a change of this key, or '' if a flag can."""
    if key == "data.seed":
        return (
            "each source keeps the order of the first seed; --restart-source PATH gives the source PATH the order of "
            "the new seed"
        )
    if key.startswith("model.") and not _fits(saved["model"], current["model"], key):
        return "the saved weights have other shapes"
    return ""


def data_changes(saved: Mapping[str, str], current: Mapping[str, str], begun: bool = True) -> list[Change]:
    """Return the datasets whose path is unchanged but whose tokens differ. Both mappings are path → identity.

    If a path has changed, this is a change of the configuration, which this function does not return.
    """
    return [
        Change("data.train", saved[path][:12], identity[:12], begun, f"the tokens of {path} have changed")
        for path, identity in current.items()
        if saved.get(path, identity) != identity
    ]


def plugin_changes(saved: Sequence[PluginRecord], current: Sequence[PluginRecord], begun: bool = True) -> list[Change]:
    """Return one change if the imported plugins differ from the checkpoint's plugins, or if their code has changed.

    Paths and order of the plugins are not compared. Plugins without a recorded digest are compared by name.
    """
    has_digests = all(plugin.sha256 for plugin in (*saved, *current))
    before, after = (
        Counter(plugin.sha256 if has_digests else plugin.short_name for plugin in plugins)
        for plugins in (saved, current)
    )
    if before == after:
        return []
    was, now = (", ".join(sorted(map(str, plugins))) or "none" for plugins in (saved, current))
    return [Change("plugins", was, now, begun, "a plugin is code that may change any part of the run")]


def environment_changes(saved: Mapping[str, str], current: Mapping[str, str]) -> list[Change]:
    """Return changes of versions, of the code's digest, and of the device. Such changes are only logged."""
    return [
        Change(key, saved.get(key, _ABSENT), current.get(key, _ABSENT), mathematics=False)
        for key in sorted({*saved, *current})
        if saved.get(key) != current.get(key)
    ]


def allowed_changes(saved: Manifest, facts: JobFacts, allowed: Collection[str], where: str) -> list[Change]:
    """Return the changes of configuration, data and plugins between a checkpoint and the job that continues from it.

    Raises CheckpointError as `check_allowed` does.
    """
    progress = saved.progress
    begun = progress.consumed_samples > 0
    with comparing(f"{where}/{MANIFEST}"):
        changes = config_changes(
            with_defaults(saved.config),
            facts.config,
            begun,
            progress.step,
            saved_data=saved.data,
            data=facts.data,
            done=progress.position.steps_done if progress.position is not None else (),
        )
    changes += data_changes(saved.data, facts.data, begun)
    changes += plugin_changes(saved.known_plugins, facts.plugins, begun)
    check_allowed(changes, allowed, where)
    return changes


def check_allowed(changes: Collection[Change], allowed: Collection[str], where: str) -> None:
    """Raise a CheckpointError that lists every change of the mathematics that is not allowed.

    `allowed` contains keys or sections of the configuration. An unknown key in `allowed` raises ConfigError.
    """
    refused = [
        change for change in changes if change.mathematics and not (change.allowable and _under(change.key, allowed))
    ]
    if refused:
        flags = " ".join(dict.fromkeys(f"--allow-change {change.key}" for change in refused))
        problems = [Problem(where, f"the run would change its mathematics: {change}") for change in refused]
        ways = ["restore the values"]
        if remedies := [change.remedy for change in refused if change.remedy]:
            ways.append(f"add {' '.join(remedies)} to keep the rates of all trained steps (docs/train_longer.md)")
        if all(change.allowable for change in refused):
            ways.append(f"add {flags}")
        fix = f"{', '.join(ways)}, or start a new run with another train.run_dir"  # printed once, after all problems
        raise CheckpointError([*problems[:-1], replace(problems[-1], fix=fix)])
    # Accept allowed keys that have not changed, because the last save may already have the changed value.
    check_allowable(allowed)
