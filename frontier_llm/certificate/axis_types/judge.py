"""Compares a step on several ranks with the serial step, and names the line that makes them differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from frontier_llm.blueprint.parameters import How, Split
from frontier_llm.certificate.axis_types.labels import (
    AXES,
    NONE,
    PARTIAL,
    REPLICATED,
    UNKNOWN,
    VARYING,
    Label,
    Labels,
    holds,
    infer,
    is_close,
)
from frontier_llm.certificate.axis_types.step import HeldElements, RankRecord
from frontier_llm.certificate.axis_types.trace import Event, EventId, step_line, text_of, visible
from frontier_llm.errors import Problem
from frontier_llm.model.losses import LOAD
from frontier_llm.optim import Bucket, GradientSync, Zero
from frontier_llm.parallel.stages import LOSS
from frontier_llm.topology.shards import ShardSpec
from frontier_llm.training.step import sum_over_world

_COMPARE = "a gather or a sum is missing, doubled, or over a wrong axis"
_WORDS = {REPLICATED: "complete on every rank", VARYING: "split over the ranks", PARTIAL: "a summand on every rank"}


@dataclass(frozen=True)
class Finding:
    """One difference from the serial step. `order` is the position of its line in the serial step."""

    order: int
    problem: Problem


def judge(serial: RankRecord, ranks: Sequence[RankRecord]) -> tuple[Labels, list[Problem]]:
    """Return the labels of the step and its problems. Checks that depend on a wrong value are left out."""
    labels = Labels(serial, ranks)
    checks: list[Callable[[], Iterator[Finding]]] = [
        lambda: _values(labels, serial, ranks),
        lambda: _gradients(serial, ranks),
        lambda: _norm(serial, ranks),
        lambda: _weights(serial, ranks),
    ]
    for check in checks:
        findings = sorted(check(), key=lambda finding: finding.order)
        if findings:
            first = [finding.problem for finding in findings if finding.order == findings[0].order]
            return labels, list(dict.fromkeys(first))
    return labels, []


def _values(labels: Labels, serial: RankRecord, ranks: Sequence[RankRecord]) -> Iterator[Finding]:
    """Yield the findings of losses and of each microbatch's gradients."""
    yield from _losses(labels, serial, ranks)
    specs = {name: spec for record in ranks for name, spec in record.specs.items()}
    for (name, microbatch), reference in serial.contributions.items():
        spec = specs[name]
        if "ep" in spec.parameter.axes:
            # an expert computes rows of several microbatches together, so there is no gradient of one microbatch
            continue
        yield from _contribution(labels, ranks, spec, microbatch, reference.gradient)


def _losses(labels: Labels, serial: RankRecord, ranks: Sequence[RankRecord]) -> Iterator[Finding]:
    assert serial.result is not None
    for name, reference in serial.losses.items():
        if name == LOAD:
            continue
        is_wrong = False
        for tp_rank in sorted({record.place["tp"] for record in ranks}):
            same = [record for record in ranks if record.place["tp"] == tp_rank]
            total = torch.stack([record.losses[name] for record in same]).sum()
            if not is_close(total, reference):
                is_wrong = True
                sources = [source for record in same for source in record.loss_sources[name]]
                what = f"loss {name!r}: the ranks' shares add up to {float(total):.6g}, not {float(reference):.6g}"
                yield from _explained(labels, sources, what)
        expected = serial.result.loss if name == LOSS else serial.result.further_losses[name]
        for record in ranks:
            assert record.result is not None
            found = record.result.loss if name == LOSS else record.result.further_losses[name]
            if not is_wrong and not is_close(torch.tensor(found), torch.tensor(expected)):
                factor = f" ({found / expected:.4g} times the serial value)" if expected else ""
                what = f"loss {name!r} is {found:.6g} after the sum over all ranks, not {expected:.6g}{factor}"
                yield _at(_line_of(ranks, "world") or defined(sum_over_world), what, "count each share once")
                break


