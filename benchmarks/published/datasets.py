"""Converts published measurements to models, layouts and seconds. Reads two formats: vTrain's CSV and a throughput TSV.

A row gives machine and stack, the training setup, and the time of a step. Only seconds per step and tokens/s are
compared. If a source gives only TFLOP/s, its stated convention converts them to tokens/s first.
"""

from __future__ import annotations

import csv
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.published.rows import (
    NAMED_SETTINGS,
    Row,
    indivisible,
    layout_of_row,
    model_of,
    number_of,
    schedule_of,
    seconds_of_row,
    shape_of,
    software_of,
    unstated_of,
)
from frontier_llm.blueprint.layout import Layout
from frontier_llm.config import ModelConfig
from frontier_llm.config.load import find_file
from frontier_llm.errors import DataError, FrontierError, unreadable
from frontier_llm.machine.load import load_machine
from frontier_llm.schedule import names

PUBLISHED = Path(__file__).parent
MACHINES = PUBLISHED / "machines"
SHIPPED = ("vtrain_a100_multi.csv", "vtrain_a100_single.csv", "throughput.tsv", "collected.tsv")

# Rows that no constant was fitted on and that no limit of a test uses. docs/generated/planner_accuracy.md shows them.
FURTHER = ("mi250x_rows.tsv", "dgxc_dense.tsv", "dgxc_moe.tsv", "torchtitan_asynctp.tsv", "primus_schedules.tsv")


@dataclass(frozen=True)
class PublishedRun:
    key: str  # identity of the row; decides whether the row is fitted or unseen
    dataset: str
    machine: str
    stack: str
    model: ModelConfig
    layout: Layout
    seconds: float  # step time
    # False: degrees or batch are not stated, or the machine file belongs to a similar cluster. Such a row is never
    # fitted.
    known: bool
    # The source's parallelism has no equivalent here (AxoNN's 4D), or its memory is not described completely. Such a
    # row is excluded from the checks of memory and uncertainty.
    approximate: bool = False
    # Fields of the layout that the source does not give. The fastest value that fits is assumed.
    unstated: tuple[str, ...] = ()
    # Fields of Rates in which this run differs from its stack.
    software: Mapping[str, Any] = field(default_factory=dict)
    memory_gib: float | None = None

    @property
    def may_be_fitted(self) -> bool:
        """True if `fit_machines` may use this row: half of all rows, selected by a hash of the key."""
        return self.known and zlib.crc32(self.key.encode()) % 2 == 0


# Ids of the rows on which constants were fitted, one per line. `python -m benchmarks.planner.fit_machines` writes it.
FITTED_ROWS = PUBLISHED / "fitted_rows.txt"


@cache
def fitted_ids() -> frozenset[str]:
    """Return the ids of the rows on which a constant was fitted."""
    return frozenset(FITTED_ROWS.read_text(encoding="utf-8").splitlines())


def is_fitted(row: PublishedRun) -> bool:
    """True if a shipped constant was fitted on this row."""
    return row.key in fitted_ids()


COMPUTE = ("gemm_efficiency", "gemm_k_half", "hbm_efficiency", "kernel_s", "step_s")
TENSOR = ("fabric_bytes_s/2", "fabric_bytes_s/4", "fabric_bytes_s/8", "fabric_latency_s")
SPREAD = ("network_efficiency", "network_crowding")

# Constants that the fitted half of each (machine, stack)'s rows determines (benchmarks/planner/fit_machines.py).
FITTED: dict[tuple[str, str], tuple[str, ...]] = {
    ("vtrain-a100", "megatron-lm"): (*COMPUTE, *TENSOR, *SPREAD, "microbatch_s", "network_latency_s"),
    ("vtrain-a100-node", "megatron-lm"): (*COMPUTE, *TENSOR, "launch_s", "microbatch_s", "fabric_hop_s"),
    ("a100", "megatron-lm"): (
        "gemm_efficiency",
        "hbm_efficiency",
        "kernel_s",
        "fabric_bytes_s",
        "fabric_latency_s",
        *SPREAD,
    ),
    ("jean-zay", "megatron-deepspeed"): (
        *COMPUTE,
        *TENSOR,
        *SPREAD,
        "microbatch_s",
        "network_latency_s",
        "unaligned_penalty",
    ),
    ("llm-foundry-a100", "llm-foundry"): (*COMPUTE, "flash_efficiency", "flash_backward"),
    ("llm-foundry-a100-40", "llm-foundry"): (*COMPUTE, "flash_efficiency", "flash_backward", "network_efficiency"),
    ("llm-foundry-h100", "llm-foundry"): (*COMPUTE, "flash_efficiency", "flash_backward", "network_efficiency"),
    ("llm-foundry-h100", "llm-foundry-fp8"): ("linear_speedup",),
    ("torchtitan-a100", "torchtitan"): ("gemm_efficiency", "flash_efficiency", "network_efficiency"),
    ("torchtitan-h100", "torchtitan"): ("gemm_efficiency",),
    ("h100", "megatron-core"): ("gemm_efficiency", "hbm_efficiency"),
    ("h100", "megatron-core-fp8"): ("linear_speedup",),
    ("frontier", "gpt-neox"): ("unaligned_penalty", "fabric_share"),
}

