"""Infers the label of a value on each mesh axis from the values of all ranks and of the serial run.

Labels on an axis:

* R, replicated: every rank has the complete value.
* V, varying: the ranks' elements together are the elements of the complete value.
* P, partial: the sum over the ranks is the complete value.

A parameter with the label R has the label I (invariant) if its gradient also has the label R. No rule is declared for
any operation or autograd function: the numbers decide. A value that has none of these labels is unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from frontier_llm.certificate.axis_types.step import RankRecord
from frontier_llm.certificate.axis_types.trace import Event, EventId, visible

AXES = ("cp", "tp")  # axes whose ranks work on the same samples; the outer axis is first
REPLICATED = "R"
VARYING = "V"
PARTIAL = "P"
Label = tuple[str, ...]  # one letter for each of AXES; R on an axis of one rank.
# The serial run has this value too, but no combination of R, V and P describes the ranks' values
UNKNOWN: Label = ("?",)
NONE: Label = ()  # label of a value without a counterpart in the serial run
Parts = Mapping[tuple[int, ...], Tensor]  # values by coordinates on AXES

_TOLERANCE = 1e-8  # relative to the largest element; all values are fp64


def is_close(value: Tensor, reference: Tensor, is_ordered: bool = True) -> bool:
    """Return True if two tensors have the same elements up to rounding, in the same order if `is_ordered`."""
    if value.numel() != reference.numel():
        return False
    if value.numel() == 0:
        return True
    a = torch.nan_to_num(value.flatten().double(), nan=1e300, posinf=0, neginf=0)
    b = torch.nan_to_num(reference.flatten().double(), nan=-1e300, posinf=0, neginf=0)
    if not is_ordered:
        a = a.sort().values
        b = b.sort().values
    return bool((a - b).abs().max() <= _TOLERANCE * b.abs().max().clamp(min=1e-30))


def _joined(values: Sequence[Tensor], letter: str) -> Tensor | None:
    """Return the complete value that the ranks of one axis form under the label `letter`, or None if it does not hold.

    `values` has one value for each rank of the axis.
    """
    if letter == REPLICATED:
        return values[0] if all(is_close(other, values[0]) for other in values[1:]) else None
    if letter == VARYING:
        return torch.cat([value.flatten() for value in values])
    if any(value.numel() != values[0].numel() for value in values):
        return None
    return torch.stack([value.flatten() for value in values]).sum(0)


def holds(parts: Parts, reference: Tensor, label: Label) -> bool:
    """Return True if `parts` have this label on each axis and together are `reference`."""
    values = dict(parts)
    for axis in reversed(range(len(label))):
        groups: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for place in sorted(values):
            groups[place[:axis]].append(values[place])
        joined = {place: _joined(group, label[axis]) for place, group in groups.items()}
        if any(value is None for value in joined.values()):
            return False
        values = {place: value for place, value in joined.items() if value is not None}
    return is_close(values[()], reference, is_ordered=VARYING not in label)


def infer(parts: Parts, reference: Tensor) -> Label:
    """Return the first label that holds, in the order R, V, P, or UNKNOWN."""
    sizes = [1 + max(place[axis] for place in parts) for axis in range(len(AXES))]
    letters = [(REPLICATED, VARYING, PARTIAL) if size > 1 else (REPLICATED,) for size in sizes]
    return next((label for label in product(*letters) if holds(parts, reference, label)), UNKNOWN)


class Labels:
    """Labels of all recorded values of a step."""

    def __init__(self, serial: RankRecord, ranks: Sequence[RankRecord]) -> None:
        self.events: dict[EventId, Event] = {}
        self._serial: dict[Any, Event] = {}
        self._ranks = ranks
        self._groups: dict[Any, dict[tuple[int, ...], Event]] = defaultdict(dict)
        self._labels: dict[Any, Label] = {}
        self._plane = {tuple(record.place[axis] for axis in AXES) for record in ranks}
        for event in serial.recorder.events:
            for key in (event.key, event.line_key):
                if key is not None:
                    self._serial[key] = event
        for record in ranks:
            place = tuple(record.place[axis] for axis in AXES)
            for event in record.recorder.events:
                self.events[event.id] = event
                for group in self._groups_of(event):
                    self._groups[group][place] = event

    @property
    def axes(self) -> list[str]:
        """The axes with several ranks."""
        return [axis for index, axis in enumerate(AXES) if len({place[index] for place in self._plane}) > 1]

    def of(self, event: Event) -> Label:
        """Return the label of an event's value, on each of AXES."""
        labels = [self._of_group(group) for group in self._groups_of(event)]
        known = [label for label in labels if label not in (UNKNOWN, NONE)]
        if known:
            return known[0]
        return UNKNOWN if UNKNOWN in labels else NONE

    def reference(self, event: Event) -> Tensor | None:
        """Return the complete value of an event, from the serial run.

        A communication without a counterpart in the serial run has the complete value of its input.
        """
        counterpart = self._counterpart(event)
        if counterpart is not None:
            return counterpart.value
        if not event.axis or not event.sources or event.value is None:
            return None
        source = self.events[event.sources[-1]]
        if source.value is None or source.value.numel() / max(event.value.numel(), 1) not in (0.5, 1.0, 2.0):
            return None  # the communication moves only a part of the value
        return self.reference(source)

    def order(self, event: Event) -> int:
        """Return the position of the event, or of its inputs, in the serial step."""
        counterpart = self._counterpart(event)
        if counterpart is not None:
            return counterpart.id[1]
        return max((self.order(self.events[source]) for source in event.sources[-1:]), default=0)

    def named(self, event: Event) -> Event:
        """Return the event. If a message cannot name its line, return the event that has written its input."""
        while visible(event.site) is None and not event.forward_site and event.sources:
            event = self.events[event.sources[-1]]
        return event

    def counted(self) -> dict[str, dict[str, int]]:
        """Return the number of values with each label, by axis."""
        totals: dict[str, dict[str, int]] = {axis: defaultdict(int) for axis in AXES}
        for group in self._groups:
            label = self._of_group(group)
            for axis, letter in zip(AXES, label, strict=False):
                totals[axis][letter] += label != UNKNOWN
        return totals

    def _counterpart(self, event: Event) -> Event | None:
        return self._serial.get(event.key) or self._serial.get(event.line_key)

    def _groups_of(self, event: Event) -> list[Any]:
        """Return the keys that the same value has on other ranks."""
        if event.axis:
            place = self._ranks[event.id[0]].place
            return [(event.key, place["pp"], place["dp"])]
        return [key for key in (event.key, event.line_key) if key is not None]

    def _of_group(self, group: Any) -> Label:
        if group not in self._labels:
            self._labels[group] = NONE  # ends a circular search
            self._labels[group] = self._infer(group)
        return self._labels[group]

    def _infer(self, group: Any) -> Label:
        members = self._groups[group]
        parts = {place: one.value for place, one in members.items() if one.value is not None}
        if parts.keys() != self._plane:
            return NONE
        event = next(iter(members.values()))
        counterpart = self._serial.get(group)
        reference = self.reference(event) if event.axis else None if counterpart is None else counterpart.value
        return NONE if reference is None else infer(parts, reference)