def _contribution(
    labels: Labels, ranks: Sequence[RankRecord], spec: ShardSpec, microbatch: int, reference: Tensor
) -> Iterator[Finding]:
    """Compare the gradient of one parameter from one microbatch, before it is summed over replicas."""
    parts: dict[tuple[int, ...], Tensor] = {}
    events: list[EventId] = []
    for record in ranks:
        found = record.contributions.get((spec.name, microbatch))
        if found is None:
            continue
        place = tuple(record.place[axis] for axis in AXES)
        parts[place] = parts[place] + found.gradient if place in parts else found.gradient
        events.extend(found.events)
    expected = _expected(spec, ranks)
    what = f"gradient of {spec.name}"
    if not parts:
        yield Finding(0, Problem(where=spec.name, what=f"{what}: no rank adds a gradient in microbatch {microbatch}"))
        return
    if holds(parts, reference, expected):
        return
    actual = infer(parts, reference)
    if actual == UNKNOWN:
        yield from _explained(labels, events, f"{what} differs from the serial gradient")
        return
    for axis, is_, should in zip(AXES, actual, expected, strict=True):
        if is_ == should:
            continue
        message = f"{what} is {_WORDS[is_]} of {axis} ({is_}), but the parameter's declaration needs {should}"
        fix = "sum it once over the axis, or declare How.PARTIAL" if is_ == PARTIAL else "do not sum it over the axis"
        origins = [_origin(labels, labels.events[event], AXES.index(axis), is_) for event in events]
        for origin in _unique(origins):
            yield Finding(labels.order(origin), Problem(_where(labels.named(origin)), message, fix))


def _expected(spec: ShardSpec, ranks: Sequence[RankRecord]) -> Label:
    """Return the declared label of a gradient, before it is summed over replicas, on each of AXES."""
    sizes = {axis: len({record.place[axis] for record in ranks}) for axis in AXES}
    how = spec.parameter.axes.get("tp")
    if sizes["tp"] == 1:
        on_tp = REPLICATED
    elif isinstance(how, Split):
        on_tp = VARYING
    else:
        on_tp = PARTIAL if how is How.PARTIAL else REPLICATED
    return (PARTIAL if sizes["cp"] > 1 else REPLICATED, on_tp)


def _explained(labels: Labels, events: Iterable[EventId], what: str) -> Iterator[Finding]:
    """Follow the inputs of `events` backwards. Yield a finding for each line that loses the label: its inputs have a
    label, and its result has none.
    """
    starts = list(events)
    seen: dict[EventId, list[Event]] = {}
    roots = _unique(root for start in starts for root in _roots(labels, start, seen))
    for root in roots or [labels.events[start] for start in starts[-1:]]:
        yield _explain(labels, root, what)


def _roots(labels: Labels, start: EventId, seen: dict[EventId, list[Event]]) -> list[Event]:
    """Return the earliest unknown events among the ancestors of an event, or the event itself."""
    if start in seen:
        return seen[start]
    seen[start] = []
    event = labels.events[start]
    label = labels.of(event)
    if label not in (UNKNOWN, NONE):
        return []
    roots = _unique(root for source in event.sources for root in _roots(labels, source, seen))
    if not roots and label == UNKNOWN:
        roots = [event]
    seen[start] = roots
    return roots


def _known_inputs(labels: Labels, event: Event) -> tuple[list[Event], list[Event]]:
    """Return (the nearest ancestors that have a label, the events from these ancestors to `event`, with `event` as the
    last).
    """
    inputs: dict[EventId, Event] = {}
    between = {event.id: event}
    waiting = list(event.sources)
    while waiting:
        source = waiting.pop()
        if source in inputs or source in between:
            continue
        before = labels.events[source]
        if labels.of(before) in (UNKNOWN, NONE):
            between[source] = before
            waiting.extend(before.sources)
        else:
            inputs[source] = before
    return list(inputs.values()), sorted(between.values(), key=lambda one: (one is event, one.id[1]))


def _explain(labels: Labels, root: Event, what: str) -> Finding:
    """Return a text about the error at the first line whose result has no label."""
    inputs, between = _known_inputs(labels, root)
    for index, axis in enumerate(AXES):
        partial = [one for one in inputs if labels.of(one)[index] == PARTIAL]
        complete = [one for one in inputs if labels.of(one)[index] == REPLICATED]
        if root.summed and root.axis.startswith(axis) and complete and not partial:
            text = f"{what}: this sum over {axis} adds values that are already complete ({REPLICATED} on {axis})"
            return Finding(labels.order(root), Problem(_where(root), text, "sum the value once"))
        if partial and not any(one.summed and one.axis.startswith(axis) for one in between):
            origin = _origin(labels, partial[0], index, PARTIAL)
            text = f"{what}: the result of this line is partial over {axis} ({PARTIAL}), and "
            is_named = visible(root.site) is not None
            text += f"{_where(root)} uses it as if it were complete" if is_named else "its sum is missing"
            return Finding(labels.order(origin), Problem(_where(origin), text, f"sum it over {axis}"))
    kinds = ", ".join(sorted({_described(labels, labels.of(one)) for one in inputs})) or "weights and tokens"
    earlier = [one for one in between[:-1] if visible(one.site) is not None or one.forward_site]
    line, *others = dict.fromkeys(_where(one) for one in reversed(earlier or between))
    text = f"{what}: this line computes a wrong value from inputs that are {kinds}{_factor(labels, root)}"
    if others:
        text += f"; computed with {', '.join(others[:3])}"
    if line != _where(root):
        text += f"; first used at {_where(root)}"
    return Finding(labels.order(root), Problem(line, text, _COMPARE))


