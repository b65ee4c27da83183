"""Records the tensor operations and the communication of one rank's step, each with the line that called it.

An operation of one microbatch, layer and direction has a key that does not depend on the layout: the lines on the
Python stack and a counter. In backward, the key also has the lines that created the autograd node in forward. The
serial run and the run on several ranks therefore use equal keys for values with the same meaning.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

EventId = tuple[int, int]  # global rank, and number of the event on this rank
Site = tuple[tuple[CodeType, int], ...]  # code object and line number, innermost first
Key = tuple[Any, ...]

PACKAGE = Path(__file__).parents[2]
# Lines of these files are not used to identify a value, because they differ between layouts or say nothing about the
# value.
_TRANSPARENT = ("comm/", "parallel/pipeline.py", "certificate/", "training/", "model/recompute.py")
# If a value was computed in one of these files, a message names the line that called the file.
_HIDDEN = (
    "comm/",
    "ops/",
    "certificate/",
    "parallel/pipeline.py",
    "parallel/tensor/gradients.py",
    "training/step.py",
    "optim/registry.py",
    "run/",
)


@dataclass(eq=False, slots=True)
class Event:
    """One tensor operation or communication of a rank."""

    id: EventId
    key: Key | None  # line and operation; None: the value has no counterpart in the serial run
    line_key: Key | None  # key of the line without the operation; set for the last operation of a line
    site: Site
    forward_site: Site  # in backward: the lines that created the autograd node
    sources: tuple[EventId, ...]  # events that have written the inputs
    value: Tensor | None  # copy of the result, if it is floating-point
    operation: str
    axis: str = ""  # axis of a communication
    summed: bool = False  # True if the communication adds its inputs


@cache
def package_path(filename: str) -> str:
    """Return the path inside the package, '' for libraries, and the complete path for other files."""
    path = Path(filename)
    if PACKAGE in path.parents:
        return path.relative_to(PACKAGE).as_posix()
    library = "site-packages" in path.parts or path.is_relative_to(sys.base_prefix) or filename.startswith("<")
    return "" if library else path.as_posix()


@cache
def _is_counted(filename: str) -> bool:
    relative = package_path(filename)
    return bool(relative) and not relative.startswith(_TRANSPARENT)


def stack() -> Site:
    """Return the lines of the package and of plugins on the stack, innermost first, up to the check itself."""
    frame = sys._getframe(1)
    lines: list[tuple[CodeType, int]] = []
    while frame is not None:
        code = frame.f_code
        relative = package_path(code.co_filename)
        if relative.startswith("certificate/"):
            if lines:
                break
        elif relative:
            lines.append((code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(lines)


def counted(site: Site) -> Site:
    """Return the lines that identify a value on every layout, without those of `_TRANSPARENT`."""
    return tuple(line for line in site if _is_counted(line[0].co_filename))


def _outside_of_function(lines: Site) -> Site:
    """Return the lines up to the call of an autograd function, without the lines inside of the function's forward.

    The first operation inside of a forward may depend on the layout.
    """
    inside = [index for index, (code, _) in enumerate(lines) if code.co_varnames[:1] == ("ctx",)]
    return lines[inside[-1] + 1 :] if inside else lines


def is_own(line: tuple[CodeType, int]) -> bool:
    """Return True if a message can name the line: the line belongs neither to the check nor to a library."""
    relative = package_path(line[0].co_filename)
    return bool(relative) and not relative.startswith("certificate/")


def visible(site: Site) -> tuple[CodeType, int] | None:
    """Return the innermost line that a message names: the caller of `comm` and `ops`."""
    return next((line for line in site if not package_path(line[0].co_filename).startswith(_HIDDEN)), None)


def innermost(site: Site) -> tuple[CodeType, int] | None:
    """Return the innermost line of the package or of a plugin."""
    return next((line for line in site if is_own(line)), None)


def step_line(site: Site) -> tuple[CodeType, int] | None:
    """Return the innermost line of the training step."""
    return next((line for line in site if package_path(line[0].co_filename) == "training/step.py"), None)


def waiting_line(site: Site) -> str:
    """Return the line that started a communication for which a rank waits."""
    return text_of(visible(site) or step_line(site))


def text_of(line: tuple[CodeType, int] | None) -> str:
    """Return for example 'frontier_llm/parallel/tensor/linear.py:183 (_ColumnLinear.backward)'."""
    if line is None:
        return "an unknown line"
    code, number = line
    path = Path(code.co_filename)
    name = f"{PACKAGE.name}/{package_path(code.co_filename)}" if PACKAGE in path.parents else str(path)
    return f"{name}:{number} ({code.co_qualname})"


@cache
def _effect(function: Any) -> tuple[bool, tuple[int, ...]]:
    """Return (True if the operation only makes a view, positions of the arguments that it writes)."""
    schema = function._schema
    written = tuple(
        index
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    aliases = any(result.alias_info is not None for result in schema.returns)
    return aliases and not written, written


class Recorder(TorchDispatchMode):
    """Records the events of one rank, while it is active and not quiet."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.events: list[Event] = []
        self.microbatch: int | None = None  # number in the step's global batch; None outside of the pipeline
        self.layer: int | None = None
        self.accumulators: set[int] = set()  # storages to which several microbatches add
        self.contributions: dict[tuple[int, int], list[EventId]] = defaultdict(list)
        self._quiet = 0
        self._storages: dict[int, UntypedStorage] = {}
        self._writers: dict[int, list[EventId]] = {}
        self._nodes: dict[int, tuple[int | None, Site]] = {}  # layer and lines of each autograd node
        self._visits: Counter[Key] = Counter()
        # newest event; if its line runs one more operation, `line_key` moves to the new event
        self._open: Event | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and record its result."""
        result = func(*args, **(kwargs or {}))
        if not self._quiet:
            self._record(func, args, kwargs or {}, result)
        return result

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Stop recording inside of this context."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def writers(self, storage: int) -> list[EventId]:
        """Return the events that have written a memory."""
        return self._writers.get(storage, [])

    def sources_of(self, x: Tensor) -> tuple[EventId, ...]:
        """Return the events that have written the memory of `x`."""
        storage = self._storage(x)
        if storage in self.accumulators:
            return tuple(self.contributions.get((storage, int(x.storage_offset())), ()))
        return tuple(self._writers.get(storage, ()))

    def communicated(
        self, operation: str, axis: str, buffer: Tensor, summed: bool, sources: tuple[EventId, ...], site: Site
    ) -> None:
        """Record that a communication has written `buffer`. `site` has the lines that started it."""
        with self.quiet():
            value = buffer.detach().clone() if buffer.is_floating_point() else None
        key = ("communication", axis, operation, self._visits[axis, operation])
        self._visits[axis, operation] += 1
        event = self._append(key, site, sources, value, operation)
        event.axis = axis
        event.summed = summed
        self._open = None
        self._writers[self._storage(buffer)] = [event.id]

    def _storage(self, x: Tensor) -> int:
        """Return the number of the memory of `x`. The memory is kept, so that no later tensor gets the same number."""
        storage = x.untyped_storage()
        self._storages[storage._cdata] = storage
        return storage._cdata

    def _record(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        is_view, written = _effect(func)
        if is_view:
            return
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if written:
            returned = [args[index] if index < len(args) else kwargs.get("out") for index in written]
        else:
            returned = tree_leaves(result)
        outputs = [x for x in returned if isinstance(x, Tensor)]
        if not outputs:
            return
        sources = tuple(dict.fromkeys(source for x in inputs for source in self.sources_of(x)))
        if not sources and not any(x.is_floating_point() for x in outputs):
            return  # skip integers, because a cache of the package may create them on any rank
        site = stack()
        base = self._base(site)
        for number, output in enumerate(outputs):
            value = output.detach().clone() if output.is_floating_point() else None
            event = self._append(None, site, sources, value, f"{func}:{number}")
            if self._storage(output) not in self.accumulators:
                self._name(event, base)
            self._note_writer(event, output, bool(written))

    def _note_writer(self, event: Event, output: Tensor, is_in_place: bool) -> None:
        storage = self._storage(output)
        if storage not in self.accumulators:
            before = self._writers.get(storage, []) if is_in_place else []
            self._writers[storage] = [*before, event.id]
        elif self.microbatch is not None:  # outside of the microbatches the gradients are only set to zero
            self.contributions[storage, int(output.storage_offset())].append(event.id)

    def _append(
        self, key: Key | None, site: Site, sources: tuple[EventId, ...], value: Tensor | None, operation: str
    ) -> Event:
        number = (self.rank, len(self.events))
        event = Event(number, key, None, site, self._forward_site(), sources, value, operation)
        self.events.append(event)
        return event

    def _forward_site(self) -> Site:
        node = torch._C._current_autograd_node()
        return () if node is None else self._nodes.get(node._sequence_nr(), (None, ()))[1]

    def _base(self, site: Site) -> Key:
        """Return microbatch, direction, layer and lines of the operation that runs."""
        lines = counted(site)
        node = torch._C._current_autograd_node()
        if node is None:
            newest = torch.autograd._get_sequence_nr() - 1
            self._nodes.setdefault(newest, (self.layer, _outside_of_function(lines)))
            return (self.microbatch, "forward", self.layer, lines)
        layer, created = self._nodes.get(node._sequence_nr(), (None, ()))
        return (self.microbatch, "backward", layer, created, lines)

    def _name(self, event: Event, base: Key) -> None:
        """Set the keys of an event of a microbatch. Consecutive operations of a line share a line key."""
        before = self._open
        self._open = None
        if self.microbatch is None or event.value is None:
            return
        event.key = (base, event.operation, self._visits[base, event.operation])
        self._visits[base, event.operation] += 1
        if before is not None and before.line_key is not None and before.line_key[0] == base:
            event.line_key = before.line_key
            before.line_key = None
        else:
            event.line_key = (base, self._visits[base])
            self._visits[base] += 1
        self._open = event
