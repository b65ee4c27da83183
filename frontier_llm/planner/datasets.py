"""Published measurements → workloads. Reads the two formats that exist in the wild: vTrain's CSV and a throughput TSV.

A row says which machine and stack it ran on, what it was, and how long a step took. Only seconds per step and tokens/s are
compared; where a source gives TFLOP/s alone, its stated convention turns them into tokens/s first.
"""

from __future__ import annotations

import csv
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from frontier_llm.costs.workload import RECOMPUTE, Workload
from frontier_llm.errors import DataError

PUBLISHED = Path(__file__).parent / "published"
SHIPPED = ("vtrain_a100_multi.csv", "vtrain_a100_single.csv", "throughput.tsv", "collected.tsv")


@dataclass(frozen=True)
class Measurement:
    """One published run."""

    key: str  # identity of the row: decides on which side of the split it falls
    dataset: str
    machine: str
    stack: str
    model: str
    workload: Workload
    seconds: float  # per step
    known: bool  # False: degrees or batch are not stated, or the machine file is borrowed from a like cluster; the row is never fitted
    approximate: bool = False  # the source's parallelism has no equal here (AxoNN's 4D) or its memory is not described in full: not judged
    unstated: tuple[str, ...] = ()  # fields of the workload that the source does not give; the fastest that fits is assumed
    memory_gib: float | None = None

    @property
    def fitted(self) -> bool:
        """Whether constants may be fitted on this row: half of all rows, by a hash of what the row is."""
        return self.known and zlib.crc32(self.key.encode()) % 2 == 0


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


def read_measurements(path: Path) -> list[Measurement]:
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
        return [_vtrain(row) for row in rows]
    if {"id", "layers", "hidden", "TP", "PP"} <= columns:
        return [found for row in _with_heads(rows) if (found := _throughput(row)) is not None]
    raise DataError(
        "has neither vTrain's columns ('iteration time (ms)', …) nor a throughput table's ('id', 'layers', 'hidden', 'TP', 'PP', …): "
        f"{header[:80]}",
        where=str(path),
        fix="name the columns as in frontier_llm/planner/published",
    )


def shipped() -> list[Measurement]:
    """Everything that comes with the package."""
    return [row for name in SHIPPED for row in read_measurements(PUBLISHED / name)]


