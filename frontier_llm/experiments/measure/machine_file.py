"""Writes the results of a calibration or a fit to a machine file, with the source of each number, and as a report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from frontier_llm.config import RunConfig
from frontier_llm.errors import DataError
from frontier_llm.experiments.measure.calibration import Samples, calibrated_rates, whole_steps
from frontier_llm.experiments.measure.run_record import RunRecord
from frontier_llm.files import write_atomically
from frontier_llm.machine.load import (
    OWN_STACK,
    PLACES,
    load_machine,
    own_stack,
    rates,
)
from frontier_llm.machine.rates import Rates, Table
from frontier_llm.planner import uncertainty
from frontier_llm.planner.costs.time import step_s
from frontier_llm.units import GIB, TERA


def write_yaml(path: Path, content: dict[str, Any]) -> None:
    """Write measurements as YAML. A list is on one line up to 200 characters."""
    write_atomically(path, yaml.safe_dump(content, sort_keys=False, width=200))


def write_machine(path: Path, content: dict[str, Any]) -> None:
    """Write a machine file. Raises ConfigError if it cannot be read back."""
    write_yaml(path, content)
    load_machine(str(path))


def value_of(numbers: Rates, constant: str) -> float:
    """Return the value of a constant.

    "fabric_bytes_s/4" is the bandwidth of groups of four devices, "fabric_bytes_s" the bandwidth of the smallest
    groups.
    """
    name, _, devices = constant.partition("/")
    value = getattr(numbers, name)
    if isinstance(value, tuple):
        value = value[numbers.fabric_size.index(int(devices)) if devices else 0]
    return float(value)


def numbers_of(
    fitted: Rates, constants: Iterable[str], provenance: dict[str, str], digits: int = 5
) -> dict[str, dict[str, Any]]:
    """Return section → key → value with tag and source, in the units of a machine file."""
    sections: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for constant in constants:
        section, key, unit = PLACES[constant]
        value = getattr(fitted, constant)
        if isinstance(value, tuple):
            sections[section][key] = {
                size: {"value": rounded(one / unit, digits), **provenance}
                for size, one in zip(fitted.fabric_size, value, strict=True)
            }
        else:
            sections[section][key] = {"value": rounded(value / unit, digits), **provenance}
    return dict(sections)


CALIBRATED = (
    "gemm_efficiency",
    "gemm_k_half",
    "flash_efficiency",
    "flash_backward",
    "hbm_efficiency",
    "kernel_s",
    "launch_s",
    "microbatch_s",
    "step_s",
    "fabric_latency_s",
    "fabric_hop_s",
    "peak_flops",
    "hbm_bytes_s",
    "memory_bytes",
    "reserve_bytes",
    "node_devices",
    "fabric_bytes_s",
)


def machine_content(samples: Samples, config: RunConfig, when: str) -> dict[str, Any]:
    """Return the content of a machine file: the file `local` with each calibrated number, its tag and its source."""
    fitted = calibrated_rates(samples, config, rates(load_machine("local")))
    how = f"{samples.ranks} ranks at once, {samples.device}, {samples.dtype}, shapes of {config.model.name}"
    provenance = {"tag": "measured", "source": f"{uncertainty.CALIBRATED}, {when}: {how}"}
    grouped = ("grouped_share",) if samples.grouped else ()
    numbers = numbers_of(fitted, (*CALIBRATED, *grouped), provenance)
    shapes = [[*(int(size) for size in shape), rounded(seconds * 1e6)] for *shape, seconds in fitted.gemm_shapes]
    device = {
        "name": f"{samples.device}, one of {samples.ranks} ranks",
        **numbers["device"],
        "host_executes": fitted.host_executes,
        "gemm_shapes": {**provenance, "mnk_us": shapes},
    }
    stack = {
        **numbers["stack"],
        "optimizer_bytes": rounded(fitted.optimizer_bytes),
        "accumulate_bytes": fitted.accumulate_bytes,
    }
    if fitted.weight_gradients:
        stack["weight_gradients"] = fitted.weight_gradients
    return {
        "base": "local",
        "title": f"this computer, calibrated {when}",
        "device": device,
        "node": {**numbers["node"], **_together(fitted, samples, provenance)},
        "stacks": {OWN_STACK: stack},
    }


def memory_content(record: RunRecord, when: str) -> dict[str, Any]:
    """Return the content of a machine file: the run's own machine, with the reserve that its first steps measured.

    Raises DataError if the run has not measured the reserve, or ran on CPUs, which do not count the memory of tensors.
    """
    surplus = [stage.surplus_bytes for stage in record.memory if stage.surplus_bytes is not None]
    if not surplus:
        what = "ran on CPUs, which do not count the memory of tensors" if record.memory else "has measured no memory"
        raise DataError(what, fix="give a run that has run its first steps on GPUs", where=str(record.directory))
    machine = load_machine(record.config.machine)
    source = f"first steps of {record.directory.resolve().name} ({record.name}), {when}"
    reserve = {"value": rounded(max(surplus) / GIB), "tag": "measured", "source": source}
    return {
        "base": record.config.machine,
        "title": f"{machine.title}, memory measured",
        "stacks": {own_stack(machine): {"reserve_gib": reserve}},
    }


def weight_gradients_content(base: str, method: str) -> dict[str, Any]:
    """Return the content of a machine file: the machine `base`, and how its torch adds weight gradients."""
    machine = load_machine(base)
    return {
        "base": base,
        "title": f"{machine.title}, torch tested",
        "stacks": {own_stack(machine): {"weight_gradients": method}},
    }


def _together(fitted: Rates, samples: Samples, provenance: dict[str, str]) -> dict[str, Any]:
    """Return the entries of the section `node` that depend on several ranks: contention, waiting and collectives."""
    node: dict[str, Any] = {
        "contention": {**provenance, "share": {count: rounded(share) for count, share in fitted.contention}},
    }
    if samples.ranks > 1:
        waiting = {"meeting_us": fitted.meeting_s * 1e6, "spread": fitted.spread, "sharded": fitted.sharded_slowdown}
        node["waiting"] = {**provenance, **{key: rounded(value) for key, value in waiting.items()}}
    if fitted.node_tables:
        node["collectives"] = collectives(fitted.node_tables, provenance)
    return node


def collectives(tables: Mapping[str, Table], provenance: dict[str, str]) -> dict[str, Any]:
    """Return the content of the key `node.collectives` of a machine file."""
    return {
        **provenance,
        "message_bytes": [int(size) for size in tables["all_reduce"].sizes_bytes],
        "time_us": {
            operation: {
                int(row): [rounded(one * 1e6) for one in times]
                for row, times in zip(table.rows, table.seconds, strict=True)
            }
            for operation, table in tables.items()
        },
    }


def rounded(value: float, digits: int = 5) -> float:
    """Return `value` rounded to this number of significant digits."""
    return float(f"{value:.{digits}g}")


def _grouped_words(fitted: Rates, samples: Samples) -> Iterator[str]:
    """Yield a line about the grouped products of experts if they were measured."""
    if samples.grouped:
        fastest = max(2 * M * N * K * experts / seconds for M, N, K, experts, seconds in samples.grouped)
        yield (
            f"products of experts: {len(samples.grouped)} shapes, at most {fastest / TERA:.3g} TFLOP/s per rank, "
            f"{100 * fitted.grouped_share:.0f} % of the rate of one separate product per expert"
        )


def report(samples: Samples, config: RunConfig) -> str:
    """Return a text of the calibrated constants and of the errors with which they predict the measured steps."""
    fitted = calibrated_rates(samples, config, rates(load_machine("local")))
    M, N, K, seconds = np.array(fitted.gemm_shapes).T
    rate = 2 * M * N * K / seconds / 1e12
    lines = [
        f"matrix products: {len(rate)} shapes, {rate.min():.3g} to {rate.max():.3g} TFLOP/s per rank",
        *_grouped_words(fitted, samples),
        f"memory {fitted.hbm_bytes_s / 1e9:.3g} GB/s per rank, elementwise ops reach "
        f"{100 * fitted.hbm_efficiency:.0f} % of it",
        f"{fitted.reserve_bytes / GIB:.2f} GiB of the fullest rank belong to no tensor (reserve_gib)",
        f"one operation costs {fitted.kernel_s * 1e6:.1f} us to dispatch",
    ]
    for name, table in fitted.node_tables.items():
        small_s = table.seconds[0][0]
        large_s = table.seconds[0][-1]
        large_bytes = table.sizes_bytes[-1]
        speed = f"{small_s * 1e6:.0f} us at 1 KiB, {large_bytes / large_s / 1e9:.2g} GB/s at 16 MiB"
        lines.append(f"{name.replace('_', '-')} over {int(table.rows[0])} ranks: {speed}")
    if len(fitted.contention) > 1:
        lines.append(
            f"if only one of {samples.ranks} ranks is busy, its kernels take {100 * fitted.contention[0][1]:.0f} % "
            "of the time that they take if all are busy"
        )
    if samples.ranks > 1:
        share = f"{100 * fitted.spread:.1f} % of the compute in between"
        meeting = f"{fitted.meeting_s * 1e6:.0f} us at each synchronisation and {share}"
        lines.append(
            f"ranks wait for each other {meeting}; collectives of sharded weights take {fitted.sharded_slowdown:.2g} "
            f"times those above"
        )
    lines.append(
        f"host time within a step: {fitted.launch_s * 1e6:.0f} us per operation, {fitted.step_s * 1e3:.2g} ms per step"
    )
    for name, layout, measured_s in chain(*whole_steps(samples, config)):
        error = float(step_s(config.model, layout, fitted)) / measured_s - 1
        lines.append(f"  {name}: {measured_s:.3f} s measured, prediction from these constants {100 * error:+.1f} %")
    return "\n".join(lines)