# (machine, stack) that a table names → the stack of the software that its source describes. No run of this package on
# an MI250X is published.
RAN_AS = {("lumi", "frontier-llm"): "transformers"}

FP8_VARIANTS = ("nemo-24.09",)  # stacks whose rows state FP8 only in the column `precision`

DATASET_OF = {
    "vtrain-a100": "vTrain multi-node",
    "vtrain-a100-node": "vTrain single-node",
    **dict.fromkeys(("frontier", "lumi", "mi250"), "MI250X"),
}
VTRAIN_COLUMNS = {
    "devices": "# GPUs",
    "GBS": "global batch",
    "MBS": "micro batch",
    "hidden": "hidden size",
    "heads": "attention heads",
    "layers": "# layers",
    "seq": "sequence length",
    "TP": "tensor parallelism",
    "DP": "data parallelism",
    "PP": "pipeline parallelism",
}

# (machine, stack) by a pattern that is searched in a row's id, hardware, source, precision, sharding and attention. The
# first matching pattern counts. Patterns of known clusters come first. The later patterns match a kind of software on a
# kind of hardware.
CLUSTERS = (
    (r"^korth|^sc21|selene", "a100", "megatron-lm"),
    (r"jean zay", "jean-zay", "megatron-deepspeed"),
    (r"(bridge|mcore|eos).*fp8", "h100", "megatron-core-fp8"),
    (r"^mcore|bridge|eos", "h100", "megatron-core"),
    (r"titan.*(mi250|frontier)|emin", "frontier", "torchtitan"),
    (r"titan.*h100.*fp8", "torchtitan-h100", "torchtitan-fp8"),
    (r"titan.*h100|h100.*torchtitan", "torchtitan-h100", "torchtitan"),
    (r"titan.*a100|^ttitan-a", "torchtitan-a100", "torchtitan"),
    (r"h100_80gb.*fp8", "llm-foundry-h100", "llm-foundry-fp8"),
    (r"h100_80gb", "llm-foundry-h100", "llm-foundry"),
    (r"a100_40gb", "llm-foundry-a100-40", "llm-foundry"),
    (r"a100_80gb", "llm-foundry-a100", "llm-foundry"),
    (r"^forge", "frontier", "gpt-neox"),
    (r"^axonn", "frontier", "axonn"),
    (r"^poro|lumi", "lumi", "megatron-deepspeed"),
    (r"frontier|mi250x", "frontier", "megatron-deepspeed"),
    (r"mi250", "mi250", "fsdp"),
    (r"mi300.*fp8", "mi300x", "megatron-core-fp8"),
    (r"mi300.*fsdp", "mi300x", "torchtitan"),
    (r"mi300", "mi300x", "megatron-core"),
    (r"h200.*fp8.*fsdp", "h200", "torchtitan-fp8"),
    (r"h200.*fp8", "h200", "megatron-core-fp8"),
    (r"h200.*fsdp", "h200", "torchtitan"),
    (r"h200", "h200", "megatron-core"),
    (r"h[18]00.*fp8", "h100", "megatron-core-fp8"),
    (r"h[18]00.*fsdp", "torchtitan-h100", "torchtitan"),
    (r"h[18]00", "h100", "megatron-core"),
    (r"a100.*40 ?gb.*fsdp", "llm-foundry-a100-40", "llm-foundry"),
    (r"a[18]00.*fsdp", "torchtitan-a100", "torchtitan"),
    (r"deepspeed.*a[18]00|a[18]00.*deepspeed", "a100", "megatron-deepspeed"),
    (r"a[18]00.*flash: [yv]", "a100", "megatron-core"),
    (r"a[18]00", "a100", "megatron-lm"),
)


def machine_path(name: str) -> Path:
    """Return the file of a row's machine: one of this folder that serves validation only, else one shipped with the
    package.
    """
    own = MACHINES / f"{name}.yaml"
    return own if own.is_file() else find_file(name, "machines")


