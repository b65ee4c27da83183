"""Writes the results of first_gpu.sh's stages as a Markdown page, and the constants as a machine file. Standard library
only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

TERA = 1e12
GIB = 2**30
# Goals as fractions of the copy bandwidth, of the speed of SDPA's best back-end, and of the measured rate of matrix
# products.
GOALS = {"memory": 0.85, "attention": 0.9, "mfu": 0.6}
_BASES = {"gfx90a": "frontier", "gfx942": "mi300x", "sm_80": "a100"}


def base_machine(architecture: str, name: str) -> str:
    """Return the shipped machine file that is most similar to this device."""
    return ("h100" if "H100" in name else "h200") if architecture == "sm_90" else _BASES.get(architecture, "local")


def render(summary: dict[str, Any]) -> tuple[str, str]:
    """Return the page, and a machine file. The file is '' if too few values were measured."""
    results = {stage["stage"]: stage.get("result") or stage.get("until_then") or {} for stage in summary["stages"]}
    machine = results.get("machine", {})
    kind = (
        "rehearsal on a CPU: sizes are tiny, and times have no meaning"
        if summary["rehearsal"]
        else machine.get("device", "?")
    )
    lines = [f"# First run: {kind}", "", *_machine_lines(machine), "", *_stage_lines(summary), ""]
    ceiling = results.get("ceilings", {})
    copy = ceiling.get("copy_bytes_per_s")
    gemm = ceiling.get("gemm_flops_per_s")
    if copy and gemm:
        lines += [
            "## Ceilings",
            "",
            f"Copies {copy / 1e9:,.0f} GB/s (read and written), bf16 products {gemm / TERA:,.1f} TFLOP/s, both by "
            f"torch.",
            "",
        ]
    timings = [timing for stage in ("ops", "compiled") for timing in results.get(stage, {}).get("timings", [])]
    if timings and copy and gemm:
        lines += ["## Ops", "", *_op_lines(timings, copy, gemm), ""]
    for stage in ("step_1b", "step_3b"):
        if "step_s" in results.get(stage, {}):
            lines += [f"## {stage}", "", *_step_lines(results[stage]), ""]
    if results.get("products", {}).get("products"):
        lines += ["## Matrix products", "", *_product_lines(results["products"]), ""]
    for stage in ("attention", "reference", "families", "waits", "restart", "hang_test", "layout"):
        if results.get(stage):
            lines += [f"## {stage}", "", "```json", json.dumps(results[stage], indent=1), "```", ""]
    content = "" if summary["rehearsal"] else _machine_file(machine, results, timings)
    if content:
        lines += ["## Constants for a machine file (machine.yaml)", "", "```yaml", content.rstrip(), "```", ""]
    return "\n".join(lines), content


def _machine_lines(machine: dict[str, Any]) -> Iterator[str]:
    packages = ", ".join(f"{name} {version}" for name, version in machine.get("packages", {}).items() if version)
    yield (
        f"{machine.get('devices')} x {machine.get('device')} ({machine.get('architecture')}), driver: "
        f"{machine.get('driver')}"
    )
    yield (
        f"Python {machine.get('python')}, {packages}; CUDA {machine.get('cuda')}, HIP {machine.get('hip')}; "
        f"{machine.get('cores')} cores"
    )
    yield f"torch adds weight gradients to fp32 with the method {machine.get('weight_gradients')}"


def _stage_lines(summary: dict[str, Any]) -> Iterator[str]:
    yield "| stage | | seconds | of at most | |"
    yield "|---|---|--:|--:|---|"
    for stage in summary["stages"]:
        why = str(stage.get("why", "")).replace("|", "/").replace("\n", " ")
        yield (
            f"| {stage['stage']}: {stage['about']} | {stage['state']} | {stage['seconds']} | {stage['limit_s']} | "
            f"{why} |"
        )
    yield ""
    yield f"{summary['seconds']:.0f} s together."
    for stage in summary["stages"]:
        if stage.get("log_tail"):
            yield f"\n`{stage['stage']}` ended with:\n\n```text\n" + "\n".join(stage["log_tail"]) + "\n```"


def _op_lines(timings: list[dict[str, Any]], copy: float, gemm: float) -> Iterator[str]:
    """Yield one table row per op: the times of all implementations, and the speed of this project's as a fraction of
    the ceiling.
    """
    by_op: dict[str, dict[str, dict[str, Any]]] = {}
    for timing in timings:
        by_op.setdefault(timing["op"], {})[timing["way"]] = timing
    yield "| op | ours | eager | compiled | best SDPA | ours: share of the ceiling |"
    yield "|---|--:|--:|--:|--:|---|"
    for op, ways in by_op.items():
        fastest = best_sdpa(ways)
        ours = ways.get("ours", ways.get("all", {}))
        share = (
            _share(ours, copy, gemm, ways[fastest]["seconds"] if fastest else None) if ours.get("seconds") else "failed"
        )
        sdpa = f"{_ms(ways[fastest])} ({fastest.removeprefix('sdpa-')})" if fastest else "-"
        yield f"| {op} | {' | '.join(_ms(ways.get(way)) for way in ('ours', 'eager', 'compiled'))} | {sdpa} | {share} |"
    yield ""
    for timing in timings:
        if timing["error"]:
            yield f"- {timing['op']}, {timing['way']}: {timing['error']}"


def best_sdpa(ways: dict[str, dict[str, Any]]) -> str:
    """Return the fastest of SDPA's back-ends that ran, or ''."""
    ran = [way for way, timing in ways.items() if way.startswith("sdpa-") and timing["seconds"]]
    return min(ran, key=lambda way: ways[way]["seconds"], default="")


