"""Converts one row of a published table to the model's shape, the layout and seconds, and lists the unstated fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from frontier_llm.blueprint.layout import Layout
from frontier_llm.config import ModelConfig
from frontier_llm.config.model import MoeConfig

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


GATED = ("swiglu", "geglu")  # activations with a gate

# Word in the id of a row → (column, value), for files without the column. Only the names of the rows of torchtitan's
# table state these settings.
NAMED_SETTINGS = {"asynctp": ("async_tp", "yes"), "rowwise": ("fp8_scaling", "row")}


def number_of(text: str | None, default: float = 0.0) -> float:
    """Return the number at the start of a cell: '~1.5k' → 1500."""
    number = re.match(r"\s*~?\s*([\d.]+)\s*([kM]?)", (text or "").replace(",", ""))
    if number:
        return float(number.group(1)) * {"": 1, "k": 1e3, "M": 1e6}[number.group(2)]
    return default


def model_of(row: Row, shape: Mapping[str, int]) -> ModelConfig:
    """Return a model of these sizes.

    Columns state activation, bias, tied_head, position and experts. Without these columns, Llama models get Llama's
    settings, and all others get the settings of Megatron's GPT: GELU, biases, and a head that shares the embedding.
    """
    llama = "lama" in row["model"]
    gated = row["activation"] in GATED if row["activation"] else llama
    has_bias = is_yes(row["bias"], not llama)
    rms = llama or row["activation"] in GATED
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
        position=_position(row, llama),
        norm="rmsnorm" if rms else "layernorm",
        activation="geglu_tanh" if row["activation"] == "geglu" else "swiglu" if gated else "gelu",
        bias=has_bias,
        norm_bias=has_bias,
        tied_embeddings=is_yes(row["tied_head"], not llama),
        moe=_experts(row),
    )


def _position(row: Row, llama: bool) -> Literal["learned", "rope", "alibi"]:
    """Return the kind of positions. Few sources state it. A table of positions is small."""
    if llama or row["position"] == "rope":
        return "rope"
    return "learned" if row["position"] not in ("", "alibi") else "alibi"


def _experts(row: Row) -> MoeConfig | None:
    """Return the mixture of experts, or None for a dense model."""
    experts = int(number_of(row["experts"]))
    if experts < 2:
        return None
    return MoeConfig(
        experts=experts,
        top_k=int(number_of(row["top_k"], 1.0)),
        expert_hidden=int(number_of(row["expert_ffn"])) or None,
        capacity=number_of(row["expert_capacity"]) or None,
    )


def is_yes(text: str, default: bool) -> bool:
    """Return the answer of a cell that begins with yes or no, or `default`."""
    if text.startswith("yes"):
        return True
    return False if text.startswith("no") else default


def software_of(row: Row) -> dict[str, Any]:
    """Return the software options that the row states. They replace those of its stack."""
    options: dict[str, Any] = {}
    if row["dropout"]:
        options["dropout"] = number_of(row["dropout"]) > 0
    if row["gradient_dtype"]:
        options["gradient_bytes"] = 4 if "32" in row["gradient_dtype"] else 2
    if row["optimizer_state_bytes"]:
        options["optimizer_state_bytes"] = number_of(row["optimizer_state_bytes"])
    if row["weight_gradient_adding"]:
        options["adding_in_product"] = "product" in row["weight_gradient_adding"]
    if row["fp8_scaling"]:
        options["scales_fp8_rows"] = row["fp8_scaling"].startswith("row")
    if _is_async_tp(row):
        options["chunk_overlap"] = 1.0  # copy engines transfer one piece while the product of another piece runs
    if row["fused_cross_entropy"]:
        options["fused_cross_entropy"] = is_yes(row["fused_cross_entropy"], False)
    return options


def _is_async_tp(row: Row) -> bool:
    return is_yes(row["async_tp"], False)


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
    """Return the number of GCDs in one device as the row counts devices: 2 for an MI250X package (OAM), else 1."""
    return 2 if "OAM" in row["dev_unit"] else 1


def layout_of_row(row: Row, shape: Mapping[str, int]) -> Layout:
    """Return the row's degrees, microbatches and sharding. Unstated values are the usual ones for such software."""
    tp = _degree(row["TP"])
    pp = _degree(row["PP"])
    shard = row["zero_or_shard"].lower()
    shards = re.search(r"dp_shard=(\d+)", shard)
    cp = int(number_of(row["CP"], 1.0)) or 1
    devices = int(number_of(row["devices"])) * _dies(row) or 8 * tp * pp  # if unstated, enough for eight replicas
    dp = int(number_of(row["DP"])) or max(devices // tp // cp // pp, 1)
    B = int(number_of(row["MBS"])) or (1 if pp > 1 or tp > 1 else 4)
    global_batch = int(number_of(row["GBS"])) * (dp if "replica" in row["GBS"] else 1)
    per_virtual = number_of(row["layers_per_virtual_stage"])
    schedule, pieces = schedule_of(row["schedule"])
    chunks = max(1, round(shape["layers"] / pp / per_virtual)) if per_virtual else pieces
    return Layout(
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        chunks=chunks,
        schedule=schedule or ("interleaved" if chunks > 1 else "1f1b"),
        ep=int(number_of(row["EP"], 1.0)) or 1,
        etp=int(number_of(row["ETP"], 1.0)) or 1,
        data_shard=int(shards.group(1)) if shards else 0,
        # torch's async TP cuts a product and its collective into one piece per rank
        tensor_chunks=tp if _is_async_tp(row) else 1,
        micro_batch=B,
        microbatches=max(global_batch // dp // B, 1) if global_batch else 4 * pp,
        sequence_parallel=row["seq_parallel"].startswith("yes") and tp > 1,
        sharding="weights" if shards else next((name for word, name in SHARDING_OF.items() if word in shard), "none"),
    )


def indivisible(row: Row, layout: Layout) -> str:
    """Return why the row's devices or its batch cannot be divided among the degrees of `layout_of_row`, or ''."""
    devices = int(number_of(row["devices"])) * _dies(row)
    degrees = {
        "TP": layout.tp,
        "CP": layout.cp,
        "PP": layout.pp,
        "DP": layout.dp,
    }
    if devices and devices != layout.devices:
        split = {name: degree for name, degree in degrees.items() if degree > 1}
        words = " x ".join(f"{name} {degree}" for name, degree in split.items())
        return f"{devices} devices are not {words or 'one device'} = {layout.devices}"
    batch = int(number_of(row["GBS"])) * (layout.dp if "replica" in row["GBS"] else 1)
    micro_batch = layout.micro_batch if number_of(row["MBS"]) else 1  # an unstated size of a microbatch is searched
    unit = layout.dp * micro_batch
    if batch % unit:
        return f"the batch (GBS) {batch} is not a multiple of DP {layout.dp} x MBS {micro_batch} = {unit}"
    return ""


def schedule_of(text: str) -> tuple[str, int]:
    """Return the name of the schedule here and its virtual stages per rank. ('', 1) if the row states none.

    A V schedule has two stages per rank. An unknown name is returned as it is, and building it fails.
    """
    if not text:
        return "", 1
    name, _, pieces = text.partition("-") if text.startswith("interleaved") else (text, "", "")
    if name == "interleaved":
        return name, int(number_of(pieces, 2.0))
    return name, 2 if name in ("zb-v", "v-half", "v-min") else 1


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