def read_table(path: Path) -> list[Row]:
    """Read the rows of a file. All columns of a throughput table are present; missing ones are empty.

    Raises DataError if the file has neither format's columns.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"is not UTF-8: {error}",
            where=str(path),
            fix="give a vTrain CSV or a throughput TSV",
        ) from error
    lines = [line for line in text.splitlines() if not line.startswith("#") or "iteration time (ms)" in line]
    header = lines[0] if lines else ""
    delimiter = "\t" if "\t" in header else ","
    columns = set(header.strip().split(delimiter))
    vtrain = "iteration time (ms)" in columns
    if not vtrain and not {"id", "layers", "hidden", "TP", "PP"} <= columns:
        raise DataError(
            "has neither vTrain's columns ('iteration time (ms)', …) nor a throughput table's ('id', 'layers', "
            "'hidden', 'TP', 'PP', …): "
            f"{header[:80]}",
            where=str(path),
            fix="name the columns as in benchmarks/published",
        )
    rows = list[Row]()
    heads = dict[str, str]()
    for cells in csv.DictReader(lines, delimiter=delimiter):
        row = defaultdict(
            str,
            {key: (value or "").strip() for key, value in (_vtrain(cells) if vtrain else cells).items() if key},
        )
        # Tables give the number of heads only if it changes. An empty cell means the value above it, from the same
        # source.
        source = row["source"][:60]
        row["heads"] = heads[source] = row["heads"] or heads.get(source, "")
        for word, (column, value) in NAMED_SETTINGS.items():
            if word in row["id"].lower():
                row[column] = row[column] or value
        rows.append(row)
    return rows


def read_measurements(path: Path) -> list[PublishedRun]:
    """Read the rows of a file that have a time, a model shape and a known cluster. `complete` in
    benchmarks/published/predict.py chooses unstated fields later.
    """
    return [run for row in read_table(path) if (run := _published_run(row)) is not None]


TIMES = ("sec_per_iter", "tokens_per_s_per_dev", "tflops_per_dev")  # columns from which a step's time follows


@dataclass(frozen=True)
class Reading:
    """A row of a file: its run, or the reason why the row has no run."""

    key: str
    run: PublishedRun | None = None
    reason: str = ""


def read_stated(path: Path) -> list[Reading]:
    """Return one reading per row of a file. If a row needs an assumption about its parallelism, its reading has a
    reason instead of a run.
    """
    readings = []
    for number, row in enumerate(read_table(path), 1):
        key = row["id"] or f"row {number}"
        try:
            reason = _unlike_anything_here(row) or _unpriced(row)
            run = None if reason else _published_run(row)
        except (ValueError, FrontierError) as error:  # pydantic's errors are ValueErrors
            run = None
            reason = " ".join(str(error).split())
        readings.append(Reading(key, run, reason))
    return readings


def _unpriced(row: Row) -> str:
    """Return the reason why a row has no run, or ''."""
    pair = _cluster(row)
    if pair is None:
        return "no known cluster: give the columns machine and stack"
    shape = shape_of(row)
    if shape is None:
        return "no model shape: the column hidden is empty"
    machine, stack = pair
    try:
        stacks = load_machine(str(machine_path(machine))).stacks
    except FrontierError:
        return f"no machine file {machine!r}"
    if stack and stack not in stacks:
        return f"machine {machine!r} has no stack {stack!r}: it has {', '.join(stacks)}"
    if not any(number_of(row[column]) for column in TIMES):
        return f"no time: {', '.join(TIMES)} are empty"
    if not number_of(row["GBS"]):
        return "the batch (GBS) is not stated"
    schedule, _ = schedule_of(row["schedule"])
    if schedule and schedule not in names():
        return f"no schedule {schedule!r} here"
    return indivisible(row, layout_of_row(row, shape))


def _unlike_anything_here(row: Row) -> str:
    """Return the reason why no layout here matches this row, or ''."""
    words = " ".join((row["id"], row["model"], row["TP"], row["zero_or_shard"], row["seq_parallel"])).lower()
    mentions_experts = re.search(r"\bmoe\b|mixture|experts|\b\d+x\d+b|-a\d+b\b", words)
    mentions_context = re.search(r"context.parallel|ring.attention|ulysses|\bcp ?[2-9]", words)
    reasons = {
        "parallelism of other dimensions": "d:" in row["TP"].lower(),
        "tensor or pipeline degree not stated": not row["TP"] or not row["PP"],
        "experts whose number is not stated": bool(mentions_experts) and not number_of(row["experts"]),
        "context parallelism whose degree is not stated": bool(mentions_context) and not number_of(row["CP"]),
        "ZeRO-3 of another system": bool(re.search(r"zero(-| |)(stage |)3|stage.?3", words)),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def shipped() -> list[PublishedRun]:
    """Return all rows of this folder."""
    return [row for name in SHIPPED for row in read_measurements(PUBLISHED / name)]


def _vtrain(row: dict[str, str]) -> dict[str, str]:
    """Convert a row of vTrain's CSV to the columns of a throughput table. Adds the values that all its runs share."""
    single = int(row["# GPUs"]) <= 8
    return {column: row[theirs] for column, theirs in VTRAIN_COLUMNS.items()} | {
        "id": ",".join(value for key, value in row.items() if key and key != "iteration time (ms)"),
        "machine": "vtrain-a100-node" if single else "vtrain-a100",
        "stack": "megatron-lm",
        "recompute": "full",
        "position": "learned",
        "sec_per_iter": repr(float(row["iteration time (ms)"]) / 1e3),
    }