def _share(ours: dict[str, Any], copy: float, gemm: float, sdpa_s: float | None) -> str:
    if not ours["flops"]:
        return f"of copy bandwidth {_verdict(ours['bytes_moved'] / ours['seconds'] / copy, GOALS['memory'])}"
    rate = ours["flops"] / ours["seconds"]
    text = f"{rate / TERA:.1f} TFLOP/s, {rate / gemm:.0%} of the product rate"
    return f"{text}; of SDPA's best {_verdict(sdpa_s / ours['seconds'], GOALS['attention'])}" if sdpa_s else text


def _verdict(share: float, goal: float) -> str:
    return f"{share:.0%} ({'meets' if share >= goal else 'misses'} {goal:.0%})"


def _ms(timing: dict[str, Any] | None) -> str:
    return f"{timing['seconds'] * 1e3:.3f} ms" if timing and timing["seconds"] else "-"


def _step_lines(step: dict[str, Any]) -> Iterator[str]:
    mfu = step["mfu_of_measured_gemm_rate"]
    idle = step["device_idle_share"]
    yield (
        f"{step['tokens_per_s']:,.0f} tokens/s, {step['step_s'] * 1e3:.1f} ms per step of 2 microbatches of "
        f"{step['micro_batch']}, recompute "
        f"{step['recompute']}; {step['model_flops_per_s'] / TERA:.1f} model TFLOP/s"
        + (f", MFU of the measured product rate {_verdict(mfu, GOALS['mfu'])}" if mfu else "")
        + f"; {step['memory_gib']:.1f} GiB; ready after {step['start_s']:.1f} s."
    )
    if idle is not None:
        yield (
            f"The device is idle for {idle:.0%} of a step (it waits for the host or has no work); "
            f"{step['launches_per_step']:,.0f} launches per step."
        )
    if "bitwise_equal" in step:
        equal = "equal to the bit" if step["bitwise_equal"] else "NOT EQUAL"
        fastest = "equal to the bit" if step["fastest_bitwise_equal"] else "not equal to the bit"
        yield f"{len(step['losses'])} losses of two runs with deterministic ops: {equal}."
        yield f"With the fastest ops they are {fastest}."
        yield f"Deterministic ops add {step['deterministic_price']:.1%} to a step."
    yield "\n| kernel | ms per step | share | calls per step |\n|---|--:|--:|--:|"
    for row in step["kernels"]:
        name = row["kernel"].replace("|", "/")
        share = row["seconds_per_step"] / step["step_s"]
        yield f"| `{name}` | {row['seconds_per_step'] * 1e3:.2f} | {share:.1%} | {row['calls_per_step']:.0f} |"


