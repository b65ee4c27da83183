"""Published measurements → models, layouts and seconds. Reads the two formats that exist in the wild: vTrain's CSV and a throughput TSV.

A row says which machine and stack it ran on, what it was, and how long a step took. Only seconds per step and tokens/s are
compared; where a source gives TFLOP/s alone, its stated convention turns them into tokens/s first.
"""

from __future__ import annotations

import csv
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from frontier_llm.blueprint.layout import Layout
from frontier_llm.config import ModelConfig
from frontier_llm.errors import DataError

PUBLISHED = Path(__file__).parent
SHIPPED = ("vtrain_a100_multi.csv", "vtrain_a100_single.csv", "throughput.tsv", "collected.tsv")


@dataclass(frozen=True)
class PublishedRun:
    """One published run."""

    key: str  # identity of the row: decides on which side of the split it falls
    dataset: str
    machine: str
    stack: str
    model: ModelConfig
    layout: Layout
    seconds: float  # per step
    known: bool  # False: degrees or batch are not stated, or the machine file is borrowed from a like cluster; the row is never fitted
    approximate: bool = False  # the source's parallelism has no equal here (AxoNN's 4D) or its memory is not described in full: not judged
    unstated: tuple[str, ...] = ()  # fields of the layout that the source does not give; the fastest that fits is assumed
    software: Mapping[str, Any] = field(default_factory=dict)  # what this run does otherwise than its stack: fields of Rates
    memory_gib: float | None = None

    @property
    def fitted(self) -> bool:
        """Whether constants may be fitted on this row: half of all rows, by a hash of what the row is."""
        return self.known and zlib.crc32(self.key.encode()) % 2 == 0


COMPUTE = ("gemm_efficiency", "gemm_k_half", "hbm_efficiency", "kernel_s", "step_s")
TENSOR = ("fabric_bytes_s/2", "fabric_bytes_s/4", "fabric_bytes_s/8", "fabric_latency_s")
SPREAD = ("network_efficiency", "network_crowding")

# which constants the fitted half of each (machine, stack)'s rows determines (scripts/fit_machines.py fits them)
FITTED: dict[tuple[str, str], tuple[str, ...]] = {
    ("vtrain-a100", "megatron-lm"): (*COMPUTE, *TENSOR, *SPREAD, "microbatch_s", "network_latency_s"),
    ("vtrain-a100-node", "megatron-lm"): (*COMPUTE, *TENSOR, "launch_s", "microbatch_s", "fabric_hop_s"),
    ("selene", "megatron-lm"): ("gemm_efficiency", "hbm_efficiency", "kernel_s", "fabric_bytes_s", "fabric_latency_s", *SPREAD),
    ("jean-zay", "megatron-deepspeed"): (*COMPUTE, *TENSOR, *SPREAD, "microbatch_s", "network_latency_s", "unaligned_penalty"),
    ("llm-foundry-a100", "llm-foundry"): (*COMPUTE, "flash_efficiency", "flash_backward"),
    ("llm-foundry-a100-40", "llm-foundry"): (*COMPUTE, "flash_efficiency", "flash_backward", "network_efficiency"),
    ("llm-foundry-h100", "llm-foundry"): (*COMPUTE, "flash_efficiency", "flash_backward", "network_efficiency"),
    ("llm-foundry-h100", "llm-foundry-fp8"): ("linear_speedup",),
    ("torchtitan-a100", "torchtitan"): ("gemm_efficiency", "flash_efficiency", "network_efficiency"),
    ("torchtitan-h100", "torchtitan"): ("gemm_efficiency",),
    ("eos", "megatron-core"): ("gemm_efficiency", "hbm_efficiency"),
    ("eos", "megatron-core-fp8"): ("linear_speedup",),
    ("frontier", "gpt-neox"): ("unaligned_penalty", "fabric_share"),
}

