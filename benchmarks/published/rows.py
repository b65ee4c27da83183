"""Converts one row of a published table to the model's shape, the layout and seconds, and lists the unstated fields."""

from __future__ import annotations

import re
from collections.abc import Mapping

from frontier_llm.blueprint.layout import Layout
from frontier_llm.config import ModelConfig

Row = Mapping[str, str]  # cells of a row by column
# Sharding as named by a source → `Layout.sharding`. The first word that occurs in the cell counts.
SHARDING_OF = {
    "grad_op": "weights-gathered-once",
    "hsdp": "optimizer",
    "fsdp": "weights",
    "zero-2": "gradients",
    "zero-1": "optimizer",
    "distributed": "optimizer",
}


def number_of(text: str | None, default: float = 0.0) -> float:
    """Return the number at the start of a cell: '~1.5k' → 1500."""
    number = re.match(r"\s*~?\s*([\d.]+)\s*([kM]?)", (text or "").replace(",", ""))
    if number:
        return float(number.group(1)) * {"": 1, "k": 1e3, "M": 1e6}[number.group(2)]
    return default


def model_of(row: Row, shape: Mapping[str, int]) -> ModelConfig:
    """Return a model of these sizes.

    Llama models get Llama's other settings with rotary positions. All others get the settings of Megatron's GPT:
    biases, and a head that shares the embedding.
    """
    llama = "lama" in row["model"]
    return ModelConfig(
        name=row["model"] or f"L{shape['layers']} H{shape['H']}",
        layers=shape["layers"],
        hidden=shape["H"],
        heads=shape["A"],
        kv_heads=int(number_of(row["kv_heads"])) or None,
        ffn_hidden=shape["F"],
        vocab_size=shape["V"],
        vocab_multiple=1,
        sequence_length=shape["S"],
        # Few sources state the kind of positions. A table of positions is small.
        position="rope" if llama else "learned" if row["position"] else "alibi",
        norm="rmsnorm" if llama else "layernorm",
        activation="swiglu" if llama else "gelu",
        bias=not llama,
        norm_bias=not llama,
        tied_embeddings=not llama,
    )


def shape_of(row: Row) -> dict[str, int] | None:
    """Return the model's sizes. If the number of layers is not stated, it follows from the number of parameters."""
    H, S, V = (int(number_of(row[key], default)) for key, default in (("hidden", 0), ("seq", 2048), ("vocab", 51200)))
    if not H:
        return None
    if V == 250_000:
        V = 250_880  # BLOOM's padded vocabulary
    F = int(number_of(row["ffn"])) or 4 * H
    layers = int(number_of(row["layers"])) or round(
        (number_of(row["params_b"]) * 1e9 - V * H) / (4 * H * H + 2 * H * F)
    )
    return {
        "S": S,
        "V": V,
        "layers": layers,
        "H": H,
        "A": int(number_of(row["heads"])) or H // 128,
        "F": F,
    }


def _dies(row: Row) -> int:
    """Return the number of devices in the row's unit. A device here is a GCD, and an MI250X package has two."""
    return 2 if "OAM" in row["dev_unit"] else 1


def layout_of_row(row: Row, shape: Mapping[str, int]) -> Layout:
    """Return the row's degrees, microbatches and sharding. Unstated values are the usual ones for such software."""
    tp = _degree(row["TP"])
    pp = _degree(row["PP"])
    shard = row["zero_or_shard"].lower()
    cp = int(number_of(row["CP"], 1.0)) or 1
    devices = int(number_of(row["devices"])) * _dies(row) or 8 * tp * pp  # if unstated, enough for eight replicas
    dp = int(number_of(row["DP"])) or max(devices // tp // cp // pp, 1)
    B = int(number_of(row["MBS"])) or (1 if pp > 1 or tp > 1 else 4)
    global_batch = int(number_of(row["GBS"])) * (dp if "replica" in row["GBS"] else 1)
    per_virtual = number_of(row["layers_per_virtual_stage"])
    chunks = max(1, round(shape["layers"] / pp / per_virtual)) if per_virtual else 1
    return Layout(
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
        micro_batch=B,
        microbatches=max(global_batch // dp // B, 1) if global_batch else 4 * pp,
        sequence_parallel=row["seq_parallel"].startswith("yes") and tp > 1,
        sharding=next((name for word, name in SHARDING_OF.items() if word in shard), "none"),
    )


def seconds_of_row(row: Row, shape: Mapping[str, int], layout: Layout) -> float:
    """Return the seconds per step: as stated, else from the throughput. Returns 0 if neither is given."""
    if stated := number_of(row["sec_per_iter"]):
        return stated
    tokens_per_s = _tokens_per_s(row, shape) / _dies(row)
    devices = number_of(row["devices"]) * _dies(row) or 8 * layout.tp * layout.pp
    if tokens_per_s:
        return shape["S"] * layout.global_batch / tokens_per_s / devices
    return 0.0


def unstated_of(row: Row, pp: int, stack: str) -> tuple[str, ...]:
    """Return the fields of the layout that the source does not state."""
    missing = {
        "micro_batch": number_of(row["MBS"]) == 0,
        "chunks": pp > 1 and stack.startswith("megatron-core") and row["layers_per_virtual_stage"] == "",
        "tp": row["TP"] == "",
        "pp": row["PP"] == "" and row["TP"] == "",
        "recompute": row["recompute"] == "",
    }
    return tuple(name for name, is_missing in missing.items() if is_missing)


def _degree(text: str) -> int:
    return 8 if "D:" in text else max(int(number_of(text.split("/")[-1], 1.0)), 1)


def _tokens_per_s(row: Row, shape: Mapping[str, int]) -> float:
    """Return tokens/s per device, as the source counts devices. Missing tokens/s follow from TFLOP/s by the stated
    convention.
    """
    if number_of(row["tokens_per_s_per_dev"]):
        return number_of(row["tokens_per_s_per_dev"])
    flops = number_of(row["tflops_per_dev"]) * 1e12
    if not flops:
        return 0.0
    S, V, H, F = (shape[key] for key in ("S", "V", "H", "F"))
    matrices = shape["layers"] * (4 * H * H + 2 * H * F)
    hardware = "hardware" in row["flops_convention"]
    per_token = (8 if hardware else 6) * matrices * (1 + S / (6 * H)) + 6 * V * H
    return flops / per_token
