"""Machine files: read YAML into a `Machine`, with file and line of each error; convert a `Machine` into `Rates`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from frontier_llm.blueprint.items import SoftwareOptions
from frontier_llm.config.load import as_problem, available, compose, find_file, merge
from frontier_llm.errors import ConfigError, Problem, suggest
from frontier_llm.machine.env import Vendor, vendor_of_machine
from frontier_llm.machine.rates import Rates, Table
from frontier_llm.machine.schema import Machine, Number, Stack, vendor_of
from frontier_llm.units import GIB

OWN_STACK = "frontier-llm"  # name of this program's own software stack in machine files


def machine_names() -> list[str]:
    """Return the names of the machine files that are part of the package."""
    return available("machines")


def load_machine(name_or_path: str) -> Machine:
    """Load a machine by its shipped name or its path.

    `base:` names another machine file whose values are the defaults. `base:` in a stack names another stack of the
    file. Raises ConfigError with file, line, key and rule of every violation. For an unknown name the error gives the
    closest known name.
    """
    path = find_file(name_or_path, "machines")
    state = path.stat()
    return _read_machine(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=16)  # a search of layouts checks thousands of runs on one machine, and YAML takes 50 ms
def _read_machine(path: Path, mtime_ns: int, size_bytes: int) -> Machine:
    """Read a machine file. The result is cached until the modification time or the size of the file changes."""
    content, files = compose(path, "machines")
    content.setdefault("environment", files[-1].stem)  # the last file of the chain has no base
    if isinstance(device := content.get("device"), dict) and "vendor" not in device:
        content["device"] = {**device, "vendor": _stated_vendor(device.get("architecture"), content["environment"])}
    content["stacks"] = _stacks(content.get("stacks"), str(path))
    try:
        return Machine.model_validate({"name": path.stem, **content})
    except ValidationError as error:
        lines = {key: place for file in reversed(files) for key, place in _lines(file)}
        raise ConfigError([_problem(path, lines, detail) for detail in error.errors()]) from None


def _stated_vendor(architecture: Any, environment: Any) -> Vendor:
    """Return the GPU vendor for a machine file without the key `device.vendor`.

    The vendor follows from the architecture, or else from the machine named by `environment`.
    """
    named = vendor_of(str(architecture))
    return vendor_of_machine(str(environment)) if named == "none" else named


def _stacks(stacks: Any, where: str) -> Any:
    """Resolve `base:` between the stacks of one machine."""
    if not isinstance(stacks, dict):
        return stacks

    def resolve(name: str, seen: tuple[str, ...]) -> Any:
        stack = stacks[name]
        if not isinstance(stack, dict) or "base" not in stack:
            return stack
        base = str(stack["base"])
        if base not in stacks or base in (*seen, name):
            reason = "forms a circle" if base in stacks else "is not a stack of this file"
            raise ConfigError(
                f"`base: {base}` {reason}",
                suggest(base, [other for other in stacks if other != name]),
                f"{where}: stacks.{name}",
            )
        return merge(resolve(base, (*seen, name)), {key: value for key, value in stack.items() if key != "base"})

    return {name: resolve(name, ()) for name in stacks}


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, file:line) of every key in the YAML node tree."""

    def visit(node: yaml.Node | None, section: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                yield section + key.value, f"{path}:{key.start_mark.line + 1}"
                yield from visit(value, f"{section}{key.value}.")

    return visit(yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader), "")


def _problem(path: Path, lines: dict[str, str], detail: Any) -> Problem:
    """Return the problem of a pydantic error, with the line of the nearest key that exists in the file."""
    problem = as_problem(Machine, detail)
    sections = itertools.accumulate(problem.where.split("."), "{}.{}".format)
    place = next((lines[section] for section in reversed(list(sections)) if section in lines), f"{path}:1")
    fix = problem.fix
    if detail["type"] == "missing":
        fix += " with value, tag and source"
    # the file has a plain number, but the schema requires a number with tag and source
    elif detail["type"].startswith("model_") and isinstance(detail["input"], int | float):
        fix = "write {value: NUMBER, tag: measured|published|estimated, source: TEXT}"
    return Problem(where=f"{place}: {problem.where}", what=problem.what, fix=fix)


def stack_name(machine: Machine, stack: str | None) -> str:
    """Return `stack`, or the machine's default stack if it is None or empty.

    Raises ConfigError with the closest name for an unknown stack.
    """
    name = stack or machine.default_stack
    if name not in machine.stacks:
        raise ConfigError(f"{machine.name} has no software stack {name!r}", suggest(name, machine.stacks))
    return name


def own_stack(machine: Machine) -> str:
    """Return the name of this program's stack, or the file's default stack if the machine file does not have it."""
    return OWN_STACK if OWN_STACK in machine.stacks else machine.default_stack


