"""Measures one rank's time and memory for plan and manifest of a checkpoint of the 1T model on 3072 ranks.

    python -m benchmarks.training.checkpoint_of_1t [--model gpt-1t --tp 8 --pp 64 --dp 6]

The ranks are simulated one after another in one process. Each rank's real buckets (on the meta device) go through the
code that a save and a load call, and nothing is written. The work of a single rank is timed. For a save this is rank
0's part: collect all ranks' pieces, build and serialise the manifest. For a load it is any rank's part: parse the
manifest and plan its transfers, from the same and from another layout. Seconds are CPU seconds, which equal wall time
on an idle core.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from functools import lru_cache
from typing import Any

import torch

from benchmarks.harness import parse_arguments
from frontier_llm.blueprint.optimizers import ADAMW
from frontier_llm.checkpoint.facts import JobFacts, build_manifest, contents_of
from frontier_llm.checkpoint.load import plan
from frontier_llm.checkpoint.manifest import Progress, SavedPiece, parse, shard_name
from frontier_llm.checkpoint.shard import shard_layout
from frontier_llm.comm import Axis, Ledger
from frontier_llm.config import CommConfig, OpsConfig, OptimizerConfig, load_model
from frontier_llm.model import Stage, build_stages
from frontier_llm.ops import select_ops
from frontier_llm.optim import Zero, build_buckets
from frontier_llm.parallel.tensor import LayerContext, WeightGradients
from frontier_llm.topology.grid import Grid
from frontier_llm.topology.plan import split_layers

OPS = select_ops(OpsConfig(), "cpu", torch.bfloat16)  # only once, because each choice is logged


class Layout:
    """The ranks of one layout. Only (pp, tp) determine a stage, so all dp ranks share one stage object."""

    def __init__(self, model_name: str, tp: int, pp: int, dp: int) -> None:
        self.model = load_model(model_name)
        self.grid = Grid(tp, pp, dp)
        self.specs = split_layers(self.model, pp)
        self._stage = lru_cache(maxsize=tp)(self._build_stage)  # rank numbers have tp innermost

    def _axis(self, name: str, rank: int) -> Axis:
        ranks = self.grid.group(name, rank)
        return Axis(
            name,
            ranks.index(rank),
            len(ranks),
            ranks,
            None,
            Ledger(),
        )

    def _build_stage(self, pp_rank: int, tp_rank: int) -> Stage:
        rank = self.grid.global_rank(
            {
                **self.grid.coordinates(0),
                "tp": tp_rank,
                "pp": pp_rank,
            }
        )
        context = LayerContext(
            self._axis("tp", rank),
            True,
            OPS,
            WeightGradients(),
            torch.bfloat16,
        )
        (stage,) = build_stages(self.model, [self.specs[pp_rank]], context, torch.device("meta"))
        return stage

    def optimizer(self, rank: int) -> Zero:
        """Return the rank's optimizer, on the meta device."""
        place = self.grid.coordinates(rank)
        stage = self._stage(place["pp"], place["tp"])
        buckets = build_buckets(
            [stage], ADAMW, self._axis("dp", rank), 1, torch.device("meta"), CommConfig().bucket_elements
        )
        return Zero(buckets, OptimizerConfig(), OPS)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="gpt-1t")
    for axis, size in (("tp", 8), ("pp", 64), ("dp", 6)):
        options.add_argument(f"--{axis}", type=int, default=size)
    args = parse_arguments(options, smoke=["--model", "gpt-tiny", "--tp", "2", "--pp", "2", "--dp", "2"])
    tp: int = args.tp
    pp: int = args.pp
    dp: int = args.dp
    layout = Layout(args.model, tp, pp, dp)
    idle_mib = peak_mib()

    gathered = []
    sizes = []
    plan_s = 0.0
    for rank in range(layout.grid.world_size):
        optimizer = layout.optimizer(rank)
        started = time.process_time()
        pieces = [part for part in optimizer.state() if part.saved]
        places = [(piece, piece.rectangle) for piece in pieces]
        own = [
            SavedPiece(
                piece.name,
                place.offset,
                place.shape,
                tuple(piece.tensors),
                piece.global_shape,
            )
            for piece, place in places
        ]
        image = shard_layout(own, "F32", 1, shard_name(rank))
        plan_s = max(plan_s, time.process_time() - started)
        gathered.append(json.dumps({"pieces": own, "bytes": 0}))  # as it arrives over the network
        sizes.append((image.total_bytes, sum(piece.rectangle.numel for piece in pieces)))
    built_mib = peak_mib()

    started = time.process_time()
    contents = contents_of([json.loads(text)["pieces"] for text in gathered], "F32")
    collect_s = time.process_time() - started
    started = time.process_time()
    parts: list[dict[str, Any] | None] = [
        {
            "file": shard_name(rank),
            "bytes": size,
            "sha256": f"{rank:064x}",
        }
        for rank, (size, _) in enumerate(sizes)
    ]
    progress = Progress(
        step=1, consumed_samples=0, tokens=0, optimizer_updates=0, loss_scale=1.0, scaler_clean_steps=0, skipped_steps=0
    )
    facts = JobFacts(config={}, optimizer="adamw", incarnation=1)
    manifest = build_manifest(progress, facts, contents, parts)
    content = manifest.to_bytes()
    manifest_s = time.process_time() - started

    loads = {}
    for name, other in (
        ("same layout", layout),
        (f"tp {tp // 2}, pp {pp}, dp {2 * dp}", Layout(args.model, tp // 2, pp, 2 * dp)),
        (f"tp {tp}, pp {pp // 2}, dp 1", Layout(args.model, tp, pp // 2, 1)),
    ):
        needed = other.optimizer(other.grid.world_size // 2).state()
        started = time.process_time()
        transfers = plan(parse(content, "manifest.json"), needed)
        loads[name] = {
            "s": round(time.process_time() - started, 3),
            "files": len(transfers),
            "rectangles": len(needed),
        }
    result = {
        "ranks": layout.grid.world_size,
        "parameters": sum(numel for _, numel in sizes),
        "checkpoint_tib": round(sum(size for size, _ in sizes) / 2**40, 2),
        "rectangles": sum(map(len, contents.pieces)),
        "manifest_mib": round(len(content) / 2**20, 2),
        "save: any rank's plan and header, once, s": round(plan_s, 3),
        "save: rank 0 collects the pieces, once, s": round(collect_s, 3),
        "save: rank 0 builds and serialises the manifest, s": round(manifest_s, 3),
        "load: parse and plan": loads,
        "memory above an idle process, MiB": round(peak_mib() - min(idle_mib, built_mib), 1),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