DATASET_OF = {
    "vtrain-a100": "vTrain multi-node",
    "vtrain-a100-node": "vTrain single-node",
    **dict.fromkeys(("frontier", "lumi", "mi250"), "MI250X"),
}
VTRAIN_COLUMNS = {
    "devices": "# GPUs", "GBS": "global batch", "MBS": "micro batch", "hidden": "hidden size", "heads": "attention heads", "layers": "# layers",
    "seq": "sequence length", "TP": "tensor parallelism", "DP": "data parallelism", "PP": "pipeline parallelism",
}  # fmt: skip

# (machine, stack) by what a row's id, hardware, source, precision, sharding and attention say; the first match counts. Known clusters
# come first; after them any code of a kind on a kind of hardware
CLUSTERS = (
    (r"^korth|^sc21|selene", "selene", "megatron-lm"),
    (r"jean zay", "jean-zay", "megatron-deepspeed"),
    (r"(bridge|mcore|eos).*fp8", "eos", "megatron-core-fp8"),
    (r"^mcore|bridge|eos", "eos", "megatron-core"),
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
    (r"h[18]00.*fp8", "eos", "megatron-core-fp8"),
    (r"h[18]00.*fsdp", "torchtitan-h100", "torchtitan"),
    (r"h[18]00", "eos", "megatron-core"),
    (r"a100.*40 ?gb.*fsdp", "llm-foundry-a100-40", "llm-foundry"),
    (r"a[18]00.*fsdp", "torchtitan-a100", "torchtitan"),
    (r"deepspeed.*a[18]00|a[18]00.*deepspeed", "selene", "megatron-deepspeed"),
    (r"a[18]00.*flash: [yv]", "selene", "megatron-core"),
    (r"a[18]00", "selene", "megatron-lm"),
)


def read_measurements(path: Path) -> list[PublishedRun]:
    """The rows of a file that carry a time and a complete model shape.

    Raises DataError when the file has neither format's columns.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read: {error}", where=str(path), fix="give a vTrain CSV or a throughput TSV") from error
    header = text.partition("\n")[0]
    delimiter = "\t" if "\t" in header else ","
    rows = list(csv.DictReader(text.splitlines(), delimiter=delimiter))
    columns = set(header.strip().split(delimiter))
    if "iteration time (ms)" in columns:
        rows = list(map(_vtrain, rows))
    elif not {"id", "layers", "hidden", "TP", "PP"} <= columns:
        raise DataError(
            "has neither vTrain's columns ('iteration time (ms)', …) nor a throughput table's ('id', 'layers', 'hidden', 'TP', 'PP', …): "
            f"{header[:80]}",
            where=str(path),
            fix="name the columns as in frontier_llm/planner/published",
        )
    heads: dict[str, str] = {}  # tables give the head count where it changes: an empty cell means the one above, of the same source
    for row in rows:
        source = (row["source"] or "")[:60]
        row["heads"] = heads[source] = row["heads"] or heads.get(source, "")
    return [run for row in rows if (run := _published_run(row)) is not None]


def shipped() -> list[PublishedRun]:
    """Everything that comes with the package."""
    return [row for name in SHIPPED for row in read_measurements(PUBLISHED / name)]


def _vtrain(row: dict[str, str]) -> dict[str, str]:
    """A row of vTrain's CSV in the columns of a throughput table, with what all its runs have in common."""
    single = int(row["# GPUs"]) <= 8
    table = {column: row[theirs] for column, theirs in VTRAIN_COLUMNS.items()} | {
        "id": ",".join(value for key, value in row.items() if key and key != "iteration time (ms)"),
        "machine": "vtrain-a100-node" if single else "vtrain-a100",
        "stack": "megatron-lm",
        "recompute": "full",
        "position": "learned",
        "sec_per_iter": repr(float(row["iteration time (ms)"]) / 1e3),
    }
    return defaultdict(str, table)


