"""What a calibration found: as a machine file, each number with its samples as its source, and as a report."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from frontier_llm.config import RunConfig
from frontier_llm.experiments.measure.calibration import Samples, calibrated_rates, whole_steps
from frontier_llm.files import write_atomically
from frontier_llm.machine.load import (
    OWN_STACK,
    PLACES,
    load_machine,
    rates,
)
from frontier_llm.machine.rates import Rates, Table
from frontier_llm.planner.costs.time import step_s


def write_yaml(path: Path, content: dict[str, Any]) -> None:
    """Write a table of what was measured; a list stays on one line up to 200 columns."""
    write_atomically(path, yaml.safe_dump(content, sort_keys=False, width=200))


def write_machine(path: Path, content: dict[str, Any]) -> None:
    """Write a machine file. Raises ConfigError where it cannot be read back."""
    write_yaml(path, content)
    load_machine(str(path))


def machine_content(samples: Samples, config: RunConfig, when: str) -> dict[str, Any]:
    """The machine file's mapping: `local` with every calibrated number replaced, tagged and sourced."""
    fitted = calibrated_rates(samples, config, rates(load_machine("local")))
    how = f"{samples.ranks} ranks at once, {samples.device}, {samples.dtype}, shapes of {config.model.name}"
    provenance = {"tag": "measured", "source": f"frontier-llm calibrate, {when}: {how}"}
    return {
        "base": "local",
        "title": f"this computer, calibrated {when}",
        "device": _device(fitted, samples, provenance),
        "node": _node(fitted, samples, provenance),
        "stacks": {
            OWN_STACK: {
                **_numbers(fitted, "stack", provenance),
                "optimizer_bytes": rounded(fitted.optimizer_bytes),
                "accumulate_bytes": fitted.accumulate_bytes,
            }
        },
    }


def _number(value: float, provenance: dict[str, str]) -> dict[str, Any]:
    return {"value": rounded(value), **provenance}


CALIBRATED = (
    "peak_flops",
    "memory_bytes",
    "hbm_bytes_s",
    "node_devices",
    "fabric_latency_s",
    "fabric_hop_s",
    "gemm_efficiency",
    "gemm_k_half",
    "flash_efficiency",
    "flash_backward",
    "hbm_efficiency",
    "kernel_s",
    "launch_s",
    "microbatch_s",
    "step_s",
)


def _numbers(fitted: Rates, section: str, provenance: dict[str, str]) -> dict[str, Any]:
    """The calibrated numbers of a section of the file, under its keys and in their units."""
    places = (
        (field, key, unit) for field, (place, key, unit) in PLACES.items() if place == section and field in CALIBRATED
    )
    return {key: _number(getattr(fitted, field) / unit, provenance) for field, key, unit in places}


def _device(fitted: Rates, samples: Samples, provenance: dict[str, str]) -> dict[str, Any]:
    shapes = [[*(int(size) for size in shape), rounded(seconds * 1e6)] for *shape, seconds in fitted.gemm_shapes]
    return {
        "name": f"{samples.device}, one of {samples.ranks} ranks",
        **_numbers(fitted, "device", provenance),
        "host_executes": fitted.host_executes,
        "gemm_shapes": {**provenance, "mnk_us": shapes},
    }


def _node(fitted: Rates, samples: Samples, provenance: dict[str, str]) -> dict[str, Any]:
    fabric = dict(zip(fitted.fabric_size, fitted.fabric_bytes_s, strict=True))
    node: dict[str, Any] = {
        **_numbers(fitted, "node", provenance),
        "fabric_gbps": {size: _number(speed / 1e9, provenance) for size, speed in fabric.items()},
        "contention": {**provenance, "share": {count: rounded(share) for count, share in fitted.contention}},
    }
    if samples.ranks > 1:
        waiting = {"meeting_us": fitted.meeting_s * 1e6, "spread": fitted.spread, "sharded": fitted.sharded_slowdown}
        node["waiting"] = {**provenance, **{key: rounded(value) for key, value in waiting.items()}}
    if fitted.node_tables:
        node["collectives"] = collectives(fitted.node_tables, provenance)
    return node


def collectives(tables: Mapping[str, Table], provenance: dict[str, str]) -> dict[str, Any]:
    """`node.collectives` of a machine file."""
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


def rounded(value: float) -> float:
    """Five digits."""
    return float(f"{value:.5g}")


def report(samples: Samples, config: RunConfig) -> str:
    """The calibrated constants and how well they give back the samples."""
    fitted = calibrated_rates(samples, config, rates(load_machine("local")))
    M, N, K, seconds = np.array(fitted.gemm_shapes).T
    rate = 2 * M * N * K / seconds / 1e12
    lines = [
        f"matrix products: {len(rate)} shapes, {rate.min():.3g} to {rate.max():.3g} TFLOP/s per rank",
        f"memory {fitted.hbm_bytes_s / 1e9:.3g} GB/s per rank, elementwise ops reach "
        f"{100 * fitted.hbm_efficiency:.0f} % of it",
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
            f"with one of {samples.ranks} ranks busy its kernels take {100 * fitted.contention[0][1]:.0f} % of their "
            f"time"
        )
    if samples.ranks > 1:
        meeting = (
            f"{fitted.meeting_s * 1e6:.0f} us at each meeting and {100 * fitted.spread:.1f} % of the compute between"
        )
        lines.append(
            f"ranks wait for each other {meeting}; collectives of sharded weights take {fitted.sharded_slowdown:.2g} "
            f"times those above"
        )
    lines.append(
        f"within a step: {fitted.launch_s * 1e6:.0f} us of the host per operation, {fitted.step_s * 1e3:.2g} ms per "
        f"step"
    )
    for name, layout, measured_s in chain(*whole_steps(samples, config)):
        error = float(step_s(config.model, layout, fitted)) / measured_s - 1
        lines.append(f"  {name}: {measured_s:.3f} s, from these constants {100 * error:+.1f} %")
    return "\n".join(lines)