def _product_lines(measured: dict[str, Any]) -> Iterator[str]:
    devices = measured["devices"]
    yield f"{devices} device(s) busy at once for {measured['measured_for_s']:.0f} s; the slowest device counts."
    yield f"A product then takes {measured['together_over_alone']:.2f} times as long as on one device alone."
    yield "\n| product | M x N x K | all busy | TFLOP/s | fastest device | one device alone |"
    yield "|---|---|--:|--:|--:|--:|"
    for row in measured["products"]:
        M, N, K = row["mnk"]
        rate = 2 * M * N * K / row["seconds"] / TERA
        times = " | ".join(f"{row[name] * 1e3:.3f} ms" for name in ("fastest_device_s", "alone_s"))
        yield f"| {row['product']} | {M} x {N} x {K} | {row['seconds'] * 1e3:.3f} ms | {rate:.1f} | {times} |"


def _machine_file(machine: dict[str, Any], results: dict[str, Any], timings: list[dict[str, Any]]) -> str:
    """Return the YAML of a machine file for plans on this machine. JSON numbers and strings are valid YAML."""
    ceiling = results.get("ceilings", {})
    if not ceiling.get("gemm_flops_per_s"):
        return ""
    where = f"scripts/first_gpu.sh on {machine['device']}, torch {machine['packages']['torch']}"

    def number(value: float) -> str:
        return json.dumps({"value": float(f"{value:.4g}"), "tag": "measured", "source": where})

    # The peaks are the measured rates, so efficiencies refer to measured rates.
    lines = [
        f"base: {base_machine(machine['architecture'], machine['device'])}",
        f"title: {json.dumps(machine['device'] + ', first measurements')}",
        "device:",
        f"  peak_tflops: {number(ceiling['gemm_flops_per_s'] / TERA)}",
        f"  memory_gbps: {number(ceiling['copy_bytes_per_s'] / 1e9)}",
        *([f"  memory_gib: {number(machine['memory_gib'])}"] if machine.get("memory_gib") else []),
    ]
    stack = ["    gemm_efficiency: " + number(1.0)]
    if method := machine.get("weight_gradients"):
        stack.append(f"    weight_gradients: {method}")
    if measured := results.get("products", {}).get("products"):
        devices = results["products"]["devices"]
        source = json.dumps(f"{where}, {devices} device(s) busy for {results['products']['measured_for_s']:.0f} s")
        shapes = [[*row["mnk"], float(f"{row['seconds'] * 1e6:.5g}")] for row in measured]
        lines.append(f"  gemm_shapes: {{tag: measured, source: {source}, mnk_us: {json.dumps(shapes)}}}")
        stack.append("    accumulate_bytes: 0  # the measured weight gradients include the accumulation")
    if (safe := results.get("hang_test", {})).get("in_flight"):
        source = json.dumps(safe["source"])
        lines.append(f"in_flight: {{mode: {safe['in_flight']}, tag: measured, source: {source}}}")
    if memory := safe.get("communicator_memory"):
        reserve_gib = memory["measured_bytes"] / GIB
        stack.append(f"    reserve_gib: {number(reserve_gib)}  # {memory['communicators']} communicators")
    ours = {timing["op"]: timing for timing in timings if timing["way"] == "ours" and timing["seconds"]}
    if "attention" in ours:
        # Training uses the fastest back-end that the stage `attention` has found.
        fastest = min(results.get("attention", {}).get("attention", {}).get("seconds", {}).values(), default=None)
        attention_s = fastest or ours["attention"]["seconds"]
        rate = ours["attention"]["flops"] / attention_s / ceiling["gemm_flops_per_s"]
        stack += ["    flash_efficiency: " + number(rate), "    flash_backward: " + number(1.0)]
    shares = [
        one["bytes_moved"] / one["seconds"] / ceiling["copy_bytes_per_s"] for one in ours.values() if one["bytes_moved"]
    ]
    if shares:
        stack.append("    hbm_efficiency: " + number(min(sorted(shares)[len(shares) // 2], 1.0)))
    return "\n".join([*lines, "stacks:", "  frontier-llm:", *stack]) + "\n"