def _number(text: str | None, default: float = 0.0) -> float:
    found = re.match(r"\s*~?\s*([\d.]+)\s*([kM]?)", (text or "").replace(",", ""))
    return float(found.group(1)) * {"": 1, "k": 1e3, "M": 1e6}[found.group(2)] if found else default


def _published_run(cells: Mapping[str, str | None]) -> PublishedRun | None:
    """A row of the table; None where it has no time, no shape or no cluster that is known. Columns that a table lacks are empty."""
    row = defaultdict(str, {key: (value or "").strip() for key, value in cells.items() if key})
    cluster = _cluster(row)
    shape = _shape(row)
    if cluster is None or shape is None:
        return None
    machine, stack = cluster
    layout = _layout(row, shape)
    seconds = _seconds(row, shape, layout)
    if not seconds:
        return None
    stated = _number(row["devices"]) > 0 and row["TP"] != "" and "D:" not in row["TP"] and row["GBS"] != ""
    recompute, precision = row["recompute"].lower(), row["precision"]
    # torchtitan's "selective layer" recomputes every second layer, its "selective op" every second product and all the rest
    half = recompute.startswith(("selective layer", "selective op"))
    software: dict[str, Any] = {"recompute_share": 0.5 if half else 1.0, "checkpoints_cut": "partition" in recompute}
    if flash := {"y": "flash", "v": "flash", "n": "unfused"}.get(row["flash_attn"][:1]):
        software["attention"] = flash
    return PublishedRun(
        key=row["id"],
        dataset=_dataset(row["id"], machine, stack),
        machine=machine,
        stack=stack,
        model=_model(row, shape),
        layout=replace(
            layout,
            recompute="full" if half or recompute.startswith("full") else "selective" if recompute.startswith("selective") else "none",
            gradient_wire="fp32" if "fp32 grad" in precision else "full",
        ),
        seconds=seconds,
        known=stated and not row["borrowed"],
        approximate="D:" in row["TP"],
        unstated=_unstated(row, layout.pp, stack),
        memory_gib=_number(row["mem_gb_per_dev"]) or None,
        software=software,
    )


def _model(row: Mapping[str, str], shape: Mapping[str, int]) -> ModelConfig:
    """A model of these sizes, as Llama has the rest with rotary positions, else as Megatron's GPT: biases, the head is the embedding."""
    llama = "lama" in row["model"]
    return ModelConfig(
        name=row["model"] or f"L{shape['layers']} H{shape['H']}",
        layers=shape["layers"],
        hidden=shape["H"],
        heads=shape["A"],
        kv_heads=int(_number(row["kv_heads"])) or None,
        ffn_hidden=shape["F"],
        vocab_size=shape["V"],
        vocab_multiple=1,
        sequence_length=shape["S"],
        position="rope" if llama else "learned" if row["position"] else "alibi",  # few sources say; a table of positions is small
        norm="rmsnorm" if llama else "layernorm",
        activation="swiglu" if llama else "gelu",
        bias=not llama,
        norm_bias=not llama,
        tied_embeddings=not llama,
    )


def _cluster(row: Mapping[str, str]) -> tuple[str, str] | None:
    """(machine, stack) as the row names them, else by what it says of itself."""
    if row["machine"]:
        return row["machine"], row["stack"]
    words = [row[key] for key in ("id", "hardware", "source", "precision", "zero_or_shard")]
    label = " ".join([*words, f"flash: {row['flash_attn']}"]).lower()
    return next(((machine, stack) for pattern, machine, stack in CLUSTERS if re.search(pattern, label)), None)