def rates(machine: Machine, stack: str | None = None) -> Rates:
    """Return the numbers of a machine and one of its software stacks as plain floats in SI units.

    The machine's limit on communications in flight is applied only to this program's own stack. Other software has its
    own rules.
    """
    name = stack_name(machine, stack)
    s = machine.stacks[name]
    device = machine.device
    node = machine.node
    network = machine.network
    table = machine.allreduce
    holders = {"stack": s, "device": device, "node": node, "network": network}
    numbers: dict[str, Any] = {
        field: getattr(holders[section], key).value * unit
        for field, (section, key, unit) in PLACES.items()
        if field != "fabric_bytes_s"
    }
    numbers["node_network_bytes_s"] *= node.nics.value
    numbers |= {field: int(numbers[field]) for field in ("compute_units", "node_devices")}
    numbers |= {option.name: getattr(s, option.name) for option in fields(SoftwareOptions)}
    fabric = sorted(node.fabric_gbps.items())
    collectives = node.collectives
    waiting = node.waiting
    if waiting:
        numbers |= {
            "meeting_s": waiting.meeting_us * 1e-6,
            "spread": waiting.spread,
            "sharded_slowdown": waiting.sharded,
        }
    if collectives:
        numbers["node_tables"] = {
            name: _table(rows, collectives.message_bytes) for name, rows in collectives.time_us.items()
        }
    if device.gemm_shapes:
        numbers["gemm_shapes"] = tuple((M, N, K, us * 1e-6) for M, N, K, us in device.gemm_shapes.mnk_us)
    return Rates(
        **numbers,
        one_in_flight=name == own_stack(machine) and machine.in_flight_on(device.architecture).mode == "one",
        nodes=int(node.count.value),
        fabric_size=tuple(size for size, _ in fabric),
        fabric_bytes_s=tuple(speed.value * 1e9 for _, speed in fabric),
        all_reduce_table=_table(table.time_us, table.message_bytes) if table else None,
        contention=tuple(sorted(node.contention.share.items())) if node.contention else (),
        host_executes=device.host_executes,
        safe_bytes=(device.safe_gib or device.memory_gib).value * GIB,
        slow=_slow_values(machine, s),
    )


# Constants of a stack that are shares: of the peak rate, of the links' bandwidth, or of overlapped communication.
SHARES = ("gemm_efficiency", "flash_efficiency", "fabric_share", "dp_overlap", "gather_overlap", "tp_overlap")


def _slow_values(machine: Machine, stack: Stack) -> dict[str, float]:
    """Return field → value of the stack `slow_as`, for estimated shares that are lower in that stack."""
    if not stack.slow_as:
        return {}
    other = machine.stacks[stack.slow_as]
    slow = {}
    for name in SHARES:
        own = getattr(stack, name)
        lower = getattr(other, name).value
        if own.tag == "estimated" and lower < own.value:
            slow[name] = lower
    return slow


def _table(time_us: Mapping[int, tuple[float, ...]], message_bytes: tuple[int, ...]) -> Table:
    seconds = tuple(tuple(us * 1e-6 for us in row) for row in time_us.values())
    return Table(tuple(map(float, time_us)), tuple(map(float, message_bytes)), seconds)


# Field of Rates → section and key of the machine file, and the key's unit in SI units. Used by `rates`, by `--explain`,
# and by the commands that write measured or fitted values to machine files.
PLACES: dict[str, tuple[str, str, float]] = {
    "gemm_efficiency": ("stack", "gemm_efficiency", 1.0),
    "gemm_k_half": ("stack", "gemm_k_half", 1.0),
    "grouped_share": ("stack", "grouped_share", 1.0),
    "unaligned_penalty": ("stack", "unaligned_penalty", 1.0),
    "linear_speedup": ("stack", "linear_speedup", 1.0),
    "flash_efficiency": ("stack", "flash_efficiency", 1.0),
    "flash_backward": ("stack", "flash_backward", 1.0),
    "hbm_efficiency": ("stack", "hbm_efficiency", 1.0),
    "kernel_s": ("stack", "kernel_us", 1e-6),
    "launch_s": ("stack", "launch_us", 1e-6),
    "microbatch_s": ("stack", "microbatch_us", 1e-6),
    "step_s": ("stack", "step_us", 1e-6),
    "tp_overlap": ("stack", "tp_overlap", 1.0),
    "chunk_overlap": ("stack", "chunk_overlap", 1.0),
    "dp_overlap": ("stack", "dp_overlap", 1.0),
    "gather_overlap": ("stack", "gather_overlap", 1.0),
    "fabric_share": ("stack", "fabric_share", 1.0),
    "network_share": ("stack", "network_share", 1.0),
    "reserve_bytes": ("stack", "reserve_gib", GIB),
    "fragmentation": ("stack", "fragmentation", 1.0),
    "fabric_bytes_s": ("node", "fabric_gbps", 1e9),
    "fabric_latency_s": ("node", "fabric_latency_us", 1e-6),
    "fabric_hop_s": ("node", "fabric_hop_us", 1e-6),
    "network_efficiency": ("network", "efficiency", 1.0),
    "network_crowding": ("network", "crowding", 1.0),
    "network_latency_s": ("network", "latency_us", 1e-6),
    "network_hop_s": ("network", "hop_us", 1e-6),
    "peak_flops": ("device", "peak_tflops", 1e12),
    "hbm_bytes_s": ("device", "memory_gbps", 1e9),
    "memory_bytes": ("device", "memory_gib", GIB),
    "compute_units": ("device", "compute_units", 1.0),
    "speed_variation": ("device", "speed_variation", 1.0),
    "node_devices": ("node", "devices", 1.0),
    "node_network_bytes_s": ("node", "nic_gbps", 1e9),
}


def provenance(machine: Machine, stack: str | None, field: str, group: int | None = None) -> Number:
    """Return the entry of the machine file (value, tag and source) from which a field of Rates is computed.

    The fabric bandwidth has an entry for each group size. The entry for the group size closest to `group` is returned,
    or the entry for the largest group for None.
    """
    section, key, _ = PLACES[field]
    holder = machine.stacks[stack_name(machine, stack)] if section == "stack" else getattr(machine, section)
    numbers = getattr(holder, key)
    if isinstance(numbers, dict):
        return numbers[min(numbers, key=lambda size: abs(size - (group or max(numbers))))]
    return numbers
