"""Enumeration of all legal parallel layouts of a model on a number of devices, as a table (`Layouts`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, get_args

import numpy as np
from pydantic import BaseModel

from frontier_llm.blueprint.layout import FIELD_OF_KEY, SHARDING, Layout, context_way, run_keys
from frontier_llm.config import RECOMPUTE, ModelConfig, ParallelConfig, PrecisionConfig, recompute_modes
from frontier_llm.errors import ConfigError, LayoutError, Problem, divisors, nearest, suggest
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.costs.layouts import Layouts, as_table
from frontier_llm.schedule import names, rule
from frontier_llm.topology.expert_nodes import over_nodes
from frontier_llm.topology.expert_rules import routes_equal_parts
from frontier_llm.topology.grid import AXIS_ORDERS, tensor_groups_stay_in_nodes
from frontier_llm.topology.plan import tensor_degrees

MAX_MICROBATCH = 64
MAX_CHUNKS = 8
V_SHAPED = ("zb-v", "dualpipe-v", "v-half", "v-min")
SEARCHED = "searched"  # Value of `schedule` that requests the fastest of all V-shaped schedules.
MIN_CHUNK = 1024  # Tokens of a context-parallel chunk. Attention to shorter chunks is too short to hide communication.

# Key of `plan --fix KEY=VALUE` → field of `Layout` that it fixes. The keys are `imbalance` and the keys of a run file
# that the search varies. `expert_all_to_all` keeps its value from the run file, and the search derives `expert_nodes`
# from it.
FIXABLE = {
    **{key: field for key, field in FIELD_OF_KEY.items() if key not in ("expert_tensor", "tensor_chunks")},
    "expert_all_to_all": "expert_all_to_all",
    "imbalance": "imbalance",
}


def _choices(section: type[BaseModel], key: str) -> dict[str, Any]:
    """Return the values that a run file allows for `key` of `section`, each mapped to itself."""
    return {word: word for word in get_args(section.model_fields[key].annotation)}


BY_STAGE = dict(zip("0123", SHARDING, strict=False))  # parallel.zero → sharding.
# `--fix` keys with a fixed list of values → text of each value → value of the layout's field
MEANINGS: dict[str, Mapping[str, Any]] = {
    "expert_all_to_all": _choices(ParallelConfig, "expert_all_to_all"),
    "sequence_parallel": {"true": True, "false": False, "1": True, "0": False},
    "recompute": dict.fromkeys(RECOMPUTE),  # a list of these modes is also accepted
    "zero": BY_STAGE,
    "data_mode": {"zero": "optimizer", "fsdp": "weights"},
    "axis_order": {name: name for name in AXIS_ORDERS},
    "gradient_wire": _choices(PrecisionConfig, "gradient_wire"),
    "context_attention": _choices(ParallelConfig, "context_attention"),
}


def context_degrees(model: ModelConfig, devices: int) -> list[int]:
    """Return the cp degrees: 1, and divisors of `devices` with 2·cp chunks of at least MIN_CHUNK tokens."""
    length = model.sequence_length
    return [cp for cp in divisors(devices) if cp == 1 or (length % (2 * cp) == 0 and length // (2 * cp) >= MIN_CHUNK)]


def context_ways(model: ModelConfig, tp: int, cp: int, wanted: str | None = None) -> list[str]:
    """Return the algorithms of context-parallel attention that the model's heads and the GPU kernels allow.

    Sliding windows without a score softcap have no kernel for "gather" and "ring". `wanted` restricts the result to
    one algorithm.
    """
    if cp == 1:
        return ["auto"]
    stretches = model.sliding_window is None or model.score_softcap is not None
    ways = []
    if stretches:
        ways += ["gather", "ring"]
    if model.num_kv_heads // tp % cp == 0:
        ways.append("heads")
    chosen = context_way(model, tp, cp) if wanted == "auto" else wanted
    return [way for way in ways if chosen in (None, way)]


def expert_degrees(model: ModelConfig, ranks: int) -> list[int]:
    """Return the ep degrees: numbers that divide both the experts and the `ranks` of a pipeline stage."""
    if model.moe is None:
        return [1]
    return [ep for ep in divisors(model.moe.experts) if ranks % ep == 0]


def enumerate_layouts(
    model: ModelConfig,
    devices: int,
    global_batch: int,
    node_devices: int,
    fixed: Mapping[str, Any] | None = None,
    *,
    tp_max: int | None = None,
    **shared: Any,
) -> Layouts:
    """Return all layouts that `topology.plan.make_plan` accepts on `devices`, as a table that may be empty.

    Args:
        model: the model.
        devices: number of ranks.
        global_batch: sequences per step.
        node_devices: devices of a node, inside which FSDP may shard the weights (HSDP).
        fixed: values of fields that all layouts must have, parsed by `parse_fixed`.
        tp_max: highest tensor-parallel degree; None = the devices of a node.
        shared: further fields that all layouts have, for example dtype and optimizer.
    """
    fixed = dict(fixed or {})
    tp_max = tp_max or node_devices
    none = as_table([Layout()]).where(np.zeros(1, dtype=bool))
    rows: list[Mapping[str, np.ndarray]] = [vars(none)]
    across_nodes = tp_max > node_devices or "tp" in fixed
    for tp in tensor_degrees(model):
        if tp > tp_max:
            continue
        if not across_nodes and not tensor_groups_stay_in_nodes(tp, node_devices, devices):
            continue
        rest = devices // tp if devices % tp == 0 else 0
        for cp, pp in product(context_degrees(model, rest), divisors(rest)) if rest else ():
            dp, beyond = divmod(rest, cp * pp)
            degrees = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
            wanted = all(fixed.get(axis, degree) == degree for axis, degree in degrees.items())
            wanted &= routes_equal_parts(model, tp, cp)
            if wanted and not beyond and dp and pp <= model.layers and global_batch % dp == 0:
                degrees_of_experts = [ep for ep in expert_degrees(model, tp * cp * dp) if fixed.get("ep", ep) == ep]
                layouts = (
                    Layout(
                        tp=tp,
                        cp=cp,
                        pp=pp,
                        dp=dp,
                        ep=ep,
                    )
                    for ep in degrees_of_experts
                )
                rows += [_options(model, layout, global_batch // dp, node_devices, fixed) for layout in layouts]
    columns: dict[str, Any] = {
        name: np.concatenate([part[name] for part in rows])
        for name, column in vars(none).items()
        if isinstance(column, np.ndarray)
    }
    shared |= {name: fixed.get(name, default) for name, default in (("gradient_wire", "full"), ("imbalance", 1.0))}
    return Layouts(**columns, **shared)


def runnable_layouts(
    model: ModelConfig,
    rates: Rates,
    nodes: int,
    global_batch: int,
    fixed: Mapping[str, Any],
    *,
    tp_max: int | None = None,
    **shared: Any,
) -> Layouts:
    """Return the layouts of `enumerate_layouts` that the search may propose on `nodes` nodes.

    If a rank may have one communication in flight, FSDP may have no second communicator (topology.engine_rules). Then
    FSDP is proposed over all replicas without tensor, context or expert parallelism.
    """
    layouts = enumerate_layouts(
        model,
        nodes * rates.node_devices,
        global_batch,
        rates.node_devices,
        fixed,
        tp_max=tp_max,
        **shared,
    )
    layouts = over_nodes(model, layouts, rates, fixed.get("expert_all_to_all", "auto"))
    if not rates.one_in_flight or "data_shard" in fixed:
        return layouts
    zero = layouts.sharding != "weights"
    alone = (layouts.tp == 1) & (layouts.cp == 1) & (layouts.ep == 1) & (layouts.data_shard == 0)
    allowed = zero | alone
    return layouts.where(allowed) if np.any(allowed) else layouts


def _schedules(model: ModelConfig, pp: int, fixed: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the pairs (schedule, virtual stages per rank) that a pipeline of `pp` ranks may use."""
    wanted: str | None = fixed.get("schedule")
    most = min(model.layers // pp, MAX_CHUNKS)
    schedules = [("1f1b", 1)]
    if pp > 1 or wanted == "gpipe":  # with pp = 1 all schedules execute the same actions
        schedules += [("gpipe", 1)]
    if pp > 1:
        schedules += [
            ("zb-h1", 1),
            *(("interleaved", v) for v in range(2, most + 1)),
            *((name, 2) for name in V_SHAPED if most > 1),
        ]
    if wanted == SEARCHED:
        schedules = [(name, v) for name, v in schedules if name in V_SHAPED]
    elif wanted and pp > 1 and wanted not in (name for name, _ in schedules):
        # The other schedules are tried only on request. ZB-H2 is faster only if steps overlap, and interleaved ZB needs
        # the most memory.
        schedules = [
            (wanted, v)
            for v in range(1, most + 1)
            if v in rule(wanted).chunks and (v > 1 or len(rule(wanted).chunks) == 1)
        ]
    return [(name, v) for name, v in schedules if fixed.get("chunks", v) == v and wanted in (None, SEARCHED, name)]


def _shardings(model: ModelConfig, degrees: Layout, node: int, fixed: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the pairs (sharding, data_shard) that a layout with these degrees may use.

    Weights are sharded over all replicas (data_shard 0) or over replicas inside a node of `node` devices (HSDP).
    """
    replicas = degrees.replicas
    only = fixed.get("data_shard")
    choices = [("none", 0), ("optimizer", 0)] if replicas > 1 else [("optimizer", 0)]
    # topology.plan refuses sharded weights with narrow gradients. It also refuses sharded weights with a pipeline,
    # because a pipeline needs many microbatches and would gather the weights for each microbatch.
    if replicas > 1 and degrees.pp == 1 and model.moe is None and fixed.get("gradient_wire", "full") == "full":
        inside = [shard for shard in divisors(replicas) if 1 < shard < replicas and shard * degrees.tp <= node]
        choices += [("weights", shard) for shard in (divisors(replicas) if only else [0, *inside])]
    return [(name, shard) for name, shard in choices if fixed.get("sharding", name) == name and only in (None, shard)]


def _options(
    model: ModelConfig,
    degrees: Layout,
    per_replica: int,
    node: int,
    fixed: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    """Return all layouts that have the parallel degrees of `degrees` and the values of `fixed`, as columns."""
    tp = degrees.tp
    cp = degrees.cp
    pp = degrees.pp
    dp = degrees.dp
    if per_replica <= 4096 * MAX_MICROBATCH:
        microbatches = [B for B in divisors(per_replica) if B <= MAX_MICROBATCH]
    else:
        microbatches = []
    schedules = _schedules(model, pp, fixed)
    shardings = _shardings(model, degrees, node, fixed)
    orders = list(AXIS_ORDERS) if pp > 1 and dp > 1 else [AXIS_ORDERS[0]]

    def left(field: str, values: Sequence[Any]) -> np.ndarray:
        return np.array(
            [value for value in values if fixed.get(field, value) == value],
            dtype=np.array(values).dtype if values else int,
        )

    choices = {
        "micro_batch": left("micro_batch", microbatches),
        "schedule": np.array([name for name, _ in schedules], dtype="U32"),
        "sequence_parallel": left(
            "sequence_parallel",
            [False, True] if tp > 1 and model.sequence_length // cp % tp == 0 else [False],
        ),
        "recompute": np.array([fixed["recompute"]] if "recompute" in fixed else RECOMPUTE),
        "sharding": np.array([name for name, _ in shardings], dtype="U9"),
        "axis_order": left("axis_order", orders) if len(orders) > 1 else np.array(orders),
        "context_attention": np.array(context_ways(model, tp, cp, fixed.get("context_attention")), dtype="U6"),
    }
    shape = [len(values) for values in choices.values()]
    picks = dict(zip(choices, np.indices(shape).reshape(len(shape), -1), strict=True))
    columns = {field: values[picks[field]] for field, values in choices.items()}
    columns |= {
        axis: np.full(len(picks["schedule"]), degree)
        for axis, degree in (("tp", tp), ("cp", cp), ("pp", pp), ("dp", dp), ("ep", degrees.ep))
    }
    columns["chunks"] = np.array([v for _, v in schedules], dtype=int)[picks["schedule"]]
    columns["data_shard"] = np.array([shard for _, shard in shardings], dtype=int)[picks["sharding"]]
    columns["microbatches"] = per_replica // columns["micro_batch"]
    columns["expert_nodes"] = np.ones_like(columns["ep"])  # topology.expert_nodes.over_nodes sets the number
    return columns


def parse_fixed(words: list[str]) -> dict[str, Any]:
    """Parse the values of `--fix`: ['tensor=8', 'recompute=full'] → {'tp': 8, 'recompute': 'full'}.

    Raises one ConfigError that lists all invalid words.
    """
    fixed: dict[str, Any] = {}
    problems = []
    for word in words:
        key, separator, text = word.partition("=")
        name = key.rsplit(".", 1)[-1]  # accept tensor=8 and parallel.tensor=8
        if not separator or name not in FIXABLE:
            problems.append(Problem(where=word, what="is not a choice that can be fixed", fix=suggest(name, FIXABLE)))
            continue
        if FIXABLE[name] in fixed:
            problems.append(Problem(where=word, what=f"{name} is fixed twice", fix=f"give --fix {name}=VALUE once"))
            continue
        meanings = MEANINGS.get(name, {})
        readers: dict[str, Callable[[str], Any]] = {
            "recompute": recompute_modes,
            "imbalance": float,
            "schedule": _schedule,
        }
        read = readers.get(name, meanings.__getitem__ if meanings else _whole)
        try:
            fixed[FIXABLE[name]] = read(text.lower())
        except LayoutError as error:
            problems += error.problems
        except (ValueError, KeyError):
            valid = ", ".join(meanings) or ("a number" if name == "imbalance" else "a whole number")
            problems.append(Problem(where=word, what=f"{text!r} is not a value of {name}", fix=f"use {valid}"))
    if problems:
        raise ConfigError(problems)
    return fixed


def choices_of(layout: Layout) -> dict[str, Any]:
    """Return field → value of a layout, as from `parse_fixed`, for every field that `--fix` can fix."""
    choices = {field: getattr(layout, field) for key, field in FIXABLE.items() if key != "expert_all_to_all"}
    return {**choices, "expert_all_to_all": run_keys(layout)["parallel"]["expert_all_to_all"]}


def fixed_words(fixed: Mapping[str, Any]) -> str:
    """Return the values that `parse_fixed` returned as text of the form that `--fix` accepts, for messages."""
    names = {field: name for name, field in FIXABLE.items() if name != "data_mode"}
    stages = {sharding: stage for stage, sharding in BY_STAGE.items()}
    return " ".join(
        f"{names[field]}={stages[value] if field == 'sharding' else value}" for field, value in fixed.items()
    )


def _schedule(text: str) -> str:
    """Return the name of a schedule, which a plugin may have registered. Raises LayoutError with the closest name if it
    is unknown.
    """
    known = {name.lower(): name for name in (*names(), SEARCHED)}
    if text not in known:
        rule(text)  # the name may be a member of a family of schedules, such as v:2,2,2,2
    return known.get(text, text)


def _whole(text: str) -> int:
    """Return a positive integer, or raise ValueError."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def legal_node_counts(
    model: ModelConfig,
    devices_per_node: int,
    nodes: int,
    global_batch: int,
    fixed: Mapping[str, Any],
) -> list[int]:
    """Return the nearest node counts, below and above `nodes`, that have a legal layout."""

    def legal(number: int) -> bool:
        only = {"sharding": "optimizer", "recompute": "full", **fixed}
        return len(enumerate_layouts(model, number * devices_per_node, global_batch, devices_per_node, only)) > 0

    below = next((number for number in range(nodes - 1, 0, -1) if legal(number)), None)
    above = next((number for number in range(nodes + 1, 4 * nodes + 64) if legal(number)), None)
    counts = [number for number in (below, above) if number]
    return nearest(nodes, counts) if counts else []