def _shape(row: Mapping[str, str]) -> dict[str, int] | None:
    """The model's sizes; layers that are not stated follow from the number of parameters."""
    H, S, V = (int(_number(row[key], default)) for key, default in (("hidden", 0), ("seq", 2048), ("vocab", 51200)))
    if not H:
        return None
    if V == 250_000:
        V = 250_880  # BLOOM's padded vocabulary
    F = int(_number(row["ffn"])) or 4 * H
    layers = int(_number(row["layers"])) or round((_number(row["params_b"]) * 1e9 - V * H) / (4 * H * H + 2 * H * F))
    return {"S": S, "V": V, "layers": layers, "H": H, "A": int(_number(row["heads"])) or H // 128, "F": F}


def _dies(row: Mapping[str, str]) -> int:
    """Devices in what the row counts as one: the device here is the GCD, of which an MI250X package has two."""
    return 2 if "OAM" in row["dev_unit"] else 1


def _layout(row: Mapping[str, str], shape: Mapping[str, int]) -> Layout:
    """The row's degrees, microbatches and sharding; what is not stated is what such codes are run with."""
    tp, pp, shard = _degree(row["TP"]), _degree(row["PP"]), row["zero_or_shard"].lower()
    devices = int(_number(row["devices"])) * _dies(row) or 8 * tp * pp  # else enough for eight replicas
    dp = int(_number(row["DP"])) or max(devices // tp // pp, 1)
    B = int(_number(row["MBS"])) or (1 if pp > 1 or tp > 1 else 4)
    global_batch = int(_number(row["GBS"])) * (dp if "replica" in row["GBS"] else 1)
    per_virtual = _number(row["layers_per_virtual_stage"])
    chunks = max(1, round(shape["layers"] / pp / per_virtual)) if per_virtual else 1
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
        micro_batch=B,
        microbatches=max(global_batch // dp // B, 1) if global_batch else 4 * pp,
        sequence_parallel=row["seq_parallel"].startswith("yes") and tp > 1,
        sharding=next((name for word, name in SHARDING_OF.items() if word in shard), "none"),
    )


def _seconds(row: Mapping[str, str], shape: Mapping[str, int], layout: Layout) -> float:
    """Per step: as stated, else from the throughput; 0 where neither is given."""
    if stated := _number(row["sec_per_iter"]):
        return stated
    tokens_per_s = _tokens_per_s(row, shape) / _dies(row)
    devices = _number(row["devices"]) * _dies(row) or 8 * layout.tp * layout.pp
    return shape["S"] * layout.global_batch / tokens_per_s / devices if tokens_per_s else 0.0


def _unstated(row: Mapping[str, str], pp: int, stack: str) -> tuple[str, ...]:
    """Knobs that the source leaves open."""
    missing = {
        "micro_batch": _number(row["MBS"]) == 0,
        "chunks": pp > 1 and stack.startswith("megatron-core") and row["layers_per_virtual_stage"] == "",
        "tp": row["TP"] == "",
        "pp": row["PP"] == "" and row["TP"] == "",
        "recompute": row["recompute"] == "",
    }
    return tuple(name for name, is_missing in missing.items() if is_missing)


def _degree(text: str) -> int:
    return 8 if "D:" in text else max(int(_number(text.split("/")[-1], 1.0)), 1)


# what a source calls its sharding → `Layout.sharding`; the first word that occurs counts
SHARDING_OF = {
    "grad_op": "weights-gathered-once",
    "hsdp": "optimizer",
    "fsdp": "weights",
    "zero-2": "gradients",
    "zero-1": "optimizer",
    "distributed": "optimizer",
}


def _tokens_per_s(row: Mapping[str, str], shape: Mapping[str, int]) -> float:
    """Per device as the source counts devices; from TFLOP/s by the stated convention where tokens/s are missing."""
    if _number(row["tokens_per_s_per_dev"]):
        return _number(row["tokens_per_s_per_dev"])
    flops = _number(row["tflops_per_dev"]) * 1e12
    if not flops:
        return 0.0
    S, V, H, F = (shape[key] for key in ("S", "V", "H", "F"))
    matrices = shape["layers"] * (4 * H * H + 2 * H * F)
    hardware = "hardware" in row["flops_convention"]
    per_token = (8 if hardware else 6) * matrices * (1 + S / (6 * H)) + 6 * V * H
    return flops / per_token


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