def _factor(labels: Labels, root: Event) -> str:
    """Return ', and it is n times the serial value' if the value is n times the serial value. Otherwise return ''."""
    reference = labels.reference(root)
    if reference is None or root.value is None or root.value.numel() != reference.numel():
        return ""
    for factor in (2.0, 0.5, 4.0, 0.25):
        if is_close(root.value, reference * factor):
            return f", and it is {factor:g} times the serial value"
    return ""


def _described(labels: Labels, label: Label) -> str:
    by_axis = dict(zip(AXES, label, strict=True))
    return " and ".join(f"{by_axis[axis]} on {axis}" for axis in labels.axes) or "complete"


def _origin(labels: Labels, event: Event, index: int, letter: str) -> Event:
    """Return the event at which a value gets this letter on the axis. Follows inputs that have the letter."""
    for source in event.sources:
        before = labels.events[source]
        label = labels.of(before)
        if label in (UNKNOWN, NONE):
            nearest, _ = _known_inputs(labels, before)
            label = labels.of(nearest[0]) if nearest else label
            before = nearest[0] if nearest else before
        if label not in (UNKNOWN, NONE) and label[index] == letter:
            return _origin(labels, before, index, letter)
    return event


def _gradients(serial: RankRecord, ranks: Sequence[RankRecord]) -> Iterator[Finding]:
    """Compare the gradients after all sums."""
    for record in ranks:
        for part in record.gradients:
            reference = _elements(serial.unsummed[part.spec.name], part)
            if is_close(part.values, reference):
                continue
            name = part.spec.name
            what = f"gradient of {name} after all sums is not the serial gradient"
            found = _summed_over(ranks, record, part, part.values)
            needed = _summed_over(ranks, record, part, reference)
            if found is not None and needed is not None:
                missing = ", ".join(axis for axis in needed if axis not in found)
                extra = ", ".join(axis for axis in found if axis not in needed)
                what += f": the sum over {missing} is missing" if missing else ""
                what += f": the sum over {extra} is wrong" if extra else ""
            elif is_close(part.values, 2 * reference):
                what += ": it is 2 times as large, so a sum is doubled"
            yield _at(_line_of_sync(record) or defined(GradientSync._start_sum), what, "sum each gradient once")


def _summed_over(
    ranks: Sequence[RankRecord], record: RankRecord, part: HeldElements, values: Tensor
) -> tuple[str, ...] | None:
    """Return the axes over which the contributions add up to `values`, or None if no set of axes does."""
    axes = [axis for axis in ("tp", "cp", "dp", "pp") if len({other.place[axis] for other in ranks}) > 1]
    for count in range(len(axes) + 1):
        for chosen in combinations(axes, count):
            group = [
                other
                for other in ranks
                if all(other.place[axis] == record.place[axis] for axis in record.place if axis not in chosen)
                and part.spec.name in other.unsummed
            ]
            total = sum((_local(other.unsummed[part.spec.name], part) for other in group), torch.zeros(()).double())
            if is_close(total, values):
                return chosen
    return None


def _norm(serial: RankRecord, ranks: Sequence[RankRecord]) -> Iterator[Finding]:
    """Compare the norm of the gradient."""
    assert serial.result is not None and ranks[0].result is not None
    found = ranks[0].result.gradient_norm
    expected = serial.result.gradient_norm
    if all(_equals(record.result.gradient_norm, expected) for record in ranks if record.result is not None):
        return
    total = sum(record.norm_share for record in ranks)
    what = f"the gradient norm is {found:.6g}, not {expected:.6g}"
    if _equals(total, serial.norm_share):
        yield _at(
            _line_of(ranks, "world") or defined(sum_over_world),
            f"{what}: the ranks' shares are correct, but their sum is wrong",
        )
        return
    direction = "too much" if total > serial.norm_share else "only a part"
    yield _at(
        defined(Zero.squared_norm_share), f"{what}: the ranks' shares contain {direction}", "count each element once"
    )