def _with_heads(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Tables give the head count where it changes: an empty cell means the one above, of the same source and hidden size or not."""
    heads: dict[str, str] = {}
    for row in rows:
        source = (row.get("source") or "")[:60]
        row["heads"] = row.get("heads") or heads.get(source, "")
        heads[source] = row["heads"]
    return rows


def stack_workloads(rows: Sequence[Measurement]) -> Workload:
    """One workload whose fields are arrays over the rows."""
    keys = vars(rows[0].workload)
    return replace(rows[0].workload, **{key: np.array([getattr(row.workload, key) for row in rows], dtype=float) for key in keys})


def _vtrain(row: dict[str, str]) -> Measurement:
    number = {key.strip(): float(value) for key, value in row.items() if key}
    devices, H, A = number["# GPUs"], number["hidden size"], number["attention heads"]
    dp, B = number["data parallelism"], number["micro batch"]
    single = devices <= 8
    workload = Workload(
        S=number["sequence length"], H=H, A=A, G=A, D=H / A, F=4 * H, V=51200, layers=number["# layers"], gated=0,
        learned_positions=1, rope=0, bias=1, qkv_bias=1, norm_bias=1, tied=1, tp=number["tensor parallelism"], pp=number["pipeline parallelism"],
        dp=dp, chunks=1, B=B, m=number["global batch"] / dp / B, sp=0, recompute=2, zero=0, dp_outer=0,
    )  # fmt: skip
    return Measurement(
        key=",".join(value for key, value in row.items() if key and key != "iteration time (ms)"),
        dataset="vTrain single-node" if single else "vTrain multi-node",
        machine="vtrain-a100-node" if single else "vtrain-a100",
        stack="megatron-lm",
        model=f"L{number['# layers']:.0f} H{H:.0f}",
        workload=workload,
        seconds=number["iteration time (ms)"] / 1e3,
        known=True,
    )


def _number(text: str | None, default: float = 0.0) -> float:
    found = re.match(r"\s*~?\s*([\d.]+)\s*([kM]?)", (text or "").replace(",", ""))
    return float(found.group(1)) * {"": 1, "k": 1e3, "M": 1e6}[found.group(2)] if found else default


def _throughput(row: dict[str, str]) -> Measurement | None:
    """A row of the table; None where it has no time, no shape or no cluster that is known."""
    row = {key: (value or "").strip() for key, value in row.items() if key}
    cluster = _cluster(row)
    shape = _shape(row)
    if cluster is None or shape is None:
        return None
    machine, stack = cluster
    layout = _layout(row)
    seconds = _seconds(row, shape, layout)
    if not seconds:
        return None
    stated = _number(row["devices"]) > 0 and row["TP"] != "" and "D:" not in row["TP"] and row["GBS"] != ""
    tp, pp = layout["tp"], layout["pp"]
    return Measurement(
        key=row["id"],
        dataset=_dataset(row["id"], machine, stack),
        machine=machine,
        stack=stack,
        model=row["model"] or f"L{shape['layers']:.0f} H{shape['H']:.0f}",
        workload=Workload(**shape, **layout, **_properties(row, tp, pp, shape["layers"], shape["A"])),
        seconds=seconds,
        known=stated and not row.get("borrowed"),
        approximate="D:" in row["TP"],
        unstated=_unstated(row, pp, stack),
        memory_gib=_number(row["mem_gb_per_dev"]) or None,
    )


def _cluster(row: dict[str, str]) -> tuple[str, str] | None:
    """(machine, stack) as the row names them, else by what it says of itself."""
    if row.get("machine"):
        return row["machine"], row.get("stack", "")
    words = [row[key] for key in ("id", "hardware", "source", "precision", "zero_or_shard")]
    label = " ".join([*words, f"flash: {row['flash_attn']}"]).lower()
    return next(((machine, stack) for pattern, machine, stack in CLUSTERS if re.search(pattern, label)), None)


def _shape(row: dict[str, str]) -> dict[str, float] | None:
    """The model's sizes, as a Workload calls them; layers that are not stated follow from the number of parameters."""
    H, S, V = _number(row["hidden"]), _number(row["seq"], 2048.0), _number(row["vocab"], 51200.0)
    if not H:
        return None
    if V == 250e3:
        V = 250880.0  # BLOOM's padded vocabulary
    F = _number(row["ffn"]) or 4 * H
    layers = _number(row["layers"]) or float(round((_number(row["params_b"]) * 1e9 - V * H) / (4 * H * H + 2 * H * F)))
    A = _number(row["heads"]) or H / 128
    return {"S": S, "V": V, "layers": layers, "H": H, "A": A, "D": H / A, "F": F}


def _dies(row: dict[str, str]) -> float:
    """Devices in what the row counts as one: the device here is the GCD, of which an MI250X package has two."""
    return 2.0 if "OAM" in row.get("dev_unit", "") else 1.0


def _devices(row: dict[str, str]) -> float:
    """As stated, else enough for eight replicas."""
    return _number(row["devices"]) * _dies(row) or 8 * _degree(row["TP"]) * _degree(row["PP"])


def _layout(row: dict[str, str]) -> dict[str, float]:
    """Degrees, microbatch B and microbatches m; what is not stated is what such codes are run with."""
    tp, pp = _degree(row["TP"]), _degree(row["PP"])
    dp = _number(row["DP"]) or max(_devices(row) / tp / pp, 1.0)
    B = _number(row["MBS"]) or default_microbatch(row)
    global_batch = _number(row["GBS"]) * (dp if "replica" in row["GBS"] else 1.0)
    m = max(global_batch / dp / B, 1.0) if global_batch else 4.0 * pp
    return {"tp": tp, "pp": pp, "dp": dp, "B": B, "m": m}


def _seconds(row: dict[str, str], shape: Mapping[str, float], layout: Mapping[str, float]) -> float:
    """Per step: as stated, else from the throughput; 0 where neither is given."""
    if stated := _number(row["sec_per_iter"]):
        return stated
    tokens_per_s = _tokens_per_s(row, shape) / _dies(row)
    if not tokens_per_s:
        return 0.0
    return shape["S"] * layout["B"] * layout["m"] * layout["dp"] / tokens_per_s / _devices(row)


def _unstated(row: dict[str, str], pp: float, stack: str) -> tuple[str, ...]:
    """Knobs that the source leaves open."""
    missing = {
        "B": _number(row["MBS"]) == 0,
        "chunks": pp > 1 and stack.startswith("megatron-core") and row["layers_per_virtual_stage"] == "",
        "tp": row["TP"] == "",
        "pp": row["PP"] == "" and row["TP"] == "",
        "recompute": row["recompute"] == "",
    }
    return tuple(field for field, is_missing in missing.items() if is_missing)


def default_microbatch(row: dict[str, str]) -> float:
    """A microbatch for rows that do not state one: what such codes are run with."""
    return 1.0 if _degree(row["PP"]) > 1 or _degree(row["TP"]) > 1 else 4.0


def _degree(text: str) -> float:
    return 8.0 if "D:" in text else max(_number(text.split("/")[-1], 1.0), 1.0)


# what a source calls its sharding → `Workload.zero`; the first word that occurs counts
ZERO_OF = {"grad_op": 2, "hsdp": 1, "fsdp": 3, "zero-1": 1, "distributed": 1}


def _properties(row: dict[str, str], tp: float, pp: float, layers: float, A: float) -> dict[str, float]:
    shard, recompute = row["zero_or_shard"].lower(), row["recompute"].lower()
    llama = "lama" in row["model"]
    # torchtitan's "selective layer" recomputes every second layer, its "selective op" every second product and all the rest
    half = recompute.startswith(("selective layer", "selective op"))
    whole = recompute.startswith("full") or half
    mode = RECOMPUTE["full" if whole else "selective" if recompute.startswith("selective") else "none"]
    zero = next((value for word, value in ZERO_OF.items() if word in shard), 0)
    per_virtual = _number(row["layers_per_virtual_stage"])
    fp32_gradients = "fp32 grad" in row["precision"]
    return {
        "G": _number(row["kv_heads"]) or A,
        "gated": float(llama),
        "rope": float(llama),
        "learned_positions": 0.0,
        "bias": float(not llama),
        "qkv_bias": float(not llama),
        "norm_bias": float(not llama),
        "tied": float(not llama),
        "chunks": max(1.0, round(layers / pp / per_virtual)) if per_virtual else 1.0,
        "sp": float(row["seq_parallel"].startswith("yes") and tp > 1),
        "recompute": float(mode),
        "checkpoints_cut": float("partition" in recompute),
        "recompute_share": 0.5 if half else 1.0,
        "zero": float(zero),
        "gradients_cut": float("zero-2" in shard),
        "dp_outer": 0.0,
        "flash": {"y": 1.0, "v": 1.0, "n": 0.0}.get(row["flash_attn"][:1], -1.0),
        "gradient_bytes": 4.0 if fp32_gradients else 0.0,
    }


def _tokens_per_s(row: dict[str, str], shape: Mapping[str, float]) -> float:
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
    if machine in ("frontier", "lumi", "mi250"):
        return "MI250X"
    prefixes = {
        "sc21t1": "Megatron SC'21 table 1",
        "sc21": "Megatron SC'21 table 2",
        "korth": "Korthikanti",
        "bloom": "BLOOM",
        "mcore": "Megatron-Core H100",
        "llmf": "LLM-Foundry FSDP",
        "ttitan-a": "torchtitan A100",
        "ornl": "MI250X",
        "forge": "MI250X",
        "axonn": "MI250X",
        "mosaic": "MI250X",
        "amd": "MI250X",
        "poro": "MI250X",
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
