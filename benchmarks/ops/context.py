"""Measures context parallelism: CPU time and memory of a training step whose sequence is split over 1, 2 and 4 ranks.

    python -m benchmarks.ops.context [--core] [--tokens 16384 32768] [--ranks 1 2 4] [--ways gather ring heads]
    [--json f] [--figure f] [--page] [key=value …]

Each case runs in fresh processes of one thread each: one warm-up, then one measurement. The efficiency is the CPU time
of one rank over the CPU time of all ranks together. With one core per rank, this efficiency would be the speed-up
divided by the number of ranks. Memory is each process's peak.

--core measures attention alone, forward and backward, and adds the algorithm `torch`. It is the ring of torch's context
parallelism around torch's own CPU kernel. (torch's public function `context_parallel` supports GPU kernels only.) Other
load on the machine only adds time. The file of --json therefore keeps, for each case, the measurement with the least
CPU time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from benchmarks.harness import MEASURED, parse_arguments, read_json, run_ranks, write_json, write_measured
from frontier_llm.comm import Meeting, Mesh, barrier, build_mesh, connect, disconnect, serial_mesh
from frontier_llm.config import RunConfig, build
from frontier_llm.config.load import load_model, merge, parse_overrides
from frontier_llm.data.loader import open_batches
from frontier_llm.ops import Scores, select_ops, working_dtype
from frontier_llm.parallel.context import attention_core
from frontier_llm.topology.plan import make_plan
from frontier_llm.training.build import build_state
from frontier_llm.training.step import train_step

MIB = 2**20


def config_of(tokens: int, ranks: int, way: str, overrides: list[str]) -> RunConfig:
    """Return the configuration of one block of a small model. Attention is most of its work, as with long sequences."""
    shape = {
        "layers": 1,
        "hidden": 256,
        "heads": 4,
        "kv_heads": 4,
        "ffn_hidden": 1024,
        "vocab_size": 1024,
        "sequence_length": tokens,
    }
    content = {
        "model": load_model("llama-tiny", shape).model_dump(),
        "parallel": {"context": ranks, "context_attention": "ring" if way == "torch" else way},
        "batch": {"global_batch": 1},
        "precision": {"dtype": "bf16"},
        "train": {"steps": 2},
    }
    return build(RunConfig, merge(content, parse_overrides(overrides)))


def step_of(config: RunConfig, mesh: Mesh) -> Callable[[], object]:
    """Return a training step of this rank as a function."""
    batches = open_batches(config, mesh.dp.rank, mesh.dp.size)
    state = build_state(
        config,
        make_plan(config, mesh.cp.size),
        mesh,
        torch.device("cpu"),
        batches,
    )
    return lambda: train_step(state)


def core_of(config: RunConfig, mesh: Mesh, way: str) -> Callable[[], object]:
    """Return attention of this rank's tokens, forward and backward, as a function."""
    model = config.model
    dtype = working_dtype(config.precision.dtype)
    rows = model.sequence_length // mesh.cp.size
    scale = model.dim_per_head**-0.5
    q, k, v, grad = (
        torch.randn(
            rows,
            1,
            heads,
            model.dim_per_head,
            dtype=dtype,
        )
        for heads in (model.heads, *2 * [model.num_kv_heads], model.heads)
    )
    if way == "torch":
        return lambda: torch_ring([x.permute(1, 2, 0, 3) for x in (q, k, v, grad)], scale)
    core = attention_core(select_ops(config.ops, "cpu", dtype), mesh.cp, config.parallel.context_attention)
    inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    return lambda: torch.autograd.grad(core(*inputs, Scores(scale)), inputs, grad)