def _published_run(row: Row) -> PublishedRun | None:
    """Convert a row of the table. Returns None if it has no time, no shape or no known cluster."""
    cluster = _cluster(row)
    shape = shape_of(row)
    if cluster is None or shape is None:
        return None
    machine, stack = cluster
    layout = layout_of_row(row, shape)
    seconds = seconds_of_row(row, shape, layout)
    if not seconds:
        return None
    stated = number_of(row["devices"]) > 0 and row["TP"] != "" and "D:" not in row["TP"] and row["GBS"] != ""
    recompute = row["recompute"].lower()
    precision = row["precision"]
    # torchtitan's "selective layer" recomputes every second layer. Its "selective op" recomputes every second product
    # and all other ops.
    half = recompute.startswith(("selective layer", "selective op"))
    software: dict[str, Any] = {"checkpoints_cut": "partition" in recompute}
    if flash := {
        "y": "flash",
        "v": "flash",
        "n": "unfused",
    }.get(row["flash_attn"][:1]):
        software["attention"] = flash
    software.update(software_of(row))
    return PublishedRun(
        key=row["id"],
        dataset=_dataset(row["id"], machine, stack),
        machine=machine,
        stack=stack,
        model=model_of(row, shape),
        layout=replace(
            layout,
            recompute="full,none"
            if half
            else next((mode for mode in ("full", "selective") if recompute.startswith(mode)), "none"),
            gradient_wire="fp32" if "fp32 grad" in precision else "full",
            context_attention="ring" if stack.startswith("nemo") and layout.cp > 1 else "auto",
        ),
        seconds=seconds,
        known=stated and not row["borrowed"],
        approximate="D:" in row["TP"],
        unstated=unstated_of(row, layout.pp, stack),
        memory_gib=number_of(row["mem_gb_per_dev"]) or None,
        software=software,
    )


def _cluster(row: Row) -> tuple[str, str] | None:
    """Return (machine, stack) as the row names them, else by the patterns of CLUSTERS."""
    if row["machine"]:
        return row["machine"], _stack_of(row)
    words = [row[key] for key in ("id", "hardware", "source", "precision", "zero_or_shard")]
    label = " ".join([*words, f"flash: {row['flash_attn']}"]).lower()
    return next(((machine, stack) for pattern, machine, stack in CLUSTERS if re.search(pattern, label)), None)


def _stack_of(row: Row) -> str:
    """Return the stack of the row's software, or its variant for FP8 if the row ran in FP8 and the variant exists."""
    stack = RAN_AS.get((row["machine"], row["stack"]), row["stack"])
    if row["precision"].startswith("fp8") and stack in FP8_VARIANTS:
        return f"{stack}-fp8"
    return stack


def _dataset(key: str, machine: str, stack: str) -> str:
    if machine in DATASET_OF:
        return DATASET_OF[machine]
    prefixes = {
        "sc21t1": "Megatron SC'21 table 1",
        "sc21": "Megatron SC'21 table 2",
        "korth": "Korthikanti",
        "bloom": "BLOOM",
        "mcore": "Megatron-Core H100",
        "llmf": "LLM-Foundry FSDP",
        "ttitan-a": "torchtitan A100",
        "nemo": "NeMo H100 FP8",
        "bridge": "NeMo H100 FP8",
        "mtnlg": "MT-NLG 530B",
        "megascale": "MegaScale baseline",
        "llama3": "Llama 3 405B",
        "ttitan-h": "torchtitan H100, H200",
        "fms": "FMS FSDP A100",
        "internevo": "InternEvo A100",
        "tinyllama": "TinyLlama",
        "neox": "GPT-NeoX-20B",
    }
    return next((name for prefix, name in prefixes.items() if key.startswith(prefix)), f"{machine} {stack}")