def _weights(serial: RankRecord, ranks: Sequence[RankRecord]) -> Iterator[Finding]:
    """Compare the weights after the update."""
    updated = {part.spec.name: part.values.view(part.spec.shape) for part in serial.weights}
    for record in ranks:
        for part in record.weights:
            reference = _elements(updated[part.spec.name], part)
            if is_close(part.values, reference):
                continue
            computed = _computed(record, part.storage)
            owned = [other for other in record.gradients if other.spec.name == part.spec.name]
            own_is_right = all(
                is_close(part.values[one.start : one.stop], reference[one.start : one.stop]) for one in owned
            )
            what = f"weight {part.spec.name} after the update is not the serial weight"
            if own_is_right:
                what += ": this rank's slice is correct, and slices of other ranks were not gathered"
                computed = []
            line = text_of(visible(computed[-1].site)) if computed else defined(Bucket.start_gather)
            yield _at(line, what, "see the optimizer's update and the all-gather of its slices")


def _computed(record: RankRecord, storage: int) -> list[Event]:
    """Return this rank's operations that have computed the contents of a memory, before the memory was gathered."""
    events = record.recorder.events
    waiting = list(record.recorder.writers(storage))
    computed: dict[EventId, Event] = {}
    while waiting:
        rank, number = waiting.pop()
        if rank != record.recorder.rank or (rank, number) in computed:
            continue
        event = events[number]
        if event.axis:
            waiting.extend(event.sources)
        else:
            computed[event.id] = event
    return [computed[key] for key in sorted(computed)]


def _elements(complete: Tensor, part: HeldElements) -> Tensor:
    """Return the elements of a complete tensor that `part` holds."""
    spec = part.spec
    index = tuple(slice(start, start + size) for start, size in zip(spec.offset, spec.shape, strict=True))
    return complete[index].flatten()[part.start : part.stop]


def _local(tensor: Tensor, part: HeldElements) -> Tensor:
    return tensor.flatten()[part.start : part.stop]


def _equals(found: float, expected: float) -> bool:
    return is_close(torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64))


def _at(where: str, what: str, fix: str = "") -> Finding:
    return Finding(0, Problem(where, what, fix))


def _where(event: Event) -> str:
    """Return the line of an event. A backward without Python code has the line of its forward."""
    line = visible(event.site)
    if line is None and event.forward_site:
        return f"backward of {text_of(visible(event.forward_site))}"
    return text_of(line)


def _unique(events: Iterable[Event]) -> list[Event]:
    """Return the events with different lines, in order."""
    return list({_where(event): event for event in reversed(list(events))}.values())[::-1]


def _line_of(ranks: Sequence[RankRecord], axis: str) -> str:
    """Return the line of the last sum over an axis outside of the pipeline, or ''."""
    sums = [event for event in ranks[0].recorder.events if event.summed and event.axis == axis]
    return text_of(step_line(sums[-1].site)) if sums else ""


def _line_of_sync(record: RankRecord) -> str:
    """Return the line in optim/sync.py that made the last gradient sum. '' if there is none."""
    lines = [visible(event.site) for event in record.recorder.events if event.summed]
    inside = [line for line in lines if line is not None and line[0].co_filename.endswith("optim/sync.py")]
    return text_of(inside[-1]) if inside else ""


def defined(function: Any) -> str:
    """Return the first line of a function."""
    code = function.__code__
    return text_of((code, code.co_firstlineno))


def parameter_labels(serial: RankRecord, ranks: Sequence[RankRecord]) -> Mapping[str, int]:
    """Count the parameters with each pair of labels on tp: of the value, and of its gradient."""
    counts: dict[str, int] = {}
    for spec in serial.specs.values():
        on_tp = _expected(spec, ranks)[1]
        value = {VARYING: "V", PARTIAL: "R", REPLICATED: "I"}[on_tp]
        counts[f"{value}, gradient {on_tp}"] = counts.get(f"{value}, gradient {on_tp}", 0) + 1
    return counts