def torch_ring(tensors_BaSD: Sequence[Tensor], scale: float) -> None:
    """Run torch's ring attention on `tensors_BaSD`: q, k, v and the gradient, balanced as in this project.

    torch's table of kernels has no entry for a CPU, so the CPU kernel is passed in.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    (q_BaSD, k_BaSD, v_BaSD, grad_BaSD), group, op = tensors_BaSD, distributed.group.WORLD, torch.ops.aten
    assert group is not None
    forward = op._scaled_dot_product_flash_attention_for_cpu
    backward = op._scaled_dot_product_flash_attention_for_cpu_backward
    options: dict[str, Any] = {
        "is_causal": True,
        "dropout_p": 0.0,
        "scale": scale,
    }
    out, logsumexp = theirs._templated_ring_attention(
        group,
        2,
        forward,
        q_BaSD,
        k_BaSD,
        v_BaSD,
        **options,
    )
    theirs._templated_ring_attention_backward(
        group,
        2,
        backward,
        grad_out=grad_BaSD,
        grad_out_name="grad_out",
        query=q_BaSD,
        key=k_BaSD,
        value=v_BaSD,
        out=out,
        logsumexp=logsumexp,
        **options,
    )


def serve(
    rank: int, port: int, ranks: int, case: dict[str, Any], config: RunConfig, results: multiprocessing.Queue
) -> None:
    """Run one rank's process."""
    torch.set_num_threads(1)
    plan = make_plan(config, ranks)
    mesh = serial_mesh()
    if ranks > 1:
        connect(
            rank,
            ranks,
            Meeting("127.0.0.1", port, 0, ranks),
            "gloo",
            600.0,
        )
        mesh = build_mesh(
            plan.grid,
            rank,
            plan.placement,
            config.model.tied_embeddings,
            600.0,
            config.comm,
        )
    work = core_of(config, mesh, case["way"]) if case["core"] else step_of(config, mesh)
    work()
    barrier(mesh.world)
    mesh.ledger.bytes.clear()
    cpu_s = time.process_time()
    begin_s = time.perf_counter()
    work()
    row: dict[str, float] = {"cpu_s": time.process_time() - cpu_s, "wall_s": time.perf_counter() - begin_s}
    row["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    row["moved_bytes"] = sum(size for (axis, _), size in mesh.ledger.bytes.items() if axis == "cp")
    results.put(row)
    if ranks > 1:
        barrier(mesh.world)
        disconnect()


def measure(case: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    ranks = case["ranks"]
    config = config_of(case["tokens"], ranks, case["way"], overrides)
    rows = run_ranks(
        ranks,
        serve,
        ranks,
        case,
        config,
        results=ranks,
        timeout_s=3000,
    )
    greatest = {name: max(row[name] for row in rows) for name in ("wall_s", "peak_bytes", "moved_bytes")}
    return {
        **case,
        "cpu_s": sum(row["cpu_s"] for row in rows),
        "slowest_cpu_s": max(row["cpu_s"] for row in rows),
        **greatest,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    alone = {(row["core"], row["tokens"]): row for row in rows if row["ranks"] == 1}
    lines = [
        "| | tokens | ranks | way | CPU s, all ranks | slowest rank | efficiency | peak MiB per rank | MiB moved per "
        "rank |"
    ]
    lines.append("|---|--:|--:|---|--:|--:|--:|--:|--:|")
    for row in rows:
        base = alone.get((row["core"], row["tokens"]))
        efficiency = f"{base['cpu_s'] / row['cpu_s']:.2f}" if base else ""
        way, moved = (row["way"], f"{row['moved_bytes'] / MIB:.0f}") if row["ranks"] > 1 else ("", "0")
        lines.append(
            f"| {'attention' if row['core'] else 'step'} | {row['tokens']} | {row['ranks']} | {way} | "
            f"{row['cpu_s']:.2f} | {row['slowest_cpu_s']:.2f} "
            f"| {efficiency} | {row['peak_bytes'] / MIB:.0f} | {'' if way == 'torch' else moved} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot efficiency and memory of a step over the number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    rows = [row for row in rows if not row["core"]]
    alone = {row["tokens"]: row for row in rows if row["ranks"] == 1}
    for tokens, way in product(sorted(alone), dict.fromkeys(row["way"] for row in rows if row["ranks"] > 1)):
        line = [
            alone[tokens],
            *(row for row in rows if row["tokens"] == tokens and row["way"] == way and row["ranks"] > 1),
        ]
        ranks = [row["ranks"] for row in line]
        left.plot(
            ranks,
            [alone[tokens]["cpu_s"] / row["cpu_s"] for row in line],
            marker="o",
            label=f"{tokens // 1024}K, {way}",
        )
        right.plot(ranks, [row["peak_bytes"] / MIB for row in line], marker="o")
    left.axhline(0.85, color="grey", linestyle=":")
    left.set(xlabel="ranks that hold the sequence", ylabel="CPU s of one rank / CPU s of all", ylim=(0, 1.1))
    right.set(xlabel="ranks that hold the sequence", ylabel="peak MiB per rank", ylim=(0, None))
    left.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", action="store_true", help="measure only attention, without the rest of the layer")
    parser.add_argument("--tokens", type=int, nargs="*", default=[16384, 32768])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--ways", nargs="+", default=["gather", "ring", "heads"])
    parser.add_argument("--json", type=Path, help="file to which the rows are added")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--page", action="store_true", help="write the table into docs/benchmarks/long_context.md")
    parser.add_argument("overrides", nargs="*", help="keys of the run, as key=value")
    arguments = parse_arguments(parser, smoke=["--core", "--tokens", "256", "--ranks", "2", "--ways", "ring"])
    rows: list[dict[str, Any]] = read_json(arguments.json, [])
    for tokens, ranks in product(arguments.tokens, arguments.ranks):
        for way in arguments.ways if ranks > 1 else ["gather"]:
            case = {
                "core": arguments.core,
                "tokens": tokens,
                "ranks": ranks,
                "way": way,
            }
            earlier = [row for row in rows if {key: row[key] for key in case} == case]
            best = min([measure(case, arguments.overrides), *earlier], key=lambda row: row["cpu_s"])
            rows = sorted(
                [best, *(row for row in rows if row not in earlier)], key=lambda row: [row[key] for key in case]
            )
            write_json(arguments.json, rows)
    if arguments.figure:
        draw(rows, arguments.figure)
    if arguments.page:
        write_measured(MEASURED / "long_context.md", __file__, table(rows) + "\n")
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
